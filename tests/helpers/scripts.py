"""Python scripts and functions that tests run in processes of their own.

They are forked from a server that has imported torch and done nothing since: a new interpreter that imports it takes
two to three seconds of a core. All processes of a test run share it, and it ends when the run does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["all_equal_in_the_interpreter", "is_forked", "run_function", "run_python", "run_script"]

PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",  # the first optimizer of a process would
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "tilestep.memory.offload",
    "tilestep.execution.overlap",
    "tilestep.execution.zero",
]
"""What the server imports."""

TRACED: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in ("AdamW", "LAMB", "Adafactor", "Prodigy", "Muon", "SOAP")],
    *[("SGD", {"lr": 1.0, "momentum": momentum}) for momentum in (0.0, 0.9)],
]
"""Optimizers whose rules the server traces."""

_forked = False


def is_forked() -> bool:
    """Whether this process was forked from the server, and can be forked itself: it has run what the test asked for."""
    return _forked


def run_python(
    *words: str,
    cwd: str | Path | None = None,
    timeout: float = 580,
    imports: Sequence[str] = (),
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:
    """What `python *words` does with this process's module path and some environment variables more.

    Args:
        words: `-c CODE`, `-m MODULE` or a path, and arguments.
        cwd: where it runs; here if it is None.
        timeout: seconds after which it is killed.
        imports: modules that the server imports first, for this process and all that come after it.
        variables: of the environment; None takes one away.
    """
    path = os.pathsep.join(filter(None, sys.path))
    given = {**os.environ, "PYTHONPATH": path, **variables}
    environment = {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("out", "err")]
        request = {"words": words, "cwd": str(cwd or os.getcwd()), "environment": environment, "outputs": outputs}
        request["imports"] = imports
        code = _asked(_server(environment.get("TRITON_INTERPRET", "0") == "1"), request, timeout)
        said = [Path(path).read_text(encoding="utf-8", errors="replace") for path in outputs]
    return subprocess.CompletedProcess([*words], code, *said)


def run_script(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `python script *arguments` does."""
    return run_python(str(script), *arguments, **variables)


def run_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, where it and its arguments are imported by name."""
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function, arguments)))
        done = run_python("-c", "import sys, scripts; scripts._call(sys.argv[1])", str(call))
        print(done.stdout, done.stderr, sep="", end="")
        assert done.returncode == 0, done.stderr[-3000:]
        return pickle.loads(call.read_bytes())


def _call(path: str) -> None:
    torch.set_num_threads(1)  # threads of what is imported would not be there in forks
    function, arguments = pickle.loads(Path(path).read_bytes())
    result = function(*arguments)
    Path(path).write_bytes(pickle.dumps(result))


def all_equal_in_the_interpreter(script: Path) -> None:
    """Run a script that compares Triton's interpreter with something, and prints "all equal" last.

    It is a process of its own, since Triton reads the variable when it is imported.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_script(script, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.strip().endswith("all equal"), result.stdout[-3000:]


def _asked(server: str, request: Mapping[str, object], timeout: float) -> int:
    """The exit code of one script, which the server kills when the request is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.settimeout(timeout)
        try:
            return int(connection.recv(64))
        except TimeoutError:
            connection.settimeout(None)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(64)
            raise subprocess.TimeoutExpired(str(request["words"]), timeout) from None


@functools.cache
def _server(interpreted: bool) -> str:
    """The address of the test run's server; the first process that needs it starts it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if run else os.getpid()
    folder = Path(tempfile.gettempdir(), f"tilestep-{(run or uuid.uuid4().hex)[:16]}-{int(interpreted)}")
    folder.mkdir(0o700, exist_ok=True)
    address = folder / "socket"
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            code = f"import scripts; scripts._serve({str(address)!r}, {owner})"
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
            environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": str(int(interpreted))}
            words = [sys.executable, "-c", code]
            server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True)
            assert server.stdout is not None and server.stdout.readline(), "the server of scripts has ended"
            _started.append(server)
    return str(address)


_started: list[subprocess.Popen[bytes]] = []


def _serve(address: str, owner: int) -> None:
    """Fork for each request, until the process ends that the test run belongs to."""
    _import(PRELOADED)
    _trace_common_rules()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _hasten_the_interpreter()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    ended = os.pidfd_open(owner)
    scripts: dict[int, tuple[int, socket.socket]] = {}
    while True:
        requests = {connection.fileno(): pid for pid, connection in scripts.values()}
        for ready in select.select([listener.fileno(), ended, *scripts, *requests], [], [])[0]:
            if ready == ended:
                shutil.rmtree(Path(address).parent)
                return
            if ready in requests:  # closed, or its script ends now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(requests[ready], signal.SIGKILL)
            elif ready in scripts:
                pid, connection = scripts.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    connection.sendall(str(code).encode())
                connection.close()
                os.close(ready)
                break  # what was selected may be closed
            else:
                connection = listener.accept()[0]
                request = json.loads(connection.makefile().readline())
                _import(request["imports"])
                pid = os.fork()
                if pid == 0:
                    for held in (listener, connection, *(other for _, other in scripts.values())):
                        held.close()
                    os._exit(_exit_code(request))
                scripts[os.pidfd_open(pid)] = pid, connection


def _import(names: Sequence[str]) -> None:
    if not all(name in sys.modules for name in names):
        gc.disable()  # collections are a fifth of the time of imports
        for name in names:
            importlib.import_module(name)
        gc.enable()
        gc.freeze()  # forks do not look through it, which would copy its pages


def _trace_common_rules() -> None:
    """Forks have the graphs of the rules that most of them use, and what the first trace of a process prepares."""
    import tilestep
    from tilestep.optimizer.build import spec_of

    for name, options in TRACED:
        optimizer = getattr(tilestep, name)([torch.nn.Parameter(torch.empty(0, device="meta"))], **options)
        (group,) = optimizer.param_groups
        for shape in ((2, 2), (2,)):
            with contextlib.suppress(tilestep.MatrixError):  # those of matrices have no graph of a vector
                spec_of(optimizer.rule_of(group), group, torch.empty(shape))


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
    semantic = getattr(importlib.import_module("triton.language.semantic"), "TritonSemantic", None)
    if all(hasattr(semantic, name) for name in ("broadcast_impl_value", "cast", "binary_op_sanitize_overflow_impl")):
        _remember_conversions(semantic)
        _skip_overflows(semantic)


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


def _remember_conversions(semantic: Any) -> None:
    """Types that operands keep: each operation compares shapes, and asks a dozen times of what kinds they are."""
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast
    alike: set[tuple[str, str]] = set()
    kept: set[tuple[str, str, str | None]] = set()

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        types = lhs.type.name, rhs.type.name
        if types in alike:
            return lhs, rhs
        left, right = broadcast(self, lhs, rhs)
        if left is lhs and right is rhs:
            alike.add(types)
        return left, right

    def cast_impl(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        types = input.type.name, dst_ty.name, fp_downcast_rounding
        if types in kept:
            return input
        result = cast(self, input, dst_ty, fp_downcast_rounding)
        if result is input:
            kept.add(types)
        return result

    semantic.broadcast_impl_value, semantic.cast = broadcast_impl_value, cast_impl


def _skip_overflows(semantic: Any) -> None:
    """Triton computes sums and products of integers in 64 bits too, for an assertion that only `debug` makes."""
    sanitize = semantic.binary_op_sanitize_overflow_impl

    def binary_op_sanitize_overflow_impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl


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
    global _forked
    _forked = True
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
