"""What may go wrong between ranks: other parameters in use on each, other orders, errors, and modules that peek."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, TOLERANCES, Branches, Pair, inputs, run, sgd, train
from torch import nn
from torch.nn import functional

import tilestep
from tilestep.placement import Ranks

EXACTLY = {"rtol": 0.0, "atol": 0.0}


def adamw(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.01, eps=0.1)  # type: ignore[attr-defined]


def other_branches_on_every_rank_and_at_every_step() -> None:
    for size in (TINY, 25.0):
        for options in ({}, {"overlap_grad_sync": False}, {"grad_buffer": "bucket"}):
            pair = Pair(Branches(), sgd, bucket_cap_mb=size, **options)
            orders = [[0, 1, 2], [5, 4], [3, 3, 0], [1], [5, 0, 5, 2], [0, 1, 2, 3, 4, 5]]
            for step, order in enumerate(orders):
                mine = order if dist.get_rank() == 0 else orders[step - 2][::-1]
                run(pair, [mine])
                pair.compare()
            pair.compare_states()


def other_branches_in_every_microbatch() -> None:
    pair = Pair(Branches(), sgd, bucket_cap_mb=TINY)
    for step in range(4):
        mine = [[0, 1], [2, 1], [4, 3]] if dist.get_rank() == step % 2 else [[5], [1, 2], [0]]
        run(pair, mine)
        pair.compare()


def other_branches_with_a_sync_at_every_microbatch() -> None:
    pair = Pair(Branches(), sgd, bucket_cap_mb=TINY)
    for step in range(4):
        mine = [[0, 1], [2, 1], [4, 3]] if dist.get_rank() == step % 2 else [[5], [1, 2], [0]]
        run(pair, mine, sync_all=True)
        pair.compare(rtol=1e-5, atol=1e-6)


def a_rank_without_any_gradient() -> None:
    pair = Pair(Branches(), sgd, bucket_cap_mb=TINY)
    for step in range(4):
        if dist.get_rank() == step % 2:
            data = inputs(3, 4)
            pair.backward(lambda model, data=data: model(data, [2, 0]))
        else:
            inputs(3, 4)
        pair.step()
        pair.compare()


def parameters_frozen_and_thawed() -> None:
    model = Branches()
    for index in (1, 4):
        model.branches[index].requires_grad_(False)
    pair = Pair(model, sgd, bucket_cap_mb=TINY)
    for step in range(6):
        for side in (pair.model, pair.twin):
            side.branches[1].requires_grad_(step >= 2)
            side.branches[3].requires_grad_(step % 2 == 0)
        run(pair, [[0, 1, 2, 3, 4, 5]])
        pair.compare()


def a_rank_that_uses_what_was_thawed_alone() -> None:
    """Its backward is a round too: the others do not wait for one that never comes."""
    model = Branches()
    model.branches[1].requires_grad_(False)
    pair = Pair(model, sgd, bucket_cap_mb=TINY)
    for side in (pair.model, pair.twin):
        side.branches[1].requires_grad_(True)
    for _ in range(3):
        run(pair, [[1], [1]] if dist.get_rank() == 0 else [[0], [2]], sync_all=True)
        pair.compare(rtol=1e-5, atol=1e-6)


def parameters_used_twice_and_shared() -> None:
    model = Branches()
    model.branches[3].weight = model.branches[0].weight
    pair = Pair(model, sgd, bucket_cap_mb=TINY)
    for _ in range(3):
        run(pair, [[0, 3, 0, 1], [3, 3]])
        pair.compare()


class Broken(torch.autograd.Function):
    """Passes everything on, and raises in backward."""

    @staticmethod
    def forward(context: Any, data: torch.Tensor) -> torch.Tensor:
        return data.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("broken on purpose")


def an_error_in_the_middle_of_backward() -> None:
    break_off(TINY)


def an_error_before_a_first_bucket_is_complete() -> None:
    """On one rank alone, which has sent nothing yet; buckets are of three branches."""
    break_off(240 / 2**20)


def break_off(bucket_cap_mb: float) -> None:
    """Backward passes that ranks break off in other places, and steps after them."""
    pair = Pair(Branches(), sgd, bucket_cap_mb=bucket_cap_mb)
    for step in range(3):
        data = inputs(3, 4)
        depth = 1 + (dist.get_rank() + step) % 3
        hidden = data
        for index in range(6):
            hidden = pair.model.branches[index](hidden)
            if index == depth:
                hidden = Broken.apply(hidden)
        with pytest.raises(ArithmeticError):
            hidden.sum().backward()
        if step != 1:
            pair.optimizer.zero_grad()
            run(pair, [[0, 1, 2, 3, 4, 5]])
        else:
            # Without zero_grad the gradients there are count, as in torch; the next pass must not hang.
            run(pair, [[0, 1, 2, 3, 4, 5]])
            for param in pair.model.parameters():
                first = param.detach().clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, param)
            pair.twin.load_state_dict(pair.model.state_dict())
            pair.twin_optimizer.load_state_dict(pair.optimizer.full_state_dict())
        pair.compare()


class Peeking(nn.Module):
    """Modules that use parameters without calling the module that has them, or that keep them in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.layer(self.attention(hidden, hidden, hidden)[0])
        return functional.linear(self.recurrent(hidden)[0], self.embedding.weight)


