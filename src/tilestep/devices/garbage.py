"""Python's garbage collector: pauses, and tracked objects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeVar

Found = TypeVar("Found")


@contextmanager
def without_collections() -> Iterator[None]:
    """A context, or decorator, without garbage collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def reachable(find: Callable[[], Found]) -> Found:
    """What a function finds, without what only an unreachable reference cycle holds."""
    found = find()
    if found:
        del found
        gc.collect()
        found = find()
    return found


def living(kinds: type | tuple[type, ...]) -> list[Any]:
    """All instances of some classes that the garbage collector tracks."""
    objects = gc.get_objects()
    # By `type`: `isinstance` makes lazy modules import. A class is checked once, not for each of hundreds of thousands
    # of objects.
    classes = list(map(type, objects))
    identities = list(map(id, classes))
    chosen = {identity for identity, kind in dict(zip(identities, classes)).items() if issubclass(kind, kinds)}
    return list(compress(objects, map(chosen.__contains__, identities))) if chosen else []
