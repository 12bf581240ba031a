"""Optimizers of tilestep and of other libraries on one device, with the formulas that judge them: rows of parity.py.

A row holds the expressions that run. Both optimizers get the same parameters and, at every step, the same gradients.
Gradients do not depend on the parameters, so errors do not feed back.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import parity_formulas as formulas
import torch
from parity_formulas import Formula
from torch import Tensor

import tilestep
from tilestep.optimizer.masters import exact_values

__all__ = [
    "ROWS",
    "RUN",
    "Offloaded",
    "Resume",
    "Row",
    "build_optimizer",
    "initial_weights",
    "library_of",
    "update_error",
]

Shapes = tuple[tuple[int, ...], ...]
MIXED: Shapes = ((96, 64), (257, 33), (301,), (8, 3, 5, 5))
MATRICES: Shapes = ((64, 96), (96, 64), (48, 48))
LARGE: Shapes = ((64, 128), (96, 256), (16384,))
"""Of at least 4,096 elements, below which libraries keep states in float32."""
STEPS = 10


@dataclass(frozen=True)
class Row:
    """A comparison of updates on one device.

    Args:
        name: `library/optimizer`.
        ours: an expression for tilestep's optimizer of `params`.
        theirs: an expression for the other library's optimizer.
        formula: the published rule in float64; None runs the other library's code on float64 tensors.
        instead: rules that the other library may follow instead: description and formula.
        reason: why the other library's error is larger, if it follows no other rule.
        needs: "cuda" for a row that runs on GPUs only.
    """

    name: str
    ours: str
    theirs: str
    formula: Formula | None = None
    instead: tuple[tuple[str, Formula], ...] = ()
    shapes: Shapes = MIXED
    dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    reason: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Resume:
    """A comparison of training resumed from a saved state_dict with training without a break."""

    name: str
    ours: str
    theirs: str
    shapes: Shapes = LARGE
    dtype: torch.dtype = torch.float32
    needs: str = ""


@dataclass(frozen=True)
class Offloaded:
    """A comparison of an optimizer whose state is in host memory with the same optimizer on the device."""

    name: str
    ours: str
    our_plain: str
    theirs: str
    their_plain: str
    shapes: Shapes = LARGE
    dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    needs: str = ""


def initial_weights(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return normal numbers with a standard deviation of 0.02, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    return [(0.02 * torch.randn(shape, generator=generator)).to(dtype).to(device) for shape in shapes]


def gradients(shapes: Shapes, dtype: torch.dtype, step: int) -> list[Tensor]:
    """Return gradients on the CPU: a constant direction plus noise, with a scale for each element."""
    found = []
    for place, shape in enumerate(shapes):
        fixed = torch.Generator().manual_seed(1000 + place)
        direction, size = torch.randn(shape, generator=fixed), torch.randn(shape, generator=fixed)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(2000 + 97 * step + place))
        found.append((0.01 * size.exp() * (0.5 * direction + noise)).to(dtype))
    return found


def library_of(expression: str) -> str:
    """Return the package of an expression's optimizer."""
    return expression.partition(".")[0]


def build_optimizer(expression: str, params: list[Any], **names: Any) -> Any:
    """Evaluate an expression.

    Raises:
        ImportError: if its package is not installed.
    """
    path = re.split(r"\(", expression, maxsplit=1)[0].rpartition(".")[0]
    importlib.import_module(path)
    root = library_of(expression)
    names = {root: sys.modules[root], "torch": torch, "tilestep": tilestep, "params": params, **names}
    optimizer = eval(expression, names)
    if root == "schedulefree":
        optimizer.train()
    return optimizer


def weights_of(optimizer: Any, param: Tensor) -> Tensor:
    """Return a parameter in float64 on the CPU, with its master or correction."""
    state = optimizer.state.get(param, {}) if hasattr(optimizer, "state") else {}
    if "error_bits" in state:
        value = sys.modules["flashoptim"].reconstruct_fp32_param(param.detach(), state["error_bits"])
    elif type(optimizer).__module__.startswith("tilestep") and param.dtype is torch.bfloat16:
        value = exact_values(param.detach(), state)
    else:
        value = param.detach()
    return value.to("cpu", torch.float64, copy=True)


