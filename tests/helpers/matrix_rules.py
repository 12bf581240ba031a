"""Which of tilestep's rules work on matrices."""

from __future__ import annotations

from tilestep.rules import registry
from tilestep.rules.protocol import MATRIX_OPTIONS

MATRIX_RULES = sorted(
    {name for name, rule in registry.items() if MATRIX_OPTIONS.keys() <= rule.options.keys()} | {"SOAP"}
)
