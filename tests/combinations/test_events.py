"""Whatever happens in a training, under every schedule and memory: the bits of a plain optimizer's training."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import overlapped_models
import pytest
import torch
from overlapped_models import (
    TINY,
    Make,
    Small,
    Twins,
    adamw,
    clipped,
    compare_models,
    compare_states,
    iteration,
    loss_of,
    small,
    tokens,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from ways import SCHEDULES, attached

import tilestep

WAYS = SCHEDULES[1:]
Event = Callable[[str], None]
EVENTS: dict[str, Event] = {}


def event(run: Event) -> Event:
    EVENTS[run.__name__] = run
    return run


def trained(twins: Twins, steps: int = 3, first: int = 0) -> Twins:
    for step in range(first, first + steps):
        twins.step(step)
    return twins


def lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.01)


def two_groups(params: Any, max_grad_norm: float | None = 0.5) -> tilestep.Optimizer:
    listed = list(params)
    flat, matrices = [p for p in listed if p.dim() < 2], [p for p in listed if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.02, "rule": "SGD"}]
    return tilestep.AdamW(groups, lr=0.01, max_grad_norm=max_grad_norm)


MAKES: dict[str, Make] = {
    "AdamW": adamw,
    "clipped": clipped,
    "LAMB": lamb,
    "Lion": lambda params: tilestep.Lion(params, lr=0.001, max_grad_norm=1.0),
    "Adafactor": lambda params: tilestep.Adafactor(params, lr=0.01),
    "Prodigy": lambda params: tilestep.Prodigy(params),
    "two groups": two_groups,
    "two groups without a clip": lambda params: two_groups(params, None),
}


@functools.cache
def plain_training(make: str, device: str) -> tuple[list[float], nn.Module, tilestep.Optimizer]:
    """Twelve losses, the model and its optimizer after them: the same beside every way."""
    model = small()
    optimizer = MAKES[make](model.parameters())
    return [iteration(model, optimizer, step) for step in range(12)], model, optimizer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKES)
def test_twelve_steps(make: str, way: str) -> None:
    losses, trained_model, reference = plain_training(make, overlapped_models.DEVICE)
    model = small()
    optimizer = attached(MAKES[make](model.parameters()), model, "plain", way, TINY)
    if way in ("backward", "forward"):
        groups = len(optimizer.execution.grouping.groups)
        assert groups == 1 if make == "Prodigy" else groups > 4
    assert [iteration(model, optimizer, step) for step in range(12)] == losses
    compare_models(trained_model, model)
    compare_states(reference, optimizer)


@event
def gradients_are_accumulated(way: str) -> None:
    for make in (adamw, clipped):
        twins = Twins(make, way)
        for step in range(6):
            for part in range(2):
                before = copy.deepcopy(twins.overlapped.state_dict())
                twins.backward(lambda model, part=part, step=step: loss_of(model, 10 * step + part), last=False)
                now = twins.overlapped.state_dict()
                assert all(torch.equal(value, before[name]) for name, value in now.items())
            twins.backward(lambda model, step=step: loss_of(model, 10 * step + 5))
            twins.update()
        twins.compare()


@event
def steps_are_skipped(way: str) -> None:
    """By all parameters, their states and their counts."""
    twins = Twins(lambda params: adamw(params, skip_nonfinite=True), way)
    for step in range(9):
        if step % 3 != 1:
            twins.step(step)
            continue
        before = [
            copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])) for model, optimizer in twins.pairs
        ]
        twins.backward(lambda model, step=step: loss_of(model, step) * float("inf"))
        twins.update()
        for (model, optimizer), (weights, states) in zip(twins.pairs, before):
            assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
            for key, state in states.items():
                now = optimizer.state_dict()["state"][key]
                assert all(torch.equal(now[name], value) for name, value in state.items())
    twins.compare()
    assert twins.optimizer.skipped_steps == twins.reference.skipped_steps == 3


@event
def statistics_change_no_bit(way: str) -> None:
    """One of both measures its steps, where backward updates and where some are skipped."""
    for skips in (False, True):
        asked = [tilestep.Stats(every=2), None]

        def make(params: Any, skips: bool = skips, asked: list[Any] = asked) -> tilestep.Optimizer:
            kind: Any = "remainder" if skips else False
            return tilestep.SGD(
                params, lr=0.05, momentum=0.9, master_weights=kind, skip_nonfinite=skips, stats=asked.pop()
            )

        twins = Twins(make, way, lambda skips=skips: small().to(torch.bfloat16 if skips else torch.float32))
        for step in range(6):
            scale = float("inf") if skips and step == 3 else 1.0
            twins.step(step, lambda model, step, scale=scale: loss_of(model, step) * scale)
        twins.compare()
        assert twins.reference.skipped_steps == skips
        assert len(twins.optimizer.stats.read()) == len(list(twins.overlapped.parameters()))


@event
def steps_above_a_running_mean_are_skipped(way: str) -> None:
    limit = tilestep.TimesMean(1.2, decay=0.5, warmup=2)
    twins = Twins(lambda params: adamw(params, skip_above=limit), way)
    for step in range(20):
        twins.step(step, lambda model, step: loss_of(model, step) * (1 + step % 4))
    twins.compare()
    assert twins.optimizer.skipped_steps == twins.reference.skipped_steps > 0
    saved, wanted = (owner.state_dict()["param_groups"][0] for owner in (twins.optimizer, twins.reference))
    assert torch.equal(saved["limits"]["TimesMean"], wanted["limits"]["TimesMean"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaler(way: str, kind: Any, unscales: bool) -> None:
    for make, tells in ((adamw, True), (clipped, True), (clipped, False)):
        # With a clip updates wait for the step anyway, so that overlap() need not know of the scaler.
        scalers = [kind(overlapped_models.DEVICE, init_scale=1024.0, growth_interval=3) for _ in range(2)]
        overlaps = way.endswith(("backward", "forward"))
        twins = Twins(make, way, **({"scaler": scalers[1]} if tells and overlaps else {}))
        for step in range(7):
            for (model, optimizer), scaler in zip(twins.pairs, scalers):
                scaler.scale(loss_of(model, step) * (float("inf") if step == 3 else 1.0)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                if kind is torch.amp.GradScaler and "gradients" in way and optimizer is twins.optimizer:
                    # It looks for gradients beside parameters, finds none, and says so.
                    with pytest.raises(AssertionError, match="No inf checks"):
                        scaler.update()
                    return
                scaler.update()
            if not overlaps and "gradients" not in way:
                for mine, wanted in zip(twins.overlapped.parameters(), twins.serial.parameters()):
                    torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=0, equal_nan=True)
            for optimizer in (twins.reference, twins.optimizer):
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert scalers[0].get_scale() != 1024.0
        twins.compare()


@event
def parameters_are_frozen_and_thawed(way: str) -> None:
    twins = Twins(adamw, way)
    for step in range(12):
        for model, _ in twins.pairs:
            model.first.requires_grad_(step not in (3, 4, 5))
            model.embedding.requires_grad_(step > 6)
        twins.step(step)
    twins.compare()


@event
def parameters_are_frozen_from_the_start(way: str) -> None:
    def build() -> Small:
        model = small()
        model.attention.requires_grad_(False)
        return model

    twins = Twins(clipped, way, build)
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


@event
def activations_are_recomputed(way: str) -> None:
    for kind in (Checkpointed, Reentrant):

        def build(kind: type[Checkpointed] = kind) -> nn.Module:
            torch.manual_seed(0)
            return kind().to(overlapped_models.DEVICE)

        trained(Twins(adamw, way, build), 8).compare()


@event
def models_are_evaluated_and_checkpoints_loaded(way: str) -> None:
    twins = Twins(clipped, way)
    for step in range(10):
        twins.step(step)
        if step % 3 == 0:
            compare_models(twins.serial, twins.overlapped)
        if step % 3 == 1:
            with torch.no_grad():
                outputs = [model.eval()(tokens(99)) for model, _ in twins.pairs]
            assert torch.equal(*outputs)
            for model, _ in twins.pairs:
                model.train()
        if step == 5:
            states = [copy.deepcopy((model.state_dict(), optimizer.state_dict())) for model, optimizer in twins.pairs]
            for (model, optimizer), (weights, state) in zip(twins.pairs, states):
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
    twins.compare()


@event
def inference_comes_after_the_first_step(way: str) -> None:
    twins = trained(Twins(clipped, way), 1)
    with torch.inference_mode():
        assert torch.equal(*(model(tokens(99)) for model, _ in twins.pairs))
    trained(twins, 2, first=1).compare()


def written(optimizer: torch.optim.Optimizer) -> Any:
    """A checkpoint, as a file has it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@event
