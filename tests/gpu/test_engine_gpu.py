"""Steps on a GPU: every rule and storage against float64 and against torch, layouts, sizes, memory, waits, streams."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_processes import side_by_side
from float64_reference import check_steps
from remainder_patterns import check_halves, check_joined, edge_patterns, floats, kept_by_kernels
from rule_cases import NAMES, STORAGES, check_case
from synchronization import no_synchronization

import tilestep
from tilestep.bench.measure import trace
from tilestep.optimizer.masters import exact_values

CUDA = torch.device("cuda")
CASES = [(name, storage) for storage in STORAGES for name in NAMES]
Params = list[torch.nn.Parameter]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Callable[..., str]]:
    with side_by_side(check_case, [(*case, "cuda") for case in CASES]) as found:
        yield found


@pytest.mark.parametrize(("name", "storage"), CASES, ids=lambda value: str(value))
def test_a_rule_steps_as_it_does_in_float64(name: str, storage: str, outcome: Callable[..., str]) -> None:
    wrong = outcome(name, storage, "cuda")
    assert not wrong, wrong


SHAPES = [(), (5,), (64, 33), (3, 4, 5, 2), (0,), (70_001,)]


def make(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, device: Any = "cuda", seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def set_gradients(*models: Params, step: int) -> None:
    """New tensors with the same values for every model."""
    for params in models:
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)


def assert_close(left: Any, right: Any, tolerance: float) -> None:
    for mine, other in zip(left, right, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach().cpu(), rtol=tolerance, atol=tolerance)


TORCH = [
    ("Adadelta", {}),
    ("Adagrad", {"lr_decay": 0.01}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("ASGD", {}),
    ("ASGD", {"lr": 0.02}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_asgd_is_as_exact_as_torchs(dtype: torch.dtype) -> None:
    """A product with 1 - lambd * eta, rounded to float32, was off by 3e-8 of the parameter at every step."""
    exact, theirs, ours = (make(dtype=each) for each in (torch.float64, dtype, dtype))
    for param, *others in zip(exact, theirs, ours):
        for other in others:
            other.data.copy_(param.data)
    optimizers = [
        torch.optim.ASGD(exact, lr=0.02, foreach=False),
        torch.optim.ASGD(theirs, lr=0.02),
        tilestep.ASGD(ours, lr=0.02),
    ]
    for step in range(100):
        set_gradients(exact, theirs, ours, step=step)
        for optimizer in optimizers:
            optimizer.step()
    for wanted, other, mine in zip(exact, theirs, ours):
        if wanted.numel():
            error, allowed = (mine - wanted).abs().max(), (other - wanted).abs().max()
            assert error <= 2 * allowed + 1e-12, (error, allowed)


@pytest.mark.parametrize(("name", "hyper"), TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_training_equals_torchs_and_checkpoints_go_both_ways(
    name: str, hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    # torch keeps the rate of ASGD in float32, whatever the parameter's dtype.
    tolerance = 2e-5 if dtype is torch.float32 else 2e-8 if name == "ASGD" else 1e-9
    mine, theirs = make(dtype=dtype), make(dtype=dtype)
    ours, torchs = getattr(tilestep, name)(mine, **hyper), getattr(torch.optim, name)(theirs, **hyper)
    for step in range(4):
        set_gradients(mine, theirs, step=step)
        ours.step()
        torchs.step()
    assert_close(mine, theirs, tolerance)
    from_torch, from_ours = (
        [torch.nn.Parameter(param.detach().clone()) for param in params] for params in (theirs, mine)
    )
    resumed, torch_resumed = getattr(tilestep, name)(from_torch), getattr(torch.optim, name)(from_ours)
    resumed.load_state_dict(torchs.state_dict())
    torch_resumed.load_state_dict(ours.state_dict())
    for step in range(4, 7):
        set_gradients(theirs, from_torch, from_ours, step=step)
        for optimizer in (torchs, resumed, torch_resumed):
            optimizer.step()
    assert_close(from_torch, theirs, tolerance)
    assert_close(from_ours, theirs, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_and_fused_adamw_of_torch(dtype: torch.dtype) -> None:
    """Two groups, a clip that bites, and torch's fused kernel with its checkpoint."""
    mine, theirs = make(dtype=dtype), make(dtype=dtype)

    def groups(params: Params) -> list[dict[str, Any]]:
        return [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "weight_decay": 0.3}]

    ours = tilestep.AdamW(groups(mine), max_grad_norm=0.5)
    torchs = torch.optim.AdamW(groups(theirs), fused=True)
    for step in range(5):
        set_gradients(mine, theirs, step=step)
        ours.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        torchs.step()
        torch.testing.assert_close(ours.grad_norm, norm.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
    assert_close(mine, theirs, 2e-5 if dtype is torch.float32 else 2e-2)
    ours.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(ours.state_dict())
    set_gradients(mine, theirs, step=9)
    ours.step()
    torchs.step()


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor", "Prodigy", "SGD", "StableAdamW"])
def test_runs_repeat_to_the_bit(name: str) -> None:
    results = []
    for _ in range(2):
        params = make([(300_001,), (64, 33), (1000, 77), ()], dtype=torch.bfloat16)
        optimizer = getattr(tilestep, name)(params, lr=0.01, max_grad_norm=1.0, master_weights=True)
        for step in range(4):
            set_gradients(params, step=step)
            optimizer.step()
        results.append([value for param in params for value in (param, *optimizer.state[param].values())])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["Adam", "LAMB"])
