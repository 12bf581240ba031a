"""Checkpoints of sharded optimizers: in pieces, on another number of ranks, from and to whole ones and torch's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import all_pass, each_passes
from sharded_twins import TINY, Convolutions, Pair, inputs, two_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tilestep
from tilestep.execution.zero.checkpoint import ShardedTensorPiece


class Mixed(nn.Module):
    """Parameters of every kind: images in channels-last, matrices, an empty one, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.images = Convolutions().to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.rand(7, 5))
        self.transposed = nn.Parameter(torch.rand(6, 4, 3).permute(2, 0, 1))
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.number = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.turned = nn.Parameter(torch.rand(4, 6).t())


def adamw(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.1, eps=0.1)  # type: ignore[attr-defined]


def muon(params: Any) -> tilestep.Optimizer:
    params = list(params)
    rest = {"params": [param for param in params if param.dim() != 2], "rule": "AdamW"}
    return tilestep.Optimizer([{"params": [param for param in params if param.dim() == 2]}, rest], "Muon", lr=0.02)


def adafactor(params: Any) -> tilestep.Optimizer:
    return tilestep.Adafactor(params, lr=0.1)  # type: ignore[attr-defined]


def soap(params: Any) -> tilestep.Optimizer:
    params = [param for param in params if param.dim() == 2]
    return tilestep.SOAP(params, lr=0.1)  # type: ignore[attr-defined]


def masters(params: Any) -> tilestep.Optimizer:
    return tilestep.Adam(params, lr=0.1, master_weights=True)  # type: ignore[attr-defined]


def remainders(params: Any) -> tilestep.Optimizer:
    return tilestep.Adam(params, lr=0.1, master_weights="remainder")  # type: ignore[attr-defined]


def scaled(params: Any) -> tilestep.Optimizer:
    return tilestep.Optimizer(params, tilestep.scaled_states(tilestep.registry["Adam"]), lr=0.1)


MAKERS = {
    "adamw": adamw,
    "muon": muon,
    "adafactor": adafactor,
    "soap": soap,
    "masters": masters,
    "remainders": remainders,
    "scaled": scaled,
}


