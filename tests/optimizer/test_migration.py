"""`import tilestep as optim` in the place of `from torch import optim`: every argument of every dense optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from twins import assert_close, make_params, set_gradients

import tilestep as optim

ELSEWHERE = {"LBFGS", "SparseAdam"}
TORCHS = sorted(
    name
    for name, member in vars(torch.optim).items()
    if inspect.isclass(member) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
)
DENSE = [name for name in TORCHS if name not in ELSEWHERE]
OTHER: dict[str, Any] = {
    "betas": (0.8, 0.95),
    "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 10.0),
    "eps": 1e-4,
    "beta2_decay": -0.7,
    "d": 1.5,
    "t0": 3.0,
    "momentum": 0.7,
    "alpha": 0.6,
    "rho": 0.8,
    "dampening": 0.1,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 3,
    "adjust_lr_fn": "match_rms_adamw",
    "differentiable": False,  # True is refused, see below
    "foreach": False,
    "fused": False,
    "capturable": False,
}
"""A value that is not the default, for what cannot be guessed from it."""


def _arguments(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    return {key: parameter for key, parameter in parameters.items() if key != "params"}


def _values(name: str) -> dict[str, Any]:
    """A value for each of torch's arguments, mostly other ones than the defaults, that torch takes together."""
    values: dict[str, Any] = {}
    for key, parameter in _arguments(name).items():
        default = parameter.default
        if key in OTHER:
            values[key] = OTHER[key]
        else:
            values[key] = not default if isinstance(default, bool) else default + 0.01
    if name == "SGD":
        values["dampening"] = 0.0  # nesterov wants none
    if name == "Adafactor":
        values["eps"] = (1e-4, 1e-2)
    return values


def _params(name: str) -> list[Any]:
    params = make_params([(4, 6), (3, 2), (5,), (2, 3, 5)])
    return params[:2] if name == "Muon" else params


def test_torch_has_no_optimizer_that_nobody_looked_at() -> None:
    assert set(DENSE) == {name for name in optim.registry if hasattr(torch.optim, name)}
    assert set(TORCHS) > ELSEWHERE and len(DENSE) >= 13


@pytest.mark.parametrize("name", DENSE)
def test_every_argument_has_torch_s_name_place_and_default(name: str) -> None:
    mine = inspect.signature(getattr(optim, name)).parameters
    positional = [key for key, parameter in mine.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for place, (key, theirs) in enumerate(_arguments(name).items(), start=1):
        # Muon has torch's number where its coefficients are torch's.
        assert mine[key].default == theirs.default or (name, key) == ("Muon", "ns_steps"), key
        if theirs.kind is theirs.POSITIONAL_OR_KEYWORD:
            assert positional[place] == key
        else:
            assert mine[key].kind is theirs.kind, key


@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("name", DENSE)
def test_arguments_mean_what_they_mean_in_torch(name: str, by_position: bool) -> None:
    values, arguments = _values(name), _arguments(name)
    assert sum(values[key] != arguments[key].default for key in values) >= 4
    ordered = [
        key for key, parameter in arguments.items() if by_position and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    named = {key: value for key, value in values.items() if key not in ordered}
    mine, theirs = _params(name), _params(name)
    ours = getattr(optim, name)(mine, *(values[key] for key in ordered), **named)
    torchs = getattr(torch.optim, name)(theirs, *(values[key] for key in ordered), **named)
    for key, value in torchs.param_groups[0].items():
        assert key == "params" or ours.param_groups[0][key] == value, key
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        ours.step()
        torchs.step()
    assert_close(mine, theirs, rtol=3e-2 if name == "Muon" else 5e-5)


@pytest.mark.parametrize("name", DENSE)
def test_flags_that_choose_an_implementation_are_taken_and_change_nothing(name: str) -> None:
    arguments = _arguments(name)
    # torch takes one of the first two.
    flags = {key: True for key in ("fused" if "fused" in arguments else "foreach", "capturable") if key in arguments}
    mine, other = _params(name), _params(name)
    flagged, plain = getattr(optim, name)(mine, **flags), getattr(optim, name)(other)
    assert all(flagged.param_groups[0][key] is True for key in flags)
    for step in range(2):
        set_gradients(mine, other, step=step)
        flagged.step()
        plain.step()
    assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("name", [name for name in DENSE if "differentiable" in _arguments(name)])
def test_a_differentiable_step_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"differentiable=True is not supported.*use torch\.optim"):
        getattr(optim, name)(_params(name), differentiable=True)
    params = _params(name)
    optimizer = getattr(optim, name)(params[:1])
    with pytest.raises(ValueError, match="group 1: differentiable=True is not supported"):
        optimizer.add_param_group({"params": params[1:], "differentiable": True})


@pytest.mark.parametrize("name", DENSE)
def test_what_torch_does_not_take_is_not_taken(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\).*no_such_argument"):
        getattr(optim, name)(_params(name), no_such_argument=1)
    count = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in _arguments(name).values())
    with pytest.raises(TypeError, match=rf"{name}\(\) too many positional arguments"):
        getattr(optim, name)(_params(name), *[None] * (count + 1))


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_is_not_here_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"tilestep has no {name}.*use torch\.optim\.{name}"):
        getattr(optim, name)
    assert not hasattr(optim, "NoSuchOptimizer")


def test_schedulers_and_averages_are_found_in_the_same_place() -> None:
    params = make_params()
    optimizer = optim.SGD(params, lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    set_gradients(params)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optim.swa_utils is torch.optim.swa_utils
