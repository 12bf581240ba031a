"""Storage formats of buffers: a file per format, written once in the graph's operations.

Modules of this package are imported automatically; `master_format` registers a format for `master_weights`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .blocks import BLOCK, entries_before, lie_in_rows, rows_of, shape_of_entries
from .format import (
    INTEGERS,
    Array,
    Codec,
    Storage,
    Term,
    codec_of,
    dtype_name,
    evaluated,
    is_coarse,
    read_arrays,
    stored_in,
    values_of,
)
from .master import Master
from .masters import MASTER_FORMATS, MasterFormat
from .plain import Plain
from .remainder import Remainder
from .states import (
    STATE_FORMATS,
    block_names,
    entries_of,
    kept_in_blocks,
    state_format,
    states_in_blocks,
    with_code_names,
)
from .stochastic import Stochastic, bits_graph, keys_graph, random_tensor, stream_of
from .stored import Leaf, Stored

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
