"""Tile shapes: what is looked up, what a stored table may say, and that every shape gives the same training."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

import tilestep
from tilestep.backends import tuning
from tilestep.backends.tuning import (
    CANDIDATES,
    STAGED,
    TileShape,
    candidates,
    default_shape,
    device_key,
    forced_shape,
    save_shapes,
    signature,
)
from tilestep.bench.tune import KINDS, jobs, tune
from tilestep.planning.describe import spec_for

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_cache")


def spec_of(name: str, **kwargs: object) -> tuning.KernelSpec:
    return spec_for(tilestep.registry[name], **kwargs)


def span_of(optimizer: tilestep.Optimizer) -> int:
    return optimizer._current_plan().engines[0].passes[0].segment.tiles.size


def optimizer(name: str = "AdamW") -> tilestep.Optimizer:
    return getattr(tilestep, name)([torch.nn.Parameter(torch.ones(40_000))])


def test_rules_that_move_the_same_share_a_signature() -> None:
    assert signature(spec_of("AdamW")) == signature(spec_of("Adam")) == "16 B read, 12 B written; 4 float32"
    different = [
        signature(spec_of("AdamW", dtype=torch.bfloat16)),
        signature(spec_of("AdamW", dtype=torch.bfloat16, master_weights=True)),
        signature(spec_of("Lion")),
        signature(spec_of("LAMB")),
        signature(spec_of("AdamW")),
    ]
    assert len(set(different)) == len(different)
    assert "reductions" in signature(spec_of("LAMB"))


@pytest.mark.parametrize("device_type", CANDIDATES)
@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_candidates(device_type: str, kind: str) -> None:
    dtype, options = KINDS[kind]
    shape = default_shape(spec_of("AdamW", dtype=dtype, **options), device_type)
    assert shape in CANDIDATES[device_type] + STAGED[device_type]


def test_masters_have_shapes_of_their_own() -> None:
    """Those that are fastest on an H200; without blocks, sums stay as they were cut."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "master_weights": True}
    assert default_shape(spec_of("AdamW", **options), "cuda") == TileShape(512, 2, 3)
    assert default_shape(spec_of("Lion", **options), "cuda") == TileShape(512, 4, 3)
    narrow = spec_of("AdamW", **options, state_dtype="bfloat16")
    assert default_shape(narrow, "cuda") == TileShape(512, 2, 4)
    assert default_shape(spec_of("LAMB", **options), "cuda") == TileShape(512, 4, 3)
    for rule in ("AdamW", "LAMB", "AdEMAMix"):
        assert default_shape(spec_of(rule, **options, state_dtype="int8"), "cuda") == TileShape(1024, 4, 8, 3)
    random = spec_of("AdamW", **options, state_dtype="int8", rounding="stochastic")
    assert default_shape(random, "cuda") == TileShape(1024, 4, 8, 3)
    remainder = {"dtype": torch.bfloat16, "state_dtype": "bfloat16", "master_weights": "remainder"}
    assert default_shape(spec_of("AdamW", **remainder), "cuda") == TileShape(512, 2, 6)
    assert default_shape(spec_of("LAMB", **remainder), "cuda") == TileShape(512, 4, 3)
    kahan = {**remainder, "master_weights": "kahan"}
    assert default_shape(spec_of("AdamW", **kahan), "cuda") == TileShape(512, 4, 3)


def test_what_has_much_arithmetic_has_more_elements_a_thread() -> None:
    """Codes of four bits and random bits; parameters of float32 and three states have programs of two warps."""
    wide, narrow, many = TileShape(512, 1, 16, 3), TileShape(1024, 4, 8, 3), TileShape(512, 2, 16, 3)
    masters: dict[str, Any] = {"dtype": torch.bfloat16, "master_weights": "int8"}
    assert default_shape(spec_of("AdamW", **masters, state_dtype="int4"), "cuda") == wide
    assert default_shape(spec_of("AdamW", **masters, state_dtype="int8"), "cuda") == narrow
    assert default_shape(spec_of("AdamW", **masters, state_dtype="int8", rounding="stochastic"), "cuda") == wide
    assert default_shape(spec_of("LAMB", **masters, state_dtype="int4"), "cuda") == wide
    assert default_shape(spec_of("LAMB", **masters, state_dtype="int8"), "cuda") == narrow
    assert default_shape(spec_of("AdEMAMix", **masters, state_dtype="int8"), "cuda") == many
    assert default_shape(spec_of("AdEMAMix", **masters, state_dtype="int4"), "cuda") == wide
    assert default_shape(spec_of("AdamW", dtype=torch.float32, state_dtype="int8"), "cuda") == many


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_stages_are_tried_for_blocks_where_the_gpu_has_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    plain, blocks = spec_of("AdamW"), spec_of("AdamW", state_dtype="int8")
    gpu = torch.device("cuda")
    assert candidates(plain, gpu) == CANDIDATES["cuda"]
    assert candidates(blocks, gpu) == (STAGED["cuda"] if capability >= (8, 0) else ()) + CANDIDATES["cuda"]
    assert candidates(blocks, CPU) == CANDIDATES["cpu"]


