"""Tables on the terminal and pictures in files, as all commands show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

OURS_COLOUR, OTHER_COLOUR = "#c8553d", "#8a9ba8"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], bold: str = "") -> Table:
    """A table whose first column has names; columns without content are left out, rows named `bold...` are bold."""
    from rich.table import Table

    cells = list(rows)
    shown = [place for place in range(len(columns)) if not place or any(row[place] for row in cells)]
    made = Table(title=title, title_justify="left", title_style="")
    for place in shown:
        made.add_column(columns[place], justify="right" if place else "left", no_wrap=bool(place))
    for row in cells:
        made.add_row(*(row[place] for place in shown), style="bold" if bold and row[0].startswith(bold) else None)
    return made


@contextmanager
def picture(path: Path, rows: int, columns: int = 1, **layout: Any) -> Iterator[tuple[Any, list[Any]]]:
    """A figure of matplotlib and its panels, written to a file when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **layout)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    yield figure, list(panels.flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
