"""Updates in backward: a group of parameters is updated when its last gradient is complete."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compat import backward_pass, count_scaled_losses, local_parts, opaque, ready, step_is_ordinary
from ...devices import is_host
from ...optimizer import Optimizer
from ...optimizer.parameters import evaluation_error, iter_params
from ...placement.combinations import count_sharded, refuse_replaced, wrappers_around
from ...placement.local import is_distributed
from ...runtime import Stale
from ...timeline.guards import Publication
from ...timeline.side_stream import Held, Ticket
from ...timeline.timeline import NONE, TAKEN, UPDATED, Row, Timeline, arrived, gradientless, refuse_another_taker
from .groups import Group, Grouping

_NOTHING: AbstractContextManager[None] = nullcontext()


CommHook = tuple[Any, Callable[[Any, Any], Any]]
"""State and function, as `DistributedDataParallel.register_comm_hook` takes them."""


def follow_reductions(updates: GroupUpdates, wrapper: DistributedDataParallel) -> None:
    """Register a comm hook that takes the gradients of each bucket when DistributedDataParallel has reduced it."""
    if wrapper.find_unused_parameters or wrapper.static_graph:
        option = "static_graph" if wrapper.static_graph else "find_unused_parameters"
        raise ValueError(
            f"DistributedDataParallel with {option}=True finds unused parameters only at the end of backward: use "
            'during="forward"'
        )
    if any(param.is_complex() for param in wrapper.module.parameters()):
        raise ValueError(
            "DistributedDataParallel's buckets store complex gradients in another layout than the parameters: use "
            'during="forward"'
        )
    state, reduce = updates.comm_hook or (wrapper.process_group, _mean)
    # The updates hold the module; a strong reference back would be a cycle.
    living = weakref.ref(updates)

    @opaque
    def reduce_and_note(_: object, bucket: Any) -> Any:
        future = reduce(state, bucket)
        updates = living()
        if updates is not None:
            updates.note_reduced(bucket.parameters(), bucket.gradients(), future)
        return future

    # torch compares annotations with classes; postponed annotations are text.
    reduce_and_note.__annotations__.clear()
    try:
        wrapper.register_comm_hook(None, reduce_and_note)
    except RuntimeError as error:
        raise ValueError(
            "DistributedDataParallel has a comm hook already, and supports only one: do not register it, pass it to "
            "overlap() as comm_hook=(state, hook)"
        ) from error
    ignored = set(wrapper.parameters_to_ignore)
    named = wrapper.module.named_parameters()
    updates.timeline.exclude({id(param) for name, param in named if param.requires_grad and name not in ignored})


def _mean(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    """The mean over ranks, bitwise equal to DistributedDataParallel's without a hook."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]


