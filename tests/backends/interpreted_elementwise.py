"""Run by test_elementwise.py under TRITON_INTERPRET=1: the Triton spelling of every operation, on CPU tensors."""

from __future__ import annotations

import warnings

import torch
from elementwise_rules import misses_of, rules

import tilestep
from tilestep.backends import registry
from tilestep.backends.triton.run import TritonPasses


def check_asgd() -> None:
    """A product with 1 - lambd * eta, rounded to float32, was off by 3e-8 of the parameter at every step."""
    generator = torch.Generator().manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        start = torch.randn(50, generator=generator, dtype=dtype)
        ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        pair = tilestep.ASGD([ours], lr=0.02), torch.optim.ASGD([theirs], lr=0.02, foreach=dtype is torch.float32)
        for _ in range(30):
            ours.grad = torch.randn(50, generator=generator, dtype=dtype)
            theirs.grad = ours.grad.clone()
            for optimizer in pair:
                optimizer.step()
        assert (ours - theirs).abs().max() < bound, (dtype, (ours - theirs).abs().max())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    registry.passes_class = lambda device: TritonPasses
    check_asgd()
    wrong = []
    for rule, names in rules():
        for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
            wrong += misses_of(rule, names, dtype, bound)
    assert not wrong, "\n".join(wrong[:40])
    print("all equal")