def test_scaled_states_step_as_they_do_in_float64(name: str) -> None:
    with torch.device("cuda"):
        check_steps(tilestep.scaled_states(tilestep.registry[name]), torch.float32, False)
        check_steps(tilestep.scaled_states(tilestep.registry[name]), torch.bfloat16, True)


def test_remainders_keep_every_pattern_of_bits() -> None:
    values = floats(edge_patterns())
    high, low, wide = kept_by_kernels(values.cuda())
    check_halves(values, high.cpu(), low.cpu())
    check_joined(values, wide.cpu())


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor"])
def test_remainders_train_as_masters_do(name: str) -> None:
    runs = []
    for kind in (True, "remainder"):
        params = make([(300_001,), (64, 33), (3, 4, 5, 2), ()], dtype=torch.bfloat16)
        optimizer = getattr(tilestep, name)(params, lr=1.7e-3, max_grad_norm=1.0, master_weights=kind)
        for step in range(20):
            set_gradients(params, step=step)
            optimizer.step()
        runs.append([exact_values(param, optimizer.state[param]) for param in params])
    for master, remainder in zip(*runs, strict=True):
        torch.testing.assert_close(remainder, master, rtol=20 * 2.0**-23, atol=1e-12)  # a unit for each tie
        assert (remainder == master).float().mean() > 0.99


def test_prodigy_equals_its_steps_on_the_cpu() -> None:
    """Its reductions go over all tensors."""
    runs = []
    for device in ("cuda", "cpu"):
        params = make(device=device, dtype=torch.float64)
        optimizer = tilestep.Prodigy(params, lr=1.0)
        for step in range(6):
            set_gradients(params, step=step)
            optimizer.step()
        runs.append(params)
    assert_close(*runs, 1e-9)


