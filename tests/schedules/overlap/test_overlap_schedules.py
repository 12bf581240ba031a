"""Overlapped optimizers in one process: the same numbers to the bit, whatever is done between steps."""

from __future__ import annotations

import copy
from typing import Any

import overlapped_models
import pytest
import torch
from overlapped_models import TINY, Make, Small, Twins, adamw, clipped, loss_of, small
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilestep
from tilestep import TimesMean

DURING = ["backward", "forward"]

both = pytest.mark.parametrize("during", DURING)


def lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.01)  # type: ignore[attr-defined]


def lion(params: Any) -> tilestep.Optimizer:
    return tilestep.Lion(params, lr=0.001, max_grad_norm=1.0)  # type: ignore[attr-defined]


def adafactor(params: Any) -> tilestep.Optimizer:
    return tilestep.Adafactor(params, lr=0.01)  # type: ignore[attr-defined]


def prodigy(params: Any) -> tilestep.Optimizer:
    return tilestep.Prodigy(params)  # type: ignore[attr-defined]


def two_groups(params: Any) -> tilestep.Optimizer:
    listed = list(params)
    flat, matrices = [p for p in listed if p.dim() < 2], [p for p in listed if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.02, "rule": "SGD"}]
    return tilestep.AdamW(groups, lr=0.01, max_grad_norm=0.5)  # type: ignore[attr-defined]


def two_groups_unclipped(params: Any) -> tilestep.Optimizer:
    optimizer = two_groups(params)
    for group in optimizer.param_groups:
        group["max_grad_norm"] = None
    return optimizer


@both
@pytest.mark.parametrize(
    "make", [adamw, clipped, lamb, lion, adafactor, prodigy, two_groups, two_groups_unclipped], ids=lambda f: f.__name__
)
def test_forty_steps_are_the_serial_ones(during: str, make: Make) -> None:
    twins = Twins(make, during)
    groups = len(twins.optimizer.schedule.grouping.groups)
    assert groups == 1 if make is prodigy else groups > 4
    for step in range(40):
        twins.step(step)
    twins.compare()


def follow_writes(during: str, kind: Any) -> None:
    twins = Twins(lambda params: adamw(params, master_weights=kind), during, lambda: small().bfloat16())
    for step in range(12):
        twins.step(step)
        if step in (3, 7):
            for model, _ in twins.pairs:
                with torch.no_grad():
                    model.first.weight.clamp_(-0.1, 0.1)
    twins.compare()


@both
def test_bfloat16_with_masters(during: str) -> None:
    follow_writes(during, True)


@both
def test_bfloat16_with_remainders(during: str) -> None:
    follow_writes(during, "remainder")


def test_backward_updates_group_by_group_and_lets_gradients_go() -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    seen: list[int] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(optimizer.applied_groups)))
    before = copy.deepcopy(model)
    loss_of(model, 0).backward()
    # Later layers were updated before this gradient was there; its own group and the first layers were not.
    assert 0 < seen[0] < len(optimizer.applied_groups)
    assert not torch.equal(model.attention.in_proj_weight, before.attention.in_proj_weight)
    gone = [name for name, param in model.named_parameters() if param.grad is None and "unused" not in name]
    # The second layer shares its bucket with a layer that has no gradient, and waits for the step.
    assert [name for name, param in model.named_parameters() if param.grad is not None] == [
        "second.weight",
        "second.bias",
    ]
    assert len(gone) > 6
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.applied_groups == ()


