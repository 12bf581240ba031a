"""Checks of states in blocks on two ranks: every rank has the same batch, so a plain twin trains to the same bits."""

from __future__ import annotations

import copy
import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from block_rows import as_earlier
from parked_states import Device
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tilestep
from tilestep.errors import StateError
from tilestep.rules import registry
from tilestep.rules.compose import centralize

FORMATS = ["int8", "float8_e4m3", "int4", "scaled_float16"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 90), nn.Tanh(), nn.Linear(90, 64, bias=False))


def make(net: nn.Module, format: str, **options: Any) -> Any:
    return tilestep.AdamW(net.named_parameters(), lr=1e-2, state_dtype=format, **options)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        batch = torch.randn(8, 130, generator=torch.Generator().manual_seed(step))
        net(batch.to(next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        same = tensor.detach()
        codes = same.dtype.itemsize == 1
        return (same.view(torch.uint8) if codes else same).full_tensor()
    return tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()


def here(tensor: Any) -> torch.Tensor:
    return whole(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def twin(format: str, steps: int) -> tuple[nn.Module, Any]:
    net = model()
    optimizer = make(net, format)
    train(net, optimizer, range(steps))
    return net, optimizer


def compare(mine: nn.Module, wanted: nn.Module) -> None:
    for left, right in zip(mine.parameters(), wanted.parameters()):
        assert torch.equal(whole(left), right.detach())


def shards() -> None:
    for format in FORMATS:
        net = model()
        optimizer = tilestep.shard(make(net, format), net)
        train(net, optimizer, range(3))
        wanted, other = twin(format, 3)
        compare(net, wanted)
        saved = optimizer.full_state_dict()
        for number, param in enumerate(wanted.parameters()):
            for name, value in other.state[param].items():
                assert torch.equal(whole(saved["state"][number][name]), whole(value).reshape(value.shape)), name
        again = model()
        resumed = tilestep.shard(make(again, format), again)
        resumed.load_state_dict(saved)
        with torch.no_grad():
            for left, right in zip(again.parameters(), net.parameters()):
                left.copy_(right)
        train(again, resumed, range(3, 5))
        train(wanted, other, range(3, 5))
        compare(again, wanted)


def pieces_are_balanced() -> None:
    """No rank has more of the state than its share, but for some rows of those that end inside of a block."""
    for format in FORMATS:
        net = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(shape))
                for name, shape in (("a", (96, 256)), ("b", (400, 130)), ("c", 9000))
            }
        )
        optimizer = tilestep.shard(make(net, format), net)
        own = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
        everything = sum(
            value.nbytes
            for state in optimizer.full_state_dict()["state"].values()
            for value in state.values()
            if value.dim()
        )
        assert abs(own - everything / 2) < 0.02 * everything, (own, everything)


def formats_by_group() -> None:
    """Groups of one sharded optimizer, of which one comes later, have formats and types that travel of their own."""
    kinds: list[dict[str, Any]] = [
        {"state_dtype": "int8", "master_weights": "int8"},
        {"state_dtype": {"exp_avg": "int4"}, "master_weights": True, "grad_sync_dtype": torch.float32},
        {"param_sync_dtype": torch.uint8},
        {"state_dtype": "float8_e4m3", "master_weights": "kahan"},
    ]
    nets, optimizers = [model().bfloat16() for _ in range(2)], []
    for net, shards in zip(nets, (True, False)):
        torch.manual_seed(1)
        net.append(nn.Linear(64, 130, bias=False, dtype=torch.bfloat16))
        groups = [{"params": [named], **kind} for named, kind in zip(net.named_parameters(), kinds)]
        optimizer = tilestep.AdamW(groups[:3], lr=1e-2)
        optimizers.append(tilestep.shard(optimizer, net) if shards else optimizer)
        optimizers[-1].add_param_group(groups[3])
    for step in range(3):
        for net, optimizer in zip(nets, optimizers):
            for place, param in enumerate(net.parameters()):
                digits = torch.randint(-8, 9, param.shape, generator=torch.Generator().manual_seed(8 * step + place))
                param.grad = (digits / 64).bfloat16()
            optimizer.step()
    optimizers[0].wait()
    compare(*nets)
    saved, wanted = optimizers[0].full_state_dict(), optimizers[1].state_dict()
    for number, state in wanted["state"].items():
        assert saved["state"][number].keys() == state.keys()
        assert all(torch.equal(whole(saved["state"][number][name]), whole(value)) for name, value in state.items())


