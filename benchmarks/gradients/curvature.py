"""Steps and seconds to a target loss with CurvaturePreconditioner, and the cost of its estimates.

Claim: where axes differ in curvature, dividing by the Hessian's diagonal saves steps. The script
shows where it does and where it does not. The learning rate of each optimizer, with and without it,
is tuned over the same number of candidates, each with three seeds; rates at which one diverges do
not count. A seed's target is the final loss of the optimizer alone at its best rate. The second
table gives the time of a step with an estimate and the mean over all steps, as ratios to plain
steps. Times are CPU times on one thread, so that other load on the machine matters little.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import quiet_trainer, ten_million_transformer
from benchmarks.strategies.compression_tasks import Bytes

LOOKS = 40
"""Number of loss measurements per run."""

RATES = 6
"""Number of learning rates, a factor of about 3 apart."""

SEEDS = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}

HIGHEST: dict[str, float] = {"SGD": 3.0, "Adam": 0.3, "AdamW": 0.3, "preconditioned": 1.0}
"""The largest learning rate by optimizer, multiplied by ``far`` of the problem."""


class Problem(L.LightningModule):
    """A network with its data, and the loss on a fixed batch as score."""

    name: str
    length: int
    """Steps."""
    far = 1.0
    """Distance of the parameters from their optimum relative to usual; scales Adam's rates."""

    def __init__(self, optimizer: str, lr: float, steps: int, seed: int) -> None:
        super().__init__()
        self.optimizer, self.lr, self.steps, self.seed = optimizer, lr, steps, seed
        torch.manual_seed(seed)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def batches(self) -> Sequence[Any]:
        raise NotImplementedError

    def held(self) -> Any:
        """Return what is scored."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @torch.no_grad()
    def score(self) -> float:
        return self.loss(self.held()).item()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=self.lr)


class LeastSquares(Problem):
    """Fifty unknowns, all data at once, condition number 1e4: axes of their own scale."""

    name = "least squares, condition 1e4, along the axes"
    length = 400
    far = 100.0
    rotated = False

    def build(self) -> None:
        scales = torch.logspace(0, -2, 50)  # the Hessian has their squares
        rotation, _ = torch.linalg.qr(torch.randn(50, 50))
        orthogonal, _ = torch.linalg.qr(torch.randn(200, 50))
        x = orthogonal * 200**0.5 * scales
        self.x = x @ rotation if self.rotated else x
        truth = torch.randn(50, 1) / scales[:, None]
        self.y = self.x @ (rotation.T @ truth if self.rotated else truth)
        self.layer = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def loss(self, batch: Any) -> Tensor:
        return 0.5 * F.mse_loss(self.layer(batch[0]), batch[1])

    def batches(self) -> Sequence[Any]:
        return [(self.x, self.y)] * self.steps

    def held(self) -> Any:
        return self.x, self.y


class RotatedLeastSquares(LeastSquares):
    """The same, where no axis has a scale of its own, so that a diagonal says little."""

    name = "least squares, condition 1e4, rotated"
    rotated = True


class OnDigits(Problem):
    """Batches of 64 of scikit-learn's digits."""

    length = 300

    def build(self) -> None:
        data = load_digits()
        self.x = torch.tensor(data.data, dtype=torch.float32) / 16
        self.y = torch.tensor(data.target)
        self.network = self.make_network()

    def make_network(self) -> nn.Module:
        raise NotImplementedError

    def batches(self) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        places = [torch.randint(1797, (64,), generator=generator) for _ in range(self.steps)]
        return [(self.x[place], self.y[place]) for place in places]

    def held(self) -> Any:
        return self.x, self.y


class Logistic(OnDigits):
    """Multinomial logistic regression."""

    name = "logistic regression, digits"

    def make_network(self) -> nn.Module:
        return nn.Linear(64, 10)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])


class Autoencoder(OnDigits):
    """64-32-8-32-64 with tanh."""

    name = "autoencoder, digits"
    length = 600

    def make_network(self) -> nn.Module:
        widths = (64, 32, 8, 32, 64)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[0])


class Transformer(Problem):
    """The byte-level transformer of compression_tasks.py."""

    name = "byte-level GPT"
    length = 400

    def build(self) -> None:
        self.model = Bytes("AdamW", 1, self.seed)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def batches(self) -> Sequence[Any]:
        return [self.model.batch(number, 0) for number in range(self.steps)]

    def held(self) -> Any:
        return self.model.cut(torch.linspace(1_810_000, 1_990_000, 256).long())


PROBLEMS = (LeastSquares, RotatedLeastSquares, Logistic, Autoencoder, Transformer)


