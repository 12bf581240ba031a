"""The `compile` section: how long the first step takes, in a fresh process with empty caches and with filled ones."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from fresh_process import in_fresh_process
from kept_groups import take_over

import tilestep
from tilestep.bench.measure import Spread, spread, synchronize
from tilestep.bench.results import Group, Result, Row, environment
from tilestep.bench.sections import MAX_GRAD_NORM, OURS, Settings, peers, step_of
from tilestep.kernels.launch import build_threads

__all__ = ["first_step", "run_compile"]

CACHE_VARIABLES = ("TILESTEP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ELEMENTS = 64
SIDE = 8  # of parameters for rules by name: matrices, for those that take nothing else
RULE = "rule "
LIBRARIES = "torch's products and decompositions alone"  # less than that no rule for matrices can take
COMPILED_COUNT = 100  # parameters for the peers that compile: their time grows with the count
THREADS = "build threads"
FILLED = "filled caches"
CACHES = ("empty caches", FILLED)
FILLED_TIMES = 3  # such a first step takes a moment, and processes begin more or less quickly


@dataclass(frozen=True)
class _Case:
    """One contender with a number of parameters, begun anew so many times; with filled caches so often each time."""

    title: str
    name: str
    count: int
    repeats: int = 1
    filled: int = 1


def run_compile(
    settings: Settings,
    rules: Sequence[str] = (),
    timeout: float = 600.0,
    keep: Callable[[Result], object] | None = None,
    known: Result | None = None,
    seconds: float = math.inf,
) -> Result:
    """Measure the first step of 1,000 and 10,000 parameters, each in processes of their own.

    Args:
        settings: as for the other sections.
        rules: instead of the peers, these rules with their defaults; "all" for every one.
        timeout: seconds after which a process is given up.
        keep: called with the result so far after each contender.
        known: an earlier result, to which what it has not is added; from the same kind of device, the same torch and
            as many build threads.
        seconds: a contender is begun only if the longest so far would still end within so many seconds from now.

    Raises:
        ValueError: for a name that no rule has, and for a result that this one cannot be added to.
    """
    begin, longest = time.monotonic(), 0.0
    names = _known_rules(rules)
    result = Result("compile", {**environment(settings.device), THREADS: str(build_threads())})
    if known is not None:
        take_over(result, known, ("device", "torch", THREADS))
    result.notes.append(
        "wall: building the optimizer, the first clip and the first step, in a fresh process, imports done; Triton's "
        f"kernels compiled {build_threads()} at a time (TILESTEP_BUILD_THREADS)"
    )
    for case in _cases_of_rules(names, settings) if names else _cases_of_peers(settings):
        if _has(result, case):
            continue
        label, started = f"{case.name}, {case.count:,} parameters", time.monotonic()
        if started - begin + longest > seconds:
            result.notes.append(f"left out, {label}: it would not have ended within {seconds:g} s")
            continue
        rows = _rows(case, settings.device, timeout)
        _replace(result, case, rows)
        longest = max(longest, time.monotonic() - started)
        settings.say(f"compile: {label}: {_in_short(rows)}; {time.monotonic() - begin:.0f} s so far")
        if keep is not None:
            keep(result)
    return result


def _known_rules(rules: Sequence[str]) -> Sequence[str]:
    names = list(tilestep.registry) if list(rules) == ["all"] else rules
    for name in names:
        if name not in tilestep.registry:
            raise ValueError(f"no rule is called {name!r}; there are: {', '.join(tilestep.registry)}")
    return names


def _cases_of_rules(names: Sequence[str], settings: Settings) -> Iterator[_Case]:
    count = _counts(settings)[0]
    title = f"first step, {count:,} parameters of {SIDE} x {SIDE}"
    filled = 1 if settings.quick else FILLED_TIMES
    for name in names:
        yield _Case(title, RULE + name, count, filled=filled)
    if set(names) == set(tilestep.registry):
        yield _Case(title, LIBRARIES, count, filled=filled)


def _cases_of_peers(settings: Settings) -> Iterator[_Case]:
    """Ours and torch's fused with each count, and then those that compile by themselves with fewer parameters."""
    for count in _counts(settings):
        for peer in peers(settings.device):
            if peer.name in (OURS, "torch fused"):
                repeats = 2 if peer.name == OURS and not settings.quick else 1
                yield _Case(f"first step, {count:,} parameters of {ELEMENTS}", peer.name, count, repeats)
    if settings.compiled:
        for peer in peers(settings.device, compiled=True):
            if peer.compiled:
                yield _Case(f"first step, {COMPILED_COUNT} parameters of {ELEMENTS}", peer.name, COMPILED_COUNT)


