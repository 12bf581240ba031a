"""An optimizer's parameters one by one: what messages call them, which can be updated, which have state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ..engine import check_no_overlap
from ..errors import GradientError

__all__ = ["LISTED_TWICE", "check_parameter", "further_rounds", "labelled", "param_states"]

LISTED_TWICE = "a param group lists a parameter twice"
"""What messages say where each parameter must be there once."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_parameter(param: torch.Tensor, label: str) -> None:
    """Raise for a parameter that cannot be updated in place.

    Args:
        param: the parameter.
        label: how messages call it.

    Raises:
        GradientError: sparse, complex, of an unsupported dtype, or overlapping itself.
    """
    if param.layout is not torch.strided:
        raise GradientError(f"{label} is {param.layout}; only dense parameters are supported")
    if param.is_complex():
        raise GradientError(f"{label} is complex; give the optimizer torch.view_as_real of it instead")
    if param.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise GradientError(f"{label} has dtype {param.dtype}; supported are {names}")
    check_no_overlap(param, label)


def labelled(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, int, dict[str, Any], torch.Tensor]]:
    """Every parameter in order: what messages call it, index of its group, its group, and itself."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            label = f"parameter {index} of group {group_index}"
            yield (f"{label} ({names[index]})" if names else label), group_index, group, param


def further_rounds(optimizer: torch.optim.Optimizer) -> tuple[frozenset[int], ...]:
    """For parameters that a group lists several times, which torch updates as often: those of each further round.

    Args:
        optimizer: the optimizer; torch has warned of such a group.

    Returns:
        The parameters by `id`, a set for each round; the first round has all of them and is left out.
    """
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if len(set(ids)) == len(ids):
        return ()
    counts = Counter(ids)
    rounds = range(1, max(counts.values()))
    return tuple(frozenset(one for one, count in counts.items() if count > before) for before in rounds)


def param_states(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Every parameter that has state, with it; not what else a user keeps in the optimizer's state."""
    return [(param, state) for param, state in optimizer.state.items() if isinstance(param, torch.Tensor)]
