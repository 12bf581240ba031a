"""Buckets gathered in one message, as on NCCL; here on two CPU ranks, where it is not worth it."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import test_traffic
import test_training
import torch
import torch.distributed as dist
from rank_processes import all_pass
from sharded_twins import TINY, Elementwise, Pair, inputs, sgd, train, two_groups

import tilestep
from tilestep import compat
from tilestep.execution.zero import buckets as shard_buckets
from tilestep.execution.zero import execution
from tilestep.placement import Ranks, peers
from tilestep.placement import reduction as groups
from tilestep.timeline.side_stream import Mark, SideStream

LAYERS = 48
"""Of models with several groups of buckets that are as large as groups become."""


@contextmanager
def together() -> Iterator[list[int]]:
    """Gather together here too; how many buckets each call has."""
    sizes: list[int] = []
    before = Ranks.all_gather

    def counted(self: Ranks, flats: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]) -> Any:
        sizes.append(len(flats))
        return before(self, flats, sections)

    with pytest.MonkeyPatch.context() as patch:
        group_buckets = execution.group_buckets
        patch.setattr(execution, "group_buckets", lambda buckets, together: group_buckets(buckets, together=True))
        # Gloo, where several tensors in one message are of no use, has aborted processes that sent them beside others.
        patch.setattr(groups, "gather_together", lambda group, wholes, parts: (False, None))
        patch.setattr(Ranks, "all_gather", counted)
        yield sizes


def several_tensors_in_one_message() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wholes = [torch.zeros(ranks * size) for size in (3, 5)]
    parts = [whole[rank * size : (rank + 1) * size] for whole, size in zip(wholes, (3, 5))]
    for index, part in enumerate(parts):
        part.fill_(10 * index + rank)
    began, work = compat.gather_together(dist.group.WORLD, wholes, parts)
    assert began, f"torch {torch.__version__} gathers tensors one by one (compat)"
    work.wait()
    for index, (whole, size) in enumerate(zip(wholes, (3, 5))):
        expected = torch.arange(ranks).repeat_interleave(size) + 10.0 * index
        assert torch.equal(whole, expected)
    assert compat.gather_together(object(), wholes, parts) == (False, None)


def groups_grow_and_arrive() -> None:
    with together() as sizes:
        for options in ({}, {"param_sync_dtype": torch.uint8}):
            pair = Pair(Elementwise(LAYERS), sgd, bucket_cap_mb=TINY, **options)
            buckets = len(pair.optimizer.execution.sharding.buckets)
            for _ in range(3):
                sizes.clear()
                data = inputs(5, 7)
                train(pair, [lambda model, data=data: (model(data) * data).sum()])
                assert sum(sizes) == buckets and sizes[0] == 1 and max(sizes) > 2 and len(sizes) < buckets / 2
                pair.compare()


def buckets_that_are_converted_travel_alone() -> None:
    with together() as sizes:
        pair = Pair(Elementwise(), sgd, bucket_cap_mb=TINY, param_sync_dtype=torch.float16)
        data = inputs(5, 7)
        train(pair, [lambda model, data=data: (model(data) * data).sum()])
        assert set(sizes) == {1} and len(sizes) == len(pair.optimizer.execution.sharding.buckets)


def frozen_buckets_stay_at_home() -> None:
    with together() as sizes:
        pair = Pair(Elementwise(12), sgd, bucket_cap_mb=TINY)
        for step in range(4):
            for model in (pair.model, pair.twin):
                for index in (3, 4, 5, 6):
                    model.weights[index].requires_grad_(step % 2 == 0)
            sizes.clear()
            data = inputs(5, 7)
            train(pair, [lambda model, data=data: (model(data) * data).sum()])
            pair.compare()


class Files:
    """Memory that ranks on CPUs read from each other, as those do that GPUs have: mapped files."""

    made = 0
    offer = b"a file"

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        Files.made += 1
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder, 0)
        self._folder, self._numel, self._dtype = folder[0], numel, dtype
        self.memory = self._map(dist.get_rank())

    def _map(self, rank: int) -> torch.Tensor:
        return torch.from_file(f"{self._folder}/{rank}", shared=True, size=self._numel, dtype=self._dtype)

    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        assert rank == dist.get_rank() and list(offers) == [self.offer] * dist.get_world_size()

    def rendezvous(self, group: Any) -> None:
        dist.barrier(group)

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        return self._map(rank)[first:stop]

    def barrier(self) -> None:
        dist.barrier()


@contextmanager
def fetched() -> Iterator[list[int]]:
    """Have ranks on CPUs read each other's memory; what is sent nevertheless."""
    with together() as sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_buckets, "WAYS", (Files,))
        patch.setattr(shard_buckets, "has_streams", lambda device: True)
        yield sizes


