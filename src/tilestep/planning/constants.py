"""Constants of a machine that plans are made from, each with where it is from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ASSUMED = "assumed"
"""How the source of a constant begins that nobody has measured."""

_DEFAULTS = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Constants:
    """What the times of a plan are computed from.

    Args:
        sources: where each is from; those that begin with "assumed" are not measured.
    """

    reduce_scatter_bandwidth: float  # bytes a second that a rank receives in a large reduce-scatter inside a node
    all_gather_bandwidth: float  # the same for an all-gather
    network_bandwidth: float  # bytes a second between nodes, for each GPU
    launch_latency: float  # seconds of the smallest collective, but for its hops
    hop_latency: float  # seconds that each further rank of a node adds
    network_hop_latency: float  # seconds that each further node adds
    memory_bandwidth: float  # bytes a second of a copy on one GPU, read and written
    step_latency: float  # seconds of a step without parameters: launches, one after the other
    compute: float  # floating-point operations a second in forward and backward of an eager model, for further tokens
    compiled_compute: float  # the same with blocks that are compiled
    model_bytes: float  # bytes an element that forward and backward move whatever the tokens: weights and gradients
    compiled_model_bytes: float  # the same with blocks that are compiled
    model_host: float  # seconds of the host for each tensor in forward and backward of an eager model
    compiled_model_host: float  # the same with blocks that are compiled
    step_host: float  # seconds of the host in a step without parameters
    tensor_host: float  # seconds that each tensor adds to it
    message_host: float  # seconds that each collective adds to it
    beside_sums: float  # seconds that backward takes longer for each second of sums beside it
    beside_gathers: float  # seconds that forward takes longer for each second of gathers beside it
    gpu_memory: float  # bytes
    gpus_per_node: int  # GPUs that reach each other without the network
    sources: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Constants:
        """Read what `save` wrote, or a part of it: what is missing is taken from the defaults."""
        stored: dict[str, dict[str, Any]] = json.loads(path.read_text())
        names = [each.name for each in dataclasses.fields(cls) if each.name != "sources"]
        known: dict[str, dict[str, Any]] = {} if path == _DEFAULTS else json.loads(_DEFAULTS.read_text())
        for name, entry in stored.items():
            if name not in names:
                raise ValueError(f"{path}: no constant is called {name!r}; there are {', '.join(names)}")
            if not isinstance(entry.get("value"), (int, float)) or not entry["value"] > 0:
                raise ValueError(f"{path}: {name} is {entry.get('value')!r}; it must be a positive number")
        entries = {**known, **stored}
        return cls(
            **{name: entries[name]["value"] for name in names},
            sources={name: str(entries[name].get("source", ASSUMED)) for name in names},
        )

    def save(self, path: Path) -> None:
        """Write them as JSON: name, value, source."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "sources"]
        entries = {name: {"value": getattr(self, name), "source": self.sources.get(name, ASSUMED)} for name in names}
        path.write_text(json.dumps(entries, indent=1) + "\n")

    @property
    def assumed(self) -> list[str]:
        """Names of those that are not measured."""
        return [name for name, source in self.sources.items() if source.startswith(ASSUMED)]


def default_constants() -> Constants:
    """Those of an H200 with eight to a node, that come with tilestep.

    Example:
        >>> default_constants().gpus_per_node
        8
    """
    return Constants.load(_DEFAULTS)
