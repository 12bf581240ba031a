"""Lists of changed weights beside comparisons of all bits, over any number of steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import tilestep
from tilestep.backends import registry
from tilestep.backends.eager import EagerPasses

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(_BITS[tensor.dtype.itemsize]).reshape(-1)


class Mirror:
    """A copy of parameters that is kept by lists alone, and what has really changed step by step."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.copies = [param.detach().clone().contiguous() for param in params]
        self.changed = [torch.zeros(param.numel(), dtype=torch.bool, device=param.device) for param in params]
        self.last = [bits(param).clone() for param in params]

    def note_step(self) -> None:
        for place, param in enumerate(self.params):
            now = bits(param).clone()
            self.changed[place] |= now != self.last[place]
            self.last[place] = now

    def take(self, optimizer: Any) -> int:
        seen = 0
        listed = {name: (indices, values) for name, indices, values in optimizer.changes(clear=True)}
        for place, param in enumerate(self.params):
            wanted = self.changed[place].nonzero().reshape(-1)
            indices, values = listed.pop(f"0.{place}", (wanted[:0].to(torch.int32), param.detach().reshape(-1)[:0]))
            assert indices.dtype is torch.int32 and values.dtype is param.dtype
            assert torch.equal(indices.long(), wanted), place
            self.copies[place].view(-1)[indices.long()] = values
            assert torch.equal(bits(self.copies[place]), bits(param)), place
            self.changed[place].zero_()
            seen += len(wanted)
        assert not listed
        return seen


def train(optimizer: Any, params: list[torch.nn.Parameter], steps: int = 5, every: int = 2) -> int:
    mirror = Mirror(params)
    generator = torch.Generator().manual_seed(3)
    seen = 0
    for step in range(1, steps + 1):
        for param in params:
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            gradient[torch.rand(param.shape, generator=generator) < 0.4] = 0
            gradient = gradient.to(param.device)
            param.grad = (
                gradient if step % 3 or param.dim() < 2 else gradient.transpose(0, 1).contiguous().transpose(0, 1)
            )
        optimizer.step()
        mirror.note_step()
        if step % every == 0:
            seen += mirror.take(optimizer)
    seen += mirror.take(optimizer)
    assert list(optimizer.changes()) == []
    return seen


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(5)
    tensors = [
        torch.randn(130, 67),
        torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(9, 20),
        torch.randn(33, 5).t(),
        torch.randn(32),
        torch.randn(()),
        torch.randn(0, 3),
    ]
    tensors[2] = torch.randn(9, 40).to(dtype)[:, ::2]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def test_every_list_is_exact() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        params = parameters(dtype)
        assert params[2].stride() != params[2].contiguous().stride()
        assert train(tilestep.SGD(params, lr=1e-3, track_changes=True), params) > 0


