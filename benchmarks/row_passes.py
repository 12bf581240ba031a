"""Time each launch of a step of Adafactor on a GPU, for one or several ways to walk rows.

    python benchmarks/row_passes.py [--dtype bf16] [--layers 21] [--stages 1,3] [--held 2048,4096] [--registers 48,64]

takes some seconds for each way (21 layers are 1.2 billion elements), prints milliseconds of every launch and, for
passes over elements, what part of the bandwidth of a copy their bytes make.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import torch
import typer

import tilestep
from tilestep.backends.spec import tile_traffic
from tilestep.backends.triton import slices

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYER = [*[(2048, 2048)] * 4, *[(5504, 2048)] * 2, (2048, 5504)]
ENDS = [(32000, 2048)] * 2


def milliseconds(launch: object, repeats: int = 10) -> float:
    """The median time of a call on the device."""
    assert callable(launch)
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeats // 2]


def copy_bandwidth() -> float:
    """Bytes that a copy reads and writes in a millisecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def optimizer_of(layers: int, dtype: torch.dtype) -> tilestep.Optimizer:
    """Adafactor over the matrices of a transformer, stepped twice."""
    shapes = [*ENDS, *LAYER * layers]
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device="cuda") * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = tilestep.Adafactor(params)
    for _ in range(2):
        optimizer.step()
    return optimizer


def report(optimizer: tilestep.Optimizer, copy: float) -> float:
    """Print the time of every launch of a step; their sum."""
    [engine] = optimizer.plan.engines
    [segment] = engine.segments
    elements = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    traffic = {
        f"{segment.spec.name}_{tile.title}": tile_traffic(segment.spec, [tile])
        for tile in segment.spec.program.tile_passes()
        if tile.over is None
    }
    total = 0.0
    for launcher, arguments in engine.passes[0]._step_launches(False):
        name = launcher._kernel.__name__
        time = milliseconds(lambda launcher=launcher, arguments=arguments: launcher(*arguments))
        total += time
        moved = (traffic[name].bytes_read + traffic[name].bytes_written) * elements if name in traffic else 0
        print(f"    {name:32} {time:7.3f} ms" + (f" {moved / time / copy:6.1%} of a copy" if moved else ""))
    moved = sum(each.bytes_read + each.bytes_written for each in traffic.values()) * elements
    print(f"    {'all':32} {total:7.3f} ms {moved / total / copy:6.1%} of a copy")
    return total


def numbers(text: str, default: int) -> list[int]:
    """Whole numbers between commas; the default where there are none."""
    return [int(each) for each in text.split(",")] if text else [default]


def main(
    dtype: Annotated[str, typer.Option(help="bf16 or fp32")] = "bf16",
    layers: Annotated[int, typer.Option(help="transformer layers: 21 are 1.2 billion elements")] = 21,
    stages: Annotated[str, typer.Option(help="sub-blocks computed or being read, between commas")] = "",
    held: Annotated[str, typer.Option(help="bytes of the sub-blocks of all arrays, between commas")] = "",
    registers: Annotated[str, typer.Option(help="registers of a thread, between commas")] = "",
    tile: Annotated[str, typer.Option(help="most elements of a tile, between commas")] = "",
    unstaged: Annotated[str, typer.Option(help="bytes an element that are read without stages, between commas")] = "",
) -> None:
    """Time a step's launches for every combination of what is given."""
    choices = {
        "_STAGES": numbers(stages, slices._STAGES),
        "_HELD_BYTES": numbers(held, slices._HELD_BYTES),
        "_REGISTERS": numbers(registers, slices._REGISTERS),
        "_MOST_ELEMENTS": numbers(tile, slices._MOST_ELEMENTS),
        "_FEW_BYTES": numbers(unstaged, slices._FEW_BYTES),
    }
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e9:.2f} TB/s")
    for chosen in itertools.product(*choices.values()):
        for name, value in zip(choices, chosen):
            setattr(slices, name, value)
        print("  " + ", ".join(f"{name.strip('_').lower()} {value}" for name, value in zip(choices, chosen)))
        report(optimizer_of(layers, DTYPES[dtype]), copy)


if __name__ == "__main__":
    typer.run(main)
