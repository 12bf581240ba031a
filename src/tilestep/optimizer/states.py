"""The state of one parameter: buffers and their formats, how they begin, what they keep when a plan is rebuilt."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..compat import is_zero_tensor, zero_all
from ..errors import StateError
from ..graph import Graph, never_negative
from ..memory.memory import StateMemory
from ..placement.local import as_real, local_part, sharded_dims
from ..rules import Interval, Rule, State
from ..rules.protocol import at_step
from ..runtime import grad_dtype, is_dense
from ..storage import (
    BLOCK,
    Plain,
    Stochastic,
    Storage,
    codec_of,
    dtype_name,
    kept_in_blocks,
    lie_in_rows,
    rows_of,
    scale_names,
    shape_of_entries,
    state_format,
    stored_in,
    values_of,
)
from .masters import MASTER_KEYS, master_kind, other_master
from .parameters import Optimizer, iter_params

StateDtype = torch.dtype | str | Mapping[str, Any] | Callable[[str], Any] | None  # what `state_dtype` takes
SMALLEST = 4096  # elements from which a parameter's state is kept as `state_dtype` says: smaller ones save little
SHORTEST = 32  # elements of a row from which it is worth its scales
_EMBEDDING = re.compile(r"emb|wte|wpe|vocab", re.IGNORECASE)
_NAME = re.compile(r"\((.*)\)$")


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The type a parameter's update is computed in: float64 for float64, else float32."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def check_state_dtype(rule: Rule, choice: Any) -> None:
    """Raise for what `state_dtype` cannot say."""
    if isinstance(choice, Mapping):
        possible = [name for name, state in rule.states.items() if state.shape == "param"]
        for name, kept in choice.items():
            if name not in possible:
                names = ", ".join(map(repr, possible)) or "none"
                raise ValueError(
                    f"Invalid state_dtype: {rule.name} has no state {name!r} like its parameters; it has {names}"
                )
            state_format(kept)
    elif choice is not None and not callable(choice):
        state_format(choice)


def state_formats(
    param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, label: str, shape: Sequence[int]
) -> dict[str, Storage]:
    """The formats of a parameter's states that are like it, by name."""
    # A state keeps what its rule declares, one that begins as a copy of the parameter and squares of an embedding's
    # gradients float32, unless the group names the state; parameters of fewer than `SMALLEST` elements keep float32,
    # and so do those whose rows are shorter than `SHORTEST`, and states that other code writes, in place of blocks. A
    # function that chooses by the parameter's name has the last word.
    named = _NAME.search(label)
    name = named[1] if named else ""
    choice = group.get("state_dtype")
    is_chosen_by_name = callable(choice)
    if callable(choice):
        if not name:
            warnings.warn(
                "state_dtype is a function of a parameter's name, and is given '', as parameters have none: make the "
                "optimizer of model.named_parameters()",
                stacklevel=2,
            )
        choice = choice(name)
        check_state_dtype(rule, choice)
    default = Plain(param.dtype if master_kind(param.dtype, group) is None else torch.float32)
    formats: dict[str, Storage] = {}
    for state in graph.states:
        if state in graph.scalar_states or state in graph.matrix_states:
            continue
        kept = _kept_as(state, rule, graph, choice, name, shape, exactly=is_chosen_by_name)
        if kept is None:
            declared = graph.state_dtypes.get(state)
            formats[state] = default if declared is None else Plain(declared)
            continue
        declared_sign = rule.states[state].signed
        signed = not _is_positive(state, rule, graph) if declared_sign is None else declared_sign
        chosen = state_format(kept, signed)
        if codec_of(chosen).has_blocks and state not in graph.outputs and rule.states[state].init != "param":
            if isinstance(choice, Mapping):
                raise StateError(
                    f"{label}: {graph.title} only reads the state {state!r}, and what writes it would write numbers in "
                    f"the place of codes: keep it as 'float32', 'bfloat16' or 'float16' in place of {kept!r}"
                )
            chosen = Plain(torch.float32)
        elif codec_of(chosen).has_blocks:
            chosen = _in_blocks(chosen, kept, signed, shape, graph, label, exactly=is_chosen_by_name)
        formats[state] = Plain(compute_dtype(param)) if chosen == Plain(torch.float32) else chosen
    beside = {array.name: state for state, kept in formats.items() for array in kept.arrays(state)[1:]}
    if taken := beside.keys() & rule.states.keys():
        name = min(taken)
        raise StateError(
            f"{label}: {rule.name} has a state {name!r}, and scales of its state {beside[name]!r} are kept under that "
            "name; rename one, or keep it as 'float32', 'bfloat16' or 'float16'"
        )
    return formats


