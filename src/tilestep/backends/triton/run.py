"""Passes on a GPU: tables in device memory, one Triton launch per pass, nothing read back."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ...compat import is_capturing
from ...devices import copy_to
from ...kernels.launch import EXACT, Launch, Launcher, TableLaunch, build_together, launch_of, load_module
from ...kernels.spec import KernelSpec, Output, Tiles, cut_tiles
from ...runtime.capturing import WARM_UP, require
from ...runtime.decision import StepInputs
from ...runtime.outputs import chunks_of
from ...runtime.passes import Passes, tables_of
from ...runtime.segment import Entry, Segment, TileRange
from ..decision import Decision, numbers_of
from ..tuning import TileShape, tile_shape
from .decision import decision_source
from .slices import CudaSlices, device_table, device_tables
from .source import source

_SCALAR_BLOCK = 128
_FINISH_BLOCK = 1024
_REPORT_RUN = 256  # tiles whose reports a program combines
_MAX_SPANS, _ENOUGH_PROGRAMS = 8, 8192
"""Spans that a program walks which measures, and how many programs there are for each of them: what it has accumulated
is reduced once."""
_MEASURING = {"maxnreg": 80}
"""Registers of a thread that measures: 24 warps run on a multiprocessor of a GPU. Left alone, the compiler takes up to
140, though it needs none of them in the loop over whole tiles."""
_REGISTERS, _MORE_REGISTERS, _WIDE_REGISTERS = 56, 80, 96
"""Of a thread where tiles are of blocks, whose programs then are enough to hide what they wait for; more where numbers
are rounded at random, states are three or arrays are of four bytes; most where states are four and arrays of four
bytes."""
_RUNS_REGISTERS, _MAX_REGISTERS = 112, 128
"""Where a thread has two runs of eight neighbours; more where it draws random bits for three arrays, or for two whose
codes share a byte, and where states are three."""
_FEW_ARRAYS, _MANY_ARRAYS, _MAX_ARRAYS = 6, 8, 10
"""Arrays of a parameter, its master and two, three and four states in blocks; kernels with more have what they need."""
_MAX_RUNS = 4  # runs of a thread in a block
_LOAD = 16  # bytes of the widest array that a thread loads at once: these neighbours are a run
_DECIDE_BLOCK = 8192
_modules: dict[int, ModuleType] = {}


def _module(spec: KernelSpec) -> ModuleType:
    if id(spec) not in _modules:
        _modules[id(spec)] = load_module(spec.name, source(spec))
        weakref.finalize(spec, _modules.pop, id(spec), None)
    return _modules[id(spec)]


def tile_options(spec: KernelSpec, shape: TileShape) -> tuple[dict[str, int], dict[str, int]]:
    """The constants of a pass over elements, without UNSCALE, and the options that limit its registers."""
    constants = {"TILE": shape.tile, "SPAN": shape.span}
    if not spec.has_blocks:
        return constants, {}
    constants["STAGES"] = shape.stages
    constants["RUNS"] = min(max(shape.tile // (_run_of(spec) * shape.warps), 1), _MAX_RUNS)
    is_small = spec.compute is torch.float32 and len(spec.arrays) <= _MAX_ARRAYS
    return constants, {"maxnreg": _registers(spec, constants["RUNS"])} if is_small else {}


def _run_of(spec: KernelSpec) -> int:
    """Elements per warp where each thread has one run of neighbours."""
    return 32 * _LOAD // spec.widest


def _registers(spec: KernelSpec, runs: int) -> int:
    """Registers per thread of a pass over blocks, by the number of a thread's runs in a block."""
    count = len(spec.arrays)
    if spec.widest > 2:
        return _MORE_REGISTERS if count <= _MANY_ARRAYS else _WIDE_REGISTERS
    if runs > 1:
        # Both codes of a byte are computed in parallel.
        has_pairs = any(array.elements == 2 for array in spec.arrays)
        draws_more = spec.draws and (has_pairs or len(spec.draws) > 2)
        return _MAX_REGISTERS if draws_more or count > _FEW_ARRAYS else _RUNS_REGISTERS
    return _MORE_REGISTERS if spec.draws or count > _FEW_ARRAYS else _REGISTERS


_Launches = list[TableLaunch]


