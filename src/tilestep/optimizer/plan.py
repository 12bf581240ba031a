"""The plan of a step: an optimizer's engines, and the check whether they still fit its parameters."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .. import devices
from ..compat import is_fake
from ..devices import is_host
from ..errors import GradientError, StateError
from ..native.table import CHANGED, SAME, Table, same_list
from ..placement import ReductionGroup, Share
from ..runtime import DeviceEngine, Stale, StepInputs, pass_calls, run_marked
from ..runtime.engine import CALL, Calls
from ..runtime.gradients import GRAD
from ..runtime.hypers import GroupNumbers
from ..stats import Reports
from .control import Deciders
from .masters import Masters
from .memory import StateMemory
from .parameters import LISTED_TWICE, Optimizer
from .states import initialize


@dataclass
class Basis:
    """The param groups, parameters and states that a plan was built from."""

    groups: list[dict[str, Any]]
    params: list[torch.Tensor]  # of all groups
    state: Any  # the optimizer's state
    state_changes: int  # the count of replaced entries at that time
    dormant: list[torch.Tensor]  # parameters, or sections of them, that are not stepped yet
    unreal: list[torch.Tensor]  # fake parameters and parameters on the meta device
    table: Table  # of an engine; compares lists in C++ if the extension is built

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has these groups, parameters and states, and no dormant one has a gradient."""
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]
        state, same = vars(optimizer)["state"], self.table.same_list
        return (
            state is self.state
            and state.count.changes == self.state_changes
            and same(groups, self.groups)
            and same(params, self.params)
            and not (self.dormant and any(param.grad is not None for param in self.dormant))
            and not (self.unreal and any(not param.is_meta and not is_fake(param) for param in self.unreal))
        )

    def same_groups(self, optimizer: Optimizer) -> bool:
        """The part of `fits` that does not iterate over parameters."""
        groups, state = optimizer.param_groups, vars(optimizer)["state"]
        same_count = sum([len(group["params"]) for group in groups]) == len(self.params)
        same_state = state is self.state and state.count.changes == self.state_changes
        return same_count and same_state and same_list(groups, self.groups)

    @property
    def omits_trainable(self) -> bool:
        """Whether a trainable parameter has no gradient yet: a graph would leave it out forever."""
        return any(param.requires_grad and not is_lazy(param) and not param.is_meta for param in self.dormant)


class Hypers:
    """The hyperparameters of an engine's tensors: in param groups, and in the tables of its passes.

    Args:
        engine: the engine.
        groups: the param groups.
        keys: the keys that steps read, per group.
    """

    def __init__(
        self, engine: DeviceEngine, groups: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[str]]
    ) -> None:
        self._passes, self._graph_tables = engine.passes, engine.graph_tables
        used = sorted({index for passes in engine.passes for index in passes.segment.group_rows.indices})
        self._numbers = [GroupNumbers(index, groups[index], keys[index]) for index in used]
        self.on_device = any(numbers.tensors for numbers in self._numbers)  # whether any is a tensor on a GPU
        for passes in engine.passes:
            passes.set_hypers(passes.segment.group_rows.rows())

    def changes(self) -> list[tuple[GroupNumbers, int]]:
        """Return the groups that differ from the tables: MOVED for new numbers, CHANGED for anything else."""
        return [
            (own, seen)
            for own in self._numbers
            if (own.is_mutable or not all(map(operator.is_, map(own.value_of, own.keys), own.values)))
            and (seen := own.look())
        ]

    def push(self, changes: Sequence[tuple[GroupNumbers, int]]) -> None:
        """Write changes to the tables; raise `Stale` for a change that needs new tables.

        Hyperparameters that are tensors on a GPU are read on the device.
        """
        if any(seen == CHANGED for _, seen in changes):
            raise Stale("a flag or the type of a hyperparameter has changed")
        if self._graph_tables.in_use and not all(numbers.same_tensors() for numbers, _ in changes):
            raise Stale("a hyperparameter that is a tensor on a device was replaced; write into the tensor instead")
        indices = {numbers.index for numbers, _ in changes}
        touched = [passes for passes in self._passes if not indices.isdisjoint(passes.segment.group_rows.indices)]
        for passes in touched:
            rows = passes.segment.group_rows
            own = [numbers for numbers, _ in changes if numbers.index in rows.indices]
            if not all(rows.keeps_graph(numbers.index, numbers.chosen) for numbers in own):
                raise Stale
        if any(passes.matrices is not None and passes.matrices.outdated() for passes in touched):
            raise Stale("a number used by matrix operations has changed")
        for passes in touched:
            passes.set_hypers(passes.segment.group_rows.rows())
            if passes.segment.group_rows.follow_seeds():
                passes.upload()
        for numbers, _ in changes:
            numbers.remember()
        self.on_device = any(numbers.tensors for numbers in self._numbers)

    def copy_tensors(self) -> None:
        """Copy hyperparameters that are tensors on a GPU to the tables, on the device."""
        if self.on_device:
            for passes in self._passes:
                for row, column, tensor in passes.segment.group_rows.on_device():
                    passes.set_device_hyper(row, column, tensor)


