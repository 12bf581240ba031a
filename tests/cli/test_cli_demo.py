"""The demo: both runs see the same thing, and the command writes what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilestep import cli
from tilestep.bench.demo import (
    TURN,
    Entry,
    Recipe,
    Size,
    comparison,
    documentation,
    entries,
    largest_difference,
    picture,
    train,
)

SMALL = Recipe(torch.device("cpu"), steps=8, batch=2, size=Size(layers=1, width=16, heads=2, context=16))


def plain(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def test_both_optimizers_train_alike() -> None:
    torch_run, our_run = train(entries(SMALL), SMALL)
    assert len(torch_run.losses) == len(our_run.losses) == SMALL.steps
    assert our_run.losses[0] == torch_run.losses[0]
    assert largest_difference([torch_run, our_run]) < 1e-4
    assert our_run.losses[-1] < our_run.losses[0] - 0.1
    assert abs(our_run.validation - torch_run.validation) < 1e-4


def test_a_run_is_repeatable_and_its_seed_counts() -> None:
    entry = entries(SMALL)[1]
    first, again = train([entry, entry], SMALL)
    assert first.losses == again.losses and first.validation == again.validation
    (other,) = train([entry], Recipe(SMALL.device, steps=2, batch=2, seed=1, size=SMALL.size))
    assert other.losses[0] != first.losses[0]


def test_counting_launches_comes_after_the_figures_of_the_training() -> None:
    seen: list[int] = []

    def build(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        optimizer = plain(model, recipe)
        optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))
        return optimizer

    (run,) = train([Entry("counted", build)], SMALL)
    assert len(seen) == SMALL.steps + 1
    assert len(run.wall) == len(run.host) == SMALL.steps
    assert all(0 < host <= wall for host, wall in zip(run.host, run.wall, strict=True))


def test_trainings_take_turns() -> None:
    seen: list[tuple[int, int]] = []
    recipe = Recipe(SMALL.device, steps=TURN + 3, batch=1, size=SMALL.size)
    runs = train(
        [Entry("one", plain), Entry("two", plain)], recipe, lambda index, done, loss: seen.append((index, done))
    )
    assert seen == [(0, TURN), (1, TURN), (0, TURN + 3), (1, TURN + 3)]
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == recipe.steps


def test_the_text_is_python_s_documentation() -> None:
    text = bytes(documentation().tolist()).decode()
    assert "assignment" in text
    assert len(text) > 100_000


def test_runs_of_equal_losses_can_be_shown(tmp_path: Path) -> None:
    (run,) = train([Entry("plain", plain)], SMALL)
    assert largest_difference([run, run]) == 0.0
    assert len(comparison([run, run], gpu=False).rows) == 6
    picture([run, run], tmp_path / "deep" / "demo.png", "a title")
    assert (tmp_path / "deep" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--steps", "4", "--device", "cpu", "--out", str(tmp_path)])
    out, err = capfd.readouterr()
    assert not stopped.value.code, err
    for shown in ("validation loss", "largest difference", "torch AdamW", "tilestep AdamW"):
        assert shown in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--device", "tpu"]])
def test_bad_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capfd.readouterr().err


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_without_matplotlib_a_command_says_so_before_its_work(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        cli.main([command])
    out, err = capfd.readouterr()
    assert stopped.value.code == 1
    assert "pip install matplotlib" in err and out == ""
