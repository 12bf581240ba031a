"""Time steps of Muon for several kinds of matrices, beside torch's: `python benchmarks/muon_steps.py --output FILE`.

The sets: the matrices of a language model of 24 layers 2,048 wide, 24 of 1,024 x 4,096, 126 convolutions of twelve
shapes, 74 thin ones, stacks of experts, and query, key and value projections cut into splits. Contenders take turns in
one process; torch's Muon gets each matrix as a parameter of its own. "launched" is tilestep without recordings of the
matrix work in CUDA graphs; `--only tilestep` compares the two alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from timing import timed

import tilestep
from tilestep.bench.measure import Contender, measure
from tilestep.bench.results import environment
from tilestep.runtime import batches

__all__ = ["SETS", "main"]

LAYER = [(2048, 2048), (2048, 2048), (512, 2048), (512, 2048), (5632, 2048), (5632, 2048), (2048, 5632)]
CONVOLUTIONS = [
    (32, 16, 3, 3),
    (32, 32, 3, 3),
    (64, 32, 3, 3),
    (64, 64, 3, 3),
    (128, 64, 3, 3),
    (128, 128, 3, 3),
    (256, 128, 3, 3),
    (256, 256, 3, 3),
    (64, 128, 1, 1),
    (128, 256, 1, 1),
    (256, 384, 1, 1),
    (256, 512, 1, 1),
]
SETS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "language model": (LAYER * 24, {}),
    "wide": ([(1024, 4096)] * 24, {}),
    "convolutions": ([CONVOLUTIONS[place % 12] for place in range(126)], {"flatten": True}),
    "thin": ([(24, 10240)] * 74, {}),
    "experts": ([(32, 768, 2048), (32, 2048, 768)] * 4, {}),
    "splits": ([(3072, 2048)] * 24, {"splits": (2048, 512, 512)}),
}


LAUNCHED = "tilestep, launched"


def pieces(param: torch.Tensor, given: dict[str, Any]) -> list[torch.Tensor]:
    """The matrices inside of a parameter."""
    if "splits" in given:
        return list(param.split(given["splits"]))
    return [param.flatten(1)] if "flatten" in given else list(param.view(-1, *param.shape[-2:]))


def drawn(shapes: list[tuple[int, ...]], device: torch.device, share: int) -> list[torch.Tensor]:
    """Parameters with gradients, their sides divided by `share`, at least eight."""
    sizes = [tuple(max(side // share, 8) if side > 8 else side for side in shape) for shape in shapes]
    params = [torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def contenders(name: str, device: torch.device, share: int, only: str) -> list[tuple[str, Callable[[], Any]]]:
    """What makes each optimizer of a set."""
    shapes, given = SETS[name]
    if share > 1 and "splits" in given:
        given = {"splits": tuple(size // share for size in given["splits"])}

    def ours(coefficients: Any) -> Callable[[], Any]:
        params = drawn(shapes, device, share)
        return lambda: tilestep.Muon(params, lr=0.02, ns_coefficients=coefficients, **given)

    def theirs() -> Any:
        own = []
        for param in drawn(shapes, device, share):
            for piece, gradient in zip(pieces(param.detach(), given), pieces(param.grad, given)):  # type: ignore[arg-type]
                own.append(piece.clone().requires_grad_())
                own[-1].grad = gradient.clone()
        return torch.optim.Muon(own, lr=0.02)

    jordan = tilestep.registry["Muon"].hyperparameters["ns_coefficients"]
    made: list[tuple[str, Callable[[], Any]]] = [
        ("tilestep", ours(jordan)),
        (LAUNCHED, ours(jordan)),
        ("tilestep, polar_express", ours("polar_express")),
        ("torch", theirs),
    ]
    return [one for one in made if only in one[0]]


def main(
    sets: Annotated[list[str] | None, typer.Option("--set", help="A set; all by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    only: Annotated[str, typer.Option(help="A part of contenders' names.")] = "",
    share: Annotated[int, typer.Option(min=1, help="Divides the sides, for a try on a CPU.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure, print, write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {"environment": environment(device), "milliseconds": {}}
    for name in sets or SETS:
        figures = results["milliseconds"][name] = {}
        made = []
        for contender, make in contenders(name, device, share, only):
            optimizer = make()
            least = 10**9 if contender == LAUNCHED else batches.LEAST_MATRICES
            with mock.patch.object(batches, "LEAST_MATRICES", least):
                figures[contender] = {"first step": round(timed(optimizer.step, device)[1], 1)}
            made.append(Contender(contender, optimizer.step))
        for row in measure(made, device, rounds, traced=False):
            for key in ("device", "wall", "host"):
                figure = getattr(row, key)
                if figure is not None:
                    figures[row.contender][key] = round(figure.median, 3)
            print(f"{name:16} {row.contender:26} {figures[row.contender]}")
        del made
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
