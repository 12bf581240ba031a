"""What work beside a model's forward costs: a part of benchmarks/shard_figures.py.

Updates and gathers that run beside a forward are not free: kernels that compute take multiprocessors from the model's,
whose grids then need another turn. Each work is timed alone, and in a stream of its own beside a forward; what the
forward takes longer is its price.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from shard_bench import Bench
from shard_contenders import CONTENDERS, compiled_blocks
from timing import quartiles

import tilestep

__all__ = ["beside"]

PARTS = 8
"""Messages that gathers and sums are cut into, as `shard` cuts those of this model."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Work = Callable[[], Any]

LIMITED = "update in a context of"
"""Works that run in a stream whose kernels have a part of the multiprocessors."""


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
        "products": lambda: _products(bench, trained.model),
    }
    if bench.device.type == "cuda":
        for most in (2, 8):
            makers[f"gathers, at most {most} channels"] = lambda most=most: _gathers(bench, elements, _few(most))
        makers["gathers by copy engines"] = lambda: _copied(bench, elements)
        makers["gathers by NCCL without multiprocessors"] = lambda: _without_sms(bench, elements)
        section = elements // bench.ranks
        makers |= {
            f"update on {count} multiprocessors": lambda count=count: _persistent(bench, section, count)
            for count in (16, 32, 64, 132)
        }
        makers |= {
            f"update on {count} multiprocessors with {stages} loads of {size} ahead": (
                lambda count=count, size=size, stages=stages: _persistent(bench, section, count, size, stages)
            )
            for count, size, stages in ((8, 4096, 3), (16, 4096, 3), (24, 4096, 3), (32, 4096, 3), (16, 2048, 6))
        }
        for count in (16, 32, 64):
            makers[f"{LIMITED} {count} multiprocessors"] = lambda count=count: _limited(
                bench, trained.optimizer.update, count
            )
    makers = {name: make for name, make in makers.items() if not bench.only or name == "nothing" or name in bench.only}
    works, failures = _made(bench, makers)
    text, side = bench.text(bench.batches[-1]), _Side(bench)

    def forward() -> None:
        trained.model(text)

    def together(work: Work) -> None:
        # One that has a stream of its own begins in it.
        stream = getattr(work, "side", side)
        with stream.around():
            work()
        forward()
        stream.join()

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

    def __init__(self, bench: Bench, stream: Any = None) -> None:
        own = stream is None and bench.device.type == "cuda"
        self._stream = torch.cuda.Stream(bench.device, priority=-1) if own else stream

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


def _gathers(bench: Bench, elements: int, group: Any, flats: list[torch.Tensor] | None = None) -> Work:
    pairs = [(flat, _own(bench, flat)) for flat in flats or _cut(bench, elements)]

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


def _products(bench: Bench, model: torch.nn.Module) -> Work:
    """What Muon computes of a rank's share of the matrices, without the update."""
    shapes = [tuple(param.shape) for _, param in tilestep.muon_groups(model)[0]["params"]][:: bench.ranks]
    batches = [
        torch.randn(shapes.count(shape), *shape, device=bench.device).bfloat16() for shape in dict.fromkeys(shapes)
    ]

    def multiply() -> None:
        for batch in batches:
            tilestep.orthogonalize(batch)

    return multiply


