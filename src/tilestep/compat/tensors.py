"""Many tensors in one call: whether they are as they were, copies, zeros."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["addresses_equal", "copy_all", "tensor_guards", "zero_all"]


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
    if together is not None and tensors:
        together(tensors)
    else:
        for tensor in tensors:
            tensor.zero_()
