"""Compilers: bounded, said, and gone with the process that started them, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import kernel_folders
import pytest
import torch
from filelock import FileLock

import tilestep
from tilestep.backends.cpp import compile, run
from tilestep.backends.cpp.compile import compile_source, load_library
from tilestep.errors import BuildError
from tilestep.kernels import cache
from tilestep.native import build as native_build
from tilestep.norm import cpu_backend, plan_cache
from tilestep.runtime import kernel_cache

ANSWER = 'extern "C" int answer() { return 42; }\n'
MODULES = Path(compile.__file__).parents[3]


def forget() -> None:
    kernel_folders.forget()
    compile._failures.clear()
    compile._warned.clear()
    cpu_backend._loaded.cache_clear()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if compile.compiler() is None:
        pytest.skip("no C++ compiler")
    chosen = tmp_path / "kernels"
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(chosen))
    monkeypatch.setattr(run, "_libraries", {})
    native_build._file_name()  # is asked of the real compiler
    forget()
    yield chosen
    monkeypatch.undo()
    forget()


def compiler_that(work: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that says its version and then does something else."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "compiler 1" && exit\n{work}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    forget()
    return path


SLEEPS = 'touch "$TMPDIR/temporary"\nsh -c "sleep 321; true" tilestep-test-cc1plus'
"""A driver whose real compiler is a process of its own."""


def compilers_alive(folder: Path) -> list[int]:
    """Processes that have a variable of a build in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def eventually(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def left_over(directory: Path, *suffixes: str) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix not in (".lock", *suffixes)]


ENDS = {
    "returns": "threading.Thread(target=load, daemon=True).start(); wait()",
    "raises": "threading.Thread(target=load, daemon=True).start(); wait(); raise SystemExit(3)",
    "is terminated": "load()",
    "is killed": "load()",
    "is interrupted": "load()",
}
SIGNALS = {"is terminated": signal.SIGTERM, "is killed": signal.SIGKILL, "is interrupted": signal.SIGINT}

# Without torch, which takes seconds to import: what builds needs none of it.
# A shell's background processes begin with interrupts ignored, and so would this one.
PROGRAM = """
import importlib, pathlib, signal, sys, threading, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)
for name, folder in (("tilestep", "tilestep"), ("tilestep.backends", "tilestep/backends")):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{modules!r} + "/" + folder]
build = importlib.import_module("tilestep.backends.cpp.compile")
def load():
    build.load_library("answer", "")
def wait():
    while not list(pathlib.Path({directory!r}).glob(".build-*/temporary")):
        time.sleep(0.05)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ENDS)
def test_no_compiler_outlives_its_process(
    end: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(SLEEPS, tmp_path / "sleeps", monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    code = PROGRAM.format(modules=str(MODULES), directory=str(directory)) + ENDS[end]
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        if end in SIGNALS:
            assert eventually(lambda: list(directory.glob(".build-*/temporary")), 60)
            assert len(compilers_alive(directory)) >= 2
            process.send_signal(SIGNALS[end])
        process.wait(60)
    finally:
        process.kill()
    assert eventually(lambda: not compilers_alive(directory)), "a compiler runs on"
    assert eventually(lambda: not left_over(directory)), left_over(directory)
    assert not list((tmp_path / "temporary").iterdir())
    # A later process builds what this one has not.
    monkeypatch.delenv("CXX")
    forget()
    assert load_library("answer", ANSWER).answer() == 42


def test_the_end_of_a_process_joins_the_thread_that_builds(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_build._file_name() is None:
        pytest.skip("the native extension is turned off")
    compiler_that(SLEEPS, tmp_path / "sleeps", monkeypatch)
    monkeypatch.setattr(native_build, "_builder", None)
    native_build._start()
    thread = native_build._builder
    assert thread is not None and eventually(lambda: list(directory.glob(".build-scan-*/temporary")), 60)
    native_build._end()
    assert not thread.is_alive()
    assert eventually(lambda: not compilers_alive(directory)) and not left_over(directory)


def test_a_compiler_that_hangs_is_ended_in_time(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_that(SLEEPS, tmp_path / "sleeps", monkeypatch)
    monkeypatch.setenv("TILESTEP_BUILD_TIMEOUT", "1")
    with pytest.raises(BuildError, match=rf"{compiler} has not finished answer-.* in 1 s"):
        load_library("answer", ANSWER)
    assert eventually(lambda: not compilers_alive(directory)) and not left_over(directory)
    begin = time.monotonic()
    with pytest.raises(BuildError, match="has not finished answer-"):
        load_library("other", ANSWER)
    assert time.monotonic() - begin < 0.5, "not as long for each kernel"


def test_ctrl_c_ends_a_build_at_once_and_says_so_in_few_lines(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.arange(5.0))
    weight.grad = torch.ones(5)
    optimizer = tilestep.SGD([weight], lr=0.5, max_grad_norm=1.0)
    compiler = compiler_that(SLEEPS, tmp_path / "sleeps", monkeypatch)
    pressed: list[float] = []

    def press() -> None:
        if eventually(lambda: list(directory.glob(".build-*/temporary")), 60):
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores interrupts
    threading.Thread(target=press, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt, match=f"while {compiler} built norm-") as interrupted:
            optimizer.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - pressed[0] < 2.0
    said = traceback.format_exception(interrupted.value)
    assert sum(text.count("\n") for text in said) <= 16, "".join(said)
    assert eventually(lambda: not compilers_alive(directory)) and not left_over(directory, ".so")
    monkeypatch.delenv("CXX")
    forget()
    optimizer.step()
    assert weight.tolist() == pytest.approx([value - 0.5 / 5**0.5 for value in range(5)])


def test_a_compiler_that_does_not_say_its_version_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "silent"
    path.write_text("#!/bin/sh\nsleep 321\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(compile, "VERSION_SECONDS", 0.5)
    forget()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(BuildError, match=f"{path} --version has not answered"):
            load_library("answer", ANSWER)
    assert time.monotonic() - begin < 10


def adamw() -> list[float]:
    weight = torch.nn.Parameter(torch.arange(5.0))
    optimizer = tilestep.Optimizer([weight], "AdamW", lr=0.1)
    weight.grad = torch.ones(5)
    optimizer.step()
    return weight.tolist()


def test_flags_of_the_environment_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and norms of other flags are others, in one process too, and both are kept."""

    def stepped() -> list[float]:
        weight = torch.nn.Parameter(torch.arange(5.0))
        optimizer = tilestep.SGD([weight], lr=0.5, max_grad_norm=1.0)
        weight.grad = torch.ones(5)
        optimizer.step()
        return weight.tolist()

    command = compile.compiler()
    assert command is not None
    commands = tmp_path / "commands"
    compiler_that(f'echo "$@" >> "{commands}"; exec {command[0]} "$@"', tmp_path / "c++", monkeypatch)
    expected = stepped()
    for _ in range(2):
        monkeypatch.setenv("TILESTEP_CXXFLAGS", "-O0 -DNAME='a b'")
        assert stepped() == pytest.approx(expected)
        monkeypatch.delenv("TILESTEP_CXXFLAGS")
        assert stepped() == expected
    plain, given = (
        [line.partition(" -o ")[0] for line in commands.read_text().splitlines() if ("-O0" in line) is given]
        for given in (False, True)
    )
    assert len(plain) == 2 and given == [line.replace(" -x c++", " -O0 -DNAME=a b -x c++") for line in plain]


