"""Storage formats in Triton: for each a function that joins the elements of its arrays to numbers, and one that splits
them."""

from __future__ import annotations

from collections.abc import Iterable

from ..graph import Value, ancestors
from ..storage import Storage, bits_graph, codec_of, keys_graph
from .emit import Writer
from .triton_names import TritonNames
from .triton_text import writer_of


def format_functions(storages: Iterable[Storage], quick: bool) -> list[list[str]]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`.

    Quick ones round as quick math does, beside which numbers are off as far anyway.
    """
    functions: list[list[str]] = []
    for title, codec in {storage.title: codec_of(storage) for storage in storages}.items():
        if codec.is_plain:
            continue
        arrays = [codec.arrays[place].name for place in codec.reads]
        is_quick = quick and not codec.is_random
        if not codec.is_element:
            functions.append(_function(f"join_{title}", arrays, [codec.loaded], is_quick))
        random = ["random"] if codec.is_random else []
        functions.append(_function(f"split_{title}", ["number", *random], codec.stored, is_quick))
    return functions


def random_functions(slots: Iterable[int]) -> list[list[str]]:
    """What makes random bits: the keys of a tensor at a step, and the bits of an element for each of these slots."""
    functions = [_function("stream_keys", ["low", "high", "count"], keys_graph())]
    for slot in slots:
        head, *body = _function(f"random_{slot}", ["key_0", "key_1", "index"], [bits_graph(slot)])[1:]
        halves = ["    low = index.to(tl.int32)", "    high = (index >> 32).to(tl.int32)"]
        functions.append(["@triton.jit", head, *halves, *body])
    return functions


def _function(name: str, parameters: Iterable[str], roots: Iterable[Value], quick: bool = False) -> list[str]:
    writer = _written(roots, quick)
    returned = ", ".join(writer[root] for root in roots)
    return ["@triton.jit", f"def {name}({', '.join(parameters)}):", *writer.lines, f"    return {returned}"]


def _written(roots: Iterable[Value], quick: bool) -> Writer:
    """A writer that has written a format's graph in statements."""
    writer = writer_of("float32", "    ", TritonNames(["number"]), quick, quick)
    writer.spelling = {**writer.spelling, "abs": "absolute({0})"}
    values = ancestors(roots)
    for value in values:
        if value.operation == "load":
            writer.bind(value, value.attribute)
    writer.write(values)
    return writer