@dataclass
class StepPlan:
    """The engines of a step, and the objects that refresh them, decide the step and run it."""

    basis: Basis
    engines: list[DeviceEngine]  # per device, or several per device if its parts are stepped separately
    hypers: list[Hypers]  # per engine
    deciders: Deciders
    masters: Masters
    memory: StateMemory  # the memory that holds the state
    mesh_ranks: ReductionGroup | None = None  # the ranks of the meshes, if some parameters are DTensors
    sharers: Any = None  # the ranks that hold parts of the same parameters, if there are several
    places: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)  # indices of the engines, by part
    repeat_updates: tuple[frozenset[int], ...] = ()  # see `parameters.repeat_updates`
    ahead: list[Share] = field(default_factory=list)  # shares whose state was created before their first step
    active_set_changed: bool = (
        True  # whether the set of parameters with gradients changed since the last ownership check
    )
    interruption: str = ""  # the error that interrupted an update between two of its passes, and its effect

    def __post_init__(self) -> None:
        self.shared_sums: Sequence[Calls] = ()  # per engine, by tile pass: reductions over tensors of several ranks
        self.progress: list[int] = []  # of the last update: length 0, 1 while passes run, 2 after them
        self._calls: dict[tuple[int, ...], Calls] = {}  # calls of the passes of some engines, by the engines' indices
        self._every = tuple(range(len(self.engines)))
        self._memory_finishes = type(self.memory).finish is not StateMemory.finish
        self._on_host = [passes for one in self.engines if is_host(one.device) for passes in one.passes]
        self._threads = 0  # the number of threads of host passes

    def init_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Initialize states that were created ahead anew, from the parameters and groups at their first step."""
        begun, states = [one for one in self.ahead if all_of_them or one.holder.grad is not None], self.basis.state
        initialize(optimizer, begun, states)
        for share in begun:
            states[share.param].is_ahead = False
        self.ahead = [share for share in self.ahead if states[share.param].is_ahead]

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """Return the gradients of each engine's entries; for DTensors, the local parts."""
        engines = self.engines
        return self.memory.gradients([one.holders for one in engines], [one.find_gradients() for one in engines])

    def refresh(
        self,
        places: Sequence[int] | None = None,
        find: Callable[[torch.Tensor], Any] = GRAD,
        *,
        optimizer: Optimizer | None = None,
        inputs: StepInputs | None = None,
        gradients: Sequence[Sequence[torch.Tensor | None]] = (),
        unmoved: bool = False,
    ) -> bool:
        """Refresh the engines for the next step; updates no parameter.

        Args:
            places: indices of the engines; None for all.
            find: function that returns the gradient of a parameter.
            optimizer: the owner of the plan, to check whether the plan fits; None if it is known to fit.
            inputs: inputs of the step, to launch its norm while the host checks the rest.
            gradients: per engine, used instead of the parameters' gradients.
            unmoved: whether gradients are in the same memory as at the last step.

        Returns:
            Whether the look at `unmoved` gradients was skipped.

        Raises:
            Stale: if the plan must be built anew.
        """
        if optimizer is not None and not self.basis.fits(optimizer):
            raise Stale
        deciders = self.deciders
        norm = inputs is not None and inputs.needs_norm and deciders.sums_in_tiles and deciders.ranks is None
        unmoved = unmoved and self.memory.on_device
        if self.memory.replaces_gradients and not gradients:
            # The gradients of all engines are copied to the host together.
            gradients = self.gradients()
        for place in self._every if places is None else places:
            engine = self.engines[place]
            table = engine.table
            threads = table.threads if table.is_large else 1
            if unmoved and table.finds and table.is_uploaded and table.look(threads) == SAME:
                continue
            unmoved = False
            given = gradients[place] if gradients else None
            if given is None and not (table.finds and find is GRAD):
                given = engine.find_gradients(find)
            engine.gradients = given or ()
            if table.refresh(given, threads) == CHANGED:
                engine.inspect(engine.find_gradients(find) if given is None else given)
                self.active_set_changed = True
            elif norm and len(self.engines) == 1:
                engine.norm.start()
        for place in self._every if places is None else places:
            hypers = self.hypers[place]
            if changes := hypers.changes():
                hypers.push(changes)
            if hypers.on_device:
                hypers.copy_tensors()
        return unmoved

    def run(
        self,
        optimizer: Optimizer,
        inputs: StepInputs | None,
        *,
        marked: bool,
        counts_versions: bool = True,
        reports: Reports | None = None,
    ) -> None:
        """Take a step of all engines: decide it, then run its passes."""
        if self.repeat_updates and inputs is not None and inputs.grad_scale is not None:
            raise GradientError(f"{LISTED_TWICE}, and a step unscales a gradient once: list it once")
        self.progress.clear()
        masters = self.masters if self.masters.follow and counts_versions else None
        try:
            if masters is not None:
                masters.sync()
            if inputs is not None or not self.deciders.is_trivial:
                optimizer.control.update_control(optimizer, self.deciders, inputs)
            measures = reports is not None and reports.begin(self.engines)
            gradients = [engine.gradients for engine in self.engines] if self.repeat_updates else ()
            self.update(self._every, marked=marked, counts_versions=counts_versions, measures=measures)
            # A parameter that a group lists several times is updated once per listing, as in torch.
            for again in self.repeat_updates:
                own = [
                    [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                    for params, of_engine in zip([engine.holders for engine in self.engines], gradients)
                ]
                self.refresh(gradients=own)
                self.update(self._every, counts_versions=True)
            if masters is not None:
                masters.record()
            if reports is not None:
                reports.finish()
        except BaseException:
            self.release()
            if self.masters.follow and len(self.progress) == _WHOLE:
                self.masters.record()
            raise

    def update(
        self, places: tuple[int, ...], *, counts_versions: bool, marked: bool = True, measures: bool = False
    ) -> None:
        """Run the passes of engines whose step is prepared and decided."""
        engines = self.engines if places is self._every else [self.engines[place] for place in places]
        calls = self._calls.get(places)
        if calls is None:
            shared = [self.shared_sums[place] for place in places] if self.shared_sums else ()
            calls = self._calls[places] = pass_calls(engines, shared, self.progress)
        if self._on_host and self._threads != devices.thread_count():
            self._threads = devices.thread_count()
            for passes in self._on_host:
                passes.set_threads(self._threads)
        self.progress.clear()
        # The passes of the remaining engines read only tensors that the tables hold.
        active = [engine for engine in engines if measures or engine.gradients or not engine.table.finds]
        for engine in active:
            engine.begin()
        try:
            if marked:
                run_marked(calls, engines)
            else:
                deque(map(CALL, chain.from_iterable(calls)), 0)
            for engine in active:
                engine.finish()
                engine.release()
            for engine in engines:
                # Autograd does not see the kernels' writes; a backward through the old weights must fail as in torch.
                if counts_versions:
                    engine.table.count_writes()
                    if engine.wrote is not None:
                        engine.wrote(engine.written)
                if self._memory_finishes:
                    self.memory.finish(engine)
        except BaseException as error:
            in_graph = any(engine.graph_tables.in_use for engine in engines)
            if len(self.progress) not in (0, _WHOLE) and not in_graph:
                name, self.basis.state_changes = type(error).__name__, -1
                self.interruption = f"{name} has interrupted a step between two passes, so only some values are updated"
            raise
        finally:
            for engine in engines:
                engine.table.release()

    def without_gradients(self) -> Iterator[torch.Tensor]:
        """Yield all parameters without a gradient that this rank may update."""
        every = chain(self.basis.dormant, self.basis.unreal, *(engine.holders for engine in self.engines))
        return (one for one in every if one.grad is None)

    def require_whole(self) -> None:
        """Raise if an update was interrupted between two of its passes; such a plan no longer fits."""
        if self.interruption:
            raise StateError(
                f"{self.interruption}. Load a checkpoint of model and optimizer, or continue with the present values "
                "by optimizer.load_state_dict(optimizer.state_dict())"
            )

    def release(self) -> None:
        """Release the gradients held for a step."""
        for engine in self.engines:
            engine.release()
            engine.table.release()


_WHOLE = 2  # length of `progress` after the passes of an update
