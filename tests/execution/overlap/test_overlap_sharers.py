"""Others that have an overlapped optimizer's parameters and state: they wait by themselves, and are not kept alive."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from overlapped_models import TINY, Small, clipped, loss_of, small
from shared_weights import Borrowing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tilestep


def borrowing(model: Small) -> nn.Module:
    return Borrowing(model.embedding.weight)


def attention(model: Small) -> nn.Module:
    torch.manual_seed(1)
    made = nn.MultiheadAttention(9, 3, batch_first=True)
    made.out_proj.weight = model.attention.out_proj.weight
    return made.to(model.norm.weight.device)


def both_pending(made_before: bool, make: Any) -> tuple[nn.Module, nn.Module]:
    """Models that share weights with an overlapped one whose updates are pending, and with its serial twin."""
    overlapped, serial = small(), small()
    others = [make(net) for net in (overlapped, serial)] if made_before else []
    optimizer = tilestep.overlap(clipped(overlapped.parameters()), overlapped, "forward", bucket_cap_mb=TINY)
    reference = clipped(serial.parameters())
    others = others or [make(net) for net in (overlapped, serial)]
    for model, own in ((overlapped, optimizer), (serial, reference)):
        loss_of(model, 0).backward()
        own.step()
    return others[0], others[1]


before = pytest.mark.parametrize("made_before", [True, False], ids=["made before", "made after"])


@before
def test_another_model_may_use_weights_without_calling_who_has_them(made_before: bool) -> None:
    for make, width in ((borrowing, 6), (attention, 9)):
        mine, wanted = both_pending(made_before, make)
        data = torch.rand(2, 3, width, device=next(wanted.parameters()).device)
        given = (data, data, data) if make is attention else (data,)
        with torch.no_grad():
            outputs = [module(*given) for module in (mine, wanted)]
        if make is attention:
            outputs = [output[0] for output in outputs]
        assert torch.equal(*outputs)


@before
def test_another_model_is_saved_and_copied_with_the_updates(made_before: bool) -> None:
    for read in (lambda model: model.state_dict(), lambda model: copy.deepcopy(model).state_dict()):
        mine, wanted = both_pending(made_before, borrowing)
        assert torch.equal(read(mine)["layer.weight"], read(wanted)["layer.weight"])


@pytest.mark.parametrize("shared", [True, False], ids=["in another model", "in the model"])
def test_weights_of_a_group_that_is_added_wait_too(shared: bool) -> None:
    """In a module that has come into the model after overlap()."""
    seen = []
    for is_overlapped in (True, False):
        model = small()
        optimizer = clipped(model.parameters())
        if is_overlapped:
            tilestep.overlap(optimizer, model, "forward", bucket_cap_mb=TINY)
        torch.manual_seed(2)
        model.adapter = nn.Linear(6, 11, bias=False).to(model.scale.device)
        module = Borrowing(model.adapter.weight).layer if shared else model.adapter
        optimizer.add_param_group({"params": model.adapter.parameters()})
        (loss_of(model, 0) + model.adapter(model.scale).square().sum()).backward()
        optimizer.step()
        seen.append(module.weight.detach().clone())
    assert torch.equal(*seen)


class Branch(nn.Module):
    """A layer that some forwards leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, data: torch.Tensor, is_used: bool) -> torch.Tensor:
        return self.head(self.branch(data) if is_used else data)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_gradients_in_buckets_are_used_before_a_wrapper_writes_there(wrapped_first: bool, one_rank: None) -> None:
    """Zeros in the place of what a forward has not used, when another optimizer's gradient comes first."""
    trained = []
    for is_overlapped in (True, False):
        model = Branch()
        optimizers = [clipped(part.parameters()) for part in (model.branch, model.head)]
        if is_overlapped and not wrapped_first:
            tilestep.overlap(optimizers[0], model, "forward")
        wrapper = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
        if is_overlapped and wrapped_first:
            tilestep.overlap(optimizers[0], wrapper, "forward")
        for step in range(4):
            wrapper(torch.ones(3, 4), step != 1).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *trained))


def test_whoever_looks_at_the_state_comes_after_the_updates() -> None:
    model, serial = small(), small()
    optimizer = tilestep.overlap(clipped(model.parameters()), model, "forward", bucket_cap_mb=TINY)
    reference = clipped(serial.parameters())
    for net, own in ((model, optimizer), (serial, reference)):
        loss_of(net, 0).backward()
        own.step()
    param = dict.get(model.first._parameters, "weight")
    assert torch.equal(optimizer.state[param]["exp_avg"], reference.state[serial.first.weight]["exp_avg"])


@pytest.mark.parametrize("during", ["backward", "forward"])
@pytest.mark.parametrize("waits", [False, True], ids=["updates are pending", "after all updates"])
def test_models_and_optimizers_are_let_go(during: Any, waits: bool, one_rank: None) -> None:
    def used(build: Any) -> list[weakref.ref[Any]]:
        model = build()
        optimizer = tilestep.overlap(clipped(model.parameters()), model, during, bucket_cap_mb=TINY)
        other = Borrowing(next(model.parameters()))
        loss_of(model, 0).backward()
        optimizer.step()
        if waits:
            optimizer.synchronize()
        return [weakref.ref(owner) for owner in (model, optimizer, other)]

    def wrapped() -> nn.Module:
        model = small()
        model.unused.requires_grad_(False)
        return DistributedDataParallel(model)

    for build in (small, wrapped):
        references = used(build)
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
