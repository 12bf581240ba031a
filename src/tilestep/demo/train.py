"""One training run of the demo: the same model, batches and schedule for whatever optimizer it is given."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..bench.measure import Trace, synchronize, trace
from ..optimizer import Optimizer
from .model import GPT, Size, documentation

TURN = 20  # steps of one training before the next has its turn
PIECE = 2048  # bytes of text that stay together when some are set aside


@dataclass(frozen=True)
class Recipe:
    """What both runs share."""

    device: torch.device  # where to train
    steps: int = 600  # how many optimizer steps
    batch: int = 16  # sequences a step
    lr: float = 3e-3  # the highest learning rate, reached after a tenth of the steps and followed by half a cosine
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.1  # of AdamW
    max_grad_norm: float = 1.0  # the global norm that gradients are clipped to
    seed: int = 0  # of the initial weights and the batches
    state_dtype: str | None = None  # of tilestep's optimizer
    master_weights: bool | str = False  # of tilestep's optimizer, whose model is in bfloat16 then
    rounding: str = "nearest"  # of tilestep's optimizer, whose model is in bfloat16 where it is another
    size: Size = field(default_factory=Size)  # of the model

    def rate(self, step: int) -> float:
        """Return the learning rate's factor for a step counted from 0.

        >>> recipe = Recipe(torch.device("cpu"), steps=100)
        >>> [round(recipe.rate(step), 2) for step in (0, 9, 54, 99)]
        [0.1, 1.0, 0.55, 0.1]
        """
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
    has_formats: bool = False  # whether state and weights are kept as the recipe says


@dataclass
class Run:
    """What one training run gave. Times in milliseconds, for every step: until the call returned, until it was done."""

    name: str
    losses: list[float]
    validation: float
    host: list[float]
    wall: list[float]
    trace: Trace
    training_seconds: float

    @property
    def final_loss(self) -> float:
        """The mean loss of the last twentieth of the steps."""
        last = self.losses[-max(len(self.losses) // 20, 1) :]
        return sum(last) / len(last)


def entries() -> list[Entry]:
    """Return torch's AdamW with `clip_grad_norm_`, in its fastest form, and tilestep's that clips in its step."""
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
    """Train one model for each entry from the recipe's seed and measure the optimizer's part of every step.

    The trainings take turns of some steps, so that whatever else the machine does meets them alike.
    """
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
        self.seconds = 0.0

    def advance(self, steps: int) -> float:
        """Train some steps and return the last loss."""
        begin = time.perf_counter()
        for text in itertools.islice(self.batches, steps):
            loss = self.model.loss(text)
            self.optimizer.zero_grad()
            loss.backward()
            returned, done = _timed(self.take, self.recipe.device)
            self.host.append(returned)
            self.wall.append(done)
            self.schedule.step()
            self.losses.append(loss.detach())
        last = self.losses[-1].item()
        self.seconds += time.perf_counter() - begin
        return last

    def finish(self) -> Run:
        """Evaluate, then count what one more step does."""
        final = _evaluate(self.model, self.validation, self.recipe)
        losses = [loss.item() for loss in self.losses]
        traced = trace(self.take, self.recipe.device)
        return Run(self.name, losses, final, self.host, self.wall, traced, self.seconds)


def _timed(take: Take, device: torch.device) -> tuple[float, float]:
    synchronize(device)
    begin = time.perf_counter()
    take()
    returned = time.perf_counter()
    synchronize(device)
    return (returned - begin) * 1e3, (time.perf_counter() - begin) * 1e3


def _split(text: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every twentieth piece of the text is for validation."""
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
