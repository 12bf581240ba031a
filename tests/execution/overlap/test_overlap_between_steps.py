"""What is done between the steps of overlapped optimizers: reading, saving, changing, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import overlapped_models
import pytest
import torch
from overlapped_models import TINY, Twins, adamw, clipped, compare_models, loss_of, small
from torch import nn

import tilestep
from tilestep.runtime import DeviceEngine

DURING = ["backward", "forward"]

both = pytest.mark.parametrize("during", DURING)


def test_an_update_that_ctrl_c_keeps_from_beginning_runs_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(adamw, "forward")
    for step in range(3):
        twins.step(step)
    follow = DeviceEngine.follow_memory

    def interrupted(engine: DeviceEngine) -> None:
        monkeypatch.setattr(DeviceEngine, "follow_memory", follow)
        raise KeyboardInterrupt

    monkeypatch.setattr(DeviceEngine, "follow_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(twins.overlapped, 3)
    compare_models(twins.serial, twins.overlapped)


@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
@both
def test_an_optimizer_that_is_dropped_is_gone_at_once(during: str, make: Any) -> None:
    """And the updates that it has not made are made: the model shows them."""
    twins = Twins(make, during)
    for step in range(3):
        twins.step(step)
    schedule: Any = twins.optimizer.execution
    gone = [weakref.ref(reference) for reference in (twins.optimizer, schedule, schedule.updates)]
    del schedule
    gc.collect()
    gc.disable()
    try:
        del twins.optimizer
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()
    compare_models(twins.serial, twins.overlapped)
    loss_of(twins.overlapped, 0).backward()


@both
def test_loading_drops_no_update_and_waits_for_none_later(during: str) -> None:
    model = small()
    optimizer = tilestep.overlap(clipped(model.parameters()), model, during, bucket_cap_mb=TINY)
    start = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    optimizer.step()
    model.load_state_dict(start)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


READERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "values": lambda module: list(module._parameters.values()),
    "items": lambda module: [param for _, param in module._parameters.items()],
    "get": lambda module: [module._parameters.get("weight"), module._parameters.get("bias")],
    "subscripts": lambda module: [module._parameters["weight"], module._parameters["bias"]],
    "copy": lambda module: list(module._parameters.copy().values()),
    "a dict of it": lambda module: list(dict(module._parameters).values()),
    "attributes": lambda module: [module.weight, module.bias],
    "state_dict": lambda module: list(module.state_dict().values()),
}


@pytest.mark.parametrize("reader", READERS)
def test_parameters_that_are_read_after_the_step_are_updated(reader: str) -> None:
    """As frameworks read them, in a module's own dictionary too."""
    twins = Twins(clipped, "forward")
    for step in range(3):
        twins.step(step)
        values = [
            [param.detach().clone() for param in READERS[reader](model.first)]
            for model in (twins.serial, twins.overlapped)
        ]
        assert len(values[0]) == 2 and all(map(torch.equal, *values))


def test_another_model_with_the_same_weights_waits() -> None:
    model, other = small(), nn.Linear(6, 9).to(overlapped_models.DEVICE)
    optimizer = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=TINY)
    other.weight = model.first.weight
    serial = small()
    reference = clipped(serial.parameters())
    for net, own in ((model, optimizer), (serial, reference)):
        loss_of(net, 0).backward()
        own.step()
    with torch.no_grad():
        given = torch.ones(1, 6).to(overlapped_models.DEVICE)
        assert torch.equal(other(given), nn.functional.linear(given, serial.first.weight, other.bias))


def test_another_module_that_is_called_with_the_weights_waits() -> None:
    model, serial, other = small(), small(), nn.Linear(6, 9).to(overlapped_models.DEVICE)
    optimizer = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=TINY)
    reference = clipped(serial.parameters())
    held = dict(model.first.named_parameters())
    for net, own in ((model, optimizer), (serial, reference)):
        loss_of(net, 0).backward()
        own.step()
    with torch.no_grad():
        given = torch.ones(1, 6).to(overlapped_models.DEVICE)
        assert torch.equal(torch.func.functional_call(other, held, (given,)), serial.first(given))


def test_two_optimizers_of_one_model() -> None:
    model, serial = small(), small()
    pairs = []
    for net in (model, serial):
        halves = list(net.parameters())[:6], list(net.parameters())[6:]
        pairs.append([clipped(half) for half in halves])
    for optimizer, during in zip(pairs[0], ("forward", "backward")):
        tilestep.overlap(optimizer, model, during, bucket_cap_mb=TINY)  # type: ignore[arg-type]
    for step in range(8):
        losses = []
        for net, optimizers in zip((model, serial), pairs):
            loss = loss_of(net, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    compare_models(serial, model)


def test_a_rate_that_changes_after_backward_is_refused() -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="hyperparameters have changed since backward"):
        optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()


def test_a_checkpoint_that_is_loaded_after_backward_is_refused() -> None:
    """Groups that were updated had their parameters from the states before, and then states that did not have it."""
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) before load_state_dict\(\)"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.load_state_dict(saved)
    steps = [state["step"] for state in saved["state"].values()]
    assert [state["step"] for state in optimizer.state_dict()["state"].values()] == steps


@both
def test_a_parameter_that_is_removed_between_steps(during: str) -> None:
    """Its gradient is the first that comes: `KeyError`."""
    twins = Twins(adamw, during)
    for step in range(4):
        if step == 2:
            for model, optimizer in twins.pairs:
                params, removed = optimizer.param_groups[0]["params"], model.second.bias
                params[:] = [param for param in params if param is not removed]
        twins.step(step)
    twins.optimizer.synchronize()
    compare_models(twins.serial, twins.overlapped)


@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
@both
def test_zero_gradients_are_those_of_what_the_last_step_has_updated(during: str, make: Any) -> None:
    """As torch's: they decay weights and go on with a momentum in steps that use a parameter no more."""
    serial, overlapped = (nn.ModuleList(nn.Linear(3, 3) for _ in range(3)) for _ in range(2))
    overlapped.load_state_dict(serial.state_dict())
    optimizers = [make(model.parameters()) for model in (serial, overlapped)]
    tilestep.overlap(optimizers[1], overlapped, during, bucket_cap_mb=TINY)
    for used, to_none in (([0], False), ([0, 1], False), ([0], False), ([0], True), ([0], False), ([2], False)):
        for model, optimizer in zip((serial, overlapped), optimizers):
            sum(model[place](torch.ones(3)).square().sum() for place in used).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        compare_models(serial, overlapped)


def test_with_a_clip_backward_updates_in_the_step() -> None:
    """At once, and not when parameters are read; gradients that were changed after backward are those of the step."""
    twins = Twins(clipped, "backward")
    for step in range(4):
        for model, optimizer in twins.pairs:
            loss_of(model, step).backward()
            with torch.no_grad():
                model.first.weight.grad.mul_(3.0)
                model.second.weight.grad.data.mul_(2.0)  # no version tells of it
            assert not optimizer.execution.applied_groups
            optimizer.step()
        stored = twins.overlapped.first._parameters
        assert torch.equal(dict.__getitem__(stored, "weight"), twins.serial.first.weight)
        assert all(param.grad is None for param in twins.overlapped.parameters())
        assert twins.optimizer.grad_norm == twins.reference.grad_norm > 0
        twins.reference.zero_grad()
    twins.compare()


def test_without_during_updates_run_in_the_step() -> None:
    model, twin = small(), small()
    twin.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=r'pass during="backward" to free gradients.* or during="forward"'):
        optimizer = tilestep.overlap(clipped(model.parameters()), model, bucket_cap_mb=TINY)
    reference = clipped(twin.parameters())
    for step in range(3):
        for net, own in ((model, optimizer), (twin, reference)):
            loss_of(net, 2 * step).backward()
            with optimizer.no_sync():
                loss_of(net, 2 * step + 1).backward()
            own.step()
            own.zero_grad()
        optimizer.synchronize()
        compare_models(model, twin)
    assert isinstance(optimizer, tilestep.OverlappedOptimizer) and not optimizer.applied_groups


def test_gradients_that_backward_has_used_cannot_be_dropped() -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@both
def test_states_begin_with_the_first_step_and_not_with_a_backward_before_it(during: str) -> None:
    """As a trial before a checkpoint is loaded into the model."""
    rule = tilestep.ema(tilestep.registry["AdamW"], 0.9)
    twins = Twins(lambda params: tilestep.Optimizer(params, rule, lr=0.01, max_grad_norm=0.5), during)
    twins.backward(lambda model: loss_of(model, 0))
    for model, optimizer in twins.pairs:
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    for step in range(2):
        twins.step(step)
    twins.compare()


