"""The rules of `tilestep.rules` that torch does not have, against their authors' algorithms as plain numpy loops."""

from __future__ import annotations

import contextvars
import functools
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import published
import pytest
import torch
from published import STEPS, problem

import tilestep
from tilestep.errors import RuleError
from tilestep.graph import trace
from tilestep.linalg.coefficients import COEFFICIENTS, rows_of
from tilestep.rules import Rule, registry
from tilestep.rules.scalars import global_reduce

MATRIX, VECTOR = (5, 7), (11,)
History = list[np.ndarray]


def with_exact_products(rule: Rule) -> Rule:
    """The rule with the orthogonalization in float64, whose bfloat16 products tests/linalg compares with it."""

    def exact(x: Any, steps: Any = None, coefficients: Any = COEFFICIENTS, eps: Any = 1e-7) -> Any:
        rows = [tuple(map(float, row)) for row in rows_of(coefficients, None if steps is None else int(steps))]
        return torch.from_numpy(published.zeroth_power(x.numpy(), float(eps), rows))

    function: Any = rule.function
    copied: Any = types.FunctionType(function.__code__, {**function.__globals__, "orthogonalize": exact})
    copied.__kwdefaults__ = function.__kwdefaults__
    return Rule(copied, states=rule.states, ranges=rule.ranges)


def first_states(rule: Rule, param: torch.Tensor, hyper: dict[str, Any]) -> list[torch.Tensor]:
    """A rule's state buffers as an optimizer would make them."""
    states = []
    for state in rule.states.values():
        if state.init == "param":
            states.append(param.clone())
            continue
        number = hyper[state.init] if isinstance(state.init, str) else state.init
        like = {"param": param, "row": param[..., :1]}.get(state.shape, param.sum())
        states.append(torch.full_like(like, number))
    return states


def run(rule: Rule, shape: tuple[int, ...], **changes: Any) -> History:
    """The parameter after each of the steps of the rule's reference."""
    start, gradient = problem(shape)
    hyper = {**rule.hyperparameters, **changes}
    param = torch.from_numpy(start)
    states: Any = first_states(rule, param, hyper)
    history = []
    for t in range(1, STEPS + 1):
        param, *states = rule(param, gradient(param, t), *states, **hyper, step=t)
        history.append(param.numpy().copy())
    return history


def compare(rule: Rule, algorithm: Callable[..., Iterator[np.ndarray]], shape: tuple[int, ...], **changes: Any) -> None:
    start, gradient = problem(shape)
    hyper = {**rule.hyperparameters, **changes}
    expected = [p.copy() for p in algorithm(start.copy(), gradient, **hyper)]
    actual = run(rule, shape, **changes)
    assert len(expected) == STEPS
    assert np.abs(expected[-1] - start).max() > 1e-6, "the algorithm did not move, so the test shows nothing"
    for step, (ours, theirs) in enumerate(zip(actual, expected), 1):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12, err_msg=f"step {step}")


@pytest.mark.parametrize("shape", [MATRIX, VECTOR])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True, "eps": 1e-3},
        {"bias_correction": False, "grad_averaging": False},
        {"adam_w_mode": False, "weight_decay": 0.1},
    ],
)
def test_lamb(shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    compare(registry["LAMB"], published.lamb, shape, **changes)


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_a_zero_matrix_takes_the_ratio_one(name: str) -> None:
    zero = torch.zeros(3, 4, dtype=torch.float64)
    states = [zero] * len(registry[name].states)
    moved = registry[name](zero, torch.ones_like(zero), *states, step=1)[0]
    assert torch.isfinite(moved).all() and (moved < 0).all()
    still = registry[name](torch.ones_like(zero), zero, *states, weight_decay=0.0, step=1)[0]
    assert (still == 1).all()


@pytest.mark.parametrize("shape", [MATRIX, VECTOR])
@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1.0},
        {"lr": 2.0, "momentum": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.02, "nesterov": True},
        {"lr": 5.0, "exclude_bias_and_norm": False, "eps": 1e-2},
    ],
)
def test_lars(shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    compare(registry["LARS"], published.lars, shape, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.02, "betas": (0.7, 0.5), "weight_decay": 0.3},
        {"betas": (0.95, 0.98), "maximize": True},
    ],
)
def test_lion(changes: dict[str, Any]) -> None:
    compare(registry["Lion"], published.lion, VECTOR, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.05, "weight_decay": 0.2},
        {"betas": (0.9, 0.8, 0.95), "weight_decay": 0.1, "no_prox": True, "eps": 1e-3},
    ],
)
def test_adan(changes: dict[str, Any]) -> None:
    compare(registry["Adan"], published.adan, VECTOR, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.02, "betas": (0.8, 0.95, 0.99), "alpha": 5.0, "weight_decay": 0.1},
        {"alpha_warmup": 8, "beta3_warmup": 8},
        {"alpha_warmup": 100, "beta3_warmup": 50, "alpha": 8.0},
        {"betas": (0.0, 0.9, 0.99)},
    ],
)
def test_ademamix(changes: dict[str, Any]) -> None:
    compare(registry["AdEMAMix"], published.ademamix, VECTOR, **changes)


