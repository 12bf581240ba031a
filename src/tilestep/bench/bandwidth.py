"""What memory can do here: a copy, a flat read and a plain loop, measured as contenders beside the others."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..devices import has_streams
from .measure import Contender

COPY = "copy"
READ = "flat read"
PLAIN_LOOP = "plain loop"
LOOP_OVER_TENSORS = "plain loop over tensors"

SOURCE = """
#include <cstdint>
template <typename T>
static void update(T *__restrict p, const T *__restrict g, T *__restrict m, T *__restrict v, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        T x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}
template <typename T>
static void update_each(T *const *p, T *const *g, T *const *m, T *const *v, const int64_t *n, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < count; ++t) {
        T *__restrict pt = p[t], *__restrict mt = m[t], *__restrict vt = v[t];
        const T *__restrict gt = g[t];
#pragma omp simd
        for (int64_t i = 0; i < n[t]; ++i) {
            T x = gt[i];
            pt[i] += x;
            mt[i] += x;
            vt[i] += x;
        }
    }
}
extern "C" void update_each_4(uint32_t **p, uint32_t **g, uint32_t **m, uint32_t **v, const int64_t *n, int64_t count) {
    update_each(p, g, m, v, n, count);
}
extern "C" void update_each_2(uint16_t **p, uint16_t **g, uint16_t **m, uint16_t **v, const int64_t *n, int64_t count) {
    update_each(p, g, m, v, n, count);
}
extern "C" void update_4(uint32_t *p, uint32_t *g, uint32_t *m, uint32_t *v, int64_t n) { update(p, g, m, v, n); }
extern "C" void update_2(uint16_t *p, uint16_t *g, uint16_t *m, uint16_t *v, int64_t n) { update(p, g, m, v, n); }
"""


def copy(device: torch.device, size: int) -> Contender:
    """Return a copy of one buffer to another; it moves every byte twice.

    >>> copy(torch.device("cpu"), 1000).bytes_moved
    2000
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Contender(COPY, lambda: target.copy_(source), bytes_moved=2 * size)


def flat_reads(device: torch.device, size: int) -> list[Contender]:
    """Return reductions that read one flat fp32 buffer once; the fastest of them is what a read can reach.

    >>> [contender.bytes_moved for contender in flat_reads(torch.device("cpu"), 1000)]
    [1000, 1000]
    """
    flat = torch.full((size // 4,), 1e-3, device=device)
    bytes_moved = flat.numel() * 4
    contenders = [
        Contender(f"{READ} (sum)", flat.sum, bytes_moved),
        Contender(f"{READ} (norm)", lambda: torch.linalg.vector_norm(flat), bytes_moved),
    ]
    if has_streams(device):
        from .flat_read import flat_read

        contenders.append(Contender(f"{READ} (tiles)", lambda: flat_read(flat), bytes_moved))
    return contenders


def plain_loop(elements: int, dtype: torch.dtype) -> Contender | None:
    """Return a compiled loop over four flat arrays with AdamW's traffic, reading four and writing three of them.

    Without a compiler there is none: None.

    >>> loop = plain_loop(1000, torch.float32)
    >>> loop is None or loop.bytes_moved == 28000
    True
    """
    size = dtype.itemsize
    update = _compiled(f"update_{size}")
    if update is None:
        return None
    integer = {2: torch.int16, 4: torch.int32}[size]
    arrays: list[Tensor] = [torch.ones(elements, dtype=integer) for _ in range(4)]
    addresses = [ctypes.c_void_p(array.data_ptr()) for array in arrays]

    def call(arrays: list[Tensor] = arrays) -> None:  # the default keeps the arrays alive
        update(*addresses, ctypes.c_int64(elements))

    return Contender(PLAIN_LOOP, call, bytes_moved=7 * elements * size)


def loop_over_tensors(sizes: Sequence[int], dtype: torch.dtype) -> Contender | None:
    """Return `plain_loop` over as many arrays as a model has tensors, each an allocation of its own.

    >>> loop = loop_over_tensors([10, 990], torch.float32)
    >>> loop is None or loop.bytes_moved == 28000
    True
    """
    update = _compiled(f"update_each_{dtype.itemsize}")
    if update is None:
        return None
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    arrays = [[torch.ones(size, dtype=integer) for size in sizes] for _ in range(4)]
    tables = [torch.tensor([array.data_ptr() for array in each] or [0]) for each in arrays]
    tables.append(torch.tensor(list(sizes) or [0]))
    addresses = [ctypes.c_void_p(table.data_ptr()) for table in tables]

    def call(held: object = (arrays, tables)) -> None:  # the default keeps the arrays alive
        update(*addresses, ctypes.c_int64(len(sizes)))

    return Contender(LOOP_OVER_TENSORS, call, bytes_moved=7 * sum(sizes) * dtype.itemsize)


def _compiled(function: str) -> Callable[..., None] | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return None
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        source.write_text(SOURCE)
        command = [*compiler.split(), *flags, str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return None
        compiled = getattr(ctypes.CDLL(str(library)), function)
    compiled.restype = None
    return compiled
