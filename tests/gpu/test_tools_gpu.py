"""`tilestep check` and `tilestep tune` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from case_processes import side_by_side

import tilestep
from tilestep.backends import tuning
from tilestep.backends.tuning import CANDIDATES, STAGED, TileShape, device_key, forced_shape
from tilestep.bench.measure import timed
from tilestep.bench.tune import jobs, tune
from tilestep.checking import check_rule
from tilestep.kernels import cache


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(tmp_path))
    cache.forget_directory()
    tuning.known_table.cache_clear()
    yield
    cache.forget_directory()
    tuning.known_table.cache_clear()


NAMES = sorted(tilestep.registry)


def failures(name: str) -> list[str]:
    torch.set_num_threads(1)
    verdicts = check_rule(tilestep.registry[name])
    return [f"{verdict.item}: {verdict.text}" for verdict in verdicts if verdict.passed is False]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Callable[..., list[str]]]:
    with side_by_side(failures, [(name,) for name in NAMES]) as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_passes_every_check(name: str, outcome: Callable[..., list[str]]) -> None:
    assert outcome(name) == []


@pytest.mark.parametrize(
    ("dtype", "options", "shapes"),
    [
        (torch.float32, {}, CANDIDATES["cuda"]),
        (torch.bfloat16, {}, CANDIDATES["cuda"]),
        (torch.bfloat16, {"state_dtype": "int8", "master_weights": "int8"}, STAGED["cuda"]),
        (torch.bfloat16, {"state_dtype": "int8", "master_weights": True}, (TileShape(512, 2, 8), *STAGED["cuda"])),
    ],
)
def test_every_tile_shape_gives_the_same_bits(
    dtype: torch.dtype, options: dict[str, Any], shapes: Sequence[TileShape]
) -> None:
    results = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator).to("cuda", dtype)) for n in (70_001, 5, 8192)]
        optimizer = tilestep.AdamW(params, lr=0.1, **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to("cuda", dtype)
            with forced_shape(shape):
                optimizer.step()
        assert {passes.shape for passes in optimizer._current_plan().engines[0].passes} == {shape}
        results.append([param.detach().clone() for param in params])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_tuning_keeps_the_fastest_shape(own_tables: None) -> None:
    device = torch.device("cuda")
    (job, *_) = jobs([tilestep.registry["SGD"]], device)
    (outcome,) = tune([job], device, rounds=1, elements=1 << 22)
    assert outcome.milliseconds.keys() >= set(CANDIDATES["cuda"])
    assert all(taken > 0 for taken in outcome.milliseconds.values())
    assert tuning.known_table(device_key(device), "cuda")[job.signature] == outcome.after
    optimizer = tilestep.SGD([torch.nn.Parameter(torch.ones(5, device=device))])
    (passes,) = optimizer._current_plan().engines[0].passes
    assert TileShape(passes.shape.tile, passes.shape.warps, passes.shape.tiles) == outcome.after


def test_times_include_work_of_side_streams() -> None:
    side = torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)

    timed(work, torch.device("cuda"))
    assert side.query()
