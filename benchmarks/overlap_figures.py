"""Measure where updates run: after backward, beside it, beside the next forward; whole iterations on several GPUs.

    python benchmarks/overlap_figures.py --ranks 2 --limit 180

takes three minutes on GPUs, prints what it found and writes it to benchmarks/results/ after every part. The model has
the shapes of `tilestep bench step`'s language model, 1.2 B parameters in float32, and computes in bfloat16; under FSDP2
every block, the embedding and the head are sharded by themselves. docs/overlap.md says what the schedules are.

iterations: contenders take turns, each with a model of its own; those that clip, then those that do not. What a step
exposes is the difference from "no step" in the same round, since machines drift. memory: peaks with short sequences,
where gradients and not activations are at the peak; "dropped" lets every gradient go at once and updates nothing, and
no schedule needs less (benchmarks/overlap_floor.py says of what that is made). losses: a hundred steps of each
schedule in torch's deterministic mode.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from kept_groups import take_over
from overlap_trainings import CONTENDERS, SCHEDULES, WRAPS, Training, agreed, trainings
from shard_contenders import TINY, Shape
from timing import result_name
from torch import nn

from tilestep.bench.measure import spread
from tilestep.bench.results import Group, Result, Row, environment
from tilestep.bench.sections import free

RESULTS = Path(__file__).parent / "results"
BACK_TO_BACK = 3
"""Iterations for one figure, without waiting for the device in between, as in training."""
LEAST_ROUNDS = 3
SHORT = (64, 16)
"""Tokens of sequences whose activations are little beside the gradients, which then are the peak."""
STEPS = 100
GRACE_SECONDS = 30.0
"""How long after the limit ranks may take to come to an end."""


@dataclasses.dataclass
class Settings:
    """What the ranks are told."""

    ranks: int
    batches: list[int]
    rounds: int
    wrap: str
    parts: list[str]
    small: bool
    limit: float
    output: str
    add: bool


class Bench:
    """One rank's part of the measurements.

    Args:
        settings: what to measure.
        device: of this rank.
        begin: when the program has started, by `time.time()`.
    """

    def __init__(self, settings: Settings, device: torch.device, begin: float) -> None:
        self.settings, self.device, self._begin = settings, device, begin
        self.gpu = device.type == "cuda"
        self.shape = TINY if settings.small else Shape()
        subject = "overlap" if settings.wrap == "fsdp" else f"overlap_{settings.wrap}"
        self.result = Result(result_name(subject, device, settings.ranks), environment(device))
        stored = Path(settings.output) / f"{self.result.section}.json"
        self._known = Result.load(stored) if settings.add and stored.exists() else None
        self._generator = torch.Generator(device).manual_seed(dist.get_rank())

    def parts(self) -> list[tuple[str, Any]]:
        """Names and functions, those that matter most first."""
        batches = self.settings.batches
        first = [(f"iterations, batch {size}, {clip}", size, clip) for size in batches[:1] for clip in CLIPS]
        later = [(f"iterations, batch {size}, {clip}", size, clip) for size in batches[1:] for clip in CLIPS]

        def timed(each: tuple[str, int, str]) -> tuple[str, Any]:
            return each[0], lambda: self.iterations(each[1], each[2])

        found = [*map(timed, first), ("memory", self.memory), ("losses", self.losses)]
        found += map(timed, later)
        return [(name, part) for name, part in found if name.split(",")[0] in self.settings.parts]

    def is_late(self) -> bool:
        """Whether the time is up, for all ranks alike."""
        return agreed(time.time() - self._begin > self.settings.limit, self.device)

    def _drawn(self, size: int, length: int, count: int) -> list[torch.Tensor]:
        sizes, most = (size, length + 1), self.shape.vocabulary
        return [torch.randint(most, sizes, generator=self._generator, device=self.device) for _ in range(count)]

    def iterations(self, size: int, clip: str) -> None:
        """Whole iterations of every contender, in rounds."""
        contenders = trainings(self.settings.wrap, self.shape, self.device, clips=clip == "clip")
        warm_up = 1 if self.settings.small else 2
        for turn in range(self.settings.rounds + warm_up):
            kept = turn - warm_up
            if kept >= LEAST_ROUNDS and self.is_late():
                break
            shift = max(kept, 0) % len(contenders)
            batches = self._drawn(size, self.shape.length, 2 if self.settings.small else BACK_TO_BACK)
            for each in contenders[shift:] + contenders[:shift]:
                each.measure(batches, self.device, keep=kept >= 0)
        self._report(contenders, f"batch {size}, {clip}", {"batch": str(size), "clip": clip})
        base = next((each for each in contenders if each.name == "no step" and each.failure is None), None)
        for each in contenders:
            if base is not None and each is not base and each.failure is None:
                self._expose(each, base, f"batch {size}, {clip}")

    def _expose(self, each: Training, base: Training, work: str) -> None:
        """Report what of a contender's step nothing hides, from round to round."""
        found = spread([own - alone for own, alone in zip(each.wall, base.wall)])
        share = found.median / spread(base.wall).median
        key = f"{work}, {each.name}"
        figures = {f"exposed ms, {key}": found.median, f"exposed share, {key}": share}
        figures |= {f"exposed ms, {key}, low": found.low, f"exposed ms, {key}, high": found.high}
        self.result.summary.update({name: round(value, 4) for name, value in figures.items()})
        self.say(
            f"{work:20} {each.name:12} exposes {found.median:7.2f} ms ({found.low:.2f} to {found.high:.2f}), "
            f"{100 * share:.1f}% of what there is without a step"
        )

    def _report(self, contenders: list[Training], work: str, tags: dict[str, str]) -> None:
        rows = [
            Row(each.name, spread(each.host), spread(each.wall), peak_bytes=each.peak if self.gpu else None)
            if each.failure is None
            else Row(each.name, failure=each.failure)
            for each in contenders
        ]
        self.result.groups.append(Group(f"iteration, {work}", rows, tags=tags))
        for row in rows:
            if row.wall is None:
                self.say(f"{work:20} {row.contender:12} {row.failure}")
                continue
            peak = f"peak {row.peak_bytes / 2**30:7.2f} GiB" if row.peak_bytes else ""
            quartiles = f"{row.wall.low:9.2f} to {row.wall.high:9.2f}"
            self.say(f"{work:20} {row.contender:12} {row.wall.median:9.2f} ms ({quartiles}, {row.wall.count})  {peak}")

    def memory(self) -> None:
        """What an iteration needs at its peak above parameters and state, with sequences that are short."""
        for clip in CLIPS:
            # With a clip no gradient can go; DistributedDataParallel keeps them itself.
            names = [*CONTENDERS] if clip == "clip" or self.settings.wrap == "ddp" else [*CONTENDERS, "dropped"]
            contenders = trainings(self.settings.wrap, self.shape, self.device, clips=clip == "clip", names=names)
            size = sum(part.numel() * part.element_size() for part in _parts(contenders[0].model))
            self.result.summary["bytes of this rank's gradients"] = float(size)
            for length in SHORT:
                self._peaks(contenders, min(length, self.shape.length), clip, size)
            del contenders
            free(self.device)

    def _peaks(self, contenders: list[Training], length: int, clip: str, size: int) -> None:
        for each in contenders:
            each.forget()
        rounds = 1 if self.settings.small else 2
        for turn in range(2 * rounds):
            batches = self._drawn(1, length, 1 if self.settings.small else 2)
            for each in contenders:
                each.measure(batches, self.device, keep=turn >= rounds)
        self._report(contenders, f"{length} tokens, {clip}", {"tokens": str(length), "clip": clip})
        peaks = {each.name: each.peak for each in contenders if each.failure is None}
        for name in (*SCHEDULES[1:], "dropped"):
            if self.gpu and {"serial", name} <= peaks.keys():
                share = (peaks["serial"] - peaks[name]) / size
                key = f"peak lowered by share of gradients, {length} tokens, {clip}, {name}"
                self.result.summary[key] = round(share, 4)

    def losses(self) -> None:
        """Whether losses are the serial ones, to the bit, with the order of all sums fixed."""
        length, steps = min(SHORT[0], self.shape.length), 4 if self.settings.small else STEPS
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            for clip in CLIPS:
                contenders = trainings(
                    self.settings.wrap, self.shape, self.device, clips=clip == "clip", names=SCHEDULES
                )
                batches = self._drawn(1, length, steps)
                for each in contenders:
                    each.measure(batches, self.device, keep=True)
                    if each.failure is not None:
                        raise RuntimeError(f"{each.name}: {each.failure}")
                found = {each.name: torch.stack(each.losses) for each in contenders}
                for name in SCHEDULES[1:]:
                    same = (found[name] == found["serial"]).sum()
                    dist.all_reduce(same, dist.ReduceOp.MIN)
                    self.result.summary[f"losses equal to serial of {steps}, {clip}, {name}"] = float(same)
                    self.say(f"losses of {steps} steps, {clip}, {name}: {int(same)} are the serial ones to the bit")
                self.result.summary[f"first loss, {clip}"] = float(found["serial"][0])
                self.result.summary[f"last loss, {clip}"] = float(found["serial"][-1])
                del contenders
                free(self.device)
        finally:
            torch.use_deterministic_algorithms(False)

    def say(self, line: str) -> None:
        """Print, on rank 0."""
        if dist.get_rank() == 0:
            print(line, flush=True)

    def save(self) -> None:
        """Write what is there so far, on rank 0."""
        if dist.get_rank() == 0 and (self.gpu or self.settings.output != str(RESULTS)):
            self._with_known().save(Path(self.settings.output))

    def _with_known(self) -> Result:
        """What was found, with what an earlier run has found and this one has not."""
        if self._known is None:
            return self.result
        measured = {group.title for group in self.result.groups}
        kept = [group for group in self._known.groups if group.title not in measured]
        whole = dataclasses.replace(self.result, groups=[], notes=list(self.result.notes))
        take_over(whole, dataclasses.replace(self._known, groups=kept), ("device", "torch"))
        whole.groups = [*self.result.groups, *whole.groups]
        # A group's figures go with it.
        works = [group.title.removeprefix("iteration, ") for group in self.result.groups]
        old = {
            key: value for key, value in self._known.summary.items() if not any(f", {work}," in key for work in works)
        }
        whole.summary = {**old, **self.result.summary}
        return whole


