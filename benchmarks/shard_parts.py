"""The parts of benchmarks/shard_figures.py: each is run by all ranks together and gives what one of them reports."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shard_contenders import CONTENDERS, TINY, Shape, Trained
from torch import nn

import tilestep

__all__ = ["PARTS", "Bench"]

BYTES_OF_AN_UPDATE = 28
"""For each element: bfloat16 gradient and parameter, float32 master and two moments read and written."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Bench:
    """Where and how large.

    Args:
        device: of this rank.
        quick: tiny sizes, which check the harness and measure nothing.
    """

    device: torch.device
    quick: bool

    @property
    def shape(self) -> Shape:
        return TINY if self.quick else Shape()

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.quick else (1, 4)

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def elapsed(self, work: Callable[[], Any], count: int, turns: int = 3, warm: int = 2) -> float:
        """Milliseconds of one call when the host may run ahead: the median of some turns of `count` calls."""
        for _ in range(warm):
            work()
        times = []
        for _ in range(turns):
            self.sync()
            dist.barrier()
            self.sync()
            start = time.perf_counter()
            for _ in range(count):
                work()
            self.sync()
            times.append((time.perf_counter() - start) * 1e3 / count)
        return round(statistics.median(times), 4)

    def host(self, work: Callable[[], Any], before: Callable[[], Any], count: int) -> dict[str, float]:
        """Milliseconds until a call returns, the device idle before it."""
        times = []
        for index in range(count + 3):
            before()
            self.sync()
            dist.barrier()
            self.sync()
            start = time.perf_counter()
            work()
            if index >= 3:
                times.append((time.perf_counter() - start) * 1e3)
        return {"median": round(statistics.median(times), 4), "largest": round(max(times), 4)}

    def allocated(self) -> int:
        self.sync()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def peak(self) -> int:
        self.sync()
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def forget_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


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
    """Memory of a rank, iterations and their components, the update on the shard, and the host's part of a step."""
    bench.forget_peak()
    before = bench.allocated()
    trained = CONTENDERS["sharded"](bench.shape, bench.device)
    model, optimizer = trained.model, trained.optimizer
    elements = sum(param.numel() for param in model.parameters())
    held = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    gradients = sum(sums.bucket.layout.numel * 2 for sums in optimizer._sharding.gradients.sums)
    largest = max(bucket.layout.numel * 2 for bucket in optimizer._sharding.buckets)
    memory = {
        "elements": elements,
        "tensors": len(list(model.parameters())),
        "state_bytes": held,
        "state_over_its_share": round(held / (12 * elements / bench.ranks) - 1, 5),
        "parameters_and_gradients_bytes": 2 * elements + gradients,
        "bucket_bytes": largest,
        "construction_peak_bytes": bench.peak() - before,
    }
    found: dict[str, Any] = {"memory": memory, "iterations": _iterations(bench, trained)}
    _backward(trained, _text(bench, 1))
    bench.forget_peak()
    allocated = bench.allocated()
    memory["allocated_bytes"] = allocated - before
    memory["beyond_what_is_known_bytes"] = allocated - before - 2 * elements - gradients - held
    optimizer.step()
    optimizer.wait()
    memory["scratch_of_a_step_bytes"] = bench.peak() - allocated
    found["parts of a step"] = _parts_of_a_step(bench, trained, elements)
    found["host"] = _host(bench, trained, lambda: _backward(trained, _text(bench, 1)))
    return found


def _parts_of_a_step(bench: Bench, trained: Trained, elements: int) -> dict[str, Any]:
    """What a step does, each alone and again and again."""
    sharding = trained.optimizer._sharding
    _backward(trained, _text(bench, 1))
    sharding.ready()
    inner, count = sharding.inner, 3 if bench.quick else 20
    found = {"clip_and_update_ms": bench.elapsed(inner._step, count)}
    for group in inner.param_groups:
        group["max_grad_norm"] = None
    found["update_ms"] = bench.elapsed(inner._step, count)

    def gather() -> None:
        sharding.parameters.gather()
        sharding.parameters.wait_all()

    found["gather_ms"] = bench.elapsed(gather, 3 if bench.quick else 10)
    own = sum(section.numel() for sums in sharding.gradients.sums if (section := sums.section) is not None)
    size = 2**20 if bench.quick else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copied = 2 * size / bench.elapsed(lambda: target.copy_(source), count) * 1e3
    moved = own * BYTES_OF_AN_UPDATE / found["update_ms"] * 1e3
    trained.drop()
    return {
        **found,
        "copy_bytes_per_second": copied,
        "update_bytes_per_second": moved,
        "update_of_copy": round(moved / copied, 4),
    }


