"""Every private API of torch and Triton that tilestep uses, each with its fallback.

tests/test_compat.py says which version broke one of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import logging
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch.profiler import record_function
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BuildInterrupted

# Tensors: fake tensors, comparisons, copies and zeros of many tensors in one call.

TensorDispatch = TorchDispatchMode  # base class of the tracer: sees every ATen call


PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors whose memory kernels read as it is


def fake_tensors() -> Any:
    """A mode in which tensors have shapes and dtypes but no data; without it rules are traced on tiny real tensors."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return contextlib.nullcontext()
    return _unlogged(FakeTensorMode(allow_non_fake_inputs=True))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor was made under a `FakeTensorMode`: it has a shape and no data."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)


_active_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def fake_mode_is_active() -> bool:
    """Whether operations currently return fake tensors."""
    if not _active_modes():
        return False
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    # Other modes would see a tensor made for the check.
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return kind is not None and any(isinstance(mode, kind) for mode in modes)


@contextlib.contextmanager
def _unlogged(mode: Any) -> Iterator[None]:
    """A mode without torch's log of failed operations, whose errors have the same text."""
    log = logging.getLogger(type(mode).__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = was_disabled


def decomposition(overload: Any) -> Callable[..., Any] | None:
    """torch's decomposition of an ATen operation, or None."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(overload)


wrapper_tensor = torch.Tensor._make_wrapper_subclass  # makes a tensor of a subclass, without memory


def is_copy(operation: Any) -> bool:
    """Whether an ATen operation copies a tensor, possibly to another device or dtype."""
    aten = torch.ops.aten
    return operation in (aten.detach.default, aten.clone.default, aten._to_copy.default)


def is_empty_like(operation: Any) -> bool:
    """Whether an ATen operation allocates a tensor like another, as asynchronous checkpoints do."""
    return operation == torch.ops.aten.new_empty.default


def _public(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream_number: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
"""The current stream of a device as a number, which costs a tenth of a stream object."""


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check, in one C++ call, whether tensors have the same `description` as these."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, SystemError):
        expected = [description(tensor) for tensor in tensors]

        def check(*others: Any) -> bool:
            return all(other is not None and description(other) == wanted for other, wanted in zip(others, expected))

        return check


def description(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor that kernels depend on, apart from its address."""
    subclass = None if type(tensor) in PLAIN else type(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return subclass, tensor.dtype, tensor.device, tensor.layout, tensor.is_nested
    lazy = tensor.is_neg(), tensor.is_conj(), is_zero_tensor(tensor)
    return subclass, tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride(), lazy


version_of: Callable[[Any], int] = operator.attrgetter("_version")
"""The version of a tensor, which counts in-place writes."""


is_zero_tensor: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_zerotensor")
"""Whether a tensor is a ZeroTensor of autograd, which has no memory."""


def operation_name(operation: Any) -> str:
    """The name of an operation without its namespace and overload."""
    return str(operation._schema.name.split("::")[-1])


is_mutable: Callable[[Any], bool] = operator.attrgetter("_schema.is_mutable")
"""Whether an operation writes to one of its arguments."""


def returns_view(operation: Any) -> bool:
    """Whether the result of an operation shares memory with an argument."""
    return operation._schema.returns[0].alias_info is not None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is empty, or its elements can be read at its address."""
    if not tensor.numel():
        return True
    try:
        address, offset = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return False
    # Without memory the address is the offset in the storage.
    return address != 0 and (address != offset or tensor.untyped_storage().data_ptr() != 0)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with lazy negation, conjugation and zeros materialized."""
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def addresses_equal(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    """Whether the tensors have these addresses; one C++ call if torch was built with CUDA."""
    if _pointers_equal is not None:
        return _pointers_equal(tensors, addresses, indices)
    return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), addresses))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into tensors; on a GPU in a few launches, without the private call in a launch per tensor."""
    if targets:
        getattr(torch, "_foreach_copy_", _copy_each)(targets, sources)


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill tensors with zeros; on a GPU in a few launches, without the private call in a launch per tensor."""
    # The private call does not support float8.
    tensors = [tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8) for tensor in tensors]
    if tensors:
        getattr(torch, "_foreach_zero_", lambda each: [tensor.zero_() for tensor in each])(tensors)


