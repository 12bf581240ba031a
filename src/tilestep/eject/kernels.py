"""The text of kernels, as the library generates it, without what an ejected file has no use for."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..backends.triton import source as triton_source
from ..kernels.spec import KernelSpec
from .kinds import Kind
from .layout import formatted, logical_lines

Function = tuple[str, list[str]]
"""A name, and the lines of a function with its decorators."""


def functions_of(source: str) -> list[Function]:
    """The functions of a module of Triton's, with each statement on one line."""
    functions: list[Function] = []
    for block in re.split(r"\n\n\n+", source.strip()):
        lines = logical_lines(block.splitlines())
        defined = next((re.match(r"def (\w+)\(", line) for line in lines if line.startswith("def ")), None)
        if defined is not None:
            functions.append((defined[1], ["@jit" if line.startswith("@") else line for line in lines]))
    return functions


def update_functions(spec: KernelSpec, *, clip: bool) -> list[Function]:
    """The kernels of a spec and what belongs to it alone; tensors are walked in memory order, without a loss scale."""
    functions = functions_of(triton_source.source(spec))
    kept = [(name, lines) for name, lines in functions if not re.search("_strided$|^gradient_scale_of$", name)]
    narrowed = [(name, _narrowed(lines, clip=clip, keeps_sums=bool(spec.reduction_count))) for name, lines in kept]
    return [(name, _numbered(lines) if "_tile_pass_" in name else lines) for name, lines in narrowed]


def _numbered(lines: Sequence[str]) -> list[str]:
    """A pass with short names for the numbers of a tensor, which its formula has by their full names."""
    loads = {line: re.fullmatch(r"    (\w+) = tl\.load\(row \+ (\d+)\)", line) for line in lines}
    names = {match[1]: f"n{match[2]}" for match in loads.values() if match is not None}
    comments = {line: f"  # {match[1]}" for line, match in loads.items() if match is not None}
    return [*lines[:2], *(renamed([line], names)[0] + comments.get(line, "") for line in lines[2:])]


_CUT = r""" & \(skip == 0\)|\(skip == 0\.0\) & | & \(layout_row < 0\)|, UNSCALE: tl\.constexpr
^ +if UNSCALE:\n.*\n
^ +(?:layout_row|inverse_scale) = .*\n"""
"""What a step has no use for that is never skipped, unscales nothing and walks no strides."""


def _narrowed(lines: Sequence[str], *, clip: bool, keeps_sums: bool) -> list[str]:
    """A kernel without skipped steps, strides, loss scales, more than one limit and, where nothing is reduced, sums."""
    text = re.sub("|".join(_CUT.split("\n")), "", "\n".join(lines), flags=re.MULTILINE)
    if alias := re.search(r"^    (\w+) = next_step\n", text, flags=re.MULTILINE):
        text = re.sub(rf"\b{alias[1]}\b", "next_step", text.replace(alias[0], ""))
    text = text.replace("tl.where(skip, 0.0, 1.0)", "1.0").replace("if (grad_address != 0):", "if grad_address != 0:")
    scale = r"gradient_scale_of\(tl\.load\(control \+ 0\), .*?, (tl\.load\(base \+ .*\))\)$"
    factor = r"gradient_scale_of(tl.load(total_norm), \1)" if clip else "tl.full((1,), 1.0, tl.float64)"
    narrowed = _without_unused(re.sub(scale, factor, text, flags=re.MULTILINE).splitlines())
    body = "\n".join(narrowed[2:])
    heading = re.sub(r"\bcontrol\b", "control" if "control" in body else "total_norm", narrowed[1])
    unused = ["layout_index", *([] if keeps_sums else ["partials"])]
    for name in (*unused, "numel", "sizes", "sums", "global_parts", "totals", "total_norm"):
        if not re.search(rf"\b{name}\b", body):
            heading = re.sub(rf"(?<=[(,]) ?{name},", "", heading)
    return [narrowed[0], heading.replace("( ", "("), *narrowed[2:]]


def _without_unused(lines: Sequence[str]) -> list[str]:
    """A function without the names that it only assigns."""
    if len(lines) == 2:
        return [*lines, "    pass"]
    named = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)]
    read = {node.id for node in named if isinstance(node.ctx, ast.Load)}
    kept = [line for line in lines if (name := re.match(r"\s+(\w+) = ", line)) is None or name[1] in read]
    return kept if len(kept) == len(lines) else _without_unused(kept)


def renamed(lines: Iterable[str], names: dict[str, str]) -> list[str]:
    """Lines with other names for functions."""
    if not names:
        return list(lines)
    pattern = re.compile(rf"(?<![.\w])({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b")
    return [pattern.sub(lambda match: names[match[1]], line) for line in lines]


