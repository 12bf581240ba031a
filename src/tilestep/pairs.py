"""Complex tensors as pairs of reals, as torch's optimizers see them: views for kernels, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .errors import GradientError
from .placement.local import local_part

REAL_INSTEAD = (
    "make the module's parameter the pairs of reals, torch.view_as_real of it, and have its forward call "
    "torch.view_as_complex"
)
"""What messages advise where complex parameters are refused."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of a complex tensor in a last dimension of two, a view; a real tensor as it is.

    Example:
        >>> as_real(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
    """
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def as_complex(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A buffer that belongs to what `as_real` makes of a tensor, as one that belongs to the tensor."""
    return torch.view_as_complex(tensor) if like.is_complex() else tensor


def real_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape that `as_real` gives a tensor."""
    return torch.Size((*tensor.shape, 2)) if tensor.is_complex() else tensor.shape


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, of which a complex one's memory holds its values: torch conjugates and negates lazily."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor


class ComplexMembers:
    """The complex ones among an engine's parameters."""

    def __init__(self, labels: Sequence[str], params: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        self._members = [
            (place, label, param, view)
            for place, (label, param, view) in enumerate(zip(labels, params, views))
            if param.is_complex()
        ]

    def __bool__(self) -> bool:
        return bool(self._members)

    def lie_as_before(self) -> bool:
        """Whether the views are still those of their parameters: `param.data = ...` leaves them behind."""
        return all(_place(as_real(local_part(param))) == _place(view) for _, _, param, view in self._members)

    def real_gradients(self, gradients: list[Any]) -> list[Any]:
        """Gradients as kernels read them.

        One that torch conjugates lazily is resolved, and that becomes the parameter's `grad`.
        """
        gradients = list(gradients)
        for place, label, param, _ in self._members:
            gradient = gradients[place]
            if gradient is None:
                continue
            if gradient.dtype is not param.dtype:
                raise GradientError(
                    f"the gradient of {label} has dtype {gradient.dtype}, the parameter has {param.dtype}"
                )
            plain = resolved(gradient)
            if plain is not gradient and param.grad is gradient:
                param.grad = plain
            gradients[place] = as_real(plain)
        return gradients


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
