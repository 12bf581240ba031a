"""The private torch calls that overlap uses: whether this torch has them as we know them, and what is done without.

Also the code in docs/overlap.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import overlapped_pairs
import pytest
import torch
from overlapped_models import clipped
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tilestep import compat
from tilestep.execution.overlap import execution

DOCUMENT = Path(__file__).parents[3] / "docs" / "overlap.md"


def test_modules_of_fsdp_are_known(one_rank: None) -> None:
    assert compat.fsdp_module_type() is FSDPModule
    assert isinstance(overlapped_pairs.fsdp(), FSDPModule)


def test_gathering_is_seen_whoever_asks_for_it(one_rank: None) -> None:
    model: Any = overlapped_pairs.fsdp()
    seen: list[tuple[str, list[Any]]] = []
    for name in ("0", "1"):
        block = model.blocks[int(name)]
        prepared = compat.before_gathering(block, lambda streams, name=name: seen.append((name, streams)))
        assert prepared, f"torch {torch.__version__} has no groups of FSDP parameters with unshard() (compat)"
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    overlapped_pairs.one_batch(model, 0).backward()
    names = [name for name, _ in seen]
    assert names[:3] == ["1", "0", "1"] and set(names) == {"0", "1"}
    assert all(streams == [] for _, streams in seen)


def test_without_it_modules_wait_before_their_forward(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.before_gathering(nn.Linear(1, 1), lambda streams: None)
    monkeypatch.setattr(execution, "before_gathering", lambda module, prepare: False)
    pair = overlapped_pairs.Pair(clipped, "forward", overlapped_pairs.fsdp)
    for step in range(4):
        pair.step(step)
    pair.compare()


def test_the_code_in_the_document_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert {float(state["step"]) for state in names["optimizer"].state.values()} == {3.0}
