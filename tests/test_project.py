"""The project around the package: set-up, targets, documents."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import tilestep

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]

# Stands in for Python and pip: logs what it is asked, and makes a "virtual environment" of itself.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
    *version_info*) exit "$OLD" ;;
    *"import torch"*) exit "$NO_TORCH" ;;
    *urlopen*) exit "$NO_INDEX" ;;
    *"-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
esac
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def set_up(tmp_path: Path, **answers: int) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the set-up script with a Python that only logs. Answers are exit codes, 0 for yes."""
    python = executable(tmp_path / "python", FAKE_PYTHON)
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\nexit {answers.pop('driver', 1)}\n")
    log = tmp_path / "log"
    defaults = {"OLD": 0, "NO_TORCH": 0, "NO_INDEX": 0}
    environment = {
        **os.environ,
        **{name: str(code) for name, code in (defaults | answers).items()},
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(python),
        "TORCH_INDEX": "https://torch.invalid/cpu",
        "LOG": str(log),
    }
    command = ["sh", "scripts/setup.sh", str(tmp_path / "venv")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, log.read_text()


def pip_line(log: str) -> str:
    return next(line for line in log.splitlines() if line.startswith("-m pip install"))


def test_setup_without_a_driver_pins_the_cpu_build(tmp_path: Path) -> None:
    done, log = set_up(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-c constraints.txt" in pip_line(log)
    assert "--extra-index-url https://torch.invalid/cpu" in pip_line(log)
    assert "--system-site-packages" not in log


def test_setup_does_not_ask_pip_for_an_index_that_cannot_be_reached(tmp_path: Path) -> None:
    done, log = set_up(tmp_path, NO_INDEX=1)
    assert done.returncode == 0, done.stderr
    assert "torch.invalid" not in pip_line(log)
    assert "-c constraints.txt" in pip_line(log)


def test_setup_with_a_driver_uses_the_torch_that_is_there(tmp_path: Path) -> None:
    done, log = set_up(tmp_path, driver=0)
    assert done.returncode == 0, done.stderr
    assert "-m venv --system-site-packages" in log
    assert "constraints" not in pip_line(log) and "torch.invalid" not in pip_line(log)


def test_setup_with_a_driver_and_no_torch_installs_one_with_cuda(tmp_path: Path) -> None:
    done, log = set_up(tmp_path, driver=0, NO_TORCH=1)
    assert done.returncode == 0, done.stderr
    assert "--system-site-packages" not in log
    assert "constraints" not in pip_line(log)


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    done, log = set_up(tmp_path, OLD=1)
    assert done.returncode == 1
    assert "Python >= 3.10" in done.stderr
    assert "-m venv" not in log


def planned(*arguments: str) -> str:
    """Return the commands that make would run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "test", "gpu-test", "bench", "lint", "types"])
def test_every_target_sets_itself_up_once(target: str, tmp_path: Path) -> None:
    assert "scripts/setup.sh" in planned(target, f"VENV={tmp_path}")
    (tmp_path / ".ready").touch()
    assert "scripts/setup.sh" not in planned(target, f"VENV={tmp_path}")


def test_ci_runs_tests_lint_and_types() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.findall(r"^make (\w+)$", script.read_text(), re.MULTILINE) == ["test", "lint", "types"]


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{tilestep.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_project_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


def test_the_readme_s_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_readme_names_every_rule() -> None:
    words = (
        (ROOT / "README.md")
        .read_text()
        .lower()
        .replace("schedule-free sgd and adamw", "schedulefreesgd, schedulefreeadamw")
    )
    assert [name for name in tilestep.registry if not re.search(rf"\b{name.lower()}\b", words)] == []
