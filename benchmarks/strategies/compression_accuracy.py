"""Accuracy of compressed DDP after the same number of steps, as a difference to plain DDP.

Claim: int8 and int4 cost next to no accuracy, with SGD with momentum and with AdamW; sending 1% of
the gradient's elements with error feedback and a ramp costs little, and without error feedback
visibly more.

Real processes over gloo. Two tasks: a small ConvNet on scikit-learn's digits (test accuracy), and a
byte-level transformer on the source of Python's standard library (validation loss). All strategies
of a seed start from the same weights and see the same batches; learning rates fall to zero
linearly. Scores do not depend on the load of the machine, so they are collected in pieces: each
call continues the previous one if the code is the same, and ``--minutes`` limits it.
The second table has one batch whose loss is 300 times too large on one rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_opt as lo
from benchmarks.harness import continued, free_port, parse_arguments, publish
from benchmarks.strategies.compression import start_ranks
from benchmarks.strategies.compression_tasks import TASKS, Task, trainer_of

MODULE = "benchmarks.strategies.compression_accuracy"
ACCURACY = "compression_accuracy"

Scores = dict[str, dict[str, dict[str, float]]]
"""A score by place, strategy and seed."""

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

STEPS, STEPS_WITH_OUTLIER = 1000, 120

PIECE = 1200.0
"""Timeout of one training of all strategies, in seconds."""


OPTIMIZERS = ("SGD", "AdamW")

PARTS = ("score", "outlier")

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
    scores: dict[str, float] = {}
    for name in own.only:
        trainer = trainer_of(world, STRATEGIES[name](), **PROTECTIONS[own.protection]())
        task = TASKS[own.task](own.optimizer, world, own.seed)
        task.bad_batch = own.bad_batch
        trainer.fit(task, range(own.steps))
        scores[name] = task.eval().score()
        dist.barrier()
        if dist.get_rank() == 0:
            own.result.write_text(json.dumps(scores))
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
    parser.add_argument("--protection", choices=list(PROTECTIONS), default="none")
    parser.add_argument("--bad-batch", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no piece after")
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    if "score" in own.parts:
        collect_scores(own, arguments)
    if "outlier" in own.parts:
        score_outliers(own, arguments)


def collect_scores(own: argparse.Namespace, arguments: argparse.Namespace) -> None:
    """Train what earlier calls have not trained, seed by seed, and publish after each training.

    Two ranks come before four, so that the first calls complete a table.
    """
    end = time.monotonic() + 60 * own.minutes
    scores: Scores = continued(ACCURACY, arguments).get("scores", {})
    wanted = list(own.only or STRATEGIES)
    seeds = range(own.seeds or (1 if arguments.quick else 3))
    places = itertools.product(own.ranks, seeds, own.tasks, own.optimizers)
    for ranks, seed, task, optimizer in places:
        steps = own.steps or (40 if arguments.quick else STEPS)
        cell = scores.setdefault(f"{task}, {optimizer}, {ranks} ranks, {steps} steps", {})
        missing = [name for name in wanted if str(seed) not in cell.get(name, {})]
        if not missing or time.monotonic() > end:
            continue
        options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seed", seed]
        options += ["--only", *missing]
        found = start_ranks(MODULE, ranks, options, port=free_port(), timeout=PIECE)
        for name, score in found.items():
            cell.setdefault(name, {})[str(seed)] = score
        publish(ACCURACY, accuracy_report(scores), arguments, scores=scores)


def score_outliers(own: argparse.Namespace, arguments: argparse.Namespace) -> None:
    """Train with and without one batch whose loss is 300 times too large on one rank."""
    task, steps = "bytes", own.steps or (40 if arguments.quick else STEPS_WITH_OUTLIER)
    names = list(own.only or ("dense", "int8", "topk 1%, no ramp"))
    seeds = range(own.seeds or (1 if arguments.quick else 3))
    title = f"{TASKS[task].name} after {steps} steps, with and without a bad batch in the middle"
    rows: list[dict[str, Any]] = []
    for optimizer, protection in itertools.product(own.optimizers, PROTECTIONS):
        scores: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
        for seed, bad in itertools.product(seeds, (False, True)):
            options = ["--task", task, "--optimizer", optimizer, "--steps", steps, "--seed", seed]
            options += ["--protection", protection, "--only", *names]
            options += ["--bad-batch", steps // 2] if bad else []
            found = start_ranks(MODULE, 2, options, port=free_port(), timeout=PIECE)
            for name, score in found.items():
                scores[name][bad].append(score)
        rows += [
            {
                "optimizer": optimizer,
                "protection": protection,
                "strategy": name,
                "without": round(statistics.mean(usual), 3),
                "with": round(statistics.mean(hit), 3),
                "spread": round(max(hit) - min(hit), 3),
            }
            for name, (usual, hit) in scores.items()
        ]
        report = lo.Report(
            title,
            rows,
            [
                f"Two ranks, means over {len(seeds)} seeds. `without`, `with`: final loss without "
                "and with a batch on which one rank's loss is 300 times too large. `spread`: the "
                "largest minus the smallest `with` of all seeds. `clipping`: gradient_clip_val=1. "
                "`guard`: NonFiniteGuard(spike=8)."
            ],
        )
        publish("compression_outlier", report, arguments)


def accuracy_report(scores: Scores) -> lo.Report:
    """Return the table of final scores, for seeds that were also trained with plain DDP."""
    rows = []
    for place in sorted(scores, key=lambda place: place.split(", ")[::-1]):
        task, optimizer, ranks, steps = place.split(", ")
        rows += rows_of(TASKS[task], optimizer, int(ranks.split()[0]), steps, scores[place])
    return lo.Report(
        "Final scores, compared with plain DDP",
        rows,
        [
            "`score`: mean of the final scores over seeds. `% worse`: mean difference to dense of "
            "the same seed, in percentage points of accuracy or percent of the loss; negative is "
            "better. `spread`: standard deviation of this difference over seeds."
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
                "% worse": round(statistics.mean(worse), 2),
                "spread": round(statistics.pstdev(worse), 2),
            }
        )
    return rows


if __name__ == "__main__":
    main()
