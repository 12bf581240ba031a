"""CUDA graphs of an optimizer's step: prepare a capture, step in a capture, push values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..backends.registry import passes_class
from ..compat import is_capturing
from ..errors import CaptureError
from ..linalg import MATRIX_OPERATIONS
from ..runtime import Stale
from ..runtime.capturing import PREPARE, require
from ..stats import Reports
from .build import graphs_of
from .parameters import LISTED_TWICE, Optimizer, params_of
from .plan import StepPlan

CHANGED = (
    "parameters have moved, or load_state_dict, add_param_group, park, a changed flag or replaced state required new "
    "tables"
)

KEEP = "between replays do not move parameters, and keep gradients with zero_grad(set_to_none=False)"

ON_CPU = "its parameters are on the CPU, which has no graphs; move the model to a GPU first"


def note_lost(lost: list[str], what: str, _: object) -> None:
    """Weak reference callback: memory that a graph reads was freed."""
    lost.append(what)


class CapturedGradRefs:
    """Gradients that existed before a capture by hand; the graph owns gradients created during the capture."""

    def __init__(self, gradients: Sequence[torch.Tensor | None], labels: Sequence[str]) -> None:
        self.lost: list[str] = []  # labels of gradients whose memory was freed while a graph reads it
        self._before = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]
        self._labels = list(labels)
        self._read: list[Any] = []

    def read(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Record that a graph reads these gradients."""
        for gradient, before, label in zip(gradients, self._before, self._labels):
            if gradient is not None and gradient.numel() and before is not None and before() is gradient:
                note = partial(note_lost, self.lost, f"the gradient of {label}")
                self._read.append(weakref.ref(gradient.untyped_storage(), note))


@dataclass(frozen=True)
class Graphs:
    """The CUDA graphs that contain an optimizer's step."""

    captured: int = 0  # number of captured steps
    checked: int = 0  # number of captured steps whose graphs check before each replay whether they are stale
    stale: str = ""
    retired: tuple[StepPlan, ...] = ()
    kept: CapturedGradRefs | None = None

    def without(self, plan: StepPlan | None) -> Graphs:
        """Return the state after this plan was replaced."""
        if plan is not None and any(engine.graph_tables.in_use for engine in plan.engines):
            return replace(self, stale=CHANGED, retired=(*self.retired, plan))
        return self


def require_current(graphs: Graphs) -> None:
    """Raise `CaptureError` if captured graphs must not be replayed."""
    stale = graphs.stale
    if not stale and graphs.kept is not None and graphs.kept.lost:
        stale = f"the memory of {graphs.kept.lost[0]} was freed; {KEEP}"
    if stale:
        raise CaptureError(f"the captured step is stale: {stale}. Capture it again, after optimizer.prepare_capture()")


def require_checked(graphs: Graphs, caller: str) -> None:
    """Raise `CaptureError` if a captured step may replay without a check."""
    if graphs.captured != graphs.checked:
        raise CaptureError(
            f"{caller} frees memory that a CUDA graph of your own writes to, and its replays do not check this; "
            "capture steps with tilestep.capture(optimizer), whose replays do"
        )


def require_no_waits(optimizer: Optimizer) -> None:
    """Raise if some steps synchronize with the host: each rank that steps with others would decide this by itself."""
    for index, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        for graph in graphs_of(optimizer, index):
            operations = (MATRIX_OPERATIONS.get(value.operation) for value in graph.values())
            waits = any(operation is not None and operation.waits for operation in operations)
            require(not waits, f"rule {rule.name} decomposes matrices in some steps, which ranks must take together")


def _require_capturable(plan: StepPlan) -> None:
    """Raise for parameters whose updates a graph cannot contain."""
    by_ranks = "several ranks decide its steps together; for DTensors run the steps outside graphs"
    require(plan.mesh_ranks is None, by_ranks)
    require(not plan.repeat_updates, f"{LISTED_TWICE}, and a graph supports one update of it")
    of_views = "it has complex parameters, or splits of several sizes, whose views a graph does not follow"
    require(not any(engine.local is not None and engine.local.views for engine in plan.engines), of_views)


