"""From param groups to engines: check parameters, make their state, sort them into segments."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.spec import KernelSpec
from ..compat import local_parts
from ..engine import DeviceEngine, Entry, grad_dtype, kernel_spec, run_passes
from ..errors import MatrixError
from ..graph import Graph
from ..placements import (
    Agreement,
    Exchanges,
    LocalGradients,
    SharedSums,
    checked_part,
    distribute,
    is_distributed,
    is_whole,
    local_state,
)
from ..placements.local import local_part
from ..rules import Rule
from .homes import StateHome
from .overlap import check_not_shared
from .parameters import check_parameter, labelled, param_states
from .parts import build_engines
from .scan import Scan
from .specs import graph_of
from .states import MASTER, Later, begin_missing, compute_dtype, follow_parameter, initial_state, storages
from .watched_state import WatchedState

if TYPE_CHECKING:
    from .optimizer import Optimizer

__all__ = ["Tables", "build_tables", "check_parameter", "labelled", "param_states"]

_GRAD = operator.attrgetter("grad")


OWN_KEYS = ("max_grad_norm", "master_weights", "rule")
"""Keys of a param group that the optimizer reads itself, for any rule."""


@dataclass
class Tables:
    """What a step works on, made for the param groups and the state as they were.

    Args:
        engines: one for each device, or for each of the parts that are stepped by themselves there.
        members: for each engine its parameters, in the order of its entries.
        dormant: parameters without gradient that need none so far: frozen ones, and those still on the meta device.
            They have no state, as in torch.
        groups: the param groups.
        params: every parameter.
        state: the optimizer's state.
        state_changes: how often its entries had been replaced.
        masters: each low-precision parameter with its master.
        versions: sum of these parameters' versions after the last step.
        agreement: the ranks that decide steps together, if some parameters are DTensors.
        local_gradients: then for each engine what finds the local parts of its gradients.
        shared_sums: then for each engine what combines reductions over one tensor.
        scan: the quick look at all tensors, once there is one.
        places: for each part, see `Optimizer._part_of`, the places of its engines.
        home: where the state lives.
    """

    engines: list[DeviceEngine]
    members: list[list[torch.Tensor]]
    dormant: list[torch.Tensor]
    groups: list[dict[str, Any]]
    params: list[torch.Tensor]
    state: Any
    state_changes: int
    masters: list[tuple[torch.Tensor, torch.Tensor]]
    versions: int | None = None
    agreement: Agreement | None = None
    local_gradients: Sequence[LocalGradients] = ()
    shared_sums: Sequence[SharedSums] = ()
    scan: Scan | None = None
    places: dict[Any, list[int]] = field(default_factory=dict)
    home: StateHome = field(default_factory=StateHome)

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
        if not known or any(param.grad is not None for param in self.dormant) or not self.scan.look(self):
            self.scan = None
            return False
        for engine in self.engines:
            engine.prepare_scanned(norm=norm and len(self.engines) == 1)
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
            and not any(param.grad is not None for param in self.dormant)
            and (self.agreement is None or self._same_parts())
        )

    def _same_parts(self) -> bool:
        """Whether DTensors still have the local parts that the tables describe; a model that is moved gets others."""
        return all(
            _same(list(map(self.home.part, params, local_parts(params))), engine.params)
            for params, engine in zip(self.members, self.engines)
        )

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
        return gradients if self.agreement is None else self.local_gradients[place].parts(gradients)

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

    def same_versions(self) -> bool:
        """Whether nobody has written to a parameter that has a master since the last step."""
        return not self.masters or self._versions() == self.versions

    def follow_parameters(self) -> None:
        """Take over into the masters what somebody else has written to their parameters since the last step."""
        self.home.follow_parameters()
        if not self.same_versions():
            self.home.wait()
            for param, master in self.masters:
                follow_parameter(local_part(master), local_part(param))

    def note_versions(self) -> None:
        """Remember that the parameters are now as the step left them."""
        self.home.note_parameters()
        if self.masters:
            self.versions = self._versions()

    @contextmanager
    def own_writes(self) -> Iterator[None]:
        """A block that writes parameters with their masters."""
        before = self._versions() if self.masters else 0
        yield
        if self.masters and self.versions is not None:
            self.versions += self._versions() - before

    def _versions(self) -> int:
        # Versions only grow: no version has changed if their sum has not. A DTensor and its part have one each.
        params = [param for param, _ in self.masters]
        parts = local_parts(params) if self.agreement is not None else []
        return sum([param._version for param in params]) + sum([part._version for part in parts])


def _changes(state: Any) -> int:
    return state.changes


def _all_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's garbage collector.

    Ten thousand parameters' records are all kept, and would set it off several times over the whole heap: with torch
    imported that took longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def build_tables(optimizer: Optimizer) -> Tables:
    """Engines for an optimizer's parameters as they are now; its state is made complete on the way.

    Raises:
        GradientError: for parameters that cannot be updated in place.
        StateError: for state that has another shape than its parameter.
    """
    if not isinstance(optimizer.state, WatchedState):
        optimizer.state = WatchedState(dict, optimizer.state)
    home = optimizer._home
    home.begin([(label, p) for label, _, _, p in labelled(optimizer) if not _is_dormant(p, optimizer.state)])
    parts: dict[torch.device, dict[int, tuple[KernelSpec, list[Entry]]]] = {}
    members: dict[int, torch.Tensor] = {}
    dormant: list[torch.Tensor] = []
    plans: dict[tuple[Any, ...], tuple[Graph, KernelSpec]] = {}
    by_shape: set[tuple[Any, ...]] = set()
    planned: list[tuple[str, int, torch.Tensor, Graph, KernelSpec, dict[str, Any]]] = []
    later: Later = {}
    exchanges, shared = Exchanges(), dict[torch.Tensor, Any]()
    for label, group_index, group, param in labelled(optimizer):
        if _is_dormant(param, optimizer.state):
            dormant.append(param)
            continue
        part = home.part(param, checked_part(label, param))
        check_parameter(part, label)
        rule = optimizer.rule_of(group)
        like = _as_a_whole(optimizer, param)
        kind = (group_index, like.dim(), param.dtype, grad_dtype(param), part.device.type)
        alike = (*kind, like.shape) if kind in by_shape else kind
        if alike not in plans:
            graph = _graph_of(label, rule, group, like)
            if graph.branches_on_sizes:
                by_shape.add(kind)
                alike = (*kind, like.shape)
            spec = kernel_spec(graph, storages(part, group, graph), compute_dtype(part), part.device.type)
            plans[alike] = graph, spec
        graph, spec = plans[alike]
        if spec.program.library.scratch and not is_whole(param):
            shared[param] = exchanges.add(label, param, everywhere=bool(graph.matrix_states))
        apart = {*graph.scalar_states, *graph.matrix_states}
        buffers, before = {MASTER, *rule.state_names} - apart, optimizer.state.get(param, {})
        known = local_state(label, before, param, buffers, graph.slice_states, graph.matrix_states)
        state = initial_state(label, part, group, graph, rule, known, later, home, param.shape)
        planned.append((label, group_index, param, graph, spec, state))
    fresh = sum(one.source is None for one in later.get(MASTER, ()))
    begin_missing(later, home)
    sharded = [(label, param) for label, _, param, *_ in planned if is_distributed(param)]
    agreement = Agreement(sharded) if sharded else None
    for label, group_index, param, graph, spec, state in planned:
        part = home.part(param, local_part(param))
        optimizer.state[param] = _distributed(state, param, graph)
        scratch = spec.program.library.scratch
        own = [array.name for array in spec.arrays if array.name not in scratch]
        squares = {name: state[name] for name in graph.matrix_states}
        arrays = {name: part if name == "param" else state[name] for name in own}
        scalars = {name: state[name] for name in ("step", *graph.scalar_states)}
        whole = optimizer._whole_of(param) if part is param else param
        entry = Entry(label, part, arrays, scalars, group_index, whole)
        entry.matrices, entry.exchange = squares, shared.get(param)
        entry.share = 1.0 if agreement is None else agreement.share(param)
        home.arrange(spec, entry)
        members[id(entry)] = param
        parts.setdefault(part.device, {}).setdefault(id(spec), (spec, []))[1].append(entry)
    for by_spec in parts.values():
        check_not_shared([(entry.label, entry.param) for _, entries in by_spec.values() for entry in entries])
    keys = [(*optimizer.rule_of(group).hyperparameters, *OWN_KEYS) for group in optimizer.param_groups]
    by_device = {device: list(by_spec.values()) for device, by_spec in parts.items()}
    engines, places = build_engines(optimizer, by_device, members, keys)
    for engine in engines:
        for entry in engine.entries:
            optimizer.state[members[id(entry)]].update({**entry.scalars, **entry.matrices})
    tables = Tables(
        engines=engines,
        members=[[members[id(entry)] for entry in engine.entries] for engine in engines],
        dormant=dormant,
        groups=list(optimizer.param_groups),
        params=[param for group in optimizer.param_groups for param in group["params"]],
        state=optimizer.state,
        state_changes=optimizer.state.changes,
        masters=[(param, state[MASTER]) for param, state in param_states(optimizer) if MASTER in state],
        agreement=agreement,
        places=places,
        home=home,
    )
    if fresh == len(tables.masters):
        tables.note_versions()
    if agreement is not None:
        tables.local_gradients = [
            LocalGradients([entry.label for entry in engine.entries], params)
            for engine, params in zip(engines, tables.members)
        ]
        tables.shared_sums = [SharedSums(agreement, engine.segments) for engine in engines]
    return tables


def _distributed(state: dict[str, Any], param: torch.Tensor, graph: Graph) -> dict[str, Any]:
    """A parameter's state as users see it: buffers of a DTensor are DTensors, numbers are plain tensors."""
    if not is_distributed(param):
        return state
    buffers = {MASTER, *graph.states}.difference(graph.scalar_states, graph.matrix_states)
    overs = graph.slice_states
    return {
        name: distribute(value, param, overs.get(name)) if name in buffers else value for name, value in state.items()
    }


def _as_a_whole(optimizer: Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The parameter, or what it is a piece of."""
    whole = optimizer._whole_of(param)
    return param if whole is None else whole


def _graph_of(label: str, rule: Rule, group: dict[str, Any], param: torch.Tensor) -> Graph:
    try:
        return graph_of(rule, group, param.shape)
    except MatrixError as error:
        raise MatrixError(
            f"{label} of shape {tuple(param.shape)} is not a matrix, and {rule.name} works on matrices only; give it "
            "to another rule, in a param group of its own: tilestep.muon_groups(model) makes such groups"
        ) from error


def _is_dormant(param: torch.Tensor, state: Any) -> bool:
    return param.is_meta or (not param.requires_grad and param.grad is None and param not in state)