@pytest.mark.parametrize("masters", [True, "remainder", "kahan", "int8"])
def test_stored_weights_beside_masters(masters: bool | str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = tilestep.AdamW(params, lr=1e-4, master_weights=masters, track_changes=True)
    seen = train(optimizer, params)
    assert 0 < seen < 4 * sum(param.numel() for param in params)


@pytest.mark.parametrize("rule", ["Adafactor", "LAMB"])
def test_other_rules(rule: str) -> None:
    params = parameters(torch.bfloat16)
    train(getattr(tilestep, rule)(params, lr=1e-3, track_changes=True), params)


def test_matrices_and_their_orthogonal_updates() -> None:
    params = [torch.nn.Parameter(torch.randn(24, 40)), torch.nn.Parameter(torch.randn(40, 24))]
    train(tilestep.Muon(params, lr=1e-3, track_changes=True), params)


def test_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    params = parameters(torch.float32)
    train(tilestep.SGD(params, lr=1e-3, track_changes=True), params)


def test_statistics_and_changes_of_the_same_steps() -> None:
    params = parameters(torch.bfloat16)
    train(tilestep.SGD(params, lr=1e-3, track_changes=True, stats=tilestep.Stats(every=2)), params)


def test_skipped_steps_change_nothing() -> None:
    params = parameters(torch.float32)
    optimizer = tilestep.SGD(params, lr=0.1, track_changes=True, skip_nonfinite=True, stats=tilestep.Stats())
    for param in params:
        param.grad = torch.full_like(param, math.inf)
    optimizer.step()
    assert optimizer.skipped_steps == 1 and list(optimizer.changes()) == []


def test_lists_that_are_not_cleared_grow() -> None:
    param = torch.nn.Parameter(torch.zeros(100))
    optimizer = tilestep.SGD([("weight", param)], lr=1.0, track_changes=True)
    for place in (70, 3):
        param.grad = torch.zeros(100)
        param.grad[place] = -1.0
        optimizer.step()
        listed = list(optimizer.changes(clear=False))
    ((name, indices, values),) = listed
    assert (name, indices.tolist(), values.tolist()) == ("weight", [3, 70], [1.0, 1.0])


def test_writes_from_outside_list_the_whole_tensor_once() -> None:
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    optimizer = tilestep.SGD(params, lr=1.0, track_changes=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros(50)
            param.grad[7] = 1.0
        optimizer.step()
    with torch.no_grad():
        params[1].add_(1.0)
    listed = {name: indices.tolist() for name, indices, _ in optimizer.changes()}
    assert listed == {"0.0": [7], "0.1": list(range(50))}
    for param in params:
        param.grad = torch.zeros(50)
        param.grad[9] = 1.0
    optimizer.step()
    assert {name: indices.tolist() for name, indices, _ in optimizer.changes()} == {"0.0": [9], "0.1": [9]}


@pytest.mark.parametrize("steps", [False, True], ids=["at_once", "after_a_step"])
def test_a_parameter_that_was_given_other_memory_is_listed_wholly(steps: bool) -> None:
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    optimizer = tilestep.SGD(params, lr=1.0, track_changes=True)

    def step() -> None:
        for param in params:
            param.grad = torch.zeros(50)
            param.grad[7] = 1.0
        optimizer.step()

    step()
    optimizer.changes()
    params[1].data = torch.full((50,), 3.0)  # counts no version
    if steps:
        step()
    listed = {name: (indices.tolist(), values) for name, indices, values in optimizer.changes()}
    assert listed["0.1"][0] == list(range(50)) and torch.equal(listed["0.1"][1], params[1].detach())
    assert [listed[name][0] for name in listed if name != "0.1"] == ([[7]] if steps else [])
    step()
    assert {name: indices.tolist() for name, indices, _ in optimizer.changes()} == {"0.0": [7], "0.1": [7]}


@pytest.mark.parametrize("moves", [False, True], ids=["in_place", "other_memory"])
@pytest.mark.parametrize("copied", [False, True], ids=["made", "copied"])
def test_a_write_before_the_first_step_lists_the_whole_tensor(copied: bool, moves: bool) -> None:
    """As a checkpoint that is loaded into the model after its optimizer was made."""
    model = torch.nn.Linear(4, 3)
    optimizer = tilestep.SGD(model.named_parameters(), lr=1.0, track_changes=True)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    if moves:
        model.weight.data = torch.ones(3, 4)  # counts no version
    else:
        with torch.no_grad():
            model.weight.copy_(torch.ones(3, 4))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.view(-1)[1] = 1.0
    optimizer.step()
    assert {name: indices.tolist() for name, indices, _ in optimizer.changes()} == {
        "weight": list(range(12)),
        "bias": [1],
    }
    optimizer.step()
    assert {name: indices.tolist() for name, indices, _ in optimizer.changes()} == {"weight": [1], "bias": [1]}


def test_a_parameter_that_replaces_another_of_its_name_is_listed_wholly() -> None:
    first, second = (torch.nn.Parameter(torch.full((3,), number)) for number in (1.0, 2.0))
    optimizer = tilestep.SGD([first], lr=1.0, track_changes=True)
    for param in (first, second):
        optimizer.param_groups[0]["params"] = [param]
        param.grad = torch.tensor([0.0, 1.0, 0.0])
        optimizer.step()
        listed = [(name, indices.tolist()) for name, indices, _ in optimizer.changes()]
        assert listed == [("0.0", [1] if param is first else [0, 1, 2])]


def test_parameters_without_gradients_in_some_steps() -> None:
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(3)]
    optimizer = tilestep.SGD(params, lr=1.0, track_changes=True)
    for step in range(4):
        for place, param in enumerate(params):
            param.grad = torch.ones(50) if place != step % 3 else None
        optimizer.step()
    optimizer.changes()
    for param in params[:2]:
        param.grad = None
    params[2].grad = torch.zeros(50)
    params[2].grad[1] = 1
    optimizer.step()
    listed = optimizer.changes()
    for _ in range(2):  # a list, which may be read twice
        assert [(name, indices.tolist()) for name, indices, _ in listed] == [("0.2", [1])]


def test_writes_to_parameters_that_have_had_no_gradient() -> None:
    params = [torch.nn.Parameter(torch.zeros(4, 6).t()) for _ in range(3)]
    params[2].requires_grad_(False)
    with torch.inference_mode():
        params.append(torch.nn.Parameter(torch.zeros(3), requires_grad=False))  # counts no versions
    optimizer = tilestep.SGD(params, lr=1.0, track_changes=True)
    params[0].grad = torch.ones(6, 4)
    optimizer.step()
    assert [name for name, *_ in optimizer.changes()] == ["0.0"]
    with torch.no_grad():
        params[1].add_(1.0)
    params[2].data = torch.ones(6, 4)
    params[0].grad = None
    listed = {name: (indices.tolist(), values.tolist()) for name, indices, values in optimizer.changes()}
    assert listed == dict.fromkeys(["0.1", "0.2"], (list(range(24)), [1.0] * 24))
    params[1].grad = torch.zeros(6, 4)
    params[1].grad[0, 1] = 1.0
    optimizer.step()
    assert {name: indices.tolist() for name, indices, _ in optimizer.changes()} == {"0.1": [1]}


def test_bits_outlive_new_tables() -> None:
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    optimizer = tilestep.SGD(params[:1], lr=1.0, track_changes=True)
    params[0].grad = torch.zeros(50)
    params[0].grad[11] = 1.0
    optimizer.step()
    optimizer.add_param_group({"params": params[1:]})
    params[1].grad = torch.ones(50)
    params[0].grad.zero_()[12] = 1.0
    optimizer.step()
    listed = {name: indices.tolist() for name, indices, _ in optimizer.changes()}
    assert listed == {"0.0": [11, 12], "1.0": list(range(50))}


def test_before_any_gradient_nothing_has_changed() -> None:
    optimizer = tilestep.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, track_changes=True)
    assert not list(optimizer.changes())
    optimizer.step()
    assert not list(optimizer.changes())


def test_optimizers_without_tracking() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="track_changes=True"):
        tilestep.SGD([param], lr=0.1).changes()
    with pytest.raises(TypeError, match="Invalid track_changes"):
        tilestep.SGD([param], lr=0.1, track_changes=2)
