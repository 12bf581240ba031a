"""CUDA graphs on a CPU: torch's operations and the launches of Triton's interpreter, recorded and replayed.

As in a capture on a GPU, nothing that is recorded is run: operations that write do not, others work on whatever their
operands hold. Reading a number on the host fails. What an operation returns is memory of the graph, written anew by
each replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep.amp
import tilestep.backends.registry
import tilestep.backends.triton.run
import tilestep.norm.table
import tilestep.optimizer.graphs
import tilestep.optimizer.optimizer
import tilestep.runtime.engine
import tilestep.runtime.norms
from tilestep.kernels.launch import Launcher
from tilestep.norm.triton_backend import TritonNorm

CPU = torch.device("cpu")
UNINITIALIZED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def replay(self) -> None:
        with torch.no_grad():
            for run in self.work:
                run()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph, on_host: set[int]) -> None:
        super().__init__()
        self.graph, self.on_host = graph, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if name == "_local_scalar_dense" and args[0].data_ptr() not in self.on_host:
            raise RuntimeError("operation not permitted when stream is capturing")
        if name == "_local_scalar_dense":
            return func(*args)
        if func._schema.is_mutable:
            self.graph.work.append(lambda: func(*args, **kwargs))
            written = [
                kwargs[argument.name] if argument.name in kwargs else args[place]
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return None if not func._schema.returns else written[0] if len(func._schema.returns) == 1 else written
        result = func(*args, **kwargs)
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        if not aliases and name not in UNINITIALIZED:
            self.graph.work.append(lambda: _write(result, func(*args, **kwargs)))
        return result


def _write(known: Any, result: Any) -> None:
    if isinstance(known, torch.Tensor):
        known.copy_(result)
    elif isinstance(known, (tuple, list)):
        for left, right in zip(known, result):
            _write(left, right)


class Simulation:
    """Patches everything that tells a GPU from a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph: Graph | None = None
        self.on_host: set[int] = set()
        """Addresses of tensors that count as being on the CPU."""
        launch = Launcher.__call__
        for module in (
            tilestep.runtime.engine,
            tilestep.runtime.norms,
            tilestep.backends.triton.run,
            tilestep.optimizer.graphs,
            tilestep.optimizer.optimizer,
            tilestep.amp,
        ):
            monkeypatch.setattr(module, "is_capturing", lambda: self.graph is not None)

        def call(launcher: Launcher, *arguments: Any) -> None:
            if self.graph is None:
                launch(launcher, *arguments)
            else:
                self.graph.work.append(lambda: launch(launcher, *arguments))

        monkeypatch.setattr(Launcher, "__call__", call)
        for module in (tilestep.backends.registry, tilestep.optimizer.graphs):
            monkeypatch.setattr(module, "passes_class", lambda device: tilestep.backends.triton.run.TritonPasses)
        monkeypatch.setattr(tilestep.norm.table, "cpu_norm", lambda numels, dtypes: TritonNorm(CPU, numels, dtypes))
        kernels = tilestep.backends.triton.run
        monkeypatch.setattr(tilestep.optimizer.control, "control_kernels", lambda control: kernels)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    @contextlib.contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """Stands in for torch.cuda.graph."""
        assert self.graph is None
        self.graph = graph
        try:
            with _Recorder(graph, self.on_host):
                yield
        finally:
            self.graph = None
