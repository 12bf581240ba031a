"""The C++ look before a step: it sees every change that the Python path sees, and steps come out the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep import native
from tilestep.compat import DTENSOR_PARTS
from tilestep.devices.garbage import without_collections
from tilestep.native import build
from tilestep.native.build import layout_flags
from tilestep.native.table import CHANGED, MOVED, SAME, Table, Writes, memory_of, rows_of, taken_gradients

SHAPES = [(4, 6), (5,), (), (0, 3), (2, 3, 4, 5)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")


def pair() -> tuple[list[torch.nn.Parameter], tilestep.Optimizer, list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    return mine, tilestep.Optimizer(mine, "AdamW", lr=0.1), theirs, torch.optim.AdamW(theirs, lr=0.1)


def fresh(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for left, right in zip(mine, theirs):
        left.grad = torch.randn_like(left)
        right.grad = left.grad.clone()


def keep(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for left, right in zip(mine, theirs):
        left.grad.add_(1)
        right.grad.add_(1)


def some_absent(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    fresh(mine, theirs)
    mine[0].grad = theirs[0].grad = None


def strided(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    fresh(mine, theirs)
    mine[0].grad = mine[0].grad.t().contiguous().t()
    mine[4].grad = mine[4].grad.contiguous(memory_format=torch.channels_last)


def same_memory_other_strides(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    memory = mine[0].grad.view(-1)
    mine[0].grad = memory.view(6, 4).t()
    theirs[0].grad = mine[0].grad.clone()


def expanded(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    fresh(mine, theirs)
    mine[1].grad = torch.ones(1, dtype=torch.float64).expand(5)
    theirs[1].grad = torch.ones(5, dtype=torch.float64)


def moved_params(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    fresh(mine, theirs)
    mine[0].data = mine[0].data.clone()
    mine[4].data = mine[4].data.contiguous(memory_format=torch.channels_last)


CHANGES: list[Callable[..., None]] = [
    keep,
    fresh,
    some_absent,
    strided,
    same_memory_other_strides,
    expanded,
    moved_params,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen(change: Callable[..., None]) -> None:
    mine, ours, theirs, torchs = pair()
    fresh(mine, theirs)
    for _ in range(3):
        ours.step()
        torchs.step()
    assert ours.plan is not None and ours.plan.engines[0].table.finds, "C++ looks in steady steps"
    for after in (change, fresh, keep):
        after(mine, theirs)
        for _ in range(3):
            ours.step()
            torchs.step()
        for left, right in zip(mine, theirs):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_groups_and_states_that_are_replaced_are_seen() -> None:
    mine, ours, theirs, torchs = pair()
    fresh(mine, theirs)
    for _ in range(3):
        ours.step()
        torchs.step()
    added, twin = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    added.grad, twin.grad = torch.ones_like(added), torch.ones_like(twin)
    ours.add_param_group({"params": [added], "lr": 0.5})
    torchs.add_param_group({"params": [twin], "lr": 0.5})
    torchs.load_state_dict(torchs.state_dict())
    ours.load_state_dict(ours.state_dict())
    for _ in range(4):
        ours.step()
        torchs.step()
    for left, right in zip([*mine, added], [*theirs, twin]):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_versions_count_as_torch_counts_them() -> None:
    mine, ours, theirs, _ = pair()
    fresh(mine, theirs)
    for _ in range(5):
        before = [param._version for param in mine]
        ours.step()
        assert [param._version for param in mine] == [version + 1 for version in before]


def test_nothing_is_kept_alive() -> None:
    import weakref

    mine, ours, theirs, _ = pair()
    fresh(mine, theirs)
    for _ in range(4):
        ours.step()
    gradients = [weakref.ref(param.grad) for param in mine]
    for param in mine:
        param.grad = None
    assert all(reference() is None for reference in gradients)
    params = [weakref.ref(param) for param in mine]
    del mine, ours, param
    import gc

    gc.collect()
    assert all(reference() is None for reference in params)


@pytest.mark.parametrize("natively", [True, False])
def test_fixed_tensors_are_let_go_at_once(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the module is not built yet: states are most of what a GPU holds."""
    if not natively:
        monkeypatch.setattr(native, "module", lambda count: None)
    tensors = [torch.ones(3), torch.ones(2)]
    fixed = Table(states=tensors)
    assert fixed.look(1) == SAME and fixed.look(1) == SAME
    held = [weakref.ref(tensor) for tensor in tensors]
    with without_collections():
        del fixed, tensors
        assert all(reference() is None for reference in held)


