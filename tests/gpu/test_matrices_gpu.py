"""Matrix operations on a GPU: symmetric products, orthogonalization, Muon beside torch's, capture, no waiting."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from iterations import JORDAN, NUMBERS, conditioned, dominated, exact
from synchronization import no_synchronization

import tilestep
from tilestep.linalg import orthogonal
from tilestep.linalg.coefficients import NAMES, flat, rows_of
from tilestep.linalg.orthogonal import gram_newton_schulz, newton_schulz
from tilestep.linalg.symmetric import BLOCKS, Blocks, symmetric_product, uses_symmetric_kernel
from tilestep.runtime import batches

SHAPES = [(256, 256), (256, 768), (768, 256), (64, 64), (24, 40), (320, 1088), (256, 768)]


def drawn(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tuple(shape), device="cuda", generator=generator)


def params_of(shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.nn.Parameter((0.02 * drawn(shape, seed)).to(dtype)) for seed, shape in enumerate(shapes)]


def set_gradients(params: Sequence[torch.Tensor], step: int) -> None:
    for seed, param in enumerate(params):
        value = drawn(param.shape, 1000 * step + seed).to(param.dtype)
        if param.grad is None:
            param.grad = value
        else:
            param.grad.copy_(value)


@pytest.mark.parametrize("blocks", [BLOCKS, Blocks(64, 64, 4, 4)], ids=str)
@pytest.mark.parametrize(
    ("rows", "inner"), [(256, 256), (256, 1024), (64, 128), (320, 704), (2048, 5504), (192, 192), (208, 80)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_symmetric_products(rows: int, inner: int, dtype: torch.dtype, blocks: Blocks) -> None:
    operand = (drawn((3, rows, inner)) / inner**0.5).to(dtype)
    square = drawn((3, rows, rows)).to(torch.float16)
    square = ((square + square.mT) / 2).contiguous()
    scale = torch.tensor([1.0, 0.5, 2.0], device="cuda")
    for tall in {False, inner > rows}:
        stored = operand.mT.contiguous() if tall else operand
        out = torch.full_like(square, torch.nan)
        options = {"base": square, "alpha": 0.5, "beta": -2.0, "shift": 3.0, "scale": scale}
        symmetric_product(stored, stored, out, **options, blocks=blocks)  # type: ignore[arg-type]
        exact = operand.double() @ operand.double().mT
        identity = torch.eye(rows, device="cuda", dtype=torch.float64)
        wanted = scale[:, None, None] * (0.5 * exact - 2.0 * square.double() + 3.0 * identity)
        assert torch.equal(out, out.mT)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
        symmetric_product(stored, stored, out, blocks=blocks)
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


def plain_newton_schulz(
    batch: torch.Tensor, numbers: Sequence[float], precision: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonal, "uses_symmetric_kernel", lambda _: False)
        return newton_schulz([batch], numbers, None, precision=precision)


@pytest.mark.parametrize("on_grams", [True, False])
@pytest.mark.parametrize("shape", [(1024, 2816), (2816, 1024), (512, 512), (768, 2048), (2048, 2048)])
def test_orthogonalize_is_as_near_to_float64_as_torch_s(shape: tuple[int, int], on_grams: bool) -> None:
    short = min(shape)
    left, _ = torch.linalg.qr(drawn((shape[0], short)))
    right, _ = torch.linalg.qr(drawn((shape[1], short), 1))
    falling = left * 10 ** torch.linspace(0, -3, short, device="cuda") @ right.mT
    batch = torch.stack([drawn(shape), falling, 1e-6 * drawn(shape, 2)]).to(torch.bfloat16)
    assert uses_symmetric_kernel(batch) == (min(shape) >= 768)
    found = gram_newton_schulz(batch, JORDAN, 1e-7, None) if on_grams else plain_newton_schulz(batch, NUMBERS)
    wanted = exact(batch)
    for place in range(len(batch)):
        param = torch.nn.Parameter(torch.zeros(shape, device="cuda"))
        param.grad = batch[place].float()
        torch.optim.Muon([param], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False).step()
        theirs = -param.detach().double() / max(1.0, shape[0] / shape[1]) ** 0.5
        error, known = (float((value - wanted[place]).norm()) for value in (found[place].double(), theirs))
        assert error < 1.1 * known


@pytest.mark.parametrize("name", ["jordan", "quintic", "polar_express", "cans", "cubic5"])
def test_a_large_singular_value_that_the_first_step_makes_small_is_kept(name: str) -> None:
    batch, rows = dominated(1024, 1536).to("cuda", torch.bfloat16), rows_of(name)
    assert uses_symmetric_kernel(batch)
    wanted = exact(batch, rows)
    ours, plain = (
        (found.double() - wanted).norm(dim=(-2, -1)) / wanted.norm(dim=(-2, -1))
        for found in (
            gram_newton_schulz(batch, rows, 1e-7, None),
            plain_newton_schulz(batch, [1e-7, *flat(rows)]),
        )
    )
    assert bool((ours < 1.1 * plain + 5e-3).all()), (ours, plain)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_each_set_leaves_the_singular_values_of_its_iteration(name: str, precision: str) -> None:
    """On Gram matrices where these take them; in 16 bits as near as the plain iteration, and in float32 near."""
    batch = conditioned(1024, 1536, "cuda")[:4]
    batch = batch.to(torch.bfloat16).float() if precision == "bfloat16" else batch
    rows = rows_of(name)
    wanted = exact(batch, rows)
    found = torch.stack([tilestep.orthogonalize(one, coefficients=name, precision=precision) for one in batch])
    if precision == "float32":
        assert bool(((found - wanted).norm(dim=(-2, -1)) < 1e-3 * wanted.norm(dim=(-2, -1))).all())
        return
    dtype = getattr(torch, precision)
    assert uses_symmetric_kernel(batch.to(dtype))
    plain = plain_newton_schulz(batch, [1e-7, *flat(rows)], dtype)
    values = torch.linalg.svdvals(wanted)
    ours, theirs = (
        (torch.linalg.svdvals(one.double()) - values).square().mean(dim=-1).sqrt() for one in (found, plain)
    )
    assert bool((ours < 1.1 * theirs + 5e-3).all()), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_torch_s(dtype: torch.dtype) -> None:
    mine, theirs, start = params_of(dtype=dtype), params_of(dtype=dtype), params_of(dtype=dtype)
    ours, torchs = tilestep.Muon(mine, lr=0.02, weight_decay=0.0), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    for step in range(6):
        for optimizer, params in ((ours, mine), (torchs, theirs)):
            set_gradients(params, step)
            optimizer.step()
    for left, right, begin in zip(mine, theirs, start):
        moved = (right - begin).detach().float()
        apart = (left - right).detach().float()
        assert apart.norm() < 0.05 * moved.norm()
        known = torchs.state[right]["momentum_buffer"]
        torch.testing.assert_close(ours.state[left]["momentum_buffer"], known, rtol=2e-2, atol=2e-2)


def test_two_runs_are_equal_and_nothing_waits() -> None:
    results = []
    for _ in range(2):
        params = params_of(dtype=torch.bfloat16)
        optimizer = tilestep.Muon(params, lr=0.02, max_grad_norm=1.0)
        set_gradients(params, 0)
        optimizer.step()
        with no_synchronization():
            for _ in range(3):
                optimizer.step()
        results.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *results))


def test_a_captured_step_is_the_step() -> None:
    mine, theirs = params_of(), params_of()
    ours, plain = tilestep.Muon(mine, lr=0.02), tilestep.Muon(theirs, lr=0.02)
    for optimizer, params in ((ours, mine), (plain, theirs)):
        set_gradients(params, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(1, 4):
        set_gradients(mine, step)
        graph.replay()
        set_gradients(theirs, step)
        plain.step()
    for left, right in zip(mine, theirs):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def recorded_passes(optimizer: tilestep.Optimizer) -> list[Any]:
    [engine] = optimizer._current_plan().engines
    return [each for passes in engine.passes for each in passes.matrices._recorded.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_recorded_in_graphs_are_the_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of 40 matrices, one skipped, all with other rates; from the third on they replay graphs."""
    results = []
    for least in (32, 1000):
        monkeypatch.setattr(batches, "LEAST_MATRICES", least)
        params = params_of([(256, 256), (64, 192), (96, 32), (512, 128), (48, 48)] * 8, dtype)
        optimizer = tilestep.Muon(params, lr=0.02, skip_nonfinite=True)
        for step in range(6):
            set_gradients(params, step)
            if step == 4:
                params[3].grad[1, 1] = torch.nan
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            with no_synchronization() if step in (1, 4, 5) else nullcontext():
                optimizer.step()
        recorded = [each.is_recorded for each in recorded_passes(optimizer)]
        assert recorded == ([True] if least == 32 else [])
        assert int(optimizer.skipped_steps) == 1
        results.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *results))


