"""The ranks that share an optimizer, and what all of them must agree on."""

from __future__ import annotations

import hashlib
import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...graph import Graph, ancestors
from ...native.table import survey
from ...optimizer import Optimizer
from ...optimizer.build import graphs_of
from ...optimizer.groups import GROUP_OPTIONS, about_group, deciding_keys, described_numbers, plain_value
from ...optimizer.parameters import iter_params
from ...placement import Ranks, Received, is_distributed, message_length
from ...placement.combinations import kind_of, refuse, split_kind, wrappers_around
from ...timeline.side_stream import SideStream
from .buckets import Options, loses_bits, memory_order

_sharded = itertools.count()  # the sharded optimizers of this process


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh, for another sharded optimizer; all of them must ask."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    shard, replicate = (dist.group.WORLD, None) if mesh is None else _groups_of(mesh)
    ranks = Ranks(shard, replicate)
    ranks.name = ranks.gather_objects((dist.get_rank(), next(_sharded)))[0]
    return ranks


def _groups_of(mesh: Any) -> tuple[Any, Any]:
    """The group of a mesh that splits the state, and the one that replicates it, if there is one."""
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return mesh.get_group(), None
    names = mesh.mesh_dim_names or ()
    bare = [name.removeprefix("dp_") for name in names]
    # Without names the second splits.
    sides = [dim for dim, name in enumerate(bare) if name.startswith("shard")]
    sides += [1 - dim for dim, name in enumerate(bare) if name.startswith("replicate")]
    if names and not sides:
        raise ValueError(
            f"which dimension of a mesh {tuple(names)} splits the state and which replicates it? Call them 'shard' and "
            "'replicate'"
        )
    shard = sides[0] if sides else 1
    return mesh.get_group(shard), mesh.get_group(1 - shard)


Result = TypeVar("Result")

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models that have a sharded optimizer


def validate_locally(optimizer: Optimizer, model: nn.Module, options: Options) -> dict[Any, str]:
    """What a rank can see by itself."""
    options.check()
    for index, group in enumerate(optimizer.param_groups):
        about_group(index, options.check_group, group)
        if any(loses_bits(param.dtype, options.sync_dtypes(group)[1]) for param in group["params"]):
            refuse("shard with narrower parameters", optimizer.attached)
    for name, module in model.named_modules():
        refuse("shard", [kind_of(module)], f"module {name!r}" if name else "the model")
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    groups = {param: index for _, index, _, param in iter_params(optimizer)}
    if not groups:
        raise ValueError("the optimizer has no parameters to shard")
    for wrapper in wrappers_around(lambda param: param in groups):
        refuse("shard", [kind_of(wrapper)], "the model's wrapper")
    for param, index in groups.items():
        refuse("shard", [split_kind(param)], "the wrapper of the optimizer's parameters")
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
    errors = ranks.gather_objects("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text:
            raise raises(f"rank {rank} cannot {failure}: {text}")
    return result


def validate_across_ranks(
    optimizer: Optimizer, model: nn.Module, ranks: Ranks, options: Options, also: Iterable[str] = ()
) -> dict[Any, str]:
    """`validate_locally`, with its errors raised on every rank; and the first thing in which ranks differ."""

    def described() -> tuple[dict[Any, str], list[str]]:
        names = validate_locally(optimizer, model, options)
        return names, [*_described(optimizer, model, names, ranks, options), *also]

    names, lines = attempt_together(ranks, described)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.gather_objects(digest))) > 1:
        raise ValueError(first_difference(ranks.gather_objects(lines)))
    return names


def first_difference(lines_of: Sequence[Sequence[str]]) -> str:
    """The first line in which two ranks differ."""
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
    """What must be the same on all ranks, one line for each."""
    yield f"{ranks.size} ranks that split the state and {ranks.copies} copies"
    for name, value in vars(options).items():
        yield f"{name}={value}"
    for name, value in vars(optimizer.control.policy).items():
        yield f"{name}={value}"
    groups = {param: index for _, index, _, param in iter_params(optimizer)}
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
        for graph in graphs_of(optimizer, index):
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


def apart_from_others(ranks: Ranks, model: nn.Module) -> Ranks:
    """The ranks, over groups of their own if another optimizer is sharded that has parameters of the same modules."""
    # One backward completes buckets of both, which may come in other orders on other ranks.
    modules = set(model.modules())
    is_first = _models.isdisjoint(modules)
    _models.update(modules)
    return ranks if is_first else ranks.apart()


