"""Stochastic rounding on any backend: what a step keeps is what torch makes of the same random bits."""

from __future__ import annotations

from typing import Any

import torch
from block_rows import RULES, as_bits
from block_rows import numbers as block_numbers
from format_rows import bits, numbers
from remainder_patterns import keep

import tilestep
from tilestep.storage import Plain, Stochastic, random_tensor, shape_of_entries, state_format, stored_in, stream_of

FORMATS = ["bfloat16", "float16", "int8", "float8_e4m3", "int4"]


def check_elements(dtype: torch.dtype, few: bool = False, device: str = "cpu") -> None:
    """A parameter of 16 bits and a state: by other bits of the same draw, in either order of memory."""
    values = numbers(few)
    values = values[: len(values) // 8 * 8].view(-1, 8)
    for turned in (False, True):
        weight = torch.nn.Parameter(torch.zeros(values.shape, dtype=dtype, device=device))
        if turned:
            weight = torch.nn.Parameter(torch.zeros(values.shape[::-1], dtype=dtype, device=device).t())
        weight.grad = torch.zeros(values.shape, dtype=dtype, device=device)
        other = torch.nn.Parameter(torch.zeros(5, dtype=dtype, device=device))
        groups = [{"params": [other]}, {"params": [weight], "seed": 5}]
        optimizer = tilestep.Optimizer(groups, keep, rounding="stochastic", state_dtype=lambda _: "float32")
        optimizer.step()
        optimizer.state[weight]["wide"].copy_(values)
        optimizer.step()
        index = torch.arange(values.numel()).view(values.shape)
        if turned:
            index = torch.arange(values.numel()).view(values.shape[::-1]).t()
        random = random_tensor(stream_of(5, 1), 2, 0, index)
        wanted = {"param": torch.empty_like(weight, device="cpu")}
        stored_in(Stochastic(Plain(dtype)), wanted, "param", values, random=random)
        assert torch.equal(bits(weight.detach().cpu()), bits(wanted["param"].detach()))


def check_states(name: str, shapes: list[tuple[int, ...]], device: str = "cpu") -> None:
    """A state in a format, of parameters of float32 and of 16 bits, which take the first bits of a draw."""
    for signed, rule in RULES.items():
        for dtype in (torch.float32, torch.bfloat16):
            params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
            named = [("p", param) for param in params]
            optimizer = tilestep.Optimizer(named, rule, state_dtype=lambda _: name, rounding="stochastic", seed=3)
            for place, param in enumerate(params):
                given = block_numbers(shapes[place], place).to(dtype)
                # A NaN's code follows its sign, which GPUs leave out and torch's conversions set.
                given[given.isnan()] = torch.nan
                param.grad = given.to(device)
            optimizer.step()
            for place, param in enumerate(params):
                state, slot = optimizer.state[param], int(dtype is torch.bfloat16)
                format = state_format(name, signed)
                arrays = format.arrays("kept")
                if len(arrays) > 1 and arrays[1].name not in state:
                    format = state_format("int8", signed)
                wanted = {
                    array.name: torch.empty(shape_of_entries(param.shape, array.elements), dtype=array.dtype)
                    for array in format.arrays("kept")
                }
                index = torch.arange(param.numel()).view(param.shape)
                random = random_tensor(stream_of(3, place), 1, slot, index)
                assert param.grad is not None
                values = (param.grad if signed else param.grad.abs()).float().cpu()
                stored_in(Stochastic(format), wanted, "kept", values, param.shape, random=random)  # type: ignore[arg-type]
                for key, array in wanted.items():
                    assert torch.equal(as_bits(state[key].cpu()), as_bits(array)), (name, key, param.shape, dtype)


def train(device: str, rule: str = "AdamW", steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Some steps of parameters of 16 bits, among them turned ones, on a device; what comes of them, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (64, 300), (4, 8, 3, 3), (70, 130), (3,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device)) for s in shapes]
    params[3] = torch.nn.Parameter(params[3].detach().t())
    optimizer = tilestep.Optimizer(params, rule, lr=1e-3, rounding="stochastic", **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(device)
        optimizer.step()
    return [param.detach().cpu() for param in params]
