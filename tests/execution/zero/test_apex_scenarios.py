"""The scenarios in which apex tests its distributed fused Adam, against DDP and torch's Adam, with tolerances no wider.

Its checkpoints on one and on several ranks are in test_checkpoints.py, its CUDA graph in sharded_captures.py.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Elementwise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tilestep

STEPS, MICROBATCHES = 3, 3
ADAM = {"lr": 0.1, "betas": (0.1, 0.2), "eps": 0.25, "weight_decay": 0.1}
TOLERANCES = {
    torch.float64: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 1e-5},
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.2}]


class Beside:
    """A sharded model beside one under DistributedDataParallel with torch's optimizer."""

    def __init__(self, model: nn.Module, kind: str = "AdamW", **options: Any) -> None:
        self.tolerance = options.pop("tolerance", None)
        self.theirs = copy.deepcopy(model)
        self.wrapped = DistributedDataParallel(self.theirs)
        self.their_optimizer = getattr(torch.optim, kind)(groups(self.theirs), **ADAM)
        self.mine = model
        clip = {"max_grad_norm": options.pop("clip")} if "clip" in options else {}
        kept = {"master_weights": options.pop("master_weights")} if "master_weights" in options else {}
        rule = options.pop("rule", tilestep.registry[kind])
        own = [{**group, **said} for group, said in zip(groups(model), options.pop("by_group", ({}, {})))]
        made = tilestep.Optimizer(own, rule, **ADAM, **clip, **kept)
        self.optimizer = tilestep.shard(made, model, bucket_cap_mb=TINY, **options)

    def backward(self, sync: bool, scales: Any = None, spoil: float | None = None) -> None:
        generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())) + dist.get_rank())
        data, given = (torch.rand(5, 7, generator=generator) - 0.5 for _ in range(2))
        if spoil is not None and dist.get_rank() == 1:
            given[2, 3] = spoil
        first = next(self.mine.parameters()).dtype
        blocks = (nullcontext(), nullcontext()) if sync else (self.optimizer.no_sync(), self.wrapped.no_sync())
        for place, (model, block) in enumerate(zip((self.mine, self.wrapped), blocks)):
            with block:
                loss = (model(data.to(first)) * given.to(first)).sum()
                (loss if scales is None else scales[place].scale(loss)).backward()

    def step(self, clip: float | None = None) -> None:
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.theirs.parameters(), clip)
        self.optimizer.step()
        self.their_optimizer.step()
        self.their_optimizer.zero_grad()

    def compare(self) -> None:
        self.optimizer.wait()
        for mine, theirs in zip(self.mine.parameters(), self.theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **(self.tolerance or TOLERANCES[mine.dtype]))

    def train(self, sync_all: bool = False, clip: float | None = None) -> None:
        before = [param.detach().clone() for param in self.mine.parameters()]
        for _ in range(STEPS):
            for microbatch in range(MICROBATCHES):
                self.backward(sync_all or microbatch == MICROBATCHES - 1)
            self.step(clip)
            self.compare()
        assert not any(map(torch.equal, before, self.mine.parameters()))


def matches_torch() -> None:
    Beside(Elementwise()).train()


def l2_regularization() -> None:
    Beside(Elementwise(), "Adam").train()


def no_overlap() -> None:
    Beside(Elementwise(), overlap_grad_sync=False, overlap_param_sync=False).train()


def a_sync_at_every_step() -> None:
    Beside(Elementwise()).train(sync_all=True)


def contiguous_buffers() -> None:
    for grads in ("contiguous", "bucket"):
        for params in ("contiguous", "bucket"):
            Beside(Elementwise(), grad_buffer=grads, param_buffer=params).train()


def parameters_sent_as_whole_numbers() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        Beside(Elementwise(), param_sync_dtype=dtype).train()


def other_dtypes() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        Beside(Elementwise().to(dtype)).train()


