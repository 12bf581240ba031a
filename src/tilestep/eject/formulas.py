"""Graphs as functions of torch tensors, for people to read and for CPUs to run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..backends.emit import SIGNS, Names, Writer
from ..graph import GLOBAL_REDUCTIONS, SCALAR_LEVELS, Graph, Value, ancestors, size_from_end
from ..storage import Codec

_OF_TORCH = """
sqrt rsqrt exp exp2 expm1 log log2 log1p log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
lgamma sign floor ceil round trunc abs isnan isinf
"""

SPELLING = {
    **{name: f"torch.{name}({{0}})" for name in _OF_TORCH.split()},
    **{
        name: f"torch.{name}({{0}}, {{1}})" for name in ["atan2", "copysign", "fmod", "remainder", "maximum", "minimum"]
    },
    **{name: f"({{0}} {sign} {{1}})" for name, sign in SIGNS.items()},
    "div": "({0} / {1})",
    "pow": "({0} ** {1})",
    "neg": "(-{0})",
    "where": "torch.where({0}, {1}, {2})",
    "number": "torch.where({0}, 1.0, 0.0)",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "not": "(~{0})",
    "reduce_sum": "{0}.sum(dtype=torch.float64)",
    "reduce_amax": "{0}.amax()",
    "reduce_amin": "{0}.amin()",
    "widen": "{0}.float()",
    "narrow to float32": "{0}",
    "narrow to bfloat16": "{0}.bfloat16()",
    "narrow to float16": "{0}.half()",
    "of_bits to ": "{0}.view(torch.float32)",
    "of_bits to bfloat16": "{0}.to(torch.int16).view(torch.bfloat16)",
    "of_bits to float16": "{0}.to(torch.int16).view(torch.float16)",
    "of_bits to float8_e4m3fn": "{0}.to(torch.uint8).view(torch.float8_e4m3fn)",
    **{f"of_bits to {name}": f"{{0}}.to(torch.{name})" for name in ("int16", "int8", "uint8")},
    "whole": "{0}.to(torch.int32)",
    "real": "{0}.float()",
    "block_max": "largest_of_block({0})",
    "nibble": "halves_of_bytes({0})",
    "quotient": "({0} / {1})",
    "root": "exact_root({0})",
    "rough_root": "torch.sqrt({0})",
    "rough_ceiling": "torch.ceil({0} / {1})",
    "fused": "exact_sum({0}, {1}, {2})",
    "within": "torch.where({0} < {1}, {0}, {1})",
    "float8_number": "{0}",
    "float8_element": "{0}",
}

HELPERS = {
    "largest_of_block": '''
def largest_of_block(bits: torch.Tensor) -> torch.Tensor:
    """The largest element of each row, as unsigned integers."""
    return (bits ^ -(2**31)).amax(1, keepdim=True) ^ -(2**31)
''',
    "halves_of_bytes": '''
def halves_of_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """Unpack the 4-bit codes of `bytes_of_halves`."""
    return torch.stack([pairs & 15, (pairs >> 4) & 15], 2).reshape(len(pairs), -1).to(torch.int32)
''',
    "bytes_of_halves": '''
def bytes_of_halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, two adjacent codes per byte."""
    pairs = codes.reshape(len(codes), -1, 2)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).to(torch.uint8)
''',
    "exact_root": '''
