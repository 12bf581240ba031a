"""How many threads the C++ that tilestep builds may use."""

from __future__ import annotations

import os

import torch

_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def thread_count() -> int:
    """Threads to use: torch's number, or one after a fork, where OpenMP's threads are gone.

    A forked child that asks for them would wait forever.

    Example:
        >>> thread_count() >= 1
        True
    """
    return 1 if _forked else torch.get_num_threads()