_EXACT = "float32"


def _kept_as(
    state: str, rule: Rule, graph: Graph, choice: Any, name: str, shape: Sequence[int], *, exactly: bool
) -> Any:
    """The dtype or format's name that a state is to be kept in; None for what its rule says."""
    is_named = isinstance(choice, Mapping)
    kept = choice.get(state) if is_named else choice
    declared = graph.state_dtypes.get(state)
    if kept is None or (declared is not None and not is_named) or state in graph.slice_states:
        return None
    begins_as_param = rule.states[state].init == "param"
    is_square = state.endswith(("_sq", "_square", "_squared")) and _EMBEDDING.search(name) is not None
    if not exactly and not is_named and (begins_as_param or is_square):
        return _EXACT
    return _EXACT if not exactly and math.prod(shape) < SMALLEST else kept


def _is_positive(state: str, rule: Rule, graph: Graph) -> bool:
    """Whether a state has no negative elements, by the ranges of hyperparameters; one without is where it begins."""
    bounds: dict[str, tuple[float, float]] = {}
    for key, default in rule.hyperparameters.items():
        ranges, entries = rule.ranges.get(key), default if isinstance(default, tuple) else (default,)
        for index, entry in enumerate(entries):
            interval = ranges[index] if isinstance(ranges, tuple) and index < len(ranges) else ranges
            place = f"{key}.{index}" if isinstance(default, tuple) else key
            low, high = (interval.low, interval.high) if isinstance(interval, Interval) else (-math.inf, math.inf)
            if isinstance(entry, (int, float)) and 0 <= entry <= 1:
                # What is not said is taken to be as by default; were it not, NaN would say so.
                low, high = max(low, 0.0), min(high, 1.0)
            bounds[place] = (low, high)
    init = rule.states[state].init
    least = bounds.get(init, (-math.inf, math.inf))[0] if isinstance(init, str) else init
    if least < 0:
        return False
    return never_negative(graph, state, bounds)


def _in_blocks(
    chosen: Storage, kept: Any, signed: bool, shape: Sequence[int], graph: Graph, label: str, *, exactly: bool
) -> Storage:
    """A format of blocks where they can lie, and what is kept in its place where not."""
    columns = rows_of(shape)[1]
    is_across = not all(lie_in_rows(shape, end) for end in graph.slice_ends)
    if is_across and exactly:
        raise StateError(
            f"{label} of shape {tuple(shape)}: {graph.title} reduces over rows that blocks of {BLOCK} along "
            f"{columns} elements cross: keep its states as 'float32', 'bfloat16' or 'float16' in place of {kept!r}"
        )
    if is_across or (columns < SHORTEST and not exactly):
        return Plain(torch.float32)
    is_packed = codec_of(chosen).is_packed
    if is_packed and (not shape or shape[-1] % 2 or shape[-1] != columns):
        return state_format("int8", signed)
    return chosen


ROUNDINGS = ("nearest", "stochastic")  # what `rounding` can say


def check_rounding(group: Mapping[str, Any]) -> None:
    """Raise for what `rounding` and `seed` cannot say."""
    rounding, seed = group.get("rounding", ROUNDINGS[0]), group.get("seed", 0)
    if rounding not in ROUNDINGS:
        raise ValueError(f"Invalid rounding: {rounding!r}; it must be 'nearest' or 'stochastic'")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"Invalid seed: {seed!r}; it must be an integer from 0 to 2**64 - 1, the same on all ranks")


