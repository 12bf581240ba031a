"""The project around the package: set-up, targets, documents."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from traffic import step_bytes

import tilestep

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]


def test_every_helper_is_in_the_index() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "tests/helpers/README.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "tests/helpers").glob("*.py"))


def test_every_script_and_result_is_in_the_index_of_benchmarks() -> None:
    """A script has a row, a module that scripts import has none; results say subject, device and GPUs."""
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+\.py)` \|", index, re.MULTILINE)
    scripts = {path.name for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert sorted(rows) == sorted(scripts)
    named = re.findall(r"`([\w/*.-]+\.(?:json|md))`", index)
    results = [str(path.relative_to(folder / "results")) for path in (folder / "results").rglob("*.[jm][sd]*")]
    assert len(results) > 40 and not [name for name in results if not any(fnmatch(name, each) for each in named)]
    assert not [each for each in named if not any(fnmatch(name, each) for name in results)]
    alone = [name for name in results if "/" not in name and name != "quality.json"]
    assert not [
        name for name in alone if not re.fullmatch(r"[a-z_]+\d?_((cpu|h100|h200)_)?\d(_[0-9a-f]{7})?\.json", name)
    ]


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


def set_up(tmp_path: Path, torch_version: str = "", **answers: int) -> tuple[subprocess.CompletedProcess[str], str]:
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
        "TORCH": torch_version,
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


@pytest.mark.parametrize("driver", [0, 1])
def test_setup_takes_the_torch_it_is_told_to(driver: int, tmp_path: Path) -> None:
    done, log = set_up(tmp_path, torch_version="2.11.0", driver=driver)
    assert done.returncode == 0, done.stderr
    assert "torch==2.11.0" in pip_line(log) and "constraints" not in pip_line(log)
    assert "--system-site-packages" not in log


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


@pytest.mark.parametrize(
    "target", ["demo", "test", "gpu-test", "bench", "lint", "types", "docs", "examples", "dist", "test-frameworks"]
)
def test_every_target_sets_itself_up_once(target: str, tmp_path: Path) -> None:
    assert "scripts/setup.sh" in planned(target, f"VENV={tmp_path}")
    (tmp_path / ".ready").touch()
    extra = {"docs": "docs", "test-frameworks": "frameworks"}.get(target)
    if extra:  # what only this target needs comes with its first run
        assert f"EXTRAS=dev,{extra} sh scripts/setup.sh" in planned(target, f"VENV={tmp_path}")
        (tmp_path / f".ready-{extra}").touch()
    assert "scripts/setup.sh" not in planned(target, f"VENV={tmp_path}")


def test_ci_runs_tests_lint_types_site_and_wheel() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    targets = re.findall(r"^make ([\w-]+)$", script.read_text(), re.MULTILINE)
    assert targets == ["test", "test-frameworks", "lint", "types", "docs", "dist"]


def test_the_version_comes_from_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'path = "src/tilestep/_version.py"' in project
    written = [
        path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py") if "__version__ =" in path.read_text()
    ]
    assert written == [Path("tilestep/_version.py")]
    assert importlib.metadata.version("tilestep") == tilestep.__version__


def test_importing_it_imports_little_else() -> None:
    """Nothing of torch's that `import torch` leaves out: distributed checkpoints take longer than all of tilestep."""
    code = "import sys, torch; first = {*sys.modules}; import tilestep; print(*{*sys.modules} - first)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    others = {name for name in said.split() if name.partition(".")[0] not in {"tilestep", *sys.stdlib_module_names}}
    assert {name.partition(".")[0] for name in others} <= {"filelock", "platformdirs"}, sorted(others)
    assert "LoadPlanner" in dir(tilestep)


