"""What is trained in benchmarks/shard_figures.py, and the ways to train it on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

import tilestep

__all__ = ["CLIP", "CONTENDERS", "Llama", "MESHES", "Shape", "TINY", "Trained", "compiled_blocks", "make_model"]

CLIP = 1.0
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
_OURS: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "max_grad_norm": CLIP}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the sequences that it is trained on."""

    layers: int = 24
    width: int = 2048
    heads: int = 32
    key_values: int = 8
    inner: int = 5504
    vocabulary: int = 32000
    length: int = 2048


TINY = Shape(2, 64, 4, 2, 172, 500, 32)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, small = shape, shape.width // shape.heads * shape.key_values
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, small, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = hidden.shape
        normed, size = self.before(hidden), self.shape.width // self.shape.heads
        query, key, value = (
            part(normed).view(batch, length, -1, size).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        repeat = self.shape.heads // self.shape.key_values
        key, value = (part.repeat_interleave(repeat, 1) for part in (turned(key, turns), value))
        mixed = functional.scaled_dot_product_attention(turned(query, turns), key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.between(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def turned(states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions."""
    left, right = states.chunk(2, -1)
    return states * turns[0] + torch.cat([-right, left], -1) * turns[1]


class Llama(nn.Module):
    """A language model of Llama's shape; the default is 1.19 B elements in 219 tensors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.words(text[:, :-1])
        size = self.shape.width // self.shape.heads
        places = torch.arange(hidden.shape[1], device=text.device, dtype=torch.float32)
        rates = 10_000.0 ** (-torch.arange(0, size, 2, device=text.device) / size)
        angles = (places[:, None] * rates).repeat(1, 2)
        turns = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, turns)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


_block_backend = ""
_is_whole = False


@contextmanager
def compiled_blocks(backend: str, whole: bool = False) -> Iterator[None]:
    """Models made here have every block compiled by itself, in place, as torchtitan does it; or are compiled whole."""
    global _block_backend, _is_whole
    _block_backend, _is_whole = backend, whole
    before = torch._dynamo.config.recompile_limit
    # Every contender has its own code for the same blocks.
    torch._dynamo.config.recompile_limit = 64
    try:
        yield
    finally:
        _block_backend, torch._dynamo.config.recompile_limit = "", before


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype, warms: bool = False) -> Llama:
    """A model; `warms` for one that only warms libraries up, which is not worth compiling as a whole."""
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    for param in model.parameters():
        if param.dim() == 2:
            nn.init.normal_(param, std=0.02)
    if _block_backend and not (warms and _is_whole):
        for part in (model,) if _is_whole else model.blocks:
            # Inductor of torch 2.11 fails on the whole of it where sizes are left open.
            part.compile(fullgraph=True, backend=_block_backend, dynamic=False if _is_whole else None)
    return model.to(dtype)


@dataclass
class Trained:
    """A model that is trained in one way.

    Args:
        model: called with text, gives the loss.
        optimizer: its optimizer.
        step: clip, step, and what ends an iteration; gradients are gone after it.
        drop: drop the gradients instead.
        alone: a block in which forward and backward do not communicate; None where there is none.
        has_parts: whether forward and backward run without the step.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[[], Any]
    drop: Callable[[], Any]
    alone: Callable[[], AbstractContextManager[Any]] | None = None
    has_parts: bool = True


def sharded(shape: Shape, device: torch.device, master_weights: Any = True, **options: Any) -> Trained:
    """tilestep: bfloat16 parameters, float32 master and moments, split."""
    model = make_model(shape, device, torch.bfloat16)

    def whole() -> tilestep.Optimizer:
        return tilestep.AdamW(model.parameters(), master_weights=master_weights, **_OURS)  # type: ignore[attr-defined]

    optimizer = tilestep.shard(whole, model, **options)
    return Trained(model, optimizer, optimizer.step, optimizer.zero_grad, optimizer.no_sync)


def sharded_waiting(shape: Shape, device: torch.device) -> Trained:
    """The same, all parameters gathered before `step` returns: what nothing hides is seen beside it."""
    return sharded(shape, device, overlap_param_sync=False)


def sharded_peers(shape: Shape, device: torch.device) -> Trained:
    """The same, parameters fetched by copy engines; by default they are, where they can be."""
    return sharded(shape, device, param_buffer="peers")


def sharded_sent(shape: Shape, device: torch.device) -> Trained:
    """The same, parameters sent by NCCL's gathers."""
    return sharded(shape, device, param_buffer="contiguous")


def sharded_mesh(shard: int, replicate: int, shape: Shape, device: torch.device) -> Trained:
    """tilestep: the same, state split over some ranks and kept by several such groups."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (shard, replicate), mesh_dim_names=("shard", "replicate"))
    return sharded(shape, device, mesh=mesh)


class _Replayed(nn.Module):
    """Iterations of a training as one CUDA graph for each batch: a call says which, and `replay` runs it."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self._trained = [trained]
        self._graphs: dict[torch.Size, tuple[Tensor, tilestep.CapturedStep]] = {}
        self._text = torch.empty(0)

    def forward(self, text: Tensor) -> _Replayed:
        self._text = text
        return self

    def backward(self) -> None:
        """The graph has it."""

    def replay(self) -> None:
        """Run the iteration; captured at the first call with text of this shape, after two outside of a graph."""
        text, trained = self._text, self._trained[0]
        if text.shape not in self._graphs:
            own = text.clone()

            def iteration() -> None:
                trained.model(own).backward()
                trained.step()

            for _ in range(2):
                iteration()
            trained.drop()
            self._graphs[text.shape] = own, tilestep.capture(trained.optimizer, iteration)
        own, captured = self._graphs[text.shape]
        own.copy_(text)
        captured.replay()


def sharded_captured(shape: Shape, device: torch.device) -> Trained:
    """The same, forward, backward, sums, step and gathers in one CUDA graph."""
    trained = sharded(shape, device)
    replayed = _Replayed(trained)
    return Trained(replayed, trained.optimizer, replayed.replay, lambda: None, has_parts=False)


def _torchs(model: nn.Module, optimizer: Any, params: list[Any], alone: Any = None) -> Trained:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, optimizer, step, optimizer.zero_grad, alone)


def _options(device: torch.device) -> dict[str, Any]:
    return {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}


def _parallel(shape: Shape, device: torch.device) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = make_model(shape, device, torch.bfloat16)
    places = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=places, gradient_as_bucket_view=True)


