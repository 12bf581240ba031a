"""What is trained in benchmarks/overlap_figures.py: a model under FSDP2, DDP or nothing, and what updates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from shard_contenders import Shape, make_model
from timing import synchronize, timed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tilestep

__all__ = [
    "CLIP",
    "CONTENDERS",
    "RATE",
    "SCHEDULES",
    "WRAPS",
    "Training",
    "agreed",
    "drop_gradients",
    "grouped_by_module",
    "trainings",
]

CLIP = 1.0
RATE = 1e-4
SCHEDULES = ("serial", "backward", "forward")
CONTENDERS = ("no step", "torch fused", *SCHEDULES)


def fully_sharded(shape: Shape, device: torch.device) -> Any:
    """The model under FSDP2, float32 shards used as bfloat16."""
    model = make_model(shape, device, torch.float32)
    # A CPU's reductions take what they get.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
    return grouped_by_module(model, mp_policy=policy)


def grouped_by_module(model: Any, **options: Any) -> Any:
    """Shard each block, the embedding and the head by themselves.

    In one group the last two would be at the peak of memory together.

    Args:
        model: of this benchmark's shape.
        options: for `fully_shard`.
    """
    for part in (model.words, *model.blocks, [model.norm, model.head]):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def drop_gradients(model: Any) -> None:
    """Let each gradient go as soon as it is there: what no schedule of updates can need less than."""

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)


def data_parallel(shape: Shape, device: torch.device) -> Any:
    """The model under DistributedDataParallel, float32 under autocast."""
    places = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(plain(shape, device), device_ids=places, gradient_as_bucket_view=True)


def plain(shape: Shape, device: torch.device) -> Any:
    """The model as it is, float32 under autocast."""
    return make_model(shape, device, torch.float32)


WRAPS: dict[str, Callable[[Shape, torch.device], Any]] = {"fsdp": fully_sharded, "ddp": data_parallel, "none": plain}


class Training:
    """A model and what updates it, with the figures of its iterations.

    Args:
        name: what the tables call it.
        model: the model.
        optimizer: updates it; None for forward and backward alone.
        clips: whether torch's clip comes before the step.
        context: a block around forward.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        clips: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.name, self.model, self.optimizer, self.clips, self._context = name, model, optimizer, clips, context
        self.host: list[float] = []
        self.wall: list[float] = []
        self.peak = 0
        self.losses: list[torch.Tensor] = []
        self.failure: str | None = None

    def forget(self) -> None:
        """Drop the figures so far."""
        self.host, self.wall, self.losses, self.peak = [], [], [], 0

    def iterate(self, tokens: torch.Tensor) -> None:
        """Forward, backward, clip, step."""
        with self._context():
            loss = self.model(tokens)
        loss.backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        self.losses.append(loss.detach())

    def measure(self, batches: Sequence[torch.Tensor], device: torch.device, *, keep: bool) -> None:
        """Iterate over batches without waiting for the device in between; one figure, of the slowest rank."""
        if self.failure is not None:
            return
        gpu = device.type == "cuda"
        synchronize(device)
        dist.barrier()
        before = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            figures = timed(lambda: list(map(self.iterate, batches)), device)
        except Exception as error:
            # Alike on all ranks, or the others hang and whoever started them ends them.
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return
        times = torch.tensor(figures, dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if keep:
            host, wall = (value / len(batches) for value in times.tolist())
            self.host.append(host)
            self.wall.append(wall)
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before) if gpu else 0


def trainings(
    wrap: str, shape: Shape, device: torch.device, *, clips: bool, names: Sequence[str] | None = None
) -> list[Training]:
    """Contenders, each with a model of its own; all models begin alike.

    Args:
        wrap: a key of `WRAPS`.
        shape: of the model.
        device: of this rank.
        clips: whether all of them clip.
        names: only these; "dropped" lets gradients go at once, and updates nothing.
    """
    low = wrap != "fsdp" and device.type == "cuda"

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if low else nullcontext()

    def made(name: str) -> Training:
        model = WRAPS[wrap](shape, device)
        if name == "no step":
            return Training(name, model, None, context=context)
        if name == "dropped":
            drop_gradients(model)
            return Training(name, model, None, context=context)
        if name == "torch fused":
            fused = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
            return Training(name, model, fused, clips, context)
        optimizer: tilestep.Optimizer = tilestep.AdamW(  # type: ignore[attr-defined]
            model.parameters(), lr=RATE, max_grad_norm=CLIP if clips else None
        )
        if name != "serial":
            tilestep.overlap(optimizer, model, name)  # type: ignore[arg-type]
        return Training(name, model, optimizer, context=context)

    found: list[Training] = []
    for name in names or CONTENDERS:
        try:
            found.append(made(name))
        except Exception as error:
            failed = Training(name, None, None)
            failed.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found.append(failed)
    return found


def agreed(value: bool, device: torch.device) -> bool:
    """What rank 0 says."""
    said = torch.tensor([float(value)], device=device)
    dist.broadcast(said, 0)
    return bool(said.item())
