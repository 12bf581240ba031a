"""Batches of equally shaped matrices in a segment: one call per batch, also for matrices that ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from ..devices import has_streams
from ..devices.garbage import without_collections
from ..errors import RuleError
from ..graph import SCALAR_LEVELS, MatrixPass, Value, evaluate
from ..graph.partition import Condition, MatrixProgram
from ..graph.tracer import group_value
from ..linalg.operations import MATRIX_OPERATIONS, Batch, Launch, matrices_at_once
from ..placement.matrices import Bucket, MatrixExchange
from .segment import Segment

LEAST_MATRICES = 32
"""Passes over fewer matrices are not recorded: a graph's workspace stays allocated between steps.

Recordings reduce host time from 7.6 ms to 0.6 for 168 matrices, and steps of 126 convolutions from 5.7 ms to 1.5
(benchmarks/results/muon_recordings_h100_1.json).
"""

_LANES = 3
"""Streams for small batches of a recorded pass: the products of a single small batch do not fill a GPU."""

_SMALL, _SMALL_TOGETHER = 1 << 23, 1 << 26
"""Most elements of a small batch, and of all that run concurrently: no result shares memory with an operand."""

_MESSAGES = 3  # buckets in flight or in work at the same time

_RUNS_BEFORE = 2
"""The first runs build kernels and initialize libraries, which a recording cannot contain."""


class RecordedPass:
    """Work that launches the same kernels on the same memory at every step, recorded at its third run."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fails = False

    @property
    def is_recorded(self) -> bool:
        """Whether runs replay a graph."""
        return self._graph is not None

    def run(self, work: Callable[[], object]) -> None:
        """Launch the work, identical at each call, on the current stream."""
        if torch.cuda.is_current_stream_capturing() or self._fails:
            work()
            return
        self._runs += 1
        if self._graph is None and self._runs > _RUNS_BEFORE:
            self._record(work)
        if self._graph is None:
            work()
        else:
            self._graph.replay()

    def _record(self, work: Callable[[], object]) -> None:
        """Record the work; a recording executes nothing, so work that cannot be recorded is launched as before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), _side_stream(self._device)
            side.wait_stream(current)
            try:
                # Collecting a CUDA graph as garbage destroys it, which would abort the recording.
                with without_collections(), torch.cuda.stream(side):
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    try:
                        work()
                    finally:
                        graph.capture_end()
            except RuntimeError:
                self._fails = True
                return
            current.wait_stream(side)
        self._graph = graph


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, lane: int = 0) -> torch.cuda.Stream:
    """Return a stream for recordings, because the default stream cannot be captured; initializes its cuBLAS handle."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for dtype in (torch.bfloat16, torch.float32):
            small = torch.ones(1, 16, 16, dtype=dtype, device=device)
            torch.baddbmm(small, small, small)
    return stream


@contextmanager
def _side_by_side(
    streams: Sequence[torch.cuda.Stream],
) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
    """Yield a function from the number of a concurrent piece of work to the context of its stream.

    Only recordings use several streams: otherwise the host launches small kernels slower than a GPU runs them.
    """
    if not streams or not torch.cuda.is_current_stream_capturing():
        yield nullcontext
        return
    current = torch.cuda.current_stream(streams[0].device)
    for stream in streams:
        stream.wait_stream(current)
    yield lambda place: torch.cuda.stream(streams[place % len(streams)])
    for stream in streams:
        current.wait_stream(stream)


