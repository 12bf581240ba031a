"""Every private torch API that tilestep uses, each with what happens when it is not there.

tests/test_compat.py says which torch version broke one of them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DTENSOR_PARTS",
    "TensorDispatch",
    "TensorWatch",
    "addresses_equal",
    "after_backward",
    "backward_pass",
    "before_gathering",
    "checkpoint_types",
    "decomposition",
    "default_store",
    "distributed_like",
    "distributed_tensor_type",
    "dtensors_have_parts",
    "fake_tensors",
    "fsdp_module_type",
    "group_device_types",
    "guard_parameters",
    "is_compiled",
    "is_copy",
    "layouts",
    "local_parts",
    "profiler_is_running",
    "root_mesh",
    "route_unscaling",
    "step_is_watched",
    "tensor_guards",
    "uncompiled",
    "wrapper_tensor",
    "copy_all",
    "watch_all_forwards",
    "zero_all",
]

TensorDispatch = TorchDispatchMode
"""Base class of the tracer: sees every ATen call."""


def fake_tensors() -> Any:
    """A mode under which tensors have shapes and dtypes but no data; without it rules are traced on tiny real ones."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return contextlib.nullcontext()
    return FakeTensorMode(allow_non_fake_inputs=True)


def decomposition(overload: Any) -> Callable[..., Any] | None:
    """torch's own rewriting of an ATen operation into simpler ones, or None."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(overload)


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that other tensors have the same dtype, device, sizes and strides as these, in one C++ call.

    Falls back to comparing them in Python, about four times slower.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, SystemError):
        expected = [_metadata(tensor) for tensor in tensors]

        def check(*others: Any) -> bool:
            return all(other is not None and _metadata(other) == wanted for other, wanted in zip(others, expected))

        return check


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def profiler_is_running() -> bool:
    """Whether a torch profiler records; True where torch cannot tell, and what it costs to be recorded is paid then.

    Example:
        >>> profiler_is_running()
        False
    """
    return _profiler_enabled is None or _profiler_enabled()


_profiler_enabled = getattr(torch._C._autograd, "_profiler_enabled", None)

_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to know of an optimizer's steps: hooks, its own or of all optimizers, or a profiler.

    Where torch keeps hooks otherwise the answer is yes.
    """
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return bool(hooks or _EVERY_PRE_HOOK or _EVERY_POST_HOOK) or profiler_is_running()
    except AttributeError:
        return True


_UNKNOWN = {"": "hooks of all optimizers are kept otherwise"}
_EVERY_PRE_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", _UNKNOWN)
_EVERY_POST_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", _UNKNOWN)


def addresses_equal(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    """Whether the tensors still begin at these addresses; one C++ call where torch was built with CUDA."""
    if _pointers_equal is not None:
        return _pointers_equal(tensors, addresses, indices)
    return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), addresses))


