"""Compiled modules whose parameters may be on their way: what waits where, and when code is traced again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard

import tilestep
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.timeline.guards import guard_look_ups

BLOCKS = 12
"""More than dynamo traces one function for."""


class Waiting:
    """Counts who waits."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.compiled, self.tickets = False, True
        self.of = dict.fromkeys(map(id, params))
        self.waited: list[Any] = []

    def wait(self, param: Any) -> None:
        self.waited.append(param)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(torch.tanh(self.into(hidden)))


class Blocks(nn.Module):
    def __init__(self, wrapped: bool, backend: Any) -> None:
        super().__init__()
        blocks = [Block() for _ in range(BLOCKS)]
        for block in blocks:
            if not wrapped:
                block.compile(backend=backend, fullgraph=True)
        made = [torch.compile(block, backend=backend, fullgraph=True) if wrapped else block for block in blocks]
        self.blocks = nn.ModuleList(made)  # type: ignore[arg-type]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_module_waits_where_it_is_called(wrapped: bool) -> None:
    # What optimizers of tests before have left at all forwards goes with them.
    gc.collect()
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = Blocks(wrapped, backend)
    waits = Waiting(model.parameters())
    guard_look_ups(waits, model)  # type: ignore[arg-type]
    data = torch.randn(3, 4)
    model(data)
    model(data)
    # All blocks share their code, as without guards: one graph for the first input, and one that requires a gradient.
    assert len(graphs) == 2
    waits.waited.clear()
    model.blocks[3](data)
    wanted = {id(param) for param in model.blocks[3].parameters()}
    assert {id(param) for param in waits.waited} == wanted
    assert not waits.compiled

    def around(given: torch.Tensor) -> torch.Tensor:
        return 2 * model(given)

    fast = torch.compile(around, backend=backend, fullgraph=True)
    for _ in range(2):
        # Such code enters no block when it is called, and so it says that it waits for nothing.
        waits.compiled = False
        fast(data)
        assert waits.compiled
    count = len(graphs)
    waits.compiled = False
    model(data)
    assert (waits.compiled, len(graphs)) == (False, count)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_model_is_let_go(wrapped: bool) -> None:
    model = Blocks(wrapped, "eager")
    waits = Waiting(model.parameters())
    guard_look_ups(waits, model)  # type: ignore[arg-type]
    living = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert living() is None


def test_what_is_compiled_after_an_overlapped_training_is_compiled_once() -> None:
    """A call of a compiled graph was the first to see that no wait is left, and ended the waiting."""
    model = nn.Linear(4, 1)
    optimizer: Any = tilestep.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    optimizer = tilestep.overlap(optimizer, model, during="forward")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    other = nn.Linear(4, 1)
    loss_of = torch.compile(lambda given: other(given).sum(), backend=counter)
    for _ in range(3):
        loss_of(torch.ones(2, 4)).backward()
    assert counter.frame_count == 1


def test_what_is_compiled_before_an_overlapped_model_is_collected_is_compiled_once(one_rank: None) -> None:
    """FSDP2's models hold themselves; waiting ended with them, whenever that was, and compiled code was stale."""
    gc.collect()
    gc.disable()
    try:
        model = fully_shard(nn.Linear(4, 1))
        optimizer: Any = tilestep.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
        optimizer = tilestep.overlap(optimizer, model, during="forward")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        living = weakref.ref(model)
        del model, optimizer
        assert living() is not None, "then this test can go, and what it is about"
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        other = nn.Linear(4, 1)
        loss_of = torch.compile(lambda given: other(given).sum(), backend=counter)
        loss_of(torch.ones(2, 4)).backward()
    finally:
        gc.enable()
    gc.collect()
    assert living() is None
    loss_of(torch.ones(2, 4)).backward()
    assert counter.frame_count == 1


def test_a_second_optimizer_of_the_model_is_waited_for_too() -> None:
    torch._dynamo.reset()
    model = Blocks(False, "eager")
    first = Waiting(param for block in model.blocks for param in block.into.parameters())
    second = Waiting(param for block in model.blocks for param in block.out.parameters())
    guard_look_ups(first, model)  # type: ignore[arg-type]
    guard_look_ups(second, model)  # type: ignore[arg-type]
    data = torch.randn(3, 4)
    model(data)
    first.waited.clear(), second.waited.clear()
    model(data)
    assert len(first.waited) == len(second.waited) == 2 * BLOCKS
    assert not first.compiled and not second.compiled


@pytest.mark.parametrize("attached", ["overlap in backward", "offload of gradients"])
def test_a_backward_that_compiled_code_runs_compiles_no_hook(attached: str) -> None:
    """What hooks call was compiled with them: sizes became symbols, and kernels got addresses of other lists."""
    torch._dynamo.reset()
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
        optimizer: Any = tilestep.AdamW(model.parameters(), lr=0.05)  # type: ignore[attr-defined]
        if compiled and attached == "overlap in backward":
            tilestep.overlap(optimizer, model, during="backward")
        elif compiled:
            home = StreamedState(torch.device("cpu"), 1, 2, keeps_gradients=True)
            move_state(optimizer, home, "gpu", "for a test")

        def train(data: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        step = torch.compile(train, backend="aot_eager") if compiled else train
        for seed in range(4):
            step(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)))
        results.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("during", ["backward", "forward"])
def test_a_backward_that_is_compiled_as_a_whole_updates(during: Any) -> None:
    """torch forgets what is to be called at the end of such a backward, which then seemed to have been broken off."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: Any = tilestep.AdamW(model.parameters(), lr=0.05)  # type: ignore[attr-defined]
        if compiled:
            tilestep.overlap(optimizer, model, during=during)
        for seed in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
            around = compiled_autograd._enable(torch.compile(backend="eager")) if compiled else nullcontext()
            with around:
                loss.backward()
            optimizer.step()
        results.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *results))
