"""Clip, scale and skip: the inputs of a step's decision, its control numbers on a device, and memory across steps.

`decide` is the decision on floats: called directly if the step runs on a CPU, traced into a kernel for a GPU.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist

from ..backends.decision import Decision
from ..backends.floats import outcome_of
from ..backends.registry import control_kernels
from ..devices import combined, moved
from ..errors import GradientError, StateError
from ..kernels.spec import LARGEST_SUM, NORM, SKIPPED, UNSCALE
from ..linalg.scalar_values import as_python
from ..placement import ReductionGroup, is_distributed, next_number
from ..placement.combinations import DDP, FSDP1, follow_wrappers, kind_of, refuse, wrappers_around
from ..placement.local import local_part
from ..rules.limits import EARLIER_KEYS, Limit
from ..runtime import Control, DeviceEngine, StepInputs, build_ahead
from ..runtime.decision import StepHistory
from ..runtime.norms import Partials
from .memory import StateMemory
from .parameters import Optimizer, params_of

LIMITS_KEY = "limits"  # key in the first group of a state_dict for the memory of limits


def skip_policy(nonfinite: bool, above: float | Limit | None, tracks_norm: bool) -> StepInputs:
    """Return the inputs that stay constant over an optimizer's steps, from its arguments."""
    inputs = StepInputs(skip_nonfinite=nonfinite or above is not None)
    inputs.needs_norm = inputs.skip_nonfinite or tracks_norm
    above = as_python(above)
    if isinstance(above, Limit):
        outcome = outcome_of(above)
        if outcome.clips or not outcome.skips:
            what = "clips" if outcome.clips else "never skips"
            raise ValueError(f"Invalid skip_above: {above} {what}: pass it as max_grad_norm, which may also skip")
        inputs.limits = (above,)
    elif above is not None:
        is_norm = (isinstance(above, torch.Tensor) and above.numel() == 1) or isinstance(above, numbers.Real)
        if not is_norm or not above > 0:
            raise ValueError(
                f"Invalid skip_above: {above}; it must be a positive norm, or a limit that skips, such as "
                "TimesMean(factor) and Sigma(factor)"
            )
        inputs.skip_above = float(above)
    return inputs


def decide(power_sum: Any, scale: Any, found_inf: Any, loss: Any, memories: Sequence[Any], policy: Any) -> Decision:
    """Make the decision of a step.

    Args:
        power_sum: sum of squares of the gradients; None without a norm pass.
        scale: the loss scale of the gradients, or None.
        found_inf: nonzero if a gradient overflowed, or None.
        loss: the step's loss, or None.
        memories: the memory of each limit; updated in place.
        policy: `skip_above`, a norm; `skip_nonfinite` and `check_overflow`: nonfinite gradients skip the step, or count
            as an overflow; `limits`.
    """
    norm, nonfinite, clip = 0.0, False, math.inf
    inverse = 1.0 if scale is None else 1.0 / scale
    if power_sum is not None:
        nonfinite = (power_sum >= math.inf) | (power_sum != power_sum)
        # Norm passes cap the sum at LARGEST_SUM, which stands for any larger sum: twice LARGEST_SUM is inf.
        norm = math.sqrt(power_sum + (power_sum >= LARGEST_SUM) * LARGEST_SUM) * inverse
    overflow = False if found_inf is None else found_inf != 0
    if policy.check_overflow:
        overflow = overflow | nonfinite
    skip = overflow | (norm > policy.skip_above)
    if policy.skip_nonfinite:
        skip = skip | nonfinite
    if scale is not None:
        skip = skip | (scale <= 0) | (scale >= math.inf) | (scale != scale)
    for limit, memory in zip(policy.limits, memories):
        skips, clip = limit.ask(norm, loss, memory, skip)
        # A device cannot raise for an invalid clip.
        skip = skip | skips | (clip < 0) | (clip != clip)
    return Decision(norm, skip, inverse, clip, overflow)


