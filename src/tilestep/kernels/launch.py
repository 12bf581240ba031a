"""Launches of Triton kernels at little host cost: modules in the cache, kernels compiled together."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from ..compat import compile_together, direct_launch, replace_triton_hash, triton_hash
from ..devices import has_streams
from ..errors import BuildError
from .cache import cached, content_key, count_build, private_folder, publish, text_builder


def keep_triton_key() -> None:
    """Take Triton's hash of itself from the cache: each process would hash the 200 MB compiler (0.3 s)."""
    compute_and_root = triton_hash()
    if compute_and_root is None:
        return  # another Triton stores its hash differently
    compute, root = compute_and_root
    try:
        files = [*root.glob("_C/libtriton.*"), *root.glob("*/*.py"), *root.glob("language/**/*.py")]
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
        with cached(f"triton-{content_key(repr(states))}.key", text_builder(compute)) as file:
            key = file.content.decode()
    except (OSError, BuildError):
        return
    replace_triton_hash(key)


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def load_module(title: str, source: str) -> ModuleType:
    """Make a module of Triton source; the source is also written to the cache, for debuggers and profilers."""
    if not available():
        raise BuildError("CUDA tensors require Triton >= 3.6: pip install triton")
    global _triton_folder
    if os.environ.get("TRITON_CACHE_DIR") in (None, _triton_folder):  # otherwise the user has chosen one
        _triton_folder = os.environ["TRITON_CACHE_DIR"] = str(private_folder("triton"))
    import torch
    import triton

    keep_triton_key()
    key = content_key(source, triton.__version__, torch.__version__)
    name = f"tilestep_generated_{title}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    path = str(publish(f"{title}-{key}.py", source))
    # Triton reads source through linecache; an entry without a time is not reread from the file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    # Last: another thread must not see an incomplete module, nor later steps the remains of an error.
    sys.modules[name] = module
    return module


_triton_folder: str | None = None

EXACT = {"enable_fp_fusion": False}
"""Options of kernels whose elements must not depend on their place in a tile: otherwise one loop fuses a product into a
sum where the loop for the tail does not."""

_THREADS = "TILESTEP_BUILD_THREADS"


class Launcher:
    """A `triton.jit` kernel with its grid, device, constants and options; called with the run-time arguments.

    `kernel[grid](...)` inspects every argument in each call to find the compiled kernel. A launcher does so once;
    later calls launch the compiled kernel.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        device: torch.device,
        constants: Mapping[str, Any] | None = None,
        *,
        num_warps: int = 4,
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._device = device
        self._constants = dict(constants or {})
        self._options = {"num_warps": num_warps, **options}
        self._constant_values = tuple(self._constants.values())
        self._run: Any = None
        self._direct: Callable[[tuple[torch.Tensor | float, ...]], bool] | None = None
        self._proven = False
        self._compiles = has_streams(device) and hasattr(kernel, "warmup") and hasattr(kernel, "params")
        if self._compiles:
            _require_one_specialization(kernel, self._constants)

    def __call__(self, *arguments: torch.Tensor | float) -> None:
        """Launch on the device's current stream."""
        device = self._device
        if not has_streams(device) or device.index is None or device.index == torch.cuda.current_device():
            self._launch(arguments)
        else:
            with torch.cuda.device(device):
                self._launch(arguments)

    @property
    def is_built(self) -> bool:
        """Whether a call compiles and loads nothing."""
        return self._run is not None or not self._compiles or self._grid[0] == 0

    def build(self, *arguments: torch.Tensor | float) -> None:
        """Compile and load for arguments of these types without a launch, for example before a CUDA graph capture."""
        if not self.is_built:
            with torch.cuda.device(self._device):
                self._run = self._compiled_runner(arguments)

    def compile(self, arguments: Sequence[torch.Tensor | float]) -> Any:
        """Compile for arguments of these types, or find it in Triton's caches; not loaded, and not counted."""
        return self._kernel.warmup(*arguments, grid=self._grid, **self._constants, **self._options)

    def _launch(self, arguments: tuple[torch.Tensor | float, ...]) -> None:
        if self._grid[0] == 0:
            return
        if not self._compiles:
            self._kernel[self._grid](*arguments, **self._constants, **self._options)
            return
        if self._run is None:
            self._run = self._compiled_runner(arguments)
        if self._proven:
            if not self._launched_directly(arguments):
                self._run(*arguments, *self._constant_values)
            return
        try:
            self._run(*arguments, *self._constant_values)
        except (AttributeError, TypeError):
            # Compiled kernels of other Triton versions have other arguments; they raise before anything runs.
            self._compiles = False
            self._kernel[self._grid](*arguments, **self._constants, **self._options)
        self._proven = True

    def _launched_directly(self, arguments: tuple[torch.Tensor | float, ...]) -> bool:
        if self._direct is None:
            return False
        try:
            return self._direct(arguments)
        except TypeError:
            # Launchers of other Triton versions have other arguments; they raise before anything runs.
            self._direct = None
            return False

    def _compiled_runner(self, arguments: tuple[torch.Tensor | float, ...]) -> Any:
        if any(isinstance(argument, int) for argument in arguments):
            raise TypeError("Triton specializes kernels on integers; pass them in a tensor or in the constants")
        with _builds_counted():
            compiled = self.compile(arguments)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        run = compiled[self._grid]
        self._direct = direct_launch(compiled, self._grid, self._device, self._constant_values)
        return run


