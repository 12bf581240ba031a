"""What a rule must not do, since it runs once: draw numbers and ask for the time in Python, and keep tensors."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import RuleError

_MODULES = frozenset({"random", "time", "datetime", "secrets", "uuid", "os", "numpy", "numpy.random"})
_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "thread_time", "localtime", "gmtime"})
_DEPTH = 3
_ONCE = (
    "is called once, when the rule is translated, and its result would never change; make it a hyperparameter that you "
    "set before each step"
)


@contextlib.contextmanager
def refusing_chance(functions: Sequence[Any], describe: str) -> Iterator[None]:
    """A block in which calls of `random`, numpy's generators and clocks raise, if these functions may make any.

    What they give would be a constant of the kernel. Calls are watched only where a function refers to such a module,
    for watching slows everything down.
    """
    if not any(_may_call(function) for function in functions):
        yield
        return

    def watch(frame: types.FrameType, event: str, called: Any) -> None:
        name = _chance(called) if event == "c_call" else _chance_of_frame(frame) if event == "call" else ""
        caller: types.FrameType | None = frame.f_back if event == "call" else frame
        while caller is not None and caller.f_globals.get("__name__") in _MODULES:
            caller = caller.f_back
        if not name or caller is None or _is_library(caller.f_globals.get("__name__", "")):
            return
        raise RuleError(f"{caller.f_code.co_filename}:{caller.f_lineno}: {describe}: {name} {_ONCE}")

    before, drawn = sys.getprofile(), _numpy_states(functions)
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
    if _numpy_states(functions) != drawn:  # numpy's functions are no calls to Python's profiling
        raise RuleError(f"{describe}: a number of numpy.random {_ONCE}")


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "tilestep", "contextlib", "importlib", "threading", "logging")


def _chance(called: Any) -> str:
    """The name of a built-in function whose result depends on chance or time; empty for others."""
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


def _chance_of_frame(frame: types.FrameType) -> str:
    """The name of a function of Python's `random` that is being called; empty for others."""
    return f"random.{frame.f_code.co_name}" if frame.f_globals.get("__name__") == "random" else ""


def _referred(function: Any) -> dict[str, Any]:
    """What a function's code refers to by name outside of itself."""
    if not isinstance(function, types.FunctionType):
        return {}
    code = function.__code__
    found = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    found.update(function.__kwdefaults__ or {})
    return {**found, **{f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}}


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_helper(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not _is_library(value.__module__ or "")


def _may_call(function: Any, depth: int = _DEPTH) -> bool:
    for value in _referred(function).values():
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        owner = type(getattr(value, "__self__", value)).__module__
        if module in _MODULES or owner.partition(".")[0] in ("random", "numpy"):
            return True
        if depth and _is_helper(value) and _may_call(value, depth - 1):
            return True
    return False


def _numpy_states(functions: Iterable[Any], depth: int = _DEPTH) -> list[str]:
    """Where numpy's generators are that functions refer to."""
    found: list[str] = []
    for function in functions:
        for value in _referred(function).values():
            source = getattr(value, "random", value) if isinstance(value, types.ModuleType) else value
            if getattr(source, "__name__", type(source).__module__).startswith("numpy.random"):
                if hasattr(source, "get_state"):
                    found.append(str(source.get_state()))
                elif hasattr(source, "bit_generator"):
                    found.append(str(source.bit_generator.state))
            elif depth and _is_helper(value):
                found += _numpy_states([value], depth - 1)
    return found


def kept_tensor(function: Any, made: Collection[int], depth: int = _DEPTH) -> str:
    """The name under which a function keeps a tensor of the trace for its next call; empty where it keeps none."""
    for name, value in _referred(function).items():
        if any(id(tensor) in made for tensor in _tensors(value)):
            return name
        inner = kept_tensor(value, made, depth - 1) if depth and _is_helper(value) else ""
        if inner:
            return inner
    return ""


def _tensors(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple, set)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, depth - 1)
    elif depth and isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.ModuleType):
        yield from _tensors(dict(value.__dict__), depth)