def bfloat16_remainders() -> None:
    for kind in ("AdamW", "Adam"):
        beside = Beside(Elementwise().bfloat16(), kind, master_weights="remainder")
        beside.train()
        states = beside.optimizer.state.values()
        assert any(state["remainder_param"].any() for state in states if state["remainder_param"].numel())
    # Beside float32 masters, which torch's has not: to the bit, where no tie has cost a unit of the master.
    remainders, masters = (Beside(copy.deepcopy(beside.theirs), master_weights=kind) for kind in ("remainder", True))
    for seed in range(STEPS):
        for pair in (remainders, masters):
            torch.manual_seed(seed)
            pair.backward(True)
            pair.step()
    for pair in (remainders, masters):
        pair.optimizer.wait()
    for mine, theirs in zip(remainders.mine.parameters(), masters.mine.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def scaled_states() -> None:
    for kind in ("AdamW", "Adam"):
        rule = tilestep.scaled_states(tilestep.registry[kind])
        # The tolerance is that of what the states are kept in, as apex's.
        beside = Beside(Elementwise(), kind, rule=rule, tolerance=TOLERANCES[torch.float16])
        beside.train()
        for state in beside.optimizer.state.values():
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float16
        Beside(Elementwise().bfloat16(), kind, rule=rule, master_weights=True).train()


def gradients_and_parameters_sent_in_other_dtypes() -> None:
    Beside(Elementwise().bfloat16(), grad_sync_dtype=torch.float32).train()
    Beside(Elementwise(), grad_sync_dtype=torch.float64).train()


def types_by_group() -> None:
    """What travels, masters and states may differ by param group: apex has such types for each parameter."""
    first = {"grad_sync_dtype": torch.float32, "master_weights": "remainder"}
    second = {"param_sync_dtype": torch.uint8, "master_weights": True, "state_dtype": lambda name: torch.bfloat16}
    beside = Beside(Elementwise().bfloat16(), by_group=(first, second))
    beside.train()
    buckets = beside.optimizer.execution.sharding.buckets
    assert {(bucket.grad_dtype, bucket.sync_dtype) for bucket in buckets} == {
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.uint8),
    }
    kinds = (("remainder_param", torch.float32), ("master_param", torch.bfloat16))
    for group, (key, dtype) in zip(beside.optimizer.param_groups, kinds):
        states = [beside.optimizer.state[param] for param in group["params"]]
        assert all(key in state for state in states)
        assert all(state["exp_avg"].dtype is dtype for state in states)
    # Gradients of one group alone in float64, and parameters of the other in a narrower type, whose owner keeps them.
    Beside(Elementwise(), by_group=({"grad_sync_dtype": torch.float64}, {})).train()
    narrow = Beside(
        Elementwise(), by_group=({}, {"param_sync_dtype": torch.bfloat16}), tolerance={"rtol": 0.02, "atol": 0}
    )
    narrow.train()
    for group, is_narrow in zip(narrow.optimizer.param_groups, (False, True)):
        for param in group["params"]:
            assert torch.equal(param, param.to(torch.bfloat16).to(torch.float32)) is is_narrow
    saved = narrow.optimizer.state_dict()
    assert not any("param_sync_dtype" in group for group in saved["param_groups"])
    narrow.optimizer.load_state_dict(saved)
    assert [group.get("param_sync_dtype") for group in narrow.optimizer.param_groups] == [None, torch.bfloat16]
    with pytest.raises(ValueError, match=r"group 1: Invalid grad_sync_dtype: torch\.int8"):
        Beside(Elementwise(), by_group=({}, {"grad_sync_dtype": torch.int8}))


def buckets_of_padding() -> None:
    model = nn.ParameterDict({str(place): nn.Parameter(torch.ones(1)) for place in range(200)})
    with pytest.warns(UserWarning, match=r"bucket_cap_mb=3.8e-06 are 97% padding .*a larger bucket_cap_mb"):
        tilestep.shard(tilestep.SGD(model.parameters()), model, bucket_cap_mb=4 / 2**20)
    # Two ranks for a matrix that one of them has to update.
    matrix = nn.ParameterDict({"0": nn.Parameter(torch.ones(1024, 512))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilestep.shard(tilestep.Muon(matrix.parameters()), matrix)


def mixed_dtypes() -> None:
    model = Elementwise()
    for place, dtype in ((1, torch.float16), (4, torch.bfloat16), (7, torch.float64)):
        model.weights[place] = nn.Parameter(model.weights[place].to(dtype))
    beside = Beside(model)
    for param, theirs in zip(beside.mine.parameters(), beside.theirs.parameters(), strict=True):
        assert param.dtype is theirs.dtype
    beside.train()


def a_clip() -> None:
    beside = Beside(Elementwise(), "Adam", clip=0.5)
    beside.train(clip=0.5)


def scalers_with_overflows() -> None:
    for kind in (torch.amp.GradScaler, tilestep.GradScaler):
        for clip in (None, 0.5):
            beside = Beside(Elementwise(), **({} if clip is None else {"clip": clip}))
            options: dict[str, Any] = {"init_scale": 218.0, "growth_interval": 2}
            scales = kind("cpu", **options), torch.amp.GradScaler("cpu", **options)
            for spoil in (None, math.inf, None, math.nan, None, -math.inf, None):
                for microbatch in range(MICROBATCHES):
                    last = microbatch == MICROBATCHES - 1
                    beside.backward(last, scales, spoil if last else None)
                if clip is not None:
                    scales[1].unscale_(beside.their_optimizer)
                    torch.nn.utils.clip_grad_norm_(beside.theirs.parameters(), clip)
                for scaler, optimizer in zip(scales, (beside.optimizer, beside.their_optimizer)):
                    scaler.step(optimizer)
                    scaler.update()
                beside.their_optimizer.zero_grad()
                assert scales[0].get_scale() == scales[1].get_scale()
                beside.compare()
            assert int(beside.optimizer.skipped_steps) == 3


CHECKS = [
    matches_torch,
    l2_regularization,
    no_overlap,
    a_sync_at_every_step,
    contiguous_buffers,
    parameters_sent_as_whole_numbers,
    other_dtypes,
    bfloat16_remainders,
    scaled_states,
    gradients_and_parameters_sent_in_other_dtypes,
    types_by_group,
    buckets_of_padding,
    mixed_dtypes,
    a_clip,
    scalers_with_overflows,
]


test_two_ranks = each_passes(CHECKS, 2)
