"""Run by test_norm_triton.py under TRITON_INTERPRET=1: the GPU backend on CPU tensors."""

from __future__ import annotations

import math
import sys
import warnings

import torch
from norm_referee import ORDERS, drawn, referee

from tilestep.norm.triton_backend import TritonNorm

CPU = torch.device("cpu")


def table_of(tensors: list[torch.Tensor]) -> tuple[TritonNorm, torch.Tensor]:
    table = TritonNorm(CPU, [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors])
    return table, torch.tensor([tensor.data_ptr() for tensor in tensors])


def check(label: object, actual: float, expected: float, relative: float = 1e-5) -> None:
    same = actual == expected or (math.isnan(actual) and math.isnan(expected))
    if not (same or math.isclose(actual, expected, rel_tol=relative)):
        raise SystemExit(f"{label}: {actual} is not {expected}")


def norms(tensors: list[torch.Tensor], label: str, absent: int | None = None) -> None:
    table, addresses = table_of(tensors)
    present = list(tensors)
    if absent is not None:
        addresses[absent] = 0
        del present[absent]
    for norm_type in ORDERS:
        out = torch.empty(1, dtype=torch.float64)
        for _ in range(2):
            table.launch(addresses, out, norm_type, True)
            check((label, norm_type), out.item(), referee(present, norm_type))
    out = torch.empty(1, dtype=torch.float32)
    table.launch(addresses, out, 2.0, False)
    check((label, "squares"), out.item(), referee(present, 2.0) ** 2)


def nonfinite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        tensors = drawn([9000, 5], torch.float32)
        tensors[0][8500] = bad
        table, addresses = table_of(tensors)
        out = torch.empty(1, dtype=torch.float64)
        for norm_type in (2.0, 1.0, math.inf, -math.inf):
            table.launch(addresses, out, norm_type, True)
            check((bad, norm_type), out.item(), referee(tensors, norm_type))


def large() -> None:
    """Finite elements whose squares, or sums of squares, are not."""
    most = sys.float_info.max**0.5
    for value in (3e38, -1e30, 1e20):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [torch.full((9000,), value, dtype=dtype), torch.ones(3, dtype=dtype)]
            table, addresses = table_of(tensors)
            out = torch.empty(1, dtype=torch.float64)
            table.launch(addresses, out, 2.0, True)
            check((value, dtype), out.item(), referee(tensors, 2.0))
    largest = sys.float_info.max
    for values, total in (([1e300], largest), ([0.9 * most] * 2, largest), ([1e300, math.inf], math.inf)):
        tensors = [torch.full((3,), value / 3**0.5, dtype=torch.float64) for value in values]
        table, addresses = table_of(tensors)
        table.launch(addresses, out, 2.0, True)
        check(values, out.item(), math.inf)
        table.launch(addresses, out, 2.0, False)
        check(values, out.item(), total)


def scaling() -> None:
    tensors = [*drawn([9000, 5, 0], torch.float32), *drawn([8200], torch.float64)]
    tensors[0] = torch.cat([tensors[0], torch.ones(4)])[3:-1]
    for limit, norm in ((2.0, 8.0), (8.0, 2.0), (1.0, math.nan), (1.0, math.inf)):
        for given in (limit, torch.tensor([limit])):
            table, addresses = table_of(tensors)
            before = [tensor.clone() for tensor in tensors]
            table.scale(addresses, torch.tensor([norm]), given)
            coefficient = torch.tensor(limit / (norm + 1e-6)).clamp(max=1.0)
            for tensor, old in zip(tensors, before):
                torch.testing.assert_close(tensor, old * coefficient.to(old.dtype), equal_nan=True)
                tensor.copy_(old)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    several = drawn([1, 8192, 20000, 0, 17], torch.float32)
    norms(several, "float32")
    norms([*several, *drawn([8200], torch.float64), *drawn([9000], torch.float16)], "mixed", absent=2)
    norms([torch.cat(several)[3:]], "unaligned")
    norms([torch.empty(0)], "empty")
    nonfinite()
    large()
    scaling()
    print("all equal")
