"""The acts of the demo. ``demo.py`` runs each side in its own process, and draws."""

from __future__ import annotations

import logging
import math
import resource
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_opt as lo
from byte_gpt import Batch, ByteGPT, SourceBatches, read_sources
from demo import ROOM
from lightning_opt.worker.training_process import TrainingProcess

MIB = 2**20
SPIKE, NAN = 90, 170
"""Act 1: the batch whose loss is 1,000 times too large, and the one whose loss is NaN."""


def batches(count: int, size: int, window: int) -> DataLoader[Batch]:
    """Return batches of the standard library's source; every side gets the same."""
    data = SourceBatches(read_sources(), count, batch_size=size, window=window)
    return DataLoader(data, batch_size=None)


def status(field: str) -> float:
    """Return a field of ``/proc/self/status``, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def trainer(callbacks: list[L.Callback], steps: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# --- 1: a bad batch -----------------------------------------------------------------------------


class Unlucky(ByteGPT):
    """A ByteGPT with one loss that is far too large, and one that is NaN."""

    def on_fit_start(self) -> None:
        self.clean = SourceBatches(read_sources()[::10], 1, batch_size=16)[0][0]
        self.curve: list[tuple[int, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch)
        return loss * {SPIKE: 1000.0, NAN: math.nan}.get(batch_idx, 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 4 or abs(batch_idx - SPIKE) < 3:
            with torch.no_grad():
                self.curve.append((batch_idx + 1, float(self.loss(self.clean))))


def bad_batch(side: str, quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Unlucky(width=96, depth=1 if quick else 3, lr=3e-3)
    callbacks = [lo.NonFiniteGuard(spike=6)] if side == "ours" else []
    trainer(callbacks, 240).fit(model, batches(240, 4 if quick else 8, 64))
    lost = sum(p.numel() for p in model.parameters() if not p.isfinite().all())
    return {"curve": model.curve, "lost": lost, "of": sum(p.numel() for p in model.parameters())}


# --- 2: out of memory ---------------------------------------------------------------------------


class MemoryCurve(L.Callback):
    """Sets the memory limit, and records the address space and each step's loss."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.samples, self.losses = limit, [], []
        self.ended = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start, self.base = time.perf_counter(), status("VmSize")
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()
        self.base = status("VmSize")  # includes the thread's stack
        if self.limit is not None:
            most = int((self.base + self.limit) * MIB)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    def sample(self) -> None:
        while not self.ended.wait(0.004):
            self.samples.append((time.perf_counter() - self.start, status("VmSize") - self.base))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def out_of_memory(side: str, quick: bool) -> dict[str, Any]:
    steps = 1 if quick else 6
    torch.manual_seed(0)
    model = ByteGPT(width=192, depth=4, heads=6, window=128)
    curve = MemoryCurve(None if side == "reference" else ROOM)
    callbacks = [curve, *([lo.MicroBatching("auto")] if side == "ours" else [])]
    error = None
    try:
        trainer(callbacks, steps).fit(model, batches(steps, 32, 128))
    except (RuntimeError, MemoryError) as problem:
        error = str(problem).strip().splitlines()[0]
    curve.stop()
    weights = [float(p.detach().double().norm()) for p in model.parameters()]
    return {
        "samples": thin(curve.samples),
        "losses": curve.losses,
        "weights": weights,
        "error": error,
    }


def thin(samples: list[tuple[float, float]], kept: int = 400) -> list[tuple[float, float]]:
    """Keep the largest of each group of samples."""
    width = max(1, len(samples) // kept)
    groups = [samples[start : start + width] for start in range(0, len(samples), width)]
    return [max(group, key=lambda sample: sample[1]) for group in groups]


# --- 3: half the memory of training -------------------------------------------------------------


SKIPPED = 2
"""Act 3: the first steps, in which optimizers create their state."""


class Peak(L.Callback):
    """Writes the memory of training: weights, gradients, optimizer state and the step's peak.

    A GPU calls the same its allocated memory. The resident memory of the process also has Python,
    torch and its libraries, which no setting changes: some 500 MiB.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == SKIPPED:
            [optimizer] = trainer.optimizers
            states = [value for state in optimizer.state.values() for value in state.values()]
            gradients = [p.grad for p in pl_module.parameters()]
            held = sum(t.nbytes for t in (*pl_module.parameters(), *gradients, *states)) / MIB
            self.base = status("VmRSS") - held
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index >= SKIPPED:
            self.file.write_text(str(status("VmHWM") - self.base))


def settings_of(side: str, file: Path, budget: float) -> dict[str, Any]:
    chosen: list[L.Callback] = {
        "plain": [],
        "every layer": [lo.ActivationCheckpointing("every_layer")],
        "auto": [lo.ActivationCheckpointing("auto", budget=budget)],
    }[side]
    return {"accelerator": "cpu", "callbacks": [*chosen, Peak(file)]}


def half_the_memory(side: str, quick: bool) -> dict[str, Any]:
    """Train each side in its own process; the sides take turns, so that their times compare."""
    rounds = 1 if quick else 6
    budget = 0.6 if quick else 0.35  # of two blocks, one is always in memory
    model = partial(ByteGPT, width=96, depth=2 if quick else 8, heads=4, window=256)
    data = partial(batches, SKIPPED + rounds, 2 if quick else 8, 256)
    sides = ("plain", "every layer", "auto")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        fits: dict[str, TrainingProcess] = {}
        try:
            for side in sides:
                settings = partial(settings_of, side, Path(folder, side), budget)
                fits[side] = TrainingProcess(model, data, settings, timeout=600)
                fits[side].advance(SKIPPED)
            for _ in range(rounds):
                for side in sides:
                    seconds[side] += [step.seconds for step in fits[side].advance(1)]
            peaks = {side: float(Path(folder, side).read_text()) for side in sides}
        finally:
            for fit in fits.values():
                fit.close()
    ratio = {
        side: median(a / b for a, b in zip(seconds[side], seconds["plain"], strict=True))
        for side in sides
    }
    return {
        side: {"peak": peaks[side], "seconds": median(seconds[side]), "time": ratio[side]}
        for side in sides
    }


ACTS = {
    "bad_batch": bad_batch,
    "out_of_memory": out_of_memory,
    "half_the_memory": half_the_memory,
}


def run(act: str, side: str, quick: bool) -> dict[str, Any]:
    """Run one side of an act in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for package in ("lightning.pytorch", "lightning_opt"):
        logging.getLogger(package).setLevel(logging.ERROR)
    return ACTS[act](side, quick)
