"""Everything that can be attached to an optimizer or come around its model, in pairs and in both orders.

A combination trains as the plain loop does, or it is refused by name; then what was there before trains on as it did.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tilestep
from tilestep.memory.offload import _refuse_wrappers, move_state
from tilestep.memory.streaming import StreamedState
from tilestep.placement import combinations

STEPS = 2
REDUCES = ("ddp", "fsdp2", "shard")
"""What makes gradients means over the ranks; without any of them every rank has the same batch."""


class Training:
    """A model, its optimizer, and what was put on them so far."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.model = self.plain
        self.optimizer: Any = None
        self.put: list[str] = []
        self.scaler: Any = None

    def make(self) -> Any:
        if self.optimizer is None:
            self.optimizer = tilestep.AdamW(self.model.parameters(), lr=0.05)  # type: ignore[attr-defined]
        return self.optimizer

    def batch(self, step: int) -> torch.Tensor:
        same = not any(name in REDUCES for name in self.put)
        return batch(step, 0 if same else dist.get_rank())

    def step(self, step: int) -> None:
        loss = self.model(self.batch(step)).square().mean()
        if self.scaler is None:
            loss.backward()
            self.make().step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.make())
            self.scaler.update()
        self.make().zero_grad()

    def compare(self) -> None:
        """With torch's optimizer under DistributedDataParallel, or on one rank alone."""
        self.make()
        if hasattr(self.optimizer, "wait"):
            self.optimizer.wait()
        reduces = any(name in REDUCES for name in self.put)
        for mine, wanted in zip(self.plain.parameters(), by_torch(dist.get_world_size() if reduces else 1)):
            full: Any = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(full.detach(), wanted, atol=1e-6, rtol=1e-5, msg=str(self.put))


@functools.cache
def by_torch(ranks: int) -> list[torch.Tensor]:
    """Parameters after torch's optimizer has had the means of gradients over some ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def put_shard(training: Training) -> None:
    tilestep.shard(training.make(), training.plain)


def put_overlap(during: Any) -> Callable[[Training], None]:
    def put(training: Training) -> None:
        tilestep.overlap(training.make(), training.model, during=during, scaler=training.scaler)

    return put


def put_offload(training: Training) -> None:
    tilestep.offload(training.make())


def put_offload_streamed(training: Training) -> None:
    optimizer = training.make()
    _require("offload", optimizer)
    move_state(optimizer, StreamedState(torch.device("cpu"), 1, 2), "gpu", "for a test")


def put_offload_gradients(training: Training) -> None:
    optimizer = training.make()
    _require("offload of gradients", optimizer)
    _refuse_wrappers(optimizer)
    move_state(optimizer, StreamedState(torch.device("cpu"), 1, 2, keeps_gradients=True), "gpu", "for a test")


def _require(added: str, optimizer: Any) -> None:
    for name in ("offload", added):
        reason = combinations.refusal(name, optimizer.attached)
        if reason:
            raise tilestep.OffloadError(reason)


def put_joint_norm(training: Training) -> None:
    tilestep.joint_norm([training.make(), tilestep.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)])  # type: ignore[attr-defined]


def put_ddp(training: Training) -> None:
    training.model = DistributedDataParallel(training.model)


def put_fsdp1(training: Training) -> None:
    training.model = FullyShardedDataParallel(training.model, device_id=torch.device("cpu"), use_orig_params=True)


def put_fsdp2(training: Training) -> None:
    fully_shard(training.plain)


def put_scaler(training: Training) -> None:
    training.scaler = tilestep.GradScaler("cpu", init_scale=8.0)


def put_compile(training: Training) -> None:
    training.model = torch.compile(training.model, backend="eager")  # type: ignore[assignment]


def put_capture(training: Training) -> None:
    tilestep.capture(training.make())


PUT: dict[str, Callable[[Training], None]] = {
    "shard": put_shard,
    "overlap in backward": put_overlap("backward"),
    "overlap in forward": put_overlap("forward"),
    "offload": put_offload,
    "offload streamed": put_offload_streamed,
    "offload of gradients": put_offload_gradients,
    "joint norm": put_joint_norm,
    "ddp": put_ddp,
    "fsdp1": put_fsdp1,
    "fsdp2": put_fsdp2,
    "scaler": put_scaler,
    "compile": put_compile,
    "capture": put_capture,
}

OVERLAPS = [name for name in PUT if name.startswith("overlap")]
OFFLOADS = [name for name in PUT if name.startswith("offload")]
REFUSED: dict[tuple[str, str], str] = {
    ("shard", "shard"): "sharded already",
    **{pair: "offloaded already" for pair in itertools.product(OFFLOADS, repeat=2)},
    ("joint norm", "joint norm"): "shares a norm already",
    ("shard", "offload of gradients"): "keeps its gradients on the device",
    ("ddp", "offload of gradients"): "DistributedDataParallel, which reduces gradients after",
    ("offload of gradients", "ddp"): "DistributedDataParallel, which reduces gradients after",
    **{("offload of gradients", name): "gradients of this optimizer are copied to the host" for name in OVERLAPS},
    **{(name, "shard"): "shard it first" for name in OFFLOADS if name != "offload"},
    ("joint norm", "capture"): "joint norm",
    **{pair: "overlapped already" for pair in itertools.product(OVERLAPS, repeat=2)},
    **{("shard", name): "shard.. overlaps communication by itself" for name in OVERLAPS},
    **{(name, "shard"): "overlapped already, and shard" for name in OVERLAPS},
    **{(name, way): "offload it first" for name in OVERLAPS for way in OFFLOADS},
    **{(name, "capture"): "overlaps other work" for name in OVERLAPS},
    **{("fsdp1", name): "FullyShardedDataParallel" for name in [*OVERLAPS, "shard"]},
    **{(name, "fsdp1"): "FullyShardedDataParallel" for name in [*OVERLAPS, "shard"]},
    ("ddp", "shard"): "DistributedDataParallel, which reduces",
    ("shard", "ddp"): "DistributedDataParallel, which reduces",
    ("fsdp2", "shard"): "FSDPModule, which reduces",
    **{(name, "capture"): "CPU, which has" for name in PUT if name not in [*OVERLAPS, *OFFLOADS, "joint norm"]},
    ("offload", "capture"): "CPU, which has",
    **{(name, "capture"): "is in host memory" for name in OFFLOADS if name != "offload"},
}
"""What is there, what is added, and the refusal."""

REFUSED_AT_THE_STEP = {("overlap in backward", "scaler"): r"overlap\(optimizer, model, scaler=scaler\)"}
"""Nothing is updated before."""

ORDER_OF_TORCH = [(name, "fsdp2") for name in ("shard", "joint norm", *OFFLOADS, *OVERLAPS)]
"""fully_shard replaces parameters: as with torch's optimizers, one that is made before has none that train."""

