"""A segment: the tensors of an optimizer that share a launch, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..compat import has_memory
from ..devices import moved
from ..errors import GradientError, StateError
from ..graph import Program
from ..graph.tracer import group_value
from ..kernels.spec import MAX_DIMS, KernelSpec, cut_tiles
from ..linalg.views import Matrices
from ..native.table import addresses_of
from ..placement import MatrixExchange, Share
from ..storage import BLOCK, rows_of, stream_of
from .decision import Control, clip_code
from .kernel_cache import guards_hold


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions from slowest to fastest if the tensor fills its memory without gaps, else None."""
    dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) != 1]
    dims.sort(key=lambda dim: (tensor.stride(dim), -dim), reverse=True)
    expected = 1
    for dim in reversed(dims):
        if tensor.stride(dim) != expected:
            return None
        expected *= tensor.size(dim)
    return dims


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, in any order of its dimensions."""
    return tensor.is_contiguous() or _dense_order(tensor) is not None


def same_walk(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both tensors are dense and element k in memory order is the same element in both."""
    if left.is_contiguous() and right.is_contiguous():
        return True
    order = _dense_order(left)
    return order is not None and order == _dense_order(right)


def check_no_overlap(tensor: torch.Tensor, label: str) -> None:
    """Raise if two elements of the tensor share memory."""
    if overlaps_itself(tensor):
        raise GradientError(
            f"{label} of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself (expanded?); "
            "use .clone()"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor share memory."""
    if tensor.is_contiguous() or tensor.numel() <= 1:
        return False
    dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) > 1]
    reach, nested = 0, True
    for dim in sorted(dims, key=tensor.stride):
        nested = nested and tensor.stride(dim) > reach
        reach += (tensor.size(dim) - 1) * tensor.stride(dim)
    if nested or reach + 1 < tensor.numel():
        return not nested
    # Interleaved dimensions: count the elements in a map of the memory between the first and the last.
    taken = np.zeros(reach + 1, dtype=bool)
    np.lib.stride_tricks.as_strided(taken, tuple(tensor.shape), tensor.stride())[...] = True
    return int(np.count_nonzero(taken)) < tensor.numel()


def layout_record(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """A row of the layout table: merged sizes and strides of tensors of one shape, in index order."""
    shape = tensors[0].shape
    merged: list[tuple[int, list[int]]] = []
    for dim in range(len(shape)):
        if shape[dim] == 1:
            continue
        strides = [tensor.stride(dim) for tensor in tensors]
        if merged and all(before == stride * shape[dim] for before, stride in zip(merged[-1][1], strides)):
            merged[-1] = (merged[-1][0] * shape[dim], strides)
        else:
            merged.append((shape[dim], strides))
    if len(merged) > MAX_DIMS:
        raise GradientError(f"a strided tensor of shape {tuple(shape)} has more than {MAX_DIMS} separate dimensions")
    record = np.zeros(1 + MAX_DIMS * (1 + len(tensors)), dtype=np.int64)
    record[0] = len(merged)
    for dim, (size, strides) in enumerate(merged):
        record[1 + dim] = size
        for position, stride in enumerate(strides):
            record[1 + MAX_DIMS * (1 + position) + dim] = stride
    return record


Block = tuple[int, int, int]  # matrices, rows and columns in a tile


@dataclass
class ViewTiles:
    """The tiles of all tensors in a view; tensors with equal tile blocks are in sequence."""

    extents: np.ndarray  # int64[tensors, 3], matrices, rows and columns of each tensor
    blocks: np.ndarray  # int64[tensors, 3], matrices, rows and columns in a tile
    first_tile: np.ndarray  # int64[tensors], index of the first tile
    tile_count: np.ndarray  # int64[tensors], number of tiles
    tile_tensor: np.ndarray  # int32[tiles], the tensor of each tile
    parts: np.ndarray  # int64[tensors, 2], start of the parts of row and of column reductions
    part_counts: tuple[int, int]  # number of parts of row and of column reductions of all tensors
    ranges: list[tuple[Block, int, int]]  # each block, its first tile and its number of tiles


def cut_view(
    extents: Sequence[Block], choose: Callable[[int, int, int], Block], empty: Sequence[bool] = ()
) -> ViewTiles:
    """Cut tensors seen as matrices into tiles; a tensor that is empty on all ranks gets none: its rows have no mean."""
    sizes = np.asarray(extents, dtype=np.int64).reshape(-1, 3)
    blocks = np.asarray([choose(*size) for size in sizes.tolist()], dtype=np.int64).reshape(-1, 3)
    grid = -(-sizes // blocks)
    counts = np.where(empty, 0, grid.prod(axis=1)) if any(empty) else grid.prod(axis=1)
    order = np.lexsort(blocks.T[::-1])
    ends = np.cumsum(counts[order])
    first = np.zeros(len(sizes), dtype=np.int64)
    first[order] = ends - counts[order]
    ranges: list[tuple[Block, int, int]] = []
    # Not np.unique, which first imports masked arrays: a tenth of a process's first step.
    for block in sorted(set(map(tuple, blocks[counts > 0].tolist()))):
        members = (blocks == block).all(axis=1)
        ranges.append((block, int(first[members].min()), int(counts[members].sum())))
    matrices, rows, columns = sizes.T
    parts = np.stack([matrices * rows * grid[:, 2], matrices * grid[:, 1] * columns], axis=1)
    return ViewTiles(
        extents=sizes,
        blocks=blocks,
        first_tile=first,
        tile_count=counts,
        tile_tensor=np.repeat(order, counts[order]).astype(np.int32),
        parts=_starts(parts)[:-1],
        part_counts=tuple(parts.sum(axis=0).tolist()),
        ranges=ranges,
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return the start of each of the consecutive runs with these lengths, and the end of the last."""
    return np.concatenate([np.zeros((1, *counts.shape[1:]), dtype=np.int64), np.cumsum(counts, axis=0)])


class SliceTables:
    """The tables of passes over slices."""

    def __init__(self, program: Program, entries: Sequence[Entry], choose: Callable[[int, int, int], Block]) -> None:
        slices, dims = program.slices, program.graph.dims
        shapes, empty = [entry.here(dims) for entry in entries], [not entry.handle.numel() for entry in entries]
        self.views = [cut_view([view.extents(shape) for shape in shapes], choose, empty) for view in slices.views]
        counts = [
            [math.prod(shape[: over[0]]) * math.prod(shape[over[1] :]) for shape in shapes] for over in slices.kinds
        ]
        self.starts = np.asarray([_starts(np.asarray(of_kind, dtype=np.int64)) for of_kind in counts], dtype=np.int64)
        """int64[kinds, tensors + 1], start of each tensor's slices in an array of all slices of a kind."""
        self.spans = np.zeros((len(slices.spans), len(shapes), 2), dtype=np.int64)
        """int64[pairs, tensors, 2], elements from a coarse slice to the next, and their distance inside a slice."""
        for pair, (fine, (first, stop)) in enumerate(slices.spans):
            apart = range(first, stop) if fine is None else sorted({*range(first, stop)} - {*range(*fine)})
            for place, shape in enumerate(shapes):
                inner = math.prod(shape[stop:])
                self.spans[pair, place] = math.prod(shape[dim] for dim in apart) * inner, inner
        self.slot_counts = [int(self.starts[slices.kinds.index(over), -1]) for over in slices.overs]
        """Elements of each slot's array."""
        self.max_tiles = max((len(view.tile_tensor) for view in self.views), default=0)
        self._slices = slices

    def part_counts(self, program: Program) -> list[int]:
        """Return, per slot, the number of parts that tiles write; 0 if the slot is not the result of a reduction."""
        counts = [0] * len(self._slices.overs)
        for tile in program.tile_passes():
            for slot, reduction in tile.parts:
                assert tile.view is not None and reduction.over is not None
                tiles = self.views[self._slices.views.index(tile.view)]
                counts[slot] = tiles.part_counts[int(tile.view.place(reduction.over) == "column")]
        return counts


@dataclass(frozen=True, eq=False)
class TileRange:
    """A run of a segment's tiles, over whole and partial tensors; passes cache tables per range."""

    tiles: range  # indices of its tiles in the segment
    tensors: range  # indices of the tensors of these tiles
    addresses: Mapping[str, np.ndarray] = field(default_factory=dict)  # of arrays that are elsewhere, per tensor


@dataclass
class Entry:
    """A share of a parameter as kernels see it; a share with splits of several sizes has an entry per size."""

    share: Share
    param: torch.Tensor  # the local tensor to update in place
    arrays: dict[str, torch.Tensor]
    scalars: dict[str, torch.Tensor]
    matrices: dict[str, torch.Tensor]
    grad_dtype: torch.dtype  # dtype of the gradients that kernels read
    whole: torch.Tensor | None = None
    weight: float = 1.0  # weight of this rank's sums over the tensor, if several ranks hold the same part
    holds: Matrices | None = None  # the matrices that its rule sees in it; None if the rule sees the tensor itself
    ordered: bool = False  # whether its gradient must have its memory order; other gradients are copied
    gradient_device: torch.device | None = None
    exchange: tuple[MatrixExchange, int] | None = None
    origin: int = 0  # index of the first element in the whole tensor, in memory order
    strides: tuple[int, ...] | None = None  # of the whole tensor along the dims of `param`; None: `param`'s strides
    read_only: Collection[str] = ()  # arrays that no step writes

    @property
    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The arrays and matrices that steps write, by name; scalars are left out."""
        return [one for one in (*self.arrays.items(), *self.matrices.items()) if one[0] not in self.read_only]

    @property
    def norm_weight(self) -> float:
        """The weight of this rank's sum of squares in the norm."""
        return self.weight if self.share.group.get("in_norm", True) else 0.0

    @property
    def handle(self) -> torch.Tensor:
        """The tensor as users see it."""
        return self.param if self.whole is None else self.whole

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that its rule sees: of the tensor, or of a matrix in it."""
        return tuple(self.handle.shape) if self.holds is None else (self.holds.rows, self.holds.columns)

    def here(self, dims: int) -> tuple[int, ...]:
        """Return the shape of the local part as a graph of `dims` dimensions sees it."""
        if self.holds is None:
            return tuple(self.param.shape)
        count = self.holds.count(self.param.numel())
        return self.shape if dims == 2 and count == 1 else (count, *self.shape)


class GroupRows:
    """The rows of the hyperparameter table and the random streams of a segment's tensors.

    Args:
        spec: kernel spec of the tensors.
        entries: the tensors.
        groups: the optimizer's param groups.
    """

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry], groups: Sequence[Mapping[str, Any]]) -> None:
        self.groups, self._spec, self._entries = groups, spec, entries
        self.indices = sorted({entry.share.group_index for entry in entries})  # the group of each row
        position = {group: index for index, group in enumerate(self.indices)}
        self.of = np.asarray([position[entry.share.group_index] for entry in entries], dtype=np.int32)
        """int32[tensors], the row of each tensor."""
        self._seeds: list[int] = []
        self.streams = np.zeros((len(entries), 2), dtype=np.int64)
        """int64[tensors][2]: a tensor's random stream, and the index of its first element in the full tensor."""
        if spec.draws:
            self.streams[:, 1] = [entry.origin for entry in entries]
        self.follow_seeds()

    def follow_seeds(self) -> bool:
        """Update the random streams from the groups' seeds; return whether a seed has changed."""
        seeds = [self.groups[index].get("seed", 0) for index in self.indices] if self._spec.draws else []
        if seeds == self._seeds:
            return False
        self._seeds = seeds
        own = zip(self._entries, self.of.tolist())
        self.streams[:, 0] = [stream_of(seeds[row], entry.share.ordinal) for entry, row in own]
        return True

    def keeps_graph(self, index: int, hyperparameters: Callable[[], Mapping[str, Any]]) -> bool:
        """Whether the rule would take the same branches with a group's new hyperparameters."""
        graph = self._spec.program.graph
        if not graph.guards:
            return True
        shapes: set[tuple[int, ...]] = {()}
        if graph.branches_on_sizes:
            shapes = {entry.shape for entry in self._entries if entry.share.group_index == index}
        now = hyperparameters()
        return all(guards_hold(graph, now, shape) for shape in shapes)

    def rows(self) -> list[list[float]]:
        """Return the current hyperparameter table; a tensor on a device leaves NaN, and is copied on the device."""
        return [[self._number(self.groups[index], name) for name in self._spec.hypers] for index in self.indices]

    def _number(self, group: Mapping[str, Any], name: str) -> float:
        value = group_value(group, name)
        if value is None or (name == "max_grad_norm" and group.get("in_norm") is False):
            return math.inf
        return math.nan if isinstance(value, torch.Tensor) and value.is_cuda else clip_code(value)

    def on_device(self) -> list[tuple[int, int, torch.Tensor]]:
        """Return row, column and tensor of each hyperparameter on a device."""
        tensors = []
        for row, index in enumerate(self.indices):
            for column, name in enumerate(self._spec.hypers):
                value = group_value(self.groups[index], name)
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    tensors.append((row, column, value))
        return tensors


class ArrayTable:
    """Addresses and layouts of the arrays of a segment's tensors; all arrays must be allocated.

    Args:
        spec: spec of the kernels that read and write the arrays.
        entries: the tensors.
    """

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry]) -> None:
        self._spec, self._entries = spec, entries
        self.names = [array.name for array in spec.arrays if array.name in entries[0].arrays]
        self.addresses = np.zeros((max(len(self.names), 1), len(entries)), dtype=np.int64)
        self.read()
        # Arrays of rows, columns or blocks are never indexed together with the elementwise arrays.
        self._separate = {
            *spec.program.graph.slice_states,
            *(array.name for array in spec.arrays if array.elements != 1),
        }
        by_rows = bool(spec.program.slices.views) or spec.has_blocks
        self.strided = [index for index, entry in enumerate(entries) if not self._is_plain(entry, by_rows)]
        """Indices of tensors that are indexed by coordinates, whatever the layout of their gradients."""
        self.set_strided({})

    def _is_plain(self, entry: Entry, by_rows: bool) -> bool:
        """Whether a tensor is walked in memory order, which must be its index order if kernels work by rows."""
        arrays = [array for name, array in entry.arrays.items() if name not in self._separate]
        if self._spec.draws:  # consecutive elements must have consecutive indices in the whole tensor
            walk = zip(entry.param.shape, entry.param.stride(), strides_of(entry))
            if any(size != 1 and own != whole for size, own, whole in walk):
                return False
        if all(map(torch.Tensor.is_contiguous, arrays)):
            return True
        return not by_rows and all(same_walk(entry.param, array) for array in arrays)

    def read(self) -> None:
        """Read the current addresses of the arrays."""
        for row, name in enumerate(self.names):
            arrays = [entry.arrays[name] for entry in self._entries]
            for entry, array in zip(self._entries, arrays):
                if not has_memory(array):
                    label = entry.share.label
                    what = label if name == "param" else f"state {name!r} of {label}"
                    raise (GradientError if name == "param" else StateError)(
                        f"{what} has no memory: its storage was freed, or its tensor type stores values elsewhere"
                    )
            self.addresses[row] = addresses_of(arrays)

    def of_range(self, tile_range: TileRange) -> np.ndarray:
        """Return int64[arrays][tensors of the range], the arrays' addresses while passes work on the range."""
        chosen = self.addresses[:, tile_range.tensors.start : tile_range.tensors.stop].copy()
        for name, addresses in tile_range.addresses.items():
            chosen[self.names.index(name)] = addresses
        return chosen

    def set_strided(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Describe the tensors that are indexed by coordinates; `gradients`, by place, differ in layout from theirs."""
        indices = sorted({*self.strided, *gradients})
        self.layout_index = np.full(len(self._entries), -1, dtype=np.int64)
        """int64[tensors], the row of `layouts` for a tensor that is indexed by coordinates, or -1."""
        width = 1 + MAX_DIMS * (2 + len(self.names) + bool(self._spec.draws))
        self.layouts = np.zeros((max(len(indices), 1), width), dtype=np.int64)
        for row, index in enumerate(indices):
            entry = self._entries[index]
            gradient = gradients.get(index, entry.param)
            arrays = {name: entry.param if name in self._separate else entry.arrays[name] for name in self.names}
            walked = [gradient, *arrays.values()]
            if self._spec.draws:
                walked.append(torch.empty_strided(entry.param.shape, strides_of(entry), device="meta"))
            record = layout_record(walked)
            self.layouts[row, : len(record)] = record
            self.layout_index[index] = row


class Segment:
    """Tensors with the same spec on the same device, independent of the backend.

    Args:
        spec: kernel spec of the tensors.
        entries: the tensors.
        groups: the optimizer's param groups.
        grads: int64[tensors] on the device, addresses of gradients; 0 for none.
        control: the device's decision about a step.
        tile_size: elements in a tile.
    """

    streamer: Any = None
    """Moves arrays to where tile passes work on them, and back: the `ChunkedPasses` of `offload`, or None.

    `run(index)` runs a tile pass, `settle()` waits until gradients and arrays in host memory are complete.
    """

    def __init__(
        self,
        spec: KernelSpec,
        entries: Sequence[Entry],
        groups: Sequence[Mapping[str, Any]],
        grads: torch.Tensor,
        control: Control,
        *,
        tile_size: int,
    ) -> None:
        self.spec, self.entries, self.device = spec, list(entries), entries[0].param.device
        self.grads, self.control = grads, control
        self.gradients: Sequence[torch.Tensor | None] = ()
        """This step's gradients, for passes that read them as tensors."""
        numels, columns = [entry.param.numel() for entry in self.entries], [0] * len(self.entries)
        if spec.has_blocks:  # elements of a row of blocks; all elements of a tensor whose rows hold whole blocks
            rows = [rows_of(entry.param.shape)[1] for entry in self.entries]
            columns = [row if row % BLOCK else numel for row, numel in zip(rows, numels)]
            numels = [numel // max(row, 1) * -(-row // BLOCK) * BLOCK for numel, row in zip(numels, columns)]
        self.columns = np.asarray(columns, dtype=np.int64)
        self.tiles = cut_tiles(numels, tile_size)
        self.sizes = np.asarray([_sizes(entry.shape, spec.sizes) for entry in self.entries], dtype=np.int64)
        self.group_rows = GroupRows(spec, self.entries, groups)
        count, names = len(entries), spec.program.graph.scalar_states
        self.step = self.zeros(count, dtype=torch.float32)
        """float32[tensors], step counts."""
        self.scalar_states = {name: self.zeros(count, dtype=spec.scalar_dtype(name)) for name in names}
        """[tensors] for each scalar state."""
        self.sums = self.zeros(count, max(spec.reduction_count, 1))
        """float64[tensors][reductions], reductions over a tensor; eager PyTorch computes them itself."""
        self.global_parts = self.zeros(count, max(spec.global_count, 1))
        """float64[tensors][slots], results of a scalar pass to be combined over all tensors."""
        self.totals = self.zeros(max(spec.global_count, 1))
        """float64[slots], the combined values."""
        self.rows = self.zeros(count, spec.columns, dtype=spec.compute)
        """[tensors][columns], numbers that scalar passes compute for tile and matrix passes."""
        for name, array in {"step": self.step, **self.scalar_states}.items():
            _take_numbers(name, array, self.entries)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def element_at(self, place: int, counted: int) -> int:
        """Return the element of a tensor at position `counted` of its tiles, which pad rows to whole blocks."""
        columns, numel = int(self.columns[place]), self.entries[place].param.numel()
        if columns in (0, numel):
            return min(counted, numel)
        line, column = divmod(counted, -(-columns // BLOCK) * BLOCK)
        return min(line * columns + min(column, columns), numel)


def _take_numbers(name: str, array: torch.Tensor, entries: Sequence[Entry]) -> None:
    """Copy a number per tensor into an array; the tensors' numbers become views of it."""
    numbers = {index: entry.scalars[name] for index, entry in enumerate(entries) if name in entry.scalars}
    for device in {number.device for number in numbers.values()}:
        # One copy for all: an assignment per number would be a launch each.
        indices = [index for index, number in numbers.items() if number.device == device]
        values = moved(torch.stack([numbers[index] for index in indices]).to(array.dtype), array.device)
        if len(indices) == len(entries):
            array.copy_(values)
        else:
            array[torch.tensor(indices, device=array.device)] = values
    for entry, view in zip(entries, array.unbind()):
        entry.scalars[name] = view


def strides_of(entry: Entry) -> tuple[int, ...]:
    """Strides of elements in the whole tensor: in memory order, or in index order if the memory has gaps."""
    if entry.strides is not None:
        return entry.strides
    if is_dense(entry.param):
        return tuple(entry.param.stride())
    return tuple(torch.empty(entry.param.shape, device="meta").stride())


def _sizes(shape: Sequence[int], from_end: Sequence[int]) -> list[int]:
    """Sizes of a shape, counted from the last as 1; 1 for a missing dimension; the number of elements for 0."""
    return [(shape[-dim] if dim <= len(shape) else 1) if dim else math.prod(shape) for dim in from_end]
