"""Documents: their code runs, and what they show of the generated code is what is generated."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from module_files import load

import tilestep

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "docs_code.py"


@pytest.fixture(scope="module")
def docs_code() -> ModuleType:
    return load(SCRIPT)


def test_the_code_for_rule_authors_runs(tmp_path: Path) -> None:
    """From a file, since rules are traced with their source at hand."""
    page = (ROOT / "docs" / "rules.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    path = tmp_path / "rules_page.py"
    path.write_text("\n".join(blocks))
    names: dict[str, Any] = {"__name__": "rules_page"}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    for name in ("averaged_descent", "trusting"):
        optimizer = tilestep.Optimizer(names["model"].parameters(), names[name])
        optimizer.step()


PAGES = ["start.md", "moving.md", *(f"guide/{path.name}" for path in sorted((ROOT / "docs" / "guide").glob("*.md")))]


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](inputs).relu())


def loop() -> dict[str, Any]:
    """What pages about a training loop leave to the reader's."""
    model = Layers()
    return {
        "torch": torch, "tilestep": tilestep, "model": model, "batches": torch.randn(10, 4, 8),
        "train": lambda batch: model(batch).square().sum().backward(),
        "send": lambda *_: None, "writer": mock.Mock(), "wandb": mock.Mock(),
    }  # fmt: skip


