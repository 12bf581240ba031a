"""How many kernels this process has built."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_seen = 0


def count_build() -> None:
    """Note one build; called where a compiler is about to run."""
    global _seen
    with _lock:  # several threads may build
        _seen += 1


def compile_count() -> int:
    """How many kernels this process has compiled so far; kernels found in the cache do not count.

    Example:
        >>> compile_count() >= 0
        True
    """
    return _seen
