"""The state of one parameter: which buffers it has, how they begin, what they keep when tables are built anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..compat import is_zero_tensor, zero_all
from ..engine import grad_dtype, is_dense
from ..errors import StateError
from ..graph import Graph
from ..pairs import as_real
from ..placements.local import local_part
from ..rules import Rule, State
from ..rules.protocol import at_step
from ..storage import (
    BLOCK,
    Plain,
    Storage,
    codec_of,
    kept_in_blocks,
    scale_names,
    shape_of_entries,
    stored_in,
    values_of,
)
from .homes import StateHome
from .masters import MASTER_KEYS, master_kind, other_master, start_of
from .state_formats import compute_dtype, rounded_as_said, state_formats

TRAINING = "training_param"
"""State key of the weights that train, while the parameter holds those to evaluate."""


@dataclass
class Missing:
    """A buffer that is to be made in a parameter's state.

    Args:
        blocks: where it is the first array of a state in blocks, the format and the state's name.
    """

    state: dict[str, Any]  # the parameter's state
    start: State  # how the buffer begins
    param: torch.Tensor  # the tensor that kernels update
    group: Mapping[str, Any]  # its param group
    dtype: torch.dtype  # of the buffer
    whole: torch.Size  # shape of the tensor of which the parameter may be a part
    source: torch.Tensor | None = None  # the buffer whose values it takes over, where there is one that cannot stay
    elements: int = 1  # of how many neighbours one of its entries is
    blocks: tuple[Storage, str] | None = None
    in_blocks: bool = False  # whether it is one of the arrays of such a state

    def __post_init__(self) -> None:
        self.follows_elements = self.start.shape == "param" and self.elements < BLOCK
        """Whether it lives where states do; numbers of rows, columns and blocks are always with the parameter."""

    @property
    def like(self) -> torch.Tensor:
        """For packed neighbours a tensor of the buffer's shape; it lies in memory as that does."""
        shape = shape_of_entries(self.param.shape, self.elements)
        return self.param.detach().as_strided(shape, torch.empty(shape, device="meta").stride())


_STEP = State(0.0, shape="scalar")

Later = dict[str, list[Missing]]
"""Missing buffers by their name."""


def storages(
    param: torch.Tensor,
    group: Mapping[str, Any],
    graph: Graph,
    rule: Rule,
    dtype: torch.dtype | None = None,
    label: str = "",
    shape: Sequence[int] | None = None,
) -> dict[str, Storage]:
    """Storage of the parameter, its gradient and each element state, in buffer order."""
    kind = master_kind(param.dtype, group)
    states = state_formats(param, group, graph, rule, label, param.shape if shape is None else shape)
    rounded = rounded_as_said({"param": Plain(param.dtype), **states}, group, graph)
    return {
        "param": rounded.pop("param") if kind is None else kind.storage(param.dtype),
        "grad": Plain(grad_dtype(param) if dtype is None else dtype),
        **{name: rounded[name] for name in states},
    }


