"""Measure sharded optimizers on the GPUs of this machine, beside DDP, FSDP2 and ZeroRedundancyOptimizer.

    python benchmarks/shard_figures.py                    # all GPUs; five minutes
    python benchmarks/shard_figures.py --ranks 2 --constants src/tilestep/planning/constants.json

Prints what it found and writes it to benchmarks/results/. A part that fails or takes too long is reported with what it
has found so far, and the others still run, in new processes. `--quick` runs tiny sizes, on CPUs too: it checks the
harness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from shard_bench import Bench
from shard_contenders import MESHES, Shape, make_model
from shard_parts import ON_REQUEST, PARTS, REPLAYED
from timing import result_name

from tilestep import native
from tilestep.bench.results import environment
from tilestep.planning import Constants, Job, footprint, plan
from tilestep.rules import registry

RESULTS = Path(__file__).parent / "results"
PART_SECONDS, ALL_SECONDS = 180.0, 280.0
SETTLE_SECONDS = 10.0
"""How long ranks wait for each other at the end of a part, and how long before its time is over it should end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of parts is told: tiny sizes or not, when it ends, how long a part takes, batches and contenders."""

    quick: bool
    until: float
    part_seconds: float = PART_SECONDS
    batches: tuple[int, ...] = ()
    only: tuple[str, ...] = ()


def work(rank: int, ranks: int, folder: str, names: list[str], told: Run) -> None:
    """What a rank does: one part after the other, as long as all ranks get on with them in the same way."""
    cuda = torch.cuda.is_available()
    _take_own_cores(rank, ranks)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    options: dict[str, Any] = {"device_id": device} if cuda else {}
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    own = dist.PrefixStore("figures", store)
    timeout = timedelta(seconds=told.part_seconds)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout, **options
    )
    for name in names:
        (Path(folder) / f"{name}.begun").touch()
        error, found, start = "", {}, time.monotonic()
        end = min(told.until, start + told.part_seconds) - SETTLE_SECONDS
        note = partial(_write, Path(folder) / f"{name}.partial") if rank == 0 else _ignore
        try:
            found = PARTS[name](Bench(device, told.quick, end, note, told.batches, told.only))
        except Exception:
            error = traceback.format_exc()
        if rank == 0 and not error:
            found["seconds"] = round(time.monotonic() - start, 1)
            _write(Path(folder) / f"{name}.json", found)
        if error:
            (Path(folder) / f"{name}.error{rank}").write_text(error)
        own.set(f"{name}/{rank}", "failed" if error else "passed")
        keys = [f"{name}/{each}" for each in range(ranks)]
        try:
            own.wait(keys, timedelta(seconds=SETTLE_SECONDS))
        except Exception:
            os._exit(1)
        if len({own.get(key) for key in keys}) > 1:
            # The others are not where this one is: what comes next needs processes of its own.
            os._exit(1)
    os._exit(0)


def _take_own_cores(rank: int, ranks: int) -> None:
    """Keep this rank's threads on its part of the cores, as launchers do: what others do then disturbs it less."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def _ignore(found: dict[str, Any]) -> None:
    return None


def _write(path: Path, found: dict[str, Any]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(found))
    os.replace(path.with_suffix(".tmp"), path)


def run(names: list[str], ranks: int, told: Run) -> dict[str, Any]:
    """Every part's figures, or why there are none."""
    found: dict[str, Any] = {}
    while remaining := [name for name in names if name not in found]:
        if time.monotonic() > told.until:
            found.update({name: {"failure": "no time was left"} for name in remaining})
            break
        with tempfile.TemporaryDirectory() as folder:
            found.update(_run_some(remaining, ranks, told, Path(folder)))
    return found


