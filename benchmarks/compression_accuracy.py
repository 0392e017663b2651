"""Accuracy of compressed DDP after the same number of steps, as a difference to plain DDP.

Claim: with error feedback, sending 1% of the gradient's elements costs next to no accuracy, and
without it visibly more, with SGD with momentum and with AdamW; over a slow network the same
accuracy is reached in a fraction of the time.

Real processes over gloo. Two tasks: a small ConvNet on scikit-learn's digits (test accuracy), and a
byte-level transformer on the source of Python's standard library (validation loss). All strategies
of a seed start from the same weights and see the same batches; learning rates fall to zero
linearly. The second table times the first seed in network namespaces at 100 Mbit/s, see
compression.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_opt as lo
from compression import NETWORKS, namespaces, start_ranks, why_not
from harness import parse_arguments, publish

BATCH = 16
"""Samples a rank."""

LOOKS = 20
"""How often a run is scored."""

NETWORK = "100 Mbit/s"

REACHED_BY_DENSE = 0.8
"""The target of the timed runs is the score that plain DDP has after this share of its steps."""


def strategies(steps: int) -> dict[str, Callable[[], Any]]:
    """Return the strategies by name; the first is what the others are compared with."""
    compressed = partial(lo.CompressedDDPStrategy, fallback="never")
    ramp = steps // 3
    return {
        "dense": lambda: "ddp",
        "topk 1%": lambda: compressed("topk", ramp_steps=0),
        "topk 1%, ramp": lambda: compressed("topk", ramp_steps=ramp),
        "topk 1%, no error feedback": lambda: compressed(
            "topk", error_feedback=False, ramp_steps=0
        ),
        "topk 0.1%, ramp": lambda: compressed("topk", ratio=0.001, ramp_steps=ramp),
        "int8": lambda: compressed("int8"),
        "int4": lambda: compressed("int4"),
    }


TIMED = ("dense", "topk 1%", "topk 1%, ramp", "int8", "int4")


class Scores(L.Callback):
    """Scores the model from time to time, beside the seconds of training up to then."""

    def __init__(self, steps: int) -> None:
        self.every = max(steps // LOOKS, 1)
        self.curve: list[tuple[float, float]] = []
        self._seconds = 0.0
        self._since = time.perf_counter()

    def on_train_start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._seconds += time.perf_counter() - self._since
            model.eval()
            self.curve.append((self._seconds, model.score()))
            model.train()
            dist.barrier()
            self._since = time.perf_counter()


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

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "SGD":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.rates[0], momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.rates[1])
        steps = self.trainer.num_training_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

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
    """A transformer of two layers of width 64 on Python's standard library; score: loss in nats."""

    name = "byte-level GPT, loss"
    better = -1.0
    rates = (0.1, 1e-3)
    context = 32

    def __init__(self, optimizer: str, seed: int) -> None:
        super().__init__(optimizer, seed)
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)[:2_000_000]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(256, 64)
        self.places = nn.Parameter(0.02 * torch.randn(self.context, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)
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

OPTIMIZERS = ("SGD", "AdamW")

PARTS = ("score", "time")


def run_rank(own: argparse.Namespace) -> None:
    """Train every strategy with every seed, and write the scores as JSON."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after a fit
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for seed in range(own.seeds):
        for name, strategy in strategies(own.steps).items():
            if own.only and name not in own.only:
                continue
            scores = Scores(own.steps)
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
                callbacks=[scores],
            )
            trainer.fit(model, range(own.steps))
            curves.setdefault(name, []).append(scores.curve)
            dist.barrier()
    if dist.get_rank() == 0:
        own.result.write_text(json.dumps(curves))
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
    parser.add_argument("--only", nargs="*", help="names of strategies")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are removed then too
    steps = own.steps or (40 if arguments.quick else 800)
    seeds = own.seeds or (1 if arguments.quick else 3)
    if "score" in own.parts:
        rows: list[dict[str, Any]] = []
        raw = {}
        for task, ranks, optimizer in itertools.product(own.tasks, own.ranks, OPTIMIZERS):
            options = ["--task", task, "--optimizer", optimizer, "--steps", steps]
            curves = start_ranks(__file__, ranks, [*options, "--seeds", seeds], port=free_port())
            scores = {name: [own[-1][1] for own in runs] for name, runs in curves.items()}
            raw[f"{task}, {optimizer}, {ranks} ranks"] = scores
            rows += rows_of(TASKS[task], optimizer, ranks, scores)
            publish(
                "compression_accuracy", accuracy_report(rows, steps, seeds), arguments, scores=raw
            )
    if "time" in own.parts:
        reason = why_not()
        if reason is not None:
            print(f"This machine does not allow the benchmark's own networks: {reason}")
            return
        rows = []
        raw = {}
        for task, optimizer in itertools.product(own.tasks, OPTIMIZERS):
            options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seeds", 1]
            with namespaces(2, NETWORKS[NETWORK]) as names:
                curves = start_ranks(
                    __file__,
                    2,
                    [*options, "--only", *TIMED],
                    namespaces=names,
                    address="10.99.0.1",
                    interface="eth0",
                )
            raw[f"{task}, {optimizer}"] = {name: runs[0] for name, runs in curves.items()}
            rows += times_of(TASKS[task], optimizer, raw[f"{task}, {optimizer}"])
            publish("compression_time_to_accuracy", time_report(rows, steps), arguments, curves=raw)


def accuracy_report(rows: list[dict[str, Any]], steps: int, seeds: int) -> lo.Report:
    """Return the table of final scores."""
    return lo.Report(
        f"After {steps} steps, compared with plain DDP",
        rows,
        [
            f"Means of {seeds} seeds. `worse by`: mean over seeds of the difference to dense, in "
            "percentage points for the accuracy, in percent for the loss; negative is better. "
            "`spread`: standard deviation of that difference."
        ],
    )


def time_report(rows: list[dict[str, Any]], steps: int) -> lo.Report:
    """Return the table of seconds to a score."""
    return lo.Report(
        f"Seconds to an accuracy between two ranks at {NETWORK}",
        rows,
        [
            f"`target`: what plain DDP has reached after {REACHED_BY_DENSE:.0%} of {steps} steps. "
            "`seconds`: training until the target is first reached, looked at "
            f"{LOOKS} times a run; `of dense`: as a ratio to plain DDP. One seed."
        ],
    )


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


def times_of(
    task: type[Task], optimizer: str, curves: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """Return one row a strategy: when its score first reached the target."""
    dense = curves["dense"]
    target = dense[max(round(REACHED_BY_DENSE * len(dense)) - 1, 0)][1]
    reached = {
        name: next(
            (seconds for seconds, score in curve if task.better * (score - target) >= 0), None
        )
        for name, curve in curves.items()
    }
    return [
        {
            "task": task.name,
            "optimizer": optimizer,
            "target": round(target, 3),
            "strategy": name,
            "seconds": "not reached" if seconds is None else round(seconds, 1),
            "of dense": "" if seconds is None else round(seconds / (reached["dense"] or 1.0), 3),
        }
        for name, seconds in reached.items()
    ]


if __name__ == "__main__":
    main()
