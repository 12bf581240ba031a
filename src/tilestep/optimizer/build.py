"""Build engines from param groups: check parameters, create their state, group them into segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..backends.registry import build_passes, load_ahead
from ..compat import PLAIN, fake_mode_is_active, has_memory, is_fake, resolved
from ..devices import upload
from ..devices.garbage import without_collections
from ..errors import GradientError, MatrixError
from ..graph import Graph
from ..kernels.spec import KernelSpec
from ..linalg.views import Cut, Matrices, leading_dims
from ..native.table import Table
from ..placement import (
    LocalGradients,
    MatrixExchange,
    ReductionGroup,
    Share,
    add_matrix,
    checked_part,
    distribute,
    is_distributed,
    is_whole,
    local_state,
)
from ..placement.combinations import FSDP1, refuse, split_kind
from ..placement.local import (
    as_complex,
    as_real,
    first_index,
    local_part,
    logical_coordinates,
    sharded_dims,
)
from ..rules import Rule
from ..rules.protocol import MATRIX_OPTIONS
from ..runtime import READABLE, DeviceEngine, Entry, GradNorm, check_reductions, grad_dtype, is_dense, kernel_spec
from ..runtime.shared_sums import shared_sums
from ..storage import dtype_name, entries_of
from .control import Deciders, DeviceControl
from .groups import check_flags, check_in_group, deciding_keys
from .masters import MASTER_KEYS, Masters, check_master
from .matrices import RuleView, check_cut, check_matrices, check_patterns, matrix_options, matrix_work, rule_views
from .memory import BySpec
from .parameters import (
    Optimizer,
    check_not_shared,
    check_pairs,
    check_parameter,
    iter_params,
    params_of,
    repeat_updates,
    require_one_group,
    shares_of,
)
from .plan import Basis, Hypers, StepPlan
from .sorting import sorted_for
from .states import (
    BufferRequest,
    ParameterState,
    StateTemplate,
    WatchedState,
    check_complex_states,
    check_cut_blocks,
    compute_dtype,
    fill_buffers,
    storages,
)


def graphs_of(optimizer: Optimizer, index: int) -> list[Graph]:
    """Return the distinct graphs of a param group's parameters."""
    group, rule = optimizer.param_groups[index], optimizer.rule_of(optimizer.param_groups[index])
    listed = [(label, param.shape) for label, at, _, param in iter_params(optimizer) if at == index]
    kinds = {(shape, *matrix_options(group, label).items()): (label, shape) for label, shape in listed}
    graphs = [one.graph for label, shape in kinds.values() for one in rule_views(rule, group, shape, label=label)]
    return list({id(graph): graph for graph in graphs}.values())


def spec_of(
    rule: Rule, group: Mapping[str, Any], part: torch.Tensor, shape: torch.Size | None = None, label: str = ""
) -> KernelSpec:
    """Return the kernel spec of a parameter."""
    graph = rule_views(rule, group, part.shape if shape is None else shape, compute_dtype(part), label)[0].graph
    formats = storages(part, group, graph, rule, None, label, shape)
    return kernel_spec(graph, formats, compute_dtype(part), part.device.type)


def _by_spec(pairs: Iterable[tuple[KernelSpec, Entry]]) -> BySpec:
    grouped: dict[int, tuple[KernelSpec, list[Entry]]] = {}
    for spec, entry in pairs:
        grouped.setdefault(id(spec), (spec, []))[1].append(entry)
    return list(grouped.values())


