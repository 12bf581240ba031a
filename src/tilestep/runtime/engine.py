"""The step of all tensors on a device: addresses, hyperparameters, norm, then the passes of every segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..compat import HOST_UPDATE, UPDATE, is_capturing, local_parts, marked
from ..devices import combined, is_host, moved
from ..errors import RuleError, StateError
from ..kernels.launch import Launch, build_threads, build_together
from ..kernels.spec import KernelSpec
from ..native.table import CHANGED, MOVED, SAME, Table, rows_of, same_list
from ..placement import LocalGradients
from .capturing import PREPARE, WARM_UP, GraphTables, nothing_skipped, require, require_no_branches
from .decision import Control, StepInputs
from .gradients import GRAD, Inspected, Stale, inspect
from .norms import GradNorm
from .overlaps import WrittenMemory
from .passes import Passes
from .segment import Entry, Segment

Calls = list[Sequence["partial[Any]"]]
"""The calls of a step, in order; a segment replaces calls in its lists when its kernels change."""

CALL: Callable[..., object] = partial.__call__
"""Makes a call.

In `deque(map(CALL, chain.from_iterable(calls)), 0)` no Python code runs between two C functions, so no signal
handler does: Ctrl-C is handled before both or after both.
"""


def run_marked(calls: Calls, engines: Sequence[DeviceEngine]) -> None:
    """Run the calls of `pass_calls` under the name that profilers show, without autocast."""
    on_host = all(is_host(engine.device) for engine in engines)
    with marked(HOST_UPDATE if on_host else UPDATE), without_autocast({engine.device.type for engine in engines}):
        deque(map(CALL, chain.from_iterable(calls)), 0)


def pass_calls(engines: Sequence[DeviceEngine], shared: Sequence[Calls], progress: list[int]) -> Calls:
    """The calls of a step: for each k, scalar pass k, its reductions over all tensors, tile pass k and matrix pass k.

    The calls append a number to `progress` before the first pass and after the last.
    """
    every = [passes for engine in engines for passes in engine.passes]
    note = [partial(progress.append, 1)]
    calls: Calls = [note]
    for index in range(max((len(passes.segment.spec.program.scalars) for passes in every), default=0)):
        running = [passes for passes in every if index < len(passes.segment.spec.program.scalars)]
        segments = [passes.segment for passes in running]
        calls += [passes.scalar_calls(index) for passes in running]
        calls += _joint_reductions(segments, index)
        calls += [
            [partial(segment.streamer.run, index)] if segment.streamer else passes.tile_calls(index)
            for passes, segment in zip(running, segments)
        ]
        calls += [sums[index] for sums in shared if index < len(sums)]
        calls += [[partial(passes.matrices.run, index)] for passes in running if passes.matrices]
    return [*calls, note]


def without_autocast(kinds: Iterable[str]) -> AbstractContextManager[object]:
    """A block without autocast, which may be active when an update runs in a model's backward."""
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not enabled:
        return nullcontext()
    blocks = ExitStack()
    for kind in enabled:
        blocks.enter_context(torch.autocast(kind, enabled=False))
    return blocks


def _reductions(segment: Segment) -> list[tuple[int, int, str, int]]:
    """The rule's call, the scalar pass, the operation and the slot of each reduction over all tensors, by call."""
    passes = enumerate(segment.spec.program.scalars)
    return sorted(
        (value.attribute, index, value.operation, slot)
        for index, scalar in passes
        for slot, value in scalar.global_reductions
    )


def check_reductions(engines: Sequence[DeviceEngine]) -> None:
    """Raise for a rule whose reductions over all tensors are in different passes for different shapes."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for segment in [passes.segment for engine in engines for passes in engine.passes]:
        title, made = segment.spec.program.graph.title, [one[:3] for one in _reductions(segment)]
        if made and found.setdefault(title, made) != made:
            raise RuleError(
                f"{title} reduces over all tensors in different passes, or over different values, for tensors of "
                "different shapes: use the same reductions over all tensors for all shapes, and compute values of the "
                "same kind before each"
            )


def _joint_reductions(segments: Sequence[Segment], index: int) -> Calls:
    """The calls that reduce the results of scalar pass `index` over all tensors of each rule, on all devices."""
    # A graph numbers its slots in the order in which its outputs need them, which may differ between shapes.
    by_rule: dict[str, list[list[tuple[Segment, str, int]]]] = {}
    for segment in segments:
        if made := [(segment, kind, slot) for _, place, kind, slot in _reductions(segment) if place == index]:
            by_rule.setdefault(segment.spec.program.graph.title, []).append(made)
    return [[partial(_reduce_together, together)] for listed in by_rule.values() for together in zip(*listed)]


def _reduce_together(together: Sequence[tuple[Segment, str, int]]) -> None:
    parts = [segment.global_parts[:, slot] for segment, _, slot in together]
    if together[0][1] == "global_sum":
        total = combined([part.sum() for part in parts])
    else:
        total = combined([part.amax() for part in parts], torch.maximum)
    for segment, _, slot in together:
        segment.totals[slot].copy_(moved(total, segment.device))


def build_ahead(engines: Sequence[DeviceEngine], unscales: bool, deciding: Callable[[], list[Launch]]) -> None:
    """Build the kernels of new engines' first step, in parallel if Triton can."""
    if build_threads() <= 1 or is_capturing():
        return
    for engine in engines:
        # A streamer launches tile passes itself.
        launches = [
            launch
            for passes in engine.passes
            if passes.segment.streamer is None
            for launch in passes.launches(unscales)
        ]
        if launches:
            build_together([*deciding(), *launches], engine.device)


