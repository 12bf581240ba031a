"""Private APIs of DTensors and meshes: that this torch has them as we know them, and that steps work without each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, assert_same, backward, batch, device, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep import compat
from tilestep.placement import ReductionGroup


def dtensors_have_what_we_know() -> None:
    """A local part that is memory of its own and stays the same object, and a layout that FSDP's gradients share."""
    assert compat.dtensors_have_parts()
    net = LAYOUTS["fsdp"][0]()
    backward(net, batch(0, "fsdp"))
    for param in net.parameters():
        part = compat.local_parts([param])[0]
        assert type(part) is torch.Tensor and part is compat.local_parts([param])[0]
        assert part.data_ptr() == param.to_local().data_ptr()  # type: ignore[attr-defined]
        layout, of_gradient = compat.layouts([param, param.grad])
        assert layout.mesh is param.device_mesh and layout.placements == param.placements  # type: ignore[attr-defined]
        assert of_gradient is layout


def meshes_have_what_we_know() -> None:
    root = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    assert compat.root_mesh(root["tp"]) is root and compat.root_mesh(root["dp"]) is root
    able = compat.group_device_types(dist.group.WORLD)
    assert able is not None and device() in able


def steps_without_parts_and_layouts() -> None:
    """By public methods alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "dtensors_have_parts", lambda: False)
        patch.setattr("tilestep.native.table.DTENSOR_PARTS", ("_no_part", "_no_layout"))
        for layout in LAYOUTS:
            net, reference = LAYOUTS[layout][0](), plain()
            optimizer = tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.05)
            expected = tilestep.AdamW(reference.parameters(), lr=1e-2, max_grad_norm=0.05)
            for step in range(3):
                backward(net, batch(step, layout))
                backward(reference, batch(step))
                optimizer.step()
                expected.step()
                assert_same(net, reference, atol=1e-5, rtol=1e-4)
                optimizer.zero_grad()
                expected.zero_grad()
            assert isinstance(optimizer.state[net.blocks[0].up.weight]["exp_avg"], DTensor)


def agrees_without_roots() -> None:
    """Meshes of which one holds the others need no root; others are refused."""
    root = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    one = torch.ones(4, device=device())
    on_dp, on_tp = (distribute_tensor(one, root[name], [Shard(0)]) for name in ("dp", "tp"))
    on_both = distribute_tensor(one, root, [Replicate(), Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilestep.placement.reduction.root_mesh", lambda mesh: None)
        assert ReductionGroup.of_tensors([("dp", on_dp), ("both", on_both)]).ranks == [*range(dist.get_world_size())]
        with pytest.raises(tilestep.GradientError, match=r"tp.*not slices of one mesh"):
            ReductionGroup.of_tensors([("dp", on_dp), ("tp", on_tp)])


CHECKS = {
    check.__name__: check
    for check in (
        dtensors_have_what_we_know,
        meshes_have_what_we_know,
        steps_without_parts_and_layouts,
        agrees_without_roots,
    )
}


test_on_four_ranks = each_passes(CHECKS, 4)
