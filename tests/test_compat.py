"""Private torch APIs: which of them this torch still has as we know them, and that tilestep works without each."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilestep
from tilestep import compat
from tilestep.compat import addresses_equal, decomposition, fake_tensors, tensor_guards
from tilestep.graph import Graph, Value, trace
from tilestep.kernels.launch import keep_triton_key
from tilestep.native.table import CHANGED, MOVED, SAME, Table
from tilestep.rules import registry

SOURCES = Path(tilestep.__file__).parent
OWN = sorted(name for name, rule in registry.items() if rule.__module__.startswith("tilestep."))


def found(module: str, name: str) -> Any:
    """The private API, or a failure that says which torch lost it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} has no {module}.{name}: {error}; tilestep falls back (compat)")


def works(name: str, use: Callable[[], Any]) -> Any:
    try:
        return use()
    except Exception as error:
        pytest.fail(f"torch {torch.__version__} changed {name}: {type(error).__name__}: {error} (compat)")


def test_torch_has_fake_tensors() -> None:
    mode = found("torch._subclasses.fake_tensor", "FakeTensorMode")

    def use() -> torch.Tensor:
        with mode(allow_non_fake_inputs=True):
            return torch.empty(2, 3) + torch.empty((), dtype=torch.float64)

    assert works("FakeTensorMode", use).shape == (2, 3)


def test_torch_has_decompositions() -> None:
    table = found("torch._decomp", "decomposition_table")
    softplus = torch.ops.aten.softplus.default
    assert works("decomposition_table", lambda: table.get(softplus)) is decomposition(softplus) is not None


def test_torch_has_tensor_guards() -> None:
    guards = found("torch._C._dynamo.guards", "TensorGuards")
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    made = works("TensorGuards", lambda: guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None))
    assert works("TensorGuards.check", lambda: made.check(*tensors)) is True
    assert tensor_guards(tensors).__qualname__.startswith("TensorGuards") or "check" in repr(tensor_guards(tensors))


