"""How many threads the C++ that tilestep builds may use."""

from __future__ import annotations

import os

import torch

is_forked = False
"""Whether this process is a fork of one that may have had OpenMP's threads."""


def _note_fork() -> None:
    global is_forked
    is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def thread_count() -> int:
    """Threads to use: torch's number, or one after a fork, where OpenMP's threads are gone.

    A forked child that asks for them would wait forever.

    Example:
        >>> thread_count() >= 1
        True
    """
    return 1 if is_forked else torch.get_num_threads()
