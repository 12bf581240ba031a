"""docs/frameworks/matrix.md: every cell is tried with the real framework, and the page says what came of it."""

from __future__ import annotations

import importlib.util
import re
import warnings

import cells
import pytest

TRIED = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed"))
    for name in cells.FRAMEWORKS
]


def committed() -> dict[str, dict[str, str]]:
    """What the page says, rows with refusals and the others, as `cells.outcomes` does."""
    text = cells.PAGE.read_text()
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    said: dict[str, dict[str, str]] = {}
    for mode, part in zip(("integrated", "alone"), text.split("\n## ")[1:3]):
        for line in part.splitlines():
            columns = [column.strip() for column in line.strip("|").split(" | ")]
            if len(columns) != 2 + len(cells.FEATURES) or columns[1] not in cells.MAKES:
                continue
            framework = columns[0].strip("| []").partition("]")[0]
            for feature, cell in zip(cells.FEATURES, columns[2:]):
                number = re.fullmatch(r"refused \((\d+)\)", cell)
                said.setdefault(framework, {})[f"{columns[1]}|{feature}|{mode}"] = notes[number[1]] if number else cell
    return {framework: said[framework] for framework in cells.FRAMEWORKS}


def test_the_page_is_as_it_is_written() -> None:
    said = committed()
    assert cells.page(said) == cells.PAGE.read_text()
    assert not any("other numbers" in cell for framework in said.values() for cell in framework.values())


@pytest.mark.parametrize("framework", TRIED)
def test_what_the_page_says_of_one_rank(framework: str) -> None:
    with warnings.catch_warnings(), cells.alone():
        outcomes = cells.outcomes(framework, cells.FEATURES[:-1])
    said = committed()[framework]
    assert {cell: cells.sentence(text) for cell, text in outcomes.items()} == {cell: said[cell] for cell in outcomes}


@pytest.mark.parametrize("framework", TRIED)
def test_what_the_page_says_of_two_ranks(framework: str) -> None:
    outcomes = cells.on_two_ranks(framework)
    said = committed()[framework]
    assert {cell: cells.sentence(text) for cell, text in outcomes.items()} == {cell: said[cell] for cell in outcomes}


@pytest.mark.parametrize("framework", TRIED[1:])
def test_a_clip_and_a_second_backward_change_the_numbers(framework: str) -> None:
    """Else a clip that does not happen would not be seen."""
    plain = cells.expected(framework, cells.dtype_of("plain"))
    clipped = cells.expected(framework, cells.dtype_of("plain"), clip=True)
    assert plain[0] == clipped[0] and abs(plain[-1] - clipped[-1]) > 1e-3
