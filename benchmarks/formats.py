"""Clip and AdamW with states and masters in every format: time beside that of a copy of as many bytes.

    python benchmarks/formats.py [--elements 1190000000] [--only int8]

On a GPU 219 bfloat16 tensors of 1.19 B elements and 2,000 tensors of 131 M elements; on a CPU a hundredth of it. One
process, by turns, the median of the rounds; the floor is a copy of as many bytes with `copy_`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilestep
from tilestep.tuning import TileShape, forced_shape

CHOICES: dict[str, dict[str, Any]] = {
    "float32 states": {"state_dtype": "float32"},
    "bfloat16 states": {},
    "bfloat16 states, float32 masters": {"state_dtype": "bfloat16", "master_weights": True},
    "int8 states": {"state_dtype": "int8"},
    "int8 states, int8 masters": {"state_dtype": "int8", "master_weights": "int8"},
    "float8_e4m3 states, int8 masters": {"state_dtype": "float8_e4m3", "master_weights": "int8"},
    "int4 states, int8 masters": {"state_dtype": "int4", "master_weights": "int8"},
}


def shapes(elements: int, tensors: int) -> list[tuple[int, int]]:
    """Matrices of about so many elements, with as many of about 4,096 rows as there is room for."""
    width = max(256, int((elements / tensors) ** 0.5) // 256 * 256)
    return [(max(elements // tensors // width, 1), width)] * tensors


def timed(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def made(choice: dict[str, Any], sizes: list[tuple[int, int]], device: str) -> tuple[Any, int]:
    """An optimizer that has stepped, and bytes that a step moves: gradients are read twice, once for the norm."""
    params = [torch.nn.Parameter(torch.randn(size, device=device, dtype=torch.bfloat16)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    named = [(f"layer{place}.weight", param) for place, param in enumerate(params)]
    optimizer = tilestep.AdamW(named, lr=1e-3, max_grad_norm=1.0, **choice)
    optimizer.step()
    moved = 0
    for param in params:
        state = [value for value in optimizer.state[param].values() if value.dim()]
        moved += 2 * param.nbytes + 2 * param.nbytes + 2 * sum(value.nbytes for value in state)
    return optimizer, moved


def measure(name: str, sizes: list[tuple[int, int]], device: str, rounds: int) -> dict[str, Any]:
    """Time of a step and of a copy of as many bytes, by turns."""
    optimizer, moved = made(CHOICES[name], sizes, device)
    half = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    steps, copies = [], []
    for _ in range(rounds):
        steps.append(timed(optimizer.step, device))
        copies.append(timed(lambda: other.copy_(half), device))
    elements = sum(rows * columns for rows, columns in sizes)
    state = sum(v.nbytes for p in optimizer.state.values() for v in p.values() if v.dim())
    return {
        "format": name,
        "tensors": len(sizes),
        "elements": elements,
        "ms": round(statistics.median(steps[2:]), 3),
        "copy of as many bytes, ms": round(statistics.median(copies[2:]), 3),
        "state, bytes an element": round(state / elements, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--shape", type=int, nargs=3, help="elements, warps and tiles of a program, in place of the default"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    elements = given.elements or (1_190_000_000 if device == "cuda" else 11_900_000)
    found = []
    every = [shapes(elements, 219), shapes(elements // 9, 2000 if device == "cuda" else 200)]
    for sizes in every[:1] if given.shape else every:
        for name in CHOICES:
            if given.only in name:
                with forced_shape(TileShape(*given.shape)) if given.shape else contextlib.nullcontext():
                    found.append(measure(name, sizes, device, given.rounds))
                print(json.dumps(found[-1]), flush=True)
                if device == "cuda":
                    torch.cuda.empty_cache()
    if given.out:
        Path(given.out, "formats.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
