"""Sharded optimizers on two and on four GPUs over NCCL: checks of tests/execution/zero, and what only a GPU can show.

python -m pytest tests/gpu/test_shard_gpu.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sharded_captures as captures
import sharded_twins
import test_decisions as decisions
import test_meshes as meshes
import test_random_models as random_models
import test_recomputed as recomputed
import test_rules as rules
import test_several_optimizers as several
import test_traffic as traffic
import test_training as training
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Elementwise, Pair, inputs, train
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

import tilestep
from tilestep.placement import Ranks
from tilestep.timeline.side_stream import SideStream

RULES = ("Adafactor", "AdEMAMix", "LAMB", "Lion", "Muon", "Prodigy", "StableAdamW", "Tiger")
"""One of each kind that sharding treats in its own way; tests/execution/zero has all of them on CPU ranks."""


class Nearly:
    """A check with matrix products, whose last digits depend on where their operands lie in memory."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check, self.__name__ = check, check.__name__

    def __call__(self) -> None:
        sharded_twins.TOLERANCES.update(rtol=1e-2, atol=1e-3)
        try:
            self.check()
        finally:
            sharded_twins.TOLERANCES.clear()


def clipped(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.01, eps=0.1, max_grad_norm=1.0)  # type: ignore[attr-defined]


def plain(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.01, eps=0.1)  # type: ignore[attr-defined]


