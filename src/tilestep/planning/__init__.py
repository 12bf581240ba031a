"""Estimates memory and time per rank of sharded training, from measured constants: `plan`, `best_bucket`, `meshes`."""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ..execution.zero.buckets import default_sizes
from ..kernels.spec import total_traffic
from ..optimizer.masters import MasterWeights
from ..optimizer.states import compute_dtype
from ..placement.matrices import OWNED_IN_A_BUCKET
from ..rules import Rule
from ..runtime.batches import work_of
from .describe import spec_for

ASSUMED = "assumed"  # prefix of the source of a constant that is not measured
_DEFAULTS = Path(__file__).with_name("constants.json")


_KNOWN: dict[str, dict[str, Any]] = json.loads(_DEFAULTS.read_text())


@dataclass(frozen=True)
class Links:
    """Rates and latencies of messages between ranks, and how much backward and forward slow down meanwhile."""

    reduce_scatter_bandwidth: float
    all_gather_bandwidth: float
    network_bandwidth: float
    launch_latency: float
    hop_latency: float
    network_hop_latency: float
    beside_sums: float
    beside_gathers: float


@dataclass(frozen=True)
class Constants(Links):
    """Constants of a machine, from which the times of a plan are computed, and their `sources`.

    constants.json has their meanings and defaults, which were measured on H200 GPUs, eight to a node.
    """

    memory_bandwidth: float
    step_latency: float
    compute: float
    compiled_compute: float
    matrix_compute: float
    model_bytes: float
    compiled_model_bytes: float
    model_host: float
    compiled_model_host: float
    fsdp_host: float
    step_host: float
    tensor_host: float
    message_host: float
    gpu_memory: float
    gpus_per_node: int
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = _DEFAULTS) -> Constants:
        """Read constants that `save` wrote, all or some of them; the rest, and all without a path, are the defaults."""
        try:
            stored: dict[str, dict[str, Any]] = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(stored, dict) or not all(isinstance(entry, dict) for entry in stored.values()):
            raise ValueError(f'{path} has no constants: write {{"compute": {{"value": 4e14, "source": "measured"}}}}')
        for name, entry in stored.items():
            if name not in _KNOWN:
                raise ValueError(f"{path}: unknown constant {name!r}; it must be one of {', '.join(_KNOWN)}")
            if not isinstance(entry.get("value"), (int, float)) or not entry["value"] > 0:
                raise ValueError(f"{path}: {name} is {entry.get('value')!r}; it must be a positive number")
        entries = {**_KNOWN, **stored}
        sources = {name: str(entry.get("source", ASSUMED)) for name, entry in entries.items()}
        return cls(**{name: entry["value"] for name, entry in entries.items()}, sources=sources)

    def save(self, path: Path) -> None:
        """Write the constants as JSON: name, value, source, meaning."""
        entries = {
            name: {**known, "value": getattr(self, name), "source": self.sources.get(name, ASSUMED)}
            for name, known in _KNOWN.items()
        }
        path.write_text(json.dumps(entries, indent=1) + "\n")

    @property
    def assumed(self) -> list[str]:
        """Names of constants that are not measured."""
        return [name for name, source in self.sources.items() if source.startswith(ASSUMED)]


@dataclass(frozen=True)
class Footprint:
    """Bytes per element of the parameters."""

    parameter: float  # bytes of the parameter, as sent to other ranks
    gradient: float  # bytes of its gradient, as reduced over ranks
    state: float  # bytes of states and masters
    moved: float  # bytes read and written by the update, in all passes
    notes: tuple[str, ...] = ()  # costs that the numbers leave out
    matrix_work: Callable[[int, int], float] | None = None  # operations for a matrix, from its rows and columns


