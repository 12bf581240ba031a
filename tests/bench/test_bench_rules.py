"""The `rules` section: what a step must move, and every rule measured beside torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import rule_steps
import torch
from rule_steps import run_rules
from soap_steps import LOOP, SoapLoop
from speedups import plot_speedups as plot
from traffic import step_bytes

import tilestep
from tilestep.bench.results import Result
from tilestep.bench.sections import OURS, Settings
from tilestep.bench.tune import has_matrix_work

CPU = torch.device("cpu")


@pytest.fixture
def settings() -> Settings:
    return Settings(CPU, quick=True, say=lambda line: None)


@pytest.mark.parametrize(
    ("rule", "options", "numbers"),
    [
        ("SGD", {}, 3),  # parameter read and written, gradient read
        ("SGD", {"momentum": 0.9}, 5),
        ("Lion", {}, 5),
        ("AdamW", {}, 7),
        ("AdamW", {"amsgrad": True}, 9),
    ],
)
def test_bytes_of_elementwise_rules(rule: str, options: dict[str, object], numbers: int) -> None:
    parameters = [torch.zeros(30, 4, requires_grad=True), torch.zeros(7, requires_grad=True)]
    assert step_bytes(tilestep.Optimizer(parameters, rule, **options)) == 127 * 4 * numbers


def test_bytes_of_a_reducing_rule_are_those_of_both_phases() -> None:
    parameters = [torch.zeros(100, requires_grad=True)]
    # Norms: reads all four, and keeps both moments, exact in float32. Update: reads parameter and moments, writes one.
    assert step_bytes(tilestep.Optimizer(parameters, "LAMB")) == 100 * 4 * (6 + 4)


ADAMW = tilestep.registry["AdamW"]


@pytest.mark.parametrize(
    ("composed", "numbers"),
    [
        (tilestep.decoupled_weight_decay(ADAMW, 0.1), 7),  # nothing beside AdamW's: parameter and moments, the gradient
        (tilestep.coupled_weight_decay(ADAMW, 0.1), 7),
        (tilestep.ema(ADAMW, 0.9), 7 + 2),  # the average, read and written
        (tilestep.lookahead(ADAMW, 5, 0.5), 7 + 2),
        (tilestep.lookahead(tilestep.ema(ADAMW, 0.9), 5, 0.5), 7 + 2 + 2),
        (tilestep.centralize(ADAMW), 7 + 1),  # the gradient once more, for its means
        (tilestep.centralize(tilestep.ema(ADAMW, 0.9)), 7 + 1 + 2),
        # A size known after all elements: moments are kept and read again with the parameter, the gradient is not.
        (tilestep.clip_update(ADAMW, 1.0), 6 + 3 + 1),
        (tilestep.ema(tilestep.clip_update(ADAMW, 1.0), 0.9), 6 + 3 + 1 + 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_composed_rules_move_what_they_touch_and_no_more(composed: tilestep.Rule, numbers: int) -> None:
    parameters = [torch.zeros(30, 4, requires_grad=True)]
    assert step_bytes(tilestep.Optimizer(parameters, composed)) == 120 * 4 * numbers


def test_matrix_work_is_known() -> None:
    matrix = [torch.zeros(4, 6, requires_grad=True)]
    assert has_matrix_work(tilestep.Optimizer(matrix, "Muon"))
    assert not has_matrix_work(tilestep.Optimizer(matrix, "AdamW"))


def test_rules_are_held_against_the_fastest_of_torch(settings: Settings, tmp_path: Path) -> None:
    result = run_rules(settings, ["Lion", "AdamW"])
    assert [group.tags["rule"] for group in result.groups] == ["AdamW", "Lion"] * 2
    for group in result.groups:
        ours = group.row(OURS)
        assert ours is not None and ours.failure is None and ours.wall is not None
        torch_s = [row.wall.median for row in group.rows if row.contender.startswith("torch") and row.wall]
        assert len(torch_s) == (3 if group.tags["rule"] == "AdamW" else 0)
        assert ours.speedup == (pytest.approx(min(torch_s) / ours.wall.median) if torch_s else None)
    assert Result.load(result.save(tmp_path)) == result
    plot(result, tmp_path / "rules.png")
    assert (tmp_path / "rules.png").stat().st_size > 1000


def test_muon_is_measured_with_adamw_for_the_rest(settings: Settings) -> None:
    (group,) = run_rules(settings, ["Muon"]).groups
    assert group.title.startswith("Muon for 14 matrices and AdamW for 7 other tensors")
    assert [row.failure for row in group.rows] == [None] * 3


def test_rules_for_matrices_alone_are_left_out_with_a_note(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_steps, "MUON", "")  # as a rule that the benchmark does not name
    result = run_rules(settings, ["Muon", "SGD"])
    assert result.notes == ["left out: Muon works on matrices only"]
    assert {group.tags["rule"] for group in result.groups} == {"SGD"}
    assert all(row.failure is None for group in result.groups for row in group.rows)


def test_soap_is_measured_with_and_without_turns(settings: Settings) -> None:
    plain, turning = run_rules(settings, ["SOAP"]).groups
    assert plain.title.startswith("SOAP, steps that turn no bases, small llama: 21")
    assert turning.title.startswith("SOAP, mean of 10 steps of which one turns the bases")
    for group in (plain, turning):
        ours, loop = group.row(OURS), group.row(LOOP)
        assert ours is not None and ours.failure is None and ours.wall is not None
        assert loop is not None and loop.failure is None and loop.wall is not None
        assert ours.speedup == pytest.approx(loop.wall.median / ours.wall.median)


def test_the_loop_that_soap_is_held_against_does_what_soap_does() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 6), (5, 5), (7, 30), (4,)]
    mine = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [param.detach().clone().requires_grad_() for param in mine]
    given = {"precondition_frequency": 3, "max_precond_dim": 8}
    optimizer, loop = tilestep.Optimizer(mine, "SOAP", **given), SoapLoop(theirs, frequency=3, limit=8)
    for _ in range(9):
        for left, right in zip(mine, theirs):
            left.grad = torch.randn(left.shape, generator=generator)
            right.grad = left.grad.clone()
        optimizer.step()
        loop.step()
    for left, right in zip(mine, theirs):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


def test_an_unknown_rule_is_an_error(settings: Settings) -> None:
    with pytest.raises(ValueError, match="'Adaw'"):
        run_rules(settings, ["Adaw"])
