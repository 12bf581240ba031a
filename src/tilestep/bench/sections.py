"""Lists of parameters, optimizers that take part, and the sections `norm`, `step` and `cpu`."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..devices import has_streams
from ..norm import clip_grad_norm_, total_norm
from ..optimizer import Optimizer
from ..storage import dtype_name
from . import measure as bandwidth
from .measure import Contender, Row, measure
from .results import OURS, Group, Result, environment


@dataclass(frozen=True)
class Workload:
    """A named list of shapes of one dtype."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements in all tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def title(self) -> str:
        """The name with counts."""
        return (
            f"{self.name}: {len(self.shapes):,} {dtype_name(self.dtype)} tensors, {self.elements / 1e6:,.4g} M elements"
        )


def gpu_workloads(quick: bool = False) -> list[Workload]:
    """Return the workloads of `norm` and `step`: many tensors of random sizes, a language model, many small tensors."""
    draw = random.Random(133586)
    count, largest = (40, 4096) if quick else (2000, 128 * 1024)
    return [
        Workload("random", tuple((draw.randint(1, largest),) for _ in range(count)), torch.bfloat16),
        llama_of("llama", *((2, 64, 16, 172, 500) if quick else (24, 2048, 512, 5504, 32000))),
        Workload("small", ((1024,),) * (50 if quick else 5000), torch.bfloat16),
    ]


