"""Gradients that DistributedDataParallels reduce: complete with a future, before parameters receive them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compat import backward_pass, opaque
from ...placement.combinations import wrappers_around
from ...timeline.side_stream import SideStream
from ...timeline.timeline import TAKEN, Timeline, arrived, gradientless

CommHook = tuple[Any, Callable[[Any, Any], Any]]
"""State and function, as `DistributedDataParallel.register_comm_hook` takes them."""


class ReducedGradients:
    """The gradients of a timeline that lie in buckets of DistributedDataParallels, and not yet in `grad`."""

    def __init__(self, timeline: Timeline, lane: SideStream, comm_hook: CommHook | None) -> None:
        self._timeline, self._lane, self._comm_hook = timeline, lane, comm_hook
        self.of: dict[int, torch.Tensor] = {}  # by `id` of the parameter
        self.later: list[Any] = []  # wrappers that have come around the model since, to be followed before a backward
        self.awaited: deque[tuple[Any, Callable[[], None]]] = deque()
        """Futures of running reductions, each with the function that takes its gradients."""

    def gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter, wherever it is."""
        return self.of.get(id(param), param.grad)

    def wait(self) -> None:
        """Take the gradients that are still on their way."""
        while self.awaited:
            self.awaited.popleft()[1]()

    @gradientless
    def _reduced(self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], future: Any) -> None:
        """Note gradients that are complete when a collective has run."""
        timeline = self._timeline
        if not timeline.syncing:
            return
        timeline.note_pass(backward_pass())
        for param in params if timeline.when == "ready" else ():
            if timeline.holds(param):
                timeline.take(param, max(TAKEN, timeline.stage_of(param)))

        def take() -> None:
            with self._lane.after():
                future.wait()
            for param, gradient in zip(params, gradients):
                self.of[id(param)] = gradient
                if timeline.holds(param):
                    arrived(lambda: timeline, param, is_noted=True)

        self.awaited.append((future, take))
        while self.awaited and (self._lane.stream is not None or self.awaited[0][0].done()):
            self.awaited.popleft()[1]()

    def follow_soon(self, wrapper: nn.Module) -> None:
        """Follow a wrapper that is not complete yet, before its first forward or in a backward without one."""
        living = weakref.ref(self)
        self.later.append(weakref.ref(wrapper))

        def before_forward(*_: Any) -> None:
            reduced = living()
            if reduced is not None:
                reduced.follow_later()

        wrapper.register_forward_pre_hook(before_forward)

    def follow_later(self) -> set[int]:
        """Follow new wrappers; `id`s of all parameters that wrappers reduce."""
        wrappers, self.later = self.later, []
        for wrapper in filter(None, (reference() for reference in wrappers)):
            self.follow(wrapper)
        return self._timeline.elsewhere

    def follow(self, wrapper: DistributedDataParallel) -> None:
        """Take gradients from a wrapper when it has reduced them."""
        if wrapper.find_unused_parameters or wrapper.static_graph:
            option = "static_graph" if wrapper.static_graph else "find_unused_parameters"
            raise ValueError(
                f"DistributedDataParallel with {option}=True finds unused parameters at the end of backward, and sets "
                'their gradients to zero before: use during="forward"'
            )
        if any(param.is_complex() for param in wrapper.module.parameters()):
            raise ValueError(
                "buckets of DistributedDataParallel hold complex gradients in another layout than their parameters: "
                'use during="forward"'
            )
        state, reduce = self._comm_hook or (wrapper.process_group, _mean)

        # The module must not keep this, which keeps the module.
        living = weakref.ref(self)

        @opaque
        def reduce_and_note(_: object, bucket: Any) -> Any:
            future = reduce(state, bucket)
            reduced = living()
            if reduced is not None:
                reduced._reduced(bucket.parameters(), bucket.gradients(), future)
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
        self._timeline.leave_out({id(param) for name, param in named if param.requires_grad and name not in ignored})


def _mean(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    """To the bit what DistributedDataParallel does without a hook."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]


def wrappers_of(model: nn.Module, timeline: Timeline) -> list[Any]:
    """Every DistributedDataParallel in a model, and around a timeline's parameters."""
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return list(dict.fromkeys([*inside, *wrappers_around(timeline.holds)]))
