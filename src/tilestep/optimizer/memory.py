"""The memory of an optimizer's element buffers: on their parameters' devices, unless state is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.spec import KernelSpec
from ..placement import Share
from ..placement.local import local_part
from ..runtime import DeviceEngine, Entry, GradNorm
from ..runtime.passes import Passes

BySpec = Sequence[tuple[KernelSpec, Sequence[Entry]]]  # entries grouped by kernel spec
Gradients = list[list[torch.Tensor | None]]  # by engine and parameter


class StateMemory:
    """The memory of an optimizer's element buffers, masters included; this class: on their parameters' devices."""

    # Step counts, other scalars, rows, columns and matrices are always on the parameters' devices. `offload` replaces
    # an optimizer's memory; a new kind of memory derives from this class.

    on_device = True  # whether state is on its parameters' device, and allocated and freed with them
    no_copy = ""  # why an optimizer with this memory cannot be copied or pickled; empty if it can

    def part(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor that kernels update for a parameter."""
        return part

    def make(self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return uninitialized buffers with the shapes and memory formats of the tensors."""
        return [
            torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
            for param, dtype in zip(params, dtypes)
        ]

    def contains(self, buffer: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a buffer is in this memory."""
        return buffer.device == param.device

    def check(self, label: str, param: torch.Tensor) -> None:
        """Raise for a parameter whose state cannot be in this memory."""

    def on_build(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Called before tables are built: earlier buffers and segments are no longer used."""

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """Called with an entry before its segment is built."""

    def split_segments(self, parts: BySpec) -> BySpec:
        """Return the entries of each segment to build, from the entries of each spec."""
        return parts

    def on_passes(self, passes: Passes) -> None:
        """Called with the passes of a new segment."""

    def wait(self) -> None:
        """Wait until the host can read the buffers that steps have written."""

    replaces_gradients = False  # whether `gradients` must be called at every step
    timeline: Any = None  # the timeline that takes gradients from the parameters during backward; None if there is none

    def gradients(self, params: Sequence[Sequence[torch.Tensor]], gradients: Gradients) -> Gradients:
        """Return the gradients that kernels read."""
        return gradients

    def present_gradients(self, shares: Sequence[Share]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters with gradients, each with its gradient's local part."""
        return [(share.param, local_part(share.holder.grad)) for share in shares if share.holder.grad is not None]

    def power_sums(self, norms: Sequence[GradNorm]) -> list[torch.Tensor]:
        """Return the sums of squares of this step's gradients, float64[1] each, on any device, without a sync."""
        return [norm.sum_squares() for norm in norms]

    def sync_masters(self) -> None:
        """Called before a step: copy parameters that other code has written."""

    def record_parameters(self) -> None:
        """Called after a step: record the state of the parameters."""

    def drop_gradients(self) -> None:
        """Drop the gradients held by this memory."""

    def finish(self, engine: DeviceEngine) -> None:
        """Called after the passes of a step."""

    def record_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Called before a step: record whether there are gradients, if this memory holds them."""

    had_gradients = False  # whether the last step had gradients and consumed them

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a scaler's function with all gradients, wherever they are stored."""
        return unscale(optimizer, *args, **kwargs)
