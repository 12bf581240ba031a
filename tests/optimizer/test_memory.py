"""Memory that moves under a tensor, gradients of other kinds: a step uses what its tensors are now, in both looks."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from twins import assert_close, assert_unchanged, everything, make_params, set_gradients, train, twins

import tilestep
from tilestep import GradientError, StateError, native
from tilestep.native.table import CHANGED, SAME, Table
from tilestep.optimizer.plan import StepPlan

Change = Callable[[torch.Tensor], Any]


@pytest.fixture(params=["native", "python"], autouse=True)
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both looks before a step."""
    if request.param == "python":
        monkeypatch.setattr(native, "module", lambda tensors: None)
    elif not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")
    yield request.param


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; what the tensor's memory had is overwritten, as by its next owner."""
    new = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(1e30 if tensor.is_floating_point() else 77)
    return new


def away_and_back(tensor: torch.Tensor) -> None:
    kept = poisoned(tensor.data)
    tensor.data = kept.double()
    tensor.data = tensor.data.to(kept.dtype)


def resized(tensor: torch.Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    values = tensor.detach().clone()
    storage.resize_(0)
    storage.resize_(size)
    tensor.copy_(values)


def swapped(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, poisoned(tensor))


MOVES: dict[str, Change] = {
    "data": lambda tensor: setattr(tensor, "data", poisoned(tensor)),
    "set_": lambda tensor: tensor.set_(poisoned(tensor)),  # type: ignore[call-overload]
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "away and back": away_and_back,
    "resize_": resized,
    "swap_tensors": swapped,
    "negated": lambda tensor: setattr(tensor, "data", torch._neg_view(-poisoned(tensor))),
}

OPTIMIZERS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "AdamW": ({}, torch.float32),
    "masters": ({"master_weights": True}, torch.bfloat16),
    "remainders": ({"master_weights": "remainder"}, torch.bfloat16),
    "kahan": ({"master_weights": "kahan"}, torch.bfloat16),
    "int8": ({"master_weights": "int8"}, torch.bfloat16),
    "NAdam": ({}, torch.float32),
    "Adafactor": ({}, torch.float32),
    "SOAP": ({"precondition_frequency": 2}, torch.float64),
}


def made(name: str, params: list[torch.nn.Parameter]) -> tilestep.Optimizer:
    options, _ = OPTIMIZERS[name]
    rule = name if name in tilestep.registry else "AdamW"
    return tilestep.Optimizer(params, rule, lr=0.1, **options)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_gets_other_memory(name: str, move: str) -> None:
    dtype = OPTIMIZERS[name][1]
    shapes = [(4, 6), (5, 3), (16, 2)]
    params, others = make_params(shapes, dtype=dtype), make_params(shapes, dtype=dtype)
    optimizer, other = made(name, params), made(name, others)
    for step in range(7):
        train([(optimizer, params), (other, others)], range(step, step + 1))
        if step in (2, 4):
            for param in params:
                for key, value in optimizer.state[param].items():
                    if move == "negated" and not value.is_floating_point():
                        continue
                    if move == "resize_" and value.untyped_storage().nbytes() > value.nbytes:
                        # A view of an array with other tensors' values.
                        continue
                    MOVES[move](value)
                    assert key in optimizer.state[param]
    assert all(map(torch.equal, params, others))
    for param, twin in zip(params, others):
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, other.state[twin][key]), key


@pytest.mark.parametrize("change", ["data", "part"])
def test_a_state_that_is_a_dtensor_gets_another_part(change: str, one_rank: None) -> None:
    """The state is the same object, and no entry of its parameter's was set."""
    mesh = init_device_mesh("cpu", (1,))
    values = make_params([(4, 6), (5, 3)])
    params = [torch.nn.Parameter(distribute_tensor(value.detach().clone(), mesh, [Shard(0)])) for value in values]
    optimizer, other = tilestep.AdamW(params, lr=0.1), tilestep.AdamW(values, lr=0.1)
    for step in range(7):
        set_gradients(values, step=step)
        for param, value in zip(params, values):
            param.grad = distribute_tensor(value.grad.clone(), mesh, [Shard(0)])
        optimizer.step()
        other.step()
        if step in (2, 4):
            state: Any = optimizer.state[params[0]]["exp_avg"]
            if change == "data":
                state._local_tensor.data = poisoned(state._local_tensor)
            else:
                state._local_tensor = poisoned(state._local_tensor)
    for param, value in zip(params, values):
        assert torch.equal(param.full_tensor(), value)  # type: ignore[attr-defined]


