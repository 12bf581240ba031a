"""What a cache may hand out: nothing that another user could have written, nothing that is cut."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_folders import forget

import tilestep
from tilestep.backends import tuning
from tilestep.backends.cpp import compile
from tilestep.backends.cpp.compile import load_library
from tilestep.errors import BuildError
from tilestep.kernels import cache, launch
from tilestep.kernels.cache import cached, find_cached, open_cached, private_folder, publish

ANSWER = 'extern "C" int answer() { return 42; }\n'
PLANTED = 'extern "C" int answer() { return 666; }\n'
STRANGER = 4321

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def directory(own_cache: Path) -> Path:
    if compile.compiler() is None:
        pytest.skip("no C++ compiler")
    return own_cache


def the_library(directory: Path) -> Path:
    [library] = directory.glob("answer-*.so")
    return library


def plant(path: Path, owner: int | None = None, sealed: bool = False) -> None:
    """Put a working library of other code where one of ours is, as a user who can write to the folder does."""
    made = path.parent / "planted"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", made], input=PLANTED, text=True, check=True)
    if sealed:
        content = made.read_bytes()
        made.write_bytes(content + cache._seal(path.name, content))
    made.chmod(0o644)
    if owner is not None:
        os.chown(made, owner, -1)
    os.replace(made, path)


def answer() -> int:
    return int(load_library("answer", ANSWER).answer())


def build_only(monkeypatch: pytest.MonkeyPatch, source: str = ANSWER, title: str = "answer") -> None:
    """Fill the cache and load nothing: the loader keeps libraries that it has seen."""
    with monkeypatch.context() as patch:
        patch.setattr(compile, "_open", lambda file: None)
        load_library(title, source)


@needs_root
def test_a_library_of_another_user_does_not_run(directory: Path) -> None:
    assert answer() == 42
    plant(the_library(directory), STRANGER, sealed=True)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {STRANGER}"):
        assert answer() == 42
    assert the_library(directory).stat().st_uid == os.getuid(), "it was built anew"


def test_a_library_that_others_may_write_to_does_not_run(directory: Path) -> None:
    assert answer() == 42
    plant(the_library(directory), sealed=True)
    the_library(directory).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="other users may write to it"):
        assert answer() == 42
    assert stat.S_IMODE(the_library(directory).stat().st_mode) & 0o022 == 0


def test_a_library_planted_before_a_chmod_does_not_run(directory: Path) -> None:
    """A folder that others may write to is refused; making it private does not make what lies in it ours."""
    assert answer() == 42
    directory.chmod(0o777)
    plant(the_library(directory), STRANGER if os.getuid() == 0 else None, sealed=os.getuid() == 0)
    with pytest.warns(RuntimeWarning, match="other users may write to it") as caught:
        assert answer() == 42
    assert all("chmod" not in str(warning.message) for warning in caught)
    directory.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert answer() == 42 and the_library(directory).stat().st_uid == os.getuid()


def test_a_folder_that_becomes_writable_later_is_not_used(directory: Path) -> None:
    assert answer() == 42
    before = sorted(directory.iterdir())
    directory.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="cannot use its cache"):
        cached_path = find_cached(the_library(directory).name)
        assert cached_path is None or cached_path.parent != directory
        assert load_library("other", ANSWER.replace("42", "43")).answer() == 43
    assert sorted(directory.iterdir()) == before, "nothing is written there"


def test_a_folder_that_cannot_be_written_to_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt fails with the name of another temporary file."""
    make = tempfile.NamedTemporaryFile

    def read_only(*arguments: Any, dir: Any = None, **options: Any) -> Any:
        if dir is None:
            return make(*arguments, **options)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{dir}/tmp{uuid.uuid4().hex}")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", read_only)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [answer(), load_library("other", PLANTED).answer()] == [42, 666]
    [warning] = caught
    assert re.search(r"each process: \S+/kernels: Read-only file system$", str(warning.message))


