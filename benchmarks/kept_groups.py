"""Results that begin with the groups of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence

from tilestep.bench.results import Result

_EARLIER = "groups kept: "


def take_over(result: Result, known: Result, keys: Sequence[str]) -> None:
    """Begin with the groups of an earlier result, of the same environment by these keys; notes say where they are from.

    Raises:
        ValueError: if it is of another environment.
    """
    for key in keys:
        here, there = result.environment.get(key, "unknown"), known.environment.get(key, "unknown")
        if here != there:
            raise ValueError(f"figures of {key} {there} cannot be added to with {key} {here}: choose another folder")
    result.groups.extend(known.groups)
    earlier = [note for note in known.notes if note.startswith(_EARLIER)]
    new = len(known.groups) - sum(int(note.removeprefix(_EARLIER).split()[0]) for note in earlier)
    commit, date = (known.environment.get(key, "unknown") for key in ("commit", "date"))
    result.notes += earlier if not new else [*earlier, f"{_EARLIER}{new} from a run at commit {commit}, {date}"]
