"""Trace a rule: run it once on fake tensors; a read of a tensor in Python becomes a guard or an error."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import inspect
import itertools
import linecache
import random
import re
import sys
import textwrap
import tokenize
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..compat import TensorDispatch, decomposition, fake_tensors, is_mutable, operation_name, returns_view
from ..devices.garbage import without_collections
from ..errors import MatrixError, RuleError, TilestepError
from ..linalg import MATRIX_OPERATIONS
from ..linalg.scalar_values import as_python, traced_by
from ..rules import Rule, State
from ..rules.protocol import at_step, changes
from ..rules.scalars import ScalarCalls, global_reduce, precision_of
from . import lowering
from .ir import IF_NOT_ZERO, Builder, Condition, Graph, Level, Over, Value, ancestors, outcome
from .lowering import ALTERNATIVE, LOWERINGS, RANDOM, Unsupported, nearest


def flat_numbers(hyperparameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the hyperparameters that are numbers or tensors; tuples are flattened to `name.index`."""
    flat: list[tuple[str, Any]] = []
    for key, value in hyperparameters.items():
        value = as_python(value)
        is_several = isinstance(value, (tuple, list))
        flat += [(f"{key}.{index}", entry) for index, entry in enumerate(value)] if is_several else [(key, value)]
    numeric = (int, float, torch.Tensor)
    return [(name, entry) for name, entry in flat if isinstance(entry, numeric) and not isinstance(entry, bool)]


def known_numbers(hyperparameters: Mapping[str, Any]) -> tuple[dict[str, float], set[str]]:
    """Return the hyperparameters that are numbers, by name, and the names of hyperparameters that are tensors."""
    flat = flat_numbers(hyperparameters)
    numbers = {name: value for name, value in flat if not isinstance(value, torch.Tensor)}
    return numbers, {name for name, _ in flat} - set(numbers)


def group_value(group: Mapping[str, Any], name: str) -> Any:
    """Return the entry of a param group for a column of the hyperparameter table."""
    key, index = _column(name)
    value = group.get(key)
    return value if index is None or value is None else value[index]


@functools.cache
def _column(name: str) -> tuple[str, int | None]:
    key, _, index = name.partition(".")
    return key, int(index) if index else None


class Place(NamedTuple):
    """A position in a rule: `file:line`, the variable that the statement assigns, and `file:line` of its start."""

    line: str
    name: str
    statement: str


def rule_place() -> Place:
    """Return the position of the innermost frame outside torch and this package."""
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    if frame is None:
        return Place("<unknown>", "", "<unknown>")
    file = frame.f_code.co_filename
    linecache.lazycache(file, frame.f_globals)  # for modules without a file
    at = frame.f_lineno
    assigned = ((first, name) for first, last, name in _assignments(frame.f_code) if first <= at <= last)
    first, name = next(assigned, (at, ""))
    return Place(f"{file}:{at}", name, f"{file}:{first}")


