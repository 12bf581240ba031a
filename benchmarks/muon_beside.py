"""Do Muon's products hide behind backward? `python benchmarks/muon_beside.py`, under a minute on one GPU.

Forward and backward of the language model of `muon_ranks.py` with compiled blocks, bfloat16, and a step of Muon over a
quarter of its 168 matrices, a rank's share of four. The step runs after backward on the same stream, or on a stream of
its own from the middle of backward on, with the priority of the model's stream or a lower one; each alone is the floor.
A step in parts is what buckets would do that are updated as they arrive: its batches of matrices are smaller.
No CUDA graphs: kernels of a graph have the priority of the stream that recorded them.
Writes benchmarks/results/muon_beside_<device>_1.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from shard_contenders import TINY, Llama, Shape, compiled_blocks, make_model
from timing import result_name, timed

import tilestep
from tilestep.bench.measure import Contender, measure
from tilestep.bench.results import environment
from tilestep.runtime import batches

__all__ = ["main"]

RANKS = 4
PARTS = 6, 24
SIDES = {"from the middle of backward, same priority": -1, "from the middle of backward, lower priority": 0}


def steps_of_a_rank(shape: Shape, device: torch.device, parts: int = 1) -> tuple[Callable[[], None], int]:
    """The step of every fourth matrix, in parts one after the other, with kernels built; and how many matrices."""
    with torch.device("meta"):
        groups = tilestep.muon_groups(Llama(shape))
    params = [torch.randn_like(param, dtype=torch.bfloat16, device=device) for _, param in groups[0]["params"][::RANKS]]
    for param in params:
        param.requires_grad_().grad = torch.randn_like(param)
    size = -(-len(params) // parts)
    optimizers = [tilestep.Muon(params[start : start + size], lr=0.02) for start in range(0, len(params), size)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    with mock.patch.object(batches, "LEAST_MATRICES", len(params) + 1):
        step()
    return step, len(params)


def contenders(shape: Shape, device: torch.device, batch: int) -> tuple[list[Contender], int]:
    """What is timed, and the number of matrices."""
    gpu = device.type == "cuda"
    own = torch.cuda.Stream(device, priority=-1) if gpu else None
    step, count = steps_of_a_rank(shape, device)

    def on(stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if gpu else nullcontext()

    with on(own), compiled_blocks("inductor" if gpu else "aot_eager"):
        model = make_model(shape, device, torch.bfloat16)
    text = torch.randint(shape.vocabulary, (batch, shape.length + 1), device=device)
    in_the_middle: list[Callable[[], None]] = []

    def arrived(param: torch.Tensor) -> None:
        for work in in_the_middle:
            work()

    model.blocks[shape.layers // 2].between.weight.register_post_accumulate_grad_hook(arrived)

    def backward() -> None:
        with on(own):
            model(text).backward()
            model.zero_grad()

    def alone(step: Callable[[], None] = step) -> None:
        with on(own):
            step()

    def after() -> None:
        backward()
        alone()

    def beside(priority: int) -> Callable[[], None]:
        side = torch.cuda.Stream(device, priority=priority) if gpu else None

        def begin() -> None:
            if side is not None:
                side.wait_stream(torch.cuda.current_stream(device))
            with on(side):
                step()

        def iteration() -> None:
            in_the_middle[:] = [begin]
            backward()
            in_the_middle.clear()
            if own is not None:
                own.wait_stream(side)

        return iteration

    calls = {"forward and backward": backward, "step": alone}
    calls |= {f"step in {parts} parts": partial(alone, steps_of_a_rank(shape, device, parts)[0]) for parts in PARTS}
    calls["step after backward"] = after
    calls |= {f"step {name}": beside(priority) for name, priority in SIDES.items()}
    return [Contender(name, call, repeat=3) for name, call in calls.items()], count


def main(
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    small: Annotated[bool, typer.Option(help="A small model: checks this script, measures nothing.")] = False,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = Path(__file__).parent / "results",
) -> None:
    """Measure, print, write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    made, count = contenders(TINY if small else Shape(), device, batch)
    first = {each.name: round(timed(each.call, device)[1], 1) for each in made}  # builds kernels
    rows = measure(made, device, rounds, traced=False, busy=False)
    if failures := [f"{row.contender}: {row.failure}" for row in rows if row.failure is not None]:
        raise SystemExit("\n".join(failures))
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        wall, host = row.wall, row.host
        assert wall is not None and host is not None
        quartiles = {"wall": wall.median, "low": wall.low, "high": wall.high, "host": host.median}
        figures[row.contender] = {key: round(figure, 3) for key, figure in quartiles.items()}
    after, alone = figures["step after backward"]["wall"], figures["step"]["wall"]
    for name in (f"step {side}" for side in SIDES):
        figures[name]["hidden, of the step"] = round((after - figures[name]["wall"]) / alone, 3)
    for name, own in figures.items():
        print(f"{name:50} {own}")
    results = {
        "environment": environment(device), "batch": batch, "matrices": count, "rounds": rounds,
        "first call": first, "milliseconds": figures,
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{result_name('muon_beside', device)}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
