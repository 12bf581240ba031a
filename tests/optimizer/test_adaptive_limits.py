"""Limits that follow the norms they have seen, one norm for several optimizers, and numbers read without a wait."""

from __future__ import annotations

import copy
import io
import linecache
import math
import pickle
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from own_limits import Everything, SpikesBeyond, plainly

import tilestep
from tilestep.runtime.decision import StepHistory

WARMUP = 10


def gradients(step: int, shapes: list[tuple[int, ...]], spike: float = 30.0) -> list[torch.Tensor]:
    """Random gradients in float64; every 17th step is a spike."""
    generator = torch.Generator().manual_seed(step)
    scale = spike if step % 17 == 16 else 1.0
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]


SHAPES = [(6, 5), (7,)]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor * tensor).sum()) for tensor in tensors))


class PublishedZClip:
    """The published algorithm over Python numbers: what norm gradients are clipped to."""

    def __init__(self, option: str, factor: float, max_norm: float | None) -> None:
        self.option, self.factor, self.max_norm = option, factor, max_norm
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def clip(self, norm: float) -> float:
        if len(self.first) < WARMUP:
            self.first.append(norm)
            self.mean, self.variance = statistics.fmean(self.first), statistics.pvariance(self.first)
            return math.inf if self.max_norm is None else self.max_norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        effective = norm
        if self.option == "percentile":
            effective = min(norm, self.mean + 2.5 * deviation)
        elif z > 2.5:
            adaptive = (self.mean + 2.5**2 / z * deviation) * self.factor
            effective = adaptive if self.option == "adaptive" else self.mean
        self.mean = 0.97 * self.mean + 0.03 * effective
        self.variance = 0.97 * self.variance + 0.03 * (effective - self.mean) ** 2
        effective = effective if self.max_norm is None else min(effective, self.max_norm)
        return effective if effective < norm else math.inf


def stepped(optimizer: torch.optim.Optimizer, drawn: list[torch.Tensor], clip: float = math.inf) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    coefficient = min(1.0, clip / (norm_of(drawn) + 1e-6))
    for param, gradient in zip(params, drawn):
        param.grad = gradient * coefficient
    optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("option", ["adaptive", "mean", "percentile"])
def test_zclip_goes_the_authors_way(option: str, max_norm: float | None) -> None:
    limit = tilestep.ZClip(warmup=WARMUP, option=option, factor=0.9, max_norm=max_norm)
    ours, theirs = parameters(), parameters()
    optimizer = tilestep.SGD(ours, lr=0.05, momentum=0.9, max_grad_norm=limit)
    reference = torch.optim.SGD(theirs, lr=0.05, momentum=0.9)
    published, clipped = PublishedZClip(option, 0.9, max_norm), 0
    for step in range(60):
        drawn = gradients(step, SHAPES)
        stepped(optimizer, drawn)
        clip = published.clip(norm_of(drawn))
        clipped += step >= WARMUP and clip < norm_of(drawn)
        stepped(reference, drawn, clip)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert float(optimizer.grad_norm) == pytest.approx(norm_of(drawn), rel=1e-6)
    assert clipped > 2


def test_zclip_resumes_where_it_was() -> None:
    straight, resumed = parameters(), parameters()
    make = lambda params: tilestep.SGD(params, lr=0.1, max_grad_norm=tilestep.ZClip(warmup=5, max_norm=None))  # noqa: E731
    whole, first = make(straight), make(resumed)
    for step in range(12):
        stepped(whole, gradients(step, SHAPES))
        stepped(first, gradients(step, SHAPES))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make(resumed)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.param_groups[0]["max_grad_norm"] == tilestep.ZClip(warmup=5, max_norm=None)
    copied = copy.deepcopy(second)
    for step in range(12, 40):
        stepped(whole, gradients(step, SHAPES))
        stepped(second, gradients(step, SHAPES))
        stepped(copied, gradients(step, SHAPES))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    torch.testing.assert_close(copied.param_groups[0]["params"], straight, rtol=0, atol=0)


