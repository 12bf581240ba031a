"""The rule runs once on fake tensors and leaves its graph; what it asks of them in Python is a guard or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..compat import fake_tensors
from ..errors import RuleError, TilestepError
from ..rules import Rule
from ..rules.protocol import changes, scalar_factory, traced_by
from ..rules.scalars import ScalarCalls, across_tensors, precision_of
from . import matrices
from .ir import Graph, Level, Over, Value
from .lowering import LOWERINGS
from .names import is_of_torch, raised_at
from .nearest import ALTERNATIVE, RANDOM, nearest
from .purity import kept_tensor, refusing_chance
from .recorder import Recorder


class Reads(ScalarCalls):
    """Catches the Python reads of a rule: branches become guards."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            return self.recorder.branch(args[0])
        if name == "__setitem__":
            raise self.recorder.unsupported("assigning to elements of a tensor has no translation to a kernel")
        if func in _MAKERS and args and isinstance(args[0], (bool, int, float)):
            dtype = torch.bool if isinstance(args[0], bool) else torch.float64
            return self.recorder.scalar(self.recorder.build.constant(args[0]), dtype)
        if name in RANDOM:
            raise self.recorder.unsupported(f"{name} draws random numbers", nearest(name))
        if name == "log_sigmoid":  # torch makes a second tensor for its gradient
            return torch.clamp(args[0], max=0) - torch.log1p(torch.exp(-torch.abs(args[0])))
        if name == "full_like" and len(args) == 2 and isinstance(args[1], torch.Tensor) and not args[1].dim():
            return torch.empty_like(args[0], **(kwargs or {})).copy_(args[1])
        if name in ("item", "__float__", "__int__", "__index__", "tolist", "numpy"):
            raise self.recorder.read_error(args[0])
        dim: Any = args[1] if len(args) == 2 else (kwargs or {}).get("dim")
        if name in ("numel", "nelement"):
            return self._count(args[0], range(args[0].dim()))
        if name == "size" or func == _SHAPE:
            self.recorder.reads_shape = True
            every = range(args[0].dim())
            sizes = tuple(self._count(args[0], [each]) for each in (every if dim is None else [every[dim]]))
            return sizes if dim is None else sizes[0]
        if (name in _OF_MEMORY or func == _BYTES) and args[0].dim():
            what = "nbytes" if func == _BYTES else _OF_MEMORY[name]
            raise self.recorder.unsupported(
                f"{what} of a tensor is another for each parameter; ask for .size(0), .numel()"
            )
        if name in ("dim", "ndimension") or func == _DIMENSIONS or self._may_depend_on_dimensions(name, (args, kwargs)):
            self.recorder.reads_shape = True
        return super().__torch_function__(func, types, args, kwargs)

    def _count(self, tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
        return self.recorder.scalar(self.recorder.count(tensor, dims))

    def _may_depend_on_dimensions(self, name: str, given: Any) -> bool:
        """Whether torch may take a function apart in one way for vectors and in another for matrices, unseen by us.

        `a @ b` is a sum for vectors, and `torch.linalg.norm(x, 1)` another norm for matrices. What has an entry in
        `LOWERINGS` arrives there whole; of the rest, only what is known to be the same for all is taken to be.
        """
        bare = name.strip("_").removesuffix(".default")
        if bare in LOWERINGS or bare in _ALIKE:
            return False
        return any(isinstance(each, torch.Tensor) and self._may_have_dimensions(each) for each in tree_leaves(given))

    def _may_have_dimensions(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the rule has dimensions for some parameter, if not for this one."""
        node = self.recorder.node_of.get(id(tensor))
        is_data = node is not None and self.recorder.values[node].level > Level.GROUP
        return tensor.dim() > 0 or (is_data and self.recorder.build.dims == 0)


_ALIKE = frozenset(
    (
        *("bool", "get", "set", "pos", "and", "or", "xor", "invert", "rand", "ror", "rxor", "iand", "ior", "ixor"),
        *("radd", "iadd", "isub", "rmul", "imul", "truediv", "rtruediv", "itruediv", "rdiv", "idiv", "rpow", "ipow"),
        *("floordiv", "rfloordiv", "ifloordiv", "mod", "rmod", "imod", "floor_divide", "true_divide", "divide"),
        *("multiply", "subtract", "negative", "positive", "absolute", "square", "clip", "norm", "dist", "any", "all"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal", "to", "float", "double", "type", "type_as"),
        *("tensor", "as_tensor", "scalar_tensor", "empty", "empty_like", "requires_grad", "isposinf", "isneginf"),
        *("arctan", "arctan2", "tan", "atan", "asin", "acos", "sinh", "cosh"),
        *("log10", "frac", "fix", "logit", "expit", "special_expit", "erfc", "hypot", "logaddexp", "xlogy", "signbit"),
        *("softplus", "silu", "gelu", "elu", "leaky_relu", "hardtanh", "hardsigmoid", "hardswish"),
    )
)
"""Functions that mean the same for a tensor of any number of dimensions, beside those in `LOWERINGS`."""

_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_OF_MEMORY = {"__len__": "len()", "stride": "stride()"}
_BYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_DIMENSIONS = torch.Tensor.ndim.__get__  # type: ignore[attr-defined]


def _sizes(dims: int) -> tuple[int, ...]:
    """A shape by whose sizes dimensions are told apart; the number of its elements has 64 bits."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
    return primes[3 : 3 + dims] if dims <= 8 else (*primes[:dims], *(1,) * (dims - len(primes)))


def trace(rule: Rule, hyperparameters: Mapping[str, Any], dims: int = 1, sizes: Sequence[int] | None = None) -> Graph:
    """Run a rule once on fake tensors and return its graph.

    Example:
        >>> from tilestep.rules import registry
        >>> graph = trace(registry["Lion"], registry["Lion"].hyperparameters)
        >>> sorted(graph.outputs), graph.states
        (['exp_avg', 'param'], ('exp_avg',))
    """
    recorder = Recorder(rule, hyperparameters, (1,) * dims if sizes is None else sizes)
    shape = _sizes(dims)
    with torch.device("cpu"), fake_tensors():
        results = _run(recorder, rule, hyperparameters, shape)
        outputs = _outputs(recorder, rule, results, shape)
        _check_kept(recorder, rule, results, outputs)
    made = {id(tensor) for tensor in recorder.keep_alive}
    kept = kept_tensor(rule.function, made) or kept_tensor(rule.bound(), made)
    if kept:
        raise RuleError(
            f"{rule.where}: in rule {rule.name}: {kept} keeps a tensor for the next call, but a rule is called once, "
            "when it is translated; make it a state, by a further positional parameter"
        )
    if recorder.idle:
        raise recorder.idle[0]
    graph = Graph(rule.name, outputs, list(recorder.guards.values()), equations=rule.__doc__ or "")
    graph.aten = recorder.fx_graph
    graph.dims = dims
    graph.branches_on_sizes = any(guard.condition.level is Level.TENSOR for guard in graph.guards)
    touched = set(graph.loads()) | set(outputs)
    graph.states = tuple(name for name in rule.state_names if name in touched)
    kinds = {name: rule.states[name].shape for name in graph.states}
    graph.scalar_states = tuple(name for name, kind in kinds.items() if kind == "scalar")
    graph.slice_states = _slice_states(rule, graph)
    graph.matrix_states = {name: matrices.SQUARES[kind] for name, kind in kinds.items() if kind in matrices.SQUARES}
    dtypes = {name: rule.states[name].dtype for name in graph.states}
    graph.state_dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    graph.reads_shape = bool(recorder.reads_shape or recorder.build.reads_shape or graph.slice_states) or any(
        map(matrices.is_matrix_work, graph.values())
    )
    return graph


def _run(recorder: Recorder, rule: Rule, hyperparameters: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """What the rule returns for fake tensors, with everything that it does on the way recorded."""
    buffers = recorder.buffers = _placeholders(recorder, rule, shape)
    values = {key: _hyper_input(recorder, key, value) for key, value in hyperparameters.items()}
    step = _hyper_input(recorder, "step", 1.0)
    if rule.uses_step:
        values["step"] = step
    token = scalar_factory.set(recorder.constant)
    across_token, precision_token = across_tensors.set(recorder.across), precision_of.set(recorder.precision)
    tracer_token = traced_by.set(recorder)
    try:
        functions = (rule.function, *(entry for value in values.values() for entry in _functions(value)))
        with refusing_chance(functions, f"in rule {rule.name}"), Reads(recorder), recorder:
            for key, value in values.items():
                if changes(value):
                    values[key] = recorder.scheduled(key, value, step)
            return rule(*buffers, **values)
    except Exception as error:
        # Operators of tensors turn a TypeError, and so ours, into "unsupported operand type(s)".
        if recorder.refused or isinstance(error, TilestepError):
            raise recorder.refused or error from None
        if not isinstance(error, (TypeError, RuntimeError, IndexError)) and not is_of_torch(error):
            raise  # the rule's own
        where = raised_at(error) or rule.where
        raise RuleError(f"{where}: in rule {rule.name}: {error}; {ALTERNATIVE}") from error
    finally:
        scalar_factory.reset(token)
        across_tensors.reset(across_token)
        precision_of.reset(precision_token)
        traced_by.reset(tracer_token)


def _functions(value: Any) -> tuple[Any, ...]:
    """The functions of the step that a hyperparameter is or has."""
    return tuple(filter(callable, value if isinstance(value, (tuple, list)) else (value,)))


def _slice_states(rule: Rule, graph: Graph) -> dict[str, Over]:
    """The row and column states, each with the dimension that it has not."""
    found: dict[str, Over] = {}
    for name in graph.states:
        from_end = {"row": 1, "column": 2}.get(rule.states[name].shape, 0)
        if from_end > graph.dims:
            raise RuleError(
                f"{rule.where}: {rule.name} uses {name}, one number per {rule.states[name].shape}, for a parameter of "
                f"{graph.dims} dimension{'s' * (graph.dims != 1)}; keep it for matrices by `if param.dim() > 1`"
            )
        if from_end:
            found[name] = (graph.dims - from_end, graph.dims - from_end + 1)
    return found


def _placeholders(recorder: Recorder, rule: Rule, shape: tuple[int, ...]) -> list[torch.Tensor]:
    build = recorder.build

    def fake(value: Value, dtype: torch.dtype = torch.float32, dims: tuple[int, ...] = shape) -> torch.Tensor:
        return recorder.placeholder(torch.empty(dims, dtype=dtype), value)

    param = fake(build.load("param"))
    grad = build.apply("mul", build.load("grad"), build.hyper("gradient_scale"))
    grad.name = "grad"
    buffers = [param, fake(grad)]
    for name in rule.state_names:
        kind = rule.states[name].shape
        if kind == "scalar":
            buffers.append(fake(build.load(name, Level.TENSOR), torch.float64, ()))
        elif kind == "row":
            over = (len(shape) - 1, len(shape))
            buffers.append(fake(build.load(name, Level.SLICE, over), dims=(*shape[:-1], 1)))
        elif kind == "column":
            over = (len(shape) - 2, len(shape) - 1)
            buffers.append(fake(build.load(name, Level.SLICE, over), dims=(*shape[:-2], 1, *shape[-1:])))
        elif kind in matrices.SQUARES:
            value = build.load(name, Level.MATRIX)
            value.space = matrices.SQUARES[kind]
            buffers.append(fake(value, dims=_state_shape(kind, shape)))
        else:
            buffers.append(fake(build.load(name)))
    return buffers


def _hyper_input(recorder: Recorder, key: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_hyper_input(recorder, f"{key}.{index}", entry) for index, entry in enumerate(value))
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        return value
    return recorder.scalar(recorder.build.hyper(key))


def _outputs(recorder: Recorder, rule: Rule, results: tuple[Any, ...], shape: tuple[int, ...]) -> dict[str, Value]:
    outputs: dict[str, Value] = {}
    names = ("param", *rule.state_names)
    shapes = [shape, *(_state_shape(rule.states[name].shape, shape) for name in rule.state_names)]
    for name, result, wanted in zip(names, results, shapes):
        label = rule.param_name if name == "param" else name
        if not isinstance(result, torch.Tensor):
            raise RuleError(f"{rule.where}: {rule.name} returns {type(result).__name__} for {label}, not a tensor")
        if tuple(result.shape) != wanted and result.dim() > 0:
            raise RuleError(
                f"{rule.where}: {rule.name} returns shape {tuple(result.shape)} for {label}; it must keep its shape"
            )
        value = recorder.value_of(result)
        if value.is_bool:
            value = recorder.build.apply("number", value)
        if name == "param" and value.level < Level.SLICE:
            if wanted and not result.dim():
                raise RuleError(
                    f"{value.line or rule.where}: {rule.name} returns one number for {label}, so all its elements "
                    f"would be equal; return a tensor of its shape, torch.full_like({label}, ...) if that is meant"
                )
            recorder.reads_shape |= not wanted  # a number is a whole parameter only where that has no dimensions
        if value.operation != "load" or value.attribute != name:
            value.name = value.name or f"new_{name}"
            outputs[name] = value
    return outputs


def _check_kept(recorder: Recorder, rule: Rule, results: Sequence[Any], outputs: Mapping[str, Value]) -> None:
    """Raise for a new parameter or state that the rule has computed and given to nobody.

    A rule that works in place returns nothing; what it gives the name of a buffer instead, as in `m = 0.9 * m + grad`,
    would be lost.
    """
    code = getattr(rule.function, "__code__", None)
    own = {f"{code.co_filename}:{line}" for *_, line in code.co_lines()} if code else set()
    buffers = (recorder.buffers[0], *recorder.buffers[2:])
    for name, result, buffer in zip(("param", *rule.state_names), results, buffers):
        label = rule.param_name if name == "param" else name
        if result is not buffer or name in outputs:
            continue
        lost = [value for value in recorder.values.values() if value.name == label and value.line in own]
        if lost:
            raise RuleError(
                f"{lost[0].line}: {rule.name} gives the name {label} to a new tensor and does not return it, so the "
                f"buffer stays as it is; change it in place ({label}.add_(...), {label}.copy_(...)), or return it"
            )


def _state_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if kind == "scalar":
        return ()
    if kind in matrices.SQUARES:
        side = shape[-2:][:1] if kind == "left" else shape[-1:]
        return (*side, *side)
    if kind == "row":
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, *shape[-1:]) if kind == "column" else shape
