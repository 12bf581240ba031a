"""Waits for parameters that are still being updated or sent: a look-up in a module waits for the parameter's bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)

from ..compat import (
    compiled_call,
    guard_parameters,
    is_being_compiled,
    is_dropping_gradients,
    kept_parameters,
    replace_compiled_call,
)
from ..devices.garbage import living
from .side_stream import Mark, SideStream, Ticket


class Publication:
    """The last transition of buckets: running updates, or running all-gathers of parameters."""

    # A look-up of a parameter waits only for its bucket. Compiled code does not look parameters up: compiled modules
    # wait when they are called; if other compiled code uses parameters, every step waits for all buckets.

    def __init__(self, lane: SideStream) -> None:
        self.lane = lane
        self.of: Mapping[int, Any] = {}  # the bucket of a parameter, by the parameter's `id`
        self.tickets: dict[Any, Ticket] = {}  # the pending buckets
        self.needed: dict[Any, None] = {}  # buckets in the order in which look-ups have waited for them
        self.compiled = False  # whether compiled code outside of compiled modules uses parameters

    def wait(self, param: Any, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Make streams, by default the current stream, or the host, wait for a parameter's bucket."""
        # Called for every look-up in a forward.
        bucket = self.of.get(id(param))
        ticket = self.tickets.get(bucket)
        if ticket is None:
            return
        self.needed.setdefault(bucket)
        if ticket.work is not None:
            ticket.finish()
        if ticket.mark is not None:
            self.lane.wait_for(ticket.mark, streams)
        else:
            self.tickets.pop(bucket, None)

    def wait_all(self) -> None:
        """Make the current stream, or the host, wait for every bucket."""
        if self.tickets:
            last = self._last()
            if last is not None:
                self.lane.wait_for(last)
            if last is None or last.event.query():
                self.tickets.clear()

    def _last(self) -> Mark | None:
        """Finish the host's part of all tickets; returns the last mark, which follows all buckets."""
        marks = []
        for ticket in list(self.tickets.values()):
            if ticket.work is not None:
                ticket.finish()
            if ticket.mark is not None:
                marks.append(ticket.mark)
        return max(marks, key=attrgetter("place"), default=None)

    def wait_on_host(self) -> None:
        """Make the host wait for every bucket, so that later code ignores these tickets."""
        last = self._last()
        if last is not None:
            self.lane.wait_for(last)
            last.event.synchronize()
        self.tickets.clear()

    def wait_in_graph(self) -> None:
        """Wait inside a CUDA graph that contains the transition, so that code outside has nothing to wait for."""
        self._last()
        for ticket in self.tickets.values():
            ticket.mark = None
        self.lane.join()
        self.tickets.clear()

    def end(self) -> None:
        """When the optimizer is gone: make the streams that used it wait for all updates."""
        # Not when the model is gone: with FSDP2 it lives until garbage is collected, and code compiled until then would
        # be compiled again. On a CPU pending updates still run at look-ups.
        if self.lane.join_all() or not self.tickets:
            _late.discard(self)
            _unwatch_forwards()


def guard_look_ups(publication: Publication, model: nn.Module) -> None:
    """Make look-ups of the publication's parameters wait, in all existing and future modules."""
    # Call it again when the publication has more parameters. Hooks on a module's forward are not enough: modules use
    # each other's weights without a call (tied embeddings, the output projection of `nn.MultiheadAttention`). Only
    # modules with further references to their parameters get such hooks too. Compiled code does not look parameters up:
    # a compiled module waits for all parameters below it when it is called.
    _publications.add(publication)
    for module in (*model.modules(), *living(nn.Module)):  # `gc` does not list objects frozen by gc.freeze()
        for param in list(dict.values(kept_parameters(module))):
            _look_at(module, "", param)
    for module in model.modules():
        CompiledRegion.put_around(module)
    if not _watching:
        # The hook is never removed: torch may be iterating over its hooks at any time.
        _watching.append(register_module_parameter_registration_hook(_look_at))


_publications: weakref.WeakSet[Publication] = weakref.WeakSet()  # publications that guard every module
_watching: list[Any] = []


def _look_at(module: nn.Module, name: str, param: Any) -> None:
    for publication in list(_publications):
        if id(param) in publication.of:
            guard(module, publication)


