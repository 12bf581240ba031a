"""The optimizer: torch's interface, with one launch for all parameters."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..compat import (
    clear_dynamo_frames,
    fake_mode_is_active,
    is_capturing,
    opaque,
    step_is_ordinary,
    step_is_watched,
)
from ..devices import synchronize_stream
from ..errors import BuildInterrupted, did_you_mean
from ..kernels.spec import NORM, SKIPPED
from ..linalg import limited_workspace, operations
from ..native.table import survey, taken_gradients
from ..placement import LOCAL, Placement, distribute
from ..placement.combinations import refuse
from ..placement.local import as_real, copy_into, local_part
from ..rules import Rule, registry
from ..rules.adaptive_clip import AdaGC
from ..rules.limits import Limit
from ..runtime import Stale, grad_dtype
from ..stats import Change, Reports, Stats, StepStats, require_no_options
from ..storage import kept_in_blocks, values_of
from ..timeline.timeline import refuse_taken_by_another
from .build import (
    Builder,
    build_plan,
    check_params,
    create_early,
    creates_all_states,
    flat_part,
    require_fake,
    spec_of,
)
from .checkpoint import load, mark_codes, save_numbers, states_of_groups, unchanged_on_error
from .control import StepControl, skip_policy
from .execution import AT_STEP, Execution
from .graphs import Graphs, push, require_checked, step_in_capture
from .groups import check_group, check_in_group, current_value, fill_group, find_rule, without_defaults
from .masters import Masters, MasterWeights, exact_values
from .memory import StateMemory
from .parameters import evaluation_error, param_states, params_of, shares_of
from .parking import Parking
from .plan import StepPlan
from .states import (
    TRAINING,
    ParameterState,
    StateDtype,
    WatchedState,
    compute_dtype,
    initialize,
    require_same_squares,
)
from .wrappers import forward_to_wrapped

_WIDE = (torch.float64, torch.complex128)
_COPIED = ("_rule", "_rules", "_given", "_unclipped", "control", "workspace_limit")  # copied in addition to torch's


class Optimizer(torch.optim.Optimizer):
    """An optimizer for any rule.

    Args:
        params: parameters, named parameters, or param groups, as in torch; a group may set its own `rule=`. DTensors
            may have any placements, on nested meshes or slices of one mesh, mixed with plain tensors: each rank updates
            its shards, and all ranks of the meshes take the same decisions.
        rule: the update rule, or the name of a registered rule.
        max_grad_norm: clip gradients inside the step to this global 2-norm; the gradients themselves do not change.
            `tilestep.ZClip()` clips outlier norms, a custom `tilestep.Limit` decides itself, `tilestep.AdaGC()` clips
            each tensor by its previous norms.
        master_weights: keep a float32 master and float32 state for bfloat16 and float16 parameters; the parameters are
            written in the same pass. For bfloat16 parameters also "remainder" (the lower 16 bits of the master),
            "kahan" (a bfloat16 compensation), and "int8" (an 8-bit correction).
        state_dtype: the format of states with the parameter's shape: a dtype or its name (`torch.bfloat16`, "int8"), a
            mapping from state names to formats, or a function from the parameter's name to any of these; None for the
            parameter's dtype, float32 with masters. Parameters of fewer than 4,096 elements, states that start as
            copies of parameters, and second moments of embeddings keep float32.
        rounding: "nearest" or "stochastic", for 16-bit parameters without masters, 16-bit states and blockwise states.
        seed: the seed of stochastic rounding. The random bits depend on seed, step, parameter index and element, and
            are the same on any device, mesh and execution; all ranks need the same seed. torch's generators are not
            used.
        skip_nonfinite: skip the step if a gradient is not finite: parameters, state and step count do not change.
        skip_above: also skip it if the global 2-norm of the unscaled gradients exceeds this number, a multiple of its
            running mean (`tilestep.TimesMean(3.0)`), or the mean of previous norms or losses by a number of standard
            deviations (`tilestep.Sigma(6)`), or as a custom `tilestep.Limit` decides. Implies `skip_nonfinite`.
        track_grad_norm: compute `grad_norm` at every step even if nothing else needs it.
        stats: `tilestep.Stats(...)` for statistics of every parameter; see `stats`.
        track_changes: record which weights change in steps; see `changes`.
        hyperparameters: the rule's hyperparameters.

    Raises:
        ValueError: for a hyperparameter out of its range.
        RuleError: for a rule that cannot be traced.
        GradientError: for parameters that overlap, share memory, are sparse or complex; with remainders, for parameters
            that are not bfloat16.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = tilestep.Optimizer([weight], "Lion", lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -1.0, 0.0])
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 1.5, 1.0]
    """

    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward_to_wrapped(cls)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` as torch does; the result is one opaque call for `torch.compile`.

        torch records every step for profilers, which costs more host time than a launch; this wrapper records only if a
        profiler runs.
        """
        hooked = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return (hooked if step_is_watched(self) else func)(self, *args, **kwargs)
            except BuildInterrupted as interrupt:
                raise interrupt.with_traceback(None) from None  # a user who presses Ctrl-C needs no long traceback

        return torch.compiler.disable(step, reason="an optimizer's step is one opaque call")

    execution: Execution = AT_STEP  # when updates run; `shard` and `overlap` replace it
    placement: Placement = LOCAL  # where plain parameters are placed; DTensors carry their own placement
    memory: StateMemory  # where state is stored; `offload` replaces it
    attached: tuple[str, ...] = ()  # the attached features, by their names in `combinations.REFUSED`
    reports: Reports | None = None  # statistics and changed weights
    _parking: Parking | None = None  # host memory for state, kept after its first use
    _unclipped: Rule | None = None  # the rule of groups with another clip than the optimizer's `AdaGC`, or without
    workspace_limit: int | None = None
    """The memory limit of matrix operations when the optimizer was made; None for the limit at the step."""

    @opaque
    def __init__(
        self,
        params: Any,
        rule: Rule | str,
        *,
        max_grad_norm: float | torch.Tensor | Limit | AdaGC | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        rounding: str = "nearest",
        seed: int = 0,
        skip_nonfinite: bool = False,
        skip_above: float | Limit | None = None,
        track_grad_norm: bool = False,
        stats: Stats | None = None,
        track_changes: bool = False,
        **hyperparameters: Any,
    ) -> None:
        self._rules: dict[str, Rule] = {}
        self._given = frozenset(hyperparameters)
        if isinstance(max_grad_norm, AdaGC):
            self._unclipped = find_rule(rule, self._rules)
            hyperparameters = {**max_grad_norm.numbers, **hyperparameters}
            rule, max_grad_norm = max_grad_norm.on(self._unclipped), None
        self._rule = self._adopt(rule)
        arguments = {
            **hyperparameters,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            "rounding": rounding,
            "seed": seed,
        }
        unknown = self._given.difference(self._rule.hyperparameters, self._rule.options)
        self._rule.check({key: hyperparameters[key] for key in unknown})
        check_group(self._rule, arguments)
        defaults = {**self._rule.hyperparameters, **self._rule.options, **arguments}
        without_defaults(defaults)
        self.control = StepControl(skip_policy(skip_nonfinite, skip_above, track_grad_norm))
        if self.reports is None and (stats is not None or track_changes is not False):
            self.reports = Reports(stats, track_changes)
        self.attached = () if self.reports is None else self.reports.attached
        self.plan: StepPlan | None = None  # the plan of steps; None until it is built
        self._masters: Masters | None = None
        self.graphs, self.memory = Graphs(), StateMemory()
        self.is_evaluating = self._ready = False
        self.averages: dict[torch.Tensor, int] = {}  # parameters that hold averages, with their versions then
        self.workspace_limit = operations.limit
        super().__init__(params, defaults)
        self._ready = True
        clear_dynamo_frames()
        check_params(self)
        self.control.assign_number(self.param_groups)

    def attach(
        self, names: Sequence[str], *, execution: Execution | None = None, offers: Mapping[str, Any] | None = None
    ) -> None:
        """Attach features by their names in `combinations.REFUSED`; `offers` become attributes of the optimizer."""
        for name in names:
            refuse(name, self.attached)
        self.attached += tuple(names)
        vars(self).update(offers or {}, **({} if execution is None else {"execution": execution}))

    def set_memory(self, memory: StateMemory) -> None:
        """Move all state to another memory, and build a plan for it."""
        if self.plan is not None:
            self.plan.masters.sync()
        self.memory = memory
        self._make_plan(ahead=True)

    @property
    def state(self) -> Any:
        """The state as in torch; waits for running updates."""
        if self.attached:
            self.execution.settle()
            self.memory.wait()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, as in torch, including gradients held by `shard`, `overlap` or `offload`.

        Args:
            set_to_none: as in torch; with False, parameters whose gradient was taken by `shard` or `overlap` in the
                last step get zeros.

        Raises:
            RuntimeError: after a backward that has updated parameters; call `step()` first.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([weight], lr=0.5)
            >>> weight.grad = torch.ones(2)
            >>> optimizer.zero_grad()
            >>> weight.grad is None
            True
        """
        if self.attached:
            self.execution.before_zero_grad()
            self.memory.drop_gradients()
            # An execution at the step takes no gradients, as in torch: a missing gradient was removed by other code.
            for param in () if set_to_none or self.execution is AT_STEP else self.execution.stepped(self):
                param.grad = torch.zeros_like(param, dtype=grad_dtype(param)) if param.grad is None else param.grad
        if set_to_none and step_is_ordinary():
            # torch's method loops over the parameters in Python.
            for group in self.param_groups:
                taken_gradients(group["params"])
        else:
            super().zero_grad(set_to_none)

    def _adopt(self, rule: Rule | str) -> Rule:
        adopted = find_rule(rule, self._rules)
        self._rules[adopted.name] = adopted
        return adopted

    @opaque
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group.

        Missing keys take the optimizer's defaults. In a group with its own rule they take that rule's defaults, and a
        warning lists the optimizer's arguments that do not apply; they do apply if both rules derive from the same
        base.

        Args:
            param_group: `params` and any hyperparameters; `rule` for its own rule; `in_norm=False` to exclude its
                gradients from the norm and the clip.

        Raises:
            ValueError: for a hyperparameter out of its range.
            GradientError: for parameters that cannot be updated. Nothing is changed then.

        Example:
            >>> import torch, tilestep
            >>> first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
            >>> optimizer = tilestep.AdamW([first], lr=1e-3)
            >>> optimizer.add_param_group({"params": [second], "rule": "Lion", "lr": 1e-4})
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.001, 0.0001]
        """
        with unchanged_on_error(self):
            self.execution.add_param_group(param_group, self._add_param_group)
            # Offloaded state is allocated immediately: gradients may be moved to it before any step.
            if self._ready and (self.execution.creates_all_states or not self.memory.on_device):
                self.rebuild(ahead=True)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = dict(param_group)
        require_no_options(group)
        rule = group.get("rule", self._rule)
        if group.get("in_norm") is False and group.setdefault("max_grad_norm", None) is not None:
            raise ValueError("a param group with in_norm=False is not clipped: it takes no max_grad_norm")
        if isinstance(clip := group.get("max_grad_norm"), AdaGC):
            rule = clip.on(find_rule(rule, self._rules))
            group = {**clip.numbers, **group, "rule": rule, "max_grad_norm": None}
        elif self._unclipped is not None and "max_grad_norm" in group and "rule" not in group:
            group["rule"] = rule = self._unclipped
        rule = self._adopt(rule)
        if "rule" in group:
            group["rule"] = rule.name
        own = fill_group(group, rule, self._rule, self.defaults, self._given)
        # The optimizer's defaults were checked in the constructor.
        unchecked = {key: group[key] for key in param_group} if rule is self._rule else group
        check_in_group(len(self.param_groups), check_group, rule, unchecked)
        super().add_param_group(group)
        if self.reports is not None:
            self.reports.watch(group["params"])
        if rule is not self._rule:
            for key in {*self._rule.hyperparameters, *self._rule.options}.difference(own, param_group):
                del group[key]
        without_defaults(group)
        if self._ready:
            check_params(self)

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a param group.

        Args:
            group: one of `param_groups`.

        Raises:
            ValueError: if the group's rule was changed to a name that no group was created with.

        Example:
            >>> import torch, tilestep
            >>> optimizer = tilestep.Lion([torch.nn.Parameter(torch.zeros(2))])
            >>> optimizer.rule_of(optimizer.param_groups[0]).name
            'Lion'
        """
        if "rule" not in group:
            return self._rule
        name = group["rule"]
        if name not in self._rules:
            raise ValueError(
                f"a param group's rule was set to {name!r}, which no group of the optimizer was created with; pass it "
                "to add_param_group or the constructor"
            )
        return self._rules[name]

    @property
    def applied_groups(self) -> tuple[str, ...]:
        """The groups that backward has updated since the last step, for an optimizer overlapped with backward.

        After a failed backward, the groups updated before the failure.

        Raises:
            AttributeError: for an optimizer that is not overlapped.

        Example:
            >>> import torch, tilestep
            >>> model = torch.nn.Linear(2, 2)
            >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.1), model, during="backward")
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.applied_groups
            ('weight to bias',)
            >>> optimizer.step()
            >>> optimizer.applied_groups
            ()
        """
        if "overlap" not in self.attached:
            raise AttributeError("applied_groups exists only on overlapped optimizers; see tilestep.overlap")
        return self.execution.applied_groups

    def _make_plan(self, *, ahead: bool) -> StepPlan:
        """Build a plan, and missing state, for the current parameters; see `build_plan`."""
        # State created during an evaluation under inference_mode must be writable in steps.
        if self.plan is not None:
            self.plan.require_whole()
        with ExitStack() as arrivals, torch.inference_mode(False), torch.no_grad(), self.execution.building_plan():
            self.drop_plan()
            self.control.flat_part = flat_part(self)
            self.control.assign_number(self.param_groups)
            with limited_workspace(self.workspace_limit):
                self.plan = plan = build_plan(self, arrivals, ahead=ahead)
            self.placement.set_ranks(plan)
            plan.masters.carry(self._masters)
            if self.reports is not None:
                self.reports.attach(plan, self, spec_of)
            self._masters = plan.masters
            self.control.carry_to(plan.engines)
            # Replaced tensors may belong to another stream, which reuses their memory once they are dropped.
            for engine in plan.engines:
                synchronize_stream(engine.device)
            return plan

    def drop_plan(self) -> None:
        """Drop the plan; graphs that read its tables are stale."""
        self.graphs = self.graphs.without(self.plan)
        self.plan = None

    def fitting_plan(self, *, ahead: bool = False) -> StepPlan:
        """Return the plan, rebuilt if groups, parameters or states have changed; see `Basis.fits` and `build_plan`."""
        plan = self.plan
        fits = plan is not None and plan.basis.fits(self) and not (ahead and plan.basis.omits_trainable)
        return plan if fits and plan is not None else self.rebuild(ahead=ahead)

    def rebuild(self, *, ahead: bool = False) -> StepPlan:
        """Replace the plan; `ahead` also creates all missing states."""
        with unchanged_on_error(self), require_same_squares(self):
            return self._make_plan(ahead=ahead)

    def _rebuild_prepared(self) -> StepPlan:
        """Rebuild and refresh the plan; a failure leaves no new state."""
        with unchanged_on_error(self):
            plan = self.rebuild()
            try:
                plan.refresh()
            except Stale:  # kernels for these gradients alone failed to build: the next plan avoids them
                plan = self.rebuild()
                plan.refresh()
            return plan

    def set_states(
        self, states: Mapping[Any, Any], ahead: Collection[Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replace the states by a checkpoint's, with its groups; states in `ahead` start at their first step."""
        self.drop_plan()
        # If a parameter and its master in the checkpoint disagree, the parameter's value wins.
        self._masters = None
        # Averages are not training weights; a parameter written since `eval()` holds the checkpoint's weights.
        for param, version in self.averages.items():
            holder = self.placement.holder(param)
            if TRAINING in self.state[param] and TRAINING not in states.get(param, ()) and _version(holder) == version:
                copy_into(holder, self.state[param][TRAINING])
                torch.autograd.graph.increment_version(holder)
        self.state = state = WatchedState(dict)
        state.adopt(states, ahead)
        self.control.load(self.param_groups, groups)
        self._note_averages()

    @property
    def grad_norm(self) -> torch.Tensor:
        """The global 2-norm of the last step's unscaled gradients, a scalar on the device; reading it waits for the
        device.

        The dtype is float64 if a parameter is float64, otherwise float32; the norm is inf beyond the range of that
        dtype, as in torch. It is available if a group has `max_grad_norm`, the optimizer skips steps,
        `tilestep.GradScaler` runs the step, or `track_grad_norm=True`.

        Raises:
            RuntimeError: if the last step did not compute it, and before the first step.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(2))
            >>> optimizer = tilestep.SGD([weight], lr=0.5, max_grad_norm=1.0)
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> optimizer.grad_norm
            tensor(5.)
        """
        if not self.control.history.has_norm and (self.plan is None or self.plan.engines):
            raise RuntimeError(
                "grad_norm has not been computed; create the optimizer with track_grad_norm=True or max_grad_norm, "
                "and call step() first"
            )
        control = self.control.numbers
        wide = any(param.dtype in _WIDE for param in params_of(self))
        dtype = torch.float64 if wide else torch.float32
        return torch.zeros((), dtype=dtype, device="cpu") if control is None else control[NORM].to(dtype, copy=True)

    @property
    def skipped_steps(self) -> torch.Tensor:
        """The number of steps skipped so far, an int64 scalar on the device; reading it waits for the device.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = tilestep.SGD([weight], lr=0.5, skip_nonfinite=True)
            >>> weight.grad = torch.tensor([float("inf")])
            >>> optimizer.step()
            >>> int(optimizer.skipped_steps), weight.item()
            (1, 0.0)
        """
        control = self.control.numbers
        return torch.zeros((), dtype=torch.int64, device="cpu") if control is None else control[SKIPPED].to(torch.int64)

    def overflow_flags(self) -> dict[torch.device, torch.Tensor]:
        """For scalers, after a step: device and overflow flag, a float32 scalar, 1 or 0; empty without gradients."""
        if not self.execution.had_gradients(self):
            return {}
        controls = self._current_plan().deciders.controls
        return {controls[0].numbers.device: controls[0].overflow} if controls else {}

    def power_sum(self, *, prepared: bool = False) -> torch.Tensor | None:
        """Return the gradients' sum of squares as a step computes it, float64[1]; `prepared` skips the refresh."""
        if not prepared:
            self.execution.complete_gradients(self)
        elif self.plan is not None:
            return self.plan.deciders.power_sum_of_ranks()
        plan = self.prepared()
        total = plan.deciders.power_sum_of_ranks()
        plan.release()
        return total

    def current(self, name: str, group: int = 0) -> torch.Tensor:
        """A hyperparameter of a param group as used by the last step, as a device scalar, without a device sync.

        Before the first step, a function of the step gives the value of the first step. A plain number is read now.

        Args:
            name: name of the hyperparameter; `betas[0]` for an entry of a tuple.
            group: index of the param group.

        Returns:
            A float64 scalar on the device of the group's parameters, a copy.

        Raises:
            KeyError: for a hyperparameter that the group does not have.
            TypeError: for a hyperparameter that is not a number.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = tilestep.SGD([weight], lr=lambda step: 0.5 / step)
            >>> weight.grad = torch.ones(1)
            >>> for _ in range(2):
            ...     optimizer.step()
            >>> optimizer.current("lr").item()
            0.25
        """
        chosen = self.param_groups[group]
        return current_value(chosen, self.execution.step_of(self, chosen), name)

    @property
    def stats(self) -> StepStats:
        """The statistics of the last measured step, a table on the device; empty before that. See `tilestep.Stats`.

        Raises:
            RuntimeError: if the optimizer was made without `stats`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> float(optimizer.stats["weight"]["grad_norm"])
            5.0
        """
        if self.reports is None:
            raise RuntimeError("stats: create the optimizer with stats=tilestep.Stats(every=...)")
        return self.reports.stats

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite, or None. Waits for the device.

        The first in the first measured step with such a gradient, even if it was skipped; later steps do not change the
        answer. If all measured steps were finite, the current gradients are checked. For DTensors and after `shard` all
        ranks must call it.

        Raises:
            RuntimeError: if the optimizer was made without `stats`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([float("nan")])
            >>> optimizer.first_nonfinite()
            'weight'
        """
        if self.reports is None:
            raise RuntimeError("first_nonfinite: create the optimizer with stats=tilestep.Stats(every=...)")
        sharers = self.placement.sharers(params_of(self)) if self.plan is None else self.plan.sharers
        return self.reports.first_nonfinite(self.param_groups, self._present_gradients, sharers)

    @torch.no_grad()
    def _present_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters with this rank's shares of their gradients."""
        self.execution.complete_gradients(self)
        return self.memory.present_gradients(shares_of(self))

    def changes(self, *, clear: bool = True, gather: bool = False) -> list[Change]:
        """The stored weights whose bits have changed since the beginning, or since the list was last cleared.

        A weight is also listed if a later step has changed it back. Skipped steps change nothing. A parameter is listed
        in full if its version counter or its memory shows a write by other code. The host waits once for the device.

        Args:
            clear: start a new list after this call.
            gather: for DTensors and after `shard`: return all ranks' changes on every rank (all ranks must call it);
                otherwise the changes of this rank's parts.

        Returns:
            For each changed parameter: its name, if parameters were named, else `"group.index"`; flat indices into the
            logical tensor, int32 (int64 beyond 2**31 elements); and the new values. Indices are ascending, except
            without `gather` for a DTensor that is sharded along another dimension than the first, and for a piece of a
            tensor in another memory format (channels_last).

        Raises:
            RuntimeError: if the optimizer was made without `track_changes=True`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, track_changes=True)
            >>> weight.grad = torch.tensor([0.0, 1.0, 0.0, 2.0])
            >>> optimizer.step()
            >>> for name, indices, values in optimizer.changes(clear=True):
            ...     print(name, indices.tolist(), values.tolist())
            weight [1, 3] [0.5, 0.0]
            >>> optimizer.changes()
            []
        """
        if self.reports is None or self.reports.changes is None:
            raise RuntimeError("changes: create the optimizer with track_changes=True")
        if not self.memory.on_device:
            self._current_plan()  # `sync_masters` writes to parameters with host copies; loading has dropped the plan
        self.execution.sync_masters(self)
        return self.reports.changes.read(clear=clear, gather=gather)

    def _current_plan(self) -> StepPlan:
        return self.plan or self.rebuild(ahead=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss; called with gradients enabled.
            loss: the loss of this step, a number or a tensor with one element, for limits such as `tilestep.Sigma`; by
                default the closure's loss. The host does not read it.

        Returns:
            The closure's loss, or None.

        Raises:
            GradientError: for a gradient that cannot be used; nothing is changed then.
            RuntimeError: after `eval()`, while the parameters hold the weights to evaluate.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([weight], lr=0.5)
            >>> weight.square().sum().backward()
            >>> optimizer.step()
            >>> weight.tolist()
            [0.0, 0.0]
        """
        evaluated = None
        if closure is not None:
            with torch.enable_grad():
                evaluated = closure()
        loss, history = evaluated if loss is None else loss, self.control.history
        if loss is not None:
            self.control.store_loss(loss, self.param_groups)
        try:
            if self.execution is AT_STEP:
                self.update()
            else:
                self.execution.step(self.update)
        except BaseException:
            # The next step must not use inputs of this step.
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            history.loss = None
            raise
        unused = loss is not None and history.loss is not None
        history.loss = None
        if unused and self.param_groups and self._current_plan().engines:
            raise RuntimeError(
                "step(loss=...): the step was decided before the call, in backward or without gradients, so the "
                "decision does not use this loss; leave it out"
            )
        return evaluated

    def update(self, *, unmoved: bool = False) -> None:
        """Update every parameter that has a gradient, regardless of the execution.

        `unmoved`: no tensor was moved or written since the last step; versions are not incremented then.
        """
        plan = self.plan
        if self.is_evaluating:
            raise evaluation_error("step()")
        if not unmoved and is_capturing():
            step_in_capture(self, self.reports)
            return
        ordinary = step_is_ordinary()
        if not ordinary and fake_mode_is_active():
            require_fake(self)
        if self.memory.timeline is not None:
            self.memory.record_gradients(params_of(self))
        inputs = self.control.inputs(self)
        try:
            if plan is None:
                raise Stale
            unmoved = plan.refresh(optimizer=self, inputs=inputs, unmoved=unmoved and self.reports is None)
        except Stale:
            plan, unmoved = self._rebuild_prepared(), False
        if plan.active_set_changed or not plan.engines:
            refuse_taken_by_another(plan.without_gradients(), self.memory.timeline)
            plan.active_set_changed = False
        if plan.ahead:
            plan.init_states(self, all_of_them=creates_all_states(self))
        plan.run(self, inputs, marked=not ordinary, counts_versions=not unmoved, reports=self.reports)

    def prepared(self) -> StepPlan:
        """Return an up-to-date plan."""
        plan = self.plan
        if plan is not None:
            try:
                plan.refresh(optimizer=self)
                return plan
            except Stale:
                pass
        return self._rebuild_prepared()

    def prepare_capture(self) -> None:
        """Build plan, tables and kernels of a step, and copy hyperparameters, before your own CUDA graph captures it.

        This replaces a warm-up step. A step with a scaler uses different kernels: run one such step before the capture.
        After this call `push()` no longer checks graphs captured earlier. `tilestep.capture(optimizer)` needs neither.

        Raises:
            CaptureError: for a step that a graph cannot contain.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2, device="cuda" if torch.cuda.is_available() else "cpu"))
            >>> optimizer = tilestep.SGD([weight], lr=0.5)
            >>> weight.grad = torch.ones_like(weight)
            >>> if torch.cuda.is_available():
            ...     optimizer.prepare_capture()
            ...     graph = torch.cuda.CUDAGraph()
            ...     with torch.cuda.graph(graph):
            ...         optimizer.step()
            ...     graph.replay()
        """
        self.execution.prepare_capture(self)

    def push(self) -> None:
        """Copy changed hyperparameters to the device, before you replay your own CUDA graph with a step.

        Call it outside the graph. It does not wait for the device. It also applies writes of other code to parameters
        with a master. `tilestep.capture(optimizer).replay()` does this itself.

        Raises:
            CaptureError: if the graph is stale: parameters moved, a `state_dict` was loaded, a group was added, a flag
                changed, or gradients of `prepare_capture` were freed. Nothing is copied then.
            ValueError: for a hyperparameter that is NaN.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([weight], lr=0.5)
            >>> optimizer.param_groups[0]["lr"] = 0.25
            >>> optimizer.push()  # and then graph.replay()
        """
        with self.execution.for_graph(self, alone=False, replays=True):
            push(self)

    @opaque
    def eval(self) -> None:
        """Put the weights to evaluate and save into the parameters, for rules that keep an average.

        The training weights stay in the optimizer's state, and so in its `state_dict`, until `train()`; `step()` raises
        until then. Parameters of other rules do not change.

        Example:
            >>> import torch, tilestep
            >>> from tilestep.rules.compose import ema
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = tilestep.Optimizer([weight], ema(tilestep.registry["SGD"], 0.75), lr=1.0)
            >>> weight.grad = torch.tensor([-1.0])
            >>> optimizer.step()
            >>> optimizer.eval()
            >>> weight.item()
            0.25
            >>> optimizer.train()
            >>> weight.item()
            1.0
        """
        self.train(False)

    def _swap_weights(self, mode: bool) -> None:
        if mode and self.is_evaluating:
            swap_out_averages(self)
        elif not mode:
            if self.state and self.plan is None:
                self.rebuild()
            try:
                swap_in_averages(self)
            except BaseException:
                swap_out_averages(self)
                raise

    @opaque
    def train(self, mode: bool = True) -> None:
        """Put the training weights back into the parameters, bit for bit as before `eval()`.

        Args:
            mode: False does the same as `eval()`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = tilestep.Optimizer([weight], tilestep.ema(tilestep.registry["SGD"], 0.75), lr=1.0)
            >>> weight.grad = torch.tensor([-1.0])
            >>> optimizer.step()
            >>> optimizer.eval()
            >>> optimizer.train()
            >>> weight.item()
            1.0
        """
        # Frameworks call this before every backward; most rules have no averages.
        has_averages = any(self.rule_of(group).evaluation is not None for group in self.param_groups)
        if self.is_evaluating or has_averages:
            self.execution.swap_weights(partial(self._swap_weights, mode))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context manager in which the parameters hold the weights to evaluate; see `eval`.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = tilestep.Optimizer([weight], tilestep.ema(tilestep.registry["SGD"], 0.75), lr=1.0)
            >>> weight.grad = torch.tensor([-1.0])
            >>> optimizer.step()
            >>> with optimizer.averaged():
            ...     print(weight.item())
            0.25
        """
        was_evaluating = self.is_evaluating
        self.eval()
        try:
            yield
        finally:
            self.train(not was_evaluating)

    @opaque
    def state_dict(self) -> dict[str, Any]:
        """The state and param groups, with torch's keys and shapes.

        With limits, the first group also contains their memory, as device tensors (`limits`). A hyperparameter that is
        a function of the step is saved as its value at the last step. Loading keeps the optimizer's functions, as
        loading a torch scheduler keeps its lambdas.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.AdamW([weight])
            >>> weight.grad = torch.ones(2)
            >>> optimizer.step()
            >>> sorted(optimizer.state_dict()["state"][0])
            ['exp_avg', 'exp_avg_sq', 'step']
        """
        return self.execution.state_dict(self.plain_state_dict)

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the `state_dict`, regardless of the execution."""
        if not self.attached:
            create_early(self)
        initialize(self)
        if self.plan is not None:
            if self.plan.interruption:
                warnings.warn(f"state_dict(): {self.plan.interruption}", stacklevel=3)
            # Masters of parameters that other code has written are saved as the next step would read them.
            self.plan.masters.sync()
        with states_of_groups(self):
            state_dict = super().state_dict()
        if isinstance(state_dict.get("state"), dict):
            # torch's loaders expect plain dicts.
            states = state_dict["state"].items()
            plain = {key: dict(value) if isinstance(value, ParameterState) else value for key, value in states}
            state_dict = {**state_dict, "state": plain}
            mark_codes(self, state_dict)
        save_numbers(self, state_dict["param_groups"])
        self.control.save(state_dict)
        return state_dict

    @opaque
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, of this optimizer or of torch's optimizer of the same name.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            StateError: for other shapes or another rule. Nothing is changed then.
            ValueError: for other groups. Nothing is changed then.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> weight.grad = torch.ones(2)
            >>> before = torch.optim.AdamW([weight])
            >>> before.step()
            >>> optimizer = tilestep.AdamW([weight])
            >>> optimizer.load_state_dict(before.state_dict())
            >>> optimizer.state[weight]["step"]
            tensor(1.)
        """
        self.execution.load_state_dict(state_dict, partial(load, self))

    @opaque
    def reset_state(self) -> None:
        """Reset all states to their initial values and step counts to 0, in place.

        Masters, parameters, hyperparameters, the memory of limits and the loss scale are kept. Captured graphs stay
        valid. The host does not wait for the device, unless state is offloaded. States initialized from the parameter
        take its current value. With DTensors and after `shard` all ranks must call it.

        Raises:
            RuntimeError: after `eval()`, while the parameters hold the weights to evaluate.
            StateError: after a step that was interrupted between two of its passes.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.AdamW([weight])
            >>> weight.grad = torch.ones(2)
            >>> optimizer.step()
            >>> optimizer.reset_state()
            >>> optimizer.state[weight]["step"], optimizer.state[weight]["exp_avg"]
            (tensor(0.), tensor([0., 0.]))
        """
        if self.is_evaluating:
            raise evaluation_error("reset_state()")
        self._settle_states()
        initialize(self, again=True)

    def _settle_states(self) -> None:
        """Make states reflect all updates, and writes of other code to parameters."""
        self.execution.settle_everywhere()
        if self.plan is not None:
            self.plan.require_whole()
            self.plan.masters.catch_up()

    @opaque
    def park(self) -> None:
        """Move state and masters to page-locked host memory, and free their device memory, for other work on a GPU.

        `unpark()`, the next step or loading a checkpoint moves them back, with the same bits. Meanwhile `state` and
        `state_dict()` contain the host tensors. The host waits for the copies. Later calls reuse the host memory.
        torch's caching allocator keeps the freed memory for this process: `torch.cuda.empty_cache()` returns it to the
        device. Graphs of `tilestep.capture` become stale. State on a CPU does not change. With DTensors and after
        `shard` all ranks must call it.

        Raises:
            CaptureError: if a graph of your own has captured a step: it would write to freed memory.
            ValueError: for an offloaded optimizer.
            HostMemoryError: if host memory does not suffice. Nothing is changed then.
            StateError: after a step that was interrupted between two of its passes.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.AdamW([weight])
            >>> weight.grad = torch.ones(2)
            >>> optimizer.step()
            >>> optimizer.park()  # generate samples here
            >>> optimizer.state[weight]["exp_avg"].device
            device(type='cpu')
            >>> optimizer.step()
        """
        refuse("park", self.attached)
        require_checked(self.graphs, "park()")
        self._settle_states()
        parking = self._parking or Parking()
        if copied := parking.copy_state(self):
            # Graphs that check for staleness before replays no longer need the tables.
            self._parking, self.graphs, self.plan = parking, Graphs(), None
            if self._masters is not None:
                self._masters.drop_buffers()
            if self.reports is not None:
                self.reports.detach()
            for device in {part.device for part in copied}:
                synchronize_stream(device)

    @opaque
    def unpark(self) -> None:
        """Move state back to its device after `park()`.

        Raises:
            GradientError: for parameters that cannot be updated. Nothing is changed then.

        Example:
            >>> import tilestep
            >>> def wake(optimizer: tilestep.Optimizer) -> None:
            ...     optimizer.unpark()  # before the first step, which does it too
        """
        if self._parking is not None and self.plan is None:
            self.rebuild()

    def __getstate__(self) -> dict[str, Any]:
        joint = "an optimizer that shares its norm cannot be copied or pickled: save its state_dict()"
        if reason := self.execution.no_copy or self.memory.no_copy or joint * (self.control.joint is not None):
            raise TypeError(reason)
        if self.plan is not None:
            # As in a checkpoint: a copy does not know which parameters other code has written.
            self.plan.masters.sync()
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in _COPIED},
            **({} if self.reports is None else {"reports": Reports(self.reports.asked, self.reports.tracks)}),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.graphs = Graphs()
        self.attached = () if self.reports is None else self.reports.attached
        if self.reports is not None:
            for group in self.param_groups:
                self.reports.watch(group["params"])
        if "_rule" in state:
            self._ready = True
            self.plan = self._masters = None
            self.memory = StateMemory()
            self._note_averages()

    def _note_averages(self) -> None:
        """Record the parameters that hold weights to evaluate, with the versions of the tensors that steps update."""
        holder = self.placement.holder
        self.averages = {param: _version(holder(param)) for param, state in param_states(self) if TRAINING in state}
        self.is_evaluating = bool(self.averages)


