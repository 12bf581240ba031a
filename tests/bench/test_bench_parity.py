"""benchmarks/parity.py: its referees and rows, what it says of them, and docs/parity.md, made of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity
import parity_formulas as formulas
import parity_page
import pytest
import torch
from parity_layouts import LAYOUTS, Given
from parity_rows import ROWS, Row, apart, built, drawn, moved, refereed, trained

import tilestep

CPU = torch.device("cpu")
PUBLISHED = [
    row for row in ROWS if isinstance(row, Row) and row.formula and row.dtype is torch.float32 and not row.needs
]


def test_the_page_is_that_of_the_results() -> None:
    text = parity_page.PAGE.read_text()
    assert len(parity_page.BLOCK.findall(text)) >= 18
    assert parity_page.brought_up_to_date(text) == text, "run python benchmarks/parity.py --page"


def test_the_results_are_those_of_the_rows_as_they_are() -> None:
    seen = set()
    for path in parity_page.RESULTS.glob("parity_*.json"):
        for name, found in json.loads(path.read_text())["rows"].items():
            assert found["expressions"] == parity.EXPRESSIONS[name], name
            seen.add(name)
    assert seen == set(parity.EXPRESSIONS)


def test_every_row_is_in_a_table_of_the_page() -> None:
    tables = set(parity_page.BLOCK.findall(parity_page.PAGE.read_text()))
    assert {name.partition("/")[0] for name in parity.EXPRESSIONS} <= tables


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_tilestep_follows_each_published_formula(row: Row) -> None:
    coarse = "state_dtype" in row.ours
    allowed = (0.6 if "int4" in row.ours else 0.1) if coarse else 0.1 if row.shapes is MUON else 1e-5
    assert apart(trained(row.ours, row, CPU, row.dtype).weights, refereed(row.formula, row).weights) < allowed


MUON = next(row.shapes for row in PUBLISHED if row.name == "torch/Muon")


def test_formulas_are_those_of_torch_in_float64() -> None:
    """They are written by other people: both would have to be wrong alike."""
    options = "lr=1e-3, weight_decay=0.1"
    cases = {
        f"torch.optim.AdamW(params, {options})": formulas.adam(1e-3, weight_decay=0.1),
        f"torch.optim.Adam(params, {options})": formulas.adam(1e-3, weight_decay=0.1, decay="in the gradient"),
        f"torch.optim.SGD(params, {options}, momentum=0.9)": formulas.sgd(1e-3, 0.9, 0.1),
        "torch.optim.Adagrad(params, lr=1e-3)": formulas.adagrad(1e-3),
        "torch.optim.RMSprop(params, lr=1e-3)": formulas.rmsprop(1e-3, 0.99, 1e-8),
    }
    for expression, formula in cases.items():
        row = Row("", "", expression, formula)
        assert apart(trained(expression, row, CPU, torch.float64).weights, refereed(formula, row).weights) < 1e-12


def test_another_rule_is_another_update_and_is_named() -> None:
    wanted = formulas.adam(1e-3, weight_decay=0.1)
    row = Row(
        "",
        "tilestep.AdamW(params, lr=1e-3, weight_decay=0.1)",
        "torch.optim.Adam(params, lr=1e-3, weight_decay=0.1)",
        wanted,
        (
            ("decays after the update", formulas.adam(1e-3, weight_decay=0.1, decay="after")),
            ("decays in the gradient", formulas.adam(1e-3, weight_decay=0.1, decay="in the gradient")),
        ),
    )
    found = moved(row, CPU)
    assert found["ours_error"] < 1e-5 < 1e-2 < found["theirs_error"] and not found["equal_bits"]
    assert parity_page.what_instead(found).startswith("decays in the gradient (to ")
    same = moved(Row("", row.ours, "torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)", wanted), CPU)
    assert same["theirs_error"] < 1e-5 and parity_page.what_instead(same) == ""


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_every_optimizer_of_a_layout_can_be_made(row: Any, one_rank: None) -> None:
    model = Given(drawn(row.shapes, torch.float32, CPU))
    optimizer = built(row.ours, list(model.parameters()), model=model, mesh=None)
    assert isinstance(optimizer, tilestep.Optimizer | tilestep.ShardedOptimizer)


def test_a_library_that_is_not_installed_and_one_that_fails_are_told_apart() -> None:
    missing = parity.one_device(
        Row("", "tilestep.AdamW(params)", "no_such_library.AdamW(params)", formulas.adam(1e-3)), CPU
    )
    assert missing["missing"] == "no_such_library" and parity_page.failed(missing) == "not installed here"
    failing = parity.one_device(Row("", "tilestep.AdamW(params)", "torch.optim.AdamW(params, lr=-1.0)"), CPU)
    assert parity_page.failed(failing) == "fails: ValueError: Invalid learning rate: -1.0"
    skipped = parity.one_device(Row("", "", "", needs="cuda"), CPU)
    assert parity_page.failed(skipped) == "needs a GPU"


def test_rows_of_two_ranks_and_one_that_no_rank_returns_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(parity, "work", ends_at_tensor_parallel)
    names = ["fsdp2/AdamW", "tp/Muon", "zero/AdamW"]
    parity.on_ranks(names, 2, float("inf"), found.__setitem__)
    assert found["fsdp2/AdamW"]["ours"] == found["zero/AdamW"]["ours"] == {"bits": True, "error": 0.0}
    assert "error" in found["fsdp2/AdamW"]["theirs"]
    assert found["tp/Muon"] == {"failure": "ranks hang or end"} and list(found) == names


def ends_at_tensor_parallel(rank: int, ranks: int, folder: str, names: list[str], until: float) -> None:
    """Ranks that end when the second row begins."""
    import parity_layouts

    def compared(row: Any, device: torch.device) -> dict[str, Any]:
        if row.layout == "tp":
            raise SystemExit(1)
        return measured(row, device)

    measured, parity_layouts.compared = parity_layouts.compared, compared
    parity_layouts.work(rank, ranks, folder, names, until)


def test_names_are_whole_or_the_part_before_the_slash() -> None:
    names = ["tp/AdamW", "tp/Muon", "torch/Muon"]
    assert parity.chosen(names, "") == names
    assert parity.chosen(names, "tp") == names[:2] and parity.chosen(names, "torch/Muon,tp/AdamW") == [
        names[0],
        names[2],
    ]
    with pytest.raises(SystemExit, match="no row is called Muon"):
        parity.chosen(names, "Muon")
