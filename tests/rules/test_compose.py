"""Rules made from rules: their numbers against plain loops, their graphs, their signatures and their pickles."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from published import STEPS, problem

import tilestep
from tilestep.errors import RuleError
from tilestep.graph import OPERATIONS, Graph, ancestors, trace
from tilestep.graph.lowering import LOWERINGS
from tilestep.rules import Rule, State, registry, rule
from tilestep.rules.compose import (
    _update,
    cautious,
    cautious_weight_decay,
    centralize,
    clip_update,
    compose,
    coupled_weight_decay,
    decoupled_weight_decay,
    ema,
    lookahead,
)

MATRIX, VECTOR = (4, 6), (9,)
ADAM, SGD, LION = registry["Adam"], registry["SGD"], registry["Lion"]
needs_reductions = pytest.mark.skipif("mean" not in LOWERINGS, reason="reductions are not lowered yet")


@rule
def in_place(param, grad, velocity, *, lr=0.1, momentum=0.9):
    """Momentum, written as a repository would: p and v change where they are."""
    grad.mul_(2.0)
    velocity.mul_(momentum).add_(grad)
    param.sub_(lr * velocity)


class Loop:
    """A rule stepped on its own parameter, states made as an optimizer would make them."""

    def __init__(self, stepped: Rule, shape: tuple[int, ...], **changes: Any) -> None:
        start, self.gradient = problem(shape)
        self.rule, self.param = stepped, torch.from_numpy(start)
        self.hyper = {**stepped.hyperparameters, **changes}
        self.states = {
            name: self.param.clone() if state.init == "param" else torch.full_like(self.param, state.init)
            for name, state in stepped.states.items()
        }

    def step(self, t: int) -> np.ndarray:
        grad = self.gradient(self.param, t)
        self.param, *states = self.rule(self.param, grad, *self.states.values(), **self.hyper, step=t)
        self.states = dict(zip(self.states, states))
        return self.param.numpy()


def adam_step(p, g, m, v, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
    """The step u of Adam (p moves by -u) and its two moments."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    return lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps), m, v


def adam_loop(
    composed: Rule, shape: tuple[int, ...], around: Callable[..., np.ndarray], lr: float = 0.01, **changes: Any
) -> Loop:
    """Step the composed rule beside Adam in numpy, with `around(p, g, adam, t)` giving the new parameter."""
    ours = Loop(composed, shape, lr=lr, **changes)
    p, (_, gradient) = ours.param.numpy().copy(), problem(shape)
    moments = [np.zeros_like(p), np.zeros_like(p)]
    for t in range(1, STEPS + 1):

        def adam(point: np.ndarray, g: np.ndarray, t: int = t) -> np.ndarray:
            update, *moments[:] = adam_step(point, g, *moments, t, lr=lr)
            return update

        p = around(p, gradient(p, t), adam, t)
        np.testing.assert_allclose(ours.step(t), p, rtol=1e-10, atol=1e-12, err_msg=f"step {t}")
    return ours


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_cautious_adam_with_decay_outside_is_the_authors_adamw(decay: float) -> None:
    kept = []

    def around(p, g, adam, t):
        p = p * (1 - 0.01 * decay)
        update = adam(p, g)
        mask = (update * g > 0).astype(float)
        kept.append(mask.mean())
        return p - update * mask / max(mask.mean(), 1e-3)

    adam_loop(decoupled_weight_decay(cautious(ADAM), decay), VECTOR, around)
    assert min(kept) < 1, "every element agreed, so the test shows nothing"


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_cautious_decay_is_where_the_update_moves_toward_zero(decay: float) -> None:
    decayed = []

    def around(p, g, adam, t):
        update = adam(p, g)
        mask = update * p >= 0
        decayed.append(mask.mean())
        return p - update - 0.01 * decay * p * mask

    adam_loop(cautious_weight_decay(ADAM, decay), VECTOR, around)
    assert 0 < min(decayed) < 1, "all elements or none decayed, so the test shows nothing"


def test_cautious_follows_the_gradient_upwards_when_maximizing() -> None:
    down, up = (Loop(cautious(LION), VECTOR, maximize=maximize) for maximize in (False, True))
    downwards = down.gradient
    up.gradient = lambda p, t: -downwards(p, t)
    for t in range(1, STEPS + 1):
        np.testing.assert_array_equal(down.step(t), up.step(t))


@pytest.mark.parametrize("rms", [0.3, 1e6])
def test_clip_update(rms: float) -> None:
    clipped = []

    def around(p, g, adam, t):
        update = adam(p, g)
        factor = max(1.0, math.sqrt(float((update**2).mean())) / (0.01 * rms))
        clipped.append(factor > 1)
        return p - update / factor

    adam_loop(clip_update(ADAM, rms), MATRIX, around)
    assert any(clipped) == (rms < 1)


