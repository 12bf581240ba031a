"""A norm that is put together from tiles summed at other times is to the bit the norm of all tensors at once."""

from __future__ import annotations

import torch

from tilestep.norm.table import NormTable

CPU = torch.device("cpu")


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() if tensor.numel() else 0 for tensor in tensors])


def put_together(values: list[torch.Tensor], parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of squares of all tensors at once, and that from the parts."""
    numels, dtypes = [value.numel() for value in values], [value.dtype for value in values]
    whole = NormTable(CPU, numels, dtypes)
    once, pieces = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    whole.launch(addresses(values), once)
    for part in parts:
        own = NormTable(CPU, [numels[at] for at in part], [dtypes[at] for at in part], sum(numels))
        own.put_tiles(addresses([values[at] for at in part]), whole, whole.places_of(part))
    whole.finish(pieces)
    return once, pieces


def test_pieces_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [5, 70_000, 0, 33_000, 1, 16_384, 40_001]
    values = [torch.randn(size, generator=generator) for size in sizes]
    values[3] = values[3].bfloat16()
    for parts in ([[0, 1, 2, 3, 4, 5, 6]], [[6, 0], [3], [2], [1, 5, 4]], [[at] for at in range(7)]):
        once, pieces = put_together(values, parts)
        assert torch.equal(once, pieces) and once > 0


def test_what_is_not_finite() -> None:
    huge = [torch.full((2,), 1e300, dtype=torch.float64), torch.full((20_000,), 1e300, dtype=torch.float64)]
    for values in (huge, [torch.tensor([float("inf")]), torch.ones(3)], [torch.ones(3), torch.tensor([float("nan")])]):
        once, pieces = put_together(values, [[1], [0]])
        assert torch.equal(once, pieces) or (once.isnan().all() and pieces.isnan().all())
        assert once.isfinite().all() == (values is huge)
