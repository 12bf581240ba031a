"""One file of everything: the template with a rule's kernels, formulas, kinds and class in their places."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..backends.triton.run import tile_options
from ..backends.tuning import default_shape
from ..graph import trace
from ..kernels.spec import KernelSpec
from ..optimizer.groups import check_group
from ..optimizer.masters import MasterWeights, check_choice, master_kind
from ..optimizer.states import SHORTEST, SMALLEST, starts_of
from ..rules import Interval, Rule
from ..storage import Array, codec_of, dtype_name
from .formulas import codec_functions, condition, formula, helpers_of
from .kernels import NORM, Helpers, constant_lines, flat, functions_of, merged, renamed
from .kinds import SIZES, Kind, kinds_of
from .layout import formatted

_AS_MOSTLY = (("scalars", ()), ("reductions", 1), ("sizes", ()))
"""Fields of a kind, with their defaults."""

_FOR_MYPY = r"  # type: ignore\[[\w-]+\]"
_SCALAR_BLOCK = 128
_FINISH_BLOCK = 1024


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
        words += [f"--set {name}={_word(value)}" for name, value in self.settings.items()]
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
        """Whether each buffer is one tensor like the parameter, of its numbers as they are, and updated on its own."""
        return all(
            not kind.spec.global_count
            and codec_of(storage).is_plain
            and [(name, 1)] == [(array.name, array.elements) for array in storage.arrays(name)]
            for kind in self.kinds
            for name, storage in kind.storages.items()
        )

    @property
    def is_single(self) -> bool:
        """Whether a step is one stage: nothing is summed over tensors before elements are updated."""
        return all(len(kind.spec.program.tiles) == 1 and not kind.spec.global_count for kind in self.kinds)

    @property
    def matters(self) -> tuple[bool, bool]:
        """Whether dimensions, and sizes, make a difference."""
        names = [kind.name for kind in self.kinds]
        return any(re.search(r"_\dd", name) for name in names), any(name.endswith(SIZES) for name in names)


def _word(value: Any) -> str:
    text = str(value).replace(" ", "")
    return text.lower() if isinstance(value, bool) or value is None else text


def ejected(request: Request) -> str:
    """The text of the file."""
    rule, kinds = request.rule, request.kinds
    specs = {kind.name: kind.spec for kind in kinds}
    functions, names, general = merged(specs, clip=request.clip)
    if request.clip:
        functions = [*(lines for _, lines in functions_of(NORM)), *functions]
    parameters = _parameters(lines for lines in functions if "norm_" not in lines[1])
    helpers, constants = Helpers().of(functions)
    functions = helpers + functions
    text = flat(functions)
    formulas, called = _formulas(request)
    regions: dict[str, str | bool] = {
        "header": _header(request),
        "globals": _globals(text, constants),
        "settings": _settings(request),
        "constants": bool(constants),
        "kernels": text,
        "formulas": flat(formulas),
        "kinds": _kinds_text(request, names, called, general, parameters),
        "signature": _signature(request),
        "averages": rule.evaluation is not None and flat([_average(request)]),
    }
    has_codecs = any(not codec_of(storage).is_plain for kind in kinds for storage in kind.storages.values())
    has_blocks = any(kind.spec.has_blocks for kind in kinds)
    across = any(kind.spec.global_count for kind in kinds)
    whole = any(kind.spec.reduction_count for kind in kinds)
    follows = isinstance(request.masters, str)
    for name, wanted in {
        "codec": has_codecs,
        "blocks": has_blocks,
        "across": across,
        "whole": whole,
        "clip": request.clip,
        "libdevice": "libdevice" in text,
        "capability": "cuda_capability_geq" in text,
        "epsilon": any("machine_epsilon" in line for lines in formulas for line in lines),
        "constexpr": "@constexpr_function" in text,
        "versions": follows,
        "plain": request.is_plain,
        "formats": not request.is_plain,
        "rows": has_blocks,
        "free": not has_blocks,
        "sizes": "sizes" in parameters,
        "sums": bool(parameters & {"sums", "partials"}),
        "scalar": any(kind.graph.scalar_states for kind in kinds),
        "no": not any(kind.graph.scalar_states for kind in kinds),
        "averages": rule.evaluation is not None,
        "stages": not request.is_single,
        "single": request.is_single,
    }.items():
        regions[f"*{name}"] = wanted
    text = _filled(Path(__file__).with_name("template.py").read_text(), regions)
    return re.sub(_FOR_MYPY, "", text).replace("Ejected", rule.name)


def _filled(template: str, regions: Mapping[str, str | bool]) -> str:
    """The template with its regions replaced, kept or left out; a name with a star is the beginning of several."""
    groups = {name[1:]: value for name, value in regions.items() if name.startswith("*")}
    lines: list[str] = []
    inside: list[tuple[str, str | bool]] = []
    for line in template[template.index("# {header\n") :].splitlines():
        opens, closes = re.fullmatch(r"\s*# \{(\w+)", line), re.fullmatch(r"\s*# (\w+)\}", line)
        if opens:
            name = opens[1]
            wanted = regions.get(name, groups.get(name.partition("_")[0]))
            if wanted is None:
                raise KeyError(f"nothing says what becomes of the region {name}")
            inside.append((name, wanted))
            if isinstance(wanted, str):
                lines += wanted.splitlines()
        elif closes:
            name, _ = inside.pop()
            if name != closes[1]:
                raise KeyError(f"the region {name} ends as {closes[1]}")
        elif all(wanted is True for _, wanted in inside):
            lines.append(line)
    text = re.sub(r"\n{3,}(?=    )", "\n\n", "\n".join(lines)).rstrip() + "\n"
    return re.sub(r"\n+(?=    from triton)", "\n", text)


def _parameters(functions: Iterable[Sequence[str]]) -> set[str]:
    """The names of all parameters of kernels."""
    return {name for lines in functions for name in re.findall(r"\w+", lines[1])}


def _header(request: Request) -> str:
    rule = request.rule
    about = (inspect.cleandoc(rule.__doc__ or rule.name)).splitlines()[0].rstrip(".")
    kept = " and ".join(dtype_name(dtype) for dtype in request.dtypes)
    return f'''# Made by tilestep {__version__}:
#     {request.command}
# Make it anew instead of changing it. It needs torch, and Triton where parameters are on a GPU; not tilestep.
{textwrap.fill(f'"""{rule.name}: {about}.', 120)}

