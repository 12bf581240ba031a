"""The parts of benchmarks/shard_figures.py: each is run by all ranks together and gives what one of them reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shard_bench import Bench
from shard_beside import beside
from shard_contenders import CONTENDERS, MESHES, Trained, compiled_blocks, make_model
from shard_iterations import iterations
from timing import quartiles
from torch import nn

import tilestep
from tilestep import native

__all__ = ["ON_REQUEST", "PARTS", "REPLAYED", "Bench"]

REPLAYED = "step, replayed from a CUDA graph"

BYTES_OF_AN_UPDATE = 30
"""For each element: bfloat16 gradient and parameter, float32 master and two moments read and written."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def collectives(bench: Bench) -> dict[str, Any]:
    """Time of reduce-scatter and all-gather by size, over all ranks and over two of them; what a step starts with."""
    sizes = [2**12, 2**16] if bench.quick else [2**12, 2**16, 2**20, 2**22, 2**24, 25 * 2**20, 2**26, 2**28]
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, bench.ranks - 1, 2)]
    found: dict[str, Any] = {"all ranks": _collectives(bench, sizes, dist.group.WORLD)}
    if bench.ranks > 2 and bench.ranks % 2 == 0:
        found["two ranks"] = _collectives(bench, sizes, pairs[dist.get_rank() // 2])
    number = torch.zeros(1, dtype=torch.float64, device=bench.device)
    found["all-reduce of one number, ms"] = bench.elapsed(lambda: dist.all_reduce(number), 50)
    return found


def _collectives(bench: Bench, sizes: list[int], group: Any) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = []
    for size in sizes:
        section = size // 2 // ranks
        flat = torch.zeros(section * ranks, dtype=torch.bfloat16, device=bench.device)
        own = flat[rank * section : (rank + 1) * section]
        count = 5 if size >= 2**26 or bench.quick else 20
        reduce = bench.elapsed(lambda own=own, flat=flat: _reduce_scatter(own, flat, group=group), count)
        gather = bench.elapsed(lambda own=own, flat=flat: _all_gather(flat, own, group=group), count)
        rows.append({"bytes": size, "reduce_scatter_ms": reduce, "all_gather_ms": gather})
    return {"ranks": ranks, "rows": rows}


def sharded(bench: Bench) -> dict[str, Any]:
    """Memory of a rank, the parts of a step, the update on the shard beside a copy, and the host's part of a step."""
    bench.warm_up()
    bench.forget_peak()
    before = bench.allocated()
    trained = CONTENDERS["sharded"](bench.shape, bench.device)
    construction = bench.peak() - before
    for _ in range(3):
        bench.backward(trained, bench.batches[-1])
        trained.step()
    found = {"memory": _memory(bench, trained, before, construction)}
    bench.note(found)
    count = 3 if bench.quick else 25
    found["host"] = {"step": bench.host(trained.step, lambda: bench.backward(trained, 1), count)}
    bench.note(found)
    found["parts of a step"] = _parts_of_a_step(bench, trained)
    bench.note(found)
    if bench.device.type == "cuda":
        found["host"][REPLAYED] = _host_of_replays(bench, trained, count)
    return found


def _host_of_replays(bench: Bench, trained: Trained, count: int) -> dict[str, float]:
    """The host's part of steps that are replayed from a CUDA graph."""
    bench.backward(trained, 1)
    captured = tilestep.capture(trained.optimizer)
    captured.replay()
    return bench.host(captured.replay, lambda: bench.backward(trained, 1), count)


def _memory(bench: Bench, trained: Trained, before: int, construction: int) -> dict[str, Any]:
    """What is kept between steps, by what the allocator says too, and what a step takes beside it."""
    model, optimizer = trained.model, trained.optimizer
    elements = sum(param.numel() for param in model.parameters())
    held = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    buckets = optimizer.execution.sharding.buckets
    flat = sum(bucket.layout.numel * (bucket.flat.itemsize + bucket.grad_dtype.itemsize) for bucket in buckets)
    bench.backward(trained, 1)
    bench.forget_peak()
    allocated = bench.allocated()
    optimizer.step()
    optimizer.wait()
    share = 12 * elements / bench.ranks
    return {
        "elements": elements,
        "tensors": len(list(model.parameters())),
        "state_bytes": held,
        "state_over_its_share": round(held / share - 1, 5),
        "parameters_and_gradients_bytes": flat,
        "allocated_bytes": allocated - before,
        "all_beside_parameters_and_gradients_over_its_share": round((allocated - before - flat) / share - 1, 5),
        "buckets": len(buckets),
        "bucket_bytes": max(bucket.layout.numel * bucket.grad_dtype.itemsize for bucket in buckets),
        "scratch_of_a_step_bytes": bench.peak() - allocated,
        "construction_peak_bytes": construction,
    }


def _parts_of_a_step(bench: Bench, trained: Trained) -> dict[str, Any]:
    """What a step does, each alone and again and again; the update in turns with a copy."""
    optimizer, members = trained.optimizer, trained.optimizer.execution.sharding.members
    bench.backward(trained, 1)
    trained.optimizer.execution.complete_gradients(trained.optimizer)
    count = 3 if bench.quick else 20
    found: dict[str, Any] = {"clip_and_update_ms": bench.elapsed(optimizer.update, count)}
    for group in optimizer.param_groups:
        group["max_grad_norm"] = None

    def gather() -> None:
        trained.optimizer.execution.parameters.gather()
        trained.optimizer.execution.parameters.publication.wait_all()

    found["gather_ms"] = bench.elapsed(gather, 3 if bench.quick else 10)
    size = 2**20 if bench.quick else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    works = {"update_ms": optimizer.update, "copy_ms": lambda: target.copy_(source)}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, 3 if bench.quick else 9):
        for name, work in works.items():
            measured = bench.turn(work, count)
            if turn >= 0:
                times[name].append(measured)
    found.update({name: quartiles(values) for name, values in times.items()})
    pieces = sum(member.piece.numel() for member in members if member.piece is not None)
    moved = pieces * BYTES_OF_AN_UPDATE / found["update_ms"]["median"] * 1e3
    copied = 2 * size / found["copy_ms"]["median"] * 1e3
    trained.drop()
    return {
        **found,
        "copy_bytes_per_second": copied,
        "update_bytes_per_second": moved,
        "update_of_copy": round(moved / copied, 4),
    }


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()


class Many(nn.Module):
    """Parameters that get their gradients without a model."""

    def __init__(self, count: int, elements: int, device: torch.device) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(torch.ones(elements, dtype=torch.bfloat16, device=device)) for _ in range(count)
        )


