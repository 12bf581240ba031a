"""Symmetric products: the kernel in Triton's interpreter and compiled; the iteration on Gram matrices in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from iterations import JORDAN, conditioned, dominated, exact, multiplied
from scripts import all_equal_in_the_interpreter

from tilestep.linalg import COEFFICIENTS, orthogonal
from tilestep.linalg.coefficients import NAMES, flat, rows_of
from tilestep.linalg.orthogonal import gram_newton_schulz, newton_schulz, restarts
from tilestep.linalg.symmetric import BLOCKS


def test_the_interpreted_kernel_is_the_product() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_symmetric.py"))


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("has_base", [False, True])
def test_the_compiled_kernel_copies_blocks_and_multiplies_in_warp_groups(tall: bool, has_base: bool) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    try:
        compiler.get_ptxas(90)
    except Exception as error:
        pytest.skip(f"Triton has no ptxas here: {error}")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilestep.linalg.symmetric_triton import symmetric_tiles

    side, inner = BLOCKS.side, BLOCKS.inner
    constants = {"TALL": tall, "HAS_BASE": has_base, "BLOCK": side, "BLOCK_K": inner}
    shapes = dict.fromkeys(("left", "right"), (inner, side) if tall else (side, inner))
    shapes |= dict.fromkeys(("base", "out"), (side, side))
    described = {name: f"tensordesc<fp16[1,{rows},{columns}]>" for name, (rows, columns) in shapes.items()}
    signature = {**dict.fromkeys(symmetric_tiles.arg_names), **described, "scale": "*fp32", "sizes": "*i64"}
    signature |= {**dict.fromkeys(("alpha", "beta", "shift"), "fp32"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=symmetric_tiles, signature=signature, constexprs=constants)
    options = {"num_warps": BLOCKS.warps, "num_stages": BLOCKS.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text and "mma.sync" not in text
    for copies in ("tensor.3d.shared::cluster.global", "tensor.3d.global.shared::cta"):
        assert f"cp.async.bulk.{copies}" in text
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in text and "st.shared.b16" not in text
    assert "ld.local" not in text and compiled.metadata.shared <= (227 << 10) // 2


def test_the_programs_are_the_blocks_of_the_lower_triangle() -> None:
    for rows in (16, 128, 208, 512, 2048, 2064, 5504):
        starts = range(0, rows, BLOCKS.side)
        assert BLOCKS.count(rows) == len([(top, left) for top in starts for left in starts if left <= top])


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (128, 128)])
def test_working_on_gram_matrices_is_as_near_to_float64_as_the_plain_iteration(
    shape: tuple[int, int], steps: int
) -> None:
    rows = [COEFFICIENTS] * steps
    batch = conditioned(*shape).to(torch.bfloat16)
    before, out = batch.clone(), torch.empty_like(batch)
    assert gram_newton_schulz(batch, rows, 1e-7, out, multiplied) is out
    assert torch.equal(batch, before)
    wanted = exact(batch, rows)
    for place, plain in enumerate(newton_schulz([batch], [1e-7, *flat(rows)], None)):
        size = wanted[place].norm()
        ours, theirs = ((product.double() - wanted[place]).norm() / size for product in (out[place], plain))
        assert ours < (1.1 if steps == 5 else 1.6) * theirs + 2e-3, place


@pytest.mark.parametrize("columns", [128, 192])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gram_matrices_leave_the_singular_values_of_the_plain_iteration(
    name: str, precision: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a matrix near rank one, in whose Gram matrix rounding is largest beside what is small."""
    noise, falling, *rest = conditioned(128, columns)
    left, values, right = torch.linalg.svd(falling, full_matrices=False)
    values[0] = 30 * values[1:].norm()
    batch = torch.stack([noise, falling, *rest[:2], (left * values) @ right]).to(precision).to(torch.float32)
    rows = rows_of(name)
    wanted = torch.linalg.svdvals(exact(batch, rows))

    def apart(*, on_grams: bool) -> torch.Tensor:
        monkeypatch.setattr(orthogonal, "uses_symmetric_kernel", lambda _: on_grams)
        found = newton_schulz([batch], [1e-7, *flat(rows)], None, multiplied, precision)
        return (torch.linalg.svdvals(found.double()) - wanted).square().mean(dim=-1).sqrt()

    ours, plain = apart(on_grams=True), apart(on_grams=False)
    assert bool((ours < 1.1 * plain + 5e-3).all()), (ours, plain)