def places_of(error: BaseException) -> list[str]:
    """Return `file:line` of an error's frames outside torch and this package, innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if not _is_internal(frame)]


def _is_internal(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(
        ("torch", "tilestep.graph", "tilestep.linalg", "tilestep.checking", "contextlib")
    ) or module in (
        "tilestep.rules.scalars",
        "tilestep.linalg.scalar_values",
        "tilestep.rules.protocol",
        "tilestep.backends.floats",
    )


@functools.lru_cache(maxsize=256)
def _assignments(code: types.CodeType) -> tuple[tuple[int, int, str], ...]:
    """Return first line, last line and target variable of the statements with a target."""
    try:
        # inspect.getsource searches all modules for the code's module, which takes tens of milliseconds.
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (OSError, SyntaxError, TypeError, tokenize.TokenError):  # the file may have been edited
        return ()
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return tuple((node.lineno, node.end_lineno or node.lineno, name) for node in statements if (name := _target(node)))


def _target(node: ast.AST) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        root: ast.AST = node.value
        while isinstance(root, (ast.Call, ast.Attribute)):
            root = root.func if isinstance(root, ast.Call) else root.value
        return root.id if isinstance(root, ast.Name) and root.id != "torch" else ""
    return ""


_MODULES = frozenset({"random", "time", "datetime", "secrets", "uuid", "os", "numpy", "numpy.random"})
_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "thread_time", "localtime", "gmtime"})
_ONCE = (
    "is called once, when the rule is traced, so its result would never change; make it a hyperparameter and set it "
    "before each step"
)


@contextlib.contextmanager
def refusing_randomness(functions: Sequence[Any], describe: str) -> Iterator[None]:
    """A context in which calls of `random`, numpy's generators and clocks raise, if the functions may call them."""
    # A profile function slows the trace down.
    if not any(_may_be_random(value) for function in functions for _, value in _referred(function)):
        yield
        return

    def watch(frame: types.FrameType, event: str, called: Any) -> None:
        name = _random_call(called) if event == "c_call" else ""
        if event == "call" and frame.f_globals.get("__name__") == "random":
            name = f"random.{frame.f_code.co_name}"
        caller: types.FrameType | None = frame.f_back if event == "call" else frame
        while caller is not None and caller.f_globals.get("__name__") in _MODULES:
            caller = caller.f_back
        if not name or caller is None or _is_library(caller.f_globals.get("__name__", "")):
            return
        raise RuleError(f"{caller.f_code.co_filename}:{caller.f_lineno}: {describe}: {name} {_ONCE}")

    before, drawn = sys.getprofile(), _numpy_states(functions)
    # Finalizers run by a garbage collection are not calls of the rule; an error in them is lost and ends the profiling.
    with without_collections():
        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(before)
    if _numpy_states(functions) != drawn:  # Python's profiling does not see numpy's functions
        raise RuleError(f"{describe}: numpy.random {_ONCE}")


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "tilestep", "contextlib", "importlib", "threading", "logging")


