"""Copies and updates in every order that a GPU might run them in: lanes that run late, and wait for marks alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from offloaded_pairs import Pair, streamed

import tilestep
from tilestep.memory.streaming import StreamedState

SEEDS = range(6)


class Mark:
    """A point in a lane that has been passed or not."""

    passed = False


class Device:
    """Lanes whose work runs when it is its turn: any lane's next work, unless that waits for a mark."""

    def __init__(self, seed: int, heeds_marks: bool = True) -> None:
        self.chance = random.Random(seed)
        self.heeds_marks = heeds_marks
        self.lanes = {name: LateLane(self) for name in ("inward", "outward", "compute")}

    def run_one(self) -> bool:
        ready = [lane for lane in self.lanes.values() if lane.work and lane.is_ready()]
        if ready:
            self.chance.choice(ready).run_one()
        return bool(ready)

    def run_some(self) -> None:
        for _ in range(self.chance.randrange(40)):
            self.run_one()

    def finish(self, *lanes: LateLane) -> None:
        while any(lane.work for lane in lanes):
            assert self.run_one(), "every lane waits for another"


class LateLane:
    """A lane of such a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: deque[Mark | Callable[[], None] | tuple[Mark]] = deque()

    def is_ready(self) -> bool:
        first = self.work[0]
        return not isinstance(first, tuple) or first[0].passed or not self.device.heeds_marks

    def run_one(self) -> None:
        first = self.work.popleft()
        if isinstance(first, Mark):
            first.passed = True
        elif not isinstance(first, tuple):
            first()

    def follow(self, *marks: Mark | None) -> None:
        self.work.extend((mark,) for mark in marks if mark is not None)

    def mark(self) -> Mark:
        self.work.append(Mark())
        return self.work[-1]  # type: ignore[return-value]

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.work.extend(lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs)  # type: ignore[misc]

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.device.finish(self)


def run_late(optimizer: Any, device: Device) -> None:
    """Let an offloaded optimizer's copies and tile passes run on such a device."""
    home = optimizer.memory
    assert isinstance(home, StreamedState)
    for name, lane in device.lanes.items():
        setattr(home, name, lane)
    for engine in optimizer._current_plan().engines:
        for passes in engine.passes:
            before = passes.tile_calls
            # One call that runs late, and then is what a step makes of it.
            passes.tile_calls = lambda *args, before=before: [
                lambda: device.lanes["compute"].work.append(lambda: [call() for call in before(*args)])
            ]


def train(seed: int, buffers: int, chunk_bytes: int, heeds_marks: bool = True) -> Pair:
    pair = Pair(lambda params: tilestep.AdamW(params, lr=1e-2), streamed(chunk_bytes, buffers))
    device = Device(seed, heeds_marks)
    run_late(pair.optimizer, device)
    for _ in range(4):
        pair.step()
        device.run_some()
        # What comes next on the current stream sees the updates; copies to the host may still be on their way.
        device.finish(device.lanes["compute"])
    pair.optimizer.wait()
    return pair


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_gives_the_same(seed: int) -> None:
    for buffers, chunk_bytes in ((1, 1), (2, 100_000), (3, 100_000), (4, 200_000)):
        train(seed, buffers, chunk_bytes).compare()


def test_orders_that_heed_no_marks_are_noticed() -> None:
    noticed = 0
    for seed in SEEDS:
        try:
            train(seed, 3, 100_000, heeds_marks=False).compare()
        except AssertionError:
            noticed += 1
    assert noticed > len(SEEDS) // 2