def data_parallel(shape: Shape, device: torch.device) -> Trained:
    """DDP and torch's fused AdamW: everything in bfloat16, moments too, which is less work than a float32 master."""
    model = _parallel(shape, device)
    params = list(model.parameters())
    return _torchs(model, torch.optim.AdamW(params, **_options(device)), params, model.no_sync)


def data_parallel_master(shape: Shape, device: torch.device) -> Trained:
    """DDP and torch's fused AdamW of float32 masters: bfloat16 parameters, gradients and sums; the same precision."""
    model = _parallel(shape, device)
    params = list(model.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, **_options(device))

    @torch.no_grad()
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        torch._foreach_copy_([master.grad for master in masters], [param.grad for param in params])
        optimizer.step()
        torch._foreach_copy_(params, masters)
        model.zero_grad()

    return Trained(model, optimizer, step, model.zero_grad, model.no_sync)


def zero_redundancy(shape: Shape, device: torch.device) -> Trained:
    """DDP and torch's ZeroRedundancyOptimizer of fused AdamW, everything in bfloat16."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _parallel(shape, device)
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, **_options(device))
    return _torchs(model, optimizer, params, model.no_sync)


def _fully_sharded_model(shape: Shape, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(shape, device, torch.float32)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": False,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fully_sharded(shape: Shape, device: torch.device) -> Trained:
    """FSDP2 without reshard_after_forward and torch's fused AdamW: float32 shards, bfloat16 in use and on the way."""
    model = _fully_sharded_model(shape, device)
    params = list(model.parameters())
    return _torchs(model, torch.optim.AdamW(params, **_options(device)), params)


