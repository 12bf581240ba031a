"""SOAP's steps in the `rules` section, beside its authors' algorithm as a loop over tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import tilestep
from tilestep.bench import measure as bandwidth
from tilestep.bench.measure import Contender, measure
from tilestep.bench.results import Group
from tilestep.bench.sections import OURS, Settings, free, llama_of, make_parameters, measured_group

__all__ = ["LOOP", "SoapLoop", "soap_groups"]

LOOP = "torch loop over tensors"
FREQUENCY = 10  # the authors' default: every tenth step decomposes matrices, and takes most of the time
NEVER = 10**9
ROUNDS = 3


class SoapLoop:
    """SOAP in plain PyTorch, tensor by tensor, with the defaults of its authors and Gram matrices in float32.

    Args:
        parameters: vectors and matrices, with gradients.
        frequency: steps from one turn of the bases to the next.
        limit: a longer side has no basis.
    """

    def __init__(self, parameters: Sequence[Tensor], frequency: int = FREQUENCY, limit: int = 10_000) -> None:
        self.parameters, self.frequency, self.limit = parameters, frequency, limit
        self.count = -1
        self.means = [torch.zeros_like(each, requires_grad=False) for each in parameters]
        self.squares = [torch.zeros_like(each, requires_grad=False) for each in parameters]
        self.grams = [self._grams(each) for each in parameters]
        self.bases: list[dict[int, Tensor]] = []

    def _grams(self, parameter: Tensor) -> dict[int, Tensor]:
        sides = enumerate(parameter.shape) if parameter.dim() == 2 else ()
        return {place: torch.zeros(side, side, device=parameter.device) for place, side in sides if side <= self.limit}

    @torch.no_grad()
    def step(self) -> None:
        """Take one step; the first only begins the bases."""
        self.count += 1
        if self.count == 0:
            for grams, parameter in zip(self.grams, self.parameters, strict=True):
                _accumulate(grams, _gradient(parameter))
                decomposed = {place: torch.linalg.eigh(gram)[1] for place, gram in grams.items()}
                self.bases.append({place: vectors.flip(1).contiguous() for place, vectors in decomposed.items()})
            return
        for index, parameter in enumerate(self.parameters):
            self._update(index, parameter, _gradient(parameter))

    def _update(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        mean, square, bases = self.means[index], self.squares[index], self.bases[index]
        turned = _turned(gradient, bases)
        mean.lerp_(turned.to(mean.dtype), 0.05)
        square.mul_(0.95).addcmul_(turned, turned, value=0.05)
        size = 3e-3 * math.sqrt(1 - 0.95**self.count) / (1 - 0.95**self.count)
        update = _turned_back(mean.float() / (square.float().sqrt() + 1e-8), bases)
        parameter.add_(update.to(parameter.dtype), alpha=-size)
        parameter.mul_(1 - 3e-3 * 0.01)
        _accumulate(self.grams[index], gradient)
        if self.count % self.frequency == 0:
            original = _turned_back(mean.float(), bases)
            for place, gram in self.grams[index].items():
                ahead = gram @ bases[place]
                order = (bases[place] * ahead).sum(0).argsort(descending=True)
                square.copy_(square.index_select(place, order))
                bases[place] = torch.linalg.qr(ahead[:, order])[0]
            mean.copy_(_turned(original, bases))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()


def _accumulate(grams: dict[int, Tensor], gradient: Tensor) -> None:
    for place, gram in grams.items():
        gram.lerp_(gradient @ gradient.mT if place == 0 else gradient.mT @ gradient, 0.05)


def _turned(value: Tensor, bases: dict[int, Tensor]) -> Tensor:
    value = bases[0].mT @ value if 0 in bases else value
    return value @ bases[1] if 1 in bases else value


def _turned_back(value: Tensor, bases: dict[int, Tensor]) -> Tensor:
    value = bases[0] @ value if 0 in bases else value
    return value @ bases[1].mT if 1 in bases else value


def soap_groups(settings: Settings) -> list[Group]:
    """Measure SOAP's steps without a turn of the bases, and the mean of ten steps of which one turns them.

    The matrices are a smaller language model's: decompositions of large ones would take the time of all other rules.

    Args:
        settings: as for the section; on a CPU the list is tiny.
    """
    is_small = settings.quick or settings.device.type == "cpu"
    workload = llama_of("small llama", *((2, 64, 16, 172, 500) if is_small else (2, 1024, 256, 2816, 32000)))
    settings.say(f"rules: SOAP, {workload.title}")
    device = settings.device

    def contenders(frequency: int, repeat: int = 1) -> list[Contender]:
        def ours() -> Callable[[], object]:
            return tilestep.Optimizer(make_parameters(workload, device), "SOAP", precondition_frequency=frequency).step

        def loop() -> Callable[[], object]:
            return SoapLoop(make_parameters(workload, device), frequency).step

        return [Contender(OURS, _when_called(ours), repeat=repeat), Contender(LOOP, _when_called(loop), repeat=repeat)]

    copy = bandwidth.copy(device, settings.buffer_bytes)
    plain = measured_group(
        f"SOAP, steps that turn no bases, {workload.title}", contenders(NEVER), [copy], settings, device, ROUNDS
    )
    free(device)
    rounds = 2 if settings.quick else min(settings.rounds, ROUNDS)
    rows = measure(contenders(FREQUENCY, FREQUENCY), device, rounds, warmup=1, traced=False, busy=False)
    turning = Group(f"SOAP, mean of {FREQUENCY} steps of which one turns the bases, {workload.title}", rows)
    free(device)
    for group in (plain, turning):
        ours, loop = group.row(OURS), group.row(LOOP)
        if ours is not None and loop is not None and ours.wall is not None and loop.wall is not None:
            ours.speedup = loop.wall.median / ours.wall.median
    return [plain, turning]


def _when_called(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A step of an optimizer that is made in the first call: what is wrong with it is then the contender's failure."""
    steps: list[Callable[[], object]] = []

    def call() -> None:
        if not steps:
            steps.append(make())
        steps[0]()

    return call
