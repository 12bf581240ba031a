"""`shard`: an optimizer of which every rank keeps and updates its part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ...combinations import refuse
from ...compat import route_unscaling, uncompiled
from ...errors import GradientError
from ...optimizer import Optimizer
from ...optimizer.optimizer import resolve_optimizer
from ...optimizer.parameters import iter_params, require_listed_once, require_shapes
from ...placement.local import REAL_INSTEAD
from .agree import apart_from_others, attempt_together, validate_across_ranks
from .buckets import Options
from .checkpoint import steps_behind
from .core import Sharding
from .ranks import ranks_of
from .schedule import ShardedOptimizer, ShardedSchedule


def shard(
    optimizer: Optimizer | Callable[[], Optimizer],
    model: nn.Module,
    mesh: Any = None,
    *,
    overlap_grad_sync: bool = True,
    overlap_param_sync: bool = True,
    bucket_cap_mb: float | None = None,
    grad_sync_dtype: torch.dtype | None = None,
    param_sync_dtype: torch.dtype | None = None,
    grad_buffer: str = "contiguous",
    param_buffer: str = "auto",
    average: bool = True,
    norm_groups: Sequence[Any] = (),
) -> ShardedOptimizer:
    """Split an optimizer over data-parallel ranks: each keeps 1/N of the state and updates 1/N of the parameters.

    Gradients are summed over the ranks while backward runs, each bucket as soon as its gradients are complete; updated
    parameters are sent to the other ranks while what follows the step already runs, and a look at one through its
    module waits for its bucket alone. Every rank begins with the first rank's parameters and buffers.

    The optimizer itself is sharded and stays of its class, with the same param groups; schedulers made before hold it
    still. `isinstance(optimizer, tilestep.ShardedOptimizer)` says that it is.
    It warns where buckets would be mostly padding, and says which option to change.
    After `step()` gradients are used up. Between backward and step the parameters' `grad` is None: the summed gradients
    are in the buckets, so clip with `max_grad_norm` or `clip_grad_norm_` of the optimizer.

    Args:
        optimizer: any optimizer of tilestep's; state it has is taken along. Or a function that makes one: then no rank
            ever has more than its part of the state.
        model: the plain module that has its parameters, not wrapped for data parallelism.
        mesh: None for all ranks; or a DeviceMesh of one dimension, or of two that are called "shard" and "replicate":
            state is split over the first and held in copies over the second. Without names the second splits.
        overlap_grad_sync: sum up buckets during backward, not at the step.
        overlap_param_sync: send parameters while the next forward runs; else they have arrived when `step()` returns,
            in the order of the current stream.
        bucket_cap_mb: MiB of gradients in a bucket; a larger parameter has a bucket of its own. None for a sixteenth of
            all, at least 25 and at most 256 MiB, at both ends of backward, and up to a sixth, at most 512 MiB, between.
        grad_sync_dtype: the type that gradients are accumulated and summed up in; None for the parameter's own. A param
            group may have one of its own, under this key; likewise for parameters.
        param_sync_dtype: the type that parameters travel in, None for their own. With a narrower floating-point type
            the rank that updates a parameter keeps the exact one; with an integer type the bytes travel as they are.
        grad_buffer: "contiguous" keeps memory for all gradients, in which they are accumulated; "bucket" takes it for a
            bucket when its first gradient comes and gives it back when it is summed up.
        param_buffer: "auto" for one allocation for all parameters of a type, which the GPUs of one host read from each
            other if they can: copy engines fetch what the others have updated, where messages would take
            multiprocessors from the model; `optimizer.describe_gathers()` says which it is. "peers" raises where they
            cannot, "contiguous" never has them do so, "bucket" takes one allocation for each bucket.
        average: divide the sums by the number of ranks, as DistributedDataParallel does.
        norm_groups: process groups of this rank and others that have other parameters of one model, as tensor- and
            pipeline-parallel ranks do: norms, skips and overflows are theirs together. A parameter that several ranks
            of such a group hold is counted as often.

    Returns:
        The optimizer that was given, sharded.

    Raises:
        ValueError: on all ranks alike, for a model that is wrapped already, for parameters that are not the model's,
            and if ranks differ in anything that matters; the first difference is named. Nothing is changed then.

    Source: ZeRO stages 1 and 2, https://arxiv.org/abs/1910.02054; torch.distributed.optim.ZeroRedundancyOptimizer.

    Example:
        >>> import torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> optimizer.step()
        >>> model.weight.tolist()
        [[0.5, 0.0]]
        >>> torch.distributed.destroy_process_group()
    """
    ranks = ranks_of(mesh)
    optimizer, model = attempt_together(ranks, lambda: _prepared(optimizer, model, mesh))
    syncs, dtypes = (overlap_grad_sync, overlap_param_sync), (grad_sync_dtype, param_sync_dtype)
    options = Options(*syncs, bucket_cap_mb, *dtypes, grad_buffer, param_buffer, average)

    def also() -> Iterator[str]:
        steps = steps_behind(optimizer)
        yield f"norm_groups of {[dist.get_world_size(group) for group in norm_groups]} ranks"
        yield f"state after steps {steps}" if any(steps) else "no state of earlier steps"

    names = validate_across_ranks(optimizer, model, ranks, options, also)
    route_unscaling(lambda optimizer: isinstance(optimizer, ShardedOptimizer), ShardedSchedule.route)
    state = optimizer.state_dict() if any(steps_behind(optimizer)) else None
    if state is None:
        optimizer.state.clear()
    optimizer.drop_plan()
    sharding = Sharding(optimizer, model, names, apart_from_others(ranks, model), options, norm_groups)
    schedule = ShardedSchedule(optimizer, sharding)
    if state is not None:
        schedule.load_state_dict(state)
        # Before, each rank has remembered losses of its own.
        for numbers in optimizer.control.history.numbers:
            sharding.ranks.broadcast(numbers)
    else:
        sharding.inner.rebuild(ahead=True)
    optimizer.attach(("shard",), schedule=schedule, offers=schedule.offers)
    schedule.show_states()
    return cast(ShardedOptimizer, optimizer)


def _prepared(optimizer: Any, model: Any, mesh: Any) -> tuple[Optimizer, nn.Module]:
    """The optimizer, made if a function was given, and the plain module; what cannot be sharded is refused."""
    made = resolve_optimizer("shard", optimizer)
    refuse("shard", made.attached)
    require_listed_once("shard()", made)
    require_shapes("shard()", ((label, param) for label, _, _, param in iter_params(made)))
    for label, _, _, param in iter_params(made):
        if param.is_complex():
            raise GradientError(f"{label} is complex, and shard() splits real arrays: {REAL_INSTEAD}")
    device = next((param.device for group in made.param_groups for param in group["params"]), torch.device("cpu"))
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"{mesh} is of {mesh.device_type} devices, and the parameters are on {device}")
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard() takes the module that is trained, not {type(model).__name__}")
    return made, model
