"""`check_rule`: runs the checks of tilestep's own rules on a user's rule, with a verdict per check."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import torch

from ..backends.cpp.compile import compiler
from ..backends.registry import interpret_on_cpu
from ..devices import is_host
from ..graph import Graph
from ..optimizer.groups import check_group
from ..rules import Rule, rule
from .items import DEVICE_NAMES, INTERPRETED, ITEMS, Subject, Verdict, run_item, timed, trace_all


def check_rule(
    rule: Rule, hyperparameters: Mapping[str, Any] | None = None, *, interpret: bool = True
) -> Iterator[Verdict]:
    """Test a rule's kernels on this machine: on the CPU, and on the GPU or in Triton's interpreter.

    Every step is compared with the rule's own code, run on float64 tensors from the same state.

    Args:
        rule: the rule.
        hyperparameters: values other than the defaults.
        interpret: whether to run the Triton code in its interpreter without a GPU, which is slow.

    Yields:
        A verdict for each item, as soon as it is tested.

    Example:
        >>> import tilestep
        >>> @tilestep.rule
        ... def descent(param, grad, *, lr=0.1):
        ...     return param - lr * grad
        >>> all(verdict.passed for verdict in check_rule(descent, interpret=False))
        True
    """
    overrides = dict(hyperparameters or {})
    graphs: dict[int, Graph] = {}
    translation = timed("translation", rule.where, _translate, rule, overrides, graphs)
    yield translation
    if not translation.passed:
        return
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        subject = Subject(rule, overrides, device, graphs)
        if is_host(device) and compiler() is None:
            yield Verdict(
                DEVICE_NAMES["cpu"], None, "no compiler: rules without built kernels are tested as eager PyTorch"
            )
        yield from (run_item(subject, *item) for item in ITEMS.items() if item[0] != "threads" or is_host(device))
    if len(devices) == 1:
        yield from check_interpreted(rule, overrides) if interpret else ()


def _translate(rule: Rule, overrides: Mapping[str, Any], graphs: dict[int, Graph]) -> str:
    from ..planning.describe import describe

    values = {**rule.hyperparameters, **overrides}
    rule.check(values)
    check_group(rule, values)
    refusals = trace_all(rule, values, graphs)
    if not graphs.keys() - {0}:
        raise refusals[2]  # optimizers have parameters with dimensions
    dimensions = sorted(graphs)
    description = describe(rule, overrides, backend="cpp", dims=2 if 2 in graphs else dimensions[0])
    tiles = sum(entry.traffic is not None for entry in description.passes)
    taken = "tensors of any number of dimensions"
    if refusals:
        reason = next(iter(refusals.values()))
        plural = "" if dimensions == [1] else "s"
        taken = f"tensors of {' or '.join(map(str, dimensions))} dimension{plural} only ({reason})"
    moved = f"{description.bytes_read} bytes read and {description.bytes_written} written for each float32 element"
    return f"{tiles} pass{'es' * (tiles != 1)} over elements, {moved}; {taken}"


_BACKEND = "Triton in its interpreter"
_TIMEOUT = 900


def check_interpreted(rule: Rule, overrides: Mapping[str, Any]) -> Iterator[Verdict]:
    """Verdicts on the Triton code of a rule, run on the CPU."""
    if importlib.util.find_spec("triton") is None:
        yield Verdict(_BACKEND, None, "Triton is not installed")
        return
    try:
        if getattr(rule, "__module__", "") == "__main__":
            raise ValueError("it is defined in __main__; move it to a module")
        payload = _payload(rule, overrides)
    except Exception as error:  # lambdas, functions inside functions, __main__
        yield Verdict(_BACKEND, None, f"another process cannot import the rule: {error}")
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()"]
    try:
        done = subprocess.run(command, input=payload, capture_output=True, env=environment, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        yield Verdict(_BACKEND, None, f"timed out after {_TIMEOUT} seconds")
        return
    yield from (Verdict(**json.loads(line)) for line in done.stdout.decode().splitlines() if line.startswith("{"))
    if done.returncode:
        last = done.stderr.decode().strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        yield Verdict(_BACKEND, False, f"failed with: {last[0]}")


def _payload(rule: Rule, overrides: Mapping[str, Any]) -> bytes:
    bare = Rule(rule.function)
    if all(getattr(rule, field.name) == getattr(bare, field.name) for field in fields(Rule)):
        # The name of a function without a decorator leads to the function.
        with suppress(pickle.PicklingError, AttributeError):
            return pickle.dumps((rule.function, dict(overrides)))
    return pickle.dumps((rule, dict(overrides)))


def answer() -> None:
    """Read a rule from stdin, check it, and write verdicts."""
    warnings.simplefilter("ignore")  # numpy warns about masked numbers
    target, overrides = pickle.load(sys.stdin.buffer)
    subject_rule = target if isinstance(target, Rule) else rule(target)
    interpret_on_cpu()
    graphs: dict[int, Graph] = {}
    trace_all(subject_rule, {**subject_rule.hyperparameters, **overrides}, graphs)
    subject = Subject(subject_rule, overrides, torch.device("cpu"), graphs)
    if subject.has_matrices:
        text = "skipped for matrices: the interpreter does not round to bfloat16 as a GPU does"
        verdicts = iter([Verdict(_BACKEND, None, text)])
    else:
        verdicts = (run_item(subject, name, ITEMS[name], _BACKEND) for name in INTERPRETED)
    for verdict in verdicts:
        print(json.dumps(asdict(verdict)), flush=True)
