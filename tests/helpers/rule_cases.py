"""Every rule with every storage against float64, for processes side by side: most of the time is the compiler's."""

from __future__ import annotations

import traceback

import torch
from float64_reference import check_steps
from matrix_rules import MATRIX_RULES

from tilestep.optimizer.masters import MasterWeights
from tilestep.rules import registry

STORAGES: dict[str, tuple[torch.dtype, MasterWeights]] = {
    "float32": (torch.float32, False),
    "float64": (torch.float64, False),
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "bfloat16-master": (torch.bfloat16, True),
    "bfloat16-remainder": (torch.bfloat16, "remainder"),
    "float16-master": (torch.float16, True),
}
# Rules of matrices, and Prodigy, whose reference needs all parameters at once, are tested on their own.
OWN = {name for name, rule in registry.items() if rule.__module__.startswith("tilestep.")}
NAMES = sorted(OWN - {*MATRIX_RULES, "Prodigy"})


def check_case(name: str, storage: str, device: str) -> str:
    """Three steps over every layout, each compared with the rule in float64.

    Returns:
        What was wrong, or an empty string.
    """
    torch.set_num_threads(1)
    dtype, master = STORAGES[storage]
    try:
        with torch.device(device):
            check_steps(registry[name], dtype, master)
    except Exception:
        return traceback.format_exc()
    return ""
