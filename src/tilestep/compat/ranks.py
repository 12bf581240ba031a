"""Process groups and device meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Begin to gather several tensors in one message.

    Returns:
        Whether it has begun, which it has not where torch has no call for it; and what to wait for, None where there is
        nothing: on a GPU it runs in the current stream.
    """
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
