"""A training loop with accelerate: what docs/frameworks/accelerate.md says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestep

accelerate = pytest.importorskip("accelerate")


def train(make: Callable[[Any], Any], clip: float | None = None, accumulation: int = 1, precision: str = "no") -> Any:
    """Train a small model; losses, the accelerator, and the prepared optimizer."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    inputs = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = torch.utils.data.DataLoader(data, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, accelerator, optimizer


def torchs(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model: Any) -> Any:
    return tilestep.AdamW(model.parameters(), lr=1e-2)


MAKES = {
    "plain": plain,
    "overlap-forward": lambda model: tilestep.overlap(plain(model), model, during="forward"),
    "overlap-backward": lambda model: tilestep.overlap(plain(model), model, during="backward"),
    "offload": lambda model: tilestep.offload(plain(model)),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 1.0}, {"accumulation": 2}, {"precision": "bf16"}],
    ids=["default", "clip", "accumulation", "bf16"],
)
def test_losses_are_those_of_torch_s_optimizer(name: str, options: dict[str, Any]) -> None:
    if name == "overlap-backward" and ("clip" in options or "accumulation" in options):
        with pytest.raises((tilestep.GradientError, RuntimeError), match=r"max_grad_norm|no_sync\(\)"):
            train(MAKES[name], **options)
    else:
        assert train(MAKES[name], **options)[0] == pytest.approx(train(torchs, **options)[0], rel=1e-4)


def test_a_clip_inside_the_step_is_accelerate_s() -> None:
    losses, _, optimizer = train(lambda model: tilestep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0))
    assert losses == pytest.approx(train(torchs, clip=1.0)[0], rel=1e-4)
    assert float(optimizer.optimizer.grad_norm) > 0


def test_its_checkpoints_bring_the_state_back(tmp_path: Path) -> None:
    _, accelerator, optimizer = train(plain)
    before = {name: value.clone() for name, value in optimizer.state_dict()["state"][0].items()}
    accelerator.save_state(str(tmp_path))
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
    accelerator.load_state(str(tmp_path))
    after = optimizer.state_dict()["state"][0]
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
