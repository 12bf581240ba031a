"""Loops with vectors as wide as the machine has them: only where no sum depends on it, and to the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tilestep
from tilestep.backends.cpp import run
from tilestep.backends.cpp.compile import load_library, wide_vectors
from tilestep.norm import cpu_backend
from tilestep.norm.tiles import cut

LANES = 16
WITHOUT_SUMS = ["SGD", "AdamW", "Lion", "Rprop", "SophiaG"]
WITH_SUMS = ["LAMB", "Adafactor"]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "_libraries", {})
    yield


def trained(rule: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for length in (3, 3 * LANES, 1024 + LANES + 5):
        parameter, gradient = (torch.randn(length, generator=generator).to(dtype) for _ in range(2))
        parameters.append(parameter.requires_grad_())
        parameter.grad = gradient
    optimizer = tilestep.Optimizer(parameters, rule)
    for _ in range(3):
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


KINDS = [
    *((rule, torch.float32) for rule in WITHOUT_SUMS),
    *((rule, dtype) for rule in ("AdamW", "Rprop") for dtype in (torch.bfloat16, torch.float64)),
]


@pytest.mark.parametrize(("rule", "dtype"), KINDS, ids=str)
def test_bits_are_the_same(rule: str, dtype: torch.dtype, libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not wide_vectors():
        pytest.skip("this machine's vectors are as wide as compilers use them")
    wide = trained(rule, dtype)
    run._libraries.clear()
    monkeypatch.setattr(run, "wide_vectors", tuple)
    for left, right in zip(wide, trained(rule, dtype), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", WITHOUT_SUMS)
def test_an_element_s_place_changes_nothing(rule: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(500, generator=generator).to(dtype) for _ in range(2))
    lengths = [1, 2, 3, 5, 7, 11, 13, 15, 17, 31, 395]

    def stepped(cut: list[int]) -> torch.Tensor:
        parameters = [part.clone().requires_grad_() for part in whole.split(cut)]
        for parameter, part in zip(parameters, gradient.split(cut), strict=True):
            parameter.grad = part.clone()
        optimizer = tilestep.Optimizer(parameters, rule)
        for _ in range(3):
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    assert torch.equal(stepped([500]), stepped(lengths))


@pytest.mark.parametrize("rule", WITHOUT_SUMS + WITH_SUMS)
def test_programs_with_sums_keep_their_lanes(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "wide_vectors", lambda: ("-DWIDE",))
    optimizer = tilestep.Optimizer([torch.zeros(8, 8, requires_grad=True)], rule)
    optimizer.fitting_plan(ahead=True)
    assert optimizer.plan is not None
    (passes,) = optimizer.plan.engines[0].passes
    segment = passes.segment
    assert run._flags(segment.spec) == (() if rule in WITH_SUMS else ("-DWIDE",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_have_lanes_of_their_own(norm_type: float, dtype: torch.dtype) -> None:
    # But for powers: the C library's of vectors differ in last places with their width.
    tensors = [torch.randn(length, dtype=torch.float64).to(dtype) for length in (3, 20_000, 1024 + LANES + 5)]
    tiles = cut([len(tensor) for tensor in tensors], [dtype] * len(tensors), cpu_backend.TILE)
    addresses, norms = torch.tensor([tensor.data_ptr() for tensor in tensors]), []
    for flags in ((), wide_vectors()):
        norms.append(torch.zeros(1, dtype=torch.float64))
        library = cpu_backend.with_signatures(load_library("norm", cpu_backend.SOURCE, flags))
        cpu_backend.CpuNorm(library, *tiles).launch(addresses, norms[-1], norm_type, True)
    assert torch.equal(*norms)
