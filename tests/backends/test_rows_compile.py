"""The Triton kernels of passes over rows and columns, compiled for a GPU without one."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_assembler import require_assembler

from tilestep.backends.triton import source as triton_backend
from tilestep.backends.triton.slices import block_of, build_options, held_rows
from tilestep.kernels.launch import load_module
from tilestep.kernels.spec import KernelSpec
from tilestep.rules import registry, rule
from tilestep.runtime import graph_for, kernel_spec
from tilestep.stats.changes import CHANGED
from tilestep.stats.measures import measured_by
from tilestep.storage import Plain, Stochastic, state_format

triton = pytest.importorskip("triton", reason="Triton is not installed")

TYPES = {
    "tile_tensor": "*i32",
    "words": "*i32",
    "report_partials": "*fp32",
    "control": "*fp64",
    "partials": "*fp64",
    "sums": "*fp64",
}


def spec_of(dims: int, dtype: torch.dtype) -> KernelSpec:
    adafactor = registry["Adafactor"]
    graph = graph_for(adafactor, adafactor.hyperparameters, dims)
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    return kernel_spec(graph, dict.fromkeys(("param", "grad", *graph.states), Plain(dtype)), compute, "cuda")


def compiled(kernel: Any, compute: torch.dtype, constants: dict[str, Any], **options: Any) -> str:
    """PTX for an H200; pointers to numbers of the type computed in are `rows`, `slot_<n>`, `parts_<n>`."""
    pointers = [name for name in kernel.arg_names if name not in constants]
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number = "*fp64" if compute is torch.float64 else "*fp32"
    numbers = {name: number for name in pointers if name == "rows" or name.startswith(("slot_", "parts", "out"))}
    numbers.update({"step": "*fp32"} if "step" in pointers else {})
    signature = {name: {**TYPES, **numbers}.get(name, "*i64") for name in pointers}
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}).asm["ptx"]


def assembled(ptx: str, directory: Path) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = directory / "kernel.ptx"
    path.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", path, "-o", directory / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    figures = [re.search(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    assert figures[0] and figures[1], said
    return int(figures[0][1]), int(figures[1][1])


@pytest.mark.parametrize(("dims", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float64)], ids=str)
def test_every_pass_compiles_and_reads_full_tiles_16_bytes_at_a_time(dims: int, dtype: torch.dtype) -> None:
    require_assembler()
    spec = spec_of(dims, dtype)
    module = load_module(spec.name, triton_backend.source(spec))
    for tile in spec.program.tile_passes():
        assert tile.view is not None
        block = block_of(32768)(*((512, 3, 3) if dims == 4 else (1, 4096, 4096)))
        constants, options = build_options(spec, tile, block, unscale=True)
        name = f"{spec.name}_{tile.title}"
        text = compiled(getattr(module, name), spec.compute, constants, **options)
        if tile.over is None:
            loaded = "ld.global.v2.b64" if dtype is torch.float64 else "ld.global.v4.b32"
            copied = re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", text)
            assert copied if constants["STAGES"] > 1 else loaded in text
            compiled(getattr(module, f"{name}_strided"), spec.compute, constants)
        if tile.reductions:
            compiled(getattr(module, f"{name}_finish"), spec.compute, {"BLOCK": 1024})


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("columns", [4096, 64], ids=["whole blocks", "a short block a row"])
def test_passes_with_states_in_blocks_compile(format: str, columns: int) -> None:
    require_assembler()
    tiger = registry["Tiger"]
    graph = graph_for(tiger, {**tiger.hyperparameters, "embedding": True}, 2)
    storages: dict[str, Any] = dict.fromkeys(("param", "grad"), Plain(torch.bfloat16))
    storages["exp_avg"] = Stochastic(state_format(format)) if columns == 64 else state_format(format)  # type: ignore[arg-type]
    spec = kernel_spec(graph, storages, torch.float32, "cuda")
    module = load_module(spec.name, triton_backend.source(spec))
    for tile in (tile for tile in spec.program.tile_passes() if tile.view is not None and tile.over is None):
        constants, options = build_options(spec, tile, block_of(32768, True)(1, 4096, columns), unscale=True)
        name = f"{spec.name}_{tile.title}"
        compiled(getattr(module, name), spec.compute, constants, **options)
        compiled(getattr(module, f"{name}_strided"), spec.compute, constants)


@rule
def emptied(param: Any, grad: Any, zeros: Any, rates: Any, *, lr: float = 0.1) -> tuple[Any, ...]:
    """States of which all elements are the same number."""
    return param - lr * grad, torch.zeros_like(zeros), torch.zeros_like(rates) + lr


@pytest.mark.parametrize("runs", [1, 2])
def test_states_that_become_one_number_compile_in_blocks_and_with_statistics(runs: int) -> None:
    require_assembler()
    graph = graph_for(emptied, emptied.hyperparameters, 2)
    storages: dict[str, Any] = {"param": Plain(torch.float32), "grad": Plain(torch.float32)}
    storages |= {"zeros": state_format("int8"), "rates": Plain(torch.float32)}
    spec = kernel_spec(graph, storages, torch.float32, "cuda")
    spec = spec.with_outputs((CHANGED, *measured_by(spec)))
    module = load_module(spec.name, triton_backend.source(spec))
    constants = {"TILE": 512, "SPAN": 1024, "UNSCALE": False, "STAGES": 1, "RUNS": runs}
    compiled(module.emptied_tile_pass_0, spec.compute, constants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_over_elements_leave_registers_for_half_of_the_threads(dtype: torch.dtype, tmp_path: Path) -> None:
    require_assembler()
    spec = spec_of(2, dtype)
    module = load_module(spec.name, triton_backend.source(spec))
    for tile in spec.program.tile_passes():
        if tile.over is None:
            constants, options = build_options(spec, tile, (1, 256, 128), unscale=False)
            text = compiled(getattr(module, f"{spec.name}_{tile.title}"), spec.compute, constants, **options)
            registers, spilled = assembled(text, tmp_path)
            assert registers <= 64 and not spilled, tile.title


@pytest.mark.parametrize(
    "extents",
    [
        (1, 4096, 4096),
        (1, 3, 2**33),
        (1, 2**33, 1),
        (1, 2**20, 2**13),
        (64, 1, 2**26),
        (64, 16, 2**24),
        (2**31, 1, 1),
        (1, 5000, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("elements", [4096, 32768])
def test_tiles_span_what_is_counted_in_32_bits(extents: tuple[int, int, int], elements: int) -> None:
    block = block_of(elements)(*extents)
    sides = [min(side, extent) for side, extent in zip(block, extents)]
    last = ((sides[0] - 1) * extents[1] + block[1] - 1) * extents[2] + block[2] - 1
    assert last < 2**31 and math.prod(block) <= elements


@pytest.mark.parametrize("bytes_read", [0, 2, 4, 6, 10, 14, 24, 100])
@pytest.mark.parametrize("extents", [(1, 4096, 4096), (1, 4096, 320), (1, 5, 4096), (1, 70, 3), (9, 30, 3), (1, 1, 9)])
def test_what_is_held_divides_the_tile(extents: tuple[int, int, int], bytes_read: int) -> None:
    block = block_of(32768)(*extents)
    held = held_rows(block, bytes_read)
    assert all(side & (side - 1) == 0 for side in (*block, held)) and block[1] % held == 0
    assert block[0] * held * block[2] <= 2048


@pytest.mark.parametrize("operation", ["reduce_sum", "reduce_amax", "reduce_amin"])
def test_parts_are_combined(operation: str) -> None:
    require_assembler()
    from tilestep.backends.triton.support import combine_parts

    constants = {"OPERATION": operation, "SLICES": 128, "PARTS": 8}
    assert "st.global" in compiled(combine_parts, torch.float32, constants)
