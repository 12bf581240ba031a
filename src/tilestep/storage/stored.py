"""Stored elements before and after a step, as terms."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import RuleError
from ..graph import Builder, Level, Value
from .format import Storage, Term

Leaf = tuple[str, str, int]  # kind ("old", "new", "update", "changed" or "moves"), buffer, array


class Stored:
    """The leaves of an output's formula: stored elements before and after a step. A skipped step changes none.

    An update has the same bits with and without outputs: `update` reads the parameter's new number before rounding, and
    `moves` the terms of its final sum, but no leaf uses a product of the rule.
    """

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        self._storages, self._build = storages, Builder()
        self._leaves: dict[Leaf, Value] = {}

    def _leaf(self, kind: str, buffer: str, array: int = 0) -> Term:
        if buffer not in self._storages:
            names = ", ".join(self._storages)
            raise RuleError(f"an output reads {buffer!r}, but a rule of this optimizer has only {names}")
        leaf = (kind, buffer, array)
        value = Value("load", attribute=leaf, level=Level.ELEMENT, is_bool=kind in ("changed", "moves"))
        return Term(self._build, self._leaves.setdefault(leaf, value))

    def old(self, buffer: str) -> Term:
        """A buffer's number before the step; for "grad", with the loss scale."""
        return self._leaf("old", buffer)

    def new(self, buffer: str) -> Term:
        """The number of the parameter or of a state after the step."""
        return self._leaf("new", buffer)

    def update(self) -> Term:
        """The change of the parameter, before the sum is rounded to its format; 0 in a skipped step."""
        return self._leaf("update", "param")

    def changed(self, array: int = 0) -> Term:
        """Whether the step changes bits of an array of the parameter; array 0 is the user's tensor."""
        return self._leaf("changed", "param", array)

    def is_other(self) -> Term:
        """Whether the step changes bits of any array of the parameter."""
        result = self.changed()
        for array in range(1, len(self._storages["param"].arrays("param"))):
            result = result | self.changed(array)
        return result

    def moves(self) -> Term:
        """Whether the rule changes the parameter before rounding, which may undo the change."""
        return self._leaf("moves", "param")