def _few(most: int) -> Any:
    """A group of all ranks whose messages take at most so many multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    return dist.new_group(list(range(dist.get_world_size())), pg_options=options)


def _without_sms(bench: Bench, elements: int) -> Work:
    """NCCL's gathers by copy engines: memory that ranks have registered together, and a policy of no blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = 2
    group = dist.new_group(list(range(dist.get_world_size())), pg_options=options)
    backend = group._get_backend(bench.device)
    dist.all_reduce(torch.zeros(1, device=bench.device), group=group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        flats = _cut(bench, elements)
    backend.register_mem_pool(pool, symm=True)
    gather = _gathers(bench, elements, group, flats)
    gather.pool = pool  # type: ignore[attr-defined]
    return gather


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


@triton.jit
def _adamw(param, grad, master, mean, square, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for tile in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(grad + at, inside).to(tl.float32)
        m = 0.9 * tl.load(mean + at, inside) + 0.1 * g
        v = 0.999 * tl.load(square + at, inside) + 0.001 * g * g
        w = tl.load(master + at, inside) - 1e-4 * m / (tl.sqrt(v) + 1e-8)
        tl.store(mean + at, m, inside)
        tl.store(square + at, v, inside)
        tl.store(master + at, w, inside)
        tl.store(param + at, w.to(tl.bfloat16), inside)


@triton.jit
def _adamw_ahead(  # type: ignore[no-untyped-def]
    param, grad, master, mean, square, numel, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    for tile in tl.range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0), num_stages=STAGES):
        at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(grad + at, inside).to(tl.float32)
        m = 0.9 * tl.load(mean + at, inside) + 0.1 * g
        v = 0.999 * tl.load(square + at, inside) + 0.001 * g * g
        w = tl.load(master + at, inside) - 1e-4 * m / (tl.sqrt(v) + 1e-8)
        tl.store(mean + at, m, inside)
        tl.store(square + at, v, inside)
        tl.store(master + at, w, inside)
        tl.store(param + at, w.to(tl.bfloat16), inside)


_memory: dict[int, list[torch.Tensor]] = {}
"""What updates of so many elements work on: one is enough for all of them."""


def _persistent(bench: Bench, elements: int, count: int, size: int = 8192, stages: int = 1) -> Work:
    """An update of AdamW's traffic whose blocks fill so many multiprocessors and no more.

    With stages, loads of further blocks are on their way into shared memory while one is computed.
    """
    if elements not in _memory:
        low = [torch.zeros(elements, dtype=torch.bfloat16, device=bench.device) for _ in range(2)]
        _memory[elements] = low + [torch.zeros(elements, device=bench.device) for _ in range(3)]
    arrays = _memory[elements]
    if stages > 1:
        return lambda: _adamw_ahead[(count,)](*arrays, elements, BLOCK=size, STAGES=stages, num_warps=size // 256)
    return lambda: _adamw[(count,)](*arrays, elements, BLOCK=size, num_warps=32)


class _Limited:
    """Work in a stream of a green context, whose kernels have so many multiprocessors and no others."""

    def __init__(self, bench: Bench, work: Work, count: int) -> None:
        self._work = work
        self.side = _Side(bench, _green_stream(bench.device.index or 0, count))

    def __call__(self) -> None:
        with self.side.around():
            self._work()
        self.side.join()


def _limited(bench: Bench, work: Work, count: int) -> Work:
    return _Limited(bench, work, count)


def _green_stream(device: int, count: int) -> Any:
    """A stream whose kernels run on so many multiprocessors, rounded up to what the GPU can split off."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA's driver: error {code}")

    whole, part, rest = ((ctypes.c_char * 144)() for _ in range(3))  # CUdevResource
    handle, groups, described = ctypes.c_int(), ctypes.c_uint(1), ctypes.c_void_p()
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuDeviceGet(ctypes.byref(handle), device))
    check(driver.cuDeviceGetDevResource(handle, whole, 1))  # CU_DEV_RESOURCE_TYPE_SM
    check(driver.cuDevSmResourceSplitByCount(part, ctypes.byref(groups), whole, rest, 0, ctypes.c_uint(count)))
    check(driver.cuDevResourceGenerateDesc(ctypes.byref(described), part, 1))
    check(driver.cuGreenCtxCreate(ctypes.byref(context), described, handle, 1))  # CU_GREEN_CTX_DEFAULT_STREAM
    check(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, 1, -1))  # CU_STREAM_NON_BLOCKING
    return torch.cuda.ExternalStream(stream.value, device=device)
