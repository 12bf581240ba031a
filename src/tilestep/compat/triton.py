"""Triton: launching a compiled kernel with addresses, and the hash of its own compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["direct_launch", "replace_triton_hash", "triton_hash"]

_KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled launcher takes the arguments that `direct_launch` gives it; others go the public way."""


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], device: torch.device, constants: tuple[Any, ...]
) -> Callable[[tuple[torch.Tensor | float, ...]], bool] | None:
    """What launches a kernel of a known Triton with addresses in place of tensors, or None.

    Given tensors, Triton asks each for its address and the driver whether it may be used: half the cost of a launch.

    Args:
        compiled: the kernel, as Triton compiled it.
        grid: number of programs in each dimension.
        device: where the arguments live.
        constants: values of the kernel's constants, in order.

    Returns:
        A function that tells whether it has launched; not while somebody has hooks on launches.
    """
    import triton
    from triton import knobs
    from triton.runtime import driver

    launcher: Any = getattr(compiled, "run", None)
    sizes = [getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    if not triton.__version__.startswith(_KNOWN_TRITON) or any(sizes):
        return None
    launch, current_stream, runtime = launcher.launch, driver.active.get_current_stream, knobs.runtime
    behind_stream = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    before_arguments = (*behind_stream, compiled.packed_metadata, None, None, None)

    def direct(arguments: tuple[torch.Tensor | float, ...]) -> bool:
        if _is_hooked(runtime.launch_enter_hook) or _is_hooked(runtime.launch_exit_hook):
            return False
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        index = torch.cuda.current_device() if device.index is None else device.index
        launch(*grid, current_stream(index), *before_arguments, *values, *constants)
        return True

    return direct


def _is_hooked(hook: Any) -> bool:
    """Whether somebody wants to know of launches: a profiler. Triton keeps a chain of such functions, or None."""
    return hook is not None and bool(getattr(hook, "calls", True))


def triton_hash() -> tuple[Callable[[], str], Path] | None:
    """What computes Triton's hash of its compiler, and Triton's folder.

    Returns:
        None where Triton keeps its hash otherwise, or has computed it already.
    """
    try:
        from triton.runtime import cache

        compute = cache.triton_key
        return None if compute.cache_info().currsize else (compute, Path(cache.__file__).parents[1])
    except (ImportError, AttributeError):
        return None


def replace_triton_hash(known: str) -> None:
    """Let Triton take this for the hash of its compiler.

    Args:
        known: what the function of `triton_hash` once returned.
    """
    from triton.runtime import cache

    cache.triton_key = functools.lru_cache(lambda: known)