def many(count: int = 2000, size: int = 6000, dtype: torch.dtype = torch.bfloat16) -> Params:
    params = [torch.nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB", "Adafactor", "Prodigy", "ScheduleFreeAdamW"])
def test_a_steady_step_never_waits(name: str) -> None:
    params = many(100, 6000)
    optimizer = getattr(tilestep, name)(params, lr=1e-3, max_grad_norm=1.0, skip_nonfinite=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    with no_synchronization():
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        for param in params:  # as after zero_grad(set_to_none=True) and backward
            param.grad = param.grad.clone()
        optimizer.step()
        assert optimizer.grad_norm.is_cuda and optimizer.skipped_steps.is_cuda


def test_launches_and_copies_of_a_step_do_not_depend_on_the_number_of_tensors() -> None:
    for count in (10, 2000):
        params = many(count, 3000)
        plain, clipped = tilestep.AdamW(params), tilestep.AdamW(params, max_grad_norm=1.0)
        for optimizer, kernels in ((plain, 2), (clipped, 4)):
            optimizer.step()
            seen = trace(optimizer.step, CUDA)
            assert seen.kernels <= kernels and seen.copies == 0, seen
        for param in params:
            param.grad = param.grad.clone()
        assert trace(plain.step, CUDA).copies == 1
        plain.param_groups[0]["lr"] = 0.5
        assert trace(plain.step, CUDA).copies == 1


@pytest.mark.parametrize("name", [*NAMES, "Prodigy"])
def test_launches_of_no_rule_depend_on_the_number_of_tensors(name: str) -> None:
    launches = []
    for count in (3, 300):
        params = make([shape for _ in range(count) for shape in ((33, 9), (70,))])
        set_gradients(params, step=0)
        optimizer = getattr(tilestep, name)(params)
        for _ in range(3):
            optimizer.step()
        launches.append(trace(optimizer.step, CUDA).launches)
    assert launches[0] == launches[1] > 0


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor"])
def test_a_step_takes_no_memory_and_tables_little(name: str) -> None:
    shape = (1024, 1024) if name == "Adafactor" else (1 << 20,)
    params = [torch.nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) for _ in range(64)]
    for param in params:
        param.grad = torch.ones_like(param)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = getattr(tilestep, name)(params, lr=1e-3, max_grad_norm=1.0)
    optimizer.step()
    torch.cuda.synchronize()
    state = sum(value.numel() * value.element_size() for held in optimizer.state.values() for value in held.values())
    elements = 64 << 20
    # Adafactor's tiles of 64 x 128 elements each leave a sum for every row and column of theirs, in float32.
    sums = 4 * (elements // 64 + elements // 128) if name == "Adafactor" else 0
    assert torch.cuda.memory_allocated() - before - state <= (1 << 20) + elements // 50 + 2 * sums
    settled = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - settled <= 1 << 20
    assert torch.cuda.memory_allocated() == settled


def test_gradients_and_dropped_optimizers_give_their_memory_back() -> None:
    tilestep.AdamW(many(3), max_grad_norm=1.0).step()
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    params = many(50, 10_000)
    for param in params[:5]:
        param.grad = torch.ones(10_000, 2, device="cuda", dtype=param.dtype)[:, 0]  # not dense
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0, skip_above=tilestep.TimesMean(2.0))
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.zero_grad(set_to_none=True)
    assert before - torch.cuda.memory_allocated() >= 50 * 20_000
    del optimizer, params, param
    gc.collect()
    assert torch.cuda.memory_allocated() == start


def test_more_than_two_to_the_31_elements() -> None:
    count = 2**31 + 5 * 4096 + 3
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * count:
        pytest.skip(f"needs {6 * count / 2**30:.0f} GiB of device memory")
    param = torch.nn.Parameter(torch.ones(count, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    places = [0, 2**31 - 1, 2**31, 2**31 + 4097, count - 1]
    for place in places:
        param.grad[place] = 2.0
    small = torch.nn.Parameter(torch.ones(3, device="cuda", dtype=torch.bfloat16))
    small.grad = torch.ones_like(small)
    optimizer = tilestep.SGD([param, small], lr=0.25, max_grad_norm=1e9)
    optimizer.step()
    assert [param[place].item() for place in places] == [0.5] * 5
    assert small.tolist() == [0.75] * 3
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(4 * 5 + 3), rel=1e-6)
    assert (param == 1.0).sum().item() == count - 5
    assert optimizer.state[param].keys() == {"step"}


def test_steps_on_several_streams() -> None:
    runs = []
    for streams in ([torch.cuda.current_stream()], [torch.cuda.Stream() for _ in range(3)]):
        params = make([(500_001,), (64, 33)])
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0)
        previous = torch.cuda.current_stream()
        for step in range(9):
            stream = streams[step % len(streams)]
            stream.wait_stream(previous)
            with torch.cuda.stream(stream):
                set_gradients(params, step=step)
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.step()
                for param in params:
                    param.grad.record_stream(stream)
            previous = stream
        torch.cuda.synchronize()
        runs.append(params)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_plan_of_another_stream_reads_what_was_loaded(max_grad_norm: float | None) -> None:
    """Loaded step counts and the numbers of the last decision are the first stream's memory, and are dropped then."""
    runs = []
    for side in (None, torch.cuda.Stream()):
        params = make([(5001,), (64, 33), (7,)])
        optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=max_grad_norm)
        for step in range(3):
            set_gradients(params, step=step)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        set_gradients(params, step=3)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            optimizer.step()
        taken = [torch.full((), math.nan, device=CUDA) for _ in range(2000)]
        torch.cuda.synchronize()
        runs.append((params, optimizer.skipped_steps, [optimizer.state[param]["step"].item() for param in params]))
        del taken
    (mine, *numbers), (others, *expected) = runs
    assert numbers == expected and all(map(torch.equal, mine, others))


