"""Loading a checkpoint: everything is compared before anything is written, and whatever fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError
from ..pairs import as_real
from ..placements.local import copy_into, distribute, local_part
from ..rules import Rule, State
from ..rules.protocol import at_step, changes
from ..storage import MasterFormat
from .hyperparameters import about_group, check_group, without_defaults
from .masters import MASTER_KEYS, master_kind, other_master, start_of
from .parameters import labelled
from .state_formats import saved_choice
from .states import TRAINING, restart
from .watched_state import WatchedState

if TYPE_CHECKING:
    from .protocol import Optimizer

__all__ = [
    "check_rules",
    "complete_groups",
    "loading_into_buffers",
    "save_numbers",
    "unchanged_on_error",
]


@contextmanager
def unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Put an optimizer's groups, state and tables back as they were if the block raises.

    Args:
        optimizer: the block may replace its groups and states, but not write into buffers before it can still fail.
    """
    attributes = dict(vars(optimizer))
    groups, state = optimizer.param_groups, optimizer.state
    members, states = list(groups), dict(state)
    contents = [(group, dict(group), list(group["params"])) for group in groups]
    changes = getattr(state, "changes", 0)
    try:
        yield
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        groups[:] = members
        for group, content, params in contents:
            group.clear()
            group.update(content)
            group["params"][:] = params
        state.clear()
        state.update(states)
        if isinstance(state, WatchedState):
            # The same entries as before: tables made for them fit as before, and so do captured graphs.
            state.changes = changes
        raise


