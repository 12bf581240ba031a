"""Statistics beside float64 sums over what a step has read and written."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_blocks import OPTIONS, compare
from offloaded_pairs import HOMES
from scripts import all_equal_in_the_interpreter

import tilestep
from tilestep.backends import registry
from tilestep.backends.cpp import run
from tilestep.backends.eager import EagerPasses

SHAPES = ((40, 67), (3, 4, 5, 5), (7,), (1,))


def parameters(dtype: torch.dtype, shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad.view(-1)[::3] = 0


def expected(param: torch.nn.Parameter, before: torch.Tensor, state: dict[str, Any]) -> dict[str, float]:
    grad, now = param.grad.double(), param.detach().double()
    update = now - before.double()
    numbers = {
        "grad_norm": grad.norm(),
        "grad_max": grad.abs().max(),
        "param_norm": now.norm(),
        "param_max": now.abs().max(),
        "update_norm": update.norm(),
        "update_max": update.abs().max(),
        "update_ratio": update.norm() / now.norm(),
        "zero_fraction": (grad == 0).double().mean(),
    }
    for name, value in state.items():
        if name != "step" and isinstance(value, torch.Tensor):
            numbers[f"{name}_norm"], numbers[f"{name}_max"] = value.double().norm(), value.double().abs().max()
    return {name: float(number) for name, number in numbers.items()}


def check(optimizer: Any, params: list[torch.nn.Parameter], before: list[torch.Tensor], bound: float) -> None:
    measured = optimizer.stats.read()
    for place, (param, old) in enumerate(zip(params, before)):
        row = measured[f"0.{place}"]
        for name, number in expected(param, old, optimizer.state[param]).items():
            assert row[name] == pytest.approx(number, rel=bound, abs=1e-30), (place, name)


def assert_same_bits(optimizer: Any, params: list[Any], twin: Any, plain: list[Any]) -> None:
    """Statistics change no bit of parameters, states and step counts."""
    assert all(map(torch.equal, params, plain))
    for param, other in zip(params, plain):
        mine, theirs = optimizer.state[param], twin.state[other]
        assert mine.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in mine.items())


KINDS = [
    *((rule, torch.float32) for rule in ("AdamW", "SGD", "Lion", "LAMB", "Adafactor", "Prodigy")),
    *((rule, torch.float64) for rule in ("AdamW", "LAMB")),
]


@pytest.mark.parametrize(("rule", "dtype"), KINDS, ids=str)
def test_numbers_are_those_of_float64_and_steps_are_the_same(rule: str, dtype: torch.dtype) -> None:
    params, plain = parameters(dtype), parameters(dtype)
    kind = getattr(tilestep, rule)
    optimizer, twin = kind(params, lr=0.05, stats=tilestep.Stats(every=2)), kind(plain, lr=0.05)
    for step in range(1, 5):
        before = [param.detach().clone() for param in params]
        give_gradients(params, step)
        give_gradients(plain, step)
        optimizer.step()
        twin.step()
        assert_same_bits(optimizer, params, twin, plain)
        assert (optimizer.stats.step if step > 1 else 2) == step // 2 * 2 or step == 1
        if step % 2 == 0:
            check(optimizer, params, before, 3e-6 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize(("which", "rule"), [*((which, "AdamW") for which in OPTIONS), ("int4", "LAMB")])
def test_states_in_blocks(which: str, rule: str) -> None:
    compare(which, rule)


def test_narrow_states_of_float64_parameters() -> None:
    params = parameters(torch.float64)
    kept = {"exp_avg": "int8", "exp_avg_sq": "bfloat16"}
    optimizer = tilestep.AdamW(params, lr=0.05, state_dtype=lambda _: kept, stats=tilestep.Stats())
    give_gradients(params, 1)
    optimizer.step()
    values = tilestep.full_precision(optimizer.state_dict())["state"]
    for place, param in enumerate(params):
        row = optimizer.stats.read()[f"0.{place}"]
        assert row["param_norm"] == pytest.approx(param.detach().norm().item(), rel=1e-12)
        for name in kept:
            assert row[f"{name}_norm"] == pytest.approx(values[place][name].double().norm().item(), rel=1e-6)


def test_eager_steps_measure_states_in_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    compare("int8", "AdamW")


def test_matrices_and_momenta_of_muon() -> None:
    params = parameters(torch.float32, [(24, 40), (40, 24)])
    optimizer = tilestep.Muon(params, lr=0.05, stats=tilestep.Stats())
    before = [param.detach().clone() for param in params]
    give_gradients(params, 1)
    optimizer.step()
    check(optimizer, params, before, 3e-6)


def test_eager_steps_measure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    params = parameters(torch.float32)
    optimizer = tilestep.AdamW(params, lr=0.05, stats=tilestep.Stats())
    before = [param.detach().clone() for param in params]
    give_gradients(params, 1)
    optimizer.step()
    check(optimizer, params, before, 1e-6)


def test_steps_are_measured_from_a_copy_where_only_plain_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a compiler, with a cache from before statistics were asked for."""
    load = run.load

    def plain(spec: Any, **options: Any) -> Any:
        if len(spec.outputs) > 1:
            raise tilestep.BuildError("no compiler")
        return load(spec, **options)

    monkeypatch.setattr(run, "load", plain)
    monkeypatch.setattr(run, "warn_of_failure", lambda error: None)
    params = parameters(torch.float32)
    optimizer = tilestep.AdamW(params, lr=0.05, stats=tilestep.Stats(), track_changes=True)
    before = [param.detach().clone() for param in params]
    give_gradients(params, 1)
    optimizer.step()
    check(optimizer, params, before, 1e-6)
    assert sum(len(indices) for _, indices, _ in optimizer.changes()) == sum(param.numel() for param in params)


