"""A checkpoint's state in float32, as torch's optimizers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..placements.local import is_distributed, local_part
from ..storage import Storage, kept_in_blocks, values_of
from .masters import MASTER_KEYS

_OWN_KEYS = ("state_dtype", "master_weights")


def full_precision(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict whose states are float32 tensors like their parameters, for torch's optimizers and other code.

    Blocks are given by their values, 16-bit states are widened. Masters and corrections of parameters are left out:
    save the parameters in float32 for them. What is given stays as it is.

    Args:
        state_dict: of an optimizer of tilestep's; of a sharded one what `full_state_dict()` gives.

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
    state = {
        key: _widened(values) if isinstance(values, Mapping) else values for key, values in state_dict["state"].items()
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

    numbers = values_of(blocks, local, name, shape=shape_of(local[name]))
    if not is_distributed(codes):
        return numbers
    shape = shape_of(codes)
    stride = torch.empty(shape, device="meta").stride()
    return type(codes).from_local(
        numbers, codes.device_mesh, codes.placements, run_check=False, shape=shape, stride=stride
    )
