"""Ejected files as modules, and steps of their optimizers beside tilestep's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tilestep
from tilestep.eject import Request, ejected

SHAPES = [(7,), (64, 130), (3, 40, 33), (5000,), (2, 3, 4, 5), ()]


def imported(text: str, path: Path) -> Any:
    """The module of a file with this text."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(name: str, folder: Path, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """The module that a rule is ejected to."""
    request = Request(tilestep.registry[name], settings, **options)
    return imported(ejected(request), folder / f"ejected_{name.lower()}_{len(list(folder.iterdir()))}.py")


MATRICES = ["AdaMuon", "Adafactor", "Muon", "MuonH", "NorMuon", "SOAP", "Scion"]
"""The rules that cannot be ejected."""

NAMES = [name for name in tilestep.registry if name not in MATRICES]


@tilestep.rule
def staged(param: Any, grad: Any, momentum: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """Two sums over all tensors: before the second, matrices have a pass over their elements, and others none."""
    first = tilestep.sum_over_tensors(grad.square().sum())
    own = (grad / first).abs().sum() if grad.ndim > 1 else first / (1 + first)
    second = tilestep.sum_over_tensors(own)
    momentum = 0.9 * momentum + grad
    return param - lr * momentum / (1 + second), momentum


class Pair:
    """An ejected optimizer and tilestep's, of equal parameters that get equal gradients."""

    def __init__(
        self,
        module: Any,
        name: str,
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        clip: bool = False,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype
        first = [self.draw(shape) for shape in shapes]
        self.ours, self.theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in first] for _ in range(2))
        arguments = {**(settings or {}), **({"max_grad_norm": 0.5} if clip else {})}
        self.ejected = getattr(module, name)(self.ours, **arguments)
        self.whole = getattr(tilestep, name)(self.theirs, **arguments, **options)

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype).to(self.device)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for left, right in zip(self.ours, self.theirs):
                left.grad = self.draw(tuple(left.shape))
                right.grad = left.grad.clone()
            self.ejected.step()
            self.whole.step()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Parameters and states of both, by name."""
        for place, (left, right) in enumerate(zip(self.ours, self.theirs)):
            yield f"parameter {place}", left.detach(), right.detach()
            ours, theirs = self.ejected.state[left], self.whole.state[right]
            assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
            for key in theirs:
                yield f"{key} of parameter {place}", ours[key].detach(), theirs[key].detach()

    def error(self) -> float:
        """The largest difference of parameters, relative to what is above 1."""
        pairs = [(left.double(), right.double()) for name, left, right in self.tensors() if name.startswith("param")]
        return max(((left - right).abs() / right.abs().clamp(min=1)).max().item() for left, right in pairs)
