"""`overlap`: have updates run beside other work."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn

from ...combinations import kind_of, refusal, refuse, split_kind
from ...compat import uncompiled
from ...optimizer import Optimizer
from ...optimizer.checkpoint import unchanged_on_error
from ...optimizer.parameters import iter_params, require_listed_once, require_shapes
from .groups import Grouping
from .schedule import OverlappedOptimizer, OverlapSchedule
from .tracker import CommHook


def overlap(
    optimizer: Optimizer,
    model: nn.Module,
    during: Literal["auto", "backward", "forward"] = "auto",
    *,
    bucket_cap_mb: float = 25.0,
    scaler: torch.amp.GradScaler | None = None,
    comm_hook: CommHook | None = None,
    early_norm: bool = True,
) -> OverlappedOptimizer:
    """Let an optimizer update parameters while backward, or the next forward, still has other work.

    Parameters are updated group by group: those that an FSDP2 module gathers, with "forward" those of several modules
    that follow each other, and buckets of neighbours elsewhere. On a GPU updates run in a stream of their own. Numbers
    are those of the optimizer without this, to the bit, for rules without matrix products.

    With "backward" a group is updated as soon as its last gradient is there, and these gradients are let go; `step()`
    updates what is left. What has to be decided for all groups together (`max_grad_norm`, skipped steps, a scaler) is
    decided by `step()`, and then updates run as with "forward".

    With "forward" `step()` computes the norm, decides, and takes the gradients; every module's forward then waits for
    the update of its own parameters alone. Code that reads parameters through a module, or state through the
    optimizer's methods, waits for what it reads; `synchronize()` is for readers of tensors that they hold themselves.

    With "auto" the first 27 steps run updates as "forward" and in `step()` by turns, and from then on as it was faster,
    on all ranks alike; `overlap_report()` says how. On a CPU they run in `step()`.

    The optimizer itself stays of its class; `isinstance(optimizer, tilestep.OverlappedOptimizer)` says that it is
    overlapped. After `step()` the parameters' `grad` is None.

    Args:
        optimizer: any optimizer of tilestep's, with all of its parameters on one device.
        model: has its parameters: a plain module, DistributedDataParallel around one, or one that FSDP2 shards.
        during: "backward", "forward", or "auto" for what is faster of "forward" and none.
        bucket_cap_mb: MiB of parameters in a bucket.
        scaler: the scaler that loss and gradients go through, if there is one.
        comm_hook: for DistributedDataParallel and "backward": state and function that reduce a bucket, which takes one
            comm hook only; None for the mean over ranks.
        early_norm: with "backward" and a clip or another use of the norm, sum gradients' squares while backward runs.
            False for who changes gradients afterwards in ways that torch counts no version of, as collectives do.

    Returns:
        The optimizer that was given.

    Raises:
        TypeError: for an optimizer that is not tilestep's.
        ValueError: for a schedule that there is not; for parameters on several devices; for an optimizer that is
            sharded or overlapped already, or whose updates run on the CPU; for a DistributedDataParallel that says too
            late which gradients there are.

    Source: torch.distributed.optim._apply_optimizer_in_backward, https://github.com/pytorch/pytorch/pull/98667.

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.overlap(tilestep.SGD(model.parameters(), lr=0.5), model, during="backward")
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> model.weight.tolist(), model.weight.grad
        ([[0.5, 0.0]], None)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"overlap() takes an optimizer of tilestep's, not {type(optimizer).__name__}")
    refuse("overlap", optimizer.attached)
    if during not in ("auto", "backward", "forward"):
        raise ValueError(f'Invalid during: {during!r}; it is "auto", "backward" or "forward"')
    if comm_hook is not None and during != "backward":
        raise ValueError('comm_hook is for during="backward": else register it with DistributedDataParallel itself')
    if not bucket_cap_mb > 0:
        raise ValueError(f"Invalid bucket_cap_mb: {bucket_cap_mb}; it must be positive")
    require_listed_once("overlap()", optimizer)
    require_shapes("overlap()", ((label, param) for label, _, _, param in iter_params(optimizer)))
    model = uncompiled(model)
    devices: dict[torch.device, str] = {}
    for name, module in model.named_modules():
        refuse("overlap", [kind_of(module)], f"module {name!r}" if name else "the model")
    for label, _, _, param in iter_params(optimizer):
        if reason := refusal("overlap", [split_kind(param)]):
            raise ValueError(f"{label} {reason.replace('is a', 'belongs to a', 1)}")
        if not param.is_meta:
            devices[param.device] = label
    if len(devices) > 1:
        (first, label), (second, other), *_ = devices.items()
        raise ValueError(f"{label} is on {first}, {other} on {second}: overlap() takes parameters of one device")
    device = next(iter(devices), torch.device("cpu"))
    grouping = Grouping(optimizer, model, int(bucket_cap_mb * 2**20), joins=during != "backward")
    schedule = OverlapSchedule(optimizer, model, grouping, device, during, scaler, comm_hook, early_norm)
    try:
        with unchanged_on_error(optimizer):
            optimizer.attach(("overlap",), schedule=schedule, offers=schedule.offers)
            optimizer.rebuild(ahead=True)
    except BaseException:
        schedule.tracker.rounds.hooks.remove()
        raise
    return cast(OverlappedOptimizer, optimizer)
