"""What states are kept in: by dtype, by name, by state, by parameter; and what stays in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tilestep
from tilestep.errors import RuleError
from tilestep.optimizer.states import SMALLEST

NAMES = {"wte.weight": (64, 80), "layer.weight": (80, 64), "layer.bias": (80,)}
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


def make(rule: str = "AdamW", dtype: torch.dtype = FLOAT32, **options: Any) -> tuple[Any, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in NAMES.items()
    }
    return tilestep.Optimizer(list(params.items()), rule, lr=1e-3, **options), params


def train(optimizer: Any, params: dict[str, Any], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def kept(optimizer: Any, params: dict[str, Any], name: str) -> list[torch.dtype]:
    optimizer.fitting_plan(ahead=True)
    return [optimizer.state[params[name]][state].dtype for state in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(
    ("dtype", "choice"),
    [(FLOAT32, BFLOAT16), (FLOAT32, "bfloat16"), (FLOAT32, "float16"), (BFLOAT16, BFLOAT16), (torch.float64, FLOAT16)],
)
def test_small_tensors_and_second_moments_of_embeddings_stay_exact(choice: Any, dtype: torch.dtype) -> None:
    optimizer, params = make(dtype=dtype, state_dtype=choice)
    exact = torch.float64 if dtype is torch.float64 else FLOAT32
    chosen = getattr(torch, choice) if isinstance(choice, str) else choice
    assert params["layer.bias"].numel() < SMALLEST <= params["layer.weight"].numel()
    assert kept(optimizer, params, "layer.weight") == [chosen, chosen]
    assert kept(optimizer, params, "wte.weight") == [chosen, exact]
    assert kept(optimizer, params, "layer.bias") == [exact, exact]
    train(optimizer, params, range(2))
    assert kept(optimizer, params, "layer.weight") == [chosen, chosen]


def test_a_mapping_names_states_and_a_function_parameters() -> None:
    optimizer, params = make(state_dtype={"exp_avg": BFLOAT16, "exp_avg_sq": "float16"})
    assert kept(optimizer, params, "wte.weight") == kept(optimizer, params, "layer.weight") == [BFLOAT16, FLOAT16]
    optimizer, params = make(state_dtype={"exp_avg": BFLOAT16})
    assert kept(optimizer, params, "layer.weight") == [BFLOAT16, FLOAT32]
    optimizer, params = make(state_dtype=lambda name: None if "wte" in name else {"exp_avg": "bfloat16"})
    assert kept(optimizer, params, "wte.weight") == [FLOAT32, FLOAT32]
    assert kept(optimizer, params, "layer.bias") == [BFLOAT16, FLOAT32]
    with pytest.warns(UserWarning, match=r"it gets '': pass model.named_parameters\(\)"):
        tilestep.AdamW(params.values(), state_dtype=lambda name: None if "wte" in name else BFLOAT16)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "LAMB", "SGD", "AdEMAMix", "Adan", "RMSprop", "Prodigy", "Muon"])
def test_every_rule_trains_as_in_float32(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    runs = []
    for choice in (BFLOAT16, None):
        optimizer, params = make(state_dtype=choice, rule=name, **options) if name != "Muon" else (None, {})
        if name == "Muon":
            generator = torch.Generator().manual_seed(0)
            weight = torch.nn.Parameter(torch.randn(80, 64, generator=generator))
            optimizer, params = tilestep.Muon([("layer.weight", weight)], lr=1e-3, state_dtype=choice), {"w": weight}
        train(optimizer, params, range(5))
        runs.append([param.detach() for param in params.values()])
        if choice is BFLOAT16:
            states = [v.dtype for p in params.values() for v in optimizer.state[p].values()]
            assert BFLOAT16 in states
    for mine, wanted in zip(*runs):
        assert (mine - wanted).abs().max() < 0.02 and not torch.equal(mine, torch.zeros_like(mine))


@pytest.mark.parametrize("master", [False, True, "remainder", "kahan", "int8"])
def test_beside_every_kind_of_master(master: Any) -> None:
    optimizer, params = make(dtype=BFLOAT16, master_weights=master, state_dtype=BFLOAT16)
    train(optimizer, params, range(3))
    assert kept(optimizer, params, "layer.weight") == [BFLOAT16, BFLOAT16]
    assert kept(optimizer, params, "layer.bias") == [FLOAT32, FLOAT32]


def test_checkpoints_load_by_value_whatever_they_were_kept_in() -> None:
    optimizer, params = make(state_dtype=BFLOAT16)
    train(optimizer, params, range(3))
    wide, others = make()
    wide.load_state_dict(optimizer.state_dict())
    assert "state_dtype" not in wide.param_groups[0]
    for name in NAMES:
        assert kept(wide, others, name) == [FLOAT32, FLOAT32]
        assert torch.equal(
            wide.state[others[name]]["exp_avg"], optimizer.state[params[name]]["exp_avg"].to(torch.float32)
        )
    train(wide, others, range(3, 4))
    before = copy.deepcopy(wide.state_dict())
    optimizer.load_state_dict(before)
    assert optimizer.param_groups[0]["state_dtype"] is BFLOAT16
    mine = optimizer.state[params["layer.weight"]]["exp_avg"]
    assert mine.dtype is BFLOAT16 and torch.equal(mine, before["state"][1]["exp_avg"].to(BFLOAT16))
    torchs = torch.optim.AdamW([param.detach().clone().requires_grad_() for param in params.values()])
    torchs.load_state_dict(optimizer.state_dict())


def test_a_group_decides_for_itself_and_may_change() -> None:
    optimizer, params = make()
    optimizer.add_param_group(
        {"params": [("other", torch.nn.Parameter(torch.ones(64, 64)))], "state_dtype": {"exp_avg": FLOAT16}}
    )
    (other,) = optimizer.param_groups[1]["params"]
    optimizer.fitting_plan(ahead=True)
    assert optimizer.state[other]["exp_avg"].dtype is FLOAT16
    train(optimizer, params, range(2))
    values = optimizer.state[params["layer.weight"]]["exp_avg"].clone()
    optimizer.param_groups[0]["state_dtype"] = BFLOAT16
    for param in params.values():
        param.grad = None
    other.grad = torch.ones_like(other)
    optimizer.step()
    assert torch.equal(optimizer.state[params["layer.weight"]]["exp_avg"], values.to(BFLOAT16))


def test_averages_and_what_a_rule_declares_stay_as_they_are() -> None:
    rule = tilestep.ema(tilestep.registry["SGD"], 0.9)
    weight = torch.nn.Parameter(torch.randn(80, 64))
    optimizer = tilestep.Optimizer([weight], rule, lr=0.1, momentum=0.9, state_dtype=BFLOAT16)
    optimizer.fitting_plan(ahead=True)
    dtypes = {name: state.dtype for name, state in optimizer.state[weight].items() if state.dim()}
    assert dtypes["momentum_buffer"] is BFLOAT16
    assert {dtype for name, dtype in dtypes.items() if name != "momentum_buffer"} == {FLOAT32}


@pytest.mark.parametrize("choice", ["int7", torch.float8_e4m3fn, torch.int8, 8, {"exp_avg": "half"}])
def test_other_formats_are_refused_with_those_there_are(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid state_dtype: .*it must be one of 'float32', 'bfloat16'"):
        make(state_dtype=choice)
    with pytest.raises(ValueError, match="it must be one of"):
        make(state_dtype=lambda name: choice)


def test_other_states_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="AdamW has no state 'step' shaped like its parameters; it has 'exp_avg'"):
        make(state_dtype={"step": BFLOAT16})

    @tilestep.rule
    def taken(param: Any, grad: Any, correction_param: Any) -> Any:
        return param, correction_param + grad

    with pytest.raises(RuleError, match="'correction_param' needs another name"):
        make(rule=taken)  # type: ignore[arg-type]


def test_a_state_called_as_the_scales_of_another_is_refused() -> None:
    @tilestep.rule
    def scaled(param: Any, grad: Any, m: Any, m_scales: Any, *, lr: float = 0.1) -> tuple[Any, Any, Any]:
        return param - lr * grad / (1 + abs(m - m_scales)), m + grad, m_scales + grad * grad

    param = torch.nn.Parameter(torch.ones(80, 64))
    with pytest.raises(tilestep.StateError, match="a state 'm_scales', and codes or scales of its state 'm' are"):
        tilestep.Optimizer([param], scaled, state_dtype="int8")
    tilestep.Optimizer([param], scaled, state_dtype={"m_scales": "int8"})
