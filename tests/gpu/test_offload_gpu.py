"""State in host memory on one GPU: what it is on the device without, to the bit, with races looked for and no waits.

python -m pytest tests/gpu/test_offload_gpu.py
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloaded_pairs import MATRICES, SHAPES, Homes, Pair, on_host, streamed
from synchronization import no_synchronization

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.timeline.side_stream import SideStream

CUDA = "cuda:0"
HOMES: dict[str, Homes] = {
    "tiles": streamed(),
    "100 kB, one buffer": streamed(100_000, 1),
    "200 kB, two buffers": streamed(200_000, 2),
    "200 kB, three buffers": streamed(200_000, 3),
    "one chunk": streamed(1 << 30),
}
RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True, "max_grad_norm": 1.0},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Lion": {},
    "LAMB": {},
    "Adafactor": {},
    "Prodigy": {},
    "SOAP": {},
}
STORAGES: dict[str, tuple[torch.dtype, Any]] = {
    "fp32": (torch.float32, False),
    "bf16 with masters": (torch.bfloat16, True),
    "bf16 with remainders": (torch.bfloat16, "remainder"),
    "bf16": (torch.bfloat16, False),
}


@pytest.fixture(params=HOMES.values(), ids=HOMES.keys())
def home(request: pytest.FixtureRequest) -> Homes:
    return request.param


def clipped(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=1e-2, max_grad_norm=1.0)


def shapes_for(rule: str) -> list[tuple[int, ...]]:
    return MATRICES if rule == "SOAP" else SHAPES


@pytest.mark.parametrize(("dtype", "master"), STORAGES.values(), ids=STORAGES.keys())
@pytest.mark.parametrize("rule", RULES)
def test_streamed_updates_are_those_on_the_device(rule: str, dtype: torch.dtype, master: Any) -> None:
    for home in (HOMES["tiles"], HOMES["200 kB, three buffers"]):
        pair = Pair(
            lambda params: tilestep.Optimizer(params, rule, master_weights=master, **RULES[rule]),
            home,
            shapes_for(rule),
            dtype,
            CUDA,
        )
        for step in range(5):
            pair.step(missing=lambda place, step=step: (place + step) % 5 == 1)
        pair.compare()


def test_a_hundred_steps(home: Homes) -> None:
    pair = Pair(clipped, home, device=CUDA)
    pair.step(100)
    pair.compare()


@pytest.mark.parametrize(("dtype", "master"), STORAGES.values(), ids=STORAGES.keys())
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor"])
def test_updates_on_the_host_are_those_of_a_cpu(rule: str, dtype: torch.dtype, master: Any) -> None:
    """Without a clip: norms of a GPU and of a CPU differ in their last digits."""
    for home in (on_host(), on_host(200_000)):
        pair = Pair(lambda params: tilestep.Optimizer(params, rule, master_weights=master), home, SHAPES, dtype, CUDA)
        cpu = [torch.nn.Parameter(param.detach().cpu()) for param in pair.moved]
        reference = tilestep.Optimizer(cpu, rule, master_weights=master)
        for _ in range(5):
            pair.set_gradients()
            for param, moved in zip(cpu, pair.moved):
                param.grad = moved.grad.cpu()
            reference.step()
            pair.optimizer.step()
        for param, moved in zip(cpu, pair.moved):
            assert torch.equal(param, moved.cpu())


def test_a_clip_on_the_host_is_nearly_the_device_s() -> None:
    pair = Pair(clipped, on_host(200_000), device=CUDA)
    pair.step(10)
    for left, right in zip(pair.plain, pair.moved):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pair.reference.grad_norm.cpu(), pair.optimizer.grad_norm.cpu())


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Copies and updates that begin later than they could, each time by another while."""
    chance = random.Random(seed)
    copy, mark = SideStream.copy, SideStream.mark

    def later(self: SideStream, pairs: Any) -> None:
        with self.working():
            if chance.random() < 0.6:
                torch.cuda._sleep(chance.randrange(2_000_000))
        copy(self, pairs)
        with self.working():
            if chance.random() < 0.3:
                torch.cuda._sleep(chance.randrange(2_000_000))

    def marked(self: SideStream) -> Any:
        if chance.random() < 0.3:
            with self.working():
                torch.cuda._sleep(chance.randrange(2_000_000))
        return mark(self)

    SideStream.copy, SideStream.mark = later, marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideStream.copy, SideStream.mark = copy, mark  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor"])
