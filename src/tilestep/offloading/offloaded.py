"""What every memory that `offload` attaches has in common: a reason, a report, gradients that may be kept there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..devices import is_host
from ..optimizer import Optimizer
from ..optimizer.attached import AttachedType
from ..optimizer.homes import StateHome
from .bandwidth import measure_bandwidths
from .plan import OffloadReport, plan_for

if TYPE_CHECKING:
    from .kept import KeptGradients


class OffloadedState(StateHome):
    """Where the state of an offloaded optimizer is; an optimizer has its methods while it is attached."""

    is_beside = False
    not_copied = "an offloaded optimizer cannot be copied or pickled: save its state_dict()"
    where = ""
    """Where updates run, as reports say it."""

    reason = ""
    """Why there."""

    _owner: Callable[[], Optimizer | None]
    device: torch.device
    kept: KeptGradients | None = None
    """Gradients that are taken from the parameters while backward runs, if they are."""

    @property
    def host_bytes(self) -> int:
        """Host memory taken."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Device memory of buffers."""
        return 0

    def attach_to(self, optimizer: Optimizer, where: str, reason: str) -> None:
        """Be the memory of an optimizer, once that is complete.

        Args:
            optimizer: whose state is here.
            where: where updates run, as reports say it.
            reason: why there.
        """
        self._owner, self.where, self.reason = weakref.ref(optimizer), where, reason

    def note_gradients(self, params: Sequence[torch.Tensor]) -> None:
        """Note whether the step has gradients, which it uses up."""
        kept = self.kept
        self.had_gradients = kept is not None and (kept.is_there or any(param.grad is not None for param in params))

    def present_gradients(self, params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those on the host, too."""
        params = list(params)
        return [*super().present_gradients(params), *(self.kept.arrived(params) if self.kept is not None else ())]

    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have a scaler's function unscale the gradients on the host, and those that are still beside parameters."""
        if self.kept is None:
            return unscale(optimizer, *args, **kwargs)
        with self.kept.as_parameters() as there:
            params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            on_host = [*there, *(param for param in params if is_host(param.device))]
            elsewhere = [param for param in params if not is_host(param.device)]
            # What torch copies to the host by itself it reads before it has arrived.
            arrived = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args] if on_host else []
            flags = unscale(_grouped(on_host), *arrived, **kwargs) if on_host else {}
            if elsewhere or not on_host:
                flags = {**flags, **unscale(_grouped(elsewhere), *args, **kwargs)}
            return flags

    def offload_report(self) -> OffloadReport:
        """Where the state is, where updates run and why, with the machine's measured bandwidths and predicted times.

        The first report on a machine measures, unless `where="auto"` has done it: the host waits for that.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1000))
            >>> optimizer = tilestep.offload(tilestep.AdamW([weight]))
            >>> report = optimizer.offload_report()
            >>> report.where, report.plan.state
            ('here', 8000)
        """
        owner = self._owner()
        assert owner is not None, "an optimizer keeps its memory, and not the other way round"
        plan = plan_for(owner)
        if self.is_beside:
            return OffloadReport(self.where, self.reason, plan, host_bytes=plan.state)
        known = measure_bandwidths(self.device)
        gpu, cpu = plan.on_device(known, self.keeps_gradients), plan.on_host(known, self.keeps_gradients)
        return OffloadReport(self.where, self.reason, plan, self.host_bytes, self.device_bytes, known, gpu, cpu)


class InPlace(OffloadedState):
    """State beside parameters that are on the CPU already."""

    is_beside = True


def _grouped(params: list[torch.Tensor]) -> SimpleNamespace:
    """What a scaler sees of an optimizer."""
    return SimpleNamespace(param_groups=[{"params": params}])


if TYPE_CHECKING:

    class OffloadedOptimizer(Optimizer):
        """For type checkers: an optimizer with the methods that `offload` adds."""

        def wait(self) -> None: ...
        def offload_report(self) -> OffloadReport: ...

else:

    class OffloadedOptimizer(metaclass=AttachedType):
        """An optimizer whose state lives in host memory; made by `tilestep.offload`, of the class that it was before.

        It is used as before, with `wait()` and `offload_report()` besides. A tensor of `state` that was taken out
        before a step and is read after it needs a `wait()`.
        """

        attached_as = ("offload", "offload in place")