def build_engines(
    optimizer: Optimizer, by_device: Mapping[torch.device, BySpec]
) -> tuple[list[DeviceEngine], dict[Any, tuple[int, ...]]]:
    """Build the engines of each device; also return the indices of each part's engines in the list."""
    memory, part_of = optimizer.memory, optimizer.execution.part_of
    engines: list[DeviceEngine] = []
    places: dict[Any, tuple[int, ...]] = {}
    for device, by_spec in by_device.items():
        pairs = [(spec, entry) for spec, entries in by_spec for entry in entries]
        # A rank without shares still joins the decision, through an engine without tensors.
        divided: dict[Any, list[tuple[KernelSpec, Entry]]] = {} if pairs else {None: []}
        for spec, entry in pairs:
            divided.setdefault(part_of(entry.share.param), []).append((spec, entry))
        control = DeviceControl(device)
        # Split all segments before building any engine.
        cut = [memory.split_segments(_by_spec(own)) for own in divided.values()]
        made = [
            DeviceEngine(device, own, optimizer.param_groups, control, build_passes, memory.on_passes) for own in cut
        ]
        if len(made) > 1:
            # Sum all tensors in their original order: the norm is bitwise the norm of a single engine.
            place_of = {id(entry): at for at, entry in enumerate(one for engine in made for one in engine.entries)}
            order = upload(np.array([place_of[id(entry)] for _, entry in pairs], dtype=np.int64), device)
            joint = GradNorm(device, [entry for _, entry in pairs], [engine.grads for engine in made], order)
            for engine in made:
                engine.norm = joint
        for place, part in enumerate(divided, len(engines)):
            places[part] = (*places.get(part, ()), place)
        engines.extend(made)
    return engines, places


_AT_ONCE = 16
"""Parameters per run of copies from the host, which begins before the next parameters are planned."""

_NUMBERS = (float, int, type(None))


@dataclass
class _Kind:
    """Data shared by all parameters of a kind."""

    views: list[RuleView]
    graph: Graph  # of the parameter, or of its first split; all splits keep the same states
    specs: list[KernelSpec]
    lead: int  # number of leading batch dimensions, if the rule works on matrices
    template: StateTemplate | None = None  # how to initialize their states; made on first use


@dataclass
class Planned:
    """A share to update, before an engine has an entry for it."""

    share: Share
    kind: _Kind
    state: dict[str, Any]  # in the layout of the kernels
    is_fake_or_meta: bool

    def join_exchanges(self, exchanges: dict[Any, MatrixExchange]) -> None:
        """Join the exchanges of matrices that other ranks hold parts of, if the rule needs whole matrices."""
        share, lead, program = self.share, self.kind.lead, self.kind.specs[0].program.matrices
        holder = share.holder
        if not program.scratch or is_whole(holder) or all(dim < lead for dim in sharded_dims(holder)):
            return
        shape = (*share.local.shape[:lead], *holder.shape[lead:])  # this rank's matrices, whole
        share.exchanges = [
            add_matrix(
                exchanges,
                share.label,
                holder,
                lead=lead,
                work=matrix_work(program, share.group, shape, matrices),
                everywhere=bool(self.kind.graph.matrix_states),
                cut=None if matrices is None else matrices.cut,
            )
            for _, matrices in self.kind.views
        ]

    def user_state(self) -> dict[str, Any]:
        """The state as users see it: buffers are DTensors or complex like the parameter, scalars are plain tensors."""
        param, state, graph = self.share.holder, self.state, self.kind.graph
        if (type(param) in PLAIN or not is_distributed(param)) and not param.is_complex():
            return state
        overs, entries = graph.reduced_dims(param.dim()), entries_of(state, graph.states)
        buffers = {*MASTER_KEYS, *graph.states, *entries}.difference(graph.scalar_states, graph.matrix_states)
        return {
            name: distribute(as_complex(value, param), param, overs.get(name), entries.get(name, 1))
            if name in buffers
            else value
            for name, value in state.items()
        }


