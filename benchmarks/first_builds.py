"""What Triton builds before the first step of a rule can run, and how long that takes; no GPU is needed.

`python benchmarks/first_builds.py --rules all --shapes 8x8` builds every kernel that the first clipped step of new
parameters launches, for an H200, in a process with empty caches: one after the other as they are launched, and all at
once as with TILESTEP_BUILD_THREADS=8. Loading and running kernels, and torch's own work, are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from absent_gpu import absent_gpu, engine_of

import tilestep
from tilestep.backends.tuning import default_shape
from tilestep.bench.sections import MAX_GRAD_NORM
from tilestep.kernels.cache import forget_directory
from tilestep.kernels.launch import Launch, build_together
from tilestep.norm.triton_backend import TritonNorm
from tilestep.runtime import StepInputs

__all__ = ["Builds", "KernelBuild", "builds_of", "first_launches"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class KernelBuild:
    """How one kernel was built.

    Args:
        name: the kernel's.
        stages: seconds by stage: `python` is the code that becomes Triton's first representation.
        launcher: seconds for the C that launches it; nothing if a kernel before has the same parameters.
    """

    name: str
    stages: Mapping[str, float]
    launcher: float


@dataclass(frozen=True)
class Builds:
    """What the first step of a rule builds.

    Args:
        rule: its name.
        prepared: seconds for tracing, generating code, tables and state.
        serial: seconds for building kernel after kernel.
        processor: seconds of a processor that this takes, Triton's subprocesses included: the same on a busy machine.
        together: seconds for building them in threads, then loading them from the caches.
        again: seconds in a process that finds everything in the caches, the first of these figures included.
        kernels: each of them, built one after the other.
    """

    rule: str
    prepared: float
    serial: float
    processor: float
    together: float
    again: float
    kernels: Sequence[KernelBuild] = field(default=(), repr=False)


def first_launches(rule: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Launch]:
    """What the first clipped step of a rule with its defaults launches on a GPU; the tensors are on the CPU.

    Matrix libraries are not in it, nor what Muon and SOAP build for matrices of 1,024 rows and more.

    Args:
        rule: its name.
        shapes: of the parameters.
        dtype: of all of them.
    """
    from tilestep.backends.triton.run import decision_launch
    from tilestep.optimizer.control import decide

    parameters = [torch.ones(tuple(shape), dtype=dtype, requires_grad=True) for shape in shapes]
    make = partial(tilestep.Optimizer, parameters, rule, max_grad_norm=MAX_GRAD_NORM)
    engine = engine_of(make, default_shape(None, "cuda"))
    norm = TritonNorm(torch.device("cpu"), [each.numel() for each in parameters], [dtype] * len(parameters))
    tiles, partials = norm.tiles_launch(engine.grads)
    launches = [tiles, decision_launch(decide, engine.control.numbers, StepInputs(partials=partials), {})]
    launches += [launch for passes in engine.passes for launch in passes.launches(False)]
    for launcher, _ in launches:
        launcher._device, launcher._compiles = DEVICE, True
    return [launch for launch in launches if not launch[0].is_built]


def builds_of(rule: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Builds:
    """Build what a rule's first step launches, each time in a process with caches of its own.

    Args:
        rule: its name.
        shapes: of the parameters.
        dtype: of all of them.

    Raises:
        RuntimeError: if a process fails.
    """
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as other:
        one_by_one = _in_child(kept, rule, shapes, dtype, False)
        again = _in_child(kept, rule, shapes, dtype, True)
        together = _in_child(other, rule, shapes, dtype, True)
    kernels = [KernelBuild(**each) for each in one_by_one["kernels"]]
    seconds = again["prepared"] + again["seconds"]
    serial, processor = one_by_one["seconds"], one_by_one["processor"]
    return Builds(rule, one_by_one["prepared"], serial, processor, together["seconds"], seconds, kernels)


def _in_child(caches: str, *arguments: Any) -> dict[str, Any]:
    """What `_build` says in a copy of this process, which has imported everything and built nothing."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_build, args=(sender, caches, *arguments))
    child.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = None
    child.join()
    if not isinstance(found, dict):
        raise RuntimeError(f"{arguments[0]}: {found or 'the process has ended without a word'}")
    return found


def _send_build(sender: Connection, caches: str, *arguments: Any) -> None:
    try:
        os.environ["TILESTEP_CACHE_DIR"] = caches
        os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
        forget_directory()
        with tempfile.TemporaryDirectory() as folder, absent_gpu(Path(folder)):
            sender.send(_build(*arguments))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def _build(rule: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, together: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    launches = first_launches(rule, shapes, dtype)
    prepared = time.perf_counter() - begin
    kernels = []
    begin, processor = time.perf_counter(), _processor_seconds()
    if together:
        os.environ["TILESTEP_BUILD_THREADS"] = "8"
        build_together(launches, DEVICE)
        for launcher, arguments in launches:
            launcher.build(*arguments)
    else:
        kernels = [asdict(_one(launch)) for launch in launches]
    seconds, processor = time.perf_counter() - begin, _processor_seconds() - processor
    return {"prepared": prepared, "seconds": seconds, "processor": processor, "kernels": kernels}


def _processor_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _one(launch: Launch) -> KernelBuild:
    launcher, arguments = launch
    stages: dict[str, float] = {}
    with _stages_noted(stages):
        launcher.compile(arguments)
    begin = time.perf_counter()
    launcher.build(*arguments)
    return KernelBuild(launcher._kernel.__name__, stages, time.perf_counter() - begin)


@contextlib.contextmanager
def _stages_noted(stages: dict[str, float]) -> Iterator[None]:
    """A block in which Triton's times are kept, in seconds."""
    from triton import knobs

    def listener(*, times: Any, cache_hit: bool, **event: Any) -> None:
        if not cache_hit:
            stages["python"] = times.ir_initialization * 1e-6
            stages.update({name: microseconds * 1e-6 for name, microseconds in times.lowering_stages})

    before, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield
    finally:
        knobs.compilation.listener = before


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each rule, or with `--json` everything that is known of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="all", help="names, with commas")
    parser.add_argument("--shapes", default="8x8", help="of the parameters, with commas: 8x8,64")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--json", action="store_true", help="a JSON object a line, with every kernel and stage")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # children are forked, and OpenMP's threads do not survive that
    import triton  # noqa: F401  # importing it is no part of a step

    shapes = [[int(side) for side in shape.split("x")] for shape in chosen.shapes.split(",")]
    if not chosen.json:
        print(
            f"{'rule':20}{'kernels':>8}{'launchers':>10}{'prepared':>10}{'serial':>8}{'processor':>10}{'together':>10}{'again':>8}"
        )
    for name in tilestep.registry if chosen.rules == "all" else chosen.rules.split(","):
        found = builds_of(name, shapes, DTYPES[chosen.dtype])
        if chosen.json:
            print(json.dumps(asdict(found)), flush=True)
            continue
        built = [each for each in found.kernels if each.stages]
        launchers = sum(each.launcher for each in found.kernels)
        figures = (
            f"{found.prepared:10.2f}{found.serial:8.2f}{found.processor:10.2f}{found.together:10.2f}{found.again:8.2f}"
        )
        print(f"{name:20}{len(built):8}{launchers:10.2f}{figures}", flush=True)


if __name__ == "__main__":
    main()
