"""Formats of blocks on any backend: kept and read as torch does, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from format_rows import backend

import tilestep
from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of

FORMATS = ["int8", "float8_e4m3", "int4", "scaled_float16"]

SHAPES: list[tuple[int, ...]] = [
    (9, 128),
    (3, 256),
    (7, 300),
    (5, 130),
    (6, 5, 3, 3),
    (5000,),
    (640,),
    (33, 64),
    (4, 2, 96),
]

BACKENDS = ["cpp", "eager"]


def signed_rule(param: Any, grad: Any, kept: Any, *, lr: float = 1.0) -> tuple[Any, Any]:
    """Keeps the gradient, and shows what was kept."""
    return kept, grad * lr


def positive_rule(param: Any, grad: Any, kept: Any, *, lr: float = 1.0) -> tuple[Any, Any]:
    """Keeps the gradient's magnitude, and shows what was kept."""
    return kept, abs(grad * lr)


def _unless_negative(grad: Any, kept: Any) -> Any:
    """What is kept, chosen by numbers of rows and of columns, which no magnitude is below."""
    row = grad.abs().amax(tuple(range(1, grad.dim())), keepdim=True)
    return torch.where((row < 0) | (grad.abs().amax(0, keepdim=True) < 0), 0.0, kept)


def signed_rows(param: Any, grad: Any, kept: Any, *, lr: float = 1.0) -> tuple[Any, Any]:
    """As `signed_rule`, in a pass that reads numbers of rows and columns."""
    return kept, _unless_negative(grad, grad * lr)


def positive_rows(param: Any, grad: Any, kept: Any, *, lr: float = 1.0) -> tuple[Any, Any]:
    """As `positive_rule`, in a pass that reads numbers of rows and columns."""
    return kept, _unless_negative(grad, abs(grad * lr))


RULES = {True: tilestep.rule(signed_rule), False: tilestep.rule(positive_rule)}

RULES_OVER_ROWS = {True: tilestep.rule(signed_rows), False: tilestep.rule(positive_rows)}


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Numbers of very different size, with blocks of zeros, of denormals, and some that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    flat = values.view(-1)
    count = flat.numel()
    flat[: count // 8] = 0
    flat[count // 4 : count // 4 + 3] = 1e-41
    flat[count // 2] = torch.nan
    flat[count // 3] = torch.inf
    flat[count // 5] = 2.5e38
    flat[-40:] *= 1e-30
    return values


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of an array, every NaN alike."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    kind = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).view(kind)


def check_blocks(name: str, shapes: list[tuple[int, ...]], *, strided: bool = False, over_rows: bool = False) -> None:
    """Two steps: the first keeps numbers as `stored_in` does, the second reads them as `values_of` does."""
    for signed, rule in (RULES_OVER_ROWS if over_rows else RULES).items():
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        if strided:
            params = [
                torch.nn.Parameter(torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1])) for shape in shapes
            ]
        optimizer = tilestep.Optimizer([("p", p) for p in params], rule, state_dtype=lambda _: name)
        for place, param in enumerate(params):
            param.grad = numbers(tuple(param.shape), place)
        optimizer.step()
        storage = STATE_FORMATS[name](signed)
        everything = []
        for param in params:
            state = optimizer.state[param]
            own = STATE_FORMATS["int8"](signed) if storage.arrays("kept")[1].name not in state else storage
            wanted = {
                array.name: torch.empty(shape_of_entries(param.shape, array.elements), dtype=array.dtype)
                for array in own.arrays("kept")
            }
            assert param.grad is not None
            stored_in(own, wanted, "kept", param.grad if signed else param.grad.abs(), param.shape)
            for key, array in wanted.items():
                assert tuple(state[key].shape) == tuple(array.shape)
                assert torch.equal(as_bits(state[key].contiguous()), as_bits(array)), (key, param.shape)
            assert not wanted[own.arrays("kept")[1].name].isfinite().all()
            everything.append((param, values_of(own, wanted, "kept", shape=param.shape)))
        optimizer.step()
        for param, read in everything:
            assert torch.equal(as_bits(param.detach().contiguous()), as_bits(read))


def check_infinities(over_rows: bool = False) -> None:
    """Infinities of float16 blocks keep their places and signs, and leave other blocks alone."""
    for signed, rule in (RULES_OVER_ROWS if over_rows else RULES).items():
        param = torch.nn.Parameter(torch.zeros(2, 300))
        optimizer = tilestep.Optimizer([("p", param)], rule, state_dtype=lambda _: "scaled_float16")
        param.grad = torch.linspace(-3, 3, 600).reshape(2, 300)
        param.grad[:, 7] = 0
        param.grad[0, 3], param.grad[0, 299], param.grad[1, 140] = torch.inf, -torch.inf, torch.inf
        optimizer.step()
        optimizer.step()
        wanted, kept = (param.grad if signed else param.grad.abs()), param.detach()
        infinite = wanted.isinf()
        assert torch.equal(kept[infinite], wanted[infinite])
        beside = torch.zeros_like(infinite)
        beside[0, :128] = beside[0, 256:] = beside[1, 128:256] = True
        assert not kept[beside].isfinite().any()
        torch.testing.assert_close(kept[~beside], wanted[~beside], rtol=2**-10, atol=1e-9)


__all__ = ["BACKENDS", "FORMATS", "SHAPES", "backend", "check_blocks", "check_infinities"]
