"""Rules of five papers beside their authors' code: milliseconds of a step, and bytes a parameter.

    python benchmarks/paper_rules.py --authors FOLDER [--out results] [--only Grams MARS] [--quick]
    python benchmarks/paper_rules.py --picture benchmarks/results/paper_rules_h100_1.json

FOLDER holds the authors' files, unchanged, which are no part of this repository:

    mars.py       AGI-Arena/MARS                  MARS/optimizers/mars.py
    SPAM.py       TianjinYellow/SPAM-Optimizer    galore_torch/SPAM.py
    adamuon.py    Chongjie-Si/AdaMuon             gpt2/models/optimizers/adamuon.py
    adam_mini.py  zyushun/Adam-mini               adam_mini/adam_mini.py
    grams.py      Gunale0926/Grams                grams/src/grams.py

MARS and AdaMuon are rules of the library; Grams, Adam-mini and SPAM are written below as a user would write them.

First both codes update a small float32 model, beside the rule in float64: a rule whose updates are further apart than
its bound is not timed, and the script ends with 1. Then they take turns in one process on the 219 bfloat16 tensors of a
language model (1.19 B elements), each with its own parameters and with new gradients for every step. Adam-mini gives
each head of the queries and keys one second moment: its authors reshape them, here they have a row for each head.
Bytes a parameter are what the parameters, their gradients and their optimizer hold between steps, and the peak of what
a step allocates, over the number of parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from timing import result_name
from traffic import step_bytes

import tilestep
from tilestep import State
from tilestep.bench.measure import Contender, Row, copy, measure
from tilestep.bench.results import OURS, environment
from tilestep.bench.sections import MEBIBYTE, Workload, free, gpu_workloads, llama_of, make_parameters
from tilestep.devices import has_streams

__all__ = ["PAPERS", "main"]

THEIRS, EIGHT_BITS = "authors' code", f"{OURS}, int8 states"


@tilestep.rule
def grams(param, grad, exp_avg, exp_avg_sq, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, step):
    """Adam's sizes along the signs of the gradient."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    update = torch.sign(grad) * exp_avg.abs() / (exp_avg_sq.sqrt() + eps)
    return param - rate * update, exp_avg, exp_avg_sq


