"""The execution of an optimizer's updates: at its step, unless `shard` or `overlap` attach another execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .graphs import prepare_by_hand
from .parameters import params_of

_NOTHING: AbstractContextManager[None] = nullcontext()


class Execution:
    """Runs all updates together, at the step. A new kind of execution derives from this class."""

    # `plain` is always the optimizer's default action, passed in so that an execution can wrap it.

    no_copy = ""  # why an optimizer with this execution cannot be copied or pickled; empty if it can
    creates_all_states = False
    """Whether all state is created at the first step, and not at each parameter's first gradient."""

    @property
    def applied_groups(self) -> tuple[str, ...]:
        """The groups that were updated since the last step, ahead of the next step."""
        return ()

    def step(self, plain: Callable[[], None]) -> None:
        """Take a step."""
        plain()

    def settle(self) -> None:
        """Order the current stream after all updates: before parameters or state are read."""

    def settle_everywhere(self) -> None:
        """Settle for every stream: before checkpoints, and before weights are exchanged."""
        self.settle()

    def sync_masters(self, optimizer: Any) -> None:
        """Make the masters and host copies reflect all updates, and writes of other code to parameters."""
        self.settle()
        if (plan := optimizer.plan) is not None:
            plan.memory.sync_masters()
            plan.memory.record_parameters()

    def complete_gradients(self, optimizer: Any) -> None:
        """Make all gradients available to the updates."""
        self.settle()

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """The step count of a param group; None before its first step."""
        states = (optimizer.state.get(param, {}) for param in group["params"])
        return next((state["step"] for state in states if "step" in state), None)

    def before_zero_grad(self) -> None:
        """Drop gradients that are held outside the parameters."""

    def stepped(self, optimizer: Any) -> list[torch.Tensor]:
        """Return the parameters that had a gradient in the last step."""
        engines = () if optimizer.plan is None else optimizer.plan.engines
        return [engine.holders[place] for engine in engines for place in engine.table.places]

    def part_of(self, param: torch.Tensor) -> Any:
        """Return the part of the optimizer with this parameter; parts can be stepped separately."""
        return None

    def building_plan(self) -> AbstractContextManager[None]:
        """A block in which the plan is rebuilt."""
        return _NOTHING

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint."""
        self.settle_everywhere()
        return plain()

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> None:
        """Load a checkpoint."""
        self.settle_everywhere()
        plain(state_dict)

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters as a new param group."""
        plain(param_group)

    def swap_weights(self, plain: Callable[[], None]) -> None:
        """Swap training weights and weights to evaluate in the parameters."""
        self.settle_everywhere()
        plain()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients."""
        return optimizer.memory.had_gradients or any(param.grad is not None for param in params_of(optimizer))

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a scaler's unscale function on the gradients; see `StateMemory.unscale`."""
        return optimizer.memory.unscale(optimizer, unscale, *args, **kwargs)

    def for_graph(self, optimizer: Any, *, alone: bool, replays: bool = False) -> AbstractContextManager[None]:
        """A block in which a step is captured or replayed."""
        return _NOTHING

    def prepare_capture(self, optimizer: Any) -> None:
        """Prepare a capture by hand."""
        prepare_by_hand(optimizer)


AT_STEP = Execution()  # the default execution of every optimizer
