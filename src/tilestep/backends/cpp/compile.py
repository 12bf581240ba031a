"""From C++ source to a loaded library: the machine's compiler, flags, and the disk cache."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...errors import BuildError, BuildInterrupted
from ...kernels.cache import BuildTimeout, CachedFile, cached, cached_names, content_key, count_build, open_cached

T = TypeVar("T")

FLAGS = [
    "-std=gnu++14",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-plt",
    "-w",
]
"""-fno-math-errno makes sqrt one instruction; -ffast-math would break inf and NaN and flush denormals process-wide.

gnu++14 for its headers: those of C++17 hold special functions and parallel algorithms, a third of a kernel's time.
"""


VERSION_SECONDS = 20.0
"""How long a compiler may take to print its version."""

RETRY_SECONDS = 300.0
"""How long a failed build is not tried again in this process."""


@functools.lru_cache(maxsize=1)
def compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command: `CXX` if set, else the first of g++, clang++, c++; None without a compiler."""
    requested = shlex.split(os.environ.get("CXX", ""))
    for command in (requested,) if requested else (["g++"], ["clang++"], ["c++"]):
        path = shutil.which(command[0])
        if path:
            return (path, *command[1:])
    return None


@functools.lru_cache(maxsize=1)
def compiler_version() -> str:
    """The compiler's version text."""
    command = compiler()
    if command is None:
        return ""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--version"], start_new_session=True, **options) as process:  # type: ignore[call-overload]
        try:
            answer, _ = process.communicate(timeout=VERSION_SECONDS)
        except BaseException as error:
            _kill_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(
                    f"{' '.join(command)} --version has not answered in {VERSION_SECONDS:.0f} s"
                ) from error
            raise
    return answer.decode(errors="replace")


@functools.lru_cache(maxsize=1)
def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return " ".join(sorted(line.split(":", 1)[1].split()))
    return platform.processor()


def wide_vectors() -> tuple[str, ...]:
    """Flags for loops over memory: vectors as wide as the machine has them, a line of the cache at a time.

    By themselves compilers use half of AVX-512's width on Intel's processors. The first of those lowered their clock
    for all of it; those that know bf16 do not.
    """
    return ("-mprefer-vector-width=512",) if "avx512_bf16" in _cpu_features().split() else ()


def user_flags() -> tuple[str, ...]:
    """The user's flags of `TILESTEP_CXXFLAGS`: they come after tilestep's own."""
    words = os.environ.get("TILESTEP_CXXFLAGS", "")
    try:
        return tuple(shlex.split(words))
    except ValueError as error:
        raise ValueError(f"Invalid TILESTEP_CXXFLAGS: {words!r}; it must be valid shell syntax: {error}") from None


