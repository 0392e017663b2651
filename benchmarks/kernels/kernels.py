"""Time and memory of each compute feature of lightning_opt, alone and combined.

Supports the table of the documentation: a vision transformer with rotary attention, a ConvNet and a
byte-level GPT, each trained by a Lightning Trainer in a plain version (attention by hand, rotary
angles computed at each call, AdamW as torch makes it, float32, no compilation) and with one switch
or all of them on. Each configuration is a process of its own, which has run nothing else; they stay
alive side by side and train some steps in turn, so that a slow minute hits all of them. Times are
medians over rounds of the ratio to the plain version within a round. The peak is taken in the same
process after the last round: on a CPU how far one step raises the process's resident memory, on
CUDA the same of torch's allocator. Runs in under nine minutes on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.kernels.kernels_models import MODELS, Batches, Learner, Parts
from lightning_opt.core.measure.memory import PeakMeter, libc_function, malloc_trim, resident_memory
from lightning_opt.core.measure.timing import take_turns
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

GPU = True
M_MMAP_THRESHOLD = -3
"""Of ``mallopt`` in glibc."""
WARMUP = 4
"""Steps before the timed ones; they include compilation and the callbacks' measurements."""
LIMIT = 400.0
"""Seconds after which a process counts as hanging."""


PLAIN = Parts()


@dataclass(frozen=True)
class Switch:
    """One configuration: callbacks and settings by name, so that it can be sent to a process."""

    parts: Parts = PLAIN
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    precision: str = "32-true"


FUSED: dict[str, Any] = {"FusedOptimizer": {}}
RUNTIME: dict[str, Any] = {"Runtime": {}}
BOTH = Parts(sdpa=True, cached=True)


def switches(model: str, device: str) -> dict[str, Switch]:
    """Return the configurations that apply to a model, the plain one first."""
    attention = model != "ConvNet"
    convolutions = model != "byte GPT"
    found = {"plain Lightning": Switch()}
    if attention:
        found["SelfAttention"] = Switch(Parts(sdpa=True))
        found["RotaryEmbedding"] = Switch(Parts(cached=True))
    found["FusedOptimizer"] = Switch(callbacks=FUSED)
    if convolutions:
        found["ChannelsLast"] = Switch(callbacks={"ChannelsLast": {}})
    found["CompileModel, model"] = Switch(callbacks={"CompileModel": {"scope": "model"}})
    found["CompileModel, regions"] = Switch(callbacks={"CompileModel": {"scope": "regions"}})
    found["Runtime"] = Switch(callbacks=RUNTIME)
    found["bf16-mixed"] = Switch(precision="bf16-mixed")
    # On a CPU a C++ compiler takes minutes for a whole model, and regions take seconds.
    scope = "model" if device == "cuda" else "regions"
    together = {**RUNTIME, **FUSED, "CompileModel": {"scope": scope}}
    if convolutions:
        together["ChannelsLast"] = {}
    parts = BOTH if attention else PLAIN
    found["all but bf16-mixed"] = Switch(parts, together)
    found["all"] = Switch(parts, together, "bf16-mixed")
    return found


def compiles(switch: Switch) -> bool:
    return "CompileModel" in switch.callbacks


class StepMemory(L.Callback):
    """Measures how far a step raises memory, whenever a file exists, and writes it there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._meter: PeakMeter | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self._file.exists():
            return
        gc.collect()
        if module.device.type == "cuda":
            self._floor = torch.cuda.memory_allocated()
        else:
            # Allocate each tensor in its own pages and return free memory: the peak starts low.
            libc_function("mallopt")(M_MMAP_THRESHOLD, 2**16)
            malloc_trim()
            self._floor = resident_memory()
        self._meter = PeakMeter(module.device)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._meter is not None:
            found = {"peak": self._meter.read() - self._floor}
            for name in ("seconds", "uncompiled"):
                found[name] = float(trainer.callback_metrics.get(f"compile/{name}", 0.0))
            self._file.write_text(json.dumps(found))


def settings(switch: Switch, device: str, file: Path) -> dict[str, Any]:
    """Return the Trainer's arguments of a configuration."""
    callbacks = [getattr(lo, key)(**value) for key, value in switch.callbacks.items()]
    return {
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "devices": 1,
        "precision": switch.precision,
        "callbacks": [*callbacks, StepMemory(file)],
    }


def loader(name: str, size: str, device: str) -> DataLoader[Any]:
    batches = Batches(Learner(name, size, PLAIN))
    return DataLoader(batches, batch_size=None, pin_memory=device == "cuda")


