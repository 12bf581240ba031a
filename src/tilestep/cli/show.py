"""`tilestep show`: what a rule becomes, from its equations to the generated code."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..describe import RuleDescription
    from ..storage import Array


class Backend(str, Enum):
    """What code is generated for."""

    triton = "triton"
    cpp = "cpp"


class Dtype(str, Enum):
    """Of parameters."""

    fp32 = "fp32"
    fp64 = "fp64"
    bf16 = "bf16"
    fp16 = "fp16"


_TORCH_NAMES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}

MasterWeights = Annotated[bool, typer.Option(help="With float32 masters and state.")]
Remainder = Annotated[bool, typer.Option(help="Keep masters as 16-bit remainders of bf16 parameters.")]
Masters = Annotated[str, typer.Option(help="Kind of masters: true, remainder, kahan or int8.")]
StateDtype = Annotated[str, typer.Option(help="What states are kept in: int8, bfloat16, ...")]
Rounding = Annotated[str, typer.Option(help="nearest or stochastic.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def show(
        rule: Annotated[str, typer.Argument(help="A rule's name in any case, or module:function.")],
        backend: Annotated[Backend, typer.Option(help="triton for GPUs, cpp for CPUs.")] = Backend.triton,
        dtype: Annotated[Dtype, typer.Option(help="Of the parameters.")] = Dtype.fp32,
        master_weights: MasterWeights = False,
        remainder: Remainder = False,
        masters: Masters = "",
        state_dtype: StateDtype = "",
        rounding: Rounding = "nearest",
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="A hyperparameter: amsgrad=true.", metavar="NAME=VALUE")
        ] = None,
        dims: Annotated[int, typer.Option(min=0, max=8, help="Dimensions of the parameters.")] = 2,
        stats: Annotated[bool, typer.Option(help="The kernels of a step that measures.")] = False,
        changes: Annotated[bool, typer.Option(help="With a bit for each changed weight.")] = False,
        code_only: Annotated[bool, typer.Option(help="Print the generated code and nothing else.")] = False,
    ) -> None:
        """Print a rule's equations, passes, traffic, launches and generated code."""
        import torch
        from rich.console import Console
        from rich.syntax import Syntax

        from ..backends.spec import Taps
        from ..describe import describe
        from ._rules import load_rule, parse_formats, parse_settings

        loaded = load_rule(rule)
        formats = parse_formats(state_dtype, masters, rounding)
        description = describe(
            loaded,
            parse_settings(settings or [], loaded),
            backend=backend.value,
            dtype=getattr(torch, _TORCH_NAMES[dtype.value]),
            master_weights=formats["master_weights"] or ("remainder" if remainder else master_weights),
            state_dtype=formats["state_dtype"],
            rounding=rounding,
            dims=dims,
            taps=Taps(stats, changes) if stats or changes else None,
        )
        console = Console()
        if not code_only:
            _print_description(console, description)
        if not console.is_terminal:
            print(description.source, end="")
            return
        language = "python" if backend is Backend.triton else "cpp"
        console.print(Syntax(description.source, language, background_color="default", word_wrap=False))


def _print_description(console: Console, description: RuleDescription) -> None:
    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    rule = description.rule
    line(f"{rule.name}, {description.backend} backend   ({rule.where})", "bold")
    line()
    line(description.equations)
    line()
    line("State of each parameter", "bold")
    for name, kept in description.states.items():
        line(f"  {name:<18} {kept}")
    if description.specialized:
        line()
        line("This code holds while " + "; ".join(description.specialized))
    line()
    line("Passes, with bytes for each element of a parameter", "bold")
    for number, entry in enumerate(description.passes, start=1):
        line(f"  {number:>2}  {entry.kind:<7} {entry.what}")
        if entry.traffic is not None:
            traffic = entry.traffic
            line(f"      reads  {traffic.bytes_read:>3} B  {_listed(traffic.reads, traffic.small_reads)}")
            line(f"      writes {traffic.bytes_written:>3} B  {_listed(traffic.writes, traffic.small_writes)}")
    line(f"  in all: {description.bytes_read} B read, {description.bytes_written} B written")
    line()
    if description.taps:
        line("Put out beside the update", "bold")
        for words in description.taps:
            line(f"  {words}")
        line()
    line("Called in a step, however many tensors there are", "bold")
    for number, name in enumerate(description.launches, start=1):
        line(f"  {number:>2}  {name}")
    line("  before them, only where a clip, a scaler or a skip asks for it: one norm pass over the gradients")
    line()


def _listed(arrays: Sequence[Array], small: Sequence[Array]) -> str:
    words = [f"{array.name} {array.dtype.itemsize}" for array in arrays]
    return ", ".join([*words, *(f"{array.name} (by slice)" for array in small)]) or "nothing"
