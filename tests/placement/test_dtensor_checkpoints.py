"""State of DTensors: what it looks like, distributed checkpoints, other numbers of ranks, and torch's optimizers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import run_on_ranks
from sharded_models import LAYOUTS, Model, assert_same, backward, batch, device, full, here, plain
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import tilestep
from tilestep.rules.compose import ema

FOLDER = Path("checkpoint")
"""Where checks that follow one another leave their checkpoints; in the folder that the processes run in."""


def _optimizer(net: Model, kind: Any = tilestep.AdamW, **arguments: Any) -> Any:
    slow = [net.odd.weight, net.odd.bias]
    rest = [param for param in net.parameters() if all(param is not other for other in slow)]
    groups = [{"params": rest}, {"params": slow, "lr": 3e-3}]
    return kind(groups, lr=1e-2, weight_decay=0.1, **arguments)


def _step(net: Model, optimizer: Any, step: int, layout: str | None) -> None:
    backward(net, batch(step, layout))
    optimizer.step()
    optimizer.zero_grad()


def _trained(layout: str | None, steps: int = 3) -> tuple[Model, Any]:
    net = LAYOUTS[layout][0]() if layout else plain()
    optimizer = _optimizer(net, max_grad_norm=0.05)
    for step in range(steps):
        _step(net, optimizer, step, layout)
    return net, optimizer


def state_lies_as_its_parameter() -> None:
    reference, expected = _trained(None, 1)
    for layout in LAYOUTS:
        net, optimizer = _trained(layout, 1)
        for param, other in zip(net.parameters(), reference.parameters()):
            state, wanted = optimizer.state[param], expected.state[other]
            assert type(state["step"]) is torch.Tensor and state["step"].dim() == 0
            for key in ("exp_avg", "exp_avg_sq"):
                assert type(state[key]) is (DTensor if isinstance(param, DTensor) else torch.Tensor)
                if isinstance(param, DTensor):
                    assert state[key].placements == param.placements and state[key].device_mesh == param.device_mesh
                    assert state[key].shape == param.shape and state[key].stride() == param.stride()
                torch.testing.assert_close(*here(state[key], wanted[key]), atol=1e-6, rtol=1e-4)


def state_can_be_replaced() -> None:
    """By DTensors, of other placements too, and by whole tensors; the step works on what is there."""
    net, optimizer = _trained("fsdp")
    reference, expected = _trained(None)
    for param, other in zip(net.parameters(), reference.parameters()):
        state, wanted = optimizer.state[param], expected.state[other]
        optimizer.state[param] = {**state, "exp_avg": state["exp_avg"].redistribute(placements=[_replicate()])}
        optimizer.state[param]["exp_avg_sq"] = full(state["exp_avg_sq"])
        optimizer.state[param]["step"] = DTensor.from_local(state["step"], param.device_mesh, [_replicate()])
        expected.state[other] = copy.deepcopy(wanted)
    _step(net, optimizer, 9, "fsdp")
    _step(reference, expected, 9, None)
    assert_same(net, reference, atol=1e-5, rtol=1e-4)
    assert optimizer.state[net.first.weight]["exp_avg"].placements == net.first.weight.placements


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def state_dict_goes_round() -> None:
    """Through state_dict and load_state_dict, into an optimizer that has not stepped and has no state yet."""
    for layout in LAYOUTS:
        net, optimizer = _trained(layout)
        saved = copy.deepcopy(optimizer.state_dict())
        other = LAYOUTS[layout][0]()
        with torch.no_grad():
            for target, source in zip(other.parameters(), net.parameters()):
                target.copy_(source)
        loaded = _optimizer(other, max_grad_norm=0.05)
        assert not loaded.state
        loaded.load_state_dict(saved)
        for model, own in ((net, optimizer), (other, loaded)):
            _step(model, own, 3, layout)
        for left, right in zip(net.parameters(), other.parameters()):
            assert torch.equal(*here(left, right)), layout


def saves_for_another_number_of_ranks() -> None:
    for layout in LAYOUTS:
        net, optimizer = _trained(layout)
        state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.save(state, checkpoint_id=FOLDER / layout)


def _load(folder: Path, net: Model, optimizer: Any) -> None:
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])


def loads_on_another_number_of_ranks() -> None:
    """Any layout's checkpoint into any other; training goes on as in one process."""
    reference, expected = _trained(None)
    _step(reference, expected, 3, None)
    for saved, layout in zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1]):
        for into in (layout, saved):
            net = LAYOUTS[into][0]()
            optimizer = _optimizer(net, max_grad_norm=0.05)
            _load(FOLDER / saved, net, optimizer)
            assert float(optimizer.state[net.first.weight]["step"]) == 3
            assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
            _step(net, optimizer, 3, into)
            assert_same(net, reference, atol=1e-5, rtol=1e-4)


