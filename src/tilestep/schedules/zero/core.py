"""What a sharded optimizer is made of: buckets, their traffic, and the optimizer of the pieces of this rank."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...accumulation import gradientless
from ...combinations import refuse_replaced
from ...compat import is_capturing
from ...errors import RuleError
from ...norm import NormTable
from ...norm.tiles import combine
from ...optimizer import Optimizer
from ...optimizer.build import spec_of
from ...optimizer.groups import GROUP_OPTIONS
from ...optimizer.parameters import iter_params
from ...placement import Origin, Pieces
from ...rules import rule
from ...runtime.capturing import PREPARE, require
from ...side_stream import SideStream
from ...storage import BLOCK, entries_before, rows_of, shape_of_entries
from ..schedule import Schedule
from .agree import Alike
from .buckets import ALIGNMENT, Bucket, Division, Options, Slot, make_buckets, memory_order, view_of
from .gradients import GradientSync
from .parameters import ParameterSync
from .ranks import Deciders, Ranks

ANCHOR = "anchor"
"""Key of a param group that only exists so that a rank without pieces takes part in decisions."""


@rule
def unchanged(param: Any, grad: Any) -> tuple[Any, ...]:
    """Leaves parameters as they are: what a rank does that has no piece of any."""
    return (param,)


class PieceSchedule(Schedule):
    """When this rank's pieces are updated: when the optimizer that is sharded says so; all states begin together."""

    begins_together = True
    times_made = 0
    """How often tables, and with them states, were made."""

    def making_plan(self) -> AbstractContextManager[None]:
        """A block in which tables are made anew."""
        self.times_made += 1
        return super().making_plan()


def divisions_of(optimizer: Optimizer) -> dict[torch.Tensor, Division]:
    """For each parameter whether one rank must have all of it, and where else it may be cut.

    Whole are those whose rule works on more than single elements and reductions over all of them. Products of matrices
    cost as many operations for an element as the shorter side is long, as those of Muon do; what is done by rows and
    columns costs the same for every element.
    """
    found: dict[torch.Tensor, Division] = {}
    for label, _, group, param in iter_params(optimizer):
        spec = spec_of(optimizer.rule_of(group), group, param, label=label)
        program, graph = spec.program, spec.program.graph
        if not (graph.slice_states or program.slices.views or program.library.scratch):
            found[param] = _in_blocks(param) if spec.has_blocks else Division()
            continue
        if program.across:
            raise RuleError(
                f"{label}: rule {graph.title} needs whole tensors, which would be spread over the ranks, and reduces "
                "over all of them; that is not supported by shard()"
            )
        is_product = program.library.scratch and param.dim() > 1
        found[param] = Division(cost=param.numel() * (min(param.shape[-2:]) if is_product else 1))
    return found


def _in_blocks(param: torch.Tensor) -> Division:
    """Where a parameter with states in blocks may be cut: between blocks, or between rows that end inside of one.

    Pieces begin at aligned addresses, so it is every sixteenth row where a row is odd. What has less than two such
    parts is not cut, and neither is what lies in memory with another dimension outside than the first.
    """
    lead, columns = rows_of(param.shape)
    order = memory_order(param)
    unit, by_rows = columns, columns % BLOCK != 0 and math.prod(lead) > 1
    if order != tuple(range(param.dim())):
        unit, by_rows = param.numel() // max(param.shape[0], 1), True
    elif not by_rows:
        unit = BLOCK
    unit = math.lcm(unit, ALIGNMENT)
    cut = param.numel() >= 2 * unit > 0 and (order[0] == 0 or not by_rows)
    return Division(None, unit, by_rows) if cut else Division(cost=param.numel())


