"""Complex parameters, beside torch's optimizers: updated as pairs of reals, with complex state."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from matrix_rules import MATRIX_RULES
from twins import twins

import tilestep
from tilestep.errors import CaptureError, GradientError, OffloadError
from tilestep.execution.overlap.updates import follow_reductions
from tilestep.execution.zero.sharded import _prepared as prepared

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"maximize": True}),
    ("Adamax", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adadelta", {}),
    ("Adagrad", {"initial_accumulator_value": 0.3}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {"weight_decay": 0.1}),
]


def complex_params(dtype: torch.dtype = torch.complex64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=of, generator=generator)

    values = [drawn(5), drawn(4, 6).T, drawn(), drawn(0, 3), drawn(8, 9)[::2, 1::3], drawn(7, of=REAL[dtype])]
    return [torch.nn.Parameter(value) for value in values]


def draw(*models: list[torch.nn.Parameter], step: int, conjugated: bool = False) -> None:
    for params in models:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            gradient = torch.randn(param.shape, dtype=param.dtype, generator=generator)
            param.grad = gradient.conj() if conjugated else gradient


def assert_alike(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter], rtol: float) -> None:
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left.detach(), right.detach(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{list(case[1])}")
def test_steps_and_checkpoints_are_those_of_torch(case: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    name, arguments = case
    params = complex_params(dtype)
    others = twins(params)

    def make(module: Any, params: Any) -> Any:
        return getattr(module, name)(params, lr=0.1, **arguments)

    mine, theirs = make(tilestep, params), make(torch.optim, others)
    for step in range(8):
        draw(params, step=step, conjugated=step == 2)
        draw(others, step=step)
        if step == 2:
            for other in others:
                other.grad = other.grad.conj().resolve_conj()
        mine.step()
        theirs.step()
        if step == 4:
            saved, loaded = copy.deepcopy(mine.state_dict()), copy.deepcopy(theirs.state_dict())
            for place, state in loaded["state"].items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        assert saved["state"][place][key].dtype is value.dtype, key
                        assert saved["state"][place][key].shape == value.shape, key
            mine, theirs = make(tilestep, params), make(torch.optim, others)
            mine.load_state_dict(loaded)
            theirs.load_state_dict(saved)
    # torch keeps NAdam's product in float32.
    assert_alike(params, others, 2e-6 if dtype is torch.complex64 else 1e-7 if name == "NAdam" else 1e-13)


def test_a_parameter_that_moves_and_a_state_that_is_replaced() -> None:
    params = complex_params()
    others = twins(params)
    mine, theirs = tilestep.AdamW(params, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    for step in range(6):
        draw(params, others, step=step)
        if step == 2:
            for param in params:
                param.data = param.data.clone(memory_format=torch.contiguous_format)
        if step == 4:
            for optimizer, model in ((mine, params), (theirs, others)):
                for param in model:
                    optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 2
        mine.step()
        theirs.step()
    assert_alike(params, others, 2e-6)


def test_a_parameter_that_is_conjugated_later() -> None:
    """Lazily, by `.data`: its memory has other values from then on."""
    params = complex_params()
    others = twins(params)
    pairs = (tilestep.SGD, params), (torch.optim.SGD, others)
    for kind, model in pairs:
        optimizer = kind(model, lr=0.1, momentum=0.9)
        for step in range(6):
            for param in model:
                param.data = param.data.conj() if step == 4 else param.data
            draw(model, step=step)
            optimizer.step()
    assert_alike([param.resolve_conj() for param in params], [param.resolve_conj() for param in others], 2e-6)


def test_clip_scaler_and_skip_take_pairs_of_reals() -> None:
    params = complex_params()
    others = twins(params)
    mine, theirs = tilestep.AdamW(params, lr=0.1, max_grad_norm=0.5), torch.optim.AdamW(others, lr=0.1)
    scaler = tilestep.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        draw(params, others, step=step)
        scaler.scale(torch.zeros(()))
        for param in params:
            param.grad *= scaler.get_scale()
        if step == 1:
            params[0].grad[2] = complex(1.0, float("nan"))
        scaler.step(mine)
        scaler.update()
        if step == 1:
            assert mine.skipped_steps.item() == 1
            continue
        for left, right in zip(params, others, strict=True):
            torch.testing.assert_close(left.grad, right.grad)
        norm = torch.nn.utils.clip_grad_norm_(others, 0.5)
        torch.testing.assert_close(mine.grad_norm, norm)
        theirs.step()
    assert_alike(params, others, 2e-6)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("conjugated", [False, True])
def test_norm_and_clip_are_those_of_torch(norm_type: float, dtype: torch.dtype, conjugated: bool) -> None:
    # Of an empty tensor torch has no infinite norm.
    params = [param for param in complex_params(dtype) if param.numel()]
    others = twins(params)
    draw(params, step=0, conjugated=conjugated)
    draw(others, step=0)
    for other in others if conjugated else []:
        # torch's own clip refuses what is conjugated lazily.
        other.grad = other.grad.conj().resolve_conj()
    gradients = [param.grad for param in params]
    expected = torch.nn.utils.get_total_norm(gradients, norm_type)
    torch.testing.assert_close(tilestep.total_norm(gradients, norm_type), expected)
    for limit in (0.5, 1e9):
        norm = tilestep.clip_grad_norm_(params, limit, norm_type)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, limit, norm_type))
        for left, right in zip(params, others, strict=True):
            torch.testing.assert_close(left.grad, right.grad)


def test_weights_to_evaluate() -> None:
    params = complex_params()
    optimizer = tilestep.Optimizer(params, tilestep.ema(tilestep.registry["SGD"], 0.75), lr=1.0)
    before = [param.detach().clone() for param in params]
    draw(params, step=0)
    optimizer.step()
    with optimizer.averaged():
        for param, start in zip(params, before, strict=True):
            torch.testing.assert_close(param.detach(), start - 0.25 * param.grad)
    for param, start in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), start - param.grad)


@pytest.mark.parametrize("rule", sorted(tilestep.registry))
def test_every_rule_updates_pairs_or_refuses(rule: str) -> None:
    param = complex_params()[1]
    pairs = torch.nn.Parameter(torch.view_as_real(param.detach()).clone(memory_format=torch.preserve_format))
    optimizer = tilestep.Optimizer([pairs], rule) if rule not in MATRIX_RULES else None
    try:
        other = tilestep.Optimizer([param], rule)
    except GradientError as error:
        assert "does not support complex parameters" in str(error)
        return
    assert optimizer is not None
    for step in range(3):
        draw([param], step=step)
        pairs.grad = torch.view_as_real(param.grad).clone()
        version = param._version
        optimizer.step()
        other.step()
        assert param._version > version
    assert torch.equal(torch.view_as_real(param.detach()), pairs.detach())


@pytest.mark.parametrize("rule", ["Adafactor", "Muon", "SOAP"])
@pytest.mark.parametrize("shape", [(4,), (4, 6), (2, 3, 4)])
def test_rules_that_look_at_shapes_refuse(rule: str, shape: tuple[int, ...]) -> None:
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.complex64))
    with pytest.raises(GradientError, match=rf"parameter 0 of group 0 is complex: {rule} does not support complex"):
        tilestep.Optimizer([weight], rule)


def test_where_pairs_are_not_supported_they_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(GradientError, match="master_weights"):
        tilestep.AdamW([weight], master_weights="remainder")
    with pytest.raises(GradientError, match=r"dtype torch.complex32"):
        tilestep.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex32))])
    optimizer = tilestep.AdamW([weight])
    with pytest.raises(CaptureError):
        optimizer.prepare_capture()
    for where in ("cpu", "gpu"):
        with pytest.raises((OffloadError, GradientError), match="complex"):
            tilestep.offload(tilestep.AdamW([weight]), where=where)


class Waves(torch.nn.Module):
    """Complex and real parameters, of a real loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.phase = torch.nn.Parameter(torch.randn(6, dtype=torch.complex64, generator=generator))
        self.gain = torch.nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, step: int) -> torch.Tensor:
        return (self.phase * complex(step, 1.0) * self.gain - 1.0).abs().square().sum()


