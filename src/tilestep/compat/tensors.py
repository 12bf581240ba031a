"""Many tensors in one call: whether they are as they were, copies, zeros."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

TensorDispatch = TorchDispatchMode
"""Base class of the tracer: sees every ATen call."""


def fake_tensors() -> Any:
    """A mode under which tensors have shapes and dtypes but no data; without it rules are traced on tiny real ones."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return contextlib.nullcontext()
    return _unlogged(FakeTensorMode(allow_non_fake_inputs=True))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and no data, as those have that are made under a `FakeTensorMode`.

    Example:
        >>> is_fake(torch.zeros(2))
        False
    """
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)


_active_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def fake_mode_is_active() -> bool:
    """Whether operations give fake tensors just now.

    Example:
        >>> fake_mode_is_active()
        False
    """
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
    """A check that other tensors have the same `description` as these, in one C++ call.

    It also compares their types and `requires_grad`. Falls back to comparing descriptions in Python, about four times
    slower.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, SystemError):
        expected = [description(tensor) for tensor in tensors]

        def check(*others: Any) -> bool:
            return all(other is not None and description(other) == wanted for other, wanted in zip(others, expected))

        return check


def description(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a kernel must know of a tensor beside its address.

    Example:
        >>> description(torch.zeros(2)) == description(torch.zeros(2)[:, None].t()[0])
        True
    """
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
    """The name of an operation without its namespace and overload.

    Example:
        >>> operation_name(torch.ops.aten.add_.Tensor)
        'add_'
    """
    return str(operation._schema.name.split("::")[-1])


def is_mutable(operation: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


def returns_view(operation: Any) -> bool:
    """Whether the result of an operation shares memory with an argument."""
    return operation._schema.returns[0].alias_info is not None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor can be reached by its address; one without elements needs none.

    Example:
        >>> tensor = torch.zeros(4)[1:]
        >>> has_memory(tensor), has_memory(torch.zeros(4, device="meta")), has_memory(torch.zeros(0))
        (True, False, True)
        >>> _ = tensor.untyped_storage().resize_(0)
        >>> has_memory(tensor)
        False
    """
    if not tensor.numel():
        return True
    try:
        address, offset = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return False
    # Where a storage has no memory an address is the offset alone.
    return address != 0 and (address != offset or tensor.untyped_storage().data_ptr() != 0)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values: lazy negation and conjugation done, zeros that have no memory made.

    Example:
        >>> resolved(torch._neg_view(torch.ones(2))).is_neg(), resolved(torch._efficientzerotensor(2))
        (False, tensor([0., 0.]))
    """
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
    # It knows no floating point numbers of 8 bits.
    tensors = [tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8) for tensor in tensors]
    if together is not None and tensors:
        together(tensors)
    else:
        for tensor in tensors:
            tensor.zero_()