class GroupUpdates(Row):
    """Updates groups of parameters in backward; with `updates=False` it counts no gradients, and `step` updates."""

    # A group is updated when its last gradient is accumulated, unless a clip, a loss scale or a skipped step needs a
    # decision for all groups: then `step` updates. The optimizer owns this object, which holds it weakly.

    accumulates = False
    choice = "overlap"
    taken_by = (
        'overlap(during="backward") has consumed it: set max_grad_norm on the optimizer, which clips inside the step, '
        'or use during="forward" and clip before step()'
    )

    def __init__(
        self,
        optimizer: Optimizer,
        grouping: Grouping,
        publication: Publication,
        updates: bool,
        scaler: torch.amp.GradScaler | None,
        comm_hook: CommHook | None,
    ) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._grouping, self.publication, self._scaler, self.comm_hook = grouping, publication, scaler, comm_hook
        self.takes = self.updates = updates
        self.applied: list[Group] = []  # the groups that backward has updated since the last step
        self.found_scaler = False  # whether updates wait only for a scaler that was not passed to `overlap`
        self._count_of_sharded = count_sharded(grouping.model)
        self._missing: list[int] = []  # the `id`s of parameters without gradients in the last step
        self._held = Held(publication.lane)  # gradients that running updates still read
        self._scaled_losses = count_scaled_losses()
        """The count after the last step: a loss scaled since then may be the loss of the next gradients."""
        self.timeline = Timeline(self, publication.lane)
        self.reduced: dict[int, torch.Tensor] = {}
        """By `id` of a parameter, its gradient in a bucket of DistributedDataParallel; `grad` is set later."""
        self._reductions: deque[tuple[Any, Callable[[], None]]] = deque()
        """Futures of running reductions, each with the function that takes its gradients."""
        self._later: list[Any] = []  # new wrappers of the model, which get a comm hook before the next backward
        self.watch()
        self.timeline.announce(grouping.model)
        inside = [module for module in grouping.model.modules() if isinstance(module, DistributedDataParallel)]
        for wrapper in dict.fromkeys([*inside, *wrappers_around(self.timeline.holds)]):
            if updates:
                follow_reductions(self, cast(DistributedDataParallel, wrapper))
            else:
                self._follow_views(wrapper)

    def watch(self) -> None:
        """Count the gradients of the current groups."""
        self.timeline.is_alone = False
        if not self.updates:
            # Gradients stay on their parameters until the step, which takes them.
            self.timeline.exclude(self._grouping.of.keys())
        self.timeline.count(group.params for group in self._grouping.groups)

    def wrapped(self, wrapper: nn.Module) -> None:
        """Follow a DistributedDataParallel made around the model, once constructed: at the next forward or backward."""
        if not self.updates:
            self._follow_views(wrapper)
            return
        living = weakref.ref(self)
        self._later.append(weakref.ref(wrapper))

        def before_forward(*_: Any) -> None:
            updates = living()
            if updates is not None:
                updates.follow_later()

        wrapper.register_forward_pre_hook(before_forward)

    def follow_later(self) -> Set[int]:
        """Follow new wrappers; returns the `id`s of all parameters that wrappers reduce."""
        wrappers, self._later = self._later, []
        for wrapper in filter(None, (reference() for reference in wrappers)):
            follow_reductions(self, wrapper)
        return self.timeline.elsewhere

    @gradientless
    def note_reduced(self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], future: Any) -> None:
        """Note a bucket's gradients, which are complete when `future` is."""
        timeline, lane, reductions = self.timeline, self.publication.lane, self._reductions
        if not timeline.syncing:
            return
        timeline.note_pass(backward_pass())
        for param in params if timeline.when == "ready" else ():
            if timeline.holds(param):
                timeline.take(param, max(TAKEN, timeline.stage_of(param)))

        def take() -> None:
            with lane.after():
                future.wait()
            for param, gradient in zip(params, gradients):
                self.reduced[id(param)] = gradient
                if timeline.holds(param):
                    arrived(lambda: timeline, param, is_noted=True)

        reductions.append((future, take))
        while reductions and (lane.stream is not None or reductions[0][0].done()):
            reductions.popleft()[1]()

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        return self.reduced.get(id(param), param.grad)

    def _follow_views(self, wrapper: nn.Module) -> None:
        """Run pending updates, whose gradients may be views of a wrapper's buckets, before backward writes to these."""
        # Updates of unused parameters too: backward begins by zeroing the gradients of these.
        living = weakref.ref(self.publication)

        @opaque
        def complete(wrapper: Any, *_: Any) -> None:
            publication = living()
            if publication is not None and publication.tickets and wrapper.gradient_as_bucket_view:
                publication.wait_all()

        wrapper.register_forward_hook(complete)

    def begin(self) -> Set[int]:
        """Decide whether backward updates; returns the `id`s of parameters that new wrappers reduce."""
        optimizer, timeline = self._optimizer(), self.timeline
        if optimizer.is_evaluating:
            raise evaluation_error("backward()")
        if not timeline.is_alone:
            refuse_another_taker(timeline)
        moved = self.follow_later() if self._later else NONE
        plan = optimizer.plan
        if plan is None or not plan.basis.fits(optimizer):
            plan = optimizer.rebuild()
        control, scaler = optimizer.control, self._scaler
        scaled = control.gradients_scaled or (scaler is not None and scaler.is_enabled())
        if scaled or control.needs_norm(optimizer.param_groups):
            return moved
        if count_scaled_losses() != self._scaled_losses:
            self.found_scaler = True
            return moved
        timeline.when = "ready"
        if plan.ahead:
            plan.init_states(optimizer, all_of_them=True)
        if optimizer.reports is not None:
            optimizer.reports.begin(plan.engines)
        if not plan.deciders.is_trivial or plan.masters.follow:
            with self.publication.lane.after():
                if not plan.deciders.is_trivial:
                    control.update_control(optimizer, plan.deciders)
                if plan.masters.follow:
                    plan.masters.catch_up()
        return moved

    def again(self, bucket: int, param: torch.Tensor) -> bool:
        """Raise for a second gradient of an updated parameter; other groups wait for all their gradients again."""
        if self.timeline.stage_of(param) == UPDATED:
            raise self._late(param, self._grouping.groups[bucket])
        return True

    def ready(self, bucket: int) -> None:
        """Update a group whose gradients are complete, unless `step` must decide first."""
        if self.timeline.when == "step":
            return
        group, gradient = self._grouping.groups[bucket], self._gradient
        # `model.zero_grad()` may have dropped gradients of an earlier backward: then `step` updates.
        if group.spans_tensors and any(gradient(one) is None for one in group.params if one.requires_grad):
            return
        # An updated group waits again for a parameter that did not train before; its updated parameters must not get a
        # second gradient.
        for param in group.params if group in self.applied else ():
            if self.timeline.stage_of(param) == UPDATED and gradient(param) is not None:
                raise self._late(param, group)
        self._update(group)

    def _late(self, param: torch.Tensor, group: Group) -> RuntimeError:
        """The error for a gradient that arrived after the update of its parameter."""
        label = next(label for label, _, _, candidate in iter_params(self._optimizer()) if candidate is param)
        name = next((name for name, candidate in self._grouping.model.named_parameters() if candidate is param), None)
        return RuntimeError(
            f"a gradient of {label if name is None or label.endswith(')') else f'{label} ({name})'} arrived after "
            f"{group.name} was updated in backward: run all but the last backward of a step inside "
            "optimizer.no_sync(); after a backward that raised an error, call zero_grad() first; for parameters that "
            'reentrant checkpoints share, use during="forward"'
        )

    def _update(self, group: Group) -> None:
        """Update a group from its current gradients, and release these."""
        lane, optimizer, awaited = self.publication.lane, self._optimizer(), self.timeline.buckets[group.index]
        if group.is_copied_to_host and any(is_host(param.device) for param in group.params):
            # With FSDP2's CPU offloading, copies of gradients from a GPU to the host may still run.
            torch.cuda.current_stream().synchronize()
        current = None if lane.stream is None else lane.current()
        streams = [] if current is None else list(awaited.writers.values()) or [current]
        if current is not None:
            awaited.writers.clear()
        with _NOTHING if current is None else lane.after(*streams):
            plan, find = optimizer.plan, (self._gradient,) if self.reduced else ()
            places = plan.places.get(group.index, ())
            try:
                plan.refresh(places, *find)
            except Stale:
                plan = optimizer.rebuild()
                places = plan.places.get(group.index, ())
                plan.refresh(places, *find)
            with plan.masters.writes.own(group.params) if plan.masters.exist else _NOTHING:
                is_marked, measures = not step_is_ordinary(), optimizer.reports is not None
                plan.update(places, counts_versions=True, marked=is_marked, measures=measures)
            mark = None if current is None else lane.next_mark()
        # On a GPU the update may still read the gradients.
        used_up, taken = list[torch.Tensor](), self.timeline.taken
        self.applied.append(group)
        for place, param in enumerate(group.params, awaited.first):
            if id(param) in self.reduced:
                taken[place] = UPDATED
            elif param.grad is not None:
                used_up.append(param.grad)
                taken[place] = UPDATED
                param.grad = None
        if mark is None:
            return
        self.publication.tickets[group] = Ticket(mark=mark)
        meshes = (getattr(param, "device_mesh", None) for param in group.params)
        if len(streams) > 1 or any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
            # The stream that completes a gradient may not be the stream that allocated it.
            lane.keep(*map(ready, local_parts(used_up)))
            used_up = []
        # Waiting would stall a stream that computes backward; FSDP2's reduce-scatters have a stream that may wait.
        at_once = bool(used_up and group.modules) and all(map(is_distributed, group.params))
        if not at_once:
            self._held.release()
        self._held.hold(used_up, mark, streams)
        if at_once:
            self._held.release()

    def finish(self) -> None:
        """Update the remaining groups, make the current stream wait for all updates, and end the round."""
        optimizer = self._optimizer()
        if self.timeline.running and self.applied:
            raise RuntimeError(
                f"backward failed after it had updated {_listed([group.name for group in self.applied])}: "
                "call zero_grad() to drop the remaining gradients"
            )
        while self._reductions:
            self._reductions.popleft()[1]()
        late: RuntimeError | None = None
        for group in self.applied:
            for param in group.params:
                if param.grad is not None and self.timeline.stage_of(param) == UPDATED:
                    # DistributedDataParallel sets `grad` to reduced gradients at the end of backward: not late.
                    if id(param) not in self.reduced and late is None:
                        late = self._late(param, group)
                    param.grad = None
        plan = optimizer.fitting_plan()
        changed = [
            group.name
            for group in self.applied
            if any(plan.hypers[place].changes() for place in plan.places.get(group.index, ()))
        ]
        self.reduced.clear()
        left = [group for group in self._grouping.groups if group not in self.applied]
        if left:
            self.find_missing(left)
        for group in self._grouping.groups:
            if any(param.grad is not None for param in group.params):
                self._update(group)
            elif group in left:
                for place in plan.places.get(group.index, ()):
                    plan.engines[place].clear()
        if optimizer.reports is not None:
            with self.publication.lane.after():
                optimizer.reports.finish()
        if self.publication.lane.in_order:
            self.publication.lane.join()
        self.forget()
        if changed:
            raise RuntimeError(
                f"hyperparameters have changed since backward, which used the earlier values to update "
                f"{_listed(changed)}: set them before backward, or after step()"
            )
        if late is not None:
            raise late

    def forget(self) -> None:
        """End the round; the current stream has waited for its updates."""
        if self.publication.lane.in_order:
            self._held.release()
        if self.updates:
            self.publication.tickets.clear()
        self._scaled_losses = count_scaled_losses()
        self.found_scaler, self.applied = False, []
        self.reduced.clear()
        self._reductions.clear()
        self.timeline.forget()

    def drop(self) -> None:
        """End a round without updates, whose gradients are dropped."""
        # The loss of the next backward may be scaled already.
        scaled_losses = self._scaled_losses
        self.forget()
        self._scaled_losses = scaled_losses

    def find_missing(self, groups: Sequence[Group]) -> None:
        """If the set of parameters without gradients has changed, raise if the model no longer holds them."""
        missing = [id(param) for group in groups for param in group.params if param.grad is None]
        if missing and missing != self._missing:
            self.refuse_replaced()
        self._missing = missing

    def refuse_replaced(self) -> None:
        """Raise if FSDP2 has replaced the model's parameters since: the old parameters get no gradients."""
        params = [param for group in self._grouping.groups for param in group.params]
        refuse_replaced(self._grouping.model, params, self._count_of_sharded)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more groups" if len(names) > 3 else "")
    return shown or "nothing"


UNTOLD_SCALE = (
    "updates run in backward, but the gradients carry a loss scale: pass the scaler to overlap(), "
    "overlap(optimizer, model, scaler=scaler), and updates wait for its found_inf; nothing was updated"
)
