"""What a trace shows of a sharded training: whose the communication is."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from rank_processes import run_on_ranks

import tilestep
from tilestep.tracing.lanes import length, overlap


def communication_has_lanes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    optimizer = tilestep.shard(tilestep.AdamW(model.parameters(), max_grad_norm=1.0), model)  # type: ignore[attr-defined]

    def iterate() -> None:
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()

    iterate()
    with tempfile.TemporaryDirectory() as folder, tilestep.profile(folder, picture=False) as traced:
        for _ in range(3):
            iterate()
    assert len(traced.report.iterations) == 3
    assert [path.name for path in traced.report.files] == [f"trace-rank{dist.get_rank()}.json"]
    for iteration in traced.report.iterations:
        lanes = iteration.lanes
        assert lanes.communication and lanes.update
        # The all-gather after the step is the optimizer's, the reduce-scatter in backward is not.
        asked = overlap(lanes.communication, lanes.optimizer)
        assert 0 < length(asked) < length(lanes.communication)
        assert length(lanes.exposed) <= length(lanes.optimizer)


def test_communication_of_a_sharded_optimizer() -> None:
    assert run_on_ranks([communication_has_lanes], ranks=2) == {}
