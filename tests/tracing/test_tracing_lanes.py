"""Traces made up by hand: whose each piece of work is, where iterations end, and the exposed time to the digit."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilestep
from tilestep.backends.triton import source as triton
from tilestep.backends.triton.decision import decision_source
from tilestep.norm.tiles import Order
from tilestep.norm.triton_source import norm_source, scale_source
from tilestep.optimizer.control import decide
from tilestep.planning.describe import spec_for
from tilestep.runtime.decision import StepInputs
from tilestep.tracing import report_on
from tilestep.tracing.lanes import Intervals, covers, is_update_kernel, length, minus, overlap, union

MAIN, AUTOGRAD = 1, 2


class Trace:
    """Events of a Chrome trace as torch's profiler writes them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def call(self, name: str, start: float, stop: float, *, thread: int = MAIN, cat: str = "cpu_op") -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "tid": thread, "args": {}}
        )

    def range(self, name: str, start: float, stop: float, *, thread: int = MAIN) -> None:
        self.call(name, start, stop, thread=thread, cat="user_annotation")

    def kernel(
        self, name: str, at: float, start: float, stop: float, *, thread: int = MAIN, cat: str = "kernel"
    ) -> None:
        """A kernel that the host launches at one moment and that runs at another."""
        number = len(self.events)
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 0.5, "tid": thread}
        self.events.append({**launch, "args": {"correlation": number}})
        work = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "tid": 7}
        self.events.append({**work, "args": {"correlation": number}})


def gpu_iteration(trace: Trace, host: float, device: float) -> None:
    """Forward 10 us, backward 20, of which 5 beside an all-reduce that goes on for 5, step 8 with 2 of copies."""
    trace.call("aten::mm", host, host + 2)
    trace.kernel("ampere_sgemm", host + 1, device, device + 10)
    trace.call("autograd::engine::evaluate_function: MmBackward0", host + 3, host + 6, thread=AUTOGRAD)
    trace.kernel("ampere_sgemm", host + 4, device + 10, device + 30, thread=AUTOGRAD)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32", host + 5, device + 25, device + 35, thread=AUTOGRAD)
    trace.range("Optimizer.step#AdamW.step", host + 7, host + 12)
    trace.kernel("norm_tiles", host + 8, device + 35, device + 37)
    trace.kernel("Memcpy HtoD", host + 9, device + 37, device + 39, cat="gpu_memcpy")
    trace.kernel("adamw_tile_pass_0", host + 10, device + 39, device + 43)


def test_a_gpu_that_runs_behind_the_host() -> None:
    trace = Trace()
    gpu_iteration(trace, 0.0, 100.0)
    gpu_iteration(trace, 20.0, 150.0)
    gpu_iteration(trace, 40.0, 203.0)
    report = report_on(trace.events)
    assert report.on_gpu
    assert [(iteration.start, iteration.stop) for iteration in report.iterations] == [
        (100.0, 150.0),
        (150.0, 203.0),
        (203.0, 246.0),
    ]
    first = report.iterations[0].lanes
    assert first.forward == [(100.0, 110.0)] and first.backward == [(110.0, 130.0)]
    assert first.communication == [(125.0, 135.0)] and first.copies == [(137.0, 139.0)]
    assert first.update == [(135.0, 137.0), (139.0, 143.0)] and first.optimizer == [(135.0, 143.0)]
    assert [iteration.exposed_milliseconds for iteration in report.iterations] == [0.008, 0.008, 0.008]
    assert report.milliseconds == 0.043  # of 53 and 43, the lower median


def test_an_update_beside_backward_is_exposed_only_where_it_sticks_out() -> None:
    trace = Trace()
    trace.call("autograd::engine::evaluate_function: MmBackward0", 0, 10, thread=AUTOGRAD)
    trace.kernel("ampere_sgemm", 1, 100, 120, thread=AUTOGRAD)
    trace.range("tilestep::update", 4, 9, thread=AUTOGRAD)
    trace.kernel("cutlass_gemm", 5, 110, 128, thread=AUTOGRAD)  # a product of matrices in the update
    trace.kernel("Memset", 6, 128, 131, thread=AUTOGRAD, cat="gpu_memset")
    trace.kernel("ncclDevKernel_AllGather", 7, 129, 134, thread=AUTOGRAD)
    trace.kernel("ampere_sgemm", 9.5, 130, 133, thread=AUTOGRAD)
    trace.range("Optimizer.step#AdamW.step", 11, 12)
    (only,) = report_on(trace.events).iterations
    assert only.lanes.backward == [(100.0, 120.0), (130.0, 133.0)]
    assert only.lanes.update == [(110.0, 128.0)]
    assert only.lanes.exposed == [(120.0, 130.0), (133.0, 134.0)]
    assert only.exposed_milliseconds == 0.011