class Builder:
    """Plans shares; computes graph and kernel spec once per kind of parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.requests = optimizer, list[BufferRequest]()
        self._kinds: dict[tuple[Any, ...], _Kind | None] = {}  # None: the kind depends on the shape as well

    def kind_of(self, share: Share, part: torch.Tensor) -> _Kind:
        """Return the graph and the kernel specs of a parameter; `part` is this rank's part. Cached per kind."""
        label, group, param, kinds = share.label, share.group, share.holder, self._kinds
        if "master_weights" in group:
            check_master(label, part.dtype, group)
        full = param if share.whole is None else share.whole
        shape = torch.Size((*full.shape, 2)) if full.is_complex() else full.shape
        is_split_pair, device = param.is_complex() and is_distributed(param), part.device.type
        base: tuple[Any, ...] = (share.group_index, len(shape), param.dtype, is_split_pair, grad_dtype(param), device)
        if "state_dtype" in group:
            base = (*base, label, shape)
        if any(map(group.get, MATRIX_OPTIONS)) and (options := matrix_options(group, share.listed)):
            base = (*base, *options.items(), shape)
        key = (*base, shape) if kinds.get(base, base) is None else base
        kind = kinds.get(key)
        if kind is None:
            kind = self._new_kind(share, part, shape)
            if kind.views[0].matrices is not None or kind.graph.branches_on_sizes:
                kinds[base], key = None, (*base, shape)
            kinds[key] = kind
        return kind

    def _new_kind(self, share: Share, part: torch.Tensor, shape: torch.Size) -> _Kind:
        label, group, param, optimizer = share.label, share.group, share.holder, self._optimizer
        rule, is_sharded = optimizer.rule_of(group), is_distributed(param)
        try:
            seen = rule_views(rule, group, shape, compute_dtype(part), share.listed)
            if seen[0].matrices is not None:
                check_matrices(share, rule, seen)
        except GradientError as error:
            if param.is_complex():
                check_pairs(label, rule, None, is_sharded=is_sharded)
                raise
            if not isinstance(error, MatrixError):
                raise MatrixError(f"{label} of shape {tuple(shape)}: {error}") from None
            dims = "> 2" if len(shape) > 2 else "!= 2"
            grouped = f'tilestep.param_groups(model, {{lambda name, param: param.dim() {dims}: {{"rule": "AdamW"}}}})'
            raise MatrixError(
                f"{label} of shape {tuple(shape)} is not a matrix, and {rule.name} works on matrices only; put it "
                f"in a param group with another rule, as {grouped if rule.fallback is None else sorted_for(rule)} does"
            ) from error
        graph, matrices = seen[0]
        if param.is_complex():
            # Pairs of real numbers are not matrices.
            check_pairs(label, rule, graph if matrices is None else None, is_sharded=is_sharded)
        own = grad_dtype(part if param.is_complex() else param)
        if own not in READABLE:
            names = ", ".join(map(dtype_name, READABLE))
            raise GradientError(f"{label} has gradients of {own}, by its grad_dtype; supported are {names}")
        formats = storages(part, group, graph, rule, own, share.listed, shape)
        if matrices is not None and matrices.cut is not None:
            check_cut(optimizer, share, rule, seen, formats)
        if is_sharded:
            check_cut_blocks(label, param, formats)
        if param.is_complex():
            check_complex_states(label, formats)
            if optimizer.reports is not None:
                raise GradientError(
                    f"{label} is complex: stats and track_changes support only real parameters; use a "
                    "separate optimizer without them"
                )
        outputs = () if optimizer.reports is None else optimizer.reports.outputs(graph)
        specs = [kernel_spec(one.graph, formats, compute_dtype(part), part.device.type, outputs) for one in seen]
        return _Kind(seen, graph, specs, leading_dims(matrices, shape))

    def planned(
        self,
        shares: Sequence[Share],
        saved: Mapping[Any, Any],
        arrivals: ExitStack,
        live: Mapping[Any, Any] | None = None,
    ) -> list[Planned]:
        """Return the shares with kernels and states, restored from `saved`; `live` is given only for a checkpoint."""
        made: list[Planned] = []
        memory = self._optimizer.memory
        many = _AT_ONCE if saved and live is None and memory.on_device else max(len(shares), 1)
        for begin in range(0, len(shares), many):
            before = len(self.requests)
            made += [
                self._plan(one, saved.get(one.param, {}), None if live is None else live.get(one.param, {}))
                for one in shares[begin : begin + many]
            ]
            fill_buffers(self.requests[before:], memory, arrivals)
        return made

    def _plan(self, share: Share, values: Mapping[str, Any], live: Mapping[str, Any] | None) -> Planned:
        """Return a share with kernels and state; `values` and `live` are the arguments of `StateTemplate.create`."""
        label, group, param, memory = share.label, share.group, share.holder, self._optimizer.memory
        # Plain tensors, the common case, were checked when they were added.
        is_plain = type(param) in PLAIN and not param.is_meta and not param.is_complex()
        local = param if is_plain and live is not None else _checked(self._optimizer, label, param)
        part = local if is_plain else as_real(local)
        share.local = part = part if memory.on_device else memory.part(param, part)
        kind = self.kind_of(share, part)
        graph, template, unreal = kind.graph, kind.template, not is_plain and is_fake_or_meta(local)
        if template is None:
            rule, formats = self._optimizer.rule_of(group), kind.specs[0].storages
            template = kind.template = StateTemplate(part, group, graph, rule, formats)

        def kernel_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
            entries = entries_of(values, template.names)
            wholes = ("step", *graph.scalar_states, *graph.matrix_states)
            overs = graph.reduced_dims(param.dim())
            own = local_state(label, values, param, template.buffers, overs, wholes, entries)
            if not unreal:
                own = {name: value for name, value in own.items() if not is_fake_or_meta(value)}
            if param.is_complex():
                own = {name: as_real(value) if name in template.buffers else value for name, value in own.items()}
            return own

        stored = [*values.values(), *(live or {}).values()]
        if not is_plain or not all(
            [type(value) in _NUMBERS or (type(value) is torch.Tensor and not value.is_meta) for value in stored]
        ):
            values, live = kernel_values(values), None if live is None else kernel_values(live)
        state = template.create(share, values, self.requests, memory, live)
        return Planned(share, kind, state, unreal)