class Late:
    """A gather that does not begin before it is waited for."""

    def __init__(self, gather: Callable[[], Any]) -> None:
        self._gather = gather

    def wait(self) -> None:
        for work in self._gather():
            work.wait()


@contextmanager
def gathers_that_come_late() -> Iterator[None]:
    """Whoever does not wait for parameters sees the old ones."""
    before = Ranks.all_gather
    Ranks.all_gather = lambda *arguments: [Late(lambda: before(*arguments))]  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ranks.all_gather = before  # type: ignore[method-assign]


@gathers_that_come_late()
def modules_that_peek_at_each_other() -> None:
    pair = Pair(Peeking(), sgd, bucket_cap_mb=TINY)
    for step in range(4):
        tokens = torch.randint(11, (2, 5))
        train(pair, [lambda model, tokens=tokens: model(tokens).square().mean()])
        with torch.no_grad():
            for model in (pair.model, pair.twin):
                model.train(step % 2 == 0)
            torch.testing.assert_close(pair.model(tokens), pair.twin(tokens), **(TOLERANCES or EXACTLY))
        for model in (pair.model, pair.twin):
            model.train()  # cuDNN's recurrent layers have a backward in this mode alone
    pair.compare()


@gathers_that_come_late()
def parameters_read_right_after_the_step() -> None:
    pair = Pair(Branches(), sgd, bucket_cap_mb=TINY)
    readers: list[Callable[[nn.Module], list[torch.Tensor]]] = [
        lambda model: list(model.state_dict().values()),
        lambda model: list(copy.deepcopy(model).parameters()),
        lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
        lambda model: [dict(branch._parameters)["weight"] for branch in model.branches],
        lambda model: [branch._parameters.get("bias") for branch in model.branches],
        lambda model: [branch._parameters.copy()["bias"] for branch in model.branches],
        lambda model: list(torch.nn.utils.parameters_to_vector(model.parameters())),
    ]
    for reader in readers:
        run(pair, [[0, 1, 2, 3, 4, 5]])
        mine, theirs = reader(pair.model), reader(pair.twin)
        assert len(mine) > 0
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, **(TOLERANCES or EXACTLY))
    assert type(copy.deepcopy(pair.model).branches[0]._parameters) is dict


class Step(nn.Module):
    """A block with a weight that others use too."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(torch.tanh(self.into(hidden)))


class Steps(nn.Module):
    """Blocks, each of which may be compiled by itself, and a weight of one of them beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Step() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(hidden, self.blocks[1].into.weight)


@gathers_that_come_late()
def compiled_blocks() -> None:
    """A compiled block waits for its own parameters when it is called, and the step for none."""
    for wrapped in (False, True):
        torch._dynamo.reset()
        model = Steps()
        for index, block in enumerate(model.blocks):
            if wrapped:
                model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
            else:
                block.compile(backend="eager", fullgraph=True)
        pair = Pair(model, sgd, bucket_cap_mb=TINY)
        sync = pair.optimizer.execution.parameters
        late = []
        for _ in range(4):
            data = inputs(3, 4)
            train(pair, [lambda model, data=data: model(data).square().sum()])
            late.append(len(sync.publication.tickets))
            pair.compare()
        assert not sync.publication.compiled
        assert max(late) > 1
        # Code that is compiled around a block waits for nothing when it is called: the next steps wait.
        outer = torch.compile(lambda model, data: model(data).square().sum(), backend="eager", fullgraph=True)
        for _ in range(3):
            data = inputs(3, 4)
            outer(pair.model, data).backward()
            pair.twin(data).square().sum().backward()
            pair.step()
            pair.compare()
        assert sync.publication.compiled
        assert not sync.publication.tickets


