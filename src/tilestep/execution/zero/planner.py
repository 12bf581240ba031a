"""`LoadPlanner`: loads distributed checkpoints of torch's optimizers, of earlier revisions, and with other formats.

A separate module, since importing torch.distributed.checkpoint takes longer than importing tilestep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ...errors import StateError
from ...optimizer.control import LIMITS_KEY
from ...optimizer.groups import OWN_KEYS
from ...optimizer.masters import MASTER_KEYS
from ...storage import block_names, states_in_blocks, with_code_names


class LoadPlanner(dcp.DefaultLoadPlanner):
    """A strict planner for `torch.distributed.checkpoint.load` that accepts checkpoints of torch's optimizers too.

    tilestep's param groups have a rule, a clip and a format of masters, and its states a step count, which checkpoints
    of torch's optimizers may lack; rules of this version may have hyperparameters that an earlier version did not have.
    `DefaultLoadPlanner` refuses such a checkpoint, or, with `allow_partial_load`, accepts a checkpoint that lacks any
    state. This planner keeps the optimizer's values of such keys of param groups, and raises if anything else is
    missing. For an optimizer without state, before its first step, it loads the state as full tensors in CPU memory,
    and the memory of limits. It does the same for states in other blocks than the optimizer's (`state_dtype`), which
    `load_state_dict` converts by value; `DefaultLoadPlanner` finds no such keys. It refuses a checkpoint with another
    format of masters (`master_weights`), and says what to do.

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
        """Add states that this optimizer lacks, and drop keys that the checkpoint cannot have."""
        if metadata is not None:
            _begin_states(state_dict, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = self.state_dict if metadata is None else metadata.state_dict_metadata
        # Earlier revisions saved codes under the keys at which `mark_codes` writes NaN now.
        self.state_dict = {
            _saved_key(str(key), saved): value
            for key, value in self.state_dict.items()
            if isinstance(value, torch.Tensor) or f"{key}_codes" not in self.state_dict or f"{key}_codes" in saved
        }
        for key, value in self.state_dict.items():
            place, _, name = str(key).rpartition(".")
            others = [other for other in MASTER_KEYS if f"{place}.{other}" in saved]
            if name in MASTER_KEYS and others and key not in saved:
                raise StateError(
                    f"the checkpoint stores {place} with {others[0]}, but this optimizer uses {name}: load it in place "
                    "into an optimizer with the checkpoint's master_weights, and load its full_state_dict() into this "
                    "optimizer"
                )
            state = str(key).removesuffix("_codes")
            theirs = [array for array in (state, *block_names(state)) if array in saved]
            entry = getattr(saved.get(key), "properties", None)
            dtypes = (getattr(value, "dtype", None), getattr(entry, "dtype", None))
            is_in_blocks = [any(array in keys for array in block_names(state)) for keys in (self.state_dict, saved)]
            if any(is_in_blocks) and theirs and (key not in saved or dtypes[0] is not dtypes[1]):
                raise StateError(
                    f"the checkpoint has {' and '.join(theirs)}, but the optimizer has {key} of {dtypes[0]}: load into "
                    "the optimizer's state_dict(), not flattened, which converts formats, or use the checkpoint's "
                    "state_dtype"
                )
        counts = any(str(key).endswith(".step") for key in saved)
        places = {str(key).rpartition(".")[0] for key in saved}

        def is_never_saved(key: str) -> bool:
            place, _, name = key.rpartition(".")
            if name == "step":
                # A plain SGD has no other state, and torch's SGD has no state at all.
                return not counts or place not in places
            # `load_state_dict` keeps the optimizer's value of hyperparameters that the checkpoint's group lacks.
            is_own = name in OWN_KEYS or place.endswith(f".{LIMITS_KEY}")
            clip, is_of_limit, _ = key.partition(".max_grad_norm.")
            if is_of_limit:
                # A limit has a key per field; a checkpoint without a clip has none, and another clip is missing.
                is_own = not any(str(other).startswith(f"{clip}.max_grad_norm") for other in saved)
            return "param_groups." in f"{place}." and (is_own or (place in places and name != "params"))

        self.state_dict = {
            key: value for key, value in self.state_dict.items() if key in saved or not is_never_saved(str(key))
        }


def _saved_key(key: str, saved: Mapping[str, Any]) -> str:
    """The key of an entry in a checkpoint: earlier revisions kept codes under the name of their state."""
    earlier = key.removesuffix("_codes")
    is_earlier = key not in saved and earlier in saved and not saved.keys().isdisjoint(block_names(earlier))
    return earlier if is_earlier else key


def _begin_states(state_dict: Any, metadata: Any) -> None:
    """Allocate tensors for a checkpoint's states and limits that an optimizer lacks, or keeps in other blocks."""
    # Codes read into numbers, or into codes of another format, would be meaningless: they are read unchanged, and
    # `load_state_dict` converts them by value.
    optimizers = dict(_optimizers(state_dict))
    have_begun = {place for place, optimizer in optimizers.items() if optimizer["state"]}
    saved: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for key, path in (metadata.planner_data or {}).items():
        place = tuple(map(str, path[:-3]))
        if len(path) >= 3 and place in optimizers and path[-3] == "state":
            saved.setdefault((place, str(path[-2])), {})[path[-1]] = metadata.state_dict_metadata[key]
        owner = optimizers.get(tuple(map(str, path[:-4])))
        if owner is not None and path[-4::2] == ("param_groups", LIMITS_KEY):
            entry, group = metadata.state_dict_metadata[key], dict(enumerate(owner["param_groups"])).get(path[-3], {})
            limits = group.setdefault(LIMITS_KEY, {})
            limits.setdefault(path[-1], torch.empty(entry.size, dtype=entry.properties.dtype))
    for (place, param), entries in saved.items():
        optimizer = optimizers[place]
        # Paths of checkpoints have strings, the keys of states are integers.
        numbers = {str(number): number for group in optimizer["param_groups"] for number in group["params"]}
        state = optimizer["state"]
        names: Iterable[str] = entries
        if place in have_begun:
            if numbers.get(param, param) not in state:
                continue
            own = state[numbers.get(param, param)] = dict(state[numbers.get(param, param)])
            names = _pop_other_blocks(own, entries)
        for name in names:
            entry = entries[name]
            # `load_bytes` sets values that are not tensors.
            value = torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
            state.setdefault(numbers.get(param, param), {})[name] = value


def _pop_other_blocks(own: dict[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """Remove states that a checkpoint has in another block format; returns the checkpoint's keys of these."""
    dtypes = {name: entry.properties for name, entry in entries.items() if hasattr(entry, "size")}
    mine, theirs = states_in_blocks(own), states_in_blocks(with_code_names(dtypes))
    names: list[str] = []
    for name in mine.keys() | theirs.keys():
        kept, saved = mine.get(name), theirs.get(name)
        if kept == saved or (kept is None and name not in own) or (saved is None and name not in dtypes):
            continue
        for array in (name, *(() if kept is None else [array.name for array in kept.arrays(name)])):
            own.pop(array, None)
        arrays = [] if saved is None else [array.name for array in saved.arrays(name)]
        names += [array if array in entries else name for array in arrays] or [name]
    return names


def _optimizers(values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The optimizers' state_dicts in nested dicts, each with its path."""
    if "param_groups" in values and isinstance(values.get("state"), Mapping):
        yield path, values
        return
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _optimizers(value, (*path, str(key)))
