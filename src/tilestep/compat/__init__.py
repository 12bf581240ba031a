"""Every private API of torch and Triton that tilestep uses, each with what happens when it is not there.

tests/test_compat.py says which version broke one of them.
"""

from __future__ import annotations

from .absent_gpu import absent_gpu
from .backward import (
    after_backward,
    backward_pass,
    count_gradient_hooks,
    is_in_another_backward,
    is_last_gradient_hook,
)
from .checkpoints import checkpoint_types
from .clipping import watch_clips
from .compiler import opaque
from .dispatch import (
    TensorDispatch,
    decomposition,
    fake_mode_is_active,
    fake_tensors,
    is_copy,
    is_empty_like,
    is_fake,
    wrapper_tensor,
)
from .dtensors import (
    DTENSOR_PARTS,
    distributed_like,
    distributed_tensor_type,
    dtensors_have_parts,
    layouts,
    local_parts,
    ready,
)
from .fsdp import before_gathering, fsdp_module_type, is_flat_part
from .modules import (
    guard_parameters,
    is_compiled,
    is_dropping_gradients,
    uncompiled,
    watch_all_forwards,
    watch_all_parameters,
    watch_all_submodules,
    wrap_compiled_call,
)
from .optimizers import count_scaled_losses, route_unscaling, step_is_ordinary, step_is_watched
from .profiler import profiler_is_running
from .ranks import default_store, gather_together, group_device_types, root_mesh
from .streams import current_stream_number
from .tensors import (
    addresses_equal,
    copy_all,
    description,
    has_memory,
    resolved,
    tensor_guards,
    zero_all,
)
from .triton import compile_together, direct_launch, replace_triton_hash, triton_hash

__all__ = [
    "DTENSOR_PARTS",
    "TensorDispatch",
    "absent_gpu",
    "addresses_equal",
    "after_backward",
    "backward_pass",
    "before_gathering",
    "checkpoint_types",
    "compile_together",
    "copy_all",
    "count_gradient_hooks",
    "count_scaled_losses",
    "current_stream_number",
    "decomposition",
    "default_store",
    "description",
    "direct_launch",
    "distributed_like",
    "distributed_tensor_type",
    "dtensors_have_parts",
    "fake_mode_is_active",
    "fake_tensors",
    "fsdp_module_type",
    "gather_together",
    "group_device_types",
    "guard_parameters",
    "has_memory",
    "is_compiled",
    "is_copy",
    "is_dropping_gradients",
    "is_empty_like",
    "is_fake",
    "is_flat_part",
    "is_in_another_backward",
    "is_last_gradient_hook",
    "layouts",
    "local_parts",
    "opaque",
    "profiler_is_running",
    "ready",
    "replace_triton_hash",
    "resolved",
    "root_mesh",
    "route_unscaling",
    "step_is_ordinary",
    "step_is_watched",
    "tensor_guards",
    "triton_hash",
    "uncompiled",
    "watch_all_forwards",
    "watch_all_parameters",
    "watch_all_submodules",
    "watch_clips",
    "wrapper_tensor",
    "zero_all",
    "wrap_compiled_call",
]
