"""The bytes a rule's passes must move, read off what an optimizer's kernels load and store."""

from __future__ import annotations

import tilestep
from tilestep.kernels.spec import KernelSpec
from tilestep.runtime import Entry
from tilestep.storage import read_arrays

__all__ = ["step_bytes"]


def step_bytes(optimizer: tilestep.Optimizer) -> int:
    """Return what every tile pass of a step reads and writes, in bytes; scratch of matrix work included, it itself not.

    Args:
        optimizer: any of ours; every parameter counts as having a gradient, and no clip is on.

    >>> import torch
    >>> parameters = [torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)]
    >>> step_bytes(tilestep.AdamW(parameters)), step_bytes(tilestep.AdamW(parameters, master_weights=True))
    (14000, 30000)
    >>> step_bytes(tilestep.AdamW(parameters, master_weights="remainder"))
    26000
    """
    segments = [passes.segment for engine in optimizer.fitting_plan(ahead=True).engines for passes in engine.passes]
    return sum(_entry_bytes(segment.spec, entry) for segment in segments for entry in segment.entries)


def _entry_bytes(spec: KernelSpec, entry: Entry) -> int:
    total = 0
    for tile in spec.program.tiles:
        if tile is None:
            continue
        reads = [array for name in tile.reads() for array in read_arrays(spec.storages[name], name)]
        writes = [array for name in tile.stores for array in spec.storages[name].arrays(name)]
        for array in (*reads, *writes):
            tensor = entry.arrays.get(array.name, entry.param)
            total += tensor.numel() * array.dtype.itemsize
    return total
