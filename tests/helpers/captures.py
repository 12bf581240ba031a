"""Captured steps against eager ones.

test_capture.py runs these on the CPU under TRITON_INTERPRET=1, in a simulation; gpu/test_capture_gpu.py on a GPU.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_runs import (
    DEVICE,
    SHAPES,
    SIMULATED,
    Model,
    Params,
    capturing,
    equal,
    fill_gradients,
    make,
    ready,
    same_state,
    simulation,  # noqa: F401
)
from matrix_rules import MATRIX_RULES
from own_limits import SpikesBeyond, plainly
from parked_states import Device
from simulated_graph import Simulation

import tilestep
from tilestep.kernels.spec import NORM

OF_EVERY_KIND = ("ADOPT", "Adafactor", "LAMB", "NAdam", "NorMuon", "Prodigy", "SOAP", "ScheduleFreeAdamW", "Tiger")
"""Sums over rows, a tensor and all tensors, counts of steps, matrices. The simulation is slow; GPUs run all rules."""


@pytest.mark.parametrize("name", OF_EVERY_KIND if SIMULATED else sorted(tilestep.registry))
def test_every_rule_replays_its_steps_to_the_bit(name: str) -> None:
    shapes = [(5, 3), (4, 6)] if name in MATRIX_RULES else SHAPES
    runs = []
    for graphed in (True, False):
        params = make(shapes=shapes)
        optimizer = getattr(tilestep, name)(params, max_grad_norm=1.0, skip_nonfinite=True)
        fill_gradients(params, 0)
        optimizer.step()
        run: Callable[[], Any] = tilestep.capture(optimizer).replay if graphed else optimizer.step
        before = [param.detach().clone() for param in params]
        for step in (1, 2, 3):
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


def test_garbage_is_not_collected_in_a_capture() -> None:
    """A graph in it would be destroyed, which ends the capture of any stream that is under way in the thread."""
    params, optimizer, _ = ready()
    graphs = [ready()[2]]
    dropped = weakref.ref(graphs[0])

    def work() -> None:
        circle: list[Any] = [graphs.pop()]
        circle.append(circle)
        del circle
        assert len([[] for _ in range(5000)]) == 5000  # more than begin a collection
        assert dropped() is not None
        optimizer.step()

    before = [param.detach().clone() for param in params]
    tilestep.capture(optimizer, work).replay()
    assert not all(map(torch.equal, before, params))
    assert gc.isenabled() and gc.collect() and dropped() is None

    def failing() -> None:
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        tilestep.capture(optimizer, failing)
    assert gc.isenabled()


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


@pytest.mark.parametrize("master_weights", [False, True, "remainder"])
def test_changes_of_hyperparameters_arrive_at_replays(master_weights: Any) -> None:
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


def test_schedules_and_learning_rates_as_tensors(simulation: Simulation | None) -> None:  # noqa: F811
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


@pytest.mark.parametrize(("name", "options"), [("AdamW", {"master_weights": True}), ("ScheduleFreeAdamW", {})])
def test_states_are_reset_between_replays(name: str, options: dict[str, Any]) -> None:
    runs = []
    for graphed in (True, False):
        params = make(dtype=torch.bfloat16 if options else torch.float32)
        optimizer = getattr(tilestep, name)(params, lr=0.1, max_grad_norm=1.0, **options)
        fill_gradients(params, 0)
        captured = tilestep.capture(optimizer) if graphed else None
        run: Callable[[], Any] = optimizer.step if captured is None else captured.replay
        for step in range(6):
            fill_gradients(params, step)
            run()
            if step in (0, 3):
                optimizer.reset_state()
        assert captured is None or not captured.is_stale
        assert optimizer.state[params[0]]["step"] == 2
        runs.append((optimizer, params))
    (one, mine), (two, other) = runs
    equal(mine, other)
    same_state(one, two, mine, other)


def test_a_graph_is_stale_once_state_was_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer, captured = ready()
    others, unbroken, _ = ready()
    if SIMULATED:
        Device(monkeypatch)
    tables = weakref.ref(optimizer.plan)
    optimizer.park()
    assert tables() is None and captured.is_stale
    optimizer.unpark()
    before = [param.detach().clone() for param in params]
    with pytest.raises(tilestep.CaptureError, match="stale"):
        captured.replay()
    equal(params, before)  # type: ignore[arg-type]
    again = tilestep.capture(optimizer)
    for step in (1, 2):
        for own in (params, others):
            fill_gradients(own, step)
        again.replay()
        unbroken.step()
    equal(params, others)
    same_state(optimizer, unbroken, params, others)
    optimizer.park()
    optimizer.unpark()
    optimizer.prepare_capture()
    with capturing():
        optimizer.step()
    with pytest.raises(tilestep.CaptureError, match=r"park\(\) frees memory that a CUDA graph of your own"):
        optimizer.park()


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


def test_replays_decide_by_a_limit_of_one_s_own() -> None:
    """As steps do, and as the limit does on Python's floats: what it remembers is the device's."""
    limit, sizes = SpikesBeyond(factor=2.5), [1.0, 1.1, 0.9, 1.2, 7.0, 1.0, 1.3, 0.8]

    def trained(graphed: bool) -> tuple[Params, Any, list[float]]:
        params, loss = make(), torch.ones((), device=DEVICE)
        optimizer = tilestep.SGD(params, lr=0.1, max_grad_norm=limit)
        run, norms = partial(optimizer.step, loss=loss), []
        for step, size in enumerate(sizes):
            fill_gradients(params, step)
            torch._foreach_mul_([param.grad for param in params], size)
            loss.fill_(50.0 if step == 6 else 1.0 + step / 8)
            if graphed and step == 2:
                run = tilestep.capture(optimizer, run).replay
            run()
            norms.append(float(optimizer.control.numbers[NORM]))
        return params, optimizer, norms

    (mine, one, norms), (others, other, _) = trained(True), trained(False)
    equal(mine, others)
    losses = [50.0 if step == 6 else 1.0 + step / 8 for step in range(len(sizes))]
    decided, remembered = plainly(limit, norms, losses)
    assert one.skipped_steps == other.skipped_steps == sum(skips for skips, _ in decided) == 2
    for optimizer in (one, other):
        assert optimizer.state_dict()["param_groups"][0]["limits"]["SpikesBeyond"].tolist() == remembered


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
        for step in range(11):
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


def test_a_loss_scale_set_between_replays_is_the_next_one() -> None:
    """By hand, by another tensor, and from a checkpoint of the scaler."""

    def trained(graphed: bool) -> tuple[list[float], Params]:
        params = make()
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0)
        scaler = tilestep.GradScaler(DEVICE, init_scale=4.0, growth_interval=2)
        scaler.scale(torch.ones((), device=DEVICE))
        fill_gradients(params, 0)

        def scaled() -> None:
            scaler.step(optimizer)
            scaler.update()

        scaled()
        saved = scaler.state_dict()
        run = tilestep.capture(optimizer, scaled).replay if graphed else scaled
        norms = []
        for step in range(1, 7):
            if step == 2:
                scaler.update(32.0)
            if step == 4:
                scaler.update(torch.tensor(0.5, device=DEVICE))
            if step == 6:
                scaler.load_state_dict(saved)
            fill_gradients(params, step)
            run()
            norms += [float(optimizer.grad_norm), scaler.get_scale()]
        return norms, params

    (left, mine), (right, other) = trained(True), trained(False)
    assert left == right and len({scale for scale in left[1::2]}) > 3
    equal(mine, other)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())


def test_no_tensor_is_held_after_the_optimizer_is_dropped() -> None:
    """Nor by a scaler that lives on: steps, both kinds of graphs, a load that makes them stale, and graphs after it."""
    params = make()
    scaler = tilestep.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.ones((), device=DEVICE))

    def used() -> Any:
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0, skip_above=tilestep.TimesMean(3.0))

        def scaled() -> None:
            scaler.step(optimizer)
            scaler.update()

        for _ in range(2):
            fill_gradients(params, 0)
            scaled()
            tilestep.capture(optimizer, scaled).replay()
            tilestep.capture(optimizer).replay()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            optimizer.push()
            graph.replay()
            optimizer.load_state_dict(optimizer.state_dict())
        return weakref.ref(optimizer)

    used()
    before = live_tensors()
    held = used()
    assert live_tensors() == before and held() is None


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """A block whose lines and calls are counted."""
    seen: Counter[str] = Counter()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        seen[event] += event == "line"
        return trace

    def profile(frame: Any, event: str, argument: Any) -> None:
        seen[event] += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])


class Idle:
    """In the place of a graph, so that only what the host does at a replay is left."""

    def replay(self) -> None:
        pass


def test_what_the_host_does_at_a_replay_does_not_grow_with_the_number_of_tensors() -> None:
    """Python's lines are counted, calls of C's functions, and tensors that a replay looks at."""
    counts = []
    for count in (512, 1024):
        params = make(shapes=[(3,)] * count)
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0)
        fill_gradients(params, 0)
        captured = tilestep.capture(optimizer)
        captured._graph = Idle()  # type: ignore[assignment]
        for _ in range(8):
            captured.replay()
        with counted() as seen:
            for _ in range(20):
                captured.replay()
        counts.append(dict(seen))
        assert {len(own._states.tensors) for own in optimizer.plan.engines[0].table._turns} == {512}
    assert counts[0] == counts[1] and counts[0]["line"] > 100


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
    with pytest.raises(tilestep.CaptureError, match="optimizer of the captured step was deleted"):
        captured.replay()


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


def test_graphs_copy_no_state_and_share_the_buffers() -> None:
    params, optimizer, captured = ready()
    buffers = {id(value) for state in optimizer.state.values() for value in state.values()}
    places = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    for _ in range(3):
        captured.replay()
    assert places == [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    assert buffers == {id(value) for state in optimizer.state.values() for value in state.values()}
    assert optimizer.state[params[0]]["step"] == 4


def test_the_document_s_code_runs() -> None:
    """Block after block, as a reader would; each trains."""
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda-graphs.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    model = Model().to(DEVICE)
    batches = [torch.full((4, 6), float(number), device=DEVICE) for number in range(3)]
    names: dict[str, Any] = {
        **{"torch": torch, "tilestep": tilestep, "model": model, "batches": batches, "batch": batches[0].clone()},
        "scaler": tilestep.GradScaler(DEVICE, init_scale=2.0),
        "scheduler": SimpleNamespace(step=lambda: None),
        "loss_of": lambda model, batch=None: model(names["batch"] if batch is None else batch),
    }
    for block in blocks:
        before = [param.detach().clone() for param in model.parameters()]
        exec(block, names)
        assert not any(map(torch.equal, before, model.parameters()))
    assert names["optimizer"].skipped_steps == 0
