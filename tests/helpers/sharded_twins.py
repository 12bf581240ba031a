"""A sharded model beside its twin: plain, whole on every rank, with gradients summed up by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tilestep

Make = Callable[[Any], torch.optim.Optimizer]
TINY = 71 / 2**20
"""A bucket of 71 bytes, in MiB."""

TOLERANCES: dict[str, float] = {}
"""For what is equal to the bit only where the gradients are: libraries compute matrices by the memory's alignment."""


class Elementwise(nn.Module):
    """A model whose parameters are the smallest that are still cut in odd places: 11 of 7 elements."""

    def __init__(self, layers: int = 11, size: int = 7) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(1, size) + 1) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum((index + 1) * weight * inputs for index, weight in enumerate(self.weights))


class Convolutions(nn.Module):
    """Convolutions, a normalization and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 5, 2, bias=False))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs).mean((2, 3)))


class Branches(nn.Module):
    """Each forward uses the branches it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, data: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for index in chosen:
            data = torch.tanh(self.branches[index](data))
        return data.square().sum()


def sgd(params: Any) -> tilestep.Optimizer:
    return tilestep.SGD(params, lr=0.05, momentum=0.9)  # type: ignore[attr-defined]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05, "weight_decay": 0.3}]


class Pair:
    """A model with a sharded optimizer, and its twin with an ordinary one that gets the gradients' mean over ranks."""

    def __init__(
        self, model: nn.Module, make: Make, groups: Callable[[nn.Module], Any] | None = None, **options: Any
    ) -> None:
        groups = groups or (lambda module: list(module.parameters()))
        self.twin = copy.deepcopy(model)
        self.twin_optimizer = make(groups(self.twin))
        self.model = model
        mine = make(groups(model))
        assert isinstance(mine, tilestep.Optimizer)
        self.optimizer = tilestep.shard(mine, model, **options)
        self.divisor = dist.get_world_size() if options.get("average", True) else 1

    def backward(self, loss: Callable[[nn.Module], torch.Tensor], sync: bool = True) -> None:
        """Backward through both models."""
        if sync:
            loss(self.model).backward()
        else:
            with self.optimizer.no_sync():
                loss(self.model).backward()
        loss(self.twin).backward()

    def sum_twin(self) -> None:
        """Give the twin's gradients their mean over the ranks; none where no rank has one."""
        params = list(self.twin.parameters())
        having = torch.tensor([float(param.grad is not None) for param in params])
        dist.all_reduce(having)
        summed = [param for param, ranks in zip(params, having.tolist()) if ranks]
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in summed]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            together = [grad for grad in grads if grad.dtype is dtype]
            flat = torch.cat([grad.flatten() for grad in together])
            dist.all_reduce(flat)
            for grad, part in zip(together, flat.div_(self.divisor).split([grad.numel() for grad in together])):
                grad.copy_(part.view(grad.shape))
        for param, grad in zip(summed, grads):
            param.grad = grad

    def step(self) -> None:
        self.optimizer.step()
        self.sum_twin()
        self.twin_optimizer.step()
        self.twin_optimizer.zero_grad()

    def compare(self, **tolerances: float) -> None:
        """Compare every parameter: to the bit, without tolerances."""
        self.optimizer.wait()
        for (name, mine), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride(), name
            if TOLERANCES:
                near(mine, theirs, name)
            elif tolerances:
                torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerances)
            else:
                different = int((mine != theirs).sum()) - int((mine.isnan() & theirs.isnan()).sum())
                assert not different, f"{name}: {different} of {mine.numel()} elements differ"

    def compare_states(self) -> None:
        """Compare the states and step counts, gathered, with the twin's, to the bit."""
        mine, theirs = self.optimizer.full_state_dict(), self.twin_optimizer.state_dict()
        # Sharded states all begin at the first step; those of parameters without any gradient stay at step 0.
        assert mine["state"].keys() >= theirs["state"].keys()
        assert all(
            mine["state"][number].get("step", 0) == 0 for number in mine["state"].keys() - theirs["state"].keys()
        )
        for number, values in theirs["state"].items():
            assert mine["state"][number].keys() == values.keys(), number
            for name, value in values.items():
                state = mine["state"][number][name]
                if TOLERANCES:
                    near(state, value.cpu(), f"{number}, {name}")
                else:
                    torch.testing.assert_close(state, value.cpu(), equal_nan=True, rtol=0.0, atol=0.0)


def near(mine: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """Compare tensors that matrix products made: the norm of the difference is small relative to the norm."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    error, bound = float((mine - theirs).norm()), TOLERANCES["rtol"] * float(theirs.norm()) + TOLERANCES["atol"]
    assert error <= bound, f"{name}: differs by {error:.3g}, of at most {bound:.3g}"


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other numbers on every rank and at every call; sums of a few of them are exact."""
    seed = int(torch.randint(1 << 30, (), device="cpu")) + 7919 * dist.get_rank()
    drawn = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (drawn / 8).to(torch.get_default_device(), dtype)


def train(pair: Pair, losses: Sequence[Callable[[nn.Module], torch.Tensor]], sync_all: bool = False) -> None:
    """A step of several microbatches."""
    for index, loss in enumerate(losses):
        pair.backward(loss, sync=sync_all or index == len(losses) - 1)
    pair.step()


def run(pair: Pair, chosen: list[list[int]], sync_all: bool = False) -> None:
    """A step of several microbatches, each through the branches that are chosen for it."""
    losses = []
    for each in chosen:
        data = inputs(3, 4)
        losses.append(lambda model, data=data, each=each: model(data, each))
    train(pair, losses, sync_all)
