"""The state of a parameter: buffers and their formats, initialization, and which buffers a rebuilt plan keeps."""

from __future__ import annotations

import math
import numbers
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..compat import copy_all, is_zero_tensor, zero_all
from ..errors import StateError
from ..graph import Graph, flat_numbers, never_negative
from ..native.table import address_of
from ..placement import Share
from ..placement.local import as_real, local_part, sharded_dims
from ..rules import Rule, State
from ..rules.protocol import at_step
from ..runtime import grad_dtype, is_dense
from ..storage import (
    BLOCK,
    Array,
    Plain,
    Stochastic,
    Storage,
    block_names,
    codec_of,
    dtype_name,
    kept_in_blocks,
    lie_in_rows,
    rows_of,
    shape_of_entries,
    state_format,
    stored_in,
    values_of,
)
from ..timeline.side_stream import SideStream
from .masters import MASTER_KEYS, exact_values, master_kind, other_master
from .memory import StateMemory
from .parameters import Optimizer, iter_params, name_in, shares_of

StateDtype = torch.dtype | str | Mapping[str, Any] | Callable[[str], Any] | None  # type of `state_dtype`
SMALLEST = 4096  # elements from which `state_dtype` applies to a parameter: smaller parameters save little
SHORTEST = 32  # elements of a row from which it is worth its scales
_EMBEDDING = re.compile(r"emb|wte|wpe|vocab", re.IGNORECASE)


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter's update is computed in: float64 for float64, else float32."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def check_state_dtype(rule: Rule, choice: Any) -> None:
    """Raise for an invalid value of `state_dtype`."""
    if isinstance(choice, Mapping):
        possible = [name for name, state in rule.states.items() if state.shape == "param"]
        for name, kept in choice.items():
            if name not in possible:
                names = ", ".join(map(repr, possible)) or "none"
                raise ValueError(
                    f"Invalid state_dtype: {rule.name} has no state {name!r} shaped like its parameters; it has {names}"
                )
            state_format(kept)
    elif choice is not None and not callable(choice):
        state_format(choice)


def state_formats(
    param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, label: str, shape: Sequence[int]
) -> dict[str, Storage]:
    """Return the formats of a parameter's elementwise states, by name."""
    # A state has the dtype that its rule declares. Unless the group names the state, states that start as copies of
    # parameters and squares of embeddings' gradients are float32. So are states of parameters with fewer than
    # `SMALLEST` elements and, instead of blocks, rows shorter than `SHORTEST` and states that other code writes. A
    # function of the parameter's name overrides all of this.
    name, choice = name_in(label), group.get("state_dtype")
    exactly = callable(choice)
    if callable(choice):
        if not name:
            warnings.warn(
                "state_dtype is a function of names, but the parameters have none, so it gets '': pass "
                "model.named_parameters() to the optimizer",
                stacklevel=2,
            )
        choice = choice(name)
        check_state_dtype(rule, choice)
    is_named, is_small = isinstance(choice, Mapping), math.prod(shape) < SMALLEST
    default = Plain(param.dtype if master_kind(param.dtype, group) is None else torch.float32)
    formats: dict[str, Storage] = {}
    for state in graph.states:
        if state in graph.scalar_states or state in graph.matrix_states:
            continue
        start, declared = rule.states[state], graph.state_dtypes.get(state)
        kept = choice.get(state) if isinstance(choice, Mapping) else choice
        if kept is None or (declared is not None and not is_named) or state in graph.slice_states:
            formats[state] = default if declared is None else Plain(declared)
            continue
        is_square = state.endswith(("_sq", "_square", "_squared")) and _EMBEDDING.search(name) is not None
        if not exactly and (is_small or (not is_named and (start.init == "param" or is_square))):
            kept = "float32"
        signed = not _is_positive(state, rule, graph) if start.signed is None else start.signed
        chosen = state_format(kept, signed)
        if codec_of(chosen).has_blocks and state not in graph.outputs and start.init != "param":
            if is_named:
                raise StateError(
                    f"{label}: {graph.title} only reads the state {state!r}, and other code would write numbers over "
                    f"its codes: use {_NUMBERS} instead of {kept!r}"
                )
            chosen = Plain(torch.float32)
        elif codec_of(chosen).has_blocks:
            columns = rows_of(shape)[1]
            is_across = not all(lie_in_rows(shape, end) for end in graph.slice_ends)
            if is_across and exactly:
                raise StateError(
                    f"{label} of shape {tuple(shape)}: {graph.title} reduces over rows that blocks of {BLOCK} along "
                    f"{columns} elements cross: use {_NUMBERS} instead of {kept!r}"
                )
            if is_across or (columns < SHORTEST and not exactly):
                chosen = Plain(torch.float32)
            elif codec_of(chosen).is_packed and (not shape or shape[-1] % 2 or shape[-1] != columns):
                chosen = state_format("int8", signed)
        formats[state] = Plain(compute_dtype(param)) if chosen == Plain(torch.float32) else chosen
    owners = {array.name: state for state, kept in formats.items() for array in kept.arrays(state)}
    for name in sorted(owners.keys() & rule.states.keys()):
        if owners[name] != name:
            raise StateError(
                f"{label}: {rule.name} has a state {name!r}, and codes or scales of its state {owners[name]!r} are "
                f"stored under that name; rename one, or use {_NUMBERS}"
            )
    return formats


