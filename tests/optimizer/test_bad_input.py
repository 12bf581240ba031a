"""What cannot work is refused with a message that names it, and leaves everything as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ejected_modules import staged
from twins import assert_unchanged, everything, make_params, set_gradients, train, twins

import tilestep
from tilestep import GradientError, RuleError, StateError

Spoil = Callable[[torch.nn.Parameter], Any]


def assign_grad(param: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set a gradient that torch itself would not: of another shape, dtype or layout."""
    holder = torch.nn.Parameter(torch.zeros_like(gradient.to_dense() if gradient.layout != torch.strided else gradient))
    param.grad = None
    shape, data = param.shape, param.data
    param.data = holder.data
    param.grad = gradient
    param.data = data
    assert param.shape == shape


def sparse(param: torch.Tensor) -> None:
    param.grad = torch.ones(param.shape, dtype=param.dtype).to_sparse()


GRADIENTS: dict[str, tuple[Spoil, str]] = {
    "sparse": (sparse, "the gradient of parameter 2 of group 0 is sparse.*SparseAdam"),
    "shape": (lambda param: assign_grad(param, torch.ones(3)), r"has shape \(3,\), the parameter has \(4, 6\)"),
    "dtype": (
        lambda param: assign_grad(param, torch.ones(4, 6, dtype=torch.float64)),
        "has dtype torch.float64, the parameter has torch.float32",
    ),
    "complex": (lambda param: assign_grad(param, torch.ones(4, 6, dtype=torch.complex64)), "is complex"),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_that_cannot_be_used(kind: str, steps_before: int) -> None:
    spoil, message = GRADIENTS[kind]
    params = make_params()
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    twin = twins(params)
    control = tilestep.AdamW(twin, max_grad_norm=1.0)
    train([(optimizer, params), (control, twin)], range(steps_before))
    before = everything(optimizer)
    set_gradients(params, step=9)
    spoil(params[2])
    for _ in range(2):
        with pytest.raises(GradientError, match=message):
            optimizer.step()
        assert_unchanged(optimizer, before)
    train([(optimizer, params), (control, twin)], range(steps_before, steps_before + 2))
    assert all(map(torch.equal, params, twin))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("steps_before", [1, 4])
def test_gradients_inside_of_a_function_transform(transform: str, steps_before: int) -> None:
    params = make_params([(3,), (3,)])
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(steps_before))
    before = everything(optimizer)

    def step(values: torch.Tensor) -> torch.Tensor:
        for param in params:
            param.grad = values * 2
        optimizer.step()
        return values.sum()

    for _ in range(2):
        with pytest.raises(
            GradientError, match=r"the gradient of parameter 0 of group 0 .*inside a function transform"
        ):
            getattr(torch.func, transform)(step)(torch.ones(3) if transform == "grad" else torch.ones(2, 3))
    assert_unchanged(optimizer, before)
    train([(optimizer, params)], range(1))


def test_a_bad_gradient_of_one_segment_stops_the_others() -> None:
    params = [*make_params(), *make_params(dtype=torch.bfloat16)]
    optimizer = tilestep.Optimizer([{"params": params[:3]}, {"params": params[3:], "rule": "Lion"}], "AdamW")
    before = everything(optimizer)
    set_gradients(params)
    sparse(params[-1])
    with pytest.raises(GradientError, match="parameter 8 of group 1"):
        optimizer.step()
    assert_unchanged(optimizer, before)


def expanded() -> Any:
    return torch.nn.Parameter(torch.zeros(3).expand(2, 3))


def same_storage() -> Any:
    memory = torch.zeros(6)
    return [torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[3:])]


