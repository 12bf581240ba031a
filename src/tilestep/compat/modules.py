"""Modules as torch, torch.compile and FSDP2 keep them: look-ups, compiled ones, flat parts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def opaque(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A Python function as one call that compilers leave alone; compilers are not imported before it is called.

    Where torch has no such wrapper, they are imported at once.

    Example:
        >>> opaque(lambda one, other: one + other)(1, 2)
        3
    """
    lazily = getattr(torch, "_disable_dynamo", None)
    return torch.compiler.disable(function) if lazily is None else lazily(function)


def fsdp_module_type() -> Any | None:
    """The class of modules that FSDP2 shards, or None where it was not imported: then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_flat_part(param: Any) -> bool:
    """Whether a parameter is a flat one of FSDP1 or, with `use_orig_params=True`, a piece of one."""
    return bool(getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False))


def before_gathering(module: Any, prepare: Callable[[list[Any]], None]) -> bool:
    """Have something called before an FSDP2 module's parameters are read to be gathered, whoever asks for that.

    A hook on the module's forward would not do: other modules may prefetch its parameters.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    groups = [group for group in groups if group is not None]
    if state is None or not all(callable(getattr(group, "unshard", None)) for group in groups):
        return False
    for group in groups:
        group.unshard = _prepared_unshard(group, group.unshard, prepare)
    return True


def _prepared_unshard(group: Any, unshard: Callable[..., Any], prepare: Callable[[list[Any]], None]) -> Any:
    @functools.wraps(unshard)
    def prepared(async_op: bool = False) -> Any:
        prepare(_gathering_streams(group, async_op))
        return unshard(async_op)

    return prepared


def _gathering_streams(group: Any, async_op: bool) -> list[Any]:
    if getattr(getattr(group, "device", None), "type", "cpu") != "cuda":
        return []
    current = torch.cuda.current_stream(group.device)
    try:
        streams = list(group.comm_ctx.get_all_gather_streams(async_op, group._training_state))
        gathers = group._all_gather_process_group.size() > 1
    except (AttributeError, AssertionError):
        # Before its first forward, or where torch keeps its streams otherwise.
        known = vars(getattr(group, "comm_ctx", None) or object).values()
        streams, gathers = [each for each in known if isinstance(each, torch.cuda.Stream)], False
    # One rank alone copies its parameters on the current stream.
    return streams if gathers else [*streams, current]


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` was given, where this is what came out."""
    try:
        from torch._dynamo.eval_frame import OptimizedModule
    except ImportError:
        return module
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _name_of_compiled_call(module: torch.nn.Module) -> str:
    return "_compiled_call_impl" if is_compiled(module) else "forward" if uncompiled(module) is not module else ""


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What runs when a compiled module is called; None if it is not compiled, or where torch keeps that elsewhere.

    Compiled is a module after `module.compile()`, or what `torch.compile` has made of one.
    """
    return vars(module).get(_name_of_compiled_call(module))


def replace_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Have something else run in its place, outside of what is compiled."""
    setattr(module, _name_of_compiled_call(module), call)


def guard_parameters(module: torch.nn.Module, guard: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Let a module look its parameters up in a dictionary of our own."""
    entries = getattr(module, "_parameters", None)
    if not isinstance(entries, dict):
        return False
    module._parameters = guard(entries)
    return True


def kept_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own parameters as torch keeps them; empty where it keeps none, or does it otherwise."""
    return vars(module).get("_parameters") or {}


def watch_all_forwards(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before every module's forward, of any model; a handle ends that."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    return register_module_forward_pre_hook(before)


def watch_all_parameters(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before any module gets a parameter; a handle ends that, None without such calls."""
    from torch.nn.modules import module as modules

    register = getattr(modules, "register_module_parameter_registration_hook", None)
    return None if register is None else register(lambda module, name, param: before(module, param))


def watch_all_submodules(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before any module gets a submodule; a handle ends that, None without such calls."""
    from torch.nn.modules import module as modules

    register = getattr(modules, "register_module_module_registration_hook", None)
    if register is None:
        return None

    def called(module: torch.nn.Module, name: str, submodule: Any) -> None:
        if submodule is not None:
            before(module, submodule)

    return register(called)


def is_dropping_gradients() -> bool:
    """Whether this is called by `Module.zero_grad`, which goes through parameters and reads none of them.

    Said by the call stack: False where torch goes through them otherwise.
    """
    code, frame = torch.nn.Module.zero_grad.__code__, sys._getframe(1)
    for _ in range(10):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
