"""Steps over DTensors on four ranks are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, assert_equal_on_ranks, assert_same, backward, batch, device, full, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep
from tilestep import native
from tilestep.kernels.spec import NORM

STEPS = 3


class Stepped(NamedTuple):
    """A model in one process after a step, and the norm of its gradients where there is a clip."""

    model: torch.nn.Module
    norm: torch.Tensor | None


def _in_one_process(make: Callable[[Any], Any], steps: int) -> list[Stepped]:
    reference, stepped = plain(), []
    optimizer = make(reference.parameters())
    for step in range(steps):
        backward(reference, batch(step))
        optimizer.step()
        optimizer.zero_grad()
        norm = None if optimizer.param_groups[0].get("max_grad_norm") is None else optimizer.grad_norm.clone()
        stepped.append(Stepped(copy.deepcopy(reference), norm))
    return stepped


def _train(layouts: Iterable[str], name: str, **arguments: Any) -> None:
    """Train distributed and in one process, and compare parameters and norm after every step."""

    def make(params: Any) -> Any:
        return getattr(tilestep, name)(params, **arguments)

    expected = _in_one_process(make, STEPS)
    for layout in layouts:
        net = LAYOUTS[layout][0]()
        optimizer = make(net.parameters())
        for step, (reference, norm) in enumerate(expected):
            backward(net, batch(step, layout))
            optimizer.step()
            assert (norm is not None) == ("max_grad_norm" in arguments)
            if norm is not None:
                torch.testing.assert_close(optimizer.grad_norm, norm)
                assert_equal_on_ranks(optimizer._current_plan().engines[0].control.numbers[NORM])
            assert_same(net, reference, atol=1e-5, rtol=1e-4)
            optimizer.zero_grad()


def clips_as_one_process() -> None:
    """Those of AdamW are compared in `is_looked_at_in_cpp`."""
    _train(LAYOUTS, "SGD", lr=0.1, momentum=0.9, max_grad_norm=0.05)


def sums_whole_tensors() -> None:
    """Rules with norms of each tensor, and with sums over all of them."""
    _train(LAYOUTS, "LAMB", lr=1e-2, max_grad_norm=0.05)
    for name, lr in [("LARS", 0.1), ("StableAdamW", 1e-2), ("Prodigy", 1.0)]:
        _train(["mixed"], name, lr=lr)


def means_divide_by_all_elements() -> None:
    """A mean, an extreme and a size are those of the whole tensor."""

    @tilestep.rule
    def extremes(param: torch.Tensor, grad: torch.Tensor, *, lr: float = 0.1) -> torch.Tensor:
        spread = grad.amax() - grad.amin() + grad.abs().mean() + param.size(-1) + param.numel()
        return param - lr * grad / spread

    for layout in LAYOUTS:
        net, reference = LAYOUTS[layout][0](), plain()
        optimizer, expected = (
            tilestep.Optimizer(net.parameters(), extremes),
            tilestep.Optimizer(reference.parameters(), extremes),
        )
        backward(net, batch(0, layout))
        backward(reference, batch(0))
        optimizer.step()
        expected.step()
        assert_same(net, reference, atol=1e-6, rtol=1e-5)


def dispatches_nothing() -> None:
    """A step touches no DTensor by an operation."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(issubclass(kind, DTensor) for kind in types), func
            assert not any(isinstance(arg, DTensor) for arg in args), func
            return func(*args, **(kwargs or {}))

    for layout in LAYOUTS:
        net = LAYOUTS[layout][0]()
        optimizer = tilestep.AdamW(net.parameters(), max_grad_norm=1.0)
        for step in range(2):
            backward(net, batch(step, layout))
            with Watch():
                optimizer.step()
            optimizer.zero_grad()


def accumulates_and_freezes() -> None:
    """Microbatches, a frozen parameter, and one that gets no gradient."""
    net, reference = LAYOUTS["fsdp"][0](), plain()
    for model in (net, reference):
        model.first.bias.requires_grad_(False)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, device=batch(0).device)))
    optimizer = tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.05)
    expected = tilestep.AdamW(reference.parameters(), lr=1e-2, max_grad_norm=0.05)
    for step in range(2):
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2)
            backward(net, batch(3 * step + micro, "fsdp"))
            backward(reference, batch(3 * step + micro))
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        assert_same(net, reference, atol=1e-5, rtol=1e-4)