@contextmanager
def loading_into_buffers(optimizer: Optimizer, finish: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """A block for torch's `load_state_dict`: states come as they are, uncast, into the buffers that are there.

    Args:
        optimizer: unchanged if anything in the block fails.
        finish: called with the checkpoint when groups and states are loaded, before the user's own hooks.

    Raises:
        StateError: for other shapes or another rule; ValueError for other groups.
    """
    # The user's hooks may change what is loaded; torch gets no state, which it would cast.
    given: list[dict[str, Any]] = []
    before, state = optimizer.param_groups, optimizer.state

    def take(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        check_rules(before, loaded["param_groups"], optimizer.rule_of)
        given.append(loaded)
        return {**loaded, "state": {}}

    def install(_: torch.optim.Optimizer) -> None:
        optimizer.state.update(state)
        complete_groups(optimizer.param_groups, before, optimizer.rule_of)
        for index, group in enumerate(optimizer.param_groups):
            about_group(index, partial(check_group, optimizer.rule_of(group), group))
            without_defaults(group)
        _install_states(optimizer, given[-1])
        finish(given[-1])

    hooks = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(install, prepend=True),
    ]
    try:
        with unchanged_on_error(optimizer):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def check_rules(
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    rule_of: Callable[[Mapping[str, Any]], Rule],
) -> None:
    """Raise if a checkpoint says that a group has another rule.

    Args:
        groups: the optimizer's param groups.
        saved: the checkpoint's; a group of the optimizer's own rule does not say it.
        rule_of: the rule of a param group.

    Raises:
        StateError: naming the group and both rules.
    """
    for index, (group, other) in enumerate(zip(groups, saved)):
        rule = rule_of(group)
        if other.get("rule", rule.name) != rule.name:
            raise StateError(
                f"group {index} of the checkpoint is of rule {other['rule']}, this optimizer's is of {rule.name}"
            )
        # What AdamW is, and Adam may be.
        wanted = rule.options.get("decoupled_weight_decay")
        if wanted is not None and bool(other.get("decoupled_weight_decay", wanted)) is not wanted:
            raise StateError(
                f"group {index} of the checkpoint has decoupled_weight_decay={not wanted}, this optimizer's is of "
                f"{rule.name}, which has {wanted}: load it into tilestep.Adam"
            )


def complete_groups(
    groups: Sequence[dict[str, Any]],
    before: Sequence[Mapping[str, Any]],
    rule_of: Callable[[Mapping[str, Any]], Rule],
) -> None:
    """Give loaded param groups the keys that the checkpoint does not have.

    How state is kept is not the checkpoint's business: `master_weights` and `state_dtype` stay as this optimizer was
    made. Nor is code: hyperparameters that are functions of the step stay as they are.

    Args:
        groups: the loaded groups.
        before: the groups they replace.
        rule_of: the rule of a param group.
    """
    for group, old in zip(groups, before):
        rule = rule_of(old)
        for key in (*rule.hyperparameters, *rule.options):
            if key in old:
                group.setdefault(key, old[key])
        for key in rule.hyperparameters:
            group[key] = _with_functions(old[key], group[key])
        group.setdefault("max_grad_norm", old.get("max_grad_norm"))
        group["master_weights"] = old.get("master_weights", False)
        group["state_dtype"] = old.get("state_dtype")
        group.pop("rule", None)
        if "rule" in old:
            group["rule"] = old["rule"]


def _with_functions(old: Any, loaded: Any) -> Any:
    """A loaded hyperparameter with the functions that the one it replaces has."""
    if isinstance(old, (tuple, list)) and isinstance(loaded, (tuple, list)) and len(old) == len(loaded):
        return type(loaded)(map(_with_functions, old, loaded))
    return old if changes(old) else loaded


def save_numbers(optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Put numbers in the place of functions of the step: what they gave at the group's last step.

    Args:
        optimizer: whose checkpoint it is.
        saved: its param groups in the checkpoint.
    """
    for group, other in zip(optimizer.param_groups, saved):
        if "state_dtype" in other:
            other["state_dtype"] = saved_choice(other["state_dtype"])
        functions = [key for key, value in other.items() if key != "params" and changes(value)]
        if functions:
            steps = [_number(optimizer.state[param]["step"]) for param in group["params"] if param in optimizer.state]
            step = max(1.0, *steps, 1.0)
            other.update({key: _numbers(at_step(other[key], step, key)) for key in functions})


def _numbers(value: Any) -> Any:
    """A hyperparameter with its tensors as numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    return float(value) if isinstance(value, torch.Tensor) else value


def _install_states(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Bring a checkpoint's states, in the precision they have, into buffers where they are.

    Args:
        optimizer: its groups are already the checkpoint's.
        given: the checkpoint.

    Raises:
        StateError: if the states are of other shapes or of another rule; no buffer has been written then.
    """
    identifiers = [identifier for group in given["param_groups"] for identifier in group["params"]]
    params = list(labelled(optimizer))
    saved = {param: given["state"].get(key, {}) for (_, _, _, param), key in zip(params, identifiers)}
    for label, _, group, param in params:
        _check_known(label, optimizer.rule_of(group), saved[param], optimizer.state.get(param, {}))
        if param in optimizer.state:
            optimizer.state[param] = {k: v for k, v in optimizer.state[param].items() if k != TRAINING}
        elif saved[param]:
            optimizer.state[param] = {}
    # Where a parameter and the checkpoint's master of it disagree, the parameter is right.
    optimizer._build().masters.forget_versions()
    for label, _, _, param in params:
        if param in optimizer.state:
            _check_fits(label, param, optimizer.state[param], saved[param])
    for _, _, group, param in params:
        if param in optimizer.state:
            _fill(param, group, optimizer.rule_of(group), optimizer.state[param], saved[param])
    known = set(identifiers)
    optimizer.state.update({key: value for key, value in given["state"].items() if key not in known})


def _check_known(label: str, rule: Rule, saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise if a checkpoint has buffers that neither the rule nor this parameter's state knows."""
    mine = {"step", *MASTER_KEYS, TRAINING, *rule.state_names, *state}
    for name, value in saved.items():
        if name not in mine and isinstance(value, torch.Tensor):
            raise StateError(
                f"the checkpoint has state {name!r} for {label}, which rule {rule.name} does not have "
                f"({', '.join(rule.state_names) or 'it has none'}): it is of another optimizer"
            )


def _check_fits(label: str, param: torch.Tensor, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    begun = any(isinstance(value, torch.Tensor) and name != "step" for name, value in saved.items())
    begun = begun or _number(saved.get("step", 0)) > 0
    for name, mine in {**dict.fromkeys(MASTER_KEYS, param), **state, TRAINING: param}.items():
        value = saved.get(name)
        if not isinstance(mine, torch.Tensor) or name == "step":
            continue
        if name not in saved:
            if begun and name not in (*MASTER_KEYS, TRAINING):
                raise StateError(
                    f"the checkpoint has no state {name!r} for {label}: it is of another optimizer, or of other "
                    "hyperparameters"
                )
        elif isinstance(value, torch.Tensor) and value.shape != mine.shape and not value.numel() == mine.numel() == 1:
            shapes = f"{tuple(value.shape)} in the checkpoint, it needs {tuple(mine.shape)}"
            raise StateError(f"state {name!r} of {label} has shape {shapes}")


def _fill(
    param: torch.Tensor, group: Mapping[str, Any], rule: Rule, state: dict[str, Any], saved: Mapping[str, Any]
) -> None:
    """Write a checkpoint's values into a parameter's buffers; those it does not have begin again."""
    starts = {"step": State(0.0, shape="scalar"), **rule.states}
    kind = master_kind(param.dtype, group)
    if kind is not None:
        starts[kind.key] = start_of(kind)
        saved = _with_master(kind, param, saved)
    for name, mine in state.items():
        value = saved.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
            copy_into(mine, value.detach() if value.shape == mine.shape else value.detach().reshape(mine.shape))
        elif isinstance(mine, torch.Tensor) and value is not None:
            mine.fill_(float(value))
        elif name in starts:
            restart(as_real(local_part(mine)), starts[name], as_real(local_part(param)), group)
        elif value is not None:
            state[name] = value
    # torch's SGD counts no steps; its buffer is there from the first one on.
    if "step" not in saved and any(isinstance(value, torch.Tensor) for value in saved.values()):
        state["step"].fill_(1.0)
    unused = {*MASTER_KEYS, *rule.state_names}
    state.update({name: value for name, value in saved.items() if name not in state and name not in unused})
    if TRAINING in saved:
        state[TRAINING] = distribute(torch.empty_like(local_part(param), requires_grad=False), param)
        copy_into(state[TRAINING], saved[TRAINING].detach())


def _with_master(kind: MasterFormat, param: torch.Tensor, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's values for a parameter with a master of the kind that its group has, if they have any.

    Args:
        kind: the group's.
        param: the parameter; a remainder in the checkpoint is what is to be added to it.
        saved: the values.
    """
    if not kind.dtype.is_floating_point and getattr(saved.get(kind.key), "dtype", kind.dtype) is not kind.dtype:
        # torch's optimizers have rounded it: what is left of integers is of no use.
        return {name: value for name, value in saved.items() if name != kind.key}
    other = other_master(kind, saved)
    if other is None:
        return saved
    part, value = local_part(param), saved[other.key].detach()
    theirs = torch.empty_like(part, dtype=other.dtype, requires_grad=False)
    copy_into(distribute(theirs, param), value if value.shape == param.shape else value.reshape(param.shape))
    return {**saved, kind.key: distribute(kind.buffer_of(part, other.values(part, theirs)), param)}


def _number(value: Any) -> float:
    # Reading a step count from a device waits for it; a checkpoint's is usually on the host.
    return float(value) if value is not None else 0.0
