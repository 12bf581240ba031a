"""Checkpoints of sharded optimizers that revision ba2ccfc wrote, in every format: they load on any number of ranks.

`python tests/execution/zero/test_earlier_checkpoints.py` writes them to `earlier/`: of two ranks, and of three.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import each_passes, run_on_ranks
from sharded_twins import TINY
from test_checkpoints import MAKERS, give_gradients, model_for
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tilestep
from tilestep.storage import with_code_names

EARLIER = Path(__file__).parent / "earlier"
SHAPES = {"odd_rows": (17, 257), "one_row": (4608,), "images": (16, 32, 3, 3), "small": (7,)}
FORMATS: dict[str, tuple[dict[str, Any], torch.dtype, tuple[str, ...]]] = {
    "int8": ({"state_dtype": "int8", "master_weights": "int8"}, torch.bfloat16, tuple(SHAPES)),
    "float8": ({"state_dtype": "float8_e4m3", "rounding": "stochastic"}, torch.bfloat16, ("one_row", "small")),
    "kahan": ({"state_dtype": "int8", "master_weights": "kahan"}, torch.bfloat16, ("odd_rows",)),
    "int4": ({"state_dtype": "int4", "master_weights": "remainder"}, torch.bfloat16, ("one_row", "images")),
    "mixed": ({"state_dtype": {"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}}, torch.float32, ("one_row",)),
}
CAP = 0.005
"""MiB of a bucket of the formats' parameters."""


