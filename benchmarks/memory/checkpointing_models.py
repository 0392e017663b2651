"""Models of the checkpointing benchmark: five of ours, two of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Chained(nn.Module):
    """Blocks between an input and an output."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Dense(nn.Module):
    """A linear layer with norm and activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.linear(x)))


class DoubleConvolution(nn.Module):
    """Two convolutions with GroupNorm, of one input or two concatenated ones."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, padding=1),
            nn.GroupNorm(8, fan_out),
            nn.SiLU(),
            nn.Conv2d(fan_out, fan_out, 3, padding=1),
            nn.GroupNorm(8, fan_out),
            nn.SiLU(),
        )

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.body(x if skip is None else torch.cat([x, skip], 1))


class UNet(nn.Module):
    """Four levels with long skips."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.down = nn.ModuleList(
            DoubleConvolution(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(
            DoubleConvolution(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for block in self.up:
            x = block(F.interpolate(x, scale_factor=2.0), skip=skips.pop())
        return self.last(x)


class EncoderDecoder(nn.Module):
    """Every block of the decoder attends to the encoder's output, as in T5."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        settings: dict[str, Any] = {
            "dim_feedforward": 4 * width,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, **settings) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, **settings) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return x


class OfTransformers(nn.Module):
    """A model of `transformers`, from its input to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        settings = {} if x.is_floating_point() else {"use_cache": False}
        return self.model(x, **settings).logits


def gpt2(quick: bool) -> tuple[nn.Module, Tensor]:
    """Twelve blocks of GPT-2 at a quarter of its width, with its dropout, on 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 512, "n_positions": 128, "n_embd": 192, "n_layer": 12, "n_head": 3}
    settings = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    ids = torch.randint(512, (2 if quick else 4, 128))
    return OfTransformers(GPT2LMHeadModel(settings)), ids


def vit(quick: bool) -> tuple[nn.Module, Tensor]:
    """Twelve blocks of ViT-Tiny, on 145 tokens."""
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        image_size=96,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=10,  # type: ignore[call-arg] # of the base class
    )
    return OfTransformers(ViTForImageClassification(settings)), torch.randn(4, 3, 96, 96)


def transformer(quick: bool) -> tuple[nn.Module, Tensor]:
    """Twenty-four layers of width 256."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )

    model = Chained(nn.Identity(), [layer() for _ in range(24)], nn.LayerNorm(256))
    return model, torch.randn(2 if quick else 8, 256, 256)


def convnet(quick: bool) -> tuple[nn.Module, Tensor]:
    """Twelve residual blocks with BatchNorm."""
    first = nn.Conv2d(3, 32, 3, padding=1)
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Chained(first, [Residual(32) for _ in range(12)], last), torch.randn(4, 3, 48, 48)


def mlp(quick: bool) -> tuple[nn.Module, Tensor]:
    """Thirty-two blocks of width 256."""
    model = Chained(nn.Identity(), [Dense(256) for _ in range(32)], nn.Linear(256, 10))
    return model, torch.randn(1024, 256)


def unet(quick: bool) -> tuple[nn.Module, Tensor]:
    """Seven double convolutions."""
    return UNet(), torch.randn(2, 3, 96, 96)


def encoder_decoder(quick: bool) -> tuple[nn.Module, Tensor]:
    """Six layers on either side."""
    return EncoderDecoder(), torch.randn(4, 128, 192)


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "transformer": transformer,
    "convnet": convnet,
    "mlp": mlp,
    "unet": unet,
    "encoder-decoder": encoder_decoder,
    "GPT-2": gpt2,
    "ViT": vit,
}