def test_only_groups_that_ask_for_zclip_are_clipped() -> None:
    first, second = parameters()
    groups = [{"params": [first]}, {"params": [second], "max_grad_norm": None}]
    optimizer = tilestep.SGD(groups, lr=1.0, max_grad_norm=tilestep.ZClip(warmup=3, max_norm=1e-3))
    drawn = gradients(0, SHAPES)
    stepped(optimizer, drawn)
    torch.testing.assert_close(second.detach(), 1 - drawn[1])
    assert norm_of([first.detach() - 1]) < 1e-3


def test_one_zclip_for_all_groups() -> None:
    first, second = parameters()
    clips = [tilestep.ZClip(z=2.0), tilestep.ZClip(z=3.0)]
    groups = [{"params": [param], "max_grad_norm": clip} for param, clip in zip((first, second), clips)]
    optimizer = tilestep.SGD(groups, lr=1.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        stepped(optimizer, gradients(0, SHAPES))


def test_a_norm_that_is_not_finite_leaves_zclip_as_it_was() -> None:
    params = parameters()
    optimizer = tilestep.SGD(params, lr=0.1, max_grad_norm=tilestep.ZClip(warmup=3), skip_nonfinite=True)
    for step in range(6):
        stepped(optimizer, gradients(step, SHAPES))
    before, weights = optimizer.state_dict()["param_groups"][0]["limits"], [param.detach().clone() for param in params]
    stepped(optimizer, [gradient * math.inf for gradient in gradients(6, SHAPES)])
    assert int(optimizer.skipped_steps) == 1
    torch.testing.assert_close(params, weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["param_groups"][0]["limits"], before, rtol=0, atol=0)


def spiky(count: int, spikes: dict[int, float]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    values = (3 + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)).tolist()
    return [spikes.get(step, value) for step, value in enumerate(values)]


def outliers(values: list[float], window: int, factor: float, both: bool) -> list[bool]:
    """By torch's standard deviation over the steps before, as published."""
    outliers = []
    for step, value in enumerate(values):
        before = torch.tensor(values[max(0, step - window) : step], dtype=torch.float64)
        is_warm = step + 1 >= max(20, window // 2)
        deviation, mean = torch.std_mean(before) if is_warm else (torch.tensor(math.inf), torch.tensor(0.0))
        distance = value - float(mean)
        outliers.append((abs(distance) if both else distance) > factor * float(deviation))
    return outliers


@pytest.mark.parametrize("both", [False, True])
def test_sigma_skips_what_the_window_says(both: bool) -> None:
    window = 32
    norms, losses = spiky(90, {22: 9.0, 60: 0.1}), spiky(90, {35: 1.0, 70: 8.0})
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    limit = tilestep.Sigma(6, window=window, both_sides=both)
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=limit)
    expected = [a or b for a, b in zip(outliers(norms, window, 6, both), outliers(losses, window, 6, both))]
    assert [step for step, skipped in enumerate(expected) if skipped] == ([22, 35, 60, 70] if both else [22, 70])
    for step, (norm, loss) in enumerate(zip(norms, losses)):
        before, skipped = weight.item(), int(optimizer.skipped_steps)
        weight.grad = torch.full((1,), norm, dtype=torch.float64)
        optimizer.step(loss=torch.tensor(loss))
        assert int(optimizer.skipped_steps) - skipped == expected[step], step
        assert (weight.item() == before) == expected[step], step


def test_a_closure_s_loss_is_the_step_s() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=tilestep.Sigma(6, window=4, warmup=3))

    def closure(loss: float) -> Callable[[], float]:
        def evaluate() -> float:
            weight.grad = torch.ones(1)
            return loss

        return evaluate

    for loss in (1.0, 1.1, 0.9, 1.0):
        assert optimizer.step(closure(loss)) == loss
    assert int(optimizer.skipped_steps) == 0
    optimizer.step(closure(50.0))
    assert int(optimizer.skipped_steps) == 1


