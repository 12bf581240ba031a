"""State dictionaries through a file."""

from __future__ import annotations

import io
from typing import Any

import torch

__all__ = ["saved_and_loaded"]


def saved_and_loaded(state_dict: Any) -> Any:
    """What comes back from a file that a state dictionary was saved to."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