def spread(devices: list[str], max_grad_norm: float) -> tuple[Params, tilestep.Optimizer]:
    params = make(device="cpu")
    params = [
        torch.nn.Parameter(param.detach().to(devices[index % len(devices)])) for index, param in enumerate(params)
    ]
    optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=max_grad_norm)
    for step in range(4):
        set_gradients(params, step=step)
        if step == 2:
            params[1].grad[0] = math.inf
            optimizer.found_inf = torch.ones((), device=devices[0])
        optimizer.step()
        vars(optimizer).pop("found_inf", None)
    return params, optimizer


def test_parameters_on_cpu_and_gpu_share_one_norm() -> None:
    expected, one = spread(["cpu"], 0.5)
    params, two = spread(["cuda", "cpu"], 0.5)
    assert_close(params, expected, 2e-5)
    assert one.grad_norm.item() == pytest.approx(two.grad_norm.item(), rel=1e-5)
    assert int(one.skipped_steps) == int(two.skipped_steps) == 1


@pytest.mark.two_gpus
def test_parameters_on_two_gpus_share_one_norm() -> None:
    expected, one = spread(["cpu"], 0.5)
    params, two = spread(["cuda:1", "cuda:0"], 0.5)
    assert_close(params, expected, 2e-5)
    assert one.grad_norm.item() == pytest.approx(two.grad_norm.item(), rel=1e-5)
    assert int(one.skipped_steps) == int(two.skipped_steps) == 1
    assert params[0].device != params[1].device


@pytest.mark.two_gpus
def test_a_device_that_is_not_the_current_one() -> None:
    with torch.cuda.device(0):
        params = make(device="cuda:1")
        expected = make(device="cpu")
        pairs = [(tilestep.LAMB(each, lr=0.1, max_grad_norm=1.0), each) for each in (params, expected)]
        for step in range(3):
            for optimizer, each in pairs:
                set_gradients(each, step=step)
                optimizer.step()
        assert torch.cuda.current_device() == 0
    assert_close(params, expected, 2e-5)


@pytest.mark.parametrize("change", ["channels last", "transposed", "gaps"])
def test_a_gradients_layout_may_change_from_step_to_step(change: str) -> None:
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
        "transposed": lambda tensor: tensor.transpose(0, 3).contiguous().transpose(0, 3),
        "gaps": lambda tensor: torch.zeros(*tensor.shape[:-1], 9, device="cuda")[..., :5].copy_(tensor),
    }
    mine, theirs = make([(40, 3, 5, 5), (7,)]), make([(40, 3, 5, 5), (7,)])
    ours, torchs = tilestep.AdamW(mine), torch.optim.AdamW(theirs)
    for step in range(6):
        set_gradients(mine, theirs, step=step)
        if step % 3:
            mine[0].grad = layouts[change](mine[0].grad)
        ours.step()
        torchs.step()
    assert_close(mine, theirs, 2e-5)


def test_parameters_that_move_between_devices() -> None:
    mine, theirs = make(), make()
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    for step, device in enumerate(["cuda", "cpu", "cuda"]):
        for param in (*mine, *theirs):
            param.grad = None
            param.data = param.data.to(device)
        set_gradients(mine, theirs, step=step)
        ours.step()
        torchs.step()
    assert_close(mine, theirs, 2e-5)