Parameters of {kept} are updated by a few launches, whatever their number; on CPUs by plain PyTorch.
From top to bottom: Triton functions; the rule's formulas on torch tensors; the kinds of parameters that there are
kernels for; the tables that kernels read; the optimizer.
"""

'''


def _globals(text: str, constants: Mapping[str, Any]) -> str:
    lines = [f"{name}: Any = None" for name in ("libdevice", "cuda_capability_geq") if name in text]
    for name, value in constants.items():
        lines += constant_lines(name, value)
    lines += formatted([f"CONSTANTS = {_literal(tuple(constants))}"]) if constants else []
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _settings(request: Request) -> str:
    words = ", ".join(f"{name}={_literal(value)}" for name, value in request.values.items())
    lines = formatted([f"VALUES: dict[str, Any] = dict({words})"])
    lines.append('"""Hyperparameters as this file was made for them; those that are numbers may have other values."""')
    lines.append("")
    if isinstance(request.masters, str):
        keys = sorted({key for kind in request.kinds for key in [_master_key(kind, request.group)] if key})
        lines.append(
            f"FOLLOWING = {{{', '.join(map(_quoted, keys))}}}  # what a write by other code to a parameter voids"
        )
    return "\n".join(lines)


def _master_key(kind: Kind, group: Mapping[str, Any]) -> str:
    master = master_kind(kind.dtype, group)
    return "" if master is None or master.begins_as_parameter else master.key


def _literal(value: Any) -> str:
    """A value as code, in double quotes."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "math.inf" if value > 0 else "-math.inf"
    return repr(value)


