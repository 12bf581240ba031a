"""Training runs of a rule on drawn parameters, each step compared with the formula."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine import graph_for
from ..errors import RuleError
from ..graph import ACROSS, Graph
from ..optimizer import Optimizer
from ..rules import Rule
from .reference import CheckFailure, Snapshot, compare

DEVICE_NAMES = {"cpu": "C++", "cuda": "Triton"}

SHAPES = ((5, 7), (1300,), (), (3, 4, 5), (2, 3, 4, 5), (33, 2))
"""Shapes that most trials use, as far as the rule takes them."""


@dataclass(frozen=True)
class Subject:
    """A rule under check."""

    rule: Rule
    given: Mapping[str, Any]  # hyperparameters that are not the defaults
    device: torch.device  # where it runs
    graphs: Mapping[int, Graph]  # its graph for each number of dimensions it takes

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyperparameters."""
        return {**self.rule.hyperparameters, **self.given}

    @property
    def spans_tensors(self) -> bool:
        """Whether a step of one tensor depends on the others, so that the formula holds for one alone."""
        return any(value.operation in ACROSS for graph in self.graphs.values() for value in graph.values())

    @property
    def has_matrices(self) -> bool:
        """Whether the rule works on whole matrices."""
        from ..graph.matrices import is_matrix_work

        return any(is_matrix_work(value) for graph in self.graphs.values() for value in graph.values())

    def shapes(self, wanted: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[int, ...]]:
        """Those of these shapes that the rule takes; where it takes none, small ones of as many dimensions."""
        fitting = [shape for shape in wanted if len(shape) in self.graphs]
        return fitting or [(3,) * dims for dims in self.graphs]

    def line_of(self, buffer: str) -> str:
        """Where the rule computes a buffer: file and line, as far as it is known."""
        for graph in self.graphs.values():
            if buffer in graph.outputs and graph.outputs[buffer].line:
                return graph.outputs[buffer].line
        return self.rule.where

    def keeps_graph(self, changes: Mapping[str, Any]) -> bool:
        """Whether the rule allows these hyperparameters, and has the same graphs with them."""
        changed = {**self.hyperparameters, **changes}
        try:
            self.rule.check(changes)
            return all(graph_for(self.rule, changed, dims) is graph for dims, graph in self.graphs.items())
        except (ValueError, RuleError):
            return False


def draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


