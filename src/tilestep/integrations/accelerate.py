"""accelerate: accumulation, `shard`, checkpoints, norms and skipped steps through `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from . import is_sharded, plain_optimizer, require

require("accelerate")

import accelerate  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

from ..amp import GradScaler  # noqa: E402


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, which passes on attributes of the optimizer such as `grad_norm`.

    Args:
        optimizer: a tilestep optimizer.
        device_placement: as accelerate's.
        scaler: the scaler of losses, or None.
    """

    _is_accelerate_prepared = True  # marked optimizers are not wrapped again

    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        self._is_sharded = is_sharded(optimizer)
        self._is_gathered = False
        self._skipped: tuple[Any, Any] = 0, 0
        # A sharded optimizer's pieces are on their device already.
        super().__init__(optimizer, device_placement and not self._is_sharded, scaler)

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that accelerate's wrapper does not have on the optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def step_was_skipped(self) -> bool:
        """Whether a scaler skipped the last step; waits for the device. Schedulers read it."""
        before, after = self._skipped
        return self.scaler is not None and int(after) > int(before)

    def step(self, closure: Any = None) -> None:
        """accelerate's `step`; with a scaler a skip is recorded without a wait."""
        counts = self.scaler is not None and self.gradient_state.sync_gradients
        before = self.optimizer.skipped_steps if counts else None
        super().step(closure)
        if counts:
            self._skipped = before, self.optimizer.skipped_steps

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which rank 0's `state_dict` has the full state; all ranks must enter it."""
        if self._is_sharded:
            self.optimizer.consolidate_state_dict()
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's `state_dict`; if sharded, all ranks must call it, and rank 0 gets the full state."""
        if self._is_gathered or not self._is_sharded:
            return self.optimizer.state_dict()
        with self.gathered():
            return self.optimizer.state_dict()


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` that knows tilestep's optimizers; it takes the same arguments.

    - Backwards that only accumulate, as `GradientState.sync_gradients` tells, run inside the optimizer's `no_sync`:
      `overlap(during="backward")` and `shard` accumulate as every other optimizer.
    - A model whose optimizer is sharded is not wrapped in DistributedDataParallel when both are prepared together;
      `clip_grad_norm_` clips what `shard` has summed, `save_state` and `load_state` work.
    - Prepared optimizers are `PreparedOptimizer`s, with `grad_norm`, `skipped_steps` and a true `step_was_skipped`.
    - float16 losses are scaled by `tilestep.GradScaler`, which needs no separate pass.

    Args:
        args: as accelerate's.
        kwargs: as accelerate's.

    Example:
        >>> import tilestep
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tilestep.SGD(model.parameters(), lr=0.5, max_grad_norm=1.0)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.tensor([[2.0, 2.0]])).sum())
        >>> optimizer.step()
        >>> optimizer.grad_norm
        tensor(3.)
    """

    _sharded = False
    """Whether the models in `prepare` are sharded: their optimizers sum gradients over ranks."""

    scaler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scaler: Any = self.scaler
        if type(scaler) is torch.amp.GradScaler and scaler.is_enabled():
            numbers = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor())
            self.scaler = GradScaler(self.device.type, *numbers, scaler.get_growth_interval())

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's `prepare`; pass a sharded optimizer and its model together."""
        self._sharded = any(map(is_sharded, args))
        try:
            return super().prepare(*args, **kwargs)
        finally:
            self._sharded = False

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """accelerate's `prepare_model`, without DistributedDataParallel around the model of a sharded optimizer."""
        return super().prepare_model(model, device_placement, evaluation_mode or self._sharded)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """accelerate's `prepare_optimizer`; returns a `PreparedOptimizer`."""
        if plain_optimizer(optimizer) is optimizer:
            placed = self.device_placement if device_placement is None else device_placement
            optimizer = PreparedOptimizer(optimizer, placed, self.scaler)
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """accelerate's `backward`, inside the optimizers' `no_sync` while gradients are only accumulated."""
        with ExitStack() as stack:
            for optimizer in () if self.sync_gradients else self._optimizers:
                if hasattr(plain_optimizer(optimizer), "no_sync"):
                    stack.enter_context(optimizer.optimizer.no_sync())
            super().backward(loss, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """accelerate's `get_state_dict`; parameters of a sharded optimizer, which share memory, are cloned."""
        with self._unshared():
            return super().get_state_dict(model, unwrap)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """accelerate's `load_state`."""
        with self._unshared():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _unshared(self) -> Iterator[None]:
        """A context in which tensors in models' state_dicts share no memory: safetensors refuses shared memory."""
        models = self._models if any(map(is_sharded, self._optimizers)) else []
        handles = [model.register_state_dict_post_hook(_clone_entries) for model in models]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: float = 2) -> Any:
        """accelerate's `clip_grad_norm_`; for a sharded optimizer it clips the reduced gradients."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = {id(param) for param in listed if param.requires_grad}
        for optimizer in filter(is_sharded, self._optimizers):
            own: Any = plain_optimizer(optimizer)
            params = [param for group in own.param_groups for param in group["params"] if id(param) in trained]
            if params and norm_type == 2 and len(params) == len(trained):
                self.unscale_gradients()
                return own.clip_grad_norm_(max_norm, params)
        return super().clip_grad_norm_(listed, max_norm, norm_type)


def _clone_entries(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, value in state_dict.items():
        if torch.is_tensor(value):
            state_dict[name] = value.clone()
