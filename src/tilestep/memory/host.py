"""State and updates on the host, by chunks: gradients are copied to it, updated parameters are copied back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices import copy_to
from ..errors import OffloadError
from ..kernels.spec import INVERSE_SCALE, SKIP, UNSCALE, KernelSpec, pass_traffic
from ..native.host_memory import HostMemory
from ..native.table import Writes, rows_of
from ..optimizer.memory import Gradients
from ..optimizer.parameters import check_not_shared, check_parameter
from ..placement.local import local_part
from ..runtime import DeviceEngine, Entry, GradNorm, is_dense
from ..runtime.passes import Passes
from ..runtime.segment import TileRange
from .copies import cut_tiles, memory_range
from .offloaded import ChunkedPasses, Mirror, Mirrors, StateOnHost, checksums


class HostState(StateOnHost):
    """State on the host, updated there; before each chunk's update the host waits for its gradients."""

    replaces_gradients = True

    def __init__(self, device: torch.device, chunk_bytes: int, keeps_gradients: bool = False) -> None:
        # The state is not copied: it is in ordinary memory.
        mirrors = Mirrors(HostMemory(device, "copies of parameters and gradients"))
        super().__init__(device, chunk_bytes, keeps_gradients, HostMemory(torch.device("cpu")), mirrors)
        self._writes: Writes | None = None
        self._sums: torch.Tensor | None = None
        self._entries: list[Entry] = []
        self._norm: GradNorm | None = None  # norm of gradients on the device

    def on_build(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Mirror these parameters."""
        super().on_build(params)
        parts = [(label, local_part(param)) for label, param in params]
        for label, part in parts:
            check_parameter(part, label)
        check_not_shared(parts)
        has_new, writes = self.set_params([param for _, param in params]), self._writes
        if has_new or (writes is not None and len(writes.params) != len(self.mirrors)):
            self._writes, self._sums = None, None
        self.sync_masters()
        self._entries, self._norm = [], None

    def part(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        mirror = self.mirrors.get(param)
        return mirror.host if mirror is not None and mirror.fits(part) else part

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """Set the order of gradients, which arrive in the memory order of parameters."""
        entry.ordered = True
        self._entries.append(entry)

    def on_passes(self, passes: Passes) -> None:
        """Make passes wait for gradients, and copy parameters to the device."""
        if not passes.has_kernels:
            raise OffloadError("updates on the host need a C++ compiler: install one, or use where='gpu'")
        passes.segment.streamer = HostUpdate(self, passes)

    def gradients(self, params: Sequence[Sequence[torch.Tensor]], gradients: Gradients) -> Gradients:
        """Start copies of gradients to the host; returns the tensors on the host."""
        self.require_fitting()
        self.inward.follow(self.compute.mark())
        self.copies.start()
        sent = [[self._sent(self.mirrors[param], own) for param, own in zip(*pair)] for pair in zip(params, gradients)]
        self.copies.close()
        return sent

    def _sent(self, mirror: Mirror, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self.kept is not None:
            return self.kept.step_gradient(mirror, gradient)
        if gradient is not None and not mirror.accepts(gradient):
            return gradient
        mirror.sent, mirror.present = gradient, False
        if gradient is None:
            return None
        self.copies.send(mirror, gradient)
        return mirror.gradient

    def power_sums(self, norms: Sequence[GradNorm]) -> list[torch.Tensor]:
        """The sum of squares, computed on the device while gradients are copied, or on the host if kept there."""
        if self.kept is not None:
            self.copies.wait(list(self.mirrors.values()))
            return [norm.sum_squares() for norm in norms]
        if self._norm is None:
            self._addresses = torch.zeros(len(self._entries), dtype=torch.int64, device=self.device)
            self._norm = GradNorm(self.device, self._entries, [self._addresses])
        sent = [self.mirrors[entry.share.holder].sent for entry in self._entries]
        dense = [grad if grad is None or is_dense(grad) else grad.contiguous() for grad in sent]
        copy_to(self._addresses, rows_of(dense))
        return [self._norm.sum_squares()]

    def sync_masters(self) -> None:
        """Copy parameters that other code has written to, found by versions, and by checksums for `param.data`."""
        # The comparison of checksums waits for backward.
        is_unwritten = self._writes is not None and self._writes.are_none()
        if is_unwritten and (self._sums is None or torch.equal(self._sums, self._checksums())):
            return
        for mirror in self.mirrors.values():
            mirror.host.copy_(mirror.part.detach())

    def record_parameters(self) -> None:
        """Note that parameters and copies agree; launches checksums without a wait."""
        if self._writes is None:
            self._writes = Writes(list(self.mirrors))
        self._writes.note()
        self._sums = self._checksums()

    def _checksums(self) -> torch.Tensor:
        return checksums([mirror.part for mirror in self.mirrors.values()])

    def finish(self, engine: DeviceEngine) -> None:
        """Make the device wait for its parameters, and unscale its gradients."""
        self.compute.follow(self.inward.mark())
        control = engine.control.numbers.tolist()
        if control[UNSCALE] and not control[SKIP]:
            for entry in engine.entries:
                gradient = self.mirrors[entry.share.holder].sent
                # An expanded gradient, whose elements share memory, is not written.
                if gradient is not None and not any(n > 1 and not s for n, s in zip(gradient.shape, gradient.stride())):
                    gradient.mul_(control[INVERSE_SCALE])
        self.drop_gradients()


class HostUpdate(ChunkedPasses):
    """Runs the tile passes of a segment on the host."""

    def __init__(self, state: HostState, passes: Passes) -> None:
        super().__init__(passes, state.chunk_bytes)
        self._state, segment = state, passes.segment
        self._mirrors = [state.mirrors[entry.share.holder] for entry in segment.entries]
        program = segment.spec.program
        self._writes = [
            any(array.name == "param" for array in pass_traffic(segment.spec, index).writes)
            for index in range(len(program.tiles))
        ]
        self.chunks = [TileRange(*bounds) for bounds in cut_tiles(passes, ("param",), self._room)]
        self.tile_ranges = [None] * len(self.chunks) if self._in_slices else self.chunks

    def settle(self) -> None:
        """Wait for gradients; the state is on the host."""
        self._state.copies.wait(self._mirrors)

    def copy_in(self, index: int, position: int) -> None:
        self._state.copies.wait([self._mirrors[place] for place in self.chunks[position].tensors])

    def copy_out(self, index: int, position: int) -> None:
        if not self._writes[index]:
            return
        tile_range, segment, pairs = self.chunks[position], self._passes.segment, []
        for place in tile_range.tensors:
            first, stop = memory_range(segment, tile_range.tiles, place)
            mirror = self._mirrors[place]
            if stop > first and mirror.present:
                target, source = mirror.part.detach(), mirror.host
                # The whole parameter if memory orders differ.
                if target.stride() == source.stride() and is_dense(target):
                    target, source = (
                        tensor.as_strided((stop - first,), (1,), tensor.storage_offset() + first)
                        for tensor in (target, source)
                    )
                pairs.append((target, source))
        self._state.inward.copy(pairs)
