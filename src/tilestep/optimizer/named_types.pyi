"""Signatures of the named optimizers, made by scripts/optimizer_stub.py from the rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .decide import TimesMean
from .masters import MasterWeights
from .optimizer import Optimizer
from .state_formats import StateDtype

# None where the rule says what it means.
Number = float | torch.Tensor | Callable[[Any], Any] | None

__all__ = [
    "ADOPT",
    "ASGD",
    "AdEMAMix",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "LAMB",
    "LARS",
    "Lion",
    "Muon",
    "NAdam",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SOAP",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "SophiaG",
    "StableAdamW",
    "Tiger",
]

class ADOPT(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.9999),
        eps: Number = 1e-06,
        weight_decay: Number = 0.0,
        decouple: bool = False,
        *,
        clip_exponent: Number = 0.25,
        maximize: bool = False,
        foreach: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class ASGD(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.01,
        lambd: Number = 0.0001,
        alpha: Number = 0.75,
        t0: Number = 1000000.0,
        weight_decay: Number = 0.0,
        foreach: Any = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class AdEMAMix(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.999, 0.9999),
        alpha: Number = 2.0,
        beta3_warmup: Any = None,
        alpha_warmup: Any = None,
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adadelta(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1.0,
        rho: Number = 0.9,
        eps: Number = 1e-06,
        weight_decay: Number = 0.0,
        foreach: Any = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adafactor(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.01,
        beta2_decay: Number = -0.8,
        eps: Sequence[Number] = (None, 0.001),
        d: Number = 1.0,
        weight_decay: Number = 0.0,
        *,
        maximize: bool = False,
        foreach: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adagrad(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.01,
        lr_decay: Number = 0.0,
        weight_decay: Number = 0.0,
        initial_accumulator_value: Number = 0.0,
        eps: Number = 1e-10,
        foreach: Any = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adam(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        foreach: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class AdamW(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Any = None,
        decoupled_weight_decay: bool = True,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adamax(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.002,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        foreach: Any = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Adan(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.98, 0.92, 0.99),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        *,
        no_prox: bool = False,
        foreach: Any = None,
        fused: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class LAMB(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        bias_correction: bool = True,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-06,
        weight_decay: Number = 0.01,
        *,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class LARS(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        momentum: Number = 0.9,
        weight_decay: Number = 0.0001,
        trust_coefficient: Number = 0.001,
        eps: Number = 0.0,
        nesterov: bool = False,
        *,
        exclude_bias_and_norm: bool = True,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Lion(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.0001,
        betas: Sequence[Number] = (0.9, 0.99),
        weight_decay: Number = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Muon(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        weight_decay: Number = 0.1,
        momentum: Number = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[Number] = (3.4445, -4.775, 2.0315),
        eps: Number = 1e-07,
        ns_steps: Number = 5,
        adjust_lr_fn: Any = None,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class NAdam(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.002,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        momentum_decay: Number = 0.004,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Prodigy(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1.0,
        betas: Sequence[Number] = (0.9, 0.999),
        beta3: Any = None,
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: Number = 1e-06,
        d_coef: Number = 1.0,
        growth_rate: Number = ...,
        *,
        fsdp_in_use: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class RAdam(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class RMSprop(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.01,
        alpha: Number = 0.99,
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        momentum: Number = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: Any = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Rprop(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.01,
        etas: Sequence[Number] = (0.5, 1.2),
        step_sizes: Sequence[Number] = (1e-06, 50.0),
        *,
        maximize: bool = False,
        capturable: bool = False,
        foreach: Any = None,
        differentiable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class SGD(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        momentum: Number = 0.0,
        dampening: Number = 0.0,
        weight_decay: Number = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: Any = None,
        differentiable: bool = False,
        fused: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class SOAP(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.003,
        betas: Sequence[Number] = (0.95, 0.95),
        shampoo_beta: Number = -1.0,
        eps: Number = 1e-08,
        weight_decay: Number = 0.01,
        precondition_frequency: Number = 10,
        max_precond_dim: Number = 10000,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class ScheduleFreeAdamW(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.0025,
        betas: Sequence[Number] = (0.9, 0.999),
        eps: Number = 1e-08,
        weight_decay: Number = 0.0,
        warmup_steps: Number = 0,
        r: Number = 0.0,
        weight_lr_power: Number = 2.0,
        *,
        foreach: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class ScheduleFreeSGD(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1.0,
        momentum: Number = 0.9,
        weight_decay: Number = 0.0,
        warmup_steps: Number = 0,
        r: Number = 0.0,
        weight_lr_power: Number = 2.0,
        *,
        foreach: Any = None,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class SophiaG(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.0001,
        betas: Sequence[Number] = (0.965, 0.99),
        rho: Number = 0.04,
        weight_decay: Number = 0.1,
        *,
        bs: Number = 5120,
        maximize: bool = False,
        capturable: bool = False,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class StableAdamW(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        betas: Sequence[Number] = (0.9, 0.99),
        weight_decay: Number = 0.01,
        eps: Number = 1e-06,
        *,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...

class Tiger(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.001,
        beta: Number = 0.965,
        weight_decay: Number = 0.01,
        shrink_ratio: Number = 0.99,
        *,
        embedding: bool = False,
        center: Number = 0.0,
        max_grad_norm: float | torch.Tensor | None = None,
        master_weights: MasterWeights = False,
        state_dtype: StateDtype = None,
        skip_nonfinite: bool = False,
        skip_above: float | TimesMean | None = None,
        track_grad_norm: bool = False,
    ) -> None: ...
