"""Hyperparameters as functions of the step, against torch's schedulers; and schedulers that cycle momentum."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from twins import assert_close, assert_unchanged, everything, make_params, set_gradients, train

import tilestep
from tilestep import schedule

STEPS = 20


def rates(make: Callable[[torch.optim.Optimizer], Any], peak: float = 0.1) -> list[float]:
    """The rates that a torch scheduler gives in turn."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        rates = []
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


def warmup_then(after: Callable[[torch.optim.Optimizer], Any]) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        up = lr_scheduler.LinearLR(optimizer, 1 / 5, 1.0, 4)
        return lr_scheduler.SequentialLR(optimizer, [up, after(optimizer)], [4])

    return make


PAIRS: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], Any]]] = {
    "cosine": (
        schedule.warmup_cosine(0.1, 0, 30, final=0.01),
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 0.1 + 0.9 * (1 + math.cos(math.pi * (epoch + 1) / 30)) / 2
        ),
    ),
    "warmup_cosine": (
        schedule.warmup_cosine(0.1, 5, 20, final=0.01),
        warmup_then(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 15, 0.01)),
    ),
    "warmup_linear": (
        schedule.warmup_linear(0.1, 5, 15),
        warmup_then(lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 10)),
    ),
    "warmup_stable_decay": (
        schedule.warmup_stable_decay(0.1, 5, decay=4, total=18),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 1 / 5, 1.0, 4), lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4)],
            [13],
        ),
    ),
    "one_cycle": (
        schedule.one_cycle(0.1, STEPS),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS, cycle_momentum=False),
    ),
    "inverse_sqrt": (
        schedule.inverse_sqrt(0.1, 5),
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda epoch: min((epoch + 1) / 5, math.sqrt(5 / (epoch + 1)))
        ),
    ),
    "a lambda": (
        lambda step: 0.1 * min(1.0, 0.5 + step / 8) * math.exp(-step / 10),
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda epoch: min(1.0, 0.5 + (epoch + 1) / 8) * math.exp(-(epoch + 1) / 10)
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_schedule_gives_the_rates_of_torch_s(name: str) -> None:
    ours, make = PAIRS[name]
    own = [float(ours(step)) for step in range(1, STEPS + 1)]
    assert own == pytest.approx(rates(make), rel=1e-12, abs=1e-17)


@pytest.mark.parametrize("name", PAIRS)
def test_training_with_it_equals_training_with_torch_s_scheduler(name: str) -> None:
    function, make = PAIRS[name]
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine, lr=function), torch.optim.AdamW(theirs, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(torchs)
        train([(ours, mine), (torchs, theirs)], range(STEPS), between=lambda step: scheduler.step())
    assert_close(mine, theirs)


def test_nothing_is_built_while_a_function_moves() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(
        params, lr=schedule.warmup_cosine(0.1, 2, 9), betas=(lambda step: 1 - 1 / (step + 1), 0.99)
    )
    train([(optimizer, params)], range(1))
    compiled, tables = tilestep.compile_count(), optimizer.plan
    train([(optimizer, params)], range(1, 9))
    assert tilestep.compile_count() == compiled
    assert optimizer.plan is tables


@pytest.mark.parametrize(("name", "nesterov"), [("SGD", False), ("SGD", True), ("RMSprop", None)])
def test_a_branch_on_zero_takes_a_function_for_a_number_that_is_not(name: str, nesterov: bool | None) -> None:
    """Momentum that warms up, against the same rule with the number set at every step."""
    flags = {} if nesterov is None else {"nesterov": nesterov}
    mine, theirs = make_params(), make_params()
    ours = getattr(tilestep, name)(mine, lr=0.1, momentum=lambda step: 0.95 - 0.5 / step, **flags)
    fixed = getattr(tilestep, name)(theirs, lr=0.1, momentum=0.45, **flags)
    for step in range(6):
        fixed.param_groups[0]["momentum"] = 0.95 - 0.5 / (step + 1)
        train([(ours, mine), (fixed, theirs)], range(step, step + 1))
    assert_close(mine, theirs, rtol=1e-6)


@tilestep.rule
def deciding(param: Any, grad: Any, *, lr: Any = 0.1, limit: Any = 1.0) -> Any:
    return param - lr * (grad if limit > 0.5 else grad.sign())


def test_other_branches_on_a_function_are_refused() -> None:
    with pytest.raises(tilestep.RuleError, match=r"test_functions_of_the_step.py:\d+.*limit set as a function"):
        tilestep.Optimizer(make_params([(3,)]), deciding, limit=lambda step: 1 / step)


def test_equal_schedules_share_a_kernel() -> None:
    params = make_params()
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": schedule.warmup_cosine(0.1, 2, 9)}]
    optimizer = tilestep.AdamW(groups, lr=schedule.warmup_cosine(0.1, 2, 9))
    assert len(optimizer._current_plan().engines[0].passes) == 1


def test_each_parameter_counts_its_own_steps() -> None:
    early, late = make_params([(3,), (3,)])
    optimizer = tilestep.SGD([early, late], lr=lambda step: 1.0 / step)
    before = late.detach().clone()
    set_gradients([early])
    optimizer.step()
    assert torch.equal(late, before)
    set_gradients([early, late])
    optimizer.step()
    torch.testing.assert_close(late.detach(), before - late.grad)


def test_a_state_may_begin_at_a_function() -> None:
    params = make_params([(3,)])
    optimizer = tilestep.Rprop(params, lr=lambda step: 0.25 / step)
    params[0].grad = torch.zeros(3)
    optimizer.step()
    assert optimizer.state[params[0]]["step_size"].tolist() == [0.25] * 3


def test_an_average_is_evaluated_with_the_number_of_the_last_step() -> None:
    function = lambda step: 1 - 1 / (step + 1)  # noqa: E731  (two optimizers need the same one)
    mine, theirs = make_params([(5,)]), make_params([(5,)])
    ours = tilestep.ScheduleFreeSGD(mine, lr=0.1, momentum=function)
    fixed = tilestep.ScheduleFreeSGD(theirs, lr=0.1, momentum=0.5)
    for step in range(3):
        fixed.param_groups[0]["momentum"] = function(step + 1)
        train([(ours, mine), (fixed, theirs)], range(step, step + 1))
    with ours.averaged(), fixed.averaged():
        assert_close(mine, theirs, rtol=1e-6)


def test_a_checkpoint_has_the_number_and_loading_keeps_the_function() -> None:
    function = schedule.warmup_cosine(0.1, 2, 20)
    betas = (lambda step: 1 - 1 / (step + 1), 0.99)
    mine = make_params()
    ours = tilestep.AdamW(mine, lr=function, betas=betas)
    train([(ours, mine)], range(7))
    saved = ours.state_dict()
    group = saved["param_groups"][0]
    assert group["lr"] == pytest.approx(float(function(7))) and group["betas"] == pytest.approx((1 - 1 / 8, 0.99))
    assert ours.param_groups[0]["lr"] is function

    theirs = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    torch.optim.AdamW(theirs).load_state_dict(saved)  # only numbers: torch takes it
    other = tilestep.AdamW(theirs, lr=function, betas=(betas[0], 0.5))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] is function
    assert other.param_groups[0]["betas"] == (betas[0], 0.99)
    train([(ours, mine), (other, theirs)], range(7, 12))
    assert_close(mine, theirs, rtol=0.0)


