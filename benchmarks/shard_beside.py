"""What work beside a model's forward costs: a part of benchmarks/shard_figures.py.

Updates and gathers that run beside a forward are not free: kernels that compute take multiprocessors from the model's,
whose grids then need another turn. Each work is timed alone, and in a stream of its own beside a forward; what the
forward takes longer is its price.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shard_bench import Bench
from shard_contenders import CONTENDERS, compiled_blocks
from timing import quartiles

__all__ = ["beside"]

PARTS = 8
"""Messages that gathers and sums are cut into, as `shard` cuts those of this model."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Work = Callable[[], Any]


def beside(bench: Bench) -> dict[str, Any]:
    """Milliseconds of works alone, and what each adds to a forward of compiled blocks at the larger batch."""
    bench.warm_up()
    with compiled_blocks("aot_eager" if bench.quick else "inductor"):
        trained = CONTENDERS["sharded"](bench.shape, bench.device)
    for batch in (*bench.batches, bench.batches[-1]):
        bench.backward(trained, batch)
        trained.step()
    bench.backward(trained, 1)
    trained.optimizer.execution.complete_gradients(trained.optimizer)
    for group in trained.optimizer.param_groups:
        group["max_grad_norm"] = None
    elements = sum(param.numel() for param in trained.model.parameters())
    makers: dict[str, Callable[[], Work]] = {
        "nothing": lambda: lambda: None,
        "update": lambda: trained.optimizer.update,
        "gathers": lambda: _gathers(bench, elements, dist.group.WORLD),
        "sums": lambda: _sums(bench, elements),
    }
    if bench.device.type == "cuda":
        for most in (2, 8):
            makers[f"gathers, at most {most} channels"] = lambda most=most: _gathers(bench, elements, _few(most))
        makers["gathers by copy engines"] = lambda: _copied(bench, elements)
    makers = {name: make for name, make in makers.items() if not bench.only or name == "nothing" or name in bench.only}
    works, failures = _made(bench, makers)
    text, side = bench.text(bench.batches[-1]), _Side(bench)

    def forward() -> None:
        trained.model(text)

    def together(work: Work) -> None:
        with side.around():
            work()
        forward()
        side.join()

    alone: dict[str, list[float]] = {name: [] for name in works}
    both: dict[str, list[float]] = {name: [] for name in works}
    count, found = 1 if bench.quick else 3, {}
    for turn in range(-1, 2 if bench.quick else 6):
        for name, work in works.items():
            one = bench.period(work, count)
            two = bench.period(lambda work=work: together(work), count)
            if turn >= 0:
                alone[name].append(one)
                both[name].append(two)
        if turn >= 0:
            found = _figures(alone, both, failures)
            bench.note(found)
        if bench.is_over():
            break
    trained.drop()
    return found


def _figures(alone: dict[str, list[float]], both: dict[str, list[float]], failures: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"forward_ms": quartiles(both["nothing"])}
    for name in alone:
        if name != "nothing":
            added = quartiles([own - base for own, base in zip(both[name], both["nothing"])])
            found[name] = {"alone_ms": quartiles(alone[name]), "added_ms": added}
            found[name]["added_over_alone"] = round(added["median"] / found[name]["alone_ms"]["median"], 3)
    return {**found, "failures": failures} if failures else found


def _made(bench: Bench, makers: dict[str, Callable[[], Work]]) -> tuple[dict[str, Work], dict[str, str]]:
    """Works that run on every rank, and why the others do not."""
    works: dict[str, Work] = {}
    failures: dict[str, str] = {}
    for name, make in makers.items():
        try:
            work = make()
            work()
            bench.sync()
        except Exception:
            failures[name] = traceback.format_exc()[-1500:]
        if not bench.on_any(name in failures):
            works[name] = work
    return works, failures


class _Side:
    """A stream beside the current one, for work that is wanted soon."""

    def __init__(self, bench: Bench) -> None:
        self._stream = torch.cuda.Stream(bench.device, priority=-1) if bench.device.type == "cuda" else None

    def around(self) -> Any:
        if self._stream is None:
            return torch.no_grad()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _cut(bench: Bench, elements: int) -> list[torch.Tensor]:
    section = elements // PARTS // bench.ranks
    return [torch.zeros(section * bench.ranks, dtype=torch.bfloat16, device=bench.device) for _ in range(PARTS)]


def _own(bench: Bench, flat: torch.Tensor) -> torch.Tensor:
    return flat.chunk(bench.ranks)[dist.get_rank()]


def _gathers(bench: Bench, elements: int, group: Any) -> Work:
    pairs = [(flat, _own(bench, flat)) for flat in _cut(bench, elements)]

    def gather() -> None:
        for flat, own in pairs:
            _all_gather(flat, own, group=group)

    return gather


def _sums(bench: Bench, elements: int) -> Work:
    pairs = [(flat, _own(bench, flat)) for flat in _cut(bench, elements)]

    def add() -> None:
        for flat, own in pairs:
            _reduce_scatter(own, flat)

    return add


def _few(most: int) -> Any:
    """A group of all ranks whose messages take at most so many multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    return dist.new_group(list(range(dist.get_world_size())), pg_options=options)


def _copied(bench: Bench, elements: int) -> Work:
    """Every rank fetches the others' sections by copies between GPUs."""
    import torch.distributed._symmetric_memory as symmetric

    rank, section = dist.get_rank(), elements // bench.ranks
    whole = symmetric.empty(section * bench.ranks, dtype=torch.bfloat16, device=bench.device)
    handle = symmetric.rendezvous(whole, dist.group.WORLD.group_name)
    parts = whole.chunk(bench.ranks)
    theirs = {
        other: handle.get_buffer(other, (section,), torch.bfloat16, other * section)
        for other in range(bench.ranks)
        if other != rank
    }

    def fetch() -> None:
        handle.barrier(channel=0)
        for other, there in theirs.items():
            parts[other].copy_(there)
        handle.barrier(channel=1)

    return fetch
