"""Checkpoints that are whole or not there: a save that dies half-way leaves the one before it as it was."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ..errors import StateError
from ..optimizer.hyperparameters import OWN_KEYS
from ..optimizer.masters import MASTER_KEYS
from ..storage import kept_in_blocks
from .rank_monitor import rank_monitor

__all__ = ["LoadPlanner", "load_checkpoint", "save_checkpoint"]

_WHOLE = re.compile(r"checkpoint-(\d+)")
_BEGUN = ".unfinished"
_MARK = ".tilestep-checkpoint"
"""A file in every folder that `save_checkpoint` makes. It holds the checkpoint's name: a copy or a renamed folder is no
longer its own. Folders without it are never removed."""


class LoadPlanner(dcp.DefaultLoadPlanner):
    """For `torch.distributed.checkpoint.load`: takes checkpoints of torch's optimizers, and misses all else.

    Param groups of tilestep's optimizers have a rule, a clip and a kind of master that those of torch's have not, and
    every state has a step count, which torch's SGD and Muon have not. `DefaultLoadPlanner` refuses such a checkpoint,
    or, with `allow_partial_load`, takes one without half of the state. Of an optimizer that has no state before its
    first step, it loads param groups alone; this one brings the state too, as whole tensors in CPU memory. So it does
    with states in other blocks than the optimizer's (`state_dtype`), for `load_state_dict` to take them by value;
    `DefaultLoadPlanner` reads their codes as if they were numbers. A checkpoint with masters of another kind
    (`master_weights`) than a state has is refused, with what to do instead.

    Example:
        >>> import tempfile, torch, tilestep, torch.distributed.checkpoint as dcp
        >>> weight, folder = torch.ones(2, requires_grad=True), tempfile.mkdtemp()
        >>> weight.grad = torch.ones(2)
        >>> theirs, mine = torch.optim.SGD([weight], lr=0.5, momentum=0.9), tilestep.SGD([weight], momentum=0.9)
        >>> theirs.step()
        >>> dcp.save({"optimizer": theirs.state_dict()}, checkpoint_id=folder, no_dist=True)  # doctest: +ELLIPSIS
        Metadata(...)
        >>> state = {"optimizer": mine.state_dict()}
        >>> dcp.load(state, checkpoint_id=folder, planner=tilestep.LoadPlanner(), no_dist=True)
        >>> mine.load_state_dict(state["optimizer"])
        >>> mine.param_groups[0]["lr"], mine.state[weight]["momentum_buffer"].tolist()
        (0.5, [1.0, 1.0])
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """As `DefaultLoadPlanner` does, with the states that begin here, without what the checkpoint cannot have."""
        if metadata is not None:
            _begin_states(state_dict, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        known = self.state_dict if metadata is None else metadata.state_dict_metadata
        _check_masters([str(key) for key in self.state_dict], known)
        if metadata is not None:
            _check_codes(self.state_dict, known)
        counts = any(str(key).endswith(".step") for key in known)
        places = {str(key).rpartition(".")[0] for key in known}

        def is_here_alone(key: str) -> bool:
            place, _, name = key.rpartition(".")
            if name == "step":
                # A plain SGD has nothing else, and torch's not even that.
                return not counts or place not in places
            return "param_groups." in f"{place}." and name in OWN_KEYS

        self.state_dict = {
            key: value for key, value in self.state_dict.items() if key in known or not is_here_alone(str(key))
        }


def _begin_states(state_dict: Any, metadata: Any) -> None:
    """Make room for a checkpoint's states where an optimizer has none yet, or keeps them in other blocks.

    Codes that were read into what keeps numbers, or other codes, would be nothing: they are read as they are, and
    `load_state_dict` takes them by value.
    """
    optimizers = dict(_optimizers(state_dict))
    have_begun = {place for place, optimizer in optimizers.items() if optimizer["state"]}
    saved: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for key, path in (metadata.planner_data or {}).items():
        place = tuple(map(str, path[:-3]))
        if len(path) >= 3 and place in optimizers and path[-3] == "state":
            saved.setdefault((place, str(path[-2])), {})[path[-1]] = metadata.state_dict_metadata[key]
    for (place, param), entries in saved.items():
        optimizer = optimizers[place]
        # Paths of checkpoints have strings where states have numbers.
        numbers = {str(number): number for group in optimizer["param_groups"] for number in group["params"]}
        state = optimizer["state"]
        names: Iterable[str] = entries
        if place in have_begun:
            if numbers.get(param, param) not in state:
                continue
            own = state[numbers.get(param, param)] = dict(state[numbers.get(param, param)])
            names = _take_out_other_blocks(own, entries)
        for name in names:
            entry = entries[name]
            # What is no tensor is set by `load_bytes`.
            value = torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
            state.setdefault(numbers.get(param, param), {})[name] = value


def _take_out_other_blocks(own: dict[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """Remove the states that a checkpoint has in other blocks, or in none; the names that it has of these."""
    dtypes = {name: entry.properties for name, entry in entries.items() if hasattr(entry, "size")}
    pairs = {name: (kept_in_blocks(own, name), kept_in_blocks(dtypes, name)) for name in own if name in dtypes}
    found: list[str] = []
    for name, (mine, theirs) in pairs.items():
        if mine == theirs:
            continue
        for array in (name,) if mine is None else [array.name for array in mine.arrays(name)]:
            del own[array]
        found += [name] if theirs is None else [array.name for array in theirs.arrays(name)]
    return found


def _optimizers(values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The state_dicts of optimizers, by their places."""
    if "param_groups" in values and isinstance(values.get("state"), Mapping):
        yield path, values
        return
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _optimizers(value, (*path, str(key)))


def _check_codes(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise where codes of blocks would be read as numbers or as other codes, in a flattened state_dict."""
    for key, value in values.items():
        dtypes = (getattr(value, "dtype", None), getattr(getattr(known.get(key), "properties", None), "dtype", None))
        if dtypes[0] is not dtypes[1] and None not in dtypes and not _CODES.isdisjoint(dtypes):
            raise StateError(
                f"the checkpoint has {key} as {dtypes[1]}, and it is to be read into {dtypes[0]}: load it into the "
                "state_dict() of the optimizer, not flattened, which takes other formats by value, or give the "
                "optimizer the state_dtype of the checkpoint"
            )


_CODES = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn})


def _check_masters(keys: Iterable[str], known: Collection[str]) -> None:
    """Raise where a checkpoint has masters of another kind than the optimizer."""
    for key in keys:
        place, _, name = key.rpartition(".")
        others = [other for other in MASTER_KEYS if f"{place}.{other}" in known]
        if name in MASTER_KEYS and others and key not in known:
            raise StateError(
                f"the checkpoint keeps {place} with {others[0]}, this optimizer with {name}: load it in place into an "
                "optimizer with the checkpoint's master_weights, and that one's full_state_dict() into this one"
            )


def save_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
    """Save what `torch.distributed.checkpoint` can save, beside the checkpoints there are; all ranks must call it.

    The files go to a folder that does not count as a checkpoint. When every rank has written its own and they are
    on disk, that folder is renamed, which happens at once or not at all. Its number follows the largest
    `checkpoint-<number>` in the folder, whoever wrote that.

    Every folder made by this function holds a mark. Nothing without one is ever removed, so that other checkpoints (a
    trainer's `checkpoint-500`) may stand in the same folder. One training at a time saves to it.

    Args:
        state: what to save, as `torch.distributed.checkpoint.save` takes it.
        folder: where the checkpoints are, on a file system that all ranks share.
        keep: how many checkpoints of this function are to be left, the new one included; older ones are removed after
            the new one is on disk. None removes none.

    Returns:
        The folder of the new checkpoint, which `torch.distributed.checkpoint.load` takes too.

    Raises:
        RankError: if a rank is gone; the checkpoints before it can be loaded then.
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
    root = Path(folder)
    with _Named():
        number = _said_by_first(lambda: _begin(root))
        begun, whole = root / f"checkpoint-{number}{_BEGUN}", root / f"checkpoint-{number}"
        dcp.save(state, checkpoint_id=begun)
        _said_by_first(lambda: _finish(begun, whole, keep))
    return whole


def load_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Load the newest checkpoint that `save_checkpoint` has finished, in place; all ranks must call it.

    Folders that `save_checkpoint` did not make are passed over, unless there are no others: then the newest that
    `torch.distributed.checkpoint` has finished is taken, as earlier versions of tilestep wrote theirs without a mark.

    Args:
        state: what to load, as `torch.distributed.checkpoint.load` takes it; on any number of ranks.
        folder: where the checkpoints are.

    Returns:
        The folder of the checkpoint.

    Raises:
        FileNotFoundError: if there is none.
        RankError: if a rank is gone.
    """
    root = Path(folder)
    with _Named():
        newest = _said_by_first(lambda: _newest(root))
        if newest is None:
            raise FileNotFoundError(f"there is no finished checkpoint in {root}")
        dcp.load(state, checkpoint_id=root / newest, planner=LoadPlanner())
    return root / newest


class _Named:
    """A block in which errors of communication, those of torch's checkpoints too, say which rank is gone."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if dist.is_initialized() and isinstance(error, (RuntimeError, dcp.CheckpointException)):
            explained = rank_monitor().explained(error)
            if explained.ranks:
                raise explained from error


def _said_by_first(find: Any) -> Any:
    """What the first rank finds, on all of them; its error too."""
    if not dist.is_initialized():
        return find()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = find()
        except Exception as error:  # the others wait for an answer, whatever it is
            said[1] = error
    dist.broadcast_object_list(said)
    if said[1] is not None:
        raise said[1]
    return said[0]


def _is_own(path: Path) -> bool:
    """Whether `save_checkpoint` made this folder under this name."""
    try:
        return (path / _MARK).read_text() == path.name.removesuffix(_BEGUN)
    except (OSError, UnicodeDecodeError):
        return False


def _finished(root: Path) -> list[Path]:
    """What is named as a finished checkpoint, whoever wrote it, in the order of their numbers."""
    numbers = {path: _WHOLE.fullmatch(path.name) for path in root.iterdir()} if root.is_dir() else {}
    return sorted((path for path in numbers if numbers[path]), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


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
    number = _number(paths[-1]) + 1 if paths else 1
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