def fully_sharded_ours(shape: Shape, device: torch.device, during: str = "") -> Trained:
    """The same FSDP2 with tilestep's AdamW."""
    model = _fully_sharded_model(shape, device)
    optimizer = tilestep.AdamW(model.parameters(), **_OURS)  # type: ignore[attr-defined]
    if during:
        tilestep.overlap(optimizer, model, during)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, optimizer, step, optimizer.zero_grad)


def fully_sharded_forward(shape: Shape, device: torch.device) -> Trained:
    """The same FSDP2 with tilestep's AdamW, overlapped with the next forward."""
    return fully_sharded_ours(shape, device, "forward")


def sharded_remainder(shape: Shape, device: torch.device) -> Trained:
    """tilestep: masters as 16-bit remainders of the bfloat16 parameters, which are fetched by copy engines."""
    return sharded(shape, device, master_weights="remainder", param_buffer="peers")


def apex(shape: Shape, device: torch.device, **options: Any) -> Trained:
    """apex's DistributedFusedAdam: bfloat16 parameters, gradients and messages, float32 master and moments, split."""
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    model, low = make_model(shape, device, torch.bfloat16), torch.bfloat16
    settings: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    settings |= {"grad_sync_dtype": low, "param_sync_dtype": low}
    settings |= {"contiguous_param_buffer": True, "contiguous_grad_buffer": True}
    optimizer = DistributedFusedAdam(model.parameters(), **settings, **options)

    def step() -> None:
        optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, optimizer, step, optimizer.zero_grad, optimizer.no_sync)


def apex_remainder(shape: Shape, device: torch.device) -> Trained:
    """The same with masters as 16-bit remainders of the parameters."""
    return apex(shape, device, store_params=False, store_param_remainders=True)


def megatron(shape: Shape, device: torch.device) -> Trained:
    """Megatron-Core's distributed optimizer: bfloat16 parameters and sums, float32 master and moments, split."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    # Its hooks before modules' forwards would wait for gathers, but not in compiled code.
    both = {"use_distributed_optimizer": True, "overlap_param_gather": not _block_backend}
    sums = DistributedDataParallelConfig(overlap_grad_reduce=True, average_in_collective=True, **both)
    whole = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True)
    model = DistributedDataParallel(whole, sums, make_model(shape, device, torch.bfloat16))
    settings: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP}
    config = OptimizerConfig(optimizer="adam", bf16=True, params_dtype=torch.bfloat16, **settings, **both)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)

    def drop() -> None:
        if any(group.grad_reduce_handle is not None for group in model.bucket_groups):
            model.finish_grad_sync()
        model.zero_grad_buffer()
        optimizer.zero_grad()

    def step() -> None:
        model.finish_grad_sync()
        optimizer.step()
        model.zero_grad_buffer()
        optimizer.zero_grad()

    return Trained(model, optimizer, step, drop, model.no_sync)


MESHES = [(shard, ranks // shard) for ranks in (2, 4, 8) for shard in (1, 2, 4, 8) if shard <= ranks]
"""Ranks that split the state, and copies of it."""

CONTENDERS: dict[str, Callable[[Shape, torch.device], Trained]] = {
    **{f"sharded_{shard}x{copies}": partial(sharded_mesh, shard, copies) for shard, copies in MESHES},
    "sharded": sharded,
    "sharded_waiting": sharded_waiting,
    "sharded_peers": sharded_peers,
    "sharded_sent": sharded_sent,
    "sharded_captured": sharded_captured,
    "data_parallel": data_parallel,
    "data_parallel_master": data_parallel_master,
    "fully_sharded": fully_sharded,
    "fully_sharded_ours": fully_sharded_ours,
    "fully_sharded_forward": fully_sharded_forward,
    "zero_redundancy": zero_redundancy,
    "apex": apex,
    "sharded_remainder": sharded_remainder,
    "apex_remainder": apex_remainder,
    "megatron": megatron,
}
