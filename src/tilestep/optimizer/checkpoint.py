"""Load a checkpoint: all checks run before any write; float32 state as torch stores it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..compat import load_hooks
from ..errors import StateError
from ..linalg.scalar_values import PYTHON_TYPES
from ..placement.local import copy_into, distribute, gathered, is_distributed, local_part
from ..rules import Rule, State
from ..rules.protocol import at_step, changes
from ..storage import (
    Storage,
    block_names,
    dtype_name,
    entries_of,
    kept_in_blocks,
    shape_of_entries,
    states_in_blocks,
    values_of,
    with_code_names,
)
from .build import loaded_states
from .control import with_limits
from .groups import GROUP_OPTIONS, check_group, check_in_group, find_rule, without_defaults
from .masters import MASTER_KEYS, master_kind
from .parameters import Optimizer, iter_params, params_of
from .states import TRAINING, WatchedState, check_shape, saved_choice, shape_of, starts_of

_OWN_KEYS = ("state_dtype", "master_weights", "rounding", "seed")


def full_precision(state_dict: Mapping[str, Any], rule: str = "") -> dict[str, Any]:
    """Convert a `state_dict` to float32 states with the parameters' shapes, for torch's optimizers and other code.

    Blocks are decoded, 16-bit states are widened. Masters and corrections of parameters are left out: save the
    parameters in float32 instead. The argument is not changed. Torch's optimizers raise for codes.

    Args:
        state_dict: of a tilestep optimizer (after `shard`, the result of `full_state_dict()`), or of a low-bit
            optimizer of bitsandbytes, torchao or FlashOptim. tilestep's optimizers load all of these directly.
        rule: for bitsandbytes, whose states have no names: the rule of the optimizer, if the number of states does not
            determine their names.

    Raises:
        StateError: for a quantized state that cannot be read.
        ValueError: for an unknown rule.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(64, 128))
        >>> optimizer = tilestep.AdamW([weight], state_dtype="int8")
        >>> weight.grad = torch.ones(64, 128)
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg_codes"].dtype
        torch.int8
        >>> theirs = torch.optim.AdamW([weight])
        >>> theirs.load_state_dict(tilestep.full_precision(optimizer.state_dict()))
        >>> theirs.state[weight]["exp_avg"].dtype, sorted(theirs.state[weight])
        (torch.float32, ['exp_avg', 'exp_avg_sq', 'step'])
    """
    groups_of = {key: group for group in state_dict["param_groups"] for key in group["params"]}
    named = find_rule(rule, {}) if rule else None
    state = {
        key: _widened(read_by_value(Saved(f"parameter {key}", values, groups_of.get(key, {}), named)))
        if isinstance(values, Mapping)
        else values
        for key, values in state_dict["state"].items()
    }
    groups = [{key: value for key, value in g.items() if key not in _OWN_KEYS} for g in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _widened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state in float32."""
    blocks = states_in_blocks(values)
    arrays = entries_of(values, blocks)
    widened = {name: value for name, value in values.items() if name not in arrays and name not in MASTER_KEYS}
    for name, value in widened.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim():
            _refuse_lost_codes("the checkpoint", name.removesuffix("_codes"), values, ())
        if value.is_floating_point() and value.dtype is not torch.float64:
            widened[name] = value.to(torch.float32, copy=True)
        elif value.dtype is torch.complex32:
            widened[name] = value.to(torch.complex64)
    return widened | {name: _values(storage, name, values) for name, storage in blocks.items()}


def _values(blocks: Storage, name: str, values: Mapping[str, Any]) -> Any:
    """Decode a blockwise state to float32; a DTensor gives a DTensor."""
    first = blocks.arrays(name)[0]
    codes, elements = values[first.name], first.elements
    local = {array.name: local_part(values[array.name]) for array in blocks.arrays(name)}

    def shape_of(tensor: Any) -> torch.Size:
        # Formats that pack neighbours require rows of even length.
        return torch.Size((*tensor.shape[:-1], tensor.shape[-1] * elements)) if elements > 1 else tensor.shape

    return placed_like(values_of(blocks, local, name, shape=shape_of(local[first.name])), codes, shape_of(codes))


