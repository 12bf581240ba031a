"""Flat memory: buckets that parameters and gradients are views of, with each parameter's own memory format."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import PeerMemory
from ..engine import is_dense
from .groups import Ranks
from .layout import ALIGNMENT, BucketLayout, Item, Slot, padding_advice, plan_buckets

_CALLER = 6
"""Frames from a warning about buckets to the call of `shard`."""

_BUFFERS = ("contiguous", "bucket")


@dataclass(frozen=True)
class Options:
    """How gradients and parameters travel; the arguments of `shard`.

    Args:
        grad_sync_dtype: the type that gradients are accumulated and summed in; None for the parameter's.
    """

    overlap_grad_sync: bool  # reduce a bucket as soon as backward has completed it
    overlap_param_sync: bool  # gather buckets while what follows the step already runs
    bucket_cap_mb: float | None  # MiB of gradients in a bucket; None for a part of all
    grad_sync_dtype: torch.dtype | None
    param_sync_dtype: torch.dtype | None  # the type that parameters travel in; None for their own
    grad_buffer: str  # "contiguous" keeps memory for all gradients, "bucket" only while a bucket is being filled
    param_buffer: str  # "contiguous" for one allocation, "bucket" for one for each bucket, "peers" for what GPUs share
    average: bool  # whether gradients are averaged over the ranks, not summed

    def check(self) -> None:
        """Raise `ValueError` for an option that is none of those."""
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"Invalid bucket_cap_mb: {self.bucket_cap_mb}; it must be positive")
        for name, kinds in (("grad_buffer", _BUFFERS), ("param_buffer", (*_BUFFERS, "peers"))):
            if getattr(self, name) not in kinds:
                listed = f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
                raise ValueError(f"Invalid {name}: {getattr(self, name)!r}; it must be {listed}")

    def sync_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What gradients and parameters of a param group travel in: what the group says, or else these options."""
        return group.get("grad_sync_dtype") or self.grad_sync_dtype, group.get(
            "param_sync_dtype"
        ) or self.param_sync_dtype

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `ValueError` for what a param group cannot travel in."""
        grad, param = self.sync_dtypes(group)
        for name, dtype in (("grad_sync_dtype", grad), ("param_sync_dtype", param)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise ValueError(f"Invalid {name}: {dtype!r}; it must be a torch.dtype, or None for the parameter's")
        if grad is not None and not grad.is_floating_point:
            raise ValueError(f"Invalid grad_sync_dtype: {grad}; sums need a floating-point type")


@dataclass(frozen=True)
class Division:
    """How a parameter is divided over the ranks."""

    cost: int | None = None  # what its update costs the rank that has all of it; None where it is cut
    unit: int = ALIGNMENT  # neighbours in memory that stay together where it is cut
    by_rows: bool = False  # whether pieces are whole rows of blocks, and of their shape; others are flat

    @property
    def keeps_blocks(self) -> bool:
        """Whether no block of a state is cut."""
        return self.unit != ALIGNMENT


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest in memory to the fastest; of a tensor with gaps, those of a contiguous one.

    Example:
        >>> memory_order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    strides = tensor.stride()
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)) if is_dense(tensor) else dims)


def loses_bits(dtype: torch.dtype, sync_dtype: torch.dtype | None) -> bool:
    """Whether numbers lose bits when they travel in another type; in an integer type their bytes travel."""
    sent = sync_dtype or dtype
    return sent.is_floating_point and torch.promote_types(dtype, sent) != sent


def view_of(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and memory format of another, over flat memory."""
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset())


