"""`ShardedTensorPiece`: a tensor of a sharded `state_dict`, of which this rank holds a range of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ...compat import checkpoint_chunk, checkpoint_items, is_copy, is_empty_like, wrapper_tensor
from .buckets import memory_order

Block = tuple[tuple[int, ...], tuple[int, ...], int]
"""A block of a tensor: its offsets and sizes by dimension, and the index of its first element in memory."""


def blocks_of(sizes: Sequence[int], start: int, stop: int) -> list[Block]:
    """The blocks, each contiguous in memory, that cover a range of a tensor's elements."""
    if start >= stop:
        return []
    if not sizes:
        return [((), (), 0)]
    row, blocks = math.prod(sizes[1:]), list[Block]()
    # A part of the first row, whole rows, a part of the last row; each may be empty.
    edges = (start, min(-(-start // row) * row, stop), max(stop // row * row, start), stop)
    for begin, end in pairwise(sorted(edges)):
        place, offset = divmod(begin, row)
        if offset or end - begin < row:
            inner = blocks_of(sizes[1:], offset, offset + end - begin)
            blocks += [((place, *first), (1, *own), begin - offset + at) for first, own, at in inner]
        else:
            blocks.append(((place, *[0] * (len(sizes) - 1)), ((end - begin) // row, *sizes[1:]), begin))
    return blocks


class ShardedTensorPiece(torch.Tensor):
    """A tensor of the full shape of which this rank has one range, in the memory order of its parameter."""

    # It allocates the range only; operations on it raise. A range of a tensor with several dimensions is not one block
    # but a few neighbouring blocks: checkpoints store these, and read them on any number of ranks.

    local: torch.Tensor  # the elements on this rank, flat
    own_range: tuple[int, int]  # the half-open range of elements on this rank, in memory order
    ranges: tuple[tuple[int, int], ...]  # the range of every rank
    order: tuple[int, ...]  # the dimensions from the slowest in memory to the fastest
    ranks: Any

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...], ranges: Any, ranks: Any
    ) -> ShardedTensorPiece:
        local = local.permute(order if local.shape == shape else memory_order(local)).reshape(-1)
        made = wrapper_tensor(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.order, made.ranges, made.ranks = local, order, ranges, ranks
        made.own_range = ranges[ranks.rank]
        return made

    def _blocks(self) -> list[tuple[tuple[int, ...], torch.Size, torch.Tensor]]:
        """The offsets, sizes and memory of this rank's blocks, in the tensor's order of dimensions."""
        sizes = [self.shape[dim] for dim in self.order]
        listed = blocks_of(sizes, *self.own_range) if self.numel() else [((0,) * len(sizes), tuple(sizes), 0)]
        inverse = self._inverse()
        blocks = []
        for offsets, shape, at in listed:
            first = at - self.own_range[0]
            memory = self.local[first : first + math.prod(shape)].view(shape).permute(inverse)
            blocks.append((tuple(offsets[dim] for dim in inverse), memory.shape, memory))
        return blocks

    def _inverse(self) -> list[int]:
        return [self.order.index(dim) for dim in range(len(self.order))]

    def collect(self, *, keep: bool) -> torch.Tensor | None:
        """The full tensor in CPU memory, None without `keep`; every rank must call it."""
        flat = torch.empty(self.numel(), dtype=self.dtype, device=self.device)
        for rank, (start, stop) in enumerate(self.ranges):
            if start == stop:
                continue
            part = flat[start:stop]
            if rank == self.ranks.rank:
                part.copy_(self.local)
            # As bytes: NCCL and gloo do not support 16-bit integers.
            self.ranks.send(part.view(torch.uint8), rank)
        if not keep:
            return None
        return flat.cpu().view([self.shape[dim] for dim in self.order]).permute(self._inverse())

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        chunks = [(offsets, sizes) for offsets, sizes, _ in self._blocks()]
        return checkpoint_items(fqn, self.shape, self.dtype, chunks)

    def __create_chunk_list__(self) -> list[Any]:
        return [checkpoint_chunk(offsets, sizes) for offsets, sizes, _ in self._blocks()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for offsets, _, memory in self._blocks():
            if index.offset is None or tuple(index.offset) == offsets:
                return memory
        raise ValueError(f"{index.fqn}: this rank has no block at {index.offset}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.own_range
        return f"ShardedTensorPiece(shape={tuple(self.shape)}, dtype={self.dtype}, elements {start} to {stop} here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a piece of a sharded optimizer's state cannot be pickled or copied, for example by torch.save: use "
            "torch.distributed.checkpoint or full_state_dict(); if one rank saves state_dict(), call "
            "consolidate_state_dict() on all ranks first"
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        piece = next((value for value in args if isinstance(value, cls)), None)
        if piece is not None and is_empty_like(function) and tuple(args[1]) == piece.shape:
            made = {key: (kwargs or {}).get(key) or getattr(piece, key) for key in ("dtype", "device")}
            return cls._like(piece, torch.empty(piece.local.shape, **made))
        if piece is None or not is_copy(function):
            raise TypeError(
                f"{function} is not supported for a piece of a sharded optimizer's state: use full_state_dict(), which "
                "returns ordinary tensors"
            )
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        return cls._like(piece, function(piece.local, **kwargs))

    @classmethod
    def _like(cls, piece: ShardedTensorPiece, local: torch.Tensor) -> ShardedTensorPiece:
        return cls(local, tuple(piece.shape), piece.order, piece.ranges, piece.ranks)