def test_ademamix_without_fast_momentum_has_no_buffer_for_it() -> None:
    rule = registry["AdEMAMix"]
    hyper = {**rule.hyperparameters, "betas": (0.0, 0.9, 0.99)}
    assert trace(rule, hyper).states == ("exp_avg_slow", "exp_avg_sq")
    ones = torch.ones(3)
    assert rule(ones, ones, None, ones, ones, **hyper, step=1)[1] is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"weight_decay": 0.1, "decouple": True, "maximize": True},
        {"clip_exponent": None},
        {"clip_exponent": 0.1, "eps": 0.5},
    ],
)
def test_adopt(changes: dict[str, Any]) -> None:
    compare(registry["ADOPT"], published.adopt, VECTOR, **changes)


@pytest.mark.parametrize(
    ("name", "algorithm", "changes"),
    [
        ("ScheduleFreeSGD", published.schedule_free_sgd, {"lr": 0.05}),
        (
            "ScheduleFreeSGD",
            published.schedule_free_sgd,
            {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.1, "warmup_steps": 6},
        ),
        (
            "ScheduleFreeSGD",
            published.schedule_free_sgd,
            {"r": 1.5, "weight_lr_power": 0.0, "lr": 0.02, "warmup_steps": 100},
        ),
        ("ScheduleFreeAdamW", published.schedule_free_adamw, {}),
        (
            "ScheduleFreeAdamW",
            published.schedule_free_adamw,
            {"lr": 0.1, "betas": (0.95, 0.9), "weight_decay": 0.2, "r": 1.0},
        ),
        ("ScheduleFreeAdamW", published.schedule_free_adamw, {"lr": 0.02, "inner_momentum": 0.9, "weight_decay": 0.1}),
        ("ScheduleFreeAdamW", published.schedule_free_adamw, {"warmup_steps": 10, "weight_lr_power": 1.0, "eps": 1e-2}),
    ],
)
def test_schedule_free(name: str, algorithm: Any, changes: dict[str, Any]) -> None:
    rule = registry[name]
    compare(rule, lambda *args, **hyper: (y for y, _, _ in algorithm(*args, **hyper)), VECTOR, **changes)
    hyper = {**rule.hyperparameters, **changes}
    for y, x, z in algorithm(*problem(VECTOR), **hyper):
        evaluated = rule.evaluated(torch.from_numpy(y), {"z": torch.from_numpy(z)}, hyper)
        np.testing.assert_allclose(evaluated.numpy(), x, rtol=1e-10, atol=1e-12)


def test_schedule_free_survives_a_learning_rate_of_zero() -> None:
    rule, one = registry["ScheduleFreeSGD"], torch.ones(2, dtype=torch.float64)
    scalar = torch.zeros((), dtype=torch.float64)
    param, z, weight_sum, lr_max = rule(one, one, one, scalar, scalar - 1, lr=0.0, step=1)
    assert (param == 1).all() and (z == 1).all() and weight_sum == 0 and lr_max == 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 0.05, "betas": (0.9, 0.9), "weight_decay": 0.3}, {"rho": 0.5, "bs": 8, "maximize": True, "lr": 0.01}],
)
def test_sophia_reads_the_hessian_and_leaves_it(changes: dict[str, Any]) -> None:
    rule = registry["SophiaG"]
    hyper = {**rule.hyperparameters, **changes}
    start, gradient = problem(VECTOR)
    hessian = np.abs(np.random.default_rng(1).normal(size=VECTOR)) / (hyper["rho"] * hyper["bs"])
    hessian[0] = 0.0
    param, exp_avg, estimate = (
        torch.from_numpy(start),
        torch.zeros(VECTOR, dtype=torch.float64),
        torch.from_numpy(hessian),
    )
    for t, expected in enumerate(published.sophia_g(start.copy(), gradient, hessian, **hyper), 1):
        param, exp_avg, after = rule(param, gradient(param, t), exp_avg, estimate, **hyper)
        np.testing.assert_allclose(param.numpy(), expected, rtol=1e-10, atol=1e-12)
        assert after is estimate
    assert "hessian" not in trace(rule, hyper).outputs


