"""Storage formats in C++: for each a function that joins its arrays' elements to a number, and one that splits it.

A format of blocks has three for the way back: what is reduced over a block, what is kept of the block, and what of an
element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph import Value, ancestors
from ..storage import BLOCK, Array, Codec, Storage, bits_graph, codec_of, dtype_name, keys_graph
from .cpp_names import CppNames
from .cpp_text import C_TYPES, writer_of
from .emit import Writer


def format_functions(storages: Iterable[Storage]) -> list[str]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`; with
    blocks also `measure_<title>` and `keep_<title>`."""
    chosen = {storage.title: codec_of(storage) for storage in storages if not codec_of(storage).is_plain}
    return [text for title, codec in chosen.items() for text in _functions(title, codec)]


def _functions(title: str, codec: Codec) -> list[str]:
    if codec.largest is None:
        return [*([] if codec.is_element else [_join(title, codec)]), _split(title, codec)]
    return [_join(title, codec), *_split_blocks(title, codec, codec.largest)]


def _written(roots: Iterable[Value], bound: Sequence[tuple[Value, str]] = ()) -> Writer:
    """A writer that has written a format's graph in statements; some of its values are there already."""
    writer = writer_of("float", "  ", CppNames(["number", "is_odd", "largest", "stored_scale"]))
    for value, name in bound:
        writer.bind(value, name)
    values = _needed(roots, {id(value) for value, _ in bound})
    for value in values:
        if value.operation == "load" and id(value) not in writer.expressions:
            writer.bind(value, value.attribute)
    writer.write(values)
    return writer


def _needed(roots: Iterable[Value], known: set[int]) -> list[Value]:
    """The roots and what they depend on, but for what is known only to what is known."""
    chosen: set[int] = set()
    stack = list(roots)
    listed = ancestors(stack)
    while stack:
        value = stack.pop()
        if id(value) not in chosen:
            chosen.add(id(value))
            stack += [] if id(value) in known else value.args
    return [value for value in listed if id(value) in chosen]


def _constant(array: Array) -> str:
    return f"const {C_TYPES[dtype_name(array.dtype)]}& {array.name}"


def _join(title: str, codec: Codec) -> str:
    writer = _written([codec.loaded])
    parameters = [_constant(codec.arrays[place]) for place in codec.reads]
    if codec.is_packed:
        parameters.append("int64_t is_odd")
    body = [*writer.lines, f"  return {writer[codec.loaded]};"]
    return "\n".join([f"inline float join_{title}({', '.join(parameters)}) {{", *body, "}"])


def _split(title: str, codec: Codec) -> str:
    writer = _written(codec.stored)
    parameters = ", ".join(f"{C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array in codec.arrays)
    body = list(writer.lines)
    for array, value in zip(codec.arrays, codec.stored):
        body.append(_assignment(array, writer[value]))
    return "\n".join([f"inline void split_{title}({parameters}, float number{_random(codec)}) {{", *body, "}"])


def _random(codec: Codec) -> str:
    return ", int32_t random" if codec.is_random else ""


def random_functions(slots: Iterable[int]) -> list[str]:
    """What makes random bits: the keys of a tensor at a step, and the bits of an element for each of these slots."""
    heads = {
        f"stream_key_{place}(int32_t low, int32_t high, int32_t count)": key for place, key in enumerate(keys_graph())
    }
    heads.update({f"random_{slot}(int32_t key_0, int32_t key_1, int64_t index)": bits_graph(slot) for slot in slots})
    functions = []
    for head, root in heads.items():
        writer = _written([root])
        halves = ["  const int32_t low = int32_t(index), high = int32_t(index >> 32);"] if "index" in head else []
        functions.append(
            "\n".join([f"inline int32_t {head} {{", *halves, *writer.lines, f"  return {writer[root]};", "}"])
        )
    return functions


def _assignment(array: Array, element: str) -> str:
    # Of a type with bits these alone: GCC does not vectorize the copy of a structure.
    bits = ".bits" if array.dtype.is_floating_point and array.dtype.itemsize == 2 else ""
    return f"  {array.name}{bits} = {element}{bits};"


def _split_blocks(title: str, codec: Codec, largest: Value) -> list[str]:
    (measured,) = largest.args
    measure = _written([measured])
    functions = [
        "\n".join(
            [f"inline int32_t measure_{title}(float number) {{", *measure.lines, f"  return {measure[measured]};", "}"]
        )
    ]
    stored = list(zip(codec.arrays, codec.stored))
    of_block = [(array, value) for array, value in stored if array.elements == BLOCK]
    keep = _written([value for _, value in of_block], [(largest, "largest")])
    parameters = ", ".join(f"{C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array, _ in of_block)
    lines = [*keep.lines, *(_assignment(array, keep[value]) for array, value in of_block)]
    functions.append("\n".join([f"inline void keep_{title}({parameters}, int32_t largest) {{", *lines, "}"]))
    (value,) = [value for array, value in stored if array.elements != BLOCK]
    value = value.args[0] if value.operation == "pack" else value
    split = _written([value], [(value, array.name) for array, value in of_block])
    kind = C_TYPES[value.dtype]
    parameters = ", ".join(_constant(array) for array, _ in of_block)
    head = f"inline {kind} split_{title}({parameters}, float number{_random(codec)}) {{"
    functions.append("\n".join([head, *split.lines, f"  return {split[value]};", "}"]))
    return functions
