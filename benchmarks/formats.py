"""Clip and AdamW with states and masters in every format: time beside that of a copy of as many bytes.

    python benchmarks/formats.py [--elements 1190000000] [--only int8] [--rule LAMB ...] [--dtype float32]
                                 [--peers [SECONDS]] [--memory] [--out FOLDER]

On a GPU 219 bfloat16 tensors of 1.19 B elements and 2,000 tensors of 131 M elements; on a CPU a hundredth of it. One
process, by turns, the median of the rounds; the floor is a copy of as many bytes with `copy_`. On a CPU also one tensor
of 524,288 elements, and the loop written by hand for the format (plain_loops.py), from the same state and checked
against it, with quartiles of the ratios of times that follow each other, of the whole step and of its kernels alone;
with `--threads 1` of the thread's own time. `--peers` measures the optimizers of other libraries after
`torch.nn.utils.clip_grad_norm_`, each in a process of its own that may take so many seconds: on 24 of the 219 tensors
first, then on all where time is left. One that cannot be imported or run says why. `--memory` measures the peak of a
step and of a backward pass that takes it, in place of times. `--free-bits` measures what rounding at random takes
without its random bits: the states are wrong. With `--out`, formats_<device>_1.json is written there
after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain_loops import disagreement, plain_step
from timing import between_events, result_name

import tilestep
from tilestep import native
from tilestep.backends.triton import text as triton_text
from tilestep.backends.tuning import TileShape, forced_shape
from tilestep.bench.results import environment
from tilestep.graph import Builder, Value
from tilestep.kernels.spec import total_traffic

CHOICES: dict[str, dict[str, Any]] = {
    "float32 states": {"state_dtype": "float32"},
    "bfloat16 states": {},
    "bfloat16 states, float32 masters": {"state_dtype": "bfloat16", "master_weights": True},
    "bfloat16 states, remainder masters": {"state_dtype": "bfloat16", "master_weights": "remainder"},
    "bfloat16 states, kahan masters": {"state_dtype": "bfloat16", "master_weights": "kahan"},
    "int8 states": {"state_dtype": "int8"},
    "int8 states, int8 masters": {"state_dtype": "int8", "master_weights": "int8"},
    "int8 states, float32 masters": {"state_dtype": "int8", "master_weights": True},
    "float8_e4m3 states": {"state_dtype": "float8_e4m3"},
    "float8_e4m3 states, int8 masters": {"state_dtype": "float8_e4m3", "master_weights": "int8"},
    "float8_e4m3 states, float32 masters": {"state_dtype": "float8_e4m3", "master_weights": True},
    "int4 states": {"state_dtype": "int4"},
    "int4 states, int8 masters": {"state_dtype": "int4", "master_weights": "int8"},
    "int4 states, float32 masters": {"state_dtype": "int4", "master_weights": True},
    "stochastic int8 states": {"state_dtype": "int8", "rounding": "stochastic"},
    "stochastic int8 states, int8 masters": {
        "state_dtype": "int8",
        "master_weights": "int8",
        "rounding": "stochastic",
    },
    "stochastic int8 states, float32 masters": {
        "state_dtype": "int8",
        "master_weights": True,
        "rounding": "stochastic",
    },
    "stochastic int4 states, int8 masters": {
        "state_dtype": "int4",
        "master_weights": "int8",
        "rounding": "stochastic",
    },
}

PLAIN = frozenset(
    {
        "float32 states",
        "bfloat16 states",
        "bfloat16 states, float32 masters",
        "int8 states",
        "int8 states, int8 masters",
        "float8_e4m3 states, int8 masters",
        "int4 states",
        "int4 states, int8 masters",
    }
)
"""Formats whose loop is written by hand in plain_loops.py."""

PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flashoptim, 24-bit masters": ("flashoptim", "FlashAdamW", {}),
    "flashoptim, no masters": ("flashoptim", "FlashAdamW", {"master_weight_bits": None}),
    "bitsandbytes 8-bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "torchao 8-bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao 4-bit": ("torchao.optim", "AdamW4bit", {}),
    "torchao fp8": ("torchao.optim", "AdamWFp8", {}),
    "heavyball, bf16+8 states": ("heavyball", "AdamW", {"ecc": "bf16+8", "betas": (0.9, 0.999)}),
    "heavyball, bf16+8 states and weights": (
        "heavyball",
        "AdamW",
        {"ecc": "bf16+8", "param_ecc": "bf16+8", "betas": (0.9, 0.999)},
    ),
}
"""Module, class and arguments of other libraries' optimizers; FlashOptim's defaults are its flagship: 24-bit masters,
states of 8 bits, one kernel a parameter."""

TENSORS, PART = 219, 24
"""Matrices of the large model, and of the part of it that a slow peer is measured on."""


def shapes(elements: int, tensors: int) -> list[tuple[int, int]]:
    """Matrices of about so many elements, with as many of about 4,096 rows as there is room for."""
    width = max(256, int((elements / tensors) ** 0.5) // 256 * 256)
    return [(max(elements // tensors // width, 1), width)] * tensors


def waited(run: Callable[[], Any], device: str) -> float:
    """Milliseconds until one call is done, its host's time among them."""
    # Of one thread, the time that it had: others may use the machine too.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - start) * 1e3


