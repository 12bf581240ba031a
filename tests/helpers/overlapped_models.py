"""Small models trained twice: by an optimizer as it is, and by one to which a schedule or a memory is attached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from ways import attached

import tilestep

DEVICE = "cpu"
"""Where models and batches are made."""

TINY = 300 / 2**20
"""Buckets of about 300 bytes: several groups even of small models."""

Make = Callable[[Any], tilestep.Optimizer]


class Small(nn.Module):
    """Two matrices that are used where they are not owned, a norm, a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.second = nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.embedding(tokens) * self.scale))
        hidden = self.norm(hidden)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        out = self.second(hidden) * self.scale
        return nn.functional.linear(out, self.embedding.weight)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().to(DEVICE)


def tokens(step: int, count: int = 2) -> torch.Tensor:
    return torch.randint(0, 11, (count, 5), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    given = tokens(step)
    return nn.functional.cross_entropy(model(given).flatten(0, 1), given.roll(1, 1).flatten())


def adamw(params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.01, **options)  # type: ignore[attr-defined]


def clipped(params: Any) -> tilestep.Optimizer:
    return adamw(params, max_grad_norm=0.5)


class Twins:
    """A model with an optimizer as it is, and the same beside it with one to which something is attached.

    Args:
        make: an optimizer of some parameters.
        way: one of `ways.SCHEDULES`.
        build: makes the model.
        later: whether nothing is attached yet: `attach` does that.
        options: for `overlap`; other ways have none.
    """

    def __init__(
        self, make: Make, way: str, build: Callable[[], nn.Module] = small, later: bool = False, **options: Any
    ) -> None:
        self.serial, self.overlapped = build(), build()
        self.reference, self.optimizer = make(self.serial.parameters()), make(self.overlapped.parameters())
        self.way, self.options = way, options
        if not later:
            self.attach()

    def attach(self) -> None:
        attached(self.optimizer, self.overlapped, "plain", self.way, TINY, **self.options)

    @property
    def updates_in_backward(self) -> bool:
        """Whether gradients are gone, or used, when a backward ends."""
        return self.way.endswith("backward")

    @property
    def pairs(self) -> Sequence[tuple[nn.Module, Any]]:
        return (self.serial, self.reference), (self.overlapped, self.optimizer)

    def backward(self, loss: Callable[[nn.Module], torch.Tensor], last: bool = True) -> None:
        """A backward of both; of several, all but the last leave the parameters as they are."""
        for model, optimizer in self.pairs:
            waits = contextlib.nullcontext() if last or not hasattr(optimizer, "no_sync") else optimizer.no_sync()
            with waits:
                loss(model).backward()

    def update(self) -> None:
        """A step of both, after which they have no gradients."""
        for _, optimizer in self.pairs:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, step: int, loss: Callable[[nn.Module, int], torch.Tensor] = loss_of) -> None:
        """One iteration of both; the losses are the same to the bit."""
        losses = [iteration(model, optimizer, step, loss) for model, optimizer in self.pairs]
        assert losses[0] == losses[1], (step, losses)

    def compare(self) -> None:
        """Parameters, state and step counts are the same to the bit."""
        compare_models(self.serial, self.overlapped)
        compare_states(self.reference, self.optimizer)


def iteration(
    model: nn.Module, optimizer: Any, step: int, loss: Callable[[nn.Module, int], torch.Tensor] = loss_of
) -> float:
    """A step of a training, after which there are no gradients; gives its loss."""
    value = loss(model, step)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def compare_models(one: nn.Module, other: nn.Module) -> None:
    for (name, param), (_, wanted) in zip(other.named_parameters(), one.named_parameters()):
        assert torch.equal(param, wanted), name


def compare_states(one: tilestep.Optimizer, other: tilestep.Optimizer) -> None:
    states, wanted = other.state_dict()["state"], one.state_dict()["state"]
    # Attached ones make all states at once; those of parameters without any gradient stay at step 0.
    assert states.keys() >= wanted.keys()
    assert all(states[key].get("step", 0) == 0 for key in states.keys() - wanted.keys())
    for key, state in states.items():
        if key not in wanted:
            continue
        assert state.keys() == wanted[key].keys()
        for name, value in state.items():
            assert torch.equal(value, wanted[key][name]), (key, name)