def footprint(
    rule: Rule,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    master_weights: MasterWeights = False,
    state_dtype: Any = None,
    rounding: str = "nearest",
    grad_sync_dtype: torch.dtype | None = None,
) -> Footprint:
    """Bytes that a rule stores and moves for the elements of a matrix."""
    spec = spec_for(
        rule, hyperparameters, dtype=dtype, master_weights=master_weights, state_dtype=state_dtype, rounding=rounding
    )
    graph, notes, state, work = spec.program.graph, [], 0.0, None
    for name, storage in spec.storages.items():
        if name in ("grad", *spec.program.matrices.scratch):
            continue
        if name == "param" or rule.states[name].shape == "param":
            arrays = [array for array in storage.arrays(name) if array.name != "param"]
            state += sum(array.dtype.itemsize / array.elements for array in arrays)
        else:
            notes.append(f"{name}, one number for each {rule.states[name].shape}")
    if graph.matrix_states:
        like = torch.empty(0, dtype=dtype, device="meta")
        state += len(graph.matrix_states) * compute_dtype(like).itemsize
        notes.append("for matrices that are not square, what squares of their sides need beyond the matrix itself")
    if spec.program.matrices.scratch:
        notes.append("memory for matrix products")
        group = {**rule.hyperparameters, **(hyperparameters or {})}
        work = functools.partial(work_of, spec.program.matrices, group)
    if spec.draws:
        notes.append("the arithmetic of random bits, for " + ", ".join(spec.draws))
    gradient = (grad_sync_dtype or dtype).itemsize
    moved = sum(total_traffic(spec)) + gradient - dtype.itemsize
    return Footprint(float(dtype.itemsize), float(gradient), state, float(moved), tuple(notes), work)


BUCKETS = (1, 2, 4, 8, 16, 25, 50, 100, 200, 400)  # MiB of gradients in a bucket, the candidates of `best_bucket`
_IN_BACKWARD = 25 * 2**20  # bytes of a bucket of `overlap(during="backward")`
_CLOSE = 1.005  # iterations within this ratio count as equal
Regime = Literal["eager", "blocks", "whole"]  # how the model runs: eager, or compiled block by block or whole
Layout = Literal["shard", "fsdp2"]  # sharding of the state by `tilestep.shard`, or of parameters too by FSDP2
_USED = 2  # bytes per element in FSDP2's all-gathers and in exchanges of matrices: bfloat16
_COPIED = 10
"""Bytes moved per element of a rank's own matrices: into whole matrices, zeros for the updates, and back."""
_HOST_IS_NEAR = 0.85  # above this fraction of the GPU's time the host may be the limit; hosts differ by a half
_MOST_ELEMENTS, _MOST_RANKS, _MOST_BUCKETS = 1e13, 1e7, 5e5  # a plan loops over buckets: more would take minutes
_MOST_MATRICES = 1_000_000


