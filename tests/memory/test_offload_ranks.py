"""Sharded parameters with their state on the host: FSDP2, HSDP, tensor-parallel and mixed models on gloo ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from offloaded_pairs import Homes, on_host, streamed
from pairwise import pairwise
from rank_processes import run_on_ranks
from sharded_models import LAYOUTS, backward, batch, full, here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tilestep
from tilestep import compat
from tilestep.placement import distribute
from tilestep.storage import shape_of_entries

HOMES: list[Homes] = [streamed(500, 2), on_host(500)]


def trained(layout: str, home: Homes | None, rule: str, steps: int) -> tuple[Any, Any]:
    net = LAYOUTS[layout][0]()
    optimizer: Any = tilestep.Optimizer(net.parameters(), rule, lr=1e-2, max_grad_norm=0.05)
    if home is not None:
        optimizer = home(optimizer)
    for step in range(steps):
        backward(net, batch(step, layout))
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def shards_are_updated_as_without() -> None:
    """Reductions over tensors (LAMB) meet between the passes; state is DTensors."""
    for layout, rule, home in pairwise(LAYOUTS, ("AdamW", "LAMB"), HOMES):
        reference, expected = trained(layout, None, rule, 3)
        net, optimizer = trained(layout, home, rule, 3)
        for param, other in zip(net.parameters(), reference.parameters()):
            assert torch.equal(*here(param, other)), (layout, rule)
            state, wanted = optimizer.state[param], expected.state[other]
            assert isinstance(state["exp_avg"], DTensor) is isinstance(param, DTensor)
            assert torch.equal(*here(state["exp_avg"], wanted["exp_avg"]))


def gradients_of_shards_leave_the_device() -> None:
    shards_whose_gradients_leave(streamed(500, 2, keeps_gradients=True), on_host(500, keeps_gradients=True))


def shards_whose_gradients_leave(*homes: Homes) -> None:
    """Each microbatch's, once it is reduced; a partial sum stays for the step, which all ranks take together."""
    for layout in LAYOUTS:
        nets = [LAYOUTS[layout][0]() for _ in range(1 + len(homes))]
        plain, *moved = nets
        reference, *made = (tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.05) for net in nets)
        optimizers = [home(optimizer) for home, optimizer in zip(homes, made)]
        for step in range(2):
            for part in range(2):
                for net in nets:
                    backward(net, batch(2 * step + part, layout))
                for net in moved:
                    left = left_of(net)
                    assert all(gradient.placements != param.placements for gradient, param in left)
                    assert len(left) < len(list(net.parameters())), layout
            for stepped in (reference, *optimizers):
                stepped.step()
            assert all(param.grad is None for net in moved for param in net.parameters())
            reference.zero_grad()
            assert all(torch.equal(reference.grad_norm, other.grad_norm) for other in optimizers), (layout, step)
        for net in moved:
            for one, other in zip(plain.parameters(), net.parameters()):
                assert torch.equal(*here(one, other)), layout


def left_of(net: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Gradients that are still beside their parameters."""
    return [(param.grad, param) for param in net.parameters() if param.grad is not None]


def checkpoints_are_saved_and_loaded() -> None:
    for home in HOMES:
        net, optimizer = trained("fsdp", home, "AdamW", 2)
        saved = get_optimizer_state_dict(net, optimizer)
        dcp.save(saved, checkpoint_id="offloaded")
        other, fresh = trained("fsdp", home, "AdamW", 0)
        state = get_optimizer_state_dict(other, fresh)
        dcp.load(state, checkpoint_id="offloaded")
        set_optimizer_state_dict(other, fresh, state)
        for param, original in zip(other.parameters(), net.parameters()):
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(*here(fresh.state[param][name], optimizer.state[original][name])), name


def checkpoints_are_written_beside_training() -> None:
    """States lie in one memory on the host, most not at its beginning; `async_save` copies them all the same."""
    group = dist.new_group()
    for home in HOMES:
        net, optimizer = trained("fsdp", home, "AdamW", 2)
        kept = [full(optimizer.state[param]["exp_avg_sq"]).clone() for param in net.parameters()]
        saved = get_optimizer_state_dict(net, optimizer)
        writing: Any = dcp.async_save(saved, checkpoint_id="beside", process_group=group)
        for step in range(2, 5):
            backward(net, batch(step, "fsdp"))
            optimizer.step()
        writing.result()
        other, fresh = trained("fsdp", home, "AdamW", 0)
        state = get_optimizer_state_dict(other, fresh)
        dcp.load(state, checkpoint_id="beside")
        set_optimizer_state_dict(other, fresh, state)
        for param, wanted in zip(other.parameters(), kept):
            assert torch.equal(full(fresh.state[param]["exp_avg_sq"]), wanted)


def parameters_that_fsdp_offloads_need_nothing() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return fully_shard(made, offload_policy=CPUOffloadPolicy(pin_memory=False))

    left, right = model(), model()
    reference = tilestep.AdamW(left.parameters(), lr=1e-2, max_grad_norm=0.05)
    optimizer = tilestep.offload(tilestep.AdamW(right.parameters(), lr=1e-2, max_grad_norm=0.05))
    assert optimizer.offload_report().where == "here"
    for step in range(3):
        for net, stepped in ((left, reference), (right, optimizer)):
            backward(net, batch(step, "fsdp"))
            stepped.step()
            stepped.zero_grad()
    for one, other in zip(left.parameters(), right.parameters()):
        assert torch.equal(*here(one, other))


def a_distributed_tensor_is_made_around_what_lies_elsewhere() -> None:
    """The private constructor, on a mesh where the public one gives the same."""
    net, _ = trained("fsdp", None, "AdamW", 0)
    for param in net.parameters():
        part = torch.zeros_like(compat.local_parts([param])[0], dtype=torch.float64)
        made = compat.distributed_like(part, param, param.shape, param.stride(), param.placements)
        public = DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
        assert compat.local_parts([made])[0] is part
        assert made.shape == public.shape and made.dtype is public.dtype and made.stride() == public.stride()
        assert made.placements == public.placements and torch.equal(full(made), full(public))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torch.distributed.tensor._dtensor_spec", None)
            assert compat.distributed_like(part, param, param.shape, param.stride(), param.placements) is part


def states_on_the_host_are_not_copied_to_the_device_of_a_mesh() -> None:
    """Arrays of codes and scales were copied: checkpoints had what they held when the optimizer was made."""
    net, _ = trained("fsdp", None, "AdamW", 0)
    param = next(net.parameters())
    local = compat.local_parts([param])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(param.device_mesh), "device_type", "meta")
        for elements in (1, 2, 128):
            part = torch.zeros(shape_of_entries(local.shape, elements))
            made = distribute(part, param, None, elements)
            assert compat.local_parts([made])[0] is part
            assert made.shape == shape_of_entries(param.shape, elements)


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        shards_are_updated_as_without,
        gradients_of_shards_leave_the_device,
        checkpoints_are_saved_and_loaded,
        checkpoints_are_written_beside_training,
        parameters_that_fsdp_offloads_need_nothing,
        a_distributed_tensor_is_made_around_what_lies_elsewhere,
        states_on_the_host_are_not_copied_to_the_device_of_a_mesh,
    )
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ranks"))
        yield run_on_ranks(CHECKS, 4)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