class StateTemplate:
    """How the states of a param group's parameters begin that are kept alike: made once for all of them.

    Args:
        param: one of them, as kernels see it.
        group: its param group.
        graph: its rule's graph.
        rule: its rule.
        formats: its storages.
    """

    def __init__(
        self, param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, formats: Mapping[str, Storage]
    ) -> None:
        kept = [name for name in graph.states if name in formats and name not in graph.matrix_states]
        self.dtypes = {name: formats[name].arrays(name)[0].dtype for name in kept}
        self.dtypes.update(dict.fromkeys((*graph.matrix_states, *graph.scalar_states), compute_dtype(param)))
        self.dtypes["step"] = torch.float32
        self.starts = starts_of(rule, graph.states, param.dtype, group)
        self.kind = master_kind(param.dtype, group)
        if self.kind is not None:
            self.dtypes[self.kind.key] = self.kind.dtype
        self.formats = formats
        self.in_blocks = {name for name in self.starts if name in formats and codec_of(formats[name]).has_blocks}
        self.scales = set(chain.from_iterable(map(scale_names, formats)))
        """Names that arrays of states in blocks can have, of whatever format."""
        self.own = {*MASTER_KEYS, *rule.state_names, *chain.from_iterable(map(scale_names, rule.state_names))}
        """Names of which a value that a state does not have is not kept."""
        self.names = rule.state_names
        self.buffers = self.own.difference(graph.scalar_states, graph.matrix_states)
        """Those of buffers that lie as the parameter does."""

    def begin(
        self,
        label: str,
        param: torch.Tensor,
        group: Mapping[str, Any],
        known: Mapping[str, Any],
        later: Later,
        home: StateHome,
        whole: torch.Size,
        live: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state of a parameter: known buffers are kept, missing ones begin as the rule says.

        Args:
            label: the parameter in messages.
            param: what kernels update.
            group: its param group.
            known: its buffers and numbers so far.
            later: takes the buffers that are to be made.
            home: where they live.
            whole: shape of the tensor of which the parameter may be a part.
            live: where `known` is a checkpoint's, the state that the optimizer has: other buffers are copied.
        """
        kind, dtypes = self.kind, self.dtypes
        other = None if kind is None else other_master(kind, known)
        if kind is not None and other is not None:
            known = {**known, kind.key: kind.buffer_of(param, other.values(param, known[other.key]))}
        if not self.scales.isdisjoint(known):
            known = _by_value(known, self.formats, param)
        state: dict[str, Any] = {}
        for name, start in self.starts.items():
            value = known.get(name)
            if name in self.in_blocks:
                _add_blocks(
                    label, name, self.formats[name], start, state, known, live, later, home, param, group, whole
                )
                continue
            if start.shape == "scalar":
                state[name] = _scalar(_start(start, group) if value is None else value, dtypes[name], live is not None)
            elif (
                value is not None
                and (live is None or _is_same(value, live.get(name)))
                and _can_stay(label, name, value, start, param, dtypes[name], home, whole)
            ):
                state[name] = value
            else:
                state[name] = None
                later.setdefault(name, []).append(Missing(state, start, param, group, dtypes[name], whole, value))
        others = {name: value for name, value in known.items() if name not in state}
        if others:
            own = self.own.difference([name for name, value in others.items() if not isinstance(value, torch.Tensor)])
            state.update({name: value for name, value in others.items() if name not in own})
        return state


def _by_value(known: Mapping[str, Any], formats: Mapping[str, Storage], param: torch.Tensor) -> Mapping[str, Any]:
    """A known state, of which what is in blocks of another format than asked for is given by its values."""
    found: dict[str, Any] | None = None
    for name in formats:
        has_scales = isinstance(known.get(name), torch.Tensor) and not known.keys().isdisjoint(scale_names(name))
        storage = kept_in_blocks(known, name) if has_scales else None
        if storage is None or storage.arrays(name) == formats[name].arrays(name):
            continue
        found = dict(known) if found is None else found
        found[name] = values_of(storage, known, name, shape=param.shape)
        for array in storage.arrays(name)[1:]:
            del found[array.name]
    return known if found is None else found


def _add_blocks(
    label: str,
    name: str,
    storage: Storage,
    start: State,
    state: dict[str, Any],
    known: Mapping[str, Any],
    live: Mapping[str, Any] | None,
    later: Later,
    home: StateHome,
    param: torch.Tensor,
    group: Mapping[str, Any],
    whole: torch.Size,
) -> None:
    """The arrays of a state in blocks: those that are known in this format, or new ones that take over its values."""
    arrays = storage.arrays(name)
    there: list[Any] = [known.get(array.name) for array in arrays]
    value = known.get(name)
    is_same = value is not None and all(
        buffer is not None
        and buffer.dtype is array.dtype
        and tuple(buffer.shape) == shape_of_entries(param.shape, array.elements)
        for buffer, array in zip(there, arrays)
    )
    if is_same and all(
        _lies_well(buffer, param, home, is_like_param=array.elements == 1, is_at_home=array.follows_elements)
        and (live is None or _is_same(buffer, live.get(array.name)))
        for buffer, array in zip(there, arrays)
    ):
        state.update({array.name: buffer for buffer, array in zip(there, arrays)})
        return
    wanted = shape_of(start, param, whole)
    if value is not None and not is_same and tuple(value.shape) != wanted:
        raise _other_shape(label, name, value, wanted)
    for place, array in enumerate(arrays):
        state[array.name] = None
        one = Missing(state, start, param, group, array.dtype, whole, value, array.elements)
        if is_same:
            one.source = there[place]
        else:
            one.blocks, one.in_blocks = None if place else (storage, name), True
        later.setdefault(array.name, []).append(one)


def starts_of(rule: Rule, names: Iterable[str], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, State]:
    """How each buffer of a parameter's state begins, the step count first, then a master."""
    kind = master_kind(dtype, group)
    masters = {} if kind is None else {kind.key: start_of(kind)}
    return {"step": _STEP, **masters, **{name: rule.states[name] for name in names}}


@torch.no_grad()
def begin_again(state: dict[str, Any], rule: Rule, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Let a state that was made ahead begin with the values that its parameter and group have now.

    Only where the step count is 0, which a device decides for itself: a graph may have stepped without saying so.
    """
    part = as_real(local_part(param))
    fresh = state["step"] == 0
    starts = starts_of(rule, [name for name in rule.state_names if name in state], param.dtype, group)
    for name, start in starts.items():
        if not isinstance(start.init, str):
            continue
        buffer = as_real(local_part(state[name]))
        blocks = kept_in_blocks(state, name)
        if blocks is not None:
            _begin_blocks_again(state, blocks, name, start, part, group, fresh)
            continue
        if start.init == "param":
            value = part.detach().to(buffer.device, buffer.dtype)
        else:
            value = torch.full((), _start(start, group), dtype=buffer.dtype, device=buffer.device)
        buffer.copy_(torch.where(fresh.to(buffer.device), value, buffer))


def _begin_blocks_again(
    state: Mapping[str, Any],
    storage: Storage,
    name: str,
    start: State,
    part: torch.Tensor,
    group: Mapping[str, Any],
    fresh: torch.Tensor,
) -> None:
    own = {array.name: local_part(state[array.name]) for array in storage.arrays(name)}
    begun = {key: torch.empty_like(array) for key, array in own.items()}
    _fill_blocks(begun, storage, name, start, part, group)
    for key, array in own.items():
        # By bits: nothing chooses between elements of eight bits of a floating point type.
        kind = torch.uint8 if array.dtype.itemsize == 1 else torch.int16
        array.view(kind).copy_(torch.where(fresh.to(array.device), begun[key].view(kind), array.view(kind)))


def begin_missing(later: Later, home: StateHome) -> None:
    """Make all missing buffers and let them begin.

    They are made name by name, so that those which a pass walks one after the other lie beside each other: a CPU's
    prefetcher runs from one into the next, which is a quarter of the time for tensors of 8,192 elements.
    """
    elementwise = [one for missing in later.values() for one in missing if one.follows_elements]
    made = iter(
        home.make(
            [one.param if one.elements == 1 else one.like for one in elementwise], [one.dtype for one in elementwise]
        )
    )
    for name, missing in later.items():
        zeros: list[torch.Tensor] = []
        for one in missing:
            one.state[name] = buffer = next(made) if one.follows_elements else _empty(one)
            if one.in_blocks and (one.source is not None or one.start.init != 0):
                continue
            if one.source is not None:
                buffer.copy_(one.source)
            elif one.start.init == 0:
                zeros.append(buffer)
            else:
                restart(buffer, one.start, one.param, one.group)
        zero_all(zeros)
    for one in [one for missing in later.values() for one in missing]:
        if one.blocks is not None and (one.source is not None or one.start.init != 0):
            _fill_blocks(one.state, *one.blocks, one.start, one.param, one.group, one.source)


@torch.no_grad()
def _fill_blocks(
    state: Mapping[str, Any],
    storage: Storage,
    name: str,
    start: State,
    param: torch.Tensor,
    group: Mapping[str, Any],
    source: torch.Tensor | None = None,
) -> None:
    """Write a state in blocks: the values of another buffer, or what it begins with."""
    if source is None:
        source = param.detach() if start.init == "param" else torch.full((), _start(start, group))
    device = state[name].device
    stored_in(storage, state, name, source.to(device), shape=param.shape)


def _scalar(value: Any, dtype: torch.dtype, copies: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        # The segment's array gives it its device, and if it was not loaded its dtype.
        return value.detach().reshape(()).to(dtype, copy=True) if copies else value.reshape(())
    return torch.tensor(float(value), dtype=dtype, device="cpu")


def _is_same(value: torch.Tensor, live: Any) -> bool:
    """Whether a checkpoint's buffer is the very one that the optimizer has, as after `dcp.load` in place."""
    return isinstance(live, torch.Tensor) and value.data_ptr() == live.data_ptr() and value.dtype is live.dtype


def _start(start: State, group: Mapping[str, Any]) -> float:
    return float(at_step(group[start.init], 1.0, start.init) if isinstance(start.init, str) else start.init)


def shape_of(start: State, param: torch.Tensor, whole: torch.Size) -> tuple[int, ...]:
    """The shape of a state buffer."""
    if start.shape in ("left", "right"):
        side = whole[-2 if start.shape == "left" else -1]
        return (side, side)
    if start.shape == "row":
        return (*param.shape[:-1], 1)
    if start.shape == "column":
        return (*param.shape[:-2], 1, param.shape[-1])
    return tuple(param.shape)


def slice_overs(rule: Rule, param: torch.Tensor) -> dict[str, tuple[int, int]]:
    """For states with one number a row or column, the dimension of the parameter that they have not, and the next."""
    ends = {"row": param.dim(), "column": param.dim() - 1}
    return {name: (ends[each.shape] - 1, ends[each.shape]) for name, each in rule.states.items() if each.shape in ends}


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a saved state has seen a step, as far as it says."""
    if any([isinstance(value, torch.Tensor) and name != "step" for name, value in state.items()]):
        return True
    return float(state.get("step") or 0.0) > 0


def _can_stay(
    label: str,
    name: str,
    value: torch.Tensor,
    start: State,
    param: torch.Tensor,
    dtype: torch.dtype,
    home: StateHome,
    whole: torch.Size,
) -> bool:
    """Whether a known buffer lies as kernels want it."""
    is_like_param = start.shape == "param"
    if not is_like_param or value.shape != param.shape:
        wanted = shape_of(start, param, whole)
        if tuple(value.shape) != wanted:
            raise _other_shape(label, name, value, wanted)
    return value.dtype is dtype and _lies_well(value, param, home, is_like_param, is_at_home=is_like_param)


def _other_shape(label: str, name: str, value: torch.Tensor, wanted: tuple[int, ...]) -> StateError:
    return StateError(
        f"state {name!r} of {label} has shape {tuple(value.shape)}, it needs {wanted}: the parameter "
        "or this state was changed; change the other too, or delete the parameter from `state` to begin anew"
    )


def _lies_well(
    value: torch.Tensor, param: torch.Tensor, home: StateHome, is_like_param: bool, *, is_at_home: bool
) -> bool:
    """Whether a buffer lies where and as kernels want it."""
    follows = value.stride() == param.stride() or not is_dense(param)
    lies_well = follows if is_like_param else value.is_contiguous()
    is_kept = value.device == param.device
    lives_well = home.keeps(value, param) if is_at_home and not home.is_beside else is_kept
    is_lazy = value.is_neg() or value.is_conj() or is_zero_tensor(value)
    return lives_well and lies_well and not is_lazy


def _empty(one: Missing) -> torch.Tensor:
    """A new buffer of rows, columns, a matrix or numbers of blocks that is going to be written."""
    shape = shape_of(one.start, one.param, one.whole)
    if one.elements != 1:
        shape = shape_of_entries(one.param.shape, one.elements)
    return one.param.new_empty(shape, dtype=one.dtype, requires_grad=False)


def restart(buffer: torch.Tensor, start: State, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Let a buffer begin again, in place."""
    if start.init == "param":
        buffer.copy_(param.detach())
    else:
        buffer.fill_(_start(start, group))