def _cut(entry: Entry) -> Cut | None:
    return None if entry.holds is None else entry.holds.cut


def _local_cut(matrices: Matrices | None, holder: torch.Tensor) -> Cut | None:
    """The rows with matrices, as rows of this rank's part; None for all rows."""
    cut = None if matrices is None else matrices.cut
    if cut is None or not is_distributed(holder):
        return cut
    here = logical_coordinates(holder)[cut.dim].tolist()
    return cut.within(holder.shape[cut.dim], here[0], here[-1] + 1) if here else Cut(cut.dim, 1, 0, 0)


@without_collections()  # ten thousand new objects would start the garbage collector several times
def check_params(optimizer: Optimizer) -> None:
    """Raise for parameters that cannot be updated or traced, before state exists; builds the kernels of the CPU."""
    check_patterns(optimizer.param_groups)
    require_one_group(optimizer)
    build, by_device = Builder(optimizer), dict[torch.device, list[tuple[str, torch.Tensor]]]()
    specs: dict[tuple[int, torch.device], KernelSpec] = {}
    gaps: set[tuple[int, torch.device]] = set()
    memory, state = optimizer.memory, vars(optimizer)["state"]
    for share in shares_of(optimizer):
        if not _is_active(share, state, all_that_train=True):
            continue
        param = share.holder
        if not memory.on_device:
            memory.check(share.label, param)
        part = _checked(optimizer, share.label, param)
        part = as_real(part) if part.is_complex() else part
        kind = build.kind_of(share, part)
        if not is_fake_or_meta(part):
            by_device.setdefault(part.device, []).append((share.label, part))
            for (_, matrices), spec in zip(kind.views, kind.specs):
                cut = _local_cut(matrices, param)
                seen = part if cut is None else cut.of(part.detach())
                key = id(spec), part.device
                specs[key] = spec
                by_rows = spec.program.slices.views or spec.has_blocks
                if not seen.is_contiguous() and (by_rows or not is_dense(seen)):
                    gaps.add(key)
    for key, spec in specs.items():
        load_ahead(spec, key[1], gaps=key in gaps)
    for tensors in by_device.values():
        check_not_shared(tensors)


