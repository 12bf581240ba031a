"""Memory and time of a rank in an iteration: the arithmetic behind `tilestep plan` and docs/scaling.md.

What hides behind what is simulated bucket by bucket: a sum begins when backward has completed its bucket and the one
before has ended, and the next forward goes on when the parameters that it needs have arrived. What is hidden is not
free: its kernels take multiprocessors from the model's.

A collective over n ranks of which each holds B bytes at its end takes `latency(n) + B (n - 1) / n / bandwidth`, as a
ring does. The bandwidth is that inside a node, or of the network if that is less; GPUs of a node that are in the same
group share their network links.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..sharding.layout import default_sizes
from .constants import Constants
from .storage import Footprint

BUCKETS = (1, 2, 4, 8, 16, 25, 50, 100, 200, 400)
"""MiB of gradients in a bucket, those that `best_bucket` looks at."""

_CLOSE = 1.005
"""Iterations that differ by less are taken for equal."""


Regime = Literal["eager", "blocks", "whole"]
"""How the model runs: eager, every block compiled by itself, or compiled as a whole."""

_HOST_IS_NEAR = 0.85
"""From this part of the GPU's time on the host may be what is waited for; hosts of one kind of GPU differ by a half."""

_MOST_ELEMENTS, _MOST_RANKS, _MOST_BUCKETS = 1e13, 1e7, 5e5
"""Each bucket is looked at: more would take minutes, or all memory."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    Args:
        bucket: bytes of gradients in a bucket; None for the buckets that `shard` makes by itself.
        tensors: how many tensors the parameters are; None if that is not known, and so not what the host needs.
        in_backward: whether updates run while backward does, as with `overlap(during="backward")`, and gradients go
            with them: on one rank, and without a clip, which needs all of them.
    """

    elements: float  # of all parameters
    footprint: Footprint  # bytes for each of them
    shard: int  # ranks over which the state is split
    replicate: int = 1  # copies of the split state; `shard * replicate` ranks in all
    tokens: int = 8192  # of a rank in an iteration
    bucket: float | None = field(default=None, kw_only=True)
    contiguous: bool = True  # whether memory for all gradients is kept, as `shard(grad_buffer="contiguous")` does
    clips: bool = True  # whether steps need the norm of all gradients
    regime: Regime = field(default="eager", kw_only=True)  # how the model runs
    captured: bool = field(default=False, kw_only=True)  # whether iterations are replayed from a CUDA graph
    tensors: int | None = field(default=None, kw_only=True)

    in_backward: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.in_backward and (self.clips or self.ranks > 1):
            raise ValueError("Invalid in_backward: gradients go in backward on one rank, without a clip")
        optional = [name for name in ("bucket", "tensors") if getattr(self, name) is not None]
        for name in ("elements", "shard", "replicate", "tokens", *optional):
            if not getattr(self, name) >= 1:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}; it must be at least 1")
        if self.regime not in get_args(Regime):
            raise ValueError(f"Invalid regime: {self.regime!r}; it must be one of {', '.join(get_args(Regime))}")
        for name, most in (("elements", _MOST_ELEMENTS), ("ranks", _MOST_RANKS), ("tokens", _MOST_ELEMENTS)):
            if not getattr(self, name) <= most:
                raise ValueError(f"Invalid {name}: it must be at most {most:g}")

    @property
    def smallest_bucket(self) -> float:
        """Bytes of the smallest buckets that are looked at one by one."""
        return self.elements * self.footprint.gradient / _MOST_BUCKETS

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.shard * self.replicate

    @property
    def buckets(self) -> list[float]:
        """Bytes of gradients in each bucket, in the order in which backward completes them."""
        total = self.elements * self.footprint.gradient
        if self.bucket is None:
            return default_sizes(total)
        if self.bucket < self.smallest_bucket:
            fewest = math.ceil(self.smallest_bucket)
            raise ValueError(
                f"Invalid bucket: {self.bucket:g} bytes; it must be at least {fewest:,} for so many elements"
            )
        count = math.ceil(total / self.bucket)
        return [total / count] * count