def placed_like(numbers: torch.Tensor, like: Any, shape: torch.Size) -> Any:
    """Return the local part as it is, or wrapped in a DTensor of global shape `shape` if `like` is a DTensor."""
    if not is_distributed(like):
        return numbers
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        numbers, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


@dataclass(frozen=True)
class Saved:
    """A parameter's entry of a checkpoint: the input of readers of other libraries' formats.

    Args:
        label: the parameter's name in messages.
        values: the entry, keyed by the library's state names.
        group: the checkpoint's param group with the parameter.
        rule: the rule of the loading optimizer, or given by the user; None if unknown.
        param: the parameter that gets the state; None if a checkpoint is only converted.
    """

    label: str
    values: Mapping[str, Any]
    group: Mapping[str, Any]
    rule: Rule | None = None
    param: torch.Tensor | None = None


READERS: list[Callable[[Saved], Mapping[str, Any]]] = []
"""Each returns the values with its library's states in float32 under tilestep's names, or unchanged if it finds none.

`integrations.checkpoints` appends its readers.
"""


def read_by_value(saved: Saved) -> Mapping[str, Any]:
    """Return a parameter's saved state; states scaled by other libraries or by `scaled_states` become plain numbers."""
    values = with_code_names(saved.values)
    # A rule may define a state with such a name.
    own = () if saved.rule is None else saved.rule.state_names
    for scale in [name for name in values if name.endswith("_scale") and name not in own]:
        base = scale.removesuffix("_scale")
        state = values.get(base)
        if isinstance(state, torch.Tensor) and state.dtype is torch.float16:
            rest = {name: value for name, value in values.items() if name != scale}
            values = {**rest, base: state.float() * values[scale].to(local_part(state).device)}
    for read in READERS:
        values = read(replace(saved, values=values))
    return values


_LIKE_PARAM = State("param")
_THERE = " in the checkpoint"
_NOTHING = {type(None)}
_PLAIN = {torch.Tensor, float, int, type(None)}


@contextmanager
def unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimizer's groups, state and plan if the block raises."""
    attributes = dict(vars(optimizer))
    groups, state = optimizer.param_groups, attributes["state"]
    members, states = list(groups), dict(state)
    contents = [(group, dict(group), list(group["params"])) for group in groups]
    changes, numbers = state.count.changes if isinstance(state, WatchedState) else 0, optimizer.control.numbers
    try:
        yield
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.control.numbers = numbers
        groups[:] = members
        for group, content, params in contents:
            group.clear()
            group.update(content)
            group["params"][:] = params
        state.clear()
        state.update(states)
        if isinstance(state, WatchedState):
            # The entries are those from before the block, so tables and captured graphs stay valid.
            state.count.changes = changes
        raise


def _before_first_steps(optimizer: Optimizer, saved: Mapping[Any, Mapping[str, Any]]) -> set[Any]:
    """The parameters with a state initialized from the parameter, if the checkpoint is from before their first step."""
    # Their weights may be loaded later, and from elsewhere.
    return {
        param
        for _, _, group, param in iter_params(optimizer)
        if param in saved
        and TRAINING not in saved[param]
        and any(state.init == "param" for state in optimizer.rule_of(group).states.values())
        and isinstance(step := saved[param].get("step"), torch.Tensor)
        and not local_part(step).any()
    }


