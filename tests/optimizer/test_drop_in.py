"""What torch's optimizers take and tilestep's take too: numbers of any kind, late and repeated parameters, modes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from twins import make_params, set_gradients, twins

import tilestep
from tilestep.backends import registry
from tilestep.backends.eager import EagerPasses
from tilestep.errors import CaptureError, GradientError
from tilestep.execution.zero.sharded import _prepared as prepared


def alike(make: Any, params: list[Any], steps: int = 3, rtol: float = 2e-6) -> tuple[Any, Any]:
    """Both optimizers after the same steps, with equal parameters."""
    others = twins(params)
    mine, theirs = make(tilestep, params), make(torch.optim, others)
    for step in range(steps):
        set_gradients(params, others, step=step)
        mine.step()
        theirs.step()
    for left, right in zip(params, others, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=rtol)
    return mine, theirs


NUMPY: dict[str, dict[str, Any]] = {
    "float32": {"lr": np.float32(0.125), "weight_decay": np.float32(0.25)},
    "float64 and float16": {"lr": np.float64(0.1), "eps": np.float16(0.5)},
    "integer": {"lr": np.int64(1), "weight_decay": np.int32(0)},
    "array of one": {"lr": np.array(0.1)},
    "array of two": {"betas": np.array([0.5, 0.75])},
    "betas": {"betas": (np.float64(0.5), np.float64(0.75)), "amsgrad": np.bool_(True)},
}


@pytest.mark.parametrize("kind", NUMPY)
def test_numbers_may_be_those_of_numpy(kind: str) -> None:
    mine, theirs = alike(lambda module, params: module.Adam(params, **NUMPY[kind]), make_params())
    for key in NUMPY[kind]:
        assert np.all(np.asarray(mine.param_groups[0][key]) == np.asarray(theirs.param_groups[0][key])), key
    loaded = tilestep.Adam(mine.param_groups[0]["params"])
    loaded.load_state_dict(copy.deepcopy(mine.state_dict()))
    loaded.step()


def test_a_number_of_numpy_set_later_builds_nothing_anew() -> None:
    params = make_params()
    others = twins(params)
    mine, theirs = tilestep.SGD(params, momentum=0.5), torch.optim.SGD(others, momentum=0.5)
    tables = set()
    for step, rate in enumerate([np.float32(0.5), np.float32(0.25), 0.125, np.array(0.25)]):
        for optimizer in (mine, theirs):
            optimizer.param_groups[0]["lr"] = rate
        set_gradients(params, others, step=step)
        mine.step()
        theirs.step()
        tables.add(id(mine.plan))
    for left, right in zip(params, others, strict=True):
        torch.testing.assert_close(left, right)
    assert len(tables) == 1


@pytest.mark.parametrize(
    "wrong", [{"lr": np.float32(-1)}, {"betas": (np.float32(2.0), 0.9)}, {"eps": np.float64("nan")}]
)
def test_a_number_of_numpy_has_a_range_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        tilestep.Adam(make_params(), **wrong)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize(
    "betas",
    [(0.5, 0.75), (torch.tensor(0.5), torch.tensor(0.75)), (0.5, torch.tensor(0.75)), (torch.tensor([0.5]), 0.75)],
)
def test_numbers_and_tensors_may_stand_beside_each_other(rate: Any, betas: Any) -> None:
    params = make_params()
    others = twins(params)
    mine, theirs = tilestep.Adam(params, lr=rate, betas=betas), torch.optim.Adam(others, lr=0.1, betas=(0.5, 0.75))
    for step in range(2):
        set_gradients(params, others, step=step)
        mine.step()
        theirs.step()
    for left, right in zip(params, others, strict=True):
        torch.testing.assert_close(left, right)


class OnGpu(torch.Tensor):
    """Stands for a number on a GPU, of parameters on the CPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_a_number_may_live_on_another_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, beta = torch.tensor(0.1).as_subclass(OnGpu), torch.tensor(0.5).as_subclass(OnGpu)
    params = make_params()
    others = twins(params)
    if backend == "eager":
        monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    mine, theirs = tilestep.Adam(params, lr=rate, betas=(beta, 0.75)), torch.optim.Adam(others, betas=(0.5, 0.75))
    for step in range(3):
        value = 0.1 / (step + 1)
        torch.Tensor.fill_(rate, value)
        theirs.param_groups[0]["lr"] = value
        set_gradients(params, others, step=step)
        mine.step()
        theirs.step()
    for left, right in zip(params, others, strict=True):
        torch.testing.assert_close(left, right)


