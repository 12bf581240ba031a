"""The plan of a step: an optimizer's engines, and whether they still fit its parameters."""

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
    """The param groups, parameters and states of an optimizer when its plan was made."""

    groups: list[dict[str, Any]]
    params: list[torch.Tensor]  # of all groups
    state: Any  # the optimizer's state
    state_changes: int  # how often its entries had been replaced
    dormant: list[torch.Tensor]  # parameters, or sections of them, that take no part in steps yet
    unreal: list[torch.Tensor]  # fake parameters and parameters on the meta device
    table: Table  # of an engine: it compares lists in C++ where that is built

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether these are the optimizer's groups, parameters and states, and no dormant one has a gradient."""
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
        """The part of `fits` that needs no look at every parameter."""
        groups, state = optimizer.param_groups, vars(optimizer)["state"]
        same_count = sum([len(group["params"]) for group in groups]) == len(self.params)
        same_state = state is self.state and state.count.changes == self.state_changes
        return same_count and same_state and same_list(groups, self.groups)

    @property
    def leaves_out_training(self) -> bool:
        """Whether a parameter that trains has no gradient yet, so that a graph would leave it out forever."""
        return any(param.requires_grad and not is_lazy(param) and not param.is_meta for param in self.dormant)


class Hypers:
    """The hyperparameters of an engine's tensors: in param groups, and in the tables of its passes.

    Args:
        engine: the engine.
        groups: the param groups.
        keys: for each group the keys that steps read.
    """

    def __init__(
        self, engine: DeviceEngine, groups: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[str]]
    ) -> None:
        self._passes, self._graph_tables = engine.passes, engine.graph_tables
        used = sorted({index for passes in engine.passes for index in passes.segment.group_rows.indices})
        self._numbers = [GroupNumbers(index, groups[index], keys[index]) for index in used]
        self.on_device = any(numbers.tensors for numbers in self._numbers)  # whether some are tensors on a GPU
        for passes in engine.passes:
            passes.set_hypers(passes.segment.group_rows.rows())

    def changes(self) -> list[tuple[GroupNumbers, int]]:
        """The groups that differ from the tables, each with MOVED for other numbers or CHANGED."""
        return [
            (own, seen)
            for own in self._numbers
            if (own.is_mutable or not all(map(operator.is_, map(own.value_of, own.keys), own.values)))
            and (seen := own.look())
        ]

    def push(self, changes: Sequence[tuple[GroupNumbers, int]]) -> None:
        """Bring changes to the tables; raise `Stale` for a change that needs other tables.

        Steps read hyperparameters that are tensors on a GPU there.
        """
        if any(seen == CHANGED for _, seen in changes):
            raise Stale("a flag, or what kind of value a hyperparameter has, has changed")
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
            raise Stale("a number that matrix operations take has changed")
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
    """The engines of a step, and the objects that bring them up to date, decide the step and run it."""

    basis: Basis
    engines: list[DeviceEngine]  # one for each device, or several for the parts of it that are stepped one by one
    hypers: list[Hypers]  # of each engine
    deciders: Deciders
    masters: Masters
    home: StateMemory  # where the state is
    mesh_ranks: ReductionGroup | None = None  # the ranks of the meshes, if some parameters are DTensors
    sharers: Any = None  # the ranks that hold parts of the same parameters, if there are several
    places: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)  # by part the places of its engines
    repeat_updates: tuple[frozenset[int], ...] = ()  # see `parameters.repeat_updates`
    ahead: list[Share] = field(default_factory=list)  # those whose state was made before their first step
    active_set_changed: bool = (
        True  # whether other parameters have gradients than when it was asked who has taken the rest
    )
    broken_by: str = ""  # what has interrupted an update between two of its passes

    def __post_init__(self) -> None:
        self.shared_sums: Sequence[
            Calls
        ] = ()  # for each engine, by tile pass: reductions over tensors of several ranks
        self.progress: list[int] = []  # of the last update: nothing, one number while passes run, two after them
        self._calls: dict[tuple[int, ...], Calls] = {}  # of the passes of some engines, by their places
        self._every = tuple(range(len(self.engines)))
        self._home_finishes = type(self.home).finish is not StateMemory.finish
        self._on_host = [passes for one in self.engines if is_host(one.device) for passes in one.passes]
        self._threads = 0  # those that passes on the host have

    def begin_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Let states that were made ahead begin again, with the values of parameters and groups at their first step."""
        begun, states = [one for one in self.ahead if all_of_them or one.holder.grad is not None], self.basis.state
        initialize(optimizer, begun, states)
        for share in begun:
            states[share.param].is_ahead = False
        self.ahead = [share for share in self.ahead if states[share.param].is_ahead]

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """For each engine the gradients of its entries; of DTensors the local parts."""
        engines = self.engines
        return self.home.gradients([one.holders for one in engines], [one.find_gradients() for one in engines])

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
        """Bring engines up to date for the coming step; updates no parameter.

        Args:
            places: of the engines; None for all.
            find: what gives the gradient of a parameter.
            optimizer: whose plan it is, unless it is known that the plan fits.
            inputs: of the step, whose norm is launched while the host checks the rest.
            gradients: of every engine, in the place of those that parameters have.
            unmoved: whether gradients are those of the last step, in the same memory.

        Returns:
            Whether `unmoved` gradients were not looked at.

        Raises:
            Stale: if the plan must be built anew.
        """
        if optimizer is not None and not self.basis.fits(optimizer):
            raise Stale
        deciders = self.deciders
        norm = inputs is not None and inputs.needs_norm and deciders.sums_in_tiles and deciders.ranks is None
        unmoved = unmoved and self.home.on_device
        if self.home.looks_at_gradients and not gradients:
            # All of them are copied to the host together.
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
            if inputs is not None or not self.deciders.plainly:
                optimizer.control.update_control(optimizer, self.deciders, inputs)
            measures = reports is not None and reports.begin(self.engines)
            gradients = [engine.gradients for engine in self.engines] if self.repeat_updates else ()
            self.update(self._every, marked=marked, counts_versions=counts_versions, measures=measures)
            # Parameters that a group lists several times are updated as often, as by torch.
            for again in self.repeat_updates:
                own = [
                    [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                    for params, of_engine in zip([engine.holders for engine in self.engines], gradients)
                ]
                self.refresh(gradients=own)
                self.update(self._every, counts_versions=True)
            if masters is not None:
                masters.note()
            if reports is not None:
                reports.finish()
        except BaseException:
            self.release()
            if self.masters.follow and len(self.progress) == _WHOLE:
                self.masters.note()
            raise

    def update(
        self, places: tuple[int, ...], *, counts_versions: bool, marked: bool = True, measures: bool = False
    ) -> None:
        """Run the passes of some engines, whose step is prepared and decided."""
        engines = self.engines if places is self._every else [self.engines[place] for place in places]
        calls = self._calls.get(places)
        if calls is None:
            shared = [self.shared_sums[place] for place in places] if self.shared_sums else ()
            calls = self._calls[places] = pass_calls(engines, shared, self.progress)
        if self._on_host and self._threads != devices.thread_count():
            self._threads = devices.thread_count()
            for passes in self._on_host:
                passes.take_threads(self._threads)
        self.progress.clear()
        # Passes of others read no tensor but those in tables.
        attended = [engine for engine in engines if measures or engine.gradients or not engine.table.finds]
        for engine in attended:
            engine.begin()
        try:
            if marked:
                run_marked(calls, engines)
            else:
                deque(map(CALL, chain.from_iterable(calls)), 0)
            for engine in attended:
                engine.finish()
                engine.release()
            for engine in engines:
                # Autograd does not see what kernels write; a backward through the old weights must fail as in torch.
                if counts_versions:
                    engine.table.count_writes()
                    if engine.wrote is not None:
                        engine.wrote(engine.written)
                if self._home_finishes:
                    self.home.finish(engine)
        except BaseException as error:
            in_graph = any(engine.graph_tables.in_use for engine in engines)
            if len(self.progress) not in (0, _WHOLE) and not in_graph:
                self.broken_by, self.basis.state_changes = type(error).__name__, -1
            raise
        finally:
            for engine in engines:
                engine.table.release()

    def without_gradients(self) -> Iterator[torch.Tensor]:
        """What has no gradient of all that this rank may update."""
        every = chain(self.basis.dormant, self.basis.unreal, *(engine.holders for engine in self.engines))
        return (one for one in every if one.grad is None)

    def require_unbroken(self) -> None:
        """Raise if an update was interrupted between two of its passes; such a plan fits no more."""
        if self.broken_by:
            raise StateError(
                f"{self.broken_by} has interrupted a step between two of its passes: some numbers are those of after "
                "it, others of before. Load a checkpoint of model and optimizer; "
                "optimizer.load_state_dict(optimizer.state_dict()) goes on with what is there"
            )

    def release(self) -> None:
        """Release gradients that were held for a step."""
        for engine in self.engines:
            engine.release()
            engine.table.release()


_WHOLE = 2  # numbers of progress after the passes of an update
