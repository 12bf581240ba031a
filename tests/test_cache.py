"""The cache of built kernels: whole files only, built once however many ask, never trusted where others can write."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_folders import forget
from scripts import run_function

import tilestep
from tilestep.backends.cpp import compile
from tilestep.backends.cpp.compile import load_library
from tilestep.errors import BuildError
from tilestep.kernels import cache, launch
from tilestep.kernels.cache import cache_directory, cached, content_key, find_cached

ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def directory(own_cache: Path) -> Path:
    return own_cache


def cached_file(name: str, build: Any) -> Path:
    with cached(name, build) as file:
        return file.path


def write(text: str) -> Any:
    return lambda path: path.write_text(text)


def never(path: Path) -> None:
    raise AssertionError(f"{path} was there already")


def fake_compiler(path: Path, version: str) -> Path:
    """A compiler that says it is of another version and counts its runs in a file beside it."""
    real = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert real is not None
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\necho run >> "{path}.runs"\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def runs(compiler: Path) -> int:
    log = Path(f"{compiler}.runs")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_key_depends_on_every_part_and_on_where_it_ends() -> None:
    keys = [content_key(*parts) for parts in (("a", "b"), ("ab",), ("a", "b", ""), ("b", "a"), ("", "ab"), ())]
    assert len(set(keys)) == len(keys)


def test_a_key_depends_on_tilestep_s_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = content_key("a")
    monkeypatch.setattr(cache, "__version__", "0.0.0.test")
    assert content_key("a") != before


def test_a_file_is_built_once_and_only_the_user_can_write_beside_it(directory: Path) -> None:
    path = cached_file("kernel.txt", write("first"))
    assert path.read_text() == "first" and path.parent == directory
    assert cached_file("kernel.txt", never) == path
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_build_that_fails_leaves_nothing(directory: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise BuildError("no")

    with pytest.raises(BuildError):
        cached_file("kernel.txt", fail)
    assert [path.name for path in directory.iterdir() if path.suffix != ".lock"] == []
    assert cached_file("kernel.txt", write("whole")).read_text() == "whole"


def die_half_way(path: Path) -> None:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def in_fork(work: Any) -> multiprocessing.process.BaseProcess:
    """Run a function in a forked process, for at most a minute."""
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking with threads: that is the point
        process = context.Process(target=work)
        process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        raise AssertionError("the forked process hangs")
    return process


def test_a_killed_writer_leaves_neither_a_broken_file_nor_a_lock() -> None:
    assert in_fork(lambda: cached_file("kernel.txt", die_half_way)).exitcode == -signal.SIGKILL
    assert find_cached("kernel.txt") is None
    assert cached_file("kernel.txt", write("whole")).read_text() == "whole"


def works_without_the_cache(reason: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = cached_file("kernel.txt", write("first"))
        second = cached_file("kernel.txt", never)
        cached_file("other.txt", write("other"))
    assert first == second and first.read_text() == "first"
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_made_costs_one_warning(directory: Path) -> None:
    directory.write_text("a file, not a directory")
    works_without_the_cache(str(directory))


def test_a_directory_that_others_may_write_to_is_left_alone(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o770)
    (directory / "kernel.txt").write_text("planted")
    works_without_the_cache("other users may write to it")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o770


def test_a_directory_of_another_user_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(0o700)
    (directory / "kernel.txt").write_text("planted")
    if os.getuid() == 0:
        os.chown(directory, 4321, -1)
    else:
        monkeypatch.setattr(cache.os, "getuid", lambda: directory.stat().st_uid + 1)
    works_without_the_cache("belongs to user")


def read_only(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError("read-only file system")


def test_a_read_only_cache_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(0o700)
    (directory / "kernel.txt").write_text("prebuilt")
    monkeypatch.setattr(cache.tempfile, "NamedTemporaryFile", read_only)
    assert cached_file("kernel.txt", never).read_text() == "prebuilt"
    with pytest.warns(RuntimeWarning, match="read-only file system"):
        assert cached_file("other.txt", write("other")).parent != directory


def test_a_directory_without_room_for_a_kernel_costs_one_warning() -> None:
    def check() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # as on a full disk, for this process alone
        works_without_the_cache("File too large")

    assert in_fork(check).exitcode == 0


def test_a_full_disk_is_no_end_of_a_training_on_a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People read Triton's source in the cache; Triton does not."""
    if not launch.available():
        pytest.skip("no Triton")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert launch.load_module("words", "VALUE = 43\n").VALUE == 43
    assert not list(directory.glob("words-*.py"))


