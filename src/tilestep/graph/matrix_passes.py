"""Matrix passes: work on whole matrices between tile passes, and the scratch arrays through which they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import RuleError
from ..matrices import MATRIX_OPERATIONS
from .ir import Graph, Level, Value, ancestors
from .matrices import is_matrix_work
from .passes import TilePass

Condition = tuple[Value, bool]
"""A truth value of hyperparameters and the step, and what it must be."""


@dataclass
class MatrixPass:
    """Work on whole matrices after a tile pass, done for all tensors of a shape at once.

    Args:
        inputs: the scratch array in which the tile pass left an element-level value, by identity.
        needed: for a value that is not always needed, conditions of which one must be as it says, by identity.
    """

    values: list[Value] = field(default_factory=list)  # what is computed, in order
    inputs: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)  # the scratch array to which a result goes, by identity
    states: dict[str, Value] = field(default_factory=dict)  # new values of matrix states, stored at its end
    needed: dict[int, list[Condition]] = field(default_factory=dict)


@dataclass
class MatrixProgram:
    """All matrix work of a program.

    Args:
        passes: the pass after each tile pass; None where there is none.
        scratch: every scratch array, of the parameter's shape, and its type; None for the type computed in.
    """

    passes: list[MatrixPass | None] = field(default_factory=list)
    scratch: dict[str, torch.dtype | None] = field(default_factory=dict)

    def numbers(self) -> list[Value]:
        """The arguments of operations that must be known before the step."""
        found: dict[int, Value] = {}
        for library in self.passes:
            for value in library.values if library else ():
                operation = MATRIX_OPERATIONS.get(value.operation)
                found.update({id(arg): arg for arg in value.args[operation.operands :]} if operation else {})
        return list(found.values())


def stage_of(value: Value, stages: dict[int, int]) -> int:
    """The first tile pass that could use a value of matrix work, given its arguments' stages."""
    return max(stages[id(arg)] + (not is_matrix_work(arg)) for arg in value.args)


def plan(graph: Graph, stages: dict[int, int], tiles: Sequence[TilePass]) -> MatrixProgram:
    """Put matrix work between the tile passes, which write its operands and read its results."""
    work = [value for value in graph.values() if is_matrix_work(value)]
    _check(graph, work)
    if not work:
        return MatrixProgram()
    library = MatrixProgram([None] * len(tiles))
    results = [value for value in work if value.level is Level.ELEMENT]
    handed_over = {id(arg) for node in graph.values() if not is_matrix_work(node) for arg in node.args}
    handed_over |= {id(value) for value in graph.outputs.values()}
    conditions = _conditions(graph)
    states = {name: value for name, value in graph.outputs.items() if name in graph.matrix_states}
    ends = {index: [value for value in results if stages[id(value)] == index + 1] for index in range(len(tiles))}
    # New values of matrix states replace the old ones in the last pass, where nothing needs those any more.
    final = max(stages[id(value)] - 1 for value in [*results, *filter(is_matrix_work, states.values())])
    ends[final] += filter(is_matrix_work, states.values())
    for index, roots in ends.items():
        inside = _needed(roots, index, stages)
        if not inside:
            continue
        matrix_pass = library.passes[index] = MatrixPass([value for value in work if id(value) in inside])
        matrix_pass.needed = {key: found for key in inside if (found := conditions[key]) is not None}
        matrix_pass.states = states if index == final else {}
        for value in matrix_pass.values:
            for arg in _matrices(value):
                if is_matrix_work(arg) and id(arg) not in inside:
                    handed_over.add(id(arg))
                elif arg.level is Level.ELEMENT and id(arg) not in inside:
                    _take_in(library, index, tiles[index], value, arg)
    for value in results:
        if id(value) in handed_over:
            _hand_over(library, value, stages[id(value)], tiles)
    return library


