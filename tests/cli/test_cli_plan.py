"""`tilestep plan`: its tables say what the plan says, and wrong words are usage errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilestep import cli


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *arguments])
    out, err = capfd.readouterr()
    return int(stopped.value.code or 0), out, err


def cells(out: str, name: str) -> list[str]:
    line = next(line for line in out.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_it_prints_memory_traffic_time_and_meshes(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "1.2B", "--mesh", "8x4")
    assert code == 0, err
    assert out.startswith("1.2 B elements, AdamW, 8 x 4 ranks, ")
    assert cells(out, "parameters")[1] == "2.40" and cells(out, "state")[1] == "1.80"
    assert cells(out, "the state if it were not split")[1] == "14.40"
    assert cells(out, "reduce-scatter")[1] == cells(out, "all-gather")[1] == "2.10"
    assert float(cells(out, "sum gradients")[1]) > float(cells(out, "sum gradients")[2])
    assert [line.split("│")[1].strip() for line in out.splitlines() if " x " in line and "│" in line] == [
        "2 x 16",
        "4 x 8",
        "8 x 4 *",
        "16 x 2",
        "32 x 1",
    ]
    assert "assumed, not measured: " in out


def test_other_rules_storages_and_buckets(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "100M", "--rule", "lion", "--dtype", "fp32", "--no-master-weights", "--bucket-mb", "10")
    assert code == 0 and "Lion, 8 x 1 ranks, 39 buckets of 10 MiB" in out and cells(out, "state")[1] == "0.05"
    code, out, _ = run(capfd, "10B", "--bucket-mb", "2048.5")
    assert code == 0 and "10 buckets of 2048.5 MiB" in out
    code, out, _ = run(capfd, "1.2B")
    assert code == 0 and "9 buckets of 143 to 381 MiB" in out
    code, out, _ = run(capfd, "100M", "--rule", "muon", "--grad-dtype", "fp32", "--grad-buffer", "bucket", "--no-clip")
    assert code == 0 and "the time of matrix products: pass the matrices" in out and cells(out, "clip")[2] == "0.00"
    code, out, _ = run(capfd, "100M", "--rule", "muon", "--mesh", "2", "--matrices", "3x4096x4096,1X1024x4096")
    assert code == 0 and "the time of matrix products: matrix products are known to 10%" in out
    assert cells(out, "matrix products")[1] == cells(out, "matrix products")[2] == "4.95"
    split = ("100M", "--rule", "muon", "--mesh", "2", "--dtype", "fp32", "--no-master-weights", "--layout", "fsdp2")
    code, out, _ = run(capfd, *split, "--matrices", "3x4096x4096")
    assert code == 0 and cells(out, "parameters")[1] == "0.20" and float(cells(out, "exchange matrices")[2]) > 0
    code, _, err = run(capfd, "100M", "--rule", "muon", "--matrices", "4096x4096")
    assert code == 2 and "number x rows x columns" in err
    code, out, _ = run(capfd, "100M", "--remainder", "--mesh", "1")
    assert code == 0 and cells(out, "state")[1] == "1.00" and cells(out, "collectives")[1] == "0"
    formats = ("--state-dtype", "int8", "--masters", "int8", "--mesh", "1", "--no-clip")
    code, out, _ = run(capfd, "8B", *formats)
    assert code == 0 and cells(out, "in all, without activations")[1] == "56.25"
    code, out, _ = run(capfd, "8B", *formats, "--in-backward", "--tensors", "291")
    assert code == 0 and cells(out, "in all, without activations")[1] == "40.28"
    assert "meshes of" not in out and "-0.00" not in out and "not claimed to 5%: updates in backward" in out
    code, out, _ = run(capfd, "70B", "--mesh", "2")
    assert code == 0 and "too much" in out


def test_regimes_claims_and_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    code, eager, _ = run(capfd, "1.2B", "--tensors", "219")
    assert code == 0 and ": claimed to 5%" in eager and float(cells(eager, "host")[1]) > 0
    code, blocks, _ = run(capfd, "1.2B", "--tensors", "219", "--model", "blocks")
    assert code == 0 and float(cells(blocks, "forward")[1]) < float(cells(eager, "forward")[1])
    code, graph, _ = run(capfd, "1.2B", "--tokens", "2048", "--captured")
    assert code == 0 and ": claimed to 5%" in graph and "│ host" not in graph
    code, out, _ = run(capfd, "1.2B", "--tokens", "2048", "--tensors", "2190")
    assert code == 0 and "not claimed to 5%: the host takes" in out
    code, out, _ = run(capfd, "1.2B", "--mesh", "8x4", "--tensors", "219")
    assert code == 0 and "not claimed to 5%: the network between nodes is assumed" in out
    code, out, _ = run(capfd, "1.2B", "--mesh", "8x4", "--tensors", "219", "--network", "48", "--gpus-per-node", "4")
    assert code == 0 and ": claimed to 5%" in out and "network_bandwidth" not in out


def test_constants_of_a_machine(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = {name: {"value": value, "source": "measured"} for name, value in (("compute", 1e15), ("step_latency", 1))}
    path.write_text(json.dumps(machine))
    _, before, _ = run(capfd, "1B")
    code, after, _ = run(capfd, "1B", "--constants", str(path))
    assert code == 0 and float(cells(after, "forward")[1]) < float(cells(before, "forward")[1])
    assert "compute" not in after and "step_latency" not in after
    path.write_text(json.dumps({"computing": {"value": 1}}))
    code, _, err = run(capfd, "1B", "--constants", str(path))
    assert code == 1 and "unknown constant" in err
    for wrong in ("compute = 1e15", "[1, 2]", '{"compute": 1e15}'):
        path.write_text(wrong)
        code, _, err = run(capfd, "1B", "--constants", str(path))
        assert code == 1 and str(path) in err


@pytest.mark.parametrize("words", [("many",), ("1B", "--mesh", "0x2"), ("1B", "--mesh", "a"), ("1B", "--rule", "none")])
def test_wrong_words_are_usage_errors(capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, _, err = run(capfd, *words)
    assert code == 2 and "rror" in err
    assert f"Invalid value for {'SIZE' if len(words) == 1 else words[1]}: {words[-1]!r}" in err.replace(
        "no rule is called ", ""
    )


@pytest.mark.parametrize("size", ["1e9", "1.0E+9", "1000e6", "0.001e3B"])
def test_sizes_are_numbers_as_python_writes_them(capfd: pytest.CaptureFixture[str], size: str) -> None:
    code, out, err = run(capfd, size, "--mesh", "1")
    assert code == 0 and out.startswith("1 B elements"), err
