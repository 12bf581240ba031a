"""What ran when: the events of a trace, sorted into lanes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from typing import Any

from .events import (
    Call,
    Events,
    Work,
    is_communication_kernel,
    is_communication_operator,
    is_communication_range,
    is_host_update,
    is_list_kernel,
    is_update_kernel,
    is_update_operator,
    is_update_range,
    runs_backward,
)
from .intervals import Intervals, covers, cut, minus, overlap, union


@dataclass(frozen=True)
class Lanes:
    """When each kind of work ran, in microseconds; on a machine without GPU traces the host's own work.

    Args:
        update: the optimizer's own: updates, norms, clips, scaler; also what of it the host computes beside a GPU.
        host: on a GPU, calls of the host of any kind; else what is left of the main thread: Python.
    """

    forward: Intervals = field(default_factory=list)  # computing, outside backward and the optimizer
    backward: Intervals = field(default_factory=list)  # computing, launched by autograd
    communication: Intervals = field(default_factory=list)  # between ranks, whoever asked for it
    update: Intervals = field(default_factory=list)
    copies: Intervals = field(default_factory=list)  # copies and fills, on a GPU
    host: Intervals = field(default_factory=list)
    host_update: Intervals = field(default_factory=list)  # the part of the host's time that is the optimizer's
    optimizer: Intervals = field(default_factory=list)  # the update, and copies and communication that it asked for

    def between(self, start: float, stop: float) -> Lanes:
        """The part between two moments."""
        return Lanes(**{each.name: cut(getattr(self, each.name), start, stop) for each in fields(self)})

    @property
    def exposed(self) -> Intervals:
        """When only the optimizer ran, with its copies and its communication, and neither forward nor backward did.

        Example:
            >>> Lanes(backward=[(0.0, 10.0)], update=[(8.0, 14.0)], optimizer=[(8.0, 14.0)]).exposed
            [(10.0, 14.0)]
        """
        return minus(self.optimizer, union(self.forward, self.backward))


@dataclass(frozen=True)
class _Contexts:
    """What a host thread was doing when; what is in none of these is forward."""

    update: Intervals
    backward: Intervals
    communication: Intervals

    @staticmethod
    def of(calls: list[Call]) -> _Contexts:
        def spans(kinds: Any) -> Intervals:
            return union((call.start, call.stop) for call in calls if kinds(call))

        backward = spans(lambda call: not call.is_range and runs_backward(call.name))
        communication = spans(lambda call: not call.is_range and is_communication_operator(call.name))
        # Gradients are packed for other ranks by the operators that optimizers use.
        operators = spans(lambda call: not call.is_range and is_update_operator(call.name))
        operators = minus(operators, union(backward, communication))
        ranges = spans(lambda call: call.is_range and is_update_range(call.name))
        return _Contexts(union(ranges, operators), backward, communication)


_NOWHERE = _Contexts([], [], [])


class Sorting:
    """A trace's events, sorted by their names and by what the host was doing when it launched them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._threads: dict[Any, list[Call]] = {}
        for call in events.calls:
            self._threads.setdefault(call.thread, []).append(call)
        self._contexts = {thread: _Contexts.of(calls) for thread, calls in self._threads.items()}

    def lanes(self) -> Lanes:
        """What ran when, in the whole trace."""
        if self._events.works:
            return _of_devices(self._events, self._contexts)
        return _of_host(self._events, self._threads, self._contexts)

    def computations(self) -> list[tuple[float, float]]:
        """For each kernel of forward and backward when it was launched and when it started, in order of launches."""
        found = []
        for work in self._events.works:
            if work.launched is not None:
                thread, moment = work.launched
                if _lanes_of(work, self._contexts.get(thread, _NOWHERE), moment)[0] in ("forward", "backward"):
                    found.append((moment, work.start))
        return sorted(found)


def _of_devices(events: Events, contexts: dict[Any, _Contexts]) -> Lanes:
    found: dict[str, Intervals] = {each.name: [] for each in fields(Lanes)}
    for work in events.works:
        thread, moment = work.launched or (None, 0.0)
        context = contexts.get(thread, _NOWHERE)
        for lane in _lanes_of(work, context, moment):
            found[lane].append((work.start, work.stop))
    for call in events.calls:
        if call.is_range and is_host_update(call.name):
            found["update"].append((call.start, call.stop))
            found["optimizer"].append((call.start, call.stop))
    found["host"] = [(call.start, call.stop) for call in events.calls]
    found["host_update"] = [each for context in contexts.values() for each in context.update]
    return Lanes(**{name: union(intervals) for name, intervals in found.items()})


def _lanes_of(work: Work, context: _Contexts, moment: float) -> list[str]:
    by_optimizer = covers(context.update, moment)
    if work.is_copy:
        lane = "copies"
    elif is_communication_kernel(work.name):
        lane = "communication"
    elif by_optimizer or is_update_kernel(work.name):
        return ["update", "optimizer"]
    elif covers(context.communication, moment):
        lane = "communication"
    elif covers(context.backward, moment):
        return ["backward"]
    else:
        return ["update", "optimizer"] if is_list_kernel(work.name) else ["forward"]
    return [lane, "optimizer"] if by_optimizer else [lane]


def _of_host(events: Events, threads: dict[Any, list[Call]], contexts: dict[Any, _Contexts]) -> Lanes:
    every = list(contexts.values())
    senders = sorted((start, covers(context.update, start)) for context in every for start, _ in context.communication)
    communication = union(*(context.communication for context in every))
    optimizer = union(*(overlap(context.communication, context.update) for context in every))
    working: dict[Any, Intervals] = {}
    for thread, calls in threads.items():
        sent = [call for call in calls if call.is_range and is_communication_range(call.name)]
        communication = union(communication, ((call.start, call.stop) for call in sent))
        optimizer = union(optimizer, ((call.start, call.stop) for call in sent if _sent_by_optimizer(call, senders)))
        # What a backend's thread runs inside a collective is the collective.
        inside = union((call.start, call.stop) for call in sent)
        working[thread] = minus(union((call.start, call.stop) for call in calls if not call.is_range), inside)
    update = union(*(minus(context.update, context.communication) for context in every))
    forward, backward = [], []
    for thread, context in contexts.items():
        own = union(context.update, context.communication)
        backward.append(minus(context.backward, own))
        forward.append(minus(minus(working[thread], context.backward), own))
    everything = union(*forward, *backward, update, communication)
    return Lanes(
        forward=union(*forward),
        backward=union(*backward),
        communication=communication,
        update=update,
        host=minus([(events.start, events.stop)], everything),
        optimizer=union(update, optimizer),
    )


def _sent_by_optimizer(sent: Call, senders: list[tuple[float, bool]]) -> bool:
    """Whether the collective was asked for in a step: nothing links the two but that one comes after the other."""
    place = bisect_right(senders, (sent.start, True)) - 1
    return place >= 0 and senders[place][1]
