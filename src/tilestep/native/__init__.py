"""The table of tensors, its optional C++ extension, built in the background, and page-locked host memory."""

from __future__ import annotations

from .build import module, wait
