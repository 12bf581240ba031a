"""What other code writes to low-precision parameters is what trains on, through `param.data` too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from twins import make_params, train

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import checksums
from tilestep.memory.streaming import StreamedState
from tilestep.storage import MASTER_FORMATS

SHAPES = [(5,), (4, 6), (0,), (3, 2, 3, 3), (700,)]
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill": lambda data: data.fill_(5.0),
    "clamp": lambda data: data.clamp_(-0.25, 0.25),
    "one element": lambda data: data.view(-1)[:1].fill_(-3.0),
    "zero": lambda data: data.zero_(),
    "nan": lambda data: data.view(-1)[:2].fill_(torch.nan),
    "infinity": lambda data: data.view(-1)[:2].fill_(-torch.inf),
}
CHOICES = [(choice, dtype) for choice, format in MASTER_FORMATS.items() for dtype in format.dtypes]


def standing(params: list[Any], optimizer: Any) -> None:
    """A step that leaves values as they are."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()


def trained(choice: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, list[Any]]:
    params = make_params(SHAPES, dtype)
    optimizer = tilestep.AdamW(params, lr=3e-3, weight_decay=0.0, master_weights=choice, **options)
    train([(optimizer, params)], range(3))
    return optimizer, params


def exact(optimizer: Any, param: Any) -> torch.Tensor:
    format = next(kind for kind in MASTER_FORMATS.values() if kind.key in optimizer.state[param])
    return format.values(param, optimizer.state[param][format.key])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("choice", "dtype"), CHOICES)
def test_writes_through_data_stay(choice: Any, dtype: torch.dtype, write: str) -> None:
    optimizer, params = trained(choice, dtype)
    kept = [exact(optimizer, param) for param in params]
    for param in params:
        if param.numel():
            WRITES[write](param.data)
    written = [param.detach().clone() for param in params]
    standing(params, optimizer)
    for param, before, value in zip(params, written, kept):
        torch.testing.assert_close(param.detach(), before, rtol=0, atol=0, equal_nan=True)
        # A parameter that no other code has written to keeps its exact master.
        same = before == value.to(dtype)
        assert torch.equal(exact(optimizer, param)[same], value[same])
        if MASTER_FORMATS[choice].begins_as_parameter:
            torch.testing.assert_close(exact(optimizer, param)[~same], before[~same].float(), equal_nan=True)


@pytest.mark.parametrize(("choice", "dtype"), CHOICES)
def test_what_was_written_trains_on(choice: Any, dtype: torch.dtype) -> None:
    """Within what a unit in the parameter's last place is, as a new optimizer over what was written."""
    optimizer, params = trained(choice, dtype)
    fresh = [torch.nn.Parameter(torch.full_like(param, 5.0)) for param in params]
    for param in params:
        param.data.fill_(5.0)
    for group in optimizer.param_groups:
        group.update(lr=1e-2, betas=(0.0, 0.999))
    other = tilestep.AdamW(fresh, lr=1e-2, weight_decay=0.0, betas=(0.0, 0.999), master_weights=choice)
    other.load_state_dict({**optimizer.state_dict(), "state": strip(optimizer.state_dict()["state"])})
    train([(optimizer, params), (other, fresh)], range(3, 8))
    for param, twin in zip(params, fresh):
        torch.testing.assert_close(param.float(), twin.float(), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("choice", [choice for choice, dtype in CHOICES if dtype is torch.bfloat16])
def test_a_copy_has_what_was_written(choice: Any) -> None:
    """A copy made between a write and the next step steps as its original: what was written has no correction."""
    optimizer, params = trained(choice, torch.bfloat16)
    with torch.no_grad():
        for param in params:
            param.mul_(1.5)
    other, others = pickle.loads(pickle.dumps((optimizer, params)))
    train([(optimizer, params), (other, others)], range(3, 6))
    for mine, theirs in zip(params, others):
        assert torch.equal(mine, theirs)
        assert torch.equal(exact(optimizer, mine), exact(other, theirs))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("choice", [choice for choice, dtype in CHOICES if dtype is torch.bfloat16])
def test_a_checkpoint_has_what_was_written(choice: Any, sharded: bool) -> None:
    """Saved and loaded between a write and the next step, training goes on as without that."""
    if sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runs = [checkpointed(choice, sharded, loads) for loads in (False, True)]
    finally:
        if sharded:
            dist.destroy_process_group()
    assert torch.equal(*runs)


def checkpointed(choice: Any, sharded: bool, loads: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False).bfloat16()
    optimizer: Any = tilestep.AdamW(model.parameters(), lr=1e-2, master_weights=choice)
    optimizer = tilestep.shard(optimizer, model) if sharded else optimizer
    for step in range(6):
        model(torch.randn(8, 16).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.weight.mul_(1.5)
            if loads:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model.weight.detach().clone()


def strip(state: dict[int, Any]) -> dict[int, Any]:
    """A checkpoint's state without masters."""
    keys = {format.key for format in MASTER_FORMATS.values()}
    return {index: {key: v for key, v in own.items() if key not in keys} for index, own in state.items()}


@pytest.mark.parametrize(("choice", "dtype"), CHOICES)
def test_during_backward_too(choice: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5).to(dtype)
    optimizer = tilestep.overlap(
        tilestep.SGD(model.parameters(), lr=0.0, master_weights=choice), model, during="backward"
    )
    inputs = torch.randn(3, 6, dtype=dtype)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    model.weight.data.fill_(5.0)
    model.bias.data.clamp_(0.0, 0.1)
    bias = model.bias.detach().clone()
    step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 5.0)) and torch.equal(model.bias, bias)


