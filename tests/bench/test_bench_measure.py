"""The measuring core: turns, preparation, failures and counts. No assertion looks at how long anything took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from overview import ROWS

from tilestep.bench.measure import Contender, Row, Spread, measure, spread, trace

CPU = torch.device("cpu")


def test_contenders_take_turns_in_changing_order() -> None:
    order: list[str] = []
    contenders = [Contender(name, lambda name=name: order.append(name)) for name in "abc"]  # type: ignore[misc]
    measure(contenders, CPU, rounds=3, warmup=1, traced=False)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_preparation_comes_before_every_call() -> None:
    seen: list[str] = []
    contender = Contender("it", lambda: seen.append("call"), prepare=lambda: seen.append("prepare"))
    measure([contender], CPU, rounds=2, warmup=1)
    assert seen == ["prepare", "call"] * 4  # warm-up, two rounds, the trace


def test_calls_back_to_back_make_one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += 2.0

    monkeypatch.setattr("tilestep.bench.measure.time.perf_counter", lambda: clock)
    (timing,) = measure([Contender("it", call, repeat=5)], CPU, rounds=3, warmup=1, traced=False)
    assert clock == (1 + 3) * 5 * 2.0
    assert timing.wall == spread([2000.0] * 3)


def test_a_failing_contender_is_reported_and_the_others_are_measured() -> None:
    calls = 0

    def fails_later() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of\n  something")

    failed, fine = measure([Contender("fails", fails_later), Contender("fine", lambda: None)], CPU, rounds=4, warmup=1)
    assert failed.failure == "RuntimeError: out of something"
    assert failed.wall is None and failed.calls is None and failed.peak_bytes is None and calls == 3
    assert fine.failure is None and fine.wall is not None and fine.wall.count == 4


def test_a_failing_preparation_fails_its_contender() -> None:
    def prepare() -> None:
        raise ValueError("no gradient")

    (timing,) = measure([Contender("it", lambda: None, prepare=prepare)], CPU, rounds=1)
    assert timing.failure == "ValueError: no gradient"


def test_bandwidth_is_bytes_over_device_time_where_there_is_one() -> None:
    wall, device = spread([4.0, 4.0, 4.0]), spread([2.0, 2.0, 2.0])
    assert Row("cpu", wall=wall, bytes_moved=8_000_000).note_bandwidth().bandwidth == pytest.approx(2e9)
    gpu = Row("gpu", wall=wall, device=device, bytes_moved=8_000_000).note_bandwidth(limit=8e9)
    assert gpu.bandwidth == pytest.approx(4e9) and gpu.of_limit == pytest.approx(0.5)
    assert Row("unknown", wall=wall).note_bandwidth(limit=8e9).bandwidth is None
    assert Row("failed", bytes_moved=8, failure="no").note_bandwidth().bandwidth is None


def test_spread_of_one_value() -> None:
    assert spread([2.5]) == Spread(2.5, 2.5, 2.5, 1)


def test_trace_counts_outermost_calls_and_the_highest_point_of_memory() -> None:
    values = torch.ones(1000)

    def call() -> None:
        first = values * values  # 4,000 bytes
        second = first + first  # 8,000 held
        del first
        third = second - second  # 8,000 again
        del second, third
        torch.nn.functional.layer_norm(values, (1000,))  # an operator that calls others, none of which counts

    traced = trace(call, CPU)
    assert traced.calls == 4
    assert 8_000 <= traced.peak_bytes < 12_000
    assert traced.launches == 0


def test_the_overview_finds_its_results() -> None:
    times = {name: make() for name, make in ROWS.items()}
    assert all(theirs > 0 and ours > 0 for row in times.values() for theirs, ours in row.values())
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    for theirs, ours in (times["iteration, sharded (DDP)"]["4 H200s"], times["Muon and AdamW, 1.19 B"]["H200"]):
        assert f"{theirs:.0f}" in page and f"{ours:.0f} ms" in page
