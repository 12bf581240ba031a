"""Formats of blocks on any backend: kept and read as torch does, to the bit."""

from __future__ import annotations

import itertools
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


def as_earlier(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as revisions before these names had it: codes under the name of the state, and no NaN beside."""
    states = {
        key: {
            name.removesuffix("_codes"): value.clone() for name, value in state.items() if not isinstance(value, float)
        }
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


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


def float8_numbers() -> torch.Tensor:
    """Every bfloat16 and float16 of up to 448, and numbers of float32 around and at ties; 448 in each block."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    codes = torch.arange(0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes + torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()) / 2
    numbers = [every.view(torch.bfloat16).float(), every.view(torch.float16).float()]
    numbers += [sign * ties.nextafter(toward) for sign in (1, -1) for toward in (ties, 0 * ties, 2 * ties)]
    numbers.append(torch.randn(9000, generator=torch.Generator().manual_seed(0)).exp().square())
    kept = torch.cat(numbers)
    kept = kept[kept.abs() <= 448]
    rows = torch.full((-(-len(kept) // 127), 128), 448.0)
    rows[:, 1:] = torch.cat([kept, kept.new_zeros(len(rows) * 127 - len(kept))]).view(-1, 127)
    return rows


def check_float8(dtype: torch.dtype = torch.float32, device: str = "cpu", few: bool = False) -> None:
    """Codes are those of torch's conversion, and all are read as torch reads them."""
    numbers = float8_numbers()
    numbers = numbers[:: 40 if few else 1]
    numbers = numbers if dtype is torch.float32 else numbers.to(dtype).float().clamp(-448, 448)
    numbers[numbers == 0] = 0  # without signs
    for signed, rule in RULES.items():
        param = torch.nn.Parameter(torch.zeros(numbers.shape, dtype=dtype, device=device))
        optimizer = tilestep.Optimizer([("p", param)], rule, state_dtype=lambda _: "float8_e4m3")
        param.grad = numbers.to(dtype).to(device)
        optimizer.step()
        state = optimizer.state[param]
        # Float8's denormals are those of a float32 with its bias, to which numbers are rounded first.
        rounded = numbers * 2.0**-120 * 2.0**120
        wanted = (rounded if signed else rounded.abs()).to(torch.float8_e4m3fn).view(torch.uint8)
        wanted = wanted if signed else torch.where(numbers != 0, wanted.clamp(min=1), wanted)
        assert torch.equal(state["kept_codes"].cpu().view(torch.uint8), wanted)
        assert (state["kept_scales"] == 448).all()
        every = torch.arange(256 if signed else 128, dtype=torch.int32).to(torch.uint8)
        codes = every.repeat(-(-numbers.numel() // len(every)))
        codes = codes[: numbers.numel()].view(numbers.shape).view(torch.float8_e4m3fn)
        state["kept_codes"].copy_(codes)
        optimizer.step()
        assert torch.equal(as_bits(param.detach().cpu()), as_bits(codes.to(dtype)))


def check_infinite_blocks(dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Blocks with an infinity: signed ones of whole numbers are NaN, of float8 infinite with each number's own sign.

    Where roots are kept all but zeros, which are NaN, are infinite; so are all of float8. With NaN all are NaN.
    """
    for format, signed in itertools.product(("int8", "int4", "float8_e4m3"), (True, False)):
        param = torch.nn.Parameter(torch.zeros(2, 300, dtype=dtype, device=device))
        optimizer = tilestep.Optimizer([("p", param)], RULES[signed], state_dtype=lambda _, choice=format: choice)
        given = torch.linspace(-3, 3, 600).reshape(2, 300)
        given[:, 7] = 0
        given[0, 3], given[0, 5], given[1, 140], given[1, 299] = torch.inf, -torch.inf, -torch.inf, torch.nan
        param.grad = given.to(dtype).to(device)
        for _ in range(2):
            optimizer.step()
        kept = param.detach().float().cpu()
        infinite, missing = torch.zeros(2, 300, dtype=torch.bool), torch.zeros(2, 300, dtype=torch.bool)
        infinite[0, :128] = infinite[1, 128:256] = missing[1, 256:] = True
        if format != "float8_e4m3":
            missing |= infinite if signed else infinite & (given == 0)
        infinite &= ~missing
        wanted = torch.full_like(given, torch.inf).copysign(given if signed else given.abs())
        assert torch.equal(kept.isnan(), missing), (format, signed, dtype)
        compared = infinite & (given != 0)  # of zeros either sign
        assert torch.equal(kept.isinf(), infinite) and torch.equal(kept[compared], wanted[compared]), (format, dtype)


def check_largest_roots(dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """The largest of a block has one of the largest codes, whose scale is rounded up or down by up to a 256th."""
    for format, largest in {"int8": 255, "int4": 15}.items():
        param = torch.nn.Parameter(torch.zeros(256, 128, dtype=dtype, device=device))
        optimizer = tilestep.Optimizer([("p", param)], RULES[False], state_dtype=lambda _, choice=format: choice)
        given = torch.rand(256, 128, generator=torch.Generator().manual_seed(0)) / 2
        given[:, 5] = torch.linspace(1, 4, 257)[:-1]
        param.grad = given.to(dtype).to(device)
        optimizer.step()
        codes = optimizer.state[param]["kept_codes"].cpu()
        found = codes[:, 5] if format == "int8" else codes[:, 2] >> 4
        assert (found >= largest - 1).all() and (found == largest).any(), (format, dtype)


__all__ = [
    "BACKENDS",
    "FORMATS",
    "SHAPES",
    "as_bits",
    "as_earlier",
    "backend",
    "check_blocks",
    "check_float8",
    "check_infinite_blocks",
    "check_infinities",
    "check_largest_roots",
]
