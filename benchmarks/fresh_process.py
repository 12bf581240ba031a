"""A function called in a process that has imported everything and done nothing: forked from a server that only imports.

A new interpreter takes seconds to import torch and Triton; a fork of one that has them takes milliseconds. The server
never touches a device, so that each fork starts CUDA for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["in_fresh_process"]

IMPORTED = ("torch", "torch._dynamo", "triton", "tilestep")
END_SECONDS = 30.0  # for a process to end once it has answered
_STARTING = threading.Lock()


def in_fresh_process(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    variables: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Any:
    """Call a function in a process of its own, of which nothing is left afterwards, and return what it returns.

    Args:
        function: of a module that can be imported; the server imports that module too.
        arguments: for it; like its result they are pickled.
        variables: of the environment, beside those of this process; they are set before the function runs.
        timeout: seconds until the process is killed.

    Raises:
        RuntimeError: for an exception in the process, with its type and text, or a process that ends without an answer.
        TimeoutError: if there is no answer in time.

    >>> import math
    >>> in_fresh_process(math.gcd, [12, 18])
    6
    """
    context: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    if os.name == "posix":
        context.set_forkserver_preload([*IMPORTED, function.__module__, __name__])
    receiver, sender = context.Pipe(duplex=False)
    environment = {**os.environ, **(variables or {})}
    child = context.Process(target=_answer, args=(sender, environment, function, arguments))
    with _program_left_out():
        child.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        done, found = receiver.recv()
        child.join(END_SECONDS)
    except EOFError:
        child.join(END_SECONDS)
        raise RuntimeError(f"the process has ended without an answer, exit code {child.exitcode}") from None
    finally:
        receiver.close()
        _end(child)
    if not done:
        raise RuntimeError(found)
    return found


@contextlib.contextmanager
def _program_left_out() -> Iterator[None]:
    """A block in which processes start without importing the program that this one runs, as they do otherwise."""
    with _STARTING:
        program = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = program


def _answer(
    sender: Connection, environment: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    if os.name == "posix":
        os.setpgid(0, 0)  # so that compilers that it starts can be ended with it
    os.environ.clear()
    os.environ.update(environment)
    try:
        sender.send((True, function(*arguments)))
    except Exception as failure:
        sender.send((False, f"{type(failure).__name__}: {failure}"))


def _end(child: Any) -> None:
    """Kill a process, if it still runs, and what it has left running: a compiler would slow down the next figure."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()
    child.close()