@without_collections()
def build_plan(optimizer: Optimizer, arrivals: ExitStack, *, ahead: bool) -> StepPlan:
    """Build the engines of the optimizer's current parameters, and create the state that steps need."""
    for index, group in enumerate(optimizer.param_groups):
        check_in_group(index, check_flags, optimizer.rule_of(group), group)
    require_one_group(optimizer)
    state = _watched(optimizer)
    params = params_of(optimizer)
    kept = set(map(id, params))
    for param in [param for param in state if id(param) not in kept]:
        # Its state was created ahead, and it left its param group before any step.
        if isinstance(state[param], ParameterState) and state[param].is_ahead:
            del state[param]
    memory, together = optimizer.memory, creates_all_states(optimizer)
    stepped: list[Share] = []
    dormant: list[torch.Tensor] = []
    for share in shares_of(optimizer):
        if _is_active(share, state, all_that_train=ahead or together):
            stepped.append(share)
        else:
            dormant.append(share.holder)
    memory.on_build([(share.label, share.holder) for share in stepped])
    build, exchanges = Builder(optimizer), dict[Any, MatrixExchange]()
    planned = build.planned(stepped, state, arrivals)
    for one in planned:
        one.join_exchanges(exchanges)
    masters = [one for one in build.requests if one.array.name in MASTER_KEYS]
    fresh = {id(one.state[one.array.name]) for one in masters if one.source is None}
    unreal = [one for one in planned if one.is_fake_or_meta]
    for one in unreal:
        state[one.share.param] = state.entry(one.user_state())
    planned = [one for one in planned if not one.is_fake_or_meta]
    sharded = [(one.share.label, one.share.param) for one in planned if is_distributed(one.share.param)]
    mesh_ranks = ReductionGroup.of_tensors(sharded, optimizer.control.number) if sharded else None
    for one in planned:
        share = one.share
        before = state.get(share.param)
        is_ahead = ahead or (share.holder.grad is None and not together)
        if before:
            is_ahead = isinstance(before, ParameterState) and before.is_ahead
        state[share.param] = state.entry(one.user_state(), is_ahead=is_ahead)
    engines, places = _engines(optimizer, planned, mesh_ranks)
    check_reductions(engines)
    members = [(one.share.holder, one.share.group, one.state) for one in planned]
    groups, table = list(optimizer.param_groups), engines[0].table if engines else Table()
    keys = [deciding_keys(optimizer.rule_of(group)) for group in groups]
    without_values = [one.share.param for one in unreal]
    plan = StepPlan(
        basis=Basis(groups, params, state, state.count.changes, dormant, without_values, table),
        engines=engines,
        hypers=[Hypers(engine, groups, keys) for engine in engines],
        deciders=Deciders(engines, memory),
        masters=Masters(members, fresh, memory),
        memory=memory,
        mesh_ranks=mesh_ranks,
        sharers=mesh_ranks,
        places=places,
        repeat_updates=repeat_updates(optimizer),
        ahead=[one.share for one in planned if state[one.share.param].is_ahead],
    )
    if mesh_ranks is not None:
        sums = [shared_sums(mesh_ranks, engine.passes) for engine in engines]
        plan.shared_sums, plan.deciders.ranks = sums, mesh_ranks
        plan.deciders.sends = bool(exchanges) or any(map(any, sums))
    return plan


@without_collections()
def create_early(optimizer: Optimizer) -> None:
    """Create the states that torch creates in the constructor, for a checkpoint saved before the first step."""
    if creates_all_states(optimizer) or not any(optimizer.rule_of(group).at_once for group in optimizer.param_groups):
        return
    shares = [
        one
        for one in shares_of(optimizer)
        if optimizer.rule_of(one.group).at_once
        and not optimizer.state.get(one.param)
        and not one.param.is_meta
        and _is_active(one, {}, all_that_train=True)
    ]
    state = _watched(optimizer)
    for one in Builder(optimizer).planned(shares, {}, ExitStack()):
        state[one.share.param] = state.entry(one.user_state(), is_ahead=True)


def _watched(optimizer: Optimizer) -> WatchedState:
    """Return the optimizer's state as a dict that counts its changes."""
    if not isinstance(optimizer.state, WatchedState):
        optimizer.state = WatchedState(dict, optimizer.state)
    return optimizer.state


