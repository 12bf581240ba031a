"""The sections of the benchmark that measure in this process: `norm`, `step` and `cpu`."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import has_streams
from ..norm import clip_grad_norm_, total_norm
from ..optimizer import Optimizer
from . import bandwidth
from .environment import environment
from .measure import Contender, Timing, measure
from .peers import OURS, Peer, peers, step_of
from .results import Group, Result, Row
from .workloads import Workload, adamw_bytes, cpu_workloads, gpu_workloads, make_parameters

MAX_GRAD_NORM = 1.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How a section is run."""

    device: torch.device  # where; `cpu` and `compile` know their own
    quick: bool = False  # tiny workloads and few rounds: checks the harness, measures nothing
    compiled: bool = False  # with the peers that compile for minutes
    rounds: int = 15  # timed calls of each contender
    say: Callable[[str], object] = print  # gets a line about what is being measured

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers that bandwidth is measured with."""
        if self.quick:
            return MEBIBYTE
        return (1024 if has_streams(self.device) else 256) * MEBIBYTE

    def measure(self, contenders: Sequence[Contender], device: torch.device, rounds: int | None = None) -> list[Timing]:
        """Measure with these settings, in at most so many rounds."""
        chosen = min(self.rounds, rounds or self.rounds)
        return measure(contenders, device, rounds=2 if self.quick else chosen, warmup=1 if self.quick else 3)


def run_norm(settings: Settings) -> Result:
    """Measure the total norm, and clipping by it, of every workload's gradients."""
    result = Result("norm", environment(settings.device))
    for workload in gpu_workloads(settings.quick):
        settings.say(f"norm: {workload.title}")
        if not _room(settings, workload, bytes_an_element=2 * workload.dtype.itemsize):
            result.notes.append(f"left out, memory does not suffice: {workload.title}")
            continue
        result.groups.extend(_norm_groups(workload, settings))
        free(settings.device)
    return result


def _norm_groups(workload: Workload, settings: Settings) -> list[Group]:
    parameters = make_parameters(workload, settings.device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    read = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    norms = [
        Contender("torch", lambda: torch.nn.utils.get_total_norm(gradients), read),
        Contender(OURS, lambda: total_norm(gradients), read),
    ]
    clips = [
        Contender("torch", lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM), 3 * read),
        Contender(OURS, lambda: clip_grad_norm_(parameters, MAX_GRAD_NORM), 3 * read),
    ]
    reads = bandwidth.flat_reads(settings.device, settings.buffer_bytes)
    copy = bandwidth.copy(settings.device, settings.buffer_bytes)
    clips = [_with_large_gradients(clip, gradients) for clip in clips]
    return [
        measured_group(f"total norm, {workload.title}", norms, reads, settings, settings.device),
        measured_group(f"clip, {workload.title}", clips, [copy], settings, settings.device),
    ]


def _with_large_gradients(contender: Contender, gradients: list[Tensor]) -> Contender:
    """Make the clip have work to do in every call: after one call the gradients would be small enough."""

    def prepare() -> None:
        torch._foreach_mul_(gradients, 1.5)

    return Contender(contender.name, contender.call, contender.bytes_moved, prepare)


def run_step(settings: Settings) -> Result:
    """Measure AdamW with and without a clip: bf16 and float32 parameters, and bf16 ones with float32 masters."""
    result = Result("step", environment(settings.device))
    on_gpu = has_streams(settings.device)
    # On a GPU torch's default is its foreach version.
    names = [
        peer.name for peer in peers(settings.device, settings.compiled) if not on_gpu or peer.name != "torch default"
    ]
    competing = peers(settings.device, settings.compiled, names)
    for workload in gpu_workloads(settings.quick):
        float32 = dataclasses.replace(workload, dtype=torch.float32)
        _step_group(result, settings, workload, MAX_GRAD_NORM, competing)
        if workload.name == "llama":
            _step_group(result, settings, workload, None, competing)
            _step_group(result, settings, float32, MAX_GRAD_NORM, competing)
            _step_group(result, settings, float32, None, competing)
            _step_group(result, settings, workload, MAX_GRAD_NORM, None)
        _step_group(result, settings, workload, None, None)
    return result


