"""The checks, one function each: a rule trains random parameters, and is compared with its formula in float64."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..devices import is_host
from ..errors import RuleError, StateError
from ..graph import GLOBAL_REDUCTIONS, Graph
from ..kernels.cache import compile_count
from ..optimizer import Optimizer
from ..optimizer.masters import MASTER_KEYS, exact_values, master_kind
from ..optimizer.states import TRAINING, compute_dtype, shape_of
from ..rules import Rule
from ..rules.protocol import at_step
from ..rules.scalars import precision_of
from ..runtime import graph_for
from ..stats import Stats
from ..storage import (
    MASTER_FORMATS,
    STATE_FORMATS,
    Storage,
    entries_of,
    is_coarse,
    kept_in_blocks,
    shape_of_entries,
    states_in_blocks,
    stored_in,
    values_of,
)
from .branches import Branches, late_counts

_STRAY = 2000
"""One element in this many may have a larger error: at a jump of the rule, rounding decides the side."""


class CheckFailure(Exception):
    """A check has failed; the message says how."""

    def __init__(self, text: str, buffer: str = "") -> None:
        super().__init__(text)
        self.buffer = buffer


@dataclass
class Snapshot:
    """A parameter, its gradient and its state before a step, as copies."""

    param: torch.Tensor  # input of the step: the master if there is one
    grad: torch.Tensor
    states: dict[str, torch.Tensor]  # state buffers by name
    step: float  # the count of the step

    @classmethod
    def of(cls, param: torch.Tensor, state: Mapping[str, Any]) -> Snapshot:
        """A snapshot of a parameter that has a gradient."""
        assert param.grad is not None
        own = {"step", *MASTER_KEYS, TRAINING}
        blocks = states_in_blocks(state)
        arrays = entries_of(state, blocks)
        names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        buffers = {
            name: _numbers(param, state, name).detach().clone()
            for name in (*names, *blocks)
            if name not in own and name not in arrays
        }
        return cls(exact_values(param, state), param.grad.detach().clone(), buffers, float(state["step"]) + 1)

    @classmethod
    def first(cls, param: torch.Tensor, rule: Rule, group: Mapping[str, Any]) -> Snapshot:
        """A snapshot before the first step, with initial states as declared by the rule."""
        assert param.grad is not None
        buffers = {}
        for name, start in rule.states.items():
            if start.shape not in ("param", "scalar") and param.dim() < 2:
                continue
            shape = () if start.shape == "scalar" else shape_of(start, param, param.shape)
            buffer = param.detach().new_empty(shape, dtype=start.dtype or compute_dtype(param))
            if start.init == "param":
                buffers[name] = buffer.copy_(param.detach())
            else:
                value = group[start.init] if isinstance(start.init, str) else start.init
                buffers[name] = buffer.fill_(float(at_step(value, 1.0)))
        exact = exact_values(param, {}) if master_kind(param.dtype, group) is None else param.detach().float()
        return cls(exact, param.grad.detach().clone(), buffers, 1.0)

    def round_states(self, state: Mapping[str, Any]) -> None:
        """Round initial states to their formats."""
        for name, value in self.states.items():
            if (blocks := kept_in_blocks(state, name)) is not None:
                self.states[name] = _stored_and_read(blocks, name, value)
            elif isinstance(state.get(name), torch.Tensor):
                self.states[name] = value.to(state[name].dtype).to(value.dtype)


def _stored_and_read(blocks: Storage, name: str, value: torch.Tensor) -> torch.Tensor:
    """Values of a state after a round trip through its format."""
    arrays = {
        array.name: value.new_empty(shape_of_entries(value.shape, array.elements), dtype=array.dtype)
        for array in blocks.arrays(name)
    }
    stored_in(blocks, arrays, name, value, shape=value.shape)
    return values_of(blocks, arrays, name, shape=value.shape)


def expected(
    rule: Rule, before: Snapshot, hyperparameters: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The new parameter and states, computed by the rule in float64."""
    buffers: list[torch.Tensor | None] = [before.param.to(dtype), before.grad.to(dtype)]
    for name in rule.state_names:
        state = before.states.get(name)
        wide = torch.float64 if rule.states[name].shape == "scalar" else dtype
        buffers.append(None if state is None else state.to(wide, copy=True))
    precision = torch.finfo(before.param.dtype).eps
    kept = precision_of.set(lambda _: precision)
    try:
        copies = [None if buffer is None else buffer.clone() for buffer in buffers]
        results = rule(*copies, **hyperparameters, step=before.step)
    finally:
        precision_of.reset(kept)
    named = dict(zip(("param", *rule.state_names), results))
    return {name: value.double() for name, value in named.items() if value is not None}


