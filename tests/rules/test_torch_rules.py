"""The rules named after torch's optimizers against torch's own, over torch's own lists of argument combinations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilestep
from tilestep.errors import StateError
from tilestep.graph import OPERATIONS, Graph, flat_numbers, trace
from tilestep.rules import Rule, registry

torch_lists: Any = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's own test lists need the package expecttest"
)

STEPS = 20
SHAPES = [(), (5,), (4, 6), (2, 3, 5), (3, 2, 3, 3)]
FLAGS = ("foreach", "capturable", "differentiable", "fused")
# LBFGS and SparseAdam are not dense single-pass updates; Muon works on whole matrices and has its own test.
NAMES = sorted({info.optim_cls.__name__ for info in torch_lists.optim_db} - {"LBFGS", "SparseAdam", "Muon"})
# Adafactor's reductions need more than the one element that these comparisons of traces evaluate.
ELEMENTWISE = [name for name in NAMES if name != "Adafactor"]
INFOS = {info.optim_cls.__name__: info for info in torch_lists.optim_db}

# What torch's lists leave out: branches that need other values to be reached within 20 steps.
FURTHER: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 5.0, "lambd": 0.1, "alpha": 0.6}, {"t0": 0, "weight_decay": 0.1, "maximize": True}],
    "Adadelta": [{"rho": 1.0}, {"rho": 0.0}],
    "Adafactor": [
        {"eps": (1e-3, 1e-1), "weight_decay": 0.1},
        {"eps": (0.5, 1e-3), "lr": 1.0, "d": 2.0},
        {"eps": (None, 3.0)},
        {"lr": 0.0},
    ],
    "Adam": [
        {"betas": (0.8, 0.9), "eps": 1e-3, "amsgrad": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{"weight_decay": 0.0}, {"betas": (0.5, 0.9), "amsgrad": True, "maximize": True}],
    "Adamax": [{"betas": (0.5, 0.6), "eps": 1e-2}],
    "NAdam": [{"betas": (0.5, 0.9), "eps": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"betas": (0.5, 0.7), "eps": 1e-3}, {"betas": (0.9, 0.5)}],
    "RMSprop": [{"momentum": 0.9}, {"centered": True, "alpha": 0.5, "eps": 1e-3}],
    "Rprop": [{"lr": 1.0, "step_sizes": (0.5, 1.5)}],
    "SGD": [{"momentum": 0.9, "nesterov": True, "maximize": True}, {"momentum": 0.5, "dampening": 1.0}],
}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(_plain(entry) for entry in value) if isinstance(value, tuple) else value


def _argument_lists(name: str) -> list[dict[str, Any]]:
    """Torch's argument combinations for CPU and CUDA, without the flags that choose an implementation, each once."""
    combinations: list[dict[str, Any]] = []
    listed = [entry.kwargs for device in ("cpu", "cuda") for entry in INFOS[name].optim_inputs_func(device=device)]
    for kwargs in [*listed, *FURTHER.get(name, [])]:
        plain = {key: _plain(value) for key, value in kwargs.items() if key not in FLAGS}
        if plain not in combinations:
            combinations.append(plain)
    return combinations


def _cases(names: list[str]) -> list[Any]:
    def label(kwargs: dict[str, Any]) -> str:
        return ",".join(f"{key}={value}" for key, value in kwargs.items()) or "defaults"

    return [
        pytest.param(name, kwargs, id=f"{name}-{label(kwargs)}") for name in names for kwargs in _argument_lists(name)
    ]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    # Torch keeps its 0-dim state (step, mu_product, eta, mu) in the default dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _gradient(param: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    gradient = torch.randn(param.shape, generator=generator)
    if param.dim() == 0:
        return gradient
    # Some coordinates rest now and then; a whole zero gradient would divide by zero in Adafactor and Adamax alike.
    return gradient * (torch.rand(param.shape, generator=generator) > 0.1)


def _first_state(rule: Rule, name: str, param: torch.Tensor, hyperparameters: dict[str, Any]) -> torch.Tensor:
    state = rule.states[name]
    init = hyperparameters[state.init] if isinstance(state.init, str) else state.init
    shape = list(param.shape)
    if state.shape == "scalar":
        shape = []
    elif state.shape in ("row", "column"):
        shape[-1 if state.shape == "row" else -2] = 1
    return torch.full(shape, float(init))


