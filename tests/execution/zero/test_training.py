"""Training with a sharded optimizer on two ranks, to the bit what its twin does with summed gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Branches, Convolutions, Elementwise, Pair, inputs, train, two_groups
from torch import nn

import tilestep


def adamw(params: Any) -> tilestep.Optimizer:
    """With so large an epsilon updates depend on the gradients' scale too."""
    return tilestep.AdamW(params, lr=0.1, weight_decay=0.1, eps=0.1)  # type: ignore[attr-defined]


def microbatches(count: int, dtype: torch.dtype = torch.float32) -> list[Callable[[nn.Module], torch.Tensor]]:
    def loss(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
        return lambda model: (model(data) * data).sum()

    return [loss(inputs(5, 7, dtype=dtype)) for _ in range(count)]


def three_steps(pair: Pair, dtype: torch.dtype = torch.float32, sync_all: bool = False, **tolerances: float) -> None:
    for _ in range(3):
        train(pair, microbatches(3, dtype), sync_all)
        pair.compare(**tolerances)


def buckets_of_any_size() -> None:
    for size in (TINY, 300 / 2**20, 25.0):
        pair = Pair(Elementwise(), adamw, two_groups, bucket_cap_mb=size)
        three_steps(pair)
        pair.compare_states()


def without_overlap() -> None:
    for grads, params in ((False, False), (True, False), (False, True)):
        options = {"overlap_grad_sync": grads, "overlap_param_sync": params}
        three_steps(Pair(Elementwise(), adamw, two_groups, bucket_cap_mb=TINY, **options))


def with_any_buffers() -> None:
    for grads, params in (("bucket", "bucket"), ("contiguous", "bucket"), ("bucket", "contiguous")):
        options = {"grad_buffer": grads, "param_buffer": params}
        three_steps(Pair(Elementwise(), adamw, bucket_cap_mb=TINY, **options))
        three_steps(Pair(Elementwise(), adamw, bucket_cap_mb=TINY, **options), sync_all=True, rtol=1e-5, atol=1e-6)


def sums_instead_of_means() -> None:
    three_steps(Pair(Elementwise(), adamw, bucket_cap_mb=TINY, average=False))


def a_sync_at_every_microbatch() -> None:
    for size in (TINY, 25.0):
        three_steps(Pair(Elementwise(), adamw, bucket_cap_mb=size), sync_all=True, rtol=1e-5, atol=1e-6)


def parameters_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        three_steps(Pair(Elementwise().to(dtype), adamw, two_groups, bucket_cap_mb=TINY), dtype)


def masters() -> None:
    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=0.1, master_weights=True)  # type: ignore[attr-defined]

    for dtype in (torch.bfloat16, torch.float16):
        pair = Pair(Elementwise().to(dtype), make, bucket_cap_mb=TINY)
        three_steps(pair, dtype)
        pair.compare_states()


def remainders() -> None:
    """Both halves are those of one process, also after other code writes to one parameter, which changes no other."""

    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=0.1, master_weights="remainder")  # type: ignore[attr-defined]

    for options in ({}, {"param_sync_dtype": torch.float16}, {"param_buffer": "bucket"}):
        pair = Pair(Elementwise().bfloat16(), make, bucket_cap_mb=TINY, **options)
        if "param_sync_dtype" in options:
            # What travels has lost bits; the rank that updates a parameter has both halves of the exact one.
            for _ in range(3):
                train(pair, microbatches(2))
            assert any(piece["remainder_param"].any() for piece in pair.optimizer.state.values())
            continue
        three_steps(pair)
        for written in (None, 4):
            if written is not None:
                for model in (pair.model, pair.twin):
                    with torch.no_grad():
                        model.weights[written].mul_(1.5)
            train(pair, microbatches(2))
            pair.compare()
            pair.compare_states()
            states = pair.twin_optimizer.state
            assert sum(bool(values["remainder_param"].any()) for values in states.values()) >= 10


