"""torchtitan's container of optimizers: what docs/frameworks/torchtitan.md says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilestep

optimizer = pytest.importorskip("torchtitan.components.optimizer")


class TilestepOptimizers(optimizer.OptimizersContainer):  # type: ignore[name-defined, misc]
    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(tilestep, name)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def optimizers(container: Any, module: torch.nn.Module, implementation: str) -> Any:
    kinds = {r"bias$": {"lr": 1e-2, "weight_decay": 0.0}, r".*": {"lr": 1e-2}}
    groups = [
        optimizer.ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=arguments)
        for pattern, arguments in kinds.items()
    ]
    config = optimizer.OptimizersContainer.Config(param_groups=groups, implementation=implementation)
    return container(config, model_parts=[module])


def train(module: torch.nn.Module, container: Any, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(8, 8, generator=generator)
        (module(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        container.step()
        container.zero_grad()


def test_numbers_are_those_of_torch_s_optimizer() -> None:
    expected, module = model(), model()
    train(expected, optimizers(optimizer.OptimizersContainer, expected, "for-loop"), 5)
    train(module, optimizers(TilestepOptimizers, module, "fused"), 5)
    for one, other in zip(expected.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_resumed_training_is_the_same_to_the_bit() -> None:
    whole, resumed = model(), model()
    container = optimizers(TilestepOptimizers, whole, "fused")
    train(whole, container, 3)
    saved = {name: value.clone() if torch.is_tensor(value) else value for name, value in container.state_dict().items()}
    resumed.load_state_dict(whole.state_dict())
    train(whole, container, 3, seed=1)
    again = optimizers(TilestepOptimizers, resumed, "fused")
    again.load_state_dict(saved)
    train(resumed, again, 3, seed=1)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_asking_for_a_state_before_the_first_step_changes_no_parameter() -> None:
    module = model()
    before = [parameter.clone() for parameter in module.parameters()]
    assert optimizers(TilestepOptimizers, module, "fused").state_dict()
    for one, other in zip(before, module.parameters(), strict=True):
        assert torch.equal(one, other)