def test_nothing_is_read_before_it_has_arrived(rule: str, home: Homes) -> None:
    pair = Pair(lambda params: tilestep.Optimizer(params, rule, max_grad_norm=1.0), home, device=CUDA)
    with delays(len(rule)):
        for step in range(6):
            pair.step()
            if step == 3:
                pair.optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.compare()


def test_nothing_is_read_before_it_has_arrived_on_the_host() -> None:
    pair = Pair(tilestep.AdamW, on_host(100_000), device=CUDA)
    quiet = Pair(tilestep.AdamW, on_host(100_000), device=CUDA)
    quiet.step(6)
    with delays(1):
        pair.step(6)
        for left, right in zip(pair.moved, quiet.moved):
            assert torch.equal(left, right)


@pytest.mark.parametrize("name", [name for name in HOMES if name != "tiles"])
def test_a_streamed_step_does_not_wait(name: str) -> None:
    """Of fewer launches than a GPU takes before it has run the first."""
    home = HOMES[name]
    pair = Pair(clipped, home, device=CUDA)
    for _ in range(4):
        # Behind a busy device the allocators take what they need in the end, and then wait for no more.
        torch.cuda._sleep(100_000_000)
        pair.step()
    pair.set_gradients()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    with no_synchronization():
        pair.optimizer.step()
    done.record()
    assert not done.query(), "the host has waited for the device"
    pair.reference.step()
    pair.compare()


