"""Classes of optimizers that are given further abilities while they are in use."""

from __future__ import annotations

from .optimizer import Optimizer

__all__ = ["extended_class"]


_known: dict[tuple[type[Optimizer], type[Optimizer]], type[Optimizer]] = {}


def extended_class(extension: type[Optimizer], kind: type[Optimizer]) -> type[Optimizer]:
    """The class that an optimizer takes on: it stays one of its own kind, and is one of the extension as well.

    Args:
        extension: a subclass of `Optimizer` called `...Optimizer`, with what is added.
        kind: the optimizer's class so far.

    Example:
        >>> import tilestep
        >>> class TimedOptimizer(Optimizer):
        ...     "Knows how long its steps take."
        >>> kind = extended_class(TimedOptimizer, tilestep.AdamW)
        >>> kind.__name__, issubclass(kind, tilestep.AdamW)
        ('TimedAdamW', True)
    """
    if (extension, kind) not in _known:
        bases = (extension,) if kind is Optimizer else (extension, kind)
        name = f"{extension.__name__.removesuffix('Optimizer')}{kind.__name__}"
        _known[extension, kind] = type(name, bases, {"__doc__": extension.__doc__})
    return _known[extension, kind]
