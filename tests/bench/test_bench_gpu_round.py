"""benchmarks/gpu_round.py: what it lists is there, and parts end as they should, on their own or not."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from module_files import load
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_round.py"
SLEEPS = "time.sleep(600)"


@pytest.fixture(scope="module")
def script() -> Any:
    return load(SCRIPT)


def test_every_file_of_a_part_is_there(script: Any, tmp_path: Path) -> None:
    names = [part.name for part in script.PARTS]
    assert len(set(names)) == len(names)
    tests = {path.name: path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    tested = set()
    for part in script.PARTS:
        words = part.words(tmp_path)
        files = {word for word in words if word.endswith(".py")}
        assert all((ROOT / file).is_file() for file in files), part.name
        if "tests/gpu" in words:
            files |= {
                f"tests/gpu/{name}" for name, text in tests.items() if words[words.index("tests/gpu") + 2] in text
            }
        assert files or words[:2] == ["-m", "tilestep"]
        tested |= {Path(file).name for file in files if file.startswith("tests/")}
    assert tested == set(tests)


def test_parts_are_chosen_by_name_and_by_the_number_of_gpus(script: Any) -> None:
    assert [part.name for part in script.chosen("shard-2, compile", 2)] == ["shard-2", "compile"]
    assert {part.gpus for part in script.chosen("", 3)} == {2}
    with pytest.raises(typer.BadParameter, match="no part is called 'shard'; there are: trace-neither, "):
        script.chosen("shard", 4)
    with pytest.raises(typer.BadParameter, match="shard-4 needs 4 GPUs, here are 2"):
        script.chosen("shard-4", 2)


def test_parts_are_run_each_in_its_folder(script: Any, tmp_path: Path) -> None:
    def run(code: str, seconds: float = 60.0) -> tuple[str, str]:
        how, _ = script.run(script.Part("it", 1, 1, f"-c {code!r} {{out}}"), tmp_path, seconds)
        return how, (tmp_path / "it" / "output.log").read_text()

    assert run("import sys; print(sys.argv[1])") == ("done", f"{tmp_path / 'it'}\n")
    assert run("raise SystemExit(3)")[0] == "exit code 3"
    # One that does not end by itself says how far it was, and what it has started is ended too.
    # So it does if interrupts are ignored where the round was begun, as in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        how, said = run(f"import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid); {SLEEPS}", 2.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert how == "ended: out of time" and "KeyboardInterrupt" in said
    until = time.monotonic() + 30
    while _runs(int(said.split()[0])):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_failures_are_in_a_file_when_a_part_is_killed(script: Any, tmp_path: Path) -> None:
    (tests := tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "test_killed.py").write_text(
        "import os, signal, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 + 1 == 3\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError('no device')\n"
        "def test_of_a_broken_fixture(broken): pass\n"
        "def test_killed(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (part,) = script.chosen("tests-norm", 1)
    words = part.command.rpartition("tests/gpu")[0]
    how, _ = script.run(script.Part("it", 1, 1, f"{words} -c /dev/null {tests / 'test_killed.py'}"), tmp_path, 60)
    assert how == "exit code -9"
    said = (tmp_path / "failures.txt").read_text()
    assert re.findall("^FAILED .*::(.*)", said, re.M) == ["test_fails (call)", "test_of_a_broken_fixture (setup)"]
    assert "assert (1 + 1) == 3" in said and "ValueError: no device" in said
    assert (tmp_path / "it" / "output.log").read_text().rstrip().endswith("::test_killed")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_round_without_gpus_says_what_is_missing(tmp_path: Path) -> None:
    assert "overlap-4" in run_script(SCRIPT, "--list").stdout
    done = run_script(SCRIPT, "--only", "shard-4", "--out", str(tmp_path))
    assert done.returncode == 2 and "needs 4 GPUs" in done.stderr
