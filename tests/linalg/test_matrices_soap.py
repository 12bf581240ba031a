"""SOAP against its authors' algorithm in float64, and what the host spares of it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep
from tilestep import StateError
from tilestep.backends.eager import EagerPasses
from tilestep.optimizer import build
from tilestep.runtime.batches import Conditions

SHAPES = [(6, 7), (7, 6), (8, 8), (6, 7), (4, 4)]


class Published:
    """The algorithm of the authors' soap.py for one matrix or vector, in the operand's dtype.

    A side that is longer than `max_precond_dim` has neither Gram matrix nor basis, and vectors have none.
    """

    def __init__(self, param: torch.Tensor, **changes: Any) -> None:
        self.param = param.clone()
        self.options = {
            "lr": 3e-3,
            "betas": (0.95, 0.95),
            "shampoo_beta": -1.0,
            "eps": 1e-8,
            "weight_decay": 0.01,
            "precondition_frequency": 10,
            "max_precond_dim": 10000,
            "normalize_grads": False,
            "correct_bias": True,
            **changes,
        }
        self.step = 0
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
        short = [param.dim() > 1 and side <= self.options["max_precond_dim"] for side in param.shape]
        self.grams = {
            place: torch.zeros(side, side, dtype=param.dtype) for place, side in enumerate(param.shape) if short[place]
        }
        self.bases: dict[int, torch.Tensor] | None = None

    def project(self, value: torch.Tensor) -> torch.Tensor:
        assert self.bases is not None
        for place, basis in self.bases.items():
            value = torch.tensordot(basis, value, ([0], [place])).movedim(0, place)
        return value

    def back(self, value: torch.Tensor) -> torch.Tensor:
        assert self.bases is not None
        for place, basis in self.bases.items():
            value = torch.tensordot(basis, value, ([1], [place])).movedim(0, place)
        return value

    def precondition(self, grad: torch.Tensor) -> None:
        options = self.options
        if self.bases is not None:
            self.exp_avg = self.back(self.exp_avg)
        decay = options["shampoo_beta"] if options["shampoo_beta"] >= 0 else options["betas"][1]
        for place, gram in self.grams.items():
            gram.lerp_(grad @ grad.mT if place == 0 else grad.mT @ grad, 1 - decay)
        if self.bases is None:
            shifts = {place: 1e-30 * torch.eye(gram.size(0), dtype=gram.dtype) for place, gram in self.grams.items()}
            shifted = {place: gram + shifts[place] for place, gram in self.grams.items()}
            self.bases = {place: torch.linalg.eigh(gram)[1].flip(1) for place, gram in shifted.items()}
        if self.step > 0 and self.step % options["precondition_frequency"] == 0:
            for place, gram in self.grams.items():
                basis = self.bases[place]
                order = torch.argsort(torch.diag(basis.mT @ gram @ basis), descending=True)
                self.exp_avg_sq = self.exp_avg_sq.index_select(place, order)
                self.bases[place] = torch.linalg.qr(gram @ basis[:, order])[0]
        if self.step > 0:
            self.exp_avg = self.project(self.exp_avg)

    def take(self, grad: torch.Tensor) -> None:
        if self.bases is None:
            self.precondition(grad)
            return
        options = self.options
        beta1, beta2 = options["betas"]
        self.step += 1
        projected = self.project(grad)
        self.exp_avg.mul_(beta1).add_(projected, alpha=1 - beta1)
        self.exp_avg_sq.mul_(beta2).add_(projected.square(), alpha=1 - beta2)
        size = options["lr"]
        if options["correct_bias"]:
            size = size * (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        update = self.back(self.exp_avg / self.exp_avg_sq.sqrt().add_(options["eps"]))
        if options["normalize_grads"]:
            update = update / (1e-30 + torch.mean(update**2) ** 0.5)
        self.param.add_(update, alpha=-size)
        if options["weight_decay"] > 0:
            self.param.add_(self.param, alpha=-options["lr"] * options["weight_decay"])
        self.precondition(grad)


def drawn(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def params_of(dtype: torch.dtype = torch.float64) -> list[Any]:
    return [torch.nn.Parameter(drawn(shape, seed).to(dtype)) for seed, shape in enumerate(SHAPES)]


def gradient(place: int, step: int) -> torch.Tensor:
    """Gradients with directions that are larger than others, and change slowly."""
    rows, columns = SHAPES[place]
    left, right = drawn((rows, rows), 50 + place), drawn((columns, columns), 60 + place)
    return left @ drawn((rows, columns), 1000 * step + place) @ right / (rows * columns) ** 0.5


CHANGES: list[dict[str, Any]] = [
    {"precondition_frequency": 3},
    {"precondition_frequency": 1, "lr": 0.02},
    {"precondition_frequency": 4, "shampoo_beta": 0.8, "betas": (0.9, 0.99), "weight_decay": 0.0},
    {"precondition_frequency": 5, "normalize_grads": True, "correct_bias": False},
]


@pytest.mark.parametrize("rank", [1, 6])
def test_bases_of_null_spaces_are_those_of_rounding(rank: int) -> None:
    """The authors' algorithm does not agree with itself there; with Gram matrices of full rank both do."""
    begin = drawn((6, 7), 0)[:, :6]
    optimizer: Any = tilestep.SOAP([param := torch.nn.Parameter(begin.clone())], precondition_frequency=3)
    published, nudged = (Published(begin, precondition_frequency=3) for _ in range(2))
    for step in range(12):
        grad = drawn((6, rank), 2 * step) @ drawn((rank, 6), 2 * step + 1) if step < 2 else gradient(0, step)[:, :6]
        param.grad = grad
        published.take(grad)
        nudged.take(torch.nextafter(grad, 2 * grad))
        optimizer.step()
    moved = (published.param - begin).norm()
    off, own = (published.param - param.detach()).norm() / moved, (published.param - nudged.param).norm() / moved
    if rank < 6:
        assert own > 1e-3 and off < 10 * own
    else:
        assert own < 1e-9 and off < 1e-9


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_it_is_the_authors_algorithm(changes: dict[str, Any]) -> None:
    params = params_of()
    published = [Published(param.detach(), **changes) for param in params]
    optimizer = tilestep.SOAP(params, **changes)
    for step in range(14):
        for place, (param, other) in enumerate(zip(params, published)):
            param.grad = gradient(place, step)
            other.take(param.grad)
        optimizer.step()
        for param, other in zip(params, published):
            torch.testing.assert_close(param.detach(), other.param, rtol=1e-7, atol=1e-9)
    for param, other in zip(params, published):
        state = optimizer.state[param]
        torch.testing.assert_close(state["gram_left"], other.grams[0])
        torch.testing.assert_close(state["exp_avg_sq"], other.exp_avg_sq, rtol=1e-6, atol=1e-9)


