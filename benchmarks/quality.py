"""What formats of states and weights do to a training: a small GPT over the bytes of this repository's source code.

    python benchmarks/quality.py errors [--steps 100]      # of AdamW's update, on states of a training in float32
    python benchmarks/quality.py codes                     # of normal numbers, and of second moments after 600 steps
    python benchmarks/quality.py training [--only int8 int4]  # three seeds with each format; rows of others stay
    python benchmarks/quality.py picture                   # docs/images/formats.png and memory.png, of what is written

They write quality_errors_<device>_1.json, quality_codes_cpu_1.json and quality_training_<device>_1.json to `--out`
(benchmarks/results).

Errors: each format is applied to both states of every tensor of 4,096 and more elements after the last step; the
figure is the normalized mean squared error of m / (sqrt(v) + eps), over all of them: |kept - exact|^2 / |exact|^2.

Codes: the normalized mean squared error of normal numbers kept as a signed state, and of the roots of their squares
kept as a state that is never negative; and the sum of `exp_avg_sq` after 600 steps of AdamW on normal gradients of
constant size, over the sum of the exact one.

Trainings: rows of the same text, that is of the same commit, can be compared. Seeds choose initial weights and batches.
Weights are widened to float32 before they are used, so that runs differ by what the optimizer keeps alone, and by
gradients of bfloat16 where weights are.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timing import result_name
from torch.func import functional_call

import tilestep
from tilestep.bench.demo import GPT, Size
from tilestep.bench.results import environment
from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of

EPS = 1e-8
SIZE = Size(layers=4, width=128, heads=4, context=128)
BATCH = 16
SEEDS = (0, 1, 2)
BETWEEN = 50
"""Steps from one look at the validation loss to the next."""

BF16: dict[str, Any] = {"weights": "bfloat16"}
STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 states": {"state_dtype": "bfloat16"},
    "int8 states": {"state_dtype": "int8"},
    "float8_e4m3 states": {"state_dtype": "float8_e4m3"},
    "int4 states": {"state_dtype": "int4"},
    "bfloat16 weights, to nearest": BF16,
    "bfloat16 weights, kahan": {**BF16, "master_weights": "kahan"},
    "bfloat16 weights, remainder": {**BF16, "master_weights": "remainder"},
    "bfloat16 weights, int8 masters": {**BF16, "master_weights": "int8"},
    "int8 states, int8 masters": {**BF16, "state_dtype": "int8", "master_weights": "int8"},
    "int8 states, stochastic": {**STOCHASTIC, "state_dtype": "int8"},
    "int4 states, stochastic": {**STOCHASTIC, "state_dtype": "int4"},
    "bfloat16 weights, stochastic": {**BF16, **STOCHASTIC},
    "int8 states, int8 masters, stochastic": {**BF16, **STOCHASTIC, "state_dtype": "int8", "master_weights": "int8"},
}
"""What is trained: the dtype of weights where it is not float32, and options of the optimizer."""


def source_code() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the library's modules, to train on and, every twentieth piece of 2,048, to validate with."""
    folder = Path(tilestep.__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).split(2048)
    return torch.cat([piece for place, piece in enumerate(pieces) if place % 20]), torch.cat(pieces[::20])


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sequences of the text that begin at these places."""
    return text[starts.to(text.device)[:, None] + torch.arange(SIZE.context + 1, device=text.device)].long()


def trained(options: dict[str, Any], seed: int, steps: int, device: str) -> tuple[tilestep.Optimizer, dict[str, float]]:
    """The optimizer of a training, and the validation loss after every so many steps."""
    torch.manual_seed(seed)
    options = dict(options)
    model = GPT(SIZE).to(device)
    dtype = getattr(torch, options.pop("weights", "float32"))
    weights = {name: param.detach().to(dtype).requires_grad_() for name, param in model.named_parameters()}
    optimizer = tilestep.AdamW(weights.items(), lr=1e-3, max_grad_norm=1.0, **options)
    text, validation = (part.to(device) for part in source_code())
    held = windows(validation, torch.arange(0, len(validation) - SIZE.context - 1, SIZE.context + 1)[:256]).split(64)
    generator = torch.Generator().manual_seed(seed)
    module = _Loss(model)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        wide = {f"model.{name}": weight.float() for name, weight in weights.items()}
        return functional_call(module, wide, (batch,))

    curve: dict[str, float] = {}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(step / 50, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        starts = torch.randint(0, len(text) - SIZE.context - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_of(windows(text, starts)).backward()
        optimizer.step()
        if step % BETWEEN == 0:
            with torch.no_grad():
                curve[str(step)] = float(torch.stack([loss_of(batch) for batch in held]).mean())
    return optimizer, curve


class _Loss(torch.nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model.loss(batch)


def kept(name: str, values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Values as a format gives them back."""
    storage = STATE_FORMATS[name](signed)
    arrays = {
        array.name: torch.empty(shape_of_entries(values.shape, array.elements), dtype=array.dtype)
        for array in storage.arrays("state")
    }
    stored_in(storage, arrays, "state", values, values.shape)
    return values_of(storage, arrays, "state", shape=values.shape)


