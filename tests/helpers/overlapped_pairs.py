"""Models that ranks train together, each twice: by an overlapped optimizer and by a serial one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meshes import grid
from overlapped_models import TINY, small, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilestep

Build = Callable[[], nn.Module]
DURING = ("backward", "forward")
WIDTH = 6


def device() -> str:
    """The device type of the process group's tensors."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class Block(nn.Module):
    """Matrices that do not divide by the number of ranks, and what is recomputed in backward."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._add, x, use_reentrant=False) if self.recomputes else self._add(x)

    def _add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding and a head; the embedding's tokens need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(given)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack().to(device())


def ddp(bucket_view: bool = False) -> nn.Module:
    model = small().to(device())
    model.unused.requires_grad_(False)
    ids = [dist.get_rank()] if device() == "cuda" else None
    return DistributedDataParallel(model, ids, bucket_cap_mb=0.0005, gradient_as_bucket_view=bucket_view)


def ddp_views() -> nn.Module:
    return ddp(bucket_view=True)


def fsdp(**options: Any) -> nn.Module:
    model = stack()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp_kept() -> nn.Module:
    """Parameters stay gathered after forward."""
    return fsdp(reshard_after_forward=False)


def fsdp_recomputing() -> nn.Module:
    model = fsdp()
    for block in model.blocks:  # type: ignore[union-attr]
        block.recomputes = True
    return model


def fsdp_prefetching() -> nn.Module:
    """Every block gathers the parameters of the next ones beside its own."""
    model = fsdp()
    blocks = list(model.blocks)  # type: ignore[arg-type]
    model.set_modules_to_forward_prefetch(blocks[:2])  # type: ignore[operator]
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    return model


def fsdp_root_alone() -> nn.Module:
    return fully_shard(stack())


def fsdp_and_plain() -> nn.Module:
    """Blocks that FSDP shards; the rest are plain tensors, with the same batch on every rank."""
    model = stack()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    model.same_batches = True  # type: ignore[assignment]
    return model


def hsdp() -> nn.Module:
    return fsdp(mesh=grid(device(), (dist.get_world_size() // 2, 2), ("replicate", "shard")))


def one_batch(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of this rank's batch."""
    given = tokens(step * 16 + (0 if hasattr(model, "same_batches") else dist.get_rank())).to(device())
    return nn.functional.cross_entropy(model(given).flatten(0, 1), given.roll(1, 1).flatten())


def local(param: Any) -> torch.Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def _later(read: torch.Tensor, param: Any) -> str:
    """Whether a value that was read is that of an idle device, for the message of a comparison that fails."""
    if read.is_cuda:
        torch.cuda.synchronize()
    return "the update was wrong" if torch.equal(read, local(param)) else "it was read too early"


class Pair:
    """The same model twice on every rank."""

    def __init__(self, make: Any, during: str, build: Build, **options: Any) -> None:
        self.serial, self.overlapped = build(), build()
        self.reference = make(self.serial.parameters())
        self.optimizer = tilestep.overlap(
            make(self.overlapped.parameters()), self.overlapped, during, bucket_cap_mb=TINY, **options
        )

    @property
    def both(self) -> Any:
        return (self.serial, self.reference), (self.overlapped, self.optimizer)

    def step(self, step: int, loss: Callable[[nn.Module, int], torch.Tensor] = one_batch) -> None:
        losses = []
        for model, optimizer in self.both:
            value = loss(model, step)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        assert torch.equal(*losses), (step, losses)

    def compare(self) -> None:
        for (name, param), (_, wanted) in zip(self.overlapped.named_parameters(), self.serial.named_parameters()):
            mine, right = local(param).clone(), local(wanted)
            assert torch.equal(mine, right), (self.optimizer.execution.during, name, mine, right, _later(mine, param))
        states, wanted = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
        for key, state in wanted.items():
            for name, value in state.items():
                assert torch.equal(local(states[key][name]), local(value)), (key, name)
