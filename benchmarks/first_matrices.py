"""Time the first step of Muon for a language model's matrices, in fresh processes: empty caches, then filled ones.

python benchmarks/first_matrices.py --source BEFORE/src --source src --output FILE

84 matrices of four shapes, as twelve layers of a model 2,048 wide have them. Each source tree is measured in processes
of its own, in turns; every turn begins with empty folders for all caches.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

SHAPES = [(2048, 2048), (2048, 2048), (512, 2048), (512, 2048), (5504, 2048), (5504, 2048), (2048, 5504)]
CACHES = ("TILESTEP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PROGRAM = """
import importlib, sys, time, torch, tilestep, triton
importlib.import_module("torch._dynamo")
layers, shapes = int(sys.argv[1]), eval(sys.argv[2])
like = {"device": "cuda", "dtype": torch.bfloat16}
matrices = [torch.randn(shape, **like).requires_grad_() for _ in range(layers) for shape in shapes]
for matrix in matrices:
    matrix.grad = torch.randn_like(matrix)
torch.cuda.synchronize()
begin = time.perf_counter()
tilestep.Muon(matrices, lr=0.02, max_grad_norm=1.0).step()
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def main(
    source: Annotated[list[Path], typer.Option(help="A `src` folder; several take turns.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    layers: Annotated[int, typer.Option(min=1)] = 12,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure, print, write."""
    import torch

    found: dict[str, dict[str, list[float]]] = {str(each): {"empty": [], "filled": []} for each in source}
    for _ in range(rounds):
        for each in source:
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("empty", "filled"):
                    found[str(each)][caches].append(_seconds(each, folder, layers))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "matrices": layers * len(SHAPES),
        "seconds of the first step": {
            name: {caches: {"median": statistics.median(times), "all": times} for caches, times in figures.items()}
            for name, figures in found.items()
        },
    }
    print(json.dumps(result, indent=1))
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


def _seconds(source: Path, folder: str, layers: int) -> float:
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
    variables = {variable: os.path.join(folder, variable.lower()) for variable in CACHES}
    command = [sys.executable, "-c", PROGRAM, str(layers), repr(SHAPES)]
    done = subprocess.run(command, env={**os.environ, **variables, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    typer.run(main)
