"""Gradients as backward or DistributedDataParallel completes them, and the updates made right then."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...combinations import count_sharded, refuse_replaced, wrappers_around
from ...compat import backward_pass, count_scaled_losses, local_parts, opaque, ready, step_is_ordinary
from ...devices import is_host
from ...errors import GradientError
from ...optimizer import Optimizer
from ...optimizer.parameters import iter_params
from ...placement.local import is_distributed
from ...runtime import Stale
from ...timeline.accumulation import GradientRounds, gradientless
from ...timeline.guards import Publication
from ...timeline.side_stream import Mark, Ticket
from ...timeline.takers import TakesGradients, refuse_another_taker
from .groups import Group, Grouping

_NONE: Set[int] = frozenset()
_NOTHING: AbstractContextManager[None] = nullcontext()

CommHook = tuple[Any, Callable[[Any, Any], Any]]
"""State and function, as `DistributedDataParallel.register_comm_hook` takes them."""


class BackwardTracker(TakesGradients):
    """What has happened to gradients since the last step, and the updates that this makes."""

    # A group is updated when the last of its gradients is there, if nothing has to be decided for all groups together:
    # a clip, a loss scale and a skipped step are decided by the step. The optimizer, which has this, is not kept alive.

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        grouping: Grouping,
        publication: Publication,
        *,
        updates: bool,
        scaler: torch.amp.GradScaler | None,
        comm_hook: CommHook | None,
    ) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._model, self._grouping, self._lane = model, grouping, publication.lane
        self._updates, self._scaler, self._comm_hook = updates, scaler, comm_hook
        self.publication = publication
        self._count_of_sharded = count_sharded(model)
        self._missing: dict[Group, list[bool]] = {}  # which gradients of a group the last step without all had not
        self.rounds = GradientRounds(self, self._lane, self.arrived)
        self._held: deque[tuple[list[torch.Tensor], Mark, list[torch.cuda.Stream]]] = deque()
        """Gradients that are used up, until the streams whose memory they are have waited for their update."""
        self.takes = self.updates = updates
        self._scaled_losses = count_scaled_losses()
        """As it was after the last step: a loss that was scaled since may be that of the gradients to come."""
        self._later_wrappers: list[Any] = []
        """DistributedDataParallels that have come around the model since, to be followed before a backward."""
        self._begin()
        self.announce(model)
        for wrapper in dict.fromkeys([*wrappers(model), *wrappers_around(self.holds)]):
            if updates:
                self._follow_wrapper(wrapper)
            else:
                self._follow_views(wrapper)
        self.watch()

    def _begin(self) -> None:
        self.applies = False
        self.meets_a_scaler = False  # whether updates have waited only because of a scaler that nothing has told of
        self.applied: list[Group] = []
        self._updated: set[int] = set()  # parameters of the applied groups, by id
        self._reduced: dict[int, torch.Tensor] = {}
        """Gradients that are somewhere else than in their parameter's `grad`."""
        self._announced: set[int] = set()  # parameters whose gradients have been taken from their collective, by id
        self._awaited: deque[tuple[Any, Callable[[], None]]] = deque()
        """Reductions that a CPU's threads are busy with, and what to do once they are done."""

    @property
    def has_updated(self) -> bool:
        """Whether some group's update is made."""
        return bool(self.applied)

    def watch(self) -> None:
        """Count the gradients of the groups that there are now."""
        self.is_alone = False
        self.rounds.count(group.params for group in self._grouping.groups)

    def arrived(self, param: torch.Tensor) -> None:
        """Note that a parameter's gradient is complete."""
        if self._updates:
            if self.rounds.syncing:
                self.rounds.arrived(param)
        elif self.publication.tickets:
            self._complete_deferred()

    @gradientless
    def _complete_deferred(self) -> None:
        """Before backward writes gradients: run the updates of the last step that no look-up has needed."""
        self.publication.wait_all()

    def _follow_views(self, wrapper: nn.Module) -> None:
        """Have updates run that read a DistributedDataParallel's buckets before its backward writes to these again."""
        # Also of what its forward has not used: its backward begins by zeros in the place of such gradients.
        living = weakref.ref(self.publication)

        @opaque
        def complete(wrapper: Any, *_: Any) -> None:
            publication = living()
            if publication is not None and publication.tickets and wrapper.gradient_as_bucket_view:
                publication.wait_all()

        wrapper.register_forward_hook(complete)

    def holds(self, param: Any) -> bool:
        """Whether a parameter is updated here."""
        return id(param) in self._grouping.of

    def wrapped(self, wrapper: nn.Module, kind: str) -> None:
        """Follow a DistributedDataParallel that comes around the model, or refuse another wrapper."""
        # It is not complete yet: that is done before its first forward, or in a backward that comes without one.
        super().wrapped(wrapper, kind)
        if not self._updates:
            self._follow_views(wrapper)
        else:
            living = weakref.ref(self)
            self._later_wrappers.append(weakref.ref(wrapper))

            def before_forward(*_: Any) -> None:
                tracker = living()
                if tracker is not None:
                    tracker.follow_later_wrappers()

            wrapper.register_forward_pre_hook(before_forward)

    def follow_later_wrappers(self) -> Set[int]:
        """Take gradients from the DistributedDataParallels that have come around the model when they are reduced."""
        wrappers, self._later_wrappers = self._later_wrappers, []
        for wrapper in filter(None, (reference() for reference in wrappers)):
            self._follow_wrapper(wrapper)
        return self.rounds.elsewhere

    def _follow_wrapper(self, wrapper: Any) -> None:
        self.rounds.leave_out(follow_buckets(wrapper, self, self._comm_hook))

    choice = "overlap"
    taken_by = (
        'overlap(during="backward") has consumed it during backward: set max_grad_norm on the optimizer, which clips '
        'inside the step, or use during="forward" and clip before step()'
    )

    @property
    def has_taken_some(self) -> bool:
        """Whether backward has used gradients up, before their step."""
        return bool(self._updated or self._announced)

    def has_taken(self, param: Any) -> bool:
        """Whether backward has used a parameter's gradient up, before its step."""
        return id(param) in self._updated or id(param) in self._announced

    @gradientless
    def reduced(self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], future: Any) -> None:
        """Note gradients that are complete when a collective has run."""
        if not self._updates or not self.rounds.syncing:
            return
        self.rounds.note_pass(backward_pass())
        if self.applies:
            self._announced.update(map(id, params))

        def take() -> None:
            with self._lane.after():
                future.wait()
            for param, gradient in zip(params, gradients):
                self._reduced[id(param)] = gradient
                if self.holds(param):
                    self.rounds.arrived(param, is_noted=True)

        self._awaited.append((future, take))
        while self._awaited and (self._lane.stream is not None or self._awaited[0][0].done()):
            self._awaited.popleft()[1]()

    def begin_round(self) -> Set[int]:
        """Decide whether backward updates; what DistributedDataParallels reduce that have come since, by `id`."""
        optimizer = self._optimizer()
        if optimizer.is_evaluating:
            raise RuntimeError("the parameters hold the weights to evaluate: call train() before backward()")
        if not self.is_alone:
            refuse_another_taker([param for group in self._grouping.groups for param in group.params], self)
        moved = self.follow_later_wrappers() if self._later_wrappers else _NONE
        plan = optimizer.fitting_plan(parts=False)
        control, scaler = optimizer.control, self._scaler
        scaled = control.gradients_scaled or (scaler is not None and scaler.is_enabled())
        self.applies = not (scaled or control.needs_norm(optimizer.param_groups))
        if self.applies and count_scaled_losses() != self._scaled_losses:
            self.applies, self.meets_a_scaler = False, True
        if not self.applies:
            return moved
        if plan.ahead:
            plan.begin_states(optimizer, all_of_them=True)
        if optimizer.reports is not None:
            optimizer.reports.begin(plan.engines)
        if not plan.decided_plainly or plan.follows:
            with self._lane.after():
                if not plan.decided_plainly:
                    control.update_control(optimizer, plan)
                if plan.follows:
                    plan.sync_masters()
                    plan.record_versions()
        return moved

    def is_awaited_again(self, bucket: int, param: torch.Tensor) -> bool:
        """Whether a group waits for gradients although it had all: its norm is known, backward runs once more."""
        if id(param) in self._updated:
            raise self._late(param, self._grouping.groups[bucket])
        return True

    def complete(self, bucket: int) -> None:
        """Update a group whose gradients are complete, unless the step has to decide first."""
        group = self._grouping.groups[bucket]
        if not self.applies:
            return
        # Gradients that have come in a backward before may be gone, by `model.zero_grad()`: then the step updates.
        if group.spans_tensors and any(self._gradient(one) is None for one in group.params if one.requires_grad):
            return
        # Of a group that waits once more, for a parameter that did not train before, others may come again too.
        for param in group.params if group in self.applied else ():
            if id(param) in self._updated and self._gradient(param) is not None:
                raise self._late(param, group)
        self._update(group)

    def _late(self, param: torch.Tensor, group: Group) -> RuntimeError:
        """For a gradient that has come after the update that would have used it."""
        label = next(label for label, _, _, candidate in iter_params(self._optimizer()) if candidate is param)
        name = next((name for name, candidate in self._model.named_parameters() if candidate is param), None)
        return RuntimeError(
            f"a gradient of {label if name is None or label.endswith(')') else f'{label} ({name})'} came after "
            f"{group.name} was updated in backward: run all but the last backward before a step inside "
            "optimizer.no_sync(); after a backward that raised an error call zero_grad() first; for parameters that "
            'reentrant checkpoints share use during="forward"'
        )

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        return self._reduced.get(id(param), param.grad)

    def _update(self, group: Group) -> None:
        """Update a group from the gradients that it has, and let these go."""
        lane = self._lane
        if group.is_copied_to_host:
            _await_copies(group)
        if lane.stream is None:
            self._run(group)
            self._note_updated(group)
            return
        current = lane.current()
        streams = self._take_writers(group) or ([] if current is None else [current])
        with lane.after(*streams):
            self._run(group)
            mark = lane.next_mark()
        assert mark is not None
        self.publication.tickets[group.index] = Ticket(mark=mark)
        gradients = self._note_updated(group)
        if self._on_two_streams(group, streams):
            lane.keep(*map(ready, local_parts(gradients)))
            gradients = []
        # A stream that computes backward would stand still for this update; one that only communicates can wait for it.
        at_once = bool(gradients) and _come_from_collectives(group)
        if not at_once:
            self._let_go()
        self._held.append((gradients, mark, streams))
        if at_once:
            self._let_go()

    def _take_writers(self, group: Group) -> list[torch.cuda.Stream]:
        """The streams that have written a group's gradients, on a GPU."""
        streams = self.rounds.writers[group.index]
        taken = list(streams.values())
        streams.clear()
        return taken

    def _note_updated(self, group: Group) -> list[torch.Tensor]:
        """Take the gradients of a group that is updated from its parameters; they are still to be kept on a GPU."""
        own = [param for param in group.params if id(param) not in self._reduced] if self._reduced else group.params
        gradients = [param.grad for param in own if param.grad is not None]
        self.applied.append(group)
        self._updated.update([id(param) for param in own if param.grad is not None])
        if self._reduced:
            self._updated.update(key for key in map(id, group.params) if key in self._reduced)
        for param in own:
            param.grad = None
        return gradients

    def _run(self, group: Group) -> None:
        optimizer = self._optimizer()
        plan, find = optimizer.plan, (self._gradient,) if self._reduced else ()
        assert plan is not None
        places = plan.places.get(group.index, ())
        try:
            gradients = plan.refresh_places(places, *find)
        except Stale:
            plan = optimizer.rebuild()
            places = plan.places.get(group.index, ())
            gradients = plan.refresh_places(places, *find)
        with plan.masters.own_writes(group.params) if plan.has_masters else _NOTHING:
            is_marked, measures = not step_is_ordinary(), optimizer.reports is not None
            plan.update(gradients, places, counts_versions=True, marked=is_marked, measures=measures)

    def _on_two_streams(self, group: Group, streams: Sequence[torch.cuda.Stream]) -> bool:
        """Whether gradients may be memory of other streams than the one that completes them."""
        if self._lane.stream is None or len(streams) > 1:
            return self._lane.stream is not None
        meshes = (getattr(param, "device_mesh", None) for param in group.params)
        return any(mesh is not None and mesh.ndim > 1 for mesh in meshes)

    def _let_go(self) -> None:
        """Let the streams that gradients come from wait for the updates of those held, and have their memory back."""
        # So memory is free at a point of each stream, however far the host is ahead of it. The next group's gradients
        # may come from another stream: its waiting would not keep the first from using the memory again.
        while self._held:
            _, mark, streams = self._held[0]
            self._lane.wait_for(mark, streams)
            self._held.popleft()

    def finish(self) -> None:
        """Update what is left, and let the current stream wait for all updates; the next round may begin."""
        optimizer = self._optimizer()
        while self._awaited:
            self._awaited.popleft()[1]()
        late: RuntimeError | None = None
        for group in self.applied:
            for param in group.params:
                if id(param) in self._updated:
                    # What DistributedDataParallel has reduced it gives to the parameters at the end of backward.
                    if param.grad is not None and id(param) not in self._reduced and late is None:
                        late = self._late(param, group)
                    param.grad = None
        plan = optimizer.fitting_plan(parts=False)
        changed = [
            group.name
            for group in self.applied
            if any(plan.engines[place].hypers_changed for place in plan.places.get(group.index, ()))
        ]
        self._reduced.clear()
        for group in self._grouping.groups:
            is_applied = group in self.applied
            if not is_applied and (missing := [param.grad is None for param in group.params]) != self._missing.get(
                group
            ):
                self._missing[group] = missing
                self.refuse_replaced()
            if any(param.grad is not None for param in group.params):
                self._update(group)
            elif not is_applied:
                for place in plan.places.get(group.index, ()):
                    plan.engines[place].gradients.have_none()
        if optimizer.reports is not None:
            with self._lane.after():
                optimizer.reports.finish()
        self._lane.join()
        self.forget()
        if changed:
            raise RuntimeError(
                f"hyperparameters have changed since backward, which has updated {_listed(changed)} with those before: "
                "set them before backward, or after step()"
            )
        if late is not None:
            raise late

    def forget(self) -> None:
        """Let the next round begin; the current stream has waited for the updates of this one."""
        self._let_go()
        if self._updates:
            self.publication.tickets.clear()
        self._scaled_losses = count_scaled_losses()
        self._begin()
        self.rounds.end()
        if not self.rounds.is_native:
            self.rounds.count_faster()

    def drop(self) -> None:
        """As `forget`, for a round that has updated nothing and whose gradients are dropped."""
        # The loss of the next backward may have been scaled already.
        scaled_losses = self._scaled_losses
        self.forget()
        self._scaled_losses = scaled_losses

    def refuse_replaced(self) -> None:
        """Raise if parameters are not the model's any more since FSDP2 has sharded it: they get no gradients."""
        params = [param for group in self._grouping.groups for param in group.params]
        refuse_replaced(self._model, params, self._count_of_sharded)

    def require_whole(self) -> None:
        """Raise if a backward pass was broken off."""
        if self.rounds.is_broken and self.applied:
            raise RuntimeError(
                f"backward was broken off when it had updated {_listed([group.name for group in self.applied])}: "
                "call zero_grad() to drop the other gradients and go on"
            )


