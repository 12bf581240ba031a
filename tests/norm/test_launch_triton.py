"""The launcher's logic, on kernels that only note how they are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilestep.kernels.launch import Launcher

CUDA = torch.device("cuda")


def parameter(name: str, *, constant: bool = False, fixed: bool = True, kind: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        is_constexpr=constant,
        do_not_specialize=False,
        do_not_specialize_on_alignment=fixed,
        annotation_type=kind,
    )


class Compiled:
    def __init__(self, calls: list[Any], refuses: bool) -> None:
        self.calls, self.refuses = calls, refuses

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            if self.refuses:
                raise TypeError("function takes other arguments")
            self.calls.append(("compiled", grid, arguments))

        return run


class Kernel:
    __name__ = "kernel"

    def __init__(self, *parameters: SimpleNamespace, refuses: bool = False) -> None:
        self.params = parameters
        self.calls: list[Any] = []
        self.compiled = Compiled(self.calls, refuses)

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> Compiled:
        self.calls.append(("build", grid, constants))
        return self.compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.calls.append(("ordinary", grid, arguments, constants))


def kernel(refuses: bool = False) -> Kernel:
    return Kernel(
        parameter("x"), parameter("p", fixed=False, kind="fp64"), parameter("N", constant=True), refuses=refuses
    )


@pytest.fixture(autouse=True)
def device_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_builds_once_and_passes_constants_behind_the_arguments() -> None:
    noted = kernel()
    launch = Launcher(noted, 5, CUDA, {"N": 8}, num_warps=2)
    x = torch.ones(1)
    launch(x, 2.0)
    launch(x, 3.0)
    assert noted.calls == [
        ("build", (5, 1, 1), {"N": 8, "num_warps": 2}),
        ("compiled", (5, 1, 1), (x, 2.0, 8)),
        ("compiled", (5, 1, 1), (x, 3.0, 8)),
    ]


def test_a_refused_compiled_kernel_is_launched_the_ordinary_way() -> None:
    noted = kernel(refuses=True)
    launch = Launcher(noted, 5, CUDA, {"N": 8})
    x = torch.ones(1)
    launch(x, 2.0)
    launch(x, 2.0)
    assert [call[0] for call in noted.calls] == ["build", "ordinary", "ordinary"]
    assert noted.calls[1][2:] == ((x, 2.0), {"N": 8, "num_warps": 4})


def test_an_error_of_a_proven_kernel_is_not_hidden() -> None:
    noted = kernel()
    launch = Launcher(noted, 5, CUDA, {"N": 8})
    launch(torch.ones(1), 2.0)
    noted.compiled.refuses = True
    with pytest.raises(TypeError, match="other arguments"):
        launch(torch.ones(1), 2.0)


def test_no_programs_no_launch() -> None:
    noted = kernel()
    Launcher(noted, 0, CUDA, {"N": 8})(torch.ones(1), 2.0)
    assert noted.calls == []


def test_kernels_that_triton_would_specialize_are_refused() -> None:
    with pytest.raises(TypeError, match="'x' in do_not_specialize_on_alignment"):
        Launcher(Kernel(parameter("x", fixed=False), parameter("N", constant=True)), 1, CUDA, {"N": 8})
    with pytest.raises(TypeError, match="constants must be its last parameters"):
        Launcher(Kernel(parameter("N", constant=True), parameter("x")), 1, CUDA, {"N": 8})
    with pytest.raises(TypeError, match="on integers"):
        Launcher(kernel(), 1, CUDA, {"N": 8})(torch.ones(1), 2)


def test_the_real_kernels_are_accepted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tilestep.kernels.launch import load_module
    from tilestep.norm.tiles import Order
    from tilestep.norm.triton_source import norm_source, scale_source

    module = load_module("norm", norm_source([torch.float32], Order.SQUARES))
    Launcher(module.norm_tiles, 1, CUDA, {"TILE": 8192, "STEP": 1024})
    Launcher(module.norm_finish, 1, CUDA, {"ROOT": True, "BLOCK": 8192})
    for on_device in (True, False):
        Launcher(
            load_module("scale", scale_source([torch.float32], limit_on_device=on_device)).scale_tiles,
            1,
            CUDA,
            {"TILE": 8, "STEP": 8},
        )
