"""Whole iterations of every way to train, in turns: the part of benchmarks/shard_figures.py that compares them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shard_bench import Bench
from shard_contenders import CONTENDERS, Trained
from timing import quartiles

__all__ = ["iterations"]

ROUNDS = 8
PERIODS = {1: 4, 4: 2}
"""Iterations of one figure by batch, after one that is not counted."""
FOR_ROUNDS = 0.35
"""The part of its time that a part keeps for rounds: contenders that are not made by then are left out."""
HOST_SECONDS = 3.0
"""What the host's figures of a contender take."""
TURNS = {1: 3}
"""How often contenders take turns in a round by batch, once where nothing is said: short iterations drift the most."""


class Run:
    """A contender and its figures.

    Args:
        name: what the results call it.
        trained: the model and its optimizer.
        allocated: bytes that they take.
        batches: the batch sizes.
    """

    def __init__(self, name: str, trained: Trained, allocated: int, batches: Sequence[int]) -> None:
        self.name, self.trained, self.allocated = name, trained, allocated
        self.whole: dict[int, list[float]] = {batch: [] for batch in batches}
        self.beside: dict[int, list[float]] = {batch: [] for batch in batches}
        """Those of `whole` that components were measured right after."""
        self.with_sums: dict[int, list[float]] = {batch: [] for batch in batches}
        self.model: dict[int, list[float]] = {batch: [] for batch in batches}

    def iteration(self, text: torch.Tensor) -> None:
        """Forward, backward, clip, step."""
        self.trained.model(text).backward()
        self.trained.step()

    def summed(self, text: torch.Tensor) -> None:
        """Forward and backward with its communication."""
        self.trained.model(text).backward()
        self.trained.drop()

    def alone(self, text: torch.Tensor) -> None:
        """Forward and backward of the model alone."""
        assert self.trained.alone is not None
        with self.trained.alone():
            self.trained.model(text).backward()
        self.trained.drop()

    def measure(self, bench: Bench, batch: int, components: bool) -> None:
        """A figure of the iteration, and if asked for of its components."""
        text, count = bench.text(batch), 1 if bench.quick else PERIODS.get(batch, 2)
        self.whole[batch].append(bench.period(lambda: self.iteration(text), count))
        if components and self.trained.has_parts:
            self.beside[batch].append(self.whole[batch][-1])
            self.with_sums[batch].append(bench.period(lambda: self.summed(text), count))
            if self.trained.alone is not None:
                self.model[batch].append(bench.period(lambda: self.alone(text), count))

    def figures(self, batch: int) -> dict[str, Any]:
        """What was found, with the differences round by round."""
        found: dict[str, Any] = {}
        for name, values in (
            ("iteration_ms", self.whole[batch]),
            ("forward_backward_with_sums_ms", self.with_sums[batch]),
            ("forward_backward_ms", self.model[batch]),
            ("exposed_clip_step_gather_ms", _differences(self.beside[batch], self.with_sums[batch])),
            ("exposed_sums_ms", _differences(self.with_sums[batch], self.model[batch])),
        ):
            if values:
                found[name] = quartiles(values)
        # FSDP2's forward gathers parameters in any case: its model is never alone.
        base = "forward_backward_ms" if self.model[batch] else "forward_backward_with_sums_ms"
        if base in found:
            exposed = found["exposed_clip_step_gather_ms"]["median"]
            found["exposed_clip_step_gather"] = round(exposed / found[base]["median"], 4)
            found["beyond the model"] = round(found["iteration_ms"]["median"] / found[base]["median"] - 1, 4)
        return found


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(left, right)]


def iterations(bench: Bench, names: Sequence[str] = ()) -> dict[str, Any]:
    """For each batch and contender: an iteration, its components, and what nothing hides.

    Contenders take turns, each with a model of its own, in another order in every round.

    Args:
        bench: where, how large and how long.
        names: the contenders, of those in CONTENDERS.
    """
    bench.warm_up()
    failures: dict[str, str] = {}
    runs: list[Run] = []
    begin = time.monotonic()
    for name in bench.only or names or ("sharded", "data_parallel", "data_parallel_master", "fully_sharded"):
        # Rounds of those that are there are worth more than another one.
        if bench.until is not None and bench.is_over(before=(bench.until - begin) * FOR_ROUNDS):
            failures[name] = "no time was left"
            continue
        made = _made(bench, name, failures)
        if made is not None:
            runs.append(made)
    found: dict[str, Any] = {}
    for turn in range(1 if bench.quick else ROUNDS):
        shift = turn % max(len(runs), 1)
        for batch in bench.batches:
            turns = TURNS.get(batch, 1)
            for again in range(1 if bench.quick else turns):
                for run in runs[shift:] + runs[:shift]:
                    # Rounds in the beginning measure everybody's components, all of them those of ours.
                    run.measure(bench, batch, components=not again and (turn < 4 or run is runs[0]))
        found = _report(bench, runs, failures, turn + 1)
        bench.note(found)
        if bench.is_over(before=HOST_SECONDS * len(runs)):
            break
    found["host"] = {}
    for run in (run for run in runs if run.trained.has_parts):
        if bench.is_over():
            break
        count = 3 if bench.quick else 10
        found["host"][run.name] = bench.host(run.trained.step, _backward(bench, run.trained), count)
        bench.note(found)
    return found


def _backward(bench: Bench, trained: Trained) -> Callable[[], None]:
    return lambda: bench.backward(trained, bench.batches[0])


def _made(bench: Bench, name: str, failures: dict[str, str]) -> Run | None:
    """A contender that has trained a little; None if it cannot on some rank."""
    bench.forget_peak()
    before, run = bench.allocated(), None
    try:
        run = Run(name, CONTENDERS[name](bench.shape, bench.device), 0, bench.batches)
        for batch in bench.batches:
            for _ in range(2):
                run.iteration(bench.text(batch))
            if run.trained.has_parts:
                run.summed(bench.text(batch))
    except ModuleNotFoundError as error:
        failures[name] = f"{error.name} is not installed"
    except Exception:
        failures[name] = traceback.format_exc()
    if bench.on_any(name in failures):
        failures.setdefault(name, "it has failed on another rank")
        return None
    assert run is not None
    run.trained.drop()
    bench.forget_peak()
    run.allocated = bench.allocated() - before
    return run


def _report(bench: Bench, runs: Sequence[Run], failures: dict[str, str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": rounds}
    if failures:
        found["failures"] = dict(failures)
    makers = {run.name: CONTENDERS[run.name] for run in runs}
    found["contenders"] = {name: getattr(make, "func", make).__doc__ for name, make in makers.items()}
    found["allocated_bytes"] = {run.name: run.allocated for run in runs}
    for batch in bench.batches:
        found[str(batch)] = {run.name: run.figures(batch) for run in runs}
    return found