def _run_some(names: list[str], ranks: int, told: Run, folder: Path) -> dict[str, Any]:
    context: Any = mp.get_context("spawn" if torch.cuda.is_available() else "fork")  # CUDA cannot be forked
    arguments = (ranks, str(folder), names, told)
    processes = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    begun: dict[str, float] = {}
    stopped = ""
    while any(process.is_alive() for process in processes) and not stopped:
        time.sleep(0.1)
        now = time.monotonic()
        for name in names:
            if name not in begun and (folder / f"{name}.begun").exists():
                begun[name] = now
        current = list(begun)[-1] if begun else ""
        done = not current or (folder / f"{current}.json").exists()
        if any(process.exitcode for process in processes):
            # The others wait for it.
            stopped = f"a rank ended, exit codes {[process.exitcode for process in processes]}"
        elif now > told.until or (not done and now - begun[current] > told.part_seconds):
            stopped = f"stopped after {now - begun.get(current, now):.0f} s"
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    found: dict[str, Any] = {}
    for name in begun:
        path, partly = folder / f"{name}.json", folder / f"{name}.partial"
        so_far = json.loads(partly.read_text()) if partly.exists() else {}
        errors = [each.read_text() for each in sorted(folder.glob(f"{name}.error*"))]
        if errors:
            found[name] = {**so_far, "failure": errors[0]}
        elif path.exists():
            found[name] = json.loads(path.read_text())
        else:
            codes = [process.exitcode for process in processes]
            found[name] = {**so_far, "failure": stopped or f"its processes ended, exit codes {codes}"}
    if not begun:
        found[names[0]] = {"failure": stopped or "the processes ended before any part began"}
    return found


def goals(found: dict[str, Any], ranks: int) -> dict[str, bool | None]:
    """The figures to reach; None where something is not known."""
    reached: dict[str, bool | None] = {}

    def goal(name: str, test: Any) -> None:
        try:
            reached[name] = bool(test())
        except (KeyError, TypeError):
            reached[name] = None

    mine, turns = found.get("sharded", {}), found.get("iterations", {})
    share = "all_beside_parameters_and_gradients_over_its_share"
    goal("state of a rank is 1/N within 2%", lambda: abs(mine["memory"]["state_over_its_share"]) <= 0.02)
    goal("all that is allocated for it is, too", lambda: abs(mine["memory"][share]) <= 0.02)
    scratch = "a step takes no more scratch than one bucket"
    goal(scratch, lambda: mine["memory"]["scratch_of_a_step_bytes"] <= mine["memory"]["bucket_bytes"])
    for name in ("data_parallel", "data_parallel_master", "fully_sharded"):
        for batch in ("1", "4"):
            goal(
                f"iteration below {name} at batch {batch}",
                lambda name=name, batch=batch: (
                    turns[batch]["sharded"]["iteration_ms"]["median"] < turns[batch][name]["iteration_ms"]["median"]
                ),
            )
    if ranks == 4:
        goal(
            "exposed clip, step and gather at most 15% at batch 4",
            lambda: turns["4"]["sharded"]["exposed_clip_step_gather"] <= 0.15,
        )
    goal("update at 95% of a copy or more", lambda: mine["parts of a step"]["update_of_copy"] >= 0.95)
    goal("host of a step at most 1 ms for the model's tensors", lambda: mine["host"]["step"]["median"] <= 1)
    goal("host of a replayed step at most 1 ms for them", lambda: mine["host"][REPLAYED]["median"] <= 1)
    for count, most in (("219", 1), ("2000", 3)):
        goal(
            f"host of a step at most {most} ms for {count} tensors of 64 k elements",
            lambda count=count, most=most: found["host_of_many"][count]["step"]["median"] <= most,
        )
    return reached


def _kept(known: dict[str, Any], here: dict[str, str], names: list[str]) -> dict[str, Any]:
    """Parts of an earlier run that this one does not take; each says where it is from.

    Raises:
        SystemExit: for figures of another device or torch.
    """
    before = known.get("environment", here)
    if any(before[key] != here[key] for key in ("device", "torch")):
        raise SystemExit(f"figures of {before['device']}, torch {before['torch']}, cannot be added to here")
    parts = {name: known[name] for name in PARTS if name in known and name not in names}
    parts = {name: part for name, part in parts.items() if "failure" not in part}
    return {name: {"environment": before, **part} for name, part in parts.items()}


