"""`tilestep version`: what it prints, and what it says of a machine where something is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scripts import run_python

import tilestep
from tilestep.cli import machine
from tilestep.kernels.cache import forget_directory


def version(tmp_path: Path, **environment: str) -> str:
    """The command's output in a process of its own."""
    set_before = {name: None for name in os.environ if name.startswith("TILESTEP_") or name == "CXX"}
    given: dict[str, str | None] = {**set_before, "TILESTEP_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = run_python("-c", "from tilestep.cli import main; main(['version'])", **given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_machine_on_which_everything_works(tmp_path: Path) -> None:
    output = version(tmp_path)
    expected = {"tilestep": tilestep.__version__, "torch": torch.__version__, "cache": str(tmp_path / "cache")}
    for name, value in expected.items():
        assert f"{name:<12} {value}" in output
    assert "nothing is wrong with this machine" in output
    assert not list((tmp_path / "cache").glob("probe*"))


def test_a_machine_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from tilestep.cli import main; main(['version'])"
    done = run_python("-c", code)
    assert done.returncode == 0 and f"tilestep     {tilestep.__version__}" in done.stdout, done.stderr


def test_a_machine_with_three_faults(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "cache")
    output = version(tmp_path, CXX="/nowhere/g++", TILESTEP_NATIVE="0", TILESTEP_CACHE_DIR=folder)
    assert f"{'compiler':<12} none" in output and f"{'extension':<12} off" in output
    cache, compiler, native = output.partition("what is wrong with this machine:\n")[2].splitlines()
    assert "the cache folder cannot be used" in cache and folder in cache and "TILESTEP_CACHE_DIR" in cache
    assert "CXX=/nowhere/g++ is not there" in compiler and "eager" in compiler and "Unset CXX" in compiler
    assert "TILESTEP_NATIVE=0" in native and "Unset it" in native


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(tmp_path / "cache"))
    yield
    forget_directory()


def compiler_is(path: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "compiler", lambda: path and (str(path),))
    monkeypatch.delenv("CXX", raising=False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_is(None, monkeypatch)
    assert "apt install g++" in str(machine._compiler())


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\ncat > /dev/null\necho 'x.cpp: fatal error: omp.h is missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    compiler_is(broken, monkeypatch)
    assert "fatal error: omp.h is missing" in str(machine._compiler()) and "CXX" in str(machine._compiler())


def test_a_compiler_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").touch(mode=0o600)
    compiler_is(tmp_path / "c++", monkeypatch)
    assert "cannot be run" in str(machine._compiler())


def test_a_folder_from_which_no_code_may_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails there; here because it is no library."""
    odd = tmp_path / "c++"
    script = 'cat > /dev/null; while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo text > "$2"; fi; shift; done'
    odd.write_text(f"#!/bin/sh\n{script}\n")
    odd.chmod(0o755)
    compiler_is(odd, monkeypatch)
    sentence = str(machine._compiler())
    assert "cannot be loaded" in sentence and "TILESTEP_CACHE_DIR" in sentence


def test_a_cache_folder_that_others_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(folder))
    sentence = str(machine._cache())
    assert str(folder) in sentence and "other users may write to it" in sentence and "TILESTEP_CACHE_DIR" in sentence


def test_missing_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "python3-dev" in str(machine._headers())


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._torch() is None
    for name, old in {"2.10.1+cu128": True, "1.13.0": True, "2.11.0a0": False, "3.0.0": False}.items():
        monkeypatch.setattr(machine.torch, "__version__", name)
        assert (machine._torch() is not None) == old, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a usable GPU")
def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_driver", lambda: False)
    assert machine._gpu() is None  # a machine without a GPU is as it should be
    monkeypatch.setattr(machine, "_has_driver", lambda: True)
    monkeypatch.setattr(machine.torch.version, "cuda", None)
    assert "built without CUDA" in str(machine._gpu()) and "Install torch with CUDA" in str(machine._gpu())

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore")

    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine.torch.cuda, "init", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "is too old (found version 11040). Update the driver" in str(machine._gpu())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every GPU" in str(machine._gpu())


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    assert machine._triton() is None or machine.importlib.util.find_spec("triton") is None
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'tilestep[gpu]'" in str(machine._triton())


@pytest.mark.parametrize("module", ["tilestep", "tilestep.cli"])
def test_both_modules_are_the_command_line(module: str) -> None:
    done = run_python("-m", module, "version", "--help")
    assert done.returncode == 0 and "version" in done.stdout
