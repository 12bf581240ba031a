"""Symmetric products beside torch's full ones: `python benchmarks/symmetric_products.py`, on a GPU.

What `tilestep.linalg.symmetric.BLOCKS` and `tilestep.linalg.orthogonal.takes` are chosen by.
"""

from __future__ import annotations

import torch
from timing import device_milliseconds

from tilestep.linalg import COEFFICIENTS, orthogonal
from tilestep.linalg.symmetric import Blocks, symmetric_product

__all__ = ["main"]

SHAPES = [(48, 2048, 2048), (48, 5504, 2048), (24, 2048, 5504), (48, 512, 2048)]
"""Batches of the 219-tensor language model: attention, the feed-forward's two ways, keys and values."""

CUTS = [
    Blocks(128, 128, 64, 8, 3),
    Blocks(128, 128, 64, 8, 4),
    Blocks(128, 128, 64, 4, 3),
    Blocks(128, 128, 64, 4, 4),
    Blocks(256, 128, 64, 8, 3),
    Blocks(256, 128, 64, 8, 4),
    Blocks(128, 128, 128, 8, 2),
    Blocks(128, 64, 64, 4, 4),
]

ROWS = [COEFFICIENTS] * 5
NUMBERS = (1e-7, *COEFFICIENTS * 5)


def products(count: int, rows: int, columns: int) -> None:
    """Time the Gram matrix of a batch, and a product of two squares."""
    short, is_tall = min(rows, columns), rows > columns
    batch = torch.randn(count, rows, columns, device="cuda").to(torch.bfloat16)
    square = torch.randn(count, short, short, device="cuda").to(torch.float16) / short**0.5
    out = torch.empty_like(square)
    pair = (batch.mT, batch) if is_tall else (batch, batch.mT)
    full, whole = (
        device_milliseconds(lambda: torch.bmm(*pair)),
        device_milliseconds(lambda: torch.baddbmm(square, square, square)),
    )
    flops = 2e-9 * count * short * short
    print(f"{count} x {rows} x {columns}: torch gram {full:.3f} ms {flops * max(rows, columns) / full:.0f} TFLOP/s")
    print(f"    torch square {whole:.3f} ms {flops * short / whole:.0f} TFLOP/s")
    for blocks in CUTS:
        try:
            half = device_milliseconds(lambda: symmetric_product(batch, batch, out, blocks=blocks))  # noqa: B023
            options = {"base": square, "alpha": 2.0, "beta": -4.8, "blocks": blocks}
            quarter = device_milliseconds(lambda: symmetric_product(square, square, out, **options))  # type: ignore[arg-type] # noqa: B023
        except Exception as error:
            print(f"    {blocks}: {type(error).__name__}: {str(error)[:80]}")
            continue
        print(
            f"    {blocks}: gram {half:.3f} ms ({full / half:.2f}x), square {quarter:.3f} ms ({whole / quarter:.2f}x)"
        )


def orthogonalizations(count: int, rows: int, columns: int) -> None:
    """Time a whole orthogonalization: on Gram matrices, in batches, and one by one as torch.optim.Muon has it."""
    batch = torch.randn(count, rows, columns, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(batch)
    on_grams = device_milliseconds(lambda: orthogonal.gram_newton_schulz(batch, ROWS, 1e-7, out), 5)
    taken, orthogonal.takes = orthogonal.takes, lambda *_: False
    try:
        batched = device_milliseconds(lambda: orthogonal.newton_schulz([batch], NUMBERS, out), 5)
    finally:
        orthogonal.takes = taken
    from torch.optim._muon import _zeropower_via_newtonschulz as one

    singly = device_milliseconds(lambda: [one(matrix.clone(), COEFFICIENTS, 5, 1e-7) for matrix in batch], 5)
    print(f"{count} x {rows} x {columns}: Gram {on_grams:.2f} ms, batched {batched:.2f} ms, torch {singly:.2f} ms")


def main() -> None:
    """Print every measurement."""
    for shape in SHAPES:
        products(*shape)
    for shape in SHAPES:
        orthogonalizations(*shape)


if __name__ == "__main__":
    main()