class TensorWatch:
    """Remembers a list of tensors' metadata and addresses, and tells cheaply whether another list has the same.

    Args:
        tensors: dense tensors on one device.

    Example:
        >>> import torch
        >>> tensors = [torch.zeros(3), torch.zeros(2, 2)]
        >>> watch = TensorWatch(tensors)
        >>> watch.same_metadata(tensors), watch.same_addresses(tensors)
        (True, True)
        >>> watch.same_metadata([torch.zeros(3), torch.zeros(4)])
        False
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check = tensor_guards(tensors) if tensors else lambda: True
        self._indices = list(range(len(tensors)))
        self._module: Any = None
        self._known: Any = None
        self.times_remembered = 0
        """How often addresses were taken as the known ones."""
        self.remember_addresses(tensors)

    def remember_addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take these tensors' addresses as the known ones."""
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.times_remembered += 1
        if self._known is not None:
            self._module.remember(self._known, list(tensors))

    def same_metadata(self, tensors: list[torch.Tensor]) -> bool:
        """Whether dtype, device, sizes and strides of every tensor are the remembered ones."""
        if self._known is not None:
            return self._module.compare(self._known, tensors) != _CHANGED
        same = len(tensors) == len(self._indices) and self._check(*tensors)
        if same and len(tensors) >= _WORTH_NATIVE:
            self._look_natively(tensors)
        return same

    def _look_natively(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on in C++, twice as fast, if that is built and these tensors lie where the remembered ones lay."""
        from . import native  # it is built with what imports this module

        self._module = native.module(len(tensors))
        if self._module is not None and self.same_addresses(list(tensors)):
            self._known = self._module.watch(list(tensors))

    def same_metadata_and_addresses(self, tensors: list[torch.Tensor]) -> tuple[bool, bool]:
        """Both answers by one look where it is a look in C++; elsewhere the second is False, which means unknown."""
        if self._known is not None:
            answer = self._module.compare(self._known, tensors)
            return answer != _CHANGED, answer == _SAME
        return self.same_metadata(tensors), False

    def same_addresses(self, tensors: list[torch.Tensor]) -> bool:
        """Whether every tensor begins where the remembered one began."""
        if self._known is not None:
            return self._module.compare(self._known, tensors) == _SAME
        return addresses_equal(tensors, self.addresses, self._indices)

    def count_writes(self, tensors: list[torch.Tensor]) -> None:
        """Count a version of each of these tensors, as torch does for what is written in place."""
        if self._known is not None:
            self._module.bump_list(tensors)
        else:
            torch.autograd.graph.increment_version(tensors)


_SAME, _CHANGED = 0, 2
"""Answers of the C++ comparison."""

_WORTH_NATIVE = 100
"""Fewer tensors than this are compared in Python as fast."""


def distributed_tensor_type() -> Any | None:
    """The class of DTensors, or None where nobody has imported it yet, which takes a while: then there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


DTENSOR_PARTS = ("_local_tensor", "_spec")
"""What a DTensor keeps its local part and its layout in."""


def dtensors_have_parts() -> bool:
    """Whether DTensors are kept so; else only their public methods are left."""
    return all(hasattr(distributed_tensor_type(), name) for name in DTENSOR_PARTS)


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """What of each DTensor lies on this rank; anything else is its own part.

    A public `to_local()` costs 50 times more: it is a call of autograd's, and gives another tensor at each call.

    Example:
        >>> local_parts([None, 1])
        [None, 1]
    """
    kind = distributed_tensor_type()
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def distributed_like(
    part: torch.Tensor, like: Any, shape: torch.Size, stride: Sequence[int], placements: Sequence[Any]
) -> Any:
    """A DTensor around a part that is on another device than its mesh: state on the host of parameters on a GPU.

    `DTensor.from_local` would move it. Without the private constructor, which FSDP uses for offloaded parameters, the
    part itself is returned: steps work as well, checkpoints of one rank then have its part alone.

    Args:
        part: what lies on this rank.
        like: a DTensor on the mesh.
        shape: of the whole.
        stride: of the whole.
        placements: of the whole.
    """
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
        spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
        kind: Any = distributed_tensor_type()
        return kind(part, spec, requires_grad=False)
    except (ImportError, TypeError):
        return part


class Layout(NamedTuple):
    """How a DTensor is distributed."""

    mesh: Any
    placements: Any


def layouts(tensors: Iterable[Any]) -> list[Any]:
    """The `mesh` and `placements` of each DTensor, in an object that many may share; None for anything else."""
    kind = distributed_tensor_type()
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_spec", None) for tensor in tensors]
    return [Layout(each.device_mesh, each.placements) if isinstance(each, kind) else None for each in tensors]


def default_store() -> Any | None:
    """The store in which the processes of the default group have found each other; None where torch does not say."""
    return getattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)()


