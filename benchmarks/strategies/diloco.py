"""Step time of DiLoCo over a slow network, as a ratio to training without any network.

Claim: over 100 Mbit/s, where plain DDP takes tens of times as long, `diloco` takes less than twice
as long as no exchange at all, and `diloco_streaming` some ten milliseconds per step more.

Each process has its own network namespace, as in compression.py: the same model (33.6 MB of
float32), the same limits by `tc tbf`. Most steps of a window send nothing, so whole windows are
timed and divided by their steps. The baseline without a network is the same strategy with an
endless window. That needs root, `ip` and `tc`; elsewhere the script prints that and ends.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.models import quiet_trainer
from benchmarks.strategies.compression import (
    COMPILED,
    NETWORKS,
    Network,
    Stopwatch,
    exit_on_sigterm,
    measure,
    time_in_rounds,
    why_not,
)
from lightning_opt.strategies.strategy_strings import STRATEGIES

MODULE = "benchmarks.strategies.diloco"

NONE = "no network"

STREAMING = STRATEGIES["diloco_streaming"][1]

CANDIDATES: dict[str, dict[str, Any]] = {
    NONE: {"sync_every": 10**6},
    "diloco, H=16": {"sync_every": 16},
    "diloco, H=16, int4": {"sync_every": 16, "compression": "int4"},
    "diloco, H=30": {"sync_every": 30},
    "diloco_streaming, H=30": STREAMING,
}
"""Arguments of the strategy, by name."""

WARMUP, WINDOWS = 3, 2
"""Windows that are not timed, in which the allocator learns the sizes of the exchange; and those
that are."""


def run_rank(own: argparse.Namespace) -> None:
    """Time every candidate, round by round."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after the first fit
    time_in_rounds(own.only, lambda name: time_candidate(CANDIDATES[name], world), own)


def time_candidate(settings: dict[str, Any], world: int) -> tuple[float, float, None]:
    """Return the mean seconds and bytes per step over whole windows, and None for a choice."""
    window = min(settings["sync_every"], 30)
    start = WARMUP * window
    steps = start + WINDOWS * window
    watch = Stopwatch()
    strategy = lo.DiLoCoStrategy(**settings)
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=steps, callbacks=[watch])
    trainer.fit(Network(), range(steps))
    dist.barrier()
    timed = WINDOWS * window
    return (
        (watch.times[-1] - watch.times[start - 1]) / timed,
        (watch.sent[-1] - watch.sent[start - 1]) / timed,
        None,
    )


def rows_of(ranks: int, network: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per candidate, with medians of the ratios within a round."""
    seconds, sent = found["seconds"], found["bytes"]
    # A ring all-reduce of the same gradients, without headers.
    numel = sum(parameter.numel() for parameter in Network().parameters())
    dense = 2 * (ranks - 1) * 4 * numel / ranks
    return [
        {
            "ranks": ranks,
            "network": network,
            "strategy": name,
            "rounds": len(own),
            "ms": round(1000 * statistics.median(own), 1),
            "step": round(median_ratio(own, seconds[NONE]), 3),
            "compression ratio": round(dense / statistics.median(sent[name]), 1)
            if name != NONE
            else None,
        }
        for name, own in seconds.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="for rounds on each network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["100 Mbit/s"])
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    own.only = [name for name in CANDIDATES if name in {NONE, *own.only}]
    arguments = parse_arguments(__doc__ or "", rest)
    exit_on_sigterm()
    reason = why_not()
    if reason is not None:
        print(f"This machine does not allow the benchmark's own networks: {reason}")
        return
    seconds = 0.0 if arguments.quick else own.seconds
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for ranks, network in itertools.product(own.ranks, own.networks):
        options = ["--seconds", seconds, "--only", *own.only]
        found = measure(MODULE, ranks, network, options, 10 * seconds + 300)
        raw[f"{ranks} ranks, {network}"] = found
        rows += rows_of(ranks, network, found)
        notes = [
            "`H`: steps of a window, that is between two exchanges. `step`: time of a step, as a "
            f"ratio to training without a network. Times are means over {WINDOWS} windows, after "
            f"{WARMUP} untimed windows, then medians over rounds. {COMPILED} `compression ratio`: "
            "bytes that a ring all-reduce of the gradients would send per step, divided by bytes "
            f"that the strategy sends per step, headers included. `diloco_streaming`: {STREAMING}."
        ]
        title = "Step time of DiLoCo with 33.6 MB of weights, compared with no network"
        publish("diloco", lo.Report(title, rows, notes), arguments, found=raw)


if __name__ == "__main__":
    main()
