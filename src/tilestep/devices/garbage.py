"""Python's garbage collector: a pause of it, and the objects that it tracks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any


@contextmanager
def without_collections() -> Iterator[None]:
    """A block, or by decoration a function, in which no garbage is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def living(kinds: type | tuple[type, ...]) -> list[Any]:
    """Every object of some classes that the garbage collector tracks."""
    objects = gc.get_objects()
    # By their own class: some objects import what they stand for when they are asked for another one. A class is asked
    # once, not for each of its objects, of which there are hundreds of thousands.
    classes = list(map(type, objects))
    identities = list(map(id, classes))
    chosen = {identity for identity, kind in dict(zip(identities, classes)).items() if issubclass(kind, kinds)}
    return list(compress(objects, map(chosen.__contains__, identities))) if chosen else []
