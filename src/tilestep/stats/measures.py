"""Statistics of every parameter, computed by the update kernels from values in registers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from ..compat import is_capturing
from ..devices import moved
from ..kernels.spec import INVERSE_SCALE, KernelSpec, Output
from ..placement.local import is_distributed
from ..runtime import DeviceEngine
from ..runtime.passes import Passes
from ..storage import Stored, Term

_COLUMNS = (
    "grad_norm",
    "grad_max",
    "param_norm",
    "param_max",
    "update_norm",
    "update_max",
    "update_ratio",
    "zero_fraction",
    "lost_fraction",
)

_NEAR, _FAR = 2.0**40, 2.0**-11
"""Factors of states before squaring, so that float32 also holds the sums of squares of second moments.

The first factor covers 1e-31 to 1e+6, the second, used if the first overflows, up to 1e+22.
"""


def _output(
    name: str, number: Callable[[Stored], Term], operation: Callable[[Term], Term], reduce: Any = "sum"
) -> Output:
    return Output(name, lambda stored: operation(number(stored)), reduce)


def _squared(number: Term) -> Term:
    return number * number


_magnitude, _is_zero = methodcaller("function", "abs"), methodcaller("same", 0)
_GRAD, _PARAM, _UPDATE = methodcaller("old", "grad"), methodcaller("new", "param"), methodcaller("update")
_BASE = (
    _output("grad_squares", _GRAD, _squared),
    _output("grad_max", _GRAD, _magnitude, "max"),
    _output("grad_zeros", _GRAD, _is_zero),
    _output("param_squares", _PARAM, _squared),
    _output("param_max", _PARAM, _magnitude, "max"),
    _output("update_squares", _UPDATE, _squared),
    _output("update_max", _UPDATE, _magnitude, "max"),
    Output(
        "lost",
        lambda stored: (stored.moves() | stored.update().same(0).function("not")) & stored.is_other().function("not"),
        "sum",
    ),
)


@functools.cache
def _of_state(name: str) -> tuple[Output, ...]:
    new = methodcaller("new", name)
    return (
        _output(f"{name}_near", new, lambda number: _squared(number * _NEAR)),
        _output(f"{name}_far", new, lambda number: _squared(number * _FAR)),
        _output(f"{name}_max", new, _magnitude, "max"),
    )


def measured_by(spec: KernelSpec, stats: Stats | None = None) -> tuple[Output, ...]:
    """Return the outputs of a measured step; for states, only those of the parameter's shape."""
    graph = spec.program.graph
    apart = {*graph.scalar_states, *graph.slice_states, *graph.matrix_states}
    states = [name for name in graph.states if name not in apart and name in spec.storages]
    further = () if stats is None else stats.outputs
    return (*_BASE, *(output for name in states for output in _of_state(name)), *further)


def taken_names(states: Iterable[str], stats: Stats) -> str:
    """Return the first output of `stats` with the name of a column; empty if there is none."""
    kinds = ("near", "far", "squares", "norm", "max", "number_max")
    taken = {*_COLUMNS, *(base.name for base in _BASE), *(f"{name}_{what}" for name in states for what in kinds)}
    return next((output.name for output in stats.outputs if output.name in taken), "")


_ONE_MESSAGE = 64  # most ranks for which extremes are sent with the sums


@dataclass(frozen=True)
class Stats:
    """Measure statistics of every parameter in the step: `tilestep.AdamW(..., stats=tilestep.Stats(every=10))`.

    The update kernel of a measured step also reduces the values that it reads and computes; other steps run without
    statistics. A step in a CUDA graph measures at every replay. `optimizer.stats` returns the results.

    Args:
        every: measure every `every` calls of `step()`, first in call number `every`.
        outputs: additional columns, sums or maxima over the elements of each parameter.

    Raises:
        ValueError: unless `every` is an integer of 1 or more; for outputs that are not a sum or maximum per parameter;
            for two outputs of the same name.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats(every=1))
        >>> weight.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
        >>> optimizer.step()
        >>> measured = optimizer.stats.read()["weight"]
        >>> measured["grad_norm"], measured["grad_max"], measured["update_norm"], measured["zero_fraction"]
        (5.0, 4.0, 2.5, 0.5)
    """

    every: int = 1
    outputs: tuple[Output, ...] = ()

    def __post_init__(self) -> None:
        names = [output.name for output in self.outputs if output.reduce in ("sum", "max")]
        if len(set(names)) < len(self.outputs):
            raise ValueError(f"Invalid outputs: {self.outputs!r}; each must be a sum or a max with a unique name")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Invalid every: {self.every!r}; it must be a positive number of steps")


