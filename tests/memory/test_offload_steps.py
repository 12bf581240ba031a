"""Steps with the state on the host: to the bit what the optimizer does without, and what float64 makes of the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float64_reference import LAYOUTS
from offloaded_pairs import HOMES, MATRICES, SHAPES, TILE, Homes, Pair, on_host, streamed
from scripts import all_equal_in_the_interpreter

import tilestep
from tilestep.memory.copies import cut_chunks
from tilestep.memory.offloaded import host_arrays
from tilestep.memory.streaming import StreamedState

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Lion": {},
    "LAMB": {},
    "LARS": {"lr": 0.1, "momentum": 0.9},
    "Adafactor": {},
    "Prodigy": {},
    "AdEMAMix": {},
    "Muon": {},
    "SOAP": {},
    "ScheduleFreeAdamW": {},
}


@pytest.fixture(params=HOMES.values(), ids=HOMES.keys())
def home(request: pytest.FixtureRequest) -> Homes:
    return request.param


def shapes_for(rule: str) -> list[tuple[int, ...]]:
    return MATRICES if rule in ("Muon", "SOAP") else SHAPES


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_the_same_to_the_bit(rule: str) -> None:
    """test_conformance.py has other storages."""
    for home in (streamed(), streamed(200_000, 2), on_host(200_000)):
        pair = Pair(lambda params: tilestep.Optimizer(params, rule, **RULES[rule]), home, shapes_for(rule))
        for step in range(3 if rule == "SOAP" else 6):
            # Some parameters have no gradient in some steps.
            pair.step(missing=lambda place, step=step: (place + step) % 5 == 1)
        pair.compare()


def test_changes_after_a_checkpoint_are_what_the_parameters_hold() -> None:
    """Also where the update works on copies of them, which a load gives up."""
    for home in (streamed(), on_host()):
        pair = Pair(lambda params: tilestep.AdamW(params, track_changes=True), home, [(5,), (4, 6)])
        pair.step()
        for params, optimizer in ((pair.plain, pair.reference), (pair.moved, pair.optimizer)):
            list(optimizer.changes())
            optimizer.load_state_dict(optimizer.state_dict())
            with torch.no_grad():
                params[0].fill_(7.0)
            (name, indices, values), *others = optimizer.changes()
            assert (name, indices.tolist(), values.tolist(), others) == ("0.0", [0, 1, 2, 3, 4], [7.0] * 5, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_follows_float64(layout: str, home: Homes) -> None:
    """torch's own AdamW in float64, on the same values in whatever order they lie."""
    generator = torch.Generator().manual_seed(0)
    make_param, make_gradient = LAYOUTS[layout]
    param = torch.nn.Parameter(make_param(torch.float32, generator))
    wanted = torch.nn.Parameter(param.detach().double().contiguous())
    optimizer = home(tilestep.AdamW([param], lr=1e-2, weight_decay=0.1, max_grad_norm=3.0))
    referee = torch.optim.AdamW([wanted], lr=1e-2, weight_decay=0.1)
    for _ in range(4):
        gradient = make_gradient(torch.float32, generator)
        param.grad, wanted.grad = gradient, gradient.double().contiguous()
        torch.nn.utils.clip_grad_norm_([wanted], 3.0)
        optimizer.step()
        referee.step()
    torch.testing.assert_close(param.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        buffer = optimizer.state[param][name]
        assert buffer.shape == param.shape
        torch.testing.assert_close(buffer.double(), referee.state[wanted][name], rtol=1e-5, atol=1e-6)


def test_tiny_chunks_cut_tensors() -> None:
    pair = Pair(tilestep.AdamW, streamed())
    [segment] = [passes.segment for passes in pair.optimizer.plan.engines[0].passes]
    update = segment.streamer
    assert len(update.chunks) == segment.tiles.count > len(SHAPES)
    assert sum(len(chunk.tiles) for chunk in update.chunks) == segment.tiles.count


def test_chunks_keep_to_their_size_and_copy_long_runs() -> None:
    """What a chunk has of an array is one copy: buffers of one name lie one behind the other."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(64, 300)] * 40]
    optimizer = streamed(1 << 20)(tilestep.AdamW(params))
    [segment] = [passes.segment for passes in optimizer.plan.engines[0].passes]
    update = segment.streamer
    assert len(update.chunks) > 3
    for chunk in update.chunks:
        assert chunk.size <= (1 << 20) + 2 * 256
        assert all(len(runs) == 1 for runs in chunk.runs.values())
    copied = sum(run.host.numel() for chunk in update.chunks for runs in chunk.runs.values() for run in runs)
    assert copied >= 2 * 4 * 40 * 64 * 300


def test_only_what_a_pass_touches_is_moved() -> None:
    """LAMB's second pass reads the moments and writes none of them."""
    pair = Pair(tilestep.LAMB, streamed())
    [segment] = [passes.segment for passes in pair.optimizer.plan.engines[0].passes]
    update = segment.streamer
    moments = ("exp_avg", "exp_avg_sq")
    assert update._traffic == [(moments, moments), (moments, ())]


def test_parameters_that_kernels_walk_by_coordinates_stay_whole() -> None:
    wide = torch.nn.Parameter(torch.zeros(300, 400)[:, ::2])
    optimizer = streamed()(tilestep.AdamW([wide]))
    [passes] = optimizer.plan.engines[0].passes
    assert passes.segment.tiles.count > 1
    assert len(cut_chunks(passes, host_arrays(passes.segment.spec), TILE)) == 1


def test_state_of_one_buffer_size_is_on_the_device_at_a_time() -> None:
    optimizer = streamed(1 << 20, 2)(tilestep.AdamW([torch.nn.Parameter(torch.zeros(3_000_000))]))
    home = optimizer.memory
    assert isinstance(home, StreamedState)
    assert home.device_bytes <= 2 * (1 << 20) + 2048
    assert home.host_bytes >= 2 * 4 * 3_000_000


def test_the_gpu_s_kernels_work_window_by_window() -> None:
    """The Triton kernels in their interpreter, against the same without ranges of tiles."""
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_windows.py"))
