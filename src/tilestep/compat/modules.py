"""Modules: their parameters, their forwards, and what `torch.compile` makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


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


def wrap_compiled_call(
    module: torch.nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None] | None:
    """Have something run around a compiled module's calls, outside of what is compiled.

    Args:
        module: a module after `module.compile()`, or what `torch.compile` has made of one; any other.
        wrapped: makes what is called from the compiled call.

    Returns:
        What takes it back; None for a module that is not compiled, or where torch keeps the compiled call elsewhere.
    """
    name = "_compiled_call_impl" if is_compiled(module) else "forward" if uncompiled(module) is not module else ""
    call = vars(module).get(name)
    if call is None:
        return None
    around = wrapped(call)
    setattr(module, name, around)

    def take_back() -> None:
        if vars(module).get(name) is around:
            setattr(module, name, call)

    return take_back


def guard_parameters(module: torch.nn.Module, guard: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Let a module look its parameters up in a dictionary of our own.

    Returns:
        Whether it does; without torch keeping them in `_parameters` nothing is changed.
    """
    entries = getattr(module, "_parameters", None)
    if not isinstance(entries, dict):
        return False
    module._parameters = guard(entries)
    return True


def watch_all_forwards(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before every module's forward, of any model; gives a handle to end that."""
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
