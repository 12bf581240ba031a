"""Optimizers on layouts of several ranks, compared with themselves on one device: rows of parity.py.

Both runs of an optimizer start from the same values and get the same gradients. The gathered weights should be equal.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity_rows import (
    ADAM,
    MATRICES,
    MIXED,
    STEPS,
    Shapes,
    build_optimizer,
    gradients,
    initial_weights,
    library_of,
    update_error,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LAYOUTS", "LayoutRow", "run_rank"]

PATIENCE = timedelta(seconds=60 if torch.cuda.is_available() else 300)
"""How long ranks wait for each other in a collective; libraries that compile at their first step take long on a CPU."""

UNEVEN: Shapes = (*MIXED, (1, 40))
"""Ranks hold unequal parts; one rank holds all of the last tensor."""
WIDE: Shapes = ((64, 128), (97, 256), (48, 384))
UNEVEN_MATRICES: Shapes = ((64, 96), (97, 64), (48, 48))


@dataclass(frozen=True)
class LayoutRow:
    """A comparison of an optimizer on a layout with itself on one device.

    Args:
        name: `layout/optimizer`.
        ours: an expression for tilestep's optimizer of `params`, `model` and `mesh`, which is None on one device.
        theirs: an expression for the other library's optimizer.
        alone: the expression for tilestep's optimizer on one device, if it differs.
        their_alone: the same for the other library.
        micro_batches: backward passes of a step.
        needs: "cuda" for a row whose other optimizer runs on GPUs only.
    """

    name: str
    ours: str
    theirs: str = ""
    alone: str = ""
    their_alone: str = ""
    shapes: Shapes = UNEVEN
    max_norm: float | None = None
    micro_batches: int = 1
    needs: str = ""
    steps: int = STEPS

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return self.name.partition("/")[0]


class GradientModel(nn.Module):
    """A model whose backward gives each parameter the gradient passed to forward."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, grads: Sequence[Tensor]) -> Tensor:
        return sum(((weight * grad).sum() for weight, grad in zip(self.weights, grads)), torch.zeros(()))


def reference_gradients(row: LayoutRow, step: int, ranks: int) -> list[Tensor]:
    """Sum the gradients of a step in the layout's order: over micro-batches first under ZeRO, over ranks first else."""
    found = [[per_rank(row, step, batch, rank) for batch in range(row.micro_batches)] for rank in range(ranks)]
    if row.layout == "zero":
        return _mean([_total(batches) for batches in found])
    return _total([_mean(list(batch)) for batch in zip(*found)])


def _total(lists: list[list[Tensor]]) -> list[Tensor]:
    return [sum(parts[1:], parts[0]) for parts in zip(*lists)]


def _mean(lists: list[list[Tensor]]) -> list[Tensor]:
    return [total / len(lists) for total in _total(lists)]


def per_rank(row: LayoutRow, step: int, batch: int, rank: int) -> list[Tensor]:
    """Return a rank's gradients; they differ between ranks on layouts in `AVERAGED`."""
    return gradients(row.shapes, torch.float32, step + 100 * batch + (1000 * rank if row.layout in AVERAGED else 0))


AVERAGED = ("zero", "accumulation")
"""Layouts that average the gradients of ranks."""


class OneDevice:
    """Parameters on one device."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        self.row, self.device = row, device
        self.model = GradientModel(initial_weights(row.shapes, torch.float32, device))
        self.params = list(self.model.parameters())
        self.mesh: DeviceMesh | None = None

    def set_gradients(self, optimizer: Any, step: int) -> None:
        for param, grad in zip(self.params, reference_gradients(self.row, step, dist.get_world_size())):
            param.grad = grad.to(self.device)

    def full(self, optimizer: Any) -> list[Tensor]:
        return [param.detach().to("cpu", torch.float64, copy=True) for param in self.params]


class DTensorLayout(OneDevice):
    """DTensors, each with a mesh and placements."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        super().__init__(row, device)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        self.places = [self.place_of(place) for place in range(len(row.shapes))]
        self.params = [
            nn.Parameter(param.detach() if mesh is None else distribute_tensor(param.detach(), mesh, placements))
            for param, (mesh, placements) in zip(self.params, self.places)
        ]

    def place_of(self, place: int) -> tuple[DeviceMesh | None, list[Placement]]:
        raise NotImplementedError

    def set_gradients(self, optimizer: Any, step: int) -> None:
        grads = per_rank(self.row, step, 0, 0)
        for param, grad, (mesh, placements) in zip(self.params, grads, self.places):
            there = grad.to(self.device)
            param.grad = there if mesh is None else distribute_tensor(there, mesh, placements)

    def full(self, optimizer: Any) -> list[Tensor]:
        whole = (param.full_tensor() if isinstance(param, DTensor) else param for param in self.params)
        return [value.detach().to("cpu", torch.float64, copy=True) for value in whole]


