"""Scalar passes in Triton: numbers once a tensor, in float64."""

from __future__ import annotations

from ..graph import ScalarPass, Value, scalar_needs, size_from_end
from ..storage import dtype_name
from .spec import KernelSpec
from .triton_names import TritonNames
from .triton_text import POINTERS, decorator, writer_of


def scalar_kernel(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> list[str]:
    """The kernel of a scalar pass."""
    states = [f"{name}_state" for name in spec.program.graph.scalar_states]
    pointers = [*POINTERS["scalar"], *states]
    columns = max(len(spec.program.columns), 1)
    needed = scalar_needs(scalar_pass)
    writer = writer_of("float64", "    ", TritonNames(pointers))
    for value in needed:
        found = _scalar_source(spec, value)
        if found:
            writer.name(value, found)
    writer.write(needed)
    lines = decorator(pointers)
    lines.append(f"def {spec.name}_scalar_pass_{index}({', '.join(pointers)}, BLOCK: tl.constexpr):")
    lines += [
        "    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    inside = t < tl.load(counts)",
        "    active = inside & (tl.load(grads + t, mask=inside, other=0) != 0)",
        "    skip = tl.load(control + 1) != 0.0",
        "    next_step = tl.load(step + t, mask=active, other=0.0).to(tl.float64) + tl.where(skip, 0.0, 1.0)",
        f"    base = hyper + tl.load(group + t, mask=active, other=0) * {len(spec.hypers)}",
        *writer.lines,
    ]
    wide = "tl.zeros((BLOCK,), tl.float64)"
    for column, value in scalar_pass.rows:
        rounded = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.compute)})"
        lines.append(f"    tl.store(rows + t * {columns} + {column}, {rounded}, mask=active)")
    for slot, value in scalar_pass.across:
        place = f"across + t * {spec.across_count} + {slot}"
        neutral = "0.0" if value.operation == "across_sum" else "float('-inf')"
        lines.append(
            f"    tl.store({place}, tl.where(active, {writer[value.args[0]]} + {wide}, {neutral}), mask=inside)"
        )
    if scalar_pass.is_last:
        for name, value in scalar_pass.stores.items():
            stored = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.scalar_dtype(name))})"
            lines.append(f"    tl.store({name}_state + t, {stored}, mask=active & (skip == 0))")
        lines.append("    tl.store(step + t, next_step.to(tl.float32), mask=active)")
    return lines


def _scalar_source(spec: KernelSpec, value: Value) -> str | None:
    """Where a scalar pass finds a value it does not compute."""

    def hyper(name: str) -> str:
        return f"tl.load(base + {spec.hypers.index(name)}, mask=active, other=0.0)"

    if id(value) in spec.program.reductions:
        place = f"sums + t * {spec.reduction_count} + {spec.program.reductions[id(value)]}"
        return f"tl.load({place}, mask=active, other=0.0)"
    if id(value) in spec.program.across:
        return f"tl.load(totals + {spec.program.across[id(value)]})"
    if value.operation == "load":
        return f"tl.load({value.attribute}_state + t, mask=active, other=0.0).to(tl.float64)"
    if value.operation != "hyper":
        return None
    if value.attribute == "step":
        return "next_step"
    if value.attribute == "machine_epsilon":
        return f"tl.full((BLOCK,), {spec.machine_epsilon!r}, tl.float64)"
    if value.attribute == "numel" or size_from_end(value.attribute):
        place = f"sizes + t * {len(spec.sizes)} + {spec.sizes.index(size_from_end(value.attribute))}"
        return f"tl.load({place}, mask=active, other=1).to(tl.float64)"
    if value.attribute == "gradient_scale":
        numbers = ", ".join(f"tl.load(control + {place})" for place in (0, 2, 7))
        return f"gradient_scale_of({numbers}, {hyper('max_grad_norm')})"
    return hyper(value.attribute)
