"""Builds and loads the C++ extension: in a background thread, into the cache; until then Python code runs instead."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import re
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..backends.cpp.compile import compile_source, compiler, compiler_version, stop_all
from ..errors import BuildError
from ..kernels.cache import cached, content_key, find_cached, open_cached

LEAST_TENSORS = 16
"""The least number of tensors for a build: with fewer the Python code takes no noticeable time."""

_FLAGS = ["-std=c++20", "-O2", "-fopenmp", "-shared", "-fPIC", "-w"]
_lock = threading.Lock()
_builder: threading.Thread | None = None
_is_absent = False
_first_request: float | None = None

_SECONDS = 600.0
"""The time limit of the compiler, in seconds; only `wait` waits for it."""

_START_SECONDS = 2.0
"""Seconds from the first step to the start of a build: a short process would exit before the build ends."""

_END_SECONDS = 2.0
"""Seconds that a process waits for the thread at exit."""

_FOLDER = Path(__file__).parent

bump: Callable[[list[torch.Tensor]], object] = torch.autograd.graph.increment_version
"""Bumps the version of each tensor, as in-place writes do. The loaded C++ replaces it: call it as `build.bump`."""


@functools.lru_cache(maxsize=1)
def layout_flags() -> list[str]:
    """Compiler flags with the layout of a tensor's Python object as torch's headers declare it; empty if unknown."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/autograd"
    try:
        variable, graph_task = (folder / name for name in ("python_variable.h", "graph_task.h"))
        declared, pass_declared = variable.read_text(), graph_task.read_text()
    except OSError:
        return []
    held = re.search(
        r"struct THPVariable \{\s*PyObject_HEAD;?\s*(?://.*\s*)*(at::Tensor|c10::MaybeOwned<at::Tensor>) cdata;",
        declared,
    )
    wraps = re.search(r"TORCH_PYTHON_API PyObject\* THPVariable_Wrap\(const at::TensorBase& var\);", declared)
    if held is None or wraps is None or "TORCH_API int get_current_graph_task_id();" not in pass_declared:
        return []
    return ["-DTILESTEP_HELD=" + held[1].replace("at::Tensor", "at::TensorBase")]


@functools.lru_cache(maxsize=1)
def _file_name() -> str | None:
    if os.environ.get("TILESTEP_NATIVE") == "0" or compiler() is None or os.name != "posix":
        return None
    interpreter = sysconfig.get_config_var("EXT_SUFFIX") or ""
    version = f"{torch.__version__} {torch.version.git_version}"
    try:
        sources = "".join((_FOLDER / name).read_text() for name in ("tensors.h", "arrivals.h", "scan.cpp"))
        key = content_key(sources, " ".join([*_FLAGS, *layout_flags()]), compiler_version(), version, interpreter)
    except BuildError:
        return None
    return f"scan-{key}.so"


def module(tensors: int) -> Any:
    """The C++ module if it is built; otherwise None, and a thread builds it when that pays off."""
    global _is_absent, _first_request
    if _loaded.cache_info().currsize:
        return _loaded()
    if _builder is not None:
        return None if _builder.is_alive() else _loaded()
    if _is_absent:  # checked once: a step must not read directories
        if (
            tensors >= LEAST_TENSORS
            and _first_request is not None
            and time.monotonic() - _first_request > _START_SECONDS
        ):
            _start()
        return None
    name = _file_name()
    if name is not None and find_cached(name) is not None:
        return _loaded()
    _is_absent = True
    _first_request = None if name is None else time.monotonic()
    return None


def wait() -> bool:
    """Wait until the C++ module is built; returns whether it can be used.

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


@atexit.register
def _end() -> None:
    """End the build and join its thread: the interpreter would stop a daemon thread at any point."""
    deadline = time.monotonic() + _END_SECONDS  # a thread may wait for another process that builds the module
    while _builder is not None and _builder.is_alive() and time.monotonic() < deadline:
        stop_all()
        _builder.join(0.05)


def _build() -> None:
    name = _file_name()
    with contextlib.suppress(OSError, BuildError):
        if name is not None:
            cached(name, _compile, seconds=_SECONDS, warns=False).close()


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    include = [_FOLDER, root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["-x", "none", "-L" + str(root / "lib"), "-ltorch_python", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        *(compiler() or ("c++",)),
        *_FLAGS,
        *layout_flags(),
        abi,
        *(f"-I{path}" for path in include),
        "-x",
        "c++",
        "-",
    ]
    compile_source(
        command, (_FOLDER / "scan.cpp").read_text(), target, [*libraries, f"-Wl,-rpath,{root / 'lib'}"], _SECONDS
    )


@functools.lru_cache(maxsize=1)
def _loaded() -> ModuleType | None:
    name = _file_name()
    file = None if name is None else open_cached(name)
    if file is None:
        return None
    with file:
        try:
            spec = importlib.util.spec_from_file_location(
                "tilestep_scan", loader=importlib.machinery.ExtensionFileLoader("tilestep_scan", file.loadable())
            )
            if spec is None or spec.loader is None:
                return None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError:
            return None
        module.__file__ = str(file.path)
        global bump
        bump = module.bump
        return module


def _after_fork() -> None:
    global _builder, _lock, _is_absent
    _builder, _lock, _is_absent = None, threading.Lock(), False


os.register_at_fork(after_in_child=_after_fork)
