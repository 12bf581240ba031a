"""Statistics and changed weights on a GPU: exact, without a wait of the host, in CUDA graphs too."""

from __future__ import annotations

import warnings
from typing import Any

import measured_blocks
import pytest
import test_stats_placements as placements
import torch
import torch.distributed as dist
from rank_processes import each_passes
from synchronization import no_synchronization
from test_changes import parameters, train
from test_outputs import compare
from test_stats import check, give_gradients

import tilestep
from tilestep.backends.triton import run


def on_gpu(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    shapes = ((300, 257), (64, 32, 3, 3), (7,), (1,), (1000, 1001))
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype).cuda()) for shape in shapes]


def fill(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.normal_(generator=generator)
        param.grad.view(-1)[::3] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", ["AdamW", "SGD", "LAMB", "Adafactor", "Prodigy"])
def test_numbers_and_equal_steps(rule: str, dtype: torch.dtype) -> None:
    params, plain = on_gpu(dtype), on_gpu(dtype)
    kind = getattr(tilestep, rule)
    optimizer, twin = kind(params, lr=0.05, stats=tilestep.Stats(every=2)), kind(plain, lr=0.05)
    for step in range(1, 5):
        before = [param.detach().clone() for param in params]
        fill(params, step)
        fill(plain, step)
        optimizer.step()
        twin.step()
        assert all(map(torch.equal, params, plain)), step
        if step % 2 == 0:
            check(optimizer, params, before, 1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor"])
def test_outputs_of_a_test(rule: str) -> None:
    compare(rule, {}, device="cuda")
    compare(rule, {"state_dtype": lambda _: "int8"}, device="cuda")


@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
@pytest.mark.parametrize("which", measured_blocks.OPTIONS)
def test_states_in_blocks(which: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_blocks, "SHAPES", (*measured_blocks.SHAPES, (300, 257), (1000, 1024)))
    measured_blocks.compare(which, rule, "cuda")


@pytest.mark.parametrize("rule", ["LAMB", "Adafactor"])
@pytest.mark.parametrize("which", ["int8", "float8_e4m3", "int4"])
def test_lists_alone_of_rules_over_rows_with_states_in_blocks(
    which: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without statistics kernels are others; bits of whole tiles are packed by sums, which Triton miscounts in some."""
    monkeypatch.setattr(measured_blocks, "SHAPES", (*measured_blocks.SHAPES, (300, 257), (1000, 1024)))
    dtype, options = measured_blocks.OPTIONS[which]
    params = measured_blocks.parameters(dtype, "cuda")
    options = {**options, "state_dtype": lambda _: which, "lr": 1e-3}
    assert train(tilestep.Optimizer(params, rule, **options, track_changes=True), params) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_that_walk_several_spans(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_ENOUGH_PROGRAMS", 32)
    params, plain = on_gpu(dtype), on_gpu(dtype)
    options = {"lr": 0.05, "skip_nonfinite": True}
    optimizer = tilestep.AdamW(params, stats=tilestep.Stats(), track_changes=True, **options)
    twin = tilestep.AdamW(plain, **options)
    for step in range(1, 4):
        before = [param.detach().clone() for param in params]
        fill(params, step)
        params[3].grad.fill_(torch.inf if step == 2 else 1.0)
        for param, other in zip(params, plain):
            other.grad = param.grad.clone()
        optimizer.step()
        twin.step()
        row = optimizer.stats.read()
        lists = {name: indices.long() for name, indices, _ in optimizer.changes()}
        for place, (param, other, old) in enumerate(zip(params, plain, before)):
            assert torch.equal(param, other), step
            wanted = (param.detach() != old).view(-1).nonzero().view(-1)
            assert torch.equal(lists.get(f"0.{place}", wanted[:0]), wanted)
            tensors = {"param": param, "exp_avg": optimizer.state[param]["exp_avg"]}
            for name, tensor in tensors.items():
                exact = tensor.detach().double()
                assert row[f"0.{place}"][f"{name}_norm"] == pytest.approx(exact.norm().item(), rel=1e-5)
                assert row[f"0.{place}"][f"{name}_max"] == exact.abs().max().item()


def test_norms_of_states_of_any_size() -> None:
    param = torch.nn.Parameter(torch.ones(100_000, device="cuda"))
    optimizer = tilestep.AdamW([param], lr=0.0, stats=tilestep.Stats())
    for scale in (1e-13, 1e-4, 1.0, 1e9):
        param.grad = torch.full_like(param, scale)
        param.grad[::2] *= 1e-3
        optimizer.step()
        exact = optimizer.state[param]["exp_avg_sq"].double().norm().item()
        assert optimizer.stats.read()["0.0"]["exp_avg_sq_norm"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("masters", [False, True, "remainder", "kahan", "int8"])
def test_lists_are_exact(masters: bool | str) -> None:
    for dtype in (torch.bfloat16,) if masters else (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        train_on_gpu(dtype, masters)


def train_on_gpu(dtype: torch.dtype, masters: bool | str) -> None:
    params = [torch.nn.Parameter(param.detach().cuda()) for param in parameters(dtype)]
    params[2] = torch.nn.Parameter(torch.randn(9, 40, device="cuda").to(dtype)[:, ::2])
    params.append(torch.nn.Parameter(torch.randn(300, 257, device="cuda").to(dtype)))
    optimizer = tilestep.SGD(params, lr=1e-3, master_weights=masters, track_changes=True)
    assert train(optimizer, params) > 0


def test_a_measured_step_waits_for_nothing() -> None:
    params = on_gpu(torch.bfloat16)
    optimizer = tilestep.AdamW(
        params, lr=0.01, max_grad_norm=1.0, stats=tilestep.Stats(every=2), track_changes=True, skip_nonfinite=True
    )
    fill(params, 0)
    for _ in range(4):
        optimizer.step()
    with no_synchronization():
        for _ in range(4):
            optimizer.step()
            table = optimizer.stats.table
    assert bool(table[:, 0].isfinite().all())
    assert optimizer.stats.read()["0.0"]["grad_norm"] == pytest.approx(params[0].grad.float().norm().item(), rel=1e-3)


def test_a_list_waits_once() -> None:
    params = on_gpu(torch.bfloat16)
    optimizer = tilestep.AdamW(params, lr=0.01, track_changes=True)
    fill(params, 0)
    optimizer.step()
    list(optimizer.changes())
    optimizer.step()
    waits = 0
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal waits
        waits += tensor.is_cuda
        torch.cuda.set_sync_debug_mode("default")
        found = tolist(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return found

    torch.Tensor.tolist = counted  # type: ignore[method-assign]
    try:
        with no_synchronization():
            found = list(optimizer.changes())
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    # A single weight may have been lost to rounding.
    assert waits == 1 and len(found) >= len(params) - 1


def test_skipped_steps() -> None:
    params = on_gpu(torch.float32)
    optimizer = tilestep.AdamW(params, lr=0.1, skip_nonfinite=True, stats=tilestep.Stats(), track_changes=True)
    fill(params, 0)
    optimizer.step()
    kept = optimizer.stats.read()
    list(optimizer.changes())
    params[3].grad.fill_(torch.inf)
    optimizer.step()
    assert list(optimizer.changes()) == [] and optimizer.first_nonfinite() == "0.3"
    row = optimizer.stats.read()
    for name in row:
        assert row[name]["update_norm"] == 0 and row[name]["exp_avg_norm"] == kept[name]["exp_avg_norm"]


def test_statistics_and_changes_in_a_graph() -> None:
    params, plain = on_gpu(torch.float32), on_gpu(torch.float32)
    optimizer = tilestep.AdamW(params, lr=0.05, stats=tilestep.Stats(), track_changes=True)
    twin = tilestep.AdamW(plain, lr=0.05)
    for each in (params, plain):
        fill(each, 0)
    optimizer.step()
    twin.step()
    list(optimizer.changes())
    optimizer.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for seed in (1, 2):
        before = [param.detach().clone() for param in params]
        fill(params, seed)
        fill(plain, seed)
        graph.replay()
        twin.step()
        assert all(map(torch.equal, params, plain))
        check(optimizer, params, before, 1e-5)
        found = {name: indices for name, indices, _ in optimizer.changes()}
        for place, (param, old) in enumerate(zip(params, before)):
            wanted = (param.detach() != old).view(-1).nonzero().view(-1)
            assert torch.equal(found[f"0.{place}"].long(), wanted)


def test_gradients_of_parameters_on_gpu_by_the_cpu_tests_own_seeds() -> None:
    params = on_gpu(torch.float32)[:1]
    host = [torch.nn.Parameter(params[0].detach().cpu())]
    give_gradients(host, 1)
    params[0].grad = host[0].grad.cuda()
    tables = []
    for each in (params, host):
        optimizer = tilestep.AdamW(each, lr=0.1, stats=tilestep.Stats())
        optimizer.step()
        tables.append(optimizer.stats.read()["0.0"])
    for column in tables[0]:
        assert tables[0][column] == pytest.approx(tables[1][column], rel=1e-5), column


def lists_of_all_ranks_wait_once() -> None:
    """The first list of a plan brings tables to the device; later ones wait for the numbers alone."""
    for way in (("fsdp2", "at the step"), ("fsdp2", "backward"), ("columns", "at the step"), ("shard", "at the step")):
        model, optimizer = placements.attached(way)
        for seed in range(3):
            placements.step(model, optimizer, seed)
            dist.barrier()
            torch.cuda.synchronize()
            if seed:
                with warnings.catch_warnings(record=True) as waits:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    try:
                        found = list(optimizer.changes(gather=True))
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                waited = [str(each.message) for each in waits if "called a synchronizing" in str(each.message)]
                assert len(waited) == 1, (way, waited)
                assert len(found) == len(placements.SHAPES)
            else:
                list(optimizer.changes(gather=True))


def measured_steps_wait_for_nothing() -> None:
    for way in (("fsdp2", "at the step"), ("fsdp2", "backward"), ("fsdp2", "forward"), ("shard", "at the step")):
        model, optimizer = placements.attached(way)
        for seed in range(3):
            placements.step(model, optimizer, seed)
        gradients = placements.gradients_of(model, 4)
        dist.barrier()
        torch.cuda.synchronize()
        model(gradients).backward()
        with no_synchronization():
            optimizer.step()
            table = optimizer.stats.table
        assert optimizer.stats.step == 4 and bool(table[:, 0].isfinite().all()), way


ON_TWO_GPUS = [lists_of_all_ranks_wait_once, measured_steps_wait_for_nothing, *placements.ON_TWO]

test_two_gpus = pytest.mark.two_gpus(each_passes(ON_TWO_GPUS, 2, backend="nccl"))