def test_a_state_called_update_is_refused() -> None:
    @tilestep.rule
    def heavy_ball(param: Any, grad: Any, update: Any, *, lr: float = 0.1) -> tuple[Any, Any]:
        update = 0.9 * update + grad
        return param - lr * update, update

    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(tilestep.RuleError, match="of state 'update'"):
        tilestep.Optimizer([param], heavy_ball, stats=tilestep.Stats())
    tilestep.Optimizer([param], heavy_ball, track_changes=True)


def test_a_rule_that_leaves_its_parameter_alone() -> None:
    @tilestep.rule
    def watching(param: Any, grad: Any, total: Any, *, lr: float = 0.1) -> tuple[Any, Any]:
        return param, total + lr * grad

    param = torch.nn.Parameter(torch.ones(4))
    optimizer = tilestep.Optimizer([param], watching, stats=tilestep.Stats())
    param.grad = torch.ones(4)
    optimizer.step()
    row = optimizer.stats.read()["0.0"]
    assert (row["grad_norm"], row["param_norm"], row["update_norm"]) == (2, 2, 0)
    assert row["total_norm"] == pytest.approx(0.2)


def test_gradients_and_parameters_that_lie_otherwise() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last))
    wide = torch.nn.Parameter(torch.randn(9, 20)[:, ::2])
    optimizer = tilestep.AdamW([weight, wide], lr=0.05, stats=tilestep.Stats())
    for _ in range(2):
        before = [param.detach().clone() for param in (weight, wide)]
        weight.grad, wide.grad = torch.randn(4, 6, 5, 5), torch.randn(10, 9).t()
        optimizer.step()
        check(optimizer, [weight, wide], before, 3e-6)


@pytest.mark.parametrize("masters", [False, True, "remainder", "kahan", "int8"])
def test_updates_lost_to_rounding(masters: bool | str) -> None:
    param = torch.nn.Parameter(torch.linspace(0.5, 1, 4096).to(torch.bfloat16))
    optimizer = tilestep.SGD([param], lr=1e-5, master_weights=masters, stats=tilestep.Stats())
    param.grad = torch.ones(4096, dtype=torch.bfloat16)
    param.grad[:1024] = 0
    optimizer.step()
    row = optimizer.stats.read()["0.0"]
    assert row["lost_fraction"] == (0.75 if masters is False else 0.0)
    assert row["update_norm"] == pytest.approx(1e-5 * math.sqrt(3072), rel=2e-2)


@pytest.mark.parametrize("masters", [False, True, "remainder", "kahan", "int8"])
def test_steps_with_masters_are_the_same_without_statistics(masters: bool | str) -> None:
    """Also those that are skipped, and those between measured ones."""
    runs = []
    for stats in (tilestep.Stats(every=2), None):
        params = parameters(torch.bfloat16)
        optimizer = tilestep.SGD(
            params, lr=1e-3, master_weights=masters, stats=stats, skip_nonfinite=True, track_changes=stats is not None
        )
        for step in range(6):
            give_gradients(params, step)
            if step in (2, 3):
                params[0].grad[0, 0] = math.inf
            optimizer.step()
        assert optimizer.skipped_steps == 2
        runs += [optimizer, params]
    assert_same_bits(*runs)


def test_float32_sums_that_lose_what_is_added_are_lost_updates() -> None:
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = tilestep.SGD([param], lr=1e-9, stats=tilestep.Stats())
    param.grad = torch.ones(100)
    param.grad[:25] = 0
    optimizer.step()
    assert optimizer.stats.read()["0.0"]["lost_fraction"] == 0.75