def test_clip_update_with_a_learning_rate_of_zero_stands_still() -> None:
    ours = Loop(clip_update(ADAM), VECTOR, lr=0.0)
    before = ours.param.numpy().copy()
    np.testing.assert_array_equal(ours.step(1), before)


@pytest.mark.parametrize("shape", [VECTOR, MATRIX, (3, 4, 2), (2, 3, 2, 2)])
def test_centralize(shape: tuple[int, ...]) -> None:
    def around(p, g, adam, t):
        if g.ndim > 1:
            g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)
        return p - adam(p, g)

    adam_loop(centralize(ADAM), shape, around)


def test_weight_decays_are_those_of_torch() -> None:
    pairs = [
        (decoupled_weight_decay(ADAM, 0.3), registry["AdamW"], {"weight_decay": 0.3}),
        (coupled_weight_decay(ADAM, 0.3), ADAM, {"weight_decay": 0.3}),
        (coupled_weight_decay(SGD, 0.3), SGD, {"weight_decay": 0.3, "momentum": 0.9, "maximize": True}),
    ]
    for composed, torchs_rule, changes in pairs:
        common = {key: value for key, value in changes.items() if key != "weight_decay"}
        ours, theirs = Loop(composed, VECTOR, **common), Loop(torchs_rule, VECTOR, **changes)
        for t in range(1, STEPS + 1):
            np.testing.assert_allclose(ours.step(t), theirs.step(t), rtol=1e-12)


@pytest.mark.parametrize("maximize", [False, True])
def test_infinite_weights_stay_as_they_are_without_a_coupled_decay(maximize: bool) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, torch.inf, -torch.inf]))
    optimizer = tilestep.Optimizer([weight], coupled_weight_decay(SGD, 0.0), lr=0.5, maximize=maximize)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [1.5 if maximize else 0.5, torch.inf, -torch.inf]


@pytest.mark.parametrize("composer", [cautious, clip_update])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adan"])
def test_infinite_weights_stay_as_they_are_where_an_update_is_changed(composer: Any, name: str) -> None:
    composed = composer(registry[name])
    start = torch.tensor([1.0, torch.inf, -torch.inf], dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = tilestep.Optimizer([weight], composed, lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64)
    optimizer.step()
    states = [torch.zeros_like(start) for _ in composed.states]
    by_torch = composed(start, weight.grad, *states, lr=0.1, weight_decay=0.0, step=1)[0]
    for moved in (weight.detach(), by_torch):
        assert 0 < moved[0] < 1 and moved[1:].tolist() == [torch.inf, -torch.inf]


def test_decoupled_decay_needs_a_learning_rate() -> None:
    nameless = rule(lambda param, grad, *, rate=0.1: param - rate * grad)
    with pytest.raises(RuleError, match="lr"):
        decoupled_weight_decay(nameless)
    with pytest.raises(RuleError, match=r"cautious_weight_decay.*lr"):
        cautious_weight_decay(nameless)


def test_a_name_or_a_class_is_no_rule_yet() -> None:
    for no_rule in ("AdamW", tilestep.AdamW):
        for composer in (cautious, ema, decoupled_weight_decay, cautious_weight_decay):
            with pytest.raises(RuleError, match=rf'{composer.__name__} requires a rule.*tilestep.registry\["AdamW"\]'):
                composer(no_rule)
    with pytest.raises(RuleError, match=r"pass a function decorated with @tilestep\.rule"):
        lookahead(lambda param, grad: param - grad)


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_ema(decay: float) -> None:
    averages = []

    def around(p, g, adam, t):
        averages.append((averages[-1] if averages else p) * decay)
        p = p - adam(p, g)
        averages[-1] = averages[-1] + (1 - decay) * p
        return p

    ours = adam_loop(ema(ADAM, decay), VECTOR, around)
    np.testing.assert_allclose(ours.states["ema"].numpy(), averages[-1], rtol=1e-10)
    evaluated = ours.rule.evaluated(ours.param, ours.states, ours.hyper)
    assert torch.equal(evaluated, ours.states["ema"])


@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (3, 0.8), (1, 0.25)])
def test_lookahead(k: int, alpha: float) -> None:
    slow: list[np.ndarray] = []

    def around(p, g, adam, t):
        slow[:] = slow or [p]
        p = p - adam(p, g)
        if t % k == 0:
            slow[0] = slow[0] + alpha * (p - slow[0])
            p = slow[0]
        return p

    ours = adam_loop(lookahead(ADAM, k, alpha), VECTOR, around)
    evaluated = ours.rule.evaluated(ours.param, ours.states, ours.hyper)
    np.testing.assert_allclose(evaluated.numpy(), slow[0], rtol=1e-10)