def _come_from_collectives(group: Group) -> bool:
    """Whether gradients are memory of FSDP2's reduce-scatters, and not of a stream that computes backward."""
    return bool(group.modules) and all(map(is_distributed, group.params))


def _await_copies(group: Group) -> None:
    """Wait for gradients that are still on their way from a GPU to the host, as FSDP2's CPU offloading leaves them."""
    if any(is_host(param.device) for param in group.params):
        torch.cuda.current_stream().synchronize()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more groups" if len(names) > 3 else "")
    return shown or "nothing"


def scale_error() -> GradientError:
    """For a loss scale that updates in backward know nothing of."""
    return GradientError(
        "updates are made in backward, and the gradients carry a loss scale: tell overlap() of the scaler, "
        "overlap(optimizer, model, scaler=scaler), and updates wait for its decision; nothing was updated"
    )


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel in a model."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def follow_buckets(
    wrapper: DistributedDataParallel, gradients: BackwardTracker, comm_hook: CommHook | None
) -> set[int]:
    """Have a tracker see the gradients that are reduced."""
    if wrapper.find_unused_parameters or wrapper.static_graph:
        option = "static_graph" if wrapper.static_graph else "find_unused_parameters"
        raise ValueError(
            f"DistributedDataParallel with {option}=True finds unused parameters at the end of backward, and sets "
            'their gradients to zero before: use during="forward"'
        )
    if any(param.is_complex() for param in wrapper.module.parameters()):
        raise ValueError(
            "buckets of DistributedDataParallel hold complex gradients in another layout than their parameters: use "
            'during="forward"'
        )
    group = wrapper.process_group
    state, reduce = comm_hook or (None, lambda _, bucket: _mean(group, bucket))

    # The module must not keep the tracker, which keeps the module.
    living = weakref.ref(gradients)

    @opaque
    def reduce_and_note(_: object, bucket: Any) -> Any:
        future = reduce(state, bucket)
        tracker = living()
        if tracker is not None:
            tracker.reduced(bucket.parameters(), bucket.gradients(), future)
        return future

    # Their text is not the class that is looked for.
    reduce_and_note.__annotations__.clear()
    try:
        wrapper.register_comm_hook(None, reduce_and_note)
    except RuntimeError as error:
        raise ValueError(
            "DistributedDataParallel has a comm hook already, and takes only one: give it to overlap(), as "
            "comm_hook=(state, hook), before it is registered"
        ) from error
    ignored = set(wrapper.parameters_to_ignore)
    named = wrapper.module.named_parameters()
    return {id(param) for name, param in named if param.requires_grad and name not in ignored}


def _mean(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    """To the bit what DistributedDataParallel does without a hook."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]