@tilestep.rule(states={"exp_avg_sq": State(shape="row")})
def adam_mini(param, grad, exp_avg, exp_avg_sq, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step):
    """Adam with one second moment a row; a vector is one row."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * (grad * grad).mean(dim=-1, keepdim=True)
    denom = torch.sqrt(exp_avg_sq / (1 - beta2**step)) + eps
    return param - lr * exp_avg / (1 - beta1**step) / denom, exp_avg, exp_avg_sq


@tilestep.rule
def spam(
    param, grad, exp_avg, exp_avg_sq, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, limit=5000.0, period=500, warm=150, step
):
    """Adam whose moments start again every `period` steps, with a warm-up after it, and whose spikes are clipped."""
    beta1, beta2 = betas
    age = step % period
    exp_avg, exp_avg_sq = torch.where(age == 0, 0.0, exp_avg), torch.where(age == 0, 0.0, exp_avg_sq)
    most = torch.sqrt(limit * exp_avg_sq)
    grad = torch.where(age < 20, grad, torch.clamp(grad, -most, most))
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    share = 1 - 0.495 * (1 + torch.cos(math.pi * age / (warm + 1)))
    rate = lr * torch.where((step < period) | (age >= warm), 1.0, share) * math.sqrt(1 - beta2**step)
    return param - rate / (1 - beta1**step) * exp_avg / (exp_avg_sq.sqrt() + eps), exp_avg, exp_avg_sq


Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Model:
    """The tensors of a language model, and how many heads its queries have."""

    workload: Workload
    heads: int

    def named(self, device: torch.device, dtype: torch.dtype | None = None) -> Named:
        """Parameters with gradients, by the names that transformers gives them."""
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
        count = (len(self.workload.shapes) - 3) // len(layer)
        layers = [f"layers.{place}.{part}" for place in range(count) for part in layer]
        names = [f"{name}.weight" for name in ("embed_tokens", *layers, "norm", "lm_head")]
        params = make_parameters(self.workload, device)
        if dtype is not None:
            grads = [param.grad for param in params]
            params = [param.detach().to(dtype).requires_grad_() for param in params]
            for param, grad in zip(params, grads):
                param.grad = None if grad is None else grad.to(dtype)
        return list(zip(names, params, strict=True))


@dataclass(frozen=True)
class Paper:
    """A rule, its authors' code, and how both are called.

    Args:
        file: the authors' file.
        rule: the rule, or its name.
        theirs: makes the authors' optimizers of a module with their code.
        bound: how far an update may be from float64's, as a share of it.
        lr: the rate of both.
        check: what both get for the comparison with float64 alone.
        steps: how many steps are compared.
        apart: whether only the matrices of the layers follow it, and AdamW all else.
        warmup: steps before the first that is timed, but two.
    """

    file: str
    rule: Any
    theirs: Callable[..., list[Any]]
    bound: float
    lr: float = 1e-3
    check: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 5
    apart: bool = False
    warmup: int = 3


def inner(named: Named) -> tuple[Named, Named]:
    """The matrices of the layers, and the embeddings, the head and the vectors."""
    first = [(name, param) for name, param in named if "proj" in name]
    return first, [(name, param) for name, param in named if "proj" not in name]


def _adamuon(module: ModuleType, named: Named, model: Model, lr: float) -> list[Any]:
    if named[0][1].is_cuda and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    matrices, rest = inner(named)
    params = [param for _, param in rest]
    adamw = torch.optim.AdamW(params, lr=3e-4, fused=params[0].is_cuda)
    return [module.AdaMuon([param for _, param in matrices], lr=lr, rank=0, world_size=1), adamw]


def _adam_mini(module: ModuleType, named: Named, model: Model, lr: float) -> list[Any]:
    width = model.workload.shapes[0][1]
    return [module.Adam_mini(named, lr=lr, dim=width, n_heads=model.heads, verbose=False)]


def _spam(module: ModuleType, named: Named, model: Model, lr: float, period: int = 500, warm: int = 150) -> list[Any]:
    params = [param for _, param in named]
    return [module.AdamW(params, lr=lr, no_deprecation_warning=True, DeltaT=period, warmup_steps=warm)]


def _plain(name: str) -> Callable[..., list[Any]]:
    return lambda module, named, model, lr: [getattr(module, name)([param for _, param in named], lr=lr)]


PAPERS: dict[str, Paper] = {
    "MARS": Paper("mars.py", "MARS", _plain("MARS"), bound=2e-5, lr=3e-3),
    "SPAM": Paper("SPAM.py", spam, _spam, bound=2e-5, check={"period": 50, "warm": 15}, steps=120, warmup=20),
    "AdaMuon": Paper("adamuon.py", "AdaMuon", _adamuon, bound=0.2, lr=0.02, steps=3, apart=True),
    "Adam-mini": Paper("adam_mini.py", adam_mini, _adam_mini, bound=2e-5),
    "Grams": Paper("grams.py", grams, _plain("Grams"), bound=2e-5),
}
"""By the papers' names. SPAM clips from its twentieth step on. AdaMuon computes Newton-Schulz in bfloat16, and divides
it by a root of its square, so small elements may have the other sign."""


def loaded(file: Path, device: torch.device) -> ModuleType:
    """The authors' code as a module, on a GPU as it is; on a CPU its buffers are there too, and one rank is itself."""
    text = file.read_text()
    if not has_streams(device):
        text = text.replace('device="cuda"', 'device="cpu"')
    module = ModuleType(f"authors_{file.stem}")
    exec(compile(text, str(file), "exec"), module.__dict__)
    if not has_streams(device) and hasattr(module, "dist"):
        module.dist = SimpleNamespace(all_gather_into_tensor=_gathered)  # type: ignore[attr-defined]
    return module


def _gathered(out: torch.Tensor, own: torch.Tensor, async_op: bool) -> Any:
    out.copy_(own.view(out.shape))
    return SimpleNamespace(wait=lambda: None)


def ours(paper: Paper, name: str, named: Named, model: Model, **given: Any) -> tuple[tilestep.Optimizer, list[Any]]:
    """Tilestep's optimizer for as many elements, and its parameters in the order of the names."""
    params = [param for _, param in named]
    if name == "Adam-mini":
        size = model.workload.shapes[0][1] ** 2 // model.heads
        for place, (title, param) in enumerate(named):
            if "q_proj" in title or "k_proj" in title:
                params[place] = param.detach().view(-1, size).requires_grad_()
                params[place].grad = None if param.grad is None else param.grad.view(-1, size)
    groups: list[Any] = [{"params": [(title, param) for (title, _), param in zip(named, params)]}]
    if paper.apart:
        groups = [{"params": part} for part in inner(named)]
        groups[1].update(rule="AdamW", lr=3e-4)
    return tilestep.Optimizer(groups, paper.rule, **{"lr": paper.lr, **given}), params


def stepped(optimizers: list[Any]) -> Callable[[], None]:
    """One step of all."""

    def call() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return call


