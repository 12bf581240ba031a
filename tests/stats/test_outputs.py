"""Outputs that are written here and nowhere else: all backends compute them, and updates keep their bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilestep
from tilestep.backends import registry
from tilestep.backends.cpp import source
from tilestep.backends.eager import EagerPasses
from tilestep.runtime import graph_for, kernel_spec
from tilestep.stats import Output
from tilestep.storage import Plain, state_format, stored_in

AMAX = Output("weight_amax", lambda stored: stored.new("param").function("abs"), "max")
OUTPUTS = (
    AMAX,
    Output("highest", lambda stored: stored.new("param"), "max"),
    Output("total", lambda stored: stored.new("param") - stored.old("param"), "sum"),
    Output("descent", lambda stored: stored.old("grad") * stored.update(), "sum"),
    Output("positive", lambda stored: stored.new("param") > 0.0, "sum"),
)


def parameters(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(2)
    values = [torch.randn(70, 33) - 9, torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), torch.randn(0, 3)]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def compare(rule: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """The further columns beside float64, of plain and skipped steps; parameters as without them."""
    params, plain = parameters(dtype, device), parameters(dtype, device)
    stats = tilestep.Stats(outputs=OUTPUTS)
    optimizer: Any = tilestep.Optimizer(params, rule, lr=0.05, skip_nonfinite=True, stats=stats, **options)
    twin: Any = tilestep.Optimizer(plain, rule, lr=0.05, skip_nonfinite=True, **options)
    for step in range(3):
        before = [param.detach().double() for param in params]
        for param, other in zip(params, plain):
            param.grad = torch.randn(param.shape).to(device, param.dtype)
            if step == 2 and param.dim() == 4:
                param.grad[0, 0, 0, 0] = math.inf
            other.grad = param.grad.clone()
        optimizer.step()
        twin.step()
        assert all(map(torch.equal, params, plain))
        assert optimizer.stats.columns[-5:] == tuple(output.name for output in OUTPUTS)
        for place, (param, old) in enumerate(zip(params, before)):
            row, now = optimizer.stats.read()[f"0.{place}"], param.detach().double()
            update, bound = now - old, 1e-5 if dtype is torch.float32 else 1e-2
            assert row["weight_amax"] == (now.abs().max() if now.numel() else 0)
            assert row["highest"] == (now.max() if now.numel() else 0)
            assert row["total"] == pytest.approx(update.sum().item(), rel=1e-4, abs=1e-4)
            assert row["positive"] == (now > 0).sum()
            if step < 2:
                assert row["descent"] == pytest.approx((param.grad.double() * update).sum().item(), rel=bound, abs=1e-3)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor"])
def test_outputs_of_kernels(rule: str) -> None:
    compare(rule, {})


def test_outputs_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    compare("AdamW", {})


def test_outputs_of_narrow_weights_and_of_states_in_blocks() -> None:
    compare("SGD", {"momentum": 0.9}, torch.bfloat16)
    compare("AdamW", {"state_dtype": lambda _: "int8"})


def test_a_kernel_without_outputs_is_the_one_of_before() -> None:
    adamw = tilestep.registry["AdamW"]
    graph = graph_for(adamw, adamw.hyperparameters, 2)
    storages = dict.fromkeys(("param", "grad", *graph.states), Plain(torch.float32))
    spec = kernel_spec(graph, storages, torch.float32, "cpu")
    text, more = source.source(spec), source.source(spec.with_outputs((AMAX,)))
    assert "weight_amax" in more and "report_" not in text.split("void tile_pass_0")[1]
    assert spec.with_outputs(()) is spec and spec.with_outputs((AMAX,)) is spec.with_outputs((AMAX,))


def test_columns_have_names_of_their_own() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="with a unique name"):
        tilestep.Stats(outputs=(AMAX, AMAX))
    with pytest.raises(ValueError, match="a sum or a max"):
        tilestep.Stats(outputs=(Output("bits", lambda stored: stored.changed(), "or"),))
    with pytest.raises(ValueError, match="Invalid reduce: 'mean'"):
        Output("mean", lambda stored: stored.new("param"), "mean")  # type: ignore[arg-type]
    for name in ("grad_norm", "exp_avg_norm", "lost"):
        taken = Output(name, lambda stored: stored.new("param"), "sum")
        with pytest.raises(tilestep.RuleError, match=f"stats have {name} already"):
            tilestep.AdamW([param], stats=tilestep.Stats(outputs=(taken,)))


def test_an_output_of_what_a_rule_does_not_have_is_refused_before_anything_changes() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    momentum = Output("momentum", lambda stored: stored.new("momentum_buffer"), "sum")
    optimizer = tilestep.SGD([param], lr=0.1, stats=tilestep.Stats(outputs=(momentum,)))
    param.grad = torch.ones(3)
    with pytest.raises(tilestep.RuleError, match="reads 'momentum_buffer'"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))


def quantized(param: Any, grad: Any, weight: Any, *, lr: float = 0.1) -> tuple[Any, Any]:
    """SGD that also keeps its new weights in blocks: a state that is only written is an output that is a buffer."""
    new = param - lr * grad
    return new, new


@pytest.mark.parametrize("kept", ["int8", "float8_e4m3", "int4"])
def test_weights_in_blocks_are_a_state_that_is_only_written(kept: str) -> None:
    param = torch.nn.Parameter(torch.randn(9, 300, generator=torch.Generator().manual_seed(1)))
    rule = tilestep.rule(quantized)
    optimizer: Any = tilestep.Optimizer([param], rule, lr=0.1, state_dtype=lambda _: kept)
    param.grad = torch.randn(9, 300, generator=torch.Generator().manual_seed(2))
    optimizer.step()
    storage, state = state_format(kept, signed=True), optimizer.state[param]
    wanted = {array.name: torch.empty_like(state[array.name]) for array in storage.arrays("weight")}
    stored_in(storage, wanted, "weight", param.detach(), shape=param.shape)
    for name, entries in wanted.items():
        assert torch.equal(state[name].view(torch.uint8), entries.view(torch.uint8)), name