@functools.cache
def _by_torch() -> Model:
    """A model in one process after 4 steps of torch's optimizer."""
    reference = plain()
    expected = _optimizer(reference, torch.optim.AdamW)
    for step in range(4):
        _step(reference, expected, step, None)
    return reference


def torch_and_tilestep_change_places() -> None:
    """AdamW's state on one FSDP2 model, torch's into tilestep's and back, by state_dict and by FQNs."""
    for by_name in (False, True):
        for first, second in ((torch.optim.AdamW, tilestep.AdamW), (tilestep.AdamW, torch.optim.AdamW)):
            net = LAYOUTS["fsdp"][0]()
            optimizer = _optimizer(net, first)
            for step in range(2):
                _step(net, optimizer, step, "fsdp")
            other = _optimizer(net, second)
            if by_name:
                set_optimizer_state_dict(net, other, get_optimizer_state_dict(net, optimizer))
            else:
                other.load_state_dict(optimizer.state_dict())
            for step in range(2, 4):
                _step(net, other, step, "fsdp")
            assert_same(net, _by_torch(), atol=1e-5, rtol=1e-4)


def flattened_checkpoints_change_places() -> None:
    """With keys as pipelines write them: torch's into tilestep's, which has more keys in its groups, and back."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for first, second in ((torch.optim.AdamW, tilestep.AdamW), (tilestep.AdamW, torch.optim.AdamW)):
        net = LAYOUTS["fsdp"][0]()
        optimizer = _optimizer(net, first)
        for step in range(2):
            _step(net, optimizer, step, "fsdp")
        folder = FOLDER / f"flat-{first.__module__}"
        dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer, options=options)}, checkpoint_id=folder)
        other = _optimizer(net, second)
        state = get_optimizer_state_dict(net, other, options=options)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=second is tilestep.AdamW)
        dcp.load({"optimizer": state}, checkpoint_id=folder, planner=planner)
        set_optimizer_state_dict(net, other, state, options=options)
        assert [group["lr"] for group in other.param_groups] == [1e-2, 3e-3]
        for step in range(2, 4):
            _step(net, other, step, "fsdp")
        assert_same(net, _by_torch(), atol=1e-5, rtol=1e-4)


def whole_state_dicts() -> None:
    """The full state dict, gathered and broadcast again; its tensors are plain."""
    net, optimizer = _trained("fsdp")
    whole = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is torch.Tensor for state in whole["state"].values() for value in state.values())
    other = LAYOUTS["fsdp"][0]()
    set_model_state_dict(other, get_model_state_dict(net))
    loaded = _optimizer(other, max_grad_norm=0.05)
    set_optimizer_state_dict(other, loaded, whole, options=StateDictOptions(full_state_dict=True))
    _step(net, optimizer, 3, "fsdp")
    _step(other, loaded, 3, "fsdp")
    for left, right in zip(net.parameters(), other.parameters()):
        assert torch.equal(*here(left, right))


def keeps_masters() -> None:
    """Masters of bfloat16 shards, and what other code writes to the parameters."""
    for kind in (True, "remainder"):
        _keeps_masters(kind)


def _keeps_masters(kind: Any) -> None:
    net, reference = LAYOUTS["fsdp"][0](), plain()
    for model in (net, reference):
        model.to(torch.bfloat16)
    optimizer, expected = (_optimizer(model, master_weights=kind) for model in (net, reference))
    for step in range(3):
        for model, own in ((net, optimizer), (reference, expected)):
            for index, param in enumerate(model.parameters()):
                torch.manual_seed(100 * step + index)
                grad = torch.randn(param.shape, device=device()).bfloat16()
                param.grad = (
                    torch.distributed.tensor.distribute_tensor(grad, param.device_mesh, param.placements)
                    if isinstance(param, DTensor)
                    else grad
                )
            own.step()
            if step == 1:
                with torch.no_grad():
                    model.first.weight.mul_(2)
    for param, other in zip(net.parameters(), reference.parameters()):
        assert torch.equal(*here(param, other))
        for name, value in expected.state[other].items():
            if name.endswith("_param"):
                buffer = optimizer.state[param][name]
                assert torch.equal(*here(buffer, value))
                assert buffer.dtype is value.dtype
    loaded = _optimizer(net, master_weights=kind)
    loaded.load_state_dict(copy.deepcopy(expected.state_dict()))
    whole = _optimizer(reference, master_weights=kind)
    whole.load_state_dict(optimizer.state_dict())
    for other in reference.parameters():
        for name, value in expected.state[other].items():
            assert torch.equal(whole.state[other][name], value), name
    for param in net.parameters():
        for name, value in optimizer.state[param].items():
            assert torch.equal(*here(loaded.state[param][name], value)), name


def _with_remainders() -> tuple[Model, Any]:
    """An FSDP2 model in bfloat16 after two steps with gradients that do not depend on the number of ranks."""
    net = LAYOUTS["fsdp"][0]().to(torch.bfloat16)
    optimizer = _optimizer(net, master_weights="remainder")
    for step in range(2):
        for index, param in enumerate(net.parameters()):
            torch.manual_seed(100 * step + index)
            grad = torch.randn(param.shape, device=device()).bfloat16()
            param.grad = torch.distributed.tensor.distribute_tensor(grad, param.device_mesh, param.placements)
        optimizer.step()
    return net, optimizer


def saves_remainders() -> None:
    net, optimizer = _with_remainders()
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=FOLDER / "remainders")


def loads_remainders_on_another_number_of_ranks() -> None:
    expected, wanted = _with_remainders()
    net = LAYOUTS["fsdp"][0]().to(torch.bfloat16)
    optimizer = _optimizer(net, master_weights="remainder")
    _load(FOLDER / "remainders", net, optimizer)
    for param, other in zip(net.parameters(), expected.parameters()):
        loaded, kept = (opt.state[owner]["remainder_param"] for opt, owner in ((optimizer, param), (wanted, other)))
        assert torch.equal(full(param), full(other)) and loaded.dtype is torch.int16
        assert torch.equal(loaded.to_local(), kept.to_local())
    assert any(bool(state["remainder_param"].to_local().any()) for state in optimizer.state.values())


def evaluates_averages() -> None:
    net, reference = LAYOUTS["fsdp"][0](), plain()
    rule = ema(tilestep.registry["SGD"], 0.75)
    optimizer, expected = (tilestep.Optimizer(model.parameters(), rule, lr=0.1) for model in (net, reference))
    for step in range(3):
        _step(net, optimizer, step, "fsdp")
        _step(reference, expected, step, None)
    before = [full(param).clone() for param in net.parameters()]
    with optimizer.averaged(), expected.averaged():
        assert_same(net, reference, atol=1e-5, rtol=1e-4)
        assert not torch.equal(full(net.first.weight), before[0])
        saved = copy.deepcopy(optimizer.state_dict())
    assert all(torch.equal(full(param), old) for param, old in zip(net.parameters(), before))
    optimizer.load_state_dict(saved)
    optimizer.train()
    assert all(torch.equal(full(param), old) for param, old in zip(net.parameters(), before))


ON_FOUR = {
    check.__name__: check
    for check in (
        state_lies_as_its_parameter,
        state_can_be_replaced,
        state_dict_goes_round,
        torch_and_tilestep_change_places,
        flattened_checkpoints_change_places,
        whole_state_dicts,
        keeps_masters,
        saves_remainders,
        evaluates_averages,
        saves_for_another_number_of_ranks,
    )
}
ON_TWO = {
    check.__name__: check for check in (loads_on_another_number_of_ranks, loads_remainders_on_another_number_of_ranks)
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("checkpoints"))
        yield {**run_on_ranks(ON_FOUR, 4), **run_on_ranks(ON_TWO, 2)}


@pytest.mark.parametrize("name", [*ON_FOUR, *ON_TWO])
def test_on_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
