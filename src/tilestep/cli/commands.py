"""The commands, one function each, followed by the functions that print its results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .arguments import (
    RULE_HELP,
    Device,
    Dtype,
    Masters,
    MasterWeights,
    ParamDtype,
    Remainder,
    Rounding,
    RuleName,
    RuleOption,
    StateDtype,
    Words,
    chosen_device,
    elements_of,
    load_rule,
    matrices_of,
    mesh_of,
    parse_formats,
    parse_settings,
    require_output,
    torch_dtype,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..planning import Constants, Job, Plan
    from ..planning.describe import RuleDescription
    from ..tracing import Report

app = typer.Typer(
    name="tilestep",
    help="Optimizer steps at memory bandwidth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@functools.cache
def _console() -> Console:
    from rich.console import Console

    return Console()


def _say(text: str, style: str = "", end: str = "\n") -> None:
    from rich.text import Text

    _console().print(Text(text, style), end=end, soft_wrap=True)


def _say_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from ..tracing.shown import table

    _console().print(table(title, list(columns), [list(row) for row in rows]))


@app.command()
def bench(
    section: Annotated[Literal["norm", "step", "cpu", "all"], typer.Argument(help="What to measure.")] = "all",
    out: Annotated[Path, typer.Option(help="Folder for <section>.json and <section>.png.")] = Path("bench"),
    device: Device = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each contender.")] = 15,
    compiled: Annotated[bool, typer.Option(help="Include contenders that compile for minutes.")] = False,
    quick: Annotated[bool, typer.Option(help="Tiny workloads, to test the benchmark itself.")] = False,
) -> None:
    """Benchmark norms and optimizer steps of tilestep and other libraries, in interleaved rounds.

    First steps, all rules and whole training iterations are measured by `benchmarks/bench.py` of a checkout.
    """
    from ..bench.results import plot, print_result
    from ..bench.sections import Settings, run_cpu, run_norm, run_step
    from ..native import wait

    require_output(out)
    say, chosen = partial(_say, style="dim"), chosen_device(device)
    if not quick and wait():
        say("the native extension is built: steps are measured as in a training after its first minute")
    settings = Settings(chosen, quick=quick, compiled=compiled, rounds=rounds, say=say)
    runs = {"norm": run_norm, "step": run_step, "cpu": run_cpu}
    for name in runs if section == "all" else [section]:
        result = runs[name](settings)
        stored = result.save(out)
        plot(result, stored.with_suffix(".png"))
        print_result(result, _console())
        _say(f"written: {stored} and {stored.with_suffix('.png')}")


@app.command()
def check(
    rule: RuleName,
    settings: Words = None,
    interpret: Annotated[
        bool, typer.Option(help="Without a GPU, run the Triton code in Triton's interpreter, which is slow.")
    ] = True,
) -> None:
    """Test a rule: is it translated, and do its kernels agree with its own code in float64?

    Exit code 0 if nothing failed, 1 if something did.
    """
    from ..checking import check_rule

    loaded = load_rule(rule)
    marks = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("-   ", "yellow")}
    seen: list[bool | None] = []
    _say(f"{loaded.name}   ({loaded.where})")
    with _console().status("checking"):
        for verdict in check_rule(loaded, parse_settings(settings, loaded), interpret=interpret):
            seen.append(verdict.passed)
            _say(*marks[verdict.passed], end=" ")
            _say(f"{verdict.item}: {verdict.text}")
    if failed := seen.count(False):
        _say(f"{failed} of the checks failed: do not use {loaded.name} like this.", "bold red")
        raise typer.Exit(1)
    rest = f"; {seen.count(None)} could not be checked here" if None in seen else ""
    _say(f"{loaded.name} does what its code says{rest}.", "bold green")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each training.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the batches.")] = 0,
    device: Device = "",
    state_dtype: Annotated[str, typer.Option(help="Format of tilestep's states: int8, bfloat16, ...")] = "",
    master_weights: Annotated[
        str, typer.Option(help="Train in bfloat16 with these masters: true, remainder, kahan or int8.")
    ] = "",
    rounding: Annotated[str, typer.Option(help="nearest; or stochastic, for tilestep's bfloat16 model.")] = "nearest",
) -> None:
    """Train a byte-level GPT on Python's documentation twice from one seed, and compare losses and step times."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..bench.demo import GPT, Recipe, comparison, entries, picture, train
    from ..bench.results import device_name
    from ..devices import has_streams

    require_output(out)
    formats = parse_formats(state_dtype, master_weights, rounding, masters_option="--master-weights")
    recipe = Recipe(chosen_device(device), steps=steps, seed=seed, **formats)
    parameters, competing = list(GPT(recipe.size).parameters()), entries(recipe)
    count = f"{sum(p.numel() for p in parameters) / 1e6:.1f} M parameters in {len(parameters)} tensors"
    _say(f"a GPT over bytes, {count}, on {device_name(recipe.device)}")
    if not _console().is_terminal:
        _say(f"{len(competing)} alternating trainings of {steps} steps: minutes on a CPU")
    columns = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=_console()) as progress:
        tasks = [progress.add_task(entry.name, total=steps, loss="") for entry in competing]

        def advance(index: int, done: int, loss: float) -> None:
            progress.update(tasks[index], completed=done, loss=f"loss {loss:.3f}")

        runs = train(competing, recipe, advance)
    _console().print(comparison(runs, gpu=has_streams(recipe.device)))
    path = out / "demo.png"
    picture(runs, path, f"{count}, {steps} steps, {device_name(recipe.device)}, torch {torch.__version__}")
    _say(f"picture: {path}")


