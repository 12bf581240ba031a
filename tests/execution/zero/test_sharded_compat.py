"""The private torch calls that sharding uses: which this torch has as we know them, and what is done without."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilestep import compat
from tilestep.execution.zero.ranks import ranks_of


def test_backward_passes_are_numbered_and_end_with_a_call() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[Any] = []

    def hook(param: torch.Tensor) -> None:
        seen.append(compat.backward_pass())
        assert compat.after_backward(lambda: seen.append("end"))

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (weight * 3).sum().backward()
    first, end, second, again = seen
    assert isinstance(first, int) and isinstance(second, int) and first != second and end == again == "end"
    assert compat.backward_pass() is None


def test_without_them_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    assert compat.backward_pass() is None
    assert compat.after_backward(lambda: None) is False


def test_passes_within_a_backward_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    seen: list[tuple[int, bool]] = []
    for number, weight in enumerate(weights):
        hook = lambda _, number=number: seen.append((number, compat.is_in_another_backward()))  # noqa: E731
        weight.register_post_accumulate_grad_hook(hook)

    def run() -> list[tuple[int, bool]]:
        seen.clear()
        data = torch.ones(2, requires_grad=True)
        hidden = checkpoint(lambda data: data * weights[1], data * weights[0], use_reentrant=True)
        hidden.sum().backward()
        return seen

    assert run() == [(1, True), (0, False)]
    monkeypatch.delattr(torch.autograd.function, "BackwardCFunction")
    assert compat.is_in_another_backward() is False


def test_copies_without_foreach_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [torch.rand(3), torch.rand(2, 2, dtype=torch.float64).t(), torch.rand(0)]
    for private in (True, False):
        if not private:
            monkeypatch.delattr(torch, "_foreach_copy_")
        targets = [torch.zeros(source.shape) for source in sources]
        compat.copy_all(targets, sources)
        assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources))
    compat.copy_all([], [])


def test_compiled_modules_are_known() -> None:
    model = nn.Linear(2, 2)
    assert compat.uncompiled(model) is model and not compat.is_compiled(model)
    assert compat.uncompiled(torch.compile(model)) is model
    model.compile()
    assert compat.is_compiled(model)


def test_parameters_are_guarded_where_torch_keeps_them() -> None:
    model = nn.Linear(2, 2)
    assert compat.guard_parameters(model, lambda entries: {**entries, "extra": nn.Parameter(torch.ones(1))})
    assert model.extra.item() == 1 and len(list(model.parameters())) == 3

    class Otherwise:
        pass

    assert not compat.guard_parameters(Otherwise(), dict)  # type: ignore[arg-type]


def test_torch_s_scalers_unscale_by_one_method() -> None:
    """With it, torch.amp.GradScaler works on sharded optimizers; without it their step refuses torch's scaler."""
    assert hasattr(torch.amp.GradScaler, "_unscale_grads_"), f"torch {torch.__version__} changed its scaler (compat)"


def test_scalers_are_routed_once_and_for_some_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaler:
        def _unscale_grads_(self, optimizer: str, scale: int) -> str:
            return f"{optimizer} {scale}"

    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    for _ in range(2):
        assert compat.route_unscaling(
            lambda optimizer: optimizer == "mine", lambda method, optimizer, scale: f"not {method(optimizer, scale)}"
        )
    assert Scaler()._unscale_grads_("mine", 1) == "not mine 1" and Scaler()._unscale_grads_("other", 2) == "other 2"
    monkeypatch.setattr(torch.amp, "GradScaler", object)
    assert not compat.route_unscaling(lambda _: True, lambda *_: None)


def test_the_number_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the private call, streams are asked for as objects."""
    if torch.version.cuda:
        assert hasattr(torch._C, "_cuda_getCurrentRawStream"), f"torch {torch.__version__} has another (compat)"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device))
    assert compat._public(3) == 103


def test_nccl_is_known_behind_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group that was made without saying a backend has both, and graphs can hold what runs on GPUs."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = ranks_of(None)
        assert not ranks.can_be_captured or torch.version.cuda
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert ranks.can_be_captured
        # One rank has nothing to average, and what lies on a CPU goes another way.
        assert not ranks.can_average(torch.zeros(1))
        like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
        assert not ranks.can_average(like)  # type: ignore[arg-type]
        for size, copies, expected in ((2, 1, True), (4, 2, True), (1, 2, True), (3, 1, False), (2, 3, False)):
            ranks.size, ranks.copies, ranks.count, ranks.replicate = size, copies, size * copies, ranks.shard
            assert ranks.can_average(like) == expected  # type: ignore[arg-type]
        ranks.size, ranks.copies, ranks.count = 2, 1, 2
        for like.dtype in (torch.int32, torch.float16):
            assert not ranks.can_average(like)  # type: ignore[arg-type]
        least = torch.finfo(torch.float16).smallest_normal
        halves = torch.full((2,), least / 1024, dtype=torch.float16)
        assert halves.sum() / 2 != (halves / 2).sum(), "what float16 would lose"
    finally:
        dist.destroy_process_group()


def test_memory_of_others_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(10, dtype=torch.float32)
    seen = compat.tensor_at(memory[3:].data_ptr(), 4, torch.float32, memory.device)
    assert seen.tolist() == [3, 4, 5, 6] and seen.data_ptr() == memory[3:].data_ptr()
    seen.fill_(0)
    del seen
    assert memory.tolist() == [0, 1, 2, 0, 0, 0, 0, 7, 8, 9]
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    with pytest.raises(RuntimeError, match="this version of torch cannot create tensors in memory"):
        compat.tensor_at(memory.data_ptr(), 4, torch.float32, memory.device)


def test_the_timeout_of_a_group() -> None:
    options = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    group = SimpleNamespace(_get_backend=lambda device: options)
    assert compat.timeout_of(group, torch.device("cpu")) == timedelta(seconds=7)
    assert compat.timeout_of(object(), torch.device("cpu")) == timedelta(minutes=10)
