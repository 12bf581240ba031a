"""Muon: momentum, with every matrix replaced by the nearest orthogonal matrix."""

import math
from collections.abc import Mapping
from typing import Any

from ..linalg.coefficients import COEFFICIENTS, refusal, rows_of
from ..linalg.orthogonal import orthogonalize
from .protocol import MATRIX_OPTIONS, between, nonnegative, one_of, rule
from .scalars import scalar_globals


def _saved_for_torch(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of steps, which torch's Muon requires in a param group."""
    is_explicit = group["ns_steps"] is not None or isinstance(group["ns_coefficients"], str)
    return {} if is_explicit else {"ns_steps": len(rows_of(group["ns_coefficients"]))}


SCALINGS = one_of(None, "original", "match_rms_adamw", "spectral", "spectral_unclamped")
"""The valid values of `adjust_lr_fn`."""


NEWTON_SCHULZ = nonnegative("lr", "eps", ns_coefficients=refusal, ns_steps=between(0, 100, or_none=True))


def averaged(grad: Any, momentum_buffer: Any, momentum: Any, nesterov: bool) -> tuple[Any, Any]:
    """Return the average of gradients, and the matrix to orthogonalize: with `nesterov`, a step ahead."""
    momentum_buffer = momentum_buffer + (1 - momentum) * (grad - momentum_buffer)
    update = grad + momentum * (momentum_buffer - grad) if nesterov else momentum_buffer
    return momentum_buffer, update


@scalar_globals
def ratio_of(adjust_lr_fn: str | None, param: Any) -> Any:
    """The factor of an orthogonal update."""
    rows, columns = param.size(-2), param.size(-1)
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral":
        return math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if adjust_lr_fn == "spectral_unclamped" else max(1, rows / columns))


@rule(
    name="Muon",
    ranges=nonnegative("weight_decay", "momentum", "lr_scale", adjust_lr_fn=SCALINGS, **NEWTON_SCHULZ),
    options=MATRIX_OPTIONS,
    keyword_only=("lr_scale",),
    fallback="AdamW",
    saved=_saved_for_torch,
)
def muon(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 1e-3,
    weight_decay: Any = 0.1,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = COEFFICIENTS,
    eps: Any = 1e-7,
    ns_steps: Any = None,
    adjust_lr_fn: str | None = None,
    lr_scale: Any = 1.0,
) -> tuple[Any, ...]:
    """Momentum, orthogonalized; for the matrices of a model's hidden layers.

    Equations:
        b <- b + (1 - momentum) * (g - b)
        u = g + momentum * (b - g) with nesterov, else b
        p <- p - lr * weight_decay * p - lr * lr_scale * ratio * orthogonalize(u)
    with ratio = sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns)) for `adjust_lr_fn="match_rms_adamw"`,
    or sqrt(max(rows, columns)) for "spectral", or sqrt(rows / columns) for "spectral_unclamped".
    The orthogonalization is `tilestep.orthogonalize` in bfloat16. `ns_coefficients` are three numbers, a list of
    triples, one per iteration, or the name of a set, such as "polar_express"; `ns_steps` defaults to the number of
    triples, and to 5 for three numbers.

    Each matrix inside a parameter is updated as a separate parameter. Dimensions before the last two are a stack.
    `flatten=True` treats all dimensions but the first as columns, as for convolutions; `heads` is a number of equal
    blocks of rows; `splits` are the sizes of blocks of rows, which repeat if the rows are a multiple of their sum, and
    then equal positions form one matrix. Each option may also be a mapping from regular expressions, searched in
    parameters' names, to its values, and may be set in a param group. Vectors and other tensors need another rule:
    `tilestep.muon_groups` makes such groups.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025) for match_rms_adamw; Bernstein, "Deriving Muon" (2025) for spectral_unclamped;
    NVIDIA's Emerging-Optimizers for spectral; torch.optim.Muon.
    """
    momentum_buffer, update = averaged(grad, momentum_buffer, momentum, nesterov)
    orthogonal = orthogonalize(update, steps=ns_steps, coefficients=ns_coefficients, eps=eps)
    ratio = ratio_of(adjust_lr_fn, param)
    param = param * (1 - lr * weight_decay) - lr * lr_scale * ratio * orthogonal
    return param, momentum_buffer
