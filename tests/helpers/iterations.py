"""Newton-Schulz iterations in float64, matrices that are hard for them, and what the kernel of products computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilestep.linalg import COEFFICIENTS

JORDAN = [COEFFICIENTS] * 5
NUMBERS = [1e-7, *COEFFICIENTS * 5]  # as operations take them


def exact(batch: torch.Tensor, rows: Sequence[tuple[float, float, float]] = JORDAN) -> torch.Tensor:
    """The iteration as the papers have it, in float64."""
    value = batch.double()
    value = value / value.norm(dim=(-2, -1), keepdim=True)
    is_tall = value.size(-2) > value.size(-1)
    value = value.mT if is_tall else value
    for a, b, c in rows:
        gram = value @ value.mT
        value = a * value + (b * gram + c * gram @ gram) @ value
    return value.mT if is_tall else value


def conditioned(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    """Noise, and matrices whose singular values fall off, or of which few are large."""
    generator = torch.Generator(device).manual_seed(1)
    short = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, short, generator=generator, device=device))
    right, _ = torch.linalg.qr(torch.randn(columns, short, generator=generator, device=device))
    noise = torch.randn(rows, columns, generator=generator, device=device)
    falling = [left * 10 ** torch.linspace(0, -decades, short, device=device) @ right.mT for decades in (3, 5)]
    few = 100 * left[:, :4] @ right[:, :4].mT + 0.05 * noise
    return torch.stack([noise, *falling, few, left[:, :4] @ right[:, :4].mT, 1e-6 * noise])


def dominated(rows: int, columns: int) -> torch.Tensor:
    """Matrices of which one direction has a share of the squares, in two or five rows; the rest is noise."""
    batch = []
    for share in (0.5, 0.68, 0.75, 0.85, 0.95):
        for seed, count in enumerate((2, 5)):
            generator = torch.Generator().manual_seed(seed)
            left = torch.zeros(rows)
            left[torch.randperm(rows, generator=generator)[:count]] = torch.randn(count, generator=generator)
            right, noise = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
            direction = left[:, None] * right
            batch.append(share**0.5 * direction / direction.norm() + (1 - share) ** 0.5 * noise / noise.norm())
    return torch.stack(batch)


def multiplied(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the kernel computes, in torch: float32 sums, results rounded and exactly symmetric."""
    tall = left.size(-2) > left.size(-1)
    product = left.float().mT @ right.float() if tall else left.float() @ right.float().mT
    total = options.get("alpha", 1.0) * product
    if options.get("base") is not None:
        total = total + options["beta"] * options["base"].float()
    total = total + options.get("shift", 0.0) * torch.eye(total.size(-1))
    if options.get("scale") is not None:
        total = total * options["scale"][:, None, None]
    lower = total.tril()
    total = lower + lower.tril(-1).mT
    return out.copy_(total)
