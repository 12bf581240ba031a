"""Gradients that come are counted, in C++ or in Python, and only those that matter are function calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rank_processes import each_passes
from sharded_twins import Branches, Pair, run, sgd
from torch import nn

import tilestep
from tilestep import native
from tilestep.compat import backward_pass
from tilestep.timeline.timeline import Awaited, GradientHooks

WITHOUT, WITH = "Python", "C++"


@contextmanager
def counted_in(where: str) -> Iterator[None]:
    """A block in which the C++ module is there, or is not."""
    with pytest.MonkeyPatch.context() as patch:
        if where == WITHOUT:
            patch.setattr(native, "module", lambda tensors: None)
        elif not native.wait():
            pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")
        yield


@pytest.fixture(params=[WITHOUT, WITH])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    with counted_in(request.param):
        yield request.param


class Bucket:
    """Five parameters whose gradients are awaited; says which were function calls, and which of them was the last."""

    def __init__(self, *, by_stream: bool = False) -> None:
        self.params = [nn.Parameter(torch.ones(2)) for _ in range(5)]
        self.module = native.module(1000)
        counted = () if self.module is None else (self.module, self.module.new_pass(by_stream))
        self.awaited, self.counted = Awaited(self.params, 0, {}, *counted), counted
        self.calls: list[int] = []
        self.last: list[int] = []
        self.hooks = GradientHooks(partial(Bucket.announced, weakref.ref(self)))
        for place, param in enumerate(self.params):
            self.hooks.add(param, partial(self.awaited.hook, place))

    @staticmethod
    def announced(living: Any, param: torch.Tensor) -> None:
        if living() is not None:
            living().come(param)

    def come(self, param: torch.Tensor) -> None:
        place = next(place for place, own in enumerate(self.params) if own is param)
        self.calls.append(place)
        number = backward_pass()
        self.follow(-1 if number is None else number)
        self.awaited.note_stream(param)
        self.awaited.places[place] = 0
        if 1 not in self.awaited.places:
            self.last.append(place)

    def follow(self, number: int) -> None:
        if self.module is not None:
            self.module.note(self.counted[1], number)

    def backward(self, chosen: list[int], begin: bool = True) -> None:
        """Backward through some of them, the last one first."""
        if begin:
            self.awaited.places[:] = bytes(param.requires_grad for param in self.params)
        total = torch.ones(2)
        for place in chosen:
            total = total * self.params[place]
        total.sum().backward()


@pytest.mark.parametrize("by_stream", [False, True])
def test_the_last_gradient_is_told_and_no_more_are_calls_than_must_be(where: str, by_stream: bool) -> None:
    bucket = Bucket(by_stream=by_stream)
    for _ in range(3):
        bucket.calls, bucket.last = [], []
        bucket.backward([0, 1, 2, 3, 4])
        assert 1 not in bucket.awaited.places
        assert len(bucket.calls) == (2 if where == WITH else 5)
        assert bucket.last == [bucket.calls[-1]]
        assert all(param.grad is not None for param in bucket.params)


def test_gradients_that_are_not_awaited_or_do_not_come(where: str) -> None:
    bucket = Bucket()
    bucket.params[1].requires_grad_(False)
    bucket.backward([0, 1, 2])
    assert 1 in bucket.awaited.places and not bucket.last
    bucket.backward([3, 4, 0], begin=False)
    assert 1 not in bucket.awaited.places and len(bucket.last) == 1
    # Nothing is awaited any more: each gradient is a call, which what sums them up must be told.
    bucket.calls = []
    bucket.backward([2, 3], begin=False)
    assert sorted(bucket.calls) == [2, 3]
    bucket.params[1].requires_grad_(True)
    bucket.backward([0, 1, 2, 3, 4])
    assert 1 not in bucket.awaited.places


def test_passes_are_told_apart(where: str) -> None:
    bucket = Bucket()
    bucket.backward([0, 1])
    bucket.calls = []
    bucket.backward([2, 3, 4], begin=False)
    # The first of another pass is always a call, and so is the last one.
    assert len(bucket.calls) == (2 if where == WITH else 3) and 1 not in bucket.awaited.places
    bucket.calls = []
    bucket.backward([0, 1, 2])
    bucket.follow(-1)
    bucket.backward([3], begin=False)
    assert bucket.calls[-1] == 3


def test_whoever_counts_is_let_go(where: str) -> None:
    bucket = Bucket()
    bucket.backward([0, 1, 2, 3, 4])
    param, living = bucket.params[0], weakref.ref(bucket)
    del bucket
    gc.collect()
    assert living() is None
    # Its hook is still there, and does nothing.
    param.sum().backward()
    assert float(param.grad[0]) == 2


def test_passes_of_several_threads_are_counted_one_by_one(where: str) -> None:
    buckets = [Bucket() for _ in range(4)]
    threads = [threading.Thread(target=bucket.backward, args=([0, 1, 2, 3, 4],)) for bucket in buckets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(1 not in bucket.awaited.places and len(bucket.last) == 1 for bucket in buckets)


def test_the_module_refuses_what_it_does_not_know() -> None:
    with counted_in(WITH):
        module: Any = native.module(1000)
        counted_pass = module.new_pass(False)
        for wrong in (
            lambda: module.note(counted_pass, "no number"),
            lambda: module.note(3, 3),
            lambda: module.new_hook(counted_pass, b"\1", 0, print),
            lambda: module.new_hook(bytearray(1), bytearray(1), 0, print),
        ):
            with pytest.raises((TypeError, ValueError)):
                wrong()


def test_a_training_that_begins_before_the_module_is_built(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")
    built, module = False, native.module
    monkeypatch.setattr(native, "module", lambda tensors: module(tensors) if built else None)
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = tilestep.AdamW(models[0].parameters(), lr=0.1)  # type: ignore[attr-defined]
    sharded = tilestep.shard(tilestep.AdamW(models[1].parameters(), lr=0.1), models[1])  # type: ignore[attr-defined]
    for step in range(4):
        built = step >= 2
        data = torch.randn(3, 4)
        for model, optimizer in zip(models, (plain, sharded)):
            model(data).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (sharded.execution.gradients.timeline._module is not None) == built
    for mine, theirs in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(mine, theirs)


def test_an_optimizer_may_be_dropped_in_a_backward(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    held = [tilestep.shard(sgd(model.parameters()), model)]
    gone = weakref.ref(held[0])
    model[0].weight.register_hook(lambda _: held.clear())
    model(torch.ones(2, 4)).sum().backward()
    assert gone() is None
    assert model[0].weight.grad is not None


def train_beside_twins(where: str) -> None:
    if where == WITH and not native.wait():
        return
    with counted_in(where):
        for options in ({}, {"bucket_cap_mb": 200 / 2**20}, {"grad_buffer": "bucket"}, {"overlap_grad_sync": False}):
            pair = Pair(Branches(), sgd, **options)
            assert (pair.optimizer.execution.gradients.timeline._module is not None) == (where == WITH)
            for chosen in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [5, 4, 4, 3], [2, 1]], [[1, 1, 2]], [[3, 0], [0, 3]]):
                for sync_all in (False, True):
                    run(pair, chosen, sync_all)
                    pair.compare(rtol=1e-5, atol=1e-6)


test_two_ranks = each_passes({f"in {where}": partial(train_beside_twins, where) for where in (WITHOUT, WITH)}, 2)
