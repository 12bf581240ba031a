"""Whole matrices of sharded DTensors: each goes to one rank of those that share it, and back; or all go to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GradientError
from .local import local_part, sharded_dims

__all__ = ["Exchanges", "MatrixExchange"]


class Exchanges:
    """The exchanges of an optimizer: one for the matrices that the same ranks share and work on in the same way."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int, bool], MatrixExchange] = {}

    def add(self, label: str, param: Any, *, everywhere: bool) -> tuple[MatrixExchange, int]:
        """Take in a matrix.

        Args:
            label: how messages call it.
            param: a DTensor that is not whole here.
            everywhere: whether every rank works on it.

        Returns:
            Its exchange, and the number by which that knows it.

        Raises:
            GradientError: for a DTensor that is cut along more than one dimension of its mesh.
        """
        mesh = param.device_mesh
        cuts = [at for at, each in enumerate(param.placements) if not each.is_replicate() and mesh.size(at) > 1]
        if len(cuts) != 1:
            raise GradientError(
                f"{label} is sharded, a DTensor with placements {tuple(param.placements)}, and its rule works on whole "
                "matrices: those that are cut along two dimensions of a mesh cannot be put together yet; give it to "
                "another rule in a param group of its own"
            )
        key = mesh, cuts[0], everywhere
        if key not in self._known:
            self._known[key] = MatrixExchange(mesh, cuts[0], everywhere)
        return self._known[key], self._known[key].add(label, param)


class MatrixExchange:
    """Sends parts of matrices along one dimension of a mesh, all of a call's in one message to each rank.

    Args:
        mesh: the mesh.
        along: its dimension.
        everywhere: whether every rank works on every matrix; else each matrix has one owner, the largest first to the
            rank that has least to do.
    """

    def __init__(self, mesh: Any, along: int, everywhere: bool) -> None:
        self._group = mesh.get_group(along)
        self._ranks, self._rank = mesh.size(along), mesh.get_local_rank(along)
        self._everywhere = everywhere
        self._shapes: list[torch.Size] = []
        self._dims: list[int] = []
        self._owners: list[int] | None = None

    def add(self, label: str, param: Any) -> int:
        """Take in a matrix; its number."""
        (dim,) = sharded_dims(param)
        self._shapes.append(param.shape)
        self._dims.append(dim)
        self._owners = None
        place = len(self._shapes) - 1
        if local_part(param).shape != self._part_shape(place, self._rank):
            raise GradientError(f"{label} is not cut into equal parts as DTensors are; its matrices cannot be gathered")
        return place

    def owns(self, place: int) -> bool:
        """Whether this rank works on a matrix."""
        return self._everywhere or self._owner(place) == self._rank

    def _owner(self, place: int) -> int:
        if self._owners is None:
            work = [shape.numel() * min(shape) for shape in self._shapes]
            load, self._owners = [0] * self._ranks, [0] * len(work)
            for each in sorted(range(len(work)), key=lambda at: (-work[at], at)):
                owner = min(range(self._ranks), key=lambda rank: (load[rank], rank))
                self._owners[each] = owner
                load[owner] += work[each]
        return self._owners[place]

    def _bounds(self, place: int, rank: int) -> tuple[int, int]:
        """Which rows or columns a rank has: as `torch.chunk` cuts."""
        size = self._shapes[place][self._dims[place]]
        step = -(-size // self._ranks)
        return min(rank * step, size), min((rank + 1) * step, size)

    def _part_shape(self, place: int, rank: int) -> torch.Size:
        start, stop = self._bounds(place, rank)
        shape = list(self._shapes[place])
        shape[self._dims[place]] = stop - start
        return torch.Size(shape)

    def _bytes(self, place: int, rank: int, dtype: torch.dtype) -> int:
        return math.prod(self._part_shape(place, rank)) * dtype.itemsize

    def _cut(self, whole: torch.Tensor, place: int, rank: int) -> torch.Tensor:
        start, stop = self._bounds(place, rank)
        return whole.narrow(self._dims[place], start, stop - start)

    def gather(self, parts: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor | None]:
        """Put matrices together where they are worked on; arguments and result as for `matrices.shared.Exchange`."""
        ranks = range(self._ranks)
        mine = [(place, part.dtype) for place, part in parts if self.owns(place)]
        coming = [sum(self._bytes(place, rank, dtype) for place, dtype in mine) for rank in ranks]
        if self._everywhere:
            received = self._from_all(_packed([part for _, part in parts], parts), coming)
        else:
            leaving = [[part for place, part in parts if self._owner(place) == rank] for rank in ranks]
            received = self._exchanged([_packed(each, parts) for each in leaving], coming, parts)
        pieces = [
            _unpacked(buffer, [(self._part_shape(place, rank), dtype) for place, dtype in mine])
            for rank, buffer in enumerate(received)
        ]
        wholes = iter(zip(*pieces))
        return [
            torch.cat(next(wholes), dim=self._dims[place]) if self.owns(place) else None  # type: ignore[arg-type]
            for place, _ in parts
        ]

    def scatter(self, wholes: Sequence[tuple[int, torch.Tensor | None, torch.Tensor]]) -> None:
        """Take matrices apart; arguments as for `matrices.shared.Exchange`."""
        if self._everywhere:
            for place, whole, part in wholes:
                assert whole is not None
                part.copy_(self._cut(whole, place, self._rank))
            return
        ranks, like = range(self._ranks), [(place, part) for place, _, part in wholes]
        leaving = [[self._cut(whole, place, rank) for place, whole, _ in wholes if whole is not None] for rank in ranks]
        coming = [
            sum(self._bytes(place, self._rank, part.dtype) for place, part in like if self._owner(place) == rank)
            for rank in ranks
        ]
        received = self._exchanged([_packed(each, like) for each in leaving], coming, like)
        for rank, buffer in enumerate(received):
            targets = [part for place, part in like if self._owner(place) == rank]
            for target, piece in zip(targets, _unpacked(buffer, [(part.shape, part.dtype) for part in targets])):
                target.copy_(piece)

    def _exchanged(
        self, leaving: Sequence[torch.Tensor], coming: Sequence[int], like: Sequence[tuple[int, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """One message to each rank, and one from each."""
        if not like:
            return [torch.zeros(0, dtype=torch.uint8)] * self._ranks
        received = torch.empty(sum(coming), dtype=torch.uint8, device=like[0][1].device)
        dist.all_to_all_single(
            received, torch.cat(list(leaving)), list(coming), [len(each) for each in leaving], group=self._group
        )
        return received.split(list(coming))

    def _from_all(self, own: torch.Tensor, coming: Sequence[int]) -> Sequence[torch.Tensor]:
        """The same message to all ranks; messages may have different lengths."""
        longest = max(coming)
        if not longest:
            return [own] * self._ranks
        padded = own.new_zeros(longest)
        padded[: len(own)] = own
        received = own.new_empty(self._ranks * longest)
        dist.all_gather_into_tensor(received, padded, group=self._group)
        return [each[:size] for each, size in zip(received.split(longest), coming)]


def _packed(tensors: Sequence[torch.Tensor], like: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The bytes of tensors, one after the other."""
    none = torch.zeros(0, dtype=torch.uint8, device=like[0][1].device) if like else torch.zeros(0, dtype=torch.uint8)
    return torch.cat([none, *(tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)])


def _unpacked(buffer: torch.Tensor, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes, out of their bytes."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
    # A copy each: a tensor begins at a multiple of its items' size.
    return [each.clone().view(dtype).view(shape) for each, (shape, dtype) in zip(buffer.split(sizes), kinds)]