def test_an_update_beside_the_next_forward_belongs_to_that_iteration() -> None:
    trace = Trace()
    for host, device in ((0.0, 100.0), (20.0, 140.0)):
        trace.kernel("ampere_sgemm", host + 1, device, device + 10)
        trace.range("tilestep::update", host + 2, host + 3)
        trace.kernel("lion_tile_pass_0", host + 2.5, device + 6, device + 14)
        trace.call("autograd::engine::evaluate_function: MmBackward0", host + 4, host + 6, thread=AUTOGRAD)
        trace.kernel("ampere_sgemm", host + 5, device + 12, device + 40, thread=AUTOGRAD)
        trace.range("Optimizer.step#Lion.step", host + 7, host + 8)
    report = report_on(trace.events)
    assert [iteration.lanes.update for iteration in report.iterations] == [[(106.0, 114.0)], [(146.0, 154.0)]]
    assert [iteration.exposed_milliseconds for iteration in report.iterations] == [0.002, 0.002]


def test_torch_s_own_optimizers_clips_and_scalers_count_too() -> None:
    trace = Trace()
    apply = "void at::native::multi_tensor_apply_kernel<LpNormFunctor>"
    trace.kernel("ampere_sgemm", 0, 100, 110)
    trace.call("autograd::engine::evaluate_function: MmBackward0", 1, 4, thread=AUTOGRAD)
    trace.call("aten::_foreach_copy_", 2, 3, thread=AUTOGRAD)
    trace.kernel(apply, 2.5, 110, 115, thread=AUTOGRAD)  # gradients that are packed for other ranks
    trace.call("aten::_foreach_norm", 5, 6)
    trace.kernel(apply, 5.5, 115, 118)
    trace.call("aten::stack", 6, 6.4)
    trace.kernel("CatArrayBatchedCopy", 6.2, 118, 119)
    trace.range("Optimizer.step#AdamW.step", 7, 9)
    trace.kernel("vectorized_elementwise_kernel", 8, 119, 125)
    (only,) = report_on(trace.events).iterations
    assert only.lanes.update == [(115.0, 118.0), (119.0, 125.0)]
    assert only.lanes.backward == [(110.0, 115.0)]
    assert only.exposed_milliseconds == 0.009


def test_kernels_of_a_replayed_graph_are_known_by_their_names() -> None:
    trace = Trace()
    for host, device in ((0.0, 100.0), (30.0, 130.0)):
        for name, start, stop in (("ampere_sgemm", 0, 20), ("norm_finish", 20, 21), ("adamw_tile_pass_0", 21, 27)):
            trace.kernel(name, host + 1, device + start, device + stop)
        trace.range("tilestep::iteration", host + 2, host + 2)
    report = report_on(trace.events)
    assert [iteration.exposed_milliseconds for iteration in report.iterations] == [0.007, 0.007]
    assert [iteration.milliseconds for iteration in report.iterations] == [0.03, 0.027]


def test_a_replayed_graph_of_a_step_alone_is_all_update() -> None:
    trace = Trace()
    for host, device in ((0.0, 100.0), (30.0, 130.0)):
        trace.kernel("ampere_sgemm", host + 1, device, device + 20)
        trace.call("autograd::engine::evaluate_function: MmBackward0", host, host + 2, thread=AUTOGRAD)
        trace.range("tilestep::replay", host + 3, host + 4)
        trace.kernel("cutlass_gemm", host + 3.5, device + 20, device + 28)
    assert [iteration.exposed_milliseconds for iteration in report_on(trace.events).iterations] == [0.008, 0.008]


def test_an_update_on_the_host_counts_beside_a_gpu() -> None:
    trace = Trace()
    trace.call("autograd::engine::evaluate_function: MmBackward0", 0, 10, thread=AUTOGRAD)
    trace.kernel("ampere_sgemm", 1, 5, 30, thread=AUTOGRAD)
    trace.range("tilestep::update", 8, 9, thread=AUTOGRAD)
    trace.kernel("Memcpy DtoH", 8.5, 25, 34, thread=AUTOGRAD, cat="gpu_memcpy")  # a gradient goes to the host
    trace.range("Optimizer.step#AdamW.step", 11, 50)
    trace.range("tilestep::host_update", 28, 47)
    trace.kernel("Memcpy HtoD", 48, 48, 52, cat="gpu_memcpy")
    (only,) = report_on(trace.events).iterations
    assert only.lanes.update == [(28.0, 47.0)] and only.lanes.copies == [(25.0, 34.0), (48.0, 52.0)]
    assert only.lanes.optimizer == [(25.0, 47.0), (48.0, 52.0)]
    assert only.exposed_milliseconds == 0.021


