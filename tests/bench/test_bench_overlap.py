"""benchmarks/overlap_figures.py and offload_figures.py at tiny sizes: parts report, what is left out is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from module_files import load
from scripts import run_script

from tilestep.bench.results import Group, Result, Row

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*words: str) -> str:
    done = run_script(BENCHMARKS / words[0], *words[1:], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_iterations_memory_and_losses(tmp_path: Path) -> None:
    """Every contender has figures in every group, and losses are the serial ones."""
    run("overlap_figures.py", "--ranks", "2", "--small", "--batch", "1", "--rounds", "1", "--output", str(tmp_path))
    result = Result.load(tmp_path / "overlap_cpu_2.json")
    assert not result.notes
    contenders = ["no step", "torch fused", "serial", "backward", "forward"]
    assert [group.tags.get("batch") for group in result.groups] == ["1", "1", *[None] * 4]
    for group in result.groups:
        drops = "tokens" in group.tags and group.tags["clip"] == "no clip"
        assert [row.contender for row in group.rows] == contenders + ["dropped"] * drops
        assert all(row.wall is not None and row.wall.median > 0 for row in group.rows)
    equal = [value for key, value in result.summary.items() if key.startswith("losses equal")]
    assert equal == [4.0] * 4
    first, last = (result.summary[f"{which} loss, clip"] for which in ("first", "last"))
    assert first != last


def test_what_is_not_measured_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    figures = load(BENCHMARKS / "overlap_figures.py")
    environment = {"device": "one", "torch": "2", "commit": "new", "date": "today"}
    titles = [f"iteration, batch 1, {clip}" for clip in ("clip", "no clip")]
    bench = figures.Bench.__new__(figures.Bench)
    bench.result = Result(
        "overlap-2", environment, [Group(titles[0], [])], summary={"exposed ms, batch 1, clip, serial": 1.0}
    )
    bench._known = Result(
        "overlap-2",
        {**environment, "commit": "old", "date": "before"},
        [Group(title, [Row("serial")]) for title in titles],
        summary={
            "exposed ms, batch 1, clip, serial": 2.0,
            "exposed ms, batch 1, clip, gone": 2.0,
            "exposed ms, batch 1, no clip, serial": 3.0,
            "first loss, clip": 4.0,
        },
    )
    result = bench._with_known()
    assert [(group.title, len(group.rows)) for group in result.groups] == [(titles[0], 0), (titles[1], 1)]
    assert result.summary == {
        "exposed ms, batch 1, clip, serial": 1.0,
        "exposed ms, batch 1, no clip, serial": 3.0,
        "first loss, clip": 4.0,
    }
    assert result.notes == ["groups kept: 1 from a run at commit old, before"]
    assert result.environment == environment and len(bench.result.groups) == 1


def test_what_is_exposed_is_told_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    figures = load(BENCHMARKS / "overlap_figures.py")
    bench = figures.Bench.__new__(figures.Bench)
    bench.result = Result("overlap-2", {})
    monkeypatch.setattr(bench, "say", lambda line: None)
    base, own = figures.Training("no step", None, None), figures.Training("serial", None, None)
    # The machine becomes slower from round to round by more than the step takes.
    base.wall, own.wall = [100.0, 120.0, 140.0], [103.0, 122.0, 141.0]
    bench._expose(own, base, "batch 1, clip")
    assert bench.result.summary["exposed ms, batch 1, clip, serial"] == 2
    assert bench.result.summary["exposed share, batch 1, clip, serial"] == round(2 / 120, 4)


def test_backward_needs_what_any_schedule_needs(tmp_path: Path) -> None:
    """Storages of real and of fake tensors are counted alike, and "backward" has no gradient longer than it must."""
    run("overlap_floor.py", "--small", "--tokens", "4", "--output", str(tmp_path))
    result = Result.load(tmp_path / "overlap_floor_cpu_1.json")
    assert [group.tags for group in result.groups] == [{"ranks": ranks, "tokens": "4"} for ranks in ("2", "4")]
    for group in result.groups:
        work = f"{group.tags['ranks']} ranks, 4 tokens"
        peaks = {row.contender: row.peak_bytes or 0 for row in group.rows}
        gradients = result.summary[f"bytes of gradients, {work}"]
        assert peaks["serial"] - peaks["dropped"] > 0.3 * gradients
        assert peaks["backward"] == peaks["dropped"]
        for name, peak in peaks.items():
            items = [value for key, value in result.summary.items() if key.startswith(f"bytes, {work}, {name}, ")]
            assert sum(items) == peak


def test_distributed_data_parallel(tmp_path: Path) -> None:
    options = ["--small", "--parts", "losses", "--output", str(tmp_path)]
    run("overlap_figures.py", "--ranks", "2", "--wrap", "ddp", *options)
    result = Result.load(tmp_path / "overlap_ddp_cpu_2.json")
    assert not result.notes
    assert [value for key, value in result.summary.items() if key.startswith("losses equal")] == [4.0] * 4


def test_parts_without_time_are_said_to_be_left_out(tmp_path: Path) -> None:
    said = run("overlap_figures.py", "--small", "--limit", "0", "--output", str(tmp_path))
    result = Result.load(tmp_path / "overlap_cpu_1.json")
    assert not result.groups and len(result.notes) == 6
    assert "no time was left for losses" in said


def test_offload_figures_say_what_cannot_be_hidden() -> None:
    said = run("offload_figures.py", "--quick", "--rounds", "1")
    start, end = said.index("{"), said.rindex("}") + 1
    summary = json.loads(said[start:end])
    copies, step = summary["iteration: copies, ms"], summary["iteration: the update that they replace, ms"]
    assert summary["iteration: copies that cannot be hidden, ms"] == pytest.approx(copies - step)
    for name in ("offloaded, gpu", "offloaded, gpu, backward", "offloaded, gpu, forward", "offloaded, cpu"):
        more = summary[f"iteration: {name}, ms"] - summary["iteration: not offloaded, ms"]
        assert summary[f"iteration: {name}, ms more"] == pytest.approx(more)