@pytest.mark.parametrize(("choice", "dtype"), CHOICES)
def test_with_state_in_host_memory_too(choice: Any, dtype: torch.dtype) -> None:
    params = make_params(SHAPES, dtype)
    optimizer: Any = tilestep.AdamW(params, lr=3e-3, weight_decay=0.0, master_weights=choice)
    optimizer = move_state(optimizer, StreamedState(torch.device("cpu"), 1, 3), "gpu", "for a test")
    train([(optimizer, params)], range(3))
    for param in params:
        param.data.fill_(5.0)
    standing(params, optimizer)
    for param in params:
        assert torch.equal(param, torch.full_like(param, 5.0))


@pytest.mark.parametrize("write", [*WRITES, "sign"])
@pytest.mark.parametrize("choice", [False, True, "remainder"])
@pytest.mark.parametrize("keeps", [False, True], ids=["gradients there", "gradients kept"])
def test_with_the_update_on_the_host_too(choice: Any, write: str, keeps: bool) -> None:
    dtype = torch.bfloat16 if choice else torch.float32
    params = make_params(SHAPES, dtype)
    optimizer: Any = tilestep.AdamW(params, lr=3e-3, weight_decay=0.0, master_weights=choice)
    home = HostState(torch.device("cpu"), 1, keeps_gradients=keeps)
    optimizer = move_state(optimizer, home, "cpu", "for a test")
    train([(optimizer, params)], range(3))
    for turn in range(2):
        for param in params[turn:]:
            if param.numel():
                WRITES.get(write, torch.neg_)(param.data)
        written = [param.detach().clone() for param in params]
        standing(params, optimizer)
        for param, before in zip(params, written):
            torch.testing.assert_close(param.detach(), before, rtol=0, atol=0, equal_nan=True)


def test_checksums_tell_every_change_of_one_element_and_every_exchange_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        tensors = [torch.randn(5000, generator=generator, dtype=dtype), torch.zeros((), dtype=dtype), torch.ones(0)]
        tensors.append(torch.randn(30, 70, generator=generator, dtype=dtype).t())
        before = checksums(tensors)
        assert torch.equal(checksums(tensors), before)
        for place in (0, 1, 1023, 1024, 4999):
            kept = tensors[0][place].clone()
            tensors[0][place] = -kept
            assert not torch.equal(checksums(tensors), before)
            tensors[0][place] = kept
            for other in (2, 2047, 3000):
                tensors[0][[place, other]] = tensors[0][[other, place]]
                assert not torch.equal(checksums(tensors), before)
                tensors[0][[place, other]] = tensors[0][[other, place]]
        assert torch.equal(checksums(tensors), before)
