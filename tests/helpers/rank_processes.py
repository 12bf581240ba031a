"""Running checks on several ranks at once: one set of processes for many checks; a hang fails.

Ranks on a CPU are forked from a process that has imported torch and the checks (scripts.py): a new interpreter takes
two seconds of a core for that. Ranks with GPUs are new interpreters, as CUDA needs.

On a machine with many cores TILESTEP_RANK_SETS=4 parts them among four sets that run at once (they compile most of the
time). TILESTEP_RANK_LOG names a file that gets a line for each check as soon as it is done, and TILESTEP_RANK_SECONDS
says when checks that have not ended are given up, so that those before them have an outcome.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import scripts
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

__all__ = ["all_pass", "each_passes", "run_on_ranks"]

Check = Callable[[], None]

SECONDS = float(os.environ.get("TILESTEP_RANK_SECONDS", "500"))
"""Of all checks together."""

SETS = int(os.environ.get("TILESTEP_RANK_SETS", "1"))
LOG = os.environ.get("TILESTEP_RANK_LOG", "")

TIMEOUT = timedelta(seconds=120)
"""Of one collective."""


def run_on_ranks(
    checks: Mapping[str, Check] | Iterable[Check], ranks: int, backend: str = "gloo", default_gpu: bool = False
) -> dict[str, str]:
    """Run functions one after the other on as many new processes.

    A rank whose check fails goes on with the next; the others, if they wait for it, fail by the timeout.

    Args:
        checks: functions, by name if they have none of their own; each is importable in the processes.
        ranks: how many processes.
        backend: of torch.distributed; for "nccl" each rank gets a GPU.
        default_gpu: whether a rank makes tensors on its GPU where nothing else is said.

    Returns:
        For each check that failed what was raised on which rank.
    """
    named = _named(checks)
    parts = [dict(list(named.items())[start::SETS]) for start in range(min(SETS, len(named)))]
    with ThreadPoolExecutor(max(len(parts), 1)) as sets:
        found = list(sets.map(lambda part: _failures(part, ranks, backend, default_gpu, SECONDS), parts))
    return {name: text for part in found for name, text in part.items()}


def _failures(named: Mapping[str, Check], *options: Any) -> dict[str, str]:
    """Those of one set of processes; a set of which a signal ends one before any check is done is started once more."""
    forks = not torch.cuda.is_available() and not scripts.is_forked()
    for again in (False, True):
        failures, signal = scripts.run_function(_outcomes, named, *options) if forks else _outcomes(named, *options)
        if not signal or again:
            break
        warnings.warn(f"ranks begin once more: {signal}", stacklevel=2)
    return failures


def _outcomes(
    named: Mapping[str, Check], ranks: int, backend: str, default_gpu: bool, seconds: float
) -> tuple[dict[str, str], str]:
    """What failed, and what is known of a signal that ended a process before any check was done."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (named, ranks, backend, default_gpu, folder, dict(os.environ))
        method = "spawn" if torch.cuda.is_available() else "fork"
        context: Any = multiprocessing.start_processes(
            _run, arguments, nprocs=ranks, join=False, start_method=method, daemon=True
        )
        reason, signal = "did not run: a check before it hung, or failed on some ranks alone", ""
        try:
            finished = _joined(context, seconds)
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            finished, reason = False, str(error)
        if not finished:
            for process in context.processes:
                process.kill()
            stacks = "\n".join(each.read_text() for each in sorted(Path(folder).glob("stacks.*")))
            reason = f"{reason}\n{stacks}"
            signal = reason if "signal" in reason and not list(Path(folder).glob("0.*")) else ""
        outcomes = {name: _outcome(Path(folder), place, ranks, reason) for place, name in enumerate(named)}
    return {name: text for name, text in outcomes.items() if text}, signal


def all_pass(checks: Mapping[str, Check] | Iterable[Check], ranks: int) -> None:
    """Run functions as `run_on_ranks` does and fail if one of them fails."""
    failures = run_on_ranks(checks, ranks)
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def each_passes(checks: Mapping[str, Check] | Iterable[Check], ranks: int, **options: Any) -> Callable[[str], None]:
    """A test for each of some functions, which `run_on_ranks` runs together when the first of the tests asks for it.

    Args:
        checks: as for `run_on_ranks`.
        ranks: likewise.
        options: likewise.
    """
    named = _named(checks)

    @functools.cache
    def failures() -> dict[str, str]:
        return run_on_ranks(named, ranks, **options)

    @pytest.mark.parametrize("name", named)
    def test(name: str) -> None:
        assert name not in failures(), failures()[name]

    return test


def _named(checks: Mapping[str, Check] | Iterable[Check]) -> dict[str, Check]:
    return dict(checks) if isinstance(checks, Mapping) else {check.__name__: check for check in checks}


def _joined(context: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if context.join(timeout=1):
            return True
    return False


def _outcome(folder: Path, place: int, ranks: int, reason: str) -> str:
    found = {rank: folder / f"{place}.{rank}" for rank in range(ranks)}
    failures = [
        f"rank {rank}: {each.read_text()}" for rank, each in found.items() if each.exists() and each.read_text()
    ]
    return "\n".join(failures) if failures else "" if all(each.exists() for each in found.values()) else reason


def _run(
    rank: int,
    checks: Mapping[str, Check],
    ranks: int,
    backend: str,
    default_gpu: bool,
    folder: str,
    environment: Mapping[str, str],
) -> None:
    gc.freeze()  # what the server has imported is not looked through again, which would copy its pages
    place, variables = os.getcwd(), dict(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    _begin_anew(place, variables)
    tempfile.tempdir = folder  # a process that is forked ends without removing what waits for its end
    # A signal that ends the process leaves its stacks for the message.
    stacks = open(Path(folder, f"stacks.{rank}"), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(stacks)
    options: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if default_gpu:
        options["device_id"] = torch.device("cuda", rank)
        torch.set_default_device(options["device_id"])
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT, **options)
    for number, (name, check) in enumerate(checks.items()):
        _begin_anew(place, variables)
        begin = time.monotonic()
        try:
            check()
            outcome = ""
        except BaseException:  # errors of distributed checkpoints are no `Exception`
            outcome = traceback.format_exc()
        Path(folder, f"{number}.{rank}").write_text(outcome)
        if LOG:
            with open(LOG, "a", encoding="utf-8") as log:
                seconds = time.monotonic() - begin
                log.write(f"{name}, rank {rank}: {seconds:.1f} s {'failed' if outcome else 'passed'}\n{outcome}")
        # Ranks that failed wait for the others here; if these wait for them elsewhere, all time out.
        dist.barrier()
        # What it has left is let go, and what it has imported is not looked through again.
        gc.collect()
        gc.freeze()
    dist.destroy_process_group()


def _begin_anew(place: str, variables: Mapping[str, str]) -> None:
    """What a check may have left changed is as a process begins with it."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(place)
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
