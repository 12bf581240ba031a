"""State of a sharded optimizer in and out: pieces as checkpoints see them, slices of full tensors, full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..compat import load_hooks
from ..errors import StateError
from ..optimizer import Optimizer
from ..optimizer.checkpoint import after_hooks, loaded_groups
from ..optimizer.decide import with_limits
from ..optimizer.full_precision import read_by_value
from ..optimizer.homes import StateHome
from ..optimizer.masters import MASTER_KEYS
from ..optimizer.parameters import labelled
from ..optimizer.specs import graph_of
from ..optimizer.states import TRAINING, StateTemplate, begin_missing, storages
from ..rules import Rule
from ..storage import entries_of, kept_in_blocks, shape_of_entries, values_of
from .inner import ANCHOR, mirror
from .pieces import ShardedTensorPiece

if TYPE_CHECKING:
    from .core import Member, Sharding


def begun_state(optimizer: Optimizer) -> dict[str, Any] | None:
    """The state_dict of an optimizer that is going to be sharded; None if it has not stepped yet."""
    return optimizer.state_dict() if any(steps_behind(optimizer)) else None


def steps_behind(optimizer: Optimizer) -> list[float]:
    """The step counts that parameters of an optimizer have, each once, in order."""
    steps = [torch.as_tensor(values.get("step", 0.0)).reshape(()).cpu() for values in optimizer.state.values()]
    return sorted(set(torch.stack(steps).tolist())) if steps else []


@contextmanager
def sharded_states(optimizer: Optimizer, sharding: Sharding) -> Iterator[None]:
    """A block in which an optimizer's `state` has what a checkpoint takes: pieces that know where they belong."""
    state = optimizer.state
    optimizer.state = _pieces(optimizer, sharding)  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = state


def _pieces(optimizer: Optimizer, sharding: Sharding) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for member in sharding.members:
        known = sharding.inner.state.get(member.piece, {}) if member.piece is not None else {}
        if known:
            names = optimizer.rule_of(optimizer.param_groups[member.group]).state_names
            entries = entries_of(known, names)
            found[member.param] = {
                name: _as_piece(member, sharding, value, entries.get(name)) for name, value in known.items()
            }
        elif member.piece is None and sharding.holds_state(member):
            found[member.param] = _elsewhere(optimizer, member, sharding)
    return found


def _as_piece(member: Member, sharding: Sharding, value: Any, elements: int | None) -> Any:
    """What a checkpoint takes for a value of the state; `elements` are those of an entry of an array of blocks."""
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
    return ShardedTensorPiece.alone(value, tuple(value.shape), member, sharding.ranks)


