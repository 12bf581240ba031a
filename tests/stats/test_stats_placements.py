"""Statistics and changed weights under every placement, schedule and memory, beside a plain optimizer's.

Statistics are the plain optimizer's numbers, the same bits on all ranks; lists of changed weights are those of a copy
of the whole parameters, compared after every step.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import ways
from rank_processes import each_passes
from torch import nn
from ways import Weights, backward, device_type, goes_together, on_device, placed, whole

import tilestep

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05},
    "Lion": {"lr": 0.01, "max_grad_norm": 1.0},
    "LAMB": {"lr": 0.05},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
    "Prodigy": {"lr": 1.0},
}
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
}
IN_BLOCKS = "in blocks"
STORAGES_OF_LARGE = {IN_BLOCKS: (torch.bfloat16, {"master_weights": "int8", "state_dtype": "int8"})}
LARGE = [(40, 130), (48, 10, 3, 3), (5000,), (7,), (36, 256)]
SHAPES = [(6, 9), (70, 65), (9, 6), (7,), (4, 3, 3, 2)]
STEPS = 4
EVERY = 2
SCHEDULES = ways.SCHEDULES[:6]


def gradients_of(model: Weights, step: int) -> list[torch.Tensor]:
    return ways.gradients_of(model, step, zeros=0.4)


def made(model: Weights, rule: str, placement: str, schedule: str, options: dict[str, Any]) -> Any:
    asked: Any = {"stats": tilestep.Stats(every=EVERY), "track_changes": True}
    optimizer: Any = tilestep.Optimizer(model.named, rule, **RULES[rule], **options, **asked)
    return ways.attached(optimizer, model, placement, schedule)


class Case:
    """One combination; found again by the processes that run it."""

    def __init__(self, *choice: str) -> None:
        self.choice, self.__name__ = choice, ", ".join(choice)

    def __call__(self) -> None:
        rule, storage, placement, schedule = self.choice
        dtype, options = {**STORAGES, **STORAGES_OF_LARGE}[storage]
        shapes = [shape for shape in (LARGE if storage == IN_BLOCKS else SHAPES) if rule != "Muon" or len(shape) == 2]
        channels_last = placement in ("plain", "shard", "shard and copy") and not schedule.startswith("streamed")
        plain, model = (Weights(shapes, dtype, channels_last) for _ in range(2))
        placed(model, placement)
        expected = made(plain, rule, "plain", "at the step", options)
        optimizer = made(model, rule, placement, schedule, options)
        before = [whole(param) for param in model.weights]
        changed = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in before]
        for step in range(1, STEPS + 1):
            gradients = gradients_of(plain, step)
            for weight, gradient in zip(plain.weights, gradients):
                weight.grad = gradient.clone()
            expected.step()
            backward(model, gradients)
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                self.compare_statistics(optimizer, expected, exact=storage == "float32")
            now = [whole(param) for param in model.weights]
            for flags, old, new in zip(changed, before, now):
                flags |= old != new
            before = now
            if step % 3 == 0 or step == STEPS:
                self.compare_changes(optimizer, changed, now)
                changed = [torch.zeros_like(flags) for flags in changed]
        assert list(optimizer.changes()) == [] and list(optimizer.changes(gather=True)) == []

    def compare_statistics(self, optimizer: Any, expected: Any, *, exact: bool) -> None:
        assert optimizer.stats.step == expected.stats.step
        mine, theirs = optimizer.stats.read(), expected.stats.read()
        assert list(mine) == list(theirs)
        for name, column in itertools.product(theirs, next(iter(theirs.values()))):
            number, wanted = mine[name][column], theirs[name][column]
            if self.choice[0] in ("LAMB", "Muon", "Adafactor", "Prodigy") or not exact:
                # Their parameters themselves are equal only but for the order of sums.
                close = number == pytest.approx(wanted, rel=2e-3, abs=2e-3, nan_ok=True)
            else:
                close = number == pytest.approx(wanted, rel=1e-6, abs=1e-12, nan_ok=True)
            assert close, (name, column, number, wanted)
        table = on_device(optimizer.stats.table.contiguous())
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
        dist.all_gather(tables, table)
        assert all(torch.equal(table.nan_to_num(), tables[0].nan_to_num()) for table in tables)

    def compare_changes(self, optimizer: Any, changed: list[torch.Tensor], now: list[torch.Tensor]) -> None:
        own = {name: (indices.long(), values) for name, indices, values in optimizer.changes(clear=False)}
        everything = {name: (indices, values) for name, indices, values in optimizer.changes(gather=True)}
        for place, (flags, new) in enumerate(zip(changed, now)):
            wanted = flags.reshape(-1).nonzero().reshape(-1)
            if not len(wanted):
                assert f"w{place}" not in everything and f"w{place}" not in own
                continue
            indices, values = everything[f"w{place}"]
            assert indices.dtype is torch.int32 and torch.equal(indices.long(), wanted), f"w{place}"
            assert torch.equal(values, new.reshape(-1)[wanted])
            mine, its = own.get(f"w{place}", (wanted[:0], new.reshape(-1)[:0]))
            assert torch.equal(its, new.reshape(-1)[mine])
            times = torch.zeros(flags.numel(), dtype=torch.int64, device=flags.device)
            times[mine] += 1
            dist.all_reduce(times)
            copies = 2 if "copy" in self.choice[2] or self.choice[2] == "hsdp" else 1
            copies = dist.get_world_size() if self.choice[2] == "plain" else copies
            assert torch.equal(times, flags.reshape(-1).long() * copies)


def sample(placements: tuple[str, ...], rules: int) -> list[Case]:
    """For every placement and schedule that go together some rules and storages."""
    pairs = [pair for pair in itertools.product(placements, SCHEDULES) if goes_together(*pair)]
    drawn = random.Random(0)
    cases = []
    for pair in pairs:
        # Prodigy reduces over all tensors, as an overlap cannot.
        fitting = [rule for rule in RULES if rule != "Prodigy" or pair[1] not in ("backward", "forward")]
        cases += [Case(rule, drawn.choice(list(STORAGES)), *pair) for rule in drawn.sample(fitting, rules)]
    return cases


WAYS = [
    ("fsdp2", "at the step"),
    ("fsdp2", "backward"),
    ("fsdp2", "forward"),
    ("fsdp2", "on the host"),
    ("fsdp2", "streamed gradients"),
    ("plain", "forward"),
    ("plain", "on the host"),
    ("shard", "at the step"),
]


def attached(way: tuple[str, str], dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Weights, Any]:
    model = Weights(SHAPES, dtype, channels_last=way[0] not in ("fsdp2", "columns"))
    placed(model, way[0])
    return model, made(model, "AdamW", *way, options)


def step(model: Weights, optimizer: Any, seed: int, wrong: int | None = None, scaler: Any = None) -> None:
    gradients = gradients_of(model, seed)
    if wrong is not None and dist.get_rank() == 0:
        gradients[wrong].view(-1)[0] = float("inf")
    backward(model, gradients, scaler)
    optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()


def writes_from_outside_mark_their_tensor_alone() -> None:
    for way in WAYS:
        model, optimizer = attached(way)
        for seed in range(2):
            step(model, optimizer, seed)
        list(optimizer.changes())
        with torch.no_grad():
            model.weights[1].mul_(2.0)
        listed = {name: (indices, values) for name, indices, values in optimizer.changes(gather=True)}
        assert list(listed) == ["w1"], way
        assert listed["w1"][0].tolist() == list(range(70 * 65))
        assert torch.equal(listed["w1"][1], whole(model.weights[1]).reshape(-1))
        before = [whole(param) for param in model.weights]
        step(model, optimizer, 2)
        now = [whole(param) for param in model.weights]
        listed = {name: (indices, values) for name, indices, values in optimizer.changes(gather=True)}
        for place, (old, new) in enumerate(zip(before, now)):
            assert torch.equal(listed[f"w{place}"][0].long(), (old != new).reshape(-1).nonzero().reshape(-1)), way


def skipped_steps_change_nothing_and_have_a_name() -> None:
    for way in WAYS:
        model, optimizer = attached(way, skip_nonfinite=True)
        if way[0] == "plain":
            continue  # each rank steps for itself
        step(model, optimizer, 0)
        list(optimizer.changes())
        step(model, optimizer, 1, wrong=2)
        assert list(optimizer.changes(gather=True)) == [], way
        row = optimizer.stats.read()["w2"]
        assert optimizer.first_nonfinite() == "w2" and row["update_norm"] == 0 and row["param_norm"] > 0, way
        assert int(optimizer.skipped_steps) == 1


def gradients_that_are_there_now_are_looked_at() -> None:
    for way in (("fsdp2", "at the step"), ("fsdp2", "streamed gradients"), ("shard", "at the step")):
        model, optimizer = attached(way)
        gradients = gradients_of(model, 0)
        model(gradients).backward()
        assert optimizer.first_nonfinite() is None, way
        if dist.get_rank() == 1:
            gradients[3][0] = float("nan")
        model(gradients).backward()
        assert optimizer.first_nonfinite() == "w3", way


def a_parameter_that_is_given_other_memory_is_the_only_one_that_has_changed() -> None:
    model, optimizer = attached(("shard", "at the step"))
    for seed in range(2):
        step(model, optimizer, seed)
    list(optimizer.changes())
    model.weights[1].data = model.weights[1].data.clone()
    assert [name for name, *_ in optimizer.changes(gather=True)] == ["w1"]


def a_scaler_skips_and_statistics_are_unscaled() -> None:
    for way in (("fsdp2", "at the step"), ("fsdp2", "forward"), ("shard", "at the step")):
        model, optimizer = attached(way)
        plain = Weights(SHAPES, torch.float32)
        expected = made(plain, "AdamW", "plain", "at the step", {})
        scaler = tilestep.GradScaler(device_type(), init_scale=64.0)
        for seed in range(2):
            for weight, gradient in zip(plain.weights, gradients_of(plain, seed)):
                weight.grad = gradient
            expected.step()
            step(model, optimizer, seed, scaler=scaler)
        mine, theirs = optimizer.stats.read(), expected.stats.read()
        assert mine["w1"]["grad_norm"] == pytest.approx(theirs["w1"]["grad_norm"], rel=1e-6)
        list(optimizer.changes())
        step(model, optimizer, 2, wrong=0, scaler=scaler)
        assert list(optimizer.changes(gather=True)) == [], way


def ranks_without_a_piece_have_all_columns() -> None:
    """One rank has all of a matrix whose rule works on whole ones, another nothing of a group."""
    model = Weights([(6, 9), (5,)], torch.float32)
    weight, bias = model.weights
    groups = [
        {"params": [("weight", weight)], "rule": "Muon", "lr": 0.02},
        {"params": [("bias", bias)], "rule": "Adafactor", "lr": 0.02},
    ]
    optimizer: Any = tilestep.SGD(groups, lr=0.1, stats=tilestep.Stats(), track_changes=True)
    tilestep.shard(optimizer, model)
    gradients = [torch.ones_like(weight), torch.ones_like(bias), on_device(torch.ones(3, 2))]
    late = nn.Parameter(gradients[2].clone())
    model.weights.append(late)
    model(gradients[:2]).backward()
    optimizer.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (optimizer.stats.columns, str(optimizer.stats.read())))
    assert all(tensor == everyone[0] for tensor in everyone)
    assert optimizer.stats.read()["weight"]["momentum_buffer_norm"] > 0
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.5})
    model(gradients).backward()
    optimizer.step()
    assert optimizer.stats.read()["late"]["update_norm"] == pytest.approx(0.5 * 6**0.5)
    assert [name for name, _, _ in optimizer.changes(gather=True)] == ["weight", "bias", "late"]


def narrower_parameters_are_refused() -> None:
    model = Weights([(6, 9)], torch.float32)
    optimizer = tilestep.AdamW(model.parameters(), track_changes=True)
    with pytest.raises(ValueError, match="with this param_sync_dtype each rank keeps exact weights"):
        tilestep.shard(optimizer, model, param_sync_dtype=torch.bfloat16)
    optimizer.param_groups[0]["param_sync_dtype"] = torch.bfloat16
    with pytest.raises(ValueError, match="with this param_sync_dtype each rank keeps exact weights"):
        tilestep.shard(optimizer, model)
    del optimizer.param_groups[0]["param_sync_dtype"]
    tilestep.shard(optimizer, model, param_sync_dtype=torch.uint8)


CHECKS = [
    writes_from_outside_mark_their_tensor_alone,
    skipped_steps_change_nothing_and_have_a_name,
    gradients_that_are_there_now_are_looked_at,
    a_parameter_that_is_given_other_memory_is_the_only_one_that_has_changed,
    a_scaler_skips_and_statistics_are_unscaled,
    ranks_without_a_piece_have_all_columns,
    narrower_parameters_are_refused,
]

SHARDED_BLOCKS = [
    *(Case(rule, IN_BLOCKS, "shard", "at the step") for rule in ("AdamW", "LAMB", "Muon")),
    Case("AdamW", IN_BLOCKS, "shard", "streamed"),
]
ON_TWO = [*CHECKS, *SHARDED_BLOCKS, *sample(("plain", "fsdp2", "columns", "shard"), 2)]
ON_FOUR = [Case("Lion", IN_BLOCKS, "shard and copy", "at the step"), *sample(("hsdp", "shard and copy"), 1)]


test_on_two_ranks = each_passes(ON_TWO, 2)
test_on_four_ranks = each_passes(ON_FOUR, 4)
