"""Builds the kernels of a first step for a GPU that is not here, one by one or together; prints what came out as JSON.

`python built_together.py RULE serial|together|failing DIRECTORY`; generated code is kept in DIRECTORY, Triton's
cache under the mode's name in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from absent_gpu import absent_gpu
from first_builds import DEVICE, DTYPES, first_launches

import tilestep
from tilestep import compat
from tilestep.kernels import launch
from tilestep.kernels.launch import build_together

SHAPES = [[64, 64], [3, 70], [64], [4, 3, 3]]


def built(directory: Path) -> dict[str, str]:
    """A hash of every kernel and of every launcher by its path in Triton's cache."""
    files = [path for path in directory.rglob("*") if path.suffix in (".cubin", ".ptx", ".so")]
    contents = {str(path.relative_to(directory)): path.read_bytes() for path in files}
    # What gcc makes holds the name of a temporary file.
    return {name: "" if name.endswith(".so") else hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("this thread is out of luck")


def main() -> None:
    """Build, and tell of it."""
    rule, mode, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ["TILESTEP_CACHE_DIR"] = str(directory / "tilestep")
    os.environ["TRITON_CACHE_DIR"] = str(directory / mode)
    warnings.simplefilter("ignore")
    launch._processors = lambda: 4
    os.environ["TILESTEP_BUILD_THREADS"] = "4"
    dtype = torch.float32 if rule == "Muon" else DTYPES["bf16"]
    shapes = [shape for shape in SHAPES if rule != "Muon" or len(shape) == 2]
    with absent_gpu(directory):
        launches = first_launches(rule, shapes, dtype)
        from triton.compiler import CompiledKernel

        ahead = 0
        if mode == "failing":
            with mock.patch.object(compat._Compilers, "_compile", fail):
                build_together(launches, DEVICE)
            assert not tilestep.compile_count() and not any(launcher.is_built for launcher, _ in launches)
        elif mode == "together":
            build_together(launches, DEVICE)
            ahead = tilestep.compile_count()
        for launcher, arguments in launches:
            launcher.build(*arguments)
        assert isinstance(launches[0][0].compile(launches[0][1]), CompiledKernel)
    files = built(directory / mode)
    print(json.dumps({"files": files, "ahead": ahead, "count": tilestep.compile_count(), "launches": len(launches)}))


if __name__ == "__main__":
    main()
