"""How the parts of benchmarks/shard_figures.py measure: all ranks together, until a part's time is over."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from shard_contenders import TINY, Shape, Trained, make_model
from timing import between_events, quartiles, synchronize, timed

__all__ = ["Bench"]


@dataclass(frozen=True)
class Bench:
    """Where, how large and how long.

    Args:
        device: of this rank.
        quick: tiny sizes, which check the harness and measure nothing.
        until: when a part should come to its end, by `time.monotonic`; None for whenever.
        note: takes what a part has found so far, for the case that it does not come to its end.
        chosen: the batch sizes; none for those of all parts.
        only: the contenders of a part that compares iterations; none for its own.
    """

    device: torch.device
    quick: bool
    until: float | None = None
    note: Callable[[dict[str, Any]], None] = lambda found: None
    chosen: tuple[int, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        return TINY if self.quick else Shape()

    @property
    def batches(self) -> tuple[int, ...]:
        return self.chosen or ((1, 2) if self.quick else (1, 4))

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def is_over(self, before: float = 0) -> bool:
        """Whether the time, less some seconds, is over on any rank; all of them ask."""
        late = self.until is not None and time.monotonic() > self.until - before
        return self.on_any(late)

    def on_any(self, here: bool) -> bool:
        """Whether something holds on any rank; all of them ask."""
        flag = torch.tensor(float(here), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def sync(self) -> None:
        synchronize(self.device)

    def together(self) -> None:
        """Have every rank here, with nothing left to do."""
        self.sync()
        dist.barrier()
        self.sync()

    def slowest(self, milliseconds: float) -> float:
        """The largest of what the ranks have measured."""
        largest = torch.tensor(milliseconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def period(self, work: Callable[[], Any], count: int) -> float:
        """Milliseconds from one call to the next in the middle of many, as the slowest rank's device sees them.

        What a call leaves to do beside the next one is not waited for at the end, and is there at the beginning.
        """
        self.together()
        work()
        if self.device.type != "cuda":
            return self.slowest(timed(work, self.device, count)[1])
        return self.slowest(between_events(work, count))

    def elapsed(self, work: Callable[[], Any], count: int, turns: int = 3, warm: int = 2) -> float:
        """Milliseconds of one call when the host may run ahead: the median of some turns of `count` calls."""
        for _ in range(warm):
            work()
        return quartiles([self.turn(work, count) for _ in range(turns)])["median"]

    def turn(self, work: Callable[[], Any], count: int) -> float:
        """Milliseconds of one of `count` calls, until the device has done them all."""
        self.together()
        return timed(work, self.device, count)[1]

    def host(self, work: Callable[[], Any], before: Callable[[], Any], count: int) -> dict[str, float]:
        """Milliseconds until a call returns, the device idle before it.

        As in timeit without the garbage collection that falls into a call: what came before has made the garbage. It is
        collected before that, so that the allocator does not tidy up in the call either.
        """
        times = []
        for index in range(count + 3):
            gc.collect()
            gc.disable()
            before()
            self.together()
            taken = timed(work, self.device)[0]
            gc.enable()
            if index >= 3:
                times.append(taken)
        return {**quartiles(times), "largest": round(max(times), 4)}

    def allocated(self) -> int:
        """Bytes of live tensors on this rank's device."""
        self.sync()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def peak(self) -> int:
        self.sync()
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def forget_peak(self) -> None:
        """Give back what is not used, and begin to look for the largest allocation anew."""
        gc.collect()
        self.sync()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def warm_up(self) -> None:
        """Let libraries allocate what they keep, by the products and sums of a tiny model."""
        model = make_model(TINY, self.device, torch.bfloat16, warms=True)
        for _ in range(2):
            model(self.text(1, TINY)).backward()
        dist.all_reduce(torch.zeros(16, device=self.device))
        self.sync()

    def text(self, batch: int, shape: Shape | None = None) -> torch.Tensor:
        """Sequences of this rank's own."""
        shape = shape or self.shape
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        sizes = (batch, shape.length + 1)
        return torch.randint(shape.vocabulary, sizes, device=self.device, generator=generator)

    def backward(self, trained: Trained, batch: int) -> None:
        """Forward and backward."""
        trained.model(self.text(batch)).backward()
