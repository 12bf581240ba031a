"""FSDP2's modules: when their parameters are gathered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def fsdp_module_type() -> Any | None:
    """The class of modules that FSDP2 shards, or None where nobody has imported it: then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_flat_part(param: Any) -> bool:
    """Whether a parameter is a flat one of FSDP1 or, with `use_orig_params=True`, a piece of one."""
    return bool(getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False))


def before_gathering(module: Any, prepare: Callable[[list[Any]], None]) -> bool:
    """Have something called before an FSDP2 module's parameters are read to be gathered, whoever asks for that.

    A hook on the module's forward would not do: other modules may prefetch its parameters.

    Returns:
        Whether it is going to be; without FSDP2's parameter groups nothing is changed.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    groups = [group for group in groups if group is not None]
    if state is None or not all(callable(getattr(group, "unshard", None)) for group in groups):
        return False
    for group in groups:
        group.unshard = _prepared_unshard(group, group.unshard, prepare)
    return True


def _prepared_unshard(group: Any, unshard: Callable[..., Any], prepare: Callable[[list[Any]], None]) -> Any:
    @functools.wraps(unshard)
    def prepared(async_op: bool = False) -> Any:
        prepare(_gathering_streams(group, async_op))
        return unshard(async_op)

    return prepared


def _gathering_streams(group: Any, async_op: bool) -> list[Any]:
    if getattr(getattr(group, "device", None), "type", "cpu") != "cuda":
        return []
    current = torch.cuda.current_stream(group.device)
    try:
        streams = list(group.comm_ctx.get_all_gather_streams(async_op, group._training_state))
        gathers = group._all_gather_process_group.size() > 1
    except (AttributeError, AssertionError):
        # Before its first forward, or where torch keeps its streams otherwise.
        known = vars(getattr(group, "comm_ctx", None) or object).values()
        streams, gathers = [each for each in known if isinstance(each, torch.cuda.Stream)], False
    # One rank alone copies its parameters on the current stream.
    return streams if gathers else [*streams, current]