def load_library(title: str, source: str, extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build C++ source, or take the library from the cache, and load it."""
    flags = (*FLAGS, *extra_flags, *user_flags())
    key = content_key(source, " ".join(flags), platform.machine(), _cpu_features())
    command = compiler()
    if command is None:
        return _prebuilt(f"{title}-{key}-*.so")
    version = _attempt(command, compiler_version)
    name = f"{title}-{key}-{content_key(version)[:8]}.so"
    build = [*command, *flags, "-x", "c++", "-"]
    try:
        return _attempt((command, name), functools.partial(_load_or_build, name, build, source))
    except KeyboardInterrupt:
        raise BuildInterrupted(f"while {command[0]} built {name}; the next call builds it again") from None


_failures: dict[Any, tuple[float, str]] = {}
"""Why something could not be built, and until when it is not tried again."""


def _attempt(subject: Any, action: Callable[[], T]) -> T:
    until, text = _failures.get(subject, (0.0, ""))
    if time.monotonic() < until:
        raise BuildError(text)
    try:
        return action()
    except (BuildError, OSError) as error:
        failure = error if isinstance(error, BuildError) else BuildError(f"cannot build a kernel: {error}")
        # A compiler that hangs would cost the timeout again for each kernel.
        subjects = [subject, compiler()] if isinstance(failure, BuildTimeout) else [subject]
        _failures.update({key: (time.monotonic() + RETRY_SECONDS, str(failure)) for key in subjects})
        raise failure from error


def _load_or_build(name: str, command: list[str], source: str) -> ctypes.CDLL:
    deadline = time.monotonic() + build_seconds()

    def build(target: Path) -> None:
        count_build()
        compile_source(command, source, target, ["-lm"], max(deadline - time.monotonic(), 1.0))

    for rebuild in (False, True):
        with cached(name, build, seconds=build_seconds(), by=command[0], anew=rebuild) as file:
            try:
                return _open(file)
            except BuildError:
                # It is complete, but from a machine with other libraries, or nothing can be loaded from this folder.
                if rebuild:
                    raise
    raise AssertionError


def _prebuilt(pattern: str) -> ctypes.CDLL:
    """Without a compiler, a library of this source that another compiler has built; the first that can be loaded."""
    failure: BuildError | None = None
    for name in cached_names(pattern):
        file = open_cached(name)
        if file is not None:
            with file:
                try:
                    return _open(file)
                except BuildError as error:
                    failure = error
    raise failure or BuildError(f"no C++ compiler found ({_remedy()}) and no cached build")


def _open(file: CachedFile) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(file.loadable())
    except OSError as error:
        raise BuildError(
            f"cannot load {file.path}: {error}; set TILESTEP_CACHE_DIR to a directory that allows code to be executed"
        ) from error


def build_seconds() -> float:
    """How long a compiler may run, or another process's build is waited for: `TILESTEP_BUILD_TIMEOUT`, or 90."""
    seconds = os.environ.get("TILESTEP_BUILD_TIMEOUT") or "90"
    try:
        return float(seconds)
    except ValueError:
        raise ValueError(f"Invalid TILESTEP_BUILD_TIMEOUT: {seconds!r}; it must be a number of seconds") from None


_SUPERVISOR = """
trap : TERM
exec 3<&0
"$@" <"$TMPDIR/source" >/dev/null 2>"$TMPDIR/errors" 3<&- &
compiler=$!
(read -r _ <&3; kill -TERM 0) &
watch=$!
wait "$compiler"
status=$?
if [ "$status" -gt 128 ]; then rm -rf "$TMPDIR"; kill -KILL 0; fi
kill -KILL "$watch"
exit "$status"
"""
"""Runs a compiler, and ends it with all that it has started and written when its standard input ends: when this process
does, in any way. A compiler's driver alone would leave the compiler itself and temporary files behind."""

_running: set[subprocess.Popen[bytes]] = set()


def compile_source(command: Sequence[str], source: str, target: Path, libraries: Sequence[str], seconds: float) -> None:
    """Run a compiler on a source that it reads from its standard input; nothing of it outlives this process."""
    folder = target.parent
    (folder / "source").write_text(source, encoding="utf-8")
    arguments = [*command, "-o", str(target), *libraries]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
        ["/bin/sh", "-c", _SUPERVISOR, "tilestep-build", *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
        bufsize=0,
        **streams,
    )
    _running.add(process)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired as error:
        raise BuildTimeout(
            f"{command[0]} has not finished {target.name} in {seconds:.0f} s; set TILESTEP_BUILD_TIMEOUT to allow more"
        ) from error
    except KeyboardInterrupt:
        _kill_group(process)  # immediately; the caller removes partial output
        raise
    finally:
        _stop(process)
        _running.discard(process)
    if status:
        errors = ""
        with contextlib.suppress(OSError):
            errors = (folder / "errors").read_text(encoding="utf-8", errors="replace")
        # On a full disk the message cannot be written either.
        free = shutil.disk_usage(folder.parent).free >> 20
        errors = errors[-4000:] or f"no message; {folder.parent} has {free} MiB left"
        raise BuildError(f"{' '.join(command)} failed with status {status}:\n{errors}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a compiler if it runs, and remove its output."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        if process.poll() is None:
            process.stdin.write(b"\n")  # a forked process may hold the other end of the pipe open
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@atexit.register
def stop_all() -> None:
    """Stop all running compilers."""
    for process in list(_running):
        _stop(process)


def _after_fork() -> None:
    """A forked process starts its own builds; the builds of the parent end with the parent."""
    for process in _running:
        if process.stdin is not None:
            process.stdin.close()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


def _remedy() -> str:
    chosen = os.environ.get("CXX")
    return f"CXX={chosen} is not there" if chosen else "set CXX, or install g++ or clang++"


_warned: set[tuple[str, ...] | None] = set()
"""Compilers whose failures have been warned of; None if there is no compiler."""


def warn_of_failure(error: BuildError) -> None:
    """Warn that a rule runs eagerly: without a compiler, or once for each compiler with what has failed."""
    command = compiler()
    if command in _warned:
        return
    _warned.add(command)
    message = f"found no C++ compiler ({_remedy()}) and no cached build: rules run as eager PyTorch, which is slow"
    if command is not None:
        message = (
            "could not build a kernel: its rule runs as eager PyTorch, which is slow, until an optimizer created later "
            f"can build it: {error}"
        )
    warnings.warn(f"tilestep {message}", RuntimeWarning, stacklevel=3)