def test_the_memory_of_state_that_was_moved_is_not_written() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(3))
    before = [optimizer.state[param]["exp_avg"].data for param in params]
    for param in params:
        optimizer.state[param]["exp_avg"].data = optimizer.state[param]["exp_avg"].clone()
    kept = [tensor.clone() for tensor in before]
    train([(optimizer, params)], range(3, 5))
    assert all(map(torch.equal, before, kept))


@pytest.mark.parametrize("what", ["param", "exp_avg", "gradient"])
@pytest.mark.parametrize("steady", [False, True])
def test_memory_that_was_freed_is_refused(what: str, steady: bool) -> None:
    """As fully sharded models free parameters; also where a tensor does not begin with its storage."""
    whole = torch.nn.Parameter(torch.ones(9)[1:])
    optimizer = tilestep.AdamW([whole, *make_params()])
    for _ in range(4 if steady else 1):
        whole.grad = torch.ones(9)[1:]
        optimizer.step()
    states = [value.clone() for value in optimizer.state[whole].values()]
    tensor = {"param": whole, "exp_avg": optimizer.state[whole]["exp_avg"], "gradient": whole.grad}[what]
    assert tensor is not None
    size = tensor.untyped_storage().nbytes()
    values = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    message = {
        "param": "parameter 0 of group 0",
        "exp_avg": "state 'exp_avg' of parameter 0",
        "gradient": "the gradient",
    }
    refused = rf"{message[what]}.* has no memory\W+its storage was freed"
    for _ in range(2):  # no step goes on with the addresses that tables had before
        with pytest.raises((GradientError, StateError), match=refused):
            optimizer.step()
    tensor.untyped_storage().resize_(size)
    with torch.no_grad():
        tensor.copy_(values)
    assert all(map(torch.equal, states, optimizer.state[whole].values()))
    optimizer.step()
    assert float(optimizer.state[whole]["step"]) == (5 if steady else 2)


@pytest.mark.parametrize("moves", ["params", "gradients"])
def test_a_step_that_was_interrupted_leaves_no_address_of_memory_that_is_gone(moves: str) -> None:
    """Ctrl-C at any call of a step whose tensors have moved: the next one works on what they are now."""
    mine = make_params()
    theirs = twins(mine)
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1, foreach=False)
    train([(ours, mine), (torchs, theirs)], range(3))
    is_interrupted, calls = True, 0
    while is_interrupted:
        calls += 1
        set_gradients(mine, theirs, step=calls)
        gone = [param.data if moves == "params" else param.grad for param in mine]
        for param in mine:
            if moves == "params":
                param.data = param.data.clone()
            else:
                param.grad = param.grad.clone()
        if moves == "gradients":
            # A complete look between, after which addresses are known ones.
            ours.prepared()
            set_gradients(mine, theirs, step=calls)
        before = [param.detach().clone() for param in mine]
        kept = [tensor.clone() for tensor in gone]
        is_interrupted = interrupted_at(calls, ours.step)
        if all(map(torch.equal, mine, before)):
            ours.step()
        torchs.step()
        assert all(map(torch.equal, gone, kept)), calls
        assert_close(mine, theirs)
    assert calls > 20


