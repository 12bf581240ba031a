"""Running checks on several ranks at once: sets of processes for many checks; a hang fails.

Ranks on a CPU are forked from a process that has imported torch and the checks (scripts.py): a new interpreter takes
two seconds of a core for that. Ranks with GPUs are new interpreters, as CUDA needs. These take so long to begin that
all tests of a run share them, whichever files they are in: `pytest tests/gpu -m two_gpus -n 0`.

On a machine with many cores several sets of ranks run at once, and each takes the next check when it is done with one:
TILESTEP_RANK_SETS=4 says how many. TILESTEP_RANK_LOG names a file that gets a line for each check, with its set, as
soon as it is done, and TILESTEP_RANK_SECONDS says when checks that have not ended are given up, so that those before
them have an outcome.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal as signals
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

SETS = int(os.environ.get("TILESTEP_RANK_SETS", "0"))
"""0 for one set on a CPU, and with GPUs for one process to two cores, at most eight sets."""

LOG = os.environ.get("TILESTEP_RANK_LOG", "")

TIMEOUT = timedelta(seconds=120)
"""Of one collective."""


class OnItsGpu:
    """A check in which a rank makes tensors on its GPU where nothing else is said."""

    def __init__(self, check: Check) -> None:
        self.check = check

    def __call__(self) -> None:
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
        try:
            self.check()
        finally:
            torch.set_default_device(None)


def run_on_ranks(
    checks: Mapping[str, Check] | Iterable[Check], ranks: int, backend: str = "gloo", default_gpu: bool = False
) -> dict[str, str]:
    """Run functions one after the other on as many new processes.

    A rank whose check fails goes on with the next; the others, if they wait for it, fail by the timeout.

    Args:
        checks: functions, by name if they have none of their own; each is importable in the processes.
        ranks: how many processes.
        backend: of torch.distributed; for "nccl" each rank gets a GPU, and checks run in a folder that goes.
        default_gpu: whether a rank makes tensors on its GPU where nothing else is said.

    Returns:
        For each check that failed what was raised on which rank.
    """
    named = {name: OnItsGpu(check) if default_gpu else check for name, check in _named(checks).items()}
    usual = min(len(os.sched_getaffinity(0)) // (2 * ranks), 8) if backend == "nccl" else 1
    sets = max(1, min(SETS or usual, len(named)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(sets) as threads:
        ended = list(threads.map(lambda own: _ended(named, ranks, backend, folder, own, SECONDS), range(sets)))
        outcomes = {name: _outcome(Path(folder), place, ranks, ended) for place, name in enumerate(named)}
    return {name: text for name, text in outcomes.items() if text}


def _ended(named: Mapping[str, Check], *options: Any) -> str:
    """How a set of ranks ended; a set of which a signal ends one before any check is done is started once more."""
    forks = not torch.cuda.is_available() and not scripts.is_forked()
    for again in (False, True):
        reason, signal = scripts.run_function(_run_set, named, *options) if forks else _run_set(named, *options)
        if not signal or again:
            break
        warnings.warn(f"ranks begin once more: {signal}", stacklevel=2)
    return reason


def _run_set(
    named: Mapping[str, Check], ranks: int, backend: str, together: str, own: int, seconds: float
) -> tuple[str, str]:
    """Why checks of this set have no outcome, and what is known of a signal that ended it before any check was done.

    `together` is the folder of all sets, with a file for each check that one of them has begun, and for each outcome.
    """
    with tempfile.TemporaryDirectory(dir=together) as folder:
        arguments = (named, ranks, backend, together, folder, own, dict(os.environ))
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
            for process in context.processes:  # one that hangs writes where
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signals.SIGABRT)
            time.sleep(0.5)
            for process in context.processes:
                process.kill()
            stacks = "\n".join(each.read_text() for each in sorted(Path(folder).glob("stacks.*")))
            ended_by_one, reason = "signal" in reason, f"{reason}\n{stacks}"
            begun = [each for each in Path(together).glob("begun.*") if each.read_text() == str(own)]
            if ended_by_one and not any(Path(together, f"{each.suffix[1:]}.0").exists() for each in begun):
                signal = reason
                for each in begun:
                    each.unlink()
    return reason, signal


def all_pass(checks: Mapping[str, Check] | Iterable[Check], ranks: int) -> None:
    """Run functions as `run_on_ranks` does and fail if one of them fails."""
    failures = run_on_ranks(checks, ranks)
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def each_passes(
    checks: Mapping[str, Check] | Iterable[Check], ranks: int, backend: str = "gloo", default_gpu: bool = False
) -> Callable[..., None]:
    """A test for each of some functions, which run together when the first of the tests asks for its outcome.

    Args:
        checks: as for `run_on_ranks`.
        ranks: likewise.
        backend: likewise; tests for "nccl" of all files run together, unless several test processes share the files.
        default_gpu: likewise.
    """
    named = _named(checks)

    @pytest.mark.parametrize("name", named)
    def test(name: str, request: pytest.FixtureRequest) -> None:
        if test not in _failures:
            joins = backend == "nccl" and "PYTEST_XDIST_WORKER" not in os.environ
            _run_together(request.session.items, test, (ranks, backend) if joins else None)
        assert name not in _failures[test], _failures[test][name]

    placed = {name: OnItsGpu(check) if default_gpu else check for name, check in named.items()}
    _tests[test] = (ranks, backend), placed
    return test


_tests: dict[Any, tuple[tuple[int, str], dict[str, Check]]] = {}
_failures: dict[Any, dict[str, str]] = {}


def _run_together(items: Sequence[pytest.Item], asked: Any, where: tuple[int, str] | None) -> None:
    """Run the selected checks of a test, and of all tests on such ranks if `where` says which."""
    chosen: dict[str, tuple[Any, str]] = {}
    for item in items:
        test = getattr(item, "function", None)
        if test is asked or (test in _tests and _tests[test][0] == where):
            _failures.setdefault(test, {})
            chosen[item.nodeid] = test, item.callspec.params["name"]  # type: ignore[attr-defined]
    checks = {label: _tests[test][1][name] for label, (test, name) in chosen.items()}
    for label, text in run_on_ranks(checks, *_tests[asked][0]).items():
        test, name = chosen[label]
        _failures[test][name] = text


def _named(checks: Mapping[str, Check] | Iterable[Check]) -> dict[str, Check]:
    return dict(checks) if isinstance(checks, Mapping) else {check.__name__: check for check in checks}


def _joined(context: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if context.join(timeout=1):
            return True
    return False


def _outcome(folder: Path, place: int, ranks: int, ended: Sequence[str]) -> str:
    found = {rank: folder / f"{place}.{rank}" for rank in range(ranks)}
    failures = [
        f"rank {rank}: {each.read_text()}" for rank, each in found.items() if each.exists() and each.read_text()
    ]
    if failures or all(each.exists() for each in found.values()):
        return "\n".join(failures)
    begun = folder / f"begun.{place}"
    return ended[int(begun.read_text())] if begun.exists() else "\n".join(dict.fromkeys(ended))


def _run(
    rank: int,
    checks: Mapping[str, Check],
    ranks: int,
    backend: str,
    together: str,
    folder: str,
    own: int,
    environment: Mapping[str, str],
) -> None:
    begin = time.monotonic()
    gc.freeze()  # what the server has imported is not looked through again, which would copy its pages
    gpu = backend == "nccl"
    place = folder if gpu else os.getcwd()
    variables = dict(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    _begin_anew(place, variables)
    tempfile.tempdir = folder  # a process that is forked ends without removing what waits for its end
    # A signal that ends the process leaves its stacks for the message.
    stacks = open(Path(folder, f"stacks.{rank}"), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(stacks)
    options: dict[str, Any] = {}
    if gpu:
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    store.set_timeout(timedelta(seconds=SECONDS))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT, **options)
    if gpu:
        _log(f"set {own} began", rank, begin, "")
    named = list(checks.items())
    for number in _begun(together, len(named), own, rank, store):
        name, check = named[number]
        _begin_anew(place, variables)
        begin = time.monotonic()
        try:
            check()
            outcome = ""
        except BaseException:  # errors of distributed checkpoints are no `Exception`
            outcome = traceback.format_exc()
        Path(together, f"{number}.{rank}").write_text(outcome)
        _log(f"{name}, set {own}", rank, begin, outcome)
        # Ranks that failed wait for the others here; if these wait for them elsewhere, all time out.
        dist.barrier()
        # What it has left is let go, and what it has imported is not looked through again.
        gc.collect()
        gc.freeze()
    dist.destroy_process_group()


def _log(name: str, rank: int, begin: float, outcome: str) -> None:
    if LOG:
        with open(LOG, "a", encoding="utf-8") as log:
            seconds = time.monotonic() - begin
            log.write(f"{name}, rank {rank}: {seconds:.1f} s {'failed' if outcome else 'passed'}\n{outcome}")


def _begun(together: str, count: int, own: int, rank: int, store: dist.Store) -> Iterator[int]:
    """Numbers of checks that this set begins: the first rank takes the next one that no set has begun."""
    for turn in range(count + 1):
        key = f"check {turn}"
        if rank == 0:
            store.set(key, str(next((place for place in range(count) if _begins(together, place, own)), -1)))
        number = int(store.get(key))
        if number < 0:
            return
        yield number


def _begins(together: str, place: int, own: int) -> bool:
    try:
        with open(Path(together, f"begun.{place}"), "x", encoding="utf-8") as file:
            file.write(str(own))
    except FileExistsError:
        return False
    return True


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
