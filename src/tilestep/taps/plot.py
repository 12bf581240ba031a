"""A picture of statistics: layers by steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .stats import StepStats


class StatsPlot:
    """Draws one column of the statistics as a map, parameters from top to bottom, steps from left to right.

    Args:
        column: what is drawn, `"update_ratio"` say.
        logarithmic: colours by the logarithm; 0 stays white.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = tilestep.SGD([weight], lr=0.5, stats=tilestep.Stats())
        >>> plot = tilestep.StatsPlot("grad_norm")
        >>> for _ in range(3):
        ...     weight.grad = torch.ones(4)
        ...     optimizer.step()
        ...     plot.add(optimizer.stats)
        >>> plot.steps, plot.rows["0.0"]
        ([1, 2, 3], [2.0, 2.0, 2.0])
    """

    def __init__(self, column: str = "update_ratio", *, logarithmic: bool = True) -> None:
        self.column, self.logarithmic = column, logarithmic
        self._added: list[StepStats] = []
        self.steps: list[int] = []
        self._rows: dict[str, list[float]] = {}

    def add(self, stats: StepStats) -> None:
        """Take a step's statistics, `optimizer.stats`; a step that is there already is left out. Nothing is waited for.

        Raises:
            KeyError: for statistics without the column.
        """
        if self.column not in stats.columns:
            raise KeyError(f"no column is called {self.column!r}; there are {', '.join(stats.columns)}")
        if not self.steps or stats.step != self.steps[-1]:
            self._added.append(stats)
            self.steps.append(stats.step)

    @property
    def rows(self) -> dict[str, list[float]]:
        """The numbers of each parameter, one a step."""
        for stats in self._added:
            length = len(next(iter(self._rows.values()), []))
            read = stats.read()
            for name in read:
                self._rows.setdefault(name, [math.nan] * length)
            for name, numbers in self._rows.items():
                numbers.append(read.get(name, {}).get(self.column, math.nan))
        self._added.clear()
        return self._rows

    def draw(self, axes: Any = None) -> Any:
        """Draw with matplotlib.

        Args:
            axes: where; None for a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            ValueError: before any step was added.
        """
        try:
            import matplotlib.pyplot as plt
            from matplotlib.colors import LogNorm
        except ImportError as error:
            raise ImportError("StatsPlot draws with matplotlib: pip install matplotlib") from error
        rows = self.rows
        if not self.steps:
            raise ValueError("nothing to draw: add(optimizer.stats) after a step that measures")
        if axes is None:
            _, axes = plt.subplots(figsize=(8, 1 + 0.16 * len(rows)), layout="constrained")
        numbers = list(rows.values())
        positive = [number for row in numbers for number in row if 0 < number < math.inf]
        norm = LogNorm(min(positive), max(positive)) if self.logarithmic and positive else None
        drawn = axes.imshow(numbers, aspect="auto", norm=norm, interpolation="nearest", cmap="viridis")
        axes.set_yticks(range(len(rows)), list(rows), fontsize=6)
        places = range(0, len(self.steps), max(1, math.ceil(len(self.steps) / 9)))
        axes.set_xticks(places, [str(self.steps[place]) for place in places])
        axes.set_xlabel("step")
        axes.set_title(self.column.replace("_", " "))
        axes.figure.colorbar(drawn, ax=axes)
        return axes

    def save(self, path: str | Path) -> None:
        """Draw into a file; arguments and errors as of `draw`."""
        axes = self.draw()
        axes.figure.savefig(path, dpi=120)
        import matplotlib.pyplot as plt

        plt.close(axes.figure)