def constants_of(found: dict[str, Any], source: str, device: torch.device) -> Constants:
    """The default constants, with those that were measured in their places."""
    known = Constants.load()
    values: dict[str, float] = {}
    try:
        every = found["collectives"]["all ranks"]
        rows, ranks = every["rows"], every["ranks"]
        for name in ("reduce_scatter", "all_gather"):
            more = rows[-1]["bytes"] - rows[-2]["bytes"]
            seconds = (rows[-1][f"{name}_ms"] - rows[-2][f"{name}_ms"]) / 1e3
            values[f"{name}_bandwidth"] = more * (ranks - 1) / ranks / seconds
        latency = latency_of(rows)
        hop = known.hop_latency
        if "two ranks" in found["collectives"]:
            two = latency_of(found["collectives"]["two ranks"]["rows"])
            hop = max((latency - two) / (ranks - 2), 1e-7)
            values["hop_latency"] = hop
        values["launch_latency"] = max(latency - hop * (ranks - 1), 1e-6)
    except (KeyError, IndexError, ZeroDivisionError):
        pass
    try:
        parts = found["sharded"]["parts of a step"]
        values["memory_bandwidth"] = parts["copy_bytes_per_second"]
        values["step_latency"] = (1 - parts["update_of_copy"]) * parts["update_ms"]["median"] / 1e3
    except KeyError:
        pass
    values |= _of_models(found, values.get("memory_bandwidth", known.memory_bandwidth))
    values |= _of_host(found)
    with contextlib.suppress(KeyError):
        values["beside_gathers"] = found["beside"]["gathers"]["added_over_alone"]
    with contextlib.suppress(KeyError, ValueError, ZeroDivisionError):
        values["beside_sums"] = _beside_sums(found, dataclasses.replace(known, **values))
    if device.type == "cuda":
        values["gpu_memory"] = float(torch.cuda.get_device_properties(device).total_memory)
    values = {name: value for name, value in values.items() if value > 0}
    sources = {**known.sources, **dict.fromkeys(values, source)}
    if "gpu_memory" in values:
        sources["gpu_memory"] = "what torch says of the device; in no recorded file"
    return dataclasses.replace(known, **values, sources=sources)


def _of_models(found: dict[str, Any], bandwidth: float) -> dict[str, float]:
    """Speed of forward and backward from their times at two batches, and the host's part of them."""
    if "failure" in found.get("models", {"failure": ""}):
        return {}
    elements, tensors = found["models"]["elements"], found["models"]["tensors"]
    values: dict[str, float] = {}
    for regime, prefix in (("eager", ""), ("compiled", "compiled_")):
        own = found["models"][regime]
        (few, first), (many, second) = sorted(
            (int(key.split()[1].rstrip(",")), figures["median"] / 1e3)
            for key, figures in own.items()
            if key.startswith("batch ") and not key.startswith("batch 1,")
        )
        each = (second - first) / (many - few)
        values[f"{prefix}compute"] = 6 * elements * found["length"] / each
        values[f"{prefix}model_host"] = own["host_ms"]["median"] / 1e3 / tensors
        values[f"{prefix}model_bytes"] = max(first - few * each, 1e-5) * bandwidth / elements
    return values


def _beside_sums(found: dict[str, Any], known: Constants) -> float:
    """Seconds that backward takes longer for each second of sums beside it, beyond what the plan knows of."""
    batch = max((key for key in found["iterations"] if key.isdigit()), key=int)
    measured = found["iterations"][batch]["sharded"]["exposed_sums_ms"]["median"] / 1e3
    needs = footprint(registry["AdamW"], master_weights=True)
    elements, tokens = found["sharded"]["memory"]["elements"], int(batch) * found["length"]
    planned = plan(Job(elements, needs, found["ranks"], tokens=tokens), known)
    waited = planned.exposed["sum gradients"]
    return (measured - waited - planned.times["bring together"]) / (planned.times["sum gradients"] - waited)


def _of_host(found: dict[str, Any]) -> dict[str, float]:
    """What tensors and collectives add to the host's part of a step."""
    try:
        own, many = found["sharded"], found["host_of_many"]
        rows = [(own["memory"]["tensors"], own["memory"]["buckets"], own["host"]["step"]["median"])]
        rows += [
            (int(count), each["buckets"], each["step"]["median"]) for count, each in many.items() if count.isdigit()
        ]
        sizes = torch.tensor([[1.0, tensors, messages] for tensors, messages, _ in rows], dtype=torch.float64)
        times = torch.tensor([[milliseconds / 1e3] for *_, milliseconds in rows], dtype=torch.float64)
        solved = torch.linalg.lstsq(sizes, times).solution.flatten().tolist()
    except (KeyError, RuntimeError):
        return {}
    return dict(zip(("step_host", "tensor_host", "message_host"), solved)) if len(rows) >= 3 else {}


def latency_of(rows: list[dict[str, float]]) -> float:
    """Seconds of the smallest reduce-scatter and all-gather, in the mean."""
    return (rows[0]["reduce_scatter_ms"] + rows[0]["all_gather_ms"]) / 2e3


