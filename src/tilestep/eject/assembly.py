"""One file of everything: the template with a rule's kernels, formulas, kinds and class in their places."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from .._version import __version__
from ..backends.triton.run import tile_options
from ..backends.tuning import default_shape
from ..graph import trace
from ..optimizer.groups import check_group
from ..optimizer.masters import MasterWeights, check_choice, master_kind
from ..optimizer.states import SHORTEST, SMALLEST, starts_of
from ..rules import Interval, Rule
from ..storage import codec_of, dtype_name
from .formulas import codec_functions, condition, formula, helpers_of
from .kernels import NORM, constant_lines, flat, functions_of, helpers_for, merged, renamed
from .kinds import SIZES, Kind, kinds_of, unsupported
from .layout import formatted

_OF_TRITON = {"libdevice": "triton.language.extra", "cuda_capability_geq": "triton.language.target_info"}
"""What kernels take from Triton beside `triton.language`."""

_SCALAR_BLOCK = 128
_FINISH_BLOCK = 1024

_LIMIT = 'math.inf if group["max_grad_norm"] is None else float(group["max_grad_norm"])'


class Code(str):
    """Code in place of a value."""

    def __repr__(self) -> str:
        return str(self)


class Request:
    """What a file is asked for: a rule, hyperparameters, and the options of the command."""

    def __init__(
        self,
        rule: Rule,
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        clip: bool = False,
        master_weights: MasterWeights = False,
        state_dtype: str | None = None,
    ) -> None:
        self.rule, self.clip, self.settings = rule, clip, dict(hyperparameters or {})
        self.masters, self.state_dtype = master_weights, state_dtype
        self.values = {**rule.hyperparameters, **self.settings}
        check_choice(master_weights)
        rule.check(self.values)
        self.group = {**self.values, "master_weights": master_weights, "state_dtype": state_dtype}
        check_group(rule, self.group)
        kept = (torch.float32, torch.bfloat16)
        masters = [dtype for dtype in kept if master_kind(dtype, self.group) is not None]
        # Formats beside bfloat16 refuse other parameters.
        self.dtypes = tuple(masters) if isinstance(master_weights, str) else kept
        self.kinds = kinds_of(rule, self.group, self.dtypes)
        self._name_kinds()

    @property
    def command(self) -> str:
        """The command that makes the file."""
        words = [f"tilestep eject {self.rule.name}"]
        words += ["--clip"] if self.clip else []
        words += [f"--masters {str(self.masters).lower()}"] if self.masters else []
        words += [f"--state-dtype {self.state_dtype}"] if self.state_dtype else []
        words += [f"--set {quote(f'{name}={_word(value)}')}" for name, value in self.settings.items()]
        return " ".join(words)

    def _name_kinds(self) -> None:
        for kind in self.kinds:
            alike = [other for other in self.kinds if other.dtype is kind.dtype]
            name = dtype_name(kind.dtype)
            if len({frozenset(other.dims) for other in alike}) > 1 and any(o.graph.reads_shape for o in alike):
                name += f"_{min(kind.dims)}d"
            same = [other for other in alike if other.dims & kind.dims]
            if len(same) > 1:
                name += f"_{next(size for size in SIZES if size in kind.sizes)}"
            kind.name = name

    @property
    def is_plain(self) -> bool:
        """Whether each buffer is one tensor like the parameter, of its numbers as they are."""
        return all(
            codec_of(storage).is_plain
            and [(name, 1)] == [(array.name, array.elements) for array in storage.arrays(name)]
            for kind in self.kinds
            for name, storage in kind.storages.items()
        )

    @property
    def kinds_depend_on(self) -> tuple[bool, bool]:
        """Whether dimensions, and sizes, make a difference."""
        names = [kind.name for kind in self.kinds]
        return any(re.search(r"_\dd", name) for name in names), any(name.endswith(SIZES) for name in names)


def _word(value: Any) -> str:
    text = str(value).replace(" ", "")
    return text.lower() if isinstance(value, bool) or value is None else text


def ejected(request: Request) -> str:
    """The text of the file."""
    rule, kinds = request.rule, request.kinds
    has_blocks = any(kind.spec.has_blocks for kind in kinds)
    functions = merged(kinds, clip=request.clip)
    parameters = {name for lines in functions for name in re.findall(r"\w+", lines[1])}
    if request.clip:
        norm = NORM if has_blocks else NORM.replace("norm_numel", "numel")  # beside blocks, numel counts them whole
        functions = [*(lines for _, lines in functions_of(norm)), *functions]
    helpers, constants = helpers_for(functions)
    kernels = flat(helpers + functions)
    (by_dims, by_size), has_sums = request.kinds_depend_on, bool(parameters & {"sums", "partials"})
    imported = {name: module for name, module in _OF_TRITON.items() if name in kernels}
    formulas = _formulas(request)
    is_shaped = any(re.search(r"\b(shape|machine_epsilon)\b", lines[0]) for lines in formulas)
    numbers = list(_numbers(request))
    keys = [key for _, _, key, _ in numbers]
    made_for = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request.values.items()
        if name not in keys
    }
    returned = {key: Code(f"float({text})") for _, _, key, text in numbers}
    returned["max_grad_norm"] = Code(_LIMIT if request.clip else "math.inf")
    texts = {
        "header": _header(request),
        "globals": _globals(request, imported, constants),
        "imports": "\n".join(
            [
                f"    global {', '.join(['tl', *imported])}",
                "    import triton",
                "    import triton.language as tl",
                *(f"    from {module} import {name}" for name, module in imported.items()),
            ]
        ),
        "kernels": kernels,
        "formulas": flat(formulas),
        "kinds": _kinds(request, parameters),
        "ranges": "\n".join(_ranges(request)),
        "guards": "\n".join(_guards(request)),
        "numbers": "\n".join(formatted([f"    return {_literal(returned)}"])),
        "made_for": "\n".join(formatted([f"    made_for: dict[str, Any] = {_literal(made_for)}"])),
        "signature": _signature(request),
        "evaluation": "" if rule.evaluation is None else flat([_average(request)]),
    }
    flags = {
        "blocks": has_blocks,
        "fixed": bool(made_for),
        "scalars": any(kind.graph.scalar_states for kind in kinds),
        "shaped": is_shaped,
        "across": any(kind.spec.global_count for kind in kinds),
        "whole": any(kind.spec.reduction_count for kind in kinds),
        "clip": request.clip,
        "constexpr": "@constexpr_function" in kernels,
        "constants": bool(constants),
        "versions": isinstance(request.masters, str),
        "formats": not request.is_plain,
        "sizes": "sizes" in parameters,
        "plain": request.is_plain and not has_sums and not is_shaped,  # sums and sizes of empty tensors may raise
        "sums": has_sums,
        "averages": rule.evaluation is not None,
        "dims": by_dims,
        "classes": by_size,
    }
    text = _filled("template.py", texts, flags, request)
    return text if request.clip else re.sub(", norm_tile: int, shares: Any|(?<=device), tile, shares", "", text)


def _filled(name: str, texts: Mapping[str, str], flags: Mapping[str, bool], request: Request) -> str:
    """A template with the texts and the regions that these flags keep."""
    template = Path(__file__).with_name(name).read_text()
    lines: list[str] = []
    kept: list[bool] = []
    for line in template[template.index("# {header\n") :].splitlines():
        mark = re.fullmatch(r"\s*# (?:\{(\w+)|\w+\})", line)
        if mark is None:
            lines += [line] if all(kept) else []
        elif mark[1] is None:
            kept.pop()
        elif mark[1] in texts:
            lines += texts[mark[1]].splitlines() if all(kept) else []
            kept.append(False)
        else:
            kept.append(flags[mark[1].removeprefix("not_")] is not mark[1].startswith("not_"))
    text = re.sub(r"\n{3,}(?=    )", "\n\n", "\n".join(lines)).rstrip() + "\n"
    text = re.sub(r"  # type: ignore\[[\w-]+\]", "", text).replace("tilestep eject Ejected", request.command)
    return text.replace("Ejected", request.rule.name)


def _header(request: Request) -> str:
    rule = request.rule
    about = (inspect.cleandoc(rule.__doc__ or rule.name)).splitlines()[0].rstrip(".")
    kept = " and ".join(dtype_name(dtype) for dtype in request.dtypes)
    return f'''# Made by tilestep {__version__}:
#     {request.command}
# Regenerate it instead of editing it. It needs torch, and Triton for parameters on a GPU, but not tilestep.
{textwrap.fill(f'"""{rule.name}: {about}.', 120)}

