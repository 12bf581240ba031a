"""Scalar passes in C++: numbers once a tensor, in float64."""

from __future__ import annotations

from ..graph import ScalarPass, Value, scalar_needs, size_from_end
from ..storage import dtype_name
from .cpp_names import CppNames
from .cpp_text import C_TYPES, scalar_type, writer_of
from .spec import KernelSpec

GRADIENT_SCALE = """
namespace {
// What gradients are multiplied by: one over the loss scale, times the clip coefficient of the unscaled norm.
inline double gradient_scale_of(const double* control, double max_grad_norm) {
  if (max_grad_norm < 0) {  // an adaptive limit beside it
    max_grad_norm = -max_grad_norm < control[CLIP] ? -max_grad_norm : control[CLIP];
  }
  if (max_grad_norm == INFINITY) return control[INVERSE_SCALE];
  const double coefficient = max_grad_norm / (control[NORM] + 1e-6);
  return control[INVERSE_SCALE] * (coefficient > 1 ? 1.0 : coefficient);
}
}  // namespace
"""


def scalar_function(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> str:
    columns = max(len(spec.program.columns), 1)
    scalar = scalar_type(spec)
    needed = scalar_needs(scalar_pass)
    per_tensor = any(value.level.name == "TENSOR" for value in needed)
    writer = writer_of("double", "    ", CppNames())
    for value in needed:
        source = _scalar_source(spec, value)
        if source:
            writer.name(value, source)
    writer.write(needed)
    lines = [
        f'extern "C" void scalar_pass_{index}(const Launch* launch) {{',
        "  const bool skip = launch->control[SKIP] != 0;",
        f"  {scalar}* rows = static_cast<{scalar}*>(launch->rows);",
        "  int64_t same_as = -1;",
        "  for (int64_t t = 0; t < launch->tensors; ++t) {",
        "    if (launch->grads[t] == 0) {",
        *_absent(spec, scalar_pass),
        "      continue;",
        "    }",
        "    const double next_step = launch->step[t] + (skip ? 0.0 : 1.0);",
        "    const double* hyper = launch->hyper + launch->group[t] * launch->hyper_count;",
        f"    {scalar}* row = rows + t * {columns};",
    ]
    if not per_tensor and not scalar_pass.across and not scalar_pass.stores:
        lines += [
            "    if (same_as >= 0 && launch->group[t] == launch->group[same_as] &&",
            f"        {_step_of('same_as', scalar_pass)} == next_step) {{",
            *_copied_columns(columns, [column for column, _ in scalar_pass.rows]),
            *(["      launch->step[t] = next_step;"] if scalar_pass.is_last else []),
            "      continue;",
            "    }",
            "    same_as = t;",
        ]
    lines += writer.lines
    lines += [f"    row[{column}] = {writer[value]};" for column, value in scalar_pass.rows]
    for slot, value in scalar_pass.across:
        lines.append(f"    launch->across[t * {spec.across_count} + {slot}] = {writer[value.args[0]]};")
    if scalar_pass.is_last:
        for name, value in scalar_pass.stores.items():
            lines.append(f"    if (!skip) {_scalar_state(spec, name)}[t] = {writer[value]};")
        lines.append("    launch->step[t] = next_step;")
    return "\n".join([*lines, "  }", "}"])


def _copied_columns(columns: int, own: list[int]) -> list[str]:
    """Take a pass's columns from the tensor before; those of other passes may differ between tensors."""
    if len(own) == columns:
        copy = f"row[column] = rows[same_as * {columns} + column];"
        return [f"      for (int64_t column = 0; column < {columns}; ++column) {copy}"]
    return [f"      row[{column}] = rows[same_as * {columns} + {column}];" for column in own]


def _absent(spec: KernelSpec, scalar_pass: ScalarPass) -> list[str]:
    """A tensor without gradient adds nothing to what spans tensors."""
    return [
        f"      launch->across[t * {spec.across_count} + {slot}] = "
        f"{'0' if value.operation == 'across_sum' else '-INFINITY'};"
        for slot, value in scalar_pass.across
    ]


def _step_of(index: str, scalar_pass: ScalarPass) -> str:
    return f"launch->step[{index}]" if scalar_pass.is_last else f"launch->step[{index}] + (skip ? 0.0 : 1.0)"


def _scalar_state(spec: KernelSpec, name: str) -> str:
    """The array of a state of one number for each tensor."""
    position = spec.program.graph.scalar_states.index(name)
    return f"reinterpret_cast<{C_TYPES[dtype_name(spec.scalar_dtype(name))]}*>(launch->scalar_states[{position}])"


def _scalar_source(spec: KernelSpec, value: Value) -> str | None:
    """Where a scalar pass finds a value it does not compute."""
    if id(value) in spec.program.reductions:
        return f"launch->sums[t * {spec.reduction_count} + {spec.program.reductions[id(value)]}]"
    if id(value) in spec.program.across:
        return f"launch->totals[{spec.program.across[id(value)]}]"
    if value.operation == "load":
        return f"{_scalar_state(spec, value.attribute)}[t]"
    if value.operation != "hyper":
        return None
    if value.attribute == "step":
        return "next_step"
    if value.attribute == "machine_epsilon":
        return repr(spec.machine_epsilon)
    if value.attribute == "numel" or size_from_end(value.attribute):
        return f"launch->sizes[t * {len(spec.sizes)} + {spec.sizes.index(size_from_end(value.attribute))}]"
    if value.attribute == "gradient_scale":
        clip = f"hyper[{spec.hypers.index('max_grad_norm')}]"
        return f"gradient_scale_of(launch->control, {clip})"
    return f"hyper[{spec.hypers.index(value.attribute)}]"
