"""Rules that write every elementwise operation of torch into states, and the numbers that they are tried on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tilestep
from tilestep import Optimizer, Rule

__all__ = ["OPERATIONS", "inputs", "misses", "rules"]

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logit",
    "neg",
    "rad2deg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "angle",
]
_BINARY = [
    "add",
    "atan2",
    "copysign",
    "div",
    "fmax",
    "fmin",
    "fmod",
    "hypot",
    "logaddexp",
    "logaddexp2",
    "maximum",
    "minimum",
    "mul",
    "pow",
    "remainder",
    "sub",
    "xlogy",
    "ldexp",
    "float_power",
    "dist",
    "heaviside",
    "floor_divide",
]
_FUNCTIONAL = [
    "elu",
    "celu",
    "selu",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "relu",
    "relu6",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "tanhshrink",
]
_SPECIAL = ["entr", "expit", "gammaln", "ndtr", "psi", "xlog1py"]
_TESTS = ["isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "logical_not"]


def _unary(module: Any, name: str) -> Operation:
    return lambda x, y: getattr(module, name)(x)


def _binary(module: Any, name: str) -> Operation:
    return lambda x, y: getattr(module, name)(x, y)


OPERATIONS: dict[str, Operation] = {
    **{name: _unary(torch, name) for name in _UNARY},
    **{name: _binary(torch, name) for name in _BINARY if name != "dist"},
    **{name: _unary(F, name) for name in _FUNCTIONAL},
    **{f"special_{name}": (_binary if name == "xlog1py" else _unary)(torch.special, name) for name in _SPECIAL},
    **{name: (lambda x, y, name=name: torch.where(getattr(torch, name)(x), 1.0, 0.0)) for name in _TESTS},
    "clamp": lambda x, y: x.clamp(-0.5, 0.75),
    "clamp_tensors": lambda x, y: torch.clamp(x, -y.abs(), y.abs()),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.3),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "logit_eps": lambda x, y: torch.logit(x, eps=0.01),
    "gelu_tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "softplus_beta": lambda x, y: F.softplus(x, beta=2.0, threshold=3.0),
    "leaky": lambda x, y: F.leaky_relu(x, 0.2),
    "threshold": lambda x, y: F.threshold(x, 0.1, -2.0),
    "nan_to_numbers": lambda x, y: torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-3.0),
    "round_decimals": lambda x, y: torch.round(x, decimals=1),
    "pow_third": lambda x, y: x.abs().pow(1 / 3),
    "pow_of_two": lambda x, y: 2.0**x,
}

_PER_RULE = 12


def rules() -> list[tuple[Rule, list[str]]]:
    """Rules of a dozen operations each, with the names of these; the second number is the parameter."""
    names = list(OPERATIONS)
    return [_rule(names[first : first + _PER_RULE]) for first in range(0, len(names), _PER_RULE)]


def _rule(names: list[str]) -> tuple[Rule, list[str]]:
    def apply(param: Any, grad: Any, *states: Any) -> tuple[Any, ...]:
        return (param + grad, *(OPERATIONS[name](grad, param) for name in names))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = ["param", "grad", *(f"of_{name}" for name in names)]
    apply.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(argument, kind) for argument in arguments]
    )
    return tilestep.rule(apply), names


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of numbers: drawn ones of several sizes, and all pairs of special ones."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(2, 600, generator=generator)
    drawn[:, 200:400] *= 4
    drawn[:, 400:] *= 0.05
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, 30.0, -30.0, math.inf, -math.inf, math.nan])
    pairs = torch.cartesian_prod(special, special).T
    left, right = torch.cat((drawn, pairs), dim=1).to(dtype)
    return left.contiguous(), right.contiguous()


def misses_of(rule: Rule, names: list[str], dtype: torch.dtype, bound: float, device: str = "cpu") -> list[str]:
    """What a step of one of `rules` gets wrong."""
    left, right = (each.to(device) for each in inputs(dtype))
    param = torch.nn.Parameter(right.clone())
    optimizer = Optimizer([param], rule)
    param.grad = left.clone()
    optimizer.step()
    state = optimizer.state[param]
    return [text for name in names for text in misses(name, state[f"of_{name}"], left, right, bound)]


def misses(name: str, found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bound: float) -> list[str]:
    """Where an operation is further from torch's in float64 than a bound, relative to the result or to one."""
    # On the CPU: torch's CUDA kernels take the sixth of a hard sigmoid in float32 for float64 too.
    left, right, found = left.cpu(), right.cpu(), found.cpu()
    x, y = left.double(), right.double()
    wanted = OPERATIONS[name](x, y)
    # How far a rounding of what goes in moves what comes out, and how far torch is off in this dtype.
    eps = torch.finfo(found.dtype).eps
    moved = (OPERATIONS[name](x * (1 + eps), y) - wanted).abs().nan_to_num(0.0, 0.0)
    theirs = (OPERATIONS[name](left, right).double() - wanted).abs().nan_to_num(0.0, 0.0)
    allowed = bound * wanted.abs().clamp(min=0.1) + 4 * moved + 8 * theirs
    wanted = wanted.to(found.dtype).double()
    wrong = ~((found.double() - wanted).abs() <= allowed) & ~(found.double() == wanted)
    wrong &= ~(found.isnan() & wanted.isnan())
    return [
        f"{name}({x[place].item():.9g}, {y[place].item():.9g}) is {found[place].item():.9g}, in torch "
        f"{wanted[place].item():.9g}"
        for place in wrong.nonzero().flatten().tolist()
    ]