def ranks_fetch_what_others_have_updated() -> None:
    before = Files.made
    with fetched() as sent:
        for make, options in ((sgd, {"param_buffer": "peers"}), (test_training.adamw, {})):
            pair = Pair(Elementwise(LAYERS), make, bucket_cap_mb=TINY, **options)
            assert pair.optimizer.describe_gathers() == [f"float32: {FETCHED}"]
            for _ in range(4):
                data = inputs(5, 7)
                train(pair, [lambda model, data=data: (model(data) * data).sum()])
                pair.compare()
            pair.compare_states()
        assert Files.made == before + 2 and not sent
        pair = Pair(Elementwise(12), sgd, bucket_cap_mb=TINY, param_buffer="peers", overlap_param_sync=False)
        data = inputs(5, 7)
        train(pair, [lambda model, data=data: (model(data) * data).sum()])
        pair.compare()


def what_is_converted_is_sent_from_such_memory_too() -> None:
    before = Files.made
    with fetched() as sent:
        for options in ({"param_buffer": "peers"}, {}):
            sent.clear()
            pair = Pair(Elementwise(), sgd, bucket_cap_mb=TINY, param_sync_dtype=torch.float16, **options)
            data = inputs(5, 7)
            train(pair, [lambda model, data=data: (model(data) * data).sum()])
            assert len(sent) == len(pair.optimizer.execution.sharding.buckets)
            assert pair.optimizer.describe_gathers() == [f"float32: {SENT} (its dtype is converted)"]
    assert Files.made == before + 1, "by itself it takes such memory only for what is fetched from it"


