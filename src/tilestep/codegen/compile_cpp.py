"""From C++ source to a loaded library: the machine's compiler, flags, and the disk cache."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..cache import cached_file, content_key, find_cached
from ..counters import count_build
from ..errors import BuildError

__all__ = ["compiler", "compiler_version", "load_library", "wide_vectors"]

FLAGS = [
    "-std=c++17",
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
"""-fno-math-errno makes sqrt one instruction; -ffast-math would break inf and NaN and flush denormals process-wide."""


@functools.lru_cache(maxsize=1)
def compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command: `CXX` if it is set, else the first of g++, clang++, c++; None if it is not there."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in (wanted,) if wanted else (["g++"], ["clang++"], ["c++"]):
        found = shutil.which(command[0])
        if found:
            return (found, *command[1:])
    return None


@functools.lru_cache(maxsize=1)
def compiler_version() -> str:
    command = compiler()
    if command is None:
        return ""
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout


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


def load_library(title: str, source: str, extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build C++ source, or take the built library from the cache, and load it.

    Args:
        title: a word for the file's name.
        source: a whole C++ translation unit.
        extra_flags: further compiler flags.

    Raises:
        BuildError: without a compiler and without a cached build, when the compiler fails (its output is the text), or
            when the library cannot be loaded.
    """
    build = functools.partial(_compile, source, tuple(extra_flags))
    key = content_key(source, " ".join((*FLAGS, *extra_flags)), platform.machine(), _cpu_features())
    if compiler() is None:
        path = find_cached(f"{title}-{key}-*.so")
        if path is None:
            raise BuildError(f"no C++ compiler found ({_remedy()}) and no cached build")
        return _open(path)
    name = f"{title}-{key}-{content_key(compiler_version())[:8]}.so"
    path = cached_file(name, build)
    try:
        return _open(path)
    except BuildError:
        path.unlink(missing_ok=True)  # broken by a crash of the machine or a full disk; or nothing can be loaded there
        return _open(cached_file(name, build))


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"cannot load {path}: {error}; TILESTEP_CACHE_DIR names a directory from which code may be run"
        ) from error


def _compile(source: str, extra_flags: tuple[str, ...], target: Path) -> None:
    command = compiler()
    assert command is not None
    count_build()
    whole = [*command, *FLAGS, *extra_flags, "-x", "c++", "-", "-o", str(target), "-lm"]
    result = subprocess.run(whole, input=source, capture_output=True, encoding="utf-8", check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def _remedy() -> str:
    chosen = os.environ.get("CXX")
    return f"CXX={chosen} is not there" if chosen else "set CXX, or install g++ or clang++"


@functools.lru_cache(maxsize=1)
def warn_without_compiler() -> None:
    """Say once a process that rules run eagerly because nothing can be built."""
    warnings.warn(
        f"tilestep found no C++ compiler ({_remedy()}) and no cached build: rules run as eager PyTorch, which is slow",
        RuntimeWarning,
        stacklevel=3,
    )