def test_an_unstepped_optimizer_saves_the_first_number() -> None:
    optimizer = tilestep.SGD(make_params(), lr=lambda step: 0.5 / step)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


def test_copies_go_on_alike() -> None:
    mine = make_params()
    ours = tilestep.AdamW(mine, lr=schedule.one_cycle(0.1, 20))
    train([(ours, mine)], range(3))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        theirs = other.param_groups[0]["params"]
        train([(other, theirs)], range(3, 6))
        again = copy.deepcopy(ours)
        train([(again, again.param_groups[0]["params"])], range(3, 6))
        assert_close(theirs, again.param_groups[0]["params"], rtol=0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lr": lambda step: -step}, ValueError, "Invalid lr at step 1: -1.0; it must be at least 0"),
        ({"lr": lambda step: float("nan")}, ValueError, "Invalid lr at step 1: nan"),
        ({"lr": lambda step: torch.ones(2)}, tilestep.RuleError, r"lr is a function of the step.*shape \(2,\)"),
        ({"lr": lambda step: "fast"}, tilestep.RuleError, "must return one number, not 'fast'"),
        (
            {"lr": lambda step: 0.1 if step > 3 else 0.2},
            tilestep.RuleError,
            "lr set as a function.*torch.where",
        ),
        (
            {"lr": lambda step: torch.stack([step, step])},
            tilestep.RuleError,
            r"lr is a function of the step and must return one number, not a tensor of shape \(2,\)",
        ),
        (
            {"lr": lambda step, warmup: step},
            tilestep.RuleError,
            "lr is a function of the step, but cannot be called with it: .*missing 1 required",
        ),
        (
            {"momentum": 0.9, "dampening": lambda step: step, "nesterov": True},
            ValueError,
            "Nesterov momentum requires a momentum and zero dampening",
        ),
        ({"nesterov": lambda step: True}, TypeError, "Invalid nesterov.*cannot be a function"),
        ({"max_grad_norm": lambda step: 1.0}, TypeError, "Invalid max_grad_norm.*cannot be a function"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    params = make_params([(3,)])
    with pytest.raises(error, match=text):
        tilestep.SGD(params, **arguments)
    optimizer = tilestep.SGD(params, lr=0.1)
    before = everything(optimizer)
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": make_params([(3,)]), **arguments})
    assert_unchanged(optimizer, before)


def test_a_function_that_comes_later_is_named_and_not_the_rule_alone() -> None:
    params = make_params([(3,)])
    optimizer = tilestep.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = lambda step: torch.stack([step, step])
    params[0].grad = torch.ones(3)
    with pytest.raises(tilestep.RuleError, match=r"in rule SGD, lr as a function of the step: .*stack"):
        optimizer.step()


def test_the_reference_calls_functions_too() -> None:
    weight, gradient = torch.zeros(1), torch.ones(1)
    rule = tilestep.registry["Lion"]
    assert rule(weight, gradient, torch.zeros(1), lr=lambda step: step / 4, step=2)[0].item() == -0.5
    with pytest.raises(TypeError, match="lr is a function of the step, so step= is required"):
        rule(weight, gradient, torch.zeros(1), lr=lambda step: step / 4)


@pytest.mark.parametrize("arguments", [(1.0, 5, 5), (1.0, -1, 5)])
def test_a_warmup_without_an_end_is_refused(arguments: tuple[float, int, int]) -> None:
    for make in (schedule.warmup_cosine, schedule.warmup_linear):
        with pytest.raises(ValueError, match="Invalid warmup"):
            make(*arguments)
    with pytest.raises(ValueError, match="Invalid warmup: 0"):
        schedule.inverse_sqrt(1.0, 0)
    with pytest.raises(ValueError, match=r"Invalid pct_start: 0\.9"):
        schedule.one_cycle(1.0, 1, 0.9)
    with pytest.raises(ValueError, match="Invalid points"):
        schedule.Piecewise(((2, 0.0, "linear"), (1, 1.0, "linear")))
    with pytest.raises(ValueError, match="Invalid shape"):
        schedule.Piecewise(((1, 0.0, "linear"), (2, 1.0, "steep")))


SCHEDULERS: dict[str, tuple[str, dict[str, Any], Callable[[torch.optim.Optimizer], Any]]] = {
    "OneCycleLR with betas": ("AdamW", {}, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)),
    "OneCycleLR with momentum": (
        "SGD",
        {"momentum": 0.9, "nesterov": True},
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS),
    ),
    "CyclicLR with betas": ("Adam", {}, lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 4)),
    "CyclicLR with momentum": (
        "RMSprop",
        {"momentum": 0.9},
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 4),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_cycling_momentum_builds_nothing_and_equals_torch(name: str) -> None:
    kind, arguments, make = SCHEDULERS[name]
    mine, theirs = make_params(), make_params()
    ours, torchs = getattr(tilestep, kind)(mine, **arguments), getattr(torch.optim, kind)(theirs, **arguments)
    schedulers = [make(ours), make(torchs)]
    train([(ours, mine), (torchs, theirs)], range(1))
    compiled, tables = tilestep.compile_count(), ours.plan
    seen = set()
    for step in range(1, STEPS):
        for scheduler in schedulers:
            scheduler.step()
        group = ours.param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
        train([(ours, mine), (torchs, theirs)], range(step, step + 1))
    assert len(seen) > 4, "the scheduler did not cycle the momentum"
    assert tilestep.compile_count() == compiled and ours.plan is tables
    assert_close(mine, theirs, rtol=1e-4)


def test_every_entry_of_a_pair_may_move_within_its_own_range() -> None:
    mine, theirs = make_params(), make_params()
    ours = tilestep.Rprop(mine, etas=(lambda step: 0.3 + 0.1 * step, lambda step: 1.1 + 0.1 * step))
    torchs = torch.optim.Rprop(theirs)
    for step in range(4):
        torchs.param_groups[0]["etas"] = (0.3 + 0.1 * (step + 1), 1.1 + 0.1 * (step + 1))
        train([(ours, mine), (torchs, theirs)], range(step, step + 1))
    assert_close(mine, theirs)
    with pytest.raises(ValueError, match=r"Invalid etas\[0\]: 1.0; it must be in \(0, 1\)"):
        tilestep.Rprop(mine, etas=(1.0, 1.2))
    with pytest.raises(ValueError, match=r"Invalid etas\[1\] at step 1: 0.5; it must be greater than 1"):
        tilestep.Rprop(mine, etas=(0.5, lambda step: 0.5 * step))
