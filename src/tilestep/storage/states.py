"""What a state can be kept in: what `state_dtype` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .format import Storage
from .plain import Plain
from .terms import dtype_name

STATE_FORMATS: Mapping[str, Storage] = {
    dtype_name(dtype): Plain(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
"""Formats by the names that `state_dtype` can give; those of dtypes stand for the dtypes too."""


def state_format(choice: Any) -> Storage:
    """The format that a dtype or a name stands for.

    Raises:
        ValueError: listing the formats there are.

    Example:
        >>> str(state_format("bfloat16"))
        'bfloat16'
        >>> state_format("int7")
        Traceback (most recent call last):
        ValueError: Invalid state_dtype: 'int7'; a state can be kept as 'float32', 'bfloat16', 'float16'
    """
    name = dtype_name(choice) if isinstance(choice, torch.dtype) else choice
    if not isinstance(name, str) or name not in STATE_FORMATS:
        known = ", ".join(map(repr, STATE_FORMATS))
        raise ValueError(f"Invalid state_dtype: {choice!r}; a state can be kept as {known}")
    return STATE_FORMATS[name]