def overlapping(kind: str, optimizer: Any, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A gradient for the first parameter in memory that the step writes."""
    own, other = params[0].data, params[1]
    state = optimizer.state[other].get("momentum_buffer", other)
    return {
        "itself": own,
        "turned": own.t(),
        "shifted": own.new_empty(0).set_(own.untyped_storage(), 7, own.shape),
    }.get(kind, state if kind == "state" else other.data)


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("kind", ["itself", "turned", "shifted", "other", "state"])
def test_gradients_in_memory_that_the_step_writes(kind: str, steps: int) -> None:
    """What lies in its parameter's own memory is read before that is written, in any layout; others are refused."""
    both = [], []
    for params in both:
        params += make_params([(300, 300)] * 3)
        params[0].data = torch.cat([params[0].data.reshape(-1), torch.ones(7)])[:90000].view(300, 300)
    ours = tilestep.SGD(both[0], lr=0.1, momentum=0.9)
    torchs = torch.optim.SGD(both[1], lr=0.1, momentum=0.9, foreach=False)
    train([(ours, both[0]), (torchs, both[1])], range(steps))
    set_gradients(*both, step=steps)
    before = numbers_of(ours)
    for optimizer, params in ((ours, both[0]), (torchs, both[1])):
        params[0].grad = overlapping(kind, optimizer, params)
    if kind in ("other", "state"):
        named = "state 'momentum_buffer' of parameter 1" if kind == "state" and steps else "parameter 1"
        for _ in range(2):
            with pytest.raises(GradientError, match=f"the gradient of parameter 0 .* shares memory with {named}"):
                ours.step()
        assert all(map(torch.equal, numbers_of(ours), before))
        return
    for _ in range(2):
        ours.step()
        torchs.step()
    assert_close(*both)


@pytest.mark.parametrize("kind", ["state", "param", "later"])
def test_states_and_parameters_that_are_given_the_memory_of_others_are_refused(kind: str) -> None:
    params = make_params([(6,), (6,)])
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(4))
    own, memory = optimizer.state[params[1]], torch.zeros(9)
    if kind == "later":
        params[0].data, params[1].data = memory[:6], memory[3:]
        named = "parameter 1 of group 0 shares memory with parameter 0"
    else:
        own["exp_avg"] = optimizer.state[params[0]]["exp_avg_sq"] if kind == "state" else params[0].data
        other = "state 'exp_avg_sq' of parameter 0" if kind == "state" else "parameter 0"
        named = f"state 'exp_avg' of parameter 1 of group 0 shares memory with {other}"
    set_gradients(params)
    for _ in range(2):
        with pytest.raises(GradientError, match=named):
            optimizer.step()


SHAPES = [(6, 6), (5,), (4, 7)]


def numbers_of(optimizer: Any) -> list[torch.Tensor]:
    """All numbers of an optimizer and its parameters."""
    now = everything(optimizer)
    return [*now["params"], *(value for state in now["state"] for value in state.values())]


def steps_of(name: str, count: int, interrupted: int = 0) -> tuple[Any, list[torch.Tensor], bool]:
    """An optimizer after some steps, of which the last is interrupted at a call; and whether it was."""
    rule, _, master = name.partition(" with ")
    params = make_params(SHAPES, dtype=torch.bfloat16 if master else torch.float32)
    params = [param for param in params if param.dim() == 2] if rule == "Muon" else params
    optimizer = getattr(tilestep, rule)(params, lr=0.1, **({"master_weights": master} if master else {}))
    for step in range(count - 1):
        set_gradients(params, step=step)
        optimizer.step()
    set_gradients(params, step=count - 1)
    return optimizer, params, interrupted_at(interrupted, optimizer.step)


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor", "Muon", "AdamW with remainder"])
def test_a_step_that_was_interrupted_was_taken_or_not_or_stops_the_next(name: str) -> None:
    """Muon's matrices are multiplied by functions in Python, between passes; other passes follow each other in C."""
    before, after, last = (numbers_of(steps_of(name, count)[0]) for count in (2, 3, 4))
    calls, not_interrupted, broken = 0, 0, 0
    # A call inside of a generator that ends is left alone.
    while not_interrupted < 5:
        calls += 1
        optimizer, params, was_interrupted = steps_of(name, 3, calls)
        not_interrupted = 0 if was_interrupted else not_interrupted + 1
        now = numbers_of(optimizer)
        is_before, is_after = (all(map(torch.equal, now, other)) for other in (before, after))
        assert optimizer.plan is not None
        if optimizer.plan.interruption:
            broken += not (is_before or is_after)
            for _ in range(2):
                with pytest.raises(StateError, match="KeyboardInterrupt has interrupted a step"):
                    optimizer.step()
            with pytest.warns(UserWarning, match="KeyboardInterrupt has interrupted a step"):
                state_dict = optimizer.state_dict()
            optimizer.load_state_dict(state_dict)
            optimizer.step()
            continue
        assert is_before or is_after, calls
        if is_before:
            optimizer.step()
        set_gradients(params, step=3)
        optimizer.step()
        assert all(map(torch.equal, numbers_of(optimizer), last)), calls
    assert calls > 80 and bool(broken) is (name == "Muon")


