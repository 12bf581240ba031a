"""What the parts of an optimizer know of it, and of its plan: types only, so that imports run one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..placement import ReductionGroup
from ..rules import Rule


class Optimizer(Protocol):
    """`optimizer.Optimizer`, for the functions that its methods are made of."""

    param_groups: list[dict[str, Any]]
    state: Any
    attached: tuple[str, ...]
    control: Any
    is_evaluating: bool
    graphs: Any
    memory: Any
    placement: Any
    schedule: Any
    _optimizer_load_state_dict_post_hooks: Any
    _optimizer_load_state_dict_pre_hooks: Any
    taps: Any

    @property
    def plan(self) -> Any: ...
    @property
    def mesh_ranks(self) -> ReductionGroup | None: ...
    def rule_of(self, group: Mapping[str, Any]) -> Rule: ...
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any: ...
    def drop_plan(self) -> None: ...
    def attach(self, names: Sequence[str]) -> None: ...
    def power_sum(self, *, prepared: bool = False) -> torch.Tensor | None: ...
    def prepare_capture(self) -> None: ...
    def rebuild(self, *, ahead: bool = False) -> Any: ...
    def take_states(self, states: Mapping[Any, Any], ahead: Any, groups: Any) -> None: ...
    def fitting_plan(self, *, ahead: bool = False, parts: bool = True) -> Any: ...
