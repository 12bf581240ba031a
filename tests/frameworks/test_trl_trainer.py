"""TRL's SFTTrainer with an adapter of peft, beside torch's AdamW in the same trainer, with 8-bit states too."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestep

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="SFTTrainer takes one GPU in a process: set CUDA_VISIBLE_DEVICES=0"
)

STEPS = 6


def tokenizer() -> Any:
    tokenizers = importlib.import_module("tokenizers")
    words = {f"w{index}": index for index in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts() -> Any:
    drawn = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [" ".join(f"w{number}" for number in row) for row in drawn]
    return importlib.import_module("datasets").Dataset.from_dict({"text": rows})


def trained(folder: Path, kind: Any, lora: bool, steps: int = STEPS, resumes: bool = False, **options: Any) -> Any:
    """A trainer after a training, of an adapter or of the whole model.

    Args:
        folder: of its checkpoints.
        kind: the class.
        lora: whether an adapter of rank 32 is trained.
        steps: how many.
        resumes: whether to go on after three steps.
        options: of the optimizer, `AdamW`; none for the trainer's default.
    """
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=128,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    arguments = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
        adam_epsilon=1e-3, max_grad_norm=0.05, max_steps=steps, logging_steps=1, save_steps=STEPS // 2, report_to=[],
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        lr_scheduler_type="constant", optim="adamw_torch", max_length=16,
    )  # fmt: skip
    given: dict[str, Any] = {}
    if lora:
        given["peft_config"] = peft.LoraConfig(r=32, lora_alpha=64, target_modules=["c_attn"], task_type="CAUSAL_LM")
    if options:
        from tilestep.integrations.transformers import trainer_optimizer

        given["optimizer_cls_and_kwargs"] = trainer_optimizer(arguments, **options)
    trainer = kind(model, arguments, train_dataset=texts(), processing_class=tokenizer(), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resumes else None)
    return trainer


def mixed() -> Any:
    """TRL's trainer as docs/frameworks/transformers.md has it."""
    from tilestep.integrations.transformers import TilestepTrainerMixin

    class Trainer(TilestepTrainerMixin, trl.SFTTrainer):  # type: ignore[name-defined, misc]
        pass

    return Trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "whole model"])
def test_sft_losses_and_norms_are_those_of_torch_s_optimizer(lora: bool, tmp_path: Path) -> None:
    torchs = trained(tmp_path, trl.SFTTrainer, lora)
    assert isinstance(torchs.optimizer.optimizer, torch.optim.AdamW)
    for options in ({}, {"state_dtype": "int8"}):
        own = trained(tmp_path, mixed(), lora, **options)
        optimizer = own.optimizer.optimizer
        assert isinstance(optimizer, tilestep.AdamW)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert {*map(id, params)} == {id(param) for param in own.model.parameters() if param.requires_grad}
        # Both matrices of each adapter have rows of 32 numbers at least, and 4,096 numbers.
        in_blocks = [name for param in params for name in optimizer.state[param] if name.endswith("_codes")]
        assert bool(in_blocks) is bool(options) and (not options or not lora or len(in_blocks) == 2 * len(params))
        assert len(logged(torchs, "loss")) == STEPS and min(logged(torchs, "grad_norm")) > 0.05
        tolerance = 2e-2 if options else 1e-4
        for name in ("loss", "grad_norm"):
            assert logged(own, name) == pytest.approx(logged(torchs, name), rel=tolerance)


def test_an_adapter_with_8_bit_states_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path, mixed(), True, state_dtype="int8")
    resumed = trained(tmp_path, mixed(), True, resumes=True, state_dtype="int8")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(resumed, "loss")[-1] == logged(whole, "loss")[-1]