@app.command()
def eject(
    rule: RuleName,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; without it the text is printed.")
    ] = None,
    clip: Annotated[bool, typer.Option("--clip", help="With max_grad_norm.")] = False,
    masters: Masters = "",
    state_dtype: StateDtype = "",
    test: Annotated[
        bool, typer.Option("--test", help="With -o x.py, write test_x.py too; alone, print the test.")
    ] = False,
    settings: Words = None,
) -> None:
    """Write a rule as one readable file that needs torch and Triton alone, to be copied into a project.

    It has one optimizer, named as the rule, with the same arguments, state and steps as tilestep's.
    """
    from ..eject import Request, ejected, ejected_test

    loaded = load_rule(rule)
    formats = parse_formats(state_dtype, masters)
    del formats["rounding"]
    request = Request(loaded, parse_settings(settings, loaded), clip=clip, **formats)
    if output is None:
        print(ejected_test(request, loaded.name.lower()) if test else ejected(request), end="")
        return
    if not (output.suffix == ".py" and output.stem.isidentifier()):
        raise typer.BadParameter(
            f"{output} is not the name of a Python module; use one such as {loaded.name.lower()}.py"
        )
    files = {output: ejected(request)}
    if test:
        files[output.with_name(f"test_{output.name}")] = ejected_test(request, output.stem)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")