def averages_of_remainders() -> None:
    """What is written before `eval()` is noticed, and weights to evaluate leave both halves as they are."""
    rule = tilestep.ema(tilestep.registry["SGD"], 0.5)
    pair = Pair(
        Elementwise().bfloat16(),
        lambda params: tilestep.Optimizer(params, rule, lr=0.1, master_weights="remainder"),
        bucket_cap_mb=TINY,
    )
    three_steps(pair)
    for model in (pair.model, pair.twin):
        with torch.no_grad():
            model.weights[4].mul_(1.5)
    for optimizer in (pair.optimizer, pair.twin_optimizer):
        with optimizer.averaged():
            pass
    train(pair, microbatches(2))
    pair.compare()
    pair.compare_states()


def checkpoints_that_come_while_averages_are_held() -> None:
    """Parameters train on with their own weights, or with those that were loaded since `eval()`."""
    pair = Pair(Elementwise(), lambda params: tilestep.Optimizer(params, "ScheduleFreeSGD", lr=0.1), bucket_cap_mb=TINY)
    three_steps(pair)
    saved = pair.optimizer.full_state_dict(), copy.deepcopy(pair.twin_optimizer.state_dict())
    weights = {name: weight.clone() for name, weight in pair.twin.state_dict().items()}
    three_steps(pair)
    for loads_weights in (False, True):
        wanted = weights if loads_weights else copy.deepcopy(pair.twin.state_dict())
        pair.optimizer.eval()
        pair.twin_optimizer.eval()  # type: ignore[attr-defined]
        if loads_weights:
            pair.model.load_state_dict(weights)
            pair.twin.load_state_dict(weights)
        pair.optimizer.load_state_dict(saved[0])
        pair.twin_optimizer.load_state_dict(saved[1])
        pair.compare()
        assert all(torch.equal(weight, wanted[name]) for name, weight in pair.twin.state_dict().items())
        train(pair, microbatches(2))
        pair.compare()
    pair.compare_states()


def dtypes_in_any_mixture() -> None:
    model = Elementwise()
    for index, dtype in enumerate((torch.bfloat16, torch.float64, torch.float16)):
        model.weights[3 * index] = nn.Parameter(model.weights[3 * index].to(dtype))
    pair = Pair(model, adamw, bucket_cap_mb=TINY)
    for _ in range(3):
        train(pair, microbatches(2))
        pair.compare()


def gradients_summed_in_float32() -> None:
    """The sums of bfloat16 gradients are not rounded: equal to a float32 master trained on float32 gradients."""

    def make(params: Any) -> Any:
        return tilestep.SGD(params, lr=0.1, master_weights=True)  # type: ignore[attr-defined]

    pair = Pair(Elementwise().bfloat16(), make, bucket_cap_mb=TINY, grad_sync_dtype=torch.float32)
    start = [param.float() for param in pair.twin.parameters()]
    for loss in (losses := microbatches(3, torch.bfloat16)):
        pair.backward(loss, sync=loss is losses[-1])
        for param in pair.twin.parameters():
            param.sums = getattr(param, "sums", 0) + param.grad.float()  # type: ignore[attr-defined]
            param.grad = None
    for param in pair.twin.parameters():
        torch.distributed.all_reduce(param.sums)  # type: ignore[attr-defined]
    pair.optimizer.step()
    masters = [values["master_param"] for values in pair.optimizer.full_state_dict()["state"].values()]
    for before, param, master in zip(start, pair.twin.parameters(), masters, strict=True):
        wanted = (before - 0.1 * param.sums / torch.distributed.get_world_size()).cpu()  # type: ignore[attr-defined]
        torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-7)


def every_microbatch_s_digits_are_kept_beside_an_unused_parameter() -> None:
    """In bfloat16 256 + 1 is 256: what waits for a gradient that never comes must not be added up there."""
    model = Elementwise(2).bfloat16()
    made = tilestep.SGD(model.parameters(), lr=1.0, master_weights=True)  # type: ignore[attr-defined]
    optimizer = tilestep.shard(made, model, grad_sync_dtype=torch.float32)
    start = model.weights[0].float()
    for factor, sync in ((256, False), (1, False), (1, True)):
        loss = (model.weights[0] * factor).sum()
        if sync:
            loss.backward()
        else:
            with optimizer.no_sync():
                loss.backward()
    optimizer.step()
    master = optimizer.full_state_dict()["state"][0]["master_param"]
    torch.testing.assert_close(master, start.cpu() - 258.0, rtol=0, atol=0)


