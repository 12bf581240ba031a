"""The plan of a step: an optimizer's engines, and whether they still fit its parameters."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..compat import is_fake
from ..devices import combined
from ..errors import GradientError, StateError
from ..native.table import CHANGED, SAME, same_list
from ..placement import LocalGradients, ReductionGroup, Share
from ..runtime import DeviceEngine, JointNorm, Stale, StepInputs, pass_calls, run_marked
from ..runtime.engine import CALL, Calls
from ..runtime.shared_sums import SharedSums
from ..stats import Reports
from .masters import Masters
from .memory import StateMemory
from .parameters import LISTED_TWICE, Optimizer
from .states import initialize

_GRAD = operator.attrgetter("grad")


@dataclass
class StepPlan:
    """The engines of a step, made for the param groups and the state at that time."""

    engines: list[DeviceEngine]  # one for each device, or several for the parts of it that are stepped one by one
    shares: list[list[Share]]  # for each engine what its entries are
    dormant: list[torch.Tensor]  # parameters, or sections of them, that take no part in steps yet
    unreal: list[torch.Tensor]  # fake parameters and parameters on the meta device
    groups: list[dict[str, Any]]  # the param groups
    params: list[torch.Tensor]  # every parameter
    state: Any  # the optimizer's state
    state_changes: int  # how often its entries had been replaced
    masters: Masters  # the parameters whose masters do not show what other code writes to them
    mesh_ranks: ReductionGroup | None = None  # the ranks of the meshes, if some parameters are DTensors
    ranks: Any = None  # the ranks that decide steps together, if there are several
    sharers: Any = None  # the ranks that hold parts of the same parameters, if there are several
    sends: bool = False  # whether passes send something to other ranks
    sources: Sequence[LocalGradients] = ()  # for each engine its gradients, with DTensors, complex tensors or splits
    shared_sums: Sequence[SharedSums] = ()  # for each engine its reductions over tensors on several ranks
    places: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)  # by part the places of its engines
    home: StateMemory = field(default_factory=StateMemory)  # where the state is
    repeat_updates: tuple[frozenset[int], ...] = ()  # see `parameters.repeat_updates`
    controls: Sequence[Any] = ()  # for each device its `control.DeviceControl`
    ahead: list[Share] = field(default_factory=list)  # those whose state was made before their first step
    active_set_changed: bool = True  # since the last ownership check

    def begin_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Let states that were made ahead begin again, with the values of parameters and groups at their first step."""
        begun = [share for share in self.ahead if all_of_them or share.holder.grad is not None]
        initialize(optimizer, begun, self.state)
        for share in begun:
            self.state[share.param].is_ahead = False
        self.ahead = [share for share in self.ahead if self.state[share.param].is_ahead]

    def __post_init__(self) -> None:
        self.members = [[share.holder for share in shares] for shares in self.shares]
        """For each engine the tensors whose gradients its entries read."""
        self._calls: dict[tuple[int, ...], Calls] = {}
        self.progress: list[int] = []  # of the last update: nothing, one number while passes run, two after them
        self.broken_by = ""  # what has interrupted an update between two of its passes
        self._every = tuple(range(len(self.engines)))
        self.places = {part: tuple(places) for part, places in self.places.items()}
        home = type(self.home)
        self.has_masters = bool(self.masters)
        self.follows = self.has_masters or home.sync_masters is not StateMemory.sync_masters
        """Whether masters or offloaded copies follow what other code writes to parameters."""
        self._home_finishes = home.finish is not StateMemory.finish
        self.norm_sources: list[DeviceEngine | JointNorm] = list(dict.fromkeys(e.norm_source for e in self.engines))
        self.sums_in_tiles = len(self.norm_sources) == 1 and all(
            e.norm_weight == 1 for engine in self.engines for e in engine.entries
        )
        """Whether the launch of the decision may add up the tiles of the norm pass; the first such step finds out."""
        sources = self.norm_sources
        has_own_sums = home.power_sums is not StateMemory.power_sums
        # Not a bound method of this plan: that would be a circle, which delays the release of memory.
        self.power_sum: Callable[[], torch.Tensor] = (
            sources[0].norm if len(sources) == 1 and not has_own_sums else partial(_power_sum, self.home, sources)
        )
        """The sum of squares of this rank's gradients, float64[1], on a device that is not the CPU if there is one."""
        alone = sources[0] if len(sources) == 1 and not has_own_sums else None
        self.norm_engine = alone if isinstance(alone, DeviceEngine) else None  # whose norm pass that is
        self.built_ahead: set[bool] = set()  # whether kernels of steps that unscale, or do not, were built together
        self.kind: Any = None  # the kind of the last step's decision, as far as passes depend on it
        self.decided_plainly = False  # whether control numbers are those of a step that does not clip, scale or skip

    def fit(self, optimizer: Optimizer) -> bool:
        """Whether these are the optimizer's groups, parameters and states, and no dormant one has a gradient."""
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]
        state = vars(optimizer)["state"]
        same = self.engines[0].table.same_list if self.engines else same_list
        return (
            state is self.state
            and state.count.changes == self.state_changes
            and same(groups, self.groups)
            and same(params, self.params)
            and not (self.dormant and any(param.grad is not None for param in self.dormant))
            and not (self.unreal and any(not param.is_meta and not is_fake(param) for param in self.unreal))
        )

    @property
    def leaves_out_training(self) -> bool:
        """Whether a parameter that trains has no gradient yet, so that a graph would leave it out forever."""
        return any(param.requires_grad and not is_lazy(param) and not param.is_meta for param in self.dormant)

    def same_groups(self, optimizer: Optimizer) -> bool:
        """The part of `fit` that needs no look at every parameter."""
        groups, state = optimizer.param_groups, vars(optimizer)["state"]
        same_count = sum([len(group["params"]) for group in groups]) == len(self.params)
        same_state = state is self.state and state.count.changes == self.state_changes
        return same_count and same_state and same_list(groups, self.groups)

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """For each engine the gradients of its entries; of DTensors the local parts."""
        return self.home.gradients(self.members, [self.gradients_at(place) for place in self._every])

    def gradients_at(self, place: int, find: Callable[[torch.Tensor], Any] = _GRAD) -> list[torch.Tensor | None]:
        """The gradients of one engine's entries; of DTensors the local parts."""
        gradients = list(map(find, self.members[place]))
        return self.sources[place].parts(gradients) if self.sources else gradients

    def refresh(
        self,
        places: Sequence[int] | None = None,
        find: Callable[[torch.Tensor], Any] = _GRAD,
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
        if optimizer is not None and not self.fit(optimizer):
            raise Stale
        norm = inputs is not None and inputs.needs_norm and self.sums_in_tiles and self.ranks is None
        unmoved = unmoved and self.home.on_device
        if self.home.looks_at_gradients and not gradients:
            # All of them are copied to the host together.
            gradients = self.gradients()
        for place in self._every if places is None else places:
            engine = self.engines[place]
            table, threads = engine.table, engine.looking_threads if engine.is_large else 1
            if unmoved and table.finds and table.is_uploaded and table.look(threads) == SAME:
                continue
            unmoved = False
            given = gradients[place] if gradients else None
            if given is None and not (table.finds and find is _GRAD):
                given = self.gradients_at(place, find)
            engine.gradients = given or ()
            if table.refresh(given, threads) == CHANGED:
                engine.inspect(self.gradients_at(place, find) if given is None else given)
                self.active_set_changed = True
            elif norm and len(self.engines) == 1:
                engine.start_norm()
        for place in self._every if places is None else places:
            engine = self.engines[place]
            for own in engine.group_numbers:
                if own.is_mutable or not all(map(operator.is_, map(own.value_of, own.keys), own.values)):
                    engine.push_hypers()
                    break
            if engine.has_device_hypers:
                engine.refresh_device_hypers()
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
        try:
            if self.follows and counts_versions:
                self.sync_masters()
            if inputs is not None or not self.decided_plainly:
                optimizer.control.update_control(optimizer, self, inputs)
            measures = reports is not None and reports.begin(self.engines)
            gradients = [engine.gradients for engine in self.engines] if self.repeat_updates else ()
            self.update(self._every, marked=marked, counts_versions=counts_versions, measures=measures)
            # Parameters that a group lists several times are updated as often, as by torch.
            for again in self.repeat_updates:
                own = [
                    [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                    for params, of_engine in zip(self.members, gradients)
                ]
                self.refresh(gradients=own)
                self.update(self._every, counts_versions=True)
            if self.follows and counts_versions:
                self.record_versions()
            if reports is not None:
                reports.finish()
        except BaseException:
            self.release()
            if self.follows and len(self.progress) == _WHOLE:
                self.record_versions()
            raise

    def update(
        self, places: tuple[int, ...], *, counts_versions: bool, marked: bool = True, measures: bool = False
    ) -> None:
        """Run the passes of some engines, whose step is prepared and decided."""
        engines = self.engines if places is self._every else [self.engines[place] for place in places]
        calls = self._calls.get(places) or self.calls_of(places)
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
            if len(self.progress) not in (0, _WHOLE) and not any(engine.captured for engine in engines):
                self.broken_by, self.state_changes = type(error).__name__, -1
            raise
        finally:
            for engine in engines:
                engine.table.release()

    def without_gradients(self) -> Iterator[torch.Tensor]:
        """What has no gradient of all that this rank may update."""
        return (one for one in chain(self.dormant, self.unreal, *self.members) if one.grad is None)

    def require_unbroken(self) -> None:
        """Raise if an update was interrupted between two of its passes; such a plan fits no more."""
        if self.broken_by:
            raise StateError(
                f"{self.broken_by} has interrupted a step between two of its passes: some numbers are those of after "
                "it, others of before. Load a checkpoint of model and optimizer; "
                "optimizer.load_state_dict(optimizer.state_dict()) goes on with what is there"
            )

    def calls_of(self, places: Sequence[int]) -> Calls:
        """The calls of the passes of some engines, in order; made once."""
        calls = self._calls.get(tuple(places))
        if calls is None:
            shared = [self.shared_sums[place] for place in places] if self.shared_sums else ()
            engines = [self.engines[place] for place in places]
            calls = self._calls[tuple(places)] = pass_calls(engines, shared, self.progress)
        return calls

    def release(self) -> None:
        """Release gradients that were held for a step."""
        for engine in self.engines:
            engine.release()
            engine.table.release()

    def sync_masters(self) -> None:
        """Apply what other code has written to parameters since the last step and kernels do not see."""
        self.home.sync_masters()
        if not self.masters.writes.are_none():
            self.home.wait()
            self.masters.follow()

    def record_versions(self) -> None:
        """Remember the versions of the parameters after a step."""
        self.home.note_parameters()
        self.masters.writes.note()


def _power_sum(home: StateMemory, sources: Sequence[DeviceEngine | JointNorm]) -> torch.Tensor:
    return combined(home.power_sums(sources))


_WHOLE = 2  # numbers of progress after the passes of an update
