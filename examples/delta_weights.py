"""Send the weights that have changed, and no others, to a second process that keeps a copy of the model.

    python examples/delta_weights.py

This is what trainers do whose model is sampled elsewhere, by an inference server say: at the learning rates of
fine-tuning a few percent of bfloat16 weights change in a step. The update kernel marks them; the copy is compared to
the bit, and the time of a step's changes stands beside that of sending all weights.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.zeros(0, dtype=dtype)


def receive(connection: Any, shapes: dict[str, torch.Size], dtype: torch.dtype) -> None:
    """Keep a copy of the model: what an inference server would do."""
    copy = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    while (message := connection.recv()) is not None:
        kind, content = message
        for name, *parts in content:
            if kind == "changes":
                indices, values = from_bytes(parts[0], torch.int32), from_bytes(parts[1], dtype)
                copy[name].view(-1)[indices.long()] = values
            elif kind == "all":
                copy[name].view(-1).copy_(from_bytes(parts[0], dtype))
        connection.send([as_bytes(copy[name]) for name in copy] if kind == "compare" else "done")


def send(connection: Any, kind: str, content: list[Any]) -> Any:
    connection.send((kind, content))
    return connection.recv()


def main() -> None:
    parser = arguments(__doc__, "delta_weights.png", steps=300)
    parser.add_argument("--lr", type=float, default=3e-6, help="of the steps whose changes are sent")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, text = GPT().to(options.device, torch.bfloat16), Text(options.device)
    optimizer = tilestep.AdamW(
        model.named_parameters(), lr=3e-3, max_grad_norm=1.0, master_weights=True, track_changes=True
    )
    weights = sum(param.numel() for param in model.parameters())

    def step() -> torch.Tensor:
        loss = model(text.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    warm_up = max(options.steps // 10, 5)
    for number in range(1, warm_up + 1):
        progress(number, warm_up, "training", loss=step())

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    receiver = context.Process(target=receive, args=(there, shapes, torch.bfloat16), daemon=True)
    receiver.start()

    def send_all() -> float:
        begin = time.perf_counter()
        send(here, "all", [(name, as_bytes(param.detach())) for name, param in model.named_parameters()])
        return time.perf_counter() - begin

    send_all()
    optimizer.changes(clear=True)  # the copy has everything so far
    for group in optimizer.param_groups:
        group["lr"] = options.lr

    shares, changes_ms, all_ms = [], [], []
    for number in range(1, options.steps + 1):
        loss = step()
        begin = time.perf_counter()
        listed = [
            (name, as_bytes(indices), as_bytes(values)) for name, indices, values in optimizer.changes(clear=True)
        ]
        send(here, "changes", listed)
        changes_ms.append((time.perf_counter() - begin) * 1e3)
        shares.append(100 * sum(len(indices) // 4 for _, indices, _ in listed) / weights)
        progress(number, options.steps, "sending changes", loss=loss, percent_changed=shares[-1])
    copies = send(here, "compare", [])
    equal = all(copy == as_bytes(param.detach()) for copy, param in zip(copies, model.parameters()))
    all_ms = [send_all() * 1e3 for _ in range(10)]
    here.send(None)
    receiver.join()

    changed, whole = (sorted(times)[len(times) // 2] for times in (changes_ms, all_ms))
    print(f"{sum(shares) / len(shares):.2f}% of {weights:,} weights changed in a step")
    print(f"changes: {changed:.2f} ms a step, all weights: {whole:.2f} ms")
    print(f"after {options.steps} steps the copy is {'equal to the bit' if equal else 'ANOTHER MODEL'}")
    title = f"changes sent in {changed:.1f} ms, all weights in {whole:.1f} ms"
    draw({"changed weights": shares}, options.picture, title, ylabel="percent of all weights, each step")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
