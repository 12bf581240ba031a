"""The script that times Muon for several kinds of matrices, on a few small ones."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "muon_steps.py"


def test_it_times_each_kind_of_matrices(tmp_path: Path) -> None:
    out = tmp_path / "muon.json"
    sets = ("wide", "convolutions", "splits")
    chosen = [word for name in sets for word in ("--set", name)]
    done = run_script(SCRIPT, *chosen, "--share", "64", "--rounds", "1", "--output", str(out))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["milliseconds"]
    assert set(figures) == set(sets)
    for times in figures.values():
        assert set(times) == {"tilestep", "tilestep, polar_express", "torch"}
        assert all(figure > 0 for own in times.values() for figure in own.values())