class CompiledRegion:
    """A compiled module: its call waits for all parameters below it."""

    # Code traced in such a call has a dynamo guard on `is_entered`: called from elsewhere it is traced again, and sets
    # `Publication.compiled`. The region is owned by the wrapped call of the module, and does not own the module.

    def __init__(self) -> None:
        self.is_entered = False  # whether a call of the module is running
        self._guarded: list[GuardedParameters] = []

    @classmethod
    def put_around(cls, module: nn.Module) -> None:
        """Make the call of a compiled module wait for the guarded parameters below it; other modules do not change."""
        call = compiled_call(module)
        kept = [entries for part in module.modules() if isinstance(entries := kept_parameters(part), GuardedParameters)]
        if call is None or not kept:
            return
        region = getattr(call, _REGION, None)
        if region is None:
            region = cls()
            replace_compiled_call(module, region._around(call))
        for entries in kept:
            if region not in entries.regions:
                entries.regions = (*entries.regions, region)
        region._guarded = kept

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if _is_traced():
                # Traced as a part of other compiled code, which does not wait in the region.
                return call(*args, **kwargs)
            for entries in self._guarded:
                entries.wait()
            before, self.is_entered = self.is_entered, True
            try:
                return call(*args, **kwargs)
            finally:
                self.is_entered = before

        setattr(entered, _REGION, self)
        return entered


_REGION = "tilestep_region"  # the attribute of a wrapped call that holds its region


_guarded: weakref.WeakKeyDictionary[Publication, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""The guarded modules of each publication."""


def guard(module: nn.Module, publication: Publication) -> None:
    guarded = _guarded.setdefault(publication, weakref.WeakSet())
    if module in guarded:
        return
    guarded.add(module)
    is_guarded = guard_parameters(module, partial(GuardedParameters.of, publication=publication))
    lists = (value for value in vars(module).values() if isinstance(value, (list, tuple)))
    # Recurrent modules also keep their parameters in a list, which they pass to kernels.
    if is_guarded and not any(isinstance(item, nn.Parameter) for value in lists for item in value):
        return

    def before_forward(module: nn.Module, _: Any) -> None:
        if publication.tickets:
            for param in module.parameters(recurse=False):
                publication.wait(param)

    module.register_forward_pre_hook(before_forward)


_late: weakref.WeakSet[Publication] = (
    weakref.WeakSet()
)  # publications for which the forward of unguarded modules waits too
_forwards: list[Any] = []


def guard_forwards(publication: Publication) -> None:
    """After `guard_look_ups`: wait in modules whose parameters were set without a hook, as by `functional_call`."""
    _late.add(publication)
    if not _forwards:
        # Adding or removing the hook makes dynamo trace again: it is removed with the last publication, and not at a
        # later forward, whose code may have been compiled since.
        _forwards.append(register_module_forward_pre_hook(_before_any_forward))
    weakref.finalize(publication, _unwatch_forwards).atexit = False


def _unwatch_forwards() -> None:
    """Remove the global forward hook if no publication needs it."""
    # `len` of a WeakSet may still count a publication that is being freed; `list` omits it.
    if not list(_late) and not is_being_compiled():
        while _forwards:
            _forwards.pop().remove()


def _before_any_forward(module: nn.Module, _: Any) -> None:
    if _is_traced():
        return
    if not len(_late):
        _unwatch_forwards()
    for publication in list(_late):
        if publication.tickets and module not in _guarded.get(publication, ()):
            for param in list(dict.values(kept_parameters(module))):
                publication.wait(param)


_is_traced = torch.compiler.is_dynamo_compiling


class GuardedParameters(dict[str, Any]):
    """A module's parameters; a look-up waits for the parameter's bucket."""

    def __init__(self, entries: dict[str, Any], publication: Publication) -> None:
        super().__init__(entries)
        self._publications: tuple[Publication, ...] = (publication,)
        self.regions: tuple[CompiledRegion, ...] = ()  # the compiled modules whose calls wait for these parameters

    @classmethod
    def of(cls, entries: dict[str, Any], publication: Publication) -> GuardedParameters:
        """Guard a module's parameters for one more optimizer."""
        if isinstance(entries, cls):
            entries._publications = (*entries._publications, publication)
            return entries
        return cls(entries, publication)

    def __getitem__(self, key: str) -> Any:
        # Called for every parameter in every forward: as few look-ups as possible.
        param = dict.__getitem__(self, key)
        for publication in self._publications:
            if _is_traced():
                publication.compiled |= not any(region.is_entered for region in self.regions)
            elif publication.tickets:
                publication.wait(param)
        return param

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        # Without this override, dict() would copy the entries without calling `items`.
        return super().__iter__()

    def items(self) -> Any:
        self.wait()
        return super().items()

    def values(self) -> Any:
        self.wait()
        return super().values()

    def pop(self, key: str, *default: Any) -> Any:
        self.wait()
        return super().pop(key, *default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    __copy__ = copy

    def wait(self) -> None:
        """Wait for all parameters of the module."""
        pending = [publication for publication in self._publications if publication.tickets]
        if pending and not is_dropping_gradients():
            for param in super().values():
                for publication in pending:
                    publication.wait(param)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of the model have plain dicts.
        return dict, (), None, None, iter(self.items())
