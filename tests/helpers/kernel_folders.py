"""What this process knows of the folder of kernels and of the compiler, which tests replace."""

from __future__ import annotations

from tilestep.backends import tuning
from tilestep.backends.cpp import compile
from tilestep.kernels import cache


def forget() -> None:
    """Ask the environment again: a test has changed it."""
    cache.forget_directory()
    tuning.known_table.cache_clear()
    compile.compiler.cache_clear()
    compile.compiler_version.cache_clear()
