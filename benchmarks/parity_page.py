"""The tables of docs/parity.md, from the results of benchmarks/parity.py.

A comment in the page says what follows it: `<!-- table: NAME -->`. A row stands there once for each result that has it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["LIBRARIES", "PAGE", "RESULTS", "brought_up_to_date", "described"]

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "parity.md", ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- table: ([\w-]+) -->\n(?:\|.*\n)+")

LIBRARIES = {
    "torch": "pip install torch",
    "bitsandbytes": "pip install bitsandbytes",
    "torchao": "pip install torchao",
    "flashoptim": "pip install flashoptim",
    "schedulefree": "pip install schedulefree",
    "emerging_optimizers": "pip install emerging-optimizers, for Python 3.12",
    "dion": "pip install git+https://github.com/microsoft/dion",
    "megatron": "pip install megatron-core",
    "apex": "from the source of github.com/NVIDIA/apex, with nvcc",
}
"""The libraries that rows name, and how to install them."""

Rows = list[tuple[str, ...]]
SAME = "same bits"
FAR = 3.0
"""The other's update that is this many times as far from the formula as tilestep's does something else."""


@functools.cache
def results() -> dict[str, Any]:
    """Every result by its device: CPUs first."""
    found = {}
    for path in sorted(RESULTS.glob("parity_*.json")):
        kind, gpus = path.stem.split("_")[1:]
        name = kind if kind == "cpu" else f"{gpus} {kind.upper()}"
        found["CPU, 2 ranks" if (kind, gpus) == ("cpu", "2") else name.replace("cpu", "CPU")] = json.loads(
            path.read_text()
        )
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith("CPU"), item[0])))


def rows_of(part: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, device and result of the rows whose names begin with a part, name by name."""
    names = {name for result in results().values() for name in result["rows"]}
    for name in sorted(names, key=str.lower):
        if name.partition("/")[0] == part:
            for device, result in results().items():
                if name in result["rows"]:
                    yield name, device, result["rows"][name]


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def failed(found: dict[str, Any]) -> str:
    """How a row or a contender failed, or why it did not run; nothing if it ran."""
    if "failure" in found:
        text = found["failure"].replace("|", "/").replace("<", "").replace(">", "")
        return f"fails: {text if len(text) < 120 else text[:117] + '...'}"
    if "missing" in found:
        return "not installed here"
    return found.get("skipped", "")


def differs(found: dict[str, Any]) -> bool:
    """Whether the other's update is much further from the formula."""
    return "theirs_error" in found and found["theirs_error"] > FAR * found["ours_error"]


def what_instead(found: dict[str, Any]) -> str:
    """What the other does in place of the formula, with the error of that, and what it does to gradients."""
    said = []
    if differs(found):
        known = "instead" in found and found["instead_error"] <= FAR * found["ours_error"] + 1e-5
        said.append(
            f"{found['instead']} (to {number(found['instead_error'])})" if known else found.get("because", "differs")
        )
    if "theirs" in found.get("overwrites", ()):
        said.append("overwrites gradients")
    return "; ".join(said)


def updates(library: str) -> Rows:
    """Errors of updates on one device."""
    rows: Rows = [("row", "on", "tilestep", "the other", "between them", "the other, where it does something else")]
    for name, device, found in rows_of(library):
        if failed(found):
            rows.append((f"`{name}`", device, "", "", "", failed(found)))
            continue
        between = SAME if found["equal_bits"] else number(found["between"])
        errors = (number(found["ours_error"]), number(found["theirs_error"]))
        rows.append((f"`{name}`", device, *errors, between, what_instead(found)))
    return rows


def _beside_itself(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return failed(found) or (SAME if found["bits"] else number(found["error"]))


def layouts(layout: str) -> Rows:
    """Each contender on a layout, or resumed, beside itself."""
    rows: Rows = [("row", "on", "tilestep", "the other")]
    for name, device, found in rows_of(layout):
        if failed(found):
            rows.append((f"`{name}`", device, "", failed(found)))
        else:
            rows.append((f"`{name}`", device, *(_beside_itself(found.get(who)) for who in ("ours", "theirs"))))
    return rows


def machines() -> Rows:
    """What the results are of."""
    rows: Rows = [("on", "device", "torch", "Python", "commit", *list(LIBRARIES)[1:])]
    for device, result in results().items():
        made = result["environment"]
        versions = (result["contenders"].get(library) or "-" for library in list(LIBRARIES)[1:])
        commit = made["commit"].partition("+")[0]
        rows.append((device, made["device"], made["torch"], made["python"], commit, *versions))
    return rows


def missing() -> Rows:
    """Libraries of rows, how to install them, and where none was."""
    rows: Rows = [("library", "how to install it", "not installed on")]
    for library, command in LIBRARIES.items():
        without = [device for device, result in results().items() if not result["contenders"].get(library)]
        rows.append((library, command, ", ".join(without) or "-"))
    return rows


def worse() -> Rows:
    """Rows that tilestep loses: it is further from the formula, or has other bits where the other has the same."""
    rows: Rows = [("row", "on", "tilestep", "the other")]
    for device, result in results().items():
        for name, found in result["rows"].items():
            if "theirs_error" in found and found["ours_error"] > 1.2 * found["theirs_error"]:
                rows.append((f"`{name}`", device, number(found["ours_error"]), number(found["theirs_error"])))
            mine, other = found.get("ours"), found.get("theirs")
            if mine and other and other.get("bits") and not mine.get("bits"):
                rows.append((f"`{name}`", device, _beside_itself(mine), _beside_itself(other)))
    return rows if len(rows) > 1 else [*rows, ("none", "", "", "")]


def counts() -> Rows:
    """The sums of all rows."""
    rows: Rows = [("", *results())]

    def count(title: str, holds: Any) -> None:
        rows.append((title, *(str(sum(map(holds, result["rows"].values()))) for result in results().values())))

    def of(who: str, key: str) -> Any:
        return lambda found: bool(found.get(who, {}).get(key))

    count("rows that ran", lambda found: not failed(found))
    count("updates on one device, beside a formula", lambda found: "ours_error" in found)
    count("... whose error is more than three times tilestep's in the other library", differs)
    count("layouts and checkpoints, beside one device and an unbroken run", lambda found: "ours" in found)
    count("... tilestep: the same bits", of("ours", "bits"))
    count("... tilestep: fails", of("ours", "failure"))
    count("... the other: the same bits", of("theirs", "bits"))
    count("... the other: fails", of("theirs", "failure"))
    return rows


TABLES = {"machines": machines, "missing": missing, "worse": worse, "counts": counts}
SPREAD = ("fsdp2", "tp", "experts", "zero", "accumulation", "offload", "resume", "resume-fsdp2")


def _text(name: str) -> str:
    rows = TABLES[name]() if name in TABLES else layouts(name) if name in SPREAD else updates(name)
    lines = ["| " + " | ".join(cell.strip() for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def brought_up_to_date(text: str) -> str:
    """The page with the tables that the results give."""
    return BLOCK.sub(lambda block: f"<!-- table: {block[1]} -->\n{_text(block[1])}", text)


def described(found: dict[str, Any]) -> str:
    """A result in one line, for the terminal."""
    if failed(found):
        return failed(found)
    if "ours_error" in found:
        between = SAME if found["equal_bits"] else number(found["between"])
        text = f"tilestep {number(found['ours_error'])}, the other {number(found['theirs_error'])}, between {between}"
        return "; ".join(filter(None, (text, what_instead(found))))
    return f"tilestep {_beside_itself(found['ours'])}, the other {_beside_itself(found.get('theirs'))}"
