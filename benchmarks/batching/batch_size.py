"""Batch sizes: the search against exhaustive search, and against a grid of speeds.

Each search, and each size of the exhaustive one, runs in a process of its own: memory of a CPU that
a run has used does not go back to what it was. The exhaustive search under ``RLIMIT_AS`` halves the
interval with real trainings that fit or run out of memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import multiprocessing
import random
import statistics
import time
import warnings
from typing import Any

import lightning as L
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from lightning_opt.core.measure.exhaustion import is_out_of_memory, recover_memory
from lightning_opt.core.measure.memory import MB

SAMPLES = 16384
RUNS = 5
NOTES = (
    "Five searches per model. After each, a grid of the sizes 8, 11, 16, 23 ... 256 is timed in "
    "random order, with at least ten steps and one second per size. `found`: the size that each "
    "search returned. `best of the grid`: the size with the most samples per second, as a median "
    "of five rounds. `speed / best of the grid`: samples per second of each found size, as a ratio "
    "to the best of the grid, median over ten further rounds. `at least 0.95`: searches with a "
    "ratio of at least 0.95. `seconds`: median time of a search. `seconds / grid's`: this time, as "
    "a share of the time of all five rounds of the grid.",
    "glibc's allocation thresholds are fixed at 32 MB. By default they depend on earlier frees: "
    "the same size took 0.65 or 1.0 of the time, depending on which sizes ran before.",
)
LARGEST_NOTE = (
    "`room, MB`: address space that the training may add. `found`: the size that the search "
    "returned, after `trials` trials and `seconds` seconds. `exhaustive`: the largest size that "
    "fits, within 0.5%, by bisection with real trainings."
)
TIMEOUT = 600.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt` in glibc."""


class Blocks(L.LightningModule):
    """Layers with activations of ``width`` at each of ``length`` places of a sample."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.length = length
        self.embed = nn.Linear(4, width)
        self.layers = nn.Sequential(
            *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU()))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0]).unsqueeze(1).expand(-1, self.length, -1)
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


MODELS = {
    "narrow, 2 layers": (64, 32, 2),
    "wide, 3 layers": (256, 8, 3),
    "long, 4 layers": (64, 128, 4),
}


class Clock(L.Callback):
    """Times steps as in training, loading and hooks included, and stops after enough of them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rows: list[int] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.rows.append(len(batch[0]))
        self.began = now
        trainer.should_stop = len(self.rows) > 10 and sum(self.seconds[1:]) >= 1.0


def loader_of(size: int) -> DataLoader[Any]:
    """Return a loader with batches of ``size``."""
    return DataLoader(TensorDataset(torch.randn(SAMPLES, 4)), batch_size=size)


def trainer_of(**settings: Any) -> L.Trainer:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {**dict.fromkeys(names, False), "accelerator": "cpu", "devices": 1}
    return L.Trainer(**{**quiet, "max_epochs": -1, **settings})


def prepare(name: str, room: float | None, apart: bool = True) -> Blocks:
    """Warm up, limit the address space to ``room`` MB more than in use, and return the model.

    ``apart`` has glibc keep large blocks apart, as it does after memory has run out once.
    """
    import resource

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    trainer_of(max_steps=2).fit(Blocks(*MODELS[name]), loader_of(4))
    if apart:
        recover_memory(torch.device("cpu"))
    if room is not None:
        limit = psutil.Process().memory_info().vms + int(room * MB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return Blocks(*MODELS[name])


def find(name: str, room: float, queue: Any) -> None:
    """Search the largest size."""
    model = prepare(name, room)
    start = time.perf_counter()
    found = lo.find_batch_size(trainer_of(), model, loader_of(8), target=1.0)
    queue.put((found.largest, len(found.trials), time.perf_counter() - start))


def fits(name: str, room: float, size: int, queue: Any) -> None:
    """Return whether a few steps of this size succeed."""
    model = prepare(name, room)
    try:
        trainer_of(max_steps=4).fit(model, loader_of(size))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        queue.put(False)
        return
    queue.put(True)


def speed_of(model: Blocks, size: int) -> float:
    """Return samples per second over at least ten steps and one second, as a user would."""
    clock = Clock()
    trainer = trainer_of(callbacks=[clock])
    trainer.fit(model, loader_of(size))
    return sum(clock.rows[1:]) / sum(clock.seconds[1:])


def fastest(name: str, most: int, runs: int, queue: Any) -> None:
    """Search for the fastest size several times, each time followed by a grid of sizes."""
    model = prepare(name, None, apart=False)
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 2**25)
    found, seconds, took = [], [], 0.0
    grid = sorted({round(2 ** (n / 2)) for n in range(6, 2 * int(math.log2(most)) + 1)})
    speeds: dict[int, list[float]] = {size: [] for size in grid}
    for number in range(runs):
        start = time.perf_counter()
        result = lo.find_batch_size(
            trainer_of(), model, loader_of(8), mode="fastest", max_size=most, budget_mb=1e6
        )
        seconds.append(time.perf_counter() - start)
        found.append(result.fastest)
        start = time.perf_counter()
        for size in random.Random(number).sample(grid, len(grid)):
            speeds[size].append(speed_of(model, size))
        took += time.perf_counter() - start
        print(f"{name}: {found[-1]} in {seconds[-1]:.1f} s; the grid has taken {took:.1f} s.")
        print({size: round(statistics.median(speeds[size])) for size in grid}, flush=True)
    best = max(grid, key=lambda size: statistics.median(speeds[size]))
    sizes = sorted({best, *found})
    again: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(2 * runs if len(sizes) > 1 else 0):
        for size in random.Random(number).sample(sizes, len(sizes)):
            again[size].append(speed_of(model, size))
    queue.put((found, seconds, best, again, took))


