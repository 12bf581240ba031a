"""Kernels that are compiled several at a time: the same as one after the other, and no matter if that fails."""

from __future__ import annotations

import functools
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_script
from triton_assembler import require_launchers

from tilestep import compat
from tilestep.kernels import launch
from tilestep.kernels.launch import Launcher, build_together

SCRIPT = Path(__file__).with_name("built_together.py")


def said(rule: str, mode: str, directory: Path) -> dict[str, Any]:
    done = run_script(SCRIPT, rule, mode, str(directory))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def kernels(files: dict[str, str]) -> list[tuple[str, str]]:
    """Kernels and launchers by name and contents: tensors that are aligned otherwise give one another key."""
    return sorted((Path(name).name, contents) for name, contents in files.items())


def test_ctrl_c_waits_for_no_kernel() -> None:
    """Those that wait are not begun; the ones that are compiled end in their threads."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not triton.__version__.startswith(compat._KNOWN_TRITON):
        pytest.skip("kernels are not compiled together with this Triton")
    begun, end = [], threading.Event()

    def compilation(place: int) -> None:
        def work() -> Any:
            begun.append(place)
            if len(begun) == 2:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            end.wait(60)

        triton.runtime._async_compile.active_mode.get().submit(place, work, lambda kernel: kernel)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt, match="while Triton built 5 kernels"):
            compat.compile_together([functools.partial(compilation, place) for place in range(5)], 2)
        assert time.monotonic() - start < 30
    finally:
        end.set()
        signal.signal(signal.SIGINT, before)
    for thread in threading.enumerate():
        if thread.name.startswith("tilestep-build"):
            thread.join(30)
    assert sorted(begun) == [0, 1]


def test_kernels_and_their_count_are_those_of_serial_builds(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    require_launchers()
    serial, together, failing = [said("LAMB", mode, tmp_path) for mode in ("serial", "together", "failing")]
    assert any(name.endswith(".cubin") for name in serial["files"])
    assert any(name.endswith(".so") for name in serial["files"]), "launchers are built too"
    assert kernels(together["files"]) == kernels(serial["files"])
    assert together["count"] == together["ahead"] == serial["count"] > 0, "nothing was left to build at the launches"
    assert kernels(failing["files"]) == kernels(serial["files"]) and failing["count"] == serial["count"], (
        "built at the launches"
    )


def test_unknown_tritons_one_thread_and_single_kernels_compile_at_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    asked: list[int] = []
    compilations: list[Callable[[], object]] = [lambda: asked.append(1), lambda: asked.append(2)]
    compat.compile_together(compilations, threads=1)
    compat.compile_together(compilations[:1], threads=4)
    assert not asked
    compat.compile_together(compilations, threads=4)
    assert asked == [1, 2] or not triton.__version__.startswith("3.6."), "this Triton compiles kernels otherwise"
    monkeypatch.setattr(triton, "__version__", "9.0")
    asked.clear()
    compat.compile_together(compilations, threads=4)
    assert not asked


def test_a_compilation_that_raises_leaves_triton_as_it_was() -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    modes = pytest.importorskip("triton.runtime._async_compile", reason="Triton puts no compilations off")

    def fail() -> None:
        assert isinstance(modes.active_mode.get(), triton.AsyncCompileMode)
        raise ValueError

    compat.compile_together([fail, fail], threads=2)
    assert modes.active_mode.get() is None


def test_launchers_that_have_nothing_to_build_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("nothing was to be built")

    monkeypatch.setattr(launch, "compile_together", asked)
    on_cpu: list[tuple[Launcher, tuple[torch.Tensor, ...]]] = [
        (Launcher(lambda: None, 1, torch.device("cpu")), (torch.zeros(1),)) for _ in range(3)
    ]
    build_together(on_cpu, torch.device("cpu"))


def test_a_module_that_raises_raises_again() -> None:
    for _ in range(2):
        with pytest.raises(NameError, match="nothing"):
            launch.load_module("broken", "nothing")
