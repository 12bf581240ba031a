"""Cases of a test in processes side by side: most of the time of a GPU test is the compiler's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["side_by_side"]

MOST = 14
"""Each process has a CUDA context."""

SECONDS = 300.0
"""For which the result of a case is waited for."""


@contextmanager
def side_by_side(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> Iterator[Callable[..., Any]]:
    """What gives the result of a case, all of which begin now; those left at the end are not begun.

    Where pytest itself has several processes (`-n 14 --dist worksteal`) each runs its cases when it is asked for them.

    Args:
        function: importable in other processes.
        cases: its arguments.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield function
        return
    workers = min(MOST, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        results = {case: pool.submit(function, *case) for case in cases}
        yield lambda *case: results[case].result(timeout=SECONDS)
    finally:
        pool.shutdown(cancel_futures=True)
