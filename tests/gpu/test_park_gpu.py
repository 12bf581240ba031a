"""State in page-locked host memory between steps, on a GPU: bits, memory, and the rate of the copies, which is printed.

python -m pytest tests/gpu/test_park_gpu.py -s
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilestep
from tilestep.native.host_memory import HostMemory

DEVICE = "cuda"
SHAPES = [(64, 130), (7,), (), (0,), (3, 5, 2, 2)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"max_grad_norm": 1.0}),
    ("AdamW", {"state_dtype": "int8"}),
    ("AdamW", {"state_dtype": "float8_e4m3", "stats": tilestep.Stats(), "track_changes": True}),
    ("AdamW", {"master_weights": True}),
    ("AdamW", {"master_weights": "remainder", "rounding": "stochastic"}),
    ("AdamW", {"master_weights": "kahan"}),
    ("AdamW", {"master_weights": "int8"}),
    ("Prodigy", {}),
    ("ScheduleFreeAdamW", {}),
    ("Adafactor", {}),
    ("SOAP", {"precondition_frequency": 2}),
    ("Muon", {}),
]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every piece of host memory that is allocated."""
    pieces: list[int] = []
    take = HostMemory._piece

    def taking(memory: HostMemory, size: int) -> Any:
        pieces.append(size)
        return take(memory, size)

    monkeypatch.setattr(HostMemory, "_piece", taking)
    return pieces


