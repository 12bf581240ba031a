"""Overlapped optimizers on GPUs: the checks of tests/execution/overlap, and what only streams can get wrong.

python -m pytest tests/gpu/test_overlap_gpu.py
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import overlapped_meshes
import overlapped_models
import overlapped_pairs
import overlapped_ranks
import pytest
import test_events as events
import test_overlap_between_steps as between
import test_overlap_schedules as schedules
import torch
from overlapped_models import TINY, Make, Twins, adamw, clipped, loss_of, small
from rank_processes import each_passes
from torch import nn

import tilestep
from tilestep.execution.overlap import execution
from tilestep.optimizer.control import StepControl
from tilestep.runtime import segment
from tilestep.timeline.side_stream import SideStream

DURING = ("backward", "forward")

both = pytest.mark.parametrize("during", DURING)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_models, "DEVICE", "cuda")


@contextmanager
def delays(seed: int = 0) -> Iterator[None]:
    """Updates, what comes after them, and what new plans take over begin later than they could, by another while."""
    before, chance = SideStream.after, random.Random(seed)

    def pause(most: int = 2_000_000) -> None:
        torch.cuda._sleep(chance.randrange(most))

    @contextmanager
    def later(self: SideStream, *streams: torch.cuda.Stream) -> Iterator[None]:
        if chance.random() < 0.5:
            pause()
        with before(self, *streams):
            if chance.random() < 0.7:
                pause(5_000_000)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "after", later)
        plans_come_late(patch, pause)
        yield


def plans_come_late(patch: pytest.MonkeyPatch, pause: Callable[[], None]) -> None:
    """Have a stream pause before a new plan reads step counts, and numbers of the plan before."""

    def late(function: Any) -> Any:
        def called(*given: Any) -> Any:
            pause()
            return function(*given)

        return called

    patch.setattr(segment, "_take_numbers", late(segment._take_numbers))
    patch.setattr(StepControl, "carry_to", late(StepControl.carry_to))


def spoil_in_backward(module: nn.Module) -> None:
    """Memory that was given back too early gets other values where backward comes to a module."""
    module.register_full_backward_pre_hook(lambda *_: spoil(1000))


def spoil(count: int = 8) -> None:
    # Kept until all are made, so that each is other memory.
    _ = [torch.full((64,), float("nan"), device="cuda") for _ in range(count)]


@both
@pytest.mark.parametrize("make", ["AdamW", "clipped", "LAMB", "two groups"])
def test_twelve_steps_are_the_serial_ones(during: str, make: str) -> None:
    events.test_twelve_steps(make, during)


@both
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_updates_that_come_late(during: str, make: Make) -> None:
    """Nothing reads a parameter, a state or a gradient before it is there, or after it was given away."""
    twins = Twins(make, during)
    with delays():
        for step in range(30):
            twins.step(step)
            if step % 7 == 3:
                twins.compare()
            spoil()
    twins.compare()


@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_plans_that_backward_makes_on_another_stream(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 has hooks run on its own stream: what a plan made there has read is let go, and memory of the main one."""
    twins, side = Twins(make, "backward", later=True), torch.cuda.Stream()

    def leave(param: torch.Tensor) -> None:
        # Until the end of the gradient's hooks; the gradient is memory of that stream too, as FSDP2's are.
        assert param.grad is not None
        side.wait_stream(torch.cuda.current_stream())
        param.grad.record_stream(side)
        torch.cuda.set_stream(side)
        param.grad = param.grad.clone()

    for param in twins.overlapped.parameters():
        param.register_post_accumulate_grad_hook(leave)
    spoil_in_backward(twins.overlapped.first)  # type: ignore[arg-type]
    twins.attach()
    twins.optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_stream(side))
    plans_come_late(monkeypatch, lambda: torch.cuda._sleep(100_000_000))
    for step in range(6):
        twins.step(step)
        if step % 2:
            for _, optimizer in twins.pairs:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins.compare()
    assert int(twins.optimizer.skipped_steps) == 0


