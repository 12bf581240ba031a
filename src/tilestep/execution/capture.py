"""`capture`: an optimizer's step, or a whole training step around it, as a CUDA graph that detects when it is stale."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..compat import REPLAY, marked
from ..devices.garbage import without_collections
from ..errors import CaptureError, GradientError
from ..native.table import SAME, rows_of
from ..optimizer import Optimizer
from ..optimizer.graphs import CHANGED, KEEP, note_lost, prepare_capture
from ..optimizer.parameters import evaluation_error
from ..optimizer.plan import StepPlan
from ..placement.combinations import refuse
from ..runtime import Stale
from ..runtime.capturing import HostBranches, require
from ..runtime.engine import STATES_MOVED

_AT_ONCE = 32  # gradients and param group entries that a replay checks; the next replay checks the next ones


def capture(optimizer: Optimizer, work: Callable[[], Any] | None = None) -> CapturedStep:
    """Capture an optimizer's step in a CUDA graph.

    Nothing is updated until the first `replay()`. Gradients must keep their memory: let backward accumulate into them,
    and clear them with `zero_grad(set_to_none=False)`. With `work`, gradients may be None: backward then allocates them
    inside the graph.

    Args:
        optimizer: a tilestep optimizer with all parameters on one GPU.
        work: the function to capture instead of `optimizer.step`: a whole training step, or the calls of a scaler. It
            is called once and must step the optimizer. Every kernel in it must have run before, outside the graph.

    Returns:
        The captured step. It does not keep the optimizer alive.

    Raises:
        CaptureError: for work that a graph cannot hold, with the reason; nothing is changed then.

    Source: torch.cuda.graph, torch.cuda.CUDAGraph.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> try:
        ...     tilestep.capture(tilestep.AdamW([weight]))
        ... except tilestep.CaptureError as error:
        ...     print(str(error)[:69])
        the step cannot be captured: its parameters are on the CPU, which has
    """
    refuse("capture", optimizer.attached, error=CaptureError)
    with optimizer.execution.for_graph(optimizer, alone=work is None):
        plan = prepare_capture(optimizer, alone=work is None)
        engine = plan.engines[0]
        choices = HostBranches(engine.passes)
        table = None
        if work is None:
            _require_unscaled(optimizer)
            with choices.left_out():
                seen = engine.check_capture(plan.gradients()[0])
            table = engine.graph_tables.prepare(rows_of(seen.gradients))
        before = [param.grad for param in engine.holders]
        captured_before = optimizer.graphs.captured
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, for example of data loaders, may allocate meanwhile. Collecting garbage could destroy
            # another CUDA graph, which would invalidate the capture.
            mode = "thread_local"
            with (
                without_collections(),
                choices.left_out(),
                torch.cuda.device(engine.device),
                torch.cuda.graph(graph, capture_error_mode=mode),
            ):
                output = (work or optimizer.step)()
        finally:
            engine.graph_tables.forget()
            graphs = optimizer.graphs
            optimizer.graphs = replace(graphs, checked=graphs.checked + graphs.captured - captured_before)
        require(optimizer.graphs.captured > captured_before, "work() did not step the optimizer")
        # Gradients that were allocated inside are memory of the graph.
        kept = [gradient if param.grad is gradient else None for param, gradient in zip(engine.holders, before)]
        return CapturedStep(optimizer, graph, output, table, kept, choices)


class CapturedStep:
    """A captured step; made by `tilestep.capture`.

    Attributes:
        output: the output of the captured function: tensors that each replay overwrites.

    Example:
        >>> import torch, tilestep
        >>> if torch.cuda.is_available():
        ...     weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer = tilestep.SGD([weight], lr=0.5)
        ...     captured = tilestep.capture(optimizer)
        ...     captured.replay()  # the first update: the capture makes none

    Args:
        optimizer: the optimizer.
        graph: the CUDA graph.
        output: the output of the captured function: tensors that each replay overwrites.
        table: the table of addresses that the graph reads.
        gradients: the gradients that must keep their memory, by the index of their parameter.
        choices: the steps that the graph leaves out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        graph: torch.cuda.CUDAGraph,
        output: Any,
        table: torch.Tensor | None,
        gradients: Sequence[torch.Tensor | None],
        choices: HostBranches,
    ) -> None:
        plan = optimizer.plan
        assert plan is not None
        engine, groups, lost = plan.engines[0], plan.basis.groups, list[str]()
        self.output, self._graph, self._table, self._choices = output, graph, table, choices
        self._optimizer, self._plan = weakref.ref(optimizer), weakref.ref(plan)
        # Detecting moved tensors costs the same for any number of tensors. Weak references report freed memory
        # immediately. Tensors that moved while their old memory is still referenced are found by checking some
        # tensors at each replay.
        self._lost, self._turn = lost, 0
        labelled = [(param, entry.share.label) for param, entry in zip(engine.holders, engine.entries)]
        self._references: list[Any] = [
            weakref.ref(param.untyped_storage(), partial(note_lost, lost, label))
            for param, label in labelled
            if param.numel()
        ]
        notes = [partial(note_lost, lost, f"the gradient of {label}") for _, label in labelled]
        self._gradients: list[Any] = [
            None if gradient is None else weakref.ref(gradient, note) for gradient, note in zip(gradients, notes)
        ]
        self._listed = [(group, index) for group, own in enumerate(groups) for index in range(len(own["params"]))]

    def replay(self) -> Any:
        """Run the captured step on the current stream, with the current hyperparameters of the param groups.

        The host does not wait for the device. Steps in which a rule decomposes matrices (SOAP) run outside the graph.

        Returns:
            The output of the captured function.

        Raises:
            CaptureError: if the graph is stale; nothing is run then.
            ValueError: for a hyperparameter that is NaN.

        Example:
            >>> import tilestep
            >>> def steps(captured: tilestep.CapturedStep, optimizer: tilestep.Optimizer, rates: list[float]) -> None:
            ...     for rate in rates:
            ...         optimizer.param_groups[0]["lr"] = rate
            ...         captured.replay()  # with this learning rate
        """
        optimizer = self._known_optimizer()
        if optimizer.is_evaluating:
            raise evaluation_error("replay()")
        is_alone = self._table is not None
        if is_alone:
            _require_unscaled(optimizer)
        with optimizer.execution.for_graph(optimizer, alone=is_alone, replays=True):
            plan = self._current()
            try:
                plan.hypers[0].push(plan.hypers[0].changes())
            except Stale as stale:
                raise _stale(str(stale)) from None
            with marked(REPLAY) if is_alone else nullcontext():
                plan.init_states(optimizer, all_of_them=True)
                if not self._choices.suffices():
                    with torch.no_grad():
                        optimizer.execution.step(optimizer.update)
                    return self.output
                if plan.masters.exist:
                    plan.masters.catch_up()
                self._graph.replay()
                self._choices.replayed()
        return self.output

    @property
    def is_stale(self) -> bool:
        """Whether `replay()` would raise because the optimizer's plan, parameters or gradients have changed.

        Example:
            >>> import tilestep
            >>> def fresh(captured: tilestep.CapturedStep, optimizer: tilestep.Optimizer) -> tilestep.CapturedStep:
            ...     return tilestep.capture(optimizer) if captured.is_stale else captured
        """
        try:
            self._current()
        except CaptureError:
            return True
        return False

    def _known_optimizer(self) -> Optimizer:
        if (optimizer := self._optimizer()) is None:
            raise CaptureError("the optimizer of the captured step was deleted: keep a reference to it")
        return optimizer

    def _current(self) -> StepPlan:
        optimizer, plan = self._known_optimizer(), self._plan()
        if plan is None or optimizer.plan is not plan or not plan.basis.same_groups(optimizer):
            raise _stale(CHANGED)
        if reason := self._moved(plan):
            raise _stale(reason)
        return plan

    def _moved(self, plan: StepPlan) -> str:
        """Why the graph is stale: moved tensors, other gradients or parameters; empty if it is not."""
        if self._lost:
            return f"the memory of {self._lost[0]} was freed; {KEEP}"
        engine, basis, turn = plan.engines[0], plan.basis, self._turn
        self._turn += 1
        if engine.table.look_in_turn(turn) != SAME:
            return "parameters have moved" if engine.table.states_are_same() else STATES_MOVED
        for place in _in_turn(len(self._listed), turn):
            group, index = self._listed[place]
            own = basis.groups[group]["params"]
            if index >= len(own) or own[index] is not basis.params[place]:
                return "the parameters of the param groups have changed"
        for place in _in_turn(len(self._gradients), turn):
            recorded = self._gradients[place]
            if recorded is not None and engine.holders[place].grad is not recorded():
                return f"the gradient of {engine.entries[place].share.label} is another tensor; {KEEP}"
        return ""


def _stale(reason: str) -> CaptureError:
    return CaptureError(f"the captured step is stale: {reason}. Capture it again")


def _require_unscaled(optimizer: Optimizer) -> None:
    if optimizer.control.gradients_scaled:
        raise GradientError(
            "the gradients still carry a loss scale, and the captured step does not unscale them: capture the scaler's "
            "calls, capture(optimizer, lambda: (scaler.step(optimizer), scaler.update()))"
        )


def _in_turn(count: int, turn: int) -> range:
    """The indices that a replay checks; the next replay checks the next range."""
    start = turn % max(-(-count // _AT_ONCE), 1) * _AT_ONCE
    return range(start, min(start + _AT_ONCE, count))
