"""The total norm and clipping on a GPU."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable

import pytest
import torch
from norm_referee import DTYPES, ORDERS, drawn, referee, tolerance
from synchronization import no_synchronization

from tilestep import devices
from tilestep.bench.measure import trace
from tilestep.norm import clip_grad_norm_, norm_table, total_norm

SIZES = [1, 7, 8192, 8193, 40000, 0, 33, 1024]


def with_gradients(gradients: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    return parameters


def launches(work: Callable[[], object]) -> tuple[int, int]:
    """Kernels that ran on the device, and copies or fills."""
    seen = trace(work, torch.device("cuda"))
    return seen.kernels, seen.copies


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", ORDERS)
def test_equals_float64(norm_type: float, dtype: torch.dtype) -> None:
    tensors = drawn(SIZES, dtype, device="cuda")
    expected = referee(tensors, norm_type)
    loose = 20 if dtype != torch.float64 and norm_type not in (1, 2) else 1
    for _ in range(2):
        norm = total_norm(tensors, norm_type)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert norm.item() == pytest.approx(expected, rel=loose * tolerance(dtype))


@pytest.mark.parametrize("norm_type", ORDERS)
def test_mixed_dtypes_layouts_and_unaligned_views(norm_type: float) -> None:
    base = drawn([80000], torch.float32, device="cuda")[0]
    tensors = [
        base[3:20003],
        base[:480].view(4, 3, 5, 8).to(memory_format=torch.channels_last),
        base.bfloat16()[1:30000],
        base.half().view(200, 400)[:, ::3],
        base[:64].view(1, 64).expand(5, 64),
        base[:9000].double(),
    ]
    assert total_norm(tensors, norm_type).item() == pytest.approx(referee(tensors, norm_type), rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), float("-inf"), 0.0])
def test_nonfinite_values_as_torch(norm_type: float, bad: float) -> None:
    for place in (0, 8191, 20000):
        tensors = drawn([20001, 5], torch.float32, device="cuda")
        tensors[0][place] = bad
        expected = torch.nn.utils.get_total_norm(tensors, norm_type)
        torch.testing.assert_close(total_norm(tensors, norm_type), expected, equal_nan=True, rtol=1e-5, atol=0)
    if norm_type != 0:
        with pytest.raises(RuntimeError, match=f"The total norm of order {norm_type} for gradients"):
            total_norm([torch.tensor([math.nan], device="cuda")], norm_type, error_if_nonfinite=True)


def test_empty_lists_and_tensors() -> None:
    empty = torch.empty(0, device="cuda")
    assert total_norm([empty, empty.clone()]).item() == 0
    assert total_norm([empty], float("inf")).item() == 0
    out = torch.ones(1, dtype=torch.float64, device="cuda")
    table = norm_table(torch.device("cuda"), [], [])
    table.launch(torch.empty(0, dtype=torch.int64, device="cuda"), out)
    assert out.item() == 0


def test_two_launches_no_synchronization_and_equal_bits() -> None:
    tensors = drawn([1000 + 37 * index for index in range(2000)], torch.bfloat16, device="cuda")
    first = total_norm(tensors)
    with no_synchronization():
        repeats = [total_norm(tensors) for _ in range(20)]
    assert len({norm.item().hex() for norm in [first, *repeats]}) == 1
    assert first.item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
    assert launches(lambda: total_norm(tensors)) == (2, 0)


def test_moved_tensors_cost_one_copy_and_no_synchronization() -> None:
    tensors = drawn([5000] * 50, torch.float32, device="cuda")
    total_norm(tensors)
    for round_ in range(5):
        tensors = [torch.full_like(each, round_ + 1) for each in tensors]
        with no_synchronization():
            norm = total_norm(tensors)
        assert norm.item() == pytest.approx((round_ + 1) * math.sqrt(250000), rel=1e-6)
    moved = [each.clone() for each in tensors]
    assert launches(lambda: total_norm(moved)) == (2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_equals_torch(dtype: torch.dtype) -> None:
    for max_norm in (0.5, 1e9, -1.0):
        gradients = drawn(SIZES, dtype, device="cuda")
        parameters = with_gradients([each.clone() for each in gradients])
        norm = clip_grad_norm_(parameters, max_norm)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        coefficient = (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(parameters, gradients):
            assert torch.equal(parameter.grad, (gradient.to(wide) * coefficient.to(wide)).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_with_nonfinite_gradients_as_torch(bad: float) -> None:
    gradients = drawn([20000, 9], torch.float32, device="cuda")
    gradients[0][17000] = bad
    ours, theirs = (with_gradients([each.clone() for each in gradients]) for _ in range(2))
    clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_clip_is_three_launches_without_synchronization() -> None:
    parameters = with_gradients([*drawn([3000] * 200, torch.bfloat16, device="cuda"), torch.ones(9, device="cuda")])
    clip_grad_norm_(parameters, 1e9)
    limit = torch.tensor(1e8, device="cuda")
    clip_grad_norm_(parameters, limit)
    with no_synchronization():
        clip_grad_norm_(parameters, 1e9)
        clip_grad_norm_(parameters, limit)
    assert launches(lambda: clip_grad_norm_(parameters, 1e9)) == (3, 0)
    norm = total_norm([parameter.grad for parameter in parameters])
    clip_grad_norm_(parameters, norm / 4)
    assert total_norm([parameter.grad for parameter in parameters]).item() == pytest.approx(norm.item() / 4, rel=1e-2)


def test_clip_of_strided_gradients() -> None:
    base = drawn([400], torch.float32, device="cuda")[0].view(20, 20)
    whole = base.clone()
    parameters = with_gradients([base[:, ::2], torch.ones(5, device="cuda")])
    norm = clip_grad_norm_(parameters, 0.5)
    torch.testing.assert_close(base[:, ::2], whole[:, ::2] * 0.5 / (norm + 1e-6))
    assert torch.equal(base[:, 1::2], whole[:, 1::2])


def test_streams_do_not_share_partial_results() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    lists = [[torch.full((3_000_000,), float(value), device="cuda")] for value in (1, 2, 3)]
    torch.cuda.synchronize()
    norms: list[tuple[float, torch.Tensor]] = []
    for _ in range(20):
        for stream, tensors, value in zip(streams, lists, (1.0, 2.0, 3.0)):
            with torch.cuda.stream(stream):
                norms.append((value, total_norm(tensors, float("inf"))))
    torch.cuda.synchronize()
    assert all(norm.item() == value for value, norm in norms)


def test_threads_on_one_stream() -> None:
    wrong: list[float] = []

    def work(value: float) -> None:
        tensors = [torch.full((30000,), value, device="cuda"), torch.zeros(8, device="cuda")]
        for _ in range(100):
            norm = total_norm(tensors, float("inf")).item()
            if norm != value:
                wrong.append(norm)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("warm", [True, False])
def test_captured_in_a_graph(warm: bool) -> None:
    """Also with gradients that have moved since: a graph keeps reading the addresses it was captured with."""
    gradients = drawn([5000, 77, 9001 if warm else 9002], torch.float32, device="cuda")
    parameters = with_gradients(gradients)
    scratch = with_gradients(drawn([3], torch.float32, device="cuda"))
    clip_grad_norm_(scratch, 1e9)  # loads the kernels
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if warm:
            clip_grad_norm_(parameters, 1e9)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            norm = clip_grad_norm_(parameters, 1.0)
        clip_grad_norm_(with_gradients([each.clone() for each in gradients]), 1.0)
    for scale in (3.0, 5.0):
        for gradient in gradients:
            gradient.fill_(scale)
        clip_grad_norm_(with_gradients([each.clone() for each in gradients]), 1.0)
        graph.replay()
        torch.cuda.synchronize()
        count = sum(gradient.numel() for gradient in gradients)
        assert norm.item() == pytest.approx(scale * math.sqrt(count), rel=1e-6)
        assert referee(gradients, 2.0) == pytest.approx(1.0, rel=1e-5)


def test_captures_share_nothing_with_each_other_and_with_calls_outside() -> None:
    """The first of two captures on one stream is never replayed; what it was to upload is nowhere."""
    parameters = with_gradients(drawn([5000, 77, 9003], torch.float32, device="cuda"))
    clip_grad_norm_(with_gradients(drawn([3], torch.float32, device="cuda")), 1e9)  # loads the kernels
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs, norms = [torch.cuda.CUDAGraph() for _ in range(2)], []
    with torch.cuda.stream(stream):
        for graph in graphs:
            with torch.cuda.graph(graph, stream=stream):
                norms.append(clip_grad_norm_(parameters, 1e9))
        outside = clip_grad_norm_(parameters, 1e9)
        graphs[1].replay()
    torch.cuda.synchronize()
    wanted = referee([parameter.grad for parameter in parameters if parameter.grad is not None], 2.0)
    assert outside.item() == pytest.approx(wanted, rel=1e-6)
    assert norms[1].item() == pytest.approx(wanted, rel=1e-6)
    graphs[0].replay()
    torch.cuda.synchronize()
    assert norms[0].item() == pytest.approx(wanted, rel=1e-6)


def test_many_captures_hold_no_more_than_one() -> None:
    parameters = with_gradients(drawn([5000, 77, 9004], torch.float32, device="cuda"))
    clip_grad_norm_(with_gradients(drawn([3], torch.float32, device="cuda")), 1e9)

    def capture() -> tuple[int, int]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            clip_grad_norm_(parameters, 1e9)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), len(devices._sources)

    capture()
    assert capture() == capture() == capture()


def test_norm_of_tensors_on_cpu_and_gpu() -> None:
    tensors = [*drawn([20000, 5], torch.float32, device="cuda"), *drawn([30], torch.float32)]
    for norm_type in ORDERS:
        norm = total_norm(tensors, norm_type)
        assert norm.device.type == "cuda"
        assert norm.item() == pytest.approx(referee(tensors, norm_type), rel=1e-5)
    parameters = with_gradients(tensors)
    clip_grad_norm_(parameters, 1.0)
    assert referee(tensors, 2.0) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.two_gpus
def test_norm_of_tensors_on_two_devices() -> None:
    tensors = [torch.full((20000,), 3.0, device="cuda:1"), torch.full((10000,), 4.0, device="cuda:0")]
    with torch.cuda.device(0):
        norm = total_norm(tensors)
        alone = total_norm(tensors[:1])
    assert norm.device == alone.device == torch.device("cuda:1")
    assert norm.item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
    clip_grad_norm_(with_gradients(tensors), 1.0)
    assert referee(tensors, 2.0) == pytest.approx(1.0, rel=1e-5)


def test_more_than_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    count = 2**31 + 8192 * 3 + 5
    if free < 3 * 2 * count:
        pytest.skip(f"needs {6 * count / 2**30:.0f} GiB of device memory")
    tensor = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    tensor[0], tensor[-1], tensor[2**31 + 1] = 3.0, 4.0, 12.0
    for start in (0, 1):  # aligned and not
        view = tensor[start:]
        assert total_norm([view, torch.zeros(5, device="cuda")]).item() == pytest.approx(
            13.0 if start == 0 else 160**0.5
        )
    clip_grad_norm_(with_gradients([tensor]), 6.5)
    assert (tensor[0].item(), tensor[-1].item(), tensor[2**31 + 1].item()) == (1.5, 2.0, 6.0)