def host_of_many(bench: Bench) -> dict[str, Any]:
    """Host time of backward and step for 219 and 2,000 tensors of 64 k elements."""
    if not bench.quick:
        native.wait()
    found: dict[str, Any] = {}
    calls = 2 if bench.quick else 15
    for count in (20,) if bench.quick else (219, 2000):
        model = Many(count, 2**16, bench.device)
        params = list(model.params)
        gradients = [torch.ones_like(param) for param in params]
        plain = bench.host(partial(torch.autograd.backward, params, gradients), model.zero_grad, calls)
        model.zero_grad()
        optimizer = tilestep.AdamW(params, lr=1e-3, max_grad_norm=1.0, master_weights=True)  # type: ignore[attr-defined]
        optimizer = tilestep.shard(optimizer, model)

        def backward(params: Any = params, gradients: Any = gradients) -> None:
            torch.autograd.backward(params, [gradient.clone() for gradient in gradients])

        step = bench.host(optimizer.step, backward, calls)
        given = [gradient.clone() for gradient in gradients]
        both = bench.host(partial(torch.autograd.backward, params, given), optimizer.step, calls)

        def trained(backward: Any = backward, optimizer: Any = optimizer) -> None:
            backward()
            optimizer.step()

        looked_up = bench.host(partial(list, model.params), trained, calls)
        buckets = len(optimizer.execution.sharding.buckets)
        found[str(count)] = {
            "step": step,
            "looking parameters up after it": looked_up,
            "backward": both,
            "backward of plain tensors": plain,
            "buckets": buckets,
        }
        bench.note(found)
        del model, params, gradients, optimizer, given, backward, trained, both
        bench.forget_peak()
    return found


COMPILED = (
    "sharded",
    "sharded_peers",
    "fully_sharded_ours",
    "fully_sharded_forward",
    "fully_sharded",
    "sharded_waiting",
)


def compiled(bench: Bench) -> dict[str, Any]:
    """Iterations of models whose blocks are compiled, each by itself."""
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return iterations(bench, COMPILED)