def _formulas(request: Request) -> tuple[list[list[str]], dict[str, str]]:
    """The formulas of all kinds and of their formats, each once; and the name of each kind's own."""
    rule, functions = request.rule, list[list[str]]()
    called: dict[str, str] = {}
    seen: dict[str, str] = {}
    about = "The rule, on numbers in float32; hyperparameters and sums are in float64."
    for kind in request.kinds:
        stem = kind.spec.name
        lines = formula("FORMULA", kind.graph, rule.state_names, request.values, about)
        text = "\n".join(lines)
        if text not in seen:
            seen[text] = stem if not seen else f"{stem}_{min(kind.dims)}d"
            functions.append(renamed(lines, {"FORMULA": seen[text]}))
        called[kind.name] = seen[text]
    codecs: dict[str, list[list[str]]] = {}
    for kind in request.kinds:
        for storage in kind.storages.values():
            codec = codec_of(storage)
            if not codec.is_plain:
                codecs.setdefault(storage.title, codec_functions(storage.title, codec))
    own = [lines for listed in codecs.values() for lines in listed]
    helpers = [text.strip().splitlines() for text in helpers_of(line for lines in own for line in lines).values()]
    return [*helpers, *own, *functions], called


def _average(request: Request) -> list[str]:
    """The weights to evaluate as a function of torch tensors."""
    rule, kind = request.rule, request.kinds[0]

    def weights(*buffers: Any, **values: Any) -> tuple[Any, ...]:
        return rule.evaluated(buffers[0], dict(zip(rule.state_names, buffers[2:])), values), *buffers[2:]

    vars(weights)["__signature__"] = inspect.signature(rule.function)
    graph = trace(Rule(weights, states=rule.states), request.values, max(kind.dims))
    about = "The weights to evaluate and save, from those that train."
    return formula("weights_to_evaluate", graph, rule.state_names, request.values, about)


def _kinds_text(
    request: Request,
    names: Mapping[str, Mapping[str, str]],
    called: Mapping[str, str],
    general: Mapping[str, bool],
    parameters: set[str],
) -> str:
    listed, by_shape = {}, any(request.matters)
    for kind in request.kinds:
        stages = tuple(_stages(kind.spec, names[kind.name], is_general=general[kind.name]))
        listed[kind.name] = _kind(request, kind, stages, called[kind.name], parameters)
    keys = {kind.name: kind.name if by_shape else Code(str(kind.dtype)) for kind in request.kinds}
    lines = _alike(request, listed, names, keys) or formatted([f"KINDS = {_literal(_rekeyed(listed, keys))}"])
    lines += ["", "", *formatted(_kind_of(request)), "", "", *formatted(_check(request)), "", ""]
    return "\n".join(lines) + "\n"


def _rekeyed(listed: Mapping[str, Code], keys: Mapping[str, str]) -> dict[str, Code]:
    return {keys[name]: text for name, text in listed.items()}


def _alike(
    request: Request, listed: Mapping[str, Code], names: Mapping[str, Mapping[str, str]], keys: Mapping[str, str]
) -> list[str]:
    """Kinds that differ by their dtype and their formulas alone, as calls of one function; empty for other kinds."""
    calls, texts = {}, set()
    for kind in request.kinds:
        text = str(listed[kind.name]).replace(str(kind.dtype), "dtype")
        maths = [name for base, name in names[kind.name].items() if base.startswith("math_")]
        for place, name in enumerate(maths):
            text = text.replace(f'"{name}"', f"maths[{place}]")
        texts.add(text)
        calls[kind.name] = Code(f"kind_of_dtype({', '.join([str(kind.dtype), *map(_quoted, maths)])})")
    if len(texts) > 1:
        return []
    head = ["def kind_of_dtype(dtype: torch.dtype, *maths: str) -> Kind:"]
    head.append('    """The kind of one dtype, with the formulas that are its own."""')
    return [
        *head,
        *formatted([f"    return {texts.pop()}"]),
        "",
        "",
        *formatted([f"KINDS = {_literal(_rekeyed(calls, keys))}"]),
    ]


