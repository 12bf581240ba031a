"""Values as statements: the rule's own names, one statement for each named value, all others inlined."""

from __future__ import annotations

import keyword
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from ..graph import ScalarPass, Value, ancestors, scalar_needs, size_from_end
from ..kernels.spec import KernelSpec

SIGNS = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
SIGNS |= {"shift_left": "<<", "shift_right": ">>", "bit_and": "&", "bit_or": "|", "bit_xor": "^"}
"""Operations that both languages write with the same sign between the operands."""

_RESERVED = {"tl", "row", "mask", "i", "t", "tile", "step", "hyper", "control", "int", "float", "double", "const"}
_LONGEST_INLINE = 60


def code(template: str) -> list[str]:
    """The lines of a template without their common indentation; lines from `nested` are indented as their place."""
    lines: list[str] = []
    for line in textwrap.dedent(template).strip("\n").split("\n"):
        indent, mark, inside = line.partition(_NESTED)
        lines += [indent + part for part in inside.split(_NEXT) if part] if mark else [line]
    # Directives of a preprocessor stay at the margin.
    return [line.lstrip() if line.lstrip().startswith("#pragma") else line for line in lines]


_NESTED, _NEXT = "\0", "\1"


def nested(lines: Iterable[str]) -> str:
    """Lines to insert into a template; nothing for no lines."""
    return _NESTED + _NEXT.join(lines)


class Names:
    """Makes unique identifiers, none of them `taken` or `reserved` by the language.

    `slots` matches names that the surrounding code may use: of macros, constants, reductions and arrays.
    """

    def __init__(self, taken: Iterable[str] = (), *, reserved: Iterable[str] = (), slots: str = "(?!)") -> None:
        self._used, self._slots = {*taken, *_RESERVED, *reserved}, slots

    def fresh(self, name: str) -> str:
        """The name, followed by a number if it is taken."""
        base = self.spelled(name)
        stem = f"{base}_" if self.is_kept(f"{base}_2") else base
        name, count = base, 2
        while name in self._used:
            name, count = f"{stem}_{count}", count + 1
        self._used.add(name)
        return name

    def is_kept(self, name: str) -> bool:
        """Whether the surrounding code may use this name."""
        return re.fullmatch(self._slots, name) is not None

    def within(self) -> Names:
        """Names for a scope inside this one."""
        return Names(self._used, slots=self._slots)

    def spelled(self, name: str) -> str:
        """The name as an ASCII identifier that is no keyword and is not kept; Greek letters by their names."""
        names = {
            letter: unicodedata.name(letter, "letter").split()[-1].lower() for letter in name if not letter.isascii()
        }
        base = "".join(names.get(letter, letter) for letter in name)
        base = "".join(letter if letter.isalnum() else "_" for letter in base) or "value"
        base = f"{base}_" if keyword.iskeyword(base) or base[0].isdigit() else base
        return f"{base}_" if self.is_kept(base) else base


