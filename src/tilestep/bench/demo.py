"""The demo: a small byte-level GPT trained twice from one seed, with the AdamW of torch and of tilestep."""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..devices import has_streams
from ..execution.overlap import overlap
from ..optimizer import Optimizer
from ..rules import Rule
from ..tracing import Report, profile
from ..tracing.shown import OTHER_COLOUR, OURS_COLOUR, table
from ..tracing.shown import picture as drawn
from .measure import Trace, spread, timed, trace
from .results import device_name

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Size:
    """The model's size."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.inner_norm = nn.LayerNorm(size.width)
        self.inner_in = nn.Linear(size.width, 4 * size.width)
        self.inner_out = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.inner_out(functional.gelu(self.inner_in(self.inner_norm(hidden))))


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        nn.init.normal_(self.byte.weight, std=0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next byte: (batch, length) int64 -> (batch, length, 256)."""
        hidden = self.byte(text) + self.position[: text.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of a (batch, length + 1) text."""
        scores = self(text[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def documentation() -> Tensor:
    """Return the text of `pydoc_data.topics` as a 1-D uint8 tensor."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(f"{name}\n\n{topics[name].strip()}" for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


TURN = 20  # consecutive steps of a training
PIECE = 2048  # bytes of text that stay together in the split


@dataclass(frozen=True)
class Recipe:
    """The options of both runs."""

    device: torch.device  # where to train
    steps: int = 600  # optimizer steps
    batch: int = 16  # sequences per step
    lr: float = 3e-3  # the highest learning rate, reached after a tenth of the steps and followed by half a cosine
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.1  # of AdamW
    max_grad_norm: float = 1.0  # the global norm that gradients are clipped to
    seed: int = 0  # of the initial weights and the batches
    state_dtype: str | None = None  # of tilestep's optimizer
    master_weights: bool | str = False  # of tilestep's optimizer, whose model is in bfloat16 then
    rounding: str = "nearest"  # of tilestep's optimizer, whose model is in bfloat16 unless it is "nearest"
    size: Size = field(default_factory=Size)  # of the model

    def rate(self, step: int) -> float:
        """Return the learning rate's factor for a step counted from 0."""
        warmup = max(self.steps // 10, 1)
        if step < warmup:
            return (step + 1) / warmup
        done = (step + 1 - warmup) / max(self.steps - warmup, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Entry:
    """An optimizer in the demo."""

    name: str
    build: Callable[[nn.Module, Recipe], torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32  # of the model
    clips: bool = True  # whether its step clips; otherwise torch clips before the step


def entries(recipe: Recipe) -> list[Entry]:
    """Return torch's AdamW with `clip_grad_norm_`, in its fastest form, and tilestep's, which clips in its step."""
    is_narrow = recipe.master_weights or recipe.rounding != "nearest"
    ours = Entry("tilestep AdamW", _tilestep, torch.bfloat16 if is_narrow else torch.float32)
    return [Entry("torch AdamW (fused) + clip", _torch, clips=False), ours]


def _torch(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    decay = recipe.weight_decay
    return torch.optim.AdamW(model.parameters(), recipe.lr, recipe.betas, weight_decay=decay, fused=True)


def _tilestep(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    names = ("lr", "betas", "weight_decay", "max_grad_norm", "state_dtype", "master_weights", "rounding")
    return Optimizer(model.parameters(), "AdamW", **{name: getattr(recipe, name) for name in names})


def train(
    competing: Sequence[Entry], recipe: Recipe, progress: Callable[[int, int, float], object] = lambda *done: None
) -> list[Run]:
    """Train one model for each entry from the recipe's seed and measure the optimizer's part of every step."""
    runs = [Run(entry, recipe) for entry in competing]
    for done in range(0, recipe.steps, TURN):
        for index, run in enumerate(runs):
            loss = run.advance(min(TURN, recipe.steps - done))
            progress(index, len(run.wall), loss)
    for run in runs:
        run.finish()
    return runs


class Run:
    """A training run and its results. Times of steps in milliseconds: until the call returned, until it was done."""

    validation: float
    trace: Trace

    def __init__(self, entry: Entry, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.name, self._recipe, self._step_clips = entry.name, recipe, entry.clips
        self.model = GPT(recipe.size).to(recipe.device, entry.dtype)
        text, self._validation = _split(documentation(), recipe.device)
        self._batches = _batches(text, recipe)
        self._optimizer = entry.build(self.model, recipe)
        self._losses: list[Tensor] = []
        self.losses: list[float] = []
        self.host: list[float] = []
        self.wall: list[float] = []

    def backward(self) -> None:
        """Compute the gradients of the next batch."""
        loss = self.model.loss(next(self._batches))
        self._optimizer.zero_grad()
        loss.backward()
        self._losses.append(loss.detach())

    def step(self) -> None:
        """Clip and step."""
        if not self._step_clips and self._recipe.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_grad_norm)
        self._optimizer.step()

    def advance(self, steps: int) -> float:
        """Train some steps and return the last loss."""
        for _ in range(steps):
            for group in self._optimizer.param_groups:
                group["lr"] = self._recipe.lr * self._recipe.rate(len(self.wall))
            self.backward()
            returned, done = timed(self.step, self._recipe.device)
            self.host.append(returned)
            self.wall.append(done)
        return self._losses[-1].item()

    @torch.no_grad()
    def finish(self) -> None:
        """Evaluate, then trace one more step."""
        length, recipe = self._recipe.size.context + 1, self._recipe
        count = min(len(self._validation) // length, 64)
        batches = self._validation[: count * length].view(count, length).long().split(recipe.batch)
        self.validation = sum(self.model.loss(batch).item() * len(batch) for batch in batches) / count
        self.losses = [loss.item() for loss in self._losses]
        self.trace = trace(self.step, recipe.device)

    @property
    def final_loss(self) -> float:
        """The mean loss of the last twentieth of the steps."""
        return statistics.fmean(self.losses[-max(len(self.losses) // 20, 1) :])


def _split(text: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Split the text: every twentieth piece is for validation."""
    pieces = text.split(PIECE)
    training = [piece for index, piece in enumerate(pieces) if index % 20]
    return torch.cat(training).to(device), torch.cat(pieces[::20]).to(device)


def _batches(text: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    window = torch.arange(recipe.size.context + 1, device=text.device)
    last = len(text) - len(window)
    starts = torch.randint(last, (recipe.steps, recipe.batch, 1), generator=generator).to(text.device)
    return (text[start + window].long() for start in starts)


def largest_difference(runs: Sequence[Run]) -> float:
    """Return the largest distance between the losses of any two runs at the same step."""
    return max(max(losses) - min(losses) for losses in zip(*(run.losses for run in runs), strict=True))


def comparison(runs: Sequence[Run], gpu: bool) -> Table:
    """Return the comparison, one column per run."""

    def milliseconds(values: Sequence[float]) -> str:
        middle = spread(values)
        return f"{middle.median:.3f} ±{(middle.high - middle.low) / 2:.3f}"

    columns = [
        (
            run.name,
            *(f"{run.final_loss:.5f}", f"{run.validation:.5f}"),
            *(milliseconds(run.wall), milliseconds(run.host)),
            *(str(run.trace.launches if gpu else run.trace.calls), f"{run.trace.peak_bytes / 1e3:,.1f} kB"),
        )
        for run in runs
    ]
    counted = "launches per step" if gpu else "torch calls per step"
    rows = ("", "training loss at the end", "validation loss", "clip + step, median ms", "  of which host", counted)
    titles, *cells = zip((*rows, "extra memory during a step"), *columns, strict=True)
    return table(f"largest difference of the two losses at any step: {largest_difference(runs):.2g}", titles, cells)


def picture(runs: Sequence[Run], path: Path, title: str) -> None:
    """Draw both loss curves, their distance, and the optimizer's time in every step."""
    with drawn(path, 1, 3, figsize=(13, 4)) as (figure, (losses, distance, times)):
        for run, color, width in zip(runs, (OTHER_COLOUR, OURS_COLOUR), (3.5, 1.2), strict=True):
            steps, median = range(1, len(run.losses) + 1), statistics.median(run.wall)
            losses.plot(steps, run.losses, label=run.name, color=color, linewidth=width)
            times.plot(steps, run.wall, ".", markersize=3, color=color, alpha=0.5)
            times.axhline(median, color=color, label=f"{run.name}: {median:.2f} ms")
        apart = [abs(one - other) for one, other in zip(runs[0].losses, runs[1].losses, strict=True)]
        distance.plot(steps, apart, color="black", linewidth=0.8)
        if any(apart):
            distance.set_yscale("log")
        times.set_ylim(0, 3 * max(statistics.median(run.wall) for run in runs))
        names = ("training loss, nats per byte", "difference of the two losses", "clip + optimizer, ms per step")
        for panel, name in zip((losses, distance, times), names, strict=True):
            panel.set_title(name, fontsize=10)
            panel.set_xlabel("step")
        losses.legend(fontsize=8)
        times.legend(fontsize=8)
        figure.suptitle(title, fontsize=10)


WARM_UP = 3


def train_traced(recipe: Recipe, out: Path, rule: Rule | None, bf16: bool = False, during: str = "neither") -> Report:
    """Train some iterations outside the trace and the recipe's steps inside, and write the trace.

    Without a `rule` it is torch's fused AdamW with its clip that trains; `during` is "backward" or "forward", see
    `tilestep.overlap`, or "neither" for steps between them. A `max_grad_norm` of 0 clips nothing.
    """

    def build(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        if rule is None:
            return _torch(model, recipe)
        optimizer = Optimizer(model.parameters(), rule, max_grad_norm=recipe.max_grad_norm or None)
        if during == "neither":
            return optimizer
        return overlap(optimizer, model, "backward" if during == "backward" else "forward", bucket_cap_mb=1.0)

    name = "torch's fused AdamW" if rule is None else f"tilestep's {rule.name}"
    name += "" if during == "neither" else f" during {during}"
    entry = Entry(name, build, torch.bfloat16 if bf16 else torch.float32, clips=rule is not None)
    run = Run(entry, replace(recipe, steps=recipe.steps + WARM_UP))
    keep_near = _one_ahead(recipe.device)

    def iterate() -> None:
        keep_near()
        run.backward()
        run.step()

    for _ in range(WARM_UP):
        iterate()
    clips = "clip by norm; " if recipe.max_grad_norm else ""
    millions = sum(parameter.numel() for parameter in run.model.parameters()) / 1e6
    title = f"{name}, {clips}GPT of {millions:.1f} M parameters, {device_name(recipe.device)}"
    with profile(out, title=title) as profiled:
        for _ in range(recipe.steps):
            iterate()
    return profiled.report


def _one_ahead(device: torch.device) -> Callable[[], None]:
    """Keep the host at most one iteration ahead of a GPU, as reading a loss does, so that a trace shows both."""
    ends: list[torch.cuda.Event] = []

    def wait() -> None:
        if not has_streams(device):
            return
        ends.append(torch.cuda.current_stream(device).record_event())
        if len(ends) > 2:
            ends.pop(0)
            ends[0].synchronize()

    return wait