def _kind(request: Request, kind: Kind, stages: tuple[Any, ...], called: str, parameters: set[str]) -> Code:
    spec, rule = kind.spec, request.rule
    starts = starts_of(rule, kind.graph.states, kind.dtype, request.group)
    buffers = []
    for name, storage in kind.storages.items():
        if name == "grad":
            continue
        master = master_kind(kind.dtype, request.group)
        begins: float | str = starts[name].init if name in starts else 0.0
        if name == "param":
            begins = "param" if master is None or master.begins_as_parameter else 0.0
        arrays = tuple(_array(array) for array in storage.arrays(name))
        words = [_literal(name), _literal(begins), _literal(arrays[0][1] if request.is_plain else arrays)]
        if not codec_of(storage).is_plain:
            words += [f"load_{storage.title}", f"store_{storage.title}"]
        buffers.append(Code(f"{'' if request.is_plain else 'Buffer'}({', '.join(words)})"))
    scalars = [(name, starts[name].init, Code(str(spec.scalar_dtype(name)))) for name in kind.graph.scalar_states]
    fields: dict[str, Any] = {
        "formula": Code(called),
        "buffers": tuple(buffers),
        "scalars": tuple(scalars),
        "arrays": tuple(array.name for array in spec.arrays),
        "hypers": spec.hypers,
        "sizes": spec.sizes if "sizes" in parameters else (),
        "columns": spec.columns,
        "reductions": max(spec.reduction_count, 1) if parameters & {"sums", "partials"} else 1,
        "span": default_shape(spec, "cuda").span,
        **({"launches": stages[0]} if request.is_single else {"stages": stages}),
    }
    fields = {name: value for name, value in fields.items() if (name, value) not in _AS_MOSTLY}
    if any(kind.spec.global_count for kind in request.kinds):
        fields["across"] = tuple(
            tuple((slot, value.operation.removeprefix("global_")) for slot, value in scalar.global_reductions)
            for scalar in spec.program.scalars
        )
    return Code(f"Kind({', '.join(f'{name}={_literal(value)}' for name, value in fields.items())})")


def _array(array: Array) -> tuple[Any, ...]:
    return array.name, Code(str(array.dtype)), array.elements


def _stages(spec: KernelSpec, names: Mapping[str, str], *, is_general: bool) -> list[tuple[Any, ...]]:
    """The launches of each stage: of the scalar pass, of the tiles' pass, and of what adds up sums."""
    shape = default_shape(spec, "cuda")
    constants, options = tile_options(spec, shape)
    stages = []
    for index, tile in enumerate(spec.program.tiles):
        launches: list[tuple[str, str, dict[str, Any]]] = [
            (names[f"scalar_pass_{index}"], "blocks", {"BLOCK": _SCALAR_BLOCK, "num_warps": 4})
        ]
        if tile is not None:
            own: dict[str, Any] = {}
            if is_general:
                own = {"ELEMENT": Code(spec.grad.dtype), "MATH": names[f"math_{index}"]}
            own = {**constants, **own, "num_warps": shape.warps, **options}
            launches.append((names[f"tile_pass_{index}"], "tiles", own))
            if tile.reductions:
                sums = {"SPAN": shape.span, "BLOCK": _FINISH_BLOCK, "num_warps": 4}
                launches.append((names[f"finish_{index}"], "tensors", sums))
        stages.append(tuple(launches))
    return stages