def test_a_table_sees_what_torch_sees() -> None:
    tensors = [torch.zeros(4, 2) for _ in range(200)]
    table = Table()
    table.remember(tensors)
    assert table.refresh(tensors) == SAME and table.is_native, "compared in C++ from now on"
    assert table.refresh(tensors) == SAME
    moved = [*tensors[:-1], torch.zeros(4, 2)]
    assert table.refresh(moved) == MOVED
    assert table.refresh(moved) == SAME and table.refresh(tensors) == MOVED
    assert table.refresh([*tensors[:-1], torch.nn.Parameter(torch.zeros(4, 2))]) == MOVED
    others = [torch.zeros(2, 4).t(), torch.zeros(4, 2).double(), torch.zeros(8)]
    for other in (*others, None, torch.zeros(4, 2).to_sparse(), "no tensor"):
        assert table.refresh([*tensors[:-1], other]) == CHANGED  # type: ignore[list-item]
    assert table.refresh(tensors[:-1]) == CHANGED
    assert table.refresh(tensors) != CHANGED, "what was asked in between is forgotten"


def test_a_number_is_no_vector() -> None:
    shapes = [(), (1,), (1, 1), (2,), (2, 1), (1, 2), (0,), (3, 0)]
    tensors = [torch.zeros(shape) for shape in shapes]
    for place, one in enumerate(tensors):
        table = Table()
        table.remember([one])
        assert table.refresh([one]) == SAME and table.is_native
        same = [table.refresh([other]) != CHANGED for other in tensors]
        assert same == [place == other for other in range(len(tensors))]


def test_what_cannot_be_looked_at_is_left_to_python() -> None:
    """An error of torch's in here would end the process."""
    module = native.module(500)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with torch.inference_mode():
        unversioned = torch.nn.Parameter(torch.zeros(3))
        module.bump([unversioned])
    unversioned.grad = torch.ones(3)
    assert module.create([], [nested], DTENSOR_PARTS, []) is None
    assert module.create([unversioned], [], DTENSOR_PARTS, None) is None
    with pytest.raises(RuntimeError, match="inference tensor"):
        module.bump([unversioned])


def test_steps_in_inference_mode() -> None:
    with torch.inference_mode():
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(600)]
        for param in params:
            param.grad = torch.ones(3)
        optimizer = tilestep.SGD(params, lr=0.5)  # type: ignore[attr-defined]
        for _ in range(3):
            optimizer.step()
    assert all(param.tolist() == [-1.5] * 3 for param in params)


@pytest.mark.parametrize("natively", [True, False])
def test_versions_gradients_and_what_trains(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.native import table as tensor_table

    if not natively:
        monkeypatch.setattr(native, "module", lambda count: None)
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(40)]
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    listed = [*params[:20], frozen, *params[20:]]
    assert tensor_table.survey(listed).trains == bytes([1] * 20 + [0] + [1] * 20)
    assert not tensor_table.survey(listed).any_gradient
    before = tensor_table.survey(listed).versions
    with torch.no_grad():
        params[3].add_(1)
        frozen.mul_(2)
    assert tensor_table.survey(listed).versions == before + 2
    params[-1].grad = torch.zeros(3)
    assert tensor_table.survey(listed).any_gradient and not tensor_table.survey(listed[:-1]).any_gradient
    params[7].requires_grad_(False)
    frozen.requires_grad_(True)
    assert tensor_table.survey(listed).trains == bytes([1] * 7 + [0] + [1] * 33)
    assert tensor_table.survey([]).versions == 0 and tensor_table.survey([]).trains == b""
    assert not tensor_table.survey([]).any_gradient


