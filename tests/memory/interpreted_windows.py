"""Run by test_offload_steps.py under TRITON_INTERPRET=1: the Triton kernels over ranges of tiles, on CPU tensors."""

from __future__ import annotations

import torch
from offloaded_pairs import Pair, streamed

import tilestep
from tilestep.backends.registry import interpret_on_cpu
from tilestep.backends.triton.run import TritonPasses

SHAPES = [(5,), (4, 6), (0,), (1_601,)]

if __name__ == "__main__":
    interpret_on_cpu()
    for rule in ("AdamW", "LAMB"):
        for home in (streamed(), streamed(6_000, 2)):
            pair = Pair(lambda params, rule=rule: tilestep.Optimizer(params, rule, max_grad_norm=1.0), home, SHAPES)
            assert all(isinstance(passes, TritonPasses) for passes in pair.optimizer.plan.engines[0].passes)
            for step in range(2):
                pair.step(missing=lambda place, step=step: place == step)
            pair.compare()
    # A parameter with gaps is walked by coordinates.
    pair = Pair(tilestep.AdamW, streamed(), SHAPES)
    for params, optimizer in ((pair.plain, pair.reference), (pair.moved, pair.optimizer)):
        gaps = torch.nn.Parameter(torch.arange(800.0).view(20, 40)[:, ::2])
        params.append(gaps)
        optimizer.add_param_group({"params": [gaps]})
    pair.step(2)
    pair.compare()
    print("all equal")
