"""A rule as one file that needs torch and Triton alone."""

from __future__ import annotations

from .assembly import Request, ejected, ejected_test

__all__ = ["Request", "ejected", "ejected_test"]