@pytest.mark.parametrize("natively", [True, False])
def test_writes_of_other_code_are_told_from_own(
    natively: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(native, "module", lambda count: None)
    mesh = init_device_mesh("cpu", (1,))
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(20)]
    params.append(torch.nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)])))
    writes = Writes(params)
    assert writes.are_none() and writes.take() == []
    with torch.no_grad():
        params[4].add_(1)
        params[20].to_local().add_(1)  # type: ignore[operator]
        assert not writes.are_none() and writes.take() == [4, 20] and writes.take() == []
        writes.note()
        with writes.own(params[:6]):
            params[5].mul_(2)
            params[7].mul_(2)
        assert not writes.are_none() and writes.take() == [7]
        plain = Writes(params[:20])
        for own in (plain.params, plain.params, params[3:5]):
            build.bump(own)
            plain.total += len(own)
            plain.attribute(own)
        assert plain.are_none() and plain.are_none(plain.total) and not plain.are_none(plain.total + 1)
        params[3].add_(1)
        assert not plain.are_none() and plain.take() == [3]
    unknown = Writes(params[:3], [True, False, True])
    with torch.no_grad():
        params[1].add_(1)
        params[2].add_(1)
    assert not unknown.are_none() and unknown.take() == [2], "of the others nothing is known"
    assert Writes([]).are_none()


def test_a_survey_is_of_tensors_that_count_versions() -> None:
    module = native.module(1000)
    with torch.inference_mode():
        untracked = torch.zeros(2)
    for wrong in ([torch.zeros(2), None], [untracked], (torch.zeros(2),)):
        with pytest.raises(TypeError, match=r"survey\(\) takes"):
            module.survey(wrong)


def test_norms_are_the_same() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(33) for _ in range(300)]
    expected = torch.cat(tensors).double().norm().float()
    for _ in range(3):
        torch.testing.assert_close(tilestep.total_norm(tensors), expected)
        tensors[7] = torch.zeros(33)
        expected = torch.cat(tensors).double().norm().float()


def test_several_threads_see_the_same() -> None:
    """From 500 tensors on a CPU optimizer's are looked at by the threads that will update them."""
    module = native.module(500)
    params = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(700)]
    for param in params:
        param.grad = torch.zeros(3, 2)
    tables = [torch.from_numpy(rows_of([param.grad for param in params])) for _ in range(2)]
    found = [module.create(params, [], DTENSOR_PARTS, None) for _ in tables]

    def looked() -> list[int]:
        looks = zip(found, tables, (1, 4))
        return [module.look(own, table.data_ptr(), None, threads) for own, table, threads in looks]

    assert looked() == [0, 0]
    params[650].grad = torch.zeros(3, 2)
    assert looked() == [1, 1]
    assert torch.equal(*tables)
    assert tables[0].tolist() == [param.grad.data_ptr() for param in params]  # type: ignore[union-attr]
    assert looked() == [0, 0]
    params[699].grad = torch.zeros(2, 3).t()
    assert looked() == [2, 2]
    params[0].grad = None
    assert looked() == [2, 2]


def test_which_threads_look() -> None:
    few, many = (tilestep.SGD([torch.zeros(1, requires_grad=True) for _ in range(count)]) for count in (499, 500))
    assert few._current_plan().engines[0].table.threads == 1
    assert many._current_plan().engines[0].table.threads == min(8, torch.get_num_threads())


def test_distributed_tensors_of_several_threads(tmp_path: Path) -> None:
    """Local parts are seen through the DTensors that hold them; an equal layout is the same, whatever object it is."""
    module = native.module(500)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = [distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]) for _ in range(64)]
        params = [torch.nn.Parameter(tensor) for tensor in whole]
        for param in params:
            param.grad = torch.zeros_like(param)
        tables = [torch.from_numpy(rows_of([param.grad.to_local() for param in params])) for _ in range(2)]  # type: ignore[union-attr]
        found = [module.create(params, [], DTENSOR_PARTS, None) for _ in tables]

        def looked() -> list[int]:
            looks = zip(found, tables, (1, 4))
            return [module.look(own, table.data_ptr(), None, threads) for own, table, threads in looks]

        def parts() -> list[int]:
            return [param.grad.to_local().data_ptr() for param in params]  # type: ignore[union-attr]

        assert looked() == [0, 0]
        assert tables[0].tolist() == tables[1].tolist() == parts()
        # Elsewhere, and with a layout of their own: its object is not the known one.
        for param in params[:3]:
            param.grad = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        assert looked() == [1, 1]
        assert tables[0].tolist() == tables[1].tolist() == parts()
        assert looked() == [0, 0]
        params[5].grad = distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()])
        assert looked() == [2, 2]
        params[5].grad = torch.zeros_like(params[5])
        params[9].grad = None
        assert looked() == [2, 2]
    finally:
        dist.destroy_process_group()