def checkpoints_go_both_ways(way: str) -> None:
    twins = trained(Twins(clipped, way))
    others = Twins(clipped, way)
    for target, source in ((others.overlapped, twins.serial), (others.serial, twins.overlapped)):
        target.load_state_dict(source.state_dict())
    others.optimizer.load_state_dict(written(twins.reference))
    others.reference.load_state_dict(written(twins.optimizer))
    for pair in (twins, others):
        trained(pair, 2, first=3).compare()
    compare_models(twins.serial, others.serial)


@event
def checkpoints_are_torch_s(way: str) -> None:
    """With an epsilon beside which the noise of gradients that should be zero is nothing."""
    twins = Twins(lambda params: adamw(params, eps=1e-2), way)
    twins.reference = torch.optim.AdamW(twins.serial.parameters(), lr=0.01, eps=1e-2)
    for step in range(4):
        twins.backward(lambda model, step=step: loss_of(model, step))
        twins.update()
        if step == 1:
            saved = written(twins.reference)
            twins.reference.load_state_dict(written(twins.optimizer))
            twins.optimizer.load_state_dict(saved)
    for mine, wanted in zip(twins.overlapped.parameters(), twins.serial.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


@event
def averages_are_held_and_given_back(way: str) -> None:
    rule = tilestep.ema(tilestep.registry["AdamW"], 0.9)
    for dtype, kind in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")):
        twins = Twins(
            lambda params, kind=kind: tilestep.Optimizer(params, rule, lr=0.01, max_grad_norm=1.0, master_weights=kind),
            way,
            lambda dtype=dtype: small().to(dtype),
        )
        for step in range(4):
            twins.step(step)
            with twins.optimizer.averaged(), twins.reference.averaged():
                compare_models(twins.serial, twins.overlapped)
                with pytest.raises(RuntimeError, match=r"call train\(\)"):
                    loss_of(twins.overlapped, 0).backward()
                    twins.optimizer.step()
                twins.optimizer.zero_grad()
        twins.compare()


@event
def schedulers_hooks_and_closures(way: str) -> None:
    twins = Twins(adamw, way)
    schedulers = [lr_scheduler.CosineAnnealingLR(optimizer, 10) for _, optimizer in twins.pairs]
    counts = []
    for _, optimizer in twins.pairs:
        count: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, count=count: count.append("before"))
        optimizer.register_step_post_hook(lambda *_, count=count: count.append("after"))
        counts.append(count)
    for step in range(10):
        losses = []
        for model, optimizer in twins.pairs:

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        for scheduler in schedulers:
            scheduler.step()
        assert losses[0] == losses[1]
    twins.compare()
    assert counts[0] == counts[1] == ["before", "after"] * 10


