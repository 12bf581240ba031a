"""What the tracer runs a rule under: every ATen call is recorded with fx and lowered to the graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..compat import TensorDispatch, decomposition, is_mutable, operation_name, returns_view
from ..errors import MatrixError, RuleError
from ..rules import Rule
from ..rules.protocol import at_step, changes
from . import matrices, reductions
from .hyperparameters import known_numbers
from .ir import IF_NOT_ZERO, Builder, Guard, Level, Value, ancestors, outcome
from .lowering import LOWERINGS, Unsupported
from .names import rule_place
from .nearest import ALTERNATIVE, nearest, rewritten


class Memory:
    """Remembers, for tensors made by aliasing operations, whose memory they lie in and in which order they walk it.

    Tensors must be kept alive by the caller: they are known by identity.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._places.get(id(tensor), (id(tensor), id(tensor)))

    def share(self, tensor: torch.Tensor, result: torch.Tensor, *, same_order: bool) -> None:
        """Note that a result lies in a tensor's memory."""
        owner, walk = self._place(tensor)
        self._places[id(result)] = owner, walk if same_order else id(result)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor walks another's memory in another order."""
        owner, walk = self._place(tensor)
        return owner != walk

    def others(self, tensor: torch.Tensor, known: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """The known tensors in this one's memory, itself included, and whether each walks it in the same order."""
        place = self._place(tensor)
        return [(one, self._place(one) == place) for one in known if self._place(one)[0] == place[0]]


class Recorder(TensorDispatch):
    """Records the ATen calls of one run of a rule for a parameter of this shape."""

    def __init__(self, rule: Rule, hyperparameters: Mapping[str, Any], shape: Sequence[int]) -> None:
        super().__init__()
        self.rule = rule
        self.given = hyperparameters
        self.numbers, self.unread = known_numbers(hyperparameters)
        self.sizes = reductions.sizes_of(shape)
        self.build = Builder(len(shape))
        self.fx_graph = fx.Graph()
        self.buffers: list[torch.Tensor] = []
        """What the rule is called with: parameter, gradient and states."""
        self.node_of: dict[int, fx.Node] = {}
        self.values: dict[fx.Node, Value] = {}
        self.guards: dict[int, Guard] = {}
        self.named: dict[tuple[str, str], Value] = {}
        self.moving: set[int] = set()
        """Values that are hyperparameters given as functions of the step, by identity."""
        self.reads_shape = False
        self.keep_alive: list[Any] = []
        self.refused: RuleError | None = None
        self.idle: list[RuleError] = []
        self.memory = Memory()
        self.decomposing = ""

    def placeholder(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Let this fake tensor stand for a value of the graph."""
        node = self.fx_graph.placeholder(f"input_{len(self.values)}")
        node.meta["val"] = tensor
        self.values[node] = value
        self._bind(tensor, node)
        return tensor

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.node_of[id(tensor)] = node
        self.keep_alive.append(tensor)

    def scalar(self, value: Value, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """A 0-dim fake tensor that stands for a value of the graph."""
        return self.placeholder(torch.empty((), dtype=dtype), value)

    def constant(self, number: float) -> torch.Tensor:
        """A 0-dim fake tensor that stands for a number."""
        return self.scalar(self.build.constant(number))

    def across(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """A 0-dim fake tensor that stands for a value combined over all tensors; `kind` is "sum" or "max"."""
        combined = self.build.apply(f"across_{kind}", self.value_of(tensor), level=Level.TENSOR)
        return self.scalar(combined)

    def precision(self, tensor: torch.Tensor) -> torch.Tensor:
        """A 0-dim fake tensor that stands for the machine epsilon of the type that the parameter is kept in."""
        reached = ancestors([self.value_of(tensor)])
        if not any(value.operation == "load" and value.attribute == "param" for value in reached):
            raise self.unsupported("machine_epsilon() takes the parameter, or what is computed from it")
        return self.scalar(self.build.hyper("machine_epsilon"))

    def scheduled(self, name: str, value: Any, step: torch.Tensor) -> Any:
        """A hyperparameter that is a function of the step, as fake tensors computed from it."""
        found = at_step(value, step, name)
        entries = found if isinstance(found, tuple) else (found,)
        for index, entry in enumerate(entries):
            traced = self.values[self.node_of[id(entry)]] if id(entry) in self.node_of else None
            if traced is None or traced.operation == "constant":
                continue
            self.moving.add(id(traced))
            if not traced.name:
                traced.name = f"{name}_{index}" if isinstance(found, tuple) else name
        return found

    def count(self, tensor: torch.Tensor, dims: Iterable[int]) -> Value:
        """The number of elements of a tensor of the rule along these dimensions."""
        long = [dim for dim in dims if tensor.shape[dim] != 1]
        space = self.values[self.node_of[id(tensor)]].space if id(tensor) in self.node_of else None
        if space is not None:
            sizes = [self.build.hyper(space[dim], Level.TENSOR) for dim in long]
            return functools.reduce(functools.partial(self.build.apply, "mul"), sizes)
        self.build.reads_shape |= len(long) != tensor.dim()
        return reductions.count(self.build, long)

    def value_of(self, tensor: Any) -> Value:
        """The graph value a tensor of the rule stands for."""
        if id(tensor) in self.node_of:
            return self.values[self.node_of[id(tensor)]]
        if isinstance(tensor, torch.Tensor):
            self.refused = RuleError(
                f"{self.location()}: the rule uses a tensor of shape {tuple(tensor.shape)} that is neither a state "
                "buffer nor computed from one (or a view of one written to since); make it a state or a hyperparameter"
            )
            raise self.refused
        return self.build.constant(tensor)

    def location(self) -> str:
        """The rule author's file and line that is running."""
        return rule_place().line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if func.namespace == "prim" or name == "empty":
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            raise self.read_error(args[0])
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            return self._lift(func, args[0])
        mutates = is_mutable(func)
        base = name.rstrip("_") if mutates else name
        if base not in LOWERINGS:
            decomposed = decomposition(func)
            if decomposed is None or mutates:
                called = self.decomposing or str(func)
                raise self.unsupported(f"torch.ops.{called} has no translation to a kernel", nearest(called))
            outermost, self.decomposing = self.decomposing, self.decomposing or str(func)
            with self:
                result = decomposed(*args, **kwargs)
            self.decomposing = outermost
            return result
        return self._record(func, base, mutates, args, kwargs)

    def _lift(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() != 1:
            raise self.unsupported("a tensor made inside the rule must be a single number")
        number = tensor.item()
        result = func(tensor)
        return self.placeholder(result, self.build.constant(number))

    def _record(self, func: Any, base: str, mutates: bool, args: Any, kwargs: Any) -> torch.Tensor:
        if mutates and (base == operation_name(func) or self.memory.is_view(args[0])):
            raise self.unsupported(f"torch.ops.{func} writes through a view or an out= argument")
        lowered = torch.utils._pytree.tree_map_only(torch.Tensor, self.value_of, (args, kwargs))
        # Work on whole matrices keeps the shape of its first operand; without fake tensors it would be done on garbage.
        result = torch.empty_like(args[0]) if matrices.is_called(func) else func(*args, **kwargs)
        self.build.shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        try:
            value = LOWERINGS[base](self.build, *lowered[0], **lowered[1])
        except MatrixError as error:
            self.refused = error
            raise
        except (Unsupported, TypeError) as error:
            raise self.unsupported(f"torch.ops.{func}: {error}") from error
        nodes = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: self.node_of[id(tensor)], (args, kwargs))
        node = self.fx_graph.call_function(func, *nodes)
        node.meta["val"] = result
        self._describe(value, args[0] if mutates else None)
        self.values[node] = value
        self._bind(result, node)
        if mutates:
            self._written(args[0], node)
        elif returns_view(func):
            self.memory.share(args[0], result, same_order=base in ("detach", "alias"))
        return result

    def _written(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Let every name of this memory stand for its new value, and views of it for nothing any more."""
        for other, same_order in self.memory.others(tensor, self.keep_alive):
            if same_order:
                self.node_of[id(other)] = node
            else:
                self.node_of.pop(id(other), None)

    def _describe(self, value: Value, mutated: Any) -> None:
        line, name, statement = rule_place()
        value.line = value.line or line
        if mutated is not None and not name:
            name = self.value_of(mutated).name
        if not name or value.operation in ("load", "hyper", "constant"):
            return
        earlier = self.named.get((statement, name))
        if earlier is not None:
            earlier.name = ""
        value.name = name
        self.named[statement, name] = value

    def unsupported(self, what: str, instead: str = ALTERNATIVE) -> RuleError:
        """The error for an operation that cannot be translated, with what works instead."""
        self.refused = RuleError(f"{self.location()}: in rule {self.rule.name}: {what}; {instead}")
        return self.refused

    def read_error(self, tensor: Any) -> RuleError:
        """The error for a rule that reads a number on the host."""
        value = self.value_of(tensor)
        if value.level > Level.GROUP:
            what = f"branches on (or reads) data: {value.name or value.operation} is only known on the device"
        else:
            named = dict.fromkeys(node.attribute for node in ancestors([value]) if node.operation == "hyper")
            of = " and ".join(named)
            read = of if value.operation == "hyper" else value.name or f"{value.operation} of {of}"
            what = f"reads {read} as a Python number, which may change every step"
            functions = [key for key, given in self.given.items() if changes(given)]
            if functions:
                what += f" ({' and '.join(functions)} being given as a function of it)"
        place = self.location()
        lines = rewritten(place)
        instead = f": {lines}" if lines else ""
        return RuleError(f"{place}: in rule {self.rule.name}: {what}; use torch.where instead of if{instead}")

    def branch(self, tensor: Any) -> bool:
        """Decide an `if` of the rule on its hyperparameters and sizes, and remember the decision as a guard.

        A function of the step is taken to be positive where the rule only asks whether it is zero.
        """
        value = self.value_of(tensor)
        if id(value) in self.moving:
            return True
        against_zero = value.args[1:] == (self.build.constant(0.0),) and id(value.args[0]) in self.moving
        if against_zero and value.operation in IF_NOT_ZERO:
            return IF_NOT_ZERO[value.operation]
        goes = outcome(value, {**self.numbers, **self.sizes}, self.unread)
        if goes is None:
            raise self.read_error(tensor)
        if value.operation != "constant":
            self.guards[id(value)] = Guard(value, goes)
        return goes
