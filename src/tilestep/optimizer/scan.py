"""The quick look before a step: one C++ call a device says that all is as it was, or where gradients have moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import native
from ..compat import DTENSOR_PARTS, distributed_tensor_type, dtensors_have_parts

if TYPE_CHECKING:
    from .protocol import Tables

__all__ = ["Scan"]

_MOVED, _CHANGED = 1, 2
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _known_types() -> tuple[type, ...]:
    return (*_PLAIN, distributed_tensor_type()) if dtensors_have_parts() else _PLAIN  # type: ignore[return-value]


class Scan:
    """Scanners of an optimizer's tables, one an engine; made by `Scan.of`.

    Args:
        module: the built C++ module.
        tables: the tables, prepared for gradients as they are now.
        scanners: one for each engine.
    """

    def __init__(self, module: Any, tables: Tables, scanners: list[Any]) -> None:
        self._module = module
        self._scanners = scanners
        self._hosts = [np.zeros(len(engine.entries), dtype=np.int64) for engine in tables.engines]
        # numpy makes an object for each such question, which takes a seventh of what the look itself does.
        self._addresses = [host.ctypes.data for host in self._hosts]
        self._taken = [-1] * len(scanners)
        self._threads = [engine.looking_threads for engine in tables.engines]

    @classmethod
    def of(cls, tables: Tables) -> Scan | None:
        """A scan of these tables, if the module is built and knows what there is to know about their tensors."""
        module = native.module(len(tables.params))
        if (
            module is None
            or tables.further_rounds
            or tables.complex_members
            or tables.home.looks_at_gradients
            or not all(e.can_scan for e in tables.engines)
        ):
            return None
        known = _PLAIN if tables.agreement is None else _known_types()
        if not all(type(param) in known for params in tables.members for param in params):
            return None
        scanners = [module.create(params, DTENSOR_PARTS) for params in tables.members]
        return None if any(scanner is None for scanner in scanners) else cls(module, tables, scanners)

    def look(self, tables: Tables) -> bool:
        """Whether tensors are, but for the gradients' addresses, as they were; brings those up to date.

        Args:
            tables: the tables this scan was made of.

        Memory of gradients that was seen is held until `release`: another thread may replace them meanwhile.
        """
        answers = []
        self._threads = [engine.looking_threads for engine in tables.engines]
        for scanner, address, threads, engine in zip(self._scanners, self._addresses, self._threads, tables.engines):
            seen = self._module.scan(scanner, address, threads) if engine.can_scan else _CHANGED
            answers.append(seen)
        if _CHANGED in answers:
            for engine in tables.engines:
                engine.gradients.look_again()
            return False
        for place, (seen, engine) in enumerate(zip(answers, tables.engines)):
            gradients = engine.gradients
            if seen == _MOVED or self._taken[place] != gradients.uploads:
                gradients.take_addresses(self._hosts[place])
                self._taken[place] = gradients.uploads
        return True

    def is_current(self, tables: Tables) -> bool:
        """Whether kernels read the addresses of the last look.

        Args:
            tables: the tables this scan was made of.
        """
        return all(taken == engine.gradients.uploads for taken, engine in zip(self._taken, tables.engines))

    def same_params(self, left: list[Any], right: list[Any]) -> bool:
        """Whether two lists hold the same objects."""
        return self._module.same_list(left, right)

    def release(self) -> None:
        """Let go of the gradients' memory that the last look holds: no kernel is going to be given its addresses."""
        for scanner in self._scanners:
            self._module.release(scanner)

    def mark_written(self) -> None:
        """Count a version of every parameter that has a gradient, as torch does for what is written in place."""
        for scanner, threads in zip(self._scanners, self._threads):
            self._module.bump(scanner, threads)
