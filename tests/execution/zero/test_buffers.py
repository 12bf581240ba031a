"""What a model has beside the optimizer's parameters: every rank begins with what the first one has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from torch import nn

import tilestep


def buffers() -> dict[str, torch.Tensor]:
    """Others on each rank, in types that gloo does not know, and in layouts that cannot simply be written to."""
    number = dist.get_rank() + 1
    return {
        "truth": torch.tensor([number == 1, True]),
        "small": torch.tensor([number], dtype=torch.int16),
        "unsigned": torch.tensor([number], dtype=torch.uint16),
        "eight_bits": torch.tensor([float(number)]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1.0 + 2.0j * number]),
        "scalar": torch.tensor(float(number)),
        "empty": torch.zeros(0),
        "expanded": torch.tensor([[float(number)], [2.0]]).expand(2, 4),
        "transposed": (torch.arange(6.0) * number).view(2, 3).t(),
    }


def every_buffer_is_the_first_rank_s() -> None:
    model = nn.Linear(3, 3)
    frozen = nn.Parameter(torch.tensor([dist.get_rank()], dtype=torch.int8), requires_grad=False)
    model.register_parameter("frozen", frozen)
    for name, value in buffers().items():
        model.register_buffer(name, value)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    tilestep.shard(tilestep.SGD([model.weight, model.bias], lr=0.1), model)  # type: ignore[attr-defined]
    for name, value in {**buffers(), "frozen": frozen.data}.items():
        mine = getattr(model, name).detach()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine.contiguous().view(-1).view(torch.uint8).tolist())
        assert everywhere[0] == everywhere[1], name
        assert mine.shape == value.shape and mine.stride() == value.stride(), name
        if dist.get_rank() == 0:
            assert torch.equal(mine.to(torch.complex64), value.to(torch.complex64)), name


test_two_ranks = each_passes([every_buffer_is_the_first_rank_s], 2)
