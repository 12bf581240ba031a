"""Captured steps, simulated on the CPU, and what has no graphs at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import run_python

import tilestep


def test_simulated_captures() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    names = ("captures", "captures_refused", "captures_of_matrices")
    files = [str(Path(__file__).parents[2] / "helpers" / f"{name}.py") for name in names]
    without = [word for name in ("cacheprovider", "hypothesispytest") for word in ("-p", f"no:{name}")]
    result = run_python("-m", "pytest", "-q", "-x", *without, *files, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_capture_on_the_cpu_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = tilestep.AdamW([weight])
    for attempt in (lambda: tilestep.capture(optimizer), optimizer.prepare_capture):
        with pytest.raises(tilestep.CaptureError, match="on the CPU, which has no graphs"):
            attempt()
    optimizer.push()
    assert weight.tolist() == [1.0, 1.0, 1.0] and optimizer.state[weight]["step"] == 0


def test_without_triton_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = tilestep.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    engine = optimizer.fitting_plan(ahead=True).engines[0]
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    with pytest.raises(tilestep.CaptureError, match="without Triton the host decides"):
        engine.require_kernels()


def test_a_cpu_optimizer_inside_somebodys_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = tilestep.SGD([weight], lr=1.0)
    monkeypatch.setattr("tilestep.optimizer.optimizer.is_capturing", lambda: True)
    with pytest.raises(tilestep.CaptureError, match="on the CPU"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_an_optimizer_without_parameters_that_train() -> None:
    optimizer = tilestep.SGD([torch.nn.Parameter(torch.ones(3), requires_grad=False)], lr=1.0)
    with pytest.raises(tilestep.CaptureError, match="no parameter of the optimizer trains"):
        tilestep.capture(optimizer)


def test_pushed_values_are_those_of_the_next_step() -> None:
    """Without any graph `push` only does early what the step would do."""
    results = []
    for pushes in (True, False):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = tilestep.SGD([weight], lr=1.0)
        for rate in (0.5, 0.25):
            weight.grad = torch.ones(3)
            optimizer.param_groups[0]["lr"] = rate
            if pushes:
                optimizer.push()
            optimizer.step()
        results.append(weight.tolist())
    assert results[0] == results[1] == [0.25, 0.25, 0.25]
