"""What `shard`, `overlap` and `offload` attach: the optimizer stays of its class, whatever is there besides."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped_models import TINY, adamw, clipped, iteration, loss_of, small
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from ways import SCHEDULES, attached

import tilestep
from tilestep.optimizer.execution import AT_STEP


class Named(tilestep.AdamW):  # type: ignore[misc]
    """A user's own class."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


pytestmark = pytest.mark.usefixtures("one_rank")

Attach = Callable[[Any, nn.Module], Any]
KINDS: dict[str, tuple[Attach, str, tuple[str, ...]]] = {
    "shard": (
        lambda optimizer, model: tilestep.shard(optimizer, model),
        "ShardedOptimizer",
        ("no_sync", "wait", "grad_norm_of", "clip_grad_norm_", "full_state_dict", "consolidate_state_dict"),
    ),
    "overlap": (
        lambda optimizer, model: tilestep.overlap(optimizer, model, during="backward"),
        "OverlappedOptimizer",
        ("no_sync", "synchronize", "applied_groups"),
    ),
    "offload": (
        lambda optimizer, model: tilestep.offload(optimizer),
        "OffloadedOptimizer",
        ("wait", "offload_report"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_stays_of_its_class(kind: str) -> None:
    attach, name, offers = KINDS[kind]
    model = nn.Linear(3, 2)
    optimizer = Named(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not any(hasattr(optimizer, offer) for offer in offers)
    assert not isinstance(optimizer, getattr(tilestep, name)) and optimizer.execution is AT_STEP
    made = attach(optimizer, model)
    assert made is optimizer and type(made) is Named
    assert all(
        isinstance(made, kind_of_optimizer)
        for kind_of_optimizer in (Named, tilestep.AdamW, tilestep.Optimizer, torch.optim.Optimizer)
    )
    for other, (_, attached_type, _) in KINDS.items():
        assert isinstance(made, getattr(tilestep, attached_type)) == (other == kind)
    assert all(hasattr(made, offer) for offer in offers)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    scheduler.step()
    if hasattr(made, "wait"):
        made.wait()
    assert made.steps == 1 and not torch.equal(before, model.weight)
    assert made.state[model.weight]["step"].item() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_attached_is_not_copied(kind: str) -> None:
    attach, name, _ = KINDS[kind]
    model = nn.Linear(3, 2)
    made = attach(tilestep.AdamW(model.parameters()), model)  # type: ignore[attr-defined]
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"):
            copied(made)
    with pytest.raises(TypeError, match=rf"{name} is only for isinstance checks.*tilestep.{kind}"):
        getattr(tilestep, name)(model.parameters())


def test_what_nothing_is_attached_to_is_copied() -> None:
    model = nn.Linear(3, 2)
    optimizer = tilestep.AdamW(model.parameters())  # type: ignore[attr-defined]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is type(optimizer) and other.attached == () and other.execution is AT_STEP
        assert other.memory.on_device and len(other.state) == 2
    with pytest.raises(AttributeError):
        optimizer.applied_groups  # noqa: B018


def test_a_failed_attaching_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    optimizer = tilestep.AdamW(model.parameters())  # type: ignore[attr-defined]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("tilestep.optimizer.optimizer.build_plan", fail)
        for kind in ("overlap", "offload"):
            with pytest.raises(MemoryError):
                KINDS[kind][0](optimizer, model)
            assert optimizer.attached == () and optimizer.execution is AT_STEP and type(optimizer) is tilestep.AdamW  # type: ignore[attr-defined]
            assert optimizer.memory.on_device and not hasattr(optimizer, "wait")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"].item() == 1


def attach(way: str, make: Any) -> tuple[nn.Module, Any]:
    """A small model and its optimizer, with one thing attached."""
    model = small()
    optimizer: Any = make(model.parameters())
    if way == "shard":
        tilestep.shard(optimizer, model, bucket_cap_mb=TINY)
    else:
        attached(optimizer, model, "plain", way, TINY)
    return model, optimizer


both_makes = pytest.mark.parametrize("make", [adamw, clipped], ids=lambda make: make.__name__)


@both_makes
@pytest.mark.parametrize("way", ["shard", *SCHEDULES])
def test_states_are_free_when_the_optimizer_is_gone(way: str, make: Any) -> None:
    """They are most of what a device holds, and do not wait until garbage is collected."""
    model, optimizer = attach(way, make)
    for step in range(3):
        iteration(model, optimizer, step)
    held = [StorageWeakRef(value.untyped_storage()) for state in optimizer.state.values() for value in state.values()]
    assert len(held) >= 36 and not any(storage.expired() for storage in held)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert all(storage.expired() for storage in held)
    finally:
        gc.enable()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [("Muon", {}), ("SOAP", {}), ("AdamW", {"stats": tilestep.Stats(every=1)}), ("AdamW", {"track_changes": True})],
    ids=["matrices", "decompositions", "statistics", "changes"],
)
def test_states_are_free_with_matrix_work_and_outputs(name: str, options: dict[str, Any]) -> None:
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    optimizer = getattr(tilestep, name)(params, lr=0.1, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    held = [StorageWeakRef(value.untyped_storage()) for state in optimizer.state.values() for value in state.values()]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert held and all(storage.expired() for storage in held)
    finally:
        gc.enable()


@both_makes
@pytest.mark.parametrize("way", SCHEDULES)
def test_gradients_are_free_after_the_step(way: str, make: Any) -> None:
    """Nothing but the parameters holds them: the next forward has their memory."""
    model, optimizer = attach(way, make)
    came: list[StorageWeakRef] = []
    for param in model.parameters():
        param.register_hook(lambda gradient: came.append(StorageWeakRef(gradient.untyped_storage())))
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        if way in ("at the step", "streamed", "on the host"):
            assert not any(storage.expired() for storage in came)
            model.zero_grad()
        # An update that waits for the next forward has its gradients until then.
        list(model.parameters())
        assert len(came) >= 12 and all(storage.expired() for storage in came), step
        came.clear()