class TensorParallel(DTensorLayout):
    """Matrices sharded by rows and by columns in turn, vectors replicated."""

    def place_of(self, place: int) -> tuple[DeviceMesh | None, list[Placement]]:
        is_matrix = len(self.row.shapes[place]) == 2
        return self.mesh, [Shard(place % 2) if is_matrix else Replicate()]


class MegatronParallel(TensorParallel):
    """The same shards as plain tensors with Megatron-Core's attributes."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        super().__init__(row, device)
        self.params = [nn.Parameter(param.to_local()) for param in self.params]
        for param, (_, (placement,)) in zip(self.params, self.places):
            param.tensor_model_parallel, param.partition_dim = True, placement.dim

    def set_gradients(self, optimizer: Any, step: int) -> None:
        grads = per_rank(self.row, step, 0, 0)
        for param, grad, (mesh, placements) in zip(self.params, grads, self.places):
            param.grad = distribute_tensor(grad.to(self.device), mesh, placements).to_local()

    def full(self, optimizer: Any) -> list[Tensor]:
        cut = zip(self.params, self.places)
        whole = [DTensor.from_local(param.detach(), mesh, placements) for param, (mesh, placements) in cut]
        return [value.full_tensor().to("cpu", torch.float64, copy=True) for value in whole]


class Experts(DTensorLayout):
    """Stacks of experts on one mesh, matrices on a second, vectors as plain tensors."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        self.experts = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("experts",))
        super().__init__(row, device)

    def place_of(self, place: int) -> tuple[DeviceMesh | None, list[Placement]]:
        dims = len(self.row.shapes[place])
        return {3: self.experts, 2: self.mesh}.get(dims), [Shard(0)]


