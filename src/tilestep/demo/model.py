"""A byte-level GPT, and the text it learns: Python's own language reference, which every Python carries."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The model's size."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.inner_norm = nn.LayerNorm(size.width)
        self.inner_in = nn.Linear(size.width, 4 * size.width)
        self.inner_out = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.inner_out(functional.gelu(self.inner_in(self.inner_norm(hidden))))


class GPT(nn.Module):
    """A decoder over bytes.

    >>> GPT(Size(layers=1, width=8, heads=2, context=16))(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 256])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        nn.init.normal_(self.byte.weight, std=0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next byte: (batch, length) int64 -> (batch, length, 256)."""
        hidden = self.byte(text) + self.position[: text.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of each byte of a (batch, length + 1) text given those before it."""
        scores = self(text[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def documentation() -> Tensor:
    """Return the text of `pydoc_data.topics` as a 1-D uint8 tensor.

    >>> bytes(documentation()[:400].tolist()).decode().isprintable() or documentation().numel() > 100_000
    True
    """
    topics = pydoc_data.topics.topics
    text = "\n\n".join(f"{name}\n\n{topics[name].strip()}" for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