def test_parameters_of_lazy_modules_come_later() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 5)
    results = []
    for module in (tilestep, torch.optim):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
        optimizer = module.AdamW(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach() for param in model.parameters()])
        assert set(optimizer.state) == set(model.parameters())
        assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (3, 5)
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def test_where_shapes_are_needed_at_once_lazy_parameters_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Embedding(4, 3))
    with pytest.raises(ValueError, match=r"^0.weight has no shape yet, and muon_groups\(\) needs it"):
        tilestep.muon_groups(model)
    optimizer = tilestep.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"\(0.weight\) has no shape yet, and overlap\(\) needs it"):
        tilestep.overlap(optimizer, model, during="backward")
    with pytest.raises(ValueError, match=r"\(0.weight\) has no shape yet, and shard\(\) needs it"):
        prepared(optimizer, model, None)


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_parameter_listed_several_times_is_updated_as_often(rule: str, count: int) -> None:
    def make(module: Any, params: list[Any]) -> Any:
        with pytest.warns(UserWarning, match="duplicate parameters"):
            return getattr(module, rule)([params[0], *[params[1]] * count, *params[2:], params[0]], lr=0.1)

    mine, theirs = alike(make, make_params())
    assert mine.state_dict()["param_groups"][0]["params"] == theirs.state_dict()["param_groups"][0]["params"]
    if rule == "Adam":
        steps = [mine.state[param]["step"].item() for param in dict.fromkeys(mine.param_groups[0]["params"])]
        assert steps == [
            theirs.state[param]["step"].item() for param in dict.fromkeys(theirs.param_groups[0]["params"])
        ]
    mine.load_state_dict(theirs.state_dict())
    set_gradients(mine.param_groups[0]["params"])
    mine.step()


def test_a_parameter_listed_twice_is_refused_where_it_cannot_be_updated_twice() -> None:
    weight = make_params()[1]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = tilestep.SGD([weight, weight], lr=0.1)
    set_gradients([weight])
    scaler = tilestep.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    before = weight.detach().clone()
    with pytest.raises(GradientError, match="lists a parameter twice"):
        scaler.step(optimizer)
    assert torch.equal(weight, before)
    with pytest.raises(CaptureError):
        optimizer.prepare_capture()
    model = torch.nn.Module()
    model.weight = weight
    for during in ("backward", "forward"):
        with pytest.raises(GradientError, match="lists a parameter twice"):
            tilestep.overlap(optimizer, model, during=during)
    with pytest.raises(GradientError, match="lists a parameter twice"):
        prepared(optimizer, model, None)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})


def spread(shape: tuple[int, ...]) -> torch.nn.Parameter:
    """A parameter with a gap in every dimension, none of which can be merged."""
    memory = torch.randn([2 * size for size in shape])
    return torch.nn.Parameter(memory[(slice(None, None, 2),) * len(shape)])


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_many_dimensions_that_cannot_be_merged(rule: str) -> None:
    torch.manual_seed(0)
    params = [spread((2,) * 9), torch.nn.Parameter(torch.randn((2,) * 12)), spread((3, 2))]
    others = twins(params)
    mine, theirs = getattr(tilestep, rule)(params, lr=0.1), getattr(torch.optim, rule)(others, lr=0.1)
    for step in range(3):
        set_gradients(params, others, step=step)
        params[1].grad = others[1].grad.permute(*reversed(range(12))).contiguous().permute(*reversed(range(12)))
        mine.step()
        theirs.step()
    for left, right in zip(params, others, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("dims", [8, 9, 12])
def test_rules_over_rows_take_many_dimensions(dims: int) -> None:
    params = [torch.nn.Parameter(torch.randn((2,) * (dims - 2) + (3, 4), dtype=torch.float64))]
    alike(lambda module, params: module.Adafactor(params, lr=0.1), params)


def test_dimensions_that_interleave_without_overlap() -> None:
    memory = torch.randn(9)
    before = memory.clone()
    weight = torch.nn.Parameter(memory.as_strided((2, 3), (3, 2)))
    expected = weight.detach() - 0.5 * torch.arange(6.0).view(2, 3)
    optimizer = tilestep.SGD([weight], lr=0.5)
    weight.grad = torch.arange(6.0).view(2, 3)
    optimizer.step()
    assert torch.equal(weight, expected)
    assert torch.equal(memory[[1, 6, 8]], before[[1, 6, 8]])


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
}
RULES = ["AdamW", "Adafactor", "Muon", "SOAP", "Prodigy"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["device", "default device", "default dtype"])
def test_a_mode_of_torch_changes_no_number(rule: str, mode: str) -> None:
    results = []
    for inside in (True, False):
        params = make_params([(4, 6), (3, 5)])
        set_gradients(params)
        with MODES[mode]() if inside else default_dtype(torch.float32):
            optimizer = tilestep.Optimizer(params, rule, max_grad_norm=1.0, skip_above=tilestep.TimesMean(5.0))
            optimizer.step()
            assert optimizer.grad_norm.item() > 0
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.eval()
            optimizer.train()
            assert optimizer.skipped_steps.item() == 0
            optimizer.step()
            tilestep.clip_grad_norm_(params, 0.5)
            copied = copy.deepcopy(optimizer)
            copied.step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        results.append([*params, *(param.grad for param in params), *state])
    for left, right in zip(*results, strict=True):
        assert left.device.type == "cpu"
        assert torch.equal(left, right)


