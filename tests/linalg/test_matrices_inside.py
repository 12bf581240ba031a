"""Stacks, heads, splits and convolutions: each matrix inside of a tensor as a parameter of its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from state_files import saved_and_loaded

import tilestep
from tilestep.backends.eager import EagerPasses
from tilestep.execution.zero.buckets import Options
from tilestep.execution.zero.core import items_of
from tilestep.linalg.orthogonal import work
from tilestep.linalg.views import find_matrices
from tilestep.optimizer import build


class Case(NamedTuple):
    """A tensor, what says which matrices it holds, and these as views."""

    shape: tuple[int, ...]
    given: dict[str, Any]
    pieces: Callable[[torch.Tensor], list[torch.Tensor]]


def split_apart(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Three groups of queries, keys and values."""
    groups = tensor.unflatten(-2, (3, 8))
    return [groups[..., first:stop, :].flatten(-3, -2) for first, stop in ((0, 4), (4, 6), (6, 8))]


CASES = {
    "stack": Case((5, 9, 12), {}, lambda tensor: list(tensor)),
    "stack of stacks": Case((2, 3, 12, 8), {}, lambda tensor: list(tensor.flatten(0, 1))),
    "heads": Case((16, 10), {"heads": 4}, lambda tensor: list(tensor.unflatten(0, (4, 4)))),
    "heads of experts": Case((3, 8, 5), {"heads": 2}, lambda tensor: list(tensor.reshape(6, 4, 5))),
    "convolution": Case((8, 4, 3, 3), {"flatten": True}, lambda tensor: [tensor.flatten(1)]),
    "heads of a convolution": Case((8, 4, 3, 3), {"flatten": True, "heads": 2}, lambda t: list(t.reshape(2, 4, 36))),
    "equal splits": Case((12, 6), {"splits": (4, 4, 4)}, lambda tensor: list(tensor.unflatten(0, (3, 4)))),
    "splits": Case((16, 10), {"splits": [8, 4, 4]}, lambda tensor: [tensor[:8], tensor[8:12], tensor[12:]]),
    "splits in groups": Case((24, 10), {"splits": (4, 2, 2)}, split_apart),
    "splits of experts": Case((2, 24, 7), {"splits": (4, 2, 2)}, lambda t: [p for e in t for p in split_apart(e)]),
    "splits of a convolution": Case(
        (6, 2, 3, 3), {"flatten": True, "splits": (4, 2)}, lambda t: [*t.flatten(1).split((4, 2))]
    ),
}
CUT = [name for name in CASES if name.startswith("splits")]


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Twins:
    """A tensor, and its matrices as parameters of their own."""

    def __init__(self, case: Case, make: Callable[[Any, dict[str, Any]], Any], param: torch.Tensor) -> None:
        self.case, self.param = case, torch.nn.Parameter(param)
        self.own = [torch.nn.Parameter(piece.detach().clone()) for piece in case.pieces(param)]
        self.optimizer = make([("block.weight", self.param)], case.given)
        self.others = make([(f"piece_{place}", piece) for place, piece in enumerate(self.own)], {})

    def step(self, seed: int, lay: Callable[[torch.Tensor], torch.Tensor] = torch.clone, factor: float = 1.0) -> None:
        gradient = factor * drawn(self.case.shape, 100 + seed, self.param.dtype)
        self.param.grad = lay(gradient)
        for piece, own in zip(self.own, self.case.pieces(gradient)):
            piece.grad = own.clone()
        self.optimizer.step()
        self.others.step()

    def compare(self, **tolerance: Any) -> None:
        for found, wanted in zip(self.case.pieces(self.param.detach()), self.own, strict=True):
            torch.testing.assert_close(found, wanted.detach(), **(tolerance or {"rtol": 0, "atol": 0}))


def muon(**arguments: Any) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda params, given: tilestep.Muon(params, lr=0.1, **arguments, **given)


