"""Reductions over rows, columns and other slices: the C++ backend, eager PyTorch and Triton against the rule itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from row_rules import RULES, Referee, Shape, drawn, random_rule
from scripts import all_equal_in_the_interpreter

import tilestep
from tilestep.backends import registry as backends
from tilestep.backends.cpp import source
from tilestep.backends.cpp.run import CppPasses, CpuSlices
from tilestep.backends.eager import EagerPasses
from tilestep.errors import RuleError
from tilestep.graph import partition, trace
from tilestep.placement import Share
from tilestep.rules import Rule, State, registry, rule
from tilestep.rules.compose import centralize
from tilestep.runtime import graph_for, kernel_spec
from tilestep.runtime.segment import Entry
from tilestep.storage import Plain

MATRICES: list[Shape] = [(5, 9), (130, 70), (33, 71), (1, 6), (4, 1), (70, 5000), (300, 3)]
BATCHES: list[Shape] = [(3, 4, 5), (6, 4, 3, 3), (2, 3, 70, 65), (2, 3, 1, 4, 2)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}


def run(
    chosen: Rule, hyper: dict[str, Any], shapes: list[Shape], dtype: torch.dtype, steps: int = 3
) -> tuple[tilestep.Optimizer, list[torch.Tensor], Referee]:
    params = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, dtype)]
    referee = Referee(chosen, params, hyper)
    optimizer = tilestep.Optimizer(params, chosen, **hyper)
    for step in range(steps):
        gradients = drawn(shapes, dtype, seed=step + 1)
        for param, gradient in zip(params, gradients):
            param.grad = gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()
        referee.step(gradients)
    return optimizer, [param.detach() for param in params], referee


def compare(optimizer: tilestep.Optimizer, params: list[torch.Tensor], referee: Referee, dtype: torch.dtype) -> None:
    names = referee.rule.state_names
    for param, expected, states in zip(optimizer.param_groups[0]["params"], referee.params, referee.states):
        torch.testing.assert_close(param.detach().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for name, state in zip(names, states):
            if name in optimizer.state[param]:
                actual = optimizer.state[param][name].double()
                torch.testing.assert_close(actual, state, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("place", range(len(RULES)), ids=list(RULES))
def test_rules_over_matrices_and_batches_of_them(place: int, dtype: torch.dtype) -> None:
    """Every pair of a rule, a type and a number of dimensions, of which most rules have kernels of their own."""
    parity = (place + (dtype is torch.float64)) % 2
    shapes = [shape for shape in (*MATRICES, *BATCHES) if len(shape) % 2 == parity]
    compare(*run(*list(RULES.values())[place], shapes, dtype), dtype)


@pytest.mark.parametrize("seed", range(8))
def test_random_rules(seed: int) -> None:
    dtype = torch.float64 if seed % 2 else torch.float32
    compare(*run(random_rule(seed), {}, [(5, 9), (70, 131), (9, 2), (3, 4, 5), (2, 3, 66, 65)], dtype), dtype)


@pytest.mark.parametrize("name", ["adafactor", "mixed", "units"])
def test_eager_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "passes_class", lambda device: EagerPasses)
    compare(*run(*RULES[name], [(5, 9), (12, 7), (3, 4), (3, 4, 5), (6, 4, 3, 3)], torch.float64), torch.float64)


@pytest.mark.parametrize("backend", [CppPasses, EagerPasses])
@pytest.mark.parametrize(
    ("state_dtype", "bound"),
    [("float32", 1e-6), ("scaled_float16", 2e-5), ("int8", 5e-4), ("float8_e4m3", 2e-3), ("int4", 4e-3)],
)
def test_states_in_blocks_train_as_in_float64(
    state_dtype: str, bound: float, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "passes_class", lambda device: backend)
    hyper = {"lr": 1e-3}
    shapes: list[Shape] = [(66, 130), (33, 320), (130, 70), (6, 5, 3, 3)]
    chosen = centralize(registry["AdamW"])
    params = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, torch.float32)]
    referee = Referee(chosen, params, hyper)
    optimizer = tilestep.Optimizer(params, chosen, state_dtype=lambda _: state_dtype, **hyper)
    for step in range(5):
        gradients = drawn(shapes, torch.float32, seed=step + 1)
        for param, gradient in zip(params, gradients):
            param.grad = gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()
        referee.step(gradients)
    for param, expected in zip(params, referee.params):
        assert ("exp_avg" in optimizer.state[param]) is (state_dtype == "float32")
        assert float((param.detach().double() - expected).abs().max()) < bound


@pytest.mark.parametrize(
    ("hyper", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.float64),
        ({"maximize": True, "weight_decay": 0.1}, torch.float64),
        ({"eps": (1e-6, 1e-2), "d": 2.0, "beta2_decay": -0.6}, torch.float64),
    ],
    ids=str,
)
def test_adafactor_equals_torch(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = [(7,), (), *MATRICES, *BATCHES]
    ours = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, dtype)]
    theirs = [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in ours]
    mine, torchs = tilestep.Adafactor(ours, **hyper), torch.optim.Adafactor(theirs, **hyper)
    for step in range(4):
        for left, right, gradient in zip(ours, theirs, drawn(shapes, dtype, seed=step + 1)):
            # One gradient lies in memory otherwise than its parameter.
            same = gradient if step else gradient.contiguous()
            left.grad, right.grad = same.clone(memory_format=torch.preserve_format), same
        mine.step()
        torchs.step()
    for left, right in zip(ours, theirs):
        torch.testing.assert_close(left, right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    actual, expected = mine.state_dict()["state"], torchs.state_dict()["state"]
    for index, state in expected.items():
        for key, value in state.items():
            assert actual[index][key].shape == value.shape, key
            torch.testing.assert_close(actual[index][key], value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["cpp", "eager"])
@pytest.mark.parametrize("size", [0.1, 100.0], ids=["below epsilon", "above epsilon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_adafactor_s_epsilon_is_that_of_the_parameter(
    dtype: torch.dtype, size: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "eager":
        monkeypatch.setattr(backends, "passes_class", lambda device: EagerPasses)
    shapes: list[Shape] = [(7,), (5, 9), (3, 4, 5)]
    epsilon = torch.finfo(dtype).eps
    ours = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, dtype)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    wide = [torch.nn.Parameter(param.detach().clone().double()) for param in ours]
    optimizers = [tilestep.Adafactor(ours, lr=1.0), torch.optim.Adafactor(theirs, lr=1.0)]
    optimizers.append(torch.optim.Adafactor(wide, lr=1.0, eps=(epsilon, 1e-3)))
    for left, right, exact, gradient in zip(ours, theirs, wide, drawn(shapes, torch.float64, seed=1)):
        left.grad = (size * epsilon * gradient).to(dtype)
        right.grad, exact.grad = left.grad.clone(), left.grad.double()
    for optimizer in optimizers:
        optimizer.step()
    for left, right, exact in zip(ours, theirs, wide):
        # torch rounds every intermediate to the parameter's type, tilestep only what it stores.
        torch.testing.assert_close(left, right, rtol=8 * epsilon, atol=8 * epsilon)
        closest = max(4 * epsilon, 1e-12)
        torch.testing.assert_close(left.double(), exact, rtol=closest, atol=closest)


def test_the_rule_s_own_code_can_be_asked_in_another_type() -> None:
    assert tilestep.machine_epsilon(torch.ones(1, dtype=torch.float16)) == torch.finfo(torch.float16).eps

    @rule
    def misled(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * tilestep.machine_epsilon(grad) * grad

    with pytest.raises(RuleError, match=r"test_rows.py.*machine_epsilon\(\) requires the parameter"):
        trace(misled, {"lr": 0.1})


def test_steps_repeat_bit_by_bit_on_any_number_of_threads() -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            _, params, _ = run(*RULES["adafactor"], [(130, 4100), (3, 70, 65), (64, 3, 3, 3)], torch.float32)
            results.append(params)
    finally:
        torch.set_num_threads(before)
    for again in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], again))


def test_a_missing_gradient_leaves_rows_alone() -> None:
    params = [torch.nn.Parameter(tensor) for tensor in drawn([(5, 9), (4, 3)], torch.float32)]
    optimizer = tilestep.Adafactor(params)
    params[0].grad, params[1].grad = torch.ones(5, 9), torch.ones(4, 3)
    optimizer.step()
    params[0].grad, params[1].grad = torch.full((5, 9), 2.0), None
    before = [{key: value.clone() for key, value in optimizer.state[param].items()} for param in params]
    optimizer.step()
    assert not torch.equal(optimizer.state[params[0]]["row_var"], before[0]["row_var"])
    for key, value in before[1].items():
        assert torch.equal(optimizer.state[params[1]][key], value), key


def test_float32_states_of_masters_follow_the_float32_run() -> None:
    shapes: list[Shape] = [(33, 70), (3, 8, 5)]
    _, hyper = RULES["adafactor"]
    low = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, torch.bfloat16)]
    full = [torch.nn.Parameter(param.detach().float()) for param in low]
    with_master = tilestep.Adafactor(low, **hyper, master_weights=True)
    plain = tilestep.Adafactor(full, **hyper)
    for step in range(3):
        for left, right, gradient in zip(low, full, drawn(shapes, torch.bfloat16, seed=step + 1)):
            left.grad, right.grad = gradient, gradient.float()
        with_master.step()
        plain.step()
    for left, right in zip(low, full):
        torch.testing.assert_close(with_master.state[left]["master_param"], right.detach())
        assert torch.equal(left, with_master.state[left]["master_param"].to(torch.bfloat16))
        for key in ("row_var", "col_var"):
            assert with_master.state[left][key].dtype is torch.float32
            torch.testing.assert_close(with_master.state[left][key], plain.state[right][key])


def storages(chosen: Rule, dims: int, dtype: torch.dtype, **hyper: Any) -> Any:
    graph = graph_for(chosen, {**chosen.hyperparameters, **hyper}, dims)
    names = ("param", "grad", *(name for name in graph.states if name not in graph.scalar_states))
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    return kernel_spec(graph, {name: Plain(dtype) for name in names}, compute, "cpu")


def test_passes_of_adafactor_read_no_more_than_they_must() -> None:
    cut = storages(registry["Adafactor"], 2, torch.float32).program
    assert [(tile.title, tile.reads(), list(tile.stores)) for tile in cut.tile_passes()] == [
        ("tile_pass_0", ["param", "grad"], []),
        ("row_pass_1", ["row_var"], ["row_var"]),
        ("column_pass_1", ["col_var"], ["col_var"]),
        ("row_pass_2", [], []),
        ("tile_pass_2", ["grad"], []),
        ("tile_pass_3", ["param", "grad"], ["param"]),
    ]


def test_what_passes_leave_for_each_other_is_small() -> None:
    spec = storages(registry["Adafactor"], 2, torch.float32)
    matrix = torch.empty(4096, 4096, device="meta")
    share = Share("a matrix", "", matrix, matrix, 0, {}, 0, matrix)
    made = CpuSlices(spec, [Entry(share, matrix, {}, {}, {}, torch.float32)])
    assert sum(array.size for array in (*made._slots, *made._parts)) < 4096 * 4096 / 50


def test_rules_without_rows_have_no_trace_of_them() -> None:
    for name in ("AdamW", "LAMB"):
        spec = storages(registry[name], 2, torch.float32)
        assert not spec.program.slices.views and all(tile.view is None for tile in spec.program.tile_passes())
        assert "Slices" not in source.source(spec)


def test_a_graph_of_rows_holds_for_its_dimensions_only() -> None:
    @rule
    def by_rows(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad.mean(dim=-1, keepdim=True)

    shapes: list[Shape] = [(6,), (2, 3), (2, 3, 4)]
    params = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, torch.float64)]
    referee = Referee(by_rows, params, {})
    gradients = drawn(shapes, torch.float64, seed=1)
    for param, gradient in zip(params, gradients):
        param.grad = gradient
    tilestep.Optimizer(params, by_rows).step()
    referee.step(gradients)
    for param, expected in zip(params, referee.params):
        torch.testing.assert_close(param.detach(), expected)


def refused(body: Any, dims: int = 3, **options: Any) -> str:
    with pytest.raises(RuleError) as caught:
        made = Rule(body, **options)
        partition(trace(made, made.hyperparameters, dims))
    return str(caught.value)


def test_reductions_that_cannot_be_made_are_refused() -> None:
    assert "keepdim" in refused(lambda param, grad: param - grad.sum(-1))
    assert "between" in refused(lambda param, grad: param - grad.sum((0, 2), keepdim=True))
    assert "amax" in refused(lambda param, grad: param - grad.max(dim=-1, keepdim=True)[0])
    columns = {"b": State(shape="column")}
    message = refused(lambda param, grad, b: (param - grad, b * 2), dims=1, states=columns)
    assert "column" in message and "1 dimension;" in message


def test_counts_are_of_what_is_there() -> None:
    """A reduced dimension counts once, and what is the same along a dimension is summed as often as that is long."""

    @rule
    def counted(param: Any, grad: Any) -> Any:
        row = grad.mean(dim=-1, keepdim=True)
        wide = row + torch.zeros_like(param)
        numbers = row.numel() + row.size(-1) + 10 * row.size(-2) + 100 * param.size(0) + 1000 * param.numel()
        return param + wide.sum() + wide.mean(dim=-1, keepdim=True) + numbers + grad.norm().sum()

    shapes: list[Shape] = [(3, 4), (5, 2), (2, 3, 4)]
    params = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, torch.float64)]
    referee = Referee(counted, params, {})
    gradients = drawn(shapes, torch.float64, seed=1)
    for param, gradient in zip(params, gradients):
        param.grad = gradient
    tilestep.Optimizer(params, counted).step()
    referee.step(gradients)
    for param, expected in zip(params, referee.params):
        torch.testing.assert_close(param.detach(), expected)


def test_triton_kernels_in_the_interpreter() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_rows.py"))
