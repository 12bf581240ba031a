"""The text of generated C++: the rule's own names, names that cannot clash, loops that the compiler vectorizes."""

from __future__ import annotations

import keyword
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from module_files import load

import tilestep
from tilestep.backends.cpp import source as cpp
from tilestep.backends.cpp import text
from tilestep.backends.cpp.compile import FLAGS, compiler
from tilestep.backends.cpp.support import PRELUDE
from tilestep.kernels.spec import KernelSpec
from tilestep.rules import Rule, registry
from tilestep.runtime import graph_for, kernel_spec
from tilestep.stats.measures import measured_by
from tilestep.storage import STATE_FORMATS, Master, Plain, Stochastic, Storage

NAMES = sorted(name for name, rule in registry.items() if rule.__module__.startswith("tilestep."))


def spec_of(rule: Rule, dtype: torch.dtype = torch.float32, master: bool = False, **hyper: Any) -> KernelSpec:
    graph = graph_for(rule, {**rule.hyperparameters, **hyper}, 2)
    state = Plain(torch.float32 if master else dtype)
    storages: dict[str, Storage] = {"param": Master(dtype) if master else Plain(dtype), "grad": Plain(dtype)}
    storages |= {name: state for name in graph.states if name not in graph.scalar_states}
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    return kernel_spec(graph, storages, compute, "cpu")


def source_of(rule: Rule, dtype: torch.dtype = torch.float32, **hyper: Any) -> str:
    return cpp.source(spec_of(rule, dtype, **hyper), gaps=False)