def by_group(rule: Any, **arguments: Any) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda params, given: tilestep.Optimizer([{"params": params, **given}], rule, lr=0.1, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_each_matrix_is_a_parameter_of_its_own_to_the_bit(name: str) -> None:
    for dtype, arguments in (
        (torch.float32, {"adjust_lr_fn": "match_rms_adamw"}),
        (torch.float64, {"ns_coefficients": "polar_express", "nesterov": False}),
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"master_weights": "remainder", "skip_nonfinite": True}),
    ):
        twins = Twins(CASES[name], muon(**arguments), drawn(CASES[name].shape, 0, dtype))
        for step in range(3):
            twins.step(step, factor=float("inf") if step == 1 and "skip_nonfinite" in arguments else 1.0)
            twins.compare()
        state = twins.optimizer.state[twins.param]
        assert state["momentum_buffer"].shape == twins.param.shape and float(state["step"]) == 3 - (
            "skip_nonfinite" in arguments
        )
        for found, piece in zip(twins.case.pieces(state["momentum_buffer"]), twins.own):
            assert torch.equal(found, twins.others.state[piece]["momentum_buffer"])


@pytest.mark.parametrize("name", CASES)
def test_eager_steps_see_the_same_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    rules = [tilestep.registry["Muon"], normalized] if name in ("stack", "heads", "splits") else [normalized]
    for rule in rules:
        twins = Twins(CASES[name], by_group(rule), drawn(CASES[name].shape, 0))
        for step in range(2):
            twins.step(step)
            twins.compare(rtol=1e-5, atol=1e-6)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "with gaps": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "unaligned": lambda tensor: torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape),
    "first dimension last": lambda tensor: tensor.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_however_parameters_and_gradients_lie(name: str) -> None:
    for lay in LAYOUTS.values():
        start = lay(drawn(CASES[name].shape, 0))
        twins = Twins(CASES[name], muon(), start)
        twins.step(0, lay)
        twins.step(1)
        twins.step(2, lay)
        twins.compare()
        twins.param.data = drawn(CASES[name].shape, 7)  # moved, and other values
        for piece, own in zip(twins.own, twins.case.pieces(twins.param.data)):
            piece.data.copy_(own)
        twins.step(3)
        twins.compare()


def rowed(param: Any, grad: Any, second: Any, *, lr: Any = 0.1) -> Any:
    """A number a row that is kept, and norms of the matrix, as rules normalize updates."""
    update = tilestep.orthogonalize(grad)
    second = second + 0.1 * ((update * update).mean(dim=-1, keepdim=True) - second)
    scaled = update / (second.sqrt() + 1e-3)
    return param - lr * scaled * (update.norm() / (scaled.norm() + 1e-7)), second


rowed = tilestep.rule(rowed, states={"second": tilestep.State(shape="row")})