@both
@pytest.mark.parametrize(
    "check",
    [
        events.gradients_are_accumulated,
        events.others_write_to_parameters,
        events.steps_are_skipped,
        events.steps_above_a_running_mean_are_skipped,
        events.parameters_are_frozen_and_thawed,
        events.models_are_evaluated_and_checkpoints_loaded,
        events.averages_are_held_and_given_back,
        events.schedulers_hooks_and_closures,
        events.groups_are_added,
        events.gradients_are_dropped_clipped_and_set_by_hand,
        events.a_rate_changes_after_the_step,
        events.activations_are_recomputed,
    ],
    ids=lambda check: check.__name__,
)
def test_the_same_as_on_a_cpu(during: str, check: Callable[[str], None]) -> None:
    with delays():
        check(during)


@pytest.mark.parametrize(
    "check",
    [
        schedules.test_backward_updates_group_by_group_and_lets_gradients_go,
        schedules.test_a_second_backward_before_the_step_is_refused_where_it_would_be_wrong,
        between.test_another_model_with_the_same_weights_waits,
        between.test_two_optimizers_of_one_model,
        between.test_parameters_outside_of_the_model,
    ],
    ids=lambda check: check.__name__,
)
def test_the_same_as_on_a_cpu_for_one_schedule(check: Callable[[], None]) -> None:
    with delays():
        check()


@both
@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaler(during: str, kind: Any, unscales: bool) -> None:
    with delays():
        events.test_scaler(during, kind, unscales)


@both
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_an_exception_in_backward(during: str, make: Make) -> None:
    schedules.test_an_exception_in_backward(during, make)


