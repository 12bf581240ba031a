"""A section's result: rows of figures with the environment they were measured in, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .measure import Spread, Timing

FORMAT = 1


@dataclass
class Row:
    """One contender's figures in one group.

    Times in milliseconds, memory in bytes, bandwidth in bytes a second; None where there is no such figure.
    `of_limit` is the bandwidth as a fraction of the group's limit. `failure` says why a contender has no figures.
    End to end, `speedup` is over the baseline, `share` what the step alone would be of the iteration, and
    `setup_seconds` the first three steps with all that is built for them.
    """

    contender: str
    host: Spread | None = None
    wall: Spread | None = None
    device: Spread | None = None
    launches: int | None = None
    calls: int | None = None
    peak_bytes: int | None = None
    bytes_moved: int = 0
    bandwidth: float | None = None
    of_limit: float | None = None
    failure: str | None = None
    speedup: float | None = None
    share: float | None = None
    setup_seconds: float | None = None

    @classmethod
    def of(cls, timing: Timing, limit: float | None, gpu: bool) -> Row:
        """Return the row for what was measured, against a bandwidth limit in bytes a second."""
        trace, bandwidth = timing.trace, timing.bandwidth
        return cls(
            contender=timing.contender,
            host=timing.host,
            wall=timing.wall,
            device=timing.device,
            launches=trace.launches if trace and gpu else None,
            calls=trace.calls if trace else None,
            peak_bytes=trace.peak_bytes if trace else None,
            bytes_moved=timing.bytes_moved,
            bandwidth=bandwidth,
            of_limit=bandwidth / limit if bandwidth and limit else None,
            failure=timing.failure,
        )


@dataclass
class Group:
    """Contenders that did the same work, and the bandwidth (bytes a second, and whose) that they are held against.

    `tags` say what the work was, where a title does not do.
    """

    title: str
    rows: list[Row]
    limit: float | None = None
    limit_name: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    def row(self, contender: str) -> Row | None:
        """Return a contender's row, or None if it did not take part."""
        return next((row for row in self.rows if row.contender == contender), None)


_EARLIER = "groups kept: "


@dataclass
class Result:
    """One section of the benchmark; `summary` holds figures over all groups, by what they are."""

    section: str
    environment: dict[str, str]
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write `<section>.json` into a folder and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.section}.json"
        path.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        return path

    def take_over(self, known: Result, keys: Sequence[str]) -> None:
        """Begin with the groups of an earlier result; notes say where they are from."""
        for key in keys:
            here, there = self.environment.get(key, "unknown"), known.environment.get(key, "unknown")
            if here != there:
                raise ValueError(
                    f"figures of {key} {there} cannot be added to with {key} {here}: choose another folder"
                )
        self.groups.extend(known.groups)
        earlier = [note for note in known.notes if note.startswith(_EARLIER)]
        new = len(known.groups) - sum(int(note.removeprefix(_EARLIER).split()[0]) for note in earlier)
        commit, date = (known.environment.get(key, "unknown") for key in ("commit", "date"))
        self.notes += earlier if not new else [*earlier, f"{_EARLIER}{new} from a run at commit {commit}, {date}"]

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote."""
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a benchmark result of format {FORMAT}")
        groups = [Group(**{**group, "rows": [_row(row) for row in group["rows"]]}) for group in stored.pop("groups")]
        return cls(**stored, groups=groups)


def _row(stored: dict[str, Any]) -> Row:
    times = {name: Spread(**stored[name]) if stored[name] else None for name in ("host", "wall", "device")}
    return Row(**{**stored, **times})
