"""A network that learns distances between samples, whose targets are expensive to compute.

The samples are scikit-learn's digits. Their distance is the earth mover's distance of their ink, by
linear programming: milliseconds per pair, more than the network needs for a batch. Each sample of a
batch's first half is compared with each of its second, so every batch size must be even.

The original computes each distance at each use. With ``cached`` each pair is computed once, in
either order; with a cache on disk, also for later runs.

    python pairwise_distance.py
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import eye_array, kron, vstack
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

import lightning_opt as lo
from measuring import Record, largest_difference, quiet_trainer, same_weights, silence_advice

Distance = Callable[[bytes, bytes], float]


def earth_movers_distance(first: bytes, second: bytes) -> float:
    """Return the earth mover's distance of two 8 x 8 images: the mean distance in pixels.

    Args:
        first: 64 grey values, one byte each.
        second: The same for the other image.
    """
    ink = [np.frombuffer(image, dtype=np.uint8).astype(float) for image in (first, second)]
    places = [np.flatnonzero(grey) for grey in ink]
    shares = [grey[place] / grey.sum() for grey, place in zip(ink, places, strict=True)]
    sources, goals = (np.stack(np.unravel_index(place, (8, 8)), axis=1) for place in places)
    ways = np.linalg.norm(sources[:, None] - goals[None], axis=-1)
    # The flow out of each source and into each target equals its share of the ink. One of these
    # equations follows from the others.
    leaves = kron(eye_array(len(sources)), np.ones((1, len(goals))))
    arrives = kron(np.ones((1, len(sources))), eye_array(len(goals)))
    found = linprog(
        ways.ravel(),
        A_eq=vstack([leaves, arrives]).tocsr()[:-1],
        b_eq=np.concatenate(shares)[:-1],
        method="highs",
    )
    return float(found.fun)


class EvenBatches(Sampler[list[int]]):
    """Batches with an even number of samples; the last batch may drop one.

    Args:
        sampler: Sampler of indices; its order may depend on the epoch.
        batch_size: An even number.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        if batch_size < 2 or batch_size % 2:
            raise ValueError(
                f"batch_size must be even, since samples are paired, got {batch_size}."
            )
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for start in range(0, len(order) - 1, self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch[: len(batch) // 2 * 2]

    def __len__(self) -> int:
        return math.ceil(max(0, len(self.sampler) - 1) / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class DistanceNetwork(L.LightningModule):
    """Embeds images in a plane with given distances.

    Args:
        distance: The distance of two images, given as bytes.
    """

    def __init__(self, distance: Distance, lr: float = 3e-3) -> None:
        super().__init__()
        self.distance, self.lr = distance, lr
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(),
            nn.Linear(128, 8),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images / 16.0)

    def targets(self, images: Tensor) -> Tensor:
        """Return the distances between the images of the two halves."""
        first, second = ([bytes(image) for image in half.byte().flatten(1).tolist()]
                         for half in images.chunk(2))  # fmt: skip
        return torch.tensor([[self.distance(a, b) for b in second] for a in first])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        first, second = self(batch[0]).chunk(2)
        return F.mse_loss(torch.cdist(first, second), self.targets(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@dataclass(frozen=True)
class Run:
    """Results of a run."""

    model: DistanceNetwork
    record: Record
    seconds: float
    calls: int


def train(distance: Distance, samples: int, batch_size: int, epochs: int, seed: int) -> Run:
    """Train once. ``calls`` counts the calls of ``distance``."""
    L.seed_everything(seed, verbose=False)
    images = torch.tensor(load_digits().images[:samples], dtype=torch.float32)
    dataset = TensorDataset(images)
    order = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    calls = 0

    def counted(first: bytes, second: bytes) -> float:
        nonlocal calls
        calls += 1
        return distance(first, second)

    model, record = DistanceNetwork(counted), Record()
    trainer = quiet_trainer([record], max_epochs=epochs, use_distributed_sampler=False)
    start = time.perf_counter()
    trainer.fit(model, DataLoader(dataset, batch_sampler=EvenBatches(order, batch_size)))
    return Run(model, record, time.perf_counter() - start, calls)


def compare(samples: int, batch_size: int, epochs: int, seed: int) -> lo.Report:
    """Return a table: without a cache, cached in memory, and two runs with a cache on disk."""
    settings = {"samples": samples, "batch_size": batch_size, "epochs": epochs, "seed": seed}
    rows: list[dict[str, Any]] = []
    original: Run | None = None
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Distance]] = {
            "original": lambda: earth_movers_distance,
            "cached": lambda: lo.cached(
                earth_movers_distance, max_bytes=10_000_000, symmetric=True
            ),
            "cached on the disk": lambda: lo.cached(
                earth_movers_distance,
                max_bytes=50_000_000,
                symmetric=True,
                storage="disk",
                key="v1",
                folder=folder,
            ),
        }
        ways["on the disk, second run"] = ways["cached on the disk"]
        for name, make in ways.items():
            distance = make()
            run = train(distance, **settings)
            original = original or run
            computed = run.calls if name == "original" else distance.statistics()["misses"]
            rows.append(
                {
                    "run": name,
                    "seconds": run.seconds,
                    "of original": run.seconds / original.seconds,
                    "distances": run.calls,
                    "computed": computed,
                    "last loss": run.record.losses[-1],
                    "difference": largest_difference(run.record.losses, original.record.losses),
                    "same weights": same_weights(run.model, original.model),
                }
            )
    pairs = samples * (samples - 1) // 2
    notes = [
        f"{samples} samples make {pairs} pairs; the cache never computes one twice.",
        "difference: the largest relative difference of a batch's loss from the original run.",
    ]
    title = f"Distances of {samples} digits, {epochs} epochs in batches of {batch_size}"
    return lo.Report(title, rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=41, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=10, help="even (%(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (%(default)s)")
    args = parser.parse_args()
    if args.samples < 2 or args.epochs < 1:
        parser.error("--samples must be at least 2 and --epochs at least 1")
    if args.batch_size < 2 or args.batch_size % 2:
        parser.error(f"--batch-size must be even, since samples are paired, got {args.batch_size}")
    silence_advice()
    compare(args.samples, args.batch_size, args.epochs, args.seed).print()


if __name__ == "__main__":
    main()
