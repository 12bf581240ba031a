"""Random models with shared, frozen, unused and odd-sized parameters, used in any order, against a single process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_on_ranks
from sharded_twins import Pair, inputs, train
from torch import nn

import tilestep

SEEDS = range(12)
RULES = ("SGD", "Adam", "AdamW", "Lion", "NAdam", "RMSprop", "Adan", "ADOPT")


class Random(nn.Module):
    """Parameters of any shapes and formats, some shared, some frozen; every forward uses those it is told to.

    Losses are sums of products with whole numbers: gradients are exact, and their sums do not depend on the order.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for _ in range(chance.randint(2, 9)):
            part = nn.Module()
            if len(self.parts) and chance.random() < 0.2:
                part.weight = chance.choice(list(self.parts)).weight
            else:
                shape = [chance.randint(0 if chance.random() < 0.1 else 1, 7) for _ in range(chance.randint(0, 4))]
                order = chance.sample(range(len(shape)), len(shape))
                memory = torch.rand([shape[dim] for dim in order]).permute(
                    [order.index(dim) for dim in range(len(shape))]
                )
                part.weight = nn.Parameter(memory, requires_grad=chance.random() < 0.85)
            self.parts.append(part)
        self.parts[0].weight.requires_grad_(True)

    def forward(self, used: list[int], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for index in used:
            weight = self.parts[index].weight
            factors = torch.randint(-8, 9, weight.shape, generator=generator, device="cpu").to(weight)
            total = total + (weight * factors).sum()
        return total


def options_of(chance: random.Random) -> dict[str, Any]:
    return {
        "overlap_grad_sync": chance.random() < 0.7,
        "overlap_param_sync": chance.random() < 0.7,
        "bucket_cap_mb": chance.choice([8, 71, 200, 1e6]) / 2**20,
        "grad_buffer": chance.choice(["contiguous", "bucket"]),
        "param_buffer": chance.choice(["contiguous", "bucket"]),
        "average": False,
    }


def trainings() -> None:
    """The same choices on all ranks, but for which parameters each of them uses, and in which order."""
    for seed in SEEDS:
        chance, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
        torch.manual_seed(seed)
        model, name = Random(chance), chance.choice(RULES)

        def make(params: Any, name: str = name) -> Any:
            listed = list(params)
            return getattr(tilestep, name)(listed, lr=0.1)

        pair = Pair(model, make, **options_of(chance))
        for step in range(4):
            for index in range(1, len(model.parts)):
                if model.parts[index].weight is not model.parts[0].weight and chance.random() < 0.15:
                    trains = chance.random() < 0.6
                    for side in (pair.model, pair.twin):
                        side.parts[index].weight.requires_grad_(trains)
            losses = []
            for _ in range(chance.randint(1, 3)):
                # The first one trains always: a backward without any gradient is none.
                used = [0, *own.choices(range(len(model.parts)), k=own.randint(0, 6))]
                own.shuffle(used)
                drawn = own.randrange(1 << 30)
                losses.append(lambda side, used=used, drawn=drawn: side(used, drawn))
            train(pair, losses, sync_all=False)
            try:
                pair.compare()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}, {name}: {error}") from None
        inputs(1)
        pair.compare_states()


@pytest.fixture(scope="module")
def failures() -> dict[str, dict[str, str]]:
    return {str(ranks): run_on_ranks([trainings], ranks) for ranks in (2, 3)}


@pytest.mark.parametrize("ranks", ["2", "3"])
def test_ranks(ranks: str, failures: dict[str, dict[str, str]]) -> None:
    assert not failures[ranks], failures[ranks]["trainings"]
