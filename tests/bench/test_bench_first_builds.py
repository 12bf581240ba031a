"""The tool that says what a first step builds on a GPU, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import run_script
from triton_assembler import require_launchers

import tilestep

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "first_builds.py"


def test_every_kernel_of_a_first_step_is_built_with_its_stages() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    require_launchers()
    before = tilestep.compile_count()
    done = run_script(SCRIPT, "--rules", "SGD", "--shapes", "5x3,7", "--json")
    assert done.returncode == 0, done.stderr
    [figures] = [json.loads(line) for line in done.stdout.splitlines()]
    names = [kernel["name"] for kernel in figures["kernels"]]
    assert names == ["norm_tiles", "decide", "sgd_scalar_pass_0", "sgd_tile_pass_0"]
    for kernel in figures["kernels"]:
        assert set(kernel["stages"]) == {"python", "ttir", "ttgir", "llir", "ptx", "cubin"}
    assert all(figures[key] > 0 for key in ("prepared", "serial", "processor", "together", "again"))
    assert tilestep.compile_count() == before


def test_a_process_that_fails_is_reported() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    require_launchers()
    done = run_script(SCRIPT, "--rules", "SOAP", "--shapes", "2x3x4")
    assert done.returncode != 0 and "SOAP" in done.stderr and "is not a matrix" in done.stderr
