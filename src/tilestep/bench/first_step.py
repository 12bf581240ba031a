"""The `compile` section: how long the first step takes, in a fresh process with empty caches and with filled ones.

Run as a module, it is that process: `python -m tilestep.bench.first_step --peer tilestep --count 1000 --device cuda`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

import tilestep
from tilestep.bench.environment import environment
from tilestep.bench.measure import Spread, spread, synchronize
from tilestep.bench.peers import OURS, peers, step_of
from tilestep.bench.results import Group, Result, Row
from tilestep.bench.sections import MAX_GRAD_NORM, Settings

__all__ = ["first_step", "run_compile"]

CACHE_VARIABLES = ("TILESTEP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ELEMENTS = 64
SIDE = 8  # of parameters for rules by name: matrices, for those that take nothing else
RULE = "rule "
COMPILED_COUNT = 100  # parameters for the peers that compile: their time grows with the count


def run_compile(settings: Settings, rules: Sequence[str] = (), timeout: float = 600.0) -> Result:
    """Measure the first step of 1,000 and 10,000 parameters, each in processes of their own.

    Args:
        settings: as for the other sections.
        rules: instead of the peers, these rules with their defaults; "all" for every one.
        timeout: seconds after which a process is given up.

    Raises:
        ValueError: for a name that no rule has.
    """
    names = list(tilestep.registry) if list(rules) == ["all"] else rules
    for name in names:
        if name not in tilestep.registry:
            raise ValueError(f"no rule is called {name!r}; there are: {', '.join(tilestep.registry)}")
    result = Result("compile", environment(settings.device))
    result.notes.append(
        "wall: building the optimizer, the first clip and the first step, in a fresh process, imports done"
    )
    counts = (10, 20) if settings.quick else (1000, 10_000)
    repeats = 1 if settings.quick else 2
    if names:
        settings.say(f"compile: first step of {counts[0]:,} parameters, {len(names)} rules")
        rows = [row for name in names for row in _rows(RULE + name, counts[0], settings, 1, timeout)]
        result.groups.append(Group(f"first step, {counts[0]:,} parameters of {SIDE} x {SIDE}", rows))
        return result
    ready = [peer.name for peer in peers(settings.device) if peer.name in (OURS, "torch fused")]
    for count in counts:
        settings.say(f"compile: first step of {count:,} parameters")
        rows = [row for name in ready for row in _rows(name, count, settings, repeats if name == OURS else 1, timeout)]
        result.groups.append(Group(f"first step, {count:,} parameters of {ELEMENTS}", rows))
    if settings.compiled:
        names = [peer.name for peer in peers(settings.device, compiled=True) if peer.compiled]
        settings.say(f"compile: first step of {COMPILED_COUNT} parameters, compiling peers")
        rows = [row for name in names for row in _rows(name, COMPILED_COUNT, settings, 1, timeout)]
        result.groups.append(Group(f"first step, {COMPILED_COUNT} parameters of {ELEMENTS}", rows))
    return result


def _rows(name: str, count: int, settings: Settings, repeats: int, timeout: float) -> list[Row]:
    empty: list[float] = []
    filled: list[float] = []
    try:
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as caches:
                empty.append(_in_fresh_process(name, count, settings.device, caches, timeout))
                filled.append(_in_fresh_process(name, count, settings.device, caches, timeout))
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        return [Row(name, failure=" ".join(str(failure).split())[-200:])]
    return [_row(f"{name}, empty caches", spread(empty)), _row(f"{name}, filled caches", spread(filled))]


def _row(name: str, wall: Spread) -> Row:
    return Row(name, host=wall, wall=wall)


def _in_fresh_process(name: str, count: int, device: torch.device, caches: str, timeout: float) -> float:
    """Return the milliseconds of a first step; the caches of tilestep, Triton and Inductor are in the given folder."""
    variables = {variable: os.path.join(caches, variable.lower()) for variable in CACHE_VARIABLES}
    command = [sys.executable, "-m", __name__, "--peer", name, "--count", str(count), "--device", str(device)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return float(json.loads(done.stdout.splitlines()[-1])["milliseconds"])


def first_step(name: str, count: int, device: torch.device) -> float:
    """Build an optimizer for small parameters, clip and step once; return the milliseconds until the work is done.

    Args:
        name: a peer's, or `rule` and a rule's.
        count: parameters.
        device: where.

    >>> first_step("torch fused", 3, torch.device("cpu")) > 0
    True
    """
    shape = (SIDE, SIDE) if name.startswith(RULE) else (ELEMENTS,)
    parameters = [torch.ones(shape, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    importlib.import_module(
        "torch._dynamo"
    )  # any torch optimizer imports it when built: a second that is not compiling
    synchronize(device)
    begin = time.perf_counter()
    if name.startswith(RULE):
        tilestep.Optimizer(parameters, name.removeprefix(RULE), max_grad_norm=MAX_GRAD_NORM).step()
    else:
        step_of(peers(device, compiled=True, names=[name])[0], parameters, MAX_GRAD_NORM)()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the milliseconds of one first step as JSON."""
    parser = argparse.ArgumentParser(description="time the first step of an optimizer in this process")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args(arguments)
    print(json.dumps({"milliseconds": first_step(chosen.peer, chosen.count, torch.device(chosen.device))}))


if __name__ == "__main__":
    main()