@pytest.mark.parametrize(
    "changes", [{}, {"lr": 0.05, "betas": (0.8, 0.9999), "weight_decay": 0.2}, {"eps": 0.5, "betas": (0.95, 0.5)}]
)
def test_stable_adamw(changes: dict[str, Any]) -> None:
    compare(registry["StableAdamW"], published.stable_adamw, MATRIX, **changes)


@pytest.mark.parametrize("shape", [MATRIX, VECTOR])
@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 0.05, "beta": 0.8, "weight_decay": 0.3, "embedding": True}, {"shrink_ratio": None, "lr": 0.02}],
)
def test_tiger(shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    compare(registry["Tiger"], published.tiger, shape, **changes)


def test_tiger_shrinks_towards_the_center_where_a_gradient_is_not_a_number() -> None:
    param, momentum = torch.full((2, 3), 3.0), torch.full((2, 3), 0.25)
    grad = torch.zeros(2, 3)
    grad[1, 1] = math.nan
    param, after = registry["Tiger"](param, grad, momentum, center=1.0)
    torch.testing.assert_close(param, torch.full((2, 3), 1 + 2 * 0.99))
    assert torch.equal(after, momentum)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.05, "betas": (0.7, 0.9), "weight_decay": 0.01, "eps": 1e-3},
        {"amsgrad": True, "betas": (0.9, 0.6)},
        {"centered": True, "betas": (0.9, 0.95), "lr": 0.01},
        {"centered": True, "amsgrad": True, "betas": (0.8, 0.9)},
        {"lr": lambda t: 0.01 + 0.02 * (t % 5), "betas": (0.9, 0.99)},
    ],
)
def test_laprop(changes: dict[str, Any]) -> None:
    compare(registry["LaProp"], published.laprop, VECTOR, **changes)


def test_laprop_with_a_learning_rate_of_zero_stands_still() -> None:
    rule, one = registry["LaProp"], torch.ones(2, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    param, exp_avg, *_ = rule(one, one, 0 * one, zero, zero, 0 * one, None, None, lr=0.0, step=1)
    assert (param == 1).all() and (exp_avg == 0).all()
    assert (rule(one, one, one, zero + 1, zero + 1, one, None, None, lr=0.0, step=9)[0] == 1).all()


@pytest.mark.parametrize(
    "changes", [{}, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.3, "a": 2.0, "b": 0.5}, {"b": 3.0}]
)
def test_adam_atan2(changes: dict[str, Any]) -> None:
    compare(registry["AdamAtan2"], published.adam_atan2, VECTOR, **changes)