def model_for(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Mixed().bfloat16() if name in ("masters", "remainders") else Mixed()


def give_gradients(model: nn.Module, step: int, skip: str = "") -> None:
    """The same gradients on every rank, at every number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        drawn = torch.randint(-8, 9, param.shape, generator=generator)
        if param.requires_grad and name != skip:
            param.grad = (drawn / 8).to(param)


def trained(name: str, steps: range, optimizer: Any = None, model: Any = None) -> tuple[nn.Module, Any]:
    model = model_for(name) if model is None else model
    optimizer = MAKERS[name](model.parameters()) if optimizer is None else optimizer
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["state"].keys() == right["state"].keys()
    for number, values in right["state"].items():
        assert left["state"][number].keys() == values.keys(), number
        for name, value in values.items():
            # A mean over the rows of an empty matrix is NaN.
            torch.testing.assert_close(left["state"][number][name], value, rtol=0, atol=0, equal_nan=True)
    for mine, theirs in zip(left["param_groups"], right["param_groups"], strict=True):
        assert mine == theirs


def save_everywhere(folder: Path) -> None:
    """Train for three steps, sharded, and save a checkpoint of each rule."""
    for name in MAKERS:
        model = model_for(name)
        optimizer = tilestep.shard(MAKERS[name](model.parameters()), model, bucket_cap_mb=TINY)
        trained(name, range(3), optimizer, model)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder / name)


def load_everywhere(folder: Path) -> None:
    """Load each checkpoint on these ranks, in pieces and whole, and go on as training without an interruption does."""
    for name in MAKERS:
        reference, plain = trained(name, range(3))
        fresh = model_for(name)
        optimizer = tilestep.shard(MAKERS[name](fresh.parameters()), fresh, bucket_cap_mb=100 / 2**20)
        state = {"model": fresh.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder / name)
        fresh.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert_same(optimizer.full_state_dict(), plain.state_dict())
        whole = model_for(name)
        other = MAKERS[name](whole.parameters())
        # As torch's, an optimizer that has not stepped has nothing to load into.
        _init_optim_state(other)
        loaded = {"optimizer": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder / name)
        other.load_state_dict(loaded["optimizer"])
        assert_same(other.state_dict(), plain.state_dict())
        trained(name, range(3, 5), plain, reference)
        trained(name, range(3, 5), optimizer, fresh)
        optimizer.wait()
        for mine, theirs in zip(fresh.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def save_a_whole_one(folder: Path) -> None:
    for name in MAKERS:
        model, optimizer = trained(name, range(3))
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / name)


class Step:
    """A check that works in a folder."""

    def __init__(self, work: Callable[[Path], None], folder: Path) -> None:
        self.work, self.folder, self.__name__ = work, folder, work.__name__

    def __call__(self) -> None:
        self.work(self.folder)


def test_pieces_are_loaded_on_other_numbers_of_ranks_and_whole(tmp_path: Path) -> None:
    all_pass([Step(save_everywhere, tmp_path)], 2)
    all_pass([Step(load_everywhere, tmp_path)], 1)
    all_pass([Step(load_everywhere, tmp_path)], 3)


def test_a_checkpoint_of_a_whole_optimizer_is_loaded_in_pieces(tmp_path: Path) -> None:
    save_a_whole_one(tmp_path)
    all_pass([Step(load_everywhere, tmp_path)], 2)


def full_states_go_to_torch_and_back() -> None:
    pair = Pair(Mixed(), adamw, two_groups, bucket_cap_mb=TINY)
    train_both(pair, range(3))
    theirs = torch.optim.AdamW(two_groups(pair.twin), lr=0.1, eps=0.1)
    theirs.load_state_dict(pair.optimizer.full_state_dict())
    pair.twin_optimizer = theirs
    train_both(pair, range(3, 5), rtol=1e-5, atol=1e-6)
    back = theirs.state_dict()
    pair.optimizer.load_state_dict(back)
    full = pair.optimizer.full_state_dict()["state"]
    for number, values in back["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(full[number][name], value, rtol=0, atol=0)
    train_both(pair, range(5, 7), rtol=1e-5, atol=1e-6)
    assert pair.optimizer.full_state_dict(rank=0).keys() == (back.keys() if dist.get_rank() == 0 else set())
    for nobody in (dist.get_world_size(), -1, "0"):
        with pytest.raises(ValueError, match=rf"Invalid rank: {nobody!r}; it must be from 0 to \d"):
            pair.optimizer.full_state_dict(rank=nobody)


def train_both(pair: Pair, steps: range, **tolerances: float) -> None:
    for step in steps:
        give_gradients(pair.model, step)
        give_gradients(pair.twin, step)
        pair.optimizer.step()
        pair.twin_optimizer.step()
        pair.twin_optimizer.zero_grad()
        pair.compare(**tolerances)


def state_by_name_as_torch_gives_it() -> None:
    """`get_optimizer_state_dict` and `set_optimizer_state_dict`, to torch's own optimizer by way of a checkpoint."""
    model = Mixed()
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    trained("adamw", range(3), optimizer, model)
    saved = get_optimizer_state_dict(model, optimizer)
    assert isinstance(saved["state"]["matrix"]["exp_avg"], ShardedTensorPiece)
    folder = shared_folder()
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    fresh = Mixed()
    again = tilestep.shard(adamw(fresh.parameters()), fresh)
    loaded = {"optimizer": get_optimizer_state_dict(fresh, again)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(fresh, again, loaded["optimizer"])
    assert_same(again.full_state_dict(), optimizer.full_state_dict())
    theirs = torch.optim.AdamW([param for param in fresh.parameters() if param.requires_grad], lr=0.1, eps=0.1)
    wanted = {"optimizer": get_optimizer_state_dict(fresh, theirs)}
    dcp.load(wanted, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    full = optimizer.full_state_dict()
    names = [name for name, _ in model.named_parameters()]
    for number, name in enumerate(names):
        if number in full["state"] and "empty" not in name:
            mine, other = full["state"][number]["exp_avg_sq"], wanted["optimizer"]["state"][name]["exp_avg_sq"]
            torch.testing.assert_close(other, mine, rtol=0, atol=0)


def named_alike(saved: dict[str, Any]) -> dict[Any, set[str]]:
    """The names of each parameter's states, but for the step count, which are those of the other rank."""
    names: list[Any] = [None, None]
    dist.all_gather_object(names, {key: {*values} - {"step"} for key, values in saved["state"].items()})
    assert names[0] == names[1], names
    return names[0]


def states_that_one_rank_has_are_named_on_all() -> None:
    """Of matrices that are not cut: torch's calls give and take the same names everywhere."""
    for name in ("muon", "adafactor"):
        model = model_for(name)
        optimizer = tilestep.shard(MAKERS[name](model.parameters()), model, bucket_cap_mb=TINY)
        assert len(named_alike(optimizer.state_dict())) == 12
        give_gradients(model, 0, skip="matrix")
        optimizer.step()
        optimizer.zero_grad()
        assert len(named_alike(optimizer.state_dict())) == 12
        trained(name, range(1, 3), optimizer, model)
        saved = get_optimizer_state_dict(model, optimizer)
        assert named_alike(saved)["matrix"]
        folder = shared_folder()
        dcp.save({"optimizer": saved}, checkpoint_id=folder)
        fresh = model_for(name)
        again = tilestep.shard(MAKERS[name](fresh.parameters()), fresh, bucket_cap_mb=TINY)
        loaded = {"optimizer": get_optimizer_state_dict(fresh, again)}
        dcp.load(loaded, checkpoint_id=folder)
        set_optimizer_state_dict(fresh, again, loaded["optimizer"])
        assert_same(again.full_state_dict(), optimizer.full_state_dict())


def states_go_by_name_on_a_rank_without_any() -> None:
    """Of one matrix, on one rank: torch's calls would step the other rank's optimizer alone, and wait forever."""
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        model = nn.Linear(6, 5, bias=False)
        optimizer = tilestep.shard(tilestep.Muon(model.parameters(), lr=0.1), model)  # type: ignore[attr-defined]
        for step in range(2):
            assert optimizer.state, step
            saved = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(model, optimizer, saved, options=options)
            assert optimizer.state, step
            give_gradients(model, step)
            optimizer.step()
        optimizer.reset_state()
        assert not optimizer.full_state_dict()["state"][0]["momentum_buffer"].any()


def full_states_are_for_the_rank_that_asks() -> None:
    """And they are copies, whatever is done with them."""
    model = model_for("muon")
    optimizer = tilestep.shard(muon(model.parameters()), model, bucket_cap_mb=TINY)
    trained("muon", range(3), optimizer, model)
    _, plain = trained("muon", range(3))
    everywhere = optimizer.full_state_dict()
    for rank in range(dist.get_world_size()):
        full = optimizer.full_state_dict(rank)
        assert not full if dist.get_rank() != rank else full["state"].keys() == everywhere["state"].keys()
        if full:
            assert_same(full, plain.state_dict())
    for values in everywhere["state"].values():
        for value in values.values():
            value.fill_(7)
    assert_same(optimizer.full_state_dict(), plain.state_dict())
    # What was gathered before a load is no longer the state.
    optimizer.consolidate_state_dict(to=1)
    optimizer.load_state_dict(plain.state_dict())
    for values in optimizer.state_dict()["state"].values():
        assert all(isinstance(value, ShardedTensorPiece) for name, value in values.items() if name != "step")


def state_that_has_begun_has_begun_on_all_ranks() -> None:
    """That of whole matrices, of which each rank holds some: frozen, loaded, with gradients that come late."""

    def made(sharded: bool = True) -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(5))
        model[1].requires_grad_(False)
        optimizer = tilestep.Muon(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
        return list(model.parameters()), tilestep.shard(optimizer, model) if sharded else optimizer

    def step(params: list[nn.Parameter], optimizer: Any, *places: int) -> None:
        for place in places:
            params[place].grad = torch.ones_like(params[place]) + torch.eye(6)
        optimizer.step()
        optimizer.zero_grad()

    def begun(optimizer: Any) -> set[Any]:
        keys = named_alike(optimizer.state_dict()).keys()
        assert optimizer.full_state_dict()["state"].keys() == keys
        return set(keys)

    params, optimizer = made()
    assert begun(optimizer) == {0, 2, 3, 4}
    step(params, optimizer, 0, 2)
    assert begun(optimizer) == {0, 2, 3, 4}
    params[1].requires_grad_(True)
    step(params, optimizer, 0)
    assert begun(optimizer) == {0, 2, 3, 4}
    step(params, optimizer, 1)
    step(params, optimizer, 0)
    assert begun(optimizer) == {0, 1, 2, 3, 4}
    everything = optimizer.full_state_dict()

    others, plain = made(sharded=False)
    step(others, plain, 0)  # of one rank alone
    params, optimizer = made()
    params[4].requires_grad_(False)
    optimizer.load_state_dict(plain.state_dict())
    assert begun(optimizer) == {0, 2, 3}
    params[4].requires_grad_(True)
    optimizer.load_state_dict(plain.state_dict())
    assert begun(optimizer) == {0, 2, 3, 4}
    step(params, optimizer, 0)
    assert begun(optimizer) == {0, 2, 3, 4}
    step(params, optimizer, 0)
    optimizer.load_state_dict(everything)
    assert begun(optimizer) == {0, 1, 2, 3, 4}
    optimizer.load_state_dict(plain.state_dict())
    assert begun(optimizer) == {0, 2, 3, 4}
    optimizer.load_state_dict(made(sharded=False)[1].state_dict())
    assert begun(optimizer) == set()
    step(params, optimizer, 0)
    params[1].requires_grad_(True)
    assert begun(optimizer) == {0, 2, 3, 4}

    model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
    first, *rest = model.parameters()
    optimizer = tilestep.shard(tilestep.Muon([first], lr=0.1), model)  # type: ignore[attr-defined]
    step([first], optimizer, 0)
    optimizer.add_param_group({"params": rest})
    assert begun(optimizer) == {0, 1, 2, 3}


def writes_of_other_code_leave_no_remainder_in_what_is_saved() -> None:
    model = model_for("remainders")
    optimizer = tilestep.shard(remainders(model.parameters()), model, bucket_cap_mb=TINY)
    trained("remainders", range(2), optimizer, model)
    optimizer.wait()
    assert any(values["remainder_param"].any() for values in optimizer.full_state_dict()["state"].values())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    assert not any(values["remainder_param"].any() for values in optimizer.full_state_dict()["state"].values())


def averages_are_saved_before_a_step_as_they_would_begin() -> None:
    """With weights that have come since `shard`, as the model's checkpoint brings them."""
    model = nn.Linear(9, 5)
    averages = tilestep.Optimizer(model.parameters(), tilestep.ema(tilestep.registry["SGD"], 0.5), lr=0.1)
    optimizer = tilestep.shard(averages, model, bucket_cap_mb=TINY)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    for values in optimizer.full_state_dict()["state"].values():
        assert all((value == 3.0).all() for name, value in values.items() if name != "step")


def checkpoints_of_torch_s_optimizer_are_loaded_strictly() -> None:
    """By name, nested and flattened, in pieces; a checkpoint without some of the state is refused."""
    model = Convolutions()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1)
    trained("adamw", range(2), theirs, model)
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        folder, saved = shared_folder(), get_optimizer_state_dict(model, theirs, options=options)
        dcp.save({"optimizer": saved}, checkpoint_id=f"{folder}/whole")
        fresh = Convolutions()
        mine = tilestep.AdamW(fresh.parameters(), lr=0.3, eps=0.1, max_grad_norm=7.0)  # type: ignore[attr-defined]
        mine = tilestep.shard(mine, fresh, bucket_cap_mb=TINY)
        loaded = {"optimizer": get_optimizer_state_dict(fresh, mine, options=options)}
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            dcp.load(loaded, checkpoint_id=f"{folder}/whole")
        dcp.load(loaded, checkpoint_id=f"{folder}/whole", planner=tilestep.LoadPlanner())
        set_optimizer_state_dict(fresh, mine, loaded["optimizer"], options=options)
        assert mine.param_groups[0]["lr"] == 0.1 and mine.param_groups[0]["max_grad_norm"] == 7.0
        full = mine.full_state_dict()["state"]
        for number, values in theirs.state_dict()["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(full[number][name], value, rtol=0, atol=0)
        if flatten:
            kept = {name: value for name, value in saved.items() if not name.endswith("exp_avg_sq")}
        else:
            states = {name: {"exp_avg": values["exp_avg"]} for name, values in saved["state"].items()}
            kept = {**saved, "state": states}
        dcp.save({"optimizer": kept}, checkpoint_id=f"{folder}/part")
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            dcp.load(loaded, checkpoint_id=f"{folder}/part", planner=tilestep.LoadPlanner())


def momentum_of_torch_s_optimizer_is_loaded_in_place() -> None:
    """Its checkpoints have no step count: nothing else says that the momentum has begun."""
    model = Mixed()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained("sgd", range(3), theirs, model)
    for by_name in (False, True):
        folder = shared_folder()
        dcp.save(
            {"optimizer": get_optimizer_state_dict(model, theirs) if by_name else theirs.state_dict()},
            checkpoint_id=folder,
        )
        fresh, reference = copy.deepcopy(model), copy.deepcopy(model)
        mine = tilestep.SGD(fresh.parameters(), lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
        mine = tilestep.shard(mine, fresh, bucket_cap_mb=TINY)
        loaded = {"optimizer": get_optimizer_state_dict(fresh, mine) if by_name else mine.state_dict()}
        dcp.load(loaded, checkpoint_id=folder, planner=tilestep.LoadPlanner())
        if by_name:
            set_optimizer_state_dict(fresh, mine, loaded["optimizer"])
        else:
            mine.load_state_dict(loaded["optimizer"])
        other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        other.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for net, optimizer in ((fresh, mine), (reference, other)):
            trained("sgd", range(3, 5), optimizer, net)
        mine.wait()
        for param, wanted in zip(fresh.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, wanted)


def functions_of_the_step_are_saved_on_ranks_that_update_some_of_a_group() -> None:
    model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
    optimizer = tilestep.Muon(model.parameters(), lr=lambda step: 1 / step)  # type: ignore[attr-defined]
    optimizer = tilestep.shard(optimizer, model)
    trained("muon", range(2), optimizer, model)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    assert len(optimizer.state) in (1, 2)
    for param in [param for param in model.parameters() if param not in optimizer.state]:
        optimizer.state[param] = {"mine": torch.ones(2)}  # of a parameter that another rank updates
    trained("muon", range(2, 3), optimizer, model)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1 / 3
    assert optimizer.full_state_dict()["param_groups"][0]["lr"] == 1 / 3


def states_go_to_fully_sharded_data_parallelism_and_back() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Convolutions()
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    trained("adamw", range(3), optimizer, model)
    folder = shared_folder()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/pieces")
    other = fully_shard(Convolutions())
    theirs = adamw(other.parameters())
    loaded = {"optimizer": get_optimizer_state_dict(other, theirs)}
    dcp.load(loaded, checkpoint_id=f"{folder}/pieces")
    set_optimizer_state_dict(other, theirs, loaded["optimizer"])
    full = optimizer.full_state_dict()["state"]
    for number, param in enumerate(other.parameters()):
        whole = theirs.state[param]["exp_avg"].full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, full[number]["exp_avg"], rtol=0, atol=0)
    dcp.save({"optimizer": get_optimizer_state_dict(other, theirs)}, checkpoint_id=f"{folder}/tensors")
    fresh = Convolutions().to(memory_format=torch.channels_last)
    again = tilestep.shard(adamw(fresh.parameters()), fresh, bucket_cap_mb=25)
    wanted = {"optimizer": get_optimizer_state_dict(fresh, again)}
    dcp.load(wanted, checkpoint_id=f"{folder}/tensors")
    set_optimizer_state_dict(fresh, again, wanted["optimizer"])
    assert_same(again.full_state_dict(), optimizer.full_state_dict())


def shared_folder() -> str:
    """A new folder that every rank knows."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return str(folder[0])


def what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = Mixed()
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    trained("adamw", range(2), optimizer, model)
    before = optimizer.full_state_dict()
    number = next(iter(before["state"]))

    def changed(**values: Any) -> dict[str, Any]:
        return {**before, "state": {**before["state"], number: {**before["state"][number], **values}}}

    with pytest.raises(tilestep.StateError, match="has shape"):
        optimizer.load_state_dict(changed(exp_avg=torch.zeros(2, 2)))
    with pytest.raises(tilestep.StateError, match="another optimizer"):
        optimizer.load_state_dict(changed(momentum_buffer=torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": before["param_groups"] * 2})
    with pytest.raises(tilestep.StateError, match="rule"):
        groups = [{**group, "rule": "Lion"} for group in before["param_groups"]]
        optimizer.load_state_dict({**before, "param_groups": groups})
    with pytest.raises(ValueError, match="Invalid lr"):
        groups = [{**group, "lr": -1.0} for group in before["param_groups"]]
        optimizer.load_state_dict({**before, "param_groups": groups})
    assert_same(optimizer.full_state_dict(), before)
    other = tilestep.shard(adamw((twin := Mixed()).parameters()), twin, bucket_cap_mb=25)
    with pytest.raises(tilestep.StateError, match=r"full_state_dict\(\)"):
        other.load_state_dict(optimizer.state_dict())


def pieces_are_not_computed_with() -> None:
    model = nn.Linear(9, 5)
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    trained_step = torch.ones(2, 9)
    model(trained_step).sum().backward()
    optimizer.step()
    piece = optimizer.state_dict()["state"][0]["exp_avg"]
    assert piece.shape == (5, 9) and "elements" in repr(piece)
    start, stop = piece.own_range
    assert piece.clone().local.shape == (stop - start,) and piece.to(torch.float64).local.dtype == torch.float64
    with pytest.raises(TypeError, match="is not supported for a piece"):
        torch.add(piece, 1)
    with pytest.raises(TypeError, match="full_state_dict"), tempfile.TemporaryFile() as file:
        torch.save(optimizer.state_dict(), file)
    assert optimizer.state[model.weight]["exp_avg"].shape == (stop - start,)


def hooks_of_checkpoints() -> None:
    model = nn.Linear(9, 5)
    optimizer = tilestep.shard(adamw(model.parameters()), model)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "after saving", "before loading", "after loading"]


def a_function_of_the_step_and_a_user_s_own_values() -> None:
    model = nn.Linear(9, 5)
    lr = tilestep.schedule.warmup_cosine(0.1, 2, 8)
    optimizer = tilestep.shard(tilestep.AdamW(model.parameters(), lr=lr), model)  # type: ignore[attr-defined]
    model(inputs(2, 9)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert isinstance(saved["param_groups"][0]["lr"], float)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    note = torch.arange(3.0)
    optimizer.state[model.weight]["note"] = note
    for saved in (optimizer.state_dict(), optimizer.full_state_dict()):
        assert torch.equal(saved["state"][0]["note"], note)
        optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state[model.weight]["note"], note)


def blocks_are_read_by_value_where_pieces_cut_them() -> None:
    """A whole checkpoint of states in 8 bits, by an optimizer that keeps them in float32; it is not written to."""
    model = nn.Linear(96, 47)
    plain = tilestep.AdamW(model.parameters(), lr=0.1, state_dtype="int8")  # type: ignore[attr-defined]
    trained("adamw", range(3), plain, model)
    saved = plain.state_dict()
    kept = copy.deepcopy(saved)
    assert any(value.dtype is torch.int8 for value in saved["state"][0].values())
    optimizer = tilestep.shard(adamw(model.parameters()), model, bucket_cap_mb=TINY)
    optimizer.load_state_dict(saved)
    wanted, found = tilestep.full_precision(kept)["state"], optimizer.full_state_dict()["state"]
    for number, values in wanted.items():
        for name, value in values.items():
            torch.testing.assert_close(found[number][name], value, rtol=0, atol=0)
    trained("adamw", range(3, 5), optimizer, model)
    for number, values in kept["state"].items():
        assert all(torch.equal(saved["state"][number][name], value) for name, value in values.items())


def dtypes_of_messages_are_not_saved() -> None:
    """They are the ranks', and a checkpoint is for any number of them."""
    model = nn.Linear(9, 5)
    dtypes = {"grad_sync_dtype": torch.float64, "param_sync_dtype": torch.bfloat16}
    optimizer = tilestep.shard(adamw([{"params": list(model.parameters()), **dtypes}]), model)
    model(inputs(2, 9)).sum().backward()
    optimizer.step()
    for saved in (optimizer.state_dict(), optimizer.full_state_dict()):
        assert dtypes.keys().isdisjoint(saved["param_groups"][0])
        optimizer.load_state_dict(saved)
        assert dtypes.items() <= optimizer.param_groups[0].items()


CHECKS = [
    functions_of_the_step_are_saved_on_ranks_that_update_some_of_a_group,
    full_states_go_to_torch_and_back,
    state_by_name_as_torch_gives_it,
    states_that_one_rank_has_are_named_on_all,
    states_go_by_name_on_a_rank_without_any,
    full_states_are_for_the_rank_that_asks,
    state_that_has_begun_has_begun_on_all_ranks,
    writes_of_other_code_leave_no_remainder_in_what_is_saved,
    averages_are_saved_before_a_step_as_they_would_begin,
    checkpoints_of_torch_s_optimizer_are_loaded_strictly,
    momentum_of_torch_s_optimizer_is_loaded_in_place,
    states_go_to_fully_sharded_data_parallelism_and_back,
    what_does_not_fit_is_refused_and_changes_nothing,
    pieces_are_not_computed_with,
    hooks_of_checkpoints,
    a_function_of_the_step_and_a_user_s_own_values,
    blocks_are_read_by_value_where_pieces_cut_them,
    dtypes_of_messages_are_not_saved,
]


test_two_ranks = each_passes(CHECKS, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_of_another_kind_are_refused_in_place_and_converted_when_whole(tmp_path: Path) -> None:
    _, optimizer = trained("masters", range(3))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "masters")
    _, other = trained("remainders", range(1), model=model_for("remainders"))
    state = {"optimizer": other.state_dict()}
    with pytest.raises(
        dcp.CheckpointException, match=r"optimizer.state.0 with master_param, but this optimizer uses remainder_param"
    ):
        dcp.load(state, checkpoint_id=tmp_path / "masters", planner=tilestep.LoadPlanner())
    other.load_state_dict(optimizer.state_dict())
    assert any(values["remainder_param"].any() for values in other.state.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_has_not_begun_is_loaded(name: str, tmp_path: Path) -> None:
    """In place, as `state_dict()` is empty before a step."""
    _, optimizer = trained(name, range(3))
    dcp.save({"training": {"optimizer": optimizer.state_dict()}}, checkpoint_id=tmp_path)
    other = MAKERS[name](model_for(name).parameters())
    state = {"training": {"optimizer": other.state_dict()}}
    assert not state["training"]["optimizer"]["state"]
    dcp.load(state, checkpoint_id=tmp_path, planner=tilestep.LoadPlanner())
    other.load_state_dict(state["training"]["optimizer"])
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_of_another_kind_are_converted_where_no_state_has_begun(tmp_path: Path) -> None:
    model, optimizer = trained("masters", range(3))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    other = remainders(model.parameters())
    state = {"optimizer": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, planner=tilestep.LoadPlanner())
    other.load_state_dict(state["optimizer"])
    assert any(values["remainder_param"].any() for values in other.state.values())
