"""The demo: a small byte-level GPT trained twice from one seed, with the AdamW of torch and of tilestep."""

from __future__ import annotations

import itertools
import math
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from ..devices import has_streams
from ..execution.overlap import overlap
from ..optimizer import Optimizer
from ..rules import Rule
from ..tracing import Report, profile
from .measure import Trace, spread, timed, trace
from .results import device_name


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


Take = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """An optimizer in the demo: makes the optimizer, and the function that clips and steps."""

    name: str
    build: Callable[[Sequence[Tensor], Recipe], tuple[torch.optim.Optimizer, Take]]
    has_formats: bool = False  # whether it uses the formats of the recipe


@dataclass
class Run:
    """The results of a training run. Times of steps in milliseconds: until the call returned, until it was done."""

    name: str
    losses: list[float]
    validation: float
    host: list[float]
    wall: list[float]
    trace: Trace

    @property
    def final_loss(self) -> float:
        """The mean loss of the last twentieth of the steps."""
        last = self.losses[-max(len(self.losses) // 20, 1) :]
        return sum(last) / len(last)


def entries() -> list[Entry]:
    """Return torch's AdamW with `clip_grad_norm_`, in its fastest form, and tilestep's, which clips in its step."""
    return [Entry("torch AdamW (fused) + clip", _torch), Entry("tilestep AdamW", _tilestep, has_formats=True)]


def _torch(parameters: Sequence[Tensor], recipe: Recipe) -> tuple[torch.optim.Optimizer, Take]:
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )

    def take() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
        optimizer.step()

    return optimizer, take


def _tilestep(parameters: Sequence[Tensor], recipe: Recipe) -> tuple[torch.optim.Optimizer, Take]:
    optimizer = Optimizer(
        parameters,
        "AdamW",
        lr=recipe.lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        state_dtype=recipe.state_dtype,
        master_weights=recipe.master_weights,
        rounding=recipe.rounding,
    )
    return optimizer, lambda: optimizer.step()  # looked up each time: a scheduler replaces the method


def train(
    competing: Sequence[Entry], recipe: Recipe, progress: Callable[[int, int, float], object] = lambda *done: None
) -> list[Run]:
    """Train one model for each entry from the recipe's seed and measure the optimizer's part of every step."""
    trainings = [_Training(entry, recipe) for entry in competing]
    for done in range(0, recipe.steps, TURN):
        for index, training in enumerate(trainings):
            loss = training.advance(min(TURN, recipe.steps - done))
            progress(index, len(training.losses), loss)
    return [training.finish() for training in trainings]


class _Training:
    def __init__(self, entry: Entry, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.name, self.recipe = entry.name, recipe
        self.model = GPT(recipe.size).to(recipe.device)
        if entry.has_formats and (recipe.master_weights or recipe.rounding != "nearest"):
            self.model.to(torch.bfloat16)
        text, self.validation = _split(documentation(), recipe.device)
        self.batches = _batches(text, recipe)
        self.optimizer, self.take = entry.build(list(self.model.parameters()), recipe)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, recipe.rate)
        self.losses: list[Tensor] = []
        self.host: list[float] = []
        self.wall: list[float] = []

    def advance(self, steps: int) -> float:
        """Train some steps and return the last loss."""
        for text in itertools.islice(self.batches, steps):
            loss = self.model.loss(text)
            self.optimizer.zero_grad()
            loss.backward()
            returned, done = timed(self.take, self.recipe.device)
            self.host.append(returned)
            self.wall.append(done)
            self.schedule.step()
            self.losses.append(loss.detach())
        return self.losses[-1].item()

    def finish(self) -> Run:
        """Evaluate, then trace one more step."""
        final = _evaluate(self.model, self.validation, self.recipe)
        losses = [loss.item() for loss in self.losses]
        traced = trace(self.take, self.recipe.device)
        return Run(self.name, losses, final, self.host, self.wall, traced)


def _split(text: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Split the text: every twentieth piece is for validation."""
    pieces = text.split(PIECE)
    training = [piece for index, piece in enumerate(pieces) if index % 20]
    return torch.cat(training).to(device), torch.cat(pieces[::20]).to(device)


def _batches(text: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    window = torch.arange(recipe.size.context + 1, device=text.device)
    for _ in range(recipe.steps):
        starts = torch.randint(len(text) - len(window), (recipe.batch, 1), generator=generator)
        yield text[starts.to(text.device) + window].long()


@torch.no_grad()
def _evaluate(model: GPT, text: Tensor, recipe: Recipe) -> float:
    length = recipe.size.context + 1
    count = min(len(text) // length, 64)
    batches = text[: count * length].view(count, length).long().split(recipe.batch)
    return sum(model.loss(batch).item() * len(batch) for batch in batches) / count


def largest_difference(runs: Sequence[Run]) -> float:
    """Return the largest distance between the losses of any two runs at the same step."""
    return max(max(losses) - min(losses) for losses in zip(*(run.losses for run in runs), strict=True))


def table(runs: Sequence[Run], gpu: bool) -> Table:
    """Return the comparison, one column per run."""
    figures: list[tuple[str, Callable[[Run], str]]] = [
        ("training loss at the end", lambda run: f"{run.final_loss:.5f}"),
        ("validation loss", lambda run: f"{run.validation:.5f}"),
        ("clip + step, median ms", lambda run: _milliseconds(run.wall)),
        ("  of which host", lambda run: _milliseconds(run.host)),
        ("launches a step" if gpu else "torch calls a step", lambda run: _count(run, gpu)),
        ("extra memory in a step", lambda run: f"{run.trace.peak_bytes / 1e3:,.1f} kB"),
    ]
    shown = Table(title=f"largest difference of the two losses at any step: {largest_difference(runs):.2g}")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right")
    for title, figure in figures:
        shown.add_row(title, *[figure(run) for run in runs])
    return shown


def _milliseconds(values: Sequence[float]) -> str:
    middle = spread(values)
    return f"{middle.median:.3f} ±{(middle.high - middle.low) / 2:.3f}"


def _count(run: Run, gpu: bool) -> str:
    return str(run.trace.launches if gpu else run.trace.calls)


def picture(runs: Sequence[Run], path: Path, title: str) -> None:
    """Draw both loss curves, their distance, and the optimizer's time in every step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, distance, times) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    styles = [{"color": "#8a9ba8", "linewidth": 3.5}, {"color": "#c8553d", "linewidth": 1.2}]
    for run, style in zip(runs, styles, strict=True):
        steps = range(1, len(run.losses) + 1)
        losses.plot(steps, run.losses, label=run.name, **style)
        times.plot(steps, run.wall, ".", markersize=3, color=style["color"], alpha=0.5)
        median = statistics.median(run.wall)
        times.axhline(median, color=style["color"], label=f"{run.name}: {median:.2f} ms")
    apart = [abs(one - other) for one, other in zip(runs[0].losses, runs[1].losses, strict=True)]
    distance.plot(range(1, len(apart) + 1), apart, color="black", linewidth=0.8)
    if any(apart):
        distance.set_yscale("log")
    times.set_ylim(0, 3 * max(statistics.median(run.wall) for run in runs))
    for panel, name in ((losses, "training loss, nats a byte"), (distance, "distance of the two losses")):
        panel.set_title(name, fontsize=10)
    times.set_title("clip + optimizer, ms a step", fontsize=10)
    for panel in (losses, distance, times):
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
    losses.legend(fontsize=8)
    times.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


WARM_UP = 3


def train_traced(recipe: Recipe, out: Path, rule: Rule | None, bf16: bool = False, during: str = "neither") -> Report:
    """Train some iterations outside the trace and the recipe's steps inside, and write the trace.

    Without a `rule` it is torch's fused AdamW with its clip that trains; `during` is "backward" or "forward", see
    `tilestep.overlap`, or "neither" for steps between them. A `max_grad_norm` of 0 clips nothing.
    """
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.size).to(recipe.device, torch.bfloat16 if bf16 else torch.float32)
    parameters, clip = list(model.parameters()), recipe.max_grad_norm
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        if rule is None
        else Optimizer(parameters, rule, max_grad_norm=clip or None)
    )
    if isinstance(optimizer, Optimizer) and during != "neither":
        optimizer = overlap(optimizer, model, "backward" if during == "backward" else "forward", bucket_cap_mb=1.0)
    text = documentation().to(recipe.device)
    window = torch.arange(recipe.size.context + 1, device=recipe.device)
    keep_near = _one_ahead(recipe.device)

    def iterate() -> None:
        keep_near()
        starts = torch.randint(len(text) - len(window), (recipe.batch, 1), device=recipe.device)
        model.loss(text[starts + window].long()).backward()
        if rule is None and clip:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        iterate()
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    name = "torch's fused AdamW" if rule is None else f"tilestep's {rule.name}"
    name += "" if during == "neither" else f" during {during}"
    clips = "clip by norm; " if clip else ""
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