def interrupted_at(calls: int, function: Callable[[], Any]) -> bool:
    """Call a function and interrupt it as Ctrl-C does, before it has made or left so many calls; whether it was."""
    remaining, own = calls, sys._getframe()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal remaining
        # Not before calls of C functions: Python 3.12 then frees the arguments of `function(*arguments)` twice.
        remaining -= event != "c_call"
        if remaining == 0 and event != "c_call" and frame is not own:
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # torch's own contexts do not always put it back
    return False


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("turn", ["t", "square", "gaps", "shorter"])
def test_a_parameter_that_lies_otherwise_at_its_old_address(turn: str, keeps_gradients: bool) -> None:
    mine, theirs = make_params([(6, 6), (5,)]), make_params([(6, 6), (5,)])
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1, foreach=False)
    train([(ours, mine), (torchs, theirs)], range(4))
    for params in (mine, theirs):
        data, gradient = params[0].data, params[0].grad
        assert gradient is not None
        params[0].grad = None
        if turn == "t":
            params[0].data = data.t()
        elif turn == "square":
            params[0].data, gradient = data.view(4, 9), gradient.view(4, 9)
        elif turn == "gaps":
            params[0].data, gradient = data[:, ::2], gradient[:, ::2]
        else:
            params[0].data, gradient = data[:3], gradient[:3]
        params[0].grad = gradient if keeps_gradients else gradient.clone()
    for _ in range(2):
        ours.step()
        torchs.step()
    assert_close(mine, theirs)


def test_a_parameter_turned_in_place_with_its_gradient_kept() -> None:
    """Its address, its gradient and that one's address are what they were."""
    mine, theirs = make_params([(6, 6)]), make_params([(6, 6)])
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1, foreach=False)
    train([(ours, mine), (torchs, theirs)], range(4))
    for params, optimizer in ((mine, ours), (theirs, torchs)):
        params[0].data = params[0].data.t()
        optimizer.step()
    assert_close(mine, theirs)


GRADIENT_DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]


@pytest.mark.parametrize(("dtype", "other"), GRADIENT_DTYPES)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradients_dtype_that_changes(dtype: torch.dtype, other: torch.dtype, max_grad_norm: float | None) -> None:
    params, twin = make_params(dtype=dtype), make_params(dtype=dtype)
    ours = tilestep.AdamW(params, lr=0.1, max_grad_norm=max_grad_norm)
    control = tilestep.AdamW(twin, lr=0.1, max_grad_norm=max_grad_norm)
    for step, declared in enumerate([dtype, dtype, other, other, dtype, None, None]):
        for param in params:
            param.grad = None
            param.grad_dtype = declared
        set_gradients(twin, step=step)
        for param, source in zip(params, twin):
            assert source.grad is not None
            # Numbers that every dtype here has, and the twin's too.
            values = source.grad.to(torch.bfloat16).to(torch.float16).clamp(-4, 4)
            source.grad = values.to(dtype)
            param.grad = values.to((dtype, other)[step % 2] if declared is None else declared)
        ours.step()
        control.step()
        # The norm of gradients is summed in another order for another dtype.
        assert_close(params, twin, rtol=1e-6) if dtype is not torch.bfloat16 else assert_close(params, twin, rtol=1e-2)
    assert float(ours.state[params[0]]["step"]) == 7


def test_a_gradient_that_a_collective_still_makes(one_rank: None) -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine, lr=0.1, max_grad_norm=1.0), tilestep.AdamW(theirs, lr=0.1, max_grad_norm=1.0)
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        if step != 3:
            for param in mine:
                param.grad = _functional_collectives.all_reduce(param.grad, "sum", dist.group.WORLD)
            assert type(mine[0].grad) is not torch.Tensor
        ours.step()
        torchs.step()
    assert all(map(torch.equal, mine, theirs))


