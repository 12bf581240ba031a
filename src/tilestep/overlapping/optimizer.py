"""`overlap`: an optimizer whose updates run while backward still does, or while the next forward already does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ..amp import GradScaler
from ..compat import uncompiled
from ..engine import DeviceEngine
from ..engine.capturing import is_capturing
from ..errors import CaptureError
from ..optimizer import Optimizer
from ..optimizer.build import Tables, labelled
from ..optimizer.decide import decide, needs_norm
from ..optimizer.extended import extended_class
from ..placements.local import local_part
from ..sharding import ShardedOptimizer
from .data_parallel import CommHook, follow_buckets, wrappers
from .groups import Group, Grouping, divide
from .lanes import Lane
from .norms import EarlyNorms
from .pending import Pending
from .rounds import Round, scale_error

__all__ = ["OverlappedOptimizer", "overlap"]


def overlap(
    optimizer: Optimizer,
    model: nn.Module,
    during: Literal["backward", "forward"] = "backward",
    *,
    bucket_cap_mb: float = 25.0,
    scaler: torch.amp.GradScaler | None = None,
    comm_hook: CommHook | None = None,
) -> OverlappedOptimizer:
    """Let an optimizer update parameters while backward, or the next forward, still has other work.

    Parameters are updated group by group: those that an FSDP2 module gathers, and buckets of neighbours elsewhere. On a
    GPU updates run in a stream of their own. Numbers are those of the optimizer without this, to the bit, for rules
    without matrix products.

    With "backward" a group is updated as soon as its last gradient is there, and these gradients are let go; `step()`
    updates what is left. What has to be decided for all groups together (`max_grad_norm`, skipped steps, a scaler) is
    decided by `step()`, and then updates run as with "forward".

    With "forward" `step()` computes the norm, decides, and takes the gradients; every module's forward then waits for
    the update of its own parameters alone. Whoever reads parameters through a module, or state through the optimizer's
    methods, waits for what he reads; `synchronize()` is for readers of tensors that they hold themselves.

    The optimizer itself becomes an `OverlappedOptimizer`. After `step()` the parameters' `grad` is None.

    Args:
        optimizer: any optimizer of tilestep's, with all of its parameters on one device.
        model: has its parameters: a plain module, DistributedDataParallel around one, or one that FSDP2 shards.
        during: "backward" or "forward".
        bucket_cap_mb: MiB of parameters in a bucket.
        scaler: the scaler that loss and gradients go through, if there is one.
        comm_hook: for DistributedDataParallel and "backward": state and function that reduce a bucket, which takes one
            comm hook only; None for the mean over ranks.

    Returns:
        The optimizer that was given.

    Raises:
        ValueError: for a schedule that there is not; for parameters on several devices; for an optimizer that is
            sharded or overlapped already, or whose updates run on the CPU; for a DistributedDataParallel that says too
            late which gradients there are.

    Source: torch.distributed.optim._apply_optimizer_in_backward, https://github.com/pytorch/pytorch/pull/98667.

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> model.weight.tolist(), model.weight.grad
        ([[0.5, 0.0]], None)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"overlap() takes an optimizer of tilestep's, not {type(optimizer).__name__}")
    if isinstance(optimizer, ShardedOptimizer):
        raise ValueError("shard() overlaps communication by itself; its optimizers cannot be given to overlap()")
    if isinstance(optimizer, OverlappedOptimizer):
        raise ValueError("the optimizer is overlapped already")
    if optimizer._home.keeps_gradients:
        raise ValueError(
            "gradients of this optimizer go to the host while backward runs: to overlap its updates, offload it "
            'without gradients=True; during="backward" lets them go as well'
        )
    if optimizer._home.looks_at_gradients:
        raise ValueError("updates of this optimizer run on the CPU: to overlap them, offload it with where='gpu'")
    if during not in ("backward", "forward"):
        raise ValueError(f'Invalid during: {during!r}; it is "backward" or "forward"')
    if not bucket_cap_mb > 0:
        raise ValueError(f"Invalid bucket_cap_mb: {bucket_cap_mb}; it must be positive")
    model = uncompiled(model)
    device = _only_device(optimizer)
    bucket_bytes = int(bucket_cap_mb * 2**20)
    grouping = divide(optimizer, model, bucket_bytes)
    optimizer.__class__ = extended_class(OverlappedOptimizer, type(optimizer))
    assert isinstance(optimizer, OverlappedOptimizer)
    try:
        optimizer._begin(model, grouping, device, during, bucket_bytes, scaler, comm_hook)
    except BaseException:
        optimizer.__class__ = type(optimizer).__bases__[-1]
        raise
    return optimizer


