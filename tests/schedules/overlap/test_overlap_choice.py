"""`overlap` without `during`: schedules are tried, measured and kept; the numbers stay the serial ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped_models import TINY, Twins, adamw, clipped, loss_of, small

import tilestep
from tilestep.schedules.overlap import schedule as module
from tilestep.schedules.overlap.schedule import Trial


class Time:
    """A clock on which an iteration takes as long as the test says."""

    def __init__(self, iteration: Callable[[], float]) -> None:
        self._iteration, self._now = iteration, 0.0

    def mark(self) -> float:
        self._now += self._iteration()
        return self._now

    def between(self, earlier: float, later: float) -> float:
        return later - earlier


def chosen(times: dict[str, float]) -> Trial:
    trial = Trial(Time(lambda: times[trial.during]))
    for _ in range(100):
        trial.note_step(lambda _: None)
        if trial.report is not None:
            break
    return trial


def test_the_faster_schedule_is_kept() -> None:
    for times, wanted in (
        ({"serial": 10.0, "forward": 9.0}, "forward"),
        ({"serial": 9.0, "forward": 10.0}, "serial"),
        ({"serial": 10.0, "forward": 9.99}, "serial"),
    ):
        trial = chosen(times)
        assert trial.report is not None and trial.report.during == trial.during == wanted
        assert trial.report.milliseconds == pytest.approx(times)


def test_one_slow_iteration_decides_nothing() -> None:
    """An evaluation between two steps, say."""
    taken = iter(range(1000))

    def iteration() -> float:
        return 500.0 if next(taken) in (5, 13) else {"serial": 10.0, "forward": 9.0}[trial.during]

    trial = Trial(Time(iteration))
    while trial.report is None:
        trial.note_step(lambda _: None)
    assert trial.during == "forward"


@pytest.mark.parametrize("faster", ["serial", "forward"])
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_trying_changes_no_number(faster: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twins: list[Twins] = []

    def iteration() -> float:
        return 9.0 if twins[0].optimizer.schedule.during == faster else 10.0

    monkeypatch.setattr(module, "device_clock", lambda _: Time(iteration))
    twins.append(Twins(make, "auto"))
    (pair,) = twins
    tried = {}
    for step in range(35):
        during = pair.optimizer.schedule.during
        pair.step(step)
        if pair.optimizer.schedule.during == during:
            tried[during] = len(pair.optimizer.plan.engines)
        if step in (5, 30):
            pair.compare()
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.compare()
    # A step at once is the optimizer's own: one engine, and no more launches than without overlap().
    assert tried["serial"] == 1 and tried["forward"] > 3
    report = pair.optimizer.overlap_report()
    assert report.during == faster == pair.optimizer.schedule.during
    assert "as measured" in str(report)


def test_with_a_scaler_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_clock", lambda _: Time(lambda: 1.0))
    scalers = [tilestep.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    pair = Twins(clipped, "auto", scaler=scalers[1])
    for step in range(16):
        for (model, optimizer), scaler in zip(pair.pairs, scalers):
            scaler.scale(loss_of(model, 2 * step)).backward()
            scaler.scale(loss_of(model, 2 * step + 1) * (float("inf") if step == 9 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    pair.compare()
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_on_a_cpu_updates_run_in_the_step() -> None:
    model = small()
    optimizer = tilestep.overlap(clipped(model.parameters()), model, bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    before = model.first.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(dict.__getitem__(model.first._parameters, "weight"), before)
    assert all(param.grad is None for param in model.parameters())
    report = optimizer.overlap_report()
    assert report.during == "serial" and "CPU" in report.reason and not report.milliseconds
    asked = tilestep.overlap(adamw(small().parameters()), small(), "backward")
    assert asked.overlap_report().during == "backward"


def test_norms_can_be_left_to_the_step() -> None:
    pair = Twins(clipped, "backward", early_norm=False)
    for step in range(3):
        for model, optimizer in pair.pairs:
            loss_of(model, step).backward()
            for param in model.parameters():
                if param.grad is not None:
                    # What no version tells.
                    param.grad.data.mul_(2.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(pair.reference.grad_norm, pair.optimizer.grad_norm)
    pair.compare()