def peer(name: str, bench: Bench) -> dict[str, Any]:
    """Iterations of another way to train, and its memory."""
    bench.forget_peak()
    before = bench.allocated()
    trained = CONTENDERS[name](bench.shape, bench.device)
    found: dict[str, Any] = {"what": CONTENDERS[name].__doc__, "iterations": _iterations(bench, trained)}
    states = trained.optimizer.optim.state if hasattr(trained.optimizer, "optim") else trained.optimizer.state
    held = sum(_bytes(value) for state in states.values() for value in state.values())
    found["memory"] = {"state_bytes": held, "allocated_bytes": bench.allocated() - before}
    found["host"] = _host(bench, trained, lambda: _backward(trained, _text(bench, 1)))
    return found


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()


def _text(bench: Bench, batch: int) -> torch.Tensor:
    shape = bench.shape
    generator = torch.Generator(bench.device).manual_seed(dist.get_rank())
    sizes = (batch, shape.length + 1)
    return torch.randint(shape.vocabulary, sizes, device=bench.device, generator=generator)


def _backward(trained: Trained, text: torch.Tensor) -> None:
    trained.model(text).backward()


def _iterations(bench: Bench, trained: Trained) -> dict[str, Any]:
    """For each batch: an iteration, the model alone, and what of the rest nothing hides."""
    found = {}
    for batch in bench.batches:
        text = _text(bench, batch)
        count = 2 if bench.quick else 8 if batch == 1 else 4

        def iteration(text: torch.Tensor = text) -> None:
            _backward(trained, text)
            trained.step()

        def summed(text: torch.Tensor = text) -> None:
            _backward(trained, text)
            trained.drop()

        def alone(text: torch.Tensor = text) -> None:
            with trained.alone():
                _backward(trained, text)
            trained.drop()

        whole, both, model = (bench.elapsed(work, count, warm=2) for work in (iteration, summed, alone))
        found[str(batch)] = {
            "iteration_ms": whole,
            "forward_backward_with_sums_ms": both,
            "forward_backward_ms": model,
            "exposed_sums_ms": round(both - model, 4),
            "exposed_clip_step_gather_ms": round(whole - both, 4),
            "exposed_clip_step_gather": round((whole - both) / model, 4),
        }
    return found


def _host(bench: Bench, trained: Trained, backward: Callable[[], Any]) -> dict[str, Any]:
    count = 3 if bench.quick else 15
    found = {"step": bench.host(trained.step, backward, count)}
    trained.drop()
    return found


class Many(nn.Module):
    """Parameters that get their gradients without a model."""

    def __init__(self, count: int, elements: int, device: torch.device) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(torch.ones(elements, dtype=torch.bfloat16, device=device)) for _ in range(count)
        )


def host_of_many(bench: Bench) -> dict[str, Any]:
    """Host time of backward and step for 219 and 2,000 tensors of 64 k elements."""
    found = {}
    for count in (20,) if bench.quick else (219, 2000):
        model = Many(count, 2**16, bench.device)
        params = list(model.params)
        gradients = [torch.ones_like(param) for param in params]
        plain = bench.host(partial(torch.autograd.backward, params, gradients), model.zero_grad, 15)
        model.zero_grad()
        optimizer = tilestep.AdamW(params, lr=1e-3, max_grad_norm=1.0, master_weights=True)  # type: ignore[attr-defined]
        optimizer = tilestep.shard(optimizer, model)

        def backward(params: Any = params, gradients: Any = gradients) -> None:
            torch.autograd.backward(params, [gradient.clone() for gradient in gradients])

        step = bench.host(optimizer.step, backward, 15)
        given = [gradient.clone() for gradient in gradients]
        both = bench.host(partial(torch.autograd.backward, params, given), optimizer.step, 15)
        buckets = len(optimizer._sharding.buckets)
        found[str(count)] = {"step": step, "backward": both, "backward of plain tensors": plain, "buckets": buckets}
        del model, params, gradients, optimizer, given
        bench.forget_peak()
    return found


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "collectives": collectives,
    "sharded": sharded,
    "data_parallel": partial(peer, "data_parallel"),
    "fully_sharded": partial(peer, "fully_sharded"),
    "host_of_many": host_of_many,
    "zero_redundancy": partial(peer, "zero_redundancy"),
}
