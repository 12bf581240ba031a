"""Overlapped optimizers over several ranks, beside serial ones on the same kind of model."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import torch
import torch.distributed as dist
from overlapped_models import TINY, adamw, clipped, small
from overlapped_pairs import (
    DURING,
    WIDTH,
    Build,
    Pair,
    ddp,
    ddp_views,
    device,
    fsdp,
    fsdp_and_plain,
    fsdp_kept,
    fsdp_prefetching,
    fsdp_recomputing,
    fsdp_root_alone,
    hsdp,
    local,
    one_batch,
    stack,
)
from pairwise import pairwise
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tilestep
from tilestep.execution.overlap import groups
from tilestep.execution.overlap.groups import Grouping


def lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.01)  # type: ignore[attr-defined]


def prodigy(params: Any) -> tilestep.Optimizer:
    return tilestep.Prodigy(params, d0=1e-3)  # type: ignore[attr-defined]


def _train(*builds: Build, makes: Any = (adamw, clipped), steps: int = 3) -> None:
    for build, during, make in pairwise(builds, DURING, makes):
        pair = Pair(make, during, build)
        for step in range(steps):
            pair.step(step)
        pair.compare()


def data_parallel() -> None:
    _train(ddp, ddp_views, steps=5)


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
    _train(fsdp, fsdp_kept, fsdp_recomputing, fsdp_prefetching, fsdp_root_alone, fsdp_and_plain)
    _train(fsdp, makes=[lamb])


def fully_sharded_tensors_that_are_one_group() -> None:
    """Those of a rule that reduces over all of them: their update comes before any module gathers some of them."""
    _train(fsdp, fsdp_prefetching, fsdp_and_plain, makes=[prodigy])


def fully_sharded_updates_module_by_module() -> None:
    pair = Pair(adamw, "backward", fsdp)
    names = [group.name for group in pair.optimizer.execution.grouping.groups]
    assert names == ["module blocks.2", "module blocks.1", "module blocks.0", "the root module"], names
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
    """On a CPU an update runs when it is needed: that of two blocks when the first of them is gathered."""
    pair = Pair(clipped, "forward", fsdp)
    pair.step(0)
    one_batch(pair.overlapped, 1).backward()
    pair.optimizer.step()
    waiting: list[set[str]] = []
    schedule: Any = pair.optimizer.execution

    def look(*_: Any) -> None:
        waiting.append({group.name for group in schedule.publication.tickets})

    for block in pair.overlapped.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(look)
    one_batch(pair.overlapped, 2)
    if device() == "cpu":
        assert waiting == [{"modules blocks.1 to blocks.2"}, set(), set()], waiting


@torch.no_grad()
def fully_sharded_modules_that_are_joined_wait_each() -> None:
    """A forward that leaves the first of two joined modules out waits for their update at the second."""
    pair = Pair(clipped, "forward", fsdp)
    hidden = torch.linspace(-1, 1, 2 * WIDTH, device=device()).view(2, WIDTH)
    for step in range(2):
        with torch.enable_grad():
            pair.step(step)
        ours, theirs = (model.blocks[2](hidden) for model in (pair.overlapped, pair.serial))  # type: ignore[index]
        assert torch.equal(ours, theirs)
    pair.compare()


def fully_sharded_modules_are_joined() -> None:
    """As many bytes as all groups before, and no more than the most; ranks with unequal parts divide alike."""
    model = nn.Sequential(*(nn.Linear(3, 5, bias=False) for _ in range(14))).to(device())
    for layer in model:
        fully_shard(layer)
    model = fully_shard(model)
    optimizer = adamw(model.parameters())
    assert _joined(Grouping(optimizer, model, 1, joins=True)) == [1, 1, 2, 4, 6]
    assert _joined(Grouping(optimizer, model, 1)) == [1] * 14
    before, groups.MOST_JOINED = groups.MOST_JOINED, 3 * 15 * 4 // dist.get_world_size()
    try:
        assert _joined(Grouping(optimizer, model, 1, joins=True)) == [1, 1, 2, 3, 3, 3, 1]
    finally:
        groups.MOST_JOINED = before


def _joined(grouping: Grouping) -> list[int]:
    """How many modules each group has, in the order of forward; their parameters are those of the group."""
    for group in grouping.groups:
        assert {id(param) for module in group.modules for param in module.parameters()} == set(map(id, group.params))
    return [len(group.modules) for group in reversed(grouping.groups)]


def fully_sharded_modules_come_later() -> None:
    """A module whose parameters are added to the optimizer later is gathered after their updates, too."""
    losses = []
    for during in (None, "forward", "backward"):
        model: Any = fsdp()
        last = set(map(id, model.blocks[2].parameters()))
        optimizer = clipped([param for param in model.parameters() if id(param) not in last])
        if during is not None:
            tilestep.overlap(optimizer, model, during)  # type: ignore[arg-type]
        losses.append([])
        for step in range(5):
            loss = one_batch(model, step)
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            model.zero_grad()
            if step == 1:
                optimizer.add_param_group({"params": list(model.blocks[2].parameters())})
    assert losses[0] == losses[1] == losses[2], losses


def accumulation() -> None:
    for build, during, make in pairwise((ddp, ddp_views, fsdp), DURING, (adamw, clipped)):
        pair = Pair(make, during, build)
        for step in range(3):
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
            for step in range(6):
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
        assert isinstance(tilestep.overlap(own, model, "forward"), tilestep.OverlappedOptimizer)


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


def sums_by_hand_come_too_late_and_it_is_said() -> None:
    for wrapped, during, expected in ((False, "backward", 1), (True, "backward", 0), (False, "forward", 0)):
        inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device())
        model: nn.Module = DistributedDataParallel(inner) if wrapped else inner
        optimizer = tilestep.overlap(adamw(model.parameters()), model, during=during)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 3, device=device())).sum().backward()
                optimizer.step()
        said = [str(each.message) for each in caught if "gradients of each rank alone" in str(each.message)]
        assert len(said) == expected, (wrapped, during, said)


CHECKS = [
    data_parallel,
    sums_by_hand_come_too_late_and_it_is_said,
    data_parallel_updates_in_backward,
    fully_sharded,
    fully_sharded_tensors_that_are_one_group,
    fully_sharded_updates_module_by_module,
    fully_sharded_updates_before_gathering,
    fully_sharded_modules_are_joined,
    fully_sharded_modules_that_are_joined_wait_each,
    fully_sharded_modules_come_later,
    accumulation,
    accumulation_of_summed_gradients,
    skipped_on_one_rank_is_skipped_on_all,
    scalers,
    evaluation_and_checkpoints_between_steps,
    frozen_parameters,
    ranks_that_wait_for_each_other_at_random,
    comm_hooks,
    gradients_that_are_summed_by_hand,
    an_exception_in_backward,
]


def hybrid_sharded() -> None:
    _train(hsdp, steps=4)


WIDE_CHECKS = [hybrid_sharded]