def test_second_moments_of_small_gradients_have_norms() -> None:
    params = [torch.nn.Parameter(torch.ones(2000)) for _ in range(2)]
    optimizer = tilestep.AdamW(params, lr=0.1, stats=tilestep.Stats())
    for param, size in zip(params, (1e-12, 1e9)):
        param.grad = torch.full((2000,), size)
    optimizer.step()
    measured = optimizer.stats.read()
    for place, param in enumerate(params):
        exact = optimizer.state[param]["exp_avg_sq"].double().norm()
        assert measured[f"0.{place}"]["exp_avg_sq_norm"] == pytest.approx(float(exact), rel=1e-5)


def test_a_skipped_step_tells_of_gradients_and_updates_nothing() -> None:
    params = parameters(torch.float32)
    optimizer = tilestep.AdamW(
        [(f"layer{place}", param) for place, param in enumerate(params)],
        lr=0.1,
        skip_nonfinite=True,
        stats=tilestep.Stats(),
    )
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.first_nonfinite() is None
    kept = optimizer.stats.read()
    give_gradients(params, 1)
    params[2].grad[3], params[1].grad[0, 0, 0, 0] = math.inf, math.nan
    optimizer.step()
    row = optimizer.stats.read()
    assert optimizer.skipped_steps == 1
    assert row["layer2"]["grad_max"] == math.inf and math.isnan(row["layer1"]["grad_norm"])
    assert row["layer0"]["grad_norm"] == pytest.approx(params[0].grad.norm().item(), rel=1e-6)
    for name in row:
        assert row[name]["update_norm"] == row[name]["update_max"] == row[name]["lost_fraction"] == 0
        for column in ("param_norm", "exp_avg_norm", "exp_avg_sq_max"):
            assert row[name][column] == kept[name][column]
    give_gradients(params, 2)
    optimizer.step()
    assert optimizer.first_nonfinite() == "layer1"


def test_first_nonfinite_between_measured_steps_looks_at_gradients() -> None:
    params = parameters(torch.float32)
    optimizer = tilestep.SGD(params, lr=0.1, stats=tilestep.Stats(every=100))
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.first_nonfinite() is None
    params[3].grad[0] = math.nan
    assert optimizer.first_nonfinite() == "0.3"
    params[1].grad[0, 0, 0, 0] = math.inf
    assert optimizer.first_nonfinite() == "0.1"


@pytest.mark.parametrize("scaler", [tilestep.GradScaler, torch.amp.GradScaler])
def test_gradients_are_those_without_the_loss_scale(scaler: Any) -> None:
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = tilestep.SGD([param], lr=0.1, stats=tilestep.Stats(), max_grad_norm=1.0)
    scale = scaler("cpu", init_scale=1024.0)
    scale.scale((param * torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0])).sum()).backward()
    scale.step(optimizer)
    row = optimizer.stats.read()["0.0"]
    assert row["grad_norm"] == pytest.approx(5.0) and row["grad_max"] == pytest.approx(4.0)
    assert row["update_norm"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("rule", ["SGD", "Adafactor"])
def test_updates_are_lost_whose_gradients_are_so_too_without_the_loss_scale(rule: str) -> None:
    param = torch.nn.Parameter(torch.ones(8, 16, dtype=torch.float16))
    optimizer = tilestep.Optimizer([param], rule, lr=1e-9, stats=tilestep.Stats())
    scaler = tilestep.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    param.grad = torch.full_like(param, 1e-4)
    scaler.step(optimizer)
    row = optimizer.stats.read()["0.0"]
    assert not param.grad.any() and row["zero_fraction"] == 0 and row["lost_fraction"] == 1


def test_names_groups_and_absent_gradients() -> None:
    params = parameters(torch.float32)
    groups = [{"params": params[:2]}, {"params": params[2:], "rule": "SGD", "lr": 0.1}]
    optimizer = tilestep.AdamW(groups, stats=tilestep.Stats())
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    stats = optimizer.stats
    assert stats.names == ("0.0", "0.1", "1.0", "1.1") == tuple(stats)
    assert stats.table.shape == (4, len(stats.columns)) and stats.table.dtype is torch.float64
    read = stats.read()
    assert math.isnan(read["0.1"]["grad_norm"]) and math.isnan(read["1.0"]["exp_avg_norm"])
    assert float(stats["1.0"]["grad_norm"]) == read["1.0"]["grad_norm"] > 0
    with pytest.raises(KeyError, match="no parameter is named"):
        stats["other"]


def test_steps_before_the_first_measured_one_and_optimizers_without() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.SGD([param], lr=0.1, stats=tilestep.Stats(every=3))
    plot = tilestep.StatsPlot("grad_max")
    for step in range(1, 4):
        param.grad = torch.full((3,), float(step))
        optimizer.step()
        plot.add(optimizer.stats)
        assert optimizer.stats.step == (3 if step == 3 else 0)
        assert optimizer.stats.read().keys() == ({"0.0"} if step == 3 else set())
        if step == 1:
            assert not optimizer.stats and optimizer.stats.table.shape == (0, 0) and plot.steps == []
            with pytest.raises(KeyError, match="no step has been measured yet"):
                optimizer.stats["0.0"]
    assert plot.steps == [3] and plot.rows == {"0.0": [3.0]}
    with pytest.raises(RuntimeError, match=r"stats=tilestep\.Stats"):
        _ = tilestep.SGD([param], lr=0.1).stats
    with pytest.raises(RuntimeError, match=r"stats=tilestep\.Stats"):
        tilestep.SGD([param], lr=0.1).first_nonfinite()


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2", None])
def test_bad_intervals(every: Any) -> None:
    with pytest.raises(ValueError, match="Invalid every"):
        tilestep.Stats(every=every)


def test_options_of_a_group_and_of_other_kinds_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="Invalid stats"):
        tilestep.SGD([param], lr=0.1, stats=10)
    with pytest.raises(ValueError, match="stats is an option of the optimizer"):
        tilestep.SGD([{"params": [param], "stats": tilestep.Stats()}], lr=0.1)
    with pytest.raises(ValueError, match="track_changes is an option of the optimizer"):
        tilestep.SGD([{"params": [param], "track_changes": True}], lr=0.1)


