# Made by tilestep 0.1.0:
#     tilestep eject AdamW --clip
# Regenerate it instead of editing it. It needs torch, and Triton for parameters on a GPU, but not tilestep.
"""AdamW: Adam with decoupled weight decay.

On a GPU a few launches update all float32 and bfloat16 parameters; on a CPU plain PyTorch does.
From top to bottom: the rule's formulas on torch tensors; Triton functions; the kinds of parameters that have kernels;
the tables that kernels read; the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
libdevice: Any = None


def adamw(param, grad, exp_avg, exp_avg_sq, lr, betas_0, betas_1, eps, weight_decay, step, gradient_scale, **_):
    """The rule on float32 numbers; hyperparameters and sums are in float64."""
    param_2 = param * (1.0 - (lr * weight_decay))
    bias_correction1 = 1.0 - (betas_0**step)
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + ((1.0 - betas_0) * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + (((1.0 - betas_1) * grad_2) * grad_2)
    bias_correction2_sqrt = torch.sqrt(1.0 - (betas_1**step))
    denom = (torch.sqrt(exp_avg_sq_2) / bias_correction2_sqrt) + eps
    param_3 = param_2 - ((lr / bias_correction1) * (exp_avg_2 / denom))
    return {"param": param_3, "exp_avg": exp_avg_2, "exp_avg_sq": exp_avg_sq_2}


KERNELS: list[Callable[..., Any]] = []  # the Triton functions of this file


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; `load_triton` compiles it, once a parameter is on a GPU."""
    KERNELS.append(function)
    return function


def load_triton() -> None:
    """Import Triton and compile the marked functions at their first launch."""
    global tl, libdevice
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    for kernel in KERNELS:
        # One build serves all addresses: kernels look at the alignment themselves.
        tables = [name for name in kernel.__code__.co_varnames if name not in kernel.__annotations__]
        globals()[kernel.__name__] = triton.jit(kernel, do_not_specialize_on_alignment=tables)


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
    return libdevice.pow(base, exponent)


