"""Steps in real CUDA graphs: the scenarios of tests/execution/capture/captures*.py, and what only a GPU can show."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from capture_runs import equal, fill_gradients, make, ready, same_state
from captures import *  # noqa: F403
from captures_of_matrices import *  # noqa: F403
from captures_refused import *  # noqa: F403
from synchronization import no_synchronization

import tilestep
from tilestep.bench.measure import trace

CUDA = torch.device("cuda")


def many(count: int = 2000, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


@pytest.mark.parametrize(
    ("dtype", "master_weights"),
    [*product([torch.bfloat16, torch.float16, torch.float64], [False, True]), (torch.bfloat16, "remainder")],
)
def test_other_dtypes_replay_to_the_bit(dtype: torch.dtype, master_weights: Any) -> None:
    runs = []
    for graphed in (True, False):
        params = make(dtype=dtype)
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0, master_weights=master_weights)
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(5):
            fill_gradients(params, step)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            run()
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)


def test_replays_neither_wait_nor_copy_nor_allocate() -> None:
    params = many()
    optimizer = tilestep.AdamW(params, lr=1e-3, max_grad_norm=1.0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_synchronization():
        for _ in range(5):
            captured.replay()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == before
    seen = trace(captured.replay, CUDA)
    assert seen.kernels <= 5 and seen.copies == 0, seen

    def change_and_replay() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        captured.replay()

    with no_synchronization():
        change_and_replay()
    assert trace(change_and_replay, CUDA).copies == 1  # the hyperparameters, host to device


def test_nothing_is_held_after_the_optimizer_is_dropped() -> None:
    warm = many(10)
    first = tilestep.AdamW(warm, max_grad_norm=1.0)
    tilestep.capture(first).replay()
    del warm, first
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    params = many(300)
    with_gradients = torch.cuda.memory_allocated()
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0, skip_above=tilestep.TimesMean(3.0))
    optimizer.step()
    captured = tilestep.capture(optimizer)
    for _ in range(3):
        captured.replay()
    optimizer.load_state_dict(optimizer.state_dict())
    again = tilestep.capture(optimizer)
    again.replay()
    held = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    torch.cuda.synchronize()
    assert held() is None
    # The graphs themselves may hold a table of addresses each.
    assert torch.cuda.memory_allocated() - with_gradients <= 2 * 8 * 300 + 4096
    del captured, again, params
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == start


def test_a_graph_by_hand_holds_nothing_either() -> None:
    params = many(100)
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    optimizer.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    del optimizer, graph
    gc.collect()
    assert torch.cuda.memory_allocated() == start


def test_moving_a_captured_model_gives_its_memory_back() -> None:
    params = many(4, 1 << 20)
    optimizer = tilestep.SGD(params, lr=0.1)
    captured = tilestep.capture(optimizer)
    captured.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for param in params:
        param.data = param.data.cpu()
    assert before - torch.cuda.memory_allocated() >= 4 * 2 * (1 << 20)
    with pytest.raises(tilestep.CaptureError, match="stale"):
        captured.replay()


def test_the_first_moved_parameter_of_many_is_noticed() -> None:
    params = many(1500, 16)
    optimizer = tilestep.SGD(params, lr=0.1)
    captured = tilestep.capture(optimizer)
    captured.replay()
    params[1499].data = params[1499].data.clone()
    with pytest.raises(tilestep.CaptureError, match="parameter 1499 of group 0"):
        captured.replay()


def test_learning_rates_on_the_device() -> None:
    runs = []
    for graphed in (True, False):
        params = make()
        rate = torch.tensor(0.1, device="cuda")
        optimizer = tilestep.AdamW(params, lr=rate, max_grad_norm=torch.tensor(1.0, device="cuda"))
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(4):
            fill_gradients(params, step)
            run()
            rate.mul_(0.5)
            optimizer.param_groups[0]["max_grad_norm"].mul_(0.9)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        runs.append(params)
    equal(*runs)


def test_replays_on_several_streams() -> None:
    """One after the other, each on a stream of its own."""
    runs = []
    for graphed in (True, False):
        params = make(shapes=[(300_001,), (77, 33)])
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0)
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        streams = [torch.cuda.Stream() for _ in range(3)]
        previous = torch.cuda.current_stream()
        for step in range(9):
            stream = streams[step % 3]
            stream.wait_stream(previous)
            with torch.cuda.stream(stream):
                for param in params:
                    param.grad.fill_(math.sin(step + 1))
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                run()
            previous = stream
        torch.cuda.synchronize()
        runs.append(params)
    equal(*runs)


def test_a_refused_capture_leaves_the_device_usable() -> None:
    params, optimizer, captured = ready()
    optimizer.param_groups[0]["lr"] = 0.5
    for _ in range(3):
        with pytest.raises(tilestep.CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    captured.replay()
    optimizer.step()
    torch.cuda.synchronize()
    assert optimizer.state[params[0]]["step"].item() == 3


def test_capturing_right_after_construction_compiles_before_the_capture() -> None:
    """No step was made: everything is built by `capture` itself."""
    params = many(3, 1000, torch.float32)
    optimizer = tilestep.NAdam(params, lr=0.01, max_grad_norm=2.0, skip_above=5.0)
    captured = tilestep.capture(optimizer)
    count = tilestep.compile_count()
    captured.replay()
    torch.cuda.synchronize()
    assert tilestep.compile_count() == count
    assert optimizer.state[params[0]]["step"].item() == (0 if optimizer.grad_norm > 5 else 1)


@pytest.mark.two_gpus
def test_parameters_on_two_devices_are_refused_and_one_of_them_is_not() -> None:
    params = [torch.nn.Parameter(torch.ones(5, device=f"cuda:{index}")) for index in (0, 1)]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(tilestep.CaptureError, match="cuda:0, cuda:1"):
        tilestep.capture(tilestep.SGD(params, lr=0.1))
    optimizer = tilestep.SGD(params[1:], lr=0.5)
    tilestep.capture(optimizer).replay()
    assert params[1].tolist() == [0.5] * 5
