"""Bring the tables in docs/scaling.md up to date with the constants in src/tilestep/planning/constants.json.

A comment in the page says what follows it: `<!-- table: NAME -->`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilestep.planning import (
    Constants,
    Footprint,
    Job,
    Plan,
    best_bucket,
    crossover,
    footprint,
    meshes,
    plan,
)
from tilestep.rules import registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(?:\|.*\n)+")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = 8192
RESULTS = PAGE.parent.parent / "benchmarks" / "results" / "h200"
ELEMENTS, TENSORS = 1194428416, 219
"""Of the model in benchmarks/shard_figures.py."""
PARTS_OF_RIVALS = ("compiled", "rivals", "rivals_compiled")
SIZES = {"1.2 B": 1.2e9, "8 B": 8e9}

Rows = list[tuple[str, ...]]


def _needs() -> Footprint:
    return footprint(registry["AdamW"], master_weights=True)


def _job(elements: float, ranks: int) -> Job:
    """With the buckets that `shard` chooses."""
    return Job(elements, _needs(), ranks, tokens=TOKENS)


def constants_table(constants: Constants) -> Rows:
    rows: Rows = [("constant", "value", "source")]
    units = {
        "bandwidth": (1e9, "GB/s"),
        "latency": (1e-6, "us"),
        "compute": (1e12, "TFLOP/s"),
        "memory": (1e9, "GB"),
        "host": (1e-6, "us"),
    }
    for name, source in constants.sources.items():
        factor, unit = units.get(name.rsplit("_", 1)[-1], (1, ""))
        rows.append((name, f"{getattr(constants, name) / factor:.4g} {unit}".strip(), source))
    return rows


def traffic_table(constants: Constants) -> Rows:
    rows: Rows = [("GPUs", "model", "state GB", "sent GB", "collectives", "latency", "exposed ms", "beyond the model")]
    for ranks in RANKS:
        for title, elements in SIZES.items():
            rows.append((str(ranks), title, *_figures(plan(_job(elements, ranks), constants))))
    return rows


def _figures(found: Plan) -> tuple[str, ...]:
    return (
        f"{found.memory['state'] / 1e9:.2f}",
        f"{sum(found.sent.values()) / 1e9:.1f}",
        f"{found.messages:,}",
        f"{found.latency_share:.0%}",
        f"{(found.iteration - found.compute) * 1e3:.1f}",
        f"{found.iteration / found.compute - 1:.1%}",
    )


def buckets_table(constants: Constants) -> Rows:
    rows: Rows = [("GPUs", "latency of a collective", "bucket at which half is latency", "best, 1.2 B", "best, 8 B")]
    for ranks in RANKS:
        latency, size = crossover(ranks, constants)
        best = [f"{best_bucket(_job(elements, ranks), constants) / 2**20:g} MiB" for elements in SIZES.values()]
        rows.append((str(ranks), f"{latency * 1e6:,.0f} us", f"{size / 2**20:.1f} MiB", *best))
    return rows


def meshes_table(constants: Constants) -> Rows:
    rows: Rows = [("GPUs", "model", "all split, ms", "fastest mesh", "bucket", "ms", "state GB there")]
    for ranks in RANKS:
        for title, elements in SIZES.items():
            plans = list(meshes(_job(elements, ranks), constants))
            fastest = min(plans, key=lambda each: each.iteration)
            job = fastest.job
            rows.append(
                (
                    str(ranks),
                    title,
                    f"{(plans[-1].iteration - plans[-1].compute) * 1e3:.1f}",
                    f"{job.shard} x {job.replicate}",
                    f"{job.bucket / 2**20:g} MiB",
                    f"{(fastest.iteration - fastest.compute) * 1e3:.1f}",
                    f"{fastest.memory['state'] / 1e9:.2f}",
                )
            )
    return rows


def _measured() -> Iterator[tuple[str, int, str, Mapping[str, Any]]]:
    """Committed iterations of several GPUs: the file, its GPUs, how the model runs, and what was measured."""
    for path in sorted([*RESULTS.glob("shard-*.json"), *RESULTS.glob("rivals-*.json")]):
        stored = json.loads(path.read_text())
        parts = {"eager": stored.get("iterations"), **{name: stored.get(name) for name in PARTS_OF_RIVALS}}
        parts |= {f"captured {name}": part for name, part in stored.get("captured", {}).items()}
        for name, part in parts.items():
            if isinstance(part, dict):
                yield path.name, stored["ranks"], name, part


def errors_table(constants: Constants) -> Rows:
    """What `plan` says of every iteration that was measured on several GPUs, beside it."""
    rows: Rows = [("iteration", "GPUs", "batch", "measured, ms", "plan, ms", "error", "claimed")]
    for file, ranks, how, part in _measured():
        for batch in ("1", "4"):
            for name, figures in part.get(batch, {}).items():
                title = f"{how.replace('_', ', ')}: `{name}` ({file})"
                measured = figures["iteration_ms"]["median"]
                job = _job_of(name, how, file, ranks, int(batch))
                if job is None:
                    continue
                found = plan(job, constants)
                milliseconds = found.iteration * 1e3
                error = f"{100 * (milliseconds / measured - 1):+.1f}%"
                claimed = "; ".join(found.unclaimed).partition(",")[0] or "yes"
                rows.append((title, str(ranks), batch, f"{measured:.1f}", f"{milliseconds:.1f}", error, claimed))
    return rows


def _job_of(name: str, how: str, file: str, ranks: int, batch: int) -> Job | None:
    """The job that a contender's iteration is; None for those that are not `shard`'s, of which no plan is made."""
    if not name.startswith("sharded"):
        return None
    needs = footprint(registry["AdamW"], master_weights="remainder" if name.endswith("remainder") else True)
    regime: Any = "blocks" if "compiled" in how else "eager"
    # Earlier figures of four GPUs are of equal buckets.
    bucket = ELEMENTS * needs.gradient / 15 if file == "shard-4.json" else None
    captured = name.endswith("captured")
    regime = "whole" if name.endswith("waiting") else regime
    job = Job(ELEMENTS, needs, ranks, tokens=2048 * batch, bucket=bucket, captured=captured, regime=regime)
    return dataclasses.replace(job, tensors=TENSORS)


def _figure(stored: Mapping[str, Any], part: str, name: str) -> float:
    """Seconds."""
    return stored[part][name]["wall"] / 1e3


def _like_the_machine(constants: Constants, stored: Mapping[str, Any], alike: Job, products: Job) -> Constants:
    """The constants with what muon_ranks' file says of its machine.

    The rate of products, by a rank's matrices alone; forward and backward, by iterations of `shard` with AdamW; the
    host, by iterations of FSDP2 without a step.
    """
    known = constants
    update = plan(products, known).times["update"]
    rate = products.matrix_work / (_figure(stored, "floors", "step, matrices of a rank alone") - update)
    operations = 6 * alike.elements * alike.tokens
    rest = plan(alike, known).iteration - operations / known.compute
    compute = operations / (_figure(stored, "shard", "iteration, AdamW") - rest)
    host = _figure(stored, "fsdp", "iteration, no step") / TENSORS - known.model_host
    return dataclasses.replace(known, matrix_compute=rate, compute=compute, fsdp_host=host)


def _on_an_h100(constants: Constants) -> Constants:
    """The constants with the bandwidth of a copy on an H100."""
    rules = json.loads((RESULTS.parent / "rules_h100_1.json").read_text())
    copies = (row["bandwidth"] for group in rules["groups"] for row in group["rows"] if row["contender"] == "copy")
    return dataclasses.replace(constants, memory_bandwidth=next(copies))


def muon_table(constants: Constants) -> Rows:
    """What `plan` says of steps and iterations of Muon, beside their figures."""
    layers = [(48, 2048, 2048), (48, 512, 2048), (48, 5632, 2048), (24, 2048, 5632)]

    def job(rule: str, ranks: int, matrices: Any = (), whole: float = ELEMENTS, **given: Any) -> Job:
        options = {name: given.pop(name) for name in ("dtype", "master_weights") if name in given}
        needs = footprint(registry[rule], **options)
        return Job(whole, needs, ranks, tokens=2048 * 4, clips=False, tensors=TENSORS, matrices=matrices, **given)

    def elements(matrices: Any) -> float:
        return float(sum(count * rows * columns for count, rows, columns in matrices))

    split: dict[str, Any] = {"master_weights": True}
    fsdp: dict[str, Any] = {"dtype": torch.float32, "layout": "fsdp2"}
    step = ("update", "matrix products", "exchange matrices")
    h100 = _on_an_h100(constants)
    single = job("Muon", 1, layers, elements(layers))
    rows: list[tuple[str, str, float, Constants, Job, Sequence[str]]] = []
    for gpu, machine in (("h200", constants), ("h100", h100)):
        times = json.loads((RESULTS.parent / f"muon_{gpu}_1.json").read_text())["milliseconds"]["language model"]
        rows.append(("a step, plain", f"1 {gpu.upper()}", times["tilestep"]["device"] / 1e3, machine, single, step))
    for file, gpus, machine in (("muon_ranks_h100_2", "2 H100", h100), ("muon_ranks_h200_4", "4 H200", constants)):
        stored, ranks = json.loads((RESULTS.parent / f"{file}.json").read_text()), int(gpus[0])
        # Files that do not say which matrices there were are of a model without its gates, beside floors with them.
        listed = stored.get("matrices")
        floors = [(count, *json.loads(f"[{shape[1:-1]}]")) for shape, count in listed.items()] if listed else layers
        trained = floors if listed else [(48, 2048, 2048), (48, 512, 2048), (24, 5504, 2048), (24, 2048, 5504)]
        alike, products = job("AdamW", ranks, **split), job("Muon", ranks, floors, elements(floors), **fsdp)
        known = _like_the_machine(machine, stored, alike, products)
        sharded, owned = job("Muon", ranks, trained, **fsdp), job("Muon", ranks, trained, **split)
        rows += [
            ("a step, FSDP2", gpus, _figure(stored, "fsdp", "step, Muon"), known, sharded, step),
            ("an iteration, FSDP2", gpus, _figure(stored, "fsdp", "iteration, Muon"), known, sharded, ()),
            ("an iteration, `shard`", gpus, _figure(stored, "shard", "iteration, Muon"), known, owned, ()),
        ]
    table: Rows = [("Muon", "GPUs", "matrices", "measured, ms", "plan, ms", "error")]
    for title, gpus, measured, known, each, names in rows:
        found = plan(each, known)
        seconds = sum(found.exposed[name] for name in names) if names else found.iteration
        count = str(sum(one[0] for one in each.matrices))
        error = f"{100 * (seconds / measured - 1):+.1f}%"
        table.append((title, gpus, count, f"{measured * 1e3:.1f}", f"{seconds * 1e3:.1f}", error))
    return table


def eight_table(constants: Constants) -> Rows:
    """Iterations on eight GPUs, and what the plan had said of every mesh before they were measured."""
    folder = RESULTS.parent
    planned = json.loads((folder / "plan_meshes_8.json").read_text())
    rows: Rows = [("iteration", "eager, ms", "plan", "error", "blocks compiled, ms", "plan", "error")]
    stored = json.loads((folder / "meshes_h200_8.json").read_text())
    earlier = json.loads((folder / "meshes_compiled_h200_8.json").read_text())
    measured: dict[str, Any] = {
        "meshes": stored["meshes"]["4"] | {name: stored["rivals"]["4"][name] for name in OTHERS},
        "meshes_compiled": earlier["meshes_compiled"]["4"] | stored["meshes_compiled"]["4"],
    }
    for name in measured["meshes"]:
        row = [OTHERS.get(name) or f"`shard`, {name.removeprefix('sharded_').replace('x', ' x ')}"]
        for part, figures in measured.items():
            found = figures[name]["iteration_ms"]["median"] if name in figures else None
            said = planned[part]["4"].get(name, {}).get("iteration_ms")
            row.append(f"{found:.1f}" if found else "")
            row.append(f"{said:.1f}" if said else "")
            row.append(f"{100 * (said / found - 1):+.1f}%" if said and found else "")
        rows.append(tuple(row))
    return rows


OTHERS = {
    "data_parallel_master": "DDP, fused AdamW of float32 masters",
    "fully_sharded": "FSDP2, torch's fused AdamW",
    "fully_sharded_ours": "FSDP2, tilestep",
    "apex": "apex's DistributedFusedAdam",
    "megatron": "Megatron-Core's distributed optimizer",
}
"""Contenders of benchmarks/shard_figures.py of which no plan is made."""

TABLES: dict[str, Callable[[Constants], Rows]] = {
    "constants": constants_table,
    "errors": errors_table,
    "eight": eight_table,
    "muon": muon_table,
    "traffic": traffic_table,
    "buckets": buckets_table,
    "meshes": meshes_table,
}


def brought_up_to_date(text: str) -> str:
    """The page with every table made anew."""
    constants = Constants.load()

    def block(match: re.Match[str]) -> str:
        head, *rows = TABLES[match[1]](constants)
        lines = [head, tuple("---" for _ in head), *rows]
        return f"<!-- table: {match[1]} -->\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    PAGE.write_text(brought_up_to_date(PAGE.read_text()))
