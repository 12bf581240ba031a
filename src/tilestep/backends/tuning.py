"""Tile shapes of kernels, by device and signature; `tilestep tune` measures them beforehand.

Nothing is ever measured inside a step. Without a measured table the defaults below hold.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..devices import has_streams, is_host
from ..kernels.cache import open_cached, update_cached
from ..kernels.spec import KernelSpec, total_traffic
from ..storage import dtype_name, is_coarse


@dataclass(frozen=True)
class TileShape:
    """The tile shape of a pass."""

    tile: int  # elements of a tile
    warps: int = 1  # warps of a GPU program; 1 on the CPU
    tiles: int = 1  # tiles of a program, in sequence
    stages: int = 1  # software pipeline stages, where a GPU program walks blocks

    @property
    def span(self) -> int:
        """Elements per program."""
        return self.tile * self.tiles

    def __str__(self) -> str:
        warps = f" x {self.warps} warps" if self.warps > 1 else ""
        stages = f", {self.stages} stages" if self.stages > 1 else ""
        return f"{self.tile}{warps}" + (f" x {self.tiles} tiles" if self.tiles > 1 else "") + stages


CANDIDATES: Mapping[str, tuple[TileShape, ...]] = {
    "cuda": tuple(
        TileShape(tile, warps, tiles)
        for tile, warps in ((256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8))
        for tiles in (1, 2, 3, 4, 8, 16)
        if tile * tiles <= 8192
    ),
    "cpu": tuple(TileShape(1024 * size) for size in (4, 8, 16, 32, 64)),
}
"""What `tilestep tune` measures on each type of device; a stored shape that is none of these or `STAGED` is ignored."""

STAGED: Mapping[str, tuple[TileShape, ...]] = {
    "cuda": tuple(
        TileShape(tile, warps, tiles, stages)
        for tile, warps in ((512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8))
        for tiles in (4, 8, 16)
        for stages in (2, 3)
        if tile * tiles <= 8192
    ),
    "cpu": (),
}
"""What it measures beside them for states in blocks, whose loop alone is pipelined."""

_PIPELINED = (8, 0)
"""The compute capability from which GPUs copy to shared memory while they compute: stages are one before it."""

_forced: ContextVar[TileShape | None] = ContextVar("forced_shape", default=None)


def signature(spec: KernelSpec) -> str:
    """The properties that the fastest shape depends on: bytes moved, dtypes of arrays, sums over tiles, random bits."""
    read, written = total_traffic(spec)
    dtypes = Counter(dtype_name(array.dtype) for array in [spec.grad, *spec.arrays])
    arrays = ", ".join(f"{count} {name}" for name, count in sorted(dtypes.items()))
    sums = f", {spec.reduction_count} reductions" if spec.reduction_count else ""
    # Hashes of elements take registers and time that the byte count does not show.
    draws = ", rounded at random" if spec.draws else ""
    return f"{read} B read, {written} B written; {arrays}{sums}{draws}"


def candidates(spec: KernelSpec, device: torch.device) -> tuple[TileShape, ...]:
    """The shapes to measure for a spec on a device, likely candidates first."""
    shapes = CANDIDATES[device.type]
    if spec.has_blocks and (not has_streams(device) or torch.cuda.get_device_capability(device) >= _PIPELINED):
        return STAGED[device.type] + shapes
    return shapes


def default_shape(spec: KernelSpec | None, device_type: str) -> TileShape:
    """The shape without a measurement; on GPUs, the fastest on an H200."""
    if device_type == "cpu":
        return TileShape(16_384)
    if spec is None:
        return TileShape(512, 4, 3)
    wide = [array for array in (spec.grad, *spec.arrays) if array.dtype.itemsize > 2]
    has_master = any(array.name == "master_param" for array in wide)
    if spec.has_blocks:
        many = len(spec.arrays) > 6
        if has_master and len(wide) == 1:
            return TileShape(1024, 4, 8, 3)
        # Sixteen elements per thread halve the cost of work per block and per loop iteration.
        has_pairs = any(array.elements == 2 for array in spec.arrays)
        if not wide and (has_pairs or (spec.draws and not many)):
            return TileShape(512, 1, 16, 3)
        return TileShape(512, 2, 16, 3) if wide or many else TileShape(1024, 4, 8, 3)
    # Another shape would change the order of sums, and their bits.
    if not spec.reduction_count and spec.grad.dtype.itemsize == 2 and not spec.draws:
        # A step with remainders is bound by exact divisions.
        if not wide and len(spec.arrays) > 3 and not is_coarse(spec.storages["param"]):
            return TileShape(512, 2, 6)
        if has_master and len(wide) > 2:
            return TileShape(512, 2, 3)
        if has_master and len(wide) == 1 and len(spec.arrays) > 3:
            return TileShape(512, 2, 4)
    if spec.draws and all(array.dtype.itemsize == 2 for array in spec.arrays):
        # More elements per thread: their hashes overlap where registers limit the number of programs.
        return TileShape(512, 2, 6)
    return TileShape(512, 4, 3)


def tile_shape(spec: KernelSpec, device: torch.device) -> TileShape:
    """The tile shape of a spec on a device: forced, measured, or the default."""
    forced = _forced.get()
    if forced is not None:
        return forced
    table = known_table(device_key(device), device.type)
    measured = table.get(signature(spec)) if table else None
    return measured or default_shape(spec, device.type)


@contextmanager
def forced_shape(shape: TileShape) -> Iterator[None]:
    """A context in which every kernel has this tile shape."""
    token = _forced.set(shape)
    try:
        yield
    finally:
        _forced.reset(token)


def device_key(device: torch.device) -> str:
    """The key of a device's table: the GPU's name or the CPU's model."""
    if has_streams(device):
        return torch.cuda.get_device_name(device)
    return _cpu_name() if is_host(device) else device.type


@functools.lru_cache(maxsize=1)
def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "cpu"
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else "cpu"


def _file_name(device_name: str) -> str:
    return f"tiles-{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


@functools.lru_cache(maxsize=16)
def known_table(device_name: str, device_type: str) -> Mapping[str, TileShape]:
    """The measured shapes of a device, by signature; read once per process."""
    file = open_cached(_file_name(device_name))
    if file is None:
        return {}
    with file:
        return _usable(_parsed(file.content), device_name, device_type)


def _parsed(content: str | bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _usable(content: Any, device_name: str, device_type: str) -> dict[str, TileShape]:
    """The valid shapes in a table file of this device and version; all else is ignored."""
    if not isinstance(content, dict) or content.get("device") != device_name or content.get("tilestep") != __version__:
        return {}
    measured = {tuple(asdict(shape).items()): shape for shape in CANDIDATES[device_type] + STAGED[device_type]}
    shapes = content.get("shapes")
    usable = {}
    for name, stored in shapes.items() if isinstance(shapes, dict) else ():
        key = tuple(stored.items()) if isinstance(stored, dict) else ()
        if all(isinstance(number, int) for _, number in key) and key in measured:
            usable[name] = measured[key]
    return usable


def save_shapes(device: torch.device, shapes: Mapping[str, TileShape]) -> Path:
    """Add measured shapes to a device's table in the cache; keeps shapes that other processes have added."""
    name = device_key(device)

    def merged(text: str | None) -> str:
        earlier = _usable(_parsed(text), name, device.type) if text else {}
        stored = {key: asdict(shape) for key, shape in sorted({**earlier, **shapes}.items())}
        return json.dumps({"device": name, "tilestep": __version__, "shapes": stored}, indent=1) + "\n"

    path = update_cached(_file_name(name), merged)
    known_table.cache_clear()
    return path