def load(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> set[torch.Tensor]:
    """Load a checkpoint's groups and states as torch does, but without casts, and all or nothing.

    Returns the parameters with states in the checkpoint, on whichever rank the states are.
    """
    # Values are copied into new buffers, so that the caller's tensors are not written. The optimizer's buffers stay in
    # use if they hold the values already, as after an in-place `dcp.load`. Existing tables and graphs are not used
    # again.
    try:
        with unchanged_on_error(optimizer):
            state_dict = dict(with_limits(state_dict))
            before, after = load_hooks(optimizer)
            for hook in before:
                replaced = hook(optimizer, state_dict)
                state_dict = state_dict if replaced is None else replaced
            optimizer.param_groups = loaded_groups(optimizer, state_dict["param_groups"])
            saved = _saved_states(optimizer, state_dict)
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            entries = {param: state_dict["state"].get(key, {}) for key, param in zip(keys, params_of(optimizer))}
            begun = {param for param, values in entries.items() if not _NOTHING.issuperset(map(type, values.values()))}
            states = loaded_states(optimizer, saved, bool(begun))
            for param, values in saved.items():
                state, holder = states.setdefault(param, dict(values)), optimizer.placement.holder(param)
                if values.get(TRAINING) is not None:
                    # The checkpoint was saved while the parameters held their averages.
                    state[TRAINING] = distribute(torch.empty_like(local_part(holder), requires_grad=False), holder)
                    copy_into(state[TRAINING], values[TRAINING].detach())
            # `dcp.load` stores values that are not tensors, such as the NaN of `mark_codes`, under the parameter's
            # number as a string.
            numbers = set(map(str, keys))
            others = {key: value for key, value in state_dict["state"].items() if str(key) not in numbers}
            ahead = set(states).difference(saved) | _before_first_steps(optimizer, saved)
            optimizer.set_states({**states, **others}, ahead, state_dict["param_groups"])
            for hook in after:
                hook(optimizer)
            return begun
    except BaseException:
        if not optimizer.memory.on_device:
            # The memory has freed buffers of the plan.
            optimizer.drop_plan()
        raise


def loaded_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a checkpoint's param groups with the optimizer's parameters, checked and complete."""
    before = optimizer.param_groups
    if len(before) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(own["params"]) != len(other["params"]) for own, other in zip(before, saved)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    rules = [optimizer.rule_of(group) for group in before]
    for index, (rule, stored) in enumerate(zip(rules, saved)):
        if stored.get("rule", rule.name) != rule.name:
            raise StateError(
                f"group {index} of the checkpoint is of rule {stored['rule']}, this optimizer's is of {rule.name}"
            )
        # AdamW always decouples the weight decay; Adam has an option.
        expected = rule.options.get("decoupled_weight_decay")
        if expected is not None and bool(stored.get("decoupled_weight_decay", expected)) is not expected:
            raise StateError(
                f"group {index} of the checkpoint has decoupled_weight_decay={not expected}, and {rule.name} "
                f"requires {expected}: load it into tilestep.Adam"
            )
    groups = copy.deepcopy([{key: value for key, value in group.items() if key != "params"} for group in saved])
    for index, (group, old, rule) in enumerate(zip(groups, before, rules)):
        own = {**GROUP_OPTIONS, **old}
        _complete_group(group, old, rule)
        for key, value in group.items():
            other = own.get(key)
            kinds = set(map(type, value if isinstance(value, (tuple, list)) else (value,)))
            alike = type(value) is type(other) and PYTHON_TYPES.issuperset(kinds) and bool(value == other)
            # The optimizer's current value was checked before.
            if value is not other and not alike:
                check_in_group(index, check_group, rule, group)
                break
        without_defaults(group)
    return groups


@contextmanager
def states_of_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which `optimizer.state` has no entries for parameters that were removed from its groups."""
    held = set(map(id, params_of(optimizer)))
    state = optimizer.state
    kept = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor) or id(key) in held}
    if len(kept) < len(state):
        optimizer.state = kept  # type: ignore[assignment]
    try:
        yield
    finally:
        if len(kept) < len(state):
            optimizer.state = state


def _complete_group(group: dict[str, Any], old: Mapping[str, Any], rule: Rule) -> None:
    """Give a loaded param group its parameters and the keys that are missing in the checkpoint."""
    # The optimizer decides how state is stored and communicated: it keeps its `master_weights`, `state_dtype`,
    # `rounding` and sync dtypes. If both round stochastically, the checkpoint's `seed` continues. Hyperparameters that
    # are functions of the step are kept.
    for key in ("params", "param_names", *rule.hyperparameters, *rule.options):
        if key in old:
            group.setdefault(key, old[key])
    for key in rule.hyperparameters:
        if type(old[key]) not in PYTHON_TYPES and changes(old[key]):
            group[key] = _with_functions(old[key], group[key])
    group.setdefault("max_grad_norm", old.get("max_grad_norm"))
    group["master_weights"] = old.get("master_weights", False)
    for key in ("state_dtype", "grad_sync_dtype", "param_sync_dtype"):
        group[key] = old.get(key)
    seeded = group if "rounding" in group else old
    group["seed"], group["rounding"] = seeded.get("seed", 0), old.get("rounding", "nearest")
    group.pop("rule", None)
    if "rule" in old:
        group["rule"] = old["rule"]