def test_copies_measure_for_themselves_and_checkpoints_are_torchs() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.SGD([param], lr=0.1, stats=tilestep.Stats(), track_changes=True)
    param.grad = torch.ones(3)
    optimizer.step()
    assert not {"stats", "track_changes"} & set(optimizer.state_dict()["param_groups"][0])
    twin = copy.deepcopy(optimizer)
    assert twin.stats.read() == {}
    own = twin.param_groups[0]["params"][0]
    own.grad = torch.full((3,), 2.0)
    twin.step()
    assert twin.stats.read()["0.0"]["grad_max"] == 2 and optimizer.stats.read()["0.0"]["grad_max"] == 1


def test_plots_and_their_errors(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    params = parameters(torch.float32)
    optimizer = tilestep.AdamW(params, lr=0.1, stats=tilestep.Stats(every=2))
    plot = tilestep.StatsPlot("update_ratio")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw()
    for step in range(1, 7):
        give_gradients(params, step)
        optimizer.step()
        if step > 1:
            plot.add(optimizer.stats)
    assert plot.steps == [2, 4, 6] and len(plot.rows["0.1"]) == 3
    plot.save(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(KeyError, match="no column is named"):
        tilestep.StatsPlot("loss").add(optimizer.stats)


def test_a_plan_made_anew_in_backward_keeps_what_was_measured() -> None:
    """State that moves while backward updates: groups that were updated before are in the table of that step."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(4)]))
    options: dict[str, Any] = {"lr": 0.01, "stats": tilestep.Stats(), "track_changes": True}
    plain, overlapped = (tilestep.AdamW(model.named_parameters(), **options) for model in models)
    tilestep.overlap(overlapped, models[1], during="backward", bucket_cap_mb=0.005)
    updated: list[int] = []

    def move(gradient: torch.Tensor) -> None:
        state = overlapped.state[models[1][0].weight]
        state["exp_avg"].data = state["exp_avg"].clone()
        updated.append(len(overlapped.applied_groups))

    for step in range(3):
        if step == 2:
            models[1][1].weight.register_hook(move)
        for model, optimizer in zip(models, (plain, overlapped)):
            model(torch.ones(5, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert updated and updated[0] > 0
    assert overlapped.stats.read() == plain.stats.read()
    lists = [[(name, *map(torch.Tensor.tolist, change)) for name, *change in o.changes()] for o in (plain, overlapped)]
    assert lists[0] == lists[1]


def test_complex_parameters_are_refused_when_the_optimizer_is_made() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(tilestep.GradientError, match="is complex: stats and track_changes"):
        tilestep.SGD([param], lr=0.1, stats=tilestep.Stats())


def test_tritons_kernels_in_its_interpreter() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_outputs.py"))


@pytest.mark.parametrize("home", ["streamed, tiles", "streamed, one chunk", "on the host, tiles"])
def test_an_empty_tensor_whose_state_is_streamed_has_the_statistics_of_one_whose_state_is_not(home: str) -> None:
    """One before all others of its memory was in no chunk, and had none."""
    tables = []
    for move in (HOMES[home], lambda optimizer: optimizer):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((0,), (5,), (0, 3), (40_000,), (0,))]
        optimizer = move(tilestep.AdamW(params, lr=0.1, stats=tilestep.Stats()))
        for param in params[:-1]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        tables.append(optimizer.stats.read())
    streamed, plain = tables
    assert plain["0.0"]["grad_norm"] == 0 and math.isnan(plain["0.4"]["grad_norm"])
    for name, columns in plain.items():
        assert streamed[name] == pytest.approx(columns, nan_ok=True), name
