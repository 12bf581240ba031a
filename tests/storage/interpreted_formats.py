"""Run by test_formats.py under TRITON_INTERPRET=1: the rows of storage formats, by Triton kernels on CPU tensors."""

from __future__ import annotations

import warnings

import torch
from block_rows import (
    FORMATS,
    SHAPES,
    check_blocks,
    check_float8,
    check_infinite_blocks,
    check_infinities,
    check_largest_roots,
)
from format_rows import ROWS, backend, check_kept, check_training
from random_rows import check_elements, check_states

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with backend("triton"):
        for row in ROWS.values():
            check_kept(row, few=True)
            check_training(row, "AdamW", steps=4)
        check_training(ROWS["remainder"], "LAMB", steps=2)  # sums over tensors are slow there
        for format in FORMATS:
            check_blocks(format, [*SHAPES[2:4], (640,)])
            check_blocks(format, [(4, 3, 96)], strided=True)
            check_blocks(format, [(5, 130), (3, 320), (6, 40)], over_rows=True)
            check_blocks(format, [(4, 3, 96)], strided=True, over_rows=True)
        check_infinities()
        check_infinities(over_rows=True)
        for dtype in (torch.float32, torch.bfloat16):
            check_infinite_blocks(dtype)
            check_largest_roots(dtype)
            check_float8(dtype, few=True)
        check_elements(torch.bfloat16, few=True)
        for format in ("float16", *FORMATS):
            check_states(format, [(4, 3, 96)])
    print("all equal")
