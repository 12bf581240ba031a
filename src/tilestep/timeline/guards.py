"""Modules whose parameters are still being written or sent: looking one up waits for it, and for no other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import (
    compiled_call,
    guard_parameters,
    is_being_compiled,
    is_dropping_gradients,
    kept_parameters,
    replace_compiled_call,
    watch_all_forwards,
    watch_all_parameters,
)
from ..garbage import living


class Waits(Protocol):
    """What knows which parameters are on their way."""

    compiled: bool  # whether compiled code outside of compiled modules uses parameters: it looks none up

    @property
    def is_pending(self) -> bool: ...
    def knows(self, param: Any) -> bool: ...  # whether it may be on its way at some time
    def wait(self, param: Any) -> None: ...


def guard_model(model: nn.Module, waits: Waits, concerns: Callable[[torch.Tensor], bool]) -> None:
    """Let code that looks a parameter up in its module wait for it."""
    # Hooks on a module's forward would not do: modules use each other's weights without calling each other (tied
    # embeddings, the output projection of `nn.MultiheadAttention`). They are for modules that keep their parameters
    # somewhere else too. Compiled code looks nothing up: a compiled module waits for all below it when it is called.
    for module in model.modules():
        if any(map(concerns, module.parameters(recurse=False))):
            _guard(module, waits)
    for module in model.modules():
        CompiledRegion.put_around(module)


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


_guarded: weakref.WeakKeyDictionary[Waits, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""The modules that wait for something."""


def _guard(module: nn.Module, waits: Waits) -> None:
    guarded = _guarded.setdefault(waits, weakref.WeakSet())
    if module in guarded:
        return
    guarded.add(module)
    is_guarded = guard_parameters(module, lambda entries: GuardedParameters.of(entries, waits))
    lists = (value for value in vars(module).values() if isinstance(value, (list, tuple)))
    # Recurrent ones keep their parameters in a list of their own too, for their kernels.
    if is_guarded and not any(isinstance(item, nn.Parameter) for value in lists for item in value):
        return

    def before_forward(module: nn.Module, _: Any) -> None:
        if waits.is_pending:
            for param in module.parameters(recurse=False):
                waits.wait(param)

    module.register_forward_pre_hook(before_forward)


_sharers: weakref.WeakSet[Waits] = weakref.WeakSet()  # those whose parameters modules of other models may have
_watching: list[Any] = []


def guard_sharers(waits: Waits) -> None:
    """Make look-ups of the parameters wait in any module: in those that exist, and in those made later."""
    # Again when it knows more parameters.
    _sharers.add(waits)
    for module in living(nn.Module):
        for param in list(dict.values(kept_parameters(module))):
            _guard_sharer(waits, module, param)
    if not _watching:
        # Once for all: torch is looking at its hooks whenever one of these might end.
        _watching.append(watch_all_parameters(_look_at))


def _look_at(module: nn.Module, param: Any) -> None:
    for waits in list(_sharers):
        _guard_sharer(waits, module, param)


def _guard_sharer(waits: Waits, module: nn.Module, param: Any) -> None:
    if waits.knows(param):
        _guard(module, waits)


_late: weakref.WeakSet[Waits] = weakref.WeakSet()  # those for which modules of any model wait when they are called, too
_forwards: list[Any] = []


def guard_forwards(waits: Waits) -> None:
    """After `guard_sharers`: have modules wait that get a parameter unseen, as `functional_call` gives it to them."""
    _late.add(waits)
    if not _forwards:
        # Compiled code is traced again when it comes or goes: it goes with the last of them, and not at a later
        # forward, which may be that of code that was compiled since.
        _forwards.append(watch_all_forwards(_before_any_forward))
    weakref.finalize(waits, _unwatch_forwards).atexit = False


def unguard_forwards(waits: Waits) -> None:
    """Have no module wait for it any more when it is called: all parameters are there."""
    _late.discard(waits)
    _unwatch_forwards()


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
    for waits in list(_late):
        if waits.is_pending and module not in _guarded.get(waits, ()):
            for param in list(dict.values(kept_parameters(module))):
                waits.wait(param)


class _Both:
    """Two that know of parameters on their way."""

    def __init__(self, first: Waits, second: Waits) -> None:
        self._all = (first, second)

    @property
    def is_pending(self) -> bool:
        return any(waits.is_pending for waits in self._all)

    @property
    def compiled(self) -> bool:
        return any(waits.compiled for waits in self._all)

    @compiled.setter
    def compiled(self, value: bool) -> None:
        for waits in self._all:
            waits.compiled = value

    def knows(self, param: Any) -> bool:
        return any(waits.knows(param) for waits in self._all)

    def wait(self, param: Any) -> None:
        for waits in self._all:
            waits.wait(param)


_is_traced = torch.compiler.is_dynamo_compiling


class GuardedParameters(dict[str, Any]):
    """A module's parameters; looking one up waits until it is there."""

    def __init__(self, entries: dict[str, Any], waits: Waits) -> None:
        super().__init__(entries)
        self._waits = waits
        self.regions: tuple[CompiledRegion, ...] = ()  # the compiled modules that wait for them when called

    @classmethod
    def of(cls, entries: dict[str, Any], waits: Waits) -> GuardedParameters:
        """A module's parameters, guarded by one more."""
        if isinstance(entries, cls):
            entries._waits = _Both(entries._waits, waits)
            return entries
        return cls(entries, waits)

    def __getitem__(self, key: str) -> Any:
        # For every parameter in every forward: no look-up more than there must be.
        param = dict.__getitem__(self, key)
        if _is_traced():
            if not any(region.is_entered for region in self.regions):
                self._waits.compiled = True
        elif self._waits.is_pending:
            self._waits.wait(param)
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
        if self._waits.is_pending and not is_dropping_gradients():
            for param in super().values():
                self._waits.wait(param)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of the model are ordinary modules.
        return dict, (), None, None, iter(self.items())
