"""Copies on the host of parameters and gradients on a device: what changed there, what backward has brought."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..accumulation import announce_taker
from ..combinations import follow_wrappers, refusal
from ..compat import is_last_gradient_hook, ready, version_of
from ..errors import OffloadError
from ..placement import is_distributed
from ..placement.local import local_part
from ..runtime import Stale, grad_dtype, is_dense
from ..runtime.segment import same_walk
from ..side_stream import Event, SideStream
from .copies import HostMemory, part_of


class TakesGradients(Protocol):
    """What gradients go to."""

    def gradient_came(self, param: torch.Tensor) -> None:
        """Take a parameter's gradient away."""


class GradientHooks:
    """Hooks on parameters, as long as whoever takes their gradients lives."""

    def __init__(self, taker: TakesGradients) -> None:
        self._taker = weakref.ref(taker)
        self._handles: dict[torch.Tensor, Any] = {}

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Have hooks on these parameters and no others."""
        wanted = set(params)
        for param in [param for param in self._handles if param not in wanted]:
            self._handles.pop(param).remove()
        for param in params:
            if param not in self._handles and param.requires_grad and param.is_leaf:
                self._register(param)

    def _register(self, param: torch.Tensor) -> None:
        self._handles[param] = param.register_post_accumulate_grad_hook(self._hook())

    def is_last(self, param: torch.Tensor) -> bool:
        """Whether a parameter's hook is called after all others; one that is not is the last from the next time on."""
        handle = self._handles.get(param)
        if handle is None or is_last_gradient_hook(param, handle):
            return True
        handle.remove()
        self._register(param)
        return False

    def _hook(self) -> Any:
        taker = self._taker

        def hook(param: torch.Tensor) -> None:
            living = taker()
            if living is not None:
                living.gradient_came(param)

        return hook


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW, _TOGETHER = 1024, 2**25
"""Elements of a row, and elements that are summed together; these are copied to lie side by side."""


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of the bits by rows and by columns of all elements side by side, as int64 on their device.

    Every change of one element changes them, and so does every exchange of two.

    Args:
        tensors: on one device.

    Example:
        >>> values = torch.tensor([1.0, -1.0, 2.0])
        >>> before = checksums([values])
        >>> _ = values.data.neg_()
        >>> torch.equal(checksums([values]), before)
        False
    """
    sums: list[torch.Tensor] = []
    for flat in _batches(map(_bits, tensors)):
        whole = flat.numel() // _ROW * _ROW
        rows, rest = flat[:whole].view(-1, _ROW), flat[whole:]
        sums += [rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(_BITS[tensor.element_size()]).reshape(-1)


def _batches(flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Neighbours of one type side by side, until there are enough; those that are enough alone as they are."""
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


_BEHIND = 4
"""How many chunks the copies of gradients may be behind the computation that makes them."""