@pytest.mark.parametrize("shape", [MATRIX, VECTOR])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3, "gamma": 0.2, "lr_1d_factor": 0.5},
        {"optimize_1d": True, "amsgrad": True, "betas": (0.9, 0.5)},
        {"mars_type": "mars-lion", "weight_decay": 0.1, "optimize_1d": True},
    ],
)
def test_mars(shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    compare(registry["MARS"], published.mars, shape, **changes)


def test_mars_reads_a_gradient_that_the_training_writes() -> None:
    rule = registry["MARS"]
    hyper = {**rule.hyperparameters, "is_approx": False}
    start, gradient = problem(MATRIX)
    written = np.random.default_rng(1).normal(size=(STEPS + 1, *MATRIX))
    param, exp_avg, square = torch.from_numpy(start), *torch.zeros(2, *MATRIX, dtype=torch.float64)
    algorithm = published.mars(start.copy(), gradient, **hyper, before=lambda t: written[t])
    for t, expected in enumerate(algorithm, 1):
        last = torch.from_numpy(written[t])
        param, exp_avg, after, square, _ = rule(param, gradient(param, t), exp_avg, last, square, None, **hyper, step=t)
        np.testing.assert_allclose(param.numpy(), expected, rtol=1e-10, atol=1e-12)
        assert after is last
    assert "last_grad" not in trace(rule, hyper).outputs


@pytest.mark.parametrize("shape", [MATRIX, (7, 5)])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("NorMuon", {}),
        ("NorMuon", {"lr": 0.1, "momentum": 0.7, "beta2": 0.8, "weight_decay": 0.3, "nesterov": False}),
        ("NorMuon", {"adjust_lr_fn": "match_rms_adamw", "lr_scale": 0.5, "eps": 1e-2}),
        ("NorMuon", {"adjust_lr_fn": "spectral_unclamped"}),
        ("NorMuon", {"adjust_lr_fn": "spectral"}),
        ("AdaMuon", {}),
        ("AdaMuon", {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.3, "nesterov": False, "eps": 1e-2}),
        ("MuonH", {}),
        ("MuonH", {"lr": 0.1, "momentum": 0.7, "nesterov": False, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 4}),
        ("Scion", {}),
        ("Scion", {"lr": 0.1, "momentum": 0.2, "norm": "Spectral", "scale": 3.0, "normalized": False, "ns_steps": 3}),
        ("Scion", {"lr": 0.1, "norm": "Sign", "unconstrained": True}),
        ("Scion", {"lr": 0.1, "norm": "Sign", "normalized": False, "momentum": 0.5}),
        ("Scion", {"lr": 0.1, "norm": "ColNorm"}),
        ("Scion", {"lr": 0.1, "norm": "ColNorm", "normalized": True, "transpose": True}),
        ("Scion", {"lr": 0.1, "norm": "RowNorm", "momentum": 0.3}),
        ("Scion", {"lr": 0.1, "norm": "RowNorm", "normalized": False, "transpose": True}),
        ("MARS", {"mars_type": "mars-shampoo", "weight_decay": 0.1}),
    ],
)
def test_rules_of_matrices(name: str, shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    compare(with_exact_products(registry[name]), getattr(published, name.lower()), shape, **changes)


@pytest.mark.parametrize("changes", [{}, {"norm": "BiasRMS", "momentum": 0.2, "scale": 3.0}])
def test_scion_of_vectors(changes: dict[str, Any]) -> None:
    compare(registry["Scion"], published.scion, VECTOR, **changes)


def test_muonh_preserves_the_norm() -> None:
    start, _ = problem(MATRIX)
    moved = run(with_exact_products(registry["MuonH"]), MATRIX, lr=0.5)
    assert [np.linalg.norm(p) for p in moved] == pytest.approx([np.linalg.norm(start)] * STEPS, rel=1e-12)


def test_scion_refuses_norms_for_other_shapes() -> None:
    for shape, norm in [((5,), "Sign"), ((5,), "Spectral"), ((4, 3), "BiasRMS")]:
        with pytest.raises(RuleError, match=f"Scion: norm='{norm}' is for"):
            tilestep.Scion([torch.nn.Parameter(torch.ones(shape))], norm=norm)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="norm"):
        tilestep.Scion([torch.nn.Parameter(torch.ones(4, 3))], norm="SpectralConv")  # type: ignore[attr-defined]