def test_a_table_keeps_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU; nothing is asked of it but its name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    gpu = torch.device("cuda")
    spec = spec_of("AdamW", dtype=torch.bfloat16, state_dtype="int8")
    assert tuning.tile_shape(spec, gpu) == TileShape(1024, 4, 8, 3)
    save_shapes(gpu, {signature(spec): TileShape(512, 4, 8, 2), "none of them": TileShape(512, 4, 8, 5)})
    assert tuning.tile_shape(spec, gpu) == TileShape(512, 4, 8, 2)
    assert tuning.known_table("a GPU", "cuda").keys() == {signature(spec)}
    # Wide elements make another kernel of it.
    assert tuning.tile_shape(spec_of("AdamW", state_dtype="int8"), gpu) == TileShape(512, 2, 16, 3)


def test_a_stored_shape_is_used_by_the_optimizers_that_have_its_signature() -> None:
    default = span_of(optimizer())
    save_shapes(CPU, {signature(spec_of("AdamW")): TileShape(4096)})
    assert span_of(optimizer()) == 4096 != default
    assert span_of(optimizer("Adam")) == 4096
    assert span_of(optimizer("Lion")) == default


def test_shapes_saved_one_after_the_other_are_kept() -> None:
    save_shapes(CPU, {"one": TileShape(4096)})
    path = save_shapes(CPU, {"two": TileShape(8192)})
    save_shapes(CPU, {"one": TileShape(32_768)})
    assert tuning.known_table(device_key(CPU), "cpu") == {"one": TileShape(32_768), "two": TileShape(8192)}
    assert json.loads(path.read_text())["device"] == device_key(CPU)
    assert [entry.suffix for entry in path.parent.iterdir() if entry.suffix != ".lock"] == [".json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2]",
        '{"device": "another", "tilestep": "VERSION", "shapes": {"SIGNATURE": STORED}}',
        '{"device": "DEVICE", "tilestep": "0.0.0", "shapes": {"SIGNATURE": STORED}}',
        '{"device": "DEVICE", "tilestep": "VERSION", "shapes": {"SIGNATURE": ODD}}',
        '{"device": "DEVICE", "tilestep": "VERSION", "shapes": {"SIGNATURE": WORDS}}',
        '{"device": "DEVICE", "tilestep": "VERSION", "shapes": {"SIGNATURE": 3}}',
        '{"device": "DEVICE", "tilestep": "VERSION", "shapes": 3}',
    ],
)
def test_a_table_that_cannot_be_right_is_passed_over(content: str) -> None:
    default = span_of(optimizer())
    path = save_shapes(CPU, {})
    words = {
        "DEVICE": device_key(CPU),
        "VERSION": tilestep.__version__,
        "SIGNATURE": signature(spec_of("AdamW")),
        "STORED": '{"tile": 4096, "warps": 1, "tiles": 1, "stages": 1}',
        "ODD": '{"tile": 4095, "warps": 1, "tiles": 1, "stages": 1}',
        "WORDS": '{"tile": "x", "warps": [], "tiles": 1, "stages": 1}',
    }
    for word, meaning in words.items():
        content = content.replace(word, meaning)
    path.write_text(content)
    tuning.known_table.cache_clear()
    assert span_of(optimizer()) == default
    save_shapes(CPU, {signature(spec_of("AdamW")): TileShape(4096)})
    assert span_of(optimizer()) == 4096


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_every_shape_gives_the_same_training(name: str) -> None:
    results = []
    for shape in CANDIDATES["cpu"]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (70_001, 5, 4096)]
        chosen = getattr(tilestep, name)(params, lr=0.1)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            with forced_shape(shape):
                chosen.step()
        assert span_of(chosen) == shape.span
        results.append([param.detach() for param in params])
    exact = {} if name == "LAMB" else {"rtol": 0.0, "atol": 0.0}  # its norms are summed tile by tile
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **exact)


