"""When overlapped updates run, and what is refused; that numbers are the serial ones, test_events.py has."""

from __future__ import annotations

import copy
import threading
from typing import Any

import overlapped_models
import pytest
import torch
from overlapped_models import TINY, Make, Twins, adamw, clipped, loss_of, small

import tilestep

DURING = ["backward", "forward"]

both = pytest.mark.parametrize("during", DURING)


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


def test_a_second_backward_before_the_step_is_refused_where_it_would_be_wrong() -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter \d+ of group 0 \(.*\) arrived .* optimizer.no_sync"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()


@pytest.mark.parametrize("by_hand", [False, True], ids=["accumulated", "by hand"])
def test_gradients_that_come_after_the_update_are_not_dropped_in_silence(by_hand: bool) -> None:
    model = small()
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward", bucket_cap_mb=TINY)
    loss_of(model, 0).backward()
    if by_hand:
        model.scale.grad = torch.ones_like(model.scale)
    else:
        with optimizer.no_sync():
            loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter \d+ of group 0 \(.*\) arrived .* optimizer.no_sync"):
        optimizer.step()
    loss_of(model, 2).backward()
    optimizer.step()


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
    groups = [group for group in twins.optimizer.execution.grouping.groups if group.name in applied]
    assert changed == {name for group in groups for name in _names(twins, group)}
    if eager:
        with pytest.raises(RuntimeError, match=f"failed after it had updated {applied[0]}.*zero_grad"):
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


def test_a_second_backward_that_reaches_a_part_of_an_updated_group_raises_at_once() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward")
    data = torch.ones(1, 2)
    model[1](model[0](data)).sum().backward()
    assert len(optimizer.applied_groups) == 1
    with pytest.raises(RuntimeError, match=r"1\.weight.* arrived after .* was updated in backward"):
        model[1](data).sum().backward()


def test_a_loss_that_was_scaled_before_zero_grad_is_not_taken_for_a_plain_loss() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = tilestep.overlap(adamw(model.parameters()), model, "backward")
    scaler, data = torch.amp.GradScaler("cpu", init_scale=4.0), torch.ones(1, 2)
    model[0](data).sum().backward()  # reaches a part of the group: nothing is updated
    scaled = scaler.scale(model[1](model[0](data)).sum())
    optimizer.zero_grad()
    scaled.backward()
    assert optimizer.applied_groups == ()
    with pytest.raises(tilestep.GradientError, match="carry a loss scale"):
        scaler.step(optimizer)


def test_gradients_that_are_reduced_late_cannot_be_clipped(one_rank: None) -> None:
    """DistributedDataParallel gives parameters what the update does not read."""
    model, sent = torch.nn.Linear(2, 2), list[threading.Timer]()

    def reduce_late(_: Any, bucket: Any) -> Any:
        future = torch.futures.Future[torch.Tensor]()
        sent.append(threading.Timer(0.2, future.set_result, [bucket.buffer()]))
        sent[-1].start()
        return future

    wrapper = torch.nn.parallel.DistributedDataParallel(model)
    hook = (None, reduce_late)
    optimizer = tilestep.overlap(adamw(model.parameters()), wrapper, "backward", comm_hook=hook)
    wrapper(torch.ones(1, 2)).sum().backward()
    assert optimizer.applied_groups == () and sent
    with pytest.raises(tilestep.GradientError, match="cannot be clipped now"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
