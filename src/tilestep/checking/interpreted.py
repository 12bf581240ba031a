"""The Triton backend on a machine without a GPU: in Triton's interpreter, in a process of its own.

That process calls `answer`, which reads a pickled rule and its hyperparameters and writes verdicts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..backends.registry import interpret_on_cpu
from ..graph import Graph
from ..rules import Rule, rule
from .items import INTERPRETED, ITEMS, Subject, Verdict, run_item, trace_all

_BACKEND = "Triton in its interpreter"
_TIMEOUT = 900


def check_interpreted(rule: Any, given: Mapping[str, Any]) -> Iterator[Verdict]:
    """Verdicts on the Triton code of a rule, run on the CPU."""
    if importlib.util.find_spec("triton") is None:
        yield Verdict(_BACKEND, None, "Triton is not installed")
        return
    try:
        payload = pickle.dumps((rule, dict(given)))
        _require_importable(rule)
    except Exception as error:  # lambdas, functions inside functions, __main__
        yield Verdict(_BACKEND, None, f"another process cannot import the rule: {error}")
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            out, errors = process.communicate(payload, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            yield Verdict(_BACKEND, None, f"not done after {_TIMEOUT} seconds")
            return
    verdicts = [Verdict(**json.loads(line)) for line in out.decode().splitlines() if line.startswith("{")]
    yield from verdicts
    if process.returncode:
        last = errors.decode().strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        yield Verdict(_BACKEND, False, f"it stopped with: {last[0]}")


def _require_importable(rule: Any) -> None:
    module = getattr(rule, "__module__", "")
    if module == "__main__":
        raise ValueError("it is defined in __main__; put it into a module")
    if "<" in getattr(getattr(rule, "function", None), "__qualname__", "") and rule.composition is None:
        raise ValueError("it is defined inside a function; put it at the top of a module")


def answer() -> None:
    """Check the rule that comes in, and write verdicts."""
    warnings.simplefilter("ignore")  # numpy's, about numbers that are masked out
    target, given = pickle.load(sys.stdin.buffer)
    subject_rule = target if isinstance(target, Rule) else rule(target)
    interpret_on_cpu()
    graphs: dict[int, Graph] = {}
    trace_all(subject_rule, {**subject_rule.hyperparameters, **given}, graphs)
    subject = Subject(subject_rule, given, torch.device("cpu"), graphs)
    if subject.has_matrices:
        text = "left out for matrices: the interpreter does not round to bfloat16 as a GPU does"
        print(json.dumps(asdict(Verdict(_BACKEND, None, text))), flush=True)
        return
    for name in INTERPRETED:
        print(json.dumps(asdict(run_item(subject, name, ITEMS[name], _BACKEND))), flush=True)
