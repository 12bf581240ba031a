"""Muon beside torch's: numbers, states, groups, checkpoints, and the same step on every way to run it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from state_files import saved_and_loaded
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep
from tilestep.backends.eager import EagerPasses
from tilestep.optimizer import build

SHAPES = [(16, 16), (16, 40), (40, 16), (16, 40), (8, 64), (1, 12)]

CASES: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.2},
    {"momentum": 0.8, "nesterov": False},
    {"ns_steps": 6},
    {"ns_coefficients": (3.4, -4.7, 2.0)},
    {"adjust_lr_fn": "original", "lr": 0.02},
    {"adjust_lr_fn": "match_rms_adamw", "lr": 0.02},
    {"eps": 10.0, "lr": 0.02},
]


def params_of(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def copies(params: Sequence[torch.Tensor]) -> list[Any]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def train(pairs: Sequence[tuple[torch.optim.Optimizer, Sequence[torch.Tensor]]], steps: range) -> None:
    for step in steps:
        for optimizer, params in pairs:
            generator = torch.Generator().manual_seed(100 + step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()


def assert_near(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], reach: float) -> None:
    """Equal within what bfloat16 makes of products, as a part of how far an update reaches."""
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left.detach(), right.detach(), rtol=1e-5, atol=0.01 * reach)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_it_is_torch_s_muon(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    mine = params_of(dtype=dtype)
    theirs, start = copies(mine), copies(mine)
    ours, torchs = tilestep.Muon(mine, **copy.deepcopy(kwargs)), torch.optim.Muon(theirs, **copy.deepcopy(kwargs))
    train([(ours, mine), (torchs, theirs)], range(20))
    moved = max(float((param - begin).detach().abs().max()) for param, begin in zip(theirs, start))
    assert_near(mine, theirs, moved)
    for left, right in zip(mine, theirs):
        torch.testing.assert_close(ours.state[left]["momentum_buffer"], torchs.state[right]["momentum_buffer"])


def test_the_ratio_of_wide_matrices_may_be_below_one() -> None:
    """Of torch 2.14, whose Muon has it; here beside torch's "original" with the rates that follow."""
    shapes = [(4, 16), (16, 4), (8, 8)]
    mine = params_of(shapes)
    theirs = copies(mine)
    ours = tilestep.Muon(mine, lr=0.02, weight_decay=0.0, adjust_lr_fn="spectral_unclamped")
    groups = [{"params": [param], "lr": rate} for param, rate in zip(theirs, (0.01, 0.02, 0.02))]
    train([(ours, mine), (torch.optim.Muon(groups, weight_decay=0.0), theirs)], range(5))
    assert_near(mine, theirs, 0.1)


def test_bfloat16_parameters_come_as_near_to_float32_as_torch_s() -> None:
    mine = params_of(dtype=torch.bfloat16)
    theirs, exact = copies(mine), [torch.nn.Parameter(param.detach().float()) for param in mine]
    pairs = [(tilestep.Muon(mine, lr=0.02), mine), (torch.optim.Muon(theirs, lr=0.02), theirs)]
    train([*pairs, (torch.optim.Muon(exact, lr=0.02), exact)], range(10))

    def error(params: Sequence[torch.Tensor]) -> float:
        return sum(float((param - right).detach().square().sum()) for param, right in zip(params, exact)) ** 0.5

    assert error(mine) < 1.1 * error(theirs)


def test_the_step_is_the_rule_called_on_float64_tensors() -> None:
    rule = tilestep.registry["Muon"]
    for shape in SHAPES:
        (param,) = params_of([shape], torch.float64)
        expected, buffer = param.detach().clone(), torch.zeros(shape, dtype=torch.float64)
        optimizer = tilestep.Muon([param], lr=0.1, ns_steps=4)
        for step in range(4):
            train([(optimizer, [param])], range(step, step + 1))
            expected, buffer = rule(expected, param.grad, buffer, lr=0.1, ns_steps=4)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-12)


