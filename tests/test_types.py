"""What type checkers and editors see of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from module_files import load

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "optimizer_stub.py"

USE = """
import torch
import tilestep

model = torch.nn.Linear(2, 2)
optimizer = tilestep.AdamW(model.parameters(), lr=lambda step: 1e-3, max_grad_norm=1.0)
reveal_type(optimizer)
reveal_type(tilestep.total_norm([torch.ones(2)]))
tilestep.Optimizer(model.parameters(), tilestep.ema(tilestep.registry["Lion"]), lr=1e-3)
tilestep.AdamW(model.parameters(), max_grad_norm=tilestep.ZClip(), skip_above=tilestep.Sigma(6), state_dtype="int8")
tilestep.AdamW(model.parameters(), max_grad_norm=tilestep.AdaGC(), skip_above=tilestep.TimesMean(3.0))
tilestep.AdamW(model.parameters(), learning_rate=1e-3)
tilestep.AdamW(model.parameters(), skip_above="often")
tilestep.AdamW(model.parameters(), state_dtype=8)
tilestep.NoSuchOptimizer
"""

SETTINGS = """
[mypy]
ignore_missing_imports = true
[mypy-torch.*,numpy.*,matplotlib.*,rich.*,triton.*]
follow_imports = skip
[mypy-torch,torch._tensor,torch._C.*,torch.nn.*,torch.optim.*]
follow_imports = normal
"""
"""What the script's types depend on: all of torch would be three times as long. `make types` reads all."""


def test_the_stub_of_the_named_optimizers_is_current() -> None:
    pytest.importorskip("ruff", reason="the stub is formatted by ruff")
    module = load(SCRIPT)
    assert module.TARGET.read_text() == module.stub(), f"run python {SCRIPT.relative_to(ROOT)}"


def test_mypy_knows_the_named_optimizers(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    options = ["--no-error-summary", "--config-file", str(tmp_path / "mypy.ini")]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", ".mypy_cache/test_types"]
    result = subprocess.run([*command, str(tmp_path / "use.py")], cwd=ROOT, capture_output=True, text=True)
    revealed, norm, keyword, *notes, skips, dtype, missing = result.stdout.splitlines()
    assert 'Revealed type is "tilestep.optimizer.named_types.AdamW"' in revealed
    assert 'Revealed type is "torch._tensor.Tensor"' in norm
    assert 'Unexpected keyword argument "learning_rate" for "AdamW"' in keyword
    assert 'Argument "skip_above" to "AdamW" has incompatible type "str"' in skips
    assert 'Argument "state_dtype" to "AdamW" has incompatible type "int"' in dtype
    assert 'has no attribute "NoSuchOptimizer"' in missing
    assert all(": note:" in note for note in notes)
