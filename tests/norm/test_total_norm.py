"""The total norm on the CPU against float64 and against torch."""

from __future__ import annotations

import math
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_referee import DTYPES, ORDERS, drawn, referee, tolerance
from scripts import run_python

from tilestep.errors import GradientError
from tilestep.norm import total_norm

SIZES = [1, 7, 16384, 16385, 40000, 0, 33, 1024]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", ORDERS)
def test_equals_float64(norm_type: float, dtype: torch.dtype) -> None:
    tensors = drawn(SIZES, dtype)
    norm = total_norm(tensors, norm_type)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.shape == ()
    loose = 20 if dtype != torch.float64 and norm_type not in (1, 2) else 1  # powers in float32
    assert norm.item() == pytest.approx(referee(tensors, norm_type), rel=loose * tolerance(dtype))


@pytest.mark.parametrize("norm_type", ORDERS)
def test_equals_torch(norm_type: float) -> None:
    tensors = drawn([5, 300, 40000], torch.float32)
    expected = torch.nn.utils.get_total_norm(tensors, norm_type)
    torch.testing.assert_close(total_norm(tensors, norm_type), expected, rtol=1e-5, atol=0)  # torch is 4e-6 off float64


def test_order_zero_counts_tensors_as_torch_does() -> None:
    tensors = [torch.zeros(40000), torch.tensor([0.0, 2.0, 3.0]), torch.full((40000,), math.nan), torch.zeros(3)]
    assert total_norm(tensors, 0.0) == torch.nn.utils.get_total_norm(tensors, 0.0) == 2.0


def test_mixed_dtypes_make_one_norm() -> None:
    tensors = [drawn([20000], dtype, seed)[0] for seed, dtype in enumerate(DTYPES)]
    norm = total_norm(tensors)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(referee(tensors, 2.0), rel=3e-6)
    assert total_norm(tensors[2:]).dtype == torch.float32


def test_bfloat16_is_summed_in_float32() -> None:
    tensors = drawn([1000, 50000], torch.bfloat16)
    assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
    assert total_norm([torch.cat(tensors)]).item() == pytest.approx(total_norm(tensors).item(), rel=1e-6)


def test_single_tensor_generator_and_string_order() -> None:
    tensor = torch.tensor([3.0, -4.0])
    assert total_norm(tensor) == 5
    assert total_norm(item for item in [tensor]) == 5
    assert total_norm([tensor], "inf") == 4  # type: ignore[arg-type]
    assert total_norm([]) == torch.nn.utils.get_total_norm([])
    assert total_norm([]).dtype == torch.float32


def layouts() -> list[torch.Tensor]:
    base = drawn([4 * 6 * 8 * 10], torch.float32)[0]
    image = base.view(4, 6, 8, 10)
    return [
        image.to(memory_format=torch.channels_last),
        image.permute(2, 0, 3, 1),
        image[:, 1:5, ::2],
        image.select(3, 4),
        image[:1].expand(5, 6, 8, 10),
        base[3:1000],
        base[0],
        base.view(40, 48).t()[:, :7],
        torch.empty(0, 3),
    ]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 0.0])
def test_any_layout(norm_type: float) -> None:
    tensors = layouts()
    expected = referee(tensors, norm_type)
    for _ in range(2):
        assert total_norm(tensors, norm_type).item() == pytest.approx(expected, rel=3e-6)
        assert total_norm(tensors[::-1], norm_type).item() == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unaligned_views(dtype: torch.dtype) -> None:
    base = drawn([70000], dtype)[0]
    tensors = [base[offset : offset + 20000 + offset] for offset in (1, 3, 5)]
    assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=tolerance(dtype))


def test_empty_tensors_contribute_nothing() -> None:
    assert total_norm([torch.empty(0), torch.empty(0, 2)]) == 0
    for norm_type in ORDERS:
        tensors = [torch.empty(0), torch.tensor([2.0]), torch.empty(3, 0)]
        assert total_norm(tensors, norm_type).item() == pytest.approx(1.0 if norm_type == 0 else 2.0, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), float("-inf"), -1.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 20000, 16389])
