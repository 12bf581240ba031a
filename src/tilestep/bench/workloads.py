"""The parameter lists that are measured, and what one step over them has to move at the least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """A named list of shapes of one dtype."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements in all tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def title(self) -> str:
        """The name with counts.

        >>> Workload("tiny", ((1024,), (976,)), torch.bfloat16).title
        'tiny: 2 bfloat16 tensors, 0.002 M elements'
        """
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {len(self.shapes):,} {dtype} tensors, {self.elements / 1e6:,.4g} M elements"


def gpu_workloads(quick: bool = False) -> list[Workload]:
    """Return what `norm` and `step` run: many tensors of random sizes, a language model, many small tensors.

    >>> [round(workload.elements / 1e6) for workload in gpu_workloads()]
    [131, 1194, 5]
    """
    return [
        _random_sizes(quick),
        _llama(quick),
        Workload("small", ((1024,),) * (50 if quick else 5000), torch.bfloat16),
    ]


def cpu_workloads(quick: bool = False) -> list[Workload]:
    """Return what `cpu` runs: large tensors, many small ones, all-bf16.

    >>> [(len(workload.shapes), workload.elements) for workload in cpu_workloads()]
    [(200, 50000000), (2000, 16384000), (200, 50000000)]
    """
    shrink = 100 if quick else 1
    large = ((250_000 // shrink,),) * 200
    return [
        Workload("large fp32", large, torch.float32),
        Workload("small fp32", ((8192 // shrink,),) * (2000 // shrink), torch.float32),
        Workload("large bf16", large, torch.bfloat16),
    ]


def _random_sizes(quick: bool) -> Workload:
    draw = random.Random(133586)
    count, largest = (40, 4096) if quick else (2000, 128 * 1024)
    return Workload("random", tuple((draw.randint(1, largest),) for _ in range(count)), torch.bfloat16)


def _llama(quick: bool) -> Workload:
    """24 layers of width 2048 with 8 key-value heads, untied embeddings: 219 tensors."""
    return _llama_of("llama", *((2, 64, 16, 172, 500) if quick else (24, 2048, 512, 5504, 32000)))


def small_llama(quick: bool = False) -> Workload:
    """Return what rules that decompose matrices run: two layers of width 1024, untied embeddings.

    >>> small_llama().title
    'small llama: 21 bfloat16 tensors, 88.09 M elements'
    """
    return _llama_of("small llama", *((2, 64, 16, 172, 500) if quick else (2, 1024, 256, 2816, 32000)))


def _llama_of(name: str, layers: int, width: int, key_value: int, inner: int, vocabulary: int) -> Workload:
    layer: list[tuple[int, ...]] = [
        (width, width), (key_value, width), (key_value, width), (width, width),  # attention: q, k, v, o
        (inner, width), (inner, width), (width, inner),  # gate, up, down
        (width,), (width,),  # norms
    ]  # fmt: skip
    shapes = [(vocabulary, width), *(layer * layers), (width,), (vocabulary, width)]
    return Workload(name, tuple(shapes), torch.bfloat16)


def make_parameters(workload: Workload, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Return parameters with gradients, each its own allocation as in a model.

    >>> parameters = make_parameters(gpu_workloads(quick=True)[2], torch.device("cpu"))
    >>> len(parameters), parameters[0].shape == parameters[0].grad.shape
    (50, True)
    """
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(deviation: float) -> list[Tensor]:
        # Parameters first, then gradients, as in a training: a CPU's prefetcher sees which lie beside each other.
        empty = [torch.empty(shape, device=device, dtype=workload.dtype) for shape in workload.shapes]
        return [tensor.normal_(0, deviation, generator=generator) for tensor in empty]

    parameters, gradients = drawn(0.02), drawn(1e-3)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_().grad = gradient
    return parameters


def adamw_bytes(parameters: Sequence[Tensor], clip: bool, master_weights: bool = False) -> int:
    """Return the least traffic of an AdamW step in bytes: gradients read (twice with a clip), all else also written.

    >>> parameter = torch.zeros(1000, dtype=torch.bfloat16)
    >>> [adamw_bytes([parameter], clip) for clip in (False, True)]
    [14000, 16000]
    >>> adamw_bytes([parameter], clip=False, master_weights=True)  # fp32 master and moments; parameter only written
    28000
    """
    total = 0
    for parameter in parameters:
        size = parameter.element_size()
        buffers = 6 * 4 + size if master_weights else 6 * size
        total += parameter.numel() * (buffers + size * (2 if clip else 1))
    return total
