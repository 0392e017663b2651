"""One small GPT four ways: plain, with two presets, and with what the tuner finds in two minutes.

One batch in 25 comes from a damaged file (see ``byte_gpt.py``), and near the end one batch has a
loss of NaN, as from an overflow. The four runs start from one seed, see the same batches and take
blocks of steps in turn, each in a process of its own, so that their times can be compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import lightning_opt as lo
from byte_gpt import Batch, ByteGPT, SourceData
from lightning_opt.worker.training_process import Fit

RUNS = ("plain", "basic", "advanced", "tuned")
COLOURS = dict(zip(RUNS, ("#D55E00", "#009E73", "#CC79A7", "#0072B2"), strict=True))
HARM = 0.03  # nats per byte by which a damaged batch has to raise the loss on clean text
WATCHED = 10  # steps after a damaged batch in which that is looked for
AFTER = 6  # steps after the NaN batch
BLOCK = 10  # steps that a run takes before it is the next one's turn


class DemoGPT(ByteGPT):
    """A ByteGPT in which one batch has no number for a loss.

    Args:
        lr: Learning rate.
        broken: The batch.
    """

    def __init__(self, lr: float = 1e-3, broken: int | None = None) -> None:
        super().__init__(lr=lr)
        self.broken, self.seen = broken, 0

    def training_step(self, batch: Batch) -> Tensor:
        loss = super().training_step(batch)
        self.seen += 1
        return loss * math.nan if self.seen - 1 == self.broken else loss


class Notes(L.Callback):
    """Looks at the loss on clean text around damaged batches and at the end, and at the weights.

    It works on a copy of the model that nothing compiles or casts, so that all runs are judged
    alike.

    Args:
        file: Where it writes what it has seen.
        data: Whose clean batches it takes.
        last: The batch before the one without a loss.
    """

    def __init__(self, file: Path, data: SourceData, last: int) -> None:
        self.file, self.data, self.last = file, data, last
        self.rises: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = torch.get_rng_state()
        self.judge = ByteGPT()
        torch.set_rng_state(state)
        self.data.setup("fit")
        self.probe = self.data.validation[0][0][:16]

    def loss(self, module: L.LightningModule, windows: list[Tensor]) -> float:
        self.judge.load_state_dict(module.state_dict())
        with torch.no_grad():
            return sum(self.judge.loss(part).item() for part in windows) / len(windows)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any
    ) -> None:
        # From the 50th step on: before, the loss falls too fast for anything to be seen.
        if batch[1] and 50 <= self._seen < self.last - WATCHED:
            self._before[self._seen] = self.loss(pl_module, [self.probe])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        now = self._seen
        self._seen += 1
        for step, before in self._before.items():
            if now - step in (0, 1, 2, 4, WATCHED - 1):
                rise = self.loss(pl_module, [self.probe]) - before
                self.rises[step] = max(self.rises.get(step, -math.inf), rise)
        found: dict[str, Any] = {}
        if now == self.last:
            clean = [self.data.validation[i][0] for i in range(len(self.data.validation))]
            self.final = self.loss(pl_module, clean)
        if now == self.last + AFTER:
            finite = all(bool(p.isfinite().all()) for p in pl_module.parameters())
            found = {"final": self.final, "finite": finite, "rises": self.rises}
            self.file.write_text(json.dumps(found))


@dataclass
class Run:
    """What is known of one of the runs.

    Attributes:
        name: Of :data:`RUNS`.
        what: What is switched on, in words.
        settings: Makes its Trainer's arguments.
    """

    name: str
    what: str
    settings: Callable[[], dict[str, Any]]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    final: float = math.nan
    finite: bool = False
    rises: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first twenty."""
        return median(self.seconds[20:] or self.seconds)

    @property
    def start(self) -> float:
        """Seconds that the first steps took longer than later ones, as for compilation."""
        return sum(max(0.0, seconds - self.step) for seconds in self.seconds[:5])

    @property
    def harmless(self) -> int:
        """Damaged batches after which the loss on clean text did not rise by :data:`HARM`."""
        return sum(rise < HARM for rise in self.rises.values())


def plain() -> dict[str, Any]:
    return {"accelerator": "cpu"}


def preset(name: str) -> dict[str, Any]:
    return lo.preset(name, GradientHealth={"figure": None}).trainer_kwargs(**plain())


def tune(model: Any, data: Any, budget: float) -> lo.TuneResult:
    """Find what pays beside the preset that protects."""
    return lo.autotune(
        model, data, budget=budget, base=functools.partial(preset, "basic"),
        progress=sys.stderr.isatty(),
    )  # fmt: skip