def measured(name: str, states: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float | str]:
    """The error of a format's update, in float64."""
    wrong, all_of_it, most = 0.0, 0.0, 0.0
    for moment, square in states:
        exact = moment.double() / (square.double().sqrt() + EPS)
        mine = kept(name, moment, True).double() / (kept(name, square, False).double().sqrt() + EPS)
        wrong += float((mine - exact).square().sum())
        all_of_it += float(exact.square().sum())
        large = exact.abs() > 1e-3
        most = max(most, float((mine[large] / exact[large]).abs().max()))
    return {"format": name, "error of the update": wrong / all_of_it, "largest update over the exact one": most}


def errors(steps: int, device: str) -> dict[str, Any]:
    """What each format does to the update, on states of a training."""
    optimizer, _ = trained({"betas": (0.9, 0.95)}, 0, steps, device)
    states = [state for param, state in optimizer.state.items() if param.numel() >= 4096]
    pairs = [(state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()) for state in states]
    found = [measured(name, pairs) for name in STATE_FORMATS]
    assert all(math.isfinite(float(row["error of the update"])) for row in found)
    return {"steps": steps, "formats": found}


def codes(steps: int) -> dict[str, Any]:
    """Errors of each format on normal numbers, and how far second moments are off after steps of constant gradients."""
    numbers = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    pairs = {name: (kept(name, numbers, True), kept(name, numbers.square(), False)) for name in STATE_FORMATS}
    pairs["float8_e4m3, one scale a tensor"] = (by_one_scale(numbers), by_one_scale(numbers.square()))
    rows = [
        {
            "format": name,
            "NMSE": nmse(values, numbers),
            "NMSE of roots": nmse(squares.double().sqrt(), numbers.abs()),
            "share of second moments that become 0": float((squares == 0).double().mean()),
        }
        for name, (values, squares) in pairs.items()
    ]
    drifts = [
        {"beta2": beta2, "rounding": rounding, "steps": steps, **drift(beta2, rounding, steps)}
        for beta2 in (0.999, 0.99, 0.95)
        for rounding in ("nearest", "stochastic")
    ]
    return {"formats": rows, "exp_avg_sq over the exact one": drifts}


def by_one_scale(values: torch.Tensor) -> torch.Tensor:
    """Values as float8 with one scale for the tensor gives them back."""
    scale = values.abs().max() / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def nmse(values: torch.Tensor, exact: torch.Tensor) -> float:
    """The sum of squared differences over the sum of squares."""
    return float((values.double() - exact.double()).square().sum() / exact.double().square().sum())


def drift(beta2: float, rounding: str, steps: int) -> dict[str, float]:
    """For each format the sum of `exp_avg_sq` after so many steps, over that of float32."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(16, 256, generator=generator) + 0.5
    names = ("float32", "bfloat16", "int8", "float8_e4m3", "int4")
    weights = {name: torch.nn.Parameter(torch.ones(16, 256)) for name in names}
    options: dict[str, Any] = {"betas": (0.9, beta2), "rounding": rounding}
    optimizers = {
        name: tilestep.AdamW([("weight", weight)], state_dtype={"exp_avg_sq": name}, **options)
        for name, weight in weights.items()
    }
    for _ in range(steps):
        grad = size * torch.randn(16, 256, generator=generator)
        for name, optimizer in optimizers.items():
            weights[name].grad = grad
            optimizer.step()
    sums = {
        name: float(tilestep.full_precision(optimizer.state_dict())["state"][0]["exp_avg_sq"].double().sum())
        for name, optimizer in optimizers.items()
    }
    return {name: sums[name] / sums["float32"] for name in names[1:]}


def _curve(job: tuple[str, int, int, str]) -> dict[str, float]:
    name, seed, steps, device = job
    return trained(FORMATS[name], seed, steps, device)[1]


def trainings(names: list[str], steps: int, device: str, processes: int) -> dict[str, Any]:
    """Validation losses of all trainings, which run in processes beside each other."""
    jobs = [(name, seed, steps, device) for name in names for seed in SEEDS]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        curves = list(pool.map(_curve, jobs))
    rows: dict[str, list[dict[str, float]]] = {}
    for (name, *_), curve in zip(jobs, curves):
        rows.setdefault(name, []).append(curve)
    return {"steps": steps, "bytes": sum(map(len, source_code())), "curves": rows}


def final(curve: dict[str, float]) -> float:
    """A run's validation loss at its end: the mean of the last two looks."""
    return statistics.fmean(list(curve.values())[-2:])


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw the curves with the spread between seeds, and how they end beside float32's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = results["curves"]
    figure, (lines, ends) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colors = ["black", *pyplot.get_cmap("tab20").colors]
    exact = [final(curve) for curve in curves["float32"]]
    ends.axvspan(min(exact), max(exact), color="black", alpha=0.1)
    for place, (name, runs) in enumerate(curves.items()):
        steps = [int(step) for step in runs[0]]
        by_step = list(zip(*(run.values() for run in runs)))
        style = {"color": colors[place], "zorder": 3 if name == "float32" else 2}
        lines.plot(steps, [statistics.fmean(values) for values in by_step], label=name, linewidth=1.2, **style)
        lines.fill_between(steps, [*map(min, by_step)], [*map(max, by_step)], color=colors[place], alpha=0.12)
        found = [final(run) for run in runs]
        ends.plot(found, [-place] * len(found), "o", markersize=4, color=colors[place], alpha=0.6)
        ends.plot(statistics.fmean(found), -place, "|", markersize=16, color=colors[place])
    ends.set_yticks([-place for place in range(len(curves))], list(curves), fontsize=8)
    lines.set_yscale("log")
    lines.set_title("validation loss, nats a byte: mean and spread of three seeds", fontsize=10)
    ends.set_title("at the end: each seed, the mean, and float32's spread", fontsize=10)
    lines.set_xlabel("step")
    lines.legend(fontsize=7)
    for panel in (lines, ends):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