# Modules: their parameters and hooks, compiled modules, FSDP.

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def opaque(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make torch.compile skip a function; the compiler is imported at the first call."""
    lazily = getattr(torch, "_disable_dynamo", None)
    return torch.compiler.disable(function) if lazily is None else lazily(function)


def clear_dynamo_frames() -> None:
    """Free the frames of callers, once per process, after the first `opaque` function has imported the compiler."""
    # The import calls `torch.fx.wrap`, whose frame refers to itself, and so to all callers and their variables: the
    # first optimizer of a process and its model would live until the next garbage collection.
    global _callers_are_held
    if not _callers_are_held:
        return
    _callers_are_held = False
    code = getattr(torch.fx.wrap, "__code__", None)
    for frame in [held for held in gc.get_objects() if type(held) is FrameType and held.f_code is code]:
        # A frame that runs in another thread stays.
        with contextlib.suppress(RuntimeError):
            frame.clear()


_callers_are_held = "torch._dynamo" not in sys.modules  # otherwise it was imported before this module


def fsdp_module_type() -> Any | None:
    """The class of modules that FSDP2 shards; None if FSDP2 was not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_flat_part(param: Any) -> bool:
    """Whether a parameter is a flat parameter of FSDP1, or a piece of it with `use_orig_params=True`."""
    return bool(getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False))


def before_gathering(module: Any, prepare: Callable[[list[Any]], None]) -> bool:
    """Call `prepare` before each gather of an FSDP2 module's parameters. Returns whether torch lets us."""
    # A forward hook would miss other modules that prefetch the parameters.
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
        # Before the first forward, or in a torch with other attributes.
        attributes = vars(getattr(group, "comm_ctx", None) or object).values()
        streams, gathers = [value for value in attributes if isinstance(value, torch.cuda.Stream)], False
    # A single rank copies its parameters on the current stream.
    return streams if gathers else [*streams, current]


def uncompiled(module: Any) -> Any:
    """The module inside the result of `torch.compile`; any other module itself."""
    try:
        from torch._dynamo.eval_frame import OptimizedModule
    except ImportError:
        return module
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _name_of_compiled_call(module: torch.nn.Module) -> str:
    return "_compiled_call_impl" if is_compiled(module) else "forward" if uncompiled(module) is not module else ""


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function that a compiled module calls; None if it is not compiled, or in a torch with other attributes."""
    return vars(module).get(_name_of_compiled_call(module))


def replace_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Replace the function that a compiled module calls."""
    setattr(module, _name_of_compiled_call(module), call)