Launch = tuple[Launcher, Sequence[torch.Tensor | float]]  # a launcher and its arguments


TableLaunch = tuple[Launcher, list[torch.Tensor]]


def launch_of(
    kernel: Any,
    grid: int,
    device: torch.device,
    constants: Mapping[str, Any],
    tables: Mapping[str, torch.Tensor],
    **options: Any,
) -> TableLaunch:
    """The launch of a kernel: its last parameters are constants, its other parameters name tables."""
    pointers = len(kernel.arg_names) - len(constants)
    own = {name: constants[name] for name in kernel.arg_names[pointers:]}
    return Launcher(kernel, grid, device, own, **options), [tables[name] for name in kernel.arg_names[:pointers]]


def build_together(launches: Sequence[Launch], device: torch.device) -> None:
    """Compile the kernels of launches in parallel; nothing is loaded or launched."""
    waiting = [(launcher, arguments) for launcher, arguments in launches if not launcher.is_built]
    if len(waiting) < 2 or (threads := min(build_threads(), len(waiting))) < 2:
        return
    with torch.cuda.device(device), _builds_counted():
        compile_together([functools.partial(launcher.compile, arguments) for launcher, arguments in waiting], threads)


def build_threads() -> int:
    """The number of kernels to compile in parallel: TILESTEP_BUILD_THREADS or 8, at most the number of processors."""
    wanted = os.environ.get(_THREADS, "8")
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(
            f"Invalid {_THREADS}: {wanted!r}; it must be a positive number of kernels to compile at a time"
        )
    return min(int(wanted), _processors())


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _require_one_specialization(kernel: Any, constants: Mapping[str, Any]) -> None:
    names = [parameter.name for parameter in kernel.params]
    if names[len(names) - len(constants) :] != list(constants):
        raise TypeError(
            f"{kernel.__name__}: constants must be its last parameters, in order: {names} / {list(constants)}"
        )
    for parameter in kernel.params[: len(names) - len(constants)]:
        fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or not (fixed or parameter.annotation_type.startswith(("fp", "bf"))):
            raise TypeError(f"{kernel.__name__}: list {parameter.name!r} in do_not_specialize_on_alignment")


@contextlib.contextmanager
def _builds_counted() -> Iterator[None]:
    """Count builds of Triton, but not reads of its disk cache."""
    try:
        from triton import knobs

        previous = knobs.compilation.listener
    except (ImportError, AttributeError):
        yield
        return

    def listener(**event: Any) -> None:
        if not event.get("cache_hit"):
            count_build()
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = listener
    try:
        yield
    finally:
        knobs.compilation.listener = previous