def with_notes(settings: Callable[[], dict[str, Any]], notes: tuple[Any, ...]) -> dict[str, Any]:
    made = settings()
    return {**made, "callbacks": [*made.get("callbacks", []), Notes(*notes)]}


def train(runs: list[Run], model: Any, data: SourceData, make_data: Any, steps: int) -> None:
    """Train all runs side by side, a block of steps each in turn, and write down what came."""
    with tempfile.TemporaryDirectory() as folder:
        fits: dict[str, Fit] = {}
        try:
            for run in runs:
                notes = (Path(folder, run.name), data, steps - 1)
                settings = functools.partial(with_notes, run.settings, notes)
                fits[run.name] = Fit(model, make_data, settings, label=run.name, wait=False)

            def take(run: Run, count: int) -> None:
                taken = fits[run.name].advance(count)
                run.losses += [step.loss for step in taken]
                run.seconds += [step.seconds for step in taken]
                run.peak = fits[run.name].peak_bytes

            with ThreadPoolExecutor(2) as pool:  # what is compiled needs no quiet machine
                list(pool.map(lambda run: take(run, 3), runs))
            total = steps + 1 + AFTER
            while len(runs[0].losses) < total:
                for run in runs:
                    take(run, min(BLOCK, total - len(run.losses)))
            for run in runs:
                seen = json.loads(Path(folder, run.name).read_text())
                run.final, run.finite, run.rises = seen["final"], seen["finite"], seen["rises"]
        finally:
            for fit in fits.values():
                fit.close()


def summarise(runs: list[Run], title: str, notes: list[str]) -> lo.Report:
    """Return a table with one row a run."""
    rows = [
        {
            "run": run.name,
            "step ms": f"{1e3 * run.step:.1f}",
            "time": f"{run.step / runs[0].step:.2f}",
            "start s": f"{run.start:.0f}",
            "peak MiB": f"{run.peak / 2**20:.0f}",
            "final loss": f"{run.final:.3f}",
            "damaged batches survived": f"{run.harmless} of {len(run.rises)}",
            "worst": f"{max(run.rises.values(), default=0.0):+.3f}",
            "NaN batch": "survived" if run.finite else "all weights lost",
        }
        for run in runs
    ]
    units = [
        "time: of a step, median, as a share of plain. start: seconds that the first steps took "
        "longer, while all runs started at once on the same CPUs. peak: of the process, above what "
        "it had before the model. final loss: nats per byte on clean files that were not trained "
        "on, before the NaN batch.",
        f"survived: the loss on a clean batch rose by less than {HARM} within {WATCHED} steps of a "
        "damaged batch; worst: the largest rise. One seed decides nothing; try others with --seed.",
    ]
    what = [f"{run.name}: {run.what}." for run in runs]
    return lo.Report(title, rows, [*units, *what, *notes])


def draw(runs: list[Run], result: lo.TuneResult | None) -> Figure:
    """Draw losses over time, damage, times and peaks, and the tuner's trials."""
    figure = Figure(figsize=(12.0, 8.0), dpi=110, layout="constrained")
    (losses, bars), (damage, trials) = figure.subplots(2, 2)
    for run in runs:
        smooth = moving_mean([loss for loss in run.losses if math.isfinite(loss)])
        places = [run.step * (index + 1) for index in range(len(smooth))]
        losses.plot(places, smooth, color=COLOURS[run.name], lw=1.4, label=run.name)
    losses.set(
        xlabel="seconds of training, without the start", ylabel="training loss, mean of 20 steps"
    )
    losses.set_title("Loss over time", loc="left", weight="bold")
    losses.legend()
    draw_bars(bars, runs)
    for index, run in enumerate(runs):
        rises = list(run.rises.values())
        spread = [index + 0.3 * (n / max(1, len(rises) - 1) - 0.5) for n in range(len(rises))]
        damage.scatter(spread, rises, color=COLOURS[run.name], s=24, zorder=3)
    damage.axhline(HARM, color="black", lw=0.8, ls="--")
    lost = ["\nNaN: survived" if run.finite else "\nNaN: weights lost" for run in runs]
    damage.set_xlim(-0.6, len(runs) - 0.4)
    damage.set_xticks(
        range(len(runs)), [run.name + more for run, more in zip(runs, lost, strict=True)]
    )
    damage.set_ylabel("rise of the loss on clean text")
    damage.set_title("After each damaged batch", loc="left", weight="bold")
    draw_trials(trials, result)
    for axes in (losses, damage, trials):
        axes.grid(alpha=0.2)
    return figure