def _checked(optimizer: Optimizer, label: str, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, after checking that it can be updated."""
    local = checked_part(label, param)
    if not is_fake_or_meta(local):
        if fake_mode_is_active():
            require_fake(optimizer)
        if local.layout is torch.strided:
            if local.is_neg() or local.is_conj():
                local.data = resolved(local.data)
            if not has_memory(local):
                kind = type(local).__name__
                freed = "has no memory: its storage was freed"
                what = freed if kind in ("Tensor", "Parameter") else f"is of the type {kind}"
                raise GradientError(f"{label} {what}; only parameters with their own storage can be updated")
    check_parameter(local, label)
    return local


@without_collections()
def loaded_states(
    optimizer: Optimizer, saved: Mapping[torch.Tensor, Mapping[str, Any]], has_states: bool
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return states with a checkpoint's values, copied unless they are already the optimizer's buffers.

    If the checkpoint has a state on any rank (`has_states`), all parameters that train together get a state.
    """
    together = creates_all_states(optimizer)
    active = [
        one
        for one in shares_of(optimizer)
        if one.param in saved
        or (
            one.holder.requires_grad
            and (together or is_distributed(one.param))
            and _is_active(one, {}, all_that_train=True)
        )
    ]
    optimizer.memory.on_build([(one.label, one.holder) for one in active])
    active = [one for one in active if has_states and not one.param.is_meta]
    with ExitStack() as arrivals:
        return {
            one.share.param: one.user_state()
            for one in Builder(optimizer).planned(active, saved, arrivals, optimizer.state)
        }


def _engines(
    optimizer: Optimizer, planned: Sequence[Planned], mesh_ranks: ReductionGroup | None
) -> tuple[list[DeviceEngine], dict[Any, tuple[int, ...]]]:
    """Build the engines of planned shares; also return the indices of each part's engines."""
    alone = optimizer.placement.device
    parts: dict[torch.device, list[tuple[KernelSpec, Entry]]] = {} if planned or alone is None else {alone: []}
    for spec, entry in [own for one in planned for own in _entries(one)]:
        share, param = entry.share, entry.share.param
        # The random bits of an element depend on parameter and index, and not on the mesh.
        if spec.draws:
            pair = 2 if param.is_complex() else 1
            entry.origin = pair * (share.start or 0)
            if is_distributed(param):
                entry.origin = pair * first_index(param, share.label)
                strides = tuple(pair * stride for stride in param.stride())
                entry.strides = (*strides, 1) if pair > 1 else strides
            if (cut := _cut(entry)) is not None:
                holder = share.holder
                like = holder if is_dense(local_part(holder)) else torch.empty(holder.shape, device="meta")
                rows = cut.of(torch.empty_strided(share.local.shape, like.stride(), device="meta"))
                entry.origin, entry.strides = entry.origin + int(rows.storage_offset()), rows.stride()
        entry.weight = 1.0 if mesh_ranks is None else mesh_ranks.share(share.holder)
        optimizer.memory.on_entry(spec, entry)
        parts.setdefault(entry.param.device, []).append((spec, entry))
    by_device = {device: _by_spec(pairs) for device, pairs in parts.items()}
    for by_spec in by_device.values():
        entries = [entry for _, own in by_spec for entry in own]
        arrays = [
            (f"state {name!r} of {entry.share.label}", array)
            for entry in entries
            for name, array in entry.written
            if name != "param"
        ]
        check_not_shared([*((entry.share.label, entry.param) for entry in entries), *arrays])
    engines, places = build_engines(optimizer, by_device)
    finds = not (optimizer.memory.replaces_gradients or repeat_updates(optimizer))
    for engine in engines:
        states = []
        for entry in engine.entries:
            shown = optimizer.state[entry.share.param]
            shown.update({**entry.scalars, **entry.matrices})
            states += [shown[name] for name in (*entry.arrays, *entry.scalars, *entry.matrices) if name in shown]
        labels, cuts = [entry.share.label for entry in engine.entries], list(map(_cut, engine.entries))
        local = LocalGradients(labels, engine.holders, cuts)
        # `param.data = ...` leaves earlier views on the old storage.
        states += [engine.holders[place] for place in local.views]
        engine.describe(states, finds=finds, local=local if mesh_ranks is not None or local.views else None)
    return engines, places


def _entries(one: Planned) -> Iterator[tuple[KernelSpec, Entry]]:
    """Yield kernel spec and engine entry of a share: a single pair, or a pair per size of its splits."""
    share, holder, part = one.share, one.share.holder, one.share.local
    # A complex parameter and its real view share a version counter.
    is_view = holder.is_complex() and not is_distributed(holder)
    full = share.whole if part is holder or is_view else holder
    exchanges = share.exchanges or [None] * len(one.kind.views)
    for (graph, matrices), spec, exchange in zip(one.kind.views, one.kind.specs, exchanges):
        own, state = part, {"param": part, **one.state}
        scratch = spec.program.matrices.scratch
        arrays = {array.name: state[array.name] for array in spec.arrays if array.name not in scratch}
        if matrices is not None and (cut := _local_cut(matrices, holder)) is not None:
            own, full, matrices = cut.of(part.detach()), holder, replace(matrices, cut=cut)
            arrays = {name: own if name == "param" else cut.of(array) for name, array in arrays.items()}
        scalars = {name: state[name] for name in ("step", *graph.scalar_states)}
        matrix_states = {name: state[name] for name in graph.matrix_states}
        entry = Entry(share, own, arrays, scalars, matrix_states, spec.storages["grad"].precision, full)
        read = set(graph.states).difference(graph.outputs)
        arrays_of = [array for name in read & spec.storages.keys() for array in spec.storages[name].arrays(name)]
        entry.read_only = read.union(array.name for array in arrays_of)
        entry.exchange, entry.holds = exchange, matrices
        yield spec, entry


def creates_all_states(optimizer: Optimizer) -> bool:
    """Whether all state is created at the first step, and not at each parameter's first gradient."""
    # Offloaded state reserves room for all parameters; a joint norm needs the gradients of every optimizer.
    execution, control = optimizer.execution, optimizer.control
    return execution.creates_all_states or not optimizer.memory.on_device or control.joint is not None


def _is_active(share: Share, state: Mapping[Any, Any], *, all_that_train: bool) -> bool:
    """Whether a share takes part in steps."""
    param = share.holder
    # A lazy module's parameter has no shape before the first forward.
    if is_lazy(param):
        return False
    if param.grad is not None:
        return True
    trains = param.requires_grad and (all_that_train or is_distributed(param))
    return not param.is_meta and (trains or bool(state.get(share.param)))


def is_fake_or_meta(tensor: Any) -> bool:
    """Whether a tensor has a shape but no data: fake, or on the meta device."""
    if type(tensor) in PLAIN:
        return tensor.is_meta
    return isinstance(tensor, torch.Tensor) and (tensor.is_meta or is_fake(tensor))


def require_fake(optimizer: Optimizer) -> None:
    """Under a `FakeTensorMode`, whose operations return tensors without data, raise for parameters with data."""
    for label, _, _, param in iter_params(optimizer):
        if not is_fake_or_meta(local_part(param)):
            raise GradientError(
                f"{label} is a real tensor, and a FakeTensorMode is active: create the parameter under that mode too, "
                "or call step() outside of it; nothing was updated"
            )


def flat_part(optimizer: Optimizer) -> str:
    """The label of the first parameter that is a piece of an FSDP1 flat parameter, for messages; empty if none."""
    first = ""
    for label, _, group, param in iter_params(optimizer):
        if not split_kind(param):
            continue
        first = first or label
        program = spec_of(optimizer.rule_of(group), group, local_part(param), param.shape, label).program
        reduces = program.global_reductions or any(tile and (tile.reductions or tile.parts) for tile in program.tiles)
        if reduces or program.matrices.scratch or program.slices.views or program.graph.slice_states:
            refuse("a reduction", [FSDP1], label, GradientError)
    return first
