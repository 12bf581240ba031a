"""The `rules` section: every named rule's step, against the bytes its passes must move, or against torch's version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from soap_steps import soap_groups
from torch import Tensor
from traffic import step_bytes

import tilestep
from tilestep.bench import measure
from tilestep.bench.measure import Contender
from tilestep.bench.results import Group, Result, Row, environment
from tilestep.bench.sections import (
    OURS,
    Settings,
    Workload,
    cpu_workloads,
    free,
    gpu_workloads,
    make_parameters,
    measured_group,
)
from tilestep.bench.tune import has_matrix_work
from tilestep.errors import MatrixError

__all__ = ["run_rules"]

ROUNDS = 5
MUON, SOAP = "Muon", "SOAP"


def run_rules(settings: Settings, names: Sequence[str] = ()) -> Result:
    """Measure a step of every registered rule with its default hyperparameters, without a clip.

    On a GPU: on the language model in bf16, against the bandwidth of a copy, and Muon beside torch's. On a CPU: on the
    large and on the many small float32 tensors, against the fastest of torch's variants of the same name. SOAP: on a
    smaller model, beside a loop over its tensors.

    Args:
        settings: as for the other sections.
        names: rules; empty means all.

    Raises:
        ValueError: for a name that no rule has.
    """
    for name in names:
        if name not in tilestep.registry:
            raise ValueError(f"no rule is called {name!r}; there are: {', '.join(tilestep.registry)}")
    chosen = [name for name in tilestep.registry if not names or name in names]
    result = Result("rules", environment(settings.device))
    alone = [name for name in chosen if name != SOAP]
    if settings.device.type == "cuda":
        workload = gpu_workloads(settings.quick)[1]
        if alone:
            result.groups.append(_all_alone(alone, workload, settings))
        if MUON in chosen:
            result.groups.append(_muon(workload, settings))
    else:
        for workload in cpu_workloads(settings.quick)[:2]:
            result.groups.extend(_beside_torch(name, workload, settings) for name in alone if name != MUON)
        if MUON in chosen:
            result.groups.append(_muon(gpu_workloads(quick=True)[1], settings))
    if SOAP in chosen:
        result.groups.extend(soap_groups(settings))
    _leave_out_refused(result)
    return result


def _leave_out_refused(result: Result) -> None:
    """Say in a note which rules do not take a list with vectors in it, instead of in a row without figures."""
    left_out: list[str] = []
    for group in result.groups:
        refused = [row for row in group.rows if (row.failure or "").startswith(MatrixError.__name__)]
        left_out += [group.tags["rule"] if row.contender == OURS else row.contender for row in refused]
        group.rows = [row for row in group.rows if row not in refused]
        if refused and group.tags:
            group.rows.clear()
    result.groups = [group for group in result.groups if group.rows]
    result.notes.extend(f"left out: {name} works on matrices only" for name in dict.fromkeys(left_out))


def _all_alone(names: Sequence[str], workload: Workload, settings: Settings) -> Group:
    """One row a rule, each measured in turns with a copy and gone before the next: any of them may fill the memory."""
    parameters = make_parameters(workload, settings.device)
    rows: list[Row] = []
    limits: list[float] = []
    for name in names:
        settings.say(f"rules: {name}, {workload.title}")
        chosen = _matrices(parameters) if name == MUON else parameters
        contender = _ours(name, chosen, name)
        copy = measure.copy(settings.device, settings.buffer_bytes)
        group = measured_group("", [contender], [copy], settings, settings.device, ROUNDS)
        rows.append(group.rows[0])
        limits.append(group.limit or 0.0)
        del contender, copy, group
        free(settings.device)
    rows.sort(key=lambda row: row.of_limit or 0.0, reverse=True)
    title = f"every rule's step, {workload.title}"
    return Group(title, rows, sorted(limits)[len(limits) // 2] if limits else None, measure.COPY)


def _beside_torch(name: str, workload: Workload, settings: Settings) -> Group:
    settings.say(f"rules: {name}, {workload.title}")
    device = settings.device
    contenders = [_ours(name, make_parameters(workload, device), OURS)]
    contenders += [_step(title, build, make_parameters(workload, device)) for title, build in _torch_variants(name)]
    loop = measure.plain_loop(workload.elements, workload.dtype)
    limits = [loop] if loop is not None else [measure.copy(device, settings.buffer_bytes)]
    group = measured_group(f"{name}, {workload.title}", contenders, limits, settings, device, ROUNDS)
    group.tags = {"rule": name, "work": workload.title}
    _compare(group)
    contenders.clear()
    limits.clear()
    free(device)
    return group


def _muon(workload: Workload, settings: Settings) -> Group:
    """Muon for the matrices of the layers, AdamW for all else: one optimizer of ours, two of torch's."""
    settings.say(f"rules: Muon and AdamW, {workload.title}")
    device = settings.device

    def ours() -> Contender:
        inner, rest = _inner_and_rest(make_parameters(workload, device))
        groups = [{"params": inner}, {"params": rest, "rule": "AdamW", "lr": 3e-4}]
        steps: list[Callable[[], object]] = []

        def call() -> None:
            if not steps:
                steps.append(tilestep.Optimizer(groups, MUON).step)
            steps[0]()

        return Contender(OURS, call)

    def torch_s() -> Contender:
        inner, rest = _inner_and_rest(make_parameters(workload, device))
        steps: list[Callable[[], object]] = []

        def call() -> None:
            if not steps:
                steps.extend([torch.optim.Muon(inner).step, torch.optim.AdamW(rest, lr=3e-4, fused=True).step])
            for step in steps:
                step()

        return Contender("torch Muon, fused AdamW", call)

    copy = measure.copy(device, settings.buffer_bytes)
    inner, rest = _inner_and_rest([torch.empty(shape, device="meta") for shape in workload.shapes])
    title = f"Muon for {len(inner)} matrices and AdamW for {len(rest)} other tensors, {workload.title}"
    group = measured_group(title, [ours(), torch_s()], [copy], settings, device, ROUNDS)
    _compare(group)
    free(device)
    return group


