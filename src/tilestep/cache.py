"""Where built kernels are kept: a directory only the user can write, files written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock

from ._version import __version__

__all__ = ["cache_directory", "cached_file", "content_key", "find_cached", "forget_directory", "update_cached"]


def content_key(*parts: str) -> str:
    """A short name for content: the hash of the parts and of tilestep's version.

    Args:
        parts: everything the built file depends on, as text.

    Example:
        >>> content_key("a", "b") == content_key("a", "b") != content_key("ab")
        True
    """
    digest = hashlib.sha256(__version__.encode())
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _chosen_directory() -> Path:
    return Path(os.environ.get("TILESTEP_CACHE_DIR") or platformdirs.user_cache_dir("tilestep"))


def cache_directory() -> Path:
    """The directory new files are put in: `TILESTEP_CACHE_DIR`, else the user's cache directory.

    A directory that cannot be made or written to, or that others may write to, is replaced by a temporary one for this
    process, with one warning.
    """
    # Remembered for what was chosen: a thread that looks while another one changes it must not leave the old one.
    return _usable(_chosen_directory())


@functools.lru_cache
def _usable(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(directory)
        with tempfile.NamedTemporaryFile(dir=directory):
            return directory
    except OSError as error:
        warnings.warn(
            f"tilestep works without its cache, kernels are built again in each process: {directory}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return Path(_process_directory().name)


@functools.lru_cache(maxsize=1)
def _process_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tilestep-", ignore_cleanup_errors=True)


def forget_directory() -> None:
    """Try again, at the next build, whether the directory can be used."""
    _usable.cache_clear()


def _require_private(directory: Path) -> None:
    status = directory.stat()
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"it belongs to user {status.st_uid}, not to you; built code there cannot be trusted")
    if status.st_mode & 0o022:
        raise PermissionError(
            "others may write to it; built code there cannot be trusted (chmod go-w makes it private)"
        )


def find_cached(pattern: str) -> Path | None:
    """The newest file of this name in the cache, or None; a cache that cannot be written to is read all the same.

    Args:
        pattern: a file name, in which `*` stands for anything.
    """
    directory = _chosen_directory()
    with contextlib.suppress(OSError):
        _require_private(directory)
        found = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    return next(iter(cache_directory().glob(pattern)), None)


def cached_file(name: str, build: Callable[[Path], None]) -> Path:
    """The file of this name in the cache, built first if it is not there.

    Args:
        name: file name, holding the key of its content.
        build: writes the file at the path it is given; called by one process at a time.

    Returns:
        The path of the whole file.
    """
    found = find_cached(name)
    if found is not None:
        return found
    path = cache_directory() / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed since it was chosen
    with FileLock(str(path) + ".lock"):
        if not path.exists():
            with _whole_or_nothing(path) as partial:
                build(partial)
    return path


def update_cached(name: str, change: Callable[[Path | None], str]) -> Path:
    """Write a text file of the cache anew, from what it says so far.

    Args:
        name: file name.
        change: gives the new text from the file's path, None if there is none yet; called by one process at a time.

    Returns:
        The path of the file.
    """
    path = cache_directory() / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        text = change(path if path.exists() else None)
        with _whole_or_nothing(path) as partial:
            partial.write_text(text)
    return path


@contextlib.contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem + "-", suffix=path.suffix)
    os.close(descriptor)
    partial = Path(name)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
