"""`shard`, and the methods and type of a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ...backends.decision import clip_coefficient
from ...compat import route_unscaling, uncompiled
from ...errors import GradientError
from ...native.table import addresses_of
from ...norm import norm_table
from ...norm.tiles import combine
from ...optimizer import Optimizer
from ...optimizer.checkpoint import unchanged_on_error
from ...optimizer.optimizer import Attached, AttachedType, resolve_optimizer
from ...optimizer.parameters import iter_params, params_of, require_listed_once, require_shapes
from ...placement import ReductionGroup
from ...placement.combinations import refuse
from ...placement.local import REAL_INSTEAD
from .buckets import Options
from .checkpoint import full_state_dict, steps_behind
from .core import Sharding
from .execution import ShardedExecution
from .ranks import attempt_together, ranks_of, validate_across_ranks, with_separate_groups


class ShardedMethods:
    """The methods that an optimizer has after `tilestep.shard`."""

    def __init__(self, execution: ShardedExecution) -> None:
        self._execution, self._sharding = execution, execution.sharding

    def no_sync(self) -> Any:
        """A context manager in which backward only accumulates on this rank; the next backward outside reduces the sum.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> with optimizer.no_sync():
            ...     model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> model(torch.tensor([[2.0, 2.0]])).sum().backward()
            >>> float(optimizer.grad_norm_of(model.parameters()))
            5.0
            >>> torch.distributed.destroy_process_group()
        """
        return self._execution.gradients.timeline.no_sync()

    def wait(self) -> None:
        """Wait for the parameters that other ranks updated in the last step, and for offloaded state.

        Needed only before you read parameters that you hold yourself, for example in a list; reading a parameter from
        its module waits for it.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> mine = list(model.parameters())
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = tilestep.shard(tilestep.SGD(mine, lr=0.5), model)
            >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.wait()
            >>> mine[0].tolist()
            [[0.5, 0.0]]
            >>> torch.distributed.destroy_process_group()
        """
        self._execution.optimizer.memory.wait()
        self._execution.parameters.publication.wait_all()

    def describe_gathers(self) -> list[str]:
        """How other ranks receive updated parameters, one line for each dtype and method.

        Copy engines fetch them from the memory of other GPUs of the host if `param_buffer` allows and the GPUs can;
        else the process group sends them, and the line says why.
        """
        lines: dict[str, None] = {}
        for bucket in self._sharding.buckets:
            how = "ranks fetch it from each other's memory by copy engines"
            if bucket.peers is None or bucket.sync_dtype != bucket.flat.dtype:
                how = f"the process group's all-gathers send it ({bucket.unshared or 'its dtype is converted'})"
            lines[f"{str(bucket.flat.dtype).removeprefix('torch.')}: {how}"] = None
        return list(lines)

    def grad_norm_of(self, params: Iterable[torch.Tensor], process_group: Any = None) -> torch.Tensor:
        """The 2-norm of some parameters' gradients over all ranks, between backward and step.

        All ranks must call it, with the same parameters. The gradients may carry a loss scale, which the norm then
        includes.

        Args:
            params: one or more parameters of the optimizer.
            process_group: a group of ranks with other shards of these parameters, such as tensor-parallel ranks, whose
                norms are included; all of them must call it too.

        Returns:
            A scalar on the device, float64 if a parameter is, otherwise float32; the same on all ranks. Reading it
                waits.

        Raises:
            ValueError: for a tensor that is not a parameter of the optimizer.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> float(optimizer.grad_norm_of([model.weight]))
            5.0
            >>> torch.distributed.destroy_process_group()
        """
        return self._norm_of(params, [] if process_group is None else [process_group])[0]

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float | torch.Tensor, params: Iterable[torch.Tensor] | None = None, process_group: Any = None
    ) -> torch.Tensor:
        """Scale reduced gradients so that their 2-norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        Use `max_grad_norm` unless you clip some parameters only, or clip between a scaler's `unscale_` and `step`. All
        ranks must call it. It changes the gradients in place, in a separate pass.

        Args:
            max_norm: the largest norm.
            params: the parameters; None for all, with norms over the `norm_groups` of `shard` too. Gradients of other
                parameters do not change.
            process_group: as for `grad_norm_of`.

        Returns:
            The norm before the clip, as from `grad_norm_of`.

        Raises:
            ValueError: for a tensor that is not a parameter of the optimizer.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> float(optimizer.clip_grad_norm_(1.0)), round(float(optimizer.grad_norm_of([model.weight])), 4)
            (5.0, 1.0)
            >>> torch.distributed.destroy_process_group()
        """
        groups = [] if process_group is None else [process_group]
        if params is None:
            params, groups = [member.param for member in self._sharding.members], [*self._sharding.norm_groups, *groups]
        norm, gradients = self._norm_of(params, groups)
        if gradients:
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    @torch.no_grad()
    def _norm_of(
        self, params: Iterable[torch.Tensor], groups: Sequence[Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The 2-norm of reduced gradients over all ranks and further process groups, and this rank's pieces of them."""
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        if not all(param in self._sharding.member_of for param in listed):
            raise ValueError("grad_norm_of() requires parameters of this optimizer")
        self._execution.complete_gradients(self._execution.optimizer)
        pieces, device = [self._sharding.member_of[param].piece for param in listed], self._sharding.device
        gradients = [piece.grad for piece in pieces if piece is not None and piece.grad is not None]
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if gradients:
            numels, dtypes = [one.numel() for one in gradients], [one.dtype for one in gradients]
            table = norm_table(device, numels, dtypes)
            addresses = torch.from_numpy(addresses_of(gradients)).to(device)
            table.launch(addresses, total)
        ReductionGroup([self._sharding.ranks.shard, *groups]).add(total)
        wide = any(param.dtype is torch.float64 for param in listed)
        return combine(total, 2.0).to(torch.float64 if wide else torch.float32), gradients

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state of the unsharded optimizer, gathered tensor by tensor into CPU memory.

        All ranks must call it.

        Args:
            rank: the rank that receives it, counted among those that share the optimizer; None for all.

        Returns:
            A `state_dict` that optimizers of the same rule load, torch's too; an empty one on ranks that do not receive
                it.

        Raises:
            ValueError: for a rank out of range.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> sorted(optimizer.full_state_dict())
            ['param_groups', 'state']
            >>> torch.distributed.destroy_process_group()
        """
        optimizer = self._execution.optimizer
        return full_state_dict(
            optimizer, self._sharding, rank, self._execution.own_state_dict(optimizer.plain_state_dict)
        )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on one rank, for its next `state_dict()`, as torch's ZeroRedundancyOptimizer does.

        All ranks must call it. `state_dict()` still returns a shard on the other ranks, and on this rank after another
        step.

        Args:
            to: the rank, counted among those that share the optimizer.

        Raises:
            ValueError: for a rank out of range.

        Example:
            >>> import torch, tilestep
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
            >>> optimizer.consolidate_state_dict()
            >>> sorted(optimizer.state_dict())
            ['param_groups', 'state']
            >>> torch.distributed.destroy_process_group()
        """
        self._execution.consolidated = self.full_state_dict(to) or None


