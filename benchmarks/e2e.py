"""The `e2e` section: whole training iterations of real architectures, with one optimizer after the other.

As in the study of compiled optimizers that torch made in 2023 (its benchmark suites' training runs with AMP): Adam,
parameters in float32, forward and backward under autocast (bf16 here, so no loss scale), speedup over the eager foreach
Adam; here gradients are also clipped by their global norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from kept_groups import take_over
from models import Architecture, available, make_loss
from torch import Tensor, nn

import tilestep
from tilestep.bench.measure import Contender, Row, measure, synchronize
from tilestep.bench.results import Group, Result, environment
from tilestep.bench.sections import LEARNING_RATE, MAX_GRAD_NORM, OURS, Peer, Settings, adamw_bytes, free, step_of

__all__ = ["BASELINE", "ITERATION", "MODES", "STEP", "geometric_mean", "run_e2e"]

BASELINE = "torch foreach"
ITERATION, STEP = "iteration", "step"
MODES = ("eager", "compiled")
"""How the model runs; the optimizers are compared within a mode."""

BACK_TO_BACK = 4  # iterations for one figure, without waiting for the device in between, as in training
ROUNDS = 6
SETUP_STEPS = 3  # the compiled optimizer's first is not compiled, and it may compile in both others


def _adam(parameters: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, **options)


def _adam_compiled(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """torch's Adam, compiled once there is state: the first step makes that, and would be a graph of its own."""
    rate = torch.tensor(LEARNING_RATE, device=parameters[0].device)
    optimizer = torch.optim.Adam(parameters, lr=rate, capturable=parameters[0].is_cuda)  # foreach on a GPU
    begin = optimizer.step

    def first() -> None:
        begin()
        optimizer.step = torch.compile(begin)  # type: ignore[method-assign]

    optimizer.step = first  # type: ignore[method-assign, assignment]
    return optimizer


def _tilestep(parameters: Sequence[Tensor], **options: Any) -> tilestep.Optimizer:
    return tilestep.Adam(parameters, lr=LEARNING_RATE, **options)  # type: ignore[attr-defined]


COMPETING = [
    Peer(BASELINE, lambda parameters: _adam(parameters, foreach=True)),
    Peer("torch fused", lambda parameters: _adam(parameters, fused=True)),
    Peer("torch compiled", _adam_compiled, compiled=True),
    Peer(OURS, _tilestep, clips=True),
]


def run_e2e(
    settings: Settings,
    models: Sequence[str] = (),
    modes: Sequence[str] = ("eager",),
    batch: int = 0,
    keep: Callable[[Result], object] | None = None,
    known: Result | None = None,
    seconds: float = math.inf,
) -> Result:
    """Measure training iterations of every architecture whose library is installed.

    Args:
        settings: as for the other sections; `compiled` adds torch's compiled optimizer, which compiles for 15 to 60
            seconds a model.
        models: names from `models.MODELS`; empty means all.
        modes: `eager`, and `compiled` for models under `torch.compile`.
        batch: sequences or images in a batch; 0 takes each architecture's own.
        keep: called with the result so far after each model.
        known: an earlier result, to which what it has not is added; from the same kind of device and the same torch.
        seconds: a model is begun only if the longest so far would still end within so many seconds from now.

    Returns:
        For each model and mode one group of iterations and one of the step alone; `summary` has the geometric means of
        the speedups.

    Raises:
        ValueError: for a model or mode that there is not, and for a result that this one cannot be added to.
    """
    begin, longest = time.monotonic(), 0.0
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"no mode is called {mode!r}; there are: {', '.join(MODES)}")
    chosen, missing = available(models)
    result = Result("e2e", environment(settings.device))
    if known is not None:
        take_over(result, known, ("device", "torch"))
    result.notes.extend(f"left out, {suite} is not installed: its models" for suite in missing)
    result.summary = _summary(result)
    for architecture in chosen:
        subject: _Subject | None = None
        for mode in modes:
            if _has(result, architecture.name, mode, settings):
                continue
            label, started = f"{architecture.name}, {mode}", time.monotonic()
            if started - begin + longest > seconds:
                result.notes.append(f"left out, {label}: it would not have ended within {seconds:g} s")
                continue
            settings.say(f"e2e: {label}")
            groups: list[Group] = []
            try:
                subject = subject or _Subject(architecture, settings, batch)
                groups = subject.groups(mode)
            except Exception as failure:  # one model that cannot be built here must not cost the others' figures
                reason = " ".join(str(failure).split())[:200]
                result.notes.append(f"left out, {label}: {type(failure).__name__}: {reason}")
            _replace(result, architecture.name, mode, groups)
            longest = max(longest, time.monotonic() - started)
            for line in _in_short(groups[:1]):
                settings.say(f"  {line}")
            settings.say(f"  {time.monotonic() - begin:.0f} s so far")
            result.summary = _summary(result)
            if keep is not None:
                keep(result)
        del subject
        torch.compiler.reset()  # torch recompiles one function, the optimizer's step, only so often
        free(settings.device)
    return result


