"""Accuracy of compressed DDP after the same number of steps, as a difference to plain DDP.

Claim: with error feedback and a ramp, sending 1% of the gradient's elements costs next to no
accuracy, and without error feedback visibly more, with SGD with momentum and with AdamW; over a
slow network the same accuracy is reached in a fraction of the time.

Real processes over gloo. Two tasks: a small ConvNet on scikit-learn's digits (test accuracy), and a
byte-level transformer on the source of Python's standard library (validation loss). All strategies
of a seed start from the same weights and see the same batches; learning rates fall to zero
linearly. Scores do not depend on the load of the machine, so they are collected in pieces: each
call continues the previous one, ``--minutes`` limits it, ``--fresh`` starts over.
The second table times the first seed in network namespaces at 100 Mbit/s, see compression.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

import lightning_opt as lo
from benchmarks.harness import free_port, parse_arguments, publish
from benchmarks.strategies.compression import NETWORKS, namespaces, start_ranks, why_not
from benchmarks.strategies.compression_tasks import TASKS, Task, trainer_of

MODULE = "benchmarks.strategies.compression_accuracy"

LOOKS = 20
"""Number of scores of a timed run."""

NETWORK = "100 Mbit/s"

REACHED_BY_DENSE = 0.8
"""The target of the timed runs is the score that plain DDP has after this share of its steps."""


_compressed = lo.CompressedDDPStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "dense": lambda: "ddp",
    "int8": lambda: _compressed("int8"),
    "int4": lambda: _compressed("int4"),
    "topk 1%": lambda: _compressed("topk"),
    "topk 0.1%": lambda: _compressed("topk", ratio=0.001),
    "topk 1%, no ramp": lambda: _compressed("topk", ramp_steps=0),
    "topk 1%, no ramp, no error feedback": lambda: _compressed(
        "topk", ramp_steps=0, error_feedback=False
    ),
}
"""Strategies by name; the first is the baseline."""

TIMED = ("dense", "int8", "int4", "topk 1%")

STEPS = {"digits": 1000, "bytes": 1000}
"""Steps of a run."""

PIECE = 1200.0
"""Timeout of one training of all strategies, in seconds."""


class Scores(L.Callback):
    """Scores the model at intervals, with the seconds of training so far."""

    def __init__(self, steps: int, looks: int) -> None:
        self.every = max(steps // looks, 1)
        self.curve: list[tuple[float, float]] = []
        self._seconds = 0.0
        self._since = time.perf_counter()

    def on_train_start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._seconds += time.perf_counter() - self._since
            model.eval()
            self.curve.append((self._seconds, model.score()))
            model.train()
            dist.barrier()
            self._since = time.perf_counter()


OPTIMIZERS = ("SGD", "AdamW")

PARTS = ("score", "outlier", "time")

PROTECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "clipping": lambda: {"gradient_clip_val": 1.0},
    "guard": lambda: {"callbacks": [lo.NonFiniteGuard(spike=8.0)]},
}
"""Arguments of the Trainer that protect against a bad batch."""


def run_rank(own: argparse.Namespace) -> None:
    """Train with every strategy, and write the scores as JSON."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after a fit
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in own.only:
        scores = Scores(own.steps, own.looks)
        settings = PROTECTIONS[own.protection]()
        settings["callbacks"] = [*settings.get("callbacks", []), scores]
        trainer = trainer_of(world, STRATEGIES[name](), **settings)
        task = TASKS[own.task](own.optimizer, world, own.seed)
        task.bad_batch = own.bad_batch
        trainer.fit(task, range(own.steps))
        curves[name] = scores.curve
        dist.barrier()
        if dist.get_rank() == 0:
            own.result.write_text(json.dumps(curves))
    dist.barrier()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--task", choices=list(TASKS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--optimizer")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--only", nargs="*", choices=list(STRATEGIES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--looks", type=int, default=1)
    parser.add_argument("--protection", choices=list(PROTECTIONS), default="none")
    parser.add_argument("--bad-batch", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no piece after")
    parser.add_argument("--fresh", action="store_true", help="forget the scores of earlier calls")
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are removed then too
    if "score" in own.parts:
        collect_scores(own, arguments)
    if "outlier" in own.parts:
        score_outliers(own, arguments)
    if "time" in own.parts:
        time_runs(own, arguments)


def steps_of(task: str, own: argparse.Namespace, arguments: argparse.Namespace) -> int:
    """Return the number of steps of a task."""
    return own.steps or (40 if arguments.quick else STEPS[task])


def collect_scores(own: argparse.Namespace, arguments: argparse.Namespace) -> None:
    """Train what earlier calls have not trained, seed by seed, and publish after each training.

    Two ranks come before four, so that the first calls complete a table.
    """
    end = time.monotonic() + 60 * own.minutes
    path = arguments.out / f"{ACCURACY}.json"
    scores: dict[str, dict[str, dict[str, float]]] = {}
    if path.exists() and not (own.fresh or arguments.quick):
        scores = json.loads(path.read_text())["scores"]
    wanted = list(own.only or STRATEGIES)
    seeds = range(own.seeds or (1 if arguments.quick else 3))
    places = itertools.product(own.ranks, seeds, own.tasks, own.optimizers)
    for ranks, seed, task, optimizer in places:
        steps = steps_of(task, own, arguments)
        cell = scores.setdefault(f"{task}, {optimizer}, {ranks} ranks, {steps} steps", {})
        missing = [name for name in wanted if str(seed) not in cell.get(name, {})]
        if not missing or time.monotonic() > end:
            continue
        options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seed", seed]
        options += ["--only", *missing]
        curves = start_ranks(MODULE, ranks, options, port=free_port(), timeout=PIECE)
        for name, curve in curves.items():
            cell.setdefault(name, {})[str(seed)] = curve[-1][1]
        publish(ACCURACY, accuracy_report(scores), arguments, scores=scores)


def score_outliers(own: argparse.Namespace, arguments: argparse.Namespace) -> None:
    """Train with and without one batch whose loss is 300 times too large on one rank.

    Results of earlier calls with other optimizers and as many steps are kept.
    """
    task, steps = "bytes", own.steps or (40 if arguments.quick else 400)
    names = list(own.only or ("dense", "int8", "topk 1%, no ramp"))
    seeds = range(own.seeds or (1 if arguments.quick else 3))
    title = f"{TASKS[task].name} after {steps} steps, with and without a bad batch in the middle"
    path = arguments.out / "compression_outlier.json"
    rows: list[dict[str, Any]] = []
    if path.exists() and not (own.fresh or arguments.quick):
        kept = json.loads(path.read_text())
        if kept["title"] == title:
            rows = [
                {key: math.nan if value is None else value for key, value in row.items()}
                for row in kept["rows"]
                if row["optimizer"] not in own.optimizers
            ]
    for optimizer, protection in itertools.product(own.optimizers, PROTECTIONS):
        scores: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in names}
        for seed, bad in itertools.product(seeds, (False, True)):
            options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seed", seed]
            options += ["--protection", protection, "--only", *names]
            options += ["--bad-batch", steps // 2] if bad else []
            curves = start_ranks(MODULE, 2, options, port=free_port(), timeout=PIECE)
            for name, curve in curves.items():
                scores[name][bad].append(curve[-1][1])
        rows += [
            {
                "optimizer": optimizer,
                "protection": protection,
                "strategy": name,
                "without": round(statistics.mean(found[False]), 3),
                "with": round(statistics.mean(found[True]), 3),
                "spread": round(max(found[True]) - min(found[True]), 3),
            }
            for name, found in scores.items()
        ]
        report = lo.Report(
            title,
            rows,
            [
                f"Two ranks, means over {len(seeds)} seeds; `spread`: the largest minus the "
                "smallest with the bad batch, on which one rank's loss is 300 times too large. "
                "`clipping`: gradient_clip_val=1; `guard`: NonFiniteGuard(spike=8)."
            ],
        )
        publish("compression_outlier", report, arguments)


def time_runs(own: argparse.Namespace, arguments: argparse.Namespace) -> None:
    """Time the first seed over a slow network."""
    reason = why_not()
    if reason is not None:
        print(f"This machine does not allow the benchmark's own networks: {reason}")
        return
    rows = []
    raw = {}
    for task, optimizer in itertools.product(own.tasks, own.optimizers):
        steps = steps_of(task, own, arguments)
        options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seed", 0]
        options += ["--looks", LOOKS]
        with namespaces(2, NETWORKS[NETWORK]) as names:
            curves = start_ranks(
                MODULE,
                2,
                [*options, "--only", *TIMED],
                namespaces=names,
                address="10.99.0.1",
                interface="eth0",
            )
        raw[f"{task}, {optimizer}, {steps} steps"] = curves
        rows += times_of(TASKS[task], optimizer, curves)
        publish("compression_time_to_accuracy", time_report(rows), arguments, curves=raw)


ACCURACY = "compression_accuracy"


def accuracy_report(scores: dict[str, dict[str, dict[str, float]]]) -> lo.Report:
    """Return the table of final scores, for seeds that were also trained with plain DDP."""
    rows = []
    for place in sorted(scores, key=lambda place: place.split(", ")[::-1]):
        task, optimizer, ranks, steps = place.split(", ")
        rows += rows_of(TASKS[task], optimizer, int(ranks.split()[0]), steps, scores[place])
    return lo.Report(
        "Scores at the end, compared with plain DDP",
        rows,
        [
            "Means over the seeds. `worse by`: mean over seeds of the difference to dense, in "
            "percentage points for the accuracy, in percent for the loss; negative is better. "
            "`spread`: standard deviation of that difference."
        ],
    )


def time_report(rows: list[dict[str, Any]]) -> lo.Report:
    """Return the table of seconds until a score is reached."""
    return lo.Report(
        f"Seconds to an accuracy between two ranks at {NETWORK}",
        rows,
        [
            f"`target`: what plain DDP has reached after {REACHED_BY_DENSE:.0%} of the steps. "
            "`seconds`: training until the target is first reached, looked at "
            f"{LOOKS} times a run; `of dense`: as a ratio to plain DDP. One seed."
        ],
    )


def rows_of(
    task: type[Task],
    optimizer: str,
    ranks: int,
    steps: str,
    scores: dict[str, dict[str, float]],
) -> list[dict[str, Any]]:
    """Return one row per strategy, with its scores by seed."""
    rows = []
    baseline = scores.get("dense", {})
    for name in sorted(scores, key=list(STRATEGIES).index):
        seeds = [seed for seed in scores[name] if seed in baseline]
        own = [scores[name][seed] for seed in seeds]
        worse = [
            (dense - score) if task.better > 0 else 100 * (score - dense) / dense
            for score, dense in zip(own, (baseline[seed] for seed in seeds), strict=True)
        ]
        if not seeds:
            continue
        rows.append(
            {
                "task": task.name,
                "optimizer": optimizer,
                "steps": steps.split()[0],
                "ranks": ranks,
                "seeds": len(seeds),
                "strategy": name,
                "score": round(statistics.mean(own), 3),
                "worse by": round(statistics.mean(worse), 2),
                "spread": round(statistics.pstdev(worse), 2),
            }
        )
    return rows


def times_of(
    task: type[Task], optimizer: str, curves: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """Return one row per strategy, with the seconds until its score reached the target."""
    dense = curves["dense"]
    target = dense[max(round(REACHED_BY_DENSE * len(dense)) - 1, 0)][1]
    reached = {
        name: next(
            (seconds for seconds, score in curve if task.better * (score - target) >= 0), None
        )
        for name, curve in curves.items()
    }
    return [
        {
            "task": task.name,
            "optimizer": optimizer,
            "target": round(target, 3),
            "strategy": name,
            "seconds": "not reached" if seconds is None else round(seconds, 1),
            "of dense": "" if seconds is None else round(seconds / (reached["dense"] or 1.0), 3),
        }
        for name, seconds in reached.items()
    ]


if __name__ == "__main__":
    main()
