"""What work is called in a profiler's trace: the only place that knows names of kernels, operators and ranges."""

from __future__ import annotations

import re

from ..marks import HOST_UPDATE, ITERATION, REPLAY, UPDATE

_UPDATE_KERNELS = re.compile(
    # The passes of a rule, the norm, what limits and decides a step, products of matrices.
    r"\w+_pass_\d+(_\w+)?|\w+_finish_\d+|norm_tiles|norm_finish|scale_tiles|limit_by_\w+|decide|combine_parts"
    r"|symmetric_tiles"
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
