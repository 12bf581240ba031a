"""Gradients of several streams on their way to the host: each one's memory goes back to a stream that has waited."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tilestep.memory.offloaded import HostCopies, Mirrors
from tilestep.native.host_memory import HostMemory


class Stream:
    """A stream that remembers which marks it has waited for."""

    def __init__(self) -> None:
        self.waited: set[int] = set()


class Computing:
    """Computation on whichever stream is current."""

    def mark(self) -> int:
        return -1


class Copies:
    """The lane of copies, which numbers its marks."""

    last = 0
    now: Any = None

    def copy(self, pairs: Any) -> None:
        for target, source in pairs:
            target.copy_(source)

    def current(self) -> Stream:
        return self.now  # type: ignore[no-any-return]

    def follow(self, *marks: int) -> None:
        pass

    def mark(self) -> int:
        self.last += 1
        return self.last

    next_mark = mark

    def wait_for(self, mark: int, streams: Sequence[Stream]) -> None:
        for stream in streams:
            stream.waited.add(mark)

    def join(self) -> None:
        pass


def test_memory_goes_back_to_streams_that_have_waited() -> None:
    params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(8)]
    mirrors = Mirrors(HostMemory(torch.device("cpu")))
    mirrors.set_params(params)
    compute, lane = Computing(), Copies()
    copies = HostCopies(lane, compute, step_bytes=20)  # type: ignore[arg-type]
    streams, let_go = [Stream(), Stream()], dict[int, bool]()

    for place, param in enumerate(params):
        mirrors[param].same_stream = True
        lane.now = own = streams[place % 2]
        gradient = torch.full((8,), float(place))
        copies.send(mirrors[param], gradient)
        mark = copies._held.pending[-1][1]

        def note(place: int = place, own: Stream = own, mark: Any = mark) -> None:
            let_go[place] = mark in own.waited

        weakref.finalize(gradient, note)
        del gradient
    assert 0 < len(let_go) < len(params), "some are pushed out by others, some wait for the step"
    lane.now = streams[0]
    copies.reset()
    assert let_go == {place: True for place in range(len(params))}
    assert [mirrors[param].gradient[0].item() for param in params] == list(range(8))
