"""`tilestep check`: rules that are as they should be, and each kind of failure."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from scripts import run_python

import tilestep
from tilestep import checking, cli
from tilestep.backends.cpp import text as cpp_text
from tilestep.checking import Verdict, check_interpreted, check_rule
from tilestep.checking.branches import LATE, late_counts
from tilestep.checking.items import INTERPRETED, ITEMS, Subject, run_item, trace_all
from tilestep.cli.arguments import load_rule
from tilestep.graph import Graph

FOLDER = Path(__file__).parent
Verdicts = dict[str, Verdict]


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of `authored.py` are in the current directory."""
    monkeypatch.chdir(FOLDER)


def verdicts(rule: tilestep.Rule, **given: object) -> Verdicts:
    return {verdict.item: verdict for verdict in check_rule(rule, given, interpret=False)}


def failures(result: Verdicts) -> list[str]:
    return [item for item, verdict in result.items() if verdict.passed is False]


@pytest.mark.parametrize("name", ["authored:signed", "LAMB"])
def test_good_rules_pass_every_item(name: str) -> None:
    result = verdicts(load_rule(name))
    assert failures(result) == []
    assert result.keys() >= {f"C++, {item}" for item in ITEMS} | {"translation"}


def test_without_a_compiler_it_says_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "compiler", lambda: None)
    _, said = itertools.islice(check_rule(tilestep.registry["Lion"], interpret=False), 2)
    assert (said.item, said.passed) == ("C++", None) and "no compiler" in said.text


def test_a_function_without_a_decorator_is_a_rule() -> None:
    translation, float32 = itertools.islice(check_rule(load_rule("authored:undecorated"), interpret=False), 2)
    assert translation.passed and float32.passed
    for item in ("int8 states", "moving numbers", "outputs"):
        assert checked("authored:undecorated", item).passed, item


def test_a_rule_for_matrices_says_so_and_leaves_the_thread_count_out() -> None:
    result = verdicts(tilestep.registry["Muon"])
    assert failures(result) == []
    assert "tensors of 2 dimensions only" in result["translation"].text
    assert result["C++, threads"].passed is None


def test_a_rule_for_tensors_of_other_dimensions_is_tried_on_such() -> None:
    result = verdicts(load_rule("authored:for_volumes"))
    assert failures(result) == [] and "tensors of 3 dimensions only" in result["translation"].text
    assert "up to 27 elements" in result["C++, sizes"].text


def test_hyperparameters_are_those_given() -> None:
    translation, float32 = itertools.islice(check_rule(tilestep.registry["AdamW"], {"amsgrad": True}), 2)
    assert translation.passed and "20 bytes read and 16 written" in translation.text
    assert float32.passed
    for item in ("bfloat16 with remainder", "int8 states", "checkpoint"):
        result = checked("AdamW", item, amsgrad=True)
        assert result.passed, result.text


def test_a_composed_rule_passes() -> None:
    assert failures(verdicts(tilestep.ema(tilestep.cautious(tilestep.registry["SGD"])))) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("branching", "branches on (or reads) data"),
        ("misspelt", "name 'lrr' is not defined"),
        ("untranslatable", "has no translation"),
        ("too_many", "returned 1 value, it must return 2"),
        ("of_a_wrong_shape", "it must keep its shape"),
        ("lost_momentum", "change it in place (momentum_buffer.add_(...), momentum_buffer.copy_(...))"),
        ("varying", "torch.ops.aten.std.correction has no translation to a kernel; write ((x - x.mean()) ** 2).mean()"),
    ],
)
def test_what_cannot_be_translated_is_one_failure_with_its_line(name: str, text: str) -> None:
    (verdict,) = check_rule(load_rule(f"authored:{name}"))
    assert verdict.passed is False
    assert text in verdict.text and "authored.py:" in verdict.text


def test_a_rule_that_is_not_the_same_each_time_fails() -> None:
    """It counts its calls, which the kernel made from its first call cannot know."""
    result = checked("authored:counting", "float32")
    text = result.text
    assert "the parameter of a float32 tensor of shape" in text and "where the formula gives" in text
    assert f"authored.py:{line_of('drift * CALLS')}" in text


def test_a_rule_that_gives_no_numbers_fails_by_that() -> None:
    assert "the rule's code in float64 makes a float32 tensor" in checked("authored:divided_by_zero", "float32").text


