"""Processes that have imported everything and done nothing: what one does, the next does not see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fresh_process import in_fresh_process
from scripts import run_script

import tilestep
from tilestep.backends import tuning
from tilestep.kernels import cache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are forked")


def step_once(variable: str) -> dict[str, object]:
    """What is there before a step and after it."""
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    before = {
        "builds": tilestep.compile_count(),
        "directory": cache._require_room.cache_info().currsize,
        "tables": tuning.known_table.cache_info().currsize,
        "cuda": torch.cuda.is_initialized(),
        "generated": [name for name in sys.modules if name.startswith("tilestep_generated")],
        "marked": hasattr(tilestep, "marked_by_a_test"),
    }
    tilestep.marked_by_a_test = True  # type: ignore[attr-defined]
    tilestep.Optimizer([parameter], "SGD").step()
    return {"before": before, "builds": tilestep.compile_count(), "cache": os.environ[variable], "parent": os.getppid()}


def test_what_one_has_built_the_next_has_to_read(tmp_path: Path) -> None:
    runs = [("first", 1), ("first", 0), ("other", 1)]
    parents = set()
    for folder, builds in runs:
        variables = {"TILESTEP_CACHE_DIR": str(tmp_path / folder)}
        report = in_fresh_process(step_once, ["TILESTEP_CACHE_DIR"], variables)
        assert report["before"] == {
            "builds": 0, "directory": 0, "tables": 0, "cuda": False, "generated": [], "marked": False
        }  # fmt: skip
        assert (report["builds"] > 0) == bool(builds) and report["cache"] == str(tmp_path / folder)
        assert any((tmp_path / folder).glob("*.so"))
        parents.add(report["parent"])
    assert len(parents) == 1 and os.getpid() not in parents  # one server, which has everything imported
    assert os.environ.get("TILESTEP_CACHE_DIR") != str(tmp_path / "other")


def refuse() -> None:
    raise ValueError("no such rule")


def test_a_failure_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"^ValueError: no such rule$"):
        in_fresh_process(refuse, [])


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError, match="without an answer, exit code 3"):
        in_fresh_process(os._exit, [3])


def leave_one_running(path: str, wait: bool) -> None:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(started.pid))
    if wait:
        time.sleep(600)


@pytest.mark.parametrize("late", [True, False])
def test_nothing_is_left_running(tmp_path: Path, late: bool) -> None:
    note = tmp_path / "pid"
    if late:
        with pytest.raises(TimeoutError, match="no answer within 4 s"):
            in_fresh_process(leave_one_running, [str(note), True], timeout=4)
    else:
        in_fresh_process(leave_one_running, [str(note), False])
    for _ in range(100):
        if not is_running(int(note.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("what the process has started still runs")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_program_is_not_run_again(tmp_path: Path) -> None:
    """A script without a guard for its main part can call it."""
    script = tmp_path / "script.py"
    script.write_text("import math\nfrom fresh_process import in_fresh_process as call\n")
    script.write_text(script.read_text() + "print('begun', call(math.gcd, [12, 18]))\n")
    done = run_script(script)
    assert (done.returncode, done.stdout) == (0, "begun 6\n"), done.stderr