@dataclass(frozen=True)
class Job:
    """A training run: its model, ranks and options."""

    elements: float  # elements of all parameters
    footprint: Footprint  # bytes per element
    shard: int  # ranks over which the state is sharded
    replicate: int = 1  # replicas of the sharded state; `shard * replicate` ranks in total
    tokens: int = 8192  # tokens per rank and iteration
    bucket: float | None = field(default=None, kw_only=True)
    contiguous: bool = True  # whether memory for all gradients is kept, as `shard(grad_buffer="contiguous")` does
    clips: bool = True  # whether steps need the norm of all gradients
    regime: Regime = field(default="eager", kw_only=True)  # how the model runs
    captured: bool = field(default=False, kw_only=True)  # whether iterations are replayed from a CUDA graph
    tensors: int | None = field(default=None, kw_only=True)
    matrices: Sequence[tuple[int, int, int]] = field(default=(), kw_only=True)
    """The matrices of a rule on matrices: (count, rows, columns) per shape."""

    in_backward: bool = field(default=False, kw_only=True)
    layout: Layout = field(default="shard", kw_only=True)

    def __post_init__(self) -> None:
        if self.in_backward and (self.clips or self.ranks > 1):
            raise ValueError("Invalid in_backward: updates in backward require one rank and no clipping")
        for name in ("elements", "shard", "replicate", "tokens", "bucket", "tensors"):
            if (value := getattr(self, name)) is not None and not value >= 1:
                raise ValueError(f"Invalid {name}: {value}; it must be at least 1")
        for name, kinds in (("regime", Regime), ("layout", Layout)):
            if (value := getattr(self, name)) not in get_args(kinds):
                raise ValueError(f"Invalid {name}: {value!r}; it must be one of {', '.join(get_args(kinds))}")
        if sum(count for count, _, _ in self.matrices) > _MOST_MATRICES:
            raise ValueError(f"Invalid matrices: there must be at most {_MOST_MATRICES:,}")
        for name, most in (("elements", _MOST_ELEMENTS), ("ranks", _MOST_RANKS), ("tokens", _MOST_ELEMENTS)):
            if not getattr(self, name) <= most:
                raise ValueError(f"Invalid {name}: it must be at most {most:g}")

    def of_regime(self, constants: Constants, name: str) -> float:
        """The constant for an eager or a compiled model."""
        return getattr(constants, name if self.regime == "eager" else f"compiled_{name}")  # type: ignore[no-any-return]

    @property
    def smallest_bucket(self) -> float:
        """The least bytes of a bucket for which the number of buckets is supported."""
        return self.elements * self.footprint.gradient / _MOST_BUCKETS

    @property
    def matrix_work(self) -> float:
        """Operations on matrices of the busiest rank; matrices are assigned to ranks, the largest first."""
        work, loads = self.footprint.matrix_work, [0.0] * self._owners
        if work is None:
            return 0.0
        each = [(work(rows, columns), count) for count, rows, columns in self.matrices]
        for amount, count in sorted(each, reverse=True):
            for _ in range(count):
                heapq.heapreplace(loads, loads[0] + amount)
        return max(loads)

    @property
    def _owners(self) -> int:
        """The number of ranks that divide the matrices; with FSDP2 replicas take part too."""
        return self.shard if self.layout == "shard" else self.ranks

    @property
    def own_matrices(self) -> float:
        """Elements of the matrices that a rank owns."""
        return sum(math.prod(each) for each in self.matrices) / self._owners

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.shard * self.replicate

    @property
    def buckets(self) -> list[float]:
        """Bytes of gradients in each bucket, in the order in which backward completes them."""
        total = self.elements * self.footprint.gradient
        bucket = _IN_BACKWARD if self.bucket is None and self.in_backward else self.bucket
        if bucket is None:
            return default_sizes(total)
        if bucket < self.smallest_bucket:
            fewest = math.ceil(self.smallest_bucket)
            raise ValueError(
                f"Invalid bucket: {bucket:g} bytes; it must be at least {fewest:,} for this number of elements"
            )
        count = math.ceil(total / bucket)
        return [total / count] * count


@dataclass(frozen=True)
class Plan:
    """The memory, traffic and time of a rank for a job, in bytes and seconds."""

    job: Job
    memory: dict[str, float]  # bytes by purpose: parameters, gradients, state, scratch
    whole_state: float  # bytes of the unsharded state
    sent: dict[str, float]  # bytes that a rank sends in an iteration, by collective
    messages: int  # collectives in an iteration, each with a latency; 0 for a single rank
    times: dict[str, float]  # seconds by kind of work, without overlap
    exposed: dict[str, float]  # seconds by kind of work that nothing overlaps
    host: float | None  # seconds of the host in an iteration; None if the number of tensors is unknown
    unclaimed: tuple[str, ...]  # why the error may exceed 5%; empty if it does not

    @property
    def total_memory(self) -> float:
        """Bytes in total, without activations."""
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
        """The fraction of latency in the time of gradient sums and gathers."""
        communication = self.times["sum gradients"] + self.times["gather parameters"]
        return self.times["latencies of both"] / communication if communication else 0.0


@dataclass(frozen=True)
class _Group:
    """Ranks of a collective: every `stride`-th rank."""

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
        constants = self.constants
        nodes = math.ceil(self.ranks / self._in_node)
        hops = (self.ranks - nodes) * constants.hop_latency + (nodes - 1) * constants.network_hop_latency
        return constants.launch_latency + hops

    def bytes_sent(self, size: float) -> float:
        return size * (self.ranks - 1) / self.ranks

    def seconds(self, size: float, bandwidth: float) -> float:
        if self.ranks > self._in_node:
            bandwidth = min(bandwidth, self._in_node * self.constants.network_bandwidth)
        return self.latency + self.bytes_sent(size) / bandwidth


