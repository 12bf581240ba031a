"""A rank's piece of a tensor that several ranks have together, as `torch.distributed.checkpoint` understands it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..compat import checkpoint_types, is_copy, is_empty_like, wrapper_tensor
from .buckets import memory_order
from .layout import Box, boxes

if TYPE_CHECKING:
    from .core import Member
    from .groups import Ranks


class ShardedTensorPiece(torch.Tensor):
    """A tensor of the full shape of which this rank has one range, counted along the memory of its parameter.

    It holds no memory but the range; nothing is computed with it. A range of a tensor of several dimensions is not a
    block of it, but a few blocks side by side: as such a checkpoint stores it, and so reads it on any number of ranks.

    Made by `of` and `alone`.
    """

    local: torch.Tensor
    """What of it is here, flat."""

    here: tuple[int, int]
    """First element and one past the last, in the order of the dimensions in memory."""

    ranges: tuple[tuple[int, int], ...]
    """The range of every rank."""

    order: tuple[int, ...]
    """Its dimensions from the slowest in memory to the fastest."""

    ranks: Any

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...], ranges: Any, ranks: Any
    ) -> ShardedTensorPiece:
        local = local.permute(order if local.shape == shape else memory_order(local)).reshape(-1)
        made = wrapper_tensor(cls, shape, local.dtype, local.device)
        made.local, made.order, made.ranges, made.ranks = local, order, ranges, ranks
        made.here = ranges[ranks.rank]
        return made

    @classmethod
    def of(cls, local: torch.Tensor, member: Member, ranks: Ranks, elements: int = 1) -> ShardedTensorPiece:
        """A buffer beside a parameter, of which this rank has the piece that it has of the parameter.

        Args:
            elements: of how many neighbours one of its entries is.
        """
        shape, order = member.entries(elements)
        ranges = tuple(member.range_of(rank, elements) for rank in range(ranks.size))
        return cls(local, shape, order, ranges, ranks)

    @classmethod
    def alone(
        cls,
        local: torch.Tensor | None,
        shape: tuple[int, ...],
        member: Member,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
    ) -> ShardedTensorPiece:
        """A buffer of any shape that one rank has alone, as it has the parameter."""
        numel = math.prod(shape)
        pieces = [member.bucket.layout.piece(member.slot, rank) for rank in range(ranks.size)]
        # Of an empty parameter every rank has the buffers.
        ranges = tuple((0, numel) if start < stop or not member.slot.numel else (0, 0) for start, stop in pieces)
        if local is None:
            local = torch.empty(0, dtype=dtype, device=member.param.device)
        order = memory_order(member.param) if shape == tuple(member.param.shape) else tuple(range(len(shape)))
        return cls(local, shape, order, ranges, ranks)

    def boxes(self) -> list[Box]:
        """The blocks that are here, in the order of the dimensions in memory."""
        sizes = [self.shape[dim] for dim in self.order]
        if self.numel() == 0:
            return [Box(tuple(0 for _ in sizes), tuple(sizes), 0)]
        return boxes(sizes, *self.here)

    def block(self, box: Box) -> torch.Tensor:
        """The memory of a block, its dimensions in the order of the tensor's."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        first = box.start - self.here[0]
        return self.local[first : first + box.numel].view(box.sizes).permute(inverse)

    def collect(self, *, keep: bool) -> torch.Tensor | None:
        """All of it, in CPU memory; every rank must call it."""
        flat = torch.empty(self.numel(), dtype=self.dtype, device=self.device)
        for rank, (start, stop) in enumerate(self.ranges):
            if start == stop:
                continue
            part = flat[start:stop]
            if rank == self.ranks.rank:
                part.copy_(self.local)
            # As bytes: neither NCCL nor gloo knows 16-bit integers.
            self.ranks.send(part.view(torch.uint8), rank)
        if not keep:
            return None
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.cpu().view([self.shape[dim] for dim in self.order]).permute(inverse)

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        return checkpoint_types().write_items(fqn, self.shape, self.dtype, self._chunks())

    def __create_chunk_list__(self) -> list[Any]:
        types = checkpoint_types()
        return [types.chunk(offsets, sizes) for offsets, sizes in self._chunks()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box, (offsets, _) in zip(self.boxes(), self._chunks()):
            if index.offset is None or tuple(index.offset) == offsets:
                return self.block(box)
        raise ValueError(f"{index.fqn}: this rank has no block at {index.offset}")

    def _chunks(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the blocks, in the order of the tensor's dimensions."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return [
            (tuple(box.offsets[dim] for dim in inverse), tuple(box.sizes[dim] for dim in inverse))
            for box in self.boxes()
        ]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.here
        return f"ShardedTensorPiece(shape={tuple(self.shape)}, dtype={self.dtype}, elements {start} to {stop} here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a piece of a sharded optimizer's state cannot be pickled or copied, as torch.save would: use "
            "torch.distributed.checkpoint, or full_state_dict(); where one rank saves state_dict(), call "
            "consolidate_state_dict() on all ranks before it"
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        piece = next((each for each in args if isinstance(each, cls)), None)
        if piece is not None and is_empty_like(function) and tuple(args[1]) == piece.shape:
            made = {key: (kwargs or {}).get(key) or getattr(piece, key) for key in ("dtype", "device")}
            return cls._like(piece, torch.empty(piece.local.shape, **made))
        if piece is None or not is_copy(function):
            raise TypeError(
                f"{function}: nothing is computed with a piece of a sharded optimizer's state; full_state_dict() gives "
                "ordinary tensors"
            )
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        return cls._like(piece, function(piece.local, **kwargs))

    @classmethod
    def _like(cls, piece: ShardedTensorPiece, local: torch.Tensor) -> ShardedTensorPiece:
        return cls(local, tuple(piece.shape), piece.order, piece.ranges, piece.ranks)
