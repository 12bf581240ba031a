"""A small transformer that trains with a scaler, a clip, a schedule and overflows: eager, and as a CUDA graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

import tilestep

__all__ = ["schedule", "transformer"]

OVERFLOWS = (5, 60, 61, 150)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up, then a cosine."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [20])


class Transformer(torch.nn.Module):
    """A small causal language model whose every operation is the same from run to run."""

    def __init__(self, words: int = 256, width: int = 128, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = torch.nn.ModuleList(_Block(width, 4) for _ in range(layers))
        self.head = torch.nn.Linear(width, words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.words(text[:, :-1]) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), text[:, 1:].flatten())


class _Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mixed, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.mixed(self.before(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.mT / math.sqrt(width // self.heads)
        hidden_future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        mixed = scores.masked_fill(hidden_future, float("-inf")).softmax(-1) @ value
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.wide(self.between(hidden))


def text_of(step: int) -> torch.Tensor:
    """Eight lines that count on from a drawn number: something to learn."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(low, high, (8, 1), generator=generator) for low, high in ((0, 256), (1, 8)))
    return (start + stride * torch.arange(65)) % 256


def train(captured: bool, steps: int, device: str = "cuda") -> dict[str, Any]:
    """Train in float16 with scaler, clip, warm-up, cosine and overflows.

    Returns:
        Losses, skipped steps, the last scale, the parameters, and milliseconds a step.
    """
    torch.manual_seed(0)
    model = Transformer().to(device)
    optimizer = tilestep.AdamW(model.parameters(), lr=2e-3, max_grad_norm=0.5)
    scaler, scheduler = tilestep.GradScaler(device, init_scale=2.0**12, growth_interval=25), schedule(optimizer)
    text, spike = torch.zeros(8, 65, dtype=torch.int64, device=device), torch.ones((), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device, torch.float16, cache_enabled=False):
            loss = model(text)
        scaler.scale(loss * spike).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    losses = torch.zeros(steps, device=device)
    run: Callable[[], torch.Tensor] = step
    begin = time.perf_counter()
    for index in range(steps):
        if captured and index == 3:
            run = tilestep.capture(optimizer, step).replay
        if index == 10:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        text.copy_(text_of(index))
        spike.fill_(math.inf if index in OVERFLOWS else 1.0)
        losses[index] = run()
        scheduler.step()
    found = losses.tolist()
    seconds = time.perf_counter() - begin
    return {
        "losses": found,
        "skipped": int(optimizer.skipped_steps),
        "scale": scaler.get_scale(),
        "params": [param.detach().clone() for param in model.parameters()],
        "ms": 1e3 * seconds / max(steps - 10, 1),
    }


def transformer(steps: int = 200) -> dict[str, Any]:
    """Eager against captured training, to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(False, 4)
        eager, again, graphed = train(False, steps), train(False, steps), train(True, steps)
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "steps": steps,
        "losses": {"first": eager["losses"][0], "last": eager["losses"][-1]},
        "skipped": {"eager": eager["skipped"], "captured": graphed["skipped"]},
        "scale": {"eager": eager["scale"], "captured": graphed["scale"]},
        "step_ms": {"eager": round(eager["ms"], 3), "captured": round(graphed["ms"], 3)},
        "largest_difference": max(abs(x - y) for x, y in zip(eager["losses"], graphed["losses"])),
        "holds": {
            "eager repeats to the bit": eager["losses"] == again["losses"],
            "equal losses": eager["losses"] == graphed["losses"],
            "equal parameters": all(map(torch.equal, eager["params"], graphed["params"])),
            "overflows were skipped": eager["skipped"]
            == graphed["skipped"]
            >= len([o for o in OVERFLOWS if o < steps]),
            "it learned": eager["losses"][-1] < 0.7 * eager["losses"][0],
        },
    }
