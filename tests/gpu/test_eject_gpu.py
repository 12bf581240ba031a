"""Ejected files on a GPU: bits equal tilestep's, and what a step takes beside tilestep's.

python -m pytest tests/gpu/test_eject_gpu.py -n 6
python -m pytest tests/gpu/test_eject_gpu.py -s -k times
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ejected_modules import NAMES, Pair, made

import tilestep

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = [(7,), (640, 130), (3, 40, 33), (70_001,), (2, 3, 4, 5), (), (512, 1024), (0,)]


def check_equal(pair: Pair) -> None:
    for name, left, right in pair.tensors():
        assert left.dtype is right.dtype and left.shape == right.shape, name
        if left.element_size() == 1:
            left, right = left.view(torch.uint8), right.view(torch.uint8)
        same = (left == right) | (left.isnan() & right.isnan()) if left.is_floating_point() else left == right
        assert bool(same.all()), f"{name} of shape {tuple(left.shape)}: {(left.double() - right.double()).abs().max()}"


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_tilesteps_bit_for_bit(name: str, clip: bool, tmp_path: Path) -> None:
    module = made(name, tmp_path, clip=clip)
    for dtype in DTYPES.values():
        pair = Pair(module, name, shapes=SHAPES, dtype=dtype, device="cuda", clip=clip)
        pair.step(5)
        check_equal(pair)
        if clip:
            assert torch.equal(pair.ejected.grad_norm.float(), pair.whole.grad_norm.float().reshape(()))


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"masters-{kind}": {"master_weights": kind} for kind in (True, "remainder", "kahan", "int8")},
    **{
        f"states-{kept}": {"state_dtype": kept}
        for kept in ("float32", "bfloat16", "float16", "scaled_float16", "float8_e4m3", "int8", "int4")
    },
    "masters-remainder-states-int8": {"master_weights": "remainder", "state_dtype": "int8"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_formats_equal_tilesteps_bit_for_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    module = made(name, tmp_path, clip=True, **options)
    dtypes = [torch.bfloat16] if isinstance(options.get("master_weights"), str) else DTYPES.values()
    shapes = [*SHAPES[:-1], (64, 4097), (4096, 8), (40, 16, 3, 3)]
    for dtype in dtypes:
        pair = Pair(module, name, shapes=shapes, dtype=dtype, device="cuda", clip=True, **options)
        pair.step(5)
        check_equal(pair)


def test_mixed_dtypes_and_groups(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path, clip=True)
    pairs = []
    for kind in (module, tilestep):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(1000 + 7 * i, device="cuda").to(dtype))
            for i, dtype in enumerate([torch.float32, torch.bfloat16] * 4)
        ]
        groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.5, "max_grad_norm": 2.0}]
        optimizer = kind.AdamW(groups, max_grad_norm=1.0)
        for step in range(6):
            for place, param in enumerate(params):
                param.grad = torch.randn_like(param) if (place + step) % 4 else None
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        pairs.append(params)
    for ours, theirs in zip(*pairs):
        assert torch.equal(ours, theirs)


def test_states_go_between_devices_and_optimizers(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path)
    pair = Pair(module, "AdamW", device="cuda")
    pair.step(2)
    other = module.AdamW([torch.nn.Parameter(param.detach().clone()) for param in pair.ours])
    other.load_state_dict(pair.whole.state_dict())
    pair.whole.load_state_dict(pair.ejected.state_dict())
    for theirs, ours in zip(other.param_groups[0]["params"], pair.ours):
        ours.grad = pair.draw(tuple(ours.shape))
        theirs.grad = ours.grad.clone()
    other.step()
    pair.ejected.step()
    for theirs, ours in zip(other.param_groups[0]["params"], pair.ours):
        assert torch.equal(theirs, ours)


def test_it_imports_triton_at_the_first_step_alone(tmp_path: Path) -> None:
    module = made("Lion", tmp_path)
    assert module.tl is None
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = module.Lion([param])
    assert module.tl is None
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert module.tl is not None


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Prodigy", "NAdam"])
def test_the_host_waits_for_nothing(name: str, tmp_path: Path) -> None:
    module = made(name, tmp_path, clip=True)
    for dtype in DTYPES.values():
        params = [torch.nn.Parameter(torch.ones(1000, 30, device="cuda", dtype=dtype)) for _ in range(3)]
        optimizer = getattr(module, name)(params, max_grad_norm=1.0)
        for step in range(4):
            for param in params:
                param.grad = torch.ones_like(param)  # new addresses
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_a_capture_is_refused(tmp_path: Path) -> None:
    module = made("Lion", tmp_path)
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = module.Lion([param])
    optimizer.step()
    with pytest.raises(RuntimeError, match="replays would repeat"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    optimizer.step()


@pytest.mark.two_gpus
def test_parameters_on_another_device_than_the_current(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path, clip=True)
    runs = []
    for device in ("cuda:0", "cuda:1"):
        param = torch.nn.Parameter(torch.ones(5000, device=device))
        optimizer = module.AdamW([param], max_grad_norm=0.5)
        for _ in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
        runs.append(param.detach().cpu())
    assert torch.equal(*runs)


def _times(optimizer: Any, rounds: int = 20) -> tuple[float, float, float]:
    """Milliseconds of a step: of the device, where the host is ahead; of the host; of both until the end."""
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        optimizer.step()
    host = (time.perf_counter() - begin) / rounds
    torch.cuda.synchronize()
    both = (time.perf_counter() - begin) / rounds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # The host gets ahead while the device sleeps, so that events enclose the device's work alone.
    torch.cuda._sleep(int(2e9 * max(host * rounds, 0.05)))
    events[0].record()
    for _ in range(rounds):
        optimizer.step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / rounds, host * 1e3, both * 1e3


@pytest.mark.parametrize(
    "options", [{}, {"master_weights": True}, {"state_dtype": "int8"}], ids=["", "masters", "int8"]
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_times(dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    """What both take; printed, as machines differ."""
    if dtype is torch.float32 and "master_weights" in options:
        pytest.skip("float32 parameters have no masters")
    module = made("AdamW", tmp_path, clip=True, **options)
    shapes = [(2048, 2048), (512, 2048), (5632, 2048), (2048,)] * 40
    times = {}
    for kind, own in ((module, {}), (tilestep, options)):
        params = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = kind.AdamW(params, max_grad_norm=1.0, **own)
        times[kind] = min(_times(optimizer) for _ in range(3))
        del optimizer, params
    (ours, our_host, our_wall), (theirs, their_host, their_wall) = times[module], times[tilestep]
    print(
        f"\nAdamW with clip, {dtype}, {options or 'plain'}, {len(shapes)} tensors: "
        f"device {ours:.3f} ms, tilestep {theirs:.3f} ({ours / theirs:.3f} times); "
        f"host {our_host:.3f} ms, tilestep {their_host:.3f}; both {our_wall:.3f} ms, tilestep {their_wall:.3f}"
    )
