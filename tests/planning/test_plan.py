"""Plans of sharded trainings: their memory is what optimizers keep, and their arithmetic is what it claims."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from module_files import load

import tilestep
from tilestep.placement import Ranks
from tilestep.planning import Constants, Job, best_bucket, crossover, footprint, meshes, plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adafactor", "Muon", "SOAP", "Prodigy", "LAMB"])
def test_state_is_what_an_optimizer_keeps(name: str, master_weights: bool, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = tilestep.Optimizer([weight], name, master_weights=master_weights)
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    planned = footprint(tilestep.registry[name], dtype=dtype, master_weights=master_weights)
    kept = sum(
        value.numel() * value.element_size()
        for value in optimizer.state[weight].values()
        if isinstance(value, torch.Tensor)
    )
    # Numbers for each row, column and tensor are left out of the plan, which says so.
    assert 0 <= kept - planned.state * weight.numel() <= 8 * (64 + 64 + 8)
    assert planned.parameter == dtype.itemsize == planned.gradient


def llama_8b() -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of Llama 3.1 8B, without memory."""
    layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "gate": (14336, 4096)}
    layer |= {"up": (14336, 4096), "down": (4096, 14336), "input_norm": (4096,), "inner_norm": (4096,)}
    shapes = {f"layers.{number}.{name}": shape for number in range(32) for name, shape in layer.items()}
    shapes |= {"embed_tokens": (128_256, 4096), "norm": (4096,), "lm_head": (128_256, 4096)}
    empty = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    return [(name, torch.nn.Parameter(tensor)) for name, tensor in empty.items()]


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "float8_e4m3", "bfloat16"])
@pytest.mark.parametrize("master_weights", ["int8", "kahan", "remainder", True])
def test_bytes_of_formats_are_those_of_8_b_parameters(state_dtype: str, master_weights: Any) -> None:
    """Seven bytes a parameter with int8, five where gradients go in backward: as planned, and as an optimizer keeps."""
    params = llama_8b()
    elements = sum(param.numel() for _, param in params)
    optimizer: Any = tilestep.AdamW(params, state_dtype=lambda name: state_dtype, master_weights=master_weights)
    for _, param in params:
        param.grad = torch.empty_like(param)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    needs = footprint(
        tilestep.registry["AdamW"], dtype=torch.bfloat16, state_dtype=state_dtype, master_weights=master_weights
    )
    assert kept / elements == pytest.approx(needs.state, abs=1e-5)
    alone = Job(elements, needs, shard=1, clips=False, bucket=25 * 2**20)
    whole = plan(alone, Constants.load()).memory
    early = plan(dataclasses.replace(alone, in_backward=True), Constants.load()).memory
    assert sum(whole.values()) == elements * (2 + 2 + needs.state)
    assert sum(early.values()) == pytest.approx(elements * (2 + needs.state) + 25 * 2**20, rel=1e-3)
    if state_dtype == master_weights == "int8":
        assert sum(whole.values()) / elements == pytest.approx(7.03, abs=0.005)
        assert sum(early.values()) / elements == pytest.approx(5.03, abs=0.01)


def test_second_moments_of_embeddings_are_more_unless_told_otherwise() -> None:
    params = llama_8b()
    optimizer: Any = tilestep.AdamW(params, state_dtype="int8", master_weights="int8")
    for _, param in params:
        param.grad = torch.empty_like(param)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert kept / sum(param.numel() for _, param in params) == pytest.approx(3.226, abs=1e-3)
    with pytest.raises(ValueError, match="in_backward: updates in backward require one rank and no clipping"):
        job(clips=True, in_backward=True)


def test_what_adamw_moves_is_what_is_known() -> None:
    adamw = tilestep.registry["AdamW"]
    assert footprint(adamw, master_weights=True).moved == 30
    assert footprint(adamw, dtype=torch.float32).moved == 28
    wide = footprint(adamw, master_weights=True, grad_sync_dtype=torch.float32)
    assert (wide.moved, wide.gradient) == (32, 4)


