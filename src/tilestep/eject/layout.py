"""Formatting as `ruff format` does it, for the few shapes of lines that generated functions have."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise

WIDTH = 120

_OPEN, _CLOSE = "([{", ")]}"

_FMT_SKIP = "  # fmt: skip"  # a formatter leaves the statement alone
_OTHER_SPACES = re.compile(" (?![-+*/&|<>]+ )")  # those that are not before an operator


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
    head, value = _assignment(line)
    if value and (_has_operators(value) or value.count(").") > 1):
        return [f"{head}(", *_wrapped(_OTHER_SPACES.sub("\0", value), f"{indent}    ", width), f"{indent}){_FMT_SKIP}"]
    openings = [place for place, letter, depth in _walk(line) if letter in _OPEN and not depth]
    if not openings:
        return [line]
    # The last bracket that begins on the first line; of a definition the first.
    fitting = [place for place in openings if place < width]
    opening = openings[0] if line.lstrip().startswith("def ") or not fitting else fitting[-1]
    closing = _matching(line, opening)
    return _around(line[: opening + 1], line[opening + 1 : closing], line[closing:], indent, width)


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    """Text in lines that end at spaces, as full as they can be."""
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return [indent + line.replace("\0", " ") for line in lines]


def _around(head: str, body: str, tail: str, indent: str, width: int) -> list[str]:
    inner = f"{indent}    "
    parts = _split(body, ",")
    is_call = head[-1] == "(" and bool(re.search(r"[\w)\]]$", head[:-1]))
    if len(inner) + len(body) <= width and (is_call or len(parts) == 1):
        return [head, f"{inner}{body}", f"{indent}{tail}"]
    if head.lstrip().startswith("def ") or head.endswith("dict(") or (len(parts) == 1 and _has_operators(body)):
        # As many on a line as there is room for.
        listed = (part.replace(" ", "\0") + "," for part in parts)
        body = _OTHER_SPACES.sub("\0", body) if len(parts) == 1 else " ".join(listed)
        return [head, *_wrapped(body, inner, width), f"{indent}{tail}{_FMT_SKIP}"]
    if len(parts) == 1 and not body.rstrip().endswith(","):
        return [head, *folded(f"{inner}{body}", width), f"{indent}{tail}"]
    return [head, *(each for part in parts for each in folded(f"{inner}{part.strip()},", width)), f"{indent}{tail}"]


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


def _assignment(line: str) -> tuple[str, str]:
    """A statement up to its value, and the value."""
    if line.lstrip().startswith("return "):
        return line[: line.index("return ") + 7], line.strip()[7:]
    for place, letter, depth in _walk(line):
        if letter == "=" and not depth and line[place - 1] in " +-*" and line[place + 1] == " ":
            return line[: place + 2], line[place + 2 :]
    return line, ""


def _has_operators(text: str) -> bool:
    """Whether there are operators outside of brackets."""
    return any(
        not depth and letter in "+-*/&|<>" and text[place + 1 : place + 2] == " "
        for place, letter, depth in _walk(text)
    )


def _matching(line: str, opening: int) -> int:
    level = None
    for place, letter, depth in _walk(line):
        if place == opening:
            level = depth
        elif level is not None and letter in _CLOSE and depth == level:
            return place
    raise ValueError(f"a bracket is not closed: {line}")


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