def errors(
    paper: Paper, name: str, module: ModuleType, model: Model, device: torch.device, eight_bits: bool
) -> dict[str, float]:
    """How far updates of a small float32 model are from the rule's in float64, as shares of all of them.

    Of the authors' code and ours, with spikes in the gradients, which SPAM clips; or of ours with int8 states, without.
    """
    params: dict[str, list[torch.Tensor]] = {}
    calls: dict[str, Callable[[], None]] = {}
    if not eight_bits:
        named = model.named(device, torch.float32)
        params[THEIRS] = [param for _, param in named]
        calls[THEIRS] = stepped(paper.theirs(module, named, model, paper.lr, **paper.check))
    title, given = (EIGHT_BITS, {"state_dtype": "int8"}) if eight_bits else (OURS, {})
    named = model.named(device, torch.float32)
    optimizer, params[title] = ours(paper, name, named, model, **paper.check, **given)
    calls[title] = optimizer.step
    start = [param.detach().double() for param in params[title]]
    exact = list(start)
    states: list[dict[str, torch.Tensor]] = [{} for _ in start]
    generator = torch.Generator(device).manual_seed(1)
    follows = [not paper.apart or "proj" in title for title, _ in named]
    for step in range(1, (5 if eight_bits else paper.steps) + 1):
        grads = [torch.randn(param.shape, device=device, generator=generator) for param in start]
        if step % 7 == 0 and not eight_bits:
            spikes = [torch.rand(grad.shape, device=device, generator=generator) > 0.975 for grad in grads]
            grads = [torch.where(spike, 300 * grad, grad) for spike, grad in zip(spikes, grads)]
        for title, call in calls.items():
            for param, grad in zip(params[title], grads):
                param.grad = grad.view(param.shape).clone()
            call()
        for place, grad in enumerate(grads):
            rule, own = (paper.rule, {"lr": paper.lr, **paper.check}) if follows[place] else ("AdamW", {"lr": 3e-4})
            rule = tilestep.registry[rule] if isinstance(rule, str) else rule
            exact[place] = referee(rule, exact[place], grad.double(), states[place], own, step)
    moved = sum(float((end - begin).square().sum()) for end, begin in zip(exact, start))
    return {
        title: math.sqrt(sum(_square_distance(end, of) for end, of in zip(ends, exact)) / moved)
        for title, ends in params.items()
    }


def _square_distance(end: torch.Tensor, exact: torch.Tensor) -> float:
    return float((end.detach().double().view_as(exact) - exact).square().sum())


def referee(
    rule: Any, param: torch.Tensor, grad: torch.Tensor, states: dict[str, Any], given: Mapping[str, Any], step: int
) -> torch.Tensor:
    """The rule's own function on float64 tensors; the states are kept."""
    shapes = {"param": param.shape, "row": (*param.shape[:-1], 1)}
    for name, state in rule.states.items():
        states.setdefault(name, torch.zeros(shapes[state.shape], dtype=param.dtype, device=param.device))
    counted = {"step": torch.tensor(float(step), dtype=torch.float64, device=param.device)} if rule.uses_step else {}
    new, *after = rule(param, grad, *states.values(), **given, **counted)
    states.update(zip(states, after))
    return new


