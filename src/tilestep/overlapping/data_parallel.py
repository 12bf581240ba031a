"""Gradients of DistributedDataParallel: complete when their bucket is all-reduced, which its comm hook sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .tracker import BackwardTracker

CommHook = tuple[Any, Callable[[Any, Any], Any]]
"""State and function, as `DistributedDataParallel.register_comm_hook` takes them."""


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel in a model."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def follow_buckets(
    wrapper: DistributedDataParallel, gradients: BackwardTracker, comm_hook: CommHook | None
) -> set[int]:
    """Have a tracker see the gradients that are reduced."""
    if wrapper.find_unused_parameters or wrapper.static_graph:
        option = "static_graph" if wrapper.static_graph else "find_unused_parameters"
        raise ValueError(
            f"DistributedDataParallel with {option}=True says at the end of backward which gradients there are, and "
            'puts zeros in the place of others before: use during="forward"'
        )
    if any(param.is_complex() for param in wrapper.module.parameters()):
        raise ValueError(
            "buckets of DistributedDataParallel do not hold complex gradients as their parameters have them: use "
            'during="forward"'
        )
    group = wrapper.process_group
    state, reduce = comm_hook or (None, lambda _, bucket: _mean(group, bucket))

    # The module must not keep who is told, who keeps the module.
    living = weakref.ref(gradients)

    def reduce_and_note(_: object, bucket: Any) -> Any:
        future = reduce(state, bucket)
        told = living()
        if told is not None:
            told.reduced(bucket.parameters(), bucket.gradients(), future)
        return future

    # Their text is not the class that is looked for.
    reduce_and_note.__annotations__.clear()
    try:
        wrapper.register_comm_hook(None, reduce_and_note)
    except RuntimeError as error:
        raise ValueError(
            "DistributedDataParallel has a comm hook already, and takes only one: give it to overlap(), as "
            "comm_hook=(state, hook), before it is registered"
        ) from error
    ignored = set(wrapper.parameters_to_ignore)
    named = wrapper.module.named_parameters()
    return {id(param) for name, param in named if param.requires_grad and name not in ignored}


def _mean(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    """To the bit what DistributedDataParallel does without a hook."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]
