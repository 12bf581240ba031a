"""The cache of built kernels: files that only the user can write, verified at each opening.

Code from a folder that others may write to would run as the user. So owner and mode of the folder and of the file, and
the checksum of code, are checked at each opening, on descriptors: what was verified is what is read or loaded.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from .._version import __version__
from ..errors import BuildError

_SEALED = (".so", ".key")
"""Suffixes of files that end with a checksum of their name and content; loaders of libraries ignore it."""

_SEAL = b"\n# tilestep sha256 "
_SEAL_LENGTH = len(_SEAL) + 64

_BUILDS = ".build-"
_STALE = 3600.0  # seconds after which the folder of a build belongs to a killed process

_ROOM = 1 << 20  # free bytes that a directory needs: a kernel and temporary files of the compiler

_WORD = 10.0  # seconds of waiting for another process before a warning


def content_key(*parts: str) -> str:
    """A short name for content: the hash of the parts and of tilestep's version."""
    digest = hashlib.sha256(__version__.encode())
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


class BuildTimeout(BuildError):
    """A build has taken too long, in this process or in another."""


class CachedFile:
    """A file of the cache, opened and verified; close it, or use it as a context manager."""

    _count = itertools.count()

    def __init__(self, path: Path, handle: int, content: bytes) -> None:
        self.path, self.content = path, content
        self._handle = handle

    def loadable(self) -> str:
        """A path to the verified file; valid while it is open."""
        if not os.path.exists(f"/proc/self/fd/{self._handle}"):
            return str(self.path)
        # The loader returns the loaded library for a known path, and descriptors are reused: dots that encode a number
        # make every path unique.
        dots = "".join("/." if bit == "1" else "/" for bit in f"{next(self._count):b}")
        return f"/proc/self/fd{dots}/{self._handle}"

    def close(self) -> None:
        """Close the descriptor; a library loaded from it stays."""
        os.close(self._handle)

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _chosen_directory() -> Path:
    return Path(os.environ.get("TILESTEP_CACHE_DIR") or platformdirs.user_cache_dir("tilestep"))


def cache_directory() -> Path:
    """The directory for new files: `TILESTEP_CACHE_DIR`, the user's cache directory, or one of this process."""
    directory = _chosen_directory()
    try:
        with _opened(_present(directory)):
            _require_room(directory)
            return directory
    except OSError as error:
        _warn_once(
            f"tilestep cannot use its cache and rebuilds kernels in each process: {directory}: "
            f"{error.strerror or error}",
            f"without {directory}",  # errors name temporary files
        )
        return Path(_process_directory().name)


