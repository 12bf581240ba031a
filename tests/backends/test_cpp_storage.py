"""16-bit storage in generated C++: every pattern read exactly, every float32 rounded as `.to(dtype)` rounds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilestep

LOW = [torch.bfloat16, torch.float16]


@tilestep.rule
def convert(param: Any, grad: Any, wide: Any, widened: Any) -> tuple[Any, ...]:
    """The parameter becomes the rounded `wide`; `widened` becomes the gradient as it was read."""
    return wide, wide, grad


def converted(wide: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 numbers rounded to the type of `low`, and `low` widened to float32."""
    weight = torch.nn.Parameter(torch.zeros_like(low))
    optimizer = tilestep.Optimizer([weight], convert, master_weights=True)
    optimizer.fitting_plan(ahead=True)
    optimizer.state[weight]["wide"].copy_(wide)
    weight.grad = low
    optimizer.step()
    return weight.detach(), optimizer.state[weight]["widened"]


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor, given: torch.Tensor) -> None:
    integer = torch.int16 if got.element_size() == 2 else torch.int32
    wrong = (got.view(integer) != wanted.view(integer)) & ~(got.isnan() & wanted.isnan())
    assert not wrong.any(), list(zip(given[wrong].tolist(), got[wrong].tolist(), wanted[wrong].tolist()))[:5]


@pytest.mark.parametrize("dtype", LOW)
def test_every_pattern_is_read_exactly_and_written_back(dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    rounded, widened = converted(patterns.float(), patterns)
    assert_same_bits(widened, patterns.float(), patterns)
    assert_same_bits(rounded, patterns, patterns)


@pytest.mark.parametrize("dtype", LOW)
def test_floats_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    finite = patterns[patterns.isfinite()].float().sort().values
    halfway = (finite[1:].double() + finite[:-1].double()).div(2).float()
    near = [torch.nextafter(halfway, torch.tensor(side * torch.inf)) for side in (-1.0, 1.0)]
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator, dtype=torch.int64).to(torch.int32)
    largest = torch.finfo(dtype).max
    edge = torch.tensor([largest, largest * 1.0001, largest * 1.01, 3.4e38, 1e-45, 1e-8, 5.9e-8, torch.inf, torch.nan])
    wide = torch.cat([halfway, *near, bits.view(torch.float32), edge, -edge])
    rounded, _ = converted(wide, torch.zeros(wide.numel(), dtype=dtype))
    assert_same_bits(rounded, wide.to(dtype), wide)


@pytest.mark.parametrize("dtype", LOW)
def test_plain_low_precision_state_is_rounded_the_same(dtype: torch.dtype) -> None:
    @tilestep.rule
    def tenth(param: Any, grad: Any, mean: Any) -> tuple[Any, ...]:
        return param + grad, mean + grad

    generator = torch.Generator().manual_seed(2)
    param, grad, mean = (torch.randn(5000, generator=generator).to(dtype) for _ in range(3))
    weight = torch.nn.Parameter(param.clone())
    optimizer = tilestep.Optimizer([weight], tenth)
    optimizer.fitting_plan(ahead=True)
    optimizer.state[weight]["mean"].copy_(mean)
    weight.grad = grad
    optimizer.step()
    assert_same_bits(weight.detach(), (param.float() + grad.float()).to(dtype), param)
    assert_same_bits(optimizer.state[weight]["mean"], (mean.float() + grad.float()).to(dtype), mean)
