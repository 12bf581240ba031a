"""`overlap` and the execution that it attaches to an optimizer: updates in backward or in the next forward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from ...compat import before_gathering, is_capturing, kept_parameters, opaque, uncompiled
from ...errors import CaptureError, GradientError
from ...native.table import memory_of, taken_gradients
from ...optimizer import Optimizer
from ...optimizer.checkpoint import unchanged_on_error
from ...optimizer.execution import Execution
from ...optimizer.optimizer import Attached, AttachedType
from ...optimizer.parameters import evaluation_error, iter_params, params_of, require_listed_once, require_shapes
from ...optimizer.plan import StepPlan
from ...placement.combinations import FSDP2, kind_of, refusal, refuse, split_kind
from ...placement.local import is_distributed
from ...timeline.guards import Publication, guard, guard_forwards, guard_look_ups
from ...timeline.side_stream import SideStream, Ticket
from ...timeline.timeline import refuse_taken_by_another
from .groups import Grouping
from .updates import UNTOLD_SCALE, CommHook, GroupUpdates


class OverlapExecution(Execution):
    """The execution of an overlapped optimizer, which has these public methods after `tilestep.overlap`."""

    # The arguments are documented at `overlap`; `grouping` holds the groups of parameters that are updated together.

    no_copy = "an overlapped optimizer cannot be copied or pickled: save its state_dict()"
    creates_all_states = True

    def __init__(
        self,
        optimizer: Optimizer,
        grouping: Grouping,
        device: torch.device,
        during: str,
        scaler: torch.amp.GradScaler | None,
        comm_hook: CommHook | None,
    ) -> None:
        # The optimizer owns this execution; a strong reference would be a cycle.
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.grouping, self.during = grouping, during
        self._had_gradients = False
        self._ranks_checked = during != "backward"
        self.lane = SideStream(device)
        self.publication = _publication(grouping, self.lane)
        self.updates = GroupUpdates(optimizer, grouping, self.publication, during == "backward", scaler, comm_hook)
        # Running updates write to state memory, which its streams could reuse once it is freed.
        weakref.finalize(self, self.lane.join_all).atexit = False
        # The model owns the publication, and may own the optimizer.
        weakref.finalize(self, _end, weakref.ref(self.publication)).atexit = False

    def settle(self) -> None:
        if self.publication.tickets:
            self.synchronize()

    def part_of(self, param: torch.Tensor) -> Any:
        """The index of a parameter's group."""
        return self.grouping.of[id(param)].index

    @contextmanager
    def building_plan(self) -> Iterator[None]:
        """A block in which no update runs, with groups for the optimizer's current parameters."""
        self.publication.wait_all()
        with self.lane.left():
            if not self.grouping.is_current(self._optimizer()):
                self.grouping.divide(self._optimizer())
                self.updates.watch()
                self.publication.wait_on_host()
                self.publication.of = self.grouping.of
                guard_look_ups(self.publication, self.grouping.model)
            yield
        # FSDP2 calls gradient hooks on its own stream. A plan made in a hook has read memory of other streams, such as
        # loaded step counts; these streams may reuse the memory now.
        self.lane.join_all()

    @property
    def applied_groups(self) -> tuple[str, ...]:
        """The groups that backward has updated since the last step, also after a backward that raised.

        Example:
            >>> import torch, tilestep
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
            >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> len(optimizer.applied_groups)
            1
            >>> optimizer.step()
        """
        return tuple(group.name for group in self.updates.applied)

    def no_sync(self) -> Any:
        """A context manager in which backward only accumulates; the next backward outside updates with the sum.

        Example:
            >>> import torch, tilestep
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
            >>> with optimizer.no_sync():
            ...     model(torch.tensor([[1.0, 0.0]])).sum().backward()
            >>> model(torch.tensor([[0.0, 2.0]])).sum().backward()
            >>> optimizer.step()
            >>> model.weight.tolist()
            [[0.5, 0.0]]
        """
        return self.updates.timeline.no_sync()

    def synchronize(self) -> None:
        """Make the current stream wait for all updates.

        Only needed before you read tensors that are not looked up in a module of the model: parameters in your own list
        or in `param_groups`, and tensors taken out of `optimizer.state` before a step.

        Example:
            >>> import torch, tilestep
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
            >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.synchronize()
            >>> optimizer.param_groups[0]["params"][0].tolist()
            [[0.5, 0.0]]
        """
        self.publication.wait_all()
        self.lane.join()

    settle_everywhere = synchronize

    def step(self, plain: Callable[[], None]) -> None:
        """Take a step, or finish the step that backward has begun."""
        optimizer, updates = self._optimizer(), self.updates
        if optimizer.is_evaluating:
            raise evaluation_error("step()")
        if is_capturing():
            self.prepare_capture(optimizer)
        if not self._ranks_checked and updates.applied:
            self._warn_of_ranks()
        is_run_by_scaler = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        if updates.found_scaler and is_run_by_scaler:
            raise GradientError(UNTOLD_SCALE)
        if self.during == "forward":
            self._step_later()
            updates.forget()
        elif updates.applied or (
            updates.timeline.when == "ready"
            and not is_run_by_scaler
            and not optimizer.control.needs_norm(optimizer.param_groups)
        ):
            updates.finish()
        else:
            # Backward could not decide, since the decision needs all gradients.
            self.synchronize()
            updates.forget()
            params = params_of(optimizer)
            self._had_gradients = any(param.grad is not None for param in params)
            updates.find_missing(self.grouping.groups)
            plain()
            taken_gradients(params)

    def _step_later(self) -> None:
        """Take the step's decision, and issue its updates for the next forward."""
        self.synchronize()
        optimizer, lane, publication = self._optimizer(), self.lane, self.publication
        with lane.after():
            plan = optimizer.prepared()
            if plan.active_set_changed or not plan.engines:
                if missing := [param for param in plan.basis.params if param.grad is None]:
                    refuse_taken_by_another(missing, self.updates.timeline)
                    self.updates.refuse_replaced()
                plan.active_set_changed = False
            masters = plan.masters if plan.masters.follow else None
            if plan.ahead:
                plan.init_states(optimizer, all_of_them=True)
            if masters is not None:
                masters.sync()
            optimizer.control.update_control(optimizer, plan.deciders)
            reports = optimizer.reports
            measures = reports is not None and reports.begin(plan.engines) and reports.measures
            # Bump the version counters of parameters that updates will write, for autograd.
            for engine in plan.engines:
                engine.table.count_writes()
                if engine.wrote is not None:
                    engine.wrote(engine.written)
            if masters is not None:
                masters.record()
            # Groups in the order in which the last forward needed them; in reverse order at the first step.
            order = {group: place for place, group in enumerate(publication.needed)}
            groups = sorted(reversed(self.grouping.groups), key=lambda group: order.get(group, len(order)))
            held = {group: gradients for group in groups if (gradients := taken_gradients(group.params))}
            self._had_gradients = bool(held)
            if not held:
                self.updates.refuse_replaced()
            later = partial(_update_later, plan, moves=lane.stream is None, measures=reports is not None)
            tickets = {
                group: Ticket(partial(later, plan.places.get(group.index, ()), gradients))
                for group, gradients in held.items()
            }
            # Work that scales losses, changes hyperparameters or reads the norm must run after the decision.
            decided = lane.mark()
            if lane.stream is not None:
                lane.keep(*memory_of([gradient for listed in held.values() for gradient in listed]))
            # Ranks exchange measurements in the step, because a rank may read its report alone.
            with torch.no_grad():
                publication.needed.clear()
                publication.tickets.update(tickets)
                for ticket in tickets.values() if lane.stream is not None or measures else ():
                    ticket.finish()
                    ticket.mark = lane.next_mark()
            if reports is not None:
                reports.finish()
        current = lane.current()
        if current is not None and decided is not None:
            current.wait_event(decided)
        if publication.compiled:
            publication.wait_all()
            # Compiled code runs later on this stream.
            publication.tickets.clear()
        for group in self.grouping.groups:
            if not group.is_guarded:
                publication.wait(group.params[0])

    def _warn_of_ranks(self) -> None:
        """After the first updates in backward: warn if nothing has reduced the gradients over the ranks."""
        self._ranks_checked = True
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if (
            several
            and not self.updates.timeline.elsewhere
            and not any(map(is_distributed, params_of(self._optimizer())))
        ):
            warnings.warn(
                'overlap(during="backward") updated with the gradients of each rank alone and freed them: a loop that '
                "all-reduces `param.grad` after backward finds None. Wrap the model in DistributedDataParallel or "
                'FSDP2, use tilestep.shard, or pass during="forward"; ignore this if each rank trains a separate model',
                stacklevel=6,
            )

    def before_zero_grad(self) -> None:
        """Drop the gradients of a backward that was interrupted, or that has not reached all parameters of a group.

        Raises:
            RuntimeError: after a backward that has updated parameters; `step()` must end it.
        """
        updates = self.updates
        if updates.timeline.running:
            self.lane.join()
            updates.forget()
        elif updates.applied:
            raise RuntimeError(
                "backward has already updated parameters, so these gradients cannot be dropped: call step() first; "
                'to decide about a step after backward, use during="forward"'
            )
        elif updates.timeline.is_open:
            self.lane.join()
            updates.drop()

    def _require_no_update(self, method: str) -> None:
        if self.updates.applied:
            raise RuntimeError(f"backward has already updated parameters: call step() before {method}")

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a checkpoint, between a step and the next backward or after an interrupted backward."""
        if not self.updates.timeline.running:
            self._require_no_update("load_state_dict()")
        super().load_state_dict(state_dict, plain)

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add a param group, between a step and the next backward."""
        self._require_no_update("add_param_group()")
        self.synchronize()
        plain(param_group)
        require_listed_once("overlap()", self._optimizer())

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients; it has freed them."""
        return self._had_gradients

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Unscale gradients before their update; raises if a scaler was not passed to `overlap`."""
        if self.updates.found_scaler:
            raise GradientError(UNTOLD_SCALE)
        return super().unscale(optimizer, unscale, *args, **kwargs)

    def prepare_capture(self, optimizer: Any) -> None:
        """Raise: overlapped steps cannot be captured."""
        refuse("capture", ["overlap"], error=CaptureError)