class StepStats(Mapping[str, Mapping[str, torch.Tensor]]):
    """The statistics of one step: a table on the device, and `read` for the host.

    A mapping from names of parameters to mappings from columns to device scalars. The columns are `grad_norm` and
    `grad_max` of the unscaled, unclipped gradient; `param_norm` and `param_max` after the step; `update_norm` and
    `update_max` of the update, before rounding to the stored dtype; `update_ratio`, the update's norm over the
    parameter's; `zero_fraction`, the fraction of gradient elements that are 0; `lost_fraction`, the fraction of updates
    lost to rounding; and `<state>_norm` and `<state>_max` of each state after the step. Norms are 2-norms, maxima are
    of magnitudes. A skipped step has an update of 0 and the unchanged parameter and states. Columns that do not apply
    are NaN: all columns, without a gradient. The columns of `Stats.outputs` are last.

    Attributes:
        names: the names of named parameters, otherwise `"group.index"`.
        columns: the columns of the table.
        table: float64[names, columns] on the device; not synchronized.
        step: the number of the measured call of `step()`; 0 before the first, when there are no names and columns.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.stats.names, optimizer.stats.step, optimizer.stats.table.shape[0]
        (('weight',), 1, 1)
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str], table: torch.Tensor, step: int) -> None:
        self.names, self.columns, self.table, self.step = tuple(names), tuple(columns), table, step
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if table.is_cuda and not is_capturing():
            self._host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
            self._host.copy_(table, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def follow(self) -> None:
        """Make the current stream wait for the table, which another stream may have written.

        `optimizer.stats` calls it; call it again if you read the table in yet another stream.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> measured = optimizer.stats
            >>> measured.follow()
            >>> measured["weight"]["grad_norm"]
            tensor(5., dtype=torch.float64)
        """
        if self._copied is not None:
            current = torch.cuda.current_stream(self.table.device)
            current.wait_event(self._copied)
            self.table.record_stream(current)

    def read(self) -> dict[str, dict[str, float]]:
        """Return the statistics on the host, by name and column; waits for the copy that the step has started.

        After replays of a CUDA graph, returns the statistics of the last replay.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> optimizer.stats.read()["weight"]["grad_norm"]
            5.0
        """
        if self._copied is not None:
            self._copied.synchronize()
        host = self.table.cpu() if self._host is None else self._host
        return {name: dict(zip(self.columns, row)) for name, row in zip(self.names, host.tolist())}

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self.names:
            raise KeyError(
                f"no parameter is named {name!r}; names are {', '.join(self.names[:5])}, ..."
                if self.step
                else "no step has been measured yet"
            )
        return dict(zip(self.columns, self.table[self.names.index(name)].unbind()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"StepStats(step={self.step}, {len(self.names)} parameters, {', '.join(self.columns)})"


class _Part:
    """The rows and columns of a segment in the table of all parameters."""

    def __init__(
        self, passes: Passes, places: Mapping[int, int], raw: Sequence[str], sharers: Any, device: Any
    ) -> None:
        self.segment = segment = passes.segment
        own = passes.outputs
        assert own is not None
        self._outputs = own
        self._entries = segment.entries
        rows = [places[id(entry.share.param)] for entry in self._entries]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.columns = torch.tensor([raw.index(name) for name in own.names], device=device)
        self._raw, self._device = list(raw), device
        graph = segment.spec.program.graph
        self._numbers = list(graph.scalar_states)
        self._factors = {}
        for name in (*graph.slice_states, *graph.matrix_states):
            # Weights of a rank's sums over row, column or matrix states; matrices are equal on all ranks.
            shares = [
                entry.weight
                if sharers is None or not is_distributed(entry.handle)
                else 1 / sharers.size
                if name in graph.matrix_states
                else sharers.share(entry.handle, graph.reduced_dims(entry.handle.dim())[name])
                for entry in self._entries
            ]
            factors = [share / entry.weight for share, entry in zip(shares, self._entries)]
            self._factors[name] = torch.tensor(factors, dtype=torch.float64, device=segment.device)

    def write_to(self, table: torch.Tensor) -> None:
        """Write the columns into the table of all parameters."""
        if not self._outputs.has_run or not self._entries:
            return
        table[self.rows[:, None], self.columns] = moved(self._outputs.totals, self._device)
        others = []
        for name in self._numbers:
            number = self.segment.scalar_states[name].to(torch.float64).abs()
            others.append((f"{name}_number_max", number))
        for name, factors in self._factors.items():
            exact = [{**entry.arrays, **entry.matrices}[name].detach().to(torch.float64) for entry in self._entries]
            others.append((f"{name}_squares", torch.stack(torch._foreach_norm(exact)).square() * factors))
            largest = [tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()) for tensor in exact]
            others.append((f"{name}_max", torch.stack(largest)))
        # Tensors without a gradient have no statistics.
        missing = table[self.rows, self._raw.index("grad_zeros")].isnan()
        for column, numbers in others:
            placed = moved(numbers, self._device).masked_fill(missing, math.nan)
            table[:, self._raw.index(column)].index_copy_(0, self.rows, placed)


class Measurer:
    """Makes the table of all parameters from the sums of the segments."""

    def __init__(
        self,
        engines: Sequence[DeviceEngine],
        places: Mapping[int, int],
        names: Sequence[str],
        numels: Sequence[int],
        specs: Sequence[KernelSpec],
        sharers: Any,
        stats: Stats,
    ) -> None:
        self._engines, self.names, self._sharers = list(engines), list(names), sharers
        self.device = engines[0].device
        raw: dict[str, str] = {output.name: output.reduce for output in (*_BASE, *stats.outputs)}
        states: dict[str, None] = {}
        for spec in {id(spec): spec for spec in specs}.values():
            graph = spec.program.graph
            states.update(dict.fromkeys(graph.states))
            raw.update({output.name: output.reduce for output in measured_by(spec)})
            raw.update(dict.fromkeys((f"{name}_number_max" for name in graph.scalar_states), "max"))
            for name in (*graph.slice_states, *graph.matrix_states):
                raw.update({f"{name}_squares": "sum", f"{name}_max": "max"})
        self._raw = list(raw)
        share = torch.ones(len(names), dtype=torch.float64, device="cpu")
        for entry in [entry for engine in engines for entry in engine.entries]:
            share[places[id(entry.share.param)]] = entry.weight
        self._numel = torch.tensor(numels, dtype=torch.float64, device=self.device)
        self._share = share.to(self.device)[:, None]
        self._parts = [
            _Part(passes, places, self._raw, sharers, self.device) for engine in engines for passes in engine.passes
        ]
        self._states = [state for state in states if f"{state}_max" in raw or f"{state}_number_max" in raw]
        self._output_columns = [output.name for output in stats.outputs]
        of_states = (f"{state}_{what}" for state in self._states for what in ("norm", "max"))
        self.columns = [*_COLUMNS, *of_states, *self._output_columns]
        is_sum = [reduce == "sum" for reduce in raw.values()]
        self._sums = torch.tensor([place for place, adds in enumerate(is_sum) if adds], device=self.device)
        self._extremes = torch.tensor([place for place, adds in enumerate(is_sum) if not adds], device=self.device)
        self._nothing = torch.full((), math.nan, dtype=torch.float64, device=self.device)
        self.first = torch.full((), -1, dtype=torch.int64, device=self.device)
        """Place of the first parameter with a nonfinite gradient; -1 for none."""

    def table(self) -> torch.Tensor:
        """Return float64[parameters, columns] of the last launched step, on the device."""
        raw = self._nothing.expand(len(self.names), len(self._raw)).clone()
        for part in self._parts:
            part.write_to(raw)
        # The maximum of an empty parameter is 0.
        raw = self._together(raw)
        raw = raw.masked_fill_((self._numel == 0)[:, None] & (raw == -math.inf), 0.0)
        column = dict(zip(self._raw, raw.unbind(1)))
        inverse = self._engines[0].control.numbers[INVERSE_SCALE]
        wrong = ~column["grad_max"].isfinite() & ~column["grad_zeros"].isnan()
        first = torch.where(wrong.any(), wrong.to(torch.int8).argmax(), self.first)
        self.first.copy_(torch.where(self.first < 0, first, self.first))
        update, param = column["update_squares"].sqrt(), column["param_squares"].sqrt()
        made = [
            column["grad_squares"].sqrt() * inverse,
            column["grad_max"] * inverse,
            param,
            column["param_max"],
            update,
            column["update_max"],
            update / param,
            column["grad_zeros"] / self._numel,
            column["lost"] / self._numel,
        ]
        for state in self._states:
            made += self._of_state(state, column)
        return torch.stack([*made, *(column[name] for name in self._output_columns)], 1)

    def _together(self, raw: torch.Tensor) -> torch.Tensor:
        """Reduce sums and extremes over all ranks."""
        if self._sharers is None:
            return raw
        missing = raw.isnan() & raw[:, 2:3].isnan()
        sums = torch.where(missing, 0.0, raw)[:, self._sums] * self._share
        present = (~missing[:, 2]).to(torch.float64)[:, None] * self._share
        extremes = torch.where(missing, -math.inf, raw)[:, self._extremes]
        message = torch.cat([sums.reshape(-1), present.reshape(-1)])
        is_one = self._sharers.size <= _ONE_MESSAGE
        if is_one:
            by_rank = extremes.new_zeros((self._sharers.size, *extremes.shape))
            by_rank[self._sharers.rank] = extremes
            message = torch.cat([message, by_rank.reshape(-1)])
        else:
            self._sharers.largest(extremes)
        self._sharers.add(message)
        sizes = [sums.numel(), present.numel()]
        parts = message.split([*sizes, message.numel() - sum(sizes)])
        if is_one:
            extremes = parts[2].view_as(by_rank).amax(0)
        reduced = raw.clone()
        reduced[:, self._sums], reduced[:, self._extremes] = parts[0].view_as(sums), extremes
        return torch.where(parts[1].view_as(present) > 0, reduced, self._nothing)

    def _of_state(self, state: str, column: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return norm and largest magnitude of a state for each parameter, in any format."""
        norms, extremes = [], []
        if f"{state}_near" in column:
            near, far = column[f"{state}_near"], column[f"{state}_far"]
            norms.append(torch.where(near < math.inf, near / _NEAR**2, far / _FAR**2).sqrt())
        if f"{state}_squares" in column:
            norms.append(column[f"{state}_squares"].sqrt())
        if f"{state}_max" in column:
            extremes.append(column[f"{state}_max"])
        if f"{state}_number_max" in column:
            norms.append(column[f"{state}_number_max"])
            extremes.append(norms[-1])
        return [functools.reduce(_either, norms), functools.reduce(_either, extremes)]


