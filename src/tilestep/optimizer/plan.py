"""What a step works on: an optimizer's engines, and whether they are still those of its parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from .. import native
from ..compat import DTENSOR_PARTS, distributed_tensor_type, dtensors_have_parts, is_fake, local_parts
from ..devices import combined
from ..errors import GradientError
from ..memory.memory import StateMemory
from ..placement import LocalGradients, ReductionGroup, SharedSums
from ..placement.local import ComplexMembers
from ..runtime import DeviceEngine, JointNorm, Stale, StepInputs, pass_calls, run_marked
from ..runtime.gradients import copy_to
from ..taps import Taps
from .masters import Masters
from .parameters import LISTED_TWICE, Optimizer
from .states import begin_again

_GRAD = operator.attrgetter("grad")


@dataclass
class StepPlan:
    """What a step works on, made for the param groups and the state as they were."""

    engines: list[DeviceEngine]  # one for each device, or for each of the parts that are stepped by themselves there
    members: list[list[torch.Tensor]]  # for each engine its parameters, in the order of its entries
    dormant: list[torch.Tensor]
    unreal: list[torch.Tensor]
    groups: list[dict[str, Any]]  # the param groups
    params: list[torch.Tensor]  # every parameter
    state: Any  # the optimizer's state
    state_changes: int  # how often its entries had been replaced
    masters: Masters  # the low-precision parameters whose masters do not show what other code writes to them
    mesh_ranks: ReductionGroup | None = None  # the ranks of the meshes, if some parameters are DTensors
    ranks: Any = None  # those that decide steps together, if there are several
    sharers: Any = None  # those that hold parts of the same parameters, if there are several
    local_gradients: Sequence[LocalGradients] = ()  # then for each engine what finds the local parts of its gradients
    shared_sums: Sequence[SharedSums] = ()  # then for each engine what combines reductions over one tensor
    scans: dict[int, Scan] = field(default_factory=dict)  # for places of engines the quick look at all their tensors
    places: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    home: StateMemory = field(default_factory=StateMemory)  # where the state lives
    further_rounds: tuple[frozenset[int], ...] = ()  # see `parameters.further_rounds`
    complex_members: Sequence[ComplexMembers] = ()  # for each engine its complex parameters, if there are any
    controls: Sequence[Any] = ()  # for each device its `control.DeviceControl`
    ahead: list[torch.Tensor] = field(default_factory=list)  # parameters whose state was made before a step needed it

    def begin_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Let states that were made ahead begin with the values that parameters and groups have at their first step."""
        first = {id(param) for param in self.ahead if all_of_them or param.grad is not None}
        if not first:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in first:
                    begin_again(self.state[param], optimizer.rule_of(group), param, group)
                    self.state[param].is_ahead = False
        self.ahead = [param for param in self.ahead if id(param) not in first]

    def __post_init__(self) -> None:
        self._calls: dict[tuple[int, ...], list[Callable[[], object]]] = {}
        self._every = tuple(range(len(self.engines)))
        self.places = {part: tuple(places) for part, places in self.places.items()}
        self.no_gradients: list[list[torch.Tensor | None]] = [[] for _ in self.engines]
        """What stands for gradients at which C++ has looked."""
        home = type(self.home)
        self.has_masters = bool(self.masters)
        self.follows = self.has_masters or home.sync_masters is not StateMemory.sync_masters
        """Whether something follows what other code writes to parameters."""
        self._home_finishes = home.finish is not StateMemory.finish
        self.norm_sources: list[DeviceEngine | JointNorm] = list(dict.fromkeys(e.norm_source for e in self.engines))
        self.sums_in_tiles = len(self.norm_sources) == 1 and all(
            e.norm_share == 1 for engine in self.engines for e in engine.entries
        )
        """Whether a launch that decides alone may add up the tiles of the norm pass, as far as is known."""
        sources = self.norm_sources
        has_own_sums = home.power_sums is not StateMemory.power_sums
        # No method of its own: its memory would come back when garbage is collected, and not when it is let go.
        self.power_sum: Callable[[], torch.Tensor] = (
            sources[0].norm if len(sources) == 1 and not has_own_sums else partial(_power_sum, self.home, sources)
        )
        """The sum of squares of this rank's gradients, float64[1], on a device that is not the CPU if there is one."""
        alone = sources[0] if len(sources) == 1 and not has_own_sums else None
        self.norm_engine = alone if isinstance(alone, DeviceEngine) else None  # whose norm pass that is
        self.same_list: Callable[[Any, Any], bool] = _same
        """Whether two lists hold the same objects; C++'s own once there is one."""
        self.built_ahead: set[bool] = set()  # whether kernels of steps that unscale, or do not, were built together
        self.kind: Any = None  # what the last step was decided from, as far as passes must know
        self.decided_plainly = False  # whether control numbers are those of a step that nothing is asked of

    @property
    def scan(self) -> dict[int, Scan] | None:
        """The quick looks at all tensors, if there is one for every engine."""
        return self.scans if len(self.scans) == len(self.engines) else None

    def scanned(self, optimizer: Optimizer, *, norm: bool) -> bool:
        """Bring every engine up to date by one look at each, if this plan fits and nothing but addresses changed."""
        complete = self.scans and len(self.scans) == len(self.engines)
        if not complete or (self._fits_lists(optimizer) and self.check_unchanged(self._every, norm=norm)):
            return bool(complete)
        # The next look at each tensor says what has changed.
        self.scans.clear()
        for engine in self.engines:
            engine.gradients.invalidate()
        return False

    def check_unchanged(self, places: Sequence[int], *, norm: bool = False, unmoved: bool = False) -> bool:
        """Bring engines up to date by one look at each in C++, if nothing but addresses and numbers has changed."""
        for place in places:
            scan, engine = self.scans.get(place), self.engines[place]
            gradients = engine.gradients
            if scan is None or not gradients.settled or engine.captured:
                return False
            threads = engine.looking_threads if engine.is_large else 1
            if unmoved:
                if not gradients.scanned:
                    return False
            else:
                try:
                    seen = scan.check_unchanged(threads)
                    if seen == _CHANGED:
                        del self.scans[place]
                        gradients.invalidate()
                        return False
                    if scan.host is not None and (seen == _MOVED or not gradients.scanned):
                        copy_to(engine.grads, scan.host)
                    gradients.scanned = True
                except BaseException:  # as of Ctrl-C: C++ knows addresses that the table may not have
                    self.scans.pop(place, None)
                    gradients.invalidate()
                    raise
            if not engine.states.look(threads):
                raise Stale("state was given other memory")
            if norm:
                engine.start_norm()
            for watch in engine.group_watches:
                if watch.is_mutable or not all(map(operator.is_, map(watch.value_of, watch.keys), watch.values)):
                    engine.push_hypers()
                    break
            if engine.has_device_hypers:
                engine.refresh_device_hypers()
        return True

    def repeats(self, optimizer: Optimizer) -> bool:
        """As `scanned` but without a look, for parameters and gradients that are known to be where they were."""
        if not self.home.is_beside or len(self.scans) != len(self.engines) or not self.same_groups(optimizer):
            return False
        try:
            return self.check_unchanged(self._every, unmoved=True)
        except Stale:
            # A look at everything finds out what has changed.
            return False

    def fit(self, optimizer: Optimizer, *, parts: bool = True) -> bool:
        """Whether these are the optimizer's groups, parameters and states, and no dormant one has a gradient."""
        return (
            self._fits_lists(optimizer)
            and (not parts or self.mesh_ranks is None or self._same_parts(self._every))
            and (not self.complex_members or all(members.lie_as_before() for members in self.complex_members))
        )

    def _fits_lists(self, optimizer: Optimizer) -> bool:
        """What of `fit` lists and counts tell."""
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]
        state, same = vars(optimizer)["state"], self.same_list
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
        """Whether a parameter that trains is left out until it has a gradient; a graph would leave it out for ever."""
        return any(param.requires_grad and not is_lazy(param) and not param.is_meta for param in self.dormant)

    def _same_parts(self, places: Sequence[int]) -> bool:
        """Whether DTensors still have the local parts that the tables describe; a model that is moved gets others."""
        for place in places:
            params, engine = self.members[place], self.engines[place]
            parts = list(map(self.home.part, params, local_parts(params)))
            if self.complex_members:
                parts = [own if part.is_complex() else part for part, own in zip(parts, engine.params)]
            if not _same(parts, engine.params):
                return False
        return True

    def same_groups(self, optimizer: Optimizer) -> bool:
        """What of `fit` can be seen without looking at every parameter."""
        groups, state = optimizer.param_groups, vars(optimizer)["state"]
        same_count = sum([len(group["params"]) for group in groups]) == len(self.params)
        return (
            same_count
            and state is self.state
            and state.count.changes == self.state_changes
            and self.same_list(groups, self.groups)
        )

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """For each engine the gradients of its entries; of DTensors what lies on this rank."""
        gradients = [self.gradients_at(place) for place in range(len(self.engines))]
        return self.home.gradients(self.members, gradients)

    def gradients_at(self, place: int, find: Callable[[torch.Tensor], Any] = _GRAD) -> list[torch.Tensor | None]:
        """The gradients of one engine's entries; of DTensors what lies on this rank."""
        gradients = list(map(find, self.members[place]))
        if self.mesh_ranks is not None:
            gradients = self.local_gradients[place].parts(gradients)
        return self.complex_members[place].real_gradients(gradients) if self.complex_members else gradients

    def prepare(self, gradients: list[list[torch.Tensor | None]] | None = None) -> list[list[torch.Tensor | None]]:
        """Bring every engine up to date; nothing is updated yet."""
        gradients = self.gradients() if gradients is None else gradients
        for engine, own in zip(self.engines, gradients):
            engine.prepare(own)
        return gradients

    def refresh(self, optimizer: Optimizer, inputs: StepInputs | None) -> list[list[torch.Tensor | None]]:
        """Bring every engine up to date for the coming step; nothing is updated yet."""
        norm = inputs is not None and inputs.needs_norm and self.sums_in_tiles and self.ranks is None
        if self.scanned(optimizer, norm=norm):
            return self.no_gradients
        gradients = self.gradients()
        for engine, own in zip(self.engines, gradients):
            # First, so that their norm runs on a GPU while the host checks everything else.
            engine.start(own, norm=norm and len(self.engines) == 1)
        if not self.fit(optimizer):
            raise Stale
        self._prepare_steady(self._every, gradients)
        return gradients

    def refresh_places(
        self, places: Sequence[int], find: Callable[[torch.Tensor], Any] = _GRAD
    ) -> list[list[torch.Tensor | None]]:
        """As `refresh` for some engines, of a plan that fits."""
        if find is _GRAD and self.check_unchanged(places):
            return self.no_gradients
        if self.mesh_ranks is not None and not self._same_parts(places):
            raise Stale
        gradients = list(self.no_gradients)
        for place in places:
            gradients[place] = self.gradients_at(place, find)
        self._prepare_steady(places if find is _GRAD else (), gradients)
        for place in () if find is _GRAD else places:
            self.engines[place].prepare(gradients[place])
        return gradients

    def _prepare_steady(self, places: Sequence[int], gradients: list[list[torch.Tensor | None]]) -> None:
        """Prepare engines; those whose gradients are like the last step's are looked at in C++ from now on."""
        for place in places:
            if not self.engines[place].prepare(gradients[place]):
                self.scans.pop(place, None)
            elif scan := Scan.of(self, place):
                self.scans[place] = scan

    def run(
        self,
        optimizer: Optimizer,
        inputs: StepInputs | None,
        gradients: list[list[torch.Tensor | None]],
        *,
        marked: bool,
        counts_versions: bool = True,
        taps: Taps | None = None,
    ) -> None:
        """Take a step of all engines: decide it, then make the calls that its passes are."""
        if self.further_rounds and inputs is not None and inputs.grad_scale is not None:
            raise GradientError(f"{LISTED_TWICE}, and a step unscales a gradient once: list it once")
        try:
            if self.follows and counts_versions:
                self.sync_masters()
            if inputs is not None or not self.decided_plainly:
                optimizer.control.update_control(optimizer, self, inputs)
            measures = taps is not None and taps.begin(self.engines)
            self.update(gradients, self._every, marked=marked, counts_versions=counts_versions, measures=measures)
            # Parameters that their group lists several times are updated as often, as torch does.
            for again in self.further_rounds:
                own = [
                    [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                    for params, of_engine in zip(self.members, gradients)
                ]
                self.prepare(own)
                self.update(own, self._every, counts_versions=True)
            if self.follows and counts_versions:
                self.record_versions()
            if taps is not None:
                taps.finish()
        except BaseException:
            self.release()
            raise

    def update(
        self,
        gradients: list[list[torch.Tensor | None]],
        places: tuple[int, ...],
        *,
        counts_versions: bool,
        marked: bool = True,
        measures: bool = False,
    ) -> None:
        """Update the parameters of some engines, which are prepared and decided: make the calls that passes are."""
        engines = self.engines if places is self._every else [self.engines[place] for place in places]
        calls = self._calls.get(places) or self.calls_of(places)
        looked = gradients is self.no_gradients and not measures
        if not looked:
            for place, engine in zip(places, engines):
                engine.begin(gradients[place])
        try:
            if marked:
                run_marked(calls, engines)
            else:
                for call in calls:
                    call()
            for place, engine in zip(places, engines):
                if not looked:
                    engine.finish(counts_versions=counts_versions)
                elif counts_versions:
                    # C++ has looked at the gradients, and lets go of their memory.
                    self.scans[place].mark_written(engine.looking_threads if engine.is_large else 1)
                    if engine.wrote is not None:
                        engine.note_written()
                if self._home_finishes:
                    self.home.finish(engine)
        finally:
            for place in places:
                if place in self.scans:
                    self.scans[place].release()

    def calls_of(self, places: Sequence[int]) -> list[Callable[[], object]]:
        """What the passes of some engines are, one call after the other; made once."""
        calls = self._calls.get(tuple(places))
        if calls is None:
            shared = [self.shared_sums[place] for place in places] if self.shared_sums else ()
            calls = self._calls[tuple(places)] = pass_calls([self.engines[place] for place in places], shared)
        return calls

    def release(self) -> None:
        """After a step, or one that failed: let go of gradients that were held for it."""
        for scan in self.scans.values():
            scan.release()

    def sync_masters(self) -> None:
        """Take over what other code has written to parameters since the last step, where kernels do not see it."""
        self.home.sync_masters()
        if not self.masters.same_versions():
            self.home.wait()
            self.masters.follow()

    def record_versions(self) -> None:
        """Remember that the parameters are now as the step left them."""
        self.home.note_parameters()
        self.masters.record_versions()


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _power_sum(home: StateMemory, sources: Sequence[DeviceEngine | JointNorm]) -> torch.Tensor:
    return combined(home.power_sums(sources))


_MOVED, _CHANGED = 1, 2  # answers of a look in C++: gradients are elsewhere; Python must say what has changed
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Scan:
    """The look before a step at one device's tensors as a call in C++: all is as it was, or gradients have moved."""

    def __init__(self, module: Any, engine: DeviceEngine, scanner: Any) -> None:
        # A look writes every address: where kernels read host memory, into their own table.
        self.host = np.zeros(len(engine.entries), dtype=np.int64) if engine.has_device_tables else None
        address = engine.grads.data_ptr() if self.host is None else self.host.ctypes.data
        self.check_unchanged: Callable[[int], int] = partial(module.scan, scanner, address)  # with so many threads
        self.release: Callable[[], object] = partial(module.release, scanner)
        """Lets go of the gradients' memory that the last look holds: no kernel is going to be given its addresses."""
        self.mark_written: Callable[[int], object] = partial(module.bump, scanner)
        """Counts a version of every parameter that has a gradient, as torch does for what is written in place."""

    @classmethod
    def of(cls, plan: StepPlan, place: int) -> Scan | None:
        """A scan of an engine's tensors, if the module is built and knows what there is to know about them."""
        module, engine, params = native.module(len(plan.params)), plan.engines[place], plan.members[place]
        if (
            module is None
            or plan.further_rounds
            or plan.complex_members
            or plan.home.looks_at_gradients
            or not engine.can_scan
        ):
            return None
        types: tuple[Any, ...] = _PLAIN
        if plan.mesh_ranks is not None and dtensors_have_parts():
            types = (*_PLAIN, distributed_tensor_type())
        scanner = module.create(params, DTENSOR_PARTS) if all(type(param) in types for param in params) else None
        if scanner is None:
            return None
        plan.same_list = module.same_list
        return cls(module, engine, scanner)
