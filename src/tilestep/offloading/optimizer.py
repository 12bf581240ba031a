"""`offload`: an optimizer whose state lives in host memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..codegen.compile_cpp import compiler
from ..codegen.compile_triton import available as triton_is_there
from ..combinations import kind_of, refusal, wrappers_around
from ..errors import OffloadError
from ..optimizer import Optimizer
from ..optimizer.checkpoint import unchanged_on_error
from ..optimizer.extended import extended_class
from ..optimizer.homes import StateHome
from ..optimizer.making import made_for
from ..optimizer.parameters import labelled
from ..sharding import ShardedOptimizer
from .bandwidth import measure_bandwidths
from .host_update import HostState
from .kept import KeptGradients
from .placing import check_device, part_of
from .plan import OffloadReport, plan_for
from .streaming import StreamedState

__all__ = ["OffloadedOptimizer", "offload"]

_MIB = 1 << 20
_PLACES = ("auto", "gpu", "cpu")


class OffloadedOptimizer(Optimizer):
    """An optimizer whose state lives in host memory; made by `tilestep.offload`.

    It is used as before. A tensor of `state` that was taken out before a step and is read after it needs a `wait()`.
    """

    _had_gradients = False
    _choice: tuple[str, str]

    @property
    def state(self) -> Any:
        """As torch's; whoever looks at it waits until the last step's values have arrived."""
        self._home.wait()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def _step(self) -> None:
        kept = self._kept
        self._had_gradients = kept is not None and (kept.is_there or bool(self._with_gradients()))
        super()._step()

    def _with_gradients(self) -> list[torch.Tensor]:
        """The parameters that have a gradient beside them."""
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @property
    def _kept(self) -> KeptGradients | None:
        home: Any = self._home
        return home.kept if home.keeps_gradients else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; with `gradients=True` the gradients on the host are dropped too.

        Args:
            set_to_none: as torch's.
        """
        self._home.drop_gradients()
        super().zero_grad(set_to_none)

    def overflow_flags(self) -> dict[torch.device, torch.Tensor]:
        """For a scaler, after a step that checked for overflows: device and float32 scalar there, 1 for an overflow."""
        if not self._had_gradients:
            return super().overflow_flags()
        engines = self._current()
        return {engines[0].device: engines[0].overflow}

    def _unscale_with(self, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._kept is None:
            return super()._unscale_with(unscale, *args, **kwargs)
        with self._kept.as_parameters() as there:
            beside = self._with_gradients()
            here = [*there, *(param for param in beside if param.device.type == "cpu")]
            elsewhere = [param for param in beside if param.device.type != "cpu"]
            # What torch copies to the host by itself it reads before it has arrived.
            arrived = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args] if here else []
            found = unscale(_grouped(here), *arrived, **kwargs) if here else {}
            return {**found, **unscale(_grouped(elsewhere), *args, **kwargs)} if elsewhere or not here else found

    def wait(self) -> None:
        """Have the state's tensors hold what the last step gave them; of a sharded optimizer also the parameters."""
        self._home.wait()
        if isinstance(self, ShardedOptimizer):
            super().wait()  # type: ignore[misc]

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
        where, reason = self._choice
        plan = plan_for(_owner(self))
        home: Any = self._home
        if where == "here":
            return OffloadReport(where, reason, plan, host_bytes=plan.state)
        known = measure_bandwidths(home.device)
        taken, buffers, kept = home.host_bytes, home.device_bytes, home.keeps_gradients
        gpu, cpu = plan.on_device(known, kept), plan.on_host(known, kept)
        return OffloadReport(where, reason, plan, taken, buffers, known, gpu, cpu)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an offloaded optimizer cannot be copied or pickled: save its state_dict()")


def _grouped(params: list[torch.Tensor]) -> SimpleNamespace:
    """What a scaler sees of an optimizer."""
    return SimpleNamespace(param_groups=[{"params": params}])


