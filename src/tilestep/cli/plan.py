"""`tilestep plan`: memory and time of a sharded training before it is run."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .show import _TORCH_NAMES, Dtype, Masters, MasterWeights, Remainder, Rounding, StateDtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planning import Constants, Job, Plan


class Model(str, Enum):
    """How the model runs: eager, its blocks compiled one by one, or compiled as a whole."""

    eager = "eager"
    blocks = "blocks"
    whole = "whole"


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Buffer(str, Enum):
    """Memory for gradients, as `shard(grad_buffer=...)` takes it."""

    contiguous = "contiguous"
    bucket = "bucket"


def elements_of(text: str) -> float:
    """A number of elements."""
    match = re.fullmatch(r"([\d.,_]+)\s*([KMBGT]?)", text.strip().upper())
    try:
        assert match is not None
        return float(match[1].replace(",", "").replace("_", "")) * _UNITS[match[2]]
    except (AssertionError, ValueError):
        message = f"{text!r} is no number of elements, such as 1.2B or 350M"
        raise typer.BadParameter(message, param_hint="SIZE") from None


def mesh_of(text: str) -> tuple[int, int]:
    """Ranks that split the state, and copies: `8`, `8x4`."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    if match is None or 0 in (sizes := (int(match[1]), int(match[2] or 1))):
        raise typer.BadParameter(f"{text!r} is no mesh: ranks that split the state, x copies, such as 8 or 8x4")
    return sizes


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def plan(
        size: Annotated[str, typer.Argument(help="Elements of all parameters: 1.2B, 350M.")],
        rule: Annotated[str, typer.Option(help="A rule's name in any case, or module:function.")] = "AdamW",
        mesh: Annotated[str, typer.Option(help="Ranks that split the state, x copies: 8, 8x4.")] = "8",
        dtype: Annotated[Dtype, typer.Option(help="Of the parameters.")] = Dtype.bf16,
        master_weights: MasterWeights = True,
        remainder: Remainder = False,
        masters: Masters = "",
        state_dtype: StateDtype = "",
        rounding: Rounding = "nearest",
        grad_dtype: Annotated[Dtype | None, typer.Option(help="grad_sync_dtype of shard().")] = None,
        grad_buffer: Annotated[Buffer, typer.Option(help="grad_buffer of shard().")] = Buffer.contiguous,
        bucket_mb: Annotated[float, typer.Option(min=0, help="MiB of a bucket; 0 for those shard() makes.")] = 0,
        tokens: Annotated[int, typer.Option(min=1, help="Tokens of a rank in an iteration.")] = 8192,
        clip: Annotated[bool, typer.Option(help="With max_grad_norm.")] = True,
        model: Annotated[Model, typer.Option(help="Eager, blocks compiled one by one, or compiled as a whole.")] = (
            Model.eager
        ),
        captured: Annotated[bool, typer.Option(help="Iterations are replayed from a CUDA graph.")] = False,
        tensors: Annotated[int, typer.Option(min=0, help="How many tensors; 0 if that is not known.")] = 0,
        in_backward: Annotated[
            bool, typer.Option(help="Updates run in backward, and gradients go with them: mesh 1, no clip.")
        ] = False,
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="A hyperparameter: amsgrad=true.", metavar="NAME=VALUE")
        ] = None,
        gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a host; 0 for those of the constants.")] = 0,
        network: Annotated[float, typer.Option(min=0, help="GB/s between hosts for each GPU, as measured.")] = 0,
        constants: Annotated[
            Path | None, typer.Option(help="Constants of a machine, as benchmarks/shard_figures.py writes them.")
        ] = None,
    ) -> None:
        """Print what a rank of a sharded training needs: memory, traffic and time, and other meshes beside it."""
        import torch
        from rich.console import Console

        from ..planning import Constants, Job, default_constants, footprint, meshes
        from ..planning import plan as planned
        from ._rules import load_rule, parse_formats, parse_settings

        loaded = load_rule(rule)
        formats = parse_formats(state_dtype, masters, rounding)
        types = {choice: getattr(torch, _TORCH_NAMES[choice.value]) for choice in Dtype}
        needs = footprint(
            loaded,
            parse_settings(settings or [], loaded),
            dtype=types[dtype],
            master_weights=formats["master_weights"] or ("remainder" if remainder else master_weights),
            state_dtype=formats["state_dtype"],
            rounding=rounding,
            grad_sync_dtype=None if grad_dtype is None else types[grad_dtype],
        )
        split, copies = mesh_of(mesh)
        figures = default_constants() if constants is None else Constants.load(constants)
        whole = grad_buffer is Buffer.contiguous
        measured: dict[str, float] = {"network_bandwidth": network * 1e9} if network else {}
        measured |= {"gpus_per_node": gpus_per_node} if gpus_per_node else {}
        said = {name: "as the command line says" for name in measured}
        figures = replace(figures, **measured, sources={**figures.sources, **said})  # type: ignore[arg-type]
        runs: dict[str, Any] = {"regime": model.value, "captured": captured, "tensors": tensors or None}
        runs["in_backward"] = in_backward
        bucket = bucket_mb * 2**20 or None
        job = Job(elements_of(size), needs, split, copies, tokens, whole, clip, bucket=bucket, **runs)
        console = Console()
        chosen = planned(job, figures)
        console.print(
            f"{job.elements / 1e9:g} B elements, {loaded.name}, {split} x {copies} ranks, "
            f"{len(job.buckets):,} buckets of {_bucket(job)} MiB",
            style="bold",
        )
        _print_memory(console, chosen)
        _print_time(console, chosen)
        if job.ranks > 1:
            _print_meshes(console, list(meshes(job, figures)), job, figures)
        claim = "; ".join(chosen.unclaimed)
        claimed = f"not claimed to 5%: {claim}" if claim else "claimed to 5%, see docs/scaling.md"
        console.print(f"an iteration of {chosen.iteration * 1e3:,.2f} ms: {claimed}", markup=False, soft_wrap=True)
        for note in needs.notes:
            console.print(f"not in it: {note}", style="dim", markup=False)
        if figures.assumed:
            listed = ", ".join(f"{name} {getattr(figures, name):g}" for name in figures.assumed)
            console.print(f"assumed, not measured: {listed}", style="dim", markup=False)


