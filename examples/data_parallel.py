"""Split one training over ranks: FSDP2 with a plain optimizer, then a plain model with `tilestep.shard`.

    torchrun --nproc-per-node 2 examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py --by shard

FSDP2 splits parameters, gradients and state; the optimizer needs nothing for it. `shard` splits the state alone, keeps
whole parameters on every rank, sums gradients while backward runs and sends parameters while the next forward begins.
Ranks talk through NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def with_fsdp2(model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard every block by itself, then the rest; the optimizer updates this rank's shards."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, tilestep.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def with_shard(model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Leave the model as it is; given a function, `shard` never has more than this rank's part of the state."""
    optimizer = tilestep.shard(lambda: tilestep.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), model)
    return model, optimizer


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state on this rank."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    return sum(value.untyped_storage().nbytes() for value in local)


def train(by: str, device: torch.device, steps: int) -> list[float]:
    """Train from the same weights and on the same text, whatever splits the work; return their mean losses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, optimizer = {"fsdp2": with_fsdp2, "shard": with_shard}[by](GPT().to(device))
    text = Text(device, seed=rank)  # each rank reads other windows
    losses = []
    for step in range(1, steps + 1):
        loss = model(text.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(float(mean))
        if rank == 0:
            progress(step, steps, by, loss=losses[-1])
    print(f"{by}: rank {rank} of {ranks} keeps {bytes_of_state(optimizer) / 1e6:.2f} MB of state", flush=True)
    return losses


def main() -> None:
    parser = arguments(__doc__, "data_parallel.png", steps=60)
    parser.add_argument("--by", choices=["both", "fsdp2", "shard"], default="both", help="what splits the work")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: one rank, which keeps everything
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29555")
        print("one rank; torchrun --nproc-per-node 2 starts two")
    device = torch.device(options.device.type, int(os.environ["LOCAL_RANK"]) if options.device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    curves = {by: train(by, device, options.steps) for by in ("fsdp2", "shard") if options.by in ("both", by)}
    if dist.get_rank() == 0:
        if len(curves) == 2:
            apart = max(abs(one - other) for one, other in zip(*curves.values(), strict=True))
            print(f"largest difference of the losses: {apart:.1e}")
        draw(curves, options.picture, f"{dist.get_world_size()} ranks on {device.type}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
