"""What a step works on: an optimizer's engines, and whether they are still those of its parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from .. import native
from ..compat import DTENSOR_PARTS, distributed_tensor_type, dtensors_have_parts, is_fake, local_parts
from ..devices import is_host
from ..engine import DeviceEngine, JointNorm, Stale, StepInputs, pass_calls, run_marked
from ..engine.gradients import copy_to
from ..errors import GradientError
from ..pairs import ComplexMembers
from ..placements import Agreement, LocalGradients, SharedSums
from .homes import StateHome
from .masters import Masters
from .parameters import LISTED_TWICE
from .states import begin_again

if TYPE_CHECKING:
    from ..taps import Taps
    from .protocol import Optimizer

_GRAD = operator.attrgetter("grad")


@dataclass
class StepPlan:
    """What a step works on, made for the param groups and the state as they were.

    Args:
        dormant: parameters without gradient that have had none so far, frozen ones, and those still on the meta
            device. They have no state, as in torch.
        unreal: fake parameters, and those on the meta device with a gradient: they have state of their kind and
            nothing to update.
        places: for each part, see `Schedule.part_of`, the places of its engines.
    """

    engines: list[DeviceEngine]  # one for each device, or for each of the parts that are stepped by themselves there
    members: list[list[torch.Tensor]]  # for each engine its parameters, in the order of its entries
    dormant: list[torch.Tensor]
    unreal: list[torch.Tensor]
    groups: list[dict[str, Any]]  # the param groups
    params: list[torch.Tensor]  # every parameter
    state: Any  # the optimizer's state
    state_changes: int  # how often its entries had been replaced
    masters: Masters  # the low-precision parameters whose masters do not show what other code writes to them
    agreement: Agreement | None = None  # the ranks of the meshes, if some parameters are DTensors
    ranks: Any = None  # those that decide steps together, if there are several
    sharers: Any = None  # those that hold parts of the same parameters, if there are several
    local_gradients: Sequence[LocalGradients] = ()  # then for each engine what finds the local parts of its gradients
    shared_sums: Sequence[SharedSums] = ()  # then for each engine what combines reductions over one tensor
    scan: Scan | None = None  # the quick look at all tensors, once there is one
    places: dict[Any, list[int]] = field(default_factory=dict)
    home: StateHome = field(default_factory=StateHome)  # where the state lives
    further_rounds: tuple[frozenset[int], ...] = ()  # see `parameters.further_rounds`
    complex_members: Sequence[ComplexMembers] = ()  # for each engine its complex parameters, if there are any
    ahead: list[torch.Tensor] = field(default_factory=list)  # parameters whose state was made before a step needed it

    def begin_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Let states that were made ahead begin with the values that parameters and groups have at their first step."""
        if not self.ahead:
            return
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
        home = type(self.home)
        self.follows = bool(self.masters) or home.follow_parameters is not StateHome.follow_parameters
        """Whether something follows what other code writes to parameters."""
        self._home_finishes = home.finish is not StateHome.finish
        self.norm_sources: list[DeviceEngine | JointNorm] = list(dict.fromkeys(e.norm_source for e in self.engines))
        self.deciders = list({engine.decider: engine for engine in self.engines}.items())
        """What decides steps on each device, with an engine there."""
        self.sums_in_tiles = len(self.norm_sources) == 1 and all(
            e.norm_share == 1 for each in self.engines for e in each.entries
        )
        """Whether a launch that decides alone may add up the tiles of the norm pass, as far as is known."""
        self._home_sums = home.power_sums is not StateHome.power_sums
        self.built_ahead: set[bool] = set()
        """For which steps kernels were built together: those that unscale, or those that do not."""
        self.kind: Any = None
        """What the last step was decided from, as far as passes must know."""
        self.decided_plainly = False
        """Whether control numbers are those of a step that nothing is asked of, which need not be written again."""

    def scanned(self, optimizer: Optimizer, *, norm: bool) -> bool:
        """Bring every engine up to date by one look at each, if these tables fit and nothing but addresses changed."""
        scan = self.scan
        if scan is None:
            return False
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]
        state = vars(optimizer)["state"]
        if (
            state is not self.state
            or state.count.changes != self.state_changes
            or not scan.same_list(groups, self.groups)
            or not scan.same_list(params, self.params)
            or ((self.dormant or self.unreal) and not self._same_others())
        ):
            return self._look_again()
        for engine, scanner, address, host in scan.looks:
            gradients = engine.gradients
            if not gradients.settled or engine.captured:
                return self._look_again()
            seen = scan.scan(scanner, address, engine.looking_threads if engine.is_large else 1)
            if seen == _CHANGED:
                return self._look_again()
            if host is not None and (seen == _MOVED or not gradients.scanned):
                copy_to(engine.grads, host)
            gradients.scanned = True
        for engine in self.engines:
            if not engine.states.look(engine.looking_threads if engine.is_large else 1):
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

    def power_sum(self) -> torch.Tensor:
        """The sum of squares of this rank's gradients, float64[1], on a device that is not the CPU if there is one."""
        if self._home_sums:
            return total(self.home.power_sums(self.norm_sources))
        sums = [source.norm() for source in self.norm_sources]
        return sums[0] if len(sums) == 1 else total(sums)

    def _look_again(self) -> bool:
        """Have the next look at each tensor say what has changed; False."""
        self.scan = None
        for engine in self.engines:
            engine.gradients.look_again()
        return False

    def repeats(self, optimizer: Optimizer) -> bool:
        """As `scanned` but without a look, for parameters and gradients that are known to be where they were."""
        at_home = self.home.is_beside and all(engine.can_scan for engine in self.engines)
        current = at_home and all(engine.gradients.scanned for engine in self.engines)
        if self.scan is None or not current or not self.same_groups(optimizer):
            return False
        try:
            for engine in self.engines:
                if not engine.states_are_unmoved:
                    return False
                engine.push_hypers()
                engine.refresh_device_hypers()
        except Stale:
            # Whoever looks at everything finds out what has changed.
            return False
        return True

    def fit(self, optimizer: Optimizer) -> bool:
        """Whether these are the optimizer's groups, parameters and states, and no dormant one has a gradient."""
        groups = optimizer.param_groups
        params = _all_params(optimizer)
        return (
            vars(optimizer)["state"] is self.state
            and self.state.changes == self.state_changes
            and _same(groups, self.groups)
            and _same(params, self.params)
            and self._same_others()
            and (self.agreement is None or self._same_parts())
            and all(members.lie_as_before() for members in self.complex_members)
        )

    @property
    def leaves_out_training(self) -> bool:
        """Whether a parameter that trains is left out until it has a gradient; a graph would leave it out for ever."""
        return any(param.requires_grad and not is_lazy(param) and not param.is_meta for param in self.dormant)

    def _same_others(self) -> bool:
        """Whether what is not updated needs no update still."""
        awake = any(param.grad is not None for param in self.dormant)
        return not awake and (not self.unreal or all(param.is_meta or is_fake(param) for param in self.unreal))

    def _same_parts(self) -> bool:
        """Whether DTensors still have the local parts that the tables describe; a model that is moved gets others."""
        for params, engine in zip(self.members, self.engines):
            parts = list(map(self.home.part, params, local_parts(params)))
            if self.complex_members:
                parts = [own if part.is_complex() else part for part, own in zip(parts, engine.params)]
            if not _same(parts, engine.params):
                return False
        return True

    def same_groups(self, optimizer: Optimizer) -> bool:
        """What of `fit` can be seen without looking at every parameter."""
        groups = optimizer.param_groups
        known = sum(len(group["params"]) for group in groups) == len(self.params)
        same_state = vars(optimizer)["state"] is self.state and self.state.changes == self.state_changes
        return known and same_state and _same(groups, self.groups)

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """For each engine the gradients of its entries; of DTensors what lies on this rank."""
        gradients = [self.gradients_at(place) for place in range(len(self.engines))]
        return self.home.gradients(self.members, gradients)

    def gradients_at(self, place: int, find: Callable[[torch.Tensor], Any] = _GRAD) -> list[torch.Tensor | None]:
        """The gradients of one engine's entries; of DTensors what lies on this rank."""
        gradients = list(map(find, self.members[place]))
        if self.agreement is not None:
            gradients = self.local_gradients[place].parts(gradients)
        return self.complex_members[place].real_gradients(gradients) if self.complex_members else gradients

    def start(self, *, norm: bool) -> list[list[torch.Tensor | None]]:
        """Look at the gradients first, so that their norm runs on a GPU while the host checks everything else."""
        gradients = self.gradients()
        for engine, own in zip(self.engines, gradients):
            engine.start(own, norm=norm and len(self.engines) == 1)
        return gradients

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
            return [[]] * len(self.engines)
        known = self.start(norm=norm)
        if not self.fit(optimizer):
            raise Stale
        steady = all(engine.is_steady for engine in self.engines)
        gradients = self.prepare(known)
        self.scan = Scan.of(self) if steady else None
        return gradients

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
        scan = self.scan
        try:
            if self.follows and counts_versions:
                self.follow_parameters()
            if inputs is not None or not self.decided_plainly:
                optimizer.control.decide(optimizer, self, inputs)
            measures = taps is not None and taps.begin(self.engines)
            if scan is None or measures:
                self.update(gradients, self._every, counts_versions=counts_versions)
            else:
                # C++ has looked at the gradients: nothing is handed over, and nothing let go but their memory.
                calls = self._calls.get(self._every) or self.calls_of(self._every)
                if marked:
                    run_marked(calls, self.engines)
                else:
                    for call in calls:
                        call()
                if self._home_finishes:
                    for engine in self.engines:
                        self.home.finish(engine)
                if counts_versions:
                    scan.mark_written()
                for engine in self.engines:
                    if engine.wrote is not None:
                        engine.note_written()
            if self.further_rounds:
                self.run_further_rounds(gradients)
            if self.follows and counts_versions:
                self.note_versions()
            if taps is not None:
                taps.finish()
        finally:
            if scan is not None:
                scan.release()

    def update(
        self, gradients: list[list[torch.Tensor | None]], places: Sequence[int], *, counts_versions: bool
    ) -> None:
        """Update the parameters of prepared and decided engines."""
        engines = [self.engines[place] for place in places]
        for place, engine in zip(places, engines):
            engine.begin(gradients[place])
        run_marked(self.calls_of(tuple(places)), engines)
        for engine in engines:
            engine.finish(counts_versions=counts_versions)
            self.home.finish(engine)

    def calls_of(self, places: tuple[int, ...]) -> list[Callable[[], object]]:
        """What the passes of some engines are, one call after the other; made once."""
        calls = self._calls.get(places)
        if calls is None:
            shared = [self.shared_sums[place] for place in places] if self.shared_sums else ()
            calls = self._calls[places] = pass_calls([self.engines[place] for place in places], shared)
        return calls

    def run_further_rounds(self, gradients: list[list[torch.Tensor | None]]) -> None:
        """Update again the parameters that their group lists several times, as torch does one after the other."""
        for again in self.further_rounds:
            own = [
                [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                for params, of_engine in zip(self.members, gradients)
            ]
            self.prepare(own)
            self.update(own, self._every, counts_versions=True)

    def release(self) -> None:
        """After a step, or one that failed: let go of gradients that were held for it."""
        if self.scan is not None:
            self.scan.release()

    def same_versions(self) -> bool:
        """Whether no other code has written to a parameter of `masters` since the last step."""
        return self.masters.same_versions()

    def follow_parameters(self) -> None:
        """Take over what other code has written to parameters since the last step, where kernels do not see it."""
        self.home.follow_parameters()
        if not self.same_versions():
            self.home.wait()
            self.masters.follow()

    def note_versions(self) -> None:
        """Remember that the parameters are now as the step left them."""
        self.home.note_parameters()
        self.masters.note_versions()

    def own_writes(self, params: Sequence[torch.Tensor] | None = None) -> AbstractContextManager[None]:
        """A block that writes parameters with their masters."""
        return self.masters.own_writes(params)


def _all_params(optimizer: Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def total(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over devices, on one that is not the CPU if there is one."""
    if len(sums) == 1:
        return sums[0]
    home = next((part.device for part in sums if not is_host(part.device)), sums[0].device)
    summed = moved(sums[0], home)
    for part in sums[1:]:
        summed = summed + moved(part, home)
    return summed


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number on another device."""
    # A copy to the CPU that is not waited for may be read before it has arrived.
    return tensor.to(device, non_blocking=not is_host(device))


_MOVED, _CHANGED = 1, 2
"""Answers of a look in C++: gradients are elsewhere; it is left to Python to say what has changed."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Scan:
    """The look before a step as one C++ call a device: all is as it was, or where gradients have moved."""

    def __init__(self, module: Any, engines: Sequence[DeviceEngine], scanners: list[Any]) -> None:
        self.scan, self.same_list = module.scan, module.same_list
        releases = [partial(module.release, scanner) for scanner in scanners]
        self.release: Callable[[], object] = releases[0] if len(releases) == 1 else lambda: [let() for let in releases]
        """Lets go of the gradients' memory that the last look holds: no kernel is going to be given its addresses."""
        self._module, self._scanners, self._engines = module, scanners, engines
        # A look writes every address: where kernels read host memory, into their own table.
        hosts = [np.zeros(len(e.entries), dtype=np.int64) if e.has_device_tables else None for e in engines]
        addresses = [e.grads.data_ptr() if host is None else host.ctypes.data for e, host in zip(engines, hosts)]
        self.looks = list(zip(engines, scanners, addresses, hosts))

    @classmethod
    def of(cls, tables: StepPlan) -> Scan | None:
        """A scan of these tables, if the module is built and knows what there is to know about their tensors."""
        module = native.module(len(tables.params))
        if (
            module is None
            or tables.further_rounds
            or tables.complex_members
            or tables.home.looks_at_gradients
            or not all(engine.can_scan for engine in tables.engines)
        ):
            return None
        known: tuple[Any, ...] = _PLAIN
        if tables.agreement is not None and dtensors_have_parts():
            known = (*_PLAIN, distributed_tensor_type())
        if not all(type(param) in known for params in tables.members for param in params):
            return None
        scanners = [module.create(params, DTENSOR_PARTS) for params in tables.members]
        return None if any(scanner is None for scanner in scanners) else cls(module, tables.engines, scanners)

    def mark_written(self) -> None:
        """Count a version of every parameter that has a gradient, as torch does for what is written in place."""
        for engine, scanner in zip(self._engines, self._scanners):
            self._module.bump(scanner, engine.looking_threads if engine.is_large else 1)
