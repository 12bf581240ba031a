"""The script that times papers' rules beside their authors' code, with code written here in the authors' place."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "paper_rules.py"

GRAMS = """
import torch

class Grams(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state.update(count=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
            state["count"] += 1
            state["m"].lerp_(param.grad, 0.1)
            state["v"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
            rate = self.param_groups[0]["lr"] * (1 - 0.999 ** state["count"]) ** 0.5 / (1 - 0.9 ** state["count"])
            param.sub_(rate * SIGN * state["m"].abs() / (state["v"].sqrt() + 1e-6))
"""


def measured(folder: Path, sign: str) -> tuple[int, dict]:
    (folder / "grams.py").write_text(GRAMS.replace("SIGN", sign))
    done = run_script(SCRIPT, "--authors", str(folder), "--only", "Grams", "--quick", "--out", str(folder))
    return done.returncode, json.loads((folder / "paper_rules_cpu_1.json").read_text())["rules"]["Grams"]


def test_a_rule_is_timed_beside_its_authors_code(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "param.grad.sign()")
    assert code == 0
    assert all(error < 2e-6 for error in found["error of the update"].values())
    assert 1e-4 < found["error of five updates"]["tilestep, int8 states"] < 0.02
    theirs, ours, narrow = (found[name] for name in ("authors' code", "tilestep", "tilestep, int8 states"))
    assert all(row["wall"] > 0 for row in (theirs, ours, narrow))
    assert theirs["between steps, bytes a parameter"] == 8.0  # four tensors of bfloat16
    assert narrow["bytes a parameter"] < ours["bytes a parameter"] < 8.1


def test_what_is_not_the_same_update_is_not_timed(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "state['m'].sign()")
    assert code == 1
    assert "from float64's" in found["failure"] and "tilestep" not in found
    assert found["error of the update"]["authors' code"] > 0.1
    assert found["error of the update"]["tilestep"] < 2e-6