On a GPU a few launches update all {kept} parameters; on a CPU plain PyTorch does.
From top to bottom: the rule's formulas on torch tensors; Triton functions; the kinds of parameters that have kernels;
the tables that kernels read; the optimizer.
"""

'''


def _globals(request: Request, imported: Iterable[str], constants: Mapping[str, Any]) -> str:
    lines = [f"{name}: Any = None" for name in imported]
    for name, value in constants.items():
        lines += constant_lines(name, value)
    lines += formatted([f"CONSTANTS = {_literal(tuple(constants))}"]) if constants else []
    combined = [_stages(kind)[1] for kind in request.kinds]
    calls = [  # of the rule, in the order in which a kind needs their results
        [value.attribute for scalar in kind.spec.program.scalars for _, value in scalar.global_reductions]
        for kind in request.kinds
    ]
    if any(ways != combined[0] for ways in combined) or any(order != calls[0] for order in calls):
        raise unsupported(request.rule, "reduces over all tensors in stages that depend on shapes")
    if combined[0]:
        lines.append(f"COMBINED = {_literal(tuple(combined[0]))}  # reductions after each stage")
    if isinstance(request.masters, str):
        masters = [master_kind(kind.dtype, request.group) for kind in request.kinds]
        keys = sorted({master.key for master in masters if master is not None and not master.begins_as_parameter})
        following = ", ".join(map(_literal, keys))
        lines.append(f"FOLLOWING = {{{following}}}  # states that writes by other code reset")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    """A value as code, in double quotes."""
    return re.sub(r"(?<!math\.)\binf\b", "math.inf", repr(value).replace("'", '"'))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(request: Request) -> Iterator[tuple[str, int, str, str]]:
    """The hyperparameters that are numbers: a name, a place in it, the name that kernels have, and the code for it."""
    for name, value in request.values.items():
        several = isinstance(value, (tuple, list))
        for place, entry in enumerate(value if several else [value]):
            if _is_number(entry):
                yield name, place, f"{name}_{place}" if several else name, f'group["{name}"]' + f"[{place}]" * several


def _formulas(request: Request) -> list[list[str]]:
    """The formulas of all kinds and of their formats, each once; a kind gets the name of its own."""
    seen: dict[tuple[str, ...], str] = {}
    about = "The rule on float32 numbers; hyperparameters and sums are in float64."
    for kind in request.kinds:
        lines = tuple(formula("FORMULA", kind.graph, request.rule.state_names, request.values, about))
        kind.formula = seen.setdefault(lines, f"{kind.spec.name}_{min(kind.dims)}d" if seen else kind.spec.name)
    formats = {storage.title: codec_of(storage) for kind in request.kinds for storage in kind.storages.values()}
    conversions = [
        lines for title, codec in formats.items() if not codec.is_plain for lines in codec_functions(title, codec)
    ]
    helpers = [
        text.strip().splitlines() for text in helpers_of(line for lines in conversions for line in lines).values()
    ]
    return [*helpers, *conversions, *(renamed(lines, {"FORMULA": name}) for lines, name in seen.items())]


def _average(request: Request) -> list[str]:
    """The weights to evaluate as a function of torch tensors."""
    rule, kind = request.rule, request.kinds[0]

    def weights(*buffers: Any, **values: Any) -> tuple[Any, ...]:
        return rule.evaluated(buffers[0], dict(zip(rule.state_names, buffers[2:])), values), *buffers[2:]

    vars(weights)["__signature__"] = inspect.signature(rule.function)
    graph = trace(Rule(weights, states=rule.states), request.values, max(kind.dims))
    about = "The weights to evaluate and save, computed from the training weights."
    return formula("weights_to_evaluate", graph, rule.state_names, request.values, about)


def _kinds(request: Request, parameters: set[str]) -> str:
    """The kinds, and what says which kind a parameter is of."""
    by_dims, by_size = request.kinds_depend_on
    alike: dict[str, list[Kind]] = {}
    for kind in request.kinds:
        alike.setdefault(_kind(request, kind, parameters), []).append(kind)
    key = ", ".join(["dtype", *["dim"] * by_dims, *["size"] * by_size])
    each = " for dim in dims" * by_dims + " for size in sizes" * by_size
    lines = ["KINDS: dict[Any, Kind] = {}"]
    for text, kinds in alike.items():
        rows = [
            (Code(kind.dtype), *[sorted(kind.dims)] * by_dims, *[sorted(kind.sizes)] * by_size, *_maths(kind))
            for kind in kinds
        ]
        names = ["dtype", *["dims"] * by_dims, *["sizes"] * by_size, *["*maths"] * bool(_maths(kinds[0]))]
        taken = _literal(tuple(row[0] if len(names) == 1 else row for row in rows))
        kept = f"    KINDS |= dict.fromkeys([({key}){each}], {text})" if each else f"    KINDS[dtype] = {text}"
        lines += formatted([f"for {', '.join(names)} in {taken}:", kept])
    if by_size:
        about = "the fewest elements of a parameter, and of a row, for a format in blocks"
        lines.append(f"SMALLEST, SHORTEST = {SMALLEST}, {SHORTEST}  # {about}")
    return "\n".join(lines)


def _maths(kind: Kind) -> list[str]:
    """The formulas that its passes take."""
    return [name for base, name in kind.functions.items() if base.startswith("math_") and kind.is_general]


def _kind(request: Request, kind: Kind, parameters: set[str]) -> str:
    """The text of a kind, with `dtype` for its dtype and `maths` for the functions of its formulas."""
    spec, (stages, _) = kind.spec, _stages(kind)
    starts = starts_of(request.rule, kind.graph.states, kind.dtype, request.group)
    master = master_kind(kind.dtype, request.group)
    buffers = []
    for name, storage in kind.storages.items():
        if name == "grad":
            continue
        begins: float | str = starts[name].init if name in starts else 0.0
        if name == "param" and (master is None or master.begins_as_parameter):
            begins = "param"
        arrays = [
            (array.name, Code("dtype" if array.dtype is kind.dtype else array.dtype), array.elements)
            for array in storage.arrays(name)
        ]
        words = [name, begins, arrays[0][1] if request.is_plain else tuple(arrays)]
        if not codec_of(storage).is_plain:
            words += [Code(f"load_{storage.title}"), Code(f"store_{storage.title}")]
        buffers.append(Code(f"{'' if request.is_plain else 'Buffer'}{_literal(tuple(words))}"))
    scalars = [(name, starts[name].init, Code(str(spec.scalar_dtype(name)))) for name in kind.graph.scalar_states]
    fields: dict[str, Any] = {
        "formula": Code(kind.formula),
        "buffers": tuple(buffers),
        **({"scalars": (("step", 0.0, Code("torch.float32")), *scalars)} if scalars else {}),
        "hypers": tuple(name.replace(".", "_") for name in spec.hypers),
        **({"sizes": spec.sizes} if spec.sizes and "sizes" in parameters else {}),
        "columns": spec.columns,
        **({"reductions": spec.reduction_count} if spec.reduction_count > 1 else {}),
        **({"across": spec.global_count} if spec.global_count else {}),
        "span": default_shape(spec, "cuda").span,
        **({"stages": tuple(stages)} if spec.global_count else {"launches": stages[0]}),
    }
    return f"Kind({', '.join(f'{name}={_literal(value)}' for name, value in fields.items())})"


def _stages(kind: Kind) -> tuple[list[tuple[Any, ...]], list[dict[int, str]]]:
    """The launches of a step, up to each combination over all tensors and behind the last, and what is combined.

    A launch is of the scalar pass, of the pass over tiles, or of what adds up its sums.
    """
    spec, names, shape = kind.spec, kind.functions, default_shape(kind.spec, "cuda")
    constants, options = tile_options(spec, shape)
    launches: list[tuple[str, str, dict[str, Any]]] = []
    stages, combined, passes = list[tuple[Any, ...]](), list[dict[int, str]](), 0
    for index, (scalar, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        launches.append((names[f"scalar_pass_{index}"], "blocks", {"BLOCK": _SCALAR_BLOCK, "num_warps": 4}))
        if scalar.global_reductions:
            combined.append({slot: each.operation.removeprefix("global_") for slot, each in scalar.global_reductions})
            stages.append(tuple(launches))
            launches = []
        if tile is None:
            continue
        arguments: dict[str, Any] = {**constants}
        if kind.is_general:
            arguments["MATH"] = Code(f"maths[{passes}]")
        passes += 1
        arguments |= {"num_warps": shape.warps, **options}
        launches.append((names[f"tile_pass_{index}"], "tiles", arguments))
        if tile.reductions:
            sums = {"SPAN": shape.span, "BLOCK": _FINISH_BLOCK, "num_warps": 4}
            launches.append((names[f"finish_{index}"], "tensors", sums))
    return [*stages, tuple(launches)], combined


def _ranges(request: Request) -> list[str]:
    """The conditions on hyperparameters, by name."""
    valid: dict[str, str] = {}
    for name, place, _, text in _numbers(request):
        if name in request.rule.ranges:
            holds = _inside(request.rule.range_of(name, place), text)
            valid[name] = Code(f"{valid[name]} and {holds}" if name in valid else holds)
    if request.clip:
        valid["max_grad_norm"] = Code('group["max_grad_norm"] is None or group["max_grad_norm"] >= 0')
    return formatted([f"    valid: dict[str, bool] = {_literal(valid)}"])


def _guards(request: Request) -> list[str]:
    """What raises for hyperparameters that would need other formulas."""
    guards = [
        f"{text} is not None"
        for name, place, _, text in _numbers(request)
        if request.rule.range_of(name, place).or_none
    ]
    guards += [
        f'group["{name}"][{place}] {"is" if entry is None else "=="} {_literal(entry)}'
        for name, value in request.values.items()
        if isinstance(value, (tuple, list))
        for place, entry in enumerate(value)
        if not _is_number(entry)
    ]
    guards += [condition(*guard) for kind in request.kinds for guard in kind.graph.guards]
    lines = []
    for guard in dict.fromkeys(guards):
        words = re.sub(r'group\["(\w+)"\]', r"\1", guard)
        another = f"make another: tilestep eject {request.rule.name} --set NAME=VALUE"
        lines += [f"    if not ({guard}):", f"        raise ValueError('this file was made for {words}; {another}')"]
    return formatted(lines)


def _inside(interval: Interval, text: str) -> str:
    low, high = ("<" if is_open else "<=" for is_open in (interval.open_low, interval.open_high))
    if interval.high == float("inf"):
        return f"{text} {low.replace('<', '>')} {interval.low:g}"
    above = "" if interval.low == -float("inf") else f"{interval.low:g} {low} "
    return f"{above}{text} {high} {interval.high:g}"


def _signature(request: Request) -> str:
    rule, values = request.rule, {**request.values, **({"max_grad_norm": None} if request.clip else {})}
    first = [name for name in rule.hyperparameters if name not in rule.keyword_only]
    first += [name for name in rule.positional if name in rule.hyperparameters and name not in first]
    last = [name for name in values if name not in first]
    arguments = [f"{name}: Any = {_literal(values[name])}" for name in (*first, *last)]
    if last:
        arguments.insert(len(first), "*")
    about = inspect.cleandoc(rule.__doc__ or rule.name)
    if request.clip:
        about += "\n\n`max_grad_norm` clips gradients inside the step to this global 2-norm; they are not changed."
    about += "\n" if "\n" in about else ""
    return "\n".join(
        [
            textwrap.indent(f'"""{about}"""', "    "),
            "",
            *formatted([f"    def __init__({', '.join(['self', 'params: Any', *arguments])}) -> None:"]),
            *formatted([f"        defaults = dict({', '.join(f'{name}={name}' for name in (*first, *last))})"]),
            "        super().__init__(params, defaults)",
        ]
    )


def ejected_test(request: Request, module: str) -> str:
    """The text of a file that tests the ejected one, which is imported as `module`."""
    rule = request.rule
    of_torch = getattr(torch.optim, rule.name, None)
    limit = 'LIMIT: dict[str, Any] = {"max_grad_norm": 0.5}' if request.clip else "LIMIT: dict[str, Any] = {}"
    tolerance = 0.03 if request.state_dtype or request.masters else 4e-6
    header = f"""# Made by tilestep {__version__}:
#     {request.command} --test
# Run it with pytest beside {module}.py."""
    dtypes = ", ".join(sorted(map(str, request.dtypes)))
    texts = {"header": header, "limit": f"DTYPES = [{dtypes}]\n{limit}\nTOLERANCE = {tolerance}"}
    flags = {
        "across": any(kind.spec.global_count for kind in request.kinds),
        "clip": request.clip,
        "torch": of_torch is not None and not request.state_dtype,
    }
    text = _filled("template_for_tests.py", texts, flags, request)
    imports = sorted([f"import {module} as ejected", "import pytest", "import torch"])
    return text.replace("import pytest\nimport torch\n\nfrom . import template as ejected", "\n".join(imports))


__all__ = ["Request", "ejected", "ejected_test"]
