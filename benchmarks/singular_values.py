"""The singular values that each set of Muon's coefficients leaves in bfloat16, from badly conditioned matrices.

    python benchmarks/singular_values.py                 # writes results/singular_values_cpu_1.json and the picture

Matrices have singular values over four decades, divided by a Frobenius norm that they dominate more or less. On a CPU
the plain iteration runs; on a GPU, from a shorter side of 1024 on, the one on Gram matrices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import tilestep
from tilestep.linalg.coefficients import NAMES, rows_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks/results/singular_values_cpu_1.json", ROOT / "docs/images/singular_values.png"
SETS = [name for name in NAMES if name not in ("simple", "deepseekv4")]  # but for second names
SHAPE, DECADES, TRIALS = (256, 384), 4.0, 3
FROM = 0.01  # shares of the norm from which values should come near one


def drawn(rows: int, columns: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left vectors, values over their norm, and right vectors, float64."""
    generator = torch.Generator().manual_seed(seed)
    short = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, short, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, short, generator=generator, dtype=torch.float64))
    values = 10 ** torch.linspace(0, -DECADES, short, dtype=torch.float64)
    # The largest of them has a tenth, a half or nearly all of the norm's square.
    values[0] = values[1:].norm() * (0.33, 1.0, 5.0)[seed % 3]
    return left.to(device), (values / values.norm()).to(device), right.to(device)


def matrices(shape: tuple[int, int], device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The matrices that are measured."""
    return [drawn(*shape, seed, device) for seed in range(TRIALS)]


def iterated(values: torch.Tensor, name: str) -> torch.Tensor:
    """What the iteration makes of singular values without rounding."""
    for a, b, c in rows_of(name):
        values = a * values + b * values**3 + c * values**5
    return values


def measured(name: str, shape: tuple[int, int], device: str) -> dict[str, Any]:
    """The values that a set leaves; of those that were at least `FROM`, their range and distance from one."""
    before, after, exact = [], [], []
    for left, values, right in matrices(shape, device):
        found = tilestep.orthogonalize((left * values @ right.mT).float(), coefficients=name)
        after.append((left.mT @ found.double() @ right).diagonal())
        before.append(values)
        exact.append(iterated(values, name))
    values, left_over, wanted = (torch.cat(each).cpu() for each in (before, after, exact))
    large = values >= FROM
    apart = (left_over[large] - 1).square().mean().sqrt()
    return {
        "steps": len(rows_of(name)),
        "least": round(float(left_over[large].min()), 3),
        "greatest": round(float(left_over[large].max()), 3),
        "distance from one": round(float(apart), 3),
        "rounding": round(float((left_over - wanted)[large].square().mean().sqrt()), 4),
        "after": [round(value, 3) for value in left_over.tolist()],
    }


def table(results: dict[str, Any]) -> list[str]:
    """Rows of the table in docs/guide/muon.md."""
    return [
        f'| `"{name}"` | {found["steps"]} | {found["least"]:.2f} ... {found["greatest"]:.2f} | '
        f"{found['distance from one']:.2f} | {found['rounding']:.3f} |"
        for name, found in results["sets"].items()
    ]


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw each set's values in bfloat16, and without rounding."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 4, figsize=(12, 5.2), layout="constrained", sharex=True, sharey=True)
    line = 10 ** torch.linspace(-5, 0, 500, dtype=torch.float64)
    for panel, (name, found) in zip(panels.flat, results["sets"].items(), strict=True):
        panel.axhline(1, color="gray", linewidth=0.6)
        panel.axvspan(FROM, 1, color="gray", alpha=0.12)
        panel.plot(line, iterated(line, name), color="black", linewidth=0.9)
        panel.plot(results["before"], found["after"], ".", markersize=2, color="tab:red")
        panel.set_title(f"{name}, {found['steps']} steps", fontsize=10)
        panel.set(xscale="log", xlim=(1e-5, 1.1), ylim=(-1.1, 1.4))
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("singular value before, as a share of the Frobenius norm", fontsize=10)
    figure.supylabel("after: exact (line), bfloat16 (dots)", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=SHAPE)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    shape = tuple(given.shape)
    before = [value for _, values, _ in matrices(shape, given.device) for value in values.tolist()]
    results: dict[str, Any] = {"shape": list(shape), "device": given.device, "torch": torch.__version__}
    results["before"] = [float(f"{value:.3g}") for value in before]
    results["sets"] = {name: measured(name, shape, given.device) for name in SETS}
    print("\n".join(table(results)))
    given.out.write_text(json.dumps(results) + "\n")
    picture(results, given.picture)


if __name__ == "__main__":
    main()
