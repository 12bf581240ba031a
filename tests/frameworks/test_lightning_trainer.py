"""Lightning's Trainer: what docs/frameworks/lightning.md says of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestep

lightning = pytest.importorskip("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)


def fit(make: Callable[[Any], Any], checkpoint: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """Train a small module with what `make` gives; the module, with its losses, and the trainer."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make(self)
            if isinstance(optimizer, tilestep.Optimizer) and options.get("precision") is None:
                optimizer.register_step_post_hook(self.note)
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            }

        def note(self, optimizer: Any, *_: Any) -> None:
            if optimizer.param_groups[0].get("max_grad_norm"):
                self.log("grad_norm", optimizer.grad_norm)

    given: dict[str, Any] = {"max_epochs": 2, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **given,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader(), ckpt_path=checkpoint)
    return module, trainer


def torchs(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def plain(module: Any) -> Any:
    return tilestep.AdamW(module.parameters(), lr=1e-2)


def clipping(module: Any) -> Any:
    return tilestep.AdamW(module.parameters(), lr=1e-2, max_grad_norm=1.0)


MAKES = {
    "plain": plain,
    "overlap-forward": lambda module: tilestep.overlap(plain(module), module, during="forward"),
    "overlap-backward": lambda module: tilestep.overlap(plain(module), module, during="backward"),
    "offload": lambda module: tilestep.offload(plain(module)),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 1.0}],
    ids=["default", "accumulation", "bf16", "clip"],
)
def test_losses_are_those_of_torch_s_optimizer(name: str, options: dict[str, Any]) -> None:
    if name == "overlap-backward" and "accumulate_grad_batches" in options:
        with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
            fit(MAKES[name], **options)
    elif name == "overlap-backward" and "gradient_clip_val" in options:
        with pytest.raises(tilestep.GradientError, match="max_grad_norm"):
            fit(MAKES[name], **options)
    else:
        expected = fit(torchs, **options)[0].losses
        assert fit(MAKES[name], **options)[0].losses == pytest.approx(expected, rel=1e-4)


def test_a_clip_inside_the_step_is_lightning_s() -> None:
    module, trainer = fit(clipping)
    assert module.losses == pytest.approx(fit(torchs, gradient_clip_val=1.0)[0].losses, rel=1e-4)
    assert float(trainer.callback_metrics["grad_norm"]) > 0


def test_in_mixed_precision_lightning_leaves_the_clip_to_the_optimizer() -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(plain, precision="bf16-mixed", gradient_clip_val=1.0)
    assert fit(clipping, precision="bf16-mixed")[0].losses[-1] > 0


def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    half, trainer = fit(plain)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    whole, resumed = fit(plain, max_epochs=4)[0], fit(plain, tmp_path / "half.ckpt", max_epochs=4)[0]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(next(half.parameters()), next(whole.parameters()))


def two_optimizers(library: Any) -> list[float]:
    """The losses of a module that trains by hand with two optimizers, each looked at and loaded through its wrapper."""
    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
            self.added = torch.nn.Parameter(torch.ones(16))

        def training_step(self, batch: Any, index: int) -> None:
            optimizers: Any = self.optimizers()
            if index == 1 and self.current_epoch == 0:
                optimizers[1].add_param_group({"params": [self.added], "lr": 1e-2})
            for place, optimizer in enumerate(optimizers):
                # What a GAN does: each trains with the gradients of its own parameters.
                self.toggle_optimizer(optimizer)
                hidden = self.first(batch[0]).relu()
                loss = (self.second(hidden * self.added) - batch[1]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                losses.append(float(loss.detach()))
                params = [param for group in optimizer.param_groups for param in group["params"]]
                assert len(optimizer.state) == len(params) == len(optimizer.state_dict()["state"])
                assert all(optimizer.state[param] for param in params)
                if index == 3 and place == 0 and self.current_epoch == 0:
                    self.saved = copy.deepcopy(optimizer.state_dict())
                    self.saved["param_groups"][0]["lr"] = 1e-3
                if index == 5:
                    # torch's wrapper would load it into itself.
                    (optimizer if library is tilestep else optimizer.optimizer).load_state_dict(
                        copy.deepcopy(self.saved if place == 0 else optimizer.state_dict())
                    )
                    assert optimizer.optimizer.param_groups[0]["lr"] == (1e-3 if place == 0 else 2e-2)

        def configure_optimizers(self) -> Any:
            return [
                library.AdamW(self.first.parameters(), lr=1e-2),
                library.SGD(self.second.parameters(), lr=2e-2, momentum=0.9),
            ]

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=2,
    )  # fmt: skip
    trainer.fit(Module(), loader())
    return losses


def test_two_optimizers_by_hand() -> None:
    assert two_optimizers(tilestep) == pytest.approx(two_optimizers(torch.optim), rel=1e-4)


def with_fabric(library: Any, precision: str, folder: Path) -> list[float]:
    """The losses of a Fabric's loop, with a checkpoint in the middle."""
    from lightning.fabric import Fabric

    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", precision=precision)  # type: ignore[arg-type]
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = fabric.setup(net, library.AdamW(net.parameters(), lr=1e-2))
    losses: list[float] = []
    for index, batch in enumerate(loader()):
        loss = (model(batch[0]) - batch[1]).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 1e-2
        if index == 3:
            fabric.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
        if index == 5:
            fabric.load(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_wraps_the_optimizer(precision: str, tmp_path: Path) -> None:
    mine, torchs_losses = (with_fabric(library, precision, tmp_path) for library in (tilestep, torch.optim))
    assert mine == pytest.approx(torchs_losses, rel=1e-4)