def plan(job: Job, constants: Constants) -> Plan:
    """The memory, traffic and time of a rank for a job."""
    size, elements = job.footprint, job.elements
    split, copies = _Group(job.shard, 1, constants), _Group(job.replicate, job.shard, constants)
    buckets = job.buckets
    rate, gather_rate = constants.reduce_scatter_bandwidth, constants.all_gather_bandwidth

    @functools.cache  # most of thousands of buckets have the same size
    def one_sum(bucket: float) -> float:
        section = bucket / job.shard
        return split.seconds(bucket, rate) + copies.seconds(section, rate) + copies.seconds(section, gather_rate)

    is_fsdp = job.layout == "fsdp2"
    sent = _USED if is_fsdp else size.parameter

    @functools.cache
    def one_gather(bucket: float) -> float:
        return split.seconds(bucket / size.gradient * sent, gather_rate)

    sum_times, gather_times = list(map(one_sum, buckets)), list(map(one_gather, buckets))
    sums, gathers = sum(sum_times), sum(gather_times)
    compute, model_bytes = job.of_regime(constants, "compute"), job.of_regime(constants, "model_bytes")
    share = elements / job.shard
    norm = (share * size.gradient / constants.memory_bandwidth + 2 * split.latency) if job.clips else 0.0
    own = job.own_matrices if is_fsdp and size.matrix_work is not None and job.ranks > 1 else 0.0
    exchange = 2 * split.seconds(_USED * own, gather_rate) if own else 0.0
    copied = _COPIED * own / constants.memory_bandwidth
    # Nothing is computed while the first bucket of matrices arrives and the last bucket returns.
    first = exchange / max(math.ceil(own / OWNED_IN_A_BUCKET), 1)
    brought = 5 * sent + size.gradient if is_fsdp else 2 * size.gradient
    model = elements * model_bytes / constants.memory_bandwidth + 6 * elements * job.tokens / compute
    times = {
        "forward": model / 3,
        "backward": model * 2 / 3,
        # Gradients are copied into buckets; FSDP2 also copies parameters out of buckets after each of two all-gathers.
        "bring together": elements * brought / constants.memory_bandwidth,
        "sum gradients": sums,
        "clip": norm,
        "update": share * size.moved / constants.memory_bandwidth + constants.step_latency,
        "matrix products": job.matrix_work / constants.matrix_compute,
        "exchange matrices": exchange + copied,
        "gather parameters": gathers * (2 if is_fsdp else 1),
    }
    waited = _after_backward(buckets, times["backward"], sum_times)
    # A model compiled as a whole waits for all parameters at its call; code after a CUDA graph does not wait by bucket.
    at_once = job.regime == "whole" or job.captured
    gathered = gathers if at_once else _before_blocks(buckets[::-1], times["forward"], gather_times[::-1])
    beside = max(times["gather parameters"] - gathered, 0.0)
    slowed = max(sums - waited, 0.0) * constants.beside_sums + beside * constants.beside_gathers
    times["communication beside the model"] = slowed
    exposed = {
        **times,
        "sum gradients": waited,
        "gather parameters": gathered,
        # The exchange slows matrix products as much as it slows backward, which mostly computes products too.
        "exchange matrices": first + copied + (exchange - first) * constants.beside_sums,
    }
    host = None if job.captured else _host(job, constants)
    latencies = len(buckets) * (2 * split.latency + 2 * copies.latency)
    return Plan(
        job=job,
        memory=_memory(job, buckets),
        whole_state=elements * size.state,
        sent={
            "reduce-scatter": split.bytes_sent(elements * size.gradient),
            "all-reduce": 2 * copies.bytes_sent(share * size.gradient),
            "all-gather": split.bytes_sent(elements * sent) * (2 if is_fsdp else 1),
            "all-to-all": 2 * split.bytes_sent(_USED * own),
        },
        messages=_messages(job, own),
        times={**times, "latencies of both": latencies},
        exposed=exposed,
        host=host,
        unclaimed=tuple(_unclaimed(job, constants, sum(exposed.values()), host)),
    )


def _memory(job: Job, buckets: Sequence[float]) -> dict[str, float]:
    """Bytes of a rank by purpose."""
    size, elements = job.footprint, job.elements
    if job.layout == "fsdp2":
        # Shards of everything; two blocks of unsharded parameters, and the gradients of one block.
        whole = max(buckets) / size.gradient * 2 * _USED + max(buckets)
        each = {"parameters": size.parameter, "gradients": size.gradient, "state": size.state}
        return {**{name: elements / job.shard * one for name, one in each.items()}, "scratch": whole}
    return {
        "parameters": elements * size.parameter,
        "gradients": 0.0 if job.in_backward else elements * size.gradient / (1 if job.contiguous else job.shard),
        "state": elements / job.shard * size.state,
        "scratch": 0.0 if job.contiguous and not job.in_backward else max(buckets),
    }


