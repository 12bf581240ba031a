"""The inputs of a step's decision, and the memory of its limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.spec import CLIP, CONTROL_SIZE, INVERSE_SCALE, SKIP
from ..rules.limits import Limit, first_numbers


def clip_code(limit: Any) -> float:
    """Encode `max_grad_norm` of a group, or another number, for kernels; below 0 means the control number CLIP."""
    return -math.inf if isinstance(limit, Limit) else float(limit)


class StepHistory:
    """Memory across an optimizer's steps: the numbers of its limits, equal on all of its devices."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Limit, torch.device], torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        """The loss of the step to be decided next, float64[1]; None without a loss."""
        self.has_norm = False  # whether the last step computed the norm of its gradients

    def of(self, limit: Limit, device: torch.device) -> torch.Tensor:
        """Return the numbers of a limit on a device, float64[numbers]; a new device starts with a copy of another's."""
        key = (limit, device)
        if key not in self._numbers:
            first, elsewhere = _first(limit, device), self._held(limit)
            self._numbers[key] = first.copy_(elsewhere[-1]) if elsewhere else first
        return self._numbers[key]

    def _held(self, limit: Limit) -> list[torch.Tensor]:
        return [numbers for (other, _), numbers in self._numbers.items() if other == limit]

    @property
    def numbers(self) -> list[torch.Tensor]:
        """The numbers of all limits, in order of creation."""
        return list(self._numbers.values())

    def save(self, limits: Iterable[Limit], device: torch.device | None) -> dict[str, torch.Tensor]:
        """Copy the numbers of these limits, by the name of their class; `device` is the state's, None without state."""
        # State may begin before the first step; `dcp.load` in place needs the numbers then too.
        first = [] if device is None else [device]
        # The last device: the first may be that of a checkpoint, where no step writes them.
        return {
            type(limit).__name__: numbers.clone()
            for limit in limits
            for numbers in (self._held(limit) or [_first(limit, own) for own in first])[-1:]
        }

    def load(self, limits: Iterable[Limit], saved: Mapping[str, Any]) -> None:
        """Load the result of `save`; limits that are missing in it, or differ in size, are reset."""
        for limit in limits:
            numbers = saved.get(type(limit).__name__)
            if not isinstance(numbers, torch.Tensor) or numbers.numel() != len(first_numbers(limit)):
                numbers = None
            own = self._held(limit)
            if not own and numbers is not None:
                own = [self.of(limit, numbers.device)]
            for tensor in own:
                tensor.copy_(_first(limit, tensor.device) if numbers is None else numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loss": None}


def _first(limit: Limit, device: torch.device) -> torch.Tensor:
    return torch.tensor(first_numbers(limit), dtype=torch.float64, device=device)


@dataclass
class StepInputs:
    """The inputs of a step's decision."""

    power_sum: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # the loss scale of the gradients, a number on the device, or None
    found_inf: torch.Tensor | None = None  # nonzero if a gradient overflowed, a number on the device, or None
    skip_nonfinite: bool = False  # whether nonfinite gradients skip the step
    check_overflow: bool = False  # whether nonfinite gradients count as an overflow for a scaler
    skip_above: float = math.inf  # unscaled norm above which the step is skipped
    overflow: torch.Tensor | None = None
    partials: tuple[torch.Tensor, torch.Tensor] | None = None
    limits: tuple[Limit, ...] = ()  # a limit that may clip is the last
    memory: StepHistory | None = None  # the memory of the limits
    loss: torch.Tensor | None = None  # the step's loss for the limits, a float64 number on the device, or None
    needs_norm: bool = False  # whether the step needs a norm pass

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to decide."""
        return not self.has_norm and self.grad_scale is None and self.found_inf is None

    @property
    def may_skip(self) -> bool:
        """Whether the step may be skipped; then only the device knows the outcome."""
        scaled = self.grad_scale is not None or self.found_inf is not None
        return bool(scaled or self.skip_nonfinite or self.check_overflow or self.limits or self.skip_above < math.inf)

    @property
    def has_norm(self) -> bool:
        """Whether there was a norm pass."""
        return self.power_sum is not None or self.partials is not None


class Control:
    """The decision about a step on a device: its control numbers, and the facts known to the host.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(CONTROL_SIZE, dtype=torch.float64, device=device)
        """float64[6] on the device; initially the numbers of a step without clip, scale or skip."""
        self.numbers[INVERSE_SCALE].fill_(1.0)
        self.numbers[CLIP].fill_(math.inf)
        self.skip = self.numbers[SKIP]  # a scalar on the device, nonzero if the step is skipped
        self.unscales = False  # whether gradients carry a loss scale; the last pass that reads them removes it
        self.may_skip = False  # whether the device may decide to skip the step