def route_unscaling(concerns: Callable[[Any], bool], route: Callable[..., Any]) -> bool:
    """Have torch's scalers call `route` with their method that unscales, and its arguments; whether they do."""
    method = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if method is None or hasattr(method, "__wrapped__"):
        return method is not None

    @functools.wraps(method)
    def routed(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(method, scaler)
        return route(bound, optimizer, *args, **kwargs) if concerns(optimizer) else bound(optimizer, *args, **kwargs)

    torch.amp.GradScaler._unscale_grads_ = routed  # type: ignore[assignment,method-assign]
    return True


def root_mesh(mesh: Any) -> Any | None:
    """The device mesh that a mesh is a slice of; None where torch does not say."""
    root = getattr(mesh, "_get_root_mesh", None)
    return None if root is None else root()


def group_device_types(group: Any) -> set[str] | None:
    """Device types whose tensors a process group can reduce; None where torch does not say."""
    devices = getattr(group, "_device_types", None)
    return None if devices is None else {device.type for device in devices}


def backward_pass() -> int | None:
    """A number of the backward pass that this is called in; None outside of one, or where torch does not say."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else current()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> bool:
    """Have something called at the end of the backward pass that this is called in.

    Returns:
        Whether it is going to be; without torch's engine saying so, nobody can know.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(callback)
    return True


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others; on a GPU in a few launches, without the private call in one for each.

    Example:
        >>> target = torch.zeros(2)
        >>> copy_all([target], [torch.tensor([1.0, 2.0])])
        >>> target
        tensor([1., 2.])
    """
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None and targets:
        together(targets, sources)
    else:
        for target, source in zip(targets, sources):
            target.copy_(source)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill tensors with zeros; on a GPU in a few launches, without the private call in one for each.

    Example:
        >>> values = [torch.ones(2), torch.ones(1)]
        >>> zero_all(values)
        >>> values
        [tensor([0., 0.]), tensor([0.])]
    """
    together = getattr(torch, "_foreach_zero_", None)
    if together is not None and tensors:
        together(tensors)
    else:
        for tensor in tensors:
            tensor.zero_()


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` was given, where this is what came out."""
    try:
        from torch._dynamo.eval_frame import OptimizedModule
    except ImportError:
        return module
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def guard_parameters(module: torch.nn.Module, guard: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Let a module look its parameters up in a dictionary of our own.

    Args:
        module: the module.
        guard: makes that dictionary from the module's.

    Returns:
        Whether it does; without torch keeping them in `_parameters` nothing is changed.
    """
    entries = getattr(module, "_parameters", None)
    if not isinstance(entries, dict):
        return False
    module._parameters = guard(entries)
    return True


def wrapper_tensor(kind: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def is_copy(operation: Any) -> bool:
    """Whether an ATen operation gives the same numbers, maybe elsewhere or in another dtype."""
    aten = torch.ops.aten
    return operation in (aten.detach.default, aten.clone.default, aten._to_copy.default)


class CheckpointTypes:
    """What torch.distributed.checkpoint asks of tensors that lie on several ranks.

    Their classes have not moved since torch 2.1; the methods that ask for them are `__create_write_items__`,
    `__create_chunk_list__` and `__get_tensor_shard__` (torch.distributed._checkpointable). Without these a checkpoint
    refuses such a tensor.
    """

    def chunk(self, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        """A block of a tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def write_items(
        self, name: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """What is to be written of a tensor: one item for each block, given by its offsets and sizes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self.chunk(offsets, sizes), properties=TensorProperties(dtype=dtype), size=shape
                ),
            )
            for offsets, sizes in chunks
        ]


def checkpoint_types() -> CheckpointTypes:
    """The classes that torch.distributed.checkpoint asks for; imported when they are needed, for they take a while."""
    return CheckpointTypes()


def fsdp_module_type() -> Any | None:
    """The class of modules that FSDP2 shards, or None where nobody has imported it: then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def before_gathering(module: Any, prepare: Callable[[list[Any]], None]) -> bool:
    """Have something called before an FSDP2 module's parameters are read to be gathered, whoever asks for that.

    A hook on the module's forward would not do: other modules may prefetch its parameters.

    Args:
        module: the FSDP module.
        prepare: is given the streams that are going to read them; an empty list on a CPU.

    Returns:
        Whether it is going to be; without FSDP2's parameter groups nothing is changed.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    groups = [group for group in groups if group is not None]
    if state is None or not all(callable(getattr(group, "unshard", None)) for group in groups):
        return False
    for group in groups:
        group.unshard = _prepared_unshard(group, group.unshard, prepare)
    return True


def _prepared_unshard(group: Any, unshard: Callable[..., Any], prepare: Callable[[list[Any]], None]) -> Any:
    @functools.wraps(unshard)
    def prepared(async_op: bool = False) -> Any:
        prepare(_gathering_streams(group, async_op))
        return unshard(async_op)

    return prepared


def _gathering_streams(group: Any, async_op: bool) -> list[Any]:
    if getattr(getattr(group, "device", None), "type", "cpu") != "cuda":
        return []
    current = torch.cuda.current_stream(group.device)
    try:
        streams = list(group.comm_ctx.get_all_gather_streams(async_op, group._training_state))
        gathers = group._all_gather_process_group.size() > 1
    except (AttributeError, AssertionError):
        # Before its first forward, or where torch keeps its streams otherwise.
        known = vars(getattr(group, "comm_ctx", None) or object).values()
        streams, gathers = [each for each in known if isinstance(each, torch.cuda.Stream)], False
    # One rank alone copies its parameters on the current stream.
    return streams if gathers else [*streams, current]


def watch_all_forwards(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before every module's forward, of any model; gives a handle to end that."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    return register_module_forward_pre_hook(before)
