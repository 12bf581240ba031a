"""Captured steps of sharded optimizers against eager ones, to the bit.

test_sharded_capture.py runs these on two CPU ranks under TRITON_INTERPRET=1, in a simulation; gpu/test_shard_gpu.py on
GPUs.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import all_pass
from sharded_twins import TINY, Elementwise

import tilestep
from tilestep.execution.zero import execution
from tilestep.placement import Ranks, ReductionGroup
from tilestep.timeline import side_stream

SIMULATED = os.environ.get("TRITON_INTERPRET") == "1"


class Done:
    """Communication of a simulated graph, which is there when the graph has run to it."""

    def wait(self) -> None:
        pass


@contextmanager
def graphs() -> Iterator[None]:
    """Graphs that can be captured here: real ones, or a simulation in which ranks communicate at each replay."""
    if not SIMULATED:
        yield
        return
    from simulated_graph import Simulation

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulation = Simulation(patch)
        for module in (execution, side_stream):
            patch.setattr(module, "is_capturing", lambda: simulation.graph is not None)
        patch.setattr(Ranks, "can_be_captured", True)
        gather = Ranks.all_gather
        collectives = [(Ranks, name) for name in ("add_copies", "reduce_scatter", "all_gather")]
        for owner, name in (*collectives, (ReductionGroup, "add"), (ReductionGroup, "largest")):
            before = getattr(owner, name)

            def recorded(*arguments: Any, before: Any = before, **options: Any) -> Any:
                if simulation.graph is None:
                    return before(*arguments, **options)

                def run() -> None:
                    works = before(*arguments, **options)
                    for work in works if isinstance(works, list) else [works]:
                        if work is not None:
                            work.wait()

                simulation.graph.work.append(run)
                return [Done()] if before is gather else Done()

            patch.setattr(owner, name, recorded)
        yield


class Training:
    """A sharded training whose every iteration has the same gradients in every copy of it."""

    def __init__(self, make: Callable[[Any], Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Elementwise(4, 9)
        self.optimizer = tilestep.shard(make(self.model.parameters()), self.model, bucket_cap_mb=TINY, **options)
        self.scaler = tilestep.GradScaler(torch.get_default_device().type, init_scale=256.0, growth_interval=2)
        self.data = torch.zeros(3, 9)
        self.spike = torch.ones(())

    def draw(self, index: int, spoil: float = 1.0) -> None:
        """The numbers of an iteration, written where graphs read them; one rank alone spoils its own."""
        generator = torch.Generator().manual_seed(index * 10 + dist.get_rank())
        self.data.copy_(torch.randint(-8, 9, (3, 9), generator=generator, device="cpu") / 8)
        self.spike.fill_(spoil if dist.get_rank() == 1 else 1.0)

    def loss(self) -> torch.Tensor:
        return (self.model(self.data) * self.data).sum() * self.spike

    def backward(self) -> None:
        self.loss().backward()

    def iteration(self) -> None:
        self.backward()
        self.optimizer.step()

    def scaled(self) -> None:
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def adamw(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.1, eps=0.1, max_grad_norm=1.0, skip_nonfinite=True)  # type: ignore[attr-defined]


def lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.1, max_grad_norm=1.0, skip_nonfinite=True)  # type: ignore[attr-defined]


def muon(params: Any) -> tilestep.Optimizer:
    return tilestep.Muon(params, lr=0.1, max_grad_norm=1.0, skip_nonfinite=True)  # type: ignore[attr-defined]


def compare(mine: Training, other: Training) -> None:
    mine.optimizer.wait()
    other.optimizer.wait()
    for one, two in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    left, right = mine.optimizer.full_state_dict()["state"], other.optimizer.full_state_dict()["state"]
    for number, values in right.items():
        for name, value in values.items():
            assert torch.equal(left[number][name], value), name
    assert torch.equal(mine.optimizer.grad_norm, other.optimizer.grad_norm) or mine.optimizer.grad_norm.isnan()
    assert int(mine.optimizer.skipped_steps) == int(other.optimizer.skipped_steps)
    assert mine.scaler.get_scale() == other.scaler.get_scale()


def iterations(
    mine: Training, other: Training, run: Callable[[], Any], eager: Callable[[], Any], count: int = 4
) -> None:
    """A few with another learning rate each, one of them with an overflow on one rank."""
    before = [param.detach().clone() for param in mine.model.parameters()]
    skipped = int(mine.optimizer.skipped_steps)
    for index in range(count):
        for training, work in ((mine, run), (other, eager)):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (index + 1)
            training.draw(index, math.inf if index == 1 else 1.0)
            work()
        compare(mine, other)
    assert int(mine.optimizer.skipped_steps) == skipped + 1
    assert not all(map(torch.equal, before, mine.model.parameters()))


def warmed(make: Callable[[Any], Any], work: str, **options: Any) -> Training:
    training = Training(make, **options)
    for index in range(2):
        training.draw(20 + index)
        getattr(training, work)()
    training.draw(22)
    return training


def steps_alone() -> None:
    """Backward outside the graph, microbatches too; the step and its gathers inside."""
    with graphs():
        for make in (adamw,) if SIMULATED else (adamw, lamb, muon):
            mine, other = warmed(make, "iteration"), warmed(make, "iteration")
            mine.backward()
            before = [param.detach().clone() for param in mine.model.parameters()]
            captured = tilestep.capture(mine.optimizer)
            assert all(map(torch.equal, before, mine.model.parameters()))
            mine.optimizer.zero_grad()

            def run(training: Training = mine, step: Callable[[], Any] = captured.replay) -> None:
                with training.optimizer.no_sync():
                    training.backward()
                training.backward()
                step()

            iterations(mine, other, run, lambda other=other, run=run: run(other, other.optimizer.step))
            # Eager steps between replays, and parameters that other code has written to.
            for training in (mine, other):
                training.draw(30)
                training.iteration()
                with torch.no_grad():
                    next(training.model.parameters()).mul_(0.5)
            iterations(mine, other, run, lambda other=other, run=run: run(other, other.optimizer.step), count=2)


def whole_iterations() -> None:
    """Backward, its sums, the step and its gathers in one graph."""
    with graphs():
        options: list[dict[str, Any]] = [{}, {"overlap_grad_sync": False, "param_sync_dtype": torch.int32}]
        for each in options if SIMULATED else [*options, {"grad_buffer": "bucket"}]:
            mine, other = warmed(adamw, "iteration", **each), warmed(adamw, "iteration", **each)
            captured = tilestep.capture(mine.optimizer, mine.iteration)
            iterations(mine, other, captured.replay, other.iteration)
            for training in (mine, other):
                training.draw(31)
                training.iteration()
            iterations(mine, other, captured.replay, other.iteration, count=2)


def whole_iterations_with_a_scaler() -> None:
    with graphs():
        mine, other = warmed(adamw, "scaled"), warmed(adamw, "scaled")
        captured = tilestep.capture(mine.optimizer, mine.scaled)
        iterations(mine, other, captured.replay, other.scaled)


def what_cannot_be_captured() -> None:
    with graphs():
        training = warmed(adamw, "iteration")
        training.backward()
        training.optimizer.prepare_capture()
        graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
        with pytest.raises(tilestep.CaptureError, match="capture backward too"), graph:
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.iteration()
        captured = tilestep.capture(training.optimizer, training.iteration)
        training.optimizer.load_state_dict(training.optimizer.full_state_dict())
        with pytest.raises(tilestep.CaptureError, match="stale"):
            captured.replay()
        del training.optimizer
        if not SIMULATED:
            return
        Ranks.can_be_captured = False  # type: ignore[assignment, method-assign]
        training = warmed(adamw, "iteration")
        with pytest.raises(tilestep.CaptureError, match="cannot capture the process group's backend"):
            tilestep.capture(training.optimizer, training.iteration)


CHECKS = [steps_alone, whole_iterations, whole_iterations_with_a_scaler, what_cannot_be_captured]


if __name__ == "__main__":
    all_pass(CHECKS, 2)
    print("all equal")
