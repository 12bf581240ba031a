"""Communication: reductions of numbers, collectives of buckets."""

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

# Their names until torch 2.12.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AVERAGED = (torch.bfloat16, torch.float32, torch.float64)
"""Not float16: a small gradient that is divided before it is added up loses bits, or becomes zero."""


_OPERATIONS: tuple[Any, Any] = (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if dist.is_available() else (None, None)
"""The operations of sums and of means."""

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Process groups made here, for each initialization of torch.distributed."""

_counts: weakref.WeakKeyDictionary[Any, Counter[Hashable]] = weakref.WeakKeyDictionary()
"""The optimizers numbered so far, for each initialization of torch.distributed."""


def next_number(among: Hashable) -> int:
    """The number of an optimizer among those of the same ranks, in the order in which they are constructed."""
    counts = _counts.setdefault(dist.group.WORLD, Counter())
    counts[among] += 1
    return counts[among]


def message_length(numbers: int) -> int:
    """The length of a message of so many numbers: the same for most optimizers."""
    # A backend that gets messages of different lengths from optimizers in different orders hangs or ends the process.
    return max(1024, 1 << (numbers - 1).bit_length())


class Received(NamedTuple):
    """Numbers that all ranks have combined, on their way to the host, and what they must be."""

    expected: list[float]
    values: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def begin(cls, expected: list[float], values: torch.Tensor) -> Received:
        """Begin to copy numbers to the host."""
        if not values.is_cuda:
            return cls(expected, values.clone(), None)
        pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(expected, pinned, event)

    def as_expected(self) -> bool:
        """Whether the ranks agree; waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist() == self.expected


class ReductionGroup:
    """Ranks that combine numbers, with the same result on each of them, to the last bit."""

    # They are those of process groups, which are reduced over one after the other and hold each part of a tensor once;
    # or, by `of_tensors`, all ranks of the meshes of some DTensors.
    # The messages of an optimizer with a number begin with a tag, a hash of that number. Ranks that step optimizers in
    # different orders combine messages of both: then the combined tag differs from that of one optimizer. A CPU knows
    # it before it uses the numbers. The host of a GPU waits for the first message; later it looks at tags that have
    # arrived, without a wait.

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
        self.ranks: Sequence[int] = ranks or ()  # of several process groups those of the first
        self.size = len(self.ranks)
        self._process_groups, self._meshes, self._number = groups, meshes, number
        self._shares: dict[Any, float] = {}
        self._frames: dict[Any, tuple[torch.Tensor, torch.Tensor, list[float]]] = {}
        self._received: Received | None = None  # the last tag that was sent to the host

    @cached_property
    def _groups(self) -> list[tuple[Any, bool]]:
        """The process groups of more than one rank, and whether each takes tensors on the host."""
        if self._process_groups is not None:
            groups = [group for group in self._process_groups if dist.get_world_size(group) > 1]
        else:
            groups = [group_of(self.ranks, self._meshes)] if len(self.ranks) > 1 else []
        able = [group_device_types(group) for group in groups]
        return [(group, kinds is None or "cpu" in kinds) for group, kinds in zip(groups, able)]

    @classmethod
    def of_tensors(cls, tensors: Sequence[tuple[str, Any]], number: int | None = None) -> ReductionGroup:
        """All ranks of the meshes of labelled DTensors; `number` is that of the optimizer whose numbers these are."""
        # Several meshes may be given if one holds the others, or if all are slices of one mesh; then a tensor on a
        # smaller mesh, and a plain one, is held by the other ranks too, as by tensor-parallel ranks whose norms'
        # weights FSDP shards. A sum over all tensors is one all-reduce: each rank adds its part of a shard once, and of
        # what several ranks hold the same share.
        meshes: list[Any] = []
        labels: list[str] = []
        for label, tensor in tensors:
            if not any(mesh is tensor.device_mesh for mesh in meshes):
                meshes.append(tensor.device_mesh)
                labels.append(label)
        return cls(None, ranks=_ranks_of(meshes, labels), meshes=meshes, number=number)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.ranks.index(dist.get_rank())

    def leads(self, tensor: Any) -> bool:
        """Whether this is the first of the ranks that hold the same part of a tensor."""
        if not self._meshes:
            return True
        if not is_distributed(tensor):
            return self.rank == 0
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinate = mesh.get_coordinate()
        firsts = (not at or not placement.is_replicate() for at, placement in zip(coordinate, placements))
        return self.ranks[0] in mesh.mesh and all(firsts)

    def share(self, tensor: Any, over: tuple[int, int] | None = None) -> float:
        """What a rank's sums over its part of a tensor count: 1 over the number of ranks that hold the same part."""
        if not self._meshes:
            return 1.0
        if not is_distributed(tensor):
            return 1 / len(self.ranks)
        mesh, placements, gone = tensor.device_mesh, tensor.placements, range(*(over or (0, 0)))
        if (mesh, placements, gone) not in self._shares:
            copies = len(self.ranks) // mesh.size()
            for dim, placement in enumerate(placements):
                holds_same = placement.is_replicate() or placement.dim % tensor.dim() in gone
                copies *= mesh.size(dim) if holds_same else 1
            self._shares[mesh, placements, gone] = 1 / copies
        return self._shares[mesh, placements, gone]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks; after the first time no rank waits on the host for a GPU."""
        if self._groups:
            self._combine(values, dist.ReduceOp.SUM)

    def average(self, values: torch.Tensor) -> None:
        """Replace numbers by their means over the ranks of process groups, as `add` does by their sums."""
        self.add(values)
        values.div_(self._count)

    def largest(self, values: torch.Tensor) -> None:
        """Replace numbers by the largest over the ranks; NaN on one gives NaN on all."""
        if not self._groups:
            return
        is_nan = values.isnan()
        both = torch.stack([torch.where(is_nan, -torch.inf, values), is_nan.to(values.dtype)])
        self._combine(both, dist.ReduceOp.MAX)
        values.copy_(torch.where(both[1] > 0, torch.nan, both[0]))

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of the same shape, in a dtype that collectives take."""
        if not self._groups:
            return [values]
        group, takes_host = self._groups[0]
        values = values if takes_host else _on_gpu(values)
        gathered = [torch.empty_like(values) for _ in self.ranks]
        dist.all_gather(gathered, values, group)
        return gathered

    @cached_property
    def _count(self) -> int:
        """How many ranks the messages are sent to."""
        return math.prod(dist.get_world_size(group) for group, _ in self._groups)

    def _combine(self, values: torch.Tensor, operation: Any) -> None:
        if self._number is None:
            self._all_reduce(values, operation)
            return
        frame = values.shape, values.device, operation
        if frame not in self._frames:
            tag = float(zlib.crc32(repr((self._number, tuple(values.shape))).encode()))  # its sums are exact
            head = values.new_tensor([tag, -tag], dtype=torch.float64)
            count = len(head) + values.numel()
            tail = head.new_zeros(message_length(count) - count)
            times = self._count if operation == dist.ReduceOp.SUM else 1
            self._frames[frame] = head, tail, [tag * times, -tag * times]
        head, tail, expected = self._frames[frame]  # a tag, zeros, and the tag that all ranks have together
        message = torch.cat([head, values.reshape(-1), tail])
        self._all_reduce(message, operation)
        self._compare(message[: len(head)], expected)
        values.copy_(message[len(head) : len(head) + values.numel()].view_as(values))

    def _all_reduce(self, values: torch.Tensor, operation: Any) -> None:
        for group, takes_host in self._groups:
            sent = values if takes_host else _on_gpu(values)
            try:
                dist.all_reduce(sent, operation, group)
            except RuntimeError as error:
                ranks = dist.get_process_group_ranks(group)
                raise RuntimeError(
                    f"ranks {ranks} decide steps together, and others of them did not take part: a rank has failed, or "
                    "its optimizer has not the same max_grad_norm, skip_above or skip_nonfinite, or does not step "
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
                f"ranks {list(self.ranks)} disagree on the optimizer that steps, or on whether step() gets a loss: "
                "their sums were mixed up. Construct the optimizers of the same ranks in the same order on all of "
                "them, step them in the same order, and give a loss on all ranks or on none"
            )


def _on_gpu(values: torch.Tensor) -> torch.Tensor:
    """Numbers on a GPU, for a backend that takes no others: parameters may be on the host."""
    return values.cuda() if is_host(values.device) and torch.cuda.is_available() else values


def _ranks_of(meshes: Sequence[Any], labels: Sequence[str]) -> list[int]:
    """The ranks of the largest mesh if it holds all others, else those of the smallest slice of the root that does."""
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
        f"{labels[other]} lies on {meshes[other]} and {labels[members.index(largest)]} on "
        f"{meshes[members.index(largest)]}: neither holds the other and they are not slices of one mesh, so no ranks "
        "could agree on a norm; make one mesh with init_device_mesh and take slices of it"
    )


