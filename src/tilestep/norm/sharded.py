"""Norms of tensors on several ranks: the norm of local parts, then one all-reduce over all ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..compat import layouts, local_parts, ready
from ..errors import GradientError
from ..kernels.spec import LARGEST_SUM
from ..placement import ReductionGroup, is_distributed
from ..placement.local import as_real, local_part
from . import plan_cache
from .plan_cache import Positions, Recipe, find_recipe, name_of
from .tiles import Order, combine, order_of

KEPT = 4  # cached lists of meshes and placements


Shares = tuple[ReductionGroup, list[int], dict[float, list[int]]]
"""All ranks, the places of partial sums, and the places of tensors by their weight in sums over all ranks."""


def _shares(tensors: Sequence[Any], positions: Positions | None) -> Shares:
    placed = [(name_of(place, positions), tensor) for place, tensor in enumerate(tensors) if is_distributed(tensor)]
    for name, tensor in placed:
        if tensor.device_mesh.get_coordinate() is None:
            raise GradientError(f"this rank does not belong to {tensor.device_mesh} of {name}")
    ranks = ReductionGroup.of_tensors(placed)
    partial = [place for place, tensor in enumerate(tensors) if _is_partial(tensor)]
    places: dict[float, list[int]] = {}
    for place, tensor in enumerate(tensors):
        share = ranks.share(_summed(tensor) if place in partial else tensor)
        places.setdefault(share, []).append(place)
    return ranks, partial, places


class ShardedNorm:
    """The norm of a list of tensors with DTensors; has the interface of `Recipe`."""

    lock = nullcontext()  # recipes of the parts have locks

    def __init__(self, tensors: Sequence[torch.Tensor], shares: Shares, positions: Positions | None) -> None:
        self._ranks, partial, groups = shares
        self._local = [as_real(ready(part)) for part in local_parts(tensors)]
        self._recipe = _recipe(self._local, positions)
        if not partial and len(groups) == 1:
            self._parts = [(share, self._local, self._recipe) for share in groups]
            return
        parts = list(self._local)
        for place in partial:
            parts[place] = as_real(local_part(_summed(tensors[place])))
        self._parts = []
        for share, places in groups.items():
            own = [parts[place] for place in places]
            self._parts.append((share, own, _recipe(own, None)))

    def norm(self, tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The p-norm: a scalar on the first tensor's device, equal on all ranks."""
        order = order_of(norm_type)
        if order not in (Order.SQUARES, Order.NONZERO) and any(tensor.is_complex() for tensor in tensors):
            raise GradientError(f"a norm of order {norm_type} of complex DTensors is not supported; use order 2")
        if order is Order.NONZERO:  # a sharded tensor has a nonzero if any of its parts has
            device = self._local[0].device
            counts = [part.count_nonzero().to(device) for _, own, _ in self._parts for part in own]
            nonzero = (torch.stack(counts) != 0).to(torch.float64)
            self._ranks.largest(nonzero)
            total = nonzero.sum()
        else:
            totals = [self._total(*part, norm_type) for part in self._parts]
            total = combine(torch.stack(totals), norm_type, root=False).reshape(1)
            if order is Order.SMALLEST:
                self._ranks.largest(total.neg_())
                total.neg_()
            elif order is Order.LARGEST:
                self._ranks.largest(total)
            else:
                self._ranks.add(total)
            total = combine(total, norm_type)
        wide = any(tensor.dtype == torch.float64 for tensor in self._local)
        return _as_from_torch(total.reshape(()).to(torch.float64 if wide else torch.float32))

    def _total(self, share: float, own: list[torch.Tensor], recipe: Recipe, norm_type: float) -> torch.Tensor:
        """The norm of a group before its root; a sum is multiplied by the weight."""
        with recipe.lock:
            total = recipe.norm(own, norm_type, root=False).to(self._local[0].device)
        order = order_of(norm_type)
        if order in (Order.LARGEST, Order.SMALLEST):
            return total
        # Sums are clamped to LARGEST_SUM: a clamped sum counts as infinite, with any weight.
        return (torch.where(total >= LARGEST_SUM, math.inf, total) if order is Order.SQUARES else total) * share

    def scale(self, tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: torch.Tensor | float) -> None:
        """Multiply the tensors by min(1, max_norm / (norm + 1e-6)); for a partial sum its terms."""
        with self._recipe.lock:
            self._recipe.scale(self._local, norm, max_norm)
        torch.autograd.graph.increment_version([tensor for tensor in tensors if is_distributed(tensor)])


def _as_from_torch(norm: torch.Tensor) -> torch.Tensor:
    """A norm with `full_tensor` and `to_local`, since torch's norm of DTensors is a DTensor."""
    # Methods of another tensor with the same memory: its own methods would be a reference cycle.
    norm.full_tensor = norm.to_local = norm.detach().detach  # type: ignore[attr-defined]
    return norm


def _is_partial(tensor: Any) -> bool:
    return is_distributed(tensor) and any(placement.is_partial() for placement in tensor.placements)


def _summed(tensor: Any) -> Any:
    """Reduce a partial DTensor, so that it is replicated along the partial dimensions."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.detach().redistribute(placements=placements)


def _recipe(tensors: list[torch.Tensor], positions: Positions | None) -> Recipe:
    recipe = find_recipe(tensors, positions)
    if recipe is None:
        odd = next(tensor for tensor in tensors if type(tensor) is not torch.Tensor or tensor.device.type == "meta")
        raise GradientError(
            f"a local tensor is a {type(odd).__name__} on {odd.device}; with DTensors, a norm supports only plain "
            "tensors on the CPU or CUDA"
        )
    return recipe


_kept: list[tuple[list[Any], Shares]] = []


def sharded_norm(tensors: Sequence[torch.Tensor], positions: Positions | None = None) -> ShardedNorm | None:
    """The norm of a list of tensors on several ranks, which all ranks must call; None if no tensor is a DTensor."""
    described = layouts(tensors)
    if not any(layout is not None for layout in described):
        return None
    with plan_cache.lock:
        fitting = (
            place
            for place, (kept, _) in enumerate(_kept)
            if len(kept) == len(described) and all(map(operator.is_, kept, described))
        )
        place = next(fitting, None)
        shares = _shares(tensors, positions) if place is None else _kept.pop(place)[1]
        _kept.insert(0, (described, shares))
        del _kept[KEPT:]
    return ShardedNorm(tensors, shares, positions)
