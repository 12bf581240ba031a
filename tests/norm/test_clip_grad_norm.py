"""Clipping on the CPU against torch."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import pytest
import torch
from norm_referee import DTYPES, drawn, referee
from scripts import run_python

import tilestep
from tilestep.errors import GradientError
from tilestep.norm import clip_grad_norm_


def with_gradients(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def pair(gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return with_gradients([gradient.clone() for gradient in gradients]), with_gradients(
        [gradient.clone() for gradient in gradients]
    )


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e9, -1.0, 0.0])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0])
def test_equals_torch(norm_type: float, max_norm: float) -> None:
    ours, theirs = pair(drawn([5, 20000, 64], torch.float32))
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)  # torch's own float32 sum is 3e-6 off
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_rounded_once(dtype: torch.dtype) -> None:
    gradients = drawn([20000, 3], dtype)
    parameters = with_gradients([gradient.clone() for gradient in gradients])
    norm = clip_grad_norm_(parameters, 1.5)
    coefficient = 1.5 / (norm.double() + 1e-6)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter, gradient in zip(parameters, gradients):
        expected = (gradient.to(wide) * coefficient.to(wide)).to(dtype)
        assert torch.equal(parameter.grad, expected)
    scaled = referee([parameter.grad for parameter in parameters], 2.0)
    assert scaled == pytest.approx(1.5, rel=1e-2)


def test_float16_rounds_every_bit_pattern_as_torch() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    for max_norm in (1000.0, 3.0, 1e-3):
        parameters = with_gradients([every.clone()])
        norm = clip_grad_norm_(parameters, max_norm)
        expected = (every.float() * (max_norm / (norm.double() + 1e-6)).float()).half()
        assert torch.equal(parameters[0].grad.view(torch.int16), expected.view(torch.int16))


def test_every_nan_has_the_bits_that_update_kernels_give_it() -> None:
    patterns = torch.tensor([0x7F81, 0x7FFF, -0x7F, -1], dtype=torch.int16)
    parameters = with_gradients([patterns.view(torch.bfloat16)])
    clip_grad_norm_(parameters, 1.0)
    tilestep.SGD(parameters, lr=1.0).step()
    for tensor in (parameters[0], parameters[0].grad):
        assert tensor.detach().view(torch.int16).tolist() == [0x7FC0] * 4


def test_mixed_dtypes_and_layouts() -> None:
    image = drawn([2 * 3 * 8 * 8], torch.float32)[0].view(2, 3, 8, 8)
    base = drawn([400], torch.float64)[0]
    gradients = [
        image.contiguous(memory_format=torch.channels_last),
        image.bfloat16(),
        base.view(20, 20)[::2, 3:9],
        image.half().permute(3, 1, 2, 0),
    ]
    untouched = base.view(20, 20)[1::2].clone()
    before = [gradient.double().clone() for gradient in gradients]
    norm = clip_grad_norm_(with_gradients(gradients), 0.25)
    assert norm.item() == pytest.approx(referee(before, 2.0), rel=1e-6)
    for gradient, old in zip(gradients, before):
        torch.testing.assert_close(gradient.double(), old * 0.25 / (norm + 1e-6), rtol=1e-2, atol=1e-6)
    assert torch.equal(base.view(20, 20)[1::2], untouched)


READ_ONLY = """
    import mmap, sys, warnings
    import torch
    from tilestep.norm import clip_grad_norm_
    warnings.simplefilter("ignore")
    with open(sys.argv[1], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    parameter = torch.nn.Parameter(torch.zeros(len(memory) // 4))
    parameter.grad = torch.frombuffer(memory, dtype=torch.float32)
    print(clip_grad_norm_([parameter], float(sys.argv[2])).item())
"""


def test_nothing_is_written_where_the_coefficient_is_one(tmp_path: Path) -> None:
    """A gradient in memory that cannot be written: harmless under the limit, and a crash over it."""
    path = tmp_path / "gradient"
    path.write_bytes(torch.ones(40000).numpy().tobytes())
    command = ["-c", textwrap.dedent(READ_ONLY), str(path)]
    kept = run_python(*command, "1000")
    assert (kept.returncode, kept.stdout) == (0, "200.0\n"), kept.stderr
    assert run_python(*command, "1").returncode < 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_coefficients_as_torch(bad: float) -> None:
    gradients = drawn([20000, 9], torch.float32)
    gradients[0][17000] = bad
    ours, theirs = pair(gradients)
    clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine.grad.isnan(), other.grad.isnan())
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_nonfinite_norm_is_refused_with_gradients_unchanged() -> None:
    ours, theirs = pair([torch.tensor([math.inf, 1.0]), torch.ones(3)])
    with pytest.raises(RuntimeError) as mine:
        clip_grad_norm_(ours, 0.1, 3, error_if_nonfinite=True)
    with pytest.raises(RuntimeError) as torchs:
        torch.nn.utils.clip_grad_norm_(theirs, 0.1, 3, error_if_nonfinite=True)
    assert str(mine.value) == str(torchs.value)
    assert torch.equal(ours[1].grad, torch.ones(3))


def test_single_parameter_missing_gradients_and_none_at_all() -> None:
    parameter = with_gradients([torch.tensor([3.0, 4.0])])[0]
    assert clip_grad_norm_(parameter, 1.0) == 5
    assert clip_grad_norm_([torch.nn.Parameter(torch.zeros(2)), parameter], 10.0) == pytest.approx(1.0)
    assert clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator") as record:
        assert clip_grad_norm_((gradient for gradient in []), 1.0) == 0
    assert record[0].filename == __file__


def test_max_norm_as_a_tensor() -> None:
    ours, theirs = pair(drawn([50], torch.float32))
    clip_grad_norm_(ours, torch.tensor(0.5, dtype=torch.float64))
    torch.nn.utils.clip_grad_norm_(theirs, torch.tensor(0.5))  # type: ignore[arg-type]
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)


def test_a_parameter_listed_twice_is_scaled_twice_as_torch_does() -> None:
    ours, theirs = pair(drawn([50, 20000], torch.float32))
    norm = clip_grad_norm_([*ours, ours[1]], 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([*theirs, theirs[1]], 1.0, foreach=False))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad)


def test_overlapping_gradients_are_scaled_in_turn_as_torch_does() -> None:
    base = drawn([100], torch.float32)[0]
    mine, other = base.clone(), base.clone()
    clip_grad_norm_(with_gradients([mine[:60], mine[40:]]), 1.0)
    torch.nn.utils.clip_grad_norm_(with_gradients([other[:60], other[40:]]), 1.0, foreach=False)
    torch.testing.assert_close(mine, other)


def test_expanded_gradient_is_refused_with_others_unchanged() -> None:
    gradient = torch.ones(5)
    with pytest.raises(RuntimeError, match="single memory location"):
        clip_grad_norm_(with_gradients([gradient, torch.ones(3).expand(4, 3)]), 0.1)
    assert torch.equal(gradient, torch.ones(5))


def test_unsupported_gradients_are_named_by_parameter() -> None:
    parameters = with_gradients([torch.ones(3), torch.ones(3)])
    parameters[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(GradientError, match="gradient of parameter 2 is sparse"):
        clip_grad_norm_([parameters[0], torch.nn.Parameter(torch.ones(1)), parameters[1]], 0.1)
    assert torch.equal(parameters[0].grad, torch.ones(3))


def test_the_write_is_seen_by_autograd() -> None:
    parameter = with_gradients([torch.full((4,), 10.0)])[0]
    version = parameter.grad._version
    clip_grad_norm_(parameter, 1.0)
    assert parameter.grad._version > version


def test_repeats_give_the_same_bits() -> None:
    gradients = drawn([100001, 40000], torch.float32)
    first, second = pair(gradients)
    clip_grad_norm_(first, 0.3)
    clip_grad_norm_(second, 0.3)
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(first, second))
