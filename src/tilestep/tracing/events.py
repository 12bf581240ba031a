"""Events of a profiler's trace out of the file that it exports, and what work is called in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..marks import HOST_UPDATE, ITERATION, REPLAY, UPDATE

_UPDATE_KERNELS = re.compile(
    # The passes of a rule, the norm, what limits and decides a step, products of matrices, statistics and changes.
    r"\w+_pass_\d+(_\w+)?|\w+_finish_\d+|norm_tiles|norm_finish|scale_tiles|limit_by_\w+|decide|combine_parts"
    r"|symmetric_tiles|sum_up_taps|count_changes|list_changes"
)
_UPDATE_OPERATORS = re.compile(r"aten::(_foreach_|_amp_|_fused_(adam|adamw|adagrad|sgd)_).*")
_COMMUNICATION_KERNELS = re.compile(r".*(nccl|symm_mem|multimem).*", re.IGNORECASE)
_COMMUNICATION_OPERATORS = re.compile(r"(c10d|_c10d_functional|fsdp)::.*")
_COMMUNICATION_RANGES = re.compile(r"(gloo|nccl|mpi|ucc):\w+")
_STEP = re.compile(r"Optimizer\.step#.*")
_UPDATE_RANGES = re.compile(rf"Optimizer\.(step|zero_grad)#.*|{UPDATE}|{HOST_UPDATE}|{REPLAY}")


def is_update_kernel(name: str) -> bool:
    """Whether a GPU kernel is one of ours, wherever it was launched.

    Example:
        >>> is_update_kernel("adamw_tile_pass_0"), is_update_kernel("triton_poi_fused_add_0")
        (True, False)
    """
    return _UPDATE_KERNELS.fullmatch(name) is not None


def is_list_kernel(name: str) -> bool:
    """Whether a GPU kernel is torch's for lists of tensors: outside backward its optimizers', clip's or scaler's."""
    return "multi_tensor_apply_kernel" in name


def is_update_operator(name: str) -> bool:
    """Whether a torch operator is, outside backward, an optimizer's, a clip's or a scaler's."""
    return _UPDATE_OPERATORS.fullmatch(name) is not None


def is_update_range(name: str) -> bool:
    """Whether what runs in a named range is an optimizer's: torch's or ours."""
    return _UPDATE_RANGES.fullmatch(name) is not None


def is_host_update(name: str) -> bool:
    """Whether what runs in a named range is an update that the host computes."""
    return name == HOST_UPDATE


def is_communication_kernel(name: str) -> bool:
    """Whether a GPU kernel sends or receives.

    Example:
        >>> is_communication_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
        True
    """
    return _COMMUNICATION_KERNELS.fullmatch(name) is not None


def is_communication_operator(name: str) -> bool:
    """Whether a torch operator hands data to other ranks, or packs it for them."""
    return _COMMUNICATION_OPERATORS.fullmatch(name) is not None


def is_communication_range(name: str) -> bool:
    """Whether a named range is a collective in a backend's own thread."""
    return _COMMUNICATION_RANGES.fullmatch(name) is not None


def runs_backward(name: str) -> bool:
    """Whether a torch operator is autograd's, running a node of the backward graph."""
    return name.startswith("autograd::engine::evaluate_function")


def is_iteration_mark(name: str) -> bool:
    """Whether a named range is the user's word that an iteration is over."""
    return name == ITERATION


def is_end_of_iteration(name: str) -> bool:
    """Whether an iteration is over after a named range, if the user has not said so."""
    return name == REPLAY or _STEP.fullmatch(name) is not None


@dataclass(frozen=True)
class Call:
    """An operator or a named range on the host."""

    name: str
    start: float  # microseconds
    stop: float  # microseconds
    thread: Any  # of the host
    is_range: bool  # whether it is a named range, not an operator


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on a device."""

    name: str
    start: float  # microseconds, on the host's clock
    stop: float  # microseconds
    is_copy: bool  # whether it copies or fills memory rather than being a kernel
    launched: tuple[Any, float] | None  # thread and moment of the call that launched it; None if the trace has it not


@dataclass(frozen=True)
class Events:
    """What a trace has of host and devices, each in order of time."""

    calls: list[Call]
    works: list[Work]

    @property
    def start(self) -> float:
        """The first moment."""
        return min([call.start for call in self.calls[:1]] + [work.start for work in self.works[:1]], default=0.0)

    @property
    def stop(self) -> float:
        """The last moment."""
        return max([call.stop for call in self.calls] + [work.stop for work in self.works], default=0.0)


_CALLS = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")


def read_events(trace: Iterable[Mapping[str, Any]]) -> Events:
    """Take what counts out of the `traceEvents` of a Chrome trace that `torch.profiler` has exported.

    Example:
        >>> read_events([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "tid": 7}]).calls
        [Call(name='aten::mm', start=1.0, stop=3.0, thread=7, is_range=False)]
    """
    timed = [event for event in trace if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: (event.get("tid"), float(event["ts"]))
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    calls, works = [], []
    for event in timed:
        start = float(event["ts"])
        stop, category, name = start + float(event["dur"]), event.get("cat"), event["name"]
        if category in _CALLS:
            calls.append(Call(name, start, stop, event.get("tid"), category == "user_annotation"))
        elif category == "kernel" or category in _COPIES:
            launched = launches.get(event.get("args", {}).get("correlation"))
            works.append(Work(name, start, stop, category != "kernel", launched))
    return Events(sorted(calls, key=lambda each: each.start), sorted(works, key=lambda each: each.start))