def parameters_without_names() -> None:
    """An embedding that the optimizer cannot tell from other parameters is one of those under shard() too."""
    nets = [nn.Sequential() for _ in range(4)]
    for net in nets:
        net.add_module("emb", nn.Linear(130, 90, bias=False))
        nn.init.ones_(net.emb.weight)
    plain = tilestep.AdamW(nets[0].parameters(), lr=1e-2, state_dtype="int8")
    optimizer = tilestep.shard(tilestep.AdamW(nets[1].parameters(), lr=1e-2, state_dtype="int8"), nets[1])
    for net, one in zip(nets, (plain, optimizer)):
        train(net, one, range(2))
    compare(nets[1], nets[0])
    saved = optimizer.full_state_dict()
    (state,), (wanted,) = saved["state"].values(), plain.state.values()
    assert state["exp_avg_sq_codes"].dtype is wanted["exp_avg_sq_codes"].dtype is torch.uint8
    # Codes under the names of earlier revisions load too.
    other = tilestep.shard(tilestep.AdamW(nets[2].parameters(), lr=1e-2, state_dtype="int8"), nets[2])
    other.load_state_dict(as_earlier(saved))
    (again,) = other.full_state_dict()["state"].values()
    assert again.keys() == state.keys() and all(torch.equal(again[name], value) for name, value in state.items())
    momentum: Any = tilestep.SGD(nets[3].parameters(), lr=1e-2, momentum=0.9, state_dtype="int8")
    momentum = tilestep.shard(momentum, nets[3])
    train(nets[3], momentum, range(1))
    (state,) = momentum.full_state_dict()["state"].values()
    assert state["momentum_buffer_codes"].dtype is torch.int8 and math.isnan(state["momentum_buffer"])
    before = state["momentum_buffer_codes"].clone()
    momentum.load_state_dict(momentum.state_dict())
    (state,) = momentum.full_state_dict()["state"].values()
    assert (
        torch.equal(state["momentum_buffer_codes"], before)
        and "momentum_buffer" not in momentum.state[nets[3].emb.weight]
    )


def sums_over_tensors_of_which_one_rank_has_some_whole() -> None:
    kept = {"0": "int8", "1": "float32", "2": "int8", "3": "int8"}
    models = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in ((97,), (40, 64), (4, 256), (97,))])
        optimizer = tilestep.LAMB(net.named_parameters(), lr=1e-2, state_dtype=lambda name: kept[name.split(".")[-1]])
        if is_sharded:
            tilestep.shard(optimizer, net)
        for _ in range(3):
            sum(param.square().sum() for param in net).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(net)
    for mine, wanted in zip(*map(nn.Module.parameters, models)):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def fsdp_shards() -> None:
    for format in FORMATS:
        net = model()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = make(net, format)
        train(net, optimizer, range(3))
        wanted, other = twin(format, 3)
        compare(net, wanted)
        for param, plain in zip(net.parameters(), wanted.parameters()):
            for name, value in other.state[plain].items():
                mine = optimizer.state[param][name]
                assert mine.shape == value.shape and torch.equal(whole(mine), whole(value)), name
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder[0])
            fresh = model()
            for layer in fresh:
                fully_shard(layer)
            fully_shard(fresh)
            resumed = make(fresh, format)
            train(fresh, resumed, range(1))
            state = {"optimizer": get_optimizer_state_dict(fresh, resumed)}
            dcp.load(state, checkpoint_id=folder[0])
            set_optimizer_state_dict(fresh, resumed, state["optimizer"])
            dist.barrier()
        with torch.no_grad():
            for left, right in zip(fresh.parameters(), net.parameters()):
                left.copy_(right)
        train(fresh, resumed, range(3, 5))
        train(wanted, other, range(3, 5))
        compare(fresh, wanted)