def parameters_that_travel_as_bytes() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        for model in (Elementwise(), Elementwise().bfloat16()):
            width = model.weights[0].dtype
            three_steps(Pair(model, adamw, bucket_cap_mb=TINY, param_sync_dtype=dtype), width)


def parameters_that_travel_in_a_narrower_type() -> None:
    """Every rank has the rounded parameters, and the optimizer goes on from the exact ones."""
    pair = Pair(Elementwise(), adamw, bucket_cap_mb=TINY, param_sync_dtype=torch.bfloat16)
    grads = [inputs(1, 7) for _ in pair.twin.parameters()]
    for _ in range(20):
        for mine, theirs, gradient in zip(pair.model.parameters(), pair.twin.parameters(), grads):
            mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        pair.step()
    pair.optimizer.wait()
    for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
    for value in (3.0, 3.1, torch.inf, -7.0):
        for mine in pair.model.parameters():
            mine.data.fill_(value)
            if value == 3.0:
                torch.autograd.graph.increment_version(mine)
            mine.grad = None
        pair.optimizer.step()
        pair.optimizer.wait()
        sent = torch.tensor(value).bfloat16().float()
        with torch.no_grad():
            assert all(bool((mine == sent).all()) or bool((mine == value).all()) for mine in pair.model.parameters())
    # A parameter that no other code has written to keeps the exact weights of its owner.
    for mine, theirs, gradient in zip(pair.model.parameters(), pair.twin.parameters(), grads):
        theirs.data.fill_(-7.0)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
    pair.step()
    pair.optimizer.wait()
    for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())


def clipping() -> None:
    def make(params: Any) -> Any:
        return tilestep.Adam(params, lr=0.1, max_grad_norm=0.5)  # type: ignore[attr-defined]

    pair = Pair(Elementwise(), make, bucket_cap_mb=TINY)
    for _ in range(3):
        train(pair, microbatches(3))
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_optimizer.grad_norm)  # type: ignore[attr-defined]
        pair.compare(rtol=1e-5, atol=1e-6)


def images_with_channels_last() -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        pair = Pair(Convolutions().to(memory_format=torch.channels_last), adamw, bucket_cap_mb=TINY)
        assert pair.model.body[0].weight.is_contiguous(memory_format=torch.channels_last)
        for _ in range(3):
            data = inputs(2, 3, 6, 6).contiguous(memory_format=layout)
            train(pair, [lambda model, data=data: model(data).square().sum()] * 2)
            pair.compare()
        pair.compare_states()


def gradients_in_another_format_than_their_parameter() -> None:
    for ours, theirs in (
        (torch.channels_last, torch.contiguous_format),
        (torch.contiguous_format, torch.channels_last),
    ):
        pair = Pair(Convolutions().to(memory_format=ours), adamw, bucket_cap_mb=TINY)
        for _ in range(3):
            for mine, other in zip(pair.model.parameters(), pair.twin.parameters()):
                gradient = inputs(*mine.shape)
                if mine.dim() == 4:
                    gradient = gradient.contiguous(memory_format=theirs)
                mine.grad, other.grad = gradient, gradient.clone(memory_format=torch.preserve_format)
            pair.step()
            pair.compare()


def transposed_and_gapped_parameters() -> None:
    model = nn.Module()
    model.transposed = nn.Parameter(torch.rand(5, 3).t())
    model.gapped = nn.Parameter(torch.rand(4, 9)[:, ::2])
    model.empty = nn.Parameter(torch.rand(0, 3))
    model.number = nn.Parameter(torch.rand(()))
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    assert model.transposed.stride() == (1, 3) and model.gapped.is_contiguous()
    twin = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    plain = adamw(twin.values())
    for _ in range(3):
        for name, param in model.named_parameters():
            param.grad = inputs(*param.shape)
            torch.distributed.all_reduce(total := param.grad.clone())
            twin[name].grad = total / 2
        optimizer.step()
        plain.step()
        assert all(torch.equal(param, twin[name]) for name, param in model.named_parameters())


