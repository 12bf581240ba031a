"""Bring the generated code in docs/how-it-works.md up to date with the code generators.

A comment in the page says what follows it: `<!-- generated: BACKEND RULE DTYPE FUNCTION -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import tilestep
from tilestep.planning.describe import describe

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-it-works.md"
BLOCK = re.compile(r"<!-- generated: (\w+) (\w+) (\w+) (\w+) -->\n```\w+\n.*?```\n", re.DOTALL)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def function(source: str, name: str, backend: str) -> str:
    """One function of a generated source, with its decorator."""
    pattern = (
        rf"^@triton\.jit(?:\([^)]*\))?\ndef {name}\(.*?(?=\n\n\n|\Z)"
        if backend == "triton"
        else rf'^extern "C" void {name}\(.*?^\}}'
    )
    found = re.search(pattern, source, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"the generated source has no function {name}")
    return found[0].rstrip()


def brought_up_to_date(text: str) -> str:
    """The page with every block generated anew."""

    def block(match: re.Match[str]) -> str:
        backend, rule, dtype, name = match.groups()
        source = describe(tilestep.registry[rule], backend=backend, dtype=DTYPES[dtype]).source
        language = "python" if backend == "triton" else "cpp"
        mark = f"<!-- generated: {backend} {rule} {dtype} {name} -->"
        return f"{mark}\n```{language}\n{function(source, name, backend)}\n```\n"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    PAGE.write_text(brought_up_to_date(PAGE.read_text()))