def start(
    name: str, size: str, device: str, wanted: dict[str, Switch], folder: Path, stack: ExitStack
) -> dict[str, TrainingProcess]:
    """Return the warmed-up runs of a model, without failed ones.

    As many start at once as there are CPUs. On a GPU they also compile side by side.
    """
    runs: dict[str, TrainingProcess] = {}
    data = partial(loader, name, size, device)
    for number, (label, switch) in enumerate(wanted.items()):
        run = TrainingProcess(
            partial(Learner, name, size, switch.parts),
            data,
            partial(settings, switch, device, folder / f"{number}"),
            timeout=LIMIT,
        )
        runs[label] = stack.enter_context(run)
        if (number + 1) % min(os.cpu_count() or 1, 16) == 0 or number + 1 == len(wanted):
            waiting = {label: run for label, run in runs.items() if not run.steps}
            compiled = [label for label in waiting if device == "cuda" and compiles(wanted[label])]
            with ThreadPoolExecutor() as pool:
                warm_up = {label: pool.submit(waiting[label].advance, WARMUP) for label in compiled}
                for label, run in waiting.items():
                    try:
                        warm_up[label].result() if label in warm_up else run.advance(WARMUP)
                    except FitFailed as failure:
                        print(f"{name}, {label}: {failure}", failure.details, sep="\n", flush=True)
                        del runs[label]
    return runs


def measure(
    name: str, size: str, device: str, rounds: int, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    wanted = {
        label: switch
        for label, switch in switches(name, device).items()
        if only is None or label in only or label == "plain Lightning"
    }
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        runs = start(name, size, device, wanted, Path(folder), stack)
        labels = list(runs)
        # Equal numbers of steps for all, since losses are compared.
        first = {label: run.advance(2)[-1].seconds for label, run in runs.items()}
        steps = max(2, min(50, round(0.3 / first["plain Lightning"])))

        def turn(run: TrainingProcess) -> float:
            # The first step after a pause is slower.
            return statistics.fmean(taken.seconds for taken in run.advance(steps + 1)[1:])

        timers = {label: partial(turn, run) for label, run in runs.items()}
        found = list(itertools.islice(take_turns(timers), rounds))
        seconds = {label: [one[label] for one in found] for label in labels}
        losses = {label: run.steps[-1].loss for label, run in runs.items()}
        memory: dict[str, dict[str, float]] = {}
        for number, label in enumerate(wanted):
            if label not in runs:
                continue
            file = Path(folder) / f"{number}"
            file.touch()
            runs[label].advance(2)  # the first one starts with the heap of the rounds
            memory[label] = json.loads(file.read_text())
    reference = seconds["plain Lightning"]
    rows = []
    for label in labels:
        ratio = median_ratio(seconds[label], reference)
        peak = memory[label]["peak"]
        rows.append(
            {
                "model": name,
                "switch": label + (" (did not compile)" if memory[label]["uncompiled"] else ""),
                "time": round(ratio, 3),
                "times faster": round(1 / ratio, 2),
                "ms": round(1e3 * statistics.median(seconds[label]), 2) if ratio == 1 else None,
                "peak": round(peak / memory["plain Lightning"]["peak"], 3),
                "peak MiB": round(peak / 2**20, 1),
                "loss": round(losses[label], 4),
                "compiling s": round(memory[label]["seconds"], 1) or None,
            }
        )
    return rows


NOTES = [
    "`time`, `peak`: ratios to plain Lightning (hand-written attention, rotary angles computed at "
    "each call, torch's default AdamW, float32, no compilation). `peak`: by how much a step raises "
    "memory: activations, temporary tensors and gradients, but not weights and optimizer state. "
    "`loss`: at the last timed step, after equally many steps in all rows of a model.",
    "`SelfAttention`: torch's attention instead of the hand-written one. `RotaryEmbedding`: cached "
    "angles. `all`: all switches of the model; CompileModel then compiles the whole model on CUDA, "
    "and regions on a CPU.",
]


def main() -> None:
    """Measure every model, and publish the table after each."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, help="rounds of timing (9; 5 on CUDA)")
    parser.add_argument("--switches", nargs="+", help="only these, and plain Lightning")
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rest)
    size = "quick" if arguments.quick else arguments.device
    rounds = own.rounds or (3 if arguments.quick else 5 if arguments.device == "cuda" else 9)
    rows: list[dict[str, Any]] = []
    for name in own.models:
        rows += measure(name, size, arguments.device, rounds, own.switches)
        report = lo.Report("Compute switches, compared with plain Lightning", rows, NOTES)
        publish("compute", report, arguments)


if __name__ == "__main__":
    main()
