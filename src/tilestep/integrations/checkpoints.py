"""Checkpoints of bitsandbytes 0.50, torchao 0.18 and FlashOptim 0.1.4 in low-bit formats, and of dion, read by value.

The libraries are not needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from ..optimizer.checkpoint import READERS, Saved, placed_like
from ..placement.local import local_part
from ..rules import Rule, registry

_WARMUPS = {"t_alpha": "alpha_warmup", "t_beta3": "beta3_warmup"}  # of bitsandbytes' AdEMAMix, and ours
_NESTED = "__bnb_optimizer_quant_state__"  # bitsandbytes' key for the tensors of a state
_CODES, _SCALES = "::quantized", "::scales"  # FlashOptim's suffixes of names of states
_CORRECTION = "error_bits"  # FlashOptim's correction of a 16-bit parameter


def read_bitsandbytes(saved: Saved) -> Mapping[str, Any]:
    """bitsandbytes' numbered states, under the names of the rule's states."""
    values = {**saved.values, **saved.values.get(_NESTED, {})}
    values.pop(_NESTED, None)
    if "state1" not in values:
        return values
    for key, ours in _WARMUPS.items():
        if saved.group.get(key) is not None and saved.param is not None:
            warnings.warn(
                f"the checkpoint's {key}={saved.group[key]} is not loaded: set {ours}= in the param group",
                stacklevel=2,
            )
    return _named(saved.label, _of_maps(saved.label, values), saved.rule)


def read_torchao(saved: Saved) -> Mapping[str, Any]:
    """States that are tensors of a library's subclass with codes, such as torchao's `OptimState8bit`."""
    has_codes = [
        name
        for name, value in saved.values.items()
        if isinstance(value, torch.Tensor) and hasattr(local_part(value), "codes")
    ]
    return {**saved.values, **{name: _of_subclass(saved.label, name, saved.values[name]) for name in has_codes}}


def read_flashoptim(saved: Saved) -> Mapping[str, Any]:
    """FlashOptim's states, and its corrections of parameters as float32 masters."""
    values, param = dict(saved.values), saved.param
    for name in [name for name in values if name.endswith(_CODES)]:
        base = name.removesuffix(_CODES)
        values[base] = _of_groups(saved.label, base, values.pop(name), values.pop(base + _SCALES, None))
    correction = values.pop(_CORRECTION, None)
    if correction is not None and param is not None and param.dtype in (torch.bfloat16, torch.float16):
        values["master_param"] = _corrected(saved.label, param, correction, saved.group)
    return values


def read_dion(saved: Saved) -> Mapping[str, Any]:
    """dion's Muon and NorMuon, whose momentum is a sum, and whose param groups name the algorithm."""
    values, group = dict(saved.values), saved.group
    if group.get("algorithm") not in ("muon", "normuon") or "momentum" not in values:
        return values
    values["momentum_buffer"] = values.pop("momentum") * (1 - float(group["mu"]))
    if "variance_neuron" in values:
        values["second_momentum_buffer"] = values.pop("variance_neuron")
    return values


READERS.extend((read_bitsandbytes, read_torchao, read_flashoptim, read_dion))


def averaged_momentum(state_dict: Mapping[str, Any], momentum: float | None = None) -> dict[str, Any]:
    """Convert a `state_dict` whose momentum is a sum of gradients to one whose momentum is their average.

    Muon's `momentum_buffer` averages, b <- momentum * b + (1 - momentum) * g, as torch's, DeepSpeed's and
    Emerging-Optimizers' do. Early versions of KellerJordan's Muon sum, b <- momentum * b + g. Their checkpoints look
    like those of later versions, so that only you know which yours is. Checkpoints of dion need no conversion.

    Args:
        state_dict: the state_dict of such an optimizer; it is not changed.
        momentum: the momentum of its steps; None for the `momentum` of its param groups.

    Returns:
        The state_dict with every `momentum_buffer` times 1 - momentum.

    Raises:
        StateError: if a param group with such a state has no `momentum`, and none is given.
        ValueError: for a `momentum` out of [0, 1).

    Example:
        >>> import torch
        >>> theirs = {"state": {0: {"momentum_buffer": torch.tensor([20.0])}}}
        >>> theirs["param_groups"] = [{"momentum": 0.95, "params": [0]}]
        >>> averaged_momentum(theirs)["state"]
        {0: {'momentum_buffer': tensor([1.])}}
    """
    state = {
        key: dict(values) if isinstance(values, Mapping) else values for key, values in state_dict["state"].items()
    }
    for index, group in enumerate(state_dict["param_groups"]):
        for values in [state[key] for key in group["params"] if "momentum_buffer" in state.get(key, {})]:
            own = group.get("momentum") if momentum is None else momentum
            if own is None:
                raise StateError(f"group {index} of the checkpoint has no 'momentum': pass `momentum`")
            if not 0 <= float(own) < 1:
                raise ValueError(f"Invalid momentum: {own}; it must be in [0, 1)")
            values["momentum_buffer"] = values["momentum_buffer"] * (1 - float(own))
    return {**state_dict, "state": state}


def _of_subclass(label: str, name: str, value: Any) -> Any:
    """The values of a state that is a tensor of a library's subclass, such as torchao's `OptimState8bit`."""
    local = local_part(value)
    try:
        numbers = local.dequantize().to(torch.float32)
    except Exception as error:
        raise StateError(
            f"state {name!r} of {label} has the type {type(local).__name__}, whose dequantize() failed; pass a plain "
            f"tensor ({error})"
        ) from error
    return placed_like(numbers.reshape(local.shape), value, value.shape)