PARAMETERS: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (lambda: [expanded()], r"parameter 0 of group 0 of shape \(2, 3\) .* overlaps itself"),
    "integer": (lambda: [torch.zeros(2, dtype=torch.int32)], "dtype torch.int32; supported are float32"),
    "sparse": (
        lambda: [torch.nn.Parameter(torch.eye(3).to_sparse())],
        "parameter 0 of group 0 is torch.sparse_coo",
    ),
    "shared": (same_storage, "parameter 1 of group 0 shares memory with parameter 0 of group 0"),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_parameter_that_cannot_be_updated(kind: str) -> None:
    make, message = PARAMETERS[kind]
    params = make()
    for param in params:
        if not param.requires_grad:
            param.grad = torch.zeros_like(param)
    with pytest.raises(GradientError, match=message):
        tilestep.AdamW(params)
    first = make_params()
    optimizer = tilestep.AdamW(first)
    before = everything(optimizer)
    with pytest.raises(GradientError, match=message.replace("group 0", "group 1")):
        optimizer.add_param_group({"params": params})
    assert_unchanged(optimizer, before)
    assert not optimizer.state
    train([(optimizer, first)], range(1))
    assert set(optimizer.state) == set(first)


def test_a_parameter_that_another_group_takes_too_is_refused() -> None:
    """Which of their numbers would update it?"""
    first, second = make_params([(5,), (5,)])
    optimizer = tilestep.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    train([(optimizer, [first, second])], range(2))
    optimizer.param_groups[1]["params"].append(first)
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(GradientError, match="parameter 1 of group 1 is parameter 0 of group 0 too"):
            optimizer.step()
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("rule", ["Adagrad", "AdamW"])
def test_a_group_that_is_listed_twice_is_saved_twice(rule: str) -> None:
    """As torch's, whose test of deterministic checkpoints lists one twice; its update is refused."""
    dicts = []
    for library in (tilestep, torch.optim):
        (param,) = make_params([(5,)])
        optimizer = getattr(library, rule)([param], lr=0.1)
        train([(optimizer, [param])], range(2))
        optimizer.param_groups.extend(optimizer.param_groups)
        saved = optimizer.state_dict()
        dicts.append((list(saved["state"]), [group["params"] for group in saved["param_groups"]]))
    assert dicts[0] == dicts[1] == ([0], [[0], [0]])
    (param,) = make_params([(5,)])
    optimizer = getattr(tilestep, rule)([param], lr=0.1)
    optimizer.param_groups.extend(optimizer.param_groups)
    assert (len(optimizer.state_dict()["state"]) == 1) is (rule == "Adagrad")
    set_gradients([param])
    with pytest.raises(GradientError, match="parameter 0 of group 1 is parameter 0 of group 0 too"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_that_are_tied_later_are_refused(steps: int) -> None:
    """By `.data`, which leaves two parameters in the place of one: they would be updated at the same time."""
    first, second = make_params([(5,), (5,)])
    optimizer = tilestep.AdamW([first, second])
    train([(optimizer, [first, second])], range(steps))
    own = second.data
    second.data = first.data
    set_gradients([first, second])
    before = first.detach().clone()
    for _ in range(2):
        with pytest.raises(GradientError, match="parameter 1 of group 0 shares memory with parameter 0"):
            optimizer.step()
    assert torch.equal(first, before)
    second.data = own
    optimizer.step()


def test_parameters_that_interleave_are_no_overlap() -> None:
    memory = torch.zeros(4, 6)
    left, right = torch.nn.Parameter(memory[:, :2]), torch.nn.Parameter(memory[:, 2:])
    optimizer = tilestep.SGD([left, right], lr=1.0)
    left.grad, right.grad = torch.ones(4, 2), torch.full((4, 4), 2.0)
    optimizer.step()
    assert memory.tolist() == [[-1.0] * 2 + [-2.0] * 4] * 4


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "Invalid lr: -1.0; it must be at least 0"),
        ({"lr": float("nan")}, ValueError, "Invalid lr: nan"),
        ({"lr": torch.tensor(-1.0)}, ValueError, "Invalid lr: -1.0"),
        ({"lr": torch.ones(2)}, ValueError, r"Invalid lr: a tensor of shape \(2,\); it must have one element"),
        ({"betas": (0.9, 1.0)}, ValueError, r"Invalid betas\[1\]: 1.0; it must be in \[0, 1\)"),
        ({"betas": (0.9,)}, ValueError, r"Invalid betas: \(0.9,\); it must have 2 values"),
        ({"betas": ((torch.tensor(0.9),), 0.9)}, TypeError, r"Invalid betas: .*nested list"),
        ({"lr": "fast"}, TypeError, "Invalid lr: 'fast'; it must be a number"),
        ({"lr": None}, TypeError, "Invalid lr: None"),
        ({"betas": (0.9, None)}, TypeError, r"Invalid betas\[1\]: None"),
        ({"betas": 0.9}, TypeError, "Invalid betas: 0.9; it must have 2 values"),
        ({"maximize": "false"}, TypeError, "Invalid maximize: 'false'; it must be True or False"),
        ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay"),
        ({"max_grad_norm": -1.0}, ValueError, "Invalid max_grad_norm"),
        ({"max_grad_norm": float("nan")}, ValueError, "Invalid max_grad_norm"),
        ({"differentiable": True}, ValueError, "differentiable=True is not supported"),
        ({"momentum": 0.9}, TypeError, r"AdamW\(\) got an unexpected keyword argument 'momentum'$"),
        (
            {"weight_decy": 0.1},
            TypeError,
            r"got an unexpected keyword argument 'weight_decy'; did you mean weight_decay",
        ),
        ({"state_dtype": "fp8"}, ValueError, r"Invalid state_dtype: 'fp8'.*'int8'; did you mean float8_e4m3\?"),
        ({"state_dtype": "bf16"}, ValueError, r"Invalid state_dtype: 'bf16'.*'int8'; did you mean bfloat16\?"),
    ],
)
def test_hyperparameters_out_of_range(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    params = make_params()
    with pytest.raises(error, match=message):
        tilestep.AdamW(params, **kwargs)
    if error is TypeError and "unexpected" in message:
        return
    optimizer = tilestep.AdamW(params[:2])
    before = everything(optimizer)
    with pytest.raises(error, match=f"group 1: {message}"):
        optimizer.add_param_group({"params": params[2:], **kwargs})
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("betas", (0.9, float("nan")), "betas.1"),
        ("eps", float("nan"), "eps"),
        ("weight_decay", float("nan"), "weight_decay"),
    ],
)
def test_a_number_that_becomes_nan_is_named(key: str, value: Any, named: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    optimizer = tilestep.AdamW([param])
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=rf"Invalid {named} of group 0: nan"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("name", ["AdamW", "ASGD"])
@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), torch.tensor(float("nan"))])
def test_a_rate_that_is_nan_before_the_first_step_stops_it(name: str, value: Any) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    optimizer = getattr(tilestep, name)([param])
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="group 0: Invalid lr: nan"):
        optimizer.step()
    assert torch.equal(param, torch.zeros(3)) and not optimizer.state
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert torch.isfinite(param).all() and (param < 0).all()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_numbers_out_of_range_that_are_assigned_later_are_taken_as_torch_takes_them(name: str) -> None:
    """Ranges are those of new groups: torch compares nothing afterwards, and a negative rate ascends."""
    pairs = []
    for library in (tilestep, torch.optim):
        param = torch.nn.Parameter(torch.full((3,), 2.0))
        optimizer = getattr(library, name)([param], lr=0.1)
        for change in ({}, {"lr": -0.5}, {"weight_decay": -0.25}):
            optimizer.param_groups[0].update(change)
            param.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
        pairs.append((param, optimizer))
    (ours, optimizer), (theirs, _) = pairs
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"Invalid (lr|weight_decay): -"):
        getattr(tilestep, name)([torch.nn.Parameter(torch.zeros(3))]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", "1e-3", "lr: '1e-3'; it must be a number or a function of the step"),
        ("lr", None, "lr: None; it must be a number"),
        ("lr", {}, "lr: {}; it must be a number"),
        ("lr", torch.tensor([0.1, 0.2]), r"lr: a tensor of shape \(2,\); it must have one element"),
        ("lr", torch.tensor(1j), r"lr: a tensor of shape \(\), complex; it must have one element, a real number"),
        ("betas", (0.9, None), r"betas\[1\]: None; it must be a number"),
        ("betas", (0.9,), r"betas: \(0.9,\); it must have 2 values"),
        ("betas", 0.9, "betas: 0.9; it must have 2 values"),
        ("max_grad_norm", "1.0", "max_grad_norm: '1.0'; it must be a number or tilestep.ZClip"),
        ("max_grad_norm", [1.0], r"max_grad_norm: \(1.0,\); it must be a number"),
        ("max_grad_norm", tilestep.AdaGC(), r"max_grad_norm: AdaGC\(.*\); .* in a new group AdaGC"),
        ("max_grad_norm", lambda step: 1.0, "max_grad_norm: .* cannot be a function of the step"),
    ],
)
def test_a_number_that_becomes_something_else_is_named(key: str, value: Any, message: str) -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    for _ in range(2):
        before, number = everything(optimizer), optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        set_gradients(params)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"Invalid {message}"):
                optimizer.step()
        optimizer.param_groups[0][key] = number
        assert_unchanged(optimizer, before)
        optimizer.step()


