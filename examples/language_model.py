"""Train a small language model on one device: warm-up and cosine in the kernel, clip in the step, a checkpoint.

python examples/language_model.py
python examples/language_model.py --optimizer Lion --lr 3e-4 --bf16
"""

from __future__ import annotations

from pathlib import Path

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def main() -> None:
    parser = arguments(__doc__, "language_model.png", steps=200)
    parser.add_argument("--optimizer", default="AdamW", choices=sorted(tilestep.registry), help="any rule by name")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--checkpoint", type=Path, default=Path("language_model.pt"), help="the file to save")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 parameters with float32 masters")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT().to(options.device, torch.bfloat16 if options.bf16 else torch.float32)
    rate = tilestep.schedule.warmup_cosine(options.lr, warmup=max(options.steps // 10, 1), total=options.steps)
    optimizer = tilestep.Optimizer(
        model.parameters(), options.optimizer, lr=rate, max_grad_norm=1.0, master_weights=options.bf16
    )
    text = Text(options.device)

    losses, norms = [], []
    for step in range(1, options.steps + 1):
        loss = model(text.batch())
        loss.backward()
        optimizer.step()  # clips by the global norm, then updates
        optimizer.zero_grad()
        losses.append(loss.detach())  # read at the end: nothing here waits for a GPU
        norms.append(optimizer.grad_norm.clone())
        progress(step, options.steps, loss=losses[-1], gradient_norm=norms[-1])

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
    print(f"checkpoint: {options.checkpoint}")
    curves = {"loss": [float(x) for x in losses], "gradient norm before the clip": [float(x) for x in norms]}
    draw(curves, options.picture, f"{options.optimizer} on {options.device}", "loss in nats a byte; norm")


if __name__ == "__main__":
    main()
