"""Low-precision parameters: state in their own dtype as torch has it, or in float32 beside a master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twins import make_params, set_gradients, train, twins

import tilestep

LOW = [torch.bfloat16, torch.float16]
SHAPES = [(), (5,), (4, 6), (0,), (3, 2, 3, 3)]


def float_twins(params: list[Any]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().float()) for param in params]


def train_with_floats(optimizer: Any, params: list[Any], torchs: Any, floats: list[Any], steps: range) -> None:
    """The same low-precision gradients for both."""
    for step in steps:
        set_gradients(params, step=step)
        for param, wide in zip(params, floats):
            wide.grad = param.grad.float()
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize("dtype", LOW)
def test_state_is_of_the_parameter_s_dtype(dtype: torch.dtype) -> None:
    mine = make_params(SHAPES, dtype)
    theirs = twins(mine)
    train([(tilestep.AdamW(mine, lr=0.1), mine), (torch.optim.AdamW(theirs, lr=0.1), theirs)], range(3))
    optimizer = tilestep.AdamW(mine)
    train([(optimizer, mine)], range(1))
    for param in mine:
        assert {key: value.dtype for key, value in optimizer.state[param].items()} == {
            "step": torch.float32,
            "exp_avg": dtype,
            "exp_avg_sq": dtype,
        }
    for left, right in zip(mine[1:], theirs[1:]):
        # torch rounds after every operation, a kernel once: a bfloat16 has 8 bits.
        torch.testing.assert_close(left, right, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Lion"])
def test_a_master_trains_as_float32_does(rule: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 1e-3, **({"momentum": 0.9} if rule == "SGD" else {})}
    params = make_params(SHAPES, dtype)
    floats = float_twins(params)
    optimizer = tilestep.Optimizer(params, rule, master_weights=True, **options)
    reference = tilestep.Optimizer(floats, rule, **options)
    train_with_floats(optimizer, params, reference, floats, range(20))
    for param, wide in zip(params, floats):
        assert torch.equal(optimizer.state[param]["master_param"], wide)
        assert torch.equal(param, wide.to(dtype))
        for key, value in reference.state[wide].items():
            assert torch.equal(optimizer.state[param][key], value), key


def test_parameters_of_higher_precision_have_no_master() -> None:
    params = [*make_params([(3,)]), *make_params([(3,)], torch.bfloat16)]
    optimizer = tilestep.AdamW(params, master_weights=True)
    set_gradients(params)
    optimizer.step()
    assert ["master_param" in optimizer.state[param] for param in params] == [False, True]


def test_a_group_decides_for_itself() -> None:
    params = make_params([(3,), (4,)], torch.bfloat16)
    optimizer = tilestep.AdamW([{"params": params[:1], "master_weights": True}, {"params": params[1:]}])
    train([(optimizer, params)], range(2))
    assert ["master_param" in optimizer.state[param] for param in params] == [True, False]
    optimizer.param_groups[1]["master_weights"] = True
    train([(optimizer, params)], range(2, 3))
    assert optimizer.state[params[1]]["master_param"].dtype is torch.float32
    assert optimizer.state[params[1]]["exp_avg"].dtype is torch.float32
    assert float(optimizer.state[params[1]]["step"]) == 3


def test_a_checkpoint_of_torch_in_bfloat16_goes_on_with_a_master() -> None:
    theirs = make_params(SHAPES, torch.bfloat16)
    torchs = torch.optim.AdamW(theirs)
    train([(torchs, theirs)], range(3))
    params = twins(theirs)
    optimizer = tilestep.AdamW(params, master_weights=True)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["master_weights"]
    for param, twin in zip(params, theirs):
        state = optimizer.state[param]
        assert torch.equal(state["master_param"], twin.float())
        assert torch.equal(state["exp_avg"], torchs.state[twin]["exp_avg"].float())
    floats = float_twins(params)
    reference = tilestep.AdamW(floats)
    reference.load_state_dict(torchs.state_dict())
    train_with_floats(optimizer, params, reference, floats, range(3, 6))
    assert all(torch.equal(param, wide.bfloat16()) for param, wide in zip(params, floats))


def test_a_checkpoint_of_float32_goes_on_with_a_master() -> None:
    floats = make_params(SHAPES)
    torchs = torch.optim.AdamW(floats)
    train([(torchs, floats)], range(3))
    params = [torch.nn.Parameter(wide.detach().bfloat16()) for wide in floats]
    optimizer = tilestep.AdamW(params, master_weights=True)
    optimizer.load_state_dict(torchs.state_dict())
    for param, wide in zip(params, floats):
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], torchs.state[wide]["exp_avg_sq"])
        assert torch.equal(optimizer.state[param]["master_param"], param.float())
    train([(optimizer, params)], range(3, 5))


def test_torch_reads_a_checkpoint_with_masters() -> None:
    params = make_params(SHAPES, torch.bfloat16)
    optimizer = tilestep.AdamW(params, master_weights=True)
    train([(optimizer, params)], range(2))
    theirs = twins(params)
    torchs = torch.optim.AdamW(theirs)
    torchs.load_state_dict(optimizer.state_dict())
    train([(torchs, theirs)], range(2, 4))
    # And what torch writes back with it, which is rounded, is not taken for a master of full precision by us.
    other = tilestep.AdamW(twins(theirs))
    other.load_state_dict(torchs.state_dict())
    assert all("master_param" not in state for state in other.state.values())


@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_continues_bit_for_bit_in_either_order(model_first: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5).bfloat16()
    optimizer = tilestep.AdamW(model.parameters(), master_weights=True)
    train([(optimizer, list(model.parameters()))], range(3))
    other = torch.nn.Linear(6, 5).bfloat16()
    resumed = tilestep.AdamW(other.parameters(), master_weights=True)
    loads = [lambda: other.load_state_dict(model.state_dict()), lambda: resumed.load_state_dict(optimizer.state_dict())]
    for load in loads if model_first else reversed(loads):
        load()
    train([(optimizer, list(model.parameters())), (resumed, list(other.parameters()))], range(3, 6))
    for param, twin in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[param]["master_param"], resumed.state[twin]["master_param"])


def test_masters_follow_what_others_write() -> None:
    params = make_params([(4,), (3,)], torch.bfloat16)
    optimizer = tilestep.SGD(params, lr=2**-10, master_weights=True)
    train([(optimizer, params)], range(3))
    kept = optimizer.state[params[0]]["master_param"].clone()
    assert not torch.equal(kept, params[0].float()), "the master must know more than the parameter for this test"
    with torch.no_grad():
        params[0][1] = 7.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    master = optimizer.state[params[0]]["master_param"]
    assert master[1] == 7.0 and params[0][1] == 7.0
    assert torch.equal(master[[0, 2, 3]], kept[[0, 2, 3]])


def test_masters_follow_parameters_that_get_other_memory() -> None:
    params = make_params([(4,), (3,)], torch.bfloat16)
    optimizer = tilestep.SGD(params, lr=2**-10, master_weights=True)
    train([(optimizer, params)], range(3))
    kept = [optimizer.state[param]["master_param"].clone() for param in params]
    params[0].data = params[0].data * torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.bfloat16)
    params[1].data = params[1].data.clone()
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    doubled, same = (optimizer.state[param]["master_param"] for param in params)
    assert doubled[1] == 2 * kept[0][1].bfloat16() == params[0][1]
    # What has the old value in its new place keeps what only the master knows.
    assert torch.equal(doubled[[0, 2, 3]], kept[0][[0, 2, 3]]) and torch.equal(same, kept[1])


def test_a_model_loaded_after_the_optimizer_was_made_is_what_trains() -> None:
    torch.manual_seed(0)
    model, start = torch.nn.Linear(6, 5).bfloat16(), torch.nn.Linear(6, 5).bfloat16()
    optimizer = tilestep.SGD(model.parameters(), lr=0.0, master_weights=True)
    model.load_state_dict(start.state_dict())
    train([(optimizer, list(model.parameters()))], range(1))
    assert all(map(torch.equal, model.parameters(), start.parameters()))


def test_steps_of_their_own_do_not_touch_the_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params([(4,)], torch.bfloat16)
    optimizer = tilestep.SGD(params, master_weights=True)
    train([(optimizer, params)], range(1))
    monkeypatch.setattr("tilestep.native.table.Writes.take", lambda _: pytest.fail("nothing was written"))
    train([(optimizer, params)], range(1, 4))
