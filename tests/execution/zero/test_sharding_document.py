"""The code in docs/sharding.md, on one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "sharding.md"


def test_the_code_runs(one_rank: None, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"folder": tmp_path}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2
    steps = {float(state["step"]) for state in names["optimizer"].state.values()}
    assert steps == {3.0}
