"""Full matrices of sharded DTensors: each is sent to one of the ranks that share it and back, or all to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import GradientError
from .local import slices_here
from .reduction import group_of

Bounds = tuple[tuple[int, int], tuple[int, int]]  # first row and the one after the last; the same of columns


def take_in_matrix(
    exchanges: dict[Any, MatrixExchange], label: str, param: Any, *, everywhere: bool
) -> tuple[MatrixExchange, int]:
    """The exchange of matrices that the same ranks share and work on in the same way, and the number of one in it."""
    mesh = param.device_mesh
    cuts = tuple(at for at, cut in enumerate(param.placements) if not cut.is_replicate() and mesh.size(at) > 1)
    key = mesh, cuts, everywhere
    if key not in exchanges:
        exchanges[key] = MatrixExchange(mesh, cuts, everywhere)
    return exchanges[key], exchanges[key].add(label, param)


class MatrixExchange:
    """Sends parts of matrices between ranks of a mesh, all of a call's in one message to each rank."""

    def __init__(self, mesh: Any, along: Sequence[int], everywhere: bool) -> None:
        self._sizes = [mesh.size(at) for at in along]
        coordinate = mesh.get_coordinate()
        sharing = mesh.mesh.cpu().numpy()[
            tuple(slice(None) if at in along else coordinate[at] for at in range(mesh.ndim))
        ]
        members = sorted(sharing.reshape(-1).tolist())
        self._group = mesh.get_group(along[0]) if len(along) == 1 else group_of(members, [mesh])
        self._coordinates = [tuple(np.argwhere(sharing == rank)[0].tolist()) for rank in members]
        self._along, self._everywhere = list(along), everywhere
        self._ranks, self._rank = len(members), members.index(dist.get_rank())
        self._shapes: list[torch.Size] = []
        self._bounds: list[list[Bounds]] = []  # for each matrix and rank which rows and which columns that rank has
        self._owners: list[int] | None = None

    def add(self, label: str, param: Any) -> int:
        """Take in a matrix; its number."""
        placements = [param.placements[at] for at in self._along]
        # What tensor parallelism cuts, FSDP cuts again: its placement, further to the left, says so.
        order = sorted(range(len(placements)), key=lambda at: not placements[at].is_shard())
        cuts = [(placements[at].dim % param.dim(), at) for at in order]
        self._shapes.append(param.shape)
        # Which rows and columns a rank has: each cut, of a dimension along one of ours, as `torch.chunk` does.
        self._bounds.append([])
        for coordinates in self._coordinates:
            bounds = [(0, size) for size in param.shape]
            for dim, at in cuts:
                start, stop = bounds[dim]
                step = -(-(stop - start) // self._sizes[at])
                first = start + coordinates[at] * step
                bounds[dim] = min(first, stop), min(first + step, stop)
            self._bounds[-1].append((bounds[0], bounds[1]))
        self._owners = None
        place = len(self._shapes) - 1
        mine = [slices_here(param, (1 - dim, 2 - dim)).tolist() for dim in range(2)]
        if mine != [list(range(*bounds)) for bounds in self._bounds[place][self._rank]]:
            raise GradientError(
                f"{label} is a DTensor with placements {tuple(param.placements)}, and its rule takes whole matrices; "
                "they cannot be put together from such parts yet; give it to another rule in a param group of its own"
            )
        return place

    def owns(self, place: int) -> bool:
        """Whether this rank works on a matrix."""
        return self._everywhere or self._owner(place) == self._rank

    def _owner(self, place: int) -> int:
        if self._owners is None:
            work = [shape.numel() * min(shape) for shape in self._shapes]
            load, self._owners = [0] * self._ranks, [0] * len(work)
            for matrix in sorted(range(len(work)), key=lambda at: (-work[at], at)):
                owner = min(range(self._ranks), key=lambda rank: (load[rank], rank))
                self._owners[matrix] = owner
                load[owner] += work[matrix]
        return self._owners[place]

    def _part_shape(self, place: int, rank: int) -> tuple[int, int]:
        (top, bottom), (left, right) = self._bounds[place][rank]
        return bottom - top, right - left

    def _bytes(self, place: int, rank: int, dtype: torch.dtype) -> int:
        rows, columns = self._part_shape(place, rank)
        return rows * columns * dtype.itemsize

    def _cut(self, whole: torch.Tensor, place: int, rank: int) -> torch.Tensor:
        (top, bottom), (left, right) = self._bounds[place][rank]
        return whole[top:bottom, left:right]

    def _whole(self, place: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """A matrix, from the parts of all ranks."""
        whole = pieces[0].new_empty(self._shapes[place])
        for rank, piece in enumerate(pieces):
            self._cut(whole, place, rank).copy_(piece)
        return whole

    def gather(self, parts: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor | None]:
        """Put matrices together where they are worked on; arguments and result as for `linalg.batches.Exchange`."""
        ranks = range(self._ranks)
        mine = [(place, part.dtype) for place, part in parts if self.owns(place)]
        coming = [sum(self._bytes(place, rank, dtype) for place, dtype in mine) for rank in ranks]
        received: Sequence[torch.Tensor]
        if self._everywhere:
            # The same message to all ranks; messages may have different lengths.
            own, longest = _packed([part for _, part in parts], parts), max(coming)
            padded = torch.nn.functional.pad(own, (0, longest - len(own)))
            whole = own.new_empty(self._ranks * longest)
            if longest:
                dist.all_gather_into_tensor(whole, padded, group=self._group)
            received = [whole[rank * longest :][:size] for rank, size in enumerate(coming)]
        else:
            leaving = [[part for place, part in parts if self._owner(place) == rank] for rank in ranks]
            received = self._exchanged([_packed(tensors, parts) for tensors in leaving], coming, parts)
        pieces = [
            _unpacked(buffer, [(self._part_shape(place, rank), dtype) for place, dtype in mine])
            for rank, buffer in enumerate(received)
        ]
        wholes = iter(zip(*pieces))
        return [self._whole(place, next(wholes)) if self.owns(place) else None for place, _ in parts]

    def scatter(self, wholes: Sequence[tuple[int, torch.Tensor | None, torch.Tensor]]) -> None:
        """Take matrices apart; arguments as for `linalg.batches.Exchange`."""
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
        received = self._exchanged([_packed(tensors, like) for tensors in leaving], coming, like)
        for rank, buffer in enumerate(received):
            targets = [part for place, part in like if self._owner(place) == rank]
            for target, piece in zip(targets, _unpacked(buffer, [(part.shape, part.dtype) for part in targets])):
                target.copy_(piece)

    def _exchanged(
        self, leaving: Sequence[torch.Tensor], coming: Sequence[int], like: Sequence[tuple[int, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """One message to each rank, and one from each."""
        if not like:
            return [torch.zeros(0, dtype=torch.uint8, device="cpu")] * self._ranks
        received = torch.empty(sum(coming), dtype=torch.uint8, device=like[0][1].device)
        dist.all_to_all_single(
            received, torch.cat(list(leaving)), list(coming), [len(message) for message in leaving], group=self._group
        )
        return received.split(list(coming))


def _packed(tensors: Sequence[torch.Tensor], like: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The bytes of tensors, one after the other."""
    none = torch.zeros(0, dtype=torch.uint8, device=like[0][1].device) if like else torch.zeros(0, dtype=torch.uint8)
    return torch.cat([none, *(tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)])


def _unpacked(buffer: torch.Tensor, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes, out of their bytes."""
    pieces = buffer.split([math.prod(shape) * dtype.itemsize for shape, dtype in kinds])
    # A tensor begins at a multiple of its items' size.
    aligned = [
        piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        for piece, (_, dtype) in zip(pieces, kinds)
    ]
    return [piece.view(dtype).view(*shape) for piece, (shape, dtype) in zip(aligned, kinds)]
