"""Ejected files run by Triton's interpreter on CPU tensors, beside tilestep's own kernels in it: equal bits."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from ejected_modules import staged
from format_rows import backend

import tilestep
from tilestep.backends.triton import support
from tilestep.backends.tuning import TileShape, forced_shape
from tilestep.eject import Request, ejected

SHAPES = [(7,), (), (40, 70), (3, 5, 33), (600,), (0,)]

RULES = {
    "AdamW": (torch.float32, torch.bfloat16),
    "Lion": (torch.float32, torch.bfloat16),
    "LAMB": (torch.bfloat16,),
    "LARS": (torch.float32,),
    "NAdam": (torch.bfloat16,),
    "MARS": (torch.float32,),
    "ScheduleFreeAdamW": (torch.bfloat16,),
    "Prodigy": (torch.float32,),
    "Tiger": (torch.bfloat16,),
}
"""A type is cast alike in every rule: of sums over tensors, and of numbers, each type has some."""


def module_of(request: Request, folder: str) -> Any:
    path = Path(folder, f"ejected_{len(list(Path(folder).iterdir()))}.py")
    path.write_text(ejected(request))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_triton()
    # The interpreter has no PTX and no device library: the library's own functions know what to do without.
    kernels = {function.__name__ for function in module.KERNELS}
    for name in {*kernels, *getattr(module, "CONSTANTS", ()), "libdevice"} & vars(support).keys():
        setattr(module, name, getattr(support, name))
    return module


def compare(name: str, folder: str, dtype: torch.dtype, *, steps: int = 3, clip: bool = False, **options: Any) -> None:
    rule = tilestep.registry[name]
    module = module_of(Request(rule, clip=clip, **options), folder)
    torch.manual_seed(0)
    shapes = [(32, 130), *SHAPES] if options.get("state_dtype") else SHAPES  # blocks are for 4,096 elements and more
    first = [torch.randn(shape).to(dtype) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in first] for _ in range(2))
    limit = {"max_grad_norm": 0.5} if clip else {}
    alone = getattr(module, name)(ours, **limit)
    alone.step_in_torch = alone.step_by_kernels
    whole = getattr(tilestep, name)(theirs, **limit, **options)
    for _ in range(steps):
        for left, right in zip(ours, theirs):
            left.grad = torch.randn(left.shape).to(dtype)
            right.grad = left.grad.clone()
        alone.step()
        with backend("triton"), forced_shape(TileShape(512, 4, 3)):  # sums are those of a GPU's tiles
            whole.step()
    worst = 0.0
    for left, right in zip(ours, theirs):
        tensors = [(left, right), *((alone.state[left][key], whole.state[right][key]) for key in whole.state[right])]
        for one, other in tensors:
            one, other = one.detach().double(), other.detach().double()
            if clip:
                # On a CPU tilestep adds the squares up in another order.
                worst = max(worst, ((one - other).abs() / (1 + other.abs())).max().item() if one.numel() else 0)
            else:
                assert torch.equal(one, other), (name, dtype, tuple(left.shape), (one - other).abs().max())
    assert worst < (4e-6 if dtype is torch.float32 else 1e-2), (name, worst)
    print(name, dtype, "clip" * clip, options or "", "equal" if not clip else f"{worst:.1e}")


def stages(folder: str) -> None:
    """Kinds with other passes between sums over all tensors: kernels and formulas agree."""
    module = module_of(Request(staged), folder)
    torch.manual_seed(0)
    first = [torch.randn(shape) for shape in SHAPES[:-1]]
    by_kernels, in_torch = ([torch.nn.Parameter(tensor.clone()) for tensor in first] for _ in range(2))
    optimizers = [module.staged(params) for params in (by_kernels, in_torch)]
    optimizers[0].step_in_torch = optimizers[0].step_by_kernels
    for _ in range(3):
        for left, right in zip(by_kernels, in_torch):
            left.grad = torch.randn(left.shape)
            right.grad = left.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for left, right in zip(by_kernels, in_torch):
        assert torch.allclose(left, right, rtol=4e-6, atol=1e-6), (left - right).abs().max()


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or RULES:
            for dtype in RULES[name]:
                compare(name, folder, dtype, steps=2)
        stages(folder)
        compare("AdamW", folder, torch.float32, clip=True)
        compare("AdamW", folder, torch.bfloat16, clip=True, master_weights=True)
        for masters in (True, "remainder", "kahan", "int8"):
            compare("AdamW", folder, torch.bfloat16, master_weights=masters)
        for kept in ("int8", "bfloat16", "float8_e4m3", "int4", "scaled_float16"):
            compare("AdamW", folder, torch.float32, state_dtype=kept, steps=2)
    print("all equal")


if __name__ == "__main__":
    main(sys.argv[1:])