class FullyShard(DTensorLayout):
    """torch's FSDP2, with gradients from its backward."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        OneDevice.__init__(self, row, device)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        fully_shard(self.model, mesh=self.mesh)
        self.params = list(self.model.parameters())

    def set_gradients(self, optimizer: Any, step: int) -> None:
        for batch in range(self.row.micro_batches):
            grads = per_rank(self.row, step, batch, dist.get_rank())
            self.model([grad.to(self.device) for grad in grads]).backward()


class Replicas(OneDevice):
    """A plain module for `tilestep.shard`, or DistributedDataParallel."""

    def __init__(self, row: LayoutRow, device: torch.device) -> None:
        super().__init__(row, device)
        self.wrapped: Any = None

    def set_gradients(self, optimizer: Any, step: int) -> None:
        is_ours = type(optimizer).__module__.startswith("tilestep")
        if not is_ours and self.wrapped is None:
            self.wrapped = DistributedDataParallel(self.model)
        model = self.model if is_ours else self.wrapped
        for batch in range(self.row.micro_batches):
            grads = [grad.to(self.device) for grad in per_rank(self.row, step, batch, dist.get_rank())]
            if batch + 1 < self.row.micro_batches:
                with (optimizer if is_ours else model).no_sync():
                    model(grads).backward()
            else:
                model(grads).backward()

    def full(self, optimizer: Any) -> list[Tensor]:
        with torch.no_grad():  # the next forward waits for the all-gathers
            self.model([torch.zeros(shape, device=self.device) for shape in self.row.shapes])
        return super().full(optimizer)


PLACES: dict[str, Callable[[LayoutRow, torch.device], Any]] = {
    "fsdp2": FullyShard,
    "accumulation": FullyShard,
    "resume-fsdp2": FullyShard,
    "tp": TensorParallel,
    "experts": Experts,
    "zero": Replicas,
}


def train(row: LayoutRow, place: Any, expression: str) -> list[list[Tensor]]:
    """Return full weights before the first step and after every step."""
    weights = [place.full(None)] if not isinstance(place, Replicas) else [OneDevice.full(place, None)]
    optimizer = build_optimizer(expression, place.params, model=place.model, mesh=place.mesh)
    for step in range(row.steps):
        take_step(row, place, optimizer, expression, step)
        weights.append(place.full(optimizer))
    return weights


def take_step(row: LayoutRow, place: Any, optimizer: Any, expression: str, step: int) -> None:
    optimizer.zero_grad()
    place.set_gradients(optimizer, step)
    if row.max_norm is not None and library_of(expression) != "tilestep":
        torch.nn.utils.clip_grad_norm_(place.params, row.max_norm)
    optimizer.step()


def layout_error(row: LayoutRow, expression: str, alone: str, device: torch.device) -> dict[str, Any]:
    """Compare an optimizer on the layout with itself on one device."""
    one = train(row, OneDevice(row, device), alone or expression)
    place = MegatronParallel if library_of(expression) == "megatron" else PLACES[row.layout]
    there = train(row, place(row, device), expression)
    bits = all(torch.equal(*pair) for step in zip(one, there) for pair in zip(*step))
    return {"bits": bits, "error": update_error(there, one)}


def resume_error(row: LayoutRow, expression: str, alone: str, device: torch.device) -> dict[str, Any]:
    """Compare training resumed from a distributed checkpoint in new objects with training without a break."""
    whole = train(row, FullyShard(row, device), expression)
    half = row.steps // 2
    place = FullyShard(row, device)
    optimizer = build_optimizer(expression, place.params, model=place.model, mesh=place.mesh)
    for step in range(half):
        take_step(row, place, optimizer, expression, step)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(place.model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    again = FullyShard(row, device)
    optimizer = build_optimizer(expression, again.params, model=again.model, mesh=again.mesh)
    model_state, optimizer_state = get_state_dict(again.model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(again.model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(half, row.steps):
        take_step(row, again, optimizer, expression, step)
    end = again.full(optimizer)
    return {
        "bits": all(map(torch.equal, end, whole[-1])),
        "error": update_error([whole[0], end], [whole[0], whole[-1]]),
    }


def compare(row: LayoutRow, device: torch.device) -> dict[str, Any]:
    """Run both optimizers of a row; an error of one does not stop the other."""
    if row.needs and row.needs != device.type:
        return {"skipped": "needs a GPU"}
    measure = resume_error if row.layout == "resume-fsdp2" else layout_error
    found: dict[str, Any] = {}
    for who, expression, alone in (("ours", row.ours, row.alone), ("theirs", row.theirs, row.their_alone)):
        if expression:
            try:
                found[who] = measure(row, expression, alone, device)
            except ImportError as error:
                found[who] = {"missing": error.name or str(error)}
            except Exception as error:
                found[who] = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
                if os.environ.get("PARITY_TRACEBACK"):
                    traceback.print_exc()
        agreed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(agreed, found.get(who))
        failures = [each for each in agreed if each and "failure" in each]
        if failures:  # a timeout is the consequence of an error on another rank
            found[who] = min(failures, key=lambda each: "imed out" in each["failure"])
    return found


def run_rank(rank: int, ranks: int, folder: str, names: list[str], until: float) -> None:
    """Run rows on this rank; rank 0 writes a file for each. No row starts after `until`."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", ranks)
    options: dict[str, Any] = {"device_id": device} if has_gpu else {}
    dist.init_process_group(
        "nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE, **options
    )
    rows = {row.name: row for row in LAYOUTS}
    for name in names:
        is_over = [time.monotonic() > until]
        dist.broadcast_object_list(is_over)  # all ranks stop at the same row
        if is_over[0]:
            break
        if rank == 0:
            (Path(folder) / "begun").write_text(name)
        found = compare(rows[name], device)
        if rank == 0:
            path = Path(folder) / f"{name.replace('/', '+')}.json"
            path.with_suffix(".part").write_text(json.dumps(found))
            path.with_suffix(".part").rename(path)
        dist.barrier()
    os._exit(0)  # threads of gloo may hold tensors while the interpreter ends


