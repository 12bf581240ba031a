"""torch's functions that clip gradients, told apart by nobody from those that find none."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_watched: list[Callable[[list[Any]], None]] = []
_NAMES = ("_clip_grads_with_norm_", "clip_grad_value_")


def watch_clips(look: Callable[[list[Any]], None]) -> bool:
    """Have something see the parameters whose gradients torch is going to clip; it may raise.

    `clip_grad_norm_` looks its second half up in its module, so whoever has imported it before is seen too.

    Returns:
        Whether it will see them; without torch's functions being where they are known to be nothing is changed.
    """
    if look in _watched:
        return True
    module: Any = sys.modules.get("torch.nn.utils.clip_grad")
    originals = {name: getattr(module, name, None) for name in _NAMES}
    if not all(map(callable, originals.values())):
        return False
    _watched.append(look)
    if len(_watched) == 1:
        for original in originals.values():
            seen = _seen(original)
            for place in (module, torch.nn.utils):
                for key, value in list(vars(place).items()):
                    if value is original:
                        setattr(place, key, seen)
    return True


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        # A generator could be read only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for look in _watched:
            look(listed)
        return original(listed, *args, **kwargs)

    return clip
