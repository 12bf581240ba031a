"""Training iterations of whole models: the same work is compared, and the figures follow from what was timed."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import e2e
import models
import pytest
import torch
from e2e import BASELINE, ITERATION, STEP, run_e2e
from models import Architecture, available, make_loss
from speedups import plot_speedups as plot
from torch import Tensor, nn

from bench import app
from tilestep.bench.results import Result
from tilestep.bench.sections import OURS, Peer, Settings

CPU = torch.device("cpu")
CONTENDERS = {BASELINE, "torch fused", OURS}


@dataclass(frozen=True)
class Own(Architecture):
    """A model that needs no library."""

    breaks: bool = False

    def build(self, device: torch.device, quick: bool = False) -> nn.Module:
        if self.breaks:
            raise RuntimeError("no such\n layer")
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)

    def inputs(self, model: nn.Module, device: torch.device, quick: bool = False, batch: int = 0) -> dict[str, Tensor]:
        count = batch or self.batch
        generator = torch.Generator(device).manual_seed(1)
        images = torch.randn(count, 6, generator=generator, device=device) * 30  # gradients that the clip does shorten
        return {"images": images, "labels": torch.arange(count, device=device) % 3}


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Own("broken", "torch", "", 4, 6, breaks=True)
    monkeypatch.setattr(models, "MODELS", [Own("one", "torch", "", 4, 6), broken, Own("two", "torch", "", 4, 6)])


@pytest.fixture
def settings() -> Settings:
    return Settings(CPU, quick=True, say=lambda line: None)


def test_figures_follow_from_what_was_timed(own_models: None, settings: Settings, tmp_path: Path) -> None:
    kept: list[int] = []
    result = run_e2e(settings, ["one", "TWO"], keep=lambda result: kept.append(len(result.groups)))
    assert [(group.tags["model"], group.tags["work"]) for group in result.groups] == [
        ("one", ITERATION), ("one", STEP), ("two", ITERATION), ("two", STEP),
    ]  # fmt: skip
    assert kept == [2, 4]
    for iteration, step in zip(result.groups[::2], result.groups[1::2], strict=True):
        assert {row.contender for row in iteration.rows} == {row.contender for row in step.rows} == CONTENDERS
        assert iteration.tags["elements"] == str(6 * 8 + 8 + 8 * 3 + 3) and iteration.tags["tensors"] == "4"
        base = iteration.row(BASELINE)
        for row in iteration.rows:
            alone = step.row(row.contender)
            assert base is not None and base.wall and row.wall and alone is not None and alone.wall
            assert row.speedup == pytest.approx(base.wall.median / row.wall.median)
            assert row.share == pytest.approx(alone.wall.median / row.wall.median)
            assert row.setup_seconds is not None and row.setup_seconds > 0
            assert alone.bytes_moved == 32 * 83  # gradients twice; parameters and both moments read and written
    ours = [group.row(OURS).speedup for group in result.groups[::2]]  # type: ignore[union-attr]
    assert result.summary[f"{OURS}, eager, all models"] == pytest.approx((ours[0] * ours[1]) ** 0.5)  # type: ignore[operator]
    assert Result.load(result.save(tmp_path)) == result
    plot(result, tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").stat().st_size > 1000


def test_every_contender_trains_alike() -> None:
    architecture = Own("one", "torch", "", 4, 6)
    start = architecture.build(CPU)
    inputs = architecture.inputs(start, CPU)
    trained = []
    for peer in e2e.COMPETING:
        if peer.compiled:
            continue
        model = copy.deepcopy(start)
        training = e2e._Training(peer, model, CPU)
        training.begin(make_loss(model, inputs))
        for _ in range(5):
            training.iterate()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert len(trained) == len(CONTENDERS)
    before = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    assert (trained[0] - before).abs().max() > 1e-4
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-5, atol=1e-6)


def test_a_model_that_cannot_be_built_costs_only_its_own_figures(own_models: None, settings: Settings) -> None:
    result = run_e2e(settings)
    assert [group.tags["model"] for group in result.groups[::2]] == ["one", "two"]
    assert result.notes == ["left out, broken, eager: RuntimeError: no such layer"]


def test_a_contender_that_fails_is_named(own_models: None, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [peer if peer.name != "torch fused" else type(peer)(peer.name, _no_optimizer) for peer in e2e.COMPETING]
    monkeypatch.setattr(e2e, "COMPETING", broken)
    iteration, step = run_e2e(settings, ["one"]).groups
    failed = iteration.row("torch fused")
    assert failed is not None and failed.failure == "RuntimeError: not here" and failed.speedup is None
    assert step.row("torch fused") is None and step.row(OURS) is not None


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """torch.compile without the code generation, which takes half a minute; and what was compiled."""
    compiled: list[object] = []
    compile_ = torch.compile

    def quick(function: object, **options: object) -> object:
        compiled.append(function)
        return compile_(function, backend="eager", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", quick)
    return compiled


def test_compiled_optimizers_and_models(own_models: None, quick_compiler: list[object], tmp_path: Path) -> None:
    said: list[str] = []
    settings = Settings(CPU, quick=True, compiled=True, say=said.append)
    result = run_e2e(settings, ["one"], ["eager", "compiled"])
    assert [(group.tags["mode"], group.tags["work"]) for group in result.groups] == [
        (mode, work) for mode in ("eager", "compiled") for work in (ITERATION, STEP)
    ]
    for group in result.groups:
        assert {row.contender for row in group.rows} == {*CONTENDERS, "torch compiled"}
        assert [row.failure for row in group.rows] == [None] * 4
    assert sum(isinstance(module, nn.Module) for module in quick_compiler) == 1
    assert len(quick_compiler) == 2  # the model, and the optimizer's step
    assert said.count("  torch compiled: compiling the step of 4 tensors") == 1 and "  compiling the model" in said
    means = {f"{name}, {mode}, all models" for name in ("torch fused", "torch compiled", OURS) for mode in e2e.MODES}
    assert means <= set(result.summary)
    plot(result, tmp_path / "e2e.png")


def test_both_modes_have_the_same_optimizers_but_for_those_that_failed(
    own_models: None, settings: Settings, quick_compiler: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    fails = {"torch fused"}

    def noted(peer: Peer) -> Peer:
        def build(parameters: Sequence[Tensor], **options: float) -> object:
            built.append(peer.name)
            optimizer = peer.build(parameters, **options)
            if peer.name in fails:
                fails.remove(peer.name)
                optimizer.step = _refuses
            return optimizer

        return Peer(peer.name, build, compiled=peer.compiled, clips=peer.clips)

    monkeypatch.setattr(e2e, "COMPETING", [noted(peer) for peer in e2e.COMPETING])
    eager, _, compiled, _ = run_e2e(settings, ["one"], ["eager", "compiled"]).groups
    assert sorted(built) == sorted([*CONTENDERS, "torch fused"])
    assert [row.failure for row in eager.rows] == [None, "RuntimeError: not today", None]
    assert [row.failure for row in compiled.rows] == [None] * 3
    for row in (eager.row(OURS), compiled.row(OURS), compiled.row("torch fused")):
        assert row is not None and row.setup_seconds is not None and row.setup_seconds > 0


def _refuses() -> None:
    raise RuntimeError("not today")


def test_the_compiled_optimizer_trains_like_the_others(quick_compiler: list[object]) -> None:
    architecture = Own("one", "torch", "", 4, 6)
    start = architecture.build(CPU)
    inputs = architecture.inputs(start, CPU)
    trained = []
    for peer in e2e.COMPETING:
        model = copy.deepcopy(start)
        training = e2e._Training(peer, model, CPU)
        training.begin(make_loss(model, inputs))
        for _ in range(4):
            training.iterate()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-5, atol=1e-6)
    assert len(quick_compiler) == 1


def test_a_model_that_does_not_compile_is_noted(
    own_models: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(function: object) -> object:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(torch, "compile", fails)
    result = run_e2e(settings, ["one"], ["compiled", "eager"])
    assert result.notes == ["left out, one, compiled: RuntimeError: no such backend"]
    assert {group.tags["mode"] for group in result.groups} == {"eager"}
    eager = run_e2e(Settings(CPU, quick=True, compiled=True, say=lambda line: None), ["one"]).groups[0]
    failed = eager.row("torch compiled")
    assert failed is not None and failed.failure == "RuntimeError: no such backend"
    assert eager.row(OURS) is not None and eager.row(OURS).failure is None  # type: ignore[union-attr]


def test_what_is_missing_is_added(own_models: None, settings: Settings, quick_compiler: list[object]) -> None:
    first = run_e2e(settings, ["one"])
    both = run_e2e(settings, ["one", "two"], known=first)
    assert both.groups[:2] == first.groups and [group.tags["model"] for group in both.groups[::2]] == ["one", "two"]
    assert both.notes == [
        f"groups kept: 2 from a run at commit {first.environment['commit']}, {first.environment['date']}"
    ]
    with_compiled = Settings(CPU, quick=True, compiled=True, say=lambda line: None)
    more = run_e2e(with_compiled, ["two"], known=both)
    assert [note[:14] for note in more.notes if "kept" in note] == ["groups kept: 2"] * 2
    assert more.groups[:2] == first.groups and len(more.groups) == 4
    assert more.groups[2].row("torch compiled") is not None
    shared = "the 1 models of torch compiled"
    assert {f"torch compiled, eager, {shared}", f"{OURS}, eager, {shared}"} < set(more.summary)
    assert more.summary[f"{OURS}, eager, {shared}"] == pytest.approx(more.groups[2].row(OURS).speedup)  # type: ignore[union-attr]
    first.environment["device"] = "an abacus"
    with pytest.raises(ValueError, match=r"figures of device an abacus cannot be added to"):
        run_e2e(settings, ["two"], known=first)


def test_no_model_is_begun_that_would_not_end_in_time(
    own_models: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(e2e.time, "monotonic", lambda: float(next(clock)))
    result = run_e2e(settings, ["one", "two"], seconds=100)
    assert [group.tags["model"] for group in result.groups[::2]] == ["one"]
    assert result.notes == ["left out, two, eager: it would not have ended within 100 s"]


def _no_optimizer(parameters: object) -> object:
    raise RuntimeError("not here")


def test_the_batch_can_be_chosen(own_models: None, settings: Settings) -> None:
    assert run_e2e(settings, ["one"], batch=7).groups[0].tags["batch"] == "7"
    assert run_e2e(settings, ["one"]).groups[0].tags["batch"] == "4"


@pytest.mark.parametrize(("names", "modes", "said"), [(["GPT-5"], ["eager"], "'GPT-5'"), ([], ["fast"], "'fast'")])
def test_what_there_is_not_is_an_error(settings: Settings, names: list[str], modes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_e2e(settings, names, modes)


def test_the_command_writes_result_and_picture(own_models: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["e2e", "--quick", "--device", "cpu", "--models", "two", "--out", str(tmp_path)])
    assert ended.value.code == 0
    stored = Result.load(tmp_path / "e2e.json")
    assert stored.environment["torch"] == torch.__version__ and len(stored.groups) == 2
    assert (tmp_path / "e2e.png").exists()
    printed = capsys.readouterr().out
    assert "two" in printed and "geometric mean, tilestep, eager, all models" in printed


def test_missing_libraries_are_noted(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find_spec(name))
    monkeypatch.setattr(models, "MODELS", [Own("one", "torch", "", 4, 6), Own("gone", "timm", "", 4, 6)])
    result = run_e2e(settings)
    assert [group.tags["model"] for group in result.groups] == ["one", "one"]
    assert result.notes == ["left out, timm is not installed: its models"]


@pytest.mark.parametrize("model", models.MODELS, ids=lambda model: model.name)
def test_every_architecture_trains(model: Architecture) -> None:
    pytest.importorskip(model.suite)
    built = model.build(CPU, quick=True)
    loss = make_loss(built, model.inputs(built, CPU, quick=True))
    loss().backward()
    assert [name for name, parameter in built.named_parameters() if parameter.grad is None] == []
    first = loss().item()
    assert first == first and first > 0


PUBLISHED = {  # millions of parameters, as the model cards and papers have them
    "BERT-base": 109.5, "RoBERTa-base": 124.7, "DistilBERT": 67.0, "ALBERT-base": 11.2, "ELECTRA-small": 13.5,
    "GPT-2": 124.4, "T5-base": 222.9, "SmolLM2-360M": 361.8, "TinyLlama-1.1B": 1100.0, "ViT-B/16": 86.6,
    "ConvNeXt-T": 28.6, "Swin-T": 28.3, "ResNet-50": 25.6, "EfficientNet-B0": 5.3, "MobileNetV3-L": 5.5,
    "MobileNetV2": 3.5,
}  # fmt: skip


@pytest.mark.parametrize("model", models.MODELS, ids=lambda model: model.name)
def test_sizes_are_the_published_ones(model: Architecture) -> None:
    pytest.importorskip(model.suite)
    built = model.build(torch.device("meta"))
    assert sum(parameter.numel() for parameter in built.parameters()) / 1e6 == pytest.approx(
        PUBLISHED[model.name], abs=0.06
    )


def test_names_are_found_in_any_case() -> None:
    chosen, missing = available(["bert-BASE"])
    assert [model.name for model in chosen] == ([] if missing else ["BERT-base"])
