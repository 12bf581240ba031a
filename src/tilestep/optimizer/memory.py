"""Where the element buffers of an optimizer's state live: with their parameters, unless it is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.spec import KernelSpec
from ..placement import Share
from ..placement.local import local_part
from ..runtime import DeviceEngine, Entry, GradNorm
from ..runtime.passes import Passes

BySpec = Sequence[tuple[KernelSpec, Sequence[Entry]]]  # entries with what their kernels are made of
Gradients = list[list[torch.Tensor | None]]  # by engine and parameter


class StateMemory:
    """The memory of an optimizer's element buffers, masters included: here, that of their parameters' devices."""

    # Step counts, other numbers, rows, columns and matrices are always on the parameters' devices. `offload` gives an
    # optimizer another memory; a new kind of memory is a class derived from this one.

    on_device = True  # whether state is on the device of its parameters, and allocated and freed with them
    not_copied = ""  # why an optimizer with this memory cannot be copied or pickled; empty if it can

    def part(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The tensor that kernels update for a parameter."""
        return part

    def make(self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Uninitialized buffers with the shapes and memory formats of the tensors."""
        return [
            torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
            for param, dtype in zip(params, dtypes)
        ]

    def keeps(self, buffer: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a buffer is in this memory."""
        return buffer.device == param.device

    def check(self, label: str, param: torch.Tensor) -> None:
        """Raise for a parameter whose state cannot be in this memory."""

    def begin(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Called before tables are built: earlier buffers and segments are no longer used."""

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """Called with an entry before segments are made of it."""

    def split_segments(self, parts: BySpec) -> BySpec:
        """The entries of each segment to make, from the entries of each spec."""
        return parts

    def on_passes(self, passes: Passes) -> None:
        """Called with the passes of a new segment."""

    def wait(self) -> None:
        """Wait until the host can read what steps have written to the buffers."""

    looks_at_gradients = False  # whether `gradients` must be called at every step
    timeline: Any = None  # of gradients that are taken from the parameters while backward runs; None if none are

    def gradients(self, params: Sequence[Sequence[torch.Tensor]], gradients: Gradients) -> Gradients:
        """The gradients that kernels read."""
        return gradients

    def present_gradients(self, shares: Sequence[Share]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with the local parts of their gradients, if they have any."""
        return [(share.param, local_part(share.holder.grad)) for share in shares if share.holder.grad is not None]

    def power_sums(self, norms: Sequence[GradNorm]) -> list[torch.Tensor]:
        """Sums of squares of this step's gradients, float64[1] each on any device, not waited for."""
        return [norm.sum_squares() for norm in norms]

    def sync_masters(self) -> None:
        """Called before a step: copy parameters that other code has written to."""

    def note_parameters(self) -> None:
        """Called after a step: remember the parameters as they are."""

    def drop_gradients(self) -> None:
        """Drop the gradients kept here."""

    def finish(self, engine: DeviceEngine) -> None:
        """Called after the passes of a step."""

    def note_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Called before a step: note whether there are gradients, if they are kept here."""

    had_gradients = False  # whether the last step had gradients, which it has consumed

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a scaler's function with all gradients, wherever they are."""
        return unscale(optimizer, *args, **kwargs)