def timed(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call; on a GPU of the device alone, which is kept busy while the host gets the call ready."""
    if device == "cpu":
        return waited(run, device)
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000)
    return between_events(run)


def made(
    name: str, sizes: list[tuple[int, int]], device: str, rule: str = "AdamW", dtype: torch.dtype = torch.bfloat16
) -> tuple[Callable[[], Any], Any, int, Any, list[Any]]:
    """Clip and step, bytes of the state and bytes that a step has to move; the optimizer and its parameters."""
    params = [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    named = [(f"layer{place}.weight", param) for place, param in enumerate(params)]
    if name in CHOICES:
        optimizer: Any = tilestep.Optimizer(named, rule, lr=1e-3, max_grad_norm=1.0, **CHOICES[name])
        run = optimizer.step
    else:
        module, kind, options = PEERS[name]
        optimizer = getattr(importlib.import_module(module), kind)(params, lr=1e-3, weight_decay=0.01, **options)

        def run() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

    run()
    state = sum(size_of(value) for of_param in optimizer.state.values() for value in of_param.values())
    # Gradients are read twice, once for the norm.
    moved = sum(4 * param.nbytes for param in params) + 2 * state
    if rule != "AdamW":
        elements = sum(param.numel() for param in params)
        segments = [passes.segment for engine in optimizer.plan.engines for passes in engine.passes]
        passes = sum(sum(total_traffic(segment.spec)) for segment in segments)
        moved = int(passes * elements) + sum(param.nbytes for param in params)
    return run, state, moved, optimizer, params


def size_of(value: Any) -> int:
    """Bytes of a tensor in a state, or of those that an object, mapping or list holds; 0 of a scalar."""
    if isinstance(value, (dict, list, tuple)):
        return sum(map(size_of, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, torch.Tensor) and hasattr(value, "__dict__"):
        return sum(map(size_of, vars(value).values()))
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 0
    if not hasattr(value, "__tensor_flatten__"):
        return value.nbytes
    return sum(size_of(getattr(value, inner)) for inner in value.__tensor_flatten__()[0] if inner != "qmap")


def measure(
    name: str,
    sizes: list[tuple[int, int]],
    device: str,
    rounds: int,
    rule: str = "AdamW",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Time of a step and of a copy of as many bytes, by turns."""
    run, state, moved, optimizer, params = made(name, sizes, device, rule, dtype)
    half = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    steps, copies, plain, kernels, apart = [], [], [], [], 0.0
    # Smaller tensors keep float32 states.
    has_plain = device == "cpu" and name in PLAIN and rule == "AdamW" and min(map(math.prod, sizes)) >= 4096
    has_plain &= dtype is torch.bfloat16
    by_hand, kept = plain_step(name, params, optimizer, 1.0) if has_plain else (None, [])
    for _ in range(rounds):
        steps.append(timed(run, device))
        if by_hand is not None:
            plain.append(timed(by_hand, device))
            apart = apart if len(plain) > 1 else disagreement(kept, params, optimizer)
            kernels.append(timed(partial(run_kernels, optimizer), device))
        copies.append(timed(lambda: other.copy_(half), device))
    waits = [waited(run, device) for _ in range(rounds)]
    elements = sum(rows * columns for rows, columns in sizes)
    return {
        "format": name,
        **({} if rule == "AdamW" else {"rule": rule}),
        **({} if dtype is torch.bfloat16 else {"parameters": str(dtype).removeprefix("torch.")}),
        "tensors": len(sizes),
        "elements": elements,
        "ms": round(statistics.median(steps[2:]), 3),
        "with the host's time, ms": round(statistics.median(waits), 3),
        "copy of as many bytes, ms": round(statistics.median(copies[2:]), 3),
        "state, bytes an element": round(state / elements, 3),
        **({} if by_hand is None else _beside(steps[2:], plain[2:], kernels[2:], copies[2:], apart)),
    }


def index_bits() -> Value:
    """What stands for an element's random bits where these are to cost nothing."""
    build = Builder()
    return build.apply("bit_and", build.load("low", dtype="int32"), build.integer(0xFFFF), dtype="int32")


def run_kernels(optimizer: Any) -> None:
    """The norm and the passes of a step, without what the host does before them."""
    for engine in optimizer.plan.engines:
        engine.norm.sum_squares()
        for passes in engine.passes:
            for index in range(len(passes.segment.spec.program.scalars)):
                for call in (*passes.scalar_calls(index), *passes.tile_calls(index)):
                    call()


def _beside(
    steps: list[float], plain: list[float], kernels: list[float], copies: list[float], apart: float
) -> dict[str, Any]:
    """Times beside those of the loop written by hand: ratios of those that follow each other, by quartiles."""

    def quartiles(times: list[float], others: list[float]) -> list[float]:
        ratios = [time / other for time, other in zip(times, others)]
        return [round(cut, 3) for cut in statistics.quantiles(ratios, n=4)]

    return {
        "plain loop, ms": round(statistics.median(plain), 3),
        "over the plain loop, quartiles": quartiles(steps, plain),
        "kernels over the plain loop, quartiles": quartiles(kernels, plain),
        "over the copy, quartiles": quartiles(steps, copies),
        "plain loop over the copy, quartiles": quartiles(plain, copies),
        "fastest, plain loop's and copy's, ms": [round(min(times), 3) for times in (steps, plain, copies)],
        "share of entries that are one off the plain loop's": round(apart, 9),
    }


def measure_memory(elements: int, width: int = 2304) -> dict[str, Any]:
    """Peaks of a GPU's memory: with all gradients, and where a backward pass updates and lets go of each."""
    peaks: dict[str, Any] = {"format": "int8 states, int8 masters"}
    layers = elements // width**2
    for title, during in (("with gradients", ""), ("gradients let go in backward", "backward")):
        torch.cuda.empty_cache()
        linears = [
            torch.nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
        ]
        model = torch.nn.Sequential(*linears)
        optimizer: Any = tilestep.AdamW(model.named_parameters(), lr=1e-5, state_dtype="int8", master_weights="int8")
        if during:
            optimizer = tilestep.overlap(optimizer, model, during=during)
        for warm in (True, False):
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(1, width, device="cuda", dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if not warm:
                peaks["elements"] = layers * width**2
                per_element = torch.cuda.max_memory_allocated() / (layers * width**2)
                peaks[f"peak, bytes an element, {title}"] = round(per_element, 3)
        del model, optimizer, linears
    return peaks


def measure_peer(name: str, elements: int, device: str, rounds: int, seconds: float) -> None:
    """Print a row of a part of the tensors, then of all where that can be expected to end in time."""
    begin = time.monotonic()
    sizes = shapes(elements, TENSORS)
    # HeavyBall compiles for each list of tensors: 54 s for 8 on an H200.
    part = 8 if name.startswith("heavyball") else PART
    print(json.dumps(measure(name, sizes[:part], device, rounds)), flush=True)
    taken = time.monotonic() - begin
    # What is compiled for a list of tensors is compiled again for a longer one.
    if taken * (1 + TENSORS / part) < seconds:
        print(json.dumps(measure(name, sizes, device, rounds)), flush=True)


def peer_row(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The last row that a process for a peer has printed, or why there is none."""
    command = [sys.executable, __file__, "--peer", name, "--peers", str(given.peers), "--rounds", str(given.rounds)]
    command += ["--elements", str(given.elements)] if given.elements else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.peers, check=False)
        output, why = done.stdout, " ".join(done.stderr.split())[-300:]
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"not done after {given.peers:.0f} s"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not rows:
        return {"format": name, "skipped": why or "no result"}
    part = (
        {}
        if rows[-1]["tensors"] == TENSORS
        else {"note": f"a part, {rows[-1]['tensors']} of {TENSORS} tensors: all take too long"}
    )
    return {**rows[-1], **part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int)
    parser.add_argument("--only", default="", help="formats whose names hold this")
    parser.add_argument("--rule", nargs="+", default=["AdamW"], help="the rules, in place of AdamW")
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters: bfloat16 or float32, without masters")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--shape", type=int, nargs="+", help="elements, warps, tiles and stages of a program, in place of the default"
    )
    parser.add_argument("--threads", type=int, help="of a CPU, in place of torch's default")
    parser.add_argument("--out", default="", help="folder of the result")
    parser.add_argument(
        "--peers", type=float, nargs="?", const=60.0, help="other libraries' optimizers, this many seconds for each"
    )
    parser.add_argument("--peer", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--free-bits", action="store_true", help="rounding at random by elements' indices, which cost next to nothing"
    )
    parser.add_argument("--memory", action="store_true", help="peaks of memory in place of times")
    given = parser.parse_args()
    if given.rounds < 4:
        parser.error(f"--rounds is {given.rounds}; the figures are medians and quartiles of at least 4")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(given.threads or torch.get_num_threads())
    elements = given.elements or (1_190_000_000 if device == "cuda" else 11_900_000)
    if given.peer:
        measure_peer(given.peer, elements, device, given.rounds, given.peers)
        return
    native.wait()
    if given.free_bits:
        given.only = given.only or "stochastic"
        triton_text.bits_graph = lambda slot: index_bits()
    if given.memory:
        print(json.dumps(measure_memory(elements)), flush=True)
        return
    result: dict[str, Any] = {
        "environment": environment(torch.device(device)),
        **({"note": "random bits that cost nothing: elements' indices"} if given.free_bits else {}),
        "rows": [],
    }

    def add(row: dict[str, Any], key: str) -> None:
        result.setdefault(key, []).append(row)
        print(json.dumps(row), flush=True)
        if given.out:
            Path(given.out, f"{result_name('formats', torch.device(device))}.json").write_text(
                json.dumps(result, indent=1) + "\n"
            )
        if device == "cuda":
            torch.cuda.empty_cache()

    if given.peers:
        for name in PEERS:
            if given.only in name:
                add(peer_row(name, given), "peers, after torch.nn.utils.clip_grad_norm_")
        return
    dtype = getattr(torch, given.dtype)
    many = shapes(elements // 9, 2000 if device == "cuda" else 200)
    one = [[(512, 1024)]] if device == "cpu" else []
    for sizes in (shapes(elements, TENSORS), *(() if given.shape else (many, *one))):
        for name, choice in CHOICES.items():
            if given.only in name and not (dtype is torch.float32 and "master_weights" in choice):
                with forced_shape(TileShape(*given.shape)) if given.shape else contextlib.nullcontext():
                    for rule in given.rule:
                        add(measure(name, sizes, device, given.rounds, rule, dtype), "rows")


if __name__ == "__main__":
    main()