PRODIGY = [
    {},
    {"d0": 1e-2, "lr": 0.5, "weight_decay": 0.1, "use_bias_correction": True},
    {"d0": 1e-3, "growth_rate": 1.1, "d_coef": 2.0, "beta3": 0.9, "betas": (0.8, 0.95)},
    {"d0": 1e-2, "weight_decay": 0.1, "decouple": False, "safeguard_warmup": True, "eps": 1e-3},
]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run one rule call per tensor in lockstep, so that what they combine over tensors is combined."""
    barrier, values, results = threading.Barrier(len(calls)), [0.0] * len(calls), [None] * len(calls)

    def work(index: int) -> None:
        def combine(kind: str, value: Any) -> Any:
            values[index] = value
            barrier.wait(30)
            everything = torch.stack([torch.as_tensor(entry) for entry in values])
            barrier.wait(30)
            return everything.sum() if kind == "sum" else everything.amax()

        global_reduce.set(combine)
        results[index] = calls[index]()

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work, i)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("changes", PRODIGY)
def test_prodigy_over_several_tensors(changes: dict[str, Any]) -> None:
    starts, gradients = zip(*(problem(shape, seed) for seed, shape in enumerate([MATRIX, VECTOR, (3,)])))
    _compare_prodigy(starts, gradients, changes)


@pytest.mark.parametrize("beta3", [None, 0.5])
def test_prodigys_numbers_are_those_of_all_for_parameters_without_some_gradients(beta3: float | None) -> None:
    """One parameter's first gradient comes in step 5, another has none in steps 8 to 11."""
    without = ((), (1, 2, 3, 4), (8, 9, 10, 11))

    def absent(gradient: Callable[..., Any], steps: tuple[int, ...]) -> Callable[..., Any]:
        return lambda param, t: None if t in steps else gradient(param, t)

    starts, gradients = zip(*(problem(shape, seed) for seed, shape in enumerate([MATRIX, VECTOR, (3,)])))
    gradients = [absent(gradient, steps) for gradient, steps in zip(gradients, without)]
    params = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    changes = {"d0": 1e-3, "weight_decay": 0.1, "beta3": beta3}
    optimizer = tilestep.Prodigy(params, **changes)
    hyper = {**registry["Prodigy"].hyperparameters, **changes}
    algorithm = published.prodigy([start.copy() for start in starts], gradients, **hyper)
    for t, (expected, distance) in enumerate(algorithm, 1):
        has_grown = distance > 2e-3
        for param, gradient in zip(params, gradients):
            param.grad = gradient(param.detach(), t)
        optimizer.step()
        for param, theirs in zip(params, expected):
            np.testing.assert_allclose(param.detach().numpy(), theirs, rtol=1e-6, atol=1e-8, err_msg=f"step {t}")
            if param.grad is not None:
                assert optimizer.state[param]["d"].item() == pytest.approx(distance, rel=1e-6), f"step {t}"
    assert has_grown, "the step size did not grow, so the test shows nothing"


def test_prodigy_does_not_count_steps_in_which_nothing_moves() -> None:
    def waits(gradient: Callable[..., Any]) -> Callable[..., Any]:
        return lambda param, t: gradient(param, t) * (t > 3)

    starts, gradients = zip(*(problem(shape, seed) for seed, shape in enumerate([MATRIX, VECTOR])))
    changes = {"d0": 1e-2, "use_bias_correction": True, "betas": (0.9, 0.99)}
    _compare_prodigy(starts, [waits(gradient) for gradient in gradients], changes)


def _compare_prodigy(starts: Any, gradients: Any, changes: dict[str, Any]) -> None:
    rule = registry["Prodigy"]
    hyper = {**rule.hyperparameters, **changes}
    ours: list[Any] = []
    for start in starts:
        param = torch.from_numpy(start)
        ours.append([param, *first_states(rule, param, hyper)])
    distance = rule.state_names.index("d") + 1
    for t, (expected, d) in enumerate(published.prodigy([p.copy() for p in starts], list(gradients), **hyper), 1):
        arguments = [(b[0], gradient(b[0], t), *b[1:]) for b, gradient in zip(ours, gradients)]
        ours = together([functools.partial(rule, *buffers, **hyper, step=t) for buffers in arguments])
        for buffers, theirs in zip(ours, expected):
            np.testing.assert_allclose(buffers[0].numpy(), theirs, rtol=1e-9, atol=1e-12)
            assert buffers[distance].item() == pytest.approx(d, rel=1e-9)
    assert d > hyper["d0"], "the step size did not grow, so the test shows nothing"


def test_prodigy_stands_still_without_a_gradient_or_a_learning_rate() -> None:
    rule, param = registry["Prodigy"], torch.ones(3, dtype=torch.float64)
    states = first_states(rule, param, rule.hyperparameters)
    for grad, lr in ((torch.zeros_like(param), 1.0), (param, 0.0)):
        after = rule(param, grad, *states, lr=lr, step=1)
        for name, old, new in zip(("param", *rule.state_names), (param, *states), after):
            assert torch.equal(old, new), name


