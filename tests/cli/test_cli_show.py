"""`tilestep show` and `tilestep tune`, and how both find rules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import tilestep
from tilestep import cli
from tilestep.cli.arguments import load_rule, parse_settings
from tilestep.planning.describe import describe

AUTHORED = Path(__file__).with_name("authored.py")

Run = Callable[..., tuple[int, str, str]]


def line_of(text: str) -> int:
    """The line of `authored.py` on which this stands."""
    return next(number for number, line in enumerate(AUTHORED.read_text().splitlines(), 1) if text in line)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command where the rules of `authored.py` are in the current directory."""
    monkeypatch.chdir(Path(__file__).parent)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(arguments))
        out, err = capfd.readouterr()
        return int(stopped.value.code or 0), out, err

    return command


@pytest.mark.parametrize("name", sorted(tilestep.registry))
def test_every_rule_can_be_described(name: str) -> None:
    for backend in ("triton", "cpp"):
        description = describe(tilestep.registry[name], backend=backend)
        assert description.bytes_read >= 8 and description.bytes_written >= 4
        assert description.equations.startswith(tilestep.registry[name].__doc__.split("\n")[0])
        written = {array.name for entry in description.passes if entry.traffic for array in entry.traffic.writes}
        assert "param" in written
        for launch in description.launches:
            assert launch.startswith("torch, ") or launch == "combine_parts" or launch in description.source
        if backend == "triton":
            ast.parse(description.source)


def test_show_prints_equations_passes_traffic_launches_and_code(run: Run) -> None:
    code, out, err = run("show", "lamb", "--backend", "cpp")
    assert code == 0, err
    assert "p <- p - lr * norm(p) / norm(u) * u" in out
    assert "for each tensor, in float64: " in out and "sum of param * param" in out
    assert "in all: 28 B read, 12 B written" in out
    launches = [line.split()[1] for line in out.splitlines() if line.startswith("  ") and "_pass_" in line]
    assert launches == ["scalar_pass_0", "tile_pass_0", "scalar_pass_1", "tile_pass_1"]
    assert 'extern "C" void tile_pass_1(const Launch* launch)' in out


def test_passes_over_rows_and_columns_are_shown(run: Run) -> None:
    _, out, _ = run("show", "adafactor", "--backend", "cpp")
    assert "sum of square, one for each row, sum of square, one for each column" in out
    assert "row     for each row: new row_var" in out and "column  for each column: new col_var" in out
    assert "reads    0 B  row_var (by slice)" in out and "row_var            float32, one for each row" in out
    assert "in all: 20 B read, 4 B written" in out
    _, vector, _ = run("show", "adafactor", "--backend", "cpp", "--dims", "1")
    assert "for each row" not in vector and "variance           float32, like the parameter" in vector


@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_outputs_are_named(run: Run, backend: str) -> None:
    code, output, _ = run("show", "AdamW", "--stats", "--changes", "--backend", backend)
    assert code == 0 and "Left besides the update" in output
    assert "grad_squares, grad_max" in output and "exp_avg_sq_near" in output
    assert "a bit of each element: changed" in output
    assert "outputs: changed, grad_squares" in output and "update_param = " in output and "first_word" in output
    assert "by torch from a copy" in run("show", "Adafactor", "--stats", "--backend", backend)[1]
    assert "seen_" not in run("show", "AdamW", "--backend", "triton")[1]


def test_code_only_is_the_source_itself(run: Run) -> None:
    for backend in ("triton", "cpp"):
        _, out, _ = run("show", "AdamW", "--backend", backend, "--code-only")
        assert out == describe(tilestep.registry["AdamW"], backend=backend).source


def test_options_change_what_is_shown(run: Run) -> None:
    _, plain, _ = run("show", "adamw")
    _, masters, _ = run("show", "adamw", "--dtype", "bf16", "--master-weights")
    _, remainders, _ = run("show", "adamw", "--dtype", "bf16", "--remainder")
    _, with_maximum, _ = run("show", "adamw", "--set", "amsgrad=true")
    assert "in all: 16 B read, 12 B written" in plain
    assert "in all: 16 B read, 14 B written" in masters and "master_param       float32" in masters
    assert "in all: 14 B read, 12 B written" in remainders and "remainder_param    int16" in remainders
    assert "in all: 20 B read, 16 B written" in with_maximum and "max_exp_avg_sq" in with_maximum
    _, vector, _ = run("show", "lars", "--dims", "1")
    _, matrix, _ = run("show", "lars", "--dims", "2")
    assert vector.count("tile_pass_1") == 0 < matrix.count("tile_pass_1")