def test_a_loss_must_be_one_number() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=tilestep.Sigma(6))
    with pytest.raises(TypeError, match="loss"):
        optimizer.step(loss=torch.ones(2))
    with pytest.raises(TypeError, match="loss"):
        optimizer.step(loss="high")
    assert weight.item() == 0


def test_a_loss_enters_the_window_beside_a_norm_that_is_an_outlier() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=tilestep.Sigma(6, window=4, warmup=3))
    losses = [1.0, 1.1, 0.9, 1.2, 1.05]
    for norm, loss in zip([3.0, 3.1, 2.9, 90.0, math.inf], losses):
        weight.grad = torch.full((1,), norm, dtype=torch.float64)
        optimizer.step(loss=loss)
    assert int(optimizer.skipped_steps) == 2
    count, *window = optimizer.state_dict()["param_groups"][0]["limits"]["Sigma"][5:].tolist()
    assert count == 5 and window == [losses[4], *losses[1:4]]


@pytest.mark.parametrize("norm", [math.inf, 1e200])
def test_zclip_leaves_an_infinite_norm_out_of_its_warm_up(norm: float) -> None:
    """One of finite gradients, whose square is beyond float64, and one of infinite gradients; max_norm clips both."""
    limit = tilestep.ZClip(warmup=3, max_norm=1.0)
    (param,) = parameters()[:1]
    optimizer = tilestep.SGD([param], lr=1.0, max_grad_norm=limit, skip_nonfinite=True)
    for step in range(2):
        stepped(optimizer, gradients(step, SHAPES[:1]))
    before, weights = optimizer.state_dict()["param_groups"][0]["limits"]["ZClip"], param.detach().clone()
    stepped(optimizer, [torch.full(SHAPES[0], norm, dtype=torch.float64)])
    assert torch.equal(optimizer.state_dict()["param_groups"][0]["limits"]["ZClip"], before)
    assert before.tolist()[2] == 2 and math.isinf(optimizer.grad_norm)
    assert int(optimizer.skipped_steps) == math.isinf(norm) and torch.equal(param, weights)


STEPS = list(zip([1.0, 1.2, 0.9, 1.0, 8.0, 1.1, 0.8, 1.0, 2.0], [2.0, 2.2, None, 1.8, 2.0, 60.0, 2.1, None, 2.0]))


def sized_steps(optimizer: Any, steps: list[tuple[float, float | None]]) -> list[tuple[bool, float]]:
    """Take steps with gradients of these norms and these losses; whether each was skipped, and what it moved."""
    (weight,) = optimizer.param_groups[0]["params"]
    taken = []
    for norm, loss in steps:
        before, skipped = weight.item(), int(optimizer.skipped_steps)
        weight.grad = torch.full((1,), norm, dtype=torch.float64)
        optimizer.step(loss=loss)
        taken.append((int(optimizer.skipped_steps) > skipped, before - weight.item()))
    return taken


@pytest.mark.parametrize("limit", [SpikesBeyond(), SpikesBeyond(factor=2.0, warmup=4), Everything()])
def test_a_limit_of_one_s_own_is_its_function_of_floats(limit: tilestep.Limit) -> None:
    """To the bit, in a checkpoint's reader, in copies and in pickles too."""
    decided, remembered = plainly(limit, *zip(*STEPS))

    def made() -> Any:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return tilestep.SGD([weight], lr=1.0, max_grad_norm=limit)

    def compare(optimizer: Any, steps: slice) -> None:
        for (skipped, moved), (skips, clip), (norm, _) in zip(
            sized_steps(optimizer, STEPS[steps]), decided[steps], STEPS[steps]
        ):
            expected = 0.0 if skips else norm * min(1.0, clip / (norm + 1e-6))
            assert skipped == skips and moved == pytest.approx(expected, rel=1e-12)

    first = made()
    compare(first, slice(5))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = made()
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.param_groups[0]["max_grad_norm"] == limit
    for again in (second, copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first):
        compare(again, slice(5, None))
        assert again.state_dict()["param_groups"][0]["limits"][type(limit).__name__].tolist() == remembered
    assert any(skips for skips, _ in decided) and any(clip < norm for (_, clip), (norm, _) in zip(decided, STEPS))


