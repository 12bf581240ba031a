"""The ranks of a sharded optimizer, the checks that all ranks agree, at `shard` and at each step (`StepMessage`)."""

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

from ...compat import PLAIN
from ...graph import Graph, ancestors
from ...native.table import survey
from ...optimizer import Optimizer
from ...optimizer.build import graphs_of
from ...optimizer.groups import GROUP_OPTIONS, check_in_group, deciding_keys, described_numbers, plain_value
from ...optimizer.parameters import iter_params
from ...placement import Ranks, Received, is_distributed, message_length
from ...placement.combinations import kind_of, refuse, split_kind, wrappers_around
from ...timeline.side_stream import SideStream
from .buckets import Options, loses_bits, memory_order

_sharded = itertools.count()  # the sharded optimizers of this process


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh, for a new sharded optimizer; all ranks must call it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() requires torch.distributed: call torch.distributed.init_process_group() first")
    shard, replicate = (dist.group.WORLD, None) if mesh is None else _groups_of(mesh)
    ranks = Ranks(shard, replicate)
    ranks.name = ranks.gather_objects((dist.get_rank(), next(_sharded)))[0]
    return ranks


def _groups_of(mesh: Any) -> tuple[Any, Any]:
    """The process group that shards the state, and the group that replicates it, or None."""
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() requires a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return mesh.get_group(), None
    names = mesh.mesh_dim_names or ()
    bare = [name.removeprefix("dp_") for name in names]
    # Without names the second dimension shards.
    sides = [dim for dim, name in enumerate(bare) if name.startswith("shard")]
    sides += [1 - dim for dim, name in enumerate(bare) if name.startswith("replicate")]
    if names and not sides:
        raise ValueError(
            f"mesh dimensions {tuple(names)} do not tell which shards the state and which replicates it: name them "
            "'shard' and 'replicate'"
        )
    shard = sides[0] if sides else 1
    return mesh.get_group(shard), mesh.get_group(1 - shard)


Result = TypeVar("Result")

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models that have a sharded optimizer


def validate_locally(optimizer: Optimizer, model: nn.Module, options: Options) -> dict[Any, str]:
    """Raise for arguments that a rank can refuse alone; returns the names of the optimizer's parameters."""
    options.check()
    for index, group in enumerate(optimizer.param_groups):
        check_in_group(index, options.check_group, group)
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
            raise ValueError(f"a parameter of shape {tuple(param.shape)} in group {index} does not belong to the model")
        if is_distributed(param):
            raise ValueError(f"{names[param]} is a DTensor already: shard() requires plain parameters")
        if param.is_meta:
            raise ValueError(f"{names[param]} is on the meta device: materialize it first")
    devices = {param.device: names[param] for param in groups}
    if len(devices) > 1:
        described = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"shard() requires all parameters of a rank on one device, not {described}")
    return {param: name for param, name in names.items() if param in groups}


