"""Which tensors of a running rule are one memory, so that a write to one is seen through the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Memory:
    """Remembers, for tensors made by aliasing operations, whose memory they lie in and in which order they walk it.

    Tensors must be kept alive by the caller: they are known by identity.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._places.get(id(tensor), (id(tensor), id(tensor)))

    def share(self, tensor: torch.Tensor, result: torch.Tensor, *, same_order: bool) -> None:
        """Note that a result lies in a tensor's memory."""
        owner, walk = self._place(tensor)
        self._places[id(result)] = owner, walk if same_order else id(result)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor walks another's memory in another order."""
        owner, walk = self._place(tensor)
        return owner != walk

    def others(self, tensor: torch.Tensor, known: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """The known tensors in this one's memory, itself included, and whether each walks it in the same order."""
        place = self._place(tensor)
        return [(one, self._place(one) == place) for one in known if self._place(one)[0] == place[0]]
