"""Triton: launching a compiled kernel with addresses, compiling several at a time, the hash of its own compiler."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

_KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled launcher takes the arguments that `direct_launch` gives it; others go the public way."""


def by_numpy(name: str, *values: Any) -> Any:
    """A function of numpy's, or of Python's `math`, on tensors of Triton's interpreter."""
    from triton.language import tensor
    from triton.runtime.interpreter import TensorHandle

    arrays = [value.handle.data for value in values]
    function = getattr(np, name, None) or np.vectorize(_MATH[name], otypes=[arrays[0].dtype])
    with np.errstate(all="ignore"):
        result = np.asarray(function(*arrays)).astype(arrays[0].dtype)
    return tensor(TensorHandle(result, values[0].handle.dtype), values[0].type)


# Triton refuses to compile a function that refers to plain functions, even in a branch that is not compiled.
by_numpy.__triton_builtin__ = True  # type: ignore[attr-defined]

_MATH = {
    "erfc": math.erfc,
    "lgamma": lambda number: math.inf if number <= 0 and number % 1 == 0 else math.lgamma(number),
}


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], device: torch.device, constants: tuple[Any, ...]
) -> Callable[[tuple[torch.Tensor | float, ...]], bool] | None:
    """What launches a kernel of a known Triton with addresses in place of tensors, or None.

    Given tensors, Triton asks each for its address and the driver whether it may be used: half the cost of a launch.
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
    """Whether a profiler wants to know of launches. Triton keeps a chain of such functions, or None."""
    return hook is not None and bool(getattr(hook, "calls", True))


def compile_together(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    """Let a known Triton compile several kernels at a time into its caches; others do nothing here.

    What fails leaves no trace: the next launch of that kernel compiles it, and sees why.
    """
    import triton

    if threads < 2 or len(compilations) < 2 or not triton.__version__.startswith(_KNOWN_TRITON):
        return
    # Triton notes in a context variable that compilations are put off, and would forget to clear it after some errors.
    with contextlib.suppress(Exception):
        contextvars.copy_context().run(_compile_in_threads, compilations, threads)


def _compile_in_threads(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    import triton

    with (
        ThreadPoolExecutor(threads, thread_name_prefix="tilestep-build") as pool,
        triton.AsyncCompileMode(_Compilers(pool), ignore_errors=True),
    ):
        for compilation in compilations:
            compilation()


class _Compilers:
    """What Triton hands compilations to: behind each it also builds the C that launches such kernels, once a signature.

    Triton does that when a kernel is loaded, one after the other; it takes about as long as compiling the kernel.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._signatures: set[tuple[object, ...]] = set()

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:
        """Run a compilation in one of the threads."""
        return self._pool.submit(self._compile, compilation)

    def _compile(self, compilation: Callable[[], Any]) -> Any:
        kernel = compilation()
        # Without it, loading the kernel builds it.
        with contextlib.suppress(Exception):
            self._build_launcher(kernel)
        return kernel

    def _build_launcher(self, kernel: Any) -> None:
        from triton.runtime import driver

        signature = tuple(kernel.src.signature.values())
        with self._lock:
            if signature in self._signatures:
                return
            self._signatures.add(signature)
        driver.active.launcher_cls(kernel.src, kernel.metadata)


def triton_hash() -> tuple[Callable[[], str], Path] | None:
    """What computes Triton's hash of its compiler, and Triton's folder."""
    try:
        from triton.runtime import cache

        compute = cache.triton_key
        return None if compute.cache_info().currsize else (compute, Path(cache.__file__).parents[1])
    except (ImportError, AttributeError):
        return None


def replace_triton_hash(known: str) -> None:
    """Let Triton take this for the hash of its compiler."""
    from triton.runtime import cache

    cache.triton_key = functools.lru_cache(lambda: known)
