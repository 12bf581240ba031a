"""Fine-tune a model whose optimizer state lies in host memory.

    python examples/finetune_offloaded.py

Half of the text pretrains the model in float32. Then it becomes bfloat16 and is fine-tuned on the other half with
float32 masters: 12 bytes of state a parameter, which `tilestep.offload` keeps on the host. On a GPU state is streamed
through it chunk by chunk, or updated by the CPU with `--where cpu`. Parameters on the CPU have their state there
already, and nothing moves.
"""

from __future__ import annotations

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def train(model: GPT, optimizer: torch.optim.Optimizer, text: Text, steps: int, title: str) -> list[float]:
    """Train; return the loss of each step."""
    losses = []
    for step in range(1, steps + 1):
        loss = model(text.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        progress(step, steps, title, loss=losses[-1])
    return [float(loss) for loss in losses]


def main() -> None:
    parser = arguments(__doc__, "finetune_offloaded.png", steps=120)
    parser.add_argument("--where", choices=["gpu", "cpu"], help="where updates run; the GPU by default")
    parser.add_argument("--gradients", action="store_true", help="gradients go to the host too, while backward runs")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT().to(options.device)
    pretraining = tilestep.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    before = train(model, pretraining, Text(options.device, (0.0, 0.5)), options.steps, "pretraining")
    del pretraining

    model = model.to(torch.bfloat16)
    optimizer = tilestep.offload(
        lambda: tilestep.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0, master_weights=True),
        where=options.where,
        gradients=options.gradients,
    )
    after = train(model, optimizer, Text(options.device, (0.5, 1.0)), options.steps, "fine-tuning")
    print(optimizer.offload_report())
    draw({"pretraining": before, "fine-tuning": after}, options.picture, f"state in host memory, on {options.device}")


if __name__ == "__main__":
    main()