def test_the_newest_changes_are_those_of_this_version() -> None:
    newest, *older = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.match(rf"{re.escape(tilestep.__version__)}(, not released yet| \(\d{{4}}-\d\d-\d\d\))$", newest)
    assert all(re.match(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)$", heading) for heading in older)


def test_the_stated_versions_are_those_of_the_pins() -> None:
    """The table of supported versions names what CI installs, and the least that the package asks for."""
    page = (ROOT / "docs" / "guide" / "optimizers.md").read_text()
    table = page[page.index("## Supported versions") :]
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    least = re.search(r'"torch>=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned and f"torch {pinned[1]}" in table
    assert least and f"torch {least[1]}" in table and f"torch >= {least[1]}" in (ROOT / "README.md").read_text()


def test_an_issue_is_asked_for_the_output_of_tilestep_version() -> None:
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert templates and all("tilestep version" in template.read_text() for template in templates)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_project_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^```[\s\S]*?^```$", "", document.read_text(), flags=re.MULTILINE)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    """About 300 words of prose, one table, two pictures at most, two commands, a few links."""
    prose = re.sub(r"^```[\s\S]*?^```$|^\|.*$|\]\([^)]*\)", "", readme(), flags=re.MULTILINE)
    assert 200 <= len(prose.split()) <= 430
    assert len(re.findall(r"^\|[-|]+\|$", readme(), re.MULTILINE)) == 1
    assert 1 <= len(re.findall(r"!\[", readme())) <= 2
    assert re.findall(r"^    (make \w+)", readme(), re.MULTILINE) == ["make demo", "make test"]
    assert len(re.findall(r"(?<!!)\[[^]]+\]\(", readme())) <= 10


def measured(card: str, title: str, contender: str) -> float:
    """Median wall milliseconds of a step in a committed result of a card."""
    files = {"H200": "h200/step.json", "H100": "step_h100_1.json"}
    groups = json.loads((ROOT / "benchmarks" / "results" / files[card]).read_text())["groups"]
    (rows,) = [group["rows"] for group in groups if re.fullmatch(title, group["title"])]
    (row,) = [row for row in rows if row["contender"] == contender]
    return row["wall"]["median"]


TITLES = {
    "2,000 bf16 tensors, 131 M elements": r"clip \+ AdamW, random: .*",
    "219 bf16 tensors, 1.19 B elements": r"clip \+ AdamW, llama: 219 bfloat16 .*",
    "219 fp32 tensors, 1.19 B elements": r"clip \+ AdamW, llama: 219 float32 .*",
    "5,000 bf16 tensors of 1,024": r"clip \+ AdamW, small: .*",
}


@pytest.mark.parametrize("document", ["README.md", "docs/measurements.md"])
def test_the_step_times_are_those_of_the_committed_results(document: str) -> None:
    """Columns are named by the contender, and by the card where the table has two."""
    text = (ROOT / document).read_text()
    header, *lines = re.findall(r"^\|.*\|$", text[text.index("| torch default") - 20 :], re.MULTILINE)
    columns = [cell.strip().partition(", ") for cell in header.strip("|").split("|")[1:]]
    checked = 0
    for line in lines[1:]:
        work, *figures = (cell.strip().strip("*") for cell in line.strip("|").split("|"))
        title = TITLES.get(work.removeprefix("clip + AdamW, "))
        for (contender, _, card), figure in zip(columns, figures) if title else ():
            digits = len(figure.partition(".")[2])
            name = {"torch default": "torch foreach"}.get(contender, contender)
            assert f"{measured(card or 'H200', title, name):.{digits}f}" == figure, (work, contender, card)
            checked += 1
    assert checked >= 9


def test_the_readme_s_code_runs(tmp_path: Path) -> None:
    """From a file, since rules are traced with their source at hand; its rule is the one that is measured."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "readme_code.py"
    path.write_text("\n".join(blocks))
    names: dict[str, Any] = {"__name__": "readme_code"}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    assert names["optimizer"].grad_norm > 0
    measured = (ROOT / "benchmarks" / "paper_rules.py").read_text()
    assert blocks[0][blocks[0].index("    beta1") : blocks[0].index("\n\n\nmodel")] in measured
    parameters = [torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)]
    assert f"{step_bytes(tilestep.Optimizer(parameters, names['grams'])) / 1000:g} bytes" in readme()


def test_the_list_of_optimizers_names_every_rule() -> None:
    page = (ROOT / "docs" / "guide" / "optimizers.md").read_text()
    listed = re.findall(r"[\w]+", page[page.index("## Which") : page.index("`tilestep show")])
    assert sorted(set(tilestep.registry) & set(listed)) == sorted(tilestep.registry)
    torchs = [name for name in tilestep.registry if hasattr(torch.optim, name)]
    words = {16: "sixteen", 17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty", 21: "twenty-one"}
    assert f"and {words[len(tilestep.registry) - len(torchs)]} others" in readme()


def test_the_readme_s_times_of_a_paper_s_rule_are_those_of_the_result() -> None:
    rules = json.loads((ROOT / "benchmarks" / "results" / "paper_rules_h100_1.json").read_text())["rules"]
    said = re.search(r"a step takes ([\d.]+) ms on an H100, its authors' code ([\d.]+)\.", readme())
    assert said and said.groups() == tuple(
        f"{rules['Grams'][who]['wall']:.3g}" for who in ("tilestep", "authors' code")
    )
    page = (ROOT / "docs" / "measurements.md").read_text().replace("\n", " ")
    for name, row in rules.items():
        times = [f"{row[who]['wall']:.3g}" for who in ("tilestep", "authors' code")]
        assert re.search(rf"{name} (with AdamW |takes )?{times[0]} (ms in place )?of {times[1]}", page), name
    for row in rules.values():  # the same update, by both
        assert max(row["error of the update"].values()) < (0.2 if row is rules["AdaMuon"] else 1e-4)
