"""Count what an iteration of FSDP2 needs at its peak, and how much of that any schedule of the optimizer could save.

    python benchmarks/overlap_floor.py

runs the iterations of benchmarks/overlap_figures.py's part `memory` at full size on a CPU, as one rank of several whose
others are not there, and counts live storages by what they are for, in the order in which the host makes and drops
them, as a GPU's `max_memory_allocated` does. "serial" keeps gradients until the step. "dropped" lets every gradient go
as soon as the reduce-scatter has made it, and updates nothing: no schedule needs less. Tensors of these two have no
memory, and they take half a minute. "backward" is tilestep's schedule, with real tensors: 12 GB for 2 ranks, 7 GB for
4; `--no-backward` leaves it out. What a GPU's kernels need for themselves is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from overlap_trainings import RATE, drop_gradients, grouped_by_module
from shard_contenders import TINY, Llama, Shape
from timing import result_name
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import tilestep
from tilestep.bench.results import Group, Result, Row, environment
from tilestep.compat import TensorDispatch, fake_tensors

RESULTS = Path(__file__).parent / "results"
ROUNDING = 512
"""Bytes to which CUDA's allocator rounds."""
ITEMS = (
    "sharded gradients",
    "reduce-scatter's input",
    "whole gradients",
    "gathered parameters",
    "all-gather's buffer",
    "activations",
    "other",
)


class _Storage:
    """One storage that is alive: its bytes, and what it is for, once that is known."""

    def __init__(self) -> None:
        self.size, self.item = 0, ""


class Ledger(TensorDispatch):
    """Count the bytes of storages that operations see, while they are alive.

    Args:
        known: tensors that are there before; they and what comes before `begin()` are no part of the peak.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, _Storage] = {}
        self._total = self._base = self._peak = 0
        self._at_peak: list[tuple[_Storage, int]] = []
        for tensor in known:
            self._note(tensor)

    def begin(self) -> None:
        """What is alive now is no part of the peak."""
        self._base = self._peak = self._total
        for storage in self._alive.values():
            # Those that FSDP2 has emptied it fills again.
            if storage.size:
                storage.item = "before"

    def label(self, item: str, *tensors: Any) -> None:
        """Say what tensors are for; the first word holds.

        Args:
            item: one of `ITEMS`.
            tensors: or lists of them.
        """
        for tensor in _flat(tensors):
            storage = self._note(tensor)
            storage.item = storage.item or item

    def label_rest(self, item: str) -> None:
        """Say what all are for of which nothing was said so far."""
        for storage in self._alive.values():
            storage.item = storage.item or item

    def by_item(self) -> dict[str, int]:
        """Bytes at the peak above those before, by what they are for."""
        found: Counter[str] = Counter()
        for storage, size in self._at_peak:
            found[storage.item or "other"] += size
        return {item: found[item] for item in ITEMS}

    @property
    def peak(self) -> int:
        """Bytes at the peak above those before."""
        return self._peak - self._base

    def _note(self, tensor: torch.Tensor) -> _Storage:
        memory = tensor.untyped_storage()
        # There is one object for a storage as long as it is alive.
        storage = self._alive.get(id(memory))
        if storage is None:
            storage = self._alive[id(memory)] = _Storage()
            weakref.finalize(memory, self._gone, id(memory)).atexit = False  # type: ignore[misc]
        self._resize(storage, memory.nbytes())
        return storage

    def _gone(self, key: int) -> None:
        self._total -= self._alive.pop(key).size

    def _resize(self, storage: _Storage, size: int) -> None:
        size = -(-size // ROUNDING) * ROUNDING
        if size == storage.size:
            return
        self._total += size - storage.size
        storage.size = size
        if self._total > self._peak:
            self._peak = self._total
            self._at_peak = [(each, each.size) for each in self._alive.values() if each.size]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = operation(*args, **kwargs)
        for tensor in _flat((made, args, tuple(kwargs.values()))):
            self._note(tensor)
        name = str(operation)
        if name.startswith("fsdp.split_with_sizes_copy"):
            self.label("gathered parameters", kwargs["out"])
        elif name.startswith("fsdp.chunk_cat"):
            self.label("whole gradients", args[0])
        return made

    def __enter__(self) -> Any:
        # What FSDP2 does to storages is no operation.
        self._torchs_resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(memory: torch.UntypedStorage, size: int) -> Any:
            done = resize(memory, size)
            storage = self._alive.get(id(memory))
            if storage is not None:
                self._resize(storage, memory.nbytes())
            return done

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> Any:
        torch.UntypedStorage.resize_ = self._torchs_resize  # type: ignore[method-assign]
        return super().__exit__(*raised)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        # DTensors have no memory; operations on their local tensors are seen too.
        elif isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh"):
            yield value


class _Done(dist.Work):
    """A collective that has run."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Alone(dist.ProcessGroup):
    """One rank of several; the others, which are not there, hold what this one does.

    Args:
        rank: of this one.
        size: how many there are.
    """

    ledger: Ledger | None = None
    """Is told what the tensors of collectives are."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own, self._count = rank, size

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> dist.Work:
        if self.ledger is not None:
            self.ledger.label("all-gather's buffer", output, given)
        output.view(self._count, -1).copy_(given.view(1, -1).clone())
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> dist.Work:
        if self.ledger is not None:
            self.ledger.label("sharded gradients", output)
            self.ledger.label("reduce-scatter's input", given)
        output.copy_(given.view(self._count, -1)[self._own])
        return _Done()

    # What torch calls them from 2.13 on.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    @property
    def group_name(self) -> str:
        """torch looks a mesh's group up by its name."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return "alone"


