"""Parameters that are still being written or sent: a look-up in a module waits for the parameter's bucket alone."""

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
    """The last transition of buckets: updates that still run, parameters that other ranks still send."""

    # Code that looks a parameter up waits for its bucket alone. Compiled code outside of compiled modules looks nothing
    # up: once there is some, a step waits for all buckets.

    def __init__(self, lane: SideStream) -> None:
        self.lane = lane
        self.of: Mapping[int, Any] = {}  # by `id` of a parameter its bucket
        self.tickets: dict[Any, Ticket] = {}  # of the buckets that are on their way
        self.needed: dict[Any, None] = {}  # buckets in the order in which look-ups have waited for them
        self.compiled = False  # whether compiled code outside of compiled modules uses parameters

    def wait(self, param: Any, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Let streams, by default the current one, or the host, wait for the bucket of a parameter."""
        # For every look-up in a forward.
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
        """Let the current stream, or the host, wait for every bucket."""
        if self.tickets:
            last = self._last()
            if last is not None:
                self.lane.wait_for(last)
            if last is None or last.event.query():
                self.tickets.clear()

    def _last(self) -> Mark | None:
        """Finish the host's part of all tickets; the last mark, after which all buckets have arrived."""
        marks = []
        for ticket in list(self.tickets.values()):
            if ticket.work is not None:
                ticket.finish()
            if ticket.mark is not None:
                marks.append(ticket.mark)
        return max(marks, key=attrgetter("place"), default=None)

    def wait_on_host(self) -> None:
        """Let the host wait too: later code need not know of these tickets."""
        last = self._last()
        if last is not None:
            self.lane.wait_for(last)
            last.event.synchronize()
        self.tickets.clear()

    def wait_in_graph(self) -> None:
        """In a CUDA graph that contains the transition: code outside of the graph waits for nothing."""
        self._last()
        for ticket in self.tickets.values():
            ticket.mark = None
        self.lane.join()
        self.tickets.clear()

    def end(self) -> None:
        """After the optimizer: let the streams that it was used from wait for all updates."""
        # Not with the model, which with FSDP2 dies when garbage is collected: code that is compiled until then would be
        # compiled once more. On a CPU updates that nothing has needed yet still run at their look-ups.
        if self.lane.join_all() or not self.tickets:
            _late.discard(self)
            _unwatch_forwards()


def guard_look_ups(publication: Publication, model: nn.Module) -> None:
    """Let look-ups of the parameters wait, in any module: in those that exist, and in those made later."""
    # Again when it knows more parameters. Hooks on a module's forward would not do: modules use each other's weights
    # without calling each other (tied embeddings, the output projection of `nn.MultiheadAttention`). They are for
    # modules that keep their parameters somewhere else too. Compiled code looks nothing up: a compiled module waits for
    # all below it when it is called.
    _publications.add(publication)
    for module in (*model.modules(), *living(nn.Module)):  # the garbage collector does not tell of what is frozen
        for param in list(dict.values(kept_parameters(module))):
            _look_at(module, "", param)
    for module in model.modules():
        CompiledRegion.put_around(module)
    if not _watching:
        # Once for all: torch is looking at its hooks whenever one of these might end.
        _watching.append(register_module_parameter_registration_hook(_look_at))


_publications: weakref.WeakSet[Publication] = weakref.WeakSet()  # those whose parameters any module may have
_watching: list[Any] = []


def _look_at(module: nn.Module, name: str, param: Any) -> None:
    for publication in list(_publications):
        if id(param) in publication.of:
            guard(module, publication)


class CompiledRegion:
    """A module that runs as compiled code: whatever is below it is waited for when it is called."""

    # Code that was traced in such a call depends on `is_entered`, as one of its guards: called from elsewhere, it is
    # traced again and says that it takes parameters without a region (`Waits.compiled`).
    # It hangs on the module alone, by the call that it puts around the compiled one: the module can be let go.

    def __init__(self) -> None:
        self.is_entered = False  # whether the module is being called
        self._guarded: list[GuardedParameters] = []

    @classmethod
    def put_around(cls, module: nn.Module) -> None:
        """Have the call of a compiled module wait for the guarded parameters below it; others stay as they are."""
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
                # Part of other compiled code, which waits for nothing in the region.
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


_REGION = "tilestep_region"  # the attribute of a call that is a region's


_guarded: weakref.WeakKeyDictionary[Publication, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""The modules that wait for something."""


def guard(module: nn.Module, publication: Publication) -> None:
    guarded = _guarded.setdefault(publication, weakref.WeakSet())
    if module in guarded:
        return
    guarded.add(module)
    is_guarded = guard_parameters(module, partial(GuardedParameters.of, publication=publication))
    lists = (value for value in vars(module).values() if isinstance(value, (list, tuple)))
    # Recurrent ones keep their parameters in a list of their own too, for their kernels.
    if is_guarded and not any(isinstance(item, nn.Parameter) for value in lists for item in value):
        return

    def before_forward(module: nn.Module, _: Any) -> None:
        if publication.tickets:
            for param in module.parameters(recurse=False):
                publication.wait(param)

    module.register_forward_pre_hook(before_forward)


_late: weakref.WeakSet[Publication] = (
    weakref.WeakSet()
)  # those for which modules of any model wait when they are called, too
_forwards: list[Any] = []


def guard_forwards(publication: Publication) -> None:
    """After `guard_look_ups`: have modules wait that get a parameter unseen, as `functional_call` gives it to them."""
    _late.add(publication)
    if not _forwards:
        # Compiled code is traced again when it comes or goes: it goes with the last of them, and not at a later
        # forward, which may be that of code that was compiled since.
        _forwards.append(register_module_forward_pre_hook(_before_any_forward))
    weakref.finalize(publication, _unwatch_forwards).atexit = False


def _unwatch_forwards() -> None:
    """Let modules be if nothing is left that they would wait for."""
    # What dies now may still be counted; it is not listed.
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
        self.regions: tuple[CompiledRegion, ...] = ()  # the compiled modules that wait for them when called

    @classmethod
    def of(cls, entries: dict[str, Any], publication: Publication) -> GuardedParameters:
        """A module's parameters, guarded for one more optimizer."""
        if isinstance(entries, cls):
            entries._publications = (*entries._publications, publication)
            return entries
        return cls(entries, publication)

    def __getitem__(self, key: str) -> Any:
        # For every parameter in every forward: no look-up more than there must be.
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
        # Without it, dict() would copy the entries without asking.
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
        """Wait for all of them."""
        pending = [publication for publication in self._publications if publication.tickets]
        if pending and not is_dropping_gradients():
            for param in super().values():
                for publication in pending:
                    publication.wait(param)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of the model are ordinary modules.
        return dict, (), None, None, iter(self.items())
