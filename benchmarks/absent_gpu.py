"""Triton's compiler for a GPU that is not here: everything is built as for one, nothing can be launched."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuFuncGetAttribute "
    "cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorString cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData "
    "cuPointerGetAttribute"
)
"""What the C that Triton builds takes from NVIDIA's driver; here each does nothing."""


class _Utilities:
    """What Triton asks a driver to do with a built kernel."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H200."""
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}


class _Driver:
    """A driver whose only GPU has this compute capability."""

    def __init__(self, capability: int) -> None:
        from triton.backends.nvidia.driver import CudaLauncher

        self.capability, self.launcher_cls, self.utils = capability, CudaLauncher, _Utilities()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def absent_gpu(directory: Path, capability: int = 90) -> Iterator[None]:
    """A block in which Triton builds kernels for a GPU, launchers in C included, on a machine without one."""
    from triton.runtime import driver

    library = directory / "libcuda.so.1"
    code = "".join(f"int {name}(void) {{ return 0; }}\n" for name in _DRIVER_FUNCTIONS.split())
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=code, text=True, check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    before = driver._active
    with (
        mock.patch.dict(os.environ, TRITON_LIBCUDA_PATH=str(directory)),
        mock.patch.object(torch.cuda, "device", _AnyDevice),
    ):
        driver.set_active(_Driver(capability))
        try:
            yield
        finally:
            driver._active = before


def engine_of(make: Callable[[], Any], shape: Any) -> Any:
    """The engine that an optimizer would have on a GPU, in tiles of this shape; its tensors are on the CPU."""
    from tilestep.backends import registry
    from tilestep.backends.triton.run import TritonPasses
    from tilestep.backends.tuning import forced_shape

    chosen, registry.passes_class = registry.passes_class, lambda device: TritonPasses
    try:
        with forced_shape(shape):
            (engine,) = make().fitting_plan(ahead=True).engines
    finally:
        registry.passes_class = chosen
    return engine


class _AnyDevice:
    """In the place of `torch.cuda.device`."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass
