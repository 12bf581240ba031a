"""Python scripts that tests run in processes of their own.

They are forked from a server that has imported torch and done nothing since: a new interpreter that imports it takes
two to three seconds of a core.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from rank_processes import PRELOADED

__all__ = ["all_equal_in_the_interpreter", "run_python", "run_script"]


def run_python(
    *words: str, cwd: str | Path | None = None, timeout: float = 580, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """What `python *words` does with this process's module path and some environment variables more.

    Args:
        words: `-c CODE`, `-m MODULE` or a path, and arguments.
        cwd: where it runs; here if it is None.
        timeout: seconds after which it is killed.
        variables: of the environment; None takes one away.
    """
    path = os.pathsep.join(filter(None, sys.path))
    given = {**os.environ, "PYTHONPATH": path, **variables}
    environment = {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("out", "err")]
        server = _server(environment.get("TRITON_INTERPRET", "0") == "1")
        request = {"words": words, "cwd": str(cwd or os.getcwd()), "environment": environment}
        code = server.run(request, outputs, timeout)
        said = [Path(path).read_text(encoding="utf-8", errors="replace") for path in outputs]
    return subprocess.CompletedProcess([*words], code, *said)


def run_script(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `python script *arguments` does."""
    return run_python(str(script), *arguments, **variables)


def all_equal_in_the_interpreter(script: Path) -> None:
    """Run a script that compares Triton's interpreter with something, and prints "all equal" last.

    It is a process of its own, since Triton reads the variable when it is imported.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_script(script, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.strip().endswith("all equal"), result.stdout[-3000:]


class _Server:
    """A process that forks one for each script."""

    def __init__(self, interpreted: bool) -> None:
        code = "import scripts; scripts._serve()"
        paths = [str(Path(__file__).parent), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": str(int(interpreted))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.end)

    def run(self, request: Mapping[str, object], outputs: Sequence[str], timeout: float) -> int:
        """The exit code of one script."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**request, "outputs": outputs}) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.process.stdout.readline()
            raise subprocess.TimeoutExpired(str(request["words"]), timeout)
        return int(self.process.stdout.readline())

    def end(self) -> None:
        """Ends when its input does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def _server(interpreted: bool) -> _Server:
    return _Server(interpreted)


def _serve() -> None:
    """Fork for each line of the input."""
    gc.disable()  # collections are a fifth of the time of these imports
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _hasten_the_interpreter()
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            answers.close()
            os._exit(_exit_code(json.loads(line)))
        print(pid, file=answers)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


def _hasten_the_interpreter() -> None:
    """Remember what Triton's interpreter works out at every launch, call and operation, always with the same result.

    More than half of the time of small kernels; what is not there under its name stays as it is.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language").core
    if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "_patch_builtin"):
        _remember_builtins(interpreter, core)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _patch_once_a_launch(interpreter, core)
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_types(interpreter, core)


def _remember_builtins(interpreter: Any, core: Any) -> None:
    """Which functions of its language it replaces at every launch: it looks at all of them."""
    is_builtin, replace = core.is_builtin, interpreter._patch_attr

    @functools.cache
    def builtins_of(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if is_builtin(member):  # within a launch they are replaced already
                replace(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _patch_once_a_launch(interpreter: Any, core: Any) -> None:
    """A kernel's own functions find its language replaced: it does so again at each call of one."""
    language, patch, launch = interpreter.tl, interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    @functools.cache
    def modules_of(function: Any) -> tuple[bool, bool]:
        modules = list(filter(inspect.ismodule, function.__globals__.values()))
        return language in modules, core in modules

    def patch_lang(function: Any) -> Any:
        modules = modules_of(function)
        if modules in patched:
            return None
        patched.add(modules)
        return patch(function)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def _remember_types(interpreter: Any, core: Any) -> None:
    """Types of blocks, and what they are in NumPy: each operation makes its own."""
    begin_type, begin_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[tuple[object, ...], dict[str, object]] = {}
    shapes: dict[str, tuple[object, object]] = {}
    numpy_types: dict[str, object] = {}

    def begin_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *(getattr(length, "value", length) for length in lengths))
        attributes = types.get(key)
        if attributes is None:
            begin_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(attributes)

    def begin_block(self: Any, handle: Any, type: Any) -> None:
        shape = shapes.get(type.name)
        if shape is None:
            begin_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shape

    def get_np_dtype(type: Any) -> object:
        dtype = numpy_types.get(type.name)
        if dtype is None:
            dtype = numpy_types[type.name] = numpy_type(type)
        return dtype

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = (
        begin_block_type,
        begin_block,
        get_np_dtype,
    )


def _exit_code(request: Mapping[str, Sequence[str]]) -> int:
    """Runs a script, and what runs when an interpreter ends; taking all modules down again would be half a second."""
    code: object = None
    try:
        _script(request)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _script(request: Mapping[str, Sequence[str]]) -> None:
    rank_processes.is_forked_script = True
    os.setsid()
    for stream, path in enumerate((os.devnull, *request["outputs"])):
        mode = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT
        file = os.open(path, mode, 0o600)
        os.dup2(file, stream)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    environment: Mapping[str, str] = request["environment"]  # type: ignore[assignment]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    os.chdir(request["cwd"])  # type: ignore[arg-type]
    first, *arguments = request["words"]
    folder = "" if first in ("-c", "-m") else str(Path(first).parent.resolve())
    sys.path[:] = dict.fromkeys([folder, *environment["PYTHONPATH"].split(os.pathsep), *sys.path])
    if first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")
