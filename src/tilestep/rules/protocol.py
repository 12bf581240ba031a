"""Update rules: plain PyTorch functions whose signatures declare states and hyperparameters.

The first parameter is the model's parameter, the second its gradient, further positional parameters are state buffers
(their names are the `state_dict` keys), keyword-only parameters are hyperparameters with defaults, and `step` is the
count from 1.
"""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import RuleError, did_you_mean
from ..linalg.scalar_values import PYTHON_TYPES, as_python, as_scalar, traced_by
from .scalars import ScalarCalls, scalar_globals


@dataclass(frozen=True)
class Interval:
    """The valid values of a hyperparameter; a tuple hyperparameter is checked entry by entry.

    Args:
        low: the smallest value.
        high: the largest value.
        open_low: whether `low` itself is excluded.
        open_high: whether `high` itself is excluded.
        or_none: whether the hyperparameter may also be None, which turns off its use in the rule.

    Example:
        >>> 1.0 in Interval(0, 1), 1.0 in Interval(0, 1, open_high=True)
        (True, False)
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    or_none: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


def at_least(low: float, *, or_none: bool = False) -> Interval:
    """The interval of numbers from `low` up, for `ranges=` of `tilestep.rule`.

    Args:
        low: the smallest value.
        or_none: whether the hyperparameter may also be None.

    Example:
        >>> 0.1 in at_least(0), -0.1 in at_least(0), float("nan") in at_least(0)
        (True, False, False)
    """
    return Interval(low=low, or_none=or_none)


def between(
    low: float, high: float, *, open_low: bool = False, open_high: bool = True, or_none: bool = False
) -> Interval:
    """The interval from `low` to `high`, for `ranges=` of `tilestep.rule`.

    Args:
        low: the smallest value.
        high: the largest value.
        open_low: whether `low` itself is excluded.
        open_high: whether `high` itself is excluded; it is by default.
        or_none: whether the hyperparameter may also be None.

    Example:
        >>> 0.0 in between(0, 1), 1.0 in between(0, 1)
        (True, False)
    """
    return Interval(low=low, high=high, open_low=open_low, open_high=open_high, or_none=or_none)


Allowed = Callable[[Any], str]
"""A check of a hyperparameter: the requirement if a value is invalid, otherwise an empty string."""

Range = Interval | tuple[Interval, ...] | Allowed


def nonnegative(*names: str, **ranges: Range) -> dict[str, Range]:
    """The ranges of a rule: the named hyperparameters are at least 0, the keyword arguments have their own range.

    Example:
        >>> sorted(nonnegative("lr", betas=between(0, 1)))
        ['betas', 'lr']
    """
    return {**dict.fromkeys(names, at_least(0)), **ranges}


ADAM_RANGES = nonnegative("lr", "eps", "weight_decay", betas=between(0, 1))

TORCH_OPTIONS: Mapping[str, Any] = {"foreach": None, "capturable": False, "differentiable": False}
"""Options that most of torch's optimizers have."""


def one_of(*values: Any) -> Allowed:
    """A choice of values, for `ranges=` of `tilestep.rule`.

    Args:
        values: the valid values.

    Example:
        >>> one_of(None, "sum", "mean")("max")
        "it must be one of None, 'sum', 'mean'"
    """
    return lambda value: "" if value in values else f"it must be one of {', '.join(map(repr, values))}"


MATRIX_OPTIONS: Mapping[str, Any] = {"flatten": False, "heads": None, "splits": None}
"""Options of rules that work on matrices: which matrices a parameter holds.

Any param group of such a rule may set them; a rule that names them in `options` makes them arguments of its
optimizer.
"""

_SHAPES = ("param", "scalar", "row", "column", "left", "right")

