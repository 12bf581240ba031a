"""Names for values the rule's author gave none."""

from __future__ import annotations

from ..graph import Value

_WORDS = {"sub": "minus", "add": "plus", "div": "over", "mul": "times"}
_LONGEST = 40


def describe(value: Value) -> str:
    """A name from what the value is made of: `1 - lr * weight_decay` is one_minus_lr_times_weight_decay."""
    if value.operation == "constant":
        return "one" if value.attribute == 1.0 else "constant"
    if value.name:
        return value.name
    parts = [describe(arg) for arg in value.args if arg.operation != "constant" or arg.attribute == 1.0]
    joined = f"_{_WORDS.get(value.operation, value.operation)}_".join(parts)
    return joined if 0 < len(joined) <= _LONGEST else value.operation
