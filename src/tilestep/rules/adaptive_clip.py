"""A clip per tensor, relative to its previous gradient norms."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from .compose import compose
from .limits import valid
from .protocol import Rule, State, at_least, between
from .scalars import sum_over_tensors


@dataclass(frozen=True)
class AdaGC:
    """A limit for `max_grad_norm` that clips each tensor's gradient to a multiple of the mean of its previous norms.

    The optimizer's rule becomes `adaptive_clip(rule)`; see there for the equations. The limit is part of the kernel,
    its numbers are hyperparameters of the param groups (`clip_rel`, `clip_limit`, `clip_decay`, `clip_warmup`), and the
    mean norm is a state of each parameter (`clip_norm`). A param group may have a different `AdaGC`, or another
    `max_grad_norm`. A group with `max_grad_norm=None` or `in_norm=False` is not clipped, and is left out of the global
    norm.

    Args:
        rel: a gradient's norm may be this many times the mean of the clipped norms; at least 1.
        limit: largest global norm during the first steps; above 0.
        decay: the decay of the mean per step; in [0, 1).
        warmup: the step from which each tensor has a separate limit; at least 2.

    Raises:
        ValueError: for a value out of its range.

    Source: Wang et al., "AdaGC: Improving Training Stability for Large Language Model Pretraining" (arXiv 2502.11034),
    algorithm 1 (`lambda_rel`, `lambda_abs`, beta, T_start). The authors' lishuai-97/AdaGC sets `rel` and `decay` to
    1.04 and 0.99, and starts one step later.

    Example:
        >>> AdaGC()
        AdaGC(rel=1.05, limit=1.0, decay=0.98, warmup=100)
    """

    rel: float = 1.05
    limit: float = 1.0
    decay: float = 0.98
    warmup: int = 100

    def __post_init__(self) -> None:
        valid(
            self,
            rel=(1 <= self.rel < math.inf, "it must be finite and at least 1"),
            limit=(self.limit > 0, "it must be greater than 0"),
            decay=(0 <= self.decay < 1, "it must be at least 0 and below 1"),
            warmup=(self.warmup >= 2, "it must be at least 2, because step 1 sets the mean"),
        )

    @property
    def numbers(self) -> dict[str, float]:
        """The clip's numbers as hyperparameters, for the param groups of a clipped rule."""
        return {f"clip_{name}": value for name, value in vars(self).items()}

    def on(self, rule: Rule) -> Rule:
        """The rule with this clip in front, the same rule for any numbers; a clipped rule is returned unchanged."""
        return rule if self.numbers.keys() <= rule.hyperparameters.keys() else _clipped(rule)


def adaptive_clip(rule: Rule, rel: float = 1.05, limit: float = 1.0, decay: float = 0.98, warmup: int = 100) -> Rule:
    """Clip each tensor's gradient to a multiple of the mean of its previous norms, before the rule.

    Equations (t is the step count from 1, n = ||g|| of the tensor, N the norm over all tensors):
        c = 0:            s <- min(1, clip_limit / N),        c <- s * n
        t < clip_warmup:  s <- min(1, clip_limit / N),        c <- min(c, s * n)
        after that:       s <- min(1, clip_rel * c / n),      c <- clip_decay * c + (1 - clip_decay) * s * n
        g <- s * g, then the rule
    Where n is 0, c stays: in the paper c would remain 0, and weights before a layer of zeros would never move.

    Args:
        rule: the rule whose gradients to clip.
        rel: the default of the new hyperparameter `clip_rel`.
        limit: the default of the new hyperparameter `clip_limit`.
        decay: the default of the new hyperparameter `clip_decay`.
        warmup: the default of the new hyperparameter `clip_warmup`.

    Raises:
        ValueError: for a value out of its range.

    Source: Wang et al., "AdaGC: Improving Training Stability for Large Language Model Pretraining" (arXiv 2502.11034),
    algorithm 1.

    Example:
        >>> from tilestep.rules import registry
        >>> clipped = adaptive_clip(registry["SGD"], limit=1.0)
        >>> moved = clipped(torch.zeros(2), torch.tensor([3.0, 4.0]), None, torch.tensor(0.0), lr=1.0, step=1)
        >>> moved[0], moved[2].item()
        (tensor([-0.6000, -0.8000]), 1.0)
    """

    def composed(
        param: Any,
        grad: Any,
        *states: Any,
        clip_rel: Any,
        clip_limit: Any,
        clip_decay: Any,
        clip_warmup: Any,
        **hyper: Any,
    ) -> tuple[Any, ...]:
        *inner, mean = states
        step, squares = hyper["step"], (grad * grad).sum()
        norm, total = squares.sqrt(), sum_over_tensors(squares).sqrt()
        begins = mean == 0
        warms = torch.as_tensor(step < clip_warmup) | begins
        first = torch.where(total > clip_limit, clip_limit / total, 1.0)
        own = torch.where(norm > clip_rel * mean, clip_rel * mean / norm, 1.0)
        scale = torch.where(warms, first, own)
        taken = scale * norm
        smallest = torch.where(begins | (taken < mean), taken, mean)
        followed = torch.where(warms, smallest, clip_decay * mean + (1 - clip_decay) * taken)
        mean = torch.where(norm == 0, mean, followed)
        param, *inner = rule(param, grad * scale, *inner, **hyper)
        return param, *inner, mean

    return compose(
        composed,
        rule,
        adaptive_clip,
        rel,
        limit,
        decay,
        warmup,
        states={"clip_norm": State(0.0, "scalar")},
        hyperparameters={
            "clip_rel": (rel, at_least(1)),
            "clip_limit": (limit, at_least(0)),
            "clip_decay": (decay, between(0, 1)),
            "clip_warmup": (warmup, at_least(2)),
        },
        uses_step=True,
    )


_clipped = functools.lru_cache(maxsize=64)(adaptive_clip)
