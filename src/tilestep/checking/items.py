"""What is checked, one function each: it returns what was found in plain words, or raises `CheckFailure`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..counters import compile_count
from ..devices import is_host
from ..errors import StateError
from ..storage import MASTER_FORMATS, STATE_FORMATS
from ..taps import Stats
from .reference import CheckFailure
from .trials import Subject, Trial, draw

Item = Callable[[Subject], str]

_TILES = ((0,), (1,), (1023,), (1024,), (1025,), (16_383,), (16_385,), (40_001,), (0, 3), (1, 1), (1, 4099), (4099, 1))
_MATRICES = ((0, 3), (1, 1), (1, 67), (67, 1), (130, 9), (31, 33))
_LARGE = ((37, 130), (5000,), (6, 8, 96), (48, 12, 3, 3))
"""Shapes whose states are kept as `state_dtype` says: with short last blocks, and rows of several dimensions."""
_SMALL_TILES = ((0,), (1,), (511,), (513,), (1025,), (0, 3), (1, 1), (1, 519), (519, 1))


def _parameters(subject: Subject, dtype: torch.dtype = torch.float32, shapes: Any = None) -> list[torch.nn.Parameter]:
    wanted = subject.shapes() if shapes is None else subject.shapes(shapes)
    return [torch.nn.Parameter(draw(shape, dtype, subject.device, seed)) for seed, shape in enumerate(wanted, start=1)]


def _follows(dtype: torch.dtype, **options: Any) -> Item:
    def follows_the_formula(subject: Subject) -> str:
        trial = Trial(subject, _parameters(subject, dtype), options).run()
        return f"{trial.steps} steps of {len(trial.params)} tensors agree with the rule's own code in float64"

    return follows_the_formula


def _keeps(state_dtype: str) -> Item:
    """States kept in a format: steps agree from what it has kept, and it keeps what the formula gives."""

    def follows_the_formula(subject: Subject) -> str:
        shapes = subject.shapes(_LARGE)
        try:
            trial = Trial(subject, _parameters(subject, shapes=shapes), {"state_dtype": state_dtype}).run(3)
        except StateError as error:
            return f"refused: {error}"
        changed = sum(
            value.dtype is not torch.float32 and name != "step" and not name.endswith(("_scales", "_scales4"))
            for index in range(len(shapes))
            for name, value in trial.state(index).items()
        )
        if not changed:
            return "the rule has no state that is kept so"
        return f"{trial.steps} steps with {changed} states kept so agree with the rule's own code in float64"

    return follows_the_formula


def sizes(subject: Subject) -> str:
    """Empty, single, odd and long tensors, and those around the size of a tile."""
    interpreted = is_host(subject.device) and _interpreting()
    shapes = subject.shapes(_MATRICES if subject.has_matrices else _SMALL_TILES if interpreted else _TILES)
    Trial(subject, _parameters(subject, shapes=shapes)).run(1 if interpreted else 2)
    longest = max(math.prod(shape) for shape in shapes)
    return f"{len(shapes)} sizes of up to {longest:,} elements agree with the formula"


def _interpreting() -> bool:
    from ..engine.backends import is_interpreting

    return is_interpreting()


def layouts(subject: Subject) -> str:
    """Tensors that lie in memory in other ways than a new one does, and gradients that lie otherwise still."""
    device = subject.device
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def case(name: str, param: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        if param.dim() in subject.graphs:
            cases[name] = param, draw(param.shape, param.dtype, device, 77) if grad is None else grad

    case("unaligned", draw([130], torch.float32, device, 1)[1:])
    case("transposed", draw([6, 11], torch.float32, device, 2).t())
    case("with gaps", draw([9, 8], torch.float32, device, 3)[:, 1:6])
    case("every second element", draw([70], torch.float32, device, 4)[::2])
    image = draw([2, 3, 4, 5], torch.float32, device, 5)
    channels_last = torch.channels_last
    case("channels last", image.to(memory_format=channels_last), image.clone().to(memory_format=channels_last))
    case("channels last with a plain gradient", image.to(memory_format=channels_last), image * 0.5)
    case("a transposed gradient", draw([6, 11], torch.float32, device, 6), draw([11, 6], torch.float32, device, 7).t())
    case(
        "an expanded gradient",
        draw([6, 11], torch.float32, device, 8),
        draw([1], torch.float32, device, 9).expand(6, 11),
    )
    for name, (value, grad) in cases.items():
        trial = Trial(subject, [torch.nn.Parameter(value)])
        trial.params[0].grad = grad
        for _ in range(2):
            try:
                trial.compared_step()
            except CheckFailure as failure:
                raise CheckFailure(f"{name}: {failure}", failure.buffer) from None
    return f"{', '.join(cases)}: all agree with the formula" if cases else "there is no other one to try for this rule"


def groups(subject: Subject) -> str:
    """Two param groups with other numbers, and parameters that have no gradient for a while."""
    moved = _moved(subject, 0.5)
    trial = Trial(subject, _parameters(subject), groups=[moved])
    for turn in range(4):
        trial.set_gradients()
        for index, param in enumerate(trial.params):
            if (index + turn) % 3 == 0:
                param.grad = None
        trial.compared_step()
    return "two param groups with other numbers, and parameters without gradient, agree with the formula"


def _moved(subject: Subject, factor: float) -> dict[str, Any]:
    """Every number times a factor, as far as the rule allows it and takes no other branch."""
    found: dict[str, Any] = {}
    for key, value in subject.hyperparameters.items():
        if isinstance(value, (tuple, list)):
            if not all(isinstance(entry, float) for entry in value):
                continue
            changed: Any = tuple(entry * factor for entry in value)
        elif isinstance(value, float) and value not in (0.0, 1.0) and math.isfinite(value):
            changed = value * factor
        else:
            continue
        if subject.keeps_graph({key: changed}):
            found[key] = changed
    return found


def moving_numbers(subject: Subject) -> str:
    """Every number changes at every step, and nothing is built again."""
    if not _moved(subject, 0.9):
        return "there is no number to change"
    trial = Trial(subject, _parameters(subject)).run(1)
    built = compile_count()
    for turn in range(3):
        for optimizer in trial.optimizers:
            for group in optimizer.param_groups:
                group.update(_moved(subject, 0.9 - 0.1 * turn))
        trial.set_gradients()
        trial.compared_step()
    if compile_count() != built:
        raise CheckFailure("a kernel was built again because a number changed")
    return f"{', '.join(_moved(subject, 0.9))} change at every step without a build"


def repeats(subject: Subject) -> str:
    """The same training twice gives the same bits."""
    runs = []
    for _ in range(2):
        trial = Trial(
            subject, _parameters(subject, shapes=[*subject.shapes(), *subject.shapes(((20_011,), (101, 67)))])
        )
        for _ in range(3):
            trial.set_gradients()
            trial.step()
        runs.append(trial.contents())
    _same_bits(runs, "a second run of the same training gives other bits")
    return "a second run of the same training gives the same bits"


def _same_bits(runs: list[list[torch.Tensor]], text: str) -> None:
    for left, right in zip(*runs):
        if not torch.equal(
            left.view(torch.uint8) if left.dim() else left, right.view(torch.uint8) if right.dim() else right
        ):
            raise CheckFailure(text)


def threads(subject: Subject) -> str:
    """One thread and several give the same bits."""
    known = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            trial = Trial(subject, _parameters(subject, shapes=subject.shapes(((70_001,), (90, 231)))))
            for _ in range(3):
                trial.set_gradients()
                trial.step()
            runs.append(trial.contents())
    finally:
        torch.set_num_threads(known)
    _same_bits(runs, "one thread and four give different bits")
    return "one thread and four give the same bits"


def checkpoint(subject: Subject) -> str:
    """Training goes on from a checkpoint as if nothing had happened."""
    first = Trial(subject, _parameters(subject)).run(3)
    second = Trial(subject, [torch.nn.Parameter(param.detach().clone()) for param in first.params])
    second.steps = first.steps
    for mine, other in zip(first.optimizers, second.optimizers):
        other.load_state_dict(mine.state_dict())
    for trial in (first, second):
        for _ in range(2):
            trial.set_gradients()
            trial.step()
    _same_bits([first.contents(), second.contents()], "training goes on otherwise from a checkpoint than without one")
    return "training goes on from a checkpoint to the same bits"


def skipping(subject: Subject) -> str:
    """A step with gradients that are not finite can be left out whole."""
    trial = Trial(subject, _parameters(subject), {"skip_nonfinite": True}).run(2)
    before = trial.contents()
    trial.set_gradients()
    for param in trial.params:
        if param.grad is not None and param.numel():
            param.grad.flatten()[0] = math.nan
    trial.step()
    _same_bits([before, trial.contents()], "a skipped step changes a parameter or a state")
    return "a skipped step changes nothing"


def clipping(subject: Subject) -> str:
    """Clipping inside the step is clipping before it."""
    limit = 0.5
    trial = Trial(subject, _parameters(subject), {"max_grad_norm": limit})
    try:
        for _ in range(2):
            trial.set_gradients()
            trial.compared_step(limit)
    except CheckFailure as failure:
        text = f"max_grad_norm={limit} does not give what clipping before the step gives: {failure}"
        raise CheckFailure(text, failure.buffer) from None
    return "max_grad_norm gives what clipping before the step gives"


def taps(subject: Subject) -> str:
    """Steps that measure and mark changed weights give the same bits, and tell what they have done."""
    runs = []
    for options in ({}, {"stats": Stats(), "track_changes": True}):
        trial = Trial(subject, _parameters(subject, shapes=[*subject.shapes(), *subject.shapes(((101, 67),))]), options)
        for _ in range(3):
            before = [param.detach().clone() for param in trial.params]
            trial.set_gradients()
            trial.step()
            if options:
                _told(trial, before)
        runs.append(trial.contents())
    _same_bits(runs, "steps that measure and mark changes give other bits")
    return "statistics and changes are those of the step, which gives the same bits"


def _told(trial: Trial, before: list[torch.Tensor]) -> None:
    """Compare what optimizers tell of a step with what it has done."""
    old = {id(param): values for param, values in zip(trial.params, before)}
    for optimizer in trial.optimizers:
        listed = {name: indices.long() for name, indices, _ in optimizer.changes()}
        measured, (group,) = optimizer.stats.read(), optimizer.param_groups
        for place, param in enumerate(group["params"]):
            others = (param.detach() != old[id(param)]).reshape(-1).nonzero().reshape(-1)
            if not torch.equal(listed.get(f"0.{place}", others[:0]), others):
                raise CheckFailure("the list of changed weights is another than what has changed", "param")
            if param.grad is None or not param.numel():
                continue
            update = (param.detach().double() - old[id(param)].double()).norm()
            for column, wanted in (("grad_norm", param.grad.double().norm()), ("update_norm", update)):
                if not math.isclose(measured[f"0.{place}"][column], float(wanted), rel_tol=1e-4, abs_tol=1e-30):
                    raise CheckFailure(f"{column} is {measured[f'0.{place}'][column]}, and should be {float(wanted)}")


ITEMS: dict[str, Item] = {
    "float32": _follows(torch.float32),
    "float64": _follows(torch.float64),
    "bfloat16": _follows(torch.bfloat16),
    "float16": _follows(torch.float16),
    "bfloat16 with float32 master": _follows(torch.bfloat16, master_weights=True),
    **{
        f"bfloat16 with {choice}": _follows(torch.bfloat16, master_weights=choice)
        for choice in MASTER_FORMATS
        if choice is not True
    },
    **{f"{name} states": _keeps(name) for name in STATE_FORMATS if name != "float32"},
    "bfloat16 rounded at random": _follows(torch.bfloat16, rounding="stochastic"),
    "sizes": sizes,
    "layouts": layouts,
    "param groups": groups,
    "moving numbers": moving_numbers,
    "repeatability": repeats,
    "threads": threads,
    "checkpoint": checkpoint,
    "skipped steps": skipping,
    "clipping": clipping,
    "taps": taps,
}
"""Every item by its name, in the order they are checked."""

INTERPRETED = ("float32", "sizes", "layouts", "param groups")
"""Those that also run in Triton's interpreter, which is slow and rounds float32 only as a GPU does."""