def gathers_that_are_waited_for_in_the_step() -> None:
    """Where a step waits for all, and where a model is compiled as a whole; sent as well as fetched, in a stream."""
    data = inputs(5, 7)
    for way in (together, fetched):
        with way(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(SideStream, "in_order", True)
            for groups_of in (two_groups, lambda model: [{"params": list(model.parameters())[::-1]}]):
                pair = Pair(Elementwise(12), sgd, groups_of, bucket_cap_mb=TINY, overlap_param_sync=False)
                for step in range(4):
                    for model in (pair.model, pair.twin):
                        for index in (3, 4, 5, 6):
                            model.weights[index].requires_grad_(step % 2 == 0)
                    train(pair, [lambda model, data=data: (model(data) * data).sum()])
                    pair.compare()
            model = Elementwise(LAYERS)
            model.compile(backend="eager")
            pair = Pair(model, test_training.adamw, bucket_cap_mb=TINY)
            for _ in range(3):
                train(pair, [lambda model, data=data: (model.forward(data) * data).sum()])
                pair.compare()
            pair.compare_states()


FETCHED = "ranks fetch it from each other's memory by copy engines"
SENT = "the process group's all-gathers send it"


class NoMemory(Files):
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(numel, dtype, device)
        if dist.get_rank() == 1:
            raise RuntimeError("of expandable segments\nand more")


class NotFound(Files):
    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        if rank == 0:
            raise OSError("not mapped")


class NotMet(Files):
    def rendezvous(self, group: Any) -> None:
        super().rendezvous(group)
        if dist.get_rank() == 1:
            raise RuntimeError("no signals")


class Garbled(Files):
    """Copies bring something else than what is there."""

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        return super().of(rank, first, stop).clone() * (1 + dist.get_rank())


def where_one_rank_cannot_all_of_them_send() -> None:
    """Chosen by itself it is another way of the same; asked for, it raises on all ranks and nothing is changed."""
    reasons = {
        NoMemory: "of expandable segments",
        NotFound: "not mapped",
        NotMet: "no signals",
        Garbled: "rank 1 does not read the values that other GPUs of the host wrote",
    }
    with fetched() as sent, pytest.MonkeyPatch.context() as patch:
        for way, reason in reasons.items():
            patch.setattr(shard_buckets, "WAYS", (way, Files))
            pair = Pair(Elementwise(LAYERS), test_training.adamw, bucket_cap_mb=TINY)
            assert pair.optimizer.describe_gathers() == [f"float32: {SENT} ({reason})"]
            sent.clear()
            for _ in range(2):
                data = inputs(5, 7)
                train(pair, [lambda model, data=data: (model(data) * data).sum()])
                pair.compare()
            assert sent
            # Who asks for it also gets memory that has its price.
            pair = Pair(Elementwise(12), sgd, bucket_cap_mb=TINY, param_buffer="peers")
            assert pair.optimizer.describe_gathers() == [f"float32: {FETCHED}"]
            patch.setattr(shard_buckets, "WAYS", (way, way))
            model = Elementwise(12)
            before = [param.data_ptr() for param in model.parameters()]
            with pytest.raises(ValueError, match=f"param_buffer='peers': {reason}; use 'auto'"):
                tilestep.shard(sgd(model.parameters()), model, param_buffer="peers")
            assert [param.data_ptr() for param in model.parameters()] == before


def ranks_of_two_hosts_send() -> None:
    with fetched() as sent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers.socket, "gethostname", lambda: f"host{dist.get_rank()}")
        pair = Pair(Elementwise(12), sgd, bucket_cap_mb=TINY)
        assert pair.optimizer.describe_gathers() == [f"float32: {SENT} (the ranks that shard the state are on 2 hosts)"]
        data = inputs(5, 7)
        train(pair, [lambda model, data=data: (model(data) * data).sum()])
        pair.compare()
        assert sent


def others_are_chosen() -> None:
    for options, reason in (
        ({}, "the parameters are on cpu"),
        ({"param_buffer": "contiguous"}, "param_buffer='contiguous'"),
        ({"param_buffer": "bucket"}, "param_buffer='bucket'"),
    ):
        pair = Pair(Elementwise(12), sgd, bucket_cap_mb=TINY, **options)
        assert pair.optimizer.describe_gathers() == [f"float32: {SENT} ({reason})"]


def memory_of_a_cpu_is_refused_on_all_ranks_and_nothing_is_changed() -> None:
    model = Elementwise()
    optimizer = sgd(model.parameters())
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"param_buffer='peers': only NVIDIA GPUs .* on cpu; use 'auto'"):
        tilestep.shard(optimizer, model, param_buffer="peers")
    assert [param.data_ptr() for param in model.parameters()] == before
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def a_sharded_optimizer_is_let_go_at_once() -> None:
    """Its state is most of what a GPU holds, and is not to wait until garbage is collected."""
    with together(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "in_order", True)
        pair = Pair(Elementwise(30), test_training.adamw, bucket_cap_mb=TINY, overlap_param_sync=False)
        train(pair, [lambda model: model(inputs(5, 7)).sum()])
        held = [weakref.ref(value) for state in pair.optimizer.state.values() for value in state.values()]
        gc.collect()
        gc.disable()
        try:
            del pair
            assert held and not any(reference() is not None for reference in held)
        finally:
            gc.enable()


def training_and_traffic_are_as_ever() -> None:
    checks = (
        test_training.dtypes_in_any_mixture,
        test_traffic.other_branches_on_every_rank_and_at_every_step,
        test_traffic.parameters_frozen_and_thawed,
    )
    with together():
        for check in checks:
            check()


def what_arrives_in_order_is_not_waited_for_again() -> None:
    """As on a GPU, where everything follows in the stream: sums and gathers are finished when they are asked for."""
    with together(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideStream, "in_order", True)
        for options in ({}, {"grad_buffer": "bucket"}, {"param_sync_dtype": torch.float64}):
            pair = Pair(Elementwise(30), sgd, bucket_cap_mb=TINY, **options)
            for _ in range(3):
                data = inputs(5, 7)
                train(pair, [lambda model, data=data: (model(data) * data).sum()] * 2)
                pair.compare()
                assert not pair.optimizer.execution.parameters.publication.tickets