def _of_groups(label: str, name: str, codes: Any, scales: Any) -> Any:
    """Decode FlashOptim's states: 32 neighbours of the flattened local tensor share a 16-bit scale."""
    # Second moments are stored as roots, in 255 steps; other states as 2x / (1 + |x|), in 127 steps.
    own = local_part(codes)
    scale = None if scales is None else local_part(scales)
    if scale is not None and scale.dtype is torch.bfloat16:
        # The bits of a float16, stored as integers to avoid casts of torch's loader.
        scale = scale.view(torch.float16)
    rows, most = _rows(label, name, own, scale, 32)
    if name.endswith("_sq"):
        numbers = (rows / 255).square() * most.square()
    else:
        share = rows / 127
        numbers = share / (2 - share.abs()) * most
    return placed_like(numbers.flatten()[: own.numel()].reshape(own.shape), codes, codes.shape)


def _of_maps(label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Decode bitsandbytes' states: 8-bit codes index a map, and blocks of 256 share a scale, the largest magnitude."""
    others = {
        name: value for name, value in values.items() if not name.startswith(("absmax", "qmap", "state", "unorm"))
    }
    for number in "12":
        codes, scale = values.get(f"state{number}"), values.get(f"absmax{number}")
        if codes is None or codes.is_floating_point():
            others[f"state{number}"] = codes
            continue
        if scale is None and f"max{number}" in values:
            raise StateError(
                f"state{number} of {label} has no block-wise scales: this format of bitsandbytes is not supported; "
                "save float32 states (optim_bits=32) with a version of bitsandbytes that supports it"
            )
        # AdEMAMix stacks two states.
        is_double = scale is not None and scale.dim() == 2
        parts: Any = zip(codes, scale) if scale is not None and is_double else [(codes, scale)]
        read = []
        for part, largest in parts:
            rows, most = _rows(label, f"state{number}", part, largest, 256)
            numbers = values[f"qmap{number}"][rows.long()] * most
            read.append(numbers.flatten()[: part.numel()].reshape(part.shape))
        others[f"state{number}"] = torch.stack(read) if is_double else read[0]
    return others


def _named(label: str, values: dict[str, Any], rule: Rule | None) -> dict[str, Any]:
    """bitsandbytes' states under the names of the rule's states."""
    first, second = values.pop("state1"), values.pop("state2", None)
    states = [first, second] if second is not None else [first]
    if second is not None and first.dim() == second.dim() + 1:
        states = [*first, second]
    fitting = [known for known in registry.values() if known.numbered == len(states)]
    spellings = {known.state_names[: len(states)] for known in (fitting if rule is None else [rule])}
    if len(spellings) != 1 or (rule is not None and rule.numbered != len(states)):
        raise StateError(
            f"{label} has {len(states)} unnamed states of bitsandbytes, which fit "
            + " or ".join(one.name for one in fitting)
            + (f", not of {rule.name}" if rule is not None else ": pass one as `rule`")
        )
    return {**values, **dict(zip(spellings.pop(), states))}


def _rows(
    label: str, name: str, codes: torch.Tensor, scale: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as numbers, a row per scale, and a column of scales."""
    count = -(-codes.numel() // block)
    if scale is None or scale.dim() != 1 or len(scale) != count:
        shape = "no scales" if scale is None else f"scales of shape {tuple(scale.shape)}"
        raise StateError(
            f"state {name!r} of {label} has {codes.numel()} codes and {shape}: it needs {count}, one per {block} "
            "codes; gather the whole state if it was sharded"
        )
    flat = codes.reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, count * block - flat.numel())).reshape(count, block)
    return rows, scale.float()[:, None]


def _corrected(label: str, param: torch.Tensor, correction: Any, group: Mapping[str, Any]) -> Any:
    """The float32 value of a parameter with FlashOptim's correction, in 127ths, or 32767ths, of half a unit."""
    bits, local = local_part(correction), local_part(param.detach())
    if bits.is_floating_point():
        if "master_bytewidth" not in group:
            raise StateError(
                f"{_CORRECTION!r} of {label} needs FlashOptim's 'master_bytewidth', 3 or 4, in the checkpoint's param "
                "group"
            )
        bits = bits.to(torch.int8) if int(group["master_bytewidth"]) == 3 else bits.view(torch.int16)
    if bits.shape != local.shape:
        raise StateError(f"{_CORRECTION!r} of {label} has shape {tuple(bits.shape)}, it needs {tuple(local.shape)}")
    exact = local.double()
    mantissa, least = (7, -126) if param.dtype is torch.bfloat16 else (10, -14)
    _, exponent = torch.frexp(exact)
    exponent = torch.where(exact == 0, least, exponent - 1).clamp(min=least)
    steps = bits.to(exact.device).double() / torch.iinfo(bits.dtype).max
    value = (exact + torch.ldexp(steps, exponent - mantissa - 1)).float()
    # Half a unit is a tie, which may round to the neighbour; a master must round to its parameter.
    value = torch.where(value.to(param.dtype) == local, value, torch.nextafter(value, local.float()))
    return placed_like(value, param, param.shape)