@tilestep.rule
def normalized(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Reductions over all of the matrix, its rows and its columns."""
    update = tilestep.orthogonalize(grad) * grad.norm()
    return param - lr * update / update.abs().amax(dim=-1, keepdim=True) - lr * grad.mean(dim=-2, keepdim=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "rule", [rowed, normalized, tilestep.cautious(tilestep.registry["Muon"])], ids=lambda r: r.name
)
def test_rules_reduce_over_each_matrix_alone(rule: tilestep.Rule, name: str) -> None:
    case = CASES[name]
    if rule is rowed and ("flatten" in case.given or name in ("splits in groups", "splits of experts")):
        with pytest.raises(tilestep.MatrixError, match="rowed keeps 'second' per row or column of the parameter"):
            Twins(case, by_group(rule), drawn(case.shape, 0))
        return
    twins = Twins(case, by_group(rule), drawn(case.shape, 0))
    for step in range(3):
        twins.step(step)
        twins.compare(rtol=1e-5, atol=1e-6)


def test_matrices_of_one_shape_share_batches_wherever_they_are() -> None:
    shapes = [(4, 9), (3, 4, 9), (8, 9), (2, 2, 4, 9)]
    params = [torch.nn.Parameter(drawn(shape, place)) for place, shape in enumerate(shapes)]
    plain = [torch.nn.Parameter(one.detach().clone()) for param in params for one in param.reshape(-1, 4, 9)]
    before = tilestep.limit_workspace(3 * (2 * 4 * 9 + 5 * 4 * 4) * 2)
    try:
        groups = [{"params": params[:2]}, {"params": [params[2]], "heads": 2}, {"params": [params[3]]}]
        optimizers = [tilestep.Muon(groups, lr=0.1), tilestep.Muon(plain, lr=0.1)]
    finally:
        tilestep.limit_workspace(before)
    for step in range(2):
        for place, param in enumerate(params):
            param.grad = drawn(shapes[place], 10 * step + place)
        for piece, gradient in zip(plain, [g for param in params for g in param.grad.reshape(-1, 4, 9)]):
            piece.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for found, wanted in zip([one for param in params for one in param.reshape(-1, 4, 9)], plain):
        torch.testing.assert_close(found, wanted)
    [batch] = optimizers[0].plan.engines[0].passes[0].matrices.batches
    assert batch.counts == [1, 3, 2, 4] and len(batch.index) == 10 and batch.chunk < 10
    operand = batch.arrays["scratch_0"]
    assert optimizers[0].plan.engines[0].entries[1].arrays["scratch_0"].data_ptr() == operand[1].data_ptr()


def test_random_bits_and_missing_gradients_are_those_of_the_parameter() -> None:
    """Of a rule that only looks at matrices: an element is rounded as in a parameter without splits."""

    @tilestep.rule
    def looks(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad + 0.0 * tilestep.orthogonalize(grad)

    found = []
    for given in ({}, {"splits": (8, 4, 4)}, {"splits": (4, 2, 2)}, {"heads": 2}):
        params = [torch.nn.Parameter(drawn((16, 10), 0, torch.bfloat16)) for _ in range(2)]
        optimizer = tilestep.Optimizer([{"params": params, **given}], looks, lr=0.03, rounding="stochastic", seed=3)
        for step in range(3):
            params[1].grad = drawn((16, 10), step, torch.bfloat16)
            params[0].grad = params[1].grad.clone() if step == 1 else None
            optimizer.step()
        found.append([param.detach() for param in params])
        assert [float(optimizer.state[param]["step"]) for param in params] == [1, 3]
    assert all(torch.equal(*pair) for others in found[1:] for pair in zip(found[0], others))
    assert not torch.equal(*found[0])


def test_patterns_choose_by_name_and_groups_have_their_own() -> None:
    named = {
        "attention.q_proj.weight": (16, 6),
        "attention.k_proj.weight": (8, 6),
        "attention.qkv.weight": (16, 6),
        "experts.up": (3, 9, 6),
        "stem.weight": (4, 2, 3, 3),
        "down.weight": (6, 9),
    }
    params = {name: torch.nn.Parameter(drawn(shape, 0)) for name, shape in named.items()}
    optimizer = tilestep.Muon(
        params.items(),
        heads={r"q_proj": 4, "k_proj": 2},
        splits={r"\.qkv\.": (8, 4, 4)},
        flatten={"^stem": True},
    )

    def seen() -> dict[str, list[tuple[int, int]]]:
        entries = optimizer.fitting_plan(ahead=True).engines[0].entries
        held = {name: [entry for entry in entries if f"({name})" in entry.share.label] for name in named}
        return {name: [entry.shape for entry in entries] for name, entries in held.items()}

    wanted: dict[str, list[tuple[int, int]]] = {
        "attention.q_proj.weight": [(4, 6)],
        "attention.k_proj.weight": [(4, 6)],
        "attention.qkv.weight": [(8, 6), (4, 6), (4, 6)],
        "experts.up": [(9, 6)],
        "stem.weight": [(4, 18)],
        "down.weight": [(6, 9)],
    }
    assert seen() == wanted
    [group] = optimizer.param_groups
    group["heads"]["q_proj"] = 2  # in place
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert seen() == {**wanted, "attention.q_proj.weight": [(8, 6)]}
    group["splits"] = {"qkv": (8, 8)}
    optimizer.step()
    assert seen()["attention.qkv.weight"] == [(8, 6)]
    assert tilestep.Muon([{"params": [params["stem.weight"]], "flatten": True}]).param_groups[0]["heads"] is None


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ((4, 2, 3, 3), {}, r"w\) of shape \(4, 2, 3, 3\): its last dimensions are a convolution's kernel; flatten"),
        ((6, 4), {"heads": 4}, r"w\) of shape \(6, 4\): its 6 rows are not divisible by heads=4"),
        (
            (6, 4),
            {"splits": (4, 1)},
            r"w\) of shape \(6, 4\): its 6 rows are not a multiple of 5, the sum of splits=\(4, 1\)",
        ),
        (
            (6, 4),
            {"splits": (4, 2), "heads": 2},
            r"w\) of shape \(6, 4\): it has heads and splits; set only one of them",
        ),
        ((6,), {"heads": 2}, r"w\) of shape \(6,\) is not a matrix, and Muon works on matrices only"),
        ((6, 4), {"heads": {"w": 2}, "splits": {"w": (4, 2)}}, "it has heads and splits"),
        ((6, 4), {"heads": 0}, "Invalid heads: 0; it must be a number of blocks of rows"),
        ((6, 4), {"heads": True}, "Invalid heads: True"),
        ((6, 4), {"splits": ()}, r"Invalid splits: \(\); it must be sizes of blocks of rows"),
        ((6, 4), {"splits": {"w": (4, -2)}}, "Invalid splits"),
        ((6, 4), {"flatten": "yes"}, "Invalid flatten: 'yes'; it must be True or False"),
        ((6, 4), {"heads": {re.compile("w"): 2}}, "pattern .* must be a string"),
        ((6, 4), {"heads": {"w(": 2}}, r"Invalid heads: 'w\(' is not a regular expression: missing"),
        ((6, 4), {"heads": {"w": 2, "v": 3}}, "heads: pattern 'v' matches no parameter; their names are w"),
    ],
)
def test_what_cannot_be_is_refused_by_name(shape: tuple[int, ...], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tilestep.Muon([("w", torch.nn.Parameter(torch.ones(shape)))], **given)


def test_patterns_need_names_and_rules_of_matrices() -> None:
    with pytest.raises(ValueError, match="heads: patterns need names of parameters"):
        tilestep.Muon([torch.nn.Parameter(torch.ones(4, 4))], heads={"w": 2})
    with pytest.raises(ValueError, match="AdamW does not work on matrices: leave heads out of its group"):
        tilestep.Optimizer([{"params": [torch.nn.Parameter(torch.ones(4, 4))], "heads": 2}], "AdamW")
    with pytest.raises(ValueError, match=r"of shape \(2, 3, 4\) is not a matrix, and SOAP works on matrices only"):
        tilestep.SOAP([torch.nn.Parameter(torch.ones(2, 3, 4))])
    optimizer = tilestep.Muon([("w", torch.nn.Parameter(torch.ones(4, 4)))])
    group = {"params": [("v", torch.nn.Parameter(torch.ones(6, 4)))], "heads": {"w": 2}}
    with pytest.raises(ValueError, match="heads: pattern 'w' matches no parameter; their names are v"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", CUT)
def test_splits_of_several_sizes_are_refused_where_a_parameter_has_one_entry(name: str) -> None:
    case = CASES[name]
    named = (
        [("w", torch.nn.Parameter(drawn((128, 128), 0)))]
        if name == "splits"
        else [("w", torch.nn.Parameter(drawn(case.shape, 0)))]
    )
    given = {"splits": (64, 32, 32)} if name == "splits" else case.given
    for arguments in ({"stats": tilestep.Stats()}, {"track_changes": True}):
        with pytest.raises(
            ValueError, match="has splits of several sizes, which stats and track_changes do not support"
        ):
            tilestep.Muon(named, **given, **arguments)
    if name == "splits":
        with pytest.raises(ValueError, match="has splits of several sizes, which blockwise states do not support"):
            tilestep.Muon(named, **given, state_dtype="int8")


def test_checkpoints_have_parameters_whatever_matrices_they_hold() -> None:
    case = CASES["splits in groups"]
    twins = Twins(case, muon(), drawn(case.shape, 0))
    for step in range(2):
        twins.step(step)
    saved = saved_and_loaded(twins.optimizer.state_dict())
    resumed = torch.nn.Parameter(twins.param.detach().clone())
    optimizer = tilestep.Muon([("block.weight", resumed)], lr=0.5)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["splits"] == case.given["splits"] and optimizer.param_groups[0]["lr"] == 0.1
    copied = copy.deepcopy(optimizer)
    [other] = copied.param_groups[0]["params"]
    for param, one in ((resumed, optimizer), (other, copied)):
        param.grad = drawn(case.shape, 102)
        one.step()
    twins.step(2)
    assert torch.equal(resumed, twins.param) and torch.equal(other, twins.param)
    theirs = torch.optim.Muon([torch.nn.Parameter(torch.ones(24, 10))])
    theirs.load_state_dict(saved)
    theirs.param_groups[0]["params"][0].grad = torch.ones(24, 10)
    theirs.step()
    matrix = tilestep.Muon([("block.weight", torch.nn.Parameter(torch.ones(24, 10)))], heads=2)
    matrix.load_state_dict(
        {**saved, "param_groups": torch.optim.Muon([torch.ones(24, 10)]).state_dict()["param_groups"]}
    )
    assert matrix.param_groups[0]["heads"] == 2


def test_empty_ones_are_left_alone() -> None:
    shapes = [(0, 4, 6), (3, 0, 6), (2, 4, 0), (2, 4, 6), (0, 5)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    groups = [{"params": params[:4]}, {"params": params[4:], "splits": (2, 1)}]
    optimizer = tilestep.Muon(groups, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert bool(params[3].detach().ne(0).all())


def test_matrices_are_found_by_the_larger_dimensions() -> None:
    assert [one.rows for one in find_matrices((2, 8, 8, 9))] == [8]
    with pytest.raises(ValueError, match="convolution"):
        find_matrices((2, 8, 7, 7))
    assert find_matrices((2, 3, 4))[0].count(24) == 2


def test_shard_deals_matrices_by_their_operations() -> None:
    numbers = [1e-7, *[3.4445, -4.775, 2.0315] * 5]
    expected = {
        ((64, 32), ()): work(64, 32, numbers),
        ((6, 64, 32), ()): 6 * work(64, 32, numbers),
        ((64, 16, 3, 3), (("flatten", True),)): work(64, 144, numbers),
        ((64, 32), (("heads", 4),)): 4 * work(16, 32, numbers),
        ((64, 32), (("splits", (10, 6)),)): work(40, 32, numbers) + work(24, 32, numbers),
        ((3, 64, 32), (("splits", (40, 24)),)): 3 * (work(40, 32, numbers) + work(24, 32, numbers)),
    }
    for (shape, given), operations in expected.items():
        param = torch.nn.Parameter(torch.zeros(shape))
        optimizer = tilestep.Muon([{"params": [param], **dict(given)}], lr=0.1)
        options = Options(True, True, None, None, None, "contiguous", "auto", True)
        assert items_of(optimizer, options)[param].cost == int(operations)
