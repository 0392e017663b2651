"""Throughput of the loader's default settings, of a grid's best, and of DataPipelineTuner's choice.

Supports: the tuner's choice reaches at least 0.95 of the throughput of the best of a grid, found in
less than a tenth of the grid's time, and a trivial dataset keeps 0 workers. Three datasets: items
that compute, items that wait as for a disk or a network (a sleep: exact latency, no bandwidth), and
items that are ready in memory. Throughput is measured in training: a batch from the loader and the
forward, backward and optimizer step of a small model, in the same process. The grid runs each
setting for a few seconds after the workers have started. Afterwards default, grid's best and
tuner's choice run interleaved, and their medians are compared. It also measures the time of an item
of CachedDataset, cached and uncached.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from lightning_opt.core.measure.machine import available_cpus
from lightning_opt.data.pipeline.loaders import LoaderSettings, attributes_for
from lightning_opt.data.pipeline.pipeline_tuner import MAX_WAITING_WORKERS

BATCH, WIDTH = 16, 128
PREFETCH = (2, 4, 8)


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are ready in memory; more than any run uses."""

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return ROWS[index % 1000], TARGETS[index % 1000]


ROWS, TARGETS = torch.randn(1000, WIDTH), torch.randn(1000, 1)


class Computed(Items):
    """Rows that take about a millisecond of CPU time."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = super().__getitem__(index)[0]
        work = torch.outer(row, row)
        for _ in range(12):
            work = torch.sin(work)
        return row + 0 * work.sum(), TARGETS[index % 1000]


class Waited(Items):
    """Rows that take two milliseconds of waiting."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return super().__getitem__(index)


class Net(L.LightningModule):
    """A perceptron of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Throughput(L.Callback):
    """Ends a run after some seconds, and measures samples per second after the first batches."""

    def __init__(self, seconds: float, skip: int) -> None:
        self.seconds, self.skip, self.rate = seconds, skip, 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        if batch_idx == self.skip:
            self.begin = now
        if batch_idx > self.skip + 3 and now - self.begin > self.seconds:
            wait = getattr(torch.cuda, "synchronize", None)
            if pl_module.device.type == "cuda" and wait is not None:
                wait()
            now = time.perf_counter()
            self.rate = (batch_idx - self.skip) * BATCH / (now - self.begin)
            trainer.should_stop = True


class Stop(L.Callback):
    """Ends a run after its first step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


