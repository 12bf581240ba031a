"""`shard`: an optimizer of which every rank keeps and updates its part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..combinations import refusal
from ..compat import route_unscaling
from ..engine import DeviceEngine
from ..errors import GradientError
from ..optimizer import Optimizer
from ..optimizer.checkpoint import unchanged_on_error
from ..optimizer.extended import extended_class
from ..optimizer.graphs import prepare_capture, require_no_waits
from ..optimizer.making import made_for
from ..optimizer.parameters import labelled, require_listed_once, require_shapes
from ..pairs import REAL_INSTEAD
from .agree import apart_from_others, check_together, plain_module, tried_together
from .buckets import Options
from .checkpoint import begun_state, full_state_dict, load_into_pieces, sharded_states, steps_behind
from .core import Sharding
from .groups import ranks_of

__all__ = ["ShardedOptimizer", "shard"]


def shard(
    optimizer: Optimizer | Callable[[], Optimizer],
    model: nn.Module,
    mesh: Any = None,
    *,
    overlap_grad_sync: bool = True,
    overlap_param_sync: bool = True,
    bucket_cap_mb: float | None = None,
    grad_sync_dtype: torch.dtype | None = None,
    param_sync_dtype: torch.dtype | None = None,
    grad_buffer: str = "contiguous",
    param_buffer: str = "contiguous",
    average: bool = True,
    norm_groups: Sequence[Any] = (),
) -> ShardedOptimizer:
    """Split an optimizer over data-parallel ranks: each keeps 1/N of the state and updates 1/N of the parameters.

    Gradients are summed over the ranks while backward runs, each bucket as soon as its gradients are complete; updated
    parameters are sent to the other ranks while what follows the step already runs, and whoever looks one up in its
    module waits for its bucket alone. Every rank begins with the first rank's parameters and buffers.

    The optimizer itself becomes a `ShardedOptimizer`, with the same param groups; schedulers made before hold it still.
    After `step()` gradients are used up. Between backward and step the parameters' `grad` is None: the summed gradients
    are in the buckets, so clip with `max_grad_norm` or `clip_grad_norm_` of the optimizer.

    Args:
        optimizer: any optimizer of tilestep's; state it has is taken along. Or a function that makes one: then no rank
            ever has more than its part of the state.
        model: the plain module that has its parameters, not wrapped for data parallelism.
        mesh: None for all ranks; or a DeviceMesh of one dimension, or of two that are called "shard" and "replicate":
            state is split over the first and held in copies over the second. Without names the second splits.
        overlap_grad_sync: sum up buckets during backward, not at the step.
        overlap_param_sync: send parameters while the next forward runs; else they have arrived when `step()` returns,
            in the order of the current stream.
        bucket_cap_mb: MiB of gradients in a bucket; a larger parameter has a bucket of its own. None for a sixteenth of
            all, at least 25 and at most 256 MiB, at both ends of backward, and up to a sixth, at most 512 MiB, between.
        grad_sync_dtype: the type that gradients are accumulated and summed up in; None for the parameter's own.
        param_sync_dtype: the type that parameters travel in, None for their own. With a narrower floating-point type
            the rank that updates a parameter keeps the exact one; with an integer type the bytes travel as they are.
        grad_buffer: "contiguous" keeps memory for all gradients, in which they are accumulated; "bucket" takes it for a
            bucket when its first gradient comes and gives it back when it is summed up.
        param_buffer: "contiguous" for one allocation for all parameters of a type, "bucket" for one for each bucket.
        average: divide the sums by the number of ranks, as DistributedDataParallel does.
        norm_groups: process groups of this rank and others that have other parameters of one model, as tensor- and
            pipeline-parallel ranks do: norms, skips and overflows are theirs together. A parameter that several ranks
            of such a group hold is counted as often.

    Returns:
        The optimizer that was given, sharded.

    Raises:
        ValueError: on all ranks alike, for a model that is wrapped already, for parameters that are not the model's,
            and if ranks differ in anything that matters; the first difference is named. Nothing is changed then.

    Source: ZeRO stages 1 and 2, https://arxiv.org/abs/1910.02054; torch.distributed.optim.ZeroRedundancyOptimizer.

    Example:
        >>> import torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> optimizer.step()
        >>> model.weight.tolist()
        [[0.5, 0.0]]
        >>> torch.distributed.destroy_process_group()
    """
    ranks = ranks_of(mesh)
    optimizer, model = tried_together(ranks, lambda: _prepared(optimizer, model, mesh))
    options = Options(
        overlap_grad_sync,
        overlap_param_sync,
        bucket_cap_mb,
        grad_sync_dtype,
        param_sync_dtype,
        grad_buffer,
        param_buffer,
        average,
    )
    names = check_together(optimizer, model, ranks, options, lambda: _about(optimizer, norm_groups))
    route_unscaling(lambda each: isinstance(each, ShardedOptimizer), _unscale)
    state = begun_state(optimizer)
    if state is None:
        optimizer.state.clear()
    optimizer._drop_tables()
    sharding = Sharding(optimizer, model, names, apart_from_others(ranks, model), options, norm_groups)
    if state is not None:
        load_into_pieces(sharding, optimizer, state)
    else:
        sharding.inner._rebuild(ahead=True)
    optimizer.__class__ = extended_class(ShardedOptimizer, type(optimizer))
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer._begin(sharding)
    optimizer.attached += ("shard",)
    return optimizer


def _prepared(optimizer: Any, model: Any, mesh: Any) -> tuple[Optimizer, nn.Module]:
    """The optimizer, made if a function was given, and the plain module; what cannot be sharded is refused."""
    made = made_for("shard", optimizer)
    reason = refusal("shard", made.attached)
    if reason:
        raise ValueError(reason)
    require_listed_once("shard()", made)
    require_shapes("shard()", ((label, param) for label, _, _, param in labelled(made)))
    for label, _, _, param in labelled(made):
        if param.is_complex():
            raise GradientError(f"{label} is complex, and shard() splits real arrays: {REAL_INSTEAD}")
    device = next((param.device for group in made.param_groups for param in group["params"]), torch.device("cpu"))
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"{mesh} is of {mesh.device_type} devices, and the parameters are on {device}")
    return made, plain_module(model)


def _about(optimizer: Optimizer, norm_groups: Sequence[Any]) -> Iterator[str]:
    """What else must be the same on all ranks when an optimizer is going to be sharded, a line each."""
    yield f"norm_groups of {[dist.get_world_size(group) for group in norm_groups]} ranks"
    steps = steps_behind(optimizer)
    yield f"state after steps {steps}" if any(steps) else "no state of earlier steps"


def _unscale(unscale: Any, optimizer: ShardedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """What torch's scalers do with a sharded optimizer."""
    return optimizer._unscale_with(unscale, *args, **kwargs)


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is split over ranks; made by `tilestep.shard`.

    It is used as before. `state_dict` holds this rank's pieces, for `torch.distributed.checkpoint`; `full_state_dict`
    gathers all of it. `optimizer.state` has this rank's pieces, flat.
    """

    _sharding: Sharding

    _consolidated: dict[str, Any] | None = None
    """What `consolidate_state_dict` has gathered for the next `state_dict`."""
    _shown: Any = None
    """The tables of the pieces when their states were last put into `state`."""

    _overflows_are_shared = False
    """Whether overflows that a scaler has found since the last step are known on all ranks."""

    def _begin(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._show_states()

    def _show_states(self) -> None:
        """Let `state` have the pieces' states."""
        inner = self._sharding.inner
        self._shown = inner._tables
        self.state.clear()
        for member in self._sharding.members:
            if member.piece is not None and member.piece in inner.state:
                self.state[member.param] = inner.state[member.piece]

    def _follow_states(self) -> None:
        """Let `state` have the pieces' states if these were made anew."""
        if self._shown is not self._sharding.inner._tables:
            self._show_states()

    def _begin_home(self) -> None:
        """The home is that of the pieces."""

    def _step(self) -> None:
        if self._evaluating:
            raise RuntimeError("the parameters hold the weights to evaluate: call train() before step()")
        if hasattr(self, "found_inf") and not self._overflows_are_shared:
            raise GradientError(
                "a scaler has looked for overflows on this rank alone, and scales of ranks would drift apart: use "
                "tilestep.GradScaler or torch.amp.GradScaler, which ask all of them; nothing was updated"
            )
        self._overflows_are_shared = False
        self._sharding.step(self)
        self._follow_states()

    def no_sync(self) -> Any:
        """A block in which backward only accumulates gradients on this rank; the next one outside sums them up."""
        return self._sharding.gradients.no_sync()

    def wait(self) -> None:
        """Have every parameter that the last step has updated on other ranks.

        Only needed before parameters are read that are not looked up in their module, as those in a list of one's own.
        """
        self._sharding.parameters.wait_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that are summed up already too; after a step there are none.

        Args:
            set_to_none: without meaning here.
        """
        self._sharding.gradients.reset()
        super().zero_grad(set_to_none)

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
        return self._sharding.norm_of(listed, [] if process_group is None else [process_group])

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
        sharding = self._sharding
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

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for `torch.distributed.checkpoint`, as tensors of the parameters' shapes.

        No rank waits for another. Loading it on another number of ranks, or in an optimizer that is not sharded, is
        `torch.distributed.checkpoint`'s work; `full_state_dict` is for everything else.
        """
        if self._consolidated is not None:
            consolidated, self._consolidated = self._consolidated, None
            return consolidated
        return self._own_state_dict()

    def _own_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state."""
        with sharded_states(self, self._sharding):
            self.control.numbers = self._sharding.inner.control.numbers
            return super().state_dict()

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state as the optimizer would have it if it were not sharded, gathered tensor by tensor into CPU memory.

        All ranks must call it.

        Args:
            rank: the one that wants it, by its place among those that share the optimizer; None for all.

        Returns:
            A state_dict that optimizers of the same rule take, torch's too; an empty one on ranks that did not ask.
        """
        return full_state_dict(self, self._sharding, rank, self._own_state_dict())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all of the state on one rank, whose next `state_dict()` has it, as frameworks do before they save.

        All ranks must call it, as torch's ZeroRedundancyOptimizer's. The other ranks' `state_dict()` stays their part.

        Args:
            to: the rank, by its place among those that share the optimizer.
        """
        self._consolidated = self.full_state_dict(to) or None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint: what `state_dict` has given here, or a full one of any optimizer of the rule.

        Args:
            state_dict: the checkpoint.

        Raises:
            StateError: for other shapes or another rule; ValueError for other groups. Nothing is changed then.
        """
        self._sharding.look_again()
        load_into_pieces(self._sharding, self, state_dict)
        self._show_states()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer, with parameters of the model; all ranks must call it, when there are no gradients.

        The parameters get buckets of their own.

        Args:
            param_group: `params` and any hyperparameters; `rule` for a rule of its own.

        Raises:
            ValueError: for parameters that are not the model's, and if ranks differ.
            RuntimeError: if there are gradients: add groups after a step, or after `zero_grad`. All ranks raise, and
                nothing is changed.
        """
        sharding = self._sharding
        with unchanged_on_error(self):
            own = self._added(param_group)
            said = sharding.ranks.everyone("" if own is None else str(own))
            if any(said):
                rank = next(rank for rank, text in enumerate(said) if text)
                raise own or RuntimeError(f"rank {rank} cannot add the param group: {said[rank]}")
            names = check_together(self, sharding.model, sharding.ranks, sharding.options)
        sharding.add_group(self, names)
        self._show_states()

    def _added(self, param_group: dict[str, Any]) -> Exception | None:
        """Add a group as an optimizer does that is not sharded; why it cannot be."""
        if self._evaluating:
            return RuntimeError("the parameters hold the weights to evaluate: call train() before add_param_group()")
        if not self._sharding.gradients.is_idle:
            return RuntimeError("add param groups right after step() or zero_grad(): there are gradients now")
        try:
            super().add_param_group(param_group)
            require_listed_once("shard()", self)
        except (TypeError, ValueError, RuntimeError) as error:
            return error
        return None

    def eval(self) -> None:
        """As for any optimizer; all ranks must call it."""
        self._hold_weights(training=False)

    def train(self, mode: bool = True) -> None:
        """As for any optimizer; all ranks must call it."""
        self._hold_weights(training=mode)

    def _hold_weights(self, *, training: bool) -> None:
        """Let the pieces hold the weights that train or those to evaluate, and send them to the other ranks."""
        # What is on its way is read until it has arrived.
        self._sharding.follow_parameters()
        self._sharding.look_again()
        self._sharding.inner.train(training)
        self._evaluating = self._sharding.inner._evaluating
        self._follow_states()
        # Of all: what is frozen now may have been averaged before.
        self._sharding.parameters.gather()

    def overflow_flags(self) -> dict[torch.device, torch.Tensor]:
        """For a scaler, after a step that checked for overflows: device and float32 scalar there, 1 for an overflow."""
        engine = self._sharding.inner._current()[0]
        return {engine.device: engine.overflow} if self._sharding.has_gradients else {}

    def _unscale_with(self, unscale: Any, *args: Any, **kwargs: Any) -> Any:
        flags = unscale(self._sharding.unscalable(), *args, **kwargs)
        for flag in flags.values():
            self._sharding.deciders.add(flag)
        self._overflows_are_shared = True
        return flags

    def _last_control(self) -> torch.Tensor | None:
        return self._sharding.inner._last_control()

    def _current(self) -> list[DeviceEngine]:
        return self._sharding.inner._current()

    @contextmanager
    def _for_graph(self, *, alone: bool, replays: bool = False) -> Iterator[Optimizer]:
        sharding = self._sharding
        sharding.prepare_graph(self, alone=alone, replays=replays)
        sharding.captures_alone = alone and not replays
        try:
            yield sharding.inner
        finally:
            sharding.captures_alone = False
        self._follow_states()
        if replays:
            sharding.replayed(alone=alone)

    def prepare_capture(self) -> None:
        """As for any optimizer; the graph has to hold backward too, or to be made by `tilestep.capture`."""
        require_no_waits(self)
        with self._for_graph(alone=False) as updating:
            prepare_capture(updating)

    def push(self) -> None:
        """As for any optimizer, before a replay."""
        with self._for_graph(alone=False, replays=True) as updating:
            updating.push()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()")
