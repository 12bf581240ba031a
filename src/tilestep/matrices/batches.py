"""The matrices of a segment in batches: all tensors of one shape lie together, and an operation is one call for all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..devices import has_streams
from ..graph import MatrixPass, evaluate
from .batch import Batch, MatrixSegment
from .conditions import Conditions, GroupNumbers
from .operations import MATRIX_OPERATIONS, Launch
from .recorded import LEAST_MATRICES, RecordedPass
from .running import run_chunk
from .shared import SharedMatrices
from .workspace import matrices_at_once

SkippedValues = dict[tuple[int, int], frozenset[int]]
"""Values that are not computed, by identity, for each matrix pass and batch by their places."""


class MatrixBatches:
    """The scratch arrays and matrix states of a segment, and its matrix passes."""

    def __init__(self, segment: MatrixSegment) -> None:
        self.segment = segment
        self.spec, self.entries, self.groups = segment.spec, segment.entries, segment.groups
        self.library = self.spec.program.library
        self.numbers = self.library.numbers()
        self.keys = self._keys()
        own = [index for index, entry in enumerate(self.entries) if entry.exchange is None]
        self.batches = [self._batch(key, members) for key, members in self._sorted(own).items()]
        for batch in self.batches:
            self._allocate(batch)
        shared = [index for index, entry in enumerate(self.entries) if entry.exchange is not None]
        parted = [self._batch(key, members) for key, members in self._sorted(shared).items()]
        self.shared = SharedMatrices(segment, parted) if parted else None
        """The tensors of which this rank has a part."""
        operations = [
            MATRIX_OPERATIONS.get(value.operation) for matrix_pass in self._work() for value in matrix_pass.values
        ]
        self.waits = any(operation is not None and operation.waits for operation in operations)
        """Whether the host waits for the device in steps that need all."""
        conditional = any(matrix_pass.needed for matrix_pass in self._work())
        self.conditions = Conditions(self.groups) if conditional else None
        """What decides on the host which work a step does not need; None if all is needed always."""
        self.skipped_values: SkippedValues | None = None
        """What steps leave out, whatever they need: set while a step is captured. None lets the host decide."""
        self.active = np.ones(0, dtype=bool)
        """Which tensors took part in the last step, where it matters."""
        self.is_built = False
        """Whether all passes have run, so that nothing is left to compile."""
        self._recorded = self._recordings()

    def _keys(self) -> list[tuple[Any, ...]]:
        """Shape and numbers of each tensor."""
        known: dict[int, tuple[float, ...]] = {}
        keys = []
        for entry in self.entries:
            if entry.group not in known:
                numbers = GroupNumbers(self.groups[entry.group])
                known[entry.group] = tuple(float(evaluate(value, numbers)) for value in self.numbers)
            whole = entry.param if entry.exchange is None else entry.handle
            keys.append((tuple(whole.shape), known[entry.group]))
        return keys

    def outdated(self) -> bool:
        """Whether the numbers have changed since the batches were made."""
        return self.keys != self._keys()

    def _sorted(self, indices: Sequence[int]) -> dict[tuple[Any, ...], list[int]]:
        members: dict[tuple[Any, ...], list[int]] = {}
        for index in indices:
            members.setdefault(self.keys[index], []).append(index)
        return members

    def _batch(self, key: tuple[Any, ...], members: list[int]) -> Batch:
        (rows, columns), numbers = key
        work = [value for matrix_pass in self.library.passes if matrix_pass for value in matrix_pass.values]
        chunk = matrices_at_once(work, (rows, columns), self.spec.compute, len(members))
        by_identity = {id(value): number for value, number in zip(self.numbers, numbers)}
        batch = Batch((rows, columns), members, by_identity, chunk)
        batch.index = torch.tensor(members, dtype=torch.int64, device=self.segment.device)
        self._adopt_states(batch)
        return batch

    def _allocate(self, batch: Batch) -> None:
        """Scratch arrays; a result lies one chunk before the operand it replaces, in the same memory."""
        device, count = self.entries[batch.members[0]].param.device, len(batch.members)
        for name, replaced in self._replacements().items():
            dtype = self.library.scratch[name] or self.spec.compute
            spare = batch.chunk if replaced else 0
            memory = torch.zeros(count + spare, *batch.shape, dtype=dtype, device=device)
            batch.arrays[name] = memory[spare:]
            if replaced:
                batch.arrays[replaced] = memory[:count]
        for place, index in enumerate(batch.members):
            self.entries[index].arrays.update({name: array[place] for name, array in batch.arrays.items()})

    def _replacements(self) -> dict[str, str | None]:
        """Each scratch array that has memory of its own, and the one, if any, that takes it over chunk by chunk."""
        scratch = self.library.scratch
        found: dict[str, str | None] = dict.fromkeys(scratch)
        for matrix_pass in self.library.passes:
            for value in matrix_pass.values if matrix_pass else ():
                source = matrix_pass.inputs.get(id(value.args[0])) if matrix_pass else None
                target = matrix_pass.outputs.get(id(value)) if matrix_pass else None
                if source in found and target in found and found[source] is None and found[target] is None:
                    readers = [node for other in self._work() for node in other.values if value.args[0] in node.args]
                    if readers == [value] and scratch[source] is scratch[target]:
                        found[source] = target
                        del found[target]
        return found

    def _work(self) -> list[MatrixPass]:
        return [matrix_pass for matrix_pass in self.library.passes if matrix_pass]

    def _adopt_states(self, batch: Batch) -> None:
        """Take the entries' matrix states into batches and give back views of them."""
        for name in self.spec.program.graph.matrix_states:
            kept = [self.entries[index].matrices[name] for index in batch.members]
            batch.states[name] = torch.stack(kept)
            for place, index in enumerate(batch.members):
                self.entries[index].matrices[name] = batch.states[name][place]

    def plain(self) -> SkippedValues | None:
        """What is left out of a step that the host need not wait in; None if there is no such step."""
        if not self.waits:
            return {}
        if self.conditions is None:
            return None
        self.conditions.look(self.segment.step, self._active())
        work = [(index, matrix_pass) for index, matrix_pass in enumerate(self.library.passes) if matrix_pass]
        found: SkippedValues = {}
        for place, batch in enumerate(self.batches):
            skipped_values = self.conditions.later([matrix_pass for _, matrix_pass in work], self._groups(batch))
            if skipped_values is None:
                return None
            found.update({(index, place): values for (index, _), values in zip(work, skipped_values)})
        return found

    def suffices(self, skipped_values: SkippedValues, active: np.ndarray) -> bool:
        """Whether a step that leaves this out is what the next step should be.

        Args:
            active: bool[tensors], which take part.
        """
        assert self.conditions is not None
        self.conditions.look(self.segment.step, active)
        for (index, place), values in skipped_values.items():
            matrix_pass, batch = self.library.passes[index], self.batches[place]
            taking_part = active[batch.members].any()
            if (
                matrix_pass
                and taking_part
                and not values <= self.conditions.skipped_values(matrix_pass, batch.members, self._groups(batch))
            ):
                return False
        return True

    def replayed(self, active: np.ndarray, may_skip: bool) -> None:
        """A captured step was launched.

        Args:
            active: bool[tensors], which take part.
        """
        assert self.conditions is not None
        self.conditions.launched(active, may_skip)

    def launches(self) -> list[Launch]:
        """What operations on parameter-shaped matrices launch that Triton builds, if they say so."""
        found: list[Launch] = []
        for matrix_pass in self._work():
            for value in matrix_pass.values:
                operation = MATRIX_OPERATIONS.get(value.operation)
                if operation is None or operation.launches is None or id(value.args[0]) not in matrix_pass.inputs:
                    continue
                for batch in self.batches:
                    numbers = [batch.numbers[id(arg)] for arg in value.args[operation.operands :]]
                    found += operation.launches(batch.shape, numbers, self.segment.device)
        return found

    def build(self) -> None:
        """Build every kernel of the matrix passes, and let the matrix library set itself up; only scratch changes."""
        skipped_values = self.plain()
        if not self.is_built and skipped_values is not None:
            for index in range(len(self.library.passes)):
                self._run(index, skipped_values, stores=False)
            self.is_built = True

    def run(self, index: int) -> None:
        """Run the matrix pass after tile pass `index`, if there is one; nothing is waited for."""
        if index in self._recorded:
            self._recorded[index].run()
        else:
            self._run(index, self.skipped_values, stores=True)

    def _recordings(self) -> dict[int, RecordedPass]:
        """The passes that are the same launches at every step, where the host is spared enough of them."""
        device = self.segment.device
        differs = self.waits or self.conditions is not None or self.shared is not None
        if not has_streams(device) or differs or len(self.entries) < LEAST_MATRICES:
            return {}
        pool, this = torch.cuda.graph_pool_handle(), weakref.ref(self)

        def work(index: int) -> None:
            batches = this()
            assert batches is not None
            batches._run(index, batches.skipped_values, stores=True)

        places = [index for index, matrix_pass in enumerate(self.library.passes) if matrix_pass]
        return {index: RecordedPass(device, partial(work, index), pool) for index in places}

    def _active(self) -> np.ndarray:
        """Which tensors take part in this step."""
        gradients = self.segment.gradients or self.entries
        return np.asarray([gradient is not None for gradient in gradients], dtype=bool)

    def _groups(self, batch: Batch) -> list[int]:
        return sorted({self.entries[member].group for member in batch.members})

    def _skipped_values(self, matrix_pass: MatrixPass, batch: Batch) -> frozenset[int]:
        """What a batch does not need in this step."""
        if self.conditions is None:
            return frozenset()
        return self.conditions.skipped_values(matrix_pass, batch.members, self._groups(batch))

    def _run(self, index: int, fixed: SkippedValues | None, stores: bool) -> None:
        matrix_pass = self.library.passes[index]
        if matrix_pass is None:
            return
        is_last = matrix_pass is self._work()[-1]
        decides = self.conditions is not None and fixed is None
        if self.conditions is not None:
            self.active = self._active()
        if self.conditions is not None and decides:
            self.conditions.look(self.segment.step, self.active)
        for place, batch in enumerate(self.batches):
            if not batch.shape[0] or not batch.shape[1]:
                continue
            if self.conditions is not None and not self.active[batch.members].any():
                continue  # nothing of it takes part in this step
            skipped_values = (fixed or {}).get((index, place), frozenset())
            if decides:
                skipped_values = self._skipped_values(matrix_pass, batch)
            for start in range(0, len(batch.members), batch.chunk):
                run_chunk(self.segment, matrix_pass, batch, slice(start, start + batch.chunk), skipped_values, stores)
        if self.shared is not None and stores:
            self.shared.run(matrix_pass, lambda batch: self._skipped_values(matrix_pass, batch))
        if self.conditions is not None and decides and is_last:
            self.conditions.launched(self.active, self.segment.may_skip)
        self.is_built = self.is_built or is_last
