"""Symmetric products beside torch's full ones: `python benchmarks/symmetric_products.py`, on a GPU.

What `tilestep.linalg.symmetric.BLOCKS` and `tilestep.linalg.symmetric.uses_symmetric_kernel` are chosen by.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timing import device_milliseconds

from tilestep.bench.results import environment
from tilestep.linalg import COEFFICIENTS, orthogonal
from tilestep.linalg.symmetric import Blocks, symmetric_product

__all__ = ["main"]

SHAPES = [(48, 2048, 2048), (48, 5504, 2048), (24, 2048, 5504), (48, 512, 2048)]
"""Batches of the 219-tensor language model: attention, the feed-forward's two ways, keys and values."""

CUTS = [
    Blocks(),
    Blocks(stages=4),
    Blocks(warps=8),
    Blocks(warps=8, stages=6),
    Blocks(inner=32, stages=6),
    Blocks(64, 64, 4, 4),
]

ROWS = [COEFFICIENTS] * 5
NUMBERS = (1e-7, *COEFFICIENTS * 5)


def products(count: int, rows: int, columns: int) -> dict[str, dict[str, float]]:
    """Time the Gram matrix of a batch, and a product of two squares that is added to one of them: milliseconds."""
    short, is_tall = min(rows, columns), rows > columns
    batch = torch.randn(count, rows, columns, device="cuda").to(torch.bfloat16)
    square = torch.randn(count, short, short, device="cuda").to(torch.float16) / short**0.5
    out = torch.empty_like(square)
    pair = (batch.mT, batch) if is_tall else (batch, batch.mT)
    found: dict[str, dict[str, float]] = {"gram": {}, "square": {}}
    found["gram"]["torch, all of it"] = device_milliseconds(lambda: torch.bmm(*pair))
    found["square"]["torch, all of it"] = device_milliseconds(lambda: torch.baddbmm(square, square, square))
    for blocks in CUTS:
        options: dict[str, Any] = {"base": square, "alpha": 2.0, "beta": -4.8, "blocks": blocks}
        for kind, work in (
            ("gram", lambda: symmetric_product(batch, batch, out, blocks=blocks)),  # noqa: B023
            ("square", lambda: symmetric_product(square, square, out, **options)),  # noqa: B023
        ):
            try:
                found[kind][str(blocks)] = device_milliseconds(work)
            except Exception as error:
                print(f"{kind} {blocks}: {type(error).__name__}: {str(error)[:80]}")
    for kind, times in found.items():
        operations = 2e-9 * count * short * short * (short if kind == "square" else max(rows, columns))
        for name, time in times.items():
            rate = operations / time / (1 if name.startswith("torch") else 2)
            print(f"{kind} of {count} x {rows} x {columns}, {name}: {time:.3f} ms, {rate:.0f} TFLOP/s")
    return found


def orthogonalizations(count: int, rows: int, columns: int) -> None:
    """Time a whole orthogonalization: on Gram matrices, in batches, and one by one as torch.optim.Muon has it."""
    batch = torch.randn(count, rows, columns, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(batch)
    on_grams = device_milliseconds(lambda: orthogonal.gram_newton_schulz(batch, ROWS, 1e-7, out), 5)
    original, orthogonal.uses_symmetric_kernel = orthogonal.uses_symmetric_kernel, lambda _: False
    try:
        batched = device_milliseconds(lambda: orthogonal.newton_schulz([batch], NUMBERS, out), 5)
    finally:
        orthogonal.uses_symmetric_kernel = original
    from torch.optim._muon import _zeropower_via_newtonschulz as one

    singly = device_milliseconds(lambda: [one(matrix.clone(), COEFFICIENTS, 5, 1e-7) for matrix in batch], 5)
    print(f"{count} x {rows} x {columns}: Gram {on_grams:.2f} ms, batched {batched:.2f} ms, torch {singly:.2f} ms")


def main(output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None) -> None:
    """Measure, print, write."""
    found = {" x ".join(map(str, shape)): products(*shape) for shape in SHAPES}
    if output is not None:
        results = {"environment": environment(torch.device("cuda")), "milliseconds": found}
        output.write_text(json.dumps(results, indent=1) + "\n")
    for shape in SHAPES:
        orthogonalizations(*shape)


if __name__ == "__main__":
    typer.run(main)
