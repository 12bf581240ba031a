"""Run by test_stats.py under TRITON_INTERPRET=1: what Triton's kernels put out, on CPU tensors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import measured_blocks
import test_outputs
import torch

import tilestep
from tilestep.backends import registry
from tilestep.backends.triton import run
from tilestep.backends.triton.run import TritonPasses
from tilestep.backends.tuning import TileShape, forced_shape
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    image = torch.randn(3, 4, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(tensor) for tensor in (torch.randn(9, 25).to(dtype), image, torch.randn(7).to(dtype))]


def check(dtype: torch.dtype, master_weights: bool | str, *, streams: bool = False) -> None:
    params, plain = parameters(dtype), parameters(dtype)
    options = {"lr": 1e-3, "master_weights": master_weights, "skip_nonfinite": True}
    optimizer = tilestep.AdamW(params, stats=tilestep.Stats(every=2), track_changes=True, **options)
    twin = tilestep.AdamW(plain, **options)
    if streams:
        move_state(optimizer, StreamedState(torch.device("cpu"), 300, 2), "gpu", "for a test")
    for step in range(1, 3):
        before = [param.detach().clone() for param in params]
        for param, other in zip(params, plain):
            gradient = torch.randn_like(param)
            gradient[..., 0] = 0
            param.grad = gradient.contiguous() if step == 2 else gradient
            if step == 2 and param.dim() == 1:
                param.grad[1] = math.inf
            other.grad = param.grad.clone()
        optimizer.step()
        twin.step()
        listed = {name: (indices.long(), values) for name, indices, values in optimizer.changes()}
        for place, (param, old, other) in enumerate(zip(params, before, plain)):
            assert torch.equal(param, other), (dtype, step)
            wanted = (param.detach() != old).reshape(-1).nonzero().reshape(-1)
            indices, values = listed.get(f"0.{place}", (wanted[:0], param.detach().reshape(-1)[:0]))
            assert torch.equal(indices, wanted), (dtype, master_weights, step, place)
            assert torch.equal(values, param.detach().reshape(-1)[wanted])
            if step % 2 == 0:
                numbers = {"grad_norm": param.grad, "param_norm": param.detach()}
                if dtype is torch.float32:
                    numbers["update_norm"] = param.detach() - old
                row = optimizer.stats.read()[f"0.{place}"]
                for column, tensor in numbers.items():
                    exact = float(tensor.double().norm())
                    close = math.isclose(row[column], exact, rel_tol=1e-2 if master_weights else 1e-5)
                    assert close or row[column] == exact, (column, row[column], exact)
    assert optimizer.first_nonfinite() == "0.2" and optimizer.skipped_steps == 1


def check_lists_of_several_blocks() -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size)) for size in (40_001, 16_384, 33, 0)]
    optimizer = tilestep.SGD(params, lr=1.0, track_changes=True)
    for density in (1.0, 0.01, 0.0, 0.5):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.randn_like(param) * (torch.rand_like(param) < density)
        optimizer.step()
        listed = {name: (indices.long(), values) for name, indices, values in optimizer.changes(clear=True)}
        for place, (param, old) in enumerate(zip(params, before)):
            now = param.detach()
            wanted = (now != old).nonzero().reshape(-1)
            indices, values = listed.get(f"0.{place}", (wanted[:0], now[:0]))
            assert torch.equal(indices, wanted), (density, place)
            assert torch.equal(values, now[wanted])


@tilestep.rule
def unlike(param: Any, grad: Any, small: Any, large: Any, *, lr: float = 0.1) -> tuple[Any, ...]:
    """States of which float32 holds the squares only if one is made larger and the other smaller."""
    return param - lr * grad, grad * 1e-20, grad * 1e12


@tilestep.rule
def otherwise(param: Any, grad: Any, large: Any, small: Any, *, lr: float = 0.1) -> tuple[Any, ...]:
    """The same in the other order."""
    return param - lr * grad, grad * 1e12, grad * 1e-20


def check_states_of_other_magnitudes() -> None:
    for rule in (unlike, otherwise):
        param = torch.nn.Parameter(torch.ones(300))
        optimizer = tilestep.Optimizer([param], rule, stats=tilestep.Stats())
        param.grad = torch.linspace(1, 2, 300)
        optimizer.step()
        row = optimizer.stats.read()["0.0"]
        for name in ("small", "large"):
            exact = float(optimizer.state[param][name].double().norm())
            assert math.isclose(row[f"{name}_norm"], exact, rel_tol=1e-5), (name, row[f"{name}_norm"], exact)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    registry.passes_class = lambda device: TritonPasses
    with forced_shape(TileShape(64, 1, 2)):
        check_states_of_other_magnitudes()
        check(torch.bfloat16, "remainder")
        check(torch.float32, False, streams=True)
        # Programs that measure walk several spans.
        run._ENOUGH_PROGRAMS = 1
        check(torch.float32, False)
    with forced_shape(TileShape(512, 1, 2)):
        test_outputs.compare("AdamW", {})
        test_outputs.compare("AdamW", {"state_dtype": lambda _: "int8"})
        measured_blocks.SHAPES = ((2, 150), (2, 15, 3, 3), (1024,))
        for which in ("int8", "float8_e4m3", "int4"):  # of the others, bfloat16 states are truncated by the interpreter
            measured_blocks.compare(which, "AdamW")
    with forced_shape(TileShape(8192, 4, 2)):
        check_lists_of_several_blocks()
    print("all equal")