def _messages(job: Job, own: float) -> int:
    """Collectives in an iteration."""
    if job.ranks == 1:
        return 0
    each = 2 if job.replicate == 1 else 3
    if job.layout == "fsdp2":  # a gather in backward too; no message about which parameters were used
        return len(job.buckets) * (each + 1) + 2 * math.ceil(own / OWNED_IN_A_BUCKET) + job.clips
    return len(job.buckets) * each + 1 + job.clips


def _after_backward(buckets: Sequence[float], backward: float, sums: Sequence[float]) -> float:
    """Seconds from the end of backward until all gradients are reduced; reductions run in sequence."""
    unit_time, done, end = backward / sum(buckets), 0.0, 0.0
    for bucket, seconds in zip(buckets, sums):
        done += bucket
        end = max(end, done * unit_time) + seconds
    return end - backward


def _before_blocks(buckets: Sequence[float], forward: float, gathers: Sequence[float]) -> float:
    """Seconds that forward waits for its parameters, whose buckets arrive in the order of use."""
    unit_time, arrived, now = forward / sum(buckets), 0.0, 0.0
    for bucket, seconds in zip(buckets, gathers):
        arrived += seconds
        now = max(now, arrived) + bucket * unit_time
    return max(now - forward, 0.0)


def _host(job: Job, constants: Constants) -> float | None:
    """Seconds of the host in an iteration that is not replayed."""
    if job.tensors is None:
        return None
    per_tensor = job.of_regime(constants, "model_host") + constants.fsdp_host * (job.layout == "fsdp2")
    messages = len(job.buckets) * constants.message_host
    return constants.step_host + messages + job.tensors * (per_tensor + constants.tensor_host)


def _unclaimed(job: Job, constants: Constants, seconds: float, host: float | None) -> Iterator[str]:
    """Reasons why the estimate of an iteration may be wrong."""
    if job.ranks > constants.gpus_per_node and "network_bandwidth" in constants.assumed:
        yield "the network between nodes is assumed, not measured"
    if not job.captured and host is None:
        yield "the host's time is not known: pass the number of tensors"
    elif host is not None and host > _HOST_IS_NEAR * seconds:
        yield f"the host takes {host * 1e3:.0f} ms, which depends on the host"
    if job.in_backward:
        yield "updates in backward are counted as if they ran after it"
    if job.layout == "fsdp2":
        yield "FSDP2's host time is known to 10%, and its blocks are assumed to be as large as buckets of shard()"
    if job.footprint.matrix_work is not None:
        known = "matrix products are known to 10%" if job.matrices else "pass the matrices"
        yield f"the time of matrix products: {known}"


def best_bucket(job: Job, constants: Constants) -> float:
    """Bytes of the largest bucket whose iteration is within half a percent of the fastest."""
    # Larger buckets mean fewer messages, which the host starts and which slow the model down on the GPU.
    sizes = [size for mebibytes in BUCKETS if (size := mebibytes * 2**20) >= job.smallest_bucket]
    times = [plan(replace(job, bucket=size), constants).iteration for size in sizes]
    return max(size for size, time in zip(sizes, times) if time <= min(times) * _CLOSE)


def meshes(job: Job, constants: Constants) -> Iterator[Plan]:
    """Plans for meshes with the same number of ranks, sharded over 2, 4, 8, ... or all ranks, with the best bucket."""
    shard = 2
    while shard < 2 * job.ranks:
        split = min(shard, job.ranks)
        if job.ranks % split == 0:
            meshed = replace(job, shard=split, replicate=job.ranks // split)
            yield plan(replace(meshed, bucket=best_bucket(meshed, constants)), constants)
        shard *= 2


def crossover(ranks: int, constants: Constants) -> tuple[float, float]:
    """The latency of a reduce-scatter in seconds, and the bytes whose transfer takes equally long."""
    # The time of smaller buckets is mostly latency, of larger buckets mostly transfer.
    group = _Group(ranks, 1, constants)
    transfer = group.seconds(1e9, constants.reduce_scatter_bandwidth) - group.latency
    return group.latency, group.latency / transfer * 1e9
