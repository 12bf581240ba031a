"""The state of one parameter: which buffers it has, how they begin, what they keep when tables are built anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import zero_all
from ..engine import grad_dtype, is_dense
from ..errors import StateError
from ..graph import Graph
from ..pairs import as_real
from ..placements.local import local_part
from ..rules import Rule, State
from ..rules.protocol import at_step
from ..storage import Plain, Storage
from .homes import StateHome
from .masters import MASTER_KEYS, master_kind, other_master, start_of
from .state_formats import compute_dtype, state_formats

__all__ = [
    "Later",
    "TRAINING",
    "begin_again",
    "begin_missing",
    "compute_dtype",
    "has_begun",
    "initial_state",
    "restart",
    "shape_of",
    "slice_overs",
    "starts_of",
    "storages",
]

TRAINING = "training_param"
"""State key of the weights that train, while the parameter holds those to evaluate."""


@dataclass
class Missing:
    """A buffer that is to be made in a parameter's state.

    Args:
        state: the parameter's state.
        start: how the buffer begins.
        param: the tensor that kernels update.
        group: its param group.
        dtype: of the buffer.
        source: the buffer whose values it takes over, where there is one that cannot stay.
        whole: shape of the tensor of which the parameter may be a part.
    """

    state: dict[str, Any]
    start: State
    param: torch.Tensor
    group: Mapping[str, Any]
    dtype: torch.dtype
    whole: torch.Size
    source: torch.Tensor | None = None


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
    numel: int | None = None,
) -> dict[str, Storage]:
    """Storage of the parameter, its gradient and each element state, in buffer order.

    Args:
        param: the parameter, or what of it is here.
        group: its param group.
        graph: the rule traced for it.
        rule: the rule.
        dtype: of its gradient, where that is another than its own.
        label: how messages call it.
        numel: elements of the whole parameter, where that is more.
    """
    kind = master_kind(param.dtype, group)
    return {
        "param": Plain(param.dtype) if kind is None else kind.storage(param.dtype),
        "grad": Plain(grad_dtype(param) if dtype is None else dtype),
        **state_formats(param, group, graph, rule, label, param.numel() if numel is None else numel),
    }


def initial_state(
    label: str,
    param: torch.Tensor,
    group: Mapping[str, Any],
    graph: Graph,
    rule: Rule,
    known: Mapping[str, Any],
    later: Later,
    home: StateHome,
    whole: torch.Size,
    formats: Mapping[str, Storage],
    live: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a parameter: known buffers are kept, missing ones begin as the rule says.

    Args:
        label: how messages call the parameter.
        param: the local tensor.
        group: its param group.
        graph: the rule traced for it.
        rule: the rule.
        known: state it has already; entries that are not the rule's are kept as they are.
        later: gets the missing buffers, which are None until `begin_missing`.
        home: where element buffers live.
        whole: shape of the tensor of which `param` may be a part; matrices beside it have its sides.
        formats: of its buffers, see `storages`.
        live: where `known` comes from a checkpoint, the buffers that are the optimizer's: what is the checkpoint's is
            copied and never written to.

    Raises:
        StateError: for a known buffer of another shape.
    """
    kept = [name for name in graph.states if name in formats and name not in graph.matrix_states]
    dtypes = {name: formats[name].arrays(name)[0].dtype for name in kept}
    dtypes.update(dict.fromkeys((*graph.matrix_states, *graph.scalar_states), compute_dtype(param)))
    dtypes["step"] = torch.float32
    starts = starts_of(rule, graph.states, param.dtype, group)
    kind = master_kind(param.dtype, group)
    if kind is not None:
        dtypes[kind.key] = kind.dtype
        other = other_master(kind, known)
        if other is not None:
            known = {**known, kind.key: kind.buffer_of(param, other.values(param, known[other.key]))}
    state: dict[str, Any] = {}
    for name, start in starts.items():
        value = known.get(name)
        if start.shape == "scalar":
            state[name] = _scalar(_start(start, group) if value is None else value, dtypes[name], live is not None)
        elif (
            value is not None
            and _can_stay(label, name, value, start, param, dtypes[name], home, whole)
            and (live is None or _is_same(value, live.get(name)))
        ):
            state[name] = value
        else:
            state[name] = None
            later.setdefault(name, []).append(Missing(state, start, param, group, dtypes[name], whole, value))
    unused = {*MASTER_KEYS, *rule.state_names}
    state.update({name: value for name, value in known.items() if name not in state and name not in unused})
    return state