@pytest.mark.parametrize("composer", [cautious, clip_update])
def test_a_rule_in_place_composes_as_if_it_were_not(composer: Callable[[Rule], Rule]) -> None:
    @rule
    def pure(param, grad, velocity, *, lr=0.1, momentum=0.9):
        velocity = momentum * velocity + 2 * grad
        return param - lr * velocity, velocity

    ours, theirs = Loop(composer(in_place), VECTOR), Loop(composer(pure), VECTOR)
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(ours.step(t), theirs.step(t), rtol=1e-12)


def test_signature_is_the_inner_rules_and_then_ones_own() -> None:
    composed = lookahead(ema(ADAM, 0.9), k=7)
    assert composed.state_names == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "ema", "slow")
    assert composed.states["slow"] == State("param")
    assert list(composed.hyperparameters)[: len(ADAM.hyperparameters)] == list(ADAM.hyperparameters)
    assert {"ema_decay": 0.9, "lookahead_k": 7}.items() <= composed.hyperparameters.items()
    assert "lookahead_k" in composed.keyword_only and "ema_decay" in composed.keyword_only
    assert list(inspect.signature(composed.function).parameters)[:2] == ["param", "grad"]
    with pytest.raises(ValueError, match="ema_decay"):
        composed.check({"ema_decay": 2.0})
    with pytest.raises(ValueError, match="betas"):
        composed.check({"betas": (1.5, 0.9)})
    assert composed.__doc__ and "lookahead_k" in composed.__doc__ and "beta2" in composed.__doc__


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ema(LION, 2.0), r"ema_decay: 2.0; it must be in \[0, 1\]"),
        (lambda: lookahead(LION, k=0), "lookahead_k: 0; it must be at least 1"),
        (lambda: lookahead(LION, alpha=math.nan), "lookahead_alpha: nan"),
        (lambda: clip_update(LION, -1.0), "update_rms: -1.0; it must be at least 0"),
        (lambda: decoupled_weight_decay(LION, -0.1), "decoupled_decay: -0.1"),
        (lambda: coupled_weight_decay(LION, -0.1), "coupled_decay: -0.1"),
        (lambda: tilestep.adaptive_clip(LION, decay=1.0), r"clip_decay: 1.0; it must be in \[0, 1\)"),
    ],
)
def test_a_number_out_of_its_range_is_refused_where_it_is_given(make: Callable[[], Rule], said: str) -> None:
    """A negative size turned updates around."""
    with pytest.raises(ValueError, match=f"Invalid {said}"):
        make()


def test_composing_twice_the_same_is_refused_by_name() -> None:
    with pytest.raises(RuleError, match=r"ema\(EmaLion\): the rule already has ema, ema_decay"):
        ema(ema(LION))


def test_the_inner_rule_decides_where_to_evaluate_unless_a_composer_does() -> None:
    free = registry["ScheduleFreeSGD"]
    assert cautious(free).evaluation is free.evaluation
    assert cautious(ema(ADAM)).evaluated(torch.zeros(1), {"ema": torch.ones(1)}, {}) == 1
    assert ADAM.evaluated(torch.zeros(1), {}, {}) == 0


@pytest.mark.parametrize("again", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy])
def test_a_composed_rule_survives_pickling(again: Callable[[Rule], Rule]) -> None:
    made = clip_update(lookahead(ema(cautious(in_place), 0.5), k=2, alpha=0.25), 0.5)
    remade = again(made)
    assert remade.hyperparameters == made.hyperparameters and remade.states == made.states
    one, other = Loop(made, VECTOR), Loop(remade, VECTOR)
    for t in range(1, 5):
        np.testing.assert_array_equal(one.step(t), other.step(t))


def compute(graph: Graph, numbers: dict[str, Any]) -> dict[str, Any]:
    """A graph's outputs for one element, on Python numbers."""
    results: dict[int, Any] = {}
    for node in ancestors(graph.outputs.values()):
        if node.operation in ("load", "hyper"):
            results[id(node)] = numbers[node.attribute]
        elif node.operation == "constant":
            results[id(node)] = node.attribute
        else:
            function = OPERATIONS[node.operation]
            assert function is not None
            results[id(node)] = function(*(results[id(arg)] for arg in node.args))
    return {name: results[id(value)] for name, value in graph.outputs.items()}


