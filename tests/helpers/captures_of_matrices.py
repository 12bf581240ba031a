"""Captured steps of rules that decompose matrices in some steps: the graph has the others.

test_capture.py runs these on the CPU under TRITON_INTERPRET=1, in a simulation; gpu/test_capture_gpu.py on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_runs import (
    DEVICE,
    Params,
    capturing,
    equal,
    fill_gradients,
    make,
    refused,
    same_state,
    simulation,
)

import tilestep

__all__ = [
    "simulation",
    "test_replays_go_on_after_a_step_outside_without_a_gradient",
    "test_every_step_that_decomposes_is_refused",
    "test_matrix_work_of_some_steps_that_waits_for_nothing_is_captured_by_hand",
    "test_soap_by_hand_is_refused",
    "test_soap_replays_its_steps_to_the_bit",
    "test_soap_takes_turns_with_steps_outside",
]

SHAPES = [(4, 6), (4, 6), (5, 5)]


def graph_replays(captured: Any) -> list[int]:
    """One entry for each time from now on that the graph itself is replayed."""
    seen: list[int] = []
    graph = captured._graph

    class Counted:
        def replay(self) -> None:
            seen.append(1)
            graph.replay()

    captured._graph = Counted()
    return seen


def test_soap_replays_its_steps_to_the_bit() -> None:
    """From the first step on, which is captured before anything has run; with a skip and a changed frequency."""
    runs, replays = [], []
    for graphed in (True, False):
        params = make(shapes=SHAPES)
        optimizer = tilestep.SOAP(params, lr=0.01, precondition_frequency=3, max_grad_norm=1.0)
        fill_gradients(params, 0)
        captured = tilestep.capture(optimizer) if graphed else None
        if captured:
            replays = graph_replays(captured)
        for step in range(12):
            fill_gradients(params, step)
            if step == 8:
                optimizer.param_groups[0]["precondition_frequency"] = 2
            before = len(replays)
            captured.replay() if captured else optimizer.step()
            if graphed:
                # Bases are made in the first step, turned where 3 and then 2 divides the steps before.
                assert (len(replays) == before) == (step in (0, 3, 6, 8, 10)), step
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)
    assert len(replays) == 7


def test_soap_takes_turns_with_steps_outside() -> None:
    """Steps outside with a gradient missing, skipped steps, and a parameter that does not train."""
    runs = []
    for graphed in (True, False):
        params = make(shapes=SHAPES)
        params[1].requires_grad_(False)
        optimizer = tilestep.SOAP(params, lr=0.01, precondition_frequency=2, skip_nonfinite=True)
        trained = [params[0], params[2]]
        fill_gradients(trained, 0)
        captured = tilestep.capture(optimizer) if graphed else None
        for step in range(9):
            static = [param.grad for param in trained]
            fill_gradients(trained, step)
            if step in (2, 5):
                trained[0].grad.view(-1)[1] = math.nan
            if step == 4:
                trained[0].grad = None
                optimizer.step()
                trained[0].grad = static[0]
            else:
                captured.replay() if captured else optimizer.step()
        assert int(optimizer.skipped_steps) == 2
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)


def test_replays_go_on_after_a_step_outside_without_a_gradient() -> None:
    """Its matrices change again: the graph has the gradients of its capture, not those of the last step outside."""
    runs = []
    for graphed in (True, False):
        params = make(shapes=SHAPES)
        optimizer = tilestep.SOAP(params, lr=0.01, precondition_frequency=20)
        fill_gradients(params, 0)
        captured = tilestep.capture(optimizer) if graphed else None
        for step in range(6):
            fill_gradients(params, step)
            if step == 3:
                static, params[0].grad = params[0].grad, None
                optimizer.step()
                params[0].grad = static
            else:
                captured.replay() if captured else optimizer.step()
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)


def test_soap_by_hand_is_refused() -> None:
    params = make(shapes=SHAPES)
    optimizer = tilestep.SOAP(params, lr=0.01)
    fill_gradients(params, 0)
    attempts: list[Callable[[], Any]] = [
        optimizer.prepare_capture,
        lambda: tilestep.capture(optimizer, lambda: optimizer.step()),
    ]
    for attempt in attempts:
        with refused("the host decides at each step of rule SOAP.*capture the step alone, tilestep.capture"):
            attempt()
    tilestep.capture(optimizer)
    with refused("capture the step alone"), capturing():
        optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1


def test_every_step_that_decomposes_is_refused() -> None:
    params = make(shapes=SHAPES)
    optimizer = tilestep.SOAP(params, lr=0.01, precondition_frequency=1)
    fill_gradients(params, 0)
    with refused("every step of rule SOAP decomposes matrices"):
        tilestep.capture(optimizer)
    optimizer.step()


@tilestep.rule
def grown_up(param: Any, grad: Any, *, lr: Any = 0.1, step: Any) -> Any:
    """Products of matrices in some steps only, which need no wait of the host."""
    return param - lr * torch.where(torch.remainder(step, 3) == 0, grad @ grad.mT @ grad, grad)


@pytest.mark.parametrize("by_hand", [True, False])
def test_matrix_work_of_some_steps_that_waits_for_nothing_is_captured_by_hand(by_hand: bool) -> None:
    runs: list[Params] = []
    for graphed in (True, False):
        params = make(shapes=SHAPES)
        optimizer = tilestep.Optimizer(params, grown_up)
        fill_gradients(params, 0)
        run: Callable[[], Any] = optimizer.step
        if graphed and by_hand:
            optimizer.prepare_capture()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            run = graph.replay
        elif graphed:
            captured = tilestep.capture(optimizer)
            replays, run = graph_replays(captured), captured.replay
        for step in range(7):
            fill_gradients(params, step)
            run()
        assert not graphed or by_hand or len(replays) == 7
        runs.append(params)
    equal(*runs)
    assert runs[0][0].device.type == DEVICE