@app.command()
def plan(
    size: Annotated[str, typer.Argument(help="Elements of all parameters: 1.2B, 350M, 7e9.")],
    rule: RuleOption = "AdamW",
    mesh: Annotated[str, typer.Option(help="Ranks that shard the state, x replicas: 8, 8x4.")] = "8",
    dtype: ParamDtype = "bf16",
    master_weights: MasterWeights = True,
    remainder: Remainder = False,
    masters: Masters = "",
    state_dtype: StateDtype = "",
    rounding: Rounding = "nearest",
    grad_dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of gradient reduction: grad_sync_dtype of shard().")
    ] = None,
    grad_buffer: Annotated[
        Literal["contiguous", "bucket"], typer.Option(help="grad_buffer of shard().")
    ] = "contiguous",
    bucket_mb: Annotated[float, typer.Option(min=0, help="MiB of a bucket; 0 for the default of shard().")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and iteration.")] = 8192,
    clip: Annotated[bool, typer.Option(help="With max_grad_norm.")] = True,
    model: Annotated[
        Literal["eager", "blocks", "whole"],
        typer.Option(help="Eager, blocks compiled one by one, or compiled as a whole."),
    ] = "eager",
    captured: Annotated[bool, typer.Option(help="Iterations are replayed from a CUDA graph.")] = False,
    tensors: Annotated[int, typer.Option(min=0, help="Number of tensors; 0 if unknown.")] = 0,
    matrices: Annotated[
        str, typer.Option(help="Muon's matrices: number x rows x columns, with commas, as 48x2048x2048,24x512x2048.")
    ] = "",
    layout: Annotated[
        Literal["shard", "fsdp2"], typer.Option(help="What splits the state; FSDP2 splits parameters too.")
    ] = "shard",
    in_backward: Annotated[bool, typer.Option(help="Update in backward and free gradients: mesh 1, no clip.")] = False,
    settings: Words = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs per node; 0 for the constants'.")] = 0,
    network: Annotated[float, typer.Option(min=0, help="GB/s between nodes per GPU; 0 for the constants'.")] = 0,
    constants: Annotated[
        Path | None, typer.Option(help="File with a machine's constants, written by benchmarks/shard_figures.py.")
    ] = None,
) -> None:
    """Estimate memory, traffic and time per rank of a sharded training, and compare meshes."""
    from dataclasses import replace

    from ..planning import Constants, Job, footprint
    from ..planning import plan as planned

    loaded = load_rule(rule, "--rule")
    needs = footprint(
        loaded,
        parse_settings(settings, loaded),
        dtype=torch_dtype(dtype),
        grad_sync_dtype=None if grad_dtype is None else torch_dtype(grad_dtype),
        **parse_formats(state_dtype, masters, rounding, master_weights, remainder),
    )
    split, copies = mesh_of(mesh)
    figures = Constants.load(*([] if constants is None else [constants]))
    given: dict[str, Any] = {"network_bandwidth": network * 1e9, "gpus_per_node": gpus_per_node}
    measured = {name: value for name, value in given.items() if value}
    figures = replace(
        figures, **measured, sources={**figures.sources, **dict.fromkeys(measured, "from the command line")}
    )
    job = Job(
        elements_of(size), needs, split, copies, tokens, grad_buffer == "contiguous", clip,
        bucket=bucket_mb * 2**20 or None, regime=model, captured=captured, tensors=tensors or None,
        matrices=matrices_of(matrices), in_backward=in_backward, layout=layout,
    )  # fmt: skip
    chosen = planned(job, figures)
    _say(
        f"{job.elements / 1e9:g} B elements, {loaded.name}, {split} x {copies} ranks, "
        f"{len(job.buckets):,} buckets of {_bucket(job)} MiB",
        "bold",
    )
    _say_plan(chosen)
    if job.ranks > 1:
        _say_meshes(job, figures)
    claim = "; ".join(chosen.unclaimed)
    claimed = f"not claimed to 5%: {claim}" if claim else "claimed to 5%, see docs/scaling.md"
    _say(f"an iteration of {chosen.iteration * 1e3:,.2f} ms: {claimed}")
    for note in needs.notes:
        _say(f"not included: {note}", "dim")
    if figures.assumed:
        listed = ", ".join(f"{name} {getattr(figures, name):g}" for name in figures.assumed)
        _say(f"assumed, not measured: {listed}", "dim")


def _bucket(job: Job) -> str:
    """MiB of a bucket, from the smallest to the largest."""
    if job.bucket is not None:
        return f"{job.bucket / 2**20:g}"
    sizes = job.buckets
    return " to ".join(dict.fromkeys(f"{size / 2**20:.3g}" for size in (min(sizes), max(sizes))))


def _say_plan(plan: Plan) -> None:
    kept = {**plan.memory, "in all, without activations": plan.total_memory}
    kept["the state if it were not split"] = plan.whole_state
    _say_table("memory of a rank", ["", "GB"], [(name, f"{value / 1e9:,.2f}") for name, value in kept.items()])
    rows = [(name, f"{value / 1e9:,.2f}") for name, value in plan.sent.items() if value]
    _say_table("sent in an iteration", ["", "GB"], [*rows, ("collectives", f"{plan.messages:,}")])
    times: dict[str, tuple[float | None, float | None]]
    times = {name: (plan.times[name], exposed) for name, exposed in plan.exposed.items()}
    times |= {} if plan.host is None else {"host": (plan.host, None)}
    times["an iteration"] = None, plan.iteration
    cells = [(name, *("" if s is None else f"{s * 1e3:,.2f}" for s in both)) for name, both in times.items()]
    cells += [("beyond forward and backward", "", f"{plan.iteration / plan.compute - 1:.1%}")]
    _say_table("time of a rank", ["", "ms", "ms exposed"], cells)


def _say_meshes(job: Job, constants: Constants) -> None:
    from ..planning import meshes

    rows = [
        (
            f"{plan.job.shard} x {plan.job.replicate}{' *' * (plan.job.shard == job.shard)}",
            _bucket(plan.job),
            f"{plan.total_memory / 1e9:,.2f}{' too much' * (plan.total_memory >= constants.gpu_memory)}",
            f"{plan.iteration * 1e3:,.2f}",
            f"{plan.latency_share:.0%}",
        )
        for plan in meshes(job, constants)
    ]
    columns = ["mesh", "bucket MiB", "memory GB", "iteration ms", "latency"]
    _say_table(f"meshes of {job.ranks:,} ranks, split x copies", columns, rows)


