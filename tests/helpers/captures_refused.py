"""All that makes a graph stale, and what cannot be captured: refused with the reason, and nothing changed.

test_capture.py runs these on the CPU under TRITON_INTERPRET=1, in a simulation; gpu/test_capture_gpu.py on a GPU.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_runs import (
    DEVICE,
    SIMULATED,
    Model,
    Params,
    capturing,
    equal,
    fill_gradients,
    make,
    move_one,
    ready,
    refused,
    simulation,  # noqa: F401
)
from several_devices import spread_over_devices
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilestep


def test_gradients_of_a_whole_step_must_stay_only_if_they_were_there_before() -> None:
    for inside in (True, False):
        model = Model().to(DEVICE)
        optimizer = tilestep.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 6, device=DEVICE)

        def train(model: Any = model, optimizer: Any = optimizer, x: torch.Tensor = x, inside: bool = inside) -> None:
            optimizer.zero_grad(set_to_none=inside)
            model(x).backward()
            optimizer.step()

        train()
        captured = tilestep.capture(optimizer, train)
        captured.replay()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        before = [param.detach().clone() for param in model.parameters()]
        if inside:
            captured.replay()
            assert not any(map(torch.equal, before, model.parameters()))
        else:
            with pytest.raises(tilestep.CaptureError, match=r"gradient of parameter \d of group 0"):
                captured.replay()
            equal(list(model.parameters()), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_that_a_graph_by_hand_reads_must_keep_their_memory(inside: bool) -> None:
    """Unless they were made inside it; who keeps them elsewhere may put others in their place for a while."""
    model = Model().to(DEVICE)
    params = list(model.parameters())
    optimizer = tilestep.SGD(params, lr=0.1)
    x = torch.ones(4, 6, device=DEVICE)
    model(x).backward()
    if inside:
        optimizer.zero_grad(set_to_none=True)
    optimizer.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if inside:
            model(x).backward()
        optimizer.step()
    optimizer.push()
    kept = [param.grad for param in params]
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    optimizer.push()
    graph.replay()
    del kept
    gc.collect()
    if inside:
        optimizer.push()
        return
    with refused(r"stale: the memory of the gradient of parameter \d of group 0 was freed.*set_to_none=False"):
        optimizer.push()
    model(x).backward()
    optimizer.step()
    optimizer.prepare_capture()
    optimizer.push()


def load(params: Params, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def add(params: Params, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=DEVICE))]})


def flag(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def move_and_keep(params: Params, optimizer: Any) -> None:
    optimizer.kept = params[2].data
    params[2].data = params[2].data.clone()


def forget_gradients(params: Params, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)


def other_gradient(params: Params, optimizer: Any) -> None:
    optimizer.kept = params[0].grad
    params[0].grad = torch.ones_like(params[0])


def other_state(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2, device=DEVICE)))


def move_state(params: Params, optimizer: Any) -> None:
    """Whether something else keeps the old memory or not, every replay would write to it."""
    state = optimizer.state[params[2]]["exp_avg"]
    optimizer.kept = state.data
    state.data = state.data.clone()


def other_param(params: Params, optimizer: Any) -> None:
    """In the place of one that something else keeps alive, which replays would go on to update."""
    optimizer.before = params[0]
    params[0] = torch.nn.Parameter(params[0].detach().clone())
    optimizer.param_groups[0]["params"][0] = params[0]


CHANGES = [
    other_param,
    move_state,
    load,
    add,
    flag,
    move_one,
    move_and_keep,
    forget_gradients,
    other_gradient,
    other_state,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_graph_says_so_and_runs_nothing(change: Callable[[Params, Any], None]) -> None:
    params, optimizer, captured = ready()
    assert not captured.is_stale
    change(params, optimizer)
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        with pytest.raises(tilestep.CaptureError, match=r"the captured step is stale: .*Capture it again"):
            captured.replay()
    equal(params, before)  # type: ignore[arg-type]
    if change not in (forget_gradients, other_gradient):
        with pytest.raises(tilestep.CaptureError, match="stale"):
            optimizer.push()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    again = tilestep.capture(optimizer)
    again.replay()
    assert not torch.equal(params[0], before[0])
    optimizer.push()


def test_steps_go_on_after_a_graph_went_stale() -> None:
    params, optimizer, _ = ready()
    move_one(params, optimizer)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2
    with pytest.raises(tilestep.CaptureError, match="stale"):
        optimizer.push()
    optimizer.prepare_capture()
    optimizer.push()


def test_a_failed_load_leaves_the_graph_as_it_was() -> None:
    params, optimizer, captured = ready()
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "exp_avg": torch.zeros(7, device=DEVICE)}
    with pytest.raises(tilestep.StateError):
        optimizer.load_state_dict(saved)
    captured.replay()
    optimizer.push()
    assert optimizer.state[params[0]]["step"] == 2


def test_a_replaced_learning_rate_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on a device are read by the graph where they are."""
    if SIMULATED:
        monkeypatch.setattr("tilestep.runtime.hypers._on_device", lambda value: isinstance(value, torch.Tensor))
    params = make()
    optimizer = tilestep.AdamW(params, lr=torch.tensor(0.1, device=DEVICE))
    fill_gradients(params, 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2, device=DEVICE)
    with pytest.raises(tilestep.CaptureError, match="replaced; write into the tensor"):
        captured.replay()


