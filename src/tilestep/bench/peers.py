"""The optimizers that take part: how each is built, and whether it can be here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices import has_streams
from ..optimizer import Optimizer

OURS = "tilestep"
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01

Build = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Peer:
    """One optimizer in the comparison."""

    name: str  # what the tables call it
    build: Callable[..., Any]  # makes the optimizer for a list of parameters
    module: str = "torch"  # what must be importable
    compiled: bool = False  # whether its first step compiles for so long that it runs only on request
    clips: bool = False  # whether `step()` itself clips, when built with `max_grad_norm`
    gpu_only: bool = False  # whether it has no CPU version


def _torch_adamw(parameters: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


def _torch_compiled(parameters: Sequence[Tensor]) -> Any:
    optimizer = torch.optim.AdamW(
        parameters, lr=torch.tensor(LEARNING_RATE), weight_decay=WEIGHT_DECAY, capturable=parameters[0].is_cuda
    )
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def _tilestep(parameters: Sequence[Tensor], **options: Any) -> Any:
    return Optimizer(parameters, "AdamW", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


def _optimi(parameters: Sequence[Tensor]) -> Any:
    adamw = importlib.import_module("optimi").AdamW
    return adamw(parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=WEIGHT_DECAY, eps=1e-8, kahan_sum=False)


def _flashoptim(parameters: Sequence[Tensor]) -> Any:
    adamw = importlib.import_module("flashoptim").FlashAdamW
    return adamw(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, quantize=False, master_weight_bits=None)


def _heavyball(parameters: Sequence[Tensor]) -> Any:
    adamw = importlib.import_module("heavyball").AdamW
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return adamw(parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=WEIGHT_DECAY, storage_dtype=dtype)


PEERS = [
    Peer("torch default", _torch_adamw),
    Peer("torch foreach", lambda parameters: _torch_adamw(parameters, foreach=True)),
    Peer("torch fused", lambda parameters: _torch_adamw(parameters, fused=True)),
    Peer("torch compiled", _torch_compiled, compiled=True),
    Peer("torch-optimi", _optimi, module="optimi"),
    Peer("flashoptim", _flashoptim, module="flashoptim", gpu_only=True),
    Peer("heavyball", _heavyball, module="heavyball", compiled=True),
    Peer(OURS, _tilestep, module="tilestep", clips=True),
]


def peers(device: torch.device, compiled: bool = False, names: Sequence[str] = ()) -> list[Peer]:
    """Return the optimizers that can take part here.

    >>> [peer.name for peer in peers(torch.device("cpu"), names=["torch fused"])]
    ['torch fused']
    """
    return [
        peer
        for peer in PEERS
        if importlib.util.find_spec(peer.module) is not None
        and (compiled or not peer.compiled)
        and (has_streams(device) or not peer.gpu_only)
        and (not names or peer.name in names)
    ]


def step_of(peer: Peer, parameters: Sequence[Tensor], max_grad_norm: float | None) -> Callable[[], object]:
    """Return a function that takes one step, clipping by the global norm first where asked.

    >>> fused = peers(torch.device("cpu"), names=["torch fused"])[0]
    >>> parameter = torch.ones(3, requires_grad=True)
    >>> parameter.grad = torch.ones(3)
    >>> step = step_of(fused, [parameter], max_grad_norm=0.5)
    >>> step()
    >>> bool((parameter < 1).all()), round(float(parameter.grad.norm()), 3)
    (True, 0.5)
    """
    if peer.clips and max_grad_norm is not None:
        optimizer = peer.build(parameters, max_grad_norm=max_grad_norm)
    else:
        optimizer = peer.build(parameters)
    if peer.clips or max_grad_norm is None:

        def step() -> None:
            optimizer.step()
    else:

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            optimizer.step()

    return step
