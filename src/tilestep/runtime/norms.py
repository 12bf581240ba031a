"""The norm pass over the gradients of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ..compat import is_capturing
from ..devices import upload
from ..kernels.launch import Launch
from ..norm import NormTable, norm_table
from .capturing import WARM_UP, require
from .segment import Entry

Partials = tuple[torch.Tensor, torch.Tensor]
"""The sums of squares per tile, and the number of tiles."""


class GradNorm:
    """The norm pass over gradients on a device: the sum of squares, weighted per tensor.

    Args:
        device: the device.
        entries: the tensors, in the order of summation.
        grads: int64[tensors] on the device, addresses of gradients: a single table, or the tables of several engines.
        order: int64[tensors] on the device, the place of each tensor in the concatenated tables.
    """

    def __init__(
        self,
        device: torch.device,
        entries: Sequence[Entry],
        grads: Sequence[torch.Tensor],
        order: torch.Tensor | None = None,
    ) -> None:
        self._device, self._entries, self._grads, self._order = device, entries, list(grads), order
        # Includes 0: a nonfinite gradient that is excluded from the norm still makes the sum NaN, and so is an
        # overflow.
        self._weights = sorted({entry.norm_weight for entry in entries}) or [1.0]
        self.counts_once = self._weights == [1.0]  # whether each tensor has weight 1
        self.power_sum = torch.zeros(1, dtype=torch.float64, device=device)
        self.launch: Callable[[], torch.Tensor] | None = None  # the launch of `sum_squares`, after its first call
        self._made: list[NormTable] = []
        self._sums = [] if self.counts_once else [torch.zeros_like(self.power_sum) for _ in self._weights]
        self._factors = upload(np.array(self._weights, dtype=np.float64), device)
        self._started: Partials | None = None

    @property
    def _tables(self) -> list[NormTable]:
        """A table per weight, in which tensors of other weights have no elements."""
        if not self._made:
            require(not is_capturing(), f"its gradient norm was not computed before; {WARM_UP}")
            dtypes = [entry.grad_dtype for entry in self._entries]
            for weight in self._weights:
                numels = [entry.param.numel() if entry.norm_weight == weight else 0 for entry in self._entries]
                self._made.append(norm_table(self._device, numels, dtypes))
        return self._made

    def _addresses(self) -> torch.Tensor:
        return self._grads[0] if self._order is None else torch.cat(self._grads)[self._order]

    def read_from(self, grads: torch.Tensor) -> None:
        """Read the addresses from another table from now on."""
        self._grads, self.launch, self._started = [grads], None, None

    def sum_squares(self) -> torch.Tensor:
        """Launch the norm pass over this rank's gradients or shares; returns float64[1] on the device."""
        if self.launch is None and self.counts_once and self._order is None:
            self.launch = partial(self._tables[0].launch, self._grads[0], self.power_sum)
        if self.launch is not None:
            return self.launch()
        addresses = self._addresses()
        if self.counts_once:
            return self._tables[0].launch(addresses, self.power_sum)
        sums = [table.launch(addresses, out) for table, out in zip(self._tables, self._sums)]
        return torch.sum(torch.cat(sums) * self._factors, 0, keepdim=True, out=self.power_sum)

    def start(self) -> None:
        """Launch the tiles of gradients with known addresses, to run while the host checks the rest."""
        self._started = None
        self._started = self.partials()

    def partials(self) -> Partials | None:
        """Launch the pass without its finish, if the decision can do it, else return None. All weights must be 1."""
        started, self._started = self._started, None
        tiles = None if started else self.tiles_launch()
        if tiles is None:
            return started
        (launcher, arguments), sums = tiles
        launcher(*arguments)
        return sums

    def tiles_launch(self) -> tuple[Launch, Partials] | None:
        """Return the launch of `partials`, and its result."""
        return self._tables[0].tiles_launch(self._addresses())