class ShardedOptimizer(Attached, metaclass=AttachedType):
    """The type of an optimizer after `tilestep.shard`, for `isinstance`; the optimizer also stays an instance of its
    class.

    It adds the methods of `ShardedMethods`. `state_dict` returns this rank's shard, for
    `torch.distributed.checkpoint`; `full_state_dict` gathers the full state. `optimizer.state` holds this rank's
    shards, flat, or by rows that end inside a block.

    Example:
        >>> import torch, tilestep
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = tilestep.shard(tilestep.SGD(model.parameters(), lr=0.5), model)
        >>> isinstance(optimizer, tilestep.ShardedOptimizer), isinstance(optimizer, tilestep.SGD)
        (True, True)
        >>> torch.distributed.destroy_process_group()
    """

    attached_as = ("shard",)
    no_sync: Callable[[], Any]
    wait: Callable[[], None]
    full_state_dict: Callable[..., dict[str, Any]]
    consolidate_state_dict: Callable[..., None]
    describe_gathers: Callable[[], list[str]]
    grad_norm_of: Callable[..., torch.Tensor]
    clip_grad_norm_: Callable[..., torch.Tensor]


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
    """Shard an optimizer over data-parallel ranks: each keeps 1/N of the state and updates 1/N of the parameters.

    Gradients are reduce-scattered during backward, each bucket when its gradients are complete. Updated parameters are
    all-gathered while the code after the step runs; reading a parameter from its module waits for its bucket. Every
    rank starts with the parameters and buffers of rank 0.

    The optimizer that is passed becomes sharded; it keeps its class and param groups, and schedulers that hold it stay
    valid. `isinstance(optimizer, tilestep.ShardedOptimizer)` tells that it is sharded. Between backward and step the
    parameters' `grad` is None, since the reduced gradients are in buckets, which `step()` consumes: clip with
    `max_grad_norm` or the optimizer's `clip_grad_norm_`. A warning names the option to change if buckets are mostly
    padding.

    Args:
        optimizer: a tilestep optimizer, whose existing state is kept; or a function that makes one: then no rank ever
            allocates more than its shard of the state.
        model: the plain module that has its parameters, not wrapped for data parallelism.
        mesh: None for all ranks; or a DeviceMesh with one dimension, or with two named "shard" and "replicate": the
            state is sharded over the first and replicated over the second. Without names the second dimension shards.
        overlap_grad_sync: reduce buckets during backward; False: at the step.
        overlap_param_sync: all-gather parameters during the next forward; False: they have arrived when `step()`
            returns, in the order of the current stream.
        bucket_cap_mb: MiB of gradients in a bucket; a larger parameter has its own bucket. None for a sixteenth of all,
            between 25 and 256 MiB, at both ends of backward, and up to a sixth, at most 512 MiB, between.
        grad_sync_dtype: the dtype in which gradients are accumulated and reduced; None for the parameter's. Also a key
            of param groups, as is `param_sync_dtype`.
        param_sync_dtype: the dtype of the all-gather; None for the parameter's. With a narrower floating-point dtype
            the rank that updates a parameter keeps its exact value; an integer dtype sends the bytes unchanged.
        grad_buffer: "contiguous" allocates memory for all gradients, in which they are accumulated; "bucket" allocates
            a bucket at its first gradient and frees it after its reduction.
        param_buffer: "auto" makes one allocation for all parameters of a dtype, which the GPUs of one host read from
            each other by copy engines if they can; `optimizer.describe_gathers()` tells. "peers" raises if they cannot,
            "contiguous" always uses the process group, "bucket" makes one allocation per bucket.
        average: divide the sums by the number of ranks, as DistributedDataParallel does.
        norm_groups: process groups of this rank and ranks with other parameters of the model (tensor and pipeline
            parallelism): norms, skips and overflows are decided over them too. A parameter that several ranks of such a
            group hold counts several times.

    Returns:
        The optimizer, sharded.

    Raises:
        ValueError: on all ranks, for a wrapped model, for parameters that are not the model's, and if ranks differ in
            anything that matters; the message has the first difference. Nothing is changed then.

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
    optimizer, model = attempt_together(ranks, partial(_prepared, optimizer, model, mesh))
    options = Options(
        overlap_grad_sync,
        overlap_param_sync,
        bucket_cap_mb,
        grad_sync_dtype,
        param_sync_dtype,
        grad_buffer,
        param_buffer,
        average,
    )

    def also() -> Iterator[str]:
        steps = steps_behind(optimizer)
        yield f"norm_groups of {[dist.get_world_size(group) for group in norm_groups]} ranks"
        yield f"state after steps {steps}" if any(steps) else "no state of earlier steps"

    names = validate_across_ranks(optimizer, model, ranks, options, also())
    route_unscaling(lambda optimizer: isinstance(optimizer, ShardedOptimizer), _route)
    state = optimizer.state_dict() if any(steps_behind(optimizer)) else None
    if state is None:
        optimizer.state.clear()
    optimizer.drop_plan()
    sharding = Sharding(optimizer, model, names, with_separate_groups(ranks, model), options, norm_groups)
    execution = ShardedExecution(optimizer, sharding)
    with unchanged_on_error(optimizer):
        optimizer.state.clear()
        optimizer.averages = {}
        # Drop the numbers that each rank counted alone; the state has the numbers to continue with.
        copies = [] if sharding.ranks.replicate is None else [sharding.ranks.replicate]
        optimizer.control.numbers, optimizer.control.copies = None, ReductionGroup(copies)
        optimizer.placement = sharding
        methods = ShardedMethods(execution)
        offers = {name: getattr(methods, name) for name in vars(ShardedMethods) if not name.startswith("_")}
        optimizer.attach(("shard",), execution=execution, offers=offers)
        if state is not None:
            # The history of norms and losses may differ between ranks: all continue with rank 0's.
            optimizer.load_state_dict(state)
            for numbers in optimizer.control.history.numbers:
                # A checkpoint's numbers may be on the CPU, where the process group has no backend.
                sent = numbers.to(sharding.device)
                sharding.ranks.broadcast(sent)
                numbers.copy_(sent)
        else:
            optimizer.rebuild(ahead=True)
    return cast(ShardedOptimizer, optimizer)


def _route(unscale: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Make torch's scalers unscale a sharded optimizer by its own method."""
    return optimizer.execution.unscale(optimizer, unscale, *args, **kwargs)


def _prepared(optimizer: Any, model: Any, mesh: Any) -> tuple[Optimizer, nn.Module]:
    """The optimizer, made if a function was given, and the plain module; raises if they cannot be sharded."""
    made = resolve_optimizer("shard", optimizer)
    refuse("shard", made.attached)
    require_listed_once("shard()", made)
    require_shapes("shard()", ((label, param) for label, _, _, param in iter_params(made)))
    for label, _, _, param in iter_params(made):
        if param.is_complex():
            raise GradientError(f"{label} is complex, which shard() does not support: {REAL_INSTEAD}")
    device = next((param.device for param in params_of(made)), torch.device("cpu"))
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"{mesh} has devices of type {mesh.device_type}, but the parameters are on {device}")
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard() requires the module that is trained, not {type(model).__name__}")
    return made, model
