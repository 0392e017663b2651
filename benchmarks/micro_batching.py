"""What MicroBatching costs while everything fits, what it survives, and how it grows back.

Supports three claims, each with a table of its own.

- Cost: ``MicroBatching("auto")`` takes at most 1% of a step as long as memory does not run out. One
  training run takes turns between Lightning's closures and ours, step by step, so that both are
  timed on the same model within the same second. Whole steps, as the Trainer makes them.
- Survival: trainings under a limited address space with random limits, lengths and batch sizes, in
  processes of their own, where memory runs out in the forward pass, in the loss or in the backward
  pass. Each is compared with the run without a limit: weights, and the samples trained on.
- Regrowth: one sequence in a hundred batches is eight times longer and does not fit. Beside a fixed
  size that fits it, which is where halving without growth ends, and beside the run without a limit.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import statistics
import time
import warnings
from collections import Counter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from harness import parse_arguments, publish, wait
from lightning_opt.core.memory import MB, process_memory
from models import Regression, forty_tensor_mlp, ten_million_transformer

TIMEOUT = 120.0
"""Seconds after which a process counts as hung."""


def quiet_trainer(**settings: Any) -> L.Trainer:
    """Return a Trainer for one epoch that says and saves nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


# --- cost ---------------------------------------------------------------------------------------


class Turns(L.Callback):
    """Lets Lightning's closure and the replacement make a step in turn, and times each."""

    def __init__(self, device: str, accumulate: int) -> None:
        self.device, self.accumulate = device, accumulate
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.ours: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        if self.ours is None:
            self.ours = optimization._make_closure
        if batch_idx % self.accumulate == 0:
            wait(self.device)
            self.with_us = batch_idx // self.accumulate % 2 == 1
            if self.with_us:
                optimization._make_closure = self.ours
            else:
                vars(optimization).pop("_make_closure", None)
            self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.accumulate == 0:
            wait(self.device)
            self.seconds[self.with_us].append(time.perf_counter() - self.start)
            trainer.fit_loop.epoch_loop.automatic_optimization._make_closure = self.ours


