"""What a pass reads from memory and writes to it, by its buffers' storage formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..graph import TilePass
from ..storage import Array, Storage, read_arrays
from .spec import KernelSpec


@dataclass(frozen=True)
class Traffic:
    """The arrays one tile pass touches.

    Args:
        reads: arrays it reads, an element of each for every element of the parameter.
        writes: arrays it writes.
        small_reads: arrays it reads that hold one number per row or column: next to no bytes.
        small_writes: the same, written.
    """

    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    small_reads: tuple[Array, ...] = ()
    small_writes: tuple[Array, ...] = ()

    @property
    def bytes_read(self) -> float:
        """Bytes read for each element of a parameter."""
        return _bytes(self.reads)

    @property
    def bytes_written(self) -> float:
        """Bytes written for each element of a parameter."""
        return _bytes(self.writes)


def _bytes(arrays: Sequence[Array]) -> float:
    """Bytes for each element of a parameter, a whole number where no array has an entry for several elements."""
    total = float(sum(array.dtype.itemsize / array.elements for array in arrays))
    return int(total) if total.is_integer() else total


def pass_traffic(spec: KernelSpec, index: int) -> Traffic:
    """What tile pass `index` moves; nothing where there is none.

    Gradients that carry a loss scale are also written back by one pass; that is not counted.

    Args:
        spec: what the kernels are built from.
        index: the pass.

    Example:
        >>> import torch
        >>> from tilestep.storage import Plain
        >>> from tilestep.engine import graph_for, kernel_spec
        >>> from tilestep.rules import registry
        >>> graph = graph_for(registry["Lion"], registry["Lion"].hyperparameters, dims=1)
        >>> storages = {name: Plain(torch.bfloat16) for name in ("param", "grad", "exp_avg")}
        >>> traffic = pass_traffic(kernel_spec(graph, storages, torch.float32, "cpu"), 0)
        >>> traffic.bytes_read, traffic.bytes_written
        (6, 4)
    """
    tile = spec.program.tiles[index]
    return tile_traffic(spec, [*spec.program.slices_before(index), *([] if tile is None else [tile])])


def tile_traffic(spec: KernelSpec, passes: Sequence[TilePass]) -> Traffic:
    """What passes over elements or slices move together.

    Args:
        spec: what the kernels are built from.
        passes: some of its program's.
    """
    small = spec.program.graph.slice_states
    reads = [name for here in passes for name in here.reads()]
    writes = [name for here in passes for name in here.stores]

    def arrays(names: Sequence[str], of: Callable[[Storage, str], Sequence[Array]], narrow: bool) -> tuple[Array, ...]:
        chosen = [name for name in names if (name in small) is narrow]
        return tuple(dict.fromkeys(array for name in chosen for array in of(spec.storages[name], name)))

    def written(storage: Storage, name: str) -> Sequence[Array]:
        return storage.arrays(name)

    return Traffic(
        *(arrays(*which, narrow) for narrow in (False, True) for which in ((reads, read_arrays), (writes, written)))
    )


def total_traffic(spec: KernelSpec) -> tuple[float, float]:
    """Bytes read and bytes written for each element of a parameter, in all tile passes.

    Args:
        spec: what the kernels are built from.
    """
    passes = [pass_traffic(spec, index) for index in range(len(spec.program.tiles))]
    return sum(each.bytes_read for each in passes), sum(each.bytes_written for each in passes)
