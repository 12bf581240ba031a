"""Param groups that are left out of the norm, the clip and the skip."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import tilestep


def groups(**options: Any) -> tuple[list[torch.nn.Parameter], list[dict[str, Any]]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size)) for size in (6, 7, 8)]
    return params, [{"params": params[:2]}, {"params": params[2:], **options}]


def fill(params: list[torch.nn.Parameter], size: float = 3.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, size)


def test_the_norm_and_the_clip_are_the_other_groups() -> None:
    params, listed = groups(in_norm=False)
    optimizer = tilestep.SGD(listed, lr=1.0, max_grad_norm=1.0)
    assert "max_grad_norm" not in optimizer.param_groups[1] and optimizer.param_groups[1]["in_norm"] is False
    reference = [param.detach().clone().requires_grad_() for param in params]
    for _ in range(3):
        fill(params)
        fill(reference)
        torch.nn.utils.clip_grad_norm_(reference[:2], 1.0)
        torch.optim.SGD(reference, lr=1.0).step()
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(13 * 9))
        for param, other in zip(params, reference):
            torch.testing.assert_close(param, other)


def test_a_norm_that_skips_does_not_see_them_but_for_what_is_not_finite() -> None:
    params, listed = groups(in_norm=False)
    optimizer = tilestep.SGD(listed, lr=1.0, skip_above=20.0)
    fill(params)
    params[2].grad.fill_(1e3)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    params[2].grad[0] = math.inf
    kept = [param.detach().clone() for param in params]
    optimizer.step()
    assert optimizer.skipped_steps == 1 and all(map(torch.equal, kept, params))


def test_joint_norms_leave_them_out() -> None:
    params, listed = groups(in_norm=False)
    other = torch.nn.Parameter(torch.ones(3))
    optimizers = [tilestep.SGD(listed, lr=1.0), tilestep.SGD([other], lr=1.0, max_grad_norm=1.0)]
    tilestep.joint_norm(optimizers)
    fill([*params, other])
    for optimizer in optimizers:
        optimizer.step()
    assert optimizers[1].grad_norm.item() == pytest.approx(math.sqrt(16 * 9))


def test_a_group_may_leave_later_and_checkpoints_say_so() -> None:
    params, listed = groups()
    optimizer = tilestep.SGD(listed, lr=0.0, track_grad_norm=True)
    fill(params)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(21 * 9))
    optimizer.param_groups[1]["in_norm"] = False
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(13 * 9))
    twin = tilestep.SGD(groups()[1], lr=0.0)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.param_groups[1]["in_norm"] is False and "in_norm" not in twin.param_groups[0]


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no max_grad_norm"):
        tilestep.SGD(groups(in_norm=False, max_grad_norm=2.0)[1], lr=0.1)
    with pytest.raises(ValueError, match="Invalid in_norm"):
        tilestep.SGD(groups(in_norm=None)[1], lr=0.1)