@pytest.mark.parametrize("damage", ["cut", "zeroed", "half zeroed", "empty", "changed", "renamed"])
def test_a_damaged_library_is_built_anew(damage: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_only(monkeypatch)
    path = the_library(directory)
    content = path.read_bytes()
    half = len(content) // 2
    if damage == "renamed":
        build_only(monkeypatch, PLANTED, "other")
        [other] = directory.glob("other-*.so")
        shutil.copy(other, path)
    else:
        damaged = {
            "cut": content[:half],
            "zeroed": bytes(len(content)),
            "half zeroed": content[:half] + bytes(len(content) - half),
            "empty": b"",
            "changed": content.replace(b"\x2a\x00\x00\x00", b"\x2b\x00\x00\x00"),
        }[damage]
        assert damaged != content
        path.write_bytes(damaged)
    assert answer() == 42
    with open_cached(path.name) as file:  # type: ignore[union-attr]
        assert file.content, "it has healed"


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    assert answer() == 42
    path = the_library(directory)
    elsewhere = tmp_path / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert find_cached(path.name) is None
    assert answer() == 42 and not path.is_symlink()


def test_a_pipe_is_not_waited_for(directory: Path) -> None:
    assert answer() == 42
    path = the_library(directory)
    path.unlink()
    os.mkfifo(path)
    assert find_cached(path.name) is None


def test_what_is_loaded_is_what_was_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another file takes its name between the two."""
    build_only(monkeypatch)
    path = the_library(directory)
    file = open_cached(path.name)
    assert file is not None
    with file:
        plant(path)
        assert ctypes.CDLL(file.loadable()).answer() == 42


def test_files_opened_after_one_another_are_told_apart_by_the_loader(directory: Path) -> None:
    """Descriptors are used again, and the loader remembers paths."""
    for number in range(50, 60):
        assert load_library("answer", ANSWER.replace("42", str(number))).answer() == number


@pytest.mark.parametrize("planted", ["newest", "oldest"])
def test_without_a_compiler_no_name_wins_by_its_age(
    planted: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_only(monkeypatch)
    library = the_library(directory)
    for last in ("00000000", "zzzzzzzz"):
        other = library.with_name(library.name.rpartition("-")[0] + f"-{last}.so")
        plant(other)
        when = 2e9 if planted == "newest" else 1.0
        os.utime(other, (when, when))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    forget()
    assert answer() == 42


def test_without_a_compiler_a_broken_library_is_no_library(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_only(monkeypatch)
    path = the_library(directory)
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    forget()
    with pytest.raises(BuildError, match="no cached build"):
        answer()


def test_an_umask_that_lets_groups_write_changes_nothing(directory: Path) -> None:
    before = os.umask(0o002)
    try:
        assert answer() == 42
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runs = tilestep.compile_count()
            assert answer() == 42 and tilestep.compile_count() == runs
        assert stat.S_IMODE(the_library(directory).stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_a_file_is_on_disk_before_it_has_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace(*names)))
    cached("kernel.so", lambda path: path.write_text("whole")).close()  # type: ignore[arg-type, return-value]
    assert order == ["sync", "replace", "sync"]


def test_a_table_of_another_user_is_passed_over(directory: Path) -> None:
    cpu = torch.device("cpu")
    path = tuning.save_shapes(cpu, {"one": tuning.TileShape(4096)})
    tuning.known_table.cache_clear()
    assert tuning.known_table(tuning.device_key(cpu), "cpu")
    assert json.loads(path.read_text())["shapes"], "people may read and copy it"
    path.chmod(0o666)
    tuning.known_table.cache_clear()
    with pytest.warns(RuntimeWarning, match="other users may write to it"):
        assert not tuning.known_table(tuning.device_key(cpu), "cpu")


def test_triton_s_source_runs_as_it_was_made_whatever_the_file_says(directory: Path) -> None:
    if not launch.available():
        pytest.skip("no Triton")
    source = "import triton\n\nVALUE = 42\n"
    module = launch.load_module("words", source)
    path = Path(str(module.__file__))
    assert path.read_text() == source and path.parent == directory
    path.write_text("raise RuntimeError('planted')\n")
    del sys.modules[module.__name__]
    again = launch.load_module("words", source)
    assert again.VALUE == 42 and path.read_text() == source, "and the file has healed"
    assert publish("kept.py", "text").read_text() == "text"


def test_triton_s_own_files_lie_where_nobody_else_can_reach(directory: Path) -> None:
    directory.mkdir(0o755)
    folder = private_folder("triton")
    assert folder == directory / "triton" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert private_folder("triton") == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users could write to it"):
        assert private_folder("triton") != folder


@needs_root
def test_triton_s_files_of_another_user_are_left_alone(directory: Path) -> None:
    folder = private_folder("triton")
    (folder / "kernel").mkdir()
    os.chown(folder / "kernel", STRANGER, -1)
    forget()
    with pytest.warns(RuntimeWarning, match=f"belongs to user {STRANGER}"):
        assert private_folder("triton") != folder
