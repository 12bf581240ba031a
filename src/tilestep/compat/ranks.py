"""Process groups and device meshes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["default_store", "group_device_types", "root_mesh"]


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
