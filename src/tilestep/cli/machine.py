"""Problems of a machine, each with a remedy: the second part of `tilestep version`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch

from ..backends.cpp.compile import FLAGS, compiler, user_flags
from ..kernels.cache import cache_directory, forget_directory
from ..native import module

OLDEST_TORCH = (2, 11)
_ANOTHER = "Install another, or set CXX to it."
_WITHOUT_COMPILER = "rules on the CPU run as eager PyTorch, which is slow"

PROBE = """
#include <cmath>
#include <cstdint>
extern "C" int64_t probe(int64_t n) {
  int64_t sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += i;
  return sum;
}
"""
"""A program with the requirements of generated kernels: standard headers, and OpenMP."""


def facts() -> dict[str, str]:
    """The cache directory, and whether the native extension is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = str(cache_directory())
    if os.environ.get("TILESTEP_NATIVE") == "0":
        extension = "off (TILESTEP_NATIVE=0)"
    elif compiler() is None:
        extension = "not built (no compiler)"
    else:
        extension = (
            "built" if module(0) is not None else "not built yet (the first step of 16 or more tensors builds it)"
        )
    return {"cache": folder, "extension": extension}


def problems() -> list[str]:
    """Problems of this machine, in one or two sentences each; empty if everything works."""
    checks = (_system, _torch, _cache, _compiler, _headers, _native, _gpu, _triton)
    return [sentence for check in checks if (sentence := check()) is not None]


def _system() -> str | None:
    if sys.platform == "linux":
        return None
    return f"tilestep is tested on Linux only; this is {sys.platform}. Use Linux, a container or WSL."


def _torch() -> str | None:
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= OLDEST_TORCH:
        return None
    least = ".".join(map(str, OLDEST_TORCH))
    return f"torch {torch.__version__} is older than {least}. Install a newer one: pip install 'torch>={least}'."


def _cache() -> str | None:
    forget_directory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache_directory()
    if not caught:
        return None
    reason = str(caught[0].message).rpartition("each process: ")[2]
    return (
        f"the cache folder cannot be used, so kernels are built again in each process: {reason}. "
        "Set TILESTEP_CACHE_DIR to a folder that only you can write to."
    )


def _compiler() -> str | None:
    """Problems of the compiler, which must build loadable code with OpenMP."""
    command = compiler()
    if command is None:
        if chosen := os.environ.get("CXX"):
            return f"CXX={chosen} is not there, so {_WITHOUT_COMPILER}. Unset CXX, or set it to a compiler."
        return f"no C++ compiler was found, so {_WITHOUT_COMPILER}. Install one (apt install g++), or set CXX to it."
    name = " ".join(command)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = cache_directory()
    with tempfile.TemporaryDirectory(dir=folder, prefix="probe-") as temporary:
        library = Path(temporary) / "probe.so"
        build = [*command, *FLAGS, *user_flags(), "-x", "c++", "-", "-o", str(library)]
        try:
            done = subprocess.run(build, input=PROBE, capture_output=True, encoding="utf-8", timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            return f"the C++ compiler {name} cannot be run ({error}). {_ANOTHER}"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
            reason = lines[0].strip() if lines else f"exit code {done.returncode}"
            return f"the C++ compiler {name} fails ({reason}). Install g++ with OpenMP, or set CXX to another."
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            return (
                f"code from the C++ compiler cannot be loaded ({error}). Set TILESTEP_CACHE_DIR to a folder from which "
                "code may be run."
            )
        if loaded.probe(ctypes.c_int64(10)) != 45:
            return f"the C++ compiler {name} builds code that computes wrong sums. {_ANOTHER}"
    return None


def _headers() -> str | None:
    """Problems of Python's headers, which the native extension and Triton's launchers need."""
    include = Path(sysconfig.get_paths()["include"])
    if (include / "Python.h").exists():
        return None
    launchers = " and Triton's launchers" if torch.cuda.is_available() else ""
    return (
        f"Python's headers are missing ({include}/Python.h), so the native extension{launchers} cannot be built. "
        "Install them (apt install python3-dev)."
    )


def _native() -> str | None:
    if os.environ.get("TILESTEP_NATIVE") != "0":
        return None
    return (
        "TILESTEP_NATIVE=0 turns the native extension off, so steps of hundreds of tensors take the host longer. "
        "Unset it."
    )


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _gpu() -> str | None:
    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs, which are not supported. Use NVIDIA GPUs, or the CPU."
    if torch.cuda.is_available() or not _has_driver():
        return None
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA, so the GPU is not used. "
            "Install torch with CUDA: https://pytorch.org/get-started."
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU. Unset it to use them."
    try:
        torch.cuda.init()
        reason = "it sees no device"
    except RuntimeError as error:
        reason = str(error).splitlines()[0].strip().rstrip(".")
    return (
        f"there is an NVIDIA driver, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: "
        f"{reason}. Update the driver, or install a torch for an older CUDA."
    )


def _triton() -> str | None:
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is not None:
        return None
    return "Triton is not installed, so steps on the GPU run no kernels. Install it: pip install 'tilestep[gpu]'."
