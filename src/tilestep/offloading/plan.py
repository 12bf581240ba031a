"""Where an update runs: bytes it moves on either side, the time they take, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codegen.spec import KernelSpec
from ..codegen.traffic import pass_traffic, total_traffic
from ..engine import grad_dtype
from ..optimizer import Optimizer
from ..optimizer.parameters import labelled
from ..optimizer.specs import spec_of
from .bandwidth import Bandwidths
from .memory import gigabytes
from .placing import part_of


def moved_arrays(spec: KernelSpec) -> tuple[str, ...]:
    """The arrays of a kernel that live on the host: its element states and the master, but no scales of blocks."""
    graph = spec.program.graph
    buffers = [name for name in graph.states if name in spec.storages and name not in graph.slice_states]
    found = [array.name for name in buffers for array in spec.storages[name].arrays(name) if array.follows_elements]
    masters = [array.name for array in spec.storages["param"].arrays("param") if array.name != "param"]
    return (*masters, *found)


def traffic_of(spec: KernelSpec, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which arrays that live on the host come in for a tile pass, and which go out after it.

    What is written comes in as well: a tensor without gradient, and all of them in a skipped step, stay as they are.
    """
    moved = moved_arrays(spec)
    traffic = pass_traffic(spec, index)
    written = {array.name for array in traffic.writes}
    touched = written | {array.name for array in traffic.reads}
    return tuple(name for name in moved if name in touched), tuple(name for name in moved if name in written)


@dataclass(frozen=True)
class Plan:
    """Bytes of one update of all parameters."""

    state: int  # that live on the host
    inward: int  # of state that goes to the device if it updates
    outward: int  # of state that comes back
    gradients: int  # that go to the host if it updates
    parameters: int  # that come back
    kernels: int  # that the host's kernels read and write

    def on_device(self, known: Bandwidths, kept: bool = False) -> float:
        """Seconds of an update on the device: both ways at once."""
        return max(self.inward + (self.gradients if kept else 0), self.outward) / known.both

    def on_host(self, known: Bandwidths, kept: bool = False) -> float:
        """Seconds of an update on the host: copies beside kernels, which share the host's memory with them."""
        gradients = 0 if kept else self.gradients
        shared = (self.kernels + gradients + self.parameters) / known.host
        return max(gradients / known.outward, self.parameters / known.inward, shared)


def plan_for(optimizer: Optimizer) -> Plan:
    """What an update of an optimizer's parameters moves."""
    totals = [0.0] * 6
    widths: dict[tuple[int, torch.dtype, torch.dtype], tuple[float, ...]] = {}
    for _, _, group, param in labelled(optimizer):
        if param.is_meta:
            continue
        part = part_of(param)
        spec = spec_of(optimizer.rule_of(group), group, part, param.shape)
        key = (id(spec), part.dtype, grad_dtype(part))
        if key not in widths:
            widths[key] = (*_widths(spec), key[2].itemsize, part.element_size(), round(sum(total_traffic(spec))))
        for place, width in enumerate(widths[key]):
            totals[place] += width * part.numel()
    return Plan(*map(round, totals))


def _widths(spec: KernelSpec) -> tuple[float, float, float]:
    """For each element: bytes on the host, bytes that come in, bytes that go out, in all passes."""
    sizes = {array.name: array.dtype.itemsize / array.elements for array in spec.arrays}
    touched: set[str] = set()
    came = went = 0.0
    for index in range(len(spec.program.tiles)):
        into, out = traffic_of(spec, index)
        touched.update(into)
        came += sum(sizes[name] for name in into)
        went += sum(sizes[name] for name in out)
    return sum(sizes[name] for name in touched), came, went


@dataclass(frozen=True)
class OffloadReport:
    """Where the state of an optimizer is, where its updates run, and why."""

    where: str  # "gpu", "cpu", or "here" for parameters that are on the CPU already
    reason: str  # why
    plan: Plan  # the bytes of an update
    host_bytes: int = 0  # taken of host memory
    device_bytes: int = 0  # of buffers on the device
    bandwidths: Bandwidths | None = None  # as measured on this machine; None for parameters on the CPU
    gpu_seconds: float | None = None  # predicted for an update on the GPU, if its copies are all that counts
    cpu_seconds: float | None = None  # predicted for an update on the CPU

    def __str__(self) -> str:
        lines = [f"updates run on: {self.where} ({self.reason})"]
        lines.append(
            f"host memory: {gigabytes(self.host_bytes)}; buffers on the device: {gigabytes(self.device_bytes)}"
        )
        if self.bandwidths is not None and self.gpu_seconds is not None and self.cpu_seconds is not None:
            known = self.bandwidths
            lines.append(
                f"measured: {gigabytes(known.inward)}/s in, {gigabytes(known.outward)}/s out, "
                f"{gigabytes(known.both)}/s each way at once, {gigabytes(known.host)}/s in host memory"
            )
            lines.append(f"predicted: gpu {1e3 * self.gpu_seconds:.3g} ms, cpu {1e3 * self.cpu_seconds:.3g} ms")
        return "\n".join(lines)