def test_recordings_give_their_memory_back() -> None:
    def train() -> None:
        params = params_of([(256, 256)] * 40)
        optimizer = tilestep.Muon(params, lr=0.02)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
        assert [each.is_recorded for each in recorded_passes(optimizer)] == [True]

    train()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_skipped_step_changes_nothing() -> None:
    params = params_of()
    optimizer = tilestep.Muon(params, lr=0.02, skip_nonfinite=True)
    set_gradients(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    buffers = [optimizer.state[param]["momentum_buffer"].clone() for param in params]
    set_gradients(params, 1)
    params[2].grad[3, 3] = torch.inf
    optimizer.step()
    assert all(map(torch.equal, [param.detach() for param in params], before))
    assert all(torch.equal(optimizer.state[param]["momentum_buffer"], known) for param, known in zip(params, buffers))
    set_gradients(params, 2)
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)


def test_matrices_and_the_rest_in_one_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)).cuda()
    groups = tilestep.muon_groups(model, others={"lr": 1e-3})
    optimizer = tilestep.Muon(groups, lr=0.02)
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        model(torch.ones(8, 64, device="cuda")).square().sum().backward()
        optimizer.step()
    assert not any(torch.equal(param.detach(), known) for param, known in zip(model.parameters(), before))


def test_the_plain_iteration_is_left_for_what_the_kernel_does_not_take() -> None:
    batch = drawn((2, 1100, 1900)).to(torch.bfloat16)
    assert not uses_symmetric_kernel(batch)
    found = newton_schulz([batch], NUMBERS, None)
    assert float((found.double() - exact(batch)).norm() / exact(batch).norm()) < 0.05


