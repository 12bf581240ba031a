"""Weights to evaluate that are not those that train: averages that a rule keeps in its state."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ..placement import distribute, local_state
from ..placement.local import as_real, copy_into, local_part
from ..storage import entries_of, kept_in_blocks, values_of
from .masters import MASTER_KEYS, exact_values
from .parameters import Optimizer, iter_params, param_states
from .states import SQUARES, TRAINING, compute_dtype


def keeps_averages(optimizer: Optimizer) -> bool:
    """Whether a rule has weights to evaluate that are not those that train."""
    return any(optimizer.rule_of(group).evaluation is not None for group in optimizer.param_groups)


def holds_averages(optimizer: Optimizer) -> bool:
    """Whether a parameter holds its weights to evaluate."""
    return any(TRAINING in state for _, state in param_states(optimizer))


@torch.no_grad()
def swap_in_averages(optimizer: Optimizer) -> None:
    """Put into every parameter whose rule keeps an average this average; the training weights go into its state."""
    plan = optimizer.plan
    if plan is not None and not optimizer.is_evaluating:
        plan.sync_masters()
        plan.record_versions()
    with nullcontext() if plan is None else plan.masters.own_writes():
        for label, _, group, param in iter_params(optimizer):
            rule, state = optimizer.rule_of(group), optimizer.state.get(param)
            if rule.evaluation is None or not state or TRAINING in state:
                continue
            whole = local_part(param)
            part = as_real(whole)
            compute = compute_dtype(part)
            squares = {name for name, start in rule.states.items() if start.shape in SQUARES}
            entries = entries_of(state, rule.state_names)
            names = {*MASTER_KEYS, *rule.state_names, *entries} - squares
            ends = {"row": param.dim(), "column": param.dim() - 1}
            sliced = {name: ends[start.shape] for name, start in rule.states.items() if start.shape in ends}
            overs = {name: (end - 1, end) for name, end in sliced.items()}
            own = local_state(label, state, param, names, overs, squares, entries)
            buffers: dict[str, torch.Tensor] = {}
            for name in rule.state_names:
                if isinstance(own.get(name), torch.Tensor):
                    blocks = kept_in_blocks(own, name)
                    kept = as_real(own[name]) if blocks is None else values_of(blocks, own, name, shape=part.shape)
                    buffers[name] = kept.to(part.device, compute)
            training = exact_values(part, own).to(part.device, compute)
            numbers = {**{key: group[key] for key in rule.hyperparameters}, "step": state["step"]}
            average = rule.evaluated(training, buffers, numbers)
            state[TRAINING] = distribute(whole.detach().clone(), param)
            part.copy_(average)
            torch.autograd.graph.increment_version(param)


@torch.no_grad()
def swap_out_averages(optimizer: Optimizer) -> None:
    """Put the training weights back, bit for bit."""
    plan = optimizer.plan
    with nullcontext() if plan is None else plan.masters.own_writes():
        for param, state in param_states(optimizer):
            if TRAINING in state:
                copy_into(param, state.pop(TRAINING))
                torch.autograd.graph.increment_version(param)