def test_the_memory_that_steps_write_is_saved() -> None:
    """A checkpoint's numbers on the CPU came first on a GPU, and were saved instead of those that steps write."""
    limit, history, (cpu, other) = tilestep.ZClip(), StepHistory(), (torch.device("cpu"), torch.device("cpu", 0))
    assert history.save([limit], None) == {}
    assert history.save([limit], torch.device("meta"))["ZClip"].is_meta
    history.load([limit], history.save([limit], cpu))
    assert len(history.numbers) == 1
    history.of(limit, other).add_(1)
    assert torch.equal(history.save([limit], cpu)["ZClip"], history.of(limit, other))


def test_a_limit_that_only_skips() -> None:
    @dataclass(frozen=True)
    class Above(tilestep.Limit):
        norm: float = 3.0

        def decide(self, norm: float, loss: float | None, memory: Any) -> tuple[bool, float]:
            return norm > self.norm, math.inf

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=Above())
    assert sized_steps(optimizer, [(2.0, None), (math.nan, None), (5.0, None)]) == [(False, 2.0), (True, 0), (True, 0)]


def test_a_clip_that_is_no_norm_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    limit = own_limit("memory.x += 1; return False, 2 - memory.x", x=0.0)
    optimizer = tilestep.SGD([weight], lr=1.0, max_grad_norm=limit)
    sized_steps(optimizer, [(1.0, None), (1.0, None)])
    before, remembered = weight.item(), optimizer.state_dict()["param_groups"][0]["limits"]
    with pytest.raises(tilestep.GradientError, match=r"clips gradients to a norm of -1\.0; nothing was updated"):
        sized_steps(optimizer, [(1.0, None)])
    assert weight.item() == before and int(optimizer.skipped_steps) == 0
    assert optimizer.state_dict()["param_groups"][0]["limits"] == remembered


def own_limit(body: str, **memory: Any) -> Any:
    """A limit whose function has these statements, from a file of its own, for lines in messages."""
    lines = ["def decide(self, norm, loss, memory):", *(f"    {line.strip()}" for line in body.split("; "))]
    text = "\n".join(lines).replace("    \\t", "        ") + "\n"
    names = {"math": math, "random": random, "torch": torch}
    linecache.cache["own.py"] = (len(text), None, text.splitlines(keepends=True), "own.py")
    exec(compile(text, "own.py", "exec", dont_inherit=True), names)
    return dataclass(frozen=True)(type("Own", (tilestep.Limit,), {"decide": names["decide"], "memory": memory}))()