_TILESTEP_MUON = "tilestep.Muon(params, lr=1e-2, weight_decay=0.1)"
_TORCH_MUON = "torch.optim.Muon(params, lr=1e-2, weight_decay=0.1)"
_LIKE_DION = (
    "tilestep.NorMuon(params, lr=1e-3, weight_decay=0.1, nesterov=False, eps=1e-8, "
    'ns_coefficients="polar_express_dion", adjust_lr_fn="spectral_unclamped")'
)
_DION = "dion.NorMuon(params, distributed_mesh=mesh, lr=1e-3, weight_decay=0.1)"
_LIKE_EMERGING = (
    "tilestep.Muon(params, lr=1e-3, momentum=0.9, weight_decay=0.1, nesterov=False, "
    'ns_coefficients="quintic", adjust_lr_fn="spectral")'
)
_EMERGING = "emerging_optimizers.orthogonalized_optimizers.Muon(params, lr=1e-3, momentum=0.9, weight_decay=0.1)"
_MEGATRON = (
    "megatron.core.optimizer.emerging_optimizers.TensorParallelMuon(params, lr=1e-3, momentum=0.9, weight_decay=0.1, "
    'nesterov=False, tp_mode="{}")'
)
_ADAMW, _TORCH_ADAMW = f"tilestep.AdamW(params, {ADAM})", f"torch.optim.AdamW(params, {ADAM}, fused=True)"
_CLIPPED = f"tilestep.AdamW(params, {ADAM}, max_grad_norm=0.1)"
_INT8 = f'tilestep.AdamW(params, {ADAM}, state_dtype="int8")'
_LAMB = "lr=1e-2, eps=1e-6, weight_decay=0.1"
_EXPERTS: Shapes = ((4, 32, 48), (96, 64), (8,), (257, 33))