@pytest.mark.parametrize("name", ["jordan", "quintic", "polar_express", "polar_express_dion", "cans", "aol", "cubic5"])
@pytest.mark.parametrize("columns", [192, 288])
def test_gram_matrices_keep_a_large_singular_value_that_the_first_step_makes_small(name: str, columns: int) -> None:
    """It lies in few rows, so that roundings of the Gram matrix are as large as what is left of it."""
    rows, batch = rows_of(name), dominated(192, columns).to(torch.bfloat16)
    wanted = exact(batch, rows)

    def apart(found: torch.Tensor) -> torch.Tensor:
        return (found.double() - wanted).norm(dim=(-2, -1)) / wanted.norm(dim=(-2, -1))

    ours = apart(gram_newton_schulz(batch, rows, 1e-7, None, multiplied))
    plain = apart(newton_schulz([batch], [1e-7, *flat(rows)], None))
    assert bool((ours < 1.1 * plain + 5e-3).all()), (ours, plain)


def test_steps_share_a_gram_matrix_where_that_is_less_work_and_grows_no_roundings() -> None:
    def shared(rows: Sequence[Any], *shape: int) -> list[int]:
        parts = restarts(rows, shape)
        assert [row for part in parts for row in part] == list(rows)
        return [len(part) for part in parts]

    assert all(len(shared(rows_of(name), 16, 32)) < len(rows_of(name)) for name in NAMES)
    assert shared(rows_of("deepseek-v4"), 32, 16) == [3, 2, 2, 2, 1]
    assert shared(rows_of("polar_express"), 16, 32) == [1, 2, 2]
    assert shared(JORDAN, 16, 16) == [1] * 5
    assert shared([(8.0, -3.0, 0.5)] * 3, 16, 32) == [1] * 3
    assert shared([(2.0, -50.0, 1.0)] * 2, 16, 32) == [1] * 2
    assert shared([], 16, 32) == []


def test_nothing_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "uses_symmetric_kernel", lambda _: True)
    unmoved = newton_schulz([torch.full((1, 3, 4), 3.0)], [1e-7], None)
    assert torch.equal(unmoved, torch.full_like(unmoved, 12**-0.5))
    nothing = gram_newton_schulz(torch.zeros(1, 32, 64, dtype=torch.bfloat16), JORDAN, 1e-7, None, multiplied)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("name", ["jordan", "polar_express"])
def test_matrices_smaller_than_eps_stay_small(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their inverse norm was infinite in float16, and its square in float32: NaN for a matrix of zeros."""
    noise = torch.randn(1, 32, columns, generator=torch.Generator().manual_seed(0))
    batch = torch.cat([torch.zeros_like(noise), 3e-9 * noise / noise.norm(), 2e-11 * noise / noise.norm()])

    def found(precision: torch.dtype, eps: float, *, on_grams: bool) -> torch.Tensor:
        monkeypatch.setattr(orthogonal, "uses_symmetric_kernel", lambda _: on_grams)
        return newton_schulz([batch], [eps, *flat(rows_of(name))], None, multiplied, precision).double()

    for precision in (torch.float16, torch.bfloat16):
        plain, ours = (found(precision, 1e-7, on_grams=on_grams) for on_grams in (False, True))
        assert (ours - plain).norm() < 0.05 * plain.norm(), precision
    assert torch.equal(found(torch.bfloat16, 1e-30, on_grams=True)[0], torch.zeros(32, columns, dtype=torch.float64))