def gradients_set_by_hand_and_taken_away() -> None:
    pair = Pair(Elementwise(), adamw, bucket_cap_mb=TINY)
    for _ in range(3):
        train_with = microbatches(2)
        pair.backward(train_with[0], sync=False)
        for model in (pair.model, pair.twin):
            model.weights[2].grad = None
            model.weights[4].grad = model.weights[4].grad * 3
            model.weights[5].grad.zero_()
        pair.backward(train_with[1], sync=True)
        pair.step()
        pair.compare()


def gradients_that_are_dropped() -> None:
    pair = Pair(Elementwise(), adamw, bucket_cap_mb=TINY)
    for sync in (True, False):
        pair.backward(microbatches(1)[0], sync=sync)
        pair.optimizer.zero_grad()
        pair.twin_optimizer.zero_grad()
        train(pair, microbatches(2))
        pair.compare()
    pair.optimizer.step()
    pair.compare()


def zero_gradients() -> None:
    """As torch's: of what the last step has updated, on any rank."""
    pair = Pair(Branches(), adamw, bucket_cap_mb=TINY)
    for used, to_none in (([0], False), ([0, 1 + dist.get_rank()], False), ([0], False), ([0], True), ([0], False)):
        data = inputs(3, 4)
        pair.backward(lambda model, data=data, used=used: model(data, used))
        pair.optimizer.step()
        pair.sum_twin()
        pair.twin_optimizer.step()
        for optimizer in (pair.optimizer, pair.twin_optimizer):
            optimizer.zero_grad(set_to_none=to_none)
        pair.compare()


def every_step_of_a_scheduler_and_a_closure() -> None:
    pair = Pair(Elementwise(), adamw, two_groups, bucket_cap_mb=TINY)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=5)
        for optimizer in (pair.optimizer, pair.twin_optimizer)
    ]
    for _ in range(4):
        train(pair, microbatches(1))
        for scheduler in schedulers:
            scheduler.step()
        pair.compare()
    loss = microbatches(1)[0]

    def closure() -> torch.Tensor:
        pair.optimizer.zero_grad()
        value = loss(pair.model)
        value.backward()
        return value

    value = pair.optimizer.step(closure)
    loss(pair.twin).backward()
    pair.sum_twin()
    pair.twin_optimizer.step()
    pair.compare()
    assert value.requires_grad


def an_optimizer_that_has_stepped_before() -> None:
    model = Elementwise()
    before = adamw(two_groups(model))
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5 + step)
        before.step()
    before.zero_grad()
    twin = Elementwise()
    twin.load_state_dict(model.state_dict())
    other = adamw(two_groups(twin))
    other.load_state_dict(before.state_dict())
    pair = Pair.__new__(Pair)
    pair.model, pair.twin, pair.twin_optimizer, pair.divisor = model, twin, other, 2
    pair.optimizer = tilestep.shard(before, model, bucket_cap_mb=TINY)
    assert pair.optimizer is before and isinstance(before, tilestep.AdamW)  # type: ignore[attr-defined]
    three_steps(pair)
    pair.compare_states()


CHECKS = [
    buckets_of_any_size,
    without_overlap,
    with_any_buffers,
    sums_instead_of_means,
    a_sync_at_every_microbatch,
    parameters_in_every_dtype,
    masters,
    remainders,
    averages_of_remainders,
    checkpoints_that_come_while_averages_are_held,
    dtypes_in_any_mixture,
    gradients_summed_in_float32,
    every_microbatch_s_digits_are_kept_beside_an_unused_parameter,
    parameters_that_travel_as_bytes,
    parameters_that_travel_in_a_narrower_type,
    clipping,
    images_with_channels_last,
    gradients_in_another_format_than_their_parameter,
    transposed_and_gapped_parameters,
    gradients_set_by_hand_and_taken_away,
    gradients_that_are_dropped,
    zero_gradients,
    every_step_of_a_scheduler_and_a_closure,
    an_optimizer_that_has_stepped_before,
]


test_two_ranks = each_passes(CHECKS, 2)