@dataclass(frozen=True)
class Plan:
    """What a rank needs for a job, in bytes and seconds."""

    job: Job
    memory: dict[str, float]  # bytes by what they are for: parameters, gradients, state, scratch
    whole_state: float  # bytes of the state if it were not split
    sent: dict[str, float]  # bytes that a rank sends in an iteration, by collective
    messages: int  # collectives in an iteration, each of which has a latency
    times: dict[str, float]  # seconds by what is done, one after the other if nothing were hidden
    exposed: dict[str, float]  # seconds of each that nothing hides
    host: float | None  # seconds of the host in an iteration; None where the number of tensors is not known
    unclaimed: tuple[str, ...]  # why the iteration may be further off than 5%; empty where it is claimed

    @property
    def total_memory(self) -> float:
        """Bytes of all, without activations."""
        return sum(self.memory.values())

    @property
    def iteration(self) -> float:
        """Seconds of an iteration: of the GPU, or of the host if that takes longer."""
        return max(sum(self.exposed.values()), self.host or 0.0)

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.times["forward"] + self.times["backward"]

    @property
    def latency_share(self) -> float:
        """How much of the time of gradient sums and gathers is latency, from 0 to 1."""
        communication = self.times["sum gradients"] + self.times["gather parameters"]
        return self.times["latencies of both"] / communication if communication else 0.0


