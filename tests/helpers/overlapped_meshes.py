"""Overlapped optimizers on several meshes, with weights that are shared or unused, with state on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from offloaded_pairs import streamed
from overlapped_models import adamw, clipped
from overlapped_pairs import DURING, Pair, Stack, device, fsdp, local, one_batch
from pairwise import pairwise
from sharded_models import LAYOUTS, batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tilestep


class Tied(Stack):
    """The head's weight is the embedding's: both are of the root's group, and one gradient is the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Idle(Stack):
    """Every block has a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.idle = nn.Linear(3, 3)


def _sharded(kind: type[Stack]) -> nn.Module:
    torch.manual_seed(0)
    model = kind().to(device())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tied() -> nn.Module:
    return _sharded(Tied)


def idle() -> nn.Module:
    return _sharded(Idle)


def loss_on(layout: str) -> Callable[[nn.Module, int], torch.Tensor]:
    """The loss of this rank's batch, for a model of `LAYOUTS`."""
    return lambda model, step: model(batch(step, layout)).square().mean()


def skipping(params: Any) -> tilestep.Optimizer:
    return adamw(params, skip_nonfinite=True)


def _trained(builds: dict[Callable[[], nn.Module], Any]) -> None:
    """Train models with losses."""
    for build, during, make in pairwise(list(builds), DURING, (adamw, clipped, skipping)):
        pair = Pair(make, during, build)
        for step in range(3):
            pair.step(step, builds[build])
        pair.compare()


def shared_weights() -> None:
    _trained({tied: one_batch})


def unused_parameters() -> None:
    """A group whose last gradient never comes is updated by the step, and what has none is left alone."""
    _trained({idle: one_batch})
    pair = Pair(adamw, "backward", idle)
    before = local(pair.overlapped.blocks[0].idle.weight).clone()  # type: ignore[index, union-attr]
    one_batch(pair.overlapped, 0).backward()
    assert "the root module" in pair.optimizer.applied_groups and len(pair.optimizer.applied_groups) == 1
    pair.optimizer.step()
    assert torch.equal(local(pair.overlapped.blocks[0].idle.weight), before)  # type: ignore[index, union-attr]


def several_meshes() -> None:
    """Clip, skip and steps that run beside other work, with parameters on two meshes, and beside plain tensors."""
    builds = {LAYOUTS[layout][0]: loss_on(layout) for layout in ("mixed", "tensor_parallel")}
    _trained(builds)
    for build in builds:
        kinds = {isinstance(param, DTensor) and param.device_mesh.ndim for param in build().parameters()}
        assert len(kinds) > 1, kinds


def accumulation_on_several_meshes() -> None:
    for layout, during, make in pairwise(("hsdp", "mixed"), DURING, (adamw, clipped)):
        loss = loss_on(layout)
        pair = Pair(make, during, LAYOUTS[layout][0])
        for step in range(3):
            for model, optimizer in pair.both:
                model.set_requires_gradient_sync(False)
                loss(model, 10 * step).backward()
                model.set_requires_gradient_sync(True)
                loss(model, 10 * step + 5).backward()
                optimizer.step()
                optimizer.zero_grad()
        pair.compare()


def offloaded_state() -> None:
    """Shards' state in host memory, streamed group by group when their updates run."""
    for during in DURING:
        for make in (adamw, clipped):
            pair = Pair(make, during, fsdp)
            moved = fsdp()
            optimizer: Any = tilestep.overlap(streamed(500, 2)(make(moved.parameters())), moved, during)  # type: ignore[arg-type]
            for step in range(3):
                one_batch(moved, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                pair.step(step)
            optimizer.synchronize()
            for param, wanted in zip(moved.parameters(), pair.serial.parameters()):
                assert torch.equal(local(param), local(wanted))
                state, known = optimizer.state[param], pair.reference.state[wanted]
                assert torch.equal(local(state["exp_avg"]).cpu(), local(known["exp_avg"]).cpu())


CHECKS = [shared_weights, unused_parameters, offloaded_state]
WIDE_CHECKS = [several_meshes, accumulation_on_several_meshes]