@gathers_that_come_late()
def models_that_are_compiled_as_a_whole() -> None:
    """The call takes all parameters at once: it waits for them, or the step does, and they are the eager twin's."""
    for wrapped, backend in ((False, "aot_eager"), (True, "aot_eager"), (True, "eager")):
        torch._dynamo.reset()
        model = Steps()
        called = torch.compile(model, backend=backend, fullgraph=True) if wrapped else model
        if not wrapped:
            model.compile(backend=backend, fullgraph=True)
        pair = Pair(model, adamw, bucket_cap_mb=TINY)
        sync = pair.optimizer.execution.parameters
        for _ in range(4):
            for block in (pair.optimizer.no_sync(), nullcontext()):
                data = inputs(3, 4)
                pair.twin.forward(data).square().sum().backward()
                with block:
                    called(data).square().sum().backward()
            pair.step()
            # A wrapper is not the model's: that its code takes parameters is known once it is traced.
            assert sync.publication.compiled == wrapped
            assert len(sync.publication.tickets) == (0 if wrapped else len(sync._groups))
            pair.compare()
        pair.compare_states()
    other = nn.Linear(2, 2)
    assert isinstance(tilestep.shard(sgd(other.parameters()), torch.compile(other)), tilestep.ShardedOptimizer)


def parameters_written_by_others() -> None:
    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=0.1, master_weights=True)  # type: ignore[attr-defined]

    pair = Pair(nn.Linear(9, 5).bfloat16(), make, bucket_cap_mb=TINY)
    for step in range(4):
        data = inputs(3, 9, dtype=torch.bfloat16)
        train(pair, [lambda model, data=data: model(data).square().sum()])
        pair.compare()
        if step == 1:
            values = {name: torch.full_like(value, 0.3) for name, value in pair.model.state_dict().items()}
            pair.model.load_state_dict(values)
            pair.twin.load_state_dict(values)
        if step == 2:
            pair.model.weight.data = pair.model.weight.data.clone() * 2
            with torch.no_grad():
                pair.twin.weight.mul_(2)
    pair.compare_states()
    pair.model.weight.data = pair.model.weight.data.float()
    with pytest.raises(RuntimeError, match="move and convert a model before sharding"):
        pair.optimizer.step()


def a_step_makes_old_graphs_unusable() -> None:
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sgd)
    kept = pair.model(inputs(2, 4)).sum()
    train(pair, [lambda model: model(torch.ones(2, 4)).sum()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    pair.optimizer.zero_grad()


def weights_to_evaluate() -> None:
    from tilestep.rules.compose import ema

    def make(params: Any) -> Any:
        return tilestep.Optimizer(params, ema(tilestep.registry["SGD"], 0.5), lr=0.1)

    pair = Pair(Branches(), make, bucket_cap_mb=TINY)
    for _ in range(2):
        run(pair, [[0, 1, 2, 3, 4, 5]])
        with pair.optimizer.averaged(), pair.twin_optimizer.averaged():  # type: ignore[attr-defined]
            pair.compare()
            with pytest.raises(RuntimeError, match="call train"):
                pair.optimizer.step()
        pair.compare()


def a_torch_without_its_private_calls() -> None:
    """No end of backward to be told of, and modules that keep their parameters elsewhere: later, but the same."""
    from tilestep.timeline import guards, timeline

    before = timeline.after_backward, timeline.backward_pass, guards.guard_parameters
    timeline.after_backward = lambda callback: False
    timeline.backward_pass = lambda: None
    guards.guard_parameters = lambda module, guard: False
    try:
        pair = Pair(Branches(), sgd, bucket_cap_mb=TINY)
        assert type(pair.model.branches[0]._parameters) is dict
        with gathers_that_come_late():
            for step in range(4):
                mine = [[0, 1], [2, 1], [4, 3, 5]] if dist.get_rank() == step % 2 else [[5], [1, 2], [0]]
                run(pair, mine, sync_all=step % 2 == 0)
                pair.compare()
    finally:
        timeline.after_backward, timeline.backward_pass, guards.guard_parameters = before


CHECKS = [
    a_torch_without_its_private_calls,
    other_branches_on_every_rank_and_at_every_step,
    other_branches_in_every_microbatch,
    other_branches_with_a_sync_at_every_microbatch,
    a_rank_without_any_gradient,
    parameters_frozen_and_thawed,
    a_rank_that_uses_what_was_thawed_alone,
    parameters_used_twice_and_shared,
    an_error_in_the_middle_of_backward,
    an_error_before_a_first_bucket_is_complete,
    modules_that_peek_at_each_other,
    parameters_read_right_after_the_step,
    compiled_blocks,
    models_that_are_compiled_as_a_whole,
    parameters_written_by_others,
    a_step_makes_old_graphs_unusable,
    weights_to_evaluate,
]


test_two_ranks = each_passes(CHECKS, 2)