def prepare_capture(optimizer: Optimizer, *, alone: bool = False) -> StepPlan:
    """Prepare a capture, without stepping; see `Optimizer.prepare_capture`."""
    require(not is_capturing(), "call prepare_capture() before the capture, not inside it")
    plan = optimizer.fitting_plan(ahead=True)
    devices = [str(engine.device) for engine in plan.engines]
    require(bool(devices), "no parameter of the optimizer trains")
    require(len(devices) == 1, f"its parameters are on {', '.join(devices)}; a graph supports one device")
    plan.engines[0].require_kernels(alone=alone)
    _require_capturable(plan)
    try:
        plan.refresh()
    except Stale:
        plan = optimizer.rebuild(ahead=True)
        plan.refresh()
    plan.release()
    plan.masters.catch_up()
    inputs = optimizer.control.expected(optimizer, plan.deciders)
    plan.engines[0].build(inputs)
    plan.deciders.controls[0].build(inputs)
    plan.deciders.kind = None
    optimizer.graphs = replace(optimizer.graphs, stale="", kept=None)
    return plan


def prepare_by_hand(optimizer: Optimizer) -> None:
    """Call `prepare_capture` for a graph that users capture and replay themselves, with `push`."""
    plan = prepare_capture(optimizer)
    kept = CapturedGradRefs(plan.gradients()[0], [entry.share.label for entry in plan.engines[0].entries])
    optimizer.graphs = replace(optimizer.graphs, kept=kept)


def step_in_capture(optimizer: Optimizer, reports: Reports | None) -> None:
    """Launch a step into the CUDA graph under capture; everything that the step needs must exist."""
    plan = optimizer.plan
    if plan is None or not plan.basis.fits(optimizer) or plan.basis.omits_trainable:
        devices = {param.device for param in params_of(optimizer)}
        require(any(passes_class(device).can_be_captured for device in devices), ON_CPU)
        raise CaptureError(f"the step cannot be captured: the optimizer's tables are not built yet; {PREPARE}")
    require(len(plan.engines) == 1, f"its parameters are on {len(plan.engines)} devices; a graph supports one")
    _require_capturable(plan)
    engine, gradients = plan.engines[0], plan.gradients()
    seen = engine.check_capture(gradients[0])
    changed = f"hyperparameters have changed since they were copied to the device; {PREPARE}"
    require(not plan.hypers[0].changes(), changed)
    require(plan.masters.writes.are_none(), f"parameters with masters were written to since the last step; {PREPARE}")
    with engine.into_graph(seen):
        optimizer.control.update_control(optimizer, plan.deciders)
        if reports is not None:
            reports.begin(plan.engines, captured=True)
        plan.hypers[0].copy_tensors()
        plan.update((0,), counts_versions=True)
        if reports is not None:
            reports.finish()
    plan.masters.record()
    if optimizer.graphs.kept is not None:
        optimizer.graphs.kept.read(gradients[0])
    optimizer.graphs = replace(optimizer.graphs, captured=optimizer.graphs.captured + 1)


def push(optimizer: Optimizer) -> None:
    """Copy changes from the host to the device; see `Optimizer.push`."""
    require(not is_capturing(), "call push() between replays; in a graph it would repeat the old values")
    require_current(optimizer.graphs)
    plan = optimizer.plan
    try:
        if plan is None or not plan.basis.fits(optimizer):
            raise Stale
        for engine, hypers in zip(plan.engines, plan.hypers):
            engine.follow_tensors()
            hypers.push(hypers.changes())
    except Stale:
        plan = optimizer.rebuild(ahead=True)
        require_current(optimizer.graphs)
    plan.init_states(optimizer, all_of_them=True)
    plan.masters.catch_up()
