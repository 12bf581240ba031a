"""Kernels as a profiler has recorded them on an H200: one of each kind of a sharded training's iteration."""

from __future__ import annotations

import json
from pathlib import Path

from tilestep.tracing.lanes import Events, covers

# Four H200s, torch 2.11, Triton 3.6: names, launches and times of the first rank, without the host's operators.
EVENTS = json.loads((Path(__file__).parent / "h200_kernels.json").read_text(encoding="utf-8"))
OURS = {"norm_tiles", "norm_finish", "decide", "adamw_scalar_pass_0", "adamw_tile_pass_0"}


def test_every_kernel_has_its_launch_and_its_lane() -> None:
    events = Events(EVENTS)
    assert len(events.works) == 40 and all(work.launched is not None for work in events.works)
    lanes = events.lanes()
    assert {work.name for work in events.works} >= OURS
    for work in events.works:
        middle = (work.start + work.stop) / 2
        if work.name in OURS:
            wanted = "update"
        elif work.name.startswith("nccl"):
            wanted = "communication"
        else:
            wanted = "copies" if work.name.startswith("Mem") else "forward"
        assert covers(getattr(lanes, wanted), middle), work.name
        assert (work.name in OURS) == covers(lanes.optimizer, middle), work.name
    assert not lanes.backward, "nothing says what autograd has launched"