class Wrapper(torch.Tensor):
    """A tensor that keeps its values elsewhere."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, requires_grad=values.requires_grad
        )  # type: ignore[return-value]

    def __init__(self, values: torch.Tensor) -> None:
        self.values_elsewhere = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_elsewhere)
        raise NotImplementedError(func)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_gradient_of_a_type_that_has_no_memory_is_refused(steps: int) -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(steps))
    set_gradients(params)
    before = everything(optimizer)
    params[2].grad = Wrapper(torch.ones_like(params[2]).detach())
    with pytest.raises(GradientError, match="the gradient of parameter 2 of group 0 has the type Wrapper"):
        optimizer.step()
    params[2].grad = None
    assert_unchanged(optimizer, before)


def test_a_parameter_of_a_type_that_has_no_memory_is_refused() -> None:
    with pytest.raises(GradientError, match="parameter 0 of group 0 is of the type Wrapper"):
        tilestep.AdamW([Wrapper(torch.ones(3, requires_grad=True))])


def test_lazy_negation_and_zeros_are_resolved() -> None:
    start = [torch.randn(4, 6), torch.randn(5), torch.randn(3)]
    mine = [torch.nn.Parameter(torch._neg_view(-value)) for value in start]
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        assert mine[0].grad is not None
        mine[0].grad = torch._neg_view(-mine[0].grad)
        mine[1].grad = torch._efficientzerotensor(5)
        theirs[1].grad = torch.zeros(5)
        if step == 3:
            mine[2].data = torch._neg_view(-mine[2].data)
        ours.step()
        torchs.step()
    assert_close(mine, theirs)


def test_lazy_conjugation_is_resolved() -> None:
    start = torch.randn(4, 3, dtype=torch.complex64)
    mine, theirs = [torch.nn.Parameter(start.conj())], [torch.nn.Parameter(start.conj().resolve_conj())]
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step in range(5):
        gradient = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
        mine[0].grad, theirs[0].grad = gradient.conj(), gradient.conj().resolve_conj()
        ours.step()
        torchs.step()
    assert_close(mine, theirs)


def test_gradients_are_held_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread replaces them when kernels have their addresses and have not read them."""
    mine, theirs = make_params([(400,), (300, 3)]), make_params([(400,), (300, 3)])
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    run, freed = StepPlan.update, []

    def replaced(*args: Any, **options: Any) -> None:
        storages = [param.grad.untyped_storage().data_ptr() for param in mine if param.grad is not None]
        for param in mine:
            param.grad = torch.full_like(param, 1e34)
        freed.append(storages)
        junk = [torch.full_like(param, 1e34) for param in mine for _ in range(4)]
        assert not {tensor.data_ptr() for tensor in junk} & set(storages)
        run(*args, **options)

    monkeypatch.setattr(StepPlan, "update", replaced)
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        ours.step()
        torchs.step()
    assert_close(mine, theirs)
    assert len(freed) == 6


def test_nothing_holds_gradients_after_a_step_that_failed() -> None:
    params = make_params([(400,), (300, 3)])
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(4))

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    assert optimizer.plan is not None
    optimizer.plan._calls[0,][:] = [[partial(broken)]]
    set_gradients(params)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    storages = [weakref.ref(param.grad.untyped_storage()) for param in params]  # type: ignore[union-attr]
    for param in params:
        param.grad = None
    assert [storage() for storage in storages] == [None, None]


@pytest.mark.parametrize("kind", ["dense", "gaps", "in the parameter"])
def test_nothing_holds_gradients_after_a_step(kind: str) -> None:
    """Also those that kernels read from a copy."""
    params = make_params([(400,), (300, 3)])
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    for step in range(5):
        set_gradients(params, step=step)
        for param in params:
            if kind == "gaps":
                param.grad = torch.stack([param.grad, param.grad], -1)[..., 0]
            elif kind == "in the parameter":
                param.grad = param.data
        kept = [weakref.ref(param.grad) for param in params]
        storages = [StorageWeakRef(param.grad.untyped_storage()) for param in params]
        optimizer.step()
        for param in params:
            param.grad = None
        assert [gradient() for gradient in kept] == [None, None]
        assert kind == "in the parameter" or all(storage.expired() for storage in storages)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])  # whose states begin with 0, and with another number
def test_fake_parameters_have_fake_state(where: str, name: str) -> None:
    kept: dict[type, Any] = {}
    own, theirs = getattr(tilestep, name), getattr(torch.optim, name)
    options = {"initial_accumulator_value": 0.1} if name == "Adagrad" else {}
    for kind in (own, theirs):
        mode = FakeTensorMode()
        with mode:
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
            optimizer = kind(model.parameters(), **options) if where == "inside" else None
            model(torch.randn(3, 4)).sum().backward()
        if where == "outside":
            optimizer = kind(model.parameters(), **options)
            optimizer.step()
        else:
            with mode:
                optimizer.step()  # type: ignore[union-attr]
        assert optimizer is not None
        kept[kind] = [
            {key: (tuple(value.shape), value.dtype) for key, value in optimizer.state[param].items() if key != "step"}
            for param in model.parameters()
        ]
    assert kept[own] == kept[theirs]