def test_soap_is_the_rule_in_float64_and_waits_only_to_decompose() -> None:
    rule = tilestep.registry["SOAP"]
    shapes = [(8, 8), (12, 12), (8, 8), (5,), (30, 6), (20, 20)]  # vectors and sides that are too long stay as they are
    params = [torch.nn.Parameter(drawn(shape, seed).double()) for seed, shape in enumerate(shapes)]
    given = {"precondition_frequency": 3, "lr": 0.01, "max_precond_dim": 12}
    values = []
    for param in params:
        sides = [param.new_zeros(side, side) if param.dim() > 1 and side <= 12 else None for side in param.shape]
        left, right = sides if param.dim() > 1 else (None, None)
        moments = [torch.zeros_like(param.detach()) for _ in range(2)]
        values.append([param.detach().clone(), *moments, left, right, left, right])
    optimizer = tilestep.SOAP(params, **given, skip_nonfinite=True)
    for step in range(8):
        set_gradients(params, step)
        for place, param in enumerate(params):
            first, *rest = values[place]
            values[place] = list(rule(first, param.grad, *rest, **given, step=step + 1))
        if step > 1 and step % 3 == 2:
            with no_synchronization():
                optimizer.step()
        else:
            optimizer.step()
    for param, value in zip(params, values):
        torch.testing.assert_close(param.detach(), value[0], rtol=1e-6, atol=1e-8)
    set_gradients(params, 8)
    params[1].grad[0, 0] = torch.nan
    before = [{name: kept.clone() for name, kept in optimizer.state[param].items()} for param in params]
    optimizer.step()
    for param, known in zip(params, before):
        assert all(torch.equal(kept, known[name]) for name, kept in optimizer.state[param].items())


