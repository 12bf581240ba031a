"""Accumulation over several backward passes, said in one way by everybody who looks at gradients as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Accumulating"]


class Accumulating:
    """Something that goes on with gradients in backward, except inside of `no_sync`.

    Example:
        >>> looks_at_gradients = Accumulating()
        >>> with looks_at_gradients.no_sync():
        ...     looks_at_gradients.syncing
        False
        >>> looks_at_gradients.syncing
        True
    """

    syncing = True
    """Whether the next backward is the last one before a step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward only accumulates."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before
