"""The decision of a step as a graph, and the functions of floats that clip gradients by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..graph import Builder, Value
from ..kernels.spec import CLIP, INVERSE_SCALE, NORM, SKIP, SKIPPED, UNSCALE
from ..rules.scalars import scalar_globals, where
from .floats import Store, TracedLimit, floats_of, input_of, number_of


class Decision(NamedTuple):
    """What is decided of a step; every entry may be a traced number."""

    norm: Any  # of the unscaled gradients; 0 without a norm pass
    skip: Any
    inverse_scale: Any  # what takes the loss scale off gradients; 1 without one
    clip: Any  # the norm to which limits clip; inf for no clip
    overflow: Any  # whether gradients are not finite, as a scaler means it


def clip_coefficient(norm: Any, limit: Any) -> Any:
    """What clips gradients of a norm to a limit: min(1, limit / (norm + 1e-6)), NaN for a norm of NaN."""
    coefficient = limit / (norm + 1e-6)
    return where(coefficient > 1, 1.0, coefficient)


def gradient_scale(norm: Any, inverse_scale: Any, clip: Any, max_grad_norm: Any) -> Any:
    """What gradients are multiplied by: one over the loss scale, times the clip coefficient of the unscaled norm.

    A negative max_grad_norm asks for the limits' clip beside its own size.
    """
    limit = where(max_grad_norm < 0, where(-max_grad_norm < clip, -max_grad_norm, clip), max_grad_norm)
    return where(limit == math.inf, inverse_scale, inverse_scale * clip_coefficient(norm, limit))


@functools.cache
def graph_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], Value]:
    """The parameters of a function of floats, and its graph; kernels have the parameters under their names."""
    build, names = Builder(), function.__code__.co_varnames[: function.__code__.co_argcount]
    return names, function(*(input_of(build, name) for name in names)).value


def traced_decision(decide: Callable[..., Decision], inputs: Any) -> list[Store]:
    """What the decision of steps with such inputs writes, worked out from what is in arrays, by their names."""
    build, start = Builder(), 1
    power_sum = input_of(build, "power_sum") if inputs.has_norm else None
    names = ("grad_scale", "found_inf", "loss")
    given = [None if getattr(inputs, name) is None else input_of(build, name) for name in names]
    limits = []
    for place, limit in enumerate(inputs.limits):
        limits.append(TracedLimit(build, limit, f"memory_{place}", start))
        start += len(floats_of(limit))
    policy = SimpleNamespace(**{**vars(inputs), "skip_above": input_of(build, "numbers + 0", "skip_above")})
    policy.limits = limits
    decision = scalar_globals(decide)(power_sum, *given, [limit.memory for limit in limits], policy)
    skipped = input_of(build, f"control + {SKIPPED}", "skipped_steps") + decision.skip
    numbers = {NORM: decision.norm, SKIP: decision.skip, INVERSE_SCALE: decision.inverse_scale}
    numbers |= {UNSCALE: float(given[0] is not None), CLIP: decision.clip, SKIPPED: skipped}
    return [
        *(Store(f"control + {place}", number_of(build, number)) for place, number in numbers.items()),
        *([] if inputs.overflow is None else [Store("overflow", number_of(build, decision.overflow))]),
        *(store for limit in limits for store in limit.stores()),
    ]


def numbers_of(inputs: Any) -> list[float]:
    """The numbers that kernels read of a policy and its limits."""
    return [inputs.skip_above, *(number for limit in inputs.limits for number in floats_of(limit).values())]
