"""The source of the kernel that decides a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...graph import Value, ancestors
from ..decision import Decision, traced_decision
from ..emit import code, nested
from .source import module_text
from .text import TritonNames, TritonWriter, head


def decision_source(decide: Callable[..., Decision], inputs: Any) -> str:
    """The module with the kernel of decisions from such inputs.

    Its pointers are control numbers, the table of numbers, what there is of the inputs, and each limit's memory.
    """
    norm = ["partials", "partial_count"] if inputs.partials else ["power_sum"] if inputs.has_norm else []
    given = [name for name in ("grad_scale", "found_inf", "loss", "overflow") if getattr(inputs, name) is not None]
    pointers = ["control", "numbers", *norm, *given, *(f"memory_{place}" for place in range(len(inputs.limits)))]
    stores = traced_decision(decide, inputs)
    writer = TritonWriter("float64", TritonNames([*pointers, "first", "BLOCK"]))
    writer.spelling = {**writer.spelling, "reduce_sum": "tl.sum({0}, 0, keep_dims=True)"}
    values = ancestors(number.value for _, *numbers in stores for number in numbers if number is not None)
    for value in values:
        if value.operation in ("hyper", "load"):
            writer.name(value, _loaded(value, has_partials=bool(inputs.partials)))
    writer.write(values)
    # All threads have read the windows.
    lines = ["tl.debug_barrier()"] if any(value.operation == "load" for value in values) else []
    for place, number, offset, condition in stores:
        if number.value.attribute != place:
            at = "" if offset is None else f" + {writer[offset.value]}.to(tl.int64)"
            mask = "" if condition is None else f", mask={writer[condition.value]} != 0"
            lines.append(f"tl.store({place} + first{at}, {writer[number.value]}{mask})")
    kernel = code(f"""
        {head("decide", pointers, "BLOCK")}
            first = tl.zeros((1,), tl.int32)
            {nested([*writer.lines, *lines])}
    """)
    return module_text("# The decision of a step.", [kernel])


def _loaded(value: Value, *, has_partials: bool) -> str:
    """The expression of a number that the kernel reads, or of a window's numbers."""
    name, _, size = value.attribute.partition(":")
    places = f"tl.arange(0, {1 << (int(size or 1) - 1).bit_length()})"
    if name == "place":
        return f"{places}.to(tl.float64)"
    if size:
        return f"tl.load({name} + {places}, mask={places} < {size}, other=0.0)"
    if name == "power_sum" and has_partials:
        return "sum_of_partials(partials, partial_count, BLOCK) + tl.zeros((1,), tl.float64)"
    return f"tl.load({name} + first).to(tl.float64)"