class _Reference:
    """Runs a rule by calling it, with the states torch has and None for the others."""

    def __init__(self, rule: Rule, param: torch.Tensor, hyperparameters: dict[str, Any], states: set[str]) -> None:
        self.rule = rule
        self.param = param.detach().clone()
        self.hyperparameters = hyperparameters
        self.states = {
            name: _first_state(rule, name, param, hyperparameters) if name in states else None
            for name in rule.state_names
        }

    def step(self, gradient: torch.Tensor, count: int) -> None:
        results = self.rule(self.param, gradient, *self.states.values(), **self.hyperparameters, step=count)
        self.param = results[0]
        self.states = dict(zip(self.rule.state_names, results[1:]))


def _torch_state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: value for key, value in optimizer.state[param].items() if key != "step"}


def _compare(name: str, kwargs: dict[str, Any], changes: dict[int, dict[str, Any]]) -> None:
    rule = registry[name]
    generator = torch.Generator().manual_seed(11)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    starts = [param.detach().clone() for param in params]
    optimizer = getattr(torch.optim, name)(params, foreach=False, **kwargs)
    hyperparameters = {**rule.hyperparameters, **kwargs}
    references: list[_Reference] = []
    for count in range(1, STEPS + 1):
        optimizer.param_groups[0].update(changes.get(count, {}))
        for param in params:
            param.grad = _gradient(param, generator)
        gradients = [param.grad.clone() for param in params if param.grad is not None]
        optimizer.step()
        if not references:
            kept = [set(_torch_state(optimizer, param)) for param in params]
            references = [
                _Reference(rule, *arguments) for arguments in zip(starts, [hyperparameters] * len(params), kept)
            ]
        for reference, gradient in zip(references, gradients):
            reference.hyperparameters = {**reference.hyperparameters, **changes.get(count, {})}
            reference.step(gradient, count)
    for reference, param, start in zip(references, params, starts):
        assert kwargs.get("lr") == 0.0 or not torch.equal(param, start)
        torch.testing.assert_close(reference.param, param.detach(), rtol=1e-10, atol=1e-10)
        expected = _torch_state(optimizer, param)
        assert set(expected) <= set(rule.state_names)
        for key, value in expected.items():
            torch.testing.assert_close(reference.states[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "kwargs"), _cases(NAMES))
def test_twenty_steps_agree_with_torch(name: str, kwargs: dict[str, Any]) -> None:
    _compare(name, kwargs, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_scheduled_learning_rate_agrees_with_torch(name: str) -> None:
    _compare(name, {"lr": 0.05}, {8: {"lr": 0.2}, 15: {"lr": 0.01}})


@pytest.mark.parametrize("name", NAMES)
def test_param_group_keys_and_defaults_are_torchs(name: str) -> None:
    rule = registry[name]
    defaults = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2, 2))]).defaults
    assert {**rule.hyperparameters, **rule.options} == defaults
    assert not set(rule.hyperparameters) & set(rule.options)


