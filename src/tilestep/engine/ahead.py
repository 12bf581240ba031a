"""Building the kernels of a first step together, before the first of them is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..codegen.launch_triton import Launch, build_threads, build_together
from .capturing import is_capturing
from .control import StepInputs

if TYPE_CHECKING:
    from .engine import DeviceEngine


def are_built_ahead(engines: Sequence[DeviceEngine], *, unscales: bool) -> bool:
    """Whether `build_ahead` was called for steps whose gradients carry a loss scale, or for those that do not."""
    return all(unscales in segment.built_ahead for engine in engines for segment in engine.segments)


def build_ahead(engines: Sequence[DeviceEngine], decision: StepInputs, *, norm: bool, alone: bool) -> None:
    """Build what the first step of new engines launches, several kernels at a time if that is wanted and Triton can.

    Without it, and for kernels that are not known here, each is built when it is launched.
    """
    unscales = decision.grad_scale is not None
    together = build_threads() > 1 and not is_capturing()
    for engine in engines:
        new = [segment for segment in engine.segments if unscales not in segment.built_ahead]
        launches: list[Launch] = []
        for segment in new:
            segment.built_ahead |= {unscales}
            # What a mover does with a segment's tiles is its own affair.
            launches += segment.launches(unscales) if together and segment.mover is None else []
        if launches:
            deciding = _deciding(engine, decision, norm) if alone and len(engines) == 1 else []
            build_together([*deciding, *launches], engine.device)


def _deciding(engine: DeviceEngine, decision: StepInputs, norm: bool) -> list[Launch]:
    """The launches of the norm and of the decision, if one engine decides for itself."""
    from .cuda import decision_launch

    launches: list[Launch] = []
    if norm:
        if engine.norm_source is not engine or any(entry.norm_share != 1 for entry in engine.entries):
            return []
        table = engine.own_norm_table()
        tiles, sums = table.tiles_launch(engine.grads), table.tiles_put()
        if tiles is None or sums is None:
            return []
        launches.append(tiles)
        decision = replace(decision, partials=sums)
    if not decision.is_trivial:
        decision = replace(decision, overflow=engine.overflow if decision.check_overflow else None)
        launches.append(decision_launch(engine.control, decision, engine.decider.kernels))
    return launches