def _kind_of(request: Request) -> list[str]:
    by_dims, by_size = request.matters
    dtypes = " and ".join(dtype_name(dtype) for dtype in request.dtypes)
    head = [
        "def kind_of(param: Any) -> Any:",
        '    """The key of the kind of a parameter; raises for a parameter that there are no kernels for."""',
    ]
    refused = f'raise ValueError(f"a parameter is {{param.dtype}}; this file is for {dtypes}")'
    if not (by_dims or by_size):
        return [*head, "    if param.dtype not in KINDS:", f"        {refused}", "    return param.dtype"]
    tree: dict[Any, Any] = {}
    for kind in request.kinds:
        own = tree.setdefault(Code(str(kind.dtype)), {})
        for dims in sorted(kind.dims) if by_dims else (None,):
            if not by_size:
                own[dims] = kind.name
                continue
            sizes = own.setdefault(dims, {}) if by_dims else own
            sizes.update(dict.fromkeys(sorted(kind.sizes), kind.name))
    lines = [
        f"BY_SHAPE: dict[Any, Any] = {_literal(tree)}",
        "",
        "",
        *head,
        "    kind = BY_SHAPE.get(param.dtype)",
        "    if kind is None:",
        f"        {refused}",
    ]
    if by_dims:
        lines += [
            "    if param.ndim > 5:",
            '        raise ValueError(f"a parameter has {param.ndim} dimensions; this file is for 5 at most")',
            "    kind = kind[param.ndim]",
        ]
    if by_size:
        lines += [
            f"    if param.numel() < {SMALLEST}:",
            '        return kind["small"]',
        ]
        if any(kind.spec.has_blocks for kind in request.kinds):
            lines += [
                "    columns = row_of(param.shape)[1]",
                f"    if columns < {SHORTEST}:",
                '        return kind.get("short", kind["large"])',
                "    if param.shape[-1] % 2 or param.shape[-1] != columns:",
                '        return kind.get("uneven", kind["large"])',
            ]
        lines.append('    return kind["large"]')
    else:
        lines.append("    return kind")
    return lines


def _check(request: Request) -> list[str]:
    rule = request.rule
    conditions = {name: _range(rule, name, value) for name, value in request.values.items()}
    if request.clip:
        conditions["max_grad_norm"] = 'group["max_grad_norm"] is None or group["max_grad_norm"] >= 0'
    valid = ", ".join(f'"{name}": {text}' for name, text in conditions.items() if text)
    again = f"tilestep eject {rule.name} --set"
    lines = [
        "def check(group: dict[str, Any]) -> None:",
        '    """Raise for hyperparameters that are out of their ranges, or that this file has no kernels for."""',
        "    for name, value in VALUES.items():",
        "        if fixed(group[name]) != fixed(value):",
        f'            another = f"make another: {again} {{name}}={{group[name]}}"',
        '            raise ValueError(f"{name}={group[name]!r}: this file was made for {name}={value!r}; {another}")',
        f"    valid = {{{valid}}}",
        "    for name, holds in valid.items():",
        "        if not holds:",
        '            raise ValueError(f"Invalid {name}: {group[name]}")',
    ]
    for guard in dict.fromkeys(condition(guard) for kind in request.kinds for guard in kind.graph.guards):
        words = re.sub(r'group\["(\w+)"\]', r"\1", guard)
        lines += [
            f"    if not ({guard}):",
            f"        raise ValueError('this file was made for {words}; make another: {again} NAME=VALUE')",
        ]
    return lines


def _range(rule: Rule, name: str, value: Any) -> str:
    """The condition on a hyperparameter, as code; empty where there is none."""
    ranges, entries = rule.ranges.get(name), value if isinstance(value, (tuple, list)) else (value,)
    texts = []
    for place, entry in enumerate(entries):
        interval = ranges[place] if isinstance(ranges, tuple) else ranges
        if isinstance(interval, Interval) and isinstance(entry, (int, float)) and not isinstance(entry, bool):
            texts.append(_inside(interval, f'group["{name}"]' + (f"[{place}]" if entries is value else "")))
    return " and ".join(texts)