CHECKS = [
    several_tensors_in_one_message,
    groups_grow_and_arrive,
    buckets_that_are_converted_travel_alone,
    frozen_buckets_stay_at_home,
    training_and_traffic_are_as_ever,
    what_arrives_in_order_is_not_waited_for_again,
    ranks_fetch_what_others_have_updated,
    what_is_converted_is_sent_from_such_memory_too,
    gathers_that_are_waited_for_in_the_step,
    a_sharded_optimizer_is_let_go_at_once,
    where_one_rank_cannot_all_of_them_send,
    ranks_of_two_hosts_send,
    others_are_chosen,
    memory_of_a_cpu_is_refused_on_all_ranks_and_nothing_is_changed,
]


def test_two_ranks() -> None:
    all_pass(CHECKS, 2)


class OrderedGroup:
    """Runs in the order of a stream, as NCCL: there is nothing to wait for."""

    def __init__(self) -> None:
        self.calls = 0

    def allgather_into_tensor_coalesced(self, *_: Any) -> None:
        self.calls += 1


def test_what_there_is_no_work_of_is_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group, flats = OrderedGroup(), [torch.zeros(4), torch.zeros(6)]
    assert compat.gather_together(group, flats, flats) == (True, None)
    monkeypatch.setattr(groups, "all_gather_flat", lambda *args, **options: pytest.fail("gathered again, one by one"))
    ranks = Ranks.__new__(Ranks)
    ranks.shard = group
    assert ranks.all_gather(flats, flats) == [None]
    assert group.calls == 2


def test_groups() -> None:
    """The first bucket goes alone, then as many bytes as before, no more than a part of all; dtypes never mix."""

    class Flat:
        def __init__(self, numel: int, dtype: torch.dtype = torch.float32) -> None:
            self.flat, self.dtype, self.sync_dtype = self, dtype, dtype
            self.nbytes = numel * dtype.itemsize

    def sizes(buckets: list[Flat], worth: bool = True) -> list[int]:
        return [len(group) for group in execution.group_buckets(buckets, worth)]  # type: ignore[arg-type]

    assert sizes([Flat(10) for _ in range(48)]) == [1, 1, 2, 4, 8, 8, 8, 8, 8]
    assert sizes([Flat(10) for _ in range(5)], worth=False) == [1] * 5
    assert sizes([Flat(10) for _ in range(3)]) == [1, 1, 1]
    mixed = [Flat(10, torch.float32 if index % 2 else torch.float16) for index in range(30)]
    assert sizes(mixed) == [1] * 30
    assert sizes([]) == []


class LateEvent:
    """The communication before it has not come to its end."""

    def query(self) -> bool:
        return False


class LateChannel:
    """A stream of communication that stays behind, with the last mark that was waited for."""

    in_order = True

    def __init__(self) -> None:
        self.marks = self.reached = 0

    @contextmanager
    def after_compute(self, *_: Any) -> Iterator[None]:
        yield

    def next_mark(self, before: Mark | None = None) -> Mark:
        self.marks += 1
        return Mark(LateEvent(), self.marks)  # type: ignore[arg-type]

    def wait_for(self, mark: Mark) -> None:
        self.reached = max(self.reached, mark.place)


def test_a_group_that_is_updated_no_more_is_not_the_last_to_wait_for() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
        sync = tilestep.shard(sgd(model.parameters()), model, bucket_cap_mb=TINY).execution.parameters
        channel: Any = LateChannel()
        sync._channel = sync.publication.lane = channel
        sync.gather()
        sync.publication.wait_all()
        assert channel.reached == channel.marks == len(sync._groups) == 3
        # Its bucket is the first one, as backward completes it first.
        sync.gather(b"\0\1\1")
        sync.publication.wait_all()
        assert channel.reached == channel.marks == 5
    finally:
        dist.destroy_process_group()
