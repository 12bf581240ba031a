"""Which streams wait for communication, and how often the device is asked: with streams that only count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tilestep
from tilestep.timeline import side_stream
from tilestep.timeline.side_stream import SideStream


class Event:
    def __init__(self, done: set[int], number: int, asked: list[int]) -> None:
        self._done, self.number, self._asked = done, number, asked

    def query(self) -> bool:
        self._asked.append(self.number)
        return self.number in self._done


class Streams:
    """A stream of communication and any number of others, of which one is the current one."""

    def __init__(self) -> None:
        self.current = 1
        self.made = 0
        self.waits: list[tuple[int, int]] = []
        """Stream and event."""
        self.asked: list[int] = []
        """Events that were asked whether they have happened."""
        self.done: set[int] = set()

    @property
    def cuda_stream(self) -> int:
        return self.current

    def record_event(self, event: Event | None = None) -> Event:
        self.made += 1
        return Event(self.done, self.made, self.asked)

    def wait_event(self, event: Event) -> None:
        self.waits.append((self.current, event.number))

    def wait_stream(self, stream: Any) -> None:
        pass


@contextmanager
def counted() -> Iterator[Streams]:
    """Have channels use such streams."""
    streams = Streams()
    before = SideStream.__init__

    def made(self: SideStream, device: torch.device, **options: Any) -> None:
        before(self, device, **options)
        self.stream, self._index, self.in_order = streams, 0, True  # type: ignore[assignment]

    @contextmanager
    def after_compute(self: SideStream, *tensors: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_stream, "current_stream_number", lambda index: streams.current)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: streams)
        patch.setattr(SideStream, "__init__", made)
        patch.setattr(SideStream, "keep", lambda self, *tensors: None)
        patch.setattr(SideStream, "after_compute", after_compute)
        yield streams


def _stepped(count: int = 4) -> tuple[nn.Sequential, tilestep.ShardedOptimizer]:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))
    made = tilestep.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    optimizer = tilestep.shard(made, model, bucket_cap_mb=1e-6)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: tilestep.ShardedOptimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_every_stream_waits_once_for_what_it_looks_up_and_for_nothing_later(one_rank: None) -> None:
    with counted() as streams:
        model, _ = _stepped()
        marks = [streams.made - 3 + place for place in range(4)]
        streams.waits.clear()
        for _ in range(3):
            model[1].weight, model[0].weight
        # They arrive in order: who waits for the second bucket has the first.
        assert streams.waits == [(1, marks[1])]
        streams.current = 2
        for _ in range(3):
            model[0].weight, model[3].weight, model[2].weight
        assert streams.waits[1:] == [(2, marks[0]), (2, marks[3])]
        streams.current = 1
        model[3].weight, model[2].weight
        assert streams.waits[3:] == [(1, marks[3])]
        assert not streams.asked


def test_one_question_a_step_tells_whether_all_have_arrived(one_rank: None) -> None:
    with counted() as streams:
        model, optimizer = _stepped()
        for late in (True, False, False):
            streams.asked.clear()
            last = streams.made
            if not late:
                streams.done.update(range(last + 1))
            optimizer.wait()
            assert streams.asked == [last] and bool(optimizer.execution.parameters.publication.tickets) == late
            streams.asked.clear()
            streams.waits.clear()
            model[0].weight, model[3].weight
            assert not streams.asked and not streams.waits
            if late:
                streams.current += 1
                assert model[3].weight.shape == (3, 3)
                assert streams.waits == [(streams.current, last)]
                streams.done.update(range(last + 1))
            _step(model, optimizer)
            assert len(streams.asked) == late


def test_the_next_step_is_waited_for_by_streams_that_have_waited_before(one_rank: None) -> None:
    with counted() as streams:
        model, optimizer = _stepped()
        for _ in range(3):
            _step(model, optimizer)
            streams.waits.clear()
            model[0].weight, model[3].weight
            assert [stream for stream, _ in streams.waits] == [1, 1]
            assert streams.waits[1][1] == streams.made
