"""One norm for several optimizers: all of them clip and skip by the norm of all their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..combinations import refusal
from ..errors import GradientError

if TYPE_CHECKING:
    from .protocol import Optimizer

__all__ = ["JointGradNorm", "joint_norm"]


class JointGradNorm:
    """What optimizers that share a norm have in common; made by `joint_norm`.

    Args:
        optimizers: those that share it.
        group: ranks whose optimizers share it too, or None.
    """

    def __init__(self, optimizers: Sequence[Optimizer], group: Any) -> None:
        self._members = [weakref.ref(optimizer) for optimizer in optimizers]
        self._group = group
        self._total: torch.Tensor | None = None
        self._stepped: set[int] = set()

    def power_sum(self, optimizer: Optimizer) -> torch.Tensor:
        """The sum of squares of all members' gradients, float64[1]; worked out by the first that steps.

        Args:
            optimizer: the member whose step is decided, prepared; of a sharded one that of this rank's pieces.

        Raises:
            GradientError: if some members' gradients carry a loss scale and others' do not.
        """
        if self._total is None or id(optimizer) in self._stepped:
            self._total, self._stepped = self._sum(optimizer), set()
        self._stepped.add(id(optimizer))
        return self._total

    def _sum(self, stepping: Optimizer) -> torch.Tensor:
        members = self._living()
        carries = _carries_scale(stepping)
        # A scaler does not mark optimizers that it has not stepped yet; those that it has unscaled it does.
        others = [each.control.gradients_scaled for each in members if each.schedule.updating(each) is not stepping]
        if any(scaled is not None and scaled != carries for scaled in others):
            raise GradientError(
                "joint_norm: gradients of some of its optimizers carry a loss scale and others' do not: unscale those "
                "of all of them, or of none, before the first steps; nothing was updated"
            )
        total: torch.Tensor | None = None
        for member in members:
            own = member.power_sum(prepared=member.schedule.updating(member) is stepping)
            if own is not None:
                total = own if total is None else total + own.to(total.device, non_blocking=total.is_cuda)
        assert total is not None
        if self._group is not None:
            total = total.clone()
            dist.all_reduce(total, group=self._group)
        return total

    @property
    def skips(self) -> bool:
        """Whether a member skips steps whose gradients are not finite; then all members do."""
        return any(member.control.policy.skips for member in self._living())

    def _living(self) -> list[Optimizer]:
        return [member for member in (reference() for reference in self._members) if member is not None]


def _carries_scale(optimizer: Optimizer) -> bool:
    return bool(optimizer.control.gradients_scaled) or getattr(optimizer, "grad_scale", None) is not None


def joint_norm(optimizers: Sequence[Optimizer], group: Any = None) -> None:
    """Let optimizers clip and skip by one norm: that of all their gradients together.

    The first that steps works it out from the gradients of all; the others use it, until one of them steps again. So
    all gradients must be there when the first one steps, and each optimizer steps once in a round. `max_grad_norm`,
    `skip_above` and `skip_nonfinite` of each compare with this norm, which is what `grad_norm` of each is. If one of
    them skips steps whose gradients are not finite, or a scaler runs the steps, all of them do. Param groups with
    `in_norm=False` are left out.

    Args:
        optimizers: at least two, each in no other joint norm.
        group: a process group over whose ranks the norm goes as well: for the parts of a pipeline, of which each rank
            has its own. All its ranks must step alike.

    Raises:
        ValueError: for fewer optimizers (without a group), one given twice, or one that shares a norm already.
        RuntimeError: for an overlapped one whose backward has updated parameters, before its step.
        TypeError: for an optimizer that is not tilestep's.

    Source: one norm over model parts, as torchtitan's `clip_grad_norm_` over its container of optimizers.

    Example:
        >>> import torch, tilestep
        >>> left, right = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        >>> optimizers = [tilestep.SGD([param], lr=1.0, max_grad_norm=1.0) for param in (left, right)]
        >>> tilestep.joint_norm(optimizers)
        >>> left.grad, right.grad = torch.tensor([3.0]), torch.tensor([4.0])
        >>> for optimizer in optimizers:
        ...     optimizer.step()
        >>> round(left.item(), 4), round(right.item(), 4), optimizers[0].grad_norm.item()
        (-0.6, -0.8, 5.0)
    """
    given = list(optimizers)
    if len(given) < (2 if group is None else 1) or len({id(optimizer) for optimizer in given}) < len(given):
        raise ValueError(f"joint_norm: {len(given)} optimizers; it takes two or more, each once")
    for place, optimizer in enumerate(given):
        if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "power_sum")):
            raise TypeError(f"joint_norm: optimizer {place} is a {type(optimizer).__name__}, not one of tilestep's")
        reason = refusal("joint norm", optimizer.attached)
        if reason:
            raise ValueError(f"joint_norm: optimizer {place}: {reason}")
        for name in optimizer.schedule.applied_groups[:1]:
            raise RuntimeError(
                f"joint_norm: backward has updated {name} of optimizer {place} already: call it before backward, or "
                "after step()"
            )
    joint = JointGradNorm(given, group)
    for optimizer in given:
        optimizer.control.joint = optimizer.schedule.updating(optimizer).control.joint = joint
        optimizer.attach(("joint norm",))
