"""Checkpoints go from torch's optimizer of the same name to ours and back, in the middle of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from state_files import saved_and_loaded
from torch.utils._python_dispatch import TorchDispatchMode
from torch_twins import argument_lists, exchanged_training
from twins import SHAPES, assert_close, everything, make_params, set_gradients, torch_lists, train, twins

import tilestep

torch_lists()
LISTS = argument_lists()
NAMES = sorted({name for name, _ in LISTS} - {"Muon"})  # Muon has its own tests


def shapes_torch_takes(name: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """torch's Adafactor divides by the number of elements, empty parameters included."""
    return [shape for shape in shapes if name != "Adafactor" or 0 not in shape]


# All in float64, where an error shows; every second one in float32.
CASES = [*((*case, torch.float64) for case in LISTS), *((*case, torch.float32) for case in LISTS[::2])]


@pytest.mark.parametrize(("name", "kwargs", "dtype"), CASES, ids=str)
def test_twenty_steps_and_an_exchange_agree_with_torch(name: str, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    exchanged_training(name, kwargs, dtype, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_the_state_has_torch_s_keys_and_shapes(name: str) -> None:
    shapes = shapes_torch_takes(name, SHAPES)
    mine, theirs = make_params(shapes), make_params(shapes)
    ours, torchs = getattr(tilestep, name)(mine), getattr(torch.optim, name)(theirs)
    train([(ours, mine), (torchs, theirs)], range(1))
    saved, wanted = ours.state_dict(), torchs.state_dict()
    extra = {"step"} if name == "SGD" else set()
    for index, entry in enumerate(saved["state"].values()):
        expected = {key: value for key, value in wanted["state"].get(index, {}).items() if value is not None}
        assert set(entry) == set(expected) | extra
        for key, value in expected.items():
            assert entry[key].shape == value.shape and entry[key].dtype == value.dtype, key
    assert set(saved["param_groups"][0]) == set(wanted["param_groups"][0])
    assert set(ours.param_groups[0]) == set(torchs.param_groups[0]) and set(ours.defaults) == set(torchs.defaults)


class _Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "copy" in operation.name() or "clone" in operation.name()
        return operation(*args, **(kwargs or {}))


def test_a_load_copies_all_states_together() -> None:
    copies = []
    for count in (2, 40):
        params = make_params([(3,)] * count)
        optimizer = tilestep.AdamW(params)
        train([(optimizer, params)], range(1))
        saved = saved_and_loaded(optimizer.state_dict())
        with _Copies() as copied:
            optimizer.load_state_dict(saved)
        copies.append(copied.count)
        state = optimizer.state_dict()["state"][1]
        assert all(torch.equal(value, state[name]) for name, value in saved["state"][1].items())
        assert all(value.data_ptr() != state[name].data_ptr() for name, value in saved["state"][1].items())
    assert copies[0] == copies[1] > 0


def test_loaded_step_counts_of_several_dtypes_keep_their_values() -> None:
    params = make_params([(3,)] * 2)
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(1))
    saved = saved_and_loaded(optimizer.state_dict())
    for number, count in enumerate([torch.tensor([100_001]), torch.tensor(3.0, dtype=torch.float16)]):
        saved["state"][number]["step"] = count
    optimizer.load_state_dict(saved)
    assert [float(optimizer.state[param]["step"]) for param in params] == [100_001, 3]


@pytest.mark.parametrize("count", [3, 3.0, np.float32(3), np.array(3), torch.tensor([3]), torch.tensor(3.0).double()])
def test_step_counts_of_any_kind_of_number_load(count: Any) -> None:
    params = make_params([(3,)])
    saved = torch.optim.AdamW(params).state_dict()
    saved["state"] = {0: {"step": count, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
    ours = tilestep.AdamW(params)
    ours.load_state_dict(saved)
    assert float(ours.state[params[0]]["step"]) == 3.0


def test_a_checkpoint_of_our_own_continues_bit_for_bit() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params, amsgrad=True, max_grad_norm=1.0)
    train([(optimizer, params)], range(5))
    copied = twins(params)
    other = tilestep.AdamW(copied, lr=7.0)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train([(optimizer, params), (other, copied)], range(5, 10))
    assert all(map(torch.equal, params, copied))


def test_float32_state_of_bfloat16_parameters_is_not_cast() -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = tilestep.AdamW(params, master_weights=True)
    train([(optimizer, params)], range(3))
    copied = twins(params)
    other = tilestep.AdamW(copied, master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, copied):
        for key, value in optimizer.state[param].items():
            assert other.state[twin][key].dtype is torch.float32
            assert torch.equal(other.state[twin][key], value), key


def test_amsgrad_comes_and_goes_with_the_checkpoint() -> None:
    theirs = make_params()
    torchs = torch.optim.Adam(theirs, amsgrad=True)
    train([(torchs, theirs)], range(3))
    mine = twins(theirs)
    ours = tilestep.Adam(mine)
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["amsgrad"] and "max_exp_avg_sq" in ours.state[mine[0]]
    train([(ours, mine), (torchs, theirs)], range(3, 6))
    assert_close(mine, theirs)

    without = make_params()
    plain_adam = torch.optim.Adam(without)
    train([(plain_adam, without)], range(3))
    ours.load_state_dict(plain_adam.state_dict())
    assert not ours.param_groups[0]["amsgrad"] and "max_exp_avg_sq" not in ours.state[mine[0]]


def test_torch_s_sgd_counts_no_steps_and_its_dampening_goes_on() -> None:
    kwargs = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    theirs = make_params()
    torchs = torch.optim.SGD(theirs, **kwargs)
    # The last parameter has not begun: torch keeps no state for it, and its first gradient enters undampened.
    for step in range(2):
        set_gradients(theirs[:-1], step=step)
        torchs.step()
    mine = twins(theirs)
    ours = tilestep.SGD(mine, **kwargs)
    ours.load_state_dict(torchs.state_dict())
    assert [float(ours.state[param]["step"]) for param in mine[:-1]] == [1.0] * (len(mine) - 1)
    assert mine[-1] not in ours.state
    train([(ours, mine), (torchs, theirs)], range(2, 5))
    assert_close(mine, theirs)


def test_a_clip_stays_that_torch_s_checkpoint_does_not_know() -> None:
    params, others = make_params(), make_params()
    theirs = torch.optim.AdamW(others, lr=0.1, foreach=False)
    train([(theirs, others)], range(2))
    optimizer = tilestep.AdamW(params, lr=0.5, max_grad_norm=0.25)
    with torch.no_grad():
        for param, other in zip(params, others):
            param.copy_(other)
    optimizer.load_state_dict(saved_and_loaded(theirs.state_dict()))
    assert optimizer.param_groups[0]["max_grad_norm"] == 0.25 and optimizer.param_groups[0]["lr"] == 0.1
    for step in range(2, 4):
        set_gradients(params, others, step=step)
        torch.nn.utils.clip_grad_norm_(others, 0.25)
        optimizer.step()
        theirs.step()
    assert_close(params, others)


def test_loading_forgets_what_the_checkpoint_does_not_have() -> None:
    theirs = make_params()
    torchs = torch.optim.AdamW(theirs)
    set_gradients(theirs[:3])
    torchs.step()
    mine = twins(theirs)
    ours = tilestep.AdamW(mine)
    before = twins(theirs)
    train([(ours, mine)], range(3))
    with torch.no_grad():
        for param, start in zip(mine, before):
            param.copy_(start)
    ours.load_state_dict(torchs.state_dict())
    train([(ours, mine), (torchs, theirs)], range(3, 6))
    assert_close(mine, theirs)


def test_buffers_stay_where_they_are() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(2))
    addresses = [optimizer.state[param]["exp_avg"].data_ptr() for param in params]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [optimizer.state[param]["exp_avg"].data_ptr() for param in params] == addresses


def test_state_that_belongs_to_no_parameter_is_taken_over() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    state_dict = optimizer.state_dict()
    state_dict["state"] = {**state_dict["state"], "note": {"epoch": 3}, "count": 7}
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["note"] == {"epoch": 3} and optimizer.state["count"] == 7
    train([(optimizer, params)], range(1))
    optimizer.eval()
    assert optimizer.state_dict()["state"]["count"] == 7


def test_state_dict_hooks_see_and_change_what_is_saved_and_loaded() -> None:
    params = make_params()
    optimizer = tilestep.SGD(params, lr=0.1, momentum=0.9)
    train([(optimizer, params)], range(2))
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": 1})
    saved = optimizer.state_dict()
    assert saved["note"] == 1

    def double_rate(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        return {**loaded, "param_groups": [{**loaded["param_groups"][0], "lr": 0.2}]}

    optimizer.register_load_state_dict_pre_hook(double_rate)

    def after(loaded: torch.optim.Optimizer) -> None:
        calls.append(f"loaded {float(loaded.state[params[0]]['step'])}")

    optimizer.register_load_state_dict_post_hook(after)
    for param in params:
        optimizer.state[param]["momentum_buffer"].zero_()
    optimizer.load_state_dict(saved)
    assert calls == ["before saving", "loaded 2.0"]
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.state[params[1]]["momentum_buffer"].abs().sum() == 0, "state_dict() refers to the live buffers"


def test_names_of_parameters_are_saved_and_kept() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = tilestep.AdamW(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    without = torch.optim.AdamW(model.parameters()).state_dict()
    optimizer.load_state_dict(without)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_s_functions_for_one_process(flatten: bool) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first, second, third = model(), model(), model()
    ours, torchs = tilestep.AdamW(first.parameters()), torch.optim.AdamW(third.parameters())
    train([(ours, list(first.parameters())), (torchs, list(third.parameters()))], range(3))
    saved = get_optimizer_state_dict(first, ours, options=options)
    names = set(saved) if flatten else set(saved["state"])
    wanted = get_optimizer_state_dict(third, torchs, options=options)
    assert names >= (set(wanted) if flatten else set(wanted["state"]))

    second.load_state_dict(first.state_dict())
    other = tilestep.AdamW(second.parameters(), lr=0.5)
    untouched = everything(other)
    set_optimizer_state_dict(second, other, saved, options=options)
    assert all(map(torch.equal, everything(other)["params"], untouched["params"]))
    assert float(other.state[second[0].weight]["step"]) == 3.0 and other.param_groups[0]["lr"] == 1e-3
    train([(ours, list(first.parameters())), (other, list(second.parameters()))], range(3, 5))
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_asgd_computes_its_rate_in_float64_where_torchs_foreach_version_rounds_it() -> None:
    """On GPUs torch takes the foreach version, whose rate is computed from a float32 count in float32 arithmetic."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator, dtype=torch.float64)
    ours, loop, foreach = (torch.nn.Parameter(start.clone()) for _ in range(3))
    optimizers = [
        tilestep.ASGD([ours], lr=0.02),
        torch.optim.ASGD([loop], lr=0.02, foreach=False),
        torch.optim.ASGD([foreach], lr=0.02, foreach=True),
    ]
    exact, eta = start.clone(), torch.tensor(0.02).double()
    for step in range(1, 201):
        gradient = torch.randn(1000, generator=generator, dtype=torch.float64)
        for param, optimizer in zip((ours, loop, foreach), optimizers):
            param.grad = gradient.clone()
            optimizer.step()
        exact = exact - eta * (gradient + 1e-4 * exact)
        # As torch documents it, kept in float32 between steps.
        eta = torch.tensor(0.02 / (1 + 1e-4 * 0.02 * step) ** 0.75).float().double()
    assert (ours - exact).abs().max() < 1e-14 and (loop - exact).abs().max() < 1e-13
    assert (foreach - exact).abs().max() > 1e-8
