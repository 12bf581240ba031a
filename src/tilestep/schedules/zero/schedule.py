"""What `shard` attaches to an optimizer: updates of this rank's pieces at the step, sums and gathers around it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ...combinations import refuse, refuse_replaced
from ...compat import is_capturing, route_unscaling, uncompiled
from ...errors import GradientError
from ...norm import NormTable
from ...norm.tiles import combine
from ...optimizer import Optimizer
from ...optimizer.checkpoint import unchanged_on_error
from ...optimizer.control import MEAN_KEYS
from ...optimizer.graphs import prepare_capture, push, require_no_waits
from ...optimizer.optimizer import Attached, AttachedType, resolve_optimizer
from ...optimizer.parameters import iter_params, require_listed_once, require_shapes
from ...placement.local import REAL_INSTEAD
from ...runtime.capturing import PREPARE, require
from ..accumulation import gradientless, refuse_another_taker, refuse_taken_by_another
from ..schedule import Schedule
from ..side_stream import SideStream
from .buckets import Options
from .checkpoint import full_state_dict, sharded_states, steps_behind
from .core import Sharding
from .gradients import GradientSync
from .parameters import ParameterSync, UpdateInParts
from .ranks import HyperparameterDigest, apart_from_others, attempt_together, ranks_of, validate_across_ranks


@dataclass
class _Gradients:
    """What decides which pieces have a gradient, and where; the numbers in the sections may change."""

    sections: list[torch.Tensor | None]
    has_gradient: tuple[bool, ...]
    trains: bytes


class ShardedSchedule(Schedule):
    """The schedule of a sharded optimizer, which has these public methods after `tilestep.shard`."""

    not_copied = "a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()"
    begins_together = True

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._reference = weakref.ref(optimizer)
        self.sharding = sharding
        buckets, ranks, options, model = sharding.buckets, sharding.ranks, sharding.options, sharding.model
        self.channel = SideStream(buckets[0].flat.device, priority=-1)
        digest = HyperparameterDigest(self._reference, ranks, sharding.members[0].name)
        self.gradients = GradientSync(buckets, sharding.places, ranks, options, self.channel, digest, model)
        self.parameters = ParameterSync(model, buckets, options, self.channel)
        self._parts = UpdateInParts(self.parameters, sharding.bucket_of) if self.channel.in_order else None
        sharding.parts = self._parts
        self._ready: _Gradients | None = None  # the gradients that the sections have been given
        self._stepped: _Gradients | None = None  # those of the last step, if no section was written to since
        self._begun: _Gradients | None = None  # those when it was last noted which parameters have state
        self._captures_alone = False  # whether a step is being captured without the backward before it
        self._consolidated: dict[str, Any] | None = None  # gathered for the next `state_dict`
        self._overflows_are_shared = False  # whether all ranks know what a scaler has found since the last step

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the sharded optimizer is gone: keep a reference to it")
        return optimizer

    @property
    def offers(self) -> dict[str, Any]:
        """What the optimizer has besides."""
        names = ["no_sync", "wait", "grad_norm_of", "clip_grad_norm_", "full_state_dict", "consolidate_state_dict"]
        return {name: getattr(self, name) for name in (*names, "describe_gathers")}

    def making_plan(self) -> AbstractContextManager[None]:
        self.sharding.require_groups(self._optimizer)
        return super().making_plan()

    def step(self, plain: Callable[..., None]) -> None:
        """Update this rank's sections and send them to the others."""
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
        sharding, gradients = self.sharding, self.gradients
        if [group.get("rule") for group in optimizer.param_groups] != sharding.rules:
            # Of other parameters a plan is made anew, which asks too.
            sharding.require_groups(optimizer)
        captures = is_capturing()
        if captures:
            able = sharding.ranks.can_be_captured
            require(able, "its ranks communicate by a backend that graphs cannot hold; NCCL can")
            require(not self.parameters.is_pending, f"parameters are still on their way; {PREPARE}")
        self._make_ready(captures)
        if self._ready is None or (self._ready is not self._stepped and 0 in self._ready.has_gradient):
            refuse_replaced(sharding.model, sharding.member_of)
        if captures:
            require(
                self._captures_alone or gradients.summed_in_graph,
                "its gradients were summed before the graph: capture backward too, or use tilestep.capture(optimizer)",
            )
        # Sections and their gradients are where they were at the last step, and what that has made of them: this cuts
        # the sections and knows, since nothing else has them. Not in a capture, which looks at everything.
        unmoved = not captures and self._ready is self._stepped
        self._stepped = self._consolidated = None
        # One that was frozen after its gradients were summed is updated, as torch does with whatever has a gradient.
        updates = bytes(sums.was_summed or sums.bucket.trains for sums in gradients.sums)
        if self._parts is None or captures:
            plain(unmoved=unmoved)
        else:
            with self._parts.around(updates):
                plain(unmoved=unmoved)
        ready = self._stepped = self._ready
        if ready is not None and ready is not self._begun:
            self._begun = ready
            sharding.note_stepped(ready.has_gradient, ready.trains)
        if not captures or gradients.summed_in_graph:
            gradients.forget()
        self.parameters.gather(updates, captures)

    @gradientless
    def sync_masters(self, optimizer: Any) -> None:
        """Have every parameter arrive, and take over what other code has written to them."""
        self._follow_parameters(None)

    def _follow_parameters(self, versions: int | None) -> None:
        """As `sync_masters`, without gradients; `versions` is how often they have been written to, if known."""
        params = self.parameters
        if params.is_pending:
            params.wait_all()
        if not params.is_exact and not params.fixed.look() and versions is not None and versions == params.versions:
            return
        written = [self.sharding.member_of[param].piece for param in params.written(versions)]
        if written:
            self._stepped = None
            torch.autograd.graph.increment_version([piece for piece in written if piece is not None])

    @gradientless
    def complete_gradients(self, optimizer: Any) -> None:
        """Have the sections hold their summed gradients, and be what the parameters are; all ranks call it."""
        self._make_ready(is_capturing())

    def _make_ready(self, captures: bool) -> None:
        """As `complete_gradients`, without gradients."""
        gradients = self.gradients
        if not gradients.is_alone:
            refuse_another_taker(gradients.params, gradients)
        versions, trains, has_gradient = gradients.finish(captures)
        if gradients.digest.trains != gradients.trains:
            gradients.follow_trains()
        self._follow_parameters(versions)
        before = self._ready
        sections = [sums.section for sums in gradients.sums]
        if (
            before is None
            or (before.has_gradient, before.trains) != (has_gradient, trains)
            or not all(map(operator.is_, before.sections, sections))
        ):
            missing = [param for param, has_one in zip(gradients.params, has_gradient) if not has_one]
            refuse_taken_by_another(missing, gradients)
            section_of = {id(sums.bucket): section for sums, section in zip(gradients.sums, sections)}
            for member, has_one, is_trained in zip(self.sharding.members, has_gradient, trains):
                left_behind = has_one or member.param.grad is not None
                if left_behind and not is_trained and section_of[id(member.bucket)] is None:
                    raise GradientError(
                        f"{member.name} has a gradient and is frozen, as all parameters of its bucket: the gradient is "
                        "not summed over the ranks. Freeze parameters after the backward outside of no_sync() or after "
                        "step(), or set their .grad to None"
                    )
            self._ready = _Gradients(sections, has_gradient, trains)
            for member, has_one, is_trained in zip(self.sharding.members, has_gradient, trains):
                member.take_gradient(section_of[id(member.bucket)] if has_one else None, bool(is_trained))

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """As of a plain optimizer; that of other groups where a rank has no share of this one."""
        own = super().step_of(optimizer, group)
        members = (self.sharding.member_of[param] for param in group["params"])
        if own is not None or not any(self.sharding.holds_state(optimizer, member) for member in members):
            return own
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return torch.stack(steps).amax() if steps else None

    @torch.no_grad()
    def present_gradients(self, optimizer: Any) -> list[tuple[Any, torch.Tensor]]:
        """Parameters with this rank's pieces of their gradients, summed up; all ranks call it."""
        self.complete_gradients(optimizer)
        pieces = [(member.param, member.piece) for member in self.sharding.members if member.piece is not None]
        return [(param, piece.grad) for param, piece in pieces if piece.grad is not None]

    def no_sync(self) -> Any:
        """A context manager in which backward only accumulates on this rank; the next backward outside reduces the sum.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> with optimizer.no_sync():
            ...     model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> model(torch.tensor([[2.0, 2.0]])).sum().backward()
            >>> float(optimizer.grad_norm_of(model.parameters()))
            5.0
            >>> torch.distributed.destroy_process_group()
        """
        return self.gradients.rounds.no_sync()

    def wait(self) -> None:
        """Wait for the parameters that other ranks updated in the last step, and for offloaded state.

        Only needed before you read parameters that you hold yourself, for example in a list; reading a parameter from
        its module waits for it.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> mine = list(model.parameters())
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = tilestep.shard(tilestep.SGD(mine, lr=0.5), model)
            >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.wait()
            >>> mine[0].tolist()
            [[0.5, 0.0]]
            >>> torch.distributed.destroy_process_group()
        """
        self._optimizer.memory.wait()
        self.parameters.wait_all()

    def describe_gathers(self) -> list[str]:
        """How parameters that were updated come to the other ranks, a line for each type and way.

        Copy engines fetch them from the memory of the GPUs of one host where `param_buffer` says so and that can be;
        else the process group sends them, and the line says why.
        """
        return self.parameters.describe_gathers()

    def before_zero_grad(self) -> None:
        """Drop gradients that are summed up already too."""
        self.gradients.reset()

    def stepped(self, optimizer: Any) -> list[torch.Tensor]:
        has_gradient = () if self._ready is None else self._ready.has_gradient
        return [param for param, has_one in zip(self.gradients.params, has_gradient) if has_one]

    def grad_norm_of(self, params: Iterable[torch.Tensor], process_group: Any = None) -> torch.Tensor:
        """The 2-norm of some parameters' gradients over all ranks, between backward and step.

        All ranks must call it, with the same parameters. The gradients may carry a loss scale, which the norm then
        includes.

        Args:
            params: one or more parameters of the optimizer.
            process_group: a group of ranks with other shards of these parameters, such as tensor-parallel ranks, whose
                norms are included; all of them must call it too.

        Returns:
            A scalar on the device, float64 if a parameter is, otherwise float32; the same on all ranks. Reading it
                waits.

        Raises:
            ValueError: for a tensor that is not a parameter of the optimizer.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> float(optimizer.grad_norm_of([model.weight]))
            5.0
            >>> torch.distributed.destroy_process_group()
        """
        listed = [params] if isinstance(params, torch.Tensor) else params
        return self._norm_of(listed, [] if process_group is None else [process_group])

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float | torch.Tensor, params: Iterable[torch.Tensor] | None = None, process_group: Any = None
    ) -> torch.Tensor:
        """Scale reduced gradients so that their 2-norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        For what `max_grad_norm` does not do: to clip some parameters only, or between a scaler's `unscale_` and `step`.
        All ranks must call it. It changes the gradients in place, in a separate pass.

        Args:
            max_norm: the largest norm.
            params: the parameters; None for all, including those of the `norm_groups` of `shard`. Gradients of other
                parameters do not change.
            process_group: as for `grad_norm_of`.

        Returns:
            The norm before the clip, as from `grad_norm_of`.

        Raises:
            ValueError: for a tensor that is not a parameter of the optimizer.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> float(optimizer.clip_grad_norm_(1.0)), round(float(optimizer.grad_norm_of([model.weight])), 4)
            (5.0, 1.0)
            >>> torch.distributed.destroy_process_group()
        """
        if params is None:
            listed, groups = [member.param for member in self.sharding.members], self.sharding.norm_groups
        else:
            listed, groups = [params] if isinstance(params, torch.Tensor) else list(params), []
        norm = self._norm_of(listed, groups if process_group is None else [*groups, process_group])
        gradients = self._gradients_of(listed)
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _gradients_of(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's pieces of the summed gradients of some parameters, which are complete."""
        pieces = [self.sharding.member_of[param].piece for param in params]
        return [piece.grad for piece in pieces if piece is not None and piece.grad is not None]

    @torch.no_grad()
    def _norm_of(self, params: Iterable[torch.Tensor], groups: Sequence[Any]) -> torch.Tensor:
        """The 2-norm of the summed gradients of some parameters over all ranks, and over further process groups."""
        listed = list(params)
        if not all(param in self.sharding.member_of for param in listed):
            raise ValueError("grad_norm_of() takes parameters of this optimizer, and was given another tensor")
        self._make_ready(is_capturing())
        gradients, device = self._gradients_of(listed), self.sharding.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if gradients:
            numels, dtypes = [one.numel() for one in gradients], [one.dtype for one in gradients]
            table = NormTable(device, numels, dtypes)
            addresses = torch.tensor([gradient.data_ptr() for gradient in gradients], dtype=torch.int64, device=device)
            table.launch(addresses, total)
        self.sharding.ranks.with_others(groups).add(total)
        wide = any(param.dtype is torch.float64 for param in listed)
        return combine(total, 2.0).to(torch.float64 if wide else torch.float32)

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
        optimizer = self._optimizer
        self.sharding.require_groups(optimizer)
        self.sync_masters(optimizer)
        if optimizer.plan is not None:
            optimizer.plan.sync_masters()
        with sharded_states(optimizer, self.sharding):
            return plain()

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state of the unsharded optimizer, gathered tensor by tensor into CPU memory.

        All ranks must call it.

        Args:
            rank: the rank that receives it, counted among those that share the optimizer; None for all.

        Returns:
            A `state_dict` that optimizers of the same rule load, torch's too; an empty one on ranks that do not receive
                it.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> sorted(optimizer.full_state_dict())
            ['param_groups', 'state']
            >>> torch.distributed.destroy_process_group()
        """
        optimizer = self._optimizer
        return full_state_dict(optimizer, self.sharding, rank, self._own_state_dict(optimizer.plain_state_dict))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on one rank, for its next `state_dict()`, as torch's ZeroRedundancyOptimizer does.

        All ranks must call it. The `state_dict()` of the other ranks stays their shard, and so does that of this one
        after another step.

        Args:
            to: the rank, counted among those that share the optimizer.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> optimizer.consolidate_state_dict()
            >>> sorted(optimizer.state_dict())
            ['param_groups', 'state']
            >>> torch.distributed.destroy_process_group()
        """
        self._consolidated = self.full_state_dict(to) or None

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> None:
        """Take a checkpoint or nothing: what `state_dict` has given, or a full one of any optimizer of the rule."""
        self._stepped = self._consolidated = None
        optimizer, held_averages = self._optimizer, self._optimizer.is_evaluating
        self.sharding.require_groups(optimizer)
        if held_averages:
            self.sync_masters(optimizer)
        begun = plain(state_dict)
        if held_averages:
            self.parameters.gather()
        for member in self.sharding.members:
            # Others that train begin with the next step.
            member.has_begun = True if member.param in begun else None
        self._begun = None

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters of the model as a group, in buckets of their own; all ranks call it, without gradients."""
        sharding, optimizer = self.sharding, self._optimizer

        def add() -> None:
            sharding.require_groups(optimizer)
            if optimizer.is_evaluating:
                raise RuntimeError("the parameters hold the weights to evaluate: call train() before add_param_group()")
            if not self.gradients.is_idle:
                raise RuntimeError("add param groups right after step() or zero_grad(): there are gradients now")
            plain(param_group)
            require_listed_once("shard()", optimizer)

        attempt_together(sharding.ranks, add, "add the param group", RuntimeError)
        names = validate_across_ranks(optimizer, sharding.model, sharding.ranks, sharding.options)
        self.sync_masters(optimizer)
        buckets, places = sharding.add_group(optimizer, names)
        self.gradients.take_in(buckets, places)
        self.parameters.take_in(sharding.model, buckets)
        self._ready = self._begun = None

    def hold_weights(self, training: bool, plain: Callable[[], None]) -> None:
        """Let the sections hold the weights that train or those to evaluate, and send them to the other ranks."""
        # What is on its way is read until it has arrived.
        self.sync_masters(self._optimizer)
        self._stepped = None
        plain()
        # Of all: what is frozen now may have been averaged before.
        self.parameters.gather()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients, on any rank."""
        return self._ready is not None and any(self._ready.has_gradient)

    @staticmethod
    def route(unscale: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """What torch's scalers do with a sharded optimizer."""
        return optimizer.unscale_with(unscale, *args, **kwargs)

    @gradientless
    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Unscale the pieces; overflows of one rank are those of all."""
        self._make_ready(is_capturing())
        sharding = self.sharding
        dtypes = {bucket.grad_dtype for bucket in sharding.buckets if bucket.trains and self.had_gradients(optimizer)}
        # So that a scaler finds every device and dtype on all ranks, on one too that has no piece with such a gradient.
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
        """A block in which a step is captured or replayed, with all where graphs look for it."""
        if not replays:
            require_no_waits(optimizer)
        self.sharding.require_groups(optimizer)
        if alone:
            self.complete_gradients(optimizer)
        else:
            self.sync_masters(optimizer)
        self.channel.settle()
        if not replays:
            self.parameters.wait_on_host()
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
        """Get ready; the graph has to hold backward too, or to be made by `tilestep.capture`."""
        with self.for_graph(optimizer, alone=False):
            prepare_capture(optimizer)

    def push(self, optimizer: Any) -> None:
        with self.for_graph(optimizer, alone=False, replays=True):
            push(optimizer)


class ShardedOptimizer(Attached, metaclass=AttachedType):
    """The type of an optimizer after `tilestep.shard`, for `isinstance`; the optimizer also stays an instance of its
    class.

    It adds the methods of `ShardedSchedule`. `state_dict` returns this rank's shard, for
    `torch.distributed.checkpoint`; `full_state_dict` gathers the full state. `optimizer.state` holds this rank's
    shards, flat, or by rows that end inside a block.

    Example:
        >>> import torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
        >>> isinstance(optimizer, tilestep.ShardedOptimizer), isinstance(optimizer, tilestep.SGD)
        (True, True)
        >>> torch.distributed.destroy_process_group()
    """

    attached_as = ("shard",)
    no_sync: Callable[[], Any]
    wait: Callable[[], None]
    full_state_dict: Callable[..., dict[str, Any]]
    consolidate_state_dict: Callable[..., None]
    describe_gathers: Callable[[], list[str]]
    grad_norm_of: Callable[..., torch.Tensor]
    clip_grad_norm_: Callable[..., torch.Tensor]


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
    param_buffer: str = "auto",
    average: bool = True,
    norm_groups: Sequence[Any] = (),
) -> ShardedOptimizer:
    """Shard an optimizer over data-parallel ranks: each keeps 1/N of the state and updates 1/N of the parameters.

    Gradients are reduce-scattered during backward, each bucket when its gradients are complete. Updated parameters are
    all-gathered while the code after the step runs; reading a parameter from its module waits for its bucket. Every
    rank starts with the parameters and buffers of rank 0.

    The optimizer that is passed becomes sharded; it keeps its class and param groups, and schedulers that hold it stay
    valid. `isinstance(optimizer, tilestep.ShardedOptimizer)` tells that it is sharded. Between backward and step the
    parameters' `grad` is None, since the reduced gradients are in buckets, which `step()` consumes: clip with
    `max_grad_norm` or the optimizer's `clip_grad_norm_`. A warning names the option to change if buckets are mostly
    padding.

    Args:
        optimizer: a tilestep optimizer, whose existing state is kept; or a function that makes one: then no rank ever
            allocates more than its shard of the state.
        model: the plain module that has its parameters, not wrapped for data parallelism.
        mesh: None for all ranks; or a DeviceMesh with one dimension, or with two named "shard" and "replicate": the
            state is sharded over the first and replicated over the second. Without names the second dimension shards.
        overlap_grad_sync: reduce buckets during backward; False: at the step.
        overlap_param_sync: all-gather parameters during the next forward; False: they have arrived when `step()`
            returns, in the order of the current stream.
        bucket_cap_mb: MiB of gradients in a bucket; a larger parameter has its own bucket. None for a sixteenth of all,
            between 25 and 256 MiB, at both ends of backward, and up to a sixth, at most 512 MiB, between.
        grad_sync_dtype: the dtype in which gradients are accumulated and reduced; None for the parameter's. Also a key
            of param groups, as is `param_sync_dtype`.
        param_sync_dtype: the dtype of the all-gather; None for the parameter's. With a narrower floating-point dtype
            the rank that updates a parameter keeps its exact value; an integer dtype sends the bytes unchanged.
        grad_buffer: "contiguous" allocates memory for all gradients, in which they are accumulated; "bucket" allocates
            a bucket at its first gradient and frees it after its reduction.
        param_buffer: "auto" makes one allocation for all parameters of a dtype, which the GPUs of one host read from
            each other by copy engines if they can; `optimizer.describe_gathers()` tells. "peers" raises if they cannot,
            "contiguous" always uses the process group, "bucket" makes one allocation per bucket.
        average: divide the sums by the number of ranks, as DistributedDataParallel does.
        norm_groups: process groups of this rank and ranks with other parameters of the model (tensor and pipeline
            parallelism): norms, skips and overflows are decided over them too. A parameter that several ranks of such a
            group hold counts several times.

    Returns:
        The optimizer, sharded.

    Raises:
        ValueError: on all ranks, for a wrapped model, for parameters that are not the model's, and if ranks differ in
            anything that matters; the message has the first difference. Nothing is changed then.

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
    optimizer, model = attempt_together(ranks, lambda: _prepared(optimizer, model, mesh))
    syncs, dtypes = (overlap_grad_sync, overlap_param_sync), (grad_sync_dtype, param_sync_dtype)
    options = Options(*syncs, bucket_cap_mb, *dtypes, grad_buffer, param_buffer, average)

    def also() -> Iterator[str]:
        steps = steps_behind(optimizer)
        yield f"norm_groups of {[dist.get_world_size(group) for group in norm_groups]} ranks"
        yield f"state after steps {steps}" if any(steps) else "no state of earlier steps"

    names = validate_across_ranks(optimizer, model, ranks, options, also)
    route_unscaling(lambda optimizer: isinstance(optimizer, ShardedOptimizer), ShardedSchedule.route)
    state = optimizer.state_dict() if any(steps_behind(optimizer)) else None
    sharding = Sharding(optimizer, model, names, apart_from_others(ranks, model), options, norm_groups)
    schedule = ShardedSchedule(optimizer, sharding)
    with unchanged_on_error(optimizer):
        optimizer.drop_plan()
        optimizer.state.clear()
        optimizer.held = {}
        # What each rank has counted alone; what they go on with is in the state.
        optimizer.control.numbers, optimizer.control.copies = None, sharding.ranks.other_copies
        optimizer.placement = sharding
        optimizer.attach(("shard",), schedule=schedule, offers=schedule.offers)
        if state is not None:
            # Before, each rank has remembered norms and losses of its own.
            first = state["param_groups"][0]
            first |= sharding.ranks.gather_objects({key: float(first[key]) for key in MEAN_KEYS if key in first})[0]
            optimizer.load_state_dict(state)
            for numbers in optimizer.control.history.numbers:
                sharding.ranks.broadcast(numbers)
        else:
            optimizer.rebuild(ahead=True)
    return cast(ShardedOptimizer, optimizer)


def _prepared(optimizer: Any, model: Any, mesh: Any) -> tuple[Optimizer, nn.Module]:
    """The optimizer, made if a function was given, and the plain module; what cannot be sharded is refused."""
    made = resolve_optimizer("shard", optimizer)
    refuse("shard", made.attached)
    require_listed_once("shard()", made)
    require_shapes("shard()", ((label, param) for label, _, _, param in iter_params(made)))
    for label, _, _, param in iter_params(made):
        if param.is_complex():
            raise GradientError(f"{label} is complex, and shard() splits real arrays: {REAL_INSTEAD}")
    device = next((param.device for group in made.param_groups for param in group["params"]), torch.device("cpu"))
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"{mesh} is of {mesh.device_type} devices, and the parameters are on {device}")
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard() takes the module that is trained, not {type(model).__name__}")
    return made, model
