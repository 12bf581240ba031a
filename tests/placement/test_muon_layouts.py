"""The guide's tables: Muon's update is that of one process, on 1, 2, 3 and 4 ranks, whatever is added to a step.

Gradients are numbers of few bits, whose sums over ranks and over backward passes are exact: everything is compared to
the bit, on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import grid
from rank_processes import run_on_ranks
from sharded_models import device, here, placed
from torch.distributed.tensor import Replicate, Shard

import tilestep

Shapes = Sequence[tuple[int, ...]]

GUIDE = Path(__file__).parents[2] / "docs/guide/muon.md"
SHAPES = [(12, 8), (8, 12), (8, 8), (5, 8), (1, 6), (32, 8), (8, 8), (6, 3)]
"""With parts of no rows, and one whose part has the shape of a matrix beside it."""

STACKS = [(8, 4, 9), (3, 4, 9)]
LAYOUTS: dict[str, tuple[Shapes, dict[str, Any], str]] = {
    "rows (FSDP2)": ([(12, 8), (8, 12), (32, 8)], {}, "rows"),
    "uneven and empty shards": ([(5, 8), (1, 6), (6, 3)], {}, "rows"),
    "rows, with copies (HSDP)": (SHAPES, {}, "copies"),
    "columns (tensor parallelism)": (SHAPES, {}, "columns"),
    "columns and rows (tensor parallelism with FSDP2)": (SHAPES, {}, "both"),
    "stacks by expert": (STACKS, {}, "rows"),
    "stacks by rows and by expert": ([(8, 8, 9), (3, 5, 9)], {}, "experts"),
    "heads": ([(16, 6), (10, 8)], {"heads": 2}, "rows"),
    "splits": ([(36, 6)], {"splits": (2, 1)}, "rows"),
    "flattened convolutions": ([(9, 4, 3, 3)], {"flatten": True}, "rows"),
}
"""The guide's layouts of DTensors: shapes, what groups say of them, and the mesh."""

MASTERS = {"dtype": torch.bfloat16, "grad_sync_dtype": torch.float32}  # sums of three in bfloat16 are not exact
ADDITIONS: dict[str, dict[str, Any]] = {
    "`max_grad_norm`": {"max_grad_norm": 0.5},
    "a scaler, and an overflow": {"scaler": True, "overflow": 1},
    "`skip_nonfinite`": {"skip_nonfinite": True, "overflow": 1},
    "float32 masters of bfloat16 weights": {**MASTERS, "master_weights": True},
    "masters in remainders": {**MASTERS, "master_weights": "remainder"},
    "8-bit momenta": {"state_dtype": "int8"},
    "`state_dtype=torch.bfloat16`": {"state_dtype": torch.bfloat16},
    "a set of coefficients, decay, `lr` by a function": {
        "ns_coefficients": "polar_express", "weight_decay": 0.1, "lr": lambda step: 0.1 / step,
    },
    "parameters without gradients": {"without": {0: (1,), 2: (0, 5)}},
}  # fmt: skip
"""The guide's additions to a step."""


