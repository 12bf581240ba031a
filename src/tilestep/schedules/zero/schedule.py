"""What `shard` attaches to an optimizer: updates of this rank's pieces at the step, sums and gathers around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import GradientError
from ...optimizer import Optimizer
from ...optimizer.attached import AttachedType
from ...optimizer.checkpoint import unchanged_on_error
from ...optimizer.graphs import prepare_capture, push, require_no_waits
from ...optimizer.parameters import require_listed_once
from ..schedule import Schedule
from .agree import check_together
from .checkpoint import full_state_dict, load_into_pieces, sharded_states
from .core import Sharding


class ShardedSchedule(Schedule):
    """The schedule of a sharded optimizer; the optimizer has its public methods, `offers`, while it is attached.

    Args:
        optimizer: the optimizer, which keeps this and not the other way round.
        sharding: buckets, their traffic, and the optimizer of this rank's pieces.
    """

    not_copied = "a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()"
    makes_plan = False

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._reference = weakref.ref(optimizer)
        self.sharding = sharding
        self._consolidated: dict[str, Any] | None = None
        """What `consolidate_state_dict` has gathered for the next `state_dict`."""
        self._shown = 0
        """How often tables of the pieces had been made when their states were last put into `state`."""
        self._overflows_are_shared = False
        """Whether overflows that a scaler has found since the last step are known on all ranks."""

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the sharded optimizer is gone: keep a reference to it")
        return optimizer

    @property
    def offers(self) -> dict[str, Any]:
        """What the optimizer has besides."""
        own = (
            self.no_sync,
            self.wait,
            self.grad_norm_of,
            self.clip_grad_norm_,
            self.full_state_dict,
            self.consolidate_state_dict,
        )
        return {method.__name__: method for method in own}

    def show_states(self) -> None:
        """Let the optimizer's `state` have the pieces' states."""
        inner, state = self.sharding.inner, self._optimizer.state
        self._shown = self.sharding.schedule.times_made
        state.clear()
        for member in self.sharding.members:
            if member.piece is not None and member.piece in inner.state:
                state[member.param] = inner.state[member.piece]

    def _follow_states(self) -> None:
        """Let `state` have the pieces' states if these were made anew."""
        if self._shown != self.sharding.schedule.times_made:
            self.show_states()

    def states_replaced(self, optimizer: Any) -> None:
        """The pieces' states are others."""
        self.show_states()

    def updating(self, optimizer: Any) -> Any:
        """The optimizer of this rank's pieces."""
        return self.sharding.inner

    def step(self, plain: Callable[[], None]) -> None:
        """Update this rank's pieces and send them to the others."""
        optimizer = self._reference()
        assert optimizer is not None
        if optimizer.is_evaluating:
            raise RuntimeError("the parameters hold the weights to evaluate: call train() before step()")
        if hasattr(optimizer, "found_inf") and not self._overflows_are_shared:
            raise GradientError(
                "a scaler has looked for overflows on this rank alone, and scales of ranks would drift apart: use "
                "tilestep.GradScaler or torch.amp.GradScaler, which ask all of them; nothing was updated"
            )
        self._overflows_are_shared = False
        self.sharding.step(optimizer)
        if self._shown != self.sharding.schedule.times_made:
            self.show_states()

    def sync_masters(self, optimizer: Any) -> None:
        """Have the pieces be what the parameters are, which all are here."""
        self.sharding.sync_masters()

    def complete_gradients(self, optimizer: Any) -> Any:
        """Have the pieces hold their summed gradients; all ranks call it."""
        self.sharding.ready()
        return self.sharding.inner

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """As of a plain optimizer; that of the pieces of other groups where a rank has none of this one."""
        own = super().step_of(optimizer, group)
        members = (self.sharding.member_of[param] for param in group["params"])
        if own is not None or not any(map(self.sharding.holds_state, members)):
            return own
        steps = [state["step"] for state in self.sharding.inner.state.values() if "step" in state]
        return torch.stack(steps).amax() if steps else None

    @torch.no_grad()
    def present_gradients(self, optimizer: Any) -> list[tuple[Any, torch.Tensor]]:
        """Parameters with this rank's pieces of their gradients, summed up; all ranks call it."""
        self.complete_gradients(optimizer)
        pieces = [(member.param, member.piece) for member in self.sharding.members if member.piece is not None]
        return [(param, piece.grad) for param, piece in pieces if piece.grad is not None]

    def no_sync(self) -> Any:
        """A block in which backward only accumulates gradients on this rank; the next one outside sums them up."""
        return self.sharding.gradients.no_sync()

    def wait(self) -> None:
        """Have every parameter that the last step has updated on other ranks, and offloaded state.

        Only needed before parameters are read that are not looked up in their module, as those in a list of one's own.
        """
        self.sharding.inner.memory.wait()
        self.sharding.parameters.wait_all()

    def before_zero_grad(self) -> None:
        """Drop gradients that are summed up already too."""
        self.sharding.gradients.reset()

    def grad_norm_of(self, params: Iterable[torch.Tensor], process_group: Any = None) -> torch.Tensor:
        """The 2-norm of some parameters' gradients, summed up over the ranks, before the step uses them.

        All ranks must call it, with the same parameters. A loss scale that the gradients carry is in it.

        Args:
            params: one or more parameters of the optimizer.
            process_group: a group of ranks with other parts of these parameters, as tensor-parallel ones, whose norms
                are to be in it; all of them call it too.

        Returns:
            A scalar on the device, float64 if a parameter is, else float32; the same on all ranks, not yet read.

        Raises:
            ValueError: for a tensor that is no parameter of the optimizer.
        """
        listed = [params] if isinstance(params, torch.Tensor) else params
        return self.sharding.norm_of(listed, [] if process_group is None else [process_group])

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | torch.Tensor,
        params: Iterable[torch.Tensor] | None = None,
        process_group: Any = None,
    ) -> torch.Tensor:
        """Scale summed gradients so that their 2-norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        For what `max_grad_norm` does not do: a clip of some parameters, or one between a scaler's `unscale_` and its
        `step`. All ranks must call it. Gradients are changed in place, by a pass of its own.

        Args:
            max_norm: the largest norm.
            params: the parameters; None for all, with those of the `norm_groups` that `shard` was given. The gradients
                of others stay as they are.
            process_group: as for `grad_norm_of`.

        Returns:
            The norm before, as from `grad_norm_of`.

        Raises:
            ValueError: for a tensor that is no parameter of the optimizer.
        """
        sharding = self.sharding
        if params is None:
            listed, groups = [member.param for member in sharding.members], sharding.deciders.others
        else:
            listed = [params] if isinstance(params, torch.Tensor) else list(params)
            groups = []
        norm = sharding.norm_of(listed, [*groups, *([] if process_group is None else [process_group])])
        gradients = sharding.gradients_of(listed)
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of the state, for `torch.distributed.checkpoint`, as tensors of the parameters' shapes.

        No rank waits for another. Loading it on another number of ranks, or in an optimizer that is not sharded, is
        `torch.distributed.checkpoint`'s work; `full_state_dict` is for everything else.
        """
        if self._consolidated is not None:
            consolidated, self._consolidated = self._consolidated, None
            return consolidated
        return self._own_state_dict(plain)

    def _own_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with sharded_states(self._optimizer, self.sharding):
            self._optimizer.control.numbers = self.sharding.inner.control.numbers
            return plain()

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state as the optimizer would have it if it were not sharded, gathered tensor by tensor into CPU memory.

        All ranks must call it.

        Args:
            rank: the one that wants it, by its place among those that share the optimizer; None for all.

        Returns:
            A state_dict that optimizers of the same rule take, torch's too; an empty one on ranks that did not ask.
        """
        optimizer = self._optimizer
        return full_state_dict(optimizer, self.sharding, rank, self._own_state_dict(optimizer.plain_state_dict))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all of the state on one rank, whose next `state_dict()` has it, as frameworks do before they save.

        All ranks must call it, as torch's ZeroRedundancyOptimizer's. The other ranks' `state_dict()` stays their part.

        Args:
            to: the rank, by its place among those that share the optimizer.
        """
        self._consolidated = self.full_state_dict(to) or None

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], None]) -> None:
        """Take a checkpoint: what `state_dict` has given here, or a full one of any optimizer of the rule."""
        self.sharding.invalidate()
        load_into_pieces(self.sharding, self._optimizer, state_dict)
        self.show_states()

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters of the model as a group, in buckets of their own.

        All ranks must call it, when there are no gradients.

        Raises:
            ValueError: for parameters that are not the model's, and if ranks differ.
            RuntimeError: if there are gradients: add groups after a step, or after `zero_grad`. All ranks raise, and
                nothing is changed.
        """
        sharding, optimizer = self.sharding, self._optimizer
        with unchanged_on_error(optimizer):
            own = self._added(lambda: plain(param_group))
            said = sharding.ranks.everyone("" if own is None else str(own))
            if any(said):
                rank = next(rank for rank, text in enumerate(said) if text)
                raise own or RuntimeError(f"rank {rank} cannot add the param group: {said[rank]}")
            names = check_together(optimizer, sharding.model, sharding.ranks, sharding.options)
        sharding.add_group(optimizer, names)
        self.show_states()

    def _added(self, add: Callable[[], None]) -> Exception | None:
        """Add a group as an optimizer does that is not sharded; why it cannot be."""
        if self._optimizer.is_evaluating:
            return RuntimeError("the parameters hold the weights to evaluate: call train() before add_param_group()")
        if not self.sharding.gradients.is_idle:
            return RuntimeError("add param groups right after step() or zero_grad(): there are gradients now")
        try:
            add()
            require_listed_once("shard()", self._optimizer)
        except (TypeError, ValueError, RuntimeError) as error:
            return error
        return None

    def hold_weights(self, training: bool, plain: Callable[[], None]) -> None:
        """Let the pieces hold the weights that train or those to evaluate, and send them to the other ranks."""
        # What is on its way is read until it has arrived.
        self.sharding.sync_masters()
        self.sharding.invalidate()
        self.sharding.inner.train(training)
        self._optimizer.is_evaluating = self.sharding.inner.is_evaluating
        self._follow_states()
        # Of all: what is frozen now may have been averaged before.
        self.sharding.parameters.gather()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients, on any rank."""
        return self.sharding.has_gradients

    @staticmethod
    def route(unscale: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """What torch's scalers do with a sharded optimizer."""
        return optimizer.unscale_with(unscale, *args, **kwargs)

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Unscale the pieces; overflows of one rank are those of all."""
        flags = unscale(self.sharding.unscalable(), *args, **kwargs)
        for flag in flags.values():
            self.sharding.deciders.add(flag)
        self._overflows_are_shared = True
        return flags

    @contextmanager
    def for_graph(self, optimizer: Any, *, alone: bool, replays: bool = False) -> Iterator[Any]:
        """A block in which a step is captured or replayed on the optimizer of this rank's pieces."""
        sharding = self.sharding
        sharding.prepare_graph(optimizer, alone=alone, replays=replays)
        sharding.captures_alone = alone and not replays
        try:
            yield sharding.inner
        finally:
            sharding.captures_alone = False
        self._follow_states()
        if replays:
            sharding.replayed(alone=alone)

    def prepare_capture(self, optimizer: Any) -> None:
        """Get ready; the graph has to hold backward too, or to be made by `tilestep.capture`."""
        require_no_waits(optimizer)
        with self.for_graph(optimizer, alone=False) as updating:
            prepare_capture(updating)

    def push(self, optimizer: Any) -> None:
        """Bring what changed to the device before a replay."""
        with self.for_graph(optimizer, alone=False, replays=True) as updating:
            push(updating)


if TYPE_CHECKING:

    class ShardedOptimizer(Optimizer):
        """For type checkers: an optimizer with the methods that `shard` adds."""

        no_sync: Callable[[], Any]
        wait: Callable[[], None]
        full_state_dict: Callable[..., dict[str, Any]]
        consolidate_state_dict: Callable[..., None]
        grad_norm_of: Callable[..., torch.Tensor]
        clip_grad_norm_: Callable[..., torch.Tensor]

else:

    class ShardedOptimizer(metaclass=AttachedType):
        """An optimizer whose state is split over ranks; made by `tilestep.shard`, of the class that it was before.

        It is used as before, with the methods of `ShardedSchedule` besides. `state_dict` holds this rank's pieces, for
        `torch.distributed.checkpoint`; `full_state_dict` gathers all of it. `optimizer.state` has this rank's pieces,
        flat, or by rows that end inside of a block.
        """

        attached_as = ("shard",)
