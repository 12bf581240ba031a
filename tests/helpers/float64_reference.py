"""Optimizers over every layout of tensors, and what their rule itself makes of each step in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from remainder_patterns import joined

import tilestep
from tilestep.optimizer.masters import MasterWeights
from tilestep.rules import Rule
from tilestep.rules.scalars import precision_of

OTHER_VALUES = {"weight_decay": 0.03, "eps": 1e-3, "momentum_decay": 0.01, "lambd": 0.01}

Make = Callable[[torch.dtype, torch.Generator], torch.Tensor]


def normal(*shape: int) -> Make:
    """Drawn on the CPU, so that every device gets the same, then moved to the default device."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(torch.get_default_device(), dtype)

    return make


def changed(make: Make, change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    return lambda dtype, generator: change(make(dtype, generator))


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last)


# Each parameter beside its gradient: the layouts in which tensors meet an optimizer.
LAYOUTS: dict[str, tuple[Make, Make]] = {
    "contiguous": (normal(33, 65), normal(33, 65)),
    "many tiles": (normal(20_003), normal(20_003)),
    "no dimensions": (normal(), normal()),
    "empty": (normal(0, 3), normal(0, 3)),
    "one element": (normal(1, 1), normal(1, 1)),
    "channels last": (changed(normal(3, 4, 5, 2), channels_last), changed(normal(3, 4, 5, 2), channels_last)),
    "transposed": (changed(normal(17, 9), torch.t), changed(normal(17, 9), torch.t)),
    "gaps": (changed(normal(20, 15), lambda base: base[2:11, 1:14:2]), normal(9, 7)),
    "gaps in both": (
        changed(normal(20, 15), lambda base: base[2:11, 1:14:2]),
        changed(normal(9, 14), lambda base: base[:, ::2]),
    ),
    "unaligned": (changed(normal(1001), lambda base: base[1:]), changed(normal(1003), lambda base: base[3:])),
    "gradient transposed": (normal(8, 12), changed(normal(12, 8), torch.t)),
    "gradient channels last": (normal(2, 3, 4, 5), changed(normal(2, 3, 4, 5), channels_last)),
    "gradient contiguous": (changed(normal(2, 3, 4, 5), channels_last), normal(2, 3, 4, 5)),
    "gradient expanded": (normal(6, 7), changed(normal(), lambda one: one.expand(6, 7))),
    "permuted": (changed(normal(3, 4, 5, 6), lambda base: base.permute(2, 0, 3, 1)), normal(5, 3, 6, 4)),
}


def other_values(rule: Rule) -> dict[str, Any]:
    """Hyperparameters that differ from the defaults, for a second group."""
    values = {key: value for key, value in OTHER_VALUES.items() if isinstance(rule.hyperparameters.get(key), float)}
    values["lr"] = 0.37 * float(rule.hyperparameters["lr"])
    if "betas" in rule.hyperparameters:
        values["betas"] = tuple(0.9 * beta for beta in rule.hyperparameters["betas"])
    return values


class Run:
    """An optimizer with a group of every layout, a second group, and one parameter that gets no gradient."""

    def __init__(self, rule: Rule, dtype: torch.dtype, master: MasterWeights, **hyper: Any) -> None:
        self.rule, self.dtype = rule, dtype
        self.generator = torch.Generator().manual_seed(len(rule.name))
        self.params: dict[tuple[int, str], torch.nn.Parameter] = {}
        for group in range(2):
            for label, (make, _) in list(LAYOUTS.items())[: None if group == 0 else 5]:
                tensor = make(dtype, self.generator)
                self.params[group, label] = torch.nn.Parameter(tensor)
        self.idle = torch.nn.Parameter(torch.ones(5, dtype=dtype))
        groups = [
            {"params": [self.idle, *(param for (index, _), param in self.params.items() if index == 0)]},
            {"params": [param for (index, _), param in self.params.items() if index == 1], **other_values(rule)},
        ]
        self.optimizer = tilestep.Optimizer(groups, rule, master_weights=master, **hyper)
        # The first step is compared with the rule too, from the buffers that it begins with.
        self.optimizer.fitting_plan(ahead=True)

    def set_gradients(self) -> None:
        for (_, label), param in self.params.items():
            param.grad = LAYOUTS[label][1](self.dtype, self.generator)

    def buffers(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of what a step changes, by name; a parameter with a remainder has the master that they are."""
        found = {"param": param.detach().clone(), **{k: v.clone() for k, v in self.optimizer.state[param].items()}}
        if "remainder_param" in found:
            found["master_param"] = joined(found["param"], found.pop("remainder_param"))
        return found

    def reference(self, group: int, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What the rule itself makes of the buffers as they are, in float64."""
        before = self.buffers(param)
        start = before.get("master_param", before["param"]).double()
        step = before["step"].item() + 1
        if not param.numel():
            return {"param": before["param"], "step": torch.tensor(step)}
        assert param.grad is not None
        states = [before[name].double() if name in before else None for name in self.rule.state_names]
        chosen = self.optimizer.param_groups[group]
        hyper = {key: chosen[key] for key in self.rule.hyperparameters}
        # In float64 a rule that asks for the machine epsilon would get another one than the buffers have.
        token = precision_of.set(lambda _: torch.finfo(before.get("master_param", before["param"]).dtype).eps)
        try:
            results = self.rule(start, param.grad.double(), *states, **hyper, step=step)
        finally:
            precision_of.reset(token)
        wanted = dict(zip(("param", *self.rule.state_names), results))
        wanted["step"] = torch.tensor(step)
        if "master_param" in before:
            wanted["master_param"] = wanted["param"]
        return {name: wanted[name] for name in before if name in wanted}


def check(label: str, got: torch.Tensor, wanted: torch.Tensor, compute: torch.dtype) -> None:
    """Equal up to the rounding of a few dozen operations in the compute type and of one store.

    A store rounds by half a unit in the last place, finfo.eps / 2 of the value, and near zero by half the smallest
    denormal. Errors of the operations are relative to the largest terms that were added, not to what is left of them.
    """
    stored, computed = torch.finfo(got.dtype), torch.finfo(compute)
    scale = wanted.abs().mean().item() if wanted.numel() > 9 else 1.0
    relative = stored.eps / 2 + 32 * computed.eps
    absolute = stored.smallest_normal * stored.eps + 32 * computed.eps * scale
    wanted = wanted.broadcast_to(got.shape)
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=relative, atol=absolute, msg=lambda text: f"{label}: {text}"
    )


def check_steps(rule: Rule, dtype: torch.dtype, master: MasterWeights, **hyper: Any) -> Run:
    """Three steps, each compared with the rule in float64 from the same buffers."""
    run = Run(rule, dtype, master, **hyper)
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    strides = {key: param.stride() for key, param in run.params.items()}
    for _ in range(3):
        run.set_gradients()
        wanted = {key: run.reference(key[0], param) for key, param in run.params.items()}
        run.optimizer.step()
        for (group, label), param in run.params.items():
            assert param.stride() == strides[group, label]
            stepped = run.buffers(param)
            for name, value in wanted[group, label].items():
                check(f"{name} of {label!r} in group {group}", stepped[name], value, compute)
    assert torch.equal(run.idle.detach(), torch.ones_like(run.idle))
    assert run.optimizer.state[run.idle]["step"] == 0
    return run
