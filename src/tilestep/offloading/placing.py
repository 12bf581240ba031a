"""Where the parameters of an optimizer are, and whether its state can be elsewhere."""

from __future__ import annotations

import torch

from ..errors import OffloadError
from ..pairs import REAL_INSTEAD
from ..placements.local import local_part


def part_of(param: torch.Tensor) -> torch.Tensor:
    """What of a parameter lies on this rank."""
    part: torch.Tensor = local_part(param)
    return part


def check_device(label: str, param: torch.Tensor, device: torch.device) -> None:
    """Raise for a parameter that is somewhere else than the others."""
    if param.is_complex():
        raise OffloadError(f"{label} is complex, and offload() moves real arrays: {REAL_INSTEAD}")
    found = part_of(param).device
    if found != device:
        raise OffloadError(
            f"{label} is on {found}, others of the optimizer are on {device}: offload() takes one device"
        )
