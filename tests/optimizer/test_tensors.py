"""Parameters and gradients that move, change their layout, dtype or shape, sleep, or are empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from twins import assert_close, make_params, set_gradients, train, twins

import tilestep
from tilestep import StateError

Layout = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda tensor: tensor,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(0, 3).contiguous().transpose(0, 3),
    "with gaps": lambda tensor: torch.zeros(*tensor.shape[:-1], 7)[..., :3].copy_(tensor),
    "unaligned": lambda tensor: torch.zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor),
}


@pytest.mark.parametrize("gradient_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_parameter_and_gradient(layout: str, gradient_layout: str) -> None:
    start = torch.randn(4, 3, 5, 3, generator=torch.Generator().manual_seed(0))
    mine = [torch.nn.Parameter(LAYOUTS[layout](start)), *make_params([(5,)])]
    theirs = [torch.nn.Parameter(start.clone()), *make_params([(5,)])]
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(mine, theirs, step=step)
        mine[0].grad = LAYOUTS[gradient_layout](mine[0].grad)
        ours.step()
        torchs.step()
    assert_close(mine, theirs)
    assert_close([ours.state[mine[0]]["exp_avg"]], [torchs.state[theirs[0]]["exp_avg"]])


def test_the_gradient_s_layout_changes_from_step_to_step() -> None:
    mine = make_params([(4, 3, 5, 3), (6, 6)])
    theirs = twins(mine)
    ours, torchs = tilestep.SGD(mine, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step, layout in enumerate(["contiguous", "channels last", "channels last", "with gaps", "contiguous"]):
        set_gradients(mine, theirs, step=step)
        mine[0].grad = LAYOUTS[layout](mine[0].grad)
        if step % 2:
            mine[1].grad = mine[1].grad.t().contiguous().t()
        ours.step()
        torchs.step()
        assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("rule", "layout", "gradient_layout", "by_coordinates"),
    [
        ("SGD", "channels last", "channels last", False),
        ("SGD", "channels last", "contiguous", True),
        ("Adafactor", "contiguous", "contiguous", False),
        ("Adafactor", "channels last", "channels last", True),
    ],
)
def test_tensors_without_gaps_are_walked_by_coordinates_too(
    rule: str, layout: str, gradient_layout: str, by_coordinates: bool
) -> None:
    """Kernels that walk every array by its strides serve dense tensors: for gaps alone they could be copies."""
    start = torch.randn(4, 3, 5, 3, generator=torch.Generator().manual_seed(0))
    params = [torch.nn.Parameter(LAYOUTS[layout](start))]
    params[0].grad = LAYOUTS[gradient_layout](start)
    optimizer = getattr(tilestep, rule)(params)
    optimizer.step()
    [engine] = optimizer._current_plan().engines
    assert [bool((passes.arrays.layout_index >= 0).any()) for passes in engine.passes] == [by_coordinates]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_real_backward_with_either_zero_grad(set_to_none: bool) -> None:
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    mine = mine.to(memory_format=torch.channels_last)
    theirs = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    theirs.load_state_dict(mine.state_dict())
    ours, torchs = tilestep.AdamW(mine.parameters()), torch.optim.AdamW(theirs.parameters())
    for _ in range(4):
        images = torch.randn(2, 3, 8, 8)
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(images).square().mean().backward()
            optimizer.step()
    assert_close(list(mine.parameters()), list(theirs.parameters()))
    ours.zero_grad(set_to_none=set_to_none)
    assert all(param.grad is None if set_to_none else not param.grad.any() for param in mine.parameters())


def test_parameters_without_gradient_in_some_steps_count_their_own_steps() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        for index in range(len(mine)):
            if (step + index) % 3 == 0 or step == 4:
                mine[index].grad = theirs[index].grad = None
        ours.step()
        torchs.step()
        assert_close(mine, theirs)
    steps = [float(ours.state[param]["step"]) for param in mine]
    assert steps == [float(torchs.state[param]["step"]) for param in theirs] and len(set(steps)) > 1


def test_a_step_without_any_gradient_changes_nothing() -> None:
    params = make_params()
    before = twins(params)
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    optimizer.step()
    assert all(map(torch.equal, params, before)) and not optimizer.state
    set_gradients(params)
    optimizer.step()
    before = twins(params)
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, params, before)) and float(optimizer.state[params[0]]["step"]) == 1
    assert float(optimizer.grad_norm) == 0
    set_gradients(params)
    optimizer.step()
    assert float(optimizer.grad_norm) > 0
    optimizer.state.clear()
    optimizer.zero_grad()
    optimizer.step()
    assert float(optimizer.grad_norm) == 0


def test_frozen_parameters_cost_nothing_until_they_wake() -> None:
    mine, theirs = make_params(), make_params()
    for params in (mine, theirs):
        for param in params[:3]:
            param.requires_grad_(False)
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    train([(ours, mine[3:]), (torchs, theirs[3:])], range(2))
    assert set(ours.state) == set(mine[3:]) and set(ours.state_dict()["state"]) == {3, 4, 5}
    for params in (mine, theirs):
        for param in params[:2]:
            param.requires_grad_(True)
    train([(ours, mine[:2] + mine[3:]), (torchs, theirs[:2] + theirs[3:])], range(2, 4))
    assert_close(mine, theirs)
    # One that is frozen again keeps its state, and a gradient that was left still counts, as in torch.
    for params in (mine, theirs):
        params[0].requires_grad_(False)
    ours.step()
    torchs.step()
    assert_close(mine, theirs)
    assert float(ours.state[mine[0]]["step"]) == 3 and mine[2] not in ours.state


def test_toggling_requires_grad_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(1))
    monkeypatch.setattr(type(optimizer), "_make_plan", lambda self, **_: pytest.fail("built again"))
    for step, trains in enumerate([False, True, False]):
        for param in params:
            param.requires_grad_(trains)
            param.data = param.data.clone()
        train([(optimizer, params)], range(step, step + 1))


def test_a_parameter_given_other_memory() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    train([(ours, mine), (torchs, theirs)], range(2))
    kept = mine[2].data
    before = kept.clone()
    mine[2].data = kept.clone()
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)
    assert torch.equal(kept, before), "the step went to the old memory"


def test_a_parameter_given_another_layout_at_the_same_address() -> None:
    mine, theirs = make_params([(6, 6), (5,)]), make_params([(6, 6), (5,)])
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    train([(ours, mine), (torchs, theirs)], range(2))
    for params, optimizer in ((mine, ours), (theirs, torchs)):
        params[0].grad = None
        params[0].data = params[0].data.t()
        state = optimizer.state[params[0]]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].t().clone())
    for step in range(2, 4):
        for params, optimizer in ((mine, ours), (theirs, torchs)):
            set_gradients(params, step=step)
            params[0].grad = params[0].grad.t().contiguous().t()
            optimizer.step()
    assert_close(mine, theirs)


def test_a_parameter_cut_shorter_at_the_same_address() -> None:
    params = make_params([(8, 3), (5,)])
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(2))
    memory, behind = params[0].data, params[0].data[4:].clone()
    params[0].grad = None
    params[0].data = params[0].data[:4]
    set_gradients(params, step=2)
    for _ in range(2):
        with pytest.raises(StateError, match=r"state 'exp_avg' of parameter 0 of group 0 has shape \(8, 3\), it needs"):
            optimizer.step()
    del optimizer.state[params[0]]
    optimizer.step()
    assert torch.equal(memory[4:], behind) and optimizer.state[params[0]]["exp_avg"].shape == (4, 3)


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def conversion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways in which `Module.to` changes a parameter: by its data, by swapping tensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("conversion")
def test_a_model_moved_to_another_dtype_takes_its_state_along() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = tilestep.AdamW(model.parameters(), lr=0.1)
    train([(optimizer, list(model.parameters()))], range(2))
    model.zero_grad()
    model.to(torch.float64)
    theirs = twins(list(model.parameters()))
    torchs = torch.optim.AdamW(theirs, lr=0.1)
    torchs.load_state_dict(optimizer.state_dict())
    train([(optimizer, list(model.parameters())), (torchs, theirs)], range(2, 4))
    assert_close(list(model.parameters()), theirs, rtol=1e-12)
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float64
    assert float(optimizer.state[model.weight]["step"]) == 4


@pytest.mark.parametrize("conversion", [True], indirect=True)
@pytest.mark.usefixtures("conversion")
def test_a_model_that_is_still_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    optimizer = tilestep.AdamW(model.parameters(), lr=0.1)
    assert len(optimizer.state) == 0
    optimizer.step()
    model.to_empty(device="cpu")
    params = list(model.parameters())
    with torch.no_grad():
        for param, value in zip(params, make_params([(3, 4), (3,)])):
            param.copy_(value)
    theirs = twins(params)
    train([(optimizer, params), (torch.optim.AdamW(theirs, lr=0.1), theirs)], range(3))
    assert_close(params, theirs)


def test_plain_tensors_with_gradients_set_by_hand() -> None:
    mine, theirs = [torch.ones(3)], [torch.ones(3)]
    train([(tilestep.AdamW(mine), mine), (torch.optim.AdamW(theirs), theirs)], range(3))
    assert_close(mine, theirs)


def test_a_parameter_replaced_in_its_group_takes_the_state_it_is_given() -> None:
    """How densifying methods (3D Gaussian splatting) grow their parameters."""
    mine, theirs = make_params([(4, 3), (5,)]), make_params([(4, 3), (5,)])
    ours, torchs = tilestep.Adam(mine), torch.optim.Adam(theirs)
    train([(ours, mine), (torchs, theirs)], range(2))
    for params, optimizer in ((mine, ours), (theirs, torchs)):
        old = params[0]
        params[0] = torch.nn.Parameter(torch.cat([old.detach(), torch.ones(2, 3)]))
        state = optimizer.state.pop(old)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.cat([state[key], torch.zeros(2, 3)])
        optimizer.param_groups[0]["params"][0] = params[0]
        optimizer.state[params[0]] = state
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)
    assert set(ours.state_dict()["state"]) == {0, 1}


def test_a_state_that_is_thrown_away_begins_again() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    for reset in (lambda o: o.state.clear(), lambda o: setattr(o, "state", type(o.state)(dict))):
        train([(ours, mine), (torchs, theirs)], range(2))
        reset(ours)
        reset(torchs)
    train([(ours, mine), (torchs, theirs)], range(2))
    assert_close(mine, theirs)
    assert float(ours.state[mine[0]]["step"]) == 2


def test_states_replaced_by_copies_are_used() -> None:
    """How Lightning moves a state to a device."""
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    train([(ours, mine), (torchs, theirs)], range(2))
    for param in mine:
        ours.state[param] = {key: value.clone() for key, value in ours.state[param].items()}
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)
    assert_close([ours.state[mine[1]]["exp_avg"]], [torchs.state[theirs[1]]["exp_avg"]])


@pytest.mark.parametrize("shapes", [[(0,)], [()], [(0, 3), (2, 0)], [(1,), (1, 1, 1), ()]], ids=str)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_empty_and_tiny_parameters(shapes: list[tuple[int, ...]], clip: float | None) -> None:
    mine, theirs = make_params(shapes), make_params(shapes)
    ours, torchs = tilestep.AdamW(mine, max_grad_norm=clip), torch.optim.AdamW(theirs)
    for step in range(2):
        set_gradients(mine, theirs, step=step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        ours.step()
        torchs.step()
    assert_close(mine, theirs)
    assert [float(ours.state[param]["step"]) for param in mine] == [2.0] * len(mine)


def test_mixed_dtypes_in_one_optimizer() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    mine = [make_params([(7,)], dtype)[0] for dtype in dtypes]
    theirs = twins(mine)
    ours, torchs = tilestep.SGD(mine, lr=0.5, momentum=0.5), torch.optim.SGD(theirs, lr=0.5, momentum=0.5)
    train([(ours, mine), (torchs, theirs)], range(3))
    for left, right in zip(mine, theirs):
        # torch rounds after every operation, a kernel once.
        torch.testing.assert_close(left, right, rtol=2e-2 if left.itemsize == 2 else 1e-6, atol=1e-3)
        assert ours.state[left]["momentum_buffer"].dtype is left.dtype


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_need_a_graph_themselves() -> None:
    weight, twin = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    for param, optimizer in ((weight, tilestep.SGD([weight], lr=0.1)), (twin, torch.optim.SGD([twin], lr=0.1))):
        (param**3).sum().backward(create_graph=True)
        optimizer.step()
    assert_close([weight], [twin])
