"""DTensors: what each has on this rank, and how it is distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch


def distributed_tensor_type() -> Any | None:
    """The class of DTensors, or None where nobody has imported it yet, which takes a while: then there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


DTENSOR_PARTS = ("_local_tensor", "_spec")
"""What a DTensor keeps its local part and its layout in."""


def dtensors_have_parts() -> bool:
    """Whether DTensors are kept so; else only their public methods are left."""
    return all(hasattr(distributed_tensor_type(), name) for name in DTENSOR_PARTS)


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """What of each DTensor lies on this rank; anything else is its own part.

    A public `to_local()` costs 50 times more: it is a call of autograd's, and gives another tensor at each call.

    Example:
        >>> local_parts([None, 1])
        [None, 1]
    """
    kind = distributed_tensor_type()
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def ready(part: Any) -> Any:
    """A tensor once a collective that makes it has run (an `AsyncCollectiveTensor`); the current stream waits for it,
    not the host. Anything else is returned as it is."""
    wait = getattr(part, "wait", None) if type(part) not in (torch.Tensor, torch.nn.Parameter) else None
    return part if wait is None else wait()


def distributed_like(
    part: torch.Tensor, like: Any, shape: torch.Size, stride: Sequence[int], placements: Sequence[Any]
) -> Any:
    """A DTensor around a part that is on another device than its mesh: state on the host of parameters on a GPU.

    `DTensor.from_local` would move it. Without the private constructor, which FSDP uses for offloaded parameters, the
    part itself is returned: steps work as well, checkpoints of one rank then have its part alone.
    """
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
        spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
        kind: Any = distributed_tensor_type()
        return kind(part, spec, requires_grad=False)
    except (ImportError, TypeError):
        return part


class Layout(NamedTuple):
    """How a DTensor is distributed."""

    mesh: Any
    placements: Any


def layouts(tensors: Iterable[Any]) -> list[Any]:
    """The `mesh` and `placements` of each DTensor, in an object that many may share; None for anything else."""
    kind = distributed_tensor_type()
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_spec", None) for tensor in tensors]
    return [Layout(each.device_mesh, each.placements) if isinstance(each, kind) else None for each in tensors]
