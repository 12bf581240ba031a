"""The script that shows what sets of coefficients leave, its committed figures, and the page that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from module_files import load
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "singular_values.py"


def test_it_measures_every_set_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, drawn = tmp_path / "values.json", tmp_path / "values.png"
    done = run_script(SCRIPT, "--shape", "24", "40", "--out", str(out), "--picture", str(drawn))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert list(results["sets"]) == load(SCRIPT).SETS and drawn.stat().st_size > 10_000
    assert all(len(found["after"]) == len(results["before"]) == 3 * 24 for found in results["sets"].values())


def test_the_page_has_the_committed_figures_and_these_are_still_found() -> None:
    script = load(SCRIPT)
    results = json.loads(script.RESULTS.read_text())
    page = (ROOT / "docs" / "guide" / "muon.md").read_text()
    assert script.table(results) == [line for line in page.splitlines() if line in script.table(results)]
    for name, least, greatest in (("jordan", 0.6, 1.3), ("polar_express", 0.8, 1.2), ("quintic", 0.9, 1.1)):
        found = script.measured(name, tuple(results["shape"]), "cpu")
        committed = results["sets"][name]
        for key in ("least", "greatest", "distance from one"):
            assert found[key] == pytest.approx(committed[key], abs=0.02)
        assert found["least"] > least and found["greatest"] < greatest and found["rounding"] < 0.02
