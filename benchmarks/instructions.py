"""Instructions an element of the update kernels on a GPU of compute capability 9.0, counted without one.

    python benchmarks/instructions.py [--rule AdamW] [--only int8] [--sass FOLDER] [--out FOLDER]

Each format's kernel is built as it is shipped, with its default tiles and registers, and Triton's disassembler says
what the loop over whole tiles consists of. Special functions (roots and reciprocals) are counted beside all others: a
multiprocessor takes 16 of them a clock, and 128 of all. Bytes are those that the loop moves; the norm of a clip reads
the gradients once more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from absent_gpu import absent_gpu, engine_of
from formats import CHOICES
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tilestep
from tilestep.backends.tuning import default_shape
from tilestep.bench.results import environment
from tilestep.kernels.spec import total_traffic

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
SHAPE = (1024, 1024)


def kernel_of(rule: str, choice: dict[str, Any]) -> tuple[Any, Any]:
    """The passes of one bfloat16 matrix, and what Triton makes of its first update pass."""
    param = torch.ones(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    make = partial(tilestep.Optimizer, [param], rule, max_grad_norm=1.0, **choice)
    (plain,) = make().fitting_plan(ahead=True).engines
    (passes,) = engine_of(make, default_shape(plain.passes[0].segment.spec, "cuda")).passes
    launcher, arguments = next(one for one in passes.launches(False) if "tile_pass" in one[0]._kernel.__name__)
    launcher._device = torch.device("cuda", 0)
    return passes, launcher.compile(arguments)


def loop_of(sass: str, has_blocks: bool) -> list[str]:
    """The instructions of the loop over whole tiles: the other loop that stores has masks, and takes a block a turn."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(names)
        elif said := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", line):
            names.append(said[1])
            target = re.search(r"\((\.L\w+)\)", said[2]) if said[1].startswith("BRA") else None
            if target and target[1] in labels:
                loops.append(names[labels[target[1]] :])
    storing = [loop for loop in loops if any(name.startswith("STG") for name in loop)]
    return (max if has_blocks else min)(storing, key=len)


def main(
    rule: Annotated[str, typer.Option(help="The rule's name.")] = "AdamW",
    only: Annotated[str, typer.Option(help="Formats whose names hold this.")] = "",
    sass: Annotated[Path | None, typer.Option(help="Folder for the disassembled kernels.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for instructions.json.")] = None,
) -> None:
    """Count, print, and write the figures."""
    table, rows = Table("format", "tile", "instructions", "special functions", "bytes"), []
    with tempfile.TemporaryDirectory() as folder, absent_gpu(Path(folder)):
        os.environ["TRITON_CACHE_DIR"] = folder
        for name in track([name for name in CHOICES if only in name], "kernels"):
            passes, kernel = kernel_of(rule, CHOICES[name])
            binary = Path(folder, "kernel.cubin")
            binary.write_bytes(kernel.asm["cubin"])
            text = subprocess.run([DISASSEMBLER, "-c", binary], capture_output=True, text=True, check=True).stdout
            if sass is not None:
                sass.mkdir(parents=True, exist_ok=True)
                (sass / f"{name.replace(', ', '-').replace(' ', '-')}.sass").write_text(text)
            loop = loop_of(text, passes.segment.spec.has_blocks)
            elements = passes.shape.tile / (32 * passes.shape.warps)
            special = sum(instruction.startswith("MUFU") for instruction in loop)
            moved = sum(total_traffic(passes.segment.spec))
            rows.append(
                {
                    "format": name,
                    "tile": str(passes.shape),
                    "instructions an element": round(len(loop) / elements, 1),
                    "special functions an element": round(special / elements, 1),
                    "bytes an element": round(moved, 2),
                }
            )
            table.add_row(*map(str, rows[-1].values()))
    Console().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": environment(torch.device("cpu")), "rule": rule, "rows": rows}, indent=1)
        (out / "instructions.json").write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
