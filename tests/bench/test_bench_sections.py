"""The benchmark as a whole, on tiny workloads: every section, the files it writes, and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from first_step import run_compile

from bench import app
from tilestep import cli
from tilestep.bench import measure, sections
from tilestep.bench.results import Group, Result, Row, plot
from tilestep.bench.sections import Settings, adamw_bytes, gpu_workloads, make_parameters, run_cpu, run_norm, run_step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick() -> Settings:
    return Settings(CPU, quick=True, say=lambda line: None)


def failures(result: Result) -> list[str]:
    return [
        f"{group.title}: {row.contender}: {row.failure}" for group in result.groups for row in group.rows if row.failure
    ]


def expected_contenders() -> set[str]:
    return {"torch default", "torch fused", sections.OURS}


def test_step_measures_every_peer_on_every_workload(quick: Settings) -> None:
    result = run_step(quick)
    assert failures(result) == []
    compared = [group for group in result.groups if group.row("torch fused") is not None]
    kinds = [(group.title.split(",")[0], "float32 tensors" in group.title) for group in compared]
    assert kinds.count(("clip + AdamW", False)) == 3 and kinds.count(("AdamW", False)) == 1  # the latter for one list
    assert kinds.count(("clip + AdamW", True)) == kinds.count(("AdamW", True)) == 1
    alone = [group for group in result.groups if "float32 master weights" in group.title]
    assert len(alone) == 4 and len(result.groups) == len(compared) + len(alone)
    for group in compared:
        assert {row.contender for row in group.rows} >= expected_contenders() | {measure.COPY}
        assert group.limit_name == measure.COPY
        for row in group.rows:
            assert row.of_limit == pytest.approx((row.bandwidth or 0) / (group.limit or 1))


def test_norm_and_clip_agree_on_what_they_moved(quick: Settings) -> None:
    result = run_norm(quick)
    assert failures(result) == []
    assert len(result.groups) == 6
    for norm, clip in zip(result.groups[::2], result.groups[1::2], strict=True):
        norm_row, clip_row = norm.row("torch"), clip.row("torch")
        assert norm_row is not None and clip_row is not None
        assert clip_row.bytes_moved == 3 * norm_row.bytes_moved
        assert norm.limit_name.startswith(measure.READ)


def test_cpu_is_held_against_a_plain_loop(quick: Settings) -> None:
    result = run_cpu(quick)
    assert failures(result) == []
    for group in result.groups:
        fused, limit = group.row("torch fused"), group.row(group.limit_name)
        assert fused is not None and limit is not None
        if group.limit_name == measure.PLAIN_LOOP:
            assert fused.bytes_moved == limit.bytes_moved
    assert "core" in result.environment["device"]


def test_the_loop_over_tensors_updates_each() -> None:
    loop = measure.loop_over_tensors([5, 0, 100_003], torch.float32)
    if loop is None:
        pytest.skip("needs a C++ compiler")
    (held,) = loop.call.__defaults__  # type: ignore[attr-defined]
    (param, grad, *moments), _ = held
    for _ in range(2):
        loop.call()
    assert all(bool((array == 3).all()) for arrays in (param, *moments) for array in arrays)
    assert all(bool((array == 1).all()) for array in grad)


def test_the_plain_loop_updates_what_adamw_would() -> None:
    loop = measure.plain_loop(100_003, torch.bfloat16)
    if loop is None:
        pytest.skip("no C++ compiler")
    (held,) = loop.call.__defaults__  # type: ignore[attr-defined]
    loop.call()
    loop.call()
    parameter, gradient, first, second = (torch.cat(arrays) for arrays in held[0])
    assert bool((gradient == 1).all()) and len(gradient) == 100_003
    assert all(bool((array == 3).all()) for array in (parameter, first, second))


def test_the_language_model_has_the_shapes_it_is_named_for() -> None:
    llama = gpu_workloads()[1]
    assert len(llama.shapes) == 219
    assert 1.19e9 < llama.elements < 1.21e9


def test_workloads_are_the_same_every_time() -> None:
    assert gpu_workloads() == gpu_workloads()
    one, two = (make_parameters(gpu_workloads(quick=True)[0], CPU) for _ in range(2))
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in zip(one, two, strict=True))  # type: ignore[arg-type]


def test_traffic_of_the_step_is_sixteen_bytes_an_element_with_a_clip() -> None:
    parameters = make_parameters(gpu_workloads(quick=True)[0], CPU)
    elements = sum(parameter.numel() for parameter in parameters)
    assert adamw_bytes(parameters, clip=True) == 16 * elements


def test_results_survive_the_file(tmp_path: Path, quick: Settings) -> None:
    rows = [Row("broken", failure="RuntimeError: no"), Row("fine", launches=2)]
    result = Result("step", {"device": "a GPU"}, [Group("clip + AdamW", rows, 4.2e12, "copy")], ["a note"])
    assert Result.load(result.save(tmp_path)) == result


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"format": 0, "section": "step"}))
    with pytest.raises(ValueError, match="not a benchmark result"):
        Result.load(path)


def test_a_group_in_which_everything_failed_can_be_drawn(tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11.0", "date": "today"}
    plot(Result("step", environment, [Group("clip + AdamW", [Row("broken", failure="no")])]), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_figures_and_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app(["compile", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert not stopped.value.code, capfd.readouterr().err
    result = Result.load(tmp_path / "compile.json")
    assert failures(result) == []
    assert result.environment.keys() >= {"device", "torch", "tilestep", "commit", "date"}
    names = {row.contender for group in result.groups for row in group.rows}
    assert names >= {
        f"{name}, {caches} caches" for name in ("torch fused", "tilestep") for caches in ("empty", "filled")
    }
    assert (tmp_path / "compile.png").read_bytes().startswith(b"\x89PNG")
    assert "first step" in capfd.readouterr().out


def test_the_first_step_of_rules_by_name(quick: Settings) -> None:
    (group,) = run_compile(quick, ["Muon"]).groups
    assert group.title == "first step, 10 parameters of 8 x 8"
    assert [row.contender for row in group.rows] == ["rule Muon, empty caches", "rule Muon, filled caches"]
    assert all(row.wall is not None and row.failure is None for row in group.rows)
    with pytest.raises(ValueError, match="no rule is called 'Moun'"):
        run_compile(quick, ["Moun"])


def test_a_device_that_is_not_here_is_bad_usage(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "step", "--device", "meta"])
    assert stopped.value.code == 2
    assert "meta" in capfd.readouterr().err
