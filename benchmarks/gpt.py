"""GPT-2 in two of its sizes, and a tiny one for tests on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    # width, layers, heads, vocabulary, length
    "tiny": (64, 3, 4, 256, 32),
    "124M": (768, 12, 12, 50257, 1024),
    "350M": (1024, 24, 16, 50257, 1024),
}


class Block(nn.Module):
    """Attention and two linear layers, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.before_mlp(x))))


class GPT(nn.Module):
    """A language model with its loss: called with tokens, it returns the mean over positions.

    Args:
        size: A key of ``SIZES``.
    """

    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers, heads, vocabulary, self.length = SIZES[size]
        self.vocabulary = vocabulary
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def batch(self, samples: int, device: str) -> Tensor:
        """Return random tokens, one more per row than positions."""
        return torch.randint(self.vocabulary, (samples, self.length + 1), device=device)

    def forward(self, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def size_for(device: str, wanted: str) -> str:
    """Return the wanted size on a GPU, else the tiny one."""
    return wanted if device.startswith("cuda") else "tiny"
