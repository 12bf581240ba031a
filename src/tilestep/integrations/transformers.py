"""transformers: an optimizer from `TrainingArguments`, and a Trainer that leaves the clip and the norm to the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from . import Places, named_kind, plain_optimizer, require, set_max_grad_norm, without_limit

require("transformers")
require("accelerate")

import transformers  # noqa: E402

from ..optimizer import Optimizer  # noqa: E402
from ..rules import Rule, registry  # noqa: E402
from .accelerate import Accelerator, PreparedOptimizer  # noqa: E402


def trainer_optimizer(
    args: transformers.TrainingArguments, optimizer: str | type[Optimizer] | Rule = "AdamW", **arguments: Any
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer class and arguments from `TrainingArguments`: the Trainer's `optimizer_cls_and_kwargs`.

    `learning_rate`, `weight_decay`, `adam_beta1` and `adam_beta2`, `adam_epsilon` are passed if the rule has the
    hyperparameter (betas and epsilon if it has a pair of betas); `max_grad_norm` clips inside the step.

    Args:
        args: the `TrainingArguments`.
        optimizer: the name of an optimizer, its class, or a rule.
        arguments: arguments of the optimizer, which override `args`: `master_weights`, `state_dtype`, hyperparameters.

    Returns:
        The class, and its arguments without the parameters.

    Raises:
        KeyError: for an unknown optimizer.

    Source: transformers.Trainer.get_optimizer_cls_and_kwargs.

    Example:
        >>> args = transformers.TrainingArguments(learning_rate=1e-3, adam_beta2=0.95, use_cpu=True)
        >>> kind, arguments = trainer_optimizer(args, master_weights=True)
        >>> kind.__name__, arguments["lr"], arguments["betas"], arguments["max_grad_norm"]
        ('AdamW', 0.001, (0.9, 0.95), 1.0)
    """
    own: dict[str, Any] = {}
    if isinstance(optimizer, Rule):
        kind, own = Optimizer, {"rule": optimizer}
    else:
        kind = named_kind(optimizer, KeyError) if isinstance(optimizer, str) else optimizer
    has = (optimizer if isinstance(optimizer, Rule) else registry[kind.__name__]).hyperparameters
    given = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if len(has.get("betas", ())) == 2:
        given |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    own |= {name: value for name, value in given.items() if name in has}
    if args.max_grad_norm:
        own["max_grad_norm"] = args.max_grad_norm
    return kind, {**own, **arguments}


class TilestepTrainerMixin:
    """A mixin for any `Trainer`, including TRL's: the optimizer clips inside its step, and the Trainer logs its norm.

    The default optimizer is `tilestep.AdamW` with `trainer_optimizer(args)`. Groups without a `max_grad_norm` get the
    value of the arguments; with 0 nothing is clipped, and a norm is computed only if the optimizer tracks it
    (`track_grad_norm=True`). The host reads the norm when it is logged, not at each step. Gradients accumulate with
    `overlap(during="backward")` and with `shard`, whose checkpoints the Trainer saves and loads: see `accelerate`.

    Example:
        >>> class Trainer(TilestepTrainerMixin, transformers.Trainer): ...
    """

    args: Any
    accelerator: Any
    control: Any
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    get_decay_parameter_names: Any
    _without_limit: Places = ()

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's method, with tilestep's `Accelerator`."""
        with _patched(Accelerator):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's method, with `tilestep.AdamW` by default; from then on the step clips."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = trainer_optimizer(self.args)
        kind, given = self.optimizer_cls_and_kwargs or (None, {})
        if self.optimizer is None and isinstance(kind, type) and issubclass(kind, Optimizer):
            groups = self._named_groups(args[0] if args else kwargs.get("model"))
            self.optimizer_cls_and_kwargs = kind, {"params": groups, **given}
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        own = plain_optimizer(self.optimizer)
        if own is not None and self._clips_inside():
            self._without_limit = without_limit([own], self.args.max_grad_norm)
            set_max_grad_norm(self._without_limit, self.args.max_grad_norm)
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        # The checkpoint has the clip of the run that saved it.
        set_max_grad_norm(self._without_limit, self.args.max_grad_norm)

    def _named_groups(self, model: Any) -> list[dict[str, Any]]:
        """The Trainer's param groups, with parameter names."""
        model = self.model if model is None else model
        decaying, groups = set(self.get_decay_parameter_names(model)), []
        for decays in (True, False):
            params = [(n, p) for n, p in model.named_parameters() if p.requires_grad and (n in decaying) is decays]
            # torch wants names in every group or in none, and finds none in an empty one.
            names: dict[str, Any] = {} if params else {"param_names": []}
            groups.append({"params": params, "weight_decay": self.args.weight_decay if decays else 0.0, **names})
        return groups

    def _clips_inside(self) -> bool:
        """Whether the step clips: not under FSDP1, where each rank has pieces of flat parameters."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        is_flat = plugin is not None and getattr(plugin, "fsdp_version", 1) == 1
        return plain_optimizer(self.optimizer) is not None and not is_flat

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self._clips_inside() else super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm if self._clips_inside() else super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if grad_norm is None and self.control.should_log and self._clips_inside():
            # A norm that no option needs is not computed, and not logged.
            with suppress(RuntimeError):
                grad_norm = self.optimizer.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # All ranks run this, and one writes.
        with self.optimizer.gathered() if isinstance(self.optimizer, PreparedOptimizer) else nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


class TilestepTrainer(TilestepTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with `TilestepTrainerMixin`."""


@contextmanager
def _patched(accelerator: type) -> Iterator[None]:
    """A context in which the Trainer creates this accelerator, for which it has no argument."""
    module: Any = transformers.trainer
    before, module.Accelerator = module.Accelerator, accelerator
    try:
        yield
    finally:
        module.Accelerator = before
