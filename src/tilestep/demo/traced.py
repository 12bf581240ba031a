"""A few traced iterations of the demo's model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import tilestep
from tilestep.bench.environment import device_name
from tilestep.demo.model import GPT, Size, documentation
from tilestep.tracing import Report

__all__ = ["Traced", "train_traced"]

WARM_UP = 3


@dataclass(frozen=True)
class Traced:
    """What to train.

    Args:
        device: where.
        iterations: how many are traced.
        optimizer: a rule's name, or "torch": torch's fused AdamW with its clip.
        size: of the model.
        batch: sequences an iteration.
        bf16: whether parameters are bfloat16.
    """

    device: torch.device
    iterations: int
    optimizer: str
    size: Size
    batch: int
    bf16: bool


def train_traced(traced: Traced, out: Path) -> Report:
    """Train some iterations outside the trace and some inside, and write the trace.

    Args:
        traced: what to train.
        out: folder for the files.

    Raises:
        RuleError: for an unknown rule.
    """
    torch.manual_seed(0)
    model = GPT(traced.size).to(traced.device, torch.bfloat16 if traced.bf16 else torch.float32)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if traced.optimizer == "torch":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    else:
        optimizer = tilestep.Optimizer(parameters, traced.optimizer, max_grad_norm=1.0)
    text = documentation().to(traced.device)
    window = torch.arange(traced.size.context + 1, device=traced.device)

    def iterate() -> None:
        starts = torch.randint(len(text) - len(window), (traced.batch, 1), device=traced.device)
        model.loss(text[starts + window].long()).backward()
        if traced.optimizer == "torch":
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        iterate()
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    name = "torch's fused AdamW" if traced.optimizer == "torch" else f"tilestep's {traced.optimizer}"
    title = f"{name}, clip by norm; GPT of {millions:.1f} M parameters, {device_name(traced.device)}"
    with tilestep.profile(out, title=title) as profile:
        for _ in range(traced.iterations):
            iterate()
    return profile.report