def trainer(device: str, *callbacks: L.Callback) -> L.Trainer:
    """Return a Trainer without output."""
    return L.Trainer(
        accelerator="gpu" if device.startswith("cuda") else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def measure(dataset: Items, settings: LoaderSettings, seconds: float, device: str) -> float:
    """Return samples per second of training with ``settings``."""
    loader = DataLoader(dataset, batch_size=BATCH)
    vars(loader).update(attributes_for(loader, settings))
    throughput = Throughput(seconds, skip=max(3, 2 * settings.workers))
    trainer(device, throughput).fit(Net(), loader)
    return throughput.rate


def search_grid(
    dataset: Items, workers: range, seconds: float, device: str
) -> tuple[LoaderSettings, float, int]:
    """Return the best setting of the grid, the seconds it took, and the number of settings."""
    start, rates = time.perf_counter(), {}
    for number in workers:
        for prefetch in PREFETCH if number else (None,):
            for pin in (False, True) if device.startswith("cuda") else (False,):
                settings = LoaderSettings(number, prefetch, pin)
                rates[settings] = measure(dataset, settings, seconds, device)
    return max(rates, key=lambda one: rates[one]), time.perf_counter() - start, len(rates)


def tune(dataset: Items, device: str) -> tuple[LoaderSettings, float, lo.Report]:
    """Return the tuner's choice, the seconds it took, and its table."""
    tuner = lo.DataPipelineTuner(verbose=False)
    loader = DataLoader(dataset, batch_size=BATCH)
    seconds = 0.0
    plain = tuner._tune_or_reuse

    def timed(*arguments: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        plain(*arguments)
        seconds += time.perf_counter() - start

    tuner._tune_or_reuse = timed
    trainer(device, tuner, Stop()).fit(Net(), loader)
    del tuner._tune_or_reuse
    assert tuner.chosen is not None, tuner.report().notes
    return tuner.chosen, seconds, tuner.report()


def time_items(dataset: Items, items: int) -> list[dict[str, Any]]:
    """Return the time of an item, uncached and from each kind of cache."""
    rows: list[dict[str, Any]] = []

    def per_item(get: Callable[[int], object]) -> float:
        start = time.perf_counter()
        for index in range(items):
            get(index)
        return 1e6 * (time.perf_counter() - start) / items

    rows.append({"item": "uncached", "µs": per_item(dataset.__getitem__)})
    with TemporaryDirectory() as folder:
        for storage, where in (("memory", {}), ("disk", {"key": "v1", "folder": folder})):
            cache = lo.CachedDataset(dataset, 50_000_000, storage=storage, **where)
            first = per_item(cache.__getitem__)
            again = statistics.median(per_item(cache.__getitem__) for _ in range(5))
            rows += [
                {"item": f"{storage}, first time", "µs": first},
                {"item": f"{storage}, from the cache", "µs": again},
            ]
    return rows


def main() -> None:
    """Measure all three datasets."""
    arguments = parse_arguments(__doc__)
    warnings.filterwarnings("ignore")  # on more workers than CPUs
    device, quick = arguments.device, arguments.quick
    cores = available_cpus()
    seconds, rounds = (0.3, 1) if quick else (4.0, 3)
    rows, tables = [], {}
    for name, dataset, most in (
        ("computes", Computed(), cores),
        ("waits", Waited(), max(cores, MAX_WAITING_WORKERS)),
        ("is ready", Items(), cores),
    ):
        steps = sorted({0, 1, *(2**i for i in range(1, 10) if 2**i <= most), most})
        chosen, tuning, table = tune(dataset, device)
        best, gridding, settings = search_grid(dataset, steps, seconds, device)
        rates: dict[str, list[float]] = {"default": [], "grid": [], "tuner": []}
        for _ in range(rounds):
            for kind, one in (("default", LoaderSettings()), ("grid", best), ("tuner", chosen)):
                rates[kind].append(measure(dataset, one, seconds / 2, device))
        ratios = [a / b for a, b in zip(rates["tuner"], rates["grid"], strict=True)]
        for kind, one in (("default", LoaderSettings()), ("grid", best), ("tuner", chosen)):
            rows.append(
                {
                    "dataset": name,
                    "settings": kind,
                    "workers": one.workers,
                    "prefetch": one.prefetch,
                    "samples/s": statistics.median(rates[kind]),
                    "samples/s / grid's": {
                        "default": statistics.median(
                            a / b for a, b in zip(rates["default"], rates["grid"], strict=True)
                        ),
                        "grid": 1.0,
                        "tuner": statistics.median(ratios),
                    }[kind],
                    "found in s": {"default": None, "grid": gridding, "tuner": tuning}[kind],
                    "found in s / grid's": tuning / gridding if kind == "tuner" else None,
                }
            )
        tables[name] = {"grid settings": settings, "tuner": table.to_dict()}
        print(table, flush=True)
    items = time_items(Computed(), 200 if quick else 1000)
    report = lo.Report(
        "Training throughput with different loader settings",
        rows,
        [
            f"`grid`: the best of a grid of workers x prefetch_factor {PREFETCH}, each setting "
            f"timed for {seconds:g} s after its workers have started. `samples/s`: median of "
            f"{rounds} interleaved rounds. `found in s`: time of the search. Batches of {BATCH}; "
            f"at most {cores} workers, and {max(cores, MAX_WAITING_WORKERS)} for the dataset that "
            "waits.",
            "Time to get an item of the dataset that computes, in µs: "
            + "; ".join(f"{row['item']} {row['µs']:.0f}" for row in items)
            + ".",
        ],
    )
    publish("data", report, arguments, tables=tables, items=items)


if __name__ == "__main__":
    main()