LAYOUTS: list[LayoutRow] = [
    LayoutRow("fsdp2/AdamW", _ADAMW, _TORCH_ADAMW),
    LayoutRow("fsdp2/AdamW-clip", _CLIPPED, _TORCH_ADAMW, max_norm=0.1),
    LayoutRow("fsdp2/AdamW8bit-torchao", _INT8, f"torchao.optim.AdamW8bit(params, {ADAM})", shapes=WIDE),
    LayoutRow("fsdp2/AdamW8bit-bitsandbytes", _INT8, f"bitsandbytes.optim.AdamW8bit(params, {ADAM})", shapes=WIDE),
    LayoutRow("fsdp2/AdamW-bitsandbytes", _ADAMW, f"bitsandbytes.optim.AdamW(params, {ADAM})"),
    LayoutRow(
        "fsdp2/AdamW8bit-flashoptim",
        _INT8,
        f"flashoptim.FlashAdamW(params, {ADAM}, master_weight_bits=None)",
        shapes=WIDE,
        needs="cuda",
    ),
    LayoutRow(
        "fsdp2/LAMB-bitsandbytes", f"tilestep.LAMB(params, {_LAMB})", f"bitsandbytes.optim.LAMB(params, {_LAMB})"
    ),
    LayoutRow(
        "fsdp2/Adafactor",
        "tilestep.Adafactor(params, lr=1e-2, weight_decay=0.1)",
        "torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1)",
    ),
    LayoutRow(
        "fsdp2/ScheduleFreeAdamW",
        "tilestep.ScheduleFreeAdamW(params, lr=1e-3, warmup_steps=4)",
        "schedulefree.AdamWScheduleFree(params, lr=1e-3, warmup_steps=4)",
    ),
    LayoutRow("fsdp2/Muon", _TILESTEP_MUON, _TORCH_MUON, shapes=UNEVEN_MATRICES),
    LayoutRow("fsdp2/NorMuon-dion", _LIKE_DION, _DION, shapes=UNEVEN_MATRICES),
    LayoutRow("fsdp2/Muon-emerging_optimizers", _LIKE_EMERGING, _EMERGING, shapes=UNEVEN_MATRICES),
    LayoutRow("tp/AdamW-clip", _CLIPPED, _TORCH_ADAMW, shapes=(*MATRICES, (301,)), max_norm=0.1),
    LayoutRow(
        "tp/LAMB-bitsandbytes",
        f"tilestep.LAMB(params, {_LAMB})",
        f"bitsandbytes.optim.LAMB(params, {_LAMB})",
        shapes=MATRICES,
    ),
    LayoutRow("tp/Muon", _TILESTEP_MUON, _TORCH_MUON, shapes=MATRICES),
    LayoutRow("tp/NorMuon-dion", _LIKE_DION, _DION, shapes=MATRICES),
    LayoutRow("tp/Muon-emerging_optimizers", _LIKE_EMERGING, _EMERGING, shapes=MATRICES),
    *(
        LayoutRow(
            f"tp/Muon-megatron-{mode}",
            _LIKE_EMERGING,
            _MEGATRON.format(mode)[:-1]
            + ", pg_collection=megatron.core.process_groups_config.ProcessGroupCollection(tp=mesh.get_group()))",
            their_alone=_MEGATRON.format(mode),
            shapes=MATRICES,
        )
        for mode in ("duplicated", "distributed", "blockwise")
    ),
    LayoutRow("experts/AdamW", _ADAMW, _TORCH_ADAMW, shapes=_EXPERTS),
    LayoutRow("experts/AdamW-foreach", _ADAMW, f"torch.optim.AdamW(params, {ADAM}, foreach=True)", shapes=_EXPERTS),
    LayoutRow(
        "experts/AdamW-clip",
        _CLIPPED,
        f"torch.optim.AdamW(params, {ADAM}, foreach=False)",
        shapes=_EXPERTS,
        max_norm=0.1,
    ),
    LayoutRow("experts/AdamW-loop", _ADAMW, f"torch.optim.AdamW(params, {ADAM}, foreach=False)", shapes=_EXPERTS),
    LayoutRow(
        "experts/AdamW-clip-no-plain-tensors",
        _CLIPPED,
        f"torch.optim.AdamW(params, {ADAM}, foreach=False)",
        shapes=((4, 32, 48), (96, 64), (257, 33)),
        max_norm=0.1,
    ),
    LayoutRow("experts/Muon", _TILESTEP_MUON, _TORCH_MUON, shapes=((4, 32, 48), (96, 64))),
    LayoutRow("experts/NorMuon-dion", _LIKE_DION, _DION, shapes=((4, 32, 48), (96, 64))),
    LayoutRow(
        "zero/AdamW",
        f"tilestep.shard(tilestep.AdamW(params, {ADAM}), model)",
        f"torch.distributed.optim.ZeroRedundancyOptimizer(params, torch.optim.AdamW, {ADAM})",
        _ADAMW,
        f"torch.optim.AdamW(params, {ADAM})",
    ),
    LayoutRow(
        "zero/AdamW-accumulation",
        f"tilestep.shard(tilestep.AdamW(params, {ADAM}), model)",
        f"torch.distributed.optim.ZeroRedundancyOptimizer(params, torch.optim.AdamW, {ADAM})",
        _ADAMW,
        f"torch.optim.AdamW(params, {ADAM})",
        micro_batches=3,
    ),
    LayoutRow(
        "zero/Muon-accumulation",
        f"tilestep.shard({_TILESTEP_MUON}, model)",
        "torch.distributed.optim.ZeroRedundancyOptimizer(params, torch.optim.Muon, lr=1e-2, weight_decay=0.1)",
        _TILESTEP_MUON,
        _TORCH_MUON,
        shapes=UNEVEN_MATRICES,
        micro_batches=3,
    ),
    LayoutRow("accumulation/AdamW", _ADAMW, _TORCH_ADAMW, micro_batches=3),
    LayoutRow("accumulation/Muon", _TILESTEP_MUON, _TORCH_MUON, shapes=UNEVEN_MATRICES, micro_batches=3),
    LayoutRow("resume-fsdp2/AdamW", _ADAMW, _TORCH_ADAMW),
    LayoutRow("resume-fsdp2/AdamW8bit-torchao", _INT8, f"torchao.optim.AdamW8bit(params, {ADAM})", shapes=WIDE),
    LayoutRow(
        "resume-fsdp2/AdamW8bit-flashoptim",
        _INT8,
        f"flashoptim.FlashAdamW(params, {ADAM}, master_weight_bits=None)",
        shapes=WIDE,
        needs="cuda",
    ),
    LayoutRow("resume-fsdp2/Muon", _TILESTEP_MUON, _TORCH_MUON, shapes=UNEVEN_MATRICES),
    LayoutRow("resume-fsdp2/NorMuon-dion", _LIKE_DION, _DION, shapes=UNEVEN_MATRICES),
]
"""All comparisons on several ranks, layout by layout."""
