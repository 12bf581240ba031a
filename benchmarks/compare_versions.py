"""Compare two versions of tilestep by turns: host time of steps, constructors and loads, device time of large steps.

    git worktree add ../before v0.1.0
    python benchmarks/compare_versions.py ../before/src src --out benchmarks/results/compare_versions_h100_1.json

Each version runs in a process of its own, one round at a time, so that a machine whose speed drifts slows both alike;
the figure to quote is the ratio within rounds. Only what both versions have in common is used: named rules,
`max_grad_norm`, `master_weights`, `state_dict`, `total_norm`, `capture`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

Case = tuple[Callable[[], None], Callable[[], None], bool]
"""What runs before each repetition, what is timed, and whether it is timed on the device."""

LARGE = 1_190_000_000
REPETITIONS = 5


def _flush(megabytes: int = 64) -> Callable[[], None]:
    """Empty the processor's caches, as a backward does."""
    buffer = torch.zeros(megabytes << 18)

    def flush() -> None:
        buffer.add_(1.0)

    return flush


def _steps(
    device: str, count: int, elements: int, dtype: torch.dtype, options: dict[str, Any], on_device: bool
) -> Case:
    import tilestep

    params = [torch.nn.Parameter(torch.randn(elements, device=device, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = tilestep.AdamW(params, lr=1e-5, **options)
    for _ in range(4):
        optimizer.step()
    flush = _flush()
    return (flush if not on_device else lambda: None), optimizer.step, on_device


def _rule(name: str, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> Case:
    """The step of a named rule on a GPU, on the device's clock."""
    import tilestep

    params = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = getattr(tilestep, name)(params, max_grad_norm=1.0)
    for _ in range(3):
        optimizer.step()
    return (lambda: None), optimizer.step, True


def _norm(count: int, elements: int) -> Case:
    """The total norm of many tensors on a GPU, on the device's clock."""
    import tilestep

    tensors = [torch.randn(elements, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    for _ in range(3):
        tilestep.total_norm(tensors)
    return (lambda: None), lambda: tilestep.total_norm(tensors), True


def _replay(count: int, elements: int, on_device: bool) -> Case:
    """A captured step, replayed."""
    import tilestep

    params = [torch.nn.Parameter(torch.randn(elements, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = tilestep.AdamW(params, lr=1e-5, max_grad_norm=1.0)
    optimizer.step()
    captured = tilestep.capture(optimizer)

    def replay(optimizer: Any = optimizer) -> None:  # a capture does not keep its optimizer
        captured.replay()

    replay()
    return (_flush() if not on_device else lambda: None), replay, on_device


def _constructor(device: str, count: int) -> Case:
    import tilestep

    params = [torch.nn.Parameter(torch.randn(1024, device=device)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)

    def construct() -> None:
        tilestep.AdamW(params, lr=1e-5).step()

    construct()
    return (lambda: None), construct, False


def _load(device: str, count: int) -> Case:
    import tilestep

    params = [torch.nn.Parameter(torch.randn(1024, device=device)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = tilestep.AdamW(params, lr=1e-5)
    optimizer.step()
    saved = optimizer.state_dict()

    def load() -> None:
        optimizer.load_state_dict(saved)
        optimizer.step()

    load()
    return (lambda: None), load, False


def cases(device: str) -> dict[str, Callable[[], Case]]:
    """Every figure of a device, by its name."""
    small = 1024 if device == "cpu" else 65536
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made: dict[str, Callable[[], Case]] = {}
    for count, elements in ((50, small), (219, small), (2000, small), (2000, 1024), (5000, 1024)):
        for clip in (False, True):
            options = {"max_grad_norm": 1.0} if clip else {}
            name = f"{device}: host of a step, {count} tensors of {elements}{', clip' if clip else ''}"
            made[name] = lambda count=count, elements=elements, options=options: _steps(
                device, count, elements, dtype, options, False
            )
    made[f"{device}: constructor and a step, 200 tensors"] = lambda: _constructor(device, 200)
    made[f"{device}: load_state_dict and a step, 200 tensors"] = lambda: _load(device, 200)
    if device == "cuda":
        for name, options in {
            "": {},
            ", clip": {"max_grad_norm": 1.0},
            ", float32 masters, clip": {"max_grad_norm": 1.0, "master_weights": True},
            ", remainders, clip": {"max_grad_norm": 1.0, "master_weights": "remainder"},
        }.items():
            made[f"cuda: device time of AdamW, 219 bf16 tensors of 1.19 B{name}"] = lambda options=options: _steps(
                "cuda", 219, LARGE // 219, torch.bfloat16, options, True
            )
        for rule in ("SGD", "Lion", "LAMB", "Adafactor", "AdEMAMix", "ScheduleFreeAdamW"):
            made[f"cuda: device time of {rule}, 100 float32 matrices of 2048 x 1024, clip"] = lambda rule=rule: _rule(
                rule, (2048, 1024), 100, torch.float32
            )
        made["cuda: device time of Muon, 24 bf16 matrices of 2048 x 1024, clip"] = lambda: _rule(
            "Muon", (2048, 1024), 24, torch.bfloat16
        )
        for count, elements in ((219, LARGE // 219), (2000, 65536)):
            made[f"cuda: total norm of {count} bf16 tensors of {elements}"] = lambda count=count, elements=elements: (
                _norm(count, elements)
            )
            made[f"cuda: captured step, replayed, {count} bf16 tensors of {elements}"] = (
                lambda count=count, elements=elements: _replay(count, elements, True)
            )
    return made


def _timed(case: Case) -> float:
    # timing.py needs a tilestep of its own commit; the one that is measured here may be of any.
    before, work, on_device = case
    samples = []
    for _ in range(REPETITIONS):
        before()
        if on_device:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop))
            continue
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples)


def worker() -> None:
    """Answer a name with "ready", then each "go" with the milliseconds of a round."""
    import gc

    from tilestep import native

    native.wait()  # else the first figures are of steps that look at tensors one by one
    torch.manual_seed(0)
    every = {name: make for device in devices() for name, make in cases(device).items()}
    case: Case | None = None
    for line in sys.stdin:
        word = line.strip()
        if word == "go":
            assert case is not None
            print(f"= {_timed(case)}", flush=True)
        else:
            case = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            case = every[word]()
            print("= 0", flush=True)


def devices() -> list[str]:
    """The devices of this machine."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Version:
    """A process that runs one version.

    Args:
        source: the folder that holds the package.
    """

    def __init__(self, source: Path) -> None:
        paths = [str(source.resolve()), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, word: str) -> float:
        """Send a word and wait for its answer, in milliseconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("= "):
                return float(line[2:])
        raise RuntimeError(f"{word}: the process ended with code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(before: Path, after: Path, rounds: int, only: str) -> dict[str, Any]:
    """Medians of both versions and the quartiles of the ratio within rounds, for each figure."""
    both = Version(before), Version(after)
    figures: dict[str, Any] = {}
    try:
        for name in (name for device in devices() for name in cases(device)):
            if only not in name:
                continue
            for version in both:
                version.ask(name)
            pairs = []
            for turn in range(rounds):
                order = both if turn % 2 == 0 else both[::-1]
                values = {id(version): version.ask("go") for version in order}
                pairs.append([values[id(version)] for version in both])
            ratios = statistics.quantiles([right / left for left, right in pairs], n=4)
            left, right = (statistics.median(column) for column in zip(*pairs))
            figures[name] = {"before_ms": left, "after_ms": right, "ratio_quartiles": ratios}
            print(
                f"{name:72s} {left:9.3f} {right:9.3f}  {ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})", flush=True
            )
    finally:
        for version in both:
            version.close()
    return figures


def main(
    before: Annotated[Path, typer.Argument(help="folder with the older package")],
    after: Annotated[Path, typer.Argument(help="folder with the newer package")],
    out: Annotated[Path | None, typer.Option(help="file for the figures")] = None,
    rounds: Annotated[int, typer.Option(help="turns of each figure")] = 21,
    only: Annotated[str, typer.Option(help="figures whose name holds this")] = "",
    names: Annotated[str, typer.Option(help="what to call both versions in the file, as commits: BEFORE,AFTER")] = "",
) -> None:
    """Compare two versions by turns."""
    print(f"{'':72s}    before     after  ratio (quartiles), milliseconds")
    figures = compare(before, after, rounds, only)
    if out is not None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about = {"versions": names, "gpu": gpu, "machine": platform.machine(), "cores": os.cpu_count()}
        about |= {"torch": torch.__version__, "python": platform.python_version(), "rounds": rounds}
        out.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        typer.run(main)
