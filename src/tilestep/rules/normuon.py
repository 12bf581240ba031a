"""NorMuon: Muon with a separate step size per row.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> grad, zeros = torch.tensor([[3.0, 0.0], [0.0, -2.0]]), torch.zeros(2, 2)
    >>> moved = registry["NorMuon"](zeros, grad, zeros, torch.zeros(2, 1), lr=1.0)[0]
    >>> [round(norm, 3) for norm in (moved.norm(dim=1) / moved.norm()).square().tolist()]
    [0.5, 0.5]
"""

import math
from typing import Any

from ..linalg.coefficients import COEFFICIENTS
from ..linalg.orthogonal import orthogonalize
from .muon import NEWTON_SCHULZ, SCALINGS, averaged, ratio_of
from .protocol import MATRIX_OPTIONS, State, between, nonnegative, rule


@rule(
    name="NorMuon",
    states={"second_momentum_buffer": State(shape="row")},
    ranges=nonnegative(
        "weight_decay",
        "lr_scale",
        momentum=between(0, 1),
        beta2=between(0, 1),
        adjust_lr_fn=SCALINGS,
        **NEWTON_SCHULZ,
    ),
    options=MATRIX_OPTIONS,
    fallback="AdamW",
)
def normuon(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    second_momentum_buffer: Any,
    *,
    lr: Any = 0.02,
    weight_decay: Any = 0.0,
    momentum: Any = 0.95,
    beta2: Any = 0.95,
    nesterov: bool = True,
    eps: Any = 1e-10,
    ns_coefficients: Any = COEFFICIENTS,
    ns_steps: Any = None,
    adjust_lr_fn: str | None = None,
    lr_scale: Any = 1.0,
) -> tuple[Any, ...]:
    """Muon, normalized by a second moment of each row, with the norm of the whole update preserved.

    Equations:
        b <- momentum * b + (1 - momentum) * g
        o = orthogonalize(g + momentum * (b - g) with nesterov, else b)
        v <- beta2 * v + (1 - beta2) * (mean of o^2 over each row)
        n = o / (sqrt(v) + eps)
        p <- p - lr * weight_decay * p - lr * lr_scale * ratio * n * norm(o) / (norm(n) + eps)
    with Muon's `ratio` for `adjust_lr_fn`, `ns_coefficients`, `ns_steps`, and matrices inside parameters.

    Source: Li et al., "NorMuon: Making Muon More Efficient and Scalable" (2025); names and defaults of the authors'
    zichongli5/NorMuon. dion's NorMuon is this with `nesterov=False`, `eps=1e-8`, `lr=0.01`, `weight_decay=0.01`,
    `ns_coefficients="polar_express_dion"` and `adjust_lr_fn="spectral_unclamped"`.
    """
    momentum_buffer, update = averaged(grad, momentum_buffer, momentum, nesterov)
    orthogonal = orthogonalize(update, steps=ns_steps, coefficients=ns_coefficients)
    square = (orthogonal * orthogonal).mean(dim=-1, keepdim=True)
    second_momentum_buffer = second_momentum_buffer + (1 - beta2) * (square - second_momentum_buffer)
    rate = 1 / (second_momentum_buffer.sqrt() + eps)
    # The norms of o and n follow from the means of their rows, without a pass over elements.
    root_numel = math.sqrt(param.size(-2) * param.size(-1))
    norm_before = root_numel * square.mean(dim=-2, keepdim=True).sqrt()
    norm_after = root_numel * (square * rate * rate).mean(dim=-2, keepdim=True).sqrt()
    size = lr * lr_scale * ratio_of(adjust_lr_fn, param) * norm_before / (norm_after + eps)
    param = param * (1 - lr * weight_decay) - size * (rate * orthogonal)
    return param, momentum_buffer, second_momentum_buffer
