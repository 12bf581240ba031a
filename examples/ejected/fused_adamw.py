# Made by tilestep 0.1.0:
#     tilestep eject AdamW --clip
# Make it anew instead of changing it. It needs torch, and Triton where parameters are on a GPU; not tilestep.
"""AdamW: Adam with decoupled weight decay.

Parameters of float32 and bfloat16 are updated by a few launches, whatever their number; on CPUs by plain PyTorch.
From top to bottom: Triton functions; the rule's formulas on torch tensors; the kinds of parameters that there are
kernels for; the tables that kernels read; the optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
libdevice: Any = None
VALUES: dict[str, Any] = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-08,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
}
"""Hyperparameters as this file was made for them; those that are numbers may have other values."""

NORM_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FREE_ORDER = True  # whether dimensions may lie in memory in any order
POINTERS: dict[str, list[str]] = {}  # the Triton functions of this file, with the parameters that are tables


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; it stays as it is until a parameter is on a GPU."""
    parameters = inspect.signature(function).parameters.values()
    POINTERS[function.__name__] = [each.name for each in parameters if each.annotation is inspect.Parameter.empty]
    return function


def load_triton() -> None:
    """Import Triton and compile the marked functions at their first launch."""
    import triton
    import triton.language

    globals()["tl"] = triton.language
    from triton.language.extra import libdevice

    globals()["libdevice"] = libdevice
    for name, pointers in POINTERS.items():
        # One build serves all addresses: kernels look at the alignment themselves.
        globals()[name] = triton.jit(globals()[name], do_not_specialize_on_alignment=pointers)


@jit
def larger(left, right):
    """The larger of two numbers, NaN if either is; as a reduction's combination."""
    return tl.where((left > right) | (left != left), left, right)


@jit
def smaller(left, right):
    """The smaller of two numbers, NaN if either is; as a reduction's combination."""
    return tl.where((left < right) | (left != left), left, right)


@jit
def add(left, right):
    """The sum; as a reduction's combination."""
    return left + right


@jit
def alike(left, right):
    """Both as tensors of one shape and type; either may be a plain number."""
    zero = tl.zeros_like(left + right)
    return tl.where(zero == 0, left, zero), tl.where(zero == 0, right, zero)


@jit
def divide(left, right):
    """IEEE division; plain `/` in float32 is two units in the last place off."""
    if (left + right).dtype == tl.float64:
        return left / right
    else:
        return tl.math.div_rn(left, right)


@jit
def square_root(value):
    """IEEE square root."""
    if value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.math.sqrt_rn(value)


@jit
def power(base, exponent):
    """One value to the power of another."""
    base, exponent = alike(base, exponent)
    return libdevice.pow(base, exponent)


@jit
def sum_of_partials(partials, partial_count, BLOCK: tl.constexpr):
    """The sum of a norm's tiles in a fixed order; finite tiles never sum up to infinity."""
    count = tl.load(partial_count)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.float64)
    begin = count * 0
    while begin < count:
        left = tl.load(partials + begin + lane, mask=begin + lane < count, other=0.0)
        right = tl.load(partials + begin + BLOCK + lane, mask=begin + BLOCK + lane < count, other=0.0)
        total += left
        total += right
        largest = larger(larger(largest, left), right)
        begin += 2 * BLOCK
    result = tl.sum(total)
    # The largest finite float64, or infinity where a tile was.
    bound = larger(tl.max(largest), tl.full((), 1.7976931348623157e308, tl.float64))
    return tl.where(result == float("inf"), smaller(result, bound), result)


@jit
def ordered_bits(value):
    # Non-negative floats are ordered as their bits are, and the bits of a NaN are above all others.
    if value.dtype == tl.float64:
        return tl.abs(value).to(tl.int64, bitcast=True)
    else:
        return tl.abs(value).to(tl.int32, bitcast=True)


@jit
def from_bits(bits):
    # -1, which stands for NaN in a minimum, is a NaN as a float too.
    if bits.dtype == tl.int64:
        return bits.to(tl.float64, bitcast=True)
    elif bits.dtype == tl.int32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits


@jit
def contribution(value):
    return value * value