_COMMON = {
    name: parameter.default
    for name, parameter in inspect.signature(Optimizer.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
"""The keyword arguments of every optimizer besides its rule's hyperparameters, with their defaults."""


_ARGUMENTS = f"""Args:
    params: parameters, named parameters, or param groups.
    {", ".join(_COMMON)}: as for `tilestep.Optimizer`; the others are the rule's hyperparameters.
"""


def _class_for(rule: Rule) -> type[Optimizer]:
    kinds = inspect.Parameter
    defaults = {"self": kinds.empty, "params": kinds.empty, **rule.hyperparameters, **rule.options, **_COMMON}
    plain = [key for key in ("self", "params", *rule.hyperparameters) if key not in rule.keyword_only]
    kind_of: dict[str, Any] = dict.fromkeys((*plain, *rule.positional), kinds.POSITIONAL_OR_KEYWORD)
    keyword = (*rule.keyword_only, *rule.options, *_COMMON)
    kind_of |= {key: kinds.KEYWORD_ONLY for key in keyword if key not in kind_of}
    signature = inspect.Signature([kinds(key, kind, default=defaults[key]) for key, kind in kind_of.items()])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            hints = [did_you_mean(key, signature.parameters) for key in kwargs if key not in signature.parameters]
            raise TypeError("; ".join([f"{rule.name}() {error}", *filter(None, hints)])) from None
        _, params, *rest = bound.arguments.items()
        Optimizer.__init__(self, params[1], rule, **dict(rest))

    __init__ = opaque(__init__)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    text = f"{inspect.cleandoc(rule.__doc__ or rule.name)}\n\n{_ARGUMENTS}"
    body = {"__init__": __init__, "__doc__": text, "__module__": "tilestep", "__qualname__": rule.name}
    return type(rule.name, (Optimizer,), body)


@functools.cache
def named_optimizers() -> dict[str, type[Optimizer]]:
    """Return the classes of the rules that are registered at the first call, by name."""
    return {name: _class_for(rule) for name, rule in registry.items()}


def _version(param: torch.Tensor) -> int:
    return survey([param, local_part(param)]).versions


@torch.no_grad()
def swap_in_averages(optimizer: Optimizer) -> None:
    """Write each average into its parameter, and the training weights into the parameter's state."""
    plan = optimizer.plan
    if plan is not None and not optimizer.is_evaluating:
        plan.masters.catch_up()
    initialize(optimizer)
    with nullcontext() if plan is None else plan.masters.writes.own():
        states = optimizer.state
        has_average = [share for share in shares_of(optimizer) if optimizer.rule_of(share.group).evaluation is not None]
        begun = [share for share in has_average if (own := states.get(share.param)) and TRAINING not in own]
        with ExitStack() as arrivals:
            planned = Builder(optimizer).planned(begun, states, arrivals)
        for one in planned:
            param, group, own = one.share.holder, one.share.group, one.state
            rule, state, local = optimizer.rule_of(group), states[one.share.param], local_part(param)
            part, buffers = as_real(local), dict[str, torch.Tensor]()
            compute = compute_dtype(part)
            for name in rule.state_names:
                blocks = kept_in_blocks(own, name)
                if blocks is not None or isinstance(own.get(name), torch.Tensor):
                    kept = own[name] if blocks is None else values_of(blocks, own, name, shape=part.shape)
                    buffers[name] = kept.to(part.device, compute)
            training = exact_values(part, own).to(part.device, compute)
            numbers = {**{key: group[key] for key in rule.hyperparameters}, "step": state["step"]}
            average = rule.evaluated(training, buffers, numbers)
            state[TRAINING] = distribute(local.detach().clone(), param)
            part.copy_(average)
            torch.autograd.graph.increment_version(param)
            optimizer.averages[one.share.param] = _version(param)
    optimizer.is_evaluating = True


@torch.no_grad()
def swap_out_averages(optimizer: Optimizer) -> None:
    """Restore the training weights, bit for bit."""
    plan = optimizer.plan
    with nullcontext() if plan is None else plan.masters.writes.own():
        for param, state in param_states(optimizer):
            if TRAINING in state:
                holder = optimizer.placement.holder(param)
                copy_into(holder, state[TRAINING])
                del state[TRAINING]
                torch.autograd.graph.increment_version(holder)
    optimizer.averages, optimizer.is_evaluating = {}, False


class AttachedType(type):
    """The metaclass of classes without objects: optimizers are instances by the features attached to them."""

    # Such a class lists names of `combinations.REFUSED` in `attached_as`.

    attached_as: Iterable[str] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Optimizer) and any(name in instance.attached for name in cls.attached_as)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__name__} is only for isinstance checks of optimizers: {cls.__doc__}")


if TYPE_CHECKING:
    Attached = Optimizer
else:
    Attached = object
"""The base of classes of that type; type checkers treat them as optimizers with more attributes."""


def resolve_optimizer(caller: str, optimizer: Optimizer | Callable[[], Optimizer]) -> Optimizer:
    """Return the optimizer itself, or the optimizer that a function makes."""
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller}() requires a tilestep optimizer, not {type(optimizer).__name__}")
    return optimizer
