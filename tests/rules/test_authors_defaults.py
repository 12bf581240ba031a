"""The numbers that authors' own code has where nothing is said: comparisons of steps use the rule's on both sides."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tilestep.rules import registry

PUBLISHED: dict[str, dict[str, Any]] = {
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "LAMB": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True}
    | {"adam_w_mode": True, "grad_averaging": True, "use_nvlamb": False},
    "LARS": {"momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 1e-3, "eps": 0.0, "nesterov": False},
    "Adan": {"lr": 1e-3, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.0, "no_prox": False},
    "AdEMAMix": {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 2.0, "eps": 1e-8, "weight_decay": 0.0}
    | {"beta3_warmup": None, "alpha_warmup": None},
    "ADOPT": {"lr": 1e-3, "betas": (0.9, 0.9999), "eps": 1e-6, "weight_decay": 0.0, "decouple": False}
    | {"clip_exponent": 0.25},
    "ScheduleFreeSGD": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0}
    | {"weight_lr_power": 2.0},
    "ScheduleFreeAdamW": {"lr": 0.0025, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0}
    | {"r": 0.0, "weight_lr_power": 2.0, "inner_momentum": 0.0},
    "SophiaG": {"lr": 1e-4, "betas": (0.965, 0.99), "rho": 0.04, "weight_decay": 0.1, "bs": 5120},
    "StableAdamW": {"betas": (0.9, 0.99), "weight_decay": 1e-2, "eps": 1e-6},
    "Tiger": {"lr": 1e-3, "beta": 0.965, "weight_decay": 0.01, "shrink_ratio": 0.99},
    "Prodigy": {"lr": 1.0, "betas": (0.9, 0.999), "beta3": None, "eps": 1e-8, "weight_decay": 0.0, "decouple": True}
    | {"use_bias_correction": False, "safeguard_warmup": False, "d0": 1e-6, "d_coef": 1.0, "growth_rate": math.inf},
    "LaProp": {"lr": 4e-4, "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 0.0, "amsgrad": False}
    | {"centered": False},
    "AdamAtan2": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "a": 1.27, "b": 1.0},
    "MARS": {"lr": 3e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "gamma": 0.025}
    | {"is_approx": True, "mars_type": "mars-adamw", "optimize_1d": False, "lr_1d_factor": 3e-3 / 3e-3}
    | {"betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1},
    "NorMuon": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "beta2": 0.95, "nesterov": True, "eps": 1e-10}
    | {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": None, "adjust_lr_fn": None, "lr_scale": 1.0},
    "AdaMuon": {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True, "ns_steps": None, "eps": 1e-8}
    | {"ns_coefficients": (3.4445, -4.7750, 2.0315)},
    "MuonH": {"lr": 0.014, "momentum": 0.95, "nesterov": True, "ns_coefficients": (2, -1.5, 0.5), "ns_steps": 12}
    | {"eps": 1e-10},
    "Scion": {"lr": 1e-3, "momentum": 1.0, "norm": "Auto", "scale": 1.0, "unconstrained": False, "ns_steps": 5}
    | {"normalized": None, "transpose": False},
    "SOAP": {"lr": 3e-3, "betas": (0.95, 0.95), "shampoo_beta": -1.0, "eps": 1e-8, "weight_decay": 0.01}
    | {"precondition_frequency": 10, "max_precond_dim": 10000, "normalize_grads": False, "correct_bias": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_those_of_the_authors_code(name: str) -> None:
    defaults = registry[name].hyperparameters
    assert {key: defaults[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    # What is left has no default there (a learning rate), is a flag that is off, or is ours alone.
    ours = {
        "maximize": False,
        "lr": defaults.get("lr"),
        "embedding": False,
        "center": 0.0,
        "exclude_bias_and_norm": True,
    }
    assert {key: value for key, value in defaults.items() if key not in PUBLISHED[name] and ours[key] != value} == {}