REFUSED = {
    "while norm > 1:; \\tnorm = norm / 2; return False, norm": r"own\.py:2: more than 64 branches",
    "return norm > 3, math.gamma(norm)": r"own\.py:2: numbers cannot be read",
    "return norm > 3, float(int(norm))": r"own\.py:2: numbers cannot be read",
    "return norm > 3, norm // 2": r"own\.py:2: numbers cannot be read",
    "return norm > 3, norm * random.random()": r"own\.py:2: in limit Own: random\.random",
    "return norm, 1.0": r"own\.py:1: limit Own: whether to skip is",
    "return norm > 3": r"own\.py:2|own\.py:1",
    "return norm > 3, None": r"own\.py:1: limit Own: the norm to clip to is None",
    "memory.y = norm; return False, 1.0": r"own\.py:1: limit Own: memory\.y is",
    "memory.x = None; return False, 1.0": r"own\.py:1: limit Own: memory\.x is None",
    "return norm > 3, norm / memory.x": r"own\.py:2: limit Own: ZeroDivisionError",
    "return loss > 3, norm": r"own\.py:2: limit Own: TypeError",
    "return norm > 3, torch.tensor(norm)": r"own\.py",
    "return norm > 3, norm * torch.ones(2)": r"own\.py",
    "if norm > 3:; \\traise ValueError('large'); return False, norm": r"own\.py:3: limit Own: ValueError: large",
    "return norm > 3, {1.0: norm}[norm]": r"own\.py:2: limit Own: KeyError",
    "memory.w.append(norm); return norm > memory.w.mean(), norm": r"own\.py:3: a window is read after the append",
    "memory.w.append(norm); memory.w.append(1.0); return False, norm": r"own\.py:3: a window takes one number per step",
    "memory.w = norm; return False, norm": r"own\.py:1: limit Own: memory\.w is",
    "; ".join(f"norm = norm + 1 if norm > {n} else norm" for n in range(9))
    + "; return False, norm": r"own\.py:\d+: more .* or 256 paths",
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_limit_that_a_device_cannot_run_is_refused_with_its_line(body: str) -> None:
    limit = own_limit(body, x=0.0, w=tilestep.Window(4))
    with pytest.raises(tilestep.RuleError, match=REFUSED[body]):
        tilestep.SGD(parameters(), lr=0.1, max_grad_norm=limit)


def test_limits_in_places_that_are_not_theirs_are_refused() -> None:
    def step(**options: Any) -> None:
        stepped(tilestep.SGD(parameters(), lr=0.1, **options), gradients(0, SHAPES))

    skips, clips = own_limit("return norm > 3, math.inf"), own_limit("return norm > 3, 2.0")
    with pytest.raises(ValueError, match=r"Invalid skip_above: Own\(\) clips: pass it as max_grad_norm"):
        step(skip_above=clips)
    with pytest.raises(ValueError, match=r"Invalid max_grad_norm: Own\(\) never clips: pass it as skip_above"):
        step(max_grad_norm=skips)
    with pytest.raises(ValueError, match=r"Own\(\) has the same name as skip_above; leave skip_above out"):
        step(skip_above=skips, max_grad_norm=clips)
    for wrong in (tilestep.TimesMean, [1.0], torch.ones(2), 1j):
        with pytest.raises(ValueError, match=r"Invalid skip_above: .*; it must be a positive norm"):
            step(skip_above=wrong)
    step(skip_above=np.array(2.5))
    with pytest.raises(TypeError, match=r"Invalid max_grad_norm: <class '.*ZClip'>; it is a class: call it"):
        step(max_grad_norm=tilestep.ZClip)


def test_limits_that_are_not_whole_are_refused() -> None:
    def decide(self: Any, norm: Any, loss: Any, memory: Any) -> Any:
        return False, 1.0

    def kind(frozen: bool | None = True, **body: Any) -> Callable[[], tilestep.Limit]:
        made: Any = type("Own", (tilestep.Limit,), body)
        return made if frozen is None else dataclass(frozen=frozen)(made)

    for frozen in (None, False):
        with pytest.raises(
            tilestep.RuleError, match=r"limit Own must be a frozen dataclass: use @dataclass\(frozen=True\)"
        ):
            kind(frozen, decide=decide)()
    with pytest.raises(tilestep.RuleError, match="limit Own has no method `decide"):
        kind()()
    with pytest.raises(TypeError, match="Own: memory"):
        kind(decide=decide, memory={}, __annotations__={"memory": dict})
    for memory in (["mean"], {"mean": "a"}, {"mean": None}):
        with pytest.raises(tilestep.RuleError, match=r"Own\(\): memory=.*; it must map names to numbers or Windows"):
            tilestep.SGD(parameters(), max_grad_norm=kind(decide=decide, memory=memory)())
    assert tilestep.Window(np.int64(3)).size == 3  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Invalid size: 2.5; a window"):
        tilestep.Window(2.5)  # type: ignore[arg-type]


def test_a_limit_that_is_not_known_is_not_loaded() -> None:
    optimizer = tilestep.SGD(parameters(), lr=0.1, max_grad_norm=SpikesBeyond())
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["max_grad_norm"] = {"Elsewhere": {"factor": 2.0}}
    with pytest.raises(tilestep.StateError, match="limit Elsewhere is not known: import the module"):
        optimizer.load_state_dict(saved)


def test_a_limit_of_two_modules_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilestep.Limit, "known", {})

    def of_module(module: str) -> tilestep.Limit:
        @dataclass(frozen=True)
        class Doubles(tilestep.Limit):
            factor: float = 2.0
            __module__ = module

            def decide(self, norm: float, loss: float | None, memory: Any) -> tuple[bool, float]:
                return False, self.factor

        return Doubles()

    optimizer = tilestep.SGD(parameters(), lr=0.1, max_grad_norm=of_module("math"))
    of_module("math")  # defined anew, as in a notebook
    optimizer.load_state_dict(optimizer.state_dict())
    of_module("json")
    with pytest.raises(tilestep.StateError, match=r"2 limits are called Doubles \(math\..*Doubles, json\."):
        optimizer.load_state_dict(optimizer.state_dict())


