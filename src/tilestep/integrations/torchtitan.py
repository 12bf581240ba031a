"""torchtitan: an `OptimizersContainer` with all of tilestep's rules, and one norm over all parts of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import named_kind, require, set_max_grad_norm, without_limit

require("torchtitan")

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402

from ..optimizer import joint_norm  # noqa: E402

_NO_DECAY = r"bias$|norm"


class TilestepOptimizers(OptimizersContainer):
    """torchtitan's container, with tilestep's optimizers; `optimizer_name` is the name of a tilestep class.

    `fused` and `foreach` change nothing; `implementation="fused_opt_states_bf16"` is `state_dtype=torch.bfloat16`.

    Args:
        config: torchtitan's config, with `max_norm`.
        model_parts: the model's parts.

    Raises:
        NotImplementedError: for an optimizer that tilestep does not have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's config, with `max_norm`."""

        max_norm: float | None = None
        """Clip inside the steps by one norm over all optimizers of all parts; None leaves it to torchtitan, which
        clips before the step. With this set `training.max_norm` to `float("inf")`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._max_norm, self._without_limit = config.max_norm, without_limit(self.optimizers, config.max_norm)
        if config.max_norm and len(self.optimizers) > 1:
            joint_norm(self.optimizers)

    @staticmethod
    def _build_impl_kwargs(config: Config) -> dict[str, Any]:
        kwargs: dict[str, Any] = OptimizersContainer._build_impl_kwargs(config)
        if config.implementation == "fused_opt_states_bf16":
            kwargs["state_dtype"] = torch.bfloat16
        if config.max_norm:
            kwargs["max_grad_norm"] = config.max_norm
        return kwargs

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        return named_kind(name, NotImplementedError)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torchtitan's `load_state_dict`; the clip of the config stays."""
        super().load_state_dict(state_dict)
        set_max_grad_norm(self._without_limit, self._max_norm)

    def _register_bf16_optimizer_state_hook(self) -> None:
        """Nothing: groups have a `state_dtype`."""

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of the last step's gradients over all optimizers, a scalar on the device; the host does not wait."""
        return self.optimizers[0].grad_norm


def tilestep_optimizer(
    name: str = "AdamW",
    lr: float = 8e-4,
    weight_decay: float = 0.1,
    max_norm: float | None = None,
    no_decay: str | None = _NO_DECAY,
    **arguments: Any,
) -> TilestepOptimizers.Config:
    """The `optimizer` entry of a torchtitan config.

    Args:
        name: the name of the optimizer's class.
        lr: the learning rate.
        weight_decay: the weight decay of all parameters that do not match `no_decay`.
        max_norm: clip inside the step, see `TilestepOptimizers.Config`.
        no_decay: regular expression of the parameters that do not decay; None if all do. Some must match.
        arguments: further arguments of the optimizer.

    Example:
        >>> config = tilestep_optimizer(lr=3e-4, max_norm=1.0, betas=(0.9, 0.95))
        >>> optimizers = config.build(model_parts=[torch.nn.Linear(2, 2)])
        >>> [group["weight_decay"] for group in optimizers.optimizers[0].param_groups]
        [0.0, 0.1]
    """
    decays = [*([(no_decay, 0.0)] if no_decay else []), (r".*", weight_decay)]
    groups = [
        ParamGroupConfig(
            pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": lr, **arguments, "weight_decay": decay}
        )
        for pattern, decay in decays
    ]
    return TilestepOptimizers.Config(param_groups=groups, max_norm=max_norm)