OF_TORCH = {
    *itertools.product(("ddp", "fsdp1", "fsdp2"), repeat=2),
    *itertools.product(("fsdp1",), ("compile", "scaler", "joint norm", *OFFLOADS)),
    *itertools.product(("compile", "scaler", "joint norm", *OFFLOADS), ("fsdp1",)),
    ("compile", "fsdp2"),
    ("compile", "compile"),
    ("capture", "capture"),
}
"""What torch itself refuses or what says nothing of tilestep."""


def _walk(first: str) -> None:
    for second in PUT:
        if first == "capture" or {first, second} == {"scaler"} or (first, second) in OF_TORCH:
            continue
        training = Training()
        PUT[first](training)
        training.put.append(first)
        pattern = REFUSED.get((first, second))
        if pattern is not None:
            with pytest.raises((ValueError, RuntimeError), match=pattern):
                PUT[second](training)
        elif (first, second) in ORDER_OF_TORCH:
            PUT[second](training)
            training.put.append(second)
            if first in ["shard", *OVERLAPS]:
                with pytest.raises(RuntimeError, match="none of the optimizer's parameters belong to the model"):
                    training.step(0)
            continue
        else:
            PUT[second](training)
            training.put.append(second)
        if "fsdp1" in (first, second):
            # Its constructor takes parameters apart before it says what it wraps.
            continue
        if (first, second) in REFUSED_AT_THE_STEP:
            before = [param.detach().clone() for param in training.plain.parameters()]
            with pytest.raises(ValueError, match=REFUSED_AT_THE_STEP[first, second]):
                training.step(0)
            assert all(map(torch.equal, training.plain.parameters(), before))
            continue
        for step in range(STEPS):
            training.step(step)
        training.compare()


def shard_and() -> None:
    _walk("shard")


def overlap_in_backward_and() -> None:
    _walk("overlap in backward")


def overlap_in_forward_and() -> None:
    _walk("overlap in forward")


def offload_and() -> None:
    _walk("offload")


def offload_streamed_and() -> None:
    _walk("offload streamed")


def offload_of_gradients_and() -> None:
    _walk("offload of gradients")


def joint_norm_and() -> None:
    _walk("joint norm")


def ddp_and() -> None:
    _walk("ddp")


def fsdp1_and() -> None:
    _walk("fsdp1")


def fsdp2_and() -> None:
    _walk("fsdp2")


def scaler_and() -> None:
    _walk("scaler")


def compile_and() -> None:
    _walk("compile")


WALKS = [
    shard_and,
    overlap_in_backward_and,
    overlap_in_forward_and,
    offload_and,
    offload_streamed_and,
    offload_of_gradients_and,
    joint_norm_and,
    ddp_and,
    fsdp1_and,
    fsdp2_and,
    scaler_and,
    compile_and,
]

test_pairs = each_passes(WALKS, 2)


def test_the_table_is_asked_for_what_is_there() -> None:
    for (added, there), reason in combinations.REFUSED.items():
        assert combinations.refusal(added, ["nothing", there]) == reason
    assert combinations.refusal("overlap", ["offload"]) == ""