class Writer:
    """Turns values into statements of a language, whose subclass declares variables and writes constants."""

    def __init__(self, kind: str, names: Names, spelling: Mapping[str, str]) -> None:
        self.kind = kind  # the compute type
        self.names = names
        self.spelling = spelling
        self.lines: list[str] = []
        self.expressions: dict[int, str] = {}
        self.new: set[int] = set()  # the values being written, by identity
        self.uses: Counter[int] = Counter()  # the uses of each of these values

    def declare(self, name: str, expression: str, value: Value) -> str:
        """The statement that gives a value a variable."""
        raise NotImplementedError

    def constant(self, number: float | bool) -> str:
        """The expression of a constant."""
        raise NotImplementedError

    def spelled(self, value: Value) -> str:
        """The expression of a value whose arguments are written."""
        return self.template(value).format(*(self.expressions[id(arg)] for arg in value.args))

    def template(self, value: Value) -> str:
        """The template of a value's operation, which may depend on the dtype of its result."""
        integers = any(arg.dtype == "int32" for arg in value.args)
        for key in (f"{value.operation} {'int32' if integers else ''}", f"{value.operation} to {value.dtype}"):
            if key in self.spelling:
                return self.spelling[key]
        return self.spelling[value.operation]

    def bind(self, value: Value, expression: str) -> None:
        """Write a value as this expression from now on."""
        self.expressions[id(value)] = expression

    def name(self, value: Value, expression: str, hint: str = "") -> str:
        """Assign a value to a new variable."""
        name = self.names.fresh(hint or value.name or value.operation)
        self.lines.append(self.declare(name, expression, value))
        self.bind(value, name)
        return name

    def write(self, values: Iterable[Value]) -> None:
        """Write values in order. Bound values are skipped; unnamed values with a single use are inlined."""
        ordered = list(values)
        self.new = {id(value) for value in ordered if id(value) not in self.expressions}
        self.uses = Counter(id(arg) for value in ordered for arg in value.args)
        for value in ordered:
            if id(value) in self.expressions:
                continue
            if value.operation == "constant":
                self.bind(value, self.constant(value.attribute))
                continue
            expression = self.spelled(value)
            long_arguments = any(len(self.expressions[id(arg)]) > _LONGEST_INLINE for arg in value.args)
            if value.name or self.uses[id(value)] != 1 or long_arguments:
                self.name(value, _stripped(expression))
            else:
                self.bind(value, expression)

    def write_graph(self, roots: Iterable[Value], read: Mapping[int, str] | None = None) -> list[str]:
        """Write the values that roots depend on, and return the expressions of roots.
        Inputs keep their names; `read` holds, by identity, values that have an expression already.
        """
        roots = list(roots)
        self.expressions.update(read or {})
        values = ancestors(roots, lambda value: id(value) in (read or {}))
        for value in values:
            if value.operation in ("load", "hyper") and id(value) not in self.expressions:
                self.bind(value, value.attribute)
        self.write(values)
        return [self[root] for root in roots]

    def __getitem__(self, value: Value) -> str:
        return self.expressions[id(value)]


def write_scalars(
    writer: Writer, spec: KernelSpec, scalar_pass: ScalarPass, places: Mapping[str, str], states: Mapping[str, str]
) -> list[Value]:
    """Write the inputs of a scalar pass, then its results; returns the results."""
    needed = scalar_needs(scalar_pass)
    for value in needed:
        source = _scalar_source(spec, value, places, states)
        if source:
            writer.name(value, source)
    writer.write(needed)
    return needed


def _scalar_source(spec: KernelSpec, value: Value, places: Mapping[str, str], states: Mapping[str, str]) -> str | None:
    """The expression of an input of a scalar pass; None for a value that the pass computes."""
    # `places`: templates of a language for a reduction, a total, a size and a hyperparameter, where {} is the column,
    # and for other numbers by name; in the template of the gradient's scale {} is the clip's limit. `states`: templates
    # of scalar states.
    program, name = spec.program, value.attribute

    def hyper(name: str) -> str:
        return places["hyper"].format(spec.hypers.index(name))

    if id(value) in program.reductions:
        return places["reduction"].format(program.reductions[id(value)])
    if id(value) in program.global_reductions:
        return places["total"].format(program.global_reductions[id(value)])
    if value.operation == "load":
        return states[name]
    if value.operation != "hyper":
        return None
    if name in ("step", "machine_epsilon"):
        return places[name]
    if name == "numel" or size_from_end(name):
        return places["size"].format(spec.sizes.index(size_from_end(name)))
    if name == "gradient_scale":
        return places[name].format(hyper("max_grad_norm"))
    return hyper(name)


def _stripped(expression: str) -> str:
    """The expression without outer parentheses."""
    if not (expression.startswith("(") and expression.endswith(")")):
        return expression
    depth = 0
    for index, letter in enumerate(expression):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and index < len(expression) - 1:
            return expression
    return expression[1:-1]