def test_real_parameters_under_a_fake_mode_are_refused() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(4))
    set_gradients(params)
    before = everything(optimizer)
    with FakeTensorMode(), pytest.raises(GradientError, match="parameter 0 of group 0 is a real tensor"):
        optimizer.step()
    assert_unchanged(optimizer, before)
    optimizer.step()


def test_parameters_on_the_meta_device_have_state_there_once_they_have_gradients() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = tilestep.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device="meta")).sum().backward()
    for _ in range(2):
        optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].device.type == "meta"
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    params = list(model.parameters())
    with torch.no_grad():
        for param, value in zip(params, make_params([(2, 3), (2,)])):
            param.copy_(value)
    theirs = twins(params)
    train([(optimizer, params), (torch.optim.AdamW(theirs, lr=0.1), theirs)], range(3))
    assert_close(params, theirs)


LOOKS: dict[str, tuple[Change, bool]] = {
    "nothing": (lambda tensor: None, True),
    "values": (lambda tensor: tensor.fill_(3.0), True),
    "requires_grad": (lambda tensor: tensor.requires_grad_(), True),
    "address": (lambda tensor: setattr(tensor, "data", tensor.data.clone()), False),
    "strides": (lambda tensor: setattr(tensor, "data", tensor.data.t()), False),
    "in place": (lambda tensor: tensor.data.t_() if tensor.t_() is None else None, False),
    "shape": (lambda tensor: setattr(tensor, "data", tensor.data.view(2, 8)), False),
    "dtype": (
        lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32).view(torch.float32).double()),
        False,
    ),
    "dtype alone": (lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)), False),
    "sign": (lambda tensor: setattr(tensor, "data", torch._neg_view(tensor.data)), False),
    "storage": (lambda tensor: tensor.untyped_storage().resize_(0), False),
}


@pytest.mark.parametrize("change", LOOKS)
def test_what_unchanged_means(change: str, look: str) -> None:
    """One definition, for tensors that stay the same objects and for lists of tensors."""
    tensor = torch.ones(4, 4)
    others = [torch.zeros(3), torch.zeros(2, 3, 4).transpose(0, 1), torch.zeros(()), torch.zeros(0, 2)]
    fixed, listed = Table(states=[*others, tensor]), Table()
    listed.remember([*others, tensor])
    for _ in range(3):
        assert fixed.look(1) == SAME and listed.refresh([*others, tensor]) == SAME
    assert fixed.is_native is listed.is_native is (look == "native")
    act, expected = LOOKS[change]
    act(tensor)
    assert (listed.refresh([*others, tensor]) == SAME) is expected
    for _ in range(2):
        assert (fixed.look(1) == SAME) is expected
    assert listed.refresh(others) == CHANGED


def test_a_subclass_is_not_what_it_looks_like(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain = [torch.zeros(3), torch.zeros(2, 2)]
    listed = Table()
    listed.remember(plain)
    placed = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in plain]
    assert listed.refresh(placed) == CHANGED and listed.refresh(plain) == SAME
    fixed = Table(states=placed)
    assert fixed.look(1) == SAME and fixed.look(1) == SAME
    placed[1]._local_tensor.data = torch.zeros(2, 2)  # type: ignore[attr-defined]
    assert fixed.look(1) == CHANGED
    fixed = Table(states=placed)
    assert fixed.look(1) == SAME and fixed.look(1) == SAME
    placed[0]._local_tensor = torch.zeros(3)  # type: ignore[attr-defined]
    assert fixed.look(1) == CHANGED


def test_copies_look_at_their_own_state() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(4))
    copied = copy.deepcopy(optimizer)
    theirs = copied.param_groups[0]["params"]
    copied.state[theirs[0]]["exp_avg"].data = copied.state[theirs[0]]["exp_avg"].clone()
    train([(optimizer, params), (copied, theirs)], range(4, 7))
    assert all(map(torch.equal, params, theirs))
