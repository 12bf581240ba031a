"""Ranks that die in backward, in the step, in a checkpoint: the others say who it was, and what was saved loads."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Client, Listener
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
from tilestep.schedules.zero import ranks as rank_monitor
from tilestep.schedules.zero.parameters import ParameterSync
from tilestep.schedules.zero.ranks import RankMonitor

RANKS = 3
TIMEOUT = timedelta(seconds=15)
"""Of what the ranks do together; long enough for a machine that runs other tests."""

PATIENCE = 3.0


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
    rank_monitor.PATIENCE = PATIENCE
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    training = Training()
    training.step()
    # One that comes back from a store when the interpreter has ended would abort the process.
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    tilestep.save_checkpoint(training.state(), f"{folder}/saved")
    full = training.optimizer.full_state_dict(rank=2)
    if rank == 2:
        torch.save((training.model.state_dict(), full), f"{folder}/known")
    training.step()
    try:
        scenario(training, f"{folder}/saved")
        report: Any = ("nothing", [])
    except tilestep.RankError as error:
        report = (str(error), error.ranks)
    torch.save(report, f"{folder}/report{rank}")
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
def test_the_others_say_who_is_gone(scenario: Callable[[Training, str], None], tmp_path: Path) -> None:
    lost = SCENARIOS[scenario]
    codes = run_function(exit_codes, str(tmp_path), scenario)
    assert codes == [-signal.SIGKILL if rank == lost else 0 for rank in range(RANKS)]
    for rank in range(RANKS):
        if rank != lost:
            message, ranks = torch.load(tmp_path / f"report{rank}", weights_only=True)
            assert ranks == [lost] and f"rank {lost} is gone" in message, message
    all_pass([Loads(tmp_path)], 2)


def no_store() -> None:
    """Where torch does not say which one it is."""


def hold(address: str, rank: int) -> None:
    """A process that is watched until it is told how to end."""
    monitor = RankMonitor(no_store, rank, 3)
    monitors = Client(address, "AF_UNIX")
    monitors.send(monitor.own)
    with contextlib.suppress(EOFError):
        if monitors.recv() == "end":
            monitor.close()
    os._exit(0)


class Others:
    """Two other ranks of this host, each a process of its own."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.ends, self.processes, self.told = [], [], []
        for rank in (1, 2):
            with Listener(str(folder / f"{rank}"), "AF_UNIX") as listener:
                self.processes.append(threads.submit(run_function, hold, listener.address, rank))
                self.ends.append(listener.accept())
                self.told.append(self.ends[-1].recv())

    def let_go(self, rank: int, how: str) -> None:
        self.ends[rank - 1].send(how)
        self.processes[rank - 1].result(60)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Others]:
    monkeypatch.setattr(rank_monitor, "PATIENCE", 0.5)
    monkeypatch.setattr(RankMonitor, "is_current", True)
    with ThreadPoolExecutor(2) as threads:
        made = Others(tmp_path, threads)
        yield made
        for end in made.ends:
            end.close()


def test_errors_are_explained(others: Others, caplog: pytest.LogCaptureFixture) -> None:
    monitor = RankMonitor(no_store, 0, 3)
    monitor.watch([monitor.own, *others.told], logs=True)
    with pytest.raises(tilestep.RankError, match=r"all ranks are there.*late"), monitor:
        raise RuntimeError("timed out")
    with pytest.raises(KeyError), monitor:
        raise KeyError
    Path(others.told[0].path).unlink()
    with pytest.raises(tilestep.RankError, match=r"all ranks are there"), monitor:
        raise RuntimeError("timed out")
    others.let_go(1, "end")
    # One that ends as it should is no error, until another waits for it.
    assert not monitor._over.wait(0.5) and "gone" not in caplog.text
    with pytest.raises(tilestep.RankError, match=r"rank 1 is gone.*\(timed out\)") as caught, monitor:
        raise RuntimeError("timed out")
    others.let_go(2, "die")
    with pytest.raises(tilestep.RankError, match=r"ranks 1, 2 are gone.*\(timed out\)") as caught, monitor:
        raise RuntimeError("timed out")
    assert caught.value.ranks == [1, 2] and isinstance(caught.value.__cause__, RuntimeError)
    monitor._thread.join(60)
    assert "rank 2 is gone" in caplog.text
    monitor.close()
    assert not Path(others.told[0].path).exists() and monitor.own.path == ""


def test_ranks_of_another_host_tell_what_they_have_found(others: Others) -> None:
    store = dist.HashStore()
    near, far = RankMonitor(lambda: store, 0, 4), RankMonitor(lambda: store, 3, 4)
    far.own = far.own._replace(host="another")
    near.watch([near.own, *others.told, far.own])
    far.watch([near.own, *others.told, far.own])
    with pytest.raises(tilestep.RankError, match="no host says that a process is gone"), far:
        raise RuntimeError("timed out")
    others.let_go(2, "die")
    assert far.missing() == [] and near.missing() == [2] and far.missing() == [2]
    others.let_go(1, "die")
    assert near.missing() == [2]
    near.close()
    far.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_other_processes_errors_stay_as_they_are(ranks: int) -> None:
    monitor = RankMonitor(no_store, 0, ranks)
    monitor.watch([monitor.own])
    with pytest.raises(RuntimeError, match=r"^timed out$"), monitor:
        raise RuntimeError("timed out")
    monitor.close()


@pytest.mark.parametrize(
    "module, name", [(tempfile, "gettempdir"), (tempfile, "mkstemp"), (rank_monitor.fcntl, "lockf")]
)
def test_ranks_without_a_place_for_files_are_not_held_up(
    others: Others, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, name: str
) -> None:
    """One of them raising alone would leave the others waiting for it."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, name, full)
    monitor = RankMonitor(no_store, 0, 3)
    assert monitor.own.path == "" and not list(tmp_path.iterdir())
    monitor.watch([monitor.own, *others.told])
    with pytest.raises(tilestep.RankError, match="no host says that a process is gone"), monitor:
        raise RuntimeError("timed out")
    monitor.close()


def test_a_process_ends_without_a_thread_that_waits_for_a_store(others: Others) -> None:
    """One that does when the interpreter ends aborts it."""
    monitor = RankMonitor(no_store, 0, 3)
    monitor.watch([monitor.own, *others.told], logs=True)
    monitor.close()
    assert not monitor._thread.is_alive()


def test_no_group_is_kept_that_was_destroyed(one_rank: None) -> None:
    """Its store would answer the next group on its port with addresses of the last one."""
    group, monitor = weakref.ref(dist.group.WORLD), rank_monitor.rank_monitor()
    assert monitor.is_current and monitor._store is not None
    dist.destroy_process_group()
    assert group() is None and not monitor.is_current and monitor._store is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert rank_monitor.rank_monitor() is not monitor


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
