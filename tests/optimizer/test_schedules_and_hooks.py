"""What trains around an optimizer: every scheduler of torch, closures, hooks, averaged models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from twins import assert_close, make_params, set_gradients, train, twins

import tilestep

STEPS = 12
Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.2, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, base_momentum=0.7, max_momentum=0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=8)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 4)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=5),
}


def test_every_scheduler_of_torch_is_here() -> None:
    kinds = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert kinds - {"LRScheduler"} == set(SCHEDULERS)


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 if step < 2 else 2.0)
    else:
        scheduler.step()


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_moves_both_optimizers_alike(
    kind: str, rule: str, rate: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if rule == "SGD" else {"foreach": False}
    mine, theirs = make_params(), make_params()

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:3], "lr": rate(0.1)}, {"params": params[3:], "lr": rate(0.05)}]

    ours = getattr(tilestep, rule)(groups(mine), **options)
    torchs = getattr(torch.optim, rule)(groups(theirs), **options)
    schedules = [SCHEDULERS[kind](ours), SCHEDULERS[kind](torchs)]
    make = type(ours)._make_plan

    def make_first(self: Any, *, ahead: bool) -> Any:
        return make(self, ahead=ahead) if self.plan is None else pytest.fail("a schedule must build nothing")

    monkeypatch.setattr(type(ours), "_make_plan", make_first)
    compiled = tilestep.compile_count()
    rates = set()
    for step in range(STEPS):
        set_gradients(mine, theirs, step=step)
        for optimizer, schedule in zip((ours, torchs), schedules):
            optimizer.step()
            advance(schedule, step)
        rates.add(float(ours.param_groups[0]["lr"]))
        assert_close(mine, theirs)
    assert len(rates) > 1 and tilestep.compile_count() == compiled


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_momentum_cycles_with_the_rate(rule: str) -> None:
    key, options = ("betas", {}) if rule == "AdamW" else ("momentum", {"momentum": 0.9})
    optimizer = getattr(tilestep, rule)(make_params(), lr=0.1, **options)
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    seen = set()
    for _ in range(5):
        optimizer.step()
        cycle.step()
        seen.add(optimizer.param_groups[0][key])
    assert len(seen) == 5


def test_a_schedule_resumes_from_its_checkpoint() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params, lr=0.1)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    train([(optimizer, params)], range(4), between=lambda _: schedule.step())
    copied = twins(params)
    other = tilestep.AdamW(copied, lr=0.1)
    resumed = lr_scheduler.OneCycleLR(other, 0.2, total_steps=10)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())

    def both(_: int) -> None:
        schedule.step()
        resumed.step()

    train([(optimizer, params), (other, copied)], range(4, 8), between=both)
    assert all(map(torch.equal, params, copied))


def test_a_closure_is_run_with_gradients_and_its_loss_comes_back() -> None:
    weight, twin = torch.nn.Parameter(torch.tensor([3.0, -2.0])), torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    losses = []
    for param, optimizer in ((weight, tilestep.SGD([weight], lr=0.1)), (twin, torch.optim.SGD([twin], lr=0.1))):

        def closure(param: Any = param, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (param**2).sum()
            loss.backward()
            return loss.detach()

        losses.append([float(optimizer.step(closure)) for _ in range(3)])
        with torch.no_grad():
            losses[-1].append(float(optimizer.step(closure)))
    assert losses[0] == losses[1]
    assert_close([weight], [twin])
    assert tilestep.SGD([weight]).step() is None


def test_step_hooks_run_around_the_step_and_may_change_its_arguments() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = tilestep.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([0.25])
    seen: list[tuple[str, float]] = []

    def before(opt: Any, args: Any, kwargs: Any) -> Any:
        seen.append(("before", weight.item()))
        return args, {"closure": lambda: 7.0}

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", weight.item()))),
    ]
    assert optimizer.step() == 7.0
    assert seen == [("before", 1.0), ("after", 0.75)]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2 and weight.item() == 0.5


def test_global_hooks_see_the_optimizer() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    params = make_params()
    optimizer = tilestep.Lion(params)
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: seen.append(opt)),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(opt)),
    ]
    try:
        train([(optimizer, params)], range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer, optimizer]


def test_an_optimizer_in_backward_of_each_parameter() -> None:
    """torch's tutorial on the optimizer step inside backward: a small optimizer per parameter, in a hook."""
    torch.manual_seed(0)
    mine, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    theirs.load_state_dict(mine.state_dict())
    small = {param: tilestep.AdamW([param], lr=0.1) for param in mine.parameters()}

    def step(param: torch.Tensor) -> None:
        small[param].step()
        small[param].zero_grad()

    for param in mine.parameters():
        param.register_post_accumulate_grad_hook(step)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for _ in range(3):
        inputs = torch.randn(5, 4)
        mine(inputs).square().mean().backward()
        torchs.zero_grad()
        theirs(inputs).square().mean().backward()
        torchs.step()
    assert all(param.grad is None for param in mine.parameters())
    assert_close(list(mine.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models_follow(average: str) -> None:
    torch.manual_seed(0)

    def model() -> torch.nn.Module:
        # No bias before the normalization: its gradient would be nothing but rounding.
        return torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    mine, theirs = model(), model()
    theirs.load_state_dict(mine.state_dict())
    batches = [torch.randn(8, 4) for _ in range(6)]
    results = []
    for trained, make in ((mine, tilestep.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = make(trained.parameters(), lr=0.1)
        rule = swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
        averaged = swa_utils.AveragedModel(trained, multi_avg_fn=rule)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        for batch in batches:
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(trained)
            schedule.step()
        swa_utils.update_bn(batches, averaged)
        results.append(averaged)
    for key, value in results[0].state_dict().items():
        torch.testing.assert_close(value, results[1].state_dict()[key], rtol=2e-5, atol=2e-5)
