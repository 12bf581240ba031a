"""What of state on the host waits for what, and where it stays; that training is as without, test_events.py has."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from offloaded_pairs import HOMES, Homes, Pair, on_host, streamed

import tilestep

NAMES = ["streamed, 100 kB, one buffer", "on the host, tiles"]


@pytest.fixture(params=[HOMES[name] for name in NAMES], ids=NAMES)
def home(request: pytest.FixtureRequest) -> Homes:
    return request.param


def clipped(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=1e-2, max_grad_norm=1.0)


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
        # What was handed out is no buffer of the optimizer's now.
        assert exp_avg.data_ptr() != handed_out["state"][place]["exp_avg"].data_ptr() or not exp_avg.numel()
        assert torch.equal(handed_out["state"][place]["exp_avg"], before["state"][place]["exp_avg"])
    del handed_out
    assert owner.memory.taken == taken
    assert pair.optimizer.memory is owner
    pair.step()
    pair.compare()


@pytest.mark.parametrize(
    "options", [{"master_weights": "remainder"}, {"state_dtype": {"exp_avg": torch.float16}}], ids=str
)
def test_states_of_several_types_are_saved(home: Homes, options: dict[str, Any]) -> None:
    pair = Pair(lambda params: tilestep.AdamW(params, **options), home, dtype=torch.bfloat16)
    pair.step()
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    pair.step()
    pair.reference.load_state_dict(saved)
    for left, right in zip(pair.plain, pair.moved):
        right.data.copy_(left)
    pair.optimizer.load_state_dict(saved)
    pair.step()
    pair.compare()


def test_a_backward_through_old_weights_fails_as_ever(home: Homes) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = home(tilestep.SGD([weight], lr=0.1, momentum=0.9))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