def line_of(text: str) -> int:
    lines = (FOLDER / "authored.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_code_generator_that_errs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square roots come out as absolute values: every comparison must notice, the others need not."""
    from tilestep.backends.cpp import run

    monkeypatch.setitem(cpp_text.SPELLING, "sqrt", "std::fabs({0})")
    monkeypatch.setattr(run, "_libraries", {})
    compared = ["float32", "float64", "bfloat16", "float16", "bfloat16 with float32 master", "bfloat16 with remainder"]
    for item in [*compared, "sizes", "layouts", "param groups", "moving numbers"]:
        assert checked("Adam", item).passed is False, item


def broken_item(monkeypatch: pytest.MonkeyPatch, target: str, replacement: Callable[..., object], item: str) -> Verdict:
    monkeypatch.setattr(target, replacement)
    return checked("SGD", item, momentum=0.9)


def test_a_branch_that_late_steps_take_is_checked() -> None:
    result = verdicts(load_rule("authored:resetting"))
    assert failures(result) == ["C++, late steps"]
    assert "makes a float32 tensor of shape (5, 7) infinite or NaN at step 500" in result["C++, late steps"].text
    assert "at step 7" in checked("authored:resetting", "late steps", period=7).text


def test_a_code_generator_that_errs_in_a_late_branch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.backends.cpp import run

    said = checked("authored:warming", "late steps")
    assert said.passed and said.text.startswith("steps 149, 150, 151, 1,000 agree"), said.text
    never = f"never taken: torch.where at authored.py:{line_of('grad.abs() > 1e3')} was always false"
    assert said.text.endswith(never), said.text
    monkeypatch.setitem(cpp_text.SPELLING, "exp", "std::fabs({0})")
    monkeypatch.setattr(run, "_libraries", {})
    assert checked("authored:warming", "float32").passed, "it takes five steps"
    assert "at step 151, where the formula gives" in checked("authored:warming", "late steps").text


@pytest.mark.parametrize(
    ("condition", "counts"),
    [
        (lambda step: step < 77, [76, 77]),
        (lambda step: 0.01 * step >= 3, [299, 300]),
        (lambda step: 1 - 0.999**step > 0.5, [692, 693]),
        (lambda step: (step // 600) % 2 == 1, [599, 600, 601]),  # and a few later ones
        (lambda step: step > 1e9, []),
        (lambda step: step + 1 > 2, [2]),
    ],
)
def test_late_counts_are_those_at_which_a_comparison_changes(
    condition: Callable[[Any], Any], counts: list[int]
) -> None:
    @tilestep.rule
    def stepped(param, grad, *, lr=0.1, step):  # type: ignore[no-untyped-def]
        return param - lr * torch.where(condition(step), grad, -grad)

    graphs: dict[int, Graph] = {}
    trace_all(stepped, stepped.hyperparameters, graphs)
    found = late_counts(graphs.values(), stepped.hyperparameters)
    assert [count for count in found if count <= LATE] == sorted({*counts, LATE}) and len(found) <= 10
    scheduled = {"lr": lambda step: torch.where(condition(step), 0.1, 0.2)}
    graphs.clear()
    trace_all(tilestep.registry["SGD"], {**tilestep.registry["SGD"].hyperparameters, **scheduled}, graphs)
    assert late_counts(graphs.values(), scheduled) == found


def test_a_state_that_does_not_begin_as_declared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.optimizer import states

    right = states._start
    monkeypatch.setattr(states, "_start", lambda *given: 1.5 * right(*given))
    result = checked("NAdam", "float32")
    assert "mu_product" in result.text or "the parameter" in result.text
    assert result.passed is False and "at step 1," in result.text


@pytest.mark.parametrize("kind", ["float32 master", "remainder"])
def test_the_first_step_of_a_master_is_as_precise_as_later_ones(kind: str) -> None:
    """Adafactor's bounds follow the precision of what it updates, which is the master."""
    result = checked("Adafactor", f"bfloat16 with {kind}")
    assert result.passed, result.text


@pytest.mark.parametrize("name", ["bfloat16 states", "float8_e4m3 states", "int4 states", "int8 states"])
def test_states_are_checked_in_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = checked("AdamW", name)
    assert result.passed and "with 8 states in this format agree" in result.text
    assert "no state that can be stored in this format" in checked("SGD", name).text
    from tilestep.checking import items

    right = items.expected
    monkeypatch.setattr(items, "expected", lambda *given: {key: value * 1.3 for key, value in right(*given).items()})
    assert checked("AdamW", name).passed is False


def test_a_state_that_is_not_as_its_format_needs_it_fails_there() -> None:
    result = checked("authored:said_to_be_positive", "int8 states")
    assert result.passed is False and "momentum_buffer" in result.text and "authored.py:" in result.text
    assert checked("authored:said_to_be_positive", "bfloat16 states").passed
    over_rows = checked("authored:over_rows", "int8 states")
    assert over_rows.passed and "states in this format agree" in over_rows.text


@pytest.mark.parametrize("kept", ["bfloat16", "float8_e4m3", "int8", "int4"])
def test_a_state_begins_as_a_value_of_its_format(kept: str) -> None:
    """Rprop's step size begins with the learning rate, which few formats have as such."""
    assert checked("Rprop", f"{kept} states").passed


def checked(name: str, item: str, **given: Any) -> Verdict:
    """The verdict of one item on a rule of tilestep's."""
    rule, graphs = load_rule(name), dict[int, Graph]()
    trace_all(rule, {**rule.hyperparameters, **given}, graphs)
    return run_item(Subject(rule, given, torch.device("cpu"), graphs), item, ITEMS[item])


def test_a_skip_that_does_not_skip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.optimizer.control import skip_policy

    def without_norms(*asked: Any) -> Any:
        return replace(skip_policy(*asked), needs_norm=False)

    monkeypatch.setattr("tilestep.optimizer.optimizer.skip_policy", without_norms)
    verdict = checked("SGD", "skipped steps", momentum=0.9)
    assert verdict.passed is False and "a skipped step changes" in verdict.text


def test_a_build_for_each_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = iter(range(10**6))
    verdict = broken_item(monkeypatch, "tilestep.checking.items.compile_count", lambda: next(builds), "moving numbers")
    assert verdict.passed is False and "rebuilt" in verdict.text


def test_runs_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestep.checking import items as trials

    seeds = iter(range(10**6))
    draw = trials.draw
    monkeypatch.setattr(trials, "draw", lambda shape, dtype, device, seed: draw(shape, dtype, device, next(seeds)))
    for item in ("repeatability", "threads", "checkpoint"):
        assert checked("SGD", item, momentum=0.9).passed is False, item


def test_a_clip_that_does_not_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "tilestep.optimizer.control.StepControl.inputs"
    verdict = broken_item(monkeypatch, target, lambda control, optimizer: None, "clipping")
    assert verdict.passed is False
    assert "max_grad_norm=0.5 differs from clipping before the step: the parameter of a float32" in verdict.text


def test_the_interpreter_runs_the_triton_code() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = list(check_interpreted(load_rule("authored:signed"), {"weight_decay": 0.1}))
    assert [verdict.item for verdict in result] == [f"Triton in its interpreter, {item}" for item in INTERPRETED]
    assert all(verdict.passed for verdict in result), result


@pytest.mark.parametrize("name", ["authored:undecorated", "authored:signed", "Lion"])
def test_another_process_imports_rules_and_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    run = Mock(return_value=Mock(stdout=b"", returncode=0))
    monkeypatch.setattr("subprocess.run", run)
    rule = load_rule(name)
    assert list(check_interpreted(rule, {"lr": 0.5})) == []
    wanted = rule.function if name == "authored:undecorated" else rule
    assert pickle.loads(run.call_args.kwargs["input"]) == (wanted, {"lr": 0.5})


def test_rules_that_another_process_cannot_import_are_left_out() -> None:
    pytest.importorskip("triton")

    @tilestep.rule
    def local(param, grad, *, lr=0.1):
        return param - lr * grad

    (verdict,) = check_interpreted(local, {})
    assert verdict.passed is None and "decorate a function of a module" in verdict.text


def test_without_triton_its_code_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (verdict,) = check_interpreted(tilestep.registry["SGD"], {})
    assert verdict.passed is None and "not installed" in verdict.text


def test_the_command_says_it_in_plain_words(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, code, last in (
        (["authored:signed", "--no-interpret"], 0, "signed does what its code says."),
        (["authored:branching"], 1, "1 of the checks failed: do not use branching like this."),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["check", *arguments])
        out, _ = capfd.readouterr()
        assert (stopped.value.code or 0) == code
        assert out.strip().splitlines()[-1] == last
        marks = {line.split()[0] for line in out.strip().splitlines()[1:-1]}
        assert marks == ({"ok"} if code == 0 else {"FAIL"})


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_word_for_a_number_is_named(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "authored:signed", "--set", "lr=abc"])
    assert stopped.value.code == 1
    assert "Invalid lr: 'abc'; it must be a number" in "".join(capfd.readouterr())


def test_the_command_works_as_a_program() -> None:
    result = run_python("-m", "tilestep", "check", "authored:too_many", cwd=FOLDER)
    assert result.returncode == 1 and "it must return 2" in result.stdout
