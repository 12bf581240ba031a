"""Real architectures from their published configurations, with random weights: nothing is downloaded.

Batches are what fits one step of a small job, below those of torch's own benchmark suites (huggingface: 8 to 32
sequences, timm: 128 images), which fill a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Architecture", "available", "make_loss"]


@dataclass(frozen=True)
class Architecture:
    """One architecture and the batch it is trained with.

    Args:
        name: what the tables call it.
        suite: the library that has it, `transformers` or `timm`.
        source: the library's class prefix and task (`Bert`, `ForMaskedLM`), or timm's model name.
        batch: sequences or images in a batch.
        size: tokens of a sequence, or pixels of an image's side.
        config: what the published configuration has beside the library's defaults.
        tiny: on top of that, a small model of the same kind: checks the harness, measures nothing.
        tiny_size: its sequences' or images' size.
    """

    name: str
    suite: str
    source: tuple[str, str] | str
    batch: int
    size: int
    config: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    tiny_size: int = 32

    def build(self, device: torch.device, quick: bool = False) -> nn.Module:
        """Return the model in training mode, float32, with random weights.

        Raises:
            ImportError: the suite is not installed.
        """
        options = {**self.config, **(self.tiny if quick else {})}
        with device:
            model = _transformer(self.source, options) if isinstance(self.source, tuple) else _timm(self, options)
        return model.to(device).train()

    def inputs(self, model: nn.Module, device: torch.device, quick: bool = False, batch: int = 0) -> dict[str, Tensor]:
        """Return one random batch: token ids and labels, or images and labels.

        Args:
            model: what `build` returned.
            device: where.
            quick: of the small model's size.
            batch: sequences or images; 0 takes the architecture's own.
        """
        count = batch or (2 if quick else self.batch)
        size = self.tiny_size if quick else self.size
        generator = torch.Generator(device).manual_seed(0)
        if self.suite == "timm":
            images = torch.randn(count, 3, size, size, device=device, generator=generator)
            classes = int(model.num_classes)  # type: ignore[arg-type]
            labels = torch.randint(classes, (count,), device=device, generator=generator)
            return {"images": images, "labels": labels}
        vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        ids = torch.randint(vocabulary, (count, size), device=device, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def _transformer(source: tuple[str, str], options: dict[str, Any]) -> nn.Module:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    prefix, task = source
    config = getattr(transformers, f"{prefix}Config")(**options)
    config.use_cache = False
    return getattr(transformers, prefix + task)(config)


def _timm(architecture: Architecture, options: dict[str, Any]) -> nn.Module:
    timm = importlib.import_module("timm")
    return timm.create_model(architecture.source, pretrained=False, **options)


def make_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return a function that runs the model forward under bf16 autocast and returns the loss.

    Args:
        model: from `Architecture.build`, or what `torch.compile` made of it.
        inputs: from `Architecture.inputs`.
    """
    device = inputs["labels"].device.type

    def language() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(**inputs).loss

    def image() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.cross_entropy(model(inputs["images"]), inputs["labels"])

    return image if "images" in inputs else language


_TINY_ENCODER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
_TINY_LLAMA = {**_TINY_ENCODER, "num_key_value_heads": 1}

MODELS = [
    Architecture("BERT-base", "transformers", ("Bert", "ForMaskedLM"), 8, 512, tiny=_TINY_ENCODER),
    Architecture(
        "RoBERTa-base", "transformers", ("Roberta", "ForMaskedLM"), 8, 512,
        config=dict(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
        tiny=_TINY_ENCODER,
    ),
    Architecture(
        "DistilBERT", "transformers", ("DistilBert", "ForMaskedLM"), 16, 128,
        tiny=dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=100),
    ),
    Architecture(
        "ALBERT-base", "transformers", ("Albert", "ForMaskedLM"), 8, 512,
        config=dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072),
        tiny={**_TINY_ENCODER, "embedding_size": 16},
    ),
    Architecture(
        "ELECTRA-small", "transformers", ("Electra", "ForMaskedLM"), 16, 128,
        tiny={**_TINY_ENCODER, "embedding_size": 16},
    ),
    Architecture(
        "GPT-2", "transformers", ("GPT2", "LMHeadModel"), 4, 512,
        tiny=dict(n_embd=32, n_layer=2, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0),
    ),
    Architecture(
        "T5-base", "transformers", ("T5", "ForConditionalGeneration"), 4, 512,
        config=dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0),
        tiny=dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=100),
    ),
    Architecture(
        "SmolLM2-360M", "transformers", ("Llama", "ForCausalLM"), 4, 512,
        config=dict(
            hidden_size=960, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5,
            intermediate_size=2560, vocab_size=49152, tie_word_embeddings=True,
        ),
        tiny=_TINY_LLAMA,
    ),
    Architecture(
        "TinyLlama-1.1B", "transformers", ("Llama", "ForCausalLM"), 4, 512,
        config=dict(
            hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
            intermediate_size=5632, vocab_size=32000,
        ),
        tiny=_TINY_LLAMA,
    ),
    Architecture(
        "ViT-B/16", "timm", "vit_base_patch16_224", 16, 224,
        tiny=dict(embed_dim=48, depth=2, num_heads=3, img_size=32, num_classes=10),
    ),
    Architecture(
        "ConvNeXt-T", "timm", "convnext_tiny", 16, 224,
        tiny=dict(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=10),
    ),
    Architecture(
        "Swin-T", "timm", "swin_tiny_patch4_window7_224", 16, 224,
        tiny=dict(embed_dim=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), num_classes=10), tiny_size=224,
    ),
    Architecture("ResNet-50", "timm", "resnet50", 16, 224, tiny=dict(layers=(1, 1, 1, 1), num_classes=10)),
    Architecture("EfficientNet-B0", "timm", "efficientnet_b0", 16, 224, tiny=dict(num_classes=10)),
    Architecture("MobileNetV3-L", "timm", "mobilenetv3_large_100", 16, 224, tiny=dict(num_classes=10)),
    Architecture("MobileNetV2", "timm", "mobilenetv2_100", 16, 224, tiny=dict(num_classes=10)),
]  # fmt: skip


def available(names: Sequence[str] = ()) -> tuple[list[Architecture], list[str]]:
    """Return the chosen architectures whose suite is installed, and the suites that are missing.

    Args:
        names: of `MODELS`, in any case; empty means all.

    Raises:
        ValueError: for a name that no model has.

    >>> available(["no such model"])
    Traceback (most recent call last):
    ValueError: no model is called 'no such model'; there are: BERT-base, RoBERTa-base, DistilBERT, ALBERT-base, \
ELECTRA-small, GPT-2, T5-base, SmolLM2-360M, TinyLlama-1.1B, ViT-B/16, ConvNeXt-T, Swin-T, ResNet-50, EfficientNet-B0, \
MobileNetV3-L, MobileNetV2
    """
    known = {model.name.lower(): model for model in MODELS}
    for name in names:
        if name.lower() not in known:
            listed = ", ".join(model.name for model in MODELS)
            raise ValueError(f"no model is called {name!r}; there are: {listed}")
    chosen = [known[name.lower()] for name in names] or list(MODELS)
    missing = sorted({model.suite for model in chosen if importlib.util.find_spec(model.suite) is None})
    return [model for model in chosen if model.suite not in missing], missing
