"""State in host memory: mirrors of parameters, copies of gradients, and the report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..devices import is_host
from ..errors import OffloadError
from ..kernels.spec import KernelSpec, pass_traffic, total_traffic
from ..native.host_memory import HostMemory, gigabytes
from ..optimizer import Optimizer
from ..optimizer.build import spec_of
from ..optimizer.memory import StateMemory
from ..optimizer.optimizer import Attached, AttachedType
from ..optimizer.parameters import params_of, shares_of
from ..placement import Share, is_distributed
from ..placement.local import distribute, local_part
from ..runtime import Stale, grad_dtype, is_dense
from ..runtime.passes import Passes
from ..runtime.segment import TileRange, same_walk
from ..storage import INTEGERS
from ..timeline.side_stream import Event, Held, SideStream
from ..timeline.timeline import Row, Timeline
from .copies import check_device


@dataclass(frozen=True)
class Plan:
    """Bytes of one update of all parameters."""

    state: int  # on the host
    inward: int  # of state, copied to the device for updates there
    outward: int  # of state, copied back
    gradients: int  # copied to the host for updates there
    parameters: int  # copied back
    kernels: int  # read and written by kernels of the host


def plan_for(optimizer: Optimizer) -> Plan:
    """The bytes that an update of an optimizer's parameters moves."""
    totals = [0.0] * 6
    widths: dict[tuple[Any, ...], tuple[float, ...]] = {}
    for share in shares_of(optimizer):
        param, group = share.holder, share.group
        if param.is_meta:
            continue
        part = local_part(param)
        spec = spec_of(optimizer.rule_of(group), group, part, param.shape, share.listed)
        key = (id(spec), part.dtype, grad_dtype(part))
        if key not in widths:
            widths[key] = (*_widths(spec), key[2].itemsize, part.element_size(), round(sum(total_traffic(spec))))
        totals = [total + width * part.numel() for total, width in zip(totals, widths[key])]
    return Plan(*map(round, totals))


def _widths(spec: KernelSpec) -> tuple[float, float, float]:
    """Bytes per element over all passes: on the host, copied in, copied out."""
    sizes = {array.name: array.dtype.itemsize / array.elements for array in spec.arrays}
    moved = [traffic_of(spec, index) for index in range(len(spec.program.tiles))]
    bytes_in, bytes_out = (sum(sizes[name] for both in moved for name in both[way]) for way in (0, 1))
    return sum(sizes[name] for name in {name for into, _ in moved for name in into}), bytes_in, bytes_out


@dataclass(frozen=True)
class OffloadReport:
    """Where the state of an optimizer is, where its updates run, and why."""

    where: str  # "gpu", "cpu", or "here" for parameters on the CPU
    reason: str  # why updates run there
    plan: Plan  # the bytes of an update
    host_bytes: int = 0  # bytes of host memory
    device_bytes: int = 0  # bytes of buffers on the device

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"updates run on: {self.where} ({self.reason})",
            f"host memory: {gigabytes(self.host_bytes)}; buffers on the device: {gigabytes(self.device_bytes)}",
        ]
        if self.where != "here":
            lines.append(
                f"an update on the GPU copies {gigabytes(plan.inward)} of state in and {gigabytes(plan.outward)} out; "
                f"on the CPU {gigabytes(plan.gradients)} of gradients out and {gigabytes(plan.parameters)} of "
                f"parameters in, and its kernels read and write {gigabytes(plan.kernels)} of host memory"
            )
        return "\n".join(lines)


def host_arrays(spec: KernelSpec) -> tuple[str, ...]:
    """The arrays of a kernel on the host: element states and masters, without scales of blocks."""
    graph = spec.program.graph
    buffers = [name for name in graph.states if name in spec.storages and name not in graph.slice_states]
    states = [array.name for name in buffers for array in spec.storages[name].arrays(name) if array.follows_elements]
    masters = [array.name for array in spec.storages["param"].arrays("param") if array.name != "param"]
    return (*masters, *states)


