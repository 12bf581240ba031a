"""One chart of committed results, how many times as fast as torch's fastest: `python benchmarks/overview.py`.

Writes docs/images/overview.png from benchmarks/results. Rows without one card's results have the other's alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["ROWS", "main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
H200, H100, CPU = "H200", "H100", "2 cores of an EPYC"

Times = tuple[float, float]
"""Milliseconds of the fastest of torch's ways, and of tilestep."""


def group(file: str, title: str, theirs: str = "torch fused", ours: str = "tilestep") -> Times:
    """Medians of wall time in a group of a result."""
    groups = json.loads((RESULTS / file).read_text())["groups"]
    (rows,) = [group["rows"] for group in groups if re.match(title, group["title"])]
    times = {row["contender"]: row["wall"]["median"] for row in rows if row["wall"]}
    return times[theirs], times[ours]


def on_both(name: str, title: str, theirs: str = "torch fused") -> dict[str, Times]:
    """The same group on both cards."""
    return {H200: group(f"h200/{name}.json", title, theirs), H100: group(f"{name}_h100_1.json", title, theirs)}


def whole_iterations(mode: str) -> dict[str, Times]:
    """Geometric means over eight models: the fastest of torch's contenders as 1."""
    summary = json.loads((RESULTS / "h200/e2e-both-modes/e2e.json").read_text())["summary"]
    theirs = max(summary[f"torch {kind}, {mode}, all models"] for kind in ("fused", "compiled"))
    return {H200: (1 / theirs, 1 / summary[f"tilestep, {mode}, all models"])}


def sharded() -> dict[str, Times]:
    """An iteration on four GPUs at batch 4, with float32 masters."""
    found = json.loads((RESULTS / "h200/shard-4.json").read_text())["iterations"]["4"]
    theirs, ours = (found[name]["iteration_ms"]["median"] for name in ("data_parallel_master", "sharded"))
    return {f"4 {H200}s": (theirs, ours)}


MUON = r"Muon for 168 matrices"
OFFLOADED = r"iteration, batch 4, 1\.19 B float32"
ROWS: dict[str, Callable[[], dict[str, Times]]] = {
    "clip + AdamW, 5,000 tensors of 1,024": lambda: on_both("step", r"clip \+ AdamW, small"),
    "total norm, 2,000 tensors, 131 M": lambda: on_both("norm", r"total norm, random", "torch"),
    "clip + AdamW, 2,000 tensors, 131 M": lambda: on_both("step", r"clip \+ AdamW, random"),
    "total norm, 219 tensors, 1.19 B": lambda: on_both("norm", r"total norm, llama", "torch"),
    "clip + AdamW, 219 tensors, 1.19 B": lambda: on_both("step", r"clip \+ AdamW, llama: 219 bfloat16"),
    "the same in float32": lambda: on_both("step", r"clip \+ AdamW, llama: 219 float32"),
    "Muon and AdamW, 1.19 B": lambda: on_both("rules", MUON, "torch Muon, fused AdamW"),
    "iteration, state in host memory (torchao)": lambda: {
        H200: group("h200/offload.json", OFFLOADED, "torchao", "offloaded, gpu, backward")
    },
    "iteration, 8 models compiled": lambda: whole_iterations("compiled"),
    "iteration, 8 models eager": lambda: whole_iterations("eager"),
    "iteration, sharded (DDP)": sharded,
    "AdamW on a CPU, 2,000 tensors, 16 M": lambda: {CPU: group("cpu-2-cores/cpu.json", r"AdamW, small fp32")},
    "AdamW on a CPU, 200 tensors, 50 M": lambda: {CPU: group("cpu-2-cores/cpu.json", r"AdamW, large fp32")},
    "first step of 1,000 tensors, filled caches": lambda: {
        H200: group("h200/compile.json", "first step, 1,000", "torch fused, filled caches", "tilestep, filled caches")
    },
}
"""The works, by what the chart calls them."""


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    colors = {H200: "#d9480f", H100: "#f59f00", CPU: "#868e96"}
    heights = {H200: 0.2, H100: -0.2}
    for place, times in enumerate(make() for make in ROWS.values()):
        for card, (theirs, ours) in times.items():
            ratio, both = theirs / ours, len(times) > 1
            height = -place + (heights[card] if both else 0)
            panel.barh(
                height, ratio - 1, 0.38, left=1, color=colors[H100 if H100 in card else H200 if H200 in card else CPU]
            )
            told = f"{theirs:.3g} → {ours:.3g} ms, " if theirs > 1 else ""
            text = f"{ratio:.{2 if ratio > 10 else 3}g}x  {told}{card}"
            at = (max(ratio, 1), height)
            panel.annotate(text, at, (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_xlim(0.4, 200)
    panel.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"], fontsize=8)
    panel.minorticks_off()
    panel.set_yticks([-place for place in range(len(ROWS))], list(ROWS), fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title("times as fast as the fastest of torch's (in brackets: of another)", fontsize=10, loc="left")
    figure.savefig(ROOT / "docs" / "images" / "overview.png", dpi=140)


if __name__ == "__main__":
    main()
