"""What is built before a first step is what that step launches; the launches of a GPU, noted and not made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tilestep
from tilestep.backends import registry
from tilestep.kernels import launch as launch_triton
from tilestep.kernels.launch import Launch, Launcher
from tilestep.norm import table
from tilestep.optimizer import control
from tilestep.runtime import engine as ahead

SHAPES = [(8, 8), (70, 3), (5,)]


class Noted:
    """Launches of steps, and those that were known before."""

    def __init__(self) -> None:
        self.launched: list[Launcher] = []
        self.ahead: list[list[Launcher]] = []

    def launch(self, launcher: Launcher, arguments: Sequence[Any]) -> None:
        self.launched.append(launcher)

    def build(self, launches: Sequence[Launch], device: torch.device) -> None:
        assert self.ahead or not self.launched, "some was launched before"
        self.ahead.append([launcher for launcher, _ in launches])


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tilestep.backends.triton import run
    from tilestep.backends.triton.run import TritonPasses
    from tilestep.norm.triton_backend import TritonNorm

    noted = Noted()
    monkeypatch.setattr(registry, "passes_class", lambda device: TritonPasses)
    monkeypatch.setattr(table, "cpu_norm", lambda numels, dtypes: TritonNorm(torch.device("cpu"), numels, dtypes))
    monkeypatch.setattr(control, "control_kernels", lambda numbers: run)
    monkeypatch.setattr(ahead, "build_together", noted.build)
    monkeypatch.setattr(ahead, "build_threads", lambda: 4)
    monkeypatch.setattr(Launcher, "_launch", lambda launcher, arguments: noted.launch(launcher, arguments))
    return noted


def optimizer_of(rule: str, **options: Any) -> tilestep.Optimizer:
    params = [torch.ones(shape, requires_grad=True) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    return tilestep.Optimizer(params, rule, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"max_grad_norm": 1.0, "skip_above": 3.0}],
    ids=str,
)
@pytest.mark.parametrize("rule", ["AdamW", "Adafactor", "Prodigy"])
def test_a_first_step_launches_what_was_known_before(noted: Noted, rule: str, options: dict[str, Any]) -> None:
    optimizer = optimizer_of(rule, **options)
    optimizer.step()
    assert len(noted.ahead) == 1
    assert {id(launcher) for launcher in noted.ahead[0]} == {id(launcher) for launcher in noted.launched}
    before = len(noted.launched)
    optimizer.step()
    assert len(noted.ahead) == 1 and len(noted.launched) == 2 * before, "later steps build nothing together"


def test_steps_with_a_loss_scale_have_kernels_of_their_own(noted: Noted) -> None:
    optimizer = optimizer_of("Adagrad", max_grad_norm=1.0)
    optimizer.step()
    noted.launched.clear()
    for _ in range(2):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        optimizer.step()
    assert len(noted.ahead) == 2
    assert {id(launcher) for launcher in noted.ahead[1]} == {id(launcher) for launcher in noted.launched}


def test_what_a_mover_brings_is_left_to_it(noted: Noted) -> None:
    optimizer = optimizer_of("AdamW")
    (engine,) = optimizer._current_plan().engines
    moved: list[int] = []

    class TileStreamer:
        run = staticmethod(moved.append)

    engine.passes[0].segment.streamer = TileStreamer()  # type: ignore[assignment]
    optimizer.step()
    assert moved == [0] and not noted.ahead


def test_steps_on_a_cpu_build_nothing_together(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(ahead, "build_together", noted.build)
    monkeypatch.setattr(ahead, "build_threads", lambda: 4)
    optimizer_of("AdamW", max_grad_norm=1.0).step()
    assert not noted.ahead


def test_one_at_a_time_if_told(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "build_threads", launch_triton.build_threads)
    monkeypatch.setenv("TILESTEP_BUILD_THREADS", "1")
    optimizer_of("AdamW", max_grad_norm=1.0).step()
    assert noted.launched and not noted.ahead


def test_how_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILESTEP_BUILD_THREADS", raising=False)
    for processors, threads in ((1, 1), (6, 6), (64, 8)):
        monkeypatch.setattr(launch_triton, "_processors", lambda processors=processors: processors)
        assert launch_triton.build_threads() == threads
    monkeypatch.setattr(launch_triton, "_processors", lambda: 3)
    for value, threads in (("1", 1), ("2", 2), ("8", 3)):
        monkeypatch.setenv("TILESTEP_BUILD_THREADS", value)
        assert launch_triton.build_threads() == threads
    for value in ("0", "many", ""):
        monkeypatch.setenv("TILESTEP_BUILD_THREADS", value)
        with pytest.raises(ValueError, match="TILESTEP_BUILD_THREADS"):
            launch_triton.build_threads()
