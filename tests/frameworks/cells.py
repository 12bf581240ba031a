"""Trainings in every framework, with each way that tilestep runs steps: what docs/frameworks/matrix.md is made of.

`python tests/frameworks/cells.py` writes the page; under torchrun it tries two ranks and writes what came of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tilestep
from tilestep.placement.combinations import REFUSED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks/matrix.md"
FRAMEWORKS = ("transformers", "lightning", "accelerate", "torchtitan")
FEATURES = ("clip", "accumulation", "resume", "two ranks")
MAX_NORM = 0.05
"""Below every norm that there is: a clip that does not happen is seen."""
STEPS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of trainings in one process; two ranks train on CPUs."""

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def adamw(model: torch.nn.Module, **options: Any) -> tilestep.Optimizer:
    # With a large epsilon the length of gradients matters to AdamW.
    return tilestep.AdamW(model.parameters(), lr=1e-2, eps=1e-2, **options)


def torchs(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


class MastersOfTorch(torch.optim.AdamW):
    """torch's AdamW of float32 copies, for a bfloat16 model."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.own = [param.detach().float().requires_grad_() for param in self.param_groups[0]["params"]]
        self.inner = torch.optim.AdamW(self.own, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        evaluated = None
        if closure is not None:
            with torch.enable_grad():
                evaluated = closure()
        for param, master in zip(self.param_groups[0]["params"], self.own):
            master.grad = param.grad.float()
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        for param, master in zip(self.param_groups[0]["params"], self.own):
            param.copy_(master)
        return evaluated


def masters_of_torch(model: torch.nn.Module) -> torch.optim.Optimizer:
    return MastersOfTorch(model.parameters(), lr=1e-2, eps=1e-2)


MAKES: dict[str, Make] = {
    "plain": adamw,
    "shard": lambda model: tilestep.shard(adamw(model), model),
    'overlap "forward"': lambda model: tilestep.overlap(adamw(model), model, during="forward"),
    'overlap "backward"': lambda model: tilestep.overlap(adamw(model), model, during="backward"),
    "offload": lambda model: tilestep.offload(adamw(model)),
    "masters": lambda model: adamw(model, master_weights=True),
    "bfloat16 states": lambda model: adamw(model, state_dtype=torch.bfloat16),
    "int8 states": lambda model: adamw(model, state_dtype="int8"),
}
ROUNDED = {"masters": 5e-3, "bfloat16 states": 5e-3, "int8 states": 2e-2}
"""Relative tolerance where other numbers are rounded than with torch's optimizer; 1e-4 elsewhere."""


def dtype_of(way: str) -> torch.dtype:
    return torch.bfloat16 if way == "masters" else torch.float32


class Net(torch.nn.Module):
    """4,096 weights in the first layer: states of fewer are float32 whatever they are asked to be."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 128, dtype=dtype)
        self.last = torch.nn.Linear(128, 1, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs.to(self.first.weight.dtype)).relu()).float()


def batches(accumulation: int, rank: int = 0, ranks: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * accumulation, ranks, 4, 32, generator=generator).to(DEVICE)
    return [(batch[rank], batch[rank].sum(1, keepdim=True) / 8) for batch in inputs]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Training:
    """One training: what it is asked for.

    Args:
        make: makes the optimizer.
        dtype: of the model.
        integrated: whether to use `tilestep.integrations`.
        clip: whether to clip at `MAX_NORM`.
        accumulation: backwards a step.
        saves: where to save after half of the steps, or None.
        resumes: whether to begin with what was saved there.
    """

    def __init__(
        self, make: Make, dtype: torch.dtype, integrated: bool, *, clip: bool = False, accumulation: int = 1,
        saves: Path | None = None, resumes: bool = False,
    ) -> None:  # fmt: skip
        self.make, self.dtype, self.integrated, self.clip, self.accumulation = (
            make,
            dtype,
            integrated,
            clip,
            accumulation,
        )
        self.saves, self.resumes = saves, resumes


def with_transformers(asked: Training) -> list[float]:
    import transformers

    class Trainer(transformers.Trainer):
        """As it is."""

    kind: Any = Trainer
    if asked.integrated:
        from tilestep.integrations.transformers import TilestepTrainer as kind

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=64, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config).to(DEVICE, asked.dtype)
    arguments = transformers.TrainingArguments(
        output_dir=str(asked.saves or tempfile.mkdtemp()), per_device_train_batch_size=2, learning_rate=1e-2,
        report_to=[], logging_steps=1, use_cpu=DEVICE.type == "cpu", disable_tqdm=True, max_steps=STEPS,
        max_grad_norm=MAX_NORM if asked.clip else 0, gradient_accumulation_steps=asked.accumulation,
        save_strategy="steps" if asked.saves else "no", save_steps=STEPS // 2,
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=Data(), optimizers=(asked.make(model), None))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(asked.saves / f"checkpoint-{STEPS // 2}") if asked.resumes else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_lightning(asked: Training) -> list[float]:
    import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(asked.dtype)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return asked.make(self)

        def train_dataloader(self) -> Any:
            data = batches(asked.accumulation, *where())
            # Lightning resumes at the beginning of an epoch.
            data = data[: len(data) // 2] if asked.saves else data
            return torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]

    options: dict[str, Any] = {"devices": 1} if DEVICE.type == "cuda" else {}
    if where()[1] > 1:
        options = {"strategy": "ddp", "devices": where()[1]}
    if asked.integrated:
        from tilestep.integrations.lightning import ShardStrategy, TilestepCallback

        options["callbacks"] = [TilestepCallback()]
        if where()[1] > 1 and asked.make is MAKES["shard"]:
            options["strategy"] = ShardStrategy()

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            accelerator=DEVICE.type, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, max_epochs=epochs,
            gradient_clip_val=MAX_NORM if asked.clip else None, accumulate_grad_batches=asked.accumulation, **options,
        )  # fmt: skip

    checkpoint = asked.saves and asked.saves / "half.ckpt"
    if checkpoint and not asked.resumes:
        half = trainer(1)
        half.fit(Module())
        half.save_checkpoint(checkpoint)
        losses.clear()
    trainer(2 if asked.saves else 1).fit(Module(), ckpt_path=checkpoint if asked.resumes else None)
    return losses


def with_accelerate(asked: Training) -> list[float]:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(where()[1] == 1)
    accelerate.state.GradientState._reset_state()
    kind: Any = accelerate.Accelerator
    if asked.integrated:
        from tilestep.integrations.accelerate import Accelerator as kind
    accelerator = kind(cpu=DEVICE.type == "cpu", gradient_accumulation_steps=asked.accumulation)
    model = Net(asked.dtype).to(DEVICE)
    optimizer = asked.make(model)
    if asked.clip and asked.integrated:
        optimizer.param_groups[0]["max_grad_norm"] = MAX_NORM
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, data = [], batches(asked.accumulation, *where())
    half = len(data) // 2
    if asked.resumes:
        accelerator.load_state(str(asked.saves))
        data = data[half:]
    for place, batch in enumerate(data):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if asked.clip and not asked.integrated and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        if asked.saves and not asked.resumes and place + 1 == half:
            accelerator.save_state(str(asked.saves))
    return losses


def with_torchtitan(asked: Training) -> list[float]:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed import utils
    from torchtitan.tools.logging import logger

    logger.setLevel(logging.ERROR)
    model: Any = Net(asked.dtype).to(DEVICE)

    class Alone(OptimizersContainer):
        """As docs/frameworks/torchtitan.md told before there was an integration."""

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return lambda groups: made(asked, model, groups)

    container: Any = Alone
    options: dict[str, Any] = {}
    if asked.integrated:
        from tilestep.integrations.torchtitan import TilestepOptimizers

        class Integrated(TilestepOptimizers):
            @staticmethod
            def _resolve_optimizer_factory(name: str) -> Any:
                return lambda groups: made(asked, model, groups)

        container = Integrated
        options = {"max_norm": MAX_NORM if asked.clip else None}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    config = (container if asked.integrated else OptimizersContainer).Config(
        param_groups=groups, implementation="for-loop", **options
    )
    if where()[1] > 1 and asked.make is not MAKES["shard"]:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (where()[1],)))
    optimizers = container(config, model_parts=[model])
    losses, data = [], batches(asked.accumulation, *where())
    half = len(data) // 2
    if asked.resumes:
        assert asked.saves
        saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        dcp.load(saved, checkpoint_id=asked.saves)
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizer"])
        data = data[half:]
    for place, batch in enumerate(data):
        loss = loss_of(model, batch)
        (loss / asked.accumulation).backward()
        losses.append(float(loss.detach()))
        if (place + 1) % asked.accumulation == 0:
            if asked.clip and not asked.integrated:
                utils.clip_grad_norm_(list(model.parameters()), MAX_NORM)
            optimizers.step()
            optimizers.zero_grad()
        if asked.saves and not asked.resumes and place + 1 == half:
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            dcp.save(state, checkpoint_id=asked.saves)
    return losses


def made(asked: Training, model: torch.nn.Module, groups: list[dict[str, Any]]) -> Any:
    """An optimizer with what the container says of its only group."""
    optimizer = asked.make(model)
    names = [name for name, _ in model.named_parameters()]
    limit = groups[0].get("max_grad_norm")
    optimizer.param_groups[0].update({"param_names": names} | ({"max_grad_norm": limit} if limit else {}))
    return optimizer


TRAIN = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "torchtitan": with_torchtitan,
}


def where() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


EXPECTED: dict[tuple[Any, ...], list[float]] = {}


def expected(framework: str, dtype: torch.dtype, **options: Any) -> list[float]:
    """Losses with torch's optimizer, in the framework as it is."""
    key = (framework, dtype, *sorted(options.items()))
    if key not in EXPECTED:
        make = torchs if dtype is torch.float32 else masters_of_torch
        EXPECTED[key] = TRAIN[framework](Training(make, dtype, False, **options))
    return EXPECTED[key]


def outcome(framework: str, way: str, feature: str, integrated: bool) -> str:
    """ "works", or what was raised, or what is wrong."""
    dtype, make, train = dtype_of(way), MAKES[way], TRAIN[framework]
    options: dict[str, Any] = {
        "clip": {"clip": True}, "accumulation": {"accumulation": 2}, "resume": {}, "two ranks": {"clip": True},
    }[feature]  # fmt: skip
    tolerance = ROUNDED.get(way, 1e-4)
    try:
        if feature == "resume":
            with tempfile.TemporaryDirectory() as folder:
                whole = train(Training(make, dtype, integrated, saves=Path(folder)))
                again = train(Training(make, dtype, integrated, saves=Path(folder), resumes=True))
            half = again[-(STEPS // 2) :]
            return "works" if half == whole[-len(half) :] else f"other numbers: {half} instead of {whole}"
        losses = train(Training(make, dtype, integrated, **options))
    except Exception as error:
        if not isinstance(error, (tilestep.TilestepError, ValueError, RuntimeError, TypeError)):
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    reference = expected(framework, dtype, **options)
    if len(losses) == len(reference) and all(
        math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) for one, other in zip(losses, reference)
    ):
        return "works"
    return f"other numbers: {losses} instead of {reference}"


def outcomes(framework: str, features: tuple[str, ...]) -> dict[str, str]:
    """All cells of a framework, by way, feature and "integrated" or "alone"."""
    warnings.simplefilter("ignore")
    return {
        f"{way}|{feature}|{'integrated' if integrated else 'alone'}": outcome(framework, way, feature, integrated)
        for way in MAKES
        for feature in features
        for integrated in (True, False)
    }


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block with a process group of one rank, which `shard` needs."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_two_ranks(framework: str) -> dict[str, str]:
    """The cells of the last column, tried by two processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONFAULTHANDLER"] = "1"
        for _ in range(2):
            ran = subprocess.run(
                [*command, __file__, framework, str(out)], env=environment, capture_output=True, text=True, timeout=150
            )
            if "Signal 6 (SIGABRT)" not in ran.stderr:
                break
            # By a thread of gloo while the interpreter ends; see `run` in tests/test_examples.py.
            print(ran.stderr[-8000:], file=sys.stderr)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
        return json.loads(out.read_text())


def try_two_ranks(framework: str, out: str) -> None:
    """What each of two processes does."""
    dist.init_process_group("gloo")
    cells = outcomes(framework, ("two ranks",))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, cells)
    for cell, said in cells.items():
        # An error has to come on all ranks alike.
        assert (said == "works") == (everyone[1 - dist.get_rank()][cell] == "works"), (cell, everyone)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(cells))
    dist.barrier()
    # The threads of process groups end while there is an interpreter: they hold Python objects.
    dist.destroy_process_group()


def sentence(said: str) -> str:
    """A refusal as a footnote has it: without what differs from one training to the next."""
    said = re.sub(r"param_groups\[0\]\['params'\]\[\d+\]|parameter \d+", "a parameter", said)
    return said.replace("|", "\\|")


def page(cells: dict[str, dict[str, str]]) -> str:
    """The page of the documentation, from what came of all trainings."""
    notes: list[str] = []

    def cell(framework: str, way: str, feature: str, mode: str) -> str:
        said = cells[framework][f"{way}|{feature}|{mode}"]
        if said == "works":
            return "works"
        text = sentence(said)
        if text not in notes:
            notes.append(text)
        return f"refused ({notes.index(text) + 1})"

    pins = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    lines = [f"| {name} | {pins[key]} | {line} | `{file}` |" for name, key, line, file in LINES]
    parts = [HEAD, "\n| | tested with | the line | test |", "|---|---|---|---|", *lines, RAN]
    for title, mode in (("With `tilestep.integrations`", "integrated"), ("The framework as it is", "alone")):
        rows = {
            f"| [{framework}]({framework}.md) | {way} | ": [cell(framework, way, feature, mode) for feature in FEATURES]
            for framework in cells
            for way in MAKES
        }
        refused = {name: row for name, row in rows.items() if set(row) != {"works"}}
        count = sum(word != "works" for row in rows.values() for word in row)
        parts += [f"\n## {title}\n", f"{count} of {len(rows) * len(FEATURES)} cells are refused.\n", *table(refused)]
        parts += [
            "\n<details markdown>",
            f"<summary>{len(rows) - len(refused)} rows where every cell works</summary>\n",
        ]
        parts += [*table({name: row for name, row in rows.items() if name not in refused}), "\n</details>"]
    parts += ["\n## What refusals say\n", *(f"{place}. {text}" for place, text in enumerate(notes, 1))]
    parts += [NOTES, PAIRS, "| not added | to an optimizer or model with | why not, and what to do |", "|---|---|---|"]
    parts += [f"| {added} | {there} | {text} |" for (added, there), text in REFUSED.items()]
    return "\n".join(parts) + "\n"


def table(rows: dict[str, list[str]]) -> list[str]:
    """Lines of a table of cells."""
    lines = ["| | | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 2) + "|"]
    return [*lines, *(name + " | ".join(row) + " |" for name, row in rows.items())]


HEAD = """# What works where

One line makes the optimizer a trainer's own:"""

LINES = (
    (
        "[transformers](transformers.md)",
        "transformers",
        "`TilestepTrainer(model, args, train_dataset=data)`",
        "test_transformers_trainer.py",
    ),
    (
        "[... with experts](transformers.md#expert-parallelism)",
        "transformers",
        "the same, with `from_pretrained(..., distributed_config=DistributedConfig(ep_size=8, fsdp_size=8))`",
        "test_transformers_experts.py",
    ),
    (
        "[TRL](transformers.md#trl-and-peft)",
        "trl",
        "`class Trainer(TilestepTrainerMixin, trl.SFTTrainer): ...`",
        "test_trl_trainer.py",
    ),
    (
        "[peft, 8-bit states](transformers.md#trl-and-peft)",
        "peft",
        '`optimizer_cls_and_kwargs=trainer_optimizer(args, state_dtype="int8")`',
        "test_trl_trainer.py",
    ),
    (
        "[accelerate](accelerate.md)",
        "accelerate",
        "`accelerator = tilestep.integrations.accelerate.Accelerator()`",
        "test_accelerate_loop.py",
    ),
    (
        "[Lightning](lightning.md)",
        "lightning",
        "`lightning.Trainer(gradient_clip_val=1.0, callbacks=[TilestepCallback()])`",
        "test_lightning_trainer.py",
    ),
    (
        "[torchtitan](torchtitan.md), its container",
        "torchtitan",
        '`Trainer.Config(optimizer=tilestep_optimizer("AdamW", lr=3e-4))`',
        "test_torchtitan_container.py",
    ),
    (
        "[torchao, fp8 layers](../guide/setups.md#fp8)",
        "torchao",
        "`tilestep.AdamW(model.parameters(), lr=3e-4)`, nothing else",
        "test_torchao_float8.py",
    ),
)
"""Name, package, what to write, and its test in tests/frameworks."""

RAN = """
All rows and cells ran on CPUs, as they do for every change (`make test-frameworks`). On an H200 the cells of one rank
ran too, at 2a209f3e (torch 2.11, transformers 5.17, accelerate 1.15, Lightning 2.6, torchtitan 0.3, torchao 0.18),
with the same outcomes but for one: Lightning moves a model to the CPU after `fit`, and `trainer.save_checkpoint` of a
sharded optimizer is refused then; `ModelCheckpoint` saves during `fit`. Models with experts trained over NCCL on two
H100s, at f5ccad6 with transformers 5.23. TRL's SFT trainer, which takes one GPU in a process, ran on an H100, at
37c761e1 with TRL 1.16 and peft 0.21.

Nothing is silent: what is not right raises an error that says what to do, before anything changes. Here is what is
refused; what works is folded. [Pairs that do not go together](#what-does-not-go-together) are at the end."""

NOTES = """
## What a cell is

The result of training a small model on a CPU: `tests/frameworks/test_matrix.py` trains it and checks this page,
`python tests/frameworks/cells.py` writes the page. "works" means the losses of `torch.optim.AdamW` in the same
framework, to a relative 1e-4 (5e-3 for float32 masters of a bfloat16 model and for bfloat16 states, 2e-2 for int8
states). "resume" means losses that are bitwise those of the uninterrupted training. "clip" clips at a norm of 0.05,
which every gradient exceeds. "accumulation" runs two backwards per step. "two ranks" also clips, and uses
DistributedDataParallel or, in torchtitan, FSDP2; `shard` needs no wrapper."""

PAIRS = """
## What does not go together

In any framework and without, an optimizer that has the second is refused the first. All else goes together
(`tests/combinations`).
"""


def all_cells() -> dict[str, dict[str, str]]:
    cells = {}
    with alone():
        for framework in FRAMEWORKS:
            cells[framework] = outcomes(framework, FEATURES[:-1])
    for framework in FRAMEWORKS:
        cells[framework] |= on_two_ranks(framework)
    return cells


if __name__ == "__main__":
    if len(sys.argv) == 3:
        try_two_ranks(*sys.argv[1:])
    else:
        assert all(importlib.util.find_spec(framework) for framework in FRAMEWORKS)
        PAGE.write_text(page(all_cells()))
