"""Random trainings beside torch's: what users do between steps, drawn by a seed, in memory between guards."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilestep

SEEDS = int(os.environ.get("TILESTEP_FUZZ_SEEDS", "30"))
FIRST = int(os.environ.get("TILESTEP_FUZZ_FIRST", "0"))
"""Which trainings a test runs: so many, from this on."""

__all__ = ["GUARD", "Guarded", "Session", "fuzz"]

GUARD = 64
"""Elements before and after each tensor that no kernel may write."""

SHAPES = [(), (1,), (5,), (4, 6), (2, 3, 5), (0,), (3, 2, 3, 3), (33,), (17, 9), (130,)]

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.001}),
}


class Guarded:
    """Tensors inside larger ones with known values around them."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, int, int]] = []

    def copy(self, tensor: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        """A tensor of these values whose memory has guards.

        Args:
            tensor: the values.
            order: the dimensions, from the one with the largest stride to that with the smallest.
        """
        memory = torch.full((tensor.numel() + 2 * GUARD,), 1234.0, dtype=torch.float64, device=tensor.device)
        memory = memory.to(tensor.dtype)
        inside = memory[GUARD : GUARD + tensor.numel()]
        order = list(range(tensor.dim())) if order is None else order
        turned = inside.view([tensor.shape[dim] for dim in order])
        made = turned.permute([order.index(dim) for dim in range(tensor.dim())])
        made.copy_(tensor.detach())
        self._made.append((memory, GUARD, GUARD + tensor.numel()))
        return made

    def check(self) -> None:
        """Raise if something wrote around a tensor."""
        for memory, start, stop in self._made:
            around = torch.cat([memory[:start], memory[stop:]])
            assert bool((around == memory.new_tensor(1234.0)).all()), "written outside of a tensor"

    def forget(self) -> None:
        """Let go of all but the last few hundred."""
        self.check()
        del self._made[:-300]


class Session:
    """Two optimizers over the same numbers: ours, and torch's.

    Args:
        seed: decides everything.
        device: of parameters; on a GPU steps are also captured.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = device
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.guards = Guarded()
        self.log: list[str] = []
        self.rule = self.random.choice(list(RULES))
        kind, self.given = RULES[self.rule]
        self.dtype = self.random.choice([torch.float32, torch.float64])
        shapes = self.random.choices(SHAPES, k=self.random.randint(1, 7))
        self.mine = [self.param(shape) for shape in shapes]
        self.theirs = [torch.nn.Parameter(param.detach().clone()) for param in self.mine]
        self.clip = self.random.choice([None, 0.5])
        self.skips = self.random.random() < 0.3
        policy = {"max_grad_norm": self.clip, "skip_nonfinite": self.skips}
        self.ours: Any = tilestep.Optimizer(self.mine, self.rule, **policy, **self.given)
        self.torchs: Any = kind(self.theirs, foreach=False, **self.given)

    def drawn(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def order(self, dims: int) -> list[int]:
        order = list(range(dims))
        if self.random.random() < 0.5:
            self.random.shuffle(order)
        return order

    def param(self, shape: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.guards.copy(self.drawn(shape)))

    @property
    def place(self) -> int:
        return self.random.randrange(len(self.mine))

    # What users do. Each does the same to both sides.

    def step_torch(self) -> None:
        if self.rule == "Adagrad":
            # Of torch 2.11 it makes states in its constructor alone, and none for parameters that come later.
            made = torch.optim.Adagrad(self.theirs).state
            for param in self.theirs:
                if not self.torchs.state[param] and made.get(param):
                    self.torchs.state[param] = made[param]
        if self.clip is None:
            return self.torchs.step()
        # Ours clips inside the step, and leaves the gradients.
        gradients = [param.grad for param in self.theirs]
        for param in self.theirs:
            param.grad = None if param.grad is None else param.grad.clone()
        torch.nn.utils.clip_grad_norm_(self.theirs, self.clip)
        self.torchs.step()
        for param, gradient in zip(self.theirs, gradients):
            param.grad = gradient

    def step(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 4])):
            self.draw_gradients()
            self.ours.step()
            self.step_torch()
            self.compare()

    def step_again(self) -> None:
        """With the gradients that are there."""
        self.ours.step()
        self.step_torch()
        self.compare()

    def overflow(self) -> None:
        """Neither side moves."""
        if not self.skips:
            return
        self.draw_gradients()
        filled = [param for param in self.mine if param.grad is not None and param.numel()]
        if filled:
            gradient = self.random.choice(filled).grad
            assert gradient is not None
            gradient.view(-1)[-1:].fill_(float("nan")) if gradient.is_contiguous() else gradient.fill_(float("inf"))
            self.ours.step()
            self.compare()
        self.ours.zero_grad()
        self.torchs.zero_grad()

    def replays(self) -> None:
        """A captured step; gradients are there and keep their memory, as anything else is refused."""
        if self.device == "cpu":
            return
        self.draw_gradients(missing=0.0)
        captured = tilestep.capture(self.ours)
        for _ in range(3):
            for mine, theirs in zip(self.mine, self.theirs):
                assert mine.grad is not None and theirs.grad is not None
                theirs.grad.copy_(self.drawn(mine.shape))
                mine.grad.copy_(theirs.grad)
            captured.replay()
            self.step_torch()
            self.compare()
            self.set_hyperparameters(["lr", "weight_decay"])

    def draw_gradients(self, missing: float = 0.1) -> None:
        kept = self.random.random() < 0.4
        for mine, theirs in zip(self.mine, self.theirs):
            if self.random.random() < missing:
                mine.grad = theirs.grad = None
                continue
            values = self.drawn(mine.shape)
            theirs.grad = values.clone()
            if kept and mine.grad is not None and mine.grad.dtype is values.dtype:
                mine.grad.copy_(values)
                continue
            mine.grad = self.guards.copy(values, self.order(values.dim()))
            if values.dim() and self.random.random() < 0.1:
                spread = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
                mine.grad = spread[..., ::2].copy_(values)

    def drop_gradients(self) -> None:
        to_none = self.random.random() < 0.5
        self.ours.zero_grad(set_to_none=to_none)
        self.torchs.zero_grad(set_to_none=to_none)

    def other_gradient_dtype(self) -> None:
        """Gradients of another dtype hold numbers that the parameter's has too."""
        place = self.place
        mine, theirs = self.mine[place], self.theirs[place]
        other = self.random.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        mine.grad = None
        mine.grad_dtype = other
        values = self.drawn(mine.shape).clamp(-4, 4).to(torch.bfloat16).to(torch.float16)
        mine.grad, theirs.grad = self.guards.copy(values.to(other)), values.to(self.dtype)
        self.step_again()
        mine.grad = theirs.grad = None
        mine.grad_dtype = self.dtype

    def lazy_gradient(self) -> None:
        place = self.place
        values = self.drawn(self.mine[place].shape)
        if self.random.random() < 0.5:
            self.mine[place].grad = torch._neg_view(-values)
        else:
            values = torch.zeros_like(values)
            self.mine[place].grad = torch._efficientzerotensor(values.shape, dtype=self.dtype, device=self.device)
        self.theirs[place].grad = values
        self.step_again()
        self.mine[place].grad = self.theirs[place].grad = None

    def move_states(self) -> None:
        """Away and back under the same objects; the memory is another tensor's by then."""
        for param in self.random.sample(self.mine, self.random.randint(1, len(self.mine))):
            for state in list(self.ours.state[param].values()):
                if not isinstance(state, torch.Tensor):
                    continue
                old = state.data
                how = self.random.randrange(4)
                if how == 0:
                    state.data = self.guards.copy(old)
                elif how == 1:
                    state.set_(old.clone())
                elif how == 2:
                    state.data = old.double().clone()
                    state.data = state.data.to(old.dtype).clone()
                else:
                    torch.utils.swap_tensors(state, old.clone())
                old.fill_(1e30)

    def replace_states(self) -> None:
        param = self.mine[self.place]
        for key, value in list(self.ours.state[param].items()):
            self.ours.state[param][key] = value.clone()

    def move_params(self) -> None:
        for param in self.random.sample(self.mine, self.random.randint(1, len(self.mine))):
            old = param.data
            param.data = self.guards.copy(old, self.order(old.dim()) if self.random.random() < 0.3 else None)
            if param.grad is not None and self.random.random() < 0.5:
                param.grad = None
                self.theirs[self.index(param)].grad = None

    def index(self, param: torch.Tensor) -> int:
        return next(place for place, each in enumerate(self.mine) if each is param)

    def turn_in_place(self) -> None:
        """The same memory read in another order, gradients kept or not: torch's parameter takes the same values."""
        square = [param for param in self.mine if param.dim() == 2 and param.shape[0] == param.shape[1]]
        matrices = square or [param for param in self.mine if param.dim() > 1]
        if not matrices:
            return
        param = self.random.choice(matrices)
        place = self.index(param)
        twin = self.theirs[place]
        if param.shape[0] == param.shape[1] and param.dim() == 2:
            param.data = param.data.t()
        else:
            param.data = self.guards.copy(param.data, list(range(param.dim()))[::-1])
        twin.data = param.detach().contiguous().clone()

    def write_params(self) -> None:
        place = self.place
        values = self.drawn(self.mine[place].shape)
        with torch.no_grad():
            self.mine[place].copy_(values)
            self.theirs[place].copy_(values)

    def swap_param(self) -> None:
        """Another parameter in the place of one, which begins anew."""
        place = self.place
        for optimizer, params, made in (
            (self.ours, self.mine, self.param),
            (self.torchs, self.theirs, lambda shape: torch.nn.Parameter(self.drawn(shape))),
        ):
            old = params[place]
            new = made(old.shape)
            if optimizer is self.torchs:
                new.data.copy_(self.mine[place].detach())
            for group in optimizer.param_groups:
                group["params"] = [new if each is old else each for each in group["params"]]
            optimizer.state.pop(old, None)
            params[place] = new

    def add_group(self) -> None:
        if len(self.mine) > 14:
            return
        new = [self.param(shape) for shape in self.random.choices(SHAPES, k=self.random.randint(1, 3))]
        twins = [torch.nn.Parameter(param.detach().clone()) for param in new]
        lr = self.random.choice([0.001, 0.003])
        self.ours.add_param_group({"params": new, "lr": lr})
        self.torchs.add_param_group({"params": twins, "lr": lr})
        self.mine += new
        self.theirs += twins

    def set_hyperparameters(self, names: Sequence[str] = ("lr", "weight_decay", "maximize")) -> None:
        place = self.random.randrange(len(self.ours.param_groups))
        groups = self.ours.param_groups[place], self.torchs.param_groups[place]
        name = self.random.choice(names)
        value = {"lr": self.random.choice([0.001, 0.004]), "weight_decay": 0.01, "maximize": not groups[0]["maximize"]}
        for group in groups:
            group[name] = value[name]

    def load(self) -> None:
        """From oneself, through a file, or from torch's."""
        how = self.random.randrange(3)
        state = self.torchs.state_dict() if how == 2 else self.ours.state_dict()
        if how == 1:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        self.ours.load_state_dict(state)

    def copy_all(self) -> None:
        if self.random.random() < 0.5:
            self.ours = copy.deepcopy(self.ours)
        else:
            self.ours = pickle.loads(pickle.dumps(self.ours))
        copied = [param for group in self.ours.param_groups for param in group["params"]]
        theirs = [param for group in self.torchs.param_groups for param in group["params"]]
        by_twin = {id(twin): param for twin, param in zip(theirs, copied)}
        self.mine = [by_twin[id(twin)] for twin in self.theirs]
        for param, twin in zip(self.mine, self.theirs):
            # Copies have no gradient of their own layout to rely on.
            param.grad = None if twin.grad is None else self.guards.copy(twin.grad)

    def freeze(self) -> None:
        place = self.place
        trains = not self.mine[place].requires_grad
        for params in (self.mine, self.theirs):
            params[place].requires_grad_(trains)

    def compare(self) -> None:
        """Parameters as torch's; nothing written beside them."""
        bound = 1e-9 if self.dtype is torch.float64 else 2e-4
        for place, (mine, theirs) in enumerate(zip(self.mine, self.theirs)):
            torch.testing.assert_close(
                mine.detach(),
                theirs.detach(),
                rtol=bound,
                atol=bound,
                msg=lambda text, p=place: f"parameter {p}: {text}",
            )
        self.guards.check()


ACTIONS: list[Callable[[Session], None]] = [
    Session.step,
    Session.step,
    Session.step,
    Session.step_again,
    Session.overflow,
    Session.replays,
    Session.drop_gradients,
    Session.other_gradient_dtype,
    Session.lazy_gradient,
    Session.move_states,
    Session.move_states,
    Session.replace_states,
    Session.move_params,
    Session.turn_in_place,
    Session.write_params,
    Session.swap_param,
    Session.add_group,
    Session.set_hyperparameters,
    Session.load,
    Session.copy_all,
    Session.freeze,
]


def fuzz(seed: int, actions: int = 14, device: str = "cpu") -> None:
    """Train with both, doing what the seed says between steps.

    Args:
        seed: of the session.
        actions: how many things are done.
        device: of the parameters.

    Raises:
        AssertionError: naming the seed and what was done, where results differ or memory beside a tensor was written.
    """
    session = Session(seed, device)
    done = [session.rule, str(session.dtype), f"clip {session.clip}", f"skips {session.skips}"]
    try:
        for _ in range(actions):
            action = session.random.choice(ACTIONS)
            done.append(action.__name__)
            action(session)
            session.guards.forget()
        session.step()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {', '.join(done)}: {error}") from error