class Trial:
    """Parameters with an optimizer, or with one each where the rule spans tensors."""

    def __init__(
        self,
        subject: Subject,
        params: Iterable[torch.nn.Parameter],
        options: Mapping[str, Any] | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.subject = subject
        self.params = list(params)
        self.groups = [{}, *groups]
        self.owner: list[Optimizer] = []
        arguments = {**subject.given, **(options or {})}
        if subject.spans_tensors:
            for index, param in enumerate(self.params):
                group = {"params": [param], **self.groups[index % len(self.groups)]}
                self.owner.append(Optimizer([group], subject.rule, **arguments))
        else:
            dealt = [
                {"params": self.params[index :: len(self.groups)], **group} for index, group in enumerate(self.groups)
            ]
            filled = [group for group in dealt if group["params"]]
            self.owner = [Optimizer(filled, subject.rule, **arguments)] * len(self.params)
        self.steps = 0

    @property
    def optimizers(self) -> list[Optimizer]:
        """Each optimizer once."""
        return list(dict.fromkeys(self.owner))

    def state(self, index: int) -> dict[str, Any]:
        """The state of a parameter, empty before its first step."""
        return self.owner[index].state.get(self.params[index], {})

    def group(self, index: int) -> dict[str, Any]:
        """The param group of a parameter."""
        for group in self.owner[index].param_groups:
            if any(param is self.params[index] for param in group["params"]):
                return group
        raise AssertionError("the parameter is in no group")

    def hyperparameters(self, index: int) -> dict[str, Any]:
        """The hyperparameters of a parameter's group."""
        group = self.group(index)
        return {key: group[key] for key in self.subject.rule.hyperparameters}

    def set_gradients(self, seed: int = 0) -> None:
        """Draw this step's gradients."""
        for index, param in enumerate(self.params):
            param.grad = draw(param.shape, param.dtype, param.device, 1000 * (self.steps + 1) + index + seed)

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1

    def compared_step(self, limit: float | None = None) -> None:
        """Step, and compare every parameter that has a gradient with the formula; the others must not change."""
        before = [
            self._snapshot(index, param) if param.grad is not None else param.detach().clone()
            for index, param in enumerate(self.params)
        ]
        hyperparameters = [self.hyperparameters(index) for index in range(len(self.params))]
        if limit is not None:
            self._clip(before, limit)
        self.step()
        for index, (param, known) in enumerate(zip(self.params, before)):
            label = f"a {str(param.dtype).removeprefix('torch.')} tensor of shape {tuple(param.shape)}"
            if isinstance(known, Snapshot):
                rule, coarse = self.subject.rule, self.subject.has_matrices
                compare(rule, label, param, self.state(index), known, hyperparameters[index], coarse)
            elif not torch.equal(param.detach(), known):
                raise CheckFailure(f"{label} has no gradient and was changed", "param")

    def _snapshot(self, index: int, param: torch.Tensor) -> Snapshot:
        state = self.state(index)
        if state:
            return Snapshot.of(param, state)
        return Snapshot.first(param, self.subject.rule, self.group(index))

    def _clip(self, before: Sequence[Snapshot | torch.Tensor], limit: float) -> None:
        """Clip the gradients that snapshots hold, as `torch.nn.utils.clip_grad_norm_` does, in float64."""
        for optimizer in self.optimizers:
            own = [each for each, owner in zip(before, self.owner) if owner is optimizer and isinstance(each, Snapshot)]
            norm = math.sqrt(sum(float(each.grad.double().square().sum()) for each in own))
            for each in own:
                each.grad = each.grad.double() * min(1.0, limit / (norm + 1e-6))

    def run(self, steps: int = 5) -> Trial:
        """Compared steps with new gradients each."""
        for _ in range(steps):
            self.set_gradients()
            self.compared_step()
        return self

    def contents(self) -> list[torch.Tensor]:
        """Every parameter and state buffer, as copies."""
        found = [param.detach().clone() for param in self.params]
        for index in range(len(self.params)):
            found += [value.clone() for value in self.state(index).values() if isinstance(value, torch.Tensor)]
        return found


@dataclass(frozen=True)
class Verdict:
    """What one check found."""

    item: str  # what was checked
    passed: bool | None  # whether it is as it should be; None if it could not be checked here
    text: str  # what was found, in plain words; a failure names the rule's file and line
    seconds: float = 0.0  # how long it took


def run_item(subject: Subject, name: str, item: Callable[[Subject], str], backend: str = "") -> Verdict:
    """The verdict of one item."""
    label = f"{backend or DEVICE_NAMES.get(subject.device.type, subject.device.type)}, {name}"
    return timed(label, lambda: item(subject), subject)


def timed(label: str, check: Callable[[], str], where: Subject | str) -> Verdict:
    """A check's verdict: what it says, or how it fails and where."""
    begin = time.perf_counter()
    try:
        passed, text = True, check()
    except CheckFailure as failure:
        place = where if isinstance(where, str) else where.line_of(failure.buffer)
        passed, text = False, f"{failure}; see {place}"
    except Exception as error:  # whatever goes wrong with a rule of the user's is the verdict
        place = where if isinstance(where, str) else where.rule.where
        reason = " ".join(str(error).split()) or type(error).__name__
        named = reason if place.rpartition(":")[0] in reason else f"{reason}; see {place}"
        passed, text = False, named
    return Verdict(label, passed, text, time.perf_counter() - begin)


def trace_all(rule: Rule, values: Mapping[str, Any], graphs: dict[int, Graph]) -> dict[int, RuleError]:
    """Trace a rule for tensors of 0 to 4 dimensions."""
    refusals: dict[int, RuleError] = {}
    for dims in range(5):
        try:
            graphs[dims] = graph_for(rule, values, dims)
        except RuleError as error:
            refusals[dims] = error
    return refusals