class SharedMatrices:
    """The scratch arrays of a segment's tensors that ranks share, and matrix passes over them."""

    def __init__(
        self,
        matrices: MatrixBatches,
        members: Mapping[MatrixExchange, Mapping[int, int]],
        records: bool,
    ) -> None:
        # `members`: places of tensors in the segment by their numbers in an exchange, tensors of the same key in
        # sequence. `records`: every step launches the same kernels for a bucket.
        segment, keys = matrices.segment, matrices.keys
        self._scratch = {name: dtype or segment.spec.compute for name, dtype in matrices.program.scratch.items()}
        self._stages: list[tuple[Bucket, list[tuple[Batch, dict[int, list[int]]]], dict[str, torch.Tensor]]] = []
        """The buckets, each with the batches of its matrices here, the shapes of their runs, and scratch memory."""
        for exchange, numbered in members.items():
            for bucket in exchange.buckets({number: keys[member][:2] for number, member in numbered.items()}):
                memory = {name: bucket.allocate(dtype, segment.device) for name, dtype in self._scratch.items()}
                for name, own in memory.items():
                    for number, part in bucket.parts(own).items():
                        entry = segment.entries[numbered[number]]
                        entry.arrays[name] = part.view(entry.param.shape)
                runs = {run.places[0]: [len(run.places), *run.layout.shape] for run in bucket.own}
                made = matrices.batches_of([numbered[number] for run in bucket.own for number in run.places])
                shapes = [{at: runs[at] for at in runs if numbered[at] in set(batch.members)} for batch in made]
                self._stages.append((bucket, list(zip(made, shapes)), memory))
        self._device = segment.device
        self._pool = torch.cuda.graph_pool_handle() if records else None
        self._recorded: dict[tuple[int, int], RecordedPass] = {}
        """The recorded work on a bucket, by pass and place; the exchanges are not recorded."""
        sizes = [max(bucket.arriving, bucket.returning) for bucket, _, _ in self._stages]
        width = max((dtype.itemsize for dtype in self._scratch.values()), default=0)
        self._message_bytes = max(sizes, default=0) * width
        self._messages: dict[tuple[int, int], torch.Tensor] = {}

    def _message(self, at: int, place: int, numel: int, name: str) -> torch.Tensor:
        """Return memory for a message of a bucket; recordings need it at a fixed address."""
        # A bucket returns in the memory where it arrived. Meanwhile the next bucket is worked on, and the third
        # arrives: the earlier bucket in the same memory has returned by then.
        dtype = self._scratch[name]
        if self._pool is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        key = at, place % _MESSAGES
        if key not in self._messages:
            self._messages[key] = torch.empty(self._message_bytes, dtype=torch.uint8, device=self._device)
        return self._messages[key][: numel * dtype.itemsize].view(dtype)

    def _launch(self, matrix_pass: MatrixPass, place: int, batches: Sequence[Batch], work: Callable[[], None]) -> None:
        """Run the work on some batches, recorded if possible and if it launches anything."""
        if self._pool is None or not any(map(_elements, batches)):
            return work()
        key = id(matrix_pass), place
        self._recorded[key] = self._recorded.get(key) or RecordedPass(self._device, self._pool)
        self._recorded[key].run(work)

    @property
    def batches(self) -> list[Batch]:
        """The batches that this rank works on."""
        return [batch for _, batches, _ in self._stages for batch, _ in batches]

    def run(
        self,
        matrix_pass: MatrixPass,
        own: Sequence[Batch],
        compute: Callable[[Sequence[Batch]], None],
    ) -> None:
        """Run a matrix pass, pipelined: a bucket arrives and another returns while a third is worked on.

        Args:
            matrix_pass: the pass.
            own: batches without an exchange, worked on while the first bucket arrives.
            compute: the work on batches; zeros are sent for matrices that it leaves out.
        """
        inputs, outputs = (list(dict.fromkeys(names.values())) for names in (matrix_pass.inputs, matrix_pass.outputs))

        def begin(place: int) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
            begun = {}
            for bucket, _, memory in self._stages[place : place + 1]:
                for at, name in enumerate(inputs):
                    received = self._message(at, place, bucket.arriving, name)
                    begun[name] = received, bucket.gather(memory[name], received)
            return begun

        arriving, returning = begin(0), list[Callable[[], object]]()
        self._launch(matrix_pass, -1, own, partial(compute, own))
        for place, (bucket, batches, memory) in enumerate(self._stages):
            arrived, arriving = arriving, begin(place + 1)
            for _, wait in arrived.values():
                wait()
            received = {name: message for name, (message, _) in arrived.items()}
            leaving = {name: self._message(at, place, bucket.returning, name) for at, name in enumerate(outputs)}
            work = partial(self._work, place, received, leaving, compute)
            self._launch(matrix_pass, place, [batch for batch, _ in batches], work)
            for wait in returning:
                wait()
            returning = [bucket.scatter(message, memory[name]) for name, message in leaving.items()]
        for wait in returning:
            wait()

    def _work(
        self,
        place: int,
        received: Mapping[str, torch.Tensor],
        leaving: Mapping[str, torch.Tensor],
        compute: Callable[[Sequence[Batch]], None],
    ) -> None:
        """Unpack the matrices of a bucket, compute, and pack the results."""
        bucket, batches, memory = self._stages[place]
        for name, message in received.items():
            bucket.unpack(message, self._wholes(name, batches, torch.empty))
        made = {name: self._wholes(name, batches, torch.zeros) for name in leaving}
        compute([batch for batch, _ in batches])
        for batch, _ in batches:
            batch.arrays = {}
        for name, message in leaving.items():
            bucket.pack(made[name], memory[name], message)

    def _wholes(
        self, name: str, batches: Sequence[tuple[Batch, Mapping[int, list[int]]]], make: Callable[..., torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Allocate arrays of batches; return views of whole tensors, a view per run, by the run's first number."""
        wholes = {}
        for batch, shapes in batches:
            array = make(sum(batch.counts), *batch.shape, dtype=self._scratch[name], device=batch.device)
            batch.arrays[name] = array
            parts = array.view(-1).split([math.prod(shape) for shape in shapes.values()])
            wholes.update({at: part.view(shape) for (at, shape), part in zip(shapes.items(), parts)})
        return wholes


def elementwise(operation: str, arguments: list[torch.Tensor]) -> torch.Tensor:
    """Apply an operation of the graph with torch's function of the same name."""
    if operation == "number":
        return arguments[0]
    return getattr(torch, f"logical_{operation}" if operation in ("and", "or", "not") else operation)(*arguments)


class _Chunk:
    """Some matrices of a batch, and the values that a pass has computed for them, by identity."""

    def __init__(self, segment: Segment, batch: Batch, chunk: slice) -> None:
        self._segment, self._batch, self._chunk = segment, batch, chunk
        self._results: dict[int, torch.Tensor] = {}

    def run(self, matrix_pass: MatrixPass, skipped_values: frozenset[int], stores: bool) -> None:
        """Compute the pass."""
        batch, chunk, results = self._batch, self._chunk, self._results
        results.update((identity, batch.arrays[name][chunk]) for identity, name in matrix_pass.inputs.items())
        for arg in (arg for value in matrix_pass.values for arg in value.args):
            if arg.operation == "load" and arg.attribute in batch.states:
                results[id(arg)] = batch.states[arg.attribute][chunk]
        kept = {id(value) for value in matrix_pass.states.values()}
        last_use = {id(arg): place for place, value in enumerate(matrix_pass.values) for arg in value.args}
        for place, value in enumerate(matrix_pass.values):
            if id(value) not in skipped_values:
                name = matrix_pass.outputs.get(id(value))
                results[id(value)] = self._compute(value, None if name is None else batch.arrays[name][chunk])
            for arg in value.args:
                if last_use[id(arg)] == place and id(arg) not in kept:
                    results.pop(id(arg), None)
        if stores:
            self._store(matrix_pass.states)

    def _compute(self, value: Value, out: torch.Tensor | None) -> torch.Tensor:
        results, operation = self._results, MATRIX_OPERATIONS.get(value.operation)
        if operation is not None:
            dtype = operation.dtype or self._segment.spec.compute
            operands = [results[id(arg)].to(dtype) for arg in value.args[: operation.operands]]
            numbers = self._batch.numbers
            return operation.run(operands, [numbers[id(arg)] for arg in value.args[operation.operands :]], out)
        if value.operation == "where":
            branches = [results[id(arg)] for arg in value.args[1:] if id(arg) in results or arg.level in SCALAR_LEVELS]
            if len(branches) == 1:  # the other branch is not taken in this step, so it was not computed
                return branches[0]
        arguments = [results[id(arg)] if id(arg) in results else self._number(arg) for arg in value.args]
        result = elementwise(value.operation, arguments)
        return result if out is None else out.copy_(result)

    def _number(self, value: Value) -> torch.Tensor:
        """Return a number per tensor, [matrices, 1, 1]; a constant is 0-dimensional."""
        table = self._segment.rows
        if value.operation == "constant":
            dtype = torch.bool if value.is_bool else table.dtype
            return torch.full((), value.attribute, dtype=dtype, device=table.device)
        column = self._segment.spec.program.columns[id(value)]
        numbers = table[:, column][self._batch.index[self._chunk], None, None]
        return numbers != 0 if value.is_bool else numbers

    def _store(self, states: Mapping[str, Value]) -> None:
        """Write new matrix states where the tensor has a gradient and the step is not skipped."""
        new = {name: self._results[id(value)] for name, value in states.items() if id(value) in self._results}
        if not new:
            return
        index = self._batch.index[self._chunk]
        active = ((self._segment.grads[index] != 0) & (self._segment.control.skip == 0))[:, None, None]
        old = {name: self._batch.states[name][self._chunk] for name in new}
        # Select all states before writing any: a new state may alias the old value of another. An unchanged state has
        # its own memory and strides; its transpose shares only the memory.
        chosen = {
            name: torch.where(active, value, old[name]) for name, value in new.items() if not value.is_set_to(old[name])
        }
        for name, value in chosen.items():
            old[name].copy_(value)


SkippedValues = dict[tuple[int, int], frozenset[int]]
"""Identities of skipped values, by the indices of matrix pass and batch."""


_LOOKED_AHEAD = 1000  # number of following steps to search for a step in which the host does not wait


class NumbersByName(dict[str, float]):
    """A group's hyperparameters as numbers, by `key` or `key.index`; also the step, if given."""

    def __init__(self, group: Mapping[str, Any], **step: float) -> None:
        super().__init__(step)
        self._group = group

    def __missing__(self, name: str) -> float:
        value = group_value(self._group, name)
        if value is None:
            raise KeyError(name)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            raise RuleError(f"{name} is a tensor on a GPU, but matrix operations read it on the host before the step")
        return float(value)


def work_of(matrices: MatrixProgram, group: Mapping[str, Any], rows: int, columns: int) -> float:
    """Return the floating-point operations of a rule's matrix passes for a matrix, under a group's hyperparameters."""
    numbers, total = NumbersByName(group), 0.0
    for value in [value for matrix_pass in matrices.passes if matrix_pass for value in matrix_pass.values]:
        operation = MATRIX_OPERATIONS.get(value.operation)
        if operation is not None:
            given = [float(evaluate(arg, numbers)) for arg in value.args[operation.operands :]]
            total += operation.work(rows, columns, given)
    return total


class Conditions:
    """The host's bounds of the step counts, which determine the values that the next step needs."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], steps: torch.Tensor) -> None:
        self._groups, self._steps = groups, steps
        self._version = -1
        self._least = self._most = self._since = np.zeros(len(steps), dtype=np.int64)
        self._copy: torch.Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        self._low = self._high = self._least  # the bounds at the last look
        self._active = np.zeros(0, dtype=bool)
        self._skipped: dict[tuple[int, tuple[int, ...], frozenset[int]], frozenset[int]] = {}

    def look(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Update the least and greatest possible step counts, int64[tensors] each, and return them."""
        steps = self._steps
        if not steps.is_cuda:
            self._least = self._most = steps.numpy().astype(np.int64)
        elif self._version != steps._version:
            self._version = steps._version
            self._least = self._most = steps.cpu().numpy().astype(np.int64)
            self._arrival = None
        elif self._arrival is not None and self._arrival.query():
            assert self._copy is not None
            copied = self._copy.numpy().astype(np.int64)
            self._least = np.maximum(self._least, copied)
            self._most = np.minimum(self._most, copied + self._since)
            self._arrival = None
        self._low, self._high, self._active = self._least, self._most, active
        self._skipped.clear()  # hyperparameters may have changed
        return self._low, self._high

    def launched(self, active: np.ndarray, may_skip: bool) -> None:
        """Account for a launched step."""
        if not self._steps.is_cuda:
            return
        self._most = self._most + active
        self._since = self._since + active
        if not may_skip:
            self._least = self._least + active
        elif self._arrival is None:
            if self._copy is None:
                self._copy = torch.empty(self._steps.shape, dtype=self._steps.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(self._steps, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
            # The step under launch has not incremented its count yet.
            self._since = active.astype(np.int64)

    def skipped_values(self, matrix_pass: MatrixPass, members: Sequence[int], groups: Sequence[int]) -> frozenset[int]:
        """Return the identities of values that these tensors certainly do not need in this step."""
        taking_part = [member for member in members if self._active[member]]
        counts = {(int(self._low[member]), int(self._high[member])) for member in taking_part}
        following = {step + 1 for low, high in counts for step in range(low, high + 1)}
        return self._skipped_in(matrix_pass, groups, frozenset(following))

    def later(self, passes: Sequence[MatrixPass], groups: Sequence[int]) -> list[frozenset[int]] | None:
        """Return the values that a later step without a host wait does not need; None if there is no such step."""
        waiting = [{id(value) for value in matrix_pass.values if _waits(value)} for matrix_pass in passes]
        highest = int(self._high.max(initial=0))
        for step in range(highest + 1, highest + 1 + _LOOKED_AHEAD):
            skipped_values = [self._skipped_in(matrix_pass, groups, frozenset((step,))) for matrix_pass in passes]
            if all(needed <= skipped for needed, skipped in zip(waiting, skipped_values)):
                return skipped_values
        return None

    def _skipped_in(self, matrix_pass: MatrixPass, groups: Sequence[int], following: frozenset[int]) -> frozenset[int]:
        key = id(matrix_pass), tuple(groups), following
        if key not in self._skipped:
            numbers = [
                NumbersByName(self._groups[group], step=float(step)) for group in groups for step in sorted(following)
            ]
            possible = cache(partial(_possible, numbers=numbers))
            self._skipped[key] = frozenset(
                identity
                for identity, alternatives in matrix_pass.needed.items()
                if not any(map(possible, alternatives))
            )
        return self._skipped[key]


_ALIGNMENT = 128  # alignment of the arrays of batches, in elements


def _elements(batch: Batch) -> int:
    return sum(batch.counts) * math.prod(batch.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _waits(value: Value) -> bool:
    operation = MATRIX_OPERATIONS.get(value.operation)
    return operation is not None and operation.waits


def _possible(condition: Condition, numbers: Sequence[Mapping[str, float]]) -> bool:
    value, outcome = condition
    try:
        return any(bool(evaluate(value, group)) == outcome for group in numbers)
    except (KeyError, RuleError):
        return True  # it depends on a number on the device


class MatrixBatches:
    """The scratch arrays and matrix states of a segment, and its matrix passes."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.spec, self.entries, self.groups = segment.spec, segment.entries, segment.group_rows.groups
        self.program = self.spec.program.matrices
        self.passes = {index: matrix_pass for index, matrix_pass in enumerate(self.program.passes) if matrix_pass}
        """The matrix passes, by the index of the tile pass before them."""
        self.numbers = self.program.numbers()
        self.keys = self._keys()
        work = self.passes.values()
        self.waits = any(_waits(value) for matrix_pass in work for value in matrix_pass.values)
        """Whether the host waits for the device in steps that need all values."""
        conditional = any(matrix_pass.needed for matrix_pass in work)
        self.conditions = Conditions(self.groups, segment.step) if conditional else None
        """Decides on the host which values a step does not need; None if it always needs all."""
        records = self._records()
        apart = {index: entry.exchange for index, entry in enumerate(self.entries) if entry.exchange is not None}
        own = [index for index in range(len(self.entries)) if index not in apart]
        self.batches = sorted(self.batches_of(own), key=_elements)
        sums = accumulate(map(_elements, self.batches))
        fits = [_elements(batch) <= _SMALL and total <= _SMALL_TOGETHER for batch, total in zip(self.batches, sums)]
        self.side_by_side = sum(fits) if records and not apart else 0
        """How many of the first batches run concurrently in recordings."""
        self._allocate()
        shared: dict[MatrixExchange, dict[int, int]] = {}
        for member in chain.from_iterable(self._sorted(list(apart)).values()):
            exchange, number = apart[member]
            shared.setdefault(exchange, {})[number] = member
        self.shared = SharedMatrices(self, shared, records) if shared else None
        self.skipped_values: SkippedValues | None = None
        """The values that steps skip, set during a capture; None: the host decides."""
        self.active = np.ones(0, dtype=bool)  # which tensors took part in the last step, for the conditions
        self.is_built = False  # whether all passes have run, so that nothing is left to compile
        self._streams = [_side_stream(segment.device, lane + 1) for lane in range(min(self.side_by_side, _LANES))]
        pool = torch.cuda.graph_pool_handle() if records and not shared else None
        self._recorded = {index: RecordedPass(segment.device, pool) for index in self.passes if pool is not None}

    def _keys(self) -> list[tuple[Any, ...]]:
        """Return the shape and numbers of each tensor's matrices, and how many matrices it holds."""
        numbers_of = {
            group: tuple(float(evaluate(value, NumbersByName(self.groups[group]))) for value in self.numbers)
            for group in {entry.share.group_index for entry in self.entries}
        }
        keys = []
        for entry in self.entries:
            exchange, number = entry.exchange or (None, 0)
            shape, count = tuple(entry.param.shape if exchange is None else exchange.layouts[number].shape), 1
            if entry.holds is not None:
                count = entry.holds.count(math.prod(shape))
                shape = entry.holds.rows, entry.holds.columns
            keys.append((shape, numbers_of[entry.share.group_index], count))
        return keys

    def outdated(self) -> bool:
        """Whether the numbers have changed since the batches were made."""
        return self.keys != self._keys()

    def _sorted(self, indices: Sequence[int]) -> dict[tuple[Any, ...], list[int]]:
        members: dict[tuple[Any, ...], list[int]] = {}
        for index in indices:
            members.setdefault(self.keys[index][:2], []).append(index)
        return members

    def batches_of(self, indices: Sequence[int]) -> list[Batch]:
        """Make batches of these tensors' matrices; the tensors' states become views of the batches' states."""
        work = [value.operation for matrix_pass in self.passes.values() for value in matrix_pass.values]
        batches = []
        for (shape, numbers), members in self._sorted(indices).items():
            counts = [self.keys[member][2] for member in members]
            chunk = matrices_at_once(work, shape, self.spec.compute, sum(counts))
            by_identity = dict(zip(map(id, self.numbers), numbers))
            batch = Batch(shape, members, counts, by_identity, chunk, self.segment.device)
            for name in self.spec.program.graph.matrix_states:
                batch.states[name] = torch.stack([self.entries[index].matrices[name] for index in members])
                for index, state in zip(members, batch.states[name]):
                    self.entries[index].matrices[name] = state
            batches.append(batch)
        return batches

    def _allocate(self) -> None:
        """Allocate scratch arrays; a result is placed ahead of the operand that it replaces, by the largest chunk."""
        # Batches run in this order, the first of them concurrently: no result overwrites an operand still to be read.
        for name, replaced in self._replacements().items():
            dtype = self.program.scratch[name] or self.spec.compute
            sizes = [_elements(batch) for batch in self.batches]
            chunks = [_padded(batch.chunk * math.prod(batch.shape)) for batch in self.batches]
            spare = max(sum(map(_padded, sizes[: self.side_by_side])), *chunks) if replaced and chunks else 0
            memory = torch.zeros(spare + sum(map(_padded, sizes)), dtype=dtype, device=self.segment.device)
            begin = 0
            for batch, size in zip(self.batches, sizes):
                for own, start in ((name, begin + spare), (replaced, begin)):
                    if own is not None:
                        batch.arrays[own] = memory[start : start + size].view(sum(batch.counts), *batch.shape)
                begin += _padded(size)
        for batch in self.batches:
            for name, array in batch.arrays.items():
                for index, part in zip(batch.members, batch.parts(array)):
                    self.entries[index].arrays[name] = part.view(self.entries[index].param.shape)

    def _replacements(self) -> dict[str, str | None]:
        """Map each scratch array that owns memory to the array that reuses this memory chunk by chunk, or None."""
        scratch = self.program.scratch
        owners: dict[str, str | None] = dict.fromkeys(scratch)
        work = [(matrix_pass, value) for matrix_pass in self.passes.values() for value in matrix_pass.values]
        for matrix_pass, value in work:
            source = matrix_pass.inputs.get(id(value.args[0]))
            target = matrix_pass.outputs.get(id(value))
            if source in owners and target in owners and owners[source] is None and owners[target] is None:
                readers = [reader for _, reader in work if value.args[0] in reader.args]
                if readers == [value] and scratch[source] is scratch[target]:
                    owners[source] = target
                    del owners[target]
        return owners

    def plain(self) -> SkippedValues | None:
        """Return the values skipped by a step without host waits; None if there is no such step."""
        if not self.waits:
            return {}
        if self.conditions is None:
            return None
        self.conditions.look(self._active())
        skipped: SkippedValues = {}
        for place, batch in enumerate(self.batches):
            skipped_values = self.conditions.later(list(self.passes.values()), self._groups(batch))
            if skipped_values is None:
                return None
            skipped.update({(index, place): values for index, values in zip(self.passes, skipped_values)})
        return skipped

    def suffices(self, skipped_values: SkippedValues, active: np.ndarray) -> bool:
        """Whether the next step does not need these values."""
        assert self.conditions is not None
        self.conditions.look(active)
        for (index, place), values in skipped_values.items():
            batch = self.batches[place]
            is_active = active[batch.members].any()
            if is_active and not values <= self._skipped_values(self.passes[index], batch):
                return False
        return True

    def launches(self) -> list[Launch]:
        """Return the launches of Triton kernels in operations on matrices of the parameter's shape."""
        launches: list[Launch] = []
        for matrix_pass in self.passes.values():
            for value in matrix_pass.values:
                operation = MATRIX_OPERATIONS.get(value.operation)
                if operation is None or operation.launches is None or id(value.args[0]) not in matrix_pass.inputs:
                    continue
                for batch in [*self.batches, *(self.shared.batches if self.shared else ())]:
                    numbers = [batch.numbers[id(arg)] for arg in value.args[operation.operands :]]
                    launches += operation.launches(batch.shape, numbers, self.segment.device)
        return launches

    def build(self) -> None:
        """Build every kernel of the matrix passes, and initialize the matrix library; only scratch arrays change."""
        skipped_values = self.plain()
        if not self.is_built and skipped_values is not None:
            for index in self.passes:
                self._run(index, skipped_values, stores=False)
            self.is_built = True

    def run(self, index: int) -> None:
        """Run the matrix pass after tile pass `index`, if there is one; does not synchronize."""
        if index in self._recorded:
            self._recorded[index].run(partial(self._run, index, self.skipped_values, stores=True))
        elif index in self.passes:
            self._run(index, self.skipped_values, stores=True)

    def _records(self) -> bool:
        """Whether every step launches the same kernels, and recordings save enough host time."""
        differs = self.waits or self.conditions is not None
        return has_streams(self.segment.device) and not differs and len(self.entries) >= LEAST_MATRICES

    def _active(self) -> np.ndarray:
        """Return which tensors take part in this step."""
        gradients = self.segment.gradients or self.entries
        return np.asarray([gradient is not None for gradient in gradients], dtype=bool)

    def _groups(self, batch: Batch) -> list[int]:
        return sorted({self.entries[member].share.group_index for member in batch.members})

    def _skipped_values(self, matrix_pass: MatrixPass, batch: Batch) -> frozenset[int]:
        """Return the values that a batch does not need in this step."""
        if self.conditions is None:
            return frozenset()
        return self.conditions.skipped_values(matrix_pass, batch.members, self._groups(batch))

    def _run(self, index: int, fixed: SkippedValues | None, stores: bool) -> None:
        matrix_pass = self.passes[index]
        is_last = index == max(self.passes)
        decides = self.conditions is not None and fixed is None
        if self.conditions is not None:
            self.active = self._active()
            if decides:
                self.conditions.look(self.active)

        def compute_batch(place: int, batch: Batch, known: SkippedValues | None) -> None:
            idle = self.conditions is not None and not self.active[batch.members].any()
            if idle or not (all(batch.shape) and len(batch.index)):
                return
            if known is None:
                skipped = self._skipped_values(matrix_pass, batch)
            else:
                skipped = known.get((index, place), frozenset())
            for start in range(0, len(batch.index), batch.chunk):
                _Chunk(self.segment, batch, slice(start, start + batch.chunk)).run(matrix_pass, skipped, stores)

        def compute(batches: Sequence[Batch]) -> None:
            is_own = batches is self.batches
            known, several = (fixed, self.side_by_side) if is_own else (None, 0)
            with _side_by_side(self._streams) as stream_of:
                for place, batch in enumerate(batches[:several]):
                    with stream_of(place):
                        compute_batch(place, batch, known)
            for place, batch in enumerate(batches[several:], several):
                compute_batch(place, batch, known)

        if self.shared is None or not stores:
            compute(self.batches)
        else:
            self.shared.run(matrix_pass, self.batches, compute)
        if self.conditions is not None and decides and is_last:
            self.conditions.launched(self.active, self.segment.control.may_skip)
        self.is_built = self.is_built or is_last