def _only_device(optimizer: Optimizer) -> torch.device:
    devices = {param.device: label for label, _, _, param in labelled(optimizer) if not param.is_meta}
    if len(devices) > 1:
        (first, label), (second, other), *_ = devices.items()
        raise ValueError(f"{label} is on {first}, {other} on {second}: overlap() takes parameters of one device")
    return next(iter(devices), torch.device("cpu"))


class OverlappedOptimizer(Optimizer):
    """An optimizer whose updates run beside other work; made by `tilestep.overlap`. It is used as before."""

    _elsewhere: set[int]
    """Parameters whose complete gradients are announced by DistributedDataParallel, by `id`."""

    def _begin(
        self,
        model: nn.Module,
        grouping: Grouping,
        device: torch.device,
        during: str,
        bucket_bytes: int,
        scaler: torch.amp.GradScaler | None,
        comm_hook: CommHook | None,
    ) -> None:
        self._model, self._grouping, self._bucket_bytes = model, grouping, bucket_bytes
        self._scaler = scaler
        self._had_gradients = False
        self._elsewhere = set()
        self._lane = Lane(device)
        self._round = Round(self, self._lane, updates=during == "backward")
        if during == "backward":
            for wrapper in wrappers(model):
                self._elsewhere |= follow_buckets(wrapper, self._round, comm_hook)
        self._norms = EarlyNorms()
        self._pending = Pending(model, lambda: self._grouping, self._lane)
        self._round.watch(self._elsewhere)
        self._rebuild()

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _label(self, param: torch.Tensor) -> str:
        label = next(label for label, _, _, each in labelled(self) if each is param)
        name = next((name for name, each in self._model.named_parameters() if each is param), None)
        return label if name is None or label.endswith(")") else f"{label} ({name})"

    def _is_scaled(self) -> bool:
        """Whether gradients carry a loss scale that the step takes away."""
        return self._gradients_scaled or (self._scaler is not None and self._scaler.is_enabled())

    def _needs_norm_early(self) -> bool:
        """Whether the step is going to ask for the norm of the gradients, as far as can be seen in backward."""
        return needs_norm(self) or self._gradients_scaled or isinstance(self._scaler, GradScaler)

    def _part_of(self, param: torch.Tensor) -> Any:
        return self._grouping.of[id(param)].index

    def _build(self) -> Tables:
        self._pending.complete()
        with self._lane.left():
            if not self._grouping.knows(self):
                self._grouping = divide(self, self._model, self._bucket_bytes)
            return super()._build()

    @property
    def applied_groups(self) -> tuple[str, ...]:
        """The groups that backward has updated since the last step; after one that was broken off, what it has done."""
        return tuple(group.name for group in self._round.applied)

    def no_sync(self) -> Any:
        """A block in which backward only accumulates; the first one outside of it updates with the sums."""
        return self._round.no_sync()

    def synchronize(self) -> None:
        """Let what comes next see all updates.

        Only needed before tensors are read that are not looked up in a module of the model: parameters in a list of
        one's own or in `param_groups`, and `optimizer.state`.
        """
        self._pending.complete()
        self._lane.join()

    def _step(self) -> None:
        if self._evaluating:
            raise RuntimeError("the parameters hold the weights to evaluate: call train() before step()")
        if is_capturing():
            raise CaptureError("a step that overlaps other work cannot be captured in a CUDA graph")
        self._round.require_whole()
        decides = needs_norm(self) or hasattr(self, "grad_scale") or hasattr(self, "found_inf")
        if self._round.has_updated and (hasattr(self, "grad_scale") or hasattr(self, "found_inf")):
            raise scale_error()
        if self._round.applies and (self._round.has_updated or not decides):
            self._round.finish()
        else:
            self._step_later()
            self._round.forget()

    def _step_later(self) -> None:
        """Decide the step, and let its updates wait for whoever needs them."""
        self._pending.complete()
        self._lane.join()
        with self._lane.after():
            tables, gradients = self._prepared()
            tables.follow_parameters()
            if hasattr(self, "found_inf"):
                # A scaler has divided the gradients since backward, which their versions do not tell.
                self._norms.forget()
            elif needs_norm(self):
                self._norms.complete(tables)
            decide(self, tables.engines)
            self._norms.forget()
            self._count_versions(tables)
            groups = self._pending.order(self._grouping.groups)
            held = {group: self._take_gradients(group) for group in groups}
            self._had_gradients = any(held.values())
            works = [(group, self._work(tables, gradients, group, held[group])) for group in groups if held[group]]
            # Who scales losses, changes hyperparameters or reads the norm next comes after the decision.
            decided = self._lane.mark()
            self._lane.keep([local_part(gradient) for taken in held.values() for gradient in taken])
            self._pending.put(works)
        current = self._lane.current()
        if current is not None and decided is not None:
            current.wait_event(decided)
        self._pending.settle()

    def _count_versions(self, tables: Tables) -> None:
        """Tell autograd which parameters are going to be written."""
        if tables.scan is not None:
            tables.scan.mark_written()
        else:
            for engine in tables.engines:
                torch.autograd.graph.increment_version(engine.gradients.active)
        tables.note_versions()

    def _take_gradients(self, group: Group) -> list[torch.Tensor]:
        taken = [param.grad for param in group.params if param.grad is not None]
        for param in group.params:
            param.grad = None
        return taken

    def _work(
        self,
        tables: Tables,
        gradients: list[list[torch.Tensor | None]],
        group: Group,
        held: list[torch.Tensor],
    ) -> Callable[[], None]:
        places = tables.places.get(group.index, [])

        @torch.no_grad()
        def work() -> None:
            with self._lane.after():
                tables.run(gradients, places, counts_versions=False)
            held.clear()
            for place in places:
                gradients[place] = []

        return work

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; those that a step has taken, or backward has used, are gone already.

        After a backward that was broken off this drops what it has left behind, and the next one may begin.

        Args:
            set_to_none: as in torch.

        Raises:
            RuntimeError: after a backward that has updated parameters; `step()` must end it.
        """
        if self._round.is_broken:
            self._lane.join()
            self._round.forget()
        elif self._round.has_updated:
            raise RuntimeError(
                "backward has updated parameters already, so these gradients cannot be dropped: call step() first; "
                'to decide after backward whether there is a step use during="forward"'
            )
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after all updates."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, as any optimizer does.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            StateError: for other shapes or another rule; ValueError for other groups. Nothing is changed then.
        """
        self.synchronize()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as a group of their own, between a step and the next backward.

        Args:
            param_group: as for any optimizer.

        Raises:
            RuntimeError: after a backward that has updated parameters; `step()` must end it.
        """
        if self._round.has_updated:
            raise RuntimeError("backward has updated parameters already: call step() before add_param_group()")
        self.synchronize()
        super().add_param_group(param_group)
        self._round.watch(self._elsewhere)

    def eval(self) -> None:
        """As for any optimizer, after all updates."""
        self.synchronize()
        super().eval()

    def train(self, mode: bool = True) -> None:
        """As for any optimizer."""
        self.synchronize()
        super().train(mode)

    def overflow_flags(self) -> dict[torch.device, torch.Tensor]:
        """For a scaler, after a step that checked for overflows: device and float32 scalar there, 1 for an overflow."""
        engines: list[DeviceEngine] = self._current()
        return {engines[0].device: engines[0].overflow} if engines and self._had_gradients else {}

    def _unscale_with(self, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._round.has_updated:
            raise scale_error()
        self._norms.forget()
        return super()._unscale_with(unscale, *args, **kwargs)

    def prepare_capture(self) -> None:
        """Refused: steps that overlap other work are not captured."""
        raise CaptureError("a step that overlaps other work cannot be captured in a CUDA graph")

    push = prepare_capture

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an overlapped optimizer cannot be copied or pickled: save its state_dict()")
