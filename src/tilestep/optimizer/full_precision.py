"""A checkpoint's state in float32, as torch's optimizers have it; what other libraries have quantized, by value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..errors import StateError
from ..placements.local import is_distributed, local_part
from ..storage import Storage, kept_in_blocks, values_of
from .masters import MASTER_KEYS

_OWN_KEYS = ("state_dtype", "master_weights", "rounding", "seed")


def full_precision(state_dict: Mapping[str, Any], rule: str = "") -> dict[str, Any]:
    """A state_dict whose states are float32 tensors like their parameters, for torch's optimizers and other code.

    Blocks are given by their values, 16-bit states are widened. Masters and corrections of parameters are left out:
    save the parameters in float32 for them. What is given stays as it is.

    Args:
        state_dict: of an optimizer of tilestep's, of a sharded one what `full_state_dict()` gives; or of bitsandbytes',
            torchao's or FlashOptim's low-bit optimizers. Tilestep's own load all of these as they are.
        rule: for bitsandbytes, which has no names of states: what the optimizer computes. Two states are taken for
            AdamW's unless this says otherwise.

    Raises:
        StateError: for a quantized state that cannot be read.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(64, 128))
        >>> optimizer = tilestep.AdamW([weight], state_dtype="int8")
        >>> weight.grad = torch.ones(64, 128)
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].dtype
        torch.int8
        >>> theirs = torch.optim.AdamW([weight])
        >>> theirs.load_state_dict(tilestep.full_precision(optimizer.state_dict()))
        >>> theirs.state[weight]["exp_avg"].dtype, sorted(theirs.state[weight])
        (torch.float32, ['exp_avg', 'exp_avg_sq', 'step'])
    """
    groups_of = {key: group for group in state_dict["param_groups"] for key in group["params"]}
    state = {
        key: _widened(read_by_value(f"parameter {key}", values, groups_of.get(key, {}), rule))
        if isinstance(values, Mapping)
        else values
        for key, values in state_dict["state"].items()
    }
    groups = [{key: value for key, value in g.items() if key not in _OWN_KEYS} for g in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _widened(values: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state in float32."""
    found: dict[str, Any] = {}
    beside: set[str] = set(MASTER_KEYS)
    for name, value in values.items():
        blocks = kept_in_blocks(values, name) if isinstance(value, torch.Tensor) else None
        if blocks is not None:
            beside.update(array.name for array in blocks.arrays(name)[1:])
            found[name] = _values(blocks, name, values)
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            found[name] = value.to(torch.float32, copy=True)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name not in beside}


def _values(blocks: Storage, name: str, values: Mapping[str, Any]) -> Any:
    """A state in blocks as float32 numbers; of a DTensor what is here, as a DTensor."""
    codes = values[name]
    elements = blocks.arrays(name)[0].elements
    local = {array.name: local_part(values[array.name]) for array in blocks.arrays(name)}

    def shape_of(tensor: Any) -> torch.Size:
        # Formats that pack neighbours are for even rows alone.
        return torch.Size((*tensor.shape[:-1], tensor.shape[-1] * elements)) if elements > 1 else tensor.shape

    return _placed(values_of(blocks, local, name, shape=shape_of(local[name])), codes, shape_of(codes))


def _placed(numbers: torch.Tensor, like: Any, shape: torch.Size) -> Any:
    """What is here of a state of this shape, as a DTensor where the array that it was read from is one."""
    if not is_distributed(like):
        return numbers
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        numbers, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


_NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes has the tensors of a state."""

_CODES, _SCALES = "::quantized", "::scales"
"""What FlashOptim adds to the names of states."""

_CORRECTION = "error_bits"
"""What FlashOptim keeps beside a parameter of 16 bits."""

_MARKS = {_NESTED, "state1", _CORRECTION, *(f"{name}{_CODES}" for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"))}

_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, type(None)}

_NUMBERED: dict[str, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "LAMB": ("exp_avg", "exp_avg_sq"),
    "AdEMAMix": ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"),
    "Lion": ("exp_avg",),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",),
    "Adagrad": ("sum",),
}
"""The states of rules that bitsandbytes has too, as it numbers them."""


def read_by_value(
    label: str,
    values: Mapping[str, Any],
    group: Mapping[str, Any],
    rule: str = "",
    param: torch.Tensor | None = None,
    names: Collection[str] = (),
) -> Mapping[str, Any]:
    """A parameter's saved state with what other libraries have quantized in float32, under this library's names.

    Those of `scaled_states` are multiplied with their scales, unless these are the rule's own.

    Args:
        label: the parameter in error messages.
        values: its saved state, which is returned where nothing in it is of another library.
        group: the checkpoint's param group.
        rule: the name of the rule whose states they are; empty for what their number says.
        param: the parameter, for a master of a correction; without it there is none.
        names: the states that the rule has.

    Raises:
        StateError: for what cannot be read.

    Source: the optimizers of bitsandbytes 0.50, torchao 0.18 (`torchao.optim`) and FlashOptim 0.1.4.
    """
    scales = [name for name in values if name.endswith("_scale") and name not in names]
    if not scales and _MARKS.isdisjoint(values) and _PLAIN.issuperset(map(type, values.values())):
        return values
    found = {**values, **values.get(_NESTED, {})}
    found.pop(_NESTED, None)
    for scale in scales:
        base = scale.removesuffix("_scale")
        if isinstance(found.get(base), torch.Tensor) and found[base].dtype is torch.float16:
            found[base] = found[base].float() * found.pop(scale).to(local_part(found[base]).device)
    for name, value in list(found.items()):
        if name.endswith(_CODES):
            base = name.removesuffix(_CODES)
            del found[name]
            found[base] = _of_groups(label, base, value, found.pop(base + _SCALES, None))
        elif isinstance(value, torch.Tensor) and hasattr(local_part(value), "codes"):
            found[name] = _of_subclass(label, name, value)
    if "state1" in found:
        found = _named(label, _of_maps(label, found), rule)
    correction = found.pop(_CORRECTION, None)
    if correction is not None and param is not None and param.dtype in (torch.bfloat16, torch.float16):
        found["master_param"] = _corrected(label, param, correction, group)
    return found


def _of_subclass(label: str, name: str, value: Any) -> Any:
    """A state that is a tensor of a library's own class, as torchao's `OptimState8bit`, which gives its numbers."""
    local = local_part(value)
    try:
        numbers = local.dequantize().to(torch.float32)
    except Exception as error:
        raise StateError(
            f"state {name!r} of {label} is of the class {type(local).__name__}, which does not give its numbers by "
            f"dequantize(); give them as a plain tensor ({error})"
        ) from error
    return _placed(numbers.reshape(local.shape), value, value.shape)


def _of_groups(label: str, name: str, codes: Any, scales: Any) -> Any:
    """FlashOptim's states: 32 neighbours of the flattened local tensor have a scale of 16 bits.

    Second moments are kept by their root, in 255 steps; others companded, 2x / (1 + |x|) in 127.
    """
    own = local_part(codes)
    scale = None if scales is None else local_part(scales)
    if scale is not None and scale.dtype is torch.bfloat16:
        # It is the bits of a float16: torch's optimizers would round one of its own when they load it.
        scale = scale.view(torch.float16)
    rows, most = _rows(label, name, own, scale, 32)
    if name.endswith("_sq"):
        numbers = (rows / 255).square() * most.square()
    else:
        share = rows / 127
        numbers = share / (2 - share.abs()) * most
    return _placed(numbers.flatten()[: own.numel()].reshape(own.shape), codes, codes.shape)


def _of_maps(label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """bitsandbytes' states: codes of 8 bits are places in a map, and 256 neighbours have their largest magnitude."""
    found = {name: value for name, value in values.items() if not name.startswith(("absmax", "qmap", "state"))}
    for number in "12":
        codes, scale = values.get(f"state{number}"), values.get(f"absmax{number}")
        if codes is None or codes.is_floating_point():
            found[f"state{number}"] = codes
            continue
        if scale is None and f"max{number}" in values:
            raise StateError(
                f"state{number} of {label} is of bitsandbytes' optimizers without block-wise scales, which are not "
                "read: let a version of bitsandbytes that has them save float32 states (optim_bits=32)"
            )
        # AdEMAMix has two states in one.
        is_double = scale is not None and scale.dim() == 2
        parts: Any = zip(codes, scale) if scale is not None and is_double else [(codes, scale)]
        read = []
        for part, largest in parts:
            rows, most = _rows(label, f"state{number}", part, largest, 256)
            numbers = values[f"qmap{number}"][rows.long()] * most
            read.append(numbers.flatten()[: part.numel()].reshape(part.shape))
        found[f"state{number}"] = torch.stack(read) if is_double else read[0]
    return found