def test_branches_are_shown_as_what_is_true_in_them(run: Run) -> None:
    _, both, _ = run("show", "soap", "--dims", "2")
    holds = "This code holds while shampoo_beta < 0; rows <= max_precond_dim; columns <= max_precond_dim"
    assert holds in " ".join(both.split())
    _, none, _ = run("show", "soap", "--dims", "2", "--set", "max_precond_dim=0", "--set", "shampoo_beta=0.5")
    assert "shampoo_beta >= 0; rows > max_precond_dim; columns > max_precond_dim" in " ".join(none.split())
    assert "gram_left" in both and "gram_left  " not in none


def test_show_takes_a_rule_of_the_user_s(run: Run) -> None:
    code, out, _ = run("show", "authored:signed", "--backend", "cpp")
    assert code == 0
    assert "p <- p - lr * (sign(g) + weight_decay * p)" in out and "authored.py:" in out
    code, out, _ = run("show", "authored:undecorated", "--code-only")
    assert code == 0 and "def undecorated_math_0" in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["admw"], 2, "did you mean Adam"),
        (["nothing like it"], 2, "module:function"),
        (["no_such_module:rule"], 2, "no module is called 'no_such_module'"),
        (["authored:absent"], 2, "authored has no 'absent'"),
        (["authored:sigend"], 2, "did you mean signed?"),
        (["./authored.py:signed"], 2, "Invalid value for RULE: name the module and the function: authored:signed"),
        (["authored:"], 2, "name the module and the function: authored:function"),
        (
            ["authored:misspelt"],
            1,
            "NameError: name 'lrr' is not defined; see ",
        ),
        (["adamw", "--state-dtype", "int9"], 2, "Invalid value for --state-dtype: Invalid state_dtype: 'int9'"),
        (["adamw", "--masters", "kahn"], 2, "Invalid value for --masters"),
        (["adamw", "--rounding", "up"], 2, "Invalid value for --rounding"),
        (["authored:NOT_A_RULE"], 2, "is not a function"),
        (["adamw", "--set", "amsgard=true"], 2, "lr, betas"),
        (["adamw", "--set", "amsgrad"], 2, "pass name=value"),
        (["adamw", "--set", "lr=-1"], 1, "Invalid lr: -1"),
        (["authored:branching"], 1, f"authored.py:{line_of('if grad.sum() > 0')}: in rule branching: branches on"),
        (["authored:untranslatable"], 1, f"authored.py:{line_of('bessel_j0')}: in rule untranslatable"),
    ],
)
def test_what_cannot_be_shown(arguments: list[str], code: int, text: str, run: Run) -> None:
    exit_code, out, err = run("show", *arguments)
    assert exit_code == code and out == ""
    assert text in " ".join(err.replace("│", " ").split())


def test_settings_are_python_s_literals() -> None:
    rule = load_rule("adamw")
    words = ["lr=1e-2", "betas=(0.8,0.9)", "amsgrad=True", "weight_decay=inf", "eps=none"]
    expected = {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": float("inf"), "eps": None}
    assert parse_settings(words, rule) == expected
    assert parse_settings(["adjust_lr_fn=original"], load_rule("muon")) == {"adjust_lr_fn": "original"}
    with pytest.raises(typer.BadParameter):
        parse_settings(["=3"], rule)


def test_an_import_error_inside_the_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imports_nothing_real.py").write_text("import module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="module_that_is_not_there"):
        load_rule("imports_nothing_real:rule")


def test_tune_prints_before_and_after_and_keeps_the_shapes(run: Run, own_cache: Path) -> None:
    code, out, err = run("tune", "sgd", "--device", "cpu", "--rounds", "1", "--elements", "20000")
    assert code == 0, err
    shown = " ".join(out.replace("│", " ").split())
    assert "before" in shown and "after" in shown and "16384" in shown
    (table,) = own_cache.glob("tiles-*.json")
    assert "8 B read, 4 B written; 2 float32" in table.read_text()


def test_tune_without_saving_leaves_no_table(run: Run, own_cache: Path) -> None:
    code, _, err = run("tune", "sgd", "--device", "cpu", "--rounds", "1", "--elements", "20000", "--no-save")
    assert code == 0, err
    assert not list(own_cache.glob("tiles-*.json"))
