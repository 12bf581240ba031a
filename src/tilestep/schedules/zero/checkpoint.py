"""State of a sharded optimizer in and out: pieces, slices of full tensors, checkpoints that are whole or absent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...compat import checkpoint_chunk, checkpoint_items, is_copy, is_empty_like, wrapper_tensor
from ...errors import StateError
from ...memory.memory import StateMemory
from ...optimizer import Optimizer
from ...optimizer.build import graph_of
from ...optimizer.masters import MASTER_KEYS
from ...optimizer.states import TRAINING, StateTemplate, begin_ahead_again, fill_buffers, storages
from ...placement import Ranks
from ...rules import Rule
from ...storage import entries_of, kept_in_blocks, shape_of_entries, values_of
from .buckets import Box, boxes, memory_order
from .core import Member, Sharding
from .ranks import rank_monitor


class ShardedTensorPiece(torch.Tensor):
    """A tensor of the full shape of which this rank has one range, counted along the memory of its parameter."""

    # It holds no memory but the range; nothing is computed with it. A range of a tensor of several dimensions is not a
    # block of it, but a few blocks side by side: as such a checkpoint stores it, and so reads it on any number of
    # ranks.
    # Made by `of` and `alone`.

    local: torch.Tensor  # what of it is here, flat
    own_range: tuple[int, int]  # first element and one past the last, in the order of the dimensions in memory
    ranges: tuple[tuple[int, int], ...]  # the range of every rank
    order: tuple[int, ...]  # its dimensions from the slowest in memory to the fastest
    ranks: Any

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...], ranges: Any, ranks: Any
    ) -> ShardedTensorPiece:
        local = local.permute(order if local.shape == shape else memory_order(local)).reshape(-1)
        made = wrapper_tensor(cls, shape, local.dtype, local.device)
        made.local, made.order, made.ranges, made.ranks = local, order, ranges, ranks
        made.own_range = ranges[ranks.rank]
        return made

    @classmethod
    def of(cls, local: torch.Tensor, member: Member, ranks: Ranks, elements: int = 1) -> ShardedTensorPiece:
        """A buffer of a parameter, of which this rank has the piece that it has of the parameter."""
        shape, order = member.entries(elements)
        ranges = tuple(member.range_of(rank, elements) for rank in range(ranks.size))
        return cls(local, shape, order, ranges, ranks)

    @classmethod
    def alone(cls, value: torch.Tensor, member: Member, ranks: Ranks) -> ShardedTensorPiece:
        """A buffer of any shape that one rank has alone, as it has the parameter; on the others a meta tensor."""
        shape, numel = tuple(value.shape), value.numel()
        pieces = [member.bucket.layout.piece(member.slot, rank) for rank in range(ranks.size)]
        # Of an empty parameter every rank has the buffers.
        ranges = tuple((0, numel) if start < stop or not member.slot.numel else (0, 0) for start, stop in pieces)
        local = torch.empty(0, dtype=value.dtype, device=member.param.device) if value.is_meta else value
        order = memory_order(member.param) if shape == tuple(member.param.shape) else tuple(range(len(shape)))
        return cls(local, shape, order, ranges, ranks)

    def _blocks(self) -> list[tuple[tuple[int, ...], torch.Size, torch.Tensor]]:
        """Offsets, sizes and memory of the blocks of this rank, by the dimensions of the tensor."""
        sizes = [self.shape[dim] for dim in self.order]
        listed = boxes(sizes, *self.own_range) if self.numel() else [Box((0,) * len(sizes), tuple(sizes), 0)]
        inverse = self._inverse()
        blocks = []
        for box in listed:
            first = box.start - self.own_range[0]
            memory = self.local[first : first + box.numel].view(box.sizes).permute(inverse)
            blocks.append((tuple(box.offsets[dim] for dim in inverse), memory.shape, memory))
        return blocks

    def _inverse(self) -> list[int]:
        return [self.order.index(dim) for dim in range(len(self.order))]

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
            "a piece of a sharded optimizer's state cannot be pickled or copied, as torch.save would: use "
            "torch.distributed.checkpoint, or full_state_dict(); where one rank saves state_dict(), call "
            "consolidate_state_dict() on all ranks before it"
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        piece = next((value for value in args if isinstance(value, cls)), None)
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


def steps_behind(optimizer: Optimizer) -> list[float]:
    """The step counts that parameters of an optimizer have, each once, in order."""
    steps = [torch.as_tensor(values.get("step", 0.0)).reshape(()).cpu() for values in optimizer.state.values()]
    return sorted(set(torch.stack(steps).tolist())) if steps else []


@contextmanager
def sharded_states(optimizer: Optimizer, sharding: Sharding) -> Iterator[None]:
    """A block in which an optimizer's `state` has what a checkpoint takes: pieces that know where they belong."""
    begin_ahead_again(sharding.inner)
    states: dict[Any, dict[str, Any]] = {}
    for member in sharding.members:
        own = sharding.inner.state.get(member.piece, {}) if member.piece is not None else {}
        if own:
            entries = entries_of(own, optimizer.rule_of(optimizer.param_groups[member.group]).state_names)
            states[member.param] = {
                name: _as_piece(member, sharding, value, entries.get(name)) for name, value in own.items()
            }
        elif member.piece is None and sharding.holds_state(member):
            states[member.param] = _state_elsewhere(optimizer, member, sharding)
    state = optimizer.state
    optimizer.state = states  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = state


