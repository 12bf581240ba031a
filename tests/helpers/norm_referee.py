"""What a norm must be: float64 throughout, of all elements together."""

from __future__ import annotations

import torch

ORDERS = [2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0, 0.5, -1.5, 7.25]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def referee(tensors: list[torch.Tensor], norm_type: float) -> float:
    """The norm in float64; order 0 counts tensors that hold a nonzero, as torch's two steps do."""
    if norm_type == 0:
        return float(sum(bool((tensor != 0).any()) for tensor in tensors))
    parts = [tensor.detach().cpu().double().reshape(-1).abs() for tensor in tensors]
    joined = torch.cat(parts)
    if norm_type == float("inf"):
        return joined.amax().item() if joined.numel() else 0.0
    if norm_type == float("-inf"):
        return joined.amin().item() if joined.numel() else float("inf")
    return (joined**norm_type).sum().pow(1 / norm_type).item()


def drawn(sizes: list[int], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    """Tensors of these sizes, away from zero so that negative orders mean something."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=generator) for size in sizes]
    return [(value.sign() * (value.abs() + 0.1)).to(dtype).to(device) for value in values]


def tolerance(dtype: torch.dtype) -> float:
    """Relative, for sums in float32 or float64."""
    return 1e-12 if dtype == torch.float64 else 3e-6