@event
def a_rate_changes_after_the_step(way: str) -> None:
    twins = Twins(clipped, way)
    for step in range(6):
        twins.step(step)
        for _, optimizer in twins.pairs:
            optimizer.param_groups[0]["lr"] *= 0.5
    twins.compare()


@event
def groups_are_added(way: str) -> None:
    whole = adamw if way.endswith("backward") else clipped
    for given in ({}, {"rule": "Lion"}):
        twins = Twins(lambda params: whole([*params][:6]), way)
        for step in range(8):
            twins.step(step)
            if step == 3:
                for model, optimizer in twins.pairs:
                    rest = list(model.parameters())[6:]
                    model.extra = nn.Parameter(torch.ones(11).to(overlapped_models.DEVICE))
                    optimizer.add_param_group({"params": [*rest, model.extra], "lr": 0.05, **given})
                twins.step(100, lambda model, step: loss_of(model, step) + (model.extra**2).sum())
        twins.compare()


@event
def a_group_leaves_and_comes_back(way: str) -> None:
    """Its state waits for it, step counts and all."""

    def make(params: Any) -> tilestep.Optimizer:
        listed = list(params)
        return tilestep.AdamW([{"params": listed[:6]}, {"params": listed[6:], "lr": 0.05}], lr=0.01, max_grad_norm=0.5)

    twins = trained(Twins(make, way))
    left = [optimizer.param_groups.pop() for _, optimizer in twins.pairs]
    for step in range(3, 6):
        twins.step(step)
        for group in left:
            for param in group["params"]:
                param.grad = None  # `zero_grad` does not know of them
    for (_, optimizer), group in zip(twins.pairs, left):
        optimizer.param_groups.append(group)
    trained(twins, 3, first=6).compare()
    for _, optimizer in twins.pairs:
        counts = [[int(optimizer.state[p].get("step", 0)) for p in one["params"]] for one in optimizer.param_groups]
        assert set(counts[0]) == {9} and max(counts[1]) == 6