def merged(kinds: Sequence[Kind], *, clip: bool) -> list[list[str]]:
    """The functions of several kinds, each text once; a kind gets the names of its own."""
    written: dict[tuple[str, ...], str] = {}
    order: list[list[str]] = []
    functions = {kind.name: update_functions(kind.spec, clip=clip) for kind in kinds}
    general = {kind.name: _general(kind.spec, functions[kind.name]) for kind in kinds}
    for kind in kinds:
        passes = [_passes(functions) for name, functions in general.items() if name != kind.name]
        kind.is_general = bool(general[kind.name]) and _passes(general[kind.name]) in passes
        names: dict[str, str] = {}
        for name, lines in general[kind.name] if kind.is_general else functions[kind.name]:
            base = name.removeprefix(f"{kind.spec.name}_")
            body = renamed(lines, names)
            key = (base, *renamed(body, {name: base}))
            if key not in written:
                written[key] = f"{base}_{kind.name}" if any(other[0] == base for other in written) else base
                order.append(renamed(body, {name: written[key]}))
            names[name] = kind.functions[base] = written[key]
    return order


def _without_new(found: re.Match[str]) -> str:
    return f"{found[1]}.to(" if found[1] else found[2]


def _passes(functions: Sequence[Function]) -> list[Function]:
    return [function for function in functions if "_tile_pass_" in function[0]]


def _general(spec: KernelSpec, functions: Sequence[Function]) -> list[Function]:
    """The functions with the dtype of all arrays and the formula as constants; none where dtypes differ."""
    dtypes = {array.dtype for array in (spec.grad, *spec.arrays)}
    if len(dtypes) > 1 or spec.has_blocks:
        return []
    dtype = f"tl.{str(dtypes.pop()).removeprefix('torch.')}"
    general: list[Function] = []
    for name, lines in functions:
        if "_tile_pass_" in name:
            lines = [line.replace(f"tl.pointer_type({dtype})", "pointer") for line in lines]
            lines = [re.sub(rf"(tl\.store\(.*\.to\(){dtype}\)", r"\1ELEMENT)", line) for line in lines]
            lines = [re.sub(rf"(?<= = ){spec.name}_math_\d+\(", "MATH(", line) for line in lines]
            if not re.search(r"\b(partials|sums)\b", "\n".join(lines)):
                lines = [re.sub(r"\(new_(\w+)\)\.to\(|\bnew_(\w+)", _without_new, line) for line in lines]
            lines.insert(2, "    pointer = tl.pointer_type(ELEMENT)")
            lines[1] = lines[1].replace("):", ", ELEMENT: tl.constexpr, MATH: tl.constexpr):")
        general.append((name, lines))
    return general


NORM = '''
@jit
def norm_tiles(
    grads, norm_numel, norm_first, norm_owner, weights, norm_partials,
    ELEMENT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):
    """Add up the squares of a tile of a gradient."""
    tile = tl.program_id(0)
    t = tl.load(norm_owner + tile)
    address = tl.load(grads + t)
    begin = (tile - tl.load(norm_first + t)) * TILE
    count = tl.minimum(tl.load(norm_numel + t) - begin, TILE).to(tl.int32)
    count = tl.where(address == 0, 0, count)
    pointer = address.to(tl.pointer_type(ELEMENT)) + begin
    lane = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    place = count * 0
    if address % 16 == 0:
        aligned = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16) + tl.multiple_of(begin, TILE)
        while place + 2 * STEP <= count:  # two steps together: their loads overlap
            here = aligned + tl.multiple_of(place, STEP)
            left = tl.load(here + lane).to(tl.float32)
            right = tl.load(here + STEP + lane).to(tl.float32)
            total = (total + left * left) + right * right
            place += 2 * STEP
        if place + STEP <= count:
            value = tl.load(aligned + tl.multiple_of(place, STEP) + lane).to(tl.float32)
            total += value * value
            place += STEP
    while place < count:
        value = tl.load(pointer + place + lane, mask=place + lane < count, other=0).to(tl.float32)
        total += tl.where(place + lane < count, value * value, 0.0)
        place += STEP
    result = tl.sum(total).to(tl.float64)
    if not (result < float("inf")):
        # Finite elements may have squares that are not: again, of elements times 2 ** -80.
        total = tl.zeros((STEP,), tl.float32)
        place = count * 0
        while place < count:
            value = tl.load(pointer + place + lane, mask=place + lane < count, other=0).to(tl.float32)
            small = value * 8.271806125530277e-25
            total += small * small
            place += STEP
        result = tl.sum(total).to(tl.float64) * 1.461501637330903e48
    tl.store(norm_partials + tile, result * tl.load(weights + t))


@jit
def norm_total(partials, partial_count, total_norm, BLOCK: tl.constexpr):
    """Add up the squares of all tiles in a fixed order."""
    count = tl.load(partial_count)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    begin = count * 0
    while begin < count:
        total += tl.load(partials + begin + lane, mask=begin + lane < count, other=0.0)
        begin += BLOCK
    tl.store(total_norm, tl.sum(total))


@jit
def gradient_scale_of(norm, max_grad_norm):
    """The factor of gradients: the limit over their norm where that is less than 1; NaN for a norm of NaN."""
    scale = divide(max_grad_norm, norm + tl.full((1,), 1e-06, tl.float64))
    return tl.where((max_grad_norm == float("inf")) | (scale > 1.0), tl.full((1,), 1.0, tl.float64), scale)
'''
"""The norm of gradients, with the bits of the library's: `norm/triton_source.py` for two dtypes and squares alone.

Sums of so few digits never leave float64.
"""


