"""From a rule's Python to a graph: run it once on fake tensors, and take down what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compat import fake_tensors
from ..errors import RuleError, TilestepError
from ..rules import Rule
from ..rules.protocol import changes, scalar_factory, traced_by
from ..rules.scalars import across_tensors, precision_of
from . import matrices
from .ir import Graph, Level, Over, Value
from .names import is_of_torch, raised_at
from .nearest import ALTERNATIVE
from .purity import kept_tensor, refusing_chance
from .reads import Reads
from .recorder import Recorder


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
