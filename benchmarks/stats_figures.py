"""What statistics and lists of changed weights cost, beside the other ways to the same numbers.

    python benchmarks/stats_figures.py --out benchmarks/results/stats_h100_1.json
    python benchmarks/stats_figures.py --state-dtype int8 --master-weights int8

Contenders run by turns in one process over the same parameters and gradients, ten steps a turn; the figure to quote is
the median of the ratios to the plain steps of the same rounds, with the smallest and largest. Beside it is what the
bytes alone predict: those that a step of each moves, and those of a plain one, which reads the gradient twice, for its
norm and for the update, and reads and writes the parameter and its state. Peers:

hooks: what `wandb.watch` and its kin do, a norm of each gradient and parameter read by the host one by one.
foreach: `torch._foreach_norm` over gradients, parameters, states and updates (from a copy made before), read at once.
snapshot: a copy of all parameters before the step, compared with them after it, and the indices of what differs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timing import timed

import tilestep
from tilestep import native
from tilestep.bench.results import environment
from tilestep.bench.sections import Workload, gpu_workloads

STEPS = 10


def _norms_by_hooks(params: list[torch.Tensor], step: Callable[[], Any]) -> None:
    for param in params:
        assert param.grad is not None
        float(param.grad.norm())
        float(param.detach().norm())
    step()


def _norms_by_foreach(optimizer: Any, params: list[torch.Tensor]) -> None:
    before = [param.detach().clone() for param in params]
    optimizer.step()
    grads = [param.grad for param in params]
    states = [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq") for param in params]
    updates = torch._foreach_sub([param.detach() for param in params], before)
    kinds = [grads, [param.detach() for param in params], updates, states]
    torch.stack(
        [norm for kind in kinds for order in (2, float("inf")) for norm in torch._foreach_norm(kind, order)]
    ).cpu()


def _changes_by_snapshot(optimizer: Any, params: list[torch.Tensor]) -> int:
    before = [param.detach().clone() for param in params]
    optimizer.step()
    return sum(len((param.detach() != old).view(-1).nonzero()) for param, old in zip(params, before))


MORE_BYTES = {
    "plain": 0.0,
    "stats, every step": 0.0,
    "stats, every 10 steps": 0.0,
    # Bits are read and, where there are new ones, written.
    "track_changes": 0.125,
    # With all bits new, which are then read twice and cleared.
    "track_changes and list": 5 * 0.125,
    "hooks, every step": 2 * 2,
    # Copies, differences, and two norms of each of gradients, parameters, updates and two states.
    "foreach, every step": 2 * 2 + 3 * 2 + 2 * 5 * 2,
    # Copies, comparisons into bytes, and these read twice by nonzero.
    "snapshot and compare": 2 * 2 + (2 * 2 + 1) + 2,
}
"""Bytes an element of bfloat16 that a step of each moves beyond a plain one; of `foreach` with states of bfloat16."""


def _plain_bytes(optimizer: Any, params: list[torch.Tensor]) -> float:
    """Bytes an element of a plain step: the gradient is read twice, parameter and state are read and written."""
    elements = sum(param.numel() for param in params)
    kept = [*params, *params]  # the gradient once for its norm and once for the update
    kept += [array for state in optimizer.state.values() for array in state.values() if array.numel() > 1]
    return 2 * sum(array.nbytes for array in kept) / elements


def _contenders(
    params: list[torch.Tensor], plain: Any, adamw: Callable[..., Any], peers: bool
) -> dict[str, Callable[[], Any]]:
    always = adamw(stats=tilestep.Stats(every=1))
    tenth, tracking = adamw(stats=tilestep.Stats(every=STEPS)), adamw(track_changes=True)
    listing = adamw(track_changes=True)

    def listed() -> None:
        listing.step()
        for _ in listing.changes(clear=True):
            pass

    own = {
        "plain": plain.step,
        "stats, every step": always.step,
        "stats, every 10 steps": tenth.step,
        "track_changes": tracking.step,
        "track_changes and list": listed,
    }
    if not peers:
        return own
    return own | {
        "hooks, every step": lambda: _norms_by_hooks(params, plain.step),
        "foreach, every step": lambda: _norms_by_foreach(plain, params),
        "snapshot and compare": lambda: _changes_by_snapshot(plain, params),
    }


def _measured(workload: Workload, device: torch.device, rounds: int, formats: dict[str, Any]) -> dict[str, Any]:
    params: list[torch.Tensor] = []
    for shape in workload.shapes:
        param = torch.nn.Parameter(torch.randn(shape, device=device, dtype=workload.dtype) * 0.02)
        param.grad = torch.randn_like(param) * 1e-3
        params.append(param)

    def adamw(**options: Any) -> Any:
        own = params
        if formats:  # masters would take in what the other contenders have written
            own = [torch.nn.Parameter(param.detach().clone()) for param in params]
            for param, given in zip(own, params):
                param.grad = given.grad
        return tilestep.AdamW(own, lr=1e-6, max_grad_norm=1.0, **formats, **options)

    plain = adamw()
    contenders = _contenders(params, plain, adamw, peers=not formats)
    for run in contenders.values():
        timed(run, device, STEPS)
    plain_bytes = _plain_bytes(plain, params)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(timed(run, device, STEPS if not name.startswith(("hooks", "foreach", "snap")) else 2))
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        ratios = [each[1] / beside[1] for each, beside in zip(taken, times["plain"])]
        by_bytes = 1 + MORE_BYTES[name] / plain_bytes
        rows[name] = {
            "ms": statistics.median(each[1] for each in taken),
            "host_ms": statistics.median(each[0] for each in taken),
            "of_plain": statistics.median(ratios),
            "of_plain_range": [min(ratios), max(ratios)],
            "of_plain_by_bytes": by_bytes,
        }
        print(
            f"{workload.title:55} {name:24} {rows[name]['ms']:8.3f} ms, {rows[name]['of_plain']:6.3f} of plain "
            f"({min(ratios):.3f} to {max(ratios):.3f}; by bytes {by_bytes:.3f})"
        )
    return {"workload": workload.title, **formats, "steps_a_turn": STEPS, "rounds": rounds, "contenders": rows}


def main(
    out: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 7,
    quick: Annotated[bool, typer.Option(help="Small workloads, to see that it runs.")] = False,
    state_dtype: Annotated[str, typer.Option(help="The states' format; without peers.")] = "",
    master_weights: Annotated[str, typer.Option(help="The masters' format; without peers.")] = "",
) -> None:
    """Measure, print, and write the figures."""
    native.wait()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large, many = gpu_workloads(quick)[1], gpu_workloads(quick)[0]
    formats = {"state_dtype": state_dtype, "master_weights": {"float32": True}.get(master_weights, master_weights)}
    formats = {name: choice for name, choice in formats.items() if choice}
    figures = [_measured(workload, device, rounds, formats) for workload in (large, many)]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        runs = json.loads(out.read_text())["runs"] if out.exists() else []
        runs.append({"environment": environment(device), "figures": figures})
        out.write_text(json.dumps({"format": 1, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
