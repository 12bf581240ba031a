"""Measuring tile shapes: one optimizer, rebuilt with each candidate in turn, its step timed in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..backends.spec import KernelSpec
from ..devices import has_streams, is_host
from ..optimizer import Optimizer
from ..optimizer.masters import MasterWeights
from ..rules import Rule, registry
from ..tuning import CANDIDATES, TileShape, forced_shape, save_shapes, signature, tile_shape
from .measure import SETTLE_SECONDS, synchronize

KINDS: Mapping[str, tuple[torch.dtype, MasterWeights]] = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16 with fp32 master": (torch.bfloat16, True),
    "bf16 with remainder": (torch.bfloat16, "remainder"),
}
"""Dtype of the parameters and how they are kept in float32, by name."""

GAIN = 0.01
"""A shape replaces the one in use only if it is faster by this part: less is noise."""

_TENSORS = 16


@dataclass(frozen=True)
class Job:
    """One signature to measure."""

    rule: Rule  # a rule that has it
    kind: str  # a key of `KINDS`
    signature: str  # what a table knows it by
    spec: KernelSpec  # what its kernels are built from


@dataclass(frozen=True)
class Outcome:
    """What one job gave."""

    job: Job
    before: TileShape  # the shape in use so far
    after: TileShape  # the shape to use from now on; the same if nothing is clearly faster
    milliseconds: Mapping[TileShape, float]  # median time of a step with each candidate

    @property
    def gain(self) -> float:
        """How much less time a step takes, as a part of the time before."""
        return 1 - self.milliseconds[self.after] / self.milliseconds[self.before]


def _optimizer(rule: Rule, kind: str, elements: int, device: torch.device) -> Optimizer:
    dtype, master_weights = KINDS[kind]
    # Matrices, since rules may treat other shapes apart.
    columns = min(1024, elements)
    rows = max(elements // _TENSORS // columns, 1)
    params = [torch.nn.Parameter(torch.ones(rows, columns, dtype=dtype, device=device)) for _ in range(_TENSORS)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return Optimizer(params, rule, master_weights=master_weights)


def has_matrix_work(optimizer: Optimizer) -> bool:
    """Whether a step also works on whole matrices, which a count of bytes says nothing about.

    >>> import torch
    >>> has_matrix_work(Optimizer([torch.zeros(2, 2, requires_grad=True)], "SGD"))
    False
    """
    engines = optimizer.fitting_plan(ahead=True).engines
    return any(segment.spec.program.library.passes for engine in engines for segment in engine.segments)


def _spec(optimizer: Optimizer) -> KernelSpec:
    return optimizer.fitting_plan(ahead=True).engines[0].segments[0].spec


def tiled_rules() -> list[Rule]:
    """Every registered rule whose step is tile passes alone, without work on whole matrices.

    Example:
        >>> {"AdamW", "SGD", "LAMB"} <= {rule.name for rule in tiled_rules()}
        True
    """
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    found = []
    for rule in registry.values():
        if not has_matrix_work(Optimizer([parameter], rule)):
            found.append(rule)
    return found


def jobs(rules: Iterable[Rule], device: torch.device) -> list[Job]:
    """Every signature of these rules, each once."""
    found: dict[str, Job] = {}
    for rule in rules:
        for kind in KINDS:
            spec = _spec(_optimizer(rule, kind, _TENSORS, device))
            name = signature(spec)
            found.setdefault(name, Job(rule, kind, name, spec))
    return list(found.values())


def _elements(device: torch.device, spec: KernelSpec) -> int:
    """Enough that no cache holds them, and at most half of the free memory."""
    if not has_streams(device):
        return 1 << 24
    each = sum(array.dtype.itemsize for array in [spec.grad, *spec.arrays])
    free, _ = torch.cuda.mem_get_info(device)
    return min(1 << 29, free // 2 // each)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    if is_host(device):
        time.sleep(SETTLE_SECONDS)
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(4):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 4e3


def _measure(
    job: Job, candidates: Sequence[TileShape], device: torch.device, elements: int, rounds: int
) -> dict[TileShape, float]:
    optimizer = _optimizer(job.rule, job.kind, elements, device)
    seconds: dict[TileShape, list[float]] = {shape: [] for shape in candidates}
    for turn in range(rounds):
        shift = turn % len(candidates)
        for shape in (*candidates[shift:], *candidates[:shift]):
            with forced_shape(shape):
                optimizer.rebuild()
            optimizer.step()  # builds, and moves the tables
            seconds[shape].append(_seconds(optimizer.step, device))
    return {shape: statistics.median(taken) * 1e3 for shape, taken in seconds.items()}


def tune(
    listed: Sequence[Job], device: torch.device, rounds: int = 7, elements: int = 0, save: bool = True
) -> Iterator[Outcome]:
    """Measure jobs one after the other and put what is faster into the device's table."""
    for job in listed:
        before = tile_shape(job.spec, device)
        candidates = tuple(dict.fromkeys((before, *CANDIDATES[device.type])))
        milliseconds = _measure(job, candidates, device, elements or _elements(device, job.spec), rounds)
        best = min(milliseconds, key=milliseconds.__getitem__)
        after = best if milliseconds[best] < (1 - GAIN) * milliseconds[before] else before
        if save:
            save_shapes(device, {job.signature: after})
        yield Outcome(job, before, after, milliseconds)
