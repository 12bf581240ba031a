"""What is around steps with the state on the host: scalers, skips, checkpoints, groups, averages, foreign writes."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_pairs import HOMES, Homes, Pair, on_host, streamed

import tilestep
from tilestep.rules.compose import ema

NAMES = ["streamed, 100 kB, one buffer", "on the host, tiles"]
INF = float("inf")


@pytest.fixture(params=[HOMES[name] for name in NAMES], ids=NAMES)
def home(request: pytest.FixtureRequest) -> Homes:
    return request.param


def clipped(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=1e-2, max_grad_norm=1.0)


@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["tilestep's", "torch's"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_, step"])
def test_a_scaler_skips_overflows_and_unscales(kind: Any, unscale: bool, home: Homes) -> None:
    pair = Pair(clipped, home)
    scalers = [kind("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(8):
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        pair.set_gradients(factor=float(scalers[0].get_scale()))
        if step in (2, 5):
            for params in (pair.plain, pair.moved):
                params[4].grad[7] = INF
        for scaler, optimizer in zip(scalers, (pair.reference, pair.optimizer)):
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        for left, right in zip(pair.plain, pair.moved):
            assert torch.equal(left.grad, right.grad)
        pair.compare()
    assert scalers[0].get_scale() == scalers[1].get_scale() != 2.0**10
    assert float(pair.optimizer.state[pair.moved[0]]["step"]) == 6


def test_a_skipped_step_changes_nothing_on_the_host(home: Homes) -> None:
    pair = Pair(lambda params: tilestep.AdamW(params, skip_nonfinite=True), home)
    pair.step(2)
    before = [{name: value.clone() for name, value in pair.optimizer.state[param].items()} for param in pair.moved]
    weights = [param.detach().clone() for param in pair.moved]
    pair.set_gradients()
    pair.moved[5].grad[3, 3] = float("nan")
    pair.optimizer.step()
    assert int(pair.optimizer.skipped_steps) == 1
    for param, weight, known in zip(pair.moved, weights, before):
        assert torch.equal(param, weight)
        assert all(torch.equal(value, known[name]) for name, value in pair.optimizer.state[param].items())


def test_accumulated_gradients(home: Homes) -> None:
    pair = Pair(clipped, home)
    for _ in range(3):
        pair.set_gradients()
        first = [param.grad for param in pair.plain]
        pair.set_gradients()
        for params in (pair.plain, pair.moved):
            for param, gradient in zip(params, first):
                param.grad += gradient
        pair.reference.step()
        pair.optimizer.step()
    pair.compare()


def save(optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_checkpoints_go_both_ways(home: Homes) -> None:
    pair = Pair(clipped, home)
    pair.step(3)
    moved = Pair(clipped, home)
    moved.optimizer.load_state_dict(save(pair.reference))
    plain = Pair(clipped, home)
    plain.reference.load_state_dict(save(pair.optimizer))
    for params, known in ((moved.moved, pair.plain), (plain.plain, pair.moved)):
        for param, weight in zip(params, known):
            with torch.no_grad():
                param.copy_(weight)
    pair.set_gradients()
    for params in (moved.moved, plain.plain):
        for param, known in zip(params, pair.plain):
            param.grad = known.grad.clone()
    for optimizer in (pair.reference, pair.optimizer, moved.optimizer, plain.reference):
        optimizer.step()
    pair.compare()
    for left, right, expected in zip(moved.moved, plain.plain, pair.plain):
        assert torch.equal(left, expected) and torch.equal(right, expected)


def test_torch_s_checkpoints_go_both_ways(home: Homes) -> None:
    pair = Pair(lambda params: tilestep.AdamW(params, lr=1e-2), home)
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in pair.moved]
    torchs = torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(4):
        pair.set_gradients()
        for param, known in zip(theirs, pair.moved):
            param.grad = known.grad.clone()
        torchs.step()
        pair.optimizer.step()
        if step == 1:
            saved = save(torchs)
            torchs.load_state_dict(save(pair.optimizer))
            pair.optimizer.load_state_dict(saved)
    for left, right in zip(pair.moved, theirs):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_a_loaded_state_stays_on_the_host(home: Homes) -> None:
    pair = Pair(clipped, home)
    pair.step()
    owner = pair.optimizer.memory
    taken, handed_out = owner.memory.taken, pair.optimizer.state_dict()
    before = copy.deepcopy(handed_out)
    pair.optimizer.load_state_dict(copy.deepcopy(handed_out))
    for place, param in enumerate(pair.moved):
        exp_avg = pair.optimizer.state[param]["exp_avg"]
        assert owner.memory.holds(exp_avg)
        # What was handed out is nobody's buffer now.
        assert exp_avg.data_ptr() != handed_out["state"][place]["exp_avg"].data_ptr() or not exp_avg.numel()
        assert torch.equal(handed_out["state"][place]["exp_avg"], before["state"][place]["exp_avg"])
    del handed_out
    assert owner.memory.taken == taken
    assert pair.optimizer.memory is owner
    pair.step()
    pair.compare()


def test_a_state_that_was_replaced_goes_to_the_host(home: Homes) -> None:
    pair = Pair(clipped, home)
    pair.step()
    for optimizer, params in ((pair.reference, pair.plain), (pair.optimizer, pair.moved)):
        state = optimizer.state[params[4]]
        optimizer.state[params[4]] = {**state, "exp_avg": torch.full_like(params[4], 0.5)}
    pair.step(2)
    pair.compare()


def test_groups_are_added_and_have_rules_of_their_own(home: Homes) -> None:
    pair = Pair(clipped, home)
    pair.step(2)
    for params, optimizer in ((pair.plain, pair.reference), (pair.moved, pair.optimizer)):
        more = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (30_000, 3)]
        optimizer.add_param_group({"params": more, "rule": "Lion", "lr": 1e-3})
        params += more
    pair.step(3)
    pair.compare()


@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")]
)
def test_what_others_write_to_parameters_counts(dtype: torch.dtype, master: Any, home: Homes) -> None:
    pair = Pair(lambda params: tilestep.AdamW(params, master_weights=master), home, dtype=dtype)
    pair.step(2)
    with torch.no_grad():
        for params in (pair.plain, pair.moved):
            params[4][100:200] = 3.0
            params[1].mul_(2)
    pair.step(2)
    pair.compare()


def test_parameters_may_move_and_freeze(home: Homes) -> None:
    pair = Pair(clipped, home)
    pair.step()
    for params in (pair.plain, pair.moved):
        params[4].data = params[4].data.clone()
        params[5].requires_grad_(False)
    pair.step(2, missing=lambda place: place == 5)
    pair.compare()


def test_averages_are_held_and_given_back(home: Homes) -> None:
    for dtype, master in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")):
        make = partial(tilestep.Optimizer, rule=ema(tilestep.registry["AdamW"], 0.9), master_weights=master)
        pair = Pair(make, home, dtype=dtype)
        pair.step(3)
        with pair.reference.averaged(), pair.optimizer.averaged():
            for left, right in zip(pair.plain, pair.moved):
                assert torch.equal(left, right)
        pair.step(2)
        pair.compare()


def test_a_backward_through_old_weights_fails_as_ever(home: Homes) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = home(tilestep.SGD([weight], lr=0.1, momentum=0.9))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_and_closures(home: Homes) -> None:
    pair = Pair(clipped, home)
    seen: list[str] = []
    pair.optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        pair.set_gradients()
        return 1.5

    assert pair.optimizer.step(closure) == 1.5 and seen == ["after"]
    pair.reference.step()
    pair.compare()


def test_state_that_there_is_already_is_taken_along(home: Homes) -> None:
    pair = Pair(clipped, lambda optimizer: optimizer)  # type: ignore[arg-type,return-value]
    pair.step(3)
    kind = type(pair.optimizer)
    moved = home(pair.optimizer)
    assert moved is pair.optimizer and isinstance(moved, kind) and isinstance(moved, tilestep.OffloadedOptimizer)
    pair.step(3)
    pair.compare()


def test_kept_gradient_types(home: Homes) -> None:
    """bfloat16 parameters with float32 gradients."""
    pair = Pair(clipped, lambda optimizer: optimizer, dtype=torch.bfloat16)  # type: ignore[arg-type,return-value]
    for params in (pair.plain, pair.moved):
        for param in params:
            param.grad_dtype = torch.float32
    left, right = clipped(pair.plain), home(clipped(pair.moved))
    for _ in range(3):
        for one, other in zip(pair.plain, pair.moved):
            one.grad = pair.drawn(tuple(one.shape), torch.float32)
            other.grad = one.grad.clone()
        left.step()
        right.step()
    for one, other in zip(pair.plain, pair.moved):
        assert torch.equal(one, other)


def test_segments_of_several_kinds_share_the_buffers() -> None:
    def make(params: Any) -> tilestep.Optimizer:
        return tilestep.LAMB([{"params": params[:4]}, {"params": params[4:], "rule": "AdamW"}], lr=1e-2)

    for buffers in (1, 2, 3):
        pair = Pair(make, streamed(50_000, buffers))
        pair.step(4)
        pair.compare()


def test_the_step_does_not_wait_for_the_state_and_readers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(clipped, streamed())
    waits: list[str] = []
    monkeypatch.setattr(pair.optimizer.memory, "wait", lambda: waits.append("waited"))
    pair.step(3)
    assert not waits
    pair.optimizer.state_dict()
    assert waits
    waits.clear()
    assert pair.optimizer.state[pair.moved[0]]
    assert waits


def test_the_host_waits_for_the_gradients_of_a_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk: the first update runs while later gradients are on their way."""
    pair = Pair(lambda params: tilestep.AdamW(params), on_host())
    copies = pair.optimizer.memory.copies
    waited: list[int] = []
    before = copies.wait

    def wait(mirrors: Any) -> None:
        waited.append(max(mirror.arrival for mirror in mirrors))
        before(mirrors)

    monkeypatch.setattr(copies, "wait", wait)
    pair.step()
    assert waited == sorted(waited) and len(set(waited)) > 3
    pair.compare()


@pytest.mark.parametrize("rule", ["AdamW", "Adafactor", "NAdam"])
def test_state_that_gets_other_memory(home: Homes, rule: str) -> None:
    """As code does that moves states away and back; what their memory had is another tensor's by then."""
    pair = Pair(lambda params: tilestep.Optimizer(params, rule, lr=1e-2), home)
    for _ in range(3):
        pair.step(2)
        for param in pair.moved:
            for state in pair.optimizer.state[param].values():
                before, state.data = state.data, state.data.clone()
                before.fill_(1e30)
    pair.step(2)
    pair.compare()
