"""Every rule on the C++ backend, step by step against the rule itself in float64, over dtypes, groups and layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from float64_reference import Run, check_steps
from format_rows import backend
from matrix_rules import MATRIX_RULES
from rule_cases import NAMES, STORAGES
from torch.overrides import TorchFunctionMode

import tilestep
from tilestep.devices import combined
from tilestep.optimizer.masters import MasterWeights
from tilestep.rules import registry
from tilestep.rules.compose import scaled_states

# All rules in float32 and with float32 masters. Of the other storages combinations/test_conformance.py has AdamW, LAMB,
# Lion and Adafactor; float16 is not among them.
SAMPLED = ["ASGD", "NAdam", "Rprop"]
CASES = [
    pytest.param(name, *storage, id=f"{name}-{label}")
    for label, storage in STORAGES.items()
    for name in (
        NAMES
        if label in ("float32", "bfloat16-master")
        else [*SAMPLED, *(["Adafactor", "LAMB"] if label == "float16-master" else [])]
    )
]
FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("LaProp", {"amsgrad": True, "centered": True, "weight_decay": 0.01}),
    ("MARS", {"amsgrad": True, "optimize_1d": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "dtype", "master"), CASES)
def test_a_rule_steps_as_it_does_in_float64(name: str, dtype: torch.dtype, master: MasterWeights) -> None:
    check_steps(registry[name], dtype, master)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", [*NAMES, *MATRIX_RULES])
def test_states_of_empty_tensors_stay_finite_on_every_backend(name: str, shape: tuple[int, ...]) -> None:
    if name in MATRIX_RULES and len(shape) != 2:
        pytest.skip("not a matrix")
    states = []
    for which in ("cpp", "eager"):
        with backend(which):
            # The second has gaps, as tensors of the test above, whose kernels are used.
            params = [torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(8, 12)[::2, ::2])]
            optimizer = tilestep.Optimizer(params, name)
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
            assert params[1].isfinite().all()
            states.append({key: torch.as_tensor(value) for key, value in optimizer.state[params[0]].items()})
    for key, value in states[0].items():
        assert value.isfinite().all(), key
        torch.testing.assert_close(value, states[1][key])


@pytest.mark.parametrize(
    ("name", "hyper"), FLAGS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_rule_steps_as_it_does_in_float64_under_its_flags(name: str, hyper: dict[str, Any]) -> None:
    check_steps(registry[name], torch.float32, False, **hyper)


@pytest.mark.parametrize("name", ["Adam", "LAMB"])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float64, False), (torch.float32, False), (torch.bfloat16, True)])
def test_scaled_states_step_as_they_do_in_float64(name: str, dtype: torch.dtype, master: bool) -> None:
    check_steps(scaled_states(registry[name]), dtype, master)


def bits_after_steps(name: str, threads: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run = Run(registry[name], torch.bfloat16, True)
        for _ in range(2):
            run.set_gradients()
            run.optimizer.step()
    finally:
        torch.set_num_threads(before)
    return [value for param in run.params.values() for value in run.buffers(param).values()]


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "NAdam", "Prodigy", "StableAdamW"])
def test_a_step_repeats_to_the_bit_on_any_number_of_threads(name: str) -> None:
    first = bits_after_steps(name, 1)
    for threads in (1, 2, 5):
        again = bits_after_steps(name, threads)
        assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))


def test_a_step_has_the_threads_that_torch_has_then() -> None:
    run, before = Run(registry["AdamW"], torch.float32, False), torch.get_num_threads()
    taken = []
    try:
        for threads in (3, 3, 2):
            torch.set_num_threads(threads)
            run.set_gradients()
            run.optimizer.step()
            assert run.optimizer.plan is not None
            passes: Any = run.optimizer.plan.engines[0].passes[0]
            taken.append(passes._launch.threads)
    finally:
        torch.set_num_threads(before)
    assert taken == [3, 3, 2]


def test_a_state_set_from_hyperparameters_alone_is_kept_for_every_tensor() -> None:
    @tilestep.rule(states={"seen": tilestep.State(shape="scalar")})
    def remember(param: Any, grad: Any, seen: Any, *, lr: Any = 0.5, step: Any) -> tuple[Any, ...]:
        return param - lr * grad, lr * step

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = tilestep.Optimizer(params, remember)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(3)
        optimizer.step()
    assert [optimizer.state[param]["seen"].item() for param in params] == [1.0, 1.0, 1.0]


def test_buffers_may_change_places() -> None:
    @tilestep.rule
    def swap(param: Any, grad: Any, other: Any) -> tuple[Any, ...]:
        return other, param

    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = tilestep.Optimizer([weight], swap)
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0] and optimizer.state[weight]["other"].tolist() == [1.0, 2.0]


def test_a_rule_that_changes_nothing_counts_its_steps() -> None:
    @tilestep.rule
    def rest(param: Any, grad: Any, kept: Any) -> tuple[Any, ...]:
        return param, kept

    weight = torch.nn.Parameter(torch.tensor([1.0, -math.inf]))
    optimizer = tilestep.Optimizer([weight], rest)
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == [1.0, -math.inf] and optimizer.state[weight]["step"] == 1


def test_numbers_of_all_devices_are_waited_for_on_the_host() -> None:
    """Sums over the tensors of several devices came to a CPU by copies that the host did not wait for."""

    class Copies(TorchFunctionMode):
        unawaited = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.unawaited += (kwargs or {}).get("non_blocking", False) and func is torch.Tensor.copy_
            return func(*args, **kwargs or {})

    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = tilestep.Prodigy(params)
    for param in params:
        param.grad = torch.ones_like(param)
    with Copies() as copies:
        optimizer.step()
    assert not copies.unawaited
    sums = [torch.tensor(float(number)) for number in range(4)]
    assert combined(sums).item() == 6 and combined(sums, torch.maximum).item() == 3 and combined(sums[:1]) is sums[0]
