"""Steps that are skipped without a scaler: not finite, above a norm, above a multiple of the mean norm."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from amp_runs import INF, NAN, parameters

import tilestep
from tilestep import TimesMean

RULES = ["AdamW", "SGD", "LAMB", "Prodigy", "ADOPT"]


def make(rule: Any, params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.Optimizer(params, rule, lr=0.01, **options)


def give(params: list[torch.nn.Parameter], norm: float, seed: int = 0) -> None:
    """Gradients of this global norm."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(param.shape, generator=generator) for param in params]
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for param, gradient in zip(params, gradients):
        param.grad = (gradient * (norm / length)).to(param)


def spoil(params: list[torch.nn.Parameter], value: float) -> None:
    params[2].grad.view(-1)[3] = value  # type: ignore[union-attr]


def everything(params: list[torch.nn.Parameter], optimizer: tilestep.Optimizer) -> Any:
    state = [dict(optimizer.state[param]) for param in params]
    return copy.deepcopy([params, state, torch.get_rng_state(), random.getstate()[1]])


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def same_bits(left: Any, right: Any) -> bool:
    pairs = list(zip(flat(left), flat(right)))
    return len(pairs) > 5 and all(
        torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two for one, two in pairs
    )


def steps_as_if_skipped_ones_had_never_been(
    rule: Any, params: list[torch.nn.Parameter], twins: list[torch.nn.Parameter], value: float, **options: Any
) -> None:
    """Four steps, the first and the third with a gradient that is not finite, beside two without."""
    device = params[0].device.type
    optimizer = make(rule, params, skip_nonfinite=True, **options)
    twin = make(rule, twins, **options)
    # So that there is state to compare before the first step.
    optimizer.fitting_plan(ahead=True)
    for step in range(4):
        give(params, 1.0, step)
        if step in (0, 2):
            spoil(params, value)
        before = everything(params, optimizer)
        gradient = params[0].grad.clone()
        optimizer.step()
        if step in (0, 2):
            assert same_bits(everything(params, optimizer), before)
            assert torch.equal(params[0].grad, gradient)
        else:
            give(twins, 1.0, step)
            twin.step()
    assert optimizer.skipped_steps.device.type == device and int(optimizer.skipped_steps) == 2
    assert int(twin.skipped_steps) == 0
    assert same_bits(everything(params, optimizer), everything(twins, twin))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("rule", RULES)
def test_nonfinite_gradients_change_nothing(rule: str, value: float, device: str) -> None:
    steps_as_if_skipped_ones_had_never_been(rule, parameters(device), parameters(device), value)


MATRICES = [(5, 3), (3, 4), (4, 6), (6, 6)]
COMPOSED = {
    "cautious": tilestep.cautious(tilestep.registry["AdamW"]),
    "ema": tilestep.ema(tilestep.registry["SGD"], 0.5),
    "lookahead": tilestep.lookahead(tilestep.registry["AdamW"], 2),
}


# Those with remainders between them use every kind of state.
CASES = [
    *((name, master) for name in (*sorted(tilestep.registry), *COMPOSED) for master in (False, True)),
    *((name, "remainder") for name in ("AdamW", "ASGD", "Adafactor", "LAMB", "Muon", "NAdam", "Rprop", "lookahead")),
]


@pytest.mark.parametrize(("name", "master_weights"), CASES)
def test_a_skipped_step_changes_nothing_whatever_the_rule(name: str, master_weights: Any) -> None:
    dtype = torch.bfloat16 if master_weights else torch.float32
    params, twins = (parameters(dtype=dtype, shapes=MATRICES) for _ in range(2))
    rule = COMPOSED.get(name, name)
    steps_as_if_skipped_ones_had_never_been(rule, params, twins, NAN, master_weights=master_weights)