def split_apart(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Two groups of queries, keys and values."""
    groups = tensor.unflatten(0, (2, 256))
    return [groups[:, first:stop].flatten(0, 1) for first, stop in ((0, 128), (128, 192), (192, 256))]


INSIDE: dict[str, tuple[tuple[int, ...], dict[str, Any], Any]] = {
    "stack": ((6, 320, 256), {}, list),
    "large stack": ((2, 1024, 1536), {}, list),
    "heads": ((512, 384), {"heads": 8}, lambda tensor: list(tensor.unflatten(0, (8, 64)))),
    "convolution": ((128, 64, 3, 3), {"flatten": True}, lambda tensor: [tensor.flatten(1)]),
    "splits": ((512, 384), {"splits": (256, 128, 128)}, lambda tensor: list(tensor.split((256, 128, 128)))),
    "splits in groups": ((512, 384), {"splits": (128, 64, 64)}, split_apart),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INSIDE)
def test_matrices_inside_of_tensors_are_parameters_of_their_own(name: str, dtype: torch.dtype) -> None:
    shape, given, pieces = INSIDE[name]
    results = []
    for _ in range(2):
        start = (0.02 * drawn(shape)).to(dtype)
        param, own = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(one.clone()) for one in pieces(start)]
        arguments = {"lr": 0.02, "weight_decay": 0.0, "master_weights": dtype is torch.bfloat16}
        optimizers = tilestep.Muon([param], **arguments, **given), tilestep.Muon(own, **arguments)
        for step in range(4):
            gradient = drawn(shape, 100 + step).to(dtype)
            param.grad = gradient
            for piece, one in zip(own, pieces(gradient)):
                piece.grad = one.clone()
            with no_synchronization() if step else nullcontext():
                for optimizer in optimizers:
                    optimizer.step()
        for found, wanted, begin in zip(pieces(param.detach()), own, pieces(start)):
            moved = (wanted.detach() - begin).float()
            assert float((found - wanted.detach()).float().norm()) < 1e-2 * float(moved.norm())
        results.append(param.detach().clone())
    assert torch.equal(*results)


@tilestep.rule
def normalized(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Reductions over each matrix, its rows and its columns."""
    update = tilestep.orthogonalize(grad) * grad.norm()
    return param - lr * update / update.abs().amax(dim=-1, keepdim=True) - lr * grad.mean(dim=-2, keepdim=True)


@pytest.mark.parametrize("name", INSIDE)
def test_rules_reduce_over_each_matrix_alone(name: str) -> None:
    shape, given, pieces = INSIDE[name]
    start = drawn(shape)
    param, own = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(one.clone()) for one in pieces(start)]
    optimizers = (
        tilestep.Optimizer([{"params": [param], **given}], normalized, lr=0.1),
        tilestep.Optimizer(own, normalized, lr=0.1),
    )
    for step in range(3):
        param.grad = drawn(shape, 100 + step)
        for piece, one in zip(own, pieces(param.grad)):
            piece.grad = one.clone()
        for optimizer in optimizers:
            optimizer.step()
    for found, wanted, begin in zip(pieces(param.detach()), own, pieces(start)):
        moved = (wanted.detach() - begin).norm()
        assert float((found - wanted.detach()).norm()) < 1e-2 * float(moved)


def test_stacks_are_captured_and_offloaded_and_splits_are_refused_there() -> None:
    def make(**given: Any) -> tuple[list[Any], Any]:
        params = [torch.nn.Parameter(0.02 * drawn((4, 320, 256))), torch.nn.Parameter(0.02 * drawn((512, 256)))]
        return params, tilestep.Muon([{"params": params[:1]}, {"params": params[1:], **given}], lr=0.02)

    mine, captured = make(heads=4)
    theirs, plain = make(heads=4)
    moved, offloaded = make(heads=4)
    tilestep.offload(offloaded, where="gpu")
    for params, optimizer in ((mine, captured), (theirs, plain), (moved, offloaded)):
        set_gradients(params, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(1, 4):
        for params in (mine, theirs, moved):
            set_gradients(params, step)
        graph.replay()
        plain.step()
        offloaded.step()
    for left, right, other in zip(mine, theirs, moved):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, right, rtol=1e-6, atol=1e-6)
    params, optimizer = make(splits=(256, 128, 128))
    set_gradients(params, 0)
    optimizer.step()
    with pytest.raises(tilestep.CaptureError, match="or splits of several sizes, whose views a graph does not follow"):
        optimizer.prepare_capture()
    with pytest.raises(ValueError, match="has splits of several sizes, which offload does not support"):
        tilestep.offload(optimizer, where="gpu")
    before = params[1].detach().clone()
    set_gradients(params, 1)
    optimizer.step()
    assert not torch.equal(params[1].detach(), before)