@dataclass
class Run:
    """Weights before the first step and after every step; whether a step has written to gradients."""

    weights: list[list[Tensor]]
    overwrites: bool = False


def train(expression: str, row: Row | Offloaded, device: torch.device, dtype: torch.dtype) -> Run:
    """Train with a row's gradients in a dtype."""
    params = [torch.nn.Parameter(value.to(dtype)) for value in initial_weights(row.shapes, row.dtype, device)]
    optimizer = build_optimizer(expression, params)
    run = Run([[param.detach().to("cpu", torch.float64, copy=True) for param in params]])
    clips = row.max_norm is not None and library_of(expression) != "tilestep"
    for step in range(STEPS):
        given = [grad.to(device, dtype) for grad in gradients(row.shapes, row.dtype, step)]
        for param, grad in zip(params, given):
            param.grad = None
            (param * grad).sum().backward()  # torchao's offload copies gradients in a hook
        if clips:
            torch.nn.utils.clip_grad_norm_(params, row.max_norm)
        optimizer.step()
        run.weights.append([weights_of(optimizer, param) for param in params])
        if row.max_norm is None:
            changed = (
                param.grad is not None and not torch.equal(param.grad, grad) for param, grad in zip(params, given)
            )
            run.overwrites |= any(changed)
    return run


def train_by_formula(formula: Formula, row: Row) -> Run:
    """Train by a formula in float64, from the stored parameters and gradients."""
    weights = [value.double() for value in initial_weights(row.shapes, row.dtype, torch.device("cpu"))]
    states: list[dict[str, Any]] = [{} for _ in weights]
    run = Run([weights])
    for step in range(STEPS):
        grads = [grad.double() for grad in gradients(row.shapes, row.dtype, step)]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        for state in states:
            state["norm"] = norm
        run.weights.append([formula(*each, step + 1) for each in zip(run.weights[-1], grads, states)])
    return run


def update_error(run: list[list[Tensor]], referee: list[list[Tensor]]) -> float:
    """Return the largest relative error of an update, over tensors and steps.

    The update is the change since the start. Its error is the norm of the difference over the norm of the referee's.
    """
    worst = 0.0
    for step in range(1, len(referee)):
        for start, there, mine in zip(referee[0], referee[step], run[step]):
            update = float((there - start).norm())
            error = float((mine - there).norm())
            worst = max(worst, error / update if update else error)
    return worst


def compare_updates(row: Row, device: torch.device) -> dict[str, Any]:
    """Return errors against the referee and between both, equality of bits, and the rule followed instead."""
    ours = train(row.ours, row, device, row.dtype)
    theirs = train(row.theirs, row, device, row.dtype)
    if row.formula is None:
        in_loops = re.sub(r"fused=True", "foreach=False", row.theirs)
        referee = train(in_loops, row, torch.device("cpu"), torch.float64)
    else:
        referee = train_by_formula(row.formula, row)
    found = {
        "ours_error": update_error(ours.weights, referee.weights),
        "theirs_error": update_error(theirs.weights, referee.weights),
        "between": update_error(theirs.weights, ours.weights),
        "equal_bits": all(
            torch.equal(one, other) for pair in zip(ours.weights, theirs.weights) for one, other in zip(*pair)
        ),
        "referee": "formula" if row.formula else "float64",
        "overwrites": [name for name, run in (("ours", ours), ("theirs", theirs)) if run.overwrites],
    }
    if row.reason:
        found["reason"] = row.reason
    follows = {
        words: update_error(theirs.weights, train_by_formula(formula, row).weights) for words, formula in row.instead
    }
    if follows:
        words = min(follows, key=follows.__getitem__)
        found |= {"instead": words, "instead_error": follows[words]}
    return found


