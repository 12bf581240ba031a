"""Complex parameters, many dimensions and numbers of any kind on a GPU, beside torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilestep


def compared(name: str, params: list[torch.nn.Parameter], steps: int = 3, **arguments: Any) -> None:
    """Steps of both optimizers with the same gradients; the last parameter's lie in reverse order."""
    others = [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
    mine, theirs = getattr(tilestep, name)(params, **arguments), getattr(torch.optim, name)(others, **arguments)
    for step in range(steps):
        torch.manual_seed(step)
        for param, other in zip(params, others):
            gradient = torch.randn_like(other)
            other.grad = gradient.clone()
            order = tuple(reversed(range(gradient.dim())))
            param.grad = gradient.permute(order).contiguous().permute(order)
        mine.step()
        theirs.step()
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop", "Rprop"])
def test_complex_parameters(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=dtype, device="cuda") for shape in [(5,), (40, 60), (), (300, 7)]]
    values.append(torch.randn(16, 18, dtype=dtype, device="cuda")[::2, 1::3])
    compared(name, [torch.nn.Parameter(value) for value in values], lr=0.1)


def test_norm_and_clip_of_complex_gradients() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, dtype=torch.complex64, device="cuda"))
    weight.grad = torch.randn_like(weight)
    expected = weight.grad / weight.grad.norm()
    torch.testing.assert_close(tilestep.total_norm([weight.grad]), weight.grad.norm())
    tilestep.clip_grad_norm_([weight], 1.0)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", [3, 9, 13])
def test_many_dimensions_that_cannot_be_merged(dims: int) -> None:
    torch.manual_seed(0)
    spread = torch.randn((4,) * dims if dims < 10 else (2,) * dims, device="cuda")[(slice(None, None, 2),) * dims]
    compared("AdamW", [torch.nn.Parameter(spread), torch.nn.Parameter(torch.randn((2,) * dims, device="cuda"))], lr=0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_number_may_live_on_either_device(device: str) -> None:
    for where in ("cpu", "cuda"):
        param = torch.nn.Parameter(torch.ones(8, device=where))
        param.grad = torch.ones(8, device=where)
        optimizer = tilestep.SGD([param], lr=torch.tensor(0.25, device=device), momentum=np.float32(0.5))
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((8,), 0.75, device=where))
        optimizer.param_groups[0]["lr"].fill_(0.5)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.zeros(8, device=where))
