"""`tilestep.profile` and `tilestep trace` on real trainings on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestep
from tilestep import cli
from tilestep.bench.demo import _one_ahead
from tilestep.tracing.lanes import length, overlap, union

PNG = b"\x89PNG"


def training(optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], None]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    made = optimizer(list(model.parameters()))

    def iterate() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        made.step()
        made.zero_grad()

    iterate()
    return iterate


@pytest.mark.parametrize("name", ["tilestep", "torch"])
def test_a_training_on_the_cpu(name: str, tmp_path: Path) -> None:
    iterate = training(torch.optim.AdamW if name == "torch" else tilestep.AdamW)  # type: ignore[attr-defined]
    with tilestep.profile(tmp_path / "deep") as traced:
        for _ in range(3):
            iterate()
    report = traced.report
    assert len(report.iterations) == 3 and not report.on_gpu
    for iteration in report.iterations:
        lanes = iteration.lanes
        for name in ("forward", "backward", "update", "host"):
            spans = getattr(lanes, name)
            assert spans and iteration.start <= spans[0][0] and spans[-1][1] <= iteration.stop
        # One thread works at a time, so nothing hides the step.
        assert overlap(lanes.update, union(lanes.forward, lanes.backward, lanes.host)) == []
        assert lanes.exposed == lanes.update
        busy = sum(length(spans) for spans in (lanes.forward, lanes.backward, lanes.update, lanes.host))
        assert busy == pytest.approx(iteration.stop - iteration.start)
        order = [lanes.forward[0][0], lanes.backward[0][0], lanes.update[-1][1]]
        assert order == sorted(order)
    assert report.files == (tmp_path / "deep" / "trace.json", tmp_path / "deep" / "trace.png")
    assert report.files[1].read_bytes().startswith(PNG)
    events = json.loads(report.files[0].read_text())["traceEvents"]
    own = [event for event in events if event.get("pid") == "tilestep lanes" and event["ph"] == "X"]
    drawn = sum(event["dur"] for event in own if event["name"] == "only the optimizer")
    assert drawn == pytest.approx(1e3 * sum(one.exposed_milliseconds for one in report.iterations))
    assert any(event.get("cat") == "cpu_op" for event in events)  # the profiler's own are there as well


def test_our_update_has_its_range_and_costs_nothing_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = training(tilestep.AdamW)  # type: ignore[attr-defined]
    with torch.profiler.profile() as profiler:
        iterate()
    assert "tilestep::host_update" in {event.key for event in profiler.key_averages()}
    monkeypatch.setattr("tilestep.compat.record_function", lambda name: pytest.fail("recorded"))
    iterate()


def test_clipping_outside_the_step_is_the_optimizer_s() -> None:
    weight = torch.nn.Parameter(torch.randn(100_000))
    weight.grad = torch.ones_like(weight)
    with tilestep.profile(None) as traced:
        tilestep.clip_grad_norm_([weight], 1.0)
        weight.square().sum().backward()
        traced.iteration()
    lanes = traced.report.shown.lanes
    assert len(lanes.update) == 1 and lanes.update[0][1] <= lanes.backward[0][0]


def test_iterations_the_user_marks() -> None:
    with tilestep.profile(None) as traced:
        for _ in range(4):
            torch.randn(10).exp()
            traced.iteration()
    assert len(traced.report.iterations) == 4
    assert traced.report.exposed_milliseconds == 0


def test_a_report_before_its_time_and_a_failing_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tilestep.profile(tmp_path) as traced:
        with pytest.raises(RuntimeError, match="after the block has ended"):
            _ = traced.report
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    with tilestep.profile(tmp_path, picture=False) as again:  # the profiler was stopped
        torch.randn(3).exp()
    assert [path.name for path in again.report.files] == ["trace.json"]


def test_without_matplotlib_the_block_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install matplotlib"), tilestep.profile(tmp_path):
        pytest.fail("it began")
    with tilestep.profile(None):
        torch.randn(3).exp()


def test_the_host_is_at_most_one_iteration_ahead_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    awaited: list[int] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(recorded)
            recorded.append(self.number)

        def synchronize(self) -> None:
            awaited.append(self.number)

    class Stream:
        def record_event(self) -> Event:
            return Event()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    keep_near = _one_ahead(torch.device("cuda"))
    for iteration in range(6):
        keep_near()
        # What is recorded before an iteration is the end of the one before it.
        assert recorded[-1] == iteration and awaited == list(range(1, iteration))
    _one_ahead(torch.device("cpu"))()
    assert len(recorded) == 6


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_the_command_does_not_leave_out_an_overlap(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "--device", "cpu", "--optimizer", "torch", "--during", "backward", "--out", tmp_path) == 2
    assert "--during" in capfd.readouterr().err


@pytest.mark.parametrize("optimizer", ["Lion", "lion", "torch"])
def test_the_command_traces_the_demo_s_model(optimizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", 1, "--width", 16, "--context", 16, "--batch", 2, "--iterations", 2]
    assert run("trace", "--device", "cpu", "--optimizer", optimizer, *small, "--out", tmp_path) == 0
    out, _ = capfd.readouterr()
    for shown in ("forward", "backward", "update", "exposed optimizer time"):
        assert shown in out
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("during", ["backward", "forward"])
def test_updates_beside_other_work_have_their_lane(during: Any) -> None:
    """On the CPU nothing runs beside anything: what was updated in backward or forward is not counted as theirs."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = tilestep.overlap(tilestep.AdamW(model.parameters()), model, during, bucket_cap_mb=0.01)

    def iterate() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        iterate()
    with tilestep.profile(None) as traced:
        for _ in range(3):
            iterate()
    for iteration in traced.report.iterations:
        lanes = iteration.lanes
        assert overlap(lanes.update, union(lanes.forward, lanes.backward)) == []
        first, last = (
            (lanes.backward[0][0], lanes.backward[-1][1]) if during == "backward" else (0.0, lanes.backward[0][0])
        )
        inside = [span for span in lanes.update if first < span[0] and span[1] < last]
        assert len(inside) >= 2


SCRIPT = """
import sys
import torch, tilestep
import beside
weight = torch.nn.Parameter(torch.randn(100))
optimizer = tilestep.SGD([weight], lr=0.1)
with tilestep.profile("elsewhere"):
    for _ in range(int(sys.argv[2])):
        weight.square().sum().backward()
        optimizer.step()
assert __name__ == "__main__" and sys.argv[1] == "--out"
"""


def test_the_command_runs_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    assert run("trace", "--out", tmp_path / "out", script, "--out", 3) == 0
    assert "exposed optimizer time" in capfd.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"trace.json", "trace.png"}


def test_a_script_that_traces_nothing_and_one_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import tilestep\n")
    assert run("trace", "--out", tmp_path, script) == 1
    assert "tilestep.profile" in capfd.readouterr().err
    assert run("trace", "--out", tmp_path, tmp_path / "none.py") == 2
    capfd.readouterr()
    assert run("trace", "--optimizer", "lyon", "--out", tmp_path) == 2
    assert "Invalid value for --optimizer: no rule is called 'lyon'; did you mean Lion?" in capfd.readouterr().err


def test_the_document_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tracing.md"
    (block,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert len(names["traced"].report.iterations) == 5
    assert (tmp_path / "trace" / "trace.png").exists()