def moving_mean(values: list[float], width: int = 20) -> list[float]:
    sums = [sum(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
    return [total / min(width, end) for end, total in enumerate(sums, start=1)]


def draw_bars(axes: Axes, runs: list[Run]) -> None:
    """Draw time of a step and peak memory as shares of the plain run's."""
    for offset, (label, values, hatch) in enumerate(
        (
            ("time of a step", [run.step / runs[0].step for run in runs], ""),
            ("peak memory", [run.peak / max(1, runs[0].peak) for run in runs], "//"),
        )
    ):
        places = [index + 0.38 * offset - 0.19 for index in range(len(runs))]
        colours = [COLOURS[run.name] for run in runs]
        drawn = axes.bar(places, values, 0.36, color=colours, hatch=hatch, edgecolor="white")
        axes.bar_label(drawn, fmt="%.2f", fontsize=8)
        axes.bar([0], [0], color="#888888", hatch=hatch, edgecolor="white", label=label)
    axes.set_xticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylabel("share of plain")
    axes.set_title("Time and memory", loc="left", weight="bold")
    axes.set_ylim(0, 1.25 * max(1.0, *(run.step / runs[0].step for run in runs),
                                *(run.peak / max(1, runs[0].peak) for run in runs)))  # fmt: skip
    axes.legend(loc="upper left", ncols=2)


def draw_trials(axes: Axes, result: lo.TuneResult | None) -> None:
    """Draw what the tuner tried, by time and memory."""
    axes.set_title("What the tuner tried, beside basic", loc="left", weight="bold")
    axes.set(xlabel="time of a step, share of basic", ylabel="peak memory, share of basic")
    axes.margins(x=0.2, y=0.1)
    for trial in result.trials if result else []:
        if trial.ratio is None or trial.peak_ratio is None or trial.ratio > 3:
            continue
        best = result is not None and trial is result.best
        colour = COLOURS["tuned"] if best else "#888888"
        axes.scatter([trial.ratio], [trial.peak_ratio], color=colour, s=70 if best else 35)
        axes.annotate(
            trial.name, (trial.ratio, trial.peak_ratio), xytext=(5, 4),
            textcoords="offset points", fontsize=8, color=colour,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument(
        "--damaged", type=float, default=0.04, help="share of damaged batches (%(default)s)"
    )
    parser.add_argument("--budget", type=float, default=120.0, help="of the tuner, in seconds")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="all by default")
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="picture to write (%(default)s)"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begun = time.perf_counter()
    # Of the data more than the steps, so that no run sees a batch twice.
    data = SourceData(steps=args.steps + 50, damaged=args.damaged, seed=args.seed)
    make_data = functools.partial(SourceData, args.steps + 50, args.damaged, args.seed)
    model = functools.partial(DemoGPT, args.lr)
    settings: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": plain,
        "basic": functools.partial(preset, "basic"),
        "advanced": functools.partial(preset, "advanced"),
    }
    what = {
        "plain": "the Trainer as it comes",
        "basic": "preset('basic'), which watches and protects",
        "advanced": "preset('advanced'), which is meant to be faster too",
    }
    result = None
    notes: list[str] = []
    if "tuned" in args.runs:
        print(f"The tuner has {args.budget:.0f} s.", flush=True)
        result = tune(model, make_data, args.budget)
        result.table.print()
        print(result.explain(), flush=True)
        settings["tuned"] = result.trainer_kwargs
        what["tuned"] = f"preset('basic') and {' + '.join(result.switches) or 'nothing else'}"
        notes.append(f"The tuner took {result.seconds:.0f} s for {len(result.trials) - 1} trials.")
    print(f"{len(args.runs)} runs of {args.steps} steps, side by side.", flush=True)
    runs = [Run(name, what[name], settings[name]) for name in RUNS if name in args.runs]
    train(runs, functools.partial(model, args.steps), data, make_data, args.steps)
    took = time.perf_counter() - begun
    notes.append(f"{took:.0f} s in all, {torch.get_num_threads()} threads of a CPU.")
    title = f"A byte-level GPT on Python's standard library, {args.steps} steps, seed {args.seed}"
    summarise(runs, title, notes).print()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, result).savefig(args.out)
    print(f"{args.out.resolve()} drawn")


if __name__ == "__main__":
    main()