@pytest.mark.parametrize("by_model", [False, True])
@both
def test_gradients_of_some_parameters_are_dropped(during: str, by_model: bool) -> None:
    """Of a rule that reduces over all tensors: its update waits for all gradients of one backward."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.full((5,), 0.5 + place) for place in range(3))

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                data = torch.tanh(data * weight)
            return data.square().sum()

    twins = Twins(lambda params: tilestep.Prodigy(params), during, lambda: Chain().to(overlapped_models.DEVICE))
    for scale in (1.0, 2.0, 3.0):
        # The gradient that comes last in the backward after it.
        twins.backward(lambda model: model.weights[0].square().sum())
        for model, optimizer in twins.pairs:
            (model if by_model else optimizer).zero_grad()
        data = torch.linspace(0.1, scale, 5, device=overlapped_models.DEVICE)
        twins.backward(lambda model, data=data: model(data))
        twins.update()
    twins.compare()


@both
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_blocks_wait_for_their_own_parameters(during: str, wrapped: bool) -> None:
    def build() -> nn.Module:
        model = small()
        for name in ("first", "second", "attention"):
            part = getattr(model, name)
            setattr(model, name, torch.compile(part, backend="eager")) if wrapped else part.compile(backend="eager")
        return model

    torch._dynamo.reset()
    twins = Twins(clipped, during, build)
    for step in range(5):
        twins.step(step)
    twins.compare()


def test_other_models_can_be_compiled_while_updates_are_to_come() -> None:
    torch._dynamo.reset()
    model = small()
    optimizer = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    optimizer.step()
    other = Doubled().to(overlapped_models.DEVICE)
    other.compile(backend="eager", fullgraph=True)
    data = torch.ones(2, 6).to(overlapped_models.DEVICE)
    assert torch.equal(other(data), 2 * data)


class Doubled(nn.Module):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return 2 * data


def test_what_is_refused() -> None:
    model = small()
    optimizer = adamw(model.parameters())
    with pytest.raises(ValueError, match='"backward" or "forward"'):
        tilestep.overlap(optimizer, model, "sideways")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not AdamW"):
        tilestep.overlap(torch.optim.AdamW(model.parameters()), model)  # type: ignore[arg-type]
    for during in (None, "forward"):
        with pytest.raises(ValueError, match="comm_hook requires during"):
            tilestep.overlap(optimizer, model, during, comm_hook=(None, print))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        tilestep.overlap(optimizer, model, bucket_cap_mb=0)
    overlapped = tilestep.overlap(optimizer, model, "forward")
    assert overlapped is optimizer
    assert isinstance(optimizer, tilestep.AdamW)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="overlapped already"):
        tilestep.overlap(optimizer, model, "forward")
    with pytest.raises(tilestep.CaptureError):
        optimizer.prepare_capture()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    assert type(copy.deepcopy(model)._parameters) is dict


def test_parameters_outside_of_the_model() -> None:
    twins = Twins(clipped, "forward")
    extras = [nn.Parameter(torch.ones(3).to(overlapped_models.DEVICE)) for _ in range(2)]
    for (_, optimizer), extra in zip(twins.pairs, extras):
        optimizer.add_param_group({"params": [extra]})
    for step in range(4):
        for (model, optimizer), extra in zip(twins.pairs, extras):
            (loss_of(model, step) + extra.square().sum()).backward()
            optimizer.step()
        # Nobody looks them up: they are updated when the step returns.
        assert torch.equal(extras[0], extras[1])
        twins.reference.zero_grad()
    twins.compare()


def test_state_that_gets_other_memory_before_its_update() -> None:
    """Updates that are still to come say so, where nothing has waited for them."""
    twins = Twins(clipped, "forward")
    for step in range(4):
        states = [state["exp_avg"] for state in twins.optimizer.state.values()]
        twins.step(step)
    for state in states:
        state.data = state.data.clone()
    with pytest.raises(tilestep.StateError, match="before a pending update"):
        twins.optimizer.synchronize()


@pytest.mark.parametrize("thawed", [0, 1])
def test_a_second_backward_with_what_did_not_train_in_the_first(thawed: int) -> None:
    """The group waits once more, for what is new in it; what it has updated is not updated twice."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward")
    model[thawed].requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()
    model[thawed].requires_grad_(True)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="was updated in backward: run all but the last"):
        model(torch.ones(2, 4)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
