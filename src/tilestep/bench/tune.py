"""Measures tile shapes: an optimizer is rebuilt with each candidate, and its step timed in interleaved rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..backends.tuning import TileShape, candidates, forced_shape, save_shapes, signature, tile_shape
from ..devices import has_streams
from ..kernels.launch import build_threads, build_together
from ..kernels.spec import KernelSpec
from ..optimizer import Optimizer
from ..optimizer.plan import StepPlan
from ..rules import Rule, registry
from .measure import Contender, measure

KINDS: Mapping[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16 with fp32 master": (torch.bfloat16, {"master_weights": True}),
    "bf16 with remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16 with int8 states": (torch.bfloat16, {"state_dtype": "int8"}),
    "bf16 with int8 states and master": (torch.bfloat16, {"state_dtype": "int8", "master_weights": "int8"}),
    "bf16 with int8 states, fp32 master": (torch.bfloat16, {"state_dtype": "int8", "master_weights": True}),
}
"""Dtype of parameters, and options of formats, by name."""

GAIN = 0.01  # relative gain from which a shape replaces the present shape: less is noise

_CLOSE = 0.05
"""Relative loss from which a shape is dropped after its first turn."""

_TENSORS = 16
_COLUMNS = 1024


@dataclass(frozen=True)
class Job:
    """A signature to measure."""

    rule: Rule  # a rule with this signature
    kind: str  # a key of `KINDS`
    signature: str  # its key in a table
    spec: KernelSpec  # of its kernels


@dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    job: Job
    before: TileShape  # the shape before
    after: TileShape  # the shape to use; the same if no other is clearly faster
    milliseconds: Mapping[TileShape, float]  # median time of a step with each measured candidate

    @property
    def gain(self) -> float:
        """The relative reduction of the time of a step."""
        return 1 - self.milliseconds[self.after] / self.milliseconds[self.before]


def _optimizer(rule: Rule, kind: str, elements: int, device: torch.device) -> Optimizer:
    dtype, options = KINDS[kind]
    # Matrices, since rules may treat other shapes differently; states of small matrices are float32 in any format.
    rows = max(elements // _TENSORS // _COLUMNS, 4)
    params = [torch.nn.Parameter(torch.ones(rows, _COLUMNS, dtype=dtype, device=device)) for _ in range(_TENSORS)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return Optimizer(params, rule, **options)


def has_matrix_work(optimizer: Optimizer) -> bool:
    """Whether a step also works on whole matrices, whose time does not follow from bytes."""
    engines = optimizer.fitting_plan(ahead=True).engines
    return any(passes.segment.spec.program.matrices.passes for engine in engines for passes in engine.passes)


def tiled_rules() -> list[Rule]:
    """All registered rules whose steps are tile passes, without work on whole matrices."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    return [rule for rule in registry.values() if not has_matrix_work(Optimizer([parameter], rule))]


def jobs(rules: Iterable[Rule], device: torch.device) -> list[Job]:
    """The distinct signatures of these rules."""
    by_signature: dict[str, Job] = {}
    for rule in rules:
        for kind in KINDS:
            spec = _optimizer(rule, kind, 0, device).fitting_plan(ahead=True).engines[0].passes[0].segment.spec
            name = signature(spec)
            by_signature.setdefault(name, Job(rule, kind, name, spec))
    return list(by_signature.values())


def _measure(
    job: Job,
    shapes: Sequence[TileShape],
    device: torch.device,
    elements: int,
    rounds: int,
    until: float,
    tick: Callable[[str], object],
) -> tuple[dict[TileShape, float], TileShape]:
    """Milliseconds of a step with the shape in use, the first, and with other shapes; and the fastest shape."""
    optimizer, before = _optimizer(job.rule, job.kind, elements, device), shapes[0]

    def rebuilt(shape: TileShape) -> StepPlan:
        with forced_shape(shape):
            return optimizer.rebuild()

    def build(shapes: Sequence[TileShape]) -> None:
        """Compile the kernels of all shapes in parallel; on a CPU one kernel serves all shapes."""
        tick(f"compiling {len(shapes)} shapes")
        passes = [passes for shape in shapes for engine in rebuilt(shape).engines for passes in engine.passes]
        build_together([launch for each in passes for launch in each.launches(False)], device)

    def turns(shapes: Sequence[TileShape], rounds: int, until: float) -> dict[TileShape, float]:
        def prepare(shape: TileShape) -> None:
            tick(str(shape))
            rebuilt(shape)
            optimizer.step()  # builds, and updates the tables

        contenders = [Contender(str(shape), optimizer.step, prepare=partial(prepare, shape)) for shape in shapes]
        rows = measure(contenders, device, rounds, warmup=0, traced=False, until=until)
        for row in rows:
            if row.work is None:
                raise RuntimeError(f"{job.rule.name}, {job.kind}, tiles of {row.contender}: {row.failure}")
        return {shape: row.work.median for shape, row in zip(shapes, rows) if row.work}

    decide = until - (until - time.monotonic()) / 4 if math.isfinite(until) else until
    together = build_threads()
    medians: dict[TileShape, float] = {}
    for start in range(0, len(shapes), together):
        # A few at a time: kernels of states in blocks take seconds to build, and late shapes are not measured.
        if start and time.monotonic() >= decide:
            break
        chosen = shapes[start : start + together]
        if has_streams(device):
            build(chosen)
        medians |= turns(chosen, 1, until)
    least = min(medians.values())
    close = [shape for shape, taken in medians.items() if taken <= (1 + _CLOSE) * least]
    if len(close) > 1 and rounds > 1 and time.monotonic() < decide:
        medians |= turns(close, rounds - 1, decide)
    best = min(medians, key=medians.__getitem__)
    if rounds > 1 and best != before:
        # The best of many shapes was partly lucky: these turns alone decide.
        medians |= turns([before, best], rounds, until)
    return medians, best


def tune(
    listed: Sequence[Job],
    device: torch.device,
    rounds: int = 7,
    elements: int = 0,
    save: bool = True,
    seconds: float = 0,
    tick: Callable[[Job, str], object] = lambda job, text: None,
) -> Iterator[Outcome]:
    """Measure jobs one after the other, and store faster shapes in the device's table at once."""
    end = time.monotonic() + seconds if seconds else math.inf
    for index, job in enumerate(listed):
        now = time.monotonic()
        if now >= end:
            return
        until = now + (end - now) / (len(listed) - index)
        before = tile_shape(job.spec, device)
        shapes = tuple(dict.fromkeys((before, *candidates(job.spec, device))))
        size = elements or 1 << 24  # exceeds caches; at most half of the free memory
        if not elements and has_streams(device):
            element_size = sum(array.dtype.itemsize for array in [job.spec.grad, *job.spec.arrays])
            size = min(1 << 29, torch.cuda.mem_get_info(device)[0] // 2 // element_size)
        milliseconds, best = _measure(job, shapes, device, size, rounds, until, partial(tick, job))
        after = best if milliseconds[best] < (1 - GAIN) * milliseconds[before] else before
        if save:
            save_shapes(device, {job.signature: after})
        yield Outcome(job, before, after, milliseconds)
