"""The cost of StepProfiler, and the share of a fit's wall time that its phases cover.

Supports two claims, each with a table.

- Cost: at most 2% of a step of 10 ms. One training run alternates, step by step, between
  Lightning's pass-through profiler and StepProfiler with its hooks, so that both are timed on the
  same model within the same second. Whole steps of the Trainer are timed, with the loggers,
  callbacks and clipping of an ordinary run, and without any.
- Account: the phases add up to at least 97% of the wall time of a fit as measured from outside, on
  three models, with accumulation and on two ranks of DDP. The second share excludes the phases that
  no Lightning hook names: its own loop, setup, teardown, and between epochs.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.batching.micro_batching import in_processes, quiet_trainer
from benchmarks.harness import free_port, parse_arguments, publish
from benchmarks.models import Regression, forty_tensor_mlp
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.profiling.steps.step_run import EpochHooks

GPU = True

UNNAMED = ("Lightning's loop", "setup", "teardown", "between epochs", "other")

COST_NOTE = (
    "`ms a bare step`: median step under PassThroughProfiler. `us added`: median step under "
    "StepProfiler minus the bare step, in microseconds. `time / bare`: ratio of a step under "
    "StepProfiler to the bare step before it, median."
)
ACCOUNT_NOTE = (
    "`ms a batch`: median time of a batch. `wall s`: wall time of the fit. `all phases`: share of "
    "it that is in a phase. `named phases`: the same without the phases that no Lightning hook "
    "names: its own loop, setup, teardown, and between epochs."
)


class Logged(Regression):
    """A regression that logs its loss, as most modules do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def mlp(batch: int = 64) -> Logged:
    """Three layers of 512."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return Logged(nn.Sequential(*layers), torch.randn(batch, 512))


def convnet() -> Logged:
    """Three convolutions with BatchNorm on images of 32 x 32."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
    return Logged(nn.Sequential(*layers), torch.randn(16, 3, 32, 32))


def transformer() -> Logged:
    """Two encoder layers of width 128."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return Logged(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                  torch.randn(8, 64, 128))  # fmt: skip


MODELS = {"MLP": mlp, "ConvNet": convnet, "transformer": transformer}


# --- cost ---------------------------------------------------------------------------------------


class Turns(L.Callback):
    """Alternates between a pass-through profiler and StepProfiler, and times each step."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, {False: [], True: []}

    def on_train_start(self, trainer: Any, module: L.LightningModule) -> None:
        loop, ours, nothing = trainer.fit_loop.epoch_loop, trainer.profiler, PassThroughProfiler()
        advance, turn = loop.advance, 0

        def timed(fetcher: Any) -> None:
            nonlocal turn
            with_us, run = turn % 2 == 1, ours._run
            turn += 1
            if run._hooks is not None and not with_us:
                run._hooks.remove()
                run._hooks = None
            elif run._hooks is None and with_us:
                run._hooks = EpochHooks(run.clock, trainer, None)
            trainer.profiler = ours if with_us else nothing
            wait_for(self.device)
            start = time.perf_counter()
            try:
                advance(fetcher)
            finally:
                wait_for(self.device)
                self.seconds[with_us].append(time.perf_counter() - start)
                trainer.profiler = ours

        vars(loop)["advance"] = timed

    def on_train_end(self, trainer: Any, module: L.LightningModule) -> None:
        vars(trainer.fit_loop.epoch_loop).pop("advance")