def test_a_rate_that_becomes_nan_stops_the_step() -> None:
    params = make_params()
    optimizer = tilestep.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    train([(optimizer, params)], range(2))
    optimizer.param_groups[1]["lr"] = float("nan")
    before = everything(optimizer)
    set_gradients(params)
    for _ in range(2):
        with pytest.raises(ValueError, match="Invalid lr of group 1: nan"):
            optimizer.step()
    optimizer.param_groups[1]["lr"] = before["groups"][1]["lr"] = 1e-3
    assert_unchanged(optimizer, before)
    optimizer.step()


def test_what_is_no_rule() -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"no rule is called 'Adamw'; did you mean .*AdamW"):
        tilestep.Optimizer(params, "Adamw")
    with pytest.raises(RuleError, match=r"is not a rule: pass a function decorated with @tilestep\.rule"):
        tilestep.Optimizer(params, lambda param, grad: param)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="AdamW has no hyperparameter 'momentum'; it has lr, betas"):
        tilestep.Optimizer(params, "AdamW", momentum=0.9)
    with pytest.raises(TypeError, match=r"AdamW has no hyperparameter 'weight_decy'; did you mean weight_decay\?"):
        tilestep.Optimizer(params, "AdamW", weight_decy=0.1)
    optimizer = tilestep.AdamW(params[:2])
    before = everything(optimizer)
    with pytest.raises(ValueError, match="no rule is called 'Lyon'"):
        optimizer.add_param_group({"params": params[2:], "rule": "Lyon"})
    assert_unchanged(optimizer, before)


