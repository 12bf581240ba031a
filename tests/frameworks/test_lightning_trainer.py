"""Lightning's Trainer: what docs/frameworks/lightning.md says of it."""

from __future__ import annotations

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