_RESERVED_STATES = {
    "param": "the parameter",
    "grad": "the gradient",
    "master_param": "float32 master weights",
    "remainder_param": "the remainder of float32 master weights",
    "training_param": "the training weights while the parameters hold the averages",
}
RESERVED_HYPERPARAMETERS = {
    "numel": "the number of elements",
    "rows": "a size of the parameter",
    "columns": "a size of the parameter",
    "gradient_scale": "the factor of clipping and loss scaling",
    "machine_epsilon": "the machine epsilon of the parameter's dtype",
    "max_grad_norm": "the optimizer's clip",
    "master_weights": "the optimizer's argument",
    "state_dtype": "the optimizer's argument",
    "rounding": "the optimizer's argument",
    "seed": "the optimizer's argument",
    "skip_nonfinite": "the optimizer's argument",
    "skip_above": "the optimizer's argument",
    "rule": "the param group's rule",
    "params": "the param group's parameters",
    "param_names": "the param group's names",
}
"""Reserved names of hyperparameters, with their meaning."""


registry: dict[str, Rule] = {}
"""Every named rule, by the name of its optimizer class: `registry["AdamW"]`."""


STATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of states with the shape of the parameter."""


@dataclass(frozen=True)
class State:
    """How a state buffer starts and is stored, for `states=` of `tilestep.rule`.

    Args:
        init: a number to fill with; `"param"` for a copy of the parameter; the name of a hyperparameter for its value
            when the state is created.
        shape: `"param"` for a buffer with the parameter's shape; `"scalar"` for a number per parameter; `"row"` for a
            number per row (the last dimension reduced to 1); `"column"` for a number per column (the second-to-last
            reduced to 1); `"left"` or `"right"` for a square matrix to multiply with on that side of the parameter.
        dtype: the storage dtype. For a buffer with the parameter's shape, None means the parameter's dtype, float32
            with masters. For a number per parameter it is float32 or float64; None means float64 for float64 parameters
            and float32 otherwise. An optimizer's `state_dtype` does not change a dtype that is set here.
        signed: whether elements can be negative, for formats with blocks; None derives it from the rule's formula and
            the ranges of its hyperparameters.
        zero_if_late: the name of a hyperparameter that must be 0 when the state starts after its parameter's first
            step, as when a change of other hyperparameters switches it on; otherwise the step raises.

    Raises:
        RuleError: for an unknown shape, or a dtype that does not fit the shape.

    Example:
        >>> import torch, tilestep
        >>> @tilestep.rule(states={"average": tilestep.State("param")})
        ... def averaged(param, grad, average, *, lr=0.5):
        ...     param = param - lr * grad
        ...     return param, 0.5 * (average + param)
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = tilestep.Optimizer([weight], averaged)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> optimizer.state[weight]["average"].tolist()
        [0.75]
    """

    init: float | str = 0.0
    shape: str = "param"
    dtype: torch.dtype | None = None
    signed: bool | None = None
    zero_if_late: str | None = None

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise RuleError(f"State(shape={self.shape!r}): it must be one of {', '.join(_SHAPES)}")
        if not isinstance(self.init, (int, float, str)):
            raise RuleError(f"State({self.init!r}): init must be a number, 'param', or the name of a hyperparameter")
        if self.dtype is None or (self.shape == "scalar" and self.dtype in (torch.float32, torch.float64)):
            return
        if self.shape == "scalar":
            raise RuleError(
                f"dtype={self.dtype} of a state: shape='scalar' supports float32 and float64; use shape='param' for "
                "other floating point types"
            )
        if not (self.shape == "param" and self.dtype.is_floating_point):
            raise RuleError(f"dtype={self.dtype} of a state: it must be a floating point type, with shape='param'")
        if self.dtype not in STATE_DTYPES:
            *others, last = (str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
            raise RuleError(f"dtype={self.dtype} of a state: it must be {', '.join(others)} or {last}")


@dataclass(eq=False, repr=False, kw_only=True)
class Rule:
    """An update rule, made by `tilestep.rule`: on tensors the reference implementation, and traced into kernels.

    Attributes:
        name: the name in `tilestep.registry`, or the function's name.
        composition: for a rule derived from another, the function and arguments that derive it again on unpickling.

    Example:
        >>> import torch, tilestep
        >>> sgd = tilestep.registry["SGD"]
        >>> tuple(sgd.states)
        ('momentum_buffer',)
    """

    function: Callable[..., Any] = field(kw_only=False)
    name: str = ""
    states: dict[str, State] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    keyword_only: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    evaluation: Callable[..., Any] | None = None
    fallback: str | None = None
    uncounted: bool = False
    at_once: bool = False
    numbered: int = 0
    saved: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    composition: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function, updated=())
        self.__name__: str = getattr(self.function, "__name__", "rule")
        self.name = self.name or self.__name__
        self._bound: Callable[..., Any] | None = None
        self._read_signature()
        declared = self.states
        self.states = {state: declared.get(state, State()) for state in self.state_names}
        self._check_declaration(declared)

    def _read_signature(self) -> None:
        positional: list[str] = []
        self.hyperparameters: dict[str, Any] = {}
        self.uses_step = False
        for parameter in inspect.signature(self.function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._refuse(f"*{parameter.name} is not allowed: name every state and hyperparameter")
            if parameter.name == "step":
                self.uses_step = True
            elif parameter.kind is parameter.KEYWORD_ONLY:
                if parameter.default is parameter.empty:
                    raise self._refuse(f"hyperparameter {parameter.name!r} needs a default")
                self.hyperparameters[parameter.name] = parameter.default
            elif parameter.default is not parameter.empty and parameter.default is not None:
                raise self._refuse(
                    f"{parameter.name}={parameter.default!r} is among the state buffers; put a "
                    "bare * before the hyperparameters"
                )
            else:
                positional.append(parameter.name)
        if len(positional) < 2:
            raise self._refuse(f"{self.__name__}() needs at least a parameter and a gradient, in that order")
        self.buffer_names, self.state_names = tuple(positional), tuple(positional[2:])

    def _check_declaration(self, declared: Mapping[str, State]) -> None:
        """Raise for unknown or reserved names, defaults of unsupported types, and invalid initial states."""
        if unknown := sorted(set(declared) - set(self.state_names)):
            raise self._refuse(f"states= names {unknown}, which are not parameters of {self.__name__}()")
        for kind, names, taken in (
            ("state", self.states, _RESERVED_STATES),
            ("hyperparameter", self.hyperparameters, RESERVED_HYPERPARAMETERS),
        ):
            for name in names:
                if name in taken:
                    raise self._refuse(f"the {kind} {name!r} needs another name: it is reserved for {taken[name]}")
        for name, default in self.hyperparameters.items():
            if isinstance(default, (dict, set)) or (isinstance(default, torch.Tensor) and default.numel() != 1):
                raise self._refuse(
                    f"hyperparameter {name!r} is a {type(default).__name__}; it must be a number, a tensor of one "
                    "element, a bool, a string, None, or a tuple of these"
                )
        for name, start in self.states.items():
            if isinstance(start.init, str) and start.init not in ("param", *self.hyperparameters):
                raise self._refuse(
                    f"state {name!r} has init={start.init!r}, which is neither a hyperparameter nor 'param'"
                )
            if start.zero_if_late not in (None, *self.hyperparameters):
                raise self._refuse(
                    f"state {name!r} has zero_if_late={start.zero_if_late!r}, which is not a hyperparameter"
                )
        if unknown := sorted(set(self.ranges) - set(self.hyperparameters)):
            possible = ", ".join(self.hyperparameters)
            raise self._refuse(f"ranges= names {unknown}, which are not hyperparameters ({possible})")
        for name, allowed in self.ranges.items():
            default = self.hyperparameters[name]
            is_several = isinstance(allowed, tuple) and (default is None or isinstance(default, (tuple, list)))
            entries: Any = allowed if is_several else (allowed,)
            is_whole = not is_several or default is None or len(entries) == len(default)
            if not callable(allowed) and not (is_whole and all(isinstance(entry, Interval) for entry in entries)):
                raise self._refuse(f"ranges= of {name!r} is {allowed!r}; use tilestep.at_least, between or Interval")

    @property
    def where(self) -> str:
        """The rule's file and first line, for messages.

        Example:
            >>> file, _, line = registry["SGD"].where.rpartition(":")
            >>> file.endswith("sgd.py"), line.isdigit()
            (True, True)
        """
        code = getattr(self.function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)

    def _refuse(self, reason: str) -> RuleError:
        return RuleError(f"{self.where}: {reason}")

    @property
    def counts_steps(self) -> bool:
        """Whether torch's optimizer of this name stores a step count; without a count, missing states are created.

        Example:
            >>> registry["AdamW"].counts_steps, registry["SGD"].counts_steps
            (True, False)
        """
        return self.uses_step and not self.uncounted

    def check(self, hyperparameters: Mapping[str, Any]) -> None:
        """Validate hyperparameters; a function of the step is checked by its value at step 1.

        Args:
            hyperparameters: values by name.

        Raises:
            ValueError: for a value outside its range, NaN, or a tuple of another length.
            TypeError: for an unknown hyperparameter.

        Example:
            >>> import tilestep
            >>> try:
            ...     tilestep.registry["SGD"].check({"lr": -1.0})
            ... except ValueError as error:
            ...     print("lr" in str(error))
            True
        """
        for key, value in hyperparameters.items():
            value = value if type(value) in PYTHON_TYPES else as_python(value)
            if key not in self.hyperparameters:
                known = did_you_mean(key, self.hyperparameters) or f"it has {', '.join(self.hyperparameters)}"
                raise TypeError(f"{self.name} has no hyperparameter {key!r}; {known}")
            allowed = self.ranges.get(key)
            if callable(allowed):
                if wrong := allowed(value):
                    raise ValueError(f"Invalid {key}: {value!r}; {wrong}")
                continue
            entries = value if isinstance(value, (tuple, list)) else (value,)
            default = self.hyperparameters[key]
            if isinstance(default, (tuple, list)) and len(entries) != len(default):
                raise ValueError(f"Invalid {key}: {value}; it takes {len(default)} values")
            for index, entry in enumerate(entries):
                label = f"{key}[{index}]" if isinstance(value, (tuple, list)) else key
                if callable(entry):
                    entry, label = float(at_step(entry, 1.0, label)), f"{label} at step 1"
                if isinstance(entry, bool) or not isinstance(entry, (int, float)):
                    continue
                interval = self.range_of(key, index)
                if entry not in interval or math.isnan(entry):
                    requirement = str(interval) if key in self.ranges else "a number"
                    raise ValueError(f"Invalid {label}: {entry}; it must be {requirement}")

    def range_of(self, key: str, index: int = 0) -> Interval:
        """The valid values of a hyperparameter.

        Args:
            key: the hyperparameter.
            index: the entry, for a tuple.

        Example:
            >>> import tilestep
            >>> str(tilestep.registry["AdamW"].range_of("betas", 1))
            'in [0, 1)'
        """
        interval = self.ranges.get(key, Interval())
        interval = interval[index] if isinstance(interval, tuple) else interval
        return interval if isinstance(interval, Interval) else Interval()

    def __call__(self, *buffers: Any, **hyperparameters: Any) -> tuple[Any, ...]:
        """Return the new values of the parameter and of all state buffers, computed by the rule's PyTorch code."""
        names = self.buffer_names
        if len(buffers) != len(names):
            raise TypeError(f"{self.__name__}() takes {len(names)} buffers ({', '.join(names)}), got {len(buffers)}")
        device = buffers[0].device if isinstance(buffers[0], torch.Tensor) else None
        values = {key: as_scalar(value, device) for key, value in {**self.hyperparameters, **hyperparameters}.items()}
        for key in [key for key, value in values.items() if changes(value)]:
            if "step" not in values:
                raise TypeError(f"{self.__name__}(): {key} is a function of the step, so step= is required")
            values[key] = at_step(values[key], values["step"], key)
        if "step" in values and not self.uses_step:
            del values["step"]
        tracer = traced_by.get()
        if tracer is None:
            with ScalarCalls():
                return self._returned(self.bound()(*buffers, **values), buffers)
        before = tracer.value_of(buffers[0])
        result = self.bound()(*buffers, **values)
        if result is None and tracer.value_of(buffers[0]) is before:
            tracer.no_ops.append(
                self._refuse(
                    f"{self.__name__}() returns nothing and does not change {names[0]}, so nothing would train; "
                    f"return the new values ({', '.join((names[0], *self.state_names))}), or change {names[0]} in "
                    f"place ({names[0]}.sub_(...))"
                )
            )
        return self._returned(result, buffers)

    def evaluated(self, param: Any, states: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> Any:
        """Return the weights to evaluate and save: an average that the rule keeps, or the parameter itself.

        Args:
            param: the training weights.
            states: the parameter's state buffers by name.
            hyperparameters: its group's hyperparameters, and `step` if any of them is a function of the step.

        Returns:
            A tensor like `param`; it may be `param` or one of the states itself, so copy it before writing.

        Example:
            >>> import torch
            >>> rule = registry["ScheduleFreeSGD"]
            >>> rule.evaluated(torch.tensor([1.2]), {"z": torch.tensor([3.0])}, {"momentum": 0.9})
            tensor([1.])
        """
        if self.evaluation is None:
            return param
        step = hyperparameters.get("step", 1.0)
        values = {**{key: at_step(value, step, key) for key, value in hyperparameters.items()}, **states}
        _, *names = inspect.signature(self.evaluation).parameters
        return self.evaluation(param, **{name: values[name] for name in names})

    def _returned(self, result: Any, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
        updated = (buffers[0], *buffers[2:])
        if result is None:
            return updated
        if not isinstance(result, (tuple, list)):
            result = (result,)
        if len(result) != len(updated):
            names = ", ".join((self.buffer_names[0], *self.state_names))
            raise self._refuse(
                f"{self.__name__}() returned {len(result)} value{'s' * (len(result) != 1)}, "
                f"it must return {len(updated)}: {names} (or None when it works in place)"
            )
        return tuple(result)

    def bound(self) -> Callable[..., Any]:
        """Return the function with `math`, `min` and similar functions replaced by versions that accept 0-dim tensors.

        Example:
            >>> import math, torch
            >>> @rule
            ... def falling(param, grad, *, lr=0.1, step):
            ...     return param - lr / math.sqrt(step) * grad
            >>> falling.bound()(torch.ones(1), torch.ones(1), lr=0.5, step=torch.tensor(4.0))
            tensor([0.7500])
        """
        if self._bound is None:
            self._bound = scalar_globals(self.function)
        return self._bound

    def __repr__(self) -> str:
        return f"<rule {self.name} at {self.where}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if registry.get(self.name) is self:
            return _registered, (self.name,)
        if self.composition is not None:
            composer, *arguments = self.composition
            return composer, tuple(arguments)
        reference = self.__module__, getattr(self.function, "__qualname__", self.__name__)
        try:
            found = _by_reference(*reference)
        except (ValueError, AttributeError, ImportError):
            found = None
        if found is not self:
            raise pickle.PicklingError(
                f"cannot pickle {self!r}: it is not {self.__module__}.{reference[1]}; decorate a function of a "
                "module with @tilestep.rule, and keep its name"
            )
        return _by_reference, reference


def _registered(name: str) -> Rule:
    if name not in registry:
        raise RuleError(
            f"no rule is registered as {name!r}: first import the module that defines it with "
            f"@tilestep.rule(name={name!r})"
        )
    return registry[name]


def _by_reference(module: str, qualname: str) -> Any:
    return pkgutil.resolve_name(f"{module}:{qualname}")


def changes(value: Any) -> bool:
    """Whether a hyperparameter, or an entry of a tuple, is a function of the step.

    Example:
        >>> changes(0.1), changes((0.9, lambda step: 1 - 1 / step))
        (False, True)
    """
    return any(map(callable, value)) if isinstance(value, (tuple, list)) else callable(value)


def at_step(value: Any, step: Any, name: str = "the function") -> Any:
    """Return the value of a hyperparameter at a step: functions of the step are called, in a tuple entry by entry.

    Args:
        value: a hyperparameter.
        step: the count from 1: a number, or a 0-dim tensor.
        name: the hyperparameter's name in messages.

    Returns:
        The value itself if it is not a function, else a 0-dim float64 tensor.

    Raises:
        RuleError: for a function that does not return a single number.

    Example:
        >>> at_step((0.9, lambda step: 1 - 1 / step), 4)
        (0.9, tensor(0.7500, dtype=torch.float64))
    """
    if isinstance(value, (tuple, list)):
        return tuple(at_step(entry, step, f"{name}[{index}]") for index, entry in enumerate(value))
    if not callable(value):
        return value
    # Scalars that the function creates are on the step count's device, not on torch's default device.
    with step.device if isinstance(step, torch.Tensor) else torch.device("cpu"):
        try:
            result = as_scalar(scalar_globals(value)(as_scalar(step)))
        except TypeError as error:
            raise RuleError(f"{name} is a function of the step, but cannot be called with it: {error}") from error
    # Read strides, because reading the number of dimensions would specialize the graph on it.
    if not isinstance(result, torch.Tensor) or result.stride():
        shown = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        raise RuleError(f"{name} is a function of the step and must return one number, not {shown}")
    return result


def _check_free(name: str, made: Rule) -> None:
    """Raise for a user's rule with the name of a tilestep rule: optimizers and checkpoints refer to rules by name."""
    package, taken = __name__.rpartition(".")[0], registry.get(name)
    if taken is not None and taken.__module__.startswith(f"{package}.") and made.__module__ != taken.__module__:
        raise RuleError(
            f"{made.where}: tilestep has a rule called {name} ({taken.where}), and checkpoints name rules: take "
            "another name, or leave out name="
        )


def rule(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    states: Mapping[str, State] | None = None,
    ranges: Mapping[str, Range] | None = None,
    options: Mapping[str, Any] | None = None,
    keyword_only: tuple[str, ...] = (),
    positional: tuple[str, ...] = (),
    evaluation: Callable[..., Any] | None = None,
    fallback: str | None = None,
    uncounted: bool = False,
    at_once: bool = False,
    numbered: int = 0,
    saved: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    by_position: tuple[str, ...] = (),
    others: str | None = None,
) -> Any:
    """Make an update rule from a function written in plain single-tensor PyTorch.

    Args:
        function: `f(param, grad, *states, *, hyperparameter=default, ..., step)`, returning the new parameter and the
            new states in order, or None if it works in place. Inside it every value is float32 (float64 for float64
            parameters); hyperparameters and `step` are 0-dim float64.
        name: the name of the optimizer class for the rule; a named rule enters the registry and replaces an earlier
            rule of this name, except a built-in rule.
        states: initialization of state buffers; unnamed buffers start as zeros with the parameter's shape.
        ranges: the valid values of hyperparameters: an interval; for a tuple, an interval for all entries or a tuple of
            intervals; or a function of the value that returns the requirement, or "" if the value is valid.
        options: additional keys of `param_groups` that the rule does not read.
        keyword_only: hyperparameters that the class accepts only by keyword.
        positional: options, and names of `keyword_only`, that the class also accepts by position, after all others.
        evaluation: if the weights to evaluate are not the parameter itself: a function that returns them from the
            parameter and, by name, the states and hyperparameters that it needs. Called by `Rule.evaluated`.
        fallback: for a rule that works on matrices only, the name of the rule for a model's other parameters.
        uncounted: whether torch's optimizer of this name keeps no step count: a checkpoint without a count then loads
            as a training in progress, although the rule reads `step`.
        at_once: whether torch's optimizer of this name creates its state in the constructor, so that checkpoints have
            it before any step.
        numbered: number of the rule's states in bitsandbytes' optimizer of this name, which numbers them in this order.
        saved: a function from a param group to keys that checkpoints replace, in the form that torch's optimizer of
            this name needs.
        by_position: the earlier name of `positional`.
        others: the earlier name of `fallback`.

    Raises:
        RuleError: if the signature does not follow the protocol, or a built-in rule has the name.

    Example:
        >>> import torch, tilestep
        >>> @tilestep.rule
        ... def sign_descent(param, grad, *, lr=0.1):
        ...     return param - lr * grad.sign()
        >>> sign_descent(torch.tensor([1.0]), torch.tensor([3.0]))
        (tensor([0.9000]),)
    """

    def make(target: Callable[..., Any]) -> Rule:
        if not callable(target):
            raise RuleError(f"tilestep.rule requires a function, not {target!r}")
        made = Rule(
            target,
            name=name or "",
            states=dict(states or {}),
            ranges=dict(ranges or {}),
            options=dict(options or {}),
            keyword_only=tuple(keyword_only),
            positional=tuple(positional or by_position),
            evaluation=evaluation,
            fallback=fallback or others,
            uncounted=uncounted,
            at_once=at_once,
            numbered=numbered,
            saved=saved,
        )
        if name is not None:
            _check_free(name, made)
            registry[name] = made
        return made

    return make if function is None else make(function)