def _counts(settings: Settings) -> tuple[int, int]:
    return (10, 20) if settings.quick else (1000, 10_000)


def _group(result: Result, title: str) -> Group | None:
    return next((group for group in result.groups if group.title == title), None)


def _has(result: Result, case: _Case) -> bool:
    """Whether there are a contender's figures; one that failed is tried again."""
    group = _group(result, case.title)
    return group is not None and all(group.row(f"{case.name}, {caches}") for caches in CACHES)


def _replace(result: Result, case: _Case, rows: Sequence[Row]) -> None:
    """Put in a contender's rows, in the place of its failure in an earlier run."""
    group = _group(result, case.title)
    if group is None:
        group = Group(case.title, [])
        result.groups.append(group)
    group.rows = [*(row for row in group.rows if row.contender != case.name), *rows]


def _in_short(rows: Sequence[Row]) -> str:
    said = []
    for row in rows:
        if row.failure is not None:
            said.append(f"failed: {row.failure}")
        elif row.wall is not None:
            said.append(f"{row.contender.rpartition(', ')[2]} {row.wall.median:,.0f} ms")
    return ", ".join(said)


def _rows(case: _Case, device: torch.device, timeout: float) -> list[Row]:
    """A contender's figures with empty and with filled caches, or why there are none."""
    found: dict[str, list[float]] = {caches: [] for caches in CACHES}
    arguments = (case.name, case.count, device)
    try:
        for _ in range(case.repeats):
            with tempfile.TemporaryDirectory() as folder:
                variables = {variable: os.path.join(folder, variable.lower()) for variable in CACHE_VARIABLES}
                for caches, times in found.items():
                    for _ in range(case.filled if caches == FILLED else 1):
                        times.append(in_fresh_process(first_step, arguments, variables, timeout))
    except (RuntimeError, TimeoutError) as failure:
        return [Row(case.name, failure=" ".join(str(failure).split())[-200:])]
    return [_row(f"{case.name}, {caches}", spread(times)) for caches, times in found.items()]


def _row(name: str, wall: Spread) -> Row:
    return Row(name, host=wall, wall=wall)


def first_step(name: str, count: int, device: torch.device) -> float:
    """Build an optimizer for small parameters, clip and step once; return the milliseconds until the work is done.

    Args:
        name: a peer's, or `rule` and a rule's, or `LIBRARIES`.
        count: parameters.
        device: where.

    >>> first_step("torch fused", 3, torch.device("cpu")) > 0
    True
    """
    shape = (SIDE, SIDE) if name.startswith(RULE) or name == LIBRARIES else (ELEMENTS,)
    parameters = [torch.ones(shape, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    # Any torch optimizer imports it when built: a second that is not compiling.
    importlib.import_module("torch._dynamo")
    synchronize(device)
    begin = time.perf_counter()
    if name.startswith(RULE):
        tilestep.Optimizer(parameters, name.removeprefix(RULE), max_grad_norm=MAX_GRAD_NORM).step()
    elif name == LIBRARIES:
        _use_libraries(parameters)
    else:
        step_of(peers(device, compiled=True, names=[name])[0], parameters, MAX_GRAD_NORM)()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


@torch.no_grad()
def _use_libraries(matrices: Sequence[torch.Tensor]) -> None:
    """Have torch start what it multiplies and decomposes matrices with, in both types that rules use."""
    together = torch.stack(list(matrices))
    for each in (together, together.to(torch.bfloat16)):
        each @ each
    torch.linalg.eigh(together)
    torch.linalg.qr(together)
