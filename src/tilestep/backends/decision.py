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
    """The decision of one step; every field may be a traced number."""

    norm: Any  # of the unscaled gradients; 0 without a norm pass
    skip: Any
    inverse_scale: Any  # the factor that unscales gradients; 1 without a loss scale
    clip: Any  # the norm that limits clip to; inf for no clip
    overflow: Any  # whether a gradient is inf or NaN, as in torch.amp.GradScaler


def clip_coefficient(norm: Any, limit: Any) -> Any:
    """The clip coefficient, min(1, limit / (norm + 1e-6)); NaN for a norm of NaN."""
    coefficient = limit / (norm + 1e-6)
    return where(coefficient > 1, 1.0, coefficient)


def gradient_scale(norm: Any, inverse_scale: Any, clip: Any, max_grad_norm: Any) -> Any:
    """The factor of all gradients: one over the loss scale, times the clip coefficient of the unscaled norm.

    A negative max_grad_norm means that a limit may clip, too; its size is the clip of the group.
    """
    limit = where(max_grad_norm < 0, where(-max_grad_norm < clip, -max_grad_norm, clip), max_grad_norm)
    return where(limit == math.inf, inverse_scale, inverse_scale * clip_coefficient(norm, limit))


@functools.cache
def graph_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], Value]:
    """The parameters of a function of floats, and its graph; kernels use the names of the parameters."""
    build, names = Builder(), function.__code__.co_varnames[: function.__code__.co_argcount]
    return names, function(*(input_of(build, name) for name in names)).value


def traced_decision(decide: Callable[..., Decision], inputs: Any) -> list[Store]:
    """The values that the decision writes, computed from the elements of named arrays."""
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
    """The numbers of a policy and its limits that kernels read."""
    return [inputs.skip_above, *(number for limit in inputs.limits for number in floats_of(limit).values())]