@event
def gradients_are_dropped_clipped_and_set_by_hand(way: str) -> None:
    twins = Twins(clipped, way)
    for step in range(5):
        twins.backward(lambda model, step=step: loss_of(model, step))
        for model, optimizer in twins.pairs:
            if step in (1, 3):
                optimizer.zero_grad()
            if step == 2 and "gradients" not in way:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step == 2 and "gradients" in way:
                tilestep.clip_grad_norm_(twins.serial.parameters(), 1e9)
            if step == 3:
                for param in model.parameters():
                    param.grad = torch.full_like(param, 0.5)
        twins.update()
    twins.compare()


@event
def others_write_to_parameters(way: str) -> None:
    for dtype, kind in (
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.bfloat16, "remainder"),
        (torch.bfloat16, "kahan"),
    ):
        twins = Twins(
            lambda params, kind=kind: adamw(params, master_weights=kind), way, lambda dtype=dtype: small().to(dtype)
        )
        for step in range(7):
            twins.step(step)
            if step == 3:
                # Of a master that was loaded, a first step has to remember which parameter it belongs to.
                for _, optimizer in twins.pairs:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step in (1, 4):
                for model, _ in twins.pairs:
                    with torch.no_grad():
                        model.first.weight.clamp_(-0.1, 0.1)
                        model.embedding.weight[2:5] = 0.25
        twins.compare()


@event
def parameters_move_and_freeze(way: str) -> None:
    twins = trained(Twins(clipped, way))
    for model, _ in twins.pairs:
        model.first.weight.data = model.first.weight.data.clone()
        model.second.requires_grad_(False)
    trained(twins, 3, first=3).compare()


@event
def others_write_through_data(way: str) -> None:
    """Which changes no version: copies of parameters on the host follow all the same."""
    for dtype, kind in ((torch.float32, False), (torch.bfloat16, True)):
        twins = Twins(
            lambda params, kind=kind: adamw(params, master_weights=kind), way, lambda dtype=dtype: small().to(dtype)
        )
        for step in range(8):
            twins.step(step)
            if step in (0, 3, 4):
                for model, _ in twins.pairs:
                    list(model.parameters())  # an update of "forward" is waited for
                    model.first.weight.data.mul_(0.5)
                    model.scale.data[1:3] = 0.25
        twins.compare()


