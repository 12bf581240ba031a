"""Coefficients of Newton-Schulz iterations: published sets by name, and checks of a user's coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RuleError

Row = tuple[Any, Any, Any]
"""a, b and c of a step: X <- a X + (b G + c G^2) X with G = X X^T."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic: the largest slope at zero that keeps singular values near one."""

STEPS = 5  # the default number of steps with a single row
_MAX_STEPS = 100


@dataclass(frozen=True)
class _Table:
    """A published set of rows."""

    rows: tuple[tuple[float, float, float], ...]
    steps: int  # the published number of steps
    further: str = ""  # rows of further steps: repeat the "last" row, or all from the "first"; empty: none allowed
    scales: bool = False  # whether the rows apply to X / safety

    def row(self, step: int, safety: float) -> Row:
        if step >= len(self.rows):
            return self.row(step % len(self.rows) if self.further == "first" else len(self.rows) - 1, safety)
        row = self.rows[step]
        if not self.scales or row == _CONVERGED:
            return row
        return row[0] / safety, row[1] / safety**3, row[2] / safety**5


_CONVERGED = (1.875, -1.25, 0.375)

_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    _CONVERGED,
)
_NORM = 1.02  # dion divides by so much of the norm, which is in the first row
_DION = (
    (8.156554524902461 / _NORM, -22.48329292557795 / _NORM**3, 15.878769915207462 / _NORM**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_AOL = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)
_CUBIC = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
_DEEPSEEK = (*[COEFFICIENTS] * 8, *[(2.0, -1.5, 0.5)] * 2)

_TABLES = {
    **dict.fromkeys(("jordan", "simple"), _Table((COEFFICIENTS,), STEPS, "last")),
    "quintic": _Table(_QUINTIC, 5, "first"),
    "polar_express": _Table(_POLAR_EXPRESS, 5, "last", scales=True),
    "polar_express_dion": _Table(_DION, 5),
    "cans": _Table(_CANS, 5, "last", scales=True),
    "aol": _Table(_AOL, 4, "first"),
    **dict.fromkeys(("deepseek-v4", "deepseekv4"), _Table(_DEEPSEEK, 10, "last")),
    "cubic5": _Table(_CUBIC, 5),
}

NAMES = tuple(_TABLES)
"""The names of sets."""

SAFETY = 1.01
"""The divisor of singular values for "polar_express" and "cans": larger values, by rounding, would diverge.

For "polar_express" Emerging-Optimizers has 1.01 and gram-newton-schulz 1.05; for "cans" Emerging-Optimizers has 1.
"""


def refusal(coefficients: Any) -> str:
    """Why coefficients are invalid; empty if they are valid."""
    if isinstance(coefficients, str):
        known = coefficients in _TABLES
    else:
        listed = isinstance(coefficients, (tuple, list)) and len(coefficients) > 0
        known = listed and (_is_row(coefficients) or all(map(_is_row, coefficients)))
    return "" if known else f"it must be three numbers, a list of triples, or one of {', '.join(NAMES)}"


def _is_row(row: Any) -> bool:
    def is_number(entry: Any) -> bool:
        if isinstance(entry, (int, float)) and not isinstance(entry, bool):
            return math.isfinite(entry)
        return isinstance(entry, torch.Tensor) or callable(entry)  # tensors while a rule is traced

    return isinstance(row, (tuple, list)) and len(row) == 3 and all(map(is_number, row))


def rows_of(coefficients: Any, steps: Any = None, safety: float = SAFETY) -> list[Row]:
    """The row (a, b, c) of each step.

    Args:
        coefficients: three numbers for all steps, a list of rows, one per step, or the name of a set.
        steps: the number of steps; None for the length of the list, or the set's published number.
        safety: the divisor of singular values, for "polar_express" and "cans".

    Raises:
        RuleError: for invalid coefficients, and for a number of steps that they do not support.
    """
    if wrong := refusal(coefficients):
        raise RuleError(f"orthogonalize: coefficients={coefficients!r}; {wrong}")
    if isinstance(coefficients, str):
        table, label = _TABLES[coefficients], repr(coefficients)
    elif _is_row(coefficients):
        table, label = _Table((tuple(coefficients),), STEPS, "last"), ""
    else:
        table = _Table(tuple(map(tuple, coefficients)), len(coefficients))
        label = f"a list of {len(coefficients)} coefficients"
    if safety != SAFETY and not table.scales:
        raise RuleError(f"orthogonalize: safety={safety!r} requires coefficients='polar_express' or 'cans'")
    if isinstance(safety, (str, type(None))) or not 1 <= safety < math.inf:
        raise RuleError(f"orthogonalize: safety={safety!r}; it must be finite and at least 1, or values diverge")
    count = table.steps if steps is None else _whole(steps, table.steps)
    if count != table.steps and not table.further:
        raise RuleError(f"orthogonalize takes {table.steps} steps with {label}, not {count}")
    return [table.row(step, safety) for step in range(count)]


def _whole(steps: Any, likely: int) -> int:
    """Steps as an integer; a traced number is only compared, which guards the rule's graph."""
    for count in (likely, *range(_MAX_STEPS)):
        if steps == count:
            return count
    shown = f", not {steps:g}" if isinstance(steps, (int, float)) else ""
    raise RuleError(f"orthogonalize takes a whole number of steps, less than {_MAX_STEPS} steps{shown}")


def flat(rows: Sequence[Row]) -> list[Any]:
    """Flatten rows into the scalar arguments of operations."""
    return [number for row in rows for number in row]
