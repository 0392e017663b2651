"""Whether the tuner rejects what changes learning, and accepts what does not.

Supports the claim of the documentation: of planted faults (gradients of the wrong sign, one random
layer, all of them random) every one is rejected, and of harmless changes none is, with a constant
learning rate and in a warm-up of 2,000 steps, under SGD and AdamW, on a ConvNet with BatchNorm and
a transformer with dropout, for a user who trains in float32 and for one in bf16-mixed. Each row is
of trainings of eight steps as the tuner's trials see them. Some minutes on one CPU.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from lightning_opt.tuner.numerics import judge
from lightning_opt.tuner.probe import Observations, TrialWatch
from lightning_opt.worker.gate import RUN_DEFAULTS

STEPS = 8


def convolutions() -> nn.Module:
    """A ConvNet with normalisation; the gradient of its biases is nothing but rounding."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(288, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1).unflatten(1, (6, 32))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


NETS = {"ConvNet": (convolutions, "net.3."), "transformer": (Transformer, "net.blocks.0.linear1.")}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


class Task(L.LightningModule):
    """Classifies noise."""

    def __init__(self, net: str, optimizer: str, warm: bool) -> None:
        super().__init__()
        self.net = NETS[net][0]()
        self.optimizer, self.warm = OPTIMIZERS[optimizer], warm
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=1e-3)
        rate = (lambda step: step / 2000) if self.warm else (lambda step: 1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Planted(Callback):
    """Changes gradients before the optimizer step."""

    def __init__(self, kind: str, layer: str) -> None:
        self.kind, self.layer = kind, layer

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, parameter in module.named_parameters():
            if self.kind == "flipped signs":
                parameter.grad.neg_()
            elif self.kind == "all random" or name.startswith(self.layer):
                size = parameter.grad.square().mean().sqrt()
                parameter.grad.copy_(torch.randn_like(parameter.grad) * size)


FAULTS = ("flipped signs", "one layer random", "all random")


def harmless(net: str) -> dict[str, dict[str, Any]]:
    """Return changes that must be accepted."""
    found: dict[str, dict[str, Any]] = {
        "bf16-mixed": {"precision": "bf16-mixed"},
        "FusedOptimizer": {"callbacks": [lo.FusedOptimizer()]},
        "other random numbers": {"reseed": 2},  # not those of the noise
    }
    if net == "ConvNet":
        found["ChannelsLast"] = {"callbacks": [lo.ChannelsLast()]}
        found["CompileModel, aot_eager"] = {"callbacks": [lo.CompileModel(backend="aot_eager")]}
    else:
        every = lo.ActivationCheckpointing("every_layer")
        found["MicroBatching"] = {"callbacks": [lo.MicroBatching(size=8)]}
        found["ActivationCheckpointing"] = {"callbacks": [every]}
    return found


def observe(task: tuple[str, str, bool], seed: int, reseed: int = 0, **more: Any) -> Observations:
    """Train for some steps, and return the observations of a trial."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "watch.pt"
        callbacks = [*more.pop("callbacks", []), TrialWatch(str(file), reseed)]
        limits = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, "max_epochs": -1}
        settings = {**RUN_DEFAULTS, **limits, **more, "callbacks": callbacks}
        seed_everything(seed, verbose=False)
        model = Task(*task)
        data = TensorDataset(torch.randn(STEPS * 32, 3, 8, 8), torch.randint(10, (STEPS * 32,)))
        trainer = L.Trainer(**settings)
        trainer.fit(model, DataLoader(data, batch_size=32))
        return Observations.read(file, model.losses)


@cache
def usual(task: tuple[str, str, bool], seed: int, precision: str, reseed: int = 0) -> Observations:
    """Return the observations of the baseline, or of a run of it with other random numbers."""
    return observe(task, seed, reseed, precision=precision)


def why_not(
    task: tuple[str, str, bool], seed: int = 0, usually: str = "32-true", **change: Any
) -> str:
    """Return why a change is rejected; empty if it is accepted."""
    own = observe(task, seed, **{"precision": usually, **change})
    return judge(own, usual(task, seed, usually), partial(usual, task, seed, usually, 1))


def main() -> None:
    """Run all changes, and publish the table."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seeds", type=int, default=5)
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rest)
    seeds = range(1 if arguments.quick else own.seeds)
    rows, details = [], []
    for precision, net in itertools.product(("32-true", "bf16-mixed"), NETS):
        planted = {fault: {"callbacks": [Planted(fault, NETS[net][1])]} for fault in FAULTS}
        for kind, changes in (("planted", planted), ("harmless", harmless(net))):
            for name, change in changes.items():
                cases = list(itertools.product(OPTIMIZERS, (False, True), seeds))
                said = [
                    why_not((net, rule, warm), seed, precision, **change)
                    for rule, warm, seed in cases
                ]
                details += [
                    {"precision": precision, "net": net, "change": name, "optimizer": rule,
                     "warm-up": warm, "seed": seed, "why": why}
                    for (rule, warm, seed), why in zip(cases, said, strict=True)
                ]  # fmt: skip
                rejected = sum(map(bool, said))
                right = rejected if kind == "planted" else len(said) - rejected
                rows.append({"user's precision": precision, "model": net, "change": name,
                             "kind": kind, "rejected": rejected, "trainings": len(said),
                             "right": right})  # fmt: skip
    sums = []
    for kind, meaning in (
        ("planted", "a fault that the tuner must reject"),
        ("harmless", "a change that the tuner must accept"),
    ):
        own_rows = [row for row in rows if row["kind"] == kind]
        right, of = (sum(row[name] for row in own_rows) for name in ("right", "trainings"))
        sums.append(f"`{kind}`: {meaning}; right in {right} of {of} trainings.")
    notes = [
        *sums,
        f"Each row: SGD and AdamW, constant learning rate and warm-up, {len(seeds)} seeds.",
    ]
    report = lo.Report("Changes that the tuner rejects", rows, notes)
    publish("tuner_numerics", report, arguments, cases=details)


if __name__ == "__main__":
    main()
