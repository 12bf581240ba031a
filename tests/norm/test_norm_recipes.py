"""What is kept between calls is used only where it fits."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from norm_referee import drawn, referee

from tilestep import devices
from tilestep.backends.cpp import compile
from tilestep.errors import BuildError, GradientError
from tilestep.norm import (
    NormTable,
    clip_grad_norm_,
    cpu_backend,
    norm_table,
    plan_cache,
    total_norm,
)


@pytest.fixture(autouse=True)
def no_recipes() -> None:
    plan_cache._recipes.clear()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each table made during the test has."""
    counts: list[int] = []
    original = plan_cache.norm_table

    def counting(device: torch.device, numels: list[int], dtypes: list[torch.dtype]) -> NormTable:
        counts.append(len(numels))
        return original(device, numels, dtypes)

    monkeypatch.setattr(plan_cache, "norm_table", counting)
    return counts


def test_same_metadata_builds_once(built: list[int]) -> None:
    for seed in range(4):
        tensors = drawn([100, 20000, 3], torch.float32, seed)
        assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
        assert total_norm(tensors, 1.0).item() == pytest.approx(referee(tensors, 1.0), rel=3e-6)
    assert built == [3]


@pytest.mark.parametrize("root", [True, False])
def test_copies_of_strided_tensors_live_until_they_are_read(root: bool) -> None:
    tensors = [tensor.view(100, 200)[:, ::2] for tensor in drawn([20000] * 3, torch.float64)]
    recipe = plan_cache.find_recipe(tensors)
    assert recipe is not None
    norm = recipe.norm(tensors, 2.0, root=root).item()
    assert norm == pytest.approx(referee(tensors, 2.0) ** (1 if root else 2), rel=1e-12)


def test_same_address_with_another_shape_or_dtype(built: list[int]) -> None:
    memory = torch.ones(300)
    for views in ([memory[:100]], [memory[:200]], [memory[:100].view(torch.bfloat16)]):
        assert total_norm(views).item() == pytest.approx(referee(views, 2.0), rel=1e-5)
    assert built == [1, 1, 1]


def test_same_shapes_at_the_ends_but_not_between(built: list[int]) -> None:
    for middle in (5, 6, 5):
        tensors = drawn([4, middle, 4], torch.float32)
        assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
    assert built == [3, 3]


def test_one_tensor_of_many_moved() -> None:
    tensors = drawn([50] * 20, torch.float32)
    total_norm(tensors)
    tensors[13] = torch.full((50,), 100.0)
    assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)


def test_strided_tensors_are_read_anew() -> None:
    memory = torch.ones(10, 10)
    views = [memory[:, :5], torch.ones(3)]
    assert total_norm(views, 1.0) == 53
    memory.fill_(2)
    assert total_norm(views, 1.0) == 103


def test_tensors_are_not_kept_alive() -> None:
    tensor = torch.ones(100)
    reference = weakref.ref(tensor)
    total_norm([tensor, torch.ones(5)])
    clip_grad_norm_([torch.nn.Parameter(torch.ones(5))], 1.0)
    del tensor
    gc.collect()
    assert reference() is None


def test_few_are_kept(built: list[int]) -> None:
    for size in range(1, 3 * plan_cache.KEPT):
        total_norm([torch.ones(size)])
    assert len(plan_cache._recipes) == plan_cache.KEPT
    total_norm([torch.ones(3 * plan_cache.KEPT - 1)])
    assert len(built) == 3 * plan_cache.KEPT - 1


def test_a_tensor_listed_twice_counts_twice_and_keeps_nothing() -> None:
    tensor = torch.tensor([3.0])
    for _ in range(3):
        assert total_norm([tensor, tensor], 1.0) == 6
    assert len(plan_cache._recipes) <= 1


def test_a_refused_list_leaves_nothing_behind() -> None:
    with pytest.raises(GradientError):
        total_norm([torch.ones(3), torch.ones(3).to_sparse()])
    assert not plan_cache._recipes