def _publication(grouping: Grouping, lane: SideStream) -> Publication:
    """Make each look-up of a parameter, and each all-gather of FSDP2, wait for the update of the parameter's group."""
    publication = Publication(lane)
    publication.of = grouping.of
    for module in grouping.model.modules():
        # Also modules whose parameters FSDP2 has unsharded: the optimizer's sharded parameters return at reshard.
        if kept_parameters(module):
            guard(module, publication)
    guard_look_ups(publication, grouping.model)
    guard_forwards(publication)

    def gather(module: nn.Module, streams: Sequence[torch.cuda.Stream]) -> None:
        for group in grouping.of_module.get(module, ()):
            if group in publication.tickets:
                publication.wait(group.params[0], streams)

    # All FSDP2 modules: their parameters may be added to the optimizer later.
    for module in grouping.model.modules():
        if kind_of(module) == FSDP2 and not before_gathering(module, partial(gather, module)):
            module.register_forward_pre_hook(lambda *_: publication.wait_all(), prepend=True)
    return publication


def _end(publication: Callable[[], Publication | None]) -> None:
    """End the publication if the model still owns it."""
    living = publication()
    if living is not None:
        living.end()


def _no_wait() -> None:
    """`synchronize()` for updates in `step()`: nothing to wait for."""