@event
def a_hook_that_comes_late_changes_gradients(way: str) -> None:
    """It is called after those that take gradients, which leave them for it; also where backwards are summed up."""
    for make in (adamw, clipped):
        twins = trained(Twins(make, way), 2)
        for model, _ in twins.pairs:
            for param in (model.first.weight, model.scale):

                def halve(param: torch.Tensor) -> None:
                    assert param.grad is not None
                    param.grad.mul_(0.5)

                param.register_post_accumulate_grad_hook(halve)
        trained(twins, 3, first=2)
        twins.compare()


@event
def averages_begin_with_weights_that_come_after_a_state_dict(way: str) -> None:
    """As a framework takes a `state_dict` to know what to load, before the model has its weights."""
    for rule in ("ScheduleFreeAdamW", "ScheduleFreeSGD"):
        twins = Twins(lambda params, rule=rule: tilestep.Optimizer(params, rule, lr=0.01), way)
        fresh = small(seed=1)
        wanted = tilestep.Optimizer(fresh.parameters(), rule, lr=0.01)
        for model, optimizer in twins.pairs:
            optimizer.state_dict()
            model.load_state_dict(small(seed=1).state_dict())
        for step in range(3):
            iteration(fresh, wanted, step)
            twins.step(step)
        twins.compare()
        compare_models(fresh, twins.overlapped)
        compare_states(wanted, twins.optimizer)


@event
def a_state_is_replaced(way: str) -> None:
    twins = trained(Twins(clipped, way))
    for model, optimizer in twins.pairs:
        weight = model.first.weight
        optimizer.state[weight] = {**optimizer.state[weight], "exp_avg": torch.full_like(weight, 0.5)}
    trained(twins, 3, first=3).compare()


@event
def a_state_gets_other_memory(way: str) -> None:
    """As code does that moves states away and back; what their memory had is another tensor's by then."""
    for rule in ("AdamW", "Adafactor", "NAdam"):
        twins = Twins(lambda params, rule=rule: tilestep.Optimizer(params, rule, lr=0.01), way)
        for turn in range(2):
            trained(twins, 2, first=2 * turn)
            twins.optimizer.wait() if hasattr(twins.optimizer, "wait") else twins.optimizer.synchronize()
            for state in twins.optimizer.state.values():
                for value in state.values():
                    before, value.data = value.data, value.data.clone()
                    before.fill_(1e30)
        trained(twins, 2, first=4).compare()


@event
def gradients_have_another_type(way: str) -> None:
    """bfloat16 parameters with float32 gradients."""

    def build() -> nn.Module:
        model = small().bfloat16()
        for param in model.parameters():
            param.grad_dtype = torch.float32
        return model

    trained(Twins(clipped, way, build)).compare()


@event
def it_is_attached_later(way: str) -> None:
    twins = trained(Twins(clipped, way, later=True))
    before = twins.optimizer
    twins.attach()
    assert twins.optimizer is before and type(before) is tilestep.AdamW
    trained(twins, 3, first=3).compare()


@event
def a_module_is_compiled(way: str) -> None:
    twins = Twins(adamw, way)
    twins.overlapped.first.compile(backend="eager")
    trained(twins, 4).compare()


@event
def muon_beside_adamw(way: str) -> None:
    def make(params: Any) -> tilestep.Optimizer:
        listed = list(params)
        matrices, rest = [p for p in listed if p.dim() == 2], [p for p in listed if p.dim() != 2]
        return tilestep.AdamW([{"params": matrices, "rule": "Muon", "lr": 0.02}, {"params": rest}], lr=0.01)

    twins = Twins(make, way)
    for step in range(5):
        twins.backward(lambda model, step=step: loss_of(model, step))
        twins.update()
    # Matrices of a group are batched by themselves; products of other batches may round otherwise.
    for param, wanted in zip(twins.overlapped.parameters(), twins.serial.parameters()):
        torch.testing.assert_close(param, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", EVENTS)
def test_event(run: str, way: str) -> None:
    EVENTS[run](way)