def test_two_rules_of_one_name() -> None:
    @tilestep.rule
    def descend(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad

    other = tilestep.rule(lambda param, grad, *, lr=0.1: param + lr * grad)
    other.name = "descend"
    params = make_params()
    with pytest.raises(ValueError, match="two different rules of one optimizer are called descend"):
        tilestep.Optimizer([{"params": params[:1]}, {"params": params[1:], "rule": other}], descend)


def test_a_rule_that_cannot_be_translated_names_operation_and_line() -> None:
    @tilestep.rule
    def sorts(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad.sort().values

    with pytest.raises(RuleError, match=rf"{re.escape(__file__)}:\d+.*sort"):
        tilestep.Optimizer([torch.nn.Parameter(torch.zeros(3))], sorts)


@pytest.mark.parametrize(
    "params",
    [[], torch.zeros(3), [{"params": {torch.zeros(3)}}], [1.0], [torch.zeros(3, requires_grad=True) * 2]],
    ids=["nothing", "a tensor", "a set", "a number", "an intermediate result"],
)
def test_arguments_that_torch_refuses(params: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        torch.optim.AdamW(params)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        tilestep.AdamW(params)


def checkpoint(name: str, params: list[torch.nn.Parameter], **kwargs: Any) -> dict[str, Any]:
    copied = twins(params)
    optimizer = getattr(torch.optim, name)(copied, **kwargs)
    train([(optimizer, copied)], range(2))
    return optimizer.state_dict()


def wrong_shape(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    saved = checkpoint("AdamW", params)
    saved["state"][3]["exp_avg"] = torch.zeros(5)
    return saved


def with_state(name: str, value: Any) -> Callable[[list[torch.nn.Parameter]], dict[str, Any]]:
    def made(params: list[torch.nn.Parameter]) -> dict[str, Any]:
        saved = checkpoint("AdamW", params)
        saved["state"][3][name] = value
        return saved

    return made


def other_rule_of_ours(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    return tilestep.Optimizer([{"params": twins(params), "rule": "Lion"}], "AdamW").state_dict()


def fewer_parameters(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    return checkpoint("AdamW", params[:-1])


def more_groups(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    groups = [{"params": twins(params[:1])}, {"params": twins(params[1:])}]
    return torch.optim.AdamW(groups).state_dict()


def impossible_rate(params: list[torch.nn.Parameter]) -> dict[str, Any]:
    saved = checkpoint("AdamW", params)
    saved["param_groups"][0]["lr"] = float("nan")
    return saved


CHECKPOINTS: dict[str, tuple[Callable[..., dict[str, Any]], type[Exception], str]] = {
    "another shape": (
        wrong_shape,
        StateError,
        r"state 'exp_avg' of parameter 3 of group 0 \(p3\) has shape \(5,\) .*needs \(2, 3, 5\)",
    ),
    "a list": (
        with_state("exp_avg", [1.0] * 30),
        StateError,
        "state 'exp_avg' of parameter 3 .* is a list; it must be a tensor",
    ),
    "an array": (
        with_state("exp_avg", np.ones((2, 3, 5))),
        StateError,
        "state 'exp_avg' of parameter 3 .* is a ndarray",
    ),
    "sparse": (with_state("exp_avg", torch.ones(2, 3, 5).to_sparse()), StateError, "'exp_avg' .* is torch.sparse_coo"),
    "complex": (with_state("exp_avg", torch.ones(2, 3, 5) * 1j), StateError, "'exp_avg' .* is torch.complex64"),
    "steps": (
        with_state("step", torch.ones(2)),
        StateError,
        r"state 'step' of parameter 3 .* has shape \(2,\); it must have one element",
    ),
    "another rule": (other_rule_of_ours, StateError, "group 0 of the checkpoint is of rule Lion, this .* of AdamW"),
    "Adam": (
        lambda params: tilestep.Adam(twins(params)).state_dict(),
        StateError,
        "group 0 .*decoupled_weight_decay=False, and AdamW requires .*load it into tilestep.Adam",
    ),
    "Adagrad": (lambda params: checkpoint("Adagrad", params), StateError, r"has state 'sum' for parameter 0 .*\(p0\)"),
    "SGD": (lambda params: checkpoint("SGD", params, momentum=0.9), StateError, "has state 'momentum_buffer'"),
    "fewer parameters": (fewer_parameters, ValueError, "doesn't match the size"),
    "more groups": (more_groups, ValueError, "different number of parameter groups"),
    "a rate that is nan": (impossible_rate, ValueError, "group 0: Invalid lr: nan"),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit(kind: str) -> None:
    make, error, message = CHECKPOINTS[kind]
    params = make_params()
    optimizer = tilestep.AdamW([(f"p{index}", param) for index, param in enumerate(params)], lr=0.01)
    twin = twins(params)
    control = tilestep.AdamW(twin, lr=0.01)
    train([(optimizer, params), (control, twin)], range(2))
    group, before = optimizer.param_groups[0], everything(optimizer)
    state = optimizer.state
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(make(params))
    assert optimizer.param_groups[0] is group and optimizer.state is state
    assert_unchanged(optimizer, before)
    train([(optimizer, params), (control, twin)], range(2, 4))
    assert all(map(torch.equal, params, twin))


def test_a_checkpoint_without_a_buffer_that_the_rule_needs() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    saved = checkpoint("AdamW", params)
    del saved["state"][2]["exp_avg_sq"]
    with pytest.raises(StateError, match="has no state 'exp_avg_sq' for parameter 2 of group 0"):
        optimizer.load_state_dict(saved)


def test_a_closure_that_fails_changes_nothing() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    set_gradients(params)
    before = everything(optimizer)

    def closure() -> float:
        raise RuntimeError("the loss does not exist")

    with pytest.raises(RuntimeError, match="the loss does not exist"):
        optimizer.step(closure)
    assert_unchanged(optimizer, before)


def test_a_flag_that_cannot_be_flipped_changes_nothing() -> None:
    params = make_params()
    optimizer = tilestep.SGD(params, lr=0.1)
    train([(optimizer, params)], range(2))
    before = everything(optimizer)
    optimizer.param_groups[0]["nesterov"] = True
    set_gradients(params)
    for _ in range(2):
        with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
            optimizer.step()
    optimizer.param_groups[0]["nesterov"] = False
    assert_unchanged(optimizer, before)
    optimizer.step()


def test_a_backward_through_old_weights_fails_as_in_torch() -> None:
    weight, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.SGD([weight, other], lr=0.1)
    loss = (weight * weight).sum()
    untouched = (other * other).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    untouched.backward()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.complex64])
def test_gradients_of_a_dtype_that_kernels_do_not_read_are_refused_by_name(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad_dtype = dtype  # type: ignore[attr-defined]
    with pytest.raises(GradientError, match=rf"parameter 0 of group 0 has gradients of {dtype}.*supported are float32"):
        tilestep.AdamW([weight])
    later = torch.nn.Parameter(torch.ones(4))
    optimizer = tilestep.AdamW([later])
    later.grad_dtype = dtype  # type: ignore[attr-defined]
    later.grad = torch.ones(4).to(dtype)
    with pytest.raises(GradientError, match="has gradients of"):
        optimizer.step()
    assert torch.equal(later.data, torch.ones(4))


@tilestep.rule
def turned(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Two sums over all tensors, of which graphs of vectors need the second first."""
    squares = tilestep.sum_over_tensors(grad.square().sum())
    total = tilestep.sum_over_tensors(grad.abs().sum())
    return param - lr * (squares / total if grad.ndim > 1 else 1 / total * squares)


@tilestep.rule
def mixed(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Two sums over all tensors, of which tensors of each shape use their own."""
    squares = tilestep.sum_over_tensors(grad.square().sum())
    total = tilestep.sum_over_tensors(grad.abs().sum())
    return param - lr * (squares if grad.ndim > 1 else total)


@pytest.mark.parametrize("rule", [staged, mixed], ids=lambda rule: rule.name)
def test_reductions_over_all_tensors_that_shapes_decide_are_refused(rule: Any) -> None:
    """The sum of vectors alone came from the first pass in which any has it."""
    for shapes, refused in (([(5,)], False), ([(3, 4)], False), ([(3, 4), (5,)], True)):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = tilestep.Optimizer(params, rule, skip_above=tilestep.TimesMean(3.0))
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        if not refused:
            optimizer.step()
            continue
        before, limits = [param.detach().clone() for param in params], optimizer.state_dict()["param_groups"]
        with pytest.raises(
            RuleError, match=f"{rule.name} reduces over all tensors in different passes.*: use the same"
        ):
            optimizer.step()
        assert all(map(torch.equal, params, before)) and not optimizer.state_dict()["state"]
        assert str(optimizer.state_dict()["param_groups"]) == str(limits)


def test_sums_over_all_tensors_meet_in_the_order_of_their_calls() -> None:
    """Graphs number sums in the order in which they need them: sums of other shapes were added to others."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,))]
    optimizer = tilestep.Optimizer(params, turned)
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    for param in params:
        torch.testing.assert_close(param.detach(), torch.full_like(param, 1 - 0.1 * 0.5))
