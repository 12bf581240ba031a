"""Modules that use weights of other modules."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Borrowing"]


class Borrowing(nn.Module):
    """Uses a weight of a layer that it does not call."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[-1], weight.shape[0], bias=False)
        self.layer.weight = weight

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(data, self.layer.weight)