def captured(bench: Bench) -> dict[str, Any]:
    """Iterations in one CUDA graph beside those that the host launches: of eager blocks, and of compiled ones."""
    names, found, now = ("sharded", "sharded_captured"), {}, time.monotonic()
    half = None if bench.until is None else now + (bench.until - now) / 2
    eager = replace(bench, until=half, note=lambda more: bench.note({"eager": more}))
    found["eager"] = iterations(eager, names)
    fast = replace(bench, note=lambda more: bench.note({**found, "compiled": more}))
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return {**found, "compiled": iterations(fast, names)}


def meshes(bench: Bench) -> dict[str, Any]:
    """Iterations on every mesh of the ranks: shards x replicas."""
    names = (f"sharded_{shard}x{copies}" for shard, copies in MESHES if shard * copies == bench.ranks)
    return iterations(bench, (*names, "data_parallel_master"))


def meshes_compiled(bench: Bench) -> dict[str, Any]:
    """The same with every block compiled by itself."""
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return meshes(bench)


RIVALS = ("sharded_peers", "apex", "megatron", "apex_remainder", "sharded_remainder", "sharded")


def rivals(bench: Bench) -> dict[str, Any]:
    """Iterations beside those of other sharded optimizers, as far as they can be imported; eager."""
    return iterations(bench, RIVALS)


def rivals_compiled(bench: Bench) -> dict[str, Any]:
    """The same with every block compiled by itself."""
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return iterations(bench, RIVALS)


def peers(bench: Bench) -> dict[str, Any]:
    """Iterations of compiled blocks whose parameters are fetched by copy engines, beside those that are sent."""
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return iterations(bench, ("sharded", "sharded_sent"))


def whole(bench: Bench) -> dict[str, Any]:
    """Iterations of models that are compiled as a whole."""
    with compiled_blocks("aot_eager" if bench.quick else "inductor", whole=True):
        return iterations(bench, ("sharded", "sharded_sent"))


def models(bench: Bench) -> dict[str, Any]:
    """Forward and backward of the model alone, eager and with compiled blocks: time by tokens, and the host's part."""
    params = list(make_model(bench.shape, torch.device("meta"), torch.bfloat16).parameters())
    found: dict[str, Any] = {"elements": sum(map(torch.Tensor.numel, params)), "tensors": len(params)}
    found["eager"] = _model(replace(bench, note=lambda more: bench.note({**found, "eager": more})))
    fast = replace(bench, note=lambda more: bench.note({**found, "compiled": more}))
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        return {**found, "compiled": _model(fast)}


def _model(bench: Bench) -> dict[str, Any]:
    bench.forget_peak()
    trained = Trained(make_model(bench.shape, bench.device, torch.bfloat16), None, lambda: None, lambda: None)
    texts = {batch: bench.text(batch) for batch in (1, 2 if bench.quick else 3, 3 if bench.quick else 6)}

    def run(batch: int) -> None:
        trained.model(texts[batch]).backward()

    for batch in texts:
        run(batch)
    times: dict[int, list[float]] = {batch: [] for batch in texts}
    for _ in range(2 if bench.quick else 5):
        for batch, own in times.items():
            own.append(bench.period(partial(run, batch), 2))
    found: dict[str, Any] = {f"batch {batch}, ms": quartiles(own) for batch, own in times.items()}
    bench.note(found)
    return {**found, "host_ms": bench.host(partial(run, 1), lambda: None, 3 if bench.quick else 8)}


ON_REQUEST = (
    "compiled",
    "captured",
    "models",
    "beside",
    "rivals",
    "rivals_compiled",
    "peers",
    "whole",
    "meshes",
    "meshes_compiled",
)
"""Parts that run where they are named: compiling blocks takes longer than all others."""

PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "sharded": sharded,
    "iterations": iterations,
    "host_of_many": host_of_many,
    "collectives": collectives,
    "compiled": compiled,
    "captured": captured,
    "models": models,
    "beside": beside,
    "rivals": rivals,
    "rivals_compiled": rivals_compiled,
    "peers": peers,
    "whole": whole,
    "meshes": meshes,
    "meshes_compiled": meshes_compiled,
    "zero_redundancy": partial(iterations, names=("sharded", "zero_redundancy")),
}