def starts_of(rule: Rule, names: Iterable[str], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, State]:
    """How each buffer of a parameter's state begins, the step count first, then a master.

    Args:
        rule: the rule.
        names: the states that its kernels have.
        dtype: of the parameter.
        group: its param group.
    """
    kind = master_kind(dtype, group)
    masters = {} if kind is None else {kind.key: start_of(kind)}
    return {"step": _STEP, **masters, **{name: rule.states[name] for name in names}}


@torch.no_grad()
def begin_again(state: dict[str, Any], rule: Rule, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Let a state that was made ahead begin with the values that its parameter and group have now.

    Only where the step count is 0, which a device decides for itself: a graph may have stepped without saying so.

    Args:
        state: the state, complete.
        rule: its rule.
        param: the parameter.
        group: its param group.
    """
    part = as_real(local_part(param))
    fresh = state["step"] == 0
    starts = starts_of(rule, [name for name in rule.state_names if name in state], param.dtype, group)
    for name, start in starts.items():
        if not isinstance(start.init, str):
            continue
        buffer = as_real(local_part(state[name]))
        if start.init == "param":
            value = part.detach().to(buffer.device, buffer.dtype)
        else:
            value = torch.full((), _start(start, group), dtype=buffer.dtype, device=buffer.device)
        buffer.copy_(torch.where(fresh.to(buffer.device), value, buffer))


def begin_missing(later: Later, home: StateHome) -> None:
    """Make all missing buffers and let them begin.

    They are made name by name, so that those which a pass walks one after the other lie beside each other: a CPU's
    prefetcher runs from one into the next, which is a quarter of the time for tensors of 8,192 elements.

    Args:
        later: filled by `initial_state`.
        home: where element buffers live.
    """
    elementwise = [one for missing in later.values() for one in missing if one.start.shape == "param"]
    made = iter(home.make([one.param for one in elementwise], [one.dtype for one in elementwise]))
    for name, missing in later.items():
        zeros: list[torch.Tensor] = []
        for one in missing:
            one.state[name] = buffer = next(made) if one.start.shape == "param" else _empty(one)
            if one.source is not None:
                buffer.copy_(one.source)
            elif one.start.init == 0:
                zeros.append(buffer)
            else:
                restart(buffer, one.start, one.param, one.group)
        zero_all(zeros)


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
    """The shape of a state buffer.

    Args:
        start: how it begins.
        param: its parameter, or what of it is here.
        whole: shape of the whole parameter.
    """
    if start.shape in ("left", "right"):
        side = whole[-2 if start.shape == "left" else -1]
        return (side, side)
    if start.shape == "row":
        return (*param.shape[:-1], 1)
    if start.shape == "column":
        return (*param.shape[:-2], 1, param.shape[-1])
    return tuple(param.shape)


def slice_overs(rule: Rule, param: torch.Tensor) -> dict[str, tuple[int, int]]:
    """For states with one number a row or column, the dimension of the parameter that they have not, and the next.

    Args:
        rule: the rule.
        param: the parameter.
    """
    ends = {"row": param.dim(), "column": param.dim() - 1}
    return {name: (ends[each.shape] - 1, ends[each.shape]) for name, each in rule.states.items() if each.shape in ends}


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a saved state has seen a step, as far as it says."""
    if any(isinstance(value, torch.Tensor) and name != "step" for name, value in state.items()):
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
    wanted = shape_of(start, param, whole)
    if tuple(value.shape) != wanted:
        raise StateError(
            f"state {name!r} of {label} has shape {tuple(value.shape)}, it needs {wanted}: the parameter "
            "or this state was changed; change the other too, or delete the parameter from `state` to begin anew"
        )
    follows = value.stride() == param.stride() or not is_dense(param)
    lies_well = follows if start.shape == "param" else value.is_contiguous()
    lives_well = home.keeps(value, param) if start.shape == "param" else value.device == param.device
    is_lazy = value.is_neg() or value.is_conj() or value._is_zerotensor()
    return value.dtype is dtype and lives_well and lies_well and not is_lazy


def _empty(one: Missing) -> torch.Tensor:
    """A new buffer of rows, columns or a matrix that is going to be written."""
    return one.param.new_empty(shape_of(one.start, one.param, one.whole), dtype=one.dtype, requires_grad=False)


def restart(buffer: torch.Tensor, start: State, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Let a buffer begin again, in place.

    Args:
        buffer: the state buffer.
        start: how it begins.
        param: its parameter.
        group: its param group.
    """
    if start.init == "param":
        buffer.copy_(param.detach())
    else:
        buffer.fill_(_start(start, group))
