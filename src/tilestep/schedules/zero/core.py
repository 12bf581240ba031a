"""What a rank has of a sharded optimizer: buckets, its pieces of parameters, and the optimizer of the pieces."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import RuleError
from ...optimizer import Optimizer
from ...optimizer.build import spec_of
from ...optimizer.parameters import iter_params
from ...placement import Origin, Pieces, Ranks
from ...rules import rule
from ...storage import BLOCK, entries_before, rows_of, shape_of_entries
from ..schedule import Schedule
from .buckets import ALIGNMENT, Bucket, Division, Options, Slot, make_buckets, memory_order, view_of

ANCHOR = "anchor"  # key of a param group that only exists so that a rank without pieces takes part in decisions


@rule
def unchanged(param: Any, grad: Any) -> tuple[Any, ...]:
    """Leaves parameters as they are: what a rank does that has no piece of any."""
    return (param,)


class PieceSchedule(Schedule):
    """When this rank's pieces are updated: when the optimizer that is sharded says so; all states begin together."""

    begins_together = True
    times_made = 0  # how often the plan, and with it states, was made

    def making_plan(self) -> AbstractContextManager[None]:
        self.times_made += 1
        return super().making_plan()


def divisions_of(optimizer: Optimizer) -> dict[torch.Tensor, Division]:
    """For each parameter whether one rank must have all of it, and where else it may be cut."""
    # Whole are those whose rule works on more than elements and reductions over all of them. Products of matrices
    # cost as many operations for an element as the shorter side is long, as those of Muon do; what is done by rows and
    # columns costs the same for every element.
    divisions: dict[torch.Tensor, Division] = {}
    for label, _, group, param in iter_params(optimizer):
        spec = spec_of(optimizer.rule_of(group), group, param, label=label)
        program, graph = spec.program, spec.program.graph
        if not (graph.slice_states or program.slices.views or program.matrices.scratch):
            divisions[param] = _in_blocks(param) if spec.has_blocks else Division()
            continue
        if program.global_reductions:
            raise RuleError(
                f"{label}: rule {graph.title} needs whole tensors, which would be spread over the ranks, and reduces "
                "over all of them; that is not supported by shard()"
            )
        is_product = program.matrices.scratch and param.dim() > 1
        divisions[param] = Division(cost=param.numel() * (min(param.shape[-2:]) if is_product else 1))
    return divisions


def _in_blocks(param: torch.Tensor) -> Division:
    """Where a parameter with states in blocks may be cut: between blocks, or between rows that end inside of one."""
    # Pieces begin at aligned addresses, so it is every sixteenth row where a row is odd. What has less than two such
    # parts is not cut, and neither is what lies in memory with another dimension outside than the first.
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


STRUCTURE = ("params", "param_names", "rule")  # keys of a param group that are not hyperparameters


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group says of its parameters."""
    return {key: value for key, value in group.items() if key not in STRUCTURE}


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
        """The shape of a buffer with one entry for so many neighbours, and the order of its dimensions in memory."""
        shape = shape_of_entries(self.param.shape, elements)
        return shape, memory_order(self.param) if elements == 1 else tuple(range(len(shape)))

    def range_of(self, rank: int, elements: int = 1) -> tuple[int, int]:
        """What a rank has of such a buffer, first entry and one past the last in the order of memory."""
        start, stop = self.bucket.layout.piece(self.slot, rank)
        shape = self.param.shape
        return entries_before(shape, start, elements), entries_before(shape, stop, elements)

    def take_gradient(self, section: torch.Tensor | None, trains: bool) -> None:
        """Have the piece hold its part of this rank's section of summed gradients; None for no gradient."""
        piece = self.piece
        if piece is None:
            return
        if piece.requires_grad != trains:
            piece.requires_grad_(trains)
        gradient = None
        if section is not None:
            if self.known_gradient is None or self.known_gradient[0] is not section:
                self.known_gradient = section, self.shaped(self.bucket.cut(section, self.slot))
            gradient = self.known_gradient[1]
        if piece.grad is not gradient:
            piece.grad = gradient


