"""The helper that runs checks on several ranks: a check that fails, or never ends well, is told by name and rank."""

from __future__ import annotations

import os
import random
import time
from types import SimpleNamespace
from typing import Any

import case_processes
import pytest
import rank_processes
import torch
import torch.distributed as dist
from rank_processes import all_pass, each_passes, run_on_ranks


def passes() -> None:
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value == dist.get_world_size() == int(os.environ["WORLD_SIZE"])


def fails_on_the_second_rank() -> None:
    assert dist.get_rank() == 0, "the second rank"


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def leaves_what_it_has_changed() -> None:
    os.environ["TILESTEP_OF_A_CHECK"] = os.environ.pop("HOME")
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


def begins_as_any_other() -> None:
    assert "TILESTEP_OF_A_CHECK" not in os.environ and "HOME" in os.environ and os.getcwd() != "/"
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled() and torch.get_num_threads() == 1
    drawn = torch.rand(()), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert drawn == (torch.rand(()), random.random())


def test_failures_say_where_and_what() -> None:
    failures = run_on_ranks([passes, fails_on_the_second_rank], 2)
    assert list(failures) == ["fails_on_the_second_rank"]
    assert failures["fails_on_the_second_rank"].startswith("rank 1: ")
    assert "AssertionError: the second rank" in failures["fails_on_the_second_rank"]


def test_a_process_that_dies_fails_what_was_not_run() -> None:
    failures = run_on_ranks({"first": passes, "second": dies, "third": passes}, 2)
    assert failures.keys() == {"second", "third"}


def test_a_hang_fails_what_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "SECONDS", 3.0)
    failures = run_on_ranks({"first": passes, "second": hangs, "third": passes}, 2)
    assert failures.keys() == {"second", "third"} and "hung" in failures["second"]


def test_no_check_sees_what_another_has_changed() -> None:
    all_pass([leaves_what_it_has_changed, begins_as_any_other], 2)


def test_sets_of_ranks_share_what_there_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "SETS", 2)
    failures = run_on_ranks({"first": dies, **{str(place): passes for place in range(6)}}, 2)
    assert failures.keys() == {"first"}


def test_tests_of_several_files_share_ranks() -> None:
    some, more = (each_passes({"passes": passes, "fails": fails_on_the_second_rank}, 2) for _ in range(2))
    items: Any = [_selected(some, "fails"), _selected(more, "fails"), _selected(more, "passes")]
    rank_processes._run_together(items, some, (2, "gloo"))
    assert [list(rank_processes._failures[test]) for test in (some, more)] == [["fails"], ["fails"]]


def test_tests_alone_are_those_selected() -> None:
    some, more = (each_passes([passes, fails_on_the_second_rank], 2) for _ in range(2))
    items: Any = [_selected(some, "passes"), _selected(more, "fails_on_the_second_rank")]
    rank_processes._run_together(items, some, None)
    assert rank_processes._failures[some] == {} and more not in rank_processes._failures


def test_cases_run_in_processes_of_their_own_unless_pytest_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with case_processes.side_by_side(os.getpid, [()]) as process_of:
        assert process_of() != os.getpid()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with case_processes.side_by_side(os.getpid, [()]) as process_of:
        assert process_of() == os.getpid()


def _selected(test: Any, name: str) -> SimpleNamespace:
    """What pytest has collected."""
    return SimpleNamespace(function=test, nodeid=f"{id(test)}[{name}]", callspec=SimpleNamespace(params={"name": name}))