class GpuNorm(torch.autograd.Function):
    """An RMSNorm that keeps what a GPU's kernel keeps: the input and a scale for each row.

    That of a CPU keeps several float32 copies of the input besides, a third of all activations of these models.
    """

    @staticmethod
    def forward(context: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = given.float()
        scale = (wide.square().mean(-1, keepdim=True) + torch.finfo(given.dtype).eps).rsqrt()
        context.save_for_backward(given, weight, scale)
        return (wide * scale * weight).to(given.dtype)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given, weight, scale = context.saved_tensors
        gradient, normed = gradients[0].float(), given.float() * scale
        of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight
        of_given = scale * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))
        return of_given.to(given.dtype), of_weight


def _norms_of_gpu(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = lambda given, module=module: GpuNorm.apply(given, module.weight)


@contextlib.contextmanager
def ranks_of(count: int) -> Iterator[None]:
    """A block in which this process is rank 0 of several."""
    if "alone" not in dist.Backend.backend_list:
        dist.Backend.register_backend("alone", lambda _, rank, size, time: Alone(rank, size), devices=["cpu"])
    dist.init_process_group("alone", store=dist.HashStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Peak:
    """What an iteration needs at its peak above parameters and state.

    Args:
        bytes: all of it.
        items: by what it is for.
        gradients: bytes of this rank's gradients.
    """

    bytes: int
    items: dict[str, int]
    gradients: int


def _sharded(shape: Shape, mesh: Any, fake: bool) -> Any:
    """A model under FSDP2; a real one only gets memory once it is sharded."""
    with torch.device("cpu" if fake else "meta"):
        model = Llama(shape)
    _norms_of_gpu(model)
    grouped_by_module(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model if fake else model.to_empty(device="cpu")


def simulate(shape: Shape, ranks: int, tokens: int, schedule: str, *, fake: bool) -> Peak:
    """Run iterations and count.

    Args:
        shape: of the model.
        ranks: how many there are.
        tokens: of the sequence.
        schedule: "serial", "dropped" or "backward".
        fake: whether tensors have no memory; "backward", whose kernels need some, cannot do without.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks_of(ranks))
        mesh = dist.init_device_mesh("cpu", (ranks,))
        if fake:
            stack.enter_context(fake_tensors())
        model = _sharded(shape, mesh, fake)
        params = list(model.parameters())
        parts = [param.detach().to_local().fill_(0.01) for param in params]
        optimizer = None
        if schedule == "backward":
            optimizer = tilestep.AdamW(params, lr=RATE)  # type: ignore[attr-defined]
            tilestep.overlap(optimizer, model, "backward")
        elif schedule == "dropped":
            drop_gradients(model)
        ledger = Alone.ledger = Ledger(parts)
        # The first makes state, and what FSDP2 keeps.
        for _ in range(2):
            ledger.begin()
            text = torch.zeros(1, tokens + 1, dtype=torch.long)
            with ledger:
                loss = model(text)
                ledger.label_rest("activations")
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
            del loss, text
            for param in params:
                param.grad = None
        Alone.ledger = None
        return Peak(ledger.peak, ledger.by_item(), sum(part.nbytes for part in parts))


def main(
    ranks: Annotated[list[int], typer.Option(help="Of how many ranks this is one.")] = [2, 4],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Tokens of the sequence.")] = [64, 16],  # noqa: B006
    backward: Annotated[bool, typer.Option(help="tilestep's schedule too, which needs real memory.")] = True,
    small: Annotated[bool, typer.Option(help="A small model: checks this script.")] = False,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
) -> None:
    """Count, print, write."""
    result = Result(result_name("overlap_floor", torch.device("cpu")), environment(torch.device("cpu")))
    for count in ranks:
        for length in tokens:
            peaks = {name: simulate(_shape(small), count, length, name, fake=True) for name in ("serial", "dropped")}
            if backward:
                gc.collect()
                peaks["backward"] = simulate(_shape(small), count, length, "backward", fake=False)
            _report(result, f"{count} ranks, {length} tokens", peaks)
            result.groups[-1].tags = {"ranks": str(count), "tokens": str(length)}
            result.save(output)


def _shape(small: bool) -> Shape:
    return TINY if small else Shape()


def _report(result: Result, work: str, peaks: dict[str, Peak]) -> None:
    result.groups.append(Group(f"peak, {work}", [Row(name, peak_bytes=peak.bytes) for name, peak in peaks.items()]))
    print(f"{work}: MiB at the peak" + "".join(f"{name:>12}" for name in peaks))
    for item in ITEMS:
        print(f"{item:>40}" + "".join(f"{peak.items[item] / 2**20:12.2f}" for peak in peaks.values()))
        for name, peak in peaks.items():
            result.summary[f"bytes, {work}, {name}, {item}"] = float(peak.items[item])
    print(f"{'all':>40}" + "".join(f"{peak.bytes / 2**20:12.2f}" for peak in peaks.values()))
    serial = peaks["serial"]
    result.summary[f"bytes of gradients, {work}"] = float(serial.gradients)
    shares = {name: (serial.bytes - peak.bytes) / serial.gradients for name, peak in peaks.items()}
    for name, share in shares.items():
        result.summary[f"peak lowered by share of gradients, {work}, {name}"] = round(share, 4)
    print(f"{'lowered by share of gradients':>40}" + "".join(f"{share:12.1%}" for share in shares.values()), flush=True)


if __name__ == "__main__":
    typer.run(main)
