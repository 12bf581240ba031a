"""Running the passes of several devices' segments in lockstep, so that what spans tensors meets between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..devices import is_host
from ..marks import HOST_UPDATE, UPDATE, marked
from .segment import Segment

if TYPE_CHECKING:
    from ..placements import SharedSums
    from .engine import DeviceEngine


def run_passes(engines: Sequence[DeviceEngine], shared: Sequence[SharedSums] = ()) -> None:
    """Run scalar pass k, what it reduces over all tensors, tile pass k and matrix pass k, for every k and segment."""
    run_marked(pass_calls(engines, shared), engines)


def run_marked(calls: Sequence[Callable[[], object]], engines: Sequence[DeviceEngine]) -> None:
    """Make the calls of `pass_calls` under the name that profilers show, and without autocast."""
    on_host = all(is_host(engine.device) for engine in engines)
    with marked(HOST_UPDATE if on_host else UPDATE), without_autocast({engine.device.type for engine in engines}):
        for call in calls:
            call()


def pass_calls(engines: Sequence[DeviceEngine], shared: Sequence[SharedSums]) -> list[Callable[[], object]]:
    """What `run_passes` calls, one after the other; it is the same at every step."""
    segments = [segment for engine in engines for segment in engine.segments]
    calls: list[Callable[[], object]] = []
    for index in range(max((len(segment.spec.program.scalars) for segment in segments), default=0)):
        running = [segment for segment in segments if index < len(segment.spec.program.scalars)]
        calls += [segment.scalar_call(index) for segment in running]
        if any(segment.spec.program.scalars[index].across for segment in running):
            calls.append(partial(_meet, running, index))
        calls += [partial(segment.run_tiles if segment.mover else segment.tile_pass, index) for segment in running]
        calls += [call for sums in shared for call in sums.calls(index)]
        calls += [partial(segment.library_pass, index) for segment in running if segment.matrices]
    return calls


def without_autocast(kinds: Iterable[str]) -> AbstractContextManager[object]:
    """A block whose products are those of the tensors given: an update may run while a model does, under autocast."""
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return _switched_off(enabled) if enabled else nullcontext()


@contextmanager
def _switched_off(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as blocks:
        for kind in kinds:
            blocks.enter_context(torch.autocast(kind, enabled=False))
        yield


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
