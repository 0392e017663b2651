"""Loss of DiLoCo, plain and compressed DDP after the same steps, each at its best learning rate.

Claim: replicas that synchronize every 16 or 30 steps send a sixtieth of the bytes of plain DDP or
less, and end within 1% of its loss under AdamW.

Real processes over gloo train a byte-level transformer on the source of Python's standard library
(``--task digits``: a ConvNet on digits); the learning rate falls to zero linearly. All methods of a
seed start from the same weights and see the same batches. Outer momentum acts like a larger
learning rate, so each method is compared at its best rate: all rates are tried with seed 0, and the
best one again with the other seeds. Scores do not depend on the load of the machine, so they are
collected in pieces: each call continues the previous one if the code is the same, and ``--minutes``
limits it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

import lightning_opt as lo
from benchmarks.harness import continued, free_port, parse_arguments, publish
from benchmarks.strategies.compression import start_ranks
from benchmarks.strategies.compression_tasks import TASKS, trainer_of

MODULE = "benchmarks.strategies.diloco_accuracy"
FILES = {"bytes": "diloco_accuracy", "digits": "diloco_accuracy_digits"}
STEPS = {"bytes": 5000, "digits": 2000}
RANKS = 2

RATES = {"bytes": (1e-3, 2e-3, 3e-3, 6e-3, 1e-2), "digits": (5e-4, 1e-3, 2e-3, 4e-3)}

EVERY = 240
"""Steps between scores and byte counts: whole windows of 16 and of 30 steps."""


def _diloco(*arguments: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: lo.DiLoCoStrategy(*arguments, **settings)


METHODS: dict[str, Callable[[], Any]] = {
    "dense": lambda: "ddp",
    "ddp_topk 1%": lambda: lo.CompressedDDPStrategy("topk", every_n_steps=EVERY),
    "H=16, outer 1.0 and 0": _diloco(16, 1.0, 0.0),
    "H=30, 4 fragments, delay 5, int4": _diloco(
        30, 0.7, 0.8, fragments=4, delay=5, compression="int4"
    ),
    "H=30, 4 fragments, delay 5": _diloco(30, 0.7, 0.8, fragments=4, delay=5),
    "H=8, int4, outer 1.0 and 0": _diloco(8, 1.0, 0.0, compression="int4"),
    "H=16, float32, outer 1.0 and 0": _diloco(16, 1.0, 0.0, compression="float32"),
    "H=16, outer 1.0 and 0.4": _diloco(16, 1.0, 0.4),
}
"""Methods by name; the first is the baseline. Two numbers are the outer rate and momentum; the
defaults are 0.7, 0.8 and 8 bits."""

COMPARED = "ddp_topk 1%"


def run_rank(own: argparse.Namespace) -> None:
    """Train with one method at several rates, and write scores and bytes per step as JSON."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after a fit
    found = {}
    for rate in own.rates:
        found[rate] = train(own, world, float(rate))
        if dist.get_rank() == 0:
            own.result.write_text(json.dumps(found))
        dist.barrier()


class Curve(L.Callback):
    """The score of this process's weights during training."""

    def __init__(self) -> None:
        self.scores: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % EVERY == 0:
            self.scores.append(round(pl_module.eval().score(), 4))
            pl_module.train()


def train(own: argparse.Namespace, world: int, rate: float) -> dict[str, Any]:
    """Return the final score, the scores during training, and the bytes per step."""
    task = TASKS[own.task]("AdamW", world, own.seed)
    task.rates = (0.0, rate)
    curve = Curve()
    strategy = METHODS[own.method]()
    trainer = trainer_of(world, strategy, log_every_n_steps=EVERY, callbacks=[curve])
    trainer.fit(task, range(own.steps))
    score = task.eval().score()
    numel = sum(parameter.numel() for parameter in task.parameters())
    sent = trainer.callback_metrics.get("comm/bytes", 2 * (world - 1) * 4 * numel / world)
    return {"score": score, "curve": curve.scores, "bytes": float(sent)}


def best_rate(of_rates: dict[str, dict[str, Any]], task: str) -> str | None:
    """Return the best rate with seed 0; None until all are tried."""
    known = {
        rate: TASKS[task].better * own["0"]["score"] for rate, own in of_rates.items() if "0" in own
    }
    return max(known, key=known.__getitem__) if len(known) >= len(RATES[task]) else None


def next_run(
    scores: dict[str, Any], names: Sequence[str], seeds: int, task: str
) -> tuple[str, list[str], int] | None:
    """Return a method, rates and a seed that have not been tried yet, or None."""
    for name in names:
        of_rates = scores.setdefault(name, {})
        missing = [r for r in map(str, RATES[task]) if "0" not in of_rates.setdefault(r, {})]
        if missing:
            return name, missing, 0
    for seed in range(1, seeds):
        for name in names:
            best = best_rate(scores[name], task)
            assert best is not None
            if str(seed) not in scores[name][best]:
                return name, [best], seed
    return None


