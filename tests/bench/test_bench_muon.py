"""The scripts that time Muon, for several kinds of matrices and on several ranks, on a few small ones."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import run_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_it_times_each_kind_of_matrices(tmp_path: Path) -> None:
    out = tmp_path / "muon.json"
    sets = ("wide", "convolutions", "splits")
    chosen = [word for name in sets for word in ("--set", name)]
    done = run_script(BENCHMARKS / "muon_steps.py", *chosen, "--share", "64", "--rounds", "1", "--output", str(out))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["milliseconds"]
    assert set(figures) == set(sets)
    for times in figures.values():
        assert set(times) == {"tilestep", "tilestep, launched", "tilestep, polar_express", "torch"}
        assert all(figure > 0 for own in times.values() for figure in own.values())


def test_it_checks_and_times_updates_on_several_ranks(tmp_path: Path) -> None:
    words = (
        "--ranks",
        "2",
        "--small",
        "--rounds",
        "1",
        "--parts",
        "equal,floors,fsdp,shard",
        "--output",
        str(tmp_path),
    )
    done = run_script(BENCHMARKS / "muon_ranks.py", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "muon_ranks_cpu_2.json").read_text())
    assert found["equal"] == {key: {"farthest": 0.0, "two runs equal": True} for key in ("rows", "columns")}
    for part, contenders in (("fsdp", ("no step", "AdamW", "Muon")), ("shard", ("AdamW", "Muon"))):
        assert all(found[part][f"iteration, {name}"]["wall"] > 0 for name in contenders)
    assert set(found) == {"environment", "notes", "equal", "matrices", "floors", "fsdp", "shard"}
    assert sum(found["matrices"].values()) == 14  # seven a layer, the gates too


def test_it_times_a_step_beside_backward(tmp_path: Path) -> None:
    words = ("--small", "--batch", "1", "--rounds", "1", "--output", str(tmp_path))
    done = run_script(BENCHMARKS / "muon_beside.py", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "muon_beside_cpu_1.json").read_text())
    assert found["matrices"] == 4  # of fourteen
    assert len(found["milliseconds"]) == 7 and all(own["wall"] > 0 for own in found["milliseconds"].values())
