"""First steps of rules: each is said and kept as it is measured, and a later run adds what is missing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import first_step
import pytest
import torch
from first_step import run_compile

import tilestep
from bench import app
from tilestep.bench.results import Result
from tilestep.bench.sections import Settings

CPU = torch.device("cpu")


class Processes:
    """Figures without the processes that give them; one name fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = ""

    def __call__(self, function: object, arguments: Sequence[Any], variables: dict[str, str], timeout: float) -> float:
        name, count, device = arguments
        assert function is first_step.first_step and (count, device) == (10, CPU)
        assert set(variables) == set(first_step.CACHE_VARIABLES) and len(set(variables.values())) == 3
        self.asked.append(name.removeprefix("rule "))
        if self.asked[-1] == self.fails:
            raise RuntimeError("ValueError: not\n here")
        return 1000.0 + len(self.asked)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(first_step, "in_fresh_process", made)
    return made


def test_each_rule_is_said_and_kept_as_it_is_done(processes: Processes) -> None:
    said: list[str] = []
    kept: list[Result] = []
    settings = Settings(CPU, quick=True, say=said.append)
    result = run_compile(settings, ["SGD", "Lion"], keep=lambda result: kept.append(copy.deepcopy(result)))
    assert processes.asked == ["SGD", "SGD", "Lion", "Lion"]
    assert [line.rpartition(";")[0] for line in said] == [
        "compile: rule SGD, 10 parameters: empty caches 1,001 ms, filled caches 1,002 ms",
        "compile: rule Lion, 10 parameters: empty caches 1,003 ms, filled caches 1,004 ms",
    ]
    (before,), (after,) = kept[0].groups, kept[1].groups
    assert before.rows == after.rows[:2] and kept[1] == result
    assert [row.contender for row in after.rows[2:]] == ["rule Lion, empty caches", "rule Lion, filled caches"]


def test_what_is_missing_or_failed_is_added(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(CPU, quick=True, say=lambda line: None)
    processes.fails = "Lion"
    first = run_compile(settings, ["SGD", "Lion"])
    assert [row.failure for row in first.groups[0].rows] == [None, None, "ValueError: not here"]
    processes.asked.clear()
    processes.fails = ""
    both = run_compile(settings, ["SGD", "Lion", "Tiger"], known=copy.deepcopy(first))
    assert processes.asked == ["Lion", "Lion", "Tiger", "Tiger"]
    (group,) = both.groups
    assert group.rows[:2] == first.groups[0].rows[:2]
    assert [row.contender for row in group.rows] == [
        f"rule {name}, {caches} caches" for name in ("SGD", "Lion", "Tiger") for caches in ("empty", "filled")
    ]
    assert all(row.failure is None for row in group.rows)


def test_figures_with_other_build_threads_are_not_mixed(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(CPU, quick=True, say=lambda line: None)
    monkeypatch.setattr(first_step, "build_threads", lambda: 1)
    first = run_compile(settings, ["SGD"])
    assert first.environment["build threads"] == "1" and "1 at a time" in first.notes[0]
    monkeypatch.setattr(first_step, "build_threads", lambda: 8)
    assert run_compile(settings, ["SGD"]).environment["build threads"] == "8"
    with pytest.raises(ValueError, match="figures of build threads 1 cannot be added to with build threads 8"):
        run_compile(settings, ["SGD", "Lion"], known=first)


def test_no_rule_is_begun_that_would_not_end_in_time(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(first_step.time, "monotonic", lambda: float(next(clock)))
    result = run_compile(Settings(CPU, quick=True, say=lambda line: None), ["SGD", "Lion", "Tiger"], seconds=60)
    assert processes.asked == ["SGD", "SGD"]
    assert result.notes[1:] == [
        f"left out, rule {name}, 10 parameters: it would not have ended within 60 s" for name in ("Lion", "Tiger")
    ]


def test_the_command_goes_on_where_it_has_ended(processes: Processes, tmp_path: Path) -> None:
    for rules in ("SGD", "SGD,Lion"):
        with pytest.raises(SystemExit) as ended:
            app(["compile", "--quick", "--device", "cpu", "--rules", rules, "--add", "--out", str(tmp_path)])
        assert ended.value.code == 0
    assert processes.asked == ["SGD", "SGD", "Lion", "Lion"]
    assert len(Result.load(tmp_path / "compile.json").groups[0].rows) == 4


def test_a_run_that_is_stopped_has_written_what_it_had(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: Any) -> float:
        if len(processes.asked) == 2:
            raise KeyboardInterrupt
        return processes(*arguments)

    monkeypatch.setattr(first_step, "in_fresh_process", stopped)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        app(["compile", "--quick", "--device", "cpu", "--rules", "SGD,Lion", "--out", str(tmp_path)])
    (group,) = Result.load(tmp_path / "compile.json").groups
    assert [row.contender for row in group.rows] == ["rule SGD, empty caches", "rule SGD, filled caches"]


def test_all_rules_are_beside_what_libraries_take_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def took(function: object, arguments: tuple[str, int, torch.device], *rest: object) -> float:
        asked.append(arguments[0])
        return 1.0

    monkeypatch.setattr(first_step, "in_fresh_process", took)
    run_compile(Settings(CPU, quick=True, say=lambda line: None), ["all"])
    assert asked[::2] == [*(f"rule {name}" for name in tilestep.registry), first_step.LIBRARIES]
    assert first_step.first_step(first_step.LIBRARIES, 3, CPU) > 0
