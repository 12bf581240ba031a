"""Gradients of several streams: none is let go before the stream whose memory it is has waited for its update."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import tilestep


class Event:
    """A point in the lane."""

    def query(self) -> bool:
        return False


class Stream:
    """A stream that remembers what it has waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waited: set[Event] = set()


class Streams:
    """A lane beside several streams of which one is current."""

    def __init__(self) -> None:
        self.stream, self.in_order = Stream(0), True
        self.others = [Stream(1), Stream(2)]
        self.now = self.others[0]
        self.marks: list[Event] = []

    def current(self) -> Stream:
        return self.now

    def note_current(self, streams: dict[int, Stream]) -> None:
        streams[self.now.cuda_stream] = self.now

    @contextmanager
    def after(self, *_: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def left(self) -> Iterator[None]:
        yield
        self.next_mark()

    def next_mark(self) -> Event:
        self.marks.append(Event())
        return self.marks[-1]

    def wait_for(self, mark: Event, streams: Sequence[Stream] = ()) -> None:
        for stream in streams or [self.now]:
            stream.waited.add(mark)

    def join(self) -> None:
        self.now.waited.update(self.marks)

    def join_all(self) -> bool:
        for stream in self.others:
            stream.waited.update(self.marks)
        return True

    def keep(self, *_: torch.Tensor) -> None:
        raise AssertionError("every group here has one stream")


def put_beside(optimizer: Any, lane: Streams) -> None:
    """Have an overlapped optimizer's work in another lane."""
    schedule = optimizer.execution
    schedule.lane = schedule.publication.lane = schedule.updates.timeline._lane = schedule.updates._held._line = lane


def test_memory_goes_back_to_streams_that_have_waited() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    lane, let_go = Streams(), dict[int, bool]()
    updates: dict[int, Event] = {}

    def begin(place: int) -> Any:
        def hook(_: torch.Tensor) -> None:
            lane.now = lane.others[place % 2]

        return hook

    def complete(place: int) -> Any:
        own = lane.others[place % 2]

        def note() -> None:
            let_go[place] = updates[place] in own.waited

        def hook(param: torch.Tensor) -> None:
            weakref.finalize(param.grad, note)

        return hook

    for place, layer in enumerate(layers):
        layer.weight.register_hook(begin(place))
        layer.weight.register_post_accumulate_grad_hook(complete(place))
    optimizer = tilestep.overlap(
        tilestep.SGD(model.parameters(), lr=0.1),  # type: ignore[attr-defined]
        model,
        during="backward",
        bucket_cap_mb=1e-6,
    )
    places = {id(layer.weight): place for place, layer in enumerate(layers)}
    put_beside(optimizer, lane)
    schedule: Any = optimizer.execution

    class Noting(dict[Any, Any]):
        def __setitem__(self, group: Any, ticket: Any) -> None:
            updates[places[id(group.params[0])]] = ticket.mark
            super().__setitem__(group, ticket)

    schedule.publication.tickets = Noting()
    model(torch.ones(2, 4)).sum().backward()
    assert len(optimizer.applied_groups) == 4
    lane.now = lane.others[1]
    optimizer.step()
    assert let_go == dict.fromkeys(range(4), True)


def test_what_a_plan_has_read_goes_back_to_streams_that_have_waited() -> None:
    """FSDP2 calls hooks on its own stream: a plan made there reads what was loaded on another, and lets it go."""
    model, lane = nn.Linear(4, 4), Streams()
    optimizer = tilestep.overlap(tilestep.AdamW(model.parameters()), model, during="backward")
    put_beside(optimizer, lane)

    def train() -> None:
        lane.now = lane.others[0]
        loss = model(torch.ones(2, 4)).sum()
        lane.now = lane.others[1]
        loss.backward()
        lane.now = lane.others[0]
        optimizer.step()

    train()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.plan is None
    plans, have_waited = len(lane.marks), list[bool]()
    for state in [optimizer.state[param] for param in model.parameters()]:
        loaded = state["step"].untyped_storage()
        weakref.finalize(loaded, lambda: have_waited.append(lane.marks[plans] in lane.others[0].waited))
    del loaded, state
    train()
    assert have_waited == [True, True]
