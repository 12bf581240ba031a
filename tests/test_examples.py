"""Every script in examples/: it trains, says how far it is, and draws its picture."""

from __future__ import annotations

import functools
import re
import socket
from pathlib import Path

import pytest
from scripts import run_python

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "small_gpt")


IMPORTS = ["matplotlib.pyplot", "matplotlib.backends.backend_agg", "rich.console"]
"""What all examples import."""


def run(folder: Path, *words: str) -> str:
    """The output of a Python command that must succeed, in a folder of its own."""
    run = functools.partial(run_python, *words, cwd=folder, imports=IMPORTS)
    done = run(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "src"))
    if "terminate called without an active exception" in done.stderr:
        # FSDP2 keeps gloo's threads after `destroy_process_group`. One that wakes late drops the last reference
        # to a tensor of a finished collective while the interpreter ends; taking the GIL then ends the thread inside a
        # destructor (pytorch/pytorch#179291). A script without tilestep aborts alike if these threads are slowed down.
        done = run(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("language_model", [], "checkpoint: language_model.pt"),
        ("language_model", ["--optimizer", "Lion", "--lr", "1e-3", "--bf16"], "checkpoint: language_model.pt"),
        ("finetune_offloaded", [], "updates run on: "),
        ("own_rule", [], "leads to 0.9000"),
        ("overlap", [], "the losses are equal to the bit"),
        ("capture", ["--device", "cpu"], "not captured: the step cannot be captured: its parameters are on the CPU"),
    ],
    ids=lambda value: value if isinstance(value, str) and value in SCRIPTS else "",
)
def test_an_example_trains_and_draws(name: str, arguments: list[str], says: str, tmp_path: Path) -> None:
    output = run(tmp_path, script(name), "--steps", "10", *arguments)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) >= 10 and min(losses) < max(losses) - 0.3, output
    assert says in output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


RANKS = """
import os, runpy, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop(1), WORLD_SIZE="2")
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
sys.exit(max(os.waitpid(rank, 0)[1] for rank in ranks))
"""
"""As torchrun starts them, without three new interpreters."""


def test_two_ranks_train_alike_under_fsdp2_and_shard(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    output = run(tmp_path, "-c", RANKS, port, script("data_parallel"), "--steps", "5", "--device", "cpu")
    for by in ("fsdp2", "shard"):
        kept = re.findall(rf"{by}: rank \d of 2 keeps ([\d.]+) MB of state", output)
        assert len(kept) == 2 and all(1.5 < float(megabytes) < 2.3 for megabytes in kept), output  # of 3.8 in all
    apart = re.search(r"largest difference of the losses: ([\d.e+-]+)", output)
    assert apart is not None and float(apart[1]) < 1e-3
    assert (tmp_path / "data_parallel.png").exists()


def test_a_copy_elsewhere_is_equal_to_the_bit(tmp_path: Path) -> None:
    output = run(tmp_path, script("delta_weights"), "--steps", "12", "--device", "cpu")
    assert "after 12 steps the copy is equal to the bit" in output
    share = re.search(r"([\d.]+)% of [\d,]+ weights changed in a step", output)
    assert share is not None and 0 < float(share[1]) < 30
    assert re.search(r"changes: [\d.]+ ms a step, all weights: [\d.]+ ms", output)
    assert (tmp_path / "delta_weights.png").exists()


HELP = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
for sys.argv in [[script, "--help"] for script in sys.argv[1:]]:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
"""


def test_every_example_explains_itself(tmp_path: Path) -> None:
    output = run(tmp_path, "-c", HELP, str(EXAMPLES), *map(script, SCRIPTS))
    assert re.findall(r"^usage: (\w+)\.py", output, re.MULTILINE) == SCRIPTS
    for option in ("--steps STEPS", "--device DEVICE", "--picture PICTURE"):
        assert output.count(f"  {option}") == len(SCRIPTS)
    assert not list(tmp_path.iterdir())


def test_every_example_is_on_a_page_and_in_the_makefile() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("**/*.md"))
    makefile = (ROOT / "Makefile").read_text()
    for name in SCRIPTS:
        assert f'--8<-- "examples/{name}.py"' in pages, name
        assert name in makefile
        assert (ROOT / "docs" / "images" / f"{name}.png").exists()