@pytest.mark.parametrize("name", NAMES)
def test_positional_order_is_torchs(name: str) -> None:
    rule = registry[name]
    parameters = list(inspect.signature(getattr(torch.optim, name)).parameters.values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [*(key for key in rule.hyperparameters if key not in rule.keyword_only), *rule.positional]


@pytest.mark.parametrize("name", NAMES)
def test_torchs_invalid_arguments_are_refused(name: str) -> None:
    rule = registry[name]
    refused = 0
    for entry in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float64):
        kwargs = entry.optimizer_error_input.kwargs
        numbers = all(isinstance(value, (int, float)) for _, value in flat_numbers(kwargs))
        at_construction = (
            entry.error_on is torch_lists.OptimizerErrorEnum.CONSTRUCTION_ERROR and entry.error_type is ValueError
        )
        if not kwargs or not at_construction or not numbers or set(kwargs) & set(FLAGS):
            continue
        with pytest.raises(ValueError, match="Invalid"):
            rule.check(kwargs)
            trace(rule, {**rule.hyperparameters, **kwargs})
        refused += 1
    assert refused > 0


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_momentum_that_begins_late_is_undampened_as_torch_has_it(state_dtype: str | None) -> None:
    kwargs: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "dampening": 0.5}
    mine = torch.nn.Parameter(torch.linspace(-1, 1, 4096, dtype=torch.float64 if state_dtype is None else None))
    theirs = torch.nn.Parameter(mine.detach().clone())
    ours, torchs = tilestep.SGD([mine], state_dtype=state_dtype, **kwargs), torch.optim.SGD([theirs], **kwargs)

    def step(dampening: float = 0.5, **changes: float) -> None:
        torchs.param_groups[0].update(changes)
        ours.param_groups[0].update({"dampening": dampening, **changes})
        for param, optimizer in ((mine, ours), (theirs, torchs)):
            param.grad = torch.full_like(param, 0.25)
            optimizer.step()

    step()
    before = mine.detach().clone()
    with pytest.raises(StateError, match=r"'momentum_buffer' of .*begins after 1 steps, with dampening=0.5: set damp"):
        step(momentum=0.9)
    assert torch.equal(mine.detach(), before)
    step(momentum=0.9, dampening=0.0)  # torch's first gradient enters undampened with any
    step()
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-12 if state_dtype is None else 1e-3)


@pytest.mark.parametrize("kwargs", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        trace(registry["SGD"], {**registry["SGD"].hyperparameters, **kwargs, "nesterov": True})


def test_a_loaded_momentum_survives_a_step_count_that_begins_again() -> None:
    _, buffer = registry["SGD"](torch.zeros(1), torch.ones(1), torch.full((1,), 2.0), momentum=0.5, step=1)
    assert buffer.item() == 2.0


def _evaluate(graph: Graph, numbers: dict[str, float]) -> dict[str, float]:
    """The graph's outputs for one element, in Python numbers, by each operation's own meaning."""
    evaluated: dict[int, Any] = {}
    for node in graph.values():
        if node.operation == "constant":
            evaluated[id(node)] = node.attribute
        elif node.operation in ("load", "hyper"):
            evaluated[id(node)] = numbers[node.attribute]
        else:
            evaluate = OPERATIONS[node.operation]
            assert evaluate is not None, f"{node.operation} needs more than one element"
            evaluated[id(node)] = evaluate(*(evaluated[id(arg)] for arg in node.args))
    return {name: float(evaluated[id(value)]) for name, value in graph.outputs.items()}


@pytest.mark.parametrize(("name", "kwargs"), _cases(ELEMENTWISE))
@pytest.mark.parametrize("dims", [0, 1, 3])
def test_the_trace_computes_what_the_rule_says(name: str, kwargs: dict[str, Any], dims: int) -> None:
    rule = registry[name]
    hyperparameters = {**rule.hyperparameters, **kwargs}
    graph = trace(rule, hyperparameters, dims=dims)
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(torch.randn(1, generator=generator))
    optimizer = getattr(torch.optim, name)([param], foreach=False, **kwargs)
    param.grad = torch.ones(1)
    optimizer.step()
    assert graph.states == tuple(key for key in rule.state_names if key in _torch_state(optimizer, param))
    reference = _Reference(rule, torch.randn(1, generator=generator), hyperparameters, set(graph.states))
    for count in range(1, STEPS + 1):
        gradient = torch.randn(1, generator=generator)
        buffers = {"param": reference.param, "grad": gradient, **{key: reference.states[key] for key in graph.states}}
        numbers = {key: value.item() for key, value in buffers.items() if value is not None}
        inputs = {**dict(flat_numbers(hyperparameters)), "step": float(count), "gradient_scale": 1.0, **numbers}
        computed = _evaluate(graph, inputs)
        reference.step(gradient, count)
        expected = {"param": reference.param, **reference.states}
        assert set(computed) == {"param", *graph.states}
        for key, number in computed.items():
            value = expected[key]
            assert value is not None and number == pytest.approx(value.item(), rel=1e-10, abs=1e-12), key


def test_asgd_average_is_the_parameter_itself_until_averaging_begins() -> None:
    asgd = registry["ASGD"]
    generator = torch.Generator().manual_seed(5)
    param = torch.randn(64, generator=generator, dtype=torch.float32)
    eta, mu, ax = torch.tensor(0.01), torch.tensor(1.0), torch.full((64,), 1e30, dtype=torch.float32)
    for step in range(1, 6):
        gradient = torch.randn(64, generator=generator, dtype=torch.float32)
        param, eta, mu, ax = asgd(param, gradient, eta, mu, ax, t0=4, step=step)
        assert torch.equal(param, ax)


# A 0-dim float32 parameter is promoted by the float64 hyperparameters, as torch promotes any two 0-dim values.
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape])
@pytest.mark.parametrize("name", NAMES)
def test_float32_buffers_stay_float32(name: str, shape: tuple[int, ...]) -> None:
    rule = registry[name]
    hyperparameters = {**rule.hyperparameters, **_argument_lists(name)[-1]}
    param = torch.randn(shape, dtype=torch.float32)
    states: list[torch.Tensor | None] = []
    for key, state in rule.states.items():
        allocated = state.shape not in ("row", "column") or param.dim() > 1
        first = _first_state(rule, key, param, hyperparameters) if allocated else None
        states.append(first.float() if first is not None and state.shape != "scalar" else first)
    results = rule(param, torch.ones_like(param), *states, **hyperparameters, step=3)
    for key, result in zip(("param", *rule.states), results):
        if result is not None and (key == "param" or rule.states[key].shape != "scalar"):
            assert result.dtype is torch.float32, key


