"""transformers' Trainer with expert parallelism: parameters on several meshes, and plain tensors, in one optimizer.

Two processes train a small mixture of experts (`python -m torch.distributed.run ... this file FOLDER`), with
transformers' own AdamW, norm and clip, and with `TilestepTrainer`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.xdist_group("experts")  # one process starts the ranks, for all of these tests
HAS_GPUS = torch.cuda.device_count() >= 2
MAX_NORM = 0.05
"""Below every norm that there is: a clip that does not happen is seen."""
LAYOUTS: dict[str, dict[str, int]] = {"FSDP2 and experts": {"fsdp_size": 2}, "tensors and experts": {"tp_size": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "accumulation": {"gradient_accumulation_steps": 2}, "int8 states": {"state_dtype": "int8"},
}  # fmt: skip

TRIED = [("plain", "torch"), ("accumulation", "torch"), ("plain", "alone"), *((way, "integrated") for way in WAYS)]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def save_model(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def trained(folder: Path, layout: str, way: str, mode: str, clip: float = MAX_NORM) -> dict[str, Any]:
    """Losses, norms and weights of a training, and on how many meshes its parameters are.

    Args:
        folder: of the model.
        layout: of `LAYOUTS`.
        way: of `WAYS`.
        mode: "torch", transformers' Trainer as it is; "alone", with tilestep's optimizer; "integrated".
        clip: the largest norm; 0 for no clip.
    """
    import transformers
    from transformers.distributed import DistributedConfig

    from tilestep.integrations.transformers import TilestepTrainer, trainer_optimizer

    options = dict(WAYS[way])
    own = {"state_dtype": options.pop("state_dtype")} if "state_dtype" in options else {}
    model: Any = transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(ep_size=2, **LAYOUTS[layout]), experts_implementation="eager",
        dtype=torch.float32,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, learning_rate=1e-2, adam_epsilon=1e-3,
        weight_decay=0.1, report_to=[], logging_steps=1, use_cpu=not HAS_GPUS, disable_tqdm=True, max_steps=4,
        max_grad_norm=clip, save_strategy="no", lr_scheduler_type="constant", **options,
    )  # fmt: skip
    kind: Any = TilestepTrainer if mode == "integrated" else transformers.Trainer
    asked = {"optimizer_cls_and_kwargs": trainer_optimizer(arguments, **own)} if own or mode == "alone" else {}
    trainer = kind(model, arguments, train_dataset=Tokens(), **asked)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    params = dict(model.named_parameters())
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in params.items()}
    optimizer = trainer.optimizer.optimizer
    found = {
        "kind": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        "meshes": len({param.device_mesh if isinstance(param, DTensor) else None for param in params.values()}),
        "int8": sum(str(v.dtype) == "torch.int8" for s in optimizer.state.values() for v in s.values()),
        "weights": {name: tensor.detach().flatten().tolist() for name, tensor in whole.items()},
    }
    if mode == "integrated" and way == "plain":
        found["reloaded"] = comes_back(optimizer, folder / f"state {layout}")
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return found | {name: [float(entry[name]) for entry in entries] for name in ("loss", "grad_norm")}


def comes_back(optimizer: Any, folder: Path) -> bool:
    """Whether states are the same after torch.distributed.checkpoint has written and read them."""

    def parts() -> list[torch.Tensor]:
        values = [value for state in optimizer.state.values() for value in state.values()]
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]

    before = [part.clone() for part in parts()]
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    for part in parts():
        part.zero_()
    read = {"optimizer": optimizer.state_dict()}
    dcp.load(read, checkpoint_id=folder)
    optimizer.load_state_dict(read["optimizer"])
    return any(part.any() for part in before) and all(map(torch.equal, before, parts()))


def train_on_this_rank(folder: Path) -> None:
    import accelerate

    if HAS_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # accelerate takes tensor parallelism of a model on GPUs alone; the layout is the same on CPUs.
        accelerate.ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    dist.init_process_group("cpu:gloo,cuda:nccl" if HAS_GPUS else "gloo")
    if dist.get_rank() == 0:
        save_model(folder)
    dist.barrier()
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        accelerate.state.AcceleratorState._reset_state()
        found[f"{layout}, unclipped"] = trained(folder, layout, "plain", "torch", clip=0.0)
        for way, mode in TRIED:
            found[f"{layout}, {way}, {mode}"] = trained(folder, layout, way, mode)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    # The threads of process groups end while there is an interpreter: they hold Python objects.
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    pytest.importorskip("transformers.distributed")
    folder = tmp_path_factory.mktemp("experts")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment |= {} if HAS_GPUS else {"CUDA_VISIBLE_DEVICES": ""}
    for _ in range(2):
        ran = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=280)
        # By a thread of gloo while the interpreter ends; see `run` in tests/test_examples.py.
        if "Signal 6 (SIGABRT)" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def close(own: dict[str, Any], other: dict[str, Any], tolerance: float) -> bool:
    """Whether two trainings have the same losses, norms and weights."""
    series = all(own[name] == pytest.approx(other[name], rel=tolerance) for name in ("loss", "grad_norm"))
    return series and all(
        own["weights"][name] == pytest.approx(values, rel=tolerance, abs=10 * tolerance * 1e-2)
        for name, values in other["weights"].items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("way", "mode"), TRIED[2:])
def test_experts_train_as_with_the_trainer_s_own_loop(
    ranks: list[dict[str, Any]], layout: str, way: str, mode: str
) -> None:
    reference = "plain" if way == "int8 states" else way
    tolerance = 2e-2 if way == "int8 states" else 1e-4
    for found in ranks:
        own, torchs = found[f"{layout}, {way}, {mode}"], found[f"{layout}, {reference}, torch"]
        assert own["kind"].startswith("tilestep.") and torchs["kind"].startswith("torch.")
        # Experts, dense DTensors, and plain tensors beside tensor parallelism.
        assert own["meshes"] == (3 if "tensors" in layout else 2)
        assert bool(own["int8"]) is (way == "int8 states")
        assert len(own["loss"]) == 4 and min(own["grad_norm"]) > MAX_NORM
        assert close(own, torchs, tolerance)
        assert own.get("reloaded", True)
        assert own["grad_norm"] == ranks[0][f"{layout}, {way}, {mode}"]["grad_norm"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clip_that_does_not_happen_would_be_seen(ranks: list[dict[str, Any]], layout: str) -> None:
    clipped, unclipped = (ranks[0][f"{layout}, {name}"] for name in ("plain, torch", "unclipped"))
    assert clipped["loss"][0] == pytest.approx(unclipped["loss"][0]) and not close(clipped, unclipped, 2e-2)


if __name__ == "__main__":
    train_on_this_rank(Path(sys.argv[1]))
