"""Total norm and clipping of any list of tensors, like torch's functions of the same names."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch

from ..compat import UPDATE, marked, opaque
from ..devices import has_streams
from ..errors import GradientError
from ..placement.local import as_real, resolved
from ..timeline.timeline import refuse_taken
from .plan_cache import Recipe, find_recipe
from .sharded import sharded_norm


@opaque
def total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The p-norm of all tensors as one vector, in two launches per device.

    `torch.nn.utils.get_total_norm`, except that sums are always float32 (float64 for float64 tensors), so bfloat16
    tensors give a float32 norm that does not depend on how they are grouped; and that an empty tensor contributes
    nothing where torch refuses it. Two runs give the same bits. For other subclasses of Tensor than DTensor, and for
    other devices than CUDA and the CPU, torch computes the norm.

    DTensors may have any placements and be on several meshes, mixed with plain tensors. All ranks of the meshes must
    call this with the same list; it takes one all-reduce. A replicated tensor counts once, as do plain tensors.
    Complex tensors count as pairs of reals for p = 2 and 0; for another p torch computes the norm, of moduli.

    Args:
        tensors: one tensor or any iterable of bfloat16, float16, float32, float64, complex64 or complex128 tensors, of
            any shapes, layouts and devices, plain tensors or DTensors.
        norm_type: p: a number, `inf`, `-inf`, or 0, which counts the tensors that hold a nonzero.
        error_if_nonfinite: raise if the norm is infinite or NaN; this waits for the device.
        foreach: passed to torch where torch computes the norm, otherwise ignored.

    Returns:
        Scalar on the first tensor's device: float64 if any tensor is, else float32. Of no tensors, `tensor(0.)`. Of
        DTensors too it is a plain tensor, equal on every rank; it then has the methods `full_tensor()` and `to_local()`
        of torch's, which is a DTensor.

    Raises:
        RuntimeError: for a non-finite norm, with `error_if_nonfinite`.
        GradientError: for a sparse tensor, or one that is not floating-point; for DTensors whose meshes neither hold
            one another nor are slices of one. The text names its place.

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16)])
        tensor(5.)
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else _listed(tensors)
    norm_type = float(norm_type)
    if not listed:
        return torch.tensor(0.0)
    recipe, listed = _readable(listed, norm_type)
    with torch.no_grad(), marked(UPDATE):
        source = sharded_norm(listed) if recipe is None else recipe
        if source is None:
            return torch.nn.utils.get_total_norm(listed, norm_type, error_if_nonfinite, foreach)
        with source.lock:
            norm = source.norm(listed, norm_type)
        if error_if_nonfinite:
            _require_finite(norm, norm_type)
        return norm


@opaque
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of parameters in place so that their norm is at most `max_norm`: three launches per device.

    `torch.nn.utils.clip_grad_norm_`, with the differences of `total_norm`, and gradients are written only where the
    coefficient min(1, max_norm / (norm + 1e-6)) is not 1.

    Args:
        parameters: one tensor or any iterable of tensors; those whose `grad` is None are ignored.
        max_norm: the largest norm allowed. A one-element tensor on the gradients' device is not copied to the host.
        norm_type: p, as for `total_norm`.
        error_if_nonfinite: raise if the norm is infinite or NaN, with gradients unchanged; this waits for the device.
        foreach: as for `total_norm`.

    Returns:
        The norm before scaling, a scalar on the first gradient's device, as from `total_norm`.

    Raises:
        RuntimeError: for a non-finite norm, with `error_if_nonfinite`; for a gradient whose elements share memory.
        GradientError: for a sparse gradient, or one that is not floating-point; the text names the parameter's place;
            for gradients that have been consumed, for example by `overlap(during="backward")`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if isinstance(parameters, torch.Tensor):
        listed = [parameters]
    else:
        listed = _listed(parameters)
        if not listed and isinstance(parameters, types.GeneratorType):
            # `opaque` adds two frames.
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=4)
    gradients = [gradient for parameter in listed if (gradient := parameter.grad) is not None]
    refuse_taken(listed)
    norm_type = float(norm_type)
    if not gradients:
        return torch.tensor(0.0)

    def positions() -> list[int]:
        return [place for place, parameter in enumerate(listed) if parameter.grad is not None]

    recipe, readable = _readable(gradients, norm_type, positions)
    if readable is not gradients:
        for parameter in listed:
            if parameter.grad is not None and parameter.grad.is_complex():
                parameter.grad = resolved(parameter.grad)
        gradients = list(map(as_real, [parameter.grad for parameter in listed if parameter.grad is not None]))
    with torch.no_grad(), marked(UPDATE):
        source = sharded_norm(gradients, positions) if recipe is None else recipe
        if source is None:
            return torch.nn.utils.clip_grad_norm_(listed, float(max_norm), norm_type, error_if_nonfinite, foreach)
        with source.lock:
            norm = source.norm(gradients, norm_type)
            if error_if_nonfinite:
                _require_finite(norm, norm_type)
            source.scale(gradients, norm, max_norm if _on_device(max_norm) else float(max_norm))
        return norm


def _readable(
    tensors: list[torch.Tensor], norm_type: float, positions: Callable[[], Sequence[int]] | None = None
) -> tuple[Recipe | None, list[torch.Tensor]]:
    """The recipe for tensors, and the tensors it reads: complex tensors as pairs of reals if the norm is the same."""
    try:
        return find_recipe(tensors, positions), tensors
    except GradientError:
        # Checked after a failure only: other lists need not pay for the check.
        if not any(tensor.is_complex() for tensor in tensors):
            raise
    tensors = list(map(resolved, tensors))
    if norm_type not in (0.0, 2.0):
        return None, tensors
    tensors = list(map(as_real, tensors))
    return find_recipe(tensors, positions), tensors


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A list of the tensors; a list is not copied, since that touches every tensor."""
    return tensors if type(tensors) is list else list(tensors)


def _on_device(value: float | torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether reading the value would wait for a device."""
    return isinstance(value, torch.Tensor) and has_streams(value.device)


def _require_finite(norm: torch.Tensor, norm_type: float) -> None:
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