_NUMBERS = "'float32', 'bfloat16' or 'float16'"  # formats that store plain numbers, for messages
_positive: WeakKeyDictionary[Graph, dict[str, bool]] = WeakKeyDictionary()
"""Whether states have no negative elements: computed once per graph, not per parameter."""


def _is_positive(state: str, rule: Rule, graph: Graph) -> bool:
    """Whether a state has no negative elements, given the ranges of the hyperparameters."""
    answers = _positive.setdefault(graph, {})
    if state not in answers:
        bounds: dict[str, tuple[float, float]] = {}
        for place, entry in flat_numbers(rule.hyperparameters):
            key, _, index = place.partition(".")
            interval = rule.range_of(key, int(index or 0))
            bounds[place] = interval.low, interval.high
            if isinstance(entry, (int, float)) and 0 <= entry <= 1:
                # A range that the rule does not declare is inferred from the default; a value outside of it gives NaN.
                bounds[place] = max(interval.low, 0.0), min(interval.high, 1.0)
        init = rule.states[state].init
        least = bounds.get(init, (-math.inf,))[0] if isinstance(init, str) else init
        answers[state] = least >= 0 and never_negative(graph, state, bounds)
    return answers[state]


ROUNDINGS = ("nearest", "stochastic")  # valid values of `rounding`


def check_rounding(group: Mapping[str, Any]) -> None:
    """Raise for invalid values of `rounding` and `seed`."""
    rounding, seed = group.get("rounding", ROUNDINGS[0]), group.get("seed", 0)
    if rounding not in ROUNDINGS:
        raise ValueError(f"Invalid rounding: {rounding!r}; it must be 'nearest' or 'stochastic'")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"Invalid seed: {seed!r}; it must be an integer from 0 to 2**64 - 1, the same on all ranks")


def check_complex_states(label: str, formats: Mapping[str, Storage]) -> None:
    """Raise for states of a complex parameter in a format without a complex dtype in torch."""
    for name, storage in formats.items():
        if codec_of(storage).has_blocks or storage.precision is torch.bfloat16:
            raise StateError(
                f"{label} is complex: its state {name!r} can be kept as 'float32' or 'float16', not as {storage}; "
                "set state_dtype in a separate param group, or by a function of the name"
            )