def predictions(ranks: int) -> dict[str, Any]:
    """What `tilestep plan` expects of the parts `meshes` and `meshes_compiled`, with the constants that it ships."""
    shape, constants = Shape(), Constants.load()
    params = list(make_model(shape, torch.device("meta"), torch.bfloat16).parameters())
    elements, needs = sum(map(torch.Tensor.numel, params)), footprint(registry["AdamW"], master_weights=True)

    def expected(shard: int, copies: int, batch: int, regime: Any) -> dict[str, float]:
        job = Job(elements, needs, shard, copies, batch * shape.length, regime=regime, tensors=len(params))
        planned = plan(job, constants)
        exposed = {name: round(seconds * 1e3, 3) for name, seconds in planned.exposed.items()}
        return {"iteration_ms": round(planned.iteration * 1e3, 2), **exposed}

    return {
        part: {
            str(batch): {f"sharded_{m[0]}x{m[1]}": expected(*m, batch, regime) for m in MESHES if m[0] * m[1] == ranks}
            for batch in (1, 4)
        }
        for part, regime in (("meshes", "eager"), ("meshes_compiled", "blocks"))
    }


def main(
    ranks: Annotated[int, typer.Option(min=0, help="GPUs; 0 for all.")] = 0,
    parts: Annotated[str, typer.Option(help="Only these, by name, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="After this no part begins.")] = ALL_SECONDS,
    part_seconds: Annotated[float, typer.Option(help="After this a part is stopped.")] = PART_SECONDS,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "",
    contenders: Annotated[str, typer.Option(help="Only these in parts that compare iterations, with commas.")] = "",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    constants: Annotated[Path | None, typer.Option(help="Write constants for `tilestep plan` there.")] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, on CPUs too: checks the harness.")] = False,
    add: Annotated[bool, typer.Option(help="Keep the parts that --output has and this run does not take.")] = False,
    predict: Annotated[bool, typer.Option(help="Measure nothing: print what the plan expects of the meshes.")] = False,
    again: Annotated[
        bool, typer.Option(help="Measure nothing: write --constants of what --output has of --parts.")
    ] = False,
) -> None:
    """Measure, print, write."""
    start = time.monotonic()
    if predict:
        expected = {"constants": environment(torch.device("cpu"))["commit"], "ranks": ranks, **predictions(ranks)}
        print(json.dumps(expected, indent=1))
        if output is not None:
            output.write_text(json.dumps(expected, indent=1) + "\n")
        return
    if again:
        if output is None or constants is None:
            raise SystemExit("--again takes --output and --constants")
        stored = json.loads(output.read_text())
        left_out = set(PARTS).difference(part.strip() for part in parts.split(",")) if parts else set()
        stored = {name: part for name, part in stored.items() if name not in left_out}
        device, source = stored["environment"]["device"], output.resolve().relative_to(RESULTS.parent.parent)
        measured = f"measured: {stored['ranks']} x {device}, {source}"
        constants_of(stored, measured, torch.device("cpu")).save(constants)
        return
    cuda = torch.cuda.is_available()
    if not cuda and not quick:
        raise SystemExit("these figures are about GPUs, and there is none here; --quick checks the harness")
    ranks = ranks or (torch.cuda.device_count() if cuda else 2)
    names = [name.strip() for name in parts.split(",") if name.strip()] or [
        name for name in PARTS if name not in ON_REQUEST
    ]
    if unknown := set(names).difference(PARTS):
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not quick:
        # Built beside the first parts; the last ones need it.
        native.module(sys.maxsize)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    described = environment(device)
    sizes = tuple(int(size) for size in batches.split(",") if size)
    only = tuple(name.strip() for name in contenders.split(",") if name.strip())
    found = run(names, ranks, Run(quick, start + seconds, part_seconds, sizes, only))
    path = output or RESULTS / f"{result_name('shard', device, ranks)}.json"
    known = json.loads(path.read_text()) if add and path.exists() else {}
    found = {**_kept(known, described, names), **found}
    result: dict[str, Any] = {"environment": described, "ranks": ranks, "quick": quick, **found}
    result["length"] = Bench(device, quick).shape.length
    result["goals"] = reached = {} if quick else goals(result, ranks)
    result["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(result, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    if constants is not None:
        source = f"measured: {ranks} x {described['device']}, {described['date']}, {path.name}"
        constants_of(result, source, device).save(constants)
        print(f"constants written to {constants}")
    failed = [
        f"{name}: {part['failure'].strip().splitlines()[-1]}" for name, part in found.items() if "failure" in part
    ]
    missed = [name for name, held in reached.items() if held is False]
    for title, lines in (("failed", failed), ("not reached", missed)):
        if lines:
            print(f"{title}: " + "; ".join(lines))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
