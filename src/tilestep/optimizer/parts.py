"""Engines for entries: one a device, or one for each part of the optimizer that is stepped by itself there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.spec import KernelSpec
from ..engine import Decider, DeviceEngine, Entry, JointNorm

if TYPE_CHECKING:
    from .protocol import Optimizer


BySpec = Sequence[tuple[KernelSpec, Sequence[Entry]]]


def build_engines(
    optimizer: Optimizer,
    by_device: Mapping[torch.device, BySpec],
    members: Mapping[int, torch.Tensor],
    keys: Sequence[Sequence[str]],
) -> tuple[list[DeviceEngine], dict[Any, list[int]]]:
    """Make the engines."""
    home = optimizer.memory
    engines: list[DeviceEngine] = []
    places: dict[Any, list[int]] = {}
    for device, by_spec in by_device.items():
        divided = _divided(optimizer, by_spec, members)
        decider = Decider(device)
        made = [
            DeviceEngine(device, home.divide(own), optimizer.param_groups, keys, decider, home.attend)
            for own in divided.values()
        ]
        if len(made) > 1:
            decider.joint = JointNorm([entry for _, entries in by_spec for entry in entries], made)
        for place, part in enumerate(divided, len(engines)):
            places.setdefault(part, []).append(place)
        engines.extend(made)
    return engines, places


def _divided(
    optimizer: Optimizer, by_spec: BySpec, members: Mapping[int, torch.Tensor]
) -> dict[Any, list[tuple[KernelSpec, list[Entry]]]]:
    """The entries of one device by part."""
    divided: dict[Any, dict[int, tuple[KernelSpec, list[Entry]]]] = {}
    for spec, entries in by_spec:
        for entry in entries:
            own = divided.setdefault(optimizer.schedule.part_of(members[id(entry)]), {})
            own.setdefault(id(spec), (spec, []))[1].append(entry)
    return {part: list(own.values()) for part, own in divided.items()}