def _as_piece(member: Member, sharding: Sharding, value: Any, elements: int | None) -> Any:
    """What a checkpoint takes for a value of the state; `elements` is how many an entry of its array covers."""
    assert member.piece is not None
    if elements is not None:
        return ShardedTensorPiece.of(value, member, sharding.ranks, elements)
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and member.piece.dim() != 0):
        return value
    if value.shape != member.piece.shape and not member.is_whole:
        # Something that a user keeps there.
        return value
    if value.shape == member.piece.shape:
        return ShardedTensorPiece.of(value, member, sharding.ranks)
    # Numbers for each row or column: of whole parameters only.
    return ShardedTensorPiece.alone(value, member, sharding.ranks)


def _state_elsewhere(optimizer: Optimizer, member: Member, sharding: Sharding) -> dict[str, Any]:
    """State of a parameter that another rank has: buffers of which nothing is here."""
    group = optimizer.param_groups[member.group]
    rule = optimizer.rule_of(group)
    like = torch.empty_like(member.param, device="meta")
    graph = graph_of(rule, group, like.shape)
    requests: Any = {}
    formats = storages(like, group, graph, rule, label=f"({member.name})" if group.get("param_names") else "")
    template = StateTemplate(like, group, graph, rule, formats)
    state = template.begin(member.name, like, group, {}, requests, StateMemory(), like.shape)
    fill_buffers(requests, StateMemory())
    return {
        name: ShardedTensorPiece.alone(value, member, sharding.ranks)
        for name, value in state.items()
        if _is_meta(value)
    }


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def local_state(member: Member, rule: Rule, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter's saved state is this rank's."""
    entries = entries_of(saved, rule.state_names)
    if entries and not member.is_whole and not member.division.keeps_blocks:
        # Pieces that may begin inside of a block take what it has by value.
        saved = dict(saved)
        for name in [name for name in rule.state_names if name in entries]:
            storage = kept_in_blocks(saved, name)
            assert storage is not None
            saved[name] = values_of(storage, saved, name, shape=member.param.shape)
            for array in storage.arrays(name)[1:]:
                del saved[array.name]
        entries = {}
    like_param = {name for name in rule.state_names if rule.states[name].shape != "scalar"}
    cuts = {*MASTER_KEYS, TRAINING, *entries, *like_param}
    return {
        name: _local(member, name, value, entries.get(name, 1), is_cut=name in cuts) for name, value in saved.items()
    }


def _local(member: Member, name: str, value: Any, elements: int, *, is_cut: bool) -> Any:
    """What of a saved value is this rank's."""
    assert member.piece is not None
    if not isinstance(value, torch.Tensor):
        return value
    (shape, order), own_range = member.entries(elements), member.range_of(member.bucket.ranks.rank, elements)
    if isinstance(value, ShardedTensorPiece):
        own_range = own_range if value.shape == shape else (0, value.numel())
        if value.own_range != own_range:
            raise StateError(
                f"state {name!r} of {member.name} is the piece {value.own_range} of another rank or of another layout, "
                f"this rank has {own_range}: load it with torch.distributed.checkpoint, or load what "
                "full_state_dict() gives"
            )
        mine = value.local
        if value.shape != shape:
            return mine.view(value.shape)
    elif member.is_whole or not is_cut:
        return value
    elif value.shape != shape:
        shapes = f"{tuple(value.shape)} in the checkpoint, it needs {shape}"
        raise StateError(f"state {name!r} of {member.name} has shape {shapes}")
    else:
        flat = value.detach().permute(order).reshape(-1)
        mine = flat[slice(*own_range)].to(member.piece.device, copy=True)
    return member.shaped(mine) if elements == 1 else mine.view(shape_of_entries(member.piece.shape, elements))


def full_state_dict(
    optimizer: Optimizer, sharding: Sharding, rank: int | None, packed: Mapping[str, Any]
) -> dict[str, Any]:
    """All of the state in CPU memory, of which `packed` has this rank's; see `ShardedOptimizer.full_state_dict`."""
    ranks = sharding.ranks
    wants = rank is None or ranks.rank == rank
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # What one rank has alone is known there alone, numbers and whether there is any state.
    wholes = {number: sharding.member_of[param] for number, param in zip(numbers, params)}
    wholes = {number: member for number, member in wholes.items() if member.is_whole}
    own = {number: packed["state"].get(number, {}) for number, member in wholes.items() if member.piece is not None}
    described: dict[Any, dict[str, Any]] = {}
    if wholes:
        for values_of_rank in reversed(
            ranks.gather_in_shard({number: _described(values) for number, values in own.items()})
        ):
            described.update(values_of_rank)
    state: dict[Any, Any] = {}
    for number in numbers:
        values = packed["state"].get(number, {})
        if number in wholes:
            member, values = wholes[number], described[number] | own.get(number, {})
            values = {
                name: ShardedTensorPiece.alone(value, member, ranks) if _is_meta(value) else value
                for name, value in values.items()
            }
        collected: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, ShardedTensorPiece):
                value = value.collect(keep=wants)
            elif isinstance(value, torch.Tensor) and wants:
                value = value.detach().cpu().clone()
            collected[name] = value
        if wants and values:
            state[number] = collected
    return {**packed, "state": state} if wants else {}


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state for the other ranks: numbers as they are, and of buffers shapes and dtypes."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, ShardedTensorPiece)
        else value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