def test_nan_and_scaled_gradients_are_refused() -> None:
    _, optimizer, captured = ready()
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr of group 0: nan"):
        captured.replay()
    optimizer.param_groups[0]["lr"] = 0.1
    scaler = tilestep.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(torch.ones((), device=DEVICE))
    with pytest.raises(tilestep.GradientError, match="capture the scaler's calls"):
        captured.replay()


def test_what_cannot_be_captured_is_refused_with_the_reason() -> None:
    params = make()
    optimizer = tilestep.AdamW(params, lr=0.1)

    def attempt() -> None:
        with capturing():
            optimizer.step()

    with refused("parameter 0 of group 0 has no gradient.*zero_grad"):
        tilestep.capture(optimizer)
    with refused("parameter 0 of group 0 has no gradient"):
        attempt()
    fill_gradients(params, 0)
    attempt()
    optimizer.param_groups[0]["lr"] = 0.3
    with refused(r"hyperparameters have changed.*prepare_capture\(\)"):
        attempt()
    optimizer.prepare_capture()
    attempt()
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with refused("hyperparameters have changed"):
        attempt()
    move_one(params, optimizer)
    with refused("parameters have moved"):
        attempt()
    optimizer.prepare_capture()
    attempt()
    optimizer.add_param_group({"params": make(1)})
    with refused(r"tables are not built yet.*prepare_capture\(\)"):  # those of the new group begin later
        attempt()
    optimizer.prepare_capture()
    with refused("no gradient"):
        attempt()
    with refused(r"call push\(\) between replays"), capturing():
        optimizer.push()
    with refused(r"prepare_capture\(\) before the capture, not inside"), capturing():
        optimizer.prepare_capture()


def test_changed_shapes_and_layouts_are_refused() -> None:
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    good = params[0].grad
    params[0].grad = torch.ones(3, 5, device=DEVICE).t()
    with refused("gradients have another layout"), capturing():
        optimizer.step()
    params[0].grad = None
    params[0].data = torch.ones(5, 4, device=DEVICE)
    params[0].grad = torch.ones(5, 4, device=DEVICE)
    with refused("moved or changed their shape"), capturing():
        optimizer.step()
    params[0].grad = None
    params[0].data = before[0]
    params[0].grad = good
    equal(params, before)  # type: ignore[arg-type]


def test_a_scaler_that_was_not_used_before() -> None:
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    scaler = tilestep.GradScaler(DEVICE)
    with refused("the scaler's first use; every replay"), capturing():
        scaler.scale(torch.ones((), device=DEVICE))
    scaler.scale(torch.ones((), device=DEVICE))
    with refused("run the step once before the capture"):
        tilestep.capture(optimizer, lambda: scaler.step(optimizer))
    scaler.update(2.0)
    fill_gradients(params, 1)
    optimizer.control.gradients_scaled = False
    optimizer.step()
    with refused("did not step the optimizer"):
        tilestep.capture(optimizer, lambda: None)


def test_remainders_that_were_not_taken_over() -> None:
    """Who writes to a parameter that has a remainder must say so before a capture by hand: kernels do not see it."""
    params = make(dtype=torch.bfloat16)
    optimizer = tilestep.AdamW(params, lr=0.1, master_weights="remainder")
    fill_gradients(params, 0)
    optimizer.step()
    with torch.no_grad():
        params[0].add_(1.0)
    with refused(r"with masters were written to.*prepare_capture\(\)"), capturing():
        optimizer.step()
    optimizer.prepare_capture()
    with capturing():
        optimizer.step()


def test_a_norm_that_was_never_computed() -> None:
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    scaler = tilestep.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=DEVICE))
    optimizer.step()
    before = [param.detach().clone() for param in params]
    with refused("gradient norm was not computed before; run the step once"), capturing():
        scaler.step(optimizer)
    equal(params, before)  # type: ignore[arg-type]


@pytest.mark.skipif(not SIMULATED, reason="on GPUs parameters on two of them show it")
def test_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spread_over_devices(monkeypatch, 2)
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    for attempt in (lambda: tilestep.capture(optimizer), optimizer.prepare_capture):
        with refused("its parameters are on cpu, cpu; a graph supports one device"):
            attempt()
    optimizer.step()
    with refused("its parameters are on 2 devices"), capturing():
        optimizer.step()


@pytest.mark.skipif(not SIMULATED, reason="needs a process group")
def test_parameters_that_ranks_share(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    params = [torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])) for param in make(shapes=[(4,)])]
    optimizer = tilestep.SGD(params, lr=0.1)
    params[0].grad = torch.ones_like(params[0])
    with refused("several ranks decide its steps together"):
        tilestep.capture(optimizer)
    optimizer.step()
    with refused("several ranks decide its steps together"), capturing():
        optimizer.step()


def test_frozen_and_empty_parameters() -> None:
    params = [*make(), torch.nn.Parameter(torch.ones(0, device=DEVICE))]
    params.append(torch.nn.Parameter(torch.ones(2, device=DEVICE), requires_grad=False))
    optimizer = tilestep.AdamW(params)
    fill_gradients(params[:-1], 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    assert params[-1].tolist() == [1.0, 1.0]
    params[1].requires_grad_(False)
    params[1].grad = None
    with refused("stale"):
        captured.replay()
    tilestep.capture(optimizer).replay()
