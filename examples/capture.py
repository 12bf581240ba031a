"""Capture a training step in a CUDA graph, and change the learning rate between its replays.

    python examples/capture.py

Without a GPU there are no graphs: `tilestep.capture` says so, and the example trains with plain steps.
"""

from __future__ import annotations

import time

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def main() -> None:
    options = arguments(__doc__, "capture.png", steps=120).parse_args()

    torch.manual_seed(0)
    model = GPT().to(options.device)
    optimizer = tilestep.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    text = Text(options.device)
    batch = text.batch()

    def iterate() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are: the graph holds their addresses
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, loss = iterate, None
    for _ in range(3):
        iterate()  # torch's own operations run once before they are captured
    try:
        results: list[torch.Tensor] = []
        captured = tilestep.capture(optimizer, lambda: results.append(iterate()))
        loss = results[-1]
        run = captured.replay
    except tilestep.CaptureError as refused:
        print(f"not captured: {refused}")

    losses, rates = [], []
    begin = time.perf_counter()
    for step in range(1, options.steps + 1):
        batch.copy_(text.batch())
        result = run()  # a replay takes over the learning rate that the scheduler has written
        losses.append((result if loss is None else loss).clone())
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        progress(step, options.steps, loss=losses[-1], learning_rate=rates[-1])
    milliseconds = (time.perf_counter() - begin) / options.steps * 1e3
    print(f"{'captured' if loss is not None else 'plain'} steps: {milliseconds:.2f} ms an iteration")
    draw({"loss": [float(x) for x in losses]}, options.picture, f"{'captured' if loss is not None else 'plain'} steps")


if __name__ == "__main__":
    main()
