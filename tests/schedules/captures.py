"""Captured steps against eager ones, and all that makes a graph stale or impossible.

test_capture.py runs these on the CPU under TRITON_INTERPRET=1, in a simulation; gpu/test_capture_gpu.py on a GPU.
"""

from __future__ import annotations

import gc
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_graph import Simulation

import tilestep

SHAPES = [(5, 3), (), (700,), (2, 3, 4)]
Params = list[torch.nn.Parameter]
SIMULATED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if SIMULATED else "cuda"


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Simulation(monkeypatch) if SIMULATED else None


def capturing() -> Any:
    """A capture by hand, which nobody is going to replay."""
    return torch.cuda.graph(torch.cuda.CUDAGraph())


def make(seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def fill_gradients(params: Params, step: int) -> None:
    """New values where the gradients are."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        value = torch.randn(param.shape, generator=generator).to(param)
        param.grad = value if param.grad is None else param.grad.copy_(value)


def equal(left: Params, right: Params) -> None:
    for mine, other in zip(left, right, strict=True):
        assert torch.equal(mine, other)


def same_state(left: torch.optim.Optimizer, right: torch.optim.Optimizer, mine: Params, other: Params) -> None:
    for one, two in zip(mine, other, strict=True):
        for key, value in left.state[one].items():
            assert torch.equal(value, right.state[two][key]), key


@pytest.mark.parametrize("name", sorted(tilestep.registry))
def test_every_rule_replays_its_steps_to_the_bit(name: str) -> None:
    optimizer = getattr(tilestep, name)(make(shapes=[(5, 3)]))
    # Triton's interpreter takes seconds to reduce over a tensor.
    reduces = any(segment.spec.reduction_count for segment in optimizer._tables.engines[0].segments)
    shapes = [(5, 3)] if reduces else [(5, 3), (4, 6)] if name in ("Muon", "SOAP") else SHAPES
    runs = []
    for graphed in (True, False):
        params = make(shapes=shapes)
        optimizer = getattr(tilestep, name)(params, max_grad_norm=1.0, skip_nonfinite=True)
        fill_gradients(params, 0)
        optimizer.step()
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        before = [param.detach().clone() for param in params]
        for step in (1, 2) if reduces else (1, 2, 3):
            fill_gradients(params, step)
            if step == 2:
                params[0].grad.view(-1)[1] = math.nan
            run()
        assert not all(map(torch.equal, before, params))
        assert int(optimizer.skipped_steps) == 1
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)


def test_nothing_is_updated_by_the_capture_itself() -> None:
    params = make()
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    fill_gradients(params, 0)
    before = [param.detach().clone() for param in params]
    captured = tilestep.capture(optimizer)
    equal(params, before)  # type: ignore[arg-type]
    assert optimizer.state[params[0]]["step"] == 0 and optimizer.grad_norm == 0
    captured.replay()
    assert optimizer.state[params[0]]["step"] == 1 and optimizer.grad_norm > 0


@pytest.mark.parametrize("master_weights", [False, True])
def test_changes_of_hyperparameters_arrive_at_replays(master_weights: bool) -> None:
    runs = []
    for graphed in (True, False):
        params = make(dtype=torch.bfloat16)
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.3}]
        optimizer = tilestep.AdamW(groups, max_grad_norm=1.0, master_weights=master_weights)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=9)
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(8):
            fill_gradients(params, step)
            run()
            scheduler.step()
            optimizer.param_groups[1]["max_grad_norm"] = 0.1 * step + 0.1
            optimizer.param_groups[0]["weight_decay"] = 0.05 * step
            if step == 4:
                with torch.no_grad():
                    params[0].add_(1.0)  # masters follow
        runs.append(params)
    equal(*runs)


def test_schedules_and_learning_rates_as_tensors(simulation: Simulation | None) -> None:
    runs = []
    for graphed in (True, False):
        params = make()
        rate = torch.tensor(0.1)
        if simulation is not None:
            simulation.on_host.add(rate.data_ptr())
        groups = [{"params": params[:2], "lr": tilestep.schedule.warmup_cosine(0.2, 2, 8)}, {"params": params[2:]}]
        optimizer = tilestep.SGD(groups, lr=rate, momentum=0.9)
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(5):
            fill_gradients(params, step)
            run()
            rate.mul_(0.7)
        runs.append(params)
    equal(*runs)


def test_steps_outside_the_graph_and_replays_take_turns() -> None:
    runs = []
    for graphed in (True, False):
        params = make()
        optimizer = tilestep.Adam(params, lr=0.1)
        fill_gradients(params, 0)
        static = [param.grad for param in params]
        captured = tilestep.capture(optimizer) if graphed else None
        for step in range(6):
            if step % 3 == 1:  # gradients elsewhere, one of them missing
                for param in params:
                    param.grad = torch.full_like(param, float(step))
                params[1].grad = None
                optimizer.step()
            else:
                for param, gradient in zip(params, static):
                    param.grad = gradient
                fill_gradients(params, step)
                captured.replay() if captured else optimizer.step()
        runs.append(params)
    equal(*runs)


def test_a_replay_does_not_leave_its_decision_to_the_next_step() -> None:
    """A plain step after a replay that a scaler has skipped, and the other way round."""

    def trained(graphed: bool) -> Params:
        params = make()
        optimizer = tilestep.SGD(params, lr=0.1)
        scaler = tilestep.GradScaler(DEVICE, init_scale=4.0)

        def scaled() -> None:
            scaler.step(optimizer)
            scaler.update()

        scaler.scale(torch.ones((), device=DEVICE))
        fill_gradients(params, 0)
        scaled()
        run = tilestep.capture(optimizer, scaled).replay if graphed else scaled
        plain = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(1, 5):
            fill_gradients(params, step)
            params[0].grad[0, 0] = math.inf
            run()
            fill_gradients(params, 10 + step)
            (plain if step % 2 else optimizer.step)()
        assert optimizer.skipped_steps == 4
        return params

    equal(trained(True), trained(False))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("scaler_class", [tilestep.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_whole_training_steps_equal_eager_ones(scaler_class: Any, set_to_none: bool) -> None:
    """Scaler, clip, schedule and overflows: losses, parameters, state and scale to the bit."""

    def trained(graphed: bool) -> tuple[Any, ...]:
        model = Model().to(DEVICE)
        params = list(model.parameters())
        optimizer = tilestep.AdamW(params, lr=0.05, max_grad_norm=0.5)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 14)
        scaler = scaler_class(DEVICE, init_scale=16.0, growth_interval=3)
        x, spike = torch.zeros(4, 6, device=DEVICE), torch.ones((), device=DEVICE)

        def forward_and_step() -> torch.Tensor:
            loss = model(x)
            scaler.scale(loss * spike).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        def train() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            return forward_and_step()

        run: Callable[[], torch.Tensor] = train
        losses = []
        for step in range(14):
            x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(step)))
            spike.fill_(math.inf if step in (1, 6, 7) else 1.0)
            if graphed and step == 3:
                optimizer.zero_grad(set_to_none=set_to_none)
                optimizer.push()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = train() if not set_to_none else forward_and_step()

                def run(graph: Any = graph, loss: torch.Tensor = loss) -> torch.Tensor:
                    optimizer.push()
                    graph.replay()
                    return loss

            losses.append(float(run()))
            scheduler.step()
        return losses, params, optimizer, scaler

    (left, mine, one, first), (right, other, two, second) = trained(True), trained(False)
    assert left == right
    equal(mine, other)
    same_state(one, two, mine, other)
    assert first.state_dict() == second.state_dict()
    assert one.skipped_steps == two.skipped_steps == 3


def ready(**options: Any) -> tuple[Params, tilestep.Optimizer, tilestep.CapturedStep]:
    params = make()
    optimizer = tilestep.AdamW(params, lr=0.1, **options)
    fill_gradients(params, 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    return params, optimizer, captured


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
            with pytest.raises(tilestep.CaptureError, match="gradient of parameter 0 of group 0"):
                captured.replay()
            equal(list(model.parameters()), before)  # type: ignore[arg-type]


def load(params: Params, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def add(params: Params, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=DEVICE))]})


def flag(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def move_one(params: Params, optimizer: Any) -> None:
    params[2].data = params[2].data.clone()


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


CHANGES = [load, add, flag, move_one, move_and_keep, forget_gradients, other_gradient, other_state]


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
        monkeypatch.setattr("tilestep.engine.group_watch._on_device", lambda value: isinstance(value, torch.Tensor))
    params = make()
    optimizer = tilestep.AdamW(params, lr=torch.tensor(0.1, device=DEVICE))
    fill_gradients(params, 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2, device=DEVICE)
    with pytest.raises(tilestep.CaptureError, match="replaced; write into the tensor"):
        captured.replay()


def test_evaluation_weights_and_lost_optimizers() -> None:
    params = make()
    optimizer = tilestep.Optimizer(params, tilestep.ema(tilestep.registry["SGD"], 0.5), lr=0.1)
    fill_gradients(params, 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    with optimizer.averaged(), pytest.raises(RuntimeError, match="weights to evaluate"):
        captured.replay()
    captured.replay()
    held = weakref.ref(optimizer)
    buffers = [weakref.ref(value) for value in optimizer.state[params[0]].values()]
    del optimizer
    gc.collect()
    assert held() is None and all(buffer() is None for buffer in buffers)
    with pytest.raises(tilestep.CaptureError, match="lost its optimizer"):
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


def refused(reason: str) -> Any:
    return pytest.raises(tilestep.CaptureError, match=reason)


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
    with refused("no gradient"):
        attempt()
    with refused("is for the time between replays"), capturing():
        optimizer.push()
    with refused("comes before the capture"), capturing():
        optimizer.prepare_capture()


def test_changed_shapes_and_layouts_are_refused() -> None:
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    good = params[0].grad
    params[0].grad = torch.ones(3, 5, device=DEVICE).t()
    with refused("gradients lie in memory otherwise"), capturing():
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


def test_strided_gradients_are_captured_after_a_step_with_them() -> None:
    runs = []
    for graphed in (True, False):
        params = make()
        optimizer = tilestep.SGD(params, lr=0.1, momentum=0.9)
        fill_gradients(params, 0)
        params[0].grad = torch.zeros(3, 5, device=DEVICE).t()  # another order of dimensions
        params[2].grad = torch.zeros(1400, device=DEVICE)[::2]  # not dense
        fill_gradients(params, 0)
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        for step in range(3):
            fill_gradients(params, step)
            run()
        runs.append(params)
    equal(*runs)


def test_a_scaler_that_was_not_used_before() -> None:
    params = make()
    optimizer = tilestep.SGD(params, lr=0.1)
    fill_gradients(params, 0)
    scaler = tilestep.GradScaler(DEVICE)
    with refused("the scaler's first use; every replay"), capturing():
        scaler.scale(torch.ones((), device=DEVICE))
    scaler.scale(torch.ones((), device=DEVICE))
    with refused("run a step like it before the capture"):
        tilestep.capture(optimizer, lambda: scaler.step(optimizer))
    scaler.update(2.0)
    fill_gradients(params, 1)
    optimizer._gradients_scaled = False
    optimizer.step()
    with refused("did not step the optimizer"):
        tilestep.capture(optimizer, lambda: None)


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


def test_graphs_copy_no_state_and_share_the_buffers() -> None:
    params, optimizer, captured = ready()
    buffers = {id(value) for state in optimizer.state.values() for value in state.values()}
    places = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    for _ in range(3):
        captured.replay()
    assert places == [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    assert buffers == {id(value) for state in optimizer.state.values() for value in state.values()}
    assert optimizer.state[params[0]]["step"] == 4