@jit
def tile_value(
    address,
    begin,
    count,
    ELEMENT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    offset = tl.arange(0, STEP)
    start = address + begin * SIZE
    pointer = start.to(tl.pointer_type(ELEMENT))
    count = tl.minimum(count, TILE).to(tl.int32)
    nothing = tl.zeros((STEP,), WIDE)
    total = nothing
    place = count * 0
    if start % 16 == 0:
        aligned = tl.multiple_of(start.to(tl.pointer_type(ELEMENT)), 16)
        # Two steps together: their loads overlap, and nothing in the loop branches.
        while place + 2 * STEP <= count:
            here = aligned + tl.multiple_of(place, STEP)
            left = tl.load(here + offset).to(WIDE)
            right = tl.load(here + STEP + offset).to(WIDE)
            total = add(add(total, contribution(left)), contribution(right))
            place += 2 * STEP
        if place + STEP <= count:
            here = aligned + tl.multiple_of(place, STEP)
            total = add(total, contribution(tl.load(here + offset).to(WIDE)))
            place += STEP
    while place < count:
        kept = place + offset < count
        value = tl.load(pointer + place + offset, mask=kept, other=0).to(WIDE)
        total = add(total, tl.where(kept, contribution(value), nothing))
        place += STEP
    total = from_bits(tl.sum(total)).to(tl.float64)
    if not (total < float("inf")):
        # Finite elements may have squares that are not; an overflow check relies on the difference. Again, but smaller.
        largest = ordered_bits(nothing)
        smaller = nothing
        place = count * 0
        while place < count:
            kept = place + offset < count
            large = tl.load(pointer + place + offset, mask=kept, other=0).to(WIDE)
            largest = tl.maximum(largest, ordered_bits(large))
            # 2 ** -80, and below 2 ** 160 for the squares.
            small = large * 8.271806125530277e-25
            smaller += small * small
            place += STEP
        if from_bits(tl.max(largest)) < float("inf"):
            if nothing.dtype == tl.float64:
                total = tl.full((), 1.7976931348623157e308, tl.float64)
            else:
                total = tl.sum(smaller).to(tl.float64) * 1.461501637330903e48
    return total


@jit
def norm_tiles(addresses, table, tile_tensor, partials, TILE: tl.constexpr, STEP: tl.constexpr):
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    address = tl.load(addresses + tensor)
    row = table + 3 * tensor
    begin = (tile - tl.load(row + 1)) * TILE
    count = tl.load(row) - begin
    code = tl.load(row + 2)
    result = tl.full((), 0, tl.float64)
    if address != 0:
        if code == 0:
            result = tile_value(address, begin, count, tl.bfloat16, 2, tl.float32, TILE, STEP)
        elif code == 2:
            result = tile_value(address, begin, count, tl.float32, 4, tl.float32, TILE, STEP)
    tl.store(partials + tile, result)


@jit
def norm_total(partials, partial_count, out, BLOCK: tl.constexpr):
    tl.store(out, sum_of_partials(partials, partial_count, BLOCK))


@jit
def decide(control, partials, partial_count, BLOCK: tl.constexpr):
    power_sum = sum_of_partials(partials, partial_count, BLOCK) + tl.zeros((1,), tl.float64)
    number = (power_sum >= tl.full((1,), 1.7976931348623157e308, tl.float64)).to(tl.float64)
    add_2 = power_sum + (number * tl.full((1,), 1.7976931348623157e308, tl.float64))
    sqrt = square_root(add_2)
    tl.store(control + 0 + tl.zeros((1,), tl.int32), sqrt)


@jit
def gradient_scale_of(norm, inverse_scale, clip, max_grad_norm):
    neg = -max_grad_norm
    where = tl.where((max_grad_norm < tl.full((1,), 0.0, tl.float64)), tl.where((neg < clip), neg, clip), max_grad_norm)
    div = divide(where, (norm + tl.full((1,), 1e-06, tl.float64)))
    mul = inverse_scale * tl.where((div > tl.full((1,), 1.0, tl.float64)), tl.full((1,), 1.0, tl.float64), div)
    where_2 = tl.where((where == tl.full((1,), float("inf"), tl.float64)), inverse_scale, mul)
    return where_2


@jit
def scalar_pass_0(counts, grads, group, hyper, step, control, rows, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < tl.load(counts)
    active = inside & (tl.load(grads + t, mask=inside, other=0) != 0)
    skip = tl.load(control + 1) != 0.0
    next_step = tl.load(step + t, mask=active, other=0.0).to(tl.float64) + tl.where(skip, 0.0, 1.0)
    base = hyper + tl.load(group + t, mask=active, other=0) * 6
    lr = tl.load(base + 0, mask=active, other=0.0)
    weight_decay = tl.load(base + 1, mask=active, other=0.0)
    betas_0 = tl.load(base + 2, mask=active, other=0.0)
    step_2 = next_step
    gradient_scale = gradient_scale_of(
        tl.load(control + 0), tl.load(control + 2), tl.load(control + 4), tl.load(base + 5, mask=active, other=0.0)
    )
    betas_1 = tl.load(base + 3, mask=active, other=0.0)
    eps = tl.load(base + 4, mask=active, other=0.0)
    sub = tl.full((1,), 1.0, tl.float64) - (lr * weight_decay)
    bias_correction1 = tl.full((1,), 1.0, tl.float64) - power(betas_0, step_2)
    div = divide(lr, bias_correction1)
    sub_2 = tl.full((1,), 1.0, tl.float64) - betas_0
    sub_3 = tl.full((1,), 1.0, tl.float64) - betas_1
    bias_correction2_sqrt = square_root(tl.full((1,), 1.0, tl.float64) - power(betas_1, step_2))
    tl.store(rows + t * 8 + 0, (sub + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 1, (div + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 2, (sub_2 + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 3, (gradient_scale + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 4, (betas_1 + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 5, (sub_3 + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 6, (bias_correction2_sqrt + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(rows + t * 8 + 7, (eps + tl.zeros((BLOCK,), tl.float64)).to(tl.float32), mask=active)
    tl.store(step + t, next_step.to(tl.float32), mask=active)


@jit
def math_0(
    param,
    exp_avg,
    grad,
    exp_avg_sq,
    one_minus_lr_times_weight_decay,
    lr_over_bias_correction1,
    one_minus_betas_0,
    gradient_scale,
    betas_1,
    one_minus_betas_1,
    bias_correction2_sqrt,
    eps,
):
    param_2 = param * one_minus_lr_times_weight_decay
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + (one_minus_betas_0 * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + ((one_minus_betas_1 * grad_2) * grad_2)
    denom = divide(square_root(exp_avg_sq_2), bias_correction2_sqrt) + eps
    param_3 = param_2 - (lr_over_bias_correction1 * divide(exp_avg_2, denom))
    return param_3, exp_avg_2, exp_avg_sq_2


@jit
def tile_pass_0(
    grads,
    addresses,
    tile_tensor,
    first_tile,
    numel,
    rows,
    control,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    ELEMENT: tl.constexpr,
    MATH: tl.constexpr,
):
    tile = tl.program_id(0)
    t = tl.load(tile_tensor + tile).to(tl.int64)
    skip = tl.load(control + 1)
    grad_address = tl.load(grads + t)
    begin = (tile - tl.load(first_tile + t)) * SPAN
    stop = tl.minimum(begin + SPAN, tl.load(numel + t))
    row = rows + t * 8
    n0 = tl.load(row + 0)  # one_minus_lr_times_weight_decay
    n1 = tl.load(row + 1)  # lr_over_bias_correction1
    n2 = tl.load(row + 2)  # one_minus_betas_0
    n3 = tl.load(row + 3)  # gradient_scale
    n4 = tl.load(row + 4)  # betas_1
    n5 = tl.load(row + 5)  # one_minus_betas_1
    n6 = tl.load(row + 6)  # bias_correction2_sqrt
    n7 = tl.load(row + 7)  # eps
    param_address = tl.load(addresses + t * 3 + 0)
    exp_avg_address = tl.load(addresses + t * 3 + 1)
    exp_avg_sq_address = tl.load(addresses + t * 3 + 2)
    lane = tl.arange(0, TILE)
    if (skip == 0.0) & (grad_address != 0):
        aligned = ((grad_address | param_address | exp_avg_address | exp_avg_sq_address) & 15) == 0
        start = begin
        whole = tl.where(aligned, stop - TILE + 1, begin)
        while start < whole:
            grad_array = (
                tl.multiple_of(grad_address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(start, TILE) + lane
            )
            param_array = (
                tl.multiple_of(param_address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(start, TILE) + lane
            )
            exp_avg_array = (
                tl.multiple_of(exp_avg_address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(start, TILE) + lane
            )
            exp_avg_sq_array = (
                tl.multiple_of(exp_avg_sq_address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(start, TILE) + lane
            )
            param = tl.load(param_array).to(tl.float32)
            exp_avg = tl.load(exp_avg_array).to(tl.float32)
            grad = tl.load(grad_array).to(tl.float32)
            exp_avg_sq = tl.load(exp_avg_sq_array).to(tl.float32)
            new_param, new_exp_avg, new_exp_avg_sq = MATH(
                param, exp_avg, grad, exp_avg_sq, n0, n1, n2, n3, n4, n5, n6, n7
            )
            tl.store(param_array, (new_param).to(ELEMENT))
            tl.store(exp_avg_array, (new_exp_avg).to(ELEMENT))
            tl.store(exp_avg_sq_array, (new_exp_avg_sq).to(ELEMENT))
            start += TILE
        while start < stop:
            mask = lane < stop - start
            grad_array = grad_address.to(tl.pointer_type(ELEMENT)) + start + lane
            param_array = param_address.to(tl.pointer_type(ELEMENT)) + start + lane
            exp_avg_array = exp_avg_address.to(tl.pointer_type(ELEMENT)) + start + lane
            exp_avg_sq_array = exp_avg_sq_address.to(tl.pointer_type(ELEMENT)) + start + lane
            param = tl.load(param_array, mask=mask, other=0.0).to(tl.float32)
            exp_avg = tl.load(exp_avg_array, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_array, mask=mask, other=0.0).to(tl.float32)
            exp_avg_sq = tl.load(exp_avg_sq_array, mask=mask, other=0.0).to(tl.float32)
            new_param, new_exp_avg, new_exp_avg_sq = MATH(
                param, exp_avg, grad, exp_avg_sq, n0, n1, n2, n3, n4, n5, n6, n7
            )
            tl.store(param_array, (new_param).to(ELEMENT), mask=mask)
            tl.store(exp_avg_array, (new_exp_avg).to(ELEMENT), mask=mask)
            tl.store(exp_avg_sq_array, (new_exp_avg_sq).to(ELEMENT), mask=mask)
            start += TILE


@jit
def math_0_bfloat16(
    param,
    exp_avg,
    grad,
    exp_avg_sq,
    one_minus_lr_times_weight_decay,
    lr_over_bias_correction1,
    one_minus_betas_0,
    gradient_scale,
    betas_1,
    one_minus_betas_1,
    bias_correction2_sqrt,
    eps,
):
    param_2 = param * one_minus_lr_times_weight_decay
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + (one_minus_betas_0 * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + ((one_minus_betas_1 * grad_2) * grad_2)
    denom = (tl.sqrt(exp_avg_sq_2) * (1.0 / bias_correction2_sqrt)) + eps
    param_3 = param_2 - (lr_over_bias_correction1 * (exp_avg_2 / denom))
    return param_3, exp_avg_2, exp_avg_sq_2


def tile_shape(elements: int) -> tuple[int, int, int]:
    """Elements of a tile, elements of a step within it, and warps of its program."""
    return (16384, 2048, 4) if elements < 2**28 else (32768, 2048, 4)


def adamw(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    lr: Any,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    step: Any,
    gradient_scale: Any,
) -> dict[str, Any]:
    """The rule, on numbers in float32; hyperparameters and sums are in float64."""
    betas_0, betas_1 = betas
    param_2 = param * (1.0 - (lr * weight_decay))
    bias_correction1 = 1.0 - (betas_0**step)
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + ((1.0 - betas_0) * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + (((1.0 - betas_1) * grad_2) * grad_2)
    bias_correction2_sqrt = torch.sqrt(1.0 - (betas_1**step))
    denom = (torch.sqrt(exp_avg_sq_2) / bias_correction2_sqrt) + eps
    param_3 = param_2 - ((lr / bias_correction1) * (exp_avg_2 / denom))
    return {"param": param_3, "exp_avg": exp_avg_2, "exp_avg_sq": exp_avg_sq_2}


class Buffer(NamedTuple):
    """A tensor like the parameter, as formulas see it, and what keeps it."""

    name: str
    begins: float | str  # a number, "param" for the parameter's values, or the name of a hyperparameter
    arrays: tuple[tuple[str, torch.dtype, int], ...]  # key, dtype, and of how many neighbours an entry is


class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Buffer, ...]
    arrays: tuple[str, ...]  # what kernels read and write beside the gradient, in the order of their table
    hypers: tuple[str, ...]  # columns of the table of hyperparameters
    columns: int  # numbers that the scalar passes leave for the tiles of a tensor
    span: int  # elements that one program updates
    stages: tuple[tuple[tuple[str, str, dict[str, Any]], ...], ...]  # launches: kernel, grid, constants and options
    scalars: tuple[tuple[str, float | str, torch.dtype], ...] = ()  # states of one number: name, beginning, dtype
    sizes: tuple[int, ...] = ()  # sizes that kernels read, from the last dimension as 1; 0 for their product
    reductions: int = 1  # sums over a tensor


KINDS = {
    "float32": Kind(
        formula=adamw,
        buffers=(
            Buffer("param", "param", (("param", torch.float32, 1),)),
            Buffer("exp_avg", 0.0, (("exp_avg", torch.float32, 1),)),
            Buffer("exp_avg_sq", 0.0, (("exp_avg_sq", torch.float32, 1),)),
        ),
        arrays=("param", "exp_avg", "exp_avg_sq"),
        hypers=("lr", "weight_decay", "betas.0", "betas.1", "eps", "max_grad_norm"),
        sizes=(2, 1),
        columns=8,
        span=1536,
        stages=(
            (
                ("scalar_pass_0", "blocks", {"BLOCK": 128, "num_warps": 4}),
                (
                    "tile_pass_0",
                    "tiles",
                    {"TILE": 512, "SPAN": 1536, "ELEMENT": "float32", "MATH": "math_0", "num_warps": 4},
                ),
            ),
        ),
    ),
    "bfloat16": Kind(
        formula=adamw,
        buffers=(
            Buffer("param", "param", (("param", torch.bfloat16, 1),)),
            Buffer("exp_avg", 0.0, (("exp_avg", torch.bfloat16, 1),)),
            Buffer("exp_avg_sq", 0.0, (("exp_avg_sq", torch.bfloat16, 1),)),
        ),
        arrays=("param", "exp_avg", "exp_avg_sq"),
        hypers=("lr", "weight_decay", "betas.0", "betas.1", "eps", "max_grad_norm"),
        sizes=(2, 1),
        columns=8,
        span=1536,
        stages=(
            (
                ("scalar_pass_0", "blocks", {"BLOCK": 128, "num_warps": 4}),
                (
                    "tile_pass_0",
                    "tiles",
                    {"TILE": 512, "SPAN": 1536, "ELEMENT": "bfloat16", "MATH": "math_0_bfloat16", "num_warps": 4},
                ),
            ),
        ),
    ),
}


BY_SHAPE: dict[Any, Any] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def kind_of(param: Any) -> str:
    """The kind of a parameter; raises for one that there are no kernels for."""
    kind = BY_SHAPE.get(param.dtype)
    if kind is None:
        raise ValueError(f"a parameter is {param.dtype}; this file is for float32 and bfloat16")
    return kind


def check(group: dict[str, Any]) -> None:
    """Raise for hyperparameters that are out of their ranges, or that this file has no kernels for."""
    for name, value in VALUES.items():
        if fixed(group[name]) != fixed(value):
            made = f"this file was made for {name}={value!r}"
            another = f"make another: tilestep eject AdamW --set {name}={group[name]}"
            raise ValueError(f"{name}={group[name]!r}: {made}; {another}")
    valid = {
        "lr": group["lr"] >= 0,
        "betas": 0 <= group["betas"][0] < 1 and 0 <= group["betas"][1] < 1,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "max_grad_norm": group["max_grad_norm"] is None or group["max_grad_norm"] >= 0,
    }
    for name, holds in valid.items():
        if not holds:
            raise ValueError(f"Invalid {name}: {group[name]}")


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def placed(part: torch.Tensor, param: Any, shape: tuple[int, ...]) -> Any:
    """A part of a state as a DTensor where the parameter is one; checkpoints need that."""
    if not hasattr(param, "placements"):
        return part
    stride = param.stride() if shape == param.shape else torch.empty(shape, device="meta").stride()
    layout = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return type(param.data).from_local(part, param.device_mesh, param.placements, **layout)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton updates a tensor; plain PyTorch does elsewhere."""
    return tensor.is_cuda


def shape_of(shape: Any, buffer: Buffer, elements: int) -> tuple[int, ...]:
    """The shape of a tensor that keeps a buffer of a parameter of this shape."""
    return tuple(shape)


def values_of(buffer: Buffer, tensors: dict[str, Any], shape: Any) -> torch.Tensor:
    """The numbers that a buffer keeps, in float32."""
    kept = [local(tensors[key]) for key, _, _ in buffer.arrays]
    return kept[0].float()


def keep(buffer: Buffer, tensors: dict[str, Any], shape: Any, values: torch.Tensor) -> None:
    """Write new numbers into what keeps a buffer."""
    kept = [local(tensors[key]) for key, _, _ in buffer.arrays]
    kept[0].copy_(values)


def shares(params: list[Any]) -> tuple[Any, list[float]]:
    """The mesh over which sums are added up, and how much each parameter's part counts on this rank.

    A part that several ranks hold counts as one over their number, so that the sum over the mesh has each element once.
    """
    meshes = {param.device_mesh for param in params if hasattr(param, "placements")}
    if not meshes:
        return None, [1.0] * len(params)
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks, counts = set(largest.mesh.flatten().tolist()), []
    for place, param in enumerate(params):
        parts = 1
        if hasattr(param, "placements"):
            if not ranks.issuperset(param.device_mesh.mesh.flatten().tolist()):
                raise ValueError(f"parameter {place} lies on {param.device_mesh}, no part of {largest}: no common norm")
            if any(placement.is_partial() for placement in param.placements):
                raise ValueError(f"parameter {place} has the placements {param.placements}; shard or replicate it")
            sizes = zip(param.device_mesh.shape, param.placements)
            parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
        counts.append(parts / largest.size())
    return largest, counts


def add_up(total: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The sum of a number over all ranks of a mesh."""
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


def gradient_scale(norm: torch.Tensor, limit: Any) -> torch.Tensor:
    """The factor of gradients: the limit over their norm where that is less than 1; NaN for a norm of NaN."""
    if limit is None or limit == math.inf:
        return torch.ones((), dtype=torch.float64)
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def upload(values: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A table on a device; the host does not wait for the copy."""
    table = torch.tensor(values or [0], dtype=dtype)
    return table.to(device) if device.index is None else table.pin_memory().to(device, non_blocking=True)


def tiles_of(lengths: list[int], size: int) -> tuple[list[int], list[int]]:
    """Tensors of these lengths in tiles: the first tile of each tensor, and the tensor of each tile."""
    first: list[int] = []
    owners: list[int] = []
    for place, length in enumerate(lengths):
        first.append(len(owners))
        owners += [place] * -(-length // size)
    return first, owners


class Tables:
    """What the kernels of one kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], grads: torch.Tensor, control: torch.Tensor) -> None:
        self.kind, self.members, self.device = kind, members, grads.device
        count = len(members)
        lengths = [local(param).numel() for param, _, _ in members]
        first, owners = tiles_of(lengths, kind.span)
        sizes = [
            math.prod(param.shape) if place == 0 else param.shape[-place] if place <= param.ndim else 1
            for param, _, _ in members
            for place in kind.sizes
        ]
        self.groups = sorted({group for _, _, group in members})
        self.programs = {"tensors": count, "blocks": -(-count // 128), "tiles": len(owners)}
        self.tables = {
            "counts": self.table([count]),
            "grads": grads,
            "group": self.table([self.groups.index(group) for _, _, group in members], torch.int32),
            "numel": self.table(lengths),
            "sizes": self.table(sizes),
            "tile_tensor": self.table(owners, torch.int32),
            "first_tile": self.table(first),
            "control": control,
            "rows": self.numbers(count * kind.columns, torch.float32),
            "partials": self.numbers(len(owners) * kind.reductions),
            "sums": self.numbers(count * kind.reductions),
        }
        self.addresses: list[int] = []
        self.hypers: list[float] = []
        self.views: list[Any] = []
        # Numbers of all tensors lie side by side for kernels; a state has views of its own.
        for name, dtype in [("step", torch.float32), *((name, dtype) for name, _, dtype in kind.scalars)]:
            numbers = torch.stack([state[name].to(self.device, dtype) for _, state, _ in members])
            self.tables[name if name == "step" else f"{name}_state"] = numbers
            for (_, state, _), view in zip(members, numbers.unbind()):
                state[name] = view
                self.views.append((state, name, view))

    def table(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A table on the device of the kernels."""
        return upload(values, dtype, self.device)

    def numbers(self, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Room for numbers that kernels write."""
        return torch.zeros(max(count, 1), dtype=dtype, device=self.device)

    def refresh(self, groups: list[dict[str, Any]]) -> None:
        """Bring addresses and hyperparameters up to date."""
        addresses = []
        for param, state, _ in self.members:
            addresses += [local(param if key == "param" else state[key]).data_ptr() for key in self.kind.arrays]
        if addresses != self.addresses:
            self.addresses, self.tables["addresses"] = addresses, self.table(addresses)
        hypers = [number_of(groups[group], name) for group in self.groups for name in self.kind.hypers]
        if hypers != self.hypers:
            self.hypers, self.tables["hyper"] = hypers, self.table(hypers, torch.float64)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables that its parameters name."""
        if self.programs[grid]:
            pointers = [self.tables[pointer] for pointer in POINTERS[name]]
            named = {key: value for key, value in options.items() if isinstance(value, str)}
            found = {key: globals().get(value) or getattr(tl, value) for key, value in named.items()}
            globals()[name][(self.programs[grid],)](*pointers, **{**options, **found}, enable_fp_fusion=False)


def fixed(value: Any) -> Any:
    """What of a hyperparameter formulas and kernels were made for: numbers may have any value."""
    if isinstance(value, (tuple, list)):
        return tuple(map(fixed, value))
    return float if isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool) else value


def number_of(group: dict[str, Any], name: str) -> float:
    """A hyperparameter as kernels read it; `betas.0` is the first of `betas`."""
    key, _, place = name.partition(".")
    value = group.get(key)
    value = value[int(place)] if place and value is not None else value
    return math.inf if value is None else float(value)


def as_numbers(value: Any) -> Any:
    """A hyperparameter as formulas take it: numbers in float64."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_numbers, value))
    return value if value is None or isinstance(value, (bool, str)) else torch.tensor(float(value), dtype=torch.float64)


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    Equations (t is the step count from 1):
        p <- p - lr * weight_decay * p
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    and with `amsgrad` the largest v so far in place of v.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019); torch.optim.AdamW.

    `max_grad_norm` clips gradients inside the step to this global 2-norm; they are not changed.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 0.001,
        betas: Any = (0.9, 0.999),
        eps: Any = 1e-08,
        weight_decay: Any = 0.01,
        amsgrad: Any = False,
        *,
        maximize: Any = False,
        max_grad_norm: Any = None,
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    tables: list[Tables] | None = None  # for kernels; made again when parameters or states are other ones
    grads: torch.Tensor
    control: torch.Tensor
    addresses: list[int]
    grad_norm: torch.Tensor | None = None  # of the gradients of the last step
    norm: tuple[Any, ...] = ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's."""
        super().add_param_group(param_group)
        try:
            check(self.param_groups[-1])
            for param in self.param_groups[-1]["params"]:
                kind_of(param)
        except ValueError:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, as torch's; states keep the dtypes that they have here."""
        super().load_state_dict(state_dict)
        # torch casts states to the dtypes of parameters.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, (param, group) in zip(numbers, owners):
            if number in state_dict["state"]:
                self.state[param] = self.begin(param, group, state_dict["state"][number])
        self.tables = None

    def begin(self, param: Any, group: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with the values that a checkpoint has of it."""
        part, kind = local(param).detach(), KINDS[kind_of(param)]
        if not (part.is_contiguous() or (FREE_ORDER and is_dense(part))):
            raise ValueError(
                f"a parameter of shape {tuple(part.shape)} has strides {part.stride()}; make it contiguous"
            )
        state: dict[str, Any] = {}
        for name, begins, dtype in (("step", 0.0, torch.float32), *kind.scalars):
            value = values.get(name, group[begins] if isinstance(begins, str) else begins)
            state[name] = torch.as_tensor(value, dtype=dtype).to(part.device, copy=True)
        for buffer in kind.buffers:
            tensors = {
                key: torch.empty_like(part, dtype=dtype)
                if shape_of(part.shape, buffer, elements) == part.shape
                else part.new_empty(shape_of(part.shape, buffer, elements), dtype=dtype)
                for key, dtype, elements in buffer.arrays
            }
            start: Any = group.get(str(buffer.begins), buffer.begins)
            if all(key in values for key in tensors if key != "param"):
                for key in tensors.keys() - {"param"}:
                    tensors[key].copy_(local(values[key]))
            elif buffer.name in values:  # of another format
                keep(buffer, tensors, part.shape, local(values[buffer.name]).to(part.device).float())
            elif values and buffer.name != "param":
                raise ValueError(f"the checkpoint has no state {buffer.name!r}: it is of another optimizer")
            elif start == "param":
                keep(buffer, tensors, part.shape, part.float())
            else:
                for tensor in tensors.values():
                    tensor.fill_(float(start))
            for key, _, elements in buffer.arrays:
                if key != "param":
                    state[key] = placed(tensors[key], param, shape_of(param.shape, buffer, elements))
        unknown = values.keys() - state.keys() - {buffer.name for buffer in kind.buffers}
        if unknown:
            raise ValueError(f"the checkpoint has the states {sorted(unknown)}, which this optimizer does not keep")
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check(group)
        members, gradients = self.members()
        if not members:
            return loss
        run = self.step_by_kernels if runs_kernels(local(members[0][0])) else self.step_in_torch
        run(members, gradients)
        torch.autograd.graph.increment_version(
            [member[0] for member, grad in zip(members, gradients) if grad is not None]
        )
        return loss

    def members(self) -> tuple[list[Any], list[Any]]:
        """Parameters with their states and groups, and the gradients; by kinds, as kernels have them."""
        found: dict[str, list[Any]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                if grad is not None:
                    if grad.layout is not torch.strided or (grad.dtype, grad.shape) != (part.dtype, part.shape):
                        what = f"{grad.layout}, {grad.dtype}, {tuple(grad.shape)}"
                        raise ValueError(f"a gradient is {what}; its parameter is {part.dtype}, {tuple(part.shape)}")
                    if grad.stride() != part.stride():  # kernels walk both in the order of their memory
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.begin(param, group, {})
                found.setdefault(kind_of(param), []).append(((param, self.state[param], number), grad))
        pairs = [pair for pairs in found.values() for pair in pairs]
        devices = {local(member[0]).device for member, _ in pairs}
        if len(devices) > 1:
            raise ValueError(f"parameters lie on {devices}: give each device an optimizer of its own")
        return [member for member, _ in pairs], [grad for _, grad in pairs]

    def step_in_torch(self, members: list[Any], gradients: list[Any]) -> None:
        """A step tensor by tensor: what CPUs run, and the same numbers as kernels compute."""
        norm = torch.zeros((), dtype=torch.float64)
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            mesh, counts = shares([param for param, _, _ in members])
            squares = [
                grad.double().square().sum() * count for grad, count in zip(gradients, counts) if grad is not None
            ]
            norm = torch.stack([norm.to(members[0][1]["step"].device), *squares]).sum()
            self.grad_norm = norm = (norm if mesh is None else add_up(norm, mesh)).sqrt()
        running: list[Any] = []
        for (param, state, number), grad in zip(members, gradients):
            if grad is None:
                continue
            state["step"] += 1
            group, part, kind = self.param_groups[number], local(param).detach(), KINDS[kind_of(param)]
            tensors = {**state, "param": part}
            given = {name: as_numbers(group[name]) for name in VALUES}
            given.update({buffer.name: values_of(buffer, tensors, part.shape) for buffer in kind.buffers})
            given.update({name: state[name].double() for name, _, _ in kind.scalars})
            given.update(grad=grad.float(), step=state["step"].double(), shape=param.shape)
            given["gradient_scale"] = gradient_scale(norm, group.get("max_grad_norm"))
            given["machine_epsilon"] = torch.finfo(part.dtype).eps
            wanted = inspect.signature(kind.formula).parameters
            if part.numel():
                results = kind.formula(**{name: given[name] for name in wanted})
                running.append((kind, tensors, part.shape, results))
        for kind, tensors, shape, results in running:
            for buffer in kind.buffers:
                if buffer.name in results:
                    keep(buffer, tensors, shape, results[buffer.name])
            for name, _, _ in kind.scalars:
                if name in results:
                    tensors[name].copy_(results[name])

    def step_by_kernels(self, members: list[Any], gradients: list[Any]) -> None:
        """A step by a few launches over all tensors; the host waits for nothing."""
        if tl is None:
            load_triton()
        known = [member for tables in self.tables or () for member in tables.members]
        unchanged = len(known) == len(members) and all(
            old[0] is new[0] and old[1] is new[1] and old[2] == new[2] for old, new in zip(known, members)
        )
        if not unchanged or any(
            state[name] is not view for one in self.tables or () for state, name, view in one.views
        ):
            self.build(members)
        assert self.tables is not None
        addresses = [0 if grad is None else grad.data_ptr() or 1 for grad in gradients]
        if addresses != self.addresses:
            self.addresses = addresses
            self.grads.copy_(upload(addresses, torch.int64, self.grads.device))
        for tables in self.tables:
            tables.refresh(self.param_groups)
        self.control[0] = 0.0
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            mesh, (tile, step, warps), table, owners, partials, weights = self.norm
            norm_tiles[(len(owners),)](self.grads, table, owners, partials, TILE=tile, STEP=step, num_warps=warps)
            size = table[-1:]
            if mesh is not None:
                partials *= weights
                total = torch.zeros(1, dtype=torch.float64, device=self.grads.device)
                norm_total[(1,)](partials, size, total, BLOCK=8192, num_warps=32, enable_fp_fusion=False)
                partials, size = add_up(total, mesh), torch.ones_like(size)
            decide[(1,)](self.control, partials, size, BLOCK=8192, num_warps=32, enable_fp_fusion=False)
            self.grad_norm = self.control[0].clone()
        for stage in range(max(len(tables.kind.stages) for tables in self.tables)):
            running = [tables for tables in self.tables if stage < len(tables.kind.stages)]
            for tables in running:
                tables.launch(*tables.kind.stages[stage][0])
            for tables in running:
                for launch in tables.kind.stages[stage][1:]:
                    tables.launch(*launch)

    def build(self, members: list[Any]) -> None:
        """Make the tables of these parameters."""
        device = local(members[0][0]).device
        self.grads = torch.zeros(len(members), dtype=torch.int64, device=device)
        self.addresses = []
        # The norm, whether the step is skipped, one over a loss scale, unused, another limit, skipped steps.
        self.control = torch.tensor([0.0, 0.0, 1.0, 0.0, math.inf, 0.0], dtype=torch.float64).to(device)
        lengths = [local(param).numel() for param, _, _ in members]
        sizes = tile_shape(sum(lengths))
        first, owners = tiles_of(lengths, sizes[0])
        codes = [NORM_DTYPES.index(param.dtype) for param, _, _ in members]
        table = [number for row in zip(lengths, first, codes) for number in row]
        mesh, counts = shares([param for param, _, _ in members])
        self.norm = (
            mesh,
            sizes,
            upload([*table, len(owners)], torch.int64, device),
            upload(owners, torch.int32, device),
            torch.zeros(max(len(owners), 1), dtype=torch.float64, device=device),
            upload([counts[owner] for owner in owners], torch.float64, device),
        )
        self.tables, start = [], 0
        kinds = [kind_of(param) for param, _, _ in members]
        for name in dict.fromkeys(kinds):
            stop = start + kinds.count(name)
            own = Tables(KINDS[name], members[start:stop], self.grads[start:stop], self.control)
            self.tables.append(own)
            start = stop
