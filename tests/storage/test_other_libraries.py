"""Checkpoints of bitsandbytes, torchao and FlashOptim: their layouts, written out here, and the real ones if there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_rows import FORMATS

import tilestep
from tilestep.errors import StateError
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.storage import kept_in_blocks, values_of

SHAPES = [(80, 64), (70, 90), (6, 24, 5, 3)]
"""Of 5,120, 6,300 and 2,160 elements: with a short last block of 256 and of 32, and too small for blocks of ours."""


def dynamic_map(signed: bool) -> torch.Tensor:
    """bitsandbytes' map of eight bits: seven exponents of ten, and the middles of ever finer steps between them."""
    steps: list[float] = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1)
        middles = (10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        steps += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted([*steps, *[0.0] * (256 - len(steps))]))


def in_groups(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbours of the flattened tensor, a row for each scale, over their largest magnitude; and that."""
    rows = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % size)).reshape(-1, size)
    scale = rows.abs().amax(1).clamp(min=1e-12)
    return rows / scale[:, None], scale


def by_map(values: torch.Tensor, signed: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, scale = in_groups(values, 256)
    table = dynamic_map(signed)
    codes = (rows[..., None] - table).abs().argmin(-1)
    back = (table[codes] * scale[:, None]).flatten()[: values.numel()].reshape(values.shape)
    flat = codes.to(torch.uint8).flatten()[: values.numel()].reshape(values.shape)
    return {"state": flat, "qmap": table, "absmax": scale}, back


Layout = Callable[[torch.nn.Parameter, torch.Tensor, torch.Tensor], tuple[dict[str, Any], dict[str, torch.Tensor]]]


def bitsandbytes_layout(
    param: torch.nn.Parameter, moment: torch.Tensor, square: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    by_name, back = {}, {}
    for number, name, values in (("1", "exp_avg", moment), ("2", "exp_avg_sq", square)):
        arrays, back[name] = by_map(values, number == "1")
        by_name.update({f"{key}{number}": value for key, value in arrays.items()})
    return {"step": 7, "__bnb_optimizer_quant_state__": by_name}, back


class Quantized(torch.Tensor):
    """A class of tensors as torchao's states are."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, **arrays: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]

    def __init__(self, numbers: torch.Tensor, **arrays: torch.Tensor) -> None:
        vars(self).update(arrays)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of codes")

    def dequantize(self) -> torch.Tensor:
        return (self.table[self.codes.int()].view(len(self.scale), -1) * self.scale[:, None]).view(self.shape)


def torchao_layout(
    param: torch.nn.Parameter, moment: torch.Tensor, square: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    state: dict[str, Any] = {"step": torch.tensor(7.0), "exp_avg": moment.clone(), "exp_avg_sq": square.clone()}
    if param.numel() % 256:
        return state, {"exp_avg": moment, "exp_avg_sq": square}
    for name, values in (("exp_avg", moment), ("exp_avg_sq", square)):
        arrays, _ = by_map(values, name == "exp_avg")
        state[name] = Quantized(values, codes=arrays["state"], scale=arrays["absmax"], table=arrays["qmap"])
    return state, {name: state[name].dequantize() for name in ("exp_avg", "exp_avg_sq")}


def flashoptim_layout(
    param: torch.nn.Parameter, moment: torch.Tensor, square: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    def cut(rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten()[: param.numel()].reshape(param.shape)

    share, scale = in_groups(moment, 32)
    codes = torch.floor(2 * share / (1 + share.abs()) * 127 + 0.5)
    scale = scale.half()
    root, most = in_groups(square.sqrt(), 32)
    roots, most = torch.floor(root * 255 + 0.5), most.half()
    state = {
        "step": 7,
        "exp_avg::quantized": cut(codes).to(torch.int8),
        "exp_avg::scales": scale,
        "exp_avg_sq::quantized": cut(roots).to(torch.uint8),
        # As it is beside parameters of bfloat16: the same bits.
        "exp_avg_sq::scales": most.view(torch.bfloat16),
    }
    shared = codes / 127
    back = {
        "exp_avg": cut(shared / (2 - shared.abs()) * scale.float()[:, None]),
        "exp_avg_sq": cut((roots / 255 * most.float()[:, None]).square()),
    }
    return state, back


LAYOUTS: dict[str, Layout] = {
    "bitsandbytes": bitsandbytes_layout,
    "torchao": torchao_layout,
    "FlashOptim": flashoptim_layout,
}


def saved(layout: str) -> tuple[list[torch.nn.Parameter], dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Parameters, a checkpoint in a library's layout, and the float32 values that it stands for."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    states, wanted = {}, []
    for place, param in enumerate(params):
        moment = torch.randn(param.shape, generator=generator) * 1e-3
        square = torch.randn(param.shape, generator=generator).square() * 1e-6
        states[place], back = LAYOUTS[layout](param, moment, square)
        for name, exact in (("exp_avg", moment), ("exp_avg_sq", square)):
            assert error(back[name], exact) < 1e-3, "the layout itself is off"
        wanted.append(back)
    group = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1, "params": [0, 1, 2]}
    return params, {"state": states, "param_groups": [group]}, wanted


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.double() - wanted.double()).square().sum() / wanted.double().square().sum())


def numbers(state: dict[str, Any], name: str, shape: torch.Size) -> torch.Tensor:
    blocks = kept_in_blocks(state, name)
    return state[name].float() if blocks is None else values_of(blocks, state, name, shape=shape)


@pytest.mark.parametrize("target", [None, "bfloat16", *FORMATS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_load_by_value_into_every_format(layout: str, target: Any) -> None:
    params, state_dict, wanted = saved(layout)
    optimizer: Any = tilestep.AdamW(params, state_dtype=target)
    optimizer.load_state_dict(state_dict)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-3, (0.8, 0.9), 1e-7, 0.1)
    for param, values in zip(params, wanted):
        state = optimizer.state[param]
        assert {name.removesuffix("_codes") for name in state if "_scales" not in name} == {
            "step",
            "exp_avg",
            "exp_avg_sq",
        }
        assert float(state["step"]) == 7
        for name, exact in values.items():
            mine = numbers(state, name, param.shape)
            if target is None:
                torch.testing.assert_close(mine, exact, rtol=3e-7, atol=0)
            else:
                assert error(mine, exact) < {"int4": 0.05, "float8_e4m3": 2e-3}.get(target, 5e-4)
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_on_as_from_float32(layout: str) -> None:
    params, state_dict, wanted = saved(layout)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    wide = copy.copy(state_dict)
    wide["state"] = {place: {"step": 7.0, **values} for place, values in enumerate(wanted)}
    runs: list[Any] = [tilestep.AdamW(params), tilestep.AdamW(copies)]
    for optimizer, loaded in zip(runs, (state_dict, wide)):
        optimizer.load_state_dict(loaded)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    for mine, theirs in zip(params, copies):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_loads_them_through_full_precision(layout: str) -> None:
    params, state_dict, wanted = saved(layout)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(tilestep.full_precision(state_dict))
    for param, values in zip(params, wanted):
        assert set(theirs.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        for name, exact in values.items():
            torch.testing.assert_close(theirs.state[param][name], exact, rtol=3e-7, atol=0)
        param.grad = torch.ones_like(param)
    theirs.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_on_the_host_load_them_too(layout: str) -> None:
    params, state_dict, wanted = saved(layout)
    home = StreamedState(torch.device("cpu"), 1, 3)
    optimizer: Any = move_state(tilestep.AdamW(params, state_dtype="int8"), home, "gpu", "for a test")
    optimizer.load_state_dict(state_dict)
    for param, values in zip(params, wanted):
        for name, exact in values.items():
            assert error(numbers(optimizer.state[param], name, param.shape), exact) < 5e-4


@pytest.mark.parametrize(("bits", "whole"), [(24, 127), (32, 32767)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [True, "kahan", "remainder", "int8", False])
def test_corrections_of_flashoptim_become_masters(bits: int, whole: int, dtype: torch.dtype, masters: Any) -> None:
    if dtype is torch.float16 and masters not in (True, False):
        pytest.skip("kept for bfloat16 alone")
    exact = torch.cat([torch.randn(3997, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 2.0, -1.0])])
    param = torch.nn.Parameter(exact.to(dtype))
    mantissa = 7 if dtype is torch.bfloat16 else 10
    unit = torch.exp2(torch.floor(torch.log2(param.detach().double().abs().clamp(min=2.0**-14))) - mantissa)
    codes = torch.round((exact.double() - param.detach().double()) / (unit / 2) * whole)
    # Cast as torch's optimizers would cast it anyway.
    kept = codes.to(torch.int8).to(dtype) if bits == 24 else codes.to(torch.int16).view(dtype)
    group = {"lr": 1e-3, "params": [0], "master_bytewidth": bits // 8}
    state = {"step": 3, "exp_avg": torch.zeros(4000), "exp_avg_sq": torch.zeros(4000), "error_bits": kept}
    optimizer: Any = tilestep.AdamW([param], master_weights=masters)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert "error_bits" not in optimizer.state[param]
    if masters is False:
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        return
    key = next(key for key in optimizer.state[param] if key.endswith("_param"))
    kind = tilestep.storage.MASTER_FORMATS[masters]
    value = kind.values(param, optimizer.state[param][key]).double()
    # Half a step of the correction, what the master itself rounds, and two units in float32's last place.
    own = {"int8": 2**-8, "kahan": 2**-9}.get(masters, 0)
    room = unit * (0.5 / 2 / whole + own) + value.abs() * 2**-22
    assert ((value - exact.double()).abs() <= room).all()
    del group["master_bytewidth"]
    with pytest.raises(StateError, match="master_bytewidth"):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})


def numbered(values: list[torch.Tensor], **others: Any) -> dict[str, Any]:
    return {"step": 2, **{f"state{place + 1}": value for place, value in enumerate(values)}, **others}


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("Lion", ["exp_avg"]),
        ("SGD", ["momentum_buffer"]),
        ("RMSprop", ["square_avg"]),
        ("Adagrad", ["sum"]),
        ("LAMB", ["exp_avg", "exp_avg_sq"]),
    ],
)
def test_numbered_states_get_the_names_of_the_rule(rule: str, names: list[str]) -> None:
    weight = torch.nn.Parameter(torch.ones(80, 64))
    options = {"momentum": 0.9} if rule == "SGD" else {}
    optimizer: Any = tilestep.Optimizer([weight], rule, **options)
    buffers = [torch.full((80, 64), 0.5 + place) for place in range(len(names))]
    state_dict = {"state": {0: numbered(buffers)}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    optimizer.load_state_dict(state_dict)
    assert all(torch.equal(optimizer.state[weight][name], value) for name, value in zip(names, buffers))
    wide = tilestep.full_precision(state_dict, rule)
    assert set(wide["state"][0]) == {"step", *names}


def test_a_rule_of_ones_own_says_how_many_states_are_numbered() -> None:
    @tilestep.rule(numbered=1)
    def heavy_ball(param: Any, grad: Any, velocity: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
        velocity = 0.9 * velocity + grad
        return param - lr * velocity, velocity

    weight = torch.nn.Parameter(torch.ones(80, 64))
    optimizer: Any = tilestep.Optimizer([weight], heavy_ball)
    values_there = torch.full((80, 64), 0.5)
    optimizer.load_state_dict({"state": {0: numbered([values_there])}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    assert torch.equal(optimizer.state[weight]["velocity"], values_there)


def test_two_averages_of_ademamix_lie_in_one_state() -> None:
    weight = torch.nn.Parameter(torch.ones(70, 90))
    fast, slow, square = (torch.randn(70, 90) for _ in range(3))
    arrays, averages = zip(*[by_map(value, True) for value in (fast, slow)])
    squares, back = by_map(square.square(), False)
    state = numbered([torch.stack([array["state"] for array in arrays]), squares["state"]])
    state.update(
        qmap1=dynamic_map(True), qmap2=squares["qmap"], absmax1=torch.stack([array["absmax"] for array in arrays])
    )
    state["absmax2"] = squares["absmax"]
    optimizer: Any = tilestep.Optimizer([weight], "AdEMAMix")
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    for name, wanted in zip(("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"), (*averages, back)):
        assert torch.equal(optimizer.state[weight][name], wanted)


def test_what_cannot_be_read_is_refused_by_name_and_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(80, 64))
    optimizer: Any = tilestep.AdamW([("layer", weight)])
    weight.grad = torch.ones(80, 64)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[weight].items()}
    good, _ = bitsandbytes_layout(weight, torch.randn(80, 64), torch.rand(80, 64))
    arrays = good["__bnb_optimizer_quant_state__"]

    def refused(state: dict[str, Any], match: str, target: Any = optimizer) -> None:
        with pytest.raises(StateError, match=match):
            target.load_state_dict({"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]})

    refused({"step": 1, **arrays, "absmax1": arrays["absmax1"][:-1]}, "state1.*layer.*5120 codes.*shape.*19.*needs 20")
    old = {name: value for name, value in arrays.items() if name != "absmax1"}
    refused({"step": 1, **old, "max1": torch.ones(1)}, "has no block-wise scales")
    codes = torch.ones(80, 64, dtype=torch.uint8)
    refused({"step": 1, "exp_avg": codes, "exp_avg_sq": codes}, "'exp_avg' of parameter 0 .*layer.* is uint8.*scales")
    flash, _ = flashoptim_layout(weight, torch.randn(80, 64), torch.rand(80, 64))
    del flash["exp_avg::scales"]
    refused(flash, "'exp_avg' of .*layer.*no scales")
    refused({"step": 1, "state1": torch.ones(80, 64)}, "1 unnamed states of bitsandbytes.*RMSprop or SGD.*not of AdamW")
    assert all(torch.equal(value, optimizer.state[weight][name]) for name, value in before.items())
    with pytest.raises(StateError, match="pass one as `rule`"):
        tilestep.full_precision({"state": {0: {"state1": codes.float()}}, "param_groups": [{"params": [0]}]})
    with pytest.raises(ValueError, match=r"no rule is called 'Adamw'; did you mean.*AdamW"):
        tilestep.full_precision({"state": {}, "param_groups": [{"params": [0]}]}, "Adamw")

    class Opaque(Quantized):
        def dequantize(self) -> torch.Tensor:
            raise RuntimeError("not here")

    opaque = Opaque(weight, codes=codes)
    refused({"step": 1, "exp_avg": opaque, "exp_avg_sq": opaque}, "'exp_avg' of .* type Opaque")


@pytest.mark.parametrize(
    "name", ["AdamW8bit", "LAMB8bit", "Lion8bit", "AdEMAMix8bit", "SGD8bit", "RMSprop8bit", "Adagrad8bit"]
)
def test_real_checkpoints_of_bitsandbytes(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    options = {"momentum": 0.9} if name.startswith("SGD") else {}
    theirs = getattr(bitsandbytes.optim, name)(params, lr=1e-3, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        theirs.step()
    rule = name.removesuffix("8bit")
    mine: Any = tilestep.Optimizer(params, rule, lr=1e-3, **options)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for param in params:
        state = theirs.state[param]
        values = []
        for number in ("1", "2"):
            codes = state.get(f"state{number}")
            if codes is None:
                continue
            if codes.is_floating_point():
                values += [*codes] if codes.dim() > param.dim() else [codes]
                continue
            most = state[f"absmax{number}"]
            parts = zip(codes, most) if most.dim() == 2 else [(codes, most)]
            values += [
                bitsandbytes.functional.dequantize_blockwise(
                    part.contiguous(), absmax=scale, code=state[f"qmap{number}"], blocksize=256
                )
                for part, scale in parts
            ]
        names = [name for name in mine.state[param] if name != "step"]
        assert len(names) == len(values)
        for name, value in zip(names, values):
            torch.testing.assert_close(mine.state[param][name], value, rtol=3e-7, atol=0)


def test_what_bitsandbytes_keeps_beside_its_states() -> None:
    """The norm of LAMB's last update is not read; AdEMAMix's warmups are named in a warning."""
    params, checkpoint, wanted = saved("bitsandbytes")
    for state in checkpoint["state"].values():
        state["__bnb_optimizer_quant_state__"]["unorm_vec"] = torch.ones(1)
    mine: Any = tilestep.LAMB(params)
    mine.load_state_dict(checkpoint)
    assert set(mine.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(mine.state[params[0]]["exp_avg_sq"], wanted[0]["exp_avg_sq"])
    for state in checkpoint["state"].values():
        nested = state["__bnb_optimizer_quant_state__"]
        nested["state1"], nested["absmax1"] = (torch.stack([nested[name]] * 2) for name in ("state1", "absmax1"))
    checkpoint["param_groups"][0].update(betas=(0.8, 0.9, 0.99), alpha=2.0, t_alpha=100, t_beta3=None)
    mixed: Any = tilestep.AdEMAMix(params)
    with pytest.warns(UserWarning, match="t_alpha=100 is not loaded: set alpha_warmup=") as caught:
        mixed.load_state_dict(checkpoint)
    assert not any("t_beta3" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_real_checkpoints_of_torchao(name: str) -> None:
    optim = pytest.importorskip("torchao.optim")
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    theirs = getattr(optim, name)(params, lr=1e-3)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            theirs.step()
    mine: Any = tilestep.AdamW(params)
    mine.load_state_dict(theirs.state_dict())
    assert type(theirs.state[params[0]]["exp_avg"]) is not torch.Tensor
    for param in params:
        for state in ("exp_avg", "exp_avg_sq"):
            value = theirs.state[param][state]
            value = value.dequantize() if hasattr(value, "codes") else value
            assert torch.equal(mine.state[param][state], value)


def muon_by_hand(grads: list[torch.Tensor], momentum: float, sums: bool, nesterov: bool) -> tuple[Any, torch.Tensor]:
    """The momentum after these gradients, and what the last step orthogonalizes."""
    buffer = torch.zeros_like(grads[0])
    for grad in grads:
        buffer = momentum * buffer + (1.0 if sums else 1 - momentum) * grad
    weight = 1.0 if sums else 1 - momentum
    return buffer, weight * grads[-1] + momentum * buffer if nesterov else buffer


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_momentum_of_dion_is_a_sum(name: str, nesterov: bool) -> None:
    """After a checkpoint of its layout the next step goes on as if all steps had been ours."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(6, 8, generator=generator) for _ in range(4)]
    summed, _ = muon_by_hand(grads[:3], 0.9, sums=True, nesterov=nesterov)
    kind: Any = tilestep.Muon if name == "muon" else tilestep.NorMuon
    made = [kind([torch.nn.Parameter(torch.ones(6, 8))], momentum=0.9, nesterov=nesterov) for _ in range(2)]
    ours, loaded = made
    for grad in grads[:3]:
        ours.param_groups[0]["params"][0].grad = grad.clone()
        ours.step()
    state = {"momentum": summed.clone()}
    if name == "normuon":
        state["variance_neuron"] = ours.state[ours.param_groups[0]["params"][0]]["second_momentum_buffer"].clone()
    group = {"lr": ours.param_groups[0]["lr"], "mu": 0.9, "algorithm": name, "step": 3, "nesterov": nesterov}
    loaded.load_state_dict({"state": {0: state}, "param_groups": [{**group, "params": [0]}]})
    params = [optimizer.param_groups[0]["params"][0] for optimizer in made]
    for optimizer, param in zip(made, params):
        with torch.no_grad():
            param.fill_(1.0)
        param.grad = grads[3].clone()
        optimizer.step()
    averages = [optimizer.state[param]["momentum_buffer"] for optimizer, param in zip(made, params)]
    torch.testing.assert_close(*averages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*[param.detach() for param in params], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(averages[0], summed, rtol=0.5), "sums and averages are alike, so the test shows nothing"


def test_a_sum_becomes_an_average() -> None:
    grads = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    (summed, direction), (average, wanted) = (
        muon_by_hand(grads, 0.95, sums=sums, nesterov=True) for sums in (True, False)
    )
    torch.testing.assert_close(0.05 * direction, wanted)
    theirs = {
        "state": {0: {"momentum_buffer": summed}, 1: {"exp_avg": summed}},
        "param_groups": [{"momentum": 0.95, "params": [0]}, {"params": [1]}],
    }
    converted = tilestep.averaged_momentum(theirs)
    torch.testing.assert_close(converted["state"][0]["momentum_buffer"], average)
    assert converted["state"][1]["exp_avg"] is summed and theirs["state"][0]["momentum_buffer"] is summed
    del theirs["param_groups"][0]["momentum"]
    with pytest.raises(StateError, match="group 0 of the checkpoint has no 'momentum': pass `momentum`"):
        tilestep.averaged_momentum(theirs)
    with pytest.raises(ValueError, match=r"Invalid momentum: 1.5; it must be in \[0, 1\)"):
        tilestep.averaged_momentum(theirs, 1.5)
    torch.testing.assert_close(tilestep.averaged_momentum(theirs, 0.95)["state"][0]["momentum_buffer"], average)
