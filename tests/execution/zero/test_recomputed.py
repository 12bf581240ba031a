"""Activations that are recomputed in backward; reentrant checkpoints begin passes within it for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Pair, run, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """Each forward uses the branches it is told to, and backward recomputes them one by one."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, data: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        data = data.clone().requires_grad_()
        for index in chosen:
            data = checkpoint(self.branches[index], data, use_reentrant=self.reentrant)
        return data.square().sum()


def recomputed(reentrant: bool, **options: Any) -> Pair:
    model = Recomputed()
    model.reentrant = reentrant
    return Pair(model, sgd, bucket_cap_mb=TINY, **options)


def recomputed_activations() -> None:
    for reentrant in (False, True):
        for options in ({}, {"grad_buffer": "bucket"}, {"grad_sync_dtype": torch.float64}):
            pair = recomputed(reentrant, **options)
            for _ in range(2):
                run(pair, [[0, 1, 2, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
                pair.compare(rtol=1e-5, atol=1e-6)
                run(pair, [[0, 1, 2, 1, 3, 4, 5], [5, 1, 5, 0, 0]], sync_all=True)
                pair.compare(rtol=1e-5, atol=1e-6)


def other_recomputed_activations_on_every_rank() -> None:
    """Ranks begin other numbers of passes within a backward, which is one round all the same."""
    pair = recomputed(True)
    for step in range(4):
        run(pair, [[0, 1, 2, 1] if dist.get_rank() == step % 2 else [5, 4]])
        pair.compare(rtol=1e-5, atol=1e-6)


def a_backward_with_passes_within_it_is_one_round() -> None:
    class Tied(Recomputed):
        """Its first and last operation use a parameter outside of any checkpoint."""

        def forward(self, data: torch.Tensor, chosen: list[int]) -> torch.Tensor:
            return super().forward(self.branches[0](data), chosen) + self.branches[0](data).sum()

    for model, chosen, rounds in ((Recomputed(), [1, 2, 3], 1), (Tied(), [1, 2, 3], 1), (Tied(), [1, 5, 2, 5], 2)):
        pair = Pair(model, sgd, bucket_cap_mb=TINY)
        gradients = pair.optimizer.execution.gradients
        sent, before = 0, gradients.end

        def counted(before: Callable[[], None] = before) -> None:
            nonlocal sent
            sent += 1
            before()

        gradients.end = counted  # type: ignore[method-assign]
        for _ in range(2):
            sent = 0
            run(pair, [chosen])
            assert sent <= rounds, (type(model), chosen, sent)
            pair.compare(rtol=1e-5, atol=1e-6)


CHECKS = [
    recomputed_activations,
    other_recomputed_activations_on_every_rank,
    a_backward_with_passes_within_it_is_one_round,
]


test_two_ranks = each_passes(CHECKS, 2)