def test_forward_updates_a_module_when_it_is_used() -> None:
    model = small()
    optimizer = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=TINY)
    before, params = copy.deepcopy(model), list(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    assert all(param.grad is None for param in params)
    raw = {name: dict.get(module._parameters, "weight") for name, module in model.named_modules()}
    assert torch.equal(raw["first"], before.first.weight)
    model.second(torch.ones(1, 9))
    assert torch.equal(raw["first"], before.first.weight)
    model.first(torch.ones(1, 6))
    assert not torch.equal(raw["first"], before.first.weight)
    assert torch.equal(raw["embedding"], before.embedding.weight)
    optimizer.synchronize()
    assert not torch.equal(raw["embedding"], before.embedding.weight)


@both
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_accumulation(during: str, make: Make) -> None:
    twins = Twins(make, during)
    for step in range(6):
        for model, optimizer in twins.pairs:
            for part in range(2):
                if optimizer is twins.optimizer:
                    before = copy.deepcopy(model.state_dict())
                    with optimizer.no_sync():
                        loss_of(model, 10 * step + part).backward()
                    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
                else:
                    loss_of(model, 10 * step + part).backward()
            loss_of(model, 10 * step + 5).backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.compare()


def test_a_second_backward_before_the_step_is_refused_where_it_would_be_wrong() -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter \d+ of group 0 \(.*\) came .* optimizer.no_sync"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()


@both
def test_steps_that_are_skipped_are_skipped_by_all_groups(during: str) -> None:
    twins = Twins(lambda params: adamw(params, skip_nonfinite=True), during)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        value = loss_of(model, step)
        return value * float("inf") if step % 3 == 1 else value

    for step in range(9):
        if step % 3 == 1:
            for model, optimizer in twins.pairs:
                before = copy.deepcopy(model.state_dict())
                loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        else:
            twins.step(step)
    twins.compare()
    assert twins.optimizer.skipped_steps == twins.reference.skipped_steps == 3


@both
def test_skip_above_a_running_mean(during: str) -> None:
    limit = TimesMean(1.2, decay=0.5, warmup=2)
    twins = Twins(lambda params: adamw(params, skip_above=limit), during)
    for step in range(20):
        twins.step(step, lambda model, step: loss_of(model, step) * (1 + step % 4))
    twins.compare()
    assert twins.optimizer.skipped_steps == twins.reference.skipped_steps > 0
    saved, wanted = (each.state_dict()["param_groups"][0] for each in (twins.optimizer, twins.reference))
    assert saved["norm_mean"] == wanted["norm_mean"]


@both
@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaler(during: str, kind: Any, unscales: bool) -> None:
    _train_scaled(during, kind, unscales, adamw, tells=True)
    _train_scaled(during, kind, unscales, clipped, tells=True)
    # With a clip updates wait for the step anyway.
    _train_scaled(during, kind, unscales, clipped, tells=False)


def _train_scaled(during: str, kind: Any, unscales: bool, make: Make, *, tells: bool) -> None:
    scalers = [kind(overlapped_models.DEVICE, init_scale=1024.0, growth_interval=3) for _ in range(2)]
    twins = Twins(make, during, scaler=scalers[1] if tells else None)
    for step in range(9):
        for (model, optimizer), scaler in zip(twins.pairs, scalers):
            loss = loss_of(model, step) * (float("inf") if step == 4 else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    twins.compare()


@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_a_scaler_that_nobody_spoke_of_is_refused(kind: Any) -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    scaler = kind(overlapped_models.DEVICE, init_scale=1024.0)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(tilestep.GradientError, match=r"overlap\(optimizer, model, scaler=scaler\)"):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))


@both
def test_frozen_and_thawed_parameters(during: str) -> None:
    twins = Twins(adamw, during)
    for step in range(12):
        for model, _ in twins.pairs:
            model.first.requires_grad_(step not in (3, 4, 5))
            model.embedding.requires_grad_(step > 6)
        twins.step(step)
    twins.compare()


@both
def test_parameters_that_are_frozen_from_the_start(during: str) -> None:
    def build() -> Small:
        model = small()
        model.attention.requires_grad_(False)
        return model

    twins = Twins(clipped, during, build)
    for step in range(8):
        if step == 4:
            for model, _ in twins.pairs:
                model.attention.requires_grad_(True)
        twins.step(step)
    twins.compare()


class Checkpointed(Small):
    """Recomputes its hidden layers in backward."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self._begin, self.embedding(tokens), use_reentrant=self.reentrant)
        return nn.functional.linear(self.second(hidden) * self.scale, self.embedding.weight)

    def _begin(self, embedded: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(embedded * self.scale if not self.reentrant else embedded)))
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Reentrant(Checkpointed):
    """The same by nested backward passes."""

    reentrant = True


@both
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_activation_checkpointing(during: str, kind: type[Checkpointed]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind().to(overlapped_models.DEVICE)

    twins = Twins(adamw, during, build)
    for step in range(8):
        twins.step(step)
    twins.compare()


class Interrupted(RuntimeError):
    pass


@both
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_an_exception_in_backward(during: str, make: Make) -> None:
    twins = Twins(make, during)
    for step in range(2):
        twins.step(step)

    def fail(_: torch.Tensor) -> None:
        raise Interrupted

    before = copy.deepcopy(twins.overlapped.state_dict())
    handle = twins.overlapped.norm.weight.register_hook(fail)
    with pytest.raises(Interrupted):
        loss_of(twins.overlapped, 2).backward()
    handle.remove()
    applied = twins.optimizer.applied_groups
    after = twins.overlapped.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    eager = during == "backward" and make is adamw
    assert bool(applied) is eager
    groups = [group for group in twins.optimizer.schedule.grouping.groups if group.name in applied]
    assert changed == {name for group in groups for name in _names(twins, group)}
    if eager:
        with pytest.raises(RuntimeError, match=f"broken off when it had updated {applied[0]}.*zero_grad"):
            twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert twins.optimizer.applied_groups == ()
    assert all(param.grad is None for param in twins.overlapped.parameters())
    # From here on both train alike again.
    twins.serial.load_state_dict(after)
    twins.reference.load_state_dict(twins.optimizer.state_dict())
    for step in range(3, 8):
        twins.step(step)
    twins.compare()


def _names(twins: Twins, group: Any) -> set[str]:
    chosen = {id(param) for param in group.params}
    return {name for name, param in twins.overlapped.named_parameters() if id(param) in chosen}