def redistributes_gradients() -> None:
    """A gradient that is replicated or a partial sum becomes one that lies as its parameter."""
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    whole = torch.arange(10.0, device=device())
    for placement in (Replicate(), Partial()):
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
        optimizer = tilestep.SGD([weight], lr=1.0, max_grad_norm=1000.0)
        terms = whole / (dist.get_world_size() if isinstance(placement, Partial) else 1)
        weight.grad = DTensor.from_local(terms, mesh, [placement])
        optimizer.step()
        torch.testing.assert_close(full(weight), -whole)
        torch.testing.assert_close(optimizer.grad_norm, whole.norm())
        assert weight.grad.placements == (Shard(0),)
        torch.testing.assert_close(full(weight.grad), whole)
    replicated = torch.nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Replicate()]))
    optimizer = tilestep.SGD([replicated], lr=1.0, max_grad_norm=1000.0)
    replicated.grad = DTensor.from_local(whole / dist.get_world_size(), mesh, [Partial()])
    optimizer.step()
    torch.testing.assert_close(full(replicated), -whole)
    torch.testing.assert_close(optimizer.grad_norm, whole.norm())


def takes_gradients_of_another_dtype() -> None:
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    values = torch.arange(10.0, device=device())
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros_like(values, dtype=torch.bfloat16), mesh, [Shard(0)]))
    weight.grad_dtype = torch.float32
    weight.grad = distribute_tensor(values, mesh, [Shard(0)])
    optimizer = tilestep.SGD([weight], lr=1.0, max_grad_norm=1000.0)
    optimizer.step()
    torch.testing.assert_close(full(weight).float(), -values)
    torch.testing.assert_close(optimizer.grad_norm, values.norm())


def follows_a_moved_model() -> None:
    """A model whose local parts are replaced steps with the new ones."""
    net, reference = LAYOUTS["fsdp"][0](), plain()
    optimizer = tilestep.AdamW(net.parameters(), lr=1e-2)
    expected = tilestep.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        backward(net, batch(step, "fsdp"))
        backward(reference, batch(step))
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        if step == 0:
            net._apply(torch.clone)
    assert_same(net, reference, atol=1e-5, rtol=1e-4)


def is_looked_at_in_cpp() -> None:
    """The C++ look before a step knows DTensors, and leaves to the Python path what it does not know."""
    if not native.wait():
        return

    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=1e-2, max_grad_norm=0.05)

    expected = _in_one_process(make, 7)
    for layout in LAYOUTS:
        net = LAYOUTS[layout][0]()
        optimizer = make(net.parameters())
        weight = net.blocks[0].up.weight
        for step, (reference, _) in enumerate(expected):
            backward(net, batch(step, layout))
            if step == 3:
                weight.grad = weight.grad.redistribute(placements=[Replicate()] * weight.device_mesh.ndim)
            if step == 5:
                net._apply(torch.clone)
            versions = weight._version
            optimizer.step()
            assert optimizer.plan.engines[0].table.finds == (step not in (0, 3, 5)), (layout, step)
            assert weight._version > versions
            assert_same(net, reference, atol=1e-5, rtol=1e-4)
            optimizer.zero_grad()


def refuses_gradients_of_another_kind() -> None:
    """A plain gradient of a DTensor, and a DTensor for a plain tensor, are named."""
    net = LAYOUTS["tensor_parallel"][0]()
    optimizer = tilestep.SGD(net.named_parameters(), lr=1.0)
    for step in range(3):
        backward(net, batch(step))
        optimizer.step()
    other, mesh = net.blocks[0].up.weight, net.blocks[0].up.weight.device_mesh
    for param, wrong in [
        (net.first.weight, distribute_tensor(torch.ones_like(net.first.weight), mesh, [Replicate()])),
        (other, torch.ones(other.shape, device=other.device)),
    ]:
        before, param.grad = param.grad, None
        try:
            param.grad = wrong
        except RuntimeError:
            continue  # torch refuses it itself
        with pytest.raises(tilestep.GradientError, match=r"weight.* is a "):
            optimizer.step()
        param.grad = before
        optimizer.step()


def refuses_partial_sums() -> None:
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    with pytest.raises(tilestep.GradientError, match="partial sum"):
        tilestep.SGD([torch.nn.Parameter(DTensor.from_local(torch.zeros(3, device=device()), mesh, [Partial()]))])


CHECKS = {
    check.__name__: check
    for check in (
        clips_as_one_process,
        sums_whole_tensors,
        means_divide_by_all_elements,
        dispatches_nothing,
        accumulates_and_freezes,
        redistributes_gradients,
        takes_gradients_of_another_dtype,
        follows_a_moved_model,
        is_looked_at_in_cpp,
        refuses_gradients_of_another_kind,
        refuses_partial_sums,
    )
}


test_on_four_ranks = each_passes(CHECKS, 4)