def test_two_threads_share_a_recipe() -> None:
    lists = [[torch.full((30000,), float(value)), torch.zeros(8)] for value in (1, 2)]
    wrong: list[float] = []

    def work(tensors: list[torch.Tensor], expected: float) -> None:
        for _ in range(200):
            norm = total_norm(tensors, float("inf")).item()
            if norm != expected:
                wrong.append(norm)

    threads = [threading.Thread(target=work, args=(tensors, value)) for tensors, value in zip(lists, (1.0, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_table_with_absent_tensors() -> None:
    tensors = drawn([100, 20000, 7], torch.float32)
    table = norm_table(
        torch.device("cpu"), [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
    )
    addresses = torch.tensor([tensors[0].data_ptr(), 0, tensors[2].data_ptr()])
    present = [tensors[0], tensors[2]]
    out = torch.empty(1, dtype=torch.float64)
    for norm_type in (2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0):
        table.launch(addresses, out, norm_type, root=True)
        assert out.item() == pytest.approx(referee(present, norm_type), rel=1e-5)
    table.launch(addresses, out, 3.0)
    assert out.item() == pytest.approx(referee(present, 3.0) ** 3, rel=1e-5)
    before = tensors[1].clone()
    table.scale(addresses, torch.tensor([8.0]), 2.0)
    assert torch.equal(tensors[1], before)
    table.launch(torch.zeros(3, dtype=torch.int64), out, float("-inf"))
    assert out.item() == float("inf")


def test_table_of_nothing() -> None:
    table = norm_table(torch.device("cpu"), [], [])
    out = torch.full((1,), 7.0, dtype=torch.float64)
    table.launch(torch.empty(0, dtype=torch.int64), out)
    assert out.item() == 0


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operations take over, with one warning."""

    def refuse(*_: object) -> None:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(cpu_backend, "load_library", refuse)
    cpu_backend._loaded.cache_clear()
    tensors = [*drawn([100, 20000, 0], torch.float32), *drawn([9], torch.bfloat16)]
    try:
        with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler") as record:
            for norm_type in (2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0):
                expected = referee(tensors, norm_type)
                assert total_norm(tensors, norm_type).item() == pytest.approx(expected, rel=1e-5)
            total_norm([torch.ones(4)])
        assert len(record) == 1
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        clip_grad_norm_(parameter, 1.0)
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    finally:
        monkeypatch.undo()
        cpu_backend._loaded.cache_clear()
        assert compile.load_library is cpu_backend.load_library


def test_without_a_compiler_for_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for the 2-norm may be there from the cache, without those for all orders."""
    load = cpu_backend.load_library

    def refuse(title: str, source: str, flags: Sequence[str]) -> ctypes.CDLL:
        if "-DSQUARES_ALONE" not in flags:
            raise BuildError("no C++ compiler found")
        return load(title, source, flags)

    monkeypatch.setattr(cpu_backend, "load_library", refuse)
    monkeypatch.setattr(compile, "_warned", set())
    cpu_backend._loaded.cache_clear()
    tensors = [*drawn([100, 20000, 0], torch.float32), *drawn([9], torch.bfloat16)]
    try:
        assert total_norm(tensors).item() == pytest.approx(referee(tensors, 2.0), rel=1e-6)
        with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler") as record:
            for norm_type in (1.0, float("inf"), 2.0, float("-inf"), 0.0, 3.0):
                expected = referee(tensors, norm_type)
                assert total_norm(tensors, norm_type).item() == pytest.approx(expected, rel=1e-5)
        assert len(record) == 1
    finally:
        monkeypatch.undo()
        cpu_backend._loaded.cache_clear()


def test_what_graphs_copy_from_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs a GPU: a copy stands for it."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(devices, "_sources", {})
    values = torch.tensor([7, 8], dtype=torch.int64)
    first = devices.source_of_graphs(values)
    again = devices.source_of_graphs(values.clone())
    assert first is again and first is not values and torch.equal(first, values)
    values[1] = 9
    assert devices.source_of_graphs(values).tolist() == [7, 9] and first.tolist() == [7, 8]
    assert devices.source_of_graphs(first.view(torch.float64)).dtype is torch.float64
    assert devices.source_of_graphs(first.view(2, 1)).shape == (2, 1)
    assert len(devices._sources) == 4


class _OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_capture_neither_takes_nor_leaves_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn([40, 50], torch.float32)
    seen = [tensor.as_subclass(_OnGpu) for tensor in tensors]
    monkeypatch.setattr(plan_cache, "_plain", lambda tensors: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    outside = plan_cache.find_recipe(seen)
    assert plan_cache.find_recipe(seen) is outside
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inside = [plan_cache.find_recipe(seen) for _ in range(2)]
    assert inside[0] is not outside and inside[1] is not outside and inside[0] is not inside[1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert plan_cache.find_recipe(seen) is outside
