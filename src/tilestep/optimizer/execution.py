"""When an optimizer's updates run: at its step, unless `shard` or `overlap` have attached another execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .graphs import prepare_by_hand
from .parameters import params_of

_NOTHING: AbstractContextManager[None] = nullcontext()


class Execution:
    """At the step, all updates together. A new kind of execution is a class derived from this one."""

    # `plain` is always what the optimizer does by itself; it is passed in so that an execution may do something around
    # it.

    not_copied = ""  # why an optimizer with this execution cannot be copied or pickled; empty if it can
    begins_together = False
    """Whether the state of all parameters begins at the first step, and not that of each with its first gradient."""

    @property
    def applied_groups(self) -> tuple[str, ...]:
        """The groups that were updated since the last step, before the next one."""
        return ()

    def step(self, plain: Callable[[], None]) -> None:
        """Take a step."""
        plain()

    def settle(self) -> None:
        """Let what comes next see all updates: before parameters or state are read."""

    def settle_everywhere(self) -> None:
        """As `settle`, for whatever stream it is seen from: before checkpoints, and before weights are exchanged."""
        self.settle()

    def sync_masters(self, optimizer: Any) -> None:
        """Have what updates work on see all updates, and what other code has written to parameters."""
        self.settle()
        if (plan := optimizer.plan) is not None:
            plan.home.sync_masters()
            plan.home.note_parameters()

    def complete_gradients(self, optimizer: Any) -> None:
        """Have all gradients where updates look for them."""
        self.settle()

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """The step count of a param group; None before its first step."""
        states = (optimizer.state.get(param, {}) for param in group["params"])
        return next((state["step"] for state in states if "step" in state), None)

    def before_zero_grad(self) -> None:
        """Let go of gradients that are kept elsewhere."""

    def stepped(self, optimizer: Any) -> list[torch.Tensor]:
        """The parameters that had a gradient in the last step."""
        engines = () if optimizer.plan is None else optimizer.plan.engines
        return [engine.holders[place] for engine in engines for place in engine.table.places]

    def part_of(self, param: torch.Tensor) -> Any:
        """Which part of the optimizer a parameter belongs to; parts can be stepped one by one."""
        return None

    def making_plan(self) -> AbstractContextManager[None]:
        """A block in which the plan is made anew."""
        return _NOTHING

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A checkpoint."""
        self.settle_everywhere()
        return plain()

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> None:
        """Take a checkpoint."""
        self.settle_everywhere()
        plain(state_dict)

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters as a group of their own."""
        plain(param_group)

    def hold_weights(self, plain: Callable[[], None]) -> None:
        """Let the parameters hold the weights that train, or those to evaluate."""
        self.settle_everywhere()
        plain()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients."""
        return optimizer.memory.had_gradients or any(param.grad is not None for param in params_of(optimizer))

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have a scaler's function unscale the gradients; see `StateMemory.unscale`."""
        return optimizer.memory.unscale(optimizer, unscale, *args, **kwargs)

    def for_graph(self, optimizer: Any, *, alone: bool, replays: bool = False) -> AbstractContextManager[None]:
        """A block in which a step is captured or replayed."""
        return _NOTHING

    def prepare_capture(self, optimizer: Any) -> None:
        """Get everything ready for a capture by hand."""
        prepare_by_hand(optimizer)


AT_STEP = Execution()  # the plain execution, which every optimizer begins with
