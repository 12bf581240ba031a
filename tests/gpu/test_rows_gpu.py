"""Passes over rows, columns and other slices on a GPU: against the rules themselves, in every layout, repeatably."""

from __future__ import annotations

import pytest
import torch
from row_rules import RULES, Referee, Shape, drawn, random_rule

import tilestep
from tilestep.backends.triton import slices
from tilestep.rules import Rule

# Full tiles, ragged ones, odd rows, small matrices in batches, and more parts of a column than are combined at once.
SHAPES: list[Shape] = [(5, 9), (130, 70), (33, 71), (1, 6), (4, 1), (128, 512), (300, 3), (5000, 64), (64, 5001)]
SHAPES += [(3, 4, 5), (6, 4, 3, 3), (2, 3, 70, 65), (128, 64, 3, 3), (2, 3, 1, 4, 2)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}


def run(chosen: Rule, hyper: dict[str, object], shapes: list[Shape], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    start = drawn(shapes, dtype)
    referee = Referee(chosen, start, hyper)
    params = [torch.nn.Parameter(tensor.cuda()) for tensor in start]
    optimizer = tilestep.Optimizer(params, chosen, **hyper)
    for step in range(3):
        gradients = drawn(shapes, dtype, seed=step + 1)
        for param, gradient in zip(params, gradients):
            # Channels-last and transposed gradients lie otherwise than their parameters at the second step.
            param.grad = (gradient.contiguous() if step == 1 else gradient).cuda()
        optimizer.step()
        referee.step(gradients)
    limit = TOLERANCE.get(dtype, 3e-2)
    for param, expected, states in zip(params, referee.params, referee.states):
        torch.testing.assert_close(param.detach().cpu().double(), expected, rtol=limit, atol=limit)
        for name, state in zip(chosen.state_names, states):
            if name in optimizer.state[param]:
                found = optimizer.state[param][name].cpu().double()
                torch.testing.assert_close(found, state, rtol=limit, atol=limit)
    return params


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_rules_over_matrices_and_batches_of_them(name: str, dtype: torch.dtype) -> None:
    run(*RULES[name], SHAPES, dtype)


@pytest.mark.parametrize("seed", range(4))
def test_random_rules(seed: int) -> None:
    run(random_rule(seed), {}, [(5, 9), (70, 131), (128, 512), (3, 4, 5), (2, 3, 66, 65)], torch.float32)


@pytest.fixture(params=[4096, 32768], ids=["small tiles", "large tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as a few and as many tensors have them: rows that end in the middle of a tile, and of a sub-block."""
    monkeypatch.setattr(slices, "_MIN_ELEMENTS", request.param)


LONG: list[Shape] = [(700, 384), (301, 200), (1000, 24), (515, 256), (514, 130), (2, 300, 320)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_many_sub_blocks(dtype: torch.dtype) -> None:
    run(*RULES["adafactor"], LONG, dtype)
    if dtype is torch.float32:
        run(*RULES["mixed"], LONG, dtype)
        run(*RULES["extremes"], LONG, dtype)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_repeat_bit_by_bit(dtype: torch.dtype) -> None:
    first, again = (run(*RULES["adafactor"], [*SHAPES, *LONG], dtype) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, again))


@pytest.mark.usefixtures("tiles")
def test_elements_that_are_only_read_by_rows_do_not_depend_on_alignment() -> None:
    """The same numbers at an address that is no multiple of 16: other loops, and other orders of sums."""
    results = []
    for shift in (0, 1):
        generator = torch.Generator(device="cuda").manual_seed(0)
        drawn_at = [torch.empty(515 * 256 + 1, device="cuda")[shift:][: 515 * 256].view(515, 256) for _ in range(2)]
        param = torch.nn.Parameter(drawn_at[0].normal_(generator=generator))
        param.grad = drawn_at[1].normal_(generator=generator)
        tilestep.Adafactor([param]).step()
        results.append(param.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
