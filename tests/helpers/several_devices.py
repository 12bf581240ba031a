"""Several devices, played by the CPU: engines that share nothing, each with a norm and a decision of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import tilestep.optimizer.build
from tilestep.optimizer.build import build_engines

__all__ = ["spread_over_devices"]


def spread_over_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let optimizers that are made from now on treat their parameters as if each was in turn on one of some devices.

    Args:
        monkeypatch: takes it back.
        count: how many devices.
    """

    def spread(optimizer: Any, by_device: Mapping[torch.device, Any]) -> tuple[list[Any], dict[Any, tuple[int, ...]]]:
        device, by_spec = next(iter(by_device.items()))
        order = [id(entry) for _, entries in by_spec for entry in entries]
        engines: list[Any] = []
        for index in range(count):
            own = set(order[index::count])
            mine = [(spec, [entry for entry in entries if id(entry) in own]) for spec, entries in by_spec]
            made, _ = build_engines(optimizer, {device: [one for one in mine if one[1]]})
            engines.extend(made)
        assert len({id(engine.control) for engine in engines}) == count
        return engines, {None: tuple(range(len(engines)))}

    monkeypatch.setattr(tilestep.optimizer.build, "build_engines", spread)
