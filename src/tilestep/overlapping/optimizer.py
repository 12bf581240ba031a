"""An optimizer whose updates run while backward still does, or while the next forward already does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..amp import GradScaler
from ..combinations import refuse_replaced, wrappers_around
from ..compat import local_parts
from ..engine import DeviceEngine
from ..engine.capturing import is_capturing
from ..errors import CaptureError
from ..optimizer import Optimizer
from ..optimizer.checkpoint import unchanged_on_error
from ..optimizer.parameters import labelled, require_listed_once
from ..optimizer.tables import Tables
from ..placements.local import ready
from .choice import OverlapReport, Trial, device_clock
from .data_parallel import CommHook, follow_buckets, wrappers
from .groups import Group, Grouping, divide
from .lanes import Lane
from .norms import EarlyNorms
from .pending import Pending
from .rounds import Round, scale_error

__all__ = ["OverlappedOptimizer"]


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
        early_norm: bool,
    ) -> None:
        self._model, self._grouping, self._bucket_bytes = model, grouping, bucket_bytes
        clock = device_clock(device) if during == "auto" else None
        self._trial = None if clock is None else Trial(clock, self._slowest)
        self._during = "serial" if during == "auto" else during
        self._scaler = scaler
        self._had_gradients = False
        self._elsewhere = set()
        self._lane = Lane(device)
        self._round = Round(self, self._lane, updates=during == "backward")
        self._comm_hook = comm_hook
        if during == "backward":
            for wrapper in dict.fromkeys([*wrappers(model), *wrappers_around(self._round.holds)]):
                self._follow_wrapper(wrapper)
        self._norms, self._early_norm = EarlyNorms(), early_norm
        self._pending = Pending(model, lambda: self._grouping, self._lane)
        self._round.watch(self._elsewhere)
        self._rebuild(ahead=True)

    def _follow_wrapper(self, wrapper: Any) -> None:
        """Take the gradients of a DistributedDataParallel when it has reduced them."""
        elsewhere = follow_buckets(wrapper, self._round, self._comm_hook)
        self._elsewhere |= elsewhere
        self._round.unwatch(elsewhere)

    @property
    def state(self) -> Any:
        """As torch's; whoever looks at it comes after all updates."""
        if "_pending" in self.__dict__ and self._pending.is_pending:
            self.synchronize()
        return getattr(super(), "state", None) or self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _label(self, param: torch.Tensor) -> str:
        label = next(label for label, _, _, each in labelled(self) if each is param)
        name = next((name for name, each in self._model.named_parameters() if each is param), None)
        return label if name is None or label.endswith(")") else f"{label} ({name})"

    def _is_scaled(self) -> bool:
        """Whether gradients carry a loss scale that the step takes away."""
        return bool(self.control.gradients_scaled) or (self._scaler is not None and self._scaler.is_enabled())

    def _needs_norm_early(self) -> bool:
        """Whether the step is going to ask for the norm of the gradients, as far as can be seen in backward."""
        scaled = self.control.gradients_scaled or isinstance(self._scaler, GradScaler)
        return self._early_norm and (scaled or self.control.needs_norm(self.param_groups))

    def _part_of(self, param: torch.Tensor) -> Any:
        return None if self._during == "serial" else self._grouping.of[id(param)].index

    def _slowest(self, times: torch.Tensor) -> None:
        """Replace times by those of the slowest rank."""
        if self.agreement is not None:
            self.agreement.largest(times)
            return
        for wrapper in wrappers(self._model)[:1]:
            there = times.to(self._grouping.groups[0].params[0].device)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=wrapper.process_group)
            times.copy_(there)

    def overlap_report(self) -> OverlapReport:
        """When updates run and why; with "auto" the times of both schedules, once they are measured.

        Example:
            >>> import torch, tilestep
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters()), model)
            >>> print(optimizer.overlap_report())
            updates run: serial (nothing runs beside the host of a CPU)
        """
        if self._trial is None:
            is_chosen = self._during == "serial"
            return OverlapReport(self._during, "nothing runs beside the host of a CPU" if is_chosen else "as asked for")
        return self._trial.report or OverlapReport(self._during, "still trying which is the fastest")

    _begins_together = True

    def _make_tables(self, *, ahead: bool) -> Tables:
        self._pending.complete()
        with self._lane.left():
            if not self._grouping.knows(self):
                self._grouping = divide(self, self._model, self._bucket_bytes)
            return super()._make_tables(ahead=ahead)

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
        one's own or in `param_groups`, and what was taken out of `optimizer.state` before.
        """
        self._pending.complete()
        self._lane.join()

    def _step(self) -> None:
        if self._evaluating:
            raise RuntimeError("the parameters hold the weights to evaluate: call train() before step()")
        if is_capturing():
            raise CaptureError("a step that overlaps other work cannot be captured in a CUDA graph")
        if self._during == "serial":
            self._step_at_once()
        else:
            self._step_beside()
        if self._trial is not None and self._trial.report is None:
            self._trial.note_step()
            if self._trial.during != self._during:
                self._during = self._trial.during
                self._rebuild()

    def _step_at_once(self) -> None:
        """The optimizer's own step; gradients are used up as by any other schedule."""
        self.synchronize()
        self._had_gradients = any(param.grad is not None for param in self._all_params())
        if not self._had_gradients:
            refuse_replaced(self._model, self._all_params())
        super()._step()
        for param in self._all_params():
            param.grad = None

    def _step_beside(self) -> None:
        self._round.require_whole()
        scaled = hasattr(self, "grad_scale") or hasattr(self, "found_inf")
        decides = scaled or self.control.needs_norm(self.param_groups)
        if self._round.meets_a_scaler and scaled:
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
            tables.begin_states(self, all_of_them=True)
            tables.follow_parameters()
            if hasattr(self, "found_inf"):
                # A scaler has divided the gradients since backward, which their versions do not tell.
                self._norms.forget()
            elif self.control.needs_norm(self.param_groups):
                self._norms.complete(tables)
            self.control.decide(self, tables)
            self._norms.forget()
            self._count_versions(tables)
            groups = self._pending.order(self._grouping.groups)
            held = {group: self._take_gradients(group) for group in groups}
            tables.release()
            self._had_gradients = any(held.values())
            if not self._had_gradients:
                refuse_replaced(self._model, self._all_params())
            works = [(group, self._work(tables, gradients, group, held[group])) for group in groups if held[group]]
            # Who scales losses, changes hyperparameters or reads the norm next comes after the decision.
            decided = self._lane.mark()
            taken = [gradient for each in held.values() for gradient in each]
            self._lane.keep(list(map(ready, local_parts(taken))))
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
                for place in places:
                    tables.engines[place].follow_memory()
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
        with unchanged_on_error(self):
            super().add_param_group(param_group)
            require_listed_once("overlap()", self)
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
        if self._round.meets_a_scaler:
            raise scale_error()
        self._norms.forget()
        return super()._unscale_with(unscale, *args, **kwargs)

    def prepare_capture(self) -> None:
        """Refused: steps that overlap other work are not captured."""
        raise CaptureError("a step that overlaps other work cannot be captured in a CUDA graph")

    push = prepare_capture

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an overlapped optimizer cannot be copied or pickled: save its state_dict()")