def make_inner(
    outer: Optimizer,
    groups: Sequence[Iterable[Any]],
    ranks: Ranks,
    deciders: Deciders,
    origins: Mapping[Any, Origin],
    schedule: PieceSchedule,
) -> Optimizer:
    """An optimizer with the rules and hyperparameters of another one."""
    params = [_mirrored(group, outer.rule_of(group), named) for group, named in zip(outer.param_groups, groups)]
    if not any(piece.requires_grad for group in params for _, piece in group["params"]):
        device = next(param.device for group in outer.param_groups for param in group["params"])
        nothing = torch.zeros(0, device=device, requires_grad=True)
        nothing.grad = torch.zeros(0, device=device)
        params.append({"params": [(ANCHOR, nothing)], "rule": unchanged, ANCHOR: True, "master_weights": False})
    rule = outer.rule_of({})
    given = {key: outer.defaults[key] for key in rule.hyperparameters}
    made = Optimizer.composed(
        params,
        rule,
        placement=Pieces(weakref.ref(outer), ranks, deciders, origins, has_own_names=not is_named(outer)),
        schedule=schedule,
        taps=outer.taps,
        max_grad_norm=outer.defaults.get("max_grad_norm"),
        master_weights=outer.defaults.get("master_weights", False),
        skip_nonfinite=outer.control.policy.nonfinite,
        skip_above=outer.control.policy.above,
        track_grad_norm=outer.control.policy.tracks_norm,
        **given,
    )
    made.control.joint = outer.control.joint
    made.control.history, made.workspace_limit = outer.control.history, outer.workspace_limit
    return made


def is_named(optimizer: Optimizer) -> bool:
    """Whether the user has named the parameters; torch has names in all groups or in none."""
    return any(group.get("param_names") for group in optimizer.param_groups)


def add_pieces(
    inner: Optimizer, group: Mapping[str, Any], rule: Any, named: Iterable[Any], origins: Mapping[Any, Origin]
) -> None:
    """Take in what this rank has of a further param group."""
    placement = inner.placement
    assert isinstance(placement, Pieces)
    placement.add(origins)
    inner.add_param_group(_mirrored(group, rule, named))
    if ANCHOR in inner.param_groups[-2]:
        inner.param_groups.insert(-1, inner.param_groups.pop())


def _mirrored(group: Mapping[str, Any], rule: Any, named: Iterable[Any]) -> dict[str, Any]:
    """A param group of pieces like one of whole parameters."""
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    listed = list(named)
    # torch wants names in every group or in none, and finds none in an empty one.
    names: dict[str, Any] = {} if listed else {"param_names": []}
    return {**own, **names, "rule": rule, "params": listed}


