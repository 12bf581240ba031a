"""The tables of a window on a GPU: views of its segment's, in which tiles and tensors count from the window's first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from .segment import Segment
from .windows import Window


def window_tables(
    segment: Segment, window: Window, tables: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """What launches over a window's tiles read and write."""
    begin, first = window.tiles.start, window.tensors.start
    tiles, tensors = slice(begin, window.tiles.stop), slice(first, window.tensors.stop)
    owner = segment.tiles.tile_tensor[tiles]
    listed = np.nonzero(segment.layout_index[owner] >= 0)[0].astype(np.int32)
    found = dict(tables)
    for name in ("grads", "numel", "columns", "layout_index", "rows", "step", "streams"):
        found[name] = tables[name][tensors]
    found["partials"] = tables["partials"][begin * segment.spec.reduction_count :]
    if segment.taps is not None:
        found["first_word"] = tables["first_word"][tensors]
        if segment.taps.stats and segment.taps.by_kernels:
            found["tap_partials"] = tables["tap_partials"][begin * len(segment.taps.columns) :]

    def own(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(segment.device)

    found["tile_tensor"] = own(owner - np.int32(first))
    found["first_tile"] = own(segment.tiles.first_tile[tensors] - begin)
    found["addresses"] = own(segment.window_addresses(window).T)
    if len(listed):
        found["tile_list"] = own(listed)
    return found, len(listed)