def test_asgd_in_float32_is_as_exact_as_torchs_most_exact() -> None:
    """A product with 1 - lambd * eta, rounded to float32, was off by 3e-8 of the parameter at every step."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    gradients = [torch.randn(1000, generator=generator) for _ in range(100)]
    ends = []
    for dtype, make in (
        (torch.float64, functools.partial(torch.optim.ASGD, foreach=False)),
        (torch.float32, functools.partial(torch.optim.ASGD, foreach=True)),
        (torch.float32, tilestep.ASGD),
    ):
        param = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([param], lr=0.02)
        for gradient in gradients:
            param.grad = gradient.to(dtype)
            optimizer.step()
        ends.append(param.detach().double())
    exact, theirs, ours = ends
    assert (ours - exact).abs().max() <= 1.25 * (theirs - exact).abs().max() < 4e-6


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Adafactor"])
def test_infinite_weights_stay_as_they_are_without_weight_decay(name: str) -> None:
    choices = {} if name == "Rprop" else {"weight_decay": 0.0}
    mine = torch.nn.Parameter(torch.tensor([1.0, -torch.inf, torch.inf], dtype=torch.float64))
    theirs = torch.nn.Parameter(mine.detach().clone())
    ours, torchs = getattr(tilestep, name)([mine], **choices), getattr(torch.optim, name)([theirs], **choices)
    for _ in range(2):
        for param, optimizer in ((mine, ours), (theirs, torchs)):
            param.grad = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
            optimizer.step()
    torch.testing.assert_close(mine.detach(), theirs.detach())
    assert mine.detach().isinf().tolist() == [False, True, True]


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
@pytest.mark.parametrize("broken", [None, 0])
def test_adafactor_keeps_what_is_infinite_or_no_number_where_torch_does(
    shape: tuple[int, ...], broken: int | None
) -> None:
    start = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64)
    start[1], start[2] = torch.inf, -torch.inf
    mine, theirs = (torch.nn.Parameter(start.reshape(shape).clone()) for _ in range(2))
    ours, torchs = tilestep.Adafactor([mine]), torch.optim.Adafactor([theirs])
    for _ in range(3):
        gradient = torch.linspace(-0.5, 0.7, start.numel(), dtype=torch.float64)
        if broken is not None:
            gradient[broken] = torch.nan
        for param, optimizer in ((mine, ours), (theirs, torchs)):
            param.grad = gradient.reshape(shape).clone()
            optimizer.step()
        torch.testing.assert_close(mine.detach(), theirs.detach(), equal_nan=True)