def report_of(scores: dict[str, Any], steps: int, task: str) -> lo.Report:
    """Return one row per method: its best rate, compared with plain DDP by seed."""
    kind = TASKS[task]
    rows = []
    best = {name: best_rate(of_rates, task) for name, of_rates in scores.items()}
    dense = scores.get("dense", {}).get(best.get("dense") or "", {})

    def distance(name: str) -> Any:
        """Return how much worse a method is: percent of a loss, or points of an accuracy."""
        own = scores[name][best[name]]
        pairs = [(own[s]["score"], dense[s]["score"]) for s in own if s in dense]
        if kind.better > 0:
            return statistics.median(usual - score for score, usual in pairs)
        return statistics.median(100 * (score / usual - 1) for score, usual in pairs)

    for name, of_rates in scores.items():
        rate = best[name]
        if rate is None or not dense:
            continue
        own = of_rates[rate]
        sent = next(iter(own.values()))["bytes"]
        known = kind.better < 0 and best.get(COMPARED) is not None
        rows.append(
            {
                "method": name,
                "best rate": float(rate),
                "seeds": len(own),
                "score": round(statistics.median(one["score"] for one in own.values()), 4),
                "spread": round(statistics.pstdev(one["score"] for one in own.values()), 4),
                "% worse": round(distance(name), 2),
                **(
                    {"% worse / Top-K's": round(distance(name) / distance(COMPARED), 2)}
                    if known
                    else {}
                ),
                "compression ratio": round(next(iter(dense.values()))["bytes"] / sent, 1),
            }
        )
    rates = ", ".join(map(str, RATES[task]))
    return lo.Report(
        f"{kind.name} after {steps} steps of AdamW on {RANKS} ranks, each method at its best "
        "learning rate",
        rows,
        [
            f"`best rate`: the best learning rate for seed 0, out of {rates}. `score`: median over "
            "seeds. `spread`: its standard deviation over seeds. `% worse`: difference to dense, "
            "in percent of the loss or percentage points of accuracy, median over seeds. `fewer "
            "bytes`: bytes that dense sends per step, divided by bytes that the method sends.",
            "Methods: H is the number of steps between two exchanges; outer is followed by the "
            "outer learning rate and the outer momentum. If not named, these are 0.7 and 0.8, and "
            "messages have 8 bits per element.",
        ],
    )


def steps_to(target: float, run: dict[str, Any], steps: int) -> float:
    """Return the step in which a loss is first reached, interpolated between two scores."""
    places = [*range(EVERY, steps, EVERY), steps]
    losses = [*run["curve"][: len(places) - 1], run["score"]]
    before = (0, losses[0])
    for place, loss in zip(places, losses, strict=True):
        if loss <= target:
            share = 0.0 if loss == before[1] else (before[1] - target) / (before[1] - loss)
            return before[0] + share * (place - before[0])
        before = place, loss
    return float("inf")


def time_report(scores: dict[str, Any], steps: int, out: Path) -> lo.Report | None:
    """Return a larger model's predicted seconds to a loss; None without records of its steps."""
    milliseconds = {}
    for file in ("compression", "diloco"):
        if (out / f"{file}.json").exists():
            for row in json.loads((out / f"{file}.json").read_text())["rows"]:
                if row["ranks"] == 2:
                    milliseconds[row["network"], row["strategy"]] = row["ms"]
    best = {name: best_rate(of_rates, "bytes") for name, of_rates in scores.items()}
    runs = {name: scores[name][rate].values() for name, rate in best.items() if rate is not None}
    known = [name for name in STEP_OF if STEP_OF[name][0] in runs]
    if "dense" not in runs or COMPARED not in runs:
        return None
    target = max(
        statistics.median(run["score"] for run in runs[STEP_OF[name][0]]) for name in known
    )
    rows = []
    for network in ("1 Gbit/s", "100 Mbit/s"):
        seconds = {}
        for name in known:
            method, step = STEP_OF[name]
            taken = statistics.median(steps_to(target, run, steps) for run in runs[method])
            if (ms := milliseconds.get((network, step))) is not None:
                seconds[name] = taken * ms / 1000
                row = {"network": network, "strategy": name, "steps": round(taken), "ms": ms}
                rows.append({**row, "hours": round(seconds[name] / 3600, 2)})
        for row in rows[-len(seconds) :] if seconds else []:
            for other in ("dense", "int8", "Top-K 1%"):
                if other in seconds:
                    share = seconds[str(row["strategy"])] / seconds[other]
                    row[f"hours / {other}"] = round(share, 3)
    return lo.Report(
        f"Predicted time to a loss of {target:.3f} on 2 ranks",
        rows,
        [
            "`steps`: steps until a byte-level GPT reaches the loss with AdamW, each strategy at "
            "its best rate, median over seeds; int8 is assumed to need as many as dense. `ms`: "
            "measured time of a step with 33.6 MB of weights over that network. `hours`: steps "
            "times ms."
        ],
    )


STEP_OF = {
    "dense": ("dense", "dense"),
    "int8": ("dense", "ddp_int8"),
    "Top-K 1%": ("ddp_topk 1%", "ddp_topk 1%"),
    "diloco, H=16": ("H=16, outer 1.0 and 0", "diloco, H=16"),
    "diloco_streaming": ("H=30, 4 fragments, delay 5, int4", "diloco_streaming, H=30"),
}
"""The method of the losses and the method of the step time, by name."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--task", choices=list(RATES), default="bytes")
    parser.add_argument("--method", choices=list(METHODS))
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after")
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    steps = 40 if arguments.quick else own.steps or STEPS[own.task]
    file = FILES[own.task]
    earlier = continued(file, arguments)
    scores = earlier["scores"] if earlier.get("steps") == steps else {}
    end = time.monotonic() + 60 * own.minutes
    while time.monotonic() < end:
        run = next_run(scores, own.only, own.seeds, own.task)
        if run is None:
            break
        name, rates, seed = run
        options = ["--task", own.task, "--method", name, "--seed", seed, "--steps", steps]
        found = start_ranks(MODULE, RANKS, [*options, "--rates", *rates], port=free_port())
        for rate, score in found.items():
            scores[name][rate][str(seed)] = score
        report = report_of(scores, steps, own.task)
        publish(file, report, arguments, scores=scores, steps=steps)
    if own.task == "bytes":
        timed = time_report(scores, steps, arguments.out)
        if timed is not None:
            publish("diloco_time_to_loss", timed, arguments)


if __name__ == "__main__":
    main()
