"""Train a small GPT with and without adaptive clipping, from one seed on the same batches.

One batch in 25 comes from a damaged file (see ``byte_gpt.py``), whose gradient is many times larger
than usual. The three runs are plain, with ``AdaptiveClipping()``, and with the common alternative
``Trainer(gradient_clip_val=1.0)``.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.optim import Optimizer

import lightning_opt as lo
from byte_gpt import Batch, ByteGPT, SourceData

PLAIN, ADAPTIVE, FIXED = "plain", "AdaptiveClipping()", "gradient_clip_val=1.0"
COLOURS = {
    PLAIN: "#D55E00",
    ADAPTIVE: "#0072B2",
    FIXED: "#7F7F7F",
}  # distinguishable for colour-blind readers
SPIKE = 3.0  # times the median norm of the 50 steps before


class TimedClipping(lo.AdaptiveClipping):
    """AdaptiveClipping that measures the time of its hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_before_optimizer_step(*args)
        self.seconds.append(time.perf_counter() - start)


class Recorder(L.Callback):
    """Records norms, losses and times of each step. Must come before the callback that clips.

    Args:
        clipping: The run's clipping callback, if it has one.

    Attributes:
        damaged: Whether the step's batch came from a damaged file.
        norms: Total gradient norm of each step, before any clipping.
        thresholds: Clipping threshold of each step; infinity without clipping.
        probe_losses: Loss after each step on a fixed batch of undamaged validation files.
        seconds: Time of each step, without the recorder's.
        val_losses: Step and loss of each validation.
    """

    def __init__(self, clipping: lo.AdaptiveClipping | None = None) -> None:
        self.clipping = clipping
        self.damaged: list[bool] = []
        self.norms: list[float] = []
        self.thresholds: list[float] = []
        self.probe_losses: list[float] = []
        self.seconds: list[float] = []
        self.val_losses: list[tuple[int, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._probe = trainer.datamodule.validation[0][0][:16]

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        start = time.perf_counter()
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        self._start += time.perf_counter() - start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, *_: Any
    ) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        with torch.no_grad():
            self.probe_losses.append(pl_module.loss(self._probe).item())
        self.damaged.append(batch[1])
        if self.clipping is not None:
            self.thresholds.append(self.clipping.report().rows[0]["threshold"])
        else:
            self.thresholds.append(trainer.gradient_clip_val or math.inf)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.val_losses.append((trainer.global_step, trainer.callback_metrics["val_loss"].item()))

    def clipped_steps(self) -> list[int]:
        """Return the steps that were clipped."""
        return [i for i, norm in enumerate(self.norms) if norm > self.thresholds[i]]

    def spikes(self) -> list[int]:
        """Return the steps, from the 50th, whose norm far exceeds the median of those before."""
        steps = range(50, len(self.norms))
        return [i for i in steps if self.norms[i] > SPIKE * median(self.norms[i - 50 : i])]

    def excursions(self) -> list[float]:
        """Return the rise of the probe loss within 10 steps of each damaged batch.

        Starts at step 50: before, the loss falls too much within 10 steps.
        """
        return [
            max(self.probe_losses[step : step + 10]) - self.probe_losses[step - 1]
            for step, damaged in enumerate(self.damaged)
            if damaged and step >= 50
        ]


def train(
    steps: int,
    seed: int = 0,
    lr: float = 1e-3,
    damaged: float = 0.04,
    clipping: lo.AdaptiveClipping | None = None,
    gradient_clip_val: float | None = None,
) -> Recorder:
    """Train one model for ``steps`` batches and return its record."""
    L.seed_everything(seed, verbose=False)
    recorder = Recorder(clipping)
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=[recorder, *([clipping] if clipping else []), TQDMProgressBar(refresh_rate=10)],
        gradient_clip_val=gradient_clip_val,
        val_check_interval=max(1, steps // 4),
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(lr=lr), SourceData(steps=steps, damaged=damaged, seed=seed))
    return recorder


def summarise(runs: dict[str, Recorder], title: str) -> lo.Report:
    """Return a table with one row per run."""
    rows = [
        {
            "run": name,
            "val loss": f"{run.val_losses[-1][1]:.3f}",
            "best": f"{min(loss for _, loss in run.val_losses):.3f}",
            "spikes": len(run.spikes()),
            "excursion": f"{mean(run.excursions() or [0.0]):.3f}",
            "worst": f"{max(run.excursions(), default=0.0):.2f}",
            "steps clipped": f"{len(run.clipped_steps()) / len(run.norms):.1%}",
            "step ms": f"{1e3 * median(run.seconds):.1f}",
            "cost": f"{cost:.2%}" if (cost := cost_of_clipping(run)) else "",
        }
        for name, run in runs.items()
    ]
    final = {name: run.val_losses[-1][1] for name, run in runs.items()}
    notes = [
        "val loss: nats per byte on clean files that were not trained on, at the end; best: lowest",
        f"spikes: gradient norms above {SPIKE:g} times the median of the 50 steps before",
        "excursion: rise of the loss on a fixed clean batch within 10 steps of a damaged one, on "
        "average and at worst",
        "cost: median time of the callback in a step over the median of the rest of the step",
        *(
            f"{name} changed the final loss by {loss - final[PLAIN]:+.3f}, and clipped "
            f"{len(runs[name].clipped_steps()) / len(runs[name].norms):.0%} of the steps."
            for name, loss in final.items()
            if name != PLAIN
        ),
        "One seed decides nothing; try others with --seed.",
    ]
    return lo.Report(title, rows, notes)


def cost_of_clipping(run: Recorder) -> float | None:
    """Return the time of the clipping callback as a share of the rest of a step."""
    if not isinstance(run.clipping, TimedClipping):
        return None
    own = median(run.clipping.seconds)
    return own / (median(run.seconds) - own)


def draw(runs: dict[str, Recorder]) -> Figure:
    """Draw the losses of all runs, and below them the norms of the first two."""
    figure = Figure(figsize=(9.0, 8.0), dpi=120, layout="constrained")
    losses, *norms = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    for name, run in runs.items():
        style = {"color": COLOURS[name], "zorder": 1 if name == FIXED else 2}
        losses.plot(run.probe_losses, linewidth=1, label=name, **style)
        losses.scatter(*zip(*run.val_losses, strict=True), **style)
    losses.set(ylabel="loss on clean bytes\n(nats per byte)")
    losses.set_title("Loss after each step on one fixed batch (lines), validation loss (dots)")
    losses.legend()
    shown = [name for name in (PLAIN, ADAPTIVE) if name in runs]
    for axes, name in zip(norms, shown, strict=True):
        draw_norms(axes, runs[name], name)
        axes.sharey(norms[0])
    norms[-1].set_xlabel("step")
    return figure


def draw_norms(axes: Axes, run: Recorder, name: str) -> None:
    """Draw the gradient norms, the damaged batches among them, and the threshold, if any."""
    steps = range(len(run.norms))
    axes.semilogy(steps, run.norms, color=COLOURS[name], linewidth=0.8, label="gradient norm")
    bad = [step for step in steps if run.damaged[step]]
    axes.scatter(
        bad, [run.norms[i] for i in bad], s=22, marker="x", color="black", label="damaged batch"
    )
    if run.clipping is not None:
        axes.plot(steps, run.thresholds, color="#E69F00", linewidth=2, label="threshold")
    axes.set(ylabel="gradient norm\nbefore clipping", title=name)
    axes.legend(ncols=3, loc="upper right")


def silence_advice() -> None:
    """Silence Lightning's advice about the machine and toy data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument(
        "--damaged", type=float, default=0.04, help="share of damaged batches (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("clipping.png"), help="picture to write (%(default)s)"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    silence_advice()
    settings = {"steps": args.steps, "seed": args.seed, "lr": args.lr, "damaged": args.damaged}

    start = time.perf_counter()
    runs = {}
    for name, means in {
        PLAIN: {},
        ADAPTIVE: {"clipping": TimedClipping()},
        FIXED: {"gradient_clip_val": 1.0},
    }.items():
        print(f"{len(runs) + 1}/3 {name}", flush=True)
        runs[name] = train(**settings, **means)
    title = "A byte-level GPT on Python's standard library: " + ", ".join(
        f"{key} {value}" for key, value in settings.items()
    )
    summarise(runs, title).print()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(args.out)
    print(f"{args.out.resolve()} drawn; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