class Weights(nn.Module):
    """Parameters whose states are cut between blocks, between rows, and not at all."""

    def __init__(self, dtype: torch.dtype, names: tuple[str, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name in names:
            values = torch.randn(SHAPES[name], generator=generator).to(dtype)
            values = values.to(memory_format=torch.channels_last) if name == "images" else values
            self.register_parameter(name, nn.Parameter(values))


def averaged(params: Any) -> tilestep.Optimizer:
    return tilestep.Optimizer(params, tilestep.ema(tilestep.registry["SGD"], 0.75), lr=0.1, max_grad_norm=1.0)


def plain(name: str) -> tuple[nn.Module, Any]:
    """A model and its optimizer, not sharded yet."""
    if name in FORMATS:
        options, dtype, names = FORMATS[name]
        model: nn.Module = Weights(dtype, names)
        return model, tilestep.AdamW(model.named_parameters(), lr=0.01, **options)  # type: ignore[attr-defined]
    model = model_for(name)
    del model.turned  # is newer than the checkpoints
    return model, (averaged if name.startswith("averaged") else MAKERS[name])(model.parameters())


def sharded(name: str, **options: Any) -> tuple[nn.Module, Any]:
    model, optimizer = plain(name)
    return model, tilestep.shard(optimizer, model, bucket_cap_mb=CAP if name in FORMATS else TINY, **options)


NAMES = (*MAKERS, "averaged", "averaged_in_eval")


def trained(name: str) -> dict[str, Any]:
    """Two steps, and what a checkpoint has of them."""
    model, optimizer = sharded(name)
    for step in range(2):
        # Of all parameters but one: what has no gradient has no state, but where all states begin together.
        give_gradients(model, step, skip="number")
        optimizer.step()
        optimizer.zero_grad()
    if name == "averaged_in_eval":
        optimizer.eval()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def write(folder: Path, names: tuple[str, ...]) -> None:
    dcp.save({name: trained(name) for name in names}, checkpoint_id=folder)


def write_packed(name: str, names: tuple[str, ...]) -> None:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(str(made[0]))
    write(folder, names)
    if dist.get_rank() == 0:
        with tarfile.open(EARLIER / f"{name}.tar.xz", "w:xz") as packed:
            for path in sorted(folder.iterdir()):
                packed.add(path, path.name)


def write_two() -> None:
    write_packed("two", (*NAMES, *FORMATS))


def write_three() -> None:
    write_packed("three", NAMES)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def unpacked(name: str) -> Path:
    """The folder of a checkpoint; each process has its own."""
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    with tarfile.open(EARLIER / f"{name}.tar.xz") as packed:
        packed.extractall(folder.name, filter="data")
    return Path(folder.name)


@cache
def read(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint, as torch reads them without an optimizer."""
    with tempfile.TemporaryDirectory() as made:
        dcp_to_torch_save(folder, Path(made) / "all.pt")
        saved = torch.load(Path(made) / "all.pt", weights_only=False)
    for one in saved.values():
        # Keys of checkpoints are strings.
        one["optimizer"]["state"] = {int(number): values for number, values in one["optimizer"]["state"].items()}
    return saved  # type: ignore[no-any-return]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def compare(mine: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A full state_dict has the groups and, to the bit, the states of a checkpoint."""
    # That revision kept codes under the names of their states.
    states, expected = mine["state"], {number: with_code_names(values) for number, values in wanted["state"].items()}
    assert states.keys() == expected.keys()
    for number, values in expected.items():
        assert states[number].keys() == values.keys(), number
        for key, value in values.items():
            found = states[number][key]
            assert found.shape == value.shape and found.dtype is value.dtype, (number, key)
            assert torch.equal(bits(found), bits(value)), (number, key)
    for group, other in zip(mine["param_groups"], wanted["param_groups"], strict=True):
        # A rule may have got a hyperparameter since.
        assert group.keys() >= other.keys() and list(group["params"]) == list(other["params"])


def load_each(folder: Path, names: tuple[str, ...]) -> None:
    """Each is loaded in place, and as whole tensors, and is saved as the same again."""
    for name in names:
        wanted = read(folder)[name]
        model, optimizer = sharded(name)
        if name == "averaged_in_eval":
            optimizer.eval()
        state = {name: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
        dcp.load(state, checkpoint_id=folder, planner=tilestep.LoadPlanner())
        model.load_state_dict(state[name]["model"])
        optimizer.load_state_dict(state[name]["optimizer"])
        compare(optimizer.full_state_dict(), wanted["optimizer"])
        other, whole = sharded(name)
        other.load_state_dict(wanted["model"])
        whole.load_state_dict(wanted["optimizer"])
        compare(whole.full_state_dict(), wanted["optimizer"])
        for trains in (optimizer, whole):
            trains.train()
        for one, trains in ((model, optimizer), (other, whole)):
            give_gradients(one, 2, skip="number")
            trains.step()
            trains.wait()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(bits(mine), bits(theirs)), name


def load_two() -> None:
    load_each(unpacked("two"), (*NAMES, *FORMATS))


def load_formats_of_two() -> None:
    load_each(unpacked("two"), tuple(FORMATS))


def load_three() -> None:
    load_each(unpacked("three"), NAMES)


def write_again() -> None:
    """The same training is saved under the same keys (but for codes), shapes and types, in the same places."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    write(Path(str(made[0])), (*NAMES, *FORMATS))
    if dist.get_rank() == 0:
        now = dcp.FileSystemReader(str(made[0])).read_metadata().state_dict_metadata
        now = {key.removesuffix("_codes"): entry for key, entry in now.items()}
        before = dcp.FileSystemReader(unpacked("two")).read_metadata().state_dict_metadata
        assert now.keys() >= before.keys() and all("param_groups" in key for key in now.keys() - before.keys())
        for key, entry in before.items():
            if hasattr(entry, "size"):
                assert (now[key].size, now[key].properties.dtype) == (entry.size, entry.properties.dtype), key
                assert sorted(map(str, now[key].chunks)) == sorted(map(str, entry.chunks)), key


def test_one_rank(one_rank: None) -> None:
    load_two()


# Of as many ranks as have written them only formats are loaded, whose parts end inside of blocks.
test_two_ranks = each_passes([load_three, load_formats_of_two, write_again], 2)
test_three_ranks = each_passes([load_two], 3)


def test_plain_optimizers_load_them() -> None:
    for name in (*NAMES, *FORMATS):
        wanted = read(unpacked("two"))[name]
        model, optimizer = plain(name)
        model.load_state_dict(wanted["model"])
        optimizer.load_state_dict(wanted["optimizer"])
        compare(optimizer.state_dict(), wanted["optimizer"])


if __name__ == "__main__":
    assert sys.argv[1:] == ["write"], "it writes over what an earlier revision has written: say `write`"
    import test_earlier_checkpoints as own  # whose functions other processes find

    failures = {**run_on_ranks([own.write_two], 2), **run_on_ranks([own.write_three], 3)}
    assert not failures, failures
