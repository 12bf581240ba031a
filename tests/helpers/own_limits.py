"""Limits as users write them, and what they decide when they are called on Python's floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestep import Limit, Window
from tilestep.rules.limits import first_numbers


@dataclass(frozen=True)
class SpikesBeyond(Limit):
    """Skips spikes of the norm and jumps of the loss, and clips to a multiple of the mean."""

    factor: float = 3.0
    warmup: int = 3
    memory: ClassVar[Any] = {"mean": 0.0, "count": 0.0, "loss": math.inf}

    def decide(self, norm: float, loss: float | None, memory: Any) -> tuple[bool, float]:
        if loss is not None:
            before, memory.loss = memory.loss, min(loss, 2 * memory.loss)
            if loss > 10 * before:
                return True, math.inf
        is_warm = memory.count >= self.warmup
        if norm == math.inf or (is_warm and norm > self.factor * memory.mean):
            return True, math.inf
        memory.count += 1
        memory.mean += max(0.1, 1 / memory.count) * (norm - memory.mean)
        return False, 0.9 * memory.mean if is_warm else math.inf


@dataclass(frozen=True)
class Everything(Limit):
    """What a limit may say: branches, functions of math, a window, numbers of its own, loops of a known length."""

    factor: float = 1.5
    rounds: int = 3
    name: str = "both"
    memory: ClassVar[Any] = {"mean": 1.0, "steps": 0.0, "recent": Window(6)}

    def decide(self, norm: float, loss: float | None, memory: Any) -> tuple[bool, float]:
        bound = self.factor * memory.mean
        for _ in range(self.rounds):
            bound = min(bound, 2 * math.sqrt(bound) + abs(math.floor(bound) % 2))
        if loss is not None and (not math.isfinite(loss) or loss > 40):
            return True, math.inf
        is_far = norm > memory.recent.mean() + 2 * memory.recent.std() and self.name == "both"
        if norm == math.inf or (memory.steps >= 4 and is_far):
            memory.mean *= 1 + (norm < math.inf) / 4
            return norm > 30, bound
        memory.recent.append(max(norm, 0.5))
        memory.steps += 1 if memory.recent.count == memory.steps + 1 else 2
        memory.mean += (norm - memory.mean) / memory.steps
        return False, math.inf if memory.steps % 2 else 10 / bound


def plainly(
    limit: Limit, norms: Sequence[float], losses: Sequence[float | None]
) -> tuple[list[tuple[bool, float]], list[float]]:
    """What a limit decides for these steps, and the numbers that it remembers after them."""
    numbers, decided = first_numbers(limit), []
    for norm, loss in zip(norms, losses, strict=True):
        memory = limit.remembered(numbers)
        decided.append(limit.ask(norm, loss, memory, False))
        numbers = limit.numbers_of(memory)
    return decided, numbers
