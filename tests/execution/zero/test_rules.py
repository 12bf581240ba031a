"""Every rule with a sharded optimizer: elementwise ones to the bit, reductions to the last digits, whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Convolutions, Pair, inputs, train
from torch import nn

import tilestep
from tilestep.rules.compose import clip_update, ema, lookahead, scaled_states


class Matrices(nn.Module):
    """Matrices of several shapes, with vectors between them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, 8, 6, 6, 12, 5, 5, 3, 4]
        self.layers = nn.ModuleList(nn.Linear(given, made) for given, made in itertools.pairwise(sizes))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = torch.tanh(layer(data))
        return data.square().sum()


def is_exact(optimizer: tilestep.ShardedOptimizer) -> bool:
    """Whether no reduction is made of sums over several ranks."""
    engines = optimizer._current_plan().engines
    return not any(passes.segment.spec.program.reductions for engine in engines for passes in engine.passes)


def rule_check(name: str) -> Callable[[], None]:
    kind = getattr(tilestep, name)

    def check() -> None:
        model = Matrices()
        vectors = [param for param in model.parameters() if param.dim() < 2]
        matrices = [param for param in model.parameters() if param.dim() == 2]
        try:
            kind([nn.Parameter(torch.ones(3))])
            chosen = [*matrices, *vectors]
        except tilestep.MatrixError:
            chosen = matrices
        places = [place for place, param in enumerate(model.parameters()) if any(param is other for other in chosen)]
        pair = Pair(
            model, kind, lambda module: [list(module.parameters())[place] for place in places], bucket_cap_mb=TINY
        )
        for _ in range(4):
            data = inputs(4, 6)
            train(pair, [lambda model, data=data: model(data)])
            for param in (*pair.model.parameters(), *pair.twin.parameters()):
                param.grad = None
            pair.compare(**({} if is_exact(pair.optimizer) else {"rtol": 1e-6, "atol": 1e-7}))
        if is_exact(pair.optimizer):
            pair.compare_states()
        sections = {
            bucket.layout.section for bucket in pair.optimizer.execution.sharding.buckets if bucket.layout.whole
        }
        used = {member.piece is not None for member in pair.optimizer.execution.sharding.members if member.is_whole}
        assert not sections or len(used) == 2, "one rank has all of the whole tensors"

    check.__name__ = name
    return check


class Checks:
    """Functions made here are found again by the processes that run them."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self) -> None:
        rule_check(self.__name__)()


def muon_beside_adamw() -> None:
    def groups(model: nn.Module) -> Any:
        return tilestep.muon_groups(model)

    def make(params: Any) -> Any:
        return tilestep.Optimizer(params, "Muon", lr=0.02, max_grad_norm=1.0)

    pair = Pair(Matrices(), make, groups, bucket_cap_mb=TINY)
    for _ in range(3):
        data = inputs(4, 6)
        train(pair, [lambda model, data=data: model(data)])
        pair.compare(rtol=1e-5, atol=1e-6)


def a_rank_that_owns_nothing() -> None:
    """One matrix on two ranks: the other one still takes part in clips, skips and checkpoints."""

    def make(params: Any) -> Any:
        return tilestep.Muon(params, lr=0.02, max_grad_norm=0.1, skip_nonfinite=True)  # type: ignore[attr-defined]

    pair = Pair(nn.Linear(7, 5, bias=False), make)
    for step in range(3):
        scale = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        data = inputs(3, 7) * scale
        if step == 1:
            data = torch.nan_to_num(data, nan=1.0)
        train(pair, [lambda model, data=data: model(data).square().sum()])
        pair.compare(rtol=1e-6, atol=1e-7)
        assert int(pair.optimizer.skipped_steps) == (step >= 1)
    full = pair.optimizer.full_state_dict()
    assert float(full["state"][0]["step"]) == 2
    pair.optimizer.load_state_dict(full)
    other = tilestep.Muon(nn.Linear(7, 5, bias=False).parameters())  # type: ignore[attr-defined]
    other.load_state_dict(full)


class Holders(nn.Module):
    """A stack of experts, blocks of rows of one size and of several, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).copy_(torch.randn(shape, generator=generator, device="cpu")))

        self.experts, self.stem = drawn(3, 6, 8), drawn(4, 2, 3, 3)
        self.heads, self.qkv, self.groups = drawn(12, 6), drawn(16, 6), drawn(16, 6)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        sums = [torch.tanh(data @ expert).sum() for expert in self.experts]
        sums += [torch.tanh(data @ one.mT).square().sum() for one in (self.heads, self.qkv, self.groups)]
        return torch.stack(sums).sum() + torch.tanh(data.mean() * self.stem).square().sum()


def matrices_inside_of_tensors() -> None:
    def make(params: Any) -> Any:
        splits = {"qkv": (8, 4, 4), "groups": (2, 1, 1)}
        return tilestep.Muon(params, lr=0.1, flatten={"stem": True}, heads={"heads": 3}, splits=splits)  # type: ignore[attr-defined]

    pair = Pair(Holders(), make, lambda model: list(model.named_parameters()), bucket_cap_mb=TINY)
    for _ in range(3):
        data = inputs(4, 6)
        train(pair, [lambda model, data=data: model(data)])
        pair.compare()
    pair.compare_states()


def rules_made_of_rules() -> None:
    adamw = tilestep.registry["AdamW"]
    for rule in (clip_update(adamw, 0.5), ema(adamw, 0.9), lookahead(adamw, 2), scaled_states(adamw)):
        pair = Pair(Matrices(), lambda params, rule=rule: tilestep.Optimizer(params, rule, lr=0.1), bucket_cap_mb=TINY)
        for _ in range(3):
            data = inputs(4, 6)
            train(pair, [lambda model, data=data: model(data)])
            pair.compare(rtol=1e-6, atol=1e-7)


def reductions_of_pieces_in_channels_last() -> None:
    def make(params: Any) -> Any:
        return tilestep.LAMB(params, lr=0.1, weight_decay=0.1)  # type: ignore[attr-defined]

    pair = Pair(Convolutions().to(memory_format=torch.channels_last), make, bucket_cap_mb=TINY)
    for _ in range(3):
        data = inputs(2, 3, 6, 6)
        train(pair, [lambda model, data=data: model(data).square().sum()])
        pair.compare(rtol=1e-6, atol=1e-7)


def hyperparameters_that_are_functions() -> None:
    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=tilestep.schedule.warmup_cosine(0.1, 2, 8))  # type: ignore[attr-defined]

    pair = Pair(Matrices(), make, bucket_cap_mb=TINY)
    for _ in range(4):
        data = inputs(4, 6)
        train(pair, [lambda model, data=data: model(data)])
        pair.compare()
    pair.compare_states()


RULES = [Checks(name) for name in sorted(tilestep.registry) if hasattr(tilestep, name)]
CHECKS = [
    *RULES,
    muon_beside_adamw,
    a_rank_that_owns_nothing,
    matrices_inside_of_tensors,
    rules_made_of_rules,
    reductions_of_pieces_in_channels_last,
    hyperparameters_that_are_functions,
]


test_two_ranks = each_passes(CHECKS, 2)
