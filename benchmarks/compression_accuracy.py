"""Accuracy of compressed DDP after the same number of steps, as a difference to plain DDP.

Claim: with error feedback, sending 1% of the gradient's elements costs next to no accuracy, and
without it visibly more, with SGD with momentum and with AdamW.

Real processes over gloo. Two tasks: a small ConvNet on scikit-learn's digits (test accuracy), and a
byte-level transformer on the source of Python's standard library (validation loss). All strategies
of a seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_opt as lo
from compression import start_ranks
from harness import parse_arguments, publish

BATCH = 32
"""Samples a rank."""


def strategies(steps: int) -> dict[str, Callable[[], Any]]:
    """Return the strategies by name; the first is what the others are compared with."""
    ramp = steps // 3
    return {
        "dense": lambda: "ddp",
        "topk 1%": lambda: lo.CompressedDDPStrategy("topk", ratio=0.01),
        "topk 1%, ramp": lambda: lo.CompressedDDPStrategy("topk", ratio=0.01, ramp_steps=ramp),
        "topk 1%, no error feedback": lambda: lo.CompressedDDPStrategy(
            "topk", ratio=0.01, error_feedback=False
        ),
        "topk 0.1%, ramp": lambda: lo.CompressedDDPStrategy("topk", ratio=0.001, ramp_steps=ramp),
        "int8": lambda: lo.CompressedDDPStrategy("int8"),
        "int4": lambda: lo.CompressedDDPStrategy("int4"),
    }


class Task(L.LightningModule):
    """A model, its batches and its score."""

    name: str
    better: float
    """1 if a higher score is better, else -1."""

    def __init__(self, optimizer: str, seed: int) -> None:
        super().__init__()
        self.optimizer, self.seed = optimizer, seed

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def score(self) -> float:
        raise NotImplementedError

    def training_step(self, number: int, batch_idx: int) -> Tensor:
        inputs, targets = self.batch(int(number), self.global_rank)
        return F.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())

    def draw(self, number: int, rank: int, high: int) -> Tensor:
        """Return which samples a rank sees in a step: the same for every strategy."""
        generator = torch.Generator().manual_seed((self.seed * 64 + rank) * 100_000 + number)
        return torch.randint(0, high, (BATCH,), generator=generator)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=self.rates[0], momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self.rates[1])

    rates: tuple[float, float]


class Digits(Task):
    """A ConvNet of 75,000 parameters on 8 x 8 digits; score: accuracy on 597 of them in percent."""

    name = "digits ConvNet, accuracy %"
    better = 1.0
    rates = (0.02, 1e-3)

    def __init__(self, optimizer: str, seed: int) -> None:
        super().__init__(optimizer, seed)
        data = load_digits()
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        self.inputs = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        self.targets = torch.tensor(data.target)[order]
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 54),
            nn.ReLU(),
            nn.Linear(54, 10),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        places = self.draw(number, rank, 1200)
        noise = torch.randn(BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(number)) * 0.2
        return self.inputs[places] + noise, self.targets[places]

    @torch.no_grad()
    def score(self) -> float:
        right = self(self.inputs[1200:]).argmax(1) == self.targets[1200:]
        return 100 * right.float().mean().item()


class Bytes(Task):
    """A transformer of two layers of width 96 on Python's standard library; score: loss in nats."""

    name = "byte-level GPT, loss"
    better = -1.0
    rates = (0.1, 1e-3)
    context = 48

    def __init__(self, optimizer: str, seed: int) -> None:
        super().__init__(optimizer, seed)
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)[:2_000_000]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(256, 96)
        self.places = nn.Parameter(0.02 * torch.randn(self.context, 96))
        layer = nn.TransformerEncoderLayer(96, 4, 384, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        self.register_buffer("mask", mask)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs) + self.places
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))

    def cut(self, places: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.text[places.unsqueeze(1) + torch.arange(self.context + 1)]
        return rows[:, :-1], rows[:, 1:]

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        return self.cut(self.draw(number, rank, 1_800_000))

    @torch.no_grad()
    def score(self) -> float:
        inputs, targets = self.cut(torch.linspace(1_810_000, 1_990_000, 256).long())
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()).item()


TASKS: dict[str, type[Task]] = {"digits": Digits, "bytes": Bytes}


def run_rank(own: argparse.Namespace) -> None:
    """Train every strategy with every seed, and write the scores as JSON."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after a fit
    scores: dict[str, list[float]] = {}
    for seed in range(own.seeds):
        for name, strategy in strategies(own.steps).items():
            model = TASKS[own.task](own.optimizer, seed)
            trainer = L.Trainer(
                accelerator="cpu",
                devices=world,
                strategy=strategy(),
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(model, range(own.steps))
            model.eval()
            scores.setdefault(name, []).append(model.score())
            dist.barrier()
    if dist.get_rank() == 0:
        own.result.write_text(json.dumps(scores))
    dist.barrier()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--task", choices=list(TASKS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--optimizer")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    steps = own.steps or (30 if arguments.quick else 300)
    seeds = own.seeds or (1 if arguments.quick else 3)
    rows = []
    raw = {}
    for task in own.tasks:
        for ranks in own.ranks:
            for optimizer in ("SGD", "AdamW"):
                options = ["--task", task, "--optimizer", optimizer, "--steps", steps]
                options += ["--seeds", seeds]
                scores = start_ranks(__file__, ranks, options, port=free_port())
                raw[f"{task}, {optimizer}, {ranks} ranks"] = scores
                rows += rows_of(TASKS[task], optimizer, ranks, scores)
    report = lo.Report(
        f"After {steps} steps, compared with plain DDP",
        rows,
        [
            f"Means of {seeds} seeds. `worse by`: mean over seeds of the difference to dense, in "
            "percentage points for the accuracy, in percent for the loss; negative is better. "
            "`spread`: standard deviation of that difference."
        ],
    )
    publish("compression_accuracy", report, arguments, scores=raw)


def rows_of(
    task: type[Task], optimizer: str, ranks: int, scores: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Return one row a strategy."""
    rows = []
    for name, own in scores.items():
        worse = [
            (dense - score) if task.better > 0 else 100 * (score - dense) / dense
            for score, dense in zip(own, scores["dense"], strict=True)
        ]
        rows.append(
            {
                "task": task.name,
                "optimizer": optimizer,
                "ranks": ranks,
                "strategy": name,
                "score": round(statistics.mean(own), 3),
                "worse by": round(statistics.mean(worse), 2),
                "spread": round(statistics.pstdev(worse), 2),
            }
        )
    return rows


if __name__ == "__main__":
    main()