def exact_root(number: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root: torch's is off by one unit in the last place on some CPUs."""
    return number.double().sqrt().float()
''',
    "exact_sum": '''
def exact_sum(left: torch.Tensor, right: torch.Tensor | float, plus: torch.Tensor | float) -> torch.Tensor:
    """A fused multiply-add: rounded once."""
    return (left.double() * right + plus).float()
''',
}
"""Functions that formulas of storage formats call."""

_NAMES = "torch math inspect Any NamedTuple shape jit tl libdevice local keep"


class TorchWriter(Writer):
    """Writes statements on tensors."""

    def __init__(self, taken: Iterable[str]) -> None:
        super().__init__("float32", Names(taken, reserved=(*_NAMES.split(), *HELPERS)), SPELLING)

    def declare(self, name: str, expression: str, value: Value) -> str:
        return f"    {name} = {expression}"

    def constant(self, number: float | bool) -> str:
        if isinstance(number, (bool, int)):
            return repr(number)
        return (
            repr(number)
            if math.isfinite(number)
            else "math.nan"
            if math.isnan(number)
            else f"{'-' * (number < 0)}math.inf"
        )

    def spelled(self, value: Value) -> str:
        name, args = value.operation, value.args
        if name in ("maximum", "minimum") and any(arg.operation == "constant" for arg in args):
            number, bound = sorted(args, key=lambda arg: arg.operation == "constant")
            return f"torch.clamp({self[number]}, {'min' if name == 'maximum' else 'max'}={self[bound]})"
        numbers = all(arg.operation == "constant" for arg in args[1:])
        if name == "where" and numbers and value.level in SCALAR_LEVELS:  # of two plain numbers torch makes a float32
            chosen = f"torch.tensor({self[args[1]]}, dtype=torch.float64)"
            return f"torch.where({self[args[0]]}, {chosen}, {self[args[2]]})"
        if name == "atan2" and any(arg.operation == "constant" for arg in args):
            left, right = (f"torch.tensor({self[arg]})" if arg.operation == "constant" else self[arg] for arg in args)
            return f"torch.atan2({left}, {right})"
        if name == "bits":
            kinds = {"": "view(torch.int32)", "float32": "view(torch.int32)", "bfloat16": "view(torch.int16).int()"}
            kinds |= {"float16": "view(torch.int16).int()", "float8_e4m3fn": "view(torch.uint8).int()"}
            return f"{self[args[0]]}.{kinds.get(args[0].dtype, 'int()')}"
        if name == "pack":
            packed = f"bytes_of_halves({self[args[0]]})"
            return packed if value.dtype == "uint8" else f"{packed}.view(torch.{value.dtype})"
        if name == "real" and args[0].operation == "constant":
            return repr(float(args[0].attribute))
        return super().spelled(value)


def formula(
    title: str, graph: Graph, states: Sequence[str], hyperparameters: Mapping[str, Any], about: str
) -> list[str]:
    """A rule as a function of a parameter, its gradient and its states in float32, and numbers in float64."""
    values = graph.values()
    hypers = dict.fromkeys(value.attribute for value in values if value.operation == "hyper")
    builtins = ("step", "gradient_scale", "machine_epsilon")
    used = [
        name.replace(".", "_")
        for base in (*hyperparameters, *builtins)
        for name in sorted(hypers)
        if name.partition(".")[0] == base
    ]
    sized = ["shape"] if any(size_from_end(name) or name == "numel" for name in hypers) else []
    loaded = {value.attribute for value in values if value.operation == "load"}
    buffers = [name for name in dict.fromkeys(("param", "grad", *states)) if name in loaded]
    arguments = [*buffers, *used, *sized]
    writer = TorchWriter([title, *arguments])
    for value in values:
        if value.operation == "load":
            writer.bind(value, value.attribute)
        elif value.operation == "hyper":
            writer.bind(value, _size(value.attribute) or value.attribute.replace(".", "_"))
    ordered: list[Value] = []
    for value in values:
        ordered.append(value)
        if value.operation in GLOBAL_REDUCTIONS:
            writer.write([one for one in ordered if one is not value])
            way = value.operation.removeprefix("global_")
            writer.name(value, f'yield "{way}", torch.as_tensor({writer[value.args[0]]})', value.name)
    writer.write(values)
    results = ", ".join(f'"{name}": {writer[value]}' for name, value in graph.outputs.items())
    return [
        f"def {title}({', '.join(arguments)}, **_):",
        f'    """{about}"""',
        *writer.lines,
        f"    return {{{results}}}",
    ]


def _size(name: str) -> str:
    if name == "numel":
        return "float(math.prod(shape))"
    place = size_from_end(name)
    return f"float((1, *shape)[-{place}] if len(shape) >= {place} else 1)" if place else ""


def codec_functions(title: str, codec: Codec) -> list[list[str]]:
    """The functions of a storage format: from what it keeps to numbers, and back."""
    loaded = _function(f"load_{title}", [array.name for array in codec.arrays], [codec.loaded], "torch.Tensor")
    stored = _function(f"store_{title}", ["number"], codec.stored, "tuple[torch.Tensor, ...]")
    return [loaded, stored]


def _function(title: str, parameters: Sequence[str], roots: Sequence[Value], kind: str) -> list[str]:
    writer = TorchWriter([title, *parameters])
    for value in ancestors(roots):
        if value.operation == "load":
            writer.bind(value, value.attribute)
    writer.write(ancestors(roots))
    typed = ", ".join(f"{name}: torch.Tensor" for name in parameters)
    returned = ", ".join(writer[root] for root in roots) + "," * (len(roots) == 1 and kind != "torch.Tensor")
    about = "Encode numbers for storage." if title.startswith("store") else "Decode stored numbers."
    return [f"def {title}({typed}) -> {kind}:", f'    """{about}"""', *writer.lines, f"    return {returned}"]


_CONDITIONS = {name: f"({{0}} {sign} {{1}})" for name, sign in SIGNS.items()}
_CONDITIONS |= {"and": "({0} and {1})", "or": "({0} or {1})", "not": "(not {0})", "neg": "(-{0})", "div": "({0} / {1})"}


def condition(value: Value, outcome: bool) -> str:
    """A condition as an expression of a param group, in plain Python."""
    text = re.sub(r"^\((.*)\)$", r"\1", _condition(value))
    if outcome:
        return text
    return text.replace("!=", "==") if re.fullmatch(r"\S+ != \S+", text) else f"not ({text})"


def _condition(value: Value) -> str:
    if value.operation == "hyper":
        return re.sub(
            r"^(\w+)(?:\.(\d+))?$",
            lambda found: f'group["{found[1]}"]' + f"[{found[2]}]" * bool(found[2]),
            value.attribute,
        )
    if value.operation == "constant":
        return repr(value.attribute)
    return _CONDITIONS[value.operation].format(*map(_condition, value.args))


def helpers_of(lines: Iterable[str]) -> Mapping[str, str]:
    """The helpers that these lines call."""
    text = "\n".join(lines)
    return {name: body for name, body in HELPERS.items() if re.search(rf"(?<![.\w]){name}\(", text)}
