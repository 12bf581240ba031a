"""The Triton kernels: run in Triton's interpreter on the CPU, and compiled for a GPU without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import all_equal_in_the_interpreter
from triton_assembler import require_assembler

from tilestep.kernels.launch import load_module
from tilestep.norm.tiles import DTYPES, Order
from tilestep.norm.triton_source import FINISH_BLOCK, norm_source, scale_source

triton = pytest.importorskip("triton", reason="Triton is not installed")


def test_interpreted_kernels_equal_float64() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_norm.py"))


def compiled(kernel: object, signature: dict[str, str], constants: dict[str, object], warps: int) -> str:
    """PTX for an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


TABLES = {"addresses": "*i64", "table": "*i64", "tile_tensor": "*i32"}


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [list(DTYPES)], ids=str)
def test_full_tiles_are_read_and_written_16_bytes_at_a_time(dtypes: list[torch.dtype]) -> None:
    require_assembler()
    module = load_module("norm", norm_source(dtypes, Order.SQUARES))
    text = compiled(
        module.norm_tiles, {**TABLES, "partials": "*fp64", "power": "fp64"}, {"TILE": 8192, "STEP": 1024}, 4
    )
    wide = {"ld.global.v2.b64"} if dtypes == [torch.float64] else {"ld.global.v4.b32"}
    assert any(access in text for access in wide)
    module = load_module("scale", scale_source(dtypes, limit_on_device=False))
    text = compiled(module.scale_tiles, {**TABLES, "norm": "*fp32", "limit": "fp64"}, {"TILE": 8192, "STEP": 1024}, 4)
    for access in wide:
        assert access in text
        assert access.replace("ld.", "st.") in text


@pytest.mark.parametrize("order", Order)
def test_every_order_compiles(order: Order) -> None:
    require_assembler()
    module = load_module("norm", norm_source([torch.float32, torch.float64], order))
    compiled(module.norm_tiles, {**TABLES, "partials": "*fp64", "power": "fp64"}, {"TILE": 8192, "STEP": 1024}, 4)
    finish = {"partials": "*fp64", "size": "*i64", "out": "*fp32", "power": "fp64"}
    for root in (True, False):
        text = compiled(module.norm_finish, finish, {"ROOT": root, "BLOCK": FINISH_BLOCK}, 32)
        assert ("sqrt.rn.f64" in text) == (root and order is Order.SQUARES)
