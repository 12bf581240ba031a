"""Finite elements whose squares are not: an overflow check relies on their norm being finite."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tilestep import clip_grad_norm_, total_norm
from tilestep.norm.cpu_backend import CpuNorm, EagerNorm, cpu_norm
from tilestep.norm.tiles import cut

MOST = sys.float_info.max**0.5


def squares(tensors: list[torch.Tensor], *, eager: bool) -> float:
    sizes = [each.numel() for each in tensors], [each.dtype for each in tensors]
    table: CpuNorm | EagerNorm = EagerNorm(cut(*sizes, 16384)) if eager else cpu_norm(*sizes)
    out = torch.empty(1, dtype=torch.float64)
    table.norm(torch.tensor([each.data_ptr() for each in tensors]), out, 2.0, True)
    return out.item()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [3e38, -1e30, 1.5e19])
def test_norm_of_large_values(value: float, dtype: torch.dtype, eager: bool) -> None:
    tensors = [torch.full((20_000,), value, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(40_000)]
    expected = torch.cat([each.double() for each in tensors]).norm().item()
    assert squares(tensors, eager=eager) == pytest.approx(expected, rel=1e-5)
    if not eager:
        assert total_norm([tensors[0][:1]]).item() == pytest.approx(abs(tensors[0][0].item()), rel=1e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_float64_is_finite_up_to_the_largest_square_root(eager: bool) -> None:
    large = torch.full((5,), 1e300, dtype=torch.float64)
    assert squares([large], eager=eager) == MOST
    assert squares([large, large, torch.ones(3)], eager=eager) == MOST
    half = torch.full((1,), 0.9 * MOST, dtype=torch.float64)
    assert squares([half, half.clone()], eager=eager) == MOST
    assert squares([half], eager=eager) == pytest.approx(0.9 * MOST)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_beside_large_values(bad: float, dtype: torch.dtype, eager: bool) -> None:
    tensors = [torch.full((20_000,), torch.finfo(dtype).max, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert math.isfinite(squares(tensors, eager=eager))
    for place in (0, 19_999):
        spoiled = [tensors[0].clone(), tensors[1]]
        spoiled[0][place] = bad
        assert squares(spoiled, eager=eager) == pytest.approx(abs(bad), nan_ok=True)


@pytest.mark.parametrize("eager", [False, True])
def test_a_norm_above_the_range_of_float32_is_infinite_there_as_in_torch(eager: bool) -> None:
    tensors = [torch.full((4,), 3e38), torch.ones(7)]
    sizes = [each.numel() for each in tensors], [each.dtype for each in tensors]
    table: CpuNorm | EagerNorm = EagerNorm(cut(*sizes, 16384)) if eager else cpu_norm(*sizes)
    out = torch.empty(1)
    table.norm(torch.tensor([each.data_ptr() for each in tensors]), out, 2.0, True)
    assert out.item() == math.inf
    assert total_norm(tensors).item() == torch.nn.utils.get_total_norm(tensors).item() == math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        total_norm(tensors, error_if_nonfinite=True)
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = tensors[0].clone()
    assert clip_grad_norm_([weight], 1.0).item() == math.inf
    assert weight.grad.tolist() == [0.0] * 4