def cpu_workloads(quick: bool = False) -> list[Workload]:
    """Return the workloads of `cpu`: large tensors, many small tensors, all in bf16."""
    shrink = 100 if quick else 1
    large = ((250_000 // shrink,),) * 200
    return [
        Workload("large fp32", large, torch.float32),
        Workload("small fp32", ((8192 // shrink,),) * (2000 // shrink), torch.float32),
        Workload("large bf16", large, torch.bfloat16),
    ]


def llama_of(name: str, layers: int, width: int, key_value: int, inner: int, vocabulary: int) -> Workload:
    layer: list[tuple[int, ...]] = [
        (width, width), (key_value, width), (key_value, width), (width, width),  # attention: q, k, v, o
        (inner, width), (inner, width), (width, inner),  # gate, up, down
        (width,), (width,),  # norms
    ]  # fmt: skip
    shapes = [(vocabulary, width), *(layer * layers), (width,), (vocabulary, width)]
    return Workload(name, tuple(shapes), torch.bfloat16)


def make_parameters(workload: Workload, device: torch.device) -> list[Tensor]:
    """Return parameters with gradients, each an allocation as in a model."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(deviation: float) -> list[Tensor]:
        # Parameters first, then gradients, as in a training: a CPU's prefetcher depends on neighbours in memory.
        empty = [torch.empty(shape, device=device, dtype=workload.dtype) for shape in workload.shapes]
        return [tensor.normal_(0, deviation, generator=generator) for tensor in empty]

    parameters, gradients = drawn(0.02), drawn(1e-3)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_().grad = gradient
    return parameters


def adamw_bytes(parameters: Sequence[Tensor], clip: bool, master_weights: bool = False) -> int:
    """Return the least traffic of an AdamW step in bytes: gradients read (twice with a clip), all else also written."""
    buffers = 24 if master_weights else 0  # bytes of float32 masters and moments, besides 16-bit parameters
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in parameters]
    return sum(count * (buffers + size * ((1 if buffers else 6) + (2 if clip else 1))) for count, size in sizes)


LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Peer:
    """An optimizer in the comparison."""

    name: str  # in tables
    build: Callable[..., Any]  # makes the optimizer for a list of parameters
    module: str = "torch"  # what must be importable
    compiled: bool = False  # whether its first step compiles for minutes: it runs on request only
    clips: bool = False  # whether `step()` itself clips, when built with `max_grad_norm`
    gpu_only: bool = False  # whether it has no CPU version
    has_masters: bool = False  # whether it keeps float32 master weights and moments


_ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
_torch_adamw = partial(torch.optim.AdamW, **_ADAMW)
_tilestep = partial(Optimizer, rule="AdamW", **_ADAMW)


def _torch_compiled(parameters: Sequence[Tensor]) -> Any:
    rate = torch.tensor(LEARNING_RATE)
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=WEIGHT_DECAY, capturable=parameters[0].is_cuda)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def _of_peer(parameters: Sequence[Tensor], module: str, name: str, **options: Any) -> Any:
    extra = {"storage_dtype": dtype_name(parameters[0].dtype)} if module == "heavyball" else {}
    return getattr(importlib.import_module(module), name)(parameters, **_ADAMW, **options, **extra)


def _peer(title: str, module: str, name: str, options: dict[str, Any], **properties: bool) -> Peer:
    return Peer(title, partial(_of_peer, module=module, name=name, **options), module, **properties)


PEERS = [
    Peer("torch default", _torch_adamw),
    Peer("torch foreach", partial(_torch_adamw, foreach=True)),
    Peer("torch fused", partial(_torch_adamw, fused=True)),
    Peer("torch compiled", _torch_compiled, compiled=True),
    _peer("torch-optimi", "optimi", "AdamW", {"betas": (0.9, 0.999), "eps": 1e-8, "kahan_sum": False}),
    _peer("flashoptim", "flashoptim", "FlashAdamW", {"quantize": False, "master_weight_bits": None}, gpu_only=True),
    _peer("heavyball", "heavyball", "AdamW", {"betas": (0.9, 0.999)}, compiled=True),
    Peer(OURS, _tilestep, module="tilestep", clips=True),
]
_WITH_MASTERS = [Peer(OURS, partial(_tilestep, master_weights=True), clips=True, has_masters=True)]


def peers(device: torch.device, compiled: bool = False, names: Sequence[str] = ()) -> list[Peer]:
    """Return the optimizers that can take part here."""
    return [
        peer
        for peer in PEERS
        if importlib.util.find_spec(peer.module) is not None
        and (compiled or not peer.compiled)
        and (has_streams(device) or not peer.gpu_only)
        and (not names or peer.name in names)
    ]


def step_of(peer: Peer, parameters: Sequence[Tensor], max_grad_norm: float | None) -> Callable[[], object]:
    """Return a function that takes one step, clipping by the global norm first where asked."""
    limit = None if peer.clips else max_grad_norm
    options = {"max_grad_norm": max_grad_norm} if peer.clips and max_grad_norm is not None else {}
    optimizer = peer.build(parameters, **options)

    def step() -> None:
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()

    return step


MAX_GRAD_NORM = 1.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Options of a section."""

    device: torch.device  # ignored by `cpu` and `compile`
    quick: bool = False  # tiny workloads and few rounds: checks the harness, measures nothing
    compiled: bool = False  # include peers that compile for minutes
    rounds: int = 15  # timed calls of each contender
    say: Callable[[str], object] = print  # receives progress messages

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of bandwidth measurements."""
        if self.quick:
            return MEBIBYTE
        return (1024 if has_streams(self.device) else 256) * MEBIBYTE

    def measure(self, contenders: Sequence[Contender], device: torch.device, rounds: int | None = None) -> list[Row]:
        """Measure with these settings, in at most so many rounds."""
        chosen = min(self.rounds, rounds or self.rounds)
        return measure(contenders, device, rounds=2 if self.quick else chosen, warmup=1 if self.quick else 3)


def run_norm(settings: Settings) -> Result:
    """Measure the total norm, and clipping by it, of every workload's gradients."""
    result = Result("norm", environment(settings.device))
    for workload in gpu_workloads(settings.quick):
        settings.say(f"norm: {workload.title}")
        if not _room(settings, workload, bytes_per_element=2 * workload.dtype.itemsize):
            result.notes.append(f"skipped for lack of memory: {workload.title}")
            continue
        result.groups.extend(_norm_groups(workload, settings))
        free(settings.device)
    return result


def _norm_groups(workload: Workload, settings: Settings) -> list[Group]:
    parameters = make_parameters(workload, settings.device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    read = sum(gradient.nbytes for gradient in gradients)
    norms = {"torch": torch.nn.utils.get_total_norm, OURS: total_norm}
    clips = {"torch": torch.nn.utils.clip_grad_norm_, OURS: clip_grad_norm_}
    # Gradients are restored, so that every call clips.
    enlarge = partial(torch._foreach_mul_, gradients, 1.5)
    compared = {
        "total norm": (
            [Contender(name, partial(norm, gradients), read) for name, norm in norms.items()],
            bandwidth.flat_reads(settings.device, settings.buffer_bytes),
        ),
        "clip": (
            [
                Contender(name, partial(clip, parameters, MAX_GRAD_NORM), 3 * read, enlarge)
                for name, clip in clips.items()
            ],
            [bandwidth.copy(settings.device, settings.buffer_bytes)],
        ),
    }
    return [
        measured_group(f"{title}, {workload.title}", contenders, limits, settings, settings.device)
        for title, (contenders, limits) in compared.items()
    ]


def run_step(settings: Settings) -> Result:
    """Measure AdamW with and without a clip: bf16 and float32 parameters, and bf16 parameters with float32 masters."""
    result = Result("step", environment(settings.device))
    # torch's default on a GPU is foreach.
    same = "torch default" if has_streams(settings.device) else ""
    competing = [peer for peer in peers(settings.device, settings.compiled) if peer.name != same]

    def limits() -> list[Contender]:
        return [bandwidth.copy(settings.device, settings.buffer_bytes)]

    for workload in gpu_workloads(settings.quick):
        float32 = dataclasses.replace(workload, dtype=torch.float32)
        kinds: list[tuple[Workload, float | None, list[Peer]]] = [(workload, MAX_GRAD_NORM, competing)]
        if workload.name == "llama":
            kinds += [(workload, None, competing), (float32, MAX_GRAD_NORM, competing), (float32, None, competing)]
            kinds += [(workload, MAX_GRAD_NORM, _WITH_MASTERS)]
        for listed, clip, contenders in (*kinds, (workload, None, _WITH_MASTERS)):
            _step_group(result, settings, listed, clip, contenders, limits)
    return result


def run_cpu(settings: Settings) -> Result:
    """Measure AdamW on the CPU against torch and against a plain loop with the same traffic."""
    settings = dataclasses.replace(settings, device=torch.device("cpu"))
    result = Result("cpu", environment(settings.device))
    # torch's foreach is a loop on the CPU, like the default.
    competing = [peer for peer in peers(settings.device, settings.compiled) if peer.name != "torch foreach"]
    for workload in cpu_workloads(settings.quick):

        def limits(workload: Workload = workload) -> list[Contender]:
            loop = bandwidth.plain_loop(workload.elements, workload.dtype)
            pieces = bandwidth.loop_over_tensors([math.prod(shape) for shape in workload.shapes], workload.dtype)
            loops = [limit for limit in (loop, pieces) if limit is not None]
            return loops or [bandwidth.copy(settings.device, settings.buffer_bytes)]

        _step_group(result, settings, workload, None, competing, limits)
    return result


def _step_group(
    result: Result,
    settings: Settings,
    workload: Workload,
    clip: float | None,
    competing: Sequence[Peer],
    limits: Callable[[], list[Contender]],
) -> None:
    """Measure one kind of step, with as many contenders at a time as memory suffices for."""
    has_masters = competing[0].has_masters
    weights = ", float32 master weights and moments" if has_masters else ""
    title = f"{'clip + ' if clip else ''}AdamW{weights}, {workload.title}"
    settings.say(f"{result.section}: {title}")
    room = _room(settings, workload, bytes_per_element=16 if has_masters else 4 * workload.dtype.itemsize)
    if room < 1:
        result.notes.append(f"skipped for lack of memory: {title}")
        return
    rows: list[Row] = []
    for start in range(0, len(competing), room):
        listed = competing[start : start + room]
        contenders = [_step_contender(peer, workload, settings.device, clip) for peer in listed]
        group = measured_group(title, contenders, limits(), settings, settings.device)
        rows += group.rows[: len(listed)]
        del contenders
        free(settings.device)
    if room < len(competing):
        result.notes.append(f"{room} at a time for lack of memory: {title}")
    result.groups.append(dataclasses.replace(group, rows=[*rows, *group.rows[len(listed) :]]))


def _step_contender(peer: Peer, workload: Workload, device: torch.device, max_grad_norm: float | None) -> Contender:
    """Return a contender with its own parameters and state; its first, untimed call builds."""
    parameters = make_parameters(workload, device)
    gradients = [parameter.grad for parameter in parameters]
    steps: list[Callable[[], object]] = []

    def call() -> None:
        if not steps:
            steps.append(step_of(peer, parameters, max_grad_norm))
        steps[0]()

    def prepare() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # some optimizers drop gradients

    moved = adamw_bytes(parameters, max_grad_norm is not None, peer.has_masters)
    return Contender(peer.name, call, moved, prepare)


def measured_group(
    title: str,
    contenders: Sequence[Contender],
    limits: Sequence[Contender],
    settings: Settings,
    device: torch.device,
    rounds: int | None = None,
) -> Group:
    """Measure contenders and limits in the same rounds; contenders are compared with the fastest limit."""
    rows = settings.measure([*contenders, *limits], device, rounds)
    reached = [(row.bandwidth, row.contender) for row in rows[len(contenders) :] if row.bandwidth]
    limit, limit_name = max(reached, default=(None, ""))
    return Group(title, [row.note_bandwidth(limit) for row in rows], limit, limit_name)


def _room(settings: Settings, workload: Workload, bytes_per_element: int) -> int:
    """The number of contenders, of so many bytes per element, that fit in memory at once."""
    if has_streams(settings.device):
        free, _ = torch.cuda.mem_get_info(settings.device)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = min(available // 2, 8 << 30)  # a CPU would need minutes for more
    # foreach needs about two more copies of parameters in a step; the rest is buffers of bandwidth and delay.
    passing = 2 * workload.elements * workload.dtype.itemsize + 4 * settings.buffer_bytes
    return max(0, free - passing) // max(workload.elements * bytes_per_element, 1)


def free(device: torch.device) -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if has_streams(device):
        torch.cuda.empty_cache()
