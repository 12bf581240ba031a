"""Running the passes of several devices' segments in lockstep, so that what spans tensors meets between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..marks import HOST_UPDATE, UPDATE, marked
from .segment import Segment

if TYPE_CHECKING:
    from ..placements import SharedSums
    from .engine import DeviceEngine

__all__ = ["run_passes"]


def run_passes(engines: Sequence[DeviceEngine], shared: Sequence[SharedSums] = ()) -> None:
    """Run scalar pass k, what it reduces over all tensors, tile pass k and library pass k, for every k and segment.

    Args:
        engines: prepared and decided engines, one a device.
        shared: for each device with tensors that are sharded, what combines the reductions over one tensor.
    """
    on_host = all(engine.device.type == "cpu" for engine in engines)
    with marked(HOST_UPDATE if on_host else UPDATE), without_autocast({engine.device.type for engine in engines}):
        _run([segment for engine in engines for segment in engine.segments], shared)


def without_autocast(kinds: Iterable[str]) -> AbstractContextManager[object]:
    """A block whose products are those of the tensors given: an update may run while a model does, under autocast.

    Args:
        kinds: of devices, "cpu" or "cuda".
    """
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return _switched_off(enabled) if enabled else nullcontext()


@contextmanager
def _switched_off(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as blocks:
        for kind in kinds:
            blocks.enter_context(torch.autocast(kind, enabled=False))
        yield


def _run(segments: Sequence[Segment], shared: Sequence[SharedSums]) -> None:
    depth = max((len(segment.spec.program.scalars) for segment in segments), default=0)
    for index in range(depth):
        running = [segment for segment in segments if index < len(segment.spec.program.scalars)]
        for segment in running:
            segment.scalar_pass(index)
        if any(segment.spec.program.scalars[index].across for segment in running):
            _meet(running, index)
        for segment in running:
            segment.run_tiles(index)
        for sums in shared:
            sums.combine(index)
        for segment in running:
            segment.library_pass(index)


def _meet(segments: Sequence[Segment], index: int) -> None:
    """Combine what scalar pass `index` left per tensor, over all tensors of each rule, on every device."""
    by_rule: dict[str, list[Segment]] = {}
    for segment in segments:
        if segment.spec.program.scalars[index].across:
            by_rule.setdefault(segment.spec.program.graph.title, []).append(segment)
    for members in by_rule.values():
        for slot, value in members[0].spec.program.scalars[index].across:
            adds = value.operation == "across_sum"
            parts = [segment.across[:, slot].sum() if adds else segment.across[:, slot].amax() for segment in members]
            total = parts[0]
            for part in parts[1:]:
                moved = part.to(total.device, non_blocking=True)
                total = total + moved if adds else torch.maximum(total, moved)
            for segment in members:
                segment.totals[slot].copy_(total, non_blocking=True)