STATES_MOVED = "memory of the state was replaced"

CHANGED_LATER = (
    "memory of the state, or shapes, strides or dtypes of parameters were replaced before a pending update: call "
    "optimizer.synchronize() first"
)


class DeviceEngine:
    """Tables and kernels of an optimizer's tensors on one device.

    Args:
        device: the device.
        parts: the entries of each segment, with its kernel spec.
        groups: the optimizer's param groups.
        control: the device's decision about a step.
        build_passes: builds the passes of a segment from its device and arguments, on the device's backend.
        attend: called with the passes of each segment.
    """

    def __init__(
        self,
        device: torch.device,
        parts: Sequence[tuple[KernelSpec, Sequence[Entry]]],
        groups: Sequence[Mapping[str, Any]],
        control: Control,
        build_passes: Callable[..., Passes],
        attend: Callable[[Passes], None] | None = None,
    ) -> None:
        self.device = device
        self.control = control
        self.entries = [entry for _, entries in parts for entry in entries]
        self.holders = [entry.share.holder for entry in self.entries]  # tensors that hold the entries' gradients
        self.grads = torch.zeros(len(self.entries), dtype=torch.int64, device=device)
        self.passes: list[Passes] = []
        self._ranges: list[range] = []
        start = 0
        for spec, entries in parts:
            stop = start + len(entries)
            passes = build_passes(device, spec, entries, groups, self.grads[start:stop], control)
            if attend is not None:
                attend(passes)
            self.passes.append(passes)
            self._ranges.append(range(start, stop))
            start = stop
        self.norm = GradNorm(device, self.entries, [self.grads])
        """The norm pass over all gradients on the device; shared by the device's engines, if there are several."""
        self.table = Table(self.grads)  # see `describe`
        self.local: LocalGradients | None = None  # finds local parts of gradients, and views of them
        self.gradients: Sequence[torch.Tensor | None] = ()
        """This step's gradients; empty if the table finds them."""
        self.inspected: Inspected | None = None  # the gradients of the last step that checked each gradient, or None
        self.written: list[torch.Tensor] = []
        """The parameters with gradients, their local parts and the DTensors of these parts."""
        self.wrote: Callable[[list[torch.Tensor]], None] | None = None
        """Called with the tensors that a step has written, whenever their versions are incremented."""
        self.graph_tables = GraphTables(self.grads)

    def describe(self, states: Sequence[torch.Tensor], *, finds: bool, local: LocalGradients | None) -> None:
        """Build the table that tracks parameters, gradients and states.

        Args:
            states: the users' state tensors, whose addresses are in tables.
            finds: whether the table may read gradients from the holders.
            local: finds the local parts of gradients, if some are DTensors or entries are views.
        """
        parts = zip(self.holders, local_parts(self.holders), [entry.param for entry in self.entries])
        self.memory, self.local = WrittenMemory(self.entries), local
        params = [holder if part is param else param for holder, part, param in parts]
        self.table = Table(self.grads, params, states, self.memory)
        # The table cannot find gradients of views of holders, or of copies on the host.
        self._may_find = finds and same_list(params, self.holders)

    def find_gradients(self, find: Callable[[torch.Tensor], Any] = GRAD) -> list[torch.Tensor | None]:
        """Return the gradients that `find` gives for the holders; for DTensors, the local parts."""
        gradients = list(map(find, self.holders))
        return gradients if self.local is None else self.local.parts(gradients)

    def inspect(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """After a change: check every tensor and update all tables, or raise `Stale`."""
        self.follow_tensors()
        try:
            seen = inspect(self.entries, self.memory, gradients)
            if not seen.same_layout(self.inspected):
                if self.graph_tables.in_use:
                    raise Stale("gradients have another layout")
                for passes, members in zip(self.passes, self._ranges):
                    inside = {place - members.start: one for place, one in seen.strided.items() if place in members}
                    passes.arrays.set_strided(inside)
                    passes.upload()
            finds = self._may_find and not any(passes.reads_gradients for passes in self.passes)
            self.written = seen.updated()
            self.table.remember(seen.gradients, self.written, finds=finds, again=not seen.copies)
            self.inspected, self.gradients = seen, seen.gradients
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget the last gradients, so that the next step checks all."""
        self.table.invalidate()
        self.table.places, self.inspected = [], None

    def follow_tensors(self) -> None:
        """Update the tables with the addresses of parameters; raise `Stale` if state has moved."""
        if self.table.look(1) == SAME:
            return
        seen = self.table.params.look()
        if not self.table.states_are_same():
            raise Stale(STATES_MOVED)
        if seen == CHANGED:
            raise Stale("parameters have changed their shape, strides or dtype")
        if seen == MOVED:
            self._moved()

    def follow_memory(self) -> None:
        """Before a pass that was prepared earlier: update the tables with the parameters' addresses."""
        try:
            self.follow_tensors()
        except Stale:
            raise StateError(CHANGED_LATER) from None

    def _moved(self) -> None:
        if self.graph_tables.in_use:
            raise Stale("parameters have moved")
        self.memory = WrittenMemory(self.entries)
        if self.memory.overlaps_itself:
            raise Stale("parameters share memory")
        for passes in self.passes:
            passes.arrays.read()
            passes.upload()
        # Last, because after an error in between the tables hold old addresses, and the next step must detect that.
        self.table.follow_params(self.memory)

    def build(self, inputs: StepInputs) -> None:
        """Build every kernel of a step with these inputs, without changing anything."""
        self.control.unscales = inputs.grad_scale is not None
        for passes in self.passes:
            passes.build()

    def require_kernels(self, *, alone: bool = False) -> None:
        """Raise `CaptureError` if a step is more than kernel launches."""
        moved = any(passes.segment.streamer is not None for passes in self.passes)
        require(not moved, "its state is in host memory, and the host decides when to copy it")
        if not all(passes.can_be_captured for passes in self.passes):
            on_cpu = "its parameters are on the CPU, which has no graphs; move the model to a GPU first"
            without = "without Triton the host decides which operations a step runs"
            require(False, on_cpu if is_host(self.device) else without)
        require_no_branches(self.passes, alone=alone)

    def check_capture(self, gradients: Sequence[torch.Tensor | None]) -> Inspected:
        """Check that a CUDA graph can contain a step."""
        self.require_kernels()
        for index, entry in enumerate(self.entries):
            require(
                gradients[index] is not None or not entry.param.requires_grad,
                f"{entry.share.label} has no gradient, so the graph would never update it: run backward first and keep "
                "the gradients, zero_grad(set_to_none=False), or run backward inside the capture",
            )
        unchanged = self.table.params.look() == SAME
        require(unchanged, f"parameters have moved or changed their shape since the last step; {PREPARE}")
        require(self.table.states_are_same(), f"memory of the state was replaced since the last step; {PREPARE}")
        seen = inspect(self.entries, self.memory, gradients)
        require(seen.same_layout(self.inspected), f"gradients have another layout than at the last step; {WARM_UP}")
        return seen

    @contextmanager
    def into_graph(self, seen: Inspected) -> Iterator[None]:
        """A block whose launches are captured in a CUDA graph and read these gradients at every replay."""
        table = self.graph_tables.table(rows_of(seen.gradients))
        self.graph_tables.in_use = self.graph_tables.captures = True
        self._read_gradients_from(table)
        before, found = (self.inspected, self.written, self.table.count_writes), self.table.finds
        self.inspected, self.written, self.gradients = seen, seen.updated(), seen.gradients
        self.table.count_writes = partial(torch.autograd.graph.increment_version, self.written)
        self.table.finds = False
        try:
            with nothing_skipped(self.passes):
                yield
        finally:
            self.inspected, self.written, self.table.count_writes = before
            self.table.finds, self.graph_tables.captures = found, False
            self._read_gradients_from(self.grads)

    def _read_gradients_from(self, table: torch.Tensor) -> None:
        self.norm.read_from(table)
        for passes, members in zip(self.passes, self._ranges):
            passes.set_gradients(table[members.start : members.stop])

    def begin(self) -> None:
        """Pass this step's gradients to the segments that read them as tensors."""
        if self.graph_tables.captures:
            built = all(passes.is_built for passes in self.passes)
            require(built, f"the kernels of such a step are not built yet; {WARM_UP}")
        for passes, members in zip(self.passes, self._ranges):
            if passes.reads_gradients:
                passes.segment.gradients = self.gradients[members.start : members.stop]
            if passes.outputs is not None:
                passes.outputs.begin()

    def finish(self) -> None:
        """After the passes: leave scaled gradients unscaled (but not clipped)."""
        if self.control.unscales and self.inspected is not None:
            self.inspected.copy_back()
        for passes in self.passes:
            passes.finish_outputs()
            passes.segment.gradients = ()

    def release(self) -> None:
        """Release this step's gradients and their copies."""
        self.gradients = ()
        if self.inspected is not None:
            self.inspected.copies, self.inspected.gradients = [], []
