"""Checking a rule: everything tilestep's own rules are tested for, on a rule of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..devices import is_host
from ..graph import Graph
from ..optimizer.groups import check_group
from ..rules import Rule
from .interpreted import check_interpreted
from .items import DEVICE_NAMES, ITEMS, Subject, Verdict, run_item, timed, trace_all


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
    translation = timed("translation", lambda: _translate(rule, given, graphs), rule.where)
    yield translation
    if not translation.passed:
        return
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        subject = Subject(rule, given, device, graphs)
        for name, item in ITEMS.items():
            if name == "threads" and subject.has_matrices:
                text = "left out: torch's own matrix products are not the same for every number of threads"
                yield Verdict(f"{DEVICE_NAMES['cpu']}, {name}", None, text)
            elif name != "threads" or is_host(device):
                yield run_item(subject, name, item)
    if len(devices) == 1:
        yield from check_interpreted(rule, given) if interpret else ()


def _translate(rule: Rule, given: Mapping[str, Any], graphs: dict[int, Graph]) -> str:
    from ..describe import describe

    values = {**rule.hyperparameters, **given}
    rule.check(values)
    check_group(rule, values)
    refusals = trace_all(rule, values, graphs)
    if not graphs.keys() - {0}:
        raise refusals[2]  # no optimizer has parameters that are all numbers
    dimensions = sorted(graphs)
    description = describe(rule, given, backend="cpp", dims=2 if 2 in graphs else dimensions[0])
    tiles = sum(entry.traffic is not None for entry in description.passes)
    taken = "tensors of any number of dimensions"
    if refusals:
        reason = next(iter(refusals.values()))
        plural = "" if dimensions == [1] else "s"
        taken = f"tensors of {' or '.join(map(str, dimensions))} dimension{plural}; of others not ({reason})"
    moved = f"{description.bytes_read} bytes read and {description.bytes_written} written for each float32 element"
    return f"{tiles} pass{'es' * (tiles != 1)} over elements, {moved}; {taken}"
