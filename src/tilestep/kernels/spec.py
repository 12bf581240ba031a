"""`KernelSpec`, from which kernels are built: a program, a storage per buffer, a compute type; and its traffic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from .._version import __version__
from ..graph import Program, TilePass, Value, size_from_end
from ..storage import Array, Storage, Stored, Term, codec_of, dtype_name, read_arrays

MAX_DIMS = 32
"""Dimensions a strided tensor may have after adjacent ones are merged."""


NORM, SKIP, INVERSE_SCALE, UNSCALE, CLIP, SKIPPED = range(6)
"""Places in the control numbers. UNSCALE: tile passes write the unscaled gradients back. CLIP: the norm to which a
limit for `max_grad_norm` clips. All but the count of skipped steps are of one step."""

CONTROL_SIZE = 6

LARGEST_SUM = sys.float_info.max
"""A sum of squares that stands for a larger one, of finite float64 gradients: overflow checks tell it from infinity,
which is its root, as torch's."""


@dataclass(frozen=True)
class Output:
    """A result of a step besides its update: a formula of stored elements before and after the step, reduced.

    A skipped step has outputs too. A buffer in a storage format needs none: it is a state that a rule only writes.

    Args:
        name: of the column.
        of: the formula for one element, which takes a `Stored`.
        reduce: `"sum"` or `"max"`, a float64 number of each tensor; `"or"`, a bit of each element.

    Raises:
        ValueError: for another `reduce`.

    Example:
        >>> import torch, tilestep
        >>> from tilestep.stats import Output
        >>> amax = Output("amax", lambda stored: stored.new("param").function("abs"), "max")
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats(outputs=(amax,)))
        >>> weight.grad = torch.tensor([6.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.stats.read()["weight"]["amax"]
        2.0
    """

    name: str
    of: Callable[[Stored], Term]
    reduce: Literal["sum", "max", "or"]

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "max", "or"):
            raise ValueError(f"Invalid reduce: {self.reduce!r}; it must be 'sum', 'max' or 'or'")


@dataclass
class KernelSpec:
    """A program with its storages."""

    program: Program  # the rule's passes
    storages: dict[str, Storage]  # storage format of each element buffer, by name, gradient included
    compute: torch.dtype  # float32, or float64 for float64 parameters
    hypers: tuple[str, ...]  # names of the columns of the hyperparameter table
    outputs: tuple[Output, ...] = ()  # results of kernels besides the update
    variants: dict[tuple[Output, ...], KernelSpec] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.grad = self.storages["grad"].arrays("grad")[0]
        self.machine_epsilon = torch.finfo(self.storages["param"].precision).eps
        self.reduction_count = len(self.program.reductions)  # reductions over a tensor, in all passes
        self.global_count = len(self.program.global_reductions)  # reductions over all tensors, in all passes

    def with_outputs(self, outputs: tuple[Output, ...]) -> KernelSpec:
        """This spec with other outputs: another set of tile passes over the same tables."""
        if outputs == self.outputs:
            return self
        return self.variants.setdefault(outputs, replace(self, outputs=outputs, variants={}))

    @cached_property
    def arrays(self) -> list[Array]:
        """All arrays of a tile except the gradient, in the order of the address table."""
        return [array for name, storage in self.storages.items() if name != "grad" for array in storage.arrays(name)]

    @cached_property
    def draws(self) -> dict[str, int]:
        """Buffers with stochastic rounding, each with its slot in an element's random bits."""
        return {name: slot for slot, name in enumerate(n for n, s in self.storages.items() if codec_of(s).is_random)}

    def draws_in(self, tile: TilePass) -> bool:
        """Whether a pass rounds stochastically."""
        return not self.draws.keys().isdisjoint(tile.stores)

    def touched(self, tile: TilePass) -> list[tuple[int, Array]]:
        """The arrays that a pass reads or writes, each with its index: 0 for the gradient, then the address table's."""
        names = {array.name for name in (*tile.reads(), *tile.stores) for array in self.storages[name].arrays(name)}
        names |= {self.grad.name} if self.program.unscales(tile) else set()
        return [(place, array) for place, array in enumerate((self.grad, *self.arrays)) if array.name in names]

    def steps_later(self, tile: TilePass) -> int:
        """1 for passes before the last scalar pass, which counts the step; else 0."""
        return int(tile.stage < len(self.program.scalars) - 1)

    @property
    def columns(self) -> int:
        """The number of columns in the table of scalars, which has a row per tensor."""
        return max(len(self.program.columns), 1)

    @cached_property
    def widest(self) -> int:
        """The largest element size of the arrays, in bytes."""
        return max(array.dtype.itemsize for array in (self.grad, *self.arrays))

    @cached_property
    def has_blocks(self) -> bool:
        """Whether a buffer is stored in blocks; tiles are then multiples of blocks."""
        return any(codec_of(storage).has_blocks for storage in self.storages.values())

    @property
    def name(self) -> str:
        """The rule's name as an identifier."""
        return "".join(letter if letter.isalnum() else "_" for letter in self.program.graph.title).lower()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of a whole parameter that the scalar pass reads: 1 is the last dimension, 0 the element count."""
        hypers = self.program.graph.hypers()
        asked = {size_from_end(name) for name in hypers} - {0, 1, 2}
        return (2, 1, *sorted(asked), *((0,) if "numel" in hypers else ()))

    def scalar_dtype(self, name: str) -> torch.dtype:
        """The dtype of a scalar state: the compute type, unless the rule declares another."""
        return self.program.graph.state_dtypes.get(name, self.compute)

    def header(self, mark: str, backend: str) -> str:
        """Comment lines with rule, storage and version."""
        storage = ", ".join(f"{name} {storage}" for name, storage in self.storages.items())
        lines = [
            f"tilestep {__version__}: rule {self.program.graph.title}, {backend} backend",
            f"storage: {storage}; computed in {dtype_name(self.compute)}",
        ]
        for index, last in enumerate(self.program.tiles):
            for tile in self.program.passes_of(index):
                title = f"pass {index}" if tile is last else tile.title
                lines.append(f"{title}: reads {', '.join(tile.reads())}; writes {', '.join(tile.stores) or '-'}")
        if self.outputs:
            lines.append(f"outputs: {', '.join(output.name for output in self.outputs)}")
        return "\n".join(f"{mark} {line}" for line in lines)


_WORDS = {"sub": "minus", "add": "plus", "div": "over", "mul": "times"}
_LONGEST = 40


def describe(value: Value) -> str:
    """A name from a value's expression: `1 - lr * weight_decay` is one_minus_lr_times_weight_decay."""
    if value.operation == "constant":
        return "one" if value.attribute == 1.0 else "constant"
    if value.name:
        return value.name
    parts = [describe(arg) for arg in value.args if arg.operation != "constant" or arg.attribute == 1.0]
    joined = f"_{_WORDS.get(value.operation, value.operation)}_".join(parts)
    return joined if 0 < len(joined) <= _LONGEST else value.operation


