"""Communication between ranks: `ReductionGroup` reduces numbers of a step, `Ranks` sends buckets of a shard."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..compat import gather_together, group_device_types, is_capturing, root_mesh
from ..devices import is_host
from ..errors import GradientError
from .local import is_distributed

# Named reduce_scatter_tensor and all_gather_into_tensor until torch 2.12.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AVERAGED = (torch.bfloat16, torch.float32, torch.float64)
"""Not float16: a small gradient that is divided before the sum loses bits, or becomes zero."""


_OPERATIONS: tuple[Any, Any] = (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if dist.is_available() else (None, None)
"""The reduce operations of sums and means."""

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Process groups made by `group_of`, per initialization of torch.distributed."""

_counts: weakref.WeakKeyDictionary[Any, Counter[Hashable]] = weakref.WeakKeyDictionary()
"""The number of optimizers so far, per initialization of torch.distributed."""


def next_number(among: Hashable) -> int:
    """The number of a new optimizer among all optimizers of the same ranks, in the order of construction."""
    counts = _counts.setdefault(dist.group.WORLD, Counter())
    counts[among] += 1
    return counts[among]


def message_length(numbers: int) -> int:
    """The padded length of a message, the same for most optimizers."""
    # If ranks step optimizers in different orders, messages of different lengths make backends hang or abort.
    return max(1024, 1 << (numbers - 1).bit_length())


