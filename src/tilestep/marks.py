"""Names that the optimizer's work carries in a profiler's trace; `tracing` finds it by them.

Nothing is recorded, and next to no time is spent, while no profiler runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from .compat import profiler_is_running

UPDATE = "tilestep::update"
"""What is launched inside is the optimizer's, wherever it runs: in a step, in backward, before a forward."""

HOST_UPDATE = "tilestep::host_update"
"""The same for what the host computes itself, though the training may be on a GPU."""

REPLAY = "tilestep::replay"
"""A CUDA graph with a step alone: the optimizer's as well, and the end of an iteration."""

ITERATION = "tilestep::iteration"
"""The end of an iteration where the user says so."""

_NOTHING: AbstractContextManager[object] = nullcontext()


def marked(name: str) -> AbstractContextManager[object]:
    """A block whose work carries a name in traces.

    Example:
        >>> with marked(UPDATE):
        ...     pass
    """
    return record_function(name) if profiler_is_running() else _NOTHING