def measure_cost(name: str, module: Regression, pairs: int, device: str, **settings: Any) -> Any:
    """Time steps of one run, except for the first tenth."""
    turns, ours = Turns(device), lo.StepProfiler(print_table=False, flops=False)
    callbacks = [turns, *settings.pop("callbacks", [])]
    trainer = quiet_trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        profiler=ours, callbacks=callbacks, **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader([module.batch.cpu()] * (2 * pairs), batch_size=None))
    bare, with_us = (turns.seconds[kind][pairs // 10 :] for kind in (False, True))
    ratios = [b / a for a, b in zip(bare, with_us, strict=True)]
    return {
        "model": name,
        "ms a bare step": round(1e3 * statistics.median(bare), 3),
        "us added": round(1e6 * (statistics.median(with_us) - statistics.median(bare)), 1),
        "time / bare": round(statistics.median(ratios), 4),
    }


def ten_milliseconds(device: str) -> Logged:
    """Return an MLP with a batch that takes about ten milliseconds per step."""
    batch = 64
    for _ in range(3):
        took = measure_cost("", mlp(batch), 10, device)["ms a bare step"]
        batch = max(8, round(batch * 10 / took))
    return mlp(batch)


def ordinary(folder: str) -> dict[str, Any]:
    """Return the settings of an ordinary run: logger, checkpoint, monitor, clipping."""
    return {
        "logger": CSVLogger(folder),
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(folder), LearningRateMonitor("step")],
        "gradient_clip_val": 1.0,
    }


# --- account ------------------------------------------------------------------------------------


def account(model: str, batches: int, accumulate: int, **settings: Any) -> dict[str, Any]:
    """Fit once, and return which share of its wall time the phases account for."""
    module, ours = MODELS[model](), lo.StepProfiler(print_table=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(
            profiler=ours, logger=CSVLogger(folder), accumulate_grad_batches=accumulate, **settings
        )
        loader = DataLoader([module.batch] * batches, batch_size=None)
        start = time.perf_counter()
        trainer.fit(module, loader)
        wall = time.perf_counter() - start
    measures = ours.measures()
    seconds = measures.seconds
    unnamed = sum(seconds.get(name, 0.0) for name in UNNAMED)
    return {
        "model": model,
        "ms a batch": round(1e3 * measures.clock.work.steps.quantile(0.5), 2),
        "wall s": round(wall, 2),
        "all phases": round((sum(seconds.values()) - seconds.get("other", 0.0)) / wall, 4),
        "named phases": round((sum(seconds.values()) - unnamed) / wall, 4),
    }


def account_on_a_rank(model: str, batches: int, rank: int, port: int, queue: Any) -> None:
    """Account for a fit on one of two ranks of DDP."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = account(model, batches, 1, devices=2, strategy="ddp", use_distributed_sampler=False)
    queue.put({"rank": rank, **found})


def measure_accounts(batches: int) -> list[dict[str, Any]]:
    """Return a row for each model, alone, with accumulation and on two ranks."""
    rows = []
    account("MLP", 5, 1)  # what the first fit of a process does once
    for model in MODELS:
        for accumulate in (1, 4):
            kind = "alone" if accumulate == 1 else "accumulation over 4"
            rows.append({"run": kind, **account(model, batches, accumulate)})
        port = free_port()
        ranks = in_processes(*((account_on_a_rank, model, batches, r, port) for r in (0, 1)))
        for found in sorted(ranks, key=lambda row: row.get("rank", -1)):
            if "rank" not in found:
                raise RuntimeError(f"A rank {found['end']}.")
            rows.append({"run": f"DDP, rank {found.pop('rank')} of 2", **found})
    return rows


def main() -> None:
    """Measure both and publish their tables."""
    arguments = parse_arguments(__doc__)
    device, quick = arguments.device, arguments.quick
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    title = "Cost of StepProfiler, compared with Lightning's PassThroughProfiler"
    pairs = 20 if quick else 500
    if device != "cpu":
        # Of more samples, a GPU would spend the ten milliseconds on the copy of the batch.
        rows = [measure_cost("MLP of 40 tensors", forty_tensor_mlp(), pairs, device)]
        with tempfile.TemporaryDirectory() as folder:
            name = "MLP of 40 tensors, with logger, checkpoint, monitor, clipping"
            more = ordinary(folder)
            rows.append(measure_cost(name, forty_tensor_mlp(), pairs, device, **more))
        publish("step_profiler_cost", lo.Report(title, rows, [COST_NOTE]), arguments)
        return
    rows = [measure_cost("MLP of 40 tensors", forty_tensor_mlp(), 20 if quick else 2000, device)]
    rows.append(measure_cost("MLP, 10 ms", ten_milliseconds(device), pairs, device))
    with tempfile.TemporaryDirectory() as folder:
        name = "MLP, 10 ms, with logger, checkpoint, monitor, clipping"
        rows.append(measure_cost(name, ten_milliseconds(device), pairs, device, **ordinary(folder)))
    publish("step_profiler_cost", lo.Report(title, rows, [COST_NOTE]), arguments)
    rows = measure_accounts(30 if quick else 400)
    title = "Share of a fit's wall time that the phases of StepProfiler cover"
    publish("step_profiler_account", lo.Report(title, rows, [ACCOUNT_NOTE]), arguments)


if __name__ == "__main__":
    main()
