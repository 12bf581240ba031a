"""Parameters and gradients on the host, as copies of those on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..compat import version_of
from ..engine import Stale, grad_dtype, is_dense
from ..engine.layout import same_walk
from ..side_stream import Event, SideStream
from .memory import HostMemory
from .placing import part_of

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
        """A number that grows whenever somebody writes to a parameter in place."""
        return sum(
            version_of(each.param) + (0 if each.part is each.param else version_of(each.part)) for each in self.values()
        )


class Arrivals:
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
