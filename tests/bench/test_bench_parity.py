"""benchmarks/parity.py: its formulas and rows, failures and hangs, and the tables of docs/parity.md."""

from __future__ import annotations

import json
from typing import Any

import parity
import parity_formulas as formulas
import parity_page
import pytest
import torch
from parity_layouts import LAYOUTS, GradientModel
from parity_rows import (
    ROWS,
    Row,
    build_optimizer,
    compare_updates,
    initial_weights,
    train,
    train_by_formula,
    update_error,
)
from scripts import run_function

import tilestep

CPU = torch.device("cpu")
PUBLISHED = [
    row for row in ROWS if isinstance(row, Row) and row.formula and row.dtype is torch.float32 and not row.needs
]


def test_the_tables_of_the_page_are_current() -> None:
    text = parity_page.PAGE.read_text()
    assert len(parity_page.BLOCK.findall(text)) >= 18
    assert parity_page.brought_up_to_date(text) == text, "run python benchmarks/parity.py --page"


def test_results_are_of_the_current_rows() -> None:
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
    ours, referee = train(row.ours, row, CPU, row.dtype), train_by_formula(row.formula, row)
    assert update_error(ours.weights, referee.weights) < allowed


MUON = next(row.shapes for row in PUBLISHED if row.name == "torch/Muon")


def test_formulas_are_those_of_torch_in_float64() -> None:
    """torch's code is independent of the formulas."""
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
        assert (
            update_error(train(expression, row, CPU, torch.float64).weights, train_by_formula(formula, row).weights)
            < 1e-12
        )


def test_another_rule_has_a_large_error_and_is_named() -> None:
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
    found = compare_updates(row, CPU)
    assert found["ours_error"] < 1e-5 < 1e-2 < found["theirs_error"] and not found["equal_bits"]
    assert parity_page.difference_text(found).startswith("decays in the gradient (to ")
    same = compare_updates(Row("", row.ours, "torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)", wanted), CPU)
    assert same["theirs_error"] < 1e-5 and parity_page.difference_text(same) == ""


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_every_optimizer_of_a_layout_can_be_made(row: Any, one_rank: None) -> None:
    model = GradientModel(initial_weights(row.shapes, torch.float32, CPU))
    optimizer = build_optimizer(row.ours, list(model.parameters()), model=model, mesh=None)
    assert isinstance(optimizer, tilestep.Optimizer | tilestep.ShardedOptimizer)


def test_missing_libraries_and_errors_are_told_apart() -> None:
    missing = parity.run_row(
        Row("", "tilestep.AdamW(params)", "no_such_library.AdamW(params)", formulas.adam(1e-3)), CPU
    )
    assert missing["missing"] == "no_such_library" and parity_page.failure_text(missing) == "not installed here"
    failing = parity.run_row(Row("", "tilestep.AdamW(params)", "torch.optim.AdamW(params, lr=-1.0)"), CPU)
    assert parity_page.failure_text(failing) == "fails: ValueError: Invalid learning rate: -1.0"
    skipped = parity.run_row(Row("", "", "", needs="cuda"), CPU)
    assert parity_page.failure_text(skipped) == "needs a GPU"


def rows_of_two_ranks(names: list[str]) -> dict[str, Any]:
    """In a process that can be forked: new interpreters would take twenty seconds of a core."""
    found: dict[str, Any] = {}
    parity.run_rank = run_rank_that_ends
    parity.run_layouts(names, 2, float("inf"), found.__setitem__, "fork")
    return found


def test_rows_of_two_ranks_run_on_after_ranks_that_end() -> None:
    names = ["fsdp2/AdamW", "tp/Muon", "zero/AdamW"]
    found = run_function(rows_of_two_ranks, names)
    assert found["fsdp2/AdamW"]["ours"] == found["zero/AdamW"]["ours"] == {"bits": True, "error": 0.0}
    assert "error" in found["fsdp2/AdamW"]["theirs"]
    assert found["tp/Muon"] == {"failure": "ranks hang or end"} and list(found) == names


def run_rank_that_ends(rank: int, ranks: int, folder: str, names: list[str], until: float) -> None:
    """End when the second row begins."""
    import parity_layouts

    def end_at_tensor_parallel(row: Any, device: torch.device) -> dict[str, Any]:
        if row.layout == "tp":
            raise SystemExit(1)
        return compare(row, device)

    compare, parity_layouts.compare = parity_layouts.compare, end_at_tensor_parallel
    parity_layouts.run_rank(rank, ranks, folder, names, until)


def test_rows_are_selected_by_name_or_by_the_part_before_the_slash() -> None:
    names = ["tp/AdamW", "tp/Muon", "torch/Muon"]
    assert parity.select(names, "") == names
    assert parity.select(names, "tp") == names[:2] and parity.select(names, "torch/Muon,tp/AdamW") == [
        names[0],
        names[2],
    ]
    with pytest.raises(SystemExit, match="no row is called Muon"):
        parity.select(names, "Muon")
