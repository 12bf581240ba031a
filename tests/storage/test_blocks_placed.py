"""States in blocks wherever they are: on the host, sharded, in DTensors, updated in backward; the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_rows import FORMATS
from blocks_on_ranks import CHECKS
from rank_processes import each_passes
from torch import nn

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.rules.compose import centralize

SHAPES = [(64, 300), (150, 256), (48, 8, 4, 4), (5000,), (7,)]


def run(
    format: Any, *, home: Any = None, steps: int = 4, rule: Any = "AdamW", **options: Any
) -> tuple[Any, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    params[2] = nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
    named = [(f"p{place}", p) for place, p in enumerate(params)]
    made = tilestep.Optimizer(named, rule, state_dtype=format, **options)
    optimizer = made if home is None else move_state(made, home, "gpu", "for a test")
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    return optimizer, params


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_on_the_host(format: str) -> None:
    """test_conformance.py has that they are the same."""
    home = StreamedState(torch.device("cpu"), 20_000, 2)
    optimizer, params = run(format, home=home)
    states = [optimizer.state[param][name] for param in params[:4] for name in ("exp_avg_codes", "exp_avg_sq_codes")]
    assert all(map(home.memory.holds, states))
    assert format != "int4" or sum(state.nbytes for state in states) < 1.2 * sum(p.numel() for p in params[:4])


@pytest.mark.parametrize("format", FORMATS)
def test_rules_over_rows_on_the_host(format: str) -> None:
    rule = centralize(tilestep.registry["AdamW"])
    _, wanted = run(format, rule=rule)
    for home in (StreamedState(torch.device("cpu"), 20_000, 2), HostState(torch.device("cpu"), 1)):
        optimizer, params = run(format, home=home, rule=rule)
        assert all(map(torch.equal, params, wanted))
        assert any(key.startswith("exp_avg_scales") for key in optimizer.state[params[0]])


def test_a_skipped_step_leaves_every_bit() -> None:
    optimizer, params = run("int8", skip_nonfinite=True)
    before = [{name: value.clone() for name, value in optimizer.state[param].items()} for param in params]
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    for param, state in zip(params, before):
        assert all(torch.equal(value, optimizer.state[param][name]) for name, value in state.items())


@pytest.mark.parametrize("scaler", [tilestep.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("format", FORMATS)
def test_an_overflow_that_a_scaler_finds_leaves_every_bit(format: str, scaler: Any) -> None:
    optimizer, params = run(format)
    scales = scaler("cpu", init_scale=1024.0)

    def step(spoil: float) -> None:
        for place, param in enumerate(params):
            param.grad = torch.full_like(param, 1024.0 * (spoil if place == 1 else 1.0))
        scales.step(optimizer)
        scales.update()

    scales.scale(torch.ones(()))
    before = [(param.detach().clone(), *map(torch.clone, optimizer.state[param].values())) for param in params]
    for spoil in (torch.inf, torch.nan):
        step(spoil)
    for param, kept in zip(params, before):
        for value, wanted in zip((param, *optimizer.state[param].values()), kept, strict=True):
            assert value.dtype is wanted.dtype
            assert torch.equal(as_bytes(value.detach()), as_bytes(wanted))
    assert scales.get_scale() == 256.0
    step(1.0)
    assert not any(torch.equal(param, kept[0]) for param, kept in zip(params, before))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Rprop", "SOAP", "StableAdamW"])
def test_what_is_never_negative_is_kept_by_its_root(rule: str) -> None:
    """Small ones beside large ones would be zero, and are divided by."""
    param = nn.Parameter(torch.ones(64, 96))
    optimizer = tilestep.Optimizer([("weight", param)], tilestep.registry[rule], state_dtype="int8")
    param.grad = torch.ones(64, 96)
    optimizer.step()
    state = optimizer.state[param]
    assert state["step_size_codes" if rule == "Rprop" else "exp_avg_sq_codes"].dtype is torch.uint8


test_on_ranks = each_passes(CHECKS, 2)
