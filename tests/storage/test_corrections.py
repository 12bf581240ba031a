"""The 8-bit correction of a bfloat16, for all mantissas of an exponent."""

from __future__ import annotations

import pytest
import torch

from tilestep.storage import MASTER_FORMATS, stored_in, values_of


@pytest.mark.parametrize(("exponent", "sign"), [(127, 0), (2, 1)])
def test_every_mantissa_comes_back_within_128_units(exponent: int, sign: int) -> None:
    bits = torch.arange(2**23, dtype=torch.int64) + (exponent << 23) - sign * 2**31
    values = bits.to(torch.int32).view(torch.float32)
    storage = MASTER_FORMATS["int8"](torch.bfloat16)
    arrays = {
        "param": torch.empty(len(values), dtype=torch.bfloat16),
        "correction_param": torch.empty(len(values), dtype=torch.int8),
    }
    stored_in(storage, arrays, "param", values)
    assert torch.equal(arrays["param"], values.to(torch.bfloat16))
    back = values_of(storage, arrays, "param")
    off = (back.view(torch.int32).to(torch.int64) - values.view(torch.int32).to(torch.int64)).abs()
    # Half of a 256th of a bfloat16's last place; ties of the bfloat16 are twice as far, since 128 is no int8.
    assert int(off.max()) <= 256 and int((off > 128).sum()) <= 2**23 // 256 + 2
    assert off.double().mean() < 65
    exact = (bits & 0xFF) == 0
    ties = (bits & 0xFFFF) == 0x8000
    assert torch.equal(back[exact & ~ties], values[exact & ~ties])
    # What was kept once is kept as it is.
    again = {name: torch.empty_like(array) for name, array in arrays.items()}
    stored_in(storage, again, "param", back)
    assert all(torch.equal(again[name], arrays[name]) for name in arrays)