def test_adagc_follows_the_paper() -> None:
    ours, theirs = parameters(), parameters()
    rel, limit, decay, warmup = 1.05, 2.0, 0.98, 20
    clip = tilestep.AdaGC(rel=rel, limit=limit, decay=decay, warmup=warmup)
    optimizer = tilestep.AdamW(ours, lr=0.05, max_grad_norm=clip)
    reference = torch.optim.AdamW(theirs, lr=0.05)
    means = [math.inf] * len(theirs)
    for step in range(1, 61):
        drawn = gradients(step, SHAPES, spike=20.0)
        stepped(optimizer, drawn)
        total = norm_of(drawn)
        for place, (param, gradient) in enumerate(zip(theirs, drawn)):
            norm = norm_of([gradient])
            if step < warmup:
                scale = min(1.0, limit / total)
                means[place] = min(means[place], scale * norm)
            else:
                scale = min(1.0, rel * means[place] / norm)
                means[place] = decay * means[place] + (1 - decay) * scale * norm
            param.grad = gradient * scale
        reference.step()
    # The state of one number is float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("resting", [{1}, {3, 19}, set(range(1, 31)), {40}])
def test_adagc_lets_a_tensor_move_whose_gradient_has_been_zero(resting: set[int]) -> None:
    """The smallest norm of the first steps was 0, and the limit with it, for weights before a layer of zeros."""
    (ours,), (theirs,) = parameters()[:1], parameters()[:1]
    optimizer = tilestep.SGD([ours], lr=0.05, max_grad_norm=tilestep.AdaGC(limit=2.0, warmup=20))
    mean = 0.0
    for step in range(1, 61):
        (drawn,) = gradients(step, SHAPES[:1])
        drawn = drawn * (step not in resting)
        stepped(optimizer, [drawn])
        if (norm := norm_of([drawn])) == 0:
            continue
        scale = min(1.0, (2.0 if step < 20 or mean == 0 else 1.05 * mean) / norm)
        smallest = min(mean or math.inf, scale * norm)
        mean = smallest if step < 20 or mean == 0 else 0.98 * mean + 0.02 * scale * norm
        theirs.data -= 0.05 * scale * drawn
    # The state of one number is float64 beside float64 parameters.
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert optimizer.state[ours]["clip_norm"].item() == pytest.approx(mean, rel=1e-12)


def test_adagc_of_one_group() -> None:
    first, second = parameters()
    groups = [{"params": [first], "max_grad_norm": tilestep.AdaGC(limit=1e-3)}, {"params": [second]}]
    optimizer = tilestep.SGD(groups, lr=1.0)
    drawn = gradients(0, SHAPES)
    stepped(optimizer, drawn)
    assert norm_of([first.detach() - 1]) <= 1.001e-3
    torch.testing.assert_close(second.detach(), 1 - drawn[1])
    assert optimizer.param_groups[0]["clip_limit"] == 1e-3


