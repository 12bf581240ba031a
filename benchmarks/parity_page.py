"""The tables of docs/parity.md, from the results of benchmarks/parity.py.

A comment in the page names the table that follows: `<!-- table: NAME -->`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["LIBRARIES", "PAGE", "RESULTS", "brought_up_to_date", "summary_line"]

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
"""Libraries and how to install them."""

Rows = list[tuple[str, ...]]
SAME = "same bits"
FAR = 3.0
"""The page explains errors of another library above this many times tilestep's."""


@functools.cache
def results() -> dict[str, Any]:
    """Results by device, CPUs first."""
    found = {}
    for path in sorted(RESULTS.glob("parity_*.json")):
        kind, gpus = path.stem.split("_")[1:]
        name = kind if kind == "cpu" else f"{gpus} {kind.upper()}"
        found["CPU, 2 ranks" if (kind, gpus) == ("cpu", "2") else name.replace("cpu", "CPU")] = json.loads(
            path.read_text()
        )
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith("CPU"), item[0])))


def rows_of(part: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, device and result of the rows of a library or layout."""
    names = {name for result in results().values() for name in result["rows"]}
    for name in sorted(names, key=str.lower):
        if name.partition("/")[0] == part:
            for device, result in results().items():
                if name in result["rows"]:
                    yield name, device, result["rows"][name]


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def failure_text(found: dict[str, Any]) -> str:
    """Return why a row or an optimizer did not run; an empty string if it ran."""
    if "failure" in found:
        text = found["failure"].replace("|", "/").replace("<", "").replace(">", "")
        return f"fails: {text if len(text) < 120 else text[:117] + '...'}"
    if "missing" in found:
        return "not installed here"
    return found.get("skipped", "")


def differs(found: dict[str, Any]) -> bool:
    """Whether the other library's update is much further from the formula."""
    return "theirs_error" in found and found["theirs_error"] > FAR * found["ours_error"]


def difference_text(found: dict[str, Any]) -> str:
    """Describe what the other library does instead, with its error against that."""
    said = []
    if differs(found):
        known = "instead" in found and found["instead_error"] <= FAR * found["ours_error"] + 1e-5
        said.append(
            f"{found['instead']} (to {number(found['instead_error'])})" if known else found.get("reason", "differs")
        )
    if "theirs" in found.get("overwrites", ()):
        said.append("overwrites gradients")
    return "; ".join(said)


def updates(library: str) -> Rows:
    """Table of errors of updates on one device."""
    rows: Rows = [("row", "on", "tilestep", "other library", "difference", "the other library instead")]
    for name, device, found in rows_of(library):
        if failure_text(found):
            rows.append((f"`{name}`", device, "", "", "", failure_text(found)))
            continue
        between = SAME if found["equal_bits"] else number(found["between"])
        errors = (number(found["ours_error"]), number(found["theirs_error"]))
        rows.append((f"`{name}`", device, *errors, between, difference_text(found)))
    return rows


def _layout_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return failure_text(found) or (SAME if found["bits"] else number(found["error"]))


def layouts(layout: str) -> Rows:
    """Table of optimizers on a layout compared with one device, or resumed."""
    rows: Rows = [("row", "on", "tilestep", "other library")]
    for name, device, found in rows_of(layout):
        if failure_text(found):
            rows.append((f"`{name}`", device, "", failure_text(found)))
        else:
            rows.append((f"`{name}`", device, *(_layout_cell(found.get(who)) for who in ("ours", "theirs"))))
    return rows


def machines() -> Rows:
    """Devices and versions of each result."""
    rows: Rows = [("", *results(), "how to install it")]
    for key in ("device", "torch", "python", "commit"):
        made = (result["environment"][key].partition("+changes")[0] for result in results().values())
        rows.append((key, *made, LIBRARIES.get(key, "")))
    for library, command in list(LIBRARIES.items())[1:]:
        versions = (result["contenders"].get(library) or "not installed" for result in results().values())
        rows.append((library, *versions, command))
    return rows


def worse() -> Rows:
    """Table of rows that tilestep loses: a larger error, or other bits where the other library has the same."""
    rows: Rows = [("row", "on", "tilestep", "other library")]
    for device, result in results().items():
        for name, found in result["rows"].items():
            if "theirs_error" in found and found["ours_error"] > 1.2 * found["theirs_error"]:
                rows.append((f"`{name}`", device, number(found["ours_error"]), number(found["theirs_error"])))
            mine, other = found.get("ours"), found.get("theirs")
            if mine and other and other.get("bits") and not mine.get("bits"):
                rows.append((f"`{name}`", device, _layout_cell(mine), _layout_cell(other)))
    return rows if len(rows) > 1 else [*rows, ("none", "", "", "")]


def counts() -> Rows:
    """Table of numbers of rows."""
    rows: Rows = [("", *results())]

    def count(title: str, holds: Any) -> None:
        rows.append((title, *(str(sum(map(holds, result["rows"].values()))) for result in results().values())))

    def of(who: str, key: str) -> Any:
        return lambda found: bool(found.get(who, {}).get(key))

    count("rows that ran", lambda found: not failure_text(found))
    count("updates on one device, compared with a formula", lambda found: "ours_error" in found)
    count("... other library: error above three times tilestep's", differs)
    count(
        "layouts, offload and resumed training, compared with one device or an unbroken run",
        lambda found: "ours" in found,
    )
    count("... tilestep: the same bits", of("ours", "bits"))
    count("... tilestep: fails", of("ours", "failure"))
    count("... other library: the same bits", of("theirs", "bits"))
    count("... other library: fails", of("theirs", "failure"))
    return rows


TABLES = {"machines": machines, "worse": worse, "counts": counts}
SPREAD = ("fsdp2", "tp", "experts", "zero", "accumulation", "offload", "resume", "resume-fsdp2")


def _text(name: str) -> str:
    rows = TABLES[name]() if name in TABLES else layouts(name) if name in SPREAD else updates(name)
    lines = ["| " + " | ".join(cell.strip() for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def brought_up_to_date(text: str) -> str:
    """Return the page with tables of the current results."""
    return BLOCK.sub(lambda block: f"<!-- table: {block[1]} -->\n{_text(block[1])}", text)


def summary_line(found: dict[str, Any]) -> str:
    """Return a result in one line, for the terminal."""
    if failure_text(found):
        return failure_text(found)
    if "ours_error" in found:
        between = SAME if found["equal_bits"] else number(found["between"])
        text = f"tilestep {number(found['ours_error'])}, other {number(found['theirs_error'])}, difference {between}"
        return "; ".join(filter(None, (text, difference_text(found))))
    return f"tilestep {_layout_cell(found['ours'])}, other {_layout_cell(found.get('theirs'))}"
