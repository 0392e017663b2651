"""A byte-level GPT and its data, the source of Python's standard library.

The demo and the notebooks train it. Nothing is downloaded: the text is the ``.py`` files of the
running interpreter in sorted order, so each version of Python always gives the same batches.

The data is as dirty as an unfiltered crawl. A share of the training batches comes from one damaged
file each, read in order, as without shuffling across files. Files are damaged in one of four ways
(``DAMAGES``): compressed, converted to UTF-16, filled with zeros, or repeating their longest line.
No loss or gradient is modified: jumps of the gradient norm are the model's response to the data.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # a token is a byte
Batch = tuple[Tensor, bool]


@functools.cache
def read_sources(folder: str | Path | None = None) -> list[bytes]:
    """Return the ``.py`` files under ``folder``, by default the standard library, sorted by path.

    Tests, installed packages and files under 1 KiB are skipped.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    sources = [
        (root / path).read_bytes() for path in sorted(paths) if skipped.isdisjoint(path.parts)
    ]
    sources = [source for source in sources if len(source) >= 1024]
    if not sources:
        raise FileNotFoundError(f"No Python source of 1 KiB or more under {root}.")
    return sources


def compressed(source: bytes) -> bytes:
    """An archive read as text."""
    return zlib.compress(source)


def widened(source: bytes) -> bytes:
    """A file in UTF-16 read byte by byte: every other byte is zero."""
    return source.decode("latin-1").encode("utf-16")


def zeroed(source: bytes) -> bytes:
    """A file whose blocks were allocated but not written before a crash."""
    return bytes(len(source))


def stuck(source: bytes) -> bytes:
    """A file that repeats the longest line of the source."""
    return max(source.splitlines(keepends=True), key=len)


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (compressed, widened, zeroed, stuck)


class SourceBatches(Dataset[Batch]):
    """Batches of windows of bytes. A batch depends only on the seed and its index.

    An item is a pair: the windows, int64 of shape ``(batch_size, window + 1)``, and whether they
    come from a damaged file, which only reports use.

    Args:
        sources: Contents of the files to draw from.
        length: Number of batches.
        batch_size: Windows per batch.
        window: Length of the model's input. A window has one more byte, the last to predict.
        damaged: Share of the batches that come from a damaged file, from 0 to 1.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        sources: list[bytes],
        length: int,
        batch_size: int = 8,
        window: int = 64,
        damaged: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= damaged <= 1.0:
            raise ValueError(f"damaged must be a share from 0 to 1, got {damaged!r}.")
        self.sources, self.text = sources, as_tensor(b"".join(sources))
        self.length, self.batch_size, self.window = length, batch_size, window
        self.damaged, self.seed = damaged, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.length:  # also ends iteration
            raise IndexError(f"batch {index} of {self.length}")
        draw = torch.Generator().manual_seed(self.seed * self.length + index)
        damaged = torch.rand((), generator=draw).item() < self.damaged
        windows = self._draw_damaged(draw) if damaged else self._draw_clean(draw)
        return windows.long(), damaged

    def _draw_clean(self, draw: torch.Generator) -> Tensor:
        last = len(self.text) - self.window
        starts = torch.randint(last, (self.batch_size, 1), generator=draw)
        return self.text[starts + torch.arange(self.window + 1)]

    def _draw_damaged(self, draw: torch.Generator) -> Tensor:
        source = self.sources[int(torch.randint(len(self.sources), (), generator=draw))]
        content = DAMAGES[int(torch.randint(len(DAMAGES), (), generator=draw))](source)
        size = self.batch_size * (self.window + 1)
        content *= -(-size // len(content))  # a short file is repeated
        return as_tensor(content[:size]).view(self.batch_size, -1)


def as_tensor(content: bytes) -> Tensor:
    """Copy bytes to a uint8 tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class SourceData(L.LightningDataModule):
    """Nine of ten files for training, with damaged batches; the tenth, undamaged, for validation.

    Args:
        steps: Number of training batches.
        damaged: Share of the training batches that come from a damaged file.
        seed: Seed of the training batches; validation is the same for every seed.
    """

    def __init__(self, steps: int = 700, damaged: float = 0.04, seed: int = 0) -> None:
        super().__init__()
        self.steps, self.damaged, self.seed = steps, damaged, seed

    def setup(self, stage: str) -> None:
        sources = list(read_sources())  # a copy, since the list is cached
        held_out = sources[::10]
        del sources[::10]
        self.training = SourceBatches(sources, self.steps, damaged=self.damaged, seed=self.seed)
        self.validation = SourceBatches(held_out, length=4, batch_size=64)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.training, batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.validation, batch_size=None)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.transpose(1, 3).unbind(2)  # (batch, heads, time, depth) each
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(L.LightningModule):
    """A small decoder-only transformer over bytes, trained with AdamW.

    Args:
        width: Features of a token.
        depth: Number of blocks.
        heads: Attention heads, a divisor of ``width``.
        window: Longest input, in bytes.
        lr: Learning rate after 20 steps of linear warm-up.
    """

    def __init__(
        self,
        width: int = 144,
        depth: int = 4,
        heads: int = 6,
        window: int = 64,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(window, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # the initialisation of GPT-2
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, time, 256)`` for the byte after each of ``tokens``."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Batch) -> None:
        self.log("val_loss", self.loss(batch[0]), batch_size=len(batch[0]), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