@pytest.mark.parametrize("during", ["backward", "forward"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_overlapped_updates_are_those_of_steps(during: Any, limit: float | None) -> None:
    results = []
    for overlapped in (True, False):
        model = Waves()
        optimizer = tilestep.AdamW(model.parameters(), lr=0.1, max_grad_norm=limit)
        if overlapped:
            tilestep.overlap(optimizer, model, during=during)
        for step in range(4):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *results))


def test_buckets_of_data_parallel_are_refused() -> None:
    net = Waves()
    wrapper = types.SimpleNamespace(find_unused_parameters=False, static_graph=False, module=net)
    with pytest.raises(ValueError, match=r'complex gradients .* during="forward"'):
        follow_reductions(None, wrapper)


def test_matrices_of_complex_numbers_are_not_for_muon() -> None:
    net = torch.nn.ModuleDict({"plain": torch.nn.Linear(3, 4), "waves": torch.nn.Linear(3, 4, dtype=torch.complex64)})
    groups = tilestep.muon_groups(net, outside="nothing")
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["plain.weight"],
        ["plain.bias", "waves.weight", "waves.bias"],
    ]
    tilestep.Muon(groups)


def test_sharding_refuses() -> None:
    weight = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(GradientError, match=r"is complex, which shard\(\) does not support"):
        prepared(tilestep.AdamW(weight.parameters()), weight, None)


@pytest.mark.parametrize("choice", ["int8", "int4", "float8_e4m3", "scaled_float16", torch.bfloat16])
def test_states_without_a_complex_type_are_refused_by_name(choice: Any) -> None:
    with pytest.raises(tilestep.StateError, match="parameter 0 of group 0 is complex: its state 'exp_avg' can be kept"):
        tilestep.AdamW([torch.nn.Parameter(torch.ones(64, 128, dtype=torch.complex64))], state_dtype=choice)


def test_full_precision_widens_complex_states() -> None:
    param = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.complex64))
    optimizer = tilestep.AdamW([param], state_dtype="float16")
    param.grad = torch.full_like(param, 1 + 2j)
    optimizer.step()
    widened = tilestep.full_precision(optimizer.state_dict())["state"][0]["exp_avg"]
    assert widened.dtype is torch.complex64
    torch.testing.assert_close(widened, 0.1 * param.grad, rtol=1e-3, atol=0)
