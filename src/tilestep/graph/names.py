"""Where in a rule something happens, and which variable a line assigns: generated code carries the rule's own names."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import traceback
import types
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rule is: `file:line`, the variable that the statement assigns to, and `file:line` where that begins."""

    line: str
    name: str
    statement: str


def rule_place() -> Place:
    """The place of the innermost frame outside torch and this package's machinery."""
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    if frame is None:
        return Place("<unknown>", "", "<unknown>")
    file = frame.f_code.co_filename
    linecache.lazycache(file, frame.f_globals)  # for modules that do not lie in files
    first, name = _assigned(frame.f_code, frame.f_lineno)
    return Place(f"{file}:{frame.f_lineno}", name, f"{file}:{first}")


def raised_at(error: BaseException) -> str:
    """`file:line` of the rule's innermost frame that an error came through, or an empty string."""
    frames = list(traceback.walk_tb(error.__traceback__))
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if not _is_internal(frame)]
    return lines[-1] if lines else ""


def is_of_torch(error: BaseException) -> bool:
    """Whether torch has raised an error, and not the rule."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch")


def _is_internal(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch", "tilestep.graph", "tilestep.matrices", "contextlib")) or module in (
        "tilestep.rules.scalars",
        "tilestep.rules.protocol",
    )


def _assigned(code: types.CodeType, line: int) -> tuple[int, str]:
    """First line and variable of the statement at this line of this code; no variable if it assigns to none."""
    for first, last, name in _assignments(code):
        if first <= line <= last:
            return first, name
    return line, ""


@functools.lru_cache(maxsize=256)
def _assignments(code: types.CodeType) -> tuple[tuple[int, int, str], ...]:
    try:
        # Not inspect.getsource: to find the code's module it looks through all there are, for tens of milliseconds.
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (OSError, SyntaxError, TypeError):
        return ()
    found = []
    for node in ast.walk(tree):
        name = _target(node)
        if name and isinstance(node, ast.stmt):
            offset = code.co_firstlineno - 1
            found.append((node.lineno + offset, (node.end_lineno or node.lineno) + offset, name))
    return tuple(found)


def _target(node: ast.AST) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _root(node.value)
    return ""


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) and node.id != "torch" else ""
