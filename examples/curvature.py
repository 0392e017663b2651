"""A plain optimizer loop becomes a Trainer, and then divides gradients by the curvature.

A linear model predicts from sensors with different units, so the loss is ten thousand times steeper
along one axis than along another. The loop accumulates two batches per step of SGD and clips the
gradient at the mean plus two standard deviations of previous norms, by hand. It is compared with
the same loop with ``GradientAccumulator`` and ``GradientClipper``, a Trainer with
``AdaptiveClipping``, and a Trainer with ``CurvaturePreconditioner``.

    python curvature.py
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_opt as lo
from measuring import largest_difference, quiet_trainer, silence_advice

SENSORS, SAMPLES, PART = 40, 4096, 64
PARTS = 2  # batches per step

Batches = list[tuple[Tensor, Tensor]]


class Regression(L.LightningModule):
    """A linear model of all sensors, trained by SGD with momentum."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(SENSORS, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * F.mse_loss(self.layer(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def measurements(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the readings of the sensors, each in its unit, and the targets."""
    draw = torch.Generator().manual_seed(seed)
    units = torch.logspace(0, -2, SENSORS)
    x = torch.randn(SAMPLES, SENSORS, generator=draw)
    truth = torch.randn(SENSORS, 1, generator=draw)
    return x * units, x @ truth + 0.1 * torch.randn(SAMPLES, 1, generator=draw)


def draw_batches(steps: int, seed: int = 0) -> Batches:
    """Return ``PARTS`` batches per step."""
    x, y = measurements(seed)
    draw = torch.Generator().manual_seed(seed)
    places = [torch.randint(SAMPLES, (PART,), generator=draw) for _ in range(steps * PARTS)]
    return [(x[place], y[place]) for place in places]


@dataclass
class Curve:
    """Loss on all measurements after each step of the optimizer."""

    model: Regression
    losses: list[float]

    @classmethod
    def of(cls, model: Regression) -> Curve:
        return cls(model, [])

    @torch.no_grad()
    def look(self, x: Tensor, y: Tensor) -> None:
        self.losses.append(self.model.loss(x, y).item())


def loop_by_hand(lr: float, batches: Batches) -> Curve:
    """Train with torch only."""
    model = Regression(lr)
    optimizer, norms, curve, everything = (
        model.configure_optimizers(),
        [],
        Curve.of(model),
        measurements(),
    )
    for start in range(0, len(batches), PARTS):
        for x, y in batches[start : start + PARTS]:
            (model.loss(x, y) / PARTS).backward()
        past = norms[-100:]
        limit = statistics.mean(past) + 2 * statistics.pstdev(past) if len(past) >= 10 else math.inf
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        curve.look(*everything)
    return curve


def loop_with_parts(lr: float, batches: Batches) -> Curve:
    """Train in the same loop, with classes of this package that need no Trainer."""
    model = Regression(lr)
    optimizer, curve, everything = model.configure_optimizers(), Curve.of(model), measurements()
    accumulator, clipper = lo.GradientAccumulator(model), lo.GradientClipper(model, "mean_std")
    for number, (x, y) in enumerate(batches, start=1):
        accumulator.backward(model.loss(x, y), weight=len(x))
        if number % PARTS == 0:
            accumulator.average()
            clipper.clip()
            optimizer.step()
            optimizer.zero_grad()
            curve.look(*everything)
    return curve


class Watch(L.Callback):
    """Records the loss on all measurements after each step of the optimizer."""

    def __init__(self, curve: Curve) -> None:
        self.curve, self.everything = curve, measurements()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.curve.losses):
            self.curve.look(*self.everything)


def with_trainer(lr: float, batches: Batches, *callbacks: L.Callback) -> Curve:
    """Train with a Trainer, whose arguments replace accumulation and clipping by hand."""
    model = Regression(lr)
    curve = Curve.of(model)
    trainer = quiet_trainer([*callbacks, Watch(curve)], max_epochs=1, accumulate_grad_batches=PARTS)
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return curve


def clipped(lr: float, batches: Batches) -> Curve:
    return with_trainer(lr, batches, lo.AdaptiveClipping("mean_std"))


def curved(lr: float, batches: Batches) -> Curve:
    return with_trainer(lr, batches, lo.CurvaturePreconditioner(every_n_steps=5, fraction=1.0))


def best(
    train: Callable[[float, Batches], Curve], rates: list[float], batches: Batches
) -> tuple[float, Curve]:
    """Return the learning rate with the lowest final loss, and its run."""
    tried = [(rate, train(rate, batches)) for rate in rates]
    return min(
        (entry for entry in tried if math.isfinite(entry[1].losses[-1])),
        key=lambda entry: entry[1].losses[-1],
    )


def steps_to(curve: Curve, target: float) -> int | None:
    """Return the number of steps until the loss was at most ``target``."""
    return next((step for step, loss in enumerate(curve.losses, 1) if loss <= target), None)


def compare(steps: int) -> lo.Report:
    """Return a table of the loop and the three variants, with the steps to the loop's loss."""
    batches = draw_batches(steps)
    rates = [3.0, 1.0, 0.3, 0.1, 0.03]
    rate, original = best(loop_by_hand, rates, batches)
    runs: dict[str, tuple[float, Curve]] = {
        "loop by hand": (rate, original),
        "loop, GradientAccumulator, GradientClipper": (rate, loop_with_parts(rate, batches)),
        'Trainer, AdaptiveClipping("mean_std")': (rate, clipped(rate, batches)),
        "Trainer, CurvaturePreconditioner": best(curved, rates, batches),
    }
    rows: list[dict[str, Any]] = [
        {
            "run": name,
            "lr": lr,
            "last loss": curve.losses[-1],
            "difference": largest_difference(curve.losses, original.losses)
            if "Preconditioner" not in name
            else None,
            "steps to the loop's end": steps_to(curve, min(original.losses)),
        }
        for name, (lr, curve) in runs.items()
    ]
    model = original.model
    x, y = measurements()
    diagonal = lo.hessian_diagonal(model.loss(x, y), [model.layer.weight], 1000).value[0]
    sharpness = lo.top_eigenvalue(model.loss(x, y), [model.layer.weight]).value
    notes = [
        f"Hessian: the diagonal ranges from {diagonal.min():.2g} to {diagonal.max():.2g}, the "
        f"largest eigenvalue is {sharpness:.3g}.",
        "difference: the largest relative difference of a step's loss from the hand-written loop.",
        f"lr: the best of {len(rates)}, for the hand-written loop and for the preconditioner.",
    ]
    return lo.Report(
        f"Linear regression on sensors with different units, {steps} steps", rows, notes
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run (%(default)s)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    silence_advice()
    compare(args.steps).print()


if __name__ == "__main__":
    main()
