"""The ranks that share an optimizer: their groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...placement import Ranks


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        return Ranks(dist.group.WORLD, None)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return Ranks(mesh.get_group(), None)
    names = mesh.mesh_dim_names or ()
    bare = [name.removeprefix("dp_") for name in names]
    # Without names the second splits.
    sides = [dim for dim, name in enumerate(bare) if name.startswith("shard")]
    sides += [1 - dim for dim, name in enumerate(bare) if name.startswith("replicate")]
    if names and not sides:
        raise ValueError(
            f"which dimension of a mesh {tuple(names)} splits the state and which replicates it? Call them 'shard' and "
            "'replicate'"
        )
    shard = sides[0] if sides else 1
    return Ranks(mesh.get_group(shard), mesh.get_group(1 - shard))
