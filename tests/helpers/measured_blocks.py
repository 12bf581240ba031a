"""Statistics and changed weights of states in blocks, beside float64 sums over what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilestep

OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "float8_e4m3": (torch.bfloat16, {"state_dtype": "float8_e4m3", "rounding": "stochastic"}),
    "int4": (torch.bfloat16, {"state_dtype": "int4", "master_weights": "int8"}),
    "one of two": (torch.float16, {"state_dtype": {"exp_avg": "int4", "exp_avg_sq": "bfloat16"}}),
}
SHAPES = ((3, 200), (8, 16, 3, 3), (333,), (2048,))
"""Of rows that end inside of a block, channels-last, of one short row and of whole blocks."""


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    values = [torch.randn(shape).to(device, dtype) for shape in SHAPES]
    values[1] = values[1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(value) for value in values]


def compare(which: str, rule: str, device: str = "cpu") -> None:
    """Steps with statistics and without are the same to the bit; the numbers are float64's, of a skipped step too."""
    dtype, options = OPTIONS[which]
    params, plain = parameters(dtype, device), parameters(dtype, device)
    # A function's choice is for small tensors too.
    choice = options["state_dtype"]
    options = {**options, "state_dtype": lambda _: choice, "lr": 0.03, "skip_nonfinite": True}
    optimizer: Any = tilestep.Optimizer(params, rule, **options, stats=tilestep.Stats(every=2), track_changes=True)
    twin: Any = tilestep.Optimizer(plain, rule, **options)
    for step in range(1, 7):
        before = [param.detach().clone() for param in params]
        for param, other in zip(params, plain):
            param.grad = torch.randn_like(param, memory_format=torch.contiguous_format)
            param.grad.view(-1)[::3] = 0
            if step == 6 and param.dim() == 1:
                param.grad[5] = torch.inf
            other.grad = param.grad.clone()
        optimizer.step()
        twin.step()
        assert all(map(torch.equal, params, plain)), step
        lists = {name: indices.long() for name, indices, _ in optimizer.changes()}
        for place, (param, old) in enumerate(zip(params, before)):
            wanted = (param.detach() != old).reshape(-1).nonzero().view(-1)
            assert torch.equal(lists.get(f"0.{place}", wanted[:0]), wanted), (step, place)
        if step % 2 == 0:
            measured = optimizer.stats.read()
            values = tilestep.full_precision(optimizer.state_dict())["state"]
            for place, (param, old) in enumerate(zip(params, before)):
                bound = 4e-3 if "master_weights" in options else 1e-5
                compare_row(measured[f"0.{place}"], param, old, values[place], bound)
    assert optimizer.skipped_steps == 1
    for param, other in zip(params, plain):
        theirs = twin.state[other]
        for name, value in optimizer.state[param].items():
            same = value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value
            assert torch.equal(same, theirs[name].view(same.dtype)), name


def compare_row(row: dict[str, float], param: Any, before: torch.Tensor, state: dict[str, Any], rounded: float) -> None:
    """Beside sums over a parameter, its gradient and its states' values; `rounded` is how far it is off its master."""
    tensors = {"grad": param.grad, "param": param.detach()}
    tensors |= {name: state[name] for name in state if f"{name}_norm" in row}
    assert len(tensors) >= 3
    for name, tensor in tensors.items():
        exact, bound = tensor.double(), rounded if name == "param" else 1e-5
        assert row[f"{name}_norm"] == pytest.approx(exact.norm().item(), rel=bound, nan_ok=True), name
        assert row[f"{name}_max"] == pytest.approx(exact.abs().max().item(), rel=bound, nan_ok=True), name
    assert row["zero_fraction"] == pytest.approx((param.grad == 0).double().mean().item())
    update = param.detach().double() - before.double()
    if param.dtype is torch.float32:
        assert row["update_norm"] == pytest.approx(update.norm().item(), rel=1e-4)
        assert row["update_max"] == pytest.approx(update.abs().max().item(), rel=1e-3)