def check_cut_blocks(label: str, param: torch.Tensor, formats: Mapping[str, Storage]) -> None:
    """Raise for a DTensor whose parts do not hold whole blocks."""
    blocks = next((str(storage) for storage in formats.values() if codec_of(storage).has_blocks), "")
    lead, columns = rows_of(param.shape)
    for dim, parts in sharded_dims(param).items() if blocks else ():
        remedy = f"shard it along dimension 0, since its rows of blocks span all dimensions from {len(lead)} on"
        if dim < len(lead):
            continue
        if dim == param.dim() - 1 == len(lead):
            size = -(-columns // (BLOCK * parts)) * BLOCK * parts
            if columns == size:
                continue
            remedy = f"make its last dimension {size}, a multiple of {BLOCK} for each of {parts} parts"
        raise StateError(
            f"{label} of shape {tuple(param.shape)} is sharded along dimension {dim}, which cuts blocks of {BLOCK} "
            f"elements ({blocks}): {remedy}, or keep its states as 'bfloat16'"
        )


def saved_choice(choice: Any) -> Any:
    """A group's `state_dtype` in a checkpoint: names of formats; None for a function."""
    if isinstance(choice, Mapping):
        return {state: saved_choice(kept) for state, kept in choice.items()}
    if callable(choice):
        return None
    return dtype_name(choice) if isinstance(choice, torch.dtype) else choice


SQUARES = ("left", "right")


def _squares(optimizer: Optimizer) -> dict[torch.Tensor, set[str]]:
    """The square matrices in the states of parameters that have states."""
    state, held = optimizer.state, {}
    for group in optimizer.param_groups:
        names = {name for name, start in optimizer.rule_of(group).states.items() if start.shape in SQUARES}
        held.update({param: names & state[param].keys() for param in group["params"] if names and param in state})
    return held


@contextmanager
def require_same_squares(optimizer: Optimizer) -> Iterator[None]:
    """A block that rebuilds the plan; raises if a parameter that has been stepped gets or loses a square matrix."""
    # The squares are bases that other states are expressed in; a basis of zeros would stop its parameter.
    before = _squares(optimizer)
    yield
    after = _squares(optimizer)
    for label, _, group, param in iter_params(optimizer) if before != after else ():
        rule, changed = optimizer.rule_of(group), before.get(param, set()) ^ after.get(param, set())
        if param in before and changed and float(optimizer.state[param]["step"]) > 0:
            names = [name for name in rule.states if name in changed]
            happens = "loses" if names[0] in before[param] else "gets"
            raise StateError(
                f"with these hyperparameters of {rule.name}, {label} {happens} the states {', '.join(names)} in the "
                "middle of training; restore the hyperparameters, or delete the parameter from `optimizer.state` to "
                "restart it"
            )


def _counting_tensors(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def changing(self: ParameterState, *args: Any, **kwargs: Any) -> Any:
        # eval() and train() add and remove the training weights; no kernel reads them there.
        before = {key: value for key, value in self.items() if isinstance(value, torch.Tensor) and key != TRAINING}
        result = original(self, *args, **kwargs)
        if self.count is not None and (
            any([self.get(key) is not value for key, value in before.items()])
            or any([isinstance(self[key], torch.Tensor) for key in self.keys() - before.keys() - {TRAINING}])
        ):
            self.count.changes += 1
        return result

    return changing


class ParameterState(dict[str, Any]):
    """A parameter's state, which counts replaced and removed tensors: kernels hold the old addresses."""

    count: Any = None  # shared with the `WatchedState`
    is_ahead = False  # whether it was created before its first step, which initializes it again with that step's values

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def _counting_entries(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def changing(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self.count.changes += 1
        return original(self, *args, **kwargs)

    return changing


class WatchedState(defaultdict[Any, Any]):
    """torch's `defaultdict(dict)` of states, with a count of changes, so that entries need not be compared."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Entries share the count instead of a reference to this dict, so that their memory is freed immediately.
        self.count = SimpleNamespace(changes=0)  # how often an entry, or a tensor inside an entry, was set or removed

    def entry(self, values: Mapping[str, Any], *, is_ahead: bool = False) -> ParameterState:
        """Return a parameter's state whose changes are counted here too."""
        made = ParameterState(values)
        made.count, made.is_ahead = self.count, is_ahead
        return made

    def adopt(self, states: Mapping[Any, Any], ahead: Container[Any]) -> None:
        """Take over the states of parameters; parameters in `ahead` initialize theirs at their first step."""
        entries = {
            key: self.entry(values, is_ahead=key in ahead) if isinstance(key, torch.Tensor) else values
            for key, values in states.items()
        }
        self.update(entries)

    def __missing__(self, key: Any) -> Any:
        self.count.changes += 1
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(ParameterState, _name, _counting_tensors(_name))
    setattr(WatchedState, _name, _counting_entries(_name))


TRAINING = "training_param"  # state key of the training weights while the parameter holds the weights to evaluate


@dataclass
class BufferRequest:
    """A buffer of a parameter's state to allocate."""

    state: dict[str, Any]  # the parameter's state
    array: Array  # name, dtype, and number of neighbours packed into an entry
    start: State  # initialization of the buffer
    share: Share  # the parameter's share
    source: torch.Tensor | None = None  # the buffer to copy values from, if an existing buffer cannot be used
    blocks: tuple[Storage, str] | None = None  # format and name of the blockwise state that the buffer is part of


_STEP = State(0.0, shape="scalar")


def storages(
    param: torch.Tensor,
    group: Mapping[str, Any],
    graph: Graph,
    rule: Rule,
    dtype: torch.dtype | None = None,
    label: str = "",
    shape: Sequence[int] | None = None,
) -> dict[str, Storage]:
    """Return the storage of the parameter, its gradient and each elementwise state, in buffer order."""
    kind = master_kind(param.dtype, group)
    states = state_formats(param, group, graph, rule, label, param.shape if shape is None else shape)
    formats: dict[str, Storage] = {"param": Plain(param.dtype), "grad": Plain(dtype or grad_dtype(param)), **states}
    for name in ("param", *states) if group.get("rounding", ROUNDINGS[0]) != ROUNDINGS[0] else ():
        storage: Any = formats[name]
        if codec_of(storage).has_blocks or storage.precision in (torch.bfloat16, torch.float16):
            # Row and column states are small: they are not rounded stochastically.
            formats[name] = Plain(torch.float32) if name in graph.slice_states else Stochastic(storage)
    if kind is not None:
        formats["param"] = kind(param.dtype)
    return formats


class StateTemplate:
    """How the states of a kind of parameter are initialized; made once per kind."""

    def __init__(
        self, param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, formats: Mapping[str, Storage]
    ) -> None:
        self.kind = master_kind(param.dtype, group)
        self.starts = starts_of(rule, graph.states, param.dtype, group)
        self.formats = formats
        masters = {} if self.kind is None else {self.kind.key: self.kind.buffer_dtype}
        numbers = {*graph.matrix_states, *graph.scalar_states}
        dtypes = {name: graph.state_dtypes.get(name, compute_dtype(param)) for name in numbers}
        self.arrays = {name: formats[name].arrays(name) for name in graph.states if name not in numbers}
        for name, dtype in {"step": torch.float32, **masters, **dtypes}.items():
            self.arrays[name] = (Array(name, dtype),)
        self.block_names = set(chain.from_iterable(map(block_names, formats)))
        """Names of arrays of blockwise states, in any format."""
        self.buffer_names = {*MASTER_KEYS, *rule.state_names, *chain.from_iterable(map(block_names, rule.state_names))}
        """Names of state buffers; leftover tensors under these names are dropped."""
        self.names = rule.state_names
        self.buffers = self.buffer_names - numbers  # buffers in the layout of the parameter

    def create(
        self,
        share: Share,
        values: Mapping[str, Any],
        requests: list[BufferRequest],
        memory: StateMemory,
        live: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return a parameter's state: buffers that kernels can use are kept, missing buffers are requested."""
        label, param, group, full_shape, kind = share.label, share.local, share.group, share.holder.shape, self.kind
        other = None if kind is None else other_master(kind, values)
        if kind is not None and other is not None:
            values = {**values, kind.key: kind.buffer_of(param, other.values(param, values[other.key]))}
        if not self.block_names.isdisjoint(values):
            values = _by_value(values, self.formats, param)
        state: dict[str, Any] = {}
        for name, start in self.starts.items():
            value: Any = values.get(name)
            arrays = self.arrays[name]
            stored: list[Any] = [values.get(array.name) for array in arrays]
            for each in stored if stored[0] is value else (value, *stored):
                _check_value(label, name, each, start, share.holder)
            if value is None and stored[0] is None and start.zero_if_late is not None:
                _check_late(label, name, start.zero_if_late, group, values)
            if start.shape == "scalar":
                state[name] = _scalar(_start(start, group) if value is None else value, arrays[0].dtype)
                if live is not None:
                    requests.append(BufferRequest(state, arrays[0], start, share, state[name]))
                continue
            is_like_param = start.shape == "param"
            # Numbers under the name of a blockwise state were set by other code, and replace its codes.
            fits = (value is None or value is stored[0]) and all(
                buffer is not None
                and buffer.dtype is array.dtype
                and (
                    buffer.shape == shape_of_entries(param.shape, array.elements)
                    if array.elements > 1
                    else not is_like_param or buffer.shape == param.shape
                )
                for buffer, array in zip(stored, arrays)
            )
            if value is not None and not (fits and is_like_param):
                check_shape(label, name, value, shape_of(start, param, full_shape), "", _RESHAPED)
            if fits and all(
                (live is None or _is_same(buffer, live.get(array.name)))
                and _is_usable(buffer, array, param, memory, is_like_param=is_like_param)
                for buffer, array in zip(stored, arrays)
            ):
                state.update({array.name: buffer for buffer, array in zip(stored, arrays)})
                continue
            if live is not None and not fits and value is None and name not in MASTER_KEYS and _has_stepped(values):
                raise StateError(
                    f"the checkpoint has no state {name!r} for {label}: it was saved by another optimizer, or with "
                    "other hyperparameters"
                )
            if not fits and value is None and len(arrays) > 1 and any(one is not None for one in stored):
                raise StateError(
                    f"{' and '.join(repr(array.name) for array in arrays)} of {label} do not fit each other or the "
                    "parameter: replace them together, or remove them all to reinitialize the state"
                )
            blocks = None if fits or len(arrays) == 1 else (self.formats[name], name)
            for buffer, array in zip(stored if fits else [value] * len(arrays), arrays):
                state[array.name] = None
                requests.append(BufferRequest(state, array, start, share, buffer, blocks))
        others = {name: value for name, value in values.items() if name not in state}
        if others:
            own = self.buffer_names.difference(
                [name for name, value in others.items() if not isinstance(value, torch.Tensor)]
            )
            state.update({name: value for name, value in others.items() if name not in own})
        return state


def _by_value(state: Mapping[str, Any], formats: Mapping[str, Storage], param: torch.Tensor) -> Mapping[str, Any]:
    """Return a state with its states in blocks of another format decoded."""
    by_value = dict(state)
    for name, expected in formats.items():
        storage = kept_in_blocks(state, name) if state.get(name) is None else None
        if storage is not None and storage.arrays(name) != expected.arrays(name):
            by_value[name] = values_of(storage, state, name, shape=param.shape)
            for array in storage.arrays(name):
                del by_value[array.name]
    return by_value


def starts_of(rule: Rule, names: Iterable[str], dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, State]:
    """Return the initialization of a parameter's state buffers: step count, master, then the rule's states."""
    kind = master_kind(dtype, group)
    masters = {} if kind is None else {kind.key: State("param" if kind.begins_as_parameter else 0.0)}
    return {"step": _STEP, **masters, **{name: rule.states[name] for name in names}}


@torch.no_grad()
def initialize(
    optimizer: Optimizer,
    shares: Iterable[Share] | None = None,
    states: Mapping[torch.Tensor, Any] | None = None,
    *,
    again: bool = False,
) -> None:
    """Write the initial values of states, from the current parameters and groups.

    Applies to states that were created ahead of their first step; with `again`, to all states except masters,
    and to step counts. A step passes `states`, because `optimizer.state` would wait for running updates.
    """
    states = optimizer.state if states is None else states
    zeros: list[torch.Tensor] = []
    for share in shares_of(optimizer) if shares is None else shares:
        state, param, rule = states.get(share.param), share.holder, optimizer.rule_of(share.group)
        if not (isinstance(state, ParameterState) and (again or state.is_ahead)):
            continue
        kept = {name: kept_in_blocks(state, name) for name in rule.state_names}
        names = [name for name, storage in kept.items() if storage is not None or name in state]
        part = as_real(local_part(param))
        masters = {name: local_part(state[name]) for name in MASTER_KEYS & state.keys()} if again else {}
        for name, start in starts_of(rule, names, param.dtype, share.group).items():
            storage = kept.get(name)
            if again and name in MASTER_KEYS:
                continue
            if again and start.init == 0:
                keys = [name] if storage is None else [array.name for array in storage.arrays(name)]
                zeros += [local_part(state[key]) for key in keys]
            elif again or isinstance(start.init, str):
                # The device decides: a graph may have stepped without the host's knowledge.
                fresh = None if again else state["step"] == 0
                source = exact_values(part, masters) if masters and start.init == "param" else None
                _write(state, name, start, part, share.group, storage, fresh, source)
    zero_all(zeros)


def _write(
    state: Mapping[str, torch.Tensor],
    name: str,
    start: State,
    param: torch.Tensor,
    group: Mapping[str, Any],
    storage: Storage | None,
    fresh: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> None:
    """Write a state's initial values, or `source`, into its buffers; where `fresh` is false the old values stay."""
    if source is None:
        # A fake tensor if the parameter is fake.
        own = param.detach()
        source = own if start.init == "param" else own.new_full((), _start(start, group), dtype=torch.float64)
    names = [name] if storage is None else [array.name for array in storage.arrays(name)]
    buffers = {key: as_real(local_part(state[key])) for key in names}
    if storage is not None:
        begun = buffers if fresh is None else {key: torch.empty_like(buffer) for key, buffer in buffers.items()}
        stored_in(storage, begun, name, source.to(begun[names[0]].device), shape=param.shape)
    elif fresh is None:
        buffers[name].copy_(source)
    else:
        begun = {name: source.to(buffers[name].device, buffers[name].dtype)}
    if fresh is None:
        return
    for key, buffer in buffers.items():
        # torch.where does not support float8.
        bits = buffer.view(torch.uint8 if buffer.dtype.itemsize == 1 else buffer.dtype)
        bits.copy_(torch.where(fresh.to(bits.device), begun[key].view(bits.dtype), bits))


def fill_buffers(requests: Sequence[BufferRequest], memory: StateMemory, arrivals: ExitStack) -> None:
    """Allocate all requested buffers and write their initial values; `arrivals` waits for values on the host."""
    # Allocate name by name, so that buffers that a pass reads in sequence are adjacent in memory: a CPU's prefetcher
    # continues from one into the next, which saves a quarter of the time for tensors of 8,192 elements.
    by_name: dict[str, list[BufferRequest]] = {}
    copied: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    numbers: dict[tuple[Any, ...], list[BufferRequest]] = {}
    for one in requests:
        if one.start.shape == "scalar" and one.source is not None:
            # Separately by the source's dtype: a stack of several dtypes is promoted, int64 with float16 to float16.
            numbers.setdefault((one.source.device, one.source.dtype, one.array.dtype), []).append(one)
        else:
            by_name.setdefault(one.array.name, []).append(one)
    # One copy for all tensors of a dtype: a copy per tensor would be a launch each.
    for (*_, dtype), own in numbers.items():
        together = torch.stack([one.source for one in own if one.source is not None]).detach().to(dtype)
        for one, number in zip(own, together.unbind()):
            one.state[one.array.name] = number
    requests = list(chain.from_iterable(by_name.values()))
    # The optimizer's memory holds elementwise buffers; rows, columns and scales are on the parameter's device.
    in_memory = [one.start.shape == "param" and one.array.follows_elements for one in requests]
    elementwise = list(compress(requests, in_memory))
    likes = [one.share.local if one.array.elements == 1 else _packed(one) for one in elementwise]
    made = iter(memory.make(likes, [one.array.dtype for one in elementwise]))
    zeros: list[torch.Tensor] = []
    from_host = defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]](list)
    rest: list[BufferRequest] = []
    for one, is_in_memory in zip(requests, in_memory):
        if is_in_memory:
            buffer = next(made)
        else:
            param = one.share.local
            shape = shape_of(one.start, param, one.share.holder.shape, one.array.elements)
            buffer = param.new_empty(shape, dtype=one.array.dtype, requires_grad=False)
        one.state[one.array.name] = buffer
        if one.source is None and one.start.init == 0:
            zeros.append(buffer)
        elif one.source is not None and one.blocks is None:
            if one.source.device == buffer.device and one.source.dtype is buffer.dtype and buffer.element_size() > 1:
                copied.setdefault((buffer.device, buffer.dtype), []).append((buffer, one.source))
            elif one.source.is_cpu and not buffer.is_cpu:
                from_host[buffer.device].append((buffer, one.source))
            else:
                buffer.copy_(one.source)
        else:
            rest.append(one)
    zero_all(zeros)
    for pairs in copied.values():
        copy_all([buffer for buffer, _ in pairs], [source for _, source in pairs])
    for one in rest:
        storage, state = one.blocks or (None, one.array.name)
        if storage is None or one.array.name == storage.arrays(state)[0].name:
            _write(one.state, state, one.start, one.share.local, one.share.group, storage, source=one.source)
    for device, pairs in from_host.items():
        # The tables of the plan do not queue behind them.
        line = SideStream(device)
        arrivals.callback(line.synchronize)
        with line.after():
            line.copy(pairs)


def _scalar(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        # The segment's array sets its device, and also its dtype unless it was loaded.
        return value.reshape(()) if value.dim() else value
    return torch.tensor(float(value), dtype=dtype, device="cpu")


def _is_same(value: torch.Tensor, live: Any) -> bool:
    """Whether a checkpoint's buffer is the optimizer's current buffer, as after an in-place `dcp.load`."""
    return isinstance(live, torch.Tensor) and address_of(value) == address_of(live) and value.dtype is live.dtype


def _start(start: State, group: Mapping[str, Any]) -> float:
    return float(at_step(group[start.init], 1.0, start.init) if isinstance(start.init, str) else start.init)


def _check_value(label: str, name: str, value: Any, start: State, param: torch.Tensor) -> None:
    """Raise for a value that no state buffer can hold."""
    is_number = start.shape == "scalar"
    value = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if value is None or (is_number and isinstance(value, numbers.Real)):
        return
    if not isinstance(value, torch.Tensor):
        raise StateError(f"state {name!r} of {label} is a {type(value).__name__}; it must be a tensor")
    if value.layout is not torch.strided or (value.is_complex() and not param.is_complex()):
        kind = value.layout if value.layout is not torch.strided else value.dtype
        raise StateError(f"state {name!r} of {label} is {kind}; the parameter is dense and {param.dtype}")
    if is_number and value.numel() != 1:
        raise StateError(f"state {name!r} of {label} has shape {tuple(value.shape)}; it must have one element")


def _check_late(label: str, name: str, hyper: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise for a state that starts after its parameter's first step, unless the rule's hyperparameter for it is 0."""
    steps = float(state.get("step") or 0.0)
    if steps > 0 and float(at_step(group[hyper], steps + 1, hyper)) != 0:
        raise StateError(
            f"the state {name!r} of {label} begins after {steps:.0f} steps, with {hyper}={group[hyper]}: set {hyper} "
            "to 0 for one step, or delete the parameter from `optimizer.state` to restart it"
        )


def _packed(one: BufferRequest) -> torch.Tensor:
    """A tensor with the shape and strides of a buffer that packs neighbours."""
    shape = shape_of_entries(one.share.local.shape, one.array.elements)
    return one.share.local.detach().as_strided(shape, torch.empty(shape, device="meta").stride())


def shape_of(start: State, param: torch.Tensor, full_shape: torch.Size, elements: int = 1) -> tuple[int, ...]:
    """Return the shape of a state buffer, `elements` neighbours per entry; `full_shape` is the shape over all ranks."""
    if start.shape in SQUARES:
        side = full_shape[-2 if start.shape == "left" else -1]
        return (side, side)
    if start.shape == "row":
        return (*param.shape[:-1], 1)
    if start.shape == "column":
        return (*param.shape[:-2], 1, param.shape[-1])
    return shape_of_entries(param.shape, elements)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a saved state shows that a step was taken."""
    has_buffers = any([isinstance(value, torch.Tensor) and name != "step" for name, value in state.items()])
    return has_buffers or float(state.get("step") or 0.0) > 0


def check_shape(label: str, name: str, value: torch.Tensor, expected: tuple[int, ...], at: str, why: str = "") -> None:
    """Raise for a state of the wrong shape."""
    if tuple(value.shape) != expected:
        raise StateError(f"state {name!r} of {label} has shape {tuple(value.shape)}{at}, it needs {expected}{why}")


_RESHAPED = ": the parameter or this state was changed; change both, or delete the parameter from `optimizer.state`"


def _is_usable(
    buffer: torch.Tensor, array: Array, param: torch.Tensor, memory: StateMemory, *, is_like_param: bool
) -> bool:
    """Whether kernels can use a buffer: device and layout fit, and its values are materialized."""
    if is_like_param and array.elements == 1:
        layout_ok = buffer.stride() == param.stride() or not is_dense(param)
    else:
        layout_ok = buffer.is_contiguous()
    is_in_memory = is_like_param and array.follows_elements
    device_ok = memory.contains(buffer, param) if is_in_memory else buffer.device == param.device
    is_lazy = buffer.is_neg() or buffer.is_conj() or is_zero_tensor(buffer)
    return device_ok and layout_ok and not is_lazy