@pytest.mark.parametrize("mode", ["device", "default device", "default dtype"])
def test_statistics_and_changes_inside_of_a_mode(mode: str) -> None:
    results = []
    for inside in (True, False):
        params = make_params([(4, 6), (3, 5)])
        set_gradients(params)
        with MODES[mode]() if inside else default_dtype(torch.float32):
            optimizer = tilestep.AdamW(params, stats=tilestep.Stats(), track_changes=True)
            optimizer.step()
            assert optimizer.first_nonfinite() is None
            results.append([optimizer.stats.table, *(part for change in optimizer.changes() for part in change[1:])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("rate", [tilestep.schedule.warmup_cosine(0.1, 3, 10), lambda step: torch.tensor(0.1) / step])
@pytest.mark.parametrize("mode", ["device", "default device"])
def test_functions_of_the_step_inside_of_a_mode(rate: Any, mode: str) -> None:
    results = []
    for inside in (True, False):
        params = make_params([(4, 6)])
        set_gradients(params)
        with MODES[mode]() if inside else default_dtype(torch.float32):
            optimizer = tilestep.SGD(params, lr=rate)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            results.append([*params, optimizer.current("lr")])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 0.0])
def test_clipping_inside_of_a_mode(norm_type: float) -> None:
    params = [*make_params(), *make_params(dtype=torch.bfloat16)]
    others = twins(params)
    set_gradients(params, others)
    with torch.device("meta"):
        norm = tilestep.clip_grad_norm_(params, 0.5, norm_type)
    assert norm.item() == tilestep.clip_grad_norm_(others, 0.5, norm_type).item()
    assert all(torch.equal(left.grad, right.grad) for left, right in zip(params, others, strict=True))


def test_norms_take_the_arguments_of_torch() -> None:
    params = make_params([(4, 6), (5,)])
    set_gradients(params)
    gradients = [param.grad for param in params]
    for arguments in [(2.0, False, None), ("inf", True, True), (np.float64(1), False, False)]:
        expected = torch.nn.utils.get_total_norm(gradients, *arguments)
        torch.testing.assert_close(tilestep.total_norm(gradients, *arguments), expected)
        torch.testing.assert_close(tilestep.clip_grad_norm_(params, 1e9, *arguments), expected)
    assert tilestep.clip_grad_norm_(iter(params), max_norm=np.float32(0.5), foreach=True) > 0.5
    torch.testing.assert_close(tilestep.total_norm(gradients, foreach=False), torch.tensor(0.5))


def test_an_optimizer_made_and_used_inside_compiled_code() -> None:
    def train(model: torch.nn.Module, batch: torch.Tensor, make: Any) -> Any:
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.eval()
        optimizer.train()
        return optimizer

    makers = [
        lambda params: tilestep.AdamW(params, lr=0.1),
        lambda params: tilestep.Optimizer(params, "Lion", lr=0.1),
        lambda params: tilestep.Optimizer(params, tilestep.cautious(tilestep.registry["SGD"]), lr=0.1),
    ]
    for make in makers:
        results = []
        for compiled in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
            train_step = torch.compile(train, backend="eager") if compiled else train
            optimizer = train_step(model, torch.ones(4, 3), make)
            assert isinstance(optimizer, tilestep.Optimizer)
            results.append([param.detach() for param in model.parameters()])
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right)


def test_a_scaler_takes_no_closure_by_any_spelling() -> None:
    # accelerate calls step(optimizer, None).
    for spelling in itertools.product([(), (None,)], [{}, {"closure": None}]):
        args, kwargs = spelling
        if args and kwargs:
            continue
        params, others = make_params(), make_params()
        set_gradients(params, others)
        optimizer, scaler = tilestep.SGD(params, lr=0.1), tilestep.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer, *args, **kwargs)
        scaler.update()
        for left, right in zip(params, others, strict=True):
            torch.testing.assert_close(left.detach(), right.detach() - 0.1 / 4.0 * right.grad)
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, lambda: 0.0)
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, closure=lambda: 0.0)


@pytest.mark.parametrize("during", ["forward", "backward", "shard"])
def test_train_and_eval_end_no_updates_where_no_rule_keeps_averages(
    during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers calls train() before every backward: updates would not overlap, parameters be gathered again."""
    model = torch.nn.Linear(2, 2)
    optimizer = tilestep.AdamW(model.parameters())
    if during == "shard":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        tilestep.shard(optimizer, model)
    else:
        tilestep.overlap(optimizer, model, during=during)  # type: ignore[arg-type]
    try:

        def ended(*_: Any) -> None:
            raise AssertionError("all updates were waited for")

        monkeypatch.setattr(optimizer.execution, "swap_weights", ended)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.train()
        optimizer.eval()
        with optimizer.averaged():
            pass
    finally:
        if during == "shard":
            torch.distributed.destroy_process_group()


def test_train_and_eval_touch_nothing_where_no_rule_keeps_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.optimizer import optimizer as module

    params = make_params()
    optimizer = tilestep.AdamW(params)
    set_gradients(params)
    optimizer.step()

    def looked(*_: Any) -> None:
        raise AssertionError("every parameter was looked at")

    for name in ("swap_in_averages", "swap_out_averages"):
        monkeypatch.setattr(module, name, looked)
    optimizer.eval()
    optimizer.step()
    optimizer.train(False)
    optimizer.train()
    with optimizer.averaged():
        pass
