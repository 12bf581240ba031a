"""Trainings beside torch's own optimizers over torch's own lists of arguments, with checkpoints exchanged midway."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from state_files import saved_and_loaded

import tilestep

__all__ = ["FLAGS", "argument_lists", "compared", "exchanged_training"]

FLAGS = ("foreach", "capturable", "differentiable", "fused")
STEPS = 20
SHAPES = [(5,), (4, 6), (2, 3, 5), (), (0,), (3, 2, 3, 3), (130,)]
MATRICES = [(6, 9), (9, 6), (8, 8), (9, 6)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(_plain(entry) for entry in value) if isinstance(value, tuple) else value


def argument_lists() -> list[tuple[str, dict[str, Any]]]:
    """Every dense optimizer with each combination of arguments that torch tests it with, on CPU and CUDA.

    Flags that choose an implementation are left out, and combinations that differ in nothing else are here once.

    Raises:
        ImportError: torch's lists need the package expecttest.
    """
    from torch.testing._internal.common_optimizers import optim_db

    found: list[tuple[str, dict[str, Any]]] = []
    for info in optim_db:
        name = info.optim_cls.__name__
        for entry in [each for device in ("cpu", "cuda") for each in info.optim_inputs_func(device=device)]:
            plain = {key: _plain(value) for key, value in entry.kwargs.items() if key not in FLAGS}
            if name in tilestep.registry and (name, plain) not in found:
                found.append((name, plain))
    return found


def _params(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(each.to(device, dtype)) for each in drawn]


def _groups(params: list[torch.nn.Parameter], rate: float) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": rate / 2}]


def _train(pairs: list[tuple[Any, list[torch.nn.Parameter]]], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        drawn = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in pairs[0][1]]
        for optimizer, params in pairs:
            for param, gradient in zip(params, drawn, strict=True):
                param.grad = gradient.to(param)
            optimizer.step()


def _tolerance(name: str, dtype: torch.dtype) -> dict[str, float]:
    if name == "Muon":  # bfloat16 products
        return {"rtol": 1e-5, "atol": 1e-3}
    if dtype is torch.float32:
        return {"rtol": 1e-4, "atol": 1e-4}
    # What torch keeps as one number for each tensor (ASGD's rate, NAdam's product) is float32 for any parameter.
    return {"rtol": 1e-6, "atol": 1e-6} if name in ("ASGD", "NAdam") else {"rtol": 1e-9, "atol": 1e-9}


def exchanged_training(name: str, kwargs: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Twenty steps of torch's optimizer and ours with two groups; after ten each one's state goes on in the other.

    Args:
        name: of the optimizer.
        kwargs: its arguments.
        dtype: of the parameters.
        device: where they are.
    """
    shapes = MATRICES if name == "Muon" else SHAPES
    if name == "Adafactor":  # torch's divides by the number of elements; one element's gradient can be all but zero
        shapes = [shape for shape in shapes if shape and 0 not in shape]
    mine, theirs = _params(shapes, dtype, device), _params(shapes, dtype, device)
    make, make_torch = getattr(tilestep, name), getattr(torch.optim, name)
    rate = kwargs.get("lr", make_torch(theirs).defaults["lr"])
    ours, torchs = make(_groups(mine, rate), **kwargs), make_torch(_groups(theirs, rate), **kwargs)
    start = [param.detach().clone() for param in mine]
    _train([(ours, mine), (torchs, theirs)], range(STEPS // 2))
    into_ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
    into_torch = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    # Made with other arguments than the checkpoint's: it brings its own.
    resumed, torch_resumed = make(_groups(into_ours, 0.5)), make_torch(_groups(into_torch, 0.5))
    resumed.load_state_dict(saved_and_loaded(torchs.state_dict()))
    torch_resumed.load_state_dict(saved_and_loaded(ours.state_dict()))
    pairs = [(ours, mine), (torchs, theirs), (resumed, into_ours), (torch_resumed, into_torch)]
    _train(pairs, range(STEPS // 2, STEPS))
    tolerance = _tolerance(name, dtype)
    for params in (mine, into_ours, into_torch):
        for shape, found, wanted in zip(shapes, params, theirs, strict=True):
            torch.testing.assert_close(
                found.detach(), wanted.detach(), **tolerance, msg=lambda text, shape=shape: f"{shape}: {text}"
            )
    assert rate == 0 or all(not torch.equal(old, now) for old, now in zip(start, mine) if now.numel())


def compared(name: str, kwargs: dict[str, Any], dtype: torch.dtype, device: str) -> str:
    """What was wrong in `exchanged_training`, or an empty string; for processes side by side."""
    torch.set_num_threads(1)
    try:
        exchanged_training(name, kwargs, dtype, device)
    except Exception:
        return traceback.format_exc()
    return ""