class Own(torch.nn.Parameter):
    """A parameter that may keep its gradient elsewhere."""


@pytest.mark.parametrize("natively", [True, False])
def test_gradients_are_taken(natively: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:
        monkeypatch.setattr(native, "module", lambda tensors: None)
    mesh = init_device_mesh("cpu", (1,))
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    params += [torch.nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)])), Own(torch.zeros(2))]
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    gradients = [param.grad for param in params[1:]]
    taken = taken_gradients(params)
    assert len(taken) == len(gradients) and all(one is other for one, other in zip(taken, gradients))
    assert all(param.grad is None for param in params) and taken_gradients(params) == []
    params[0].grad = held = torch.ones_like(params[0])
    assert taken_gradients(tuple(params))[0] is held and params[0].grad is None
    gone = weakref.ref(gradients.pop())
    del taken
    assert gone() is None


@pytest.mark.parametrize("natively", [True, False])
def test_memory_of_tensors_is_found_once(natively: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:
        monkeypatch.setattr(native, "module", lambda tensors: None)
    mesh, flat = init_device_mesh("cpu", (1,)), torch.zeros(8)
    views = [DTensor.from_local(part, mesh, [Shard(0)]) for part in flat.split(2)]
    tensors = memory_of([*views, flat, torch.zeros(2), torch.nn.Parameter(torch.zeros(2))])
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors[:-2]} == {flat.data_ptr()}
    assert len(tensors) == (3 if natively else 7)


def test_the_scanner_is_built_without_the_header_of_all_operators() -> None:
    """Four fifths of its compile time; where this fails, torch declares a tensor's Python object otherwise."""
    assert layout_flags(), torch.__version__


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("natively", [True, False])
def test_one_look_at_parameters_gradients_and_states(
    threads: int, listed: bool, natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ and Python answer alike, for gradients of the parameters and for lists."""
    if not natively:
        monkeypatch.setattr(native, "module", lambda count: None)
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(700)]
    for param in params[1:]:
        param.grad = torch.zeros(3)
    states = [torch.zeros(3) for _ in range(1400)]
    table = Table(torch.zeros(700, dtype=torch.int64), params, states)

    def gradients() -> list[torch.Tensor | None]:
        return [param.grad for param in params]

    def looked() -> int:
        return table.refresh(None if table.finds else gradients(), threads)

    def forget() -> None:
        table.remember(gradients(), finds=not listed)
        assert looked() == SAME and table.is_native is natively and table.finds is (natively and not listed)

    forget()
    assert table.host.tolist() == [0 if one is None else one.data_ptr() for one in gradients()]
    params[3].grad = torch.zeros(3)
    assert looked() == MOVED and looked() == SAME
    assert table.host[3] == params[3].grad.data_ptr()
    params[3].grad = torch.zeros(3, dtype=torch.float64)[:3].float()
    assert looked() == MOVED
    held = states[1399].data
    states[1399].data = torch.zeros(3)
    assert looked() == CHANGED and not table.states_are_same() and table.params.look() == SAME
    states[1399].data = held
    assert looked() == SAME
    held = params[699].data
    params[699].data = torch.zeros(3)
    assert looked() == CHANGED and table.params.look() == MOVED and table.states_are_same()
    params[699].data = held
    assert looked() == SAME and table.look(threads) == SAME
    params[3].grad = None
    assert looked() == CHANGED and table.look(threads) == SAME
    forget()
    params[0].grad = torch.zeros(3)
    assert looked() == CHANGED
    forget()
    params[5].grad = torch.zeros(3, 1)[:, 0].expand(3)
    assert looked() == MOVED
    params[5].grad = torch.zeros(6)[::2]
    assert looked() == CHANGED
