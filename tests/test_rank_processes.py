"""The helper that runs checks on several ranks: a check that fails, or never ends well, is told by name and rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from rank_processes import run_on_ranks


def passes() -> None:
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value == dist.get_world_size() == int(os.environ["WORLD_SIZE"])


def fails_on_the_second_rank() -> None:
    assert dist.get_rank() == 0, "the second rank"


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_failures_say_where_and_what() -> None:
    failures = run_on_ranks([passes, fails_on_the_second_rank], 2)
    assert list(failures) == ["fails_on_the_second_rank"]
    assert failures["fails_on_the_second_rank"].startswith("rank 1: ")
    assert "AssertionError: the second rank" in failures["fails_on_the_second_rank"]


def test_a_process_that_dies_fails_what_was_not_run() -> None:
    failures = run_on_ranks({"first": passes, "second": dies, "third": passes}, 2)
    assert failures.keys() == {"second", "third"}
