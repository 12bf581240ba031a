"""Storage formats in C++: for each a function that joins its arrays' elements to a number, and one that splits it."""

from __future__ import annotations

from collections.abc import Iterable

from ..graph import Value, ancestors
from ..storage import Codec, Storage, codec_of, dtype_name
from .cpp_names import CppNames
from .cpp_text import C_TYPES, writer_of
from .emit import Writer


def format_functions(storages: Iterable[Storage]) -> list[str]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`."""
    chosen = {storage.title: codec_of(storage) for storage in storages if not codec_of(storage).is_plain}
    return [text for title, codec in chosen.items() for text in (_join(title, codec), _split(title, codec))]


def _written(roots: Iterable[Value]) -> Writer:
    """A writer that has written a format's graph in statements."""
    writer = writer_of("float", "  ", CppNames(["number"]))
    values = ancestors(roots)
    for value in values:
        if value.operation == "load":
            writer.bind(value, value.attribute)
    writer.write(values)
    return writer


def _join(title: str, codec: Codec) -> str:
    writer = _written([codec.loaded])
    arrays = [codec.arrays[place] for place in codec.reads]
    parameters = ", ".join(f"const {C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array in arrays)
    body = [*writer.lines, f"  return {writer[codec.loaded]};"]
    return "\n".join([f"inline float join_{title}({parameters}) {{", *body, "}"])


def _split(title: str, codec: Codec) -> str:
    writer = _written(codec.stored)
    parameters = ", ".join(f"{C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array in codec.arrays)
    body = list(writer.lines)
    for array, value in zip(codec.arrays, codec.stored):
        # Of a type with bits these alone: GCC does not vectorize the copy of a structure.
        bits = ".bits" if array.dtype.is_floating_point and array.dtype.itemsize == 2 else ""
        body.append(f"  {array.name}{bits} = {writer[value]}{bits};")
    return "\n".join([f"inline void split_{title}({parameters}, float number) {{", *body, "}"])