def _either(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The first argument, or the second where the first is NaN."""
    return torch.where(first.isnan(), second, first)


class StatsPlot:
    """Draws one column of the statistics as a map: one row per parameter, one column per step.

    Args:
        column: the column to draw, for example `"update_ratio"`.
        logarithmic: whether colours are logarithmic; 0 stays white.

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
        """Add the statistics of a step. Does not wait for the device.

        A step that was added before is ignored, and so are the empty statistics before the first measured step.

        Args:
            stats: `optimizer.stats`.

        Raises:
            KeyError: for statistics without the column.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> plot = tilestep.StatsPlot("grad_norm")
            >>> plot.add(optimizer.stats)
            >>> plot.steps
            [1]
        """
        if stats.step and self.column not in stats.columns:
            raise KeyError(f"no column is named {self.column!r}; columns are {', '.join(stats.columns)}")
        if stats.step != (self.steps[-1] if self.steps else 0):
            self._added.append(stats)
            self.steps.append(stats.step)

    @property
    def rows(self) -> dict[str, list[float]]:
        """The values of each parameter, one per step.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> plot = tilestep.StatsPlot("grad_norm")
            >>> plot.add(optimizer.stats)
            >>> plot.rows
            {'weight': [5.0]}
        """
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
            axes: where to draw; None for a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            ValueError: before a step was added.

        Example:
            >>> import matplotlib, torch, tilestep
            >>> matplotlib.use("Agg")
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> plot = tilestep.StatsPlot("grad_norm")
            >>> weight.grad = torch.ones(4)
            >>> optimizer.step()
            >>> plot.add(optimizer.stats)
            >>> axes = plot.draw()
            >>> axes.get_title(), [label.get_text() for label in axes.get_yticklabels()]
            ('grad norm', ['weight'])
            >>> matplotlib.pyplot.close(axes.figure)
        """
        try:
            import matplotlib.pyplot as plt
            from matplotlib.colors import LogNorm
        except ImportError as error:
            raise ImportError("StatsPlot requires matplotlib: pip install matplotlib") from error
        rows = self.rows
        if not self.steps:
            raise ValueError("nothing to draw: call add(optimizer.stats) after a measured step")
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
        """Draw into a file.

        Args:
            path: the file; its suffix chooses the format.

        Raises:
            ImportError: without matplotlib.
            ValueError: before a step was added, or for a format that matplotlib does not have.

        Example:
            >>> import pathlib, tempfile, torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats())
            >>> plot = tilestep.StatsPlot("grad_norm")
            >>> weight.grad = torch.ones(4)
            >>> optimizer.step()
            >>> plot.add(optimizer.stats)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     plot.save(f"{folder}/stats.png")
            ...     pathlib.Path(folder, "stats.png").exists()
            True
        """
        axes = self.draw()
        axes.figure.savefig(path, dpi=120)
        import matplotlib.pyplot as plt

        plt.close(axes.figure)
