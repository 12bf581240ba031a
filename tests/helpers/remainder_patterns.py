"""Float32 bit patterns on which a bfloat16 and its remainder could go wrong, and what integers say they must be."""

from __future__ import annotations

from typing import Any

import torch

import tilestep
from tilestep.storage import Remainder, stored_in, values_of


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 numbers as bfloat16 ones and remainders, int16, as torch makes them of the format."""
    high, low = (torch.empty_like(values, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    stored_in(Remainder(), {"x": high, "remainder_x": low}, "x", values)
    return high, low


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of bfloat16 ones and their remainders."""
    return values_of(Remainder(), {"x": high, "remainder_x": low}, "x")


@tilestep.rule
def keep(param: Any, grad: Any, wide: Any) -> tuple[Any, ...]:
    """The parameter becomes `wide`."""
    return wide, wide


@tilestep.rule
def reveal(param: Any, grad: Any, wide: Any) -> tuple[Any, ...]:
    """`wide` becomes what the parameter was read as."""
    return param, param


def floats(bits: torch.Tensor) -> torch.Tensor:
    """Float32 numbers of these bits, int64 from 0 to 2**32 - 1."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bits of float32 numbers, int64 from 0 to 2**32 - 1."""
    return values.view(torch.int32).to(torch.int64) % 2**32


def edge_patterns() -> torch.Tensor:
    """Every upper half with the lower halves about which rounding could be wrong, ties among them; and random ones."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    random = torch.randint(0, 2**32, (2**18,), generator=torch.Generator().manual_seed(1))
    return torch.cat([(upper[:, None] + lower).flatten(), random])


def check_halves(values: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """The upper halves are the rounded values, the lower ones what that took away in units of the last place."""
    assert high.dtype is torch.bfloat16 and low.dtype is torch.int16
    missing = values.isnan()
    rounded = values.to(torch.bfloat16)
    assert torch.equal(high.isnan(), missing) and not low[missing].any()
    assert torch.equal(high[~missing].view(torch.int16), rounded[~missing].view(torch.int16))
    upper = (rounded.view(torch.int16).to(torch.int64) % 2**16) << 16
    rest = (bits_of(values) - upper)[~missing]
    assert ((rest >= -32768) & (rest <= 32768)).all()
    assert torch.equal(low[~missing].to(torch.int64), rest.clamp(max=32767))


def check_joined(values: torch.Tensor, joined: torch.Tensor) -> None:
    """What comes back is what was kept, to the bit: but for ties that went down, which are one unit off."""
    missing = values.isnan()
    assert torch.equal(joined.isnan(), missing)
    bits = bits_of(values)
    # A tie has half a unit of bfloat16 below it; an even upper half stays as it is.
    down = (bits % 2**16 == 0x8000) & ((bits >> 16) % 2 == 0)
    assert torch.equal(bits_of(joined)[~missing], (bits - down.long())[~missing])


def kept_by_kernels(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The halves that a built step keeps of float32 numbers, and what the next one reads, on their device."""
    weight = torch.nn.Parameter(torch.zeros_like(values, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    optimizer = tilestep.Optimizer([weight], keep, master_weights="remainder")
    optimizer.step()  # state begins with the first step
    optimizer.state[weight]["wide"].copy_(values)
    optimizer.step()
    remainder = optimizer.state[weight]["remainder_param"]
    high, low = weight.detach().clone(), remainder.clone()
    reader = tilestep.Optimizer([weight], reveal, master_weights="remainder")
    reader.step()
    reader.state[weight]["remainder_param"].copy_(low)
    reader.step()
    assert torch.equal(weight.detach().view(torch.int16), high.view(torch.int16)), "reading has changed the parameter"
    assert torch.equal(reader.state[weight]["remainder_param"], low), "reading has changed the remainder"
    return high, low, reader.state[weight]["wide"]