def loss_of(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: (model(data) * data).sum()


@contextmanager
def delays() -> Iterator[None]:
    """Communication and computation that begin later than they could, each time by another while."""
    before, chance = SideStream.after_compute, random.Random(dist.get_rank())

    @contextmanager
    def later(self: SideStream, *tensors: torch.Tensor | None) -> Iterator[None]:
        if chance.random() < 0.5:
            torch.cuda._sleep(chance.randrange(3_000_000))
        with before(self, *tensors):
            if chance.random() < 0.7:
                torch.cuda._sleep(chance.randrange(10_000_000))
            yield

    SideStream.after_compute = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideStream.after_compute = before  # type: ignore[method-assign]


def nothing_is_read_before_it_has_arrived() -> None:
    options: list[dict[str, Any]] = [{}, {"grad_buffer": "bucket"}, {"param_sync_dtype": torch.uint8}]
    options += [{"param_buffer": "peers"}, {"param_buffer": "contiguous"}, {"overlap_param_sync": False}]
    options.append({"param_buffer": "contiguous", "overlap_param_sync": False})
    for each in options:
        pair = Pair(Elementwise(), plain, bucket_cap_mb=TINY, **each)
        assert all(sums.is_averaged for sums in pair.optimizer.execution.gradients.sums), "2 or 4 ranks over NCCL"
        with delays():
            for _ in range(20):
                train(pair, [loss_of(inputs(5, 7)), loss_of(inputs(5, 7))])
        pair.compare()
        pair.compare_states()


def the_host_never_waits() -> None:
    """Backward, clip, scaler and step of a steady iteration, in any mode of gradients."""
    for name in ("AdamW", "LAMB"):
        for options in ({}, {"grad_buffer": "bucket"}, {"overlap_grad_sync": False}, {"param_buffer": "contiguous"}):
            model = Elementwise()
            optimizer = getattr(tilestep, name)(model.parameters(), lr=1e-3, max_grad_norm=1.0)
            optimizer = tilestep.shard(optimizer, model, bucket_cap_mb=TINY, **options)
            scaler = tilestep.GradScaler("cuda", init_scale=2.0)
            for step in range(6):
                loss = loss_of(inputs(5, 7))
                if step > 2:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    scaler.scale(loss(model)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                finally:
                    torch.cuda.set_sync_debug_mode("default")


def each_rank_has_its_share_of_the_state() -> None:
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).bfloat16()
    optimizer = tilestep.AdamW(model.parameters(), lr=1e-3, master_weights=True)  # type: ignore[attr-defined]
    tilestep.shard(optimizer, model, bucket_cap_mb=2)
    data = torch.ones(4, 1024, dtype=torch.bfloat16)
    for _ in range(2):
        model(data).float().square().sum().backward()
        optimizer.step()
    numel = sum(param.numel() for param in model.parameters())
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    # Three float32 buffers of its share of the elements.
    assert abs(held / (12 * numel / dist.get_world_size()) - 1) < 0.02
    torch.cuda.synchronize()
    # Parameters and gradients in two bytes each, the state, and what the model and libraries keep.
    assert torch.cuda.memory_allocated() - before < 1.1 * (4 * numel + held) + 2**26


def a_tensor_of_more_elements_than_32_bits_count() -> None:
    """Its pieces begin and end beyond 2^31; parameters, gradients and updates are looked at around both."""
    numel = 2**31 + 2**20 + 40
    model = nn.Module()
    model.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    model.large = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    optimizer = tilestep.SGD(model.parameters(), lr=0.5)  # type: ignore[attr-defined]
    optimizer = tilestep.shard(optimizer, model)
    section = numel // dist.get_world_size()
    places = [0, 1, section - 1, section + 17, 2**31 - 1, 2**31, numel - 1]
    model.large.grad = torch.ones_like(model.large)
    model.large.grad[places] = torch.arange(2.0, 2 + len(places), dtype=torch.bfloat16) + 2 * dist.get_rank()
    model.small.grad = torch.ones_like(model.small)
    optimizer.step()
    optimizer.wait()
    found = model.large.detach()
    means = torch.arange(2.0, 2 + len(places)) + dist.get_world_size() - 1
    torch.testing.assert_close(found[places].float(), -0.5 * means, rtol=0, atol=0)
    others = torch.ones(numel, dtype=torch.bool)
    others[places] = False
    wrong = sum(int(((part != -0.5) & left).sum()) for part, left in zip(found.split(2**28), others.split(2**28)))
    assert wrong == 0 and bool((model.small == 0.5).all())


def buckets_are_gathered_in_few_calls() -> None:
    calls: list[int] = []
    before = Ranks.all_gather

    def counted(self: Ranks, flats: Any, sections: Any) -> Any:
        calls.append(len(flats))
        return before(self, flats, sections)

    pair = Pair(Elementwise(100), plain, bucket_cap_mb=TINY, param_buffer="contiguous")
    Ranks.all_gather = counted  # type: ignore[method-assign]
    try:
        with delays():
            for _ in range(5):
                calls.clear()
                train(pair, [loss_of(inputs(5, 7))])
    finally:
        Ranks.all_gather = before  # type: ignore[method-assign]
    assert sum(calls) == len(pair.optimizer.execution.sharding.buckets) and len(calls) < sum(calls) / 2
    pair.compare()


def parameters_are_shared_with_peers_and_are_torch_s_memory() -> None:
    """Chosen by itself: counted by the allocator, and given to other processes as any other tensor."""
    before = torch.cuda.memory_allocated()
    pair = Pair(nn.Linear(1024, 4096, bias=False), plain)
    held = torch.cuda.memory_allocated() - before
    assert pair.optimizer.describe_gathers() == ["float32: ranks fetch it from each other's memory by copy engines"]
    # The model's own, the twin's, and gradients.
    assert held >= 3 * 4 * 1024 * 4096
    rebuild, arguments = reduce_tensor(pair.model.weight.detach())
    assert callable(rebuild) and arguments
    for _ in range(3):
        data = inputs(4, 1024)
        train(pair, [lambda model, data=data: (model.weight * data.sum(0)).sum()])
        pair.compare()


def memory_that_cannot_be_mapped_is_not_shared_by_itself() -> None:
    """Expandable segments: parameters are sent, and who asks for peers gets symmetric memory."""
    pool, settings = torch.cuda.MemPool(), torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:True")
    try:
        with torch.cuda.use_mem_pool(pool):
            chosen = Pair(Elementwise(30), plain, bucket_cap_mb=TINY)
            asked = Pair(Elementwise(30), plain, bucket_cap_mb=TINY, param_buffer="peers")
            (line,) = chosen.optimizer.describe_gathers()
            assert "all-gathers send it (CUDA cannot share memory of torch's allocator with this configuration" in line
            assert asked.optimizer.describe_gathers()[0].endswith("by copy engines")
            for pair in (chosen, asked):
                for _ in range(3):
                    train(pair, [loss_of(inputs(5, 7))])
                pair.compare()
    finally:
        settings("expandable_segments:False")


EXACT = [
    check
    for check in (*training.CHECKS, *decisions.CHECKS, *captures.CHECKS, random_models.trainings)
    if check.__name__
    not in (
        "images_with_channels_last",
        "a_scaler_of_fp16_parameters",
        "torch_s_scaler_with_parameters_of_one_rank_alone",
    )
]
NEARLY = [
    Nearly(check)
    for check in (
        training.images_with_channels_last,
        decisions.torch_s_scaler_with_parameters_of_one_rank_alone,
        *(check for check in rules.CHECKS if check not in rules.RULES or check.__name__ in RULES),
        *traffic.CHECKS,
        *recomputed.CHECKS,
        *several.CHECKS,
    )
    if check.__name__ not in ("compiled_blocks", "models_that_are_compiled_as_a_whole")
]
OWN = [
    nothing_is_read_before_it_has_arrived,
    buckets_are_gathered_in_few_calls,
    the_host_never_waits,
    each_rank_has_its_share_of_the_state,
    a_tensor_of_more_elements_than_32_bits_count,
    parameters_are_shared_with_peers_and_are_torch_s_memory,
    memory_that_cannot_be_mapped_is_not_shared_by_itself,
]
TWO = [*EXACT, *NEARLY, *OWN, meshes.states_have_the_same_bits_on_any_mesh]
FOUR = [
    *meshes.THREE,
    random_models.trainings,
    Nearly(meshes.split_over_two_and_copied_over_two),
    meshes.a_bad_value_on_one_copy_skips_everywhere,
    meshes.stages_that_share_a_norm,
    meshes.states_have_the_same_bits_on_any_mesh,
    *captures.CHECKS,
    *OWN,
]
ON_FOUR = (
    "split_over_two_and_copied_over_two",
    "a_bad_value_on_one_copy_skips_everywhere",
    "stages_that_share_a_norm",
)
"""Their meshes are of four ranks."""
EIGHT = [check for check in FOUR if check.__name__ not in ON_FOUR]


test_two_gpus = pytest.mark.two_gpus(each_passes(TWO, 2, backend="nccl", default_gpu=True))


test_four_gpus = pytest.mark.four_gpus(each_passes(FOUR, 4, backend="nccl", default_gpu=True))


test_eight_gpus = pytest.mark.eight_gpus(each_passes(EIGHT, 8, backend="nccl", default_gpu=True))
