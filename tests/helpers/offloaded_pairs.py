"""The same training with an optimizer as it is and with its state on the host.

On a CPU the chunks go through the same buffers and copies as on a GPU, between ordinary host memory and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import OffloadedOptimizer
from tilestep.memory.streaming import StreamedState

Homes = Callable[[tilestep.Optimizer], OffloadedOptimizer]

TILE = 1
"""Chunk of so few bytes that every tile is one of its own."""


def streamed(chunk_bytes: int = TILE, buffers: int = 3, keeps_gradients: bool = False) -> Homes:
    """State on the host, chunks of it updated in buffers on the device."""

    def move(optimizer: tilestep.Optimizer) -> OffloadedOptimizer:
        home = StreamedState(device_of(optimizer), chunk_bytes, buffers, keeps_gradients)
        return move_state(optimizer, home, "gpu", "for a test")

    return move


def on_host(chunk_bytes: int = TILE, keeps_gradients: bool = False) -> Homes:
    """State and update on the host."""

    def move(optimizer: tilestep.Optimizer) -> OffloadedOptimizer:
        home = HostState(device_of(optimizer), chunk_bytes, keeps_gradients)
        return move_state(optimizer, home, "cpu", "for a test")

    return move


def device_of(optimizer: tilestep.Optimizer) -> torch.device:
    return optimizer.param_groups[0]["params"][0].device


HOMES: dict[str, Homes] = {
    "streamed, tiles": streamed(),
    "streamed, 100 kB, one buffer": streamed(100_000, 1),
    "streamed, 200 kB, two buffers": streamed(200_000, 2),
    "streamed, one chunk": streamed(1 << 30),
    "on the host, tiles": on_host(),
    "on the host, one chunk": on_host(1 << 30),
}

SHAPES = [(), (5,), (4, 6), (0,), (40_001,), (150, 300), (3, 2, 3, 3), (50, 40)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


class Pair:
    """Two models of parameters alone, and their optimizers.

    Args:
        make: an optimizer of some parameters.
        home: what moves the second one's state.
        shapes: of the parameters.
        dtype: of the parameters.
        device: where they are.
    """

    def __init__(
        self,
        make: Callable[[Sequence[torch.nn.Parameter]], tilestep.Optimizer],
        home: Homes,
        shapes: Sequence[tuple[int, ...]] = tuple(SHAPES),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.plain = [torch.nn.Parameter(self.drawn(shape, dtype)) for shape in shapes]
        self.moved = [torch.nn.Parameter(param.detach().clone()) for param in self.plain]
        self.reference = make(self.plain)
        self.optimizer = home(make(self.moved))

    def drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def set_gradients(self, missing: Callable[[int], bool] = lambda place: False, factor: float = 1.0) -> None:
        for place, (left, right) in enumerate(zip(self.plain, self.moved)):
            gradient = None if missing(place) else factor * self.drawn(tuple(left.shape), left.dtype)
            left.grad, right.grad = gradient, None if gradient is None else gradient.clone()

    def step(self, count: int = 1, **given: Any) -> None:
        for _ in range(count):
            self.set_gradients(**given)
            self.reference.step()
            self.optimizer.step()

    def compare(self) -> None:
        """Parameters and states are the same, to the bit."""
        for place, (left, right) in enumerate(zip(self.plain, self.moved)):
            assert torch.equal(left, right), f"parameter {place} of shape {tuple(left.shape)}"
            expected, found = self.reference.state[left], self.optimizer.state[right]
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                assert torch.equal(value, found[name].to(value.device)), f"{name} of parameter {place}"
