"""The norm on a GPU, in two launches, and the scaling, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..devices import upload
from ..kernels.launch import Launch, Launcher, load_module
from .tiles import DTYPES, Order, cut, order_of
from .triton_source import FINISH_BLOCK, norm_source, scale_source, tile_shape

FINISH_WARPS = 32


class TritonNorm:
    """Tables of tiles and partial results on the device, and launchers, which are made on first use."""

    def __init__(self, device: torch.device, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._device = device
        self._tile, self._step, self._warps = tile_shape(sum(numels))
        rows, tensor_of = cut(numels, dtypes, self._tile)
        self._count, self._tensors = len(tensor_of), len(rows)
        self._dtypes = tuple(dtype for dtype in DTYPES if dtype in dtypes) or (torch.float32,)
        sizes = np.array([self._count, self._tensors], dtype=np.int64)
        table = upload(np.concatenate((rows.reshape(-1), sizes)), device)
        self._table, self._tile_size, self._tensor_size = table, table[-2:-1], table[-1:]
        self._tensor_of = upload(tensor_of, device)
        self.partials = torch.empty(max(1, self._count), dtype=torch.float64, device=device)  # the tiles' sums
        self._flags: torch.Tensor | None = None
        self._norms: dict[tuple[Order, bool, torch.dtype], tuple[Launcher, Launcher]] = {}
        self._scales: dict[tuple[torch.dtype, torch.dtype | None], Launcher] = {}

    def launch(
        self, addresses: torch.Tensor, out: torch.Tensor, norm_type: float = 2.0, root: bool = False
    ) -> torch.Tensor:
        """Write the norm of the tensors at these addresses to `out`: a launch for the tiles, and a launch to finish."""
        norm_type = float(norm_type)
        order = order_of(norm_type)
        tiles, finish = self._norm_launchers(order, root, out.dtype)
        partials, size = self.partials, self._tile_size
        if order is Order.NONZERO:
            if self._flags is None:  # a number per tensor, zero between launches: the finish clears it
                self._flags = torch.zeros(max(1, self._tensors), dtype=torch.float64, device=self._device)
            partials, size = self._flags, self._tensor_size
        tiles(addresses, self._table, self._tensor_of, partials, norm_type)
        finish(partials, size, out, norm_type)
        return out

    def tiles_launch(self, addresses: torch.Tensor) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:
        """The launch for the tiles of the 2-norm only, the memory of their sums of squares, and their number."""
        tiles, _ = self._norm_launchers(Order.SQUARES, False, torch.float64)
        launch = tiles, (addresses, self._table, self._tensor_of, self.partials, 2.0)
        return launch, (self.partials, self._tile_size)

    def scale(self, addresses: torch.Tensor, norm: torch.Tensor, limit: torch.Tensor | float) -> None:
        """Multiply the tensors by min(1, limit / (norm + 1e-6)) in place: one launch."""
        limit = limit if isinstance(limit, torch.Tensor) else float(limit)
        key = (norm.dtype, limit.dtype if isinstance(limit, torch.Tensor) else None)
        if key not in self._scales:
            source = scale_source(self._dtypes, limit_on_device=key[1] is not None)
            self._scales[key] = self._over_tiles(load_module("scale", source).scale_tiles)
        self._scales[key](addresses, self._table, self._tensor_of, norm, limit)

    def _norm_launchers(self, order: Order, root: bool, dtype: torch.dtype) -> tuple[Launcher, Launcher]:
        key = (order, root, dtype)
        if key not in self._norms:
            module = load_module("norm", norm_source(self._dtypes, order))
            finish = {"ROOT": root, "BLOCK": FINISH_BLOCK}
            self._norms[key] = (
                self._over_tiles(module.norm_tiles),
                Launcher(module.norm_finish, 1, self._device, finish, num_warps=FINISH_WARPS),
            )
        return self._norms[key]

    def _over_tiles(self, kernel: Any) -> Launcher:
        sizes = {"TILE": self._tile, "STEP": self._step}
        return Launcher(kernel, self._count, self._device, sizes, num_warps=self._warps)
