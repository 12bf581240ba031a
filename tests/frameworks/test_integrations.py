"""tilestep.integrations, with the real frameworks; docs/frameworks/matrix.md has the trainings."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestep

NAMES = ("transformers", "lightning", "accelerate", "torchtitan")


@pytest.mark.parametrize("name", NAMES)
def test_without_its_framework_it_says_what_to_install(name: str) -> None:
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"
        f"try:\n    import tilestep.integrations.{name}\n"
        "except ImportError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (
        f"tilestep.integrations.{name} needs {name}: pip install {name}, or pip install 'tilestep[frameworks]'" in said
    )


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_run(name: str) -> None:
    pytest.importorskip(name)
    failed, tried = doctest.testmod(importlib.import_module(f"tilestep.integrations.{name}"))
    assert tried and not failed


# transformers


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def arguments(transformers: Any, folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=3,
        per_device_train_batch_size=4, logging_steps=1, **options,
    )  # fmt: skip


@pytest.fixture
def trained(transformers: Any, tmp_path: Path) -> Callable[..., Any]:
    """Trains GPT2 with the mixin; the trainer."""
    from test_transformers_trainer import Tokens, model

    from tilestep.integrations.transformers import TilestepTrainerMixin

    class Trainer(TilestepTrainerMixin, transformers.Trainer):
        pass

    def train(make: Any = None, kind: Any = Trainer, **options: Any) -> Any:
        given = options.pop("optimizer_cls_and_kwargs", None)
        made = model()
        trainer = kind(
            made, arguments(transformers, tmp_path, **options), train_dataset=Tokens(),
            optimizers=(make(made) if make else None, None), optimizer_cls_and_kwargs=given,
        )  # fmt: skip
        trainer.train()
        return trainer

    return train


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_arguments_of_a_training_become_those_of_an_optimizer(transformers: Any, tmp_path: Path) -> None:
    from tilestep.integrations.transformers import trainer_optimizer

    given = arguments(
        transformers, tmp_path, learning_rate=3e-3, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9,
        adam_epsilon=1e-6, max_grad_norm=0.5,
    )  # fmt: skip
    kind, own = trainer_optimizer(given)
    assert kind is tilestep.AdamW
    assert own == {"lr": 3e-3, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6, "max_grad_norm": 0.5}
    kind, own = trainer_optimizer(given, "SGD", momentum=0.9)
    assert kind is tilestep.SGD and own == {"lr": 3e-3, "weight_decay": 0.2, "max_grad_norm": 0.5, "momentum": 0.9}
    assert trainer_optimizer(given, tilestep.Lion, lr=1e-4)[1]["lr"] == 1e-4
    given.max_grad_norm = 0.0
    assert "max_grad_norm" not in trainer_optimizer(given)[1]
    with pytest.raises(KeyError, match="tilestep has no optimizer 'Adamw'"):
        trainer_optimizer(given, "Adamw")


def test_a_trainer_without_an_optimizer_has_adamw_of_its_arguments(transformers: Any, trained: Any) -> None:
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.9, "max_grad_norm": 0.3}
    own = trained(**options)
    groups = own.optimizer.optimizer.param_groups
    assert isinstance(own.optimizer.optimizer, tilestep.AdamW)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.9, 0.9) and group["max_grad_norm"] == 0.3 for group in groups)
    torchs = trained(kind=transformers.Trainer, optim="adamw_torch", **options)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(own, name) == pytest.approx(logged(torchs, name), rel=1e-4)


def test_parameters_of_a_trainer_have_names(trained: Any) -> None:
    """So that a function of names, and what is kept of embeddings, are as elsewhere."""
    asked: list[str] = []
    choose = lambda name: asked.append(name) or "int8"  # noqa: E731
    trainer = trained(optimizer_cls_and_kwargs=(tilestep.AdamW, {"lr": 1e-2, "state_dtype": choose}))
    names = {param: name for name, param in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    assert set(asked) == set(names.values())
    assert [group["param_names"] for group in groups] == [[names[p] for p in group["params"]] for group in groups]
    trainer = trained(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-2}))
    assert "param_names" not in trainer.optimizer.param_groups[0]


def test_no_norm_is_worked_out_that_nobody_needs(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: clips.append(1))
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", lambda *_, **__: clips.append(1))
    assert not logged(trained(learning_rate=1e-2, max_grad_norm=0), "grad_norm")
    tracked = trained(
        lambda model: tilestep.AdamW(model.parameters(), track_grad_norm=True), learning_rate=1e-2, max_grad_norm=0
    )
    assert all(norm > 0 for norm in logged(tracked, "grad_norm")) and not clips


def test_a_resumed_training_is_clipped_as_the_arguments_say_now(transformers: Any, tmp_path: Path) -> None:
    from test_transformers_trainer import Tokens, model

    from tilestep.integrations.transformers import TilestepTrainer

    def losses(kind: Any, clip: float, steps: int, checkpoint: str | None = None) -> list[float]:
        given = transformers.TrainingArguments(
            output_dir=str(tmp_path / kind.__name__), report_to=[], use_cpu=True, disable_tqdm=True, save_steps=2,
            max_steps=steps, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2, max_grad_norm=clip,
            lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = kind(model(), given, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=checkpoint)
        return logged(trainer, "loss")

    kinds = (TilestepTrainer, transformers.Trainer)
    for kind in kinds:
        losses(kind, 0.01, 2)
    for clip in (10.0, 0.0):
        own, torchs = (losses(kind, clip, 5, str(tmp_path / kind.__name__ / "checkpoint-2")) for kind in kinds)
        assert own == pytest.approx(torchs, rel=1e-4)


def test_a_limit_of_the_optimizer_s_own_stays(trained: Any) -> None:
    trainer = trained(lambda model: tilestep.AdamW(model.parameters(), max_grad_norm=0.1), max_grad_norm=1.0)
    assert trainer.optimizer.param_groups[0]["max_grad_norm"] == 0.1


# accelerate


def prepared(make: Any, scaler: Any = None) -> tuple[Any, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    from tilestep.integrations.accelerate import Accelerator

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    optimizer.scheduler = scheduler
    return accelerator, model, optimizer


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, tilestep.GradScaler])
def test_accelerate_sees_steps_that_an_overflow_skips(kind: Any) -> None:
    scaler = kind("cpu", init_scale=4.0)
    accelerator, model, optimizer = prepared(lambda m: tilestep.SGD(m.parameters(), lr=1.0, max_grad_norm=1.0), scaler)
    before = model.weight.clone()
    for factor, skipped in ((float("inf"), True), (1.0, False), (float("inf"), True)):
        lr = optimizer.param_groups[0]["lr"]
        accelerator.backward((model(torch.ones(2, 4)) * factor).sum())
        optimizer.step()
        optimizer.scheduler.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped and accelerator.optimizer_step_was_skipped is skipped
        assert (optimizer.param_groups[0]["lr"] == lr) is skipped
    assert int(optimizer.skipped_steps) == 2 and not torch.equal(before, model.weight)


def test_the_norm_is_seen_through_accelerate_s_wrapper() -> None:
    accelerator, model, optimizer = prepared(lambda m: tilestep.SGD(m.parameters(), lr=1.0, max_grad_norm=1.0))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5**0.5) and int(optimizer.skipped_steps) == 0
    assert optimizer.current("lr").item() == 1.0
    assert not optimizer.step_was_skipped


def test_accelerate_s_own_wrapper_takes_our_scaler() -> None:
    """It calls `scaler.step(optimizer, None)`."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = tilestep.GradScaler("cpu", init_scale=8.0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, tilestep.SGD(model.parameters(), lr=1.0))
    before = model.bias.clone()
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    assert model.bias.item() == pytest.approx(before.item() - 1.0)


