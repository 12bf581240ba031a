"""Without a compiler and without a cached build: every rule still steps, as eager PyTorch, and says so once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from float64_reference import check_steps
from matrix_states import STATES, check_states
from remainder_patterns import check_halves, check_joined, edge_patterns, floats, kept_by_kernels
from rule_cases import NAMES

import tilestep
from tilestep.backends.cpp import compile
from tilestep.backends.cpp import run as cpu
from tilestep.errors import BuildError
from tilestep.kernels import cache
from tilestep.native import build as native_build
from tilestep.norm import cpu_backend
from tilestep.rules import registry


@pytest.fixture(autouse=True)
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        cache.forget_directory()
        compile.compiler.cache_clear()
        compile.compiler_version.cache_clear()
        compile._warned.clear()
        # What is first asked for without a compiler would stay without it for the tests that follow: norms, the look.
        cpu_backend._loaded.cache_clear()
        native_build._file_name.cache_clear()
        native_build._loaded.cache_clear()

    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(cpu, "_libraries", {})
    forget()
    yield
    monkeypatch.undo()
    forget()


def eager_segments(optimizer: tilestep.Optimizer) -> bool:
    return all(
        type(passes).__name__ == "EagerPasses"
        for engine in optimizer._current_plan().engines
        for passes in engine.passes
    )


@pytest.mark.filterwarnings("ignore:tilestep found no")
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_steps_eagerly_as_it_does_in_float64(name: str) -> None:
    run = check_steps(registry[name], torch.bfloat16, True)
    assert eager_segments(run.optimizer)


@pytest.mark.filterwarnings("ignore:tilestep found no")
def test_remainders_are_kept_eagerly() -> None:
    for name in ("AdamW", "LAMB", "Adafactor"):
        run = check_steps(registry[name], torch.bfloat16, "remainder")
        assert eager_segments(run.optimizer)
    values = floats(edge_patterns())
    high, low, wide = kept_by_kernels(values)
    check_halves(values, high, low)
    check_joined(values, wide)


@pytest.mark.filterwarnings("ignore:tilestep found no")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_rule_steps_eagerly_in_every_dtype(dtype: torch.dtype) -> None:
    check_steps(registry["AdamW"], dtype, False, amsgrad=True)


def test_one_warning_says_that_nothing_can_be_built(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rule in ("AdamW", "Lion"):
            weight = torch.nn.Parameter(torch.ones(3))
            optimizer = tilestep.Optimizer([weight], rule, max_grad_norm=1.0)
            weight.grad = torch.ones(3)
            optimizer.step()
            optimizer.step()
    assert len(caught) == 1
    assert f"CXX={tmp_path / 'nowhere'} is not there" in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:tilestep found no")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_gradients_with_gaps_whose_kernels_cannot_be_built(steps_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may be from the cache of a machine that has a compiler."""
    monkeypatch.delenv("CXX")
    compile.compiler.cache_clear()
    if compile.compiler() is None:
        pytest.skip("no C++ compiler")

    def steps(weight: torch.nn.Parameter, gradients: list[torch.Tensor]) -> tilestep.Optimizer:
        optimizer = tilestep.AdamW([weight], lr=0.1)
        for number, gradient in enumerate(gradients):
            if number == steps_before:
                monkeypatch.setenv("CXX", "/nowhere")
                compile.compiler.cache_clear()
            weight.grad = gradient
            optimizer.step()
        return optimizer

    torch.manual_seed(0)
    start, gradients = torch.randn(4, 5), [torch.randn(4, 5) for _ in range(4)]
    weight, twin = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = steps(weight, gradients[:steps_before] + [g.t().contiguous().t() for g in gradients[steps_before:]])
    assert eager_segments(optimizer) and optimizer.state[weight]["step"] == 4
    assert not eager_segments(steps(twin, gradients))
    torch.testing.assert_close(weight, twin)


@pytest.mark.filterwarnings("ignore:tilestep found no")
def test_buffers_may_change_places() -> None:
    @tilestep.rule
    def swap(param: Any, grad: Any, other: Any) -> tuple[Any, ...]:
        return other, param

    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = tilestep.Optimizer([weight], swap)
    assert eager_segments(optimizer)
    for param, other in (([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])):
        weight.grad = torch.zeros(2)
        optimizer.step()
        assert weight.tolist() == param and optimizer.state[weight]["other"].tolist() == other


@pytest.mark.filterwarnings("ignore:tilestep found no")
@pytest.mark.parametrize("name", STATES)
def test_matrices_and_numbers_may_change_places(name: str) -> None:
    assert eager_segments(check_states(STATES[name]))


@pytest.mark.filterwarnings("ignore:tilestep found no")
def test_clip_and_skip_work_eagerly() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = tilestep.Optimizer([weight], "SGD", lr=1.0, max_grad_norm=1.0, skip_nonfinite=True)
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    weight.grad = torch.tensor([torch.inf, 1.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.filterwarnings("ignore:tilestep found no")
def test_a_rule_over_all_tensors_is_refused_when_it_is_built() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.Optimizer([weight], "Prodigy")
    for _ in range(2):
        weight.grad = torch.ones(3)
        with pytest.raises(BuildError, match="Prodigy reduces over all tensors"):
            optimizer.step()
        assert torch.equal(weight, torch.ones(3)) and not optimizer.state
