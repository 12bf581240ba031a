"""Same parameters and gradients into tilestep and into other libraries: whose update is it, and on which layouts?

    python benchmarks/parity.py                                  # all rows that run here
    python benchmarks/parity.py --only bitsandbytes/Lion         # one row; a part before "/" means all of its rows
    python benchmarks/parity.py --out benchmarks/results         # also writes parity_<device>_<gpus>.json
    python benchmarks/parity.py --page                           # writes the tables of docs/parity.md from these files

Rows on one device are in parity_rows.py; formulas in float64 judge them (parity_formulas.py). Rows on several ranks are
in parity_layouts.py; one device judges them. Ranks are processes with gloo on a CPU, and GPUs with NCCL. The result of
a library that raises is its error. `--seconds` starts no row after that time. `--add` keeps the rows of an earlier run
on the same device with the same torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from parity_layouts import LAYOUTS, PATIENCE, run_rank
from parity_page import LIBRARIES, PAGE, brought_up_to_date, summary_line
from parity_rows import ROWS, RUN, Offloaded, Resume, Row, library_of
from timing import result_name

from tilestep.bench.results import environment

COMPILE = ("torchao", "dion")
"""Libraries whose first step compiles for a minute: their rows run last, as `--seconds` may end the run."""

DISTRIBUTIONS = {"emerging_optimizers": "emerging-optimizers", "megatron": "megatron-core"}
"""Names of distributions that differ from the package's."""


def version_of(library: str) -> str:
    """The version of a library, with the commit that it was installed from; nothing if it is not installed."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTIONS.get(library, library))
    except importlib.metadata.PackageNotFoundError:
        return ""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")[:7]
    return f"{found.version} ({commit})" if commit else found.version


def select(names: list[str], only: str) -> list[str]:
    """Select rows by whole names or by the part before the slash."""
    wanted = [word for word in only.split(",") if word]
    unknown = [word for word in wanted if not any(word in (name, name.partition("/")[0]) for name in names)]
    if unknown:
        raise SystemExit(f"no row is called {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if not wanted or name in wanted or name.partition("/")[0] in wanted]


def run_row(row: Row | Resume | Offloaded, device: torch.device) -> dict[str, Any]:
    """Return the result of a row on one device, or why there is none."""
    if row.needs and row.needs != device.type:
        return {"skipped": "needs a GPU"}
    try:
        return RUN[type(row)](row, device)
    except ImportError as error:
        return {"missing": library_of(row.theirs), "why": str(error)}
    except Exception as error:  # an error of another library is the result
        return {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def run_layouts(names: list[str], ranks: int, until: float, record: Any, start_method: str = "spawn") -> None:
    """Run rows of several ranks. After a row that hangs or ends its process, new processes run the next rows."""
    while names and time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.get_context(start_method)
            processes = [
                context.Process(target=run_rank, args=(rank, ranks, folder, names, until)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            done: list[str] = []
            while any(process.is_alive() for process in processes):
                time.sleep(0.2)
                done += _new_results(Path(folder), names, done, record)
                if len({process.is_alive() for process in processes}) > 1:  # the other rank would wait in a collective
                    _end(processes)
            done += _new_results(Path(folder), names, done, record)
            begun = (Path(folder) / "begun").read_text() if (Path(folder) / "begun").exists() else names[0]
        if not any(process.exitcode for process in processes):
            return
        if begun not in done:
            record(begun, {"failure": "ranks hang or end"})
            done.append(begun)
        names = [name for name in names if name not in done]


def _new_results(folder: Path, names: list[str], done: list[str], record: Any) -> list[str]:
    found = [name for name in names if name not in done and (folder / f"{name.replace('/', '+')}.json").exists()]
    for name in found:
        record(name, json.loads((folder / f"{name.replace('/', '+')}.json").read_text()))
    return found


def _end(processes: list[Any]) -> None:
    """Wait for the time limit of a collective, then kill processes that are still alive."""
    for process in processes:
        process.join(PATIENCE.total_seconds() + 10)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


class Results:
    """The rows of one file: prints each result and rewrites the file."""

    def __init__(self, gpus: int, device: torch.device, out: Path | None, add: bool) -> None:
        self.rows: dict[str, Any] = {}
        self.path = out / f"{result_name('parity', device, gpus)}.json" if out else None
        self.environment = environment(device)
        self.contenders = {library: version_of(library) for library in LIBRARIES}
        if add and self.path and self.path.exists():
            before = json.loads(self.path.read_text())
            same = ("device", "torch", "python")
            if any(before["environment"][key] != self.environment[key] for key in same):
                raise SystemExit(f"{self.path} is of another device, torch or Python")
            self.rows = before["rows"]

    def record(self, name: str, found: dict[str, Any]) -> None:
        self.rows[name] = {**found, "expressions": EXPRESSIONS[name]}
        print(f"{name}: {summary_line(found)}", flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stored = {"environment": self.environment, "contenders": self.contenders, "rows": self.rows}
            self.path.write_text(json.dumps(stored, indent=1) + "\n")


EXPRESSIONS = {row.name: {"ours": row.ours, "theirs": row.theirs} for row in (*ROWS, *LAYOUTS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of rows, or parts before the slash, with commas")
    parser.add_argument("--ranks", type=int, help="of the rows on several; by default 2 if there are as many devices")
    parser.add_argument("--out", type=Path, help="a folder for parity_<device>_<gpus>.json")
    parser.add_argument("--add", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row later than this")
    parser.add_argument("--page", action="store_true", help="only write the tables of docs/parity.md")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(brought_up_to_date(PAGE.read_text()))
        return
    warnings.simplefilter("ignore")  # other libraries' own
    until = time.monotonic() + given.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = select([row.name for row in (*ROWS, *LAYOUTS)], given.only)
    if given.only:
        for name in names:
            print(f"{name}\n  {EXPRESSIONS[name]['ours']}\n  {EXPRESSIONS[name]['theirs']}")
    alone = [row for row in ROWS if row.name in names]
    alone.sort(key=lambda row: library_of(row.theirs) in COMPILE)
    if alone:
        results = Results(1, device, given.out, given.add)
        for row in alone:
            if time.monotonic() < until:
                results.record(row.name, run_row(row, device))
    spread = [row.name for row in LAYOUTS if row.name in names]
    spread.sort(key=lambda name: library_of(EXPRESSIONS[name]["theirs"]) in COMPILE)
    ranks = given.ranks if given.ranks is not None else 2
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        print(f"rows on {ranks} ranks are left out: there are fewer GPUs")
    elif spread and ranks > 1:
        results = Results(ranks, device, given.out, given.add)
        run_layouts(spread, ranks, until, results.record)


if __name__ == "__main__":
    main()
