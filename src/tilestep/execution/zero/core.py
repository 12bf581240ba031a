"""The placement of a sharded optimizer: its buckets, and this rank's piece of each parameter, which is its share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...errors import RuleError, StateError
from ...optimizer import Optimizer
from ...optimizer.build import spec_of
from ...optimizer.masters import MASTER_KEYS
from ...optimizer.matrices import matrix_work, rule_views
from ...optimizer.parameters import iter_params
from ...optimizer.states import TRAINING
from ...placement import Listed, Placement, Ranks, ReductionGroup, Share
from ...rules import Rule
from ...runtime.shared_sums import shared_sums
from ...storage import BLOCK, entries_before, entries_of, rows_of, shape_of_entries, states_in_blocks, values_of
from .buckets import ALIGNMENT, Bucket, Item, Options, Slot, make_buckets, memory_order, view_of
from .tensor_piece import ShardedTensorPiece


def items_of(optimizer: Optimizer, options: Options) -> dict[torch.Tensor, Item]:
    """For each parameter, whether one rank must own all of it, or where it may be cut."""
    # A parameter stays whole if its rule does more than elementwise operations and reductions over the whole tensor.
    # The cost of matrix work (Muon) is its operations; the cost of operations on rows and columns is the number of
    # elements.
    items: dict[torch.Tensor, Item] = {}
    for label, _, group, param in iter_params(optimizer):
        spec = spec_of(optimizer.rule_of(group), group, param, label=label)
        program, graph, kind = spec.program, spec.program.graph, (param.dtype, *options.sync_dtypes(group))
        item = Item(param.numel(), (kind[1] or param.dtype).itemsize, kind, trains=param.requires_grad)
        needs_whole = graph.slice_states or program.slices.views or program.matrices.scratch
        if spec.has_blocks and not needs_whole:
            item = _in_blocks(param, item)
        if program.global_reductions and (needs_whole or item.whole):
            why = "requires whole tensors" if needs_whole else "has states in blocks that cannot be split"
            raise RuleError(
                f"{label}: rule {graph.title} {why} and reduces over all tensors, which is not supported by shard()"
                + ("" if needs_whole else ": use another state_dtype for this parameter")
            )
        if not needs_whole:
            items[param] = item
            continue
        cost = float(param.numel())
        if program.matrices.scratch and param.dim() > 1:
            seen = rule_views(optimizer.rule_of(group), group, param.shape, label=label)
            cost = sum(matrix_work(program.matrices, group, param.shape, one.matrices) for one in seen)
        items[param] = replace(item, whole=True, cost=int(cost))
    return items


def _in_blocks(param: torch.Tensor, item: Item) -> Item:
    """Where to cut a parameter with states in blocks: between blocks, or between rows if rows end inside a block."""
    # Sections begin at aligned addresses: rows of odd length are cut at every sixteenth row. A parameter with fewer
    # than two such parts is not cut, nor a parameter whose slowest dimension in memory is not the first.
    lead, columns = rows_of(param.shape)
    order = memory_order(param)
    unit, by_rows = columns, columns % BLOCK != 0 and math.prod(lead) > 1
    if order != tuple(range(param.dim())):
        unit, by_rows = param.numel() // max(param.shape[0], 1), True
    elif not by_rows:
        unit = BLOCK
    unit = math.lcm(unit, ALIGNMENT)
    cut = param.numel() >= 2 * unit > 0 and (order[0] == 0 or not by_rows)
    return replace(item, unit=unit, by_rows=by_rows) if cut else replace(item, whole=True, cost=param.numel())


@dataclass
class Member:
    """A parameter of a sharded optimizer, and this rank's piece of it."""

    name: str  # the parameter's name in the model
    param: torch.Tensor
    bucket: Bucket
    slot: Slot
    by_rows: bool  # whether pieces are whole rows
    keeps_blocks: bool  # whether no block of a state is cut
    piece: torch.Tensor | None = None  # this rank's piece; None if another rank owns the whole parameter
    whole: torch.Tensor | None = None  # a meta tensor of the parameter's shape, if it is cut
    known_gradient: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    """The last section of reduced gradients, and its slice for `piece`."""
    has_begun: bool | None = None
    """Whether a step or a checkpoint has made state for the parameter, the same on all ranks. None before the first
    step, which makes state for all parameters that train."""

    @property
    def is_whole(self) -> bool:
        """Whether one rank owns the whole parameter."""
        return self.bucket.layout.whole

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A piece as the rule sees it: flat, in the shape of rows, or in the parameter's shape."""
        if self.is_whole:
            return view_of(flat, self.param)
        if not self.by_rows:
            return flat
        if memory_order(self.param) == tuple(range(self.param.dim())):
            columns = rows_of(self.param.shape)[1]
            return flat.view(flat.numel() // columns, columns)
        shape = (flat.numel() * len(self.param) // self.param.numel(), *self.param.shape[1:])
        return flat.as_strided(shape, self.param.stride(), flat.storage_offset())

    def entries(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a buffer with one entry per `elements` elements, and the memory order of its dimensions."""
        shape = shape_of_entries(self.param.shape, elements)
        return shape, memory_order(self.param) if elements == 1 else tuple(range(len(shape)))

    def range_of(self, rank: int, elements: int = 1) -> tuple[int, int]:
        """The half-open range of such a buffer's entries on a rank, in memory order."""
        start, stop = self.bucket.layout.piece(self.slot, rank)
        shape = self.param.shape
        return entries_before(shape, start, elements), entries_before(shape, stop, elements)

    def packed(self, value: Any, elements: int | None) -> Any:
        """A state value for `state_dict`; one entry of an array covers `elements` elements of the parameter."""
        assert self.piece is not None
        is_like_piece = isinstance(value, torch.Tensor) and value.shape == self.piece.shape
        if elements is not None or is_like_piece:
            elements = elements or 1
            shape, order = self.entries(elements)
            ranges = tuple(self.range_of(rank, elements) for rank in range(self.bucket.ranks.size))
            return ShardedTensorPiece(value, shape, order, ranges, self.bucket.ranks)
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or not self.is_whole:
            # A number, or an entry of the user's.
            return value
        # Buffers of rows, columns and square matrices: only whole parameters have these.
        return self.alone(value)

    def alone(self, value: torch.Tensor) -> ShardedTensorPiece:
        """A buffer of any shape on the rank that owns the parameter; other ranks pass a meta tensor."""
        shape, numel, ranks = tuple(value.shape), value.numel(), self.bucket.ranks
        pieces = [self.bucket.layout.piece(self.slot, rank) for rank in range(ranks.size)]
        # An empty parameter's buffers are on every rank.
        ranges = tuple((0, numel) if start < stop or not self.slot.numel else (0, 0) for start, stop in pieces)
        local = torch.empty(0, dtype=value.dtype, device=self.param.device) if value.is_meta else value
        order = memory_order(self.param) if shape == tuple(self.param.shape) else tuple(range(len(shape)))
        return ShardedTensorPiece(local, shape, order, ranges, ranks)

    def own(self, name: str, value: Any, elements: int, *, is_cut: bool) -> Any:
        """This rank's part of a saved value."""
        assert self.piece is not None
        if not isinstance(value, torch.Tensor):
            return value
        (shape, order), own_range = self.entries(elements), self.range_of(self.bucket.ranks.rank, elements)
        if isinstance(value, ShardedTensorPiece):
            own_range = own_range if value.shape == shape else (0, value.numel())
            if value.own_range != own_range:
                raise StateError(
                    f"state {name!r} of {self.name} is the piece {value.own_range} of another rank or layout, but "
                    f"this rank has {own_range}: load it with torch.distributed.checkpoint, or load the result of "
                    "full_state_dict()"
                )
            mine = value.local
            if value.shape != shape:
                return mine.view(value.shape)
        elif self.is_whole or not is_cut:
            return value
        elif value.shape != shape:
            found = tuple(value.shape)
            raise StateError(f"state {name!r} of {self.name} has shape {found} in the checkpoint, it needs {shape}")
        else:
            flat = value.detach().permute(order).reshape(-1)
            mine = flat[slice(*own_range)].to(self.piece.device, copy=True)
        return self.shaped(mine) if elements == 1 else mine.view(shape_of_entries(self.piece.shape, elements))

    def take_gradient(self, section: torch.Tensor | None, trains: bool) -> None:
        """Set `piece.grad` to its slice of the reduced bucket, or to None."""
        piece = self.piece
        if piece is None:
            return
        if piece.requires_grad != trains:
            piece.requires_grad_(trains)
        if self.known_gradient[0] is not section:
            cut = None if section is None else self.shaped(self.bucket.cut(section, self.slot))
            self.known_gradient = section, cut
        if piece.grad is not self.known_gradient[1]:
            piece.grad = self.known_gradient[1]


class Sharding(Placement):
    """The placement of a sharded optimizer: parameters are views of buckets, of which each rank updates a section."""

    tables_cover_all = True
    device: torch.device

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
        self.deciders = ReductionGroup([ranks.shard, *norm_groups])  # the ranks that take a step's decision together
        self.buckets: list[Bucket] = []
        self.members: list[Member] = []
        self.member_of: dict[Any, Member] = {}
        self._listed: list[set[int]] = []  # the `id`s of each param group's parameters
        self.rules: list[str | None] = []  # the "rule" of each param group
        self.lay_out(optimizer, names)
        self.device = self.buckets[0].flat.device
        with torch.no_grad():
            # The model's other parameters and its buffers start with rank 0's values too.
            for tensor in (*model.parameters(), *model.buffers()):
                plain = tensor.layout is torch.strided and not tensor.is_quantized
                if tensor not in self.member_of and tensor.device == self.device and plain:
                    stored = tensor.detach()
                    for dim, (size, stride) in enumerate(zip(stored.shape, stored.stride())):
                        # Expanded dimensions share memory: send it once.
                        stored = stored.narrow(dim, 0, 1) if stride == 0 and size > 1 else stored
                    sent = stored.contiguous()
                    # As bytes: backends do not support every dtype.
                    ranks.broadcast(sent.view(-1).view(torch.uint8))
                    stored.copy_(sent)

    def share(self, listed: Listed, ordinal: int) -> Share | None:
        member = self.member_of.get(listed[3])
        share = super().share(listed, ordinal)
        if member is None or share is None:
            # `add_param_group` checks a parameter before its layout exists.
            return share
        if member.piece is None:
            return None
        if "param_names" not in share.group:
            share.label = f"{share.label} ({member.name})"
        share.holder = share.local = member.piece
        share.whole = member.whole
        if member.whole is not None:
            share.start = member.bucket.layout.piece(member.slot, self.ranks.rank)[0]
            share.order = tuple(range(member.param.dim())) if member.by_rows else memory_order(member.param)
        return share

    def holder(self, param: torch.Tensor) -> torch.Tensor:
        member = self.member_of.get(param)
        return param if member is None or member.piece is None else member.piece

    def own_state(self, share: Share, rule: Rule, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        member, entries = self.member_of[share.param], entries_of(saved, rule.state_names)
        if entries and not member.is_whole and not member.keeps_blocks:
            # A section may begin inside a block: decode the blocks.
            saved, entries = dict(saved), {}
            for name, storage in states_in_blocks(saved).items():
                saved[name] = values_of(storage, saved, name, shape=member.param.shape)
                for array in storage.arrays(name):
                    del saved[array.name]
        like_param = {name for name in rule.state_names if rule.states[name].shape != "scalar"}
        cuts = {*MASTER_KEYS, TRAINING, *entries, *like_param}
        return {
            name: member.own(name, value, entries.get(name, 1), is_cut=name in cuts) for name, value in saved.items()
        }

    def sharers(self, params: Iterable[torch.Tensor]) -> ReductionGroup | None:
        return self.ranks.reductions

    def set_ranks(self, plan: Any) -> None:
        """Reduce decisions over all ranks, and rules' reductions over the ranks that shard the state."""
        plan.deciders.ranks, plan.sharers = self.deciders, self.ranks.reductions
        self.show_begun(plan.basis.state)
        plan.basis.state_changes = plan.basis.state.count.changes

        def first_cut(passes: Any) -> int:
            entries = passes.segment.entries
            return min((entry.share.ordinal for entry in entries if entry.whole is not None), default=0)

        # The same order on all ranks: the first parameter of a segment may be whole, and on one rank only.
        plan.shared_sums = [shared_sums(plan.sharers, sorted(engine.passes, key=first_cut)) for engine in plan.engines]

    def show_begun(self, state: dict[Any, Any]) -> None:
        """Make `optimizer.state` true on a rank without state of its own, when state begins on other ranks."""
        # torch's get_optimizer_state_dict steps an optimizer whose `state` is empty: a rank alone would wait forever.
        if not state:
            state[self.members[0].param] = {}

    def lay_out(self, optimizer: Optimizer, names: dict[Any, str]) -> list[Bucket]:
        """Put new parameters into new buckets, with rank 0's values, and make this rank's pieces."""
        self._listed = [set(map(id, group["params"])) for group in optimizer.param_groups]
        self.rules = [group.get("rule") for group in optimizer.param_groups]
        params = [param for param in names if param not in self.member_of]
        items = items_of(optimizer, self.options)
        buckets = make_buckets(params, [items[param] for param in params], self.ranks, self.options)
        for bucket in buckets:
            with torch.no_grad():
                self.ranks.broadcast(bucket.flat)
                if bucket.exact is not None:
                    bucket.exact.copy_(bucket.flat[bucket.own])
            for slot, param in zip(bucket.layout.slots, bucket.params):
                item = items[param]
                member = Member(names[param], param, bucket, slot, item.by_rows, item.unit != ALIGNMENT)
                self.member_of[param] = member
                start, stop = bucket.layout.piece(slot, self.ranks.rank)
                if member.is_whole and start == stop and slot.numel:
                    continue
                # `.data` has its own version counter: the parameters' counters then count writes of other code.
                flat = bucket.cut(bucket.updated, slot)
                member.piece = member.shaped(flat).data.requires_grad_(param.requires_grad)
                if bucket.grad_dtype != member.piece.dtype:
                    member.piece.grad_dtype = bucket.grad_dtype
                if not member.is_whole:
                    member.whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
        self.buckets += buckets
        self.members += [self.member_of[param] for param in params]
        return buckets

    def require_groups(self, optimizer: Optimizer) -> None:
        """Raise if parameters or rules of param groups have changed since `shard` or `add_param_group`."""
        if [set(map(id, group["params"])) for group in optimizer.param_groups] != self._listed:
            raise RuntimeError(
                "param groups of the sharded optimizer have other parameters than shard() divided over the ranks: undo "
                "the change; freeze parameters instead of removing them, add parameters with add_param_group(), or "
                "load full_state_dict() into a new optimizer and shard that; nothing was updated"
            )
        if [group.get("rule") for group in optimizer.param_groups] != self.rules:
            raise RuntimeError(
                "the rule of a param group of the sharded optimizer was changed, but shard() divided parameters for "
                "the earlier rule: undo the change, or shard a new optimizer; nothing was updated"
            )

    def note_stepped(self, params: Iterable[torch.Tensor], has_gradient: Iterable[bool], trains: Iterable[int]) -> None:
        """Note state after a step: trained parameters have it from the first step, frozen ones after a gradient."""
        for member, has_grad, is_trained in zip(map(self.member_of.__getitem__, params), has_gradient, trains):
            member.has_begun = bool(member.has_begun or has_grad or (member.has_begun is None and is_trained))

    def holds_state(self, optimizer: Optimizer, member: Member) -> bool:
        """Whether any rank has state of a parameter."""
        if member.piece is not None:
            return bool(vars(optimizer)["state"].get(member.param))
        if member.has_begun is None:
            # A plan made before the first step allocates state for all parameters that train.
            return member.param.requires_grad and optimizer.plan is not None
        return member.has_begun