def test_a_step_reads_no_table_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = optimizer()
    param = chosen.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    chosen.step()  # the first chooses

    def forbidden(*_: object) -> None:
        raise AssertionError("looked up inside a step")

    monkeypatch.setattr("tilestep.backends.cpp.run.tile_shape", forbidden)
    for _ in range(3):
        chosen.step()


def test_tuning_measures_every_candidate_and_keeps_the_best() -> None:
    listed = jobs([tilestep.registry["Lion"], tilestep.registry["SGD"]], CPU)
    assert len({job.signature for job in listed}) == len(listed)
    kinds = {name: [job.kind for job in listed if job.rule.name == name] for name in ("Lion", "SGD")}
    # Plain SGD has no states.
    assert kinds["Lion"] == [*KINDS] and set(KINDS) - set(kinds["SGD"]) == {
        "bf16 with int8 states",
        "bf16 with int8 states, fp32 master",
    }
    for outcome in tune(listed[:2], CPU, rounds=1, elements=20_000):
        assert outcome.milliseconds.keys() == set(CANDIDATES["cpu"])
        assert all(taken > 0 for taken in outcome.milliseconds.values())
        assert outcome.before == TileShape(16_384)
        assert outcome.milliseconds[outcome.after] <= outcome.milliseconds[outcome.before]
        assert tuning.known_table(device_key(CPU), "cpu")[outcome.job.signature] == outcome.after


def test_the_faster_shape_is_chosen_and_noise_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = jobs([tilestep.registry["SGD"]], CPU)
    times = dict.fromkeys(CANDIDATES["cpu"], 2.0)
    monkeypatch.setattr("tilestep.bench.tune._measure", lambda *_: ({**times, TileShape(4096): 1.99}, TileShape(4096)))
    (outcome,) = tune([job], CPU)
    assert outcome.after == outcome.before == TileShape(16_384) and outcome.gain == 0
    monkeypatch.setattr("tilestep.bench.tune._measure", lambda *_: ({**times, TileShape(4096): 1.0}, TileShape(4096)))
    (outcome,) = tune([job], CPU, save=False)
    assert outcome.after == TileShape(4096) and outcome.gain == 0.5
    assert tuning.known_table(device_key(CPU), "cpu")[job.signature] == TileShape(16_384)
    (outcome,) = tune([job], CPU)
    assert tuning.known_table(device_key(CPU), "cpu")[job.signature] == TileShape(4096)


def test_tuning_ends_with_its_time_and_keeps_what_it_has() -> None:
    listed = jobs([tilestep.registry["Lion"], tilestep.registry["SGD"]], CPU)
    told: list[str] = []

    def tick(job: object, text: str) -> None:
        told.append(text)
        # However fast the machine is, its time is over with the second one.
        time.sleep(0.6 if job is listed[1] else 0)

    begin = time.monotonic()
    outcomes = list(tune(listed, CPU, rounds=1000, elements=20_000, seconds=0.5, tick=tick))
    assert time.monotonic() - begin < 10 and len(outcomes) < len(listed) and told
    table = tuning.known_table(device_key(CPU), "cpu")
    assert table.keys() == {outcome.job.signature for outcome in outcomes}


def test_an_interrupted_tuning_keeps_what_it_has() -> None:
    listed = jobs([tilestep.registry["SGD"]], CPU)

    def tick(job: object, text: str) -> None:
        if job is listed[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(tune(listed, CPU, rounds=1, elements=20_000, tick=tick))
    assert tuning.known_table(device_key(CPU), "cpu").keys() == {listed[0].signature}


def test_what_was_fastest_once_must_be_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = jobs([tilestep.registry["SGD"]], CPU)
    taken: dict[str, int] = {}

    def milliseconds(call: object, device: torch.device, repeat: int) -> tuple[float, float]:
        shape = ticks[-1]
        taken[shape] = taken.get(shape, 0) + 1
        lucky = shape == "4096" and taken[shape] == 1
        return (1.0, 1.0) if lucky else (2.0, 2.0)

    ticks: list[str] = []
    monkeypatch.setattr("tilestep.bench.measure.timed", milliseconds)
    (outcome,) = tune([job], CPU, rounds=3, elements=20_000, tick=lambda job, text: ticks.append(text))
    assert taken["4096"] == 4 and outcome.after == outcome.before


def test_a_forced_shape_ends_with_its_block() -> None:
    with pytest.raises(KeyError), forced_shape(TileShape(4096)):
        assert span_of(optimizer()) == 4096
        raise KeyError
    assert span_of(optimizer()) == 16_384