def _numbers(param: torch.Tensor, state: Mapping[str, Any], name: str) -> torch.Tensor:
    """The values of a state of any format."""
    blocks = kept_in_blocks(state, name)
    return state[name] if blocks is None else values_of(blocks, state, name, shape=param.shape)


def compare(
    rule: Rule,
    label: str,
    param: torch.Tensor,
    state: Mapping[str, Any],
    before: Snapshot,
    hyperparameters: Mapping[str, Any],
    coarse: bool = False,
) -> None:
    """Raise if a parameter or its state after a step differs from the formula."""
    if not param.numel():
        return  # formulas with extrema are undefined there
    compute = compute_dtype(param)
    wanted = expected(rule, before, hyperparameters, torch.float64)
    if not wanted["param"].isfinite().all() and before.param.isfinite().all():
        text = f"the rule's code in float64 makes {label} infinite or NaN at step {before.step:g}"
        raise CheckFailure(text, "param")
    # The effect of the last place of the gradient on a decomposition, which a second float64 run does not show.
    nudged = replace(before, grad=torch.nextafter(before.grad, before.grad * 2)) if coarse else before
    rough = expected(rule, nudged if compute is torch.float64 else before, hyperparameters, compute)
    exact = exact_values(param, state)
    kept_names = state.keys() | states_in_blocks(state)
    actual = {"param": exact, **{name: _numbers(param, state, name) for name in rule.state_names if name in kept_names}}
    masters = [kind(param.dtype) for kind in MASTER_FORMATS.values() if kind.key in state]
    precision = max(torch.finfo(exact.dtype).eps, 2.0**-16 if any(map(is_coarse, masters)) else 0.0)
    old = {"param": before.param, **before.states}
    for name, value in actual.items():
        if name not in wanted:
            raise CheckFailure(f"{name} of {label} is stored, but the rule returns None for it", name)
        right = wanted[name].to(value.device).expand(value.shape)
        blocks = None if name == "param" else kept_in_blocks(state, name)
        if blocks is not None:
            rounded = _stored_and_read(blocks, name, right)
            own, off = (float((kept.double() - right).square().sum()) for kept in (rounded, value))
            if not off <= 2 * own + 1e-12 * float(right.square().sum()):
                raise CheckFailure(
                    f"{name} of {label}, stored as {blocks}, is off by {off:.3g} at step {before.step:g} (a sum of "
                    f"squares), while rounding to the format is off by {own:.3g}",
                    name,
                )
            continue
        spread = (rough[name].to(value.device).expand(value.shape) - right).abs()
        if coarse and spread.numel():
            spread = spread.amax().expand(value.shape)
        kept, number, previous = torch.finfo(value.dtype), value.detach().double(), old[name].to(value.device).double()
        computed = 64 * torch.finfo(compute).eps * (right.abs() + previous.abs() + (right - previous).abs())
        stored = (precision if name == "param" else kept.eps) * right.abs() + kept.smallest_normal * kept.eps
        strays = ~((number - right).abs() <= stored + computed + 8 * spread)
        strays &= ~(number == right) & ~(number.isnan() & right.isnan())
        count = int(strays.sum())
        if count > number.numel() // _STRAY:
            place = int(strays.flatten().nonzero()[0])
            raise CheckFailure(
                f"{'the parameter' if name == 'param' else name} of {label} is {number.flatten()[place].item():.9g} at "
                f"step {before.step:g}, where the formula gives {right.flatten()[place].item():.9g} (element {place}; "
                f"{count} of {number.numel()} are off)",
                name,
            )
    if not MASTER_KEYS.isdisjoint(state) and not torch.equal(param.detach(), exact.to(param.device, param.dtype)):
        raise CheckFailure(f"{label} is not its float32 master rounded to {param.dtype}", "param")