CLIPS = ("clip", "no clip")


def _parts(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]


def _rank(rank: int, settings: Settings, folder: str, begin: float) -> None:
    gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    options: dict[str, Any] = {"device_id": device} if gpu else {}
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    own = dist.PrefixStore("figures", store)
    dist.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=rank, world_size=settings.ranks, timeout=timedelta(60), **options
    )
    bench = Bench(settings, device, begin)
    for name, part in bench.parts():
        if bench.is_late():
            bench.result.notes.append(f"no time was left for {name}")
            bench.save()
            continue
        error = ""
        started = time.monotonic()
        try:
            part()
        except Exception:
            error = traceback.format_exc()
            bench.result.notes.append(f"{name} failed: {error.strip().splitlines()[-1]}")
            print(f"{name} failed on rank {rank}:\n{error}", flush=True)
        bench.say(f"{name}: {time.monotonic() - started:.0f} s")
        bench.save()
        _require_all(own, f"{name}/", "failed" if error else "passed", rank, settings.ranks)
        free(device)
    bench.say(json.dumps(bench.result.summary, indent=1))
    for note in bench.result.notes:
        bench.say(f"note: {note}")
    dist.destroy_process_group()


def _require_all(store: dist.Store, key: str, outcome: str, rank: int, ranks: int) -> None:
    """End this process if other ranks are not where it is; what was found is written."""
    store.set(f"{key}{rank}", outcome)
    keys = [f"{key}{each}" for each in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=20))
    except Exception:
        os._exit(1)
    if len({store.get(each) for each in keys}) > 1:
        os._exit(1)