@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["tilestep's", "torch's"])
@pytest.mark.parametrize("where", ["streamed", "on the host"])
def test_scalers(where: str, kind: Any) -> None:
    home = streamed(100_000) if where == "streamed" else on_host(100_000)
    pair = Pair(lambda params: tilestep.AdamW(params, lr=1e-2), home, device=CUDA)
    scalers = [kind("cuda", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(8):
        for scaler in scalers:
            scaler.scale(torch.ones((), device=CUDA))
        pair.set_gradients(factor=scalers[0].get_scale())
        if step in (2, 5):
            for params in (pair.plain, pair.moved):
                params[4].grad[7] = float("inf")
        for scaler, optimizer in zip(scalers, (pair.reference, pair.optimizer)):
            scaler.step(optimizer)
            scaler.update()
        for left, right in zip(pair.plain, pair.moved):
            torch.testing.assert_close(left.grad, right.grad)
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert float(pair.optimizer.state[pair.moved[0]]["step"]) == 6


def test_the_device_holds_buffers_and_no_state() -> None:
    """100 M bfloat16 parameters: 1.2 GB of masters and moments that are never on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    params = [torch.nn.Parameter(torch.zeros(10_000_000, dtype=torch.bfloat16, device=CUDA)) for _ in range(10)]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = tilestep.offload(
        lambda: tilestep.AdamW(params, master_weights=True), where="gpu", chunk_mb=32, buffers=3
    )
    for _ in range(3):
        optimizer.step()
    optimizer.wait()
    # Three buffers, and tables: tiles take 4 bytes for each 512 elements, twice.
    assert torch.cuda.max_memory_allocated() - before < 3 * 33 * 2**20 + 16 * 2**20
    state = optimizer.state[params[0]]
    assert state["master_param"].is_pinned() and state["exp_avg"].device.type == "cpu"
    report = optimizer.offload_report()
    assert report.where == "gpu" and report.host_bytes >= 12 * 100_000_000


def test_updates_run_on_the_gpu_unless_told() -> None:
    params = [torch.nn.Parameter(torch.zeros(100_000, device=CUDA))]
    optimizer = tilestep.offload(tilestep.AdamW(params))
    assert optimizer.offload_report().where == "gpu" and isinstance(optimizer.memory, StreamedState)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert float(params[0].detach().abs().sum()) > 0


def test_memory_is_unlocked_when_it_is_let_go() -> None:
    """The same address can be locked again, which CUDA refuses for memory that is locked."""
    for _ in range(3):
        params = [torch.nn.Parameter(torch.zeros(20_000_000, device=CUDA))]
        optimizer = tilestep.offload(lambda params=params: tilestep.AdamW(params), where="gpu")
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        del optimizer, params
        gc.collect()
    torch.zeros(1, device=CUDA).add_(1)


def test_checkpoints_cross_devices() -> None:
    for make in (streamed(100_000), on_host(100_000)):
        pair = Pair(lambda params: tilestep.AdamW(params, lr=1e-2), make, device=CUDA)
        pair.step(2)
        pair.optimizer.load_state_dict(pair.reference.state_dict())
        pair.step(2)
        for left, right in zip(pair.plain, pair.moved):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
        pair.reference.load_state_dict(pair.optimizer.state_dict())
        # Step counts come to the device with the next step, as torch's stay on the CPU after a load.
        states = pair.reference.state.values()
        assert all(value.is_cuda for state in states for name, value in state.items() if name != "step")
        pair.set_gradients()
        pair.reference.step()
        assert all(value.is_cuda for state in states for value in state.values())


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(CUDA)


def test_gradients_leave_the_device_while_backward_runs() -> None:
    """To the bit what updates on the host make of gradients that stay, over several microbatches; less memory."""
    peaks, weights = [], []
    for keeps in (False, True):
        model = layers()
        optimizer = tilestep.AdamW(model.parameters(), lr=1e-2)
        home = HostState(torch.device(CUDA), 1 << 20, keeps_gradients=keeps)
        moved = move_state(optimizer, home, "cpu", "for a test")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for step in range(4):
            for part in range(3):
                data = torch.full((4, 512), 0.01 * (step + part + 1), device=CUDA)
                model(data).square().mean().backward()
            assert all((param.grad is None) is keeps for param in model.parameters())
            moved.step()
            moved.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weights.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *weights))
    size = sum(weight.nbytes for weight in weights[0])
    assert peaks[1] < peaks[0] - size / 3


def test_backward_does_not_wait_for_gradients_on_their_way() -> None:
    model = layers()
    home = HostState(torch.device(CUDA), 1 << 20, keeps_gradients=True)
    optimizer = move_state(tilestep.AdamW(model.parameters()), home, "cpu", "for a test")
    data = torch.ones(4, 512, device=CUDA)
    for _ in range(3):
        torch.cuda._sleep(100_000_000)
        model(data).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    done = torch.cuda.Event()
    with no_synchronization():
        model(data).square().mean().backward()
    done.record()
    assert not done.query(), "backward has waited for the device"
    optimizer.step()


@pytest.mark.parametrize("during", ["backward", "forward"])
def test_overlapped_updates_are_streamed(during: Any) -> None:
    plain, moved = layers(), layers()
    reference = tilestep.AdamW(plain.parameters(), lr=1e-2)
    optimizer = tilestep.overlap(streamed(300_000)(tilestep.AdamW(moved.parameters(), lr=1e-2)), moved, during=during)
    for step in range(10):
        data = torch.full((4, 512), 0.01 * (step + 1), device=CUDA)
        for net, each in ((plain, reference), (moved, optimizer)):
            net(data).square().mean().backward()
            each.step()
            each.zero_grad()
    for left, right in zip(plain.state_dict().values(), moved.state_dict().values()):
        assert torch.equal(left, right)


@pytest.fixture
def one_rank() -> Iterator[None]:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(policy: Any | None = None) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(CUDA)
    mesh = init_device_mesh("cuda", (1,))
    options = {} if policy is None else {"offload_policy": policy}
    return fully_shard(model, mesh=mesh, **options)


def trained(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    for step in range(4):
        data = torch.full((8, 256), 0.1 * (step + 1), device=CUDA)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach().cpu() for param in model.parameters()]  # type: ignore[attr-defined]


def test_fsdp_shards(one_rank: None) -> None:
    """State on the host as DTensors of the GPU's mesh."""
    from torch.distributed.tensor import DTensor

    reference = sharded()
    wanted = trained(reference, clipped(reference.parameters()))
    moves: list[Callable[[Any], Any]] = [streamed(100_000), on_host(100_000)]
    for place, move in enumerate(moves):
        model = sharded()
        optimizer = move(clipped(model.parameters()))
        found = trained(model, optimizer)
        for left, right in zip(found, wanted):
            if place:
                # The host's norm has another order of sums, and Adam makes much of the smallest gradients.
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(left, right)
        state = optimizer.state[next(iter(model.parameters()))]["exp_avg"]
        assert isinstance(state, DTensor) and state.to_local().device.type == "cpu"


def test_parameters_that_fsdp_offloads(one_rank: None) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    left, right = sharded(CPUOffloadPolicy()), sharded(CPUOffloadPolicy())
    optimizer = tilestep.offload(clipped(right.parameters()))
    assert optimizer.offload_report().where == "here"
    found = trained(right, optimizer)
    for one, other in zip(found, trained(left, clipped(left.parameters()))):
        assert torch.equal(one, other)
    state = optimizer.state[next(iter(right.parameters()))]["exp_avg"]
    assert state.to_local().device.type == "cpu"