@app.command()
def show(
    rule: RuleName,
    backend: Annotated[Literal["triton", "cpp"], typer.Option(help="triton for GPUs, cpp for CPUs.")] = "triton",
    dtype: ParamDtype = "fp32",
    master_weights: MasterWeights = False,
    remainder: Remainder = False,
    masters: Masters = "",
    state_dtype: StateDtype = "",
    rounding: Rounding = "nearest",
    settings: Words = None,
    dims: Annotated[int, typer.Option(min=0, max=8, help="Dimensions of the parameters.")] = 2,
    stats: Annotated[bool, typer.Option(help="Show the kernels of a step with statistics.")] = False,
    changes: Annotated[bool, typer.Option(help="Show the kernels with track_changes=True.")] = False,
    code_only: Annotated[bool, typer.Option(help="Print only the generated code.")] = False,
) -> None:
    """Print a rule's equations, passes, traffic, launches and generated code."""
    from rich.syntax import Syntax

    from ..planning.describe import describe

    loaded = load_rule(rule)
    description = describe(
        loaded,
        parse_settings(settings, loaded),
        backend=backend,
        dtype=torch_dtype(dtype),
        dims=dims,
        stats=stats,
        changes=changes,
        **parse_formats(state_dtype, masters, rounding, master_weights, remainder),
    )
    if not code_only:
        for title, lines in _described(description):
            _say(title, "bold")
            _say("\n".join((*lines, "")))
    if not _console().is_terminal:
        print(description.source, end="")
        return
    language = "python" if backend == "triton" else "cpp"
    _console().print(Syntax(description.source, language, background_color="default", word_wrap=False))


def _described(description: RuleDescription) -> Iterator[tuple[str, Iterable[str]]]:
    """Titles and lines on a rule's equations, states, passes and launches."""
    rule = description.rule
    yield f"{rule.name}, {description.backend} backend   ({rule.where})", ("", description.equations)
    states = [f"  {name:<18} {kept}" for name, kept in description.states.items()]
    if description.specialized:
        states += ["", f"This code holds while {'; '.join(description.specialized)}"]
    yield "State of each parameter", states
    passes = []
    for number, entry in enumerate(description.passes, start=1):
        passes.append(f"  {number:>2}  {entry.kind:<7} {entry.what}")
        if (traffic := entry.traffic) is not None:
            for verb, count, arrays, small in (
                ("reads", traffic.bytes_read, traffic.reads, traffic.small_reads),
                ("writes", traffic.bytes_written, traffic.writes, traffic.small_writes),
            ):
                words = [f"{array.name} {array.dtype.itemsize}" for array in arrays]
                words += [f"{array.name} (by slice)" for array in small]
                passes.append(f"      {verb:<6} {count:>3} B  {', '.join(words) or 'nothing'}")
    passes.append(f"  in all: {description.bytes_read} B read, {description.bytes_written} B written")
    yield "Passes, with bytes for each element of a parameter", passes
    if description.outputs:
        yield "Left besides the update", [f"  {words}" for words in description.outputs]
    launches = [f"  {number:>2}  {name}" for number, name in enumerate(description.launches, start=1)]
    norm = "  before them, only for a clip, a scaler or a skip: one norm pass over the gradients"
    yield "Launches of a step, for any number of tensors", [*launches, norm]


