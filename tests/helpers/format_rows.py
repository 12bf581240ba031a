"""Every storage format as a row of one conformance test, and what is asked of it on any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from remainder_patterns import edge_patterns, floats, keep, reveal

import tilestep
from tilestep.backends import registry
from tilestep.storage import MASTER_FORMATS, stored_in, values_of


@dataclass(frozen=True)
class Row:
    """What is known of a format.

    Args:
        master_weights: as for `Optimizer`.
        relative: by what a finite number of ordinary size may be off, of itself.
    """

    master_weights: bool | str
    relative: float


ROWS = {
    "float32 master": Row(True, 0.0),
    "remainder": Row("remainder", 2.0**-23),
    "compensation": Row("kahan", 2.0**-16),
    "correction": Row("int8", 2.0**-15),
}

RULES: dict[str, dict[str, Any]] = {"AdamW": {"lr": 3e-3}, "Lion": {"lr": 3e-4}, "LAMB": {"lr": 3e-3}}

SHAPES = [(), (5,), (4, 6), (0,), (3, 2, 3, 3), (700,), (9, 130)]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """A block in which CPU tensors are updated by a backend: "cpp", "eager", or "triton", which must be interpreted."""
    from tilestep.backends.cpp.run import CppPasses
    from tilestep.backends.eager import EagerPasses

    classes: dict[str, Callable[[], Any]] = {"cpp": lambda: CppPasses, "eager": lambda: EagerPasses}
    if name == "triton":
        from tilestep.backends.triton.run import TritonPasses

        classes["triton"] = lambda: TritonPasses
    before, registry.passes_class = registry.passes_class, lambda device: classes[name]()
    try:
        yield
    finally:
        registry.passes_class = before


def numbers(few: bool) -> torch.Tensor:
    """Float32 numbers on which rounding could go wrong, not finite ones among them."""
    bits = edge_patterns()
    if few:
        bits = torch.cat([bits[: 2**19].view(2**16, 8)[::701].flatten(), bits[-500:]])
    return floats(bits)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits, with every NaN the same."""
    return (
        torch.where(tensor.isnan(), torch.nan, tensor).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        if tensor.is_floating_point()
        else tensor
    )


def kept_of(values: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """The bits of an array; of integers but those of values that are NaN, which say nothing."""
    return bits(array) if array.is_floating_point() else torch.where(values.isnan(), 0, array)


def check_kept(row: Row, few: bool = False) -> None:
    """A step keeps numbers as torch makes arrays of them, to the bit, and the next one reads what torch reads."""
    format = MASTER_FORMATS[row.master_weights]
    values = numbers(few)
    weight = torch.nn.Parameter(torch.zeros_like(values, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    optimizer = tilestep.Optimizer([weight], keep, master_weights=row.master_weights)
    optimizer.step()  # state begins with the first step
    optimizer.state[weight]["wide"].copy_(values)
    optimizer.step()
    storage = format(torch.bfloat16)
    arrays = {"param": weight.detach(), format.key: optimizer.state[weight][format.key]}
    wanted = {name: torch.empty_like(array) for name, array in arrays.items()}
    stored_in(storage, wanted, "param", values)
    for name, array in arrays.items():
        assert torch.equal(kept_of(values, array), kept_of(values, wanted[name])), name
    read = values_of(storage, arrays, "param")
    reader = tilestep.Optimizer([weight], reveal, master_weights=row.master_weights)
    kept = arrays[format.key].clone()
    reader.step()
    reader.state[weight][format.key].copy_(kept)
    reader.step()
    assert torch.equal(bits(reader.state[weight]["wide"]), bits(read))
    # Reading changes nothing; the parameter is the bfloat16 nearest to the number; what comes back is close to it.
    assert torch.equal(kept_of(values, reader.state[weight][format.key]), kept_of(values, arrays[format.key]))
    assert torch.equal(bits(weight.detach()), bits(values.to(torch.bfloat16)))
    assert torch.equal(read.isnan(), values.isnan())
    infinite = weight.detach().isinf()
    ordinary = (values.abs() > 1e-30) & ~infinite & ~values.isnan()
    assert ((read - values).abs()[ordinary] <= values.abs()[ordinary] * row.relative).all()


def check_training(row: Row, rule: str, steps: int = 6) -> None:
    """Some steps are those with float32 masters, as far as the format is precise."""
    runs = []
    for choice in (row.master_weights, True):
        generator = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
        params[2] = torch.nn.Parameter(params[2].detach().t())
        optimizer = tilestep.Optimizer(params, rule, master_weights=choice, skip_nonfinite=True, **RULES[rule])
        for step in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            if step == steps // 2:
                params[1].grad[0] = torch.nan  # type: ignore[index]
            optimizer.step()
        assert int(optimizer.skipped_steps) == 1
        format = MASTER_FORMATS[choice]
        runs.append([format.values(param, optimizer.state[param][format.key]) for param in params])
    for mine, wanted in zip(*runs):
        torch.testing.assert_close(mine, wanted, rtol=8 * row.relative, atol=8 * row.relative * 3e-3)