class Curve(L.Callback):
    """Loss on the scored batch from time to time, beside the seconds of training up to then."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, steps // LOOKS)
        self.points: list[tuple[int, float, float]] = []
        self._seconds, self._since = 0.0, 0.0

    def on_train_start(self, *_: Any) -> None:
        self._since = time.process_time()

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._seconds += time.process_time() - self._since
            self.points.append((trainer.global_step, self._seconds, model.score()))
            if not math.isfinite(self.points[-1][-1]):
                trainer.should_stop = True
            self._since = time.process_time()


def train(kind: type[Problem], optimizer: str, ours: bool, lr: float, steps: int) -> list[Curve]:
    """Train once with each seed, and return how the losses went."""
    curves = []
    for seed in range(SEEDS):
        problem, curve = kind(optimizer, lr, steps, seed), Curve(steps)
        callbacks = [lo.CurvaturePreconditioner()] if ours else []
        loader = DataLoader(problem.batches(), batch_size=None)
        quiet_trainer(max_epochs=1, callbacks=[*callbacks, curve]).fit(problem, loader)
        gc.collect()  # Trainer and model know each other
        curves.append(curve)
    return curves


def end(curves: Sequence[Curve]) -> float:
    """Return the median loss at the end; infinity if one diverged."""
    losses = [curve.points[-1][-1] for curve in curves]
    return statistics.median(losses) if all(map(math.isfinite, losses)) else math.inf


def tune(kind: type[Problem], optimizer: str, ours: bool, steps: int) -> tuple[float, list[Curve]]:
    """Return the rate with the lowest median loss at the end, and its runs."""
    highest = HIGHEST["preconditioned" if ours and optimizer == "SGD" else optimizer]
    far = kind.far if "Adam" in optimizer else 1.0
    tried = []
    for place in range(RATES):
        lr = highest * 10 ** (-place / 2) * far
        tried.append((lr, train(kind, optimizer, ours, lr, steps)))
    return min(tried, key=lambda entry: end(entry[1]))


def reached(curve: Curve, target: float) -> tuple[int, float] | None:
    """Return steps and seconds until the loss was at most ``target``."""
    for step, seconds, loss in curve.points:
        if loss <= target:
            return step, seconds
    return None


def compare(kind: type[Problem], quick: bool) -> list[dict[str, Any]]:
    """Return one row an optimizer."""
    steps = 40 if quick else kind.length
    rows = []
    for optimizer in OPTIMIZERS:
        plain_lr, plain = tune(kind, optimizer, False, steps)
        our_lr, ours = tune(kind, optimizer, True, steps)
        pairs = []
        for before, after in zip(plain, ours, strict=True):
            target = before.points[-1][-1]
            pairs.append((reached(before, target), reached(after, target)))
        both = [(before, after) for before, after in pairs if before and after]
        row: dict[str, Any] = {"problem": kind.name, "optimizer": optimizer}
        row |= {"lr plain": plain_lr, "lr ours": our_lr}
        row |= {"loss plain": end(plain), "loss ours": end(ours), "reached": len(both)}
        if 2 * len(both) > SEEDS:
            row["steps ratio"] = statistics.median(after[0] / before[0] for before, after in both)
            row["time ratio"] = statistics.median(after[1] / before[1] for before, after in both)
        rows.append(row)
    return rows


class StepTimes(L.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def few_tokens() -> tuple[L.LightningModule, Sequence[Any]]:
    """Return a model whose weights outweigh its 256 tokens a step."""
    model = ten_million_transformer()
    return model, [model.batch] * 30


def many_tokens() -> tuple[L.LightningModule, Sequence[Any]]:
    """Return a small language model with 2,048 tokens a step."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from byte_gpt import ByteGPT

    model = ByteGPT()
    windows = torch.randint(0, 256, (32, 65), generator=torch.Generator().manual_seed(0))
    return model, [(windows, False)] * 30


def cost(quick: bool) -> list[dict[str, Any]]:
    """Return the time of steps with our callback as ratios to plain ones."""
    rows = []
    for name, make in (
        ("transformer, 9.5 million, 256 tokens", few_tokens),
        ("byte-level GPT, 1 million, 2,048 tokens", many_tokens),
    ):
        estimates, means = [], []
        for _ in range(1 if quick else 3):
            plain, ours = StepTimes(), StepTimes()
            for times, more in ((plain, []), (ours, [lo.CurvaturePreconditioner()])):
                model, batches = make()
                quiet_trainer(max_epochs=1, callbacks=[times, *more]).fit(
                    model, DataLoader(batches, batch_size=None)
                )
            base = statistics.median(plain.seconds[1:])
            # The first step also makes the optimizer's state.
            estimating = statistics.median(ours.seconds[10::10])
            others = statistics.median([s for i, s in enumerate(ours.seconds) if i % 10])
            estimates.append(estimating / base)
            means.append((estimating + 9 * others) / 10 / base)
        rows.append(
            {
                "model": name,
                "step with an estimate": statistics.median(estimates),
                "mean step, every_n_steps=10": statistics.median(means),
            }
        )
    return rows


def main() -> None:
    arguments = parse_arguments(__doc__)
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    rows = [row for kind in PROBLEMS for row in compare(kind, arguments.quick)]
    report = lo.Report(
        "Steps to a target loss, with CurvaturePreconditioner (ours) and without (plain)",
        rows,
        [
            f"Medians of {SEEDS} seeds. `lr`: the best of {RATES} learning rates, a factor of 3.2 "
            "apart. `loss`: final loss at this rate. `reached`: seeds in which ours reached the "
            "final loss of plain. `steps ratio`, `time ratio`: steps and CPU time of ours to that "
            "loss, divided by those of plain; below 1 is a saving.",
        ],
    )
    publish("curvature", report, arguments)
    report = lo.Report(
        "Cost of a curvature estimate",
        cost(arguments.quick),
        [
            "CPU times as ratios to a step of the optimizer alone. `step with an estimate`: a step "
            "that estimates the curvature. `mean step`: mean over all steps, one in ten of which "
            "estimates.",
        ],
    )
    publish("curvature_cost", report, arguments)


if __name__ == "__main__":
    main()
