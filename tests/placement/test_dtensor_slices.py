"""Rules over rows, columns and other slices of DTensors: the ranks' steps are those of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, assert_same, backward, batch, device, full, here, placed, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep.rules.compose import ema

EXACT = {"atol": 1e-11, "rtol": 1e-10}


@tilestep.rule
def slices_of_every_kind(param: Any, grad: Any, *, lr: float = 0.1) -> Any:
    """Sums and extremes over each dimension and over both, and sums of those."""
    rows, columns = grad.amax(dim=-1, keepdim=True), grad.amin(dim=-2, keepdim=True)
    sizes = (grad * grad).mean(dim=-2, keepdim=True)
    whole = sizes.sum() + rows.sum() + columns.amax() + rows.amin(dim=-2, keepdim=True)
    return param - lr * (rows + columns + whole + grad.sum(dim=-1, keepdim=True) * sizes)


def _matrices(net: torch.nn.Module) -> list[Any]:
    return [param for param in net.parameters() if param.dim() == 2]


def _in_one_process(make: Any, steps: Sequence[int] = range(3)) -> tuple[list[Any], Any]:
    """A model after each of some steps, and its optimizer, whose parameters are the last's."""
    reference, stepped = plain().double(), []
    optimizer = make(reference)
    for step in steps:
        backward(reference, batch(step).double())
        optimizer.step()
        optimizer.zero_grad()
        stepped.append(copy.deepcopy(reference))
    return [*stepped[:-1], reference], optimizer


def _train(layout: str, make: Any, references: Sequence[Any]) -> tuple[Any, Any]:
    """Train a model, which is after each step what one process had."""
    net = LAYOUTS[layout][0]().double()
    optimizer = make(net)
    for step, reference in enumerate(references):
        backward(net, batch(step, layout).double())
        optimizer.step()
        assert_same(net, reference, **EXACT)
        optimizer.zero_grad()
    return net, optimizer


def _states(optimizer: Any) -> list[dict[str, Any]]:
    return [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]


def adafactor_is_torch_s() -> None:
    """With parts of no rows: 5 rows and 1 row do not divide by 4 ranks."""
    given = {"lr": 0.05, "weight_decay": 0.01}
    references, expected = _in_one_process(lambda net: torch.optim.Adafactor(net.parameters(), **given))
    states = _states(expected)
    for layout in LAYOUTS:
        net, optimizer = _train(layout, lambda net: tilestep.Adafactor(net.parameters(), **given), references)
        for param, state in zip(net.parameters(), states, strict=True):
            for name, wanted in state.items():
                mine = optimizer.state[param][name]
                assert not isinstance(param, DTensor) or name == "step" or mine.shape == wanted.shape
                torch.testing.assert_close(*(tensor.double().cpu() for tensor in here(mine, wanted)), **EXACT)


def every_kind_of_slice() -> None:
    """Tensors cut along two dimensions too where nothing has to be combined over the one and differs over the other."""

    def make(net: torch.nn.Module) -> Any:
        return tilestep.Optimizer(_matrices(net), slices_of_every_kind, lr=1e-3)

    references, _ = _in_one_process(make)
    for layout in LAYOUTS:
        _train(layout, make, references)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        mesh = init_device_mesh(device(), (dist.get_world_size(),))
        torch.manual_seed(3)
        whole, grad = torch.randn(2, 5, 3, 7, dtype=torch.float64).to(device())
        weight, other = torch.nn.Parameter(distribute_tensor(whole, mesh, [placement])), torch.nn.Parameter(whole)
        weight.grad, other.grad = distribute_tensor(grad, mesh, [placement]), grad
        for params in ([weight], [other]):
            tilestep.Optimizer(params, slices_of_every_kind).step()
        torch.testing.assert_close(*here(weight, other), **EXACT)


def state_is_distributed_as_its_parameter() -> None:
    net = LAYOUTS["fsdp"][0]()
    optimizer = tilestep.Adafactor(net.parameters())
    backward(net, batch(0, "fsdp"))
    optimizer.step()
    weight = net.odd.weight
    state = optimizer.state[weight]
    assert state["row_var"].placements == weight.placements and state["row_var"].shape == (5, 1)
    assert state["col_var"].placements == (Replicate(),) and state["col_var"].shape == (1, 8)


