"""What tilestep needs of torch's distributed package beyond its public API: DTensors, ranks, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch


def default_store() -> Any | None:
    """The store in which the processes of the default group have found each other; None where torch does not say."""
    return getattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)()


def root_mesh(mesh: Any) -> Any | None:
    """The device mesh that a mesh is a slice of; None where torch does not say."""
    root = getattr(mesh, "_get_root_mesh", None)
    return None if root is None else root()


def group_device_types(group: Any) -> set[str] | None:
    """Device types whose tensors a process group can reduce; None where torch does not say."""
    devices = getattr(group, "_device_types", None)
    return None if devices is None else {device.type for device in devices}


def gather_together(group: Any, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[bool, Any]:
    """Begin to gather several tensors in one message."""
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        call, options = (
            getattr(group, name, None),
            getattr(torch.distributed.distributed_c10d, "AllgatherOptions", None),
        )
        if call is None or options is None:
            continue
        told = options()
        told.asyncOp = not wholes[0].is_cuda
        return True, call(list(wholes), list(parts), told)
    return False, None


class CheckpointTypes:
    """What torch.distributed.checkpoint asks of tensors that lie on several ranks.

    Their classes have not moved since torch 2.1; the methods that ask for them are `__create_write_items__`,
    `__create_chunk_list__` and `__get_tensor_shard__` (torch.distributed._checkpointable). Without these a checkpoint
    refuses such a tensor.
    """

    def chunk(self, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        """A block of a tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def write_items(
        self, name: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """What is to be written of a tensor: one item for each block, given by its offsets and sizes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self.chunk(offsets, sizes), properties=TensorProperties(dtype=dtype), size=shape
                ),
            )
            for offsets, sizes in chunks
        ]


def checkpoint_types() -> CheckpointTypes:
    """The classes that torch.distributed.checkpoint asks for; imported when they are needed, for they take a while."""
    return CheckpointTypes()


def distributed_tensor_type() -> Any | None:
    """The class of DTensors, or None where it was not imported yet, which takes a while: then there are none."""
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