def check_complex_states(label: str, formats: Mapping[str, Storage]) -> None:
    """Raise for states of a complex parameter in what torch has no complex type of."""
    for name, storage in formats.items():
        if codec_of(storage).has_blocks or storage.precision is torch.bfloat16:
            raise StateError(
                f"{label} is complex: its state {name!r} can be kept as 'float32' or 'float16', not as {storage}; "
                "choose for a param group of its own, or by a function of the name"
            )


def check_cut_blocks(label: str, param: torch.Tensor, formats: Mapping[str, Storage]) -> None:
    """Raise for a DTensor whose parts do not hold whole blocks."""
    blocks = next((str(storage) for storage in formats.values() if codec_of(storage).has_blocks), None)
    if blocks is None:
        return
    lead, columns = rows_of(param.shape)
    for dim, parts in sharded_dims(param).items():
        if dim < len(lead) or (dim == param.dim() - 1 == len(lead) and columns % (BLOCK * parts) == 0):
            continue
        if dim == param.dim() - 1 == len(lead):
            size = -(-columns // (BLOCK * parts)) * BLOCK * parts
            remedy = f"make its last dimension {size}, a multiple of {BLOCK} for each of {parts} parts"
        else:
            remedy = f"shard it along dimension 0: its rows of blocks are all of its dimensions from {len(lead)} on"
        raise StateError(
            f"{label} of shape {tuple(param.shape)} is sharded along dimension {dim}, which cuts blocks of {BLOCK} "
            f"elements ({blocks}): {remedy}, or keep its states as 'bfloat16'"
        )


def saved_choice(choice: Any) -> Any:
    """What a checkpoint says of a group's `state_dtype`: names of formats; None for a function."""
    if isinstance(choice, Mapping):
        return {state: saved_choice(kept) for state, kept in choice.items()}
    if callable(choice):
        return None
    return dtype_name(choice) if isinstance(choice, torch.dtype) else choice


SQUARES = ("left", "right")


def _squares(rule: Rule, state: Mapping[str, Any]) -> list[str]:
    return [name for name, start in rule.states.items() if start.shape in SQUARES and name in state]


@contextmanager
def keeping_squares(optimizer: Optimizer) -> Iterator[None]:
    """A block that makes a plan anew, in which no parameter that has been stepped may get or lose a square matrix."""
    # Other states are turned into such bases and scaled by them, and a basis of zeros would hold its parameter still.
    before: list[tuple[str, Rule, torch.Tensor, list[str]]] = []
    for label, _, group, param in iter_params(optimizer):
        rule = optimizer.rule_of(group)
        if param in optimizer.state and any(start.shape in SQUARES for start in rule.states.values()):
            before.append((label, rule, param, _squares(rule, optimizer.state[param])))
    yield
    for label, rule, param, squares in before:
        state = optimizer.state[param]
        kept = _squares(rule, state)
        changed = [name for name in rule.states if (name in squares) != (name in kept)]
        if changed and float(state["step"]) > 0:
            happens = "gets" if changed[0] in kept else "loses"
            raise StateError(
                f"with these hyperparameters of {rule.name}, {label} {happens} the states "
                f"{', '.join(changed)} in the middle of a training; put back what has changed, or delete the "
                "parameter from the optimizer's `state` to begin anew"
            )


class _Count:
    """How often something was replaced; states hold it and not each other, so that their memory comes back at once."""

    changes = 0


def _noted(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def changing(self: ParameterState, *args: Any, **kwargs: Any) -> Any:
        # The weights that train come and go with eval() and train(); no kernel reads them there.
        before = [(key, value) for key, value in self.items() if isinstance(value, torch.Tensor) and key != TRAINING]
        result = original(self, *args, **kwargs)
        if self.count is not None and any([self.get(key) is not value for key, value in before]):
            self.count.changes += 1
        return result

    return changing


class ParameterState(dict[str, Any]):
    """One parameter's state, which counts the tensors that are replaced or taken away: kernels know the old ones."""

    count: _Count | None = None
    is_ahead = False  # whether it was made before a step needed it: it begins once more with that step's values

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def _counted(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def changing(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self.changes += 1
        return original(self, *args, **kwargs)

    return changing


class WatchedState(defaultdict[Any, Any]):
    """torch's `defaultdict(dict)` of states, with a count of its changes: comparing thousands of entries takes long."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = _Count()

    @property
    def changes(self) -> int:
        """How often an entry, or a tensor inside one, was set or taken away."""
        return self.count.changes

    @changes.setter
    def changes(self, number: int) -> None:
        self.count.changes = number

    def entry(self, values: Mapping[str, Any], *, is_ahead: bool = False) -> ParameterState:
        """A parameter's state whose changes count here too."""
        made = ParameterState(values)
        made.count, made.is_ahead = self.count, is_ahead
        return made

    def adopt(self, states: Mapping[Any, Any], ahead: Container[Any]) -> None:
        """Take the states of parameters; those of `ahead` begin with their first step."""
        entries = {
            key: self.entry(values, is_ahead=key in ahead) if isinstance(key, torch.Tensor) else values
            for key, values in states.items()
        }
        self.update(entries)

    def __missing__(self, key: Any) -> Any:
        self.changes += 1
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(ParameterState, _name, _noted(_name))
    setattr(WatchedState, _name, _counted(_name))


TRAINING = "training_param"  # state key of the weights that train, while the parameter holds those to evaluate


@dataclass
class BufferRequest:
    """A buffer that is to be made in a parameter's state."""

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

BufferRequests = dict[str, list[BufferRequest]]  # buffers to be made, by their name


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
    formats: dict[str, Storage] = {"param": Plain(param.dtype), "grad": Plain(dtype or grad_dtype(param)), **states}
    for name in ("param", *states) if group.get("rounding", ROUNDINGS[0]) != ROUNDINGS[0] else ():
        storage: Any = formats[name]
        if codec_of(storage).has_blocks or storage.precision in (torch.bfloat16, torch.float16):
            # Numbers of rows and columns are few: they are not rounded at random.
            formats[name] = Plain(torch.float32) if name in graph.slice_states else Stochastic(storage)
    if kind is not None:
        formats["param"] = kind.storage(param.dtype)
    return formats


class StateTemplate:
    """How the states of a param group's parameters begin that are kept alike: made once for all of them."""

    def __init__(
        self, param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, formats: Mapping[str, Storage]
    ) -> None:
        kept = [name for name in graph.states if name in formats and name not in graph.matrix_states]
        self.dtypes = {name: formats[name].arrays(name)[0].dtype for name in kept}
        numbers = (*graph.matrix_states, *graph.scalar_states)
        self.dtypes.update({name: graph.state_dtypes.get(name, compute_dtype(param)) for name in numbers})
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
        self.buffers = self.own.difference(graph.scalar_states, graph.matrix_states)  # those that lie as the parameter

    def begin(
        self,
        label: str,
        param: torch.Tensor,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        requests: BufferRequests,
        home: StateMemory,
        whole: torch.Size,
        live: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state of a parameter: known buffers are kept, missing ones begin as the rule says."""
        kind, dtypes = self.kind, self.dtypes
        other = None if kind is None else other_master(kind, values)
        if kind is not None and other is not None:
            values = {**values, kind.key: kind.buffer_of(param, other.values(param, values[other.key]))}
        if not self.scales.isdisjoint(values):
            values = _by_value(values, self.formats, param)
        state: dict[str, Any] = {}
        for name, start in self.starts.items():
            value: Any = values.get(name)
            if value is None and start.zero_if_late is not None:
                _check_late(label, name, start.zero_if_late, group, values)
            if name in self.in_blocks:
                storage = self.formats[name]
                arrays = storage.arrays(name)
                there: list[Any] = [values.get(array.name) for array in arrays]
                is_same = value is not None and all(
                    buffer is not None
                    and buffer.dtype is array.dtype
                    and tuple(buffer.shape) == shape_of_entries(param.shape, array.elements)
                    for buffer, array in zip(there, arrays)
                )
                if is_same and all(
                    _lies_well(buffer, param, home, array.elements == 1, is_at_home=array.follows_elements)
                    and (live is None or _is_same(buffer, live.get(array.name)))
                    for buffer, array in zip(there, arrays)
                ):
                    state.update({array.name: buffer for buffer, array in zip(there, arrays)})
                    continue
                if value is not None and not is_same:
                    _check_shape(label, name, value, shape_of(start, param, whole))
                for place, array in enumerate(arrays):
                    state[array.name], source = None, there[place] if is_same else value
                    one = BufferRequest(state, start, param, group, array.dtype, whole, source, array.elements)
                    requests.setdefault(array.name, []).append(one)
                    if not is_same:
                        one.blocks, one.in_blocks = None if place else (storage, name), True
                continue
            if start.shape == "scalar":
                state[name] = _scalar(_start(start, group) if value is None else value, dtypes[name], live is not None)
                continue
            stays = value is not None and (live is None or _is_same(value, live.get(name)))
            if stays:
                is_like_param = start.shape == "param"
                if not is_like_param or value.shape != param.shape:
                    _check_shape(label, name, value, shape_of(start, param, whole))
                lies_well = _lies_well(value, param, home, is_like_param, is_at_home=is_like_param)
                stays = value.dtype is dtypes[name] and lies_well
            if stays:
                state[name] = value
            else:
                state[name], one = None, BufferRequest(state, start, param, group, dtypes[name], whole, value)
                requests.setdefault(name, []).append(one)
        others = {name: value for name, value in values.items() if name not in state}
        if others:
            own = self.own.difference([name for name, value in others.items() if not isinstance(value, torch.Tensor)])
            state.update({name: value for name, value in others.items() if name not in own})
        return state


def _by_value(state: Mapping[str, Any], formats: Mapping[str, Storage], param: torch.Tensor) -> Mapping[str, Any]:
    """A known state, of which what is in blocks of another format than asked for is given by its values."""
    by_value: dict[str, Any] | None = None
    for name in formats:
        has_scales = isinstance(state.get(name), torch.Tensor) and not state.keys().isdisjoint(scale_names(name))
        storage = kept_in_blocks(state, name) if has_scales else None
        if storage is None or storage.arrays(name) == formats[name].arrays(name):
            continue
        by_value = dict(state) if by_value is None else by_value
        by_value[name] = values_of(storage, state, name, shape=param.shape)
        for array in storage.arrays(name)[1:]:
            del by_value[array.name]
    return state if by_value is None else by_value


def starts_of(rule: Rule, names: Iterable[str], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, State]:
    """How each buffer of a parameter's state begins, the step count first, then a master."""
    kind = master_kind(dtype, group)
    masters = {} if kind is None else {kind.key: State("param" if kind.begins_as_parameter else 0.0)}
    return {"step": _STEP, **masters, **{name: rule.states[name] for name in names}}


@torch.no_grad()
def begin_again(state: dict[str, Any], rule: Rule, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Let a state that was made ahead begin with the values that its parameter and group have now."""
    # Only where the step count is 0, which a device decides for itself: a graph may have stepped without saying so.
    part = as_real(local_part(param))
    fresh = state["step"] == 0
    starts = starts_of(rule, [name for name in rule.state_names if name in state], param.dtype, group)
    for name, start in starts.items():
        if not isinstance(start.init, str):
            continue
        buffer = as_real(local_part(state[name]))
        blocks = kept_in_blocks(state, name)
        if blocks is not None:
            own = {array.name: local_part(state[array.name]) for array in blocks.arrays(name)}
            begun = {key: torch.empty_like(array) for key, array in own.items()}
            _fill_blocks(begun, blocks, name, start, part, group)
            for key, array in own.items():
                # By bits: nothing chooses between elements of eight bits of a floating point type.
                kind = torch.uint8 if array.dtype.itemsize == 1 else torch.int16
                array.view(kind).copy_(torch.where(fresh.to(array.device), begun[key].view(kind), array.view(kind)))
            continue
        if start.init == "param":
            value = part.detach().to(buffer.device, buffer.dtype)
        else:
            value = torch.full((), _start(start, group), dtype=buffer.dtype, device=buffer.device)
        buffer.copy_(torch.where(fresh.to(buffer.device), value, buffer))


def fill_buffers(requests: BufferRequests, home: StateMemory) -> None:
    """Make all missing buffers and let them begin."""
    # Name by name, so that those which a pass walks one after the other lie beside each other: a CPU's prefetcher runs
    # from one into the next, which is a quarter of the time for tensors of 8,192 elements.
    elementwise = [one for missing in requests.values() for one in missing if one.follows_elements]
    made = iter(
        home.make(
            [one.param if one.elements == 1 else one.like for one in elementwise], [one.dtype for one in elementwise]
        )
    )
    for name, missing in requests.items():
        zeros: list[torch.Tensor] = []
        for one in missing:
            one.state[name] = buffer = next(made) if one.follows_elements else _empty(one)
            if one.in_blocks and (one.source is not None or one.start.init != 0):
                continue
            if one.source is not None:
                buffer.copy_(one.source)
            elif one.start.init == 0:
                zeros.append(buffer)
            elif one.start.init == "param":
                buffer.copy_(one.param.detach())
            else:
                buffer.fill_(_start(one.start, one.group))
        zero_all(zeros)
    for one in [one for missing in requests.values() for one in missing]:
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


def _check_late(label: str, name: str, hyper: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise for a state that begins after its parameter's first step, which the rule allows only without a number."""
    steps = float(state.get("step") or 0.0)
    if steps > 0 and float(at_step(group[hyper], steps + 1, hyper)) != 0:
        raise StateError(
            f"the state {name!r} of {label} begins after {steps:.0f} steps, with {hyper}={group[hyper]}: set {hyper} "
            "to 0 for one step, or delete the parameter from the optimizer's `state` to begin anew"
        )


def shape_of(start: State, param: torch.Tensor, whole: torch.Size) -> tuple[int, ...]:
    """The shape of a state buffer."""
    if start.shape in SQUARES:
        side = whole[-2 if start.shape == "left" else -1]
        return (side, side)
    if start.shape == "row":
        return (*param.shape[:-1], 1)
    if start.shape == "column":
        return (*param.shape[:-2], 1, param.shape[-1])
    return tuple(param.shape)


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a saved state has seen a step, as far as it says."""
    if any([isinstance(value, torch.Tensor) and name != "step" for name, value in state.items()]):
        return True
    return float(state.get("step") or 0.0) > 0


def _check_shape(label: str, name: str, value: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(value.shape) != wanted:
        raise StateError(
            f"state {name!r} of {label} has shape {tuple(value.shape)}, it needs {wanted}: the parameter "
            "or this state was changed; change the other too, or delete the parameter from `state` to begin anew"
        )


def _lies_well(
    value: torch.Tensor, param: torch.Tensor, home: StateMemory, is_like_param: bool, *, is_at_home: bool
) -> bool:
    """Whether a buffer lies where and as kernels want it."""
    follows = value.stride() == param.stride() or not is_dense(param)
    lies_well = follows if is_like_param else value.is_contiguous()
    is_kept = value.device == param.device
    lives_well = home.keeps(value, param) if is_at_home and not home.is_beside else is_kept
    is_lazy = value.is_neg() or value.is_conj() or is_zero_tensor(value)
    return lives_well and lies_well and not is_lazy


def _empty(one: BufferRequest) -> torch.Tensor:
    """A new buffer of rows, columns, a matrix or numbers of blocks that is going to be written."""
    shape = shape_of(one.start, one.param, one.whole)
    if one.elements != 1:
        shape = shape_of_entries(one.param.shape, one.elements)
    return one.param.new_empty(shape, dtype=one.dtype, requires_grad=False)