@dataclass(frozen=True)
class Traffic:
    """The arrays that tile passes read and write."""

    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    small_reads: tuple[Array, ...] = ()
    small_writes: tuple[Array, ...] = ()

    @property
    def bytes_read(self) -> float:
        """Bytes read per element of a parameter."""
        return _bytes(self.reads)

    @property
    def bytes_written(self) -> float:
        """Bytes written per element of a parameter."""
        return _bytes(self.writes)


def _bytes(arrays: Sequence[Array]) -> float:
    """Bytes per element of a parameter; an integer if every array has an entry per element."""
    total = float(sum(array.dtype.itemsize / array.elements for array in arrays))
    return int(total) if total.is_integer() else total


def pass_traffic(spec: KernelSpec, index: int) -> Traffic:
    """The traffic of tile pass `index`, without gradients that are unscaled and written back."""
    return tile_traffic(spec, spec.program.passes_of(index))


def tile_traffic(spec: KernelSpec, passes: Sequence[TilePass]) -> Traffic:
    """The total traffic of passes over elements or slices."""
    small = spec.program.graph.slice_states
    reads = [(name, read_arrays(spec.storages[name], name)) for each in passes for name in each.reads()]
    writes = [(name, spec.storages[name].arrays(name)) for each in passes for name in each.stores]

    def arrays(moved: Sequence[tuple[str, Sequence[Array]]], narrow: bool) -> tuple[Array, ...]:
        return tuple(dict.fromkeys(array for name, own in moved if (name in small) is narrow for array in own))

    return Traffic(*(arrays(moved, narrow) for narrow in (False, True) for moved in (reads, writes)))


def total_traffic(spec: KernelSpec) -> tuple[float, float]:
    """Bytes read and bytes written per element of a parameter, in all tile passes."""
    passes = [pass_traffic(spec, index) for index in range(len(spec.program.tiles))]
    return sum(traffic.bytes_read for traffic in passes), sum(traffic.bytes_written for traffic in passes)


@dataclass
class Tiles:
    """The tiles of a list of tensors."""

    size: int  # elements per tile
    numel: np.ndarray  # int64[tensors], the elements of each tensor
    first_tile: np.ndarray  # int64[tensors], the first tile of each tensor
    tile_tensor: np.ndarray  # int32[tiles], the tensor of each tile

    @property
    def count(self) -> int:
        """The number of tiles."""
        return len(self.tile_tensor)


def cut_tiles(numels: Sequence[int], size: int) -> Tiles:
    """Cut tensors of these lengths into tiles; an empty tensor has none."""
    numel = np.asarray(numels, dtype=np.int64)
    counts = -(-numel // size)
    ends = np.cumsum(counts)
    first = np.concatenate([[0], ends[:-1]]) if len(ends) else np.zeros(0, dtype=np.int64)
    owner = np.repeat(np.arange(len(numel), dtype=np.int32), counts)
    return Tiles(size, numel, first.astype(np.int64), owner)