def resume_error(expression: str, row: Resume, device: torch.device) -> dict[str, Any]:
    """Compare ten steps without a break to ten steps whose last five start from saved bytes in new objects."""

    def fresh(values: list[Tensor]) -> tuple[list[torch.nn.Parameter], Any]:
        params = [torch.nn.Parameter(value.clone()) for value in values]
        return params, build_optimizer(expression, params)

    def take_steps(params: list[torch.nn.Parameter], optimizer: Any, steps: Iterator[int] | range) -> None:
        for step in steps:
            for param, grad in zip(params, gradients(row.shapes, row.dtype, step)):
                param.grad = grad.to(device)
            optimizer.step()

    whole, optimizer = fresh(initial_weights(row.shapes, row.dtype, device))
    take_steps(whole, optimizer, range(STEPS))
    halves, optimizer = fresh(initial_weights(row.shapes, row.dtype, device))
    take_steps(halves, optimizer, range(STEPS // 2))
    file = io.BytesIO()
    torch.save({"params": [param.detach() for param in halves], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again, optimizer = fresh(saved["params"])
    optimizer.load_state_dict(saved["optimizer"])
    take_steps(again, optimizer, range(STEPS // 2, STEPS))
    runs = [[[value.double().cpu() for value in initial_weights(row.shapes, row.dtype, device)]] for _ in range(2)]
    for run, params in zip(runs, (again, whole)):
        run.append([param.detach().double().cpu() for param in params])
    return {"bits": all(map(torch.equal, again, whole)), "error": update_error(*runs)}


def compare_resumes(row: Resume, device: torch.device) -> dict[str, Any]:
    return {"ours": resume_error(row.ours, row, device), "theirs": resume_error(row.theirs, row, device)}


def compare_offloads(row: Offloaded, device: torch.device) -> dict[str, Any]:
    found = {}
    for who, there, plain in (("ours", row.ours, row.our_plain), ("theirs", row.theirs, row.their_plain)):
        runs = [train(expression, row, device, row.dtype).weights for expression in (there, plain)]
        found[who] = {
            "bits": all(torch.equal(*pair) for step in zip(*runs) for pair in zip(*step)),
            "error": update_error(*runs),
        }
    return found


RUN: dict[type, Callable[[Any, torch.device], dict[str, Any]]] = {
    Row: compare_updates,
    Resume: compare_resumes,
    Offloaded: compare_offloads,
}

ADAM = "lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1"
_adam = partial(formulas.adam, 1e-3, (0.9, 0.99), 1e-8, 0.1)
_MUON_EMERGING = "lr=1e-3, momentum=0.9, weight_decay=0.1"
_MUON_DION = "lr=1e-3, weight_decay=0.1"

_TORCH = {
    "Adam": "lr=1e-3, weight_decay=0.1",
    "Adamax": "lr=2e-3, weight_decay=0.1",
    "NAdam": "lr=2e-3, weight_decay=0.1",
    "RAdam": "lr=1e-3, weight_decay=0.1",
    "SGD": "lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1",
    "Adagrad": "lr=1e-2, weight_decay=0.1",
    "Adadelta": "lr=1.0, weight_decay=0.1",
    "RMSprop": "lr=1e-3, momentum=0.9, centered=True, weight_decay=0.1",
    "Rprop": "lr=1e-3",
    "ASGD": "lr=1e-2, weight_decay=0.1",
    "Adafactor": "lr=1e-2, weight_decay=0.1",
}
_FUSED = ("Adam", "SGD")

ROWS: list[Row | Resume | Offloaded] = [
    Row("torch/AdamW", f"tilestep.AdamW(params, {ADAM})", f"torch.optim.AdamW(params, {ADAM}, fused=True)", _adam()),
    Row(
        "torch/AdamW-clip",
        f"tilestep.AdamW(params, {ADAM}, max_grad_norm=0.1)",
        f"torch.optim.AdamW(params, {ADAM}, fused=True)",
        _adam(max_norm=0.1),
        max_norm=0.1,
    ),
    Row(
        "torch/AdamW-bfloat16",
        f"tilestep.AdamW(params, {ADAM})",
        f"torch.optim.AdamW(params, {ADAM}, fused=True)",
        _adam(),
        dtype=torch.bfloat16,
    ),
    Row(
        "torch/AdamW-bfloat16-masters",
        f"tilestep.AdamW(params, {ADAM}, master_weights=True)",
        f"torch.optim.AdamW(params, {ADAM}, fused=True)",
        _adam(),
        dtype=torch.bfloat16,
        reason="has no masters: rounds to bfloat16 weights",
    ),
    *(
        Row(
            f"torch/{name}",
            f"tilestep.{name}(params, {options})",
            f"torch.optim.{name}(params, {options}{', fused=True' if name in _FUSED else ''})",
        )
        for name, options in _TORCH.items()
    ),
    Row(
        "torch/Muon",
        "tilestep.Muon(params, lr=1e-2, weight_decay=0.1)",
        "torch.optim.Muon(params, lr=1e-2, weight_decay=0.1)",
        formulas.muon(1e-2, 0.95, 0.1, True),
        shapes=MATRICES,
    ),
    Row(
        "bitsandbytes/AdamW",
        f"tilestep.AdamW(params, {ADAM})",
        f"bitsandbytes.optim.AdamW(params, {ADAM})",
        _adam(),
        (("decays the weight after the update", _adam(decay="after")),),
    ),
    Row(
        "bitsandbytes/Adam",
        f"tilestep.Adam(params, {ADAM})",
        f"bitsandbytes.optim.Adam(params, {ADAM})",
        _adam(decay="in the gradient"),
        (
            ("is AdamW: the decay does not pass through the moments", _adam()),
            ("is AdamW, with the decay after the update", _adam(decay="after")),
        ),
    ),
    Row(
        "bitsandbytes/Lion",
        "tilestep.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        "bitsandbytes.optim.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        formulas.lion(1e-4, (0.9, 0.99), 0.5),
        (("adds the decay to the gradient", formulas.lion(1e-4, (0.9, 0.99), 0.5, "in the gradient")),),
    ),
    Row(
        "bitsandbytes/SGD",
        "tilestep.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)",
        "bitsandbytes.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)",
        formulas.sgd(1e-2, 0.9, 0.1),
    ),
    Row(
        "bitsandbytes/Adagrad",
        "tilestep.Adagrad(params, lr=1e-2)",
        "bitsandbytes.optim.Adagrad(params, lr=1e-2)",
        formulas.adagrad(1e-2),
    ),
    Row(
        "bitsandbytes/RMSprop",
        "tilestep.RMSprop(params, lr=1e-3, alpha=0.99)",
        "bitsandbytes.optim.RMSprop(params, lr=1e-3, alpha=0.99)",
        formulas.rmsprop(1e-3, 0.99, 1e-8),
    ),
    Row(
        "bitsandbytes/LAMB",
        "tilestep.LAMB(params, lr=1e-2, eps=1e-6, weight_decay=0.1)",
        "bitsandbytes.optim.LAMB(params, lr=1e-2, eps=1e-6, weight_decay=0.1)",
        formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1),
        (
            (
                "only shortens updates that are longer than their parameter",
                formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1, "limit"),
            ),
            ("is AdamW", formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1, "none")),
        ),
    ),
    Row(
        "bitsandbytes/LARS",
        "tilestep.LARS(params, lr=1.0, momentum=0.9, weight_decay=0.1, trust_coefficient=0.02)",
        "bitsandbytes.optim.LARS(params, lr=1.0, momentum=0.9, weight_decay=0.1, max_unorm=0.02)",
        formulas.lars(1.0, 0.9, 0.1, 0.02),
        (
            (
                "is SGD whose momentum is shortened to 0.02 of its parameter if it is longer",
                formulas.sgd(1.0, 0.9, 0.1, largest=0.02),
            ),
        ),
        shapes=MATRICES,
    ),
    Row(
        "bitsandbytes/AdEMAMix",
        "tilestep.AdEMAMix(params, lr=1e-3, alpha=5.0, weight_decay=0.1)",
        "bitsandbytes.optim.AdEMAMix(params, lr=1e-3, alpha=5.0, weight_decay=0.1)",
        formulas.ademamix(1e-3, (0.9, 0.999, 0.9999), 5.0, 1e-8, 0.1),
    ),
    Row(
        "bitsandbytes/AdamW8bit",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8")',
        f"bitsandbytes.optim.AdamW8bit(params, {ADAM})",
        _adam(),
        shapes=LARGE,
    ),
    Row(
        "bitsandbytes/Lion8bit",
        'tilestep.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5, state_dtype="int8")',
        "bitsandbytes.optim.Lion8bit(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        formulas.lion(1e-4, (0.9, 0.99), 0.5),
        shapes=LARGE,
    ),
    Row(
        "bitsandbytes/LAMB8bit",
        'tilestep.LAMB(params, lr=1e-2, eps=1e-6, weight_decay=0.1, state_dtype="int8")',
        "bitsandbytes.optim.LAMB8bit(params, lr=1e-2, eps=1e-6, weight_decay=0.1)",
        formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1),
        (
            (
                "only shortens updates that are longer than their parameter",
                formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1, "limit"),
            ),
            ("is AdamW: there is no trust ratio", formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1, "none")),
        ),
        shapes=LARGE,
    ),
    *(
        Row(
            f"torchao/{kind}",
            f'tilestep.AdamW(params, {ADAM}, state_dtype="{ours}")',
            f"torchao.optim.{kind}(params, {ADAM})",
            _adam(),
            shapes=LARGE,
            reason="stores some second moments as 0" if kind == "AdamWFp8" else "",
        )
        for kind, ours in {"AdamW8bit": "int8", "AdamW4bit": "int4", "AdamWFp8": "float8_e4m3"}.items()
    ),
    Row(
        "flashoptim/AdamW",
        f"tilestep.AdamW(params, {ADAM})",
        f"flashoptim.FlashAdamW(params, {ADAM}, quantize=False, master_weight_bits=None, fused=False)",
        _adam(),
        (("decays the weight after the update", _adam(decay="after")),),
    ),
    Row(
        "flashoptim/Lion",
        "tilestep.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        "flashoptim.FlashLion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5, quantize=False, "
        "master_weight_bits=None, fused=False)",
        formulas.lion(1e-4, (0.9, 0.99), 0.5),
    ),
    Row(
        "flashoptim/AdamW-8bit",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8", master_weights="int8")',
        f"flashoptim.FlashAdamW(params, {ADAM})",
        _adam(),
        (("decays the weight after the update", _adam(decay="after")),),
        shapes=LARGE,
        dtype=torch.bfloat16,
        needs="cuda",
    ),
    Row(
        "flashoptim/Lion-8bit",
        "tilestep.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5, "
        'state_dtype="int8", master_weights="int8")',
        "flashoptim.FlashLion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        formulas.lion(1e-4, (0.9, 0.99), 0.5),
        shapes=LARGE,
        dtype=torch.bfloat16,
        needs="cuda",
    ),
    Row(
        "schedulefree/AdamW",
        "tilestep.ScheduleFreeAdamW(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=4)",
        "schedulefree.AdamWScheduleFree(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=4)",
        formulas.schedule_free(1e-3, 0.9, 0.99, 1e-8, 0.1, 4),
    ),
    Row(
        "schedulefree/SGD",
        "tilestep.ScheduleFreeSGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)",
        "schedulefree.SGDScheduleFree(params, lr=1e-2, momentum=0.9, weight_decay=0.1)",
        formulas.schedule_free(1e-2, 0.9, None, 1e-8, 0.1),
    ),
    Row(
        "emerging_optimizers/Muon",
        f'tilestep.Muon(params, {_MUON_EMERGING}, nesterov=False, ns_coefficients="quintic", adjust_lr_fn="spectral")',
        f"emerging_optimizers.orthogonalized_optimizers.Muon(params, {_MUON_EMERGING})",
        formulas.muon(1e-3, 0.9, 0.1, False, formulas.QUINTIC, "spectral", 1e-15),
        shapes=MATRICES,
    ),
    Row(
        "emerging_optimizers/NorMuon",
        f'tilestep.NorMuon(params, {_MUON_EMERGING}, beta2=0.95, ns_coefficients="quintic", '
        'adjust_lr_fn="match_rms_adamw", lr_scale=5.0)',
        f"emerging_optimizers.orthogonalized_optimizers.AdaptiveMuon(params, {_MUON_EMERGING}, nesterov=True, "
        'moment2_method="normuon", beta2=0.95)',
        formulas.normuon(1e-3, 0.9, 0.95, 0.1, True, formulas.QUINTIC, "spectral", 1e-10),
        (
            (
                "has a second moment of each column where a matrix is wider than high",
                formulas.normuon(
                    1e-3, 0.9, 0.95, 0.1, True, formulas.QUINTIC, "spectral", 1e-8, along="the longer side"
                ),
            ),
        ),
        shapes=MATRICES,
    ),
    Row(
        "emerging_optimizers/AdaMuon",
        f'tilestep.AdaMuon(params, {_MUON_EMERGING}, ns_coefficients="quintic")',
        f"emerging_optimizers.orthogonalized_optimizers.AdaptiveMuon(params, {_MUON_EMERGING}, nesterov=True, "
        'moment2_method="adamuon", beta2=0.9)',
        formulas.adamuon(1e-3, 0.9, 0.1, 1e-8, formulas.QUINTIC),
        (
            (
                "orthogonalizes the momentum in place of its signs, and does not rescale to a root mean square of 0.2",
                formulas.adamuon(1e-3, 0.9, 0.1, 1e-8, formulas.QUINTIC, plain="spectral"),
            ),
        ),
        shapes=MATRICES,
    ),
    Row(
        "emerging_optimizers/Lion",
        "tilestep.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        "emerging_optimizers.scalar_optimizers.Lion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.5)",
        formulas.lion(1e-4, (0.9, 0.99), 0.5),
    ),
    Row(
        "dion/Muon",
        f'tilestep.Muon(params, {_MUON_DION}, nesterov=False, ns_coefficients="polar_express_dion", '
        'adjust_lr_fn="spectral_unclamped")',
        f"dion.Muon(params, {_MUON_DION})",
        formulas.muon(
            1e-3, 0.95, 0.1, False, formulas.POLAR_EXPRESS_DION, "spectral_unclamped", 1e-6, stretch=1.02
        ),
        shapes=MATRICES,
    ),
    Row(
        "dion/NorMuon",
        f'tilestep.NorMuon(params, {_MUON_DION}, nesterov=False, eps=1e-8, ns_coefficients="polar_express_dion", '
        'adjust_lr_fn="spectral_unclamped")',
        f"dion.NorMuon(params, {_MUON_DION})",
        formulas.normuon(
            1e-3, 0.95, 0.95, 0.1, False, formulas.POLAR_EXPRESS_DION, "spectral_unclamped", 1e-8, stretch=1.02
        ),
        shapes=MATRICES,
    ),
    Row(
        "apex/FusedAdam",
        f"tilestep.AdamW(params, {ADAM})",
        f"apex.optimizers.FusedAdam(params, {ADAM})",
        _adam(),
        (("decays the weight after the update", _adam(decay="after")),),
        needs="cuda",
    ),
    Row(
        "apex/FusedLAMB",
        "tilestep.LAMB(params, lr=1e-2, eps=1e-6, weight_decay=0.1)",
        "apex.optimizers.FusedLAMB(params, lr=1e-2, eps=1e-6, weight_decay=0.1, max_grad_norm=1e9)",
        formulas.lamb(1e-2, (0.9, 0.999), 1e-6, 0.1),
        needs="cuda",
    ),
    Offloaded(
        "offload/AdamW-torchao",
        f"tilestep.offload(lambda: tilestep.AdamW(params, {ADAM}))",
        f"tilestep.AdamW(params, {ADAM})",
        f"torchao.optim.CPUOffloadOptimizer(params, torch.optim.AdamW, {ADAM}, fused=True)",
        f"torch.optim.AdamW(params, {ADAM}, fused=True)",
        needs="cuda",
    ),
    Offloaded(
        "offload/AdamW-bitsandbytes",
        f"tilestep.offload(lambda: tilestep.AdamW(params, {ADAM}))",
        f"tilestep.AdamW(params, {ADAM})",
        f"bitsandbytes.optim.PagedAdamW(params, {ADAM})",
        f"bitsandbytes.optim.AdamW(params, {ADAM})",
        needs="cuda",
    ),
    Offloaded(
        "offload/AdamW8bit-bitsandbytes",
        f'tilestep.offload(lambda: tilestep.AdamW(params, {ADAM}, state_dtype="int8"))',
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8")',
        f"bitsandbytes.optim.PagedAdamW8bit(params, {ADAM})",
        f"bitsandbytes.optim.AdamW8bit(params, {ADAM})",
        needs="cuda",
    ),
    Resume("resume/torch-AdamW", f"tilestep.AdamW(params, {ADAM})", f"torch.optim.AdamW(params, {ADAM}, fused=True)"),
    Resume(
        "resume/torch-Muon",
        "tilestep.Muon(params, lr=1e-2, weight_decay=0.1)",
        "torch.optim.Muon(params, lr=1e-2, weight_decay=0.1)",
        MATRICES,
    ),
    Resume(
        "resume/bitsandbytes-AdamW8bit",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8")',
        f"bitsandbytes.optim.AdamW8bit(params, {ADAM})",
    ),
    Resume(
        "resume/torchao-AdamW8bit",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8")',
        f"torchao.optim.AdamW8bit(params, {ADAM})",
    ),
    Resume(
        "resume/torchao-AdamW4bit-stochastic",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int4", rounding="stochastic")',
        f"torchao.optim.AdamW4bit(params, {ADAM}, bf16_stochastic_round=True)",
        dtype=torch.bfloat16,
    ),
    Resume(
        "resume/flashoptim-AdamW",
        f'tilestep.AdamW(params, {ADAM}, state_dtype="int8", master_weights="int8")',
        f"flashoptim.FlashAdamW(params, {ADAM})",
        dtype=torch.bfloat16,
        needs="cuda",
    ),
    Resume(
        "resume/schedulefree-AdamW",
        "tilestep.ScheduleFreeAdamW(params, lr=1e-3, warmup_steps=4)",
        "schedulefree.AdamWScheduleFree(params, lr=1e-3, warmup_steps=4)",
    ),
    Resume(
        "resume/emerging_optimizers-Muon",
        f'tilestep.Muon(params, {_MUON_EMERGING}, nesterov=False, ns_coefficients="quintic", adjust_lr_fn="spectral")',
        f"emerging_optimizers.orthogonalized_optimizers.Muon(params, {_MUON_EMERGING})",
        MATRICES,
    ),
    Resume(
        "resume/dion-NorMuon",
        f'tilestep.NorMuon(params, {_MUON_DION}, nesterov=False, eps=1e-8, ns_coefficients="polar_express_dion", '
        'adjust_lr_fn="spectral_unclamped")',
        f"dion.NorMuon(params, {_MUON_DION})",
        MATRICES,
    ),
]  # fmt: skip
"""All comparisons on one device, library by library."""
