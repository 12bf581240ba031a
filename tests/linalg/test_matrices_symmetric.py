"""Symmetric products: the kernel in Triton's interpreter and compiled; the iteration on Gram matrices in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import all_equal_in_the_interpreter

from tilestep.linalg import COEFFICIENTS
from tilestep.linalg.orthogonal import gram_newton_schulz, newton_schulz, takes
from tilestep.linalg.symmetric import BLOCKS, Blocks

NUMBERS = (5.0, *COEFFICIENTS, 1e-7)


def test_the_interpreted_kernel_is_the_product() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_symmetric.py"))


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_the_compiled_kernel_loads_ahead_and_multiplies_in_warp_groups(tall: bool, extras: bool) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    try:
        compiler.get_ptxas(90)
    except Exception as error:
        pytest.skip(f"Triton has no ptxas here: {error}")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilestep.linalg.symmetric_triton import POINTERS, symmetric_tiles

    constants = {"TALL": tall, "HAS_BASE": extras, "HAS_SHIFTED": extras}
    constants |= {"BLOCK_M": BLOCKS.rows, "BLOCK_N": BLOCKS.columns, "BLOCK_K": BLOCKS.inner, "EVEN": False}
    signature = {**dict.fromkeys(POINTERS, "*fp16"), "scale": "*fp32", "sizes": "*i64"}
    signature |= {**dict.fromkeys(("alpha", "beta", "shift"), "fp32"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=symmetric_tiles, signature=signature, constexprs=constants)
    options = {"num_warps": BLOCKS.warps, "num_stages": BLOCKS.stages}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "wgmma.mma_async" in text
    assert "cp.async.cg.shared.global" in text and "cp.async.ca" not in text


@pytest.mark.parametrize("blocks", [Blocks(128, 128), Blocks(256, 128), Blocks(128, 64)])
def test_the_programs_are_the_tiles_that_reach_the_lower_triangle(blocks: Blocks) -> None:
    for rows in (16, 128, 208, 512, 2048, 2064, 5504):
        reached = [
            (top, left)
            for top in range(0, rows, blocks.rows)
            for left in range(0, rows, blocks.columns)
            if left < top + blocks.rows
        ]
        assert blocks.count(rows) == len(reached)


def multiplied(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the kernel computes, in torch: float32 sums, results rounded and exactly symmetric."""
    tall = left.size(-2) > left.size(-1)
    product = left.float().mT @ right.float() if tall else left.float() @ right.float().mT
    total = options.get("alpha", 1.0) * product
    if options.get("base") is not None:
        total = total + options["beta"] * options["base"].float()
    if options.get("scale") is not None:
        total = total * options["scale"][:, None, None]
    lower = total.tril()
    total = lower + lower.tril(-1).mT
    if options.get("shifted") is not None:
        options["shifted"].copy_(total + options["shift"] * torch.eye(total.size(-1)))
    return out.copy_(total)


def exact(batch: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    value = batch.double()
    value = value / value.norm(dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        gram = value @ value.mT
        value = a * value + (b * gram + c * gram @ gram) @ value
    return value


def kinds(rows: int, columns: int) -> torch.Tensor:
    """Noise, and matrices whose singular values fall off, or of which few are large."""
    generator = torch.Generator().manual_seed(1)
    short = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, short, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(columns, short, generator=generator))
    noise = torch.randn(rows, columns, generator=generator)
    falling = [left * 10 ** torch.linspace(0, -decades, short) @ right.mT for decades in (3, 5)]
    few = 100 * left[:, :4] @ right[:, :4].mT + 0.05 * noise
    return torch.stack([noise, *falling, few, left[:, :4] @ right[:, :4].mT, 1e-6 * noise])


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (128, 128)])
def test_working_on_gram_matrices_is_as_near_to_float64_as_the_plain_iteration(
    shape: tuple[int, int], steps: int
) -> None:
    batch = kinds(*shape).to(torch.bfloat16)
    before, out = batch.clone(), torch.empty_like(batch)
    numbers = (float(steps), *NUMBERS[1:])
    assert gram_newton_schulz(batch, numbers, out, multiplied) is out
    assert torch.equal(batch, before)
    wanted = exact(batch, steps)
    for place, plain in enumerate(newton_schulz([batch], numbers, None)):
        size = wanted[place].norm()
        ours, theirs = ((product.double() - wanted[place]).norm() / size for product in (out[place], plain))
        assert ours < (1.1 if steps == 5 else 1.6) * theirs + 2e-3, place


def test_it_is_for_gpus_alone() -> None:
    assert not takes(torch.ones(2, 512, 512, dtype=torch.bfloat16), NUMBERS)
    nothing = gram_newton_schulz(torch.zeros(1, 32, 64, dtype=torch.bfloat16), NUMBERS, None, multiplied)
    assert torch.equal(nothing, torch.zeros_like(nothing))
