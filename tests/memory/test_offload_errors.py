"""What `offload` refuses, what it says, and that nothing is changed then."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_pairs import on_host, streamed
from scripts import run_python

import tilestep
from tilestep.memory import offload
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import plan_for
from tilestep.memory.streaming import StreamedState
from tilestep.native import host_memory


def parameters(count: int = 2, size: int = 1000) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(size)) for _ in range(count)]


def test_arguments() -> None:
    optimizer = tilestep.AdamW(parameters())
    with pytest.raises(ValueError, match="Invalid where: 'auto'; it must be 'gpu', 'cpu' or None"):
        tilestep.offload(optimizer, where="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid state"):
        tilestep.offload(optimizer, state=False)
    with pytest.raises(ValueError, match="both must be positive"):
        tilestep.offload(optimizer, chunk_mb=0)
    with pytest.raises(ValueError, match="both must be positive"):
        tilestep.offload(optimizer, buffers=0)
    with pytest.raises(TypeError, match="requires a tilestep optimizer, not AdamW"):
        tilestep.offload(torch.optim.AdamW(parameters()))  # type: ignore[arg-type]
    assert type(optimizer) is tilestep.AdamW


def test_parameters_on_the_cpu_keep_their_state_beside_them() -> None:
    params = parameters()
    optimizer = tilestep.offload(tilestep.AdamW(params))
    assert optimizer.offload_report().where == "here"
    assert "parameters are on the CPU" in str(optimizer.offload_report())
    params[0].grad = torch.ones(1000)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 1
    with pytest.raises(tilestep.OffloadError, match="where='gpu', but the parameters are on the CPU"):
        tilestep.offload(tilestep.AdamW(parameters()), where="gpu")


def test_twice_and_copies() -> None:
    optimizer = tilestep.offload(tilestep.AdamW(parameters()))
    with pytest.raises(tilestep.OffloadError, match="offloaded already"):
        tilestep.offload(optimizer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="save its state_dict"):
            copied(optimizer)


def test_the_order_of_wrappers_is_said() -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="to overlap them, offload it with where='gpu'"):
        tilestep.overlap(on_host()(tilestep.AdamW(model.parameters())), model)


def test_devices_are_named() -> None:
    named = [("here", torch.nn.Parameter(torch.ones(2)))]
    with pytest.raises(tilestep.OffloadError, match="no parameter of the optimizer has memory yet"):
        tilestep.offload(tilestep.AdamW([torch.nn.Parameter(torch.ones(2, device="meta"))]))
    optimizer = tilestep.AdamW(named)
    with pytest.raises(
        tilestep.OffloadError, match=r"parameter 0 of group 0 \(here\) is on cpu, other parameters are on meta"
    ):
        move_state(optimizer, StreamedState(torch.device("meta"), 1, 1), "gpu", "for a test")
    assert type(optimizer) is tilestep.AdamW
    named[0][1].grad = torch.ones(2)
    optimizer.step()


def test_gradients_that_cannot_be_used_change_nothing() -> None:
    for home in (streamed(), on_host()):
        weights = parameters()
        optimizer = home(tilestep.AdamW(weights))
        weights[0].grad = torch.ones(1000)
        weights[1].grad = torch.ones(1000).to_sparse()
        with pytest.raises(tilestep.GradientError, match="the gradient of parameter 1 of group 0 is sparse"):
            optimizer.step()
        assert torch.equal(weights[0], torch.ones(1000))
        assert float(optimizer.state[weights[0]]["step"]) == 0
        weights[1].grad = None
        optimizer.step()
        assert not torch.equal(weights[0], torch.ones(1000))


def test_an_offloaded_step_is_not_captured() -> None:
    optimizer = streamed()(tilestep.AdamW(parameters()))
    with pytest.raises(tilestep.CaptureError, match="its state is in host memory"):
        optimizer.prepare_capture()


def test_state_is_never_on_the_device_of_an_optimizer_that_is_made_for_it() -> None:
    made: list[tilestep.Optimizer] = []

    def make() -> tilestep.Optimizer:
        made.append(tilestep.AdamW(parameters()))
        assert not made[0].state
        return made[0]

    optimizer = tilestep.offload(make)
    assert optimizer is made[0] and len(optimizer.state) == 2


def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: int, group: int | None = None) -> None:
    """A machine that has so many bytes, and a control group that leaves so many."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {system // 1024} kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUP", tmp_path)
    if group is not None:
        (tmp_path / "memory.max").write_text(f"{group + 5000}\n")
        (tmp_path / "memory.current").write_text("8000\n")
        (tmp_path / "memory.stat").write_text("anon 5000\ninactive_file 3000\n")


