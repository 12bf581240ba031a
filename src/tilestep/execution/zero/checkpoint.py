"""Checkpoints of a sharded optimizer: sharded and full state dicts, and atomic `save_checkpoint`/`load_checkpoint`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...optimizer import Optimizer
from ...optimizer.matrices import rule_views
from ...optimizer.memory import StateMemory
from ...optimizer.parameters import iter_params, params_of
from ...optimizer.states import StateTemplate, fill_buffers, initialize, storages
from ...placement import Listed, Share
from ...placement.reduction import gather_in
from ...rules import Rule
from ...storage import entries_of
from .core import Member, Sharding
from .tensor_piece import ShardedTensorPiece


def steps_behind(optimizer: Optimizer) -> list[float]:
    """The distinct step counts of an optimizer's parameters, sorted."""
    steps = [torch.as_tensor(values.get("step", 0.0)).reshape(()).cpu() for values in optimizer.state.values()]
    return sorted(set(torch.stack(steps).tolist())) if steps else []


@contextmanager
def sharded_states(optimizer: Optimizer, sharding: Sharding) -> Iterator[None]:
    """A block in which the tensors of an optimizer's `state` are `ShardedTensorPiece`s of the full tensors."""
    initialize(optimizer)
    state = optimizer.state
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for listed in iter_params(optimizer):
        param, rule = listed[3], optimizer.rule_of(listed[2])
        member, own = sharding.member_of[param], state.get(param)
        if own and member.piece is not None:
            entries = entries_of(own, rule.state_names)
            states[param] = {name: member.packed(value, entries.get(name)) for name, value in own.items()}
        elif member.piece is None and sharding.holds_state(optimizer, member):
            states[param] = _state_elsewhere(member, listed, rule)
    optimizer.state = states  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = state


def _state_elsewhere(member: Member, listed: Listed, rule: Rule) -> dict[str, Any]:
    """The state of a parameter that another rank owns: pieces without elements on this rank."""
    label, index, group, param = listed
    like = torch.empty_like(param, device="meta")
    graph = rule_views(rule, group, like.shape, label=label)[0].graph
    requests: Any = []
    template = StateTemplate(like, group, graph, rule, storages(like, group, graph, rule, label=label))
    share = Share(member.name, label, like, like, index, group, 0, like)
    state = template.create(share, {}, requests, StateMemory())
    fill_buffers(requests, StateMemory(), ExitStack())
    return _alone(member, {name: value for name, value in state.items() if getattr(value, "is_meta", False)})


