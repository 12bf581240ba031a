"""Ranks that die in backward, in the step, in a checkpoint: the others raise, and what was saved loads."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rank_processes import all_pass
from scripts import run_function
from sharded_twins import TINY
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tilestep
from tilestep.execution.zero.execution import ParameterSync

RANKS = 3
TIMEOUT = timedelta(seconds=15)
"""Of what the ranks do together; long enough for a machine that runs other tests."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killing(torch.autograd.Function):
    """Kills its process in backward."""

    @staticmethod
    def forward(context: Any, data: torch.Tensor) -> torch.Tensor:
        return data.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        die()


class Training:
    """A model and its optimizer, over a group of a short timeout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        optimizer = tilestep.AdamW(self.model.parameters(), lr=0.1, max_grad_norm=1.0)  # type: ignore[attr-defined]
        mesh = DeviceMesh.from_group(dist.new_group(timeout=TIMEOUT), "cpu")
        self.optimizer = tilestep.shard(optimizer, self.model, mesh, bucket_cap_mb=TINY)

    def step(self, killing: bool = False) -> None:
        hidden = torch.ones(2, 4)
        for index, layer in enumerate(self.model):
            hidden = layer(hidden)
            if index == 2 and killing:
                hidden = Killing.apply(hidden)
        hidden.sum().backward()
        self.optimizer.step()
        self.optimizer.wait()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def in_backward(training: Training, folder: str) -> None:
    training.step(killing=dist.get_rank() == 1)


def in_the_step(training: Training, folder: str) -> None:
    if dist.get_rank() == 1:
        ParameterSync.gather = lambda *_: die()  # type: ignore[method-assign]
    training.step()


def while_a_checkpoint_is_written(training: Training, folder: str) -> None:
    write = dcp.FileSystemWriter.write_data

    def then_die(*arguments: Any) -> None:
        write(*arguments).wait()
        die()

    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = then_die  # type: ignore[assignment, method-assign]
    tilestep.save_checkpoint(training.state(), folder)


def before_a_checkpoint_is_finished(training: Training, folder: str) -> None:
    """The rank that all others report to."""
    if dist.get_rank() == 0:
        dcp.FileSystemWriter.finish = lambda *_, **__: die()  # type: ignore[method-assign]
    tilestep.save_checkpoint(training.state(), folder)


def work(rank: int, folder: str, scenario: Callable[[Training, str], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    training = Training()
    training.step()
    tilestep.save_checkpoint(training.state(), f"{folder}/saved")
    full = training.optimizer.full_state_dict(rank=2)
    if rank == 2:
        torch.save((training.model.state_dict(), full), f"{folder}/known")
    training.step()
    try:
        scenario(training, f"{folder}/saved")
    except (RuntimeError, dcp.CheckpointException) as error:
        Path(folder, f"report{rank}").write_text(str(error))
    # Not by way of what torch does at the end of a process: its group is broken.
    os._exit(0)


SCENARIOS = {
    in_backward: 1,
    in_the_step: 1,
    while_a_checkpoint_is_written: 1,
    before_a_checkpoint_is_finished: 0,
}


class Loads:
    """On other ranks, the last whole checkpoint is there, and the next save removes what the last one has left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.__name__ = folder, "loads"

    def __call__(self) -> None:
        training = Training()
        state = training.state()
        assert tilestep.load_checkpoint(state, self.folder / "saved").name == "checkpoint-1"
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        model, full = torch.load(self.folder / "known", weights_only=True)
        for name, value in training.model.state_dict().items():
            torch.testing.assert_close(value, model[name], rtol=0, atol=0)
        mine = training.optimizer.full_state_dict()["state"]
        for number, values in full["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(mine[number][name], value, rtol=0, atol=0)
        training.step()
        assert tilestep.save_checkpoint(training.state(), self.folder / "saved", keep=1).name == "checkpoint-2"
        dist.barrier()
        assert [path.name for path in (self.folder / "saved").iterdir()] == ["checkpoint-2"]


def exit_codes(folder: str, scenario: Callable[[Training, str], None]) -> list[int | None]:
    context = mp.get_context("fork")
    processes = [context.Process(target=work, args=(rank, folder, scenario)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_others_raise(scenario: Callable[[Training, str], None], tmp_path: Path) -> None:
    lost = SCENARIOS[scenario]
    codes = run_function(exit_codes, str(tmp_path), scenario)
    assert codes == [-signal.SIGKILL if rank == lost else 0 for rank in range(RANKS)]
    for rank in range(RANKS):
        if rank != lost:
            assert (tmp_path / f"report{rank}").read_text()
    all_pass([Loads(tmp_path)], 2)


def test_checkpoints_are_kept_in_number(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(3)}
    with pytest.raises(ValueError, match="keep"):
        tilestep.save_checkpoint(state, tmp_path, keep=0)
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        tilestep.load_checkpoint(state, tmp_path / "elsewhere")
    for number in range(1, 5):
        state["weight"].fill_(number)
        assert tilestep.save_checkpoint(state, tmp_path, keep=2).name == f"checkpoint-{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    (tmp_path / "checkpoint-5.unfinished").mkdir()
    assert tilestep.load_checkpoint(state, tmp_path).name == "checkpoint-4" and state["weight"].tolist() == [4.0] * 3


def foreign_checkpoint(path: Path, state: dict[str, Any] | None = None) -> Path:
    """A folder of a trainer: with files of its own, or written by torch's distributed checkpoint."""
    path.mkdir()
    (path / "model.safetensors").write_text("weights of another trainer")
    if state is not None:
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("keep", [None, 1])
def test_folders_of_others_are_never_removed(keep: int | None, tmp_path: Path) -> None:
    theirs = [foreign_checkpoint(tmp_path / f"checkpoint-{name}") for name in ("500", "1000", "7.unfinished")]
    state = {"weight": torch.ones(3)}
    names = [tilestep.save_checkpoint(state, tmp_path, keep=keep).name for _ in range(3)]
    assert names == ["checkpoint-1001", "checkpoint-1002", "checkpoint-1003"]
    assert all((path / "model.safetensors").read_text() == "weights of another trainer" for path in theirs)
    own = {path.name for path in tmp_path.iterdir()} - {path.name for path in theirs}
    assert own == (set(names) if keep is None else {names[-1]})


def test_a_copy_and_a_link_to_a_checkpoint_are_not_removed(tmp_path: Path) -> None:
    state, elsewhere = {"weight": torch.ones(3)}, tmp_path / "elsewhere"
    first = tilestep.save_checkpoint(state, tmp_path)
    copy = shutil.copytree(first, tmp_path / "checkpoint-2")
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    for number in (3, 4):
        assert tilestep.save_checkpoint(state, tmp_path, keep=1).name == f"checkpoint-{number}"
    assert copy.is_dir() and elsewhere.is_dir() and first.is_symlink()
    assert not (tmp_path / "checkpoint-3").exists()


def test_own_checkpoints_are_loaded_first_and_those_without_a_mark_all_the_same(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3)}
    foreign_checkpoint(tmp_path / "checkpoint-5", state)
    foreign_checkpoint(tmp_path / "checkpoint-9")
    assert tilestep.load_checkpoint(state, tmp_path).name == "checkpoint-5"  # as tilestep 0.1.0 wrote them
    assert tilestep.save_checkpoint(state, tmp_path).name == "checkpoint-10"
    foreign_checkpoint(tmp_path / "checkpoint-20", state)
    assert tilestep.load_checkpoint(state, tmp_path).name == "checkpoint-10"


def test_a_save_that_died_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.ones(3)}
    with monkeypatch.context() as patch, pytest.raises(dcp.CheckpointException):
        patch.setattr(dcp.FileSystemWriter, "write_data", lambda *_: 1 / 0)
        tilestep.save_checkpoint(state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1.unfinished"]
    assert tilestep.save_checkpoint(state, tmp_path).name == "checkpoint-1"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