@dataclass
class Mirror:
    """A parameter and its gradient on the host."""

    param: torch.Tensor  # the parameter
    part: torch.Tensor  # what of it lies on this rank, on the device
    host: torch.Tensor  # the same, on the host: what the CPU's kernels update; without memory where the device updates
    gradient: torch.Tensor  # memory for its gradient, in the same order
    present: bool = False  # whether it has a gradient in this step, which is on its way or has arrived
    sent: torch.Tensor | None = None  # that gradient on the device; None where it is kept on the host alone
    arrival: int = -1  # the place of its arrival among those of the step
    is_taken: bool = False  # whether its gradients are let go on the device, in the stream that has made them

    def fits(self, part: torch.Tensor) -> bool:
        """Whether this is still the part, of the same shape and type, with gradients of the same type."""
        alike = part.shape == self.host.shape and part.dtype is self.host.dtype
        return part is self.part and alike and grad_dtype(self.param) is self.gradient.dtype

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient can be copied here; one that cannot is an error that kernels' tables report."""
        alike = gradient.shape == self.host.shape and gradient.dtype is self.gradient.dtype
        return alike and gradient.layout is torch.strided and gradient.device == self.part.device

    def in_order(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, or a copy that lies in memory as the host's does."""
        if is_dense(gradient) and same_walk(gradient, self.gradient):
            return gradient
        strides = self.gradient.stride()
        ordered = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return ordered.copy_(gradient)


class Mirrors(dict[torch.Tensor, Mirror]):
    """The mirrors of an optimizer's parameters."""

    def __init__(self, memory: HostMemory, has_parameters: bool = True) -> None:
        super().__init__()
        self._memory = memory
        self._has_parameters = has_parameters

    @torch.no_grad()
    def follow(self, params: Sequence[torch.Tensor]) -> bool:
        """Have mirrors of these parameters and no others; new ones hold nothing yet."""
        parts = {param: part_of(param) for param in params}
        for param in [param for param in self if param not in parts or not self[param].fits(parts[param])]:
            del self[param]
        missing = [param for param in params if param not in self]
        own = [parts[param] for param in missing]
        dtypes = [grad_dtype(param) for param in missing]
        copied = own if self._has_parameters else []
        made = self._memory.like([*copied, *own], [*(part.dtype for part in copied), *dtypes])
        hosts = made[: len(copied)] or [part.detach().to("meta") for part in own]
        for param, part, host, gradient in zip(missing, own, hosts, made[len(copied) :]):
            if gradient.dtype != host.dtype:
                host.grad_dtype = gradient.dtype
            self[param] = Mirror(param, part, host, gradient)
        return bool(missing)

    def drop(self) -> None:
        """Forget every gradient."""
        for mirror in self.values():
            mirror.present, mirror.sent = False, None

    def versions(self) -> int:
        """A number that grows with every write to a parameter in place."""
        return sum(
            version_of(each.param) + (0 if each.part is each.param else version_of(each.part)) for each in self.values()
        )


class HostCopies:
    """Gradients on their way to the host, in one lane, in order."""

    def __init__(self, lane: SideStream, compute: SideStream, step_bytes: int) -> None:
        self._lane, self._compute, self._step = lane, compute, step_bytes
        self._marks: list[Event] = []
        self._open = 0
        self._held: deque[tuple[torch.Tensor, Event, SideStream]] = deque()
        self._held_bytes = 0

    def begin(self) -> None:
        """Before the copies of a step: they follow what has been computed so far."""
        self._lane.follow(self._compute.mark())

    def forget(self) -> None:
        """After a step: there is nothing to wait for."""
        self._marks, self._open = [], 0
        if self._held:
            self._compute.follow(self._held[-1][1])
            for home, mark in {home: mark for _, mark, home in self._held}.items():
                home.follow(mark)
            self._held.clear()
            self._held_bytes = 0

    def send(self, mirror: Mirror, gradient: torch.Tensor) -> None:
        """Copy a gradient to the host, without waiting; its memory is needed until then."""
        ordered = mirror.in_order(gradient)
        if ordered is not gradient:
            self._lane.follow(self._compute.mark())
        self._lane.copy([(mirror.gradient, ordered)])
        self._sent(mirror, ordered)

    def add(self, mirror: Mirror, gradient: torch.Tensor) -> None:
        """Add a gradient to the one that is on the host, without waiting."""
        ordered = mirror.in_order(gradient)
        self._lane.follow(self._compute.mark())
        with self._lane.working():
            # On the device, where backward adds them up as well: the sum is the same to the bit.
            total = mirror.gradient.to(ordered.device, non_blocking=True).add_(ordered)
            mirror.gradient.copy_(total, non_blocking=True)
        self._sent(mirror, ordered)

    def _sent(self, mirror: Mirror, ordered: torch.Tensor) -> None:
        mirror.present, mirror.arrival = True, len(self._marks)
        self._open += ordered.nbytes
        if mirror.is_taken:
            self._hold(ordered)
        else:
            self._lane.keep(ordered)
        if self._open >= self._step:
            self.close()

    def _hold(self, gradient: torch.Tensor) -> None:
        """Keep a gradient until the stream that it comes from has waited for its copy, and can have its memory again.

        That is the stream that is current now; when later gradients push this one out another may be. Left to the
        allocator, memory would come back once the host sees that the copy has run: a host far ahead of the device would
        find none of it. Computation waits only for copies that are some chunks behind.
        """
        self._held.append((gradient, self._lane.mark(), self._compute.here()))
        self._held_bytes += gradient.nbytes
        while self._held_bytes > _BEHIND * self._step and len(self._held) > 1:
            oldest, mark, home = self._held.popleft()
            self._held_bytes -= oldest.nbytes
            home.follow(mark)

    def close(self) -> None:
        """Let all that was sent so far be waited for."""
        self._marks.append(self._lane.mark())
        self._open = 0

    def order(self, lane: SideStream) -> None:
        """Let a lane wait for all that was sent so far."""
        lane.follow(self._lane.mark())

    def wait(self, mirrors: Sequence[Mirror]) -> None:
        """Have the host wait until these gradients are there."""
        last = max((mirror.arrival for mirror in mirrors if mirror.present), default=-1)
        mark = self._marks[last] if last >= 0 else None
        if mark is not None:
            mark.synchronize()


def check_unchanged(mirrors: Sequence[Mirror]) -> None:
    """Raise `Stale` if parameters have another shape, type or memory than their mirrors were made for."""
    if not all(mirror.fits(part_of(mirror.param)) for mirror in mirrors):
        raise Stale("parameters have changed their shape or dtype")


class HostGradients:
    """Takes gradients from parameters while backward runs, without waiting for anything.

    Of a DTensor it is this rank's part, once whoever shards it has reduced it: FSDP2 runs hooks after that, in the
    stream of the reduction. A gradient that is distributed otherwise than its parameter (a partial sum) stays for the
    step, which all ranks take together.
    """

    def __init__(self, mirrors: Mirrors, copies: HostCopies) -> None:
        self._mirrors, self._copies = mirrors, copies
        self._hooks = GradientHooks(self)
        follow_wrappers(self)
        announce_taker(self)

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Take the gradients of these parameters and of no others; they have mirrors."""
        self._hooks.follow(params)
        for param in params:
            # HSDP computes a gradient in one stream and completes it in another.
            self._mirrors[param].is_taken = getattr(getattr(param, "device_mesh", None), "ndim", 1) == 1

    def gradient_came(self, param: torch.Tensor) -> None:
        """Take a gradient from backward; one that a hook of the user's is still to change is left for the step."""
        if self._hooks.is_last(param):
            self.take_gradient(param)

    @torch.no_grad()
    def take_gradient(self, param: torch.Tensor) -> None:
        """Move a parameter's gradient to the host, without waiting, and add it to the one there."""
        mirror = self._mirrors.get(param)
        gradient = None if mirror is None else _part(param)
        if mirror is None or gradient is None or not mirror.takes(gradient):
            return  # the step says what is wrong with it
        if mirror.present:
            self._copies.add(mirror, gradient)
        else:
            self._copies.begin()
            self._copies.send(mirror, gradient)
        param.grad = None

    def holds(self, param: Any) -> bool:
        """Whether it takes a parameter's gradients."""
        return param in self._mirrors

    def wrapped(self, wrapper: torch.nn.Module, kind: str) -> None:
        """Raise, in the constructor of a wrapper that reduces gradients only after they have gone to the host."""
        raise OffloadError(f"what the model is being wrapped in {refusal('offload of gradients', [kind])}")

    taken_by = (
        "offload(gradients=True) has moved them to the host while backward ran: set max_grad_norm on the optimizer, "
        "which clips inside the step"
    )

    @property
    def has_taken_some(self) -> bool:
        """Whether there are gradients on the host."""
        return self.is_there

    def has_taken(self, param: Any) -> bool:
        """Whether a parameter's gradient is on the host, for the coming step."""
        mirror = self._mirrors.get(param)
        return mirror is not None and mirror.present and param.grad is None

    def taken(self, mirror: Mirror, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What a step's kernels read for a parameter: the gradient on the host, with one that is still beside it."""
        if gradient is not None and not mirror.takes(gradient):
            return gradient
        self.take_gradient(mirror.param)
        return mirror.gradient if mirror.present else None

    @property
    def is_there(self) -> bool:
        """Whether there are gradients on the host."""
        return any(mirror.present for mirror in self._mirrors.values())

    def arrived(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with their gradients on the host; the host waits for these."""
        mirrors = [self._mirrors[param] for param in params if param in self._mirrors and self._mirrors[param].present]
        if mirrors:
            self._copies.close()
            self._copies.wait(mirrors)
        return [(mirror.param, mirror.gradient) for mirror in mirrors]

    @contextmanager
    def as_parameters(self) -> Iterator[list[torch.Tensor]]:
        """A block with tensors on the host whose `grad` is what has arrived there; the host waits for that."""
        leaves = []
        for _, gradient in self.arrived(list(self._mirrors)):
            leaves.append(gradient.detach())
            leaves[-1].grad = gradient
        try:
            yield leaves
        finally:
            for leaf in leaves:
                leaf.grad = None


def _part(param: Any) -> torch.Tensor | None:
    """What of a parameter's gradient lies on this rank; None for one that is distributed otherwise than it."""
    gradient = param.grad
    if gradient is None or is_distributed(gradient) is not is_distributed(param):
        return None
    if not is_distributed(gradient):
        return gradient  # type: ignore[no-any-return]
    if gradient.device_mesh != param.device_mesh or gradient.placements != param.placements:
        return None
    return ready(local_part(gradient))  # type: ignore[no-any-return]
