"""A short training run with gradients that are known: every order of scaler calls, overflows put in from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import tilestep

INF, NAN = float("inf"), float("nan")
MAX_NORM = 0.7
STEPS = 6
SHAPES = [(5, 3), (), (17,), (2, 3, 4)]

Parameters = list[torch.nn.Parameter]
Clip = Callable[[Parameters, float], object]


@dataclass(frozen=True)
class Order:
    """One order of calls.

    Args:
        name: as in the table of docs/gradscaler.md.
        clip_scaled: clip before anything is unscaled, which clips wrongly.
        unscale: call `scaler.unscale_`.
        clip: clip after it.
        max_grad_norm: let the optimizer clip.
        clip_of: whose `clip_grad_norm_`.
    """

    name: str
    clip_scaled: bool = False
    unscale: bool = False
    clip: bool = False
    max_grad_norm: bool = False
    clip_of: Clip = torch.nn.utils.clip_grad_norm_

    def without_optimizer_clip(self) -> Order:
        """What plain torch must be asked for to get the same: the optimizer's clip as one of unscaled gradients.

        After a clip to the threshold, clipping to the same one changes nothing.
        """
        return Order(self.name, self.clip_scaled, self.unscale or self.max_grad_norm, self.clip or self.max_grad_norm)


ORDERS = [
    Order("step"),
    Order("unscale_, step", unscale=True),
    Order("unscale_, torch's clip, step", unscale=True, clip=True),
    Order("unscale_, tilestep's clip, step", unscale=True, clip=True, clip_of=tilestep.clip_grad_norm_),
    Order("max_grad_norm: step", max_grad_norm=True),
    Order("max_grad_norm: unscale_, step", max_grad_norm=True, unscale=True),
    Order("max_grad_norm: unscale_, torch's clip, step", max_grad_norm=True, unscale=True, clip=True),
    Order("torch's clip of scaled gradients, step", clip_scaled=True),
    Order("tilestep's clip of scaled gradients, step", clip_scaled=True, clip_of=tilestep.clip_grad_norm_),
    Order("max_grad_norm: torch's clip of scaled gradients, step", clip_scaled=True, max_grad_norm=True),
]
Overflows = Mapping[int, Callable[[Parameters], None]]


def _element(value: float, tensor: int = 2) -> Callable[[Parameters], None]:
    def put(params: Parameters) -> None:
        params[tensor].grad.view(-1)[-1] = value  # type: ignore[union-attr]

    return put


def _both(params: Parameters) -> None:
    _element(INF)(params)
    _element(-INF, 0)(params)


def _tensor(params: Parameters) -> None:
    params[3].grad.fill_(INF)  # type: ignore[union-attr]


def _all(params: Parameters) -> None:
    for param in params:
        param.grad.fill_(NAN)  # type: ignore[union-attr]


OVERFLOWS: dict[str, Overflows] = {
    "none": {},
    "inf": {2: _element(INF)},
    "nan": {2: _element(NAN)},
    "minus_inf": {3: _element(-INF, 1)},
    "inf_and_minus_inf": {3: _both},
    "one_tensor": {2: _tensor},
    "every_tensor": {2: _all},
    "first_step": {0: _element(INF)},
    "last_step": {STEPS - 1: _element(NAN)},
    "several_in_a_row": {1: _element(INF), 2: _element(NAN, 0), 3: _tensor},
    "all_steps": dict.fromkeys(range(STEPS), _element(INF)),
}


@dataclass
class Run:
    """What is left of a run."""

    params: Parameters
    state: list[dict[str, torch.Tensor]]
    scale: float
    growth: int
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    """Of every step, as the step left them."""


def parameters(
    *devices: str, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Parameters:
    """Parameters, in turn on each of the devices; without any on the CPU."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    where = devices or ("cpu",)
    return [torch.nn.Parameter(tensor.to(where[at % len(where)], dtype)) for at, tensor in enumerate(tensors)]


def scaled_backward(scaler: torch.amp.GradScaler, params: Parameters, step: int) -> None:
    """Gradients of step `step`, times the loss scale."""
    generator = torch.Generator().manual_seed(100 + step)
    home = params[0].device
    losses = [(param * torch.randn(param.shape, generator=generator).to(param)).sum().to(home) for param in params]
    scaler.scale(torch.stack(losses).sum()).backward()


def run(
    make: Callable[..., torch.optim.Optimizer],
    scaler_class: type[torch.amp.GradScaler],
    order: Order,
    overflows: Overflows,
    *devices: str,
) -> Run:
    """Train for STEPS steps, with parameters on each of the devices; the scaler is the first one's."""
    params = parameters(*devices)
    optimizer = make(params, max_grad_norm=MAX_NORM) if order.max_grad_norm else make(params)
    scaler = scaler_class(params[0].device.type, init_scale=1024.0, growth_interval=2)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaled_backward(scaler, params, step)
        if step in overflows:
            overflows[step](params)
        if order.clip_scaled:
            order.clip_of(params, MAX_NORM)
        if order.unscale:
            scaler.unscale_(optimizer)
        if order.clip:
            order.clip_of(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        gradients.append([param.grad.clone() for param in params])  # type: ignore[union-attr]
    saved = scaler.state_dict()
    state = [dict(optimizer.state[param]) for param in params]
    return Run(params, state, saved["scale"], saved["_growth_tracker"], gradients)
