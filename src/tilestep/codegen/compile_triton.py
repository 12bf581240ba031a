"""From Triton source to an importable module: a file in the cache, imported under a private name."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
from types import ModuleType

from ..cache import content_key, private_folder, publish
from ..errors import BuildError
from .triton_key import keep_triton_key


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def load_module(title: str, source: str) -> ModuleType:
    """Make a module of Triton source, and write it to the cache for debuggers, profilers and people to read.

    What runs is the source itself, not what is found in the cache.
    """
    if not available():
        raise BuildError("CUDA tensors need Triton >= 3.6: pip install triton")
    _keep_triton_files_private()
    import torch
    import triton

    keep_triton_key()
    key = content_key(source, triton.__version__, torch.__version__)
    name = f"tilestep_generated_{title}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    path = str(publish(f"{title}-{key}.py", source))
    # Triton reads a kernel's source where Python finds it for tracebacks; without a time it is not read from the file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _keep_triton_files_private() -> None:
    """Let Triton keep what it compiles in a folder of the cache, unless the user has named one."""
    global _triton_folder
    if os.environ.get("TRITON_CACHE_DIR") in (None, _triton_folder):
        _triton_folder = os.environ["TRITON_CACHE_DIR"] = str(private_folder("triton"))


_triton_folder: str | None = None
