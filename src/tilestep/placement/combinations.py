"""The table of refused combinations, which everything that attaches to an optimizer reads.

A combination is correct, or it is refused by name when it is made, in either order: by `shard`, `overlap`, `offload`
and `capture`, and by the constructor of a module wrapper that is created later.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..compat import fsdp_module_type, is_flat_part
from ..devices.garbage import living, reachable

DDP, FSDP1, FSDP2, DP = "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DataParallel"

_SUMS = "which reduces gradients: do not wrap the model of a sharded optimizer, since shard() already reduces them"
_FLAT = "whose parameters are views of flat parameters: shard the model with fully_shard instead"

WRAPPED = "a framework's wrapper"
_WRAPPER = "this is a framework's wrapper, as Lightning's or Fabric's: {} the optimizer itself, before it is wrapped"

REFUSED: dict[tuple[str, str], str] = {
    ("shard", WRAPPED): _WRAPPER.format("shard"),
    ("overlap", WRAPPED): _WRAPPER.format("overlap"),
    ("offload", WRAPPED): _WRAPPER.format("offload"),
    ("capture", WRAPPED): _WRAPPER.format("capture"),
    ("joint norm", WRAPPED): _WRAPPER.format("give joint_norm"),
    ("joint norm", "joint norm"): "the optimizer shares a norm already",
    (
        "capture",
        "joint norm",
    ): "the host computes a joint norm once for all its optimizers, which a CUDA graph cannot capture",
    ("shard with narrower parameters", "track_changes"): (
        "track_changes=True, but with this param_sync_dtype each rank keeps exact weights and the model's weights are "
        "rounded from them: use a dtype that holds the parameters exactly"
    ),
    ("shard", "shard"): "the optimizer is sharded already",
    ("shard", "overlap"): (
        "the optimizer is overlapped already, and shard() overlaps communication by itself: do not call overlap()"
    ),
    ("shard", "offload"): "the optimizer is offloaded already: shard it first, then offload it",
    ("shard", DDP): f"is a DistributedDataParallel, {_SUMS}",
    ("shard", DP): f"is a DataParallel, {_SUMS}",
    ("shard", FSDP1): f"is a FullyShardedDataParallel, {_SUMS}",
    ("shard", FSDP2): f"is an FSDPModule, {_SUMS}",
    ("overlap", "shard"): "shard() overlaps communication by itself: do not call overlap() on its optimizers",
    ("overlap", "overlap"): "the optimizer is overlapped already",
    ("overlap", "offload of gradients"): (
        "gradients of this optimizer are copied to the host during backward: to overlap its updates, offload it "
        'without gradients=True; during="backward" also frees gradients'
    ),
    ("overlap", "offload to the CPU"): (
        "updates of this optimizer run on the CPU: to overlap them, offload it with where='gpu'"
    ),
    ("overlap", FSDP1): f"is a FullyShardedDataParallel, {_FLAT}",
    ("offload", "offload"): "the optimizer is offloaded already",
    ("offload", "offload in place"): "the optimizer is offloaded already",
    ("offload", "overlap"): (
        "the optimizer is overlapped already: offload it first, with where='gpu', then overlap it"
    ),
    ("offload of gradients", "shard"): (
        "gradients=True is not supported for a sharded optimizer, which keeps its gradients on the device: offload its "
        "state only"
    ),
    ("offload of gradients", DDP): (
        "is a DistributedDataParallel, which reduces gradients after they are copied to the host: offload without "
        "gradients=True"
    ),
    ("offload of gradients", FSDP1): f"is a FullyShardedDataParallel, {_FLAT}",
    ("offload to the CPU", "shard"): (
        "where='cpu' is not supported for a sharded optimizer, which updates shards on the device: use where='gpu'"
    ),
    (
        "park",
        "offload",
    ): "the optimizer is offloaded: its state is in host memory already, and park() has nothing to do",
    ("capture", "overlap"): "a step that overlaps other work cannot be captured in a CUDA graph",
    ("a norm of the gradients", FSDP1): (
        "belongs to a FullyShardedDataParallel, where each rank has a different piece of the gradients: clipping, "
        "skipped steps and found_inf would be decided by each rank alone. Clip with the module's clip_grad_norm_() and "
        "scale losses with torch's ShardedGradScaler, or shard the model with fully_shard, which needs neither"
    ),
    ("a reduction", FSDP1): (
        "belongs to a FullyShardedDataParallel, whose parameters are views of flat parameters, and its rule reduces "
        "over a parameter or works on matrices: shard the model with fully_shard, where reductions include all ranks"
    ),
}
"""What is added, what is present, and why they are refused, with the remedy. All other combinations are correct."""


def refusal(added: str, present: Iterable[str]) -> str:
    """Why `added` is refused with the features in `present`; empty if it is not."""
    return next((REFUSED[added, name] for name in present if (added, name) in REFUSED), "")


def refuse(added: str, present: Iterable[str], label: str = "", error: type[Exception] = ValueError) -> None:
    """Raise if `added` is refused with the features in `present`."""
    if reason := refusal(added, present):
        raise error(f"{label} {reason}".lstrip())


def kind_of(module: nn.Module) -> str:
    """The kind of a wrapper, as `REFUSED` calls it; empty for a plain module."""
    if isinstance(module, DistributedDataParallel):
        return DDP
    if isinstance(module, DataParallel):
        return DP
    flat = _fsdp1()
    if flat is not None and isinstance(module, flat):
        return FSDP1
    sharded = fsdp_module_type()
    return FSDP2 if sharded is not None and isinstance(module, sharded) else ""


def split_kind(param: torch.Tensor) -> str:
    """The wrapper that made a parameter a piece of a flat parameter; empty for other parameters."""
    return FSDP1 if is_flat_part(param) else ""


def _fsdp1() -> Any | None:
    return getattr(sys.modules.get("torch.distributed.fsdp"), FSDP1, None)


def count_sharded(model: nn.Module) -> int:
    """The number of modules that FSDP2 shards."""
    return sum(kind_of(module) == FSDP2 for module in model.modules())


def refuse_replaced(model: nn.Module, params: Iterable[torch.Tensor], sharded: int = 0) -> None:
    """Raise if a model has lost all of the parameters, or some because FSDP2 shards more modules than before."""
    own = set(map(id, params))
    present = own.intersection(map(id, model.parameters()))
    if own and (not present or (len(present) < len(own) and count_sharded(model) > sharded)):
        raise RuntimeError(
            f"{'not all' if present else 'none'} of the optimizer's parameters belong to the model any more, so no "
            "step would update it: create the optimizer after fully_shard or other calls that replace parameters, then "
            "call shard() or overlap()"
        )


_following: weakref.WeakKeyDictionary[Any, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""Followers, with the modules of their models: FSDP1 removes a module's parameters before the hook sees the module."""

