"""Communication overlaps: it begins as soon as it can, in the order of need, and only what is needed is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, inputs
from torch import nn

import tilestep
from tilestep.placement import Ranks
from tilestep.rules.compose import ema

LAYERS = 5


class Chain(nn.Module):
    """Layers that need each other's results, each of its own bucket; says which gradient backward has reached."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(LAYERS))
        self.said = said

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            data = layer(data)
            if data.requires_grad:
                data.register_hook(lambda _, index=index: self.said.append(f"backward {index}"))
        return data.sum()


@contextmanager
def told(said: list[str]) -> Iterator[None]:
    """Which bucket is sent, which is gathered, and which is waited for; gathers begin when they are waited for."""
    with pytest.MonkeyPatch.context() as patch:
        gather, reduce = Ranks.all_gather, Ranks.reduce_scatter

        def reducing(*arguments: Any, **options: Any) -> Any:
            said.append("reduce")
            return reduce(*arguments, **options)

        class Late:
            def __init__(self, *arguments: Any) -> None:
                self.arguments, self.number = arguments, sum("gather" in word for word in said)
                said.append(f"gather {self.number}")

            def wait(self) -> None:
                said.append(f"wait {self.number}")
                for work in gather(*self.arguments):
                    work.wait()

        patch.setattr(Ranks, "reduce_scatter", reducing)
        patch.setattr(Ranks, "all_gather", lambda *arguments: [Late(*arguments)])
        yield


def made(said: list[str], **options: Any) -> tuple[Chain, tilestep.ShardedOptimizer]:
    model = Chain(said)
    optimizer = tilestep.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    return model, tilestep.shard(optimizer, model, bucket_cap_mb=TINY, **options)


def buckets_are_sent_while_backward_runs() -> None:
    said: list[str] = []
    model, _ = made(said)
    with told(said):
        model(inputs(2, 7)).backward()
    # What backward computes of a layer after its output's gradient is the weight's.
    expected = [word for index in reversed(range(LAYERS)) for word in (f"backward {index}", "reduce")]
    assert said == expected, said


def without_overlap_nothing_is_sent_before_the_step() -> None:
    said: list[str] = []
    model, optimizer = made(said, overlap_grad_sync=False, overlap_param_sync=False)
    with told(said):
        model(inputs(2, 7)).backward()
        assert said == [f"backward {index}" for index in reversed(range(LAYERS))]
        optimizer.step()
    assert said[LAYERS : 2 * LAYERS] == ["reduce"] * LAYERS and said[-1] == f"wait {LAYERS - 1}"


def parameters_are_gathered_in_the_order_of_the_forward_and_waited_for_one_by_one() -> None:
    said: list[str] = []
    model, optimizer = made(said)
    with told(said):
        model(inputs(2, 7)).backward()
        said.clear()
        optimizer.step()
        assert said == [f"gather {index}" for index in range(LAYERS)]
        for index, layer in enumerate(model.layers):
            said.clear()
            layer(inputs(2, 7))
            assert said == [f"wait {index}"]
        said.clear()
        model(inputs(2, 7))
        optimizer.wait()
        assert not any("wait" in word for word in said)


def averages_are_brought_in_when_parameters_have_arrived() -> None:
    """Before that the send reads their memory, and nothing would wait for it."""
    said: list[str] = []
    model = Chain(said)
    made = tilestep.Optimizer(model.parameters(), ema(tilestep.registry["SGD"], 0.5), lr=0.1)
    optimizer = tilestep.shard(made, model, bucket_cap_mb=TINY)
    with told(said):
        model(inputs(2, 7)).backward()
        optimizer.step()
        said.clear()
        for change in (optimizer.eval, optimizer.train):
            change()
            assert said == [
                *[f"wait {index}" for index in range(LAYERS)],
                *[f"gather {index}" for index in range(LAYERS)],
            ]
            said.clear()


def gradients_are_accumulated_in_the_buffer() -> None:
    said: list[str] = []
    model, optimizer = made(said)
    memory = [sums.flat for sums in optimizer.execution.gradients.sums]
    starts = {flat.data_ptr() for flat in memory if flat is not None}
    with told(said), optimizer.no_sync():
        for _ in range(3):
            model(inputs(2, 7)).backward()
            assert {param.grad.data_ptr() for param in model.parameters()} == starts  # type: ignore[union-attr]
    assert "reduce" not in said and len(starts) == LAYERS


def nobody_but_one_rank_keeps_a_full_state_and_none_more_than_a_tensor_of_it() -> None:
    model, optimizer = made([])
    model(inputs(2, 7)).backward()
    optimizer.step()
    adam = tilestep.shard(tilestep.AdamW(model.parameters(), lr=0.1), model)  # type: ignore[attr-defined]
    model(inputs(2, 7)).backward()
    adam.step()
    largest = 0
    before = Ranks.send

    def measured(self: Ranks, tensor: torch.Tensor, source: int) -> None:
        nonlocal largest
        largest = max(largest, tensor.untyped_storage().nbytes())
        before(self, tensor, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "send", measured)
        full = adam.full_state_dict(rank=1)
    assert 0 < largest <= 7 * 7 * 4
    assert bool(full) == (dist.get_rank() == 1)


CHECKS = [
    buckets_are_sent_while_backward_runs,
    without_overlap_nothing_is_sent_before_the_step,
    parameters_are_gathered_in_the_order_of_the_forward_and_waited_for_one_by_one,
    averages_are_brought_in_when_parameters_have_arrived,
    gradients_are_accumulated_in_the_buffer,
    nobody_but_one_rank_keeps_a_full_state_and_none_more_than_a_tensor_of_it,
]


test_two_ranks = each_passes(CHECKS, 2)