def states_are_reset() -> None:
    """In place, rank by rank; masters stay."""
    for kind in ("shard", "fully_shard"):
        for options in ({"state_dtype": "int8"}, {"master_weights": True}, {"master_weights": "remainder"}):
            nets = [model().bfloat16() if "master_weights" in options else model() for _ in range(2)]
            for layer in nets[0] if kind == "fully_shard" else ():
                fully_shard(layer)
            optimizers = [tilestep.AdamW(net.named_parameters(), lr=1e-2, **options) for net in nets]
            if kind == "shard":
                tilestep.shard(optimizers[0], nets[0])
            for net, optimizer in zip(nets, optimizers):
                train(net, optimizer, range(3))
                plan = optimizer.plan
                optimizer.reset_state()
                assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
                train(net, optimizer, range(3, 5))
                assert optimizer.plan is plan
            compare(*nets)


def states_are_parked() -> None:
    """With a host that stands for a device: bits are those of a run that is not parked, checkpoints too."""
    for kind in ("shard", "fully_shard"):
        for options in ({"state_dtype": "int8"}, {"master_weights": True}, {"master_weights": "remainder"}):
            nets = [model().bfloat16() if "master_weights" in options else model() for _ in range(2)]
            for net in nets if kind == "fully_shard" else ():
                for layer in net:
                    fully_shard(layer)
            optimizers = [tilestep.AdamW(net.named_parameters(), lr=1e-2, **options) for net in nets]
            for net, optimizer in zip(nets, optimizers) if kind == "shard" else ():
                tilestep.shard(optimizer, net)
            for net, optimizer in zip(nets, optimizers):
                train(net, optimizer, range(2))
            with pytest.MonkeyPatch.context() as monkeypatch:
                device = Device(monkeypatch)
                for steps in (range(2, 4), range(4, 6)):
                    optimizers[0].park()
                    assert device.parked(optimizers[0]) == {True} and device.parked(optimizers[1]) == {False}
                    if kind == "shard":
                        parked, plain = (optimizer.full_state_dict()["state"] for optimizer in optimizers)
                    else:
                        parked, plain = (
                            get_optimizer_state_dict(net, optimizer)["state"]
                            for net, optimizer in zip(nets, optimizers)
                        )
                    for key, state in plain.items():
                        assert all(torch.equal(*map(here, (parked[key][name], value))) for name, value in state.items())
                    for net, optimizer in zip(nets, optimizers):
                        train(net, optimizer, steps)
                    assert device.parked(optimizers[0]) == {False}
                assert device.taken == 1
            for left, right in zip(*(net.parameters() for net in nets)):
                assert torch.equal(whole(left), whole(right))


def rules_over_rows() -> None:
    """The means of rows that are whole on one rank, by `shard` and by FSDP2."""
    rule = centralize(registry["AdamW"])
    for format in ("int8", "int4"):
        wanted = model()
        train(wanted, tilestep.Optimizer(wanted.named_parameters(), rule, lr=1e-2, state_dtype=format), range(3))
        for is_sharded in (False, True):
            net = model()
            for layer in () if is_sharded else net:
                fully_shard(layer)
            optimizer = tilestep.Optimizer(net.named_parameters(), rule, lr=1e-2, state_dtype=format)
            train(net, tilestep.shard(optimizer, net) if is_sharded else optimizer, range(3))
            compare(net, wanted)


