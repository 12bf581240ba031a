"""Tests on a GPU run the checks of other folders there: those are imported from where they stand."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = ("amp", "memory", "placement", "schedules/overlap", "schedules/zero", "storage", "taps")
sys.path.extend(str(TESTS / folder) for folder in FOLDERS)