DEVICE_NAMES = {"cpu": "C++", "cuda": "Triton"}

SHAPES = ((5, 7), (1300,), (), (3, 4, 5), (2, 3, 4, 5), (33, 2))
"""Shapes of most trials, if the rule supports them."""


@dataclass(frozen=True)
class Subject:
    """A rule under check."""

    rule: Rule
    overrides: Mapping[str, Any]  # of hyperparameters
    device: torch.device  # of the trial
    graphs: Mapping[int, Graph]  # its graph for each number of dimensions it takes

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyperparameters."""
        return {**self.rule.hyperparameters, **self.overrides}

    @property
    def spans_tensors(self) -> bool:
        """Whether a step depends on several tensors, so that the formula is valid for a single tensor only."""
        return any(value.operation in GLOBAL_REDUCTIONS for graph in self.graphs.values() for value in graph.values())

    @property
    def has_matrices(self) -> bool:
        """Whether the rule works on whole matrices."""
        from ..graph.lowering import is_matrix_work

        return any(is_matrix_work(value) for graph in self.graphs.values() for value in graph.values())

    def shapes(self, wanted: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[int, ...]]:
        """The wanted shapes that the rule supports; if none, small shapes with supported numbers of dimensions."""
        fitting = [shape for shape in wanted if len(shape) in self.graphs]
        return fitting or [(3,) * dims for dims in self.graphs]

    def line_of(self, buffer: str) -> str:
        """File and line at which the rule computes a buffer, otherwise of the rule."""
        for graph in self.graphs.values():
            if buffer in graph.outputs and graph.outputs[buffer].line:
                return graph.outputs[buffer].line
        return self.rule.where

    def keeps_graph(self, changes: Mapping[str, Any]) -> bool:
        """Whether the rule accepts these hyperparameters with the same graphs."""
        changed = {**self.hyperparameters, **changes}
        try:
            self.rule.check(changes)
            return all(graph_for(self.rule, changed, dims) is graph for dims, graph in self.graphs.items())
        except (ValueError, RuleError):
            return False


def draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normally distributed numbers, equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


class Training:
    """Parameters with one optimizer, or with an optimizer each if the rule spans tensors."""

    def __init__(
        self,
        subject: Subject,
        params: Iterable[torch.nn.Parameter],
        options: Mapping[str, Any] | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.subject = subject
        self.params = list(params)
        self.owner: list[Optimizer] = []
        self.steps = 0
        arguments = {**subject.overrides, **(options or {})}
        groups = [
            {"params": self.params[index :: 1 + len(groups)], **group} for index, group in enumerate([{}, *groups])
        ]
        if subject.spans_tensors:
            for index, param in enumerate(self.params):
                group = {**groups[index % len(groups)], "params": [param]}
                self.owner.append(Optimizer([group], subject.rule, **arguments))
        else:
            filled = [group for group in groups if group["params"]]
            self.owner = [Optimizer(filled, subject.rule, **arguments)] * len(self.params)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The distinct optimizers."""
        return list(dict.fromkeys(self.owner))

    def state(self, index: int) -> dict[str, Any]:
        """The state of a parameter, empty before its first step."""
        return self.owner[index].state.get(self.params[index], {})

    def group(self, index: int) -> dict[str, Any]:
        """The param group of a parameter."""
        groups = self.owner[index].param_groups
        return next(group for group in groups if any(param is self.params[index] for param in group["params"]))

    def set_gradients(self) -> None:
        """Draw this step's gradients."""
        for index, param in enumerate(self.params):
            param.grad = draw(param.shape, param.dtype, param.device, 1000 * (self.steps + 1) + index)

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1

    def compared_step(self, limit: float | None = None) -> None:
        """Step, and compare parameters that have gradients with the formula; other parameters must not change."""
        rule, snapshots, others = self.subject.rule, dict[int, Snapshot](), dict[int, torch.Tensor]()
        states = [self.state(index) for index in range(len(self.params))]
        numbers = [{key: self.group(index)[key] for key in rule.hyperparameters} for index in range(len(self.params))]
        for index, param in enumerate(self.params):
            if param.grad is None:
                others[index] = param.detach().clone()
            elif states[index]:
                snapshots[index] = Snapshot.of(param, states[index])
            else:
                snapshots[index] = Snapshot.first(param, rule, self.group(index))
        if limit is not None:
            self._clip(snapshots, limit)
        self.step()
        for index, param in enumerate(self.params):
            label = f"a {str(param.dtype).removeprefix('torch.')} tensor of shape {tuple(param.shape)}"
            if index in snapshots:
                old, state = snapshots[index], self.state(index)
                if not states[index]:
                    old.round_states(state)
                compare(rule, label, param, state, old, numbers[index], self.subject.has_matrices)
            elif not torch.equal(param.detach(), others[index]):
                raise CheckFailure(f"{label} has no gradient but was changed", "param")

    def _clip(self, snapshots: Mapping[int, Snapshot], limit: float) -> None:
        """Clip the gradients of snapshots in float64, as `torch.nn.utils.clip_grad_norm_` does."""
        for optimizer in self.optimizers:
            own = [snapshot for index, snapshot in snapshots.items() if self.owner[index] is optimizer]
            norm = math.sqrt(sum(float(snapshot.grad.double().square().sum()) for snapshot in own))
            for snapshot in own:
                snapshot.grad = snapshot.grad.double() * min(1.0, limit / (norm + 1e-6))

    def jump(self, count: int) -> None:
        """Set the step counts, so that the next step has this count."""
        for index in range(len(self.params)):
            self.state(index)["step"].fill_(count - 1)

    def run(self, steps: int = 5, *, compared: bool = True) -> Training:
        """Steps, each with new gradients."""
        for _ in range(steps):
            self.set_gradients()
            (self.compared_step if compared else self.step)()
        return self

    def contents(self) -> list[torch.Tensor]:
        """Copies of all parameters and state buffers."""
        copies = [param.detach().clone() for param in self.params]
        for index in range(len(self.params)):
            copies += [value.clone() for value in self.state(index).values() if isinstance(value, torch.Tensor)]
        return copies


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check."""

    item: str  # name of the check
    passed: bool | None  # None if it could not be checked on this machine
    text: str  # the outcome; a failure names the rule's file and line
    seconds: float = 0.0  # duration


def run_item(subject: Subject, name: str, item: Callable[[Subject], str], backend: str = "") -> Verdict:
    """The verdict on an item."""
    label = f"{backend or DEVICE_NAMES.get(subject.device.type, subject.device.type)}, {name}"
    if name == "threads" and subject.has_matrices:
        text = "skipped: torch's matrix products depend on the number of threads"
        return Verdict(label, None, text)
    return timed(label, subject, item, subject)


def timed(label: str, where: Subject | str, check: Callable[..., str], *args: Any) -> Verdict:
    """Call a check: its text, or how and where it fails."""
    begin = time.perf_counter()
    try:
        passed, text = True, check(*args)
    except CheckFailure as failure:
        passed, text = False, f"{failure}; see {where if isinstance(where, str) else where.line_of(failure.buffer)}"
    except Exception as error:  # any error of a user's rule is the verdict
        place = _failing_line(error, where if isinstance(where, str) else where.rule.where)
        reason = " ".join(str(error).split()) or type(error).__name__
        passed, text = False, reason if place.rpartition(":")[0] in reason else f"{reason}; see {place}"
    return Verdict(label, passed, text, time.perf_counter() - begin)


def _failing_line(error: Exception, place: str) -> str:
    """The line of the rule's file that raised an error; the rule's line if unknown."""
    file = place.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else place


def trace_all(rule: Rule, values: Mapping[str, Any], graphs: dict[int, Graph]) -> dict[int, RuleError]:
    """Trace a rule for tensors of 0 to 4 dimensions."""
    refusals: dict[int, RuleError] = {}
    for dims in range(5):
        try:
            graphs[dims] = graph_for(rule, values, dims)
        except RuleError as error:
            refusals[dims] = error
    return refusals


Item = Callable[[Subject], str]

_TILES = ((0,), (1,), (1023,), (1024,), (1025,), (16_383,), (16_385,), (40_001,), (0, 3), (1, 1), (1, 4099), (4099, 1))
_MATRICES = ((0, 3), (1, 1), (1, 67), (67, 1), (130, 9), (31, 33))
_LARGE = ((37, 130), (5000,), (6, 8, 96), (48, 12, 3, 3))
"""Shapes large enough for `state_dtype`: with short last blocks, and rows of several dimensions."""
_SMALL_TILES = ((0,), (1,), (511,), (513,), (1025,), (0, 3), (1, 1), (1, 519), (519, 1))


def _trial(
    subject: Subject, options: Any = None, *, dtype: Any = torch.float32, shapes: Any = SHAPES, groups: Any = ()
) -> Training:
    """Random parameters of the shapes that the rule supports, with optimizers."""
    wanted = enumerate(subject.shapes(shapes), start=1)
    params = [torch.nn.Parameter(draw(shape, dtype, subject.device, seed)) for seed, shape in wanted]
    return Training(subject, params, options, groups)


def formula(subject: Subject, dtype: torch.dtype, **options: Any) -> str:
    """Steps of parameters of a dtype agree with the formula."""
    trial = _trial(subject, options, dtype=dtype).run()
    return f"{trial.steps} steps of {len(trial.params)} tensors agree with the rule's code in float64"


def late_steps(subject: Subject) -> str:
    """Steps with later counts: where a branch on the count changes, and at step 1,000."""
    counts = late_counts(subject.graphs.values(), subject.hyperparameters)
    trial, branches = _trial(subject), Branches()
    with branches:
        trial.run(1)
        for count in counts:
            trial.jump(count)
            trial.run(1)
    never = branches.never(subject.graphs.values())
    untaken = f"; branches never taken: torch.where at {', at '.join(never)}" if never else ""
    return f"steps {', '.join(f'{count:,}' for count in counts)} agree with the rule's code in float64{untaken}"


def formats(subject: Subject, state_dtype: str) -> str:
    """States in a format: steps from stored states agree with the formula, and its results are stored correctly."""
    try:
        trial = _trial(subject, {"state_dtype": state_dtype}, shapes=_LARGE).run(3)
    except StateError as error:
        return f"refused: {error}"
    changed = sum(
        value.dtype is not torch.float32 and name != "step" and "_scales" not in name
        for index in range(len(trial.params))
        for name, value in trial.state(index).items()
    )
    if not changed:
        return "the rule has no state that can be stored in this format"
    return f"{trial.steps} steps with {changed} states in this format agree with the rule's code in float64"


def sizes(subject: Subject) -> str:
    """Empty, single, odd and long tensors, and sizes around a tile."""
    from ..backends import registry

    interpreted = is_host(subject.device) and registry.interpreting
    shapes = _MATRICES if subject.has_matrices else _SMALL_TILES if interpreted else _TILES
    trial = _trial(subject, shapes=shapes).run(1 if interpreted else 2)
    longest = max(map(torch.Tensor.numel, trial.params))
    return f"{len(trial.params)} sizes of up to {longest:,} elements agree with the formula"


def layouts(subject: Subject) -> str:
    """Tensors with unusual strides, and gradients with other strides than their parameters."""
    seeds = itertools.count(1)

    def made(*shape: int) -> torch.Tensor:
        return draw(shape, torch.float32, subject.device, next(seeds))

    image = made(2, 3, 4, 5)
    channels_last = image.to(memory_format=torch.channels_last)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
        "unaligned": (made(130)[1:], None),
        "transposed": (made(6, 11).t(), None),
        "with gaps": (made(9, 8)[:, 1:6], None),
        "every second element": (made(70)[::2], None),
        "channels last": (channels_last, channels_last.clone()),
        "channels last with a plain gradient": (channels_last.clone(), image * 0.5),
        "a transposed gradient": (made(6, 11), made(11, 6).t()),
        "an expanded gradient": (made(6, 11), made(1).expand(6, 11)),
    }
    cases = {name: case for name, case in cases.items() if case[0].dim() in subject.graphs}
    for name, (value, grad) in cases.items():
        trial = Training(subject, [torch.nn.Parameter(value)])
        trial.params[0].grad = made(*value.shape) if grad is None else grad
        for _ in range(2):
            try:
                trial.compared_step()
            except CheckFailure as failure:
                raise CheckFailure(f"{name}: {failure}", failure.buffer) from None
    return f"{', '.join(cases)}: all agree with the formula" if cases else "this rule supports no other layout"


def groups(subject: Subject) -> str:
    """Two param groups with different numbers, and parameters that have no gradient for some steps."""
    trial = _trial(subject, groups=[_moved(subject, 0.5)])
    for turn in range(4):
        trial.set_gradients()
        for index, param in enumerate(trial.params):
            if (index + turn) % 3 == 0:
                param.grad = None
        trial.compared_step()
    return "two param groups with different hyperparameters, and parameters without gradient, agree with the formula"


def _moved(subject: Subject, factor: float) -> dict[str, Any]:
    """Every number times a factor, if the rule accepts it without a change of branches."""
    moved: dict[str, Any] = {}
    for key, value in subject.hyperparameters.items():
        changed: Any = None
        if isinstance(value, (tuple, list)) and all(isinstance(entry, float) for entry in value):
            changed = tuple(entry * factor for entry in value)
        elif isinstance(value, float) and value not in (0.0, 1.0) and math.isfinite(value):
            changed = value * factor
        if changed is not None and subject.keeps_graph({key: changed}):
            moved[key] = changed
    return moved


def moving_numbers(subject: Subject) -> str:
    """Every number changes at every step, without a rebuild."""
    if not _moved(subject, 0.9):
        return "the rule has no number to change"
    trial = _trial(subject).run(1)
    built = compile_count()
    for turn in range(3):
        for optimizer in trial.optimizers:
            for group in optimizer.param_groups:
                group.update(_moved(subject, 0.9 - 0.1 * turn))
        trial.set_gradients()
        trial.compared_step()
    if compile_count() != built:
        raise CheckFailure("a kernel was rebuilt because a number changed")
    return f"{', '.join(_moved(subject, 0.9))} change at every step without a rebuild"


def repeats(subject: Subject) -> str:
    """The same training twice gives the same bits."""
    shapes = (*SHAPES, (20_011,), (101, 67))
    runs = [_trial(subject, shapes=shapes).run(3, compared=False).contents() for _ in range(2)]
    _same_bits(runs, "a second run of the same training gives different bits")
    return "a second run of the same training gives the same bits"


def _same_bits(runs: list[list[torch.Tensor]], text: str) -> None:
    for pair in zip(*runs):
        if not torch.equal(*(tensor.view(torch.uint8) if tensor.dim() else tensor for tensor in pair)):
            raise CheckFailure(text)


def threads(subject: Subject) -> str:
    """One thread and several give the same bits."""
    before = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            runs.append(_trial(subject, shapes=((70_001,), (90, 231))).run(3, compared=False).contents())
    finally:
        torch.set_num_threads(before)
    _same_bits(runs, "1 and 4 threads give different bits")
    return "1 and 4 threads give the same bits"


def checkpoint(subject: Subject) -> str:
    """Training continues from a checkpoint with the same bits."""
    first = _trial(subject).run(3)
    second = Training(subject, [torch.nn.Parameter(param.detach().clone()) for param in first.params])
    second.steps = first.steps
    for mine, other in zip(first.optimizers, second.optimizers):
        other.load_state_dict(mine.state_dict())
    _same_bits(
        [trial.run(2, compared=False).contents() for trial in (first, second)],
        "training resumed from a checkpoint differs from uninterrupted training",
    )
    return "training resumed from a checkpoint gives the same bits"


def skipping(subject: Subject) -> str:
    """A step with non-finite gradients is skipped as a whole."""
    trial = _trial(subject, {"skip_nonfinite": True}).run(2)
    before = trial.contents()
    trial.set_gradients()
    for param in trial.params:
        if param.grad is not None and param.numel():
            param.grad.flatten()[0] = math.nan
    trial.step()
    _same_bits([before, trial.contents()], "a skipped step changes a parameter or a state")
    return "a skipped step changes nothing"


def clipping(subject: Subject) -> str:
    """Clipping inside the step equals clipping before it."""
    limit = 0.5
    trial = _trial(subject, {"max_grad_norm": limit})
    try:
        for _ in range(2):
            trial.set_gradients()
            trial.compared_step(limit)
    except CheckFailure as failure:
        text = f"max_grad_norm={limit} differs from clipping before the step: {failure}"
        raise CheckFailure(text, failure.buffer) from None
    return "max_grad_norm agrees with clipping before the step"


def outputs(subject: Subject) -> str:
    """Steps that measure and mark changed weights give the same bits, and report correctly."""
    runs = []
    for options in ({}, {"stats": Stats(), "track_changes": True}):
        trial = _trial(subject, options, shapes=(*SHAPES, (101, 67)))
        for _ in range(3):
            before = [param.detach().clone() for param in trial.params]
            trial.set_gradients()
            trial.step()
            if options:
                _check_reports(trial, before)
        runs.append(trial.contents())
    _same_bits(runs, "steps that measure and track changes give different bits")
    return "statistics and changes are right, and steps give the same bits"


def _check_reports(trial: Training, before: list[torch.Tensor]) -> None:
    """Compare the reports on a step with its results."""
    old = {id(param): values for param, values in zip(trial.params, before)}
    for optimizer in trial.optimizers:
        listed = {name: indices.long() for name, indices, _ in optimizer.changes()}
        measured, (group,) = optimizer.stats.read(), optimizer.param_groups
        for place, param in enumerate(group["params"]):
            others = (param.detach() != old[id(param)]).reshape(-1).nonzero().reshape(-1)
            if not torch.equal(listed.get(f"0.{place}", others[:0]), others):
                raise CheckFailure("the list of changed weights differs from the actual changes", "param")
            if param.grad is None or not param.numel():
                continue
            update = (param.detach().double() - old[id(param)].double()).norm()
            for column, wanted in (("grad_norm", param.grad.double().norm()), ("update_norm", update)):
                if not math.isclose(measured[f"0.{place}"][column], float(wanted), rel_tol=1e-4, abs_tol=1e-30):
                    raise CheckFailure(f"{column} is {measured[f'0.{place}'][column]}, but should be {float(wanted)}")


ITEMS: dict[str, Item] = {
    **{name: partial(formula, dtype=getattr(torch, name)) for name in ("float32", "float64", "bfloat16", "float16")},
    **{
        f"bfloat16 with {'float32 master' if choice is True else choice}": partial(
            formula, dtype=torch.bfloat16, master_weights=choice
        )
        for choice in MASTER_FORMATS
    },
    **{f"{name} states": partial(formats, state_dtype=name) for name in STATE_FORMATS if name != "float32"},
    "bfloat16 with stochastic rounding": partial(formula, dtype=torch.bfloat16, rounding="stochastic"),
    "late steps": late_steps,
    "sizes": sizes,
    "layouts": layouts,
    "param groups": groups,
    "moving numbers": moving_numbers,
    "repeatability": repeats,
    "threads": threads,
    "checkpoint": checkpoint,
    "skipped steps": skipping,
    "clipping": clipping,
    "outputs": outputs,
}
"""All items by name, in the order of checks."""

INTERPRETED = ("float32", "late steps", "sizes", "layouts", "param groups")
"""Items that also run in Triton's interpreter, which is slow, and rounds like a GPU only in float32."""
