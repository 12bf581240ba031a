"""Overlapped optimizers over several ranks, beside serial ones on the same kind of model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from overlapped_models import TINY, adamw, clipped, small, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
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
    mesh = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp(mesh=mesh)


def one_batch(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of this rank's batch."""
    given = tokens(step * 16 + (0 if hasattr(model, "same_batches") else dist.get_rank())).to(device())
    return nn.functional.cross_entropy(model(given).flatten(0, 1), given.roll(1, 1).flatten())


def local(param: Any) -> torch.Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


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
            assert torch.equal(local(param), local(wanted)), name
        states, wanted = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
        for key, state in wanted.items():
            for name, value in state.items():
                assert torch.equal(local(states[key][name]), local(value)), (key, name)


def lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.01)  # type: ignore[attr-defined]


def _train(build: Build, makes: Any = (adamw, clipped), steps: int = 8) -> None:
    for during in DURING:
        for make in makes:
            pair = Pair(make, during, build)
            for step in range(steps):
                pair.step(step)
            pair.compare()


def data_parallel() -> None:
    _train(ddp)
    _train(ddp_views, [adamw])


def awaited_mean(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A mean over the ranks that is there at once."""
    future = dist.all_reduce(bucket.buffer().mul_(1 / dist.get_world_size()), async_op=True).get_future()
    future.wait()
    return future.then(lambda done: done.value()[0])


def data_parallel_updates_in_backward() -> None:
    """A group of later layers is updated, with the mean over ranks, before backward reaches the first."""
    pair = Pair(adamw, "backward", ddp, comm_hook=(None, awaited_mean))
    pair.step(0)  # the buckets are made anew after the first backward
    seen: list[int] = []
    model: Any = pair.overlapped.module
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(pair.optimizer.applied_groups)))
    one_batch(pair.overlapped, 1).backward()
    assert 0 < seen[0] < len(pair.optimizer.applied_groups)
    pair.optimizer.step()
    assert all(param.grad is None for param in pair.overlapped.parameters())
    one_batch(pair.serial, 1).backward()
    pair.reference.step()
    pair.compare()


def fully_sharded() -> None:
    for build in (fsdp, fsdp_kept, fsdp_recomputing, fsdp_prefetching, fsdp_root_alone, fsdp_and_plain):
        _train(build, steps=5)
    _train(fsdp, [lamb])


def fully_sharded_updates_module_by_module() -> None:
    pair = Pair(adamw, "backward", fsdp)
    names = [group.name for group in pair.optimizer._grouping.groups]
    assert names == ["the root module", "module blocks.2", "module blocks.1", "module blocks.0"], names
    seen: list[Any] = []
    pair.overlapped.blocks[1].up.weight.register_post_accumulate_grad_hook(  # type: ignore[index, union-attr]
        lambda _: seen.append(pair.optimizer.applied_groups)
    )
    one_batch(pair.overlapped, 0).backward()
    assert seen == [("module blocks.2",)], seen
    # The root's gradients are reduced at the end of backward.
    assert pair.optimizer.applied_groups[1:3] == ("module blocks.1", "module blocks.0")
    assert all(param.grad is None for param in pair.overlapped.parameters())
    pair.optimizer.step()


def fully_sharded_updates_before_gathering() -> None:
    """On a CPU an update runs when it is needed: a block's when it is gathered, those that nobody uses later."""
    pair = Pair(clipped, "forward", fsdp)
    pair.step(0)
    one_batch(pair.overlapped, 1).backward()
    pair.optimizer.step()
    waiting: list[set[str]] = []

    def look(*_: Any) -> None:
        waiting.append({update.group.name for update in pair.optimizer._pending._updates.values()})

    for block in pair.overlapped.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(look)
    one_batch(pair.overlapped, 2)
    if device() == "cpu":
        assert waiting == [{"module blocks.1", "module blocks.2"}, {"module blocks.2"}, set()], waiting


def accumulation() -> None:
    for build in (ddp, ddp_views, fsdp):
        for during in DURING:
            for make in (adamw, clipped):
                pair = Pair(make, during, build)
                for step in range(4):
                    for model, optimizer in pair.both:
                        before = [local(param).clone() for param in model.parameters()]
                        _accumulate(model, 100 * step)
                        assert all(torch.equal(local(p), was) for p, was in zip(model.parameters(), before))
                        one_batch(model, 100 * step + 9).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                pair.compare()


def _accumulate(model: nn.Module, step: int) -> None:
    """Two backward passes that are not summed up over the ranks."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            for part in range(2):
                one_batch(model, step + part).backward()
        return
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    for part in range(2):
        one_batch(model, step + part).backward()
    model.set_requires_gradient_sync(True)  # type: ignore[operator]


def accumulation_of_summed_gradients() -> None:
    """Gradients are summed up over the ranks each time; the optimizer is told that they are not complete."""
    for build in (ddp, fsdp):
        pair = Pair(adamw, "backward", build)
        for step in range(3):
            for model, optimizer in pair.both:
                for part in range(2):
                    if optimizer is pair.optimizer:
                        with optimizer.no_sync():
                            one_batch(model, 10 * step + part).backward()
                    else:
                        one_batch(model, 10 * step + part).backward()
                one_batch(model, 10 * step + 5).backward()
                optimizer.step()
                optimizer.zero_grad()
        pair.compare()


def skipped_on_one_rank_is_skipped_on_all() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        value = one_batch(model, step)
        return value * float("inf") if step % 3 == 1 and dist.get_rank() == 0 else value

    for build in (ddp, fsdp):
        for during in DURING:
            pair = Pair(lambda params: adamw(params, skip_nonfinite=True), during, build)
            for step in range(6):
                if step % 3 != 1:
                    pair.step(step, loss)
                    continue
                for model, optimizer in pair.both:
                    loss(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            pair.compare()
            assert pair.optimizer.skipped_steps == 2


def scalers() -> None:
    for build in (ddp, fsdp):
        for during in DURING:
            own = [tilestep.GradScaler(device(), init_scale=256.0, growth_interval=2) for _ in range(2)]
            pair = Pair(clipped, during, build, scaler=own[1])
            for step in range(6):
                for (model, optimizer), scaler in zip(pair.both, own):
                    scaler.scale(one_batch(model, step) * (float("inf") if step == 3 else 1.0)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            pair.compare()
            assert own[0].get_scale() == own[1].get_scale()


def evaluation_and_checkpoints_between_steps() -> None:
    for build in (ddp, fsdp):
        for during in DURING:
            pair = Pair(clipped, during, build)
            for step in range(8):
                pair.step(step)
                if step % 3 == 0:
                    with torch.no_grad():
                        assert torch.equal(*(one_batch(model, 50) for model, _ in pair.both))
                elif step % 3 == 1:
                    for model, optimizer in pair.both:
                        weights = copy.deepcopy(model.state_dict())
                        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
                        model.load_state_dict(weights)
                        set_optimizer_state_dict(model, optimizer, state)
            pair.compare()


def frozen_parameters() -> None:
    for during in DURING:
        pair = Pair(adamw, during, fsdp_frozen)
        for step in range(4):
            pair.step(step)
        pair.compare()


def fsdp_frozen() -> nn.Module:
    model = stack()
    model.blocks[1].requires_grad_(False)  # type: ignore[index, union-attr]
    model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def ranks_that_wait_for_each_other_at_random() -> None:
    """Other ranks come late, in another order each time."""
    chance = random.Random(dist.get_rank())
    pair = Pair(adamw, "backward", ddp)

    def late(_: torch.Tensor) -> None:
        if chance.random() < 0.3:
            torch.randn(300, 300).mm(torch.randn(300, 300))

    for param in pair.overlapped.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(late)
    for step in range(10):
        pair.step(step)
    pair.compare()


def comm_hooks() -> None:
    """The user's own reduction, and one that is registered already."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def build() -> Any:
        return ddp()

    serial, overlapped = build(), build()
    serial.register_comm_hook(None, fp16_compress_hook)
    reference = adamw(serial.parameters())
    hook = (None, fp16_compress_hook)
    optimizer = tilestep.overlap(
        adamw(overlapped.parameters()), overlapped, "backward", bucket_cap_mb=TINY, comm_hook=hook
    )
    for step in range(4):
        for model, own in ((serial, reference), (overlapped, optimizer)):
            one_batch(model, step).backward()
            own.step()
            own.zero_grad()
    for param, wanted in zip(overlapped.parameters(), serial.parameters()):
        assert torch.equal(param, wanted)
    for model, words in ((serial, "comm hook already"), (_unsure(), "find_unused_parameters")):
        try:
            tilestep.overlap(adamw(model.parameters()), model, "backward")
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
        own = adamw(model.parameters())
        assert type(tilestep.overlap(own, model, "forward")).__name__ == "OverlappedAdamW"


def gradients_that_are_summed_by_hand() -> None:
    """Nobody tells torch that an all-reduce has changed them: the norm must not be that of this rank's."""
    pair = Pair(clipped, "backward", lambda: stack())
    for step in range(5):
        for model, optimizer in pair.both:
            one_batch(model, step).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(pair.reference.grad_norm, pair.optimizer.grad_norm), step
    pair.compare()


class RanksTime:
    """A device's time, in which one rank is faster with updates beside forward, and the other much slower."""

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer, self._now = optimizer, 0.0

    def mark(self) -> float:
        beside = 9.0 if dist.get_rank() == 0 else 30.0
        self._now += beside if self._optimizer()._during == "forward" else 10.0
        return self._now

    def between(self, earlier: float, later: float) -> float:
        return later - earlier


def ranks_choose_alike() -> None:
    """The slowest rank counts; while they try, and after, numbers are the serial ones."""
    from tilestep.overlapping import optimizer as module

    for build in (ddp, fsdp):
        pairs: list[Pair] = []
        before = module.device_clock
        module.device_clock = lambda _, pairs=pairs: RanksTime(lambda: pairs[0].optimizer)
        try:
            pairs.append(Pair(clipped, "auto", build))
        finally:
            module.device_clock = before
        (pair,) = pairs
        tried = set()
        for step in range(30):
            tried.add(pair.optimizer._during)
            pair.step(step)
        report = pair.optimizer.overlap_report()
        assert tried == {"serial", "forward"}
        assert report.during == "serial" and report.milliseconds == {"serial": 10.0, "forward": 30.0}, report
        pair.compare()


def _unsure() -> nn.Module:
    return DistributedDataParallel(small().to(device()), find_unused_parameters=True)


def an_exception_in_backward() -> None:
    """FSDP's own state is reset by the user, where torch has that; it keeps gradients of the root, in any case."""
    pair = Pair(adamw, "backward", fsdp)
    if not hasattr(pair.overlapped, "reset_iter_state"):
        return
    pair.step(0)
    for model, optimizer in pair.both:
        _interrupt(model)
        if optimizer is pair.optimizer:
            assert optimizer.applied_groups == ("module blocks.2", "module blocks.1"), optimizer.applied_groups
        model.reset_iter_state()
        optimizer.zero_grad()
    pair.serial.load_state_dict(pair.overlapped.state_dict())
    pair.reference.load_state_dict(pair.optimizer.state_dict())
    for step in range(2, 5):
        pair.step(step)
    pair.compare()


def _interrupt(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    handle = model.blocks[0].norm.register_full_backward_hook(fail)
    try:
        one_batch(model, 1).backward()
    except RuntimeError as error:
        assert "interrupted" in str(error)
    else:
        raise AssertionError("backward was not interrupted")
    handle.remove()


CHECKS = [
    data_parallel,
    data_parallel_updates_in_backward,
    fully_sharded,
    fully_sharded_updates_module_by_module,
    fully_sharded_updates_before_gathering,
    accumulation,
    accumulation_of_summed_gradients,
    skipped_on_one_rank_is_skipped_on_all,
    scalers,
    evaluation_and_checkpoints_between_steps,
    frozen_parameters,
    ranks_that_wait_for_each_other_at_random,
    comm_hooks,
    gradients_that_are_summed_by_hand,
    ranks_choose_alike,
    an_exception_in_backward,
]


def hybrid_sharded() -> None:
    _train(hsdp, steps=4)


WIDE_CHECKS = [hybrid_sharded]
