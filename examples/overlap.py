"""Run updates after backward, beside backward, and beside the next forward; compare losses and gradients in memory.

    python examples/overlap.py

The three schedules compute the same numbers to the bit. "backward" lets each gradient go as soon as its parameter is
updated, so they never are in memory all at once; "forward" runs what `step` has decided while the next forward begins.
On a CPU nothing runs beside the host: the schedules differ there in memory alone.
"""

from __future__ import annotations

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def train(during: str | None, device: torch.device, steps: int) -> tuple[list[float], int]:
    """Train from the same weights on the same text; return the losses, and the bytes of gradients after backward."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = tilestep.AdamW(model.parameters(), lr=1e-3)
    if during is not None:
        optimizer = tilestep.overlap(optimizer, model, during=during, bucket_cap_mb=0.25)
    text, losses, left = Text(device), [], 0
    for step in range(1, steps + 1):
        loss = model(text.batch())
        loss.backward()
        left = max(left, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        progress(step, steps, during or "serial", loss=losses[-1])
    return [float(loss) for loss in losses], left


def main() -> None:
    options = arguments(__doc__, "overlap.png", steps=60).parse_args()
    curves = {}
    for during in (None, "forward", "backward"):
        name = during or "serial"
        curves[name], left = train(during, options.device, options.steps)
        print(f"{name}: {left / 1e6:.2f} MB of gradients between backward and step")
    if not curves["serial"] == curves["forward"] == curves["backward"]:
        raise SystemExit("the losses differ")
    print("the losses are equal to the bit")
    draw(curves, options.picture, f"three schedules of one step, on {options.device}")


if __name__ == "__main__":
    main()