def main(
    ranks: Annotated[int, typer.Option(help="How many GPUs, or processes without one.")] = 1,
    batch: Annotated[list[int], typer.Option(help="Sequences a rank.")] = [1, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Figures of each contender.")] = 20,
    wrap: Annotated[str, typer.Option(help=f"What the model is in: {', '.join(WRAPS)}.")] = "fsdp",
    parts: Annotated[str, typer.Option(help="Only these, with commas.")] = "iterations,memory,losses",
    limit: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 180,
    small: Annotated[bool, typer.Option(help="A small model: checks this script, measures nothing.")] = False,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
    add: Annotated[bool, typer.Option(help="Keep what is there of what is not measured now.")] = False,
) -> None:
    """Measure, print, write."""
    if wrap not in WRAPS:
        raise SystemExit(f"--wrap is one of {', '.join(WRAPS)}")
    begin = time.time()
    names = [name.strip() for name in parts.split(",")]
    settings = Settings(ranks, list(batch), rounds, wrap, names, small, limit, str(output), add)
    with tempfile.TemporaryDirectory() as folder:
        context: Any = multiprocessing.start_processes(
            _rank,
            (settings, folder, begin),
            nprocs=ranks,
            join=False,
            start_method="spawn" if torch.cuda.is_available() else "fork",  # CUDA cannot be forked
        )
        while not context.join(timeout=1):
            if time.time() - begin > limit + GRACE_SECONDS:
                for process in context.processes:
                    process.kill()
                raise SystemExit("the ranks did not come to an end; what was found before is written")


if __name__ == "__main__":
    typer.run(main)
