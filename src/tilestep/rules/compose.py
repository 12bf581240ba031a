"""Compositions: functions from a rule to a rule, which is traced into one fused kernel like any rule.

A composed rule has the states and hyperparameters of its inner rule, followed by its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ..compat import version_of
from ..errors import RuleError
from .protocol import Interval, Rule, State, at_least, between, registry
from .scalars import decayed

__all__ = [
    "cautious",
    "cautious_weight_decay",
    "centralize",
    "clip_update",
    "compose",
    "coupled_weight_decay",
    "decoupled_weight_decay",
    "ema",
    "lookahead",
    "scaled_states",
]


def cautious(rule: Rule) -> Rule:
    """Update only elements whose update agrees in sign with gradient descent, scaled up to compensate.

    Equations (u is what the rule adds to p, the mean is over one parameter tensor):
        a <- 1 where u * g < 0, else 0     (u * g > 0 with the rule's `maximize`)
        p <- p + u * a / max(mean(a), 1e-3)
    A weight decay inside the rule counts as part of u; to keep it out, as the authors do, decay outside:
    `decoupled_weight_decay(cautious(adam), 0.1)`.

    Args:
        rule: the rule to make cautious.

    Source: Liang et al., "Cautious Optimizers: Improving Training with One Line of Code" (2024), with the scale of the
    authors' kyleliang919/C-Optim.

    Example:
        >>> from tilestep.rules import registry
        >>> careful = cautious(registry["SGD"])
        >>> careful(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]), None, lr=0.1, step=1)[0]
        tensor([0.6000, 1.0000])
    """

    def composed(param: Any, grad: Any, *states: Any, **hyper: Any) -> tuple[Any, ...]:
        update, states = _update(rule, param, grad, states, hyper)
        agrees = (update * _descending(grad, hyper) < 0).to(update.dtype)
        scale = 1 / torch.clamp(agrees.mean(), min=1e-3)
        return param + update * (agrees * scale), *states

    return compose(composed, rule, cautious)


def clip_update(rule: Rule, rms: float = 1.0) -> Rule:
    """Scale an update down to a largest root mean square, in units of the learning rate.

    Equations (u is what the rule adds to p, the mean is over one parameter tensor, lr is 1 for a rule without):
        p <- p + u / max(1, sqrt(mean(u^2)) / (lr * update_rms))

    Args:
        rule: the rule whose updates to clip.
        rms: the default of the new hyperparameter `update_rms`.

    Raises:
        ValueError: for a value out of its range.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018), section 6.

    Example:
        >>> from tilestep.rules import registry
        >>> clipped = clip_update(registry["SGD"], 1.0)
        >>> clipped(torch.tensor([0.0, 0.0]), torch.tensor([3.0, -3.0]), None, lr=0.5, step=1)[0]
        tensor([-0.5000,  0.5000])
    """

    def composed(param: Any, grad: Any, *states: Any, update_rms: Any, **hyper: Any) -> tuple[Any, ...]:
        update, states = _update(rule, param, grad, states, hyper)
        limit = update_rms * hyper.get("lr", 1.0)
        size = (update * update).mean().sqrt()
        return param + update * torch.where(size > limit, limit / size, 1.0), *states

    return compose(composed, rule, clip_update, rms, hyperparameters={"update_rms": (rms, at_least(0))})


def centralize(rule: Rule) -> Rule:
    """Subtract the mean of each output unit's gradient.

    Equations (the mean is over all dimensions but the first; one-dimensional gradients do not change):
        g <- g - mean(g)

    Args:
        rule: the rule whose gradients to centralize.

    Source: Yong et al., "Gradient Centralization: A New Optimization Technique for Deep Neural Networks" (ECCV 2020).

    Example:
        >>> from tilestep.rules import registry
        >>> centered = centralize(registry["SGD"])
        >>> centered(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), None, lr=1.0, step=1)[0]
        tensor([[ 1., -1.]])
    """

    def composed(param: Any, grad: Any, *states: Any, **hyper: Any) -> tuple[Any, ...]:
        if grad.dim() == 2:
            grad = grad - grad.mean(dim=-1, keepdim=True)
        elif grad.dim() > 2:
            grad = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
        return rule(param, grad, *states, **hyper)

    return compose(composed, rule, centralize)


def decoupled_weight_decay(rule: Rule, value: float = 1e-2) -> Rule:
    """Decay the parameter before the rule updates it.

    Equations:
        p <- p - lr * decoupled_decay * p, then the rule

    Args:
        rule: a rule with a hyperparameter `lr`.
        value: the default of the new hyperparameter `decoupled_decay`.

    Raises:
        RuleError: if the rule has no `lr`.
        ValueError: for a value out of its range.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019).

    Example:
        >>> from tilestep.rules import registry
        >>> decayed = decoupled_weight_decay(registry["Lion"], 0.5)
        >>> decayed(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), lr=0.1)[0]
        tensor([0.9500])
    """
    _require_lr("decoupled_weight_decay", rule)

    def composed(param: Any, grad: Any, *states: Any, decoupled_decay: Any, **hyper: Any) -> tuple[Any, ...]:
        return rule(param * (1 - hyper["lr"] * decoupled_decay), grad, *states, **hyper)

    return compose(
        composed, rule, decoupled_weight_decay, value, hyperparameters={"decoupled_decay": (value, at_least(0))}
    )


def cautious_weight_decay(rule: Rule, value: float = 1e-2) -> Rule:
    """Decay only elements that the update moves toward zero, or does not move.

    Equations (u is what the rule adds to p):
        a <- 1 where u * p <= 0, else 0
        p <- p + u - lr * cautious_decay * p * a
    A weight decay inside the rule counts as part of u: give the rule none (`weight_decay=0`).

    Args:
        rule: a rule with a hyperparameter `lr`.
        value: the default of the new hyperparameter `cautious_decay`.

    Raises:
        RuleError: if the rule has no `lr`.
        ValueError: for a value out of its range.

    Source: Chen et al., "Cautious Weight Decay" (2025), algorithm 1; `cautious_wd` of dion's optimizers.

    Example:
        >>> from tilestep.rules import registry
        >>> decayed = cautious_weight_decay(registry["Lion"], 0.5)
        >>> decayed(torch.ones(3), torch.tensor([1.0, 0.0, -1.0]), torch.zeros(3), lr=0.1)[0]
        tensor([0.8500, 0.9500, 1.1000])
    """
    _require_lr("cautious_weight_decay", rule)

    def composed(param: Any, grad: Any, *states: Any, cautious_decay: Any, **hyper: Any) -> tuple[Any, ...]:
        update, states = _update(rule, param, grad, states, hyper)
        decay = torch.where(update * param <= 0, hyper["lr"] * cautious_decay * param, 0.0)
        return param + update - decay, *states

    return compose(
        composed, rule, cautious_weight_decay, value, hyperparameters={"cautious_decay": (value, at_least(0))}
    )


def coupled_weight_decay(rule: Rule, value: float = 1e-2) -> Rule:
    """Add the gradient of an L2 penalty to the gradient before the rule sees it.

    Equations:
        g <- g + coupled_decay * p, then the rule     (g - coupled_decay * p with the rule's `maximize`)

    Args:
        rule: the rule to regularize.
        value: the default of the new hyperparameter `coupled_decay`.

    Raises:
        ValueError: for a value out of its range.

    Source: the `weight_decay` of torch.optim.SGD.

    Example:
        >>> from tilestep.rules import registry
        >>> decayed = coupled_weight_decay(registry["SGD"], 0.5)
        >>> decayed(torch.tensor([1.0]), torch.tensor([0.0]), None, lr=0.1, step=1)[0]
        tensor([0.9500])
    """

    def composed(param: Any, grad: Any, *states: Any, coupled_decay: Any, **hyper: Any) -> tuple[Any, ...]:
        return rule(param, decayed(grad, param, _descending(coupled_decay, hyper)), *states, **hyper)

    return compose(composed, rule, coupled_weight_decay, value, hyperparameters={"coupled_decay": (value, at_least(0))})


def ema(rule: Rule, decay: float = 0.999) -> Rule:
    """Average the weights in the update pass, in a state `ema` that starts as the parameter; evaluate at the average.

    Equations:
        the rule, then a <- a + (1 - ema_decay) * (p - a)

    Args:
        rule: the rule whose weights to average.
        decay: the default of the new hyperparameter `ema_decay`.

    Raises:
        ValueError: for a value out of its range.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with exponential
    weights; torch.optim.swa_utils.get_ema_multi_avg_fn.

    Example:
        >>> from tilestep.rules import registry
        >>> averaged = ema(registry["SGD"], 0.75)
        >>> averaged(torch.tensor([1.0]), torch.tensor([1.0]), None, torch.tensor([1.0]), lr=1.0, step=1)
        (tensor([0.]), None, tensor([0.7500]))
    """

    def composed(param: Any, grad: Any, *states: Any, ema_decay: Any, **hyper: Any) -> tuple[Any, ...]:
        *inner, average = states
        param, *inner = rule(param, grad, *inner, **hyper)
        average = average + (1 - ema_decay) * (param - average)
        return param, *inner, average

    return compose(
        composed,
        rule,
        ema,
        decay,
        states={"ema": State("param")},
        hyperparameters={"ema_decay": (decay, between(0, 1, open_high=False))},
        evaluation=lambda param, ema: ema,
    )


def lookahead(rule: Rule, k: int = 5, alpha: float = 0.5) -> Rule:
    """Lookahead: every k steps move toward slow weights, a state `slow` that starts as the parameter; evaluate there.

    Equations (t is the step count from 1):
        the rule, then every `lookahead_k` steps:
        s <- s + lookahead_alpha * (p - s)
        p <- s

    Args:
        rule: the rule that takes the fast steps.
        k: the default of the new hyperparameter `lookahead_k`.
        alpha: the default of the new hyperparameter `lookahead_alpha`.

    Raises:
        ValueError: for a value out of its range.

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back" (NeurIPS 2019), algorithm 1.

    Example:
        >>> from tilestep.rules import registry
        >>> ahead = lookahead(registry["SGD"], k=2)
        >>> ahead(torch.tensor([0.0]), torch.tensor([1.0]), None, torch.tensor([1.0]), lr=1.0, step=2)
        (tensor([0.]), None, tensor([0.]))
    """

    def composed(
        param: Any, grad: Any, *states: Any, lookahead_k: Any, lookahead_alpha: Any, **hyper: Any
    ) -> tuple[Any, ...]:
        *inner, slow = states
        param, *inner = rule(param, grad, *inner, **hyper)
        synchronizes = hyper["step"] % lookahead_k == 0
        slow = torch.where(synchronizes, slow + lookahead_alpha * (param - slow), slow)
        param = torch.where(synchronizes, slow, param)
        return param, *inner, slow

    return compose(
        composed,
        rule,
        lookahead,
        k,
        alpha,
        states={"slow": State("param")},
        hyperparameters={"lookahead_k": (k, at_least(1)), "lookahead_alpha": (alpha, between(0, 1, open_high=False))},
        uses_step=True,
        evaluation=lambda param, slow: slow,
    )


_LARGEST = 2.0**15
"""The largest element of a scaled state: half of float16's range."""


def scaled_states(rule: Rule) -> Rule:
    """Store the rule's states in float16, with a scale per state and parameter, set by its largest element.

    Equations (for each state s that begins at zero and has the parameter's shape, kept as h in 16 bits beside c):
        s <- c * h, then the rule, then
        c <- max|s| / 2^15     (1 where s is 0)
        h <- s / c
    Elements of s below about 1e-12 of its largest are lost. States take two bytes per element instead of four with
    float32 parameters and masters; the maximum costs a second pass, which recomputes the rule from the stored values.
    `state_dtype="scaled_float16"` needs no second pass, for any rule: it has a scale per block of 128 elements, so its
    bits and checkpoints differ. A scale for the whole tensor requires the second pass, and so it is part of a rule and
    not a format.

    Args:
        rule: the rule whose states to store.

    Raises:
        RuleError: if the rule has no such state.

    Source: `with_scaled_states` of apex's DistributedFusedAdam.

    Example:
        >>> from tilestep.rules import registry
        >>> scaled = scaled_states(registry["Lion"])
        >>> scaled(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor(1.0), lr=0.5, step=1)
        (tensor([0.5000]), tensor([32768.]), tensor(6.1035e-07))
    """
    _require_rule("scaled_states", rule)
    scaled = [name for name, state in rule.states.items() if state.shape == "param" and state.init == 0.0]
    if not scaled:
        raise RuleError(
            f"scaled_states({rule.name}): the rule has no state of the parameter's shape that is initialized with zeros"
        )

    def composed(param: Any, grad: Any, *states: Any, **hyper: Any) -> tuple[Any, ...]:
        kept = dict(zip(rule.state_names, states))
        scales = dict(zip(scaled, states[len(kept) :]))
        wide = {name: kept[name] if kept[name] is None else kept[name] * scales[name] for name in scaled}
        versions = {name: None if value is None else version_of(value) for name, value in wide.items()}
        param, *after = rule(param, grad, *{**kept, **wide}.values(), **hyper)
        new = dict(zip(rule.state_names, after))
        for name in scaled:
            value = new[name]
            if value is None or (value is wide[name] and version_of(value) == versions[name]):
                # The rule does not use the state with these hyperparameters.
                new[name] = kept[name]
                continue
            largest = value.abs().amax()
            scales[name] = torch.where(largest > 0, largest / _LARGEST, 1.0)
            new[name] = value / scales[name]
        return param, *new.values(), *scales.values()

    made = compose(composed, rule, scaled_states, states={f"{name}_scale": State(1.0, "scalar") for name in scaled})
    made.states.update({name: replace(rule.states[name], dtype=torch.float16) for name in scaled})
    return made


def _require_rule(label: str, rule: Any) -> None:
    if not isinstance(rule, Rule):
        name = getattr(rule, "__name__", rule)
        possible = f'tilestep.registry["{name}"]' if name in registry else "a function decorated with @tilestep.rule"
        raise RuleError(f"{label} requires a rule, not {rule!r}: pass {possible}")


def _require_lr(label: str, rule: Rule) -> None:
    _require_rule(label, rule)
    if "lr" not in rule.hyperparameters:
        raise RuleError(f"{label}({rule.name}): the decay is scaled by lr, which the rule does not have")


@torch.library.custom_op("tilestep::displacement", mutates_args=(), schema="(Tensor new, Tensor old) -> Tensor")
def displacement(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return `new - old`; in a kernel, the rule's update of `old`, without the rounding of adding and subtracting."""
    return torch.where(new == old, 0.0, new - old)  # also if both are infinite


@displacement.register_fake
def _(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new - old


def _update(
    rule: Rule, param: Any, grad: Any, states: tuple[Any, ...], hyper: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the change of the parameter by the rule, and the new states."""
    # Copies, because a rule may work in place; a kernel does not copy.
    moved, *states_after = rule(param.clone(), grad.clone(), *states, **hyper)
    return displacement(moved, param), tuple(states_after)


def _descending(value: Any, hyper: Mapping[str, Any]) -> Any:
    """Return the gradient, negated with `maximize`."""
    return -value if hyper.get("maximize") else value


def compose(
    function: Callable[..., Any],
    rule: Rule,
    composer: Callable[..., Rule],
    *arguments: Any,
    states: Mapping[str, State] = MappingProxyType({}),
    hyperparameters: Mapping[str, tuple[Any, Interval]] = MappingProxyType({}),
    uses_step: bool = False,
    evaluation: Callable[..., Any] | None = None,
) -> Rule:
    """Make a rule from `function`: the inner rule's signature, followed by new states and hyperparameters."""
    label = composer.__name__
    _require_rule(label, rule)
    taken = {*rule.state_names, *rule.hyperparameters, *rule.options}
    if clash := sorted(taken & {*states, *hyperparameters}):
        raise RuleError(f"{label}({rule.name}): the rule already has {', '.join(clash)}")
    buffers = (*rule.buffer_names, *states)
    defaults = {name: default for name, (default, _) in hyperparameters.items()}
    numbers = {**rule.hyperparameters, **defaults}
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in buffers]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=numbers[name]) for name in numbers]
    if uses_step or rule.uses_step:
        parameters.append(inspect.Parameter("step", inspect.Parameter.KEYWORD_ONLY))
    equations = inspect.cleandoc(composer.__doc__ or "").split("\n\nArgs:")[0]
    described: Any = function
    described.__signature__ = inspect.Signature(parameters)
    described.__name__ = f"{label}_{rule.__name__}"
    described.__doc__ = f"{equations}\n\nThe rule is {rule.name}: {inspect.cleandoc(rule.__doc__ or '')}"
    made = Rule(
        function,
        name=f"{label.title().replace('_', '')}{rule.name}",
        states={**rule.states, **states},
        ranges={**rule.ranges, **{name: interval for name, (_, interval) in hyperparameters.items()}},
        options=rule.options,
        keyword_only=(*rule.keyword_only, *hyperparameters),
        positional=rule.positional,
        evaluation=evaluation or rule.evaluation,
        fallback=rule.fallback,
        composition=(composer, rule, *arguments),
    )
    made.check(defaults)
    return made
