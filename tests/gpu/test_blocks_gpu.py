"""States in blocks on a GPU: kept and read as torch does on a CPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import test_resharding as resharding
import torch
from block_rows import (
    FORMATS,
    RULES,
    SHAPES,
    as_bits,
    check_float8,
    check_infinite_blocks,
    check_largest_roots,
    numbers,
)
from rank_processes import each_passes
from torch import nn

import tilestep
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of

LARGE: list[tuple[int, ...]] = [(4096, 1024), (1000, 4100), (3_000_001,)]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_kept_and_read_as_torch_does_on_a_cpu(format: str, strided: bool, signed: bool) -> None:
    shapes = SHAPES if strided else [*SHAPES, *LARGE]
    params = []
    for shape in shapes:
        zeros = torch.zeros(shape[::-1] if strided else shape, device="cuda")
        params.append(torch.nn.Parameter(zeros.permute(*range(zeros.dim())[::-1]) if strided else zeros))
    optimizer: Any = tilestep.Optimizer([("p", p) for p in params], RULES[signed], state_dtype=lambda _: format)
    given = [numbers(shape, place) for place, shape in enumerate(shapes)]
    for param, values in zip(params, given):
        param.grad = values.cuda()
    optimizer.step()
    wanted_values = []
    for param, values in zip(params, given):
        state = optimizer.state[param]
        storage = STATE_FORMATS[format](signed)
        if storage.arrays("kept")[1].name not in state:
            storage = STATE_FORMATS["int8"](signed)
        wanted = {
            array.name: torch.empty(shape_of_entries(param.shape, array.elements), dtype=array.dtype)
            for array in storage.arrays("kept")
        }
        stored_in(storage, wanted, "kept", values if signed else values.abs(), param.shape)
        for key, array in wanted.items():
            different = as_bits(state[key].cpu().contiguous()) != as_bits(array)
            assert not different.any(), (key, tuple(param.shape), int(different.sum()))
        wanted_values.append(values_of(storage, wanted, "kept", shape=param.shape))
    optimizer.step()
    for param, values in zip(params, wanted_values):
        assert torch.equal(as_bits(param.detach().cpu().contiguous()), as_bits(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_is_torch_s(dtype: torch.dtype) -> None:
    check_float8(dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_roots_of_infinite_blocks_and_of_the_largest(dtype: torch.dtype) -> None:
    check_infinite_blocks(dtype, device="cuda")
    check_largest_roots(dtype, device="cuda")


@pytest.mark.parametrize("format", FORMATS)
def test_a_captured_step_is_an_eager_one(format: str) -> None:
    runs = []
    for captures in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in [(512, 1024), (300, 260)]]
        optimizer = tilestep.AdamW([("a", params[0]), ("b", params[1])], lr=1e-2, state_dtype=format, max_grad_norm=1.0)
        for param in params:
            param.grad = torch.zeros_like(param)
        step = tilestep.capture(optimizer).replay if captures else optimizer.step
        for _ in range(6):
            for param in params:
                gradient = torch.randn_like(param)
                if param.grad is None:
                    param.grad = gradient
                else:
                    param.grad.copy_(gradient)
            step()
        runs.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("format", FORMATS)
def test_streamed_blocks_are_those_on_the_device(format: str) -> None:
    """In chunks of every size, and loaded again; codes are on the host, two to a byte where they are packed."""
    shapes = [(64, 300), (150, 256), (5000,), (7,)]

    def run(home: Any) -> tuple[Any, list[torch.nn.Parameter]]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in shapes]
        made = tilestep.AdamW([(f"p{place}", param) for place, param in enumerate(params)], state_dtype=format)
        optimizer: Any = made if home is None else move_state(made, home, "gpu", "for a test")
        for _ in range(4):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).cuda()
            optimizer.step()
        if home is not None:
            optimizer.wait()
        return optimizer, params

    _, wanted = run(None)
    for room, buffers in ((1, 3), (20_000, 2), (1 << 30, 1)):
        home = StreamedState(torch.device("cuda:0"), room, buffers)
        optimizer, params = run(home)
        assert all(map(torch.equal, params, wanted))
        states = [optimizer.state[param] for param in params]
        assert all(home.memory.holds(state.get("exp_avg_codes", state.get("exp_avg"))) for state in states)
    wide = tilestep.full_precision(optimizer.state_dict())
    assert all(wide["state"][place]["exp_avg"].shape == shape for place, shape in enumerate(shapes))
    plain = tilestep.AdamW(wanted)
    plain.load_state_dict(optimizer.state_dict())
    for place, param in enumerate(wanted):
        assert torch.equal(plain.state[param]["exp_avg"].cpu(), wide["state"][place]["exp_avg"].cpu())


def resharded() -> None:
    resharding.go_over(False, (1, 2, 1))


def resharded_by_fsdp() -> None:
    resharding.go_over(True, (1, 2, 1))


def a_half_of_the_state() -> None:
    """Of two ranks each has half of the codes, scales and corrections; all of it would be 3.03 bytes a parameter."""
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).bfloat16()
    numel = sum(param.numel() for param in model.parameters())
    optimizer = tilestep.shard(
        tilestep.AdamW(model.parameters(), state_dtype="int8", master_weights="int8"), model, grad_buffer="bucket"
    )
    own = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert own == pytest.approx((3 + 4 / 128) * numel / 2, rel=0.001)
    torch.cuda.synchronize()
    # Parameters, and no whole copy of anything.
    assert torch.cuda.memory_allocated() - before < 2 * numel + 1.1 * own + 2**24
    for _ in range(3):
        model(torch.ones(4, 2048, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    optimizer.wait()
    assert all(param.isfinite().all() for param in model.parameters())


ON_TWO = [resharded, resharded_by_fsdp, a_half_of_the_state]

test_on_two_gpus = pytest.mark.two_gpus(each_passes(ON_TWO, 2, backend="nccl", default_gpu=True))