def test_too_little_memory_says_how_much_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(2, 1_000_000)
    optimizer = tilestep.AdamW(params)
    limited(tmp_path, monkeypatch, system=64 << 20, group=4_000_000)
    with pytest.raises(tilestep.HostMemoryError) as raised:
        streamed()(optimizer)
    message = str(raised.value)
    assert "requires 16 MB of host memory" in message
    assert "4 MB are available (limit of the control group), 25%" in message
    assert isinstance(raised.value, MemoryError)
    assert type(optimizer) is tilestep.AdamW and optimizer.memory.__class__.__name__ == "StateMemory"
    params[0].grad = torch.ones(1_000_000)
    optimizer.step()
    limited(tmp_path, monkeypatch, system=8_000_000, group=64 << 20)
    with pytest.raises(tilestep.HostMemoryError, match=r"8 MB are available \(memory of the system\)"):
        streamed()(optimizer)


def test_a_group_that_does_not_fit_is_not_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = streamed()(tilestep.AdamW(params))
    limited(tmp_path, monkeypatch, system=1_000_000)
    with pytest.raises(tilestep.HostMemoryError):
        optimizer.add_param_group({"params": parameters(1, 1_000_000)})
    assert len(optimizer.param_groups) == 1
    params[0].grad = torch.ones(1000)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 1


SCRIPT = """
import resource, torch, tilestep
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState
from tilestep.native import host_memory as memory
params = [torch.nn.Parameter(torch.ones(25_000_000))]
optimizer = tilestep.SGD(params, lr=1.0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, resource.RLIM_INFINITY))
def refused():
    try:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "rule": "AdamW"})
        move_state(optimizer, StreamedState(torch.device("cpu"), 1 << 20, 3), "gpu", "for a test")
    except tilestep.HostMemoryError as error:
        return str(error)
home = StreamedState(torch.device("cpu"), 1 << 20, 3)
for known in (True, False):
    if not known:
        memory.available = lambda: (1 << 40, "nothing known")  # only the allocation itself tells
    try:
        home.memory.take([100_000_000])
    except tilestep.HostMemoryError as error:
        print(error)
print("alive", len(home.memory.take([1000])))
"""


def test_an_allocation_that_fails_is_the_same_error() -> None:
    """In a process whose address space ends soon, with and without that limit being read."""
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    known, unknown, alive = done.stdout.splitlines()
    assert "requires 100 MB of host memory" in known and "limit of the process's address space" in known
    assert "requires 100 MB of host memory" in unknown and "nothing known" in unknown
    assert alive == "alive 1"


def test_memory_is_given_back() -> None:
    params = parameters()
    optimizer = streamed()(tilestep.AdamW(params))
    owner: Any = optimizer.memory
    assert owner.host_bytes >= 2 * 2 * 4000
    for param in params:
        optimizer.state[param] = {}
    optimizer._make_plan(ahead=False)
    assert 2 * 2 * 4000 <= owner.host_bytes < 4 * 2 * 4000 + 8192 * 2
    buffers = optimizer.state[params[0]]
    del optimizer, owner
    assert float(buffers["exp_avg"].sum()) == 0


@pytest.mark.parametrize(
    ("triton", "cxx", "where", "place"),
    [(True, True, None, "gpu"), (False, True, None, "cpu"), (True, False, None, "gpu"), (True, True, "cpu", "cpu")],
)
def test_the_default_place_is_the_gpu_where_triton_is(
    triton: bool, cxx: bool, where: str | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "triton_available", lambda: triton)
    monkeypatch.setattr(offload, "compiler", lambda: "c++" if cxx else None)
    assert offload.choose(tilestep.AdamW(parameters()), torch.device("cuda"), where)[0] == place


def test_a_place_without_its_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "triton_available", lambda: False)
    monkeypatch.setattr(offload, "compiler", lambda: None)
    for where, said in (
        (None, "needs Triton or a C[+][+] compiler"),
        ("gpu", "needs Triton"),
        ("cpu", "needs a C[+][+] compiler"),
    ):
        with pytest.raises(tilestep.OffloadError, match=said):
            offload.choose(tilestep.AdamW(parameters()), torch.device("cuda"), where)


def test_the_report_has_the_bytes_of_an_update() -> None:
    params = [torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))]
    plan = plan_for(tilestep.AdamW(params, master_weights=True))
    assert (plan.state, plan.inward, plan.outward) == (12_000, 12_000, 12_000)
    # Read: gradient, master, two moments, the parameter compared with its master. Written: the last four.
    assert (plan.gradients, plan.parameters, plan.kernels) == (2000, 2000, 16_000 + 14_000)
    lamb = plan_for(tilestep.LAMB([torch.nn.Parameter(torch.ones(1000))]))
    assert (lamb.inward, lamb.outward) == (16_000, 8000)
    optimizer: Any = streamed()(tilestep.AdamW([torch.nn.Parameter(torch.ones(1_000_000))]))
    report = str(optimizer.offload_report())
    assert "copies 8 MB of state in and 8 MB out; on the CPU 4 MB of gradients out and 4 MB of parameters in" in report