@functools.lru_cache
def _require_room(directory: Path) -> None:
    """Raise OSError if no kernel can be written: the directory is read-only, the disk full, or a quota used up."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(_ROOM))
        file.flush()


_process_directory = functools.lru_cache(maxsize=1)(
    functools.partial(tempfile.TemporaryDirectory, prefix="tilestep-", ignore_cleanup_errors=True)
)


_warned: set[str] = set()


def _warn_once(message: str, subject: str) -> None:
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def forget_directory() -> None:
    """Check again, at the next build, whether the directory can be used, and warn again if not."""
    _require_room.cache_clear()
    _require_owned.cache_clear()
    _warned.clear()


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open a directory's descriptor; raises PermissionError if other users may write to it."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if why := _not_private(os.fstat(handle)):
            remedy = "remove it, or set TILESTEP_CACHE_DIR to another directory"
            raise PermissionError(f"{why}; its compiled code cannot be trusted ({remedy})")
        yield handle
    finally:
        os.close(handle)


def _not_private(status: os.stat_result) -> str:
    """Why another user may have written to a file or folder; empty if none may."""
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}, not to you"
    return "other users may write to it" if status.st_mode & 0o022 else ""


def _open_verified(directory: Path, name: str) -> CachedFile | None:
    """The file with this name, if it and the directory are private and its checksum, if any, is right."""
    path = directory / name
    with contextlib.suppress(OSError), _opened(directory) as folder:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            status = os.fstat(handle)
            if why := _not_private(status):
                _warn_once(f"tilestep does not use {path}: {why}; remove it", str(path))
                return None
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(handle, "rb", closefd=False) as file:
                content = file.read()
            if name.endswith(_SEALED):
                content, seal = content[:-_SEAL_LENGTH], content[-_SEAL_LENGTH:]
                if seal != _seal(name, content):
                    return None
            stack.pop_all()
            return CachedFile(path, handle, content)
    return None


def _seal(name: str, content: bytes) -> bytes:
    return _SEAL + hashlib.sha256(name.encode() + b"\0" + content).hexdigest().encode()


def _places() -> Iterator[Path]:
    """The chosen directory, and its replacement if it is read-only."""
    chosen = _chosen_directory()
    yield chosen
    current = cache_directory()
    if current != chosen:
        yield current


def open_cached(name: str) -> CachedFile | None:
    """The verified file of this name, or None."""
    return next(filter(None, (_open_verified(directory, name) for directory in _places())), None)


def cached_names(pattern: str) -> list[str]:
    """Names in the cache, sorted; whether a file can be trusted is checked when it is opened."""
    names: set[str] = set()
    for directory in _places():
        with contextlib.suppress(OSError), _opened(directory) as folder:
            names.update(fnmatch.filter(os.listdir(folder), pattern))
    return sorted(names)


def cached(
    name: str,
    build: Callable[[Path], None],
    *,
    seconds: float = 60.0,
    by: str = "",
    anew: bool = False,
    warns: bool = True,
) -> CachedFile:
    """The verified file with this name, built first if it does not exist."""
    file = None if anew else open_cached(name)
    if file is not None:
        return file
    directory = _present(cache_directory())
    with _locked(directory / name, seconds, by, warns):
        file = None if anew else _open_verified(directory, name)
        if file is None:
            _write_whole(directory, name, build)
            file = _open_verified(directory, name)
    if file is None:
        raise BuildError(f"{directory / name} was changed while it was built")
    return file


def find_cached(name: str) -> Path | None:
    """The path of the verified file of this name, or None."""
    file = open_cached(name)
    if file is None:
        return None
    with file:
        return file.path


def update_cached(name: str, change: Callable[[str | None], str]) -> Path:
    """Rewrite a text file of the cache; `change` gets the text so far, or None."""
    directory = _present(cache_directory())
    with _locked(directory / name, 60.0, "", True):
        file = _open_verified(directory, name)
        text = None
        if file is not None:
            with file:
                text = file.content.decode(errors="replace")
        changed = change(text)
        if changed != text:
            _write_whole(directory, name, text_builder(lambda: changed))
    return directory / name


def publish(name: str, text: str) -> Path:
    """Write a text for people to read, unless it exists; errors are only warned of."""
    file = open_cached(name)
    if file is not None:
        with file:
            if file.content == text.encode():
                return file.path
    try:
        return update_cached(name, lambda _: text)
    except OSError as error:
        _warn_once(f"tilestep cannot write {name} to its cache: {error}", "publish")
        return cache_directory() / name


def private_folder(name: str) -> Path:
    """A folder of the cache for a library that verifies no files: no other user can write to it."""
    directory = _present(cache_directory())
    try:
        return _closed_folder(directory, name)
    except OSError as error:
        _warn_once(f"tilestep does not use {directory / name}: {error}; remove it", str(directory / name))
        return _closed_folder(Path(_process_directory().name), name)


def _closed_folder(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened(directory) as parent, contextlib.ExitStack() as stack:
        handle = os.open(name, flags, dir_fd=parent)
        stack.callback(os.close, handle)
        status = os.fstat(handle)
        if status.st_mode & 0o022 and os.fstat(parent).st_mode & 0o011:
            raise PermissionError("other users could write to it")
        if status.st_mode & 0o077:
            os.fchmod(handle, 0o700)
        _require_owned(path, status.st_ino)
    return path


@functools.lru_cache
def _require_owned(path: Path, number: int) -> None:
    """Raise PermissionError if another user has put something there; checked once a process."""
    for folder, _, files in os.walk(path):
        for entry in (folder, *(os.path.join(folder, file) for file in files)):
            owner = os.lstat(entry).st_uid
            if owner not in (0, os.getuid()):
                raise PermissionError(f"{entry} belongs to user {owner}, not to you")


def _present(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed meanwhile
    return directory


@contextlib.contextmanager
def _locked(path: Path, seconds: float, by: str, warns: bool) -> Iterator[None]:
    """A context that one process at a time enters; a long wait is warned of, and ends in `BuildTimeout`."""
    lock = FileLock(f"{path}.lock")
    begin = time.monotonic()
    what = f"{path.name} with {by}" if by else path.name
    try:
        try:
            lock.acquire(timeout=min(_WORD, seconds) if warns else seconds)
        except Timeout:
            left = seconds - (time.monotonic() - begin)
            if left <= 0:
                raise
            _warn_once(
                f"tilestep waits {left:.0f} s more for another process that builds {what} and holds {path}.lock",
                f"{path}.lock",
            )
            lock.acquire(timeout=left)
    except Timeout as error:
        raise BuildTimeout(
            f"another process has not finished building {what} in {seconds:.0f} s and holds {path}.lock: end that "
            "process if it hangs"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _write_whole(directory: Path, name: str, build: Callable[[Path], None]) -> None:
    """Write a file atomically, even if the machine crashes."""
    _remove_stale(directory)
    folder = Path(tempfile.mkdtemp(prefix=f"{_BUILDS}{name}-", dir=directory))
    try:
        partial = folder / name
        build(partial)
        with open(partial, "r+b") as file:
            if name.endswith(_SEALED):
                file.write(_seal(name, file.read()))
                file.flush()
            os.chmod(partial, 0o644)  # a linker's files may be writable by a group
            os.fsync(file.fileno())
        os.replace(partial, directory / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with _opened(directory) as handle:
        os.fsync(handle)


def _remove_stale(directory: Path) -> None:
    """Remove the folders of processes that were killed while they built."""
    for path in directory.glob(f"{_BUILDS}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)


def text_builder(text: Callable[[], str]) -> Callable[[Path], Any]:
    """A `build` for `cached` that writes a text, which is made only if needed."""
    return lambda path: path.write_text(text())


_count_lock = threading.Lock()
_built = 0


def count_build() -> None:
    """Count a build, before a compiler runs."""
    global _built
    with _count_lock:  # several threads may build
        _built += 1


def compile_count() -> int:
    """The number of kernels that this process has compiled; kernels loaded from the cache do not count.

    Example:
        >>> compile_count() >= 0
        True
    """
    return _built