def _inner_and_rest(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the layers, and the embeddings, the head and the vectors."""
    longest = max(parameter.shape[0] for parameter in parameters)  # the vocabulary
    inner = [parameter for parameter in parameters if parameter.dim() == 2 and parameter.shape[0] < longest]
    inside = {id(parameter) for parameter in inner}
    return inner, [parameter for parameter in parameters if id(parameter) not in inside]


def _matrices(parameters: Sequence[Tensor]) -> list[Tensor]:
    return _inner_and_rest(parameters)[0]


def _ours(name: str, parameters: Sequence[Tensor], title: str) -> Contender:
    """Return a contender for a rule; what is wrong with it comes to light in its first call."""
    try:
        optimizer = tilestep.Optimizer(parameters, name)
        moved = 0 if has_matrix_work(optimizer) else step_bytes(optimizer)
    except Exception as failure:
        return Contender(title, _raises(failure))
    return Contender(title, optimizer.step, moved)


def _raises(failure: Exception) -> Callable[[], object]:
    def call() -> None:
        raise failure

    return call


def _step(title: str, build: Callable[[Sequence[Tensor]], Any], parameters: Sequence[Tensor]) -> Contender:
    steps: list[Callable[[], object]] = []

    def call() -> None:
        if not steps:
            steps.append(build(parameters).step)
        steps[0]()

    return Contender(title, call)


def _torch_variants(name: str) -> list[tuple[str, Callable[[Sequence[Tensor]], Any]]]:
    """The ways torch has for a rule of this name on a CPU.

    >>> [title for title, _ in _torch_variants("AdamW")], _torch_variants("Lion")
    (['torch loop', 'torch foreach', 'torch fused'], [])
    """
    optimizer = getattr(torch.optim, name, None)
    if optimizer is None:
        return []
    accepted = inspect.signature(optimizer).parameters
    variants: list[tuple[str, Callable[[Sequence[Tensor]], Any]]] = []
    if "foreach" in accepted:
        variants.append(("torch loop", lambda parameters: optimizer(parameters, foreach=False)))
        variants.append(("torch foreach", lambda parameters: optimizer(parameters, foreach=True)))
    else:
        variants.append(("torch loop", lambda parameters: optimizer(parameters)))
    if "fused" in accepted:
        variants.append(("torch fused", lambda parameters: optimizer(parameters, fused=True)))
    return variants


def _compare(group: Group) -> None:
    """Note how much faster ours is than the fastest of torch's."""
    ours = group.row(OURS)
    others = [row.wall.median for row in group.rows if row.contender.startswith("torch") and row.wall is not None]
    if ours is not None and ours.wall is not None and others:
        ours.speedup = min(others) / ours.wall.median