_WHOLE = re.compile(r"checkpoint-(\d+)")
_BEGUN = ".unfinished"
_MARK = ".tilestep-checkpoint"
"""A file in every folder that `save_checkpoint` makes. It holds the checkpoint's name: a copy or a renamed folder is no
longer its own. Folders without it are never removed."""


def save_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
    """Save a checkpoint atomically with `torch.distributed.checkpoint`; all ranks must call it.

    The files go to a folder that does not count as a checkpoint. When every rank has written its own and they are
    on disk, that folder is renamed, which happens at once or not at all. Its number follows the largest
    `checkpoint-<number>` in the folder, whatever wrote that.

    Every folder made by this function holds a mark. Nothing without one is ever removed, so that other checkpoints (a
    trainer's `checkpoint-500`) may stand in the same folder. One training at a time saves to it.

    Args:
        state: what to save, as `torch.distributed.checkpoint.save` takes it.
        folder: where the checkpoints are, on a file system that all ranks share.
        keep: the number of checkpoints of this function to keep, with the new one; older ones are removed after the new
            one is on disk. None removes none.

    Returns:
        The folder of the new checkpoint, which `torch.distributed.checkpoint.load` takes too.

    Raises:
        RankError: if a rank died; earlier checkpoints can still be loaded.
        ValueError: for `keep` below 1.

    Example:
        >>> import tempfile, torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2)}
        >>> tilestep.save_checkpoint(state, folder).name
        'checkpoint-1'
        >>> _ = state["weight"].zero_()
        >>> tilestep.load_checkpoint(state, folder).name, state["weight"].tolist()
        ('checkpoint-1', [1.0, 1.0])
        >>> torch.distributed.destroy_process_group()
    """
    if keep is not None and keep < 1:
        raise ValueError(f"Invalid keep: {keep}; at least the new checkpoint stays")
    import torch.distributed.checkpoint as dcp

    root = Path(folder)
    with _naming_lost_ranks():
        number = _from_first_rank(lambda: _begin(root))
        begun, whole = root / f"checkpoint-{number}{_BEGUN}", root / f"checkpoint-{number}"
        dcp.save(state, checkpoint_id=begun)
        _from_first_rank(lambda: _finish(begun, whole, keep))
    return whole


