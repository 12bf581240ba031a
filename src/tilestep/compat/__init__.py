"""Every private API of torch and Triton that tilestep uses, each with what happens when it is not there.

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
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch.profiler import record_function
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# Many tensors in one call: whether they are as they were, copies, zeros.

TensorDispatch = TorchDispatchMode  # base class of the tracer: sees every ATen call


def fake_tensors() -> Any:
    """A mode under which tensors have shapes and dtypes but no data; without it rules are traced on tiny real ones."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return contextlib.nullcontext()
    return _unlogged(FakeTensorMode(allow_non_fake_inputs=True))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and no data, as those have that are made under a `FakeTensorMode`."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)


_active_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def fake_mode_is_active() -> bool:
    """Whether operations give fake tensors just now."""
    if not _active_modes():
        return False
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    # Not by making a tensor to look at: other modes would see it.
    return kind is not None and any(
        isinstance(mode, kind) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


@contextlib.contextmanager
def _unlogged(mode: Any) -> Iterator[None]:
    """A mode that does not tell torch's log of operations that fail in it: their errors say it."""
    log = logging.getLogger(type(mode).__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = was_disabled


def decomposition(overload: Any) -> Callable[..., Any] | None:
    """torch's own rewriting of an ATen operation into simpler ones, or None."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(overload)


def wrapper_tensor(kind: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def is_copy(operation: Any) -> bool:
    """Whether an ATen operation gives the same numbers, maybe elsewhere or in another dtype."""
    aten = torch.ops.aten
    return operation in (aten.detach.default, aten.clone.default, aten._to_copy.default)


def is_empty_like(operation: Any) -> bool:
    """Whether an ATen operation makes memory for a tensor like another, as for a checkpoint that is written later."""
    return operation == torch.ops.aten.new_empty.default


def _public(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream_number: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
"""The current stream of a device as a number, which costs a tenth of what an object costs."""


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that other tensors have the same `description` as these, in one C++ call."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, SystemError):
        expected = [description(tensor) for tensor in tensors]

        def check(*others: Any) -> bool:
            return all(other is not None and description(other) == wanted for other, wanted in zip(others, expected))

        return check


def description(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a kernel must know of a tensor beside its address."""
    subclass = None if type(tensor) in (torch.Tensor, torch.nn.Parameter) else type(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return subclass, tensor.dtype, tensor.device, tensor.layout, tensor.is_nested
    lazy = tensor.is_neg(), tensor.is_conj(), is_zero_tensor(tensor)
    return subclass, tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride(), lazy


version_of: Callable[[Any], int] = operator.attrgetter("_version")
"""How often a tensor has been written to, as autograd counts it."""


is_zero_tensor: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_zerotensor")
"""Whether a tensor is one of autograd's zeros, which have no memory."""


def operation_name(operation: Any) -> str:
    """The name of an operation without its namespace and overload."""
    return str(operation._schema.name.split("::")[-1])


def is_mutable(operation: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


def returns_view(operation: Any) -> bool:
    """Whether the result of an operation shares memory with an argument."""
    return operation._schema.returns[0].alias_info is not None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor can be reached by its address; one without elements needs none."""
    if not tensor.numel():
        return True
    try:
        address, offset = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return False
    # Where a storage has no memory an address is the offset alone.
    return address != 0 and (address != offset or tensor.untyped_storage().data_ptr() != 0)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values: lazy negation and conjugation done, zeros that have no memory made."""
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def addresses_equal(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    """Whether the tensors still begin at these addresses; one C++ call where torch was built with CUDA."""
    if _pointers_equal is not None:
        return _pointers_equal(tensors, addresses, indices)
    return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), addresses))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others; on a GPU in a few launches, without the private call in one for each."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None and targets:
        together(targets, sources)
    else:
        for target, source in zip(targets, sources):
            target.copy_(source)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill tensors with zeros; on a GPU in a few launches, without the private call in one for each."""
    together = getattr(torch, "_foreach_zero_", None)
    # It knows no floating point numbers of 8 bits.
    tensors = [tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8) for tensor in tensors]
    if together is not None and tensors:
        together(tensors)
    else:
        for tensor in tensors:
            tensor.zero_()


# Modules as torch, torch.compile and FSDP2 keep them: look-ups, compiled ones, flat parts.

Given = ParamSpec("Given")
Result = TypeVar("Result")


def opaque(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A Python function as one call that compilers leave alone; compilers are not imported before it is called."""
    lazily = getattr(torch, "_disable_dynamo", None)
    return torch.compiler.disable(function) if lazily is None else lazily(function)


def let_callers_go() -> None:
    """Once in a process, when the first `opaque` function has imported compilers: let go of those that called it."""
    # `torch.fx.wrap`, which that import calls, leaves a frame that refers to itself, and with it to all callers and to
    # their variables. The first optimizer of a process and its model would live until garbage is collected.
    global _callers_are_held
    if not _callers_are_held:
        return
    _callers_are_held = False
    code = getattr(torch.fx.wrap, "__code__", None)
    for frame in [each for each in gc.get_objects() if type(each) is FrameType and each.f_code is code]:
        # One that another thread is running stays.
        with contextlib.suppress(RuntimeError):
            frame.clear()


_callers_are_held = "torch._dynamo" not in sys.modules  # else who has imported them is older than this module


def fsdp_module_type() -> Any | None:
    """The class of modules that FSDP2 shards, or None where it was not imported: then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_flat_part(param: Any) -> bool:
    """Whether a parameter is a flat one of FSDP1 or, with `use_orig_params=True`, a piece of one."""
    return bool(getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False))


def before_gathering(module: Any, prepare: Callable[[list[Any]], None]) -> bool:
    """Have something called before an FSDP2 module's parameters are read to be gathered, whoever asks for that."""
    # Not by a hook on the module's forward: other modules may prefetch its parameters.
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
        attributes = vars(getattr(group, "comm_ctx", None) or object).values()
        streams, gathers = [value for value in attributes if isinstance(value, torch.cuda.Stream)], False
    # One rank alone copies its parameters on the current stream.
    return streams if gathers else [*streams, current]


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


def _name_of_compiled_call(module: torch.nn.Module) -> str:
    return "_compiled_call_impl" if is_compiled(module) else "forward" if uncompiled(module) is not module else ""


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What runs when a compiled module is called; None if it is not compiled, or where torch keeps that elsewhere."""
    return vars(module).get(_name_of_compiled_call(module))


def replace_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Have something else run in its place, outside of what is compiled."""
    setattr(module, _name_of_compiled_call(module), call)


def guard_parameters(module: torch.nn.Module, guard: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Let a module look its parameters up in a dictionary of our own."""
    entries = getattr(module, "_parameters", None)
    if not isinstance(entries, dict):
        return False
    module._parameters = guard(entries)
    return True


def kept_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own parameters as torch keeps them; empty where it keeps none, or does it otherwise."""
    return vars(module).get("_parameters") or {}


def watch_all_forwards(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before every module's forward, of any model; a handle ends that."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    return register_module_forward_pre_hook(before)


def is_being_compiled() -> bool:
    """Whether torch compiles code now, whose guards are for what it has found."""
    context = getattr(torch._guards, "CompileContext", None)
    return context is not None and context.try_get() is not None


def watch_all_parameters(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before any module gets a parameter; a handle ends that, None without such calls."""
    from torch.nn.modules import module as modules

    register = getattr(modules, "register_module_parameter_registration_hook", None)
    return None if register is None else register(lambda module, name, param: before(module, param))


def watch_all_submodules(before: Callable[[torch.nn.Module, Any], None]) -> Any:
    """Have something called before any module gets a submodule; a handle ends that, None without such calls."""
    from torch.nn.modules import module as modules

    register = getattr(modules, "register_module_module_registration_hook", None)
    if register is None:
        return None

    def called(module: torch.nn.Module, name: str, submodule: Any) -> None:
        if submodule is not None:
            before(module, submodule)

    return register(called)


def is_dropping_gradients() -> bool:
    """Whether this is called by `Module.zero_grad`, which goes through parameters and reads none of them."""
    code, frame = torch.nn.Module.zero_grad.__code__, sys._getframe(1)
    for _ in range(10):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# What torch keeps of optimizers, backward passes and profilers: hooks, scalers, functions that clip.

_KEPT = "_post_accumulate_grad_hooks"
_kept_by = operator.attrgetter(_KEPT)


def backward_pass() -> int | None:
    """A number of the backward pass that this is called in; None outside of one, or where torch does not say."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else current()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> bool:
    """Have something called at the end of the backward pass that this is called in."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    # A backward that is compiled as a whole forgets what is queued while its code runs.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        return False
    engine.queue_callback(callback)
    return True


def is_in_another_backward() -> bool:
    """Whether a function's backward began the backward pass that this is called in, as reentrant checkpoints do."""
    calls = getattr(getattr(torch.autograd.function, "BackwardCFunction", None), "apply", None)
    code, frame = getattr(calls, "__code__", None), sys._getframe(1)
    while code is not None and frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def count_gradient_hooks(params: Iterable[torch.Tensor]) -> int:
    """How many hooks for accumulated gradients some parameters have together; each has one at least, or torch does not
    say: then it is 0."""
    try:
        return sum(map(len, map(_kept_by, params)))
    except (AttributeError, TypeError):
        return 0


def is_last_gradient_hook(param: torch.Tensor, handle: Any) -> bool:
    """Whether a gradient hook is called after all others of its parameter; True if torch does not say."""
    hooks = getattr(param, _KEPT, None)
    return not isinstance(hooks, dict) or handle.id not in hooks or next(reversed(hooks)) == handle.id


_profiler_enabled = getattr(torch._C._autograd, "_profiler_enabled", None)

UPDATE = "tilestep::update"
"""What is launched inside is the optimizer's, wherever it runs: in a step, in backward, before a forward."""

HOST_UPDATE = "tilestep::host_update"  # the same for what the host computes itself, though the training may be on a GPU

REPLAY = "tilestep::replay"  # a CUDA graph with a step alone: the optimizer's as well, and the end of an iteration

ITERATION = "tilestep::iteration"  # the end of an iteration where the user says so

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def marked(name: str) -> contextlib.AbstractContextManager[object]:
    """A block whose work carries a name in traces."""
    return record_function(name) if _profiler_enabled is None or _profiler_enabled() else _NOTHING


_watched: list[Callable[[list[Any]], None]] = []
_NAMES = ("_clip_grads_with_norm_", "clip_grad_value_")


def watch_clips(look: Callable[[list[Any]], None]) -> bool:
    """Have something see the parameters whose gradients torch is going to clip; it may raise."""
    if look in _watched:
        return True
    module: Any = sys.modules.get("torch.nn.utils.clip_grad")
    originals = {name: getattr(module, name, None) for name in _NAMES}
    if not all(map(callable, originals.values())):
        return False
    _watched.append(look)
    if len(_watched) == 1:
        for original in originals.values():
            seen = _seen(original)
            for place in (module, torch.nn.utils):
                for key, value in list(vars(place).items()):
                    if value is original:
                        setattr(place, key, seen)
    return True


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        # A generator could be read only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for look in _watched:
            look(listed)
        return original(listed, *args, **kwargs)

    return clip


def load_hooks(optimizer: object) -> tuple[list[Any], list[Any]]:
    """The hooks that torch calls before and after it loads a checkpoint; empty where torch keeps them otherwise."""
    attributes = vars(optimizer)
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    before, after = (list(attributes.get(name, {}).values()) for name in names)
    return before, after


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything listens to an optimizer's steps: hooks, its own or of all optimizers, or a profiler."""
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        recording = _profiler_enabled
        return bool(hooks or _EVERY_PRE_HOOK or _EVERY_POST_HOOK or recording is None or recording())
    except AttributeError:
        return True


def step_is_ordinary() -> bool:
    """Whether nothing is around a step: no profiler, autocast or mode that sees operations."""
    recording = _profiler_enabled
    return not (
        recording is None
        or recording()
        or _active_modes()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being run."""
    # Without a driver the question itself may fail, with the error of an earlier call to the driver: a profiler's.
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_HAS_CUDA = torch.backends.cuda.is_built()
_UNKNOWN = {"": "hooks of all optimizers are kept otherwise"}
_EVERY_PRE_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", _UNKNOWN)
_EVERY_POST_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", _UNKNOWN)


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


_scaled = [0]


def count_scaled_losses() -> int:
    """How often any of torch's scalers has scaled a loss since this was first asked; 0 where torch scales otherwise."""
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


# What tilestep needs of torch's distributed package beyond its public API: DTensors, ranks, checkpoints.


def default_store() -> Any | None:
    """The store in which the processes of the default group have found each other; None where torch does not say."""
    return getattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)()


def root_mesh(mesh: Any) -> Any | None:
    """The device mesh that a mesh is a slice of; None where torch does not say."""
    root = getattr(mesh, "_get_root_mesh", None)
    return None if root is None else root()


def group_device_types(group: Any) -> set[str] | None:
    """Device types whose tensors a process group can reduce; None where torch does not say."""
    devices = getattr(group, "_device_types", None)
    return None if devices is None else {device.type for device in devices}


def gather_together(group: Any, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[bool, Any]:
    """Begin to gather several tensors in one message."""
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        call, options = (
            getattr(group, name, None),
            getattr(torch.distributed.distributed_c10d, "AllgatherOptions", None),
        )
        if call is None or options is None:
            continue
        told = options()
        told.asyncOp = not wholes[0].is_cuda
        return True, call(list(wholes), list(parts), told)
    return False, None


def checkpoint_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """A block of a tensor that lies on several ranks, as torch.distributed.checkpoint asks for it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def checkpoint_items(name: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[tuple[Any, Any]]) -> list[Any]:
    """What a checkpoint is to write of a tensor: one item for each block, given by its offsets and sizes."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for offsets, sizes in chunks:
        data = TensorWriteData(checkpoint_chunk(offsets, sizes), TensorProperties(dtype=dtype), shape)
        items.append(WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
    return items


def distributed_tensor_type() -> Any | None:
    """The class of DTensors, or None where it was not imported yet, which takes a while: then there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


DTENSOR_PARTS = ("_local_tensor", "_spec")  # what a DTensor keeps its local part and its layout in


def dtensors_have_parts() -> bool:
    """Whether DTensors are kept so; else only their public methods are left."""
    return all(hasattr(distributed_tensor_type(), name) for name in DTENSOR_PARTS)


def with_part(whole: Any, part: torch.Tensor) -> Any:
    """A DTensor, which keeps its parts so, with another local part of the same shape."""
    setattr(whole, DTENSOR_PARTS[0], part)
    return whole


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """What of each DTensor lies on this rank; anything else is its own part."""
    kind = distributed_tensor_type()
    # A public `to_local()` costs 50 times more: it is a call of autograd's, and gives another tensor at each call.
    if kind is None or dtensors_have_parts():
        return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def ready(part: Any) -> Any:
    """A tensor once a collective that makes it has run (an `AsyncCollectiveTensor`); the current stream waits for it,
    not the host. Anything else is returned as it is."""
    wait = getattr(part, "wait", None) if type(part) not in (torch.Tensor, torch.nn.Parameter) else None
    return part if wait is None else wait()


def distributed_like(
    part: torch.Tensor, like: Any, shape: torch.Size, stride: Sequence[int], placements: Sequence[Any]
) -> Any:
    """A DTensor around a part that is on another device than its mesh: state on the host of parameters on a GPU."""
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
    return [Layout(spec.device_mesh, spec.placements) if isinstance(spec, kind) else None for spec in tensors]


# Memory that the GPUs of one host read from each other.


class SymmetricMemory:
    """Flat memory of one rank, and what stands for that of the others: torch's symmetric memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            from torch.distributed import _symmetric_memory as symmetric

            self.memory: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=device).zero_()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"this version of torch has no symmetric memory: {error}") from error
        self._rendezvous: Any = symmetric.rendezvous
        self._handle: Any = None
        self._options: dict[str, int] = {}

    def meet_first(self, group: Any) -> None:
        """Find the others' memory; all ranks of the group call it."""
        self._handle = self._rendezvous(self.memory, group.group_name)
        # What a rank that is gone leaves behind ends the others' processes, as NCCL's watchdog does.
        self._options = {"timeout_ms": round(timeout_of(group, self.memory.device).total_seconds() * 1e3)}

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        """Elements of a rank's memory, which copies read."""
        return self._handle.get_buffer(rank, (stop - first,), self.memory.dtype, first)

    def meet(self) -> None:
        """Let what comes next in the current stream wait until all ranks are here in theirs."""
        self._handle.barrier(**self._options)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long a process group waits; what torch takes for NCCL's by itself where it does not say."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that torch has not allocated, as a flat tensor; it is somebody else's to keep.

    Raises:
        RuntimeError: if this version of torch makes no such tensors.
    """
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        raise RuntimeError("this version of torch makes no tensors of memory that is not its own")
    storage = make(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


# Triton: launching a compiled kernel with addresses, compiling several at a time, the hash of its own compiler.

_KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled launcher takes the arguments that `direct_launch` gives it; others go the public way."""


def by_numpy(name: str, *values: Any) -> Any:
    """A function of numpy's, or of Python's `math`, on tensors of Triton's interpreter."""
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
    """Let Triton's interpreter reduce by combining arrays, as a GPU does; by itself it combines number after number."""
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


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], device: torch.device, constants: tuple[Any, ...]
) -> Callable[[tuple[torch.Tensor | float, ...]], bool] | None:
    """What launches a kernel of a known Triton with addresses in place of tensors, or None."""
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
    """Whether a profiler wants to know of launches. Triton keeps a chain of such functions, or None."""
    return hook is not None and bool(getattr(hook, "calls", True))


def compile_together(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    """Let a known Triton compile several kernels at a time into its caches; others do nothing here."""
    import triton

    if threads < 2 or len(compilations) < 2 or not triton.__version__.startswith(_KNOWN_TRITON):
        return
    # Triton notes in a context variable that compilations are put off, and would forget to clear it after some errors.
    with contextlib.suppress(Exception):
        contextvars.copy_context().run(_compile_in_threads, compilations, threads)


def _compile_in_threads(compilations: Sequence[Callable[[], object]], threads: int) -> None:
    import triton

    with (
        ThreadPoolExecutor(threads, thread_name_prefix="tilestep-build") as pool,
        triton.AsyncCompileMode(_Compilers(pool), ignore_errors=True),
    ):
        for compilation in compilations:
            compilation()


class _Compilers:
    """What Triton hands compilations to: behind each it builds the C that launches such kernels, once a signature."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._signatures: set[tuple[object, ...]] = set()

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:
        """Run a compilation in one of the threads."""
        return self._pool.submit(self._compile, compilation)

    def _compile(self, compilation: Callable[[], Any]) -> Any:
        kernel = compilation()
        # Without it, loading the kernel builds it.
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
    """What computes Triton's hash of its compiler, and Triton's folder."""
    try:
        from triton.runtime import cache

        compute = cache.triton_key
        return None if compute.cache_info().currsize else (compute, Path(cache.__file__).parents[1])
    except (ImportError, AttributeError):
        return None


def replace_triton_hash(computed: str) -> None:
    """Let Triton take this for the hash of its compiler."""
    from triton.runtime import cache

    cache.triton_key = functools.lru_cache(lambda: computed)