def compiled(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = compiler()
    assert command is not None
    kept = [flag for flag in FLAGS if flag != "-shared"]
    return subprocess.run([*command, *kept, *flags, "-x", "c++", "-"], input=source, capture_output=True, text=True)


def test_the_source_says_the_rule_in_its_own_names() -> None:
    source = source_of(registry["AdamW"])
    for line in (
        r"const double bias_correction1 = double\(1\.0\) - std::pow\(betas_0, step_\d\);",
        r"const double bias_correction2_sqrt = std::sqrt\(.*std::pow\(betas_1, step_\d\)\)\);",
        r"const float exp_avg_2 = exp_avg \+ \(one_minus_betas_0 \* \(grad_2 - exp_avg\)\);",
        r"const float denom = \(std::sqrt\(exp_avg_sq_2\) / bias_correction2_sqrt\) \+ eps;",
        r"const float param_3 = param_2 - \(lr_over_bias_correction1 \* \(exp_avg_2 / denom\)\);",
        r"write\(param_array\[i\], param_3\);",
    ):
        assert re.search(line, source), line
    header = source.splitlines()[:3]
    assert header[0] == f"// tilestep {tilestep.__version__}: rule AdamW, C++ backend"
    assert "writes param, exp_avg, exp_avg_sq" in header[2]


def test_a_step_reads_and_writes_each_array_once() -> None:
    source = source_of(registry["AdamW"], torch.bfloat16, master=True)
    loop = source[source.index("#pragma omp simd\n      for") :]
    loop = loop[: loop.index("\n      }\n")]
    moments = ["exp_avg_array", "exp_avg_sq_array"]
    assert sorted(re.findall(r"read\((\w+)\[i\]", loop)) == [*moments, "grad_array"]
    assert sorted(re.findall(r"write\((\w+)\[i\]", loop)) == moments
    for function in ("join", "split"):
        assert re.findall(rf"{function}_master_of_bfloat16\((\w+)\[i\], (\w+)\[i\]", loop) == [
            ("param_array", "master_param_array")
        ]


def test_an_option_that_is_off_leaves_no_trace() -> None:
    assert "max_exp_avg_sq" not in source_of(registry["AdamW"])
    assert "max_exp_avg_sq" in source_of(registry["AdamW"], amsgrad=True)
    assert "master_param" not in source_of(registry["AdamW"], torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_every_index_has_64_bits(name: str) -> None:
    source = source_of(registry[name])
    functions = source[source.index('extern "C" void scalar_pass_0') :]
    assert not re.search(r"\b(int|unsigned|long|short|size_t|u?int(8|16|32)_t)\b", functions)
    structure = source[source.index("struct Launch") : source.index("enum Control")]
    assert re.findall(r"int32_t\* (\w+)", structure) == ["tile_tensor", "group", "words"]


def awkward_names() -> list[str]:
    """Every identifier that means something to a C++ compiler after the prelude, if Python allows it as a variable."""
    macros = re.findall(r"^#define ([A-Za-z]\w*)\b", compiled(PRELUDE, "-dM", "-E").stdout, re.MULTILINE)
    assert {"NAN", "INFINITY"} <= set(macros)
    reserved = text.CppNames.keywords["reserved"]
    wanted = {*reserved, *macros, "part_0", "chunk_0", "total_0", "tl", "_", "_X", "β1", "param_array"}
    return sorted(name for name in wanted if name.isidentifier() and not keyword.iskeyword(name))


@pytest.mark.parametrize("level", ["element", "group"])
def test_no_variable_name_breaks_the_source(level: str, tmp_path: Path) -> None:
    """Nor that of steps that measure, which are built beside those that do not."""
    names = awkward_names()
    first = "grad" if level == "element" else "lr"
    lines = [f"    {name} = {first} * {index + 0.5} + {first}" for index, name in enumerate(names)]
    lines += [f"    param = param - {name} * {name} * grad.abs().amax()" for name in names]
    module = tmp_path / f"awkward_{level}.py"
    head = "def awkward(param, grad, new, class_, *, lr=0.1, default=0.2, template=0.3, NULL=0.4, step):"
    tail = "    return param * default - template * NULL * step, new + grad, class_ + new"
    module.write_text("\n".join([head, *lines, tail, ""]))
    rule = tilestep.rule(load(module).awkward)
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    weight.grad = torch.tensor([0.5, 0.25, -1.0], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.float64)
    wanted = rule(weight.detach().clone(), weight.grad.clone(), zeros.clone(), zeros.clone(), step=1)
    tilestep.Optimizer([weight], rule, stats=tilestep.Stats()).step()
    torch.testing.assert_close(weight.detach(), wanted[0], rtol=1e-9, atol=0)


def test_names_of_the_source_itself_are_reserved() -> None:
    """Functions that it calls, and what its passes declare: a rule's variable of the same name would hide them."""
    called = set(re.findall(r"(?<![\w:<])([a-z]\w*)\(", " ".join(text.SPELLING.values()))) - {"float"}

    def sums(param: Any, grad: Any, mean: Any) -> tuple[Any, ...]:
        mean = mean + grad - grad.mean(-1, keepdim=True)
        return param - mean * mean.norm(), mean

    spec = spec_of(tilestep.rule(sums))
    spec = spec.with_outputs(measured_by(spec))
    for state in (Plain(torch.float32), Stochastic(Plain(torch.bfloat16)), Stochastic(STATE_FORMATS["int4"](True))):
        names, kept = set(called), replace(spec, storages={**spec.storages, "mean": state})
        source = cpp.source(kept)
        for function in re.findall(r'^extern "C" void (?!scalar_pass).*?^}', source, re.MULTILINE | re.DOTALL):
            # The rule's own are float.
            kinds = r"(?:bool|double|u?int\d+_t|auto|View|Cut)[*&]?"
            tiles = function.split("for (int64_t t = 0; t < launch->tensors")[0]
            names |= set(re.findall(rf"(?<!\w){kinds} (?:__restrict )?(\w+)(?:\[\d+\])?(?: =|[,;])", tiles))
        taken = text.scalars_of(kept, next(tile for tile in kept.program.tiles if tile is not None)).names
        assert {"skips", "log_gamma", "layout", "cut"} <= names
        # Outputs and their leaves have free names. Truth values of operations are the rule's, under names of these.
        outputs = ["changed_param", "moves_param", *(output.name for output in spec.outputs)]
        names = {name for name in names if re.sub(r"_\d+$", "", name) not in outputs}
        assert not [name for name in names if taken.fresh(name) == name and name.rstrip("_") not in text.SPELLING]


def vectorized_loops(source: str) -> tuple[list[int], set[int]]:
    """Lines of the loops over elements that should be vectorized, and lines the compiler says it vectorized."""
    lines = source.splitlines()
    wanted = [
        number
        for number, line in enumerate(lines, start=1)
        if line.lstrip().startswith(("for (int64_t i = ", "for (int64_t j = "))
        and lines[number - 2].startswith("#pragma omp simd")
    ]
    result = compiled(source, "-S", "-fopt-info-vec-optimized", "-o", "/dev/null")
    assert result.returncode == 0, result.stderr
    lines_vectorized = re.findall(r"<stdin>:(\d+):\d+: optimized: *loop vectorized", result.stderr)
    return wanted, {int(number) for number in lines_vectorized}


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_vectorized(name: str) -> None:
    command = compiler()
    assert command is not None
    if "Free Software Foundation" not in subprocess.run([*command, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only GCC says which loops it vectorized")
    # bfloat16 with master weights is the hardest: conversions both ways beside the float32 of the other storages.
    spec = spec_of(registry[name], torch.bfloat16, master=True)
    for gaps in (False, True):
        loops, vectorized = vectorized_loops(cpp.source(spec, gaps=gaps))
        assert loops
        for line in loops:
            # GCC names the first statement that is left of the loop, one of the two lines after its head.
            assert {line, line + 1, line + 2} & vectorized, f"the loop at line {line} is scalar, {gaps=}"


def test_loops_ask_ahead_for_every_array_unless_they_sum() -> None:
    def asked(rule: str) -> list[str]:
        text = cpp.source(spec_of(registry[rule], torch.bfloat16, master=True))
        first_pass = text[text.index("void tile_pass_0") :].split("void ")[1]
        return re.findall(r" ask_ahead<\d+>\((\w+)_array, first\);", first_pass)

    assert asked("AdamW") == ["grad", "param", "master_param", "exp_avg", "exp_avg_sq"]
    assert not asked("LAMB")


def test_short_runs_take_the_time_of_their_elements() -> None:
    """Room is for the longest run: only what loops over whole blocks read is filled behind a shorter one."""
    spec = spec_of(registry["Adafactor"])
    spec = replace(spec, storages={**spec.storages, "param": Stochastic(Plain(torch.bfloat16))})
    without_gaps, plain = (cpp.source(spec, gaps=gaps) for gaps in (False, True))
    for source in (without_gaps, plain):
        assert re.findall(r" indices_of\(.*, count, (\w+), ", source) == ["count"]
    assert " copied<false>(" in plain and " = run_of(" not in plain
    spec = spec_of(registry["AdamW"])
    blocks = cpp.source(replace(spec, storages={**spec.storages, "exp_avg": Stochastic(STATE_FORMATS["int8"](True))}))
    assert re.findall(r" indices_of\(.*, count, (\w+), ", blocks) == ["128"]
    assert " = copied<false>(" not in blocks


@pytest.mark.parametrize("scalar", ["float", "double"])
def test_functions_of_one_element_become_functions_of_vectors(scalar: str) -> None:
    if compiled(PRELUDE + "\n#if !__GLIBC_PREREQ(2, 35) || !defined(__x86_64__)\n#error\n#endif\n", "-E").returncode:
        pytest.skip("this C library has no vector functions")
    names = ["exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "pow", "atan2"]
    body = "\n".join(
        f"#pragma omp simd\nfor (long i = 0; i < n; ++i) a[i] = std::{name}({arguments});"
        for name, arguments in ((name, "b[i], a[i]" if name in ("pow", "atan2") else "b[i]") for name in names)
    )
    loop = (
        f'{PRELUDE}\nextern "C" void f({scalar}* __restrict a, const {scalar}* __restrict b, long n) {{\n{body}\n}}\n'
    )
    assembly = compiled(loop, "-S", "-o", "-").stdout
    suffix = "f" if scalar == "float" else ""
    called = set(re.findall(r"_ZGV\w+?_(\w+)@", assembly))
    assert called == {f"{name}{suffix}" for name in names}


def test_square_roots_are_instructions() -> None:
    result = compiled(source_of(registry["AdamW"]), "-S", "-o", "-")
    assert "call\tsqrt" not in result.stdout
    if "x86" in result.stdout or "%rip" in result.stdout:
        assert re.search(r"vsqrtps\s|sqrtps\s", result.stdout)
