"""What do the C++ functions of a step cost the host: by threads, caches emptied, threads awake or asleep?

    python benchmarks/look_threads.py                                       # how many cache lines, how long
    python benchmarks/look_threads.py --before ../before/src/tilestep/native  # by turns with another version's

`look` reads parameters, gradients and states of AdamW, `bump` counts the writes, `release` lets gradients go. Threads
are awake where torch has just used them to empty the caches, and asleep where 20 ms have passed, as in a training.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import tilestep
from tilestep.bench.results import environment
from tilestep.compat import DTENSOR_PARTS
from tilestep.native import build

COUNTS = (219, 1000, 2000, 5000)
THREADS = (1, 2, 4, 8)
LINE = 64  # bytes


def _module(folder: Path, target: Path) -> Any:
    """The extension of a folder's sources."""
    before, build._FOLDER = build._FOLDER, folder
    try:
        build._compile(target)
    finally:
        build._FOLDER = before
    loader = importlib.machinery.ExtensionFileLoader("tilestep_scan", str(target))
    spec = importlib.util.spec_from_file_location("tilestep_scan", loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _lines(params: list[torch.Tensor], states: list[torch.Tensor]) -> dict[str, float]:
    """Cache lines that a look reads for a parameter: what lies where is as in torch's headers."""
    touched: Counter[str] = Counter()
    seen: set[int] = set()

    def read(what: str, address: int, first: int, last: int) -> None:
        lines = set(range((address + first) // LINE, (address + last) // LINE + 1)) - seen
        seen.update(lines)
        touched[what] += len(lines)

    def tensor(tensor: torch.Tensor) -> None:
        read("tensors", tensor._cdata, 16, 175)
        read("storages", tensor.untyped_storage()._cdata, 16, 63)

    for one in params:
        read("Python objects", id(one), 16, 23)
        tensor(one)
        read("autograd's records", ctypes.c_uint64.from_address(one._cdata + 24).value, 0, 47)
        if one.grad is not None:
            tensor(one.grad)
    for one in states:
        read("Python objects", id(one), 16, 23)
        tensor(one)
    touched["the table"] = len(params) + len(states) // 2
    return {what: round(count / len(params), 1) for what, count in touched.items()}


def measure(modules: list[Any], count: int, asleep: bool, threads: int, rounds: int, made: Any) -> dict[str, Any]:
    """Microseconds of each function, medians over rounds in which the versions take turns."""
    tables, hosts, empty = made
    clock, taken = time.perf_counter, [list[tuple[float, ...]]() for _ in modules]
    for turn in range(rounds):
        places = range(len(modules))
        for place in places if turn % 2 else reversed(places):
            module, table, address = modules[place], tables[place], hosts[place].ctypes.data
            module.look(table, address, None, threads)
            module.release(table)
            if asleep:
                time.sleep(0.02)
            empty[asleep]()
            marks = [clock()]
            seen = module.look(table, address, None, threads)
            marks.append(clock())
            module.bump(table)
            marks.append(clock())
            module.release(table)
            marks.append(clock())
            assert seen == 0, "a tensor has changed"
            taken[place].append(tuple(1e6 * (stop - start) for start, stop in zip(marks, [*marks[1:], marks[0]])))
    medians = [[statistics.median(column) for column in zip(*rows)] for rows in taken]
    row: dict[str, Any] = {"tensors": count, "threads": threads, "asleep": asleep}
    for name, (look, bump, release, whole) in zip(("us", "before_us")[: len(modules)], medians[::-1]):
        row[name] = {"look": look, "bump": bump, "release": release, "all": -whole}
        row[name] = {what: round(value, 1) for what, value in row[name].items()}
    if len(modules) > 1:
        ratios = [after[3] / before[3] for before, after in zip(*taken)]
        row["ratio_quartiles"] = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
    return row


def main(
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    before: Annotated[Path | None, typer.Option(help="The folder of another version's scan.cpp.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each figure; 0 to count lines only.")] = 25,
) -> None:
    """Measure, print, write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folders = [*([] if before is None else [before.resolve()]), build._FOLDER]
    large, small = torch.zeros(64 << 18), np.zeros(64 << 17)
    empty = (lambda: large.add_(1.0)), (lambda: np.add(small, 1.0, out=np.empty_like(small)))
    rows, lines = [], {}
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        modules = [_module(each, Path(folder) / f"scan_{place}.so") for place, each in enumerate(folders)]
        for count in COUNTS:
            params = [torch.nn.Parameter(torch.randn(1024, device=device)) for _ in range(count)]
            for param in reversed(params):
                param.grad = torch.randn_like(param)
            optimizer = tilestep.AdamW(params, lr=1e-5)  # type: ignore[attr-defined]
            optimizer.step()
            states = [value for param in params for value in optimizer.state[param].values()]
            lines[count] = _lines(params, states)
            hosts = [np.zeros(count, dtype=np.int64) for _ in modules]
            tables = [each.create(params, states, DTENSOR_PARTS, None) for each in modules]
            for asleep in (False, True) if rounds else ():
                for threads in THREADS:
                    rows.append(measure(modules, count, asleep, threads, rounds, (tables, hosts, empty)))
                    print(json.dumps(rows[-1]), flush=True)
    if output is not None:
        found = {"environment": environment(device), "torch threads": torch.get_num_threads()}
        output.write_text(json.dumps({**found, "lines of a parameter": lines, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
