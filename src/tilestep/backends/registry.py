"""The backend of each device type: the only module that knows all backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..errors import BuildError
from ..kernels import launch
from ..kernels.spec import KernelSpec
from ..runtime.passes import Passes
from .cpp.compile import warn_of_failure

interpreting = False


def interpret_on_cpu() -> None:
    """Run GPU code on CPU tensors for the rest of the process; needs Triton's interpreter."""
    global interpreting
    if not launch.available():
        raise BuildError("Triton is not installed")
    from triton import knobs

    if not knobs.runtime.interpret:
        raise BuildError("Triton does not run in its interpreter: set TRITON_INTERPRET=1 before it is imported")
    interpreting = True


def _triton() -> type[Passes]:
    from .triton.run import TritonPasses

    return TritonPasses


def _cpp() -> type[Passes]:
    from .cpp.run import CppPasses

    return CppPasses


def _eager() -> type[Passes]:
    from .eager import EagerPasses

    return EagerPasses


BACKENDS: dict[str, Callable[[], type[Passes]]] = {"cuda": _triton, "cpu": _cpp}
"""The passes for a type of device; eager PyTorch runs on all others."""


def passes_class(device: torch.device) -> type[Passes]:
    """The class of passes for a device; eager passes if no kernel can be built for it."""
    if interpreting:
        return _triton()
    backend = BACKENDS.get(device.type, _eager)
    return _eager() if backend is _triton and not launch.available() else backend()


def build_passes(device: torch.device, *args: object) -> Passes:
    """The passes of a segment; on the CPU eager passes if its kernel can neither be built nor loaded."""
    chosen: Callable[..., Passes] = passes_class(device)
    try:
        return chosen(*args)
    except BuildError as error:
        if device.type != "cpu" or interpreting:
            raise
        warn_of_failure(error)
        eager: Callable[..., Passes] = _eager()
        return eager(*args)


def load_ahead(spec: KernelSpec, device: torch.device, *, gaps: bool) -> None:
    """Build or load the kernels of the first step on a CPU; GPU kernels are built in parallel later.

    gaps: whether tensors have gaps in memory, and kernels must walk them by coordinates.
    """
    if passes_class(device).__name__ == "CppPasses":
        from .cpp.run import load

        with suppress(BuildError):
            load(spec, gaps=gaps)


def control_kernels(control: torch.Tensor) -> Any:
    """The module with the kernels that write control numbers on a GPU; None if the host writes them."""
    if not control.is_cuda:
        return None
    from .triton import run

    return run