MODERN = ["Lion", "LAMB", "LARS", "Adan", "AdEMAMix", "ADOPT", "ScheduleFreeSGD", "ScheduleFreeAdamW", "SophiaG"]
MODERN += ["StableAdamW", "Tiger", "Prodigy"]
# What makes a rule use all of its states.
WITH_ALL_STATES: dict[str, dict[str, Any]] = {
    "Prodigy": {"use_bias_correction": True},
    "ScheduleFreeAdamW": {"inner_momentum": 0.9},
}


def test_prodigys_bias_correction_does_not_begin_before_the_learning_rate() -> None:
    def trained(rates: list[float]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = tilestep.Prodigy([weight], d0=1e-2, use_bias_correction=True)
        for t, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.tensor([0.5, -0.25 * max(t - rates.count(0.0), 0)], dtype=torch.float64)
            optimizer.step()
        return weight.detach()

    assert torch.equal(trained([0.0, 0.0, 1.0, 1.0, 1.0]), trained([1.0, 1.0, 1.0]))


@pytest.mark.parametrize("changes", [{}, {"decouple": False}, {"use_bias_correction": True}])
def test_prodigy_keeps_infinite_weights_and_shows_gradients_that_are_none(changes: dict[str, Any]) -> None:
    """As its authors' code, whose comparisons leave a step size that is not a number out."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64))
    optimizer = tilestep.Prodigy([weight], d0=1e-2, **changes)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.tensor([0.5, 0.1, -0.5], dtype=torch.float64)
        optimizer.step()
        assert weight[1] == -torch.inf and (weight[[0, 2]] != before[[0, 2]]).all() and weight[[0, 2]].isfinite().all()
    assert optimizer.state[weight]["d"] == 1e-2
    weight.grad = torch.tensor([0.5, torch.nan, -0.5], dtype=torch.float64)
    optimizer.step()
    assert weight[1].isnan()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LAMB", {}),
        ("LAMB", {"adam_w_mode": False}),
        ("ADOPT", {}),
        ("ADOPT", {"decouple": True}),
        ("SOAP", {}),
        ("Lion", {}),
        ("Adan", {}),
        ("StableAdamW", {}),
    ],
)
def test_infinite_weights_stay_as_they_are_without_weight_decay(name: str, options: dict[str, Any]) -> None:
    start = torch.tensor([[1.0, -torch.inf], [torch.inf, 2.0]], dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = getattr(tilestep, name)([weight], lr=0.1, weight_decay=0.0, **options)
    for _ in range(4):
        weight.grad = torch.tensor([[0.5, 0.1], [-0.5, 0.2]], dtype=torch.float64)
        optimizer.step()
    moved = weight.detach()
    assert moved[0, 1] == -torch.inf and moved[1, 0] == torch.inf
    assert torch.isfinite(moved[[0, 1], [0, 1]]).all() and (moved[[0, 1], [0, 1]] != start[[0, 1], [0, 1]]).all()


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_schedule_free_weights_are_summed_beyond_float32(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(tilestep, name)([weight], lr=1.0)
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    saved = optimizer.state_dict()
    # As checkpoints before had it, at a sum to which float32 adds no more 1.
    for key, value in (("weight_sum", 2.0**24), ("lr_max", 1.0)):
        saved["state"][0][key] = torch.tensor(value, dtype=torch.float32)
    optimizer.load_state_dict(saved)
    for _ in range(5):
        optimizer.step()
    assert optimizer.state[weight]["weight_sum"].item() == 2.0**24 + 5


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("name", MODERN)
def test_every_rule_traces(name: str, dims: int) -> None:
    rule = registry[name]
    graph = trace(rule, {**rule.hyperparameters, **WITH_ALL_STATES.get(name, {})}, dims=dims)
    assert "param" in graph.outputs
    assert set(graph.states) == set(rule.state_names)


@pytest.mark.parametrize("name", sorted(registry))
def test_every_rule_names_its_paper_and_refuses_a_negative_learning_rate(name: str) -> None:
    rule = registry[name]
    assert rule.__doc__ and "Equations" in rule.__doc__ and "Source:" in rule.__doc__
    with pytest.raises(ValueError, match="lr"):
        rule.check({"lr": -1.0})
    rule.check(rule.hyperparameters)