def cut_blocks_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for columns, fits in ((300, False), (512, True)):
        plain = torch.randn(40, columns, generator=torch.Generator().manual_seed(0))
        param = nn.Parameter(distribute_tensor(plain.clone(), mesh, [Shard(1)]))
        optimizer = None
        if not fits:
            with pytest.raises(StateError, match=r"along dimension 1, which cuts blocks of 128 .*last dimension 512"):
                optimizer = tilestep.AdamW([("weight", param)], state_dtype="int8")
                param.grad = torch.zeros_like(param)
                optimizer.step()
            continue
        optimizer = tilestep.AdamW([("weight", param)], state_dtype="int8")
        other = nn.Parameter(plain.clone())
        twin = tilestep.AdamW([("weight", other)], state_dtype="int8")
        for step in range(3):
            grad = torch.randn(40, columns, generator=torch.Generator().manual_seed(step))
            param.grad, other.grad = distribute_tensor(grad.clone(), mesh, [Shard(1)]), grad
            optimizer.step()
            twin.step()
        assert torch.equal(whole(param), other.detach())
        saved = copy.deepcopy(optimizer.state_dict())
        loaded = tilestep.AdamW([("weight", nn.Parameter(plain.clone()))], state_dtype="bfloat16")
        loaded.load_state_dict(saved)


def checkpoints_of_other_libraries() -> None:
    """bitsandbytes' into a sharded optimizer, and what each rank of FSDP2 has saved of FlashOptim's."""
    net = model()
    params = list(net.parameters())
    table = torch.linspace(-1, 1, 256)
    states, wanted = {}, []
    for number, param in enumerate(params):
        codes = torch.randint(0, 256, param.shape, generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        most = torch.rand(-(-param.numel() // 256), generator=torch.Generator().manual_seed(number)) + 0.5
        scales = most.repeat_interleave(256)[: param.numel()].reshape(param.shape)
        wanted.append(table[codes.long()] * scales)
        arrays = {f"{name}{place}": value for place in "12" for name, value in (("state", codes), ("absmax", most))}
        states[number] = {"step": 3, **arrays, "qmap1": table, "qmap2": table.abs()}
    saved = {"state": states, "param_groups": [{"lr": 0.1, "params": list(states)}]}
    optimizer = tilestep.shard(tilestep.AdamW(net.named_parameters()), net)
    optimizer.load_state_dict(saved)
    full_states = optimizer.full_state_dict()["state"]
    for number, values in enumerate(wanted):
        assert torch.equal(full_states[number]["exp_avg"], values) and torch.equal(
            full_states[number]["exp_avg_sq"], values.abs()
        )

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(64, 32), mesh, [Shard(0)]))
    local = torch.arange(1024).reshape(32, 32).remainder(100).to(torch.int8) * (1 - 2 * dist.get_rank())
    most = torch.full((32,), 2.0).half()
    codes, scales = (DTensor.from_local(value, mesh, [Shard(0)]) for value in (local, most))
    state = {"step": 3, "exp_avg::quantized": codes, "exp_avg::scales": scales, "exp_avg_sq": weight.detach()}
    own = tilestep.AdamW([weight])
    own.load_state_dict({"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    share = local.float() / 127
    assert torch.equal(own.state[weight]["exp_avg"].to_local(), share / (2 - share.abs()) * 2)
    single = nn.Parameter(torch.ones(64, 32))
    alone = tilestep.AdamW([single])
    alone.load_state_dict({"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    assert torch.equal(alone.state[single]["exp_avg"], whole(own.state[weight]["exp_avg"]))


CHECKS = [
    shards,
    pieces_are_balanced,
    formats_by_group,
    parameters_without_names,
    sums_over_tensors_of_which_one_rank_has_some_whole,
    fsdp_shards,
    states_are_reset,
    states_are_parked,
    rules_over_rows,
    cut_blocks_are_refused,
    checkpoints_of_other_libraries,
]