def _meshes() -> dict[str, tuple[Any, list[Any]]]:
    """Where tensors lie on this many ranks; two dimensions only where there is an even number."""
    ranks = dist.get_world_size()
    flat = grid(device(), (ranks,), ("ranks",))
    found: dict[str, tuple[Any, list[Any]]] = {"rows": (flat, [Shard(0)]), "columns": (flat, [Shard(1)])}
    if ranks % 2 == 0:
        square = grid(device(), (ranks // 2, 2), ("first", "second"))
        found |= {
            "copies": (square, [Replicate(), Shard(0)]),
            "both": (square, [Shard(0), Shard(1)]),
            "experts": (square, [Shard(1), Shard(0)]),
        }
    return found


def _drawn(shapes: Shapes, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device(), torch.bfloat16) for shape in shapes]


class Training:
    """Parameters that lie somewhere, and their optimizer."""

    def __init__(self, shapes: Shapes, place: str, *, dtype: torch.dtype = torch.float32, **given: Any) -> None:
        self.shapes, self.place, self.dtype = shapes, place, dtype
        self.rules = {key: given.pop(key, None) for key in ("scaler", "overflow", "without")}
        synced = {"grad_sync_dtype": given.pop("grad_sync_dtype", None)} if place == "shard" else {}
        given.pop("grad_sync_dtype", None)
        named = {f"w{number}": torch.nn.Parameter(self.lay(one)) for number, one in enumerate(_drawn(shapes, 0))}
        self.model = torch.nn.ParameterDict(named)
        self.params: list[Any] = list(named.values())
        self.optimizer: Any = tilestep.Muon(self.params, **{"lr": 0.1, **given})
        if place == "shard":
            self.optimizer = tilestep.shard(self.optimizer, self.model, **synced)
        if place == "offload":
            self.optimizer = tilestep.offload(self.optimizer, where="gpu")
        self.scaler = tilestep.GradScaler(device(), init_scale=256.0) if self.rules["scaler"] else None

    def lay(self, whole: torch.Tensor) -> Any:
        whole = whole.to(self.dtype)
        return placed(whole, *_meshes()[self.place]) if self.place in _meshes() else whole

    def backward(self, gradients: Sequence[torch.Tensor | None], *, last: bool) -> None:
        """Accumulate gradients; those of ranks are equal, and so is their mean."""
        if self.place == "shard":
            with contextlib.nullcontext() if last else self.optimizer.no_sync():
                pairs = [(own, one.to(self.dtype)) for own, one in zip(self.params, gradients) if one is not None]
                torch.stack([(own * one).sum().float() for own, one in pairs]).sum().backward()
            return
        for own, one in zip(self.params, gradients):
            if one is not None:
                own.grad = self.lay(one) if own.grad is None else own.grad + self.lay(one)

    def step(self, number: int, passes: int = 1) -> None:
        absent = (self.rules["without"] or {}).get(number, ())
        scale = 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones((), device=device())))
        spoilt = torch.inf if self.rules["overflow"] == number else 1.0
        for part in range(passes):
            drawn = _drawn(self.shapes, 10 * number + part + 1)
            listed = [None if at in absent else one * (scale * spoilt / passes) for at, one in enumerate(drawn)]
            self.backward(listed, last=part == passes - 1)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.place == "shard":
            self.optimizer.wait()

    def equals(self, other: Training, what: Any) -> None:
        for number, (own, theirs) in enumerate(zip(self.params, other.params)):
            if device() == "cuda":  # other batches, other tilings
                torch.testing.assert_close(*here(own, theirs), atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(*here(own, theirs)), (what, number)


def each_layout_has_one_update() -> None:
    """Gradients of two backward passes are added up."""
    for name, (shapes, given, mesh) in LAYOUTS.items():
        if mesh in _meshes():
            own, wanted = Training(shapes, mesh, **given), Training(shapes, "", **given)
            for number in range(3):
                own.step(number, passes=2)
                wanted.step(number, passes=2)
                own.equals(wanted, name)
    # A CPU's state has nowhere else to be.
    apart = [Training(SHAPES, place) for place in ("shard", *(["offload"] if device() == "cuda" else []))]
    wanted = Training(SHAPES, "")
    for number in range(3):
        for own in (*apart, wanted):
            own.step(number, passes=2)
        for own in apart:
            own.equals(wanted, own.place)


def each_addition_has_one_update() -> None:
    for name, given in ADDITIONS.items():
        wanted = Training(SHAPES, "", **given)
        places = [place for place in ADDED[dist.get_world_size()] if place in WHOLE_ROWS or name != "8-bit momenta"]
        own = [Training(SHAPES, place, **given) for place in places]
        for number in range(3):
            for one in (*own, wanted):
                one.step(number)
            for one in own:
                one.equals(wanted, (name, one.place))
        if "overflow" in given:
            assert int(wanted.optimizer.skipped_steps) == 1


ADDED = {
    1: ("rows", "shard"),
    2: ("columns", "copies", "shard"),
    3: ("rows", "shard"),
    4: ("copies", "both", "shard"),
}
"""Where additions are compared, by the number of ranks."""

WHOLE_ROWS = ("rows", "copies", "shard")
"""Where 8-bit momenta have the same blocks as in one process: those of a part's rows are of its own columns."""


def _states(training: Training) -> dict[str, Any]:
    return {"model": dict(training.model), "optimizer": training.optimizer.state_dict()}


def checkpoints_pass_from_one_number_of_ranks_to_another(folder: str, before: int) -> None:
    """What `before` ranks have saved after two steps goes on here as if there had been no checkpoint."""
    for given in ({}, {"state_dtype": "int8"}):
        wanted = Training(SHAPES, "", **given)
        for number in range(2):
            wanted.step(number)
        places = [place for place in ("rows", "columns", "shard") if not given or place in WHOLE_ROWS]
        for place in places:
            own = Training(SHAPES, place, **given)
            path = f"{folder}/{place}-{len(given)}"
            if before:
                state = _states(own)
                dcp.load(state, checkpoint_id=f"{path}-{before}", planner=tilestep.LoadPlanner())
                own.optimizer.load_state_dict(state["optimizer"])
            else:
                for number in range(2):
                    own.step(number)
            own.equals(wanted, place)
            dcp.save(_states(own), checkpoint_id=f"{path}-{dist.get_world_size()}")
            after = Training(SHAPES, "", **given)
            for number in range(3):
                after.step(number)
            own.step(2)
            own.equals(after, place)


def _checks(folder: Path, before: int) -> Mapping[str, Callable[[], None]]:
    return {
        "layouts": each_layout_has_one_update,
        "additions": each_addition_has_one_update,
        "checkpoints": functools.partial(checkpoints_pass_from_one_number_of_ranks_to_another, str(folder), before),
    }


def _rows(table: str) -> Iterator[str]:
    lines = GUIDE.read_text().partition(f"<!-- table: {table} -->")[2].partition("\n\n")[0]
    return (line.split("|")[1].strip() for line in lines.strip().splitlines()[2:])


def test_one_update_on_one_to_four_ranks(tmp_path: Path) -> None:
    failures = {}
    for before, ranks in ((0, 4), (4, 1), (1, 3), (3, 2)):
        failures |= {
            f"{ranks} ranks, {name}": text for name, text in run_on_ranks(_checks(tmp_path, before), ranks).items()
        }
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def test_the_guide_lists_what_is_compared() -> None:
    assert [*_rows("layouts")] == ["one process", *LAYOUTS, "`tilestep.shard`", "`tilestep.offload`"]
    assert [*_rows("additions")] == [
        "gradients of several backward passes",
        *ADDITIONS,
        "checkpoints of other numbers of ranks",
        "CUDA graphs",
    ]