@dataclass(frozen=True)
class _Group:
    """Ranks that run a collective; every `stride`-th rank is one of them."""

    ranks: int
    stride: int
    constants: Constants

    @property
    def _in_node(self) -> int:
        return max(1, min(self.ranks, self.constants.gpus_per_node // self.stride))

    @property
    def latency(self) -> float:
        if self.ranks == 1:
            return 0.0
        known = self.constants
        nodes = math.ceil(self.ranks / self._in_node)
        hops = (self.ranks - nodes) * known.hop_latency + (nodes - 1) * known.network_hop_latency
        return known.launch_latency + hops

    def bytes_sent(self, size: float) -> float:
        return size * (self.ranks - 1) / self.ranks

    def seconds(self, size: float, bandwidth: float) -> float:
        if self.ranks > self._in_node:
            bandwidth = min(bandwidth, self._in_node * self.constants.network_bandwidth)
        return self.latency + self.bytes_sent(size) / bandwidth


def plan(job: Job, constants: Constants) -> Plan:
    """What a rank needs for a job.

    Example:
        >>> from tilestep.planning import default_constants, footprint
        >>> from tilestep.rules import registry
        >>> job = Job(1.2e9, footprint(registry["AdamW"], master_weights=True), shard=8, bucket=2**27)
        >>> found = plan(job, default_constants())
        >>> round(found.memory["state"] / 1e9, 2), round(found.whole_state / 1e9, 2)
        (1.8, 14.4)
    """
    size, elements = job.footprint, job.elements
    split, copies = _Group(job.shard, 1, constants), _Group(job.replicate, job.shard, constants)
    buckets = job.buckets
    rate, gather_rate = constants.reduce_scatter_bandwidth, constants.all_gather_bandwidth

    def one_sum(bucket: float) -> float:
        section = bucket / job.shard
        return split.seconds(bucket, rate) + copies.seconds(section, rate) + copies.seconds(section, gather_rate)

    def one_gather(bucket: float) -> float:
        return split.seconds(bucket / size.gradient * size.parameter, gather_rate)

    each_sum, each_gather = list(map(one_sum, buckets)), list(map(one_gather, buckets))
    sums, gathers = sum(each_sum), sum(each_gather)
    compiled = job.regime != "eager"
    fixed = elements * (constants.compiled_model_bytes if compiled else constants.model_bytes)
    flops = 6 * elements * job.tokens / (constants.compiled_compute if compiled else constants.compute)
    share = elements / job.shard
    norm = (share * size.gradient / constants.memory_bandwidth + 2 * split.latency) if job.clips else 0.0
    model = fixed / constants.memory_bandwidth + flops
    times = {
        "forward": model / 3,
        "backward": model * 2 / 3,
        # What backward has made is copied to where it is summed.
        "bring together": 2 * elements * size.gradient / constants.memory_bandwidth,
        "sum gradients": sums,
        "clip": norm,
        "update": share * size.moved / constants.memory_bandwidth + constants.step_latency,
        "gather parameters": gathers,
    }
    waited = _after_backward(buckets, times["backward"], each_sum)
    # Code that is compiled as a whole takes its parameters at once, and what follows a graph knows nothing of it.
    at_once = job.regime == "whole" or job.captured
    gathered = gathers if at_once else _before_blocks(buckets[::-1], times["forward"], each_gather[::-1])
    slowed = max(sums - waited, 0.0) * constants.beside_sums + (gathers - gathered) * constants.beside_gathers
    times["communication beside the model"] = slowed
    exposed = {**times, "sum gradients": waited, "gather parameters": gathered}
    host = None if job.captured else _host(job, constants)
    latencies = len(buckets) * (2 * split.latency + 2 * copies.latency)
    return Plan(
        job=job,
        memory={
            "parameters": elements * size.parameter,
            "gradients": 0.0 if job.in_backward else elements * size.gradient / (1 if job.contiguous else job.shard),
            "state": share * size.state,
            "scratch": 0.0 if job.contiguous and not job.in_backward else max(buckets),
        },
        whole_state=elements * size.state,
        sent={
            "reduce-scatter": split.bytes_sent(elements * size.gradient),
            "all-reduce": 2 * copies.bytes_sent(share * size.gradient),
            "all-gather": split.bytes_sent(elements * size.parameter),
        },
        messages=len(buckets) * (2 if job.replicate == 1 else 3) + 1 + job.clips,
        times={**times, "latencies of both": latencies},
        exposed=exposed,
        host=host,
        unclaimed=tuple(_unclaimed(job, constants, sum(exposed.values()), host)),
    )


def _after_backward(buckets: Sequence[float], backward: float, sums: Sequence[float]) -> float:
    """Seconds from the end of backward until all sums are there; one is begun after the other."""
    each, done, end = backward / sum(buckets), 0.0, 0.0
    for bucket, seconds in zip(buckets, sums):
        done += bucket
        end = max(end, done * each) + seconds
    return end - backward


def _before_blocks(buckets: Sequence[float], forward: float, gathers: Sequence[float]) -> float:
    """Seconds that a forward waits for its parameters, which arrive one bucket after the other in its order."""
    each, arrived, now = forward / sum(buckets), 0.0, 0.0
    for bucket, seconds in zip(buckets, gathers):
        arrived += seconds
        now = max(now, arrived) + bucket * each
    return max(now - forward, 0.0)


def _host(job: Job, constants: Constants) -> float | None:
    """Seconds of the host in an iteration that is not replayed."""
    if job.tensors is None:
        return None
    each = constants.model_host if job.regime == "eager" else constants.compiled_model_host
    messages = len(job.buckets) * constants.message_host
    return constants.step_host + messages + job.tensors * (each + constants.tensor_host)


def _unclaimed(job: Job, constants: Constants, seconds: float, host: float | None) -> Iterator[str]:
    """Why an iteration may take another time than this arithmetic says."""
    if job.ranks > constants.gpus_per_node and "network_bandwidth" in constants.assumed:
        yield "the network between nodes is assumed, not measured"
    if not job.captured and host is None:
        yield "the host's part is not known: say how many tensors there are"
    elif host is not None and host > _HOST_IS_NEAR * seconds:
        yield f"the host takes {host * 1e3:.0f} ms, and hosts differ"
    if any("matrix products" in note for note in job.footprint.notes):
        yield "the time of matrix products is not in it"


def best_bucket(job: Job, constants: Constants) -> float:
    """Bytes of the largest bucket with which an iteration takes least time, within half a percent.

    Larger ones are fewer messages, for the host to begin and for the GPU to run beside the model.
    """
    sizes = [size for mebibytes in BUCKETS if (size := mebibytes * 2**20) >= job.smallest_bucket]
    times = [plan(dataclasses.replace(job, bucket=size), constants).iteration for size in sizes]
    return max(size for size, time in zip(sizes, times) if time <= min(times) * _CLOSE)


def meshes(job: Job, constants: Constants) -> Iterator[Plan]:
    """Plans for other meshes of as many ranks, each with its best bucket: split over 2, 4, 8, ... or all ranks."""
    shard = 2
    while shard < 2 * job.ranks:
        split = min(shard, job.ranks)
        if job.ranks % split == 0:
            other = dataclasses.replace(job, shard=split, replicate=job.ranks // split)
            yield plan(dataclasses.replace(other, bucket=best_bucket(other, constants)), constants)
        shard *= 2


def crossover(ranks: int, constants: Constants) -> tuple[float, float]:
    """Seconds of latency of a reduce-scatter over so many ranks, and bytes that take as long again to move.

    Smaller buckets are mostly latency, larger ones mostly transfer.

    Example:
        >>> from tilestep.planning import default_constants
        >>> few, many = (crossover(ranks, default_constants()) for ranks in (8, 512))
        >>> few[0] < many[0], few[1] < many[1]
        (True, True)
    """
    group = _Group(ranks, 1, constants)
    transfer = group.seconds(1e9, constants.reduce_scatter_bandwidth) - group.latency
    return group.latency, group.latency / transfer * 1e9