def _random_call(called: Any) -> str:
    """Return the name of a built-in function whose result depends on chance or time; empty for other functions."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, random.Random):
        return f"random.{name}"
    if type(owner).__module__.startswith("numpy.random"):
        return f"numpy.random.{name}"
    module = getattr(called, "__module__", None) or getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
    if module == "time" and name.removesuffix("_ns") in _CLOCKS:
        return f"time.{name}"
    if isinstance(owner, type) and module == "datetime" and name in ("now", "today", "utcnow"):
        return f"{owner.__name__}.{name}"
    return "os.urandom" if name == "urandom" else ""


def _referred(function: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the outside names and values that a function's code, or the code of its helpers, refers to."""
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    entries = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            entries[name] = cell.cell_contents
    entries.update(function.__kwdefaults__ or {})
    entries.update({f"default {place}": value for place, value in enumerate(function.__defaults__ or ())})
    for name, value in entries.items():
        yield name, value
        if depth and isinstance(value, types.FunctionType) and not _is_library(value.__module__ or ""):
            yield from _referred(value, depth - 1)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _may_be_random(value: Any) -> bool:
    """Whether calls of a value, or of its attributes, may depend on chance or time."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    owner = type(getattr(value, "__self__", value)).__module__
    return module in _MODULES or owner.partition(".")[0] in ("random", "numpy")


def _numpy_states(functions: Iterable[Any]) -> list[str]:
    states: list[str] = []
    for value in (value for function in functions for _, value in _referred(function)):
        source = getattr(value, "random", value) if isinstance(value, types.ModuleType) else value
        if getattr(source, "__name__", type(source).__module__).startswith("numpy.random"):
            if hasattr(source, "get_state"):
                states.append(str(source.get_state()))
            elif hasattr(source, "bit_generator"):
                states.append(str(source.bit_generator.state))
    return states


def kept_tensor(function: Any, made: Collection[int]) -> str:
    """Return the name under which a function keeps a tensor of the trace for its next call; empty if it keeps none."""
    names = (name for name, value in _referred(function) if any(id(tensor) in made for tensor in _tensors(value)))
    return next(names, "")


def _tensors(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple, set)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, depth - 1)
    elif depth and isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.ModuleType):
        yield from _tensors(dict(value.__dict__), depth)


class Memory:
    """Tracks views: the memory that a tensor aliases, and the order of its elements."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._places.get(id(tensor), (id(tensor), id(tensor)))

    def share(self, tensor: torch.Tensor, result: torch.Tensor, *, same_order: bool) -> None:
        """Record that a result is a view of a tensor."""
        owner, walk = self._place(tensor)
        self._places[id(result)] = owner, walk if same_order else id(result)

    def move(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Record that a tensor has taken the memory of another, as `tensor.data = source` does."""
        self._places[id(tensor)] = self._place(source)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a view with another order of elements."""
        owner, walk = self._place(tensor)
        return owner != walk

    def aliases(self, tensor: torch.Tensor, among: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """Return the tensors that alias a tensor, itself included, and whether each has the same order of elements."""
        place = self._place(tensor)
        return [(alias, self._place(alias) == place) for alias in among if self._place(alias)[0] == place[0]]


class Recorder(TensorDispatch):
    """Records the ATen calls of a rule for a parameter of a shape, with values of a dtype."""

    def __init__(
        self, rule: Rule, hyperparameters: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.rule = rule
        self.hyperparameters = hyperparameters
        self.numbers, self.unread = known_numbers(hyperparameters)
        self.sizes = lowering.sizes_of(shape)
        self.build = Builder(len(shape), dtype)
        self.buffers: list[torch.Tensor] = []  # arguments of the rule: parameter, gradient and states
        self.values: dict[int, Value] = {}  # the value of each tensor, by the tensor's identity
        self.reductions = itertools.count()  # numbers of the rule's reductions over all tensors, in order
        self.computed: list[Value] = []  # results of all operations of the rule, in order
        self.guards: dict[int, Condition] = {}
        self.named: dict[tuple[str, str], Value] = {}
        self.moving: set[int] = set()  # hyperparameters that are functions of the step, by identity
        self.casts = False  # whether the current function is a cast written in the rule
        self.keep_alive: list[Any] = []
        self.refused: RuleError | None = None
        self.no_ops: list[RuleError] = []
        self.memory = Memory()
        self.decomposing = ""
        self.title = f"rule {rule.name}"  # the subject of messages

    def placeholder(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Associate a fake tensor with a value of the graph."""
        self.values[id(tensor)] = value
        self.keep_alive.append(tensor)
        return tensor

    def scalar(self, value: Value, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return a 0-dim fake tensor of a value of the graph."""
        return self.placeholder(torch.empty((), dtype=dtype), value)

    def constant(self, number: float) -> torch.Tensor:
        """Return a 0-dim fake tensor of a number."""
        return self.scalar(self.build.constant(number))

    def created(self, number: float, dtype: torch.dtype) -> torch.Tensor:
        """Return a 0-dim fake tensor of a number that the rule creates with this dtype."""
        try:
            lowering.check_dtype("tensor", dtype, None)
        except Unsupported as error:
            raise self.unsupported(str(error)) from error
        value = lowering.converted(self.build, self.build.constant(number), dtype)
        return self.scalar(value, torch.float64 if dtype.is_floating_point else dtype)

    def global_reduce(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a 0-dim fake tensor of a value combined over all tensors; `kind` is "sum" or "max"."""
        combined = self.build.apply(f"global_{kind}", self.value_of(tensor), level=Level.TENSOR)
        if combined.attribute is None:
            combined.attribute = next(self.reductions)
        return self.scalar(combined)

    def precision(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a 0-dim fake tensor of the machine epsilon of the parameter's stored dtype."""
        reached = ancestors([self.value_of(tensor)])
        if not any(value.operation == "load" and value.attribute == "param" for value in reached):
            raise self.unsupported("machine_epsilon() requires the parameter or a value computed from it")
        return self.scalar(self.build.hyper("machine_epsilon"))

    def scheduled(self, name: str, value: Any, step: torch.Tensor) -> Any:
        """Compute a hyperparameter that is a function of the step from the step's fake tensor."""
        computed = at_step(value, step, name)
        entries = computed if isinstance(computed, tuple) else (computed,)
        for index, entry in enumerate(entries):
            traced = self.values.get(id(entry))
            if traced is None or traced.operation == "constant":
                continue
            self.moving.add(id(traced))
            if not traced.name:
                traced.name = f"{name}_{index}" if isinstance(computed, tuple) else name
        return computed

    def count(self, tensor: torch.Tensor, dims: Iterable[int]) -> Value:
        """Return the number of elements of a traced tensor along some dimensions."""
        long = [dim for dim in dims if tensor.shape[dim] != 1]
        value = self.values.get(id(tensor))
        if value is not None and value.space is not None:
            sizes = [self.build.hyper(value.space[dim], Level.TENSOR) for dim in long]
            return functools.reduce(functools.partial(self.build.apply, "mul"), sizes)
        self.build.reads_shape |= len(long) != tensor.dim()
        return lowering.count(self.build, long)

    def value_of(self, tensor: Any) -> Value:
        """Return the graph value of a traced tensor."""
        if id(tensor) in self.values:
            return self.values[id(tensor)]
        if isinstance(tensor, torch.Tensor):
            self.refused = RuleError(
                f"{rule_place().line}: the rule uses a tensor of shape {tuple(tensor.shape)} that is neither a state "
                "buffer nor computed from one (or a view of a buffer written to since); make it a state or a "
                "hyperparameter"
            )
            raise self.refused
        return self.build.constant(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if func.namespace == "prim" or name == "empty":
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            raise self.read_error(args[0])
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            if args[0].numel() != 1:
                raise self.unsupported("a tensor created inside the rule must be a single number")
            number = self.build.constant(args[0].item())
            return self.placeholder(func(args[0]), number)
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

    def _record(self, func: Any, base: str, mutates: bool, args: Any, kwargs: Any) -> torch.Tensor:
        if mutates and (base == operation_name(func) or self.memory.is_view(args[0])):
            raise self.unsupported(f"torch.ops.{func} writes through a view or an out= argument")
        lowered = torch.utils._pytree.tree_map_only(torch.Tensor, self.value_of, (args, kwargs))
        # Work on whole matrices keeps the shape of its first operand; without fake tensors it would run on garbage.
        is_called = func.namespace == "tilestep" and operation_name(func) in MATRIX_OPERATIONS
        result = torch.empty_like(args[0]) if is_called else func(*args, **kwargs)
        self.build.shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        try:
            if isinstance(result, torch.Tensor):  # operations with several results raise themselves
                lowering.check_dtype(base, result.dtype, getattr(args[0], "dtype", None) if args else None)
            value = LOWERINGS[base](self.build, *lowered[0], **lowered[1])
            if isinstance(result, torch.Tensor):
                wider = args and (getattr(args[0], "dtype", None), result.dtype) == (torch.float32, torch.float64)
                if base == "_to_copy" and self.casts and value.level > Level.TENSOR and wider:
                    raise Unsupported("elements in float64 are supported for float64 parameters only; remove the cast")
                operand = lowered[0][0] if args else None
                lowering.check_integers(self.build, base, value, operand, result.dtype)
            if base in lowering.CONVERTING:
                value = lowering.converted(self.build, value, result.dtype)
        except MatrixError as error:
            self.refused = error
            raise
        except (Unsupported, TypeError) as error:
            raise self.unsupported(f"torch.ops.{func}: {error}") from error
        self._describe(value, args[0] if mutates else None)
        self.computed.append(value)
        self.placeholder(result, value)
        if mutates:  # all aliases of the memory get the new value, and its views become invalid
            for alias, same_order in self.memory.aliases(args[0], self.keep_alive):
                if same_order:
                    self.values[id(alias)] = value
                else:
                    self.values.pop(id(alias), None)
        elif returns_view(func):
            self.memory.share(args[0], result, same_order=base in ("detach", "alias"))
        return result

    def set_data(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Give a tensor the value and the memory of another: `tensor.data = source`."""
        self.values[id(tensor)] = self.value_of(source)
        self.memory.move(tensor, source)

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

    def unsupported(self, reason: str, instead: str = ALTERNATIVE) -> RuleError:
        """Return the error for an operation without a lowering; its message proposes an alternative."""
        self.refused = RuleError(f"{rule_place().line}: in {self.title}: {reason}; {instead}")
        return self.refused

    def read_error(self, tensor: Any) -> RuleError:
        """Return the error for a rule that reads a number on the host."""
        value = self.value_of(tensor)
        reached = ancestors([value])
        if any(node.operation == "load" for node in reached):
            reason = f"branches on (or reads) data: {value.name or value.operation} is only known on the device"
        else:
            of = " and ".join(dict.fromkeys(node.attribute for node in reached if node.operation == "hyper"))
            read = of if value.operation == "hyper" else value.name or f"{value.operation} of {of}"
            changing = "may change every step" if value.level <= Level.GROUP else "differs between parameters"
            reason = f"reads {read} as a Python number, which {changing}"
            functions = [key for key, value in self.hyperparameters.items() if changes(value)]
            if functions:
                reason += f" ({' and '.join(functions)} set as a function of the step)"
        return RuleError(f"{rule_place().line}: in {self.title}: {reason}; use torch.where instead of if")

    def branch(self, tensor: Any) -> bool:
        """Decide an `if` on hyperparameters and sizes, and record the outcome as a guard."""
        value = self.value_of(tensor)
        if id(value) in self.moving:
            return True
        against_zero = value.args[1:] == (self.build.constant(0.0),) and id(value.args[0]) in self.moving
        if against_zero and value.operation in IF_NOT_ZERO:
            return IF_NOT_ZERO[value.operation]
        taken = outcome(value, {**self.numbers, **self.sizes}, self.unread)
        if taken is None:
            raise self.read_error(tensor)
        if value.operation != "constant":
            self.guards[id(value)] = value, taken
        return taken


class Reads(ScalarCalls):
    """Intercepts Python reads of tensors in a rule: branches become guards."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, name = self.recorder, getattr(func, "__name__", "")
        if name == "__bool__":
            return recorder.branch(args[0])
        if name == "__setitem__":
            raise recorder.unsupported("assigning to elements of a tensor has no translation to a kernel")
        if func == _SET_DATA:
            recorder.set_data(*args)
        if func in _MAKERS and args and isinstance(args[0], (bool, int, float)):
            dtype = args[1] if len(args) > 1 else (kwargs or {}).get("dtype")
            return recorder.created(args[0], dtype or (torch.bool if isinstance(args[0], bool) else torch.float64))
        if name in RANDOM:
            raise recorder.unsupported(f"{name} draws random numbers", nearest(name))
        if name == "log_sigmoid":  # torch creates a second tensor for its gradient
            return torch.clamp(args[0], max=0) - torch.log1p(torch.exp(-torch.abs(args[0])))
        if name == "full_like" and len(args) == 2 and isinstance(args[1], torch.Tensor) and not args[1].dim():
            return torch.empty_like(args[0], **(kwargs or {})).copy_(args[1])
        if name in ("item", "__float__", "__int__", "__index__", "tolist", "numpy"):
            raise recorder.read_error(args[0])
        if name in _OF_DTYPE or func in _DTYPES or (name in _CASTS and args[0].is_floating_point()):
            # A cast to the tensor's own dtype returns the tensor itself, any other cast a copy.
            recorder.build.reads_dtype = True
        dim: Any = args[1] if len(args) == 2 else (kwargs or {}).get("dim")
        if name in ("numel", "nelement"):
            return recorder.scalar(recorder.count(args[0], range(args[0].dim())))
        if name == "size" or func == _SHAPE:
            recorder.build.reads_shape = True
            every = range(args[0].dim())
            sizes = tuple(
                recorder.scalar(recorder.count(args[0], [axis])) for axis in (every if dim is None else [every[dim]])
            )
            return sizes if dim is None else sizes[0]
        if (name in _OF_MEMORY or func == _BYTES) and args[0].dim():
            attribute = "nbytes" if func == _BYTES else _OF_MEMORY[name]
            raise recorder.unsupported(f"{attribute} of a tensor differs between parameters; use .size(0) or .numel()")
        if name in ("dim", "ndimension") or func == _DIMENSIONS or self._may_depend_on_dimensions(name, (args, kwargs)):
            recorder.build.reads_shape = True
        recorder.casts = name in _CASTS
        return super().__torch_function__(func, types, args, kwargs)

    def _may_depend_on_dimensions(self, name: str, arguments: Any) -> bool:
        """Whether torch may decompose a function differently for vectors and matrices.

        `a @ b` is a sum for vectors, and `torch.linalg.norm(x, 1)` another norm for matrices. Functions in `LOWERINGS`
        are not decomposed; of the remaining functions only those in `_ALIKE` are the same for all.
        """
        bare = name.strip("_").removesuffix(".default")
        if bare in LOWERINGS or bare in _ALIKE:
            return False
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        values = [self.recorder.values.get(id(tensor)) for tensor in tensors]
        has_data = any(value is not None and value.level > Level.GROUP for value in values)
        # 0-dim data of this parameter may have dimensions for another parameter.
        return any(tensor.dim() > 0 for tensor in tensors) or (has_data and self.recorder.build.dims == 0)


_ALIKE = frozenset(
    (
        *("bool", "get", "set", "pos", "and", "or", "xor", "invert", "rand", "ror", "rxor", "iand", "ior", "ixor"),
        *("radd", "iadd", "isub", "rmul", "imul", "truediv", "rtruediv", "itruediv", "rdiv", "idiv", "rpow", "ipow"),
        *("floordiv", "rfloordiv", "ifloordiv", "mod", "rmod", "imod", "floor_divide", "positive", "norm", "dist"),
        *("any", "all", "to", "float", "double", "type", "type_as", "tensor", "as_tensor", "empty", "requires_grad"),
        *("isposinf", "isneginf", "arctan", "expit", "frac", "xlogy"),
        *("softplus", "gelu", "elu", "leaky_relu", "hardtanh"),
    )
)
"""Functions not in `LOWERINGS` that decompose equally for tensors of any number of dimensions."""

_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_OF_MEMORY = {"__len__": "len()", "stride": "stride()"}
_OF_DTYPE = ("type", "element_size")
_CASTS = ("float", "double", "to", "type_as")
_DTYPES = (torch.Tensor.dtype.__get__, torch.Tensor.itemsize.__get__)  # type: ignore[attr-defined]
_BYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_DIMENSIONS = torch.Tensor.ndim.__get__  # type: ignore[attr-defined]


def _sizes(dims: int) -> tuple[int, ...]:
    """Return a shape of distinct sizes, which identify dimensions; its number of elements fits 64 bits."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
    return primes[3 : 3 + dims] if dims <= 8 else (*primes[:dims], *(1,) * (dims - len(primes)))


def trace(
    rule: Rule,
    hyperparameters: Mapping[str, Any],
    dims: int = 1,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """Run a rule once on fake tensors and return its graph."""
    recorder = Recorder(rule, hyperparameters, (1,) * dims if sizes is None else sizes, dtype)
    shape = _sizes(dims)
    with torch.device("cpu"), fake_tensors():
        results = contextvars.copy_context().run(_run, recorder, rule, hyperparameters, shape)
        if recorder.refused:  # the rule caught the error, and continued differently than without a trace
            raise recorder.refused
        outputs = _outputs(recorder, rule, results, shape)
        _check_kept(recorder, rule, results, outputs)
    made = {id(tensor) for tensor in recorder.keep_alive}
    kept = kept_tensor(rule.function, made) or kept_tensor(rule.bound(), made)
    if kept:
        raise RuleError(
            f"{rule.where}: in rule {rule.name}: {kept} keeps a tensor between calls, but a rule is called once, when "
            "it is traced; make it a state: add a positional parameter"
        )
    if recorder.no_ops:
        raise recorder.no_ops[0]
    build, guards = recorder.build, list(recorder.guards.values())
    graph = Graph(rule.name, outputs, guards, dims=dims, dtype=dtype, reads_dtype=build.reads_dtype)
    states = {name: state for name, state in rule.states.items() if name in {*graph.loads(), *outputs}}
    graph.states = tuple(states)
    graph.scalar_states = tuple(name for name, state in states.items() if state.shape == "scalar")
    graph.slice_states = _slice_states(rule, states, dims)
    squares = {name: lowering.SQUARES.get(state.shape) for name, state in states.items()}
    graph.matrix_states = {name: square for name, square in squares.items() if square is not None}
    graph.state_dtypes = {name: state.dtype for name, state in states.items() if state.dtype is not None}
    is_of_matrices = any(map(lowering.is_matrix_work, graph.values()))
    graph.reads_shape = build.reads_shape or is_of_matrices or bool(graph.slice_states)
    return graph


def _run(recorder: Recorder, rule: Rule, hyperparameters: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Call the rule on fake tensors with recording on, in a separate context, and return its results."""
    buffers = recorder.buffers = _placeholders(recorder, rule, shape)
    values = {key: _hyper_input(recorder, key, value) for key, value in hyperparameters.items()}
    step = _hyper_input(recorder, "step", 1.0)
    if rule.uses_step:
        values["step"] = step
    try:
        traced_by.set(recorder)
        global_reduce.set(recorder.global_reduce)
        precision_of.set(recorder.precision)
        several = [value if isinstance(value, (tuple, list)) else (value,) for value in values.values()]
        functions = (rule.function, *(entry for entries in several for entry in entries if callable(entry)))
        with refusing_randomness(functions, f"in rule {rule.name}"), Reads(recorder), recorder:
            for key, value in values.items():
                if changes(value):
                    recorder.title = f"rule {rule.name}, {key} as a function of the step"
                    values[key] = recorder.scheduled(key, value, step)
            recorder.title = f"rule {rule.name}"
            return rule(*buffers, **values)
    except Exception as error:
        # Operators of tensors turn a TypeError, RuleError included, into "unsupported operand type(s)".
        if recorder.refused or isinstance(error, TilestepError):
            raise recorder.refused or error from None
        frames = list(traceback.walk_tb(error.__traceback__))
        is_of_torch = bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("torch")
        if not isinstance(error, (TypeError, RuntimeError, IndexError)) and not is_of_torch:
            raise  # an error of the rule
        where = [rule.where, *places_of(error)][-1]
        raise RuleError(f"{where}: in {recorder.title}: {_refusal(str(error))}") from error


def _refusal(message: str) -> str:
    """Rewrite torch's message about the arguments of a call for a RuleError, with an alternative."""
    called = _CALLED.match(message)
    name = called[1] if called else ""
    if nearest(name) != ALTERNATIVE:
        return f"{name} has no translation to a kernel; {nearest(name)}"
    if name and "FakeTensor" in message:
        message = f"{name}() requires a Python number, but sizes, hyperparameters and the step are tensors in a rule"
    return f"{message}; {ALTERNATIVE}"


_CALLED = re.compile(r"(\w+)\(\)")  # the start of torch's and Python's messages about arguments


def _slice_states(rule: Rule, states: Mapping[str, State], dims: int) -> dict[str, Over]:
    """Return the row and column states, each with its reduced dimension."""
    kinds = {name: state.shape for name, state in states.items()}
    overs = {name: over for name, kind in kinds.items() if (over := _layout_of(kind, (1,) * dims)[1]) is not None}
    for name, over in overs.items():
        if over[0] < 0:
            raise RuleError(
                f"{rule.where}: {rule.name} uses {name}, a state with one number per {kinds[name]}, for a "
                f"parameter of {dims} dimension{'s' * (dims != 1)}; use it only `if param.dim() > 1`"
            )
    return overs


_FROM_END = {"row": 1, "column": 2}  # the reduced dimension of row and column states, counted from the last as 1


def _layout_of(kind: str, shape: tuple[int, ...]) -> tuple[Level, Over | None, tuple[int, ...]]:
    """Return the level, the reduced dimensions and the shape of a state of this kind."""
    if kind == "scalar":
        return Level.TENSOR, None, ()
    if kind in lowering.SQUARES:
        side = shape[-2:][:1] if kind == "left" else shape[-1:]
        return Level.MATRIX, None, (*side, *side)
    if kind in _FROM_END:
        first = len(shape) - _FROM_END[kind]
        return Level.SLICE, (first, first + 1), (*shape[:first], 1, *shape[first + 1 :])
    return Level.ELEMENT, None, shape


def _placeholders(recorder: Recorder, rule: Rule, shape: tuple[int, ...]) -> list[torch.Tensor]:
    build = recorder.build

    def fake(value: Value, dtype: torch.dtype = build.dtype, dims: tuple[int, ...] = shape) -> torch.Tensor:
        return recorder.placeholder(torch.empty(dims, dtype=dtype), value)

    param = fake(build.load("param"))
    grad = build.apply("mul", build.load("grad"), build.hyper("gradient_scale"))
    grad.name = "grad"
    buffers = [param, fake(grad)]
    for name, state in rule.states.items():
        level, over, state_shape = _layout_of(state.shape, shape)
        value = build.load(name, level, over)
        value.space = lowering.SQUARES.get(state.shape)
        buffers.append(fake(value, torch.float64 if state.shape == "scalar" else build.dtype, state_shape))
    return buffers


def _hyper_input(recorder: Recorder, key: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        # Numbers in nested tuples are constants of the graph, as flags are.
        return tuple(
            entry if isinstance(entry, (tuple, list)) else _hyper_input(recorder, f"{key}.{index}", entry)
            for index, entry in enumerate(value)
        )
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        return value
    return recorder.scalar(recorder.build.hyper(key))


def _labels(rule: Rule) -> tuple[str, ...]:
    return rule.buffer_names[0], *rule.states


def _outputs(recorder: Recorder, rule: Rule, results: tuple[Any, ...], shape: tuple[int, ...]) -> dict[str, Value]:
    outputs: dict[str, Value] = {}
    shapes = [shape, *(_layout_of(state.shape, shape)[2] for state in rule.states.values())]
    for name, label, result, expected in zip(("param", *rule.states), _labels(rule), results, shapes):
        if not isinstance(result, torch.Tensor):
            raise RuleError(f"{rule.where}: {rule.name} returns {type(result).__name__} for {label}, not a tensor")
        if tuple(result.shape) != expected and result.dim() > 0:
            raise RuleError(
                f"{rule.where}: {rule.name} returns shape {tuple(result.shape)} for {label}; it must keep its shape"
            )
        value = recorder.value_of(result)
        if value.is_bool:
            value = recorder.build.apply("number", value)
        if name == "param" and value.level < Level.SLICE:
            if expected and not result.dim():
                raise RuleError(
                    f"{value.line or rule.where}: {rule.name} returns one number for {label}, so all its elements "
                    f"would be equal; return torch.full_like({label}, ...) if that is intended"
                )
            recorder.build.reads_shape |= not expected  # a number is a valid new parameter only for 0-dim parameters
        if value.operation != "load" or value.attribute != name:
            value.name = value.name or f"new_{name}"
            outputs[name] = value
    return outputs


def _check_kept(recorder: Recorder, rule: Rule, results: Sequence[Any], outputs: Mapping[str, Value]) -> None:
    """Raise for a new parameter or state that the rule computes and does not return."""
    code = getattr(rule.function, "__code__", None)
    rule_lines = {f"{code.co_filename}:{line}" for *_, line in code.co_lines()} if code else set()
    buffers = (recorder.buffers[0], *recorder.buffers[2:])
    for name, label, result, buffer in zip(("param", *rule.states), _labels(rule), results, buffers):
        if result is not buffer or name in outputs:
            continue
        # A clone of a buffer, or a cast to its dtype, is the buffer's value.
        made = [value for value in recorder.computed if value.operation != "load"]
        lost = [value for value in made if value.name == label and value.line in rule_lines]
        if lost:
            raise RuleError(
                f"{lost[0].line}: {rule.name} rebinds {label} to a new tensor and does not return it, so the buffer "
                f"never changes; change it in place ({label}.add_(...), {label}.copy_(...)), or return it"
            )