def state_goes_round() -> None:
    """Through state_dict, from whole tensors, from another placement, and to torch's optimizer and back."""

    def expect(net: torch.nn.Module) -> Any:
        return torch.optim.Adafactor(net.parameters(), lr=0.05)

    references, expected = _in_one_process(expect)
    (*_, last), _ = _in_one_process(expect, (0, 1, 2, 5))
    for layout in LAYOUTS:
        net, optimizer = _train(layout, lambda net: tilestep.Adafactor(net.parameters(), lr=0.05), references)
        saved = copy.deepcopy(optimizer.state_dict())
        loaded = tilestep.Adafactor(net.parameters(), lr=0.01)
        loaded.load_state_dict(saved)
        plain_state = copy.deepcopy(expected.state_dict())
        from_plain = tilestep.Adafactor(net.parameters(), lr=0.01)
        from_plain.load_state_dict(plain_state)
        state = from_plain.state[net.odd.weight]
        from_plain.state[net.odd.weight] = {**state, "row_var": full(state["row_var"])}
        for param in net.parameters():
            for name in ("row_var", "col_var"):
                if name in optimizer.state[param]:
                    mine = full(optimizer.state[param][name])
                    assert torch.equal(*here(loaded.state[param][name], mine))
                    torch.testing.assert_close(*here(from_plain.state[param][name], mine), **EXACT)
        backward(net, batch(5, layout).double())
        from_plain.step()
        assert_same(net, last, **EXACT)


def averages_of_it_are_evaluated() -> None:
    rule = ema(tilestep.registry["Adafactor"], 0.75)

    def make(net: torch.nn.Module) -> Any:
        return tilestep.Optimizer(net.parameters(), rule, lr=0.05)

    references, expected = _in_one_process(make)
    net, optimizer = _train("fsdp", make, references)
    with optimizer.averaged(), expected.averaged():
        assert_same(net, references[-1], **EXACT)


def skips_and_missing_gradients() -> None:
    """A step that is skipped on one rank's account, and a matrix without gradient."""
    net, reference = LAYOUTS["fsdp"][0]().double(), plain().double()
    optimizer = tilestep.Adafactor(net.parameters(), lr=0.05, skip_nonfinite=True)
    expected = torch.optim.Adafactor(reference.parameters(), lr=0.05)
    for step in range(4):
        backward(net, batch(step, "fsdp").double())
        backward(reference, batch(step).double())
        if step == 1:
            net.odd.weight.grad = reference.odd.weight.grad = None
        if step == 2 and dist.get_rank() == 0:
            net.first.weight.grad.to_local().fill_(torch.nan)
        optimizer.step()
        if step != 2:
            expected.step()
        assert_same(net, reference, **EXACT)
        optimizer.zero_grad()
        expected.zero_grad()


def cut_along_two_dimensions() -> None:
    """Each rank has other columns and some rows; and the same rows twice cut."""
    torch.manual_seed(3)
    whole, *grads = torch.randn(4, 7, 9, dtype=torch.float64).to(device())
    mesh = init_device_mesh(device(), (dist.get_world_size() // 2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        for make in (tilestep.Adafactor, lambda params, lr: tilestep.Optimizer(params, slices_of_every_kind, lr=lr)):
            weight = torch.nn.Parameter(placed(whole, mesh, placements))
            other = torch.nn.Parameter(whole.clone())
            optimizer, expected = make([weight], lr=0.05), make([other], lr=0.05)
            for grad in grads:
                weight.grad, other.grad = placed(grad, mesh, placements), grad
                optimizer.step()
                expected.step()
            torch.testing.assert_close(*here(weight, other), **EXACT)


def extremes_of_one_sign_where_a_rank_has_none() -> None:
    """What a rank without any rows or columns gives is neither the largest nor the smallest, nor is a 0."""
    mesh = init_device_mesh(device(), (dist.get_world_size() // 2, 2))
    for shape in ((1, 5), (5, 1), (3, 5)):
        torch.manual_seed(4)
        whole, grad = torch.rand(2, *shape, dtype=torch.float64).to(device()) + 1
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            weight, wanted = torch.nn.Parameter(placed(whole, mesh, placements)), whole
            optimizer = tilestep.Optimizer([weight], slices_of_every_kind)
            for sign in (-1, 1):
                weight.grad = placed(sign * grad, mesh, placements)
                (wanted,) = slices_of_every_kind(wanted, sign * grad)
                optimizer.step()
            torch.testing.assert_close(*here(weight, wanted), **EXACT)


def one_all_reduce_for_all_sums_of_a_stage() -> None:
    """Of 3 stages with reductions; the extremes of a stage take a second one."""
    net = LAYOUTS["fsdp"][0]()
    optimizer = tilestep.Adafactor(_matrices(net), lr=0.05)
    backward(net, batch(0, "fsdp"))
    optimizer.step()
    with torch.profiler.profile() as profiler:
        optimizer.step()
    calls = [event.count for event in profiler.key_averages() if event.key == "c10d::allreduce_"]
    assert calls == [3]


CHECKS = {
    check.__name__: check
    for check in (
        adafactor_is_torch_s,
        every_kind_of_slice,
        state_is_distributed_as_its_parameter,
        state_goes_round,
        averages_of_it_are_evaluated,
        skips_and_missing_gradients,
        cut_along_two_dimensions,
        extremes_of_one_sign_where_a_rank_has_none,
        one_all_reduce_for_all_sums_of_a_stage,
    )
}


test_slices_on_four_ranks = each_passes(CHECKS, 4)
