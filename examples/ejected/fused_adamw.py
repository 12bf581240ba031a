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
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
libdevice: Any = None
VALUES: dict[str, Any] = dict(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False, maximize=False)
"""Hyperparameters as this file was made for them; those that are numbers may have other values."""
KERNELS: list[str] = []  # the Triton functions of this file


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; it stays as it is until a parameter is on a GPU."""
    KERNELS.append(function.__name__)
    return function


def load_triton() -> None:
    """Import Triton and compile the marked functions at their first launch."""
    global tl
    global libdevice
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    for name in KERNELS:
        # One build serves all addresses: kernels look at the alignment themselves.
        parameters = inspect.signature(globals()[name]).parameters.items()
        tables = [key for key, parameter in parameters if "constexpr" not in str(parameter.annotation)]
        globals()[name] = triton.jit(globals()[name], do_not_specialize_on_alignment=tables)


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
def norm_tiles(
    grads, norm_numel, norm_first, norm_owner, weights, norm_partials, ELEMENT: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add up the squares of a tile of a gradient."""
    tile = tl.program_id(0)
    t = tl.load(norm_owner + tile)
    address = tl.load(grads + t)
    begin = (tile - tl.load(norm_first + t)) * TILE
    count = tl.minimum(tl.load(norm_numel + t) - begin, TILE).to(tl.int32)
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
    step_2 = next_step
    gradient_scale = gradient_scale_of(tl.load(total_norm), tl.load(base + 5, mask=active, other=0.0))
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


def adamw(
    param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, lr: Any, betas: Any, eps: Any, weight_decay: Any, step: Any,
    gradient_scale: Any,
) -> dict[str, Any]:  # fmt: skip
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


class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Any, ...]  # the parameter and its states: name, what it begins with, dtype or arrays
    arrays: tuple[str, ...]  # what kernels read and write beside the gradient, in the order of their table
    hypers: tuple[str, ...]  # columns of the table of hyperparameters
    columns: int  # numbers that the scalar passes leave for the tiles of a tensor
    span: int  # elements that one program updates
    launches: tuple[tuple[str, str, dict[str, Any]], ...]  # kernel, grid, constants and options


def kind_of_dtype(dtype: torch.dtype, *maths: str) -> Kind:
    """The kind of one dtype, with the formulas that are its own."""
    return Kind(
        formula=adamw,
        buffers=(("param", "param", dtype), ("exp_avg", 0.0, dtype), ("exp_avg_sq", 0.0, dtype)),
        arrays=("param", "exp_avg", "exp_avg_sq"),
        hypers=("lr", "weight_decay", "betas.0", "betas.1", "eps", "max_grad_norm"),
        columns=8,
        span=1536,
        launches=(
            ("scalar_pass_0", "blocks", {"BLOCK": 128, "num_warps": 4}),
            ("tile_pass_0", "tiles", {"TILE": 512, "SPAN": 1536, "ELEMENT": dtype, "MATH": maths[0], "num_warps": 4}),
        ),
    )


KINDS = {
    torch.float32: kind_of_dtype(torch.float32, "math_0"),
    torch.bfloat16: kind_of_dtype(torch.bfloat16, "math_0_bfloat16"),
}


def kind_of(param: Any) -> Any:
    """The key of the kind of a parameter; raises for a parameter that there are no kernels for."""
    if param.dtype not in KINDS:
        raise ValueError(f"a parameter is {param.dtype}; this file is for float32 and bfloat16")
    return param.dtype


def check(group: dict[str, Any]) -> None:
    """Raise for hyperparameters that are out of their ranges, or that this file has no kernels for."""
    for name, value in VALUES.items():
        if fixed(group[name]) != fixed(value):
            another = f"make another: tilestep eject AdamW --set {name}={group[name]}"
            raise ValueError(f"{name}={group[name]!r}: this file was made for {name}={value!r}; {another}")
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


def check_state(kind: Kind, param: Any, state: dict[str, Any]) -> None:
    """Raise where other code has made a parameter or its state other tensors than kernels take."""
    part = local(param)
    wanted = [(name, dtype, part.shape) for name, _, dtype in kind.buffers]
    for name, dtype, shape in wanted:
        array = local(param if name == "param" else state[name])
        strides = part.stride() if shape == part.shape else torch.empty(shape, device="meta").stride()
        found, right = (array.dtype, array.shape, array.stride(), array.device), (dtype, shape, strides, part.device)
        if found != right:
            raise ValueError(f"{name} is {found}; its parameter needs {right}: delete the state to begin anew")


