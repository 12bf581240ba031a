"""The norm kernels of a list of tensors: built once, launched with current addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..devices import has_streams
from ..kernels.launch import Launch
from .cpu_backend import CpuNorm, EagerNorm, cpu_norm
from .triton_backend import TritonNorm


class NormTable:
    """Norm kernels over a fixed list of tensor sizes on one device; each launch takes addresses."""

    def __init__(self, device: torch.device, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._backend: TritonNorm | CpuNorm | EagerNorm
        if has_streams(device):
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self._backend = TritonNorm(device, numels, dtypes)
        else:
            self._backend = cpu_norm(numels, dtypes)
        self.sum_squares: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._backend.sum_squares
        """`launch` for the 2-norm without its root; returns what it writes to."""

    def launch(self, addresses: torch.Tensor, out: torch.Tensor, norm_type: float = 2.0, *, root: bool = False) -> None:
        """Compute the norm of the tensors at these addresses: two launches, no allocation, no synchronization.

        float64 tensors are summed in float64, all others in float32; tiles are summed in float64, in an order that
        makes two runs equal to the bit.
        """
        self._backend.norm(addresses, out, float(norm_type), root)

    def launch_tiles(self, addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """On a GPU, only the first launch of the 2-norm, for a caller that adds up the tiles itself."""
        return self._backend.tiles(addresses) if isinstance(self._backend, TritonNorm) else None

    def tiles_launch(self, addresses: torch.Tensor) -> Launch | None:
        """The launch of `launch_tiles`; None on a CPU."""
        return self._backend.tiles_launch(addresses) if isinstance(self._backend, TritonNorm) else None

    def tiles_put(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The result of `launch_tiles`, without the launch."""
        return self._backend.tiles_put() if isinstance(self._backend, TritonNorm) else None

    def scale(self, addresses: torch.Tensor, norm: torch.Tensor, max_norm: torch.Tensor | float) -> None:
        """Multiply the tensors by min(1, max_norm / (norm + 1e-6)) in place: one launch, no synchronization."""
        self._backend.scale(addresses, norm, max_norm if isinstance(max_norm, torch.Tensor) else float(max_norm))
