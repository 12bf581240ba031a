"""The command line itself: discovery of commands, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import tilestep
from tilestep import cli
from tilestep.bench import results


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    out, err = capfd.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_version_names_what_a_bug_report_needs(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "version")
    assert code == 0
    named = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert named["tilestep"] == tilestep.__version__
    assert named.keys() >= {"torch", "triton", "compiler", "device", "python"}


def test_a_checkout_without_git_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "src/tilestep/bench/results.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(results, "__file__", str(module))
    monkeypatch.delenv("TILESTEP_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.environment()["commit"] == "not a git checkout"
    (tmp_path / ".git").touch()
    assert results.environment()["commit"] == "a checkout, but git is not installed"


def test_help_lists_every_command_module(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--help")
    assert code == 0
    for command in ("bench", "demo", "version"):
        assert command in out


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["version", "--no-such-option"], ["bench", "no-such-section"]]
)
def test_bad_usage_exits_with_2_and_says_what(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, *arguments)
    assert code == 2
    assert arguments[-1] in err


def failing_app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise ValueError("layer.weight: learning rate is -1\n  it must not be negative")

    return app


def test_a_failure_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "build_app", failing_app)
    monkeypatch.delenv("TILESTEP_TRACEBACK", raising=False)
    code, _, err = run(capfd)
    assert code == 1
    assert err.startswith("error: layer.weight: learning rate is -1 it must not be negative")
    assert len(err.splitlines()) == 1


def test_the_traceback_is_there_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_app", failing_app)
    monkeypatch.setenv("TILESTEP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="learning rate"):
        cli.main([])


def test_commands_import_what_they_need_when_they_run() -> None:
    heavy = "print([name for name in sys.modules if name in ('torch.profiler', 'matplotlib', 'rich.progress')])"
    loaded = [
        subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True).stdout
        for code in ("import sys, tilestep", "import sys, tilestep.cli; tilestep.cli.build_app()")
    ]
    assert loaded[0] == loaded[1]