def test_nonfinite_values_as_torch(norm_type: float, bad: float, place: int, dtype: torch.dtype) -> None:
    tensors = drawn([20001, 5], dtype)
    tensors[0][place] = bad
    norm, expected = total_norm(tensors, norm_type), torch.nn.utils.get_total_norm(tensors, norm_type)
    torch.testing.assert_close(norm.double(), expected.double(), equal_nan=True, rtol=2e-2, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_nonfinite_norm_is_refused_in_torchs_words(bad: float, norm_type: float) -> None:
    tensors = [torch.tensor([bad, 1.0])]
    with pytest.raises(RuntimeError) as ours:
        total_norm(tensors, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.utils.get_total_norm(tensors, norm_type, error_if_nonfinite=True)
    assert str(ours.value) == str(theirs.value)
    assert total_norm([torch.ones(4)], norm_type, error_if_nonfinite=True) in (1, 2)


def test_unsupported_tensors_are_named() -> None:
    good = torch.ones(3)
    with pytest.raises(GradientError, match="tensor 1 is sparse"):
        total_norm([good, good.clone().to_sparse()])
    with pytest.raises(GradientError, match=r"tensor 2 has dtype torch\.int16"):
        total_norm([good, good.to(torch.complex64), good.to(torch.int16)])
    with pytest.raises(GradientError, match=r"tensor 0 has dtype torch\.int64"):
        total_norm([torch.ones(3, dtype=torch.int64)])


def test_a_subclass_is_left_to_torch() -> None:
    class Scaled(torch.Tensor):
        pass

    norm = total_norm([torch.ones(4).as_subclass(Scaled)])
    assert norm == 2


def test_repeats_and_thread_counts_give_the_same_bits() -> None:
    tensors = drawn([300000, 17, 50001], torch.float32)
    before = torch.get_num_threads()
    try:
        for norm_type in ORDERS:
            results = set()
            for threads in (1, 2, 3, 5, 2):
                torch.set_num_threads(threads)
                results.add(total_norm(tensors, norm_type).item().hex())
            assert len(results) == 1
    finally:
        torch.set_num_threads(before)


def test_float16_of_every_bit_pattern() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    assert total_norm([finite], 1.0).item() == pytest.approx(finite.double().abs().sum().item(), rel=1e-6)
    subnormal = finite[(finite.abs() < 2**-14) & (finite != 0)]
    assert total_norm([subnormal], float("-inf")).item() == 2**-24


def test_gradients_that_require_grad() -> None:
    tensor = torch.ones(4, requires_grad=True)
    assert not total_norm([tensor]).requires_grad


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drawn_shapes_and_strides(data: st.DataObject) -> None:
    tensors = []
    for index in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
        tensor = drawn([math.prod(shape)], data.draw(st.sampled_from(DTYPES)), index)[0].reshape(shape)
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        for dimension in range(tensor.dim()):
            step = data.draw(st.integers(1, 3))
            index_slice = [slice(None)] * tensor.dim()
            index_slice[dimension] = slice(data.draw(st.integers(0, 2)), None, step)
            tensor = tensor[tuple(index_slice)]
        if data.draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(data.draw(st.integers(0, 3)), *tensor.shape)
        tensors.append(tensor)
    for norm_type in (2.0, 1.0, float("inf"), 0.0, 3.0):
        assert total_norm(tensors, norm_type).item() == pytest.approx(referee(tensors, norm_type), rel=1e-4)


FORK = """
    import os, signal, sys, tilestep, torch
    from tilestep.norm import total_norm
    torch.set_num_threads(4)
    tilestep.devices.thread_count = torch.get_num_threads  # scripts are forks too, of a server without threads
    tensors = [torch.ones(1_000_000)]
    before = total_norm(tensors).item()
    param = torch.nn.Parameter(torch.ones(1_000_000))
    param.grad = torch.ones_like(param)
    optimizer = tilestep.SGD([param], lr=0.25)
    optimizer.step()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for threads of its parent ends
        optimizer.step()
        os._exit(0 if total_norm(tensors).item() == before == 1000 and param[:9].eq(0.5).all() else 1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_after_a_fork() -> None:
    done = run_python("-c", textwrap.dedent(FORK))
    assert done.returncode == 0, done.stderr