def load_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Load the newest complete checkpoint of `save_checkpoint`, in place; all ranks must call it.

    Other folders are ignored, unless there is no checkpoint of `save_checkpoint`: then the newest complete checkpoint
    of `torch.distributed.checkpoint` is loaded, which earlier versions of tilestep wrote.

    Args:
        state: what to load, as for `torch.distributed.checkpoint.load`; on any number of ranks.
        folder: where the checkpoints are.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileNotFoundError: if there is none.
        RankError: if a rank died.

    Example:
        >>> import tempfile, torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2)}
        >>> _ = tilestep.save_checkpoint(state, folder)
        >>> state["weight"].zero_()
        tensor([0., 0.])
        >>> tilestep.load_checkpoint(state, folder).name, state["weight"].tolist()
        ('checkpoint-1', [1.0, 1.0])
        >>> torch.distributed.destroy_process_group()
    """
    import torch.distributed.checkpoint as dcp

    from .planner import LoadPlanner

    root = Path(folder)
    with _naming_lost_ranks():
        newest = _from_first_rank(lambda: _newest(root))
        if newest is None:
            raise FileNotFoundError(f"there is no finished checkpoint in {root}")
        dcp.load(state, checkpoint_id=root / newest, planner=LoadPlanner())
    return root / newest


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """A block in which errors of communication, those of torch's checkpoints too, say which rank is gone."""
    import torch.distributed.checkpoint as dcp

    monitor = rank_monitor() if dist.is_initialized() else None
    if monitor is not None:
        monitor.watch_all()
    try:
        yield
    except (RuntimeError, dcp.CheckpointException) as error:
        explained = monitor.explained(error) if monitor is not None else None
        if explained is not None and explained.ranks:
            raise explained from error
        raise


def _from_first_rank(find: Callable[[], Any]) -> Any:
    """What a function gives on the first rank, on all of them; its error too."""
    if not dist.is_initialized():
        return find()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = find()
        except Exception as error:  # the others wait for an answer, whatever it is
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _is_own(path: Path) -> bool:
    """Whether `save_checkpoint` made this folder under this name."""
    try:
        return (path / _MARK).read_text() == path.name.removesuffix(_BEGUN)
    except (OSError, UnicodeDecodeError):
        return False


def _finished(root: Path) -> list[Path]:
    """What is named as a finished checkpoint, whatever wrote it, in the order of their numbers."""
    numbers = {path: _WHOLE.fullmatch(path.name) for path in root.iterdir()} if root.is_dir() else {}
    return sorted((path for path in numbers if numbers[path]), key=lambda path: int(path.name.partition("-")[2]))


def _newest(root: Path) -> str | None:
    """The name of the checkpoint to be loaded."""
    paths = _finished(root)
    own = [path.name for path in paths if _is_own(path)]
    written = own or [path.name for path in paths if (path / ".metadata").is_file()]
    return written[-1] if written else None


def _begin(root: Path) -> int:
    """The number of the next checkpoint, whose folder is made; what is left of saves that have died is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(f"checkpoint-*{_BEGUN}"):
        if _is_own(path):
            _remove(path)
    paths = _finished(root)
    number = int(paths[-1].name.partition("-")[2]) + 1 if paths else 1
    while (root / f"checkpoint-{number}{_BEGUN}").exists():
        number += 1
    begun = root / f"checkpoint-{number}{_BEGUN}"
    begun.mkdir()
    (begun / _MARK).write_text(f"checkpoint-{number}")
    return number


def _finish(begun: Path, whole: Path, keep: int | None) -> None:
    for path in (begun / _MARK, begun):
        _to_disk(path)
    os.rename(begun, whole)
    _to_disk(whole.parent)  # the name is on disk before anything else is removed
    if keep is not None:
        for path in [path for path in _finished(whole.parent) if _is_own(path)][:-keep]:
            _remove(path)


def _remove(path: Path) -> None:
    if not path.is_symlink():
        shutil.rmtree(path)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
