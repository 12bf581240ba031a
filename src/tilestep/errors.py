"""The errors of tilestep; each message names the parameter, group or source line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(asked: str, names: Iterable[str]) -> str:
    """A question with similar names; empty if there are none.

    Example:
        >>> did_you_mean("weight_decy", ["lr", "betas", "weight_decay"])
        'did you mean weight_decay?'
    """
    spelled = {name.lower(): name for name in sorted(names)}
    close = [name for name in spelled if asked and name.startswith(asked.lower())][:3]
    close = close or difflib.get_close_matches(asked.lower(), spelled, n=3)
    return f"did you mean {' or '.join(spelled[name] for name in close)}?" if close else ""


class TilestepError(Exception):
    """Base class of all errors that tilestep defines.

    Example:
        >>> import tilestep
        >>> issubclass(tilestep.GradientError, tilestep.TilestepError)
        True
    """


class RuleError(TilestepError, TypeError):
    """An update rule cannot be translated: its signature, an operation, or a branch on data.

    The message has the rule's file and line. It is a `TypeError` too.

    Example:
        >>> import torch, tilestep
        >>> @tilestep.rule
        ... def branching(param, grad, *, lr=0.1):
        ...     return param - lr * grad if grad.sum() > 0 else param
        >>> try:
        ...     tilestep.Optimizer([torch.nn.Parameter(torch.ones(2))], branching)
        ... except tilestep.RuleError as error:
        ...     print("branches on" in str(error))
        True
    """


class GradientError(TilestepError, ValueError):
    """A gradient or parameter cannot be updated: sparse, complex, overlapping, or of another shape, dtype or device.

    Nothing is changed when it is raised. It is a `ValueError` too.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2).to_sparse()
        >>> try:
        ...     tilestep.SGD([weight], lr=0.1).step()
        ... except tilestep.GradientError as error:
        ...     print("sparse" in str(error), weight.tolist())
        True [1.0, 1.0]
    """


class MatrixError(RuleError, GradientError):
    """A parameter is not a matrix, and its rule works on matrices only.

    It is a `RuleError` and a `GradientError`. `tilestep.muon_groups` and `tilestep.param_groups` separate matrices from
    other parameters.

    Example:
        >>> import torch, tilestep
        >>> try:
        ...     tilestep.Muon([torch.nn.Parameter(torch.ones(2))])
        ... except tilestep.MatrixError as error:
        ...     print("matri" in str(error))
        True
    """


class StateError(TilestepError, ValueError):
    """A `state_dict` does not fit the optimizer: other shapes, other state buffers, or another rule.

    Nothing is loaded when it is raised. It is a `ValueError` too.

    Example:
        >>> import torch, tilestep
        >>> small, large = (torch.nn.Parameter(torch.ones(size)) for size in (2, 3))
        >>> small.grad = torch.ones(2)
        >>> optimizer = tilestep.AdamW([small])
        >>> optimizer.step()
        >>> try:
        ...     tilestep.AdamW([large]).load_state_dict(optimizer.state_dict())
        ... except tilestep.StateError as error:
        ...     print("exp_avg" in str(error))
        True
    """


class CaptureError(TilestepError, RuntimeError):
    """A step cannot be captured in a CUDA graph, or a captured step no longer fits its optimizer.

    It is a `RuntimeError` too.

    Example:
        >>> import torch, tilestep
        >>> try:
        ...     tilestep.capture(tilestep.AdamW([torch.nn.Parameter(torch.ones(2))]))
        ... except tilestep.CaptureError as error:
        ...     print("on the CPU" in str(error))
        True
    """


class OffloadError(TilestepError, ValueError):
    """The state of an optimizer cannot be in host memory, because of its kind, device or another wrapper.

    It is a `ValueError` too.

    Example:
        >>> import torch, tilestep
        >>> try:
        ...     tilestep.offload(tilestep.AdamW([torch.nn.Parameter(torch.ones(2))]), where="gpu")
        ... except tilestep.OffloadError as error:
        ...     print("CPU" in str(error))
        True
    """


class HostMemoryError(TilestepError, MemoryError):
    """There is not enough host memory; the message has the bytes requested and available.

    Example:
        >>> import tilestep
        >>> issubclass(tilestep.HostMemoryError, MemoryError)
        True
    """


class BuildError(TilestepError, RuntimeError):
    """Generated code could not be compiled or loaded; the message has the compiler's output.

    Example:
        >>> import tilestep
        >>> issubclass(tilestep.BuildError, RuntimeError)
        True
    """


class BuildInterrupted(KeyboardInterrupt):
    """Ctrl-C while a kernel was built; the message has the compiler. The next step builds it again.

    Example:
        >>> issubclass(BuildInterrupted, KeyboardInterrupt)
        True
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type without a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