def _bucket(job: Job) -> str:
    """MiB of a bucket, from the smallest to the largest."""
    if job.bucket is not None:
        return f"{job.bucket / 2**20:g}"
    sizes = job.buckets
    return " to ".join(dict.fromkeys(f"{size / 2**20:.3g}" for size in (min(sizes), max(sizes))))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _print_memory(console: Any, plan: Plan) -> None:
    rows = [(name, _gigabytes(value)) for name, value in plan.memory.items()]
    rows += [("in all, without activations", _gigabytes(plan.total_memory))]
    rows += [("the state if it were not split", _gigabytes(plan.whole_state))]
    _table(console, "memory of a rank", ["", "GB"], rows)
    rows = [(name, _gigabytes(value)) for name, value in plan.sent.items() if value]
    rows += [("collectives", f"{plan.messages:,}")]
    _table(console, "sent in an iteration", ["", "GB"], rows)


def _print_time(console: Any, plan: Plan) -> None:
    rows = [(name, _milliseconds(plan.times[name]), _milliseconds(value)) for name, value in plan.exposed.items()]
    if plan.host is not None:
        rows += [("host", _milliseconds(plan.host), "")]
    rows += [("an iteration", "", _milliseconds(plan.iteration))]
    rows += [("beyond forward and backward", "", f"{plan.iteration / plan.compute - 1:.1%}")]
    _table(console, "time of a rank", ["", "ms", "ms exposed"], rows)


def _print_meshes(console: Any, plans: Sequence[Plan], job: Job, constants: Constants) -> None:
    rows = []
    for candidate in plans:
        fits = candidate.total_memory < constants.gpu_memory
        mine = (candidate.job.shard, candidate.job.replicate) == (job.shard, job.replicate)
        rows.append(
            (
                f"{candidate.job.shard} x {candidate.job.replicate}{' *' if mine else ''}",
                _bucket(candidate.job),
                _gigabytes(candidate.total_memory) + ("" if fits else " too much"),
                _milliseconds(candidate.iteration),
                f"{candidate.latency_share:.0%}",
            )
        )
    title = f"meshes of {job.ranks:,} ranks, split x copies"
    _table(console, title, ["mesh", "bucket MiB", "memory GB", "iteration ms", "latency"], rows)


def _table(console: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
