"""What cannot be sharded is refused on all ranks at once; hyperparameters are the same on all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ...combinations import kind_of, refuse, split_kind, wrappers_around
from ...graph import Graph, ancestors
from ...optimizer import Optimizer
from ...optimizer.build import graph_of
from ...optimizer.groups import GROUP_OPTIONS, about_group, deciding_keys
from ...placement import is_distributed
from .buckets import Options, loses_bits, memory_order
from .ranks import Ranks

Result = TypeVar("Result")

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models that have a sharded optimizer


def validate_locally(optimizer: Optimizer, model: nn.Module, options: Options) -> dict[Any, str]:
    """What a rank can see by itself."""
    options.check()
    for index, group in enumerate(optimizer.param_groups):
        about_group(index, partial(options.check_group, group))
        if any(loses_bits(param.dtype, options.sync_dtypes(group)[1]) for param in group["params"]):
            refuse("shard with narrower parameters", optimizer.attached)
    for name, module in model.named_modules():
        refuse("shard", [kind_of(module)], f"module {name!r}" if name else "the model")
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    if not groups:
        raise ValueError("the optimizer has no parameters to shard")
    for wrapper in wrappers_around(lambda param: param in groups):
        refuse("shard", [kind_of(wrapper)], "what the model is wrapped in")
    for param, index in groups.items():
        refuse("shard", [split_kind(param)], "what parameters of the optimizer are wrapped in")
        if param not in names:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} in group {index} is not one of the model's")
        if is_distributed(param):
            raise ValueError(f"{names[param]} is a DTensor already: shard() takes plain parameters")
        if param.is_meta:
            raise ValueError(f"{names[param]} is on the meta device: give it memory and values first")
    devices = {param.device: names[param] for param in groups}
    if len(devices) > 1:
        described = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"shard() takes parameters on one device for each rank, not {described}")
    return {param: name for param, name in names.items() if param in groups}


def attempt_together(
    ranks: Ranks, attempt: Callable[[], Result], failure: str = "be sharded", raises: type[Exception] = ValueError
) -> Result:
    """What an attempt gives on this rank if it succeeds on all of them: else they all raise."""
    error: Exception | None = None
    try:
        result = attempt()
    except Exception as own:
        error = own
    errors = ranks.everyone("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text:
            raise raises(f"rank {rank} cannot {failure}: {text}")
    return result


def validate_across_ranks(
    optimizer: Optimizer, model: nn.Module, ranks: Ranks, options: Options, also: Callable[[], Iterable[str]] = tuple
) -> dict[Any, str]:
    """`validate_locally`, with its errors raised on every rank; and the first thing in which ranks differ."""

    def described() -> tuple[dict[Any, str], list[str]]:
        names = validate_locally(optimizer, model, options)
        return names, [*_described(optimizer, model, names, ranks, options), *also()]

    names, lines = attempt_together(ranks, described)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.everyone(digest))) > 1:
        raise ValueError(first_difference(ranks.everyone(lines)))
    return names


def first_difference(lines_of: Sequence[Sequence[str]]) -> str:
    """What two ranks have different, of lines that each rank has."""
    for lines in itertools.zip_longest(*lines_of, fillvalue="nothing more"):
        other = next((rank for rank, line in enumerate(lines) if line != lines[0]), None)
        if other is not None:
            return (
                f"ranks disagree, and would wait for each other forever: rank 0 has {lines[0]}; rank {other} has "
                f"{lines[other]}"
            )
    return "ranks disagree"


def _described(
    optimizer: Optimizer, model: nn.Module, names: dict[Any, str], ranks: Ranks, options: Options
) -> Iterator[str]:
    """What must be the same everywhere, a line each."""
    yield f"{ranks.size} ranks that split the state and {ranks.copies} copies"
    for name, value in vars(options).items():
        yield f"{name}={value}"
    yield f"{optimizer.control.policy}"
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for param, name in names.items():
        trains = "trains" if param.requires_grad else "frozen"
        yield (
            f"parameter {name} {tuple(param.shape)} {param.dtype} on {param.device.type} in group {groups[param]}, "
            f"{trains}, in memory by dimensions {memory_order(param)}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor not in names:
            described = f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            yield f"beside the optimizer's parameters {described}"
    for index, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        yield f"group {index} rule={rule.name}"
        for key in sorted({*group, *GROUP_OPTIONS}, key=str):
            if key not in ("params", "param_names", "rule"):
                yield f"group {index} {key}={plain_value(group.get(key, GROUP_OPTIONS.get(key)))}"
        shapes = dict.fromkeys(param.shape for param in group["params"])
        for graph in {id(graph): graph for graph in (graph_of(rule, group, shape) for shape in shapes)}.values():
            yield from (f"in group {index} rule {rule.name} with {step}" for step in _steps(graph))


def _steps(graph: Graph) -> Iterator[str]:
    """What a rule computes: rules of one name, and functions of the step, may differ in numbers inside of them."""
    places: dict[int, int] = {}
    for value in (*graph.values(), *ancestors(guard.condition for guard in graph.guards)):
        if id(value) in places:
            continue
        places[id(value)] = len(places)
        operands = [f"[{places[id(operand)]}]" for operand in value.args]
        if value.attribute is not None:
            operands.append(repr(value.attribute))
        over = "" if value.over is None else f" over {value.over}"
        yield f"[{places[id(value)]}] = {value.operation}({', '.join(operands)}){over}"
    yield ", ".join(f"new {name} [{places[id(value)]}]" for name, value in graph.outputs.items())


def plain_value(value: Any) -> str:
    """A hyperparameter as text that is the same in every process."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(plain_value, value))})"
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if callable(value) and not dataclasses.is_dataclass(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def apart_from_others(ranks: Ranks, model: nn.Module) -> Ranks:
    """The ranks, over groups of their own if another optimizer is sharded that has parameters of the same modules."""
    # One backward completes buckets of both, which may come in other orders on other ranks.
    modules = set(model.modules())
    is_first = _models.isdisjoint(modules)
    _models.update(modules)
    return ranks if is_first else ranks.apart()


_BITS = 11  # of each part of a digest: as float32 numbers, sums of thousands of them are exact
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class _Received(NamedTuple):
    """The sums of all ranks' digests, which may be on their way to the host."""

    expected: list[float]
    values: torch.Tensor
    event: torch.cuda.Event | None


class HyperparameterDigest:
    """Finds out whether ranks step with other hyperparameters than each other: a scheduler may run on one alone."""

    # Each rank adds the parts of its digest to numbers that are summed over the ranks for every step. If no rank
    # differs the sums are the rank's own parts times the number of ranks; if one does, no rank finds them so. On a CPU
    # that is known before the step. The host of a GPU does not wait for it: it is known before the next step, but for
    # what makes ranks send other messages, a clip that one of them does not have, for which it waits when that changes.

    PARTS = 3

    def __init__(self, optimizer: Callable[[], Optimizer | None], ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._values: Any = None
        self._parts = [0.0] * self.PARTS
        self._written: list[float] = []
        self._expected: list[float] = []
        self._received: deque[_Received] = deque()
        self._unclipped: Any = None
        self._keys: dict[Any, tuple[str, ...]] = {}

    def reset(self) -> None:
        """The numbers that are summed are others, and have no digest yet."""
        self._written = []

    def write(self, parts: torch.Tensor) -> None:
        """Put this rank's digest into numbers that are going to be summed; the last ones stay there."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        values: list[Any] = []
        for group in optimizer.param_groups:
            name = group.get("rule")
            keys = self._keys.get(name)
            if keys is None:
                keys = self._keys[name] = deciding_keys(optimizer.rule_of(group))
            # One by one: a list in which one was replaced is the same list.
            given = map(group.get, keys)
            values.append([one for value in given for one in (value if isinstance(value, (tuple, list)) else (value,))])
            if not _TENSORS.isdisjoint(map(type, values[-1])):
                # One that has been written to is the same tensor.
                self._values = None
        if values != self._values:
            self._values = values
            digest = zlib.crc32(repr(list(_described_value(optimizer))).encode())
            self._parts = [float(digest >> place & (1 << _BITS) - 1) for place in range(0, 32, _BITS)]
        if self._parts != self._written:
            self._written = self._parts
            self._expected = [part * self._ranks.count for part in self._parts]
            for part, value in zip(parts.unbind(), self._parts):
                part.fill_(value)

    def receive(self, sums: torch.Tensor) -> None:
        """Have the sums come to the host."""
        if not sums.is_cuda:
            self._received.append(_Received(self._expected, sums.clone(), None))
            return
        values = torch.empty(self.PARTS, dtype=torch.float32, device="cpu", pin_memory=True)
        values.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._received.append(_Received(self._expected, values, event))

    def check(self) -> None:
        """Raise on all ranks if they differ; before a step."""
        if not self._received:
            return
        waits = self._received[-1].event is None
        if not waits:
            optimizer = self._optimizer()
            unclipped = [group.get("max_grad_norm") is None for group in optimizer.param_groups] if optimizer else None
            waits, self._unclipped = unclipped != self._unclipped, unclipped
        while self._received and (waits or len(self._received) > 1):
            expected, values, event = self._received.popleft()
            if event is not None:
                event.synchronize()
            if values.tolist() != expected:
                self._received.clear()
                raise ValueError(self._difference(known_now=event is None))

    def _difference(self, *, known_now: bool) -> str:
        optimizer = self._optimizer()
        assert optimizer is not None
        lines = list(_described_value(optimizer))
        if known_now:
            return f"{first_difference(self._ranks.everyone(lines))}; nothing was updated"
        return (
            "ranks step with other hyperparameters than each other, for a step or two by now: a scheduler, or a clip, "
            f"that one rank alone has changed; rank {self._ranks.rank} has {', '.join(lines)}"
        )


def _described_value(optimizer: Optimizer) -> Iterator[str]:
    """Everything that decides what a step makes of the same gradients, in words."""
    for index, group in enumerate(optimizer.param_groups):
        for key in deciding_keys(optimizer.rule_of(group)):
            yield f"group {index} {key}={_as_text(group.get(key, GROUP_OPTIONS.get(key)))}"


def _as_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_as_text, value))})"
    # What only a device knows would have to be waited for.
    return "a number on the device" if isinstance(value, torch.Tensor) and value.is_cuda else plain_value(value)
