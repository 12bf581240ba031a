"""The optional C++ look at an optimizer's tensors, built beside the training and used once it is there."""

from __future__ import annotations

from .build import module, wait
