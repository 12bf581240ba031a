"""The ranks that share an optimizer: those that split its state, and those that hold the same part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..compat import gather_together
from .rank_monitor import RankMonitor, rank_monitor

__all__ = ["Deciders", "Ranks", "ranks_of"]

# Their names until torch 2.12.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AVERAGED = (torch.bfloat16, torch.float32, torch.float64)
"""Not float16: a small gradient that is divided before it is added up loses bits, or becomes zero."""


_OPERATIONS: tuple[Any, Any] = (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if dist.is_available() else (None, None)
"""Those of sums and of means."""


class Awaited(NamedTuple):
    """Communication that has begun.

    Args:
        works: what to wait for.
        monitor: asked if it fails; None for what cannot.
    """

    works: Sequence[Any]
    monitor: RankMonitor | None

    def wait(self) -> None:
        """Let the host, or the current stream of a GPU, wait for it."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if self.monitor is not None:
                self.monitor.explain(error)
            raise


ARRIVED = Awaited((), None)
"""What runs in the order of the current stream: there is nothing to wait for."""


class Ranks:
    """The process groups of a sharded optimizer, as one rank sees them; sums over them as `placements.Agreement` makes.

    Communication that fails because a rank is gone raises `RankError`.

    Args:
        shard: the group over which state is split.
        replicate: the group of ranks that hold the same part, or None.
    """

    def __init__(self, shard: Any, replicate: Any = None) -> None:
        self.shard = shard
        self.replicate = replicate
        self.rank = dist.get_rank(shard)
        self.size = dist.get_world_size(shard)
        self.copies = 1 if replicate is None else dist.get_world_size(replicate)
        self.count = self.size * self.copies
        """All ranks, those that hold copies too."""
        self.monitor = rank_monitor()

    def __deepcopy__(self, memo: Any) -> Ranks:
        # Who copies what ranks have together does not make other ranks; process groups cannot be copied.
        return self

    def apart(self) -> Ranks:
        """The same ranks over groups of their own, in which no other messages come between; all of them call it."""
        made = [
            dist.new_group(dist.get_process_group_ranks(each), use_local_synchronization=True) for each in self.groups
        ]
        return Ranks(*made)

    @property
    def can_be_captured(self) -> bool:
        """Whether what they do together can be a part of a CUDA graph."""
        return all("nccl" in dist.get_backend_config(group) for group in self.groups)

    def can_average(self, flat: torch.Tensor) -> bool:
        """Whether messages bring means as exactly as sums that are divided; then nobody has to divide them.

        NCCL multiplies by 1/N in the type of the tensor before it adds up. That is exact for powers of two alone: in
        bfloat16 a third is wrong by 0.2%.

        Args:
            flat: what is to travel, or memory like it.
        """
        powers_of_two = all(number & (number - 1) == 0 for number in (self.size, self.copies))
        return powers_of_two and self.count > 1 and flat.is_cuda and self.can_be_captured and flat.dtype in _AVERAGED

    @property
    def groups(self) -> list[Any]:
        """The groups that together reach all ranks."""
        return [self.shard] if self.copies == 1 else [self.shard, self.replicate]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks that split the state; copies hold the same sums.

        Args:
            values: of one shape on all ranks.
        """
        self.add_in(self.shard, values)

    def add_in(self, group: Any, values: torch.Tensor, *, mean: bool = False) -> None:
        """Replace numbers by their sums over a group of ranks; by their means where it `can_average` them."""
        try:
            dist.all_reduce(values, _OPERATIONS[mean], group)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise

    def begin_to_add(self, values: torch.Tensor) -> Any:
        """Begin to replace numbers by their sums over the ranks that split the state; gives what to wait for.

        On a GPU it runs in the current stream.
        """
        try:
            work = dist.all_reduce(values, dist.ReduceOp.SUM, self.shard, async_op=not values.is_cuda)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        return ARRIVED if work is None else Awaited((work,), self.monitor)

    def largest(self, values: torch.Tensor) -> None:
        """Replace numbers by the largest over these ranks; NaN on one gives NaN on all.

        Args:
            values: of one shape on all ranks.
        """
        missing = values.isnan()
        both = torch.stack([torch.where(missing, -torch.inf, values), missing.to(values.dtype)])
        with self.monitor:
            dist.all_reduce(both, dist.ReduceOp.MAX, self.shard)
        values.copy_(torch.where(both[1] > 0, torch.nan, both[0]))

    def reduce_scatter(self, section: torch.Tensor, flat: torch.Tensor, *, mean: bool = False) -> Any:
        """Begin to sum flat memory up over the ranks that split the state, each receiving its section.

        On a GPU it runs in the current stream: the library's own would only be waited for by ours.

        Args:
            section: where this rank's section goes; it may be a part of `flat`.
            flat: as many elements as all sections.
            mean: whether it is to be the mean, where it `can_average`.

        Returns:
            What to wait for.
        """
        try:
            work = _reduce_scatter(section, flat, _OPERATIONS[mean], self.shard, async_op=not flat.is_cuda)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        return ARRIVED if work is None else Awaited((work,), self.monitor)

    def all_gather(self, flats: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]) -> Any:
        """Begin to give all of these ranks every section; several tensors go in one message, where the backend can.

        Args:
            flats: where the sections of all of them go; of one dtype.
            sections: this rank's of each; it may be a part of the whole.

        Returns:
            What to wait for.
        """
        try:
            began, work = gather_together(self.shard, flats, sections) if len(flats) > 1 else (False, None)
            if began:
                return ARRIVED if work is None else Awaited((work,), self.monitor)
            works = [
                _all_gather(flat, section, group=self.shard, async_op=not flat.is_cuda)
                for flat, section in zip(flats, sections)
            ]
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        works = [work for work in works if work is not None]
        return Awaited(works, self.monitor) if works else ARRIVED

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what the first one has."""
        with self.monitor:
            for group in self.groups:
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Give the ranks that split the state what one of them has."""
        with self.monitor:
            dist.broadcast(tensor, dist.get_global_rank(self.shard, source), self.shard)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """What each rank that splits the state has; of one shape on all of them."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        with self.monitor:
            dist.all_gather(found, values, self.shard)
        return found

    def leads(self, tensor: Any) -> bool:
        """Whether this is the first of them that holds a piece: no other has it."""
        return True

    def everyone(self, value: Any) -> list[Any]:
        """One object of each rank, on every rank."""
        found = [value]
        for group in self.groups:
            found = [each for part in self._each_of(group, found) for each in part]
        return found

    def each(self, value: Any) -> list[Any]:
        """One object of each rank that splits the state, on each of them."""
        return self._each_of(self.shard, value)

    def _each_of(self, group: Any, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(group)
        with self.monitor:
            dist.all_gather_object(found, value, group)
        return found


class Deciders:
    """All ranks that decide a step together: those that share an optimizer, and those with other parts of the model.

    Args:
        ranks: those that share it.
        others: groups of ranks with other parameters, as tensor- and pipeline-parallel ones.
    """

    def __init__(self, ranks: Ranks, others: Sequence[Any] = ()) -> None:
        self._ranks, self.others = ranks, list(others)
        self._groups = [group for group in (ranks.shard, *self.others) if dist.get_world_size(group) > 1]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over all of them; copies of a part of the state count once."""
        for group in self._groups:
            self._ranks.add_in(group, values)


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh.

    Args:
        mesh: None for all ranks, else a DeviceMesh of one dimension, or of two: one over which state is split and one
            over which it is replicated. They are found by their names if one starts with "shard" or "replicate", or
            with "dp_shard" or "dp_replicate"; without names the first replicates, as for torch's `fully_shard`.

    Raises:
        ValueError: for torch.distributed not initialized, or a mesh that does not fit.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        return Ranks(dist.group.WORLD)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return Ranks(mesh.get_group())
    shard = _shard_dimension(mesh.mesh_dim_names)
    return Ranks(mesh.get_group(shard), mesh.get_group(1 - shard))


def _shard_dimension(names: Sequence[str] | None) -> int:
    for dim, name in enumerate(names or ()):
        bare = name.removeprefix("dp_")
        if bare.startswith("shard"):
            return dim
        if bare.startswith("replicate"):
            return 1 - dim
    if names:
        raise ValueError(
            f"which dimension of a mesh {tuple(names)} splits the state and which replicates it? Call them 'shard' and "
            "'replicate'"
        )
    return 1