def mirror(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Give param groups the hyperparameters of others."""
    for theirs, own in zip(source, target):
        for key in GROUP_OPTIONS:
            if key not in theirs:
                own.pop(key, None)
        for key, value in theirs.items():
            if key not in ("params", "param_names", "rule"):
                own[key] = value


@dataclass
class Member:
    """A parameter of a sharded optimizer."""

    name: str
    param: torch.Tensor
    group: int
    bucket: Bucket
    slot: Slot
    division: Division
    piece: torch.Tensor | None = None
    known_gradient: tuple[torch.Tensor, torch.Tensor] | None = None
    has_begun: bool | None = None
    """Whether a step, or a checkpoint, has given it state: known on all ranks, whichever has the state. None before the
    first step, which gives state to whatever trains."""

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all of it."""
        return self.bucket.layout.whole

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's piece as its rule sees it: flat, by rows of blocks, or in the shape of the parameter it is."""
        if self.is_whole:
            return view_of(flat, self.param)
        if not self.division.by_rows:
            return flat
        if memory_order(self.param) == tuple(range(self.param.dim())):
            columns = rows_of(self.param.shape)[1]
            return flat.view(flat.numel() // columns, columns)
        shape = (flat.numel() * len(self.param) // self.param.numel(), *self.param.shape[1:])
        return flat.as_strided(shape, self.param.stride(), flat.storage_offset())

    def entries(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a buffer beside it of entries for neighbours, and the order of its dimensions in memory."""
        shape = shape_of_entries(self.param.shape, elements)
        return shape, memory_order(self.param) if elements == 1 else tuple(range(len(shape)))

    def range_of(self, rank: int, elements: int = 1) -> tuple[int, int]:
        """What a rank has of such a buffer, first entry and one past the last in the order of memory."""
        start, stop = self.bucket.layout.piece(self.slot, rank)
        shape = self.param.shape
        return entries_before(shape, start, elements), entries_before(shape, stop, elements)

    def gradient(self, section: torch.Tensor) -> torch.Tensor:
        """The piece's part of this rank's section of summed gradients."""
        if self.known_gradient is None or self.known_gradient[0] is not section:
            cut = self.shaped(self.bucket.cut(section, self.slot))
            self.known_gradient = section, cut
        return self.known_gradient[1]


@dataclass
class _Known:
    """What decides which pieces have a gradient, and where."""

    sections: list[torch.Tensor | None]
    has_gradient: tuple[bool, ...]
    trains: bytes

    def same(self, other: _Known | None) -> bool:
        """Whether it is the same for every piece; the numbers in the sections may be others."""
        if other is None or self.has_gradient != other.has_gradient or self.trains != other.trains:
            return False
        return all(map(operator.is_, self.sections, other.sections))


class Unscalable:
    """What a scaler sees of a rank's pieces, and empty tensors so that it finds every device and dtype on all ranks.

    A rank that has no piece with a gradient, or none in float16, then does as the others do.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], dtypes: Iterable[torch.dtype], device: torch.device) -> None:
        nothing = [torch.zeros(0, dtype=dtype, device=device, requires_grad=True) for dtype in dtypes]
        for tensor in nothing:
            tensor.grad = torch.zeros_like(tensor)
        self.param_groups = [*groups, {"params": nothing}]


class Sharding:
    """An optimizer split over ranks."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        names: dict[Any, str],
        ranks: Ranks,
        options: Options,
        norm_groups: Sequence[Any] = (),
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.deciders = Deciders(ranks, norm_groups)
        self.options = options
        self.buckets: list[Bucket] = []
        self.members: list[Member] = []
        self.member_of: dict[Any, Member] = {}
        places = self._lay_out(optimizer, names)
        self.channel = SideStream(self.buckets[0].flat.device, priority=-1)
        self._align(self.buckets)
        self._align_others()
        origins = self._cut(self.members)
        pieces = [self._named_pieces(group["params"]) for group in optimizer.param_groups]
        self.schedule = PieceSchedule()
        self.inner = make_inner(optimizer, pieces, ranks, self.deciders, origins, self.schedule)
        self.alike = Alike(weakref.ref(optimizer), ranks)
        self.gradients = GradientSync(self.buckets, places, ranks, options, self.channel, self.alike, model)
        self.parameters = ParameterSync(model, self.buckets, options, self.channel)
        self._known: _Known | None = None
        self._stepped: _Known | None = None
        """What was known at the last step, if nothing was written to the pieces since."""
        self._begun: _Known | None = None
        """What was known when it was last noted which parameters have state."""
        self.captures_alone = False
        """Whether a step is being captured without the backward before it."""

    def _lay_out(self, optimizer: Optimizer, names: dict[Any, str]) -> list[tuple[int, ...]]:
        """Bring the parameters that are not there yet into buckets."""
        groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
        params = [param for param in names if param not in self.member_of]
        divisions, known = divisions_of(optimizer), len(self.members)
        own = [optimizer.param_groups[groups[param]] for param in params]
        buckets, places = make_buckets(params, own, [divisions[param] for param in params], self.ranks, self.options)
        made = {
            param: Member(names[param], param, groups[param], bucket, slot, divisions[param])
            for bucket in buckets
            for slot, param in zip(bucket.layout.slots, bucket.params)
        }
        self.buckets += buckets
        self.members += [made[param] for param in params]
        self.member_of.update(made)
        return [tuple(known + place for place in each) for each in places]

    def add_group(self, optimizer: Optimizer, names: dict[Any, str]) -> None:
        """Bring the parameters of a param group that was added to the optimizer into buckets of their own."""
        self.sync_masters()
        buckets, members, group = len(self.buckets), len(self.members), optimizer.param_groups[-1]
        places = self._lay_out(optimizer, names)
        self._align(self.buckets[buckets:])
        origins = self._cut(self.members[members:])
        add_pieces(self.inner, group, optimizer.rule_of(group), self._named_pieces(group["params"]), origins)
        self.gradients.take_in(self.buckets[buckets:], places)
        self.parameters.take_in(self.model, self.buckets[buckets:])
        self._known = self._begun = None

    @torch.no_grad()
    def _align(self, buckets: Sequence[Bucket]) -> None:
        """Begin with the first rank's parameters everywhere."""
        for bucket in buckets:
            self.ranks.broadcast(bucket.flat)
            if bucket.exact is not None:
                bucket.exact.copy_(bucket.section_of(bucket.flat))

    @torch.no_grad()
    def _align_others(self) -> None:
        """Begin with what the model of the first rank has beside the optimizer's parameters."""
        device = self.buckets[0].flat.device
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            plain = tensor.layout is torch.strided and not tensor.is_quantized
            if tensor not in self.member_of and tensor.device == device and plain:
                here = _once(tensor.detach())
                whole = here.contiguous()
                # As bytes: backends do not know every type.
                self.ranks.broadcast(whole.view(-1).view(torch.uint8))
                here.copy_(whole)

    def _cut(self, members: Sequence[Member]) -> dict[Any, Origin]:
        """Give parameters this rank's pieces of them; where each piece comes from."""
        origins: dict[Any, Origin] = {}
        for member in members:
            start, stop = member.bucket.piece(member.slot)
            if member.is_whole and start == stop and member.slot.numel:
                continue
            flat = member.bucket.cut(member.bucket.updated, member.slot)
            # A version of its own: what others write into the bucket is noticed at the parameters.
            member.piece = member.shaped(flat).data.requires_grad_(member.param.requires_grad)
            if member.bucket.grad_dtype != member.piece.dtype:
                member.piece.grad_dtype = member.bucket.grad_dtype
            order = memory_order(member.param) if not member.division.by_rows else tuple(range(member.param.dim()))
            cut = (None, ()) if member.is_whole else (start, order)
            origins[member.piece] = Origin(member.param, *cut)
        return origins

    def _named_pieces(self, params: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        members = [self.member_of[param] for param in params]
        return [(member.name, member.piece) for member in members if member.piece is not None]

    @gradientless
    def sync_masters(self) -> None:
        """Have every parameter here, and take over what other code has written to them."""
        self._follow_parameters(None)

    def _follow_parameters(self, versions: int | None) -> None:
        """As `sync_masters`, without gradients; `versions` is how often they have been written to, if known."""
        params = self.parameters
        if params.is_pending:
            params.wait_all()
        if not params.is_exact and params.fixed.look(1) and versions is not None and versions == params.versions:
            return
        written = [self.member_of[param].piece for param in params.written(versions)]
        if written:
            self.invalidate()
            torch.autograd.graph.increment_version([piece for piece in written if piece is not None])

    def invalidate(self) -> None:
        """At the next step: take nothing for granted of the pieces, which other code has written to."""
        self._stepped = None

    @gradientless
    def ready(self) -> None:
        """Have every piece hold its summed gradient, and the pieces be what the parameters are."""
        self._ready(is_capturing())

    def _ready(self, captures: bool) -> None:
        """As `ready`, without gradients."""
        versions, trains = self.gradients.finish(captures)
        if not captures and self.ranks.count > 1:
            try:
                self.alike.check()
            except ValueError:
                self.gradients.ask_again()
                raise
        self._follow_parameters(versions)
        now = _Known([sums.section for sums in self.gradients.sums], self.gradients.has_gradient(), trains)
        if not now.same(self._known):
            self._give_gradients(now)
            self._known = now

    def _give_gradients(self, now: _Known) -> None:
        sections = {id(sums.bucket): section for sums, section in zip(self.gradients.sums, now.sections)}
        for member, is_known, trains in zip(self.members, now.has_gradient, now.trains):
            if member.piece is None:
                continue
            if member.piece.requires_grad != trains:
                member.piece.requires_grad_(bool(trains))
            section = sections[id(member.bucket)]
            gradient = None if section is None or not is_known else member.gradient(section)
            if member.piece.grad is not gradient:
                member.piece.grad = gradient

    def step(self, optimizer: Optimizer) -> None:
        """Update this rank's pieces and send them to the others."""
        captures = is_capturing()
        if captures:
            require(self.ranks.can_be_captured, "its ranks communicate by a backend that graphs cannot hold; NCCL can")
            require(not self.parameters.is_pending, f"parameters are still on their way; {PREPARE}")
        self._ready(captures)
        if self._known is None or not any(self._known.has_gradient):
            refuse_replaced(self.model, self.member_of)
        if captures:
            require(
                self.captures_alone or self.gradients.summed_in_graph,
                "its gradients were summed before the graph: capture backward too, or use tilestep.capture(optimizer)",
            )
        mirror(optimizer.param_groups, self.inner.param_groups)
        for name in ("grad_scale", "found_inf"):
            self.inner.__dict__.pop(name, None)
            if hasattr(optimizer, name):
                setattr(self.inner, name, getattr(optimizer, name))
        self.inner.control.checks_overflow = optimizer.control.checks_overflow
        self.inner.control.gradients_scaled = optimizer.control.gradients_scaled
        # Pieces and their gradients are where they were at the last step, and what that has made of them: this cuts
        # the pieces and knows, since nothing else has them. Not in a capture, which looks at everything.
        known = not captures and self._known is self._stepped
        self._stepped = None
        self.inner.update(known=known)
        self._stepped = self._known
        if self._known is not self._begun:
            self._note_begun()
        updates = self.gradients.updates()
        if not captures or self.gradients.summed_in_graph:
            self.gradients.forget()
        self.parameters.gather(updates, captures)

    def _note_begun(self) -> None:
        """After a step: what trains has state when the first one begins, and all else when it has a gradient."""
        known = self._known
        if known is None or known is self._begun:
            return
        self._begun = known
        for member, has_gradient, trains in zip(self.members, known.has_gradient, known.trains):
            member.has_begun = bool(member.has_begun or has_gradient or (member.has_begun is None and trains))

    def note_loaded(self, begun: Iterable[torch.Tensor]) -> None:
        """After a checkpoint: these parameters have state, and others that train begin with the next step."""
        having = set(map(id, begun))
        for member in self.members:
            member.has_begun = True if id(member.param) in having else None
        self._begun = None

    def holds_state(self, member: Member) -> bool:
        """Whether a parameter has state, on whichever rank."""
        if member.piece is not None:
            return bool(self.inner.state.get(member.piece))
        if member.has_begun is None:
            # Tables that are there before a step have state for whatever trains.
            return member.param.requires_grad and self.inner.plan is not None
        return member.has_begun

    def prepare_graph(self, optimizer: Optimizer, *, alone: bool, replays: bool) -> None:
        """Before a capture or a replay: bring everything that a graph takes for granted to where it looks for it."""
        mirror(optimizer.param_groups, self.inner.param_groups)
        if alone:
            self.ready()
        else:
            self.sync_masters()
        self.channel.settle()
        if not replays:
            self.parameters.wait_on_host()

    def replayed(self, *, alone: bool) -> None:
        """After a replay: what a step does on the host."""
        if alone:
            self.gradients.forget()
        self.parameters.note_update()

    @property
    def has_gradients(self) -> bool:
        """Whether there was a gradient of any parameter on any rank when the pieces were last made ready."""
        return self._known is not None and any(self._known.has_gradient)

    def unscalable(self) -> Unscalable:
        """The pieces' gradients, summed up, for a scaler to unscale; what it does is the same on all ranks."""
        self.ready()
        dtypes = {bucket.grad_dtype for bucket in self.buckets if bucket.trains} if self.has_gradients else set()
        return Unscalable(self.inner.param_groups, dtypes, self.buckets[0].flat.device)

    def gradients_of(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's pieces of the summed gradients of some parameters; call `ready` or `norm_of` before."""
        pieces = [self.member_of[param].piece for param in params]
        return [piece.grad for piece in pieces if piece is not None and piece.grad is not None]

    @torch.no_grad()
    def norm_of(self, params: Iterable[torch.Tensor], groups: Sequence[Any] = ()) -> torch.Tensor:
        """The 2-norm of the summed gradients of some parameters, over all ranks; others are not touched."""
        listed = list(params)
        if not all(param in self.member_of for param in listed):
            raise ValueError("grad_norm_of() takes parameters of this optimizer, and was given another tensor")
        self.ready()
        gradients = self.gradients_of(listed)
        device = self.buckets[0].flat.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if gradients:
            table = NormTable(device, [each.numel() for each in gradients], [each.dtype for each in gradients])
            addresses = torch.tensor([each.data_ptr() for each in gradients], dtype=torch.int64, device=device)
            table.launch(addresses, total)
        Deciders(self.ranks, groups).add(total)
        wide = any(param.dtype is torch.float64 for param in listed)
        return combine(total, 2.0).to(torch.float64 if wide else torch.float32)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the dimensions along which it repeats its memory, as `expand` makes them."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