class DeviceControl(Control):
    """The decision of a step on a device, and the kernels that write its control numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.overflow = torch.zeros((), dtype=torch.float32, device=device)
        self.launchers: dict[Any, Any] = {}  # launchers of the kernels that write the numbers, by kind of inputs
        self._kernels = control_kernels(self.numbers)
        self._was_trivial = True
        self._plain = self.numbers[: UNSCALE + 1].clone()

    def update(self, inputs: StepInputs, *, captured: bool = False) -> None:
        """Write the control numbers of a step."""
        is_trivial = not inputs.needs_norm and inputs.is_trivial
        if is_trivial and captured:
            # The host does not know whether a graph was replayed meanwhile, nor its decision.
            self.numbers[: UNSCALE + 1].copy_(self._plain)
            return
        if is_trivial and self._was_trivial:
            return
        self._was_trivial = is_trivial
        if self._kernels is not None:
            self._kernels.decide_on_device(decide, self.numbers, inputs, self.launchers)
            return
        scale = None if inputs.grad_scale is None else float(inputs.grad_scale)
        if scale is not None and not 0 < scale < math.inf:
            raise GradientError(f"the loss scale is {scale}: gradients cannot be unscaled by it; nothing was updated")
        power_sum, found_inf, loss = (
            None if number is None else float(number) for number in (inputs.power_sum, inputs.found_inf, inputs.loss)
        )
        arrays = [inputs.memory.of(limit, self.numbers.device).numpy() for limit in inputs.limits if inputs.memory]
        memories = [limit.remembered(array.tolist()) for limit, array in zip(inputs.limits, arrays)]
        norm, skip, inverse, clip, overflow = decide(power_sum, scale, found_inf, loss, memories, inputs)
        if not clip >= 0:
            raise GradientError(f"{inputs.limits[-1]} clips gradients to a norm of {clip}; nothing was updated")
        control = self.numbers.numpy()
        control[:] = norm, skip, inverse, scale is not None, clip, control[SKIPPED] + skip
        for limit, array, memory in zip(inputs.limits, arrays, memories):
            array[:] = limit.numbers_of(memory)
        if inputs.overflow is not None:
            inputs.overflow.fill_(float(overflow))

    def launches(self, inputs: StepInputs) -> list[Any]:
        """Return the first launches of `update`, if kernels write the numbers."""
        if self._kernels is None or inputs.is_trivial:
            return []
        inputs = replace(inputs, overflow=self.overflow if inputs.check_overflow else None)
        return [self._kernels.decision_launch(decide, self.numbers, inputs, self.launchers)]

    def build(self, inputs: StepInputs) -> None:
        """Build the kernels for such decisions, if kernels make them."""
        if self._kernels is not None and not inputs.is_trivial:
            self._kernels.decide_on_device(decide, self.numbers, inputs, self.launchers, build_only=True)


class Deciders:
    """The devices and ranks that decide a plan's steps together, and the kind of their last decision.

    Args:
        engines: the plan's engines.
        controls: the control of each device.
        memory: the memory that holds the state.
    """

    def __init__(self, engines: Sequence[DeviceEngine], memory: StateMemory) -> None:
        self.engines = engines
        self.controls: list[Any] = list(dict.fromkeys(engine.control for engine in engines))  # one per device
        self.ranks: Any = None  # the ranks that decide together; None for a single rank
        self.sends = False  # whether update passes send messages to other ranks
        self._norms, self._memory = list(dict.fromkeys(engine.norm for engine in engines)), memory
        is_alone = len(self._norms) == 1 and type(memory).power_sums is StateMemory.power_sums
        self.norm = self._norms[0] if is_alone else None  # the norm pass, if a single pass gives the norm
        self.sums_in_tiles = len(self._norms) == 1 and self._norms[0].counts_once
        """Whether the decision's launch may sum the tiles of the norm pass; settled at the first such step."""
        self.built_ahead: set[bool] = set()  # for steps that unscale, and that do not: whether their kernels were built
        self.kind: Any = None  # kind of the last decision: the part of its inputs that passes depend on
        self.is_trivial = False  # whether the control numbers are of a step without clip, scale or skip

    def power_sum(self) -> torch.Tensor:
        """Return the sum of squares of this rank's gradients, float64[1], on an accelerator if any engine has one."""
        return combined(self._memory.power_sums(self._norms)) if self.norm is None else self.norm.sum_squares()

    def power_sum_of_ranks(self) -> torch.Tensor | None:
        """Return the sum of squares of all ranks' gradients, float64[1]; None without engines."""
        if not self.engines:
            return None
        total = self.power_sum().reshape(1)
        if self.ranks is not None:
            total = total.clone()
            self.ranks.add(total)
        return total

    def partials(self) -> Partials | None:
        """Return the sums of squares per tile, if the decision's launch can add them up."""
        # With several ranks, the norm is reduced before the decision's launch.
        sums = self._norms[0].partials() if self.sums_in_tiles and self.ranks is None else None
        self.sums_in_tiles = sums is not None
        return sums

    def launches(self, inputs: StepInputs) -> list[Any]:
        """Return the launches of norm and decision, if a single engine decides alone."""
        if self.ranks is not None or len(self.engines) > 1:
            return []
        launches = []
        if inputs.needs_norm:
            norm = self._norms[0].tiles_launch() if self.sums_in_tiles else None
            if norm is None:
                return []
            launch, sums = norm
            launches.append(launch)
            inputs = replace(inputs, partials=sums)
        return [*launches, *self.controls[0].launches(inputs)]


