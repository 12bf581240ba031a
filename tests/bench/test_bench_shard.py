"""benchmarks/shard_figures.py on two CPU ranks: its parts run, a failing one is reported, constants are written."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from scripts import run_python

from tilestep.planning import Constants

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


python = functools.partial(run_python, CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("figures")
    options = ["--quick", "--output", str(folder / "figures.json"), "--constants", str(folder / "constants.json")]
    done = python(str(BENCHMARKS / "shard_figures.py"), "--ranks", "2", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "figures.json").read_text()), folder / "constants.json"


def test_every_part_reports(measured: tuple[dict[str, Any], Path]) -> None:
    figures, _ = measured
    assert figures["ranks"] == 2 and "torch" in figures["environment"]
    assert abs(figures["sharded"]["memory"]["state_over_its_share"]) < 0.02
    assert figures["sharded"]["parts of a step"]["update_ms"]["low"] > 0
    peers = {
        "iterations": {"data_parallel", "data_parallel_master", "fully_sharded"},
        "zero_redundancy": {"zero_redundancy"},
    }
    for part, names in peers.items():
        for batch in ("1", "2"):
            assert set(figures[part][batch]) == {"sharded", *names}
            assert all(figure["iteration_ms"]["median"] > 0 for figure in figures[part][batch].values())
            ours = figures[part][batch]["sharded"]
            assert {"forward_backward_ms", "exposed_sums_ms", "exposed_clip_step_gather"} <= set(ours)
        assert set(figures[part]["host"]) == {"sharded", *names} and "failures" not in figures[part]
    assert [row["bytes"] for row in figures["collectives"]["all ranks"]["rows"]] == [2**12, 2**16]
    assert set(figures["host_of_many"]["20"]) >= {"step", "backward", "backward of plain tensors", "buckets"}


def test_parts_that_are_not_taken_again_are_kept(measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    figures, _ = measured
    path = tmp_path / "figures.json"
    earlier = {**figures, "environment": {**figures["environment"], "commit": "earlier"}}
    path.write_text(json.dumps({**earlier, "zero_redundancy": {"failure": "too late"}}))
    options = ["--quick", "--parts", "collectives", "--add", "--output", str(path)]
    done = python(str(BENCHMARKS / "shard_figures.py"), "--ranks", "2", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    now = json.loads(path.read_text())
    assert now["iterations"] == {"environment": earlier["environment"], **figures["iterations"]}
    assert now["environment"]["commit"] != "earlier" and "environment" not in now["collectives"]
    assert "zero_redundancy" not in now
    path.write_text(json.dumps({**earlier, "environment": {**figures["environment"], "torch": "1.0"}}))
    done = python(str(BENCHMARKS / "shard_figures.py"), "--ranks", "2", *options)
    assert done.returncode == 1 and "torch 1.0, cannot be added to" in done.stderr


def test_constants_are_for_plans(measured: tuple[dict[str, Any], Path]) -> None:
    constants = Constants.load(measured[1])
    assert "launch_latency" not in constants.assumed and "network_bandwidth" in constants.assumed
    assert constants.sources["compute"].startswith("measured: 2 x ")


def test_parts_that_fail_are_reported_and_the_others_run(tmp_path: Path) -> None:
    """One that fails on all ranks, one that ends a rank: what comes after them is run, in new processes."""
    (tmp_path / "broken.py").write_text(
        "import json, os, time\n"
        "import shard_figures, shard_parts\n"
        "import torch.distributed as dist\n"
        "def fails(bench):\n"
        "    bench.note({'so far': 1})\n"
        "    raise ArithmeticError('on purpose')\n"
        "def ends(bench):\n"
        "    os._exit(7) if dist.get_rank() else time.sleep(60)\n"
        "def works(bench): return {'ranks': bench.ranks}\n"
        "shard_parts.PARTS.update(fails=fails, ends=ends, works=works)\n"
        "if __name__ == '__main__':\n"
        "    told = shard_figures.Run(True, time.monotonic() + 200)\n"
        "    print(json.dumps(shard_figures.run(['fails', 'ends', 'works'], 2, told)))\n"
    )
    done = python(str(tmp_path / "broken.py"))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert "on purpose" in figures["fails"]["failure"] and "exit codes" in figures["ends"]["failure"]
    assert figures["fails"]["so far"] == 1
    assert figures["works"]["ranks"] == 2


def test_the_constants_of_plans_are_those_of_committed_figures(tmp_path: Path) -> None:
    stored = str(BENCHMARKS / "results" / "h200" / "shard-2.json")
    parts = "models,beside,sharded,host_of_many,iterations"
    words = ["--again", "--parts", parts, "--output", stored, "--constants", str(tmp_path / "constants.json")]
    done = python(str(BENCHMARKS / "shard_figures.py"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    again, defaults = Constants.load(tmp_path / "constants.json"), Constants.load()
    assert again.sources == defaults.sources
    for name, source in defaults.sources.items():
        assert getattr(again, name) == pytest.approx(getattr(defaults, name)), name
        assert "shard-2.json" in source or name not in ("compute", "model_host", "beside_sums", "step_latency")