@pytest.mark.parametrize("common", [None, tilestep.AdaGC(limit=1e-3), tilestep.AdaGC(limit=1.0)])
def test_adagc_of_several_groups(common: Any) -> None:
    first, second = parameters()
    clips = [tilestep.AdaGC(limit=1e-3), tilestep.AdaGC(limit=2e-3)]
    groups = [{"params": [param], "max_grad_norm": clip} for param, clip in zip((first, second), clips)]
    optimizer = copy.deepcopy(tilestep.SGD(groups, lr=1.0, max_grad_norm=common))
    drawn = gradients(0, SHAPES)
    stepped(optimizer, drawn)
    total = norm_of(drawn)
    for group, gradient, limit in zip(optimizer.param_groups, drawn, (1e-3, 2e-3)):
        torch.testing.assert_close(group["params"][0].detach(), 1 - gradient * limit / total)


@pytest.mark.parametrize("own", [{"max_grad_norm": None}, {"in_norm": False}, {"max_grad_norm": 0.5}])
def test_adagc_leaves_out_a_group_with_another_clip(own: dict[str, Any]) -> None:
    first, second = parameters()
    optimizer = tilestep.SGD([first], lr=1.0, max_grad_norm=tilestep.AdaGC(limit=1e-3))
    optimizer = copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": [second], **own})
    drawn = gradients(0, SHAPES)
    stepped(optimizer, drawn)
    clipped = optimizer.param_groups[0]["params"][0].detach()
    torch.testing.assert_close(clipped, 1 - drawn[0] * 1e-3 / norm_of(drawn[:1]))
    scale = 0.5 / norm_of(drawn) if own.get("max_grad_norm") else 1.0
    torch.testing.assert_close(second.detach(), 1 - drawn[1] * scale)
    with pytest.raises(ValueError, match="in_norm=False is not clipped"):
        optimizer.add_param_group({"params": parameters(), "in_norm": False, "max_grad_norm": tilestep.AdaGC()})


@pytest.mark.parametrize(
    "make",
    [
        lambda: tilestep.ZClip(z=0),
        lambda: tilestep.ZClip(decay=1.0),
        lambda: tilestep.ZClip(warmup=1),
        lambda: tilestep.ZClip(max_norm=-1.0),
        lambda: tilestep.ZClip(option="median"),
        lambda: tilestep.Sigma(0),
        lambda: tilestep.Sigma(6, window=1),
        lambda: tilestep.Sigma(6, warmup=2),
        lambda: tilestep.AdaGC(rel=0.5),
        lambda: tilestep.AdaGC(limit=0),
        lambda: tilestep.SGD(parameters(), lr=0.1, skip_above=tilestep.ZClip()),
    ],
)
def test_limits_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        make()