def group_of(ranks: Sequence[int], meshes: Sequence[Any]) -> Any:
    """A process group of these ranks: an existing one, or a new one, for which only they must ask."""
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
    """The process groups of a sharded optimizer, as one rank sees them, and the messages of its buckets."""

    def __init__(self, shard: Any, replicate: Any, name: Any = None, in_steps: Ranks | None = None) -> None:
        self.shard = shard
        self.replicate = replicate
        self.rank = dist.get_rank(shard)
        self.size = dist.get_world_size(shard)
        self.copies = 1 if replicate is None else dist.get_world_size(replicate)
        self.count = self.size * self.copies  # all ranks, those that hold copies too
        self.name = name  # of the sharded optimizer: the same on all ranks, and no other optimizer's
        self.in_steps = in_steps
        """The groups in which ranks compare what they step, the same for all optimizers of these ranks; None for these.
        In groups of their own, optimizers in different orders would wait for each other."""
        self.reductions = ReductionGroup([shard])  # over the ranks that split the state; copies have the same results

    def __deepcopy__(self, memo: Any) -> Ranks:
        # Process groups cannot be copied, and a copy of what has them has the same ranks.
        return self

    def apart(self) -> Ranks:
        """The same ranks over groups of their own, in which no other messages come between; all of them call it."""
        shard, replicate = (
            None
            if group is None
            else dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
            for group in (self.shard, self.replicate)
        )
        return Ranks(shard, replicate, self.name, self)

    @property
    def can_be_captured(self) -> bool:
        """Whether what they do together can be a part of a CUDA graph."""
        return all("nccl" in dist.get_backend_config(group) for group in self.groups)

    def can_average(self, flat: torch.Tensor) -> bool:
        """Whether messages bring means as exactly as sums that are divided."""
        # NCCL multiplies by 1/N in the type of the tensor before it adds up. That is exact for powers of two alone: in
        # bfloat16 a third is wrong by 0.2%.
        powers_of_two = all(number & (number - 1) == 0 for number in (self.size, self.copies))
        return powers_of_two and self.count > 1 and flat.is_cuda and self.can_be_captured and flat.dtype in _AVERAGED

    @property
    def groups(self) -> list[Any]:
        """The groups that together reach all ranks."""
        return [self.shard] if self.copies == 1 else [self.shard, self.replicate]

    def add_copies(self, values: torch.Tensor, *, mean: bool = False) -> None:
        """Replace numbers by their sums over the ranks with copies; by their means where it `can_average` them."""
        dist.all_reduce(values, _OPERATIONS[mean], self.replicate)

    # On a GPU collectives run in the current stream, and give no work: the library's own stream would only be waited
    # for by ours.

    def reduce_scatter(self, section: torch.Tensor, flat: torch.Tensor, *, mean: bool = False) -> Any:
        """Begin to sum flat memory up over the ranks that split the state, each receiving its section; its work."""
        return _reduce_scatter(section, flat, _OPERATIONS[mean], self.shard, async_op=not flat.is_cuda)

    def all_gather(self, flats: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to give all of these ranks every section, in one message where the backend can; the works."""
        began, work = gather_together(self.shard, flats, sections) if len(flats) > 1 else (False, None)
        if began:
            return [work]
        return [
            all_gather_flat(flat, section, group=self.shard, async_op=not flat.is_cuda)
            for flat, section in zip(flats, sections)
        ]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what the first one has."""
        for group in self.groups:
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Give the ranks that split the state what one of them has."""
        dist.broadcast(tensor, dist.get_global_rank(self.shard, source), self.shard)

    def gather_objects(self, value: Any) -> list[Any]:
        """One object of each rank, on every rank."""
        values = [value]
        for group in self.groups:
            values = [one for part in gather_in(group, values) for one in part]
        return values


def gather_in(group: Any, value: Any) -> list[Any]:
    """One object of each rank of a group, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