_BITS = 11  # of each part of a digest: as float32 numbers, sums of thousands of them are exact
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class StepMessage:
    """What ranks tell each other at a step: what must be the same on all of them, and whose gradients each has had."""

    # Each rank adds the parts of its digest to numbers that are summed over the ranks for every step. If no rank
    # differs the sums are the rank's own parts times the number of ranks; if one does, no rank finds them so. On a CPU
    # that is known before the step. The host of a GPU does not wait for it: it is known before the next step, but for
    # what makes ranks send other messages, a clip that one of them does not have or a parameter that one of them has
    # frozen, for which it waits when that changes.

    PARTS = 3

    def __init__(self, optimizer: Callable[[], Optimizer | None], ranks: Ranks, first: str) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._first = first  # the name of the optimizer's first parameter
        self._values: Any = None
        self._received: deque[Received] = deque()
        self.trains = self._trained = b""  # which parameters train
        self._shape: Any = None  # what decides which messages a step sends
        self._keys: dict[Any, tuple[str, ...]] = {}
        self.is_due = False  # whether there was a round since other ranks were last told

    def reset(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        """Tell other ranks of these parameters from now on."""
        size = message_length(self.PARTS + len(params))
        self.sums = torch.zeros(size, dtype=torch.float32, device=device)
        self._sent = self.sums.clone()
        self._used, self._values = bytes(len(params)), None
        self._expected: list[float] = []
        self.trains = survey(list(params)).trains

    def send(self, used: bytearray, channel: SideStream, *, captures: bool) -> None:
        """Tell the other ranks, once for each step."""
        # After the sums, which a rank without a backward joins at its step. Not in backward, where nothing runs in
        # order: another optimizer's may come first on another rank.
        self.is_due = False
        with channel.after_compute(self.sums, self._sent):
            if used != self._used:
                self._used = bytes(used)
                source = torch.tensor(list(self._used), dtype=torch.float32, device="cpu")
                if self.sums.is_cuda:
                    source = source.pin_memory()
                self._sent[self.PARTS : self.PARTS + len(source)].copy_(source, non_blocking=True)
            if not captures:
                self._write()
            self.sums.copy_(self._sent)
            for group in (self._ranks.in_steps or self._ranks).groups:
                dist.all_reduce(self.sums, group=group)
            if not captures:
                self._received.append(Received.begin(self._expected, self.sums[: self.PARTS]))

    def _write(self) -> None:
        """Put this rank's digest into numbers that are going to be summed; the last ones stay there."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        values: list[Any] = []
        for group in optimizer.param_groups:
            name = group.get("rule")
            if name not in self._keys:
                self._keys[name] = deciding_keys(optimizer.rule_of(group))
            for value in map(group.get, self._keys[name]):
                # One by one: a list in which one was replaced is the same list.
                values += value if isinstance(value, (tuple, list)) else (value,)
        if not _TENSORS.isdisjoint(map(type, values)):
            # One that has been written to is the same tensor.
            self._values = None
        if values != self._values or self.trains != self._trained:
            self._values, self._trained = values, self.trains
            digest = zlib.crc32(repr([self._ranks.name, *described_numbers(optimizer), self.trains]).encode())
            parts = [digest >> place & (1 << _BITS) - 1 for place in range(0, 32, _BITS)]
            expected = [float(part * self._ranks.count) for part in parts]
            if expected != self._expected:
                self._expected = expected
                for place, part in enumerate(parts):
                    self._sent[place].fill_(part)

    def check(self) -> None:
        """Raise on all ranks if they differ; before a step."""
        if not self._received:
            return
        waits = all_wait = self._received[-1].event is None
        if not waits:
            optimizer = self._optimizer()
            unclipped = [group.get("max_grad_norm") is None for group in optimizer.param_groups] if optimizer else None
            shape = unclipped, self.trains
            waits, all_wait, self._shape = shape != self._shape, self._shape is None, shape
        while self._received and (waits or len(self._received) > 1):
            sums = self._received.popleft()
            if not sums.as_expected():
                self._received.clear()
                raise ValueError(self._difference(known_now=all_wait))

    def _difference(self, *, known_now: bool) -> str:
        optimizer = self._optimizer()
        assert optimizer is not None
        which = f"a step of sharded optimizer {self._ranks.name[1]}, of {self._first}"
        lines = [f"{which} (all ranks step in the same order)", *described_numbers(optimizer)]
        params = [(label, param) for label, *_, param in iter_params(optimizer)]
        trains = [f"{label} {'trains' if param.requires_grad else 'frozen'}" for label, param in params]
        if known_now:
            lines_of = (self._ranks.in_steps or self._ranks).gather_objects(lines + trains)
            return f"{first_difference(lines_of)}; nothing was updated"
        lines += [line for line in trains if line.endswith(" frozen")]
        return (
            "ranks step with other hyperparameters or frozen parameters than each other, or other optimizers, for a "
            "step or two by now: a scheduler, or a clip, that one rank alone has changed, or optimizers that ranks do "
            f"not step in the same order; rank {self._ranks.rank} has {', '.join(lines)}"
        )