def held_bytes(optimizers: list[Any], params: list[torch.Tensor]) -> int:
    """Bytes of parameters, gradients and states, each storage once."""
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    tensors = [*params, *(param.grad for param in params), *(value for state in states for value in state.values())]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def figures(
    paper: Paper, name: str, module: ModuleType, model: Model, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Times and bytes of the authors' code and ours, by turns."""
    drawn = [param.grad for _, param in model.named(device)]
    contenders: list[Contender] = []
    held: dict[str, float] = {}

    def enter(title: str, make: Callable[[Named], tuple[list[Any], list[torch.Tensor]]]) -> None:
        """Add a contender that has taken two steps, and note what it holds after them."""
        before = torch.cuda.memory_allocated() if has_streams(device) else 0
        optimizers, params = make(model.named(device))

        def prepare() -> None:  # as a training makes them; some codes change gradients in place, or keep them
            for param, grad in zip(params, drawn):
                param.grad = None if grad is None else grad.clone().view(param.shape)

        step = stepped(optimizers)
        for _ in range(2):
            prepare()
            step()
        prepare()
        moved = step_bytes(optimizers[0]) if title != THEIRS and not paper.apart else 0
        contenders.append(Contender(title, step, moved, prepare))
        free(device)
        held[title] = torch.cuda.memory_allocated() - before if has_streams(device) else held_bytes(optimizers, params)

    def by_us(**given: Any) -> Callable[[Named], tuple[list[Any], list[torch.Tensor]]]:
        def make(named: Named) -> tuple[list[Any], list[torch.Tensor]]:
            optimizer, params = ours(paper, name, named, model, **given)
            return [optimizer], params

        return make

    enter(THEIRS, lambda named: (paper.theirs(module, named, model, paper.lr), [param for _, param in named]))
    enter(OURS, by_us())
    enter(EIGHT_BITS, by_us(state_dtype="int8"))
    floor = copy(device, MEBIBYTE * (1024 if has_streams(device) else 16))
    rows = measure([*contenders, floor], device, rounds, paper.warmup)
    elements, limit = model.workload.elements, rows[-1].bandwidth
    return {row.contender: described(row, held[row.contender] / elements, elements, limit) for row in rows[:-1]}


def described(row: Row, held: float, elements: int, limit: float | None) -> dict[str, Any]:
    """What is written of a contender."""
    if row.failure is not None or row.wall is None:
        return {"failure": row.failure}
    peak = (row.peak_bytes or 0) / elements
    times = {key: round(spread.median, 3) for key in ("wall", "device", "host") if (spread := getattr(row, key))}
    return {
        **times,
        "wall, quartiles": [round(row.wall.low, 3), round(row.wall.high, 3)],
        "launches": row.launches,
        "copy of as many bytes": round(row.bytes_moved / limit * 1e3, 3) if row.bytes_moved and limit else None,
        "between steps, bytes a parameter": round(held, 3),
        "a step's peak, bytes a parameter": round(peak, 3),
        "bytes a parameter": round(held + peak, 3),
    }


def picture(results: Mapping[str, Any], path: Path) -> None:
    """Draw milliseconds and bytes a parameter of every rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    colors = {THEIRS: "#9aa5b1", OURS: "#d9480f", EIGHT_BITS: "#f59f00"}
    names = [name for name, found in results["rules"].items() if "failure" not in found]
    for panel, key, unit in ((panels[0], "wall", "ms"), (panels[1], "bytes a parameter", "B")):
        for place, name in enumerate(names):
            for offset, (title, color) in enumerate(colors.items()):
                value = results["rules"][name][title].get(key)
                if value is None:
                    continue
                height = place + (offset - 1) * 0.27
                panel.barh(height, value, 0.25, color=color, label=title if place == 0 else None)
                panel.annotate(f" {value:.3g} {unit}", (value, height), va="center", fontsize=7.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.14)
        panel.tick_params(labelsize=8)
    panels[0].set_yticks(range(len(names)), names, fontsize=10)
    panels[0].invert_yaxis()
    panels[0].set_title("a step, milliseconds", fontsize=10, loc="left")
    panels[1].set_title("weight, gradient, state and a step's peak, bytes a parameter", fontsize=10, loc="left")
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    described = results["environment"]
    figure.suptitle(
        f"{results['elements'] / 1e9:.2f} B bfloat16 parameters, {described['device']}, torch {described['torch']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def one(name: str, authors: Path, models: tuple[Model, Model], device: torch.device, rounds: int) -> dict[str, Any]:
    """Compare a rule on the small model, and measure it on the large one if it is right."""
    paper, (small, large) = PAPERS[name], models
    file = authors / paper.file
    module = loaded(file, device)
    apart = errors(paper, name, module, small, device, False)
    found: dict[str, Any] = {
        "authors' file, sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "error of the update": {title: float(f"{error:.2g}") for title, error in apart.items()},
        "steps": paper.steps,
    }
    if any(not error <= paper.bound for error in apart.values()):
        return {**found, "failure": f"updates are further than {paper.bound} from float64's"}
    eight = errors(paper, name, module, small, device, True)
    found["error of five updates"] = {title: float(f"{error:.2g}") for title, error in eight.items()}
    free(device)
    return {**found, **figures(paper, name, module, large, device, rounds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, help="the folder with the authors' files")
    parser.add_argument("--only", nargs="*", choices=list(PAPERS), default=list(PAPERS), help="rules")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny tensors: checks the script, measures nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--picture", type=Path, help="draw what such a file holds, and measure nothing")
    given = parser.parse_args()
    if given.picture is not None:
        picture(json.loads(given.picture.read_text()), given.picture.with_suffix(".png"))
        return 0
    if given.authors is None:
        parser.error("--authors names the folder with the authors' files")
    warnings.filterwarnings("ignore", message=".*addcmul_.*")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = Model(llama_of("llama", 2, 64, 16, 172, 500), heads=4)
    large = small if given.quick else Model(gpu_workloads()[1], heads=32)
    results: dict[str, Any] = {"environment": environment(device), "elements": large.workload.elements, "rules": {}}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{result_name('paper_rules', device)}.json"
    for name in given.only:
        try:
            found = one(name, given.authors, (small, large), device, 2 if given.quick else given.rounds)
        except Exception as failure:
            found = {"failure": f"{type(failure).__name__}: {failure}"}
        results["rules"][name] = found
        free(device)
        print(name, json.dumps(found, indent=1), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return int(any("failure" in found for found in results["rules"].values()))


if __name__ == "__main__":
    sys.exit(main())