def offload(
    optimizer: Optimizer | Callable[[], Optimizer],
    *,
    state: bool = True,
    gradients: bool = False,
    where: str = "auto",
    chunk_mb: float = 64.0,
    buffers: int = 3,
) -> OffloadedOptimizer:
    """Keep an optimizer's state, float32 masters included, in host memory.

    The update runs on the GPU, through which the state is streamed in chunks, both ways at once; or on the CPU, to
    which gradients go and from which parameters come back, chunk by chunk. Either gives what the optimizer gives on
    that device without offloading, to the bit.

    Step counts and other numbers stay with the parameters, and so do the rows, columns and matrices of rules that have
    such state (Adafactor, SOAP).

    Args:
        optimizer: any optimizer of tilestep's, whose parameters are on one device; it is changed itself, and state it
            has is taken along. Or a function that makes one: then its state is never on the device.
        state: keep the state on the host.
        gradients: move gradients to the host while backward runs, each as soon as it is there, and free them on the
            device; those of several backwards are added up. An update on the GPU reads them back as it goes. The
            parameters' `grad` is None after backward, and `step` uses the gradients up: clip with `max_grad_norm`,
            scale losses with `tilestep.GradScaler`.
        where: where updates run: "gpu", "cpu", or "auto" for what this machine's bandwidths, measured here, make
            faster. Parameters that are on the CPU (as by FSDP2's `CPUOffloadPolicy`) are updated there, with their
            state beside them.
        chunk_mb: MiB of state, or with "cpu" of parameters, in a chunk.
        buffers: device memory in chunks, for "gpu": with three, one comes in and one goes out while one is updated.

    Returns:
        The optimizer that was given.

    Raises:
        OffloadError: for parameters on several devices or on one that is neither, an optimizer that is wrapped
            otherwise, a machine without compiler for the chosen place. Nothing is changed then.
        HostMemoryError: if there is not enough host memory: what was asked for, and what would fit. Nothing is changed.
        ValueError: for an argument out of its range.

    Source: Rajbhandari et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021).

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.offload(lambda: tilestep.SGD(model.parameters(), lr=0.5, momentum=0.9))
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> optimizer.step()
        >>> model.weight.tolist()
        [[0.5, 0.0]]
    """
    if where not in _PLACES:
        raise ValueError(f"Invalid where: {where!r}; it is one of {', '.join(map(repr, _PLACES))}")
    if not state:
        raise ValueError("Invalid state: False; there would be nothing to offload")
    if not chunk_mb > 0 or buffers < 1:
        raise ValueError(f"Invalid chunk_mb or buffers: {chunk_mb}, {buffers}; both must be positive")
    made = _made(optimizer)
    if gradients:
        _refuse("offload of gradients", made)
        _refuse_wrappers(made)
    device = _device_of(made)
    where, reason = _choose(made, device, where, gradients)
    return move_state(made, _home(where, device, int(chunk_mb * _MIB), buffers, gradients), where, reason)


def _made(optimizer: Any) -> Optimizer:
    optimizer = made_for("offload", optimizer)
    _refuse("offload", optimizer)
    return optimizer


