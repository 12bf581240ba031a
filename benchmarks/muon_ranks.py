"""Muon on several GPUs: is it the update of one, and what does it cost an iteration?

    python benchmarks/muon_ranks.py --ranks 2

takes under four minutes on GPUs and writes benchmarks/results/muon_ranks_<device>_<ranks>.json after every part;
another `--batch` than 4 and `--compiled` are in the name too.

equal: the update of DTensors in several layouts beside that of plain tensors, and two runs of a layout.
floors: what a step cannot take less than: a rank's share of the model's matrices as plain tensors, and as many bytes
exchanged.
fsdp: the language model of 1.19 B elements under FSDP2, float32 shards used in bfloat16: the first step, steps alone,
and whole iterations of contenders that take turns. dion's Muon takes part if it can be imported (`--path` says where
from).
shard: iterations of `tilestep.shard`, bfloat16 parameters with float32 masters.
torch: steps of torch.optim.Muon on DTensors.
first: the first step of Muon under FSDP2, alone in a run with empty caches (TILESTEP_CACHE_DIR).
published: steps for the matrices of eight layers 5,120 wide. For these microsoft/dion#96 has 117.9, 61.8 and 31.4 ms on
one, two and four H100s, of NorDion2, which works on a quarter of the rows.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from overlap_trainings import Training, fully_sharded
from shard_contenders import TINY, Llama, Shape, compiled_blocks, make_model
from timing import result_name, spread, synchronize, timed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep.bench.results import environment
from tilestep.bench.sections import free

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results"
BATCH = 4
PUBLISHED = [(5120, 5120)] * 32 + [(20480, 5120)] * 8 + [(5120, 20480)] * 8
CLOSE = 1e-2  # by how much updates may differ, in the Frobenius norm: batches of other sizes are rounded otherwise
BACK_TO_BACK = 3  # iterations for one figure, without waiting for the device in between


@dataclass
class Settings:
    """What the ranks are told."""

    ranks: int
    batch: int
    rounds: int
    parts: list[str]
    small: bool
    limit: float
    path: str
    output: str
    compiled: bool = False

    @property
    def name(self) -> str:
        """What results are about."""
        batch = "" if self.batch == BATCH else f"_batch{self.batch}"
        return f"muon_ranks{batch}{'_compiled' * self.compiled}"


class Bench:
    """One rank's part of the measurements."""

    def __init__(self, settings: Settings, device: torch.device, begin: float) -> None:
        self.settings, self.device, self._begin = settings, device, begin
        self.shape = TINY if settings.small else Shape()
        self.results: dict[str, Any] = {"environment": environment(device), "notes": []}

    def is_late(self) -> bool:
        """Whether the time is up, for all ranks alike."""
        late = torch.tensor(float(time.time() - self._begin > self.settings.limit), device=self.device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def equal(self) -> None:
        """Updates of DTensors beside those of plain tensors."""
        ranks, kind = self.settings.ranks, self.device.type
        flat = init_device_mesh(kind, (ranks,))
        layouts: dict[str, tuple[Any, list[Any]]] = {"rows": (flat, [Shard(0)]), "columns": (flat, [Shard(1)])}
        if ranks % 2 == 0 and ranks > 2:
            grid = init_device_mesh(kind, (ranks // 2, 2))
            layouts |= {"rows, copies": (grid, [Replicate(), Shard(0)]), "both": (grid, [Shard(0), Shard(1)])}
        large = [(2048, 2048), (512, 2048), (2048, 5504), (1030, 700), (1, 64), (8, 1024, 512), (3, 512, 640)]
        shapes = [tuple(max(1, side // 32) for side in shape) for shape in large] if self.settings.small else large
        found = self.results["equal"] = {}
        starts = [[torch.nn.Parameter(whole) for whole in self._drawn(shapes, 0)] for _ in range(2)]
        wanted = _trained(starts[0], lambda step: self._drawn(shapes, step))
        for name, lie in layouts.items():
            runs = []
            for _ in range(2):
                params = [torch.nn.Parameter(distribute_tensor(whole, *lie)) for whole in self._drawn(shapes, 0)]
                runs.append(_trained(params, lambda step: self._drawn(shapes, step), *lie))
            apart = [
                float((own - other).norm() / (other - start.detach()).norm())
                for own, other, start in zip(runs[0], wanted, starts[1])
            ]
            alike = all(map(torch.equal, *runs))
            found[name] = {"farthest": max(apart), "two runs equal": alike}
            self.say(f"equal, {name}: updates differ by {max(apart):.2e} at most; two runs are equal: {alike}")
            if max(apart) > CLOSE or not alike:
                raise AssertionError(f"{name}: {apart}, two runs equal: {alike}")

    def _drawn(self, shapes: Sequence[tuple[int, ...]], seed: int) -> list[torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        return [torch.randn(shape, generator=generator, device=self.device) for shape in shapes]

    def floors(self) -> None:
        """A rank's matrices as plain tensors, and their bytes exchanged."""
        with torch.device("meta"):
            shapes = [tuple(param.shape) for param in _inside(Llama(self.shape))]
        self.results["matrices"] = {str(shape): shapes.count(shape) for shape in dict.fromkeys(shapes)}
        own = [torch.zeros(shape, device=self.device).requires_grad_() for shape in shapes[:: self.settings.ranks]]
        for param in own:
            param.grad = torch.randn_like(param)
        self._steps("floors", "matrices of a rank alone", tilestep.Muon(own, lr=0.02).step)
        numel = sum(rows * columns for rows, columns in shapes) // self.settings.ranks
        numel -= numel % self.settings.ranks
        sent, received = (torch.zeros(numel, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        views = [tensor.view(torch.uint8) for tensor in (received, sent)]

        def exchange() -> None:
            for _ in range(2):
                dist.all_to_all_single(*views)

        self._steps("floors", "exchange, there and back", exchange)

    def fsdp(self) -> None:
        """The model under FSDP2."""
        self._train("fsdp", [
            ("no step", self._sharded(lambda model: None)),
            ("AdamW", self._sharded(lambda model: tilestep.AdamW(model.parameters(), lr=1e-4))),
            ("Muon", self._sharded(_muon)),
            ("Muon, dion", self._sharded(self._dion)),
        ])  # fmt: skip

    def shard(self) -> None:
        """The model in `tilestep.shard`."""

        def made(make: Callable[..., Any]) -> Callable[[], tuple[Any, Any]]:
            def build() -> tuple[Any, Any]:
                model = make_model(self.shape, self.device, torch.bfloat16)
                return model, tilestep.shard(lambda: make(model, master_weights=True), model)

            return build

        self._train("shard", [
            ("AdamW", made(lambda model, **given: tilestep.AdamW(model.parameters(), lr=1e-4, **given))),
            ("Muon", made(_muon)),
        ])  # fmt: skip

    def torch(self) -> None:
        """Steps of torch's Muon."""
        model, optimizer = self._sharded(lambda model: torch.optim.Muon(_inside(model), lr=0.02))()
        self._steps_of("torch", "torch.optim.Muon", model, optimizer, most=3)

    def first(self) -> None:
        """The first step of Muon on DTensors."""
        self._steps_of("first", "Muon", *self._sharded(_muon)(), most=4)

    def published(self) -> None:
        """Steps for dion's shapes."""
        ranks, share = self.settings.ranks, 64 if self.settings.small else 1
        mesh = init_device_mesh(self.device.type, (ranks,))

        def drawn() -> list[Any]:
            sizes = [(rows // share // ranks, columns // share) for rows, columns in PUBLISHED]
            parts = [torch.randn(size, dtype=torch.bfloat16, device=self.device) for size in sizes]
            params = [torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)])) for part in parts]
            for param in params:
                param.grad = torch.randn_like(param)
            return params

        self._steps("published", "Muon", tilestep.Muon(drawn(), lr=0.02).step)
        free(self.device)
        try:
            dion = importlib.import_module("dion")
            theirs = dion.Muon([{"params": drawn()}], distributed_mesh=mesh, lr=0.02)
            self._steps("published", "Muon, dion", theirs.step)
        except Exception as error:
            self.results["notes"].append(f"published: no dion: {type(error).__name__}: {str(error)[:200]}")

    def _sharded(self, make: Callable[[Any], Any]) -> Callable[[], tuple[Any, Any]]:
        def build() -> tuple[Any, Any]:
            model = fully_sharded(self.shape, self.device)
            return model, make(model)

        return build

    def _dion(self, model: Any) -> Any:
        """dion's optimizer, which takes a list of groups; ImportError without it."""
        dion = importlib.import_module("dion")
        inside = _inside(model)
        ids = set(map(id, inside))
        rest = [param for param in model.parameters() if id(param) not in ids]
        groups = [{"params": inside}, {"params": rest, "algorithm": "adamw", "lr": 1e-4, "weight_decay": 0.01}]
        mesh = next(model.parameters()).device_mesh
        return dion.Muon(groups, distributed_mesh=mesh, lr=0.02)

    def _train(self, part: str, contenders: Sequence[tuple[str, Callable[[], tuple[Any, Any]]]]) -> None:
        trainings = []
        for name, build in contenders:
            try:
                model, optimizer = build()
                if optimizer is not None and part == "fsdp":
                    self._steps_of(part, name, model, optimizer)
            except Exception as error:
                if "dion" not in name:
                    raise
                self.results["notes"].append(f"{part}: no {name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            trainings.append(Training(name, model, optimizer))
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        size, vocabulary = (self.settings.batch, self.shape.length + 1), self.shape.vocabulary
        for turn in range(self.settings.rounds + 2):
            if turn > 4 and self.is_late():
                break
            count = 1 if self.settings.small else BACK_TO_BACK
            batches = [torch.randint(vocabulary, size, generator=generator, device=self.device) for _ in range(count)]
            shift = turn % len(trainings)
            for each in trainings[shift:] + trainings[:shift]:
                each.measure(batches, self.device, keep=turn >= 2)
        for each in trainings:
            if each.failure is not None:
                raise RuntimeError(f"{each.name}: {each.failure}")
            base = next(other for other in trainings if other.name == "AdamW")
            self._note(part, f"iteration, {each.name}", each.wall, each.host)
            share = spread([own / other for own, other in zip(each.wall, base.wall)]).median
            self.results[part][f"iteration, {each.name}"]["of AdamW's"] = round(share, 4)
            self.say(f"{part}, {each.name}: {share:.3f} of AdamW's iteration")

    def _steps_of(self, part: str, name: str, model: Any, optimizer: Any, most: int = 10) -> None:
        """Time steps alone, with gradients that stay."""
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        self._steps(part, name, optimizer.step, most)
        optimizer.zero_grad()

    def _steps(self, part: str, name: str, call: Callable[[], Any], most: int = 10) -> None:
        host, wall = [], []
        for _ in range(2 if self.settings.small else most):
            synchronize(self.device)
            dist.barrier()
            times = torch.tensor(timed(call, self.device), device=self.device)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            host.append(float(times[0]))
            wall.append(float(times[1]))
        self._note(part, f"first, {name}", wall[:1])
        self._note(part, f"step, {name}", wall[min(2, len(wall) - 1) :], host[min(2, len(host) - 1) :])

    def _note(self, part: str, name: str, wall: Sequence[float], host: Sequence[float] = ()) -> None:
        figures = {"wall": wall, "host": host} if host else {"wall": wall}
        rounded = {key: round(spread(list(values)).median, 3) for key, values in figures.items()}
        self.results.setdefault(part, {})[name] = {**rounded, "count": len(wall)}
        self.say(f"{part:8} {name:36} {rounded} ms")

    def say(self, line: str) -> None:
        """Print, on rank 0."""
        if dist.get_rank() == 0:
            print(line, flush=True)

    def run(self) -> None:
        """All parts; what was found so far is written after each."""
        for part in self.settings.parts:
            if self.is_late():
                self.results["notes"].append(f"no time was left for {part}")
                continue
            began, failed = time.monotonic(), 0.0
            try:
                getattr(self, part)()
            except Exception as error:
                failed = 1.0
                self.results["notes"].append(f"{part} failed: {type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc()
            self.say(f"{part}: {time.monotonic() - began:.0f} s")
            if dist.get_rank() == 0:
                path = Path(self.settings.output)
                path.mkdir(parents=True, exist_ok=True)
                path = path / f"{result_name(self.settings.name, self.device, self.settings.ranks)}.json"
                path.write_text(json.dumps(self.results, indent=1) + "\n")
            free(self.device)
            if failed:  # a rank that fails alone would leave the others waiting
                os._exit(1)


def _trained(params: list[Any], gradients: Callable[[int], list[torch.Tensor]], *lie: Any) -> list[torch.Tensor]:
    """Whole parameters after steps of Muon."""
    optimizer = tilestep.Muon(params, lr=0.1, weight_decay=0.0)
    for step in range(1, 3):
        for param, gradient in zip(params, gradients(step)):
            param.grad = distribute_tensor(gradient, *lie) if lie else gradient
        optimizer.step()
    wholes = [param.detach() for param in params]
    return [whole.full_tensor() if isinstance(whole, DTensor) else whole for whole in wholes]


def _muon(model: Any, **given: Any) -> Any:
    return tilestep.Muon(tilestep.muon_groups(model, others={"lr": 1e-4}), lr=0.02, **given)


def _inside(model: Any) -> list[Any]:
    """The matrices that Muon gets."""
    return [param for _, param in tilestep.muon_groups(model)[0]["params"]]


def _rank(rank: int, settings: Settings, folder: str, begin: float) -> None:
    gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks))
    sys.path[:0] = [settings.path] * bool(settings.path)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    options: dict[str, Any] = {"device_id": device} if gpu else {}
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    dist.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=rank, world_size=settings.ranks, timeout=timedelta(90), **options
    )
    bench = Bench(settings, device, begin)
    backend = "aot_eager" if settings.small else "inductor"
    with compiled_blocks(backend if settings.compiled else ""):
        bench.run()
    for note in bench.results["notes"]:
        bench.say(f"note: {note}")
    dist.destroy_process_group()


def main(
    ranks: Annotated[int, typer.Option(help="How many GPUs, or processes without one.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences a rank.")] = BATCH,
    rounds: Annotated[int, typer.Option(help="Figures of each contender.")] = 10,
    parts: Annotated[str, typer.Option(help="Only these, with commas.")] = "equal,floors,fsdp,shard,torch",
    limit: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 200,
    compiled: Annotated[bool, typer.Option(help="Blocks compiled by inductor.")] = False,
    small: Annotated[bool, typer.Option(help="A small model: checks this script, measures nothing.")] = False,
    path: Annotated[str, typer.Option(help="Where `import dion` looks first.")] = "",
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
) -> None:
    """Check, measure, print, write."""
    begin = time.time()
    settings = Settings(ranks, batch, rounds, parts.split(","), small, limit, path, str(output), compiled)
    with tempfile.TemporaryDirectory() as folder:
        context: Any = multiprocessing.start_processes(
            _rank,
            (settings, folder, begin),
            nprocs=ranks,
            join=False,
            start_method="spawn" if torch.cuda.is_available() else "fork",  # CUDA cannot be forked
        )
        while not context.join(timeout=1):
            if time.time() - begin > limit + 40:
                for process in context.processes:
                    process.kill()
                raise SystemExit("the ranks did not come to an end; what was found before is written")


if __name__ == "__main__":
    typer.run(main)