# Arguments after the script's name belong to the script.
@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    script: Annotated[
        Path | None, typer.Argument(help="Script to trace; it uses tilestep.profile.", metavar="SCRIPT")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", metavar="ARGUMENT")] = None,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and trace.png.")] = Path("trace"),
    device: Device = "",
    iterations: Annotated[int, typer.Option(min=1, help="Traced iterations of the demo's model.")] = 5,
    optimizer: Annotated[str, typer.Option(help=f"{RULE_HELP} Or torch, for torch's fused AdamW.")] = "AdamW",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the demo's model.")] = 4,
    width: Annotated[int, typer.Option(min=4, help="Width of the demo's model; heads have 64.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Bytes per sequence.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per iteration.")] = 16,
    bf16: Annotated[bool, typer.Option(help="Parameters in bfloat16.")] = False,
    clip: Annotated[float, typer.Option(min=0, help="Clip gradients to this norm; 0 for no clip.")] = 1.0,
    during: Annotated[
        Literal["neither", "backward", "forward"], typer.Option(help="When updates run: see tilestep.overlap.")
    ] = "neither",
) -> None:
    """Trace a few training iterations: when forward, backward, update, copies and communication ran.

    Without a script it trains the demo's model. A script chooses what to trace, with `tilestep.profile`.
    """
    from ..bench.demo import Recipe, Size, train_traced

    require_output(out)
    if script is None:
        size = Size(layers, width, 1 if width % 64 else width // 64, context)
        recipe = Recipe(chosen_device(device), steps=iterations, batch=batch, max_grad_norm=clip, size=size)
        rule = None if optimizer.lower() == "torch" else load_rule(optimizer, "--optimizer")
        if rule is None and during != "neither":
            raise typer.BadParameter(
                "torch's optimizer updates in step(): leave this option out", param_hint="--during"
            )
        reports = [train_traced(recipe, out, rule, bf16, during)]
    else:
        reports = _script(script, arguments or [], out)
    for report in reports:
        _console().print(report.table())
        _say(report.summary())
    for path in dict.fromkeys(path for report in reports for path in report.files):
        _say(f"written: {path}")


def _script(script: Path, arguments: list[str], out: Path) -> list[Report]:
    import runpy

    from ..tracing import collecting

    if not script.is_file():
        raise typer.BadParameter(f"script {script} does not exist", param_hint="SCRIPT")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        with collecting(out) as reports:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    if not reports:
        raise ValueError(f"{script} has traced nothing: put `with tilestep.profile():` around a few iterations")
    return reports


@app.command()
def tune(
    rules: Annotated[list[str] | None, typer.Argument(help="Names, or module:function.", metavar="[RULE]...")] = None,
    device: Device = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each candidate.")] = 7,
    elements: Annotated[
        int, typer.Option(min=0, help="Elements of all parameters; 0 for a size that fits the device.")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; 0 for none.")] = 300,
    save: Annotated[bool, typer.Option(help="Store the result in the cache for later processes.")] = True,
) -> None:
    """Find the fastest tile shapes on this machine, for the given rules or for all registered rules.

    Rules with the same traffic share a result; matrix products are not tiled. Optimizers made later use the result.
    Each measurement is stored at once, so Ctrl-C keeps those that are done.
    """
    import contextlib
    import io

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from ..backends.tuning import device_key
    from ..bench.tune import jobs, tiled_rules
    from ..bench.tune import tune as measured

    chosen = chosen_device(device)
    with _console().status("looking for signatures"):
        listed = jobs([load_rule(name) for name in rules] if rules else tiled_rules(), chosen)
    _say(f"milliseconds of a step, {device_key(chosen)}")
    columns = [BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
    count, stopped = 0, ""
    # Triton prints the code of a compilation that Ctrl-C has interrupted, with a request to report it.
    progress = Progress(*columns, console=Console(file=sys.stdout), transient=True, redirect_stdout=False)
    with progress, contextlib.redirect_stdout(io.StringIO()):
        task = progress.add_task("", total=len(listed))

        def tick(job: Any, text: str) -> None:
            progress.update(task, description=f"{job.rule.name}, {job.kind}: {text}")

        try:
            for outcome in measured(listed, chosen, rounds, elements, save, seconds, tick):
                job, times, count = outcome.job, outcome.milliseconds, count + 1
                change = "no other is faster"
                if outcome.after != outcome.before:
                    change = f"after {outcome.after}: {times[outcome.after]:.3f}, {outcome.gain:.1%} less"
                shown = f"  before {outcome.before}: {times[outcome.before]:.3f}; {change} ({len(times)} shapes)"
                text = Text(f"{job.rule.name}, {job.kind} ({job.signature})\n{shown}")
                progress.console.print(text, soft_wrap=True)
                progress.update(task, advance=1)
        except KeyboardInterrupt:
            stopped = "stopped"
    if count < len(listed):
        _say(
            f"{stopped or f'{seconds:g} seconds are over'}: {count} of {len(listed)} signatures are "
            f"{'kept' if save else 'measured'}; pass --seconds, or names of rules, for the rest"
        )
    if stopped:
        raise typer.Exit(130)


@app.command()
def version() -> None:
    """Print versions, compilers and the device, and report problems of this machine."""
    from ..bench.results import environment
    from .machine import facts, problems

    for name, value in {**environment(), **facts()}.items():
        _say(f"{name:<12} {value}")
    wrong = problems()
    _say("what is wrong with this machine:" if wrong else "nothing is wrong with this machine")
    for sentence in wrong:
        _say(f"- {sentence}")
