"""Shorter spellings of several operations stand for these operations alone."""

from __future__ import annotations

import pytest

from tilestep.backends.triton.text import TritonNames, writer_of
from tilestep.graph import Level, Value
from tilestep.graph.ir import Builder, ancestors


def written(result: Value) -> str:
    writer = writer_of("float32", "", TritonNames(), quick=True, fuses=True, in_pairs=True)
    loads = [value for value in ancestors([result]) if value.operation == "load"]
    for load in loads:
        writer.bind(load, load.attribute)
    writer.write(ancestors([result]))
    return "\n".join([*writer.lines, writer[result]])


def largest_root(plus: float) -> Value:
    build = Builder()
    total = build.apply("add", build.load("x"), build.constant(plus))
    most = build.apply("block_max", build.apply("bits", total, dtype="int32"), dtype="int32")
    return build.apply("sqrt", build.apply("of_bits", most))


def largest_bits(mask: int) -> Value:
    build = Builder()
    bits = build.apply("bits", build.load("x"), dtype="int32")
    return build.apply("block_max", build.apply("bit_and", bits, build.integer(mask), dtype="int32"), dtype="int32")


def root_of_product(floor: float) -> Value:
    build = Builder()
    product = build.apply("mul", build.load("x"), build.load("y"))
    least = build.constant(floor)
    larger = build.apply("where", build.apply("gt", product, least), product, least)
    return build.apply("root", larger, level=Level.ELEMENT)


@pytest.mark.parametrize(
    ("made", "nothing", "something", "shorter"),
    [
        (largest_root, 0.0, 1.0, "largest_in_block(tl.sqrt(x))"),
        (largest_bits, 0x7FFFFFFF, 0x00FFFFFF, "bits_of(largest_in_block(absolute(x)))"),
        (root_of_product, 2.0**-96, 0.5, "tl.sqrt(x) * tl.sqrt(y)"),
    ],
)
def test_another_constant_is_kept(made: object, nothing: float, something: float, shorter: str) -> None:
    """An addition of any number, a mask of any bits and any least value were taken for those that change nothing."""
    assert callable(made)
    assert shorter in written(made(nothing))
    other = written(made(something))
    assert shorter not in other and repr(something) in other