def numbers_of(stepped: Rule, **inputs: float) -> dict[str, Any]:
    numbers: dict[str, Any] = {"gradient_scale": 1.0, "step": 3.0, **inputs}
    for name, value in stepped.hyperparameters.items():
        entries = {f"{name}.{i}": entry for i, entry in enumerate(value)} if isinstance(value, tuple) else {name: value}
        numbers |= {key: entry for key, entry in entries.items() if key not in inputs}
    return numbers


def halved(inner: Rule) -> Rule:
    """The inner rule at half its speed, by way of its update."""

    def composed(param, grad, *states, **hyper):
        update, states = _update(inner, param, grad, states, hyper)
        return param + 0.5 * update, *states

    return compose(composed, inner, halved)


@pytest.mark.parametrize("name", ["Lion", "AdamW", "Adan", "ADOPT", "ScheduleFreeAdamW", "SophiaG", "Rprop", "NAdam"])
@pytest.mark.parametrize("step", [1.0, 4.0])
def test_a_traced_update_is_what_the_rule_adds(name: str, step: float) -> None:
    inner = registry[name]
    composed = halved(inner)
    inputs = {state: 0.3 + 0.1 * i for i, state in enumerate(inner.state_names)}
    hyper = {"weight_decay": 0.1} if "weight_decay" in inner.hyperparameters else {}
    numbers = numbers_of(composed, param=1.5, grad=-0.7, step=step, **inputs, **hyper)
    after = compute(trace(composed, {**composed.hyperparameters, **hyper}), numbers)

    def tensor(number: float) -> torch.Tensor:
        return torch.tensor([number], dtype=torch.float64)

    expected = composed(tensor(1.5), tensor(-0.7), *map(tensor, inputs.values()), **hyper, step=step)
    for state, value in zip(("param", *inner.state_names), expected):
        if state in after:
            assert after[state] == pytest.approx(value.item(), rel=1e-12), state


@pytest.mark.parametrize("decay", [0.0, 1e-30])
def test_a_traced_update_does_not_round_at_the_parameters_size(decay: float) -> None:
    inner = registry["AdamW"]

    def composed(param, grad, *states, **hyper):
        update, states = _update(inner, param, grad, states, hyper)
        return update, *states

    graph = trace(compose(composed, inner, halved), {**inner.hyperparameters, "amsgrad": False})
    inputs = {"param": 1.0, "grad": 1e-25, "exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 1.0}
    numbers = numbers_of(inner, **inputs, eps=1.0, lr=0.1, weight_decay=decay)
    assert compute(graph, numbers)["param"] == pytest.approx(-0.1 * 1e-25 - 0.1 * decay, rel=1e-9, abs=0.0)


ALL = [
    cautious,
    cautious_weight_decay,
    centralize,
    clip_update,
    coupled_weight_decay,
    decoupled_weight_decay,
    ema,
    lookahead,
]
ELEMENTWISE = [coupled_weight_decay, decoupled_weight_decay, ema, lookahead]


@pytest.mark.parametrize("composer", ELEMENTWISE)
@pytest.mark.parametrize("inner", ["SGD", "AdamW", "Lion", "AdEMAMix", "ScheduleFreeAdamW"])
def test_elementwise_compositions_trace(composer: Callable[[Rule], Rule], inner: str) -> None:
    composed = composer(registry[inner])
    plain = trace(registry[inner], registry[inner].hyperparameters)
    graph = trace(composed, composed.hyperparameters)
    own = {"ema"} if composer is ema else {"slow"} if composer is lookahead else set()
    assert set(graph.states) == set(plain.states) | own
    assert set(graph.loads()) == set(plain.loads()) | own | ({"param"} if composer is coupled_weight_decay else set())


@needs_reductions
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("composer", ALL)
def test_every_composition_traces(composer: Callable[[Rule], Rule], dims: int) -> None:
    composed = composer(registry["AdamW"])
    assert "param" in trace(composed, composed.hyperparameters, dims=dims).outputs


def test_a_composition_in_place_traces() -> None:
    composed = ema(decoupled_weight_decay(halved(in_place)), 0.5)
    inputs = {"param": 2.0, "grad": 0.25, "velocity": 1.0, "ema": 3.0, "decoupled_decay": 0.5}
    after = compute(trace(composed, composed.hyperparameters), numbers_of(composed, **inputs))
    velocity = 0.9 * 1.0 + 2 * 0.25
    param = 2.0 * (1 - 0.1 * 0.5) - 0.5 * 0.1 * velocity
    assert after == pytest.approx({"param": param, "velocity": velocity, "ema": (3.0 + param) / 2})
