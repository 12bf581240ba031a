"""Formats of blocks on every backend."""

from __future__ import annotations

import pytest
import torch
from block_rows import (
    BACKENDS,
    FORMATS,
    SHAPES,
    backend,
    check_blocks,
    check_float8,
    check_infinite_blocks,
    check_infinities,
    check_largest_roots,
)

import tilestep
from tilestep.errors import StateError
from tilestep.rules import registry
from tilestep.rules.compose import centralize
from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of


@pytest.mark.parametrize("over_rows", [False, True], ids=["flat", "over rows"])
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_kept_as_torch_keeps_them(format: str, name: str, strided: bool, over_rows: bool) -> None:
    shapes = SHAPES
    if over_rows:  # each number of dimensions has its own kernels: more of them with one format
        more = {3, 4} if format == "int8" else set() if strided else {4}
        shapes = [*(shape for shape in SHAPES if len(shape) in {2, *more}), (3, 5000)]
    with backend(name):
        check_blocks(format, shapes, strided=strided, over_rows=over_rows)


@pytest.mark.parametrize("over_rows", [False, True], ids=["flat", "over rows"])
@pytest.mark.parametrize("name", BACKENDS)
def test_infinities_of_float16_blocks_stay(name: str, over_rows: bool) -> None:
    with backend(name):
        check_infinities(over_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_float8_is_torch_s(name: str, dtype: torch.dtype) -> None:
    with backend(name):
        check_float8(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_infinite_blocks_and_the_largest_roots(name: str, dtype: torch.dtype) -> None:
    with backend(name):
        check_infinite_blocks(dtype)
        check_largest_roots(dtype)


def test_blocks_that_cross_rows_are_kept_in_float32_or_refused() -> None:
    rule, weight = centralize(registry["AdamW"]), torch.nn.Parameter(torch.ones(4, 8, 150))
    for choice in ("int8", {"exp_avg": "int8"}):
        optimizer = tilestep.Optimizer([("layer", weight)], rule, state_dtype=choice)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].dtype is torch.float32
    with pytest.raises(StateError, match=r"reduces over rows that blocks of 128 along 150 elements cross"):
        tilestep.Optimizer([("layer", weight)], rule, state_dtype=lambda _: "int8")


@pytest.mark.parametrize(
    ("format", "moment", "root"), [("int8", 3.4e-5, 1e-5), ("float8_e4m3", 7e-4, 2e-4), ("int4", 1.2e-2, 4e-3)]
)
def test_normal_numbers_and_their_squares_come_back_as_documented(format: str, moment: float, root: float) -> None:
    values = torch.randn(512, 1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    for signed, exact, bound in ((True, values, moment), (False, values.square(), root)):
        storage = STATE_FORMATS[format](signed)
        arrays = {
            array.name: torch.empty(shape_of_entries(exact.shape, array.elements), dtype=array.dtype)
            for array in storage.arrays("state")
        }
        stored_in(storage, arrays, "state", exact, exact.shape)
        back = values_of(storage, arrays, "state", shape=exact.shape)
        wanted, loaded = (exact, back) if signed else (exact.sqrt(), back.sqrt())
        error = (loaded - wanted).double().square().sum() / wanted.double().square().sum()
        assert float(error) < bound
        assert signed or bool((back[exact > 0] > 0).all())


@pytest.mark.parametrize("scale", [2.0**-100, 1e-20, 0.75, 1.0, 3.0, 1e17])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "root"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_kept_as_itself(format: str, signed: bool, scale: float) -> None:
    storage, scale = STATE_FORMATS[format](signed), scale if signed else scale**0.5  # their squares are no denormals
    codes, scales = storage.arrays("state")
    least, largest = {
        "int8": (-127, 127) if signed else (0, 255),
        "float8_e4m3": (0, 0x7E),
        "int4": (signed, 15),
        "scaled_float16": (0x2000, 0x7800),  # 2^-7 to 2^15, by their bits
    }[format]
    # Each block has the largest code, which brings the scale back; the others are filled up with it.
    rows = torch.arange(least, largest + 1).split(127)
    kept = torch.stack([torch.cat([row.new_full((128 - len(row),), largest), row]) for row in rows])
    if codes.elements == 2:
        kept = kept[:, ::2] | (kept[:, 1::2] << 4)
    kept = kept.to(torch.int16 if codes.dtype == torch.float16 else torch.uint8).view(codes.dtype)
    arrays = {codes.name: kept, scales.name: torch.full((len(kept), 1), scale, dtype=torch.bfloat16)}
    shape = (len(kept), 128)
    values = values_of(storage, arrays, "state", shape=shape)
    again = {name: torch.zeros_like(array) for name, array in arrays.items()}
    stored_in(storage, again, "state", values, shape)
    assert all(torch.equal(again[name].view(torch.uint8), arrays[name].view(torch.uint8)) for name in arrays)
