"""Matrices of which each rank has a part: whole ones are put together for a matrix pass, and taken apart after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ..graph import MatrixPass
from .batch import Batch, MatrixSegment
from .running import run_chunk


class Exchange(Protocol):
    """Sends parts of matrices between the ranks that share them; all ranks make the same calls in the same order."""

    def owns(self, place: int) -> bool:
        """Whether this rank works on a matrix."""

    def gather(self, parts: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor | None]:
        """Put matrices together where they are worked on."""

    def scatter(self, wholes: Sequence[tuple[int, torch.Tensor | None, torch.Tensor]]) -> None:
        """Take matrices apart."""


class SharedMatrices:
    """The scratch arrays of a segment's tensors that ranks share, and matrix passes over them."""

    def __init__(self, segment: MatrixSegment, batches: Sequence[Batch]) -> None:
        self._segment = segment
        self._scratch = {
            name: dtype or segment.spec.compute for name, dtype in segment.spec.program.library.scratch.items()
        }
        self._members = [member for batch in batches for member in batch.members]
        self._exchanges = list(dict.fromkeys(self._exchange(member)[0] for member in self._members))
        for member in self._members:
            entry = segment.entries[member]
            for name, dtype in self._scratch.items():
                entry.arrays[name] = torch.zeros(entry.param.shape, dtype=dtype, device=entry.param.device)
        self._batches = [batch.of([member for member in batch.members if self._owns(member)]) for batch in batches]

    def _exchange(self, member: int) -> tuple[Exchange, int]:
        found = self._segment.entries[member].exchange
        assert found is not None
        return found

    def _owns(self, member: int) -> bool:
        exchange, place = self._exchange(member)
        return exchange.owns(place)

    def run(self, matrix_pass: MatrixPass, skipped_values: Callable[[Batch], frozenset[int]]) -> None:
        """Run a matrix pass.

        Every rank sends and receives, whatever the step needs of the pass: ranks may know of different needs.
        """
        inputs, outputs = (list(dict.fromkeys(names.values())) for names in (matrix_pass.inputs, matrix_pass.outputs))
        found = self._gathered(inputs)
        for batch in self._batches:
            if batch.members:
                self._run(matrix_pass, batch, found, outputs, skipped_values(batch))
        for exchange in self._exchanges:
            wholes = []
            for member in self._members:
                known, place = self._exchange(member)
                if known is exchange:
                    arrays = self._segment.entries[member].arrays
                    wholes += [(place, found.get((member, name)), arrays[name]) for name in outputs]
            exchange.scatter(wholes)

    def _gathered(self, names: Sequence[str]) -> dict[tuple[int, str], torch.Tensor]:
        """The whole matrices that this rank works on, by member and name."""
        found: dict[tuple[int, str], torch.Tensor] = {}
        for exchange in self._exchanges:
            members = [member for member in self._members if self._exchange(member)[0] is exchange]
            keys = [(member, name) for member in members for name in names]
            parts = [(self._exchange(member)[1], self._segment.entries[member].arrays[name]) for member, name in keys]
            wholes = exchange.gather(parts)
            found.update({key: whole for key, whole in zip(keys, wholes) if whole is not None})
        return found

    def _run(
        self,
        matrix_pass: MatrixPass,
        batch: Batch,
        found: dict[tuple[int, str], torch.Tensor],
        outputs: Sequence[str],
        skipped_values: frozenset[int],
    ) -> None:
        arrays: Mapping[str, torch.Tensor] = {
            name: torch.stack([found.pop((member, name)) for member in batch.members])
            for name in dict.fromkeys(matrix_pass.inputs.values())
        }
        device = self._segment.entries[batch.members[0]].param.device
        made = {
            name: torch.zeros(len(batch.members), *batch.shape, dtype=self._scratch[name], device=device)
            for name in outputs
        }
        batch.arrays = {**arrays, **made}
        for start in range(0, len(batch.members), batch.chunk):
            run_chunk(self._segment, matrix_pass, batch, slice(start, start + batch.chunk), skipped_values, stores=True)
        batch.arrays = {}
        found.update({(member, name): made[name][at] for at, member in enumerate(batch.members) for name in outputs})
