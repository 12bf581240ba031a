"""`park` and `unpark`, with a host that stands for a device: bits are equal, and memory of states is freed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parked_states import Device
from torch import nn

import tilestep
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.optimizer.masters import MASTER_KEYS

SHAPES = [(64, 130), (7,), (), (0,)]
STATES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"state_dtype": "int8", "max_grad_norm": 1.0}),
    ("AdamW", {"state_dtype": "float8_e4m3", "stats": tilestep.Stats(), "track_changes": True}),
    ("AdamW", {"master_weights": True}),
    ("AdamW", {"master_weights": "remainder", "rounding": "stochastic"}),
    ("AdamW", {"master_weights": "kahan"}),
    ("AdamW", {"master_weights": "int8"}),
    ("Adafactor", {}),
    ("Prodigy", {}),
    ("ScheduleFreeAdamW", {"skip_above": tilestep.TimesMean(3.0)}),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield Device(monkeypatch)


def make(rule: str, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    shapes = SHAPES[:1] if rule == "Adafactor" else SHAPES
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return params, getattr(tilestep, rule)(params, lr=0.01, **options)


def step(params: list[nn.Parameter], optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 + number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def buffers_of(optimizer: Any) -> list[Any]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [weakref.ref(value) for value in values if value.numel()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same(left: Any, right: Any, mine: list[Any], other: list[Any]) -> None:
    assert all(map(torch.equal, mine, other))
    for one, two in zip(mine, other, strict=True):
        assert left.state[one].keys() == right.state[two].keys()
        assert all(torch.equal(bits(value), bits(right.state[two][key])) for key, value in left.state[one].items())


@pytest.mark.parametrize(("rule", "options"), STATES)
def test_bits_are_those_of_an_unbroken_run(device: Device, rule: str, options: dict[str, Any]) -> None:
    params, optimizer = make(rule, options)
    others, unbroken = make(rule, options)
    for number in range(7):
        step(params, optimizer, number)
        step(others, unbroken, number)
        if number in (1, 2, 4):
            buffers = buffers_of(optimizer)
            optimizer.park()
            assert device.parked(optimizer) == {True} and optimizer.plan is None
            assert not [one for one in buffers if one() is not None], "memory of state is freed at once"
            same(optimizer, unbroken, params, others)
            saved = optimizer.state_dict()["state"]
            assert all(value is optimizer.state[params[0]][key] for key, value in saved[0].items())
            if number == 2:
                optimizer.park()  # a second time: it stays where it is
                assert device.parked(optimizer) == {True}
            if number == 4:
                optimizer.unpark()
                assert device.parked(optimizer) == {False}
        same(optimizer, unbroken, params, others)
    assert device.taken == 1, "the host's memory is used again"


@pytest.mark.parametrize("master_weights", [True, "remainder", "kahan", "int8"])
def test_what_other_code_writes_meanwhile_is_followed(device: Device, master_weights: Any) -> None:
    pairs = [make("AdamW", {"master_weights": master_weights}) for _ in range(2)]
    for place, (params, optimizer) in enumerate(pairs):
        step(params, optimizer, 0)
        if place == 0:
            optimizer.park()
        with torch.no_grad():
            params[0].mul_(1.5)
        step(params, optimizer, 1)
    (params, optimizer), (others, unbroken) = pairs
    same(optimizer, unbroken, params, others)


def test_loading_saving_resetting_and_evaluating_while_parked(device: Device) -> None:
    params, optimizer = make("ScheduleFreeAdamW", {})
    others, unbroken = make("ScheduleFreeAdamW", {})
    for pair in ((params, optimizer), (others, unbroken)):
        step(*pair, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    step(params, optimizer, 1)
    optimizer.park()
    optimizer.load_state_dict(saved)
    assert device.parked(optimizer) == {False}
    with torch.no_grad():
        for param, other in zip(params, others):
            param.copy_(other)
    for pair in ((params, optimizer), (others, unbroken)):
        step(*pair, 2)
    same(optimizer, unbroken, params, others)
    # The weights that train are part of the state.
    for one in (optimizer, unbroken):
        one.eval()
    optimizer.park()
    assert device.parked(optimizer) == {True}
    for one in (optimizer, unbroken):
        one.train()
    for pair in ((params, optimizer), (others, unbroken)):
        step(*pair, 3)
    same(optimizer, unbroken, params, others)
    optimizer.park()
    for one in (optimizer, unbroken):
        one.reset_state()
    assert device.parked(optimizer) == {True}
    for pair in ((params, optimizer), (others, unbroken)):
        step(*pair, 4)
    same(optimizer, unbroken, params, others)


def test_overlapped_updates(device: Device) -> None:
    for during in ("backward", "forward"):
        runs = []
        for parks in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
            optimizer: Any = tilestep.overlap(tilestep.AdamW(model.parameters()), model, during=during)
            for number in range(4):
                batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if parks and number in (0, 2):
                    buffers = buffers_of(optimizer)
                    optimizer.park()
                    assert device.parked(optimizer) == {True}
                    assert not [one for one in buffers if one() is not None]
                    if number == 2:
                        optimizer.unpark()
            runs.append((optimizer, list(model.parameters())))
        (one, mine), (two, other) = runs
        same(one, two, mine, other)


def test_states_that_were_made_ahead_begin_at_their_first_step(device: Device) -> None:
    """Of parameters without a gradient so far; a basis that is there is parked too."""
    params, optimizer = make("ScheduleFreeAdamW", {})
    optimizer.fitting_plan(ahead=True)
    optimizer.park()
    with torch.no_grad():
        params[0].mul_(2)
    others, unbroken = make("ScheduleFreeAdamW", {})
    with torch.no_grad():
        others[0].mul_(2)
    for pair in ((params, optimizer), (others, unbroken)):
        step(*pair, 0)
    same(optimizer, unbroken, params, others)


def test_nothing_is_done_on_a_cpu() -> None:
    params, optimizer = make("AdamW", {})
    optimizer.park()
    step(params, optimizer, 0)
    plan, before = optimizer.plan, {key: id(value) for key, value in optimizer.state[params[0]].items()}
    optimizer.park()
    optimizer.unpark()
    assert optimizer.plan is plan
    assert before == {key: id(value) for key, value in optimizer.state[params[0]].items()}


def test_without_room_nothing_is_changed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = make("AdamW", {"master_weights": True})
    step(params, optimizer, 0)
    plan, before = optimizer.plan, copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr("tilestep.native.host_memory.available", lambda: (10, "a test"))
    with pytest.raises(tilestep.HostMemoryError, match="the optimizer's state requires"):
        optimizer.park()
    assert optimizer.plan is plan and device.parked(optimizer) == {False}
    assert MASTER_KEYS & before["state"][0].keys()
    step(params, optimizer, 1)


def test_an_offloaded_optimizer_is_refused() -> None:
    params, optimizer = make("AdamW", {})
    move_state(optimizer, StreamedState(torch.device("cpu"), 1, 2), "gpu", "for a test")
    with pytest.raises(ValueError, match=r"in host memory already, and park\(\) has nothing to do"):
        optimizer.park()
    step(params, optimizer, 0)
    params, optimizer = make("AdamW", {})
    tilestep.offload(optimizer)  # in place, on a CPU
    optimizer.park()
    step(params, optimizer, 0)


def test_a_step_in_a_graph_of_one_s_own_is_refused(device: Device) -> None:
    params, optimizer = make("AdamW", {})
    step(params, optimizer, 0)
    graphs = optimizer.graphs
    optimizer.graphs = type(graphs)(captured=2, checked=1)
    with pytest.raises(tilestep.CaptureError, match=r"park\(\) frees memory that a CUDA graph of your own"):
        optimizer.park()
    assert device.parked(optimizer) == {False}
    optimizer.graphs = type(graphs)(captured=2, checked=2)
    optimizer.park()
    assert device.parked(optimizer) == {True} and optimizer.graphs == type(graphs)()


def test_host_memory_is_free_when_the_optimizer_is(device: Device) -> None:
    params, optimizer = make("AdamW", {})
    step(params, optimizer, 0)
    optimizer.park()
    (memory,) = device.memories
    assert memory.taken > 2 * 4 * 64 * 130
    gc.disable()
    try:
        del optimizer
        assert memory.taken == 0
    finally:
        gc.enable()
