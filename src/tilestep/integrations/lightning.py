"""Lightning: a callback that clips inside the step, evaluates averages and logs norms; a strategy for `shard`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from . import Places, is_sharded, own_optimizers, require, set_max_grad_norm, without_limit

require("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402


class TilestepCallback(Callback):
    """A callback for `Trainer(callbacks=[...])` that trains with tilestep's optimizers.

    - `Trainer(gradient_clip_val=...)` clips inside the step, in mixed precision too: groups without a `max_grad_norm`
      get it, and Lightning clips nothing. `gradient_clip_algorithm="value"` stays Lightning's.
    - Rules with averages are evaluated with them: `eval()` before validation, `train()` after it.
    - Backwards that only accumulate run inside the optimizer's `no_sync`, for `overlap(during="backward")` and `shard`.
    - `grad_norm` and `skipped_steps` are logged if they are known, without a wait of the host.

    Args:
        log: whether to log.

    Example:
        >>> callback = TilestepCallback(log=False)
    """

    def __init__(self, log: bool = True) -> None:
        self._log = log
        self._clip_val: Any = None
        self._without_limit: Places = []
        self._accumulating = ExitStack()
        self._only_accumulates = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note groups without a limit: a checkpoint, which is loaded next, has the clip of its training."""
        self._without_limit = without_limit(own_optimizers(trainer.optimizers))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the clip into the step."""
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        clips = (
            trainer.gradient_clip_val and by_norm and len(own_optimizers(trainer.optimizers)) == len(trainer.optimizers)
        )
        set_max_grad_norm(self._without_limit, trainer.gradient_clip_val if clips else None)
        if clips:
            self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note whether a step follows this batch, as Lightning decides it."""
        is_last = trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches
        self._only_accumulates = (batch_idx + 1) % trainer.accumulate_grad_batches != 0 and not is_last

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log norms and skipped steps."""
        for place, optimizer in enumerate(own_optimizers(trainer.optimizers) if self._log else ()):
            suffix = f"/{place}" if len(trainer.optimizers) > 1 else ""
            try:
                pl_module.log(f"grad_norm{suffix}", optimizer.grad_norm)
            except RuntimeError:
                continue  # the step computes no norm, and skips nothing
            pl_module.log(f"skipped_steps{suffix}", optimizer.skipped_steps.float())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Enter `no_sync` if no step follows."""
        if pl_module.automatic_optimization and self._only_accumulates:
            for optimizer in own_optimizers(trainer.optimizers):
                if hasattr(optimizer, "no_sync"):
                    self._accumulating.enter_context(optimizer.no_sync())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave `no_sync`."""
        self._accumulating.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the averages into the parameters."""
        for optimizer in own_optimizers(trainer.optimizers):
            optimizer.eval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the training weights into the parameters."""
        for optimizer in own_optimizers(trainer.optimizers):
            optimizer.train()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the clip."""
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the clip and leave `no_sync`."""
        self._accumulating.close()
        self.on_train_end(trainer, pl_module)


class ShardStrategy(DDPStrategy):
    """Lightning's DDP strategy for `tilestep.shard`, which reduces gradients itself: the module is not wrapped.

    Make the optimizer in `configure_optimizers`: `tilestep.shard(tilestep.AdamW(self.parameters()), self)`.

    Args:
        args: the arguments of DDPStrategy; arguments for DistributedDataParallel have no effect.
        kwargs: the keyword arguments of DDPStrategy.

    Raises:
        ValueError: in a fit with an optimizer that is not sharded.
    """

    def _setup_model(self, model: Any) -> Any:
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        """DDPStrategy's `setup_optimizers`; raises for an optimizer that is not sharded."""
        super().setup_optimizers(trainer)
        for place, optimizer in enumerate(self.optimizers):
            if not is_sharded(optimizer):
                raise ValueError(
                    f"ShardStrategy: optimizer {place} is not sharded, so its gradients would not be reduced over "
                    "the ranks: return tilestep.shard(optimizer, self) from configure_optimizers"
                )