def _step_group(
    result: Result, settings: Settings, workload: Workload, clip: float | None, competing: Sequence[Peer] | None
) -> None:
    """Measure one kind of step; no peers means float32 master weights, which only tilestep has."""
    device = settings.device
    master = competing is None
    weights = ", float32 master weights and moments" if master else ""
    title = f"{'clip + ' if clip else ''}AdamW{weights}, {workload.title}"
    settings.say(f"step: {title}")
    builds: list[Callable[[], Contender]] = [
        lambda peer=peer: _step_contender(peer, workload, device, clip)  # type: ignore[misc]
        for peer in competing or ()
    ]
    if master:
        builds = [lambda: _master_weights(workload, device, clip)]
    room = _room(settings, workload, bytes_an_element=16 if master else 4 * workload.dtype.itemsize)
    if room < 1:
        result.notes.append(f"left out, memory does not suffice: {title}")
        return
    group: Group | None = None
    for start in range(0, len(builds), room):
        contenders = [build() for build in builds[start : start + room]]
        copy = bandwidth.copy(device, settings.buffer_bytes)
        measured = measured_group(title, contenders, [copy], settings, device)
        if group is None:
            group = measured
        else:
            group.rows[-1:-1] = measured.rows[:-1]
        contenders.clear()
        free(device)
    assert group is not None
    if room < len(builds):
        result.notes.append(f"{room} at a time, memory does not suffice for all at once: {title}")
    result.groups.append(group)


def run_cpu(settings: Settings) -> Result:
    """Measure AdamW on the CPU against torch and against a plain loop with the same traffic."""
    device = torch.device("cpu")
    result = Result("cpu", environment(device))
    for workload in cpu_workloads(settings.quick):
        settings.say(f"cpu: AdamW, {workload.title}")
        contenders = [
            _step_contender(peer, workload, device, None)
            for peer in peers(device, settings.compiled)
            if peer.name != "torch foreach"  # a loop on the CPU, like the default
        ]
        loop = bandwidth.plain_loop(workload.elements, workload.dtype)
        pieces = bandwidth.loop_over_tensors([math.prod(shape) for shape in workload.shapes], workload.dtype)
        limits = [limit for limit in (loop, pieces) if limit is not None]
        limits = limits or [bandwidth.copy(device, settings.buffer_bytes)]
        result.groups.append(measured_group(f"AdamW, {workload.title}", contenders, limits, settings, device))
        del contenders, limits, loop, pieces
        free(device)
    return result


def _step_contender(peer: Peer, workload: Workload, device: torch.device, max_grad_norm: float | None) -> Contender:
    """Return a contender with parameters and state of its own; building is part of its first, untimed call."""
    parameters = make_parameters(workload, device)
    gradients = [parameter.grad for parameter in parameters]
    steps: list[Callable[[], object]] = []

    def call() -> None:
        if not steps:
            steps.append(step_of(peer, parameters, max_grad_norm))
        steps[0]()

    def prepare() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # some optimizers drop gradients when they are done

    return Contender(peer.name, call, adamw_bytes(parameters, clip=max_grad_norm is not None), prepare)


def _master_weights(workload: Workload, device: torch.device, max_grad_norm: float | None) -> Contender:
    parameters = make_parameters(workload, device)
    optimizer = Optimizer(parameters, "AdamW", lr=1e-4, master_weights=True, max_grad_norm=max_grad_norm)
    moved = adamw_bytes(parameters, clip=max_grad_norm is not None, master_weights=True)
    return Contender(OURS, optimizer.step, moved)


def measured_group(
    title: str,
    contenders: Sequence[Contender],
    limits: Sequence[Contender],
    settings: Settings,
    device: torch.device,
    rounds: int | None = None,
) -> Group:
    """Measure contenders and limits in the same rounds; the fastest limit is what the others are held against."""
    timings = settings.measure([*contenders, *limits], device, rounds)
    reached = [(timing.bandwidth, timing.contender) for timing in timings[len(contenders) :] if timing.bandwidth]
    limit, limit_name = max(reached, default=(None, ""))
    rows = [Row.of(timing, limit, gpu=has_streams(device)) for timing in timings]
    return Group(title, rows, limit, limit_name)


def _room(settings: Settings, workload: Workload, bytes_an_element: int) -> int:
    """How many contenders that each hold so many bytes an element there is memory for at once."""
    if has_streams(settings.device):
        free, _ = torch.cuda.mem_get_info(settings.device)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = min(available // 2, 8 << 30)  # a CPU would need minutes for what takes more
    # While one steps, foreach needs about two parameter copies more; the rest is bandwidth's and the delay's buffers.
    passing = 2 * workload.elements * workload.dtype.itemsize + 4 * settings.buffer_bytes
    return max(0, free - passing) // max(workload.elements * bytes_an_element, 1)


def free(device: torch.device) -> None:
    """Give memory that nothing refers to any more back to the device."""
    gc.collect()
    if has_streams(device):
        torch.cuda.empty_cache()