def _alone(member: Member, values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with meta tensors replaced by pieces without elements on this rank."""
    return {
        name: member.alone(value) if isinstance(value, torch.Tensor) and value.is_meta else value
        for name, value in values.items()
    }


def full_state_dict(
    optimizer: Optimizer, sharding: Sharding, rank: int | None, packed: Mapping[str, Any]
) -> dict[str, Any]:
    """The full state in CPU memory; `packed` is this rank's state_dict. See `ShardedOptimizer.full_state_dict`."""
    ranks = sharding.ranks
    if rank is not None and rank not in range(ranks.size):
        raise ValueError(f"Invalid rank: {rank!r}; it must be from 0 to {ranks.size - 1}")
    wants = rank is None or ranks.rank == rank
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    params = params_of(optimizer)
    # Only the owner of a whole parameter knows its numbers, and whether it has state.
    pairs = zip(numbers, map(sharding.member_of.__getitem__, params))
    wholes = {number: member for number, member in pairs if member.is_whole}
    own = {number: packed["state"].get(number, {}) for number, member in wholes.items() if member.piece is not None}
    described: dict[Any, dict[str, Any]] = {}
    if wholes:
        for values_of_rank in gather_in(ranks.shard, {number: _described(values) for number, values in own.items()}):
            described.update(values_of_rank)
    state: dict[Any, Any] = {}
    for number in numbers:
        values = packed["state"].get(number, {})
        if number in wholes:
            values = _alone(wholes[number], described[number] | own.get(number, {}))
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
    """A parameter's state for the other ranks: numbers, and meta tensors in the place of buffers."""
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
"""The file that marks folders made by `save_checkpoint`. It holds the checkpoint's name: a copied or renamed folder no
longer counts. Folders without the file are never removed."""


def save_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
    """Save a checkpoint atomically with `torch.distributed.checkpoint`; all ranks must call it.

    The files go to a temporary folder. When every rank's files are on disk, the folder is renamed atomically. Its
    number follows the largest `checkpoint-<number>` in the folder, including checkpoints of other programs.

    This function marks every folder that it makes and never removes a folder without the mark, so that other
    checkpoints (a trainer's `checkpoint-500`) may share the folder. Only one training run at a time may save to it.

    Args:
        state: the state to save, as for `torch.distributed.checkpoint.save`.
        folder: the folder of the checkpoints, on a file system that all ranks share.
        keep: the number of checkpoints of this function to keep, with the new one; older ones are removed after the new
            one is on disk. None removes none.

    Returns:
        The folder of the new checkpoint; `torch.distributed.checkpoint.load` accepts it too.

    Raises:
        RuntimeError: if a rank died, from torch; earlier checkpoints can still be loaded.
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
        raise ValueError(f"Invalid keep: {keep}; it must be at least 1, the new checkpoint")
    import torch.distributed.checkpoint as dcp

    root = Path(folder)
    number = _from_first_rank(_begin, root)
    begun, whole = root / f"checkpoint-{number}{_BEGUN}", root / f"checkpoint-{number}"
    dcp.save(state, checkpoint_id=begun)
    _from_first_rank(_finish, begun, whole, keep)
    return whole


def load_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Load the newest complete checkpoint of `save_checkpoint`, in place; all ranks must call it.

    Other folders are ignored, unless there is no checkpoint of `save_checkpoint`: then the newest complete checkpoint
    of `torch.distributed.checkpoint` is loaded, which earlier versions of tilestep wrote.

    Args:
        state: the state to load into, as for `torch.distributed.checkpoint.load`; on any number of ranks.
        folder: the folder of the checkpoints.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileNotFoundError: if the folder has no complete checkpoint.

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
    newest = _from_first_rank(_newest, root)
    if newest is None:
        raise FileNotFoundError(f"no finished checkpoint in {root}")
    dcp.load(state, checkpoint_id=root / newest, planner=LoadPlanner())
    return root / newest


def _from_first_rank(find: Callable[..., Any], *given: Any) -> Any:
    """Call `find` on rank 0; all ranks return its result or raise its error."""
    if not dist.is_initialized():
        return find(*given)
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = find(*given)
        except Exception as error:  # the other ranks wait for a result or an error
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _is_saved_here(path: Path) -> bool:
    """Whether `save_checkpoint` made this folder with this name."""
    try:
        return (path / _MARK).read_text() == path.name.removesuffix(_BEGUN)
    except (OSError, UnicodeDecodeError):
        return False


def _finished(root: Path) -> list[tuple[int, Path]]:
    """Folders with the name of a finished checkpoint, from any program, sorted by number."""
    return sorted((int(name[1]), path) for path in root.glob("*") if (name := _WHOLE.fullmatch(path.name)))


def _newest(root: Path) -> str | None:
    """The name of the checkpoint to load, or None."""
    paths = [path for _, path in _finished(root)]
    written = list(filter(_is_saved_here, paths)) or [path for path in paths if (path / ".metadata").is_file()]
    return written[-1].name if written else None


def _begin(root: Path) -> int:
    """Make the folder of the next checkpoint, remove unfinished folders of earlier saves; returns the number."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(f"checkpoint-*{_BEGUN}"):
        if _is_saved_here(path):
            _remove(path)
    number = max((number for number, _ in _finished(root)), default=0) + 1
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
    _to_disk(whole.parent)  # the new name is on disk before older checkpoints are removed
    if keep is not None:
        for path in [path for _, path in _finished(whole.parent) if _is_saved_here(path)][:-keep]:
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