def test_checkpoints_go_both_ways() -> None:
    mine = params_of()
    theirs = copies(mine)
    ours, torchs = tilestep.Muon(mine, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    train([(ours, mine), (torchs, theirs)], range(3))
    assert ours.state_dict()["state"][0].keys() - {"step"} == torchs.state_dict()["state"][0].keys()
    missing = torchs.state_dict()["param_groups"][0].keys() - ours.state_dict()["param_groups"][0].keys()
    assert missing == set()

    into_ours, into_torch = copies(theirs), copies(mine)
    resumed, torch_resumed = tilestep.Muon(into_ours, lr=0.5), torch.optim.Muon(into_torch, lr=0.5)
    resumed.load_state_dict(saved_and_loaded(torchs.state_dict()))
    torch_resumed.load_state_dict(saved_and_loaded(ours.state_dict()))
    train(
        [(ours, mine), (torchs, theirs), (resumed, into_ours), (torch_resumed, into_torch)],
        range(3, 6),
    )
    for params in (mine, into_ours, into_torch):
        assert_near(params, theirs, 0.1)


def test_one_optimizer_with_one_schedule_is_torch_s_two() -> None:
    torch.manual_seed(0)
    names = torch.nn.ModuleDict
    model = names({"embed": torch.nn.Embedding(30, 8), "up": torch.nn.Linear(8, 20), "down": torch.nn.Linear(20, 8)})
    other = copy.deepcopy(model)
    groups = tilestep.muon_groups(model, muon={"lr": 0.02}, others={"lr": 1e-3, "weight_decay": 0.0})
    ours = tilestep.Muon(groups, adjust_lr_fn="match_rms_adamw", weight_decay=0.05)
    matrices = [other["up"].weight, other["down"].weight]
    rest = [param for param in other.parameters() if not any(param is matrix for matrix in matrices)]
    torchs = [
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", weight_decay=0.05),
        torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) for optimizer in (ours, *torchs)]
    for step in range(8):
        for built in (model, other):
            generator = torch.Generator().manual_seed(step)
            for param in built.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
        for optimizer in (ours, *torchs):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert_near(list(model.parameters()), list(other.parameters()), 0.1)
    names_of = {name: set(ours.state[param]) for name, param in model.named_parameters()}
    assert names_of["up.weight"] == {"step", "momentum_buffer"}
    assert names_of["up.bias"] == names_of["embed.weight"] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_parameter_that_is_no_matrix_is_refused_by_name(shape: tuple[int, ...]) -> None:
    named = [("up.weight", params_of()[0]), ("up.bias", torch.nn.Parameter(torch.ones(shape)))]
    with pytest.raises(ValueError, match=r"up\.bias.*is not a matrix, and Muon works on matrices only.*muon_groups"):
        tilestep.Muon(named)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"adjust_lr_fn": "arbitrary"},
            ValueError,
            "Invalid adjust_lr_fn: 'arbitrary'; it must be one of None, 'original'",
        ),
        ({"lr": -1.0}, ValueError, "Invalid lr"),
        ({"momentum": -0.1}, ValueError, "Invalid momentum"),
        ({"ns_steps": 100}, ValueError, "Invalid ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "Invalid ns_coefficients: .* it must be three numbers, a list"),
        ({"ns_coefficients": "newton"}, ValueError, "Invalid ns_coefficients: 'newton'; it must be three numbers"),
        ({"ns_coefficients": [[1.0, 2.0, torch.ones(())]]}, TypeError, "ns_coefficients: a tensor in a nested list"),
        ({"ns_coefficients": [(3.0, -4.0, 2.0)] * 4, "ns_steps": 5}, TypeError, "4 steps with a list of 4 .*, not 5"),
        ({"ns_steps": 2.5}, TypeError, "a whole number of steps"),
        ({"lr_scale": -1.0}, ValueError, "Invalid lr_scale"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tilestep.Muon(params_of(), **kwargs)


def test_a_skipped_step_changes_nothing_and_the_next_goes_on() -> None:
    mine, theirs = params_of(), params_of()
    ours, torchs = tilestep.Muon(mine, lr=0.02, skip_nonfinite=True), torch.optim.Muon(theirs, lr=0.02)
    train([(ours, mine), (torchs, theirs)], range(2))
    before = [param.detach().clone() for param in mine]
    states = [ours.state[param]["momentum_buffer"].clone() for param in mine]
    for param in mine:
        param.grad = torch.randn(param.shape)
    mine[3].grad[0, 0] = float("inf")
    ours.step()
    assert all(map(torch.equal, [param.detach() for param in mine], before))
    assert all(torch.equal(ours.state[param]["momentum_buffer"], buffer) for param, buffer in zip(mine, states))
    assert all(float(ours.state[param]["step"]) == 2 for param in mine)
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_near(mine, theirs, 0.1)


def test_parameters_without_gradient_stay_as_they_are() -> None:
    mine, theirs = params_of(), params_of()
    ours, torchs = tilestep.Muon(mine, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    train([(ours, mine[::2]), (torchs, theirs[::2])], range(3))
    assert_near(mine, theirs, 0.1)
    assert torch.equal(mine[1].detach(), params_of()[1].detach())
    assert not ours.state[mine[1]]


def test_numbers_may_change_between_steps() -> None:
    mine, theirs = params_of(), params_of()
    ours, torchs = tilestep.Muon(mine, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    pairs = [(ours, mine), (torchs, theirs)]
    train(pairs, range(2))
    for optimizer in (ours, torchs):
        optimizer.param_groups[0].update(ns_steps=2, ns_coefficients=(1.5, -0.5, 0.0), lr=0.1)
    train(pairs, range(2, 4))
    assert_near(mine, theirs, 0.2)


@pytest.mark.parametrize("eager", [False, True])
def test_coefficients_are_lists_or_names_and_may_change(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if eager:
        monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    rule = tilestep.registry["Muon"]
    (param,) = params_of([(6, 10)], torch.float64)
    expected, buffer = param.detach().clone(), torch.zeros(6, 10, dtype=torch.float64)
    optimizer = tilestep.Muon([param], lr=0.1, ns_coefficients="aol")
    [group] = optimizer.param_groups
    rows = [[4.0, -7.0, 2.5], [2.0, -1.5, 0.5]]
    for step, given in enumerate(
        [
            {"ns_coefficients": "aol"},
            {"ns_coefficients": "polar_express", "ns_steps": 7},
            {"ns_coefficients": rows, "ns_steps": None},
            {"ns_coefficients": rows, "ns_steps": 2},
            {"ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 3},
        ]
    ):
        if step == 3:
            rows[1][0] = 1.9  # in place
        group.update(given)
        train([(optimizer, [param])], range(step, step + 1))
        expected, buffer = rule(expected, param.grad, buffer, lr=0.1, **given)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-12)
    group["ns_steps"], group["ns_coefficients"] = 3, rows
    before = param.detach().clone()
    with pytest.raises(tilestep.RuleError, match="2 steps with a list of 2 coefficients, not 3"):
        train([(optimizer, [param])], range(5, 6))
    group["ns_coefficients"] = "newton"
    with pytest.raises(ValueError, match="Invalid ns_coefficients: 'newton'"):
        train([(optimizer, [param])], range(5, 6))
    assert torch.equal(param.detach(), before)


def test_the_update_may_be_scaled_by_the_larger_side() -> None:
    mine = params_of([(4, 16), (16, 4), (8, 8)])
    theirs = copies(mine)
    ours = tilestep.Muon(mine, lr=0.02, adjust_lr_fn="spectral", lr_scale=0.2, weight_decay=0.0)
    matching = tilestep.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
    train([(ours, mine), (matching, theirs)], range(3))
    assert_near(mine, theirs, 1e-3)


def test_groups_with_other_numbers_do_not_mix() -> None:
    mine, theirs = params_of(), params_of()

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:3]}, {"params": params[3:], "ns_steps": 1, "lr": 0.1}]

    pairs = [(tilestep.Muon(groups(mine), lr=0.02), mine), (torch.optim.Muon(groups(theirs), lr=0.02), theirs)]
    train(pairs, range(3))  # type: ignore[arg-type]
    assert_near(mine, theirs, 0.1)


def test_transposed_and_strided_parameters() -> None:
    base = params_of([(20, 12), (30, 24)])
    mine = [torch.nn.Parameter(base[0].detach().clone().mT), torch.nn.Parameter(base[1].detach().clone()[:, ::2])]
    theirs = [torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for param in mine]
    train([(tilestep.Muon(mine, lr=0.02), mine), (torch.optim.Muon(theirs, lr=0.02), theirs)], range(3))
    assert_near(mine, theirs, 0.1)


def test_an_empty_matrix_is_left_alone() -> None:
    mine = params_of([(0, 4), (3, 0), (3, 4)])
    ours = tilestep.Muon(mine, lr=0.02)
    train([(ours, mine)], range(2))
    assert not torch.equal(mine[2].detach(), params_of([(0, 4), (3, 0), (3, 4)])[2].detach())


def test_small_chunks_give_the_same_numbers() -> None:
    shapes = [(8, 12)] * 7 + [(12, 8)] * 2
    mine, theirs = params_of(shapes), params_of(shapes)
    before = tilestep.limit_workspace(2 * (2 * 8 * 12 + 5 * 8 * 8) * 2)
    try:
        ours = tilestep.Muon(mine, lr=0.02)
    finally:
        tilestep.limit_workspace(before)
    train([(ours, mine), (tilestep.Muon(theirs, lr=0.02), theirs)], range(4))
    matrices = ours.plan.engines[0].passes[0].matrices
    assert [batch.chunk for batch in matrices.batches] == [2, 2]
    assert_near(mine, theirs, 0.1)


def test_batches_of_several_shapes_share_the_memory_that_results_run_ahead_in() -> None:
    """Operands and results of all batches lie in one array, a chunk apart, and no result reaches an unread operand."""
    shapes = [(8, 12), (5, 3), (12, 8), (8, 12), (30, 7), (12, 8), (8, 12), (5, 3)]
    mine, alone = params_of(shapes), params_of(shapes)
    before = tilestep.limit_workspace(2 * (2 * 8 * 12 + 5 * 8 * 8) * 2)
    try:
        ours = tilestep.Muon(mine, lr=0.02)
    finally:
        tilestep.limit_workspace(before)
    theirs = [(tilestep.Muon([param], lr=0.02), [param]) for param in alone]
    for step in range(3):
        for param, other in zip(mine, alone):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            other.grad = param.grad.clone()
        if step == 1:  # a batch with a matrix that takes no part
            mine[3].grad = alone[3].grad = None
        for optimizer in (ours, *(optimizer for optimizer, _ in theirs)):
            optimizer.step()
        assert all(map(torch.equal, mine, alone))
    batches = ours.plan.engines[0].passes[0].matrices.batches
    assert len({array.untyped_storage().data_ptr() for batch in batches for array in batch.arrays.values()}) == 1
    sizes = [len(batch.index) * math.prod(batch.shape) for batch in batches]
    chunks = [batch.chunk * math.prod(batch.shape) for batch in batches]
    (nbytes,) = {array.untyped_storage().nbytes() for batch in batches for array in batch.arrays.values()}
    assert max(chunks) < max(sizes) and nbytes <= 2 * (sum(sizes) + max(chunks) + 128 * (len(sizes) + 1))


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_the_number_of_products_depends_on_shapes_not_on_parameters() -> None:
    def products(shapes: list[tuple[int, int]]) -> int:
        params = params_of(shapes)
        optimizer = tilestep.Muon(params)
        train([(optimizer, params)], range(1))
        with _Calls() as calls:
            optimizer.step()
        return sum("bmm" in name for name in calls.names)

    assert products([(8, 8)]) == products([(8, 8)] * 20) == 15
    assert products([(8, 8), (8, 12)] * 5) == 30


def test_without_a_compiler_the_rule_itself_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = params_of(), params_of()
    monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    ours = tilestep.Muon(mine, lr=0.02)
    train([(ours, mine), (torch.optim.Muon(theirs, lr=0.02), theirs)], range(4))
    assert isinstance(ours.plan.engines[0].passes[0], EagerPasses)
    assert_near(mine, theirs, 0.1)


def test_a_clip_and_composed_rules_work() -> None:
    mine, theirs = params_of(), params_of()
    ours, torchs = tilestep.Muon(mine, lr=0.02, max_grad_norm=0.5, eps=1.0), torch.optim.Muon(theirs, lr=0.02, eps=1.0)
    for step in range(3):
        train([(ours, mine)], range(step, step + 1))
        for param, other in zip(theirs, mine):
            param.grad = other.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        torchs.step()
    assert_near(mine, theirs, 0.1)
    cautious = tilestep.cautious(tilestep.registry["Muon"])
    (param,) = params_of([(6, 9)])
    expected = cautious(param.detach().clone(), torch.ones(6, 9), torch.zeros(6, 9), lr=0.1, step=1)[0]
    optimizer = tilestep.Optimizer([param], cautious, lr=0.1)
    param.grad = torch.ones(6, 9)
    optimizer.step()
    torch.testing.assert_close(param.detach(), expected)