def test_a_cache_removed_meanwhile_is_made_again(directory: Path) -> None:
    cached_file("kernel.txt", write("first"))
    shutil.rmtree(directory)
    assert cached_file("kernel.txt", write("second")).read_text() == "second"
    assert cache_directory() == directory


def test_a_library_is_built_for_each_source_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (fake_compiler(tmp_path / f"compiler{number}", f"compiler {number}") for number in (1, 2))
    monkeypatch.setenv("CXX", str(first))
    forget()
    for _ in range(2):
        assert load_library("answer", ANSWER).answer() == 42
    assert runs(first) == 1
    assert load_library("answer", ANSWER.replace("42", "43")).answer() == 43
    assert load_library("answer", ANSWER, ["-O1"]).answer() == 42
    assert runs(first) == 3
    monkeypatch.setenv("CXX", f"env {second}")
    forget()
    assert load_library("answer", ANSWER).answer() == 42
    assert runs(second) == 1
    monkeypatch.setattr(compile, "_cpu_features", lambda: "another processor")
    load_library("answer", ANSWER)
    assert runs(second) == 2


def test_without_a_compiler_a_cached_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library("answer", ANSWER)
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    forget()
    assert compile.compiler() is None
    assert load_library("answer", ANSWER).answer() == 42
    with pytest.raises(BuildError, match="nowhere is not there"):
        load_library("answer", ANSWER.replace("42", "44"))


def test_a_broken_library_is_built_again(directory: Path) -> None:
    name = f"answer-{content_key('x')}"
    path = directory / "seen"
    load_library(name, ANSWER)
    [library] = directory.glob(f"{name}*.so")
    broken = ANSWER.replace("42", "45")
    load_library(name, broken)
    [other] = [path for path in directory.glob(f"{name}*.so") if path != library]
    path.write_bytes(library.read_bytes()[:100])
    os.replace(path, other)
    # The loader knows the file it has open by its inode: the broken one is another.
    assert load_library(name, broken).answer() == 45


def test_what_the_compiler_says_is_in_the_error() -> None:
    with pytest.raises(BuildError, match="missing_function"):
        load_library("broken", 'extern "C" int broken() { return missing_function(); }\n')


def adamw_steps() -> list[float]:
    weight = torch.nn.Parameter(torch.arange(5.0))
    optimizer = tilestep.Optimizer([weight], "AdamW", lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones(5)
        optimizer.step()
    return weight.tolist()


def step_at_once(directory: str, start: Any, results: Any) -> None:
    os.environ["TILESTEP_CACHE_DIR"] = directory
    try:
        start.wait(120)
        results.put((adamw_steps(), tilestep.compile_count()))
    except Exception as error:
        results.put((repr(error), 0))
        raise


def outcomes_of_four(directory: str) -> list[tuple[list[float], int]]:
    context: Any = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=step_at_once, args=(directory, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return outcomes


def test_many_processes_build_each_kernel_once(directory: Path) -> None:
    outcomes = run_function(outcomes_of_four, str(directory))
    assert all(weights == outcomes[0][0] for weights, _ in outcomes)
    libraries = list(directory.glob("*.so"))
    assert sum(count for _, count in outcomes) == len(libraries) == 1


def test_a_fork_after_use_steps_with_one_thread_and_does_not_hang() -> None:
    expected = adamw_steps()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))
    try:
        adamw_steps()

        def child() -> None:
            from tilestep.devices import thread_count

            os._exit(0 if thread_count() == 1 and adamw_steps() == expected else 1)

        assert in_fork(child).exitcode == 0
    finally:
        torch.set_num_threads(threads)