@both
def test_memory_of_an_optimizer_that_is_dropped_while_its_updates_run(during: str) -> None:
    """It is given to others once the updates have run, although none of the streams has waited for them."""
    # The collection below must end while the stream sleeps; what is made from now on is collected.
    gc.collect()
    gc.freeze()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    optimizer: Any = tilestep.overlap(adamw(model.parameters()), model, during, bucket_cap_mb=0.2)
    data = torch.ones(4, 512, device="cuda")
    for step in range(3):
        model(data).sum().backward()
        optimizer.step()
        if step == 0:
            # State that begins in an update is memory of the update's own stream; what is loaded is memory of this one.
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    states = [state["exp_avg"] for state in optimizer.state.values()]
    addresses, like = {state.data_ptr() for state in states}, torch.empty_like(states[0], device="meta")
    torch.cuda.synchronize()
    lane = optimizer.execution.lane.stream
    with torch.cuda.stream(lane):
        torch.cuda._sleep(1_000_000_000)
        # What an update does at its end: it writes to state.
        for state in states:
            state.zero_()
    del optimizer, states, state
    gc.collect()
    gc.unfreeze()
    taken = [torch.full_like(like, 7.0, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    # Memory that only the updates' own stream is given, or that waits for it, is there now.
    later = [torch.empty_like(like, device="cuda") for _ in range(64)]
    with torch.cuda.stream(lane):
        later += [torch.empty_like(like, device="cuda") for _ in range(64)]
    assert addresses & {tensor.data_ptr() for tensor in (*taken, *later)}
    assert all(bool((tensor == 7).all()) for tensor in taken)


def test_forward_waits_for_its_own_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last layers' updates held up, the first layer's result is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer: Any = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=0.2)
    data = torch.ones(4, 256, device="cuda")
    for _ in range(3):
        model(data).sum().backward()
        optimizer.step()
    model(data).sum().backward()
    torch.cuda.synchronize()
    update, late, begun = execution._update_later, torch.cuda.Event(), list[Any]()

    def held_up(*args: Any, **kwargs: Any) -> Any:
        begun.append(args)
        # The first layer's weight and bias come first.
        if len(begun) == 3:
            torch.cuda._sleep(500_000_000)
        return update(*args, **kwargs)

    monkeypatch.setattr(execution, "_update_later", held_up)
    optimizer.step()
    late.record(optimizer.execution.lane.stream)
    done = torch.cuda.Event()
    model[0](data)
    done.record()
    done.synchronize()
    assert len(begun) > 2 and not late.query()
    optimizer.synchronize()


@both
@pytest.mark.parametrize("make", [adamw, clipped], ids=lambda f: f.__name__)
def test_the_host_never_waits(during: str, make: Make) -> None:
    model = small()
    optimizer = tilestep.overlap(make(model.parameters()), model, during, bucket_cap_mb=TINY)
    for step in range(6):
        batch = overlapped_models.tokens(step)
        torch.cuda.synchronize()
        if step > 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_parameters_that_are_read_between_backward_and_step() -> None:
    """Whoever looks them up waits for the updates that backward has made."""
    model, serial = small(), small()
    optimizer, reference = adamw(model.parameters()), adamw(serial.parameters())
    tilestep.overlap(optimizer, model, "backward", bucket_cap_mb=TINY)
    with delays():
        for step in range(5):
            loss_of(model, step).backward()
            applied = {name for name, param in model.named_parameters() if param.grad is None}
            seen = {name: value.clone() for name, value in model.state_dict().items() if name in applied}
            optimizer.step()
            loss_of(serial, step).backward()
            reference.step()
            reference.zero_grad()
            wanted = serial.state_dict()
            assert len(seen) > 6
            assert all(torch.equal(value, wanted[name]) for name, value in seen.items())


def _peak(during: str | None, layers: int = 16, width: int = 1024) -> int:
    """Bytes at the peak of an iteration above what parameters and state take."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    optimizer = adamw(model.parameters())
    if during is not None:
        tilestep.overlap(optimizer, model, during, bucket_cap_mb=4)  # type: ignore[arg-type]
    data = torch.ones(8, width, device="cuda")
    base = 0
    for _ in range(4):
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def test_backward_keeps_a_fifth_of_the_gradients_at_most() -> None:
    gradients = 16 * 1024 * 1024 * 4
    serial, overlapped = _peak(None), _peak("backward")
    assert serial > gradients
    assert serial - overlapped > 0.8 * gradients, (serial, overlapped, gradients)


def late_on_ranks() -> None:
    with delays(torch.distributed.get_rank()):
        for build in (overlapped_pairs.ddp, overlapped_pairs.fsdp, overlapped_pairs.fsdp_prefetching):
            for during in DURING:
                for make in (adamw, clipped):
                    pair = overlapped_pairs.Pair(make, during, build)
                    for step in range(10):
                        pair.step(step)
                    pair.compare()


def late_plans_on_ranks() -> None:
    with delays(torch.distributed.get_rank()):
        for build in (overlapped_pairs.ddp, overlapped_pairs.fsdp):
            for during in DURING:
                for make in (adamw, clipped):
                    pair = overlapped_pairs.Pair(make, during, build)
                    for module in pair.overlapped.modules():
                        if isinstance(module, nn.LayerNorm):
                            spoil_in_backward(module)
                    for step in range(6):
                        pair.step(step)
                        for _, optimizer in pair.both if step % 2 else ():
                            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    pair.compare()
                    assert int(pair.optimizer.skipped_steps) == 0


def offloaded_parameters() -> None:
    """FSDP2's own offloading: parameters, gradients and update on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    for during in DURING:
        pair = overlapped_pairs.Pair(adamw, during, lambda: overlapped_pairs.fsdp(offload_policy=CPUOffloadPolicy()))
        for step in range(6):
            pair.step(step)
        pair.compare()


CHECKS: list[Callable[[], None]] = [
    *overlapped_ranks.CHECKS,
    *overlapped_meshes.CHECKS,
    *overlapped_meshes.WIDE_CHECKS,
    late_on_ranks,
    late_plans_on_ranks,
    offloaded_parameters,
]


class OnGpus:
    """A check whose models and batches are made on the rank's GPU."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check, self.__name__ = check, check.__name__

    def __call__(self) -> None:
        overlapped_models.DEVICE = "cuda"
        try:
            self.check()
        finally:
            overlapped_models.DEVICE = "cpu"


test_two_gpus = pytest.mark.two_gpus(each_passes(map(OnGpus, CHECKS), 2, backend="nccl"))