def _named(label: str, values: dict[str, Any], rule: str) -> dict[str, Any]:
    """bitsandbytes' states under the names that a rule's have."""
    first, second = values.pop("state1"), values.pop("state2", None)
    states = [first, second] if second is not None else [first]
    if second is not None and first.dim() == second.dim() + 1:
        states = [*first, second]
    if not rule and len(states) > 1:
        rule = "AdamW" if len(states) == 2 else "AdEMAMix"
    names = _NUMBERED.get(rule, ())
    if len(names) != len(states):
        fitting = " or ".join(other for other, own in _NUMBERED.items() if len(own) == len(states))
        raise StateError(
            f"{label} has {len(states)} of bitsandbytes' states, which have no names: they can be those of {fitting}"
            + (f", not of {rule}" if rule else ": give one as `rule`")
        )
    return {**values, **dict(zip(names, states))}


def _rows(
    label: str, name: str, codes: torch.Tensor, scale: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as numbers, a row for each scale, and a column of these."""
    count = -(-codes.numel() // block)
    if scale is None or scale.dim() != 1 or len(scale) != count:
        shape = "no scales" if scale is None else f"scales of shape {tuple(scale.shape)}"
        raise StateError(
            f"state {name!r} of {label} has {codes.numel()} codes and {shape}: it needs {count}, one for {block} "
            "codes; gather the whole state where it was sharded"
        )
    flat = codes.reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, count * block - flat.numel())).reshape(count, block)
    return rows, scale.float()[:, None]


def _corrected(label: str, param: torch.Tensor, correction: Any, group: Mapping[str, Any]) -> Any:
    """The float32 value of a parameter with FlashOptim's correction: so many 127ths, or 32767ths, of half a unit."""
    bits, here = local_part(correction), local_part(param.detach())
    if bits.is_floating_point():
        if "master_bytewidth" not in group:
            raise StateError(
                f"{_CORRECTION!r} of {label} has 8 or 16 bits, and the checkpoint's param group does not say which: it "
                "needs FlashOptim's 'master_bytewidth', 3 or 4"
            )
        bits = bits.to(torch.int8) if int(group["master_bytewidth"]) == 3 else bits.view(torch.int16)
    if bits.shape != here.shape:
        raise StateError(f"{_CORRECTION!r} of {label} has shape {tuple(bits.shape)}, it needs {tuple(here.shape)}")
    exact = here.double()
    mantissa, least = (7, -126) if param.dtype is torch.bfloat16 else (10, -14)
    _, exponent = torch.frexp(exact)
    exponent = torch.where(exact == 0, least, exponent - 1).clamp(min=least)
    steps = bits.to(exact.device).double() / torch.iinfo(bits.dtype).max
    value = (exact + torch.ldexp(steps, exponent - mantissa - 1)).float()
    # Half a unit is a tie, which may round to the neighbour: a master belongs to what it rounds to.
    value = torch.where(value.to(param.dtype) == here, value, torch.nextafter(value, here.float()))
    return _placed(value, param, param.shape)