def test_on_a_cpu_ranges_and_operators_are_the_work() -> None:
    trace = Trace()
    trace.call("aten::mm", 0, 10)
    trace.call("aten::empty", 2, 3)
    trace.call("autograd::engine::evaluate_function: MmBackward0", 12, 40)
    trace.call("aten::mm", 13, 39)
    trace.range("tilestep::update", 20, 26)  # in a hook of backward
    trace.call("aten::copy_", 21, 22)
    trace.range("Optimizer.step#AdamW.step", 41, 50)
    trace.range("tilestep::update", 42, 49)
    trace.range("Optimizer.zero_grad#AdamW.zero_grad", 51, 52)
    trace.call("aten::mm", 53, 60)
    trace.call("autograd::engine::evaluate_function: MmBackward0", 60, 70)
    trace.range("Optimizer.step#AdamW.step", 70, 72)
    report = report_on(trace.events)
    assert not report.on_gpu
    first, second = report.iterations
    assert (first.start, first.stop, second.stop) == (0.0, 50.0, 72.0)
    assert first.lanes.forward == [(0.0, 10.0)]
    assert first.lanes.backward == [(12.0, 20.0), (26.0, 40.0)]
    assert first.lanes.update == [(20.0, 26.0), (41.0, 50.0)]
    assert first.lanes.host == [(10.0, 12.0), (40.0, 41.0)]
    assert first.exposed_milliseconds == 0.015
    assert second.lanes.update == [(51.0, 52.0), (70.0, 72.0)] and second.exposed_milliseconds == 0.003


def test_collectives_in_other_threads_are_those_of_who_asked() -> None:
    trace = Trace()
    trace.call("autograd::engine::evaluate_function: MmBackward0", 0, 10)
    trace.call("c10d::allreduce_", 8, 9)
    trace.range("gloo:all_reduce", 9, 14, thread=5)
    trace.range("Optimizer.step#ShardedAdamW.step", 15, 20)
    trace.call("c10d::_allgather_base_", 18, 19)
    trace.range("gloo:all_gather", 19, 30, thread=6)
    trace.call("aten::copy_", 20, 21, thread=6)
    trace.call("aten::mm", 24, 27)
    trace.range("tilestep::iteration", 30, 30)
    (only,) = report_on(trace.events).iterations
    assert only.lanes.communication == [(8.0, 14.0), (18.0, 30.0)]
    assert only.lanes.backward == [(0.0, 8.0), (9.0, 10.0)]
    assert only.lanes.forward == [(24.0, 27.0)]
    assert only.lanes.optimizer == [(15.0, 30.0)]
    assert only.exposed_milliseconds == 0.012


def test_optimizers_that_step_together_end_one_iteration() -> None:
    trace = Trace()
    for start in (0.0, 100.0):
        trace.call("autograd::engine::evaluate_function: MmBackward0", start, start + 50)
        trace.range("Optimizer.step#Muon.step", start + 50, start + 60)
        trace.call("aten::detach", start + 60, start + 61)
        trace.range("Optimizer.step#AdamW.step", start + 70, start + 80)
    assert [iteration.stop for iteration in report_on(trace.events).iterations] == [80.0, 180.0]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing ran"):
        report_on([])


LAUNCHED = re.compile(r"^@triton\.jit\([^@]*?\)\ndef (\w+)", re.MULTILINE)


def test_every_kernel_of_ours_is_known_by_its_name() -> None:
    package = Path(tilestep.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if "triton" in str(path.relative_to(package))]
    sources += [norm_source((torch.bfloat16,), order) for order in Order]
    sources += [scale_source((torch.bfloat16,), limit_on_device=flag) for flag in (True, False)]
    sources.append(decision_source(decide, StepInputs(torch.zeros(1))))
    sources += [triton.source(spec_for(rule, device_type="cuda")) for rule in tilestep.registry.values()]
    names = {name for source in sources for name in LAUNCHED.findall(source)}
    assert {"decide", "combine_parts", "symmetric_tiles", "norm_tiles", "adamw_tile_pass_0", "lamb_finish_0"} <= names
    assert [name for name in sorted(names) if not is_update_kernel(name)] == []


spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=8
)


def moments(intervals: Intervals) -> set[int]:
    """The unit intervals that a set of intervals covers."""
    return {moment for start, stop in intervals for moment in range(int(start), int(stop))}


@given(spans, spans)
def test_intervals_are_sets(one: Intervals, other: Intervals) -> None:
    left, right = union(one), union(other)
    assert moments(left) == moments(one) and length(left) == len(moments(one))
    assert all(before[1] < after[0] for before, after in pairwise(left))
    assert moments(minus(left, right)) == moments(one) - moments(other)
    assert moments(overlap(left, right)) == moments(one) & moments(other)
    assert union(one, other) == union(left, right)
    assert all(covers(left, moment + 0.5) == (moment in moments(one)) for moment in range(50))
