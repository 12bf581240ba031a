"""Formatting as `ruff format` does it, for the few shapes of lines that generated functions have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

WIDTH = 120

_OPEN, _CLOSE = "([{", ")]}"


def logical_lines(lines: Sequence[str]) -> list[str]:
    """Statements on one line each, whatever lines they were folded into."""
    joined: list[str] = []
    depth = 0
    for line in lines:
        if depth and joined[-1][-1:] in _OPEN:
            joined[-1] += line.strip()
        elif depth:
            text = line.strip()
            if text[:1] in _CLOSE:
                joined[-1] = joined[-1].removesuffix(",") + text
            else:
                joined[-1] += f" {text}"
        else:
            joined.append(line)
        depth += _depth_of(line)
    return joined


def _depth_of(line: str) -> int:
    code = "".join(text for text, inside in _pieces(line) if not inside)
    code = code.partition("#")[0]
    return sum(map(code.count, _OPEN)) - sum(map(code.count, _CLOSE))


def _pieces(line: str) -> Iterator[tuple[str, bool]]:
    """A line in pieces, and whether each is a string."""
    place = 0
    for match in re.finditer(r'"""(?:[^"\\]|\\.)*"""|"(?:[^"\\]|\\.)*"', line):
        yield line[place : match.start()], False
        yield match[0], True
        place = match.end()
    yield line[place:], False


def folded(line: str, width: int = WIDTH) -> list[str]:
    """A statement in lines of at most so many columns."""
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= width or line.lstrip().startswith(("#", '"""')):
        return [line]
    head, equals, value = _assignment(line)
    head = f"{head}{equals}"
    if line.lstrip().startswith("return "):
        head, value = f"{indent}return ", line.strip()[7:]
    if value and (operators := _operators(value)):
        # A single operator stays on the line of a bracket beside it.
        for place in (_last_group(value), _first_group(value)) if len(operators) == 1 else ():
            if place is None or len(head) + place + 1 > width:
                continue
            start, closing = place + 1, _matching(value, place)
            if value[-1] in _CLOSE and closing in (len(value) - 1, operators[0] - 2):
                return _around(head + value[:start], value[start:closing], value[closing:], indent, width)
        return _in_parentheses(head, value, operators, indent, width)
    if value and len(calls := _calls(value)) > 1:
        parts = [value[start:stop] for start, stop in pairwise([0, *calls, len(value)])]
        return [f"{head}(", *(f"{indent}    {part}" for part in parts), f"{indent})"]
    openings = [place for place, letter, depth in _walk(line) if letter in _OPEN and not depth]
    if not openings:
        return [line]
    # The last bracket that begins on the first line; of a definition the first.
    fitting = [place for place in openings if place < width]
    opening = openings[0] if line.lstrip().startswith("def ") or not fitting else fitting[-1]
    closing = _matching(line, opening)
    return _around(line[: opening + 1], line[opening + 1 : closing], line[closing:], indent, width)


def _around(head: str, body: str, tail: str, indent: str, width: int) -> list[str]:
    inner = f"{indent}    "
    parts = _split(body, ",")
    is_call = head[-1] == "(" and bool(re.search(r"[\w)\]]$", head[:-1]))
    if len(inner) + len(body) <= width and (is_call or len(parts) == 1):
        return [head, f"{inner}{body}", f"{indent}{tail}"]
    if len(parts) == 1 and not body.rstrip().endswith(","):
        operators = _operators(body)
        if operators:
            return [head, *_by_operator(body, operators, inner), f"{indent}{tail}"]
        return [head, *folded(f"{inner}{body}", width), f"{indent}{tail}"]
    lines = [head]
    if head.lstrip().startswith("def ") or head.endswith("dict("):
        # Many names: as many on a line as there is room for, which formatters leave alone by the comment.
        return [head, *_packed(parts, inner, width), f"{indent}{tail}  # fmt: skip"]
    for part in parts:
        own = folded(f"{inner}{part.strip()},", width)
        lines += own
    return [*lines, f"{indent}{tail}"]


def _packed(parts: Sequence[str], indent: str, width: int) -> list[str]:
    lines = [f"{indent}{parts[0]},"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f" {part},"
        else:
            lines.append(f"{indent}{part},")
    return lines


def _in_parentheses(head: str, value: str, operators: list[int], indent: str, width: int) -> list[str]:
    inner = f"{indent}    "
    if len(inner) + len(value) <= width:
        return [f"{head}(", f"{inner}{value}", f"{indent})"]
    return [f"{head}(", *_by_operator(value, operators, inner), f"{indent})"]


def _by_operator(value: str, operators: list[int], indent: str) -> list[str]:
    places, lines = [0, *operators, len(value)], []
    for start, stop in pairwise(places):
        part = value[start:stop].strip()
        opening = 0 if part[0] == "(" else 2
        if len(indent) + len(part) > WIDTH and part[opening] == "(" and _matching(part, opening) == len(part) - 1:
            inside = part[opening + 1 : -1]
            own = _by_operator(inside, _operators(inside), f"{indent}    ")
            lines += [f"{indent}{part[: opening + 1]}", *own, f"{indent})"]
        else:
            lines += folded(f"{indent}{part}")
    return lines


def _walk(text: str) -> Iterator[tuple[int, str, int]]:
    """Characters outside of strings, with their places and depths."""
    depth = place = 0
    for piece, inside in _pieces(text):
        for offset, letter in enumerate(piece):
            if inside:
                continue
            depth -= letter in _CLOSE
            yield place + offset, letter, depth
            depth += letter in _OPEN
        place += len(piece)


def _assignment(line: str) -> tuple[str, str, str]:
    for place, letter, depth in _walk(line):
        if letter == "=" and not depth and line[place - 1] == " " and line[place + 1] == " ":
            return line[:place], "= ", line[place + 2 :]
        if letter == "=" and not depth and line[place - 1] in "+-*" and line[place + 1] == " ":
            return line[: place - 1], line[place - 1 : place + 2], line[place + 2 :]
    return line, "", ""


def _operators(text: str) -> list[int]:
    """Places of the operators of lowest precedence outside of brackets."""
    found: dict[str, list[int]] = {}
    for place, letter, depth in _walk(text):
        if not depth and letter in "+-*/&|<>" and text[place - 1 : place] == " " and text[place + 1 : place + 2] == " ":
            found.setdefault({"-": "+", "/": "*", ">": "<"}.get(letter, letter), []).append(place)
    return next((found[kind] for kind in ("<", "|", "&", "+", "*") if kind in found), [])


def _last_group(line: str) -> int | None:
    """Where the last bracket outside of all others opens."""
    places = [place for place, letter, depth in _walk(line) if letter in _OPEN and not depth]
    return places[-1] if places else None


def _calls(text: str) -> list[int]:
    """Places of the methods that are called on results of calls."""
    dots = [place for place, letter, depth in _walk(text) if letter == "." and not depth and text[place - 1] in _CLOSE]
    return dots if text[-1] == ")" else []


def _first_group(line: str) -> int | None:
    """Where the first bracket opens."""
    return next((place for place, letter, depth in _walk(line) if letter in _OPEN and not depth), None)


def _matching(line: str, opening: int) -> int:
    level = None
    for place, letter, depth in _walk(line):
        if place == opening:
            level = depth
        elif level is not None and letter in _CLOSE and depth == level:
            return place
    raise ValueError(f"a bracket is open: {line}")


def _split(text: str, mark: str) -> list[str]:
    places = [-1, *(place for place, letter, depth in _walk(text) if letter == mark and not depth), len(text)]
    parts = [text[start + 1 : stop].strip() for start, stop in pairwise(places)]
    return [part for part in parts if part]


def formatted(lines: Sequence[str]) -> list[str]:
    """Statements, folded where they are long; strings in double quotes."""
    text = [_spelled(line) for line in logical_lines(lines)]
    return [part for line in text for part in folded(line)]


def _spelled(line: str) -> str:
    """Strings in double quotes, powers of single names without spaces, exponents without plus."""
    if line.lstrip().startswith(("#", '"""')):
        return line
    line = line.replace("'", '"') if "'" in line and '"' not in line else line
    line = re.sub(r"^(\s*)(return )?([\w.]+),(?= = |$)", r"\1\2(\3,)", line) if line.startswith("    ") else line
    line = _without_doubled_parentheses(line)
    line = re.sub(r"^(\s*(?:el)?if |\s*while )\(([^()]*)\):$", r"\1\2:", line)
    line = re.sub(r"(?<=\d)e\+(?=\d)", "e", line)
    return re.sub(r"(?<=[\w]) \*\* (?=[\w.]+(?![\w.(\[]))", "**", line)


def _without_doubled_parentheses(line: str) -> str:
    """A line without the inner parentheses of `function((a + b))`."""
    for match in re.finditer(r"(?<=\w)\(\(", line):
        outer, inner = match.start(), match.start() + 1
        end = _matching(line, inner)
        if end + 1 == _matching(line, outer) and "," not in _outside(line[inner + 1 : end]):
            return _without_doubled_parentheses(line[:inner] + line[inner + 1 : end] + line[end + 1 :])
    return line


def _outside(text: str) -> str:
    """The letters outside of brackets."""
    return "".join(letter for _, letter, depth in _walk(text) if not depth)