def test_skip_above_a_norm(device: str) -> None:
    params = parameters(device)
    optimizer = make("AdamW", params, skip_above=2.0)
    for norm, skipped in [(1.0, 0), (1.9999, 0), (2.001, 1), (50.0, 2), (0.5, 2)]:
        give(params, norm)
        before = everything(params, optimizer)
        optimizer.step()
        assert int(optimizer.skipped_steps) == skipped
        assert same_bits(everything(params, optimizer), before) == (norm > 2)
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
    spoil(params, NAN)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 3


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, tilestep.GradScaler])
def test_skip_above_compares_the_unscaled_norm(scaler_class: type[torch.amp.GradScaler]) -> None:
    """A step skipped for its norm is no overflow: the scale grows."""
    params = parameters()
    optimizer = make("AdamW", params, skip_above=2.0)
    scaler = scaler_class("cpu", 1024.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    for step, (norm, skipped) in enumerate([(1.9, 0), (2.1, 1)]):
        give(params, norm * 1024 * 2**step)
        scaler.step(optimizer)
        scaler.update()
        assert int(optimizer.skipped_steps) == skipped
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
        assert scaler.get_scale() == 1024 * 2 ** (step + 1)


def skips(optimizer: tilestep.Optimizer, params: list[torch.nn.Parameter], norms: list[float]) -> list[bool]:
    skipped = []
    for norm in norms:
        give(params, 1.0)
        for param in params:
            param.grad.mul_(norm)  # type: ignore[union-attr]
        before = int(optimizer.skipped_steps)
        optimizer.step()
        skipped.append(int(optimizer.skipped_steps) > before)
    return skipped


def mean_of(optimizer: Any) -> float:
    """The mean that `TimesMean` remembers; then it remembers how many norms went into it."""
    return optimizer.state_dict()["param_groups"][0]["limits"]["TimesMean"][0].item()


def test_times_mean_waits_then_skips_spikes() -> None:
    params = parameters()
    optimizer = make("AdamW", params, skip_above=TimesMean(3.0, decay=0.9, warmup=4))
    assert skips(optimizer, params, [1.0, 9.0, 1.0, NAN, 1.0]) == [False, False, False, True, False]
    assert mean_of(optimizer) == pytest.approx(3.0, rel=1e-5)
    # 9.1 enters as 9, the limit: the mean is 4.2 then.
    assert skips(optimizer, params, [9.1, 12.4, INF, 1.0]) == [True, False, True, False]


def test_times_mean_is_exponential_in_the_end() -> None:
    params = parameters()
    optimizer = make("SGD", params, skip_above=TimesMean(100.0, decay=0.5, warmup=1))
    skips(optimizer, params, [8.0, 4.0, 2.0, 6.0])
    # 8, (8 + 4) / 2, then half of each: (6 + 2) / 2, (4 + 6) / 2.
    assert mean_of(optimizer) == pytest.approx(5.0, rel=1e-5)


def test_times_mean_follows_a_lasting_rise_but_not_a_spike() -> None:
    params = parameters()
    optimizer = make("SGD", params, skip_above=TimesMean(2.0, decay=0.9, warmup=10))
    skips(optimizer, params, [1.0] * 40)
    assert skips(optimizer, params, [1000.0, 2.5, 1.0, 1.0]) == [True, True, False, False]
    rise = skips(optimizer, params, [10.0] * 60)
    count = rise.index(False)
    # The mean grows by (factor - 1) * (1 - decay) = 10% a step until half of 10 is reached.
    assert 15 <= count <= 18 and not any(rise[count:])


def test_times_mean_of_zero_gradients_never_locks() -> None:
    params = parameters()
    optimizer = make("SGD", params, skip_above=TimesMean(2.0, warmup=2))
    assert skips(optimizer, params, [0.0, 0.0, 0.0, 5.0]) == [False] * 4


def test_times_mean_outlives_checkpoints_groups_and_copies() -> None:
    norms = [1.0, 1.2, 0.8, 1.1, 0.9, 3.5, 1.0, 2.9, 1.0, 3.2]
    limit = TimesMean(3.0, decay=0.8, warmup=3)
    params = parameters()
    wanted = skips(make("AdamW", params, skip_above=limit), params, norms)
    assert any(wanted[5:]) and not all(wanted[5:])

    params = parameters()
    first = make("AdamW", params, skip_above=limit)
    assert skips(first, params, norms[:5]) == wanted[:5]
    saved = first.state_dict()
    resumed = make("AdamW", params, skip_above=limit)
    resumed.load_state_dict(saved)
    assert "limits" not in resumed.param_groups[0]
    clone = copy.deepcopy(resumed)
    cloned = clone.param_groups[0]["params"]
    assert skips(resumed, params, norms[5:]) == wanted[5:]
    assert skips(clone, cloned, norms[5:]) == wanted[5:]

    # As earlier versions have saved it.
    mean, count = saved["param_groups"][0].pop("limits")["TimesMean"]
    saved["param_groups"][0] |= {"norm_mean": mean, "norm_mean_count": count}
    earlier = make("AdamW", params, skip_above=limit)
    earlier.load_state_dict(saved)
    assert not {"norm_mean", "norm_mean_count"} & earlier.param_groups[0].keys()
    assert skips(earlier, params, norms[5:]) == wanted[5:]

    first.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert skips(first, params, norms[5:]) == wanted[5:]
    assert int(first.skipped_steps) == sum(wanted)
    # torch's optimizer of the same name takes the checkpoint as it is.
    torch.optim.AdamW(parameters()).load_state_dict(saved)


def test_without_limits_bad_gradients_are_used_and_nothing_is_skipped() -> None:
    params = parameters()
    optimizer = make("SGD", params)
    give(params, 1e6)
    spoil(params, NAN)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 0
    assert params[2].isnan().sum() == 1


@pytest.mark.parametrize("limit", [0.0, -1.0, NAN, "3"])
def test_bad_limits(limit: Any) -> None:
    with pytest.raises(ValueError, match="Invalid skip_above"):
        make("SGD", parameters(), skip_above=limit)


@pytest.mark.parametrize("option", [{"skip_above": 3.0}, {"skip_nonfinite": True}, {"track_grad_norm": True}])
def test_a_group_does_not_skip_alone(option: dict[str, Any]) -> None:
    first, *others = parameters()
    with pytest.raises(ValueError, match=f"{next(iter(option))} is an option of the optimizer"):
        make("SGD", [{"params": [first]}, {"params": others, **option}])
    optimizer = make("SGD", [first])
    with pytest.raises(ValueError, match="is an option of the optimizer"):
        optimizer.add_param_group({"params": others, **option})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options", [{"factor": 1.0}, {"factor": INF}, {"factor": NAN}, {"decay": 1.0}, {"decay": -0.1}, {"warmup": 0}]
)
def test_bad_multiples(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(options))}"):
        TimesMean(**{"factor": 3.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), [("Rprop", {}), ("ASGD", {}), ("ASGD", {"lambd": 0.1, "t0": 2})])
def test_states_begin_with_the_rate_of_the_first_step_that_is_taken(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    ends = []
    for module in (torch.optim, tilestep):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
        optimizer = getattr(module, name)([weight], lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t, lr in enumerate([0.1, 0.2, 0.03, 0.05, 0.07]):
            optimizer.param_groups[0]["lr"] = lr
            scale = scaler.scale(torch.ones(()))
            weight.grad = torch.linspace(0.1, 1, 6, dtype=dtype) * scale * (-1) ** (t // 2)
            if t < 2:
                weight.grad[0] = INF
            scaler.step(optimizer)
            scaler.update()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-6 if dtype is torch.float32 else 1e-8)
