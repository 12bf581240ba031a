"""A few traced iterations of the demo's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..bench.environment import device_name
from ..devices import has_streams
from ..optimizer import Optimizer
from ..overlapping import overlap
from ..tracing import Report, profile
from .model import GPT, Size, documentation

WARM_UP = 3


@dataclass(frozen=True)
class Traced:
    """What to train."""

    device: torch.device  # where
    iterations: int  # how many are traced
    optimizer: str  # a rule's name, or "torch": torch's fused AdamW with its clip
    size: Size  # of the model
    batch: int  # sequences an iteration
    bf16: bool  # whether parameters are bfloat16
    clip: float = 1.0  # the global norm that gradients are clipped to; 0 for no clip
    during: str = ""  # "backward" or "forward", see `tilestep.overlap`; empty for steps between them


def train_traced(traced: Traced, out: Path) -> Report:
    """Train some iterations outside the trace and some inside, and write the trace."""
    torch.manual_seed(0)
    model = GPT(traced.size).to(traced.device, torch.bfloat16 if traced.bf16 else torch.float32)
    parameters = list(model.parameters())
    take = _torch_step(parameters, traced) if traced.optimizer == "torch" else _tilestep_step(model, traced)
    text = documentation().to(traced.device)
    window = torch.arange(traced.size.context + 1, device=traced.device)

    keep_near = _one_ahead(traced.device)

    def iterate() -> None:
        keep_near()
        starts = torch.randint(len(text) - len(window), (traced.batch, 1), device=traced.device)
        model.loss(text[starts + window].long()).backward()
        take()

    for _ in range(WARM_UP):
        iterate()
    with profile(out, title=_title(traced, parameters)) as profiled:
        for _ in range(traced.iterations):
            iterate()
    return profiled.report


def _one_ahead(device: torch.device) -> Callable[[], None]:
    """What keeps the host at most one iteration ahead of a GPU, as a loss that is read does: so a trace shows both."""
    ends: list[torch.cuda.Event] = []

    def wait() -> None:
        if not has_streams(device):
            return
        ends.append(torch.cuda.current_stream(device).record_event())
        if len(ends) > 2:
            ends.pop(0)
            ends[0].synchronize()

    return wait


def _torch_step(parameters: Sequence[torch.Tensor], traced: Traced) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def take() -> None:
        if traced.clip:
            torch.nn.utils.clip_grad_norm_(parameters, traced.clip)
        optimizer.step()
        optimizer.zero_grad()

    return take


def _tilestep_step(model: GPT, traced: Traced) -> Callable[[], None]:
    optimizer = Optimizer(model.parameters(), traced.optimizer, max_grad_norm=traced.clip or None)
    if traced.during:
        during: Literal["backward", "forward"] = "backward" if traced.during == "backward" else "forward"
        optimizer = overlap(optimizer, model, during, bucket_cap_mb=1.0)

    def take() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return take


def _title(traced: Traced, parameters: Sequence[torch.Tensor]) -> str:
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    name = "torch's fused AdamW" if traced.optimizer == "torch" else f"tilestep's {traced.optimizer}"
    name += f" during {traced.during}" if traced.during else ""
    clip = "clip by norm; " if traced.clip else ""
    return f"{name}, {clip}GPT of {millions:.1f} M parameters, {device_name(traced.device)}"
