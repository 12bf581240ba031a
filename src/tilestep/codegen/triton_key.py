"""Triton's hash of its own compiler, kept from one process to the next."""

from __future__ import annotations

from ..cache import cached, content_key, text_builder
from ..compat import replace_triton_hash, triton_hash
from ..errors import BuildError


def keep_triton_key() -> None:
    """Take Triton's hash of itself from the cache: it reads its 200 MB compiler for it in every process (0.3 s).

    The kept hash belongs to the sizes and times of Triton's files. Where Triton keeps its hash otherwise, nothing is
    done.
    """
    found = triton_hash()
    if found is None:
        return
    compute, root = found
    try:
        files = [*root.glob("_C/libtriton.*"), *root.glob("*/*.py"), *root.glob("language/**/*.py")]
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
        with cached(f"triton-{content_key(repr(states))}.key", text_builder(compute)) as file:
            key = file.content.decode()
    except (OSError, BuildError):
        return
    replace_triton_hash(key)
