"""The code in docs/offload.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "offload.md"


def test_the_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert blocks
    assert {float(state["step"]) for state in names["optimizer"].state.values()} == {3.0}
