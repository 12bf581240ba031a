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

import pytest
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
    for name in PRELOADED:
        importlib.import_module(name)
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
    """Remember which functions of its language Triton's interpreter replaces at every launch: it looks at all of them.

    A third of the time of small kernels; without the function that does so it stays as it is.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin = importlib.import_module("triton.language").core.is_builtin
    replace = getattr(interpreter, "_patch_attr", None)
    if replace is None or not hasattr(interpreter, "_patch_builtin"):
        return

    @functools.cache
    def builtins_of(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if is_builtin(member):  # within a launch they are replaced already
                replace(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


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
