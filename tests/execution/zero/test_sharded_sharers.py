"""Other modules with a sharded optimizer's parameters: they wait by themselves and do not keep it alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from rank_processes import each_passes
from sharded_twins import TINY, Pair, inputs, sgd, train
from shared_weights import Borrowing
from test_traffic import gathers_that_come_late
from torch import nn

import tilestep


@gathers_that_come_late()
def other_models_with_the_same_weights_wait() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = Borrowing(model[0].weight)
    pair = Pair(model, sgd, bucket_cap_mb=TINY)
    wanted = Borrowing(pair.twin[0].weight)
    for _ in range(3):
        data = inputs(3, 4)
        train(pair, [lambda model, data=data: model(data).square().sum()])
        after, beside = Borrowing(model[1].weight), Borrowing(pair.twin[1].weight)
        with torch.no_grad():
            assert torch.equal(after(data), beside(data))
            assert torch.equal(before.state_dict()["layer.weight"], wanted.state_dict()["layer.weight"])
        pair.compare()


test_two_ranks = each_passes([other_models_with_the_same_weights_wait], 2)


def test_models_and_buckets_are_let_go(one_rank: None) -> None:
    def used() -> list[weakref.ref[Any]]:
        model = nn.Linear(3, 3)
        optimizer = tilestep.shard(sgd(model.parameters()), model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return [weakref.ref(owner) for owner in (model, optimizer, optimizer.execution.gradients, model.weight)]

    references = used()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
