"""Where the element buffers of an optimizer's state live: beside their parameters, unless `offload` says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..backends.spec import KernelSpec
from ..placement.local import local_part
from ..runtime import DeviceEngine, Entry, JointNorm
from ..runtime.segment import Segment


class StateMemory:
    """Where the element buffers of one optimizer's state live, masters included: here, beside their parameters."""

    # Step counts, other numbers, rows, columns and matrices are always with the parameters. `offload` gives an
    # optimizer another one; a new kind of memory is a class derived from this one.

    is_beside = True  # whether state lies beside its parameters, in memory that begins and goes with them
    not_copied = ""  # why an optimizer whose state is here cannot be copied or pickled; empty if it can

    def part(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The tensor that kernels update for a parameter."""
        return part

    def make(self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """New buffers that are going to be written, one for each tensor, with its shape and memory format."""
        return [
            torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
            for param, dtype in zip(params, dtypes)
        ]

    def keeps(self, buffer: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a buffer lives where it should."""
        return buffer.device == param.device

    def check(self, label: str, param: torch.Tensor) -> None:
        """Raise for a parameter that this home has no place for."""

    def begin(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Before tables are built; buffers and segments of earlier ones are used no more."""

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """Look at an entry before segments are made of it."""

    def split_segments(
        self, parts: Sequence[tuple[KernelSpec, Sequence[Entry]]]
    ) -> Sequence[tuple[KernelSpec, Sequence[Entry]]]:
        """Segments to make of these, which go together as they are."""
        return parts

    def on_segment(self, segment: Segment) -> None:
        """Look at a segment after it was made."""

    def wait(self) -> None:
        """Have the host see what steps have written to the buffers."""

    looks_at_gradients = False  # whether `gradients` must be asked at every step
    keeps_gradients = False  # whether gradients are taken from the parameters while backward runs

    def gradients(
        self, params: Sequence[Sequence[torch.Tensor]], gradients: list[list[torch.Tensor | None]]
    ) -> list[list[torch.Tensor | None]]:
        """The gradients that kernels read, for each engine one for each of its parameters."""
        return gradients

    def present_gradients(self, params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with what there is of their gradients on this rank."""
        return [(param, local_part(param.grad)) for param in params if param.grad is not None]

    def power_sums(self, sources: Sequence[DeviceEngine | JointNorm]) -> list[torch.Tensor]:
        """Sums of squares of this step's gradients, float64[1] each on any device, not waited for."""
        return [source.norm() for source in sources]

    def sync_masters(self) -> None:
        """Before a step: take over what other code has written to the parameters."""

    def note_parameters(self) -> None:
        """After a step: the parameters are as the step has left them."""

    def drop_gradients(self) -> None:
        """Forget gradients that are kept here."""

    def finish(self, engine: DeviceEngine) -> None:
        """After the passes of a step."""

    def note_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Before a step, where gradients are kept: note whether there are any."""

    had_gradients = False  # whether there were gradients for the last step that are used up

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have a scaler's function unscale the gradients, wherever they are."""
        return unscale(optimizer, *args, **kwargs)
