"""A float32 kept as a bfloat16 and a 16-bit remainder: over all patterns of bits, in torch, in C++ and in Triton."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remainder_patterns import check_halves, check_joined, edge_patterns, floats, halves, joined, kept_by_kernels

import tilestep
from tilestep.kernels.spec import total_traffic
from tilestep.planning.describe import describe, generated_code, spec_for

ANY_BITS = st.integers(0, 2**32 - 1)
TIES = st.integers(0, 2**16 - 1).map(lambda upper: (upper << 16) + 0x8000)
DENORMALS = st.integers(0, 2**23 - 1).flatmap(lambda bits: st.sampled_from([bits, bits + 2**31]))
SPECIAL = st.sampled_from(
    [0, 2**31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF]
)


@given(st.lists(ANY_BITS | TIES | DENORMALS | SPECIAL, min_size=1, max_size=50))
@settings(max_examples=300, deadline=None)
def test_any_bits_come_back(bits: list[int]) -> None:
    values = floats(torch.tensor(bits, dtype=torch.int64))
    high, low = halves(values)
    check_halves(values, high, low)
    check_joined(values, joined(high, low))


def test_halves_of_any_shape_keep_it() -> None:
    for values in (torch.tensor(1 / 3), torch.rand(3, 4).t(), torch.empty(0, 2)):
        high, low = halves(values)
        assert high.shape == low.shape == values.shape
        check_joined(values.contiguous(), joined(high, low).contiguous())


def test_kernels_keep_every_pattern_as_torch_does() -> None:
    values = floats(edge_patterns())
    high, low, wide = kept_by_kernels(values)
    check_halves(values, high, low)
    check_joined(values, wide)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_generated_code_reads_and_writes_both_halves(backend: str) -> None:
    spec = spec_for(tilestep.registry["AdamW"], dtype=torch.bfloat16, master_weights="remainder")
    source = generated_code(spec, backend)
    assert "param bfloat16 with int16 remainder" in source
    assert re.search(r"= join_remainder\(.*param_array.*remainder_param_array", source)
    assert re.search(r"split_remainder\(.*param", source)
    assert "master" not in source


def test_traffic_is_four_bytes_less_than_with_a_master() -> None:
    rule = tilestep.registry["AdamW"]
    read, written = total_traffic(spec_for(rule, dtype=torch.bfloat16, master_weights="remainder"))
    # Gradient, parameter, remainder and two moments; all but the gradient are written.
    assert (read, written) == (2 + 2 + 2 + 8, 2 + 2 + 8)
    # A float32 master is compared with the parameter, which is read for it.
    assert sum(total_traffic(spec_for(rule, dtype=torch.bfloat16, master_weights=True))) == read + written + 4


def test_triton_does_not_divide_quickly_for_remainders() -> None:
    """All arrays of a rule without state have 16 bits then; the value they keep has 32."""

    @tilestep.rule
    def halved(param: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (param - grad / (grad.abs() + 1),)

    quick = generated_code(spec_for(halved, dtype=torch.bfloat16), "triton")
    exact = generated_code(spec_for(halved, dtype=torch.bfloat16, master_weights="remainder"), "triton")
    # The decision divides in float64.
    quick, exact = (text[text.index("halved_math") :] for text in (quick, exact))
    assert "divide(" not in quick and "divide(" in exact


def test_a_description_says_the_remainder() -> None:
    described = describe(tilestep.registry["AdamW"], dtype=torch.bfloat16, master_weights="remainder")
    assert described.states["remainder_param"] == "int16, like the parameter"
    assert described.states["exp_avg"] == "float32, like the parameter"
    assert (described.bytes_read, described.bytes_written) == (14, 12)
    with pytest.raises(
        ValueError, match="a parameter is float16, and master_weights='remainder' supports only bfloat16"
    ):
        describe(tilestep.registry["AdamW"], dtype=torch.float16, master_weights="remainder")