def test_a_joint_norm_is_that_of_all() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [tilestep.AdamW([param], lr=0.05, max_grad_norm=0.5) for param in ours]
    tilestep.joint_norm(optimizers)
    alone = tilestep.AdamW(theirs, lr=0.05, max_grad_norm=0.5)
    for step in range(6):
        drawn = gradients(step, SHAPES)
        stepped(alone, drawn)
        for param, gradient in zip(ours, drawn):
            param.grad = gradient.clone()
        for optimizer in optimizers if step % 2 else optimizers[::-1]:
            optimizer.step()
            optimizer.zero_grad()
        for optimizer in optimizers:
            assert float(optimizer.grad_norm) == pytest.approx(norm_of(drawn), rel=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_members_of_a_joint_norm_skip_together() -> None:
    ours = parameters()
    optimizers = [tilestep.SGD([param], lr=1.0, skip_nonfinite=place == 0) for place, param in enumerate(ours)]
    tilestep.joint_norm(optimizers)
    ours[0].grad, ours[1].grad = gradients(0, SHAPES)
    ours[0].grad[0, 0] = math.nan
    for optimizer in optimizers:
        optimizer.step()
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [1, 1]
    assert all(bool((param == 1).all()) for param in ours)


def test_a_joint_norm_under_a_scaler() -> None:
    ours = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [tilestep.SGD([param], lr=1.0, max_grad_norm=1.0) for param in ours]
    tilestep.joint_norm(optimizers)
    scaler = tilestep.GradScaler("cpu", init_scale=8.0)
    scaler.scale((ours[0] * 3).sum() + (ours[1] * 4).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    norm = math.sqrt(2 * 9 + 2 * 16)
    torch.testing.assert_close(ours[0].detach(), torch.full((2,), 1 - 3 / norm))
    torch.testing.assert_close(ours[1].detach(), torch.full((2,), 1 - 4 / norm))
    for unscaled in optimizers:
        scaler.scale((ours[0] * 3).sum() + (ours[1] * 4).sum()).backward()
        scaler.unscale_(unscaled)
        with pytest.raises(tilestep.GradientError, match="joint_norm"):
            scaler.step(optimizers[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.update()


def test_what_a_joint_norm_refuses() -> None:
    first, second = parameters()
    one, other = tilestep.SGD([first], lr=0.1), tilestep.SGD([second], lr=0.1)
    with pytest.raises(ValueError, match="two or more"):
        tilestep.joint_norm([one])
    with pytest.raises(ValueError, match="each once"):
        tilestep.joint_norm([one, one])
    with pytest.raises(TypeError, match="not a tilestep optimizer"):
        tilestep.joint_norm([one, torch.optim.SGD([second], lr=0.1)])
    tilestep.joint_norm([one, other])
    with pytest.raises(ValueError, match="shares a norm already"):
        tilestep.joint_norm([one, tilestep.SGD(parameters(), lr=0.1)])
    with pytest.raises(TypeError, match="shares its norm cannot be copied or pickled"):
        copy.deepcopy([one, other])


def test_a_joint_norm_comes_before_a_backward_that_updates() -> None:
    model = torch.nn.Linear(4, 4)
    one, other = tilestep.SGD(model.parameters(), lr=0.1), tilestep.SGD(parameters(), lr=0.1)
    tilestep.overlap(one, model, during="backward")
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has updated .* of optimizer 0 already"):
        tilestep.joint_norm([one, other])
    one.step()
    tilestep.joint_norm([one, other])


def test_a_norm_that_was_not_found_out_is_no_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    plain = tilestep.SGD([weight], lr=0.1)
    plain.step()
    with pytest.raises(RuntimeError, match="track_grad_norm"):
        _ = plain.grad_norm
    tracking = tilestep.SGD([weight], lr=0.1, track_grad_norm=True)
    with pytest.raises(RuntimeError, match="step"):
        _ = tracking.grad_norm
    tracking.step()
    assert float(tracking.grad_norm) == 5.0
    tracking.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert float(tracking.grad_norm) == 5.0
    weight.grad[0] = math.nan
    tracking.step()
    assert int(tracking.skipped_steps) == 0 and math.isnan(weight[0].item())


def test_current_values_of_hyperparameters() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = tilestep.AdamW([weight], lr=lambda step: 0.5 / step, betas=(0.9, torch.tensor(0.99)))
    assert float(optimizer.current("lr")) == 0.5
    for _ in range(4):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert float(optimizer.current("lr")) == 0.125
    assert float(optimizer.current("betas[0]")) == 0.9
    assert float(optimizer.current("betas[1]")) == pytest.approx(0.99)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert float(optimizer.current("weight_decay")) == 0.25
    with pytest.raises(KeyError, match="learning_rate"):
        optimizer.current("learning_rate")
    with pytest.raises(TypeError, match="amsgrad"):
        optimizer.current("amsgrad")
