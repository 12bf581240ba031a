"""`GradScaler`: torch's scaler, with the overflow check, the unscaling and the norm inside the optimizer's passes."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .compat import is_capturing, opaque
from .devices import is_host
from .optimizer import Optimizer
from .runtime.capturing import require


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` without a separate pass over the gradients of tilestep's optimizers.

    `step` finds overflows in the norm pass of the optimizer, which also clips if asked to, and the update pass divides
    by the scale; the scale itself is updated as in torch. Nothing is read by the host. Everything else, other
    optimizers and the explicit `unscale_` included, is torch's; `state_dict` is interchangeable.

    After `step`, gradients are unscaled but not clipped; a skipped step does not change them, as with torch's fused
    optimizers.

    Args:
        device: device type of the losses, "cuda" or "cpu".
        init_scale: first loss scale.
        growth_factor: the factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: the factor of the scale after an overflow.
        growth_interval: steps without an overflow between increases of the scale.
        enabled: if False, every method does nothing but `step`, which is the optimizer's own.

    Raises:
        ValueError: for a scale that is not positive and finite.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = tilestep.SGD([weight], lr=0.5)
        >>> scaler = tilestep.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.tolist(), weight.grad.tolist(), optimizer.grad_norm
        ([0.5, 0.5], [1.0, 1.0], tensor(1.4142))
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled:
            _check_scale(init_scale)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers stepped or unscaled with this scaler

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale, as torch does.

        Args:
            outputs: a tensor, or an iterable of tensors.

        Returns:
            The same, scaled.

        Raises:
            CaptureError: at its first use inside a CUDA graph.

        Example:
            >>> import torch, tilestep
            >>> scaler = tilestep.GradScaler("cpu", init_scale=4.0)
            >>> scaler.scale(torch.tensor(2.0))
            tensor(8.)
        """
        if self._enabled and torch.compiler.is_dynamo_compiling():
            return _opaque_call("scale", self, outputs)
        if self._enabled and self._scale is None:
            require(not is_capturing(), "it contains the scaler's first use; every replay would set the first scale")
        scaled = super().scale(outputs)
        if self._enabled:
            for optimizer in self._seen:
                if self._stage(optimizer) is OptState.READY:
                    optimizer.control.gradients_scaled = True
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, as torch does, in a separate pass.

        Not needed before `step` with `max_grad_norm`: the step compares the norm of the unscaled gradients anyway.

        Args:
            optimizer: the optimizer.

        Raises:
            RuntimeError: if it was called already since the last `update`, or after `step`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer, scaler = tilestep.SGD([weight], lr=0.5), tilestep.GradScaler("cpu", init_scale=4.0)
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.unscale_(optimizer)
            >>> weight.grad
            tensor([1., 1.])
        """
        if self._enabled and torch.compiler.is_dynamo_compiling():
            return _opaque_call("unscale_", self, optimizer)
        super().unscale_(optimizer)
        if self._enabled and isinstance(optimizer, Optimizer):
            self._seen.add(optimizer)
            optimizer.control.gradients_scaled = False

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Optimizer):
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        return optimizer.execution.unscale(optimizer, super()._unscale_grads_, *args, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with the unscaled gradients; with an overflow nothing but the scale will change.

        Args:
            optimizer: the optimizer.
            args: passed to its `step`.
            kwargs: passed to its `step`.

        Returns:
            The result of its `step`.

        Raises:
            RuntimeError: if it was called already since the last `update`, or with a closure.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer, scaler = tilestep.SGD([weight], lr=0.5), tilestep.GradScaler("cpu", init_scale=4.0)
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.step(optimizer)
            >>> weight.tolist()
            [0.5, 0.5]
        """
        if not self._enabled or not isinstance(optimizer, Optimizer):
            return super().step(optimizer, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _opaque_call("step", self, optimizer, *args, **kwargs)
        closure = kwargs.pop("closure", None)
        if closure is not None or any(value is not None for value in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._seen.add(optimizer)
        if self._stage(optimizer) is OptState.READY and self._scale is not None:
            result = self._step_unscaling(optimizer, **kwargs)
        else:
            result = super().step(optimizer, **kwargs)
        optimizer.control.gradients_scaled = False
        return result

    def _step_unscaling(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Run a step that divides by the scale and decides on the device whether it is skipped."""
        scale = self._scale
        own = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = scale if own is None else scale * own  # type: ignore[attr-defined]
        optimizer.control.checks_overflow = True
        try:
            result = optimizer.step(**kwargs)
        finally:
            if hasattr(optimizer, "grad_scale"):  # an error in the step removes it
                del optimizer.grad_scale
            optimizer.control.checks_overflow = False
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.STEPPED
        state["found_inf_per_device"] = optimizer.overflow_flags()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale on the device, as torch does.

        Args:
            new_scale: the scale from now on, instead of the rule's.

        Raises:
            ValueError: for a new scale that is not positive and finite, where the host knows it.
            RuntimeError: if no optimizer was stepped or unscaled through this scaler since the last `update`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer, scaler = tilestep.SGD([weight], lr=0.5), tilestep.GradScaler("cpu", init_scale=4.0)
            >>> scaler.scale(weight.sum() * float("inf")).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()
            >>> scaler.get_scale(), weight.tolist()
            (2.0, [1.0, 1.0])
        """
        if not self._enabled:
            return
        if torch.compiler.is_dynamo_compiling():
            return _opaque_call("update", self, new_scale)
        if isinstance(new_scale, (int, float)):
            new_scale = float(new_scale)
            _check_scale(new_scale)
        elif new_scale is not None and is_host(new_scale.device):
            _check_scale(float(new_scale))
        elif (
            new_scale is None
            and self._scale is not None
            and not any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())
        ):
            raise RuntimeError(
                "No gradients went through this scaler since the last update(): "
                "call scaler.step(optimizer), not optimizer.step()"
            )
        super().update(new_scale)
        for optimizer in self._seen:
            optimizer.control.gradients_scaled = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint, written by this scaler or by torch's.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            ValueError: for a scale that is not positive and finite; nothing is changed then.

        Example:
            >>> import torch, tilestep
            >>> scaler = tilestep.GradScaler("cpu")
            >>> scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
            >>> scaler.get_scale()
            4.0
        """
        if self._enabled and "scale" in state_dict:
            _check_scale(state_dict["scale"])
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_seen": weakref.WeakSet()})

    def _stage(self, optimizer: Optimizer) -> OptState:
        # `get` adds no entry to this defaultdict, whose entries update() looks at.
        return self._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})["stage"]


def _check_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"Invalid loss scale: {scale}; it must be positive and finite")


def _call(name: str, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    return getattr(scaler, name)(*args, **kwargs)


_opaque_call = opaque(_call)
"""Calls are not traced by compilers: scalers change attributes of their optimizers."""
