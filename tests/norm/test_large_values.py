"""Finite elements whose squares are not: an overflow check relies on their norm being finite."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import tilestep
from tilestep import clip_grad_norm_, total_norm
from tilestep.norm.cpu_backend import EagerNorm, cpu_norm
from tilestep.norm.tiles import cut

MOST = sys.float_info.max**0.5


def squares(tensors: list[torch.Tensor], *, eager: bool, root: bool = True) -> float:
    sizes = [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
    table: EagerNorm = EagerNorm(cut(*sizes, 16384)[0]) if eager else cpu_norm(*sizes)
    out = torch.empty(1, dtype=torch.float64)
    table.launch(torch.tensor([tensor.data_ptr() for tensor in tensors]), out, 2.0, root)
    return out.item()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [3e38, -1e30, 1.5e19])
def test_norm_of_large_values(value: float, dtype: torch.dtype, eager: bool) -> None:
    tensors = [torch.full((20_000,), value, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(40_000)]
    expected = torch.cat([tensor.double() for tensor in tensors]).norm().item()
    assert squares(tensors, eager=eager) == pytest.approx(expected, rel=1e-5)
    if not eager:
        assert total_norm([tensors[0][:1]]).item() == pytest.approx(abs(tensors[0][0].item()), rel=1e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_float64_norms_beyond_the_range_are_infinite_and_their_sums_finite(eager: bool) -> None:
    large = torch.full((5,), 1e300, dtype=torch.float64)
    half = torch.full((1,), 0.9 * MOST, dtype=torch.float64)
    for tensors in ([large], [large, large, torch.ones(3)], [half, half.clone()]):
        assert squares(tensors, eager=eager) == math.inf
        # An overflow check tells them from gradients that are not finite.
        assert squares(tensors, eager=eager, root=False) == sys.float_info.max
    assert squares([half], eager=eager) == pytest.approx(0.9 * MOST)


@pytest.mark.parametrize("value", [1e200, -1e308, 1e153, math.inf, math.nan])
def test_clips_of_large_float64_gradients_are_torchs(value: float) -> None:
    gradients = [torch.full((5,), value, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    expected = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(total_norm(gradients), expected, equal_nan=True)
    weights = [[torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in gradients] for _ in range(3)]
    for one in weights:
        for weight, gradient in zip(one, gradients):
            weight.grad = gradient.clone()
    clip_grad_norm_(weights[0], 1.0)
    torch.nn.utils.clip_grad_norm_(weights[1], 1.0)
    optimizer = tilestep.SGD(weights[2], lr=1.0, max_grad_norm=1.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, expected, equal_nan=True)
    for ours, torchs, stepped in zip(*weights):
        torch.testing.assert_close(ours.grad, torchs.grad, equal_nan=True)
        torch.testing.assert_close(stepped.data, -torchs.grad, equal_nan=True)


@pytest.mark.parametrize("above", [tilestep.TimesMean(2.0, warmup=2), tilestep.Sigma(3, window=8, warmup=4), 10.0])
def test_a_norm_beyond_the_range_is_above_every_limit_and_enters_none(above: object) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = tilestep.SGD([weight], lr=1.0, skip_above=above)
    for value in (1.0, 1.1, 0.9, 1.0, 1.1, 1e200, 1.0):
        weight.grad = torch.full((2,), value, dtype=torch.float64)
        optimizer.step()
    assert optimizer.skipped_steps.item() == 1
    assert weight.tolist() == pytest.approx([-6.1, -6.1])


def test_a_loss_scale_does_not_take_a_large_norm_for_an_overflow() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = tilestep.SGD([weight], lr=1e-200)
    scaler = tilestep.GradScaler("cpu", init_scale=2.0)
    scaler.scale((weight * 1e200).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == pytest.approx([-1.0, -1.0])
    assert scaler.get_scale() == 2.0


def test_an_outlier_beyond_the_range_is_clipped_by_zclip() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = tilestep.SGD([weight], lr=1.0, max_grad_norm=tilestep.ZClip(warmup=3, max_norm=None))
    for value in (1.0, 1.1, 0.9, 1.0, 1e200):
        weight.grad = torch.full((1,), value, dtype=torch.float64)
        optimizer.step()
    assert weight.item() == pytest.approx(-4.0)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_beside_large_values(bad: float, dtype: torch.dtype, eager: bool) -> None:
    tensors = [torch.full((20_000,), torch.finfo(dtype).max, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert math.isfinite(squares(tensors, eager=eager, root=False))
    for place in (0, 19_999):
        spoiled = [tensors[0].clone(), tensors[1]]
        spoiled[0][place] = bad
        assert squares(spoiled, eager=eager) == pytest.approx(abs(bad), nan_ok=True)


@pytest.mark.parametrize("eager", [False, True])
def test_a_norm_above_the_range_of_float32_is_infinite_there_as_in_torch(eager: bool) -> None:
    tensors = [torch.full((4,), 3e38), torch.ones(7)]
    sizes = [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
    table: EagerNorm = EagerNorm(cut(*sizes, 16384)[0]) if eager else cpu_norm(*sizes)
    out = torch.empty(1)
    table.launch(torch.tensor([tensor.data_ptr() for tensor in tensors]), out, 2.0, True)
    assert out.item() == math.inf
    assert total_norm(tensors).item() == torch.nn.utils.get_total_norm(tensors).item() == math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        total_norm(tensors, error_if_nonfinite=True)
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = tensors[0].clone()
    assert clip_grad_norm_([weight], 1.0).item() == math.inf
    assert weight.grad.tolist() == [0.0] * 4