LOOPS = ("guide/changes.md", "guide/statistics.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_guide_runs(page: str, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text()
    names: dict[str, Any] = loop() if page in LOOPS else {}
    for block in re.findall(r"^```python.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "--8<--" not in block:  # an example's own text, which tests/test_examples.py runs
            exec(compile(block, page, "exec"), names)
    assert "optimizer" in names or "```python\n" not in text


def test_the_table_of_8_bit_optimizers_is_that_of_the_results() -> None:
    results = ROOT / "benchmarks" / "results"
    curves = json.loads((results / "quality_training_h200_1.json").read_text())["curves"]
    rows = json.loads((results / "formats_h100_1.json").read_text())["rows"]
    formats = {row["format"]: row for row in rows if row["tensors"] == 219 and not {"rule", "parameters"} & set(row)}
    page = (ROOT / "docs" / "guide" / "8-bit.md").read_text()
    lines = re.findall(r"^\|(.* = .*)\|$", page, re.MULTILINE)
    table = [[cell.strip() for cell in line.replace(" = ", "|").split("|")] for line in lines]
    runs = ("float32", "int8 states", "", "int8 states, int8 masters")
    runs += ("int8 states, int8 masters, stochastic", "bfloat16 weights, to nearest")
    kinds = ("", "int8 states", "int8 states, float32 masters", "int8 states, int8 masters")
    kinds += ("stochastic int8 states, int8 masters", "bfloat16 states")
    assert len(table) == len(runs) == len(kinds)
    for (_, parts, total, loss, milliseconds), run, kind in zip(table, runs, kinds):
        *wide, state = map(float, parts.split(" + "))
        assert f"{sum(wide) + state:g}" == total
        if kind:  # codes and scales, or two states of 16 bits, and the master
            assert math.isclose(state + wide[2], formats[kind]["state, bytes an element"], abs_tol=0.005)
        ends = [statistics.fmean(list(curve.values())[-2:]) for curve in curves[run]] if run else []
        assert loss == (f"{statistics.fmean(ends):.3f}" if run else "")
        assert max(ends, default=0) - min(ends, default=0) < 0.008
        assert milliseconds == (f"{formats[kind]['ms']:.2f}" if wide[0] == 2 else "")


@pytest.mark.parametrize(
    ("results", "page"), [("experts_trainer", "frameworks/transformers.md"), ("park", "guide/setups.md")]
)
def test_pages_quote_the_results_that_there_are(results: str, page: str) -> None:
    """A page links every committed result, and has its ratios to two digits; without results it has no figures."""
    text = (ROOT / "docs" / page).read_text()
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{results}_*_[0-9].json"))
    assert set(re.findall(rf"\b{results}_\w+\.json(?=\))", text)) == {file.name for file in files}
    for file in files:
        found = json.loads(file.read_text())
        shares = [f"{100 * share:.0f}%" for share in found.get("share_of_link", {}).values()]
        times = [f"{times:.2g} times" for times in found.get("summary", {}).values()]
        assert shares or times
        assert [quoted for quoted in shares + times if quoted not in text] == []


def test_the_page_of_what_works_where_has_every_pair_that_is_refused() -> None:
    from tilestep.placement.combinations import REFUSED

    page = (ROOT / "docs" / "frameworks" / "matrix.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+) \|$", page[page.index("## What does not go together") :], re.MULTILINE
    )
    assert {(added, there): text for added, there, text in rows[1:]} == REFUSED


def test_every_page_is_in_the_site_s_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", navigation)) - {"index.md", "changelog.md", "contributing.md"}


def test_the_reference_has_every_public_name() -> None:
    """But named optimizers, which the site lists from the registry, and torch's own modules."""
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: tilestep\.(\w+)", pages, re.MULTILINE))
    assert set(tilestep.__all__) - named == {*tilestep.registry, "lr_scheduler", "swa_utils", "registry"}


def test_the_generated_code_is_current(docs_code: ModuleType) -> None:
    text = docs_code.PAGE.read_text()
    assert len(docs_code.BLOCK.findall(text)) >= 4
    assert docs_code.brought_up_to_date(text) == text, f"run python {SCRIPT.relative_to(ROOT)}"


def test_another_generator_would_be_noticed(docs_code: ModuleType) -> None:
    text = docs_code.PAGE.read_text()
    (backend, rule, dtype, name), *_ = docs_code.BLOCK.findall(text)
    start = text.index(f"<!-- generated: {backend} {rule} {dtype} {name} -->")
    end = text.index("\n```\n", start)
    assert docs_code.brought_up_to_date(text[:end] + "\nchanged" + text[end:]) == text


def test_the_table_of_composers_has_all_of_them() -> None:
    from tilestep.rules import compose

    page = (ROOT / "docs" / "rules.md").read_text()
    public = [name for name in (*compose.__all__, "adaptive_clip") if hasattr(tilestep, name)]
    assert [name for name in public if f"`{name}(" not in page] == []


def test_commands_that_documents_name_exist() -> None:
    from tilestep.cli import build_app

    known = {command.name or command.callback.__name__ for command in build_app().registered_commands}
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        named = set(re.findall(r"(?:^    |`)tilestep ([a-z][a-z0-9]*)", document.read_text(), re.MULTILINE))
        assert named <= known, document.name


def test_the_page_of_environment_variables_names_every_one_and_no_other() -> None:
    page = (ROOT / "docs" / "api" / "environment.md").read_text()
    package = Path(tilestep.__file__).parent
    read = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(
            r"""environ(?:\.get\(|\[)["'](\w+)|^_\w+ = "(TILESTEP_\w+)\"""", path.read_text(), re.MULTILINE
        )
    }
    names = {first or second for first, second in read}
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == {
        name for name in names if name == "CXX" or name.startswith("TILESTEP_")
    }


def test_the_nine_concepts_are_where_the_page_says() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| \*\w+\* \|.*\| `(\w+)` in `([\w./]+)` \|$", page, re.MULTILINE)
    package = Path(tilestep.__file__).parent
    missing = [
        name
        for name, path in rows
        if not re.search(rf"^(class|def) {name}\b", (package / path).read_text(), re.MULTILINE)
    ]
    assert len(rows) == 9 and missing == []


def test_the_table_of_folders_names_every_one_and_no_other() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page[page.index("## Where things are") :], re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    package = Path(tilestep.__file__).parent
    there = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == there - {"__init__.py"}


ADDED = """
import pathlib
import torch
import tilestep
from format_rows import ROWS, backend, check_kept, check_training
from tilestep.checking import check_rule
from tilestep.backends import registry as backends
from tilestep.backends.eager import EagerPasses

assert "{folder}" in tilestep.__file__
for verdict in check_rule(tilestep.registry["Signum"], interpret=False):
    assert verdict.passed, verdict
    if verdict.item == "C++, bfloat16 with tail":
        break
assert verdict.item == "C++, bfloat16 with tail"
for name in ("cpp", "eager"):
    with backend(name):
        check_kept(ROWS["tail"], few=True)
        check_training(ROWS["tail"], "AdamW")

backends.BACKENDS["cpu"] = backends.BACKENDS["xpu"]
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.tensor([1.0, -2.0, 0.0])
optimizer = tilestep.Signum([weight], lr=0.25, max_grad_norm=1.0)
optimizer.step()
assert weight.tolist() == [0.75, 1.25, 1.0]
segment = backends.passes_class(torch.device("cpu"))
assert segment.__name__ == "XpuPasses" and issubclass(segment, EagerPasses)

from tilestep.memory.mapped import MappedState
from tilestep.memory.offload import move_state
from tilestep.execution.lazily import lazily
from tilestep.optimizer.execution import AT_STEP
from tilestep.placement.together import Together


def stepped(change, **hyperparameters):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = change(weight, tilestep.AdamW([weight], lr=0.25, **hyperparameters))
    for number in (3.0, 3.0):
        weight.grad = torch.full((3,), number)
        optimizer.step()
    return weight, optimizer


wanted, plain = stepped(lambda weight, optimizer: optimizer)
lazy, optimizer = stepped(lambda weight, optimizer: lazily(optimizer))
assert not torch.equal(lazy, wanted) and type(optimizer) is tilestep.AdamW
assert optimizer.state[lazy]["step"] == 2 and torch.equal(lazy, wanted)
assert tilestep.placement.combinations.refusal("shard", optimizer.attached).startswith("updates of this optimizer wait")
folder = pathlib.Path("{folder}", "state")
folder.mkdir()
mapped, optimizer = stepped(
    lambda weight, optimizer: move_state(optimizer, MappedState(folder), "cpu", "in files")
)
kept = torch.from_file(str(folder / "0.state"), size=3)
assert torch.equal(mapped, wanted) and torch.equal(kept, plain.state[wanted]["exp_avg"])


class Twice:
    def add(self, values):
        values.mul_(2)


weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
optimizer = tilestep.Optimizer.__new__(tilestep.Optimizer)
optimizer.placement, optimizer.execution = Together(Twice()), AT_STEP
tilestep.Optimizer.__init__(optimizer, [weight], "SGD", lr=0.5, track_grad_norm=True)
optimizer.step()
assert abs(optimizer.grad_norm.item() - 6.0**0.5) < 1e-6, optimizer.grad_norm

from tilestep.execution.peaks import Peaks

model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
peaks = Peaks([list(layer.parameters()) for layer in model])
model(torch.ones(1, 2)).sum().backward()
assert peaks.of == {
    place: max(float(param.grad.abs().max()) for param in layer.parameters()) for place, layer in enumerate(model)
}
print("all added")
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="applies changes with git")
def test_what_the_page_adds_works(tmp_path: Path) -> None:
    """The changes of docs/how-it-works.md, applied to a copy of the package."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    section = page[page.index("## Adding a rule") : page.index("## Where things are")]
    changes = re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(changes) == 10
    shutil.copytree(Path(tilestep.__file__).parent, tmp_path / "src" / "tilestep")
    shutil.copytree(ROOT / "tests" / "helpers", tmp_path / "tests" / "helpers")
    for change in changes:
        text = re.sub(r"^$", " ", change[:-1], flags=re.MULTILINE) + "\n"  # editors take spaces off empty lines
        command = ["git", "apply", "--unidiff-zero", "-"]
        done = subprocess.run(command, input=text, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + text
    paths = [str(tmp_path / "src"), str(tmp_path / "tests" / "helpers")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    script = tmp_path / "added.py"
    script.write_text(ADDED.replace("{folder}", str(tmp_path)))
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all added", done.stdout + done.stderr
