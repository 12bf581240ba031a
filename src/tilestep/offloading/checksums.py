"""Whether parameters on a device hold what they held: sums of their bits, which cost a few launches and no copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

__all__ = ["checksums"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW, _TOGETHER = 1024, 2**25
"""Elements of a row, and elements that are summed together; these are copied to lie side by side."""


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of the bits by rows and by columns of all elements side by side, as int64 on their device.

    Every change of one element changes them, and so does every exchange of two.

    Args:
        tensors: on one device.

    Example:
        >>> values = torch.tensor([1.0, -1.0, 2.0])
        >>> before = checksums([values])
        >>> _ = values.data.neg_()
        >>> torch.equal(checksums([values]), before)
        False
    """
    sums: list[torch.Tensor] = []
    for flat in _batches(map(_bits, tensors)):
        whole = flat.numel() // _ROW * _ROW
        rows, rest = flat[:whole].view(-1, _ROW), flat[whole:]
        sums += [rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(_BITS[tensor.element_size()]).reshape(-1)


def _batches(flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Neighbours of one type side by side, until there are enough; those that are enough alone as they are."""
    kept: list[torch.Tensor] = []
    elements = 0
    for flat in flats:
        if kept and (elements + flat.numel() > _TOGETHER or kept[0].dtype != flat.dtype):
            yield torch.cat(kept)
            kept, elements = [], 0
        if flat.numel() > _TOGETHER:
            yield flat
        else:
            kept.append(flat)
            elements += flat.numel()
    if kept:
        yield torch.cat(kept)