def measure_cost(
    name: str, module: Regression, accumulate: int, pairs: int, device: str
) -> dict[str, Any]:
    """Time steps of one run, the first tenth left out."""
    turns = Turns(device, accumulate)
    trainer = quiet_trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        callbacks=[lo.MicroBatching(), turns],
        accumulate_grad_batches=accumulate,
    )
    batch = module.batch.cpu()
    trainer.fit(module, DataLoader([batch] * (2 * pairs * accumulate), batch_size=None))
    bare, with_us = (turns.seconds[kind][pairs // 10 :] for kind in (False, True))
    ratios = [b / a for a, b in zip(bare, with_us, strict=True)]
    return {
        "model": name,
        "accumulate": accumulate,
        "ms a bare step": round(1e3 * statistics.median(bare), 3),
        "us more": round(1e6 * (statistics.median(with_us) - statistics.median(bare)), 1),
        "of the bare step": round(statistics.median(ratios), 4),
    }


# --- survival -----------------------------------------------------------------------------------


class Squander(torch.autograd.Function):
    """An identity that takes memory for each element while it passes, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        ctx.backward = backward
        torch.ones(x.numel() * forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.ones(gradient.numel() * ctx.backward)
        return gradient, None, None


class Sequences(L.LightningModule):
    """Sequences of random lengths, and a peak of memory in one place of the step."""

    def __init__(self, batches: list[dict[str, Tensor]], where: str, factor: int) -> None:
        super().__init__()
        self.batches, self.where, self.factor = batches, where, factor
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["id"].tolist()
        hidden = self.layers[:2](batch["x"])
        factors = {"forward": (self.factor, 0), "backward": (0, self.factor), "loss": (0, 0)}
        hidden = Squander.apply(hidden, *factors[self.where])
        if self.where == "loss":
            torch.ones(self.factor * hidden.numel())
        return self.layers[2](hidden).square().mean(dim=(1, 2)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def some_batches(draw: random.Random, count: int) -> list[dict[str, Tensor]]:
    """Return batches of random sizes and lengths; lengths differ by up to a factor of 8."""
    found, number = [], 0
    for _ in range(count):
        samples, length = draw.randint(4, 24), draw.choice([16, 32, 64, 128])
        x = torch.randn(samples, length, 64)
        found.append({"id": torch.arange(number, number + samples), "x": x})
        number += samples
    return found


def limit_address_space(room: float) -> None:
    """Let this process have so many MB more than it has now, and no more; infinity lifts it."""
    import resource

    limit = resource.RLIM_INFINITY
    if room < math.inf:
        limit = process_memory().virtual + int(room * MB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def survive(seed: int, queue: Any) -> None:
    """Train without a limit, then bare and with MicroBatching under one, and say how it ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batches = some_batches(draw, 8)
    where, room = draw.choice(["forward", "loss", "backward"]), draw.uniform(4.0, 120.0)
    accumulate = draw.choice([1, 3])

    def train(*callbacks: L.Callback) -> tuple[Sequences, str]:
        model = Sequences(batches, where, 240)
        trainer = quiet_trainer(callbacks=list(callbacks), accumulate_grad_batches=accumulate)
        try:
            trainer.fit(model)
        except MemoryError as error:
            return model, "one clear error" if "Even one sample" in str(error) else str(error)
        except RuntimeError as error:
            return model, str(error)
        return model, "completed"

    free, _ = train()
    limit_address_space(room)
    _, bare = train()
    micro = lo.MicroBatching()
    model, end = train(micro)
    limit_address_space(math.inf)
    if end == "completed":
        close = all(
            torch.allclose(a, b, rtol=0.0, atol=1e-6)
            for a, b in zip(model.parameters(), free.parameters(), strict=True)
        )
        if not close:
            end = "other weights"
        if sorted(model.seen) != sorted(free.seen):
            end = "samples lost or doubled"
    retries = micro.state_dict()["retries"]
    queue.put({"where": where, "bare": bare == "completed", "end": end, "retries": retries})


def in_a_process(function: Any, *args: Any) -> dict[str, Any]:
    """Return what the function puts into a queue, or that it hung or died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_opt"])
    queue = context.SimpleQueue()  # has no thread, which could not start under a limit
    process = context.Process(target=function, args=(*args, queue), daemon=True)
    process.start()
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if not queue.empty():
            found: dict[str, Any] = queue.get()
            process.join(5)
            return found
        if not process.is_alive():
            time.sleep(0.2)
            return queue.get() if not queue.empty() else {"end": "died"}
        time.sleep(0.02)
    process.kill()
    return {"end": "hung"}


def measure_survival(trainings: int) -> list[dict[str, Any]]:
    """Return how the trainings ended, by where memory runs out."""
    results = [in_a_process(survive, seed) for seed in range(trainings)]
    rows = []
    for where in ("forward", "loss", "backward", None):
        own = [result for result in results if result.get("where") == where]
        if not own:
            continue
        ends = Counter(result["end"] for result in own)
        rows.append(
            {
                "memory runs out in": where or "(no answer)",
                "trainings": len(own),
                "bare run completed": sum(result.get("bare", False) for result in own),
                "completed, right weights and samples": ends.pop("completed", 0),
                "one clear error": ends.pop("one clear error", 0),
                "anything else": sum(ends.values()),
                "attempts taken back": sum(result.get("retries", 0) for result in own),
            }
        )
        for end in ends:
            print(f"{where}: {end}")
    return rows


# --- regrowth -----------------------------------------------------------------------------------


def regrow(kind: str, steps: int, queue: Any) -> None:
    """Time a run in which one batch in a hundred has sequences eight times longer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    short, long = torch.randn(16, 32, 64), torch.randn(16, 256, 64)
    ids = torch.arange(16)
    batches = [{"id": ids, "x": long if n % 100 == 10 else short} for n in range(steps)]
    train = quiet_trainer().fit
    train(Sequences(batches[:12], "forward", 40))  # warms up, the long one included
    if kind != "no limit":
        limit_address_space(30.0)  # the long batch needs 42 MB in one piece
    # A quarter of the batch fits: where halving without growth stays after the first long batch.
    callback = {
        "no limit": [],
        "MicroBatching('auto')": [lo.MicroBatching()],
        "fixed at what the longest needs": [lo.MicroBatching(4)],
    }[kind]
    trainer = quiet_trainer(callbacks=callback)
    model = Sequences(batches, "forward", 40)
    start = time.perf_counter()
    trainer.fit(model)
    seconds = time.perf_counter() - start
    limit_address_space(math.inf)
    retries = callback[0].state_dict()["retries"] if callback else 0
    queue.put({"kind": kind, "seconds": seconds, "retries": retries})


def measure_regrowth(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return the throughput of each kind, of the median of some runs in turn."""
    kinds = ("no limit", "MicroBatching('auto')", "fixed at what the longest needs")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            run = in_a_process(regrow, kind, steps)
            if "seconds" not in run:
                raise RuntimeError(f"The run {kind!r} {run['end']}.")
            runs[kind].append(run)
    seconds = {kind: statistics.median(run["seconds"] for run in runs[kind]) for kind in kinds}
    return [
        {
            "run": kind,
            "batches a second": round(steps / seconds[kind], 1),
            "of the run without a limit": round(seconds["no limit"] / seconds[kind], 3),
            "attempts taken back": runs[kind][0]["retries"],
        }
        for kind in kinds
    ]


def main() -> None:
    """Measure all three and publish their tables."""
    arguments = parse_arguments(__doc__)
    device, quick = arguments.device, arguments.quick
    warnings.simplefilter("ignore")
    rows = []
    for name, make, accumulate, pairs in (
        ("MLP of 40 tensors", forty_tensor_mlp, 1, 1500),
        ("transformer, 9.5M", ten_million_transformer, 1, 50),
        ("transformer, 9.5M", ten_million_transformer, 4, 10),
    ):
        torch.manual_seed(0)
        pairs = 10 if quick else pairs
        rows.append(measure_cost(name, make(), accumulate, pairs, device))
    publish(
        "micro_batching_cost",
        lo.Report("A step with MicroBatching('auto') while everything fits", rows),
        arguments,
    )
    if device != "cpu":
        return
    rows = measure_survival(3 if quick else 20)
    title = "Trainings under a limited address space, with MicroBatching('auto')"
    publish("micro_batching_survival", lo.Report(title, rows), arguments)
    rows = measure_regrowth(110 if quick else 400, 1 if quick else 3)
    title = "Throughput where one batch in a hundred is eight times longer and does not fit"
    publish("micro_batching_regrowth", lo.Report(title, rows), arguments)


if __name__ == "__main__":
    main()
