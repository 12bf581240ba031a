"""From Triton source to an importable module: a file in the cache, imported under a private name."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from ..cache import cache_directory, cached_file, content_key
from ..errors import BuildError
from .triton_key import keep_triton_key

__all__ = ["available", "load_module"]


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def load_module(title: str, source: str) -> ModuleType:
    """Write Triton source to the cache and import it; Triton reads its kernels' source from the file.

    Args:
        title: a word for the file's name.
        source: a whole Python module that defines `triton.jit` functions.

    Raises:
        BuildError: if Triton is not installed.
    """
    if not available():
        raise BuildError("CUDA tensors need Triton >= 3.6: pip install triton")
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))
    import torch
    import triton

    keep_triton_key()
    key = content_key(source, triton.__version__, torch.__version__)
    path = cached_file(f"{title}-{key}.py", lambda partial: _write(partial, source))
    name = f"tilestep_generated_{title}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _write(path: Path, source: str) -> None:
    path.write_text(source)