def attempt_together(
    ranks: Ranks, attempt: Callable[[], Result], failure: str = "be sharded", raises: type[Exception] = ValueError
) -> Result:
    """The result of `attempt` on this rank if it succeeds on all ranks; else all ranks raise."""
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
    """`validate_locally` with its errors raised on every rank; also raises for the first difference between ranks."""

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
    """One line for each property that must be the same on all ranks."""
    yield f"{ranks.size} ranks that shard the state and {ranks.copies} replicas"
    for name, value in vars(options).items():
        yield f"{name}={value}"
    for name, value in vars(optimizer.control.policy).items():
        yield f"{name}={value}"
    groups = {param: index for _, index, _, param in iter_params(optimizer)}
    for param, name in names.items():
        trains = "trains" if param.requires_grad else "frozen"
        yield (
            f"parameter {name} {tuple(param.shape)} {param.dtype} on {param.device.type} in group {groups[param]}, "
            f"{trains}, memory order of dimensions {memory_order(param)}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor not in names:
            described = f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            yield f"not in the optimizer: {described}"
    for index, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        yield f"group {index} rule={rule.name}"
        for key in sorted({*group, *GROUP_OPTIONS}, key=str):
            if key not in ("params", "param_names", "rule"):
                yield f"group {index} {key}={plain_value(group.get(key, GROUP_OPTIONS.get(key)))}"
        for graph in graphs_of(optimizer, index):
            yield from (f"in group {index} rule {rule.name} with {step}" for step in _steps(graph))


def _steps(graph: Graph) -> Iterator[str]:
    """The operations of a rule: rules with the same name, and functions of the step, may differ in constants."""
    places: dict[int, int] = {}
    for value in (*graph.values(), *ancestors(condition for condition, _ in graph.guards)):
        if id(value) in places:
            continue
        places[id(value)] = len(places)
        operands = [f"[{places[id(operand)]}]" for operand in value.args]
        if value.attribute is not None:
            operands.append(repr(value.attribute))
        over = "" if value.over is None else f" over {value.over}"
        yield f"[{places[id(value)]}] = {value.operation}({', '.join(operands)}){over}"
    yield ", ".join(f"new {name} [{places[id(value)]}]" for name, value in graph.outputs.items())


def with_separate_groups(ranks: Ranks, model: nn.Module) -> Ranks:
    """The ranks, with separate process groups if another sharded optimizer has parameters of the same model."""
    # The same backward completes buckets of both optimizers, and their order may differ between ranks.
    modules = set(model.modules())
    is_first = _models.isdisjoint(modules)
    _models.update(modules)
    return ranks if is_first else ranks.apart()


_BITS = 11  # bits per part of a digest: float32 sums of thousands of parts are exact


class StepMessage:
    """The all-reduce of a step's digest, which must agree on all ranks, and of which gradients each rank had."""

    # The parts of each rank's digest are summed over the ranks at every step. If all ranks agree, the sums are the
    # rank's own parts times the number of ranks; if a rank differs, every rank finds other sums. On a CPU a difference
    # is known before the step. On a GPU the host does not wait, and a difference is known before the next step.
    # Settings that decide which messages ranks send, a clip or frozen parameters, are the exception: when they change,
    # the host waits.

    PARTS = 3

    def __init__(self, optimizer: Callable[[], Optimizer | None], ranks: Ranks, first: str) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._first = first  # the name of the optimizer's first parameter
        self._values: Any = None
        self._received: deque[Received] = deque()
        self.trains = self._trained = b""  # which parameters train
        self._shape: Any = None  # the settings that decide which messages a step sends
        self._keys: dict[Any, tuple[str, ...]] = {}
        self.is_due = False  # whether a round has ended since the last message

    def reset(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        """Send messages about these parameters from now on."""
        size = message_length(self.PARTS + len(params))
        self.sums = torch.zeros(size, dtype=torch.float32, device=device)
        self._sent = self.sums.clone()
        self._used, self._values = bytes(len(params)), None
        self._expected: list[float] = []
        self.trains = survey(list(params)).trains

    def send(self, used: bytearray, channel: SideStream, *, captures: bool) -> None:
        """Send the message, once per step."""
        # After the reductions, which a rank without a backward joins at its step. Not in backward: another optimizer's
        # message could be first on another rank.
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
        """Write this rank's digest into the message if it has changed."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        values: list[Any] = []
        for group in optimizer.param_groups:
            name = group.get("rule")
            if name not in self._keys:
                self._keys[name] = deciding_keys(optimizer.rule_of(group))
            for value in map(group.get, self._keys[name]):
                # Compare the elements: a list with a replaced element is the same list.
                values += value if isinstance(value, (tuple, list)) else (value,)
        if not set(PLAIN).isdisjoint(map(type, values)):
            # A tensor that was written to is the same tensor: hash the values again.
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
        """Before a step: raise on all ranks if they differ."""
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
            "ranks have stepped with different hyperparameters, frozen parameters or optimizers for a step or two: a "
            "scheduler or clip that one rank alone changed, or optimizers that ranks do not step in the same order; "
            f"rank {self._ranks.rank} has {', '.join(lines)}"
        )