_watching: list[Any] = []


def wrappers_around(holds: Callable[[Any], bool]) -> list[nn.Module]:
    """All live wrappers that reduce gradients over ranks and contain a parameter that `holds` selects."""

    def found() -> list[nn.Module]:
        made = living(tuple(kind for kind in (DistributedDataParallel, _fsdp1()) if kind is not None))
        return [wrapper for wrapper in made if "_parameters" in vars(wrapper) and any(map(holds, wrapper.parameters()))]

    return reachable(found)


def follow_wrappers(follower: Any, model: nn.Module | None = None) -> None:
    """Notify a follower of every new wrapper of its parameters, as long as it lives."""
    # `holds(param)` selects parameters; `wrapped(wrapper, kind)` adapts, or raises in the wrapper's constructor.
    _following[follower] = weakref.WeakSet(() if model is None else model.modules())
    if not _watching:
        _watching.append(register_module_module_registration_hook(_look_at))


def _look_at(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    kind = kind_of(parent) if _following else ""
    if child is None or kind not in (DDP, FSDP1):
        return
    params, modules = list(child.parameters()), list(child.modules())

    def concerned() -> list[Any]:
        return [
            follower
            for follower, own in list(_following.items())
            if any(map(follower.holds, params)) or any(module in own for module in modules)
        ]

    # An unreachable optimizer must not refuse the wrapper.
    for follower in reachable(concerned):
        follower.wrapped(parent, kind)
