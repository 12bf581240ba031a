"""Building and loading the scanner: never waited for in a step, kept in the cache, and not missed where it is not."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import subprocess
import sysconfig
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..cache import cached_file, content_key, find_cached
from ..codegen.compile_cpp import compiler, compiler_version

__all__ = ["module", "wait"]

LEAST_TENSORS = 200
"""Fewer tensors than this are looked at in Python faster than anyone notices."""

_FLAGS = ["-std=c++20", "-O2", "-fopenmp", "-shared", "-fPIC", "-w"]
_lock = threading.Lock()
_builder: threading.Thread | None = None
_process: subprocess.Popen[str] | None = None
_known_absent = False


_FOLDER = Path(__file__).parent


def _source() -> str:
    return (_FOLDER / "scan.cpp").read_text()


def _sources() -> str:
    """All that the module is made of."""
    return "".join((_FOLDER / name).read_text() for name in ("arrivals.h", "scan.cpp"))


@functools.lru_cache(maxsize=1)
def _file_name() -> str | None:
    if os.environ.get("TILESTEP_NATIVE") == "0" or compiler() is None or os.name != "posix":
        return None
    interpreter = sysconfig.get_config_var("EXT_SUFFIX") or ""
    version = f"{torch.__version__} {torch.version.git_version}"
    key = content_key(_sources(), " ".join(_FLAGS), compiler_version(), version, interpreter)
    return f"scan-{key}.so"


def module(tensors: int) -> Any:
    """The scanner's module if it is built; otherwise a thread starts to build it, and the answer is None for now.

    Args:
        tensors: how many there are to look at; for few it is not built.
    """
    global _known_absent
    if _loaded.cache_info().currsize:
        return _loaded()
    if _builder is not None:
        return None if _builder.is_alive() else _loaded()
    name = None if _known_absent and tensors < LEAST_TENSORS else _file_name()
    if name is None:
        return None
    if find_cached(name) is not None:
        return _loaded()
    # Looked for once: a step must not read directories.
    _known_absent = True
    if tensors >= LEAST_TENSORS:
        _start()
    return None


def wait() -> bool:
    """Wait until the scanner is built, half a minute on a slow machine; whether it can be used.

    Benchmarks call this; a training does not need to.
    """
    if _file_name() is None:
        return False
    _start()
    if _builder is not None:
        _builder.join()
    return _loaded() is not None


def _start() -> None:
    global _builder
    with _lock:
        if _builder is None:
            _builder = threading.Thread(target=_build, name="tilestep-native-build", daemon=True)
            _builder.start()


def _build() -> None:
    name = _file_name()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if name is not None:
            cached_file(name, _compile)


def _compile(target: Path) -> None:
    global _process
    root = Path(torch.__file__).parent
    include = [_FOLDER, root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["-L" + str(root / "lib"), "-ltorch_python", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        *(compiler() or ("c++",)),
        *_FLAGS,
        abi,
        *(f"-I{path}" for path in include),
        "-x",
        "c++",
        "-",
        "-x",
        "none",
    ]
    command += ["-o", str(target), *libraries]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    _process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    atexit.register(_process.kill)
    _process.communicate(_source())
    atexit.unregister(_process.kill)
    if _process.returncode:
        raise subprocess.SubprocessError("the scanner did not compile")


@functools.lru_cache(maxsize=1)
def _loaded() -> ModuleType | None:
    name = _file_name()
    path = None if name is None else find_cached(name)
    if path is None:
        return None
    try:
        spec = importlib.util.spec_from_file_location("tilestep_scan", path)
        if spec is None or spec.loader is None:
            return None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found
    except ImportError:
        return None
