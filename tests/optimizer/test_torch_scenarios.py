"""What users do with torch's optimizers, done with tilestep's too: the same numbers, log, or type of error."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import tilestep

NAMES = ["SGD", "AdamW", "RMSprop", "Adafactor", "NAdam", "Muon"]
SCENARIOS: dict[str, Callable[[Callable[..., Any]], Any]] = {}


def scenario(function: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Of a function that makes an optimizer, as the class does."""
    SCENARIOS[function.__name__] = function
    return function


def outcome(function: Callable[[], Any]) -> Any:
    """What a call returns, or which of Python's errors it raises."""
    try:
        return function()
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def model(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (6, 4), (5, 5)]
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def draw(params: list[Any], step: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator).to(param.dtype)


def values(params: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def members(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@scenario
def hooks_run_in_order(make: Callable[..., Any]) -> Any:
    log: list[Any] = []
    optimizer = make(model())
    optimizer.register_step_pre_hook(
        lambda own, args, kwargs: log.append(("pre", own is optimizer, len(args), [*kwargs]))
    )
    optimizer.register_step_post_hook(
        lambda own, args, kwargs: log.append(("post", own is optimizer, len(args), [*kwargs]))
    )
    optimizer.register_state_dict_pre_hook(lambda own: log.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda own, saved: log.append("saved") or {**saved, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda own, saved: log.append(("before loading", sorted(saved))))
    optimizer.register_load_state_dict_post_hook(lambda own: log.append("loaded"))
    optimizer.register_load_state_dict_post_hook(lambda own: log.append("loaded first"), prepend=True)
    before = register_optimizer_step_pre_hook(lambda *_: log.append("before every step"))
    after = register_optimizer_step_post_hook(lambda *_: log.append("after every step"))
    try:
        draw(members(optimizer))
        log += [optimizer.step(), optimizer.step(lambda: 1.0), optimizer.step(closure=lambda: 2.0)]
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        before.remove()
        after.remove()
    return log


@scenario
def hooks_replace_arguments_and_checkpoints(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    draw(members(optimizer))
    handle = optimizer.register_step_pre_hook(lambda own, args, kwargs: (args, {"closure": lambda: 7.0}))
    results = [optimizer.step()]
    handle.remove()
    handle = optimizer.register_step_pre_hook(lambda own, args, kwargs: 3)
    results.append(outcome(optimizer.step))
    handle.remove()

    def other_rate(own: Any, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.5} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(other_rate)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    return results, optimizer.param_groups[0]["lr"], saved["param_groups"][0]["lr"], values(members(optimizer))


@scenario
def closures_see_gradients_enabled(make: Callable[..., Any]) -> Any:
    optimizer, seen = make(model()), []

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in members(optimizer))
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach()]
    with torch.no_grad():
        losses.append(optimizer.step(closure).detach())
    return losses, seen, torch.is_grad_enabled(), values(members(optimizer))


@scenario
def gradients_are_zeroed_or_dropped(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    params = members(optimizer)
    sum((param**2).sum() for param in params).backward(create_graph=True)
    optimizer.zero_grad(set_to_none=False)
    zeroed = [(param.grad.abs().sum().item(), param.grad.requires_grad) for param in params]
    optimizer.zero_grad()
    return zeroed, [param.grad for param in params]


@scenario
def groups_that_cannot_be_added(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    own = members(optimizer)[0]
    wrong: list[Any] = [
        [1],
        "group",
        {},
        {"params": set(model())},
        {"params": [1.0]},
        {"params": own},
        {"params": [torch.zeros(2, 2, requires_grad=True) * 2]},
        {"params": [("name", model()[1])]},
    ]
    return [outcome(functools.partial(optimizer.add_param_group, group)) for group in wrong], len(
        optimizer.param_groups
    )


@scenario
def what_parameters_may_be_given_as(make: Callable[..., Any]) -> Any:
    weight = model()[1]
    makers: list[Callable[[], Any]] = [
        lambda: [],
        lambda: None,
        lambda: 3,
        lambda: [[]],
        lambda: iter([]),
        lambda: [None],
        lambda: [{"no params": 1}],
        lambda: [{"params": model()}, weight],
        lambda: [torch.zeros(3, 3).requires_grad_() * 2],
        lambda: weight,
        lambda: (param for param in model()),
        lambda: [("name", weight), weight],
        lambda: [("name", weight), ("name", weight)],
        lambda: {"name": weight}.items(),
        lambda: [{"params": {"name": weight}.items()}],
        lambda: [{"params": weight, "lr": 0.5}],
    ]
    return [outcome(lambda one=one: len(members(make(one())))) for one in makers]  # type: ignore[misc]


@scenario
def copies_and_pickles_train_on(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    draw(members(optimizer))
    optimizer.step()
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    memory.seek(0)
    loaded = make([torch.nn.Parameter(value) for value in values(members(optimizer))])
    loaded.load_state_dict(torch.load(memory, weights_only=True))
    unset = type(optimizer).__new__(type(optimizer))
    unset.__setstate__(copy.deepcopy(optimizer.__getstate__()))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded, unset]
    public = [{name for name in vars(one) if not name.startswith("_")} for one in (optimizer, *others[:2])]
    assert public[0] == public[1] == public[2]
    for other in [*others, optimizer]:
        draw(members(other), step=1)
        other.step()
    assert all(map(torch.equal, members(other), members(optimizer)) for other in others)
    return [values(members(other)) for other in [*others, optimizer]]


@scenario
def groups_are_edited_between_steps(make: Callable[..., Any]) -> Any:
    optimizer = make([{"params": model()[:1], "lr": 0.3}, {"params": model()[1:]}])
    everything = members(optimizer)
    for step in range(6):
        draw(everything, step=step)
        if step == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        if step == 2:
            left = optimizer.param_groups[1]["params"].pop()
        if step == 3:
            optimizer.param_groups[1]["params"] = [*optimizer.param_groups[1]["params"], left]
        if step == 4:
            late = torch.nn.Parameter(model()[2].detach().clone(), requires_grad=False)
            optimizer.add_param_group({"params": [late], "lr": 0.5})
        if step == 5:
            late.requires_grad_(True)
            draw([late], step=step)
        optimizer.step()
    return values([*everything, late]), [group["lr"] for group in optimizer.param_groups]


@scenario
def gradients_may_be_missing(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    params = members(optimizer)
    results = [optimizer.step(), optimizer.step(lambda: 5)]
    for step in range(4):
        draw(params, step=step)
        params[step % 3].grad = None
        optimizer.step()
    return results, values(params)


@scenario
def the_rate_may_be_a_tensor(make: Callable[..., Any]) -> Any:
    rate = torch.tensor(0.1)
    optimizer = make(model(), lr=rate)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        draw(members(optimizer), step=step)
        optimizer.step()
        schedule.step()
    return values(members(optimizer)), rate is optimizer.param_groups[0]["lr"], rate.item()


@scenario
def names_are_kept(make: Callable[..., Any]) -> Any:
    named = make([(f"weight {index}", param) for index, param in enumerate(model())])
    draw(members(named))
    named.step()
    plain = make(model())
    plain.load_state_dict(named.state_dict())
    return [optimizer.param_groups[0].get("param_names") for optimizer in (named, plain)]


@scenario
def checkpoints_that_cannot_be_loaded(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    draw(members(optimizer))
    optimizer.step()
    spoilt: list[Callable[[dict[str, Any]], Any]] = [
        lambda saved: saved["param_groups"].append(saved["param_groups"][0]),
        lambda saved: saved["param_groups"][0]["params"].pop(),
        lambda saved: saved.pop("state"),
        lambda saved: saved.pop("param_groups"),
    ]
    results = []
    for spoil in spoilt:
        saved = copy.deepcopy(optimizer.state_dict())
        spoil(saved)
        results.append(outcome(functools.partial(optimizer.load_state_dict, saved)))
    optimizer.step()
    return results, values(members(optimizer))


@scenario
def autograd_knows_of_updates(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    params = members(optimizer)
    loss = sum((param * param).sum() for param in params)
    loss.backward(retain_graph=True)
    versions = [param._version for param in params]
    optimizer.step()
    counted = [param._version > version for param, version in zip(params, versions)]
    return counted, outcome(loss.backward), [param.is_leaf and param.requires_grad for param in params]


@scenario
def gradients_of_a_graph_are_read(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    params = members(optimizer)
    loss = sum((param**3).sum() for param in params)
    for param, gradient in zip(params, torch.autograd.grad(loss, params, create_graph=True)):
        param.grad = gradient
    optimizer.step()
    return values(params), [param.grad.requires_grad for param in params]


@scenario
def hooks_of_gradients_step(make: Callable[..., Any]) -> Any:
    params = model()
    optimizers = {param: make([param]) for param in params}

    def update(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        sum((param * param).sum() for param in params).backward()
    return values(params)


@scenario
def parametrized_modules_train(make: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    net = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4, bias=False)).double()
    optimizer = make(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return values(net.parameters())


@scenario
def averaged_models_follow(make: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 5, bias=False).double()
    optimizer = make(net.parameters())
    averaged = [
        swa_utils.AveragedModel(net),
        swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    ]
    for step in range(4):
        draw([*net.parameters()], step=step)
        optimizer.step()
        for model in averaged:
            model.update_parameters(net)
    return [values(model.parameters()) for model in averaged]


@scenario
def distributed_checkpoints_are_alike(make: Callable[..., Any]) -> Any:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    torch.manual_seed(0)
    net = torch.nn.Linear(5, 5, bias=False).double()
    first, second = make(net.parameters()), make(net.parameters(), lr=0.3)
    draw([*net.parameters()])
    first.step()
    set_optimizer_state_dict(net, second, get_optimizer_state_dict(net, first))
    second.step()
    return values(net.parameters()), second.param_groups[0]["lr"]


@scenario
def nothing_is_kept_alive(make: Callable[..., Any]) -> Any:
    optimizer = make(model())
    draw(members(optimizer))
    optimizer.step()
    watched = [weakref.ref(optimizer), weakref.ref(members(optimizer)[0])]
    del optimizer
    gc.collect()
    return [reference() is None for reference in watched]


@scenario
def steps_in_inference_mode(make: Callable[..., Any]) -> Any:
    with torch.inference_mode():
        params = [torch.ones(3, 3, dtype=torch.float64) for _ in range(2)]
        optimizer = make(params)
        for step in range(2):
            draw(params, step=step)
            optimizer.step()
    return [param.clone() for param in params]


@scenario
def scalers_skip_unscale_and_clip(make: Callable[..., Any]) -> Any:
    optimizer = make(model(torch.float32))
    params = members(optimizer)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(sum((param * param).sum() for param in params)).backward()
        if step == 1:
            params[0].grad[0] = float("inf")
        if step == 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, values(params)


def _alike(name: str, run: Callable[[Callable[..., Any]], Any]) -> None:
    def making(module: ModuleType) -> Callable[..., Any]:
        return lambda params, **kwargs: getattr(module, name)(params, **{"lr": 1e-2, **kwargs})

    # Muon's matrix products are bfloat16, in which the last bit is 0.4%.
    close = 2e-2 if name == "Muon" else 1e-6
    torch.testing.assert_close(run(making(tilestep)), run(making(torch.optim)), rtol=close, atol=close)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wanted", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_as_with_torch(wanted: str, name: str) -> None:
    def run(make: Callable[..., Any]) -> Any:
        return _comparable(SCENARIOS[wanted](make))

    _alike(name, run)


def _comparable(value: Any) -> Any:
    """Everything but tensors and lists as text, which is equal or not."""
    if isinstance(value, (list, tuple)):
        return [_comparable(entry) for entry in value]
    return value if isinstance(value, torch.Tensor) else np.frombuffer(repr(value).encode(), dtype=np.uint8).copy()


def _cycles(optimizer: Any) -> bool:
    return any(key in optimizer.defaults for key in ("momentum", "betas"))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: np.float32(0.5) ** epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, 2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.3, 1, 4),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2, cycle_momentum=_cycles(optimizer)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=10, cycle_momentum=_cycles(optimizer)
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, 3)]
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.05, 3),
}


@pytest.mark.parametrize("name", ["SGD", "AdamW", "ASGD", "Rprop"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore")
def test_schedules_resume_as_with_torch(schedule: str, name: str) -> None:
    def run(make: Callable[..., Any]) -> Any:
        params = model()

        def begin() -> tuple[Any, Any]:
            optimizer = make([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}])
            return optimizer, SCHEDULES[schedule](optimizer)

        optimizer, scheduler = begin()
        rates = []
        for step in range(8):
            draw(params, step=step)
            optimizer.step()
            scheduler.step(*[1.0] * (schedule == "ReduceLROnPlateau"))
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            if step == 4:
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                optimizer, scheduler = begin()
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
        return torch.tensor(rates), values(params)

    _alike(name, run)