class DataParallelRanks:
    """The ranks of every DistributedDataParallel around an optimizer's parameters, including wrappers made later."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._number = optimizer.control.number
        self._reductions: dict[Any, ReductionGroup] = {}
        self._own: set[int] = set()
        self._wrappers: list[Any] = [
            weakref.ref(wrapper) for wrapper in wrappers_around(self.holds) if kind_of(wrapper) == DDP
        ]
        follow_wrappers(self)

    def holds(self, param: Any) -> bool:
        """Whether an object is a parameter of the optimizer."""
        optimizer = self._optimizer()
        if optimizer is not None and not self._own:
            self._own = set(map(id, params_of(optimizer)))
        return id(param) in self._own

    def wrapped(self, wrapper: torch.nn.Module, kind: str) -> None:
        """Track a DistributedDataParallel under construction."""
        if kind == DDP:
            self._wrappers.append(weakref.ref(wrapper))

    def average(self, values: torch.Tensor) -> None:
        """Average numbers over the ranks, in place."""
        self._own = set()  # groups may change before the next wrapper is made
        self._wrappers = [reference for reference in self._wrappers if reference() is not None]
        groups = {wrapper.process_group for reference in self._wrappers if (wrapper := reference()) is not None}
        self._reductions = {
            group: self._reductions.get(group) or ReductionGroup([group], number=self._number) for group in groups
        }
        for group in sorted(groups, key=dist.get_process_group_ranks):
            self._reductions[group].average(values)


class StepControl:
    """The decisions of an optimizer's steps: their inputs, and memory across steps."""

    def __init__(self, policy: StepInputs) -> None:
        self.policy, self._constants = policy, vars(policy)  # the inputs that stay constant over steps
        self.history = StepHistory()
        self.numbers: torch.Tensor | None = None  # control numbers of the last step; the next step continues them
        self.checks_overflow = False  # set by `GradScaler` for one step: nonfinite gradients are an overflow
        self.gradients_scaled: bool | None = None  # set by `GradScaler`: whether gradients carry a loss scale
        self.joint: JointGradNorm | None = None  # the norm shared with other optimizers
        self.copies: DataParallelRanks | ReductionGroup | None = None
        """The ranks with copies of the parameters and other data; None until needed."""
        self.has_sent = False  # whether a step has compared its tag with other ranks; used if passes send messages
        self.number: int | None = None  # index among optimizers with the same ranks, see `assign_number`
        self.flat_part = ""  # label of the first piece of an FSDP1 flat parameter, for messages

    def __getstate__(self) -> dict[str, Any]:
        return {"policy": self.policy, "history": self.history, "numbers": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"])  # type: ignore[misc]
        vars(self).update(state)

    def assign_number(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Number the optimizer among those that send numbers to the same ranks, if it sends and has no number yet."""
        if self.number is not None or not (dist.is_available() and dist.is_initialized()):
            return
        sharded = (param for group in groups for param in group["params"] if is_distributed(param))
        param: Any = next(sharded, None)
        if param is not None:
            self.number = next_number(tuple(param.device_mesh.mesh.flatten().tolist()))
        elif self.uses_loss(groups):
            self.number = next_number("losses")

    def needs_norm(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a step needs the gradient norm: for a clip, a skip, or a scaler's overflow check."""
        clips = any(group.get("max_grad_norm") is not None for group in groups)
        return clips or self.joint is not None or self.checks_overflow or self.policy.needs_norm

    def limits(self, groups: Sequence[Mapping[str, Any]]) -> tuple[Limit, ...]:
        """Return the limits of steps; a limit that clips is shared by its groups and is the last."""
        limits = [group["max_grad_norm"] for group in groups if isinstance(group.get("max_grad_norm"), Limit)]
        above, clips = self.policy.limits, tuple(dict.fromkeys(limits))
        if len(clips) > 1:
            raise ValueError(
                f"Invalid max_grad_norm: {clips[0]} in one param group and {clips[1]} in another; all groups are "
                "clipped by one global norm, so pass the same limit, or None"
            )
        if above and clips and type(above[0]).__name__ == type(clips[0]).__name__:
            raise ValueError(
                f"Invalid max_grad_norm: {clips[0]} has the same name as skip_above; leave skip_above out: "
                "max_grad_norm may also skip"
            )
        return above + clips

    def inputs(self, optimizer: Optimizer) -> StepInputs | None:
        """Return the inputs of the next step; None if it does not clip, scale or skip."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if self.gradients_scaled and scale is None and found_inf is None:
            raise GradientError(
                "the gradients still carry a loss scale: call scaler.step(optimizer) instead of optimizer.step(), "
                "or scaler.unscale_(optimizer) before it; nothing was updated"
            )
        limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
        clips = any(limit is not None for limit in limits)
        needs_norm = clips or self.joint is not None or self.checks_overflow or self.policy.needs_norm
        if not needs_norm and scale is None and found_inf is None:
            return None
        inputs = StepInputs(**self._constants)
        inputs.needs_norm, inputs.check_overflow, inputs.memory = needs_norm, self.checks_overflow, self.history
        inputs.grad_scale, inputs.found_inf = scale, found_inf
        if any(isinstance(limit, Limit) for limit in limits):
            inputs.limits = self.limits(optimizer.param_groups)
        if inputs.limits:
            inputs.loss, self.history.loss = self.history.loss, None
        if self.joint is not None:
            scaled = scale is not None or found_inf is not None or inputs.check_overflow
            inputs.skip_nonfinite |= scaled or self.joint.skips
        return inputs

    def update_control(self, optimizer: Optimizer, deciders: Deciders, inputs: StepInputs | None = None) -> None:
        """Write the control numbers of every device for this step; runs the norm pass if needed."""
        inputs = inputs or self.inputs(optimizer) or StepInputs(**self._constants)
        engines, ranks = deciders.engines, deciders.ranks
        if not engines:
            if self.numbers is not None:
                self.numbers[NORM].zero_()
            return
        device = engines[0].device
        if inputs.grad_scale is not None or inputs.found_inf is not None or inputs.loss is not None:
            inputs.grad_scale, inputs.found_inf = _tensor(inputs.grad_scale, device), _tensor(inputs.found_inf, device)
            inputs.loss = None if inputs.loss is None else moved(inputs.loss, device)
        unscales = inputs.grad_scale is not None
        if unscales not in deciders.built_ahead:
            build_ahead(engines, unscales, partial(deciders.launches, inputs))
            deciders.built_ahead.add(unscales)
        if inputs.loss is not None:
            inputs.loss = self._mean_loss(optimizer, inputs.loss)
        if inputs.needs_norm:
            norm = deciders.norm
            if norm is None or norm.launch is None or deciders.sums_in_tiles or self.joint is not None:
                self._find_norm(optimizer, deciders, inputs)
            else:
                inputs.power_sum = norm.launch()
        self.history.has_norm = inputs.needs_norm
        if ranks is not None:
            has_more = inputs.loss is not None or inputs.found_inf is not None
            has_sent = True
            if has_more or inputs.power_sum is None or self.joint is not None:
                has_sent = _reduce_inputs(inputs, ranks, has_whole_norm=self.joint is not None)
            else:
                # The tensor is computed anew at every step and used only by the decision.
                ranks.add(inputs.power_sum)
            if deciders.sends and not (has_sent or self.has_sent):
                # Passes send messages too: their first message would follow the first write of a pass.
                ranks.add(torch.zeros(1, dtype=torch.float64, device=device))
            self.has_sent = True
        kind = (unscales, inputs.found_inf is not None, inputs.check_overflow, inputs.skip_nonfinite, inputs.limits)
        if kind != deciders.kind:
            deciders.kind = kind
            for control in deciders.controls:
                control.unscales, control.may_skip = unscales, inputs.may_skip
        captured = any([engine.graph_tables.in_use for engine in engines])
        if len(deciders.controls) > 1:
            # On all devices before the first decides: a new device starts with a copy of another's memory.
            for limit, control in product(inputs.limits, deciders.controls):
                self.history.of(limit, control.numbers.device)
        for control in deciders.controls:
            own = inputs if len(deciders.controls) == 1 else replace(inputs)
            if own is not inputs or (own.power_sum is not None and own.power_sum.device != device):
                for name in ("power_sum", "grad_scale", "found_inf", "loss"):
                    number = getattr(own, name)
                    if number is not None and number.device != control.numbers.device:
                        setattr(own, name, moved(number, control.numbers.device))
            own.overflow = control.overflow if own.check_overflow else None
            control.update(own, captured=captured)
        deciders.is_trivial = not captured and not inputs.needs_norm and inputs.is_trivial

    def _mean_loss(self, optimizer: Optimizer, loss: torch.Tensor) -> torch.Tensor:
        """Average the loss over the ranks with copies of the parameters, so that all ranks decide alike."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return loss
        if self.copies is None:
            self.copies = DataParallelRanks(optimizer)
        loss = loss.clone()  # may be the caller's tensor
        self.copies.average(loss)
        return loss

    def expected(self, optimizer: Optimizer, deciders: Deciders) -> StepInputs:
        """Return the inputs of a captured step; runs the norm pass if needed."""
        inputs = StepInputs(**self._constants)
        inputs.check_overflow, inputs.memory = self.checks_overflow, self.history
        inputs.needs_norm = self.needs_norm(optimizer.param_groups)
        inputs.limits = self.limits(optimizer.param_groups)
        if inputs.needs_norm:
            self._find_norm(optimizer, deciders, inputs)
        return inputs

    def _find_norm(self, optimizer: Optimizer, deciders: Deciders, inputs: StepInputs) -> None:
        """Run the norm pass, or use the joint norm."""
        if self.flat_part:
            refuse("a norm of the gradients", [FSDP1], self.flat_part, GradientError)
        if self.joint is not None:
            inputs.power_sum = self.joint.power_sum(optimizer)
            return
        inputs.partials = deciders.partials()
        if inputs.partials is None:
            inputs.power_sum = deciders.power_sum()

    def uses_loss(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a step's decision depends on its loss."""
        return any(outcome_of(limit).reads_loss for limit in self.limits(groups))

    def store_loss(self, loss: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        """Store the loss of a step for its decision."""
        if not self.uses_loss(groups):
            return
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise TypeError(f"Invalid loss: a tensor of shape {tuple(loss.shape)}; it must have one element")
            self.history.loss = local_part(loss.detach()).to(torch.float64).reshape(1)
        elif isinstance(loss, (int, float)):
            self.history.loss = torch.tensor([float(loss)], dtype=torch.float64, device="cpu")
        else:
            raise TypeError(f"Invalid loss: {loss!r}; it must be a number or a tensor of one element")

    def carry_to(self, engines: Sequence[DeviceEngine]) -> None:
        """Copy the norm and the number of skipped steps to new engines."""
        if self.numbers is not None:
            for engine in engines:
                for place in (NORM, SKIPPED):
                    engine.control.numbers[place].copy_(self.numbers[place])
        if engines:
            self.numbers = engines[0].control.numbers

    def save(self, state_dict: dict[str, Any]) -> None:
        """Put the memory of limits, unread, into the first group of a state_dict, and plain values for the limits."""
        groups = state_dict["param_groups"]
        limits, device = self.limits(groups), None
        if limits and (states := state_dict.get("state")):
            # torch's full_state_dict requires all tensors with dimensions on the same device.
            values = (value for state in states.values() if isinstance(state, Mapping) for value in state.values())
            tensors = (value for value in values if isinstance(value, torch.Tensor))
            device = max(tensors, key=torch.Tensor.dim, default=torch.empty(0, device="cpu")).device
        saved = self.history.save(limits, device)
        for place, group in enumerate(groups):
            own: dict[str, Any] = {LIMITS_KEY: saved} if saved and not place else {}
            if isinstance(clip := group.get("max_grad_norm"), Limit):
                own["max_grad_norm"] = {type(clip).__name__: dict(vars(clip))}
            groups[place] = {**group, **own}

    def load(self, groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the memory of limits from a loaded state_dict, and remove it from the groups."""
        first = saved[0] if saved else {}
        remembered = dict(first.get(LIMITS_KEY, {}))
        for name, keys in EARLIER_KEYS.items():
            if all(key in first for key in keys):
                remembered[name] = torch.tensor([float(first[key]) for key in keys], dtype=torch.float64, device="cpu")
        for group in groups:
            for key in (LIMITS_KEY, *chain.from_iterable(EARLIER_KEYS.values())):
                group.pop(key, None)
        self.history.load(self.limits(groups), remembered)


def _reduce_inputs(inputs: StepInputs, group: ReductionGroup, *, has_whole_norm: bool) -> bool:
    """Combine norm, loss and overflow of a step over all ranks; return whether any was given."""
    own_sum = None if has_whole_norm else inputs.power_sum
    numbers = [number for number in (own_sum, inputs.loss, inputs.found_inf) if number is not None]
    if not numbers:
        return False
    device = numbers[0].device
    if inputs.loss is not None:
        # The divisor of the mean loss.
        numbers.append(torch.ones_like(inputs.loss))
    together = torch.cat([moved(number, device).to(torch.float64).reshape(1) for number in numbers])
    group.add(together)
    if inputs.loss is not None:
        *together, count = together.split(1)
        together = torch.cat(together)
        inputs.loss = together[int(own_sum is not None) :][:1] / count
    if own_sum is not None:
        inputs.power_sum = together[:1]
    if inputs.found_inf is not None:
        inputs.found_inf = together[-1].to(inputs.found_inf.dtype)
    return True


def _tensor(value: Any, device: torch.device) -> torch.Tensor | None:
    """Return a scaler's number as a tensor on a device; torch's scaler gives a plain 0 if it checked no gradient."""
    if value is None:
        return None
    return moved(value, device) if isinstance(value, torch.Tensor) else torch.full((), float(value), device=device)


def with_limits(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state_dict with limits in place of the plain values of `StepControl.save`."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if not isinstance(saved := group.get("max_grad_norm"), dict):
            continue
        ((name, numbers),) = saved.items()
        if name not in Limit.known:
            raise StateError(f"max_grad_norm: the limit {name} is not known: import the module that defines it")
        # A notebook cell that runs again redefines its class: use the last class of each qualified name.
        classes = Limit.known[name]
        if len(classes) > 1:
            raise StateError(
                f"max_grad_norm: {len(classes)} limits are called {name} ({', '.join(classes)}): rename all but one"
            )
        group["max_grad_norm"] = next(iter(classes.values()))(**numbers)
    return {**state_dict, "param_groups": groups}


class JointGradNorm:
    """The gradient norm shared by several optimizers; made by `joint_norm`."""

    def __init__(self, optimizers: Sequence[Optimizer], group: Any) -> None:
        self._members = [weakref.ref(optimizer) for optimizer in optimizers]
        self._group = group
        self._total: torch.Tensor | None = None
        self._stepped: set[int] = set()

    def power_sum(self, optimizer: Optimizer) -> torch.Tensor:
        """Return the sum of squares of all members' gradients, float64[1]; computed by the first member that steps."""
        if self._total is None or id(optimizer) in self._stepped:
            self._total, self._stepped = self._sum(optimizer), set()
        self._stepped.add(id(optimizer))
        return self._total

    def _sum(self, stepping: Optimizer) -> torch.Tensor:
        members = self._live_members()
        carries = bool(stepping.control.gradients_scaled) or getattr(stepping, "grad_scale", None) is not None
        # A scaler marks only optimizers that it has stepped or unscaled.
        others = [member for member in members if member is not stepping]
        if any(other.control.gradients_scaled not in (None, carries) for other in others):
            raise GradientError(
                "joint_norm: gradients of only some of the optimizers carry a loss scale: unscale all of them or none "
                "before the first step; nothing was updated"
            )
        sums = [member.power_sum(prepared=member is stepping) for member in members]
        total = combined([own for own in sums if own is not None])
        if self._group is not None:
            total = total.clone()
            dist.all_reduce(total, group=self._group)
        return total

    @property
    def skips(self) -> bool:
        """Whether any member skips steps with nonfinite gradients; then all members do."""
        return any(member.control.policy.skip_nonfinite for member in self._live_members())

    def _live_members(self) -> list[Optimizer]:
        return [member for reference in self._members if (member := reference()) is not None]


def joint_norm(optimizers: Sequence[Optimizer], group: Any = None) -> None:
    """Let optimizers clip and skip by a joint norm: the norm of all their gradients together.

    The first optimizer that steps computes the norm from the gradients of all; the other optimizers use it, until
    some optimizer steps again. So all gradients must exist before the first step of a round, and each optimizer steps
    once per round. `max_grad_norm`, `skip_above` and `skip_nonfinite` of each optimizer apply to this norm, and
    `grad_norm` of each returns it. If an optimizer skips steps with nonfinite gradients, or a scaler runs the steps,
    all optimizers do. Param groups with `in_norm=False` are left out.

    Args:
        optimizers: at least two, each in no other joint norm.
        group: process group to reduce the norm over as well, for pipeline stages on different ranks. All its ranks must
            step alike.

    Raises:
        ValueError: for fewer optimizers (without a group), a repeated optimizer, or an optimizer with a joint norm.
        RuntimeError: for an overlapped optimizer whose backward has updated parameters since its last step.
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
    members = list(optimizers)
    if len(members) < (2 if group is None else 1) or len({id(optimizer) for optimizer in members}) < len(members):
        raise ValueError(f"joint_norm: got {len(members)} optimizers; pass two or more, each once")
    for place, optimizer in enumerate(members):
        if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "power_sum")):
            raise TypeError(f"joint_norm: optimizer {place} is a {type(optimizer).__name__}, not a tilestep optimizer")
        refuse("joint norm", optimizer.attached, f"joint_norm: optimizer {place}:")
        for name in optimizer.execution.applied_groups[:1]:
            raise RuntimeError(
                f"joint_norm: backward has updated {name} of optimizer {place} already: call joint_norm before "
                "backward or after step()"
            )
    joint = JointGradNorm(members, group)
    for optimizer in members:
        optimizer.control.joint = joint
        optimizer.attach(("joint norm",))
