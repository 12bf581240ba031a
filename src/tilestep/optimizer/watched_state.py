"""An optimizer's state that tells in one look whether something in it was replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from .states import TRAINING


def _counted(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def changing(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self.changes += 1
        return original(self, *args, **kwargs)

    changing.__name__ = name
    return changing


class _Count:
    """How often something was replaced; states hold it and not each other, so that their memory comes back at once."""

    changes = 0


class ParameterState(dict[str, Any]):
    """One parameter's state, which counts the tensors that are replaced or taken away: kernels know the old ones.

    Example:
        >>> state = WatchedState(dict)
        >>> state["param"] = entry = state.entry({"exp_avg": torch.zeros(2)})
        >>> entry["exp_avg"].fill_(1.0), state.changes
        (tensor([1., 1.]), 1)
        >>> entry["exp_avg"] = torch.ones(2)
        >>> state.changes
        2
    """

    count: _Count | None = None

    is_ahead = False
    """Whether it was made before a step needed it, for a capture: it begins once more with the values of that step."""

    def _note(self, name: str, value: Any = None) -> None:
        known = self.get(name)
        # The weights that train come and go with eval() and train(); no kernel reads them there.
        if self.count is not None and isinstance(known, torch.Tensor) and known is not value and name != TRAINING:
            self.count.changes += 1

    def __setitem__(self, name: str, value: Any) -> None:
        self._note(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._note(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self), "")
        self._note(name)
        return super().popitem()

    def clear(self) -> None:
        for name in self:
            self._note(name)
        super().clear()

    def update(self, *given: Mapping[str, Any] | Iterable[tuple[str, Any]], **named: Any) -> None:  # type: ignore[override]
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> ParameterState:  # type: ignore[override,misc]
        self.update(given)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


class WatchedState(defaultdict[Any, Any]):
    """torch's `defaultdict(dict)` of states, with a count of its changes.

    Comparing thousands of entries at every step costs more host time than the launches of the step.

    Example:
        >>> state = WatchedState(dict)
        >>> state["param"] = {}
        >>> state.changes
        1
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = _Count()

    @property
    def changes(self) -> int:
        """How often an entry, or a tensor inside one, was set or taken away."""
        return self.count.changes

    @changes.setter
    def changes(self, number: int) -> None:
        self.count.changes = number

    def entry(self, values: Mapping[str, Any], *, is_ahead: bool = False) -> ParameterState:
        """A parameter's state whose changes count here too."""
        made = ParameterState(values)
        made.count, made.is_ahead = self.count, is_ahead
        return made

    def adopt(self, states: Mapping[Any, Any], ahead: Container[Any]) -> None:
        """Take the states of parameters; those of `ahead` begin with their first step."""
        entries: dict[Any, Any] = {}
        for key, values in states.items():
            entries[key] = made = ParameterState(values) if isinstance(key, torch.Tensor) else values
            if isinstance(made, ParameterState):
                made.count, made.is_ahead = self.count, key in ahead
        self.update(entries)

    __setitem__ = _counted("__setitem__")
    __delitem__ = _counted("__delitem__")
    __ior__ = _counted("__ior__")
    clear = _counted("clear")
    pop = _counted("pop")
    popitem = _counted("popitem")
    setdefault = _counted("setdefault")
    update = _counted("update")

    def __missing__(self, key: Any) -> Any:
        self.changes += 1
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def plain_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose states are plain dicts, as torch's loaders want them."""
    states = state_dict.get("state")
    if not isinstance(states, dict):
        return state_dict
    plain = {key: dict(value) if isinstance(value, ParameterState) else value for key, value in states.items()}
    return {**state_dict, "state": plain}