class Bucket:
    """A bucket's memory on one rank."""

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[torch.Tensor],
        ranks: Ranks,
        sync_dtypes: tuple[torch.dtype | None, torch.dtype | None],
        memory: torch.Tensor,
        peers: PeerMemory | None = None,
    ) -> None:
        self.layout = layout
        self.peers = peers
        """What it lies in, if the other ranks read its memory by themselves."""
        self.params = list(params)
        self.ranks = ranks
        self.dtype = memory.dtype
        self.grad_dtype, self.sync_dtype = (dtype or memory.dtype for dtype in sync_dtypes)
        self.flat = memory
        self.own = range(ranks.rank * layout.section, (ranks.rank + 1) * layout.section)
        self._section = self.section_of(memory)
        self.views: list[torch.Tensor] = []
        with torch.no_grad():
            for slot, param in zip(layout.slots, self.params):
                view = view_of(memory[slot.offset : slot.offset + slot.numel], param)
                view.copy_(param)
                param.data = view
                self.views.append(view)
        self.exact: torch.Tensor | None = None
        """This rank's section as the optimizer keeps it, where what travels has lost bits."""
        if loses_bits(self.dtype, self.sync_dtype):
            self.exact = self.section_of(memory).clone()

    def theirs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each other rank its section of this rank's memory, and the same in its own: what is fetched from it."""
        if self.peers is None:
            return []
        begin, size = int(self.flat.storage_offset()), self.layout.section
        found = []
        for rank in range(self.ranks.size):
            first, stop = rank * size, (rank + 1) * size
            if rank != self.ranks.rank:
                found.append((self.flat[first:stop], self.peers.of(rank, begin + first, begin + stop)))
        return found

    def follow_writes(self) -> None:
        """Take over what other code has written to this rank's section, where that is not what the optimizer keeps."""
        if self.exact is None:
            return
        here = self._section
        sent = self.exact.to(self.sync_dtype).to(self.dtype)
        # A NaN is what was sent of a NaN.
        same = (sent == here) | ((sent != sent) & (here != here))
        self.exact.copy_(torch.where(same, self.exact, here))

    def section_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's section of flat memory of the bucket."""
        return flat[self.own.start : self.own.stop]

    @property
    def updated(self) -> torch.Tensor:
        """This rank's section of the parameters, where the optimizer updates them."""
        return self._section if self.exact is None else self.exact

    def piece(self, slot: Slot) -> tuple[int, int]:
        """The elements of a parameter that are this rank's, first and one past the last in storage order."""
        return self.layout.piece(slot, self.ranks.rank)

    def cut(self, section: torch.Tensor, slot: Slot) -> torch.Tensor:
        """This rank's piece of a parameter, out of memory for this rank's section."""
        start, stop = self.piece(slot)
        if start == stop:
            return section[:0]
        first = slot.offset + start - self.own.start
        return section[first : first + stop - start]

    @property
    def trains(self) -> bool:
        """Whether a parameter of it does; the same on every rank."""
        return any(param.requires_grad for param in self.params)

    def take_back(self) -> None:
        """Let parameters whose memory somebody has replaced be views of the bucket again, with their values."""
        with torch.no_grad():
            for param, view in zip(self.params, self.views):
                if param.data_ptr() == view.data_ptr():
                    continue
                if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                    raise RuntimeError(
                        f"a parameter was {tuple(view.shape)}, {view.dtype} on {view.device} when shard() was called, "
                        f"and is {tuple(param.shape)}, {param.dtype} on {param.device} now: move and convert a model "
                        "before sharding its optimizer"
                    )
                view.copy_(param)
                param.data = view


def make_buckets(
    params: Sequence[torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    divisions: Sequence[Division],
    ranks: Ranks,
    options: Options,
) -> tuple[list[Bucket], list[tuple[int, ...]]]:
    """Bring parameters into buckets, in the order in which backward completes them.

    Args:
        groups: the param group of each.
        divisions: of each how it is divided over the ranks.
    """
    items = []
    dtypes = list(map(options.sync_dtypes, groups))
    for param, sync_dtypes, division in zip(params, dtypes, divisions):
        itemsize = (sync_dtypes[0] or param.dtype).itemsize
        whole, cost, trains = division.cost is not None, division.cost or 0, param.requires_grad
        kind = (param.dtype, *sync_dtypes)
        items.append(Item(param.numel(), itemsize, kind, whole, cost, trains, division.unit))
    cap = None if options.bucket_cap_mb is None else options.bucket_cap_mb * 2**20
    layouts = plan_buckets(items, ranks.size, cap)
    advice = padding_advice(items, layouts, cap)
    if advice:
        warnings.warn(f"shard(): {advice}", stacklevel=_CALLER)
    members = [tuple(slot.index for slot in layout.slots) for layout in layouts]
    device, kinds = params[0].device, [params[places[0]].dtype for places in members]
    sizes, peers = [layout.numel for layout in layouts], dict[torch.dtype, PeerMemory]()
    if options.param_buffer == "peers" and ranks.size > 1:
        for dtype in dict.fromkeys(kinds):
            own = [size for size, kind in zip(sizes, kinds) if kind == dtype]
            peers[dtype] = _shared(sum(own), dtype, device, ranks)
    memories = _allocate(sizes, kinds, device, options.param_buffer != "bucket", peers)
    buckets = [
        Bucket(layout, [params[place] for place in places], ranks, dtypes[places[0]], memory, peers.get(memory.dtype))
        for layout, places, memory in zip(layouts, members, memories)
    ]
    return buckets, members


def _shared(numel: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> PeerMemory:
    """Memory that the ranks that split the state read from each other; they all raise if one of them cannot."""
    made, hosts = None, set(ranks.each(socket.gethostname()))
    reason = f"ranks that split the state are on {len(hosts)} hosts" if len(hosts) > 1 else ""
    try:
        made = PeerMemory(numel, dtype, device)
    except RuntimeError as error:
        reason = reason or str(error)
    _require_shared(ranks.everyone(reason))
    assert made is not None
    try:
        made.meet_first(ranks.shard)
    except RuntimeError as error:
        reason = str(error)
    _require_shared(ranks.everyone(reason))
    return made


def _require_shared(reasons: Sequence[str]) -> None:
    reason = next(filter(None, reasons), "")
    if reason:
        raise ValueError(f"param_buffer='peers': {reason}; take 'contiguous', which sends messages")


def _allocate(
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    together: bool,
    peers: Mapping[torch.dtype, PeerMemory],
) -> list[torch.Tensor]:
    """Zeroed flat memory of these sizes: one allocation each, or one for all of a dtype, which may be there."""
    if not together:
        return [torch.zeros(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes)]
    parts: dict[torch.dtype, Any] = {}
    for dtype in dict.fromkeys(dtypes):
        own = [size for size, each in zip(sizes, dtypes) if each == dtype]
        whole = peers[dtype].memory if dtype in peers else torch.zeros(sum(own), dtype=dtype, device=device)
        parts[dtype] = iter(whole.split(own))
    return [next(parts[dtype]) for dtype in dtypes]
