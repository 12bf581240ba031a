"""Checking a rule: everything tilestep's own rules are tested for, on a rule written by anybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..engine import graph_for
from ..errors import RuleError
from ..graph import Graph
from ..optimizer.hyperparameters import check_group
from ..rules import Rule
from .items import ITEMS
from .reference import CheckFailure
from .trials import Subject

__all__ = ["Verdict", "check_rule"]

_NAMES = {"cpu": "C++", "cuda": "Triton"}


@dataclass(frozen=True)
class Verdict:
    """What one check found.

    Args:
        item: what was checked.
        passed: whether it is as it should be; None if it could not be checked here.
        text: what was found, in plain words; a failure names the rule's file and line.
        seconds: how long it took.
    """

    item: str
    passed: bool | None
    text: str
    seconds: float = 0.0


def check_rule(
    rule: Rule, hyperparameters: Mapping[str, Any] | None = None, *, interpret: bool = True
) -> Iterator[Verdict]:
    """Check a rule on this machine: on the CPU, and on the GPU or else in Triton's interpreter.

    Every step is compared with the rule's own code, run on float64 tensors from the same state.

    Args:
        rule: the rule.
        hyperparameters: those that are not the defaults.
        interpret: whether to run the Triton code in its interpreter where there is no GPU; that takes a while.

    Yields:
        A verdict for each item as soon as it is known.

    Example:
        >>> import tilestep
        >>> @tilestep.rule
        ... def descent(param, grad, *, lr=0.1):
        ...     return param - lr * grad
        >>> all(verdict.passed for verdict in check_rule(descent, interpret=False))
        True
    """
    given = dict(hyperparameters or {})
    graphs: dict[int, Graph] = {}
    translation = _timed("translation", lambda: _translate(rule, given, graphs), rule.where)
    yield translation
    if not translation.passed:
        return
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        subject = Subject(rule, given, device, graphs)
        for name, item in ITEMS.items():
            if name == "threads" and subject.has_matrices:
                text = "left out: torch's own matrix products are not the same for every number of threads"
                yield Verdict(f"{_NAMES['cpu']}, {name}", None, text)
            elif name != "threads" or device.type == "cpu":
                yield run_item(subject, name, item)
    if len(devices) == 1:
        from .interpreted import check_interpreted

        yield from check_interpreted(rule, given) if interpret else ()


def run_item(subject: Subject, name: str, item: Callable[[Subject], str], backend: str = "") -> Verdict:
    """The verdict of one item.

    Args:
        subject: the rule under check.
        name: the item's name.
        item: the check.
        backend: how the verdict calls the backend; empty names it by the device.
    """
    label = f"{backend or _NAMES.get(subject.device.type, subject.device.type)}, {name}"
    return _timed(label, lambda: item(subject), subject)


def _timed(label: str, check: Callable[[], str], where: Subject | str) -> Verdict:
    begin = time.perf_counter()
    try:
        passed, text = True, check()
    except CheckFailure as failure:
        place = where if isinstance(where, str) else where.line_of(failure.buffer)
        passed, text = False, f"{failure}; see {place}"
    except Exception as error:  # whatever goes wrong with a rule of the user's is the verdict
        place = where if isinstance(where, str) else where.rule.where
        reason = " ".join(str(error).split()) or type(error).__name__
        named = reason if place.rpartition(":")[0] in reason else f"{reason}; see {place}"
        passed, text = False, named
    return Verdict(label, passed, text, time.perf_counter() - begin)


def _translate(rule: Rule, given: Mapping[str, Any], graphs: dict[int, Graph]) -> str:
    from ..describe import describe

    values = {**rule.hyperparameters, **given}
    rule.check(values)
    check_group(rule, values)
    refusals = trace_all(rule, values, graphs)
    if not graphs.keys() - {0}:
        raise refusals[2]  # numbers alone are nobody's parameters
    known = sorted(graphs)
    description = describe(rule, given, backend="cpp", dims=2 if 2 in graphs else known[0])
    tiles = sum(each.traffic is not None for each in description.passes)
    taken = "tensors of any number of dimensions"
    if refusals:
        reason = next(iter(refusals.values()))
        plural = "" if known == [1] else "s"
        taken = f"tensors of {' or '.join(map(str, known))} dimension{plural}; of others not ({reason})"
    moved = f"{description.bytes_read} bytes read and {description.bytes_written} written for each float32 element"
    return f"{tiles} pass{'es' * (tiles != 1)} over elements, {moved}; {taken}"


def trace_all(rule: Rule, values: Mapping[str, Any], graphs: dict[int, Graph]) -> dict[int, RuleError]:
    """Trace a rule for tensors of 0 to 4 dimensions.

    Args:
        rule: the rule.
        values: all hyperparameters.
        graphs: receives the graph for each number of dimensions that the rule takes.

    Returns:
        Why it does not take the others.
    """
    refusals: dict[int, RuleError] = {}
    for dims in range(5):
        try:
            graphs[dims] = graph_for(rule, values, dims)
        except RuleError as error:
            refusals[dims] = error
    return refusals