class Sharding:
    """What this rank has of an optimizer that is split over ranks: buckets, pieces, and the optimizer of the pieces."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        names: dict[Any, str],
        ranks: Ranks,
        options: Options,
        norm_groups: Sequence[Any] = (),
    ) -> None:
        self.model, self.ranks, self.options, self.norm_groups = model, ranks, options, list(norm_groups)
        self.deciders = ranks.with_others(norm_groups)  # all that decide a step together, with other parts of the model
        self.buckets: list[Bucket] = []
        self.members: list[Member] = []
        self.member_of: dict[Any, Member] = {}
        self.listed: list[list[torch.Tensor]] = []  # the parameters of each param group
        self.rules: list[str | None] = []  # what each of them says of its rule
        self.places = self._lay_out(optimizer, names)  # for each bucket the places of its parameters among all
        self.device = self.buckets[0].flat.device
        self._align(self.buckets)
        with torch.no_grad():
            # The model's other parameters, and its buffers, begin with the first rank's values too.
            for tensor in (*model.parameters(), *model.buffers()):
                plain = tensor.layout is torch.strided and not tensor.is_quantized
                if tensor not in self.member_of and tensor.device == self.device and plain:
                    stored = tensor.detach()
                    for dim, (size, stride) in enumerate(zip(stored.shape, stored.stride())):
                        # Memory that `expand` repeats is sent once.
                        stored = stored.narrow(dim, 0, 1) if stride == 0 and size > 1 else stored
                    sent = stored.contiguous()
                    # As bytes: backends do not know every type.
                    ranks.broadcast(sent.view(-1).view(torch.uint8))
                    stored.copy_(sent)
        self.schedule = PieceSchedule()
        # torch has names in all groups or in none.
        is_named = any(group.get("param_names") for group in optimizer.param_groups)
        owner, origins = weakref.ref(optimizer), self._cut(self.members)
        self.placement = Pieces(owner, ranks.reductions, self.deciders, origins, has_own_names=not is_named)
        self.inner = self._make_inner(optimizer)

    def _make_inner(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer of this rank's pieces, with the rules and hyperparameters of the one that is sharded."""
        groups = [self._group_of_pieces(group, optimizer.rule_of(group)) for group in optimizer.param_groups]
        if not any(piece.requires_grad for group in groups for _, piece in group["params"]):
            groups.append(self._anchor_group())
        rule, defaults = optimizer.rule_of({}), optimizer.defaults
        inner = Optimizer.__new__(Optimizer)
        inner.placement, inner.schedule, inner.taps = self.placement, self.schedule, optimizer.taps
        Optimizer.__init__(
            inner,
            groups,
            rule,
            max_grad_norm=defaults.get("max_grad_norm"),
            master_weights=defaults.get("master_weights", False),
            **{key: defaults[key] for key in rule.hyperparameters},
        )
        # What steps are decided from, and what outlives them, is the same for both.
        inner.control, inner.workspace_limit = optimizer.control, optimizer.workspace_limit
        inner.control.copies = self.ranks.other_copies
        return inner

    def _anchor_group(self) -> dict[str, Any]:
        anchor = torch.zeros(0, device=self.device, requires_grad=True)
        anchor.grad = torch.zeros(0, device=self.device)
        return {"params": [(ANCHOR, anchor)], "rule": unchanged, ANCHOR: True, "master_weights": False}

    def anchor(self) -> None:
        """Have this rank take part in decisions, though a checkpoint has left it no piece that steps update."""
        if not any(piece.requires_grad or self.inner.state.get(piece) for _, _, _, piece in iter_params(self.inner)):
            self.inner.add_param_group(self._anchor_group())

    def _group_of_pieces(self, group: Mapping[str, Any], rule: Any) -> dict[str, Any]:
        """A param group of this rank's pieces like one of whole parameters."""
        members = [self.member_of[param] for param in group["params"]]
        pieces = [(member.name, member.piece) for member in members if member.piece is not None]
        # torch wants names in every group or in none, and finds none in an empty one.
        names: dict[str, Any] = {} if pieces else {"param_names": []}
        return {**hyperparameters(group), **names, "rule": rule, "params": pieces}

    def _lay_out(self, optimizer: Optimizer, names: dict[Any, str]) -> list[tuple[int, ...]]:
        """Bring the parameters that are not there yet into buckets."""
        groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self.listed = [list(group["params"]) for group in optimizer.param_groups]
        self.rules = [group.get("rule") for group in optimizer.param_groups]
        params = [param for param in names if param not in self.member_of]
        divisions, before = divisions_of(optimizer), len(self.members)
        own = [optimizer.param_groups[groups[param]] for param in params]
        buckets, places = make_buckets(params, own, [divisions[param] for param in params], self.ranks, self.options)
        added = {
            param: Member(names[param], param, groups[param], bucket, slot, divisions[param])
            for bucket in buckets
            for slot, param in zip(bucket.layout.slots, bucket.params)
        }
        self.buckets += buckets
        self.members += [added[param] for param in params]
        self.member_of.update(added)
        return [tuple(before + place for place in bucket) for bucket in places]

    def add_group(self, optimizer: Optimizer, names: dict[Any, str]) -> tuple[list[Bucket], list[tuple[int, ...]]]:
        """Bring the parameters of the last param group into buckets of their own; these, and the places in them."""
        buckets, members, group = len(self.buckets), len(self.members), optimizer.param_groups[-1]
        places = self._lay_out(optimizer, names)
        self._align(self.buckets[buckets:])
        self.placement.add(self._cut(self.members[members:]))
        groups = self.inner.param_groups
        self.inner.add_param_group(self._group_of_pieces(group, optimizer.rule_of(group)))
        if ANCHOR in groups[-2]:
            groups.insert(-1, groups.pop())
        return self.buckets[buckets:], places

    @torch.no_grad()
    def _align(self, buckets: Sequence[Bucket]) -> None:
        """Begin with the first rank's parameters everywhere."""
        for bucket in buckets:
            self.ranks.broadcast(bucket.flat)
            if bucket.exact is not None:
                bucket.exact.copy_(bucket.section_of(bucket.flat))

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

    def require_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise if param groups have other parameters or rules than those that are divided over the ranks."""
        listed = [list(group["params"]) for group in groups]
        if [set(map(id, params)) for params in listed] != [set(map(id, params)) for params in self.listed]:
            raise RuntimeError(
                "param groups of the sharded optimizer have other parameters than shard() has divided over the ranks: "
                "undo that; freeze a parameter instead of removing it, add others with add_param_group(), or load what "
                "full_state_dict() gives into a new optimizer and shard that; nothing was updated"
            )
        if [group.get("rule") for group in groups] != self.rules:
            raise RuntimeError(
                "the rule of a param group of the sharded optimizer was changed, and shard() has divided parameters "
                "for the one before: undo that, or shard a new optimizer; nothing was updated"
            )
        self.listed = listed

    def bucket_of(self, piece: torch.Tensor) -> Bucket | None:
        """The bucket that a piece lies in; None for what is none."""
        origin = self.placement.origin(piece)
        return None if origin is None else self.member_of[origin.param].bucket

    def note_stepped(self, has_gradient: Iterable[bool], trains: Iterable[int]) -> None:
        """After a step: what trains has state when the first one begins, and all else when it has a gradient."""
        for member, has_one, is_trained in zip(self.members, has_gradient, trains):
            member.has_begun = bool(member.has_begun or has_one or (member.has_begun is None and is_trained))

    def holds_state(self, member: Member) -> bool:
        """Whether a parameter has state, on whichever rank."""
        if member.piece is not None:
            return bool(self.inner.state.get(member.piece))
        if member.has_begun is None:
            # Tables that are there before a step have state for whatever trains.
            return member.param.requires_grad and self.inner.plan is not None
        return member.has_begun
