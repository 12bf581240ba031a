"""One build per rule and signature, whatever else changes: `compile_count` holds the package to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilestep
from tilestep.backends.cpp import compile, run
from tilestep.kernels import cache
from tilestep.runtime import kernel_cache


@pytest.fixture(autouse=True)
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and a process that has built nothing yet."""
    if compile.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(run, "_libraries", {})
    monkeypatch.setattr(kernel_cache, "_graphs", {})
    monkeypatch.setattr(kernel_cache, "_specs", {})
    cache.forget_directory()
    yield
    cache.forget_directory()


def stepped(optimizer: tilestep.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                param.grad = torch.ones_like(param)
    optimizer.step()


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def test_one_build_while_everything_moves() -> None:
    before = tilestep.compile_count()
    params = parameters((3,), (4, 5), (2, 3, 4))
    optimizer = tilestep.AdamW(params, lr=0.1)
    stepped(optimizer)
    assert tilestep.compile_count() == before + 1
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
        optimizer.param_groups[0]["betas"] = (0.5 + step / 10, 0.9)
        stepped(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    stepped(optimizer)
    optimizer.add_param_group({"params": parameters((7,), (0,), (2, 2, 2, 2)), "lr": 0.5, "weight_decay": 0.0})
    stepped(optimizer)
    params[1].requires_grad_(False)
    params[1].grad = None
    stepped(optimizer)
    params[1].requires_grad_(True)
    stepped(optimizer)
    frozen = parameters((6,))
    frozen[0].requires_grad_(False)
    optimizer.add_param_group({"params": frozen})
    stepped(optimizer)
    frozen[0].requires_grad_(True)
    stepped(optimizer)
    params[0].data = torch.ones(11)
    del optimizer.state[params[0]]
    stepped(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    stepped(optimizer)
    others = [tilestep.AdamW(parameters(*[(count,)] * count), lr=1 / count) for count in (1, 50, 300)]
    for other in others:
        stepped(other)
    assert tilestep.compile_count() == before + 1


def test_gradients_with_gaps_are_one_build_more() -> None:
    before = tilestep.compile_count()
    (param,) = parameters((4, 5))
    optimizer = tilestep.AdamW([param], max_grad_norm=1.0, lr=0.1)
    stepped(optimizer)
    plain = tilestep.compile_count()
    for gradient in (torch.ones(5, 4).t(), torch.ones(4, 5), torch.ones(1, 5).expand(4, 5), torch.ones(4, 10)[:, ::2]):
        param.grad = gradient
        optimizer.step()
        assert tilestep.compile_count() == plain + 1
    (twin,) = parameters((4, 5))
    other = tilestep.AdamW([twin], max_grad_norm=1.0, lr=0.1)
    for _ in range(5):
        stepped(other)
    assert torch.equal(param, twin) and tilestep.compile_count() == plain + 1 > before


def test_parameters_with_gaps_are_one_build() -> None:
    before = tilestep.compile_count()
    for rule in (tilestep.AdamW, tilestep.Adafactor):
        base = torch.ones(4, 10)
        stepped(rule([torch.nn.Parameter(base[:, ::2])]))
        assert bool((base[:, ::2] != 1).all()) and bool((base[:, 1::2] == 1).all())
    assert tilestep.compile_count() == before + 2


def test_another_signature_is_another_build() -> None:
    before = tilestep.compile_count()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        stepped(tilestep.AdamW(parameters((3,), (5,), dtype=dtype)))
    assert tilestep.compile_count() == before + 3
    stepped(tilestep.AdamW(parameters((3,), dtype=torch.bfloat16), master_weights=True))
    assert tilestep.compile_count() == before + 4
    stepped(tilestep.AdamW([*parameters((4,)), *parameters((4,), dtype=torch.bfloat16)]))
    assert tilestep.compile_count() == before + 4


def test_another_rule_or_flag_is_another_build() -> None:
    before = tilestep.compile_count()
    stepped(tilestep.AdamW(parameters((3,))))
    stepped(tilestep.AdamW(parameters((3,)), amsgrad=True))
    stepped(tilestep.Lion(parameters((3,))))
    assert tilestep.compile_count() == before + 3
    stepped(tilestep.AdamW(parameters((8,)), amsgrad=True))
    assert tilestep.compile_count() == before + 3


def test_a_full_cache_is_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(tilestep.Lion(parameters((3,))))
    before = tilestep.compile_count()
    monkeypatch.setattr(run, "_libraries", {})
    monkeypatch.setattr(kernel_cache, "_specs", {})
    stepped(tilestep.Lion(parameters((3,))))
    assert tilestep.compile_count() == before


def test_a_norm_is_built_once_for_all_lists() -> None:
    stepped(tilestep.SGD(parameters((3,)), max_grad_norm=1.0))
    before = tilestep.compile_count()
    stepped(tilestep.SGD(parameters((9,), (2, 2)), max_grad_norm=0.5))
    assert tilestep.compile_count() == before