def test_torch_keeps_the_hooks_of_all_optimizers() -> None:
    kept = [found("torch.optim.optimizer", f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    assert kept[0] is compat._EVERY_PRE_HOOK and kept[1] is compat._EVERY_POST_HOOK


def test_steps_are_marked_for_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = tilestep.SGD([torch.zeros(2, requires_grad=True)])
    seen: list[str] = []
    assert not compat.step_is_watched(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert compat.step_is_watched(optimizer)
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    assert compat.step_is_watched(optimizer)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == ["hook"] and not compat.step_is_watched(optimizer)
    monkeypatch.delattr(optimizer, "_optimizer_step_pre_hooks")
    assert compat.step_is_watched(optimizer)


def test_torch_compares_addresses() -> None:
    if not torch.version.cuda:
        pytest.skip("only builds of torch for CUDA have it")
    compare = found("torch._C", "_tensors_data_ptrs_at_indices_equal")
    tensors = [torch.zeros(3), torch.zeros(2)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert works("_tensors_data_ptrs_at_indices_equal", lambda: compare(tensors, pointers, [0, 1])) is True


def test_torch_has_dispatch_modes() -> None:
    assert found("torch.utils._python_dispatch", "TorchDispatchMode") is compat.TensorDispatch


def test_private_torch_is_used_in_compat_alone() -> None:
    """Names beginning with an underscore, of torch's modules; benchmarks of torch's own code may use any."""
    allowed = {
        "_pytree",
        "_foreach_mul_",
        "_foreach_norm",
        "_foreach_zero_",
    }  # in use all over PyTorch's own downstream projects
    offenders = []
    for path in SOURCES.rglob("*.py"):
        if path.parent.name in ("compat", "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            private = ""
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private = next((part for part in parts if part.startswith("_")), "")
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root: ast.AST = node
                while isinstance(root, ast.Attribute):
                    root = root.value
                private = node.attr if isinstance(root, ast.Name) and root.id == "torch" else ""
            if private and private not in allowed:
                offenders.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {private}")
    assert offenders == []


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let a module be missing."""
    monkeypatch.setitem(sys.modules, module, None)


Check = Callable[..., bool]


def guards_of(monkeypatch: pytest.MonkeyPatch, tensors: list[torch.Tensor], private: bool) -> Check:
    if not private:
        without(monkeypatch, "torch._C._dynamo.guards")
    return tensor_guards(tensors)


@pytest.mark.parametrize("private", [True, False], ids=["private", "fallback"])
def test_guards_see_every_change_of_metadata(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check = guards_of(monkeypatch, [torch.zeros(3), torch.zeros(2, 4)], private)
    same = torch.ones(3), torch.ones(2, 4)
    assert check(*same)
    for other in (
        torch.ones(4),
        torch.ones(3, 1),
        torch.ones(3, dtype=torch.float64),
        torch.ones(6)[::2],
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
    ):
        assert not check(other, same[1]), other
    assert not check(same[0], torch.ones(4, 2).t())
    assert not check(None, same[1])


@pytest.mark.parametrize("private", [True, False], ids=["private", "fallback"])
def test_a_table_sees_moves_and_counts(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        without(monkeypatch, "torch._C._dynamo.guards")
        monkeypatch.setattr(compat, "_pointers_equal", None)
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    table, empty = Table(), Table()
    table.remember(tensors)
    moved = [tensors[0], torch.zeros(2, 2)]
    assert table.refresh(tensors) == SAME and table.refresh(moved) == MOVED
    assert table.refresh(moved[:1]) == CHANGED and table.refresh([]) == CHANGED
    assert table.refresh(moved) == SAME and table.refresh(tensors) == MOVED
    empty.remember([])
    assert empty.refresh([]) == SAME


def test_addresses_are_compared_without_the_private_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(3), torch.zeros(2)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    for call in (compat._pointers_equal, None):
        monkeypatch.setattr(compat, "_pointers_equal", call)
        assert addresses_equal(tensors, pointers, [0, 1])
        assert not addresses_equal(tensors, pointers[::-1], [0, 1])


def shape_of(graph: Graph) -> list[tuple[Any, ...]]:
    """A graph as plain data."""
    position: dict[int, int] = {}
    rows = []

    def described(value: Value) -> tuple[Any, ...]:
        return value.operation, tuple(position[id(arg)] for arg in value.args), repr(value.attribute), value.name

    for value in graph.values():
        rows.append(described(value))
        position[id(value)] = len(position)
    return [*rows, *((name, position[id(value)]) for name, value in graph.outputs.items())]


@pytest.mark.parametrize("name", OWN)
def test_rules_are_traced_alike_without_fake_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry[name]
    with_them = shape_of(trace(rule, rule.hyperparameters, 2))
    without(monkeypatch, "torch._subclasses.fake_tensor")
    assert isinstance(fake_tensors(), contextlib.nullcontext)
    assert shape_of(trace(rule, rule.hyperparameters, 2)) == with_them


def test_without_decompositions_other_operations_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @tilestep.rule
    def smooth(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * torch.nn.functional.softplus(grad)

    assert trace(smooth, smooth.hyperparameters).outputs
    with monkeypatch.context() as patch:
        without(patch, "torch._decomp")
        assert decomposition(torch.ops.aten.softplus.default) is None
    monkeypatch.setattr("tilestep.graph.tracer.decomposition", lambda overload: None)
    with pytest.raises(tilestep.RuleError, match="softplus"):
        trace(smooth, smooth.hyperparameters)
    rule = registry["AdamW"]
    assert trace(rule, rule.hyperparameters).outputs


def test_torch_keeps_compilers_away_without_importing_them() -> None:
    wrap = found("torch", "_disable_dynamo")
    assert works("_disable_dynamo", lambda: wrap(lambda value: value)(3)) == 3
    script = "import sys, tilestep; print('torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "False"


def test_calls_are_opaque_without_the_private_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_disable_dynamo")
        add = compat.opaque(lambda one, other: one + other)
    assert torch.compile(lambda x: add(x, x) * 2, backend="eager")(torch.ones(2)).tolist() == [4.0, 4.0]


def test_torch_has_foreach_zero() -> None:
    zero = found("torch", "_foreach_zero_")
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    works("_foreach_zero_", lambda: zero(tensors))
    assert not any(tensor.any() for tensor in tensors)


def test_zeros_are_written_without_foreach_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_zero_")
    tensors = [torch.ones(3), torch.ones(0), torch.ones(2, 2)]
    compat.zero_all(tensors)
    assert not any(tensor.any() for tensor in tensors)


def is_recorded() -> bool:
    """Whether what is done now carries a name in traces."""
    return isinstance(compat.marked("work"), torch.profiler.record_function)


def test_torch_says_whether_a_profiler_runs() -> None:
    found("torch._C._autograd", "_profiler_enabled")
    assert not is_recorded()
    with torch.profiler.profile():
        assert works("_profiler_enabled", is_recorded) is True


def test_work_is_always_marked_without_knowing_of_profilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_profiler_enabled", None)
    assert is_recorded()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    tilestep.SGD([weight], lr=1.0).step()  # type: ignore[attr-defined]
    assert weight.tolist() == [0.0, 0.0, 0.0]


def test_triton_s_interpreter_splats_comparisons_as_truth_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of scalars in a mask, from Triton 3.9 on; before, numbers were taken for truth values."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    core = importlib.import_module("triton.language").core
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_splat", builder.create_splat)
    compat.splat_truths()
    for scalar, dtype in (([True], "bool"), ([7], "int64")):
        handle = interpreter.TensorHandle(np.array(scalar), core.int64)
        block = builder().create_splat(core.block_type(core.int64, [4]), handle).data
        assert block.dtype == dtype and block.tolist() == scalar * 4


def test_triton_has_a_hash_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    cache = importlib.import_module("triton.runtime.cache")
    compute = getattr(cache, "triton_key", None)
    assert compute is not None, f"triton {triton.__version__} keeps its hash elsewhere (compat)"
    monkeypatch.setattr(cache, "triton_key", functools.lru_cache(compute.__wrapped__))
    found = compat.triton_hash()
    assert found is not None and found[1] == Path(triton.__file__).parent
    asked: list[threading.Thread] = []

    class Driver:
        @property
        def active(self) -> None:
            asked.append(threading.current_thread())
            raise RuntimeError("no driver here")

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    keep_triton_key()
    found[0]()
    assert asked and threading.current_thread() not in asked, "the driver is built beside the hash"
    assert cache.triton_key() == found[0]()
    assert compat.triton_hash() is None, "it is known already"


def test_triton_compiles_without_our_hash_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    cache = importlib.import_module("triton.runtime.cache")
    monkeypatch.delattr(cache, "triton_key")
    assert compat.triton_hash() is None
    keep_triton_key()
    assert not hasattr(cache, "triton_key")


FIRST = """
import gc, weakref
gc.disable()
import torch, tilestep

def train():
    model = torch.nn.Linear(2, 2)
    optimizer = tilestep.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return weakref.ref(model), weakref.ref(optimizer)

print(*(living() is None for living in train()))
"""


def test_the_first_optimizer_and_its_callers_are_let_go_without_a_garbage_collection() -> None:
    """Compilers, which it has imported, hold the frames that import them."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True", "True"]
