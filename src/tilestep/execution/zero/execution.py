"""The execution of a sharded optimizer: reduces gradients, updates this rank's sections, gathers parameters."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ...compat import is_capturing
from ...errors import GradientError
from ...optimizer import Optimizer
from ...optimizer.execution import Execution
from ...optimizer.graphs import prepare_capture, require_no_waits
from ...optimizer.parameters import evaluating, require_listed_once
from ...placement.combinations import refuse_replaced
from ...runtime.capturing import PREPARE, require
from ...timeline.side_stream import SideStream
from ...timeline.timeline import gradientless, refuse_another_taker, refuse_taken_by_another
from .checkpoint import sharded_states
from .core import Sharding
from .moves import ParameterSync, ReduceScatter
from .ranks import StepMessage, attempt_together, validate_across_ranks


class ShardedExecution(Execution):
    """Reduces gradients in backward, updates this rank's sections in the step, and gathers the parameters after it."""

    not_copied = "a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()"
    begins_together = True

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._reference = weakref.ref(optimizer)
        self.sharding = sharding
        self.channel = SideStream(sharding.device, priority=-1)
        message = StepMessage(self._reference, sharding.ranks, sharding.members[0].name)
        self.gradients = ReduceScatter(sharding, self.channel, message)
        self.parameters = ParameterSync(sharding, self.channel)
        # The gradients that were given to the sections: where they are, and for each parameter whether it has one and
        # whether it trains.
        self._sections: list[torch.Tensor | None] = []
        self._has_gradient, self._trains = tuple[bool, ...](), b""
        self._unmoved = False  # whether these were the gradients of the last step, and no section was written to since
        self._captures_alone = False  # whether a step is being captured without its backward
        self.consolidated: dict[str, Any] | None = None  # gathered for the next `state_dict`
        self._overflows_are_shared = False  # whether a scaler has combined its overflow flags since the last step

    @property
    def optimizer(self) -> Optimizer:
        """The sharded optimizer."""
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the sharded optimizer is gone: keep a reference to it")
        return optimizer

    def making_plan(self) -> AbstractContextManager[None]:
        self.sharding.require_groups(self.optimizer)
        return super().making_plan()

    def step(self, plain: Callable[..., None]) -> None:
        """Update this rank's sections and begin to gather the parameters."""
        optimizer = self._reference()
        assert optimizer is not None
        if optimizer.is_evaluating:
            raise evaluating("step()")
        if hasattr(optimizer, "found_inf") and not self._overflows_are_shared:
            raise GradientError(
                "a scaler has looked for overflows on this rank alone, and scales of ranks would drift apart: use "
                "tilestep.GradScaler or torch.amp.GradScaler, which ask all of them; nothing was updated"
            )
        self._overflows_are_shared = False
        sharding, gradients = self.sharding, self.gradients
        if [group.get("rule") for group in optimizer.param_groups] != sharding.rules:
            # Other parameters need a new plan, which checks them.
            sharding.require_groups(optimizer)
        captures = is_capturing()
        if captures:
            able = sharding.ranks.can_be_captured
            require(able, "its ranks communicate by a backend that graphs cannot hold; NCCL can")
            require(not self.parameters.publication.tickets, f"parameters are still on their way; {PREPARE}")
        self._make_ready(captures)
        if not self._unmoved and 0 in self._has_gradient:
            refuse_replaced(sharding.model, sharding.member_of)
        if captures:
            require(
                self._captures_alone or gradients.summed_in_graph,
                "its gradients were summed before the graph: capture backward too, or use tilestep.capture(optimizer)",
            )
        # Nothing else holds the sections and their gradients: they are unchanged since the last step, unless this
        # execution has changed them. A capture looks at every tensor.
        unmoved = not captures and self._unmoved
        self._unmoved, self.consolidated = False, None
        # A parameter that was frozen after its gradient was reduced is updated: torch updates all that have a gradient.
        updates = bytes(sums.was_summed or sums.bucket.trains for sums in gradients.sums)
        plain(unmoved=unmoved)
        self._unmoved = True
        if not unmoved:
            sharding.note_stepped(gradients.timeline.params, self._has_gradient, self._trains)
        if not captures or gradients.summed_in_graph:
            gradients.forget()
        self.parameters.gather(updates, captures)

    @gradientless
    def sync_masters(self, optimizer: Any, versions: int | None = None) -> None:
        """Wait for all parameters, and take over writes of other code; `versions`: their sum, if it is known."""
        params = self.parameters
        params.publication.wait_all()
        written = [self.sharding.member_of[param].piece for param in params.written(versions)]
        if written:
            self._unmoved = False
            torch.autograd.graph.increment_version([piece for piece in written if piece is not None])

    @gradientless
    def complete_gradients(self, optimizer: Any) -> None:
        """Give the sections their reduced gradients and the parameters' values; all ranks call it."""
        self._make_ready(is_capturing())

    def _make_ready(self, captures: bool) -> None:
        """As `complete_gradients`, without gradients."""
        gradients, timeline = self.gradients, self.gradients.timeline
        if not timeline.is_alone:
            refuse_another_taker(timeline)
        versions, trains, has_gradient = gradients.finish(captures)
        if gradients.message.trains != gradients.trains:
            gradients.follow_trains()
        params = self.parameters
        if params.publication.tickets or params.is_exact or versions != params.writes.total or params.fixed.look(1):
            self.sync_masters(None, versions)
        sections = [sums.section for sums in gradients.sums]
        known = (self._has_gradient, self._trains) == (has_gradient, trains)
        if not known or not all(map(operator.is_, self._sections, sections)):
            missing = [param for param, has_one in zip(timeline.params, has_gradient) if not has_one]
            refuse_taken_by_another(missing, timeline)
            section_of = {sums.bucket: sums.section for sums in gradients.sums}
            members = [self.sharding.member_of[param] for param in timeline.params]
            for member, has_one, is_trained in zip(members, has_gradient, trains):
                left_behind = has_one or member.param.grad is not None
                if left_behind and not is_trained and section_of[member.bucket] is None:
                    raise GradientError(
                        f"{member.name} has a gradient and is frozen, as all parameters of its bucket: the gradient is "
                        "not summed over the ranks. Freeze parameters after the backward outside of no_sync() or after "
                        "step(), or set their .grad to None"
                    )
            self._sections, self._has_gradient, self._trains, self._unmoved = sections, has_gradient, trains, False
            for member, has_one, is_trained in zip(members, has_gradient, trains):
                member.take_gradient(section_of[member.bucket] if has_one else None, bool(is_trained))

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """As of a plain optimizer; the step count of other groups on a rank without shares of this group."""
        own = super().step_of(optimizer, group)
        members = (self.sharding.member_of[param] for param in group["params"])
        if own is not None or not any(self.sharding.holds_state(optimizer, member) for member in members):
            return own
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return torch.stack(steps).amax() if steps else None

    def before_zero_grad(self) -> None:
        """Drop reduced gradients too."""
        self.gradients.reset()

    def stepped(self, optimizer: Any) -> list[torch.Tensor]:
        return [param for param, has_one in zip(self.gradients.timeline.params, self._has_gradient) if has_one]

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of the state, for `torch.distributed.checkpoint`, as tensors of the parameters' shapes.

        No rank waits for another. Loading it on another number of ranks, or in an optimizer that is not sharded, is
        `torch.distributed.checkpoint`'s work; `full_state_dict` is for everything else.
        """
        consolidated, self.consolidated = self.consolidated, None
        return consolidated or self.own_state_dict(plain)

    def own_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        optimizer = self.optimizer
        self.sharding.require_groups(optimizer)
        self.sync_masters(optimizer)
        if optimizer.plan is not None:
            optimizer.plan.masters.sync()
        with sharded_states(optimizer, self.sharding):
            return plain()

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> None:
        """Take a checkpoint or nothing: what `state_dict` has given, or a full one of any optimizer of the rule."""
        self._unmoved, self.consolidated = False, None
        optimizer, held_averages = self.optimizer, self.optimizer.is_evaluating
        self.sharding.require_groups(optimizer)
        if held_averages:
            self.sync_masters(optimizer)
        for member in self.sharding.members:
            if member.piece is not None:
                member.piece.requires_grad_(member.param.requires_grad)
        begun = plain(state_dict)
        if held_averages:
            self.parameters.gather()
        for member in self.sharding.members:
            # A checkpoint with any state gives state to all parameters that train.
            has_state = member.param in begun or (begun and member.param.requires_grad)
            member.has_begun = True if has_state else None

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters of the model as a group, in buckets of their own; all ranks call it, without gradients."""
        sharding, optimizer = self.sharding, self.optimizer

        def add() -> None:
            sharding.require_groups(optimizer)
            if optimizer.is_evaluating:
                raise evaluating("add_param_group()")
            if self.gradients.timeline.is_open or any(self.gradients.timeline.taken):
                raise RuntimeError("add param groups right after step() or zero_grad(): there are gradients now")
            plain(param_group)
            require_listed_once("shard()", optimizer)

        attempt_together(sharding.ranks, add, "add the param group", RuntimeError)
        names = validate_across_ranks(optimizer, sharding.model, sharding.ranks, sharding.options)
        self.sync_masters(optimizer)
        buckets = sharding.lay_out(optimizer, names)
        self.gradients.take_in(buckets)
        self.parameters.take_in(buckets)
        self._has_gradient = ()

    def hold_weights(self, plain: Callable[[], None]) -> None:
        """Write the weights that train, or the weights to evaluate, into the sections, and gather the parameters."""
        # Gathers read the sections until they have finished.
        self.sync_masters(self.optimizer)
        self._unmoved = False
        plain()
        # All buckets: a parameter that is frozen now may have an average.
        self.parameters.gather()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients, on any rank."""
        return any(self._has_gradient)

    @gradientless
    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Unscale the sections' gradients; an overflow on one rank is an overflow on all ranks."""
        self._make_ready(is_capturing())
        sharding = self.sharding
        dtypes = {bucket.grad_dtype for bucket in sharding.buckets if bucket.trains and self.had_gradients(optimizer)}
        # A scaler has a flag for each device and dtype that it finds: all ranks must find the same.
        empty = [torch.zeros(0, dtype=dtype, device=sharding.device, requires_grad=True) for dtype in dtypes]
        for tensor in empty:
            tensor.grad = torch.zeros_like(tensor)
        sections = [member.piece for member in sharding.members if member.piece is not None]
        scaled = SimpleNamespace(param_groups=[{"params": [*sections, *empty]}])
        flags = unscale(scaled, *args, **kwargs)
        for flag in flags.values():
            sharding.deciders.add(flag)
        self._overflows_are_shared = True
        return flags

    @contextmanager
    def for_graph(self, optimizer: Any, *, alone: bool, replays: bool = False) -> Iterator[None]:
        """A block in which a step is captured or replayed: gradients and parameters are complete."""
        if not replays:
            require_no_waits(optimizer)
        self.sharding.require_groups(optimizer)
        if alone:
            self.complete_gradients(optimizer)
        else:
            self.sync_masters(optimizer)
        self.channel.settle()
        if not replays:
            self.parameters.publication.wait_on_host()
        self._captures_alone = alone and not replays
        try:
            yield
        finally:
            self._captures_alone = False
        if replays:
            if alone:
                self.gradients.forget()
            self.parameters.note_update()

    def prepare_capture(self, optimizer: Any) -> None:
        """Prepare a capture; the graph must contain backward too, or be made by `tilestep.capture`."""
        with self.for_graph(optimizer, alone=False):
            prepare_capture(optimizer)