def traffic_of(spec: KernelSpec, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arrays on the host that are copied in before a tile pass, and the arrays copied out after it."""
    # Written arrays are copied in too: tensors without a gradient keep their values, all tensors in a skipped step.
    moved = host_arrays(spec)
    traffic = pass_traffic(spec, index)
    written = {array.name for array in traffic.writes}
    touched = written | {array.name for array in traffic.reads}
    return tuple(name for name in moved if name in touched), tuple(name for name in moved if name in written)


_ROW, _TOGETHER = 1024, 2**25  # elements per row, and the most elements of a concatenated batch


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of the bits of all elements, concatenated, by rows and by columns: int64 on their device."""
    # They detect a change of an element, and an exchange of two.
    sums: list[torch.Tensor] = []
    for flat in _batches(map(_bits, tensors)):
        whole = flat.numel() // _ROW * _ROW
        rows, rest = flat[:whole].view(-1, _ROW), flat[whole:]
        sums += [rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(INTEGERS[tensor.element_size()]).reshape(-1)


def _batches(flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Consecutive tensors of the same dtype, concatenated up to the size of a batch; larger tensors unchanged."""
    kept: list[torch.Tensor] = []
    elements = 0
    for flat in flats:
        if kept and (elements + flat.numel() > _TOGETHER or kept[0].dtype != flat.dtype):
            yield torch.cat(kept)
            kept, elements = [], 0
        if flat.numel() > _TOGETHER:
            yield flat
        else:
            kept.append(flat)
            elements += flat.numel()
    if kept:
        yield torch.cat(kept)


_BEHIND = 4  # chunks by which the copies of gradients may lag behind backward


@dataclass
class Mirror:
    """A parameter and its gradient on the host."""

    param: torch.Tensor
    part: torch.Tensor  # the parameter's local part, on the device
    host: torch.Tensor  # the copy that kernels of the CPU update; without memory if the device updates
    gradient: torch.Tensor  # memory for the gradient, in the same memory order
    present: bool = False  # whether this step has a gradient
    sent: torch.Tensor | None = None  # the gradient on the device; None if it is on the host only
    arrival: int = -1  # index of the copy of the step that contains it
    same_stream: bool = False  # whether gradients are freed in the stream that computed them

    def fits(self, part: torch.Tensor) -> bool:
        """Whether the local part is the same tensor, with the same shape, dtype and dtype of gradients."""
        alike = part.shape == self.host.shape and part.dtype is self.host.dtype
        return part is self.part and alike and grad_dtype(self.param) is self.gradient.dtype

    def accepts(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient can be copied; otherwise the tables raise its error."""
        alike = gradient.shape == self.host.shape and gradient.dtype is self.gradient.dtype
        return alike and gradient.layout is torch.strided and gradient.device == self.part.device

    def in_order(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, or a copy in the host's memory order."""
        if is_dense(gradient) and same_walk(gradient, self.gradient):
            return gradient
        strides = self.gradient.stride()
        ordered = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return ordered.copy_(gradient)


class Mirrors(dict[torch.Tensor, Mirror]):
    """The mirrors of an optimizer's parameters."""

    def __init__(self, memory: HostMemory, has_parameters: bool = True) -> None:
        super().__init__()
        self.memory = memory
        self._has_parameters = has_parameters

    def outdated(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The mirrored parameters that are not in `params`, or no longer fit their mirrors."""
        current = set(params)
        return [param for param, own in self.items() if param not in current or not own.fits(local_part(param))]

    @torch.no_grad()
    def set_params(self, params: Sequence[torch.Tensor]) -> bool:
        """Keep mirrors of exactly these parameters; new mirrors are uninitialized. Returns whether any is new."""
        for param in self.outdated(params):
            del self[param]
        missing = [param for param in params if param not in self]
        own = list(map(local_part, missing))
        dtypes = [grad_dtype(param) for param in missing]
        copied = own if self._has_parameters else []
        made = self.memory.like([*copied, *own], [*(part.dtype for part in copied), *dtypes])
        hosts = made[: len(copied)] or [part.detach().to("meta") for part in own]
        for param, part, host, gradient in zip(missing, own, hosts, made[len(copied) :]):
            if gradient.dtype != host.dtype:
                host.grad_dtype = gradient.dtype
            self[param] = Mirror(param, part, host, gradient)
        return bool(missing)


class HostCopies:
    """Copies of gradients to the host, in order, in one stream."""

    def __init__(self, lane: SideStream, compute: SideStream, step_bytes: int) -> None:
        self._lane, self._compute, self._step = lane, compute, step_bytes
        self._marks: list[Event] = []
        self._open = 0
        self._held = Held(lane)

    def start(self) -> None:
        """Make the copies of a step wait for the computation so far."""
        self._lane.follow(self._compute.mark())

    def reset(self) -> None:
        """Reset the copies after a step."""
        self._marks, self._open = [], 0
        if self._held.pending:
            self._lane.join()
            self._held.release()

    def send(self, mirror: Mirror, gradient: torch.Tensor) -> None:
        """Start the copy of a gradient to the host, or add it to a gradient there; keeps it alive until then."""
        ordered = mirror.in_order(gradient)
        if mirror.present or ordered is not gradient:
            self._lane.follow(self._compute.mark())
        if mirror.present:
            with self._lane.working():
                # The sum is computed on the device, with the bits of backward's sum.
                total = mirror.gradient.to(ordered.device, non_blocking=True).add_(ordered)
                mirror.gradient.copy_(total, non_blocking=True)
        else:
            self._lane.copy([(mirror.gradient, ordered)])
        mirror.present, mirror.arrival = True, len(self._marks)
        self._open += ordered.nbytes
        if mirror.same_stream:
            # The gradient belongs to the current stream; another stream may be current when it is freed. Computation
            # waits only for copies that are some chunks behind.
            stream = self._lane.current()
            self._held.hold(ordered, self._lane.next_mark(), () if stream is None else (stream,), ordered.nbytes)
            self._held.release(_BEHIND * self._step)
        else:
            self._lane.keep(ordered)
        if self._open >= self._step:
            self.close()

    def close(self) -> None:
        """Record an event after the copies so far, for `wait`."""
        self._marks.append(self._lane.mark())
        self._open = 0

    def order(self, lane: SideStream) -> None:
        """Make a stream wait for the copies so far."""
        lane.follow(self._lane.mark())

    def wait(self, mirrors: Sequence[Mirror]) -> None:
        """Make the host wait for these gradients."""
        last = max((mirror.arrival for mirror in mirrors if mirror.present), default=-1)
        mark = self._marks[last] if last >= 0 else None
        if mark is not None:
            mark.synchronize()


class HostGradients(Row):
    """Copies each gradient to the host when backward has completed it, without a wait; every gradient is a bucket."""

    # For a DTensor the local part is copied after the reduction: FSDP2 runs hooks after it, in the reduction's stream.
    # A gradient with other placements than its parameter (a partial sum) stays for the step, which all ranks take.

    choice, refused_as = "offload of gradients", OffloadError
    taken_by = (
        "offload(gradients=True) has moved it to the host during backward: set max_grad_norm on the optimizer, "
        "which clips inside the step"
    )

    def __init__(self, mirrors: Mirrors, copies: HostCopies, compute: SideStream) -> None:
        self._mirrors, self._copies = mirrors, copies
        self.timeline = Timeline(self, compute)
        self.timeline.announce()

    def return_gradients(self, params: Iterable[torch.Tensor]) -> None:
        """Return gradients on the host to parameters that are not in `params`, or no longer fit."""
        for param, gradient in self.arrived(self._mirrors.outdated(params)):
            part = local_part(param)
            own = distribute(gradient.to(part.device, grad_dtype(param), copy=True), param)
            param.grad = own if param.grad is None else param.grad + own

    def set_params(self, params: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of exactly these parameters from now on; all must have mirrors."""
        self.timeline.count([param] for param in params)
        for param in params:
            # HSDP computes a gradient in one stream and completes it in another.
            self._mirrors[param].same_stream = getattr(getattr(param, "device_mesh", None), "ndim", 1) == 1

    def ready(self, bucket: int) -> None:
        """Start to move a gradient to the host."""
        self.take_gradient(self.timeline.params[bucket])

    @torch.no_grad()
    def take_gradient(self, param: torch.Tensor) -> None:
        """Start to move a gradient to the host, and add it to a gradient there."""
        mirror = self._mirrors.get(param)
        gradient = None if mirror is None else _part(param)
        if mirror is None or gradient is None or not mirror.accepts(gradient):
            return  # the step raises its error
        if not mirror.present:
            self._copies.start()
        self._copies.send(mirror, gradient)
        self.timeline.take(param)
        param.grad = None

    def step_gradient(self, mirror: Mirror, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient on the host that a step reads; a gradient still on the parameter is added."""
        if gradient is not None and not mirror.accepts(gradient):
            return gradient
        self.take_gradient(mirror.param)
        return mirror.gradient if mirror.present else None

    def arrived(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with their gradients on the host; the host waits for them."""
        mirrors = [self._mirrors[param] for param in params if param in self._mirrors and self._mirrors[param].present]
        if mirrors:
            self._copies.close()
            self._copies.wait(mirrors)
        return [(mirror.param, mirror.gradient) for mirror in mirrors]

    def as_parameters(self) -> list[torch.Tensor]:
        """Tensors whose `grad`s are the gradients on the host; the host waits for them."""
        leaves = []
        for _, gradient in self.arrived(list(self._mirrors)):
            leaves.append(gradient.detach())
            leaves[-1].grad = gradient
        return leaves


def _part(param: Any) -> torch.Tensor | None:
    """The local part of a parameter's gradient; None if its placements differ from the parameter's."""
    gradient = param.grad
    if gradient is None or is_distributed(gradient) is not is_distributed(param):
        return None
    if is_distributed(param) and (gradient.device_mesh != param.device_mesh or gradient.placements != param.placements):
        return None
    return local_part(gradient)  # type: ignore[no-any-return]


class OffloadedState(StateMemory):
    """The memory of an offloaded optimizer, with its public methods; used directly for parameters on the CPU."""

    on_device = False
    no_copy = "an offloaded optimizer cannot be copied or pickled: save its state_dict()"
    where = ""  # where updates run, for reports
    reason = ""  # why updates run there
    _owner: Callable[[], Optimizer | None]
    device: torch.device
    kept: HostGradients | None = None  # takes gradients in backward, if requested
    host_bytes = 0  # bytes of state, and of copies of parameters and gradients
    device_bytes = 0  # bytes of buffers, which the first step allocates

    def attach_to(self, optimizer: Optimizer, where: str, reason: str) -> None:
        """Become the memory of a complete optimizer."""
        self._owner, self.where, self.reason = weakref.ref(optimizer), where, reason

    def record_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Note whether the step, which consumes gradients, has any."""
        self.had_gradients = any(self.timeline.taken) or any(param.grad is not None for param in params)

    def present_gradients(self, shares: Sequence[Share]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As in the base class, with the gradients on the host."""
        kept = () if self.kept is None else self.kept.arrived([share.param for share in shares])
        return [*super().present_gradients(shares), *kept]

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a scaler's function with the gradients on the host, and with gradients still on parameters."""
        if self.kept is None:
            return unscale(optimizer, *args, **kwargs)
        params = [*self.kept.as_parameters(), *(param for param in params_of(optimizer) if param.grad is not None)]
        on_host = [param for param in params if is_host(param.device)]
        elsewhere = [param for param in params if not is_host(param.device)]
        # torch would read its copies on the host before they have arrived.
        arrived = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args] if on_host else []
        flags = unscale(_grouped(on_host), *arrived, **kwargs) if on_host else {}
        if elsewhere or not on_host:
            flags = {**flags, **unscale(_grouped(elsewhere), *args, **kwargs)}
        return flags

    def offload_report(self) -> OffloadReport:
        """Where state and updates are, why, and the bytes that an update moves for either place.

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
        host_bytes = plan.state if self.on_device else self.host_bytes
        return OffloadReport(self.where, self.reason, plan, host_bytes, self.device_bytes)


class StateOnHost(OffloadedState):
    """State in host memory of parameters on another device, with copies of their gradients."""

    def __init__(
        self, device: torch.device, chunk_bytes: int, keeps_gradients: bool, memory: HostMemory, mirrors: Mirrors
    ) -> None:
        self.device, self.chunk_bytes, self.memory, self.mirrors = device, chunk_bytes, memory, mirrors
        self.inward, self.outward, self.compute = SideStream(device), SideStream(device), SideStream(device, own=False)
        self.copies = HostCopies(self.outward, self.compute, chunk_bytes)
        self.kept = HostGradients(mirrors, self.copies, self.compute) if keeps_gradients else None
        self.timeline = None if self.kept is None else self.kept.timeline

    def set_params(self, params: Sequence[torch.Tensor]) -> bool:
        """Keep copies of exactly these parameters and of their gradients; returns whether any is new."""
        if self.kept is not None:
            self.kept.return_gradients(params)
        has_new = self.mirrors.set_params(params)
        if self.kept is not None:
            self.kept.set_params(params)
        return has_new

    def on_build(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check parameters, and wait for copies of earlier segments."""
        for label, param in params:
            self.check(label, param)
        self.wait()

    def require_fitting(self) -> None:
        """Raise `Stale` if parameters no longer fit their mirrors."""
        if self.mirrors.outdated(self.mirrors):
            raise Stale("parameters have changed shape or dtype")

    def make(self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Buffers in one allocation of host memory."""
        return self.memory.like(params, dtypes)

    def check(self, label: str, param: torch.Tensor) -> None:
        """Raise for a parameter on another device."""
        check_device(label, param, self.device)

    def drop_gradients(self) -> None:
        for mirror in self.mirrors.values():
            mirror.present, mirror.sent = False, None
        self.copies.reset()
        if self.kept is not None:
            self.timeline.forget()

    def wait(self) -> None:
        """Wait until the copies of the steps so far are done: the host can then read and write the state's memory.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(4))
            >>> optimizer = tilestep.offload(tilestep.SGD([weight], lr=0.5, momentum=0.9))
            >>> weight.grad = torch.ones(4)
            >>> optimizer.step()
            >>> momentum = optimizer.state[weight]["momentum_buffer"]
            >>> optimizer.step()
            >>> optimizer.wait()
            >>> momentum[0]
            tensor(1.9000)
        """
        self.inward.synchronize()
        self.outward.synchronize()

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        """Host memory of state, and of copies of parameters and gradients."""
        return self.memory.taken + self.mirrors.memory.taken


class ChunkedPasses:
    """Runs the tile passes of a segment whose state or update is on the host, chunk by chunk."""

    def __init__(self, passes: Passes, chunk_bytes: int) -> None:
        # The segment refers to this: a reference cycle would keep the state until a garbage collection.
        self._passes_ref = weakref.ref(passes)
        self._in_slices = bool(passes.segment.spec.program.slices.views)
        self._room = 1 << 62 if self._in_slices else chunk_bytes  # bytes of a chunk
        self.chunks: Sequence[Any] = ()  # for `copy_in` and `copy_out` of derived classes
        self.tile_ranges: Sequence[TileRange | None] = ()  # of each chunk; None for all tiles

    @property
    def _passes(self) -> Passes:
        passes = self._passes_ref()
        assert passes is not None, "only their segment's step runs it"
        return passes

    def prepare(self) -> None:
        """Called before a pass."""

    def copy_in(self, index: int, position: int) -> None:
        """Called before tile pass `index` over a chunk."""

    def copy_out(self, index: int, position: int) -> None:
        """Called after tile pass `index` over a chunk."""

    def run(self, index: int) -> None:
        """Copy in, update and copy out chunk after chunk."""
        passes, program = self._passes, self._passes.segment.spec.program
        if program.tiles[index] is None and not program.slices_before(index):
            return
        self.prepare()
        for position, tile_range in enumerate(self.tile_ranges):
            self.copy_in(index, position)
            for call in passes.tile_calls(index, tile_range):
                call()
            self.copy_out(index, position)


def _grouped(params: list[torch.Tensor]) -> SimpleNamespace:
    """An object with the attributes of an optimizer that a scaler uses."""
    return SimpleNamespace(param_groups=[{"params": params}])


class OffloadedOptimizer(Attached, metaclass=AttachedType):
    """The type of an optimizer after `tilestep.offload`, for `isinstance`; it also stays an instance of its class.

    It adds `wait()` and `offload_report()`. Call `wait()` after a step before you read a tensor that you took out of
    `state` before the step: the host does not wait for the copies of a step.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.zeros(1000))
        >>> optimizer = tilestep.offload(tilestep.AdamW([weight]))
        >>> isinstance(optimizer, tilestep.OffloadedOptimizer), isinstance(optimizer, tilestep.AdamW)
        (True, True)
    """

    attached_as = ("offload", "offload in place")
    wait: Callable[[], None]
    offload_report: Callable[[], OffloadReport]