def _has(result: Result, model: str, mode: str, settings: Settings) -> bool:
    """Whether every contender has run, or failed, with a model."""
    wanted = {peer.name for peer in COMPETING if settings.compiled or not peer.compiled}
    return any(
        wanted <= {row.contender for row in group.rows}
        for group in result.groups
        if (group.tags["model"], group.tags["mode"], group.tags["work"]) == (model, mode, ITERATION)
    )


def _replace(result: Result, model: str, mode: str, groups: Sequence[Group]) -> None:
    """Put in a model's groups, in the place of what was known with other contenders."""
    if groups:
        others = [group for group in result.groups if (group.tags["model"], group.tags["mode"]) != (model, mode)]
        result.groups = [*others, *groups]


def _in_short(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        for row in group.rows:
            if row.failure is not None:
                yield f"{row.contender} failed: {row.failure}"
            elif row.wall is not None:
                faster = f", {row.speedup:.2f}x" if row.speedup is not None else ""
                built = f" (ready after {row.setup_seconds:.1f} s)" if row.setup_seconds is not None else ""
                yield f"{row.contender}: {row.wall.median:.1f} ms{faster}{built}"


class _Training:
    """A model trained by one optimizer; all optimizers of a model share it, and so one compilation of it."""

    def __init__(
        self,
        peer: Peer,
        model: nn.Module,
        device: torch.device,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.peer = peer
        self.say = say
        self.model = model
        self.device = device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._step: Callable[[], object] | None = None

    def begin(self, loss: Callable[[], Tensor]) -> None:
        """Train with this loss from now on, with the optimizer that there is, if there is one."""
        self.loss = loss
        self.setup_seconds = 0.0
        self._steps_taken = 0

    def forget(self) -> None:
        """Build another optimizer at the next step: this one has failed."""
        self._step = None

    def iterate(self) -> None:
        """Forward, backward, clip and step."""
        self.model.zero_grad(set_to_none=True)
        self.loss().backward()
        self.step()

    def step(self) -> None:
        """Clip and step with the gradients there are; the first few times everything is built, and that is timed."""
        if self._steps_taken >= SETUP_STEPS and self._step is not None:
            self._step()
            return
        synchronize(self.device)
        begin = time.perf_counter()
        if self._step is None:
            if self.peer.compiled:
                self.say(f"  {self.peer.name}: compiling the step of {len(self.parameters)} tensors")
            self._step = step_of(self.peer, self.parameters, MAX_GRAD_NORM)
        self._step()
        synchronize(self.device)
        self._steps_taken += 1
        self.setup_seconds += time.perf_counter() - begin


class _Subject:
    """A model, its inputs and its optimizers; they serve every mode, so that nothing is compiled for each anew.

    A compiled step does not ask how gradients are laid out; autograd lays them out as the parameters in every mode.
    """

    def __init__(self, architecture: Architecture, settings: Settings, batch: int) -> None:
        torch.manual_seed(0)
        self.architecture = architecture
        self.settings = settings
        self.model = architecture.build(settings.device, settings.quick)
        self.inputs = architecture.inputs(self.model, settings.device, settings.quick, batch)
        peers = [peer for peer in COMPETING if settings.compiled or not peer.compiled]
        self.trainings = [_Training(peer, self.model, settings.device, settings.say) for peer in peers]

    def begin(self, mode: str) -> None:
        """Let all train in this mode, with the model compiled if that is it."""
        model = torch.compile(self.model) if mode == "compiled" else self.model
        loss = make_loss(model, self.inputs)  # type: ignore[arg-type]
        if mode == "compiled":
            self.settings.say("  compiling the model")
        self.model.zero_grad(set_to_none=True)
        loss().backward()
        for training in self.trainings:
            training.begin(loss)

    def groups(self, mode: str) -> list[Group]:
        """Measure in this mode."""
        device, quick, trainings = self.settings.device, self.settings.quick, self.trainings
        self.begin(mode)
        repeat, rounds = (1, 2) if quick else (BACK_TO_BACK, min(self.settings.rounds, ROUNDS))
        iterations = [
            Contender(each.peer.name, each.iterate, prepare=each.iterate, repeat=repeat) for each in trainings
        ]
        timings = measure(iterations, device, rounds, warmup=1, traced=False, busy=False)
        for training, timing in zip(trainings, timings, strict=True):
            if timing.failure is not None:
                training.forget()
        alive = [each for each, timing in zip(trainings, timings, strict=True) if timing.failure is None]
        moved = adamw_bytes(trainings[0].parameters, clip=True)
        steps = measure([Contender(each.peer.name, each.step, moved) for each in alive], device, rounds, warmup=1)
        return _rows(self.architecture, mode, trainings, timings, steps, self.inputs["labels"].shape[0])


def _rows(
    architecture: Architecture,
    mode: str,
    trainings: Sequence[_Training],
    timings: Sequence[Row],
    steps: Sequence[Row],
    batch: int,
) -> list[Group]:
    alone = {timing.contender: timing for timing in steps}
    baseline = next((timing.wall for timing in timings if timing.contender == BASELINE), None)
    rows = []
    for training, row in zip(trainings, timings, strict=True):
        row.setup_seconds = training.setup_seconds
        step = alone[row.contender].wall if row.contender in alone else None
        if row.wall is not None:
            row.speedup = baseline.median / row.wall.median if baseline is not None else None
            row.share = step.median / row.wall.median if step is not None else None
        rows.append(row)
    parameters = trainings[0].parameters
    elements = sum(parameter.numel() for parameter in parameters)
    tags = {
        "model": architecture.name,
        "suite": architecture.suite,
        "mode": mode,
        "batch": str(batch),
        "size": str(architecture.size),
        "tensors": str(len(parameters)),
        "elements": str(elements),
    }
    title = (
        f"{architecture.name}, {mode}: {elements / 1e6:,.4g} M parameters in {len(parameters)} tensors, batch {batch}"
    )
    alone_rows = list(steps)
    return [
        Group(f"iteration, {title}", rows, tags={**tags, "work": ITERATION}),
        Group(f"clip + Adam alone, {title}", alone_rows, tags={**tags, "work": STEP}),
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(sum(map(math.log, values)) / len(values))


def _summary(result: Result) -> dict[str, float]:
    """Geometric means of the speedups: by contender and mode, over all models and over those of each suite.

    A contender with figures for fewer models than ours has one mean over them, beside ours over the same.
    """
    speedups: dict[tuple[str, str], dict[str, float]] = {}
    suites: dict[str, str] = {}
    for group in result.groups:
        for row in group.rows if group.tags.get("work") == ITERATION else ():
            if row.speedup is not None and row.contender != BASELINE:
                suites[group.tags["model"]] = group.tags["suite"]
                speedups.setdefault((row.contender, group.tags["mode"]), {})[group.tags["model"]] = row.speedup
    found: dict[str, float] = {}
    for (contender, mode), own in speedups.items():
        ours = speedups.get((OURS, mode), {})
        if own.keys() < ours.keys():
            scope = f"the {len(own)} models of {contender}"
            found[f"{contender}, {mode}, {scope}"] = geometric_mean(list(own.values()))
            found[f"{OURS}, {mode}, {scope}"] = geometric_mean([ours[model] for model in own])
            continue
        found[f"{contender}, {mode}, all models"] = geometric_mean(list(own.values()))
        for suite in dict.fromkeys(suites[model] for model in own):
            values = [value for model, value in own.items() if suites[model] == suite]
            found[f"{contender}, {mode}, {suite}"] = geometric_mean(values)
    return found
