"""Stochastic rounding: right on average, the same bits on every backend, mesh, schedule and restart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from block_rows import SHAPES
from format_rows import backend
from random_on_ranks import CHECKS, make, model, train
from random_rows import FORMATS, check_elements, check_states
from rank_processes import each_passes
from torch import nn

import tilestep
from tilestep.storage import Stochastic, random_tensor, rows_of, state_format, stored_in, stream_of, values_of
from tilestep.storage import format as formats


def kept(format: Any, numbers: torch.Tensor, index: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Numbers as a format keeps them, rounded by the bits of these elements."""
    storage = Stochastic(format)
    tensors = {}
    for array in storage.arrays("x"):
        lead, columns = rows_of(numbers.shape)
        shape = numbers.shape if array.elements == 1 else (*lead, -(-columns // array.elements))
        tensors[array.name] = torch.empty(shape, dtype=array.dtype)
    stored_in(storage, tensors, "x", numbers, numbers.shape, random=random_tensor(stream_of(0, 0), count, 0, index))
    return values_of(storage, tensors, "x", shape=numbers.shape)


@pytest.mark.parametrize("name", ["cpp", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_are_rounded_by_the_same_bits(dtype: torch.dtype, name: str) -> None:
    with backend(name):
        check_elements(dtype)


@pytest.mark.parametrize("name", ["cpp", "eager"])
@pytest.mark.parametrize("format", FORMATS)
def test_states_are_rounded_by_the_same_bits(format: str, name: str) -> None:
    with backend(name):
        check_states(format, SHAPES)


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_elements_are_right_on_average_in_every_exponent(format: str) -> None:
    dtype = getattr(torch, format)
    exponents = torch.arange(-40, 15) if format == "float16" else torch.arange(-126, 127)
    mantissas = torch.tensor([1.0, 1.001, 1.3, 1.50390625, 1.7, 1.99999])
    numbers = (mantissas * torch.pow(2.0, exponents.double()[:, None])).float()
    numbers = torch.cat([numbers, -numbers])
    times = 4096
    index = torch.arange(numbers.numel() * times).view(times, *numbers.shape)
    rounded = kept(state_format(format), numbers.expand(times, *numbers.shape).contiguous(), index)
    nearest = numbers.to(dtype).float()
    toward = torch.where(nearest.abs() > numbers.abs(), torch.zeros_like(numbers), numbers.sign() * torch.inf)
    other = torch.nextafter(nearest.to(dtype), toward.to(dtype)).float()
    assert ((rounded == nearest) | (rounded == other) | (rounded == numbers)).all()
    width = (other - nearest).abs().double().clamp(min=2.0**-24 if format == "float16" else 0)
    bias = (rounded.double().mean(0) - numbers.double()).abs() / width
    # 5 standard deviations of a share, and what 16 bits cannot tell.
    assert bias.max() < 5 * 0.5 / times**0.5 + 2.0**-16
    exact = numbers == nearest
    assert exact.any() and (rounded == numbers)[:, exact].all()


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_what_is_not_finite_or_too_large_is_as_nearest_rounding_has_it(format: str) -> None:
    dtype, largest = getattr(torch, format), torch.finfo(getattr(torch, format)).max
    above = torch.tensor(largest) * (1 + torch.tensor([0.0, 1e-6, 9e-4, 1.9e-3, 2e-3, 4e-3]))
    numbers = torch.cat([above, torch.tensor([torch.inf, torch.nan, 0.0, -0.0])])
    numbers = torch.cat([numbers, -numbers])
    many = numbers.expand(1000, -1).contiguous()
    rounded = kept(state_format(format), many, torch.arange(many.numel()).view(many.shape))
    wanted = many.to(dtype).float()
    assert torch.equal(rounded.isnan(), wanted.isnan())
    assert torch.equal(rounded.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(rounded.signbit()[:, numbers == 0], many.signbit()[:, numbers == 0])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("format", ["int8", "float8_e4m3", "int4"])
def test_blocks_are_right_on_average_and_keep_what_they_have(format: str, signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(256, generator=generator)
    numbers = numbers if signed else numbers.square() + 0.05
    numbers = numbers.clamp(-4, 4)
    numbers[0], numbers[200] = 4.0, 4.0
    times = 4000
    many = numbers.expand(times, -1).contiguous()
    index = torch.arange(many.numel()).view(many.shape)
    storage = state_format(format, signed)
    rounded = kept(storage, many, index)
    spread = rounded.double().std(0)
    error = (rounded.double().mean(0) - numbers.double()).abs()
    assert (error <= 5 * spread / times**0.5 + 5e-4 * numbers.abs()).all()
    assert (spread > 0).float().mean() > 0.9
    # What the format has exactly stays.
    again = kept(storage, rounded, index, count=2)
    assert torch.equal(again, rounded)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rough_operations_lead_to_the_same_codes(name: str, signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far off as those of a GPU: two units in the last place, and one of a root."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(512, 1024, generator=generator) * torch.logspace(-30, 3, 512)[:, None]
    numbers = numbers if signed else numbers.square()
    random = torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)
    storage = Stochastic(state_format(name, signed))

    def off(value: torch.Tensor, most: float) -> torch.Tensor:
        return value * (1 + most * (2 * torch.rand(value.shape, generator=generator) - 1))

    runs = []
    for is_rough in (False, True):
        if is_rough:
            rough = {
                "rough_ceiling": lambda left, right: off(left / right, 2.0**-22).ceil(),
                "rough_root": lambda number: off(number.sqrt(), 2.0**-23),
            }
            monkeypatch.setattr(formats, "_ON_TENSORS", {**formats._ON_TENSORS, **rough})
        arrays = storage.arrays("x")
        tensors = {a.name: torch.empty((512, 1024 // a.elements), dtype=a.dtype) for a in arrays}
        stored_in(storage, tensors, "x", numbers, numbers.shape, random=random)
        runs.append(tensors)
    assert all(torch.equal(exact, rough) for exact, rough in zip(runs[0].values(), runs[1].values()))


def test_bits_are_like_chance() -> None:
    """Of each slot: 16 bits evenly spread, and nothing to tell of neighbours, steps, parameters, seeds, slots."""
    count = 2**18
    index = torch.arange(count)

    def draw(stream: int = stream_of(0, 0), step: int = 1, slot: int = 0, first: int = 0) -> torch.Tensor:
        return (random_tensor(stream, step, slot, index + first).double() - 32767.5) / 65536 * 12**0.5

    one = draw()
    others = [draw(slot=slot) for slot in (1, 2, 3, 4)]
    others += [draw(step=step) for step in (2, 3, 1001)]
    others += [draw(stream_of(0, 1)), draw(stream_of(1, 0)), draw(first=1), draw(first=128), draw(first=2**32)]
    for other in others:
        assert abs(float((one * other).mean())) * count**0.5 < 5
        assert abs(float(other.mean())) * count**0.5 < 5
        assert abs(float((other.square() - 1).mean())) * count**0.5 < 5
    for slot in range(4):
        random = random_tensor(stream_of(0, 0), 7, slot, index)
        for bit in range(16):
            assert abs(float((random >> bit & 1).double().mean()) - 0.5) * 2 * count**0.5 < 5
    steps = torch.stack([random_tensor(stream_of(0, 0), step, 0, index[:64]) for step in range(1, 2049)]).double()
    steps = (steps - 32767.5) / 65536 * 12**0.5
    assert float(steps.mean(0).abs().max()) * 2048**0.5 < 5
    assert float((steps[1:] * steps[:-1]).mean(0).abs().max()) * 2048**0.5 < 5


SHAPES_OF_RUNS = [(64, 300), (150, 256), (48, 8, 4, 4), (5000,), (7,)]


def run(steps: int = 4, **options: Any) -> tuple[Any, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES_OF_RUNS]
    params[2] = nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
    named = [(f"p{place}", param) for place, param in enumerate(params)]
    optimizer: Any = tilestep.AdamW(named, rounding="stochastic", **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()
    return optimizer, params


def test_other_layouts_of_gradients_change_no_bit() -> None:
    def train_with(turns: bool) -> torch.Tensor:
        param = nn.Parameter(torch.ones(40, 50, dtype=torch.bfloat16))
        optimizer = tilestep.AdamW([param], rounding="stochastic")
        for step in range(3):
            grad = torch.randn(40, 50, generator=torch.Generator().manual_seed(step)).bfloat16()
            param.grad = grad.t().contiguous().t() if turns else grad
            optimizer.step()
        return param.detach()

    assert torch.equal(train_with(True), train_with(False))


def test_a_skipped_step_leaves_every_bit() -> None:
    optimizer, params = run(skip_nonfinite=True)
    before = [[param.detach().clone(), *(v.clone() for v in optimizer.state[param].values())] for param in params]
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    for param, saved in zip(params, before):
        assert all(map(torch.equal, saved, [param.detach(), *optimizer.state[param].values()]))


test_on_ranks = each_passes(CHECKS, 2)


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_restart_goes_on_with_the_same_bits(format: Any) -> None:
    net = model()
    optimizer = make(net, state_dtype=format, seed=7)
    train(net, optimizer, range(2))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    train(net, optimizer, range(2, 4))
    again = model()
    again.load_state_dict(weights)
    resumed = make(again, state_dtype=format)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["seed"] == 7
    train(again, resumed, range(2, 4))
    assert all(map(torch.equal, again.parameters(), net.parameters()))
    other = model()
    unlike = make(other, state_dtype=format, seed=8)
    train(other, unlike, range(4))
    assert not all(map(torch.equal, other.parameters(), net.parameters()))


def test_seeds_can_be_changed_and_are_followed() -> None:
    def after(seeds: tuple[int, int]) -> torch.Tensor:
        param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = tilestep.SGD([param], lr=1e-3, rounding="stochastic", seed=seeds[0])
        for seed in seeds:
            optimizer.param_groups[0]["seed"] = seed
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.detach()

    assert not torch.equal(after((0, 0)), after((0, 1)))
    assert torch.equal(after((0, 2**40)), after((0, 2**40)))


def test_sixteen_bits_train_where_rounding_to_nearest_stalls() -> None:
    """A least squares problem whose last steps are far below half a unit of the weights' last place."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 64, generator=generator)
    truth = 1 + torch.randn(64, 16, generator=generator) / 8
    targets = inputs @ truth

    def distance(dtype: torch.dtype, **options: Any) -> float:
        weight = nn.Parameter(torch.ones(64, 16, dtype=dtype))
        optimizer = tilestep.SGD([weight], lr=2e-2, **options)
        losses = []
        for _ in range(1200):
            loss = (inputs @ weight.float() - targets).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[-200:]) / 200

    exact, nearest = distance(torch.float32), distance(torch.bfloat16)
    random = distance(torch.bfloat16, rounding="stochastic")
    initial = float((inputs @ torch.ones(64, 16) - targets).square().mean())
    assert exact < 0.01 * initial
    assert random < 0.02 * initial < nearest / 5, (initial, exact, nearest, random)


@pytest.mark.parametrize("rule", ["Adafactor", "LAMB", "Muon", "SGD", "ScheduleFreeAdamW"])
def test_other_rules_round_what_they_keep(rule: str) -> None:
    def run_rule(name: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.randn(80, 96, generator=generator).bfloat16())
        with backend(name):
            optimizer = tilestep.Optimizer([param], rule, lr=1e-3, rounding="stochastic")
            for _ in range(3):
                param.grad = torch.randn(80, 96, generator=generator).bfloat16()
                optimizer.step()
        state = optimizer.state[param]
        small = {key: value.dtype for key, value in state.items() if value.shape != param.shape}
        # Schedule-free rules declare float64 for these.
        wide = dict.fromkeys(small.keys() & {"weight_sum", "lr_max"}, torch.float64)
        assert small == {**dict.fromkeys(small, torch.float32), **wide}
        return [param.detach(), *(value for value in state.values() if value.dtype is torch.bfloat16)]

    for mine, other in zip(run_rule("cpp"), run_rule("eager")):
        assert (mine != other).float().mean() < (0.02 if rule in ("Muon", "LAMB") else 2e-3)


def test_what_cannot_be_said_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="Invalid rounding: 'up'; it must be 'nearest' or 'stochastic'"):
        tilestep.AdamW([weight], rounding="up")
    with pytest.raises(ValueError, match="Invalid seed: -1; it must be an integer"):
        tilestep.AdamW([weight], seed=-1)
    optimizer = tilestep.AdamW([weight])
    optimizer.param_groups[0]["rounding"] = "down"
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="Invalid rounding: 'down'"):
        optimizer.step()


def test_groups_may_differ_and_masters_stay_the_nearest() -> None:
    weights = [nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16)) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": [weights[0]], "rounding": "stochastic"},
        {"params": [weights[1]]},
        {"params": [weights[2]], "rounding": "stochastic", "master_weights": True, "state_dtype": "int8"},
    ]
    optimizer = tilestep.AdamW(groups, lr=1e-4)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert len(weights[0].unique()) == 2 and len(weights[1].unique()) == 1
    master = optimizer.state[weights[2]]["master_param"]
    assert torch.equal(weights[2].detach(), master.bfloat16())
    assert "rounding" not in optimizer.param_groups[1] and "seed" not in optimizer.param_groups[0]