def test_collectives_are_those_of_an_iteration(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = tilestep.shard(tilestep.AdamW(model.parameters(), max_grad_norm=1.0), model, bucket_cap_mb=1 / 64)  # type: ignore[attr-defined]
    calls: list[str] = []
    collectives = [(Ranks, name) for name in ("reduce_scatter", "all_gather", "add_copies")]
    for owner, name in (*collectives, (torch.distributed, "all_reduce")):
        before = getattr(owner, name)

        def counted(*arguments: Any, name: str = name, before: Any = before, **options: Any) -> Any:
            calls.append(name)
            return before(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)
    for _ in range(2):
        calls.clear()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    needs = footprint(tilestep.registry["AdamW"], dtype=torch.float32)
    job = Job(6 * 64 * 64, needs, shard=2, bucket=2**20 / 64)
    # One rank needs no agreement on the norm, nor on which parameters were used.
    assert len(calls) == 6 + 6 and plan(job, Constants.load()).messages == 6 + 6 + 2
    # What it calls is a copy: nothing is sent.
    alone = plan(dataclasses.replace(job, shard=1), Constants.load())
    assert alone.messages == 0 and not any(alone.sent.values())


CONSTANTS = dataclasses.replace(
    Constants.load(),
    reduce_scatter_bandwidth=100.0,
    all_gather_bandwidth=50.0,
    network_bandwidth=10.0,
    launch_latency=1.0,
    hop_latency=0.5,
    network_hop_latency=2.0,
    memory_bandwidth=1000.0,
    step_latency=0.25,
    compute=60.0,
    compiled_compute=120.0,
    model_bytes=1e-9,
    compiled_model_bytes=2e-9,
    model_host=0.25,
    compiled_model_host=0.125,
    step_host=0.5,
    tensor_host=0.0625,
    message_host=0.03125,
    beside_sums=0.5,
    beside_gathers=0.25,
    gpus_per_node=4,
)


def job(**changes: Any) -> Job:
    needs = footprint(tilestep.registry["AdamW"], master_weights=True)
    return Job(**{"elements": 1000, "footprint": needs, "shard": 4, "tokens": 1, "bucket": 500, **changes})


def test_times_are_those_of_the_formula() -> None:
    planned = plan(job(), CONSTANTS)
    latency = 1.0 + 3 * 0.5
    assert planned.times["sum gradients"] == pytest.approx(4 * (latency + 500 * 3 / 4 / 100))
    assert planned.times["gather parameters"] == pytest.approx(4 * (latency + 500 * 3 / 4 / 50))
    assert planned.times["update"] == pytest.approx(1000 / 4 * 30 / 1000 + 0.25)
    assert planned.times["clip"] == pytest.approx(1000 / 4 * 2 / 1000 + 2 * latency)
    assert planned.times["forward"] == pytest.approx(1000 * 2 / 60) and planned.compute == pytest.approx(100)
    assert planned.exposed["sum gradients"] == pytest.approx(latency + 500 * 3 / 4 / 100)
    assert planned.memory == {"parameters": 2000, "gradients": 2000, "state": 3000, "scratch": 0}
    assert planned.whole_state == 12000 and planned.messages == 10
    assert planned.sent == {"reduce-scatter": 1500, "all-reduce": 0, "all-gather": 1500, "all-to-all": 0}
    short = plan(job(bucket=500, contiguous=False, clips=False), dataclasses.replace(CONSTANTS, compute=6e6))
    assert short.memory["gradients"] == 500 and short.memory["scratch"] == 500 and short.exposed["clip"] == 0
    # The first bucket is complete after half of backward, which takes nearly no time.
    assert short.exposed["sum gradients"] == pytest.approx(short.times["sum gradients"], rel=1e-3)


def test_what_waits_for_what_is_simulated_bucket_by_bucket() -> None:
    """Messages of 6.25 (sums) and 10 (gathers) seconds each, four of them, beside 20 of backward and 10 of forward."""
    quick = dataclasses.replace(CONSTANTS, compute=200.0)
    planned = plan(job(), quick)
    assert (planned.times["backward"], planned.times["forward"]) == (pytest.approx(20), pytest.approx(10))
    # Sums begin at 5 and end at 30; the third and fourth wait for those before.
    assert planned.exposed["sum gradients"] == pytest.approx(10)
    # Every quarter of forward, 2.5 long, waits for its gather: the last one begins at 40.
    assert planned.exposed["gather parameters"] == pytest.approx(32.5)
    assert planned.exposed["communication beside the model"] == pytest.approx(15 * 0.5 + 7.5 * 0.25)
    for changes in ({"regime": "whole"}, {"captured": True}):
        at_once = plan(job(**changes), quick)
        assert at_once.exposed["gather parameters"] == pytest.approx(40)
    blocks = plan(job(regime="blocks"), quick)
    assert blocks.compute == pytest.approx(50) and blocks.iteration > planned.iteration


def test_the_host_is_what_is_waited_for_where_it_takes_longer() -> None:
    planned = plan(job(tensors=1000), CONSTANTS)
    assert (
        planned.host == pytest.approx(0.5 + 4 * 0.03125 + 1000 * (0.25 + 0.0625)) and planned.iteration == planned.host
    )
    assert plan(job(tensors=1000, regime="blocks"), CONSTANTS).host == pytest.approx(0.625 + 1000 * (0.125 + 0.0625))
    replayed = plan(job(tensors=1000, captured=True), CONSTANTS)
    assert replayed.host is None and replayed.iteration < planned.iteration


def test_what_is_not_known_well_is_not_claimed() -> None:
    assert not plan(job(tensors=10), CONSTANTS).unclaimed and not plan(job(captured=True), CONSTANTS).unclaimed
    reasons = {
        "depends on the host": job(tensors=1000),
        "the number of tensors": job(),
        "network": job(shard=8, tensors=10),
        "matrix products": dataclasses.replace(job(tensors=10), footprint=footprint(tilestep.registry["Muon"])),
    }
    for reason, one in reasons.items():
        assert [reason in text for text in plan(one, CONSTANTS).unclaimed] == [True], reason
    with pytest.raises(ValueError, match="Invalid regime: 'fast'"):
        job(regime="fast")


def test_matrix_products_are_those_of_the_rank_that_has_most() -> None:
    needs = footprint(tilestep.registry["Muon"], {"ns_coefficients": "aol"})
    alone = needs.matrix_work
    assert alone is not None and alone(256, 512) == 4 * 2 * (2 * 256**2 * 512 + 256**3)
    matrices = [(5, 256, 512), (1, 2048, 2048)]
    muon = dataclasses.replace(job(shard=2), footprint=needs, matrices=matrices)
    planned, base = plan(muon, CONSTANTS), plan(dataclasses.replace(muon, matrices=()), CONSTANTS)
    assert muon.matrix_work == max(alone(2048, 2048), 5 * alone(256, 512)) and base.times["matrix products"] == 0
    expected = muon.matrix_work / CONSTANTS.matrix_compute
    assert planned.times["matrix products"] == planned.exposed["matrix products"] == pytest.approx(expected)
    assert planned.iteration == pytest.approx(base.iteration + expected)
    assert dataclasses.replace(muon, matrices=[(4, 256, 512)]).matrix_work == 2 * alone(256, 512)
    with pytest.raises(ValueError, match="Invalid matrices"):
        dataclasses.replace(muon, matrices=[(2_000_000, 8, 8)])


def test_fsdp2_splits_parameters_and_sends_matrices_to_their_owners() -> None:
    wide = footprint(tilestep.registry["Muon"], dtype=torch.float32)
    alone = wide.matrix_work
    assert alone is not None
    muon = job(footprint=wide, layout="fsdp2", matrices=[(8, 10, 10)], clips=False, bucket=1000, tensors=10)
    planned = plan(muon, CONSTANTS)
    assert planned.memory["parameters"] == planned.memory["gradients"] == planned.memory["state"] == 1000
    # Gathers in bfloat16, in forward and in backward; 200 of 800 elements of matrices are a rank's, there and back.
    assert planned.sent["all-gather"] == 2 * 1000 * 2 * 3 / 4 and planned.sent["all-to-all"] == 2 * 200 * 2 * 3 / 4
    assert planned.messages == 4 * 3 + 2 and planned.times["bring together"] == pytest.approx(1000 * (5 * 2 + 4) / 1000)
    assert planned.times["matrix products"] == pytest.approx(2 * alone(10, 10) / CONSTANTS.matrix_compute)
    exchange, copied = 2 * (2.5 + 200 * 2 * 3 / 4 / 50), 200 * 10 / 1000
    assert planned.times["exchange matrices"] == pytest.approx(exchange + copied)
    assert planned.exposed["exchange matrices"] == pytest.approx(exchange + copied)  # one bucket hides nothing
    assert planned.host == pytest.approx(0.5 + 4 * 0.03125 + 10 * (0.25 + 0.0625 + 4e-4))
    copies = plan(dataclasses.replace(muon, shard=2, replicate=2), CONSTANTS)  # copies divide products too
    assert copies.times["matrix products"] == planned.times["matrix products"]
    large = dataclasses.replace(muon, elements=1e9, bucket=1e9, matrices=[(8, 2**13, 2**13)])
    exchange = 2 * (2.5 + 2**27 * 2 * 3 / 4 / 50)
    hidden = plan(large, CONSTANTS).exposed["exchange matrices"] - 2**27 * 10 / 1000
    assert hidden == pytest.approx(exchange * (0.5 + 0.5 * CONSTANTS.beside_sums))
    assert any("FSDP2's host time" in text for text in planned.unclaimed)
    with pytest.raises(ValueError, match="Invalid layout: 'ddp'; it must be one of shard, fsdp2"):
        job(layout="ddp")


def test_the_network_counts_where_groups_leave_a_node() -> None:
    planned = plan(job(shard=8), CONSTANTS)
    latency = 1.0 + 6 * 0.5 + 1 * 2.0
    assert planned.times["sum gradients"] == pytest.approx(4 * (latency + 500 * 7 / 8 / 40))
    planned = plan(job(shard=4, replicate=3), CONSTANTS)
    inside = 2.5 + 500 * 3 / 4 / 100
    # Each GPU of a node has copies of its section in the others, over its own link.
    copies = 2 * (1.0 + 2 * 2.0 + 125 * 2 / 3 / 10)
    assert planned.times["sum gradients"] == pytest.approx(4 * (inside + copies))
    assert planned.sent["all-reduce"] == pytest.approx(2 * 500 * 2 / 3)


def test_half_of_the_time_is_latency_at_the_crossover() -> None:
    for ranks in (2, 8, 64):
        latency, size = crossover(ranks, CONSTANTS)
        planned = plan(job(elements=size / 2, bucket=size, shard=ranks), CONSTANTS)
        assert planned.times["sum gradients"] == pytest.approx(2 * latency)


def test_the_best_bucket_and_mesh_are_the_best() -> None:
    constants = Constants.load()
    for ranks in (8, 512):
        one = job(elements=1e9, shard=ranks, tokens=8192)
        chosen = plan(dataclasses.replace(one, bucket=best_bucket(one, constants)), constants)
        for size in (1, 16, 100, 400):
            other = plan(dataclasses.replace(one, bucket=size * 2**20), constants)
            assert chosen.iteration <= 1.01 * other.iteration
        planned = list(meshes(one, constants))
        assert {entry.job.ranks for entry in planned} == {ranks} and planned[-1].job.shard == ranks
        states = [entry.memory["state"] for entry in planned]
        assert states == sorted(states, reverse=True)
    assert [entry.job.shard for entry in meshes(job(shard=12), constants)] == [2, 4, 12]


def test_a_job_of_nothing_is_refused() -> None:
    for name in ("elements", "shard", "replicate", "tokens", "bucket"):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            job(**{name: 0})


def test_absurd_sizes_are_refused_and_large_ones_return() -> None:
    """A list of all buckets of 10^21 elements did not end."""
    for name, value in (("elements", 1e21), ("elements", math.inf), ("shard", 10**400), ("tokens", 10**30)):
        with pytest.raises(ValueError, match=f"Invalid {'ranks' if name == 'shard' else name}: it must be at most"):
            job(**{name: value})
    with pytest.raises(ValueError, match="Invalid bucket: 10 bytes; it must be at least"):
        plan(job(elements=1e10, bucket=10), CONSTANTS)
    large = job(elements=1e12, shard=4096, bucket=None)
    assert math.isfinite(plan(large, CONSTANTS).iteration)
    assert best_bucket(large, CONSTANTS) >= large.smallest_bucket


def test_constants_are_kept_with_their_source(tmp_path: Path) -> None:
    measured = dataclasses.replace(CONSTANTS, sources={**CONSTANTS.sources, "compute": "measured here"})
    measured.save(tmp_path / "all.json")
    assert Constants.load(tmp_path / "all.json") == measured and "compute" not in measured.assumed
    (tmp_path / "some.json").write_text(json.dumps({"compute": {"value": 1.5, "source": "measured"}}))
    some = Constants.load(tmp_path / "some.json")
    assert some.compute == 1.5 and some.gpus_per_node == Constants.load().gpus_per_node
    for wrong in ({"speed": {"value": 1}}, {"compute": {"value": 0}}, {"compute": {"value": "fast"}}, {"compute": {}}):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"wrong\.json"):
            Constants.load(tmp_path / "wrong.json")
    assert all(math.isfinite(entry["value"]) for entry in json.loads((tmp_path / "all.json").read_text()).values())


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load(ROOT / "scripts" / "scaling_tables.py")


def test_the_tables_in_the_document_are_current(tables: ModuleType) -> None:
    text = tables.PAGE.read_text()
    assert tables.BLOCK.findall(text) == list(tables.TABLES)
    assert tables.brought_up_to_date(text) == text, "run python scripts/scaling_tables.py"
    assert tables.brought_up_to_date(text.replace("| 8 | 1.2 B |", "| 9 | 1.2 B |")) == text


def test_muons_figures_are_within_a_tenth_of_the_plan(tables: ModuleType) -> None:
    """Recorded steps and iterations on an H200 and on H100s, plain, under FSDP2 and in `shard`."""
    head, *rows = tables.muon_table(Constants.load())
    print("", *(" | ".join(row) for row in (head, *rows)), sep="\n")
    assert len(rows) == 8 and {row[1] for row in rows} == {"1 H200", "1 H100", "2 H100", "4 H200"}
    assert all(abs(float(row[-1].rstrip("%"))) <= 10 for row in rows)