def guard_parameters(module: torch.nn.Module, guard: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Replace the dictionary in which a module looks its parameters up."""
    entries = getattr(module, "_parameters", None)
    if not isinstance(entries, dict):
        return False
    module._parameters = guard(entries)
    return True


def kept_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """The dictionary of a module's own parameters; empty if it has none, or in a torch with other attributes."""
    return vars(module).get("_parameters") or {}


def is_being_compiled() -> bool:
    """Whether torch is compiling code, with guards on the current state."""
    context = getattr(torch._guards, "CompileContext", None)
    return context is not None and context.try_get() is not None


def is_dropping_gradients() -> bool:
    """Whether `Module.zero_grad`, which reads no values of parameters, is among the callers."""
    code, frame = torch.nn.Module.zero_grad.__code__, sys._getframe(1)
    for _ in range(10):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# Backward passes, hooks, profilers, scalers, and torch's functions that clip.

_KEPT = "_post_accumulate_grad_hooks"
_kept_by = operator.attrgetter(_KEPT)


def backward_pass() -> int | None:
    """The number of the current backward pass; None outside of backward, or if unknown."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else current()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> bool:
    """Call a function at the end of the current backward pass. Returns whether torch lets us."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    # A backward compiled as one graph drops callbacks queued while it runs.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        return False
    engine.queue_callback(callback)
    return True


def is_in_another_backward() -> bool:
    """Whether the current backward pass is nested in a backward, as with reentrant checkpoints."""
    calls = getattr(getattr(torch.autograd.function, "BackwardCFunction", None), "apply", None)
    code, frame = getattr(calls, "__code__", None), sys._getframe(1)
    while code is not None and frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def count_gradient_hooks(params: Iterable[torch.Tensor]) -> int:
    """The number of hooks for accumulated gradients; each parameter must have a hook. 0 if unknown."""
    try:
        return sum(map(len, map(_kept_by, params)))
    except (AttributeError, TypeError):
        return 0


def is_last_gradient_hook(param: torch.Tensor, handle: Any) -> bool:
    """Whether a gradient hook is the last of its parameter; True if unknown."""
    hooks = getattr(param, _KEPT, None)
    return not isinstance(hooks, dict) or handle.id not in hooks or next(reversed(hooks)) == handle.id


_profiler_enabled = getattr(torch._C._autograd, "_profiler_enabled", None)

UPDATE = "tilestep::update"
"""Range of the optimizer's work in traces: in a step, in backward, or before a forward."""

HOST_UPDATE = "tilestep::host_update"  # updates computed by the host

REPLAY = "tilestep::replay"  # a replay of a step's CUDA graph: optimizer's work, and the end of an iteration

ITERATION = "tilestep::iteration"  # the end of an iteration, marked by the user

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def marked(name: str) -> contextlib.AbstractContextManager[object]:
    """A context that names its work in traces."""
    return record_function(name) if _profiler_enabled is None or _profiler_enabled() else _NOTHING


_watchers: list[Callable[[list[Any]], None]] = []
_NAMES = ("_clip_grads_with_norm_", "clip_grad_value_")


def watch_clips(watcher: Callable[[list[Any]], None]) -> bool:
    """Call a function, which may raise, with parameters before torch clips. Returns whether torch lets us."""
    if watcher in _watchers:
        return True
    module: Any = sys.modules.get("torch.nn.utils.clip_grad")
    originals = {name: getattr(module, name, None) for name in _NAMES}
    if not all(map(callable, originals.values())):
        return False
    _watchers.append(watcher)
    if len(_watchers) == 1:
        for original in originals.values():
            watched = _with_watchers(original)
            for place in (module, torch.nn.utils):
                for key, value in list(vars(place).items()):
                    if value is original:
                        setattr(place, key, watched)
    return True


def _with_watchers(original: Any) -> Any:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        # A generator can be consumed only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for watcher in _watchers:
            watcher(listed)
        return original(listed, *args, **kwargs)

    return clip


def load_hooks(optimizer: object) -> tuple[list[Any], list[Any]]:
    """The hooks before and after a checkpoint is loaded; empty in a torch with other attributes."""
    attributes = vars(optimizer)
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    before, after = (list(attributes.get(name, {}).values()) for name in names)
    return before, after


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of this or of all optimizers, or a profiler, observe the steps of an optimizer."""
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        watched = hooks or _EVERY_PRE_HOOK or _EVERY_POST_HOOK
        return bool(watched or _profiler_enabled is None or _profiler_enabled())
    except AttributeError:
        return True


def step_is_ordinary() -> bool:
    """Whether no profiler, autocast or dispatch mode is active."""
    return not (
        _profiler_enabled is None
        or _profiler_enabled()
        or _active_modes()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def is_capturing() -> bool:
    """Whether launches are being captured into a CUDA graph."""
    # Without a driver the call may raise the error of an earlier call, such as a profiler's.
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_HAS_CUDA = torch.backends.cuda.is_built()
_UNKNOWN = {"": "hooks of all optimizers are kept otherwise"}
_EVERY_PRE_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", _UNKNOWN)
_EVERY_POST_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", _UNKNOWN)


def route_unscaling(handles: Callable[[Any], bool], route: Callable[..., Any]) -> bool:
    """Call `route` with the unscaling method of torch's scalers, and its arguments. Returns whether torch lets us."""
    method = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if method is None or hasattr(method, "__wrapped__"):
        return method is not None

    @functools.wraps(method)
    def routed(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(method, scaler)
        return route(bound, optimizer, *args, **kwargs) if handles(optimizer) else bound(optimizer, *args, **kwargs)

    torch.amp.GradScaler._unscale_grads_ = routed  # type: ignore[assignment,method-assign]
    return True


_scaled = [0]


def count_scaled_losses() -> int:
    """The number of losses that torch's scalers have scaled since the first call of this function; 0 if unknown."""
    method = getattr(torch.amp.GradScaler, "scale", None)
    if method is None or hasattr(method, "__wrapped__"):
        return _scaled[0]

    @functools.wraps(method)
    def scale(scaler: Any, outputs: Any) -> Any:
        if not torch.compiler.is_compiling() and scaler.is_enabled():
            _scaled[0] += 1
        return method(scaler, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[assignment,method-assign]
    return _scaled[0]


# torch.distributed: process groups, DTensors, checkpoints.


def root_mesh(mesh: Any) -> Any | None:
    """The root of a sliced device mesh; None if unknown."""
    root = getattr(mesh, "_get_root_mesh", None)
    return None if root is None else root()


def group_device_types(group: Any) -> set[str] | None:
    """Device types whose tensors a process group can reduce; None if unknown."""
    devices = getattr(group, "_device_types", None)
    return None if devices is None else {device.type for device in devices}


def gather_together(group: Any, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[bool, Any]:
    """Start an all-gather of several tensors in one message; returns whether torch can, and the work to wait for."""
    names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    call = next((getattr(group, name) for name in names if hasattr(group, name)), None)
    options = getattr(torch.distributed.distributed_c10d, "AllgatherOptions", None)
    if call is None or options is None:
        return False, None
    gather_options = options()
    gather_options.asyncOp = not wholes[0].is_cuda
    return True, call(list(wholes), list(parts), gather_options)


def checkpoint_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """A block of a sharded tensor, for torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def checkpoint_items(name: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The write items of a sharded tensor: one per block, given by offsets and sizes."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for offsets, sizes in chunks:
        data = TensorWriteData(checkpoint_chunk(offsets, sizes), TensorProperties(dtype=dtype), shape)
        items.append(WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
    return items


def distributed_tensor_type() -> Any | None:
    """The class of DTensors; None if it was not imported: importing it is slow."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


DTENSOR_PARTS = ("_local_tensor", "_spec")  # the attributes of a DTensor's local part and layout


def dtensors_have_parts() -> bool:
    """Whether DTensors have these attributes; otherwise public methods are used."""
    return all(hasattr(distributed_tensor_type(), name) for name in DTENSOR_PARTS)


def with_part(tensor: Any, part: torch.Tensor) -> Any:
    """Replace the local part of a DTensor by a tensor of the same shape; returns the DTensor."""
    setattr(tensor, DTENSOR_PARTS[0], part)
    return tensor


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """The local parts of DTensors; other tensors unchanged."""
    kind = distributed_tensor_type()
    # The public `to_local()` costs 50 times as much: it uses autograd, and returns a new tensor per call.
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def ready(part: Any) -> Any:
    """The result of an `AsyncCollectiveTensor`, for which the current stream waits; other tensors unchanged."""
    wait = getattr(part, "wait", None) if type(part) not in PLAIN else None
    return part if wait is None else wait()


def distributed_like(
    part: torch.Tensor, like: Any, shape: torch.Size, stride: Sequence[int], placements: Sequence[Any]
) -> Any:
    """A DTensor whose local part is not on its mesh's device, for states on the host of parameters on a GPU."""
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
        spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
        kind: Any = distributed_tensor_type()
        return kind(part, spec, requires_grad=False)
    except (ImportError, TypeError):
        return part


def layouts(tensors: Iterable[Any]) -> list[Any]:
    """For each DTensor an object with its `mesh` and `placements`, possibly shared; None for other tensors."""
    kind = distributed_tensor_type()
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_spec", None) for tensor in tensors]
    return [
        SimpleNamespace(mesh=tensor.device_mesh, placements=tensor.placements) if isinstance(tensor, kind) else None
        for tensor in tensors
    ]


# Memory of other GPUs, and memory that torch has not allocated.


class SymmetricMemory:
    """Flat memory of one rank with views of the other ranks' memory: torch's symmetric memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            from torch.distributed import _symmetric_memory as symmetric

            self.memory: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=device).zero_()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"this version of torch has no symmetric memory: {error}") from error
        self._rendezvous: Any = symmetric.rendezvous
        self._handle: Any = None
        self._options: dict[str, int] = {}

    def rendezvous(self, group: Any) -> None:
        """Exchange handles of memory; all ranks of the group must call it."""
        self._handle = self._rendezvous(self.memory, group.group_name)
        # If a rank is gone, the timeout ends the other processes, as NCCL's watchdog does.
        self._options = {"timeout_ms": round(timeout_of(group, self.memory.device).total_seconds() * 1e3)}

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        """Elements of a rank's memory, as a tensor to copy from."""
        return self._handle.get_buffer(rank, (stop - first,), self.memory.dtype, first)

    def barrier(self) -> None:
        """Barrier on the current streams of all ranks."""
        self._handle.barrier(**self._options)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """The timeout of a process group; torch's default for NCCL if unknown."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of memory that torch has not allocated; the caller keeps the memory alive.

    Raises:
        RuntimeError: if this version of torch cannot make such tensors.
    """
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        raise RuntimeError("this version of torch cannot create tensors in memory that it has not allocated")
    storage = make(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


# Triton: launches with addresses, parallel compilation, the hash of its compiler.

_KNOWN_TRITON = ("3.6.",)
"""Triton versions whose launcher has the arguments of `direct_launch`; other versions use the public API."""


def by_numpy(name: str, *values: Any) -> Any:
    """Call a function of numpy or `math` on tensors of Triton's interpreter."""
    from triton.language import tensor
    from triton.runtime.interpreter import TensorHandle

    arrays = [value.handle.data for value in values]
    function = getattr(np, name, None) or np.vectorize(_MATH[name], otypes=[arrays[0].dtype])
    with np.errstate(all="ignore"):
        result = np.asarray(function(*arrays)).astype(arrays[0].dtype)
    return tensor(TensorHandle(result, values[0].handle.dtype), values[0].type)


class NumpyDevice:
    """The functions of Triton's device library, for its interpreter."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(by_numpy, _NUMPY_NAMES.get(name, name))


_NUMPY_NAMES = {
    **{name: f"arc{name[1:]}" for name in ("acos", "asin", "atan", "acosh", "asinh", "atanh", "atan2")},
    "nearbyint": "rint",
    "pow": "power",
}

_MATH = {
    "erfc": math.erfc,
    "rsqrt": lambda number: math.inf if number == 0 else math.nan if number < 0 else 1 / math.sqrt(number),
    "lgamma": lambda number: math.inf if number <= 0 and number % 1 == 0 else math.lgamma(number),
}


def reduce_by_halves() -> None:
    """Make Triton's interpreter reduce by combining halves of arrays, as a GPU does."""
    from triton.runtime import interpreter

    def generic_reduce(self: Any, operands: tuple[Any, ...]) -> list[Any]:
        operands, axis = self.unravel(operands, self.axis)
        arrays = [operand.handle.data for operand in operands]
        dimensions = arrays[0].ndim
        while (count := arrays[0].shape[axis]) > 1:
            parts = [np.split(array, [count // 2, count // 2 * 2], axis) for array in arrays]
            halves = [
                self.to_tensor(part[place], operand.dtype) for place in (0, 1) for part, operand in zip(parts, operands)
            ]
            combined = self.combine_fn.fn(*halves)
            values = combined if isinstance(combined, tuple) else (combined,)
            arrays = [np.concatenate([value.handle.data, part[2]], axis) for value, part in zip(values, parts)]
        if not self.keep_dims:
            arrays = [array.squeeze(axis) for array in arrays]
        elif self.axis is None:
            arrays = [array.reshape((1,) * dimensions) for array in arrays]
        return [self.to_tensor(array, operand.dtype) for array, operand in zip(arrays, operands)]

    if hasattr(getattr(interpreter, "ReduceOps", None), "generic_reduce"):
        interpreter.ReduceOps.generic_reduce = generic_reduce


def splat_truths() -> None:
    """Make Triton's interpreter splat a comparison of scalars as booleans; Triton 3.9 requires this for masks."""
    # The interpreter splats in the operands' integer type. On a GPU the comparison has the type int1.
    from triton.runtime import interpreter

    builder: Any = getattr(interpreter, "InterpreterBuilder", None)
    splat = getattr(builder, "create_splat", None)
    if splat is None:
        return

    def create_splat(self: Any, block_type: Any, scalar: Any) -> Any:
        block = splat(self, block_type, scalar)
        is_truth = scalar.data.dtype == np.bool_
        return interpreter.TensorHandle(block.data.astype(np.bool_), block.dtype) if is_truth else block

    builder.create_splat = create_splat


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], device: torch.device, constants: tuple[Any, ...]
) -> Callable[[tuple[torch.Tensor | float, ...]], bool] | None:
    """A function that launches a compiled kernel with addresses in place of tensors; None for untested versions."""
    import triton
    from triton import knobs
    from triton.runtime import driver

    launcher: Any = getattr(compiled, "run", None)
    sizes = [getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    if not triton.__version__.startswith(_KNOWN_TRITON) or any(sizes):
        return None
    launch, current_stream, runtime = launcher.launch, driver.active.get_current_stream, knobs.runtime
    behind_stream = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    before_arguments = (*behind_stream, compiled.packed_metadata, None, None, None)

    def direct(arguments: tuple[torch.Tensor | float, ...]) -> bool:
        if _is_hooked(runtime.launch_enter_hook) or _is_hooked(runtime.launch_exit_hook):
            return False
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        index = torch.cuda.current_device() if device.index is None else device.index
        launch(*grid, current_stream(index), *before_arguments, *values, *constants)
        return True

    return direct


def _is_hooked(hook: Any) -> bool:
    """Whether a profiler hooks launches; the hook is a chain of functions, or None."""
    return hook is not None and bool(getattr(hook, "calls", True))


def compile_together(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    """Compile kernels in parallel into Triton's caches; does nothing with untested versions."""
    import triton

    if threads < 2 or len(compilations) < 2 or not triton.__version__.startswith(_KNOWN_TRITON):
        return
    # Triton sets a context variable for deferred compilations, and does not reset it after some errors.
    with contextlib.suppress(Exception):
        contextvars.copy_context().run(_compile_in_threads, compilations, threads)


def _compile_in_threads(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    import triton

    pool = ThreadPoolExecutor(threads, thread_name_prefix="tilestep-build")
    mode = triton.AsyncCompileMode(_Compilers(pool), ignore_errors=True)
    waits = True
    try:
        # Not `with`, which would wait for all kernels after Ctrl-C. The context variable is set in a copy.
        mode.__enter__()
        for compilation in compilations:
            compilation()
        mode.__exit__(None, None, None)
    except KeyboardInterrupt:
        waits = False  # the interpreter joins the threads at exit
        raise BuildInterrupted(f"while Triton built {len(compilations)} kernels") from None
    finally:
        pool.shutdown(wait=waits, cancel_futures=not waits)


class _Compilers:
    """Triton's executor: compiles kernels, and builds the C code that launches them once per signature."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._signatures: set[tuple[object, ...]] = set()

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:
        """Run a compilation in one of the threads."""
        return self._pool.submit(self._compile, compilation)

    def _compile(self, compilation: Callable[[], Any]) -> Any:
        kernel = compilation()
        # If it fails, the launcher is built when the kernel is loaded.
        with contextlib.suppress(Exception):
            self._build_launcher(kernel)
        return kernel

    def _build_launcher(self, kernel: Any) -> None:
        from triton.runtime import driver

        signature = tuple(kernel.src.signature.values())
        with self._lock:
            if signature in self._signatures:
                return
            self._signatures.add(signature)
        driver.active.launcher_cls(kernel.src, kernel.metadata)


def triton_hash() -> tuple[Callable[[], str], Path] | None:
    """The function that computes Triton's hash of its compiler, and Triton's folder; None if computed already."""
    try:
        from triton.runtime import cache

        compute = cache.triton_key
        if compute.cache_info().currsize:
            return None
        return functools.partial(_compute_during_driver_build, compute), Path(cache.__file__).parents[1]
    except (ImportError, AttributeError):
        return None


def _compute_during_driver_build(compute: Callable[[], str]) -> str:
    """Compute the hash while Triton builds its driver's C code; errors of the build recur when the driver is used."""
    from triton.runtime import driver

    with ThreadPoolExecutor(1) as pool:
        pool.submit(getattr, driver, "active")
        return compute()


def replace_triton_hash(computed: str) -> None:
    """Set Triton's hash of its compiler."""
    from triton.runtime import cache

    cache.triton_key = functools.lru_cache(lambda: computed)
