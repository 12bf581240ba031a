"""What the examples share: a byte-level GPT, its text, and how a picture is drawn.

The text is Python's own language reference, which every Python carries, so that nothing is downloaded.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tilestep.bench.demo import GPT as DemoGPT
from tilestep.bench.demo import Size, documentation

CONTEXT = 64


class GPT(DemoGPT):
    """The model of `tilestep demo`; called with text, it returns the mean cross-entropy of each byte in nats."""

    def __init__(self, layers: int = 2, width: int = 128, heads: int = 4) -> None:
        super().__init__(Size(layers, width, heads, CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of a (batch, CONTEXT + 1) int64 text."""
        scores = super().forward(text[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())


class Text:
    """Random windows of the text, the same for the same seed.

    Args:
        device: where batches are needed.
        part: begin and end of what is read, as fractions of the text.
        seed: of the windows.
    """

    def __init__(self, device: torch.device, part: tuple[float, float] = (0.0, 1.0), seed: int = 0) -> None:
        whole = documentation()
        self.bytes = whole[int(part[0] * len(whole)) : int(part[1] * len(whole))]
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def batch(self, size: int = 16) -> Tensor:
        """Return the next `size` windows, (size, CONTEXT + 1) int64."""
        starts = torch.randint(len(self.bytes) - CONTEXT - 1, (size, 1), generator=self.generator)
        return self.bytes[starts + torch.arange(CONTEXT + 1)].long().to(self.device)


def arguments(description: str | None, picture: str, steps: int) -> ArgumentParser:
    """Return a parser of what every example understands: `--steps`, `--device`, `--picture`."""
    parser = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default, help="where to train")
    parser.add_argument("--picture", type=Path, default=Path(picture), help="the file to draw")
    return parser


def progress(step: int, steps: int, title: str = "", **values: Tensor | float) -> None:
    """Print values for the first of the steps, which count from 1, and for every tenth part of them.

    Tensors are read only then, so that a loop does not wait for a GPU at every step.
    """
    if step == 1 or step == steps or step % max(steps // 10, 1) == 0:
        shown = "   ".join(f"{name.replace('_', ' ')} {float(value):.4g}" for name, value in values.items())
        print(f"{title:12} step {step:4d} of {steps}   {shown}".lstrip(), flush=True)


def draw(curves: Mapping[str, Sequence[float]], path: Path, title: str, ylabel: str = "loss, nats a byte") -> None:
    """Draw lines over steps; later ones are thinner, so that equal ones are all seen.

    Args:
        curves: values of each step, by name.
        path: the file to write.
        title: of the picture.
        ylabel: what the values are.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture without matplotlib: pip install 'tilestep[plot]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    colors = ["#8a9ba8", "#c8553d", "#2b6777", "#e0a458"]
    for index, (name, values) in enumerate(curves.items()):
        width = 1.2 + 1.5 * (len(curves) - 1 - index)
        axes.plot(range(1, len(values) + 1), values, label=name, color=colors[index % 4], linewidth=width)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"picture: {path}")
