"""Gradients that go to the host as soon as backward has them, and are added up there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..combinations import follow_wrappers, refusal
from ..errors import OffloadError
from ..placements import is_distributed
from ..placements.local import local_part, ready
from ..taken import announce_taker
from .hooks import GradientHooks
from .mirrors import Arrivals, Mirror, Mirrors


class KeptGradients:
    """Takes gradients from parameters while backward runs, without waiting for anything.

    Of a DTensor it is this rank's part, once whoever shards it has reduced it: FSDP2 runs hooks after that, in the
    stream of the reduction. A gradient that is distributed otherwise than its parameter (a partial sum) stays for the
    step, which all ranks take together.
    """

    def __init__(self, mirrors: Mirrors, arrivals: Arrivals) -> None:
        self._mirrors, self._arrivals = mirrors, arrivals
        self._hooks = GradientHooks(self)
        follow_wrappers(self)
        announce_taker(self)

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Take the gradients of these parameters and of no others; they have mirrors."""
        self._hooks.follow(params)
        for param in params:
            # HSDP computes a gradient in one stream and completes it in another.
            self._mirrors[param].is_taken = getattr(getattr(param, "device_mesh", None), "ndim", 1) == 1

    def gradient_came(self, param: torch.Tensor) -> None:
        """Take a gradient from backward; one that a hook of the user's is still to change is left for the step."""
        if self._hooks.is_last(param):
            self.take_gradient(param)

    @torch.no_grad()
    def take_gradient(self, param: torch.Tensor) -> None:
        """Move a parameter's gradient to the host, without waiting, and add it to the one there."""
        mirror = self._mirrors.get(param)
        gradient = None if mirror is None else _part(param)
        if mirror is None or gradient is None or not mirror.takes(gradient):
            return  # the step says what is wrong with it
        if mirror.present:
            self._arrivals.add(mirror, gradient)
        else:
            self._arrivals.begin()
            self._arrivals.send(mirror, gradient)
        param.grad = None

    def holds(self, param: Any) -> bool:
        """Whether it takes a parameter's gradients."""
        return param in self._mirrors

    def wrapped(self, wrapper: torch.nn.Module, kind: str) -> None:
        """Raise, in the constructor of a wrapper that reduces gradients only after they have gone to the host."""
        raise OffloadError(f"what the model is being wrapped in {refusal('offload of gradients', [kind])}")

    taken_by = (
        "offload(gradients=True) has moved them to the host while backward ran: set max_grad_norm on the optimizer, "
        "which clips inside the step"
    )

    @property
    def has_taken_some(self) -> bool:
        """Whether there are gradients on the host."""
        return self.is_there

    def has_taken(self, param: Any) -> bool:
        """Whether a parameter's gradient is on the host, for the coming step."""
        mirror = self._mirrors.get(param)
        return mirror is not None and mirror.present and param.grad is None

    def taken(self, mirror: Mirror, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What a step's kernels read for a parameter: the gradient on the host, with one that is still beside it."""
        if gradient is not None and not mirror.takes(gradient):
            return gradient
        self.take_gradient(mirror.param)
        return mirror.gradient if mirror.present else None

    @property
    def is_there(self) -> bool:
        """Whether there are gradients on the host."""
        return any(mirror.present for mirror in self._mirrors.values())

    def arrived(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with their gradients on the host; the host waits for these."""
        mirrors = [self._mirrors[param] for param in params if param in self._mirrors and self._mirrors[param].present]
        if mirrors:
            self._arrivals.close()
            self._arrivals.wait(mirrors)
        return [(mirror.param, mirror.gradient) for mirror in mirrors]

    @contextmanager
    def as_parameters(self) -> Iterator[list[torch.Tensor]]:
        """A block with tensors on the host whose `grad` is what has arrived there; the host waits for that."""
        leaves = []
        for _, gradient in self.arrived(list(self._mirrors)):
            leaves.append(gradient.detach())
            leaves[-1].grad = gradient
        try:
            yield leaves
        finally:
            for leaf in leaves:
                leaf.grad = None


def _part(param: Any) -> torch.Tensor | None:
    """What of a parameter's gradient lies on this rank; None for one that is distributed otherwise than it."""
    gradient = param.grad
    if gradient is None or is_distributed(gradient) is not is_distributed(param):
        return None
    if not is_distributed(gradient):
        return gradient  # type: ignore[no-any-return]
    if gradient.device_mesh != param.device_mesh or gradient.placements != param.placements:
        return None
    return ready(local_part(gradient))  # type: ignore[no-any-return]