def _elsewhere(optimizer: Optimizer, member: Member, sharding: Sharding) -> dict[str, Any]:
    """State of a parameter that another rank has: buffers of which nothing is here."""
    group = optimizer.param_groups[member.group]
    rule = optimizer.rule_of(group)
    like = torch.empty_like(member.param, device="meta")
    graph = graph_of(rule, group, like.shape)
    later: Any = {}
    formats = storages(like, group, graph, rule, label=f"({member.name})" if group.get("param_names") else "")
    template = StateTemplate(like, group, graph, rule, formats)
    state = template.begin(member.name, like, group, {}, later, StateHome(), like.shape)
    begin_missing(later, StateHome())
    return {
        name: ShardedTensorPiece.alone(None, tuple(value.shape), member, sharding.ranks, value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    }


def load_into_pieces(sharding: Sharding, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take the state of a checkpoint into the pieces, whole or not at all."""
    state_dict = with_limits(after_hooks(optimizer, state_dict))
    groups = loaded_groups(optimizer, state_dict["param_groups"])
    inner = sharding.inner
    given = inner.state_dict()
    states: dict[int, Any] = {}
    own = {piece: number for number, (_, _, _, piece) in enumerate(labelled(inner))}
    saved_groups = state_dict["param_groups"]
    groups_of = {number: group for group in saved_groups for number in group["params"]}
    numbers = [number for group in saved_groups for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params):
        member, saved = sharding.member_of[param], state_dict["state"].get(number)
        if saved is not None and member.piece is not None:
            rule = optimizer.rule_of(optimizer.param_groups[member.group])
            saved = read_by_value(member.name, saved, groups_of[number], rule.name, param, rule.state_names)
            states[own[member.piece]] = _local_state(member, rule, saved)
    kept = ("params", "param_names", "rule")
    merged = [
        {**{key: old[key] for key in kept if key in old}, **_hyperparameters(new)}
        for old, new in zip(given["param_groups"], groups)
    ]
    merged += [group for group in given["param_groups"] if ANCHOR in group]
    inner.load_state_dict({"state": states, "param_groups": merged})
    sharding.note_loaded(param for number, param in zip(numbers, params) if state_dict["state"].get(number))
    mirror([_hyperparameters(group) for group in inner.param_groups if ANCHOR not in group], optimizer.param_groups)
    for post in load_hooks(optimizer)[1]:
        post(optimizer)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "rule")}


def _local_state(member: Member, rule: Rule, saved: Mapping[str, Any]) -> dict[str, Any]:
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
    known = {*MASTER_KEYS, TRAINING, *entries, *(name for name in rule.state_names if _is_like_param(rule, name))}
    return {
        name: _local(member, name, value, entries.get(name, 1), is_known=name in known) for name, value in saved.items()
    }


def _is_like_param(rule: Rule, name: str) -> bool:
    return rule.states[name].shape != "scalar"


def _local(member: Member, name: str, value: Any, elements: int, *, is_known: bool) -> Any:
    """What of a saved value is this rank's."""
    assert member.piece is not None
    if not isinstance(value, torch.Tensor):
        return value
    (shape, order), here = member.entries(elements), member.range_of(member.bucket.ranks.rank, elements)
    if isinstance(value, ShardedTensorPiece):
        is_alike = value.shape == shape
        here = here if is_alike else (0, value.numel())
        if value.here != here:
            raise StateError(
                f"state {name!r} of {member.name} is the piece {value.here} of another rank or of another layout, this "
                f"rank has {here}: load it with torch.distributed.checkpoint, or load what full_state_dict() gives"
            )
        mine = value.local
        if not is_alike:
            return mine.view(value.shape)
    elif member.is_whole or not is_known:
        return value
    elif value.shape != shape:
        shapes = f"{tuple(value.shape)} in the checkpoint, it needs {shape}"
        raise StateError(f"state {name!r} of {member.name} has shape {shapes}")
    else:
        flat = value.detach().permute(order).reshape(-1)
        mine = flat[slice(*here)].to(member.piece.device, copy=True)
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
    said = ranks.each({number: _told(values) for number, values in own.items()}) if wholes else []
    told = {number: values for each in reversed(said) for number, values in each.items()}
    state: dict[Any, Any] = {}
    for number in numbers:
        values = packed["state"].get(number, {})
        if number in wholes:
            here = values if number in own else {}
            values = {
                name: here[name] if name in here else _as_told(value, wholes[number], ranks)
                for name, value in told[number].items()
            }
        if not values:
            continue
        gathered = {name: _gathered(value, wants) for name, value in values.items()}
        if wants:
            state[number] = gathered
    return {**packed, "state": state} if wants else {}


@dataclass
class _Elsewhere:
    """What the other ranks need to know of a buffer that one rank has alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as its rank tells it: numbers as they are, and of buffers what they are like."""
    return {
        name: _Elsewhere(tuple(value.shape), value.dtype)
        if isinstance(value, ShardedTensorPiece)
        else value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


def _as_told(value: Any, member: Member, ranks: Any) -> Any:
    if not isinstance(value, _Elsewhere):
        return value
    return ShardedTensorPiece.alone(None, value.shape, member, ranks, value.dtype)


def _gathered(value: Any, wants: bool) -> Any:
    if isinstance(value, ShardedTensorPiece):
        return value.collect(keep=wants)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) and wants else value