# Lightning


def fit(make: Any, callbacks: list[Any], validates: bool = False, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")
    from test_lightning_trainer import loader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(8, 1)
            self.seen: list[torch.Tensor] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return make(self)

    class Validated(Module):  # type: ignore[misc, valid-type]
        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.net.weight.detach().clone())

    checkpoint = options.pop("checkpoint", None)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, num_sanity_val_steps=0, **{"max_epochs": 1, **options},
    )  # fmt: skip
    module = (Validated if validates else Module)()
    trainer.fit(module, loader(), loader() if validates else None, ckpt_path=checkpoint)
    return module, trainer


def sgd(module: Any, **options: Any) -> Any:
    return tilestep.SGD(module.parameters(), lr=0.05, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_s_clip_is_inside_the_step_in_every_precision(precision: str) -> None:
    pytest.importorskip("lightning")
    from tilestep.integrations.lightning import TilestepCallback

    options = {"gradient_clip_val": 0.5, "precision": precision}
    own, trainer = fit(sgd, [TilestepCallback()], **options)
    torchs, _ = fit(lambda m: torch.optim.SGD(m.parameters(), lr=0.05), [], **options)
    assert own.losses == pytest.approx(torchs.losses, rel=1e-3)
    assert float(trainer.callback_metrics["grad_norm"]) > 0.5 and float(trainer.callback_metrics["skipped_steps"]) == 0
    assert trainer.gradient_clip_val == 0.5


def test_a_resumed_lightning_training_is_clipped_as_the_trainer_says_now(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tilestep.integrations.lightning import TilestepCallback

    for make, torchs_clip in ((sgd, None), (lambda module: sgd(module, max_grad_norm=0.3), 0.3)):
        fit(make, [TilestepCallback()], gradient_clip_val=0.01)[1].save_checkpoint(tmp_path / "own.ckpt")
        torchs = lambda m: torch.optim.SGD(m.parameters(), lr=0.05)  # noqa: E731
        fit(torchs, [], gradient_clip_val=torchs_clip or 0.01)[1].save_checkpoint(tmp_path / "torchs.ckpt")
        for clip in (1.0, None):
            options = {"max_epochs": 2, "checkpoint": tmp_path / "own.ckpt"}
            own, _ = fit(make, [TilestepCallback()], gradient_clip_val=clip, **options)
            options["checkpoint"] = tmp_path / "torchs.ckpt"
            expected, _ = fit(torchs, [], gradient_clip_val=torchs_clip or clip, **options)
            assert own.losses == pytest.approx(expected.losses, rel=1e-4)


def test_lightning_s_scaler_and_clip_go_together() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from tilestep.integrations.lightning import TilestepCallback

    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
    own, _ = fit(sgd, [TilestepCallback()], gradient_clip_val=0.5, plugins=[plugin])
    expected, _ = fit(lambda m: torch.optim.SGD(m.parameters(), lr=0.05), [], gradient_clip_val=0.5)
    assert own.losses == pytest.approx(expected.losses, rel=1e-2)


def test_lightning_validates_with_averages_and_trains_without() -> None:
    pytest.importorskip("lightning")
    from tilestep.integrations.lightning import TilestepCallback

    made = []

    def averaging(module: Any) -> Any:
        made.append(tilestep.Optimizer(module.parameters(), tilestep.ema(tilestep.registry["SGD"], 0.9), lr=0.05))
        return made[-1]

    module, _ = fit(averaging, [TilestepCallback(log=False)], validates=True)
    with made[0].averaged():
        assert torch.equal(module.seen[-1], module.net.weight)
    assert not torch.equal(module.seen[-1], module.net.weight)


def test_shard_strategy_wants_a_sharded_optimizer() -> None:
    pytest.importorskip("lightning")
    code = (
        "import torch, tilestep, lightning.pytorch as L\n"
        "from tilestep.integrations.lightning import ShardStrategy\n"
        "class M(L.LightningModule):\n"
        "    def __init__(self): super().__init__(); self.net = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch, i): return self.net(batch[0]).sum()\n"
        "    def configure_optimizers(self): return tilestep.AdamW(self.parameters())\n"
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2)\n"
        "L.Trainer(accelerator='cpu', devices=1, strategy=ShardStrategy(), logger=False, max_epochs=1,\n"
        "          enable_checkpointing=False).fit(M(), data)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ShardStrategy: optimizer 0 is not sharded" in ran.stderr


# torchtitan


def parts() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]


def torchtitan_step(optimizers: Any, models: list[torch.nn.Module]) -> None:
    models[1](models[0](torch.ones(2, 4))).square().sum().backward()
    optimizers.step()
    optimizers.zero_grad()


def test_torchtitan_clips_by_one_norm_over_its_parts() -> None:
    pytest.importorskip("torchtitan")
    from tilestep.integrations.torchtitan import tilestep_optimizer

    models, expected = parts(), parts()
    entry = tilestep_optimizer("SGD", lr=0.1, weight_decay=0.0, max_norm=0.5, no_decay="bias")
    optimizers = entry.build(model_parts=models)
    torchs = torch.optim.SGD([param for part in expected for param in part.parameters()], lr=0.1)
    for _ in range(3):
        expected[1](expected[0](torch.ones(2, 4))).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([param for part in expected for param in part.parameters()], 0.5)
        torchs.step()
        torchs.zero_grad()
        torchtitan_step(optimizers, models)
        assert float(optimizers.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for own, other in zip(models, expected):
        torch.testing.assert_close(own.weight, other.weight)
    assert len(optimizers) == 2


def test_a_resumed_torchtitan_training_is_clipped_as_the_config_says_now() -> None:
    pytest.importorskip("torchtitan")
    from tilestep.integrations.torchtitan import tilestep_optimizer

    def made(max_norm: float) -> Any:
        models = parts()
        optimizers = tilestep_optimizer("SGD", lr=0.1, max_norm=max_norm, no_decay="bias").build(model_parts=models)
        torchtitan_step(optimizers, models)
        return optimizers

    resumed = made(2.0)
    resumed.load_state_dict(made(0.5).state_dict())
    assert {group["max_grad_norm"] for optimizer in resumed for group in optimizer.param_groups} == {2.0}


def test_torchtitan_s_bfloat16_states_are_a_state_dtype() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer import ParamGroupConfig

    from tilestep.integrations.torchtitan import TilestepOptimizers

    model = torch.nn.Linear(64, 64)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    config = TilestepOptimizers.Config(param_groups=[group], implementation="fused_opt_states_bf16")
    optimizers = config.build(model_parts=[model])
    model(torch.ones(1, 64)).sum().backward()
    optimizers.step()
    assert optimizers.optimizers[0].state[model.weight]["exp_avg"].dtype is torch.bfloat16
    group.optimizer_name = "NoSuch"
    with pytest.raises(NotImplementedError, match="tilestep has no optimizer 'NoSuch'"):
        config.build(model_parts=[model])