def _inside(interval: Interval, text: str) -> str:
    low, high = ("<" if is_open else "<=" for is_open in (interval.open_low, interval.open_high))
    if interval.high == float("inf"):
        return f"{text} {low.replace('<', '>')} {interval.low:g}"
    above = "" if interval.low == -float("inf") else f"{interval.low:g} {low} "
    return f"{above}{text} {high} {interval.high:g}"


def _signature(request: Request) -> str:
    rule = request.rule
    plain = [key for key in rule.hyperparameters if key not in rule.keyword_only]
    positional = [*plain, *(key for key in rule.positional if key in rule.hyperparameters)]
    keyword = [key for key in rule.keyword_only if key in rule.hyperparameters and key not in positional]
    defaults = {**request.values, **({"max_grad_norm": None} if request.clip else {})}
    keyword += ["max_grad_norm"] if request.clip else []
    arguments = [
        "self",
        "params: Any",
        *(f"{key}: Any = {_literal(defaults[key])}" for key in dict.fromkeys(positional)),
    ]
    arguments += ["*", *(f"{key}: Any = {_literal(defaults[key])}" for key in keyword)] if keyword else []
    about = inspect.cleandoc(rule.__doc__ or rule.name).splitlines()
    docstring = [f'"""{about[0]}', *about[1:]] if len(about) > 1 else [f'"""{about[0]}']
    if request.clip:
        docstring += [
            "",
            "`max_grad_norm` clips gradients inside the step to this global 2-norm; they are not changed.",
        ]
    docstring += ['"""'] if len(docstring) > 1 else []
    if len(docstring) == 1:
        docstring[0] += '"""'
    names = [*dict.fromkeys(positional), *keyword]
    lines = [
        *(f"    {line}".rstrip() for line in docstring),
        "",
        *formatted([f"    def __init__({', '.join(arguments)}) -> None:"]),
        *formatted([f"        defaults = dict({', '.join(f'{name}={name}' for name in names)})"]),
        "        super().__init__(params, defaults)",
    ]
    return "\n".join(lines)


def ejected_test(request: Request, module: str) -> str:
    """The text of a file that tests the ejected one, which is imported as `module`."""
    rule = request.rule
    formats = any(not codec_of(storage).is_plain for kind in request.kinds for storage in kind.storages.values())
    narrow = any(storage.precision.itemsize < 4 for storage in request.kinds[0].storages.values())
    own = getattr(torch.optim, rule.name, None)
    limit = 'LIMIT: dict[str, Any] = {"max_grad_norm": 0.5}' if request.clip else "LIMIT: dict[str, Any] = {}"
    tolerance = 0.02 if formats or narrow or request.state_dtype else 4e-6
    header = f"""# Made by tilestep {__version__}:
#     {request.command} --test
# Run it with pytest beside {module}.py."""
    dtypes = ", ".join(sorted(map(str, request.dtypes)))
    regions: dict[str, str | bool] = {
        "header": header,
        "limit": f"DTYPES = [{dtypes}]\n{limit}\nTOLERANCE = {tolerance}",
        "across": any(kind.spec.global_count for kind in request.kinds),
        "clip": request.clip,
        "torch": own is not None and not request.state_dtype,
    }
    text = _filled(Path(__file__).with_name("template_for_tests.py").read_text(), regions)
    text = re.sub(_FOR_MYPY, "", text)
    imports = sorted([f"import {module} as ejected", "import pytest", "import torch"])
    text = text.replace("import pytest\nimport torch\n\nfrom . import template as ejected\n", "\n".join(imports) + "\n")
    return text.replace("Ejected", rule.name)


__all__ = ["Request", "ejected", "ejected_test"]