def mesh_of(groups: list[dict[str, Any]]) -> Any:
    """The largest mesh of parameters, over which squares are added up; None where no parameter has one."""
    params = [param for group in groups for param in group["params"]]
    meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "placements"))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def share(param: Any, mesh: Any) -> float:
    """How much this rank's squares of a parameter count: one over the ranks that hold the same part of it."""
    if mesh is None:
        return 1.0
    own, placements = getattr(param, "device_mesh", mesh), getattr(param, "placements", ())
    ranks = set(mesh.mesh.flatten().tolist())
    if not ranks.issuperset(own.mesh.flatten().tolist()) or any(one.is_partial() for one in placements):
        raise ValueError(f"a parameter is {placements} on {own}; the norm adds up shards and copies on {mesh}")
    return math.prod(size for size, one in zip(own.shape, placements) if not one.is_replicate()) / mesh.size()


def add_up(total: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The sum of a number over all ranks of a mesh, in place."""
    for dim in range(0 if mesh is None else mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


def upload(device: torch.device, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A table on a device; the host does not wait for the copy."""
    table = torch.tensor(values or [0], dtype=dtype)
    return table.to(device) if device.index is None else table.pin_memory().to(device, non_blocking=True)


def tiles_of(lengths: list[int], size: int) -> tuple[list[int], list[int]]:
    """Tensors of these lengths in tiles: the first tile of each tensor, and the tensor of each tile."""
    counts = [-(-length // size) for length in lengths]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    return [0, *accumulate(counts)][:-1], owners


class Tables:
    """What the kernels of one kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], device: torch.device) -> None:
        self.kind, self.members = kind, members
        table, zeros = partial(upload, device), partial(torch.zeros, device=device)
        count = len(members)
        lengths = [local(param).numel() for param, _, _ in members]
        first, owners = tiles_of(lengths, kind.span)
        self.programs = {"tensors": count, "blocks": -(-count // 128), "tiles": len(owners)}
        self.tables = {
            "counts": table([count]),
            "group": table([group for _, _, group in members], torch.int32),
            "numel": table(lengths),
            "tile_tensor": table(owners, torch.int32),
            "first_tile": table(first),
            "rows": zeros(count * kind.columns),
        }
        self.known: dict[str, list[Any]] = {}  # what changes from step to step, as in its tables
        # Numbers of all tensors lie side by side for kernels; a state has views of its own.
        self.tables["step"] = torch.stack([state["step"].to(device, torch.float32) for _, state, _ in members])
        for (_, state, _), view in zip(members, self.tables["step"].unbind()):
            state["step"] = view
        self.kept = [list(state.values()) for _, state, _ in members]  # alive, so that no other tensor gets their ids

    def for_norm(self, mesh: Any, tile: int) -> int:
        """Make the tables of the norm; returns the number of its tiles."""
        params, table = [param for param, _, _ in self.members], partial(upload, self.tables["rows"].device)
        lengths = [local(param).numel() for param in params]
        first, owners = tiles_of(lengths, tile)
        self.norm = {"ELEMENT": params[0].dtype, "TILE": tile, "STEP": 2048, "enable_fp_fusion": True}
        self.programs["norm"] = len(owners)
        self.tables |= {"norm_numel": table(lengths), "norm_first": table(first)}
        self.tables["norm_owner"] = table(owners, torch.int32)
        self.tables["weights"] = table([share(param, mesh) for param in params], torch.float64)
        return len(owners)

    def refresh(self, groups: list[dict[str, Any]], gradients: list[Any]) -> None:
        """Bring addresses and hyperparameters up to date."""
        keys, now = self.kind.arrays, dict[str, list[Any]]()
        arrays = [local(param if key == "param" else state[key]) for param, state, _ in self.members for key in keys]
        now["grads"] = [0 if grad is None else grad.data_ptr() or 1 for grad in gradients]
        now["addresses"] = [array.data_ptr() for array in arrays]
        if now["addresses"] != self.known.get("addresses"):
            for param, state, _ in self.members:
                check_state(self.kind, param, state)
        now["hyper"] = [number_of(group, name) for group in groups for name in self.kind.hypers]
        for name, values in now.items():
            if values != self.known.get(name):
                dtype = torch.float64 if name == "hyper" else torch.int64
                self.known[name], self.tables[name] = values, upload(self.tables["rows"].device, values, dtype)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables that its parameters name."""
        if self.programs[grid]:
            kernel = globals()[name]
            pointers = [self.tables[pointer] for pointer in kernel.arg_names if pointer in self.tables]
            types = {key: getattr(tl, str(value)[6:]) for key, value in options.items() if key == "ELEMENT"}
            functions = {key: globals()[value] for key, value in options.items() if key == "MATH"}
            options = {"enable_fp_fusion": False, **options, **types, **functions}
            kernel[(self.programs[grid],)](*pointers, **options)


def identities(found: dict[Any, list[Any]]) -> list[Any]:
    """What tables are made for: parameters, their kinds, groups and shapes, and the tensors of their states."""
    return [
        (name, id(param), group, param.shape, *map(id, state.values()))
        for name, pairs in found.items()
        for (param, state, group), _ in pairs
    ]


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
        self, params: Any, lr: Any = 0.001, betas: Any = (0.9, 0.999), eps: Any = 1e-08, weight_decay: Any = 0.01,
        amsgrad: Any = False, *, maximize: Any = False, max_grad_norm: Any = None,
    ) -> None:  # fmt: skip
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            max_grad_norm=max_grad_norm,
        )  # fmt: skip
        super().__init__(params, defaults)

    tables: Sequence[Tables] = ()  # for kernels; made again when parameters or states are other ones
    known: list[Any] | None = None  # what they were made for
    grad_norm: torch.Tensor | None = None  # of the gradients of the last step
    mesh: Any = None  # of the ranks that share it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's."""
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self.known = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, as torch's; states keep the dtypes and the order in memory that they have here."""
        own, states, saved = self.param_groups, dict[Any, Any](), state_dict["state"]
        # Another optimizer's checkpoint does not have every hyperparameter.
        groups = [
            {**group, **other, "params": group["params"]} for group, other in zip(own, state_dict["param_groups"])
        ]
        for group, other in zip(groups, state_dict["param_groups"]):
            check(group)
            for param, number in zip(group["params"], other["params"]):
                if number in saved:
                    states[param] = self.begin(param, group, saved[number])
        super().load_state_dict(state_dict)
        self.known = None
        self.state.update(states)
        for group, whole in zip(self.param_groups, groups):
            group.update({**whole, **group})

    def begin(self, param: Any, group: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with the values that a checkpoint has of it."""
        part, kind = local(param).detach(), KINDS[kind_of(param)]
        if torch.empty_like(part).stride() != part.stride():
            raise ValueError(f"a parameter {tuple(part.shape)} has strides {part.stride()}; make it contiguous")
        state: dict[str, Any] = {}
        state["step"] = torch.as_tensor(values.get("step", 0.0), dtype=torch.float32).to(part.device, copy=True)
        for name, begins, dtype in kind.buffers[1:]:
            if values and name not in values:
                raise ValueError(f"the checkpoint has no state {name!r}: it is of another optimizer")
            value = values.get(name, param.detach() if begins == "param" else group.get(str(begins), begins))
            state[name] = torch.empty_like(param, dtype=dtype)
            state[name].copy_(value) if isinstance(value, torch.Tensor) else state[name].fill_(value)
        unknown = values.keys() - state.keys()
        if unknown:
            raise ValueError(f"the checkpoint has the states {sorted(unknown)}, which this optimizer does not keep")
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            check(group)
        found = self.members()
        members = [member for pairs in found.values() for member, _ in pairs]
        params = [param for param, _, _ in members]
        if not params:  # a rank without gradients joins the sum of the norm
            params = [param for group in self.param_groups for param in group["params"]]
        if params:
            first = local(params[0])
            if first.is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("replays would repeat this step's hyperparameters: step outside of a CUDA graph")
                with torch.cuda.device(first.device):  # Triton launches on the current one
                    self.step_by_kernels(found, first.device)
            else:
                self.step_in_torch(found, first.device)
        written = [param for pairs in found.values() for (param, _, _), grad in pairs if grad is not None]
        torch.autograd.graph.increment_version(written)
        return loss

    def members(self) -> dict[Any, list[Any]]:
        """Parameters with their states and groups, and the gradients, by kind."""
        found: dict[Any, list[Any]] = {name: [] for name in KINDS}
        devices = set()
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                devices.add(part.device)
                if grad is not None:
                    kinds = [
                        (one.layout, one.dtype, tuple(one.shape), getattr(whole, "placements", None))
                        for one, whole in ((grad, param.grad), (part, param))
                    ]
                    if kinds[0] != kinds[1]:
                        raise ValueError(f"a gradient is {kinds[0]}; its parameter is {kinds[1]}")
                    if grad.stride() != part.stride():  # kernels walk both in the order of their memory
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.begin(param, group, {})
                found[kind_of(param)].append(((param, self.state[param], number), grad))
        if len(devices) > 1:
            raise ValueError(f"parameters lie on {devices}: give each device an optimizer of its own")
        return {name: pairs for name, pairs in found.items() if pairs}

    def step_in_torch(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """A step tensor by tensor: what CPUs run, and the same numbers as kernels compute."""
        pairs = [pair for own in found.values() for pair in own if pair[1] is not None]
        for (param, state, _), _ in pairs:
            check_state(KINDS[kind_of(param)], param, state)
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            mesh, norm = mesh_of(self.param_groups), torch.zeros((), dtype=torch.float64, device=device)
            for (param, _, _), grad in pairs:
                norm += grad.double().square().sum() * share(param, mesh)
            self.grad_norm = norm = add_up(norm, mesh).sqrt()
        for (param, state, number), grad in pairs:
            state["step"] += 1
            group, part, kind = self.param_groups[number], local(param).detach(), KINDS[kind_of(param)]
            tensors = {**state, "param": part}
            given = {name: as_numbers(group[name]) for name in VALUES}
            given.update({name: local(tensors[name]).float() for name, *_ in kind.buffers})
            given.update(grad=grad.float(), step=state["step"].double(), shape=param.shape, gradient_scale=1.0)
            if group["max_grad_norm"] not in (None, math.inf):
                given["gradient_scale"] = torch.clamp(group["max_grad_norm"] / (norm + 1e-6), max=1.0)
            wanted = inspect.signature(kind.formula).parameters
            if part.numel():
                results = kind.formula(**{name: given[name] for name in wanted})
                for name, values in results.items():
                    local(tensors[name]).copy_(values)

    def step_by_kernels(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """A step by a few launches over all tensors; the host waits for nothing."""
        if tl is None:
            load_triton()
        if self.known != identities(found):
            self.build(found, device)
        for tables, pairs in zip(self.tables, found.values()):
            tables.refresh(self.param_groups, [grad for _, grad in pairs])
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            for tables in self.tables:
                tables.launch("norm_tiles", "norm", tables.norm)
            options = {"num_warps": 32, "enable_fp_fusion": False}
            norm_total[(1,)](self.partials, self.tile_count, self.norm, BLOCK=8192, **options)
            self.grad_norm = add_up(self.norm, self.mesh).sqrt_()[0].clone()
        for tables in self.tables:
            for launch in tables.kind.launches:
                tables.launch(*launch)

    def build(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """Make the tables of these parameters."""
        if len({id(param) for pairs in found.values() for (param, _, _), _ in pairs}) < sum(map(len, found.values())):
            raise ValueError("a parameter is listed twice in its group")
        self.tables = [Tables(KINDS[name], [member for member, _ in pairs], device) for name, pairs in found.items()]
        self.mesh = mesh_of(self.param_groups)
        total = sum(local(param).numel() for tables in self.tables for param, _, _ in tables.members)
        tiles = [tables.for_norm(self.mesh, 16384 if total < 2**28 else 32768) for tables in self.tables]
        self.partials = torch.zeros(sum(tiles), dtype=torch.float64, device=device)
        self.norm, self.tile_count = self.partials.new_zeros(1), upload(device, [sum(tiles)])
        for tables, partials in zip(self.tables, self.partials.split(tiles)):
            tables.tables |= {"norm_partials": partials, "total_norm": self.norm}
        self.known = identities(found)