@jit
def norm_tiles(
    grads, numel, norm_first, norm_owner, weights, norm_partials, ELEMENT: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add up the squares of a tile of a gradient."""
    tile = tl.program_id(0)
    t = tl.load(norm_owner + tile)
    address = tl.load(grads + t)
    begin = (tile - tl.load(norm_first + t)) * TILE
    count = tl.minimum(tl.load(numel + t) - begin, TILE).to(tl.int32)
    count = tl.where(address == 0, 0, count)
    pointer = address.to(tl.pointer_type(ELEMENT)) + begin
    lane = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    place = count * 0
    if address % 16 == 0:
        aligned = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(begin, TILE)
        while place + 2 * STEP <= count:  # two steps together: their loads overlap
            here = aligned + tl.multiple_of(place, STEP)
            left = tl.load(here + lane).to(tl.float32)
            right = tl.load(here + STEP + lane).to(tl.float32)
            total = (total + left * left) + right * right
            place += 2 * STEP
        if place + STEP <= count:
            value = tl.load(aligned + tl.multiple_of(place, STEP) + lane).to(tl.float32)
            total += value * value
            place += STEP
    while place < count:
        value = tl.load(pointer + place + lane, mask=place + lane < count, other=0).to(tl.float32)
        total += tl.where(place + lane < count, value * value, 0.0)
        place += STEP
    result = tl.sum(total).to(tl.float64)
    if not (result < float("inf")):
        # Finite elements may have squares that are not: again, of elements times 2 ** -80.
        total = tl.zeros((STEP,), tl.float32)
        place = count * 0
        while place < count:
            value = tl.load(pointer + place + lane, mask=place + lane < count, other=0).to(tl.float32)
            small = value * 8.271806125530277e-25
            total += small * small
            place += STEP
        result = tl.sum(total).to(tl.float64) * 1.461501637330903e48
    tl.store(norm_partials + tile, result * tl.load(weights + t))


@jit
def norm_total(partials, partial_count, total_norm, BLOCK: tl.constexpr):
    """Add up the squares of all tiles in a fixed order."""
    count = tl.load(partial_count)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    begin = count * 0
    while begin < count:
        total += tl.load(partials + begin + lane, mask=begin + lane < count, other=0.0)
        begin += BLOCK
    tl.store(total_norm, tl.sum(total))


@jit
def gradient_scale_of(norm, max_grad_norm):
    """The factor of gradients: the limit over their norm where that is less than 1; NaN for a norm of NaN."""
    scale = divide(max_grad_norm, norm + tl.full((1,), 1e-06, tl.float64))
    return tl.where((max_grad_norm == float("inf")) | (scale > 1.0), tl.full((1,), 1.0, tl.float64), scale)


@jit
def scalar_pass_0(counts, grads, group, hyper, step, total_norm, rows, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < tl.load(counts)
    active = inside & (tl.load(grads + t, mask=inside, other=0) != 0)
    next_step = tl.load(step + t, mask=active, other=0.0).to(tl.float64) + 1.0
    base = hyper + tl.load(group + t, mask=active, other=0) * 6
    lr = tl.load(base + 0, mask=active, other=0.0)
    weight_decay = tl.load(base + 1, mask=active, other=0.0)
    betas_0 = tl.load(base + 2, mask=active, other=0.0)
    gradient_scale = gradient_scale_of(tl.load(total_norm), tl.load(base + 5, mask=active, other=0.0))
    betas_1 = tl.load(base + 3, mask=active, other=0.0)
    eps = tl.load(base + 4, mask=active, other=0.0)
    sub = tl.full((1,), 1.0, tl.float64) - (lr * weight_decay)
    bias_correction1 = tl.full((1,), 1.0, tl.float64) - power(betas_0, next_step)
    div = divide(lr, bias_correction1)
    sub_2 = tl.full((1,), 1.0, tl.float64) - betas_0
    sub_3 = tl.full((1,), 1.0, tl.float64) - betas_1
    bias_correction2_sqrt = square_root(tl.full((1,), 1.0, tl.float64) - power(betas_1, next_step))
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
    param, exp_avg, grad, exp_avg_sq, one_minus_lr_times_weight_decay, lr_over_bias_correction1, one_minus_betas_0,
    gradient_scale, betas_1, one_minus_betas_1, bias_correction2_sqrt, eps,
):  # fmt: skip
    param_2 = param * one_minus_lr_times_weight_decay
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + (one_minus_betas_0 * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + ((one_minus_betas_1 * grad_2) * grad_2)
    denom = divide(square_root(exp_avg_sq_2), bias_correction2_sqrt) + eps
    param_3 = param_2 - (lr_over_bias_correction1 * divide(exp_avg_2, denom))
    return param_3, exp_avg_2, exp_avg_sq_2


@jit
def tile_pass_0(
    grads, addresses, tile_tensor, first_tile, numel, rows, TILE: tl.constexpr, SPAN: tl.constexpr,
    ELEMENT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    pointer = tl.pointer_type(ELEMENT)
    tile = tl.program_id(0)
    t = tl.load(tile_tensor + tile).to(tl.int64)
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
    if grad_address != 0:
        aligned = ((grad_address | param_address | exp_avg_address | exp_avg_sq_address) & 15) == 0
        start = begin
        whole = tl.where(aligned, stop - TILE + 1, begin)
        while start < whole:
            grad_array = tl.multiple_of(grad_address.to(pointer), 16) + tl.multiple_of(start, TILE) + lane
            param_array = tl.multiple_of(param_address.to(pointer), 16) + tl.multiple_of(start, TILE) + lane
            exp_avg_array = tl.multiple_of(exp_avg_address.to(pointer), 16) + tl.multiple_of(start, TILE) + lane
            exp_avg_sq_array = tl.multiple_of(exp_avg_sq_address.to(pointer), 16) + tl.multiple_of(start, TILE) + lane
            param = tl.load(param_array).to(tl.float32)
            exp_avg = tl.load(exp_avg_array).to(tl.float32)
            grad = tl.load(grad_array).to(tl.float32)
            exp_avg_sq = tl.load(exp_avg_sq_array).to(tl.float32)
            param, exp_avg, exp_avg_sq = MATH(param, exp_avg, grad, exp_avg_sq, n0, n1, n2, n3, n4, n5, n6, n7)
            tl.store(param_array, param.to(ELEMENT))
            tl.store(exp_avg_array, exp_avg.to(ELEMENT))
            tl.store(exp_avg_sq_array, exp_avg_sq.to(ELEMENT))
            start += TILE
        while start < stop:
            mask = lane < stop - start
            grad_array = grad_address.to(pointer) + start + lane
            param_array = param_address.to(pointer) + start + lane
            exp_avg_array = exp_avg_address.to(pointer) + start + lane
            exp_avg_sq_array = exp_avg_sq_address.to(pointer) + start + lane
            param = tl.load(param_array, mask=mask, other=0.0).to(tl.float32)
            exp_avg = tl.load(exp_avg_array, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_array, mask=mask, other=0.0).to(tl.float32)
            exp_avg_sq = tl.load(exp_avg_sq_array, mask=mask, other=0.0).to(tl.float32)
            param, exp_avg, exp_avg_sq = MATH(param, exp_avg, grad, exp_avg_sq, n0, n1, n2, n3, n4, n5, n6, n7)
            tl.store(param_array, param.to(ELEMENT), mask=mask)
            tl.store(exp_avg_array, exp_avg.to(ELEMENT), mask=mask)
            tl.store(exp_avg_sq_array, exp_avg_sq.to(ELEMENT), mask=mask)
            start += TILE


@jit
def math_0_bfloat16(
    param, exp_avg, grad, exp_avg_sq, one_minus_lr_times_weight_decay, lr_over_bias_correction1, one_minus_betas_0,
    gradient_scale, betas_1, one_minus_betas_1, bias_correction2_sqrt, eps,
):  # fmt: skip
    param_2 = param * one_minus_lr_times_weight_decay
    grad_2 = grad * gradient_scale
    exp_avg_2 = exp_avg + (one_minus_betas_0 * (grad_2 - exp_avg))
    exp_avg_sq_2 = (betas_1 * exp_avg_sq) + ((one_minus_betas_1 * grad_2) * grad_2)
    denom = (tl.sqrt(exp_avg_sq_2) * (1.0 / bias_correction2_sqrt)) + eps
    param_3 = param_2 - (lr_over_bias_correction1 * (exp_avg_2 / denom))
    return param_3, exp_avg_2, exp_avg_sq_2


class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Any, ...]  # the parameter and its states, in the order of the kernels: name, initial value, dtype
    hypers: tuple[str, ...]  # columns of the table of hyperparameters
    columns: int  # numbers per tensor that the scalar passes store for the tile passes
    span: int  # elements that one program updates
    launches: tuple[tuple[str, str, dict[str, Any]], ...]  # kernel, grid, constants and options

    __hash__ = object.__hash__  # compare kinds by identity


KINDS: dict[Any, Kind] = {}
for dtype, *maths in ((torch.float32, "math_0"), (torch.bfloat16, "math_0_bfloat16")):
    KINDS[dtype] = Kind(
        formula=adamw,
        buffers=(("param", "param", dtype), ("exp_avg", 0.0, dtype), ("exp_avg_sq", 0.0, dtype)),
        hypers=("lr", "weight_decay", "betas_0", "betas_1", "eps", "max_grad_norm"),
        columns=8,
        span=1536,
        launches=(
            ("scalar_pass_0", "blocks", {"BLOCK": 128, "num_warps": 4}),
            ("tile_pass_0", "tiles", {"TILE": 512, "SPAN": 1536, "MATH": maths[0], "num_warps": 4}),
        ),
    )


def kind_of(param: Any) -> Kind:
    """The kind of a parameter; raises for a parameter without kernels."""
    key: Any = param.dtype
    if key not in KINDS:
        raise ValueError(f"{key} parameters are not supported; this file has kernels for {', '.join(map(str, KINDS))}")
    return KINDS[key]


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Hyperparameters as kernels and formulas read them; raises for values that this file does not support."""
    made_for: dict[str, Any] = {"betas": (0.9, 0.999), "amsgrad": False, "maximize": False}
    for name, made in made_for.items():
        value, is_tuple = group[name], isinstance(made, tuple)
        if (not isinstance(value, (tuple, list)) or len(value) != len(made)) if is_tuple else value != made:
            another = f"; make another: tilestep eject AdamW --clip --set {name}={value}"
            raise ValueError(f"{name}={value!r}: this file was made for {name}={made!r}{'' if is_tuple else another}")
    valid: dict[str, bool] = {
        "lr": group["lr"] >= 0,
        "betas": 0 <= group["betas"][0] < 1 and 0 <= group["betas"][1] < 1,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "max_grad_norm": group["max_grad_norm"] is None or group["max_grad_norm"] >= 0,
    }
    for name, holds in valid.items():
        if not holds:
            raise ValueError(f"Invalid {name}: {group[name]}")
    return {
        "lr": float(group["lr"]),
        "betas_0": float(group["betas"][0]),
        "betas_1": float(group["betas"][1]),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "max_grad_norm": math.inf if group["max_grad_norm"] is None else float(group["max_grad_norm"]),
    }


def local(tensor: Any) -> Any:
    """The local tensor of a DTensor; other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def check_state(kind: Kind, param: Any, state: dict[str, Any]) -> None:
    """Raise if other code replaced a parameter or a state by a tensor that kernels do not support."""
    part = local(param)
    for name, _, dtype in kind.buffers:
        array = local(param if name == "param" else state[name])
        expected = (dtype, part.shape, part.stride(), part.device)
        actual = (array.dtype, array.shape, array.stride(), array.device)
        if actual != expected:
            raise ValueError(f"{name} is {actual}, expected {expected}: delete the state to reset it")


def upload(device: torch.device, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A table on a device; the host does not wait for the copy."""
    table = torch.tensor(values or [0], dtype=dtype)
    return table.to(device) if device.index is None else table.pin_memory().to(device, non_blocking=True)


def tiles_of(lengths: list[int], size: int) -> tuple[list[int], list[int]]:
    """Divide tensors of these lengths into tiles: the first tile of each tensor, and the tensor of each tile."""
    counts = [-(-length // size) for length in lengths]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    return [0, *accumulate(counts)][:-1], owners


class Tables:
    """The tables that the kernels of a kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], device: torch.device, norm_tile: int, shares: Any) -> None:
        for param, _, state, _ in members:
            check_state(kind, param, state)
        keys = [name for name, *_ in kind.buffers]
        arrays = [local(param if key == "param" else state[key]) for param, _, state, _ in members for key in keys]
        lengths = [local(param).numel() for param, *_ in members]
        table, zeros = partial(upload, device), partial(torch.zeros, device=device)
        self.kind, self.dtype, self.device, count = kind, members[0][0].dtype, device, len(members)
        norm_first, norm_owner = tiles_of(lengths, norm_tile)
        first_tile, tile_tensor = tiles_of(lengths, kind.span)
        self.tables = {
            "counts": table([count]),
            "group": table([group for *_, group in members], torch.int32),
            "addresses": table([array.data_ptr() for array in arrays]),
            "numel": table(lengths),
            "tile_tensor": table(tile_tensor, torch.int32),
            "first_tile": table(first_tile),
            "rows": zeros(count * kind.columns),
            "norm_owner": table(norm_owner, torch.int32),
            "norm_first": table(norm_first),
            "weights": table([shares[param] for param, *_ in members], torch.float64),
        }
        self.programs = {"blocks": -(-count // 128), "tiles": len(tile_tensor), "norm": len(norm_owner)}
        # For kernels, the numbers of all tensors are in one tensor; states are views of it.
        self.tables["step"] = torch.stack([state["step"].to(device, torch.float32) for _, _, state, _ in members])
        for (_, _, state, _), view in zip(members, self.tables["step"].unbind()):
            state["step"] = view
        self.known: dict[str, list[Any]] = {}  # the values in tables that change from step to step
        self.kept = [list(state.values()) for _, _, state, _ in members]  # kept alive: kernels have their addresses

    def refresh(self, numbers: list[dict[str, float]], members: list[Any]) -> None:
        """Update the addresses of gradients and the hyperparameters."""
        grads = [0 if grad is None else grad.data_ptr() or 1 for _, grad, _, _ in members]
        hyper = [own[name] for own in numbers for name in self.kind.hypers]
        for name, values, dtype in (("grads", grads, torch.int64), ("hyper", hyper, torch.float64)):
            if values != self.known.get(name):
                self.known[name], self.tables[name] = values, upload(self.device, values, dtype)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables named by its parameters."""
        if self.programs[grid]:
            kernel, math_function = globals()[name], globals().get(options.get("MATH", ""))
            values = {**self.tables, "ELEMENT": getattr(tl, str(self.dtype)[6:]), "MATH": math_function}
            arguments = {key: values[key] for key in kernel.arg_names if key in values}
            kernel[(self.programs[grid],)](**{"enable_fp_fusion": False, **options, **arguments})


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
        self, params: Any, lr: Any = 0.001, betas: Any = (0.9, 0.999), eps: Any = 1e-08, weight_decay: Any = 0.01,
        amsgrad: Any = False, *, maximize: Any = False, max_grad_norm: Any = None,
    ) -> None:  # fmt: skip
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            max_grad_norm=max_grad_norm,
        )  # fmt: skip
        super().__init__(params, defaults)

    known: list[Any] | None = None  # the identities of the tensors in the tables
    grad_norm: torch.Tensor | None = None  # the gradients' norm in the last step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; see `torch.optim.Optimizer`."""
        numbers_of({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; see `torch.optim.Optimizer`. States keep this optimizer's dtypes and memory layout."""
        states: dict[Any, Any] = {}
        # Another optimizer's checkpoint does not have every hyperparameter.
        groups = [{**group, **saved} for group, saved in zip(self.param_groups, state_dict["param_groups"])]
        groups += state_dict["param_groups"][len(groups) :]
        for group, whole in zip(self.param_groups, groups):
            numbers_of(whole)
            for param, number in zip(group["params"], whole["params"]):
                if number in state_dict["state"]:
                    states[param] = self.init_state(param, whole, state_dict["state"][number])
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self.state.update(states)

    def init_state(self, param: Any, group: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter: initial values, or the values of a checkpoint."""
        part, kind = local(param).detach(), kind_of(param)
        if torch.empty_like(part).stride() != part.stride():
            raise ValueError(f"a parameter {tuple(part.shape)} has strides {part.stride()}; make it contiguous")
        state = {"step": torch.as_tensor(values.get("step", 0.0), dtype=torch.float32).to(part.device, copy=True)}
        for name, init, dtype in kind.buffers[1:]:
            value = values.get(name, param.detach() if init == "param" else group.get(str(init), init))
            state[name] = torch.empty_like(param, dtype=dtype)
            state[name].copy_(value) if isinstance(value, torch.Tensor) else state[name].fill_(value)
        if values and values.keys() - {"step", "param"} != state.keys() - {"step"}:
            raise ValueError(f"the checkpoint has states {sorted(values)}, the optimizer has {sorted(state)}")
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        numbers = [numbers_of(group) for group in self.param_groups]
        found = self.members()
        members = [member for own in found.values() for member in own]
        params = [param for param, *_ in members]
        if not params:  # a rank without gradients joins the sum of the norm
            params = [param for group in self.param_groups for param in group["params"]][:1]
        device, *others = {local(param).device for param in params} or {torch.device("cpu")}
        if others:
            raise ValueError(f"parameters are on {device} and {others}: create one optimizer per device")
        if device.index is None:  # a CPU
            self.step_in_torch(found, numbers, device)
        else:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("step() cannot be captured: replays would repeat this step's hyperparameters")
            with torch.cuda.device(device):  # Triton launches on the current one
                self.step_by_kernels(found, numbers, device)
        torch.autograd.graph.increment_version([param for param, grad, *_ in members if grad is not None])
        return loss

    def members(self) -> dict[Kind, list[Any]]:
        """Parameters with a gradient or a state, by kind; each with its local gradient, state and group index."""
        found: dict[Kind, list[Any]] = {kind: [] for kind in KINDS.values()}
        for place, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                if grad is not None:
                    actual, expected = (
                        (local(one).layout, one.dtype, local(one).shape, getattr(one, "placements", None))
                        for one in (param.grad, param)
                    )
                    if actual != expected:
                        raise ValueError(f"a gradient is {actual}, expected {expected}")
                    if grad.stride() != part.stride():  # kernels iterate over both in memory order
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.init_state(param, group, {})
                found[kind_of(param)].append((param, grad, self.state[param], place))
        return {kind: members for kind, members in found.items() if members}

    def shares(self, params: list[Any]) -> dict[Any, float]:
        """The weight of each parameter's squares in the norm: 1 / the number of ranks with the same local tensor."""
        everything = [param for group in self.param_groups for param in group["params"]]
        meshes = dict.fromkeys(param.device_mesh for param in everything if hasattr(param, "placements"))
        mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)  # the mesh over which squares are summed
        self.mesh, shares = mesh, dict.fromkeys(params, 1.0)
        for param in params if mesh is not None else ():
            own, placements = getattr(param, "device_mesh", mesh), getattr(param, "placements", ())
            ranks, others = set(mesh.mesh.flatten().tolist()), set(own.mesh.flatten().tolist())
            if others - ranks or any(one.is_partial() for one in placements):
                raise ValueError(f"a parameter is {placements} on {own}; clipping requires shards or copies on {mesh}")
            shares[param] = (
                math.prod(n for n, one in zip(own.shape, placements) if not one.is_replicate()) / mesh.size()
            )
        return shares

    def all_reduce(self, total: torch.Tensor) -> torch.Tensor:
        """Sum a number over all ranks of the mesh, in place."""
        for group in () if self.mesh is None else self.mesh.get_all_groups():
            torch.distributed.all_reduce(total, group=group)
        return total

    def step_in_torch(self, found: dict[Kind, list[Any]], numbers: list[Any], device: torch.device) -> None:
        """A step in plain PyTorch, tensor by tensor, for CPUs; it computes the same numbers as the kernels."""
        members = [(kind, *member) for kind, own in found.items() for member in own if member[1] is not None]
        for kind, param, _, state, _ in members:
            check_state(kind, param, state)
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            shares = self.shares([param for _, param, *_ in members])
            norm = torch.zeros((), dtype=torch.float64, device=device)
            for _, param, grad, *_ in members:
                norm += grad.double().square().sum() * shares[param]
            self.grad_norm = norm = self.all_reduce(norm).sqrt()
        for kind, param, grad, state, place in members:
            state["step"] += 1
            tensors = {**state, "param": local(param).detach()}
            values: dict[str, Any] = {"grad": grad.float(), "step": state["step"].double(), "gradient_scale": 1.0}
            values |= {name: torch.tensor(own, dtype=torch.float64) for name, own in numbers[place].items()}
            values |= {name: local(tensors[name]).float() for name, *_ in kind.buffers}
            if values["max_grad_norm"] < math.inf:
                values["gradient_scale"] = torch.clamp(values["max_grad_norm"] / (norm + 1e-6), max=1.0)
            for name, value in kind.formula(**values).items():
                local(tensors[name]).copy_(value)

    def step_by_kernels(self, found: dict[Kind, list[Any]], numbers: list[Any], device: torch.device) -> None:
        """A step by a few launches over all tensors; the host does not synchronize."""
        if tl is None:
            load_triton()
        if self.known != self.identities(found):
            self.build(found, device)
        for tables, members in zip(self.tables, found.values()):
            tables.refresh(numbers, members)
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            for tables in self.tables:
                tables.launch("norm_tiles", "norm", {"TILE": self.norm_tile, "STEP": 2048, "enable_fp_fusion": True})
            norm_total[(1,)](self.partials, self.count, self.norm, BLOCK=8192, num_warps=32, enable_fp_fusion=False)
            self.grad_norm = self.all_reduce(self.norm).sqrt_()[0].clone()
        for tables in self.tables:
            for launch in tables.kind.launches:
                tables.launch(*launch)

    def identities(self, found: dict[Kind, list[Any]]) -> list[Any]:
        """Kinds, groups, shapes, and tensors of parameters and states: the tables depend on them."""
        return [
            (kind, place, param.shape, param.stride(), [(id(x), local(x).data_ptr()) for x in (param, *state.values())])
            for kind, members in found.items()
            for param, _, state, place in members
        ]

    def build(self, found: dict[Kind, list[Any]], device: torch.device) -> None:
        """Build the tables of these parameters."""
        params = [param for members in found.values() for param, *_ in members]
        if len(set(params)) < len(params):
            raise ValueError("a parameter appears more than once in its param group")
        tile = self.norm_tile = 16384 if sum(local(param).numel() for param in params) < 2**28 else 32768
        shares = self.shares(params)
        self.tables = [Tables(kind, members, device, tile, shares) for kind, members in found.items()]
        tiles = [tables.programs["norm"] for tables in self.tables]
        self.partials = torch.zeros(sum(tiles), dtype=torch.float64, device=device)
        self.norm, self.count = self.partials.new_zeros(1), upload(device, [sum(tiles)])
        for tables, partials in zip(self.tables, self.partials.split(tiles)):
            tables.tables |= {"norm_partials": partials, "total_norm": self.norm}
        self.known = self.identities(found)
