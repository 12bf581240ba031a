"""What every memory that `offload` attaches has in common: a reason, where updates run, a report."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..backends.spec import KernelSpec, pass_traffic, total_traffic
from ..devices import has_streams, is_host
from ..optimizer import Optimizer
from ..optimizer.attached import AttachedType
from ..optimizer.build import spec_of
from ..optimizer.parameters import iter_params
from ..runtime import grad_dtype
from ..side_stream import SideStream
from .copies import HostMemory, gigabytes, part_of
from .memory import StateMemory

if TYPE_CHECKING:
    from .mirrors import HostGradients


_SIZE = 128 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second."""

    inward: float  # from page-locked memory to the device, alone
    outward: float  # from the device to page-locked memory, alone
    both: float  # each way while copies run in both
    host: float  # what the CPU's threads read and write in a copy of host memory


@functools.cache
def measure_bandwidths(device: torch.device) -> Bandwidths:
    """Measure them, in about a tenth of a second."""
    target, source = HostMemory(device, "a measurement of bandwidth").take([_SIZE, _SIZE])
    buffers = torch.zeros(2, _SIZE, dtype=torch.uint8, device=device)
    target.zero_()
    source.zero_()
    inward, outward = SideStream(device), SideStream(device)

    def into() -> None:
        inward.copy([(buffers[0], source)])

    def out() -> None:
        outward.copy([(target, buffers[1])])

    def both() -> None:
        into()
        out()

    def on_host() -> None:
        target.copy_(source)

    def rate(action: Callable[[], None], size: int) -> float:
        return size / _seconds(action, device)

    return Bandwidths(rate(into, _SIZE), rate(out, _SIZE), rate(both, _SIZE), rate(on_host, 2 * _SIZE))


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """The fastest of some runs, after one that is not counted."""
    found = []
    for _ in range(_ROUNDS + 1):
        _synchronize(device)
        begin = time.perf_counter()
        action()
        _synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def _synchronize(device: torch.device) -> None:
    if has_streams(device):
        torch.cuda.synchronize(device)


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
    for _, _, group, param in iter_params(optimizer):
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


class OffloadedState(StateMemory):
    """Where the state of an offloaded optimizer is; an optimizer has its methods while it is attached."""

    is_beside = False
    not_copied = "an offloaded optimizer cannot be copied or pickled: save its state_dict()"
    where = ""
    """Where updates run, as reports say it."""

    reason = ""
    """Why there."""

    _owner: Callable[[], Optimizer | None]
    device: torch.device
    kept: HostGradients | None = None
    """Gradients that are taken from the parameters while backward runs, if they are."""

    @property
    def host_bytes(self) -> int:
        """Host memory taken."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Device memory of buffers."""
        return 0

    def attach_to(self, optimizer: Optimizer, where: str, reason: str) -> None:
        """Be the memory of an optimizer, once that is complete.

        Args:
            optimizer: whose state is here.
            where: where updates run, as reports say it.
            reason: why there.
        """
        self._owner, self.where, self.reason = weakref.ref(optimizer), where, reason

    def note_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Note whether the step has gradients, which it uses up."""
        kept = self.kept
        self.had_gradients = kept is not None and (kept.is_there or any(param.grad is not None for param in params))

    def present_gradients(self, params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those on the host, too."""
        params = list(params)
        return [*super().present_gradients(params), *(self.kept.arrived(params) if self.kept is not None else ())]

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have a scaler's function unscale the gradients on the host, and those that are still beside parameters."""
        if self.kept is None:
            return unscale(optimizer, *args, **kwargs)
        with self.kept.as_parameters() as there:
            params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            on_host = [*there, *(param for param in params if is_host(param.device))]
            elsewhere = [param for param in params if not is_host(param.device)]
            # What torch copies to the host by itself it reads before it has arrived.
            arrived = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args] if on_host else []
            flags = unscale(_grouped(on_host), *arrived, **kwargs) if on_host else {}
            if elsewhere or not on_host:
                flags = {**flags, **unscale(_grouped(elsewhere), *args, **kwargs)}
            return flags

    def offload_report(self) -> OffloadReport:
        """Where the state is, where updates run and why, with the machine's measured bandwidths and predicted times.

        The first report on a machine measures, unless `where="auto"` has done it: the host waits for that.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1000))
            >>> optimizer = tilestep.offload(tilestep.AdamW([weight]))
            >>> report = optimizer.offload_report()
            >>> report.where, report.plan.state
            ('here', 8000)
        """
        owner = self._owner()
        assert owner is not None, "an optimizer keeps its memory, and not the other way round"
        plan = plan_for(owner)
        if self.is_beside:
            return OffloadReport(self.where, self.reason, plan, host_bytes=plan.state)
        known = measure_bandwidths(self.device)
        gpu, cpu = plan.on_device(known, self.keeps_gradients), plan.on_host(known, self.keeps_gradients)
        return OffloadReport(self.where, self.reason, plan, self.host_bytes, self.device_bytes, known, gpu, cpu)


class InPlace(OffloadedState):
    """State beside parameters that are on the CPU already."""

    is_beside = True


def _grouped(params: list[torch.Tensor]) -> SimpleNamespace:
    """What a scaler sees of an optimizer."""
    return SimpleNamespace(param_groups=[{"params": params}])


if TYPE_CHECKING:

    class OffloadedOptimizer(Optimizer):
        """For type checkers: an optimizer with the methods that `offload` adds."""

        def wait(self) -> None: ...
        def offload_report(self) -> OffloadReport: ...

else:

    class OffloadedOptimizer(metaclass=AttachedType):
        """An optimizer whose state lives in host memory; made by `tilestep.offload`, of the class that it was before.

        It is used as before, with `wait()` and `offload_report()` besides. A tensor of `state` that was taken out
        before a step and is read after it needs a `wait()`.
        """

        attached_as = ("offload", "offload in place")