MEMORY = {
    "float32": ("float32", {"weights": 4.0, "gradients": 4.0, "states": 8.0}),
    "int8 states, int8 masters": ("int8 states, int8 masters", {"weights": 2.0, "gradients": 2.0}),
    "the same, gradients freed in backward": ("", {"weights": 2.0}),
    "bfloat16 without masters": ("bfloat16 weights, to nearest", {"weights": 2.0, "gradients": 2.0, "states": 4.0}),
}
"""Rows of the picture of memory: whose curve it has, and bytes a parameter; what is missing is in formats' results."""


def memory_picture(results: dict[str, Any], formats: dict[str, Any], path: Path) -> None:
    """Draw bytes a parameter of a training beside its validation losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (kept,) = [row for row in formats["rows"] if row["format"] == "int8 states, int8 masters" and row["tensors"] == 219]
    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    shades = {"weights": "#adb5bd", "gradients": "#dee2e6", "masters": "#f59f00", "states": "#d9480f"}
    curves = {"float32": ("black", "-"), "int8 states, int8 masters": ("#d9480f", "-")}
    curves["bfloat16 without masters"] = ("#868e96", "--")
    for place, (name, (trained, own)) in enumerate(MEMORY.items()):
        parts = own if "states" in own else {**own, "masters": 1.0, "states": kept["state, bytes an element"] - 1}
        left = 0.0
        for part, size in parts.items():
            label = None if part in bars.get_legend_handles_labels()[1] else part
            bars.barh(place, size, left=left, color=shades[part], height=0.62, label=label)
            left += size
        bars.annotate(f" {left:.3g}", (left, place), va="center", fontsize=11, fontweight="bold")
        if trained:
            runs = results["curves"][trained]
            steps = [int(step) for step in runs[0]]
            by_step = list(zip(*(run.values() for run in runs)))
            color, style = curves[name]
            end = statistics.fmean(map(final, runs))
            means = [statistics.fmean(values) for values in by_step]
            lines.plot(steps, means, style, color=color, linewidth=1.6, label=f"{name}: {end:.3f}")
            lines.fill_between(steps, [*map(min, by_step)], [*map(max, by_step)], color=color, alpha=0.15)
    bars.set_yticks(range(len(MEMORY)), list(MEMORY), fontsize=9)
    bars.invert_yaxis()
    bars.margins(x=0.1)
    bars.set_title("bytes a parameter, AdamW", fontsize=10, loc="left")
    bars.legend(fontsize=8, frameon=False, loc="lower right")
    lines.set_title("validation loss of a small GPT, three seeds", fontsize=10, loc="left")
    lines.set_xlabel("step", fontsize=9)
    lines.legend(fontsize=8, frameon=False)
    for panel in (bars, lines):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "codes", "training", "picture"))
    parser.add_argument("--steps", type=int, default=0, help="by default 100, 600 and 1000")
    parser.add_argument("--only", nargs="*", choices=list(FORMATS), default=list(FORMATS), help="formats to train")
    parser.add_argument("--processes", type=int, default=1, help="trainings beside each other")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = given.what == "codes"
    name = result_name(f"quality_{given.what}", torch.device("cpu" if on_cpu else device))
    path = given.out / f"{name}.json"
    if given.what == "picture":
        results = json.loads((given.out / "quality_training_h200_1.json").read_text())
        picture(results, Path("docs/images/formats.png"))
        formats = json.loads((given.out / "formats_h100_1.json").read_text())
        memory_picture(results, formats, Path("docs/images/memory.png"))
        return
    if given.what == "errors":
        results = errors(given.steps or 100, device)
    elif given.what == "codes":
        results = codes(given.steps or 600)
    else:
        before = json.loads(path.read_text())["curves"] if path.exists() else {}
        results = trainings(given.only, given.steps or 1000, device, given.processes)
        both = {**before, **results["curves"]}
        results["curves"] = {name: both[name] for name in FORMATS if name in both}
        for name, runs in results["curves"].items():
            print(f"{name:42}", *(f"{final(run):.4f}" for run in runs))
    results = {"environment": environment(torch.device("cpu") if on_cpu else None), **results}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
