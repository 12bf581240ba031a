"""How many Python functions of the package a steady step calls: what is absent costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilestep
from tilestep import native

AdamW: Any = tilestep.AdamW  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def with_the_native_module(one_rank: None) -> None:
    if not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")


def calls(work: Callable[[], Any]) -> list[str]:
    """The functions of the package that are called, one after the other; comprehensions are none."""
    place, called = tilestep.__path__[0], list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(place) and not code.co_name.startswith("<"):
            called.append(f"{code.co_filename[len(place) + 1 :]}:{code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return called


def files(called: list[str]) -> set[str]:
    return {name.split(":")[0] for name in called}


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def counted(model: nn.Module, optimizer: Any) -> tuple[list[str], list[str]]:
    """What backward calls, and what the step calls, when both have run a few times."""
    for _ in range(5):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    return calls(model(torch.randn(2, 8)).sum().backward), calls(optimizer.step)


@pytest.mark.parametrize(("options", "most"), [({}, (13, 5)), ({"max_grad_norm": 1.0}, (17, 6))])
def test_a_step(options: dict[str, Any], most: tuple[int, int]) -> None:
    model = layers(2)
    _, step = counted(model, AdamW(model.parameters(), **options))
    assert len(step) <= most[0], step
    assert len(files(step)) <= most[1], step


def test_a_sharded_step_and_its_backward() -> None:
    model = layers(2)
    backward, step = counted(model, tilestep.shard(AdamW(model.parameters(), max_grad_norm=1.0), model))
    assert len(backward) <= 23, backward
    assert len(step) <= 25, step
    assert len(files(step)) <= 8, step


def test_a_backward_that_updates() -> None:
    model = layers(2)
    backward, step = counted(model, tilestep.overlap(AdamW(model.parameters()), model, during="backward"))
    assert len(backward) <= 22, backward
    assert len(files(backward)) <= 6, backward
    assert len(step) <= 13, step


def test_a_backward_that_updates_under_fsdp() -> None:
    model, mesh = layers(3), init_device_mesh("cpu", (1,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    backward, step = counted(model, tilestep.overlap(AdamW(model.parameters()), model, during="backward"))
    assert len(backward) <= 55, backward
    assert len(step) <= 15, step


def test_a_step_beside_the_next_forward_under_fsdp() -> None:
    """Twelve modules are five updates; what each of them takes is ten calls."""
    model, mesh = layers(12), init_device_mesh("cpu", (1,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    backward, step = counted(model, tilestep.overlap(optimizer, model, during="forward"))
    assert len(backward) <= 69, backward
    assert len(step) <= 60, step


def test_zero_grad() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    counted(model, optimizer)
    assert len(calls(optimizer.zero_grad)) <= 5