def make(rule: str, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    shapes = [(64, 130), (32, 48)] if rule in ("SOAP", "Muon", "Adafactor") else SHAPES
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    return params, getattr(tilestep, rule)(params, lr=0.01, **options)


def step(params: list[nn.Parameter], optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 + number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, param.dtype)
    optimizer.step()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def places(optimizer: Any) -> set[str]:
    return {value.device.type for state in optimizer.state.values() for value in state.values()}


def same(left: Any, right: Any, mine: list[Any], other: list[Any]) -> None:
    assert all(map(torch.equal, mine, other))
    for one, two in zip(mine, other, strict=True):
        assert left.state[one].keys() == right.state[two].keys()
        for key, value in left.state[one].items():
            assert torch.equal(bits(value), bits(right.state[two][key])), key


@pytest.mark.parametrize(("rule", "options"), CASES)
def test_bits_are_those_of_an_unbroken_run(taken: list[int], rule: str, options: dict[str, Any]) -> None:
    params, optimizer = make(rule, options)
    others, unbroken = make(rule, options)
    for number in range(6):
        step(params, optimizer, number)
        step(others, unbroken, number)
        if number in (1, 2, 4):
            optimizer.park()
            assert places(optimizer) == {"cpu"}
            assert all(value.is_pinned() for value in optimizer.state[params[0]].values())
            same(optimizer, unbroken, params, others)
            if number == 4:
                optimizer.unpark()
                assert places(optimizer) == {"cuda"}
        same(optimizer, unbroken, params, others)
    assert len(taken) == 1, "the host's memory is used again"


@pytest.mark.parametrize("schedule", ["plain", "stats", "backward", "forward"])
def test_memory_is_freed(taken: list[int], schedule: str) -> None:
    """State of 512 MiB is gone from the device, and the rate of copies is printed."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).to(DEVICE)
    options = {"stats": tilestep.Stats(), "track_changes": True} if schedule == "stats" else {}
    optimizer: Any = tilestep.AdamW(model.parameters(), **options)
    if schedule in ("backward", "forward"):
        tilestep.overlap(optimizer, model, during=schedule)

    def train() -> None:
        model(torch.ones(4, 4096, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    size = 2 * 4 * 4 * 4096 * 4096
    gc.disable()
    try:
        for _ in range(3):
            torch.cuda.synchronize()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            optimizer.park()
            out = time.perf_counter() - begin
            assert before - torch.cuda.memory_allocated() >= size
            begin = time.perf_counter()
            optimizer.unpark()
            torch.cuda.synchronize()
            back = time.perf_counter() - begin
            assert torch.cuda.memory_allocated() < before + 0.01 * size
            print(f"{schedule}: {size / out / 1e9:.1f} GB/s to the host, {size / back / 1e9:.1f} GB/s back")
            train()
    finally:
        gc.enable()
    assert len(taken) == 1 and size <= taken[0] < 1.01 * size


def test_values_have_arrived_when_the_host_goes_on() -> None:
    """From page-locked memory, whose contents change afterwards; and into memory that a plan that failed has freed."""
    params = [nn.Parameter(torch.ones(1 << 22, device=DEVICE)) for _ in range(100)]
    optimizer: Any = tilestep.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = optimizer.state[params[0]]["exp_avg"].clone()
    optimizer.park()
    sources = [optimizer.state[param]["exp_avg"] for param in params]
    optimizer.unpark()
    for source in sources:
        source.fill_(3)
    assert all(torch.equal(optimizer.state[param]["exp_avg"], expected) for param in params)
    optimizer.park()
    kept = optimizer.state[params[-1]]["exp_avg_sq"]
    optimizer.state[params[-1]]["exp_avg_sq"] = params[-1].detach()
    with pytest.raises(tilestep.GradientError, match="shares memory"):
        optimizer.unpark()
    ones = [torch.ones(1 << 22, device=DEVICE) for _ in range(200)]
    torch.cuda.synchronize()
    assert all((one == 1).all() for one in ones)
    assert places(optimizer) == {"cpu", "cuda"}, "as before"
    optimizer.state[params[-1]]["exp_avg_sq"] = kept
    optimizer.step()


def test_fully_sharded_states(one_rank: None) -> None:
    runs = []
    for parks in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(130, 90), nn.Tanh(), nn.Linear(90, 64)).to(DEVICE, torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        optimizer: Any = tilestep.AdamW(model.parameters(), lr=0.01, master_weights=True, max_grad_norm=1.0)
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            batch = torch.randn(8, 130, generator=generator).to(DEVICE, torch.bfloat16)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if parks and number in (1, 3):
                optimizer.park()
                state = next(iter(optimizer.state.values()))
                assert state["master_param"].to_local().device.type == "cpu"
                assert optimizer.state_dict()["state"][0]["exp_avg"].to_local().is_pinned()
        runs.append((optimizer, list(model.parameters())))
    (one, mine), (two, other) = runs
    for left, right in zip(mine, other, strict=True):
        assert torch.equal(left.full_tensor(), right.full_tensor())
        for key, value in one.state[left].items():
            expected = two.state[right][key]
            parts = (value, expected) if key == "step" else (value.to_local(), expected.to_local())
            assert torch.equal(*parts), key


def test_sharded_states(one_rank: None) -> None:
    runs = []
    for parks in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(130, 90), nn.Tanh(), nn.Linear(90, 64)).to(DEVICE)
        optimizer: Any = tilestep.shard(tilestep.AdamW(model.parameters(), lr=0.01, state_dtype="int8"), model)
        for number in range(5):
            model(
                torch.randn(8, 130, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if parks and number in (1, 3):
                optimizer.park()
                assert places(optimizer) == {"cpu"}
        optimizer.wait()
        runs.append((optimizer.full_state_dict()["state"], list(model.parameters())))
    (one, mine), (two, other) = runs
    assert all(map(torch.equal, mine, other))
    for number, state in two.items():
        assert all(torch.equal(bits(one[number][key]), bits(value)) for key, value in state.items())


def test_graphs() -> None:
    params, optimizer = make("AdamW", {"max_grad_norm": 1.0})
    others, unbroken = make("AdamW", {"max_grad_norm": 1.0})
    step(params, optimizer, 0)
    step(others, unbroken, 0)
    captured = tilestep.capture(optimizer)
    optimizer.park()
    assert captured.is_stale
    with pytest.raises(tilestep.CaptureError, match="stale"):
        captured.replay()
    assert places(optimizer) == {"cpu"}
    tilestep.capture(optimizer).replay()
    unbroken.step()
    same(optimizer, unbroken, params, others)
    optimizer.prepare_capture()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    with pytest.raises(tilestep.CaptureError, match=r"park\(\) frees memory that a CUDA graph of your own"):
        optimizer.park()


@pytest.mark.parametrize("rule", ["AdamW", "Prodigy", "ScheduleFreeAdamW"])
def test_states_are_reset_without_a_wait_of_the_host(rule: str) -> None:
    params, optimizer = make(rule, {"master_weights": True, "state_dtype": "int8"})
    step(params, optimizer, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.reset_state()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(state["step"] == 0 for state in optimizer.state.values())