def _with_functions(old: Any, loaded: Any) -> Any:
    """Return a loaded hyperparameter, with the current functions of the step kept."""
    if isinstance(old, (tuple, list)) and isinstance(loaded, (tuple, list)) and len(old) == len(loaded):
        return type(loaded)(map(_with_functions, old, loaded))
    return old if changes(old) else loaded


def save_numbers(optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Replace functions of the step by their values at the last step, and options by the form that torch saves."""
    # Sync dtypes are left out: checkpoints do not depend on the ranks.
    for group, other in zip(optimizer.param_groups, saved):
        for key in ("grad_sync_dtype", "param_sync_dtype"):
            other.pop(key, None)
        if "state_dtype" in other:
            other["state_dtype"] = saved_choice(other["state_dtype"])
        rule = optimizer.rule_of(group)
        if rule.saved is not None:
            other.update(rule.saved(group))
        functions = [key for key, value in other.items() if key != "params" and changes(value)]
        if functions:
            # This synchronizes with the device, as does saving the checkpoint.
            states = [optimizer.state[param] for param in group["params"] if param in optimizer.state]
            # A rank has no step counts of parameters that other ranks update.
            known = [state["step"] for state in states if "step" in state]
            steps = known or [optimizer.execution.step_of(optimizer, group)]
            step = max(1.0, *(float(one) for one in steps if one is not None), 1.0)
            other.update({key: _numbers(at_step(other[key], step, key)) for key in functions})


def mark_codes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Store NaN under the names of blockwise states that torch's optimizers would silently reinitialize."""
    # torch's SGD and Muon count no steps: they initialize a missing state at the next step, and raise for a number.
    # Optimizers with a step count look up their states by name, and raise if they are missing.
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        if not optimizer.rule_of(group).counts_steps:
            for state in [state_dict["state"].get(number, {}) for number in saved["params"]]:
                state.update(dict.fromkeys(states_in_blocks(state), math.nan))


def _numbers(value: Any) -> Any:
    """Convert tensors in a hyperparameter to numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    return float(value) if isinstance(value, torch.Tensor) else value


def _saved_states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, Mapping[str, Any]]:
    """Return a checkpoint's values for this rank's share of each parameter, with names and shapes checked."""
    checked: dict[torch.Tensor, Mapping[str, Any]] = {}
    readers: dict[tuple[int, torch.dtype], _StateReader] = {}
    keys = [(key, saved) for saved in state_dict["param_groups"] for key in saved["params"]]
    live = optimizer.state
    for ordinal, ((key, saved), listed) in enumerate(zip(keys, iter_params(optimizer))):
        values, (_, index, group, param) = state_dict["state"].get(key, {}), listed
        share = optimizer.placement.share(listed, ordinal)
        # The parameter of an empty state has not been stepped.
        if share is None or _NOTHING.issuperset(map(type, values.values())):
            continue
        label = share.label
        reader = readers.get((index, param.dtype))
        if reader is None:
            reader = readers[index, param.dtype] = _StateReader(optimizer.rule_of(group), param.dtype, group)
        may_have_blocks = not reader.blockwise.isdisjoint(values)
        if may_have_blocks or not reader.names.issuperset(values) or not _PLAIN.issuperset(map(type, values.values())):
            values, own = read_by_value(Saved(label, values, saved, reader.rule, param)), live.get(param, {})
            for name in [name for name in values if name not in reader.names and name not in own]:
                if isinstance(values[name], torch.Tensor):
                    raise StateError(
                        f"the checkpoint has state {name!r} for {label}, which rule {reader.rule.name} does not have "
                        f"({', '.join(reader.rule.state_names) or 'no states'}): it was saved by another optimizer"
                    )
        checked[param] = optimizer.placement.own_state(share, reader.rule, reader.read(label, param, values))
    return checked


def _refuse_lost_codes(label: str, name: str, values: Mapping[str, Any], own: Container[str]) -> None:
    """Raise for a state with block arrays that match no format: its codes would be read as numbers."""
    there = [key for key in (name, *block_names(name)) if key not in own or key == name]
    found = {key: dtype_name(values[key].dtype) for key in there if isinstance(values.get(key), torch.Tensor)}
    if found.keys() - {name}:
        raise StateError(
            f"state {name!r} of {label} is {' and '.join(f'{key!r} in {kept}' for key, kept in found.items())}: codes "
            "and scales were cast, as torch's optimizers do on load, or other code reinitialized the state; convert "
            "checkpoints with tilestep.full_precision before other optimizers load them"
        )


class _StateReader:
    """Checks a checkpoint's states for a group's parameters of one dtype; made once per group and dtype."""

    def __init__(self, rule: Rule, dtype: torch.dtype, group: Mapping[str, Any]) -> None:
        self.rule = rule
        kind = master_kind(dtype, group)
        self._integers = kind.key if kind is not None and not kind.buffer_dtype.is_floating_point else ""
        starts = {**dict.fromkeys((TRAINING, *MASTER_KEYS), _LIKE_PARAM)}
        starts.update(starts_of(rule, rule.state_names, dtype, group))
        self._starts = {name: start for name, start in starts.items() if start.shape != "scalar"}
        self.blockwise = {array for name in starts for array in block_names(name)}  # arrays of blockwise states
        self.names = {"step", *starts, *self.blockwise}  # names that a state of the rule may have

    def read(self, label: str, param: torch.Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked values of a parameter's state."""
        values, rule = dict(saved), self.rule
        if not _PLAIN.issuperset(map(type, values.values())) and not is_distributed(param):
            # The checkpoint is from an optimizer of DTensors.
            values = {name: gathered(value) if is_distributed(value) else value for name, value in values.items()}
        has_blocks = not self.blockwise.isdisjoint(values)
        for name, start in self._starts.items():
            blocks = kept_in_blocks(values, name) if has_blocks else None
            for array in () if blocks is None else blocks.arrays(name):
                expected = shape_of_entries(param.shape, array.elements)
                check_shape(label, array.name, values[array.name], expected, _THERE, f" for {blocks}")
            value = values.get(name)
            if has_blocks and name not in MASTER_KEYS and (blocks is None or isinstance(value, torch.Tensor)):
                _refuse_lost_codes(label, name, values, rule.state_names)
            if blocks is not None:
                values.pop(name, None)  # the NaN of `mark_codes`
                continue
            if not isinstance(value, torch.Tensor):
                continue
            is_number = (value.is_floating_point() and value.dtype.itemsize > 1) or value.is_complex()
            if name not in MASTER_KEYS and not is_number:
                raise StateError(
                    f"state {name!r} of {label} is {dtype_name(value.dtype)} in the checkpoint, without scales for "
                    "its codes: convert it to floating point"
                )
            if start.shape == "param" and value.shape == param.shape:
                continue
            expected = shape_of(start, param, param.shape)
            if tuple(value.shape) != expected and value.numel() == 1 and math.prod(expected) == 1:
                values[name] = value = value.detach().reshape(expected)
            check_shape(label, name, value, expected, _THERE)
        if self._integers in values and values[self._integers].dtype.is_floating_point:
            # torch's optimizers cast the integers to floating point, which loses their bits.
            del values[self._integers]
        if values.get("step") is None and any(isinstance(value, torch.Tensor) for value in values.values()):
            if rule.counts_steps:
                raise StateError(f"the checkpoint has no step count ('step') for {label}, which {rule.name} needs")
            # torch's optimizers without step counts create their buffers at the first step.
            values["step"] = 1.0
        return values
