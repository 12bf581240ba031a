"""What a step works on: an optimizer's engines, and whether they are still those of its parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..compat import is_fake, local_parts
from ..engine import DeviceEngine, Stale, run_passes
from ..pairs import ComplexMembers
from ..placements import Agreement, LocalGradients, SharedSums
from .homes import StateHome
from .masters import Masters
from .scan import Scan
from .states import begin_again

if TYPE_CHECKING:
    from .protocol import Optimizer

__all__ = ["Tables"]

_GRAD = operator.attrgetter("grad")


@dataclass
class Tables:
    """What a step works on, made for the param groups and the state as they were.

    Args:
        engines: one for each device, or for each of the parts that are stepped by themselves there.
        members: for each engine its parameters, in the order of its entries.
        dormant: parameters without gradient that need none so far: frozen ones, and those still on the meta device.
            They have no state, as in torch.
        unreal: fake parameters, and those on the meta device with a gradient: they have state of their kind and nothing
            to update.
        groups: the param groups.
        params: every parameter.
        state: the optimizer's state.
        state_changes: how often its entries had been replaced.
        masters: the low-precision parameters whose masters do not show what other code writes to them.
        agreement: the ranks of the meshes, if some parameters are DTensors.
        ranks: those that decide steps together, if there are several.
        local_gradients: then for each engine what finds the local parts of its gradients.
        shared_sums: then for each engine what combines reductions over one tensor.
        scan: the quick look at all tensors, once there is one.
        places: for each part, see `Optimizer._part_of`, the places of its engines.
        home: where the state lives.
        further_rounds: see `parameters.further_rounds`.
        complex_members: for each engine its complex parameters, if there are any.
        ahead: parameters whose state was made before a step needed it.
    """

    engines: list[DeviceEngine]
    members: list[list[torch.Tensor]]
    dormant: list[torch.Tensor]
    unreal: list[torch.Tensor]
    groups: list[dict[str, Any]]
    params: list[torch.Tensor]
    state: Any
    state_changes: int
    masters: Masters
    agreement: Agreement | None = None
    ranks: Any = None
    local_gradients: Sequence[LocalGradients] = ()
    shared_sums: Sequence[SharedSums] = ()
    scan: Scan | None = None
    places: dict[Any, list[int]] = field(default_factory=dict)
    home: StateHome = field(default_factory=StateHome)
    further_rounds: tuple[frozenset[int], ...] = ()
    complex_members: Sequence[ComplexMembers] = ()
    ahead: list[torch.Tensor] = field(default_factory=list)

    def begin_states(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Let states that were made ahead begin with the values that parameters and groups have at their first step.

        Args:
            optimizer: the optimizer.
            all_of_them: also those of parameters that have no gradient beside them: a graph makes it.
        """
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

    def scanned(self, optimizer: torch.optim.Optimizer, *, norm: bool) -> bool:
        """Bring every engine up to date by one look at each, if these tables fit and nothing but addresses changed.

        Args:
            optimizer: the optimizer.
            norm: as for `start`.

        Raises:
            Stale: as for `prepare`.
        """
        if self.scan is None:
            return False
        known = self.same_groups(optimizer) and self.scan.same_params(_all_params(optimizer), self.params)
        if not known or not self._same_others() or not self.scan.look(self):
            self.scan = None
            return False
        for engine in self.engines:
            engine.prepare_scanned(norm=norm and len(self.engines) == 1)
        return True

    def repeats(self, optimizer: torch.optim.Optimizer) -> bool:
        """As `scanned` but without a look, for parameters and gradients that are known to be where they were.

        Args:
            optimizer: the optimizer, which decides its steps with other ranks.
        """
        at_home = type(self.home) is StateHome and all(engine.can_scan for engine in self.engines)
        if self.scan is None or not at_home or not self.scan.is_current(self) or not self.same_groups(optimizer):
            return False
        try:
            for engine in self.engines:
                engine.prepare_scanned(norm=False)
        except Stale:
            # Whoever looks at everything finds out what has changed.
            return False
        return True

    def fit(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the optimizer's groups, parameters and states, and no dormant one has a gradient."""
        groups = optimizer.param_groups
        params = _all_params(optimizer)
        return (
            vars(optimizer)["state"] is self.state
            and _changes(self.state) == self.state_changes
            and _same(groups, self.groups)
            and _same(params, self.params)
            and self._same_others()
            and (self.agreement is None or self._same_parts())
            and all(members.lie_as_before() for members in self.complex_members)
        )

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

    def same_groups(self, optimizer: torch.optim.Optimizer) -> bool:
        """What of `fit` can be seen without looking at every parameter."""
        groups = optimizer.param_groups
        known = sum(len(group["params"]) for group in groups) == len(self.params)
        same_state = vars(optimizer)["state"] is self.state and _changes(self.state) == self.state_changes
        return known and same_state and _same(groups, self.groups)

    def gradients(self) -> list[list[torch.Tensor | None]]:
        """For each engine the gradients of its entries; of DTensors what lies on this rank."""
        gradients = [self.gradients_at(place) for place in range(len(self.engines))]
        return self.home.gradients(self.members, gradients)

    def gradients_at(self, place: int, find: Callable[[torch.Tensor], Any] = _GRAD) -> list[torch.Tensor | None]:
        """The gradients of one engine's entries; of DTensors what lies on this rank.

        Args:
            place: the engine's.
            find: gives a parameter's gradient, or None.
        """
        gradients = list(map(find, self.members[place]))
        if self.agreement is not None:
            gradients = self.local_gradients[place].parts(gradients)
        return self.complex_members[place].real_gradients(gradients) if self.complex_members else gradients

    def start(self, *, norm: bool) -> list[list[torch.Tensor | None]]:
        """Look at the gradients first, so that their norm runs on a GPU while the host checks everything else.

        Args:
            norm: whether the step needs the norm.

        Returns:
            For each engine the gradients of its entries.
        """
        gradients = self.gradients()
        for engine, own in zip(self.engines, gradients):
            engine.start(own, norm=norm and len(self.engines) == 1)
        return gradients

    def prepare(self, gradients: list[list[torch.Tensor | None]] | None = None) -> list[list[torch.Tensor | None]]:
        """Bring every engine up to date; nothing is updated yet.

        Args:
            gradients: for each engine the gradients of its entries, if they are known.

        Returns:
            For each engine the gradients of its entries.
        """
        gradients = self.gradients() if gradients is None else gradients
        for engine, own in zip(self.engines, gradients):
            engine.prepare(own)
        return gradients

    def run(self, gradients: list[list[torch.Tensor | None]], places: Sequence[int], *, counts_versions: bool) -> None:
        """Update the parameters of prepared and decided engines.

        Args:
            gradients: for each of all engines the gradients of its entries, as `prepare` takes them.
            places: which engines.
            counts_versions: whether nobody else tells autograd which parameters were written.
        """
        engines = [self.engines[place] for place in places]
        for place, engine in zip(places, engines):
            engine.begin(gradients[place])
        run_passes(engines, [self.shared_sums[place] for place in places] if self.shared_sums else ())
        for engine in engines:
            engine.finish(counts_versions=counts_versions)
            self.home.finish(engine)

    def run_further_rounds(self, gradients: list[list[torch.Tensor | None]]) -> None:
        """Update again the parameters that their group lists several times, as torch does one after the other.

        Args:
            gradients: for each engine the gradients of its entries, with which the first round ran.
        """
        for again in self.further_rounds:
            own = [
                [gradient if id(param) in again else None for param, gradient in zip(params, of_engine)]
                for params, of_engine in zip(self.members, gradients)
            ]
            self.prepare(own)
            self.run(own, range(len(self.engines)), counts_versions=True)

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
        """A block that writes parameters with their masters.

        Args:
            params: those that it may write; None for all.
        """
        return self.masters.own_writes(params)


def _changes(state: Any) -> int:
    return state.changes


def _all_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