LIMIT = 6
MIXED = [(6, 7), (7, 6), (8, 8), (6, 6), (4, 5), (9,), (3,), (), (30, 6)]


def _mixed(step: int) -> list[torch.Tensor]:
    return [drawn(shape, 100 * step + place) for place, shape in enumerate(MIXED)]


@pytest.mark.parametrize("backend", ["cpp", "eager"])
def test_long_sides_and_vectors_are_left_alone_as_by_the_authors(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "eager":
        monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    changes: dict[str, Any] = {"precondition_frequency": 3, "max_precond_dim": LIMIT, "lr": 0.01}
    params = [torch.nn.Parameter(start) for start in _mixed(99)]
    published = [Published(param.detach(), **changes) for param in params]
    optimizer = tilestep.SOAP(params, **changes)
    for step in range(11):
        for param, other, grad in zip(params, published, _mixed(step)):
            param.grad = grad.clone()
            other.take(grad)
        optimizer.step()
        for shape, param, other in zip(MIXED, params, published):
            torch.testing.assert_close(
                param.detach(), other.param, rtol=1e-7, atol=1e-9, msg=lambda text, shape=shape: f"{shape}: {text}"
            )
    for shape, param in zip(MIXED, params):
        sides = {"left": shape[0] <= LIMIT, "right": shape[1] <= LIMIT} if len(shape) == 2 else {}
        wanted = {f"{kind}_{side}" for side, short in sides.items() if short for kind in ("gram", "basis")}
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq", *wanted}, shape


def test_the_side_of_a_vocabulary_costs_nothing() -> None:
    embedding = torch.nn.Parameter(torch.ones(10_001, 8))
    optimizer = tilestep.SOAP([embedding])
    embedding.grad = torch.ones(10_001, 8)
    optimizer.step()
    assert "gram_left" not in optimizer.state[embedding]
    assert tuple(optimizer.state[embedding]["gram_right"].shape) == (8, 8)


def test_one_sided_states_go_through_a_checkpoint() -> None:
    def trained(params: list[Any], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for param, grad in zip(params, _mixed(step)):
                param.grad = grad
            optimizer.step()

    params = [torch.nn.Parameter(start) for start in _mixed(99)]
    optimizer = tilestep.SOAP(params, precondition_frequency=2, max_precond_dim=LIMIT)
    trained(params, optimizer, range(4))
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = tilestep.SOAP(others, lr=7.0)
    resumed.load_state_dict(optimizer.state_dict())
    trained(params, optimizer, range(4, 7))
    trained(others, resumed, range(4, 7))
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize(("limit", "word"), [(4, "loses"), (9, "gets")])
def test_a_side_cannot_change_its_mind_in_the_middle_of_a_training(limit: int, word: str) -> None:
    param = torch.nn.Parameter(drawn((8, 6), 1))
    optimizer = tilestep.SOAP([("weight", param)], precondition_frequency=2, max_precond_dim=7)
    other = tilestep.SOAP([torch.nn.Parameter(drawn((8, 6), 2))], precondition_frequency=2, max_precond_dim=limit)
    optimizer.param_groups[0]["max_precond_dim"] = limit  # nothing has been stepped yet
    optimizer.push()
    optimizer.param_groups[0]["max_precond_dim"] = 7
    for step in range(3):
        for trained in (optimizer, other):
            trained.param_groups[0]["params"][0].grad = drawn((8, 6), 3 + step)
            trained.step()
    before = {name: value.clone() for name, value in optimizer.state[param].items()}
    optimizer.param_groups[0]["max_precond_dim"] = limit
    named = "gram_right, basis_right" if word == "loses" else "gram_left, basis_left"
    with pytest.raises(StateError, match=rf"parameter 0 of group 0 \(weight\) {word} the states {named} in the middle"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in optimizer.state[param].items())
    optimizer.param_groups[0]["max_precond_dim"] = 7
    optimizer.step()
    optimizer.load_state_dict(other.state_dict())  # brings the sides and what is in them
    assert optimizer.param_groups[0]["max_precond_dim"] == limit
    assert set(optimizer.state[param]) == set(next(iter(other.state.values())))
    optimizer.step()


def test_the_rule_called_on_tensors_is_the_step() -> None:
    rule, params = tilestep.registry["SOAP"], params_of()
    values = [[param.detach().clone(), *(torch.zeros_like(param) for _ in range(2))] for param in params]
    for value in values:
        sides = [torch.zeros(side, side, dtype=torch.float64) for side in value[0].shape]
        value += [sides[0], sides[1], sides[0], sides[1]]
    optimizer = tilestep.SOAP(params, precondition_frequency=2)
    for step in range(6):
        for place, param in enumerate(params):
            param.grad = gradient(place, step)
            first, *rest = values[place]
            values[place] = list(rule(first, param.grad, *rest, precondition_frequency=2, step=step + 1))
        optimizer.step()
    for param, value in zip(params, values):
        torch.testing.assert_close(param.detach(), value[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_keep_the_sides_in_float32(dtype: torch.dtype) -> None:
    params = params_of(dtype)
    optimizer = tilestep.SOAP(params, precondition_frequency=3, lr=0.01)
    published = [Published(param.detach().double(), precondition_frequency=3, lr=0.01) for param in params]
    for step in range(7):
        for place, (param, other) in enumerate(zip(params, published)):
            param.grad = gradient(place, step).to(dtype)
            other.take(param.grad.double())
        optimizer.step()
    assert all(optimizer.state[param]["basis_left"].dtype is torch.float32 for param in params)
    # The first Gram matrix of an oblong parameter has a null space, in which any basis will do.
    squares = [place for place, (rows, columns) in enumerate(SHAPES) if rows == columns]
    for place in squares:
        apart = params[place].detach().double() - published[place].param
        assert apart.norm() < (1e-5 if dtype is torch.float32 else 1e-2) * published[place].param.norm()


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[-1])
        return func(*args, **(kwargs or {}))


def test_decompositions_are_made_only_in_the_steps_that_need_them() -> None:
    params = params_of()
    optimizer = tilestep.SOAP(params, precondition_frequency=3)
    shapes = len(set(SHAPES))
    for step in range(8):
        for place, param in enumerate(params):
            param.grad = gradient(place, step)
        with _Calls() as calls:
            optimizer.step()
        counts = [calls.names.count(name) for name in ("_linalg_eigh", "linalg_qr")]
        wanted = [2 * shapes if step == 0 else 0, 2 * shapes if step in (3, 6) else 0]
        assert counts == wanted, step


def test_tensors_that_begin_later_and_skipped_steps() -> None:
    params = params_of()
    optimizer = tilestep.SOAP(params, precondition_frequency=2, lr=0.01, skip_nonfinite=True)
    published = [Published(param.detach(), precondition_frequency=2, lr=0.01) for param in params]
    for step in range(9):
        skips = step == 4
        for place, (param, other) in enumerate(zip(params, published)):
            param.grad = gradient(place, step) if place != 3 or step >= 3 else None
            if param.grad is not None and not skips:
                other.take(param.grad)
        if skips:
            params[0].grad[0, 0] = torch.nan
            before = {name: value.clone() for name, value in optimizer.state[params[2]].items()}
        optimizer.step()
        if skips:
            assert all(torch.equal(value, before[name]) for name, value in optimizer.state[params[2]].items())
    for param, other in zip(params, published):
        torch.testing.assert_close(param.detach(), other.param, rtol=1e-7, atol=1e-9)


def test_a_checkpoint_goes_on_where_it_was() -> None:
    params = params_of()
    optimizer = tilestep.SOAP(params, precondition_frequency=3, lr=0.01)

    def train(chosen: list[Any], steps: range, *optimizers: torch.optim.Optimizer) -> None:
        for step in steps:
            for place, param in enumerate(chosen):
                param.grad = gradient(place, step)
            for optimizer in optimizers:
                optimizer.step()

    train(params, range(5), optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = tilestep.SOAP(others)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(params, range(5, 10), optimizer)
    train(others, range(5, 10), resumed)
    assert all(torch.equal(left, right) for left, right in zip(params, others))


def test_without_a_compiler_the_rule_itself_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    published = [Published(param.detach(), precondition_frequency=2) for param in params]
    monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    optimizer = tilestep.SOAP(params, precondition_frequency=2)
    for step in range(5):
        for place, (param, other) in enumerate(zip(params, published)):
            param.grad = gradient(place, step)
            other.take(param.grad)
        optimizer.step()
    for param, other in zip(params, published):
        torch.testing.assert_close(param.detach(), other.param, rtol=1e-7, atol=1e-9)


def test_what_is_no_matrix_is_refused_by_name() -> None:
    named = [("up.weight", params_of()[0]), ("up.filter", torch.nn.Parameter(torch.ones(5, 3, 3)))]
    with pytest.raises(
        tilestep.MatrixError, match=r"up\.filter.*is not a matrix, and SOAP works on matrices only"
    ) as caught:
        tilestep.SOAP(named)
    said = re.search(r"another rule, as (tilestep\..*) does", str(caught.value))
    assert said is not None
    optimizer = tilestep.SOAP(eval(said[1], {"tilestep": tilestep, "model": named}))
    assert [(optimizer.rule_of(group).name, group["param_names"]) for group in optimizer.param_groups] == [
        ("SOAP", ["up.weight"]),
        ("AdamW", ["up.filter"]),
    ]


class _Counts:
    """Step counts on a device whose copies arrive when the test says."""

    is_cuda = True

    def __init__(self, counts: list[float]) -> None:
        self.now, self._version, self.reads = np.asarray(counts), 0, 0

    def __len__(self) -> int:
        return len(self.now)

    def cpu(self) -> torch.Tensor:
        self.reads += 1
        return torch.from_numpy(self.now.copy())


def test_the_host_knows_counts_that_live_on_a_device() -> None:
    counts = _Counts([4.0, 0.0])
    bounds = Conditions([], counts)  # type: ignore[arg-type]
    active = np.asarray([True, False])
    low, high = bounds.look(active)
    assert (low.tolist(), high.tolist()) == ([4, 0], [4, 0])
    bounds.launched(active, may_skip=False)
    low, high = bounds.look(active)
    assert (low.tolist(), high.tolist()) == ([5, 0], [5, 0]) and counts.reads == 1
    counts.now, counts._version = np.asarray([9.0, 9.0]), 1  # a checkpoint was loaded
    low, high = bounds.look(active)
    assert (low.tolist(), high.tolist()) == ([9, 9], [9, 9]) and counts.reads == 2


@pytest.mark.parametrize("frequency", [1, 10])
def test_gradients_whose_products_overflow_raise_nothing_and_are_adams(frequency: int) -> None:
    """Their Gram matrices are infinite in float32: they are turned by the identity, where the step is Adam's."""
    weight, other = torch.nn.Parameter(torch.ones(5, 6)), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = tilestep.SOAP([weight, other], weight_decay=0.0, precondition_frequency=frequency)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        weight.grad = torch.randn(5, 6, generator=generator) * 1e20
        other.grad = torch.randn(4, 4, generator=generator)
        optimizer.step()
    assert weight.isfinite().all() and (weight - 1).abs().max() < 0.1
    assert other.isfinite().all() and not torch.equal(other.detach(), torch.ones(4, 4))
