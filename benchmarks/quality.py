"""What formats of states do to AdamW's update, on states of a small GPT trained in float32.

    python benchmarks/quality.py [--steps 300] [--out benchmarks/results]

Each format is applied to both states of every tensor of 4,096 and more elements after the last step; the figure is the
normalized mean squared error of m / (sqrt(v) + eps), over all of them: |kept - exact|^2 / |exact|^2.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import tilestep
from tilestep.demo.model import GPT, Size, documentation
from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of

EPS = 1e-8


def trained(steps: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The states of all large tensors after a training with beta2 = 0.95."""
    torch.manual_seed(0)
    size = Size(layers=4, width=128, heads=4, context=128)
    model = GPT(size).to(device)
    text = documentation()
    optimizer = tilestep.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95), max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - size.context - 1, (8,), generator=generator)
        batch = torch.stack([text[start : start + size.context + 1] for start in starts.tolist()])
        loss = model.loss(batch.to(device).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    states = [optimizer.state[param] for param in model.parameters() if param.numel() >= 4096]
    return [(state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()) for state in states]


def kept(name: str, values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Values as a format gives them back."""
    storage = STATE_FORMATS[name](signed)
    arrays = {
        array.name: torch.empty(shape_of_entries(values.shape, array.elements), dtype=array.dtype)
        for array in storage.arrays("state")
    }
    stored_in(storage, arrays, "state", values, values.shape)
    return values_of(storage, arrays, "state", shape=values.shape)


def measured(name: str, states: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float | str]:
    """The error of a format's update, in float64."""
    wrong, all_of_it, most = 0.0, 0.0, 0.0
    for moment, square in states:
        exact = moment.double() / (square.double().sqrt() + EPS)
        mine = kept(name, moment, True).double() / (kept(name, square, False).double().sqrt() + EPS)
        wrong += float((mine - exact).square().sum())
        all_of_it += float(exact.square().sum())
        large = exact.abs() > 1e-3
        most = max(most, float((mine[large] / exact[large]).abs().max()))
    return {"format": name, "error of the update": wrong / all_of_it, "largest update over the exact one": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    states = trained(given.steps, "cuda" if torch.cuda.is_available() else "cpu")
    found = [measured(name, states) for name in STATE_FORMATS]
    for row in found:
        print(json.dumps(row))
    assert all(math.isfinite(float(row["error of the update"])) for row in found)
    if given.out:
        rows = {"steps": given.steps, "formats": found}
        Path(given.out, "quality.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