def _refuse(added: str, optimizer: Optimizer) -> None:
    reason = refusal(added, optimizer.attached)
    if reason:
        raise OffloadError(reason)


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Raise for what reduces gradients over ranks only after they have gone to the host."""
    own = {id(param): label for label, _, _, param in labelled(optimizer)}
    for wrapper in wrappers_around(lambda param: id(param) in own):
        raise OffloadError(f"what the model is wrapped in {refusal('offload of gradients', [kind_of(wrapper)])}")


def _device_of(optimizer: Optimizer) -> torch.device:
    params = [(label, param) for label, _, _, param in labelled(optimizer) if not param.is_meta]
    if not params:
        raise OffloadError("no parameter of the optimizer has memory yet: offload it after they are initialized")
    device = part_of(params[0][1]).device
    for label, param in params:
        check_device(label, param, device)
    if device.type not in ("cpu", "cuda"):
        raise OffloadError(
            f"{params[0][0]} is on {device}: offload() is for parameters on a GPU, or on the CPU already"
        )
    return device


def _choose(optimizer: Optimizer, device: torch.device, where: str, gradients: bool) -> tuple[str, str]:
    """Where updates run, and why."""
    if device.type == "cpu":
        if where == "gpu":
            raise OffloadError("where='gpu', but the parameters are on the CPU: move the model to a GPU first")
        return "here", "the parameters are on the CPU, and so is the state"
    if isinstance(optimizer, ShardedOptimizer):
        if where == "cpu":
            _refuse("offload to the CPU", optimizer)
        where = "gpu"
    able = {"gpu": triton_is_there(), "cpu": compiler() is not None}
    needs = {"gpu": "Triton", "cpu": "a C++ compiler"}
    if where != "auto":
        if not able[where]:
            raise OffloadError(f"where={where!r} needs {needs[where]}, which is not there")
        return where, "as asked for"
    if not all(able.values()):
        chosen = next((place for place, is_able in able.items() if is_able), None)
        if chosen is None:
            raise OffloadError("updates on the GPU need Triton, those on the CPU a C++ compiler; neither is there")
        return chosen, f"there is no {needs['cpu' if chosen == 'gpu' else 'gpu'].removeprefix('a ')}"
    plan, known = plan_for(optimizer), measure_bandwidths(device)
    gpu, cpu = plan.on_device(known, gradients), plan.on_host(known, gradients)
    return ("gpu" if gpu <= cpu else "cpu"), f"predicted {1e3 * gpu:.3g} ms on the GPU, {1e3 * cpu:.3g} ms on the CPU"


def _home(where: str, device: torch.device, chunk: int, buffers: int, gradients: bool) -> StateHome:
    if where == "here":
        return StateHome()
    if where == "gpu":
        return StreamedState(device, chunk, buffers, gradients)
    return HostState(device, chunk, gradients)


@torch.no_grad()
def move_state(optimizer: Optimizer, home: StateHome, where: str, reason: str) -> OffloadedOptimizer:
    """Give an optimizer's state another home.

    Args:
        optimizer: the optimizer; it becomes an `OffloadedOptimizer`.
        home: the home.
        where: what its reports say.
        reason: why there.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return _move_pieces(optimizer, home, where, reason)
    kind = type(optimizer)
    try:
        with unchanged_on_error(optimizer):
            if optimizer._tables is not None:
                optimizer._tables.follow_parameters()
            optimizer._home = home
            optimizer.__class__ = extended_class(OffloadedOptimizer, kind)
            assert isinstance(optimizer, OffloadedOptimizer)
            optimizer._choice = where, reason
            optimizer._make_tables(ahead=True)
    except BaseException:
        optimizer.__class__ = kind
        raise
    optimizer.attached += _attached(home, where)
    return optimizer


def _attached(home: StateHome, where: str) -> tuple[str, ...]:
    """What `combinations` calls it."""
    if where == "here":
        return ("offload in place",)
    to_host = ("offload to the CPU",) if where == "cpu" else ()
    return ("offload", *to_host, *(("offload of gradients",) if home.keeps_gradients else ()))


def _owner(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose state it is: of a sharded one, that of this rank's pieces."""
    return optimizer._sharding.inner if isinstance(optimizer, ShardedOptimizer) else optimizer


def _move_pieces(optimizer: ShardedOptimizer, home: StateHome, where: str, reason: str) -> OffloadedOptimizer:
    """As `move_state`, for the pieces of a sharded optimizer."""
    move_state(_owner(optimizer), home, where, reason)
    optimizer._home = home
    optimizer._show_states()
    moved: Optimizer = optimizer
    moved.__class__ = extended_class(OffloadedOptimizer, type(optimizer))
    assert isinstance(moved, OffloadedOptimizer)
    moved._choice = where, reason
    moved.attached += _attached(home, where)
    return moved