class Received(NamedTuple):
    """Reduced numbers that are copied to the host, and their expected values."""

    expected: list[float]
    values: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def begin(cls, expected: list[float], values: torch.Tensor) -> Received:
        """Start the copy of numbers to the host."""
        if not values.is_cuda:
            return cls(expected, values.clone(), None)
        pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(expected, pinned, event)

    def as_expected(self) -> bool:
        """Whether the numbers have the expected values; waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist() == self.expected


class ReductionGroup:
    """Ranks that reduce numbers, with bitwise equal results on all of them."""

    # The ranks of process groups, which are reduced in turn and hold each part of a tensor once; or, by `of_tensors`,
    # all ranks of the meshes of some DTensors.
    # If an optimizer has a number, its messages begin with a tag, a hash of the number. Ranks that step optimizers in
    # different orders mix their messages: then the reduced tag differs from the expected tag. On a CPU the tag is
    # checked before the numbers are used. On a GPU the host waits for the first message only; later it checks tags
    # that have arrived, without a wait.

    def __init__(
        self,
        groups: Sequence[Any] | None,
        *,
        ranks: Sequence[int] | None = None,
        meshes: Sequence[Any] = (),
        number: int | None = None,
    ) -> None:
        if groups:
            ranks = dist.get_process_group_ranks(groups[0])
        self.ranks: Sequence[int] = ranks or ()  # with several process groups, the ranks of the first group
        self.size = len(self.ranks)
        self._process_groups, self._meshes, self._number = groups, meshes, number
        self._shares: dict[Any, float] = {}
        self._frames: dict[Any, tuple[torch.Tensor, torch.Tensor, list[float]]] = {}
        self._received: Received | None = None  # the last tag that was sent to the host

    @cached_property
    def _groups(self) -> list[tuple[Any, bool]]:
        """The process groups with several ranks, and whether the backend of each supports host tensors."""
        if self._process_groups is not None:
            groups = [group for group in self._process_groups if dist.get_world_size(group) > 1]
        else:
            groups = [group_of(self.ranks, self._meshes)] if len(self.ranks) > 1 else []
        able = [group_device_types(group) for group in groups]
        return [(group, kinds is None or "cpu" in kinds) for group, kinds in zip(groups, able)]

    @classmethod
    def of_tensors(cls, tensors: Sequence[tuple[str, Any]], number: int | None = None) -> ReductionGroup:
        """All ranks of the meshes of labelled DTensors; `number` is the optimizer's, see `next_number`."""
        # The meshes may differ if one contains the others, or if all are slices of one mesh. The other ranks then hold
        # copies of a plain tensor, or of a tensor on a smaller mesh: tensor-parallel ranks hold copies of norm weights
        # that only FSDP shards. A sum over all tensors is one all-reduce: each rank adds its parts, divided by the
        # number of ranks with the same part.
        meshes: list[Any] = []
        labels: list[str] = []
        for label, tensor in tensors:
            if not any(mesh is tensor.device_mesh for mesh in meshes):
                meshes.append(tensor.device_mesh)
                labels.append(label)
        return cls(None, ranks=_ranks_of(meshes, labels), meshes=meshes, number=number)

    @property
    def rank(self) -> int:
        """This rank's index in `ranks`."""
        return self.ranks.index(dist.get_rank())

    def leads(self, tensor: Any) -> bool:
        """Whether this rank is the first with its part of a tensor."""
        if not self._meshes:
            return True
        if not is_distributed(tensor):
            return self.rank == 0
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinate = mesh.get_coordinate()
        firsts = (not at or not placement.is_replicate() for at, placement in zip(coordinate, placements))
        return self.ranks[0] in mesh.mesh and all(firsts)

    def share(self, tensor: Any, over: tuple[int, int] | None = None) -> float:
        """The weight of this rank's sums over its part of a tensor: 1 / the number of ranks with the same part."""
        if not self._meshes:
            return 1.0
        if not is_distributed(tensor):
            return 1 / len(self.ranks)
        mesh, placements, gone = tensor.device_mesh, tensor.placements, range(*(over or (0, 0)))
        if (mesh, placements, gone) not in self._shares:
            copies = len(self.ranks) // mesh.size()
            for dim, placement in enumerate(placements):
                has_copies = placement.is_replicate() or placement.dim % tensor.dim() in gone
                copies *= mesh.size(dim) if has_copies else 1
            self._shares[mesh, placements, gone] = 1 / copies
        return self._shares[mesh, placements, gone]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks; after the first call no host waits for a GPU."""
        if self._groups:
            self._combine(values, dist.ReduceOp.SUM)

    def average(self, values: torch.Tensor) -> None:
        """Replace numbers by their means over the ranks of process groups, as `add` does by their sums."""
        self.add(values)
        values.div_(self._count)

    def largest(self, values: torch.Tensor) -> None:
        """Replace numbers by their maxima over the ranks; NaN propagates."""
        if not self._groups:
            return
        is_nan = values.isnan()
        both = torch.stack([torch.where(is_nan, -torch.inf, values), is_nan.to(values.dtype)])
        self._combine(both, dist.ReduceOp.MAX)
        values.copy_(torch.where(both[1] > 0, torch.nan, both[0]))

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """All-gather tensors of the same shape, in a dtype that collectives support."""
        if not self._groups:
            return [values]
        group, supports_cpu = self._groups[0]
        values = values if supports_cpu else _on_gpu(values)
        gathered = [torch.empty_like(values) for _ in self.ranks]
        dist.all_gather(gathered, values, group)
        return gathered

    @cached_property
    def _count(self) -> int:
        """The number of ranks that a message is reduced over."""
        return math.prod(dist.get_world_size(group) for group, _ in self._groups)

    def _combine(self, values: torch.Tensor, operation: Any) -> None:
        if self._number is None:
            self._all_reduce(values, operation)
            return
        frame = values.shape, values.device, operation
        if frame not in self._frames:
            tag = float(zlib.crc32(repr((self._number, tuple(values.shape))).encode()))  # float64 sums of it are exact
            head = values.new_tensor([tag, -tag], dtype=torch.float64)
            count = len(head) + values.numel()
            tail = head.new_zeros(message_length(count) - count)
            times = self._count if operation == dist.ReduceOp.SUM else 1
            self._frames[frame] = head, tail, [tag * times, -tag * times]
        head, tail, expected = self._frames[frame]  # the tag, padding, and the expected reduced tag
        message = torch.cat([head, values.reshape(-1), tail])
        self._all_reduce(message, operation)
        self._compare(message[: len(head)], expected)
        values.copy_(message[len(head) : len(head) + values.numel()].view_as(values))

    def _all_reduce(self, values: torch.Tensor, operation: Any) -> None:
        for group, supports_cpu in self._groups:
            sent = values if supports_cpu else _on_gpu(values)
            try:
                dist.all_reduce(sent, operation, group)
            except RuntimeError as error:
                ranks = dist.get_process_group_ranks(group)
                raise RuntimeError(
                    f"ranks {ranks} decide steps together, and a rank did not join their all-reduce: it has failed, "
                    "does not step, or does not have the same max_grad_norm, skip_above or skip_nonfinite "
                    f"({error})"
                ) from error
            if sent is not values:
                values.copy_(sent)

    def _compare(self, tag: torch.Tensor, expected: list[float]) -> None:
        before = self._received
        if is_capturing() or (before is not None and before.event is not None and not before.event.query()):
            return
        self._received = Received.begin(expected, tag)
        if not (self._received if before is None or self._received.event is None else before).as_expected():
            raise ValueError(
                f"ranks {list(self.ranks)} disagree on which optimizer steps, or on whether step() gets a loss, and "
                "have reduced different values: create and step optimizers in the same order on all ranks, and pass a "
                "loss on all ranks or on none"
            )


def _on_gpu(values: torch.Tensor) -> torch.Tensor:
    """Copy host numbers to the GPU, for a backend that supports only CUDA tensors."""
    return values.cuda() if is_host(values.device) and torch.cuda.is_available() else values


def _ranks_of(meshes: Sequence[Any], labels: Sequence[str]) -> list[int]:
    """The ranks of the largest mesh if it contains all others, else of the smallest slice of the root that does."""
    members = [set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    largest = max(members, key=len)
    if all(ranks <= largest for ranks in members):
        return sorted(largest)
    root = root_mesh(meshes[0])
    if root is not None and all(root_mesh(mesh) == root for mesh in meshes):
        grid = root.mesh.cpu().numpy()
        coordinate = np.argwhere(grid == dist.get_rank())[0]
        reached = np.argwhere(np.isin(grid, list(set().union(*members))))
        spans = (reached != coordinate).any(axis=0)
        slices = tuple(slice(None) if spanned else int(at) for spanned, at in zip(spans, coordinate))
        return sorted(grid[slices].reshape(-1).tolist())
    other = next(place for place, ranks in enumerate(members) if not ranks <= largest)
    raise GradientError(
        f"{labels[other]} is on {meshes[other]}, {labels[members.index(largest)]} on "
        f"{meshes[members.index(largest)]}: neither mesh contains the other and they are not slices of one mesh, so "
        "ranks cannot agree on a norm; create one mesh with init_device_mesh and use slices of it"
    )


def group_of(ranks: Sequence[int], meshes: Sequence[Any]) -> Any:
    """An existing or new process group of these ranks; only these ranks need to call it."""
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    for mesh in meshes:
        for group in map(mesh.get_group, range(mesh.ndim)):
            if sorted(dist.get_process_group_ranks(group)) == list(ranks):
                return group
    groups = _groups.setdefault(world, {})
    if tuple(ranks) not in groups:
        groups[tuple(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[tuple(ranks)]


class Ranks:
    """The process groups of a sharded optimizer, and the collectives of its buckets."""

    def __init__(self, shard: Any, replicate: Any, name: Any = None, in_steps: Ranks | None = None) -> None:
        self.shard = shard
        self.replicate = replicate
        self.rank = dist.get_rank(shard)
        self.size = dist.get_world_size(shard)
        self.copies = 1 if replicate is None else dist.get_world_size(replicate)
        self.count = self.size * self.copies  # the number of all ranks, including replicas
        self.name = name  # the unique name of the sharded optimizer, the same on all ranks
        self.in_steps = in_steps
        """The groups of step messages, shared by all optimizers of these ranks; None for this object's groups. With
        separate groups, ranks that step optimizers in different orders would deadlock instead of comparing messages."""
        self.reductions = ReductionGroup([shard])  # over the ranks that shard the state; replicas have equal results

    def __deepcopy__(self, memo: Any) -> Ranks:
        # Process groups cannot be copied; a copied owner shares them.
        return self

    def apart(self) -> Ranks:
        """The same ranks with separate process groups, without other messages; all ranks must call it."""
        shard, replicate = (
            None
            if group is None
            else dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
            for group in (self.shard, self.replicate)
        )
        return Ranks(shard, replicate, self.name, self)

    @property
    def can_be_captured(self) -> bool:
        """Whether CUDA graphs can hold the collectives."""
        return all("nccl" in dist.get_backend_config(group) for group in self.groups)

    def can_average(self, flat: torch.Tensor) -> bool:
        """Whether ReduceOp.AVG is as exact as a sum divided by the number of ranks."""
        # NCCL multiplies by 1/N in the tensor's dtype before the sum. That is exact for powers of two only: in bfloat16
        # a third has an error of 0.2%.
        powers_of_two = all(number & (number - 1) == 0 for number in (self.size, self.copies))
        return powers_of_two and self.count > 1 and flat.is_cuda and self.can_be_captured and flat.dtype in _AVERAGED

    @property
    def groups(self) -> list[Any]:
        """The process groups that together contain all ranks."""
        return [self.shard] if self.copies == 1 else [self.shard, self.replicate]

    def add_copies(self, values: torch.Tensor, *, mean: bool = False) -> None:
        """All-reduce over the replicas; `mean` if `can_average`."""
        dist.all_reduce(values, _OPERATIONS[mean], self.replicate)

    # On a GPU synchronous collectives run in the current stream: an asynchronous collective's own stream would only add
    # a wait.

    def reduce_scatter(self, section: torch.Tensor, flat: torch.Tensor, *, mean: bool = False) -> Any:
        """Start a reduce-scatter of flat memory over the ranks that shard the state; returns its work."""
        return _reduce_scatter(section, flat, _OPERATIONS[mean], self.shard, async_op=not flat.is_cuda)

    def all_gather(self, flats: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]) -> list[Any]:
        """Start all-gathers of the sections, coalesced if the backend can; returns their works."""
        began, work = gather_together(self.shard, flats, sections) if len(flats) > 1 else (False, None)
        if began:
            return [work]
        return [
            all_gather_flat(flat, section, group=self.shard, async_op=not flat.is_cuda)
            for flat, section in zip(flats, sections)
        ]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's tensor to all ranks."""
        for group in self.groups:
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast the tensor of rank `source` to the ranks that shard the state."""
        dist.broadcast(tensor, dist.get_global_rank(self.shard, source), self.shard)

    def gather_objects(self, value: Any) -> list[Any]:
        """All-gather one object per rank over all ranks."""
        values = [value]
        for group in self.groups:
            values = [one for part in gather_in(group, values) for one in part]
        return values


def gather_in(group: Any, value: Any) -> list[Any]:
    """All-gather one object per rank of a group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
