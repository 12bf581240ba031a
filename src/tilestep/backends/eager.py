"""Passes as eager PyTorch: the rule itself, tensor by tensor, where no kernels can be built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import BuildError, GradientError
from ..graph import REDUCTIONS, Value, folded, size_from_end
from ..kernels.spec import CLIP, INVERSE_SCALE, NORM, SKIP, UNSCALE, KernelSpec
from ..linalg import MATRIX_OPERATIONS
from ..runtime.passes import Passes
from ..runtime.segment import Entry, Segment, strides_of
from ..storage import random_tensor, stored_in, values_of
from .decision import gradient_scale


class EagerPasses(Passes):
    """Evaluates a graph with torch operations; arguments as for `Segment`."""

    has_kernels = False

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry], *arguments: Any) -> None:
        sharded = next((entry for entry in entries if entry.exchange), None)
        if sharded is not None and spec.program.matrices.scratch:
            raise GradientError(
                f"{sharded.share.label} is sharded, and rule {spec.program.graph.title} works on whole matrices, which "
                "needs a C++ compiler, or Triton on a GPU"
            )
        if spec.global_count:
            raise BuildError(
                f"rule {spec.program.graph.title} reduces over all tensors, which eager PyTorch does not support: "
                "install a C++ compiler, or Triton for CUDA"
            )
        super().__init__(Segment(spec, entries, *arguments, tile_size=1 << 20))
        self._spec = spec
        self.hyper: list[list[float]] = []

    def scalar_calls(self, index: int) -> list[partial[Any]]:
        """The last scalar pass runs the whole graph; the other passes do nothing."""
        return [] if index < len(self._spec.program.scalars) - 1 else [partial(self._update_all)]

    def _update_all(self) -> None:
        segment = self.segment
        if float(segment.control.numbers[SKIP]):
            return
        for position, gradient in enumerate(segment.gradients):
            if gradient is not None:
                self._update(position, gradient)

    def _update(self, position: int, gradient: torch.Tensor) -> None:
        entry, graph, compute = self.segment.entries[position], self._spec.program.graph, self._spec.compute
        self.segment.step[position] += 1
        loads: dict[str, torch.Tensor] = {"grad": gradient.to(compute)}
        for name, storage in self._spec.storages.items():
            if name != "grad" and name not in self._spec.program.matrices.scratch:
                loads[name] = values_of(storage, entry.arrays, name, compute, entry.param.shape)
        if entry.holds is not None:
            loads = {name: value.reshape(self._seen(entry, name)) for name, value in loads.items()}
        # Copies, as those of `values_of`: a rule may move a state's old value to another, which is written later.
        loads.update({name: matrix.clone() for name, matrix in entry.matrices.items()})
        numbers = {name: array[position] for name, array in self.segment.scalar_states.items()}
        loads.update({name: number.to(torch.float64, copy=True) for name, number in numbers.items()})
        # Of an empty tensor only the scalar states change.
        outputs = {name: graph.outputs[name] for name in (graph.outputs if gradient.numel() else graph.scalar_states)}
        results = folded(outputs.values(), partial(self._apply, loads, position))
        for name, output in outputs.items():
            value = results[id(output)]
            if name in graph.scalar_states:
                self.segment.scalar_states[name][position] = value
            elif name in graph.matrix_states:
                entry.matrices[name].copy_(value)
            else:
                random = self._random(position, name)
                if entry.holds is not None:
                    like = entry.arrays[name] if name in graph.slice_states else entry.param
                    value = value.expand(self._seen(entry, name)).reshape(like.shape)
                stored_in(self._spec.storages[name], entry.arrays, name, value, entry.param.shape, random)
        if float(self.segment.control.numbers[UNSCALE]):
            gradient.mul_(float(self.segment.control.numbers[INVERSE_SCALE]))

    def _seen(self, entry: Entry, name: str) -> list[int]:
        """The shape in which the rule sees a buffer."""
        graph = self._spec.program.graph
        gone = range(*graph.slice_states.get(name, (0, 0)))
        return [1 if dim in gone else size for dim, size in enumerate(entry.here(graph.dims))]

    def _random(self, position: int, name: str) -> torch.Tensor | None:
        """The random bits that round a buffer; None for one that is rounded to nearest."""
        if name not in self._spec.draws:
            return None
        entry = self.segment.entries[position]
        index = torch.full(entry.param.shape, entry.origin, dtype=torch.int64, device=entry.param.device)
        for dim, stride in enumerate(strides_of(entry)):
            along = torch.arange(entry.param.shape[dim], device=entry.param.device) * stride
            index += along.view(-1, *[1] * (entry.param.dim() - dim - 1))
        stream = int(self.segment.group_rows.streams[position, 0])
        return random_tensor(stream, int(self.segment.step[position]), self._spec.draws[name], index)

    def _apply(self, loads: Mapping[str, torch.Tensor], position: int, value: Value, args: list[Any]) -> Any:
        name = value.operation
        if name == "constant":
            return torch.tensor(value.attribute, dtype=torch.bool if value.is_bool else torch.float64, device="cpu")
        if name == "load":
            return loads[value.attribute]
        if name == "hyper":
            return torch.tensor(self._number(value.attribute, position), dtype=torch.float64, device="cpu")
        if name in REDUCTIONS:
            reduce: Any = {"reduce_sum": torch.sum, "reduce_amax": torch.amax, "reduce_amin": torch.amin}[name]
            if not args[0].numel() and name != "reduce_sum":
                return torch.tensor(
                    -torch.inf if name == "reduce_amax" else torch.inf, dtype=torch.float64, device="cpu"
                )
            return reduce(args[0]) if value.over is None else reduce(args[0], dim=[*range(*value.over)], keepdim=True)
        if name in MATRIX_OPERATIONS:
            return self._matrix(value, args)
        if name == "number":
            return args[0].to(self._spec.compute)
        return getattr(torch, name if hasattr(torch, name) else f"logical_{name}")(*args)

    def _matrix(self, value: Value, args: list[Any]) -> torch.Tensor:
        operation = MATRIX_OPERATIONS[value.operation]
        dtype = operation.dtype or self._spec.compute
        operands = [matrix.to(dtype) for matrix in args[: operation.operands]]
        numbers = [float(number) for number in args[operation.operands :]]
        if operands[0].dim() > 2:
            return operation.run(operands, numbers, None).to(self._spec.compute)
        return operation.run([matrix.unsqueeze(0) for matrix in operands], numbers, None)[0].to(self._spec.compute)

    def _number(self, name: str, position: int) -> float:
        if name == "step":
            return float(self.segment.step[position])
        if name == "machine_epsilon":
            return self._spec.machine_epsilon
        if name == "numel" or size_from_end(name):
            return float(self.segment.sizes[position, self._spec.sizes.index(size_from_end(name))])
        row = self.hyper[self.segment.group_rows.of[position]]
        if name != "gradient_scale":
            return row[self._spec.hypers.index(name)]
        norm, inverse, clip = (float(self.segment.control.numbers[place]) for place in (NORM, INVERSE_SCALE, CLIP))
        return float(gradient_scale(norm, inverse, clip, row[self._spec.hypers.index("max_grad_norm")]))