def in_a_process(function: Any, *args: Any) -> Any:
    """Return the result that the function puts into a queue.

    Raises:
        RuntimeError: If it dies or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_opt"])
    queue = context.SimpleQueue()  # has no thread, which could not start under a limit
    process = context.Process(target=function, args=(*args, queue), daemon=True)
    process.start()
    deadline = time.monotonic() + TIMEOUT
    try:
        while time.monotonic() < deadline:
            if not queue.empty():
                return queue.get()
            if not process.is_alive() and queue.empty():
                raise RuntimeError(f"{function.__name__}{args} died with {process.exitcode}.")
            time.sleep(0.02)
        raise RuntimeError(f"{function.__name__}{args} took more than {TIMEOUT:g} s.")
    finally:
        process.kill()
        process.join()


def exhaustive(name: str, room: float, around: int) -> int:
    """Return the largest size that fits, by real training in separate processes."""
    low, high = 0, around + max(1, around // 8)
    while in_a_process(fits, name, room, high):
        low, high = high, 2 * high
    if not low:
        near = max(1, around - max(1, around // 16))
        if in_a_process(fits, name, room, near):
            low = near
    while high - low > max(1, high // 200):  # to half a percent
        middle = (low + high) // 2
        if in_a_process(fits, name, room, middle):
            low = middle
        else:
            high = middle
    return low


def largest_sizes(arguments: argparse.Namespace) -> None:
    """Compare the search for the largest size with exhaustive search, and publish it."""
    models = dict(list(MODELS.items())[: 1 if arguments.quick else None])
    rows: list[dict[str, Any]] = []
    for name, room in zip(models, (200.0, 250.0, 300.0), strict=False):
        found, trials, seconds = in_a_process(find, name, room)
        true = exhaustive(name, room, found)
        rows.append(
            {
                "model": name,
                "room, MB": room,
                "found": found,
                "exhaustive": true,
                "found / exhaustive": round(found / true, 3),
                "trials": trials,
                "seconds": round(seconds, 1),
            }
        )
    title = "Largest batch size under a limited address space"
    publish("batch_size_largest", lo.Report(title, rows, [LARGEST_NOTE]), arguments)


def main() -> None:
    """Measure, and publish two tables."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", help="time the sizes of this one alone, and keep the others'")
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__, rest)
    arguments.model = own.model
    if arguments.device != "cpu":
        raise SystemExit("This benchmark limits the memory of the host: --device cpu.")
    warnings.simplefilter("ignore")
    if arguments.model is None:
        largest_sizes(arguments)
    only = arguments.model
    times = {}
    for name, most in zip(MODELS, (256, 256, 256), strict=True):
        if only is None or name.startswith(only):
            few = (16, 1) if arguments.quick else (most, RUNS)
            times[name] = in_a_process(fastest, name, *few)
    file = arguments.out / "batch_size_fastest.json"
    known = json.loads(file.read_text()).get("runs", {}) if only and file.exists() else {}
    known.update({name: describe(*values) for name, values in times.items()})
    rows = [{"model": name, **known[name]} for name in MODELS if name in known]
    title = "Fastest batch size"
    publish("batch_size_fastest", lo.Report(title, rows, list(NOTES)), arguments, runs=known)


def describe(
    found: list[int], seconds: list[float], best: int, again: dict[int, list[float]], grid: float
) -> dict[str, Any]:
    """Return a row of the table."""
    shares = [median_ratio(again[size], again[best]) if size != best else 1.0 for size in found]
    return {
        "found": ", ".join(map(str, found)),
        "best of the grid": best,
        "speed / best of the grid": ", ".join(f"{share:.2f}" for share in shares),
        "at least 0.95": f"{sum(share >= 0.95 for share in shares)} of {len(shares)}",
        "seconds": round(statistics.median(seconds), 1),
        "seconds / grid's": round(statistics.median(seconds) / grid, 2),
    }


if __name__ == "__main__":
    main()