class OverlappedOptimizer(Attached, metaclass=AttachedType):
    """The type of an optimizer after `tilestep.overlap`, for `isinstance`; it also stays an instance of its class.

    It adds `no_sync()`, `synchronize()` and `applied_groups`.

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
        >>> isinstance(optimizer, tilestep.OverlappedOptimizer), isinstance(optimizer, tilestep.SGD)
        (True, True)
    """

    attached_as = ("overlap",)
    no_sync: Callable[[], Any]
    synchronize: Callable[[], None]


def overlap(
    optimizer: Optimizer,
    model: nn.Module,
    during: Literal["backward", "forward"] | None = None,
    *,
    bucket_cap_mb: float = 25.0,
    scaler: torch.amp.GradScaler | None = None,
    comm_hook: CommHook | None = None,
) -> OverlappedOptimizer:
    """Run an optimizer's updates during backward, or during the next forward.

    Parameters are updated in groups: the parameters that an FSDP2 module all-gathers (with "forward" those of several
    consecutive modules), or buckets of neighbouring parameters. On a GPU updates run on a separate stream. The results
    are bitwise those of the serial step, for rules without matrix products.

    With "backward" a group is updated, and its gradients are freed, as soon as its last gradient is accumulated;
    `step()` updates the other groups. If a decision needs all gradients (`max_grad_norm`, skipped steps, a scaler),
    `step()` takes the decision and updates all groups.

    With "forward" `step()` computes the norm, decides, and takes over the gradients. Every module's forward then waits
    for the update of its own parameters. Reading parameters from a module, or state through the optimizer's methods,
    waits for the update; call `synchronize()` before you read tensors that you hold yourself.

    Without `during` updates run in `step()`, and a warning says what to pass.

    The optimizer keeps its class; `isinstance(optimizer, tilestep.OverlappedOptimizer)` tells that it is overlapped.
    After `step()` the parameters' `grad` is None.

    Args:
        optimizer: a tilestep optimizer with all parameters on one device.
        model: the module that has its parameters: a plain module, a DistributedDataParallel, or one sharded by FSDP2.
        during: "backward" or "forward"; None to update in `step()`.
        bucket_cap_mb: MiB of parameters in a bucket.
        scaler: the gradient scaler of the loss, if one is used.
        comm_hook: for DistributedDataParallel and "backward", which takes one comm hook only: the state and function
            that reduce a bucket; None for the mean over ranks.

    Returns:
        The optimizer that was passed.

    Raises:
        TypeError: for an optimizer of another library.
        ValueError: for an unknown schedule; for parameters on several devices; for an optimizer that is sharded or
            overlapped, or whose updates run on the CPU; for a DistributedDataParallel that finds unused parameters.

    Source: torch.distributed.optim._apply_optimizer_in_backward, https://github.com/pytorch/pytorch/pull/98667.

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> model.weight.tolist(), model.weight.grad
        ([[0.5, 0.0]], None)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"overlap() requires a tilestep optimizer, not {type(optimizer).__name__}")
    refuse("overlap", optimizer.attached)
    if during not in ("backward", "forward", None):
        raise ValueError(f'Invalid during: {during!r}; it must be "backward" or "forward"')
    if comm_hook is not None and during != "backward":
        raise ValueError(
            'comm_hook requires during="backward": otherwise use DistributedDataParallel.register_comm_hook'
        )
    if not bucket_cap_mb > 0:
        raise ValueError(f"Invalid bucket_cap_mb: {bucket_cap_mb}; it must be positive")
    require_listed_once("overlap()", optimizer)
    require_shapes("overlap()", ((label, param) for label, _, _, param in iter_params(optimizer)))
    model = uncompiled(model)
    devices: dict[torch.device, str] = {}
    for name, module in model.named_modules():
        refuse("overlap", [kind_of(module)], f"module {name!r}" if name else "the model")
    for label, _, _, param in iter_params(optimizer):
        if reason := refusal("overlap", [split_kind(param)]):
            raise ValueError(f"{label} {reason.replace('is a', 'belongs to a', 1)}")
        if not param.is_meta:
            devices[param.device] = label
    if len(devices) > 1:
        (first, label), (second, other), *_ = devices.items()
        raise ValueError(f"overlap() requires all parameters on one device: {label} is on {first}, {other} on {second}")
    device = next(iter(devices), torch.device("cpu"))
    if during is None:
        warnings.warn(
            'overlap() without during= updates in step(): pass during="backward" to free gradients during backward, '
            'or during="forward" to update while the next forward runs',
            stacklevel=2,
        )
        optimizer.attach(("overlap",), offers={"no_sync": nullcontext, "synchronize": _no_wait})
        return cast(OverlappedOptimizer, optimizer)
    grouping = Grouping(optimizer, model, int(bucket_cap_mb * 2**20), joins=during == "forward")
    execution = OverlapExecution(optimizer, grouping, device, during, scaler, comm_hook)
    offers = {"no_sync": execution.no_sync, "synchronize": execution.synchronize}
    try:
        with unchanged_on_error(optimizer):
            optimizer.attach(("overlap",), execution=execution, offers=offers)
            optimizer.rebuild(ahead=True)
    except BaseException:
        execution.updates.timeline.hooks.remove()
        raise
    return cast(OverlappedOptimizer, optimizer)


@opaque
def _update_later(
    plan: StepPlan, places: tuple[int, ...], held: list[torch.Tensor], *, moves: bool, measures: bool
) -> None:
    """Update a group with the gradients that the step took; `moves` if memory may have moved since the step."""
    if not held:
        return
    # A step runs under no_grad. A look-up of parameters may not, and torch.compile may be tracing it.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
        plan.progress.clear()
        try:
            for place in places if moves else ():
                plan.engines[place].follow_memory()
            plan.update(places, counts_versions=False, measures=measures)
        except BaseException as error:
            if not isinstance(error, Exception) and not plan.progress:
                raise  # Ctrl-C before the first pass: the next look-up runs the update
            held.clear()
            raise
    held.clear()