class TritonPasses(Passes):
    """Tables in device memory and passes that are Triton kernels; arguments as for `Segment`."""

    can_be_captured = True
    _strided_tiles = 0  # tiles of tensors with gaps, walked by coordinates

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry], *arguments: Any) -> None:
        self._spec, self._device = spec, entries[0].param.device
        self.shape = tile_shape(spec, self._device)
        super().__init__(Segment(spec, entries, *arguments, tile_size=self.shape.span))
        segment, zeros, device = self.segment, self.segment.zeros, self._device
        self.hyper = zeros(len(segment.group_rows.indices), len(spec.hypers))
        has_slices = bool(spec.program.slices.views)
        self.slices: CudaSlices | None = CudaSlices(spec, segment.entries, device) if has_slices else None
        max_tiles = max(segment.tiles.count, self.slices.max_tiles if self.slices else 0, 1)
        tables = {
            **self.tables(),
            "addresses": self.arrays.addresses.T,
            "counts": np.asarray([len(entries)], dtype=np.int64),
            "tile_list": np.zeros(1, dtype=np.int32),
            "partials": zeros(max_tiles if spec.reduction_count else 1, max(spec.reduction_count, 1)),
            **{f"{name}_state": array for name, array in segment.scalar_states.items()},
            **{name: zeros(1) for name in ("words", "first_word", "report_partials")},
        }
        self._tables = device_tables(tables, device)
        self._sum_reports: _Launches = []
        self._scalar: _Launches = []  # the list stays: calls read it
        self._cut: tuple[Tiles, dict[str, torch.Tensor]] | None = None  # the tiles of passes that measure statistics
        self._list_strided_tiles()

    def leave(self, measured: tuple[Output, ...]) -> None:
        super().leave(measured)
        outputs = self.outputs
        assert outputs is not None
        self._tables["words"] = outputs.words
        self._tables["first_word"] = torch.from_numpy(outputs.first_word[:-1].copy()).to(self._device)
        self._cut = None
        self._launches()

    def _cut_measured(self) -> tuple[dict[str, torch.Tensor], Tiles, int]:
        """Tables, tiles and strided tiles of passes that measure; and the launch that combines their results."""
        segment, outputs = self.segment, self.outputs
        assert outputs is not None
        spans = min(max(segment.tiles.count // _ENOUGH_PROGRAMS, 1), _MAX_SPANS)
        # Sums that the update needs, and ranges of tiles, use the tiles of the other passes.
        spans = 1 if self._spec.reduction_count or segment.streamer is not None else spans
        if self._cut is None:
            cut = cut_tiles(segment.tiles.numel.tolist(), segment.tiles.size * spans)
            size, compute = (max(cut.count, 1), len(outputs.names)), self._spec.compute
            tables = {
                "report_partials": torch.zeros(size, dtype=compute, device=self._device),
                "tile_tensor": device_table(cut.tile_tensor, self._device),
                "first_tile": device_table(cut.first_tile, self._device),
            }
            self._cut = cut, tables
            self._sum_reports = self._report_sums(cut, tables["report_partials"])
        cut, tables = self._cut
        self._tables["report_partials"] = tables["report_partials"]
        listed = self._strided_in(cut.tile_tensor)
        return {**self._tables, **tables, "tile_list": device_table(listed, self._device)}, cut, len(listed)

    def _strided_in(self, tile_tensor: np.ndarray) -> np.ndarray:
        """The indices of tiles that are walked by coordinates."""
        return np.nonzero(self.arrays.layout_index[tile_tensor] >= 0)[0].astype(np.int32)

    def _report_sums(self, cut: Tiles, partials: torch.Tensor) -> _Launches:
        """The launches that combine the reports of tiles: neighbours first, as a tensor may have a million tiles."""
        from .support import sum_up_reports

        outputs, device = self.outputs, self._device
        assert outputs is not None
        width = len(outputs.names)
        runs, tensors = chunks_of(np.diff(np.append(cut.first_tile, cut.count)), _REPORT_RUN)
        extremes = torch.tensor([float(reduce == "max") for reduce in outputs.reduces], device=device)
        between = torch.zeros(max(runs.shape[1], 1) * width, dtype=torch.float64, device=device)
        constants = {"COLUMNS": width, "WIDTH": 1 << max(width - 1, 1).bit_length(), "BLOCK": 32}
        launches = []
        for bounds, rows, results in ((runs, partials, between), (tensors, between, outputs.totals)):
            starts, stops = (device_table(bound, device) for bound in bounds)
            tables = {"partials": rows, "starts": starts, "stops": stops, "extremes": extremes, "results": results}
            launches.append(launch_of(sum_up_reports, bounds.shape[1], device, constants, tables, **EXACT))
        return launches

    def _launches(self) -> None:
        self._range_tables: dict[TileRange, tuple[dict[str, torch.Tensor], int]] = {}
        self._range_calls: dict[tuple[TileRange, int, bool, bool], list[partial[Any]]] = {}
        spec, passes = self._spec, range(len(self._spec.program.tiles))
        size = -(-len(self.segment.entries) // _SCALAR_BLOCK), {"BLOCK": _SCALAR_BLOCK}, self._tables
        self._scalar[:] = [self._prepare(spec, f"scalar_pass_{index}", *size) for index in passes]
        ways = {False: (spec, self._tables, self.segment.tiles, self._strided_tiles)}
        if self.outputs is not None and self.outputs.by_kernels:
            ways[True] = (self.outputs.measuring, *self._cut_measured())
        self._tile = {
            (unscale, measures): [self._tile_launches(index, unscale, *way) for index in passes]
            for unscale in (False, True)
            for measures, way in ways.items()
        }

    def _tile_launches(
        self,
        index: int,
        unscale: bool,
        spec: KernelSpec,
        tables: Mapping[str, torch.Tensor],
        tiles: Tiles,
        strided_tiles: int,
    ) -> _Launches:
        launches: _Launches = []
        for tile in spec.program.passes_of(index):
            if self.slices and tile.view is not None:
                strided = self.arrays.layout_index >= 0
                launches += self.slices.launches(_module(spec), tile, self._tables, unscale, strided)
                continue
            launches += self._element_launches(spec, index, unscale, tables, tiles.count, strided_tiles, tiles.size)
            if tile.reductions:
                size = {"SPAN": self.shape.span, "BLOCK": _FINISH_BLOCK}
                launches.append(self._prepare(spec, f"finish_{index}", len(self.segment.entries), size, self._tables))
        return launches

    def _element_launches(
        self,
        spec: KernelSpec,
        index: int,
        unscale: bool,
        tables: Mapping[str, torch.Tensor],
        tiles: int,
        strided_tiles: int,
        span: int,
    ) -> _Launches:
        """The launches of a tile pass over elements: tiles in memory order, then tiles walked by coordinates."""
        if not tiles:
            return []
        # A pass that measures has registers for one tile only.
        stages = self.shape.stages if spec is self._spec else 1
        constants, _ = tile_options(spec, replace(self.shape, warps=self._warps(spec), stages=stages))
        grids = {
            f"tile_pass_{index}": tiles,
            **({f"tile_pass_{index}_strided": strided_tiles} if strided_tiles else {}),
        }
        constants = {**constants, "SPAN": span, "UNSCALE": unscale}
        return [self._prepare(spec, name, grid, constants, tables) for name, grid in grids.items()]

    def _warps(self, spec: KernelSpec) -> int:
        """Warps of a tile pass: where it measures blocks, enough for one run of neighbours per thread."""
        # Sums that the update needs have the same order with and without measures.
        if spec is self._spec or not spec.has_blocks or spec.reduction_count:
            return self.shape.warps
        return max(self.shape.warps, self.shape.tile // _run_of(spec))

    def _prepare(
        self, spec: KernelSpec, name: str, grid: int, constants: Mapping[str, int], tables: Mapping[str, torch.Tensor]
    ) -> TableLaunch:
        is_tile_pass, options = name.startswith("tile_pass"), {}
        if spec.compute is torch.float32 and spec is not self._spec:
            options = _MEASURING
        elif is_tile_pass and not name.endswith("_strided"):
            options = tile_options(spec, self.shape)[1]
        options = {**options, **EXACT, "num_warps": self._warps(spec) if is_tile_pass else 4}
        return launch_of(
            getattr(_module(spec), f"{spec.name}_{name}"), grid, self._device, constants, tables, **options
        )

    def upload(self) -> None:
        arrays = self.arrays
        copy_to(self._tables["addresses"], np.ascontiguousarray(arrays.addresses.T))
        copy_to(self._tables["layout_index"], arrays.layout_index)
        copy_to(self._tables["streams"], self.segment.group_rows.streams)
        if arrays.layouts.shape != tuple(self._tables["layouts"].shape):
            self._tables["layouts"] = torch.zeros(arrays.layouts.shape, dtype=torch.int64, device=self._device)
        copy_to(self._tables["layouts"], arrays.layouts)
        self._list_strided_tiles()

    def _list_strided_tiles(self) -> None:
        listed = self._strided_in(self.segment.tiles.tile_tensor)
        self._strided_tiles = len(listed)
        if len(listed):
            self._tables["tile_list"] = device_table(listed, self._device)
        self._launches()

    def set_hypers(self, rows: Sequence[Sequence[float]]) -> None:
        copy_to(self.hyper, np.asarray(rows, dtype=np.float64))

    def set_device_hyper(self, row: int, column: int, tensor: torch.Tensor) -> None:
        self.hyper[row, column].copy_(tensor.detach(), non_blocking=True)

    def set_gradients(self, grads: torch.Tensor) -> None:
        before, self.segment.grads, self._tables["grads"] = self.segment.grads, grads, grads
        for _, arguments in itertools.chain(self._step_launches(False), self._step_launches(True)):
            arguments[:] = [grads if argument is before else argument for argument in arguments]

    def build(self) -> None:
        launches = self.launches(self.segment.control.unscales)
        build_together(launches, self._device)
        for launcher, arguments in launches:
            launcher.build(*arguments)
        if self.matrices is not None:
            # Matrix libraries initialize at their first call, which a capture would not allow.
            self.matrices.build()

    @property
    def is_built(self) -> bool:
        kernels = all(launcher.is_built for launcher, _ in self._step_launches(self.segment.control.unscales))
        return kernels and (self.matrices is None or self.matrices.is_built)

    def launches(self, unscales: bool) -> list[Launch]:
        # Kernels of products take longest to compile, so that they begin first.
        return [*(self.matrices.launches() if self.matrices is not None else []), *self._step_launches(unscales)]

    def _step_launches(self, unscales: bool) -> Iterator[TableLaunch]:
        yield from self._scalar
        for (unscale, _), passes in self._tile.items():
            if unscale is unscales:
                yield from itertools.chain.from_iterable(passes)
        yield from self._sum_reports

    def scalar_calls(self, index: int) -> list[partial[Any]]:
        return [partial(_launch, self._scalar, index)]

    def _tables_of(self, tile_range: TileRange) -> tuple[dict[str, torch.Tensor], int]:
        """The tables of launches over a range of tiles, and the number of its tiles that are walked by coordinates."""
        tables = tables_of(self, tile_range, self._tables)
        listed = self._strided_in(self.segment.tiles.tile_tensor[tile_range.tiles.start : tile_range.tiles.stop])
        tables["addresses"] = tables["addresses"].T
        tables.update({"tile_list": listed} if len(listed) else {})
        return device_tables(tables, self._device), len(listed)

    def tile_calls(self, index: int, tile_range: TileRange | None = None) -> list[partial[Any]]:
        if tile_range is None:
            return [partial(self._tile_pass, index)]
        segment, program = self.segment, self._spec.program
        variant = unscales, _ = segment.control.unscales, self.measures
        key = (tile_range, index, *variant)
        if key not in self._range_calls:
            if tile_range not in self._range_tables:
                self._range_tables[tile_range] = self._tables_of(tile_range)
            tables, strided = self._range_tables[tile_range]
            spec, tile = self.kernels, program.tiles[index]
            tiles = len(tile_range.tiles)
            launches = self._element_launches(spec, index, unscales, tables, tiles, strided, self.shape.span)
            if tile is not None and tile.reductions and tile_range.tiles.stop == segment.tiles.count:
                launches.append(self._tile[variant][index][-1])
            self._range_calls[key] = [partial(launcher, *arguments) for launcher, arguments in launches]
        return self._range_calls[key]

    def _tile_pass(self, index: int) -> None:
        for launcher, arguments in self._tile[self.segment.control.unscales, self.measures][index]:
            launcher(*arguments)

    def sum_up_reports(self) -> None:
        for launcher, arguments in self._sum_reports:
            launcher(*arguments)


def _launch(launches: _Launches, index: int) -> None:
    launcher, arguments = launches[index]
    launcher(*arguments)


DecisionLaunchers = dict[tuple[object, ...], tuple[Launcher, torch.Tensor]]
"""Launchers of decisions from the same kinds of numbers, each with its table of numbers."""


def decide_on_device(
    decide: Callable[..., Decision],
    control: torch.Tensor,
    inputs: StepInputs,
    launchers: DecisionLaunchers,
    *,
    build_only: bool = False,
) -> None:
    """Write the control numbers of a GPU step and the memory of its limits, with one small launch."""
    launcher, arguments = decision_launch(decide, control, inputs, launchers)
    (launcher.build if build_only else launcher)(*arguments)


def decision_launch(
    decide: Callable[..., Decision], control: torch.Tensor, inputs: StepInputs, launchers: DecisionLaunchers
) -> Launch:
    """The launch of `decide_on_device`; arguments as there."""
    sums = inputs.partials or (inputs.power_sum,)
    numbers = (*sums, inputs.grad_scale, inputs.found_inf, inputs.loss, inputs.overflow)
    # A launcher expects the dtypes of its first call.
    dtypes = tuple(None if number is None else number.dtype for number in numbers)
    key = (dtypes, inputs.skip_above, inputs.skip_nonfinite, inputs.check_overflow, inputs.limits)
    memories = [inputs.memory.of(limit, control.device) for limit in inputs.limits if inputs.memory]
    if key not in launchers:
        require(not is_capturing(), f"no step was decided from a scaler and limits like these before; {WARM_UP}")
        kernel = load_module("decide", decision_source(decide, inputs)).decide
        warps = 32 if inputs.partials else 1
        launcher = Launcher(kernel, 1, control.device, {"BLOCK": _DECIDE_BLOCK}, num_warps=warps, **EXACT)
        launchers[key] = launcher, torch.tensor(numbers_of(inputs), dtype=torch.float64, device=control.device)
    launcher, table = launchers[key]
    return launcher, (control, table, *(number for number in numbers if number is not None), *memories)
