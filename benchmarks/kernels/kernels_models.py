"""The models of compute.py, each in a plain and an optimised version with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

import lightning_opt as lo
from lightning_opt.kernels.attention.self_attention import rotate


class RecomputedRotary(lo.RotaryEmbedding):
    """Computes angles, cosines and sines at each call, as many published models do."""

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        length, device = x.shape[-2], x.device
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        places = torch.arange(offset, offset + length, dtype=torch.float32, device=device)
        angles = torch.outer(places, self.base**-exponents)
        return rotate(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


class ManualAttention(lo.SelfAttention):
    """The same weights; scores, softmax and weighted sum by formula."""

    def forward(self, x: Tensor, key_padding_mask: Any = None, offset: int = 0) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.sizes, dim=-1)
        )
        query, key = self.rotary(query, offset), self.rotary(key, offset)
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        if self.causal:
            length = x.shape[1]
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


@dataclass(frozen=True)
class Parts:
    """The versions of attention and positions."""

    sdpa: bool = False
    cached: bool = False

    def blocks(self, width: int, depth: int, heads: int, length: int, causal: bool) -> nn.Module:
        rotary_class = lo.RotaryEmbedding if self.cached else RecomputedRotary
        rotary = rotary_class(width // heads, max_positions=length)
        attention_class = lo.SelfAttention if self.sdpa else ManualAttention
        return nn.Sequential(
            *(
                Block(width, attention_class(width, heads, causal=causal, rotary=rotary))
                for _ in range(depth)
            )
        )


class VisionTransformer(nn.Module):
    """Images of 32x32 in patches of 4x4, so 64 tokens."""

    def __init__(self, parts: Parts, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = parts.blocks(width, depth, heads, 64, causal=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


class ByteGPT(nn.Module):
    """A causal transformer on bytes."""

    def __init__(self, parts: Parts, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = parts.blocks(width, depth, heads, length, causal=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens))).transpose(1, 2)


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


def conv_net(width: int, depth: int) -> nn.Module:
    """Three stages of residual blocks on images of 32x32, each half as large and twice as wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for stage in range(3):
        if stage:
            layers.append(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1))
            width *= 2
        layers += [Residual(width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


MODELS = ("vision transformer", "ConvNet", "byte GPT")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    # width, depth, heads, (length,) samples; for the ConvNet width, depth, samples
    "quick": {
        "vision transformer": (32, 2, 2, 4),
        "ConvNet": (8, 1, 4),
        "byte GPT": (32, 2, 2, 64, 2),
    },
    "cpu": {
        "vision transformer": (128, 4, 4, 32),
        "ConvNet": (24, 2, 32),
        "byte GPT": (128, 4, 4, 256, 8),
    },
    "cuda": {
        # Small enough for eleven processes at once on 80 GB.
        "vision transformer": (768, 6, 12, 64),
        "ConvNet": (64, 3, 128),
        "byte GPT": (768, 6, 12, 1024, 4),
    },
}


class Learner(L.LightningModule):
    """Classifies images or predicts the next byte, with AdamW's defaults."""

    def __init__(self, name: str, size: str, parts: Parts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = name
        *shape, self.samples = SIZES[size][name]
        self.length = 0
        if name == "vision transformer":
            self.network: nn.Module = VisionTransformer(parts, *shape)
        elif name == "ConvNet":
            self.network = conv_net(*shape)
        else:
            self.network, self.length = ByteGPT(parts, *shape), shape[-1]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self(inputs).float(), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(IterableDataset[Any]):
    """Eight random batches, repeated."""

    def __init__(self, learner: Learner) -> None:
        generator = torch.Generator().manual_seed(1)
        size = learner.samples
        self.batches = []
        for _ in range(8):
            if learner.length:
                text = torch.randint(256, (size, learner.length + 1), generator=generator)
                self.batches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
            else:
                images = torch.randn(size, 3, 32, 32, generator=generator)
                self.batches.append((images, torch.randint(10, (size,), generator=generator)))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches
