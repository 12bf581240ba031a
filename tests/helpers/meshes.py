"""Meshes of a set of ranks, made once: gloo has three threads for each group of a mesh, and one of them polls."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["grid"]


def grid(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks; the same one whenever it is asked for.

    Args:
        device: the type of its tensors' device.
        sizes: ranks along each dimension.
        names: of the dimensions.
    """
    return _made(dist.group.WORLD, device, sizes, names)


@functools.cache
def _made(world: Any, device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device, sizes, mesh_dim_names=names)
