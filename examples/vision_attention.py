"""A small image classifier with rotary attention, original and optimised.

The network resembles Vision-BDH: a round of attention between positive, sparse codes, which are
both queries and keys, and a gate; it runs several times. The data are scikit-learn's 8 x 8 digits,
one token per pixel. The original computes rotary angles at each call and attention by hand, with
torch's default AdamW. Each optimisation is compared alone, then all together:

    python vision_attention.py                           # the table, with a check of the losses
    python vision_attention.py --train --deterministic   # the optimised one, with a checkpoint
    python vision_attention.py --train --deterministic --epochs 12 --resume
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_opt as lo
from measuring import Record, largest_difference, quiet_trainer, silence_advice

BATCH = 64
TRAINING, TESTING = 22 * BATCH, 389  # of 1797 images


class RecomputedRotary(nn.Module):
    """Rotary positions that compute angles, cosines and sines at each call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32) / self.dim
        places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(places, 10_000.0**-exponents)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that computes the whole matrix of scores."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ value


class Round(nn.Module):
    """One round: attention between codes, a gate, and a residual."""

    def __init__(self, width: int, heads: int, cached: bool, sdpa: bool) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.encode = nn.Linear(width, heads * width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.decode = nn.Linear(heads * width, width, bias=False)
        self.found_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.rotary = (
            lo.RotaryEmbedding(width, max_positions=64) if cached else RecomputedRotary(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        codes = F.relu(self.encode(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        turned = self.rotary(codes)  # (batch, heads, places, width)
        # Looked up at each call, so that AttentionBackend can replace it.
        attend = F.scaled_dot_product_attention if self.sdpa else attention_by_hand
        found = attend(turned, turned, x[:, None].expand_as(codes))
        gated = codes * F.relu(self.gate(self.found_norm(found)))
        return self.norm(x + self.decode(gated.transpose(1, 2).flatten(2)))


class VisionBDH(L.LightningModule):
    """Two convolutions create tokens, one round runs ``depth`` times, and a head classifies.

    Args:
        cached: Compute the rotary tables once, instead of at each call.
        sdpa: Use torch's fused attention, instead of attention by hand.
        width: Features per token.
        heads: Codes per token.
        depth: Number of rounds.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self,
        cached: bool = False,
        sdpa: bool = False,
        width: int = 32,
        heads: int = 4,
        depth: int = 3,
        lr: float = 3e-3,
    ) -> None:
        super().__init__()
        self.depth, self.lr = depth, lr
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, width, 3, padding=1)
        )
        self.stem_norm = nn.LayerNorm(width)
        self.round = Round(width, heads, cached, sdpa)
        self.head = nn.Linear(64 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(images).flatten(2).transpose(1, 2))
        for _ in range(self.depth):
            x = self.round(x)
        return self.head(x.flatten(1))

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test images."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    return (
        TensorDataset(images[:TRAINING], labels[:TRAINING]),
        TensorDataset(images[-TESTING:], labels[-TESTING:]),
    )


def batches(dataset: TensorDataset, size: int) -> DataLoader[Any]:
    """Return a loader whose order depends only on the epoch, so that a resumed run has the same."""
    return DataLoader(dataset, size, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))


@torch.no_grad()
def accuracy(model: L.LightningModule, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    return (model.eval()(images).argmax(-1) == labels).float().mean().item()


@dataclass(frozen=True)
class Variant:
    """One way to train the same network on the same batches.

    Attributes:
        name: Its name in the table.
        callbacks: Creates the callbacks of a run.
        cached: See :class:`VisionBDH`.
        sdpa: See :class:`VisionBDH`.
        accumulate: Parts of a batch per step of the optimizer.
    """

    name: str
    callbacks: Callable[[], list[L.Callback]] = list
    cached: bool = False
    sdpa: bool = False
    accumulate: int = 1

    def model(self, seed: int) -> VisionBDH:
        L.seed_everything(seed, verbose=False)
        return VisionBDH(cached=self.cached, sdpa=self.sdpa)


def variants(backend: str) -> list[Variant]:
    """Return the original, each optimisation alone, and all together.

    Args:
        backend: The backend of torch.compile, or "none" to skip it.
    """

    def compiled() -> list[L.Callback]:
        return [lo.CompileModel(backend=backend)] if backend != "none" else []

    def together() -> list[L.Callback]:
        return [lo.FusedOptimizer(), lo.ChannelsLast(), lo.AttentionBackend(), *compiled()]

    alone = [
        Variant("original"),
        Variant("cached rotary tables", cached=True),
        Variant("SDPA", lambda: [lo.AttentionBackend()], sdpa=True),
        Variant("FusedOptimizer", lambda: [lo.FusedOptimizer()]),
        Variant("ChannelsLast", lambda: [lo.ChannelsLast()]),
        Variant("accumulation, 2 x 32", accumulate=2),
    ]
    if backend != "none":
        alone.append(Variant("CompileModel", compiled))
    return [*alone, Variant("all together", together, cached=True, sdpa=True)]


def train(
    variant: Variant, steps: int, seed: int, deterministic: bool
) -> tuple[VisionBDH, Record, list[L.Callback]]:
    """Train for a number of optimizer steps; return the model, the losses and the callbacks."""
    model, record, callbacks = variant.model(seed), Record(), variant.callbacks()
    trainer = quiet_trainer(
        [*callbacks, record],
        deterministic=deterministic,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=variant.accumulate,
    )
    trainer.fit(model, batches(digits()[0], BATCH // variant.accumulate))
    return model, record, callbacks


def compare(steps: int, seed: int, deterministic: bool, backend: str) -> lo.Report:
    """Return a table with one row per variant, all from the same weights on the same batches."""
    _, test = digits()
    rows: list[dict[str, Any]] = []
    notes = [
        "step ms: median of a step of 64 images, without the first three (compilation happens in "
        "the first).",
        "difference: the largest relative difference of a loss from the original run.",
    ]
    reference: list[float] = []
    for variant in variants(backend):
        model, record, callbacks = train(variant, steps, seed, deterministic)
        losses = record.step_losses(variant.accumulate)
        reference = reference or losses
        rows.append(
            {
                "run": variant.name,
                "step ms": (ms := record.step_ms(variant.accumulate)),
                "of original": ms / (rows[0]["step ms"] if rows else ms),
                "last loss": losses[-1],
                "difference": largest_difference(losses, reference),
                "test accuracy": accuracy(model, test),
            }
        )
        notes += [note for callback in callbacks for note in found_by(callback, variant.name)]
    return lo.Report(f"A Vision-BDH on the digits, {steps} steps, seed {seed}", rows, notes)


def found_by(callback: L.Callback, run: str) -> list[str]:
    """Return the decisions of a callback, one sentence each."""
    if isinstance(callback, lo.FusedOptimizer):
        return [
            f"{run}: the optimizer is {row['implementation']}." for row in callback.report().rows
        ]
    if isinstance(callback, lo.ChannelsLast):
        return [
            f"{run}: images are {row['memory format']}, because of {row['because']}."
            for row in callback.report().rows
        ]
    if isinstance(callback, lo.AttentionBackend):
        return [f"{run}: the backend is {row['backend']!r}." for row in callback.report().rows]
    if isinstance(callback, lo.CompileModel):
        seconds = sum(row["seconds"] for row in callback.report().rows)
        return [f"{run}: compiled in {seconds:.1f} s."]
    return []


def train_and_keep(
    folder: Path, epochs: int, seed: int, deterministic: bool, resume: bool, backend: str
) -> VisionBDH:
    """Train the optimised model and save ``last.ckpt`` in ``folder``, or resume from it."""
    last = folder / "last.ckpt"
    if resume and not last.exists():
        raise SystemExit(f"There is no {last} to resume from: run without --resume first.")
    variant = variants(backend)[-1]
    model, callbacks = variant.model(seed), variant.callbacks()
    kept = ModelCheckpoint(folder, save_last=True, save_top_k=0, enable_version_counter=False)
    trainer = quiet_trainer(
        [*callbacks, kept],
        deterministic=deterministic,
        max_epochs=epochs,
        enable_checkpointing=True,
    )
    training, test = digits()
    trainer.fit(model, batches(training, BATCH), ckpt_path=last if resume else None)
    print(f"epoch {trainer.current_epoch}: accuracy {accuracy(model, test):.1%} on the test images")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=66, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="same bits in each run")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile, or none (%(default)s)"
    )
    parser.add_argument("--train", action="store_true", help="train the optimised model only")
    parser.add_argument("--epochs", type=int, default=6, help="with --train: in all (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="with --train: from last.ckpt")
    parser.add_argument("--folder", type=Path, default=Path("runs/vision"), help="of last.ckpt")
    args = parser.parse_args()
    if min(args.steps, args.epochs) < 1:
        parser.error("--steps and --epochs must be at least 1")
    silence_advice()
    if args.train:
        train_and_keep(
            args.folder, args.epochs, args.seed, args.deterministic, args.resume, args.backend
        )
    else:
        compare(args.steps, args.seed, args.deterministic, args.backend).print()


if __name__ == "__main__":
    main()