def _take_in(library: MatrixProgram, index: int, tile: TilePass, value: Value, arg: Value) -> None:
    """Let a tile pass write an operand of matrix work; where two take it in different types, in the one computed in."""
    known = [
        matrix_pass.inputs[id(arg)]
        for matrix_pass in library.passes[: index + 1]
        if matrix_pass and id(arg) in matrix_pass.inputs
    ]
    name = known[0] if known else _scratch(library, value)
    if not known:
        tile.stores[name] = arg
    elif library.scratch[name] is not _dtype(value):
        library.scratch[name] = None
    matrix_pass = library.passes[index]
    assert matrix_pass is not None
    matrix_pass.inputs[id(arg)] = name


def _conditions(graph: Graph) -> dict[int, list[Condition] | None]:
    """When each value is needed: one of these conditions must be as it says; None for always.

    What stands in one branch of a `where` on hyperparameters and the step is needed only if that branch is taken.
    """
    found: dict[int, list[Condition] | None] = {id(value): None for value in graph.outputs.values()}
    for node in reversed(graph.values()):
        chooses = node.operation == "where" and node.args[0].level is Level.GROUP
        for place, arg in enumerate(node.args):
            use = [(node.args[0], place == 1)] if chooses and place > 0 else found[id(node)]
            known = found.setdefault(id(arg), [])
            found[id(arg)] = (
                None if use is None or known is None else [*known, *(one for one in use if one not in known)]
            )
    return found


def _matrices(value: Value) -> tuple[Value, ...]:
    """The arguments of matrix work that are not numbers known before the step."""
    operation = MATRIX_OPERATIONS.get(value.operation)
    return value.args[: operation.operands] if operation else value.args


def _needed(roots: Sequence[Value], index: int, stages: dict[int, int]) -> set[int]:
    """What the pass after tile pass `index` computes: its results, and matrices of other shapes on the way to them."""
    inside: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        inside.add(id(value))
        for arg in _matrices(value):
            on_the_way = arg.level is Level.MATRIX or stages[id(arg)] == index + 1
            if is_matrix_work(arg) and on_the_way and id(arg) not in inside:
                waiting.append(arg)
    return inside


def _hand_over(library: MatrixProgram, value: Value, stage: int, tiles: Sequence[TilePass]) -> None:
    """Let a result of matrix work be read by later passes."""
    matrix_pass = library.passes[stage - 1]
    assert matrix_pass is not None
    name = matrix_pass.outputs[id(value)] = _scratch(library, value)
    for index in range(stage, len(tiles)):
        tiles[index].loads[id(value)] = name
        following = library.passes[index]
        if following is not None:
            following.inputs[id(value)] = name


def _scratch(library: MatrixProgram, value: Value) -> str:
    """A new scratch array, of the type that this matrix work takes and gives."""
    name = f"scratch_{len(library.scratch)}"
    library.scratch[name] = _dtype(value)
    return name


def _dtype(value: Value) -> torch.dtype | None:
    operation = MATRIX_OPERATIONS.get(value.operation)
    return operation.dtype if operation else None


def _check(graph: Graph, work: Sequence[Value]) -> None:
    inside = {id(value) for value in work}
    for node in graph.values():
        if id(node) not in inside and any(arg.level is Level.MATRIX for arg in node.args):
            raise RuleError(
                f"{node.line}: {graph.title} uses {node.operation} on a matrix that has not its parameter's shape; "
                f"only {', '.join(MATRIX_OPERATIONS)} take one"
            )
    for node in work:
        operation = MATRIX_OPERATIONS.get(node.operation)
        for number in node.args[operation.operands :] if operation else ():
            reached = ancestors([number])
            if any(value.operation == "load" or value.attribute == "step" for value in reached) or (
                number.level > Level.GROUP
            ):
                raise RuleError(
                    f"{node.line}: in rule {graph.title}: the numbers that {node.operation} takes must be known before "
                    "the step: make them of hyperparameters alone"
                )
