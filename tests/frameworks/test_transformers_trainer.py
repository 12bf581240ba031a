"""transformers' Trainer: what docs/frameworks/transformers.md says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_rows import FORMATS

import tilestep

transformers = pytest.importorskip("transformers")

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).to("cuda" if torch.cuda.is_available() else "cpu")


def trainer(folder: Path, make: Make | None = None, **options: Any) -> Any:
    """A Trainer of six steps with an accumulation of two."""
    given: dict[str, Any] = {"max_steps": 6, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    classes = options.pop("optimizer_cls_and_kwargs", None)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], logging_steps=1,
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True, **{**given, **options},
    )  # fmt: skip
    made = model()
    optimizers = (None if make is None else make(made), None)
    return transformers.Trainer(
        made, arguments, train_dataset=Tokens(), optimizers=optimizers, optimizer_cls_and_kwargs=classes
    )


def losses(trained: Any) -> list[float]:
    trained.train()
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def plain(module: torch.nn.Module) -> torch.optim.Optimizer:
    return tilestep.AdamW(module.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses with torch's optimizer."""
    return losses(trainer(tmp_path_factory.mktemp("out"), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (plain, {}),
        (lambda m: tilestep.overlap(plain(m), m, during="forward"), {}),
        (lambda m: tilestep.offload(plain(m)), {}),
        (lambda m: tilestep.AdamW(m.parameters(), lr=1e-2, max_grad_norm=1.0), {"max_grad_norm": 0}),
    ],
    ids=["plain", "overlap-forward", "offload", "clip-inside"],
)
def test_losses_are_those_of_torch_s_optimizer(
    make: Make, options: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    assert losses(trainer(tmp_path, make, **options)) == pytest.approx(expected, rel=1e-5)


def test_the_class_by_name_has_the_learning_rate_it_is_given(tmp_path: Path) -> None:
    made = trainer(tmp_path, optimizer_cls_and_kwargs=(tilestep.AdamW, {"lr": 5e-3}))
    made.create_optimizer()
    assert [group["lr"] for group in made.optimizer.param_groups] == [5e-3, 5e-3]
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.0, 0.0]


def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer(tmp_path, plain, **options)
    whole.train()
    resumed = trainer(tmp_path, plain, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_updates_in_backward_are_refused_by_the_trainer_s_clip(tmp_path: Path) -> None:
    made = trainer(tmp_path, lambda m: tilestep.overlap(plain(m), m, during="backward"), gradient_accumulation_steps=1)
    with pytest.raises(tilestep.GradientError, match="max_grad_norm"):
        made.train()


STATES = (*FORMATS, "bfloat16", None)
"""What `state_dtype` can say."""


@pytest.mark.parametrize("format", STATES)
def test_from_tilestep_to_torch_and_back(format: str | None, tmp_path: Path) -> None:
    """A training goes on with torch's AdamW from a checkpoint in any format, or raises; and with tilestep again."""
    from tilestep.integrations.transformers import TilestepTrainer

    def go_on(kind: Any, steps: int, checkpoint: Path | None = None, **options: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-3, report_to=[], logging_steps=1,
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True, max_steps=steps, save_steps=2,
            lr_scheduler_type="constant", optim="adamw_torch",
        )  # fmt: skip
        trained = kind(wide(), arguments, train_dataset=Tokens(), **options)
        trained.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]

    def wide() -> Any:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2)
        )

    wanted = go_on(transformers.Trainer, 6)
    makes = {"optimizer_cls_and_kwargs": (tilestep.AdamW, {"lr": 1e-3, "state_dtype": format})}
    go_on(TilestepTrainer, 2, **makes)
    first, second = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    saved = torch.load(first / "optimizer.pt")
    codes = [name for state in saved["state"].values() for name in state if name.endswith("_codes")]
    assert bool(codes) is (format in FORMATS)
    if codes:
        with pytest.raises(KeyError, match="exp_avg"):
            go_on(transformers.Trainer, 4, first)
        torch.save(tilestep.full_precision(saved), first / "optimizer.pt")
    go_on(transformers.Trainer, 4, first)
    # Only the states differ, by their rounding.
    tolerance = {"int4": 0.05}.get(format or "", 1e-2)
    assert go_on(TilestepTrainer, 6, second, **makes) == pytest.approx(wanted, rel=tolerance)