@pytest.mark.parametrize(("name", "words"), [("TILESTEP_BUILD_TIMEOUT", "soon"), ("TILESTEP_CXXFLAGS", "-DA='b")])
def test_a_variable_that_cannot_be_read_is_named(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, words)
    with pytest.raises(ValueError, match=f"Invalid {name}: "):
        adamw()


@pytest.mark.parametrize("work", [SLEEPS, "echo no such header >&2; exit 1", "kill -SEGV $$"])
def test_without_a_kernel_a_rule_runs_eagerly_and_is_tried_again_later(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = adamw()
    run._libraries.clear()
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(tmp_path / "others"))
    monkeypatch.setenv("TILESTEP_BUILD_TIMEOUT", "1")
    path = compiler_that(f'echo run >> "$0.runs"\n{work}', tmp_path / "broken", monkeypatch)
    runs = Path(f"{path}.runs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert adamw() == pytest.approx(expected)
    assert len(caught) == 1 and str(path) in str(caught[0].message) and "eager" in str(caught[0].message)
    assert len(runs.read_text().split()) == 1, "what has failed is not tried at each optimizer"
    monkeypatch.setattr(compile, "_failures", {})  # later
    monkeypatch.delenv("TILESTEP_BUILD_TIMEOUT")
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "compiler 1" && exit\nexec g++ "$@"\n')
    assert adamw() == expected and len(run._libraries) == 1


def test_a_build_that_has_failed_is_tried_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler_that('echo run >> "$0.runs"\nexit 1', tmp_path / "broken", monkeypatch)
    for seconds, runs in ((300.0, 1), (0.0, 1), (300.0, 2)):
        monkeypatch.setattr(compile, "RETRY_SECONDS", seconds)
        if seconds == 0.0:
            compile._failures.update({key: (0.0, text) for key, (_, text) in compile._failures.items()})
            continue
        with pytest.raises(BuildError, match="status 1"):
            load_library("answer", ANSWER)
        assert len(Path(f"{path}.runs").read_text().split()) == runs


def test_another_process_that_holds_the_lock_is_not_waited_for_without_limit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library("answer", ANSWER)
    [library] = directory.glob("answer-*.so")
    library.unlink()
    monkeypatch.setenv("TILESTEP_BUILD_TIMEOUT", "1")
    monkeypatch.setattr(cache, "_WORD", 0.2)
    compiler = compile.compiler()
    assert compiler is not None
    with FileLock(f"{library}.lock"):
        begin = time.monotonic()
        with pytest.warns(RuntimeWarning) as caught, pytest.raises(BuildError, match="has not finished building"):
            load_library("answer", ANSWER)
        assert 0.9 < time.monotonic() - begin < 20
    [warning] = caught
    assert f"{library}.lock" in str(warning.message) and compiler[0] in str(warning.message)
    compile._failures.clear()
    assert load_library("answer", ANSWER).answer() == 42


def test_a_lock_that_is_let_go_in_time_is_only_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library("answer", ANSWER)
    [library] = directory.glob("answer-*.so")
    library.unlink()
    lock = FileLock(f"{library}.lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.5, lock.release).start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_library("answer", ANSWER).answer() == 42


def test_what_a_killed_process_has_left_is_removed_in_time(directory: Path) -> None:
    directory.mkdir(0o700)
    for name, age in ((".build-old", 7200), (".build-new", 10)):
        (directory / name).mkdir()
        os.utime(directory / name, (time.time() - age,) * 2)
    cache.cached("kernel.txt", lambda path: path.write_text("whole")).close()  # type: ignore[arg-type, return-value]
    assert sorted(left_over(directory)) == [".build-new", "kernel.txt"]


def test_a_full_disk_is_no_end_of_a_training(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        adamw()


def test_a_compiler_that_leaves_no_message(tmp_path: Path) -> None:
    """As on a disk that it has filled: the folder and what is left there are named."""
    (tmp_path / "build").mkdir()
    with pytest.raises(BuildError, match=rf"failed with status 1:\nno message; {tmp_path} has \d+ MiB left"):
        compile_source(["false"], "", tmp_path / "build" / "made", [], 60)


def test_a_fork_during_a_build_neither_waits_for_it_nor_ends_it(tmp_path: Path, directory: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    errors: list[BaseException] = []

    def build() -> None:
        try:
            compile_source(["sh", "-c", "sleep 2; echo made > $2", "compiler"], "", folder / "made", [], 60)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    assert eventually(lambda: compile._running)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        native = native_build._builder is None and not native_build._lock.locked()
        os._exit(0 if native and not compile._running else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join(60)
    assert not errors and (folder / "made").read_text() == "made\n"


def test_a_fork_while_another_thread_traces_a_rule() -> None:
    """The child has no thread that would let go of the locks."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with kernel_cache._lock, plan_cache.lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        tilestep.SGD([weight], lr=0.5).step()
        with plan_cache.lock:
            os._exit(0 if weight.tolist() == [0.5, 0.5] else 1)
    over.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_scanner_s_build_waits_until_a_process_has_lived_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(native_build, "_start", lambda: started.append(True))
    monkeypatch.setattr(native_build, "_builder", None)
    monkeypatch.setattr(native_build, "_is_absent", False)
    monkeypatch.setattr(native_build, "_first_request", None)
    monkeypatch.setattr(native_build, "find_cached", lambda name: None)
    monkeypatch.setattr(native_build, "_file_name", lambda: "scan-test.so")
    native_build._loaded.cache_clear()
    clock = [100.0]
    monkeypatch.setattr(native_build.time, "monotonic", lambda: clock[0])
    try:
        least = native_build._START_SECONDS
        for seconds, expected in ((0.0, 0), (least - 0.5, 0), (least + 0.5, 1)):
            clock[0] = 100.0 + seconds
            assert native_build.module(1000) is None and len(started) == expected
    finally:
        native_build._loaded.cache_clear()


def test_a_damaged_scanner_is_not_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cached("scan-test.so", lambda path: path.write_bytes(b"\x7fELF" + bytes(4000))).close()  # type: ignore[arg-type, return-value]
    whole = directory / "scan-test.so"
    monkeypatch.setattr(native_build, "_file_name", lambda: whole.name)
    monkeypatch.setattr(native_build, "_builder", None)
    monkeypatch.setattr(native_build, "_is_absent", False)
    for damage in (whole.read_bytes(), bytes(4100), b""):  # no library at all, zeroed, cut
        whole.write_bytes(damage)
        native_build._loaded.cache_clear()
        try:
            assert native_build.module(1) is None
        finally:
            native_build._loaded.cache_clear()


def test_a_build_in_the_background_says_nothing_while_it_waits(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_WORD", 0.1)
    directory.mkdir(0o700)
    with FileLock(f"{directory / 'kernel.txt'}.lock"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BuildError, match="has not finished building"):
            cache.cached("kernel.txt", lambda path: None, seconds=0.5, warns=False)