@functools.cache
def _helpers() -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The functions that all generated modules call, and the constants that they take."""
    path = Path(inspect.getfile(triton_source)).with_name("support.py")
    functions: dict[str, list[str]] = {}
    # The numbers of constants are worked out without Triton.
    scope: dict[str, Any] = {"tl": SimpleNamespace(constexpr=lambda value: value)}
    lines, constants = path.read_text().splitlines(), list[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            mark = "@constexpr_function" if "constexpr_function" in ast.unparse(node.decorator_list[0]) else "@jit"
            functions[node.name] = _compiled([mark, *lines[node.decorator_list[0].lineno : node.end_lineno]])
        elif isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Assign) and "knobs" not in ast.unparse(node)):
            exec(compile(ast.Module([node], []), str(path), "exec", dont_inherit=True), scope)
            constants += [ast.unparse(target) for target in getattr(node, "targets", [])]
    return functions, {name: scope[name] for name in constants}


def helpers_for(functions: Iterable[Iterable[str]]) -> tuple[list[list[str]], dict[str, Any]]:
    """The library's functions and constants that these functions need."""
    (support, constants), needed, pending = _helpers(), set[str](), ["\n".join(lines) for lines in functions]
    helpers = {**support}
    if not re.search(r"\bpower\((?![a-z]\w*, [a-z]\w*\))", "\n".join(pending)):  # of tensors alone
        helpers["power"] = [line for line in support["power"] if "alike" not in line]
    while pending:
        read = (_names_in(pending.pop()) & (helpers.keys() | constants.keys())) - needed
        pending += ["\n".join(helpers[name]) for name in read & helpers.keys()]
        needed |= read
    used = {name: value for name, value in constants.items() if name in needed}
    return [lines for name, lines in helpers.items() if name in needed], used


def _names_in(text: str) -> set[str]:
    """The names that a function reads and does not assign."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    assigned = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes} - assigned


def _compiled(lines: Sequence[str]) -> list[str]:
    """A function without its branches for Triton's interpreter."""
    kept, nodes = list(lines), ast.walk(ast.parse("\n".join(lines)))
    for node in sorted((each for each in nodes if isinstance(each, ast.If)), key=lambda each: -each.lineno):
        if re.match(r"INTERPRETED( and |$)", ast.unparse(node.test)):
            first, stop = node.lineno - 1, node.orelse[0].lineno - 1
            if isinstance(node.orelse[0], ast.If):
                kept[first : stop + 1] = [kept[stop].replace("elif ", "if ", 1)]
            else:
                kept[first : node.end_lineno] = [line[4:] for line in kept[stop : node.end_lineno]]
    kept = [line.replace("INTERPRETED or ", "").replace("not INTERPRETED and ", "") for line in kept]
    if any("INTERPRETED" in line for line in kept):
        raise ValueError(f"a branch for the interpreter remains: {kept}")
    return kept


def constant_lines(name: str, value: Any) -> list[str]:
    """A constant's definition; long strings in pieces."""
    if isinstance(value, str) and len(name) + len(value) > 110:
        pieces = textwrap.wrap(value, 105, drop_whitespace=False, break_long_words=False, break_on_hyphens=False)
        return [f"{name} = (", *(f'    "{piece}"' for piece in pieces), ")"]
    if isinstance(value, tuple):
        lines = [f"{name} = ("]
        for entry in value:
            lines += constant_lines("", entry)[1:-1] or [f'    "{entry}"']
            lines[-1] += ","
        return [*lines, ")"]
    return [f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value!r}"]


def flat(functions: Iterable[Sequence[str]]) -> str:
    """Functions as text, two empty lines behind each."""
    return "".join("\n".join(formatted(lines)) + "\n\n\n" for lines in functions)
