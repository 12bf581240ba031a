"""`offload`: an optimizer whose state lives in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch

from ..backends.cpp.compile import compiler
from ..devices import is_host
from ..errors import OffloadError
from ..kernels.launch import available as triton_available
from ..optimizer import Optimizer
from ..optimizer.checkpoint import unchanged_on_error
from ..optimizer.optimizer import resolve_optimizer
from ..optimizer.parameters import iter_params
from ..placement.combinations import kind_of, refuse, wrappers_around
from ..placement.local import local_part
from .copies import check_device
from .host import HostState
from .offloaded import OffloadedOptimizer, OffloadedState
from .streaming import StreamedState

_MIB = 1 << 20


def offload(
    optimizer: Optimizer | Callable[[], Optimizer],
    *,
    state: bool = True,
    gradients: bool = False,
    where: Literal["gpu", "cpu"] | None = None,
    chunk_mb: float = 64.0,
    buffers: int = 3,
) -> OffloadedOptimizer:
    """Keep an optimizer's state, float32 masters included, in host memory.

    The update runs on the GPU, through which the state is streamed in chunks, in both directions at once; or on the
    CPU, to which gradients are copied and from which parameters are copied back, chunk by chunk. The results are
    bitwise those of the optimizer on that device without offloading.

    Step counts and other numbers stay with the parameters, and so do row, column and matrix states (Adafactor, SOAP).

    Args:
        optimizer: a tilestep optimizer with its parameters on one device, which becomes offloaded with its state; or a
            function that makes one: then its state is never allocated on the device.
        state: keep the state on the host.
        gradients: copy each gradient to the host during backward and free it on the device; gradients of several
            backwards are accumulated. An update on the GPU reads them from host memory. After backward the parameters'
            `grad` is None, and `step` consumes the gradients: clip with `max_grad_norm`, scale losses with
            `tilestep.GradScaler`.
        where: where updates run, "gpu" or "cpu". The default is the GPU if Triton is installed, else the CPU.
            Parameters on the CPU (such as with FSDP2's `CPUOffloadPolicy`) are updated there.
        chunk_mb: MiB of state, or with "cpu" of parameters, in a chunk.
        buffers: chunks of device memory, for "gpu": with three, one is copied in and one out while one is updated.

    Returns:
        The optimizer that was passed.

    Raises:
        OffloadError: for parameters on several devices or on another kind of device, an optimizer with another wrapper,
            a machine without a compiler for the chosen place. Nothing is changed then.
        HostMemoryError: if there is not enough host memory. Nothing is changed then.
        ValueError: for an argument out of its range.

    Source: Rajbhandari et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021).

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.offload(lambda: tilestep.SGD(model.parameters(), lr=0.5, momentum=0.9))
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> optimizer.step()
        >>> model.weight.tolist()
        [[0.5, 0.0]]
    """
    if where not in (None, "gpu", "cpu"):
        raise ValueError(f"Invalid where: {where!r}; it must be 'gpu', 'cpu' or None")
    if not state:
        raise ValueError("Invalid state: False; nothing would be offloaded")
    if not chunk_mb > 0 or buffers < 1:
        raise ValueError(f"Invalid chunk_mb or buffers: {chunk_mb}, {buffers}; both must be positive")
    target = resolve_optimizer("offload", optimizer)
    refuse("offload", target.attached, error=OffloadError)
    if gradients:
        refuse("offload of gradients", target.attached, error=OffloadError)
        _refuse_wrappers(target)
    device = _device_of(target)
    place, reason = choose(target, device, where)
    size = int(chunk_mb * _MIB)
    memory = OffloadedState()
    memory.on_device = True  # for parameters on the CPU; replaced below for other devices
    if place == "gpu":
        memory = StreamedState(device, size, buffers, gradients)
    elif place == "cpu":
        memory = HostState(device, size, gradients)
    return move_state(target, memory, place, reason)


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Raise for wrappers that reduce gradients after they have moved to the host."""
    own = {id(param) for _, _, _, param in iter_params(optimizer)}
    for wrapper in wrappers_around(lambda param: id(param) in own):
        refuse("offload of gradients", [kind_of(wrapper)], "the model's wrapper", OffloadError)


def _device_of(optimizer: Optimizer) -> torch.device:
    params = [(label, param) for label, _, _, param in iter_params(optimizer) if not param.is_meta]
    if not params:
        raise OffloadError("no parameter of the optimizer has memory yet: call offload() after initializing them")
    device = local_part(params[0][1]).device
    for label, param in params:
        check_device(label, param, device)
    if device.type not in ("cpu", "cuda"):
        raise OffloadError(f"{params[0][0]} is on {device}: offload() supports parameters on a GPU or the CPU")
    return device


def choose(optimizer: Optimizer, device: torch.device, where: str | None) -> tuple[str, str]:
    """Where updates run, and why."""
    # No measurement: ranks of a job would decide differently.
    if is_host(device):
        if where == "gpu":
            raise OffloadError("where='gpu', but the parameters are on the CPU: move the model to a GPU first")
        return "here", "the parameters are on the CPU, and so is the state"
    if "shard" in optimizer.attached:
        if where == "cpu":
            refuse("offload to the CPU", optimizer.attached, error=OffloadError)
        where = "gpu"
    available = {"gpu": triton_available(), "cpu": compiler() is not None}
    if where is not None:
        if not available[where]:
            needed = {"gpu": "Triton", "cpu": "a C++ compiler"}[where]
            raise OffloadError(f"where={where!r} needs {needed}, which is not available")
        return where, "as requested"
    if not any(available.values()):
        raise OffloadError("offload() needs Triton or a C++ compiler; install one of them")
    return ("gpu", "the default") if available["gpu"] else ("cpu", "Triton is not installed")


@torch.no_grad()
def move_state(optimizer: Optimizer, memory: OffloadedState, where: str, reason: str) -> OffloadedOptimizer:
    """Move an optimizer's state to another memory."""
    with unchanged_on_error(optimizer):
        optimizer.set_memory(memory)
        memory.attach_to(optimizer, where, reason)
    names: tuple[str, ...] = ("offload in place",)
    if where != "here":
        options = {"offload to the CPU": where == "cpu", "offload of gradients": memory.timeline is not None}
        names = ("offload", *(name for name, is_chosen in options.items() if is_chosen))
    offers = {"offload_report": memory.offload_report}
    optimizer.attach(names, offers=offers if hasattr(optimizer, "wait") else {**offers, "wait": memory.wait})
    return cast(OffloadedOptimizer, optimizer)
