"""What tests of several folders begin with."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

LONGEST = (
    "runtime/test_rules_on_cpu.py",
    "combinations/test_events.py",
    "backends/test_rows.py",
    "stats/test_stats.py",
    "execution/zero/test_earlier_checkpoints.py",
    "combinations/test_conformance.py",
    "placement/test_dtensor_matrices.py",
    "placement/test_muon_layouts.py",
    "execution/overlap/test_overlap_ranks.py",
    "placement/test_dtensor_checkpoints.py",
    "stats/test_stats_placements.py",
    "storage/test_blocks.py",
    "cli/test_cli_check.py",
    "placement/test_dtensor_steps.py",
    "execution/zero/test_traffic.py",
    "memory/test_offload_ranks.py",
    "execution/capture/test_capture.py",
    "storage/test_formats.py",
    "backends/test_cpp_source.py",
    "eject/test_eject.py",
    "storage/test_resharding.py",
    "backends/test_rows_compile.py",
    "test_examples.py",
    "bench/test_bench_overlap.py",
    "storage/test_stochastic.py",
    "bench/test_bench_sections.py",
    "execution/capture/test_compile.py",
    "execution/zero/test_gathers_together.py",
    "placement/test_dtensor_slices.py",
    "test_docs.py",
)
"""Files that take the most of a core, the longest first: no process is left with one of them alone."""

UNOPTIMIZED = (
    "cli/test_cli_check.py",
    "combinations/test_conformance.py",
    "stats/test_stats_placements.py",
)
"""Tests of what happens around C++ kernels, with many kernels of their own: these are built without optimization, in a
third of the time. All others test kernels as users build them; with `make test OPTIMIZED=1` all do."""


@pytest.fixture(autouse=True)
def flags_of_builds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags for the C++ kernels of a test, and of the ranks and scripts that it starts."""
    if request.node.nodeid.removeprefix("tests/").startswith(UNOPTIMIZED) and "TILESTEP_CXXFLAGS" not in os.environ:
        monkeypatch.setenv("TILESTEP_CXXFLAGS", "-O0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--failures-to FILE: a run that is killed has said by then what has failed."""
    parser.addoption("--failures-to", metavar="FILE", help="append each failed test and its traceback when it fails")


class FailureFile:
    """Appends every failure to a file while the tests run.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._append(report, report.when or "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._append(report, "collect")

    def _append(self, report: pytest.TestReport | pytest.CollectReport, during: str) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"FAILED {report.nodeid} ({during})\n{report.longreprtext}\n\n")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures-to")
    if path and not hasattr(config, "workerinput"):  # not in one of several test processes
        config.pluginmanager.register(FailureFile(Path(path)))


GPUS = {"gpu": 1, "two_gpus": 2, "four_gpus": 4, "eight_gpus": 8}
"""What tests are marked by, wherever they lie, and how many GPUs they need: `pytest -m gpu` selects all of them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in items:
        needed = max((count for name, count in GPUS.items() if item.get_closest_marker(name)), default=0)
        if needed:
            item.add_marker(pytest.mark.gpu)
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}"))
    if hasattr(config, "workerinput"):  # one of several test processes
        if not there:  # they are imported, and not reported one by one
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        order = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish() -> None:
    """What has been imported and collected is not looked through again whenever a test collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own for kernels and tables, which this process asks for anew before and after."""
    import kernel_folders

    from tilestep import native

    native.wait()  # it is built once in a process: not in a folder that goes, or later tests would be without it
    chosen = tmp_path / "kernels"
    monkeypatch.setenv("TILESTEP_CACHE_DIR", str(chosen))
    kernel_folders.forget()
    yield chosen
    monkeypatch.undo()
    kernel_folders.forget()


@pytest.fixture
def device() -> str:
    """Where tests that run on a CPU here run on a GPU in the GPU suite, which has a fixture of its own."""
    return "cpu"
