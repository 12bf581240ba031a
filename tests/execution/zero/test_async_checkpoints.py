"""Checkpoints of sharded optimizers that are written while training goes on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import each_passes
from sharded_twins import TINY
from test_checkpoints import Mixed, adamw, assert_same, shared_folder, trained

import tilestep


def checkpoints_are_written_beside_training() -> None:
    """`async_save` copies pieces to the host; steps that follow do not change what it writes."""
    model = Mixed()
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    trained("adamw", range(2), optimizer, model)
    before, folder = optimizer.full_state_dict(), shared_folder()
    # A group of its own: what it sends comes between what training does.
    group = dist.new_group()
    writing: Any = dcp.async_save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, process_group=group)
    trained("adamw", range(2, 4), optimizer, model)
    writing.result()
    fresh = Mixed()
    again = tilestep.shard(adamw(fresh.parameters()), fresh)
    loaded = {"optimizer": again.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    again.load_state_dict(loaded["optimizer"])
    assert_same(again.full_state_dict(), before)


test_two_ranks = each_passes([checkpoints_are_written_beside_training], 2)
